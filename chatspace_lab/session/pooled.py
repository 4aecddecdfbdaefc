"""One activation per prompt and layer, with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chatspace_lab.errors import RequestError
from chatspace_lab.session.history import describe
from chatspace_lab.steering.specs import SteeringSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class PooledActivations:
    """Activations of many prompts, one row each per layer.

    Attributes
    ----------
    values
        ``[prompts, layers, hidden_size]`` float32, in the order of the prompts. NaN where there was nothing to pool: an
        answer of a single token has no row (``rows["rows"]`` is 0 then).
    layers
        Labels of the second axis. Layer i is the output of decoder block i.
    rows
        Labels of the first axis: a table with ``prompt_index``, ``asked`` (the prompt, or the last message),
        ``text`` (the answer), ``prompt_tokens``, ``tokens`` (generated) and ``rows`` (how many were pooled).
    how
        ``"mean"`` or ``"last"``.
    steering
        What steered all of the prompts; ``SteeringSpec.none()`` if nothing did. :attr:`steered` has it in words.
    left_out
        The tokens that no mean counts, as attention sinks: ``prompt_index``, ``layer``, ``position``, ``token_id``,
        ``token``, ``norm`` and ``times`` (the norm over the mean of the others). Empty with ``"last"``.
    """

    values: np.ndarray
    layers: tuple[int, ...]
    rows: pd.DataFrame
    how: str
    steering: SteeringSpec
    left_out: pd.DataFrame

    @property
    def steered(self) -> str:
        """``"unsteered"``, or ``"steered: …"`` in a few words."""
        return steered(self.steering)

    def layer(self, layer_idx: int) -> np.ndarray:
        """Return ``[prompts, hidden_size]`` float32.

        Raises
        ------
        RequestError
            If that layer was not captured.
        """
        if layer_idx not in self.layers:
            raise RequestError(f"layer {layer_idx} was not captured, only {list(self.layers)}")
        return self.values[:, self.layers.index(layer_idx)].copy()  # a view would keep all layers in memory

    def by_layer(self) -> dict[int, np.ndarray]:
        """Return ``{layer: [prompts, hidden_size]}``, as the directions of :mod:`chatspace_lab.analysis` take it."""
        return {layer: self.layer(layer) for layer in self.layers}

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.values.shape))
        return (
            f"PooledActivations({self.how}, {shape} [prompts, layers, hidden_size], layers {list(self.layers)}, "
            f"{self.steered})"
        )


def steered(spec: SteeringSpec) -> str:
    """Return in words what steered a capture."""
    return f"steered: {describe(spec)}" if spec else "unsteered"

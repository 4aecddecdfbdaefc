"""Named directions that activations are read along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.steering.vectors import as_direction


@dataclass(frozen=True, eq=False)
class DirectionSet:
    """Named directions, laid out for some layers.

    Attributes
    ----------
    names
        One per direction.
    layers
        For which they are laid out.
    units
        ``[layers, directions, hidden_size]`` float32, of unit length; the first axis is 1 if all layers share them.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    units: np.ndarray

    @classmethod
    def of(cls, directions: Mapping[str, Any] | None, layers: Iterable[int], hidden_size: int) -> DirectionSet:
        """Lay out ``{name: vector}``, or ``{name: {layer: vector}}``; a vector has ``[hidden_size]`` entries.

        Raises
        ------
        RequestError, SteeringError
            Naming the direction that cannot be used, or the layer for which it has no vector.
        """
        chosen = tuple(layers)
        given = {} if directions is None else directions
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            name = getattr(given, "name", "…")
            raise RequestError(
                f"directions must be a dict of name to vector, or names in lab.vectors, got {type(given).__name__}; "
                f'write {{"{name}": direction}}'
            )
        per_layer = any(is_per_layer(vector) for vector in given.values())
        rows = [
            [_unit(name, vector, layer, hidden_size) for name, vector in given.items()]
            for layer in (chosen if per_layer else chosen[:1])
        ]
        shape = (len(rows), len(given), hidden_size)
        units = np.array([[unit.numpy() for unit in row] for row in rows], dtype=np.float32).reshape(shape)
        return cls(tuple(given), chosen, units)


def is_per_layer(vector: Any) -> bool:
    """Whether ``vector`` holds one per layer: a dict, or an object with ``layers`` and ``at(layer)``."""
    return isinstance(vector, Mapping) or (hasattr(vector, "at") and hasattr(vector, "layers"))


def at_layer(vector: Any, layer: int, what: str) -> Any:
    """Return what ``vector`` holds for a layer, or the vector itself where it is the same for all.

    Raises
    ------
    RequestError
        If there is none for that layer.
    """
    if not is_per_layer(vector):
        return vector
    known = list(vector if isinstance(vector, Mapping) else vector.layers)
    if layer not in known:
        raise RequestError(f"{what} has no vector for layer {layer}, only for {sorted(known, key=str)}")
    return vector[layer] if isinstance(vector, Mapping) else vector.at(layer)


def _unit(name: str, vector: Any, layer: int, hidden_size: int) -> torch.Tensor:
    what = f"directions[{name!r}]"
    unit = as_direction(at_layer(vector, layer, what), what)
    if unit.numel() != hidden_size:
        raise SteeringError(f"{what} has {unit.numel()} entries, this model's hidden_size is {hidden_size}")
    return unit

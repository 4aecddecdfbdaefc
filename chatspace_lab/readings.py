"""Numbers read off activations: norms and projections per token, and pooled rows. Small where activations are large.

The same functions run in the workers, beside the captured rows, and on rows that were fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatspace_lab.errors import RequestError

POOLS = ("mean", "last")


@dataclass(frozen=True, eq=False)
class Readings:
    """Norm and projections of the residual stream, per layer and token.

    Attributes
    ----------
    positions, token_ids
        ``[tokens]`` int64: absolute position and token of each row.
    layers
        Layer i is the output of decoder block i.
    directions
        Names.
    values
        ``[layers, tokens, 1 + directions]`` float32: the L2 norm of x, then x·u for each direction's unit vector u.
    """

    positions: np.ndarray
    token_ids: np.ndarray
    layers: tuple[int, ...]
    directions: tuple[str, ...]
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def norm(self) -> np.ndarray:
        """``[layers, tokens]``, in units of the residual stream."""
        return self.values[..., 0]

    def projection(self, name: str) -> np.ndarray:
        """Return x·u, ``[layers, tokens]``, in units of the residual stream."""
        if name not in self.directions:
            raise RequestError(f"direction {name!r} was not read, only {list(self.directions)}")
        return self.values[..., 1 + self.directions.index(name)]

    def cosine(self, name: str) -> np.ndarray:
        """Return x·u / |x|, ``[layers, tokens]``, from −1 to 1."""
        return self.projection(name) / self.norm

    @classmethod
    def join(cls, parts: Sequence[Readings]) -> Readings:
        """Return consecutive readings as one.

        Raises
        ------
        RequestError
            If there is none, or they read different layers or directions.
        """
        if not parts or len({(part.layers, part.directions) for part in parts}) > 1:
            raise RequestError("readings to join must be of the same layers and directions, and at least one")
        return cls(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            parts[0].layers,
            parts[0].directions,
            np.concatenate([part.values for part in parts], axis=1),
        )


def read_rows(rows: torch.Tensor, units: np.ndarray) -> np.ndarray:
    """Return norms and projections, ``[layers, tokens, 1 + directions]`` float32.

    Parameters
    ----------
    rows
        ``[layers, tokens, hidden_size]``, any float dtype, on the CPU; converted layer by layer.
    units
        ``[layers or 1, directions, hidden_size]`` float32.
    """
    layers, tokens, _ = rows.shape
    values = torch.empty(layers, tokens, 1 + units.shape[1], dtype=torch.float32)
    directions = torch.from_numpy(units)
    for layer in range(layers):
        x = rows[layer].float()
        values[layer, :, 0] = torch.linalg.vector_norm(x, dim=-1)
        values[layer, :, 1:] = x @ directions[layer if len(units) > 1 else 0].T
    return values.numpy()


def pool_rows(rows: torch.Tensor, how: str) -> np.ndarray:
    """Return a row per layer, ``[layers, hidden_size]`` float32: the ``"mean"`` over tokens, or the ``"last"`` one."""
    if how == "last":
        return rows[:, -1].to(torch.float32, copy=True).numpy()  # a view would keep all rows alive
    return torch.stack([layer.float().mean(dim=0) for layer in rows]).numpy()


def reduce_rows(rows: torch.Tensor, how: str, units: np.ndarray) -> np.ndarray:
    """Return :func:`read_rows` with ``how="read"``, else :func:`pool_rows`."""
    return read_rows(rows, units) if how == "read" else pool_rows(rows, how)

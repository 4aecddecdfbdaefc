"""Numbers read off activations: norms and projections per token, and pooled rows. Small where activations are large.

The same functions run in the workers, beside the captured rows, and on rows that were fetched.

Attention sinks
---------------
Some tokens collect attention: in most models the first one, often a second beginning-of-text token, a line break or the
first "the". Their activations are up to a hundred times longer than all others, so a mean with them is a mean of them.
At each layer a token counts as a sink there if its norm is above :data:`SINK` times the lower quartile of the norms of
the tokens that are averaged (:func:`sinks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatspace_lab.errors import RequestError

POOLS = ("mean", "last")
TYPICAL = "typical"
"""The pool of a mean without attention sinks; each row's norm follows it (:func:`pool_rows`)."""

SINK = 3.0
"""A token whose norm is above this many times the lower quartile at a layer is an attention sink there."""

SAFE = (1e-15, 1e15)
"""Norms between these are computed in float32; beyond them the squares of float32 could overflow or vanish."""


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
        """Return x·u / |x|, ``[layers, tokens]``, from −1 to 1; NaN where x is zero, or one of both is not finite."""
        return cosines(self.projection(name), self.norm)

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


def sinks(norms: np.ndarray) -> np.ndarray:
    """Return which tokens are attention sinks: finite norm above :data:`SINK` times the lower quartile of their layer.

    Parameters
    ----------
    norms
        ``[…, tokens]`` of the tokens that are to be averaged. A row with NaN has no sink: its mean is NaN as well.

    Returns
    -------
    numpy.ndarray
        ``[…, tokens]`` bool. Never all tokens of a row.
    """
    values = np.asarray(norms, dtype=np.float64)
    if not values.shape[-1]:
        return np.zeros(values.shape, dtype=bool)
    quartile = np.quantile(values, 0.25, axis=-1, method="lower", keepdims=True)
    return np.isfinite(values) & (values > SINK * quartile)


def mean_without(values: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis in float64, without the entries that ``left_out`` marks; NaN if none is left.

    Parameters
    ----------
    values, left_out
        ``[…, tokens]``.
    """
    kept = np.where(left_out, 0.0, np.asarray(values, dtype=np.float64)).sum(axis=-1)
    count = (~left_out).sum(axis=-1)
    return np.where(count > 0, kept / np.maximum(count, 1), np.nan)


def typical_norms(norms: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return per layer the mean norm without attention sinks, and which tokens were left out.

    Position 0 is always left out, whatever its norm; of the others those that :func:`sinks` marks.

    Parameters
    ----------
    norms
        ``[layers, tokens]``.
    positions
        ``[tokens]``, absolute.

    Returns
    -------
    means : numpy.ndarray
        ``[layers]`` float64; NaN if there is no token but the one at position 0.
    left_out : numpy.ndarray
        ``[layers, tokens]`` bool.
    """
    later = np.asarray(positions) > 0
    left_out = np.ones(np.shape(norms), dtype=bool)
    left_out[:, later] = sinks(norms[:, later])
    return mean_without(norms, left_out), left_out


def ordinary(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``[tokens, hidden_size]`` that are no attention sinks among them."""
    norms = read_rows(rows[None], np.zeros((1, 0, rows.shape[-1]), dtype=np.float32))[0, :, 0]
    return rows[torch.from_numpy(~sinks(norms))]


def cosines(projections: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return x·u / |x|; NaN where x is zero, or either number is not finite."""
    known = np.isfinite(projections) & np.isfinite(norms) & (norms > 0)
    return np.divide(projections, norms, out=np.full(np.shape(norms), np.nan, dtype=np.float32), where=known)


def read_rows(rows: torch.Tensor, units: np.ndarray) -> np.ndarray:
    """Return norms and projections, ``[layers, tokens, 1 + directions]`` float32.

    What float32 sums cannot hold is computed in float64; a number that float32 cannot hold is infinite.

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
        x, u = rows[layer].float(), directions[layer if len(units) > 1 else 0]
        norm = torch.linalg.vector_norm(x, dim=-1)
        values[layer, :, 0] = norm
        values[layer, :, 1:] = x @ u.T
        unsafe = ~((norm > SAFE[0]) & (norm < SAFE[1]))  # NaN too
        if unsafe.any():
            exact = x[unsafe].double()
            values[layer, unsafe, 0] = torch.linalg.vector_norm(exact, dim=-1).float()
            values[layer, unsafe, 1:] = (exact @ u.double().T).float()
    return values.numpy()


def pool_rows(rows: torch.Tensor, how: str) -> np.ndarray:
    """Return a row per layer, float32, summed in float64.

    Parameters
    ----------
    rows
        ``[layers, tokens, hidden_size]``, any float dtype, on the CPU.
    how
        ``"mean"`` over tokens, the ``"last"`` token, or :data:`TYPICAL`: the mean without attention sinks.

    Returns
    -------
    numpy.ndarray
        ``[layers, hidden_size]``; with :data:`TYPICAL` ``[layers, hidden_size + tokens]``, the norm of each row last.
    """
    if how == "last":
        return rows[:, -1].to(torch.float32, copy=True).numpy()  # a view would keep all rows alive
    if how == "mean":
        return torch.stack([layer.mean(dim=0, dtype=torch.float64).float() for layer in rows]).numpy()
    norms = read_rows(rows, np.zeros((1, 0, rows.shape[-1]), dtype=np.float32))[..., 0]
    kept = torch.from_numpy(~sinks(norms))
    means = [layer[keep].mean(dim=0, dtype=torch.float64).float() for layer, keep in zip(rows, kept, strict=True)]
    return np.concatenate([torch.stack(means).numpy(), norms], axis=1)


def reduce_rows(rows: torch.Tensor, how: str, units: np.ndarray) -> np.ndarray:
    """Return :func:`read_rows` with ``how="read"``, else :func:`pool_rows`."""
    return read_rows(rows, units) if how == "read" else pool_rows(rows, how)

"""Arithmetic of the sliders: dose beside raw scale, and what a cap clips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from chatspace_lab.errors import LabError
from chatspace_lab.panels.answers import Answer
from chatspace_lab.panels.rows import Row, Vectors
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.vectors import as_vector

CAP_MARGIN = 1.25
"""A cap's slider reaches this much further than the projections that were seen."""


def dose_per_scale(row: Row, vectors: Vectors, norms: Mapping[int, float]) -> float | None:
    """Return the dose that scale 1 has: the mean over the row's layers of ``factor · |v| / residual norm``.

    None if a norm is not known, the vector is zero or missing at a layer, or the row is no addition.
    """
    if row.operation != "add" or not row.layers or row.vector not in vectors:
        return None
    parts = []
    for layer in row.layers:
        if layer not in norms:
            return None
        try:
            vector = as_vector(at_layer(vectors[row.vector], layer, row.vector), row.vector)
        except LabError:  # shown when the steering is set
            return None
        parts.append(row.factors.get(layer, 1.0) * float(vector.double().norm()) / norms[layer])
    unit = sum(parts) / len(parts)
    return unit or None


def cap_range(projections: np.ndarray) -> tuple[float, float]:
    """Return the ends of a cap's slider, the same on both sides of zero, from projections that were seen.

    Parameters
    ----------
    projections
        ``[layers, tokens]``; those of the first token are left out by the caller.
    """
    known = projections[np.isfinite(projections)]
    reach = float(np.abs(known).max()) * CAP_MARGIN if known.size else 0.0
    if reach <= 0:
        return (-1.0, 1.0)
    step = 10.0 ** np.floor(np.log10(reach))
    reach = float(np.ceil(reach / step) * step)
    return (-reach, reach)


def clipped(projections: np.ndarray, low: float | None, high: float | None) -> tuple[int, int]:
    """Return how many of the tokens a cap moves at any of its layers, and of how many.

    Parameters
    ----------
    projections
        ``[layers, tokens]``.
    """
    outside = np.zeros(projections.shape, dtype=bool)
    if low is not None:
        outside |= projections < low
    if high is not None:
        outside |= projections > high
    return int(outside.any(axis=0).sum()), projections.shape[1] if projections.ndim == 2 else 0


def shown_row(row: Row, vectors: Vectors, norms: Mapping[int, float], baseline: Answer | None) -> dict[str, Any]:
    """Return a row with what its sliders need: the dose of scale 1, a cap's ends, and how much it clips."""
    seen = None
    if row.operation == "cap" and baseline is not None:
        seen = baseline.projections(row.vector, row.layers)
    return {
        **row.plain(),
        "unit": dose_per_scale(row, vectors, norms),
        "range": None if seen is None else list(cap_range(seen)),
        "clipped": None if seen is None else list(clipped(seen, row.min, row.max)),
    }


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the index of the first token where two answers part; None if one is a beginning of the other."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None

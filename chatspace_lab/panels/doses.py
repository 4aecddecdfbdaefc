"""Arithmetic of the sliders: dose beside raw scale, and what a cap clips.

A dose counts at each layer: the added norm over the residual stream's norm there. A row has one dose at all its layers,
and its raw scale follows the residual stream's norm from layer to layer. Additions at several layers add up; the sum of
their doses is the row's total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from chatspace_lab.errors import LabError, RequestError
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
    units = _units(row, vectors, norms)
    if units is None:
        return None
    return sum(row.factors.get(layer, 1.0) * unit for layer, unit in units.items()) / len(units) or None


def doses_of(row: Row, vectors: Vectors, norms: Mapping[int, float]) -> dict[int, float] | None:
    """Return the dose of an addition at each of its layers; None where :func:`dose_per_scale` is."""
    units = _units(row, vectors, norms)
    return None if units is None else {layer: row.scale_at(layer) * unit for layer, unit in units.items()}


def _units(row: Row, vectors: Vectors, norms: Mapping[int, float]) -> dict[int, float] | None:
    """Return ``|v| / residual norm`` of an addition at each of its layers; None if one is not known or zero."""
    if row.operation != "add" or not row.layers or row.vector not in vectors:
        return None
    units = {}
    for layer in row.layers:
        try:
            vector = as_vector(at_layer(vectors[row.vector], layer, row.vector), row.vector)
        except LabError:  # shown when the steering is set
            return None
        length, norm = float(vector.double().norm()), norms.get(layer, 0.0)
        if not (length > 0 and 0 < norm < np.inf):
            return None
        units[layer] = length / norm
    return units


def at_dose(row: Row, dose: float, vectors: Vectors, norms: Mapping[int, float]) -> Row:
    """Return an addition with this dose at each of its layers.

    Raises
    ------
    RequestError
        If the residual's norm is not known at one of them.
    """
    units = _units(row, vectors, norms)
    if units is None:
        raise RequestError(
            f"row {row.vector!r}: a dose needs an addition at layers whose residual norm is known; "
            "call lab.measure(prompt), or set the raw scale"
        )
    return _scaled(row, {layer: 1 / unit for layer, unit in units.items()}, dose)


def at_layers(row: Row, before: Row, vectors: Vectors, norms: Mapping[int, float]) -> Row:
    """Return an addition whose layers have changed, with its dose as it was.

    Layers that it had keep their scales; the others get the dose that the row had before, the mean over its layers.
    Where no dose is known, the raw scale is the same at all layers.

    Parameters
    ----------
    row, before
        After and before the change.
    """
    units, dose = _units(row, vectors, norms), dose_per_scale(before, vectors, norms)
    new = {} if units is None or dose is None else {layer: dose / unit for layer, unit in units.items()}
    kept = {layer: before.factors.get(layer, 1.0) for layer in before.layers}
    return _scaled(row, {layer: kept.get(layer, new.get(layer, 1.0)) for layer in row.layers}, row.scale)


def _scaled(row: Row, factors: Mapping[int, float], scale: float) -> Row:
    """Return a row with ``factor · scale`` at each layer, written with factors whose mean is 1."""
    mean = sum(factors.values()) / len(factors) if factors else 1.0
    if len(set(factors.values())) <= 1 or mean == 0:
        return replace(row, scale=scale * mean, factors={})
    return replace(row, scale=scale * mean, factors={layer: factor / mean for layer, factor in factors.items()})


def cap_range(projections: np.ndarray) -> tuple[float, float]:
    """Return the ends of a cap's slider, the same on both sides of zero, from projections that were seen.

    Parameters
    ----------
    projections
        ``[layers, tokens]``; NaN for attention sinks, which do not count.
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
        ``[layers, tokens]``; tokens of nothing but NaN, attention sinks, do not count.
    """
    projections = projections[:, ~np.isnan(projections).all(axis=0)] if projections.ndim == 2 else projections
    outside = np.zeros(projections.shape, dtype=bool)
    if low is not None:
        outside |= projections < low
    if high is not None:
        outside |= projections > high
    return int(outside.any(axis=0).sum()), projections.shape[1] if projections.ndim == 2 else 0


def shown_row(row: Row, vectors: Vectors, norms: Mapping[int, float], baseline: Answer | None) -> dict[str, Any]:
    """Return a row with what its sliders need: doses, raw scales by layer, a cap's ends, and how much it clips."""
    seen = None
    if row.operation == "cap" and baseline is not None:
        seen = baseline.projections(row.vector, row.layers)
    doses = doses_of(row, vectors, norms)
    return {
        **row.plain(),
        "unit": dose_per_scale(row, vectors, norms),
        "dose": None if doses is None else sum(doses.values()) / len(doses),
        "doses": None if doses is None else list(doses.values()),
        "scales": [row.scale_at(layer) for layer in row.layers],
        "range": None if seen is None else list(cap_range(seen)),
        "clipped": None if seen is None else list(clipped(seen, row.min, row.max)),
    }


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the index of the first token where two answers part; None if one is a beginning of the other."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None

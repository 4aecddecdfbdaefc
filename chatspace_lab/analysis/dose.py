"""Relative dose: how long an added vector is, beside the activations that it is added to.

Dose 1 is the mean norm of the residual stream itself at that layer on that prompt. Attention sinks are left out: the
token at position 0, and every other token whose norm is more than three times the lower quartile at that layer. Their
activations are many times longer than all others (:func:`attention_sinks` lists them). Measure it on an unsteered run.

A dose counts per layer, and doses add up: dose 0.3 at each of four layers is about as much as dose 1.2 at one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from chatspace_lab.analysis.frames import sinks_of, token_frame
from chatspace_lab.analysis.rows import as_layers
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError
from chatspace_lab.steering.specs import AddSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_number, as_vector

HIGH, EXTREME = 0.7, 1.5
"""From these doses on (either sign), answers often become odd, and mostly fall apart. Advice, from small models."""

Norms: TypeAlias = CaptureHandle | pd.DataFrame | Mapping[int, float]


def residual_norms(source: Norms) -> dict[int, float]:
    """Return per layer the mean norm of the prompt's activations, attention sinks left out.

    Parameters
    ----------
    source
        A fetched handle, or a token frame of one request. A mapping of layer to norm is checked and given back, and so
        is a frame with columns ``layer`` and ``residual_norm``.

    Raises
    ------
    AnalysisError
        If it holds no such token, several requests, or a norm that is not above 0.
    """
    if isinstance(source, CaptureHandle):
        source = token_frame(source)
    if isinstance(source, pd.DataFrame):
        norms = _from_frame(source)
    else:
        norms = {int(layer): as_number(norm, f"the residual norm of layer {layer}") for layer, norm in source.items()}
    for layer, norm in norms.items():
        if not norm > 0:
            raise AnalysisError(f"layer {layer}: the residual norm is {norm}, a dose needs one above 0")
    return norms


def _from_frame(frame: pd.DataFrame) -> dict[int, float]:
    if "residual_norm" in frame:
        pairs = frame[["layer", "residual_norm"]].drop_duplicates()
        if pairs["layer"].duplicated().any():
            raise AnalysisError("the frame holds different residual norms for one layer: choose one prompt")
        return {int(layer): float(norm) for layer, norm in zip(pairs["layer"], pairs["residual_norm"], strict=True)}
    if frame["request"].nunique() > 1:
        raise AnalysisError("the frame holds several requests: choose the one whose prompt the dose is for")
    prompt = frame[~frame["generated"]]
    chosen = prompt[~sinks_of(prompt)]
    if chosen.empty:
        raise AnalysisError("no prompt token but the first was read, so the residual norm of this prompt is not known")
    means = chosen.astype({"norm": "float64"}).groupby("layer")["norm"].mean()
    return {int(layer): float(norm) for layer, norm in means.items()}


def dose_of_scale(scale: float, vector: Any, layer: int, norms: Norms) -> float:
    """Return ``scale · |vector| / residual norm``: what ``AddSpec(vector, scale)`` is at that layer on that prompt.

    Parameters
    ----------
    scale
        As in :class:`AddSpec`; its sign is kept.
    vector
        ``[hidden_size]`` at the length that is added, ``{layer: vector}``, or a :class:`Direction` (unit length).
    layer
        Where it is added.
    norms
        As in :func:`residual_norms`.

    Raises
    ------
    AnalysisError, SteeringError
        If the norm of that layer is not known, or the vector cannot be used.
    """
    return as_number(scale, "scale") * _length(vector, layer) / _norm(norms, layer)


def scale_for_dose(dose: float, vector: Any, layer: int, norms: Norms) -> float:
    """Return the scale that makes ``AddSpec(vector, scale)`` this dose. Arguments as in :func:`dose_of_scale`.

    Raises
    ------
    AnalysisError, SteeringError
        Also if the vector is zero: no scale of it is a dose.
    """
    length = _length(vector, layer)
    if length == 0:
        raise AnalysisError("the vector is zero, so no scale of it reaches a dose")
    return as_number(dose, "dose") * _norm(norms, layer) / length


def dose_frame(
    scales: Iterable[float], vector: Any, norms: Norms, layers: Sequence[int] | int | None = None
) -> pd.DataFrame:
    """Return dose beside raw scale, a row per layer and scale.

    Parameters
    ----------
    scales
        Raw scales.
    vector, norms
        As in :func:`dose_of_scale`.
    layers
        All whose norm is known, with None.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``scale``, ``vector_norm``, ``residual_norm``, ``dose`` and ``level`` (``""``, ``"high"`` from 0.7,
        ``"extreme"`` from 1.5, either sign).
    """
    known = residual_norms(norms)
    chosen = tuple(known) if layers is None else as_layers(layers)
    raw, records = list(scales), []
    for layer in chosen:
        length = _length(vector, layer)
        for scale in raw:
            dose = dose_of_scale(scale, vector, layer, known)
            records.append((layer, float(scale), length, _norm(known, layer), dose, level_of(dose)))
    return pd.DataFrame(records, columns=["layer", "scale", "vector_norm", "residual_norm", "dose", "level"])


def steering_frame(spec: SteeringSpec, norms: Norms) -> pd.DataFrame:
    """Return a row per operation of a spec, in the order in which they act, with the dose of each addition.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``operation`` (``add``, ``cap``, ``ablate``), ``scale``, ``min``, ``max``, ``vector_norm``,
        ``residual_norm``, ``dose`` and ``level``. A cap has no scale; only an addition has a dose.

    Raises
    ------
    AnalysisError
        If the norm of a layer is not known.
    """
    known = residual_norms(norms)
    records = []
    for layer, operation in spec:
        record: dict[str, Any] = {"layer": layer, "operation": "ablate", "scale": None, "min": None, "max": None}
        record |= {"vector_norm": None, "residual_norm": _norm(known, layer), "dose": None, "level": ""}
        if isinstance(operation, AddSpec):
            dose = dose_of_scale(operation.scale, operation.vector, layer, known)
            record |= {"operation": "add", "scale": operation.scale, "dose": dose, "level": level_of(dose)}
            record["vector_norm"] = float(operation.vector.double().norm())
        elif isinstance(operation, ProjectionCapSpec):
            record |= {"operation": "cap", "min": operation.min, "max": operation.max}
        else:
            record["scale"] = operation.scale
        records.append(record)
    columns = ["layer", "operation", "scale", "min", "max", "vector_norm", "residual_norm", "dose", "level"]
    frame = pd.DataFrame(records, columns=columns)
    return frame.astype(dict.fromkeys(["scale", "min", "max", "vector_norm", "residual_norm", "dose"], "float64"))


def sweep_cells(sweep: pd.DataFrame) -> pd.DataFrame:
    """Return mean and spread over the prompts of each cell of a sweep.

    Parameters
    ----------
    sweep
        Of ``lab.sweep``, with one prompt or several.

    Returns
    -------
    pandas.DataFrame
        A row per layer and scale: ``layer``, ``scale``, ``dose``, ``prompts`` (how many), and for each of
        ``projection``, ``relative``, ``perplexity``, ``repetition``, ``tokens`` and ``score`` that the sweep has, the
        mean and, as ``NAME_std``, the standard deviation over the prompts (missing for one prompt). An answer without a
        value does not count.
    """
    measured = ["projection", "relative", "perplexity", "repetition", "tokens", "score"]
    values = {name: sweep[name].astype("float64") for name in measured if name in sweep}
    grouped = sweep.assign(**values).groupby(["layer", "scale"], sort=False)
    columns = {column: (name, how) for name in values for column, how in ((name, "mean"), (f"{name}_std", "std"))}
    return grouped.agg(dose=("dose", "first"), prompts=("dose", "size"), **columns).reset_index()


def level_of(dose: float) -> str:
    """Return ``""``, ``"high"`` (from 0.7) or ``"extreme"`` (from 1.5) for a dose of either sign."""
    return "extreme" if abs(dose) >= EXTREME else "high" if abs(dose) >= HIGH else ""


def _length(vector: Any, layer: int) -> float:
    if isinstance(vector, Mapping):
        if layer not in vector:
            raise AnalysisError(f"the vector is not given for layer {layer}, only for {sorted(vector)}")
        vector = vector[layer]
    elif hasattr(vector, "at") and hasattr(vector, "layers"):
        vector = vector.at(layer)
    return float(as_vector(vector, "vector").double().norm())


def _norm(norms: Norms, layer: int) -> float:
    known = residual_norms(norms)
    if layer not in known:
        raise AnalysisError(f"the residual norm of layer {layer} is not known, only of layers {sorted(known)}")
    return known[layer]

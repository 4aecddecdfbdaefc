"""Means over messages: per message and layer, and how messages compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from chatspace_lab.analysis.frames import directions_of, handle_readings
from chatspace_lab.analysis.inputs import as_handle, as_handles, need
from chatspace_lab.analysis.rows import as_numbers, chosen_layers, token_rows
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError, MessageLocationError
from chatspace_lab.readings import sinks


@dataclass(frozen=True)
class _Part:
    """A message or the answer: its rows in a capture, or why there are none."""

    message: Any  # int, or pandas.NA for the answer
    role: str
    rows: np.ndarray
    problem: str

    @property
    def label(self) -> str:
        return self.role if self.message is pd.NA else f"{self.message} {self.role}"


def message_frame(
    handles: CaptureHandle | Sequence[CaptureHandle],
    directions: Mapping[str, Any] | None = None,
    layers: Sequence[int] | int | None = None,
) -> pd.DataFrame:
    """Return a row per request, layer and message of a chat, and one for the answer if any of it was computed.

    Attention sinks count in no mean: rows whose norm is more than three times the lower quartile of the request's rows
    at that layer. A message of nothing else is the mean of those.

    Parameters
    ----------
    handles
        One fetched handle of a chat, or several. A plain prompt has no messages: it has its answer only.
    directions, layers
        As in :func:`token_frame`.

    Returns
    -------
    pandas.DataFrame
        ``request``, ``prompt_index``, ``sample_index``, ``layer``, ``message`` (index, missing for the answer),
        ``role``, ``label`` (``"1 user"``), ``tokens``, ``left_out`` (how many of them are sinks), ``norm`` (mean of the
        tokens' norms), ``norm_of_mean`` (norm of the mean activation), per direction ``projection_NAME`` (mean, which
        is the mean activation's own) and ``cosine_NAME`` (of the mean activation), and ``problem``: empty, or why the
        numbers are missing (the message cannot be located, has no tokens, or was not captured whole).

    Raises
    ------
    AnalysisError, CaptureError, RequestError, SteeringError
        As :func:`token_frame`.
    """
    records: list[dict[str, Any]] = []
    for handle in as_handles(handles, "message_frame"):
        readings = handle_readings(handle, directions, layers)
        parts = _parts(handle)
        for index, layer in enumerate(readings.layers):
            hidden = handle.hidden(layer)
            marked = sinks(readings.norm[index])
            for part in parts:
                rows = _kept(part, marked)
                record = {**_identity(handle, layer, part), "left_out": len(part.rows) - len(rows)}
                values = readings.values[index, rows].astype(np.float64)
                found = len(rows) > 0
                record["norm"] = values[:, 0].mean() if found else np.nan
                mean = float(hidden[rows].double().mean(dim=0).norm()) if found else np.nan
                record["norm_of_mean"] = mean
                for at, name in enumerate(readings.directions):
                    projection = values[:, 1 + at].mean() if found else np.nan
                    record[f"projection_{name}"] = projection
                    record[f"cosine_{name}"] = projection / mean if mean else np.nan
                records.append({**record, "problem": part.problem})
    return _typed(records)


def message_summary(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return means per message of a token frame, when the activations themselves are not at hand.

    Attention sinks are left out, as there. Columns as in :func:`message_frame`, but for ``left_out``, and for
    ``norm_of_mean``, which norms and projections of tokens do not tell;
    and ``cosine_NAME`` is the mean of the tokens' cosines. Messages without a row in ``tokens`` have none here.

    Raises
    ------
    AnalysisError
        If ``tokens`` is no token frame, or has no rows.
    """
    need(tokens, ["request", "layer", "message", "role", "generated", "norm"], "message_summary")
    chosen = tokens[(tokens["message"].notna() | tokens["generated"]) & ~_sinks_among(tokens)]
    keys = ["request", "prompt_index", "sample_index", "layer", "message", "role"]
    columns = [column for name in directions_of(tokens) for column in (f"projection_{name}", f"cosine_{name}")]
    grouped = chosen.groupby(keys, sort=False, dropna=False)
    frame = grouped.agg(
        tokens=("norm", "size"), norm=("norm", "mean"), **{column: (column, "mean") for column in columns}
    ).reset_index()
    labels = [
        str(role) if pd.isna(message) else f"{message} {role}"
        for message, role in zip(frame["message"], frame["role"], strict=True)
    ]
    frame.insert(6, "label", pd.Series(labels, index=frame.index, dtype="str"))
    frame["problem"] = pd.Series([""] * len(frame), index=frame.index, dtype="str")
    return frame


def message_means(handle: CaptureHandle, layer: int) -> dict[str, np.ndarray]:
    """Return the mean activation of each message, and of the answer, by label; ``[hidden_size]`` float32.

    Attention sinks are left out, as in :func:`message_frame`.
    Messages that cannot be located, are empty or were not captured whole are left out; :func:`message_frame` says why.
    """
    handle = as_handle(handle, "message_means")
    chosen_layers(handle, layer)
    parts = _parts(handle)
    means = zip(parts, _means(handle, layer, parts), strict=True)
    return {part.label: mean.astype(np.float32) for part, mean in means if mean is not None}


def message_cosines(
    handles: CaptureHandle | Sequence[CaptureHandle], layers: Sequence[int] | int | None = None
) -> pd.DataFrame:
    """Return the cosine between the mean activations of each two messages of a request, per layer.

    Attention sinks are left out of the means, as in :func:`message_frame`.

    Returns
    -------
    pandas.DataFrame
        ``request``, ``layer``, ``first``, ``second`` (labels as in :func:`message_frame`), ``cosine`` and ``problem``
        (empty, or why the cosine is missing). Each pair stands there both ways, and each message with itself, so
        ``frame.pivot(index="first", columns="second", values="cosine")`` of one request and layer is a square.

    Raises
    ------
    AnalysisError
        If a layer was not captured.
    """
    records = []
    for handle in as_handles(handles, "message_cosines"):
        parts = _parts(handle)
        for layer in chosen_layers(handle, layers):
            means = _means(handle, layer, parts)
            for (first, left), (second, right) in product(zip(parts, means, strict=True), repeat=2):
                problem = first.problem or second.problem
                cosine = np.nan if left is None or right is None else _cosine(left, right)
                records.append((handle.request_id, layer, first.label, second.label, cosine, problem))
    return pd.DataFrame(records, columns=["request", "layer", "first", "second", "cosine", "problem"])


def cosine_frame(vectors: Mapping[str, Any]) -> pd.DataFrame:
    """Return the cosine between each two of some named vectors: columns ``first``, ``second``, ``cosine``.

    Parameters
    ----------
    vectors
        ``{name: [hidden_size]}``: means of :func:`message_means` or :func:`mean_activation`, directions, …

    Raises
    ------
    AnalysisError
        If they are of different lengths.
    """
    arrays = {name: as_numbers(vector, f"vector {name!r}") for name, vector in vectors.items()}
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    if len(set(map(tuple, shapes.values()))) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise AnalysisError(f"the vectors have different shapes, or are none: {shapes}")
    records = [(a, b, _cosine(arrays[a], arrays[b])) for a, b in product(arrays, repeat=2)]
    return pd.DataFrame(records, columns=["first", "second", "cosine"])


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    sizes = [float(np.abs(each).max(initial=0.0)) for each in (left, right)]
    if not all(0 < size < np.inf for size in sizes):  # NaN too
        return float("nan")
    one, other = left / sizes[0], right / sizes[1]  # so that no square overflows or vanishes
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def _kept(part: _Part, marked: np.ndarray) -> np.ndarray:
    """Return the rows of a part that are no attention sinks; all of them where it has no others."""
    kept = part.rows[~marked[part.rows]]
    return kept if len(kept) else part.rows


def _means(handle: CaptureHandle, layer: int, parts: Sequence[_Part]) -> list[np.ndarray | None]:
    """Return the mean activation of each part, ``[hidden_size]`` float64; None where there is a problem."""
    hidden = handle.hidden(layer)
    marked = sinks(handle_readings(handle, None, layer).norm[0])
    return [None if part.problem else hidden[_kept(part, marked)].double().mean(dim=0).numpy() for part in parts]


def _sinks_among(tokens: pd.DataFrame) -> np.ndarray:
    """Return which rows are attention sinks, but for messages that have no other tokens."""
    by = tokens.groupby(["request", "layer"], sort=False)["norm"]
    marked = by.transform(lambda norm: sinks(norm.to_numpy())).astype(bool)
    parts = [tokens[key] for key in ("request", "layer", "message", "role")]
    return (marked & ~marked.groupby(parts, dropna=False).transform("all")).to_numpy()


def _parts(handle: CaptureHandle) -> list[_Part]:
    return list(_each_part(handle))


def _each_part(handle: CaptureHandle) -> Iterator[_Part]:
    nothing = np.empty(0, dtype=np.int64)
    for index, location in enumerate(handle.message_locations or ()):
        if isinstance(location, MessageLocationError):
            yield _Part(index, "unlocated", nothing, str(location))
            continue
        if not location.num_tokens:
            yield _Part(index, location.role, nothing, f"message {index} ({location.role}) has no tokens")
            continue
        try:
            yield _Part(index, location.role, token_rows(handle, index), "")
        except AnalysisError as error:
            yield _Part(index, location.role, nothing, str(error))
    if handle.positions and handle.positions[-1] >= handle.prompt_len:
        yield _Part(pd.NA, "answer", token_rows(handle, "answer"), "")


def _identity(handle: CaptureHandle, layer: int, part: _Part) -> dict[str, Any]:
    return {
        "request": handle.request_id,
        "prompt_index": handle.prompt_index,
        "sample_index": handle.sample_index,
        "layer": layer,
        "message": part.message,
        "role": part.role,
        "label": part.label,
        "tokens": len(part.rows),
    }


def _typed(records: list[dict[str, Any]]) -> pd.DataFrame:
    if not records:
        raise AnalysisError("these requests have neither messages nor captured rows of an answer")
    return pd.DataFrame(records).astype({"message": "Int64"})

"""What directions are fitted to: a matrix of samples per layer, from arrays or from fetched captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from chatspace_lab.analysis.inputs import as_handles
from chatspace_lab.analysis.rows import as_layers, as_numbers, chosen_layers, mean_activation
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError


class Pooled(Protocol):
    """What ``lab.capture(…, reduce="mean")`` returns: an activation per prompt and layer."""

    def by_layer(self) -> dict[int, np.ndarray]:
        """Return layer to ``[prompts, hidden_size]``."""


Samples = Mapping[int, Any] | Sequence[CaptureHandle] | Pooled
MIN_PAIRS = 4


def samples_of(
    handles: CaptureHandle | Sequence[CaptureHandle],
    tokens: str | int = "last",
    layers: Sequence[int] | int | None = None,
) -> dict[int, np.ndarray]:
    """Return one activation per handle: layer to ``[handles, hidden_size]`` float32.

    Parameters
    ----------
    handles
        Fetched handles, one per sample.
    tokens
        Which token rows are averaged: ``"last"`` (the prompt's last token), ``"prompt"``, ``"answer"``, ``"all"``, or a
        message's index; see :func:`token_rows`.
    layers
        All that were captured, with None.

    Raises
    ------
    AnalysisError, MessageLocationError
        If a handle has no such rows or layer.
    """
    chosen = as_handles(handles, "samples_of")
    return {
        layer: np.stack([mean_activation(handle, layer, tokens) for handle in chosen])
        for layer in chosen_layers(chosen[0], layers)
    }


def paired(
    positive: Samples, negative: Samples, tokens: str | int, layers: Sequence[int] | int | None
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return per layer the two matrices ``[pairs, hidden_size]`` float64, checked.

    Raises
    ------
    AnalysisError
        If they do not pair up, are fewer than four pairs, or hold NaN.
    """
    left, right = sides(positive, negative, tokens, layers)
    if set(left) != set(right):
        raise AnalysisError(f"positive has layers {sorted(left)} and negative has layers {sorted(right)}")
    wanted = sorted(left) if layers is None else as_layers(layers)
    missing = sorted(set(wanted) - set(left))
    if missing or not wanted:
        raise AnalysisError(f"no samples of layers {missing}, only of {sorted(left)}")
    for layer in wanted:
        if left[layer].shape != right[layer].shape:
            raise AnalysisError(
                f"layer {layer}: positive is {list(left[layer].shape)} and negative {list(right[layer].shape)}; "
                f"sample i of one must be the counterpart of sample i of the other"
            )
        pairs = len(left[layer])
        if pairs < MIN_PAIRS:
            raise AnalysisError(f"layer {layer}: {pairs} pairs are too few to hold any out; give at least {MIN_PAIRS}")
        if pairs != len(left[wanted[0]]):
            raise AnalysisError(f"layer {wanted[0]} has {len(left[wanted[0]])} pairs and layer {layer} has {pairs}")
    return {layer: (left[layer], right[layer]) for layer in wanted}


def sides(
    positive: Samples, negative: Samples, tokens: str | int, layers: Sequence[int] | int | None
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return both sides as layer to ``[samples, hidden_size]`` float64, checked one by one.

    Raises
    ------
    AnalysisError
        If one is empty, or holds NaN.
    """
    return _arrays(positive, "positive", tokens, layers), _arrays(negative, "negative", tokens, layers)


def _arrays(side: Samples, name: str, tokens: str | int, layers: Sequence[int] | int | None) -> dict[int, np.ndarray]:
    if hasattr(side, "by_layer"):
        side = side.by_layer()
    given: Mapping[int, Any] = side if isinstance(side, Mapping) else samples_of(side, tokens, layers)
    found = {}
    for layer, rows in given.items():
        values = as_numbers(rows, f"{name}, layer {layer}")
        if values.ndim != 2:
            raise AnalysisError(
                f"{name}, layer {layer}: expected numbers of shape [samples, hidden_size], got {list(values.shape)}"
            )
        bad = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max).all(axis=1))  # their squares overflow
        if len(bad):
            said = "NaN, infinite entries, or numbers beyond float32"
            raise AnalysisError(f"{name}, layer {layer}: samples {bad.tolist()[:8]} hold {said}")
        found[int(layer)] = values
    if not found:
        raise AnalysisError(f"{name} is empty: give a dict of layer to samples, or fetched handles")
    return found


def auc_of(left: np.ndarray, right: np.ndarray) -> float:
    """Return the share of (left, right) couples with left above right, ties half: the area under the ROC curve.

    scikit-learn's function gives the same number; with so few samples nearly all of its time goes to checking them.
    """
    return float((np.greater.outer(left, right) + 0.5 * np.equal.outer(left, right)).mean())

"""Which rows of a capture are meant, and their mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TypeVar

import numpy as np

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError

T = TypeVar("T")

CHOICES = ("last", "prompt", "answer", "all")


def as_list(value: T | Iterable[T]) -> list[T]:
    """Return one thing, or several, as a list.

    Raises
    ------
    AnalysisError
        If there is none.
    """
    found = list(value) if isinstance(value, Iterable) else [value]
    if not found:
        raise AnalysisError("there is nothing to analyse: give at least one fetched capture handle")
    return found


def as_layers(layers: Iterable[int] | int) -> tuple[int, ...]:
    """Return one layer, or several, as a tuple of Python's own integers."""
    return (int(layers),) if isinstance(layers, int | Integral) else tuple(int(layer) for layer in layers)


def chosen_layers(handle: CaptureHandle, layers: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return ``layers``, or all captured ones with None.

    Raises
    ------
    AnalysisError
        If one of them was not captured.
    """
    if layers is None:
        return handle.layer_indices
    wanted = as_layers(layers)
    missing = sorted(set(wanted) - set(handle.layer_indices))
    if missing or not wanted:
        raise AnalysisError(f"layers {missing} were not captured, only {list(handle.layer_indices)}")
    return wanted


def token_rows(handle: CaptureHandle, tokens: str | int) -> np.ndarray:
    """Return the rows of ``handle`` that ``tokens`` names.

    Parameters
    ----------
    handle
        Any handle of a request that has ended.
    tokens
        ``"last"``: the last token of the prompt. ``"prompt"``: all of the prompt, its first token left out, since that
        one's activation is large in most models and says nothing. ``"answer"``: generated tokens. ``"all"``: every row.
        An int: the tokens of that message's own content; negative ones count from the end.

    Returns
    -------
    numpy.ndarray
        ``[chosen]`` int64, ascending.

    Raises
    ------
    AnalysisError
        If there is no such row, or not all of a message were captured.
    MessageLocationError
        If that message cannot be located.
    """
    positions = np.asarray(handle.positions, dtype=np.int64)
    if isinstance(tokens, Integral):
        boundary = handle.message_boundary(int(tokens))
        rows = np.flatnonzero((positions >= boundary.start) & (positions < boundary.end))
        if len(rows) < boundary.num_tokens:
            raise AnalysisError(f"{len(rows)} of the {boundary.num_tokens} tokens of message {tokens} were captured")
        what = f"message {tokens}"
    elif tokens in CHOICES:
        rows = np.flatnonzero(
            {
                "last": positions == handle.prompt_len - 1,
                "prompt": (positions > 0) & (positions < handle.prompt_len),
                "answer": positions >= handle.prompt_len,
                "all": positions >= 0,
            }[tokens]
        )
        what = {"last": "the prompt's last token", "answer": "the answer (its last token is never computed)"}.get(
            tokens, tokens
        )
    else:
        raise AnalysisError(f"tokens: expected a message's index or one of {', '.join(CHOICES)}, got {tokens!r}")
    if not len(rows):
        raise AnalysisError(f"request {handle.request_id}: no row of {what} was captured")
    return rows


def mean_activation(handle: CaptureHandle, layer: int, tokens: str | int = "answer") -> np.ndarray:
    """Return the mean of some rows, ``[hidden_size]`` float32, summed in float64.

    Parameters
    ----------
    handle
        A fetched handle.
    layer
        A captured layer.
    tokens
        Which rows: see :func:`token_rows`.

    Raises
    ------
    AnalysisError, MessageLocationError, CaptureError
        See :func:`token_rows` and :meth:`CaptureHandle.hidden`.
    """
    rows = token_rows(handle, tokens)
    return handle.hidden(layer)[rows].double().mean(dim=0).float().numpy()

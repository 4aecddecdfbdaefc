"""Which rows of a capture are meant, and their mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from chatspace_lab.analysis.inputs import as_handle
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError
from chatspace_lab.readings import ordinary
from chatspace_lab.steering.vectors import as_index, as_list

CHOICES = ("last", "prompt", "answer", "all")


def as_layers(layers: Iterable[int] | int) -> tuple[int, ...]:
    """Return one layer, or several, as a tuple of Python's own integers, each once.

    Raises
    ------
    SteeringError
        If one is no whole number.
    """
    return tuple(dict.fromkeys(as_index(layer, "a layer") for layer in as_list(layers)))


def as_numbers(value: Any, what: str) -> np.ndarray:
    """Return an array or tensor of any number type, or a list, as float64, whatever its shape.

    Raises
    ------
    AnalysisError
        If it holds anything but numbers.
    """
    try:
        array = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"{what}: expected numbers, got {type(value).__name__}") from error
    if array.dtype.kind not in "fiu":
        raise AnalysisError(f"{what}: expected numbers, got {type(value).__name__} of {array.dtype}")
    return array.astype(np.float64)


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
        ``"last"``: the last token of the prompt. ``"prompt"``: all of the prompt but position 0, which is an attention
        sink in most models. ``"answer"``: generated tokens. ``"all"``: every row.
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
    handle = as_handle(handle, "token_rows")
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
    """Return the mean of some rows, ``[hidden_size]`` float32, summed in float64; attention sinks are left out.

    A sink is a row whose norm is more than three times the lower quartile of the chosen rows
    (:mod:`chatspace_lab.readings`).

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
    handle = as_handle(handle, "mean_activation")
    rows = token_rows(handle, tokens)
    return ordinary(handle.hidden(layer)[rows]).double().mean(dim=0).float().numpy()

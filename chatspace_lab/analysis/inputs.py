"""Check what an analysis was given: captures where it needs activations, a frame where it draws one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import AnalysisError, kind_of
from chatspace_lab.steering.vectors import as_list

TOKENS = "lab.frame(handles) or token_frame(handles)"
MADE_BY = {
    "cosine_matrix": "message_cosines(handles) or cosine_frame(vectors)",
    "direction_quality": "direction.frame()",
    "dose_response": "lab.sweep(…)",
    "layer_frame": TOKENS,
    "layer_profile": "layer_frame(tokens)",
    "message_norm_bars": "message_frame(handles), or message_summary(tokens) from a token frame,",
    "message_summary": TOKENS,
    "pca_scatter": "pca_frame(means)",
    "projection_lines": TOKENS,
    "token_heatmap": TOKENS,
}
"""Function to what makes its frame."""


def as_handles(value: CaptureHandle | Iterable[CaptureHandle], what: str) -> list[CaptureHandle]:
    """Return one capture handle, or several, as a list; ``what`` is the function that was called.

    Raises
    ------
    AnalysisError
        If there is none, or it is something else.
    """
    if isinstance(value, pd.DataFrame):
        raise AnalysisError(
            f"{what} needs capture handles, got a DataFrame, which holds no activations: give it the handles of the "
            f"frame. Of a token frame, message_summary(frame) gives means per message and layer_frame(frame) per layer"
        )
    found = as_list(value)
    if not found:
        raise AnalysisError(f"{what}: there is nothing to analyse: give at least one fetched capture handle")
    other = next((kind_of(each, CaptureHandle) for each in found if not isinstance(each, CaptureHandle)), None)
    if other is not None:
        raise AnalysisError(
            f"{what} needs capture handles, got {other}: generate and chat return them with capture_layers"
        )
    return found


def as_handle(value: Any, what: str) -> CaptureHandle:
    """Return one capture handle, also one in a list.

    Raises
    ------
    AnalysisError
        If there are none or several, or it is something else.
    """
    found = as_handles(value, what)
    if len(found) != 1:
        raise AnalysisError(f"{what} takes one capture handle, got {len(found)}: call it for each")
    return found[0]


def need(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Check that a frame has rows, and the columns that ``what`` uses.

    Raises
    ------
    AnalysisError
        If it is no frame, lacks a column or has no rows; names what makes such a frame.
    """
    maker = f"{MADE_BY[what]} makes such a frame"
    if not isinstance(frame, pd.DataFrame):
        raise AnalysisError(f"{what} needs a DataFrame, got {type(frame).__name__}: {maker}")
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise AnalysisError(f"{what} needs columns {missing}; this frame has {list(map(str, frame.columns))}. {maker}")
    if frame.empty:
        raise AnalysisError(f"{what}: the frame has no rows")

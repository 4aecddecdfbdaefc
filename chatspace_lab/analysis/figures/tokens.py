"""Lines over tokens: one value of a baseline and of a steered run, with the messages behind."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from chatspace_lab.analysis.figures.style import (
    BAND,
    BASELINE,
    STEERED,
    axis_name,
    escape,
    finish,
    one,
    shown_token,
    ticks,
)
from chatspace_lab.analysis.frames import directions_of, sinks_of
from chatspace_lab.analysis.inputs import need
from chatspace_lab.errors import AnalysisError


def projection_lines(
    steered: pd.DataFrame,
    baseline: pd.DataFrame | None = None,
    *,
    layer: int,
    direction: str | None = None,
    value: str | None = None,
    first_token: bool = False,
) -> go.Figure:
    """Draw the projection on a direction per token: baseline grey and dashed, steered in colour, messages as bands.

    Parameters
    ----------
    steered
        A token frame of one request: the run in colour.
    baseline
        A token frame of one request to compare with.
    layer
        Which layer.
    direction
        Name of the direction; may be left out if the frame has only one.
    value
        Another column in place of the projection: ``"cosine_NAME"`` or ``"norm"``.
    first_token
        Whether to draw attention sinks: the token at position 0 and the others of :func:`attention_sinks`, whose
        activations dwarf all others. The axis says so.

    Raises
    ------
    AnalysisError
        If a frame lacks the layer or column, or holds several requests.
    """
    for run in (steered,) if baseline is None else (steered, baseline):
        need(run, ["request", "layer", "position", "token_id", "token", "role", "message"], "projection_lines")
    column = value or f"projection_{_only_direction(steered, direction)}"
    runs = [("baseline", baseline, BASELINE, "dash", "circle-open"), ("steered", steered, STEERED, "solid", "circle")]
    figure = go.Figure()
    chosen = steered
    for name, run, colour, dash, symbol in runs:
        if run is None:
            continue
        need(run, [column], "projection_lines")
        one(run, "request", f"projection_lines ({name})")
        here = run[run["layer"] == layer]
        chosen = (here if first_token else here[~sinks_of(here)]).sort_values("position")
        if chosen.empty:
            layers = sorted(int(at) for at in run["layer"].unique())
            left_out = "" if first_token else "; attention sinks, as at position 0, are drawn with first_token=True"
            raise AnalysisError(f"{name}: no token of layer {layer} to draw; the frame has layers {layers}{left_out}")
        figure.add_scatter(
            x=chosen["position"],
            y=chosen[column],
            mode="lines+markers",
            name=name if baseline is not None else "run",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 6},
            customdata=list(zip(_texts(chosen), map(escape, chosen["role"]), strict=True)),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}, position %{x}<br>%{y:.4g}"
            "<extra>%{fullData.name}</extra>",
        )
    for index, (role, start, end) in enumerate(_bands(chosen)):
        wide = end - start + 1 >= len(chosen) / 25  # a name on a narrower band would run into the next one
        label = {"annotation_text": escape(role), "annotation_position": "top left"} if wide else {}
        figure.add_vrect(start - 0.5, end + 0.5, fillcolor=BAND[index % 2], line_width=0, layer="below", **label)
    said, where = (
        axis_name(column),
        "token (by position)" if first_token else "token (by position, attention sinks left out)",
    )
    finish(figure, f"{said.split(' (')[0]} per token, layer {layer}", where, said)
    figure.update_xaxes(**ticks([int(at) for at in chosen["position"]], _texts(chosen)), showgrid=False)
    figure.update_yaxes(zeroline=True)
    return figure


def _only_direction(frame: pd.DataFrame, direction: str | None) -> str:
    names = directions_of(frame)
    if direction is None and len(names) == 1:
        return names[0]
    if direction is None or direction not in names:
        raise AnalysisError(f"projection_lines: name one of the frame's directions, {names}; got {direction!r}")
    return direction


def _texts(frame: pd.DataFrame) -> list[str]:
    return [shown_token(token, at) for token, at in zip(frame["token"], frame["token_id"], strict=True)]


def _bands(frame: pd.DataFrame) -> Iterator[tuple[str, int, int]]:
    """Yield role, first and last position of each message and of the answer, as far as the frame has them."""
    inside = frame[frame["message"].notna() | (frame["role"] == "answer")]
    keys = inside["message"].astype("object").where(inside["message"].notna(), "answer")
    for _, part in inside.groupby(keys, sort=False):
        yield str(part["role"].iloc[0]), int(part["position"].min()), int(part["position"].max())

"""Bars of the mean norm of each message."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from chatspace_lab.analysis.figures.style import PATTERNS, axis_name, escape, finish, hues
from chatspace_lab.analysis.inputs import need


def message_norm_bars(messages: pd.DataFrame, value: str = "norm") -> go.Figure:
    """Draw the mean norm of each message as bars, a group per message and a bar per request and layer.

    Parameters
    ----------
    messages
        Of :func:`message_frame` or :func:`message_summary`. A message without numbers has a "?" in place of its bar,
        and hovering says why.
    value
        Another column: ``"norm_of_mean"``, ``"projection_NAME"`` or ``"cosine_NAME"``.

    Raises
    ------
    AnalysisError
        If a column is missing.
    """
    need(messages, ["request", "layer", "message", "label", "tokens", "problem", value], "message_norm_bars")
    several = messages["request"].nunique() > 1
    groups = list(messages.groupby(["request", "layer"] if several else ["layer"], sort=False))
    figure = go.Figure()
    for index, ((key, part), colour) in enumerate(zip(groups, hues(len(groups)), strict=True)):
        name = f"{key[0]}, layer {key[1]}" if several else f"layer {key[0]}"
        labels = [escape(label) for label in part["label"]]
        figure.add_bar(
            x=labels,
            y=part[value],
            name=escape(name),
            marker={"color": colour, "pattern": {"shape": PATTERNS[index % len(PATTERNS)]}},
            customdata=part[["tokens"]],
            hovertemplate="%{x}<br>%{y:.4g}, mean of %{customdata[0]} tokens<extra>" + escape(name) + "</extra>",
        )
    unknown = messages[messages["problem"] != ""].drop_duplicates("label")
    if len(unknown):
        figure.add_scatter(
            x=[escape(label) for label in unknown["label"]],
            y=[0.0] * len(unknown),
            mode="text",
            text=["?"] * len(unknown),
            textposition="top center",
            textfont={"size": 22},
            customdata=[escape(problem) for problem in unknown["problem"]],
            hovertemplate="%{customdata}<extra></extra>",
            name="? no numbers (hover: why)",
        )
    said = "norm of the mean activation (residual units)" if value == "norm_of_mean" else f"mean {axis_name(value)}"
    finish(figure, f"{said.split(' (')[0]} per message", "message (index and role)", said)
    order = messages.sort_values("message", kind="stable", na_position="last")["label"]  # the answer comes last
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(map(escape, dict.fromkeys(order))))
    figure.update_layout(barmode="group")
    return figure

"""Profiles over layers."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from chatspace_lab.analysis.figures.style import DASHES, SYMBOLS, axis_name, escape, finish, hues
from chatspace_lab.analysis.inputs import need


def layer_profile(layers: pd.DataFrame, value: str = "norm", *, by: str | None = None) -> go.Figure:
    """Draw a mean over tokens per layer, a line per request, role, ….

    Parameters
    ----------
    layers
        Of :func:`layer_frame`.
    value
        ``"norm"``, ``"projection_NAME"`` or ``"cosine_NAME"``.
    by
        Column that names the lines; the frame's first with None. Other columns that keep rows apart are joined to it.

    Raises
    ------
    AnalysisError
        If a column is missing.
    """
    need(layers, ["layer", "tokens", value], "layer_profile")
    kept = list(layers.columns[: list(layers.columns).index("layer")])
    kept = [by, *(column for column in kept if column != by)] if by else kept
    need(layers, kept, "layer_profile")
    groups = list(layers.groupby(kept, sort=False, dropna=False)) if kept else [(("all",), layers)]
    figure = go.Figure()
    for index, ((key, part), colour) in enumerate(zip(groups, hues(len(groups)), strict=True)):
        ordered = part.sort_values("layer")
        figure.add_scatter(
            x=ordered["layer"],
            y=ordered[value],
            mode="lines+markers",
            name=escape(", ".join(map(str, key))),
            line={"color": colour, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
            customdata=ordered[["tokens"]],
            hovertemplate="layer %{x}<br>%{y:.4g}, mean of %{customdata[0]} tokens<extra>%{fullData.name}</extra>",
        )
    said = axis_name(value)
    x = "layer (output of block)"
    return finish(figure, f"mean {said.split(' (')[0]} per layer", x, f"mean {said}", legend=", ".join(kept))

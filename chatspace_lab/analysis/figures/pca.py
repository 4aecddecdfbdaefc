"""A set of means on its first principal components."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from chatspace_lab.analysis.figures.style import SYMBOLS, escape, finish, hues
from chatspace_lab.analysis.inputs import need


def pca_scatter(places: pd.DataFrame, *, across: int = 1, up: int = 2, title: str = "PCA of means") -> go.Figure:
    """Draw two principal components of a set of means, each with its label; a colour and a symbol per group.

    Parameters
    ----------
    places
        The frame of :func:`pca_frame`.
    across, up
        Which components, counted from 1.
    title
        Of the figure.

    Raises
    ------
    AnalysisError
        If the frame lacks a component.
    """
    need(places, ["label", "group", f"pc{across}", f"pc{up}", f"explained{across}", f"explained{up}"], "pca_scatter")
    groups = list(places.groupby("group", sort=False))
    figure = go.Figure()
    for index, ((group, part), colour) in enumerate(zip(groups, hues(len(groups)), strict=True)):
        figure.add_scatter(
            x=part[f"pc{across}"],
            y=part[f"pc{up}"],
            mode="markers+text",
            text=[escape(label) for label in part["label"]],
            textposition="top center",
            name=escape(group) or "means",
            marker={"color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 11},
            cliponaxis=False,
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra>%{fullData.name}</extra>",
        )
    names = [
        f"PC {number} ({100 * places[f'explained{number}'].iloc[0]:.0f} % of the variance, residual units)"
        for number in (across, up)
    ]
    return finish(figure, title, *names, height=520).update_xaxes(zeroline=True)

"""How far a direction can be trusted, layer by layer."""

from __future__ import annotations

import pandas as pd
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from chatspace_lab.analysis.figures.style import BASELINE, SYMBOLS, finish, hues, one
from chatspace_lab.analysis.inputs import need

_LINES = (
    ("auc", "held-out AUC", None, "solid"),
    ("split_half", "cosine of halves", None, "dash"),
    ("shuffled", "AUC, shuffled labels (mean)", BASELINE, "dot"),
    ("shuffled_high", "AUC, shuffled labels (95 % below)", BASELINE, "dashdot"),
)


def direction_quality(quality: pd.DataFrame) -> Figure:
    """Draw held-out AUC, its shuffled baseline and the cosine of halves per layer; below, the raw length.

    Parameters
    ----------
    quality
        ``direction.frame()``, of one direction.

    Raises
    ------
    AnalysisError
        If a column is missing, or there are several directions.
    """
    columns = [column for column, *_ in _LINES]
    need(quality, ["direction", "method", "layer", "norm", *columns], "direction_quality")
    name = one(quality, "direction", "direction_quality")
    ordered = quality.sort_values("layer")
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.07)
    colours = iter(hues(3))
    for index, (column, label, grey, dash) in enumerate(_LINES):
        figure.add_scatter(
            x=ordered["layer"],
            y=ordered[column],
            mode="lines+markers",
            name=label,
            line={"color": grey or next(colours), "dash": dash},
            marker={"symbol": SYMBOLS[index], "size": 7},
            hovertemplate="layer %{x}<br>%{y:.3f}<extra>%{fullData.name}</extra>",
            row=1,
            col=1,
        )
    figure.add_bar(
        x=ordered["layer"],
        y=ordered["norm"],
        name="length of the raw difference",
        marker={"color": next(colours)},
        hovertemplate="layer %{x}<br>%{y:.4g}<extra>%{fullData.name}</extra>",
        row=2,
        col=1,
    )
    finish(figure, f"{name}: {quality['method'].iloc[0]}, per layer", "", "", height=520)
    figure.update_xaxes(title_text="layer (output of block)", row=2, col=1)
    figure.update_yaxes(title_text="AUC and cosine (1 is perfect)", row=1, col=1)
    figure.update_yaxes(title_text="length<br>(residual units)", row=2, col=1)
    return figure

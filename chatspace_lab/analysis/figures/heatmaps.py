"""Heatmaps: tokens by layers, and cosines of everything with everything."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from chatspace_lab.analysis.figures.style import (
    DIVERGING,
    SEQUENTIAL,
    axis_name,
    escape,
    finish,
    name_of,
    one,
    shown_token,
    ticks,
)
from chatspace_lab.analysis.frames import sinks_of
from chatspace_lab.analysis.inputs import need


def token_heatmap(tokens: pd.DataFrame, value: str = "norm", *, share: float = 0.98) -> go.Figure:
    """Draw one value of a token frame, a column per token and a row per captured layer, the last layer on top.

    Parameters
    ----------
    tokens
        A token frame of one request.
    value
        ``"norm"``, ``"projection_NAME"`` or ``"cosine_NAME"``.
    share
        Share of the cells within the range of colours, attention sinks not counted, so that a few large ones do not
        make all others look alike. The colour bar says where it ends; hovering shows every number.

    Raises
    ------
    AnalysisError
        If the column is missing, or the frame holds several requests.
    """
    need(tokens, ["request", "layer", "position", "token_id", "token", "role", "norm", value], "token_heatmap")
    one(tokens, "request", "token_heatmap")
    grid = tokens.pivot(index="layer", columns="position", values=value).sort_index()
    labels = tokens.drop_duplicates("position").set_index("position").loc[grid.columns]
    texts = [shown_token(token, at) for token, at in zip(labels["token"], labels["token_id"], strict=True)]
    positions, layers = [int(at) for at in grid.columns], [str(layer) for layer in grid.index]
    about = np.stack([texts, [escape(role) for role in labels["role"]], [str(at) for at in positions]], axis=-1)
    cells = grid.to_numpy(dtype=float)
    signed = value != "norm"
    sizes = np.abs(cells[np.isfinite(cells)])  # there may be none: cosines of rows that are zero
    usual = np.abs(tokens[~sinks_of(tokens)][value].to_numpy(dtype=float))
    usual = usual[np.isfinite(usual)] if np.isfinite(usual).any() else sizes
    limit = (float(np.quantile(usual, share)) if usual.size else 0.0) or 1.0
    beyond = bool((sizes > limit).any())
    name, unit = name_of(value)
    bar = f"{escape(name)}<br>({escape(unit)})" + (f"<br>colour ends<br>at {limit:.3g}" if beyond else "")
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            x=list(range(len(positions))),  # not the positions: between those captured there may be others
            y=layers,
            customdata=np.broadcast_to(about, (len(grid), *about.shape)),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}, position %{customdata[2]}, layer %{y}<br>%{z:.4g}"
            "<extra></extra>",
            colorscale=DIVERGING if signed else SEQUENTIAL,
            zmin=-limit if signed else 0.0,
            zmax=limit,
            colorbar={"title": {"text": bar}},
            name=escape(name),
        )
    )
    finish(figure, f"{name} per token and layer", "token (by position)", "layer (output of block)", height=480)
    figure.update_xaxes(**ticks(list(range(len(texts))), texts), showgrid=False)
    step = -(-len(layers) // 40)
    figure.update_yaxes(type="category", tickmode="array", tickvals=layers[::step], showgrid=False)
    figure.update_layout(showlegend=False)  # the colour bar is the legend
    return figure


def cosine_matrix(cosines: pd.DataFrame, *, title: str = "cosine between means") -> go.Figure:
    """Draw a frame of cosines between each two of some vectors as a square, with its numbers.

    Parameters
    ----------
    cosines
        Columns ``first``, ``second``, ``cosine``: of :func:`message_cosines` (one request and layer), or of
        :func:`cosine_frame`. Missing cosines are left blank, and hovering says why.
    title
        Of the figure.

    Raises
    ------
    AnalysisError
        If a column is missing, or there are several requests or layers.
    """
    need(cosines, ["first", "second", "cosine"], "cosine_matrix")
    for column in ("request", "layer"):
        if column in cosines:
            one(cosines, column, "cosine_matrix")
    if "layer" in cosines:
        title = f"{title}, layer {cosines['layer'].iloc[0]}"
    order = list(dict.fromkeys(cosines["first"]))
    square = cosines.pivot(index="first", columns="second", values="cosine").loc[order, order].to_numpy(dtype=float)
    problems = cosines if "problem" in cosines else cosines.assign(problem="")
    why = problems.pivot(index="first", columns="second", values="problem").loc[order, order]
    names = [escape(label) for label in order]
    figure = go.Figure(
        go.Heatmap(
            z=square,
            x=names,
            y=names,
            text=[["" if np.isnan(cell) else f"{cell:.2f}" for cell in row] for row in square],
            texttemplate="%{text}",
            customdata=[[escape(problem) for problem in row] for row in why.to_numpy()],
            hovertemplate="%{y} · %{x}<br>cosine %{z:.4f}<br>%{customdata}<extra></extra>",
            hoverongaps=True,
            colorscale=DIVERGING,
            zmin=-1.0,
            zmax=1.0,
            colorbar={"title": {"text": escape(axis_name("cosine"))}},
            name="cosine",
        )
    )
    finish(figure, title, "mean over", "mean over", height=max(360, 60 + 40 * len(order)))
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_layout(showlegend=False)
    return figure

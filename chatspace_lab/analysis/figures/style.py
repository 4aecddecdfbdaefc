"""Colours, layout and text that all figures share."""

from __future__ import annotations

import pandas as pd
import plotly.colors
import plotly.graph_objects as go

from chatspace_lab.analysis.tokens import visible
from chatspace_lab.errors import AnalysisError

INK = "#797979"
"""Text and axes: a contrast of 4.3 on white as on the near-black of JupyterLab's dark theme."""

GRID = "rgba(127,127,127,0.25)"
BAND = ("rgba(127,127,127,0.10)", "rgba(127,127,127,0.20)")
BASELINE, STEERED = "#8c8c8c", "#e8590c"
DIVERGING = [[0.0, "#b2182b"], [0.25, "#ef8a62"], [0.5, "#ffffff"], [0.75, "#67a9cf"], [1.0, "#2166ac"]]
"""Negative red, zero white, positive blue."""

SEQUENTIAL = "Viridis"
_HUES = ["#3b7dd8", "#12a5a0", "#5aa02c", "#c99700", "#e8590c", "#d6336c"]  # of a brightness that reads on both
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")


def escape(text: object) -> str:
    """Escape text for plotly, which reads HTML tags, entities, LaTeX and line breaks; line breaks become "⏎"."""
    shown = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
    return shown.replace("\n", "⏎")


def shown_token(token: object, token_id: int) -> str:
    """Return a token's escaped text with white space made visible, or its id if the frame has no text."""
    return escape(f"#{token_id}") if pd.isna(token) else escape(visible(str(token)))


def excerpt(text: object, width: int = 60, lines: int = 4) -> str:
    """Return the first ``lines`` lines of ``width`` characters of a text, escaped, for a hover label."""
    literal = str(text).replace("\n", "⏎")
    parts = [literal[at : at + width] for at in range(0, len(literal), width)]
    more = "…" if len(parts) > lines else ""
    return "<br>".join(escape(part) for part in parts[:lines]) + more


def hues(count: int) -> list[str]:
    """Return ``count`` colours, evenly spaced along a scale from blue to red."""
    if count == 1:
        return [_HUES[0]]
    return list(plotly.colors.sample_colorscale(_HUES, [index / (count - 1) for index in range(count)]))


def finish(figure: go.Figure, title: str, x: str, y: str, *, height: int = 420, legend: str = "") -> go.Figure:
    """Set a figure's title, axis titles, legend and colours; all texts are escaped.

    Figures with several subplots pass "" for ``x`` and ``y`` and set their own axis titles.
    """
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 16}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK},
        legend={"title": {"text": escape(legend)}, "bgcolor": "rgba(0,0,0,0)"},
        height=height,
        margin={"l": 70, "r": 30, "t": 70, "b": 60},
        showlegend=True,
    )
    axis = {"gridcolor": GRID, "zerolinecolor": INK, "linecolor": INK, "automargin": True}
    figure.update_xaxes(**axis, title_text=escape(x), zeroline=False)
    figure.update_yaxes(**axis, title_text=escape(y))
    return figure


def one(frame: pd.DataFrame, column: str, what: str) -> object:
    """Return the only value of a column.

    Raises
    ------
    AnalysisError
        If the column has several values; the message says how to select one.
    """
    values = frame[column].unique()
    if len(values) != 1:
        few = ", ".join(map(str, values[:4]))
        raise AnalysisError(f"{what} shows one {column}, and the frame has {few}, …: frame[frame.{column} == …]")
    return values[0]


def name_of(value: str) -> tuple[str, str]:
    """Return the name and the unit of the quantity in a column of a token or layer frame."""
    if value.startswith("projection_"):
        return f"projection on {value.removeprefix('projection_')}", "residual units"
    if value.startswith("cosine_"):
        return f"cosine to {value.removeprefix('cosine_')}", "−1 to 1"
    return {"norm": ("norm", "residual units")}.get(value, (value, ""))


def axis_name(value: str) -> str:
    """Return an axis title for a column: the quantity, and its unit in brackets."""
    name, unit = name_of(value)
    return f"{name} ({unit})" if unit else name


def ticks(positions: list[int], labels: list[str], limit: int = 80) -> dict[str, object]:
    """Return the tick arguments of an axis of tokens, at most ``limit`` of which have a label."""
    step = -(-len(positions) // limit) or 1
    return {"tickmode": "array", "tickvals": positions[::step], "ticktext": labels[::step], "tickangle": -60}

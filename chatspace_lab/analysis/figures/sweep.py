"""What a sweep of scales does: effect and coherence against the dose."""

from __future__ import annotations

import pandas as pd
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from chatspace_lab.analysis.figures.style import DASHES, SYMBOLS, escape, excerpt, finish, hues
from chatspace_lab.analysis.inputs import need
from chatspace_lab.errors import AnalysisError

_PANELS = {
    "projection": "mean projection<br>(residual units)",
    "perplexity": "perplexity<br>(unsteered model)",
    "repetition": "repeated 3-grams<br>(share)",
}


def dose_response(sweep: pd.DataFrame, *, x: str | None = None) -> Figure:
    """Draw projection, perplexity and repetition against the dose, one below the other, a line per layer.

    Parameters
    ----------
    sweep
        Columns ``layer``, ``scale`` and at least one of ``projection``, ``perplexity`` and ``repetition``; ``dose`` and
        ``text`` where there are. Hovering shows scale, dose and text together.
    x
        ``"dose"`` or ``"scale"``; the dose where the frame has it, with None.

    Raises
    ------
    AnalysisError
        If a column is missing.
    """
    need(sweep, ["layer", "scale"], "dose_response")
    across = x or ("dose" if "dose" in sweep and sweep["dose"].notna().all() else "scale")
    need(sweep, [across], "dose_response")
    panels = [column for column in _PANELS if column in sweep and sweep[column].notna().any()]
    if not panels:
        raise AnalysisError(f"dose_response needs one of the columns {list(_PANELS)} with numbers in it")
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    groups = list(sweep.groupby("layer", sort=True))
    for index, ((layer, part), colour) in enumerate(zip(groups, hues(len(groups)), strict=True)):
        ordered = part.sort_values(across)
        doses = ordered["dose"] if "dose" in ordered else pd.Series(float("nan"), index=ordered.index)
        texts = ordered["text"] if "text" in ordered else pd.Series("", index=ordered.index)
        about = [
            (f"{scale:.4g}", "unknown" if pd.isna(dose) else f"{dose:.2f}", excerpt(text))
            for scale, dose, text in zip(ordered["scale"], doses, texts, strict=True)
        ]
        for row, column in enumerate(panels, start=1):
            figure.add_scatter(
                x=ordered[across],
                y=ordered[column],
                mode="lines+markers",
                name=f"layer {layer}",
                legendgroup=str(layer),
                showlegend=row == 1,
                line={"color": colour, "dash": DASHES[index % len(DASHES)]},
                marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
                customdata=about,
                hovertemplate=f"{column} %{{y:.4g}}<br>scale %{{customdata[0]}}, dose %{{customdata[1]}}"
                "<br>%{customdata[2]}<extra>%{fullData.name}</extra>",
                row=row,
                col=1,
            )
    finish(figure, f"response to the {across}", "", "", height=160 + 190 * len(panels))
    named = {"dose": "dose (scale · |vector| / mean residual norm)", "scale": "scale (times the vector)"}
    figure.update_xaxes(zeroline=True)
    figure.update_xaxes(title_text=escape(named.get(across, across)), row=len(panels), col=1)
    for row, column in enumerate(panels, start=1):
        figure.update_yaxes(title_text=_PANELS[column], row=row, col=1)
        if column == "perplexity":
            figure.update_yaxes(type="log", row=row, col=1)
    return figure

"""Figures as files that need nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import plotly.graph_objects as go

from chatspace_lab.errors import ExportError


def save_figure(
    figure: go.Figure,
    path: str | Path,
    *,
    width: int = 1000,
    scale: float = 2.0,
    background: str | None = "white",
) -> Path:
    """Write a figure to ``path``, by its ending.

    Parameters
    ----------
    figure
        Any plotly figure.
    path
        ``.html`` holds plotly's own code and asks for nothing from elsewhere (4 to 5 MB). ``.png`` needs kaleido and
        Chrome or Chromium. Folders are made.
    width, scale
        Of the PNG: width in CSS pixels, and pixels per CSS pixel.
    background
        Colour of the page behind the figure, as CSS writes it. None keeps the figure's own: those of this package are
        transparent, with grey text that reads on light and on dark pages.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    ExportError
        If the ending is another, or what a PNG needs is missing; says what.
    """
    file = Path(path)
    if file.suffix not in (".html", ".png"):
        raise ExportError(f"{file.name}: figures are written as .html or .png")
    file.parent.mkdir(parents=True, exist_ok=True)
    if background is not None:
        figure = go.Figure(figure).update_layout(paper_bgcolor=background)
    if file.suffix == ".html":
        config = {"displaylogo": False, "responsive": True}
        figure.write_html(file, include_plotlyjs=True, include_mathjax=False, config=config)
        return file
    if importlib.util.find_spec("kaleido") is None:
        raise ExportError(f"{file.name}: PNG files need kaleido: pip install kaleido, or write .html")
    try:
        figure.write_image(file, format="png", width=width, scale=scale)
    except Exception as error:
        # Kaleido's own errors change between its versions; ChromeNotFoundError is one, a browser that dies another.
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise ExportError(
            f"{file.name}: kaleido cannot draw it ({type(error).__name__}: {reason}); it needs "
            f"Chrome or Chromium, on PATH or named by BROWSER_PATH. Or write .html, which needs neither"
        ) from error
    return file

"""Figures: what they draw, what they call it, and that text appears as typed."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from choreographer.browsers.chromium import Chromium

from chatspace_lab import MessageBoundary
from chatspace_lab.analysis import (
    Direction,
    cosine_frame,
    cosine_matrix,
    direction_quality,
    dose_response,
    layer_frame,
    layer_profile,
    mean_activation,
    message_cosines,
    message_frame,
    message_means,
    message_norm_bars,
    message_summary,
    pca_frame,
    pca_scatter,
    projection_lines,
    save_figure,
    token_frame,
    token_heatmap,
)
from chatspace_lab.analysis.figures import style
from chatspace_lab.errors import AnalysisError, ExportError, MessageLocationError
from tests.analysis.handles import handle

TYPED = ["<think>", "</script>", "&amp;", "$x$", " a", "\n", "<b>b</b>"]
SHOWN = ["&lt;think&gt;", "&lt;/script&gt;", "&amp;amp;", "&#36;x&#36;", "·a", "⏎", "&lt;b&gt;b&lt;/b&gt;"]
BOUNDARIES = (MessageBoundary("system", "s", 1, 3), MessageBoundary("<b>user", "u", 3, 5))
LOST = MessageLocationError("message 1 (user) cannot be located: <b>why")
NAME = "formal <b>"


class Typed:
    """A tokenizer whose token i is TYPED[i]; none is special."""

    all_special_ids: tuple[int, ...] = ()

    def convert_ids_to_tokens(self, token: int) -> str:
        return TYPED[token]

    def decode(self, ids: list[int], **options: Any) -> str:
        return TYPED[ids[0]]


def run(request: str = "a", shift: float = 0.0, **options: Any) -> Any:
    """Return a request whose norms are 10·layer + position, all along the first axis, but for the last token."""
    rows = np.zeros((2, 7, 2))
    for index, layer in enumerate((1, 4)):
        rows[index, :, 0] = 10 * layer + np.arange(7) + shift
    rows[:, 6] *= -1
    settings = {"prompt": range(6), "answer": [6, 0], "layers": (1, 4), "boundaries": BOUNDARIES, **options}
    return handle(rows, request=request, **settings)


def frame(request: str = "a", shift: float = 0.0, **options: Any) -> pd.DataFrame:
    return token_frame(run(request, shift, **options), Typed(), {NAME: [1.0, 0.0]})


def quality() -> pd.DataFrame:
    known = {name: {0: 0.6, 1: 0.9} for name in ("auc", "shuffled", "shuffled_high", "split_half")}
    return Direction("d", {0: [1.0], 1: [1.0]}, {0: 2.0, 1: 3.0}, "probe", **known).frame()


def sweep() -> pd.DataFrame:
    records = [
        (layer, scale, scale / 10, f"<b>{scale} $x$", scale * 2.0, 2.0 + abs(scale), 0.1)
        for layer in (3, 6)
        for scale in (4.0, -4.0, 0.0)
    ]
    return pd.DataFrame(records, columns=["layer", "scale", "dose", "text", "projection", "perplexity", "repetition"])


def places() -> pd.DataFrame:
    means = {"<b>a": [2.0, 0.0], "b": [-2.0, 0.0], "c": [0.0, 1.0], "d": [0.0, -1.0]}
    return pca_frame(means, {"<b>a": "one", "b": "one", "c": "two", "d": "two"})[0]


FIGURES: dict[str, Callable[[], go.Figure]] = {
    "token_heatmap": lambda: token_heatmap(frame(), f"projection_{NAME}"),
    "projection_lines": lambda: projection_lines(frame(shift=5.0), frame(), layer=4),
    "message_norm_bars": lambda: message_norm_bars(message_frame(run(boundaries=(BOUNDARIES[0], LOST)))),
    "layer_profile": lambda: layer_profile(layer_frame(frame(), ("role",))),
    "cosine_matrix": lambda: cosine_matrix(message_cosines(run(), 4)),
    "pca_scatter": lambda: pca_scatter(places()),
    "dose_response": lambda: dose_response(sweep()),
    "direction_quality": lambda: direction_quality(quality()),
}


def axes(figure: go.Figure) -> set[str]:
    """Return the names of the axes that have one."""
    names = (axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes()))
    return {name for name in names if name}


@pytest.mark.parametrize(
    ("name", "title", "named"),
    [
        (
            "token_heatmap",
            "projection on formal &lt;b&gt; per token and layer",
            {"token (by position)", "layer (output of block)"},
        ),
        (
            "projection_lines",
            "projection on formal &lt;b&gt; per token, layer 4",
            {"token (by position, attention sinks left out)", "projection on formal &lt;b&gt; (residual units)"},
        ),
        ("message_norm_bars", "mean norm per message", {"message (index and role)", "mean norm (residual units)"}),
        ("layer_profile", "mean norm per layer", {"layer (output of block)", "mean norm (residual units)"}),
        ("cosine_matrix", "cosine between means, layer 4", {"mean over"}),
        (
            "pca_scatter",
            "PCA of means",
            {"PC 1 (80 % of the variance, residual units)", "PC 2 (20 % of the variance, residual units)"},
        ),
        (
            "dose_response",
            "response to the dose",
            {
                "dose (scale · |vector| / mean residual norm)",
                "mean projection<br>(residual units)",
                "perplexity<br>(unsteered model)",
                "repeated 3-grams<br>(share)",
            },
        ),
        (
            "direction_quality",
            "d: probe, per layer",
            {"layer (output of block)", "AUC and cosine (1 is perfect)", "length<br>(residual units)"},
        ),
    ],
)
def test_titles_axes_and_legends(name: str, title: str, named: set[str]) -> None:
    figure = FIGURES[name]()
    assert figure.layout.title.text == title
    assert axes(figure) == named
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.font.color == style.INK
    shown = [trace for trace in figure.data if trace.type != "heatmap"]
    if shown:
        assert figure.layout.showlegend
        assert all(trace.name for trace in shown)
    else:
        assert figure.data[0].colorbar.title.text


def test_ink_reads_on_white_and_on_black() -> None:
    def brightness(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert 1.05 / (brightness(style.INK) + 0.05) > 4.3
    assert (brightness(style.INK) + 0.05) / (brightness("#111111") + 0.05) > 4.3


def test_token_heatmap() -> None:
    figure = token_heatmap(frame(), f"projection_{NAME}", share=1.0)
    (cells,) = figure.data
    assert cells.z.tolist() == [[10, 11, 12, 13, 14, 15, -16], [40, 41, 42, 43, 44, 45, -46]]
    assert (list(cells.x), list(cells.y)) == (list(range(7)), ["1", "4"])
    assert (cells.zmin, cells.zmax) == (-46, 46)  # so that white is zero
    assert cells.colorscale[0][1] == "#b2182b"
    assert cells.colorscale[2] == (0.5, "#ffffff")
    assert cells.colorscale[-1][1] == "#2166ac"
    assert list(figure.layout.xaxis.ticktext) == SHOWN
    assert cells.customdata[0, :, 0].tolist() == SHOWN
    assert cells.customdata[1, 3].tolist() == [SHOWN[3], "&lt;b&gt;user", "3"]
    norms = token_heatmap(frame())
    assert norms.data[0].zmin == 0
    assert "colour ends<br>at" in norms.data[0].colorbar.title.text
    assert "colour ends" not in cells.colorbar.title.text
    with pytest.raises(AnalysisError, match="shows one request, and the frame has a, b"):
        token_heatmap(pd.concat([frame(), frame("b")]))
    with pytest.raises(AnalysisError, match=r"needs columns \['cosine_other'\]"):
        token_heatmap(frame(), "cosine_other")
    with pytest.raises(AnalysisError, match="the frame has no rows"):
        token_heatmap(frame()[:0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = token_heatmap(frame().assign(**{f"cosine_{NAME}": np.nan}), f"cosine_{NAME}")  # rows that are zero
    assert (nothing.data[0].zmin, nothing.data[0].zmax) == (-1, 1)


def test_a_heatmap_has_a_row_per_captured_layer_and_a_column_per_captured_token() -> None:
    """In place of bands that reach half-way to the next layer, or over tokens that were not captured."""
    rows = np.ones((3, 3, 2))
    captured = handle(rows, prompt=range(6), answer=[6, 0], layers=(8, 16, 24), spans=(1, 3, 6, -1))
    figure = token_heatmap(token_frame(captured, Typed()))
    assert (list(figure.data[0].x), list(figure.data[0].y)) == ([0, 1, 2], ["8", "16", "24"])
    assert figure.layout.yaxis.type == "category"
    assert list(figure.layout.yaxis.tickvals) == ["8", "16", "24"]
    assert list(figure.layout.xaxis.ticktext) == [SHOWN[1], SHOWN[2], SHOWN[6]]
    assert figure.data[0].customdata[0, :, 2].tolist() == ["1", "2", "6"]


@pytest.mark.parametrize("function", [message_cosines, message_frame, token_frame, mean_activation, message_means])
def test_what_needs_activations_names_what_a_frame_is_good_for(function: Any) -> None:
    arguments = (4,) if function in (mean_activation, message_means) else ()
    with pytest.raises(AnalysisError, match=rf"^{function.__name__} needs .*got a DataFrame.*message_sum"):
        function(frame(), *arguments)


@pytest.mark.parametrize(
    ("function", "made_by"),
    [
        (token_heatmap, "token_frame"),
        (lambda given: projection_lines(given, layer=4, direction=NAME), "token_frame"),
        (layer_frame, "token_frame"),
        (message_summary, "token_frame"),
        (message_norm_bars, "message_frame"),
        (layer_profile, "layer_frame"),
        (cosine_matrix, "message_cosines"),
        (pca_scatter, "pca_frame"),
        (dose_response, r"lab\.sweep"),
        (direction_quality, r"direction\.frame"),
    ],
)
def test_what_draws_a_frame_names_what_makes_it(function: Any, made_by: str) -> None:
    with pytest.raises(AnalysisError, match=rf"needs a DataFrame, got CaptureHandle: .*{made_by}"):
        function(run())
    with pytest.raises(AnalysisError, match=rf"needs columns .*{made_by}"):
        function(pd.DataFrame({"other": [1]}))


def test_ids_stand_in_for_missing_texts() -> None:
    assert token_heatmap(token_frame(run())).layout.xaxis.ticktext[:2] == ("#0", "#1")


def test_many_tokens_are_not_all_named() -> None:
    assert style.ticks(list(range(200)), ["t"] * 200)["tickvals"] == list(range(0, 200, 3))
    assert style.ticks([5, 6], ["a", "b"])["tickvals"] == [5, 6]


def test_projection_lines() -> None:
    figure = projection_lines(frame(shift=5.0), frame(), layer=4)
    baseline, steered = figure.data
    assert (baseline.name, baseline.line.color, baseline.line.dash) == ("baseline", style.BASELINE, "dash")
    assert (steered.name, steered.line.color, steered.line.dash) == ("steered", style.STEERED, "solid")
    assert list(baseline.y) == [41, 42, 43, 44, 45, -46]
    assert list(steered.y) == [46, 47, 48, 49, 50, -51]
    assert list(steered.x) == [1, 2, 3, 4, 5, 6]
    assert [row[0] for row in steered.customdata] == SHOWN[1:]
    bands = [(shape.x0, shape.x1, shape.layer) for shape in figure.layout.shapes]
    assert bands == [(0.5, 2.5, "below"), (2.5, 4.5, "below"), (5.5, 6.5, "below")]
    assert [note.text for note in figure.layout.annotations] == ["system", "&lt;b&gt;user", "answer"]
    whole = projection_lines(frame(), layer=4, value="norm", first_token=True)
    assert list(whole.data[0].y) == [40, 41, 42, 43, 44, 45, 46]
    assert whole.data[0].name == "run"
    with pytest.raises(AnalysisError, match=r"no token of layer 2 to draw; the frame has layers \[1, 4\]"):
        projection_lines(frame(), layer=2)
    with pytest.raises(AnalysisError, match="attention sinks, as at position 0, are drawn with first_token=True"):
        projection_lines(frame()[lambda each: each["position"] == 0], layer=4)
    with pytest.raises(AnalysisError, match="name one of the frame's directions"):
        projection_lines(frame(), layer=4, direction="other")


def test_message_norm_bars() -> None:
    figure = message_norm_bars(message_frame(run(boundaries=(BOUNDARIES[0], LOST))))
    low, high, unknown = figure.data
    assert [low.name, high.name] == ["layer 1", "layer 4"]
    assert list(low.x) == ["0 system", "1 unlocated", "answer"]
    assert np.nan_to_num(low.y, nan=-1).tolist() == [11.5, -1, 16]
    assert low.marker.pattern.shape != high.marker.pattern.shape
    assert list(unknown.x) == ["1 unlocated"]
    assert list(unknown.customdata) == [style.escape(LOST)]
    two = message_norm_bars(message_frame([run(), run("b", 1.0)], layers=4))
    assert [trace.name for trace in two.data] == ["a, layer 4", "b, layer 4"]
    assert list(two.layout.xaxis.categoryarray) == ["0 system", "1 &lt;b&gt;user", "answer"]


def test_layer_profile() -> None:
    figure = layer_profile(layer_frame(pd.concat([frame(), frame("b", 1.0)])))
    assert [trace.name for trace in figure.data] == ["a", "b"]
    assert list(figure.data[0].x) == [1, 4]
    assert list(figure.data[1].y) == [14.5, 44.5]
    assert figure.data[0].line.dash != figure.data[1].line.dash
    assert figure.layout.legend.title.text == "request"


def test_cosine_matrix() -> None:
    figure = cosine_matrix(cosine_frame({"<b>": [1.0, 0.0], "x": [0.0, 2.0], "y": [-1.0, 0.0]}))
    (cells,) = figure.data
    assert cells.z.tolist() == [[1, 0, -1], [0, 1, 0], [-1, 0, 1]]
    assert list(cells.text[0]) == ["1.00", "0.00", "-1.00"]
    assert list(cells.x) == ["&lt;b&gt;", "x", "y"]
    assert (cells.zmin, cells.zmax) == (-1, 1)
    lost = cosine_matrix(message_cosines(run(boundaries=(BOUNDARIES[0], LOST)), 1)).data[0]
    assert lost.customdata[0][1] == style.escape(LOST)
    with pytest.raises(AnalysisError, match="shows one layer"):
        cosine_matrix(message_cosines(run()))


def test_pca_scatter() -> None:
    one, two = pca_scatter(places()).data
    assert (one.name, two.name) == ("one", "two")
    assert list(one.text) == ["&lt;b&gt;a", "b"]
    assert list(one.x) == pytest.approx([2, -2])
    assert list(two.y) == pytest.approx([1, -1])
    assert one.marker.symbol != two.marker.symbol
    with pytest.raises(AnalysisError, match="pc3"):
        pca_scatter(places(), up=3)


def test_dose_response() -> None:
    figure = dose_response(sweep())
    assert len(figure.data) == 6  # two layers, three panels
    first = figure.data[0]
    assert list(first.x) == [-0.4, 0.0, 0.4]
    assert list(first.y) == [-8, 0, 8]
    assert list(first.customdata[0]) == ["-4", "-0.40", "&lt;b&gt;-4.0 &#36;x&#36;"]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["layer 3", "layer 6"]
    assert figure.layout.yaxis2.type == "log"
    raw = dose_response(sweep().drop(columns=["dose", "text", "perplexity"]))
    assert list(raw.data[0].x) == [-4, 0, 4]
    assert axes(raw) == {
        *("scale (times the vector)", "mean projection<br>(residual units)", "repeated 3-grams<br>(share)"),
    }
    with pytest.raises(AnalysisError, match="needs one of the columns"):
        dose_response(sweep()[["layer", "scale"]])


def test_direction_quality() -> None:
    figure = direction_quality(quality())
    assert [trace.name for trace in figure.data] == [
        "held-out AUC",
        "cosine of halves",
        "AUC, shuffled labels (mean)",
        "AUC, shuffled labels (95 % below)",
        "length of the raw difference",
    ]
    assert list(figure.data[0].y) == [0.6, 0.9]
    assert list(figure.data[4].y) == [2, 3]


@pytest.mark.parametrize("typed", [*TYPED, "a & b < c > d", "&#36;", "100 $"])
def test_nothing_that_plotly_would_interpret_is_left(typed: str) -> None:
    shown = style.escape(typed)
    assert not set("<>$\n") & set(shown)
    assert re.sub(r"&(amp|lt|gt|#36);", "", shown).count("&") == 0


def test_long_texts_are_cut_and_wrapped() -> None:
    assert style.excerpt("abcdef<", width=3, lines=3) == "abc<br>def<br>&lt;"
    assert style.excerpt("abcdefg", width=3, lines=2) == "abc<br>def…"


@pytest.mark.parametrize("name", list(FIGURES))
def test_html_needs_nothing_from_elsewhere(name: str, tmp_path: Path) -> None:
    file = save_figure(FIGURES[name](), tmp_path / "folder" / "figure.html")
    text = file.read_text(encoding="utf-8")
    assert len(text) > 3_000_000  # plotly's own code
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text)
    tail = text[text.rindex("Plotly.newPlot") :]
    for typed in ("<think>", '</script>"', "<b>"):
        assert typed not in tail


def test_png_where_there_is_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def within_a_loop() -> Path:
        return save_figure(FIGURES["pca_scatter"](), tmp_path / "figure.png")

    if Chromium.find_browser(skip_local=False):
        assert asyncio.run(within_a_loop()).read_bytes().startswith(b"\x89PNG")
        corner = matplotlib.image.imread(tmp_path / "figure.png")[0, 0]
        assert corner.tolist() == [1, 1, 1, 1]  # a ground of its own, which a dark slide does not shine through
        clear = save_figure(FIGURES["pca_scatter"](), tmp_path / "clear.png", background=None)
        assert matplotlib.image.imread(clear)[0, 0, 3] == 0
    else:
        with pytest.raises(ExportError, match="it needs Chrome or Chromium"):
            asyncio.run(within_a_loop())
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ExportError, match=r"figure\.png: kaleido cannot draw it .* it needs Chrome or Chromium"):
        save_figure(FIGURES["pca_scatter"](), tmp_path / "figure.png")


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match=r"figure\.svg: figures are written as \.html or \.png"):
        save_figure(FIGURES["pca_scatter"](), tmp_path / "figure.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"pip install kaleido, or write \.html"):
        save_figure(FIGURES["pca_scatter"](), tmp_path / "figure.png")

"""What a panel leaves in a notebook: HTML, images and folders, without an engine and without a page."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from chatspace_lab.analysis import Direction
from chatspace_lab.errors import RequestError, SessionError
from chatspace_lab.panels import keeping, stills
from chatspace_lab.panels.asked import turns_from
from chatspace_lab.panels.buffers import pack, short
from chatspace_lab.panels.displays import REST_S, Displays
from chatspace_lab.panels.pictures import Numbers, heatmap, largest, message_plot, png, projection_plot, tint

ODD = "<think> </pre></script> &amp; $x$ 'a' \"b\""


class Texts(HTMLParser):
    """Collects the texts of all <pre>, and all names of elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self._open = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "pre":
            self._open = True
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[-1] += data


def answer(number: int = 3) -> dict[str, Any]:
    """An answer as the page is sent it: a question of two tokens and an answer of two, at two layers."""
    values = np.array([[900.0, 1.0, -2.0, 4.0], [900.0, 0.0, 0.5, 0.25]])
    return {
        "number": number,
        "messages": [{"role": "user", "content": ODD}],
        "texts": ["<s>", ODD, " an", "swer"],
        "bands": [
            {"message": 0, "role": "user", "start": 1, "end": 2},
            {"message": 1, "role": "assistant", "start": 2, "end": 4},
        ],
        "prompt": 2,
        "first": 0,
        "head": "",
        "layers": [4, 7],
        "norm": pack(np.full((2, 4), 8.0)),
        "projection": pack(values),
        "special": [],
    }


def panel(**changed: Any) -> dict[str, Any]:
    shown = {
        "facts": {"model": "m <b>", "dtype": "float32", "layers": 9, "hidden": 8},
        "error": "",
        "turns": [{"user": ODD, "baseline": None, "steered": None, "made": {}}],
        "run": {"number": 3, "status": "done", "sides": ["steered"], "receipt": {"text": "add 1·<v>", "code": ""}},
        "baseline": answer(2),
        "steered": answer(),
        "view": {"layers": [4, 7], "direction": "<v>", "plot": "norm", "pinned": {"side": "steered", "position": 3}},
    }
    return {**shown, **changed}


def test_texts_are_as_typed_and_tinted_as_in_the_page() -> None:
    html = stills.steering("cl-of-1", panel())
    found = Texts(html)
    assert [text.removeprefix("\n") for text in found.texts] == [ODD, " answer", ODD, " answer", "add 1·<v>"]
    assert found.tags == {"div", "strong", "span", "pre", "img"}
    # blue 1/4, red 2/4, blue 4/4 of the largest at layer 4, position 0 left out
    for value, colour in ((1.0, "#2563eb28"), (-2.0, "#dc26264f"), (4.0, "#2563eb9e")):
        assert tint(value, 4.0) == colour
        assert html.count(f"background-color:{colour}") == 2
    assert tint(0.0, 4.0) is tint(float("nan"), 4.0) is tint(1.0, 0.0) is None


def test_the_beginning_of_an_answer_that_is_too_long_to_tint_is_text() -> None:
    long = {**answer(), "texts": ["swer"], "first": 3, "head": " <an", "bands": [], "norm": None, "projection": None}
    found = Texts(stills.steering("cl-of-1", panel(steered=long)))
    assert [text.removeprefix("\n") for text in found.texts] == [ODD, " answer", ODD, " <answer", "add 1·<v>"]


def test_a_failed_run_shows_its_error_and_no_other_answer() -> None:
    failed = {"number": 4, "status": "failed", "sides": ["steered"], "error": "too <long>"}
    found = Texts(stills.steering("cl-of-1", panel(run=failed, error="too <long>")))
    assert [text.removeprefix("\n") for text in found.texts] == ["too <long>", ODD, " answer", "too <long>"]


def test_an_answer_to_other_values_says_so() -> None:
    stopped = {"number": 4, "status": "stopped", "sides": []}
    assert "other values than the panel" in stills.steering("cl-of-1", panel(run=stopped))
    assert "other values than the panel" not in stills.steering("cl-of-1", panel())


def test_earlier_answers_say_their_values() -> None:
    talk = {**answer(), "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ], "bands": []}  # fmt: skip
    for turn, note in (
        ({"user": "a", "baseline": "b", "steered": "b", "made": {"steered": "add 2·<v>"}}, "add 2·&lt;v&gt;"),
        ({"user": "a", "baseline": "b", "steered": "b", "made": {}}, "given, not made here"),
        ({"user": "a", "baseline": "b", "steered": None, "made": {}}, "no answer"),
    ):
        turns = [turn, {"user": "c", "baseline": None, "steered": None, "made": {}}]
        html = stills.steering("cl-of-1", panel(steered=talk, turns=turns))
        assert f"{note}</div>" in html[html.index("cl-kept-steered") :]


def test_numbers_of_plots_are_those_of_the_answer() -> None:
    numbers = Numbers.of(answer())
    assert numbers is not None
    assert largest({"steered": numbers}, 4) == 4.0
    assert numbers.per_message(4, "norm") == [8.0, 8.0]
    assert numbers.per_message(4, "cosine") == [1 / 8, (-2 + 4) / 2 / 8]
    assert np.isnan(numbers.per_message(5, "norm")).all()
    sides = {"baseline": numbers, "steered": numbers}
    for image in (
        projection_plot(sides, [4, 7], "<v>", 3), message_plot(sides, [4], "cosine", "<v>"), heatmap(sides, "<v>"),
    ):  # fmt: skip
        assert image.startswith('<img alt="')
        assert "&lt;v&gt;" in image
    assert Numbers.of({}) is None
    assert heatmap({"baseline": None, "steered": None}, "v") == ""
    assert [short(value) for value in (None, np.nan, 0.12345, -3, np.inf)] == ["–", "–", "0.123", "-3", "∞"]


def test_a_value_that_is_not_finite_is_marked_and_changes_no_other() -> None:
    values = np.array([[900.0, 1.0, np.inf, 4.0], [np.nan] * 4])
    norms = np.full((2, 4), 8.0)
    norms[0, 1] = np.inf
    broken = {**answer(), "projection": pack(values), "norm": pack(norms)}
    html = stills.steering("cl-of-1", panel(baseline=broken, steered=broken))
    assert html.count("border-bottom: 3px double #d97706' title='not finite'> an</span>") == 2
    assert html.count("background-color:#2563eb9e'>swer</span>") == 2  # full strength of 4, as without the other
    numbers = Numbers.of(broken)
    assert numbers is not None
    assert largest({"steered": numbers}, 4) == 4.0
    assert largest({"steered": numbers}, 7) == 0.0
    cosines = numbers.cosines()
    assert cosines is not None
    np.testing.assert_array_equal(cosines[0], [112.5, np.inf, np.inf, 0.5])
    assert np.isnan(cosines[1]).all()
    assert numbers.per_message(4, "cosine")[1] == 0.5
    svg = base64.b64decode(projection_plot({"steered": numbers}, [4], "v", None).partition("base64,")[2][:-2]).decode()
    assert svg.count("∞") == 1
    with Image.open(io.BytesIO(png(np.array([[1.0, np.inf, -1.0]]), 1.0))) as image:
        assert np.asarray(image.convert("RGBA"))[0, :, :3].tolist() == [[37, 99, 235], [217, 119, 6], [220, 38, 38]]


def test_a_png_has_a_pixel_per_value() -> None:
    values = np.array([[0.0, 1.0, -1.0], [np.nan, -0.5, 7.0]])
    with Image.open(io.BytesIO(png(values, 1.0))) as image:
        assert image.size == (3, 2)
        pixels = np.asarray(image.convert("RGBA"))
    assert pixels[..., 3].tolist() == [[0, 255, 255], [0, 132, 255]]  # 16 of 31 strengths of 255
    assert pixels[0, 1, :3].tolist() == pixels[1, 2, :3].tolist() == [37, 99, 235]
    assert pixels[0, 2, :3].tolist() == pixels[1, 1, :3].tolist() == [220, 38, 38]


def test_a_long_plot_stays_small() -> None:
    many = {
        **answer(),
        "norm": pack(np.ones((2, 4000))),
        "projection": pack(np.random.default_rng(0).normal(size=(2, 4000))),
    }
    numbers = Numbers.of(many)
    sides = {"baseline": numbers, "steered": numbers}
    assert len(projection_plot(sides, [4, 7], "v", None)) < 80_000
    assert len(heatmap(sides, "v")) < 30_000


def test_a_sweep_has_its_grid_and_its_texts() -> None:
    cells = [
        {"layer": 3, "dose": 0.5, "text": ODD, "effect": 2.0, "broken": False},
        {"layer": 4, "dose": 0.5, "text": "x", "effect": -1.0, "broken": True},
        {"layer": 3, "dose": 1.0, "text": "y", "effect": None, "broken": False},
    ]
    plan = {
        "operation": "add",
        "vector": "<v>",
        "layers": [3, 4],
        "doses": [0.5, 1.0],
        "prompts": ["p"],
        "read_layer": 7,
    }
    shown = {
        "facts": {"model": "m"}, "error": "", "plan": {**plan, "doses": [9.0]}, "cells": cells,
        "run": {"status": "done", "plan": plan, "references": [{"text": "r"}]}, "chosen": {"layer": 3, "dose": 0.5},
    }  # fmt: skip
    html = stills.sweep("cl-of-2", shown)
    assert html.index("dose 0.5") < html.index("dose 1") < html.index("<th>4</th>") < html.index("<th>3</th>")
    assert "dashed #888888; background-color: #dc26264f'>-1 ✕</td>" in html
    assert "dose 9" not in html, "the grid is that of the run"
    found = [text.removeprefix("\n") for text in Texts(html).texts]
    assert found == ["p", "r", ODD, ODD, "y", "x"]


def test_a_panel_comes_back_from_its_folder(tmp_path: Path) -> None:
    vectors = {
        "u": torch.tensor([1.0, 2.0]),
        "d": Direction("d", {3: [3.0, 4.0], 5: [0.0, 2.0]}),
        "left out": torch.ones(2),
    }
    state = {"rows": [{"vector": "u"}, {"vector": "d"}], "view": {"direction": "u"}, "turns": []}
    keeping.write(tmp_path, state, vectors)
    found, back = keeping.read(tmp_path)
    assert found == state
    assert sorted(back) == ["d", "u"]
    assert torch.equal(back["u"], vectors["u"])
    assert {layer: vector.tolist() for layer, vector in back["d"].items()} == {
        3: pytest.approx([0.6, 0.8]), 5: [0.0, 1.0],
    }  # fmt: skip
    (tmp_path / keeping.STATE).write_text("{")
    with pytest.raises(SessionError, match="is damaged"):
        keeping.read(tmp_path)
    with pytest.raises(SessionError, match="holds no saved panel"):
        keeping.read(tmp_path / "elsewhere")
    with pytest.raises(SessionError, match="cannot write"):
        keeping.write(tmp_path / "elsewhere", state, vectors)


def test_turns_are_read_back_and_mistakes_named() -> None:
    turns = turns_from([{"user": "a", "baseline": "b"}, {"user": "c"}])
    assert turns_from([turn.plain() for turn in turns]) == turns
    for wrong in ({"usr": "a"}, {"user": "a", "colour": 1}):
        with pytest.raises(RequestError, match="a turn is a dict with user"):
            turns_from([wrong])


def test_changes_that_come_together_are_drawn_once_and_what_goes_wrong_is_said() -> None:
    drawn, said = list[str](), list[str]()

    def draw() -> str:
        drawn.append("")
        raise ValueError("cannot be drawn")

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except ValueError as error:
            said.append(str(error))

    async def changes() -> None:
        outputs = Displays("mark", draw, lambda message: None, asyncio.get_running_loop(), guarded)
        outputs._cells.add("a cell that shows it")
        for _ in range(5):
            outputs.changed()
        await asyncio.sleep(2 * REST_S)
        outputs.changed()
        outputs.hold()  # a run goes
        await asyncio.sleep(2 * REST_S)

    asyncio.run(changes())
    assert (len(drawn), said) == (1, ["cannot be drawn"])

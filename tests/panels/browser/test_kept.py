"""What a saved notebook shows without its kernel, and what is saved by hand."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbconvert import HTMLExporter
from nbformat.sign import NotebookNotary
from playwright.sync_api import Locator, Page, expect

from tests.panels.browser.jupyter import Server
from tests.panels.browser.page import OUTPUT, Panel, command, kept, picture, saved, tints

ODD = "<think>a</think> </script> &amp; $x$ <b>bold</b> <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab without kernels."""
    started = Server(tmp_path_factory.mktemp("reader"), kernels=False)
    yield started
    started.close()


@contextmanager
def without_kernel(page: Page, reader: Server, content: Any, name: str, *, trusted: bool) -> Iterator[Page]:
    """Open a notebook in a browser of its own, with "No Kernel"."""
    content.metadata["read_as"] = name  # else it would be trusted as what JupyterLab has just saved
    nbformat.write(content, reader.root / f"{name}.ipynb")
    if trusted:
        NotebookNotary().sign(content)
    browser = page.context.browser
    assert browser is not None
    context = browser.new_context(viewport={"width": 1300, "height": 1500})
    try:
        found = context.new_page()
        found.goto(reader.url(f"{name}.ipynb"))
        found.locator(".jp-Dialog").get_by_role("button", name="No Kernel", exact=True).click()
        expect(found.locator(".jp-Toolbar-kernelName")).to_have_text("No Kernel")
        yield found
    finally:
        context.close()


def colours_of(tokens: Locator) -> list[list[float]]:
    """Return red, green, blue (0 to 255) and opacity (0 to 1) of the tokens that have a text and a colour."""
    found = tokens.evaluate_all(
        "all => all.filter(each => each.textContent).map(each => getComputedStyle(each).backgroundColor)"
    )
    channels = [[float(number) for number in re.findall(r"[\d.]+", each)] for each in found]
    return [each for each in channels if len(each) == 4 and each[3] > 0.002]


def marks(image: Locator) -> int:
    """Return how many points a plot has, and check that the page draws it."""
    assert image.evaluate("async image => { await image.decode(); return image.naturalWidth; }") > 0
    svg = base64.b64decode((image.get_attribute("src") or "").partition("base64,")[2]).decode()
    return re.sub(r"data:image/png;base64,[^\"]*", "", svg).count("h0")  # a heatmap's pixels may spell it


def test_without_a_kernel_texts_tints_and_plots_are_there(panel: Panel, server: Server, reader: Server) -> None:
    panel.ask()
    panel.settled()
    panel.drag(0.5)
    panel.settled()
    first = panel.answer().text_content()
    panel.ask(ODD)
    panel.settled()
    last = {side: panel.answer(side).text_content() for side in ("steered", "baseline")}
    tinted = {side: colours_of(panel.pane(side).locator(".cl-token")) for side in last}
    reds = [each for colours in tinted.values() for each in colours if each[0] > each[2]]
    assert 0 < len(reds) < sum(map(len, tinted.values()))
    tokens = panel.value("sum(each['norm']['shape'][1] for each in (panel.baseline, panel.steered))")
    expect(panel.still().last).to_have_text(last["steered"] or "")
    expect(panel.still().last).to_be_hidden()  # while the panel lives
    content = saved(panel.page, server)
    for name in ("trusted", "untrusted"):
        with without_kernel(panel.page, reader, content, name, trusted=name == "trusted") as page:
            cell = page.locator(".jp-CodeCell").first
            expect(cell.locator(".cl-snapshot")).to_be_visible()
            expect(page.locator(".cl-panel")).to_have_count(0)
            texts = [each.text_content() for each in kept(cell).all()]
            assert texts == ["Tell me about rivers.", first, ODD, last["steered"]]
            assert kept(cell, "baseline").last.text_content() == last["baseline"]
            assert cell.locator(".cl-snapshot :is(b, script, img:not([src^=data]), mjx-container)").count() == 0
            made = re.compile("add .*·formal @ 15 · dose 0.5 · seed 7")
            expect(cell.locator(".cl-kept-steered")).to_contain_text(made)
            for side, colours in tinted.items():
                shown = colours_of(cell.locator(f".cl-kept-{side} pre span"))
                assert len(shown) == len(colours) > 20
                assert np.abs(np.array(shown) - np.array(colours)).max() < 0.01
            plots = {image.get_attribute("alt"): marks(image) for image in cell.locator(".cl-snapshot img").all()}
            assert plots == {
                "projection per token on formal": tokens,
                "mean activation norm per message": 0,
                "mean cosine to formal per message": 0,
                "cosine to formal by layer and token": 0,
            }
            cell.locator(".cl-snapshot").screenshot(path=OUTPUT / f"without_a_kernel_{name}.png")


def test_a_trusted_copy_beside_a_fresh_kernel_shows_the_panel_itself(panel: Panel, server: Server) -> None:
    panel.ask()
    panel.settled()
    panel.drag(0.5)
    panel.settled()
    shown = (panel.answer().inner_text(), panel.answer("baseline").inner_text(), tints(panel))
    copy = saved(panel.page, server)
    nbformat.write(copy, server.root / "saved.ipynb")
    NotebookNotary().sign(copy)
    page = panel.page.context.new_page()
    try:
        page.goto(server.url("saved.ipynb").replace("/lab/tree", "/lab/workspaces/reopened/tree"))
        reopened = Panel(page, panel.kernel)
        expect(reopened.answer()).to_have_text(shown[0])
        assert (reopened.answer().inner_text(), reopened.answer("baseline").inner_text(), tints(reopened)) == shown
        expect(reopened.root.locator("g[data-side=steered]")).to_have_attribute(
            "data-points", re.compile(r"^[1-9]\d*$")
        )
        expect(page.locator(".jp-CodeCell").first.locator(".cl-snapshot")).to_be_hidden()
        picture(reopened, "reopened")
    finally:
        page.close()


def test_each_cell_keeps_one_output_however_it_displays_the_panel(panel: Panel, server: Server) -> None:
    cell = panel.page.locator(".jp-CodeCell").nth(3)
    cell.locator(".cm-content").click()
    panel.page.keyboard.press("Control+A")
    panel.page.keyboard.insert_text("display(panel); display(panel)\npanel")
    panel.page.keyboard.press("Shift+Enter")
    expect(cell.locator(".cl-panel")).to_have_count(3)
    expect(cell.locator(".cl-snapshot")).to_have_count(1)
    panel.ask()
    panel.settled()
    text = panel.answer().text_content() or ""
    expect(kept(cell).last).to_have_text(text)
    for at in (0, 3):
        cell = saved(panel.page, server).cells[at]
        found = [each.data["text/html"] for each in cell.outputs if "text/html" in each.get("data", {})]
        assert len(found) == 1
        assert text.split("\n", maxsplit=1)[0][:20] in re.sub("<[^>]+>", "", found[0])
    cell = panel.page.locator(".jp-CodeCell").nth(3)
    cell.locator(".cm-content").click()
    panel.page.keyboard.press("Control+A")
    panel.page.keyboard.insert_text("early")
    command(panel.page, "notebook:clear-cell-output")


def test_what_nbconvert_writes_shows_the_panels(panel: Panel, server: Server) -> None:
    panel.ask(ODD)
    panel.settled()
    text = panel.answer().text_content() or ""
    expect(panel.still().last).to_have_text(text)
    page, _ = HTMLExporter().from_notebook_node(saved(panel.page, server))
    body = page[page.index("cl-kept-steered") :]
    assert "&lt;think&gt;a&lt;/think&gt; &lt;/script&gt; &amp;amp; $x$ &lt;b&gt;bold&lt;/b&gt;" in re.sub(
        "</?span[^>]*>", "", body
    )
    assert "data:image/svg+xml;base64," in body


def test_the_sweep_is_there_without_a_kernel(panel: Panel, server: Server, reader: Server) -> None:
    kernel = panel.kernel
    kernel.run("sweep = lab.sweep_panel(vector='formal', layers=[5, 25], doses=[0.5, 3.0], max_tokens=12)")
    kernel.run("sweep.start(); sweep.wait(120)")
    shown = Panel(panel.page, kernel, cell=2)
    shown.show(again=True)
    expect(shown.root.locator(".cl-grid-cell[role=button]")).to_have_count(4)
    expect(panel.page.locator(".jp-CodeCell").nth(2).locator(".cl-snapshot")).to_be_hidden()
    cells = {(each["layer"], each["dose"]): each for each in kernel.value("sweep.cells")}
    with without_kernel(panel.page, reader, saved(panel.page, server), "swept", trusted=False) as page:
        kept = page.locator(".jp-CodeCell").nth(2).locator(".cl-snapshot")
        expect(kept).to_be_visible()
        values = kept.locator("td")
        for at, key in enumerate([(25, 0.5), (25, 3.0), (5, 0.5), (5, 3.0)]):
            expect(values.nth(at)).to_have_text(f"{cells[key]['effect']:.3g}{' ✕' if cells[key]['broken'] else ''}")
        colours = values.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)")
        assert any(re.match(r"rgba\((37, 99, 235|220, 38, 38)", each) for each in colours)
        assert kept.locator("details pre").count() == 4
        assert kept.locator("details pre").first.text_content() == cells[5, 0.5]["text"]
        kept.screenshot(path=OUTPUT / "sweep_without_a_kernel.png")


def test_the_panel_is_saved_and_says_where(panel: Panel, server: Server) -> None:
    panel.ask()
    panel.settled()
    panel.drag(0.35)
    panel.settled()
    text, scale = panel.answer().text_content(), panel.value("panel.rows[0]['scale']")
    panel.button("save session and panel").click()
    expect(panel.root.locator(".cl-saved")).to_have_text(re.compile("^saved in .*chatspace-lab-"))
    folder = Path((panel.root.locator(".cl-saved").text_content() or "").removeprefix("saved in "))
    assert folder.parent == server.root
    runs = json.loads((folder / "session.json").read_text())["runs"]
    assert runs[-1]["text"] == text
    panel.kernel.run(f"lab.vectors.clear(); lab.clear(); panel.load({str(folder)!r}); panel.wait(60)")
    assert panel.value("(panel.rows[0]['vector'], panel.rows[0]['scale'])") == ("formal", scale)
    assert panel.value("torch.equal(lab.vectors['formal'], formal)")
    panel.settled()
    assert panel.answer().text_content() == text
    panel.kernel.run("import os; here = os.getcwd(); os.chdir('/proc')")
    panel.button("save session and panel").click()
    expect(panel.root.get_by_role("alert").first).to_contain_text("cannot write to /proc/chatspace-lab-")
    panel.kernel.run("os.chdir(here); panel.error = ''")

"""The steering panel as a test sees it: locators by what a screen reader would say."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Locator, Page, expect

from tests.panels.browser.jupyter import Kernel, Server

expect.set_options(timeout=60_000)

OUTPUT = Path(__file__).parents[3] / "test-output" / "panels"
"""Screenshots."""
RIVERS = [{"role": "user", "content": "Tell me about rivers."}]


SENTENCE = "The river runs to the sea and the sea runs to the sky. "
LONG = """
from dataclasses import replace
import numpy as np
from types import SimpleNamespace
from chatspace_lab.panels.answers import Answer
from chatspace_lab.panels.asked import Turn
from chatspace_lab.readings import Readings

def show_long(text):
    '''Show answers to a long message as a run does, with numbers that nothing had to compute.'''
    last = panel._runner.answers["steered"]
    messages = [{"role": "user", "content": text}]
    [prompt] = lab.model.prepare(messages, chat=True, max_tokens=1)
    count = len(prompt.token_ids)
    values = np.random.default_rng(0).normal(size=(lab.layer_count, count, 2)).astype("float32")
    values[..., 0] = 30 + values[..., 0]
    layers = tuple(range(lab.layer_count))
    readings = Readings(np.arange(count), np.array(prompt.token_ids), layers, ("formal",), values)
    stream = SimpleNamespace(handle=last.handle, readings=readings)
    asked = replace(last.asked, number=panel._runner.number + 1)
    answer = Answer(asked, messages, prompt, stream, {"formal": formal})
    answer.text, answer.token_ids, answer.finish = last.text, last.token_ids, last.finish

    def show():
        panel._talk.turns, panel._runner.number = (Turn(text),), asked.number
        panel.run = {**panel.run, "number": asked.number}
        panel._draw()
        panel.baseline = panel.steered = answer.payload("formal", panel._pieces)
    panel._now(show)
    return count
"""


class Panel:
    """One view of the panel, in a cell of the notebook."""

    def __init__(self, page: Page, kernel: Kernel, cell: int = 0) -> None:
        self.page, self.kernel, self._cell = page, kernel, page.locator(".jp-CodeCell").nth(cell)
        self.root = self._cell.locator(".cl-panel")

    def show(self, *, again: bool = False) -> None:
        """Run the cell, if it shows nothing yet or another panel."""
        if again or not self.root.count():
            self._cell.locator(".cm-content").click()
            self.page.keyboard.press("Shift+Enter")
        expect(self.root).to_be_visible()

    @property
    def status(self) -> Locator:
        return self.root.locator(".cl-status")

    def settled(self, status: str = "done") -> None:
        """Wait until the kernel has answered all that was sent, and the page says that nothing runs."""
        self.answered()
        expect(self.status).to_have_attribute("data-status", status)

    def answered(self) -> None:
        """Wait until the kernel has answered all that was sent."""
        expect(self.status).to_have_attribute("data-pending", "0")

    def button(self, name: str) -> Locator:
        return self.root.get_by_role("button", name=name, exact=True)

    def row(self, vector: str = "formal") -> Locator:
        return self.root.get_by_role("group", name=f"vector {vector}", exact=True)

    def slider(self, name: str = "dose of formal") -> Locator:
        return self.root.get_by_role("slider", name=name, exact=True)

    def strip(self, name: str = "layers of formal") -> Locator:
        return self.root.get_by_role("listbox", name=name, exact=True)

    def answer(self, side: str = "steered") -> Locator:
        return self.root.locator(f".cl-answer[data-side={side}]")

    def pane(self, side: str = "steered") -> Locator:
        return self.root.locator(f".cl-{side}")

    def still(self, side: str = "steered") -> Locator:
        """The texts of a side in the output that stays in the notebook, in the order of the conversation."""
        return kept(self._cell, side)

    def token(self, position: int, side: str = "steered") -> Locator:
        return self.pane(side).locator(f'.cl-token[data-position="{position}"]')

    @property
    def message(self) -> Locator:
        return self.root.get_by_role("textbox", name="message", exact=True)

    def ask(self, text: str = "Tell me about rivers.") -> None:
        """Type a message and send it."""
        self.message.fill(text)
        self.message.press("Enter")

    def show_long(self, sentences: int) -> int:
        """Show an answer to a message of so many sentences, and return the tokens of its prompt."""
        self.button("new chat").click()
        self.settled("idle")
        self.ask()
        self.settled()
        self.kernel.run(LONG)
        found: int = self.value(f"show_long({(SENTENCE * sentences).strip()!r})")
        return found

    def drag(self, dose: float, name: str = "dose of formal", steps: int = 8) -> None:
        """Drag a slider from where it stands, with the mouse."""
        handle = self.slider(name)
        handle.scroll_into_view_if_needed()
        track = handle.locator("xpath=..").bounding_box()
        start = handle.bounding_box()
        assert track is not None
        assert start is not None
        middle = track["y"] + track["height"] / 2
        self.page.mouse.move(start["x"] + start["width"] / 2, middle)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + track["width"] * (dose + 2) / 4, middle, steps=steps)
        self.page.mouse.up()

    def number(self, name: str) -> Locator:
        return self.root.get_by_role("spinbutton", name=name, exact=True)

    def tab(self, name: str) -> Locator:
        return self.root.get_by_role("tab", name=name, exact=True)

    def cell(self, index: int) -> Cell:
        """Return a cell of the notebook that it is in."""
        return Cell(self.page, index)

    def value(self, expression: str) -> Any:
        return self.kernel.value(expression)


class Cell:
    """A cell of the notebook, as hands use it."""

    def __init__(self, page: Page, index: int) -> None:
        self._page, self._root = page, page.locator(".jp-CodeCell").nth(index)

    def type(self, text: str) -> None:
        """Write this in place of what is there."""
        self._root.locator(".cm-content").click()
        self._page.keyboard.press("Control+A")
        self._page.keyboard.insert_text(text)

    def run(self) -> str:
        """Run it, and return what it printed."""
        command(self._page, "notebook:clear-cell-output")
        self._page.keyboard.press("Shift+Enter")
        printed = self._root.locator(".jp-OutputArea-output pre")
        expect(printed).to_have_count(1)
        return printed.text_content() or ""


def kept(cell: Locator, side: str = "steered") -> Locator:
    """Return the texts of a side in a cell's output without a widget."""
    return cell.locator(f".cl-snapshot .cl-kept-{side} pre")


def saved(page: Page, server: Server) -> Any:
    """Save the notebook in the page and return it."""
    save(page)
    return nbformat.read(server.root / "panels.ipynb", 4)


def save(page: Page) -> None:
    """Save the notebook: once more if something was kept in it meanwhile."""
    unsaved = page.locator(".jp-mod-dirty")
    for _ in range(5):
        command(page, "docmanager:save")
        with contextlib.suppress(AssertionError):
            return expect(unsaved).to_have_count(0, timeout=5_000)
    raise AssertionError("the notebook does not stay saved")


def command(page: Page, name: str, **arguments: Any) -> None:
    """Run a command of JupyterLab, as a menu does, and wait for its end."""
    page.evaluate("([name, given]) => window.jupyterapp.commands.execute(name, given)", [name, arguments])


def chat(kernel: Kernel, max_tokens: int = 10, steering: str = "None") -> str:
    """Return what the lab answers without any panel; None follows the session's steering."""
    call = f"lab.chat({RIVERS}, steering={steering}, temperature=0.0, seed=7, max_tokens={max_tokens})[0]"
    return str(kernel.value(f"str({call})"))


def picture(panel: Panel, name: str) -> None:
    """Keep a screenshot."""
    panel.root.screenshot(path=OUTPUT / f"{name}.png")


def tints(panel: Panel) -> list[str]:
    """Return the colours behind the tokens of the steered side."""
    found: list[str] = (
        panel.pane().locator(".cl-token").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    )
    return found


CONTRASTS = """root => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const found = [...canvas.getImageData(0, 0, 1, 1).data]; return [...found.slice(0, 3), found[3] / 255]; };
    const over = (top, below) => top.slice(0, 3).map((each, at) => each * top[3] + below[at] * (1 - top[3]));
    const linear = each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4;
    const light = rgb => rgb.map(each => linear(each / 255))
        .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
    const around = element => { const found = [];
        for (let at = element; at; at = at.parentElement) found.push(getComputedStyle(at)); return found; };
    const behind = element => { const layers = [];
        for (const style of around(element)) { const found = rgba(style.backgroundColor);
            if (found[3] > 0) layers.push(found); if (found[3] === 1) break; }
        return layers.reduceRight((below, top) => over(top, below), [255, 255, 255]); };
    const found = {};
    const measure = (element, colour, name) => {
        const ground = behind(element), text = rgba(colour);
        for (const style of around(element)) text[3] *= Number(style.opacity);
        const [high, low] = [light(over(text, ground)), light(ground)].sort((left, right) => right - left);
        const ratio = (high + 0.05) / (low + 0.05);
        if (ratio < 4.5) found[name] = ratio; };
    for (const element of root.querySelectorAll("*")) {
        if (!element.checkVisibility({ visibilityProperty: true }) || element.closest("option")) continue;
        const style = getComputedStyle(element), drawn = element instanceof SVGElement;
        const own = [...element.childNodes].some(each => each.nodeType === 3 && each.textContent.trim());
        const said = (element.textContent || element.value || "").slice(0, 30);
        const name = `${element.tagName}.${element.getAttribute("class")}: ${said}`;
        if (drawn ? element.tagName === "text" : own || element.value)
            measure(element, drawn ? style.fill : style.color, name);
        if (element.placeholder) measure(element, getComputedStyle(element, "::placeholder").color, `(${name})`);
    }
    return found;
}"""


def weak_texts(panel: Panel) -> dict[str, float]:
    """Return the texts of a panel whose contrast with what is behind them is below 4.5 (WCAG 2), each with it."""
    found: dict[str, float] = panel.root.evaluate(CONTRASTS)
    return found

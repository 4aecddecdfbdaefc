"""The steering panel as a test sees it: locators by what a screen reader would say."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.panels.jupyter import Kernel

expect.set_options(timeout=60_000)


class Panel:
    """One view of the panel, in a cell of the notebook."""

    def __init__(self, page: Page, kernel: Kernel, cell: int = 0) -> None:
        self.page, self.kernel, self._cell = page, kernel, page.locator(".jp-CodeCell").nth(cell)
        self.root = self._cell.locator(".cl-panel")

    def show(self) -> None:
        """Run the cell, if it shows nothing yet."""
        if not self.root.count():
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

    def token(self, position: int, side: str = "steered") -> Locator:
        return self.pane(side).locator(f'.cl-token[data-position="{position}"]')

    @property
    def message(self) -> Locator:
        return self.root.get_by_role("textbox", name="message", exact=True)

    def ask(self, text: str = "Tell me about rivers.") -> None:
        """Type a message and send it."""
        self.message.fill(text)
        self.message.press("Enter")

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

    def value(self, expression: str) -> Any:
        return self.kernel.value(expression)


def command(page: Page, name: str, **arguments: Any) -> None:
    """Run a command of JupyterLab, as a menu does, and wait for its end."""
    page.evaluate("([name, given]) => window.jupyterapp.commands.execute(name, given)", [name, arguments])

"""The panel and the page around it: a notebook's shortcuts, the host's colours, a chat's end, and pinned tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.conftest import wait_until
from tests.panels.browser.jupyter import Kernel
from tests.panels.browser.page import SENTENCE, Panel, picture, save, weak_texts

CELLS = "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.map(each => each.cell_type)"
KEYS = ["d", "d", "x", "m", "y", "0", "0", "a", "b", "z", "c", "v", "Shift+M", "j", "k", "o", "i", "i", "Control+Enter"]
FOCUSABLE = """root => [...root.querySelectorAll("button, input, select, textarea, summary, [tabindex]")]
    .filter(each => each.checkVisibility() && !each.disabled).map((each, at) => (each.dataset.at = at))"""


def press_all(page: Page, where: Locator) -> None:
    """Press each of the notebook's keys while this has the focus, and check that the notebook keeps its cells."""
    before = page.evaluate(CELLS)
    for key in KEYS:
        where.focus()
        page.keyboard.press(key)
        found = page.evaluate(CELLS)
        assert found == before, f"{key} on {where.evaluate('each => each.outerHTML.slice(0, 120)')}: {found}"


def test_no_shortcut_of_the_notebook_acts_on_a_focused_panel(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    for role in ("slider", "button", "tab", "combobox", "textbox", "checkbox", "spinbutton", "listbox", "log"):
        press_all(panel.page, panel.root.get_by_role(role).locator("visible=true").first)
    press_all(panel.page, panel.root.locator("summary").first)
    press_all(panel.page, panel.root)
    # every one of them at least with the keys that delete; a real click puts the focus there as a hand does
    before = panel.page.evaluate(CELLS)
    for at in panel.root.evaluate(FOCUSABLE):
        control = panel.root.locator(f'[data-at="{at}"]')
        control.focus()
        for key in ("d", "d", "x"):
            panel.page.keyboard.press(key)
    for what in (".cl-header strong", ".cl-note", ".cl-plot", ".cl-token", ".cl-label", ".cl-pane-title"):
        panel.root.locator(what).locator("visible=true").first.click()
        for key in ("d", "d", "x"):
            panel.page.keyboard.press(key)
    # what goes, or is disabled, while it has the focus
    panel.root.get_by_role("button", name="remove formal", exact=True).click()
    expect(panel.root.locator(".cl-row")).to_have_count(0)
    for key in ("d", "d", "x"):
        panel.page.keyboard.press(key)
    assert panel.page.evaluate(CELLS) == before
    expect(panel.root).to_be_visible()


def test_the_focus_stays_with_the_panel_when_a_control_goes(panel: Panel) -> None:
    panel.kernel.run("panel.add('other', layers=9)")
    expect(panel.root.locator(".cl-row")).to_have_count(2)
    panel.button("remove other").focus()
    panel.page.keyboard.press("Enter")
    expect(panel.button("remove formal")).to_be_focused()
    panel.page.keyboard.press("Enter")
    expect(panel.root.get_by_role("combobox", name="vector to add")).to_be_focused()
    panel.ask()
    panel.settled()
    change = panel.button("edit message 1 (steered)")
    for leave in ("Escape", "cancel"):
        change.focus()
        panel.page.keyboard.press("Enter")
        expect(change).to_be_hidden()  # its place is the field's
        if leave == "cancel":
            panel.button("cancel").focus()
        panel.page.keyboard.press("Enter" if leave == "cancel" else leave)
        expect(change).to_be_focused()
    stop = panel.button("stop")
    panel.number("most tokens of an answer").fill("300")
    panel.number("most tokens of an answer").press("Enter")
    expect(stop).to_be_enabled()
    stop.focus()
    panel.page.keyboard.press("Enter")  # which disables it
    panel.settled("stopped")
    assert panel.root.evaluate("root => root.contains(document.activeElement)")


def test_no_shortcut_of_the_notebook_acts_on_a_focused_sweep(page: Page, kernel: Kernel) -> None:
    kernel.run("lab.clear(); lab.vectors['formal'] = formal")
    kernel.run("sweep = lab.sweep_panel(vector='formal', layers=[5], doses=[0.5], max_tokens=2)")
    kernel.run("sweep.start(); sweep.wait(60)")
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    for where in ("button", "combobox", "textbox", "spinbutton", "listbox"):
        press_all(page, sweep.root.get_by_role(where).locator("visible=true").first)
    press_all(page, sweep.root.locator(".cl-grid-cell[role=button]").first)
    press_all(page, sweep.root)


GAP = "log => log.scrollHeight - log.clientHeight - log.scrollTop"


def test_the_chat_follows_its_end_unless_scrolled_up(panel: Panel) -> None:
    panel.kernel.run("panel.state = {'sampling': {'max_tokens': 4}, 'rows': []}; panel.wait()")
    logs = [panel.pane(side).get_by_role("log") for side in ("baseline", "steered")]
    for turn in range(3):
        panel.ask(f"Tell me about river number {turn}. {SENTENCE * 5}")
        panel.settled()
    for log in logs:
        assert log.evaluate("log => log.scrollHeight > log.clientHeight + 20")
        assert log.evaluate(GAP) < 2
    last = panel.answer().locator(".cl-token").last
    assert last.evaluate(
        "each => each.getBoundingClientRect().bottom <= each.closest('[role=log]').getBoundingClientRect().bottom + 1"
    )
    logs[1].hover()
    panel.page.mouse.wheel(0, -60)
    newest = panel.pane().get_by_role("button", name="go to the end of the steered conversation")
    expect(newest).to_be_visible()
    panel.page.wait_for_timeout(400)  # a wheel scrolls smoothly
    place = logs[1].evaluate("log => log.scrollTop")
    panel.kernel.run("panel.regenerate(); panel.wait()")
    panel.settled()
    panel.ask("And now about mountains, please.")
    panel.settled()
    assert logs[1].evaluate("log => log.scrollTop") == pytest.approx(place, abs=2)
    assert logs[0].evaluate(GAP) < 2
    newest.click()
    assert logs[1].evaluate(GAP) < 2
    panel.ask("Once more.")
    panel.settled()
    assert logs[1].evaluate(GAP) < 2
    expect(newest).to_be_hidden()


COVERED = """root => {
    const box = root.querySelector(".cl-tip").getBoundingClientRect();
    const log = root.querySelector(".cl-tip").closest("[role=log]").getBoundingClientRect();
    const top = Math.max(box.top, log.top), bottom = Math.min(box.bottom, log.bottom);
    return [...root.querySelectorAll("button, input, select, textarea, summary, [role=slider], [role=listbox]")]
        .filter(each => each.checkVisibility())
        .filter(each => { const other = each.getBoundingClientRect();
            return box.left < other.right - 1 && other.left + 1 < box.right &&
                top < other.bottom - 1 && other.top + 1 < bottom; })
        .map(each => each.outerHTML.slice(0, 80));
}"""
APART = """root => {
    const tip = root.querySelector(".cl-tip"), box = tip.getBoundingClientRect();
    const token = tip.parentElement.querySelector(".cl-pinned").getBoundingClientRect();
    return Math.max(0, token.top - box.bottom, box.top - token.bottom);
}"""


def unpin(panel: Panel) -> None:
    """Let go of the pinned token, and wait until the kernel knows."""
    panel.page.keyboard.press("Escape")
    expect(panel.root.locator(".cl-pinned")).to_have_count(0)
    wait_until(lambda: panel.value("panel.state['view']['pinned']") is None)


def test_the_note_of_a_pinned_token_stays_with_it_and_covers_no_control(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.ask("And about the sea?")
    panel.settled()
    tip = panel.root.get_by_role("tooltip")
    before = panel.page.viewport_size
    assert before is not None
    for width in (1300, 900):
        panel.page.set_viewport_size({"width": width, "height": 1500})
        for side in ("steered", "baseline"):
            tokens = panel.pane(side).locator(".cl-token")
            for at in (1, tokens.count() // 2, tokens.count() - 2):
                unpin(panel)
                tokens.nth(at).click()
                panel.page.mouse.move(5, 5)
                expect(tip).to_be_visible()
                wait_until(lambda: panel.root.evaluate(APART) < 6)
                assert panel.root.evaluate(COVERED) == []
        # a form above moves the conversation, and the note with it
        unpin(panel)
        panel.token(38).click()
        panel.page.mouse.move(5, 5)
        expect(panel.token(38)).to_have_class(re.compile("cl-pinned"))
        panel.root.locator(".cl-form").evaluate("form => { form.open = true; }")
        expect(tip).to_contain_text("position 38")
        wait_until(lambda: panel.root.evaluate(APART) < 6)
        assert panel.root.evaluate(COVERED) == []
        picture(panel, f"pinned_{width}")
        panel.root.locator(".cl-form").evaluate("form => { form.open = false; }")
        # a click elsewhere closes the note, Escape and a click on the note let go of the token
        panel.root.locator(".cl-header strong").click()
        expect(tip).to_be_hidden()
        for close in ("Escape", "click"):
            unpin(panel)
            panel.token(38).click()
            panel.page.mouse.move(5, 5)
            expect(tip).to_be_visible()
            if close == "click":
                tip.click()
            else:
                panel.page.keyboard.press("Escape")
            expect(tip).to_be_hidden()
            expect(panel.root.locator(".cl-pinned")).to_have_count(0)
            wait_until(lambda: panel.value("panel.state['view']['pinned']") is None)
    panel.page.set_viewport_size(before)


STRIP = """() => { for (const sheet of [...document.styleSheets]) { try {
    for (const rule of [...sheet.cssRules]) for (const name of [...(rule.style ?? [])])
        if (name.startsWith("--jp-")) rule.style.removeProperty(name);
} catch {} } }"""
GROUNDS = {
    "white": "#ffffff",
    "black": "#000000",
    "VS Code dark": "#1e1e1e",
    "solarized light": "#fdf6e3",
    "solarized dark": "#002b36",
    "grey": "#777777",
}


def test_every_text_can_be_read_on_any_page(panel: Panel) -> None:
    """Without JupyterLab's variables and marks, on grounds that only the page's style says."""
    page, kernel = panel.page, panel.kernel
    kernel.run("lab.cap(20, other, -1.0, 1.0); lab.ablate(21, other)")
    kernel.run("panel.state = {'rows': [*panel.state['rows'][:2], {**panel.state['rows'][2], 'muted': True}]}")
    panel.ask()
    panel.settled()
    panel.drag(1.6)
    panel.settled()
    panel.kernel.run("panel.error = 'an error that is shown'")
    kernel.run("sweep = lab.sweep_panel(vector='formal', layers=[5, 15], doses=[0.5, 3.0], max_tokens=8)")
    kernel.run("sweep.start(); sweep.wait(60); sweep.state = {'seed': 8}")
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    expect(sweep.root.locator(".cl-grid-cell[role=button]")).to_have_count(4)
    weak: dict[str, Any] = {}
    page.evaluate(STRIP)
    page.evaluate("() => document.body.removeAttribute('data-jp-theme-light')")
    try:
        for name, ground in GROUNDS.items():
            page.add_style_tag(content=f".jp-Notebook, .jp-Cell, body {{ background: {ground} !important; }}")
            for shown in (panel, sweep):
                expected = "dark" if name in ("black", "VS Code dark", "solarized dark") else "light"
                expect(shown.root).to_have_attribute("data-theme", expected)
                page.wait_for_timeout(100)
                for state in ("done", "running", "waiting", "failed"):
                    shown.status.evaluate("(each, state) => { each.dataset.status = state; }", state)
                    weak |= {f"{name}, {state}, {text}": ratio for text, ratio in weak_texts(shown).items()}
            panel.pane().evaluate("each => each.classList.add('cl-stale')")
            weak |= {f"{name}, stale, {text}": ratio for text, ratio in weak_texts(panel).items()}
            panel.pane().evaluate("each => each.classList.remove('cl-stale')")
            picture(panel, f"ground_{name.replace(' ', '_')}")
    finally:
        save(page)
        page.reload()
        expect(panel.root).to_be_visible()
    assert not weak

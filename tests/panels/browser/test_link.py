"""A panel and its kernel: messages that the server drops, panels that are replaced, a lab that is closed, no kernel."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.panels.browser.jupyter import Kernel, Server, notebook
from tests.panels.browser.page import Panel, picture

LAB = """
import os, time
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import ipywidgets, torch
from ipywidgets.widgets import widget
from chatspace_lab import LabSession
lab = LabSession(max_model_len=1024, dtype="float32", kv_cache_memory_bytes=1 << 28)
torch.manual_seed(1)
lab.vectors["formal"] = torch.randn(lab.hidden_size) * 3
lab.measure("Tell me about rivers.")
one, two = lab.panel(max_tokens=120), lab.panel(max_tokens=120)
model = lab.model

def held():
    '''Return how many observers, listeners, widgets and comms there are.'''
    import comm
    return (len(model._client.observers), len(model._steering.listeners), len(widget._instances),
            len(comm.get_comm_manager().comms))
"""
CELLS = ["one", "two", "fresh = lab.panel(max_tokens=4); fresh", "lab.sweep_panel(vector='formal', layers=[5])", "1"]


NOTE_CHANGES = """() => {
    window.changedAt = [0];
    for (const each of document.querySelectorAll(".cl-panes, .cl-status"))
        new MutationObserver(() => window.changedAt.push(Date.now()))
            .observe(each, { childList: true, characterData: true, subtree: true });
}"""
"""Notes when an answer or the status has changed on the page."""
HEALED_S = 4.0
"""After a run, the page is complete within this time."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that lets few messages of a kernel through."""
    started = Server(tmp_path_factory.mktemp("limited"), options=["--ServerApp.iopub_msg_rate_limit=20"])
    started.write("linked.ipynb", notebook(CELLS))
    yield started
    started.close()


@pytest.fixture(scope="module")
def own(page: Page, limited: Server) -> Iterator[Page]:
    found = page.context.new_page()
    found.goto(limited.url("linked.ipynb"))
    found.locator(".jp-CodeCell").first.wait_for()
    yield found
    found.close()


@pytest.fixture(scope="module")
def lab(own: Page, limited: Server) -> Iterator[Kernel]:
    """A kernel of its own: its lab is closed here, and it is shut down itself."""
    found = limited.kernel("linked.ipynb")
    found.run(LAB, timeout_s=400)
    yield found
    found.close()


def test_the_end_of_a_stream_is_on_the_page_though_the_server_limits_messages(own: Page, lab: Kernel) -> None:
    panels = {name: Panel(own, lab, cell=at) for at, name in enumerate(("one", "two"))}
    for shown in panels.values():
        shown.show()
    for text in ("Write a long story about a river.", "Write another one."):
        own.evaluate(NOTE_CHANGES)
        asked = f"for each in (one, two): each.ask({text!r})\nfor each in (one, two): each.wait(200)"
        ended = float(lab.run(f"{asked}\nprint(time.time())", timeout_s=300))
        for name, shown in panels.items():
            wanted = lab.value(f"({name}.run['status'], {name}.steered['text'], {name}.baseline['text'])")
            expect(shown.status).to_have_attribute("data-status", "done", timeout=3_000)
            for side, answer in zip(("steered", "baseline"), wanted[1:], strict=True):
                expect(shown.answer(side)).to_have_text(answer, timeout=2_000)
            expect(shown.status).to_have_attribute("data-pending", "0", timeout=2_000)
        assert own.evaluate("() => Math.max(...window.changedAt) / 1000") - ended < HEALED_S


def test_a_replaced_panel_lets_go_and_steering_stays_instant(own: Page, lab: Kernel) -> None:
    lab.run("import gc; gc.collect(); time.sleep(0.5)")
    before = lab.value("held()")
    for cell in (2, 3):
        shown = Panel(own, lab, cell=cell)
        shown.show()
        for _ in range(12):
            shown.show(again=True)
        expect(shown.root).to_have_count(1)
        expect(own.locator(".jp-CodeCell").nth(cell).locator(".jp-InputPrompt")).not_to_contain_text("*")
        shown.show(again=True)
    expect(own.locator(".jp-CodeCell").nth(3).locator(".jp-InputPrompt")).not_to_contain_text("*")
    after = lab.value("held()")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 4, 4]  # one panel, one sweep
    took = lab.value("[(time.perf_counter(), lab.steer(15, lab.vectors['formal'], 1.0 + at))[0] for at in range(4)]")
    assert max(later - earlier for earlier, later in itertools.pairwise(took)) < 1.0
    shown = Panel(own, lab, cell=2)
    expect(shown.row()).to_be_visible()
    shown.ask()  # the one that is shown lives
    shown.settled()
    # one that a variable holds stays, one that is used again comes back
    lab.run("kept = [fresh]; mine = fresh; del fresh")
    cell = own.locator(".jp-CodeCell").nth(4)
    cell.locator(".cm-content").click()
    own.keyboard.press("Control+A")
    own.keyboard.insert_text("mine")
    own.keyboard.press("Shift+Enter")
    moved = Panel(own, lab, cell=4)
    expect(moved.answer()).to_have_text(shown.answer().text_content() or "")
    lab.run("lab.clear(); mine.close(); lab.steer(15, lab.vectors['formal'], 2.0)")
    expect(moved.root).to_have_count(0)


def test_a_panel_of_a_closed_lab_is_a_picture_that_says_how_to_go_on(own: Page, lab: Kernel) -> None:
    shown = Panel(own, lab, cell=0)
    answer = shown.answer().text_content() or ""
    shown.message.fill("typed before the end")
    lab.run("lab.close()")
    notice = shown.root.locator(".cl-notice")
    expect(notice).to_have_text(re.compile("picture of the last state.*lab was closed.*run this cell"))
    expect(shown.status).to_have_text("not connected ○")
    for name in ("send ⏎", "regenerate", "new chat", "add row", "stop", "save session and panel", "remove formal"):
        expect(shown.root.get_by_role("button", name=name, exact=True)).to_be_disabled()
    shown.message.press("Enter")
    expect(shown.message).to_have_value("typed before the end")
    expect(shown.answer()).to_have_text(answer)
    shown.tab("norm per message").click()  # what needs no kernel answers
    expect(shown.root.locator("rect[data-side=steered]").first).to_be_visible()
    picture(shown, "lab_closed")
    sweep = Panel(own, lab, cell=3)
    expect(sweep.root.locator(".cl-notice")).to_have_text(re.compile("picture of the last state"))
    expect(sweep.button("run")).to_be_disabled()
    with pytest.raises(AssertionError, match="The lab was closed: make a lab again"):
        lab.run("one.ask('x')")


def test_a_page_without_its_kernel_says_so_and_keeps_what_was_typed(own: Page, lab: Kernel, limited: Server) -> None:
    own.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    expect(own.locator(".jp-mod-dirty")).to_have_count(0)
    shown = Panel(own, lab, cell=0)
    own.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    expect(shown.root.locator(".cl-notice")).to_have_text(re.compile("picture of the last state"))
    expect(shown.message).to_have_value("typed before the end")
    expect(shown.button("send ⏎")).to_be_disabled()
    own.reload()
    notice = own.locator(".jp-CodeCell").first.locator(".cl-notice, .cl-snapshot").locator("visible=true").first
    expect(notice).to_contain_text("picture of the last state")

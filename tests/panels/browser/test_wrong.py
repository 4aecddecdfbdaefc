"""Errors, the last of which ends the engine: this file is the last."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.panels.browser.page import Panel, chat, picture


def test_an_error_is_shown_in_place_of_the_answer(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.number("most tokens of an answer").fill("4000")
    panel.number("most tokens of an answer").press("Enter")
    panel.settled("failed")
    expect(panel.pane().get_by_role("alert")).to_contain_text("max_model_len 2048")
    expect(panel.answer()).to_be_hidden()
    panel.number("most tokens of an answer").fill("12")
    panel.number("most tokens of an answer").press("Enter")
    panel.settled()
    expect(panel.answer()).to_be_visible()
    expect(panel.pane().get_by_role("alert")).to_be_hidden()
    assert panel.answer().inner_text() == chat(panel.kernel, 12)


def test_a_message_that_failed_takes_little_room_and_can_be_changed(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.ask("word " * 3000)
    panel.settled("failed")
    waiting = panel.pane().locator(".cl-pending")
    expect(waiting).to_contain_text("word word")
    assert waiting.evaluate("each => each.clientHeight") < 200
    panel.button("edit message 2 (steered)").click()
    panel.root.get_by_role("textbox", name="new text of message 2 (steered)").fill("Name a river.")
    panel.button("save").click()
    panel.settled()
    expect(panel.answer()).to_be_visible()
    assert [each["user"] for each in panel.value("panel.turns")] == ["Tell me about rivers.", "Name a river."]


def test_a_dead_engine_is_said_in_the_panel_and_no_old_answer_stands_for_it(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.kernel.run("for each in lab.model._client._processes: each.kill()")
    panel.drag(0.5)
    panel.settled("failed")
    expect(panel.pane().get_by_role("alert")).to_contain_text("has died")
    expect(panel.answer()).to_be_hidden()
    picture(panel, "dead_engine")

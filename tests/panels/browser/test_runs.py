"""Runs of the steering panel: sliders, layers, sessions and turns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from chatspace_lab.analysis.examples import OFFICE, SEA
from tests.panels.browser.jupyter import COMMS, Kernel, Server
from tests.panels.browser.page import Panel, chat, picture, save


def test_what_was_asked_before_the_panel_is_displayed_is_shown(page: Page, kernel: Kernel) -> None:
    kernel.run("lab.clear()")
    kernel.run('early = lab.panel(max_tokens=10); early.ask("Tell me about rivers."); early.wait(60)')
    early = Panel(page, kernel, cell=3)
    early.show()
    early.settled()
    plain = chat(kernel, steering="SteeringSpec.none()")
    assert early.answer().inner_text() == early.answer("baseline").inner_text() == plain
    kernel.run("early.close()")


def test_a_fresh_panel_says_what_to_do_and_makes_the_demo_vector(page: Page, kernel: Kernel) -> None:
    kernel.run(
        "from chatspace_lab.panels.vectors import variables\n"
        "lab.clear(); lab.vectors.clear(); hidden = list(variables(lab.hidden_size).items())\n"
        "for name, _ in hidden: del globals()[name]\n"
        "early = lab.panel(max_tokens=4)"
    )
    early = Panel(page, kernel, cell=3)
    early.show(again=True)
    try:
        expect(early.root.get_by_text("No vector yet. Build one")).to_be_visible()
        expect(early.root.get_by_text("Nothing was asked yet.")).to_be_visible()
        expect(early.root.locator(".cl-plot")).to_contain_text("nothing read yet")
        expect(early.button("add row")).to_be_disabled()
        expect(early.button("regenerate")).to_be_disabled()
        early.button("make the demo vector").click()
        expect(early.root.locator(".cl-busy")).to_have_text("building sea …")  # though the form is shut
        expect(early.row("sea")).to_be_visible()
        expect(early.root.locator(".cl-busy")).to_be_hidden()
        expect(early.root.locator(".cl-built")).to_contain_text("on held-out pairs")
        expect(early.button("add a row with sea")).to_be_hidden()  # it has one
        expect(early.root.get_by_text("No vector yet.")).to_be_hidden()
        expect(early.root.locator(".cl-header")).to_contain_text("0 steered layers")
        early.drag(0.3, "dose of sea")
        expect(early.root.locator(".cl-header")).to_contain_text("1 steered layer")
        early.ask()
        early.settled()
        expect(early.root.get_by_text("Nothing was asked yet.")).to_be_hidden()
    finally:
        kernel.run("early.close(); lab.clear(); globals().update(hidden)")


def test_dragging_a_slider_steers_the_session_and_answers_anew(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    plain = panel.answer("baseline").inner_text()
    assert panel.answer().inner_text() == plain
    before = panel.value("(len(lab.history), panel.baseline['number'])")
    panel.drag(0.5)
    panel.settled()
    assert panel.slider().get_attribute("aria-valuenow") == "0.5"
    steered = panel.answer().inner_text()
    assert steered != plain
    assert panel.answer("baseline").inner_text() == plain
    runs, baseline = panel.value("(len(lab.history), panel.baseline['number'])")
    assert (runs - before[0], baseline) == (1, before[1]), "the baseline is kept while only scales move"
    # the session is steered as the slider says, and answers without the panel as the panel shows
    scale, unit = panel.value("(panel.rows[0]['scale'], panel.rows[0]['unit'])")
    assert scale * unit == pytest.approx(0.5, abs=1e-6)
    assert panel.value("[(l, o.scale) for l, o in lab.export_steering_spec()]") == [(15, pytest.approx(scale))]
    assert panel.value("(float(formal.norm()) / lab.norms[15])") == pytest.approx(unit)
    assert chat(panel.kernel) == steered
    assert panel.value("panel.steered['rows'][0]['scale']") == scale
    assert float(panel.number("raw scale of formal").input_value()) == pytest.approx(scale, rel=1e-4)
    expect(panel.root.locator(".cl-receipt-text")).to_contain_text("@ 15 · dose 0.5")
    picture(panel, "steering")


def test_layers_are_picked_by_click_drag_and_keyboard(panel: Panel) -> None:
    strip = panel.strip()
    box = strip.bounding_box()
    assert box is not None
    middle = {"y": box["height"] / 2}
    cell = box["width"] / 30
    strip.click(position={"x": 20.5 * cell, **middle})
    expect(strip.get_by_role("option", selected=True)).to_have_count(2)
    strip.drag_to(strip, source_position={"x": 3.5 * cell, **middle}, target_position={"x": 6.5 * cell, **middle})
    expect(panel.row().locator(".cl-layers-text")).to_have_text("3–6, 15, 20")
    strip.press("ArrowRight")
    strip.press(" ")
    strip.press("Shift+ArrowRight")
    expect(panel.row().locator(".cl-layers-text")).to_have_text("3–8, 15, 20")
    panel.number("raw scale of formal").fill("0.25")
    panel.number("raw scale of formal").press("Enter")
    expect(panel.root.locator(".cl-header .cl-note").last).to_have_text("8 steered layers")
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value("[(l, o.scale) for l, o in lab.export_steering_spec()]") == [
        (layer, 0.25) for layer in (3, 4, 5, 6, 7, 8, 15, 20)
    ]


def test_points_appear_before_the_answer_is_complete_and_a_stop_keeps_the_text(panel: Panel) -> None:
    panel.kernel.run("panel.state = {'sampling': {'max_tokens': 1500}, 'rows': []}; panel.wait()")
    panel.ask("Write a long story about a river and the people who live beside it.")
    panel.page.wait_for_function(
        "() => Number(document.querySelector('.cl-steering g[data-side=steered]')?.dataset.points) > 60"
    )
    assert panel.status.get_attribute("data-status") == "running"
    assert panel.kernel.run("print(6 * 7)") == "42\n", "another cell runs meanwhile"
    assert panel.value("panel.run['status']") == "running"
    panel.button("stop").click()
    panel.settled("stopped")
    panel.kernel.run("panel.wait()")
    text = panel.value("panel.steered['text']")
    assert len(text) > 10
    expect(panel.answer()).to_have_text(text)
    assert 10 < panel.value("len(panel.steered['ids']) - panel.steered['prompt']") < 1500
    expect(panel.pane()).not_to_have_class(re.compile("cl-stale"))


def test_forty_moves_in_200_ms_end_in_one_answer_that_belongs_to_the_values_shown(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    before = panel.value("len(lab.history)")
    moved = panel.slider().evaluate(
        """async (handle) => {
            const track = handle.parentElement, box = track.getBoundingClientRect();
            const send = (kind, dose) => track.dispatchEvent(new PointerEvent(kind,
                {bubbles: true, pointerId: 7, clientX: box.left + box.width * (dose + 2) / 4, clientY: box.top + 9}));
            track.setPointerCapture = () => {};
            send("pointerdown", 0);
            for (let at = 1; at <= 40; at += 1) {
                send("pointermove", 0.02 * at);
                await new Promise((resolve) => setTimeout(resolve, 5));
            }
            send("pointerup", 0.8);
            return handle.getAttribute("aria-valuenow");
        }"""
    )
    panel.settled()
    assert moved == panel.slider().get_attribute("aria-valuenow") == "0.8"
    assert panel.value("panel.steered['rows'][0]['scale'] * panel.rows[0]['unit']") == pytest.approx(0.8, abs=1e-6)
    assert panel.value("panel._runner.most_in_flight") == 1
    assert panel.value("len(lab.history)") - before <= 3
    assert panel.answer().inner_text() == chat(panel.kernel)
    # and forty from a cell
    before = panel.value("len(lab.history)")
    panel.kernel.run("for at in range(40): lab.steer(15, formal, 0.02 * at)\npanel.wait()")
    expect(panel.number("raw scale of formal")).to_have_value("0.78")
    panel.settled()
    assert panel.value("panel._runner.most_in_flight") == 1
    assert panel.answer().inner_text() == chat(panel.kernel)


def test_the_session_is_followed_both_ways(panel: Panel) -> None:
    panel.kernel.run("lab.steer([4, 5], other, 2.0); lab.ablate(20, formal, 0.5)")
    expect(panel.row("other").locator(".cl-layers-text")).to_have_text("4–5")
    expect(panel.number("raw scale of other")).to_have_value("2")
    expect(panel.number("factor of formal")).to_have_value("0.5")
    panel.button("mute other").click()
    panel.button("remove formal").first.click()
    expect(panel.root.get_by_role("group", name="vector formal")).to_have_count(1)
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value("[(l, type(o).__name__) for l, o in lab.export_steering_spec()]") == [(20, "AblationSpec")]
    panel.kernel.run("lab.clear()")
    expect(panel.root.locator(".cl-row")).to_have_count(1)  # the muted one
    saved = panel.value("panel.state")
    assert [(row["vector"], row["muted"]) for row in saved["rows"]] == [("other", True)]
    panel.kernel.run(f"state = {saved!r}; state['rows'][0]['muted'] = False; panel.state = state; panel.wait()")
    assert panel.value("[(l, o.scale) for l, o in lab.export_steering_spec()]") == [(4, 2.0), (5, 2.0)]


def test_the_keyboard_moves_a_slider_and_a_double_click_takes_it_back(panel: Panel) -> None:
    slider = panel.slider()
    slider.focus()
    for key in ["ArrowRight", "ArrowRight", "ArrowRight", "Shift+ArrowRight"]:
        panel.page.keyboard.press(key)
    expect(slider).to_have_attribute("aria-valuenow", "0.13")
    panel.answered()
    for _ in range(60):
        panel.page.keyboard.press("Shift+ArrowRight")
    expect(slider).to_have_attribute("data-level", "extreme")
    expect(slider).to_have_attribute("aria-valuetext", "dose 2, extreme")
    slider.dblclick()
    expect(slider).to_have_attribute("aria-valuenow", "0")
    expect(panel.number("raw scale of formal")).to_have_value("0")


def test_a_cap_has_two_handles_and_says_what_it_clips(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.row().get_by_role("combobox", name="operation of formal").select_option("cap")
    expect(panel.slider("min of formal")).to_be_visible()
    panel.number("upper bound of formal").fill("1")
    panel.number("upper bound of formal").press("Enter")
    expect(panel.row().locator(".cl-note")).to_have_text(re.compile(r"\d+ of \d+ clipped"))
    panel.slider("min of formal").press("Shift+ArrowRight")
    panel.settled()
    panel.kernel.run("panel.wait()")
    low, high, clipped, of = panel.value("(*[panel.rows[0][k] for k in ('min', 'max')], *panel.rows[0]['clipped'])")
    assert low < 0 < high == 1
    found = panel.value(
        "[r.projection('formal')[r.layers.index(15)][1:].tolist() for r in "
        "(panel._runner.answers[s].readings for s in ('baseline', 'steered'))]"
    )
    assert (clipped, of) == (sum(not low <= each <= high for each in found[0]), len(found[0]))
    assert clipped > 0
    assert max(found[1]) <= high + 1e-3
    assert min(found[1]) >= low - 1e-3


def test_a_turn_is_edited_and_an_answer_drawn_again(panel: Panel) -> None:
    panel.ask("Name a river.")
    panel.settled()
    panel.ask("And another?")
    panel.settled()
    assert [each["user"] for each in panel.value("panel.state['turns']")] == ["Name a river.", "And another?"]
    assert panel.value("panel.state['turns'][0]['baseline']") is not None
    panel.pane().locator(".cl-message[data-role=user]").first.hover()
    panel.button("edit message 1 (steered)").click()
    field = panel.root.get_by_role("textbox", name="new text of message 1 (steered)")
    field.fill("Tell me about rivers.")
    field.dispatch_event("keydown", {"key": "Enter", "isComposing": True})  # it ends a word, where words are composed
    expect(field).to_be_visible()
    panel.button("save").click()
    panel.settled()
    expect(panel.pane("baseline").locator(".cl-message[data-role=user] .cl-text")).to_have_text(
        ["Tell me about rivers."]
    )
    assert panel.answer("baseline").inner_text() == chat(panel.kernel, steering="SteeringSpec.none()")
    panel.button("regenerate").click()
    expect(panel.number("seed")).to_have_value("8")
    panel.settled()
    expect(panel.root.locator(".cl-receipt-text")).to_contain_text("seed 8")


def test_a_direction_is_built_from_contrasting_texts(panel: Panel) -> None:
    panel.root.get_by_text("from contrasting texts").click()
    name = panel.root.get_by_role("textbox", name="name of the direction")
    positive = panel.root.get_by_role("textbox", name="texts that have it, one a line")
    negative = panel.root.get_by_role("textbox", name="texts that do not have it, one a line")
    problems, built = panel.root.locator(".cl-problems"), panel.root.locator(".cl-built")
    positive.fill("\n".join(SEA[:2]))
    negative.fill("\n".join([*OFFICE, "One more."]))
    panel.button("build").click()
    expect(problems).to_have_text("the direction needs a name; at least 6 texts that have it, got 2")
    positive.fill("\n".join(SEA))
    name.fill("sea")
    panel.button("build").click()
    expect(problems).to_have_text("as many texts that do not have it as texts that do, got 7 and 6")
    negative.fill("\n".join(OFFICE))
    panel.button("build").click()
    expect(built).to_contain_text(re.compile(r"AUC [\d.]+ on held-out pairs.*Shuffled labels reach [\d.]+ on average"))
    expect(panel.row("sea")).to_have_count(0)  # shown before it is used
    panel.button("add a row with sea").click()
    expect(panel.row("sea")).to_be_visible()
    panel.kernel.run("before = lab.vectors['sea']")
    positive.fill("\n".join(reversed(OFFICE)))
    negative.fill("\n".join(reversed(SEA)))
    panel.button("build").click()
    panel.kernel.run("import time\nwhile lab.vectors['sea'] is before: time.sleep(0.02)", timeout_s=60)
    panel.kernel.run("cosine = float(lab.vectors['sea'].at(9) @ before.at(9))")
    assert panel.value("cosine") == pytest.approx(-1, abs=1e-4)
    assert panel.value("(lab.vectors['sea'].method, len(lab.vectors['sea'].layers))") == ("difference of means", 30)
    layer = panel.value("lab.vectors['sea'].steering_layers().layer")
    expect(panel.row("sea").locator(".cl-layers-text")).to_have_text(str(layer))
    panel.drag(0.3, "dose of sea")
    panel.answered()
    panel.kernel.run("panel.wait()")
    vectors = "[float(o.vector @ lab.vectors['sea'].at(l)) for l, o in lab.export_steering_spec() if o.scale]"
    assert panel.value(vectors) == [pytest.approx(1, abs=1e-5)]


def test_the_code_is_copied_and_gives_the_answer_again(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.drag(0.35)
    panel.settled()
    text = panel.answer().text_content() or ""
    panel.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    panel.button("copy as code").click()
    expect(panel.root.get_by_role("button", name="copied", exact=True)).to_be_visible()
    copied = panel.page.evaluate("navigator.clipboard.readText()")
    assert "AddSpec(formal, " in copied
    cell = panel.cell(3)
    cell.type("")
    panel.page.keyboard.press("Control+V")
    assert cell.run() == text + "\n"


def test_another_cell_runs_while_the_panel_streams(panel: Panel) -> None:
    panel.kernel.run("panel.state = {'sampling': {'max_tokens': 1500}, 'rows': []}; panel.wait()")
    panel.ask("Write a long story about a river and the people who live beside it.")
    expect(panel.token(60)).to_be_visible()
    cell = panel.cell(3)
    cell.type("print(6 * 7, panel.run['status'])")
    assert cell.run() == "42 running\n"
    count = panel.pane().locator(".cl-token").count()
    expect(panel.token(count + 20)).to_be_visible()
    panel.button("stop").click()
    panel.settled("stopped")


@contextmanager
def blocked(panel: Panel, folder: Path) -> Iterator[None]:
    """While this goes, a cell blocks the kernel."""
    go = folder / "go"
    cell = panel.kernel.start(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)")
    try:
        yield
    finally:
        go.touch()
        panel.kernel.finish(cell)


def test_the_panel_answers_while_a_cell_blocks_the_kernel(panel: Panel, tmp_path: Path) -> None:
    """JupyterLab and ipykernel 7 bring messages of widgets to the kernel beside its cells."""
    panel.ask()
    panel.settled()
    before = panel.answer().text_content()
    with blocked(panel, tmp_path):
        panel.drag(0.4)
        assert panel.slider().get_attribute("aria-valuenow") == "0.4"
        panel.settled()
        shown = panel.answer().text_content()
    assert shown != before
    assert shown == chat(panel.kernel)


def test_a_slider_follows_the_hand_while_messages_queue_up(panel: Panel, server: Server, tmp_path: Path) -> None:
    """As with ipykernel 6: the kernel hears of the slider when its cell has ended."""
    save(panel.page)
    server.set(COMMS, {"commsOverSubshells": "disabled"})
    panel.page.reload()
    panel.ask()
    panel.settled()
    before = panel.answer().text_content()
    with blocked(panel, tmp_path):
        for dose in (0.4, -0.3):
            panel.drag(dose)
            assert panel.slider().get_attribute("aria-valuenow") == str(dose)
            assert panel.number("exact dose of formal").input_value() == str(dose)
            expect(panel.status).to_have_attribute("data-status", "waiting")
            expect(panel.pane()).to_have_class(re.compile("cl-stale"))  # greyed, never blank
            assert panel.answer().text_content() == before
            assert panel.status.get_attribute("data-pending") != "0"
    panel.settled()
    panel.kernel.run("panel.wait(60)")
    assert panel.slider().get_attribute("aria-valuenow") == "-0.3"
    assert panel.value("panel.steered['rows'][0]['scale'] * panel.rows[0]['unit']") == pytest.approx(-0.3, abs=1e-6)
    assert panel.answer().text_content() == panel.value("panel.steered['text']") == chat(panel.kernel)
    expect(panel.pane()).not_to_have_class(re.compile("cl-stale"))
    server.set(COMMS, {})
    panel.page.reload()


def test_earlier_answers_keep_the_values_that_they_were_made_with(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.drag(0.4)
    panel.settled()
    scale = panel.value("panel.rows[0]['scale']")
    first = {side: panel.answer(side).text_content() for side in ("baseline", "steered")}
    panel.ask("And lakes?")
    panel.settled()
    panel.drag(-0.2)
    panel.settled()
    notes = {
        "baseline": "not steered · seed 7 · T 0",
        "steered": f"add {scale:.3g}·formal @ 15 · dose 0.4 · seed 7 · T 0",
    }
    for side, note in notes.items():
        earlier = panel.pane(side).locator(".cl-message[data-role=assistant]").first
        assert earlier.locator(".cl-text").text_content() == first[side]
        expect(earlier.locator(".cl-made")).to_have_text(note)
        messages = panel.value(f"panel._runner.answers[{side!r}].asked.messages({side!r})")
        assert [each["content"] for each in messages] == ["Tell me about rivers.", first[side], "And lakes?"]
    assert panel.value("panel.state['turns'][0]['made']") == notes
    expect(panel.root.locator(".cl-receipt-text")).to_contain_text(re.compile(r"^add -.*·formal @ 15"))
    # an answer that never came is none, and the one before it does not stand for it
    panel.kernel.run("panel.state = {'sampling': {'max_tokens': 4000}}")
    panel.settled("failed")
    panel.number("most tokens of an answer").fill("12")
    panel.ask("And seas?")
    panel.settled()
    expect(panel.pane().locator(".cl-made").nth(1)).to_have_text("no answer")
    assert panel.value("[each['steered'] is None for each in panel.state['turns']]") == [False, True, True]

"""Fields of the panels: what cannot be used is marked and stays, nothing runs with it, and nothing is lost."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.panels.browser.jupyter import Kernel
from tests.panels.browser.page import Panel, tints


def typed(field: Locator, text: str) -> None:
    """Type over what a field holds, key by key, and press Enter."""
    field.focus()
    field.press("Control+A")
    field.press("Delete")
    field.press_sequentially(text)
    field.press("Enter")


def said(panel: Panel) -> Locator:
    return panel.root.locator(".cl-problems")


def test_a_sweep_with_a_field_that_cannot_be_used_does_not_run(page: Page, kernel: Kernel) -> None:
    kernel.run("lab.clear(); lab.vectors['formal'] = formal")
    kernel.run("sweep = lab.sweep_panel(vector='formal', layers=[5, 15], doses=[0.25, 0.5], max_tokens=2)")
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    sweep.button("run").click()
    cells = sweep.root.locator(".cl-grid-cell[role=button]")
    expect(sweep.status).to_have_attribute("data-status", "done")
    expect(cells).to_have_count(4)
    before = kernel.value("(sweep.run['number'], sweep.plan, [each['text'] for each in sweep.cells])")
    doses = sweep.root.get_by_role("textbox", name="doses, with commas between")
    prompt = sweep.root.get_by_role("textbox", name="prompt")
    tokens, seed = sweep.number("most tokens of an answer"), sweep.number("seed")
    for field, wrong, why, right in (
        (doses, "0.1, abc", "doses: must be numbers with commas between, got abc", "0.25, 0.5"),
        (doses, "", "doses: must be numbers with commas between, got nothing", "0.25, 0.5"),
        (prompt, " ", "the prompt is empty", "Tell me about rivers."),
        (tokens, "0", "most tokens of an answer must be a whole number from 1 on, got 0", "2"),
        (tokens, "", "most tokens of an answer must be a whole number from 1 on, got nothing", "2"),
        (seed, "1.5", "seed must be a whole number from 0 on, got 1.5", "7"),
        (seed, "1e", "seed must be a whole number from 0 on, got something else", "7"),
    ):
        typed(field, wrong)
        sweep.button("run").click()
        expect(said(sweep)).to_have_text(why)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_be_focused()
        kernel.run("lab.vectors['other'] = other; sweep._now(sweep._offer)")  # what is drawn anew keeps it
        expect(sweep.root.locator("option[value=other]")).to_be_attached()
        kernel.run("del lab.vectors['other']; sweep._now(sweep._offer)")
        if not wrong.endswith("e"):  # a field for numbers does not tell half of one
            expect(field).to_have_value(wrong if field is not prompt else re.compile(r"^ \n?$"))
        expect(cells).to_have_count(4)
        assert kernel.value("(sweep.run['number'], sweep.plan, [each['text'] for each in sweep.cells])") == before
        field.fill(right)
        expect(said(sweep)).to_be_hidden()
        expect(field).not_to_have_attribute("aria-invalid", "true")
        field.press("Escape") if field is prompt else field.press("Enter")
    sweep.button("run").click()
    kernel.run(f"import time\nwhile sweep.run['number'] == {before[0]}: time.sleep(0.02)\nsweep.wait(60)", timeout_s=90)
    assert kernel.value("sweep.plan") == before[1]


def test_fields_of_the_steering_panel_hold_back_what_would_run_with_them(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    before = panel.value("(panel.run['number'], panel.state['sampling'], panel.rows)")
    for name, wrong, why in (
        ("seed", "-1", "seed must be a whole number from 0 on, got -1"),
        ("temperature", "9", "temperature must be a number from 0 to 5, got 9"),
        ("most tokens of an answer", "", "most tokens of an answer must be a whole number from 1 on, got nothing"),
        ("raw scale of formal", "1e39", "raw scale of formal must be a number, got 1e39"),
        ("exact dose of formal", "", "exact dose of formal must be a number, got nothing"),
    ):
        field = panel.number(name)
        typed(field, wrong)
        panel.message.fill("And of the sea?")
        panel.message.press("Enter")
        expect(said(panel)).to_have_text(why)
        expect(field).to_be_focused()
        expect(panel.message).to_have_value("And of the sea?")
        panel.button("regenerate").click()
        panel.answered()
        assert panel.value("(panel.run['number'], panel.state['sampling'], panel.rows)") == before
        field.press("Escape")  # brings back the last value
        expect(said(panel)).to_be_hidden()
    panel.message.fill(" ")
    panel.message.press("Enter")
    expect(said(panel)).to_have_text("the message is empty")
    panel.message.fill("And of the sea?")
    expect(said(panel)).to_be_hidden()
    panel.message.press("Enter")
    panel.settled()
    assert panel.value("len(panel.state['turns'])") == 2


def test_a_bound_of_a_cap_is_emptied_and_two_that_cross_are_marked(panel: Panel) -> None:
    panel.row().get_by_role("combobox", name="operation of formal").select_option("cap")
    low, high = panel.number("lower bound of formal"), panel.number("upper bound of formal")
    typed(low, "-2")
    typed(high, "3")
    panel.answered()
    bounds = "[(o.min, o.max) for _, o in lab.export_steering_spec()]"
    panel.kernel.run("panel.wait()")
    assert panel.value(bounds) == [(-2.0, 3.0)]
    typed(low, "4")
    expect(said(panel)).to_have_text("lower bound of formal must be at most the upper bound, 3, got 4")
    expect(low).to_have_value("4")
    panel.kernel.run("panel.wait()")
    assert panel.value(bounds) == [(-2.0, 3.0)]
    typed(low, "")
    expect(said(panel)).to_be_hidden()
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value(bounds) == [(None, 3.0)]
    typed(high, "")
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value("len(list(lab.export_steering_spec()))") == 0


def test_the_dose_is_kept_where_layers_are_added_and_the_total_is_shown(panel: Panel) -> None:
    panel.kernel.run("lab.measure('Tell me about rivers.'); panel._norms = dict(lab.norms)")
    doses = "{at: op.scale * float(formal.norm()) / panel._norms[at] for at, op in lab.export_steering_spec()}"
    strip = panel.strip()
    box = strip.bounding_box()
    assert box is not None
    cell, middle = box["width"] / 30, {"y": box["height"] / 2}
    typed(panel.number("exact dose of formal"), "0.35")
    strip.click(position={"x": 2.5 * cell, **middle})
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value(doses) == pytest.approx({2: 0.35, 15: 0.35})
    expect(panel.number("exact dose of formal")).to_have_value("0.35")
    expect(panel.row().locator(".cl-total")).to_have_text("× 2 = 0.7")
    strip.drag_to(strip, source_position={"x": 20.5 * cell, **middle}, target_position={"x": 29.5 * cell, **middle})
    panel.answered()
    panel.kernel.run("panel.wait()")
    assert panel.value(doses) == pytest.approx(dict.fromkeys([2, 15, *range(20, 30)], 0.35))
    expect(panel.slider()).to_have_attribute("aria-valuenow", "0.35")
    expect(panel.row().locator(".cl-total")).to_have_text("× 12 = 4.2")
    expect(panel.row().locator(".cl-total")).to_have_attribute("title", re.compile("add up"))
    panel.drag(-0.2)
    panel.answered()
    panel.kernel.run("panel.wait()")
    found = panel.value(doses)
    assert found == pytest.approx(dict.fromkeys(found, panel.value("panel.rows[0]['dose']")))
    assert panel.value("panel.rows[0]['dose']") == pytest.approx(-0.2, abs=0.02)


def test_a_value_that_is_not_finite_is_marked_and_changes_no_other(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    before = tints(panel)
    panel.kernel.run(
        """
from chatspace_lab.panels.buffers import pack, unpack
def spoil():
    values = unpack(panel.steered["projection"])
    values[panel.steered["layers"].index(15), 35] = float("inf")
    panel.steered = {**panel.steered, "projection": pack(values)}
panel._now(spoil)
"""
    )
    expect(panel.root.locator(".cl-overflow")).to_have_count(1)
    expect(panel.token(35)).to_have_class(re.compile("cl-overflow"))
    expect(panel.root.locator(".cl-not-finite")).to_have_attribute("data-position", "35")
    after = tints(panel)
    positions = panel.pane().locator(".cl-token").evaluate_all("all => all.map(each => Number(each.dataset.position))")
    assert [(at, colour) for at, colour in zip(positions, after, strict=True) if at != 35] == [
        (at, colour) for at, colour in zip(positions, before, strict=True) if at != 35
    ]
    panel.token(35).hover()
    expect(panel.root.get_by_role("tooltip")).to_contain_text("formal at 15: ∞")

"""The sweep panel, and that nothing outside is asked for."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.panels.browser.jupyter import Kernel
from tests.panels.browser.page import RIVERS, Panel, picture


def test_the_sweep_fills_while_it_runs_and_a_click_shows_the_text(page: Page, kernel: Kernel) -> None:
    doses = [-0.5, 0.25, 0.5, 2.0]
    kernel.run("lab.clear(); lab.vectors['formal'] = formal")
    kernel.run(f"sweep = lab.sweep_panel(vector='formal', layers=[5, 15, 25], doses={doses}, max_tokens=12)")
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    sweep.button("run").click()
    cells = sweep.root.locator(".cl-grid-cell[role=button]")
    expect(cells).to_have_count(12)
    expect(sweep.status).to_have_attribute("data-status", "done")
    rows = {(row["layer"], row["dose"]): row for row in kernel.value("sweep.cells")}
    assert len(rows) == 12
    frame = kernel.value("sweep.frame[['layer', 'dose', 'text']].to_dict('records')")
    for each in frame:
        assert (
            rows[each["layer"], min((-0.5, 0.25, 0.5, 2.0), key=lambda dose: abs(dose - each["dose"]))]["text"]
            == each["text"]
        )
    sweep.root.locator(".cl-grid-cell[data-layer='15'][data-dose='0.5']").click()
    expect(sweep.root.locator(".cl-chosen-text")).to_have_text(rows[15, 0.5]["text"])
    sweep.root.locator(".cl-grid-cell[data-layer='5'][data-dose='0.25']").press("Enter")
    expect(sweep.root.locator(".cl-chosen-text")).to_have_text(rows[5, 0.25]["text"])
    broken = sweep.root.locator(".cl-grid-cell[data-broken=true]").count()
    assert broken == sum(row["broken"] for row in rows.values())
    assert sweep.root.locator("rect.cl-hatch").count() == broken
    picture(sweep, "sweep")
    kernel.run("sweep.state = {'layers': list(range(30)), 'max_tokens': 200}; sweep.start()")
    expect(sweep.status).to_have_attribute("data-status", "running")
    sweep.button("stop").click()
    expect(sweep.status).to_have_attribute("data-status", "stopped")


def test_a_sweep_of_ablations_is_the_sessions_own_and_a_new_plan_is_not_yet_its_grid(
    page: Page, kernel: Kernel
) -> None:
    kernel.run("lab.clear(); lab.vectors['formal'] = formal")
    kernel.run("sweep = lab.sweep_panel(vector='formal', layers=[5, 15], max_tokens=12)")
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    sweep.root.get_by_role("combobox", name="operation", exact=True).select_option("ablate")
    doses = sweep.root.get_by_role("textbox", name="doses, with commas between")
    expect(doses).to_have_value("0, 0.5")
    sweep.button("run").click()
    cells = sweep.root.locator(".cl-grid-cell[role=button]")
    expect(cells).to_have_count(4)
    expect(sweep.status).to_have_attribute("data-status", "done")
    kernel.run(
        f"frame = lab.sweep({RIVERS}, [5, 15], formal, [0.0, 0.5], operation='ablate', read_layer=28, max_tokens=12,"
        " seed=7)"
    )
    wanted = kernel.value("frame[['layer', 'scale', 'text']].values.tolist()")
    found = [[each["layer"], each["dose"], each["text"]] for each in kernel.value("sweep.cells")]
    assert found == wanted
    expect(sweep.root.locator(".cl-grid-box")).not_to_have_class(re.compile("cl-stale"))
    doses.fill("0.25")
    doses.press("Enter")
    expect(sweep.root.locator(".cl-grid-box")).to_have_class(re.compile("cl-stale"))
    expect(cells).to_have_count(4)
    expect(sweep.root.get_by_role("button", name=re.compile("^layer 15, keep 0: effect"))).to_be_visible()


def test_a_sweep_of_several_prompts_shows_their_mean_and_spread(page: Page, kernel: Kernel) -> None:
    kernel.run("lab.clear(); lab.vectors['formal'] = formal")
    kernel.run(
        "sweep = lab.sweep_panel(prompts=['Tell me about rivers.', 'Name a town.'], score=len, vector='formal',"
        " layers=[5, 15], doses=[0.25, 0.5], max_tokens=8)"
    )
    sweep = Panel(page, kernel, cell=2)
    sweep.show(again=True)
    expect(sweep.root.locator(".cl-hint")).to_contain_text("8 runs of at most 8 tokens")
    expect(sweep.root.locator(".cl-sweep-text")).to_contain_text("“run” fills the grid")
    sweep.button("+ prompt").click()
    sweep.button("remove prompt 3").click()
    sweep.button("run").click()
    expect(sweep.status).to_have_text("done 8 of 8")
    for cell in kernel.value("sweep.cells"):
        name = (
            f"layer {cell['layer']}, dose {cell['dose']:g}: score {cell['score']:.3g}, mean of 2 prompts, "
            f"standard deviation {cell['score_spread']:.3g}"
        )
        found = sweep.root.locator(f"[data-layer='{cell['layer']}'][data-dose='{cell['dose']}']")
        expect(found.locator("title")).to_have_text(re.compile(f"^{re.escape(name)}"))
    sweep.root.locator("[data-layer='15'][data-dose='0.25']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    texts = kernel.value("[run['text'] for run in sweep.cells[1]['runs']]")
    expect(sweep.root.locator(".cl-chosen-text")).to_have_text(texts)
    expect(sweep.root.locator("[data-layer='5'][data-dose='0.5']")).to_be_focused()
    assert sweep.root.locator(".cl-grid-cell[role=button][tabindex='0']").count() == 1
    sweep.root.get_by_role("combobox", name="what the grid shows").select_option("effect")
    expect(sweep.root.locator("[data-layer='5'][data-dose='0.5'] title")).to_contain_text("effect")
    picture(sweep, "sweep_of_prompts")
    sweep.button("remove prompt 2").click()
    kernel.run("import time\nwhile len(sweep.plan['prompts']) > 1: time.sleep(0.02)", timeout_s=30)
    expect(sweep.root.get_by_role("textbox", name="prompt", exact=True)).to_have_value("Tell me about rivers.")


def test_nothing_outside_is_asked_for(panel: Panel, hosts: set[str]) -> None:
    assert {host.split(":")[0] for host in hosts if host} == {"127.0.0.1"}

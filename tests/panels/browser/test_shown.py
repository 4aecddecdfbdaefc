"""What the steering panel shows: tokens, tints, plots and texts."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.panels.browser.page import RIVERS, Panel, picture, tints


def test_a_token_is_read_by_hovering_and_pinned_in_every_plot(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.drag(-0.4)
    panel.settled()
    panel.kernel.run(
        f"_, [h] = lab.chat({RIVERS}, temperature=0.0, max_tokens=10, seed=7, capture_layers=[15])\n"
        "lab.fetch_captures_batch([h]); row = h.hidden(15)[38]; want = float(row @ (formal / formal.norm()))\n"
        "token_id = h.token_ids[38]; h.close()"
    )
    want, token_id = panel.value("(want, token_id)")
    panel.token(38).hover()
    tip = panel.root.get_by_role("tooltip")
    expect(tip).to_have_text(f"formal at 15: {float(f'{want:.3g}'):g} · token {token_id} · position 38")
    panel.token(38).click()
    expect(panel.token(38)).to_have_class(re.compile("cl-pinned"))
    expect(panel.token(38, "baseline")).to_have_class(re.compile("cl-pinned"))
    expect(panel.root.locator("line.cl-line-pinned")).to_have_attribute("data-position", "38")
    for name in ("norm per message", "cosine per message"):
        panel.tab(name).click()
        expect(panel.root.locator("rect[data-pinned=true]")).to_have_count(1)
        picture(panel, name.replace(" ", "_"))
    panel.tab("layer × token").click()
    expect(panel.root.locator(".cl-heat-line.cl-line-pinned")).to_have_count(2)
    picture(panel, "heatmap")
    assert panel.value("panel.state['view']['pinned']") == {"side": "steered", "position": 38}
    panel.token(38).click()
    expect(panel.root.locator(".cl-pinned")).to_have_count(0)


def test_bars_are_the_means_of_the_captures(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    panel.kernel.run(
        f"_, [h] = lab.chat({RIVERS}, temperature=0.0, max_tokens=10, seed=7, capture_layers=[15])\n"
        "lab.fetch_captures_batch([h]); x = h.hidden(15)[h.prompt_len:].float(); h.close()\n"
        "norm = float(x.norm(dim=1).mean()); cosine = float(torch.cosine_similarity(x, formal[None]).mean())"
    )
    for tab, name, title in (
        ("norm per message", "norm", "mean activation norm per message"),
        ("cosine per message", "cosine", "mean cosine to formal per message"),
    ):
        panel.tab(tab).click()
        expect(panel.root.get_by_role("img", name=title, exact=True)).to_be_visible()
        bar = panel.root.locator("rect[data-side=baseline][data-layer='15']").last
        assert float(bar.get_attribute("data-value") or "nan") == pytest.approx(panel.value(name), rel=2e-3, abs=2e-4)
        # a click that the kernel heard of later would undo what the next test sets
        panel.kernel.run(f"import time\nwhile panel.view['plot'] != {name!r}: time.sleep(0.02)", timeout_s=30)


def test_another_direction_or_layer_tints_anew_without_a_forward_pass(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    runs, before = panel.value("len(lab.history)"), tints(panel)
    assert any("37, 99, 235" in each for each in before)
    assert any("220, 38, 38" in each for each in before)
    panel.root.get_by_role("combobox", name="layer of the tints and plots").select_option("8")
    expect(panel.root.locator("g[data-side=steered]")).to_have_attribute("data-layer", "8")
    at_eight = tints(panel)
    assert at_eight != before
    panel.kernel.run("late = torch.randn(lab.hidden_size)")  # a direction that was not read while tokens came
    direction = panel.root.get_by_role("combobox", name="direction of the tints and plots")
    panel.root.get_by_role("combobox", name="vector to add").focus()
    expect(direction.locator("option[value=late]")).to_be_attached()
    direction.select_option("late")
    expect(panel.root.get_by_role("img", name="projection per token on late")).to_be_visible()
    expect(panel.root.locator(".cl-legend").first).to_contain_text("late")
    panel.kernel.run("import time\nwhile panel.steered['direction'] != 'late': time.sleep(0.02)", timeout_s=30)
    panel.page.wait_for_function(
        "old => JSON.stringify([...document.querySelectorAll('.cl-steered .cl-token')].slice(0, old.length)"
        ".map(each => each.style.backgroundColor)) !== JSON.stringify(old)",
        arg=at_eight,
    )
    assert panel.value("len(lab.history)") == runs


def test_characters_of_several_tokens_are_whole(panel: Panel) -> None:
    panel.kernel.run("panel.state = {'rows': [], 'sampling': {'max_tokens': 30}}; panel.wait()")
    panel.ask("Repeat exactly: 🦜🦜🦜👩‍👩‍👧 日本語")
    panel.settled()
    text = panel.value("panel.steered['text']")
    assert "🦜🦜" in text
    for side in ("baseline", "steered"):
        assert panel.answer(side).text_content() == text


def test_texts_appear_as_typed(panel: Panel) -> None:
    odd = "<think>a</think> </script> &amp; $x$ <b>bold</b> <img src=x onerror=alert(1)>"
    panel.ask(odd)
    panel.settled()
    for side in ("baseline", "steered"):
        expect(panel.pane(side).locator(".cl-message[data-role=user] .cl-text")).to_have_text(odd)
    turns = [{"user": "x", "baseline": odd, "steered": odd}, {"user": "y"}]
    panel.kernel.run(f"panel.state = {{'turns': {turns!r}}}; panel.wait()")
    expect(panel.pane().locator(".cl-message[data-role=assistant] .cl-text").first).to_have_text(odd)
    name = "<b>x</b> & $y$"
    panel.kernel.run(f"lab.vectors[{name!r}] = other; panel.add({name!r}, layers=[3], scale=1.0); panel.wait()")
    expect(panel.row(name).locator(".cl-name")).to_have_text(name)
    panel.kernel.run(f"panel.state = {{'view': {{'direction': {name!r}}}}}")
    expect(panel.root.get_by_role("img", name=f"projection per token on {name}")).to_be_visible()
    expect(panel.root.locator(".cl-receipt-text")).to_contain_text(f"add 1·{name} @ 3")
    assert panel.root.locator("img, b, script, mjx-container").count() == 0

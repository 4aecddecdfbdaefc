"""Two views, a reload, themes, a narrow page, and the size of it all."""

from __future__ import annotations

import html
import re
import statistics

from playwright.sync_api import expect

from tests.panels.browser.jupyter import Server
from tests.panels.browser.page import Panel, chat, command, picture, save, saved, tints, weak_texts


def test_two_views_and_a_reloaded_page_show_the_same(panel: Panel, server: Server) -> None:
    second = Panel(panel.page, panel.kernel, cell=1)
    second.show()
    panel.ask()
    panel.settled()
    panel.drag(0.6)
    panel.settled()
    expect(second.answer()).to_have_text(panel.value("panel.steered['text']"))
    assert second.slider().get_attribute("aria-valuenow") == panel.slider().get_attribute("aria-valuenow") == "0.6"
    second.drag(-0.2)
    second.settled()
    expect(panel.slider()).to_have_attribute("aria-valuenow", "-0.2")
    expect(panel.answer()).to_have_text(panel.value("panel.steered['text']"))
    shown = (panel.answer().inner_text(), panel.answer("baseline").inner_text(), tints(panel))
    save(panel.page)
    panel.page.reload()
    expect(panel.answer()).to_have_text(shown[0])
    assert (panel.answer().inner_text(), panel.answer("baseline").inner_text(), tints(panel)) == shown
    expect(panel.slider()).to_have_attribute("aria-valuenow", "-0.2")
    panel.drag(0.4)
    panel.settled()
    assert panel.answer().inner_text() == chat(panel.kernel)
    # what stays in the notebook follows too, though the page no longer knows of the display
    text = panel.answer().text_content() or ""
    for view in (panel, second):
        expect(view.still().last).to_have_text(text)
        expect(view.still().last).to_be_hidden()
    for cell in saved(panel.page, server).cells[:2]:
        [output] = [each.data["text/html"] for each in cell.outputs if "text/html" in each.data]
        assert f">\n{html.escape(text)}</pre>" in re.sub("</?span[^>]*>", "", output)


def luminance(panel: Panel, what: str) -> float:
    """Return the mean of a colour's channels, 0 to 255."""
    colour = panel.root.evaluate(f"root => getComputedStyle(root).{what}")
    channels = [float(each) for each in re.findall(r"[\d.]+", colour)[:3]]
    return statistics.mean(channels)


def test_light_and_dark(panel: Panel) -> None:
    panel.ask()
    panel.settled()
    weak = {"light": weak_texts(panel)}
    assert luminance(panel, "backgroundColor") - luminance(panel, "color") > 120
    command(panel.page, "apputils:change-theme", theme="JupyterLab Dark")
    expect(panel.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    panel.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.cl-panel')).color.match(/\\d+/)[0] > 150", polling=50
    )
    assert luminance(panel, "color") - luminance(panel, "backgroundColor") > 120
    weak["dark"] = weak_texts(panel)
    picture(panel, "dark")
    command(panel.page, "apputils:change-theme", theme="JupyterLab Light")
    expect(panel.page.locator("body")).to_have_attribute("data-jp-theme-light", "true")
    assert weak == {"light": {}, "dark": {}}


OUTSIDE = """root => {
    const edge = root.getBoundingClientRect();
    return [...root.querySelectorAll("button, input, select, textarea, svg, .cl-row, .cl-track, .cl-token")]
        .filter(each => each.checkVisibility())
        .filter(each => { const box = each.getBoundingClientRect();
            return box.right > edge.right + 1 || box.left < edge.left - 1; })
        .map(each => each.outerHTML.slice(0, 80));
}"""
OVERLAPS = """root => [...root.querySelectorAll(".cl-row")].flatMap(row => {
    const parts = row.querySelectorAll("button, select, input, .cl-slider, .cl-strip, .cl-name, .cl-note, .cl-label");
    const boxes = [...parts].filter(each => each.checkVisibility()).map(each => each.getBoundingClientRect());
    const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1 &&
        one.top < other.bottom - 1 && other.top < one.bottom - 1;
    return boxes.flatMap((one, at) => boxes.slice(at + 1).filter(other => meet(one, other))).map(() => row.ariaLabel);
})"""


def test_nothing_is_cut_off_at_900_px(panel: Panel) -> None:
    panel.kernel.run("lab.cap(20, other, -1.0, 1.0); lab.ablate(21, other)")
    expect(panel.root.locator(".cl-row")).to_have_count(3)
    name = "a_name_of_many_words_" * 8
    panel.kernel.run(f"panel.add({name!r}, other, layers=3); panel.state = {{'view': {{'direction': {name!r}}}}}")
    expect(panel.row(name)).to_be_visible()
    panel.kernel.run("panel._book.edit('r1', {'layers': [3, 14, 15, 16], 'dose': 0.8})")  # with its total beside it
    expect(panel.row("formal").locator(".cl-total")).to_have_text("× 4 = 3.2")
    panel.ask()
    panel.settled()
    wide = {}
    for width in (1200, 960, 900, 868, 850, 800):
        panel.root.evaluate("(root, width) => { root.style.width = `${width}px`; }", width)
        wide[width] = [panel.root.evaluate(what) for what in (OUTSIDE, OVERLAPS)]
    panel.root.evaluate("root => { root.style.width = ''; }")
    # and in a window of 900 px, of which JupyterLab takes a part
    before = panel.page.viewport_size
    assert before is not None
    panel.page.set_viewport_size({"width": 900, "height": 1500})
    panel.page.wait_for_function("() => document.querySelector('.cl-panel').getBoundingClientRect().width < 760")
    narrow = [panel.root.evaluate(what) for what in (OUTSIDE, OVERLAPS)]
    seen = panel.root.evaluate("root => root.getBoundingClientRect().right <= window.innerWidth")
    picture(panel, "at_900_px")
    panel.page.set_viewport_size(before)
    assert (wide, narrow, seen) == ({width: [[], []] for width in wide}, [[], []], True)


MIB = 1 << 20


def test_the_state_of_a_long_conversation_stays_below_a_mebibyte(panel: Panel) -> None:
    panel.kernel.run("import ipywidgets.embed, json")
    for sentences in (60, 80):  # as long as all of it is kept, and longer
        tokens = panel.show_long(sentences)
        expect(panel.token(tokens)).to_be_visible()
        assert (panel.value("panel.steered['first']") == 0) == (sentences == 60)
        # as a notebook holds them: the state with its buffers in base64 and the front end, and the output beside it
        panel.kernel.run("panel._now(panel._displays.update)")
        state = panel.value("len(json.dumps(ipywidgets.embed.dependency_state([panel])))")
        output = panel.value("len(json.dumps(panel._displays._published))")
        print(
            f"{tokens} tokens, {panel.value('lab.layer_count')} layers: state {state:,} bytes, output {output:,} bytes"
        )
        assert 300_000 < state < MIB
        assert 50_000 < output < MIB - state, "together below 1 MiB"

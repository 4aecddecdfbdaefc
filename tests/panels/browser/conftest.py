"""One JupyterLab, one engine and one page for all browser tests of the panels.

They end with this package: while Playwright runs, this thread has a running event loop, which other tests do not bear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.panels.browser.jupyter import CHROMIUM, Kernel, Server, notebook

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.panels.browser.page import Panel

LAB = """
import os
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import torch
from chatspace_lab import AddSpec, LabSession, SteeringSpec
lab = LabSession(max_model_len=2048, dtype="float32", kv_cache_memory_bytes=1 << 28)
torch.manual_seed(1)
formal = torch.randn(lab.hidden_size) * 3
other = torch.randn(lab.hidden_size)
panel = lab.panel(max_tokens=10)
"""
CELLS = ["panel", "panel", "sweep", "early"]
"""What the notebook shows: two views of the panel, a sweep, and a panel that is displayed late."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("jupyter"))
    started.write("panels.ipynb", notebook(CELLS))
    yield started
    started.close()


@pytest.fixture(scope="package")
def hosts() -> set[str]:
    """Where the page has asked for anything."""
    return set()


@pytest.fixture(scope="package")
def page(server: Server, hosts: set[str]) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    from tests.panels.browser.jupyter import FLAGS
    from tests.panels.browser.page import OUTPUT

    OUTPUT.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1300, "height": 1500})
        context.set_default_timeout(60_000)
        found = context.new_page()
        found.on("request", lambda request: hosts.add(request.url.split("/")[2] if "//" in request.url else ""))
        found.goto(server.url("panels.ipynb"))
        found.locator(".jp-CodeCell").first.wait_for()
        yield found
        browser.close()


@pytest.fixture(scope="package")
def kernel(server: Server, page: Page) -> Iterator[Kernel]:
    """The notebook's kernel, with a lab and a panel that nobody sees yet."""
    found = server.kernel("panels.ipynb")
    found.run(LAB, timeout_s=400)
    yield found
    found.run("lab.close()")
    found.close()


@pytest.fixture
def panel(page: Page, kernel: Kernel) -> Panel:
    """The first view of the panel: one row, nothing asked, nothing steered."""
    from playwright.sync_api import expect

    from tests.panels.browser.page import Panel

    kernel.run(
        """
panel.stop()
lab.vectors.clear()
lab.vectors.update(formal=formal, other=other)
panel.error = panel.saved = ""
panel.state = {"rows": [{"vector": "formal", "layers": [15]}], "where": "all", "turns": [],
    "sampling": {"seed": 7, "temperature": 0.0, "max_tokens": 10},
    "view": {"layers": [15], "direction": "formal", "plot": "projection", "pinned": None}}
panel.wait(60)
"""
    )
    shown = Panel(page, kernel)
    shown.show()
    shown.settled("idle")
    expect(shown.root.locator(".cl-row")).to_have_count(1)
    return shown

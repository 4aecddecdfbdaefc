"""Says which tests of the panels were not run, and what they need."""

from __future__ import annotations

import shutil

import pytest

from tests.panels.browser.jupyter import CHROMIUM

NOT_RUN = pytest.StashKey[list[str]]()
NEEDS = {
    "browser": (CHROMIUM, "Chromium (on Debian: apt-get install chromium)"),
    "test_front_end": (shutil.which("node"), "Node.js (on Debian: apt-get install nodejs)"),
}
"""By folder or module of tests: whether what it needs is here, and how to get it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a program that is not here; the run says so at its end."""
    left_out = []
    for name, (found, how) in NEEDS.items():
        mine = [item for item in items if name in (item.path.stem, item.path.parent.name)] if found is None else []
        if mine:
            line = f"{len(mine)} tests of the panels were not run: they need {how}"
            config.stash.setdefault(NOT_RUN, []).append(line)
            left_out += mine
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(NOT_RUN, []):
        terminalreporter.write_line(line)

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this folder; without a GPU they are deselected, and the run says how many."""
    here = os.path.dirname(__file__)
    mine = [item for item in items if str(item.path).startswith(here)]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    if mine and not torch.cuda.is_available():
        items[:] = [item for item in items if item not in mine]
        config.hook.pytest_deselected(items=mine)
        config.stash[NOT_RUN] = len(mine)


NOT_RUN = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(NOT_RUN, 0)
    if count:
        terminalreporter.write_line(f"{count} GPU tests were not run: they need an NVIDIA GPU")

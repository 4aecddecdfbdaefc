from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those that need more GPUs than there are do not run, and the run says so."""
    here = os.path.dirname(__file__)
    mine = [item for item in items if str(item.path).startswith(here)]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    present = torch.cuda.device_count()
    left_out = [item for item in mine if present < (2 if "tensor_parallel" in item.path.name else 1)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        config.stash[NOT_RUN] = len(left_out)


NOT_RUN = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(NOT_RUN, 0)
    if count:
        terminalreporter.write_line(f"{count} GPU tests were not run: they need an NVIDIA GPU, some of them two")

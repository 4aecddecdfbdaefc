"""Every Python snippet of the README runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chatspace_lab.runtime.compared import compared

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

SEA_WORDS = {"sea", "ship", "ocean", "waves", "sailing", "sailors", "sailor", "beach", "water", "boat", "sand", "shore"}


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 250


def test_what_it_says_of_architectures_is_what_the_table_says() -> None:
    counts = Counter(row.verdict.partition(":")[0] for row in compared())
    said = re.search(
        r"^(\d+) models match .*?(\d+) are\s+refused .*? and (\d+) cannot", README, re.MULTILINE | re.DOTALL
    )
    assert said is not None
    assert [int(number) for number in said.groups()] == [counts["right"], counts["refused"], counts["not buildable"]]


def test_what_it_says_of_speed_was_measured() -> None:
    measured = (REPOSITORY / "chatspace_lab" / "measured.md").read_text()
    table = README[README.index("## Speed") : README.index("## Tutorials")]
    ratios = re.findall(r"\d\.\d{3}", table)
    assert len(ratios) == 11
    assert all(f" {ratio} " in measured for ratio in ratios)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert re.search(rf"^#+ {target[1:].replace('-', '[ -]')}$", README, re.MULTILINE | re.IGNORECASE), target
        elif not target.startswith("https://"):
            assert (REPOSITORY / target).exists(), target


@pytest.mark.engine
def test_the_first_script(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(BLOCKS[0])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING")}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(("chatspace-lab · ", "doses are relative to ")) for line in done.stderr.splitlines())
    plain, steered = re.split("^steered:", done.stdout.removeprefix("plain:"), flags=re.MULTILINE)
    words = [len(SEA_WORDS & set(re.findall("[a-z]+", text.lower()))) for text in (plain, steered)]
    assert words[1] > words[0], done.stdout


@pytest.mark.engine
def test_the_notebook_cells() -> None:
    """All further blocks, one after the other in one namespace, as cells of a notebook are run."""
    names: dict[str, Any] = {}

    async def cells() -> None:
        for block in BLOCKS[1:]:
            code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.isawaitable(result):
                await result

    try:
        asyncio.run(cells())
    finally:
        names["lab"].close()
    assert names["plain"] != names["steered"]
    assert names["exported"].layers.keys() == {4, 6, 8}
    assert len(names["answers"]) == 3
    assert names["response"].prefill == "The capital of France is"
    assert set(names["tokens"]["layer"]) == {4, 16}
    assert names["means"].layer(16).shape == (2, 576)
    assert sorted(names["sweep"]["dose"].round(6).unique()) == [0.0, 0.4]

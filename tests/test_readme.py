"""Every Python snippet of the README runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_the_first_script(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(BLOCKS[0])
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plain, steered = (ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert "Paris" in plain[0]
    assert steered != plain


def test_the_notebook_cells() -> None:
    """All further blocks, one after the other in one namespace, as cells of a notebook are run."""
    names: dict[str, object] = {}

    async def cells() -> None:
        for block in BLOCKS[1:]:
            code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.isawaitable(result):
                await result

    try:
        asyncio.run(cells())
    finally:
        names["model"].close()  # type: ignore[attr-defined]
    assert "Paris" in str(names["answer"])
    assert names["plain"] != names["steered"]
    assert names["exported"].layers.keys() == {4, 6, 8}  # type: ignore[attr-defined]
    assert len(names["answers"]) == 3  # type: ignore[arg-type]
    assert names["response"].prefill == "The capital of France is"  # type: ignore[attr-defined]
    assert len(names["last"]) > len(names["rows"])  # type: ignore[arg-type]

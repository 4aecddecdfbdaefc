"""Check the code of the README and of the notebooks with mypy and pyright, against a built wheel.

    .venv/bin/python .ci/consumers.py dist/chatspace_lab-….whl

A line that a checker cannot follow carries `# type: ignore[…]` and the reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYRIGHT = ROOT / "widgets" / "node_modules" / ".bin" / "pyright"
UNTYPED = ("anywidget", "IPython", "ipywidgets", "pandas", "plotly", "sklearn", "transformers", "vllm")
"""Packages whose types are none, or none of ours: they are not looked into."""


def examples() -> dict[str, str]:
    """Return the code of each notebook and of each block in the README, by a module's name."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found[f"notebook_{path.stem}"] = code
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    found["readme"] = "\n".join(blocks)  # they go on from one another
    # A notebook may await in a cell; a module may not.
    return {
        name: f"async def cells() -> None:\n{textwrap.indent(code, '    ')}" if re.search(r"\bawait\b", code) else code
        for name, code in found.items()
    }


def main(wheel: str) -> int:
    """Write the examples beside an environment that has the wheel, run both checkers, and return the exit code."""
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        venv.create(work / "env", with_pip=False)
        [site] = (work / "env").glob("lib/python*/site-packages")
        zipfile.ZipFile(wheel).extractall(site)
        [others] = (ROOT / ".venv").glob("lib/python*/site-packages")
        (site / "others.pth").write_text(f"{others}\n")
        for name, code in examples().items():
            (work / f"{name}.py").write_text(code)
        skipped = "".join(
            f"[mypy-{each}.*]\nfollow_imports = skip\nignore_missing_imports = True\n" for each in UNTYPED
        )
        (work / "mypy.ini").write_text(f"[mypy]\nstrict = True\n{skipped}")
        settings = {"venvPath": made, "venv": "env", "typeCheckingMode": "standard", "useLibraryCodeForTypes": False}
        settings |= dict.fromkeys(("reportMissingModuleSource", "reportUnusedExpression"), False)
        (work / "pyrightconfig.json").write_text(json.dumps(settings))
        files = [f"{name}.py" for name in examples()]
        python = work / "env" / "bin" / "python"
        mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", work / "cache", *files]
        failed = subprocess.run(mypy, cwd=work, check=False).returncode
        return subprocess.run([PYRIGHT, *files], cwd=work, check=False).returncode or failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The front end's own tests, run by node."""

from __future__ import annotations

import subprocess
from pathlib import Path

WIDGETS = Path(__file__).parents[2] / "widgets"


def test_arithmetic_of_the_front_end() -> None:
    files = sorted(str(path) for path in (WIDGETS / "tests").glob("*.test.js"))
    assert files
    done = subprocess.run(["node", "--test", *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "# pass 0" not in done.stdout
    assert "# fail 0" in done.stdout


def test_the_bundles_are_modules_that_render() -> None:
    """What the wheel ships is one module per panel, read here as a browser would read it."""
    for name in ("steering_panel", "sweep_panel"):
        path = WIDGETS.parent / "chatspace_lab" / "panels" / "static" / f"{name}.js"
        read = f"require('fs').readFileSync({str(path)!r}, 'utf8')"
        script = f"import('data:text/javascript,' + encodeURIComponent({read}))"
        script += ".then((found) => process.stdout.write(typeof found.default.render))"
        done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("function", "")

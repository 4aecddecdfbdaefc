"""The tutorials are as they are meant to be, and a broken one is noticed. ``.ci/test`` runs them, with nbmake."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from chatspace_lab import analysis

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MAX_CELLS = 25
FIGURES = {name for name, home in analysis._HOME.items() if home.startswith("figures.")} - {"save_figure"}
PANELS = ("panel", "sweep_panel")
MAGICS = re.compile(r"^[%!]", re.MULTILINE)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(request.param, as_version=4)


def code_of(notebook: Any) -> list[ast.Module]:
    """Return the code cells, parsed."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    return [compile(source, "cell", "exec", flags=flags) for source in sources]


def makes_figure(node: ast.expr) -> bool:
    """Whether an expression is a call of one of our figures, of plotly express (``px.…``), or of a panel of a lab."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and (function.value.id == "px" or function.attr in PANELS)
    return isinstance(function, ast.Name) and function.id in FIGURES


def shows_figure(cell: ast.Module) -> bool:
    """Whether the cell's value, which the notebook shows, is a figure."""
    last = cell.body[-1]
    if not isinstance(last, ast.Expr):
        return False
    named = {
        target.id
        for statement in cell.body
        if isinstance(statement, ast.Assign) and makes_figure(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return makes_figure(last.value) or (isinstance(last.value, ast.Name) and last.value.id in named)


def test_there_are_ten_numbered_from_one() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, 11)]


def test_nothing_is_stored(notebook: Any) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)


def test_it_is_short_explained_and_opens_without_a_question(notebook: Any) -> None:
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert len(kinds) <= MAX_CELLS
    assert notebook.cells[0].source.startswith("# ")
    assert kinds.count("markdown") >= 6
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(MAGICS.search(cell.source) for cell in notebook.cells if cell.cell_type == "code")


def test_it_shows_a_figure(notebook: Any) -> None:
    assert any(map(shows_figure, code_of(notebook)))


def test_it_closes_its_lab_and_ends_with_assertions(notebook: Any) -> None:
    assert notebook.cells[-1].cell_type == "code"
    last = code_of(notebook)[-1]
    assert "lab.close()" in map(ast.unparse, last.body)
    assert isinstance(last.body[-1], ast.Assert)


def test_the_readme_lists_them() -> None:
    listed = re.findall(r"\(notebooks/(\d\d_\w+\.ipynb)\)", (REPOSITORY / "README.md").read_text())
    assert sorted(set(listed)) == [path.name for path in NOTEBOOKS]


BROKEN = {
    "raises": "raise ValueError('seen')",
    "asserts_wrong": "assert 1 + 1 == 3",
    "hangs": "import time\nwhile True:\n    time.sleep(0.1)",
}


@pytest.mark.notebook
def test_a_notebook_that_raises_asserts_wrong_or_hangs_is_red(tmp_path: Path) -> None:
    """With the command and the plugin that run the tutorials; a good one beside them stays green."""
    for name, source in {"good": "assert 1 + 1 == 2", **BROKEN}.items():
        content = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
        content.cells = [nbformat.v4.new_markdown_cell("# A notebook"), nbformat.v4.new_code_cell(source)]
        nbformat.write(content, tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=10", "-rA", "-q", "-c", "/dev/null"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    found = {
        name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED) \S*?(\w+)\.ipynb", done.stdout, re.MULTILINE)
    }
    assert found == {"good": "PASSED", **dict.fromkeys(BROKEN, "FAILED")}, done.stdout
    assert done.returncode == 1

"""What may import what, and what importing the package may not do."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chatspace_lab
from chatspace_lab import analysis, errors

PACKAGE = Path(chatspace_lab.__file__).parent

LEVELS = [
    "lazy",
    "errors",
    "quiet",
    "wire",
    "spans",
    "readings",
    "steering",
    "special_tokens",
    "locate",
    "chat",
    "capture",
    "runtime",
    "engine",
    "models",
    "analysis",
    "session",
    "panels",
    "demo",
    "hugging_face",
    "verify",
    "bench",
    "cli",
]
"""Each may import itself and what stands before it. The package's own ``__init__`` only names things."""

APART = {"runtime": {"chat", "capture", "steering"}, "analysis": {"runtime", "engine", "models"}}
"""What a level may not import although it stands higher: the workers know nothing of what the user holds, and analysis
knows no engine."""

OUTSIDE = {
    "vllm": {"runtime", "engine", "bench"},
    "plotly": {"analysis"},
    "kaleido": {"analysis"},
    "sklearn": {"analysis"},
    "pandas": {"analysis", "session", "panels"},
    "ipywidgets": {"panels"},
    "anywidget": {"panels"},
    "numba": {"runtime"},
    "triton": {"runtime"},
    "pickle": set(),
}
"""Which levels may import a package from elsewhere, at the top of a module or within it."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def level_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the dotted names that a module imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def our_level(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "chatspace_lab" and len(parts) > 1 and parts[1] != "__version__" else None


def place(level: str) -> str:
    """Return a level's name in LEVELS: ``bench_gpu`` stands where ``bench`` does."""
    return level if level in LEVELS else level.split("_")[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    level = level_of(path)
    if level == "__init__":
        return
    level = place(level)
    assert level in LEVELS, f"{level} has no place yet in LEVELS"
    allowed = set(LEVELS[: LEVELS.index(level) + 1]) - APART.get(level, set())
    for name in imported(path):
        found = our_level(name)
        if found in set(LEVELS) | {level_of(other) for other in modules()}:
            assert place(found) in allowed, f"{path.name} imports {name}"
        top = name.split(".")[0]
        if top in OUTSIDE:
            assert level in OUTSIDE[top], f"{path.name} imports {name}"


def test_only_one_module_per_runner_names_its_internals() -> None:
    for path in modules():
        for name in imported(path):
            if "model_runner" in name:
                assert path.name in ("v1.py", "v2.py"), f"{path.name} imports {name}"


PROBE = """
import sys, threading, socket
before = threading.active_count()
made = []
new = socket.socket.__init__
socket.socket.__init__ = lambda self, *a, **k: made.append(self) or new(self, *a, **k)
import {modules}
names = ("vllm", "plotly", "pandas", "sklearn", "transformers", "numba", "ipywidgets", "torch")
heavy = [name for name in names if name in sys.modules]
print(heavy, threading.active_count() - before, len(made))
"""


def probe(names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(modules=names)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_nothing() -> None:
    assert probe("chatspace_lab") == "[] 0 0"
    assert probe("chatspace_lab.errors, chatspace_lab.models, chatspace_lab.analysis") == "[] 0 0"


def test_importing_what_users_name_loads_no_engine() -> None:
    assert probe("chatspace_lab.steering, chatspace_lab.chat, chatspace_lab.capture") == "['torch'] 0 0"


def test_every_public_name_resolves() -> None:
    assert chatspace_lab.__all__ == sorted(chatspace_lab.__all__)
    assert len(set(chatspace_lab.__all__)) == len(chatspace_lab.__all__)
    for name in chatspace_lab.__all__:
        value = getattr(chatspace_lab, name)
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert name in dir(chatspace_lab)
    for name in ("NoSuchName", "engine_"):
        with pytest.raises(AttributeError, match=name):
            getattr(chatspace_lab, name)
    assert set(chatspace_lab._HOME) == set(chatspace_lab.__all__)
    namespace: dict[str, object] = {}
    exec("from chatspace_lab import *", namespace)
    assert set(chatspace_lab.__all__) <= set(namespace)


def test_every_name_of_analysis_resolves() -> None:
    assert analysis.__all__ == sorted(analysis._HOME)
    for name in analysis.__all__:
        assert inspect.getdoc(getattr(analysis, name)), f"{name} has no docstring"
        assert name in dir(analysis)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = analysis.no_such_name


def test_analysis_says_which_extra_it_needs() -> None:
    program = "import sys; sys.modules['pandas'] = None; from chatspace_lab.analysis import token_frame"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "token_frame needs pandas: pip install 'chatspace-lab[lab]'" in done.stderr


def test_all_of_every_package_resolves() -> None:
    for info in pkgutil.walk_packages([str(PACKAGE)], "chatspace_lab."):
        if info.ispkg:
            package = importlib.import_module(info.name)
            for name in getattr(package, "__all__", ()):
                assert hasattr(package, name), f"{info.name}.{name}"


def test_the_tree_of_errors_is_complete() -> None:
    """Every error is in the docstring's tree, at its place, with its bases; and the tree names nothing else."""
    shown = re.findall(r"^([\s│├└─]*)(\w+)(?: \(([\w, ]+)\))?", inspect.getdoc(errors).split("::")[1], re.MULTILINE)
    tree: dict[str, tuple[str | None, set[str]]] = {}
    path: list[tuple[int, str]] = []
    for indent, name, bases in shown:
        if not name.endswith("Error"):
            continue
        depth = len(indent.replace("\n", ""))
        while path and path[-1][0] >= depth:
            path.pop()
        tree[name] = (path[-1][1] if path else None, set(filter(None, (bases or "").split(", "))))
        path.append((depth, name))
    defined = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.LabError)
    }
    assert set(tree) == set(defined)
    for name, error in defined.items():
        ours = [base.__name__ for base in error.__bases__ if issubclass(base, errors.LabError)]
        builtin = {base.__name__ for base in error.__bases__} - set(ours) - {"Exception"}
        parent, bases = tree[name]
        assert [parent] == (ours or [None]), name
        assert bases == builtin, name
        assert inspect.getdoc(error), name


def test_nothing_is_raised_that_users_could_not_catch() -> None:
    """Engine, steering, chat and captures raise errors of the tree, but for a call that is a mistake in a program."""
    ours = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    allowed = ours | {"StopAsyncIteration", "AttributeError", "ModuleNotFoundError"}
    for path in modules():
        if level_of(path) not in ("engine", "steering", "chat", "capture", "analysis"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                assert name in allowed | {"RuntimeError", "TypeError", "kind", "next"}, f"{path.name} raises {name}"

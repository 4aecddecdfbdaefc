"""How the front end's modules are joined: without Node.js, and with mistakes named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "widgets" / "build.py"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("widgets_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text)
    return folder / "entry.js"


def test_what_is_installed_is_what_the_sources_say(build: ModuleType, tmp_path: Path) -> None:
    for path in build.build(tmp_path):
        assert (build.TARGET / path.name).read_text() == path.read_text(), "run python widgets/build.py"
        assert path.stat().st_size < 120_000


def test_modules_are_joined_each_once_and_after_what_they_need(build: ModuleType, tmp_path: Path) -> None:
    entry = write(
        tmp_path,
        entry='import { a } from "./a.js";\nimport { b } from "./b.js";\nexport default a + b;\n',
        a='import { b } from "./b.js";\n\nexport const a = b + 1;\n',
        b="export const b = 1;\n",
    )
    assert build.bundle(entry) == (
        "// b.js\nconst b = 1;\n\n// a.js\nconst a = b + 1;\n\n// entry.js\nexport default a + b;\n"
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"entry": 'import { a } from "./a.js";\nconst b = 1;\n', "a": "export const a = 1;\nconst b = 2;\n"},
            "b is declared",
        ),
        ({"entry": 'import { c } from "./a.js";\n', "a": "export const a = 1;\n"}, "which a.js does not export"),
        ({"entry": 'import * as a from "./a.js";\n', "a": ""}, "can be joined"),
    ],
)
def test_what_cannot_be_joined_is_named(build: ModuleType, tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build.bundle(write(tmp_path, **files))

"""Joins the front end's modules into one file per panel, as anywidget loads it. Needs no Node.js.

The sources are plain ES modules that import by name from files beside them. Joined, they share one scope, so a name may
be declared once among the modules of a panel; that is checked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
TARGET = Path(__file__).parents[1] / "chatspace_lab" / "panels" / "static"
PANELS = ("steering_panel", "sweep_panel")

IMPORT = re.compile(r'^import \{([^}]*)\} from "(\./[\w./]+|\.\./[\w./]+)";\n', re.MULTILINE)
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)


def modules(entry: Path, found: dict[Path, str] | None = None) -> dict[Path, str]:
    """Return the texts of a module and of all that it imports, each after what it imports.

    Raises
    ------
    ValueError
        If one imports in another way, or what is not exported.
    """
    found = {} if found is None else found
    text = entry.read_text(encoding="utf-8")
    for names, path in IMPORT.findall(text):
        other = (entry.parent / path).resolve()
        if other not in found:
            modules(other, found)
        for name in filter(None, (each.strip() for each in names.split(","))):
            if not re.search(rf"^export (?:async )?(?:function|const|class) {name}\b", found[other], re.MULTILINE):
                raise ValueError(f"{entry.name} imports {name}, which {other.name} does not export")
    if re.search(r"^import ", IMPORT.sub("", text), re.MULTILINE):
        raise ValueError(f'{entry.name}: only `import {{ name }} from "./file.js";` can be joined')
    found[entry] = text
    return found


def bundle(entry: Path) -> str:
    """Return one module that holds a panel and all that it needs.

    Raises
    ------
    ValueError
        If two modules declare the same name.
    """
    owner: dict[str, Path] = {}
    parts = []
    for path, text in modules(entry.resolve()).items():
        for name in DECLARED.findall(text):
            if owner.setdefault(name, path) != path:
                raise ValueError(f"{name} is declared in {owner[name].name} and in {path.name}")
        body = IMPORT.sub("", text)
        if path != entry.resolve():
            body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        parts.append(f"// {path.name}\n{body.strip()}\n")
    return "\n".join(parts)


def build(target: Path = TARGET) -> list[Path]:
    """Write the panels' files and return their paths."""
    target.mkdir(parents=True, exist_ok=True)
    written = {f"{name}.js": bundle(SOURCES / f"{name}.js") for name in PANELS}
    written["panels.css"] = (SOURCES / "panels.css").read_text(encoding="utf-8")
    for name, text in written.items():
        path = target / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return [target / name for name in written]


if __name__ == "__main__":
    for each in build():
        sys.stdout.write(f"{each}: {each.stat().st_size:,} bytes\n")

"""Which cells show which panels: a panel whose cells have been run again without it is let go of."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatspace_lab.panels.base import Panel

OUTPUTS = re.compile(r"_(\d+|_{0,2}|oh)")
"""Names under which IPython itself keeps the values of cells."""


@dataclass(frozen=True)
class Cell:
    """The execution of a cell.

    Attributes
    ----------
    name
        The same each time that the cell runs: the front end's id of it; its source where the front end gives none.
    execution
        Names this execution alone.
    deleted
        Names of cells that were deleted since the one before.
    """

    name: str
    execution: str
    deleted: tuple[str, ...] = ()


_shown: dict[Panel, dict[str, str]] = {}
"""Panels to the cells that show them, and by which execution. It keeps them alive."""
_made: weakref.WeakKeyDictionary[Panel, tuple[str, str]] = weakref.WeakKeyDictionary()
"""Panels to the cell and the execution that made them."""
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
"""Shells that tell of the end of a cell."""


def current() -> Cell | None:
    """Return the running cell; None outside a notebook."""
    shell = _shell()
    if shell is None:
        return None
    parent = shell.get_parent()
    metadata, content = parent.get("metadata") or {}, parent.get("content") or {}
    execution = str(parent.get("header", {}).get("msg_id", ""))
    name = metadata.get("cellId") or content.get("code") or execution
    return Cell(str(name), execution, tuple(map(str, metadata.get("deletedCells") or ())))


def made(panel: Panel) -> None:
    """Note that the running cell has made a panel."""
    cell = current()
    if cell is not None:
        _made[panel] = cell.name, cell.execution
        _watch()


def shown(panel: Panel) -> Cell | None:
    """Note that the running cell shows a panel, and return the cell; None outside a notebook."""
    cell = current()
    if cell is not None:
        _shown.setdefault(panel, {})[cell.name] = cell.execution
        _watch()
    return cell


def forget(panel: Panel) -> None:
    """Forget a panel that was closed."""
    _shown.pop(panel, None)
    _made.pop(panel, None)


def is_shown(panel: Panel) -> bool:
    """Whether a cell shows a panel, as far as is known here."""
    return panel in _shown


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "get_parent") else None


def _watch() -> None:
    shell = _shell()
    if shell not in _watched:
        _watched.add(shell)
        shell.events.register("post_run_cell", _ended)


def _ended(_: Any = None) -> None:
    """Let go of the panels that the cell which has just ended showed or made before, and which nothing else shows."""
    cell = current()
    if cell is None:
        return
    left = []
    for panel, cells in list(_shown.items()):
        for name in (cell.name, *cell.deleted):
            if cells.get(name, cell.execution) != cell.execution:
                del cells[name]
        if not cells:
            del _shown[panel]
            left.append(panel)
    for panel, (name, execution) in list(_made.items()):
        again = name == cell.name and execution != cell.execution
        if (again or name in cell.deleted) and panel not in _shown:
            left.append(panel)
    if left:
        variables = [value for name, value in dict(_shell().user_ns).items() if not OUTPUTS.fullmatch(name)]
        for panel in left:
            if not any(value is panel for value in variables):
                panel.let_go()

"""The lab: an engine that lives in a Jupyter kernel, with a history, sweeps, reductions and blocking methods.

Names are resolved when they are first used; they need the extra ``lab`` (pandas, plotly, scikit-learn).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatspace_lab.session.aio import AsyncLab
    from chatspace_lab.session.history import History, Run
    from chatspace_lab.session.lab import LabSession
    from chatspace_lab.session.pooled import PooledActivations

_HOME = {
    "AsyncLab": "aio",
    "History": "history",
    "LabSession": "lab",
    "PooledActivations": "pooled",
    "Run": "history",
}

__all__ = ["AsyncLab", "History", "LabSession", "PooledActivations", "Run"]

_EXTRA = ("pandas", "plotly", "safetensors", "sklearn", "threadpoolctl")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        needed = f"{name} needs {error.name}: pip install 'chatspace-lab[lab]'"
        raise ModuleNotFoundError(needed, name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

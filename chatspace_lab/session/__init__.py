"""The lab: an engine that lives in a Jupyter kernel, with a history, sweeps, reductions and blocking methods.

Names are resolved when they are first used; they need the extra ``lab`` (pandas, plotly, scikit-learn).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatspace_lab import lazy

if TYPE_CHECKING:
    from chatspace_lab.session.aio import AsyncLab
    from chatspace_lab.session.handle import LabCaptureHandle
    from chatspace_lab.session.history import History, Run
    from chatspace_lab.session.lab import LabSession
    from chatspace_lab.session.pooled import PooledActivations

_HOME = {
    "AsyncLab": "aio",
    "History": "history",
    "LabCaptureHandle": "handle",
    "LabSession": "lab",
    "PooledActivations": "pooled",
    "Run": "history",
}

__all__ = ["AsyncLab", "History", "LabCaptureHandle", "LabSession", "PooledActivations", "Run"]

__getattr__, __dir__ = lazy.names(__name__, _HOME, lazy.LAB_EXTRA)

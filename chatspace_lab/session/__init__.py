"""The lab: an engine that lives in a Jupyter kernel, with a history, sweeps, reductions and blocking methods."""

from chatspace_lab.session.aio import AsyncLab
from chatspace_lab.session.history import History, Run
from chatspace_lab.session.lab import LabSession
from chatspace_lab.session.pooled import PooledActivations

__all__ = ["AsyncLab", "History", "LabSession", "PooledActivations", "Run"]

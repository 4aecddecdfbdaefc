"""The engine's processes, and the shared memory that they must not leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil

SHARED = "/dev/shm/"


def descendants() -> set[psutil.Process]:
    """Return the processes below this one that vLLM may have started.

    Python's resource tracker is not among them: it ends by itself, and cleans up.
    """
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())
            if command.startswith("VLLM::") or ("multiprocessing" in command and "resource_tracker" not in command):
                found.add(child)
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the named shared memory that these processes map."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found |= {entry.path for entry in process.memory_maps() if entry.path.startswith(SHARED)}
    return {path for path in found if not path.endswith(" (deleted)")}


def end(processes: Iterable[psutil.Process], shared: Iterable[str], timeout_s: float) -> None:
    """Wait for processes that were told to end, kill those that do not, and free shared memory that is left.

    vLLM frees its own when it ends in order. A process that was killed frees nothing.
    """
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)

"""What a worker has to do with the process that owns it: tell how far its start is, and end when it is gone.

vLLM's engine process does not notice that its parent was killed: it idles on, its pipes held open.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

import psutil

from chatspace_lab import wire


def tell_stage(stage: int) -> None:
    """Tell the owner how far this worker's start is: an index of ``wire.STAGES``."""
    path = os.environ.get(wire.STAGE_FILE)
    if path is not None:
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:  # the owner may be gone
            file.write(bytes([stage]))


def watch_owner() -> None:
    """Start a daemon thread that kills this process, and the engine process above it, when the owner dies."""
    owner_pid = os.environ.get(wire.OWNER_PID)
    if owner_pid is None:
        return
    threading.Thread(target=_watch, args=(int(owner_pid),), name="chatspace-lab-owner-watch", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has noticed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def _watch(owner_pid: int) -> None:
    parent = os.getppid()
    _wait_for_end(owner_pid)
    # A process that is killed frees no named shared memory; what this one maps is this engine's.
    for path in {entry.path for entry in psutil.Process().memory_maps() if entry.path.startswith("/dev/shm/")}:
        with contextlib.suppress(OSError):
            os.unlink(path)
    # A worker of a tensor-parallel engine is a child of the engine process, which has no watch of its own.
    if parent not in (owner_pid, 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

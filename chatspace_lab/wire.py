"""What crosses between the kernel and the workers: names, and payloads of plain numbers, strings and bytes.

Nothing here is pickled. A request carries its own steering program and its capture wish in
``SamplingParams.extra_args[EXTRA]``; vectors travel ahead of it, once each, by RPC into the workers' bank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
from typing import Any, TypedDict

import numpy as np

EXTRA = "chatspace_lab"
"""Key of our entry in ``SamplingParams.extra_args``, and in ``VllmConfig.additional_config``."""

EXTENSION = "chatspace_lab.runtime.extension.SteeringWorkerExtension"
"""Qualified name given to vLLM as ``worker_extension_cls``."""

OWNER_PID = "CHATSPACE_LAB_OWNER_PID"
"""Environment variable with the process whose death ends the engine."""

STAGE_FILE = "CHATSPACE_LAB_STAGE_FILE"
"""Environment variable with a file to whose first byte a worker writes how far its start is: an index of STAGES."""

ERROR_LOG = "CHATSPACE_LAB_ERROR_LOG"
"""Environment variable with a file to which a process of the engine writes where native code crashed in it."""

STAGES = ("starting the engine's processes", "loading the model", "compiling and warming up", "ready")

RPC_DESCRIBE = "chatspace_lab_describe"
RPC_PUT_VECTORS = "chatspace_lab_put_vectors"
RPC_FETCH = "chatspace_lab_fetch"
RPC_REDUCE = "chatspace_lab_reduce"
RPC_RELEASE = "chatspace_lab_release"
RPC_STATS = "chatspace_lab_stats"

ADD, CAP, ABLATE = 1, 2, 3
"""Kinds of operation; 0 marks an unused entry."""

OP = np.dtype([("layer", "<i4"), ("kind", "<i4"), ("row", "<i4"), ("a", "<f4"), ("b", "<f4")])
"""One operation of a program. add: a = scale. cap: a = min, b = max. ablate: a = scale. ``row`` is a bank row."""


LARGEST = float(np.float32(1e30))
"""How far one operation may move the residual stream.

A stream that overflows is NaN one layer later. Keys and values of NaN stay in the cache's blocks when their request is
gone, and vLLM's attention on CPUs multiplies what a block held before by zero, which is NaN for whoever has it next.
"""

LARGEST_HALF = 6e4
"""Absolute value up to which a steered stream may go in float16, for the same reason."""


class RequestPayload(TypedDict):
    """What the workers are told about one request.

    ``key`` names its captures. ``ops`` is an array of :data:`OP` as bytes, in order. ``steer_spans`` and
    ``capture_spans`` are flat lists start, end, start, end, … of absolute positions, sorted and disjoint; an end of −1
    is "no end". ``capture_layers`` is sorted.
    """

    key: str
    ops: bytes
    steer_spans: list[int]
    capture_layers: list[int]
    capture_spans: list[int]


class EngineOptions(TypedDict):
    """What the workers are told about themselves, by ``VllmConfig.additional_config``.

    It is part of the hash that names vLLM's compile cache, so a model compiled without our operator is never served.
    """

    version: str
    max_vectors: int
    max_ops_per_layer: int
    max_capture_bytes: int
    cpu_capability: str  # see runtime.extension: code compiled for one instruction set is not for another


class Apart(dict[str, Any]):
    """Options that prepare a process of vLLM which they arrive in: it leaves its owner's process group, and ends fast.

    A stop button in Jupyter, and Ctrl-C in a terminal, signal the whole group, and vLLM's processes end by that signal.
    Once vLLM has shut down in order, the interpreter would take seconds to free one by one what the process holds.
    vLLM pickles its configuration, and these options in it, to each process that it starts; nothing else of ours gets
    into all of them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Apart:
        return Apart(self)


def _arrived(options: dict[str, Any]) -> Apart:
    owner = os.environ.get(OWNER_PID)
    if owner is not None and owner != str(os.getpid()) and os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
        atexit.register(_end_process)
        _log_crashes()
    return Apart(options)


def _log_crashes() -> None:
    """Write where a fatal signal came from to the log of errors, unless whoever started Python wants it elsewhere."""
    log = os.environ.get(ERROR_LOG)
    if log is not None and not faulthandler.is_enabled():
        with contextlib.suppress(OSError):
            faulthandler.enable(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), all_threads=False)


def _end_process() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM does not look at the code of a process that has ended


def ok(value: Any) -> list[Any]:
    """Wrap what an RPC returns."""
    return ["ok", value]


def failed(error: BaseException, traceback_text: str) -> list[Any]:
    """Wrap what an RPC raised."""
    return ["error", type(error).__name__, str(error), traceback_text]

"""Why an engine failed, out of what its processes logged: vLLM itself says only "see root cause above"."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from chatspace_lab import errors
from chatspace_lab.wire import ERROR_LOG

CONFIG_PATH = "VLLM_LOGGING_CONFIG_PATH"
HANDLER = "chatspace_lab"
RECORD, FIELD = "\x1e", "\x1f"
FORMAT = f"{RECORD}%(process)d{FIELD}%(message)s"
TRACEBACK = "Traceback (most recent call last):"
OPAQUE = ("root cause", "stack trace", "check the logs")
"""Words by which vLLM says that somebody else said it."""
SILENT = (
    "one of its processes ended without saying why. In a script, what starts an engine must stand under "
    "`if __name__ == '__main__':`. Otherwise the system has mostly killed the process because memory ran out: choose a "
    "smaller model or dtype, or less KV cache (kv_cache_memory_bytes). The system's log (dmesg) says whether it was so"
)
CRASH = re.compile(r"^Fatal Python error: (.+)", re.MULTILINE)
"""How what Python's faulthandler writes begins."""
PRINTED = "memory is not the cause; what the code printed is on standard error, or in Jupyter's log"
HARMLESS = ("Failed to load plugin",)
"""How records begin whose failure ends no engine."""
LONGEST = 400
"""Characters of a sentence."""


class Cause(NamedTuple):
    """A failure in another process."""

    sentence: str
    text: str


class CauseLog:
    """An anonymous file that the engine's processes, and vLLM in this one, append their errors to.

    vLLM's own setting for logging (``VLLM_LOGGING_CONFIG_PATH``) makes them: its default, and one handler more. Who
    configures vLLM's logging keeps that, and reads the cause in the log. The file has no name, so nothing stays behind.
    """

    def __init__(self) -> None:
        self._log = os.memfd_create("chatspace-lab-errors", os.MFD_CLOEXEC)
        self._settings = os.memfd_create("chatspace-lab-logging", os.MFD_CLOEXEC)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Make processes that start in this block log here too."""
        path = f"/proc/{os.getpid()}/fd/{self._log}"
        configured = CONFIG_PATH in os.environ or os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "1"
        if not configured:
            os.pwrite(self._settings, json.dumps(_settings(path)).encode(), 0)
            os.environ[CONFIG_PATH] = f"/proc/{os.getpid()}/fd/{self._settings}"
        os.environ[ERROR_LOG] = path
        own = logging.FileHandler(path, delay=True)
        own.name = HANDLER
        own.setLevel("ERROR")
        own.setFormatter(logging.Formatter(FORMAT))
        logging.getLogger("vllm").addHandler(own)
        try:
            yield
        finally:
            os.environ.pop(ERROR_LOG, None)
            if not configured:
                del os.environ[CONFIG_PATH]
            _restore_own_logger()

    def read(self) -> Cause | None:
        """Return the first failure that says what it is, or None."""
        size = os.fstat(self._log).st_size
        return find(os.pread(self._log, size, 0).decode(errors="replace"))

    def close(self) -> None:
        """Free the file. Again is fine."""
        for name in ("_log", "_settings"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)


def _settings(path: str) -> dict[str, object]:
    """Return vLLM's default logging, with a handler that writes errors to ``path``."""
    from vllm import envs
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    settings = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    level = envs.VLLM_LOGGING_LEVEL
    settings["handlers"]["vllm"]["level"] = level
    settings["loggers"]["vllm"]["level"] = level
    for formatter in settings["formatters"].values():
        if "log_level" in formatter:
            formatter["log_level"] = level
    settings["formatters"][HANDLER] = {"format": FORMAT}
    settings["handlers"][HANDLER] = {
        "class": "logging.FileHandler",
        "formatter": HANDLER,
        "level": "ERROR",
        "filename": path,
        "delay": True,
    }
    settings["loggers"]["vllm"]["handlers"].append(HANDLER)
    return settings


def _restore_own_logger() -> None:
    """Take the handler from this process's logger, which vLLM configures too when it starts an engine."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        if handler.name == HANDLER:
            logger.removeHandler(handler)
            handler.close()


def find(log: str) -> Cause | None:
    """Return the failure that a log of :class:`CauseLog` tells of, or None.

    The first traceback that does not point elsewhere is it: what other processes log after that follows from it.
    """
    log = CRASH.sub(rf"{RECORD}{FIELD}\g<0>", log)
    records = [record.partition(FIELD)[2].strip() for record in log.split(RECORD) if record.strip()]
    records = [record for record in records if not record.startswith(HARMLESS)]
    told = [(_what(record), record) for record in records]
    clear = [(what, record) for what, record in told if not any(words in what for words in OPAQUE)]
    with_traceback = [(what, record) for what, record in clear if TRACEBACK in record or CRASH.match(record)]
    for what, record in with_traceback or clear:
        return Cause(sentence(what), record)
    return None


def _what(record: str) -> str:
    """Return what failed: the exception of a traceback, where native code crashed, or the record's first line."""
    crash = CRASH.match(record)
    if crash is None:
        return _exception(record) if TRACEBACK in record else record.partition("\n")[0]
    place = re.search(r'File "(.+)", line (\d+) in (\S+)', record)
    called = "" if place is None else f", called by {place[3]} ({Path(place[1]).name}, line {place[2]})"
    return f"native code crashed in one of its processes ({crash[1]}){called}; {PRINTED}"


def _exception(record: str) -> str:
    """Return the last exception of a printed traceback, with its message."""
    lines = record.rpartition(TRACEBACK)[2].strip("\n").splitlines()
    start = next((number for number, line in enumerate(lines) if line[:1] not in (" ", "")), 0)
    return "\n".join(lines[start:])


def sentence(error: BaseException | str) -> str:
    """Return what an error says, in one line."""
    text = error if isinstance(error, str) else str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["nothing is known"]
    if "validation error" in lines[0] and len(lines) > 1:  # pydantic's; what it is follows
        lines[0] = lines[1].partition(" [type=")[0].removeprefix("Value error, ")
    return lines[0] if len(lines[0]) <= LONGEST else f"{lines[0][: LONGEST - 1]}…"


def start_error(error: Exception, log: CauseLog) -> errors.EngineStartError:
    """Return why an engine did not start, with what to do if that is known; its cause is set."""
    cause = log.read()
    opaque = any(words in str(error) for words in OPAQUE)
    if cause is None and opaque:
        found = errors.EngineStartError(f"the engine did not start: {_ended(str(error))}")
        found.__cause__ = error
    elif cause is None or not opaque:
        found = errors.EngineStartError(f"the engine did not start: {advised(sentence(error))}")
        found.__cause__ = error
    else:
        found = errors.EngineStartError(f"the engine did not start: {advised(cause.sentence)}")
        found.__cause__ = errors.WorkerTracebackError(cause.text)
        found.__cause__.__cause__ = error
    return found


def _ended(said: str) -> str:
    """Return why a process ended that logged nothing, by its exit code if ``said`` has it: {'EngineCore': -11}."""
    codes = {-int(code) for code in re.findall(r": (-\d+)[,}]", said)}
    names = [each.name for each in signal.Signals if each in codes and each not in (signal.SIGKILL, signal.SIGTERM)]
    return f"{names[0]} ended one of its processes: native code crashed in it; {PRINTED}" if names else SILENT


def advised(what: str) -> str:
    """Return a sentence about a failure, with what to do if it is a package that is missing."""
    import torch

    if "KV cache" in what and "gpu_memory_utilization" in what and not torch.cuda.is_available():
        return f"{what} On a CPU the KV cache has 2 GiB unless kv_cache_memory_bytes says otherwise: set that"
    found = re.search(r"No module named '(\w+)|requires the (\w+) library", what)
    if found is None:
        return what
    name = (found[1] or found[2]).lower()
    if name not in ("torchvision", "torchaudio", "torchcodec"):
        return f"{what}; this model needs it: pip install {name}"
    index = "" if torch.version.cuda else " --index-url https://download.pytorch.org/whl/cpu"
    return f"{what}; this model needs it, built for PyTorch {torch.__version__}: pip install {name}{index}"

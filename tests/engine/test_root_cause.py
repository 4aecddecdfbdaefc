"""What an engine's processes logged, and the one sentence that comes of it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from chatspace_lab.engine.root_cause import CONFIG_PATH, FIELD, RECORD, CauseLog, advised, find, sentence, start_error

WORKER = """WorkerProc failed to start.
Traceback (most recent call last):
  File "worker.py", line 3, in load
    raise KeyError("layers.3")
KeyError: 'layers.3'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "worker.py", line 5, in start
    raise ValueError("no weights for layers.3")
ValueError: no weights for layers.3"""
ENGINE = """EngineCore failed to start.
Traceback (most recent call last):
  File "core.py", line 9, in wait
    raise e
Exception: WorkerProc initialization failed in a background process. See stack trace for root cause."""
PYDANTIC = """EngineCore failed to start.
Traceback (most recent call last):
  File "core.py", line 9, in wait
    raise e
pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, float32 is not supported [type=value_error, input_value=1]
    For further information visit a page"""

PLUGIN = """Failed to load plugin of somebody
Traceback (most recent call last):
  File "plugin.py", line 1, in register
    raise KeyError("x")
KeyError: 'x'"""
INSPECTED = """Error in inspecting model architecture 'SomeForConditionalGeneration'
Traceback (most recent call last):
  File "registry.py", line 7, in run
    check()
RuntimeError: Error raised in subprocess:
Traceback (most recent call last):
  File "model.py", line 2, in <module>
    import torchvision
ModuleNotFoundError: No module named 'torchvision'
"""


def log(*records: str) -> str:
    return "".join(f"{RECORD}{100 + number}{FIELD}{record}\n" for number, record in enumerate(records))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((WORKER, ENGINE), "ValueError: no weights for layers.3"),
        ((ENGINE, WORKER), "ValueError: no weights for layers.3"),
        (("Worker 0 died unexpectedly", ENGINE), "Worker 0 died unexpectedly"),
        (("a remark", WORKER), "ValueError: no weights for layers.3"),
        ((PYDANTIC,), "float32 is not supported"),
        ((PLUGIN, WORKER), "ValueError: no weights for layers.3"),
        ((INSPECTED,), "ModuleNotFoundError: No module named 'torchvision'"),
    ],
)
def test_the_first_that_says_what_it_is(records: tuple[str, ...], said: str) -> None:
    found = find(log(*records))
    assert found is not None
    assert found.sentence == said


def test_nothing_is_known() -> None:
    assert find("") is None
    assert find(log(ENGINE)) is None


def test_a_process_that_was_killed_says_nothing() -> None:
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}"
    told = CauseLog()
    assert "memory ran out" in str(start_error(RuntimeError(said), told))
    assert str(start_error(RuntimeError("no such model"), told)) == "the engine did not start: no such model"
    told.close()


def test_a_crash_of_native_code_is_not_taken_for_a_lack_of_memory() -> None:
    crash = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "/a/x.py", line 3 in f\n'
    )
    found = find(crash + log(ENGINE, "Worker proc 0 died unexpectedly (exit code: -6)"))
    assert found is not None
    assert found.sentence.startswith(
        "native code crashed in one of its processes (Aborted), called by f (x.py, line 3)"
    )
    assert find(log(WORKER) + crash) == find(log(WORKER))
    told = CauseLog()
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -11}"
    assert "SIGSEGV ended one of its processes: native code" in str(start_error(RuntimeError(said), told))
    told.close()


def test_a_process_whose_native_code_crashes_says_where() -> None:
    told = CauseLog()
    with told.listening():
        code = "import os\nfrom chatspace_lab import wire\nwire._log_crashes()\ndef forward(): os.abort()\nforward()"
        done = subprocess.run([sys.executable, "-c", code], check=False)
    cause = told.read()
    told.close()
    assert done.returncode == -signal.SIGABRT
    assert cause is not None
    assert "(Aborted), called by forward (<string>, line 4)" in cause.sentence


def test_a_missing_package_is_told_with_what_to_do() -> None:
    assert "built for PyTorch" in advised("ModuleNotFoundError: No module named 'torchvision'")
    assert "pip install torchvision" in advised("ImportError: X requires the Torchvision library but it was not found")
    assert advised("ModuleNotFoundError: No module named 'timm'").endswith("; this model needs it: pip install timm")
    assert advised("ValueError: no weights") == "ValueError: no weights"


def test_a_sentence() -> None:
    assert sentence(ValueError("one\ntwo")) == "one"
    assert sentence(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(sentence("x" * 1000)) == 400


def test_another_process_logs_here() -> None:
    """As an engine's does: it configures logging as it is told, and logs an exception."""
    told = CauseLog()
    script = (
        "import json, logging.config, os, vllm.logger\n"
        f"logging.config.dictConfig(json.load(open(os.environ[{CONFIG_PATH!r}])))\n"
        "try:\n    raise OSError('no such device')\n"
        "except OSError:\n    logging.getLogger('vllm.somewhere').exception('failed')"
    )
    with told.listening():
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    found = told.read()
    assert found is not None
    assert found.sentence == "OSError: no such device"
    assert "line 4, in <module>" in found.text
    assert CONFIG_PATH not in os.environ
    told.close()
    told.close()


def test_who_configures_logging_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_PATH, "/some/where.json")
    handlers = list(logging.getLogger("vllm").handlers)
    told = CauseLog()
    with told.listening():
        assert os.environ[CONFIG_PATH] == "/some/where.json"
    assert told.read() is None
    assert logging.getLogger("vllm").handlers == handlers
    told.close()

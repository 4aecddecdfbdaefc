"""Silence vLLM's start-up logging."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator

LEVEL = "VLLM_LOGGING_LEVEL"


def _worth_telling(record: logging.LogRecord) -> bool:
    """Whether a record of vLLM's search for Triton is anything but the usual one on a CPU."""
    return "CPU backend" not in str(record.msg)


# vLLM warns of this before its logging is configured: processes that import this module first do not show it.
logging.getLogger("vllm.triton_utils.importing").addFilter(_worth_telling)


def quieten() -> None:
    """Silence vLLM below errors, here and in the processes that start from now on; what the user set wins.

    ``VLLM_LOGGING_LEVEL=INFO`` in the environment shows everything again.
    """
    if LEVEL not in os.environ and os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "1":
        os.environ[LEVEL] = "ERROR"
        if "vllm" in sys.modules:  # imported before: its logger has its level already
            logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "PYTHONWARNINGS" not in os.environ:
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch|transformers|huggingface_hub)\b")


@contextlib.contextmanager
def quiet_children() -> Iterator[None]:
    """Let the processes that start inside the block import this module first.

    A spawned process imports the main module of its parent before anything else. A script's imports this package; a
    notebook, ``python -c`` and the prompt have none that could be imported, and name this module instead.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None or hasattr(main, "__file__"):
        yield
        return
    main.__spec__ = importlib.util.find_spec("chatspace_lab.quiet")
    try:
        yield
    finally:
        main.__spec__ = None

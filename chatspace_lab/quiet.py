"""Less of what vLLM tells of its start."""

from __future__ import annotations

import logging
import os
import warnings

# On a CPU vLLM warns of this before its own logging level counts. Here, since the processes that vLLM starts for the
# command line import its main module, and this one, first.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


def quieten() -> None:
    """Silence vLLM below errors, here and in the processes that start from now on; what the user set wins."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "PYTHONWARNINGS" not in os.environ:
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
        warnings.simplefilter("ignore", FutureWarning)

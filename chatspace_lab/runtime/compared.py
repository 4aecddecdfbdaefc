"""What was compared with Hugging Face, by ``python -m tests.architectures`` and ``tests/engine/test_quantised.py``.

A model whose blocks are proven by structure (:mod:`chatspace_lab.runtime.layers`) is steered and read where it should
be. Whether vLLM itself computes what Hugging Face computes nothing in the structure shows: that takes a comparison. A
model that was never compared is used with an :class:`~chatspace_lab.errors.UncomparedWarning`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("compared.md")
"""Every architecture that was compared, as ``python -m tests.architectures --markdown`` wrote it."""


class Compared(NamedTuple):
    """A row of :data:`TABLE`; what its errors are, :data:`ABOUT` says."""

    model: str
    architecture: str
    form: str
    captures: str
    operations: str
    cached: str
    verdict: str


ABOUT = """\
Architectures compared with Hugging Face in float32, captures and every operation at every layer, by
`python -m tests.architectures`, on a small random model of each. An error is a row's distance relative to its length,
the largest of all rows and layers; "right" is below 1e-4. One prompt of 600 tokens is longer than a
block of the KV cache, a step of prefill and the sliding window; it is asked twice, and "cached" is how many of its
tokens came from the prefix cache then ("off": the engine has none). "not buildable": plain vLLM cannot run it on a CPU
either."""


def compared() -> list[Compared]:
    """Return the rows of :data:`TABLE`."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [Compared(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


RIGHT = frozenset(row.architecture for row in compared() if row.verdict == "right")
"""Architectures, as in a checkpoint's ``config.json``, of which a small random model is within 1e-4 in float32."""

QUANTISED = frozenset({"compressed-tensors", "gptq", "auto_gptq", "awq", "auto_awq"})
"""Methods by which a small model is right on a CPU."""


def doubt(architecture: str, quantization: str | None, implementation: str = "auto") -> str:
    """Return what is not known of a model, as a sentence; empty if it was compared.

    ``implementation`` is vLLM's ``model_impl``: the same architecture may be run by other code than was compared.
    """
    what = []
    if implementation != "auto":
        what.append(f"models run with model_impl={implementation!r}")
    if architecture not in RIGHT:
        what.append(f"models of the architecture {architecture}")
    if quantization is not None and quantization not in QUANTISED:
        what.append(f"models quantised by {quantization}")
    if not what:
        return ""
    return (
        f"{' and '.join(what)} have not been compared with Hugging Face: where the operator stands is proven, and "
        f"whether vLLM computes the same activations is not known; `chatspace-lab verify` compares"
    )

"""Small random models against Hugging Face: what is captured, and what each operation does.

Here are some, most of them slow; ``python -m tests.architectures`` runs all.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import tiny
from tests.architectures import OPTIONS, TOLERANCE, compare
from tests.conftest import started
from tests.oracle import Oracle

pytestmark = pytest.mark.engine

QUICK = [  # each differs from the others in its blocks' form or cache
    "llama",
    "gemma3",
    "gpt2",
    "cohere",  # the whole stream, beside a tensor that nobody reads; vLLM compiles its norms
    "gemma4",  # its blocks stand in two lists
    "granite-moe-hybrid",
    "falcon-h1",
]
SLOW = ["qwen2", "qwen3", "gemma2", "mistral", "gpt-neox", "olmo2", "mixtral", "qwen3-moe"]
UNCACHED = ("granite-moe-hybrid", "falcon-h1")
"""Architectures whose engine has no prefix cache on a CPU."""


@pytest.mark.slow
def test_code_compiled_for_another_instruction_set_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's cache would hand code for AVX2 to an engine on AVX-512, which then writes beyond its buffers."""
    folder = tiny.build("cohere", tmp_path / "cohere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    for _ in range(2):
        with started(folder, **OPTIONS) as model:
            found = asyncio.run(compare(model, Oracle(folder)))
        assert max(found.worst.values()) < TOLERANCE, found
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)  # then PyTorch takes what the CPU has


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_architecture(name: str, tmp_path: Path) -> None:
    folder = tiny.build(name, tmp_path / name)
    with started(folder, **OPTIONS) as model:
        found = asyncio.run(compare(model, Oracle(folder)))
    assert max(found.worst.values()) < TOLERANCE, found
    assert (found.cached is None) is (name in UNCACHED), found
    assert found.cached is None or found.cached >= 256 or name == "gemma4"

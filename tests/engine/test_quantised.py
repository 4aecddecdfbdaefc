"""Quantised models: what is captured and what operations do, beside the model that the quantised numbers mean.

What this vLLM cannot run on a CPU fails at the start, with vLLM's own reason in the sentence.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel
from chatspace_lab.engine.config import cpu_has_vnni
from chatspace_lab.errors import EngineStartError, UnsupportedError
from tests import quantised
from tests.architectures import OPTIONS, PROMPTS, SPECS, compare_prompts
from tests.conftest import started
from tests.oracle import Oracle, error

pytestmark = pytest.mark.engine


ONE_STEP = 0.05
"""What one input that is rounded to the next of its 255 numbers changes of a row; wrong products change all of it."""


def test_eight_bits_for_weights_and_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; the oracle rounds layers' inputs to 8 bits too. Some inputs round to the next number elsewhere."""
    folder, meant = quantised.build("w8a8", tmp_path)
    if cpu_has_vnni():
        oracle = Oracle(meant)
        quantised.round_inputs(oracle.model)
        worst = dict.fromkeys(SPECS, 0.0)
        with started(folder, **OPTIONS) as model:
            asyncio.run(compare_prompts(model, oracle, PROMPTS[:-1], "all", worst))
        assert max(worst.values()) < ONE_STEP, worst
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(UnsupportedError, match="this CPU has no VNNI instructions"):
        VLLMSteerModel(VLLMSteeringConfig(folder, **OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16"])
def test_four_bits_for_weights(kind: str, tmp_path: Path) -> None:
    """These kernels know bfloat16 only: no further from float32 than Hugging Face's bfloat16 is, but for chance."""
    folder, meant = quantised.build(kind, tmp_path)
    exact, rounded = Oracle(meant), Oracle(meant, torch.bfloat16)
    reference = {
        name: max(error(rounded.residuals(prompt, spec), exact.residuals(prompt, spec)) for prompt in PROMPTS[:-1])
        for name, spec in SPECS.items()
    }
    worst = dict.fromkeys(SPECS, 0.0)
    with started(folder, dtype="bfloat16", **OPTIONS) as model:
        asyncio.run(compare_prompts(model, exact, PROMPTS[:-1], "all", worst))
    assert all(worst[name] < 1.6 * reference[name] for name in SPECS), (worst, reference)


@pytest.mark.parametrize(
    ("kind", "dtype", "words"),
    [("gptq", "float32", "float32 is not supported"), ("fp8", "float32", "float32 is not supported")],
)
def test_a_type_that_the_kernels_do_not_know(kind: str, dtype: str, words: str, tmp_path: Path) -> None:
    folder, _ = quantised.build(kind, tmp_path)
    with pytest.raises(EngineStartError, match=words):
        VLLMSteerModel(VLLMSteeringConfig(folder, dtype=dtype, kv_cache_memory_bytes=1 << 27, **OPTIONS))


@pytest.mark.slow
def test_kernels_that_are_not_there(tmp_path: Path) -> None:
    folder, _ = quantised.build("w8a16", tmp_path)
    with pytest.raises(EngineStartError, match="Failed to find a kernel that can implement the WNA16 linear layer"):
        VLLMSteerModel(VLLMSteeringConfig(folder, dtype="bfloat16", kv_cache_memory_bytes=1 << 27, **OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitsandbytes", "gguf"])
def test_formats_that_this_vllm_does_not_know(kind: str, tmp_path: Path) -> None:
    folder, _ = quantised.build("w8a8", tmp_path)
    with pytest.raises((EngineStartError, UnsupportedError), match=kind):
        VLLMSteerModel(VLLMSteeringConfig(folder, quantization=kind, **OPTIONS))

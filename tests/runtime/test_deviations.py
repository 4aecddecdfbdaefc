"""Models that vLLM computes otherwise than Hugging Face are refused where that matters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime.deviations import Circumstances, refuse_deviation

HERE = Circumstances(SimpleNamespace(sliding_window=64), max_model_len=128, device="cpu")
SHORT = Circumstances(SimpleNamespace(sliding_window=64), max_model_len=64, device="cpu")
GPU = Circumstances(SimpleNamespace(), max_model_len=128, device="cuda")


@pytest.mark.parametrize(
    ("architecture", "now", "words"),
    [
        ("ApertusForCausalLM", GPU, "ApertusForCausalLM: vLLM keeps the parameters of xIELU in bfloat16"),
        ("DeepseekV2ForCausalLM", GPU, "DeepseekV2ForCausalLM: vLLM's rotary kernel .* not been compared"),
        ("DeepseekV3ForCausalLM", HERE, "DeepseekV3ForCausalLM: .* why is not known"),
        ("BloomForCausalLM", HERE, "BloomForCausalLM: vLLM computes its GELU exactly"),
        ("Cohere2ForCausalLM", HERE, "Cohere2ForCausalLM: vLLM's sliding window is one token longer"),
        ("Lfm2ForCausalLM", HERE, "Lfm2ForCausalLM: vLLM's rotary kernel for CPUs is wrong"),
        ("Zamba2ForCausalLM", GPU, "Zamba2ForCausalLM: vLLM does not clamp the time step"),
    ],
)
def test_refused(architecture: str, now: Circumstances, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_deviation(architecture, now)


@pytest.mark.parametrize(
    ("architecture", "now"), [("LlamaForCausalLM", HERE), ("Cohere2ForCausalLM", SHORT), ("Lfm2ForCausalLM", GPU)]
)
def test_not_refused(architecture: str, now: Circumstances) -> None:
    refuse_deviation(architecture, now)

"""Models that vLLM computes otherwise than Hugging Face are refused where that matters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime.deviations import Circumstances, refuse_deviation

HERE = Circumstances(SimpleNamespace(sliding_window=64), max_model_len=128, device="cpu")
SHORT = Circumstances(SimpleNamespace(sliding_window=64), max_model_len=64, device="cpu")
ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}
LONG_ROPE = SimpleNamespace(rope_parameters=ROPE, max_position_embeddings=512)
PER_LAYER = SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "dynamic", "factor": 2.0}})
PER_LAYER.max_position_embeddings = 64
ALIBI = SimpleNamespace(alibi=True)
ALPHA = SimpleNamespace(rope_parameters={"rope_type": "dynamic", "alpha": 2.0}, max_position_embeddings=64)
GPU = Circumstances(SimpleNamespace(), max_model_len=128, device="cuda")


@pytest.mark.parametrize(
    ("architecture", "now", "words"),
    [
        ("ApertusForCausalLM", GPU, "ApertusForCausalLM: vLLM keeps the parameters of xIELU in bfloat16"),
        ("DeepseekV2ForCausalLM", GPU, "DeepseekV2ForCausalLM: vLLM's rotary kernel .* not been compared"),
        ("DeepseekV3ForCausalLM", HERE, "DeepseekV3ForCausalLM: .* why is not known"),
        ("BloomForCausalLM", HERE, "BloomForCausalLM: vLLM computes its GELU exactly"),
        ("Cohere2ForCausalLM", HERE, "Cohere2ForCausalLM: vLLM's sliding window is one token longer"),
        ("FalconForCausalLM", Circumstances(ALIBI, 300, "cpu"), "rounds the position in ALiBi's bias to bfloat16"),
        ("Lfm2ForCausalLM", HERE, "Lfm2ForCausalLM: vLLM's rotary kernel for CPUs is wrong"),
        ("Phi3ForCausalLM", Circumstances(LONG_ROPE, 128, "cuda"), "type longrope.* set max_model_len to 64 or less"),
        ("SomeForCausalLM", Circumstances(PER_LAYER, 128, "cpu"), "type dynamic.* set max_model_len to 64 or less"),
        ("Zamba2ForCausalLM", GPU, "Zamba2ForCausalLM: vLLM does not clamp the time step"),
    ],
)
def test_refused(architecture: str, now: Circumstances, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_deviation(architecture, now)


@pytest.mark.parametrize(
    ("architecture", "now"),
    [
        ("LlamaForCausalLM", HERE),
        ("Cohere2ForCausalLM", SHORT),
        ("Lfm2ForCausalLM", GPU),
        ("FalconForCausalLM", HERE),
        ("FalconForCausalLM", Circumstances(ALIBI, 256, "cpu")),
        ("Phi3ForCausalLM", Circumstances(LONG_ROPE, 64, "cpu")),
        ("HunYuanDenseV1ForCausalLM", Circumstances(ALPHA, 128, "cpu")),
    ],
)
def test_not_refused(architecture: str, now: Circumstances) -> None:
    refuse_deviation(architecture, now)

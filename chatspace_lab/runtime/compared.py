"""What was compared with Hugging Face, by ``python -m tests.architectures`` and ``tests/engine/test_quantised.py``.

A model whose blocks are proven by structure (:mod:`chatspace_lab.runtime.layers`) is steered and read where it should
be. Whether vLLM itself computes what Hugging Face computes nothing in the structure shows: that takes a comparison, and
who uses a model that was never compared is told so.
"""

from __future__ import annotations

RIGHT = frozenset(
    [
        "AfmoeForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Jais2ForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "Mamba2ForCausalLM",
        "MellumForCausalLM",
        "MiniCPM3ForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    ]
)
"""Architectures, as in a checkpoint's ``config.json``, of which a small random model is within 1e-4 in float32."""

QUANTISED = frozenset({"compressed-tensors", "gptq", "auto_gptq", "awq", "auto_awq"})
"""Methods by which a small model is right on a CPU."""


def doubt(architecture: str, quantization: str | None) -> str:
    """Return what is not known of a model, as a sentence; empty if it was compared."""
    what = []
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

"""Random models of many architectures, small enough to be built and started in no time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

HIDDEN, LAYERS, VOCABULARY = 64, 4, 512
CONTEXT = 640
"""Tokens that an engine of these models takes: several blocks of its cache, and many of the sliding windows."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # the default makes residuals so alike that greedy text is a coin toss
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in names}


_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 2,
    "n_positions": 1024,
    "n_inner": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    **_without("head_dim", "num_key_value_heads"),
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_SCALED: dict[str, Any] = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}


def _long_rope(original: int) -> dict[str, Any]:
    factors = [1.0 + 0.5 * at for at in range(16)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": factors}
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {**rope, "original_max_position_embeddings": original},
    }


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "llama-yarn": (
        "LlamaConfig",
        {**COMMON, "rope_parameters": {**_SCALED, "rope_type": "yarn"}},
    ),
    "llama-3.1": (
        "LlamaConfig",
        {
            **COMMON,
            "rope_parameters": {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "qwen2": ("Qwen2Config", _without("head_dim")),
    "qwen2-window": (
        "Qwen2Config",
        {**_without("head_dim"), "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3Config", COMMON),
    "gemma2": (
        "Gemma2Config",
        {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": 8}),
    "mistral-full": ("MistralConfig", {**COMMON, "sliding_window": None}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 2,
            "n_positions": 1024,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", _without("num_key_value_heads", "head_dim")),
    "olmo2": ("Olmo2Config", _without("head_dim")),
    "mixtral": ("MixtralConfig", {**COMMON, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    # One stream, or hidden and residual; norms before, after, or both; the attention beside the MLP or before it.
    "gemma": ("GemmaConfig", COMMON),
    "olmo": ("OlmoConfig", _without("head_dim")),
    "olmo3": ("Olmo3Config", {**_without("head_dim"), "sliding_window": 8}),
    "phi": ("PhiConfig", _without("head_dim")),
    "phi3": ("Phi3Config", {**_without("head_dim"), "sliding_window": 8}),
    "phi3-longrope": ("Phi3Config", {**_without("head_dim"), **_long_rope(128)}),
    "phi3-longrope-short": ("Phi3Config", {**_without("head_dim"), **_long_rope(CONTEXT)}),
    "falcon": ("FalconConfig", {**_without("head_dim", "num_key_value_heads"), "multi_query": True}),
    "falcon-alibi": (
        "FalconConfig",
        {
            **_without("head_dim", "num_key_value_heads"),
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "bloom": (
        "BloomConfig",
        {
            **_without("head_dim", "num_key_value_heads", "num_hidden_layers", "num_attention_heads"),
            "n_layer": LAYERS,
            "n_head": 2,
            "tie_word_embeddings": True,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            **_without("head_dim", "num_key_value_heads", "intermediate_size"),
            "ffn_dim": 128,
            "word_embed_proj_dim": HIDDEN,
            "init_std": 0.2,
        },
    ),
    "gpt-j": ("GPTJConfig", {**_GPT, "rotary_dim": 16, "tie_word_embeddings": False}),
    "gpt-bigcode": ("GPTBigCodeConfig", {**_GPT, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2Config", {**_without("head_dim"), "use_bias": True, "sliding_window": 8}),
    "stablelm": ("StableLmConfig", _without("head_dim")),
    "cohere": ("CohereConfig", {**_without("head_dim"), "tie_word_embeddings": True}),
    "cohere2": ("Cohere2Config", {**COMMON, "sliding_window": 8, "tie_word_embeddings": True}),
    "cohere2-short": ("Cohere2Config", {**COMMON, "sliding_window": CONTEXT, "tie_word_embeddings": True}),
    "granite": (
        "GraniteConfig",
        {
            **_without("head_dim"),
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "nemotron": ("NemotronConfig", COMMON),
    "exaone4": ("Exaone4Config", {**COMMON, "sliding_window": 8, "sliding_window_pattern": 4}),
    "glm": ("GlmConfig", COMMON),
    "glm4": ("Glm4Config", COMMON),
    "smollm3": ("SmolLM3Config", _without("head_dim")),
    "ernie4.5": ("Ernie4_5Config", COMMON),
    "seed-oss": ("SeedOssConfig", COMMON),
    "hunyuan": ("HunYuanDenseV1Config", COMMON),
    "apertus": ("ApertusConfig", _without("head_dim")),
    "arcee": ("ArceeConfig", COMMON),
    "ministral3": ("Ministral3Config", COMMON),
    "helium": ("HeliumConfig", COMMON),
    "jais2": ("Jais2Config", COMMON),
    "cwm": ("CwmConfig", {**COMMON, "sliding_window": 8}),
    "vaultgemma": ("VaultGemmaConfig", {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "hyperclovax": ("HyperCLOVAXConfig", _without("head_dim")),
    "mpt": (
        "MptConfig",
        {"d_model": HIDDEN, "n_heads": 2, "n_layers": LAYERS, "max_seq_len": 1024, "vocab_size": VOCABULARY},
    ),
    "persimmon": ("PersimmonConfig", _without("head_dim", "num_key_value_heads")),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **COMMON,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * LAYERS,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**COMMON, "sliding_window": 8, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
    ),
    # Mixtures of experts.
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **_without("head_dim"),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "olmoe": ("OlmoeConfig", {**_without("head_dim"), "num_experts": 4, "num_experts_per_tok": 2}),
    "flex-olmo": ("FlexOlmoConfig", {**_without("head_dim"), "num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe": (
        "GraniteMoeConfig",
        {
            **_without("head_dim"),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {
            **_without("head_dim"),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        {
            **_without("head_dim"),
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            **COMMON,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {
            **COMMON,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": 8,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **COMMON,
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 8,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {
            **COMMON,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        {**COMMON, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 128},
    ),
    "mellum": (
        "MellumConfig",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 8},
    ),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": HIDDEN,
            "n_heads": 2,
            "n_layers": LAYERS,
            "max_seq_len": 1024,
            "vocab_size": VOCABULARY,
            "initializer_range": 0.2,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **COMMON,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**_LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek-v3": ("DeepseekV3Config", {**_LATENT, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc"}),
    "minicpm3": (
        "MiniCPM3Config",
        {
            **_without("head_dim", "num_key_value_heads"),
            "num_key_value_heads": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "scale_depth": 1.4,
            "scale_emb": 2,
            "dim_model_base": 32,
        },
    ),
    "longcat-flash": (
        "LongcatFlashConfig",
        {
            **_without("head_dim", "num_hidden_layers", "num_key_value_heads", "intermediate_size"),
            "num_layers": LAYERS,
            "num_key_value_heads": 2,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 32,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
    ),
    # State spaces, convolutions and linear attention, alone or between layers of attention.
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 16},
    ),
    "falcon-mamba": (
        "FalconMambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 16},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_without("head_dim"),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "BambaConfig",
        {**_without("head_dim"), **_MAMBA2, "attn_layer_indices": [1, 3]},
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_without("head_dim", "num_key_value_heads"),
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 8,
        },
    ),
    "falcon-h1": ("FalconH1Config", {**COMMON, **_MAMBA2, "mamba_d_ssm": 128}),
    "granite-moe-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_without("head_dim"),
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.2,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **COMMON,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_without("head_dim"),
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_dim": HIDDEN,
            "block_dim": HIDDEN,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            **_without("head_dim"),
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **COMMON,
            **_LINEAR_ATTENTION,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**COMMON, **_LINEAR_ATTENTION}),
    "olmo-hybrid": ("OlmoHybridConfig", {**_without("head_dim"), **_LINEAR_ATTENTION}),
}

ATTENTION: dict[str, str] = {"falcon-alibi": "sdpa"}
"""Hugging Face's implementation to compare with, if not "eager": that one adds Falcon's ALiBi bias twice."""


def build(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> str:
    """Write a random model of an architecture to ``folder`` and return its path. It has no tokenizer."""
    kind, options = CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**options, **changes}))
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases start as ones and zeros, where a mistake would not show
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.1)
        assert torch.isfinite(parameter).all(), parameter_name
    model.save_pretrained(folder)
    return str(folder)


def copy_tokenizer(source: str, folder: str) -> None:
    """Give a model the tokenizer of another one."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(source) / name, folder)

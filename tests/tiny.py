"""Random models of many architectures, small enough to be built and started in no time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

HIDDEN, LAYERS, VOCABULARY = 64, 4, 512

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # the default makes residuals so alike that greedy text is a coin toss
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in names}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", _without("head_dim")),
    "qwen3": ("Qwen3Config", COMMON),
    "gemma2": (
        "Gemma2Config",
        {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", COMMON),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 2,
            "n_positions": 256,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", _without("num_key_value_heads", "head_dim")),
    "olmo2": ("Olmo2Config", _without("head_dim")),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
}


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

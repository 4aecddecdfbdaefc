"""Models that vLLM computes otherwise than Hugging Face. Nothing in their structure shows it, so they are named here.

Found by ``python -m tests.architectures``, which compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chatspace_lab.errors import UnsupportedError


@dataclass(frozen=True)
class Circumstances:
    """What a deviation may depend on."""

    config: Any  # Hugging Face's, of the language model
    max_model_len: int
    device: str


@dataclass(frozen=True)
class Deviation:
    """What vLLM does, and when it matters."""

    reason: str
    matters: Callable[[Circumstances], bool] = lambda _: True


_ROTARY = Deviation(
    "vLLM's rotary kernel for CPUs is wrong for queries [tokens, heads, head_size] of more than one head, so that this "
    "model's attention is too",
    lambda now: now.device == "cpu",
)
_TIME_STEP = Deviation(
    "vLLM does not clamp the time step of Mamba layers as Hugging Face does: activations differ by 1e-3"
)
DEVIATIONS = {
    "ApertusForCausalLM": Deviation(
        "vLLM keeps the parameters of xIELU in bfloat16 whatever the model's dtype: activations differ by 3e-3"
    ),
    "BloomForCausalLM": Deviation(
        "vLLM computes its GELU exactly where Hugging Face has the tanh approximation: activations differ by 4e-4"
    ),
    "Cohere2ForCausalLM": Deviation(
        "vLLM's sliding window is one token longer than Hugging Face's, which shows in contexts longer than it; set "
        "max_model_len to the model's sliding_window or less",
        lambda now: now.max_model_len > (now.config.sliding_window or now.max_model_len),
    ),
    "DeepseekV2ForCausalLM": Deviation(f"{_ROTARY.reason}; other devices have not been compared"),
    "DeepseekV3ForCausalLM": Deviation(
        "a small random model of it differs from Hugging Face's by more than 1e-2 behind each mixture of "
        "experts, and why is not known"
    ),
    "FalconForCausalLM": Deviation(
        "Hugging Face rounds the position in ALiBi's bias to bfloat16, which shows in contexts of more than 256 "
        "tokens; set max_model_len to 256 or less",
        lambda now: getattr(now.config, "alibi", False) and now.max_model_len > 256,
    ),
    "Lfm2ForCausalLM": _ROTARY,
    "Lfm2MoeForCausalLM": _ROTARY,
    "NemotronHForCausalLM": _TIME_STEP,
    "Zamba2ForCausalLM": _TIME_STEP,
}


def _rope_limits(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each kind of rotary embedding that changes with the length of the context, and up to which it does not."""
    found = getattr(config, "rope_parameters", None) or {}
    for rope in [found, *(each for each in found.values() if isinstance(each, dict))]:
        if rope.get("rope_type") == "longrope":
            yield "longrope", rope.get("original_max_position_embeddings") or config.max_position_embeddings
        elif rope.get("rope_type") == "dynamic" and "alpha" not in rope:
            yield "dynamic", config.max_position_embeddings


def refuse_deviation(architecture: str, now: Circumstances) -> None:
    """Refuse a model whose residual stream is known not to be that of Hugging Face.

    Raises
    ------
    UnsupportedError
        Naming the architecture and what is different.
    """
    known = DEVIATIONS.get(architecture)
    if known is not None and known.matters(now):
        raise UnsupportedError(f"{architecture}: {known.reason}")
    for kind, limit in _rope_limits(now.config):
        if now.max_model_len > limit:
            raise UnsupportedError(
                f"{architecture}: with rotary embeddings of type {kind}, Hugging Face's activations depend on whether "
                f"the context has more than {limit} tokens, and vLLM's on max_model_len, which is {now.max_model_len}; "
                f"set max_model_len to {limit} or less"
            )

"""Models that vLLM computes otherwise than Hugging Face. Nothing in their structure shows it, so they are named here.

Found by ``python -m tests.architectures``, which compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
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
    "Lfm2ForCausalLM": _ROTARY,
    "Lfm2MoeForCausalLM": _ROTARY,
    "NemotronHForCausalLM": _TIME_STEP,
    "Zamba2ForCausalLM": _TIME_STEP,
}


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

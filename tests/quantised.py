"""Quantised checkpoints of a small random Llama, each beside the same model with the weights that it stands for.

Every linear layer of every block is quantised by hand, in the layouts that the formats prescribe.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import tiny

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbouring columns stands in each four bits of AWQ's words."""

Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors to store, by the end of their names; and the weight [out, in] that they mean."""


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned numbers into int32 words along the last dimension, the first into the lowest bits."""
    count = 32 // bits
    words = values.to(torch.int64).unflatten(-1, (-1, count))
    word = (words << (bits * torch.arange(count))).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (whole numbers [out, in], scales [out, groups], meaning [out, in]), symmetric around zero."""
    top = 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / (top - 1)).clamp(min=1e-6).to(torch.bfloat16).float()  # exact in any dtype
    whole = (groups / scales[..., None]).round().clamp(-top, top - 1)
    return whole.flatten(1), scales, (whole * scales[..., None]).flatten(1)


def gptq(weight: torch.Tensor) -> Quantised:
    whole, scales, meaning = _grouped(weight, 4)
    groups = weight.shape[1] // GROUP
    zeros = torch.full((groups, weight.shape[0]), 7)  # the format stores a zero point of 8 as 7
    return {
        "qweight": _packed(whole + 8, 4).T.contiguous(),
        "qzeros": _packed(zeros, 4),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }, meaning


def awq(weight: torch.Tensor) -> Quantised:
    whole, scales, meaning = _grouped(weight, 4)

    def columns(values: torch.Tensor) -> torch.Tensor:
        return _packed(values.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    zeros = torch.full((weight.shape[1] // GROUP, weight.shape[0]), 8)
    return {"qweight": columns((whole + 8).T), "qzeros": columns(zeros), "scales": scales.T.contiguous()}, meaning


def four_bits(weight: torch.Tensor) -> Quantised:
    whole, scales, meaning = _grouped(weight, 4)
    shape = torch.tensor(list(weight.shape))
    return {"weight_packed": _packed(whole + 8, 4), "weight_scale": scales, "weight_shape": shape}, meaning


def eight_bits(weight: torch.Tensor) -> Quantised:
    whole, scales, meaning = _grouped(weight, 8)
    shape = torch.tensor(list(weight.shape))
    return {"weight_packed": _packed(whole + 128, 8), "weight_scale": scales, "weight_shape": shape}, meaning


def int8(weight: torch.Tensor) -> Quantised:
    scales = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16).float()
    whole = (weight / scales).round().clamp(-127, 127)
    return {"weight": whole.to(torch.int8), "weight_scale": scales}, whole * scales


def fp8(weight: torch.Tensor) -> Quantised:
    scale = (weight.abs().max() / 448).to(torch.bfloat16).float()
    whole = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": whole, "weight_scale": scale.reshape(1)}, whole.float() * scale


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _numbers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


KINDS: dict[str, tuple[Callable[[torch.Tensor], Quantised], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "w4a16": (four_bits, _compressed("pack-quantized", _numbers(4, "group", group_size=GROUP), None)),
    "w8a16": (eight_bits, _compressed("pack-quantized", _numbers(8, "group", group_size=GROUP), None)),
    "w8a8": (int8, _compressed("int-quantized", _numbers(8, "channel"), _numbers(8, "token", dynamic=True))),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}
ROUNDED_INPUTS = {"w8a8"}
"""Kinds that round the inputs of each layer too, to 8 bits per token."""


def build(kind: str, folder: Path) -> tuple[str, str]:
    """Write both models; return the folder of the quantised one and that of what it means, in float32."""
    plain = tiny.build("llama", folder / "plain", seed=2)
    quantise, config = KINDS[kind]
    tensors = load_file(Path(plain) / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            parts, meant[name] = quantise(tensor)
            stored |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = meant[name] = tensor
    settings = json.loads((Path(plain) / "config.json").read_text())
    for where, what, extra in (
        (folder / "quantised", stored, {"quantization_config": config}),
        (folder / "meant", meant, {}),
    ):
        where.mkdir()
        save_file(what, where / "model.safetensors", metadata={"format": "pt"})
        (where / "config.json").write_text(json.dumps({**settings, **extra}))
    return str(folder / "quantised"), str(folder / "meant")


def round_inputs(model: torch.nn.Module) -> None:
    """Make every linear layer of a block round its inputs to 8 bits per token, as such a kernel does."""

    def before(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (x,) = args
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8)
        return ((x / scale).round().clamp(-128, 127) * scale,)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(before)

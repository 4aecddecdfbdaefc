"""vLLM's rotary kernels beside vLLM's own reference in torch, on the shapes that the model gives them.

vLLM's CPU kernel turns the first head only of a query [tokens, heads, head_size] (0.32; LFM2 passes that), and says
nothing. Whatever stands behind such a layer would be captured and steered well, and be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.custom_op import CustomOp

logger = logging.getLogger(__name__)


def mend_rotary(model: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """Run ``forward``, try each rotary module on what it was given, and return those that were not right.

    They are set to compute the reference, ``forward_native``, from now on; a warning names them.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CustomOp) and hasattr(module, "cos_sin_cache")
    }
    given: dict[str, dict[Any, _Arguments]] = {name: {} for name in modules}

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _Arguments(args, kwargs)
        given[name][arguments.layout()] = arguments

    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: record(name, args, kwargs), with_kwargs=True
        )
        for name, module in modules.items()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    wrong = [name for name, module in modules.items() if not all(_agrees(module, a) for a in given[name].values())]
    for name in wrong:
        modules[name]._forward_method = modules[name].forward_native
    if wrong:
        logger.warning(
            "vLLM's rotary kernel is wrong for this model on this device (%s); vLLM's reference is used", wrong[0]
        )
    return wrong


@dataclass(frozen=True)
class _Arguments:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def layout(self) -> tuple[Any, ...]:
        """Return shapes and strides."""
        return tuple(
            (x.shape, x.stride()) if isinstance(x, torch.Tensor) else None for x in [*self.args, *self.kwargs.values()]
        )

    def call(self, function: Callable[..., Any]) -> Any:
        """Call with random floats of the same layout, always the same ones, since kernels may work in place."""
        generator = torch.Generator().manual_seed(0)

        def fresh(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            noise = torch.randn(x.shape, generator=generator)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(noise)

        return function(*map(fresh, self.args), **{name: fresh(x) for name, x in self.kwargs.items()})


def _agrees(module: Any, arguments: _Arguments) -> bool:
    """Whether kernel and reference agree, or there is no reference."""
    try:
        wanted = arguments.call(module.forward_native)
    except NotImplementedError:
        return True
    got = arguments.call(module)
    return all(
        torch.allclose(a.float(), b.float(), rtol=0, atol=1e-3 if a.dtype == torch.float32 else 0.1)
        for a, b in zip(got, wanted, strict=True)
        if a is not None
    )

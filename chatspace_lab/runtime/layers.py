"""Finding a model's decoder blocks by structure, proving what they return, and putting the operator behind them.

One forward pass over a few tokens, without KV cache, is recorded at load. A block is accepted if what it returns goes,
unchanged, into the next block; a block that returns two tensors is accepted if it can be shown that the next one works
on their sum (its first computation must not change when a random tensor is moved from one to the other), or that it
never touches one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime.operator import intervene


@dataclass(frozen=True)
class OutputForm:
    """Where the residual stream stands in what a block returns.

    Attributes
    ----------
    hidden
        Index in the returned tuple, or None if the block returns the tensor itself.
    residual
        Index of the tensor to be added to it, or None if ``hidden`` is the whole stream.
    """

    hidden: int | None
    residual: int | None


class _Untouchable:
    """Stands where a tensor is expected, and can be handed about but not computed with."""

    def __bool__(self) -> bool:
        raise TypeError("this is no tensor")


class _Stop(Exception):  # noqa: N818 - not an error: ends a block's forward early
    pass


def find_blocks(model: nn.Module, count: int) -> nn.ModuleList:
    """Return the list of the language model's decoder blocks.

    Raises
    ------
    UnsupportedError
        If there is no list of ``count`` modules that hold an attention or a mixer, or more than one.
    """
    name = type(model).__name__
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and not any(path.startswith(f"{p}.") for p in found)
            and not any(list(module) == list(other) for other in found.values())  # one list, seen from two places
        ):
            found[path] = module
    decoders = {path: blocks for path, blocks in found.items() if not _is_side_tower(path)} or found
    blocks = {
        path: value for path, value in decoders.items() if any(len(list(block.children())) > 1 for block in value)
    }
    if len(blocks) == 1:
        return next(iter(blocks.values()))
    if not blocks:
        raise UnsupportedError(f"{name}: no list of {count} decoder blocks found in the model; it cannot be steered")
    raise UnsupportedError(
        f"{name}: {len(blocks)} lists could be its {count} decoder blocks ({', '.join(blocks)}); it cannot be steered"
    )


def _is_side_tower(path: str) -> bool:
    return any(part in path.lower() for part in ("vision", "visual", "audio", "encoder", "mtp", "tower"))


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple | list) else [value]
    return [part if isinstance(part, torch.Tensor) else torch.empty(0) for part in parts]


@dataclass
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def inputs(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]


def record_calls(blocks: nn.ModuleList, forward: Callable[[], Any]) -> list[_Call]:
    """Run ``forward`` and return each block's arguments and result, in the order of the blocks."""
    calls: dict[int, _Call] = {}
    handles = [
        block.register_forward_hook(
            lambda module, args, kwargs, output, index=index: (
                calls.setdefault(index, _Call(args, kwargs, output)) and None
            ),
            with_kwargs=True,
        )
        for index, block in enumerate(blocks)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != len(blocks):
        raise UnsupportedError(
            f"{type(blocks[0]).__name__}: only {len(calls)} of {len(blocks)} decoder blocks ran in a forward pass"
        )
    return [calls[index] for index in range(len(blocks))]


def output_form(blocks: nn.ModuleList, calls: list[_Call], hidden_size: int, architecture: str) -> OutputForm:
    """Prove what the blocks return.

    Raises
    ------
    UnsupportedError
        Naming the architecture and what could not be shown.
    """
    forms = set()
    for index, (before, after) in enumerate(itertools.pairwise(calls)):
        outputs = _tensors(before.output)
        handed = [
            position
            for position, tensor in enumerate(outputs)
            if _is_stream(tensor, hidden_size) and any(tensor is value for value in after.inputs())
        ]
        single = isinstance(before.output, torch.Tensor)
        if len(handed) == 1 and single:
            forms.add(OutputForm(None, None))
        elif len(handed) == 1:
            forms.add(OutputForm(handed[0], None))
        elif len(handed) == 2:
            hidden, residual = handed
            if _works_on_sum(blocks[index + 1], after, outputs[hidden], outputs[residual]):
                forms.add(OutputForm(hidden, residual))
            elif _never_touches(blocks[index + 1], after, outputs[residual]):
                forms.add(OutputForm(hidden, None))
            elif _never_touches(blocks[index + 1], after, outputs[hidden]):
                forms.add(OutputForm(residual, None))
            else:
                raise UnsupportedError(
                    f"{architecture}: a block returns two tensors whose sum is not what the next block works on; "
                    f"this form is not known and is not guessed"
                )
        else:
            raise UnsupportedError(
                f"{architecture}: what decoder block {index} returns does not go unchanged into block {index + 1}; "
                f"this form is not known and is not guessed"
            )
    if len(forms) != 1:
        raise UnsupportedError(f"{architecture}: its decoder blocks return {len(forms)} different forms")
    return forms.pop()


def _is_stream(tensor: torch.Tensor, hidden_size: int) -> bool:
    """Whether this can be [tokens, hidden_size], or [1, tokens, hidden_size] as in Hugging Face's own code."""
    return tensor.shape[-1:] == (hidden_size,) and (tensor.ndim == 2 or (tensor.ndim == 3 and tensor.shape[0] == 1))


def _run_with(block: nn.Module, call: _Call, swap: dict[int, Any]) -> Any:
    """Run the block on the arguments of ``call``, those whose ``id`` is in ``swap`` exchanged."""
    return block.forward(
        *(swap.get(id(value), value) for value in call.args),
        **{name: swap.get(id(value), value) for name, value in call.kwargs.items()},
    )


def _never_touches(block: nn.Module, call: _Call, tensor: torch.Tensor) -> bool:
    """Whether the block runs through without computing with this argument, and without handing it on.

    Nothing can be concluded from numbers here: attention returns what was in memory before, for want of a KV cache.
    """
    substitute = _Untouchable()
    try:
        output = _run_with(block, call, {id(tensor): substitute})
    except Exception:  # noqa: BLE001 - whatever went wrong, it went wrong for want of a tensor
        return False
    parts = output if isinstance(output, tuple | list) else [output]
    return not any(part is substitute for part in parts)


def _works_on_sum(block: nn.Module, call: _Call, hidden: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether the block's first computation depends on hidden + residual only."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype).to(like.device)

    h, r, moved = noise(hidden), noise(residual), noise(hidden)

    def first(new_hidden: torch.Tensor, new_residual: torch.Tensor) -> torch.Tensor:
        swap = {id(hidden): new_hidden, id(residual): new_residual}
        seen: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(_tensors(output)[0].detach().float().clone())
            raise _Stop

        leaves = [module for module in block.modules() if not any(True for _ in module.children())]
        handles = [leaf.register_forward_hook(hook) for leaf in leaves]
        try:
            _run_with(block, call, swap)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return seen[0]

    base = first(h.clone(), r.clone())
    shifted = first(h + moved, r - moved)
    other = first(h + moved, r.clone())
    scale = float(base.abs().max())
    tolerance = scale * (1e-4 if h.dtype == torch.float32 else 5e-2)
    return float((base - shifted).abs().max()) <= tolerance < float((base - other).abs().max())


def install(blocks: nn.ModuleList, form: OutputForm) -> None:
    """Put the operator behind each block, by giving the block a class of its own that ends with it.

    Only these instances change; other models in the process, and the blocks' class, do not. Doing it twice is an
    error, since the vector would be added twice.
    """
    device = next(blocks.parameters()).device
    for index, block in enumerate(blocks):
        base = type(block)
        if getattr(base, "chatspace_lab_block", False):
            raise UnsupportedError("the operator is installed already; a second one would steer twice")
        block.__class__ = _steered_class(base, form)
        number = torch.tensor([index], dtype=torch.int32, device=device)
        block.register_buffer("chatspace_lab_layer", number, persistent=False)


def _intervene(hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
    if hidden.ndim == 2:
        intervene(hidden, residual, layer)
    else:
        intervene(hidden[0], None if residual is None else residual[0], layer)


_classes: dict[tuple[type, OutputForm], type] = {}


def _steered_class(base: type, form: OutputForm) -> type:
    if (base, form) in _classes:
        return _classes[base, form]
    original = base.forward  # type: ignore[attr-defined]
    hidden, residual = form.hidden, form.residual

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        stream = output if hidden is None else output[hidden]
        _intervene(stream, None if residual is None else output[residual], self.chatspace_lab_layer)
        return output

    steered = type(
        base.__name__, (base,), {"forward": forward, "chatspace_lab_block": True, "__module__": base.__module__}
    )
    _classes[base, form] = steered
    return steered

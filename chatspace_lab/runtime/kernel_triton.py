"""The operator on a GPU: one Triton program per token, which reads its own steering and capture entry.

Traced into CUDA graphs like any kernel. What it does at each replay is decided by the contents of the buffers alone.

A decode step runs it once per layer between kernels of a few microseconds, so what counts is not bandwidth but how many
loads wait for each other. A token that has nothing to do at a layer is left after one or two loads. For the others
everything that does not depend on the layer's own result, down to the vectors, is asked for first; on Hopper and later
that happens while the kernel before it still runs (programmatic dependent launch).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from chatspace_lab.wire import ADD, CAP, LARGEST, LARGEST_HALF

_ADD = tl.constexpr(ADD)
_CAP = tl.constexpr(CAP)
_LARGEST = tl.constexpr(LARGEST)
_LARGEST_HALF = tl.constexpr(LARGEST_HALF)


@triton.jit
def _operation(entry, number: tl.constexpr, wanted, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Load operation ``number`` of a program; zeros if it is not wanted, or no program can have so many."""
    there = (wanted & (number < ENTRIES - 1)).to(tl.int1)
    at = entry + 4 * (number + 1)
    kind = tl.load(at, mask=there, other=0)
    row = tl.load(at + 1, mask=there, other=0).to(tl.int64)
    a = tl.load(at + 2, mask=there, other=0).to(tl.float32, bitcast=True)
    b = tl.load(at + 3, mask=there, other=0).to(tl.float32, bitcast=True)
    return kind, row, a, b


@triton.jit
def _coefficient(x, v, kind, a, b):  # type: ignore[no-untyped-def]
    """Return how much of ``v`` an operation adds to ``x``."""
    change = a
    if kind != _ADD:
        projection = tl.sum(x * v, axis=0)
        if kind == _CAP:  # noqa: SIM108 - a branch, not a choice between two computed values
            change = tl.minimum(tl.maximum(projection, a), b) - projection
        else:
            change = (a - 1.0) * projection
        change = tl.minimum(tl.maximum(change, -_LARGEST), _LARGEST)
    return change


@triton.jit
def _intervene(  # type: ignore[no-untyped-def]
    hidden_ptr,
    residual_ptr,
    hidden_stride,
    residual_stride,
    layer_ptr,
    program_of_token_ptr,
    programs_ptr,
    bank_ptr,
    capture_of_token_ptr,
    capture_row_of_token_ptr,
    captures_ptr,
    layers,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ENTRIES: tl.constexpr,  # noqa: N803
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.load(program_of_token_ptr + token).to(tl.int64)
    capture = tl.load(capture_of_token_ptr + token).to(tl.int64)
    layer = tl.load(layer_ptr)
    wanted = (program | capture) != 0
    entry = programs_ptr + (program * layers + layer) * ENTRIES * 4
    count = tl.load(entry, mask=wanted, other=0)
    address = tl.load(captures_ptr + capture * layers + layer, mask=wanted, other=0)
    kind0, row0, a0, b0 = _operation(entry, 0, wanted, ENTRIES)
    kind1, row1, a1, b1 = _operation(entry, 1, wanted, ENTRIES)
    kind2, row2, a2, b2 = _operation(entry, 2, wanted, ENTRIES)
    if (count == 0) & (address == 0):  # nothing for this token at this layer
        if EARLY:
            tl.extra.cuda.gdc_wait()
    else:
        offsets = tl.arange(0, BLOCK)
        mask = offsets < SIZE
        v0 = tl.load(bank_ptr + row0 * SIZE + offsets, mask=offsets < tl.where(count > 0, SIZE, 0), other=0.0)
        v1 = tl.load(bank_ptr + row1 * SIZE + offsets, mask=offsets < tl.where(count > 1, SIZE, 0), other=0.0)
        v2 = tl.load(bank_ptr + row2 * SIZE + offsets, mask=offsets < tl.where(count > 2, SIZE, 0), other=0.0)
        row = tl.load(capture_row_of_token_ptr + token).to(tl.int64)
        if EARLY:
            tl.extra.cuda.gdc_wait()  # from here on the kernel before this one has ended
        before = tl.load(hidden_ptr + token * hidden_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        rest = tl.zeros((BLOCK,), tl.float32)
        if HAS_RESIDUAL:
            rest = tl.load(residual_ptr + token * residual_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        x = before + rest
        changed = before
        if count > 0:
            change = _coefficient(x, v0, kind0, a0, b0)
            x += change * v0
            changed += change * v0
            if count > 1:
                change = _coefficient(x, v1, kind1, a1, b1)
                x += change * v1
                changed += change * v1
            if count > 2:
                change = _coefficient(x, v2, kind2, a2, b2)
                x += change * v2
                changed += change * v2
            for number in range(3, count):
                at = entry + 4 * (number + 1)
                kind = tl.load(at)
                vector = tl.load(at + 1).to(tl.int64)
                a = tl.load(at + 2).to(tl.float32, bitcast=True)
                b = tl.load(at + 3).to(tl.float32, bitcast=True)
                v = tl.load(bank_ptr + vector * SIZE + offsets, mask=mask, other=0.0)
                change = _coefficient(x, v, kind, a, b)
                x += change * v
                changed += change * v
            if hidden_ptr.dtype.element_ty == tl.float16:
                changed = tl.minimum(tl.maximum(changed + rest, -_LARGEST_HALF), _LARGEST_HALF) - rest
            tl.store(hidden_ptr + token * hidden_stride + offsets, changed.to(hidden_ptr.dtype.element_ty), mask=mask)
        if address != 0:
            # What the next layer will see: the stored hidden state, rounded to its dtype, plus the residual.
            seen = changed.to(hidden_ptr.dtype.element_ty).to(tl.float32) + rest
            target = address.to(tl.pointer_type(hidden_ptr.dtype.element_ty)) + row * SIZE
            tl.store(target + offsets, seen.to(hidden_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it ends: compute capability 9 (Hopper) and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def intervene(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    layer: torch.Tensor,
    *,
    program_of_token: torch.Tensor,
    programs: torch.Tensor,
    bank: torch.Tensor,
    capture_of_token: torch.Tensor,
    capture_row_of_token: torch.Tensor,
    captures: torch.Tensor,
) -> None:
    """Change ``hidden`` by each token's program, in place; store the captured rows.

    Parameters
    ----------
    hidden, residual
        [tokens, hidden_size] float32, bfloat16 or float16; the entries of a row lie together.
    layer
        [1] int32: index of the decoder block.
    program_of_token, programs, bank, capture_of_token, capture_row_of_token, captures
        The buffers of :class:`chatspace_lab.runtime.tables.Tables`.
    """
    tokens, size = hidden.shape
    if not tokens:
        return
    if hidden.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError(f"the entries of a row do not lie together: strides {hidden.stride()}")
    block = triton.next_power_of_2(size)
    early = _starts_early(hidden.device)
    rest = hidden if residual is None else residual
    _intervene[(tokens,)](
        hidden,
        rest,
        hidden.stride(0),
        rest.stride(0),
        layer,
        program_of_token,
        programs,
        bank,
        capture_of_token,
        capture_row_of_token,
        captures,
        programs.shape[1],
        SIZE=size,
        BLOCK=block,
        ENTRIES=programs.shape[2],
        HAS_RESIDUAL=residual is not None,
        EARLY=early,
        num_warps=_warps(block),
        **({"launch_pdl": True} if early else {}),
    )

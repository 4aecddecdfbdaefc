"""The operator on a GPU: one Triton program per token, which reads its own steering and capture entry.

Traced into CUDA graphs like any kernel. What it does at each replay is decided by the contents of the buffers alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chatspace_lab.wire import ADD, CAP

_ADD = tl.constexpr(ADD)
_CAP = tl.constexpr(CAP)


@triton.jit
def _intervene(  # type: ignore[no-untyped-def]
    hidden_ptr,
    residual_ptr,
    out_ptr,
    program_of_token_ptr,
    programs_ptr,
    bank_ptr,
    capture_of_token_ptr,
    capture_row_of_token_ptr,
    captures_ptr,
    layer,
    layers,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ENTRIES: tl.constexpr,  # noqa: N803
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    program = tl.load(program_of_token_ptr + token)
    capture = tl.load(capture_of_token_ptr + token)
    hidden = tl.load(hidden_ptr + token * SIZE + offsets, mask=mask, other=0.0)
    if (program == 0) & (capture == 0):
        tl.store(out_ptr + token * SIZE + offsets, hidden, mask=mask)
    else:
        before = hidden.to(tl.float32)
        rest = tl.zeros((BLOCK,), tl.float32)
        if HAS_RESIDUAL:
            rest = tl.load(residual_ptr + token * SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
        x = before + rest
        changed = before
        entry = programs_ptr + (program.to(tl.int64) * layers + layer) * ENTRIES * 4
        count = tl.load(entry)
        for _ in range(count):
            entry += 4
            kind = tl.load(entry)
            vector = tl.load(entry + 1).to(tl.int64)
            a = tl.load(entry + 2).to(tl.float32, bitcast=True)
            b = tl.load(entry + 3).to(tl.float32, bitcast=True)
            v = tl.load(bank_ptr + vector * SIZE + offsets, mask=mask, other=0.0)
            change = a
            if kind != _ADD:
                projection = tl.sum(x * v, axis=0)
                if kind == _CAP:
                    change = tl.minimum(tl.maximum(projection, a), b) - projection
                else:
                    change = (a - 1.0) * projection
            x += change * v
            changed += change * v
        result = changed.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * SIZE + offsets, result, mask=mask)
        if capture > 0:
            address = tl.load(captures_ptr + capture.to(tl.int64) * layers + layer)
            if address != 0:
                # What the next layer will see: the stored hidden state, rounded to its dtype, plus the residual.
                seen = (result.to(tl.float32) + rest).to(out_ptr.dtype.element_ty)
                row = tl.load(capture_row_of_token_ptr + token).to(tl.int64)
                target = address.to(tl.pointer_type(out_ptr.dtype.element_ty)) + row * SIZE
                tl.store(target + offsets, seen, mask=mask)


def intervene(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    layer: int,
    *,
    program_of_token: torch.Tensor,
    programs: torch.Tensor,
    bank: torch.Tensor,
    capture_of_token: torch.Tensor,
    capture_row_of_token: torch.Tensor,
    captures: torch.Tensor,
) -> torch.Tensor:
    """Return ``hidden`` changed by each token's program; store the captured rows.

    Parameters
    ----------
    hidden, residual
        [tokens, hidden_size], contiguous, float32, bfloat16 or float16.
    layer
        Index of the decoder block.
    program_of_token, programs, bank, capture_of_token, capture_row_of_token, captures
        The buffers of :class:`chatspace_lab.runtime.tables.Tables`.
    """
    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    tokens, size = hidden.shape
    if not tokens:
        return out
    block = triton.next_power_of_2(size)
    _intervene[(tokens,)](
        hidden,
        hidden if residual is None else residual.contiguous(),
        out,
        program_of_token,
        programs,
        bank,
        capture_of_token,
        capture_row_of_token,
        captures,
        layer,
        programs.shape[1],
        SIZE=size,
        BLOCK=block,
        ENTRIES=programs.shape[2],
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out

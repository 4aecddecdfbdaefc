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
    counts_ptr,
    ops_ptr,
    bank_ptr,
    capture_row_of_token_ptr,
    capture_slot_of_layer_ptr,
    capture_ptr,
    layer,
    layers,
    capture_rows,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    MAX_OPS: tl.constexpr,  # noqa: N803
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    program = tl.load(program_of_token_ptr + token)
    row = tl.load(capture_row_of_token_ptr + token)
    hidden = tl.load(hidden_ptr + token * SIZE + offsets, mask=mask, other=0.0)
    if (program <= 0) & (row < 0):
        tl.store(out_ptr + token * SIZE + offsets, hidden, mask=mask)
    else:
        before = hidden.to(tl.float32)
        rest = tl.zeros((BLOCK,), tl.float32)
        if HAS_RESIDUAL:
            rest = tl.load(residual_ptr + token * SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
        x = before + rest
        changed = before
        count = tl.load(counts_ptr + program.to(tl.int64) * layers + layer)
        entry = ops_ptr + (program.to(tl.int64) * layers + layer) * MAX_OPS * 4
        for _ in range(count):
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
            entry += 4
        result = changed.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * SIZE + offsets, result, mask=mask)
        slot = tl.load(capture_slot_of_layer_ptr + layer)
        if (row >= 0) & (slot >= 0):
            # What the next layer will see: the stored hidden state, rounded to its dtype, plus the residual.
            seen = (result.to(tl.float32) + rest).to(capture_ptr.dtype.element_ty)
            target = (slot.to(tl.int64) * capture_rows + row) * SIZE
            tl.store(capture_ptr + target + offsets, seen, mask=mask)


def intervene(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    layer: int,
    *,
    program_of_token: torch.Tensor,
    counts: torch.Tensor,
    ops: torch.Tensor,
    bank: torch.Tensor,
    capture_row_of_token: torch.Tensor,
    capture_slot_of_layer: torch.Tensor,
    capture: torch.Tensor,
) -> torch.Tensor:
    """Return ``hidden`` changed by each token's program; store the captured rows.

    Parameters
    ----------
    hidden, residual
        [tokens, hidden_size], contiguous, float32, bfloat16 or float16.
    layer
        Index of the decoder block.
    program_of_token, counts, ops, bank
        The buffers of :class:`chatspace_lab.runtime.tables.Tables`.
    capture_row_of_token
        [max_tokens] int32, −1 for none.
    capture_slot_of_layer
        [layers] int32, −1 for a layer that nobody captures in this step.
    capture
        [slots, rows, hidden_size].
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
        counts,
        ops,
        bank,
        capture_row_of_token,
        capture_slot_of_layer,
        capture,
        layer,
        counts.shape[1],
        capture.shape[1],
        SIZE=size,
        BLOCK=block,
        MAX_OPS=ops.shape[2],
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if block <= 4096 else 8,
    )
    return out

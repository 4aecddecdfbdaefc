"""A step on a GPU: tables filled in stream order; captured rows stored by the operator into page-locked shared memory.

There is no capture buffer on the device and no copy afterwards: the kernel process maps the memory that the operator
wrote. Pinned host buffers are reused only after their copy has ended (a ring of four, each guarded by an event).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from chatspace_lab.runtime import kernel_triton
from chatspace_lab.runtime.pool import SharedPool
from chatspace_lab.runtime.routing import StepPlan, ranges
from chatspace_lab.runtime.store import Placement
from chatspace_lab.runtime.tables import Tables

RING = 4
SLAB_BYTES = 256 << 20


class TokenBuffer:
    """A per-token buffer on the GPU that is zero beyond what the last step wrote, filled through pinned memory."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._pinned = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=True) for _ in range(RING)]
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self._next = self._used = 0

    def fill(self, values: np.ndarray | None) -> None:
        """Write one step's values, in stream order; None is all zero."""
        count = 0 if values is None else len(values)
        if not count and not self._used:
            return
        reach = max(count, self._used)
        index, self._next = self._next, (self._next + 1) % RING
        self._events[index].synchronize()
        pinned = self._pinned[index]
        host = pinned.numpy()
        if values is not None:
            host[:count] = values
        host[count:reach] = 0
        self._target[:reach].copy_(pinned[:reach], non_blocking=True)
        self._events[index].record()
        self._used = count


class CudaBackend:
    """Implements :class:`chatspace_lab.runtime.core.Backend` on a GPU."""

    def __init__(self, tables: Tables, dtype: torch.dtype) -> None:
        self._tables, self._dtype = tables, dtype
        self._captured = 0  # tokens up to the last captured one of the step
        self._program_of_token = TokenBuffer(tables.program_of_token)
        self._capture_of_token = TokenBuffer(tables.capture_of_token)
        self._capture_row_of_token = TokenBuffer(tables.capture_row_of_token)

    def begin(self, step: StepPlan, slots: Sequence[int], placements: Sequence[Placement]) -> None:
        programs = None if step.programs is None else np.asarray(slots, dtype=np.int32)[step.programs]
        self._program_of_token.fill(programs)
        self._captured = int(step.capture_rows[-1]) + 1 if placements else 0
        if not placements:
            self._capture_of_token.fill(None)
            return
        captures = self._tables.captures
        segments = {placement.segment.name: placement.segment for placement in placements}

        def write(slots: list[int], names: list[int]) -> None:
            for slot, name in zip(slots, names, strict=True):
                segments[name].write_addresses(captures.host[slot])

        slot_of = dict(zip(segments, captures.place(list(segments), write), strict=True))
        starts, counts, segment, rows = zip(*placements, strict=True)
        tokens = step.capture_rows[ranges(starts, counts)]
        capture, row = np.zeros(self._captured, dtype=np.int32), np.zeros(self._captured, dtype=np.int32)
        capture[tokens] = np.repeat([slot_of[each.name] for each in segment], counts)
        row[tokens] = ranges(rows, counts)
        self._capture_of_token.fill(capture)
        self._capture_row_of_token.fill(row)

    def advance(self) -> None:
        if self._captured:
            self._tables.capture_row_of_token[: self._captured] += 1

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
        tables = self._tables
        kernel_triton.intervene(
            hidden,
            residual,
            layer,
            program_of_token=tables.program_of_token,
            programs=tables.programs.values,
            bank=tables.bank,
            capture_of_token=tables.capture_of_token,
            capture_row_of_token=tables.capture_row_of_token,
            captures=tables.captures.values,
        )

    @staticmethod
    def make_pool(limit: int) -> SharedPool:
        """Return the pool for captured rows; empty slabs are kept, since locking pages takes longer than a request."""
        return SharedPool(
            limit, slab_bytes=min(SLAB_BYTES, limit), lock_pages=_lock_pages, unlock_pages=_unlock_pages, keep=limit
        )

    def fence(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record()
        return event.query

    def drain(self) -> None:
        torch.cuda.current_stream().synchronize()

    def idle(self) -> None:
        self._program_of_token.fill(None)
        self._capture_of_token.fill(None)


def _lock_pages(address: int, nbytes: int) -> None:
    # 1: for every context; with unified addressing the GPU uses the same address.
    result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 1)
    if int(result) != 0:
        raise RuntimeError(f"cannot lock {nbytes:,} bytes of host memory for captures: {result}")


def _unlock_pages(address: int, nbytes: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

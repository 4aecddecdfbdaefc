"""A step on a CPU: the tables, read by a compiled loop; captured rows copied straight into shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from chatspace_lab.runtime import kernel_cpu
from chatspace_lab.runtime.pool import SharedPool
from chatspace_lab.runtime.routing import StepPlan
from chatspace_lab.runtime.store import Placement
from chatspace_lab.runtime.tables import Tables
from chatspace_lab.wire import LARGEST_HALF


def _rows(index: np.ndarray) -> slice | torch.Tensor:
    """Return ascending row numbers as a slice where they are consecutive: a view instead of a copy."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


class CpuBackend:
    """Implements :class:`chatspace_lab.runtime.core.Backend` on the host."""

    def __init__(self, tables: Tables, dtype: torch.dtype) -> None:
        self._tables = tables
        self._row_bytes = tables.hidden_size * dtype.itemsize
        self._programs = tables.programs.host
        self._coefficients = self._programs.view(np.float32)
        self._bank = tables.bank.numpy()
        self._active = False
        self._nothing = np.zeros((1, 1), dtype=np.float32)
        one = np.zeros((1, tables.hidden_size), dtype=np.float32)
        # Compiles the loop now, while the engine starts, rather than in somebody's first request.
        for has_residual in (False, True):
            self._steer(one, one.copy(), has_residual, np.zeros(1, dtype=np.int32), 0)

    def _steer(
        self, hidden: np.ndarray, residual: np.ndarray, has_residual: bool, programs: np.ndarray, layer: int
    ) -> None:
        kernel_cpu.steer(
            hidden, residual, has_residual, programs, self._programs, self._coefficients, self._bank, layer
        )

    def begin(self, step: StepPlan, slots: Sequence[int], placements: Sequence[Placement]) -> None:
        self._active = True
        self._steers: np.ndarray = np.zeros(self._tables.layers, dtype=bool)
        if step.programs is not None:
            slot_of_token = np.asarray(slots, dtype=np.int32)[step.programs]
            steered = np.flatnonzero(slot_of_token)
            self._steered_rows = _rows(steered)
            self._steered_programs = slot_of_token[steered]
            self._steers = np.any(self._programs[list(slots), :, 0, 0], axis=0)
        self._captured_rows = _rows(step.capture_rows)
        self._advanced = 0
        # Per layer the copies to make: (address, first captured row, bytes).
        self._copies: dict[int, list[tuple[int, int, int]]] = {}
        for start, count, segment, row in placements:
            address = segment.region.address + row * self._row_bytes
            for index, layer in enumerate(segment.layers):
                copy = (address + index * segment.layer_bytes, start, count * self._row_bytes)
                self._copies.setdefault(layer, []).append(copy)

    def advance(self) -> None:
        self._advanced += self._row_bytes

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
        if not self._active:
            return
        index = int(layer)
        if self._steers[index]:
            self._apply_programs(hidden, residual, index)
        copies = self._copies.get(index)
        if copies:
            rows = hidden[self._captured_rows]
            if residual is not None:
                rows = (rows + residual[self._captured_rows]).to(hidden.dtype)
            rows = rows.contiguous()
            for address, start, nbytes in copies:
                ctypes.memmove(address + self._advanced, rows.data_ptr() + start * self._row_bytes, nbytes)

    def _apply_programs(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> None:
        rows = self._steered_rows
        steered = hidden[rows]
        changed = steered.to(torch.float32).contiguous()
        rest = self._nothing if residual is None else residual[rows].to(torch.float32).contiguous().numpy()
        self._steer(changed.numpy(), rest, residual is not None, self._steered_programs, layer)
        if hidden.dtype == torch.float16:
            offset = torch.from_numpy(rest) if residual is not None else 0.0
            changed = (changed + offset).clamp(-LARGEST_HALF, LARGEST_HALF) - offset
        if not (isinstance(rows, slice) and changed is steered):  # else it was changed in place
            hidden[rows] = changed.to(hidden.dtype)

    @staticmethod
    def make_pool(limit: int) -> SharedPool:
        """Return the pool for captured rows; freed memory goes back to the system at once."""
        return SharedPool(limit)

    def fence(self) -> Callable[[], bool]:
        """Nothing is ever under way: rows are copied as they are computed."""
        return lambda: True

    def drain(self) -> None:
        """Nothing is ever under way."""

    def idle(self) -> None:
        self._active = False

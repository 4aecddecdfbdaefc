"""A step on a CPU: the same buffers, read by a compiled loop; captures by plain row copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chatspace_lab.runtime import kernel_cpu
from chatspace_lab.runtime.routing import StepPlan
from chatspace_lab.runtime.tables import Tables


def _rows(index: np.ndarray) -> slice | torch.Tensor:
    """Return ascending row numbers as a slice where they are consecutive: a view instead of a copy."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


class CpuBackend:
    """Implements :class:`chatspace_lab.runtime.core.Backend` on the host."""

    def __init__(self, tables: Tables, dtype: torch.dtype) -> None:
        self._tables, self._dtype = tables, dtype
        self._ops = tables.ops.numpy()
        self._coefficients = self._ops.view(np.float32)
        self._counts = tables.counts.numpy()
        self._bank = tables.bank.numpy()
        self._step: StepPlan | None = None
        self._nothing = np.zeros((1, 1), dtype=np.float32)
        one = np.zeros((1, tables.hidden_size), dtype=np.float32)
        # Compiles the loop now, while the engine starts, rather than in somebody's first request.
        for has_residual in (False, True):
            self._steer(one, one.copy(), has_residual, np.zeros(1, dtype=np.int32), 0)

    def _steer(
        self, hidden: np.ndarray, residual: np.ndarray, has_residual: bool, programs: np.ndarray, layer: int
    ) -> None:
        kernel_cpu.steer(
            hidden, residual, has_residual, programs, self._counts, self._ops, self._coefficients, self._bank, layer
        )

    def begin(self, step: StepPlan, slots: Sequence[int]) -> None:
        self._step = step
        self._steers = np.zeros(self._tables.layers, dtype=bool)
        if step.programs is not None:
            slot_of_token = np.asarray(slots, dtype=np.int32)[step.programs]
            steered = np.flatnonzero(slot_of_token)
            self._steered_rows = _rows(steered)
            self._steered_programs = slot_of_token[steered]
            self._steers = self._tables.steers(slots)
        self._captured_rows = _rows(step.capture_rows)
        self._capture_index = {layer: index for index, layer in enumerate(step.capture_layers)}
        self._captured = torch.empty(
            len(step.capture_layers), len(step.capture_rows), self._tables.hidden_size, dtype=self._dtype
        )

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
        out = hidden.clone(memory_format=torch.contiguous_format)
        if self._step is None:
            return out
        if self._steers[layer]:
            self._apply_programs(out, residual, layer)
        index = self._capture_index.get(layer)
        if index is not None:
            rows, target = self._captured_rows, self._captured[index]
            if residual is None:
                target.copy_(out[rows])
            else:
                torch.add(out[rows], residual[rows], out=target)
        return out

    def _apply_programs(self, out: torch.Tensor, residual: torch.Tensor | None, layer: int) -> None:
        rows = self._steered_rows
        changed = out[rows].to(torch.float32)
        rest = self._nothing if residual is None else residual[rows].to(torch.float32).contiguous().numpy()
        self._steer(changed.numpy(), rest, residual is not None, self._steered_programs, layer)
        if not (isinstance(rows, slice) and out.dtype == torch.float32):  # else it was changed in place
            out[rows] = changed.to(out.dtype)

    def finish(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        for move in step.moves:
            layers = move.target.layers
            rows = self._captured[:, move.start : move.stop]
            if len(layers) != len(step.capture_layers):
                rows = rows[[self._capture_index[layer] for layer in layers]]
            move.target.write(move.first, rows)

    def drain(self) -> None:
        """Nothing is ever under way: ``finish`` copied it."""

    def idle(self) -> None:
        self._step = None

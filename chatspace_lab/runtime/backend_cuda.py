"""A step on a GPU: buffers filled in stream order, captures copied to pinned memory on a side stream.

Three things may overlap and must not collide: the next step filling a pinned buffer whose copy still runs (a ring of
four, each guarded by an event), the next step writing capture rows that are still being read (each range of rows is
guarded by the event of its copy), and the host filing rows that have not arrived (done by a thread that waits for them).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatspace_lab.runtime import kernel_triton
from chatspace_lab.runtime.routing import CaptureMove, StepPlan
from chatspace_lab.runtime.tables import Tables

RING = 4
STAGED_ROWS = 1024
"""Up to this many rows, all layers are gathered and copied at once; above, layer by layer, to spare memory."""
MAX_BACKLOG = 64
"""Steps that may wait to be filed; then the engine waits, rather than pile up pinned memory."""


class PinnedRing:
    """Host buffers for asynchronous copies to the GPU, reused only after their copy has ended."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self._next = 0

    def send(self, values: np.ndarray, target: torch.Tensor) -> None:
        """Copy ``values`` into the head of ``target``, in stream order."""
        index, self._next = self._next, (self._next + 1) % RING
        self._events[index].synchronize()
        count = len(values)
        self._buffers[index].numpy()[:count] = values
        target[:count].copy_(self._buffers[index][:count], non_blocking=True)
        self._events[index].record()


@dataclass
class _Arriving:
    event: torch.cuda.Event
    rows: torch.Tensor
    layers: list[int]
    moves: list[CaptureMove]


class CudaBackend:
    """Implements :class:`chatspace_lab.runtime.core.Backend` on a GPU."""

    def __init__(self, tables: Tables, dtype: torch.dtype) -> None:
        self._tables = tables
        device, tokens = tables.device, tables.program_of_token.numel()
        self._capture_row_of_token = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self._capture_slot_of_layer = torch.full((tables.layers,), -1, dtype=torch.int32, device=device)
        self._capture = torch.empty(tables.layers, tokens, tables.hidden_size, dtype=dtype, device=device)
        self._programs, self._rows, self._slots = PinnedRing(tokens), PinnedRing(tokens), PinnedRing(tables.layers)
        self._stream = torch.cuda.Stream(device)
        self._next_row = 0
        self._reading: list[tuple[int, int, torch.cuda.Event]] = []
        self._captured_layers: list[int] = []
        self._steered_tokens = self._captured_tokens = 0
        self._step: StepPlan | None = None
        self._offset = 0
        self._arriving: queue.Queue[_Arriving] = queue.Queue(MAX_BACKLOG)
        self._failure: BaseException | None = None
        threading.Thread(target=self._file, name="chatspace-lab-captures", daemon=True).start()

    def begin(self, step: StepPlan, slots: Sequence[int]) -> None:
        self._step = step
        self._fill_programs(step, slots)
        self._fill_captures(step)

    def _fill_programs(self, step: StepPlan, slots: Sequence[int]) -> None:
        steered = step.tokens if step.programs is not None else 0
        values = np.zeros(max(steered, self._steered_tokens), dtype=np.int32)
        if step.programs is not None:
            values[:steered] = np.asarray(slots, dtype=np.int32)[step.programs]
        if len(values):
            self._programs.send(values, self._tables.program_of_token)
        self._steered_tokens = steered

    def _fill_captures(self, step: StepPlan) -> None:
        count = len(step.capture_rows)
        captured = int(step.capture_rows[-1]) + 1 if count else 0
        if captured or self._captured_tokens:
            values = np.full(max(captured, self._captured_tokens), -1, dtype=np.int32)
            if count:
                self._offset = self._claim(count)
                values[step.capture_rows] = np.arange(self._offset, self._offset + count, dtype=np.int32)
            self._rows.send(values, self._capture_row_of_token)
        self._captured_tokens = captured
        if step.capture_layers != self._captured_layers and count:
            wanted = np.full(self._tables.layers, -1, dtype=np.int32)
            wanted[step.capture_layers] = np.arange(len(step.capture_layers))
            self._slots.send(wanted, self._capture_slot_of_layer)
            self._captured_layers = step.capture_layers

    def _claim(self, count: int) -> int:
        """Return the first of ``count`` rows of the capture buffer, once nobody reads them any more."""
        if self._next_row + count > self._capture.shape[1]:
            self._next_row = 0
        start, stop = self._next_row, self._next_row + count
        self._next_row = stop
        current = torch.cuda.current_stream()
        left = []
        for low, high, event in self._reading:
            if low < stop and start < high:
                current.wait_event(event)
            elif not event.query():
                left.append((low, high, event))
        self._reading = left
        return start

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
        tables = self._tables
        return kernel_triton.intervene(
            hidden,
            residual,
            layer,
            program_of_token=tables.program_of_token,
            counts=tables.counts,
            ops=tables.ops,
            bank=tables.bank,
            capture_row_of_token=self._capture_row_of_token,
            capture_slot_of_layer=self._capture_slot_of_layer,
            capture=self._capture,
        )

    def finish(self) -> None:
        step, self._step = self._step, None
        if step is None or not step.moves:
            return
        layers, count = len(step.capture_layers), len(step.capture_rows)
        source = self._capture[:layers, self._offset : self._offset + count]
        rows = torch.empty(layers, count, self._tables.hidden_size, dtype=source.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if count <= STAGED_ROWS:
                rows.copy_(source.contiguous(), non_blocking=True)
            else:
                for index in range(layers):
                    rows[index].copy_(source[index], non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._reading.append((self._offset, self._offset + count, event))
        self._arriving.put(_Arriving(event, rows, step.capture_layers, step.moves))

    def _file(self) -> None:
        """Put arrived rows where they belong. Runs on a thread of its own."""
        while True:
            arriving = self._arriving.get()
            try:
                arriving.event.synchronize()
                index = {layer: number for number, layer in enumerate(arriving.layers)}
                for move in arriving.moves:
                    rows = arriving.rows[:, move.start : move.stop]
                    if len(move.target.layers) != len(arriving.layers):
                        rows = rows[[index[layer] for layer in move.target.layers]]
                    move.target.write(move.first, rows)
            except BaseException as error:  # noqa: BLE001 - raised by drain, in the RPC that asks for the rows
                self._failure = error
            finally:
                self._arriving.task_done()

    def drain(self) -> None:
        self._arriving.join()
        if self._failure is not None:
            raise RuntimeError("captured rows could not be filed") from self._failure

    def idle(self) -> None:
        self._step = None
        if self._steered_tokens:
            self._tables.program_of_token.zero_()
            self._steered_tokens = 0
        if self._captured_tokens:
            self._capture_row_of_token.fill_(-1)
            self._captured_tokens = 0

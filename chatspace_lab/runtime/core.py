"""What a worker does in each step: register requests, lay out the step, let the operator act, keep the captures.

The order within a step is fixed by the adapters (``v1``, ``v2``): :meth:`Runtime.admit` before the runner looks at the
scheduler's output, :meth:`Runtime.begin` once the runner has fixed the order of its batch, the forward pass, then
:meth:`Runtime.finish`. Warm-up, profiling and dummy runs call :meth:`Runtime.idle` and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from chatspace_lab import wire
from chatspace_lab.runtime.routing import BatchRow, Routed, StepPlan, plan
from chatspace_lab.runtime.store import CaptureBuffer, CaptureStore
from chatspace_lab.runtime.tables import Tables


class Backend(Protocol):
    """The device's part of a step."""

    def begin(self, step: StepPlan, slots: Sequence[int]) -> None:
        """Fill the step's buffers. ``slots`` are the table slots of ``step.distinct``."""

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
        """Steer and capture at one layer."""

    def finish(self) -> None:
        """Hand the step's captures on to their buffers, now or when they have been copied."""

    def drain(self) -> None:
        """Wait until every capture so far has reached its buffer."""

    def idle(self) -> None:
        """Make the next forward pass one that is neither steered nor captured."""


class Runtime:
    """One worker's requests and what is done about them."""

    def __init__(self, tables: Tables, store: CaptureStore, backend: Backend) -> None:
        self.tables, self.store, self.backend = tables, store, backend
        self._requests: dict[str, Routed] = {}
        self._active = False

    def admit(self, finished: Iterable[str], arrived: Iterable[tuple[str, Mapping[str, Any] | None]]) -> None:
        """Forget requests that left the engine and read the payloads of those that came.

        ``arrived`` may name a request again (a runner that drops preempted requests does); its captures go on.
        """
        for request_id in finished:
            self._requests.pop(request_id, None)
        for request_id, extra in arrived:
            payload = (extra or {}).get(wire.EXTRA)
            if payload is None:
                continue
            capture: CaptureBuffer | None = None
            if payload["capture_layers"]:
                capture = self.store.open(payload["key"], payload["capture_layers"], payload["capture_spans"])
            program = bytes(payload["ops"])
            if program or capture is not None:
                self._requests[request_id] = Routed(program, payload["steer_spans"], capture)

    def begin(self, batch: Sequence[BatchRow]) -> None:
        """Lay out a step over the runner's batch, in the runner's order."""
        if not self._requests:
            self.idle()
            return
        step = plan(batch, self._requests)
        if step.programs is None and not step.moves:
            self.idle()
            return
        slots = self.tables.place(step.distinct)
        self.backend.begin(step, [slots[program] for program in step.distinct])
        self._active = True

    def finish(self) -> None:
        """End the step."""
        if self._active:
            self.backend.finish()

    def stats(self) -> dict[str, int]:
        """Return what is held: requests under way, programs and captures."""
        return {"requests": len(self._requests), **self.store.stats()}

    def idle(self) -> None:
        """Leave the next forward pass alone."""
        if self._active:
            self.backend.idle()
            self._active = False

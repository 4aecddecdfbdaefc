"""What a worker does in each step: register requests, lay out the step, let the operator act, keep the captures.

The order within a step is fixed by the adapters (``v1``, ``v2``): :meth:`Runtime.admit` before the runner looks at the
scheduler's output, :meth:`Runtime.begin` once the runner has fixed the order of its batch, then the forward pass.
Warm-up, profiling and dummy runs call :meth:`Runtime.idle` and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.runtime.routing import BatchRow, Routed, StepPlan, plan
from chatspace_lab.runtime.steady import Steady
from chatspace_lab.runtime.store import CaptureBuffer, CaptureStore, Placement
from chatspace_lab.runtime.tables import Tables


class Arrival(NamedTuple):
    """A request that came to the worker: ``extra`` is its ``SamplingParams.extra_args``."""

    request_id: str
    extra: Mapping[str, Any] | None
    prompt_len: int
    max_tokens: int | None


class Backend(Protocol):
    """The device's part of a step."""

    def begin(self, step: StepPlan, slots: Sequence[int], placements: Sequence[Placement]) -> None:
        """Fill the step's buffers. ``slots`` are the table slots of ``step.distinct``."""

    def advance(self) -> None:
        """Make the next step like the last one, each captured token one row further."""

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
        """Steer, in place, and capture at one layer."""

    def fence(self) -> Callable[[], bool]:
        """Mark this moment in the device's work; the function says whether that work is done."""

    def drain(self) -> None:
        """Wait until every captured row so far is where it belongs."""

    def idle(self) -> None:
        """Make the next forward pass one that is neither steered nor captured."""


class Runtime:
    """One worker's requests and what is done about them.

    Parameters
    ----------
    tables, store, backend
        The worker's own.
    captures
        Whether this worker keeps captured rows. Of the workers of a tensor-parallel engine, which all compute the same
        residual stream, one does.
    """

    def __init__(self, tables: Tables, store: CaptureStore, backend: Backend, *, captures: bool) -> None:
        self.tables, self.store, self.backend = tables, store, backend
        self._captures = captures
        self._requests: dict[str, Routed] = {}
        self._active = False
        self._steady: Steady | None = None
        self._retired = 0
        self._continued = 0

    def admit(self, finished: Iterable[str], arrived: Iterable[Arrival]) -> None:
        """Forget requests that left the engine and read the payloads of those that came.

        ``arrived`` may name a request again (a runner that drops preempted requests does); its captures go on.
        """
        for request_id in finished:
            self._requests.pop(request_id, None)
        for arrival in arrived:
            self._steady = None
            payload = (arrival.extra or {}).get(wire.EXTRA)
            if payload is None:
                continue
            capture: CaptureBuffer | None = None
            if payload["capture_layers"] and self._captures:
                capture = self.store.open(
                    payload["key"],
                    payload["capture_layers"],
                    payload["capture_spans"],
                    arrival.prompt_len,
                    arrival.prompt_len + max((arrival.max_tokens or 0) - 1, 0),  # the last token is never computed
                )
            program = bytes(payload["ops"])
            if program or capture is not None:
                self._requests[arrival.request_id] = Routed(program, payload["steer_spans"], capture)

    def begin(self, ids: Sequence[str], counts: np.ndarray, first: np.ndarray) -> None:
        """Lay out a step over the runner's batch.

        Parameters
        ----------
        ids
            Of the batch's requests, in the runner's order.
        counts, first
            [requests] tokens of each in this step, and the absolute position of its first one.
        """
        if not self._requests:
            self.idle()
            return
        # Memory that a capture gave back while its request goes on must not be written again.
        unchanged = self.store.retirements == self._retired
        if unchanged and self._steady is not None and self._steady.goes_on(ids, counts, first):
            if self._active:
                self.backend.advance()
            return
        self._retired = self.store.retirements
        batch = [BatchRow(*row) for row in zip(ids, counts.tolist(), first.tolist(), strict=True)]
        step = self._lay_out(batch)
        self._steady = Steady.after(batch, step)

    def _lay_out(self, batch: Sequence[BatchRow]) -> StepPlan:
        self._continued += sum(row.first > 0 and row.count > 1 for row in batch)
        step = plan(batch, self._requests)
        placements: list[Placement] = []
        start = 0
        for target, first, count in step.moves:
            placements += target.place(start, first, count)
            start += count
        if step.programs is None and not placements:
            self.idle()
            return step
        slots = self.tables.place_programs(step.distinct)
        self.backend.begin(step, [slots[program] for program in step.distinct], placements)
        self._active = True
        return step

    def stats(self) -> dict[str, int]:
        """Return what is held, and which paths were taken: a test must know that it took the one it means.

        ``requests`` under way; what the store holds; ``continued``: parts of prompts that went on where an earlier step
        had stopped, or a cached prefix; ``recomputed``: captured positions that were computed again.
        """
        return {"requests": len(self._requests), "continued": self._continued, **self.store.stats()}

    def idle(self) -> None:
        """Leave the next forward pass alone."""
        self._steady = None
        if self._active:
            self.backend.idle()
            self._active = False

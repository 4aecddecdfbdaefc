"""Which token of a step gets which program, and where its activation goes. Pure: no engine, no device.

A runner's batch arrives as :class:`BatchRow` in the order of its tokens. Positions are absolute within a request, so
chunked prefill, preemption and recomputation need no case of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from chatspace_lab.spans import overlaps


class BatchRow(NamedTuple):
    """One request's part of a step: ``count`` consecutive tokens from absolute position ``first``."""

    request_id: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    first: int


class CaptureTarget(Protocol):
    """Where captured rows of one request go."""

    @property
    def spans(self) -> Sequence[int]:
        """Positions to capture, as flat spans."""
        ...

    def place(self, start: int, first: int, count: int) -> list[Any]:
        """Return where the step's captured tokens from the ``start``-th on go."""
        ...

    def room(self, position: int) -> int:
        """Return how many captured positions after ``position`` go to the rows right behind its own."""
        ...

    def follow(self, clock: Any, first: int) -> None:
        """Count one further position as written, from ``first`` on, at each tick of the clock."""
        ...


@dataclass
class Routed:
    """A request as the router sees it."""

    program: bytes = b""
    steer_spans: Sequence[int] = (0, -1)
    capture: CaptureTarget | None = None


class CaptureMove(NamedTuple):
    """The next ``count`` captured tokens of the step belong to ``target``, from position ``first`` on."""

    target: CaptureTarget
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count


@dataclass
class StepPlan:
    """What one step does.

    Attributes
    ----------
    tokens
        Number of real tokens of the step.
    programs
        [tokens] index into ``distinct``, or None if nothing is steered.
    distinct
        Programs that occur, ``b""`` first.
    capture_rows
        [captured] indices of the tokens to capture, ascending.
    moves
        Whose they are, in the same order.
    """

    tokens: int
    programs: np.ndarray | None = None
    distinct: list[bytes] = field(default_factory=lambda: [b""])
    capture_rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    moves: list[CaptureMove] = field(default_factory=list)


def plan(batch: Sequence[BatchRow], requests: Mapping[str, Routed]) -> StepPlan:
    """Lay out one step. Requests that the router was not told about are left alone."""
    starts = list(itertools.accumulate((row.count for row in batch), initial=0))
    step = StepPlan(tokens=starts[-1])
    known = [requests.get(row.request_id) for row in batch]
    steered = [request is not None and bool(request.program) for request in known]
    if any(steered):
        index = {b"": 0}
        programs = np.zeros(step.tokens, dtype=np.int32)
        for row, start, request in zip(batch, starts, known, strict=False):
            if request is None or not request.program:
                continue
            number = index.setdefault(request.program, len(index))
            for low, high in overlaps(request.steer_spans, row.first, row.count):
                programs[start + low - row.first : start + high - row.first] = number
        step.programs, step.distinct = programs, list(index)
    rows: list[int] = []
    for row, start, request in zip(batch, starts, known, strict=False):
        if request is None or request.capture is None:
            continue
        for low, high in overlaps(request.capture.spans, row.first, row.count):
            rows.extend(range(start + low - row.first, start + high - row.first))
            step.moves.append(CaptureMove(request.capture, low, high - low))
    if rows:
        step.capture_rows = np.array(rows)
    return step

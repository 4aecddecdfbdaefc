"""Which token of a step gets which program, and where its activation goes. Pure: no engine, no device.

A runner's batch arrives as :class:`BatchRow` in the order of its tokens. Positions are absolute within a request, so
chunked prefill, preemption and recomputation need no case of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from chatspace_lab.spans import FOREVER, lasting, overlaps


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
    lasting
        How many steps can follow, of one token more of each request, in which the same ones are steered and captured.
    """

    tokens: int
    programs: np.ndarray | None = None
    distinct: list[bytes] = field(default_factory=lambda: [b""])
    capture_rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    moves: list[CaptureMove] = field(default_factory=list)
    lasting: int = FOREVER


def ranges(starts: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return ``start, start + 1, …``, ``count`` of them, for each of these, one after the other: [sum of counts]."""
    sizes = np.asarray(counts, dtype=np.int64)
    offsets = np.asarray(starts, dtype=np.int64) - (np.cumsum(sizes) - sizes)
    return np.repeat(offsets, sizes) + np.arange(int(sizes.sum()))


def plan(batch: Sequence[BatchRow], requests: Mapping[str, Routed]) -> StepPlan:
    """Lay out one step. Requests that the router was not told about are left alone."""
    step = StepPlan(tokens=0)
    numbers: list[int] = []  # the program of each request's last token
    index = {b"": 0}
    mixed: list[tuple[int, int, int]] = []  # (first token, behind the last, program) where the request's tokens differ
    captured: list[int] = []
    start = 0
    for request_id, count, first in batch:
        number, request = 0, requests.get(request_id)
        if request is not None and request.program:
            parts = overlaps(request.steer_spans, first, count)
            last = first + count - 1
            if parts:
                program = index.setdefault(request.program, len(index))
                number = program if parts[-1][1] > last else 0
                if parts[0] != (first, last + 1):
                    mixed += [(start, start + count, 0)]
                    mixed += [(start + low - first, start + high - first, program) for low, high in parts]
            step.lasting = min(step.lasting, lasting(request.steer_spans, last))
        if request is not None and request.capture is not None:
            for low, high in overlaps(request.capture.spans, first, count):
                captured.append(start + low - first)
                step.moves.append(CaptureMove(request.capture, low, high - low))
            step.lasting = min(step.lasting, lasting(request.capture.spans, first + count - 1))
        numbers.append(number)
        start += count
    step.tokens = start
    if len(index) > 1:
        step.distinct = list(index)
        step.programs = np.repeat(np.array(numbers, dtype=np.int32), [count for _, count, _ in batch])
        for low, high, number in mixed:
            step.programs[low:high] = number
    if captured:
        step.capture_rows = ranges(captured, [move.count for move in step.moves])
    return step

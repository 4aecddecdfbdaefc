"""Steps that only go on: the same requests, one token each, one position further than in the step before.

Nearly every step is one, and nothing need be laid out again for it: programs stay with their tokens, and captured rows
move on by one. What ends it: another batch, the edge of a span of positions, a full segment of captured rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatspace_lab.runtime.routing import BatchRow, StepPlan


class Steady:
    """Counts how many steps have gone on from one that was laid out.

    Attributes
    ----------
    ticks
        Steps so far. Captures count their written positions by it (``CaptureBuffer.follow``).
    """

    def __init__(self, ids: Sequence[str], first: np.ndarray, steps: int) -> None:
        self._ids, self._next, self._steps = list(ids), first + 1, steps
        self.ticks = 0

    @classmethod
    def after(cls, batch: Sequence[BatchRow], step: StepPlan) -> Steady | None:
        """Return what can follow a step that was laid out, or None if it was more than a token of each request."""
        if step.tokens != len(batch):
            return None
        steps = min([step.lasting, *(target.room(position) for target, position, _ in step.moves)])
        steady = cls([row.request_id for row in batch], np.array([row.first for row in batch]), steps)
        for target, position, _ in step.moves:
            target.follow(steady, position + 1)
        return steady

    def goes_on(self, ids: Sequence[str], counts: np.ndarray, first: np.ndarray) -> bool:
        """Whether this batch follows the last one, and if so, count it.

        Parameters
        ----------
        ids
            Of the batch's requests, in its order.
        counts, first
            [requests] tokens of each, and the absolute position of its first one.
        """
        if (
            self.ticks >= self._steps
            or len(ids) != len(self._ids)
            or int(counts.sum()) != len(self._ids)
            or not np.array_equal(first, self._next)
            or list(ids) != self._ids
        ):
            return False
        self._next += 1
        self.ticks += 1
        return True

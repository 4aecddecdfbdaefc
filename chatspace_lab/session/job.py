"""One call of a user: how far it has come, and what it has so far if it is interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

CURRENT: contextvars.ContextVar[Job | None] = contextvars.ContextVar("chatspace_lab_job", default=None)
"""The call that a request belongs to; tasks inherit it."""

INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
"""What a blocking call ends with when the stop button is pressed: the latter in a coroutine."""

DELAY_S = 1.0
"""A bar is shown for work that takes longer."""


class Job:
    """Counts the requests of one call.

    Attributes
    ----------
    title
        Shown beside the bar.
    total, done
        Requests; ``total`` grows as they begin, unless it is known beforehand.
    tokens
        Generated so far.
    runs
        The requests.
    partial
        Gives what the call has so far.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.done = self.tokens = 0
        self.runs: list[Any] = []
        self._known: int | None = None
        self.partial: Callable[[], Any] | None = None

    @property
    def total(self) -> int:
        """Requests of this call, as far as is known."""
        return len(self.runs) if self._known is None else self._known

    def expect(self, total: int) -> None:
        """Say how many requests there will be."""
        self._known = total

    def began(self, run: Any) -> None:
        """Take note of a request."""
        self.runs.append(run)

    def ended(self) -> None:
        """Count a request that has ended."""
        self.done += 1


class Bar:
    """Draws a job, in the thread that waits for it: output of another thread would land in another cell."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def tick(self) -> None:
        """Draw, if there is something to see."""
        job = self._job
        if self._bar is None:
            if job.total < 2:
                return
            self._bar = tqdm(
                total=job.total, desc=job.title, unit="request", leave=False, delay=DELAY_S, file=sys.stderr
            )
        self._bar.total = job.total
        self._bar.set_postfix(tokens=job.tokens, refresh=False)
        self._bar.update(job.done - self._bar.n)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

"""One call of a user: how far it has come, and what it has so far if it is interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from chatspace_lab.session.line import Line

CURRENT: contextvars.ContextVar[Job | None] = contextvars.ContextVar("chatspace_lab_job", default=None)
"""The call that a request belongs to; tasks inherit it."""

INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
"""What a blocking call ends with when the stop button is pressed: the latter in a coroutine."""

DELAY_S = 1.0
"""A bar is shown for work on several requests that takes longer."""

ALONE_S = 5.0
"""And for a single request that does."""

LOG_S = 10.0
"""Seconds between two lines about it in a log."""

WIDTH = 24
"""Characters of a bar."""


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
    notes
        What is to be told when it ends: sentences, and warnings.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.done = self.tokens = 0
        self.runs: list[Any] = []
        self.notes: list[str | Warning] = []
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
        """Count a request that was answered."""
        self.done += 1


def tell(note: str | Warning) -> None:
    """Print a sentence or issue a warning, in the thread that waits for the current call, if there is one."""
    job = CURRENT.get()
    if job is not None:
        job.notes.append(note)
    else:
        say(note)


def say(note: str | Warning) -> None:
    """Print a sentence, or issue a warning."""
    if isinstance(note, Warning):
        warnings.warn(note, stacklevel=4)
    else:
        print(note)


class Bar:
    """Shows how far a job is, in the thread that waits for it: output of another thread would land in another cell.

    The line appears after :data:`DELAY_S`, or after ten seconds where output is neither a terminal nor a notebook. A
    notebook keeps its final state.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = time.monotonic()
        self._line = Line(LOG_S)

    def __enter__(self) -> Bar:
        return self

    def tick(self) -> None:
        """Draw, if there is something to see."""
        delay = DELAY_S if self._job.total > 1 else ALONE_S
        if self._job.total and time.monotonic() - self._begun >= delay:
            self._line.show(self._text())

    def _text(self) -> str:
        job = self._job
        seconds = time.monotonic() - self._begun
        if job.total == 1:
            return f"{job.title} · {job.tokens:,} tokens · {seconds:.0f} s"
        filled = WIDTH * job.done // job.total
        done = f"{job.done} of {job.total} requests" if job.done else f"{job.total} requests under way"
        return f"{job.title} {'█' * filled}{'░' * (WIDTH - filled)} {done} · {job.tokens:,} tokens · {seconds:.0f} s"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._line.shown:
            ended = "" if kind is None else " · interrupted" if issubclass(kind, INTERRUPTS) else " · failed"
            self._line.end(self._text() + ended, keep=False)

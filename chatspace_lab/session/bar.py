"""A progress bar for a call that blocks, and its notes for the user."""

from __future__ import annotations

import asyncio
import time
import warnings
from types import TracebackType

from chatspace_lab.engine.observer import Progress
from chatspace_lab.session.line import Line

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


def say(note: str | Warning) -> None:
    """Print a sentence, or issue a warning."""
    if isinstance(note, Warning):
        warnings.warn(note, stacklevel=4)
    else:
        print(note)


class Bar:
    """Shows how far a call is, in the thread that waits for it: output of another thread would land in another cell.

    The line appears after :data:`DELAY_S`, or after ten seconds where output is neither a terminal nor a notebook. A
    notebook keeps its final state.

    Parameters
    ----------
    title
        Stands before the bar.
    progress
        Of the call.
    """

    def __init__(self, title: str, progress: Progress) -> None:
        self._title, self._progress = title, progress
        self._begun = time.monotonic()
        self._line = Line(LOG_S)

    def __enter__(self) -> Bar:
        return self

    def tick(self) -> None:
        """Draw, if there is something to see."""
        delay = DELAY_S if self._progress.total > 1 else ALONE_S
        if self._progress.total and time.monotonic() - self._begun >= delay:
            self._line.show(self._text())

    def _text(self) -> str:
        now, seconds = self._progress, time.monotonic() - self._begun
        if now.total == 1:
            return f"{self._title} · {now.tokens:,} tokens · {seconds:.0f} s"
        filled = WIDTH * now.done // now.total
        done = f"{now.done} of {now.total} requests" if now.done else f"{now.total} requests under way"
        return f"{self._title} {'█' * filled}{'░' * (WIDTH - filled)} {done} · {now.tokens:,} tokens · {seconds:.0f} s"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._line.shown:
            ended = "" if kind is None else " · interrupted" if issubclass(kind, INTERRUPTS) else " · failed"
            self._line.end(self._text() + ended, keep=False)

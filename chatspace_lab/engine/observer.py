"""Observers of requests, subscriptions that end, and the progress of one call."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from chatspace_lab.chat import Completion

if TYPE_CHECKING:
    from chatspace_lab.engine.requests import Submission
    from chatspace_lab.engine.stream import StreamDelta
    from chatspace_lab.readings import Readings

T = TypeVar("T")


class Observer(Protocol):
    """Receives the events of every request on the engine's loop. Methods must return at once and must not raise."""

    def began(self, submission: Submission) -> None:
        """Note a request that goes to the engine."""

    def received(self, submission: Submission, piece: StreamDelta) -> None:
        """Note a piece of its answer."""

    def read(self, submission: Submission, readings: Readings) -> None:
        """Note readings of the rows that were computed since the last."""

    def ended(self, submission: Submission, error: BaseException | None) -> None:
        """Note its end: answered, failed, or aborted (``error`` is ``CancelledError`` then)."""


class Subscription(Generic[T]):
    """One member of a list of callbacks or observers. :meth:`end` takes it off the list; so does a ``with`` block."""

    def __init__(self, members: list[T], member: T) -> None:
        self._members, self._member = members, member
        members.append(member)

    def end(self) -> None:
        """Stop calling the callback or observer. A second call does nothing."""
        self._members[:] = [each for each in self._members if each is not self._member]

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Progress:
    """Follows one call: how many requests it has, how far they are, and what they have generated so far.

    Pass one to a call, and look at it from another task or thread while the call runs.

    Attributes
    ----------
    total
        Requests of the call; grows as they begin, unless the call knows the number beforehand.
    done
        Requests that were answered.
    tokens
        Generated so far.
    notes
        Sentences and warnings for the user, to be shown when the call has ended.

    Examples
    --------
    ::

        progress = Progress()
        task = asyncio.create_task(lab.aio.capture(prompts, [15], "mean", progress=progress))
        while not task.done():
            print(f"{progress.done} of {progress.total}")
            await asyncio.sleep(1)
    """

    def __init__(self) -> None:
        self.done = self.tokens = 0
        self.notes: list[str | Warning] = []
        self._known: int | None = None
        self._answers: dict[str, _Answer] = {}
        self._partial: Callable[[], Any] | None = None

    @property
    def total(self) -> int:
        """Requests of the call, as far as is known."""
        return len(self._answers) if self._known is None else self._known

    @property
    def cut_off(self) -> int:
        """Answers so far that reached their ``max_tokens``, of a call that generates answers."""
        return sum(each.finish_reason == "length" for each in self._answers.values())

    @property
    def partial(self) -> object:
        """The finished part of a sweep or capture, or the texts generated so far; None before the first request."""
        if self._partial is not None:
            return self._partial()
        return [each.value() for each in self._answers.values()] or None

    def expect(self, total: int, partial: Callable[[], Any] | None = None) -> None:
        """Set the number of requests, and a function that returns the finished part."""
        self._known, self._partial = total, partial

    def began(self, submission: Submission) -> None:
        """Note a request."""
        if self._partial is None:
            self._answers[submission.request_id] = _Answer(submission)

    def received(self, submission: Submission, piece: StreamDelta) -> None:
        """Note a piece of its answer."""
        self.tokens += len(piece.token_ids)
        if self._partial is None:
            self._answers[submission.request_id].add(piece)

    def read(self, submission: Submission, readings: Readings) -> None:
        """Leave readings to others."""

    def ended(self, submission: Submission, error: BaseException | None) -> None:
        """Count a request that was answered."""
        self.done += error is None


class _Answer:
    """What one request has generated so far."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._text = ""
        self._token_ids: list[int] = []
        self.finish_reason: str | None = None

    def add(self, piece: StreamDelta) -> None:
        self._text += piece.text
        self._token_ids.extend(piece.token_ids)
        self.finish_reason = piece.finish_reason or self.finish_reason

    def value(self) -> str:
        if self._submission.prompt.chat is None:
            return Completion(self._text, self.finish_reason)
        return self._submission.response(self._text, self._token_ids, self.finish_reason)

"""An answer that arrives piece by piece, in a plain ``for`` loop."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, cast

from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.session.bar import INTERRUPTS

if TYPE_CHECKING:
    from chatspace_lab.chat import ChatResponse
    from chatspace_lab.readings import Readings
    from chatspace_lab.session.handle import LabCaptureHandle
    from chatspace_lab.session.lab import LabSession


class LabStream(Iterator[StreamDelta]):
    """Iterate with ``for`` over :class:`StreamDelta`: text, token ids and, if asked for, readings.

    The request is aborted when the loop is left early: by ``break`` in a ``with`` block or once the stream is dropped,
    by an exception, or by the stop button. What had come by then is in ``lab.partial``, also if the button was pressed
    while the loop's own body ran.

    Attributes
    ----------
    text, token_ids, finish_reason, handle, readings
        As of :class:`TextStream`: what has arrived so far.
    """

    def __init__(self, lab: LabSession, stream: TextStream) -> None:
        self._open = False
        self._lab, self._stream = lab, stream
        self._loop: LoopThread = lab.aio.execution.loop

    def __iter__(self) -> LabStream:
        return self

    def __next__(self) -> StreamDelta:
        self._open = True
        try:
            delta = self._loop.call(_next(self._stream))
        except INTERRUPTS:
            try:
                self.close()
            finally:  # also if the button is pressed again
                self._lab.partial = self.text
            raise
        if delta is None:
            self._open = False
            raise StopIteration
        return delta

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return self._stream.text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of it."""
        return self._stream.token_ids

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` once the answer is complete."""
        return self._stream.finish_reason

    @property
    def handle(self) -> LabCaptureHandle | None:
        """The captures, if asked for."""
        return cast("LabCaptureHandle | None", self._stream.handle)  # made by LabSession.stream

    @property
    def readings(self) -> Readings | None:
        """All norms and projections that have arrived so far, if asked for."""
        return self._stream.readings

    def response(self) -> ChatResponse:
        """Return what has arrived as a :class:`ChatResponse`."""
        return self._stream.response()

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._open = False
        self._loop.call(self._stream.aclose())

    def __del__(self) -> None:
        # The stop button may well be pressed while the loop's own body runs: then nothing here is told of it.
        if self._open:
            self._lab.partial = self.text

    def __enter__(self) -> LabStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            if kind is not None and issubclass(kind, INTERRUPTS):
                self._lab.partial = self.text


async def _next(stream: TextStream) -> StreamDelta | None:
    return await anext(stream, None)

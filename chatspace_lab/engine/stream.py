"""Answers that arrive piece by piece, readable from any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse, RenderedChat
from chatspace_lab.engine.loop import RemoteTask
from chatspace_lab.readings import Readings


@dataclass(frozen=True)
class StreamDelta:
    """One piece of an answer.

    Attributes
    ----------
    text
        New text; empty while a character is incomplete.
    token_ids
        New tokens.
    finish_reason
        ``"stop"`` or ``"length"`` with the last piece, None before.
    readings
        Of the rows that were computed since the last piece, if asked for: first those of the prompt. A token's own row
        is computed when the next token is, so the newest token is never among them.
    cached_tokens
        Of the prompt, those whose keys and values came from the cache and were not computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    readings: Readings | None = None
    cached_tokens: int = 0

    def __str__(self) -> str:
        return self.text


Pump = Callable[[Callable[[StreamDelta], None]], RemoteTask[None]]
"""Starts a request that hands each piece on, and returns its task."""


class TextStream(AsyncIterator[StreamDelta]):
    """Iterate with ``async for`` over :class:`StreamDelta`.

    The request is aborted when its task is cancelled, when an ``async with`` block on the stream is left or
    :meth:`aclose` awaited before the end, and when the stream is dropped: ``async for … in model.stream(…)`` may break.

    Attributes
    ----------
    request_id : str
        Names the request.
    text : str
        What has arrived so far.
    token_ids : list of int
        The tokens of it.
    finish_reason : str or None
        Set when the answer is complete.
    cached_tokens : int
        Of the prompt, those whose keys and values came from the cache.
    handle : CaptureHandle or None
        The captures, if asked for; ready once the stream has ended, also when it was left early.
    """

    def __init__(self, request_id: str, pump: Pump, handle: CaptureHandle | None, chat: RenderedChat | None) -> None:
        self.request_id = request_id
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.handle = handle
        self._readings: list[Readings] = []
        self._chat = chat
        self._pump = pump
        self._task: RemoteTask[None] | None = None
        self._queue: asyncio.Queue[StreamDelta | None] | None = None
        self._closed_unused = self._left = False

    def _start(self) -> asyncio.Queue[StreamDelta | None]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamDelta | None] = asyncio.Queue()

        def put(item: StreamDelta | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        self._task = self._pump(put)
        self._task.finished.add_done_callback(lambda _: put(None))
        return queue

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._closed_unused:
            raise StopAsyncIteration
        if self._queue is None:
            self._queue = self._start()
        assert self._task is not None
        try:
            delta = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if delta is None:
            self._queue.put_nowait(None)  # the end stays the end
            if not self._left:
                self._task.finished.result()
            raise StopAsyncIteration
        self._take(delta)
        return delta

    def _take(self, delta: StreamDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.cached_tokens = delta.cached_tokens
        if delta.readings is not None:
            self._readings.append(delta.readings)

    @property
    def readings(self) -> Readings | None:
        """All readings that have arrived so far; None if none did."""
        return Readings.join(self._readings) if self._readings else None

    async def aclose(self) -> None:
        """Abort the request if it still runs, and wait until the engine has let go of it."""
        if self._task is None or self._queue is None:
            self._closed_unused = True
            if self.handle is not None:
                self.handle.close()
        elif not self._task.finished.done():
            self._left = True
            self._task.cancel()
            while (delta := await self._queue.get()) is not None:
                self._take(delta)
            self._queue.put_nowait(None)

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        task = getattr(self, "_task", None)
        if task is not None and not task.finished.done():
            task.cancel()

    def response(self) -> ChatResponse:
        """Return what has arrived as a :class:`ChatResponse`."""
        return ChatResponse(self.text, self._chat.prefill if self._chat else "", self.finish_reason)

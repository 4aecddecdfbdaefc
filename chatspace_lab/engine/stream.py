"""Answers that arrive piece by piece, readable from any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse
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


class _Mailbox:
    """What is put on one thread is got on any event loop, in order. None is the end, which stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[StreamDelta | None] = deque()
        self._readers: list[concurrent.futures.Future[None]] = []

    def put(self, item: StreamDelta | None) -> None:
        with self._lock:
            self._items.append(item)
            readers, self._readers = self._readers, []
        for reader in readers:
            if reader.set_running_or_notify_cancel():
                reader.set_result(None)

    async def get(self) -> StreamDelta | None:
        while True:
            with self._lock:
                if self._items:
                    return None if self._items[0] is None else self._items.popleft()
                reader: concurrent.futures.Future[None] = concurrent.futures.Future()
                self._readers.append(reader)
            await asyncio.wrap_future(reader)


class TextStream(AsyncIterator[StreamDelta]):
    """Iterate with ``async for`` over :class:`StreamDelta`.

    The request is aborted when its task is cancelled, when an ``async with`` block on the stream is left or
    :meth:`aclose` awaited before the end, and when the stream is dropped: ``async for … in model.stream(…)`` may break.

    Attributes
    ----------
    request_id : str
        Names the request.
    text : str
        The text of all tokens that have arrived so far. While stop strings are looked for, vLLM holds back the end of
        the text: the pieces come later, and do not have what turns out to be a stop string.
    token_ids : list of int
        The tokens of it.
    finish_reason : str or None
        Set when the answer is complete.
    cached_tokens : int
        Of the prompt, those whose keys and values came from the cache.
    handle : CaptureHandle or None
        The captures, if asked for; ready once the stream has ended, also when it was left early.
    """

    def __init__(
        self,
        request_id: str,
        pump: Pump,
        handle: CaptureHandle | None,
        respond: Callable[[str, list[int], str | None], ChatResponse],
        held_back: Callable[[list[int], str], str],
        *,
        read_only: bool = False,
    ) -> None:
        self.request_id = request_id
        self._sent = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.handle = None if read_only else handle
        self._rows = handle
        self._readings: list[Readings] = []
        self._respond, self._held_back = respond, held_back
        self._pump = pump
        self._task: RemoteTask[None] | None = None
        self._mailbox = _Mailbox()
        self._closed_unused = self._left = False

    def _start(self) -> RemoteTask[None]:
        put = self._mailbox.put
        task = self._pump(put)
        task.finished.add_done_callback(lambda _: put(None))
        return task

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._closed_unused:
            raise StopAsyncIteration
        if self._task is None:
            self._task = self._start()
        try:
            delta = await self._mailbox.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if delta is None:
            if not self._left:
                self._task.finished.result()
            raise StopAsyncIteration
        self._take(delta)
        return delta

    def _take(self, delta: StreamDelta) -> None:
        self._sent += delta.text
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.cached_tokens = delta.cached_tokens
        if delta.readings is not None:
            self._readings.append(delta.readings)

    @property
    def text(self) -> str:
        """The text of all tokens that have arrived so far."""
        return self._sent if self.finish_reason else self._sent + self._held_back(self.token_ids, self._sent)

    @property
    def readings(self) -> Readings | None:
        """All readings that have arrived so far; None if none did."""
        return Readings.join(self._readings) if self._readings else None

    async def aclose(self) -> None:
        """Abort the request if it still runs, and wait until the engine has let go of it."""
        if self._task is None:
            self._closed_unused = True
            if self._rows is not None:
                self._rows.close()
        elif not self._task.finished.done():
            self._left = True
            self._task.cancel()
            while (delta := await self._mailbox.get()) is not None:
                self._take(delta)

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        task, rows = self._task, self._rows
        if task is None and rows is not None:
            rows.close()  # it never began, and never will
        elif task is not None and not task.finished.done():
            task.cancel()

    def response(self) -> ChatResponse:
        """Return what has arrived as a :class:`ChatResponse`."""
        return self._respond(self.text, self.token_ids, self.finish_reason)

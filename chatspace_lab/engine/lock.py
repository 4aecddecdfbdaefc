"""A readers-writer lock for one event loop: first come, first served, so that no writer starves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AsyncRWLock:
    """Many readers or one writer.

    Requests are granted in the order in which they were made: a reader that comes after a waiting writer waits for it.
    """

    def __init__(self) -> None:
        self._readers = 0
        self._writing = False
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        """Hold the lock together with other readers."""
        await self._acquire(writer=False)
        try:
            yield
        finally:
            self._readers -= 1
            self._grant()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        await self._acquire(writer=True)
        try:
            yield
        finally:
            self._writing = False
            self._grant()

    def _free_for(self, writer: bool) -> bool:
        return not self._writing and not (writer and self._readers)

    def _take(self, writer: bool) -> None:
        if writer:
            self._writing = True
        else:
            self._readers += 1

    async def _acquire(self, writer: bool) -> None:
        if not self._queue and self._free_for(writer):
            self._take(writer)
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (writer, turn)
        self._queue.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment: give it back
                if writer:
                    self._writing = False
                else:
                    self._readers -= 1
            elif entry in self._queue:  # else a release has passed it over
                self._queue.remove(entry)
            self._grant()
            raise

    def _grant(self) -> None:
        while self._queue:
            writer, turn = self._queue[0]
            if not self._free_for(writer):
                return
            self._queue.popleft()
            if turn.cancelled():
                continue
            self._take(writer)
            turn.set_result(None)

"""Reading a request while it runs: norms and projections of each token, computed in the worker as tokens arrive."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.engine.captures import CaptureBroker
from chatspace_lab.engine.stream import StreamDelta
from chatspace_lab.engine.together import ended
from chatspace_lab.errors import LabError
from chatspace_lab.readings import Readings
from chatspace_lab.steering.directions import DirectionSet

Put = Callable[[StreamDelta], None]


class LiveReader:
    """Adds readings to the pieces of one request. Pieces that arrive while a reading is under way are joined.

    Parameters
    ----------
    broker
        Reads the rows.
    handle
        The request's captures.
    directions
        What is read, and at which layers.
    note
        Called with each reading.
    """

    def __init__(
        self,
        broker: CaptureBroker,
        handle: CaptureHandle,
        directions: DirectionSet,
        note: Callable[[Readings], None],
    ) -> None:
        self._broker, self._handle, self._directions, self._note = broker, handle, directions, note
        self._waiting: list[StreamDelta] = []
        self._generated: list[int] = []
        self._wake = asyncio.Event()
        self._read = self._from = 0  # rows read, and the position after the last of them

    def received(self, delta: StreamDelta) -> None:
        """Take a piece as the engine gives it."""
        self._waiting.append(delta)
        self._wake.set()

    async def run(self, request: Coroutine[Any, Any, None], put: Put) -> None:
        """Run the request and hand its pieces on, with readings of all rows that were computed until then."""
        task = asyncio.ensure_future(request)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            while self._waiting or not task.done():
                await self._wake.wait()
                self._wake.clear()
                if self._waiting:
                    put(await self._next())
            await task
        except LabError:
            if task.done():
                await task  # a request that failed lost its rows, so that reading them failed too: it says why
            raise
        finally:
            await ended([task])
            for piece in self._waiting:  # left early: what has come is not read any more
                put(piece)

    async def _next(self) -> StreamDelta:
        waiting, self._waiting = self._waiting, []
        delta = dataclasses.replace(
            waiting[-1],
            text="".join(piece.text for piece in waiting),
            token_ids=tuple(token for piece in waiting for token in piece.token_ids),
        )
        self._generated.extend(delta.token_ids)
        handle = self._handle
        if not self._generated:
            return delta  # no row is known to be computed
        if handle.state == "running":
            handle.advance(self._generated)
        try:
            [values] = await self._broker.reduce(
                [handle], self._directions.layers, "read", self._directions.units, first=self._from
            )
        except BaseException:
            self._waiting.insert(0, delta)
            raise
        readings = handle.label(values, self._directions, first=self._read)
        self._note(readings)
        self._read += len(readings)
        self._from = handle.prompt_len + len(self._generated) - 1
        return dataclasses.replace(delta, readings=readings)

"""Captured rows in a worker, per request and absolute position, until the kernel process lets go of them."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from chatspace_lab.readings import reduce_rows
from chatspace_lab.runtime.pool import Region, SharedPool
from chatspace_lab.spans import FOREVER, overlaps, rank

FIRST_ANSWER_ROWS = 64
"""Rows reserved for the answer at first. Longer answers get further segments, each twice as large as the one before."""


class Segment(NamedTuple):
    """Rows ``[first, first + rows)`` of a capture: [layers, rows, hidden_size] in shared memory.

    ``name`` is never given twice: a capture that is closed and begun again under its key lies elsewhere.
    """

    name: int
    first: int
    rows: int
    layers: list[int]
    region: Region
    layer_bytes: int

    def write_addresses(self, row: np.ndarray) -> None:
        """Fill a row of the captures table: [layers] int64."""
        row[:] = 0
        row[self.layers] = self.region.address + np.arange(len(self.layers)) * self.layer_bytes


class Placement(NamedTuple):
    """``count`` captured tokens of a step, the ``start``-th and following, go to rows ``row`` and on of ``segment``."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    segment: Segment
    row: int


class Clock(Protocol):
    """Counts steps that only went on from the one before."""

    @property
    def ticks(self) -> int:
        """How many there were."""
        ...


class CaptureBuffer:
    """The captured rows of one request.

    A row belongs to an absolute position, so a recomputed token lands on its former self.

    Parameters
    ----------
    store
        Where it belongs.
    key
        Its name.
    layers
        Captured layers, sorted.
    spans
        Captured positions, flat.
    expected
        Positions that the request will compute, at most.
    prompt_len
        Positions that it will compute for certain.
    """

    def __init__(
        self, store: CaptureStore, key: str, layers: Sequence[int], spans: Sequence[int], prompt_len: int, expected: int
    ) -> None:
        self._store = store
        self.key, self.layers, self.spans = key, list(layers), list(spans)
        self.failure: str | None = None
        self.segments: list[Segment] = []
        self._rows = 0  # of all segments
        self._written = bytearray()  # 1 at each captured position that was computed
        self._clock: Clock | None = None
        self._following = (0, 0)
        self._expected = rank(spans, expected)
        self._next = min(rank(spans, prompt_len) + FIRST_ANSWER_ROWS, self._expected)

    def place(self, start: int, first: int, count: int) -> list[Placement]:
        """Return where the step's captured tokens from the ``start``-th on, at positions from ``first`` on, go.

        Segments are made if need be. The positions must all be captured ones. Nothing is returned, and nothing will be
        written, once the capture has failed.
        """
        self._settle()
        row = rank(self.spans, first)
        stop = row + count
        while not self.failure and self._rows < stop:
            self._extend(stop)
        if self.failure:
            return []
        self._mark(first, count)
        last = self.segments[-1]
        if row >= last.first:  # nearly always
            return [Placement(start, count, last, row - last.first)]
        placements = []
        for segment in self.segments:
            low, high = max(row, segment.first), min(stop, segment.first + segment.rows)
            if low < high:
                placements.append(Placement(start + low - row, high - low, segment, low - segment.first))
        return placements

    def _extend(self, needed: int) -> None:
        first = self._rows
        rows = max(self._next, needed - first, 1)
        layer_bytes = rows * self._store.row_bytes
        region = self._store.take(len(self.layers) * layer_bytes)
        if region is None:
            self.failure = (
                f"captures would pass max_capture_bytes ({self._store.pool.limit:,} bytes): fetch or close earlier "
                f"handles, capture fewer layers, or raise max_capture_bytes"
            )
            self._free()
            return
        self.segments.append(Segment(next(self._store.names), first, rows, self.layers, region, layer_bytes))
        self._rows += rows
        self._next = min(2 * rows, max(self._expected - first - rows, 1))

    def room(self, position: int) -> int:
        """Return how many captured positions after ``position`` go to the rows right behind its own."""
        if not self.segments:
            return FOREVER  # a capture that has failed is written nowhere
        row = rank(self.spans, position)
        end = next(each.first + each.rows for each in reversed(self.segments) if each.first <= row)
        return end - row - 1

    def follow(self, clock: Clock, first: int) -> None:
        """Count one further position as written, from ``first`` on, at each tick of the clock."""
        self._clock, self._following = clock, (first, clock.ticks)

    def _settle(self) -> None:
        if self._clock is not None and self._clock.ticks > self._following[1]:
            first, seen = self._following
            count = self._clock.ticks - seen
            self._mark(first, count)
            self._following = (first + count, seen + count)

    def _mark(self, first: int, count: int) -> None:
        stop = first + count
        if stop > len(self._written):
            self._written.extend(bytes(max(stop, 2 * len(self._written), 64) - len(self._written)))
        self._store.recomputed += self._written.count(1, first, stop)
        self._written[first:stop] = b"\1" * count

    def positions(self, stop: int) -> np.ndarray:
        """Return the captured positions below ``stop``, ascending.

        Raises
        ------
        RuntimeError
            If one that should have been captured never was.
        """
        self._settle()
        wanted = np.zeros(stop, dtype=bool)
        for low, high in overlaps(self.spans, 0, stop):
            wanted[low:high] = True
        have = np.zeros(stop, dtype=bool)
        written = np.frombuffer(bytes(self._written[:stop]), dtype=bool)
        have[: len(written)] = written
        missing = np.flatnonzero(wanted & ~have)
        if len(missing):
            raise RuntimeError(
                f"{len(missing)} of {int(wanted.sum())} positions were never captured, the first is {missing[0]}"
            )
        return np.flatnonzero(wanted)

    def rows(self, first: int, stop: int, layers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the rows at the captured positions of ``[first, stop)``, [layers, rows, hidden_size], as a copy.

        Raises
        ------
        RuntimeError
            If one that should have been captured never was.
        """
        self.positions(stop)
        low, high = rank(self.spans, first), rank(self.spans, stop)
        chosen = [self.layers.index(layer) for layer in layers]
        parts = []
        for segment in self.segments:
            start, end = max(low, segment.first), min(high, segment.first + segment.rows)
            if start < end:
                slab, offset, _ = segment.region
                count = len(self.layers) * segment.layer_bytes // dtype.itemsize
                flat = torch.frombuffer(slab.memory, dtype=dtype, count=count, offset=offset)
                rows = flat.view(len(self.layers), segment.rows, -1)
                parts.append(rows[chosen, start - segment.first : end - segment.first])
        if not parts:
            return torch.empty(len(chosen), 0, self._store.row_bytes // dtype.itemsize, dtype=dtype)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _free(self) -> None:
        self._store.retire([segment.region for segment in self.segments])
        self.segments, self._rows = [], 0

    def close(self) -> None:
        """Give the memory back; later rows go nowhere."""
        if self.failure is None:
            self.failure = "the capture was closed"
        self._free()


class CaptureStore:
    """All capture buffers of one worker, by key.

    Parameters
    ----------
    pool
        Shared memory for the rows.
    hidden_size, dtype
        Of a row.
    fence
        Marks this moment in the device's work, and returns a function that says whether that work is done.
    """

    def __init__(
        self, pool: SharedPool, hidden_size: int, dtype: torch.dtype, fence: Callable[[], Callable[[], bool]]
    ) -> None:
        self.pool, self.dtype = pool, dtype
        self.row_bytes = hidden_size * dtype.itemsize
        self.recomputed = 0
        self.retirements = 0
        self.names = itertools.count()
        self._fence = fence
        self._retired: deque[tuple[Callable[[], bool], list[Region]]] = deque()
        self._buffers: dict[str, CaptureBuffer] = {}

    def take(self, nbytes: int) -> Region | None:
        """Return memory, or None if there may be no more."""
        self.reclaim()
        return self.pool.take(nbytes)

    def retire(self, regions: list[Region]) -> None:
        """Give memory back once the device cannot write there any more: a step under way may still hold its address."""
        self.retirements += 1
        if regions:
            self._retired.append((self._fence(), regions))
        self.reclaim()

    def reclaim(self) -> None:
        """Free retired memory whose time has come."""
        while self._retired and self._retired[0][0]():
            for region in self._retired.popleft()[1]:
                self.pool.put_back(region)

    def open(
        self, key: str, layers: Sequence[int], spans: Sequence[int], prompt_len: int, expected: int
    ) -> CaptureBuffer:
        """Return the buffer named ``key``, made if it is new."""
        if key not in self._buffers:
            self._buffers[key] = CaptureBuffer(self, key, layers, spans, prompt_len, expected)
        return self._buffers[key]

    def fetch(self, wanted: Sequence[tuple[str, int]], *, shared: bool) -> dict[str, Any]:
        """Tell the kernel process where the rows below a position of some buffers are.

        Parameters
        ----------
        wanted
            (key, number of positions that the request computed).
        shared
            As places in shared memory, which stay until :meth:`release`; otherwise as bytes.

        Returns
        -------
        dict
            ``pid`` of this process; ``crowded``, whether more than half of the memory is taken; ``entries``: per key
            its ``segments`` as [file, offset, bytes, rows used, rows reserved] or [data, rows used, rows reserved],
            or a ``failure``.
        """
        entries: dict[str, Any] = {}
        for key, stop in wanted:
            buffer = self._buffers.get(key)
            if buffer is None:
                entries[key] = {"failure": "the workers hold no captures under this name"}
            elif buffer.failure:
                entries[key] = {"failure": buffer.failure, "limit": True}
            else:
                try:
                    entries[key] = self._entry(buffer, stop, shared)
                except RuntimeError as error:
                    entries[key] = {"failure": str(error)}
        return {"pid": os.getpid(), "crowded": 2 * self.pool.used > self.pool.limit, "entries": entries}

    def _entry(self, buffer: CaptureBuffer, stop: int, shared: bool) -> dict[str, Any]:
        positions = buffer.positions(stop)
        segments: list[list[Any]] = []
        for segment in buffer.segments:
            used = min(len(positions) - segment.first, segment.rows)
            if used <= 0:
                break
            slab, offset, nbytes = segment.region
            if shared:
                segments.append([slab.fd, offset, nbytes, used, segment.rows])
            else:
                segments.append([bytes(slab.memory[offset : offset + nbytes]), used, segment.rows])
        return {"segments": segments}

    def reduce(
        self, key: str, first: int, stop: int, layers: Sequence[int], how: str, units: np.ndarray
    ) -> dict[str, Any]:
        """Read numbers off the captured rows of a buffer at positions ``[first, stop)``, which the request computed.

        Returns
        -------
        dict
            ``data``, float32 bytes of what :func:`chatspace_lab.readings.reduce_rows` returns, and its ``shape``; or
            a ``failure``.
        """
        buffer = self._buffers.get(key)
        if buffer is None:
            return {"failure": "the workers hold no captures under this name"}
        if buffer.failure:
            return {"failure": buffer.failure, "limit": True}
        try:
            rows = buffer.rows(first, stop, layers, self.dtype)
        except RuntimeError as error:
            return {"failure": str(error)}
        values = reduce_rows(rows, how, units)
        return {"data": values.astype(np.float32, copy=False).tobytes(), "shape": list(values.shape)}

    def release(self, keys: Sequence[str]) -> None:
        """Drop buffers. Unknown names are fine: they are gone already."""
        for key in keys:
            buffer = self._buffers.pop(key, None)
            if buffer is not None:
                buffer.close()

    def stats(self) -> dict[str, int]:
        """Return how much is held: buffers, bytes given out, and bytes mapped."""
        self.reclaim()
        return {
            "buffers": len(self._buffers),
            "nbytes": self.pool.used,
            "mapped": self.pool.mapped,
            "recomputed": self.recomputed,
        }

"""Getting captured rows from the workers into this process, and telling the workers what may go."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.errors import CaptureClosedError, CaptureError, CaptureLimitError, LabError
from chatspace_lab.readings import reduce_rows
from chatspace_lab.spans import rank

MAP_BYTES = 256 << 10
"""Captures of fewer bytes are copied: a process may hold only so many mappings."""

Rpc = Callable[..., Awaitable[list[Any]]]


class CaptureBroker:
    """The kernel's end of the workers' capture stores.

    Parameters
    ----------
    loop
        The engine's loop, on which everything here runs; only :meth:`fetch` and :meth:`discard` are called from others.
    rpc
        Calls a method on all workers and returns their answers, the first worker's first.
    dtype, hidden_size
        Of captured rows.
    limit
        Bytes that unfetched captures may take in a worker.
    shared
        Whether rows come through shared memory.
    """

    def __init__(
        self,
        loop: LoopThread,
        rpc: Rpc,
        *,
        dtype: torch.dtype,
        hidden_size: int,
        limit: int,
        shared: bool,
    ) -> None:
        self._thread, self._loop, self._rpc = loop, loop.loop, rpc
        self._dtype, self._row_bytes = dtype, hidden_size * dtype.itemsize
        self._limit, self.shared = limit, shared
        self._fetching = asyncio.Lock()
        self._waiting: list[CaptureHandle] = []
        self._held: dict[str, int] = {}
        self._gone: list[str] = []
        self._flush: asyncio.Task[None] | None = None

    def admit(self, handles: Sequence[CaptureHandle]) -> None:
        """Count the prompts of new captures as held.

        Raises
        ------
        CaptureLimitError
            If they do not fit beside what is held. Nothing has run then.
        """
        new = {h.request_id: rank(h.spans, h.prompt_len) * len(h.layer_indices) * self._row_bytes for h in handles}
        held = sum(self._held.values())
        if held + sum(new.values()) > self._limit:
            raise CaptureLimitError(
                f"{len(self._held)} captures that were not fetched hold {held:,} bytes, and this call needs "
                f"{sum(new.values()):,} more for its prompts; max_capture_bytes is {self._limit:,}: fetch or close "
                f"earlier handles, capture fewer layers, or raise max_capture_bytes"
            )
        self._held.update(new)

    def completed(self, handle: CaptureHandle) -> None:
        """Correct what a finished request holds."""
        if handle.request_id in self._held:
            self._held[handle.request_id] = len(handle.positions) * len(handle.layer_indices) * self._row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that unfetched captures take in a worker."""
        return sum(self._held.values())

    async def fetch(self, handles: Sequence[CaptureHandle]) -> None:
        """Bring the rows of all these handles here in one round; those that are here already are left alone.

        Raises
        ------
        CaptureClosedError, CaptureError, CaptureLimitError
            If any cannot be given; the others are fetched all the same.
        """
        await self._thread.run(self._fetch_to_the_end(handles))

    async def _fetch_to_the_end(self, handles: Sequence[CaptureHandle]) -> None:
        # Shielded: rows that the workers have handed out must arrive, so that they can be freed.
        await asyncio.shield(asyncio.ensure_future(self._fetch(handles)))

    async def _fetch(self, handles: Sequence[CaptureHandle]) -> None:
        failures: dict[str, LabError] = {}
        self._waiting += handles
        async with self._fetching:
            # An answer takes up to a step of the engine, so one round brings what everybody waits for. Who finds its
            # rows not here when its turn comes asks again: they failed, and the failure belongs to it.
            everybody, self._waiting = [*handles, *self._waiting], []
            wanted: dict[str, CaptureHandle] = {}
            for handle in everybody:
                key = handle.request_id
                if handle.state == "ready" and not handle.computed:  # cut off before the first token
                    handle.receive(self._empty(handle))
                    self.discard(key)
                elif handle.state == "ready":
                    wanted[key] = handle
            for handle in handles:
                key = handle.request_id
                if handle.state == "closed":
                    failures[key] = CaptureClosedError(f"the captures of request {key} were closed")
                elif handle.state == "running":
                    failures[key] = CaptureError(f"request {key} has not ended yet: await it, then fetch")
            if wanted:
                asked = [[key, handle.computed] for key, handle in wanted.items()]
                answer = (await self._rpc(wire.RPC_FETCH, asked, self.shared))[0]
                failed = self._receive(answer, wanted)
                failures.update({h.request_id: failed[h.request_id] for h in handles if h.request_id in failed})
        if failures:
            raise next(iter(failures.values()))

    async def reduce(
        self, handles: Sequence[CaptureHandle], layers: Sequence[int], how: str, units: np.ndarray, first: int = 0
    ) -> list[np.ndarray]:
        """Read numbers off the rows of all these handles in one round: in the workers, or here if they were fetched.

        Parameters
        ----------
        layers
            Of the captured ones.
        how
            ``"read"``, ``"mean"``, ``"last"`` or ``"typical"`` (:mod:`chatspace_lab.readings`).
        units
            ``[layers or 1, directions, hidden_size]`` float32; used by ``"read"``.
        first
            Position from which on rows count. A running request is read as far as it has come.

        Raises
        ------
        CaptureClosedError, CaptureError, CaptureLimitError
        """
        return await self._thread.run(self._reduce(handles, layers, how, units, first))

    async def _reduce(
        self, handles: Sequence[CaptureHandle], layers: Sequence[int], how: str, units: np.ndarray, first: int
    ) -> list[np.ndarray]:
        for handle in handles:
            if handle.state == "closed":
                raise CaptureClosedError(f"the captures of request {handle.request_id} were closed")
            if handle.state == "running" and not handle.computed:
                raise CaptureError(
                    f"request {handle.request_id} has not ended yet: await it, then read, or stream it with read_layers"
                )
            if how != "read" and not rank(handle.spans, handle.computed):
                raise CaptureError(f"request {handle.request_id} has no rows to pool")
        away = [handle for handle in handles if not handle.is_fetched and handle.computed]
        found: dict[str, np.ndarray] = {}
        if away:
            wanted = [[handle.request_id, first, handle.computed] for handle in away]
            asked = (wanted, list(layers), how, units.tobytes(), list(units.shape))
            for handle, entry in zip(away, (await self._rpc(wire.RPC_REDUCE, *asked))[0], strict=True):
                if "failure" in entry:
                    kind = CaptureLimitError if entry.get("limit") else CaptureError
                    raise kind(f"request {handle.request_id}: {entry['failure']}")
                values = np.frombuffer(bytearray(entry["data"]), dtype=np.float32)
                found[handle.request_id] = values.reshape(entry["shape"])
        return [
            found[handle.request_id]
            if handle.request_id in found
            else self._reduce_here(handle, layers, how, units, first)
            for handle in handles
        ]

    def _reduce_here(
        self, handle: CaptureHandle, layers: Sequence[int], how: str, units: np.ndarray, first: int
    ) -> np.ndarray:
        start = rank(handle.spans, first)
        if not handle.is_fetched:  # nothing was computed yet
            return reduce_rows(self._empty(handle)[: len(layers)], how, units)
        return reduce_rows(torch.stack([handle.hidden(layer)[start:] for layer in layers]), how, units)

    def _receive(self, answer: dict[str, Any], wanted: dict[str, CaptureHandle]) -> dict[str, LabError]:
        failures: dict[str, LabError] = {}
        with contextlib.ExitStack() as stack:
            files: dict[int, Any] = {}

            def opened(fd: int) -> Any:
                if fd not in files:
                    files[fd] = stack.enter_context(_open(f"/proc/{answer['pid']}/fd/{fd}"))
                return files[fd]

            for key, entry in answer["entries"].items():
                if "failure" in entry:
                    kind = CaptureLimitError if entry.get("limit") else CaptureError
                    failures[key] = kind(f"request {key}: {entry['failure']}")
                    continue
                handle = wanted[key]
                if handle.state == "closed":  # while this answer was under way
                    continue
                rows = self._rows(key, handle, entry["segments"], opened, copy=answer["crowded"])
                handle.receive(rows)
                self._held.pop(key, None)
        return failures

    def _rows(
        self, key: str, handle: CaptureHandle, segments: list[Any], opened: Callable[[int], Any], *, copy: bool
    ) -> torch.Tensor:
        """Return [layers, rows, hidden_size]: the workers' own memory, mapped, where one segment holds all of it.

        The workers keep that memory until the last tensor on it is gone. With ``copy``, and for small captures, the
        rows are copied and the memory is free at once.
        """
        layers = len(handle.layer_indices)
        shape = (layers, -1, self._row_bytes // self._dtype.itemsize)
        parts = []
        mapped: mmap.mmap | None = None
        for segment in segments:
            if self.shared:
                fd, offset, nbytes, used, reserved = segment
                mapped = mmap.mmap(opened(fd).fileno(), nbytes, offset=offset)
                memory: Any = mapped
            else:
                data, used, reserved = segment
                memory = bytearray(data)
            flat = torch.frombuffer(memory, dtype=torch.uint8)[: layers * reserved * self._row_bytes]
            parts.append(flat.view(self._dtype).view(shape)[:, :used])
        if len(parts) == 1 and mapped is not None and not copy and len(mapped) >= MAP_BYTES:
            weakref.finalize(mapped, self.discard, key)
            return parts[0]
        rows = torch.cat(parts, dim=1) if parts else self._empty(handle)
        self.discard(key)
        return rows

    def _empty(self, handle: CaptureHandle) -> torch.Tensor:
        return torch.empty(len(handle.layer_indices), 0, self._row_bytes // self._dtype.itemsize, dtype=self._dtype)

    def discard(self, key: str) -> None:
        """Drop the rows named ``key`` in the workers. May be called from any thread, and by the garbage collector."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so are the workers
            self._loop.call_soon_threadsafe(self._release, key)

    def _release(self, key: str) -> None:
        self._gone.append(key)
        self._held.pop(key, None)
        if self._flush is None or self._flush.done():
            self._flush = self._loop.create_task(self.flush())

    async def flush(self) -> None:
        """Tell the workers what may go."""
        while self._gone:
            gone, self._gone = self._gone, []
            with contextlib.suppress(LabError):  # the engine is gone, and the rows with it
                await self._rpc(wire.RPC_RELEASE, gone)


def _open(path: str) -> Any:
    try:
        return open(path, "r+b")
    except OSError as error:
        raise CaptureError(
            f"cannot map the worker's memory ({error}); if the workers run on another host or in another container, "
            f"start the model with capture_transport='bytes'"
        ) from error

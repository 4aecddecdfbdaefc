"""Getting captured rows from the workers into this process, and telling the workers what may go."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from chatspace_lab import wire
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.errors import CaptureClosedError, CaptureError, CaptureLimitError, LabError

Rpc = Callable[..., Awaitable[list[Any]]]


class CaptureBroker:
    """The kernel's end of the workers' capture stores. Its coroutines run on the engine's loop.

    Parameters
    ----------
    loop
        The engine's loop.
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
        loop: asyncio.AbstractEventLoop,
        rpc: Rpc,
        *,
        dtype: torch.dtype,
        hidden_size: int,
        limit: int,
        shared: bool,
    ) -> None:
        self._loop, self._rpc = loop, rpc
        self._dtype, self._row_bytes = dtype, hidden_size * dtype.itemsize
        self._limit, self._shared = limit, shared
        self._fetching = asyncio.Lock()
        self._held: dict[str, int] = {}
        self._gone: list[str] = []
        self._mapped: list[str] = []
        self._flush: asyncio.Task[None] | None = None

    def admit(self, handles: Sequence[CaptureHandle]) -> None:
        """Count the prompts of new captures as held.

        Raises
        ------
        CaptureLimitError
            If they do not fit beside what is held. Nothing has run then.
        """
        new = {h.request_id: h.prompt_len * len(h.layer_indices) * self._row_bytes for h in handles}
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
            self._held[handle.request_id] = handle.computed * len(handle.layer_indices) * self._row_bytes

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
        async with self._fetching:
            wanted = {h.request_id: h for h in handles if h.state != "fetched"}
            for handle in wanted.values():
                if handle.state == "closed":
                    raise CaptureClosedError(f"the captures of request {handle.request_id} were closed")
                if handle.state == "running":
                    raise CaptureError(f"request {handle.request_id} has not ended yet: await it, then fetch")
            if not wanted:
                return
            asked = [[key, handle.computed] for key, handle in wanted.items()]
            answer = (await self._rpc(wire.RPC_FETCH, asked, self._shared))[0]
            failures = self._receive(answer, wanted)
            self._release([key for key in wanted if key not in failures], answer.get("token"))
        if failures:
            raise next(iter(failures.values()))

    def _receive(self, answer: dict[str, Any], wanted: dict[str, CaptureHandle]) -> dict[str, LabError]:
        memory = self._memory(answer)
        failures: dict[str, LabError] = {}
        for key, entry in answer["entries"].items():
            if "failure" in entry:
                kind = CaptureLimitError if entry.get("limit") else CaptureError
                failures[key] = kind(f"request {key}: {entry['failure']}")
                continue
            shape = entry["shape"]
            size = shape[0] * shape[1] * self._row_bytes
            flat = memory[entry["offset"] : entry["offset"] + size]
            wanted[key].receive(flat.view(self._dtype).view(shape), entry["positions"])
        return failures

    def _memory(self, answer: dict[str, Any]) -> torch.Tensor:
        if not answer["nbytes"]:
            return torch.empty(0, dtype=torch.uint8)
        if "data" in answer:
            return torch.frombuffer(bytearray(answer["data"]), dtype=torch.uint8)
        path = f"/proc/{answer['pid']}/fd/{answer['fd']}"
        try:
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), answer["nbytes"])
        except OSError as error:
            raise CaptureError(
                f"cannot map the worker's memory ({error}); if the workers run on another host or in another "
                f"container, start the model with capture_transport='bytes'"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def discard(self, key: str) -> None:
        """Drop the rows named ``key`` in the workers. May be called from any thread, and by the garbage collector."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so are the workers
            self._loop.call_soon_threadsafe(self._release, [key], None)

    def _release(self, keys: Sequence[str], token: str | None) -> None:
        self._gone.extend(keys)
        if token is not None:
            self._mapped.append(token)
        for key in keys:
            self._held.pop(key, None)
        if self._flush is None or self._flush.done():
            self._flush = self._loop.create_task(self.flush())

    async def flush(self) -> None:
        """Tell the workers what may go."""
        while self._gone or self._mapped:
            gone, mapped = self._gone, self._mapped
            self._gone, self._mapped = [], []
            with contextlib.suppress(LabError):  # the engine is gone, and the rows with it
                await self._rpc(wire.RPC_RELEASE, gone, mapped)

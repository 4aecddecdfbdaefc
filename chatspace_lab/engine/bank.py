"""Which vector lies in which row of the workers' bank: placed by content, counted, reused when nobody needs it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import torch

from chatspace_lab.errors import SteeringError

Upload = Callable[[list[int], bytes], Awaitable[None]]


@dataclass
class _Row:
    index: int
    users: int
    uploaded: asyncio.Task[None]

    @property
    def settled(self) -> bool:
        """Whether the vector has reached the workers."""
        return self.uploaded.done() and not self.uploaded.cancelled() and self.uploaded.exception() is None


class VectorBank:
    """Places vectors in rows, on the engine's loop.

    Rows in use are never overwritten. A row whose last user has gone keeps its vector until another needs the place:
    by then the abort or the end of that user has reached the engine, since calls to it keep their order.
    """

    def __init__(self, rows: int, upload: Upload) -> None:
        self._upload = upload
        self._free = list(range(rows - 1, -1, -1))
        self._rows: OrderedDict[bytes, _Row] = OrderedDict()
        self._unsettled: set[asyncio.Task[None]] = set()  # uploads under way, or failed
        self.capacity = rows

    async def acquire(self, vectors: Mapping[bytes, torch.Tensor]) -> list[int]:
        """Return the rows that hold these vectors, uploading the new ones. Each needs a later :meth:`release`.

        Raises
        ------
        SteeringError
            If requests under way use too many other vectors.
        """
        if self._unsettled:
            for key in vectors:
                if key in self._rows:
                    self._forget_if_failed(key)
        rows = [self._rows.get(key) for key in vectors]
        new = [key for key, row in zip(vectors, rows, strict=True) if row is None]
        if len(new) > len(self._free) + (self._idle_beside(vectors) if new else 0):
            raise SteeringError(
                f"{len(new)} new vectors do not fit beside those in use: the bank has {self.capacity} rows; "
                f"raise max_vectors in the configuration, or wait for requests under way"
            )
        held = [row for row in rows if row is not None]
        for row in held:
            row.users += 1
        if new:
            indices = [self._place(key) for key in new]
            data = torch.stack([vectors[key] for key in new]).numpy().tobytes()
            task = asyncio.ensure_future(self._upload(indices, data))
            self._unsettled.add(task)
            task.add_done_callback(self._settle)
            for key, index in zip(new, indices, strict=True):
                self._rows[key] = _Row(index, 1, task)
            held = [self._rows[key] for key in vectors]
        pending = {row.uploaded for row in held if not row.settled} if self._unsettled else set()
        try:
            for uploaded in pending:
                await asyncio.shield(uploaded)
        except BaseException:
            self.release(vectors)
            raise
        return [row.index for row in held]

    def _idle_beside(self, vectors: Mapping[bytes, torch.Tensor]) -> int:
        return sum(1 for key, row in self._rows.items() if not row.users and key not in vectors)

    def _place(self, key: bytes) -> int:
        if self._free:
            return self._free.pop()
        oldest = next(known for known, row in self._rows.items() if not row.users)
        return self._rows.pop(oldest).index

    def release(self, vectors: Mapping[bytes, torch.Tensor]) -> None:
        """Count one user less for each of these vectors."""
        for key in vectors:
            row = self._rows[key]
            row.users -= 1
            if not row.users:
                self._rows.move_to_end(key)  # idle rows lie in the order in which they became so
            if self._unsettled:
                self._forget_if_failed(key)

    def _settle(self, uploaded: asyncio.Task[None]) -> None:
        if not uploaded.cancelled() and uploaded.exception() is None:
            self._unsettled.discard(uploaded)

    def _forget_if_failed(self, key: bytes) -> None:
        row = self._rows[key]
        failed = row.uploaded.done() and (row.uploaded.cancelled() or row.uploaded.exception() is not None)
        if failed and not row.users:
            del self._rows[key]
            self._free.append(row.index)

    @property
    def used(self) -> int:
        """Rows that somebody uses."""
        return sum(1 for row in self._rows.values() if row.users)

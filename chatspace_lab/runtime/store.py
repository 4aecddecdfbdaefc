"""Captured activations in a worker, per request and absolute position, until the kernel fetches or drops them."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class CaptureBuffer:
    """The captured rows of one request: one growing ``[layers, capacity, hidden_size]`` tensor in host memory.

    A row is written at its absolute position, so a recomputed token lands on its former self.
    """

    def __init__(self, store: CaptureStore, layers: Sequence[int], spans: Sequence[int]) -> None:
        self._store = store
        self.layers = list(layers)
        self.spans = list(spans)
        self.failure: str | None = None
        self.closed = False
        self._rows = torch.empty(len(self.layers), 0, store.hidden_size, dtype=store.dtype)
        self._written = np.zeros(0, dtype=bool)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._rows.numel() * self._rows.element_size()

    def write(self, first: int, values: torch.Tensor) -> None:
        """Store ``values`` [layers, n, hidden_size] at positions ``first`` to ``first + n``."""
        with self._store.lock:  # on a GPU rows are written by a thread of their own
            if self.closed or self.failure:
                return
            stop = first + values.shape[1]
            if stop > self._rows.shape[1] and not self._grow(stop):
                return
            self._rows[:, first:stop] = values
            self._written[first:stop] = True

    def _grow(self, needed: int) -> bool:
        held = self._rows.shape[1]
        capacity = max(needed, held + held // 2, 32)
        extra = (
            (capacity - held) * self._rows[:, :1].numel()
            if held
            else capacity * len(self.layers) * self._store.hidden_size
        )
        if not self._store.reserve(extra * self._rows.element_size()):
            self.failure = (
                f"unfetched captures would pass max_capture_bytes ({self._store.limit:,} bytes): fetch or close "
                f"earlier handles, capture fewer layers, or raise max_capture_bytes"
            )
            self._discard()
            return False
        grown = torch.empty(len(self.layers), capacity, self._store.hidden_size, dtype=self._store.dtype)
        grown[:, :held] = self._rows
        written = np.zeros(capacity, dtype=bool)
        written[:held] = self._written
        self._rows, self._written = grown, written
        return True

    def _discard(self) -> None:
        self._store.give_back(self.nbytes)
        self._rows = self._rows[:, :0].clone()
        self._written = self._written[:0]

    def close(self) -> None:
        """Drop the rows; later writes are ignored."""
        with self._store.lock:
            if not self.closed:
                self._discard()
                self.closed = True

    def positions(self, stop: int) -> np.ndarray:
        """Return the positions below ``stop`` that are captured, ascending.

        Raises
        ------
        RuntimeError
            If one that should have been captured never was.
        """
        wanted = np.zeros(max(stop, len(self._written)), dtype=bool)
        for low, high in zip(self.spans[::2], self.spans[1::2], strict=True):
            wanted[low : stop if high < 0 else min(high, stop)] = True
        wanted = wanted[:stop]
        have = np.zeros(stop, dtype=bool)
        have[: len(self._written)] = self._written[:stop]
        missing = np.flatnonzero(wanted & ~have)
        if len(missing):
            raise RuntimeError(
                f"{len(missing)} of {int(wanted.sum())} positions were never captured, the first is {missing[0]}"
            )
        return np.flatnonzero(wanted)

    def copy_to(self, target: torch.Tensor, positions: np.ndarray) -> None:
        """Write the rows of ``positions`` into ``target`` [layers, n, hidden_size]."""
        if len(positions) and positions[-1] - positions[0] + 1 == len(positions):
            target.copy_(self._rows[:, positions[0] : positions[-1] + 1])
        else:
            torch.index_select(self._rows, 1, torch.from_numpy(positions), out=target)


class CaptureStore:
    """All capture buffers of one worker, by key, and the memory they may take.

    Parameters
    ----------
    hidden_size, dtype
        Of the captured rows.
    limit
        Bytes that buffers which nobody fetched may take together.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, limit: int) -> None:
        self.hidden_size, self.dtype, self.limit = hidden_size, dtype, limit
        self.nbytes = 0
        self.lock = threading.Lock()
        self._buffers: dict[str, CaptureBuffer] = {}
        self._files: dict[str, int] = {}
        self._numbers = itertools.count()

    def open(self, key: str, layers: Sequence[int], spans: Sequence[int]) -> CaptureBuffer:
        """Return the buffer named ``key``, made if it is new."""
        if key not in self._buffers:
            self._buffers[key] = CaptureBuffer(self, layers, spans)
        return self._buffers[key]

    def reserve(self, nbytes: int) -> bool:
        """Count ``nbytes`` as held, unless that passes the limit."""
        if self.nbytes + nbytes > self.limit:
            return False
        self.nbytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Count ``nbytes`` as held no longer."""
        self.nbytes -= nbytes

    def fetch(self, wanted: Sequence[tuple[str, int]], *, shared: bool) -> dict[str, Any]:
        """Hand the rows below a position of some buffers to the kernel.

        Parameters
        ----------
        wanted
            (key, number of positions that the request computed).
        shared
            Through an anonymous memory file, which the kernel maps without a copy and which no crash can leave
            behind; otherwise as bytes in the answer.

        Returns
        -------
        dict
            ``entries``: per key offset, shape and positions, or a failure; ``pid``, ``fd``, ``token`` and ``nbytes``
            of the file, or ``data``.
        """
        entries: dict[str, Any] = {}
        parts: list[tuple[CaptureBuffer, np.ndarray, int]] = []
        total = 0
        for key, stop in wanted:
            buffer = self._buffers.get(key)
            if buffer is None:
                entries[key] = {"failure": "the workers hold no captures under this name"}
                continue
            try:
                if buffer.failure:
                    entries[key] = {"failure": buffer.failure, "limit": True}
                    continue
                positions = buffer.positions(stop)
            except RuntimeError as error:
                entries[key] = {"failure": str(error)}
                continue
            shape = [len(buffer.layers), len(positions), self.hidden_size]
            contiguous = len(positions) == stop
            entries[key] = {"offset": total, "shape": shape, "positions": None if contiguous else positions.tolist()}
            parts.append((buffer, positions, total))
            total += int(np.prod(shape)) * self.dtype.itemsize
        answer: dict[str, Any] = {"entries": entries, "nbytes": total}
        if not total:
            return answer
        if shared:
            token = f"{os.getpid()}:{next(self._numbers)}"
            fd = os.memfd_create("chatspace-lab-captures", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, total)
                memory: Any = mmap.mmap(fd, total)
            except OSError:
                os.close(fd)
                raise
            self._files[token] = fd
            answer.update(pid=os.getpid(), fd=fd, token=token)
        else:
            memory = bytearray(total)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for buffer, positions, offset in parts:
            shape = [len(buffer.layers), len(positions), self.hidden_size]
            size = int(np.prod(shape)) * self.dtype.itemsize
            buffer.copy_to(flat[offset : offset + size].view(self.dtype).view(shape), positions)
        if not shared:
            answer["data"] = bytes(memory)
        return answer

    def release(self, keys: Sequence[str], tokens: Sequence[str]) -> None:
        """Drop buffers, and the files that the kernel has mapped. Unknown names are fine: they are gone already."""
        for key in keys:
            buffer = self._buffers.pop(key, None)
            if buffer is not None:
                buffer.close()
        for token in tokens:
            fd = self._files.pop(token, None)
            if fd is not None:
                os.close(fd)

    def stats(self) -> dict[str, int]:
        """Return how much is held: buffers, their bytes, and open transfer files."""
        return {"buffers": len(self._buffers), "nbytes": self.nbytes, "files": len(self._files)}

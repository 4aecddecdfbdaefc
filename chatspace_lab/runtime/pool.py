"""Shared memory for captured rows: anonymous files that the operator writes and the kernel process maps.

A memory file (``memfd``) has no name, so nothing can be left behind: it is gone with the last process that holds it,
however that process ended. On a GPU the file is page-locked and the operator stores straight into it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

PAGE = mmap.ALLOCATIONGRANULARITY


class Region(NamedTuple):
    """A page-aligned part of a slab."""

    slab: Slab
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Address of its first byte in this process (and, if page-locked, for the GPU)."""
        return self.slab.address + self.offset


class Slab:
    """One memory file, mapped here, with a list of its free parts."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("chatspace-lab-captures", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.memory = mmap.mmap(self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)
        self.free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), by offset

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` free bytes, first fit; None if there are none together."""
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                self.free[index : index + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        return None

    def put_back(self, offset: int, nbytes: int) -> None:
        """Make a part free again, joined to its free neighbours."""
        index = bisect.bisect(self.free, (offset, 0))
        stop = offset + nbytes
        if index < len(self.free) and self.free[index][0] == stop:
            stop += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == offset:
            index -= 1
            offset = self.free.pop(index)[0]
        self.free.insert(index, (offset, stop - offset))

    @property
    def empty(self) -> bool:
        """Whether all of it is free."""
        return self.free == [(0, self.nbytes)]

    def close(self) -> None:
        """Unmap and close the file; its memory is freed once the kernel process lets go of it too."""
        del self._anchor
        self.memory.close()
        os.close(self.fd)


class SharedPool:
    """Gives out regions of slabs.

    Parameters
    ----------
    limit
        Bytes that regions may take together.
    slab_bytes
        Size of a slab; a larger region gets one of its own.
    lock_pages, unlock_pages
        Called with (address, nbytes) of a new slab, and of one that goes; for a GPU.
    keep
        Bytes of empty slabs to keep for later: locking pages is slow.
    """

    def __init__(
        self,
        limit: int,
        *,
        slab_bytes: int = 32 << 20,
        lock_pages: Callable[[int, int], None] | None = None,
        unlock_pages: Callable[[int, int], None] | None = None,
        keep: int = 0,
    ) -> None:
        self.limit, self.used = limit, 0
        self._slab_bytes, self._keep = slab_bytes, keep
        self._lock_pages, self._unlock_pages = lock_pages, unlock_pages
        self._slabs: list[Slab] = []

    def take(self, nbytes: int) -> Region | None:
        """Return a region of at least ``nbytes``, or None if that would pass the limit."""
        nbytes = -(-nbytes // PAGE) * PAGE
        if self.used + nbytes > self.limit:
            return None
        for slab in self._slabs:
            offset = slab.take(nbytes)
            if offset is not None:
                break
        else:
            slab = Slab(max(nbytes, self._slab_bytes))
            if self._lock_pages is not None:
                self._lock_pages(slab.address, slab.nbytes)
            self._slabs.append(slab)
            offset = slab.take(nbytes)
            assert offset is not None  # it was made large enough
        self.used += nbytes
        return Region(slab, offset, nbytes)

    def put_back(self, region: Region) -> None:
        """Take a region back; frees its slab when that is empty and more than ``keep`` bytes are."""
        self.used -= region.nbytes
        region.slab.put_back(region.offset, region.nbytes)
        empty = [slab for slab in self._slabs if slab.empty]
        while empty and sum(slab.nbytes for slab in empty) > self._keep:
            self._close(empty.pop())

    def _close(self, slab: Slab) -> None:
        self._slabs.remove(slab)
        if self._unlock_pages is not None:
            self._unlock_pages(slab.address, slab.nbytes)
        slab.close()

    def close(self) -> None:
        """Free every slab, whatever is still in use."""
        for slab in list(self._slabs):
            self._close(slab)

    @property
    def mapped(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

"""The capture store and its shared memory: rows by position, within a limit, and nothing left when all is released."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab.runtime.pool import PAGE, SharedPool
from chatspace_lab.runtime.store import CaptureBuffer, CaptureStore
from chatspace_lab.spans import rank

HIDDEN = 8
EVERYWHERE = [0, -1]


def make(limit: int = 1 << 30, fence: Callable[[], Callable[[], bool]] = lambda: lambda: True) -> CaptureStore:
    return CaptureStore(SharedPool(limit, slab_bytes=16 * PAGE), HIDDEN, torch.float32, fence)


def test_a_segment_has_a_name_of_its_own() -> None:
    """A capture that is closed while its request goes on may begin again; on a GPU its place is looked up by name."""
    store = make()
    names = []
    for _ in range(2):
        buffer = store.open("a", [0], EVERYWHERE, 4, 8)
        names += [segment.name for _, _, segment, _ in buffer.place(0, 0, 4)]
        store.release(["a"])
    assert len(set(names)) == 2


def nothing_held(store: CaptureStore) -> bool:
    found = store.stats()
    return (found["buffers"], found["nbytes"], found["mapped"]) == (0, 0, 0)


def value(layer: int, position: int) -> float:
    return 1000.0 * layer + position


def write(buffer: CaptureBuffer, first: int, count: int, mark: float = 0.0) -> None:
    """Play the operator: store rows where the buffer says."""
    done = 0
    for start, rows, segment, row in buffer.place(5, first, count):
        assert start == 5 + done  # one after the other, from where the step's captured tokens begin
        for index, layer in enumerate(segment.layers):
            offset = segment.region.offset + index * segment.layer_bytes
            memory = np.frombuffer(
                segment.region.slab.memory, np.float32, count=segment.rows * HIDDEN, offset=offset
            ).reshape(segment.rows, HIDDEN)
            for k in range(rows):
                memory[row + k] = value(layer, first + done + k) + mark
        done += rows
    assert done == count


def rows_of(store: CaptureStore, key: str, stop: int, layers: int, *, shared: bool = False) -> torch.Tensor:
    """Put an answer together as the kernel does: [layers, rows, hidden_size]."""
    entry = store.fetch([(key, stop)], shared=shared)["entries"][key]
    parts = []
    for *place, used, reserved in entry["segments"]:
        if shared:
            fd, offset, nbytes = place
            data = os.pread(fd, nbytes, offset)
        else:
            (data,) = place
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32)[: layers * reserved * HIDDEN]
        parts.append(flat.view(layers, reserved, HIDDEN)[:, :used])
    return torch.cat(parts, dim=1)


def expected(layers: list[int], positions: list[int]) -> torch.Tensor:
    return torch.tensor([[[value(layer, at)] * HIDDEN for at in positions] for layer in layers])


@pytest.mark.parametrize("shared", [False, True])
def test_rows_come_back_by_position(shared: bool) -> None:
    store = make()
    buffer = store.open("a", [0, 3], EVERYWHERE, 7, 1000)
    write(buffer, 0, 7)
    for position in range(7, 400):  # far beyond what was reserved at first
        write(buffer, position, 1)
    assert len(buffer.segments) > 1
    assert torch.equal(rows_of(store, "a", 400, 2, shared=shared), expected([0, 3], list(range(400))))
    assert torch.equal(rows_of(store, "a", 5, 2, shared=shared), expected([0, 3], list(range(5))))


def test_chunks_of_any_size() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        store = make()
        prompt = chance.randrange(1, 300)
        buffer = store.open("a", [2], EVERYWHERE, prompt, prompt + chance.randrange(300))
        at = 0
        while at < 500:
            count = chance.randrange(1, 90)
            write(buffer, at, count)
            at += count
        assert torch.equal(rows_of(store, "a", at, 1), expected([2], list(range(at))))


def test_a_recomputed_row_lands_on_its_former_self() -> None:
    store = make()
    buffer = store.open("a", [1], EVERYWHERE, 4, 100)
    write(buffer, 0, 90, mark=0.5)
    assert store.open("a", [1], EVERYWHERE, 4, 100) is buffer  # a preempted request comes again
    write(buffer, 0, 90)
    write(buffer, 90, 10)
    assert torch.equal(rows_of(store, "a", 100, 1), expected([1], list(range(100))))


def test_spans() -> None:
    store = make()
    buffer = store.open("a", [0], [2, 5, 8, -1], 10, 20)
    write(buffer, 2, 3)
    write(buffer, 8, 4)
    assert buffer.positions(12).tolist() == [2, 3, 4, 8, 9, 10, 11]
    assert torch.equal(rows_of(store, "a", 12, 1), expected([0], [2, 3, 4, 8, 9, 10, 11]))
    for position in range(25):
        wanted = [at for at in range(position) if 2 <= at < 5 or at >= 8]
        assert rank([2, 5, 8, -1], position) == len(wanted)


def test_missing_positions_are_told_and_not_made_up() -> None:
    store = make()
    buffer = store.open("a", [0], EVERYWHERE, 4, 100)
    write(buffer, 0, 3)
    write(buffer, 5, 2)
    entries = store.fetch([("a", 7), ("nobody", 3)], shared=False)["entries"]
    assert "2 of 7 positions were never captured, the first is 3" in entries["a"]["failure"]
    assert "no captures under this name" in entries["nobody"]["failure"]


def test_the_limit() -> None:
    store = make(limit=4 * PAGE)
    first = store.open("a", [0], EVERYWHERE, 2 * PAGE // 32, 2 * PAGE // 32)
    write(first, 0, 2 * PAGE // 32)
    second = store.open("b", [0], EVERYWHERE, 4 * PAGE // 32, 4 * PAGE // 32)
    assert second.place(0, 0, 4 * PAGE // 32) == []
    assert second.place(0, 4 * PAGE // 32, 1) == []  # and goes on without a word to the engine
    entries = store.fetch([("a", 10), ("b", 10)], shared=False)["entries"]
    assert "max_capture_bytes" in entries["b"]["failure"]
    assert entries["b"]["limit"]
    assert "failure" not in entries["a"]  # the other one is untouched
    store.release(["a", "b"])
    assert nothing_held(store)
    third = store.open("c", [0], EVERYWHERE, 4 * PAGE // 32, 4 * PAGE // 32)
    write(third, 0, 4 * PAGE // 32)


def test_a_capture_that_grows_past_the_limit_gives_its_memory_back() -> None:
    store = make(limit=6 * PAGE)
    buffer = store.open("a", [0, 1], EVERYWHERE, 4, 1 << 20)
    for position in range(6 * PAGE // 64 + 100):
        buffer.place(0, position, 1)
    assert buffer.failure
    assert store.pool.used == 0


def test_memory_waits_for_the_device() -> None:
    done = [False]
    store = make(fence=lambda: lambda: done[0])
    write(store.open("a", [0], EVERYWHERE, 10, 10), 0, 10)
    store.release(["a"])
    assert store.stats()["nbytes"] > 0  # a step under way may still write there
    done[0] = True
    assert nothing_held(store)


def test_released_twice_and_unknown() -> None:
    store = make()
    write(store.open("a", [0], EVERYWHERE, 10, 10), 0, 10)
    store.release(["a", "a", "b"])
    store.release(["a"])
    assert store.stats()["nbytes"] == 0


def test_rows_after_release_go_nowhere() -> None:
    store = make()
    buffer = store.open("a", [0], EVERYWHERE, 10, 100)
    write(buffer, 0, 10)
    store.release(["a"])
    assert buffer.place(0, 10, 1) == []
    assert store.stats()["nbytes"] == 0


def test_the_pool_at_random() -> None:
    """Regions never overlap, and the memory comes back whole."""
    for seed in range(10):
        chance = random.Random(seed)
        pool = SharedPool(64 * PAGE, slab_bytes=8 * PAGE)
        held: list[Any] = []
        for _ in range(500):
            if held and chance.random() < 0.5:
                pool.put_back(held.pop(chance.randrange(len(held))))
            else:
                wanted = chance.randrange(1, 12 * PAGE)
                region = pool.take(wanted)
                if region is None:
                    assert pool.used + -(-wanted // PAGE) * PAGE > pool.limit
                    continue
                assert region.nbytes >= wanted
                held.append(region)
            assert pool.used == sum(region.nbytes for region in held) <= pool.limit
            ranges = sorted((region.address, region.address + region.nbytes) for region in held)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        for region in held:
            pool.put_back(region)
        assert (pool.used, pool.mapped) == (0, 0)

"""What the GPU's operator is given in each step, without a GPU: where each token's program and captured row are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import wire
from chatspace_lab.runtime import backend_cuda
from chatspace_lab.runtime.core import Arrival, Runtime
from chatspace_lab.runtime.pool import SharedPool
from chatspace_lab.runtime.store import CaptureStore
from chatspace_lab.spans import below, rank
from tests.runtime.test_steady import HIDDEN, LAYERS, empty_tables, payload

LONGEST = 120


class HostBuffer:
    """A per-token buffer that is written at once."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def fill(self, values: np.ndarray | None) -> None:
        self._target.zero_()
        if values is not None:
            self._target[: len(values)] = torch.from_numpy(values)


def place(runtime: Runtime, key: str, row: int) -> np.ndarray:
    """Return the address of a captured row at each layer, 0 where it is not captured."""
    [segment] = [each for each in runtime.store._buffers[key].segments if each.first <= row < each.first + each.rows]
    found = np.zeros(LAYERS, dtype=np.int64)
    segment.write_addresses(found)
    return np.where(found, found + (row - segment.first) * HIDDEN * 4, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_at_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_cuda, "TokenBuffer", HostBuffer)
    chance = random.Random(seed)
    tables = empty_tables(6)
    backend = backend_cuda.CudaBackend(tables, torch.float32)
    store = CaptureStore(SharedPool(1 << 22), HIDDEN, torch.float32, lambda: lambda: True)
    runtime = Runtime(tables, store, backend, captures=True)
    asked: dict[str, dict[str, Any]] = {}
    position: dict[str, int] = {}
    prompt: dict[str, int] = {}
    tokens = steered = captured = names = 0
    for _ in range(200):
        finished = [name for name in position if position[name] > 3 and chance.random() < 0.02]
        for name in finished:
            del position[name]
        arrived = []
        if not position or (len(position) < 6 and chance.random() < 0.1):
            name, names = f"r{names}", names + 1
            position[name], prompt[name], asked[name] = 0, chance.randrange(1, 20), payload(chance, name)
            arrived.append(Arrival(name, {wire.EXTRA: asked[name]}, prompt[name], LONGEST))
        ids = [name for name in position if chance.random() < 0.95] or list(position)
        if chance.random() < 0.02:
            position[ids[0]] = 0  # preempted: computed again from its first token on
        counts = np.array([min(max(1, prompt[name] - position[name]), 7) for name in ids])
        first = np.array([position[name] for name in ids])
        runtime.admit(finished, arrived)
        runtime.begin(ids, counts, first)
        token = 0
        for name, count, start in zip(ids, counts.tolist(), first.tolist(), strict=True):
            spans = asked[name]["capture_spans"] if asked[name]["capture_layers"] else []
            steer = below(asked[name]["steer_spans"], LONGEST * 2) if asked[name]["ops"] else []
            for at in range(start, start + count):
                slot = int(tables.program_of_token[token])
                assert slot == (tables.programs._slot_of[asked[name]["ops"]] if at in steer else 0)
                steered += slot > 0
                there = tables.captures.host[int(tables.capture_of_token[token])]
                row = int(tables.capture_row_of_token[token])
                addresses = np.where(there, there + row * HIDDEN * 4, 0)
                if at in below(spans, at + 1):
                    assert addresses.tolist() == place(runtime, name, rank(spans, at)).tolist()
                    assert np.count_nonzero(addresses) == len(asked[name]["capture_layers"])
                    captured += 1
                else:
                    assert not addresses.any()
                token += 1
            position[name] += count
        tokens += token
    assert min(steered, captured) > 50
    assert max(steered, captured) < tokens


def test_many_segments_recomputed_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer has a segment of rows per doubling; thrown out and computed again, one step needs all of them."""
    monkeypatch.setattr(backend_cuda, "TokenBuffer", HostBuffer)
    length = 1500
    tables = empty_tables(2, 2 * length)
    store = CaptureStore(SharedPool(1 << 24), HIDDEN, torch.float32, lambda: lambda: True)
    runtime = Runtime(tables, store, backend_cuda.CudaBackend(tables, torch.float32), captures=True)
    wish = {"ops": b"", "steer_spans": [], "capture_layers": [0, 1], "capture_spans": [0, -1]}
    names = ["a", "b"]
    runtime.admit([], [Arrival(name, {wire.EXTRA: {"key": name, **wish}}, 1, length) for name in names])
    for at in range(length):
        runtime.begin(names, np.array([1, 1]), np.array([at, at]))
    assert all(len(store._buffers[name].segments) > 3 for name in names)
    runtime.begin(names, np.array([length, length]), np.array([0, 0]))
    for token in range(2 * length):
        there = tables.captures.host[int(tables.capture_of_token[token])]
        row = int(tables.capture_row_of_token[token])
        wanted = place(runtime, names[token // length], token % length)
        assert np.where(there, there + row * HIDDEN * 4, 0).tolist() == wanted.tolist(), token

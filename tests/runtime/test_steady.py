"""Steps that only go on do what steps that are laid out anew do: same rows, same steering, any end of a request."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import wire
from chatspace_lab.runtime.backend_cpu import CpuBackend
from chatspace_lab.runtime.core import Arrival, Runtime
from chatspace_lab.runtime.store import CaptureStore
from chatspace_lab.runtime.tables import Tables

HIDDEN, LAYERS = 16, 2


def empty_tables(max_requests: int, max_tokens: int = 256) -> Tables:
    return Tables(
        layers=LAYERS,
        hidden_size=HIDDEN,
        max_requests=max_requests,
        max_ops=2,
        max_vectors=4,
        max_tokens=max_tokens,
        device=torch.device("cpu"),
    )


def made() -> Runtime:
    tables = empty_tables(8)
    tables.put_vectors(range(4), torch.eye(4, HIDDEN).numpy().tobytes())
    backend = CpuBackend(tables, torch.float32)
    store = CaptureStore(backend.make_pool(1 << 20), HIDDEN, torch.float32, backend.fence)
    return Runtime(tables, store, backend, captures=True)


def payload(chance: random.Random, key: str) -> dict[str, Any]:
    ops = [(layer, wire.ADD, chance.randrange(4), chance.uniform(-1, 1), 0.0) for layer in range(LAYERS)]
    spans = [[0, -1], [0, 5], [7, -1], [3, 9, 20, 90]]
    return {
        "key": key,
        "ops": np.array(ops, dtype=wire.OP).tobytes() if chance.random() < 0.7 else b"",
        "steer_spans": chance.choice(spans),
        "capture_layers": chance.choice([[], [1], [0, 1]]),
        "capture_spans": chance.choice(spans),
    }


@pytest.mark.parametrize("seed", range(20))
def test_as_if_every_step_were_laid_out(seed: int) -> None:
    chance = random.Random(seed)
    fast, slow = made(), made()
    position: dict[str, int] = {}
    prompt: dict[str, int] = {}
    names = 0
    went_on = 0
    for _ in range(150):
        finished = [name for name in position if position[name] > 3 and chance.random() < 0.01]
        for name in finished:
            del position[name]
        arrived = []
        if not position or (len(position) < 6 and chance.random() < 0.05):
            name, names = f"r{names}", names + 1
            position[name], prompt[name] = 0, chance.randrange(1, 12)
            extra = {wire.EXTRA: payload(chance, name)} if chance.random() < 0.9 else None
            arrived.append(Arrival(name, extra, prompt[name], 90))
        ids = [name for name in position if chance.random() < 0.995] or list(position)
        counts = np.array([max(1, prompt[name] - position[name]) for name in ids])
        first = np.array([position[name] for name in ids])
        for name, count in zip(ids, counts.tolist(), strict=True):
            position[name] += count
        if chance.random() < 0.02:  # somebody closes a capture while it runs
            key = chance.choice(ids)
            fast.store.release([key])
            slow.store.release([key])
        hidden = torch.randn(
            int(counts.sum()) + 2, HIDDEN, generator=torch.Generator().manual_seed(chance.randrange(999))
        )
        outs = []
        for runtime in (fast, slow):
            runtime.admit(finished, arrived)
            if runtime is slow:
                runtime._steady = None
            runtime.begin(ids, counts, first)
            outs.append(hidden.clone())
            for layer in range(LAYERS):
                runtime.backend.apply(outs[-1], None, torch.tensor([layer], dtype=torch.int32))
        assert torch.equal(*outs)
        went_on += fast._steady is not None and fast._steady.ticks > 0
        key = chance.choice(ids)
        shown = [runtime.store.fetch([(key, position[key])], shared=False)["entries"][key] for runtime in (fast, slow)]
        assert shown[0] == shown[1]
    assert went_on > 40
    assert fast.store.recomputed == slow.store.recomputed == 0

"""The Triton operator against the operations written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatspace_lab import wire
from chatspace_lab.runtime.backend_cuda import CudaBackend
from chatspace_lab.runtime.core import Arrival, Runtime
from chatspace_lab.runtime.routing import BatchRow, Routed, plan
from chatspace_lab.runtime.store import CaptureBuffer, CaptureStore
from chatspace_lab.runtime.tables import Tables

LAYERS, TOKENS = 3, 48
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make(hidden_size: int, dtype: torch.dtype) -> tuple[Tables, CudaBackend]:
    tables = Tables(
        layers=LAYERS,
        hidden_size=hidden_size,
        max_requests=8,
        max_ops=4,
        max_vectors=16,
        max_tokens=TOKENS,
        device=torch.device("cuda"),
    )
    vectors = torch.randn(16, hidden_size)
    vectors /= vectors.norm(dim=-1, keepdim=True)
    tables.put_vectors(range(16), vectors.numpy().tobytes())
    return tables, CudaBackend(tables, dtype)


def layer(index: int) -> torch.Tensor:
    return torch.tensor([index], dtype=torch.int32, device="cuda")


def program(*ops: tuple[int, int, int, float, float]) -> bytes:
    return np.array(list(ops), dtype=wire.OP).tobytes()


PROGRAMS = [
    program((1, wire.ADD, 3, 2.0, 0.0), (1, wire.CAP, 4, -0.1, 0.1), (1, wire.ABLATE, 5, 0.3, 0.0)),
    program((0, wire.ADD, 1, 1.0, 0.0), (1, wire.ABLATE, 9, 0.0, 0.0)),
    program((1, wire.CAP, 2, 0.5, np.inf), (1, wire.ADD, 2, -3.0, 0.0), (1, wire.ADD, 7, 1.0, 0.0)),
]


def redo(x: torch.Tensor, ops: bytes, bank: torch.Tensor, at_layer: int) -> torch.Tensor:
    x = x.double()
    for at, kind, row, a, b in np.frombuffer(ops, dtype=wire.OP).tolist():
        if at != at_layer:
            continue
        v = bank[row].double()
        if kind == wire.ADD:
            x = x + a * v
        elif kind == wire.CAP:
            x = x + ((x @ v).clamp(a, b) - x @ v) * v
        else:
            x = x + (a - 1) * (x @ v) * v
    return x


def capture_of(backend: CudaBackend, hidden_size: int, dtype: torch.dtype) -> tuple[CaptureStore, CaptureBuffer]:
    store = CaptureStore(backend.make_pool(64 << 20), hidden_size, dtype, backend.fence)
    return store, store.open("a", [1], [0, -1], 5, 6)


def captured(store: CaptureStore, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows as the kernel process gets them: [rows, hidden_size]."""
    [[data, used, reserved]] = store.fetch([("a", 5)], shared=False)["entries"]["a"]["segments"]
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: reserved * hidden_size * dtype.itemsize]
    return flat.view(dtype).view(reserved, hidden_size)[:used]


def lay_out(target: CaptureBuffer) -> tuple[list[BatchRow], dict[str, Routed]]:
    batch = [
        BatchRow(name, count, first) for name, count, first in [("a", 5, 0), ("b", 1, 7), ("c", 9, 3), ("d", 4, 0)]
    ]
    requests = {
        "a": Routed(PROGRAMS[0], (0, -1), target),
        "c": Routed(PROGRAMS[1], (5, 8), None),
        "d": Routed(PROGRAMS[2], (0, -1), None),
    }
    return batch, requests


def begin(tables: Tables, backend: CudaBackend, target: CaptureBuffer) -> None:
    step = plan(*lay_out(target))
    slots = tables.place_programs(step.distinct)
    placements = [p for move in step.moves for p in target.place(0, move.first, move.count)]
    backend.begin(step, [slots[name] for name in step.distinct], placements)


def expect(hidden: torch.Tensor, residual: torch.Tensor | None, bank: torch.Tensor) -> torch.Tensor:
    x = hidden.double().cpu() + (0 if residual is None else residual.double().cpu())
    want = x.clone()
    for token in range(hidden.shape[0]):
        if token < 5:
            want[token] = redo(x[token], PROGRAMS[0], bank, 1)
        elif 6 <= token < 15 and 5 <= token - 6 + 3 < 8:
            want[token] = redo(x[token], PROGRAMS[1], bank, 1)
        elif 15 <= token < 19:
            want[token] = redo(x[token], PROGRAMS[2], bank, 1)
    return want


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_size", [64, 576, 1000, 4096, 5120])
def test_operations_and_captures(hidden_size: int, dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(hidden_size)
    tables, backend = make(hidden_size, dtype)
    store, target = capture_of(backend, hidden_size, dtype)
    hidden = torch.randn(TOKENS, hidden_size, device="cuda").to(dtype)
    residual = torch.randn(TOKENS, hidden_size, device="cuda").to(dtype) if with_residual else None
    hidden[2, 7] = 3e4  # an outlier
    begin(tables, backend, target)
    out = hidden.clone()
    backend.apply(out, residual, layer(1))
    backend.drain()
    want = expect(hidden, residual, tables.bank.cpu())
    got = out.double().cpu() + (0 if residual is None else residual.double().cpu())
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).max()
    assert torch.isfinite(got).all()
    assert error < TOLERANCE[dtype]
    untouched = [5, *range(6, 8), *range(11, 15), *range(19, TOKENS)]  # neighbours, other positions, padding
    assert torch.equal(out[untouched], hidden[untouched])
    rows = captured(store, hidden_size, dtype).double()
    assert ((rows - want[:5]).norm(dim=-1) / want[:5].norm(dim=-1)).max() < TOLERANCE[dtype]
    store.pool.close()


def test_graph_replay_reads_new_contents() -> None:
    tables, backend = make(576, torch.float32)
    hidden = torch.randn(TOKENS, 576, device="cuda")
    residual = torch.randn(TOKENS, 576, device="cuda")
    out, number = hidden.clone(), layer(1)
    backend.apply(out, residual, number)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(hidden)
        backend.apply(out, residual, number)
    bank = tables.bank.cpu()
    for _ in range(3):
        hidden.normal_()
        residual.normal_()
        backend.idle()
        graph.replay()
        assert torch.equal(out, hidden)
        store, target = capture_of(backend, 576, torch.float32)
        begin(tables, backend, target)
        graph.replay()
        backend.drain()
        want = expect(hidden, residual, bank)
        assert ((out.double() + residual.double()).cpu() - want).abs().max() < 1e-4
        assert (captured(store, 576, torch.float32).double() - want[:5]).abs().max() < 1e-4
        store.pool.close()
        tables.captures._slot_of.clear()  # the next round's segment has the same name


def test_more_operations_than_are_asked_for_ahead() -> None:
    """Seven operations on a token, three on its neighbour, rows of a wider tensor."""
    torch.manual_seed(7)
    tables = Tables(
        layers=LAYERS,
        hidden_size=576,
        max_requests=8,
        max_ops=7,
        max_vectors=16,
        max_tokens=TOKENS,
        device=torch.device("cuda"),
    )
    vectors = torch.nn.functional.normalize(torch.randn(16, 576), dim=-1)
    tables.put_vectors(range(16), vectors.numpy().tobytes())
    backend = CudaBackend(tables, torch.float32)
    kinds = [wire.CAP, wire.ADD, wire.ABLATE, wire.CAP, wire.ABLATE, wire.ADD, wire.CAP]
    long = program(*[(2, kind, 2 * at, -0.2 if kind == wire.CAP else 0.7, 0.2) for at, kind in enumerate(kinds)])
    short = program(*[(2, kind, at, -0.1, 0.3) for at, kind in enumerate(kinds[:3])])
    batch = [BatchRow("a", 2, 0), BatchRow("b", 1, 5)]
    step = plan(batch, {"a": Routed(long), "b": Routed(short)})
    slots = tables.place_programs(step.distinct)
    backend.begin(step, [slots[name] for name in step.distinct], [])
    wide, residual = torch.randn(4, 640, device="cuda"), torch.randn(4, 576, device="cuda")
    before = wide.clone()
    backend.apply(wide[:, :576], residual, layer(2))
    x = (before[:, :576] + residual).cpu()
    want = torch.stack([redo(x[0], long, tables.bank.cpu(), 2), redo(x[1], long, tables.bank.cpu(), 2)])
    got = (wide[:, :576] + residual).double().cpu()
    assert (got[:2] - want).abs().max() < 1e-4
    assert (got[2] - redo(x[2], short, tables.bank.cpu(), 2)).abs().max() < 1e-4
    assert torch.equal(wide[3], before[3])
    assert torch.equal(wide[:, 576:], before[:, 576:])


def test_steps_that_go_on() -> None:
    """Decode steps after a prompt, without a new layout: captured rows and steering as in the steps before."""
    tables, backend = make(64, torch.float32)
    store = CaptureStore(backend.make_pool(64 << 20), 64, torch.float32, backend.fence)
    runtime = Runtime(tables, store, backend, captures=True)
    payload = {"key": "a", "ops": PROGRAMS[0], "steer_spans": [0, -1], "capture_layers": [1], "capture_spans": [0, -1]}
    runtime.admit([], [Arrival("a", {wire.EXTRA: payload}, 4, 8), Arrival("b", None, 1, 8)])
    wanted = []
    for position in (0, 4, 5, 6):
        count = 4 if position == 0 else 1
        runtime.begin(["b", "a"], np.array([1, count]), np.array([3, 0]) + position)
        hidden = torch.randn(1 + count, 64, device="cuda")
        before = hidden.clone()
        backend.apply(hidden, None, layer(1))
        bank = tables.bank.cpu()
        wanted.append(torch.stack([redo(row, PROGRAMS[0], bank, 1) for row in before[1:].cpu()]))
        assert torch.equal(hidden[0], before[0])
    assert runtime._steady is not None
    assert runtime._steady.ticks == 2
    backend.drain()
    [[data, used, _]] = store.fetch([("a", 7)], shared=False)["entries"]["a"]["segments"]
    rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, 64)[:used].double()
    assert (rows - torch.cat(wanted)).abs().max() < 1e-4
    store.pool.close()

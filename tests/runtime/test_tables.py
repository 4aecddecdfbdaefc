"""Slots: never taken from a program of this step, and a program's slot always holds that program."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from chatspace_lab import wire
from chatspace_lab.runtime.tables import SlotTable, Tables

CPU = torch.device("cpu")


def make(max_requests: int = 3) -> Tables:
    return Tables(
        layers=4, hidden_size=2, max_requests=max_requests, max_ops=3, max_vectors=5, max_tokens=16, device=CPU
    )


def program(*ops: tuple[int, int, int, float, float]) -> bytes:
    return np.array(list(ops), dtype=wire.OP).tobytes()


def read(tables: Tables, slot: int) -> list[tuple[int, int, int, float, float]]:
    """Return the operations of a slot as the operator reads them."""
    row = tables.programs.values[slot].numpy()
    found = []
    for layer in range(tables.layers):
        for entry in range(1, 1 + row[layer, 0, 0]):
            kind, vector, *bits = row[layer, entry]
            a, b = np.array(bits, dtype=np.int32).view(np.float32)
            found.append((layer, int(kind), int(vector), float(a), float(b)))
    return found


def test_what_a_slot_holds() -> None:
    tables = make()
    ops = [
        (0, wire.ADD, 1, 0.5, 0.0),
        (0, wire.CAP, 2, float("-inf"), 2.0),
        (3, wire.ABLATE, 0, -1.0, 0.0),
        (3, wire.ADD, 4, 8.0, 0.0),
        (3, wire.ADD, 4, -8.0, 0.0),
    ]
    slots = tables.place_programs([b"", program(*ops), b""])
    assert slots[b""] == 0
    assert read(tables, slots[program(*ops)]) == ops
    assert read(tables, 0) == []


def test_a_reused_slot_forgets_what_it_held() -> None:
    tables = make(max_requests=1)
    tables.place_programs([program((0, wire.ADD, 1, 1.0, 0.0), (1, wire.ADD, 1, 1.0, 0.0), (1, wire.ADD, 2, 1.0, 0.0))])
    short = program((1, wire.ADD, 3, 2.0, 0.0))
    slots = tables.place_programs([short])
    assert read(tables, slots[short]) == [(1, wire.ADD, 3, 2.0, 0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_slots_of_this_step_are_never_taken(seed: int) -> None:
    chance = random.Random(seed)
    tables = make(max_requests=4)
    for _ in range(300):
        scales = chance.sample(range(1, 12), chance.randrange(0, 5))
        wanted = [program((scale % 4, wire.ADD, 0, float(scale), 0.0)) for scale in scales]
        slots = tables.place_programs([b"", *wanted])
        assert len(set(slots.values())) == len(wanted) + 1
        for scale, each in zip(scales, wanted, strict=True):
            assert read(tables, slots[each]) == [(scale % 4, wire.ADD, 0, float(scale), 0.0)]


def test_a_program_that_stays_is_not_written_again() -> None:
    table = SlotTable(2, (1,), torch.int32, CPU)
    written: list[str] = []

    def write(slots: list[int], names: list[str]) -> None:
        written.extend(names)
        table.host[slots, 0] = [ord(name) for name in names]

    for step in (["a"], ["a", "b"], ["b"], ["b", "c"], ["a"]):
        slots = table.place(step, write)
        assert table.values[slots, 0].tolist() == [ord(name) for name in step]
    assert written == ["a", "b", "c", "a"]  # the one used longest ago made room for c
    assert int(table.values[0, 0]) == 0


def test_many_programs_written_together() -> None:
    """Of several lengths, with layers in any order, as each would be written alone."""
    chance = random.Random(5)
    tables = make(max_requests=20)
    wanted = []
    for _ in range(20):
        layers = chance.sample(range(4), chance.randrange(1, 5))
        ops = [(layer, chance.randrange(1, 4), chance.randrange(5)) for layer in layers for _ in range(3)]
        wanted.append([(*op, chance.randrange(64) / 8, -chance.randrange(64) / 8) for op in ops[chance.randrange(3) :]])
    slots = tables.place_programs([program(*ops) for ops in wanted])
    assert len(slots) == 21
    for ops in wanted:
        assert read(tables, slots[program(*ops)]) == sorted(ops, key=lambda op: op[0])


def test_vectors() -> None:
    tables = make()
    tables.put_vectors([4, 1], np.array([[1, 2], [3, 4]], dtype=np.float32).tobytes())
    assert tables.bank[4].tolist() == [1.0, 2.0]
    assert tables.bank[1].tolist() == [3.0, 4.0]
    assert tables.bank[[0, 2, 3]].abs().sum() == 0

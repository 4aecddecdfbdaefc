"""Laying out a step, against a reference that looks at one token at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from chatspace_lab.runtime.routing import BatchRow, Routed, plan, ranges
from chatspace_lab.spans import FOREVER, lasting, overlaps


class Target:
    """A capture that only says which positions it wants."""

    def __init__(self, spans: list[int]) -> None:
        self.spans = spans

    def place(self, start: int, first: int, count: int) -> list[Any]:
        raise AssertionError("laying out places nothing")


def inside(position: int, spans: list[int]) -> bool:
    return any(
        low <= position and (high < 0 or position < high) for low, high in zip(spans[::2], spans[1::2], strict=True)
    )


def random_spans(chance: random.Random) -> list[int]:
    if chance.random() < 0.4:
        return [0, -1]
    points = sorted(chance.sample(range(60), 2 * chance.randrange(1, 4)))
    if chance.random() < 0.3:
        points[-1] = -1
    return points


@pytest.mark.parametrize("seed", range(200))
def test_against_one_token_at_a_time(seed: int) -> None:
    chance = random.Random(seed)
    batch, requests = [], {}
    for index in range(chance.randrange(1, 12)):
        name = f"r{index}"
        batch.append(BatchRow(name, chance.choice([1, 1, 1, 2, 7, 30]), chance.randrange(50)))
        if chance.random() < 0.8:
            requests[name] = Routed(
                program=chance.choice([b"", b"p", b"q", b"s"]),
                steer_spans=random_spans(chance),
                capture=Target(random_spans(chance)) if chance.random() < 0.6 else None,
            )
    requests["not in this step"] = Routed(b"z", [0, -1], Target([0, -1]))
    step = plan(batch, requests)

    tokens = [(row.request_id, row.first + offset) for row in batch for offset in range(row.count)]
    assert step.tokens == len(tokens)
    programs = []
    captured = []
    for index, (name, position) in enumerate(tokens):
        request = requests.get(name)
        steered = request is not None and request.program and inside(position, list(request.steer_spans))
        programs.append(request.program if steered else b"")
        if request is not None and request.capture is not None and inside(position, request.capture.spans):
            captured.append((index, request.capture, position))

    if step.programs is None:
        assert not any(programs)
    else:
        assert step.programs.dtype == np.int32
        assert [step.distinct[number] for number in step.programs] == programs
    assert step.distinct[0] == b""
    assert len(set(step.distinct)) == len(step.distinct)
    assert step.capture_rows.tolist() == [index for index, _, _ in captured]
    following = 0  # steps until something changes for one of the requests, looked at one at a time
    ahead = [(row.first + row.count - 1, requests[row.request_id]) for row in batch if row.request_id in requests]
    watched = [(at, list(request.steer_spans)) for at, request in ahead if request.program]
    watched += [(at, request.capture.spans) for at, request in ahead if request.capture is not None]
    while following < 100 and all(inside(at, spans) == inside(at + following + 1, spans) for at, spans in watched):
        following += 1
    assert min(step.lasting, 100) == following
    moved = [(move.target, move.first + offset) for move in step.moves for offset in range(move.count)]
    assert moved == [(target, position) for _, target, position in captured]


def test_overlaps() -> None:
    assert overlaps([0, -1], 5, 3) == [(5, 8)]
    assert overlaps([0, 6, 7, -1], 5, 3) == [(5, 6), (7, 8)]
    assert overlaps([0, 5, 8, 9], 5, 3) == []
    assert overlaps([], 5, 3) == []


def test_lasting() -> None:
    assert [lasting([3, 6, 8, -1], position) for position in (0, 2, 3, 5, 6, 7)] == [2, 0, 2, 0, 1, 0]
    assert lasting([3, 6, 8, -1], 8) == lasting([], 0) == FOREVER


def test_ranges() -> None:
    assert ranges([5, 9, 2], [2, 0, 3]).tolist() == [5, 6, 2, 3, 4]
    assert ranges([], []).tolist() == []


def test_an_empty_step() -> None:
    step = plan([], {})
    assert (step.tokens, step.programs, step.moves) == (0, None, [])
    step = plan([BatchRow("a", 3, 0)], {})
    assert (step.tokens, step.programs, step.moves) == (3, None, [])

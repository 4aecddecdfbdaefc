"""The vector bank: placed by content, counted, reused, never overwritten while used."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from chatspace_lab.engine.bank import VectorBank
from chatspace_lab.errors import SteeringError, WorkerError
from chatspace_lab.steering.vectors import content_key


def some(*values: float) -> dict[bytes, torch.Tensor]:
    vectors = [torch.tensor([value, 1.0]) for value in values]
    return {content_key(vector): vector for vector in vectors}


class Worker:
    """Plays the workers' bank, in the order in which the calls arrive."""

    def __init__(self) -> None:
        self.rows: dict[int, float] = {}
        self.uploads = 0
        self.fail = False
        self.gate: asyncio.Event | None = None

    async def upload(self, rows: list[int], data: bytes) -> None:
        self.uploads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fail:
            raise WorkerError("no room")
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(len(rows), 2)
        for row, value in zip(rows, values, strict=True):
            self.rows[row] = float(value[0])


def test_equal_vectors_share_a_row() -> None:
    async def main() -> None:
        worker = Worker()
        bank = VectorBank(4, worker.upload)
        first, second = await bank.acquire(some(1, 2)), await bank.acquire(some(2, 1))
        assert first == second[::-1]
        assert [worker.rows[row] for row in first] == [1, 2]
        assert worker.uploads == 1
        assert bank.used == 2

    asyncio.run(main())


def test_a_released_vector_stays_until_its_row_is_needed() -> None:
    async def main() -> None:
        worker = Worker()
        bank = VectorBank(2, worker.upload)
        await bank.acquire(some(1))
        bank.release(some(1))
        assert bank.used == 0
        await bank.acquire(some(1))
        assert worker.uploads == 1  # found again
        bank.release(some(1))
        rows = await bank.acquire(some(2, 3))
        assert sorted(rows) == [0, 1]
        assert sorted(worker.rows.values()) == [2, 3]

    asyncio.run(main())


def test_a_full_bank_says_so_and_stays_as_it_was() -> None:
    async def main() -> None:
        worker = Worker()
        bank = VectorBank(2, worker.upload)
        await bank.acquire(some(1, 2))
        with pytest.raises(SteeringError, match="2 rows"):
            await bank.acquire(some(1, 3))
        assert bank.used == 2
        bank.release(some(1, 2))
        assert len(await bank.acquire(some(1, 3))) == 2
        assert worker.rows.keys() == {0, 1}
        assert set(worker.rows.values()) == {1, 3}

    asyncio.run(main())


def test_a_failed_upload_is_tried_again() -> None:
    async def main() -> None:
        worker = Worker()
        bank = VectorBank(1, worker.upload)
        worker.fail = True
        with pytest.raises(WorkerError):
            await bank.acquire(some(1))
        assert bank.used == 0
        worker.fail = False
        (row,) = await bank.acquire(some(1))
        assert worker.rows[row] == 1

    asyncio.run(main())


def test_a_failed_upload_that_nobody_waited_for_is_tried_again() -> None:
    async def main() -> None:
        worker = Worker()
        worker.gate = asyncio.Event()
        bank = VectorBank(1, worker.upload)
        waiting = asyncio.create_task(bank.acquire(some(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert bank.used == 0
        worker.fail = True
        worker.gate.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        worker.fail = False
        (row,) = await bank.acquire(some(1))
        assert worker.rows[row] == 1
        assert worker.uploads == 2

    asyncio.run(main())


def test_two_users_of_one_failed_upload_both_learn_of_it() -> None:
    async def main() -> None:
        worker = Worker()
        worker.gate = asyncio.Event()
        worker.fail = True
        bank = VectorBank(2, worker.upload)
        both = asyncio.gather(bank.acquire(some(1)), bank.acquire(some(1, 2)), return_exceptions=True)
        await asyncio.sleep(0)
        worker.gate.set()
        assert [type(each) for each in await both] == [WorkerError, WorkerError]
        assert bank.used == 0
        worker.fail = False
        assert len(await bank.acquire(some(1, 2))) == 2

    asyncio.run(main())


def test_a_row_in_use_is_never_overwritten() -> None:
    async def main() -> None:
        worker, chance = Worker(), random.Random(0)
        bank = VectorBank(6, worker.upload)
        held: list[tuple[dict[bytes, torch.Tensor], list[int]]] = []
        for _ in range(2000):
            if held and chance.random() < 0.5:
                vectors, _ = held.pop(chance.randrange(len(held)))
                bank.release(vectors)
            else:
                vectors = some(*chance.sample(range(12), chance.randrange(1, 4)))
                try:
                    held.append((vectors, await bank.acquire(vectors)))
                except SteeringError:
                    assert len({key for each, _ in held for key in each} | vectors.keys()) > 6
            for vectors, rows in held:
                assert [worker.rows[row] for row in rows] == [float(v[0]) for v in vectors.values()]
        for vectors, _ in held:
            bank.release(vectors)
        assert bank.used == 0

    asyncio.run(main())

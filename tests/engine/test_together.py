"""Coroutines of one call: however the call ends, none of them is left, and each is cancelled once."""

from __future__ import annotations

import asyncio

import pytest

from chatspace_lab.engine.together import together


class Work:
    """Sleeps until it is cancelled, and then cleans up for a while."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.clean = False

    async def run(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            for _ in range(5):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            self.clean = True
            raise


async def after(delay_s: float, result: int) -> int:
    await asyncio.sleep(delay_s)
    return result


async def fail(delay_s: float, word: str) -> int:
    await asyncio.sleep(delay_s)
    raise KeyError(word)


def test_results_come_in_order() -> None:
    assert asyncio.run(together(after(0.02 / (1 + number), number) for number in range(4))) == [0, 1, 2, 3]
    assert asyncio.run(together([])) == []


def test_the_first_failure_is_told_once_the_others_have_ended() -> None:
    works = [Work(), Work()]

    async def main() -> None:
        await together([works[0].run(), fail(0.05, "late"), works[1].run(), fail(0.01, "early")])

    with pytest.raises(KeyError, match="early"):
        asyncio.run(main())
    assert [(work.cancelled, work.clean) for work in works] == [(1, True)] * 2


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_caller_that_is_cancelled_again_breaks_into_no_cleaning_up(times: int) -> None:
    works = [Work(), Work()]

    async def main() -> None:
        call = asyncio.create_task(together(work.run() for work in works))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(times):
            call.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [(work.cancelled, work.clean) for work in works] == [(1, True)] * 2

    asyncio.run(main())


def test_calls_within_calls() -> None:
    works = [Work(), Work()]

    async def inner() -> list[None]:
        return await together(work.run() for work in works)

    with pytest.raises(KeyError, match="outer"):
        asyncio.run(together([inner(), fail(0.01, "outer")]))
    assert [(work.cancelled, work.clean) for work in works] == [(1, True)] * 2

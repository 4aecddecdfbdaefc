"""The loop thread: used from loops that come and go, from threads, and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Iterator

import pytest

from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.errors import EngineDeadError
from tests.conftest import wait_until


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    yield thread
    thread.close()
    assert not any(each.name == "test-loop" for each in threading.enumerate())


async def name_of_thread() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_two_runs_in_a_row(loop: LoopThread) -> None:
    assert asyncio.run(loop.run(name_of_thread())) == "test-loop"
    assert asyncio.run(loop.run(name_of_thread())) == "test-loop"


def test_from_the_loop_itself(loop: LoopThread) -> None:
    async def nested() -> str:
        return await loop.run(name_of_thread())

    assert asyncio.run(loop.run(nested())) == "test-loop"


def test_from_threads(loop: LoopThread) -> None:
    results: list[str] = []

    def work(through_run: bool) -> None:
        results.append(asyncio.run(loop.run(name_of_thread())) if through_run else loop.call(name_of_thread()))

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["test-loop"] * 8


def test_errors_arrive(loop: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(loop.run(fail()))
    with pytest.raises(KeyError):
        loop.call(fail())


def test_a_blocking_call_on_the_loop_is_refused(loop: LoopThread) -> None:
    async def block() -> None:
        loop.call(name_of_thread())

    with pytest.raises(RuntimeError, match="would wait for itself"):
        loop.call(block())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_cancelling_waits_for_the_cleanup(loop: LoopThread, times: int) -> None:
    began, cleaned = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            cleaned.set()

    async def main() -> None:
        task = asyncio.create_task(loop.run(work()))
        await asyncio.to_thread(began.wait)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned.is_set()

    asyncio.run(main())


def test_what_is_cancelled_at_once_has_begun_and_is_cancelled_once(loop: LoopThread) -> None:
    """Its ``finally`` runs, whole: a stream that is left before it began must know that it was."""
    seen: list[str] = []

    async def work() -> None:
        seen.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            seen.append("cleaned")

    held_up = threading.Event()
    loop.loop.call_soon_threadsafe(held_up.wait)  # what follows arrives in one turn of the loop
    task = loop.spawn(work())
    task.cancel()
    held_up.set()
    task.cancel()
    wait_until(lambda: "began" in seen)
    task.cancel()
    wait_until(task.finished.done)
    assert seen == ["began", "cleaned"]


def test_nobody_waits_for_ever_for_a_loop_that_is_closed_meanwhile() -> None:
    def hammer(loop: LoopThread, blocking: bool) -> None:
        with contextlib.suppress(EngineDeadError):
            while True:
                assert (
                    loop.call(name_of_thread()) if blocking else asyncio.run(loop.run(name_of_thread()))
                ) == "closed"

    for _ in range(10):
        loop = LoopThread("closed")
        threads = [threading.Thread(target=hammer, args=(loop, index < 3), daemon=True) for index in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda threads=threads: all(thread.ident for thread in threads))  # type: ignore[misc]
        loop.close()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_a_result_that_comes_too_late_is_let_go(loop: LoopThread) -> None:
    """A handle in it holds memory of the workers, and a notebook keeps the last traceback for long."""

    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    async def work() -> Result:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        result = Result()
        made.append(weakref.ref(result))
        return result

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await loop.run(work())

    with pytest.raises(TimeoutError) as blocking:
        loop.call(work(), timeout_s=0.05)
    with pytest.raises(TimeoutError) as awaited:
        asyncio.run(main())
    wait_until(lambda: [each() for each in made] == [None, None])
    assert blocking.tb is not None  # they are still held here
    assert awaited.tb is not None


def test_a_timeout_cancels(loop: LoopThread) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.call(work(), timeout_s=0.05)
    assert ended.is_set()

    async def main() -> None:
        ended.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.run(work())
        assert ended.is_set()

    asyncio.run(main())


def test_closing_ends_what_runs_with_an_error_and_not_a_cancellation() -> None:
    """The caller did not cancel anything: a CancelledError would end its own task in silence."""
    loop = LoopThread("test-loop")
    outcome: list[BaseException] = []
    began = threading.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    def wait(through_run: bool) -> None:
        try:
            if through_run:
                asyncio.run(loop.run(work()))
            else:
                loop.call(work())
        except BaseException as error:  # noqa: BLE001 - which kind it is is the question
            outcome.append(error)

    threads = [threading.Thread(target=wait, args=(flag,)) for flag in (True, False)]
    for thread in threads:
        began.clear()
        thread.start()
        assert began.wait(5)
    loop.close()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in outcome] == [EngineDeadError, EngineDeadError]


def test_after_close(loop: LoopThread) -> None:
    loop.close()
    with pytest.raises(EngineDeadError, match="closed"):
        asyncio.run(loop.run(name_of_thread()))
    with pytest.raises(EngineDeadError, match="closed"):
        loop.call(name_of_thread())
    loop.close()
    wait_until(lambda: loop.loop.is_closed())

"""The readers-writer lock: order, fairness, and cancellation at every moment."""

from __future__ import annotations

import asyncio
import random

import pytest

from chatspace_lab.engine.lock import AsyncRWLock


class Log:
    """Who holds the lock when."""

    def __init__(self) -> None:
        self.lock = AsyncRWLock()
        self.events: list[str] = []
        self.release: dict[str, asyncio.Event] = {}

    def hold(self, name: str) -> asyncio.Task[None]:
        """Take the lock as a reader (r…) or a writer (w…) until it is released by name."""
        self.release[name] = asyncio.Event()

        async def holder() -> None:
            async with self.lock.write() if name.startswith("w") else self.lock.read():
                self.events.append(f"+{name}")
                await self.release[name].wait()
                self.events.append(f"-{name}")

        return asyncio.create_task(holder())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_readers_share() -> None:
    async def main() -> None:
        log = Log()
        tasks = [log.hold("r1"), log.hold("r2")]
        await settle()
        assert log.events == ["+r1", "+r2"]
        for event in log.release.values():
            event.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_writer_waits_for_readers_and_later_readers_wait_for_the_writer() -> None:
    async def main() -> None:
        log = Log()
        tasks = []
        for name in ("r1", "w1", "r2", "r3", "w2", "r4"):
            tasks.append(log.hold(name))
            await settle()
        assert log.events == ["+r1"]
        for name in ("r1", "w1", "r2", "r3", "w2", "r4"):
            log.release[name].set()
            await settle()
        await asyncio.gather(*tasks)
        assert log.events == ["+r1", "-r1", "+w1", "-w1", "+r2", "+r3", "-r2", "-r3", "+w2", "-w2", "+r4", "-r4"]

    asyncio.run(main())


def test_a_stream_of_readers_does_not_starve_a_writer() -> None:
    async def main() -> None:
        lock = AsyncRWLock()
        written = asyncio.Event()

        async def reader() -> None:
            while not written.is_set():
                async with lock.read():
                    await asyncio.sleep(0)

        async def writer() -> None:
            async with lock.write():
                written.set()

        await asyncio.wait_for(asyncio.gather(*(reader() for _ in range(5)), writer()), timeout=5)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["w1", "r2"])
def test_a_cancelled_waiter_lets_the_next_one_pass(name: str) -> None:
    async def main() -> None:
        log = Log()
        tasks = {}
        for each in ("r1", "w1", "r2"):
            tasks[each] = log.hold(each)
            await settle()
        tasks[name].cancel()
        await settle()
        assert tasks[name].cancelled()
        for event in log.release.values():
            event.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        left = "r2" if name == "w1" else "w1"
        assert f"+{left}" in log.events
        assert f"+{name}" not in log.events
        async with asyncio.timeout(1), log.lock.write():
            pass

    asyncio.run(main())


def test_a_waiter_cancelled_while_the_holder_releases() -> None:
    """Both happen before the waiter runs again: it must see its cancellation, and nothing else."""

    async def main() -> None:
        log = Log()
        holder, waiter = log.hold("w1"), log.hold("w2")
        await settle()
        log.release["w1"].set()
        await asyncio.sleep(0)  # the holder runs on and releases the lock ...
        waiter.cancel()  # ... which was granted to the waiter, who has not run yet
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await holder
        async with asyncio.timeout(1), log.lock.write():
            pass

    asyncio.run(main())


def test_a_waiter_cancelled_just_before_the_holder_releases() -> None:
    async def main() -> None:
        log = Log()
        holder, waiter, last = log.hold("w1"), log.hold("w2"), log.hold("r3")
        await settle()
        log.release["w1"].set()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        log.release["r3"].set()
        await asyncio.gather(holder, last)
        assert log.events == ["+w1", "-w1", "+r3", "-r3"]

    asyncio.run(main())


def test_an_error_inside_releases() -> None:
    async def main() -> None:
        lock = AsyncRWLock()
        for hold in (lock.read, lock.write):
            with pytest.raises(ZeroDivisionError):
                async with hold():
                    raise ZeroDivisionError
        async with asyncio.timeout(1), lock.write():
            pass

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_cancellations_never_break_it(seed: int) -> None:
    async def main() -> None:
        lock, chance = AsyncRWLock(), random.Random(seed)
        readers = writers = 0

        async def use(writer: bool) -> None:
            nonlocal readers, writers
            async with lock.write() if writer else lock.read():
                if writer:
                    writers += 1
                else:
                    readers += 1
                assert writers <= 1
                assert not (writers and readers)
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    if writer:
                        writers -= 1
                    else:
                        readers -= 1

        tasks = []
        for _ in range(200):
            tasks.append(asyncio.create_task(use(chance.random() < 0.3)))
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        async with asyncio.timeout(1), lock.write():
            pass

    asyncio.run(main())

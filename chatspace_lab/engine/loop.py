"""One event loop on one thread, usable from every other loop and thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from chatspace_lab.engine.together import ended, wait_out
from chatspace_lab.errors import EngineDeadError

T = TypeVar("T")
TICK_S = 0.1
CLOSED = "this model was closed; make a new one"


class RemoteTask(Generic[T]):
    """A task on another thread's loop.

    Attributes
    ----------
    finished
        Done when the task is: with its result, its exception, ``asyncio.CancelledError`` after :meth:`cancel`, or
        ``EngineDeadError`` if the loop was closed under it. Unlike the future of ``run_coroutine_threadsafe`` it stays
        undone while a cancelled task cleans up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.finished: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._begin, coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            # To a caller who cancelled nothing, CancelledError would look like the end of its own task.
            self.finished.set_exception(asyncio.CancelledError() if self._cancelled else EngineDeadError(CLOSED))
        elif (error := task.exception()) is not None:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(task.result())

    def cancel(self) -> None:
        """Cancel the task; :attr:`finished` says when it has ended. Again does nothing: it is cleaning up."""
        if self._cancelled:
            return
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs on it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # A task that is cancelled before its first step never takes one, and its cleaning up is left out.
        if self._task is not None:
            self._loop.call_soon(self._task.cancel)


class LoopThread:
    """A daemon thread that runs an event loop until :meth:`close`.

    Parameters
    ----------
    name
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._spawning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> RemoteTask[T]:
        """Start ``coroutine`` on the loop."""
        with self._spawning:  # what begins before close() is ended by it; what came later would never be run
            if not self._closing and self._thread.is_alive():
                return RemoteTask(self.loop, coroutine)
        coroutine.close()
        raise EngineDeadError(CLOSED)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` on this loop from any loop; cancelling the caller cancels it and waits for its end."""
        if self.is_current:
            return await coroutine
        task = self.spawn(coroutine)
        finished = asyncio.wrap_future(task.finished)
        try:
            with _awake(asyncio.get_running_loop()):
                return await asyncio.shield(finished)
        except asyncio.CancelledError:
            task.cancel()
            await wait_out([finished])
            raise
        finally:
            del task, finished  # a result that came too late must not live on in the traceback

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float | None = None,
        tick: Callable[[], None] | None = None,
        patience_s: float = 10,
    ) -> T:
        """Wait for ``coroutine`` from a thread. An interrupt cancels it, waits until it has ended, and goes on.

        It is a ``KeyboardInterrupt``, or ``CancelledError`` in a coroutine, where it is the caller's end too.

        ``tick`` is called in the waiting thread, ten times a second: to show how far things are. ``patience_s`` is how
        long to wait for the end of what was interrupted.

        Raises
        ------
        RuntimeError
            If called on this loop's own thread, where it would wait for itself.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("a blocking call on the engine's own loop would wait for itself: await the async twin")
        task = self.spawn(coroutine)
        try:
            with _interruptible():
                while tick is not None and not task.finished.done():
                    concurrent.futures.wait([task.finished], timeout=TICK_S)
                    tick()
                return task.finished.result(timeout_s)
        except BaseException:
            if not task.finished.done():
                task.cancel()
                concurrent.futures.wait([task.finished], timeout=patience_s)
            raise
        finally:
            del task  # a result that came too late must not live on in the traceback

    def close(self) -> None:
        """Cancel what runs on the loop, stop it and end the thread."""
        if self.loop.is_closed():
            return
        with self._spawning:
            self._closing = True
        if not self.is_current and self._thread.is_alive():
            with contextlib.suppress(Exception):
                RemoteTask(self.loop, _cancel_all()).finished.result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_current:
            self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self.loop.close()


class _Pulse:
    """Wakes an event loop ten times a second while anyone holds it."""

    def __init__(self) -> None:
        self._holders = 0
        self._next: asyncio.TimerHandle | None = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = loop.call_later(TICK_S, self._beat, loop)

    def hold(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._holders:
            self._beat(loop)
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders and self._next is not None:
            self._next.cancel()


_pulses: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pulse] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _awake(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let a loop of the main thread wake up now and then while a call waits in it.

    Python handles a signal in the main thread, once that runs. A system may deliver the signal of a stop button to
    another thread, and then a loop that sleeps until its next event would sleep on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pulse = _pulses.setdefault(loop, _Pulse())
    pulse.hold(loop)
    try:
        yield
    finally:
        pulse.release()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let the stop button reach a call that blocks a coroutine.

    While a coroutine runs, ipykernel and ``asyncio.run`` answer the signal by cancelling its task, on the loop: a call
    that blocks this loop would never hear of it.
    """
    before = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is not None
    if not mine or not callable(before) or before is signal.default_int_handler:
        yield
        return

    def pressed(number: int, frame: Any) -> None:
        before(number, frame)
        raise asyncio.CancelledError

    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _cancel_all() -> None:
    await ended(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

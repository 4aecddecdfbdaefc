"""Run coroutines concurrently, and wait until all of them have ended even on failure or cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one fails, or the caller is cancelled, the others are cancelled, and this function waits until they have ended.
    ``asyncio.gather`` would return without waiting, and a second cancellation would interrupt their cleanup.

    Raises
    ------
    BaseException
        The exception of the first coroutine that failed.
    """
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
    finally:
        await ended(tasks)
    for task in failed:
        task.result()
    return [task.result() for task in tasks]


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel each task once and wait until all have ended, even if the caller is cancelled meanwhile."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await wait_out(tasks)


async def wait_out(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all futures are done, even if the caller is cancelled meanwhile.

    A cancellation of the caller is raised at the end. Exceptions of the futures are marked as retrieved, not raised;
    the caller reports the first failure.

    Raises
    ------
    asyncio.CancelledError
        If the caller was cancelled while it waited.
    """
    futures = list(futures)
    cancelled: asyncio.CancelledError | None = None
    while pending := {future for future in futures if not future.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in futures:
        if not future.cancelled():
            future.exception()
    if cancelled is not None:
        raise cancelled

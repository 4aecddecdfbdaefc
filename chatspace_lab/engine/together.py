"""Coroutines that belong to one call: run side by side, ended as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of them side by side and return their results in order.

    If one fails, or the caller is cancelled, the others are cancelled and this waits until they have ended.
    ``asyncio.gather`` goes on without waiting, and who then cancels again breaks into their cleaning up.

    Raises
    ------
    BaseException
        What the first of them to fail raised.
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
    """Cancel tasks, each once, and wait until they have ended: also while the caller is cancelled again and again."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await wait_out(tasks)


async def wait_out(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all are done: also while the caller is cancelled again and again, which it is told afterwards.

    Their exceptions count as seen: the caller tells what went wrong first.
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

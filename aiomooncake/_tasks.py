"""Several coroutines side by side, none of which outlives the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio

from aiomooncake.errors import MooncakeError

T = TypeVar("T")

__all__ = ["caught", "finished", "once", "settle", "together"]


async def caught(
    work: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any
) -> T | MooncakeError:
    """Do the work on one key; what went wrong with that key is the answer.

    It takes the function, since a task that is cancelled before it begins would never await a
    coroutine.

    Raises:
        MooncakeError: What is not about one key: the store is closed, say.
    """
    try:
        return await work(*args, **kwargs)
    except MooncakeError as exc:
        if exc.key is None:
            raise
        return exc.with_traceback(None)  # its frames hold the memory that the call named


async def together(coros: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of them; the answers in order.

    The first failure, or a cancellation, cancels the others. Either way it returns when all of
    them have ended, however often it is cancelled meanwhile: what they drain stays drained.
    """
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await _wait(tasks)
        raise


async def settle(coros: Iterable[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Run all of them to their end, also when some fail; answers and errors in order.

    A cancellation cancels them all, and they are waited for.
    """
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    except BaseException:
        await _wait(tasks)
        raise


async def finished(task: asyncio.Task[T]) -> T:
    """Wait until a task is over, however often this one is cancelled meanwhile."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _wait([task])
        raise


def once(
    before: asyncio.Task[T] | None, work: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> asyncio.Task[T]:
    """Find the task that does the work: the one of ``before``, or a new one if that failed.

    A task of another loop does not count.
    """
    if before is not None and before.get_loop() is asyncio.get_running_loop():
        failed = before.done() and (before.cancelled() or before.exception() is not None)
        if not failed:
            return before
    return asyncio.ensure_future(work(*args))


async def _wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    pending = {task for task in tasks if not task.done()}
    # The shield keeps anyio from cancelling again and again; the loop stands native cancellation.
    with anyio.CancelScope(shield=True):
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError:
                pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved: the first one is raised by the caller

"""Cancel a call at a chosen suspension of it, or of any task that it has started.

A call is run as a task whose every suspension is counted, and so are those of the tasks that it
starts, so that ``for at in range(...)`` visits each point at which a cancellation can arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import anyio

from aiomooncake import Store

__all__ = [
    "HOWS",
    "PROMPT",
    "How",
    "cancelled_at",
    "cancelled_everywhere",
    "counting",
    "eventually",
    "quiet",
]

How = Literal["once", "late", "again", "scope"]
"""How a call is cancelled.

``once`` as soon as it is suspended; ``late`` when what it waits for has come and it does not know
yet; ``again`` at that suspension and at every one after it; ``scope`` by a cancel scope of anyio,
which repeats itself too.
"""

HOWS: tuple[How, ...] = ("once", "late", "again", "scope")

PROMPT = 10.0
"""Seconds in which everything here ends that is not held back; a busy machine included."""

_MOST = 400  # suspensions of one call; more is a loop without an end

Call = Callable[[], Coroutine[Any, Any, Any]]


class _Steps:
    """The suspensions of one call, and when to cancel it."""

    def __init__(self, at: int, how: How) -> None:
        self.at = at
        self.how = how
        self.count = 0
        self.fired = False
        self.task: asyncio.Task[Any] | None = None
        self.scope: anyio.CancelScope | None = None

    def suspended(self, on: Any) -> None:
        self.count += 1
        if self.count < self.at or (self.count > self.at and self.how != "again"):
            return
        self.fired = True
        if self.how == "late" and on is not None:
            # Before the task's own callback, which wakes it.
            on.add_done_callback(lambda _: self.cancel())
        else:
            self.cancel()

    def cancel(self) -> None:
        if self.how == "scope":
            assert self.scope is not None
            self.scope.cancel()
        elif self.task is not None:
            self.task.cancel()


_steps: ContextVar[_Steps | None] = ContextVar("steps", default=None)


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that tells of each suspension."""

    def __init__(self, coro: Coroutine[Any, Any, Any], steps: _Steps) -> None:
        self._coro = coro
        self._steps = steps

    def send(self, value: Any, /) -> Any:
        return self._told(self._coro.send(value))

    def throw(self, *args: Any) -> Any:
        try:
            return self._told(self._coro.throw(*args))
        finally:
            del args  # with the error's traceback it is a cycle, which holds what was read

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Iterator[Any]:  # type: ignore[override]  # only tasks run it
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_running and the like, which anyio looks at

    def _told(self, on: Any) -> Any:
        self._steps.suspended(on)
        return on


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Count the suspensions of the tasks that calls of :func:`cancelled_everywhere` start."""
    loop = asyncio.get_running_loop()

    def make(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        steps = _steps.get()
        counted = coro if steps is None else _Counted(coro, steps)
        return asyncio.Task(counted, loop=loop, **options)

    loop.set_task_factory(make)  # type: ignore[arg-type]  # its type differs from release to release
    try:
        yield
    finally:
        loop.set_task_factory(None)


async def cancelled_everywhere(call: Call, how: How) -> AsyncIterator[Any]:
    """Run a call again and again, cancelled at its first suspension, its second, and so on.

    The first time it is cancelled before its first step, the last time not at all, because it ends
    before. Yields what came of each run: its result, or the CancelledError. Inside of
    :func:`counting`.
    """
    for at in range(_MOST):
        outcome, cancelled = await cancelled_at(call, at, how)
        yield outcome
        if not cancelled:
            assert not isinstance(outcome, BaseException), outcome
            return
    raise AssertionError(f"still suspended after {_MOST} steps")


async def cancelled_at(call: Call, at: int, how: How) -> tuple[Any, bool]:
    """Run a call and cancel it at suspension ``at``, or before its first step.

    Returns:
        Its result or the CancelledError; and whether it was cancelled at all.
    """
    steps = _Steps(at, how)
    token = _steps.set(steps)
    try:
        task = steps.task = asyncio.ensure_future(
            _in_scope(call, steps) if how == "scope" else call()
        )
    finally:
        _steps.reset(token)
    if not at and how != "scope":
        steps.fired = True
        task.cancel()
    done, _ = await asyncio.wait({task}, timeout=PROMPT)
    assert done, f"cancelled {how} at suspension {at}, it did not end: {task}"
    steps.task = None  # its error would hold the frames of the call
    outcome = asyncio.CancelledError() if task.cancelled() else task.result()
    return outcome, steps.fired


async def _in_scope(call: Call, steps: _Steps) -> Any:
    with anyio.CancelScope() as steps.scope:
        if not steps.at:
            steps.fired = True
            steps.scope.cancel()
        return await call()
    return asyncio.CancelledError()


# --- what is left behind ------------------------------------------------------------------------


async def eventually(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """Wait for what other threads do soon and nobody tells."""
    deadline = time.monotonic() + PROMPT
    while not condition():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.0005)


async def quiet(store: Store, *others: asyncio.Task[Any]) -> None:
    """Wait until nothing of a store runs; fail if a call has left something behind.

    Args:
        store: The store.
        *others: Tasks that go on.
    """
    client, transfers = store._client, store._transfers
    expected = {asyncio.current_task(), *others}

    def busy() -> list[object]:
        batching = store._batching
        lanes = [] if batching is None else [*batching._writes.values(), batching.gets]
        if batching is not None:
            lanes += [batching.exists, batching.sizes, batching.into, batching.into_parts]
            lanes += [batching.views]
        turns = [batching._turns] if batching is not None and batching._turns._busy else []
        return [
            *client.gate.calls(),
            *(lane for lane in lanes if not lane.idle),
            *turns,
            *transfers._registrations._regions,
            *transfers._putting,
            *(lane for lane in client._lanes if lane._wanted or lane.aside),
            *(asyncio.all_tasks() - expected),
        ]

    await eventually(lambda: not busy(), busy)
    await asyncio.sleep(0)  # what threads have scheduled with their ends is done
    stats = store.stats()
    assert (stats.in_flight, stats.abandoned, stats.tainted) == (0, 0, False)

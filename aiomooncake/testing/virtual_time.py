"""An event loop whose clock jumps: a warm-up of sixty seconds is tested in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from aiomooncake.testing._watching import Watch, watching

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

__all__ = ["VirtualTimeLoop", "run_in_virtual_time"]

_LOOK_AGAIN: Final = 0.001  # real seconds between two looks at threads that are at work
_ANSWER_TIME: Final = 0.02  # real seconds that sockets get for an answer before each jump
_PATIENCE: Final = 5.0  # real seconds to wait for a thread that nobody knows of


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and jumps over every wait.

    ```python
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:  # Python 3.11 and newer
        runner.run(scenario())
    ```

    `run_in_virtual_time` does the same on every Python. ``loop.time()`` is the virtual clock, and
    everything that waits by it (``asyncio.sleep``, ``asyncio.timeout``, ``wait_for``, anyio's
    cancel scopes) takes no time.

    The clock jumps to the next timer only when all that the loop waits for are timers. While a
    thread does something for it, the clock stands still and real time passes: a job of
    ``asyncio.to_thread``, ``run_in_executor`` or ``anyio.to_thread``, or a call of a store of this
    loop. A call of the in-memory engine that hangs in a fault's ``hold`` or on a frozen master,
    and one that was abandoned, does nothing, so for these the clock goes on: time-outs strike.

    What it can't do:

    - ``time.monotonic()`` and ``time.sleep()`` are real: a fault's ``delay``, a frozen master's
      ``rpc_timeout``, and the leases of the in-memory engine, unless its ``clock`` is set to
      ``loop.time``.
    - What comes through a socket or from another process is not known beforehand: each jump waits
      for it 20 ms, and then time-outs strike. So this is for the in-memory engine and for fakes,
      not for the real engine.
    - Nor is what another event loop of the process does: a set-up that waits for its turn there.
    - A job of ``asyncio.to_thread`` that waits for something that a timer brings waits for ever.
    - Threads that you start yourself are not known, unless a future is awaited that nothing else
      can bring: then they have 5 s, after which the loop says that nothing will ever happen.
    """

    def __init__(self) -> None:
        self.watch = Watch()
        self._jobs: set[asyncio.Future[Any]] = set()
        self._ending = False
        self._jumping = _JumpingSelector(self._is_at_work)
        super().__init__(self._jumping)
        self._jumping.own = len(self._jumping.get_map())
        # Of asyncio: what is due by so much is due now. A nanosecond is lost in a clock that has
        # jumped by months, and then no timer would ever be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Return the virtual time: seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]  # typeshed promises a Future, asyncio too
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function in a thread; the clock stands still until it is done or cancelled."""
        job = super().run_in_executor(executor, func, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the executor's threads to end, in real time."""
        self._ending = True
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._ending = False

    def run_forever(self) -> None:
        """Run until the loop is stopped."""
        with watching():
            super().run_forever()

    def _is_at_work(self) -> bool:
        """Tell whether a thread does something that this loop may be waiting for."""
        return bool(self._jobs) or self._ending or self.watch.at_work or _anyio_is_at_work()


def _anyio_is_at_work() -> bool:
    try:
        return anyio.to_thread.current_default_thread_limiter().borrowed_tokens > 0
    except RuntimeError:  # up to anyio 4.10 only a task may ask
        return False


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for files as ever, but moves the clock instead of waiting for time.

    Args:
        at_work: Tells whether something may come from a thread.
    """

    def __init__(self, at_work: Callable[[], bool]) -> None:
        super().__init__()
        self.now = 0.0
        self.own = 0  # files of the loop itself
        self._at_work = at_work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        waited = 0.0
        while True:
            # In this order: a thread that is at rest has said already what it had to say.
            at_work = self._at_work()
            if ready := super().select(0):
                return ready
            if at_work:
                pause = _LOOK_AGAIN
            elif timeout is None:
                pause = _PATIENCE - waited
            else:
                pause = (_ANSWER_TIME if len(self.get_map()) > self.own else 0.0) - waited
            if pause > 0:
                if ready := super().select(pause):
                    return ready
                waited = 0.0 if at_work else waited + pause
            elif timeout is None:
                raise RuntimeError(
                    "nothing will ever happen: every task of this loop waits, no timer is set, no "
                    "call is under way, and nothing came from elsewhere for 5 s"
                )
            else:
                self.now += timeout
                return []


def run_in_virtual_time(coro: Awaitable[T]) -> T:
    """Run a coroutine on a `VirtualTimeLoop` of its own, as ``asyncio.run`` does.

    Raises:
        RuntimeError: A loop runs in this thread; or nothing will ever happen, every task waits.
    """
    return anyio.run(_awaited, coro, backend_options={"loop_factory": VirtualTimeLoop})


async def _awaited(coro: Awaitable[T]) -> T:
    return await coro

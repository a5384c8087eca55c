"""Measure how long an event loop stood still."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from aiomooncake.errors import InvalidArgumentError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # for type checkers only, which bring it along

__all__ = ["LoopStallProbe", "Stall"]

_NOISE = 0.005  # seconds; timers alone are late by 1-2 ms (epoll and uvloop count milliseconds)
_KEPT = 1000  # stalls


class Stall(NamedTuple):
    """One time the loop stood still.

    Attributes:
        when: Seconds from entering the probe to the beginning of the stall.
        seconds: How long it lasted.
    """

    when: float
    seconds: float


class LoopStallProbe:
    """Measure how long the running event loop stands still.

    ```python
    async with LoopStallProbe() as probe:
        await work()
    assert probe.longest < 0.1, probe.stalls()
    ```

    A timer in the loop fires every ``interval`` seconds; what it comes late is time in which the
    loop served nobody, whoever was to blame: a blocking call, a thread that held the GIL, or a
    machine too busy to run the process. A stall is therefore reported up to ``interval`` too
    short, never too long. One that is still going on counts already, so a reading taken right
    after a blocking call is true. Works on asyncio's loops and uvloop and costs about 500 short
    callbacks per second. It may be entered again when it was left, on any loop, and starts anew
    then; the figures stay readable in between.

    Args:
        interval: Seconds between two looks.

    Raises:
        InvalidArgumentError: ``interval`` is not a positive number.
    """

    def __init__(self, *, interval: float = 0.002) -> None:
        if not 0 < interval < math.inf:
            raise InvalidArgumentError(
                f"interval must be a number of seconds above 0, got {interval!r}"
            )
        self._interval = interval
        self._longest = 0.0
        self._stalls: deque[Stall] = deque(maxlen=_KEPT)
        self._entered = 0.0
        self._due = math.inf  # when the timer should fire; infinity when the probe is not active
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "active" if self._timer is not None else "not active"
        return (
            f"<LoopStallProbe {state}, longest {self.longest * 1000:.1f} ms, "
            f"{len(self.stalls())} over {_NOISE * 1000:g} ms>"
        )

    @property
    def longest(self) -> float:
        """Seconds of the longest stall so far, 0.0 if there was none."""
        return max(self._longest, self._overdue())

    def stalls(self, threshold: float = _NOISE) -> list[Stall]:
        """List the stalls of at least ``threshold`` seconds, oldest first.

        Only those over 5 ms are kept, and of these the last 1000: a smaller threshold finds no
        more. `longest` knows them all.
        """
        kept = [*self._stalls, Stall(self._due - self._entered, self._overdue())]
        return [stall for stall in kept if stall.seconds >= max(threshold, _NOISE)]

    def reset(self) -> None:
        """Forget everything so far, also a stall that is going on. Call it in the loop."""
        self._longest = 0.0
        self._stalls.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._arm(asyncio.get_running_loop())

    async def __aenter__(self) -> Self:
        if self._timer is not None:
            raise RuntimeError("this LoopStallProbe is active already: use one for each loop")
        self._entered = time.perf_counter()
        self.reset()
        self._arm(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._record()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._due = math.inf

    def _overdue(self) -> float:
        return max(0.0, time.perf_counter() - self._due)

    def _record(self) -> None:
        late = self._overdue()
        self._longest = max(self._longest, late)
        if late >= _NOISE:
            self._stalls.append(Stall(self._due - self._entered, late))

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.perf_counter() + self._interval
        self._timer = loop.call_later(self._interval, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._record()
        self._arm(loop)

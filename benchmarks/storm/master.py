"""A master as a queue: requests wait for one of a few workers, and clients give up on them.

First come, first served. So a request's end is known when it comes, and each one costs the
simulation a single timer.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from typing import Final

from benchmarks.storm.calibration import Calibration

__all__ = ["WINDOW", "Master"]

WINDOW: Final = 0.1
"""Seconds over which peaks are counted."""

_ALONE: Final = frozenset({"mount"})
"""Kinds that change the list of segments: one at a time, and each keeps its worker meanwhile."""


class Master:
    """The model of a master, on the clock of the running loop.

    Args:
        calibration: What a request costs.
        workers: How many requests are worked on at once: the cores that the master has.
        rpc_timeout: Seconds after which a client gives a request up. The master can't know that
            and works it off all the same, as the real one does.
        back_at: Loop time before which the master is not there.

    Attributes:
        came: Requests that reached the master, by kind.
        answered: Those whose answer was in time.
        timed_out: Those that were given up after ``rpc_timeout``.
        dropped: Those whose caller was cancelled before that.
        busy: Seconds that workers were at work.
        longest_wait: Seconds that a request waited for its answer at most, though given up.
        windows: Requests by window of 100 ms.
        retry_windows: Those of second and later tries alone.
    """

    def __init__(
        self,
        calibration: Calibration,
        workers: int,
        rpc_timeout: float,
        back_at: float = 0.0,
    ) -> None:
        self.back_at = back_at
        self.came: Counter[str] = Counter()
        self.answered = self.timed_out = self.dropped = 0
        self.busy = self.longest_wait = 0.0
        self.windows: Counter[int] = Counter()
        self.retry_windows: Counter[int] = Counter()
        self._service = calibration.service
        self._try = calibration.connect_try
        self._tries = calibration.connect_tries
        self._rpc_timeout = rpc_timeout
        self._free = [0.0] * workers  # when each worker is through with what it has
        self._alone_until = 0.0
        self._time = asyncio.get_running_loop().time

    @property
    def away(self) -> bool:
        """Whether nobody listens."""
        return self._time() < self.back_at

    def busy_share(self, seconds: float) -> float:
        """Return which part of its workers' time the master was at work."""
        return self.busy / (seconds * len(self._free))

    async def reached(self) -> bool:
        """Connect, as an engine's call does that has no connection, and tell whether it could."""
        for _ in range(self._tries):
            if not self.away:
                return True
            await asyncio.sleep(self._try)
        return False

    async def request(
        self,
        kind: str,
        client: float = 0.0,
        *,
        retry: bool = False,
        then: Callable[[float], object] | None = None,
    ) -> bool:
        """Make a request.

        Args:
            kind: Of those that the calibration knows.
            client: Seconds that the client takes for it beside the master.
            retry: Whether it belongs to a second or later try.
            then: Told when the master has done it, whether or not the client still waits.

        Returns:
            Whether the answer came in time.
        """
        takes = self._work(kind)
        if retry:
            self.retry_windows[int(self._time() / WINDOW)] += 1
        if then is not None:
            then(self._time() + takes)
        in_time = takes <= self._rpc_timeout
        try:
            await asyncio.sleep(min(takes, self._rpc_timeout) + client)
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        self._count(in_time)
        return in_time

    def post(self, kind: str) -> None:
        """Make a request whose answer changes nothing, so that nobody needs to wait for it."""
        self._count(self._work(kind) <= self._rpc_timeout)

    def _count(self, in_time: bool) -> None:  # noqa: FBT001  # what happened
        if in_time:
            self.answered += 1
        else:
            self.timed_out += 1

    def _work(self, kind: str) -> float:
        """Give a request to the worker that is free first; return how long it will take."""
        now, seconds = self._time(), self._service[kind]
        self.came[kind] += 1
        self.windows[int(now / WINDOW)] += 1
        begin = max(now, self._free[0])
        if kind in _ALONE:
            begin = max(begin, self._alone_until)
            self._alone_until = begin + seconds
        heapq.heapreplace(self._free, begin + seconds)
        self.busy += seconds
        takes = begin + seconds - now
        self.longest_wait = max(self.longest_wait, takes)
        return takes

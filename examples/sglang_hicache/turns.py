"""How many threads move pages at once: fewer than would like to."""

from __future__ import annotations

import os
import threading
from collections import deque
from types import TracebackType

__all__ = ["Turns"]

PATIENCE = 1.0
"""Seconds after which a thread goes without a turn: those before it may be stuck."""


class Turns:
    """A context manager that some threads hold at a time, in the order in which they came.

    A thread whose transfer is under way spins in the engine, beside the threads that do the
    transfer. So more of them than cores take the cores from each other: eight threads that read
    pages of another process on two cores moved half as many, and took twice the CPU time for each,
    without this.

    Args:
        width: How many; by default one for each core, and one that is ready when another ends.
    """

    def __init__(self, width: int | None = None) -> None:
        # Below zero when threads went without a turn.
        self._free = width or (os.cpu_count() or 1) + 1
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        if turn.acquire(timeout=PATIENCE):
            return
        with self._lock:
            if turn in self._queue:  # else it came just now
                self._queue.remove(turn)
                self._free -= 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._queue and self._free >= 0:
                self._queue.popleft().release()
            else:
                self._free += 1

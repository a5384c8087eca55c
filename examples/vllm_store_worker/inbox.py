"""Requests on their way to threads that take together what waits together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["PATIENCE", "Inbox"]

T = TypeVar("T")

PATIENCE = 0.5
"""Seconds after which another thread is let in beside one that may be stuck."""

_MOST = 64
"""Requests that a thread takes at once."""


class Inbox(Generic[T]):
    """Hands requests to threads; safe from any thread.

    A call of the engine costs much the same for the blocks of one request as for those of ten,
    and threads that wait inside it spin: four of them on two cores take twice as long as one with
    the work of all. So one thread is at work at a time. It leaves with the first request at once,
    and what comes meanwhile is taken by the next thread, all of it. Only when a thread does not
    come back, because a peer hangs, is another one let in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)  # threads that wait for requests
        self._idle = threading.Condition(self._lock)
        self._waiting: deque[T] = deque()
        self._unfinished = 0
        self._at_work = 0
        self._left = 0.0  # when a thread last left with requests
        self._watched = False  # whether a thread waits for the end of its patience
        self._joining = 0
        self._apart_until = 0.0
        self._closed = False

    def put(self, requests: Sequence[T]) -> bool:
        """Queue requests; False when it is too late."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.extend(requests)
            self._unfinished += len(requests)
            # One thread, and none while another is at work and somebody watches it.
            if not (self._at_work and self._watched):
                self._wanted.notify()
            return True

    def take(self) -> list[T]:
        """Wait for requests and take them; :meth:`done` must follow. Empty = there will be none."""
        with self._lock:
            while not self._closed:
                if not self._waiting:
                    self._wanted.wait()
                    continue
                now = time.monotonic()
                patience = self._left + PATIENCE - now if self._at_work else 0.0
                if patience <= 0:
                    return self._take(now)
                if self._watched:
                    self._wanted.wait()
                else:
                    self._watched = True
                    self._wanted.wait(patience)
                    self._watched = False
            return []

    def _take(self, now: float) -> list[T]:
        self._left = now
        self._at_work += 1
        most = 1 if now < self._apart_until else _MOST
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        if self._waiting and not self._watched:
            self._wanted.notify()
        return taken

    def done(self, taken: list[T]) -> None:
        """Note that what was taken is finished."""
        with self._lock:
            self._at_work -= 1
            self._unfinished -= len(taken)
            if self._waiting:
                self._wanted.notify()
            if self._joining and not self._unfinished:
                self._idle.notify_all()

    def keep_apart(self, seconds: float) -> None:
        """Give out single requests for a while: one that gets stuck must not hold others."""
        with self._lock:
            self._apart_until = time.monotonic() + seconds

    def join(self, timeout: float) -> bool:
        """Wait until everything is finished; False after ``timeout`` seconds."""
        with self._lock:
            self._joining += 1
            try:
                return self._idle.wait_for(lambda: not self._unfinished, timeout)
            finally:
                self._joining -= 1

    def close(self) -> list[T]:
        """Let the threads go; return what nobody has taken."""
        with self._lock:
            self._closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._unfinished -= len(dropped)
            self._wanted.notify_all()
            self._idle.notify_all()
            return dropped

    def __repr__(self) -> str:
        return f"<Inbox waiting={len(self._waiting)} at_work={self._at_work}>"

"""One at a time, in order, across all event loops of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from types import TracebackType

__all__ = ["Turnstile"]


class Turnstile:
    """An async context manager that one task holds at a time.

    Set-ups pass it, because many of them together starve the loop (32 at once on two cores: 2.4 s;
    one at a time: 41-128 ms). Whoever gives up waiting or holding lets the next one through, also
    when the native call it started goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self._held:
                self._held = True
                return
            turn: asyncio.Future[None] = loop.create_future()
            place = (loop, turn)
            self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                waits = place in self._waiting
                if waits:
                    self._waiting.remove(place)
            if not waits:  # the turn came together with the cancellation
                self._pass_on()
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._held = False
                    return
                loop, turn = self._waiting.popleft()
            # A loop that was closed meanwhile can't take its turn.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_grant, turn)
                return

    def __repr__(self) -> str:
        return f"<Turnstile held={self._held} waiting={len(self._waiting)}>"


def _grant(turn: asyncio.Future[None]) -> None:
    # A cancelled one passes its turn on by itself, when its task runs.
    if not turn.done():
        turn.set_result(None)

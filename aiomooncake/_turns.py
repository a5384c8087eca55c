"""Whose turn it is to write a key: one write of a key at a time, in the order of asking.

The engine answers 0 to a ``put`` of a key while another one is unfinished: nobody can read the
value yet, and when the first one fails or is given up, nothing is stored at all. So the writes of
one store take turns, whatever verb and way they go by.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Turns"]


class Turns:
    """The turns of all keys that are being written, on one event loop."""

    def __init__(self) -> None:
        # Most keys are written by nobody else meanwhile, and have no queue.
        self._busy: dict[str, deque[Callable[[], object]] | None] = {}

    def take(self, key: str) -> bool:
        """Take the turn if nobody has it."""
        if key in self._busy:
            return False
        self._busy[key] = None
        return True

    def free(self, keys: Iterable[str]) -> bool:
        """Tell whether nobody has the turn of any of these keys."""
        return self._busy.keys().isdisjoint(keys)

    def take_all(self, keys: Iterable[str]) -> None:
        """Take the turns of keys that are free."""
        self._busy.update(dict.fromkeys(keys))

    def queue(self, key: str, begin: Callable[[], object]) -> None:
        """Have ``begin`` called when the turn comes; for a key that is taken."""
        waiting = self._busy[key]
        if waiting is None:
            waiting = self._busy[key] = deque()
        waiting.append(begin)

    def leave(self, key: str, begin: Callable[[], object]) -> None:
        """Wait no longer; also when ``begin`` was called meanwhile."""
        waiting = self._busy.get(key)
        if waiting is not None and begin in waiting:
            waiting.remove(begin)

    def end(self, key: str) -> None:
        """Give the turn to the next one."""
        waiting = self._busy[key]
        if waiting:
            waiting.popleft()()
        else:
            del self._busy[key]

    def end_all(self, keys: Iterable[str]) -> None:
        """Give the turns of many keys to the next ones."""
        busy = self._busy
        for key in keys:
            waiting = busy.pop(key)
            if waiting:
                busy[key] = waiting
                waiting.popleft()()

    def end_from_thread(self, key: str, loop: asyncio.AbstractEventLoop) -> None:
        """Give the turn to the next one, from any thread."""
        # Of a loop that is closed nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self.end, key)

    async def mine(self, key: str) -> None:
        """Wait for the turn."""
        if self.take(key):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if turn.cancelled():  # and the task does not know it yet
                self.end(key)
            else:
                turn.set_result(None)

        self.queue(key, begin)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.leave(key, begin)
            else:  # it came before the cancellation
                self.end(key)
            raise

    def __repr__(self) -> str:
        return f"<Turns of {len(self._busy)} keys>"

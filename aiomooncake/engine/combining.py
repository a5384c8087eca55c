"""Questions that several threads ask at once, asked as one.

The engine answers a batch of a hundred keys in the time of two single questions, and threads
without a loop have nobody who would gather theirs. So whoever comes while two questions are under
way waits, and what has gathered when one returns is the next question, asked by the thread that
came first. A thread that is alone asks at once, and pays two uncontended locks for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Combiner"]

_WIDTH: Final = 2
"""Questions side by side: one leaves a core idle, more gather less."""

Ask = Callable[[list[str]], list[int]]


class _Turn:
    """One thread's question while it waits."""

    __slots__ = ("answer", "called", "keys", "leads")

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.answer: list[int] | None = None
        self.leads = False
        self.called = threading.Lock()
        self.called.acquire()


class Combiner:
    """Gathers the keys of threads that ask at the same time. Safe from any thread; it blocks.

    Args:
        ask: Asks for many keys at once; one code per key.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._under_way = 0
        self._waiting: list[_Turn] = []

    def ask(self, keys: Any) -> list[int]:
        """Ask for some keys; what the engine answers for them, or raises."""
        turn: _Turn | None = None
        with self._lock:
            if self._under_way >= _WIDTH:
                turn = _Turn(keys)
                self._waiting.append(turn)
            else:
                self._under_way += 1
        if turn is None:
            try:
                return self._ask(keys)
            finally:
                self._pass_on()
        turn.called.acquire()
        if turn.leads:
            try:
                self._ask_for_all(turn)
            finally:
                self._pass_on()
        if turn.answer is None:
            # The question of all was refused, perhaps because of somebody else's key.
            return self._ask(keys)
        return turn.answer

    def _ask_for_all(self, first: _Turn) -> None:
        with self._lock:
            turns = [first, *self._waiting]
            self._waiting.clear()
        try:
            # When it is refused, each thread asks for itself and gets its own error.
            with contextlib.suppress(Exception):
                codes = self._ask([key for turn in turns for key in turn.keys])
                if len(codes) == sum(len(turn.keys) for turn in turns):
                    start = 0
                    for turn in turns:
                        end = start + len(turn.keys)
                        turn.answer = codes[start:end]
                        start = end
        finally:
            for turn in turns[1:]:
                turn.called.release()

    def _pass_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._under_way -= 1
                return
            turn = self._waiting.pop(0)
        turn.leads = True
        turn.called.release()

    def __repr__(self) -> str:
        return f"<Combiner waiting={len(self._waiting)}>"

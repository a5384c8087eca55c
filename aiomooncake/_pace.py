"""How the ranks of a group share the waiting of their warm-up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiomooncake._policy import WarmupPolicy

__all__ = ["Pace"]

_WIDENING: Final = 1.2
"""How much farther apart turns are than an even spread: that pays for the tries that the news sets
off, so that a group of eight makes no more tries in all than eight ranks that wait 1 s each."""

_BREATH: Final = 0.1
"""Seconds from a failed try to the next one at least, whatever the others tell: of ranks that start
together, one that fails beside others that succeed has a trouble of its own."""


class Pace:
    """What the ranks of a group share while they wait: whose turn it is, and the good news.

    All of them wait for the same thing. So their tries are spread over the time that each one
    would wait by itself, and the first success sends the others off at once: N ranks notice N times
    sooner that the engine is ready, with no more tries per second than they would make without
    each other. One event loop only.

    Args:
        rng: Where jitter comes from; tests pass a seeded one.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._ranks = 0
        self._last_turn = -math.inf
        self._news = asyncio.Event()
        self._news_at = -math.inf

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Count the caller among those that the tries are spread over."""
        self._ranks += 1
        try:
            yield
        finally:
            self._ranks -= 1

    @property
    def news(self) -> asyncio.Event:
        """The event of the next success. Take it before a try, then none can be missed."""
        return self._news

    def reserve(self, delay: float, policy: WarmupPolicy, deadline: float) -> float | None:
        """Take the next turn of the group.

        Args:
            delay: Seconds that the rank would wait by itself.
            policy: Whose ``max_delay`` and ``jitter`` hold.
            deadline: Loop time after which a turn is of no use.

        Returns:
            Seconds until the turn, or None if there is none before the deadline.
        """
        now = asyncio.get_running_loop().time()
        stretch = 1 + policy.jitter * self._rng.random()
        alone = now + delay * stretch
        if alone >= deadline:
            return None
        # Early waits are short, but a group of many soon goes at its steady pace.
        apart = min(2 * delay, _WIDENING * policy.max_delay / self._ranks)
        if self._ranks == 1:
            apart = 0.0
        turn = self._last_turn + apart * stretch
        if turn >= deadline:
            # A group never makes a rank do worse than it would alone.
            return alone - now
        self._last_turn = max(alone, turn)
        return self._last_turn - now

    def succeeded(self, policy: WarmupPolicy) -> None:
        """Tell those that wait, and those whose try is under way, that the engine is ready.

        Only once per ``max_delay``: a rank that has a trouble of its own would otherwise be woken
        in vain by each of the others.
        """
        now = asyncio.get_running_loop().time()
        if now - self._news_at < policy.max_delay:
            return
        self._news_at = self._last_turn = now
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, news: asyncio.Event, seconds: float) -> None:
        """Wait until the turn has come or the news has, which sends nobody off at once."""
        began = anyio.current_time()
        with anyio.move_on_after(seconds):
            await news.wait()
            await anyio.sleep(max(0.0, began + _BREATH - anyio.current_time()))

"""What goes wrong during a soak: the master, the peers, and the line between them and the store."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from aiomooncake import LocalCluster
from aiomooncake.cluster import StandaloneClient
from aiomooncake.testing import FaultProxy

__all__ = ["Faults"]

_LONGEST: Final = 4.0
"""Seconds that a fault lasts at most: longer than time-outs, and than the client_ttl."""

_CALM: Final = 2.0
"""Seconds between two faults, at most."""


class Faults:
    """Breaks one thing after the other, and mends it again.

    Each kind comes once, in random order, before any comes a second time.

    Args:
        rng: What decides.
        cluster: The master.
        line: The way of the store to the master.
        peers: The clients that hold values.
    """

    def __init__(
        self,
        rng: random.Random,
        cluster: LocalCluster,
        line: FaultProxy,
        peers: Sequence[StandaloneClient],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._cluster = cluster
        self._line = line
        self._peers = peers
        self._left: list[Callable[[], AbstractAsyncContextManager[None]]] = []

    async def run(self, seconds: float) -> None:
        """Go on for so long; all is mended when it returns, also when it is cancelled."""
        loop, rng = asyncio.get_running_loop(), self._rng
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, rng.uniform(0, _CALM)))
            if not self._left:
                self._left = self._kinds()
                rng.shuffle(self._left)
            fault = self._left.pop()
            async with fault():
                self.counts[fault.__name__.strip("_")] += 1
                left = end - loop.time()
                await asyncio.sleep(max(0, min(left, rng.uniform(0.2, _LONGEST))))

    def _kinds(self) -> list[Callable[[], AbstractAsyncContextManager[None]]]:
        return [
            self._master_frozen,
            self._master_killed,
            self._peer_frozen,
            self._peer_killed,
            self._line_slow,
            self._line_thin,
            self._line_frozen,
            self._line_lossy,
            self._line_cut,
            self._line_refused,
        ]

    @asynccontextmanager
    async def _master_frozen(self) -> AsyncIterator[None]:
        await self._cluster.pause()
        try:
            yield
        finally:
            await self._cluster.resume()

    @asynccontextmanager
    async def _master_killed(self) -> AsyncIterator[None]:
        await self._cluster.kill()
        try:
            yield
        finally:
            await self._cluster.start()

    @asynccontextmanager
    async def _peer_frozen(self) -> AsyncIterator[None]:
        peer = self._rng.choice(self._peers)
        await peer.pause()
        try:
            yield
        finally:
            await peer.resume()

    @asynccontextmanager
    async def _peer_killed(self) -> AsyncIterator[None]:
        peer = self._rng.choice(self._peers)
        await peer.kill()
        try:
            yield
        finally:
            await peer.start()

    @asynccontextmanager
    async def _line_slow(self) -> AsyncIterator[None]:
        self._line.delay(self._rng.uniform(0.01, 0.3), jitter=0.01)
        async with self._healed():
            yield

    @asynccontextmanager
    async def _line_thin(self) -> AsyncIterator[None]:
        self._line.throttle(self._rng.randint(2_000, 200_000))
        async with self._healed():
            yield

    @asynccontextmanager
    async def _line_frozen(self) -> AsyncIterator[None]:
        self._line.freeze()
        async with self._healed():
            yield

    @asynccontextmanager
    async def _line_lossy(self) -> AsyncIterator[None]:
        self._line.drop()
        async with self._healed():
            yield

    @asynccontextmanager
    async def _line_cut(self) -> AsyncIterator[None]:
        self._line.cut()
        async with self._healed():
            yield

    @asynccontextmanager
    async def _line_refused(self) -> AsyncIterator[None]:
        self._line.refuse()
        async with self._healed():
            yield

    @asynccontextmanager
    async def _healed(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._line.heal()

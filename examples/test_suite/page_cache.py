"""A small service to be tested: pages that are rendered once for a whole cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import anyio

import aiomooncake

__all__ = ["PageCache", "open_page_cache"]

_READY: Final = aiomooncake.WarmupPolicy(timeout=60)


class PageCache:
    """Pages by key, on a store that processes share.

    A cache must not fail its service: what the store does not give in time is rendered again.

    Args:
        store: An open store.
        budget: Seconds that a page may wait for the store.

    Attributes:
        hits: Pages that came from the store.
        misses: Pages that it did not have.
        failures: Times that it did not answer, or answered with an error.
    """

    def __init__(self, store: aiomooncake.Store, *, budget: float = 0.5) -> None:
        self._store = store
        self._budget = budget
        self.hits = 0
        self.misses = 0
        self.failures = 0

    async def page(self, key: str, render: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return a page from the store, or render it and store it."""
        page = await self._read(key)
        if page is None:
            page = await render()
            await self._write(key, page)
        return page

    async def _read(self, key: str) -> bytes | None:
        try:
            with anyio.fail_after(self._budget):
                page = await self._store.get(key)
        except (aiomooncake.MooncakeError, TimeoutError):
            self.failures += 1
            return None
        if page is None:
            self.misses += 1
        else:
            self.hits += 1
        return page

    async def _write(self, key: str, page: bytes) -> None:
        try:
            with anyio.fail_after(self._budget):
                await self._store.put(key, page)
        except (aiomooncake.MooncakeError, TimeoutError):
            self.failures += 1


@contextlib.asynccontextmanager
async def open_page_cache(address: str) -> AsyncIterator[PageCache]:
    """Open a cache on a cluster, and wait until that is ready, for a minute at the longest."""
    async with aiomooncake.connect(address) as store:
        await store.warmup(_READY)
        yield PageCache(store)

"""The service in an outage, and before its cluster is ready: what only tools can stage."""

# ruff: noqa: S101  # tests assert

from __future__ import annotations

import asyncio

import anyio
import pytest

import aiomooncake
from aiomooncake.testing import (
    FakeMooncake,
    FaultProxy,
    LoopStallProbe,
    MooncakeConnect,
    run_in_virtual_time,
)
from examples.test_suite.page_cache import PageCache, open_page_cache


async def render() -> bytes:
    """Stand for the work that the cache saves."""
    return b"<p>hello</p>"


async def hit_again(cache: PageCache) -> None:
    """Ask for a page until it comes from the store."""
    with anyio.fail_after(20):
        while not cache.hits:
            await cache.page("index", render)
            await asyncio.sleep(0.05)


async def test_a_line_that_freezes(
    mooncake_cluster: aiomooncake.LocalCluster, mooncake_connect: MooncakeConnect
) -> None:
    """Pages go on without the cache, the loop too; and when the line is back, so is the cache."""
    with FaultProxy(mooncake_cluster.address) as line:
        cache = PageCache(await mooncake_connect(line.address, global_segment_size=0))
        await cache.page("index", render)
        line.freeze()
        async with LoopStallProbe() as probe:
            assert await cache.page("index", render) == b"<p>hello</p>"
        assert cache.failures > 0
        assert probe.longest < 0.2  # noqa: PLR2004  # seconds
        line.heal()
        await hit_again(cache)


async def test_a_master_that_dies() -> None:
    """And comes back. It is the test's own: that of the run is for all."""
    async with (
        aiomooncake.LocalCluster() as cluster,
        aiomooncake.connect(cluster.address, rpc_timeout=0.2) as store,
    ):
        cache = PageCache(store)
        await cluster.kill()
        assert await cache.page("index", render) == b"<p>hello</p>"
        assert cache.failures > 0
        await cluster.start()
        await hit_again(cache)


def test_a_cluster_that_is_ready_after_half_a_minute(fake_mooncake: FakeMooncake) -> None:
    """It takes a few milliseconds."""

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        not_ready = fake_mooncake.fault("put", code=-200)
        loop.call_later(30, not_ready.remove)
        async with open_page_cache(fake_mooncake.address) as cache:
            await cache.page("index", render)
            return loop.time()

    assert run_in_virtual_time(scenario()) == pytest.approx(30, abs=2)

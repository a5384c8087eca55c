"""The service's tests with pytest-asyncio in auto mode: nothing is marked."""

# ruff: noqa: S101  # tests assert

from __future__ import annotations

import threading

from aiomooncake.testing import FakeMooncake, MooncakeConnect
from examples.test_suite.page_cache import PageCache, open_page_cache


async def render() -> bytes:
    """Stand for the work that the cache saves."""
    return b"<p>hello</p>"


async def test_a_page_is_rendered_once(mooncake_connect: MooncakeConnect) -> None:
    """On the real engine: two processes' stores, one cluster."""
    first = PageCache(await mooncake_connect())
    second = PageCache(await mooncake_connect())
    assert await first.page("index", render) == b"<p>hello</p>"
    assert await second.page("index", render) == b"<p>hello</p>"
    assert (first.misses, second.hits) == (1, 1)


async def test_the_cache_is_empty_again(mooncake_connect: MooncakeConnect) -> None:
    """Each test begins without the values of the ones before."""
    cache = PageCache(await mooncake_connect())
    await cache.page("index", render)
    assert cache.misses == 1


async def test_a_store_that_fails_does_not_fail_the_page(fake_mooncake: FakeMooncake) -> None:
    """A fault that the real engine would have to be broken for."""
    cache = PageCache(await fake_mooncake.connect())
    fake_mooncake.fault("reads", code=-900)
    fake_mooncake.fault("writes", code=-200)
    assert await cache.page("index", render) == b"<p>hello</p>"
    assert cache.failures == 2  # noqa: PLR2004


async def test_a_store_that_hangs_does_not_hold_the_page(fake_mooncake: FakeMooncake) -> None:
    """The call stays in the engine; the page does not wait for it."""
    cache = PageCache(await fake_mooncake.connect())
    fake_mooncake.fault("reads", hold=threading.Event())
    assert await cache.page("index", render) == b"<p>hello</p>"
    assert cache.failures == 1


async def test_the_whole_service(fake_mooncake: FakeMooncake) -> None:
    """It connects by itself: it is only given an address."""
    async with open_page_cache(fake_mooncake.address) as cache:
        await cache.page("index", render)
        await cache.page("index", render)
    assert cache.hits == 1

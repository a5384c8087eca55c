"""The service's tests with unittest, run by pytest: fixtures come in by one that is used always."""

# ruff: noqa: PT009  # as unittest has it

from __future__ import annotations

import threading
import unittest

import pytest

from aiomooncake.testing import FakeMooncake, MooncakeConnect
from examples.test_suite.page_cache import PageCache, open_page_cache


async def render() -> bytes:
    """Stand for the work that the cache saves."""
    return b"<p>hello</p>"


class MooncakeCase(unittest.IsolatedAsyncioTestCase):
    """A test case that has what the fixtures give."""

    connect: MooncakeConnect
    fake: FakeMooncake

    @pytest.fixture(autouse=True)
    def _mooncake(self, mooncake_connect: MooncakeConnect, fake_mooncake: FakeMooncake) -> None:
        self.connect = mooncake_connect
        self.fake = fake_mooncake


class TestOnTheRealEngine(MooncakeCase):
    """Stores of a real cluster."""

    async def asyncSetUp(self) -> None:
        """Open what each of the tests needs."""
        self.cache = PageCache(await self.connect())

    async def test_a_page_is_rendered_once(self) -> None:
        """Two processes' stores, one cluster."""
        second = PageCache(await self.connect())
        self.assertEqual(await self.cache.page("index", render), b"<p>hello</p>")
        self.assertEqual(await second.page("index", render), b"<p>hello</p>")
        self.assertEqual((self.cache.misses, second.hits), (1, 1))

    async def test_the_cache_is_empty_again(self) -> None:
        """Each test begins without the values of the ones before."""
        await self.cache.page("index", render)
        self.assertEqual(self.cache.misses, 1)


class TestInMemory(MooncakeCase):
    """Faults that the real engine would have to be broken for."""

    async def test_a_store_that_fails_does_not_fail_the_page(self) -> None:
        """The master is away, and there is no room."""
        cache = PageCache(await self.fake.connect())
        self.fake.fault("reads", code=-900)
        self.fake.fault("writes", code=-200)
        self.assertEqual(await cache.page("index", render), b"<p>hello</p>")
        self.assertEqual(cache.failures, 2)

    async def test_a_store_that_hangs_does_not_hold_the_page(self) -> None:
        """The call stays in the engine; the page does not wait for it."""
        cache = PageCache(await self.fake.connect())
        self.fake.fault("reads", hold=threading.Event())
        self.assertEqual(await cache.page("index", render), b"<p>hello</p>")
        self.assertEqual(cache.failures, 1)

    async def test_the_whole_service(self) -> None:
        """It connects by itself: it is only given an address."""
        async with open_page_cache(self.fake.address) as cache:
            await cache.page("index", render)
            await cache.page("index", render)
        self.assertEqual(cache.hits, 1)

"""What the tests of the services share: programs that end with the test, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.gateway.clients import Program


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """End what is put here."""
    started: list[Program] = []
    yield started
    for program in started:
        program.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as client:
        yield client

"""Large values: neither two copies nor a loop that stands still."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.gateway.clients import MB, Client

SIZE = 96 * MB
STALL = 0.5  # seconds, with ten times the room that a free machine needs


@pytest.mark.timeout(120)
async def test_a_large_value_is_held_once(gateway: Client) -> None:
    await move_large(gateway, "first")  # makes scratch memory and threads
    resident = (await gateway.told())["resident"]
    for told in await move_large(gateway, "second"):
        assert told["stall"] < STALL
        assert told["peak"] - resident < 1.25 * SIZE


async def move_large(gateway: Client, name: str) -> list[dict[str, Any]]:
    """Put and get a large value; how the gateway was during each of them."""
    key = f"{name}-{time.monotonic_ns()}"
    body = b'{"key": "%b", "value": "h\\u00e4%b"}' % (key.encode(), b"x" * SIZE)
    put = asyncio.ensure_future(gateway.ask("PUT", "/api/put", body))
    while not put.done():
        assert (await gateway.ask("GET", "/healthz")).status == 200
        await asyncio.sleep(0.01)
    assert put.result().status == 200
    told = [await gateway.told()]
    reply = await gateway.get(key)
    assert reply.body == "hä".encode() + b"x" * SIZE
    return [*told, await gateway.told()]


async def test_a_client_that_reads_slowly_holds_nobody_up(gateway: Client) -> None:
    key = f"slow-{time.monotonic_ns()}"
    assert (await gateway.put(key, "x" * (24 * MB))).status == 200
    await gateway.told()
    async with gateway.session.get(f"{gateway.url}/api/get/{key}") as slow:
        await slow.content.readexactly(MB)
        for _ in range(20):
            assert (await gateway.ask("GET", f"/api/exist/{key}")).json == {"exists": True}
        assert len(await slow.read()) == 23 * MB
    assert (await gateway.told())["stall"] < STALL


@pytest.mark.parametrize(
    "more", [b',"a":""', b',"a":["' + b'","' * 3 + b'"]', b',"a":' + b"[" * 64 + b"]" * 64]
)
async def test_a_body_of_many_small_things_stops_nobody(gateway: Client, more: bytes) -> None:
    key = f"small-{time.monotonic_ns()}"
    body = b'{"key":"%b","value":"v"%b}' % (key.encode(), more * (MB // len(more)))
    await gateway.told()
    put = asyncio.ensure_future(gateway.ask("PUT", "/api/put", body))
    while not put.done():
        assert (await gateway.ask("GET", "/healthz")).status == 200
        await asyncio.sleep(0.01)
    assert put.result().status == 200
    assert (await gateway.get(key)).body == b"v"
    assert (await gateway.told())["stall"] < STALL


async def test_a_charset_that_takes_minutes_is_refused(gateway: Client) -> None:
    body = b"a" * (MB // 8) + b"-" + b"a" * (MB // 8)
    await gateway.told()
    async with gateway.session.put(
        f"{gateway.url}/api/put",
        data=body,
        headers={"Content-Type": "text/plain; charset=punycode"},
    ) as reply:
        assert reply.status == 400
    assert (await gateway.told())["stall"] < STALL

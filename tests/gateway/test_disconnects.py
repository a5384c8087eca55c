"""Clients that hang up: nothing is left of them, and no half of a value."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from aiomooncake.aiohttp import STORE
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.gateway import make_app
from tests.conftest import Hold
from tests.gateway.clients import MB, Client

RESET = struct.pack("ii", 1, 0)
DISCONNECTS = 1000
AT_ONCE = 40
# A store's threads, and its connections to peers, come when they are first needed.
LEFT = {"in_flight": 0, "abandoned": 0, "tasks": 0, "threads": 8, "descriptors": 16}


async def leave_after(url: str, sent: bytes, *, read: int, reset: bool) -> None:
    """Send a part of a request, read a part of the reply, and go."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 14)
    writer.write(sent)
    if read:
        await reader.readexactly(read)
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def put_request(key: str, size: int) -> bytes:
    body = json.dumps({"key": key, "value": "x" * size}).encode()
    return b"PUT /api/put HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.timeout(120)
async def test_a_thousand_disconnects_leave_nothing(gateway: Client) -> None:
    run = uuid.uuid4().hex
    large, small = f"{run}-large", f"{run}-small"
    for key, size in ((large, 2 * MB), (small, 4096)):
        assert (await gateway.put(key, "x" * size)).status == 200

    async def leave(number: int) -> None:
        kinds: list[tuple[bytes, int]] = [
            (put_request(f"{run}-{number}", 4096)[:2000], 0),
            (put_request(f"{run}-{number}", MB)[: MB // 2], 0),
            (b"GET /api/get/%b HTTP/1.1\r\nHost: h\r\n\r\n" % large.encode(), 8192),
            (b"GET /api/get/%b HTTP/1.1\r\nHost: h\r\n\r\n" % large.encode(), 0),
            (b"GET /api/get/%b HTTP/1.1\r\nHost: h\r\n\r\n" % small.encode(), 0),
        ]
        sent, read = kinds[number % len(kinds)]
        await leave_after(gateway.url, sent, read=read, reset=bool(number // len(kinds) % 2))

    async def leave_often(first: int, count: int) -> None:
        for number in range(first, count, AT_ONCE):
            await leave(number)

    # The first ones make threads and caches that stay.
    await asyncio.gather(*(leave_often(first, 5 * AT_ONCE) for first in range(AT_ONCE)))
    before = await gateway.told_when(
        lambda told: told["in_flight"] == told["abandoned"] == 0 and told["tasks"] <= 5
    )
    await asyncio.gather(*(leave_often(first, DISCONNECTS) for first in range(AT_ONCE)))
    after = await gateway.told_when(
        lambda told: all(told[what] <= before[what] + more for what, more in LEFT.items())
    )
    assert after["resident"] - before["resident"] < 64 * MB
    assert after["stall"] < 0.5
    # Nothing of a value came whole, so none is there.
    for number in range(DISCONNECTS):
        if number % 5 < 2:
            reply = await gateway.ask("GET", f"/api/exist/{run}-{number}")
            assert reply.json == {"exists": False}
    assert len((await gateway.get(large)).body) == 2 * MB


async def test_a_put_that_is_left_is_whole_or_absent(gateway: Client) -> None:
    run, size = uuid.uuid4().hex, 12 * MB
    for number in range(4):
        # All of the body, and away: at once, or a moment later.
        request = put_request(f"{run}-{number}", size)
        await leave_after(gateway.url, request, read=0, reset=number % 2 == 0)
    await gateway.told_when(lambda told: not told["in_flight"])
    for number in range(4):
        reply = await gateway.get(f"{run}-{number}")
        assert reply.status in (200, 404)
        if reply.status == 200:
            assert reply.body == b"x" * size
            continue
        # What was given up does not take the key.
        assert (await gateway.put(f"{run}-{number}", "y")).status == 200
        assert (await gateway.get(f"{run}-{number}")).body == b"y"


async def test_a_read_ends_with_its_client(
    hold: Hold, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    engine = InMemoryEngine()
    app = make_app("127.0.0.1:1", engine=engine)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    service = app[STORE]
    await eventually(lambda: service.state == "ready")
    await service.store.put("k", b"value")
    engine.fault("batch_get_into", hold=hold)
    engine.fault("get_into", hold=hold)
    engine.fault("get_batch", hold=hold)
    engine.fault("get", hold=hold)
    tasks = len(asyncio.all_tasks())
    place = urlsplit(url)
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"GET /api/get/k HTTP/1.1\r\nHost: h\r\n\r\n")
    await hold()
    assert len(asyncio.all_tasks()) > tasks
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)
    hold.set()
    await eventually(lambda: not service.store.stats().in_flight)
    await runner.cleanup()

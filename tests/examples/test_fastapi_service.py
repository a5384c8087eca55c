"""The FastAPI service under uvicorn, a process of its own, whose master comes later, and goes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from aiomooncake import LocalCluster
from tests.examples.services import Reading, refuses
from tests.gateway.clients import Client, Program
from tests.warmup_fakes import free_port

if TYPE_CHECKING:
    import aiohttp

ENDS_WITHIN = 20.0
"""Seconds from the signal to the end, on a machine that is busy; beside a frozen master 11."""

StartService = Callable[..., Program]


@pytest.fixture
def start_service(programs: list[Program]) -> StartService:
    def start(master: str, **env: str) -> Program:
        port = free_port()
        options = ("--app-dir", "examples/fastapi_service", "--port", str(port))
        env = {"MOONCAKE_MASTER": master, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1", **env}
        program = Program("-m", "uvicorn", *options, "service:app", **env)
        program.url = f"http://127.0.0.1:{port}"
        programs.append(program)
        return program

    return start


async def end(program: Program) -> None:
    """Tell it to end, and see that it does, in uvicorn's way: by the signal that it got."""
    began = time.monotonic()
    program.terminate()
    assert await asyncio.to_thread(program.process.wait, 30) == -signal.SIGTERM
    assert time.monotonic() - began < ENDS_WITHIN


async def test_a_master_that_comes_late_and_goes(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    await own_cluster.kill()
    program = start_service(own_cluster.address, MOONCAKE_GLOBAL_SEGMENT_SIZE="0")
    client = Client(session, program.url)

    # There is no master.
    await client.until("/healthz", 200)
    told = (await client.until("/readyz", 503)).json
    assert (told["ready"], told["store"], told["attempts"]) == (False, None, 0)
    assert (await client.ask("GET", "/pages/a")).status == 503
    told = (await client.until_reply("/readyz", lambda reply: reply.json["error"])).json
    assert own_cluster.address in told["error"]

    # There is one, and no segment.
    await own_cluster.start()
    reply = await client.until_reply(
        "/readyz", lambda reply: reply.json["diagnosis"] == "no-segment"
    )
    assert (reply.status, reply.json["store"]) == (503, None)
    assert reply.json["attempts"] > 1

    # There is one.
    await own_cluster.start_client(global_segment_size="64mb")
    told = (await client.until("/readyz", 200)).json
    assert (told["ready"], told["store"], told["error"]) == (True, "ready", None)
    for page in ("a", "b", "d"):
        assert (await client.ask("PUT", f"/pages/{page}", page.encode() * 4096)).status == 204
    reply = await client.ask("GET", "/pages/a")
    assert (reply.status, reply.body) == (200, b"a" * 4096)
    assert (await client.ask("GET", "/pages/nope")).status == 404
    json = {"Content-Type": "application/json"}
    reply = await client.ask("POST", "/prefix", ["a", "b", "c", "d"], **json)
    assert reply.json == {"cached": 2}
    assert (await client.ask("PUT", "/pages/e", b"")).status == 400

    # It goes.
    await own_cluster.kill()
    reply = await client.ask("GET", "/pages/a")
    assert (reply.status, reply.json["retryable"]) == (503, True)
    told = (await client.until("/readyz", 503)).json
    assert told["store"] == "master-unreachable"
    assert (await client.ask("GET", "/healthz")).status == 200
    await end(program)


async def test_it_ends_while_it_waits_for_a_master(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    await own_cluster.kill()
    program = start_service(own_cluster.address)
    await Client(session, program.url).until("/readyz", 503)
    await end(program)


async def test_a_signal_lets_requests_finish(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    program = start_service(own_cluster.address, MOONCAKE_GLOBAL_SEGMENT_SIZE="16mb")
    client = Client(session, program.url)
    await client.until("/readyz", 200)
    assert (await client.ask("PUT", "/pages/a", b"a" * 4096)).status == 204
    await own_cluster.pause()
    reading = await Reading.begin(client, "/pages/a")
    ending = asyncio.ensure_future(end(program))
    await refuses(program)
    assert not reading.answered
    await own_cluster.resume()
    assert await reading.end() == (200, b"a" * 4096)
    await ending

"""The aiohttp service as a process of its own, whose master comes later, and goes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from aiomooncake import LocalCluster
from tests.examples.services import Reading, refuses
from tests.gateway.clients import Client, Program, Reply

if TYPE_CHECKING:
    import aiohttp

SERVICE = "examples/aiohttp_service/service.py"
ENDS_WITHIN = 15.0
"""Seconds from the signal to the end; it takes 1-4, on a machine that is not busy."""

StartService = Callable[..., Program]


class Service(Program):
    """The service, which says where it listens as aiohttp does."""

    def read_url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://\S+", line)
            if found is not None:
                self.url = found.group()
                return self.url
        raise AssertionError(f"it ended with {self.process.wait()}")


@pytest.fixture
def start_service(programs: list[Program]) -> StartService:
    def start(master: str, **env: str) -> Program:
        env = {"MOONCAKE_MASTER": master, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1", **env}
        program = Service(SERVICE, "--ranks", "2", "--port", "0", **env)
        programs.append(program)
        program.read_url()
        return program

    return start


async def ended(program: Program) -> tuple[int, float]:
    """Wait for the end; its exit code, and how long it took."""
    began = time.monotonic()
    code = await asyncio.to_thread(program.process.wait, 30)
    return code, time.monotonic() - began


async def test_a_master_that_comes_late_and_goes(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    await own_cluster.kill()
    # No rank lends memory: what is missing, once there is a master, is a segment.
    program = start_service(own_cluster.address, MOONCAKE_GLOBAL_SEGMENT_SIZE="0")
    client = Client(session, program.url)

    # There is no master.
    reply = await client.until_reply("/readyz", lambda reply: reply.json["error"] is not None)
    told = reply.json
    assert (reply.status, told["ready"], told["state"]) == (503, False, "connecting")
    assert own_cluster.address in told["error"]
    assert [(row["rank"], row["store"]) for row in told["ranks"]] == [("TP0", None), ("TP1", None)]
    assert (await client.ask("GET", "/healthz")).status == 200
    assert (await client.ask("GET", "/ranks/0/pages/a")).status == 503

    # There is one, and no segment.
    await own_cluster.start()
    reply = await client.until_reply("/readyz", _without_segment)
    assert (reply.status, reply.json["state"]) == (503, "warming-up")
    for row in reply.json["ranks"]:
        assert row["attempts"] > 0
        assert row["last_attempt"]["code_name"] == "NO_AVAILABLE_HANDLE"
        assert row["diagnosis"]["cure"]

    # There is one.
    await own_cluster.start_client(global_segment_size="64mb")
    told = (await client.until("/readyz", 200)).json
    assert [row["store"]["state"] for row in told["ranks"]] == ["ready", "ready"]
    assert told["error"] is None
    await _pages_of_ranks(client)
    metrics = (await client.ask("GET", "/metrics")).body.decode()
    for rank in ("0", "1"):
        assert f'aiomooncake_warm{{rank="{rank}"}} 1.0' in metrics
        assert _value(metrics, f'aiomooncake_warmup_attempts_total{{rank="{rank}"}}') > 1
        for outcome in ("no-segment", "ready"):
            line = f'aiomooncake_warmups_total{{outcome="{outcome}",rank="{rank}"}}'
            assert _value(metrics, line) >= 1
    # The first failure of a rank cancels the connects of the others.
    assert 'aiomooncake_connects_total{outcome="master-unreachable",rank="' in metrics

    # It goes.
    await own_cluster.kill()
    reply = await client.ask("GET", "/ranks/0/pages/a")
    assert (reply.status, reply.json["retryable"]) == (503, True)
    assert (await client.until("/readyz", 503)).json["state"] == "unavailable"
    assert (await client.ask("GET", "/healthz")).status == 200
    program.terminate()
    code, seconds = await ended(program)
    assert code == 0
    assert seconds < ENDS_WITHIN


def _without_segment(reply: Reply) -> bool:
    """Tell whether every rank is known to lack one; a round that is cut off may guess otherwise."""
    found = [row["diagnosis"] for row in reply.json["ranks"]]
    return all(each is not None and each["kind"] == "no-segment" for each in found)


def _value(metrics: str, line: str) -> float:
    return next(float(row.split()[-1]) for row in metrics.splitlines() if row.startswith(line))


async def _pages_of_ranks(client: Client) -> None:
    """What one rank stores the others don't see, and a prefix ends at the first page missed."""
    for page in ("a", "b", "d"):
        path = f"/ranks/0/pages/{page}"
        assert (await client.ask("PUT", path, page.encode() * 4096)).status == 204
        assert (await client.ask("GET", path)).body == page.encode() * 4096
    assert (await client.ask("GET", "/ranks/1/pages/a")).status == 404
    assert (await client.ask("GET", "/ranks/2/pages/a")).status == 404
    pages = ["a", "b", "c", "d"]
    for rank, wanted, cached in ((0, pages, 2), (0, pages[:2], 2), (1, pages, 0), (0, [], 0)):
        reply = await client.ask("POST", f"/ranks/{rank}/prefix", wanted)
        assert reply.json == {"cached": cached}
    for wrong in (b"no json", b'{"a": 1}', b'["a", 1]', b'[""]'):
        assert (await client.ask("POST", "/ranks/0/prefix", wrong)).status == 400
    assert (await client.ask("PUT", "/ranks/0/pages/e", b"")).status == 400


async def test_it_ends_while_it_waits_for_a_master(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    await own_cluster.kill()
    program = start_service(own_cluster.address)
    await Client(session, program.url).until("/readyz", 503)
    program.terminate()
    code, seconds = await ended(program)
    assert code == 0
    assert seconds < ENDS_WITHIN


async def test_a_signal_lets_requests_finish(
    own_cluster: LocalCluster, start_service: StartService, session: aiohttp.ClientSession
) -> None:
    program = start_service(own_cluster.address, MOONCAKE_GLOBAL_SEGMENT_SIZE="16mb")
    client = Client(session, program.url)
    await client.until("/readyz", 200)
    assert (await client.ask("PUT", "/ranks/0/pages/a", b"a" * 4096)).status == 204
    await own_cluster.pause()
    reading = await Reading.begin(client, "/ranks/0/pages/a")
    program.terminate()
    await refuses(program)
    assert not reading.answered
    await own_cluster.resume()
    assert await reading.end() == (200, b"a" * 4096)
    code, seconds = await ended(program)
    assert code == 0
    assert seconds < ENDS_WITHIN

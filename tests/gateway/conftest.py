"""Gateways as programs of their own, and the wheel's server beside one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from aiomooncake import LocalCluster
from tests.gateway.clients import Client, Program
from tests.warmup_fakes import free_port


@pytest.fixture
def start_program() -> Iterator[Callable[..., Program]]:
    """Start a server that ends with the test."""
    programs: list[Program] = []

    def start(*arguments: str, **env: str) -> Program:
        programs.append(Program(*arguments, **env))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.fixture
def start_gateway(start_program: Callable[..., Program]) -> Callable[..., Program]:
    """Start a gateway that tells how it is."""

    def start(target: str, **options: Any) -> Program:
        given = {"target": target, **options}
        program = start_program("-m", "tests.gateway.served", json.dumps(given))
        program.read_url()
        return program

    return start


@pytest.fixture(scope="session")
def gateway_url() -> Iterator[str]:
    """A gateway that tells how it is; the values are in the memory of another process."""
    with LocalCluster() as cluster:
        cluster.blocking.start_client(global_segment_size="512mb")
        given = {
            "target": cluster.address,
            "global_segment_size": 0,
            "local_buffer_size": "16mb",
        }
        program = Program("-m", "tests.gateway.served", json.dumps(given))
        yield program.read_url()
        program.close()


@pytest.fixture
async def gateway(gateway_url: str, session: aiohttp.ClientSession) -> Client:
    """A client of that gateway, which is ready."""
    client = Client(session, gateway_url)
    await client.until("/readyz", 200)
    return client


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=40)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as client:
        yield client


# --- both servers, for all tests of the replies ------------------------------------------------


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(lease_ttl=0.5, extra_args=["--eviction_ratio=0"]) as master:
        yield master


@pytest.fixture(scope="session")
def servers(shared_cluster: LocalCluster) -> Iterator[tuple[str, str]]:
    """Addresses of our gateway and of the wheel's server, on one master."""
    options = {
        "MOONCAKE_MASTER": shared_cluster.address,
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64mb",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "16mb",
    }
    port = free_port()
    peer = Program("-m", "tests.gateway.peer", str(port), **options)
    ours = Program(
        "-m", "aiomooncake", "serve", "--port", "0", "--allow-remove-all", "--max-body", "4mb",
        **options,
    )  # fmt: skip
    yield ours.read_url(), f"http://127.0.0.1:{port}"
    for program in (ours, peer):
        program.close()


@pytest.fixture
async def both(servers: tuple[str, str], session: aiohttp.ClientSession) -> tuple[Client, Client]:
    """Clients of our gateway and of the wheel's server; both of them serve."""
    ours, theirs = (Client(session, url) for url in servers)
    await asyncio.gather(ours.until("/readyz", 200), theirs.until("/api/exist/ready", 200))
    return ours, theirs

"""Scenes of :mod:`test_dummy` and ``test_dummy_client``: each in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiomooncake import LocalCluster, MooncakeError, SetupTimeoutError, Store, connect
from aiomooncake.cluster import StandaloneClient
from aiomooncake.engine.shared import MemoryLostError
from aiomooncake.testing import LoopStallProbe
from tests.adversity.exit_scenes import KEPT, Thaw, abandon, refused, start_cluster, wait_for_child

T = TypeVar("T")

MB = 1 << 20
STILL = 1.0
"""Seconds; what is measured is in the benchmarks."""


async def attempt(call: Awaitable[T], seconds: float = 2.0) -> T | Exception:
    """Make a call that may fail, or take longer than anybody wants to wait."""
    try:
        return await asyncio.wait_for(call, seconds)
    except (MooncakeError, asyncio.TimeoutError) as exc:
        return exc


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait for what nobody tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def site(**options: Any) -> AsyncIterator[tuple[StandaloneClient, Callable[..., Any]]]:
    """A process that may be frozen and killed, and how to connect through it.

    The values are in another one, so that none is lost with it.
    """
    async with LocalCluster(client_ttl=60) as cluster:
        await cluster.start_client(global_segment_size=256 * MB)
        client = await cluster.start_client(global_segment_size=0)

        def connected(**more: Any) -> Any:
            return connect(client_server_address=client.address, timeout=20, **{**options, **more})

        yield client, connected


# --- opening ----------------------------------------------------------------------------------


def connect_to_nobody(address: str, timeout: str) -> None:
    """Give up in time, with a loop that was free, and the engine not even imported."""

    async def main() -> None:
        began = time.monotonic()
        async with LoopStallProbe() as probe:
            try:
                await connect(client_server_address=address, timeout=float(timeout))
            except SetupTimeoutError as exc:
                print(exc)
            else:
                raise AssertionError("it connected")
        seconds = time.monotonic() - began
        assert seconds < float(timeout) + 2, seconds
        assert probe.longest < STILL, probe

    asyncio.run(main())
    assert "mooncake.store" not in sys.modules


# --- the other process stands still -----------------------------------------------------------


def frozen_for_long() -> None:
    """Longer than the engine waits for an answer: it is walking through its memory then."""
    asyncio.run(_frozen_for_long())


async def _frozen_for_long() -> None:
    async with site() as (client, connected):
        store, other = await connected(), await connected()
        held = [await each.allocate(MB) for each in (store, other) for _ in range(6)]
        await store.put("key", b"v" * 100)
        async with LoopStallProbe() as probe:
            await client.pause()
            stuck = [
                asyncio.ensure_future(attempt(call, 60))
                for call in (
                    store.get("key"),
                    store.put("new", b"w"),
                    store.get_into("key", held[0]),
                )
            ]
            await until(lambda: {store.health().state, other.health().state} <= GONE, 45)
            assert all(
                isinstance(answer, MooncakeError) and answer.code == -900
                for answer in await asyncio.gather(*stuck)
            )
            # What takes memory away, and what makes some, while the engine goes through it.
            ends = [asyncio.ensure_future(memory.aclose()) for memory in held[1::2]]
            began = time.monotonic()
            for call in (
                store.allocate(MB),
                other.put("more", b"w"),
                other.put("big", bytes(9 * MB)),
            ):
                assert isinstance(await attempt(call), MooncakeError)
            assert time.monotonic() - began < 2
            await asyncio.gather(*ends)
            del held[1::2]
            await other.aclose(timeout=0.5)
            assert other.closed
            await client.resume()
            await until(lambda: other.health().state == "closed")
            await until(lambda: store.health().state == "tainted")
        assert probe.longest < STILL, probe
        assert "transfer was in the engine for 30 s" in store.health().detail
        assert isinstance(await attempt(store.get("key")), MooncakeError)
        await until_put(store, "after")
        await store.aclose()
        async with connected() as again:
            assert await again.get("key") == b"v" * 100
            assert await again.get("after") == b"w"


GONE = {"client-unreachable", "tainted"}


async def until_put(store: Store, key: str) -> None:
    """Put until the engine has noticed that the process is there again."""
    deadline = time.monotonic() + 10
    while isinstance(failed := await attempt(store.put(key, b"w")), Exception):
        assert time.monotonic() < deadline, failed
        await asyncio.sleep(0.05)


def stood_still() -> None:
    """Stand still until the other process takes this one for dead, which no ping tells."""
    asyncio.run(_stood_still())


async def _stood_still() -> None:
    async with site() as (_, connected), connected() as store:
        memory = await store.allocate(MB)
        await store.put("key", b"v" * 100)
        me = os.getpid()
        stop = f"kill -STOP {me}; sleep 11.5; kill -CONT {me}"
        began = time.monotonic()
        await asyncio.to_thread(subprocess.run, ["sh", "-c", stop], check=True)
        assert time.monotonic() - began > 11
        assert store.health().state == "ready"
        lost = await attempt(store.get_into("key", memory))
        assert isinstance(lost, MemoryLostError), lost
        assert await store.get("key") == b"v" * 100
        await store.put("more", b"w")
        async with store.allocate(MB) as other:
            assert await store.get_into("more", other) == 1


# --- whatever happens -------------------------------------------------------------------------


def storm(seconds: str, pool: str) -> None:
    """Kill, restart and freeze the process, close and open stores, and never stop calling.

    Nothing may crash, and what is read is what was written.
    """
    asyncio.run(_Storm(float(seconds), int(pool)).run())


class _Storm:
    def __init__(self, seconds: float, pool: int) -> None:
        self.end = time.monotonic() + seconds
        self.pool = pool
        self.random = random.Random(1)
        self.keys = 0
        self.seen: Counter[str] = Counter()
        self.stores: list[Store] = []

    async def run(self) -> None:
        async with site() as (client, connected):
            # The first one with memory of the engine's own.
            self.stores = [await connected(mem_pool_size=self.pool), await connected()]
            async with LoopStallProbe() as probe:
                await asyncio.gather(
                    self.disturb(client),
                    self.reopen(connected),
                    *(self.work(number) for number in range(6)),
                )
            assert probe.longest < STILL, probe
            for store in self.stores:
                await store.aclose(timeout=60)
        print(dict(self.seen))
        assert self.seen["done"] > 20, self.seen

    async def work(self, number: int) -> None:
        while time.monotonic() < self.end:
            move = self.random.choice([self.small, self.large, self.buffer, self.missing])
            self.keys += 1
            outcome = await attempt(move(self.stores[number % 2], f"key {self.keys}"), 3)
            self.seen["done" if outcome is None else type(outcome).__name__] += 1
            if outcome is not None:
                await asyncio.sleep(0.01)

    async def small(self, store: Store, key: str) -> None:
        value = os.urandom(8) * 512
        await store.put(key, value)
        assert await store.get(key) == value

    async def large(self, store: Store, key: str) -> None:
        value = os.urandom(8) * MB
        await store.put(key, value)
        assert await store.get(key) == value
        await store.remove(key, force=True)

    async def missing(self, store: Store, key: str) -> None:
        assert await store.get(key) is None

    async def buffer(self, store: Store, key: str) -> None:
        value = os.urandom(8) * (MB // 8)
        async with store.allocate(MB) as memory:
            assert memory.view is not None
            memory.view[:] = value
            await store.put_from(key, memory)
            memory.view[:] = bytes(MB)
            assert await store.get_into(key, memory) == MB
            assert memory.view == value
        await store.remove(key, force=True)

    async def disturb(self, client: StandaloneClient) -> None:
        while time.monotonic() < self.end - 4:
            await asyncio.sleep(self.random.uniform(0, 1))
            if self.random.random() < 0.4:
                await client.pause()
                await asyncio.sleep(self.random.uniform(0, 1.5))
                await client.resume()
            else:
                await client.kill()
                await asyncio.sleep(self.random.choice([0, 0, 2]) * self.random.random())
                await client.start()

    async def reopen(self, connected: Callable[..., Any]) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(self.random.uniform(1, 3))
            store = await attempt(connected(), 5)
            if isinstance(store, Store):
                old, self.stores[1] = self.stores[1], store
                await old.aclose(timeout=5)


# --- exit and fork ----------------------------------------------------------------------------


def opened(**options: Any) -> tuple[Store, StandaloneClient]:
    """Open a store in a loop that is closed; all of it lives until the interpreter's end."""
    cluster = start_cluster()
    cluster.blocking.start_client(global_segment_size=64 * MB)
    client = cluster.blocking.start_client(global_segment_size=0)
    for each in cluster.blocking._clients:
        assert each._process is not None
        each._process._finalizer.atexit = False

    async def main() -> Store:
        store = await connect(client_server_address=client.address, timeout=20, **options)
        await store.put("key", b"v")
        memory = await store.allocate(MB)
        KEPT.append(memory)
        return store

    store = asyncio.run(main())
    KEPT.append(store)
    return store, client


def leave_idle(code: str) -> None:
    opened()
    print("to be flushed", end="")
    sys.exit(int(code))


def leave_gone() -> None:
    """The process is gone, and its address answers nobody."""
    store, client = opened()
    client.blocking.kill()
    asyncio.run(until(lambda: store.health().state == "client-unreachable"))


def leave_frozen(calls: str, thaw: str) -> None:
    """With calls stuck longer than exit waits; thawed, they come back while it finalises."""
    store, client = opened(max_abandoned=100)
    client.blocking.pause()
    if int(calls):
        asyncio.run(abandon(int(calls), lambda: store.exists("key")))
    if thaw == "thaw":
        assert client.pid is not None
        Thaw(client.pid)


def leave_blocking_calls_stuck(calls: str) -> None:
    """Threads of a framework, stuck in ``store.blocking``, come back while it finalises."""
    store, client = opened()
    client.blocking.pause()
    for _ in range(int(calls)):
        threading.Thread(target=store.blocking.is_exist, args=("k",), daemon=True).start()
    asyncio.run(until(lambda: store.stats().in_flight == int(calls)))
    assert client.pid is not None
    Thaw(client.pid)


def leave_closing(pool: str) -> None:
    """A close is under way, and the process is frozen."""
    store, client = opened(mem_pool_size=int(pool))
    client.blocking.pause()
    asyncio.run(store.aclose(timeout=0.2))
    assert store.closed


def leave_while_walking() -> None:
    """The process is away, and the engine walks through its memory, again and again."""
    store, client = opened(mem_pool_size=4 * MB)
    client.blocking.kill()
    asyncio.run(until(lambda: store.health().state == "client-unreachable"))
    with contextlib.suppress(MooncakeError):
        client.blocking.start()


def fork_idle() -> None:
    """A child is refused, ends normally, and leaves its parent's store and memory alone."""
    store, _ = opened()
    memory = KEPT[-2]

    def child() -> None:
        refused(lambda: asyncio.run(store.put("child", b"v")))
        refused(lambda: store.blocking.is_exist("key"))
        refused(lambda: asyncio.run(_connected(store)))
        KEPT.clear()

    assert wait_for_child(child) == 0

    async def goes_on() -> None:
        assert await store.get("key") == b"v"
        await store.put_from("parent", memory)  # type: ignore[arg-type]  # it is a buffer
        assert await store.get_into("parent", memory) == MB  # type: ignore[arg-type]
        await store.aclose()

    asyncio.run(goes_on())


async def _connected(store: Store) -> Store:
    return await connect(client_server_address=store.hostname)

"""A master that freezes, dies and comes back: calls fail at once meanwhile, and stores recover."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from aiomooncake import Health, LocalCluster, RpcError, Store
from aiomooncake.testing.stall import LoopStallProbe
from tests.conftest import OpenStore

pytestmark = pytest.mark.timeout(90)

OPTIONS: dict[str, Any] = {
    "local_hostname": "127.0.0.1",
    "global_segment_size": "32MiB",
    "local_buffer_size": "16MiB",
    "timeout": 20,
}


@pytest.fixture
async def seen() -> list[str]:
    """Take what the hook is told."""
    return []


@pytest.fixture
async def store(own_cluster: LocalCluster, open_store: Any, seen: list[str]) -> Store:
    def on_health(health: Health) -> None:
        seen.append(health.state)

    store: Store = await open_store(own_cluster.address, rank=1, on_health=on_health, **OPTIONS)
    await store.put("kept", b"value")
    return store


async def fail(store: Store) -> float:
    began = time.monotonic()
    with pytest.raises(RpcError):
        await store.get("kept")
    return time.monotonic() - began


async def until_away(store: Store) -> None:
    while store.health().state != "master-unreachable":
        await fail(store)


async def test_slow_reads_hold_up_no_other_verb(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    """They ask a master again and again who holds their values, which does not answer either."""
    nbytes, count = 9 << 20, 8
    options = {**OPTIONS, "global_segment_size": "128MiB", "rpc_timeout": 3}
    store = await open_store(own_cluster.address, **options)
    for number in range(count):
        await store.put(f"large{number}", bytes(nbytes))
    async with store.allocate(nbytes * count) as memory:
        await own_cluster.pause()
        reads = [
            asyncio.ensure_future(store.get_into(f"large{at}", memory[at * nbytes :][:nbytes]))
            for at in range(count)
        ]
        await asyncio.wait(reads, timeout=0.5)  # so that they are late, and no outage is proved yet
        assert store.health().state == "ready"
        async with store.register(bytearray(4096)):
            assert not any(read.done() for read in reads)
        await own_cluster.resume()
        for read in await asyncio.gather(*reads, return_exceptions=True):
            assert read == nbytes or isinstance(read, RpcError)  # as soon as this machine is


async def test_calls_fail_at_once_while_the_master_is_frozen(
    own_cluster: LocalCluster,
    store: Store,
    seen: list[str],
    eventually: Any,
) -> None:
    async with LoopStallProbe() as probe:
        await own_cluster.pause()
        began = time.time()
        await until_away(store)
        assert time.time() - began < 20
        await eventually(lambda: seen == ["master-unreachable"])
        assert began <= store.health().since <= time.time()
        with pytest.raises(RpcError, match=f"the master {own_cluster.address} has not answered"):
            await store.put("other", b"value")
        for _ in range(20):
            assert await fail(store) < 0.5
        with pytest.raises(RpcError, match="is_exist refused"):
            await store.engine.is_exist("kept")
        with pytest.raises(RpcError, match="is_exist refused"):
            await asyncio.to_thread(store.blocking.is_exist, "kept")
        await own_cluster.resume()
        report = await store.warmup()  # passes at once, or waits for the master by itself
        assert report.seconds < 10
        await eventually(lambda: store.health().ok)
        assert await store.get("kept") == b"value"
        await eventually(lambda: seen == ["master-unreachable", "ready"])
    assert probe.longest < 0.5


async def test_memory_is_registered_and_given_back_without_a_master(
    own_cluster: LocalCluster, store: Store
) -> None:
    """The engine does that by itself; a block that ended then was left registered."""
    buffer = await store.allocate(4096)
    await own_cluster.pause()
    await until_away(store)
    await buffer.aclose()
    assert not buffer.registered
    await own_cluster.resume()


async def test_a_restarted_master_is_found_again(
    own_cluster: LocalCluster,
    store: Store,
    seen: list[str],
    eventually: Any,
) -> None:
    await own_cluster.kill()
    await until_away(store)
    assert await fail(store) < 0.5
    await own_cluster.start()
    # What was stored is gone, which is a miss; and soon there is room again.
    await store.warmup()
    assert await store.get("kept") is None
    await store.put("kept", b"again")
    assert await store.get("kept") == b"again"
    await eventually(lambda: store.health().ok)
    await eventually(lambda: (seen[0], seen[-1]) == ("master-unreachable", "ready"))


async def test_without_fail_fast_each_call_tries(
    own_cluster: LocalCluster,
    open_store: Any,
    eventually: Any,
) -> None:
    store = await open_store(own_cluster.address, fail_fast=False, rpc_timeout=0.5, **OPTIONS)
    await own_cluster.pause()
    await until_away(store)
    assert await fail(store) > 0.4
    await own_cluster.resume()
    await eventually(lambda: store.health().ok)


async def test_a_store_may_be_closed_in_an_outage(
    own_cluster: LocalCluster, store: Store, eventually: Any
) -> None:
    await own_cluster.pause()
    await until_away(store)
    await store.aclose()
    assert store.health().state in {"closing", "closed"}
    await eventually(lambda: not [t for t in threading.enumerate() if t.name.endswith("-watch")])
    await own_cluster.resume()


async def test_the_hook_may_fail(
    own_cluster: LocalCluster, open_store: Any, caplog: Any, eventually: Any
) -> None:
    def on_health(health: Health) -> None:
        raise ZeroDivisionError

    store = await open_store(own_cluster.address, on_health=on_health, **OPTIONS)
    await store.aclose()
    await eventually(lambda: "an on_health callback failed" in caplog.text)


async def test_a_master_that_is_frozen_while_stores_connect_is_waited_for(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, caplog: Any
) -> None:
    """After four set-ups, 11 s, it was told as a refusal, however much time there was."""
    await own_cluster.pause()
    options = OPTIONS | {"timeout": 40, "rpc_timeout": 0.3}
    connecting = asyncio.ensure_future(open_store(own_cluster.address, **options))
    await eventually(lambda: "waiting for the master" in caplog.text)
    await own_cluster.resume()
    store = await connecting
    await store.warmup()
    assert store.health().ok

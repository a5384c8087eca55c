"""Scenes of :mod:`test_avoided_peer`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiomooncake import BatchError, LocalCluster, ReplicateConfig, Store, TransferError
from aiomooncake.testing.stall import LoopStallProbe
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.exit_scenes import open_store
from tests.adversity.frozen_scenes import attempt, fails
from tests.adversity.processes import Peer

MB = 1 << 20


async def until(condition: Callable[[], object], within: float = 10) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def timed(call: Awaitable[object]) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began


def a_frozen_peer_is_avoided() -> None:
    """Its keys fail at once, values go elsewhere, and both end when it answers again."""

    async def main() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, keys=8) as peer:
                store = await open_store(
                    cluster.address,
                    global_segment_size=64 * MB,
                    transfer_timeout=1,
                    master_metrics_port=cluster.metrics_port,
                )
                await store.warmup()
                assert await store.get("peer1") == Peer.value(1)
                async with LoopStallProbe() as probe, store.allocate(4096) as buffer:
                    peer.freeze()
                    await fails(store.get("peer1"), within=10)
                    await until(lambda: store.health().state == "degraded")
                    assert store.health().ok
                    for number in range(8):
                        error = await fails(store.get(f"peer{number}"), within=0.5)
                        assert isinstance(error, TransferError)
                        assert "It was not tried: the peer 127.0.0.1:" in str(error)
                    await fails(store.get_into("peer2", buffer), within=0.5)
                    # Half of them would be placed on the peer, and take a second or more each.
                    for number in range(30):
                        assert await timed(store.put(f"mine{number}", b"value")) < 0.5
                    answers = await store.get_many(
                        ["mine1", "peer3", "nothing", "mine2"], return_exceptions=True
                    )
                    assert answers[0] == answers[3] == b"value"
                    assert isinstance(answers[1], TransferError)
                    assert answers[2] is None
                    peer.thaw()
                    await until(lambda: store.health().state == "ready")
                    await until_read(store)
                assert probe.longest < NO_STALL, probe
                await store.aclose()

    asyncio.run(main())


def a_peer_that_was_frozen_all_along() -> None:
    """Nobody waits a minute per key for its first word, and the store is opened no second time."""

    async def main() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, keys=32) as peer:
                store = await open_store(
                    cluster.address,
                    global_segment_size=64 * MB,
                    transfer_timeout=1,
                    master_metrics_port=cluster.metrics_port,
                )
                own = ReplicateConfig(preferred_segment=store.hostname)
                await store.put("mine", b"value", config=own)
                peer.freeze()
                async with LoopStallProbe() as probe:
                    keys = [f"peer{number}" for number in range(32)]
                    there = ReplicateConfig(preferred_segment=peer.hostname)
                    began = time.monotonic()
                    *answers, mine = await asyncio.gather(
                        attempt(store.get_many(keys)),
                        attempt(store.put("there", b"value", config=there)),
                        timed(store.get("mine")),
                    )
                    assert mine < 0.5, mine
                    assert isinstance(answers[0], BatchError), answers[0]
                    assert time.monotonic() - began < 25  # a half-hour without breaking off
                    assert store.health().state == "degraded"
                    peer.thaw()
                    await until(lambda: store.health().state == "ready")
                    await until_read(store)
                assert not store.stats().tainted
                assert await store.get("mine") == b"value"
                assert probe.longest < NO_STALL, probe
                await store.aclose()

    asyncio.run(main())


async def until_read(store: Store) -> None:
    """Wait until a value can be read; the first calls may meet connections that were lost."""
    deadline = time.monotonic() + 15
    while await attempt(store.get("peer3")) != Peer.value(3):
        assert time.monotonic() < deadline


def a_dead_peer_is_forgotten() -> None:
    """When its segment has expired, its keys are misses and nobody is avoided."""

    async def main() -> None:
        async with LocalCluster(client_ttl=3) as cluster:
            with Peer(cluster.address, keys=1) as peer:
                store = await open_store(
                    cluster.address,
                    global_segment_size=64 * MB,
                    transfer_timeout=1,
                    master_metrics_port=cluster.metrics_port,
                )
                assert await store.get("peer0") == Peer.value(0)
                peer.kill()
                await fails(store.get("peer0"), within=10)
                await until(lambda: store.health().state == "degraded")
                await until(lambda: store.health().state == "ready", within=20)
                assert await store.get("peer0") is None
                await store.aclose()

    asyncio.run(main())

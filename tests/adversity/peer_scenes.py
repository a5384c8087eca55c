"""Scenes of :mod:`test_avoided_peer`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiomooncake import BatchError, LocalCluster, ReplicateConfig, Store, TransferError
from aiomooncake.testing.stall import LoopStallProbe
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.exit_scenes import open_store
from tests.adversity.frozen_scenes import attempt, fails
from tests.adversity.processes import Peer

T = TypeVar("T")

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


def raw_reads_avoid_a_frozen_peer() -> None:
    """The mirrors told nobody that a read took long, and sent the next ones to the same peer."""

    async def main() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, keys=8) as peer:
                store = await open_store(cluster.address, transfer_timeout=1)
                own = ReplicateConfig(preferred_segment=store.hostname)
                await store.put("mine", b"value", config=own)
                odd: Any = b"\xff\xfe"
                in_bytes: Any = [b"mine", b"peer1"]
                assert await store.engine.put(odd, b"odd", own) == 0
                keys = ["mine", "peer1", "nothing", "peer2"]
                async with LoopStallProbe() as probe, store.allocate(4 * 4096) as buffer:
                    places = [buffer.address + 4096 * i for i in range(4)]
                    sizes = [4096] * 4
                    pieces = [[place] for place in places]
                    raw, threads = store.engine, store.blocking

                    def in_thread(method: Callable[..., T], *args: Any, **kwargs: Any) -> Any:
                        return asyncio.to_thread(method, *args, **kwargs)

                    assert await raw.get("peer1") == Peer.value(1)  # so that they know each other
                    peer.freeze()
                    stuck = asyncio.ensure_future(
                        in_thread(threads.batch_get_into, ["peer1"], places[:1], sizes[:1])
                    )
                    await until(lambda: store.health().state == "degraded")
                    assert await stuck == [-800]
                    answers: list[tuple[Callable[[], Awaitable[Any]], Any]] = [
                        (
                            lambda: in_thread(threads.batch_get_into, keys, places, sizes),
                            [5, -800, -704, -800],
                        ),
                        (
                            lambda: in_thread(
                                threads.batch_get_into_multi_buffers,
                                keys,
                                all_buffer_ptrs=pieces,
                                all_sizes=[[5], [4096], [5], [4096]],
                                prefer_alloc_in_same_node=False,
                            ),
                            [5, -800, -704, -800],
                        ),
                        (lambda: raw.batch_get_into(keys[1:2], places[:1], sizes[:1]), [-800]),
                        (lambda: raw.get_into("peer3", places[0], 4096), -800),
                        (lambda: raw.get_batch(keys), [b"value", b"", b"", b""]),
                        (lambda: raw.batch_get_buffer(keys[1:]), [None] * 3),
                        (lambda: raw.get_batch(in_bytes), [b"value", b""]),
                        (lambda: in_thread(threads.get, "peer3"), b""),
                        (lambda: in_thread(threads.get, odd), b"odd"),
                        (lambda: in_thread(threads.get_buffer, "peer3"), None),
                    ]
                    for call, answer in answers:
                        began = time.monotonic()
                        assert await call() == answer
                        assert time.monotonic() - began < 0.5
                    # What is wrong with a call is told as ever.
                    assert await raw.batch_get_into(keys, places[:1], sizes) == [-600] * 4
                    wrong: list[Callable[[Any], object]] = [
                        lambda on: on.get(key="peer1"),
                        lambda on: on.get_batch(dict.fromkeys(keys)),
                        lambda on: on.get_into("peer1", places[0], -1),
                        lambda on: on.batch_get_into(keys, [places[0], 0.5, *places[2:]], sizes),
                    ]
                    for refused in wrong:
                        told = await in_thread(refusal, refused, threads)
                        assert told == refusal(refused, store._client.native)
                    peer.thaw()
                    await until(lambda: store.health().state == "ready")
                    await until_read(store)
                    codes = await in_thread(threads.batch_get_into, keys, places, sizes)
                    assert codes == [5, 4096, -704, 4096]
                assert probe.longest < NO_STALL, probe
                await store.aclose()

    asyncio.run(main())


def refusal(call: Callable[[Any], object], on: object) -> str:
    """Make a call that is wrong, and return what the binding says to it."""
    try:
        call(on)
    except TypeError as error:
        return str(error).partition("\n\nInvoked with:")[0]
    raise AssertionError("it was not refused")


def raw_calls_on_a_peer_that_was_frozen_all_along() -> None:
    """A thread's read waited for 60 s for the first word to each key, and tainted the store."""

    async def main() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, keys=4) as peer:
                store = await open_store(cluster.address, transfer_timeout=1)
                peer.freeze()
                async with LoopStallProbe() as probe, store.allocate(4 * 4096) as buffer:
                    codes = await asyncio.to_thread(
                        store.blocking.batch_get_into,
                        [f"peer{i}" for i in range(4)],
                        [buffer.address + 4096 * i for i in range(4)],
                        [4096] * 4,
                    )
                    assert codes == [-800] * 4
                assert not store.stats().tainted
                assert probe.longest < NO_STALL, probe
                await store.aclose()

    asyncio.run(main())

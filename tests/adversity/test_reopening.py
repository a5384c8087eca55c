"""A store whose memory can't be trusted any more is opened anew by itself."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import pytest

import aiomooncake
from aiomooncake import LocalCluster, MooncakeError, TaintedStoreError
from aiomooncake.master import segments
from aiomooncake.testing.stall import LoopStallProbe

pytestmark = pytest.mark.timeout(60)

OPTIONS: dict[str, Any] = {
    "local_hostname": "127.0.0.1",
    "global_segment_size": "32MiB",
    "local_buffer_size": "16MiB",
    "timeout": 20,
}
MB = 1 << 20


async def tainted(store: Any) -> None:
    """Make a call that takes longer than is trusted, without the seconds."""
    store._client._taint_after = 0.0
    try:
        await store.get("nothing here")
    finally:
        store._client._taint_after = 55.0


async def test_a_tainted_store_is_open_again_soon(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, caplog: Any
) -> None:
    states: list[str] = []
    store = await open_store(
        own_cluster.address, rank=2, on_health=lambda health: states.append(health.state), **OPTIONS
    )
    old = store._client.native
    async with LoopStallProbe() as probe, store.allocate(MB) as buffer:
        buffer.view[:5] = b"hello"
        await store.put_from("kept", buffer[:5])
        await tainted(store)
        with pytest.raises(TaintedStoreError, match="opened anew"):
            await store.exists("kept")
        assert not store.closed
        await eventually(lambda: store.health().ok)
        assert store._client.native is not old
        # The segment went with the old object, and the caller's memory is known to the new one.
        await store.warmup()
        assert await store.get("kept") is None
        await store.put_from("again", buffer[:5])
        assert await store.get_into("again", buffer[5:10]) == 5
        assert bytes(buffer.view[5:10]) == b"hello"
        await store.put("large", bytes(9 * MB))
        assert await store.get("large") == bytes(9 * MB)
        assert buffer.registered
        # A range moves only through memory that the engine knows.
        assert await store.get_into("large", buffer[:5], offset=MB) == 5
    assert probe.longest < 0.5
    await eventually(lambda: states == ["reopening", "ready"])
    assert "[TP2] a transfer was in the engine for 0 s: the store is opened anew" in caplog.text
    assert store.stats().in_flight == 0
    assert not store.stats().tainted


async def test_it_waits_for_the_calls_in_flight(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, hold: Any
) -> None:
    """A tear-down under a call is a segmentation fault."""
    store = await open_store(own_cluster.address, **OPTIONS)
    old = store._client.native
    call = asyncio.ensure_future(store._client.run(store._client.bulk, "held", hold.wait))
    await hold()
    await tainted(store)
    await eventually(lambda: store.health().state == "reopening")
    assert store._client.native is old
    hold.set()
    await call
    await eventually(lambda: store.health().ok)
    assert store._client.native is not old


async def test_it_may_happen_again_and_again(
    own_cluster: LocalCluster, open_store: Any, eventually: Any
) -> None:
    store = await open_store(own_cluster.address, **OPTIONS)
    for _ in range(3):
        await tainted(store)
        await eventually(lambda: store.health().ok)
        await store.warmup()


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_store_may_be_closed_meanwhile(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, *, frozen: bool
) -> None:
    store = await open_store(own_cluster.address, rpc_timeout=0.5, **OPTIONS)
    if frozen:
        await own_cluster.pause()
        with pytest.raises(MooncakeError):
            await store.get("nothing here")
    store._client.gate.taint("a test says so")
    store._client.reopening.begin()
    await store.aclose(timeout=None)
    assert store.health().state == "closed"
    await eventually(lambda: not [t for t in threading.enumerate() if "reopen" in t.name])
    if frozen:
        await own_cluster.resume()


async def test_a_master_that_is_away_is_waited_for(
    own_cluster: LocalCluster, open_store: Any, eventually: Any
) -> None:
    store = await open_store(own_cluster.address, rpc_timeout=0.5, **OPTIONS)
    await own_cluster.kill()
    store._client.gate.taint("a test says so")
    store._client.reopening.begin()
    await eventually(lambda: store.health().state == "reopening")
    await own_cluster.start()
    with anyio.fail_after(40):  # the engine's tear-down looks for the dead master for 5-14 s
        while store.health().state == "reopening":  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
    await store.warmup()
    await store.put("k", b"v")
    assert await store.get("k") == b"v"


async def reopening(store: Any, hold: Any, eventually: Any) -> asyncio.Future[Any]:
    """Hold a store in its re-opening, by a call that it waits for."""
    client = store._client
    call: asyncio.Future[Any] = asyncio.ensure_future(client.run(client.bulk, "held", hold.wait))
    await hold()
    await tainted(store)
    await eventually(lambda: store.health().state == "reopening")
    return call


async def test_memory_may_be_given_back_meanwhile(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, hold: Any
) -> None:
    """It failed, and could not be repeated; and memory that was refused was held to the end."""
    store = await open_store(own_cluster.address, **OPTIONS)
    buffer = await store.allocate(MB)
    kept = len(store._client._kept) - 1
    call = await reopening(store, hold, eventually)
    await buffer.aclose()
    assert not buffer.registered
    with pytest.raises(TaintedStoreError):
        await store.register(bytearray(MB))
    hold.set()
    await call
    await eventually(lambda: store.health().ok)
    assert len(store._client._kept) == kept
    await buffer.aclose()


async def test_a_close_that_meets_it_waiting_tears_the_object_down(
    cluster: LocalCluster, eventually: Any, hold: Any
) -> None:
    """The object was dropped instead, under the GIL, and a private master lived on."""
    store = await aiomooncake.connect("local://", global_segment_size="32MiB", timeout=20)
    call = await reopening(store, hold, eventually)
    async with LoopStallProbe() as probe:
        closing = asyncio.ensure_future(store.aclose(timeout=None))
        await eventually(lambda: store.closed)
        hold.set()
        await closing
    await call
    assert probe.longest < 0.5
    assert store.health().state == "closed"
    assert store.config is not None
    host, _, port = store.config.master_server_address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


class Gap:
    """Where the telling of the new object waits."""

    def __init__(self, hold: Any) -> None:
        self._hold = hold

    def renew(self, native: Any) -> bool:  # it is told nothing
        self._hold.wait()
        return False


async def test_lent_memory_may_be_taken_back_while_the_new_object_is_told(
    own_cluster: LocalCluster, open_store: Any, eventually: Any, hold: Any
) -> None:
    """The call was refused, the segment taken for gone with the old object, and it stayed lent."""
    store = await open_store(own_cluster.address, **OPTIONS)
    segment, buffer = await store.mount_segment(MB), await store.allocate(MB)
    kept = len(store._client._kept) - 2
    store._client.keep_until_gone(Gap(hold))
    first = segment.ids
    await tainted(store)
    await hold()
    assert segment.ids != first  # lent anew
    await segment.aclose()
    await buffer.aclose()
    hold.set()
    await eventually(lambda: store.health().ok)
    assert len(store._client._kept) == kept
    # Its own memory is what a store lends from the beginning.
    with anyio.fail_after(10):
        while await mounted(own_cluster) != [32 * MB]:  # noqa: ASYNC110  # the master tells nobody
            await asyncio.sleep(0.05)


async def mounted(cluster: LocalCluster) -> list[int]:
    return [each.capacity for each in await segments("127.0.0.1", cluster.metrics_port, 5.0)]

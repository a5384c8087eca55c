"""Scenes of :mod:`test_late_writes`: each runs in an interpreter of its own.

A transfer that reaches the engine's own limit of 60 s stays in the transport's queue. When the
peer comes back, it writes to where it was meant to write, whoever has that memory by then.

Which transfers reach the limit is known: a peer is served by four lanes, and each of them gives one
transfer up after ``MC_TCP_STATUS_TIMEOUT_SEC``. With the engine's 30 s, eight of the ``3 * KEYS``
are given up within 60 s, and the others stay in the queue.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiomooncake import LocalCluster, MooncakeError, ReplicateConfig, Store, TaintedStoreError
from aiomooncake.buffers import Buffer
from tests.adversity.call_scenes import settled
from tests.adversity.exit_scenes import open_store
from tests.adversity.frozen_scenes import attempt, fails
from tests.adversity.peer_scenes import until
from tests.adversity.processes import Peer

ENGINE_DEFAULTS = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "30",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "30",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "1024",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
}
LIMIT = 60
"""Seconds that the engine gives a transfer."""

KEYS = 16
"""Keys of the peer that each of the calls reads."""

SIZE = 4096
MARK = b"\xab" * SIZE
OURS = 200
MB = 1 << 20


def ours(number: int) -> bytes:
    return b"%08x" % number * (SIZE // 8)


def changed(places: Iterable[bytes | memoryview], wanted: Iterable[bytes]) -> int:
    return sum(bytes(place) != value for place, value in zip(places, wanted, strict=True))


def pieces(memory: mmap.mmap | memoryview) -> list[memoryview]:
    whole = memoryview(memory)
    return [whole[SIZE * i : SIZE * (i + 1)] for i in range(KEYS)]


# --- the binding alone ------------------------------------------------------------------------


def bare() -> None:
    """Show what the others are kept from: it is there, and in how many places."""
    with LocalCluster(client_ttl=200) as cluster, Peer(cluster.address, keys=2 * KEYS) as peer:
        native = _native(cluster.address)
        memory = mmap.mmap(-1, KEYS * SIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert native.register_buffer(address, len(memory)) == 0
        assert native.get("peer0") == Peer.value(0)
        codes: list[int] = []
        handles: list[object] = []

        def read_into() -> None:
            keys = [f"peer{i}" for i in range(KEYS)]
            places = [address + SIZE * i for i in range(KEYS)]
            codes.extend(native.batch_get_into(keys, places, [SIZE] * KEYS))

        def read_buffers() -> None:
            keys = [f"peer{i}" for i in range(KEYS, 2 * KEYS)]
            handles.extend(native.batch_get_buffer(keys))

        peer.freeze()
        _side_by_side(read_into, read_buffers)
        assert all(code < 0 for code in codes), codes
        assert handles == [None] * KEYS
        # The calls have returned: the memory is the caller's, and the local buffer is free.
        memory[:] = MARK * KEYS
        others = native.batch_get_buffer([f"ours{i}" for i in range(OURS)])
        views = [memoryview(handle) for handle in others]
        values = [ours(i) for i in range(OURS)]
        assert changed(views, values) == 0
        peer.thaw()
        deadline = time.monotonic() + 10
        while not (changed(pieces(memory), [MARK] * KEYS) and changed(views, values)):
            assert time.monotonic() < deadline, "nothing was written late: adapt the facts"
            time.sleep(0.01)
        print(
            f"{changed(pieces(memory), [MARK] * KEYS)} of {KEYS} places of a call that had failed, "
            f"and live values of {changed(views, values)} other keys were overwritten"
        )


def _native(address: str) -> Any:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    native = MooncakeDistributedStore()
    code = native.setup("127.0.0.1", "P2PHANDSHAKE", 32 * MB, 16 * MB, "tcp", "", address)
    assert code == 0, code
    config = ReplicateConfig()
    config.preferred_segment = native.get_hostname()
    for number in range(OURS):
        assert native.put(f"ours{number}", ours(number), config) == 0
    return native


def _side_by_side(*jobs: Callable[[], object]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- with aiomooncake -------------------------------------------------------------------------


class Staging:
    """A store, the frozen peer, and calls of every kind that are stuck on it."""

    def __init__(self, store: Store, peer: Peer, buffer: Buffer, raw: mmap.mmap) -> None:
        self.store = store
        self.peer = peer
        self.buffer = buffer
        assert buffer.view is not None
        self.places = buffer.view
        self.raw = raw
        self.late = 0
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the peer has been frozen."""
        return time.monotonic() - self.began

    async def read(self) -> None:
        """Read in all ways that there are; every key fails, none looks like a miss."""
        store = self.store
        keys = [f"peer{i}" for i in range(4 * KEYS)]
        slices = [self.buffer[SIZE * i : SIZE * (i + 1)] for i in range(KEYS)]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        places = [address + SIZE * i for i in range(KEYS)]
        values, handles, sizes, codes = await asyncio.gather(
            store.get_many(keys[:KEYS], return_exceptions=True),
            store.engine.batch_get_buffer(keys[KEYS : 2 * KEYS]),
            store.get_many_into(
                dict(zip(keys[2 * KEYS : 3 * KEYS], slices, strict=True)), return_exceptions=True
            ),
            store.engine.batch_get_into(keys[3 * KEYS :], places, [SIZE] * KEYS),
        )
        # What the calls were given is the caller's again.
        self.late = self.written()
        self.places[:] = MARK * KEYS
        self.raw[:] = MARK * KEYS
        assert all(isinstance(answer, MooncakeError) for answer in [*values, *sizes]), values
        assert handles == [None] * KEYS
        assert all(code < 0 for code in codes), codes

    def written(self) -> int:
        """Count the places of failed calls in which there are values all the same."""
        nothing = [bytes(SIZE)] * KEYS
        return changed(pieces(self.places), nothing) + changed(pieces(self.raw), nothing)

    def overwritten(self) -> int:
        """Count the places that were written after the calls had ended."""
        marks = [MARK] * KEYS
        return changed(pieces(self.places), marks) + changed(pieces(self.raw), marks)


@asynccontextmanager
async def frozen_peer(**options: Any) -> AsyncIterator[Staging]:
    """Live views of the store's own values must stay right all the time, whatever happens."""
    async with LocalCluster(client_ttl=200) as cluster:
        with Peer(cluster.address, keys=4 * KEYS) as peer:
            store = await open_store(
                cluster.address, master_metrics_port=cluster.metrics_port, **options
            )
            await _put_ours(store)
            assert await store.get("peer0") == Peer.value(0)
            raw = mmap.mmap(-1, KEYS * SIZE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
            buffer = await store.allocate(KEYS * SIZE)
            assert await store.engine.register_buffer(address, len(raw)) == 0
            async with _live_views(store):
                peer.freeze()
                yield Staging(store, peer, buffer, raw)
            await store.aclose()
            await settled()


async def _put_ours(store: Store) -> None:
    here = ReplicateConfig(preferred_segments=(store.hostname,))
    await store.put_many({f"ours{i}": ours(i) for i in range(OURS)}, config=here)


@asynccontextmanager
async def _live_views(store: Store) -> AsyncIterator[None]:
    values = [ours(i) for i in range(OURS)]
    async with store.view_many(f"ours{i}" for i in range(OURS)) as views:
        there = [view for view in views if view is not None]
        assert changed(there, values) == 0
        yield
        assert changed(there, values) == 0


def forced() -> None:
    """Under time-outs that lead to the limit, nobody sees a byte that was written late."""

    async def main() -> None:
        async with frozen_peer() as staging:
            store, peer = staging.store, staging.peer
            client, old = store._client, store._client.native
            # A call that takes longer: the store can't be opened anew before it ends, so that
            # what is written late is written while the store waits for that.
            hold = threading.Event()
            held = asyncio.ensure_future(client.run(client.control, "held", hold.wait))
            reading = asyncio.ensure_future(staging.read())
            await until(lambda: store.stats().tainted, within=LIMIT + 5)
            assert staging.seconds > LIMIT - 5
            await until(lambda: client.gate.in_flight == 1)
            peer.thaw()
            await until(lambda: staging.written() > 0)
            for call in (
                store.get("ours1"),
                store.get_many(["peer1", "ours2"]),
                store.get_into("ours1", staging.buffer),
            ):
                error = await fails(call, within=0.5)
                assert isinstance(error, TaintedStoreError), error
            await asyncio.sleep(1)  # nothing tells that all is written
            assert store.health().state == "reopening"
            assert not reading.done(), "memory was given back that is still written into"
            hold.set()
            await held
            await until(lambda: store.health().ok, within=20)
            await reading
            assert client.native is not old
            assert staging.late > 0
            print(f"{staging.late} places were written late, before they were given back")
            await _put_ours(store)  # those in the segment of the old object went with it
            assert await store.get_many(["ours7", "peer7"]) == [ours(7), Peer.value(7)]
            assert staging.overwritten() == 0

    asyncio.run(main())


def bounded() -> None:
    """With the time-outs that the store sets nothing comes near the limit, nor is tainted."""

    async def main() -> None:
        async with frozen_peer() as staging:
            store, peer = staging.store, staging.peer
            old = store._client.native
            await staging.read()
            print(f"all calls had ended after {staging.seconds:.1f} s")
            assert staging.seconds < LIMIT / 2
            assert staging.late == 0
            assert await store.get("ours1") == ours(1)
            await asyncio.sleep(LIMIT + 1 - staging.seconds)
            peer.thaw()
            deadline = time.monotonic() + 15
            while await attempt(store.get("peer3")) != Peer.value(3):
                assert time.monotonic() < deadline
            await asyncio.sleep(1)  # nothing tells that nothing will be written
            assert staging.overwritten() == 0
            assert store._client.native is old
            assert not store.stats().tainted

    asyncio.run(main())

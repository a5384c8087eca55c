"""Scenes of :mod:`test_frozen_peer`: each runs in an interpreter of its own.

The transport's time-outs are read when the engine is imported, so they can be short only there.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiomooncake import LocalCluster, MooncakeError, ReplicateConfig, Store
from aiomooncake.testing import LoopStallProbe
from tests.adversity.call_scenes import NO_STALL, settled
from tests.adversity.exit_scenes import open_store
from tests.adversity.processes import Peer

T = TypeVar("T")

TIMEOUT = 1
"""Seconds of the transport's time-out."""

KEYS = 100
SIZE = 4096


@asynccontextmanager
async def frozen_peer() -> AsyncIterator[tuple[Store, Peer]]:
    """A store without memory of its own, and the frozen peer that holds all the values."""
    # The peer's segment must outlive its being frozen.
    async with LocalCluster(client_ttl=60) as cluster:
        with Peer(cluster.address, keys=KEYS) as peer:
            store = await open_store(
                cluster.address,
                global_segment_size=0,
                transfer_timeout=TIMEOUT,
                master_metrics_port=cluster.metrics_port,
            )
            assert await store.get("peer7") == Peer.value(7)
            peer.freeze()
            async with LoopStallProbe() as probe:
                yield store, peer
            assert probe.longest < NO_STALL, probe
            peer.kill()
            await store.aclose()


async def answers_again(store: Store) -> None:
    """Wait until all values can be read; the first calls may meet connections that were lost."""
    keys = [f"peer{i}" for i in range(KEYS)]
    deadline = time.monotonic() + 15
    while isinstance(answers := await attempt(store.get_many(keys)), MooncakeError):
        assert time.monotonic() < deadline, answers
    assert answers == [Peer.value(i) for i in range(KEYS)]


async def attempt(call: Awaitable[T]) -> T | MooncakeError:
    try:
        return await call
    except MooncakeError as error:
        return error


async def fails(call: Awaitable[object], within: float) -> MooncakeError:
    """Fail unless the call raises in time; a failure must not look like a miss."""
    began = time.monotonic()
    answer = await attempt(call)
    seconds = time.monotonic() - began
    assert isinstance(answer, MooncakeError), answer
    assert seconds < within, f"it took {seconds:.1f} s"
    return answer


def read_and_write() -> None:
    async def main() -> None:
        async with frozen_peer() as (store, peer):
            soon = 2 * TIMEOUT + 2
            error = await fails(store.get("peer0"), soon)
            assert error.key == "peer0"
            onto_it = ReplicateConfig(preferred_segments=(peer.hostname,))
            await asyncio.gather(
                fails(store.put("new", b"v" * SIZE, config=onto_it), soon),
                fails(store.get_many(["peer1", "peer2"]), soon),
                fails(store.upsert("newer", bytearray(b"v" * SIZE), config=onto_it), soon),
            )
            # What only asks the master goes on, and a miss stays one.
            assert await store.exists("peer0")
            assert await store.size("peer0") == SIZE
            assert await store.get("nowhere") is None
            peer.thaw()
            await answers_again(store)

    asyncio.run(main())


def read_many() -> None:
    """A batch of 100 keys: far below the engine's 60 s, after which it writes late."""

    async def main() -> None:
        async with frozen_peer() as (store, _):
            keys = [f"peer{i}" for i in range(KEYS)]
            began = time.monotonic()
            answers = await store.get_many(keys, return_exceptions=True)
            seconds = time.monotonic() - began
            assert seconds < 45, f"it took {seconds:.1f} s"
            assert all(isinstance(answer, MooncakeError) for answer in answers)

    asyncio.run(main())


def write_nothing_late() -> None:
    """Memory of calls that have failed is not written to when the peer comes back."""

    async def main() -> None:
        async with frozen_peer() as (store, peer):
            room = 12 * SIZE
            with mmap.mmap(-1, room) as memory:
                memory[:] = b"\xab" * room
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                assert await store.engine.register_buffer(address, room) == 0
                places = [address + SIZE * i for i in range(12)]
                codes: list[Any] = await asyncio.gather(
                    store.engine.batch_get_into(
                        [f"peer{i}" for i in range(8)], places[:8], [SIZE] * 8
                    ),
                    *(store.engine.get_into(f"peer{i}", places[i], SIZE) for i in range(8, 12)),
                )
                assert all(code < 0 for code in [*codes[0], *codes[1:]]), codes
                before = bytes(memory)
                peer.thaw()
                await answers_again(store)
                await asyncio.sleep(1)  # nothing tells that nothing will happen
                assert bytes(memory) == before
                assert await store.engine.unregister_buffer(address) == 0

    asyncio.run(main())


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("aiomooncake").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def close_under_a_stuck_call() -> None:
    """It is named, nothing is torn down under it, and the close ends when it has returned."""

    async def main() -> None:
        log = Lines()
        async with frozen_peer() as (store, _):
            call = asyncio.ensure_future(store.get("peer0"))
            await asyncio.sleep(0.1)  # until it is stuck, which nothing tells
            began = time.monotonic()
            await store.aclose(timeout=0.2)
            assert time.monotonic() - began < 1
            assert len(log.lines) == 1, log.lines
            assert "calls stuck in the engine: get (0." in log.lines[0]
            assert store.health().state == "closing"
            assert not call.done()
            await fails(call, 2 * TIMEOUT + 2)
            await settled()
            assert store.health().state == "closed"

    asyncio.run(main())


def close_on_a_frozen_master() -> None:
    async def main() -> None:
        async with LocalCluster() as cluster:
            store = await open_store(cluster.address)
            await cluster.pause()
            async with LoopStallProbe() as probe:
                began = time.monotonic()
                await store.aclose()
                seconds = time.monotonic() - began
            assert seconds < 10, f"it took {seconds:.1f} s"
            assert store.health().state == "closed"
            assert probe.longest < NO_STALL, probe

    asyncio.run(main())

"""Scenes of :mod:`test_sglang_hicache`: each runs in an interpreter of its own.

The transport's time-outs are read when the engine is imported, and a stuck transfer burns a core.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from aiomooncake import LocalCluster
from aiomooncake.testing import LoopStallProbe
from examples.sglang_hicache.backend import MooncakeStore
from examples.sglang_hicache.controller import Controller
from examples.sglang_hicache.interface import HiCacheStorageConfig
from examples.sglang_hicache.pool import MHAHostPool
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.processes import Peer

MB = 1 << 20
PAGES = 64
IN_TIME = 25.0
"""Seconds in which every caller knows what became of its pages, with a peer that holds all of them.

One batch alone takes 8 s or so; several side by side share the peer's lanes.
"""

SOON = 8.0
"""Seconds, where only the master stands still: it is given 2.5 s, and asked twice at most."""


class Rank:
    """A scheduler process: a backend, its pool and its threads."""

    def __init__(self, address: str, segment: int) -> None:
        extra = {
            "master_server_address": address,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": segment,
        }
        self.backend = MooncakeStore(HiCacheStorageConfig(3, 4, extra_config=extra))
        self.pool = MHAHostPool(6 * PAGES, 16)
        self.pool.kv_buffer.view("u1")[:] = 0xAB
        self.backend.register_mem_pool_host(self.pool)
        self.pages = [f"page{i}" for i in range(PAGES)]
        for number in range(PAGES):
            self.pool.page(number)[:] = number
        self.controller = Controller(self.backend)
        self.threads = ThreadPoolExecutor(8)

    def indices(self, part: int) -> Any:
        """Tell where the pages of a sixth of the pool are."""
        return self.pool.indices(range(part * PAGES, (part + 1) * PAGES))

    def write(self, name: str = "page", part: int = 0) -> list[bool]:
        return self.backend.batch_set_v1([f"{name}{i}" for i in range(PAGES)], self.indices(part))

    def read(self, part: int = 1) -> list[bool]:
        return self.backend.batch_get_v1(self.pages, self.indices(part))

    def has_read(self, part: int = 1) -> bool:
        mine = self.pool.kv_buffer[:, :PAGES]
        return np.array_equal(mine, self.pool.kv_buffer[:, part * PAGES : (part + 1) * PAGES])

    def start(self, work: Callable[[], object]) -> Future[object]:
        return self.threads.submit(work)

    def recovers(self) -> None:
        """Wait until pages can be written and read; the first calls meet lost connections."""
        deadline = time.monotonic() + 20
        while not (all(self.write("again")) and all(self.read())):
            assert time.monotonic() < deadline, "it does not recover"
        assert self.has_read()

    def leave(self) -> None:
        """End in order, in a bounded time."""
        began = time.monotonic()
        self.controller.close()
        self.backend.close()
        seconds = time.monotonic() - began
        assert seconds < 12, f"the close took {seconds:.1f} s"
        self.threads.shutdown()


@contextmanager
def peer_with_all_pages() -> Iterator[tuple[Rank, Peer]]:
    """A rank without memory of its own, and the peer that holds all its pages."""
    # The peer's segment must outlive its being frozen.
    with LocalCluster(client_ttl=60) as cluster, Peer(cluster.address) as peer:
        rank = Rank(cluster.address, segment=0)
        assert all(rank.write())
        assert all(rank.read())
        assert rank.has_read()
        yield rank, peer
        peer.kill()


def beside_a_free_loop(work: Callable[[], object]) -> None:
    """Do something while a loop runs in this process, which must not notice."""

    async def main() -> None:
        async with LoopStallProbe() as probe:
            await asyncio.to_thread(work)
        assert probe.longest < NO_STALL, probe

    asyncio.run(main())


def ended(calls: dict[str, Future[Any]], within: float) -> dict[str, Any]:
    """Wait for all answers."""
    began = time.monotonic()
    wait(calls.values(), timeout=within)
    late = [name for name, call in calls.items() if not call.done()]
    assert not late, f"no outcome after {within:g} s: {late}"
    print(f"all ended after {time.monotonic() - began:.1f} s")
    return {name: call.result() for name, call in calls.items()}


def frozen_master() -> None:
    with LocalCluster(client_ttl=60) as cluster:
        rank = Rank(cluster.address, 64 * MB)
        assert all(rank.write())

        def work() -> None:
            cluster.blocking.pause()
            calls: dict[str, Future[Any]] = {
                "prefetch": rank.controller.prefetch(rank.pages, rank.indices(2)),
                "backup": rank.controller.write_storage(["new"], rank.pool.indices([0])),
                "read": rank.start(rank.read),
                "write": rank.start(rank.write),
                "clear": rank.start(rank.backend.clear),
            }
            for i in range(4):
                calls[f"ask{i}"] = rank.start(lambda: rank.backend.batch_exists(rank.pages))
            answers = ended(calls, SOON)
            assert answers.pop("read") == answers.pop("write") == [False] * PAGES
            assert answers.pop("clear") is None
            assert set(answers.values()) == {0}, answers
            cluster.blocking.resume()
            rank.recovers()
            cluster.blocking.pause()
            rank.leave()

        beside_a_free_loop(work)


def frozen_peer() -> None:
    with peer_with_all_pages() as (rank, peer):

        def work() -> None:
            peer.freeze()
            calls: dict[str, Future[Any]] = {
                "prefetch": rank.controller.prefetch(rank.pages, rank.indices(2)),
                "backup": rank.controller.write_storage(["new"], rank.pool.indices([0])),
                "read": rank.start(lambda: rank.read(3)),
                "write": rank.start(lambda: rank.write("newer")),
            }
            # What only asks the master goes on meanwhile.
            asked: dict[str, Future[Any]] = {
                str(i): rank.start(lambda: rank.backend.batch_exists(rank.pages)) for i in range(4)
            }
            assert set(ended(asked, SOON).values()) == {PAGES}
            answers = ended(calls, IN_TIME)
            assert answers.pop("read") == answers.pop("write") == [False] * PAGES
            assert set(answers.values()) == {0}, answers
            peer.thaw()
            rank.recovers()
            rank.leave()

        beside_a_free_loop(work)


def write_nothing_late() -> None:
    """Pages of reads that have failed belong to the cache again, also when the peer comes back."""
    with peer_with_all_pages() as (rank, peer):
        peer.freeze()
        calls: dict[str, Future[Any]] = {
            str(part): rank.start(lambda part=part: rank.read(part))  # type: ignore[misc]
            for part in (2, 3)
        }
        assert set(map(tuple, ended(calls, IN_TIME).values())) == {(False,) * PAGES}
        rank.pool.kv_buffer[:, 2 * PAGES :].view("u1")[:] = 0xCD
        peer.thaw()
        rank.recovers()
        time.sleep(1)  # nothing tells that nothing will happen
        assert np.all(rank.pool.kv_buffer[:, 2 * PAGES :].view("u1") == 0xCD)
        rank.leave()


def close_beside_a_stuck_move() -> None:
    """It waits for the move, because that writes into pages, but not for ever."""
    with peer_with_all_pages() as (rank, peer):

        def work() -> None:
            peer.freeze()
            read = rank.start(rank.read)
            while not rank.backend.store.stats().in_flight:
                time.sleep(0.001)
            began = time.monotonic()
            rank.backend.close()
            assert time.monotonic() - began < 12
            assert ended({"read": read}, IN_TIME)["read"] == [False] * PAGES
            assert rank.backend.batch_exists(rank.pages) == 0

        beside_a_free_loop(work)
        rank.controller.close()
        rank.threads.shutdown()


def leave_without_close() -> None:
    """The process ends while its daemon threads are at work, as SGLang's does."""
    cluster = LocalCluster()
    cluster.blocking.start()
    rank = Rank(cluster.address, 64 * MB)
    rank.write()
    busy = threading.Semaphore(0)

    def work() -> None:
        while True:
            rank.read()
            rank.backend.batch_exists(rank.pages)
            busy.release()

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(40):
        busy.acquire()

"""Scenes of :mod:`test_lmcache_connector`: each runs in an interpreter of its own.

The transport's time-outs are read when the engine is imported, and a stuck transfer burns a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from aiomooncake import LocalCluster
from aiomooncake.testing import LoopStallProbe
from examples.lmcache_connector.connector import MooncakeConnector
from examples.lmcache_connector.interface import CacheEngineKey, ChunkLayout, EngineConfig
from examples.lmcache_connector.memory import MemoryObj, Pool
from examples.lmcache_connector.remote_backend import LoopThread, RemoteBackend
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.processes import Peer

MB = 1 << 20
LAYOUT = ChunkLayout((1, 2, 16, 2, 32), np.dtype("f2"))  # the 4096 bytes that a peer stores
IN_TIME = 10.0
"""Seconds within which every caller knows what became of its call.

The master is given 2.5 s, a transfer 2 s, and each of them is tried again at most once.
"""


class PeerKey(CacheEngineKey):
    """A key of what a peer has stored."""

    def to_string(self) -> str:
        return f"peer{self.chunk_hash}"


def mine(number: int) -> CacheEngineKey:
    return CacheEngineKey("mine", 1, 0, number)


def theirs(number: int) -> CacheEngineKey:
    return PeerKey("theirs", 1, 0, number)


class Scene:
    def __init__(self, cluster: LocalCluster, segment: int, timeout: float) -> None:
        settings: dict[str, Any] = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment,
            "local_buffer_size": 16 * MB,
            "transfer_timeout": timeout,
            "save_chunk_meta": False,
            "mooncake_prefer_local_alloc": segment > 0,
        }
        config = EngineConfig(f"mooncakestore://{cluster.address}", settings, timeout)
        self.thread = LoopThread()
        self.pool = Pool(8 * MB)
        self.backend = RemoteBackend(config, LAYOUT, self.thread.loop, self.pool, MooncakeConnector)
        self.probe = LoopStallProbe()
        self.on_loop(self.probe.__aenter__())

    def on_loop(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.thread.loop).result(30)

    def chunk(self, number: int) -> MemoryObj:
        obj = self.pool.allocate(LAYOUT.shape, LAYOUT.dtype, LAYOUT.fmt)
        assert obj is not None, "the pool leaks"
        obj.raw[:] = np.frombuffer(Peer.value(number), np.uint8)
        return obj

    def put(self, number: int) -> bool:
        """Store a chunk; whether it is known to be stored."""
        obj = self.chunk(number)
        failures = self.backend.put_failures
        future = self.backend.submit_put_task(mine(number), obj)
        obj.ref_count_down()
        return future.exception(IN_TIME) is None and self.backend.put_failures == failures

    def get(self, key: CacheEngineKey) -> bool:
        """Read a chunk; whether it came, and it is right whenever it came."""
        obj = self.backend.get_blocking(key)
        if obj is None:
            return False
        right = bytes(obj.byte_array) == Peer.value(key.chunk_hash)
        obj.ref_count_down()
        assert right, f"wrong bytes of {key}"
        return True

    def empty(self) -> None:
        deadline = time.monotonic() + 30
        while self.pool.live:
            assert time.monotonic() < deadline, f"references did not come back: {self.pool}"
            time.sleep(0.01)
        assert self.pool.largest == len(self.pool.memory)

    def close(self, within: float = IN_TIME + 2) -> None:
        assert self.probe.longest < NO_STALL, self.probe
        timed(self.backend.close, within)
        assert self.probe.longest < NO_STALL, self.probe
        self.on_loop(self.probe.__aexit__(None, None, None))
        self.thread.close()


def timed(call: Callable[[], Any], within: float = IN_TIME) -> Any:
    began = time.monotonic()
    answer = call()
    seconds = time.monotonic() - began
    assert seconds < within, f"it took {seconds:.1f} s"
    return answer


@contextlib.contextmanager
def busy(scene: Scene, key: Callable[[int], CacheEngineKey]) -> Iterator[None]:
    """Keep four threads at work meanwhile; none of them waits longer than it may."""
    over = threading.Event()

    def work(number: int) -> None:
        for turn in itertools.count(number, 4):
            timed(partial(scene.put, 1000 + turn))
            timed(partial(scene.get, key(turn % 8)))
            timed(partial(scene.backend.contains, key(turn % 8)))
            timed(partial(scene.backend.batched_contains, [key(i) for i in range(8)]))
            if over.wait(0.01):
                break

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(4)]
        try:
            yield
        finally:
            over.set()
        for worker in workers:
            worker.result()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it does not work again"


def master_freezes_under_work() -> None:
    with LocalCluster(client_ttl=60) as cluster:
        scene = Scene(cluster, 64 * MB, timeout=1.0)
        for number in range(8):
            assert scene.put(number)
        with busy(scene, mine):
            time.sleep(0.2)
            cluster.blocking.pause()
            time.sleep(0.2)
            assert not timed(lambda: scene.get(mine(0)), 1.5)  # what the caller waits for
            assert not timed(lambda: scene.backend.contains(mine(0)), 5)
            time.sleep(2)
            cluster.blocking.resume()
        wait_until(lambda: scene.get(mine(0)))
        assert scene.backend.contains(mine(7))
        scene.empty()
        cluster.blocking.pause()
        scene.close()


def peer_freezes_under_work() -> None:
    with LocalCluster(client_ttl=60) as cluster, Peer(cluster.address, keys=8) as peer:
        scene = Scene(cluster, 0, timeout=1.0)
        with busy(scene, theirs):
            time.sleep(0.2)
            peer.freeze()
            # What only asks the master goes on, until too many calls are stuck.
            assert timed(lambda: scene.backend.contains(theirs(1)), 1.0)
            assert not timed(lambda: scene.get(theirs(1)), 1.5)
            time.sleep(3)
        # The engine has let go of all memory, and comes back to none of it.
        scene.empty()
        scene.pool.memory[:] = 0xEE
        peer.thaw()
        time.sleep(1)  # nothing tells that nothing will happen
        assert (scene.pool.memory == 0xEE).all()
        wait_until(lambda: all(scene.get(theirs(i)) for i in range(8)))
        scene.empty()
        scene.close()


def healthy_chunks_beside_a_frozen_peer() -> None:
    """A batch that meets a frozen peer loses its chunks only."""
    with (
        LocalCluster(client_ttl=60) as cluster,
        Peer(cluster.address, keys=1) as peer,
    ):
        scene = Scene(cluster, 0, timeout=20.0)
        owner = Scene(cluster, 64 * MB, timeout=5.0)
        for number in range(1, 40):
            assert owner.put(number)
        wanted = [*map(mine, range(1, 21)), theirs(0), *map(mine, range(21, 40))]
        found = scene.backend.batched_get_blocking(wanted)
        assert all(obj is not None for obj in found)
        _give_back(found)
        peer.freeze()
        found = timed(lambda: scene.backend.batched_get_blocking(wanted))
        assert [i for i, obj in enumerate(found) if obj is None] == [20]
        for key, obj in zip(wanted, found, strict=True):
            assert obj is None or bytes(obj.byte_array) == Peer.value(key.chunk_hash)
        _give_back(found)
        scene.empty()
        owner.close()
        scene.close()


def _give_back(found: list[MemoryObj | None]) -> None:
    for obj in found:
        if obj is not None:
            obj.ref_count_down()


def close_beside_a_frozen_peer() -> None:
    with LocalCluster(client_ttl=60) as cluster, Peer(cluster.address, keys=8) as peer:
        scene = Scene(cluster, 0, timeout=1.0)
        assert scene.get(theirs(0))
        peer.freeze()
        with ThreadPoolExecutor(8) as pool:
            reads = [pool.submit(scene.get, theirs(i)) for i in range(4)]
            writes = [pool.submit(scene.put, i) for i in range(4)]
            time.sleep(0.2)
            timed(scene.backend.close, IN_TIME + 2)
            for call in (*reads, *writes):
                call.exception(IN_TIME)
        scene.empty()
        assert scene.probe.longest < NO_STALL, scene.probe
        scene.on_loop(scene.probe.__aexit__(None, None, None))
        scene.thread.close()

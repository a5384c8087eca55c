"""Scenes of :mod:`test_vllm_store_worker`: each runs in an interpreter of its own.

The transport's time-outs are read when the engine is imported, and a stuck transfer burns a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from aiomooncake import LocalCluster, StoreConfig
from aiomooncake.testing import LoopStallProbe
from examples.vllm_store_worker.blocks import Keys
from examples.vllm_store_worker.interface import (
    LoadSpec,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
    WorkerOptions,
)
from examples.vllm_store_worker.worker import MooncakeStoreWorker
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.processes import Peer, _environ

T = TypeVar("T")

TOKENS = 16
BLOCKS = 96
PIECES = 16
PIECE = 1024
HELD = 16
"""Blocks that a peer holds."""

IN_TIME = 40.0
"""Seconds within which every request has ended: the first ones on a frozen peer take 5 to 9 s."""

SOON = 4.0
"""Seconds for what takes a tenth of one: what waits for no peer that stands still."""


def hashes_of(name: str) -> list[bytes]:
    return [f"{name}-{number:03}".encode() for number in range(HELD)]


def content(block_hash: bytes) -> bytes:
    return (block_hash * (PIECES * PIECE // len(block_hash) + 1))[: PIECES * PIECE]


class Holder(Peer):
    """A process that holds the blocks whose hashes begin with its name."""

    def __init__(self, master: str, name: str) -> None:
        keys = Keys(WorkerOptions("m", BLOCKS))
        held = {
            key: content(one).hex()
            for key, one in zip(keys.of_all_ranks(hashes_of(name)), hashes_of(name), strict=True)
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environ({}),
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(held) + "\n")
        self._process.stdin.flush()
        self.hostname = self._process.stdout.readline().strip()
        assert self.hostname, "the holder did not start"
        self.pid = self._process.pid


# It ends when its parent does: its standard input ends then.
_HOLDER = """
import json, os, sys
import mooncake.store
store = mooncake.store.MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
config = mooncake.store.ReplicateConfig()
config.preferred_segment = store.get_hostname()
for key, value in json.loads(sys.stdin.readline()).items():
    code = code or store.put(key, bytes.fromhex(value), config)
if code == 0:
    print(store.get_hostname(), flush=True)
    sys.stdin.read()
os._exit(1)
"""


class Scene:
    """A worker whose calls are made by a thread, beside a loop that is watched."""

    worker: MooncakeStoreWorker

    def __init__(self) -> None:
        self.layers = {f"l{i}": np.zeros((2, BLOCKS, PIECE), np.uint8) for i in range(PIECES // 2)}
        self.ended: set[str] = set()
        self.saved: set[str] = set()
        self.failed: set[int] = set()

    async def open(self, master: str, *, segment: int = 0, **options: Any) -> None:
        config = StoreConfig(
            master,
            local_hostname="127.0.0.1",
            global_segment_size=segment,
            local_buffer_size="16MB",
            transfer_timeout=1,
        )
        options = {"load_recv_threads": 4, **options}
        worker_options = WorkerOptions("m", BLOCKS, TOKENS, **options)
        self.worker = await asyncio.to_thread(MooncakeStoreWorker, worker_options, config)
        await asyncio.to_thread(self.worker.register_kv_caches, self.layers)

    def step(self, *requests: ReqMeta, finished: Sequence[str] = ()) -> None:
        """Make a step of the engine, which must not block."""
        began = time.monotonic()
        meta = MooncakeStoreConnectorMetadata(list(requests))
        saved, loaded = self.worker.get_finished(set(finished), meta)
        assert time.monotonic() - began < NO_STALL
        self.saved |= saved
        self.ended |= loaded
        self.failed |= self.worker.get_block_ids_with_load_errors()

    async def ends(self, *req_ids: str, within: float = IN_TIME) -> None:
        """Make steps until requests have ended."""
        began = time.monotonic()
        while not set(req_ids) <= self.ended | self.saved:
            assert time.monotonic() - began < within, f"only {self.ended | self.saved} ended"
            await asyncio.sleep(0.005)
            self.step()

    def holds(self, block: int, block_hash: bytes) -> bool:
        pieces = [piece[block].tobytes() for layer in self.layers.values() for piece in layer]
        return b"".join(pieces) == content(block_hash)

    def mark(self, blocks: Sequence[int]) -> None:
        for layer in self.layers.values():
            layer[:, list(blocks)] = 0xAB

    def is_marked(self, blocks: Sequence[int]) -> bool:
        return all((layer[:, list(blocks)] == 0xAB).all() for layer in self.layers.values())

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        return await asyncio.to_thread(self.worker.lookup, len(hashes) * TOKENS + 1, hashes)

    async def close(self, within: float) -> None:
        await timed(asyncio.to_thread(self.worker.close), within)


def load(req_id: str, blocks: Sequence[int], hashes: Sequence[bytes]) -> ReqMeta:
    spec = LoadSpec(0, len(hashes) * TOKENS, can_load=True)
    return ReqMeta(req_id, 0, list(blocks), list(hashes), load_spec=spec)


def save(req_id: str, blocks: Sequence[int], hashes: Sequence[bytes]) -> ReqMeta:
    return ReqMeta(req_id, len(hashes) * TOKENS, list(blocks), list(hashes), can_save=True)


async def timed(call: Awaitable[T], within: float) -> T:
    began = time.monotonic()
    answer = await call
    seconds = time.monotonic() - began
    assert seconds < within, f"it took {seconds:.1f} s"
    return answer


@contextlib.asynccontextmanager
async def loop_stays_free() -> AsyncIterator[None]:
    async with LoopStallProbe() as probe:
        yield
    assert probe.longest < NO_STALL, probe


@contextlib.contextmanager
def holders(master: str, *names: str) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Holder(master, name)) for name in names]


def frozen_peer() -> None:
    """Some blocks lie on a peer that stands still; the others are loaded all the same."""

    async def main() -> None:
        scene = Scene()
        well, ill = hashes_of("well"), hashes_of("ill")
        # The peer's segment must outlive its being frozen.
        async with LocalCluster(client_ttl=120, lease_ttl=5) as cluster:
            with holders(cluster.address, "well", "ill") as (_, peer):
                await scene.open(cluster.address, preferred_segment=peer.hostname)
                scene.step(load("before", range(32), [*well, *ill]))
                await scene.ends("before")
                assert not scene.failed
                peer.freeze()
                scene.mark(range(BLOCKS))
                async with loop_stays_free():
                    scene.step(
                        load("well", range(16), well),
                        load("both", range(16, 32), [*well[:8], *ill[:8]]),
                        load("ill", range(32, 48), ill),
                        save("saved", range(8), [b"new-%03d" % i for i in range(8)]),
                        finished=["saved"],
                    )
                    assert await timed(scene.lookup([*well, *ill]), 2) == 32 * TOKENS
                    # The next call repeats its keys, and so is another one, which gets stuck.
                    await scene.ends("well", within=SOON)
                    await scene.ends("both", "ill", "saved")
                    assert scene.failed == set(range(24, 48))
                    assert all(scene.holds(block, well[block]) for block in range(16))
                    assert all(scene.holds(16 + i, well[i]) for i in range(8))
                    # From now on the peer is avoided.
                    scene.ended.clear()
                    scene.step(load("ill again", range(32, 48), ill))
                    scene.step(load("well again", range(48, 64), well))
                    await scene.ends("ill again", "well again", within=SOON)
                    assert all(scene.holds(48 + i, well[i]) for i in range(16))
                    # Blocks that were given back are not written to when the peer comes back.
                    scene.mark(range(16, 48))
                    peer.thaw()
                    deadline = time.monotonic() + IN_TIME
                    while True:
                        scene.failed.clear()
                        scene.step(load("after", range(64, 80), ill))
                        await scene.ends("after")
                        scene.ended.clear()
                        if not scene.failed:
                            break
                        assert time.monotonic() < deadline, scene.failed
                        await asyncio.sleep(0.1)
                    await asyncio.sleep(1)  # nothing tells that nothing will happen
                    assert scene.is_marked(range(16, 48))
                    await scene.close(12)

    asyncio.run(main())


def frozen_master() -> None:
    """Nobody can be asked: look-ups answer 0, loads fail, saves end, and so does closing."""

    async def main() -> None:
        scene = Scene()
        well = hashes_of("well")
        async with LocalCluster(client_ttl=120) as cluster:
            with holders(cluster.address, "well"):
                await scene.open(cluster.address, segment=32 << 20)
                assert await scene.lookup(well) == HELD * TOKENS
                await cluster.pause()
                async with loop_stays_free():
                    scene.step(
                        *(load(f"l{i}", [i], well[i : i + 1]) for i in range(8)),
                        *(save(f"s{i}", [i], [b"new-%03d" % i]) for i in range(8)),
                        finished=[f"s{i}" for i in range(8)],
                    )
                    hits = await timed(asyncio.gather(*(scene.lookup(well) for _ in range(4))), 10)
                    assert hits == [0] * 4
                    await scene.ends(*(f"{what}{i}" for what in "ls" for i in range(8)))
                    assert scene.failed == set(range(8))
                    scene.step(load("under way", [9], well[:1]), save("too", [10], [b"other"]))
                    scene.step(load("queued", [11], well[:1]))
                    await scene.close(15)
                    await scene.ends("under way", "queued", within=15)
                    assert {9, 11} <= scene.failed

    asyncio.run(main())


def peer_that_dies() -> None:
    """A peer is killed while blocks are read from it."""

    async def main() -> None:
        scene = Scene()
        well, ill = hashes_of("well"), hashes_of("ill")
        async with LocalCluster(client_ttl=3) as cluster:
            with holders(cluster.address, "well", "ill") as (_, peer):
                await scene.open(cluster.address)
                async with loop_stays_free():
                    for number in range(20):
                        scene.step(load(f"l{number}", range(32), [*well, *ill]))
                        if number == 10:
                            peer.kill()
                    await scene.ends(*(f"l{number}" for number in range(20)))
                    assert scene.failed <= set(range(16, 32))
                    assert all(scene.holds(block, well[block]) for block in range(16))
                    # The master forgets it.
                    deadline = time.monotonic() + IN_TIME
                    while await scene.lookup([*well, *ill]) > HELD * TOKENS:
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.05)
                    await scene.close(12)

    asyncio.run(main())

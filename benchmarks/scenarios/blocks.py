"""KV blocks: many middle-sized pieces of registered memory, written and read in one go."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS, Aiomooncake, ToThread
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

BLOCKS = Scenario(
    "kv-blocks",
    "64 blocks of 256 KB in registered memory are written by one call (put_many_from), and read "
    "back by one (get_many_into), in another process or in the client's own memory.",
)

_BINDING = "batch calls in a thread"
_COUNT = 64
_BLOCK = 256 << 10
_SEGMENT = 256 << 20
_TURNS = 4  # for each round of the run: one takes milliseconds
_THERE = "other process"
_HERE = "own memory"


class Blocks(Job):
    """Moves all blocks at once."""

    _peer: Aiomooncake | ToThread
    _buffer: Any

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect, and register the memory."""
        self._peer = Aiomooncake() if peer == OURS else ToThread()
        await self._peer.open(address, segment=segment, local_buffer=16 << 20)
        if isinstance(self._peer, Aiomooncake):
            self._buffer = await self._peer.store.allocate(_COUNT * _BLOCK)
            self._address = self._buffer.address
        else:
            self._memory = mmap.mmap(-1, _COUNT * _BLOCK)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._peer.native.register_buffer(self._address, _COUNT * _BLOCK)
        ctypes.memset(self._address, 1, _COUNT * _BLOCK)

    async def move(self, verb: str, prefix: str) -> Round:
        """Write or read the blocks once."""
        peer = self._peer
        keys = [f"{prefix}{i}" for i in range(_COUNT)]
        if isinstance(peer, Aiomooncake):
            slices = [self._buffer[i * _BLOCK : (i + 1) * _BLOCK] for i in range(_COUNT)]
            items = dict(zip(keys, slices, strict=True))
            async with Meter() as meter:
                if verb == "write":
                    await peer.store.put_many_from(items)
                else:
                    got = await peer.store.get_many_into(items)
                    assert got == [_BLOCK] * _COUNT
        else:
            method = peer.way("batch_put_from" if verb == "write" else "batch_get_into")
            places = [self._address + i * _BLOCK for i in range(_COUNT)]
            async with Meter() as meter:
                codes = await method(keys, places, [_BLOCK] * _COUNT)
            assert codes == [0 if verb == "write" else _BLOCK] * _COUNT, codes
        return meter.round(_COUNT)

    async def remove(self, prefix: str) -> None:
        """Remove the blocks, so that the next ones find room."""
        await self._peer.remove(prefix)
        await asyncio.sleep(0)


def _blocks(bench: Bench, _wanted: frozenset[str]) -> None:
    with (
        bench.cluster_with_owner(_SEGMENT) as (cluster, _owner),
        Worker(Blocks) as ours,
        Worker(Blocks) as binding,
    ):
        workers = {OURS: ours, _BINDING: binding}
        for peer, worker in workers.items():
            worker.call("open", peer=peer, address=cluster.address, segment=0)
        _measure(bench, _THERE, workers)
    with (
        LocalCluster() as one,
        LocalCluster() as other,
        Worker(Blocks) as ours,
        Worker(Blocks) as binding,
    ):
        ours.call("open", peer=OURS, address=one.address, segment=_SEGMENT)
        binding.call("open", peer=_BINDING, address=other.address, segment=_SEGMENT)
        _measure(bench, _HERE, {OURS: ours, _BINDING: binding})


def _measure(bench: Bench, place: str, workers: dict[str, Worker]) -> None:
    kept: dict[tuple[str, str], list[Any]] = {
        (verb, peer): [] for verb in ("write", "read") for peer in workers
    }
    for number in range(bench.rounds * bench.pick(_TURNS, 1) + 1):
        for peer, worker in workers.items():
            prefix = f"{peer[:3]}-{number}-"
            for verb in ("write", "read"):
                kept[verb, peer].append(worker.call("move", verb=verb, prefix=prefix))
            worker.call("remove", prefix=prefix)
    for verb in ("write", "read"):
        ours, theirs = (
            # The first turn makes connections.
            bench.measured(BLOCKS.name, peer, kept[verb, peer][1:], verb=verb, place=place)
            for peer in workers
        )
        bench.compare(
            BLOCKS.name, f"{verb}, {place}", "s", ours.median("seconds"),
            theirs.median("seconds"),
            against=f"{'batch_put_from' if verb == 'write' else 'batch_get_into'} in a thread",
        )  # fmt: skip


GROUPS = (Group((BLOCKS,), _blocks),)

"""KV blocks: many middle-sized pieces of registered memory, written and read in one go."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
SHAPES = Scenario(
    "kv-shapes",
    "Likewise blocks of 64 KB and of 1 MB, blocks that lie in 2 and in 16 pieces of memory, and 16 "
    "blocks by each of 8 callers at once.",
)

_BINDING = "batch calls in a thread"
_CALLERS = 8
_MEMORY = 32 << 20
_SEGMENT = 256 << 20
_TURNS = 4  # for each round of the run: one takes milliseconds
_THERE = "other process"
_HERE = "own memory"


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks that are moved at once.

    Attributes:
        name: What the table calls them.
        count: How many blocks.
        size: Bytes of each.
        pieces: Pieces of memory that each lies in.
        callers: How many calls they are shared out to.
    """

    name: str
    count: int
    size: int
    pieces: int = 1
    callers: int = 1


_SHAPES = {
    BLOCKS.name: (Shape("", 64, 256 << 10),),
    SHAPES.name: (
        Shape("128 of 64 KB", 128, 64 << 10),
        Shape("32 of 1 MB", 32, 1 << 20),
        Shape("64 of 256 KB in 2 pieces", 64, 256 << 10, pieces=2),
        Shape("64 of 256 KB in 16 pieces", 64, 256 << 10, pieces=16),
        Shape(f"{_CALLERS} callers, each 16 of 256 KB", 128, 256 << 10, callers=_CALLERS),
    ),
}


class Blocks(Job):
    """Moves all blocks at once."""

    _peer: Aiomooncake | ToThread
    _buffer: Any

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect, and register the memory."""
        self._peer = Aiomooncake() if peer == OURS else ToThread()
        await self._peer.open(address, segment=segment, local_buffer=16 << 20)
        if isinstance(self._peer, Aiomooncake):
            self._buffer = await self._peer.store.allocate(_MEMORY)
            self._address = self._buffer.address
        else:
            # The default one has too few threads for all callers.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_CALLERS))
            self._memory = mmap.mmap(-1, _MEMORY)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._peer.native.register_buffer(self._address, _MEMORY)
        ctypes.memset(self._address, 1, _MEMORY)

    async def move(self, verb: str, prefix: str, shape: dict[str, Any]) -> Round:
        """Write or read the blocks once."""
        blocks = Shape(**shape)
        move = self._ours if isinstance(self._peer, Aiomooncake) else self._binding
        share = blocks.count // blocks.callers
        calls = [move(verb, prefix, blocks, i * share, share) for i in range(blocks.callers)]
        async with Meter() as meter:
            if len(calls) == 1:
                await calls[0]
            else:
                await asyncio.gather(*calls)
        return meter.round(blocks.count)

    def _ours(self, verb: str, prefix: str, blocks: Shape, first: int, count: int) -> Any:
        step = blocks.size // blocks.pieces
        items: dict[str, Any] = {}
        for i in range(first, first + count):
            start = i * blocks.size
            parts = [
                self._buffer[start + j * step : start + (j + 1) * step]
                for j in range(blocks.pieces)
            ]
            items[f"{prefix}{i}"] = parts if blocks.pieces > 1 else parts[0]
        store: Any = self._peer.store  # type: ignore[union-attr]

        async def move() -> None:
            if verb == "write":
                await store.put_many_from(items)
            else:
                assert await store.get_many_into(items) == [blocks.size] * count

        return move()

    def _binding(self, verb: str, prefix: str, blocks: Shape, first: int, count: int) -> Any:
        keys = [f"{prefix}{i}" for i in range(first, first + count)]
        starts = [self._address + i * blocks.size for i in range(first, first + count)]
        method = "batch_put_from" if verb == "write" else "batch_get_into"
        places: list[Any] = starts
        sizes: list[Any] = [blocks.size] * count
        if blocks.pieces > 1:
            method += "_multi_buffers"
            step = blocks.size // blocks.pieces
            places = [[start + j * step for j in range(blocks.pieces)] for start in starts]
            sizes = [[step] * blocks.pieces] * count
        way = self._peer.way(method)  # type: ignore[union-attr]

        async def move() -> None:
            codes = await way(keys, places, sizes)
            assert codes == [0 if verb == "write" else blocks.size] * count, codes

        return move()

    async def remove(self, prefix: str) -> None:
        """Remove the blocks, so that the next ones find room."""
        await self._peer.remove(prefix)
        await asyncio.sleep(0)


def _blocks(bench: Bench, wanted: frozenset[str]) -> None:
    with (
        bench.cluster_with_owner(_SEGMENT) as (cluster, _owner),
        Worker(Blocks) as ours,
        Worker(Blocks) as binding,
    ):
        workers = {OURS: ours, _BINDING: binding}
        for peer, worker in workers.items():
            worker.call("open", peer=peer, address=cluster.address, segment=0)
        _measure(bench, wanted, _THERE, workers)
    with (
        LocalCluster() as one,
        LocalCluster() as other,
        Worker(Blocks) as ours,
        Worker(Blocks) as binding,
    ):
        ours.call("open", peer=OURS, address=one.address, segment=_SEGMENT)
        binding.call("open", peer=_BINDING, address=other.address, segment=_SEGMENT)
        _measure(bench, wanted, _HERE, {OURS: ours, _BINDING: binding})


def _measure(bench: Bench, wanted: frozenset[str], place: str, workers: dict[str, Worker]) -> None:
    for scenario, shapes in _SHAPES.items():
        for shape in shapes if scenario in wanted else ():
            _measure_shape(bench, scenario, shape, place, workers)


def _measure_shape(
    bench: Bench, scenario: str, shape: Shape, place: str, workers: dict[str, Worker]
) -> None:
    kept: dict[tuple[str, str], list[Any]] = {
        (verb, peer): [] for verb in ("write", "read") for peer in workers
    }
    for number in range(bench.rounds * bench.pick(_TURNS, 1) + 1):
        for peer, worker in workers.items():
            prefix = f"{peer[:3]}-{number}-"
            for verb in ("write", "read"):
                moved = worker.call("move", verb=verb, prefix=prefix, shape=asdict(shape))
                kept[verb, peer].append(moved)
            worker.call("remove", prefix=prefix)
    case = {"shape": shape.name} if shape.name else {}
    target, times = ("≥ 0.95 of its rate", 0.95) if shape.callers == 1 else ("faster", 1.0)
    for verb in ("write", "read"):
        ours, theirs = (
            # The first turn makes connections.
            bench.measured(scenario, peer, kept[verb, peer][1:], verb=verb, place=place, **case)
            for peer in workers
        )
        method = "batch_put_from" if verb == "write" else "batch_get_into"
        bench.compare(
            scenario, ", ".join(filter(None, (verb, shape.name, place))), "s",
            ours.median("seconds"), theirs.median("seconds"),
            against=f"{method}{'_multi_buffers' if shape.pieces > 1 else ''} in a thread",
            target=target, at_least_times=times,
        )  # fmt: skip


GROUPS = (Group((BLOCKS, SHAPES), _blocks),)

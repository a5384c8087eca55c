"""Large values: what one does to the loop and to the memory, and how fast it moves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import time
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Measurement, Meter, Round
from benchmarks.peers import OURS, WRAPPER, Aiomooncake, BindingPeer, ToThread, Wrapper
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

GET = Scenario(
    "get-large",
    "get of one 128 MB value, in another process or in the reader's own: how long the loop stands "
    "still, how long it takes, and how much memory the first one takes at its peak.",
)
MOVE = Scenario(
    "move-large",
    "A 64 MB value of another process is read, and one is written there: by the blocking "
    "get_into and put_from of the whole value in registered memory, by the same through "
    "store.engine, by store.get_into and store.put_from of such memory, and by store.get and "
    "store.put; the last four travel in pieces.",
)

_MB = 1 << 20
_THERE = "other process"
_HERE = "same process"
_BLOCKING = "blocking get_into / put_from"
_ENGINE = "store.engine"
_INTO = "store.get_into / put_from"


class Getting(Job):
    """Reads one large value again and again."""

    _peer: Aiomooncake | Wrapper

    async def open(self, peer: str, address: str, segment: int, local_buffer: int) -> None:
        """Connect."""
        self._peer = Aiomooncake() if peer == OURS else Wrapper()
        await self._peer.open(address, segment=segment, local_buffer=local_buffer)

    async def store(self, key: str, nbytes: int) -> None:
        """Store the value in this process's own memory."""
        memory, address = _memory(nbytes)
        if isinstance(self._peer, Aiomooncake):
            await self._peer.store.put(key, memory)
        elif self._peer.native.put_from(key, address, nbytes) != 0:
            raise RuntimeError("the value can't be stored")

    async def get(self, key: str, nbytes: int) -> Round:
        """Read it; dropping what came is not measured."""
        peer = self._peer
        async with Meter() as meter:
            if isinstance(peer, Aiomooncake):
                value = await peer.store.get(key)
            else:
                value = await peer.way("get")(key)
        assert value is not None
        assert len(value) == nbytes
        return meter.round()


class Moving(Job):
    """Moves one large value by any of the ways."""

    _peer: Aiomooncake | BindingPeer
    _buffer: Any

    async def open(self, way: str, address: str, nbytes: int) -> None:
        """Connect, and register memory where the way needs it."""
        self._way = way
        self._memory, self._address = _memory(nbytes)
        self._nbytes = nbytes
        self._peer = ToThread() if way == _BLOCKING else Aiomooncake()
        await self._peer.open(address, segment=0, local_buffer=16 * _MB)
        if isinstance(self._peer, BindingPeer):
            self._peer.native.register_buffer(self._address, nbytes)
        elif way == _ENGINE:
            await self._peer.store.engine.register_buffer(self._address, nbytes)
        elif way == _INTO:
            self._buffer = await self._peer.store.register(self._memory)

    async def read(self, key: str) -> Round:
        """Read the value."""
        peer = self._peer
        async with Meter() as meter:
            if isinstance(peer, BindingPeer):
                got = await asyncio.to_thread(
                    peer.native.get_into, key, self._address, self._nbytes
                )
            elif self._way == _INTO:
                got = await peer.store.get_into(key, self._buffer)
            elif self._way == _ENGINE:
                got = await peer.store.engine.get_into(key, self._address, self._nbytes)
            else:
                value = await peer.store.get(key)
                got = len(value or b"")
        assert got == self._nbytes
        return meter.round()

    async def write(self, key: str) -> Round:
        """Write a value of the same size."""
        peer = self._peer
        code = 0
        async with Meter() as meter:
            if isinstance(peer, BindingPeer):
                code = await asyncio.to_thread(
                    peer.native.put_from, key, self._address, self._nbytes
                )
            elif self._way == _INTO:
                await peer.store.put_from(key, self._buffer)
            elif self._way == _ENGINE:
                code = await peer.store.engine.put_from(key, self._address, self._nbytes)
            else:
                await peer.store.put(key, self._memory)
        assert code == 0
        return meter.round()


def _get_large(bench: Bench, _wanted: frozenset[str]) -> None:
    _get(bench, _THERE)
    _get(bench, _HERE)


def _get(bench: Bench, place: str) -> None:
    nbytes = bench.pick(128, 16) * _MB
    rounds: dict[str, list[Any]] = {OURS: [], WRAPPER: []}
    # The wrapper can't read a value that is larger than its local buffer.
    local_buffers = {OURS: 64 * _MB, WRAPPER: nbytes + 32 * _MB}
    if place == _THERE:
        with (
            bench.cluster_with_owner(2 * nbytes) as (cluster, owner),
            Worker(Getting) as ours,
            Worker(Getting) as wrapper,
        ):
            owner.call("store", prefix="large", count=1, size=nbytes)
            workers = {OURS: ours, WRAPPER: wrapper}
            for peer, worker in workers.items():
                worker.call(
                    "open", peer=peer, address=cluster.address, segment=0,
                    local_buffer=local_buffers[peer],
                )  # fmt: skip
            for _ in range(bench.rounds):
                for peer, worker in workers.items():
                    rounds[peer].append(worker.call("get", key="large0", nbytes=nbytes))
    else:
        for peer, kept in rounds.items():
            # A master of its own: a value goes into any memory that the master knows.
            with LocalCluster() as cluster, Worker(Getting) as worker:
                worker.call(
                    "open", peer=peer, address=cluster.address, segment=2 * nbytes,
                    local_buffer=local_buffers[peer],
                )  # fmt: skip
                worker.call("store", key="large0", nbytes=nbytes)
                kept += [
                    worker.call("get", key="large0", nbytes=nbytes) for _ in range(bench.rounds)
                ]
    ours_, theirs = (
        bench.measured(GET.name, peer, kept, place=place, bytes=nbytes)
        for peer, kept in rounds.items()
    )
    _rows_of_get(bench, place, nbytes, ours_, theirs)


def _rows_of_get(
    bench: Bench, place: str, nbytes: int, ours: Measurement, theirs: Measurement
) -> None:
    bench.compare(
        GET.name, f"loop still for, {place}", "s", ours.median("longest_stall"),
        theirs.median("longest_stall"), against=WRAPPER, target="≤ 10 ms", at_most=0.01,
    )  # fmt: skip
    bench.compare(
        GET.name, f"peak memory, {place}", "bytes",
        ours.largest("extra_rss"), theirs.largest("extra_rss"), against=WRAPPER,
        target="≤ 1.05 × the value", at_most=1.05 * nbytes,
    )  # fmt: skip
    bench.compare(
        GET.name, f"takes, {place}", "s", ours.median("seconds"),
        theirs.median("seconds"), against=WRAPPER,
    )  # fmt: skip


def _move(bench: Bench, _wanted: frozenset[str]) -> None:
    nbytes = bench.pick(64, 16) * _MB
    ways = (_INTO, OURS, _ENGINE, _BLOCKING)
    reads: dict[str, list[Any]] = {way: [] for way in ways}
    writes: dict[str, list[Any]] = {way: [] for way in ways}
    with (
        bench.cluster_with_owner(8 * nbytes) as (cluster, owner),
        contextlib.ExitStack() as stack,
    ):
        owner.call("store", prefix="large", count=1, size=nbytes)
        workers = {way: stack.enter_context(Worker(Moving)) for way in ways}
        for way, worker in workers.items():
            worker.call("open", way=way, address=cluster.address, nbytes=nbytes)
            worker.call("read", key="large0")  # the first one also pays for memory and connections
        for _ in range(bench.rounds):
            for way, worker in workers.items():
                reads[way].append(worker.call("read", key="large0"))
                writes[way].append(worker.call("write", key=f"written{time.monotonic_ns()}"))
                owner.call("remove", prefix="written")
    _rows_of_move(bench, "get", "get_into", nbytes, reads)
    _rows_of_move(bench, "put", "put_from", nbytes, writes)


def _rows_of_move(
    bench: Bench, verb: str, call: str, nbytes: int, kept: dict[str, list[Any]]
) -> None:
    measured = {
        way: bench.measured(MOVE.name, way, rounds, verb=verb, bytes=nbytes)
        for way, rounds in kept.items()
    }
    # The design has both: 0.95 of the bandwidth for either, and 0.8 of the time for reading.
    target, times = ("≤ 0.8 of its time", 1.25) if verb == "get" else ("≥ 0.95 of its rate", 0.95)
    for way, what in (
        (_INTO, f"store.{call}, in pieces"),
        (OURS, f"store.{verb}, in pieces"),
        (_ENGINE, f"store.engine.{call}, whole"),
    ):
        bench.compare(
            MOVE.name, what, "s", measured[way].median("seconds"),
            measured[_BLOCKING].median("seconds"), against=f"blocking {call}",
            target=target if way == _INTO else "", at_least_times=times if way == _INTO else None,
        )  # fmt: skip


def _memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Make memory whose pages are there, and tell its address."""
    memory = mmap.mmap(-1, nbytes)
    block = bytes(range(256)) * 4096
    for start in range(0, nbytes, len(block)):
        memory[start : start + len(block)] = block
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


GROUPS = (Group((GET,), _get_large), Group((MOVE,), _move))

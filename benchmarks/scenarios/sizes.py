"""How the cost of a call grows with the size of its value."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS, PEERS, WRAPPER, BlockingLoop, Peer
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

SIZES = Scenario(
    "sizes",
    "Read and store values of 1 KB to 128 MB in memory of another process, one after the other by "
    "one task, and up to 1 MB by 64 tasks.",
)

_KB, _MB = 1 << 10, 1 << 20
_SIZES = {
    1: (_KB, 4 * _KB, 16 * _KB, 64 * _KB, 256 * _KB, _MB, 4 * _MB, 16 * _MB, 64 * _MB, 128 * _MB),
    64: (_KB, 4 * _KB, 16 * _KB, 64 * _KB, 256 * _KB, _MB),
}
_SHOWN = (4 * _KB, 64 * _KB, _MB, 16 * _MB, 128 * _MB)  # in the table; the plot shows all
_PEERS = {1: (OURS, WRAPPER, BlockingLoop.name), 64: (OURS, WRAPPER)}
_SEGMENT = 1024 * _MB
# The binding can't move a value that is larger than its local buffer; ours goes around it.
_LOCAL_BUFFER = {OURS: 64 * _MB, WRAPPER: 384 * _MB, BlockingLoop.name: 384 * _MB}
_ROUND = 64 * _MB  # bytes of a round, at least one call of each task
_CALLS = 200
_HELD = 64  # keys of a size, or as many as fit into a quarter of the segment
_READ = "sized-"
_WRITTEN = "new-"


class Sized(Job):
    """Reads and stores values of one size."""

    _peer: Peer

    async def open(self, peer: str, address: str) -> None:
        """Connect; without memory of its own."""
        self._peer = PEERS[peer]()
        await self._peer.open(address, segment=0, local_buffer=_LOCAL_BUFFER[peer])

    async def drive(self, verb: str, size: int, held: int, calls: int, tasks: int) -> Round:
        """Make ``calls`` calls in ``tasks`` tasks."""
        items: list[Any]
        if verb == "put":
            value = os.urandom(min(size, _MB)) * (size // min(size, _MB))
            items = [(f"{_WRITTEN}{i}", value) for i in range(calls)]
        else:
            items = [f"{_READ}{size}-{i % held}" for i in range(calls)]
        requests = self._peer.requests(verb, items)
        async with Meter() as meter:
            driven = await self._peer.drive(requests, tasks)
        return meter.round(calls, driven.latencies, seconds=driven.seconds)

    async def remove(self, prefix: str) -> None:
        """Remove what was written or read."""
        await self._peer.remove(prefix)


def _sizes(bench: Bench, _wanted: frozenset[str]) -> None:
    with (
        bench.cluster_with_owner(_SEGMENT) as (cluster, owner),
        contextlib.ExitStack() as stack,
    ):
        workers = {peer: stack.enter_context(Worker(Sized)) for peer in _PEERS[1]}
        for peer, worker in workers.items():
            worker.call("open", peer=peer, address=cluster.address)
        for size in _SIZES[1]:
            if size > bench.pick(128, 4) * _MB:
                continue
            held = max(1, min(_HELD, _SEGMENT // 4 // size))
            owner.call("store", prefix=f"{_READ}{size}-", count=held, size=size)
            for tasks, peers in _PEERS.items():
                if size in _SIZES[tasks] and tasks <= bench.pick(64, 1):
                    for verb in ("get", "put"):
                        _measure(
                            bench, {p: workers[p] for p in peers}, verb, size,
                            held=held, tasks=tasks,
                        )  # fmt: skip
            owner.call("remove", prefix=f"{_READ}{size}-")


def _measure(
    bench: Bench, workers: Mapping[str, Worker], verb: str, size: int, *, held: int, tasks: int
) -> None:
    calls = max(2, tasks, min(_CALLS * (4 if tasks > 1 else 1), _ROUND // size))
    if bench.smoke:
        calls = tasks
    kept: dict[str, list[Any]] = {peer: [] for peer in workers}
    for _ in range(bench.rounds + 1):
        for peer, worker in workers.items():
            kept[peer].append(
                worker.call("drive", verb=verb, size=size, held=held, calls=calls, tasks=tasks)
            )
            if verb == "put":
                worker.call("remove", prefix=_WRITTEN)
    measured = {
        peer: bench.measured(SIZES.name, peer, rounds[1:], verb=verb, bytes=size, tasks=tasks)
        for peer, rounds in kept.items()
    }
    if size in _SHOWN or bench.smoke:
        shown = f"{size >> 20} MB" if size >= _MB else f"{size >> 10} KB"
        bench.compare(
            SIZES.name, f"{verb} of {shown}, {tasks} task{'s' * (tasks > 1)}", "1/s",
            measured[OURS].rate, measured[WRAPPER].rate, against=WRAPPER,
        )  # fmt: skip


GROUPS = (Group((SIZES,), _sizes),)

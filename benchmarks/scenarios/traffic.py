"""Small values: single keys by a number of tasks, and many keys in one call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Measurement, Meter, Round
from benchmarks.owner import Owner
from benchmarks.peers import (
    OURS,
    PEERS,
    WRAPPER,
    AnyioToThread,
    BlockingLoop,
    Executor,
    Peer,
    ToThread,
)
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

_WORDS = "4 KB each, by 1, 8, 64 and 512 tasks, in memory of another process or of the client's own"
SINGLE = {
    "get": Scenario("get", f"Read keys one by one, {_WORDS}."),
    "put": Scenario("put", f"Store new keys one by one, {_WORDS}."),
    "exists": Scenario("exists", f"Ask for keys one by one, {_WORDS}."),
}
MANY = {
    "get_many": Scenario(
        "get-many", "Read 16 or 256 keys per call, 4 KB each, in memory of another process."
    ),
    "put_many": Scenario(
        "put-many", "Store 16 or 256 new keys per call, 4 KB each, in memory of another process."
    ),
}

_SIZE = 4096
_SEGMENT = 256 << 20
_LOCAL_BUFFER = 64 << 20
_SINGLE_PEERS = (OURS, WRAPPER, ToThread.name, AnyioToThread.name, Executor.name)
_MANY_PEERS = (OURS, WRAPPER, BlockingLoop.name)
# Operations of a round by number of tasks: 0.1 to 0.4 seconds for today's ways.
_OPERATIONS = {1: 300, 8: 800, 64: 1500, 512: 2048}
_BATCHES = {16: 64, 256: 16}
_THERE = "other process"
_HERE = "same process"
# The engine reads its own memory by another path, which is several times faster.
_TASKS_HERE = (1, 512)
# The design's targets: how many times the wrapper, in the same run and on the same loop.
_TARGETS = {
    ("get", 512, "asyncio"): 12.0,
    ("get", 512, "uvloop"): 18.0,
    ("put", 512, "asyncio"): 12.0,
    ("put", 512, "uvloop"): 12.0,
    ("exists", 512, "asyncio"): 20.0,
    ("exists", 512, "uvloop"): 20.0,
    ("get", 1, "asyncio"): 1.0,
    ("get", 1, "uvloop"): 1.0,
}
# What keys begin with.
_READ = "key-"
_WRITTEN = "new-"
_MANY_TARGETS = {("get_many", 256): 0.9}


class Traffic(Job):
    """Works through items by one peer."""

    _peer: Peer

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect; without memory of its own, every value is in another process."""
        self._peer = PEERS[peer]()
        await self._peer.open(address, segment=segment, local_buffer=_LOCAL_BUFFER)

    async def fill(self, prefix: str, count: int) -> None:
        """Store the values that will be read."""
        await self.drive("put_many", prefix, operations=count, tasks=1, batch=256)

    async def remove(self, prefix: str) -> None:
        """Remove all keys that begin so."""
        await self._peer.remove(prefix)

    async def drive(self, verb: str, prefix: str, operations: int, tasks: int, batch: int) -> Round:
        """Do a verb for ``operations`` keys, ``batch`` in each call, in ``tasks`` tasks."""
        keys = [f"{prefix}{i}" for i in range(operations)]
        items: Sequence[Any] = keys
        if verb.startswith("put"):
            value = os.urandom(_SIZE)
            items = [(key, value) for key in keys]
        if batch > 1:
            items = [items[i : i + batch] for i in range(0, operations, batch)]
        async with Meter() as meter:
            latencies = await self._peer.drive(verb, items, tasks)
        return meter.round(operations, latencies)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is asked of every peer alike."""

    scenario: str
    verb: str
    peers: Sequence[str]
    place: str
    operations: int
    tasks: int = 1
    batch: int = 1

    def order(self, prefix: str) -> dict[str, Any]:
        return {
            "verb": self.verb,
            "prefix": prefix,
            "operations": self.operations,
            "tasks": self.tasks,
            "batch": self.batch,
        }

    @property
    def fields(self) -> dict[str, str | int]:
        width = {"batch": self.batch} if self.batch > 1 else {"tasks": self.tasks}
        return {"place": self.place, **width}


def _single(bench: Bench, wanted: frozenset[str]) -> None:
    there = _single_cases(bench, wanted, _SINGLE_PEERS, _THERE, tuple(_OPERATIONS))
    here = _single_cases(bench, wanted, (OURS, WRAPPER), _HERE, _TASKS_HERE)
    for loop in bench.loops:
        with _workers_there(loop, there) as workers:
            _measure(bench, loop, workers, there)
        with _workers_here(loop, here) as workers:
            _measure(bench, loop, workers, here)


def _many(bench: Bench, wanted: frozenset[str]) -> None:
    cases = [
        _Case(scenario.name, verb, _MANY_PEERS, _THERE, bench.pick(batches, 1) * batch, batch=batch)
        for verb, scenario in MANY.items()
        if scenario.name in wanted
        for batch, batches in _BATCHES.items()
    ]
    for loop in bench.loops:
        with _workers_there(loop, cases) as workers:
            _measure(bench, loop, workers, cases)


def _single_cases(
    bench: Bench, wanted: frozenset[str], peers: Sequence[str], place: str, tasks: Sequence[int]
) -> list[_Case]:
    return [
        _Case(scenario.name, verb, peers, place, bench.pick(_OPERATIONS[count], 2 * count), count)
        for verb, scenario in SINGLE.items()
        if scenario.name in wanted
        for count in tasks
        if count <= bench.pick(512, 8)
    ]


@contextlib.contextmanager
def _workers_there(loop: str, cases: Sequence[_Case]) -> Iterator[dict[str, Worker]]:
    """Run a worker for each peer, and a process that owns their values."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster())
        owner = stack.enter_context(Worker(Owner))
        owner.call("open", address=cluster.address, segment=_SEGMENT)
        owner.call("store", prefix=_READ, count=_most(cases), size=_SIZE)
        workers = {peer: stack.enter_context(Worker(Traffic, loop=loop)) for peer in _peers(cases)}
        for peer, worker in workers.items():
            worker.send("open", peer=peer, address=cluster.address, segment=0)
        for worker in workers.values():
            worker.receive()
        yield workers


@contextlib.contextmanager
def _workers_here(loop: str, cases: Sequence[_Case]) -> Iterator[dict[str, Worker]]:
    """Run a worker for each peer, with a master for each: values go into any memory it knows."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for peer in _peers(cases):
            cluster = stack.enter_context(LocalCluster())
            worker = workers[peer] = stack.enter_context(Worker(Traffic, loop=loop))
            worker.call("open", peer=peer, address=cluster.address, segment=_SEGMENT)
            worker.call("fill", prefix=_READ, count=_most(cases))
        yield workers


def _measure(
    bench: Bench, loop: str, workers: Mapping[str, Worker], cases: Sequence[_Case]
) -> None:
    for case in cases:
        if not bench.smoke:
            _round(workers, case)  # makes threads and connections
        rounds = [_round(workers, case) for _ in range(bench.rounds)]
        measured = {
            peer: bench.measured(
                case.scenario, peer, [one[peer] for one in rounds], loop=loop, **case.fields
            )
            for peer in case.peers
        }
        (_many_rows if case.batch > 1 else _single_row)(bench, loop, case, measured)


def _round(workers: Mapping[str, Worker], case: _Case) -> dict[str, Any]:
    """Let the peers take turns: what slows the machine down for a while meets all of them."""
    writes = case.verb.startswith("put")
    answers = {}
    for peer in case.peers:
        answers[peer] = workers[peer].call("drive", **case.order(_WRITTEN if writes else _READ))
        if writes:
            workers[peer].call("remove", prefix=_WRITTEN)
    return answers


def _peers(cases: Sequence[_Case]) -> list[str]:
    return list(dict.fromkeys(peer for case in cases for peer in case.peers))


def _most(cases: Sequence[_Case]) -> int:
    return max((case.operations for case in cases), default=0)


def _single_row(bench: Bench, loop: str, case: _Case, measured: dict[str, Measurement]) -> None:
    times = _TARGETS.get((case.verb, case.tasks, loop))
    target = "" if times is None else "never slower" if times == 1 else f"≥ {times:g}×"
    tasks = "1 task" if case.tasks == 1 else f"{case.tasks} tasks"
    bench.compare(
        case.scenario, f"{tasks}, {case.place}, {loop}", "1/s",
        measured[OURS].rate, measured[WRAPPER].rate,
        against=WRAPPER, target=target, at_least_times=times,
    )  # fmt: skip


def _many_rows(bench: Bench, loop: str, case: _Case, measured: dict[str, Measurement]) -> None:
    times = _MANY_TARGETS.get((case.verb, case.batch))
    for against in (BlockingLoop.name, WRAPPER):
        bound = times if against == BlockingLoop.name else None
        bench.compare(
            case.scenario, f"{case.batch} keys a call, {loop}", "1/s", measured[OURS].rate,
            measured[against].rate, against=against, at_least_times=bound,
            target="" if bound is None else f"≥ {bound:g}× its keys",
        )  # fmt: skip


GROUPS = (Group(tuple(SINGLE.values()), _single), Group(tuple(MANY.values()), _many))

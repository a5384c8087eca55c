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
    BlockingBatches,
    BlockingLoop,
    Executor,
    Peer,
    Threads,
    ToThread,
)
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

_WORDS = "4 KB each, by 1, 8, 64 and 512 tasks, in memory of another process or of the client's own"
SINGLE = {
    "get": Scenario("get", f"Read keys one by one, {_WORDS}."),
    "put": Scenario("put", f"Store new keys one by one, {_WORDS}."),
    "exists": Scenario("exists", f"Ask for keys one by one, {_WORDS}."),
    "mixed": Scenario("mixed", f"Read nine keys, then store a new one, and so on, {_WORDS}."),
}
HOT = Scenario(
    "hot-key", "Read one and the same key, 4 KB, by 512 tasks, again and again, likewise."
)
MANY = {
    "get_many": Scenario(
        "get-many", "Read 4, 16, 64, 256 or 1000 keys per call, 4 KB each, likewise, by one task."
    ),
    "put_many": Scenario(
        "put-many", "Store 4, 16, 64, 256 or 1000 new keys per call, likewise, by one task."
    ),
}

_SIZE = 4096
_SEGMENT = 256 << 20
_LOCAL_BUFFER = 64 << 20
_KEYS = 4096  # keys that are read, again and again; more than any number of tasks
_TASKS = (1, 8, 64, 512)
_BATCHES = (4, 16, 64, 256, 1000)
_AIMED = 256  # what the target is about; the only one that is measured on uvloop too
_THERE = "other process"
_HERE = "own memory"

_ON_A_LOOP = (OURS, WRAPPER, ToThread.name, AnyioToThread.name, Executor.name)
_WITHOUT = (Threads.name, BlockingLoop.name, BlockingBatches.name)
# Whoever needs no loop is measured once.
_SINGLE_PEERS = {
    (_HERE, "asyncio"): (*_ON_A_LOOP, *_WITHOUT),
    (_HERE, "uvloop"): _ON_A_LOOP,
    (_THERE, "asyncio"): (*_ON_A_LOOP, *_WITHOUT),
    (_THERE, "uvloop"): (OURS, WRAPPER),
}
_MANY_PEERS = (OURS, WRAPPER, BlockingLoop.name)

# Operations of a round by number of tasks: about 0.1 seconds for today's ways …
_OPERATIONS = {
    _HERE: {1: 500, 8: 800, 64: 1200, 512: 1536},
    _THERE: {1: 250, 8: 400, 64: 500, 512: 1024},
}
# … and how many times as many for those that are so much faster.
_MORE = {
    OURS: {1: 1, 8: 2, 64: 6, 512: 8},
    BlockingBatches.name: {1: 16, 8: 10, 64: 8, 512: 8},
}
_KEYS_OF_A_ROUND = {_HERE: 16000, _THERE: 2000}  # many keys per call
_CALLS = 400

# The design's targets: how many times the wrapper, in the same run and on the same loop. They
# mean a client that owns the values: see "What the limit is" in the README.
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
_MANY_TARGETS = {("get_many", _AIMED): 0.9}
# What keys begin with.
_READ = "key-"
_WRITTEN = "new-"


class Traffic(Job):
    """Works through items by one peer."""

    _peer: Peer

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect; without memory of its own, every value is in another process."""
        self._peer = PEERS[peer]()
        await self._peer.open(address, segment=segment, local_buffer=_LOCAL_BUFFER)

    async def fill(self, count: int) -> None:
        """Store the values that will be read, in this process's own memory."""
        keys = [f"{_READ}{i}" for i in range(count)]
        items = [
            [(key, os.urandom(_SIZE)) for key in keys[i : i + 256]] for i in range(0, count, 256)
        ]
        requests = [self._peer.request("put_many", item) for item in items]
        await self._peer.drive(requests, tasks=1)

    async def remove(self) -> None:
        """Remove all keys that were written."""
        await self._peer.remove(_WRITTEN)

    async def drive(self, verb: str, keys: int, operations: int, tasks: int, batch: int) -> Round:
        """Do a verb for ``operations`` keys, ``batch`` in each call, in ``tasks`` tasks.

        Reads go round and round over ``keys`` keys.
        """
        value = os.urandom(_SIZE)
        items: list[Any] = [
            (f"{_WRITTEN}{i}", value)
            if verb.startswith("put") or (verb == "mixed" and i % 10 == 9)
            else f"{_READ}{i % keys}"
            for i in range(operations)
        ]
        if batch > 1:
            items = [items[i : i + batch] for i in range(0, operations - batch + 1, batch)]
        requests = self._peer.requests(verb, items)
        async with Meter() as meter:
            driven = await self._peer.drive(requests, tasks)
        done = len(items) * batch
        return meter.round(done, driven.latencies, seconds=driven.seconds)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is asked of every peer alike."""

    scenario: str
    verb: str
    peers: Sequence[str]
    place: str
    operations: Mapping[str, int]
    tasks: int = 1
    batch: int = 1
    keys: int = _KEYS

    @property
    def fields(self) -> dict[str, str | int]:
        return {"place": self.place, "tasks": self.tasks, "batch": self.batch}

    @property
    def writes(self) -> bool:
        return self.verb in ("put", "put_many", "mixed")


def _single(bench: Bench, wanted: frozenset[str]) -> None:
    for loop in bench.loops:
        for place in (_HERE, _THERE):
            _measure(bench, loop, place, _single_cases(bench, wanted, place, loop))


def _single_cases(bench: Bench, wanted: frozenset[str], place: str, loop: str) -> list[_Case]:
    cases = []
    peers = _SINGLE_PEERS[place, loop]
    for verb, scenario in SINGLE.items():
        if scenario.name not in wanted:
            continue
        mine = [one for one in peers if verb != "mixed" or one != BlockingBatches.name]
        for tasks in _TASKS:
            if tasks <= bench.pick(512, 8):
                # 512 transferring threads take so long that the leases of their keys run out.
                fit = [one for one in mine if one != Threads.name or place == _HERE or tasks <= 64]
                operations = {peer: _operations(bench, place, peer, tasks) for peer in fit}
                cases.append(_Case(scenario.name, verb, fit, place, operations, tasks))
    if HOT.name in wanted:
        tasks = bench.pick(512, 8)
        both = (OURS, WRAPPER)
        operations = {peer: _operations(bench, place, peer, tasks) for peer in both}
        cases.append(_Case(HOT.name, "get", both, place, operations, tasks, keys=1))
    return cases


def _operations(bench: Bench, place: str, peer: str, tasks: int) -> int:
    if bench.smoke:
        return 2 * tasks
    return _OPERATIONS[place][tasks] * _MORE.get(peer, {}).get(tasks, 1)


def _many(bench: Bench, wanted: frozenset[str]) -> None:
    for loop in bench.loops:
        batches = _BATCHES if loop == "asyncio" else (_AIMED,)
        for place in (_HERE, _THERE):
            cases = [
                _many_case(bench, scenario, verb, place, batch)
                for verb, scenario in MANY.items()
                if scenario.name in wanted
                for batch in batches
            ]
            _measure(bench, loop, place, cases)


def _many_case(bench: Bench, scenario: Scenario, verb: str, place: str, batch: int) -> _Case:
    # Small batches cost more, and need not be so many.
    calls = max(1, min(_CALLS, _KEYS_OF_A_ROUND[place] // batch))
    operations = dict.fromkeys(_MANY_PEERS, batch * bench.pick(calls, 1))
    return _Case(scenario.name, verb, _MANY_PEERS, place, operations, batch=batch)


def _measure(bench: Bench, loop: str, place: str, cases: Sequence[_Case]) -> None:
    if not cases:
        return
    peers = list(dict.fromkeys(peer for case in cases for peer in case.peers))
    keys = bench.pick(_KEYS, 1000)
    with (_workers_here if place == _HERE else _workers_there)(loop, peers, keys) as workers:
        for case in cases:
            if not bench.smoke:
                _round(workers, case, keys)  # makes threads and connections
            rounds = [_round(workers, case, keys) for _ in range(bench.rounds)]
            measured = {
                peer: bench.measured(
                    case.scenario, peer, [one[peer] for one in rounds], loop=loop, **case.fields
                )
                for peer in case.peers
            }
            (_many_rows if case.batch > 1 else _single_row)(bench, loop, case, measured)


@contextlib.contextmanager
def _workers_there(loop: str, peers: Sequence[str], keys: int) -> Iterator[dict[str, Worker]]:
    """Run a worker for each peer, and a process that owns their values."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster())
        owner = stack.enter_context(Worker(Owner))
        owner.call("open", address=cluster.address, segment=_SEGMENT)
        owner.call("store", prefix=_READ, count=keys, size=_SIZE)
        workers = {peer: stack.enter_context(Worker(Traffic, loop=loop)) for peer in peers}
        for peer, worker in workers.items():
            worker.send("open", peer=peer, address=cluster.address, segment=0)
        for worker in workers.values():
            worker.receive()
        yield workers


@contextlib.contextmanager
def _workers_here(loop: str, peers: Sequence[str], keys: int) -> Iterator[dict[str, Worker]]:
    """Run a worker for each peer, with a master for each: values go into any memory it knows."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for peer in peers:
            cluster = stack.enter_context(LocalCluster())
            worker = workers[peer] = stack.enter_context(Worker(Traffic, loop=loop))
            worker.call("open", peer=peer, address=cluster.address, segment=_SEGMENT)
            worker.call("fill", count=keys)
        yield workers


def _round(workers: Mapping[str, Worker], case: _Case, keys: int) -> dict[str, Any]:
    """Let the peers take turns: what slows the machine down for a while meets all of them."""
    answers = {}
    for peer in case.peers:
        answers[peer] = workers[peer].call(
            "drive",
            verb=case.verb,
            keys=min(case.keys, keys),
            operations=case.operations[peer],
            tasks=case.tasks,
            batch=case.batch,
        )
        if case.writes:
            workers[peer].call("remove")
    return answers


def _single_row(bench: Bench, loop: str, case: _Case, measured: dict[str, Measurement]) -> None:
    times = _TARGETS.get((case.verb, case.tasks, loop))
    if case.tasks > 1 and (case.place != _HERE or case.scenario == HOT.name):
        times = None
    target = "" if times is None else "never slower" if times == 1 else f"≥ {times:g}×"
    tasks = "1 task" if case.tasks == 1 else f"{case.tasks} tasks"
    what = f"{tasks}, {case.place}, {loop}"
    bench.compare(
        case.scenario, what, "1/s", measured[OURS].rate, measured[WRAPPER].rate,
        against=WRAPPER, target=target, at_least_times=times,
    )  # fmt: skip
    if BlockingBatches.name in measured and case.tasks == max(_TASKS):
        bench.compare(
            case.scenario, what, "1/s", measured[OURS].rate, measured[BlockingBatches.name].rate,
            against=BlockingBatches.name,
        )  # fmt: skip


def _many_rows(bench: Bench, loop: str, case: _Case, measured: dict[str, Measurement]) -> None:
    times = _MANY_TARGETS.get((case.verb, case.batch))
    bench.compare(
        case.scenario, f"{case.batch} keys a call, {case.place}, {loop}", "1/s",
        measured[OURS].rate, measured[BlockingLoop.name].rate, against=BlockingLoop.name,
        target="" if times is None else f"≥ {times:g}× its keys", at_least_times=times,
    )  # fmt: skip


GROUPS = (
    Group((*SINGLE.values(), HOT), _single),
    Group(tuple(MANY.values()), _many),
)

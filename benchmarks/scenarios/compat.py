"""The drop-in for the wheel's class beside the original: the same calls by the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.peers import WRAPPER, Wrapper
from benchmarks.process import Worker
from benchmarks.scenarios.traffic import Traffic

__all__ = ["GROUPS"]

COMPAT = Scenario(
    "compat",
    "Call async_get, async_put and async_is_exist with 4 KB values by 1 and 512 tasks, and "
    "async_get_batch and async_put_batch of 256 keys by one task, in the client's own memory: by "
    "the drop-in and by the wheel's class.",
)

DROP_IN = "aiomooncake.compat"
_METHODS = {
    "get": "async_get",
    "put": "async_put",
    "exists": "async_is_exist",
    "get_many": "async_get_batch",
    "put_many": "async_put_batch",
}
_SEGMENT = 256 << 20
_KEYS = 4096
_BATCH = 256
# Operations of a round by number of tasks, and how many times as many for the drop-in.
_OPERATIONS = {1: 500, 512: 1536}
_MORE = {1: 1, 512: 8}
_KEYS_OF_A_ROUND = 16384  # in calls of many keys


class DropIn(Wrapper):
    """The drop-in, called as the original is."""

    name = DROP_IN
    in_words = "this library's drop-in for it"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set up without stopping the loop."""
        self.native = self._new_store()
        code = await self.native.async_setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, local_buffer, "tcp", "", address
        )
        if code != 0:
            raise RuntimeError(f"async_setup answered {code}")

    def _new_store(self) -> Any:
        from aiomooncake.compat import MooncakeDistributedStoreAsync

        return MooncakeDistributedStoreAsync()


_PEERS: dict[str, type[Wrapper]] = {DROP_IN: DropIn, WRAPPER: Wrapper}


class Migrated(Traffic):
    """Works through items by one of the two classes."""

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect."""
        self._peer = _PEERS[peer]()
        await self._peer.open(address, segment=segment, local_buffer=64 << 20)


@dataclass(frozen=True, slots=True)
class _Case:
    loop: str
    verb: str
    tasks: int

    @property
    def batch(self) -> int:
        return _BATCH if self.verb.endswith("_many") else 1


def _compat(bench: Bench, _wanted: frozenset[str]) -> None:
    keys = bench.pick(_KEYS, 512)
    for loop in bench.loops:
        with _workers(loop, keys) as workers:
            for verb in _METHODS:
                for tasks in (1,) if verb.endswith("_many") else (1, bench.pick(512, 8)):
                    _measure(bench, workers, _Case(loop, verb, tasks), keys)


@contextlib.contextmanager
def _workers(loop: str, keys: int) -> Iterator[dict[str, Worker]]:
    """Run a worker for each class, with a master for each: values go into any memory it knows."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for peer in _PEERS:
            cluster = stack.enter_context(LocalCluster())
            worker = workers[peer] = stack.enter_context(Worker(Migrated, loop=loop))
            worker.call("open", peer=peer, address=cluster.address, segment=_SEGMENT)
            worker.call("fill", count=keys)
        yield workers


def _measure(bench: Bench, workers: Mapping[str, Worker], case: _Case, keys: int) -> None:
    warm_up = bench.pick(1, 0)  # makes threads and connections
    kept: dict[str, list[Any]] = {peer: [] for peer in workers}
    for _ in range(warm_up + bench.rounds):
        for peer, worker in workers.items():  # they take turns
            answer = worker.call(
                "drive",
                verb=case.verb,
                keys=keys,
                operations=_operations(bench, peer, case),
                tasks=case.tasks,
                batch=case.batch,
            )
            kept[peer].append(answer)
            if case.verb.startswith("put"):
                worker.call("remove")
    measured = {
        peer: bench.measured(
            COMPAT.name,
            peer,
            rounds[warm_up:],
            loop=case.loop,
            verb=case.verb,
            tasks=case.tasks,
            batch=case.batch,
        )
        for peer, rounds in kept.items()
    }
    who = "1 task" if case.tasks == 1 else f"{case.tasks} tasks"
    if case.batch > 1:
        who = f"{case.batch} keys a call"
    aimed = case.tasks == 1
    bench.compare(
        COMPAT.name, f"{_METHODS[case.verb]}, {who}, {case.loop}", "1/s",
        measured[DROP_IN].rate, measured[WRAPPER].rate, against=WRAPPER,
        target="never slower" if aimed else "", at_least_times=1.0 if aimed else None,
    )  # fmt: skip


def _operations(bench: Bench, peer: str, case: _Case) -> int:
    if case.batch > 1:
        return bench.pick(_KEYS_OF_A_ROUND, case.batch)
    if bench.smoke:
        return 2 * case.tasks
    return _OPERATIONS[case.tasks] * (_MORE[case.tasks] if peer == DROP_IN else 1)


GROUPS = (Group((COMPAT,), _compat),)

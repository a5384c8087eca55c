"""vLLM's store worker: requests that are saved, loaded and looked up by its threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aiomooncake import LocalCluster, StoreConfig
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS
from benchmarks.process import Job, Worker
from examples.vllm_store_worker.interface import (
    LoadSpec,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
    WorkerOptions,
)
from examples.vllm_store_worker.plain import PlainStoreWorker
from examples.vllm_store_worker.worker import MooncakeStoreWorker

__all__ = ["GROUPS"]

VLLM = Scenario(
    "vllm",
    "vLLM's store worker (`examples/vllm_store_worker`) saves and loads 1 or 8 requests at once, "
    "each of 8 blocks of 256 KB in 32 pieces, in another process or in the client's own memory; "
    "and 1 or 8 threads look up 64 blocks.",
)

_PLAIN = "plain worker"
_PLAIN_1 = "plain worker, 1 loading thread"
_PEERS: dict[str, tuple[Any, int]] = {  # class and loading threads
    OURS: (MooncakeStoreWorker, 4),
    _PLAIN: (PlainStoreWorker, 4),
    _PLAIN_1: (PlainStoreWorker, 1),
}
_THERE = "other process"
_HERE = "own memory"
_AT_ONCE = (1, 8)
_BLOCKS = 8  # of a request
_LOOKED_UP = 64
_LAYERS = 16
_PIECE = 8 << 10
_TOKENS = 16  # of a block
_SEGMENT = 512 << 20
_STEPS = {1: 24, 8: 6}  # in a round
_LOOKUPS = {1: 400, 8: 100}  # of each thread, in a round
_POLL = 0.0001  # seconds between two steps of the engine
_NEW = "@6e6577"  # in keys of hashes that begin with "new"


class Requests(Job):
    """Drives one worker, as an engine does."""

    _worker: MooncakeStoreWorker | PlainStoreWorker
    _serial = itertools.count()

    async def open(self, peer: str, address: str, segment: int) -> None:
        """Connect, and save what will be loaded."""
        kind, threads = _PEERS[peer]
        blocks = _AT_ONCE[-1] * _BLOCKS
        options = WorkerOptions("m", blocks, _TOKENS, load_recv_threads=threads)
        config = StoreConfig(
            address,
            local_hostname="127.0.0.1",
            global_segment_size=segment,
            local_buffer_size="16MB",
        )
        self._worker = await asyncio.to_thread(kind, options, config)
        layers = {str(i): np.ones((2, blocks, _PIECE), np.uint8) for i in range(_LAYERS)}
        await asyncio.to_thread(self._worker.register_kv_caches, layers)
        self._read = [
            [b"read-%d-%d" % (request, i) for i in range(_BLOCKS)]
            for request in range(_AT_ONCE[-1])
        ]
        await asyncio.to_thread(self._save, self._read, "read")

    async def drive(self, verb: str, at_once: int, turns: int) -> Round:
        """Do something with so many requests at once, so many times."""
        drive: Callable[[int, int], tuple[float, list[float]]] = getattr(self, f"_drive_{verb}")
        async with Meter() as meter:
            seconds, latencies = await asyncio.to_thread(drive, at_once, turns)
        return meter.round(at_once * turns, latencies, seconds=seconds)

    async def remove(self) -> None:
        """Remove what was saved, so that the next round finds room."""
        native = getattr(self._worker.store, "blocking", self._worker.store)
        await asyncio.to_thread(native.remove_by_regex, _NEW, force=True)

    # What a thread does, and how long all of it and each turn took.

    def _drive_save(self, at_once: int, turns: int) -> tuple[float, list[float]]:
        def turn(number: int) -> None:
            del number
            names = [
                [b"new-%d-%d" % (serial, i) for i in range(_BLOCKS)]
                for serial in itertools.islice(self._serial, at_once)
            ]
            self._save(names, "new")

        return _timed(turn, turns)

    def _drive_load(self, at_once: int, turns: int) -> tuple[float, list[float]]:
        spec = LoadSpec(0, _BLOCKS * _TOKENS, can_load=True)

        def turn(number: int) -> None:
            loads = [
                ReqMeta(f"{number}-{i}", 0, _blocks(i), self._read[i], load_spec=spec)
                for i in range(at_once)
            ]
            self._until_done(loads, set())
            assert not self._worker.get_block_ids_with_load_errors()

        return _timed(turn, turns)

    def _drive_lookup(self, at_once: int, turns: int) -> tuple[float, list[float]]:
        names = list(itertools.chain(*self._read))
        tokens = _LOOKED_UP * _TOKENS
        latencies: list[float] = []
        begin = threading.Barrier(at_once + 1)

        def turn(number: int) -> None:
            del number
            assert self._worker.lookup(tokens + 1, names) == tokens

        def work() -> None:
            begin.wait()
            latencies.extend(_timed(turn, turns)[1])

        threads = [threading.Thread(target=work) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        begin.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        assert len(latencies) == at_once * turns
        return seconds, latencies

    def _save(self, names: list[list[bytes]], prefix: str) -> None:
        saves = [
            ReqMeta(f"{prefix}{i}", _BLOCKS * _TOKENS, _blocks(i), hashes, can_save=True)
            for i, hashes in enumerate(names)
        ]
        self._until_done(saves, {save.req_id for save in saves})
        stats = self._worker.get_kv_connector_stats() or {}
        assert all(record["status"] == "ok" for record in stats.get("save_put", ()))

    def _until_done(self, requests: list[ReqMeta], finished: set[str]) -> None:
        """Make steps until all requests are saved or loaded."""
        left = {request.req_id for request in requests}
        ended = self._worker.get_finished(finished, MooncakeStoreConnectorMetadata(requests))
        while left := left.difference(*ended):
            time.sleep(_POLL)
            ended = self._worker.get_finished(set(), MooncakeStoreConnectorMetadata())


def _blocks(request: int) -> list[int]:
    return list(range(request * _BLOCKS, (request + 1) * _BLOCKS))


def _timed(turn: Callable[[int], None], turns: int) -> tuple[float, list[float]]:
    latencies = []
    start = time.perf_counter()
    for number in range(turns):
        began = time.perf_counter()
        turn(number)
        latencies.append(time.perf_counter() - began)
    return time.perf_counter() - start, latencies


def _vllm(bench: Bench, _wanted: frozenset[str]) -> None:
    with bench.cluster_with_owner(_SEGMENT) as (cluster, _owner), contextlib.ExitStack() as stack:
        workers = {peer: stack.enter_context(Worker(Requests)) for peer in _PEERS}
        # One after the other: they save the same blocks.
        for peer, worker in workers.items():
            worker.call("open", peer=peer, address=cluster.address, segment=0)
        _measure(bench, _THERE, workers, ("save", "load"))
    with _own_masters() as workers:
        _measure(bench, _HERE, workers, ("save", "load", "lookup"))


@contextlib.contextmanager
def _own_masters() -> Iterator[dict[str, Worker]]:
    """Run each worker on a master of which it is the only client."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for peer in _PEERS:
            cluster = stack.enter_context(LocalCluster())
            worker = workers[peer] = stack.enter_context(Worker(Requests))
            worker.call("open", peer=peer, address=cluster.address, segment=_SEGMENT)
        yield workers


def _measure(bench: Bench, place: str, workers: dict[str, Worker], verbs: tuple[str, ...]) -> None:
    for verb, at_once in itertools.product(verbs, _AT_ONCE):
        turns = bench.pick((_LOOKUPS if verb == "lookup" else _STEPS)[at_once], 2)
        kept: dict[str, list[Any]] = {peer: [] for peer in workers}
        for _ in range(bench.rounds + bench.pick(1, 0)):  # the first turn makes connections
            for peer, worker in workers.items():
                kept[peer].append(worker.call("drive", verb=verb, at_once=at_once, turns=turns))
                if verb == "save":
                    worker.call("remove")
        measured = {
            peer: bench.measured(
                VLLM.name, peer, rounds[-bench.rounds :], verb=verb, at_once=at_once, place=place
            )
            for peer, rounds in kept.items()
        }
        # One look-up that waits for others takes longer; all of them together are what counts.
        unit = "1/s" if verb == "lookup" and at_once > 1 else "s"
        ours, plain = (
            measured[peer].rate if unit == "1/s" else measured[peer].median("p50")
            for peer in (OURS, _PLAIN)
        )
        of = "thread" if verb == "lookup" else "request"
        bench.compare(
            VLLM.name,
            f"{verb}, {at_once} {of}{'s' if at_once > 1 else ''}, {place}",
            unit,
            ours,
            plain,
            against=_PLAIN,
            target="> 1×" if at_once > 1 else "never slower",
            at_least_times=1.0,
        )


GROUPS = (Group((VLLM,), _vllm),)

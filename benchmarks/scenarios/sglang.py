"""SGLang's storage backend: pages moved and asked for by the threads of its cache controller."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Measurement, Meter, Round
from benchmarks.peers import OURS
from benchmarks.process import Job, Worker
from examples.sglang_hicache.backend import MooncakeStore
from examples.sglang_hicache.interface import HiCacheStorageConfig
from examples.sglang_hicache.plain import PlainMooncakeStore
from examples.sglang_hicache.pool import MHAHostPool

__all__ = ["GROUPS"]

PAGES = Scenario(
    "sglang-pages",
    "SGLang's storage backend stores 64 pages by batch_set_v1, and reads them back by "
    "batch_get_v1, by 1, 4 and 8 threads with pages of their own; a page is two objects; in memory "
    "of another process or of the client's own.",
)
ASK = Scenario(
    "sglang-exists",
    "1 and 8 threads ask it by batch_exists for 8 pages that are there (16 objects) per call.",
)

_PLAIN = "the binding"
_COUNT = 64  # pages of a call
_ASKED = 8
# Bytes of a page: heads × layers × numbers, of 64 tokens and two bytes each, twice.
_SHAPES = {"64 KB": (4, 2, 32), "256 KB": (4, 2, 128), "1 MB": (8, 4, 128)}
_THREADS = {"64 KB": (1, 4, 8), "256 KB": (1, 4, 8), "1 MB": (1, 4)}
_CALLS = {"64 KB": 4, "256 KB": 2, "1 MB": 1}  # of each thread in a round
_QUESTIONS = 100  # of each thread in a round
_TURNS = 2  # for each round of the run: one takes milliseconds
_SEGMENT = 768 << 20
_LEASE = 10_000  # milliseconds; eight threads of the binding may take longer than the usual two
_THERE = "other process"
_HERE = "own memory"


class Backend(Job):
    """One rank, and the threads that call it."""

    _backend: Any
    _pool: MHAHostPool

    async def open(self, peer: str, address: str, segment: int, page: str, threads: int) -> None:
        """Start the backend, and register host memory for so many threads."""
        extra = {
            "master_server_address": address,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": segment,
        }
        kind: Callable[..., Any] = MooncakeStore if peer == OURS else PlainMooncakeStore
        config = HiCacheStorageConfig(extra_config=extra)
        self._backend = await asyncio.to_thread(kind, config)
        heads, layers, dim = _SHAPES[page]
        pages = threads * _COUNT
        self._pool = MHAHostPool(pages, heads=heads, layers=layers, head_dim=dim)
        self._pool.kv_buffer.view("u1")[:] = 1
        await asyncio.to_thread(self._backend.register_mem_pool_host, self._pool)

    async def move(self, verb: str, prefix: str, threads: int, calls: int) -> Round:
        """Store or read pages, a batch per call."""
        method = self._backend.batch_set_v1 if verb == "write" else self._backend.batch_get_v1

        def call(thread: int, number: int) -> int:
            pages = [f"{prefix}{thread}-{number}-{i}" for i in range(_COUNT)]
            first = thread * _COUNT
            return sum(method(pages, self._pool.indices(range(first, first + _COUNT))))

        async with Meter() as meter:
            seconds, latencies, moved = await asyncio.to_thread(_drive, call, threads, calls)
        wanted = threads * calls * _COUNT
        # What was not moved does not count: who fails fast must not look fast.
        failed = {"failed": float(wanted - moved)}
        return meter.round(max(moved, 1), latencies, failed, seconds=seconds)

    async def ask(self, prefix: str, threads: int, calls: int) -> Round:
        """Ask for pages that were stored under the prefix, by one thread in one call."""

        def call(thread: int, number: int) -> int:
            first = (thread + number) % (_COUNT - _ASKED)
            pages = [f"{prefix}0-0-{i}" for i in range(first, first + _ASKED)]
            found: int = self._backend.batch_exists(pages)
            assert found == _ASKED, found
            return found

        async with Meter() as meter:
            seconds, latencies, asked = await asyncio.to_thread(_drive, call, threads, calls)
        return meter.round(asked, latencies, seconds=seconds)

    async def remove(self, prefix: str) -> None:
        """Remove pages, so that the next ones find room."""
        store = self._backend.store
        remove = getattr(store, "blocking", store).remove_by_regex
        gone = await asyncio.to_thread(remove, f"^{prefix}", True)  # noqa: FBT003  # the binding's
        assert gone >= 0, gone


def _drive(
    call: Callable[[int, int], int], count: int, calls: int
) -> tuple[float, list[float], int]:
    """Let threads make their calls side by side: seconds in all, of each call, and the answers."""
    latencies: list[float] = []
    answers: list[int] = []
    errors: list[BaseException] = []
    begin = threading.Barrier(count + 1)
    clock = time.perf_counter

    def work(thread: int) -> None:
        begin.wait()
        try:
            for number in range(calls):
                began = clock()
                answers.append(call(thread, number))
                latencies.append(clock() - began)
        except BaseException as exc:  # noqa: BLE001  # raised by the thread that waits
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = clock()
    for thread in threads:
        thread.join()
    seconds = clock() - began
    if errors:
        raise errors[0]
    return seconds, latencies, sum(answers)


def _sglang(bench: Bench, wanted: frozenset[str]) -> None:
    sizes = ("64 KB",) if bench.smoke or PAGES.name not in wanted else tuple(_SHAPES)
    for size in sizes:
        for place in (_HERE, _THERE):
            _measure(bench, wanted, size, place)


def _measure(bench: Bench, wanted: frozenset[str], size: str, place: str) -> None:
    lease = [f"--default_kv_lease_ttl={_LEASE}"]
    most = max(_THREADS[size])
    with (
        LocalCluster(extra_args=lease) as one,
        LocalCluster(extra_args=lease) as other,
        Worker(Backend) as ours,
        Worker(Backend) as plain,
        Worker(Backend) as owner,
    ):
        workers = {OURS: ours, _PLAIN: plain}
        addresses = {OURS: one.address, _PLAIN: one.address if place == _THERE else other.address}
        if place == _THERE:
            # It lends its memory, and does nothing else.
            owner.call("open", peer=_PLAIN, address=one.address, segment=_SEGMENT, page=size,
                       threads=1)  # fmt: skip
        for peer, worker in workers.items():
            worker.call("open", peer=peer, address=addresses[peer], page=size, threads=most,
                        segment=0 if place == _THERE else _SEGMENT)  # fmt: skip
        if PAGES.name in wanted:
            for threads in _THREADS[size]:
                if threads <= bench.pick(most, 4):
                    _pages(bench, workers, size, place, threads)
        if ASK.name in wanted and size == "64 KB" and place == _HERE:
            for threads in (1, 8):
                _ask(bench, workers, threads)


def _pages(bench: Bench, workers: dict[str, Worker], size: str, place: str, threads: int) -> None:
    kept: dict[tuple[str, str], list[Any]] = {
        (verb, peer): [] for verb in ("write", "read") for peer in workers
    }
    calls = bench.pick(_CALLS[size], 1)
    for number in range(bench.rounds * bench.pick(_TURNS, 1) + 1):
        for peer, worker in workers.items():
            prefix = f"{peer[:3]}{number}-"
            for verb in ("write", "read"):
                kept[verb, peer].append(
                    worker.call("move", verb=verb, prefix=prefix, threads=threads, calls=calls)
                )
            worker.call("remove", prefix=prefix)
    for verb in ("write", "read"):
        case: dict[str, Any] = {"verb": verb, "place": place, "page": size, "threads": threads}
        ours, theirs = (
            # The first turn makes connections.
            bench.measured(PAGES.name, peer, kept[verb, peer][1:], **case)
            for peer in workers
        )
        bench.compare(
            PAGES.name, f"{verb}, {size}, {_threads(threads)}, {place}", "1/s", ours.rate,
            theirs.rate, against=_PLAIN, at_least_times=1.0,
            target="faster" if threads > 1 and place == _THERE else "never slower",
        )  # fmt: skip
        if threads == max(_THREADS[size]):
            bench.compare(
                PAGES.name, f"{verb}, {size}, {_threads(threads)}, {place}: CPU time of a page",
                "s", _cpu(ours), _cpu(theirs), against=_PLAIN,
            )  # fmt: skip


def _cpu(measured: Measurement) -> float:
    return statistics.median(one.cpu_seconds / one.operations for one in measured.rounds)


def _ask(bench: Bench, workers: dict[str, Worker], threads: int) -> None:
    kept: dict[str, list[Any]] = {peer: [] for peer in workers}
    calls = bench.pick(_QUESTIONS, 1)
    for peer, worker in workers.items():
        worker.call("move", verb="write", prefix=f"{peer[:3]}asked-", threads=1, calls=1)
    for _ in range(bench.rounds * bench.pick(_TURNS, 1) + 1):
        for peer, worker in workers.items():
            prefix = f"{peer[:3]}asked-"
            kept[peer].append(worker.call("ask", prefix=prefix, threads=threads, calls=calls))
    ours, theirs = (
        bench.measured(ASK.name, peer, kept[peer][1:], threads=threads) for peer in workers
    )
    bench.compare(
        ASK.name, f"{_threads(threads)}, pages", "1/s", ours.rate, theirs.rate, against=_PLAIN,
        target="never slower" if threads == 1 else "faster", at_least_times=1.0,
    )  # fmt: skip
    bench.compare(
        ASK.name, f"{_threads(threads)}, p99 of a call", "s", ours.median("p99"),
        theirs.median("p99"), against=_PLAIN,
    )  # fmt: skip


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


GROUPS = (Group((PAGES, ASK), _sglang),)

"""LMCache's remote backend: engine threads that drive a connector through the loop of another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from aiomooncake import LocalCluster
from aiomooncake.testing import LoopStallProbe
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS
from benchmarks.process import Job, Worker
from examples.lmcache_connector.connector import MooncakeConnector
from examples.lmcache_connector.interface import CacheEngineKey, ChunkLayout, EngineConfig
from examples.lmcache_connector.memory import MemoryObj, Pool
from examples.lmcache_connector.plain import PlainConnector
from examples.lmcache_connector.remote_backend import LoopThread, RemoteBackend

__all__ = ["GROUPS"]

LMCACHE = Scenario(
    "lmcache",
    "1, 8 and 64 threads of an engine store, read and look up KV chunks through LMCache's remote "
    "backend (`examples/lmcache_connector`), 64 KB or 1 MB each, with a header or without, in the "
    "client's own memory; or read 32 chunks at once, by 1 and by 4 threads.",
)

_PLAIN = "plain connector"
_CONNECTORS = {OURS: MooncakeConnector, _PLAIN: PlainConnector}
_SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20}
_CALLERS = (1, 8, 64)
_AT_ONCE = 32
_READERS = (1, 4)  # of so many at once, each of others
_KEYS = _READERS[-1] * _AT_ONCE  # that are read, again and again
_CALLS = {1: 40, 8: 8, 64: 3}  # of each thread, in a turn
_TURNS = 4  # for each round of the run: one takes some hundredths of a second
_SEGMENT = 512 << 20
_LOCAL_BUFFER = 160 << 20  # the plain one reads what has a header through it


class Chunks(Job):
    """Drives one backend."""

    _backend: RemoteBackend
    _thread: LoopThread
    _objs: list[MemoryObj]
    _turn = 0

    async def open(self, peer: str, address: str, size: int, header: bool) -> None:  # noqa: FBT001  # called by name
        """Connect, and store what will be read."""
        layout = ChunkLayout((2, 2, 16, size >> 13, 64), np.dtype("f2"))
        assert layout.nbytes == size
        config = EngineConfig(
            f"mooncakestore://{address}",
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": _SEGMENT,
                "local_buffer_size": _LOCAL_BUFFER,
                "transfer_timeout": 10,
                "save_chunk_meta": header,
            },
        )
        self._thread = LoopThread()
        loop = self._thread.loop
        pool = Pool((_CALLERS[-1] + _KEYS) * (size + 512))
        self._backend = await asyncio.to_thread(
            RemoteBackend, config, layout, loop, pool, _CONNECTORS[peer]
        )
        shape, dtype, fmt = layout.shape, layout.dtype, layout.fmt
        self._objs = pool.batched_allocate(shape, dtype, fmt, _CALLERS[-1])
        for obj in self._objs:
            obj.raw[:] = 1
        self._read = [CacheEngineKey("read", 1, 0, number) for number in range(_KEYS)]
        for some in (self._read[::2], self._read[1::2]):
            await asyncio.wrap_future(self._backend.batched_submit_put_task(some, self._objs))
        self._probe = LoopStallProbe()
        await self._on_loop(self._probe.__aenter__())

    async def drive(self, verb: str, callers: int, calls: int) -> Round:
        """Let so many threads make so many calls each."""
        call: Callable[[int, int], int] = getattr(self, f"_{verb}")
        self._turn += 1
        await self._on_loop(self._reset())
        async with Meter() as meter:
            seconds, latencies, done = await asyncio.to_thread(_drive, call, callers, calls)
        measured = meter.round(done, latencies, seconds=seconds)
        return replace(measured, longest_stall=self._probe.longest)

    async def remove(self) -> None:
        """Remove what was stored, so that the next round finds room."""
        store: Any = self._backend.connection.store  # type: ignore[attr-defined]
        binding = getattr(store, "blocking", store)
        await asyncio.to_thread(binding.remove_by_regex, "^new@", force=True)

    async def _reset(self) -> None:
        self._probe.reset()

    async def _on_loop(self, coro: Any) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self._thread.loop))

    # What a thread does, and how many chunks that were.

    def _put(self, caller: int, call: int) -> int:
        key = CacheEngineKey("new", self._turn, caller, call)
        self._backend.submit_put_task(key, self._objs[caller]).result()
        return 1

    def _get(self, caller: int, call: int) -> int:
        obj = self._backend.get_blocking(self._read[(7 * caller + call) % _KEYS])
        assert obj is not None
        obj.ref_count_down()
        return 1

    def _exists(self, caller: int, call: int) -> int:
        assert self._backend.contains(self._read[(7 * caller + call) % _KEYS])
        return 1

    def _exists_sync(self, caller: int, call: int) -> int:
        assert self._backend.connection.exists_sync(self._read[(7 * caller + call) % _KEYS])
        return 1

    def _batched_get(self, caller: int, call: int) -> int:
        first = (caller + call) % _READERS[-1] * _AT_ONCE
        objs = self._backend.batched_get_blocking(self._read[first : first + _AT_ONCE])
        for obj in objs:
            assert obj is not None
            obj.ref_count_down()
        return _AT_ONCE


def _drive(
    call: Callable[[int, int], int], callers: int, calls: int
) -> tuple[float, list[float], int]:
    """Time all calls together and one by one; count the chunks."""
    begin = threading.Barrier(callers + 1)
    latencies: list[float] = []
    done: list[int] = []

    def work(caller: int) -> None:
        begin.wait()
        for number in range(calls):
            began = time.perf_counter()
            done.append(call(caller, number))
            latencies.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if len(done) != callers * calls:
        raise RuntimeError(f"{callers * calls - len(done)} calls failed")
    return seconds, latencies, sum(done)


def _lmcache(bench: Bench, _wanted: frozenset[str]) -> None:
    for size in list(_SIZES)[: bench.pick(len(_SIZES), 1)]:
        for header in (False, True):
            with _workers(_SIZES[size], header=header) as workers:
                _measure(
                    bench, f"{size}{', header' if header else ''}", workers, _cases(bench, size)
                )


def _cases(bench: Bench, size: str) -> list[tuple[str, int, int]]:
    """List verbs, callers, and calls of each of them."""
    most = bench.pick(_CALLERS[-1], 8)
    verbs = ["put", "get"]
    if size == next(iter(_SIZES)):  # the others' chunks are as quickly looked up
        verbs += ["exists", "exists_sync"]
    cases = [
        (verb, callers, bench.pick(_CALLS[callers], 2))
        for verb in verbs
        for callers in _CALLERS
        if callers <= most
    ]
    return [*cases, *(("batched_get", callers, bench.pick(4, 1)) for callers in _READERS)]


@contextlib.contextmanager
def _workers(size: int, *, header: bool) -> Iterator[dict[str, Worker]]:
    """Run a worker for each connector, with a master for each."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for peer in _CONNECTORS:
            cluster = stack.enter_context(LocalCluster())
            worker = workers[peer] = stack.enter_context(Worker(Chunks))
            worker.call("open", peer=peer, address=cluster.address, size=size, header=header)
        yield workers


def _measure(
    bench: Bench, what: str, workers: dict[str, Worker], cases: list[tuple[str, int, int]]
) -> None:
    for verb, callers, calls in cases:
        kept: dict[str, list[Any]] = {peer: [] for peer in workers}
        turns = bench.rounds * bench.pick(_TURNS, 1)
        for _ in range(turns + bench.pick(1, 0)):  # the first one makes threads
            for peer, worker in workers.items():
                kept[peer].append(worker.call("drive", verb=verb, callers=callers, calls=calls))
                if verb == "put":
                    worker.call("remove")
        measured = {
            peer: bench.measured(
                LMCACHE.name, peer, rounds[-turns:], verb=verb, callers=callers, chunks=what
            )
            for peer, rounds in kept.items()
        }
        at_once = f" {_AT_ONCE}" if verb == "batched_get" else ""
        bench.compare(
            LMCACHE.name,
            f"{verb}{at_once}, {callers} thread{'s' if callers > 1 else ''}, {what}",
            "1/s",
            measured[OURS].rate,
            measured[_PLAIN].rate,
            against=_PLAIN,
            # The same call of the engine, on the same thread.
            target="" if verb == "exists_sync" else "never slower" if callers == 1 else "> 1×",
            at_least_times=None if verb == "exists_sync" else 1.0,
        )


GROUPS = (Group((LMCACHE,), _lmcache),)

"""Where the time of a merged get goes, and how far it is from the raw batch call."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS, Aiomooncake, BlockingBatches, Peer, Request
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

PROFILE = Scenario(
    "profile",
    "Where the time of a get goes when 512 tasks read 4 KB values in the client's own memory: per "
    "key, on the loop's thread, on the worker threads, and inside the engine.",
)

_SIZE = 4096
_KEYS = 4096
_TASKS = 512
_OPERATIONS = 16384
_FUTURES = "bare futures"
_BATCH = 256


class Profile(Job):
    """Reads keys with clocks in the way of each call."""

    _peer: Peer

    async def open(self, peer: str, address: str) -> None:
        """Connect, put the clocks in place, and store the values."""
        self._peer = Aiomooncake() if peer == OURS else BlockingBatches()
        await self._peer.open(address, segment=64 << 20, local_buffer=64 << 20)
        self._native = self._worker = self._spent = 0.0
        self._calls = 0
        if isinstance(self._peer, Aiomooncake):
            self._clocks(self._peer.store)
        items = [
            [(f"key-{i}", os.urandom(_SIZE)) for i in range(start, start + _BATCH)]
            for start in range(0, _KEYS, _BATCH)
        ]
        requests = [self._peer.request("put_many", item) for item in items]
        await self._peer.drive(requests, tasks=1)

    def _clocks(self, store: Any) -> None:
        """Time the two steps that run on worker threads: the job, and the engine's call in it."""
        client, transfers = store._client, store._transfers  # noqa: SLF001  # measured from inside
        move, get_keys = client.move, transfers.get_keys

        def timed_move(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return move(method, *args, **kwargs)
            finally:
                self._native += time.perf_counter() - wall
                self._spent += time.thread_time() - cpu

        def timed_get_keys(keys: list[str]) -> Any:
            cpu = time.thread_time()
            try:
                return get_keys(keys)
            finally:
                self._worker += time.thread_time() - cpu
                self._calls += 1

        client.move, transfers.get_keys = timed_move, timed_get_keys

    async def read(self, operations: int, tasks: int) -> Round:
        """Read in many tasks; all figures are seconds per key."""
        items = [f"key-{i % _KEYS}" for i in range(operations)]
        requests = self._peer.requests("get", items)
        self._native = self._worker = self._spent = 0.0
        self._calls = 0
        async with Meter() as meter:
            loop = time.thread_time()
            driven = await self._peer.drive(requests, tasks)
            loop = time.thread_time() - loop
        figures = {
            "wall": driven.seconds / operations,
            "loop": loop / operations,
            "worker": (self._worker - self._spent) / operations,
            "engine_cpu": self._spent / operations,
            "engine_wall": self._native / operations,
            "keys_per_batch": operations / self._calls if self._calls else float(_BATCH),
        }
        return meter.round(operations, driven.latencies, figures, seconds=driven.seconds)

    async def futures(self, operations: int, tasks: int) -> Round:
        """Let as many tasks await futures that are settled together: what a loop itself costs."""
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[bytes]] = []
        value = bytes(_SIZE)

        def settle() -> None:
            settled = waiting[:]
            waiting.clear()
            for future in settled:
                future.set_result(value)

        async def get(_: str) -> bytes:
            future = loop.create_future()
            if not waiting:
                loop.call_soon(settle)
            waiting.append(future)
            settled: bytes = await future
            return settled

        items = [f"key-{i % _KEYS}" for i in range(operations)]
        requests = [Request(get, (item,), len) for item in items]
        async with Meter() as meter:
            cpu = time.thread_time()
            driven = await Aiomooncake().drive(requests, tasks)
            cpu = time.thread_time() - cpu
        figures = {"wall": driven.seconds / operations, "loop": cpu / operations}
        return meter.round(operations, driven.latencies, figures, seconds=driven.seconds)


def _profile(bench: Bench, _wanted: frozenset[str]) -> None:
    arguments = {"operations": bench.pick(_OPERATIONS, 512), "tasks": bench.pick(_TASKS, 8)}
    for loop in bench.loops:
        kept: dict[str, list[Any]] = {OURS: [], BlockingBatches.name: [], _FUTURES: []}
        with (
            LocalCluster() as one,
            LocalCluster() as other,
            Worker(Profile, loop=loop) as ours,
            Worker(Profile, loop=loop) as raw,
        ):
            ours.call("open", peer=OURS, address=one.address)
            raw.call("open", peer=BlockingBatches.name, address=other.address)
            for _ in range(bench.rounds + 1):
                kept[OURS].append(ours.call("read", **arguments))
                kept[BlockingBatches.name].append(raw.call("read", **arguments))
                kept[_FUTURES].append(ours.call("futures", **arguments))
        merged, batches, futures = (
            bench.measured(PROFILE.name, peer, rounds[1:], loop=loop)
            for peer, rounds in kept.items()
        )
        for what, figure, limit in (
            ("all, by the clock", "wall", batches),
            ("loop thread, CPU", "loop", futures),
            ("worker threads beside the engine, CPU", "worker", None),
            ("in the engine, CPU", "engine_cpu", None),
            ("in the engine, by the clock", "engine_wall", batches),
        ):
            bench.compare(
                PROFILE.name, f"{what}, {loop}", "s", merged.median(figure),
                limit.median("wall") if limit else None,
                against="" if limit is None else limit.peer,
            )  # fmt: skip
        bench.compare(
            PROFILE.name, f"keys in a batch, {loop}", "keys", merged.median("keys_per_batch")
        )


GROUPS = (Group((PROFILE,), _profile),)

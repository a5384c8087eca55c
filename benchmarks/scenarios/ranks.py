"""Many stores in one loop: opening them all, noticing that the engine is ready, their memory."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from typing import Any

from benchmarks.bench import Bench, Group, Scenario, took
from benchmarks.measure import Measurement, Meter, Round, resident
from benchmarks.peers import OURS, PEERS, Peer, ToThread, Wrapper, native_store, setup
from benchmarks.process import Job, OverCapError, Worker

__all__ = ["GROUPS"]

RANKS = Scenario(
    "ranks",
    "1 to 64 ranks in one loop: connect, warm up (put, exists and get on each) and close, from "
    "the first to the last.",
)
READY = Scenario(
    "ready",
    "8 ranks warm up while no memory is mounted anywhere; then some is, after 2 to 3 s, and it "
    "counts how long after that each rank has done its put, exists and get.",
)
MEMORY = Scenario(
    "store-memory",
    "How much the resident set of a process grows with each further store that has done a put, an "
    "exists and a get.",
)

_SEGMENT = 16 << 20
_LOCAL_BUFFER = 4 << 20
_VALUE = bytes(4096)
_BINDING = "binding in threads"
_SLEEPS = "fixed 1 s sleeps"
_COUNTS = (1, 4, 8, 16, 32, 64)
_AIMED = 32  # what the target is about
# The binding takes two seconds for each rank.
_BINDING_COUNTS = (1, 4, 8, _AIMED)
_CAP = 150.0  # seconds; the binding takes about 65
_SMOKE_CAP = 3.0


class Ranks(Job):
    """Opens, warms up and closes many stores."""

    async def ours(self, address: str, count: int) -> Round:
        """Do it as our users do."""
        import aiomooncake

        async with Meter() as meter:
            began = time.perf_counter()
            async with aiomooncake.connect_ranks(
                address,
                count,
                local_hostname="127.0.0.1",
                global_segment_size=_SEGMENT,
                local_buffer_size=_LOCAL_BUFFER,
            ) as group:
                connected = time.perf_counter()
                await group.warmup()
                warm = time.perf_counter()
        ended = time.perf_counter()
        figures = {
            "connect_seconds": connected - began,
            "warmup_seconds": warm - connected,
            "close_seconds": ended - warm,
        }
        return meter.round(count, figures=figures)

    async def binding(self, address: str, count: int) -> Round:
        """Do it with the binding, each call in a thread."""
        async with self.beating(), Meter() as meter:
            stores = [native_store() for _ in range(count)]
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    asyncio.to_thread(setup, store, address, _SEGMENT, _LOCAL_BUFFER)
                    for store in stores
                )
            )
            connected = time.perf_counter()
            await asyncio.gather(*(self._warm_up(store, i) for i, store in enumerate(stores)))
            warm = time.perf_counter()
            await asyncio.gather(*(asyncio.to_thread(store.close) for store in stores))
            ended = time.perf_counter()
        figures = {
            "connect_seconds": connected - began,
            "warmup_seconds": warm - connected,
            "close_seconds": ended - warm,
        }
        return meter.round(count, figures=figures)

    async def _warm_up(self, store: Any, rank: int) -> None:
        key = f"warm-{rank}"
        for method, arguments in (("put", (key, _VALUE)), ("is_exist", (key,)), ("get", (key,))):
            await asyncio.to_thread(getattr(store, method), *arguments)


class Ready(Job):
    """Opens ranks once, and warms them up whenever it is told to."""

    _group: Any
    _wrappers: list[Wrapper]

    async def open(self, address: str, count: int) -> None:
        """Open our ranks."""
        import aiomooncake

        self._group = await aiomooncake.connect_ranks(
            address, count, local_hostname="127.0.0.1", global_segment_size=0,
            local_buffer_size=_LOCAL_BUFFER,
        )  # fmt: skip

    async def warm_up(self) -> dict[str, list[float]]:
        """Warm them up with the default policy; return when each tried and when it was ready."""
        attempts: list[float] = []
        ready: list[float] = []

        def on_attempt(progress: Any) -> None:
            now = time.monotonic()
            attempts.append(now - progress.attempt.seconds)
            if progress.attempt.ok:
                ready.append(now)

        await self._group.warmup(on_attempt=on_attempt)
        return {"attempts": attempts, "ready": ready}

    async def open_wrappers(self, address: str, count: int) -> None:
        """Open as many of the wheel's own wrappers."""
        self._wrappers = [Wrapper() for _ in range(count)]
        for peer in self._wrappers:
            await peer.open(address, segment=0, local_buffer=_LOCAL_BUFFER)

    async def retry(self) -> dict[str, list[float]]:
        """Warm each one up by itself, as ranks without a group do: a try, then a second's sleep."""
        attempts: list[float] = []
        ready: list[float] = []
        key = f"warm-{time.monotonic_ns()}"

        async def rank(number: int, peer: Wrapper) -> None:
            while True:
                attempts.append(time.monotonic())
                if await peer.way("put")(f"{key}-{number}", _VALUE) == 0:
                    break
                await asyncio.sleep(1.0)
            for verb in ("exists", "get"):
                await peer.drive([peer.request(verb, f"{key}-{number}")], tasks=1)
            ready.append(time.monotonic())

        await asyncio.gather(*(rank(i, peer) for i, peer in enumerate(self._wrappers)))
        return {"attempts": attempts, "ready": ready}


class Memory(Job):
    """Opens one store after another."""

    async def grow(self, peer: str, address: str, count: int) -> Round:
        """Return by how much each store after the first one made the process grow."""
        peers: list[Peer] = []
        async with Meter() as meter:
            await self._add(peers, peer, address)
            first = _settled()
            for _ in range(count):
                await self._add(peers, peer, address)
            each = (_settled() - first) / count
        return meter.round(count + 1, figures={"bytes_per_store": each})

    async def _add(self, peers: list[Peer], name: str, address: str) -> None:
        peer = PEERS[name]()
        await peer.open(address, segment=0, local_buffer=_LOCAL_BUFFER)
        key = f"memory-{name}-{time.monotonic_ns()}"
        for verb, item in (("put", (key, _VALUE)), ("exists", key), ("get", key)):
            await peer.drive([peer.request(verb, item)], tasks=1)
        peers.append(peer)


def _ranks(bench: Bench, _wanted: frozenset[str]) -> None:
    with bench.cluster_with_owner(_SEGMENT) as (cluster, _owner):
        for count in (4,) if bench.smoke else _COUNTS:
            _some_ranks(bench, cluster.address, count)


def _some_ranks(bench: Bench, address: str, count: int) -> None:
    name, aimed = RANKS.name, count == _AIMED
    rounds = []
    for _ in range(bench.slow_rounds if aimed else min(bench.rounds, 2)):
        with Worker(Ranks) as worker:  # afresh, as ranks start
            rounds.append(worker.call("ours", address=address, count=count))
    ours = bench.measured(name, OURS, rounds, ranks=count)
    theirs: Measurement | None = None
    if bench.smoke or count in _BINDING_COUNTS:
        cap = _SMOKE_CAP if bench.smoke else _CAP
        with Worker(Ranks) as worker:
            try:
                theirs = bench.measured(
                    name, _BINDING,
                    [worker.call("binding", within=cap, address=address, count=count)],
                    ranks=count,
                )  # fmt: skip
            except OverCapError as exc:
                theirs = bench.over_cap(name, _BINDING, cap, exc, ranks=count)
    for what, figure, target, at_most in (
        ("all of it", "seconds", "≤ 5 s", 5.0),
        ("loop still for", "longest_stall", "< 100 ms", 0.1),
    ):
        bench.compare(
            name, f"{count} ranks, {what}", "s", ours.median(figure),
            took(theirs, figure) if theirs else None,
            against=_BINDING if theirs else "",
            target=target if aimed else "", at_most=at_most if aimed else None,
        )  # fmt: skip


def _ready(bench: Bench, _wanted: frozenset[str]) -> None:
    name, count = READY.name, bench.pick(8, 4)
    with (
        bench.cluster_with_owner(0) as (cluster, owner),
        Worker(Ready) as ours,
        Worker(Ready) as sleepers,
    ):
        ours.call("open", address=cluster.address, count=count)
        sleepers.call("open_wrappers", address=cluster.address, count=count)
        our_rounds: list[Round] = []
        their_rounds: list[Round] = []
        for number in range(bench.rounds):
            # Random, but spread evenly over the second that the alternative sleeps.
            wait = bench.pick(2, 0) + (number + random.random()) / bench.rounds
            our_rounds.append(_late_mount(owner, ours, "warm_up", wait))
            their_rounds.append(_late_mount(owner, sleepers, "retry", wait))
    mine = Measurement(name, OURS, {"ranks": count}, our_rounds)
    theirs = Measurement(name, _SLEEPS, {"ranks": count}, their_rounds)
    bench.measurements += [mine, theirs]

    def mean(of: Measurement, figure: str) -> float:
        return statistics.fmean(one.figures[figure] for one in of.rounds)

    bench.compare(
        name, f"mean of {count} ranks", "s", mean(mine, "mean_seconds"),
        mean(theirs, "mean_seconds"), against=_SLEEPS, target="≤ 0.15 s", at_most=0.15,
    )  # fmt: skip
    bench.compare(
        name, f"last of {count} ranks", "s", mean(mine, "seconds"),
        mean(theirs, "seconds"), against=_SLEEPS,
    )  # fmt: skip
    probes, others = mean(mine, "probes_per_second"), mean(theirs, "probes_per_second")
    bench.compare(
        name, "tries while waiting", "per s", probes, others,
        against=_SLEEPS, target="no more", at_most=others,
    )  # fmt: skip


def _late_mount(owner: Worker, ranks: Worker, method: str, wait: float) -> Round:
    """Let ranks wait for memory that is mounted after a while."""
    began = time.monotonic()
    ranks.send(method)
    time.sleep(wait)
    mounted = owner.call("mount", segment=_SEGMENT)
    answer = ranks.receive()
    owner.call("unmount")
    waits = [max(0.0, ready - mounted) for ready in answer["ready"]]
    probes = sum(attempt < mounted for attempt in answer["attempts"])
    return Round(
        seconds=max(waits),
        operations=len(waits),
        figures={
            "seconds": max(waits),
            "mean_seconds": statistics.fmean(waits),
            "probes_per_second": probes / (mounted - began),
        },
    )


def _memory(bench: Bench, _wanted: frozenset[str]) -> None:
    name, count = MEMORY.name, bench.pick(8, 2)
    raw = ToThread.name
    rounds: dict[str, list[Any]] = {OURS: [], raw: []}
    with bench.cluster_with_owner(_SEGMENT) as (cluster, _owner):
        for _ in range(bench.slow_rounds):
            for peer, kept in rounds.items():
                with Worker(Memory) as worker:
                    kept.append(
                        worker.call("grow", peer=peer, address=cluster.address, count=count)
                    )
    ours, theirs = (bench.measured(name, peer, kept) for peer, kept in rounds.items())
    own = ours.median("bytes_per_store") - theirs.median("bytes_per_store")
    bench.compare(
        name, "own memory per store", "bytes", max(0.0, own),
        target="≤ 1 MB", at_most=1e6,
    )  # fmt: skip
    bench.compare(
        name, "with the engine's own", "bytes", ours.median("bytes_per_store"),
        theirs.median("bytes_per_store"), against="binding",
    )  # fmt: skip


def _settled() -> int:
    gc.collect()
    return resident()


GROUPS = (Group((RANKS,), _ranks), Group((READY,), _ready), Group((MEMORY,), _memory))

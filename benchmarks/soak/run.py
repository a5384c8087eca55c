"""One soak, from the cluster it starts to the figures it leaves."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from aiomooncake import BatchError, LocalCluster, Store, connect
from aiomooncake.testing import FaultProxy, LoopStallProbe
from benchmarks.measure import resident
from benchmarks.soak.faults import Faults
from benchmarks.soak.traffic import Traffic

__all__ = ["Footprint", "Soak", "soak"]

MB: Final = 1 << 20

WARM_UP: Final = 1 / 3
"""Share of the time after which the process has grown to its size."""

_PEERS: Final = 2
_SETTLE: Final = 30.0
_STILL: Final = 3.0
"""Seconds without a change, after which threads and descriptors count as settled."""

_FRESH: Final = 300


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the process holds of its machine while no call is under way."""

    resident: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Footprint:
        """Measure it."""
        own = Path("/proc/self")
        return cls(
            resident=resident(),
            threads=len(list((own / "task").iterdir())),
            descriptors=len(list((own / "fd").iterdir())),
        )


@dataclass(frozen=True, slots=True)
class Soak:
    """What came of it.

    Attributes:
        seed: What decided what happened when.
        seconds: How long it took.
        calls: Calls by verb.
        errors: Errors of calls and of single keys, by class.
        faults: Faults by kind.
        cancelled: Calls that were cancelled.
        values: Values that were read and checked.
        wrong: Values that nobody has written, and exceptions that are no `MooncakeError`.
        lost: Values that were not there after the last fault, although they were stored after it.
        longest_call: Seconds of the longest call, and its verb.
        longest_stall: Seconds that the loop stood still at the most.
        tainted: Whether a transfer came near the engine's own limit.
        stuck: Calls that had not ended after the traffic.
        before: Footprint after the warm-up.
        after: Footprint at the end.
    """

    seed: int
    seconds: float
    calls: Mapping[str, int]
    errors: Mapping[str, int]
    faults: Mapping[str, int]
    cancelled: int
    values: int
    wrong: list[str]
    lost: int
    longest_call: tuple[float, str]
    longest_stall: float
    tainted: bool
    stuck: int
    before: Footprint
    after: Footprint

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)


async def soak(seconds: float, seed: int, tasks: int) -> Soak:
    """Run one soak on a private cluster.

    Args:
        seconds: How long there are traffic and faults.
        seed: What decides what happens; the same seed gives the same faults, but threads and
            processes take turns as they like.
        tasks: How many tasks call.
    """
    began = time.monotonic()
    options: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": 16 * MB}
    states: list[str] = []
    async with LocalCluster(client_ttl=3, lease_ttl=1) as cluster:
        peers = [await cluster.start_client(global_segment_size=64 * MB) for _ in range(_PEERS)]
        with FaultProxy(cluster.address) as line:
            async with connect(
                line.address,
                master_metrics_port=cluster.metrics_port,
                on_health=lambda health: states.append(health.state),
                **options,
            ) as store:
                await store.warmup()
                faults = Faults(random.Random(seed), cluster, line, peers)
                traffic = Traffic(store, seed, tasks)
                async with LoopStallProbe() as probe:
                    await asyncio.gather(
                        faults.run(seconds * WARM_UP), traffic.run(seconds * WARM_UP)
                    )
                    before, _ = await _settled(store)
                    rest = seconds * (1 - WARM_UP)
                    await asyncio.gather(faults.run(rest), traffic.run(rest))
                    after, stuck = await _settled(store)
                lost = await _fresh_values(store, traffic)
    return Soak(
        seed=seed,
        seconds=time.monotonic() - began,
        calls=dict(traffic.calls),
        errors=dict(traffic.errors),
        faults=dict(faults.counts),
        cancelled=traffic.cancelled,
        values=traffic.values,
        wrong=traffic.wrong,
        lost=lost,
        longest_call=traffic.longest,
        longest_stall=probe.longest,
        tainted=not {"tainted", "reopening"}.isdisjoint(states),
        stuck=stuck,
        before=before,
        after=after,
    )


async def _settled(store: Store) -> tuple[Footprint, int]:
    """Wait until the store is well and nothing moves any more; tell how many calls are left.

    Threads and connections that are not needed any more take seconds to end.
    """
    deadline = time.monotonic() + _SETTLE
    await store.warmup()
    found, since = Footprint.now(), time.monotonic()
    while time.monotonic() < min(deadline, since + _STILL):
        await asyncio.sleep(0.1)
        now = Footprint.now()
        well = store.health().state == "ready" and not store.stats().in_flight
        if not well or (now.threads, now.descriptors) != (found.threads, found.descriptors):
            found, since = now, time.monotonic()
    stuck = store.stats().in_flight
    await asyncio.to_thread(_tidy)
    return Footprint.now(), stuck


def _tidy() -> None:
    """Give back what only waits for its turn, so that what is left is what is held."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)


async def _fresh_values(store: Store, traffic: Traffic) -> int:
    """Store values when all is well again, and read them; how many are not there or wrong."""
    values = {f"fresh{i}": traffic.ledger.new(f"fresh{i}", 4096) for i in range(_FRESH)}
    left, deadline = values, time.monotonic() + _SETTLE
    while left:
        try:
            await store.put_many(left)
            break
        except BatchError as error:
            # The master places values on a peer that died until its `client_ttl` is over.
            hopeless = [each for each in error.errors.values() if not each.retryable]
            if hopeless or time.monotonic() > deadline:
                raise
            left = {key: value for key, value in left.items() if key in error.errors}
            await asyncio.sleep(0.1)
    found = await store.get_many(values)
    return sum(have != value for have, value in zip(found, values.values(), strict=True))

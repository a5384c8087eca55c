"""Connecting and closing when the master is away: how long, and whether the loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario, took
from benchmarks.measure import Measurement, Meter, Round
from benchmarks.peers import OURS, Aiomooncake, native_store, setup
from benchmarks.process import Job, OverCapError, Worker

__all__ = ["GROUPS"]

CLOSED = Scenario(
    "connect-closed", "Connect with timeout=1 to a port of this host that nobody listens on."
)
FROZEN = Scenario(
    "connect-frozen",
    "Connect with timeout=2 to a master whose process is frozen: its port takes connections, "
    "nothing answers.",
)
CLOSE = Scenario(
    "close-frozen", "Close a store, with the default timeout, after its master was frozen."
)

_ALTERNATIVE = "binding in thread"
_CAP = 15.0  # seconds; the binding takes 90 to 120
_SMOKE_CAP = 1.0
_SEGMENT = 64 << 20
_LOCAL_BUFFER = 16 << 20


class Connecting(Job):
    """Connects once and closes once."""

    _peer: Aiomooncake
    _native: Any

    async def connect(self, address: str, timeout: float) -> Round:
        """Connect as our users do, and be refused."""
        import aiomooncake

        async with Meter() as meter:
            try:
                await aiomooncake.connect(address, timeout=timeout)
            except aiomooncake.SetupError:
                pass
            else:
                raise RuntimeError("connect succeeded without a master")
        return meter.round(figures={"engine_imported": float("mooncake.store" in sys.modules)})

    async def set_up(self, address: str) -> Round:
        """Set the binding up in a thread, and fail."""
        native = native_store()
        async with self.beating(), Meter() as meter:
            with contextlib.suppress(RuntimeError):
                await asyncio.to_thread(setup, native, address, _SEGMENT, _LOCAL_BUFFER)
        return meter.round()

    async def open(self, address: str) -> None:
        """Open a store that works."""
        self._peer = Aiomooncake()
        await self._peer.open(address, segment=_SEGMENT, local_buffer=_LOCAL_BUFFER)
        await self._peer.store.warmup()

    async def close(self) -> Round:
        """Close it."""
        async with Meter() as meter:
            await self._peer.close()
        return meter.round()

    async def open_binding(self, address: str) -> None:
        """Set up a binding that works."""
        self._native = native_store()
        setup(self._native, address, _SEGMENT, _LOCAL_BUFFER)

    async def close_binding(self) -> Round:
        """Close it in a thread."""
        async with self.beating(), Meter() as meter:
            await asyncio.to_thread(self._native.close)
        return meter.round()


def _closed(bench: Bench, _wanted: frozenset[str]) -> None:
    with _closed_port() as address:
        _compare_connects(bench, CLOSED.name, address, timeout=1.0, within=1.2, still=0.02)


def _frozen(bench: Bench, _wanted: frozenset[str]) -> None:
    with LocalCluster() as cluster:
        cluster.blocking.pause()
        _compare_connects(bench, FROZEN.name, cluster.address, timeout=2.0, within=2.3, still=0.1)


def _compare_connects(
    bench: Bench, scenario: str, address: str, *, timeout: float, within: float, still: float
) -> None:
    rounds = []
    for _ in range(bench.rounds):
        with Worker(Connecting) as worker:  # afresh: importing the engine is part of it
            rounds.append(worker.call("connect", address=address, timeout=timeout))
    ours = bench.measured(scenario, OURS, rounds)
    with Worker(Connecting) as worker:
        theirs = _capped(bench, scenario, worker, "set_up", address=address)
    _rows(
        bench, ours, theirs, what="raises after", within=within, still=still,
        target=f"≤ {within:g} s",
    )  # fmt: skip


def _close(bench: Bench, _wanted: frozenset[str]) -> None:
    rounds = []
    with LocalCluster() as cluster:
        for _ in range(bench.slow_rounds):
            with Worker(Connecting) as worker:
                worker.call("open", address=cluster.address)
                cluster.blocking.pause()
                rounds.append(worker.call("close"))
                cluster.blocking.resume()
        ours = bench.measured(CLOSE.name, OURS, rounds)
        with Worker(Connecting) as worker:
            worker.call("open_binding", address=cluster.address)
            cluster.blocking.pause()
            theirs = _capped(bench, CLOSE.name, worker, "close_binding")
    _rows(bench, ours, theirs, what="closed after", within=10.0, still=0.1, target="≤ 10 s")


def _capped(
    bench: Bench, scenario: str, worker: Worker, method: str, **arguments: Any
) -> Measurement:
    cap = _SMOKE_CAP if bench.smoke else _CAP
    try:
        rounds = [worker.call(method, within=cap, **arguments)]
    except OverCapError as exc:
        return bench.over_cap(scenario, _ALTERNATIVE, cap, exc)
    return bench.measured(scenario, _ALTERNATIVE, rounds)


def _rows(
    bench: Bench,
    ours: Measurement,
    theirs: Measurement,
    *,
    what: str,
    within: float,
    still: float,
    target: str,
) -> None:
    bench.compare(
        ours.scenario, what, "s", ours.median("seconds"), took(theirs),
        against=_ALTERNATIVE, target=target, at_most=within,
    )  # fmt: skip
    bench.compare(
        ours.scenario, "loop still for", "s", ours.median("longest_stall"),
        took(theirs, "longest_stall"),
        against=_ALTERNATIVE, target=f"< {still * 1000:g} ms", at_most=still,
    )  # fmt: skip


@contextlib.contextmanager
def _closed_port() -> Iterator[str]:
    """Hold a port without listening on it, so that nobody else can."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


GROUPS = (Group((CLOSED,), _closed), Group((FROZEN,), _frozen), Group((CLOSE,), _close))

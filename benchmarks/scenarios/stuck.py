"""Healthy keys beside one on a frozen peer: who waits for whom."""

from __future__ import annotations

import asyncio
import time

from aiomooncake import LocalCluster
from benchmarks.bench import Bench, Group, Scenario, Value
from benchmarks.measure import Meter, Round
from benchmarks.owner import Owner
from benchmarks.peers import OURS, Aiomooncake, ToThread
from benchmarks.process import Job, OverCapError, Worker

__all__ = ["GROUPS"]

STUCK = Scenario(
    "frozen-peer",
    "40 keys of a healthy process and one of a frozen process are read in the same loop turn: how "
    "many of the 40 are right, and when the last of them is.",
)

_BINDING = "get_batch of all 41"
_HEALTHY = [f"healthy{i}" for i in range(40)]
_FROZEN = "frozen0"
_SIZE = 4096
_SEGMENT = 16 << 20
_CAP = 70.0  # seconds; the binding takes 30 or 60
_SMOKE_CAP = 1.0
_TTL = 90.0  # seconds for which the master believes in the frozen process


class Beside(Job):
    """Reads all keys at once."""

    _peer: Aiomooncake | ToThread

    async def open(self, peer: str, address: str) -> None:
        """Connect, and learn what is right while all is well."""
        self._peer = Aiomooncake() if peer == OURS else ToThread()
        await self._peer.open(address, segment=0, local_buffer=16 << 20)
        if isinstance(self._peer, Aiomooncake):
            right = await self._peer.store.get_many([*_HEALTHY, _FROZEN])
        else:
            right = await self._peer.way("get_batch")([*_HEALTHY, _FROZEN])
        assert all(right)
        self._right = right[:-1]

    async def read(self) -> Round:
        """Read them, and wait for the healthy ones."""
        peer = self._peer
        async with self.beating(), Meter() as meter:
            began = time.perf_counter()
            if isinstance(peer, Aiomooncake):
                stuck = asyncio.ensure_future(peer.store.get(_FROZEN))
                got = await asyncio.gather(*map(peer.store.get, _HEALTHY))
                seconds = time.perf_counter() - began
                stuck.cancel()
            else:
                got = (await peer.way("get_batch")([*_HEALTHY, _FROZEN]))[:-1]
                seconds = time.perf_counter() - began
        right = sum(one == other for one, other in zip(got, self._right, strict=True))
        return meter.round(len(_HEALTHY), figures={"right": float(right)}, seconds=seconds)


def _stuck(bench: Bench, _wanted: frozenset[str]) -> None:
    ours = bench.measured(STUCK.name, OURS, [_round(OURS, 60.0) for _ in range(bench.slow_rounds)])
    cap = _SMOKE_CAP if bench.smoke else _CAP
    right: float
    try:
        theirs = bench.measured(STUCK.name, _BINDING, [_round(_BINDING, cap)])
    except OverCapError as exc:
        bench.over_cap(STUCK.name, _BINDING, cap, exc)
        took, right = Value(cap, at_least=True), 0.0
    else:
        right = theirs.median("right")
        # Those that are missing would come after another read, if they come.
        took = Value(theirs.median("seconds"), at_least=right < len(_HEALTHY))
    bench.compare(
        STUCK.name, "all 40 right after", "s", ours.median("seconds"), took, against=_BINDING,
        target="40 right within 0.5 s",
        at_most=0.5 if ours.median("right") == len(_HEALTHY) else 0.0,
    )  # fmt: skip
    bench.compare(STUCK.name, "right, of 40", "keys", ours.median("right"), right, against=_BINDING)


def _round(peer: str, cap: float) -> dict[str, object]:
    """Freeze a peer under a reader, all of them made afresh."""
    with (
        LocalCluster(client_ttl=_TTL) as cluster,
        Worker(Owner) as healthy,
        Worker(Owner) as frozen,
        Worker(Beside) as reader,
    ):
        for owner, prefix, count in ((healthy, "healthy", len(_HEALTHY)), (frozen, "frozen", 1)):
            owner.call("open", address=cluster.address, segment=_SEGMENT)
            owner.call("store", prefix=prefix, count=count, size=_SIZE)
        reader.call("open", peer=peer, address=cluster.address)
        frozen.freeze()
        result: dict[str, object] = reader.call("read", within=cap)
        return result


GROUPS = (Group((STUCK,), _stuck),)

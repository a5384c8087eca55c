"""Tensors: how fast they are stored and read, and what that does to the loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from benchmarks.bench import Bench, Group, Scenario
from benchmarks.measure import Meter, Round
from benchmarks.peers import OURS, Aiomooncake, BindingPeer, ToThread
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

TENSORS = Scenario(
    "tensors",
    "Tensors of 1 MB and 64 MB are stored in another process and read from there, one after the "
    "other by one task: how long each takes, and how long the loop stands still.",
)

_MB = 1 << 20
_BINDING = "binding, in a thread"


class Tensors(Job):
    """Stores and reads tensors in one of the two ways."""

    _peer: Aiomooncake | BindingPeer
    _tensor: Any

    async def open(self, way: str, address: str, nbytes: int) -> None:
        """Connect, and make a tensor."""
        import torch

        self._tensor = torch.arange(nbytes // 4, dtype=torch.int32)
        self._peer = Aiomooncake() if way == OURS else ToThread()
        # The binding can't read a tensor that is larger than its local buffer.
        local_buffer = 64 * _MB if way == OURS else 2 * nbytes + 32 * _MB
        await self._peer.open(address, segment=0, local_buffer=local_buffer)

    async def write(self, prefix: str, count: int) -> Round:
        """Store the tensor under many keys."""
        peer, codes = self._peer, []
        async with Meter() as meter:
            for i in range(count):
                if isinstance(peer, Aiomooncake):
                    await peer.store.put_tensor(f"{prefix}{i}", self._tensor)
                else:
                    put = peer.native.put_tensor
                    codes.append(await asyncio.to_thread(put, f"{prefix}{i}", self._tensor))
        assert not any(codes)
        return meter.round(operations=count)

    async def read(self, prefix: str, count: int) -> Round:
        """Read them all; dropping them is not measured."""
        peer, tensors = self._peer, []
        async with Meter() as meter:
            for i in range(count):
                if isinstance(peer, Aiomooncake):
                    tensors.append(await peer.store.get_tensor(f"{prefix}{i}"))
                else:
                    get = peer.native.get_tensor
                    tensors.append(await asyncio.to_thread(get, f"{prefix}{i}"))
        assert all(tensor is not None for tensor in tensors)
        assert self._tensor.equal(tensors[-1])
        return meter.round(operations=count)


def _run(bench: Bench, _wanted: frozenset[str]) -> None:
    _of_size(bench, "1 MB", _MB, bench.pick(128, 4))
    _of_size(bench, "64 MB", bench.pick(64, 8) * _MB, bench.pick(4, 1))


def _of_size(bench: Bench, size: str, nbytes: int, count: int) -> None:
    ways = (OURS, _BINDING)
    kept: dict[str, dict[str, list[Any]]] = {verb: {way: [] for way in ways} for verb in _VERBS}
    with (
        bench.cluster_with_owner(max(64 * _MB, 2 * (nbytes + _MB) * count)) as (cluster, owner),
        contextlib.ExitStack() as stack,
    ):
        workers = {way: stack.enter_context(Worker(Tensors)) for way in ways}
        for way, worker in workers.items():
            worker.call("open", way=way, address=cluster.address, nbytes=nbytes)
            # The first one also pays for memory and connections.
            worker.call("write", prefix="first", count=1)
            worker.call("read", prefix="first", count=1)
            owner.call("remove", prefix="first")
        for _ in range(bench.rounds):
            for way, worker in workers.items():
                prefix = f"tensor{time.monotonic_ns()}-"
                for verb, rounds in kept.items():
                    rounds[way].append(worker.call(_VERBS[verb], prefix=prefix, count=count))
                owner.call("remove", prefix="tensor")
    for verb, rounds in kept.items():
        ours, theirs = (
            bench.measured(TENSORS.name, way, rounds[way], verb=verb, bytes=nbytes) for way in ways
        )
        bench.compare(
            TENSORS.name, f"{verb} of {size}", "s", 1 / ours.rate, 1 / theirs.rate,
            against=_BINDING,
            target="≥ 0.95 of its rate", at_least_times=0.95,
        )  # fmt: skip
        bench.compare(
            TENSORS.name, f"{verb} of {size}, loop still for", "s", ours.median("longest_stall"),
            theirs.median("longest_stall"), against=_BINDING, target="≤ 10 ms", at_most=0.01,
        )  # fmt: skip


_VERBS = {"put_tensor": "write", "get_tensor": "read"}

GROUPS = (Group((TENSORS,), _run),)

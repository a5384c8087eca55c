"""The demo: eight ranks that start before the engine is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiomooncake._tasks import together
from aiomooncake._verdict import count_text, size_text
from aiomooncake.cli.board import Board
from aiomooncake.cluster import LocalCluster
from aiomooncake.config import StoreConfig
from aiomooncake.engine.binding import installed_distributions
from aiomooncake.errors import (
    ChecksumError,
    NotSupportedError,
    error_from_code,
    rank_label,
)
from aiomooncake.ranks import RankGroup, connect_ranks
from aiomooncake.testing import LoopStallProbe
from aiomooncake.warmup import WarmupPolicy

if TYPE_CHECKING:
    from aiomooncake.cli.terminal import Screen
    from aiomooncake.store import Store

__all__ = ["Demo"]

_SEGMENT: Final = 32 << 20
"""Bytes that each rank mounts; four times what it stores."""

_VALUES: Final = 32
_VALUE_SIZE: Final = 256 << 10
_PATIENCE: Final = 30.0  # seconds for the warm-up, from the mount on


@dataclass(frozen=True, slots=True)
class Demo:
    """One run, and what was measured in it.

    Attributes:
        ranks: How many.
        mount_after: Seconds from the beginning of the warm-up until memory is mounted.
        memory: Whether to run on the in-memory engine.
        screen: Where to show it.
    """

    ranks: int
    mount_after: float
    memory: bool
    screen: Screen

    async def run(self) -> None:
        """Do all of it.

        Raises:
            MooncakeError: Something went wrong.
        """
        screen = self.screen
        screen.line(f"{count_text(self.ranks, 'rank')}, before any memory is mounted", "bold")
        screen.line()
        async with LoopStallProbe() as probe:
            async with contextlib.AsyncExitStack() as stack:
                target = await self._engine(stack)
                began = time.monotonic()
                group = await stack.enter_async_context(connect_ranks(target, self.ranks))
                screen.fact(
                    "ranks", f"{len(group)} connected in {_since(began)}, in one event loop"
                )
                board = Board.of(group.ranks)
                await self._warm_up(group, board)
                self._tell_warm_up(board)
                await self._move_values(group)
                closing = time.monotonic()
            closed = time.monotonic() - closing
        still = f"{probe.longest * 1000:.0f} ms"
        screen.fact("closed", f"{'ranks' if self.memory else 'ranks and master'} in {closed:.1f} s")
        screen.fact("loop", f"never still for longer than {still}, set-up and close included")

    async def _engine(self, stack: contextlib.AsyncExitStack) -> str | StoreConfig:
        """Bring an engine up in which no memory is mounted."""
        if self.memory:
            self.screen.fact("engine", "in memory: pure Python, with the real engine's answers")
            return "memory://demo?global_segment_size=0"
        wheels = installed_distributions()
        cluster = LocalCluster()
        began = time.monotonic()
        await stack.enter_async_context(cluster)
        self.screen.fact("engine", " and ".join(f"{name} {wheels[name]}" for name in wheels))
        self.screen.fact("master", f"a private one on {cluster.address}, up in {_since(began)}")
        return StoreConfig(
            cluster.address,
            local_hostname="127.0.0.1",
            master_metrics_port=cluster.metrics_port,
            global_segment_size=0,
        )

    async def _warm_up(self, group: RankGroup, board: Board) -> None:
        """Warm up while nothing is mounted, and mount later."""
        mounts_at = time.monotonic() + self.mount_after

        def status() -> str:
            if board.ready_since is not None:
                return f"every rank mounted {size_text(_SEGMENT)}; times count from then"
            left = max(0.0, mounts_at - time.monotonic())
            return f"no memory is mounted, so every put fails; mounting in {left:.1f} s"

        async def mount_late() -> None:
            await asyncio.sleep(self.mount_after)
            board.ready_since = time.monotonic()
            if not self.screen.live:
                self.screen.line(
                    f"{time.monotonic() - board.since:7.2f} s  every rank mounts "
                    f"{size_text(_SEGMENT)} of memory"
                )
            await asyncio.gather(*map(_mount, group))

        board.status = status
        policy = WarmupPolicy(timeout=self.mount_after + _PATIENCE)
        if not self.screen.live:
            self.screen.line()
        await together([mount_late(), board.watch(group, policy, self.screen)])

    async def _move_values(self, group: RankGroup) -> None:
        """Put values through every rank, and get them through its neighbour."""
        noise = os.urandom(_VALUE_SIZE)
        values = {
            rank: {f"demo/{rank}/{i}": b"%8d" % i + noise[8:] for i in range(_VALUES)}
            for rank in group.ranks
        }
        began = time.monotonic()
        await asyncio.gather(*(group[rank].put_many(values[rank]) for rank in group.ranks))
        put = time.monotonic()
        neighbours = dict(zip(group.ranks, (*group.ranks[1:], group.ranks[0]), strict=True))
        answers = await asyncio.gather(
            *(group[rank].get_many(values[other]) for rank, other in neighbours.items())
        )
        got = time.monotonic()
        for (rank, other), answer in zip(neighbours.items(), answers, strict=True):
            if answer != list(values[other].values()):
                raise ChecksumError(
                    f"what {rank_label(other)} has put came back as something else; please report "
                    "this as a bug, with the output of --engine-log",
                    rank=rank,
                )
        moved = len(group) * _VALUES * _VALUE_SIZE
        self.screen.fact(
            "values",
            f"{size_text(moved)} put at {_rate(moved, put - began)}, "
            f"got by neighbours at {_rate(moved, got - put)}",
        )

    def _tell_warm_up(self, board: Board) -> None:
        tries = sum(len(row.attempts) for row in board.rows)
        refused = ", ".join(f"{n} answered {answer}" for answer, n in board.refusals().items())
        times = [board.ready_after(row) * 1000 for row in board.rows]
        fact = self.screen.fact
        self.screen.line()
        fact("warm-up", f"{tries} tries, {refused or 'none of them failed'}")
        fact("ready", f"every rank, {min(times):.0f} to {max(times):.0f} ms after the mount")


async def _mount(store: Store) -> None:
    """Lend memory to the cluster, as a rank does whose memory comes late."""
    if "allocate_and_mount_segment" not in dir(store.engine):
        raise NotSupportedError(
            "the demo mounts memory late, which this engine can't: install 0.3.11.post1 or newer",
            rank=store.rank,
        )
    answer = await store.engine.allocate_and_mount_segment(_SEGMENT)
    if answer["ret"] != 0:
        raise error_from_code(answer["ret"], "mounting a segment", rank=store.rank)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.2f} s"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / (1 << 20):.0f} MiB/s"

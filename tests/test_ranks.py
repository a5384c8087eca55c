"""Many ranks in one loop: opened, warmed up and closed side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import aiomooncake
from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    SetupError,
    SetupTimeoutError,
    WarmupError,
    WarmupPolicy,
    WarmupReport,
    connect_ranks,
)
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import LoopStallProbe
from aiomooncake.warmup import WarmupProgress

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

MB = 1 << 20
SMALL: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": 4 * MB}
MEMORY = "memory://ranks"
UNIQUE = ("u0", "u1", "u2", "u3")  # ranks that no other test has, to tell their threads apart


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("ranks")


def segments(engine: InMemoryEngine) -> str:
    return repr(engine).rsplit(", ", 1)[1]


def host_of(rank: int | str) -> dict[str, Any]:
    """Give each rank a hostname of its own, so that a fault can strike one of them."""
    return {"local_hostname": f"host-{rank}"}


# --- the group --------------------------------------------------------------------------------


async def test_a_count_gives_ranks_from_zero(engine: InMemoryEngine) -> None:
    async with connect_ranks(MEMORY, 3, engine=engine) as group:
        assert len(group) == 3
        assert group.ranks == (0, 1, 2)
        assert [store.rank for store in group] == [0, 1, 2]
        assert group[2] is list(group)[2]
        assert "3 ranks" in repr(group)
        await group[0].put("k", b"v")
        assert await group[2].get("k") == b"v"
    assert all(store.closed for store in group)
    assert segments(engine) == "0 segments>"


async def test_ranks_may_be_named(engine: InMemoryEngine) -> None:
    async with connect_ranks(MEMORY, ["dp1/tp0", 7, "dp1/tp1"], engine=engine) as group:
        assert group.ranks == ("dp1/tp0", 7, "dp1/tp1")
        assert group["dp1/tp1"].rank == "dp1/tp1"
        assert repr(group[7]).startswith("<Store TP7 ")
        with pytest.raises(KeyError):
            _ = group[0]


async def test_ranks_may_come_from_anywhere(engine: InMemoryEngine) -> None:
    async with connect_ranks(MEMORY, iter(range(4, 6)), engine=engine) as group:
        assert group.ranks == (4, 5)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (0, "at least one rank"),
        (-2, "at least one rank"),
        ([], "at least one rank"),
        ([1, 2, 1, 2], "twice: TP1, TP2"),
        (["a", "a"], "twice: a"),
        ("tp0", "give a list"),
        (True, "count or an iterable"),
        ([0, True], "not True"),
        ([1.5], "not 1.5"),
        ([""], "not ''"),
    ],
)
async def test_bad_ranks_are_told(engine: InMemoryEngine, ranks: Any, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        await connect_ranks(MEMORY, ranks, engine=engine)


async def test_each_rank_may_have_options_of_its_own(engine: InMemoryEngine) -> None:
    def per_rank(rank: int | str) -> dict[str, Any]:
        return {"device_name": f"mlx5_{rank}", "local_buffer_size": 1 * MB}

    async with connect_ranks(
        MEMORY, 2, engine=engine, per_rank=per_rank, local_buffer_size=0, threads=2
    ) as group:
        configs = [store.config for store in group]
        assert [config.device_name for config in configs if config] == ["mlx5_0", "mlx5_1"]
        assert [config.local_buffer_size for config in configs if config] == [1 * MB] * 2
        assert [config.threads for config in configs if config] == [2, 2]


async def test_a_mistake_in_the_options_of_one_rank_is_told(engine: InMemoryEngine) -> None:
    with pytest.raises(ConfigError, match="device_name"):
        await connect_ranks(MEMORY, 3, engine=engine, per_rank=lambda _: {"devise_name": "x"})

    def broken(rank: int | str) -> dict[str, Any]:
        return {1: {}, 0: {}}[rank]  # type: ignore[index]

    with pytest.raises(KeyError):
        await connect_ranks(MEMORY, 3, engine=engine, per_rank=broken)
    assert segments(engine) == "0 segments>"


async def test_it_may_be_awaited(engine: InMemoryEngine) -> None:
    group = await connect_ranks(MEMORY, 2, engine=engine)
    await group.aclose()
    await group.aclose()
    assert all(store.closed for store in group)


# --- one rank fails to open -------------------------------------------------------------------


async def test_one_rank_that_fails_to_open_closes_the_others(
    engine: InMemoryEngine, eventually: Eventually
) -> None:
    engine.fault("setup", code=-600, hostname="host-u2")
    with pytest.raises(SetupError, match="u2") as caught:
        await connect_ranks(MEMORY, UNIQUE, engine=engine, per_rank=host_of)
    assert caught.value.rank == "u2"
    await eventually(lambda: segments(engine) == "0 segments>")
    await eventually(lambda: not threads_of("u"))


async def test_a_cancelled_opening_leaves_nothing(
    engine: InMemoryEngine, hold: Hold, eventually: Eventually
) -> None:
    engine.fault("setup", hold=hold, hostname="host-u1")
    opening = asyncio.ensure_future(connect_ranks(MEMORY, UNIQUE, engine=engine, per_rank=host_of))
    await hold()
    began = time.monotonic()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert time.monotonic() - began < 1
    hold.set()
    await eventually(lambda: segments(engine) == "0 segments>")
    await eventually(lambda: not threads_of("u"))


async def test_a_master_that_is_not_there_is_told_once(cluster: LocalCluster) -> None:
    began = time.monotonic()
    async with LoopStallProbe() as probe:
        with pytest.raises(SetupTimeoutError):
            await connect_ranks("127.0.0.1:1", 8, timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert probe.longest < 0.2


def threads_of(prefix: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(f"aiomooncake-{prefix}")]


# --- warm-up ----------------------------------------------------------------------------------


async def test_all_ranks_warm_up(engine: InMemoryEngine) -> None:
    seen: list[WarmupProgress] = []
    engine.fault("put", code=-200, times=3)
    async with connect_ranks(MEMORY, ["a", "b", 3], engine=engine) as group:
        reports = await group.warmup(on_attempt=seen.append)
    assert list(reports) == ["a", "b", 3]
    assert {rank: report.rank for rank, report in reports.items()} == {"a": "a", "b": "b", 3: 3}
    attempts = Counter(progress.rank for progress in seen)
    assert attempts == {rank: report.tries for rank, report in reports.items()}
    assert sum(not progress.attempt.ok for progress in seen) == 3
    assert {store.stats().warmup_attempts for store in group} == set(attempts.values())


async def test_the_failure_of_one_rank_comes_with_the_state_of_all(engine: InMemoryEngine) -> None:
    engine.fault("put", code=-200, hostname="host-2")
    async with connect_ranks(MEMORY, 4, engine=engine, per_rank=host_of) as group:
        with pytest.raises(WarmupError) as caught:
            await group.warmup(WarmupPolicy(timeout=0.5))
        error = caught.value
        assert isinstance(error, RuntimeError)
        assert error.rank == 2
        assert "1 of 4 ranks: TP0 ready, TP1 ready, TP2 failed" in str(error)
        assert "TP3 ready" in str(error)
        assert error.attempts
        assert error.diagnosis is not None
        results: Any = error.results
        assert list(results) == [0, 1, 2, 3]
        assert isinstance(results[2], WarmupError)
        assert all(isinstance(results[rank], WarmupReport) for rank in (0, 1, 3))
        await group[1].put("k", b"the others are still open")


async def test_a_rank_that_hangs_does_not_hold_the_others(
    engine: InMemoryEngine, hold: Hold
) -> None:
    engine.fault("put", hold=hold, hostname="host-1")
    seen: list[tuple[float, Any]] = []
    async with connect_ranks(MEMORY, 3, engine=engine, per_rank=host_of) as group:
        began = time.monotonic()
        with pytest.raises(WarmupError, match=r"TP0 ready, TP1 failed \(.*\), TP2 ready"):
            await group.warmup(
                WarmupPolicy(timeout=1.0, attempt_timeout=0.4),
                on_attempt=lambda each: seen.append((time.monotonic() - began, each.rank)),
            )
        assert time.monotonic() - began < 3
        assert {rank for seconds, rank in seen if seconds < 0.3} == {0, 2}
        hold.set()


async def test_a_cancelled_warm_up_stops_on_all_ranks(
    engine: InMemoryEngine, eventually: Eventually
) -> None:
    fault = engine.fault("put", code=-200)
    async with connect_ranks(MEMORY, 4, engine=engine) as group:
        with anyio.move_on_after(0.2) as scope:
            await group.warmup()
        assert scope.cancelled_caught
        hits = fault.hits
        assert hits >= 4
        await asyncio.sleep(0.3)
        assert fault.hits == hits


async def test_the_group_warms_up_on_the_way_when_asked(engine: InMemoryEngine) -> None:
    async with connect_ranks(MEMORY, 2, engine=engine, warmup=True) as group:
        assert all(store.stats().warmup_attempts == 1 for store in group)
    engine.fault("put", code=-200)
    with pytest.raises(WarmupError, match="2 of 2 ranks"):
        await connect_ranks(MEMORY, 2, engine=engine, warmup=WarmupPolicy(max_attempts=2))
    assert segments(engine) == "0 segments>"


async def test_the_timeout_of_a_connect_bounds_the_groups_warm_up_too(
    engine: InMemoryEngine,
) -> None:
    engine.fault("put", code=-200)
    began = time.monotonic()
    with pytest.raises(WarmupError):
        await connect_ranks(MEMORY, 2, engine=engine, warmup=True, timeout=0.6)
    assert time.monotonic() - began < 3


# --- the main job, on the real engine ---------------------------------------------------------


@pytest.fixture
def empty_cluster() -> Iterator[LocalCluster]:
    """A master that nobody has lent memory to.

    Without eviction: a put that finds no room makes it evict the next values.
    """
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master


async def test_eight_ranks_wait_for_the_first_segment_side_by_side(
    empty_cluster: LocalCluster,
) -> None:
    """The start-up race: nobody has mounted a segment yet, so every put is refused.

    It takes the time until the segment is there, not eight times that, and the loop is free from
    the first connect to the last close. Closing eight takes no longer than closing one may take.
    """
    seen: list[WarmupProgress] = []
    async with LoopStallProbe() as probe:
        group = await connect_ranks(
            empty_cluster.address, 8, global_segment_size=0, local_buffer_size=4 * MB
        )
        began = time.monotonic()
        warming = asyncio.ensure_future(group.warmup(on_attempt=seen.append))
        await asyncio.sleep(2)
        assert not warming.done()
        with pytest.raises(aiomooncake.NoSpaceError):
            await group[5].put("too early", b"v")
        mounted = await group[3].engine.allocate_and_mount_segment(64 * MB)
        assert mounted["ret"] == 0
        reports = await warming
        seconds = time.monotonic() - began

        await asyncio.gather(*[store.put(f"rank {store.rank}", b"here") for store in group])
        for store in group:
            assert await store.get_many([f"rank {rank}" for rank in group.ranks]) == [b"here"] * 8

        began = time.monotonic()
        await group.aclose()
        eight_closes = time.monotonic() - began

    assert 2 <= seconds < 4
    assert sorted(reports) == list(range(8))
    for rank, report in reports.items():
        assert report.rank == rank
        assert report.attempts[0].code == -200
        assert report.attempts[-1].ok
        assert report.tries == sum(progress.rank == rank for progress in seen)
    assert len(seen) < 8 * 12
    # One takes 0-2 s, as its threads wake up from their sleep; one after the other about 8 s.
    assert eight_closes < 5
    assert probe.longest < 1.0, probe.stalls(0.1)  # ten times the target


async def test_one_private_master_serves_all_ranks(cluster: LocalCluster) -> None:
    async with connect_ranks("local://", 3, warmup=True, **SMALL) as group:
        addresses = {store.config.master_server_address for store in group if store.config}
        assert len(addresses) == 1
        await group[0].put("k", b"v")
        assert await group[2].get("k") == b"v"
    host, port = addresses.pop().split(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))

"""Every call may be cancelled at each point at which it waits, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import (
    LocalCluster,
    RankGroup,
    Store,
    StoreClosedError,
    WarmupPolicy,
    adopt,
    connect,
    connect_ranks,
)
from aiomooncake.engine import process
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from tests.adversity.cancel_scenes import blow
from tests.adversity.processes import run_scene
from tests.cancelled_verbs import LARGE, MB, SMALL, VERBS, Verb, check, fill, prepared
from tests.cancelling import (
    HOWS,
    PROMPT,
    How,
    cancelled_at,
    cancelled_everywhere,
    counting,
    eventually,
    quiet,
)
from tests.conftest import Closing, Hold

NOTHING: dict[str, Any] = {"global_segment_size": 0, "local_buffer_size": 0}


@pytest.mark.parametrize("how", HOWS)
async def test_verbs_may_be_cancelled_wherever_they_wait(store: Store, how: How) -> None:
    ground = await prepared(store)
    dummy = store._client.dummy
    room = store._views.room
    serial = itertools.count()
    with counting():
        for name, verb in VERBS.items():
            if dummy and how not in verb.dummy:
                continue
            ground.released.clear()
            told = at = 0
            fill(ground)

            def call(verb: Verb = verb) -> Coroutine[Any, Any, Any]:
                ground.key = f"run{next(serial)}"
                return verb.call(ground)

            async for outcome in cancelled_everywhere(call, how):
                if "released" in name and (at or how == "scope"):
                    told += 1  # a task that is cancelled before its first step runs nothing
                try:
                    await check(ground, verb, outcome, told=told, room=room)
                except Exception as exc:
                    raise AssertionError(f"{name}, cancelled {how} at {at}: {exc}") from exc
                at += 1
                if not verb.stores:
                    continue
                fill(ground)
    await ground.buffer.aclose()
    await ground.wide.aclose()


# --- openings and closings ----------------------------------------------------------------------


def live() -> set[object]:
    """List the clients of the real engine that are not torn down."""
    return set(process._live)


async def ended(before: set[object]) -> None:
    """Wait until the clients that were begun since are torn down, and their threads gone."""

    def left() -> list[object]:
        threads = [thread for thread in threading.enumerate() if thread.name.endswith("-close")]
        return [*(live() - before), *threads]

    await eventually(lambda: not left(), left)


@pytest.mark.parametrize("how", HOWS)
async def test_connect_may_be_cancelled_wherever_it_waits(
    how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InMemoryEngine("cancelled")
    monkeypatch.setenv("MOONCAKE_MASTER", "memory:1")

    async def open_warm() -> Store:
        return await connect(engine=engine, warmup=True)

    before = live()
    with counting():
        async for outcome in cancelled_everywhere(open_warm, how):
            if isinstance(outcome, Store):
                await outcome.aclose()
            await ended(before)
            assert not engine._segments
            assert {asyncio.current_task()} == asyncio.all_tasks()


@pytest.mark.parametrize("how", HOWS)
async def test_connect_to_a_master_may_be_cancelled_wherever_it_waits(
    cluster: LocalCluster, closing: Closing, how: How
) -> None:
    """What was begun is torn down in the background, and holds up nobody who connects next."""

    async def open_one() -> Store:
        return await connect(cluster.address, master_metrics_port=cluster.metrics_port, **NOTHING)

    before = live()
    with counting():
        async for outcome in cancelled_everywhere(open_one, how):
            assert {asyncio.current_task()} == asyncio.all_tasks()
            if isinstance(outcome, Store):
                assert not await outcome.exists("k")
                closing.add(outcome._client)
    await ended(before)


@pytest.mark.parametrize("how", HOWS)
async def test_waiting_for_a_master_may_be_cancelled(how: How) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]

        async def wait() -> Store:
            return await connect(f"127.0.0.1:{port}")

        with counting():
            # Side by side: the pauses between the looks grow.
            runs = [cancelled_at(wait, at, how) for at in range(20)]
            for outcome, _ in await asyncio.gather(*runs):
                assert isinstance(outcome, asyncio.CancelledError)
        assert {asyncio.current_task()} == asyncio.all_tasks()


def masters() -> set[int]:
    """List the masters that this process has started and that run."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            for pid in (task / "children").read_text().split():
                if b"mooncake_master" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


@pytest.mark.parametrize("ranks", [0, 2])
async def test_a_private_master_does_not_outlive_a_connect_that_was_cancelled(ranks: int) -> None:
    async def open_one() -> Store | RankGroup:
        if ranks:
            return await connect_ranks("local://", ranks, **NOTHING)
        return await connect("local://", **NOTHING)

    before, clients = masters(), live()
    with counting():
        # Side by side: each master takes a while to come and to go.
        places = range(0, 24, 4 if ranks else 2)
        runs = [cancelled_at(open_one, at, "late") for at in places]
        outcomes = await asyncio.gather(*runs)
    for outcome, cancelled in outcomes:
        assert cancelled or not isinstance(outcome, BaseException)
    opened = [outcome for outcome, _ in outcomes if not isinstance(outcome, BaseException)]
    await asyncio.gather(*(each.aclose() for each in opened))
    await ended(clients)
    await eventually(lambda: masters() == before, lambda: masters() - before)


@pytest.mark.parametrize("how", HOWS)
async def test_a_group_may_be_cancelled_wherever_it_waits(how: How) -> None:
    engine = InMemoryEngine("group")

    async def use_group() -> None:
        async with connect_ranks("memory://own", 3, engine=engine) as group:
            await group.warmup()
            await asyncio.sleep(0)

    with counting():
        async for _ in cancelled_everywhere(use_group, how):
            await ended(live())
            assert not engine._segments
            assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_a_group_on_a_master_may_be_cancelled_wherever_it_waits(
    cluster: LocalCluster,
) -> None:
    async def use_group() -> None:
        sizes: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": MB}
        async with connect_ranks(cluster.address, 2, **sizes) as group:
            await group.warmup()

    before = live()
    with counting():
        # Side by side, and so many suspensions that the last run is not cancelled.
        runs = [cancelled_at(use_group, at, "late") for at in range(0, 60, 5)]
        *cancelled, (_, last_was) = await asyncio.gather(*runs)
    assert all(was for _, was in cancelled[:4])
    assert not last_was
    await ended(before)


@pytest.mark.parametrize("how", HOWS)
async def test_a_cancelled_close_goes_on_in_the_background(
    cluster: LocalCluster, closing: Closing, how: How
) -> None:
    """Cancelled before its first step it has not begun, and can be called again."""
    before = live()
    engine = InMemoryEngine("closing")
    for target in ("memory://own", cluster.address):
        options = {"engine": engine} if target == "memory://own" else NOTHING
        stores = [await connect(target, **options) for _ in range(3)]
        with counting():
            runs = [cancelled_at(store.aclose, at, how) for at, store in enumerate(stores)]
            outcomes = await asyncio.gather(*runs)
        begun = how == "scope"  # which lets it run until it waits
        assert begun or isinstance(outcomes[0][0], asyncio.CancelledError)
        assert [store.closed for store in stores] == [begun, True, True]
        await stores[0].aclose()
        for store in stores:
            with pytest.raises(StoreClosedError):
                await store.get("k")
            await store.aclose()
            assert store.health().state == "closed"
    await ended(before)


async def test_an_adopted_store_may_be_cancelled_too() -> None:
    native = InMemoryStore(InMemoryEngine("adopted"))
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MB, 16 * MB, "tcp", "", "") == 0
    store = adopt(native)
    await store.put("there", SMALL)
    await store.put("large", LARGE)

    async def use() -> list[bytes | None]:
        async with adopt(native) as another:
            await another.warmup()
            return await another.get_many(["there", "large"])

    with counting():
        for how in HOWS:
            async for outcome in cancelled_everywhere(use, how):
                assert isinstance(outcome, asyncio.CancelledError) or outcome == [SMALL, LARGE]
                await quiet(store)
    task = asyncio.create_task(store)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.create_task(store) is store
    await store.aclose()


@pytest.mark.parametrize("how", HOWS)
async def test_one_of_two_who_warm_up_together_may_leave(store: Store, how: How) -> None:
    with counting():
        for at in range(4):
            reports = asyncio.ensure_future(store.warmup())
            outcome, _ = await cancelled_at(store.warmup, at, how)
            report = await reports
            assert report.tries == 1
            assert isinstance(outcome, asyncio.CancelledError) or outcome is report


@pytest.mark.parametrize("how", HOWS)
async def test_a_warm_up_that_is_cancelled_leaves_no_key(store: Store, how: How) -> None:
    """The key of its probe stayed, until it was evicted."""
    policy = WarmupPolicy(key_prefix="cancelled-")
    with counting():
        async for _ in cancelled_everywhere(partial(store.warmup, policy), how):
            await quiet(store)
            assert await store.remove_by_regex("^cancelled-", force=True) == 0


@pytest.mark.parametrize("buffer", [16 * MB, 0])
@pytest.mark.parametrize("method", ["put", "is_exist", "get", "remove"])
async def test_a_warm_up_whose_call_is_in_the_engine_leaves_no_key(
    method: str, buffer: int, hold: Hold
) -> None:
    engine = InMemoryEngine("warming")
    if not buffer:
        method = {"put": "put_from", "get": "get_into"}.get(method, method)
    async with connect("memory://own", engine=engine, local_buffer_size=buffer) as store:
        fault = engine.fault(method, hold=hold, times=1)
        warming = asyncio.ensure_future(store.warmup())
        await hold()
        warming.cancel()
        await asyncio.wait({warming}, timeout=PROMPT)
        assert warming.cancelled()  # while the call is in the engine
        assert store.stats().in_flight
        hold.set()
        await quiet(store)
        fault.remove()
        assert not engine._objects


async def test_a_warm_up_that_is_cancelled_before_a_close_leaves_no_key(hold: Hold) -> None:
    """What takes the key away was dropped with all else that waited for a thread."""
    engine = InMemoryEngine("warming")
    store = await connect("memory://own", engine=engine, threads=1)
    engine.fault("is_exist", hold=hold)
    warming = asyncio.ensure_future(store.warmup())
    await hold()
    other = asyncio.ensure_future(store.engine.is_exist("key"))
    await asyncio.sleep(0)
    warming.cancel()
    await hold()  # in place of the warm-up's call, so that no thread is left
    await asyncio.wait({warming}, timeout=PROMPT)
    assert engine._objects
    store._client.begin_close()
    hold.set()
    assert await other == 0
    await store.aclose()
    assert not engine._objects


# --- calls that are in the engine ---------------------------------------------------------------


HELD = [name for name in dir(InMemoryStore) if re.match(r"(?!_).*(get|put|upsert)", name)]
HELD += ["is_exist", "batch_is_exist", "batch_remove", "remove_by_regex", "register_buffer"]


@pytest.mark.parametrize("name", VERBS)
async def test_a_call_that_is_in_the_engine_ends_at_once_or_when_its_memory_is_free(
    name: str, hold: Hold
) -> None:
    engine, verb = InMemoryEngine("held"), VERBS[name]
    async with connect("memory://own", engine=engine, local_buffer_size=16 * MB) as store:
        ground = await prepared(store)
        fill(ground)
        room = store._views.room
        faults = [engine.fault(method, hold=hold) for method in HELD if method != "get_hostname"]
        task = asyncio.ensure_future(verb.call(ground))
        try:
            await hold()
            task.cancel()
            await asyncio.wait({task}, timeout=0.05 if verb.drains else PROMPT)
            assert task.done() is not verb.drains
            assert store.stats().abandoned or verb.drains
            assert not ground.released
        finally:
            for fault in faults:
                fault.remove()
            hold.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        told = int("released" in name)
        await check(ground, verb, asyncio.CancelledError(), told=told, room=room)


# --- a storm ------------------------------------------------------------------------------------


@pytest.mark.timeout(100)
def test_after_ten_thousand_cancellations_nothing_is_left(own_cluster: LocalCluster) -> None:
    """Of calls of all kinds, by all ways to cancel, at random moments; on both engines."""
    with ThreadPoolExecutor() as pool:
        storms = [
            pool.submit(run_scene, blow, target, 1, 10_000, timeout=90)
            for target in (own_cluster.address, "memory://storm")
        ]
        for storm in storms:
            storm.result().check(within=90)

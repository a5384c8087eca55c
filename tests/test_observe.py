"""What a store tells of itself: snapshots, counters, the roll of the process, fields of the log."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import aiomooncake
from aiomooncake import (
    InvalidArgumentError,
    LocalCluster,
    MooncakeError,
    ReplicateConfig,
    RpcError,
    Store,
    StoreClosedError,
    StoreStats,
    TooManyAbandonedError,
    WarmupError,
    WarmupPolicy,
    WrongLoopError,
    adopt,
    connect,
)
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.errors import CODES
from aiomooncake.observe import Distribution
from aiomooncake.observe.counters import KEYS, LATENCY, Counters
from aiomooncake.observe.roll import ROLL
from tests.conftest import Hold, OpenStore
from tests.programs import python_programs

MB = 1 << 20
Eventually = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("observed")


@pytest.fixture
async def mine(engine: InMemoryEngine, open_store: OpenStore) -> Store:
    return await open_store("memory://observed", engine=engine, rank=3)


# --- calls and batches ------------------------------------------------------------------------


async def test_a_snapshot_is_frozen_and_stands_still(mine: Store) -> None:
    await mine.put("key", b"value")
    before = mine.stats()
    await mine.get("key")
    assert before.by_verb["put"].calls == 1
    assert "get" not in before.by_verb
    with pytest.raises(FrozenInstanceError):
        before.in_flight = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(before)) == before
    assert before.calls == sum(verb.calls for verb in before.by_verb.values())


async def test_what_travels_together_is_one_job_of_many_keys(mine: Store) -> None:
    keys = [f"key{i}" for i in range(100)]
    await asyncio.gather(*(mine.put(key, b"value") for key in keys))
    puts = mine.stats().by_verb["put"]
    assert puts.calls == puts.keys.count < 10
    assert puts.keys.total == 100
    await mine.get_many(keys)
    many = mine.stats().by_verb["get_many"]
    assert (many.calls, many.keys.total) == (1, 100)
    assert many.keys.counts[KEYS.index(128)] == 1


async def test_keys_of_moves_are_counted_each(mine: Store) -> None:
    async with mine.allocate("1MiB") as memory:
        await mine.put_many_from({f"k{i}": memory[i * 10 : i * 10 + 10] for i in range(5)})
    moved = mine.stats().by_verb["put_from"]
    assert (moved.calls, moved.keys.total) == (1, 5)


async def test_the_time_of_a_job_is_that_on_its_thread(engine: InMemoryEngine, mine: Store) -> None:
    engine.fault("is_exist", delay=0.06)
    await mine.exists("key")
    await asyncio.to_thread(mine.blocking.is_exist, "key")
    stats = mine.stats()
    for name in ("exists", "is_exist"):
        seconds = stats.by_verb[name].seconds
        assert 0.06 <= seconds.total < 5
        assert not sum(seconds.counts[: LATENCY.index(0.05)])
    assert stats.by_verb["is_exist"].keys.count == 0  # it is no batch


async def test_questions_of_our_own_are_not_counted(mine: Store) -> None:
    before = mine.stats().calls
    for _ in range(5):
        assert mine.health().ok
        assert mine.stats().calls == before


async def test_looking_from_other_threads_while_it_works(mine: Store) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            seen.append(mine.stats().calls)

    looking = asyncio.create_task(asyncio.to_thread(look))
    for i in range(50):
        await asyncio.gather(*(mine.put(f"{i}-{j}", b"v") for j in range(10)))
    stop.set()
    await looking
    assert seen == sorted(seen)
    assert mine.stats().by_verb["put"].keys.total == 500


async def test_jobs_counted_on_many_threads_are_all_counted() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.count_job("get", 0.001, 3)

    await asyncio.gather(*(asyncio.to_thread(count) for _ in range(4)))
    verb = counters.by_verb()["get"]
    assert (verb.calls, verb.keys.count, verb.keys.total) == (8000, 8000, 24000)
    assert verb.seconds.total == pytest.approx(8.0)


def test_a_distribution_tells_quantiles_by_its_bounds() -> None:
    spread = Distribution((1.0, 2.0, 4.0), (5, 4, 0, 1), 40.0)
    assert (spread.count, spread.mean) == (10, 4.0)
    assert [spread.quantile(share) for share in (0.0, 0.5, 0.9, 0.95)] == [1.0, 1.0, 2.0, math.inf]
    empty = Distribution((1.0,), (0, 0), 0.0)
    assert (empty.mean, empty.quantile(0.5)) == (0.0, 0.0)


# --- errors, refusals, what is given up -------------------------------------------------------


async def test_refused_calls_are_errors_too(mine: Store) -> None:
    await mine.aclose()
    for _ in range(2):
        with pytest.raises(StoreClosedError):
            await mine.get("key")
    with pytest.raises(StoreClosedError):
        await mine.get_many(["a", "b"])
    with pytest.raises(StoreClosedError):
        mine._client.run_blocking("get", lambda: None)
    stats = mine.stats()
    assert (stats.refused, stats.errors) == (4, {"STORE_CLOSED": 4})
    assert stats.health.state == "closed"


async def test_a_call_of_another_loop_is_a_refused_one(mine: Store) -> None:
    """Of a call that would have waited with others nothing was counted."""
    await mine.exists("key")

    def elsewhere() -> None:
        for call in (mine.exists_many(["key"]), mine.exists("key"), mine.get("key")):
            with pytest.raises(WrongLoopError):
                asyncio.run(call)

    await asyncio.to_thread(elsewhere)
    assert (mine.stats().refused, mine.stats().errors) == (3, {"WRONG_LOOP": 3})


async def test_a_refused_batch_is_one(mine: Store) -> None:
    await mine.exists("key")
    await mine.aclose()
    answers = await asyncio.gather(*map(mine.get, "abc"), return_exceptions=True)
    assert [type(each) for each in answers] == [StoreClosedError] * 3
    assert (mine.stats().refused, mine.stats().errors) == (1, {"STORE_CLOSED": 1})


async def test_memory_that_the_engine_does_not_take_is_an_error(
    engine: InMemoryEngine, mine: Store
) -> None:
    engine.fault("register_buffer", code=-600)
    with pytest.raises(InvalidArgumentError, match="registering 4096 bytes"):
        await mine.register(bytearray(4096))
    assert mine.stats().errors == {"INVALID_PARAMS": 1}


async def test_what_is_wrong_before_the_gate_is_the_callers_affair(mine: Store) -> None:
    with pytest.raises(InvalidArgumentError):
        await mine.get("")
    assert (mine.stats().refused, mine.stats().errors) == (0, {})


async def test_calls_that_are_given_up(
    engine: InMemoryEngine,
    open_store: OpenStore,
    hold: Hold,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = await open_store("memory://observed", engine=engine, max_abandoned=2)
    engine.fault("get_size", hold=hold)
    for i in range(2):
        task = asyncio.create_task(store.size(f"key{i}"))
        await hold()
        task.cancel()
        await asyncio.wait([task])
    stats = store.stats()
    assert (stats.in_flight, stats.abandoned, stats.given_up) == (2, 2, 2)
    monkeypatch.setattr("aiomooncake.engine.gate.STUCK_AFTER", 0.0)  # healthy until then
    with pytest.raises(TooManyAbandonedError):
        await store.exists("key")
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    stats = store.stats()
    assert (stats.abandoned, stats.given_up, stats.refused) == (0, 2, 1)
    assert stats.errors == {"TOO_MANY_ABANDONED": 1}


async def test_a_queued_call_that_a_close_drops_was_refused(
    engine: InMemoryEngine, open_store: OpenStore, hold: Hold
) -> None:
    store = await open_store("memory://observed", engine=engine, threads=1)
    engine.fault("is_exist", hold=hold)
    running = asyncio.create_task(store.engine.is_exist("a"))
    await hold()
    queued = asyncio.create_task(store.engine.is_exist("b"))
    await asyncio.sleep(0)
    store._client.begin_close()
    with pytest.raises(StoreClosedError):
        await queued
    hold.set()
    await running
    assert store.stats().errors == {"STORE_CLOSED": 1}


async def test_names_of_errors_are_those_of_the_table(engine: InMemoryEngine, mine: Store) -> None:
    engine.fault("put_from", code=-200)
    with pytest.raises(MooncakeError):
        await mine.put("key", b"value")
    assert mine.stats().errors == {"NO_AVAILABLE_HANDLE": 1}
    assert set(mine.stats().errors) <= {info.name for info in CODES.values()}


async def test_a_store_that_is_opened_anew_stays_with_its_loop(mine: Store) -> None:
    await mine.exists("key")
    gate = mine._client.gate
    assert gate.pause()

    def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            asyncio.run(mine.get("key"))

    await asyncio.to_thread(elsewhere)
    gate.reopened()
    assert await mine.get("key") is None


async def test_an_outage_is_told_and_its_refusals_are_counted(
    own_cluster: LocalCluster, open_store: OpenStore, eventually: Eventually, caplog: Any
) -> None:
    """On the real engine: calls while the master is away are refused, and re-opening is counted."""
    store = await open_store(own_cluster.address, rank=5, global_segment_size=16 * MB)
    store._client.gate.taint("a test says so")
    assert store.stats().tainted
    reopening = store._client.reopening
    assert reopening is not None
    reopening.begin()
    await eventually(lambda: store.stats().reopenings == 1)
    assert store.stats().health.ok
    began = time.time()
    await own_cluster.kill()
    with pytest.raises(RpcError):
        await store.exists("key")
    # A thread notes first that it is away, and then since when.
    await eventually(lambda: store.stats().health.since >= began and not store.stats().health.ok)
    stats = store.stats()
    assert stats.health.state == "master-unreachable"
    assert stats.health.since <= time.time()
    with pytest.raises(RpcError, match="refused"):
        await store.exists("key")
    after = store.stats()
    assert after.refused == stats.refused + 1
    assert after.errors["RPC_FAIL"] == stats.errors["RPC_FAIL"] + 1
    told = [one for one in caplog.records if one.name == "aiomooncake"]
    assert any("does not answer" in one.getMessage() for one in told)
    assert {(one.mooncake_rank, bool(one.mooncake_host)) for one in told} == {(5, True)}


# --- views, second ways -----------------------------------------------------------------------


async def test_views_without_room_are_counted(
    engine: InMemoryEngine, open_store: OpenStore
) -> None:
    store = await open_store("memory://observed", engine=engine, local_buffer_size=4 * MB)
    await store.put_many({"a": b"a" * MB, "b": b"b" * MB, "c": b"c" * MB})
    async with store.view_many(["a", "b", "missing"]):
        assert store.stats().views_copied == 0
        async with store.view("c") as view:
            assert view is not None
            assert bytes(view[:1]) == b"c"
        assert store.stats().views_copied == 1


async def test_reads_made_a_second_time_are_counted(
    engine: InMemoryEngine, open_store: OpenStore, hold: Hold
) -> None:
    stores = [await open_store("memory://observed", engine=engine, rank=i) for i in range(2)]
    for i, peer in enumerate(stores):
        there = ReplicateConfig(preferred_segments=[peer.hostname])
        await peer.put_many({f"{i}-{j}": b"value" for j in range(10)}, config=there)
    engine.fault("batch_get_into", hold=hold, times=1)
    keys = [f"{i}-{j}" for i in range(2) for j in range(10)]
    values = await asyncio.gather(*(stores[0].get(key) for key in keys))
    assert values == [b"value"] * 20
    stats = stores[0].stats()
    assert (stats.hedges, stats.hedged_keys) == (2, 20)


async def test_a_loop_that_stands_still_is_seen(engine: InMemoryEngine, mine: Store) -> None:
    engine.fault("is_exist", delay=0.01)
    task = asyncio.create_task(mine.exists("key"))
    await asyncio.sleep(0.002)
    end = time.monotonic() + 0.15
    while time.monotonic() < end:
        pass
    await task
    stats = mine.stats()
    assert 0.1 < stats.longest_loop_stall < 5
    assert stats.loop_lag.quantile(1.0) > 0.1


# --- warm-up ----------------------------------------------------------------------------------

QUICK = WarmupPolicy(max_attempts=2, initial_delay=0.01, max_delay=0.01)


async def test_a_warm_up_is_told_from_its_connect_on(engine: InMemoryEngine) -> None:
    engine.fault("put", code=-200, times=2)
    async with connect("memory://observed", engine=engine, warmup=True) as store:
        told = store.stats().warmup
    assert (told.attempts, told.failures) == (3, {"NO_AVAILABLE_HANDLE": 2})
    assert (told.outcomes, told.warm, told.running) == ({"ready": 1}, True, False)
    assert told.seconds is not None
    assert told.since_connect is not None
    assert 0.1 < told.seconds < told.since_connect < 10


async def test_a_warm_up_that_fails_is_told_by_its_diagnosis(
    engine: InMemoryEngine, mine: Store
) -> None:
    assert mine.stats().warmup.warm is None
    fault = engine.fault("put", code=-800)
    with pytest.raises(WarmupError) as failed:
        await mine.warmup(QUICK)
    told = mine.stats().warmup
    assert failed.value.diagnosis is not None
    assert told.outcomes == {str(failed.value.diagnosis.kind): 1}
    assert (told.warm, told.seconds, told.since_connect) == (False, None, None)
    assert told.attempts == mine.stats().warmup_attempts == 2
    fault.remove()
    await mine.warmup()
    first = mine.stats().warmup
    assert (first.warm, first.attempts) == (True, 3)
    await mine.warmup()
    again = mine.stats().warmup
    assert again.since_connect == first.since_connect  # the first time it was ready
    assert again.outcomes["ready"] == 2


async def test_a_warm_up_under_way_and_one_that_is_cancelled(
    engine: InMemoryEngine, mine: Store, hold: Hold
) -> None:
    engine.fault("put", hold=hold)
    warming = asyncio.create_task(mine.warmup())
    await hold()
    told = mine.stats().warmup
    assert (told.running, told.warm) == (True, False)
    warming.cancel()
    await asyncio.wait([warming])
    await asyncio.sleep(0)
    told = mine.stats().warmup
    assert (told.running, told.outcomes) == (False, {"cancelled": 1})


# --- the roll of the process ------------------------------------------------------------------


async def test_a_store_that_is_gone_stays_in_the_totals(
    engine: InMemoryEngine, eventually: Eventually
) -> None:
    label = "left-the-roll"

    async def live() -> None:
        async with connect("memory://observed", engine=engine, rank=label) as store:
            await store.put("key", b"value")
            assert ROLL.ranks()[label].stores == [store]
        assert ROLL.ranks()[label].stores == []

    def forgotten() -> bool:
        gc.collect()
        ROLL.ranks()
        return label not in [one.label for one in ROLL._enlisted]

    await live()
    await live()
    before = ROLL.ranks()[label].totals
    await eventually(forgotten)  # a timer of the lanes holds the client for a tenth of a second
    after = ROLL.ranks()[label].totals
    assert before.verbs["put"].keys.total == after.verbs["put"].keys.total == 2
    assert before.by_verb() == after.by_verb()
    assert ROLL.ranks()[label].outcomes == {"opened": 2}


async def test_a_dropped_store_leaves_the_roll_by_itself(engine: InMemoryEngine) -> None:
    store = await connect("memory://observed", engine=engine, rank="dropped")
    await store.put("key", b"value")
    with pytest.warns(ResourceWarning, match="unclosed"):
        del store
    seen = ROLL.ranks()["dropped"]
    assert (seen.stores, seen.totals.bytes_written) == ([], 5)


async def test_adopted_stores_are_on_the_roll_too(mine: Store) -> None:
    async with adopt(mine._client.native_object, rank="adopted") as store:
        assert ROLL.ranks()["adopted"].stores == [store]
        assert ROLL.ranks()["adopted"].warm is None
        await store.warmup()
        assert ROLL.ranks()["adopted"].warm is True


@pytest.mark.parametrize(
    ("target", "options", "outcome"),
    [
        ("127.0.0.1:1", {"timeout": 0.05}, "master-unreachable"),
        (None, {"client_server_address": "127.0.0.1:1", "timeout": 0.05}, "client-unreachable"),
        ("127.0.0.1:1", {"protocol": "carrier-pigeon", "colour": 1}, "invalid"),
        ("memory://x", {"timeout": -1}, "invalid"),
    ],
)
async def test_what_came_of_a_connect(target: Any, options: dict[str, Any], outcome: str) -> None:
    rank = f"fails {outcome} {target}"
    with pytest.raises(MooncakeError):
        await connect(target, rank=rank, **options)
    seen = ROLL.ranks()[rank]
    assert (seen.outcomes, seen.waiting, seen.warm) == ({outcome: 1}, [], False)
    assert (seen.attempts > 0) == outcome.endswith("unreachable")


async def test_a_connect_under_way_is_seen_and_one_that_is_cancelled(
    eventually: Eventually,
) -> None:
    connecting = asyncio.ensure_future(connect("127.0.0.1:1", rank="waits"))
    await eventually(lambda: "waits" in ROLL.ranks() and ROLL.ranks()["waits"].attempts)
    seen = ROLL.ranks()["waits"]
    assert (len(seen.waiting), seen.warm) == (1, False)
    connecting.cancel()
    await asyncio.wait([connecting])
    seen = ROLL.ranks()["waits"]
    assert (seen.waiting, seen.outcomes, seen.warm) == ([], {"cancelled": 1}, None)


async def test_a_connect_whose_warm_up_fails(engine: InMemoryEngine) -> None:
    engine.fault("put", code=-200)
    with pytest.raises(WarmupError):
        await connect("memory://observed", engine=engine, rank="cold", warmup=QUICK)
    seen = ROLL.ranks()["cold"]
    (kind,) = seen.outcomes
    assert seen.totals.warmup_outcomes == {kind: 1}
    assert seen.totals.warmup_attempts == 2
    assert seen.warm is False


def test_a_forked_child_begins_at_zero() -> None:
    code = """
        import asyncio, os
        import aiomooncake
        from aiomooncake.observe.roll import ROLL

        async def main():
            async with aiomooncake.connect("memory://fork", rank=1) as store:
                await store.put("key", b"value")
                child = os.fork()
                if not child:
                    print("child", ROLL.ranks(), flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
                print("parent", list(ROLL.ranks()), flush=True)

        asyncio.run(main())
    """
    with python_programs() as start:
        out, _ = start(code).communicate(timeout=30)
    assert out.splitlines() == ["child {}", "parent ['1']"]


# --- log --------------------------------------------------------------------------------------


async def test_records_of_a_store_say_whose_they_are(
    engine: InMemoryEngine, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a test says so")

    engine.fault("put", code=-800, times=1)
    caplog.set_level(logging.DEBUG, "aiomooncake")
    async with connect("memory://observed", engine=engine, rank=3, on_health=fail) as store:
        host = store.hostname
        await store.warmup(on_attempt=fail)
    await eventually(lambda: "an on_health callback failed" in caplog.text)
    # Stores of other tests may be closing meanwhile.
    logged: list[Any] = caplog.records
    records = [one for one in logged if vars(one).get("mooncake_host", host) == host]
    texts = [one.getMessage() for one in records]
    for text in ("put failed", "Warmup done", "on_attempt", "ready, but", "removed", "on_health"):
        assert any(text in one for one in texts), text
    assert {(one.name, one.mooncake_rank, one.mooncake_host) for one in records} == {
        ("aiomooncake", 3, host)
    }
    (done,) = [one for one in records if "Warmup done" in one.getMessage()]
    assert (done.mooncake_attempt, done.mooncake_code) == (2, 0)
    assert {one.module for one in records} == {"warmup", "store"}  # not that of the adapter


async def test_a_connect_that_waits_says_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MooncakeError):
        await connect("127.0.0.1:1", rank="r1", timeout=0.05)
    (record,) = (vars(one) for one in caplog.records)
    assert (record["mooncake_rank"], record["mooncake_host"]) == ("r1", "")


# --- documents --------------------------------------------------------------------------------


def test_every_field_is_documented() -> None:
    for kind in (StoreStats, aiomooncake.observe.WarmupStats, aiomooncake.observe.VerbStats):
        for field in fields(kind):
            assert f"\n        {field.name}: " in f"{kind.__doc__}", (kind, field.name)

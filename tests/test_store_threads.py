"""Calls that hang, are cancelled, queue and are drained; on the in-memory engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import aiomooncake
from aiomooncake import (
    BatchError,
    Health,
    InternalError,
    InvalidArgumentError,
    MooncakeError,
    ObjectNotReadyError,
    RpcError,
    Store,
    StoreClosedError,
    TooManyAbandonedError,
    TransferError,
)
from aiomooncake.engine.inmemory import Fault, InMemoryEngine
from aiomooncake.errors import CODES
from aiomooncake.testing import LoopStallProbe

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

MB = 1 << 20
SOON = 1.0  # seconds; what ends "at once" takes a few milliseconds, the machine permitting

# A call of one key may travel by itself or in a batch of one: the ways it can take.
GET = ("get_into", "batch_get_into")
PUT = ("put_from", "batch_put_from")
UPSERT = ("upsert_from", "batch_upsert_from")
EXISTS = ("is_exist", "batch_is_exist")
SIZE = ("get_size", "batch_get_replica_desc")
REMOVE = ("remove", "batch_remove")


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("threads")


@pytest.fixture
async def store(
    engine: InMemoryEngine, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Store]:
    """A store with one thread per lane for small values, and at most two abandoned calls.

    Abandoned calls count as stuck at once here, instead of after a second; and only a
    cancellation, no time that has passed, makes another thread take the place of a stuck one.
    """
    monkeypatch.setattr("aiomooncake.engine.gate.STUCK_AFTER", 0.0)
    for module in ("lanes", "engine.client"):
        monkeypatch.setattr(f"aiomooncake.{module}.OVERDUE", 600.0)
    store: Store = await open_store(
        "memory://threads", engine=engine, rank=40, threads=1, max_abandoned=2
    )
    await store.put("key", b"value")
    yield store
    assert not store.stats().tainted


async def cancelled(task: asyncio.Future[Any]) -> float:
    """Cancel a task and tell how long it took to end."""
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - began


async def turns(count: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def start(call: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


def fault(engine: InMemoryEngine, ways: tuple[str, ...], **what: Any) -> list[Fault]:
    """Program a fault into all the ways of a verb; a call takes only one of them."""
    return [engine.fault(method, **what) for method in ways]


# --- plain calls ------------------------------------------------------------------------------

PLAIN: dict[str, tuple[tuple[str, ...], Callable[[Store], Awaitable[Any]]]] = {
    "get": (GET, lambda store: store.get("key")),
    "get_many": (GET, lambda store: store.get_many(["key", "other"])),
    "exists": (EXISTS, lambda store: store.exists("key")),
    "exists_many": (EXISTS, lambda store: store.exists_many(["key", "other"])),
    "size": (SIZE, lambda store: store.size("key")),
    "put": (PUT, lambda store: store.put("new", b"value")),
    "put small": (PUT, lambda store: store.put("new", bytearray(10))),
    "put large": (PUT, lambda store: store.put("new", bytes(1 * MB))),
    "put larger": (PUT, lambda store: store.put("new", bytes(2 * MB))),
    "upsert": (UPSERT, lambda store: store.upsert("key", b"value")),
    "put_many": (PUT, lambda store: store.put_many({"a": b"1", "b": b"2"})),
    "remove": (REMOVE, lambda store: store.remove("key")),
    "remove_many": (REMOVE, lambda store: store.remove_many(["key", "other"])),
    "remove_by_regex": (("remove_by_regex",), lambda store: store.remove_by_regex("k")),
    "remove_all": (("remove_all",), lambda store: store.remove_all()),
    "raw": (("get_size",), lambda store: store.engine.get_size("key")),
}


@pytest.mark.parametrize("verb", PLAIN)
async def test_a_call_that_hangs_is_left_behind_at_once_and_counted(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually, verb: str
) -> None:
    ways, call = PLAIN[verb]
    fault(engine, ways, hold=hold, times=1)
    task = start(call(store))
    await hold()
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    assert await cancelled(task) < SOON
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 1)
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert store.stats().abandoned == 0
    await store.upsert("key", b"still usable")
    assert await store.get("key") == b"still usable"


async def test_a_timeout_of_the_caller_ends_a_call(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    fault(engine, GET, hold=hold, times=1)
    began = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(store.get("key"), 0.05)
    assert time.monotonic() - began < SOON
    assert await store.get("key") == b"value"


async def test_a_cancel_scope_ends_a_call(engine: InMemoryEngine, store: Store, hold: Hold) -> None:
    fault(engine, GET, hold=hold, times=1)
    with anyio.move_on_after(0.05) as scope:
        await store.get("key")
    assert scope.cancelled_caught
    assert store.stats().abandoned == 1


async def test_a_call_that_hangs_does_not_hold_those_that_come_after_it(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """Its thread is lost, and another one takes its place."""
    fault(engine, GET, hold=hold, times=1)
    stuck = start(store.get("key"))
    await hold()
    queued = start(store.get("key"))
    await turns()
    assert not queued.done()  # one thread
    assert await cancelled(stuck) < SOON
    assert await queued == b"value"
    assert await store.get("key") == b"value"


async def test_a_thread_that_comes_back_late_leaves(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("aiomooncake-TP40-small") for thread in all_threads())

    all_threads = threading.enumerate
    await eventually(lambda: threads() == 1)  # those of the test before this one leave
    fault(engine, GET, hold=hold, times=2)
    for _ in range(2):
        task = start(store.get("key"))
        await hold()
        await cancelled(task)
    with pytest.raises(TooManyAbandonedError):
        await store.get("key")
    hold.set()
    await eventually(lambda: not store.stats().abandoned)
    assert await store.get("key") == b"value"
    await eventually(lambda: threads() == 1)


async def test_late_answers_do_not_reach_later_calls(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    """The call that was left behind writes into its own memory, not into another call's."""
    await store.put("other", b"other")
    fault(engine, GET, hold=hold, times=1)
    stuck = start(store.get("key"))
    await hold()
    await cancelled(stuck)
    fault(engine, GET, delay=0.02)
    reading = start(store.get("other"))
    await turns()
    hold.set()
    assert await reading == b"other"
    for _ in range(5):
        assert await store.get("other") == b"other"


async def test_beyond_the_cap_calls_fail_at_once_until_the_stuck_ones_return(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    fault(engine, GET, hold=hold, times=2)
    for _ in range(2):
        stuck = start(store.get("key"))
        await hold()
        await cancelled(stuck)
    calls = store.stats().calls
    attempts = (store.get("key"), store.put("new", b"v"), store.engine.is_exist("key"))
    for attempt in attempts:
        with pytest.raises(TooManyAbandonedError, match="2 calls"):
            await attempt
    with pytest.raises(TooManyAbandonedError):
        await asyncio.to_thread(store.blocking.is_exist, "key")
    assert store.stats().calls == calls
    assert store.health().ok
    hold.set()
    await eventually(lambda: store.stats().abandoned == 0)
    assert store.stats().in_flight == 0
    assert await store.get("key") == b"value"


async def test_healthy_calls_that_were_cancelled_do_not_count_as_stuck(
    engine: InMemoryEngine, store: Store, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling 100 healthy gets once made the next call fail, in 19 of 50 rounds."""
    monkeypatch.setattr("aiomooncake.engine.gate.STUCK_AFTER", 60.0)
    fault(engine, GET, hold=hold, times=2)
    for _ in range(2):
        task = start(store.get("key"))
        await hold()
        await cancelled(task)
    assert store.stats().abandoned == 2
    assert await store.get("key") == b"value"
    hold.set()


async def test_a_stuck_thread_keeps_its_priority(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    """At nice 19 one that made a client held up the loop for 4 s, as it had the GIL and no core."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads have a nice value of their own on Linux only")
    priorities: list[int] = []
    wait = hold.wait

    def note(timeout: float | None = None) -> bool:
        waited = wait(timeout)
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return waited

    hold.wait = note  # type: ignore[method-assign]
    fault(engine, GET, hold=hold, times=1)
    stuck = start(store.get("key"))
    await hold()
    await cancelled(stuck)
    hold.set()
    await eventually(lambda: priorities)
    assert priorities == [os.getpriority(os.PRIO_PROCESS, 0)]


# --- queued calls -----------------------------------------------------------------------------


async def test_a_call_cancelled_in_the_queue_never_runs(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    fault(engine, GET, hold=hold, times=1)
    removing = fault(engine, REMOVE)
    stuck = start(store.get("key"))
    await hold()
    queued = start(store.remove("key"))
    await turns()
    assert store.stats().in_flight == 2
    assert await cancelled(queued) < SOON
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    hold.set()
    assert await stuck == b"value"
    assert await store.get("key") == b"value"
    assert sum(way.hits for way in removing) == 0


async def test_a_put_of_large_memory_cancelled_in_the_queue_lets_the_memory_go(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    value = bytearray(1 * MB)
    fault(engine, GET, hold=hold, times=1)
    stuck = start(store.get("key"))
    await hold()
    with contextlib.suppress(asyncio.TimeoutError):  # pytest.raises would keep the error
        await asyncio.wait_for(store.put("new", value), 0.02)
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    await asyncio.sleep(0)  # until then wait_for itself holds the error, and its frames
    value.clear()
    hold.set()
    await stuck
    assert not await store.exists("new")


async def test_fifty_cancelled_calls_leave_nothing_behind(
    engine: InMemoryEngine, store: Store, eventually: Eventually
) -> None:
    fault(engine, GET, delay=0.001)
    for i in range(50):
        task = start(store.get("key"))
        await turns(i % 7)
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: not store.stats().abandoned)
    assert await store.get("key") == b"value"
    assert (store.stats().in_flight, store.stats().abandoned) == (0, 0)


async def test_many_keys_cancelled_leave_nothing_behind(
    engine: InMemoryEngine, open_store: Any, hold: Hold, eventually: Eventually
) -> None:
    store = await open_store("memory://threads", engine=engine, threads=8)
    reading = engine.fault("batch_get_into", hold=hold)
    task = start(store.get_many([str(i) for i in range(600)]))
    await hold(2)
    assert store.stats().in_flight == 2
    assert await cancelled(task) < SOON
    assert store.stats().abandoned == 2
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert store.stats().abandoned == 0
    await turns()
    assert reading.hits == 2  # the other 88 keys were not asked for


# --- calls that name memory of the caller -----------------------------------------------------

MUTABLE: dict[str, tuple[str, Callable[[Store, bytearray], Awaitable[Any]]]] = {
    "put": ("put_from", lambda store, memory: store.put("new", memory)),
    "upsert": ("upsert_from", lambda store, memory: store.upsert("new", memory)),
    "put_many": (
        "put_from",
        lambda store, memory: store.put_many({"a": b"1", "b": memory, "c": b"3"}),
    ),
}


@pytest.mark.parametrize("verb", MUTABLE)
async def test_memory_that_may_change_is_drained_before_the_cancellation_goes_on(
    engine: InMemoryEngine, store: Store, hold: Hold, verb: str
) -> None:
    method, call = MUTABLE[verb]
    memory = bytearray(1 * MB)
    engine.fault(method, hold=hold, times=1)
    task = start(call(store, memory))
    await hold()
    for _ in range(3):  # however often
        task.cancel()
        await turns()
        assert not task.done()
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (store.stats().in_flight, store.stats().abandoned) == (0, 0)


async def test_memory_is_let_go_after_a_timeout(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    memory = bytearray(1 * MB)
    engine.fault("put_from", hold=hold, times=1)
    asyncio.get_running_loop().call_later(0.1, hold.set)
    with contextlib.suppress(asyncio.TimeoutError):  # pytest.raises would keep the error
        await asyncio.wait_for(store.put("new", memory), 0.02)
    await asyncio.sleep(0)  # until then wait_for itself holds the error, and its frames
    memory.clear()


async def test_the_drain_stands_anyios_cancellation_too(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    engine.fault("put_from", hold=hold, times=1)
    over = False

    async def put() -> None:
        nonlocal over
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await store.put("new", bytearray(1 * MB))
        assert scope.cancelled_caught
        over = True

    scopes: list[anyio.CancelScope] = []
    async with anyio.create_task_group() as group, LoopStallProbe() as probe:
        group.start_soon(put)
        await hold()
        scopes[0].cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not over
        hold.set()
    assert over
    assert probe.longest < 0.2
    assert store.stats().in_flight == 0


async def test_a_raw_call_that_names_memory_is_drained(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    memory: Any = np.zeros(16, np.uint8)
    engine.fault("get_into", hold=hold, times=1)
    task = start(store.engine.get_into("key", memory.ctypes.data, 16))
    await hold()
    task.cancel()
    await turns()
    assert not task.done()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory[:5].tobytes() == b"value"  # written before the task ended, not after it


async def test_a_raw_call_in_the_queue_that_names_memory_never_runs(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    memory: Any = np.zeros(16, np.uint8)
    engine.fault("get_size", hold=hold, times=1)
    stuck = start(store.size("key"))
    await hold()
    task = start(store.engine.get_into("key", memory.ctypes.data, 16))
    await turns()
    assert await cancelled(task) < SOON
    hold.set()
    assert await stuck == 5
    assert not memory.any()


async def test_a_large_put_stops_between_two_pieces(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    struck = engine.fault("batch_put_from_multi_buffer_ranges", hold=hold)
    task = start(store.put("new", bytearray(33 * MB)))
    await hold()
    task.cancel()
    await turns()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert struck.hits == 1  # of five pieces
    assert not await store.exists("new")
    await store.put("new", b"the key is free again")
    assert await store.get("new") == b"the key is free again"


async def test_a_large_get_left_behind_stops_between_two_pieces(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    await store.put("large", bytes(33 * MB))
    struck = engine.fault("batch_get_into_multi_buffer_ranges", hold=hold)
    task = start(store.get("large"))
    await hold()
    assert await cancelled(task) < SOON
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert struck.hits == 1
    assert await store.get("large") == bytes(33 * MB)


async def test_memory_of_a_running_put_stays_in_place_and_alive(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    memory = bytearray(b"x" * MB)
    engine.fault("put_from", hold=hold, times=1)
    task = start(store.put("new", memory))
    await hold()
    with pytest.raises(BufferError):
        memory.clear()
    del memory
    hold.set()
    await task
    assert await store.get("new") == b"x" * MB


# --- failures ---------------------------------------------------------------------------------

READS: dict[str, tuple[tuple[str, ...], Callable[[Store], Awaitable[Any]]]] = {
    "get": (GET, lambda store: store.get("key")),
    "exists": (EXISTS, lambda store: store.exists("key")),
    "size": (SIZE, lambda store: store.size("key")),
    "remove": (REMOVE, lambda store: store.remove("key")),
}


@pytest.mark.parametrize("verb", READS)
async def test_a_failure_is_not_a_miss(engine: InMemoryEngine, store: Store, verb: str) -> None:
    ways, call = READS[verb]
    fault(engine, ways, code=-900)
    with pytest.raises(RpcError, match=r"\[TP40\].*'key'.*-900 RPC_FAIL") as caught:
        await call(store)
    assert (caught.value.code, caught.value.key, caught.value.rank) == (-900, "key", 40)
    assert store.stats().errors == {"RPC_FAIL": 1}


async def test_no_code_of_the_engine_makes_a_get_a_miss(
    engine: InMemoryEngine, store: Store
) -> None:
    answers_of_their_own = {0, -600, -703, -704, -707}
    for code in set(CODES) - answers_of_their_own:
        struck = fault(engine, GET, code=code)
        with pytest.raises(MooncakeError) as caught:
            await store.get("key")
        assert caught.value.code == code
        for answer in await store.get_many(["key", "other"], return_exceptions=True):
            assert isinstance(answer, MooncakeError)
            assert answer.code == code
        for each in struck:
            each.remove()


async def test_a_value_that_is_being_written_is_not_there_yet(
    engine: InMemoryEngine, store: Store
) -> None:
    struck = fault(engine, GET, code=-703)
    assert await store.get("key") is None
    assert await store.get_many(["key", "other"]) == [None, None]
    for each in struck:
        each.remove()
    assert await store.get("key") == b"value"


async def test_a_size_that_is_not_known_yet_is_none_too(
    engine: InMemoryEngine, store: Store
) -> None:
    """As the value is None and ``exists`` is False then."""
    engine.fault("get_size", code=-703, times=1)
    assert await store.size("key") is None


async def test_a_value_that_is_being_written_can_not_be_removed(
    engine: InMemoryEngine, store: Store
) -> None:
    fault(engine, REMOVE, code=-703, times=1)
    with pytest.raises(ObjectNotReadyError):
        await store.remove("key")


@pytest.mark.parametrize("method", GET)
async def test_a_lease_that_runs_out_is_taken_again(
    engine: InMemoryEngine, store: Store, method: str
) -> None:
    engine.fault(method, code=-707, times=1)
    assert await store.get("key") == b"value"
    engine.fault(method, code=-707, times=1)
    assert await store.get_many(["key", "other"]) == [b"value", None]


async def test_a_large_get_goes_on_when_its_lease_runs_out(
    engine: InMemoryEngine, store: Store
) -> None:
    value = os.urandom(1 * MB) * 20
    await store.put("large", value)
    engine.fault("batch_get_into_multi_buffer_ranges", code=-707, times=2)
    assert await store.get("large") == value
    engine.fault("batch_get_into_multi_buffer_ranges", code=-707)
    with pytest.raises(Exception, match="-707 LEASE_EXPIRED"):
        await store.get("large")


@pytest.mark.parametrize("method", ["batch_put_from_multi_buffer_ranges", "batch_put_session_end"])
async def test_a_large_put_that_fails_frees_its_key(
    engine: InMemoryEngine, store: Store, method: str
) -> None:
    struck = engine.fault(method, code=-800)
    with pytest.raises(TransferError) as caught:
        await store.put("large", bytes(9 * MB))
    assert caught.value.code == -800
    struck.remove()
    await store.put("large", b"small")
    assert await store.get("large") == b"small"


async def test_a_chunk_that_fails_names_its_keys_and_the_others_are_stored(
    engine: InMemoryEngine, store: Store
) -> None:
    engine.fault("batch_put_from", code=-800, times=1)
    values = {str(i): b"%d" % i for i in range(600)}
    with pytest.raises(BatchError) as caught:
        await store.put_many(values)
    results = caught.value.results
    assert list(results) == list(values)
    failed = [key for key, result in results.items() if result is not None]
    assert failed == list(values)[:256]
    assert all(results[key].code == -800 and results[key].key == key for key in failed)
    assert await store.get_many(values) == [
        None if key in failed else value for key, value in values.items()
    ]
    assert store.stats().errors == {"TRANSFER_FAIL": 256}


async def test_a_short_answer_of_the_engine_is_an_error(
    engine: InMemoryEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``get_batch`` of a store that is not set up answers a list of length 1, say."""
    native: Any = store._client.native_object
    for method in ("batch_get_into", "batch_is_exist", "batch_remove", "batch_put_from"):
        monkeypatch.setattr(native, method, lambda *_: [0])
    for verb in (store.get_many, store.exists_many, store.remove_many):
        with pytest.raises(InternalError, match="answered 1 codes for 2 keys"):
            await verb(["a", "b"])
    with pytest.raises(InternalError, match="answered 1 codes for 2 keys"):
        await store.put_many({"a": b"1", "b": b"2"})


# --- threads of others, loops of others -------------------------------------------------------


async def test_threads_call_the_engine_while_the_loop_is_busy(store: Store) -> None:
    """``store.blocking`` needs no loop at all, so it works beside one that stands still."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(store.blocking.get("key")))
    thread.start()
    thread.join(5)
    assert found == [b"value"]


async def test_blocking_calls_are_counted_and_raise_what_the_binding_raises(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    engine.fault("get", hold=hold, times=1)
    calling = start(asyncio.to_thread(store.blocking.get, "key"))
    await hold()
    assert store.stats().in_flight == 1
    hold.set()
    assert await calling == b"value"
    with pytest.raises(TypeError):
        await asyncio.to_thread(store.blocking.get, 1, 2, 3)  # type: ignore[call-arg, arg-type]
    assert store.stats().in_flight == 0
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await asyncio.to_thread(store.blocking.get, "key")


async def test_a_result_that_comes_when_its_loop_is_gone_hurts_nobody(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    other: Store
    fault(engine, GET, hold=hold)

    def in_a_loop_of_its_own() -> Store:
        from aiomooncake import connect

        async def leave_a_call() -> Store:
            opened = await connect("memory://threads", engine=engine)
            task = start(opened.get("key"))
            await hold()
            task.cancel()
            return opened

        return asyncio.run(leave_a_call())

    other = await asyncio.to_thread(in_a_loop_of_its_own)
    assert other.stats().in_flight == 1
    hold.set()
    await eventually(lambda: other.stats().in_flight == 0)
    assert await other.get("key") == b"value"  # the next loop takes it over
    await other.aclose()


async def test_options_must_be_a_replicate_config(store: Store) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"ReplicateConfig\(\.\.\.\), not builtins\.dict"
    ):
        await store.put("new", b"v", config={"replica_num": 2})  # type: ignore[arg-type]


async def test_a_put_of_a_value_that_is_freed_meanwhile_is_right(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """The job holds the value, whoever else lets it go."""
    fault(engine, PUT, hold=hold, times=1)
    task = start(store.put("new", os.urandom(8) * 40_000))
    await hold()
    junk = [bytes(320_000) for _ in range(20)]
    hold.set()
    await task
    del junk
    value = await store.get("new")
    assert value is not None
    assert value == value[:8] * 40_000


async def test_a_large_read_notices_that_its_key_was_removed_by_force(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """The engine goes on reading the memory, and gave 32 MB of another key as the value."""
    await store.put("large", bytes(20 * MB))
    engine.fault("batch_get_into_multi_buffer_ranges", hold=hold, times=1)
    reading = start(store.get("large"))
    await hold()
    assert await store.remove("large", force=True)
    hold.set()
    assert await reading is None


@pytest.mark.timeout(10)
def test_a_hook_that_closes_the_store_does_not_wait_for_itself() -> None:
    """Without a loop that runs it is called at once, and once was so under the client's lock."""
    told: list[str] = []
    stores: list[Store] = []

    def on_health(health: Health) -> None:
        told.append(health.state)
        stores[0]._client.begin_close()

    async def opened() -> Store:
        return await aiomooncake.connect("memory://hook", on_health=on_health)

    stores.append(asyncio.run(opened()))
    stores[0]._client.begin_close().result(5)
    assert told == ["closing", "closed"]

"""Memory of callers in calls that hang, are cancelled and are drained; on the in-memory engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aiomooncake import (
    BatchError,
    InvalidArgumentError,
    ReplicateConfig,
    Store,
    StoreClosedError,
    TooManyAbandonedError,
    TransferError,
    connect,
)
from aiomooncake.batching import WRITE_WIDTH
from aiomooncake.buffers import Buffer
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import LoopStallProbe

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

MB = 1 << 20
SOON = 1.0  # seconds; what ends "at once" takes a few milliseconds, the machine permitting
LARGE = 17 * MB  # three pieces


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("zero-copy")


@pytest.fixture
async def store(engine: InMemoryEngine, open_store: Any) -> AsyncIterator[Store]:
    """A store with one thread per lane for small values, that holds two values."""
    store: Store = await open_store("memory://zero-copy", engine=engine, rank=40, threads=1)
    await store.put("key", b"value")
    await store.put("large", bytes(LARGE))
    yield store
    assert not store.stats().tainted


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    buffer = await store.allocate("24MiB")
    buffer.view[:24] = b"." * 24  # type: ignore[index]
    return buffer


async def turns(count: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def start(call: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task that ends at once."""
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < SOON


class Released:
    """An ``on_release`` that counts, and notes the threads it was called on."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())

    @property
    def count(self) -> int:
        return len(self.threads)

    async def once(self) -> None:
        """Check that it was called exactly once, on the loop."""
        await turns()
        assert self.threads == [threading.get_ident()]


# --- calls that hang --------------------------------------------------------------------------

Call = Callable[..., Awaitable[Any]]
CALLS: dict[str, tuple[str, Call]] = {
    "put_from": ("put_from", lambda s, b, **o: s.put_from("new", b[:5], **o)),
    "put_from parts": (
        "batch_put_from_multi_buffers",
        lambda s, b, **o: s.put_from("new", [b[:5], b[9:12]], **o),
    ),
    "put_from large": (
        "batch_put_from_multi_buffer_ranges",
        lambda s, b, **o: s.put_from("new", b[:LARGE], **o),
    ),
    "get_into": ("batch_get_into", lambda s, b, **o: s.get_into("key", b[:9], **o)),
    "get_into parts": (
        "batch_get_into_multi_buffers",
        lambda s, b, **o: s.get_into("key", [b[:3], b[3:5]], **o),
    ),
    "get_into range": (
        "get_into_ranges",
        lambda s, b, **o: s.get_into("key", b[:9], offset=0, **o),
    ),
    "get_into large": (
        "batch_get_into_multi_buffer_ranges",
        lambda s, b, **o: s.get_into("large", b[:LARGE], **o),
    ),
    "put_many_from": (
        "batch_put_from",
        lambda s, b, **o: s.put_many_from({"a": b[:5], "b": b[5:9]}, **o),
    ),
    "get_many_into": (
        "batch_get_into",
        lambda s, b, **o: s.get_many_into({"key": b[:9], "gone": b[9:12]}, **o),
    ),
}
verbs = pytest.mark.parametrize("verb", CALLS)


@verbs
async def test_a_call_is_drained_before_its_cancellation_goes_on(
    engine: InMemoryEngine,
    buffer: Buffer,
    hold: Hold,
    eventually: Eventually,
    verb: str,
) -> None:
    method, call = CALLS[verb]
    store: Any = buffer._store
    engine.fault(method, hold=hold, times=1)
    task = start(call(store, buffer))
    await hold()
    for _ in range(3):  # however often
        task.cancel()
        await turns()
        assert not task.done()
    assert buffer._users
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert buffer._users == 0
    await eventually(lambda: store.stats().in_flight == 0)
    written = bytes(buffer.view[:5])  # type: ignore[index]
    if verb in ("get_into", "get_into parts", "get_into range", "get_many_into"):
        assert written == b"value"  # before the task ended, not after it
    await call(store, buffer)


@verbs
async def test_the_drain_stands_anyios_cancellation_too(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, verb: str
) -> None:
    method, call = CALLS[verb]
    engine.fault(method, hold=hold, times=1)
    scopes: list[anyio.CancelScope] = []
    over = False

    async def move() -> None:
        nonlocal over
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await call(store, buffer)
        assert scope.cancelled_caught
        over = True

    async with anyio.create_task_group() as group, LoopStallProbe() as probe:
        group.start_soon(move)
        await hold()
        scopes[0].cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not over
        hold.set()
    assert over
    assert probe.longest < 0.2
    assert buffer._users == 0


@verbs
async def test_with_on_release_a_cancelled_call_raises_at_once_and_tells_later(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, verb: str
) -> None:
    method, call = CALLS[verb]
    released = Released()
    engine.fault(method, hold=hold, times=1)
    task = start(call(store, buffer, on_release=released))
    await hold()
    await cancelled(task)
    await turns()
    assert released.count == 0
    assert buffer._users
    hold.set()
    await buffer.aclose()  # waits until the engine has let go
    await released.once()


@verbs
async def test_on_release_is_called_once_after_success_too(
    store: Store, buffer: Buffer, verb: str
) -> None:
    released = Released()
    await CALLS[verb][1](store, buffer, on_release=released)
    await released.once()


@verbs
async def test_on_release_is_called_once_after_a_failure_too(
    engine: InMemoryEngine, store: Store, buffer: Buffer, verb: str
) -> None:
    method, call = CALLS[verb]
    released = Released()
    engine.fault(method, code=-800)
    with pytest.raises((TransferError, BatchError)):
        await call(store, buffer, on_release=released)
    await released.once()
    assert buffer._users == 0


@verbs
async def test_on_release_is_called_once_when_the_store_is_closed(
    store: Store, buffer: Buffer, verb: str
) -> None:
    released = Released()
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await CALLS[verb][1](store, buffer, on_release=released)
    await released.once()
    assert buffer._users == 0


@dataclass(frozen=True)
class Given:
    """What a refused call is given; loosely typed, since some of it is wrong."""

    store: Any
    buffer: Any
    closed: Any
    release: dict[str, Any]


REFUSED: dict[str, Callable[[Given], Awaitable[Any]]] = {
    "foreign": lambda g: g.store.put_from("k", b"bytes", **g.release),
    "foreign part": lambda g: g.store.get_into("k", [g.buffer[:1], None], **g.release),
    "nothing": lambda g: g.store.put_from("k", [], **g.release),
    "empty": lambda g: g.store.get_into("k", g.buffer[1:1], **g.release),
    "closed": lambda g: g.store.put_from("k", g.closed, **g.release),
    "closed part": lambda g: g.store.put_from("k", [g.buffer[:1], g.closed[:1]], **g.release),
    "key": lambda g: g.store.put_from("", g.buffer, **g.release),
    "key of a read": lambda g: g.store.get_into(None, g.buffer, **g.release),
    "offset": lambda g: g.store.get_into("k", g.buffer, offset=-1, **g.release),
    "config": lambda g: g.store.put_from("k", g.buffer, config={}, **g.release),
    "groups": lambda g: g.store.put_from(
        "k", g.buffer, config=ReplicateConfig(group_ids=["a", "b"]), **g.release
    ),
    "many: foreign": lambda g: g.store.put_many_from({"k": b"bytes"}, **g.release),
    "many: one foreign": lambda g: g.store.get_many_into({"k": g.buffer, "l": 5}, **g.release),
    "many: closed": lambda g: g.store.put_many_from({"k": g.buffer, "l": g.closed}, **g.release),
    "many: key": lambda g: g.store.put_many_from({"k": g.buffer, "": g.buffer}, **g.release),
    "many: groups": lambda g: g.store.put_many_from(
        {"k": g.buffer}, config=ReplicateConfig(group_ids=["a", "b"]), **g.release
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_on_release_is_called_once_after_a_refusal_too(
    store: Store, buffer: Buffer, call: Callable[[Given], Awaitable[Any]]
) -> None:
    """So that a count of references that the caller keeps comes out right."""
    closed = await store.allocate(10)
    await closed.aclose()
    released = Released()
    with pytest.raises(InvalidArgumentError):
        await call(Given(store, buffer, closed, {"on_release": released}))
    await released.once()
    assert buffer._users == 0
    assert await store.exists_many(["k", "l"]) == [False, False]


async def test_on_release_is_called_once_for_nothing_at_all(store: Store) -> None:
    for verb in (store.put_many_from, store.get_many_into):
        released = Released()
        await verb({}, on_release=released)
        await released.once()


async def test_on_release_is_called_when_too_many_calls_are_stuck(
    engine: InMemoryEngine,
    store: Store,
    buffer: Buffer,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiomooncake.engine.gate.STUCK_AFTER", 0.0)
    monkeypatch.setattr(store._client.gate, "_max_abandoned", 1)
    engine.fault("batch_put_from_multi_buffers", hold=hold)
    first = Released()
    task = start(store.put_from("new", [buffer[:1], buffer[1:2]], on_release=first))
    await hold()
    await cancelled(task)
    for call in (
        store.put_from("k", buffer[:5], on_release=(small := Released())),
        store.put_from("k", buffer, on_release=(large := Released())),
        store.get_many_into({"key": buffer}, on_release=(many := Released())),
    ):
        with pytest.raises(TooManyAbandonedError):
            await call
    for released in (small, large, many):
        await released.once()
    assert first.count == 0
    hold.set()
    await buffer.aclose()
    await first.once()


async def test_what_on_release_raises_is_logged_and_hurts_nobody(
    store: Store, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("theirs")

    with caplog.at_level(logging.ERROR, "aiomooncake"):
        await store.put_from("a", buffer[:5], on_release=fail)
        await store.put_many_from({"b": buffer[:5], "c": buffer[5:6]}, on_release=fail)
        await turns()
    assert [record.message for record in caplog.records] == ["an on_release callback failed"] * 2
    assert await store.exists_many(["a", "b", "c"]) == [True] * 3


@verbs
def test_on_release_is_called_although_the_loop_is_closed(
    engine: InMemoryEngine, hold: Hold, closing: Any, verb: str
) -> None:
    """By the thread that made the call then; the memory's owner must hear of it."""
    method, call = CALLS[verb]
    released = Released()
    told = threading.Event()

    def tell() -> None:
        released()
        told.set()

    async def main() -> tuple[Store, Buffer]:
        store = await connect("memory://zero-copy", engine=engine)
        await store.put("key", b"value")
        await store.put("large", bytes(LARGE))
        buffer = await store.allocate("24MiB")
        engine.fault(method, hold=hold, times=1)
        task = start(call(store, buffer, on_release=tell))
        await hold()
        await cancelled(task)
        return store, buffer

    store, buffer = asyncio.run(main())
    assert not told.is_set()
    hold.set()
    assert told.wait(10)
    closing.add(store._client)
    assert released.count == 1
    assert buffer._users == 0


# --- calls that have not left yet -------------------------------------------------------------


@pytest.mark.parametrize("with_release", [True, False])
async def test_a_move_cancelled_in_the_queue_never_runs(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, with_release: bool
) -> None:
    """Whether it waits for its batch, for a thread, or for the write of the same key before it."""
    engine.fault("is_exist", hold=hold, times=1)
    stuck = start(store.exists("key"))
    await hold()  # the only thread
    moving = (
        engine.fault("put_from"),
        engine.fault("batch_put_from"),
        engine.fault("batch_get_into"),
    )
    released = [Released() for _ in range(4)]
    options: Any = [{"on_release": each} if with_release else {} for each in released]
    tasks = [
        start(store.put_from("new", buffer[:5], **options[0])),
        start(store.put_from("new", buffer[5:9], **options[1])),
        start(store.get_into("key", buffer[9:20], **options[2])),
        start(store.put_many_from({"a": buffer[:1], "b": buffer[1:2]}, **options[3])),
    ]
    await turns()
    for task in tasks:  # two of them wait in one batch, which is dropped when both have left
        task.cancel()
    for task in tasks:
        await cancelled(task)
    assert buffer._users == 0
    if with_release:
        for each in released:
            await each.once()
    hold.set()
    assert await stuck
    assert [fault.hits for fault in moving] == [0, 0, 0]
    assert store.stats().in_flight == 0
    assert await store.exists_many(["new", "a", "b"]) == [False] * 3


async def test_a_move_leaves_a_batch_that_goes_on_with_the_others(
    engine: InMemoryEngine,
    store: Store,
    buffer: Buffer,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiomooncake.lanes.OVERDUE", 60.0)
    engine.fault("put_from", hold=hold)
    before = []
    for i in range(WRITE_WIDTH):  # as many batches as may be under way
        before.append(start(store.put_from(f"before{i}", buffer[i : i + 1])))
        await turns()
    tasks = [start(store.put_from(f"{i}", buffer[i : i + 1])) for i in range(10)]
    await turns()
    for task in tasks[::2]:
        await cancelled(task)
    hold.set()
    await asyncio.gather(*before, *tasks[1::2])
    assert await store.exists_many(map(str, range(10))) == [False, True] * 5


async def test_moves_may_be_cancelled_at_any_turn_of_the_loop(
    store: Store, buffer: Buffer, eventually: Eventually
) -> None:
    """A coroutine that was never awaited, or a buffer that stays in use, once came of it."""
    for turn in range(1, 25):
        for _, call in CALLS.values():
            released = Released()
            tasks = start(call(store, buffer, on_release=released)), start(call(store, buffer))
            await turns(turn)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await eventually(lambda told=released: told.count)  # type: ignore[misc]
            await released.once()
        await store.remove_many(["new", "a", "b"], force=True)
    gc.collect()
    assert buffer._users == 0
    await eventually(lambda: store.stats().in_flight == 0)


# --- the end of a buffer ----------------------------------------------------------------------


@verbs
async def test_a_buffer_waits_for_the_calls_that_use_it(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, verb: str
) -> None:
    method, call = CALLS[verb]
    engine.fault(method, hold=hold, times=1)
    unregistering = engine.fault("unregister_buffer")
    moving = start(call(store, buffer))
    await hold()
    closes = [start(buffer.aclose()), start(buffer.aclose())]
    await turns()
    with pytest.raises(InvalidArgumentError, match="closed"):
        await store.put_from("k", buffer[:1])
    closes[0].cancel()
    await turns()
    assert not any(close.done() for close in closes)  # also one that is cancelled
    assert unregistering.hits == 0
    hold.set()
    await moving
    await closes[1]
    with pytest.raises(asyncio.CancelledError):
        await closes[0]
    assert unregistering.hits == 1


async def test_buffers_that_wait_hold_nobody_up(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """Each of them once held a thread of the control lane, which has two."""
    buffers = [await store.allocate(100) for _ in range(4)]
    engine.fault("batch_put_from", hold=hold, times=1)
    moving = [start(store.put_from(f"{i}", each)) for i, each in enumerate(buffers)]
    await hold()
    closes = [start(each.aclose()) for each in buffers]
    await turns()
    async with await asyncio.wait_for(store.allocate(100), SOON):
        assert await asyncio.wait_for(store.remove_by_regex("nothing"), SOON) == 0
    hold.set()
    await asyncio.gather(*moving, *closes)


async def test_a_buffer_waits_for_its_calls_also_while_the_store_closes(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    """Its owner may free the memory afterwards."""
    released = Released()
    engine.fault("put_from", hold=hold, times=1)
    moving = start(store.put_from("new", buffer[:5], on_release=released))
    await hold()
    await cancelled(moving)
    closing = start(store.aclose())
    await turns()
    close = start(buffer.aclose())
    await turns()
    assert not close.done()
    hold.set()
    await close
    assert released.count == 1
    await closing


async def test_a_buffer_that_is_dropped_in_use_stays_until_the_store_is_closed(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    buffer = await store.allocate(1000)
    buffer.view[:] = b"x" * 1000  # type: ignore[index]
    engine.fault("put_from", hold=hold, times=1)
    moving = start(store.put_from("new", buffer))
    await hold()
    del buffer
    gc.collect()
    hold.set()
    await moving
    assert await store.get("new") == b"x" * 1000


async def test_the_store_closes_behind_the_calls_that_use_memory(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    engine.fault("put_from", hold=hold, times=1)
    running = start(store.put_from("new", buffer[:5]))
    await hold()
    queued = [
        start(store.get_into("key", buffer[5:10])),
        start(store.put_from("new", buffer[10:15])),
    ]
    await turns()
    closing = start(store.aclose())
    await turns()
    for task in queued:
        if task.done():
            assert isinstance(task.exception(), StoreClosedError)
    assert not closing.done()
    hold.set()
    await running
    await closing
    for task in queued:
        with pytest.raises(StoreClosedError):
            await task
    assert buffer._users == 0


async def test_a_registration_cancelled_while_it_runs_is_undone(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """The memory was let go of, while the engine still knew it."""
    memory = bytearray(1000)
    engine.fault("register_buffer", hold=hold, times=1)
    unregistering = engine.fault("unregister_buffer")
    kept = len(store._client._kept)
    task = start(store.register(memory))
    await hold()
    task.cancel()
    await turns()
    assert not task.done()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert unregistering.hits == 1
    assert len(store._client._kept) == kept
    async with store.register(memory):
        pass


# --- large moves ------------------------------------------------------------------------------


async def test_an_interrupted_put_is_revoked(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    pieces = engine.fault("batch_put_from_multi_buffer_ranges", hold=hold)
    task = start(store.put_from("new", buffer[:LARGE]))
    await hold()
    task.cancel()
    await turns()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pieces.hits == 1  # of three
    assert not await store.exists("new")
    await store.put_from("new", buffer[:5])
    assert await store.get("new") == b"....."


WRITES: dict[str, Callable[..., Awaitable[Any]]] = {
    "put": lambda store, **_: store.put("new", b"again"),
    "put_from": lambda store, buffer: store.put_from("new", buffer[:5]),
    "parts": lambda store, buffer: store.put_from("new", [buffer[:3], buffer[3:5]]),
    "put_parts": lambda store, **_: store.put_parts("new", bytes(1 * MB), bytes(1 * MB)),
    "large": lambda store, buffer: store.put_from("new", buffer[:LARGE]),
    "put large": lambda store, **_: store.put("new", bytes(LARGE)),
    "put_many": lambda store, **_: store.put_many({"new": b"again"}),
}


@pytest.mark.parametrize("verb", WRITES)
async def test_a_put_behind_one_that_is_being_given_up_really_stores(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, verb: str
) -> None:
    """The engine answers 0 while the key is taken, and then the first put is revoked."""
    engine.fault("batch_put_from_multi_buffer_ranges", hold=hold, times=1)
    task = start(store.put_from("new", buffer[:LARGE], on_release=Released()))
    await hold()
    await cancelled(task)
    again = start(WRITES[verb](store, buffer=buffer))
    await asyncio.sleep(0.02)
    hold.set()
    await again
    assert await store.exists("new")


@pytest.mark.parametrize("verb", WRITES)
async def test_a_put_that_is_awaited_is_seen_also_beside_an_unfinished_one(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, verb: str
) -> None:
    """The engine answers 0 while the key is taken, but nobody can read it yet."""
    engine.fault("batch_put_from_multi_buffer_ranges", hold=hold, times=1)
    first = start(store.put_from("new", buffer[:LARGE]))
    await hold()
    second = start(WRITES[verb](store, buffer=buffer))
    await asyncio.wait([second], timeout=0.02)
    if not second.done():
        hold.set()
    await second
    assert await store.exists("new")
    hold.set()
    await first


async def test_an_interrupted_read_stops_between_two_pieces(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    pieces = engine.fault("batch_get_into_multi_buffer_ranges", hold=hold)
    task = start(store.get_into("large", buffer))
    await hold()
    task.cancel()
    await turns()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pieces.hits == 1
    assert await store.get_into("large", buffer) == LARGE


async def test_a_value_that_changes_its_size_while_it_is_read(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    """It was called too large for memory that has room for both."""
    engine.fault("get_size", hold=hold, times=1)
    reading = start(store.get_into("large", buffer))
    await hold()
    await store.upsert("large", b"small")
    hold.set()
    assert await reading == 5
    assert bytes(buffer.view[:5]) == b"small"  # type: ignore[index]


LONGER = bytes(range(256)) * (24 * 4096)


@pytest.mark.parametrize("method", ["get_size", "batch_get_session_start"])
async def test_a_value_that_is_replaced_by_a_longer_one_is_not_cut_short(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, method: str
) -> None:
    """Pieces of the longer value were read, as many as the old one had."""
    engine.fault(method, hold=hold, times=1)
    for read in (store.get("large"), store.get_into("large", buffer)):
        hold.clear()
        reading = start(read)
        await hold()
        await store.remove("large", force=True)
        await store.put("large", LONGER)
        hold.set()
        answer = await reading
        assert (buffer.view if answer == len(LONGER) else answer) == LONGER
        await store.upsert("large", bytes(LARGE))
        engine.fault(method, hold=hold, times=1)


async def test_a_value_that_is_replaced_by_a_shorter_one_while_a_range_is_read(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    engine.fault("get_into_ranges", hold=hold, times=1)
    reading = start(store.get_into("key", buffer[:9], offset=1))
    await hold()
    await store.upsert("key", b"new")
    hold.set()
    assert await reading == 2
    assert bytes(buffer.view[:4]) == b"ew.."  # type: ignore[index]


async def test_a_value_that_goes_while_it_is_read_into_memory_that_is_too_small(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    """The error once told that the value has -704 bytes."""
    engine.fault("get_size", hold=hold, times=1)
    reading = start(store.get_into("key", buffer[:2]))
    await hold()
    await store.remove("key", force=True)
    hold.set()
    assert await reading is None


# --- views ------------------------------------------------------------------------------------


async def test_a_view_that_comes_too_late_gives_its_room_back(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    await store.put("1 MB", bytes(1 * MB))
    before = store._views.room
    engine.fault("batch_get_buffer", hold=hold, times=1)

    async def look() -> None:
        async with store.view("1 MB"):
            pass

    task = start(look())
    await hold()
    assert store._views.room == before - 1 * MB
    await cancelled(task)
    hold.set()
    await eventually(lambda: store._views.room == before)


async def test_a_handle_that_was_refused_makes_no_false_miss(
    engine: InMemoryEngine, store: Store
) -> None:
    before = store._views.room
    engine.fault("batch_get_buffer", code=-600)
    async with store.view("key") as view:
        assert bytes(view or b"") == b"value"
    engine.fault("batch_get_into", code=-900)
    engine.fault("get_into", code=-900)
    with pytest.raises(ConnectionError, match="-900"):
        await store.view("key")
    with pytest.raises(BatchError) as caught:
        await store.view_many(["key", "large"])
    assert len(caught.value.results) == 2
    del caught
    gc.collect()
    assert store._views.room == before


async def test_a_closed_store_leaves_views_as_they_are(store: Store) -> None:
    async with store.view("key") as view, store.view("large") as large:
        await store.aclose()
        assert view is not None
        assert bytes(view) == b"value"
        assert bytes(large or b"") == bytes(LARGE)
    with pytest.raises(ValueError, match="released"):
        bytes(view)

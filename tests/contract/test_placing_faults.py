"""Segments, tasks and sessions when something goes wrong, on the in-memory engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiomooncake import (
    BatchError,
    InternalError,
    MooncakeError,
    NoSpaceError,
    NotSupportedError,
    ReplicaError,
    RpcError,
    Store,
    StoreClosedError,
    TaskError,
    TransferError,
    UnavailableError,
    adopt,
    connect,
)
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.engine.protocol import NativeStore
from aiomooncake.segments import Segment
from aiomooncake.tasks import TaskProgress
from tests.conftest import MB, Hold

HERE = "memory://placing"


@pytest.fixture
def engine() -> InMemoryEngine:
    InMemoryEngine.reset("placing")
    return InMemoryEngine.named("placing")


@pytest.fixture
async def store(engine: InMemoryEngine) -> AsyncIterator[Store]:
    async with connect(HERE, rank=3, global_segment_size=16 * MB) as store:
        yield store


def segments(engine: InMemoryEngine) -> int:
    return len(engine._segments)


# --- segments ---------------------------------------------------------------------------------


async def test_a_mount_that_is_cancelled_leaves_nothing(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    engine.fault("allocate_and_mount_segment", hold=hold)
    mounting = asyncio.ensure_future(store.mount_segment(MB))
    await hold()
    mounting.cancel()
    await asyncio.sleep(0)
    assert not mounting.done()  # the engine has it in hand
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await mounting
    lent, left = engine._segments.values()
    assert left.until < lent.until
    assert not any("Segment" in repr(kept) for kept in store._client._kept.values())


async def test_a_mount_that_fails_leaves_nothing(engine: InMemoryEngine, store: Store) -> None:
    engine.fault("allocate_and_mount_segment", code=-1, times=1)
    with pytest.raises(InternalError, match="take less") as failed:
        await store.mount_segment(MB)
    assert failed.value.rank == 3
    assert segments(engine) == 1
    assert not any("Segment" in repr(kept) for kept in store._client._kept.values())


async def test_a_segment_that_could_not_be_taken_back_is_still_lent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await store.mount_segment(MB)
    with monkeypatch.context() as patch:
        native = store._client.native_object
        patch.setattr(native, "unmount_and_free_segment", lambda *_: -900)
        with pytest.raises(RpcError, match="still lent"):
            await segment.aclose()
    assert "closed" not in repr(segment)
    await segment.aclose()
    assert "closed" in repr(segment)


async def test_a_segment_is_mounted_anew_with_the_store(
    engine: InMemoryEngine, store: Store
) -> None:
    kept, closed = await store.mount_segment(MB), await store.mount_segment(MB)
    await closed.aclose()
    before = kept.ids
    store._client.renew(joined(engine))
    assert kept.ids != before
    assert kept.name == store.hostname
    assert "closed" in repr(closed)


async def test_a_segment_that_can_not_be_mounted_anew(
    engine: InMemoryEngine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    segment = await store.mount_segment(MB)
    fresh = joined(engine)
    engine.fault("allocate_and_mount_segment", code=-1, times=1)
    store._client.renew(fresh)
    assert "could not be mounted anew" in caplog.text
    assert "closed" in repr(segment)


class Gap:
    """Where a re-opening waits, between two things that it tells the new object of."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def renew(self, native: NativeStore) -> bool:  # it is told nothing
        self._hold.wait()
        return False


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_what_is_closed_while_the_store_is_opened_anew_is_not_left_with_the_new_object(
    engine: InMemoryEngine, store: Store, hold: Hold, when: str
) -> None:
    """Calls were refused, and it was taken for gone with the old object, after its own renewal."""
    client = store._client
    kept = len(client._kept)
    for what, method in (
        ("segment", "allocate_and_mount_segment"),
        ("buffer", "register_buffer"),
    ):
        gap = Gap(hold)
        if when == "before":
            client.keep_until_gone(gap)
        thing: Any
        thing = await (store.mount_segment(MB) if what == "segment" else store.allocate(MB))
        if when == "after":
            client.keep_until_gone(gap)
        fault = engine.fault(method, hold=hold) if when == "during" else None
        client.gate.taint("a test says so")
        assert client.gate.pause()
        assert client.native is not None
        assert client.native.close() == 0
        fresh = joined(engine)
        renewing = asyncio.ensure_future(asyncio.to_thread(client.renew, fresh))
        await hold()
        closing = asyncio.ensure_future(thing.aclose())
        if when == "during":
            for _ in range(3):  # until it waits
                await asyncio.sleep(0)
            assert not closing.done()
        else:
            await closing
        hold.set()
        await renewing
        await closing
        hold.clear()
        if fault is not None:
            fault.remove()
        assert all(each.until < float("inf") for each in engine._segments.values())
        if what == "buffer":
            assert fresh.register_buffer(thing.address, thing.nbytes) == 0
            assert fresh.unregister_buffer(thing.address) == 0
        assert len(client._kept) == kept
        assert store.health().ok


async def test_a_mount_that_meets_a_re_opening_is_not_made_by_it(
    engine: InMemoryEngine, store: Store
) -> None:
    """It was kept already, and refused a moment later."""
    client = store._client
    client.gate.pause()
    segment = Segment(client, nbytes=MB, path=None, offset=0, protocol="tcp", location="")
    assert not segment.renew(joined(engine))
    assert segments(engine) == 1


def joined(engine: InMemoryEngine, kind: type[InMemoryStore] = InMemoryStore) -> InMemoryStore:
    native = kind(engine)
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "master") == 0
    return native


async def test_an_adopted_store_takes_back_what_it_lent(engine: InMemoryEngine) -> None:
    native = joined(engine)
    store = adopt(native)
    async with store as opened:
        segment = await opened.mount_segment(MB)
    assert "closed" in repr(segment)
    (left,) = engine._segments.values()
    assert left.until < float("inf")


async def test_a_wheel_without_segments_tasks_and_sessions(engine: InMemoryEngine) -> None:
    class Old(InMemoryStore):
        def __getattribute__(self, name: str) -> object:
            if name in {"mount_segment", "create_copy_task", "batch_put_session_start"}:
                raise AttributeError(name)
            return super().__getattribute__(name)

    async with adopt(joined(engine, Old)) as store:
        with pytest.raises(
            NotSupportedError, match=r"has no mount_segment: install 0\.3\.11\.post1 or newer"
        ):
            await store.mount_segment(MB)
        with pytest.raises(
            NotSupportedError, match=r"has no create_copy_task: install a newer wheel"
        ):
            await store.copy("key", "target")
        with pytest.raises(
            NotSupportedError, match=r"batch_put_session_start: install 0\.3\.13 or"
        ):
            async with store.put_session({"key": 1}):
                pytest.fail("it began")


# --- tasks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "code", "kind"),
    [
        ("create_copy_task", -1401, TaskError),
        ("create_copy_task", -900, RpcError),
        ("create_copy_task", -1010, UnavailableError),
        ("query_task", -1400, TaskError),
        ("query_task", -901, RpcError),
    ],
)
async def test_tasks_that_are_refused_or_lost(
    engine: InMemoryEngine, store: Store, method: str, code: int, kind: type[MooncakeError]
) -> None:
    words = "may go on in the cluster" if method == "query_task" else "copy of 'key' failed"
    await store.put("key", b"value")
    engine.fault(method, code=code)
    with pytest.raises(kind, match=words) as failed:
        await store.copy("key", store.hostname)
    assert failed.value.code == code
    assert failed.value.key == "key"


async def test_a_callback_that_fails_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def hear(_: TaskProgress) -> None:
        raise ZeroDivisionError

    await store.put("key", b"value")
    await store.copy("key", store.hostname, on_progress=hear)
    assert "on_progress callback failed" in caplog.text


async def test_a_copy_that_is_cancelled_before_it_is_known(
    engine: InMemoryEngine, store: Store, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("key", b"value")
    engine.fault("create_copy_task", hold=hold)
    copying = asyncio.ensure_future(store.copy("key", store.hostname))
    await hold()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert "goes on" not in caplog.text  # the engine may still refuse it
    hold.set()
    await store.aclose()  # waits for it
    assert "goes on in the cluster" in caplog.text


async def test_a_copy_that_is_cancelled_and_then_refused_does_not_go_on(
    engine: InMemoryEngine, store: Store, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fault("create_copy_task", hold=hold, code=-704)
    copying = asyncio.ensure_future(store.copy("key", store.hostname))
    await hold()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    hold.set()
    await store.aclose()  # waits for it
    assert "goes on" not in caplog.text


async def test_a_copy_that_is_cancelled_in_our_queue_was_never_begun(
    engine: InMemoryEngine, store: Store, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said to go on in the cluster, which had never heard of it."""
    await store.put("key", b"value")
    fault = engine.fault("create_move_task", hold=hold)
    ahead = [asyncio.ensure_future(store.move("key", store.hostname, "there")) for _ in range(2)]
    await hold(2)  # all threads of the lane
    copying = asyncio.ensure_future(store.copy("key", "there"))
    await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    fault.remove()
    hold.set()
    assert all(await asyncio.gather(*ahead, return_exceptions=True))
    assert "goes on" not in caplog.text


async def test_a_copy_that_is_cancelled_before_the_engine_hears_of_it_is_not_begun(
    engine: InMemoryEngine, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[object] = []

    class Slow(InMemoryStore):
        @property
        def create_copy_task(self) -> Any:
            hold.wait()
            return lambda *asked: begun.append(asked)

    async with adopt(joined(engine, Slow)) as store:
        copying = asyncio.ensure_future(store.copy("key", "there"))
        await hold()  # a thread has taken it up
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        hold.set()
    assert not begun
    assert "goes on" not in caplog.text


# --- sessions ---------------------------------------------------------------------------------


async def test_a_write_that_fails_ends_the_session(engine: InMemoryEngine, store: Store) -> None:
    engine.fault("batch_put_from_multi_buffer_ranges", code=-800, times=1)

    async def write() -> None:
        async with store.put_session({"key": 10}) as session:
            await session.write("key", 0, buffer[:10])

    async with store.allocate(MB) as buffer:
        with pytest.raises(TransferError):
            await write()
        assert not engine._objects
        await write()
    assert await store.size("key") == 10


async def test_a_session_whose_end_fails_is_revoked(engine: InMemoryEngine, store: Store) -> None:
    engine.fault("batch_put_session_end", code=-900, times=1)

    async def write() -> None:
        async with store.put_session({"key": 10}) as session:
            await session.write("key", 0, buffer[:10])

    async with store.allocate(MB) as buffer:
        with pytest.raises(RpcError):
            await write()
    assert not engine._objects


async def test_a_session_whose_segment_goes_is_a_transfer_that_failed(
    engine: InMemoryEngine, store: Store
) -> None:
    engine.fault("batch_put_session_end", code=-704, times=1)
    async with store.allocate(MB) as buffer:
        with pytest.raises(TransferError, match="segment it was being stored in went"):
            async with store.put_session({"key": 10}) as session:
                await session.write("key", 0, buffer[:10])


async def test_a_session_without_room_reserves_nothing(
    engine: InMemoryEngine, store: Store
) -> None:
    with pytest.raises(BatchError, match="1 of 2 keys"):
        async with store.put_session({"small": 10, "large": 20 * MB}):
            pytest.fail("it began")
    assert not engine._objects
    with pytest.raises(NoSpaceError):
        async with store.put_session({"large": 20 * MB}):
            pytest.fail("it began")


async def test_a_write_that_is_cancelled_waits_for_the_engine(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    engine.fault("batch_put_from_multi_buffer_ranges", hold=hold)
    async with store.allocate(MB) as buffer:

        async def write() -> None:
            async with store.put_session({"key": 10}) as session:
                await session.write("key", 0, buffer[:10])

        writing = asyncio.ensure_future(write())
        await hold()
        writing.cancel()
        await asyncio.sleep(0)
        assert not writing.done()
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
    assert not engine._objects


async def test_a_lost_session_is_taken_up_again(engine: InMemoryEngine, store: Store) -> None:
    """Its end was never confirmed, so the engine still has one of the key."""
    native = store._client.native_object
    assert native.batch_put_session_start(["key"], [10]) == [0]
    async with store.allocate(MB) as buffer, store.put_session({"key": 20}) as session:
        await session.write("key", 0, buffer[:20])
    assert await store.size("key") == 20


async def test_a_read_goes_on_after_its_lease(engine: InMemoryEngine, store: Store) -> None:
    await store.put("key", b"0123456789")
    async with store.allocate(MB) as buffer, store.get_session(["key"]) as session:
        engine.fault("batch_get_into_multi_buffer_ranges", code=-707, times=3)
        assert await session.read_into("key", 0, buffer) == 10
        engine.fault("batch_get_into_multi_buffer_ranges", code=-707, times=4)
        with pytest.raises(MooncakeError, match="LEASE_EXPIRED"):
            await session.read_into("key", 0, buffer)


@pytest.mark.parametrize("code", [-900, -901])
async def test_a_read_whose_place_can_not_be_asked_is_no_change(
    engine: InMemoryEngine, store: Store, code: int
) -> None:
    """The engine tells of no copies also when it did not reach the master."""
    await store.put("key", b"0123456789")
    async with store.allocate(MB) as buffer, store.get_session(["key"]) as session:
        engine.fault("batch_get_replica_desc", code=code, times=1)
        engine.fault("get_size", code=code, times=1)
        with pytest.raises(RpcError) as failed:
            await session.read_into("key", 0, buffer)
        assert failed.value.code == code
        # Away for the first question only.
        engine.fault("batch_get_replica_desc", code=code, times=1)
        assert await session.read_into("key", 0, buffer) == 10
        engine.fault("batch_get_replica_desc", code=code, times=2)
        with pytest.raises(ReplicaError, match="changed meanwhile"):
            await session.read_into("key", 0, buffer)


async def test_a_large_read_whose_place_can_not_be_asked(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """Neither the look before nor the one after it told a place: it was taken for unchanged."""
    await store.put("large", bytes(9 * MB))
    engine.fault("batch_get_replica_desc", code=-900, times=2)
    engine.fault("batch_get_into_multi_buffer_ranges", hold=hold, times=1)
    reading = asyncio.ensure_future(store.get("large"))
    await hold()
    engine.fault("get_size", code=-900, times=1)
    hold.set()
    with pytest.raises(RpcError):
        await reading
    assert await store.get("large") == bytes(9 * MB)


async def test_an_engine_that_its_owner_has_closed_takes_no_session(
    engine: InMemoryEngine,
) -> None:
    """The engine answers such a start with no code at all, and a ValueError came out."""
    native = joined(engine)
    async with adopt(native, rank=5) as store:
        assert native.close() == 0
        with pytest.raises(StoreClosedError, match=r"TP5\] put_session refused: the owner of this"):
            async with store.put_session({"key": 10}):
                pytest.fail("it began")
        assert store.stats().refused == 1
        assert store.health().state == "closed"


async def test_a_store_stays_closed_when_its_owner_sets_the_engine_up_again(
    engine: InMemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = joined(engine)
    async with adopt(native) as store:
        adopted = store.health().since
        assert native.close() == 0
        assert store.health().state == "closed"
        closed = store.health().since
        assert adopted < closed == store.health().since
        monkeypatch.setattr(
            native, "health_check", lambda: 0
        )  # the real engine allows a second one
        assert store.health().state == "closed"
        with pytest.raises(StoreClosedError, match="owner"):
            await store.get("key")


async def test_a_store_that_is_closed_under_a_session(engine: InMemoryEngine) -> None:
    store = await connect(HERE, global_segment_size=16 * MB)

    async def write() -> None:
        async with store.put_session({"key": 10}) as session:
            await session.write("key", 0, buffer[:10])
            await store.aclose()

    buffer = await store.allocate(MB)
    with pytest.raises(StoreClosedError):
        await write()
    assert not engine._segments

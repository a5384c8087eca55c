"""Segments, tasks and sessions of a store: what its user sees, on both engines."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from aiomooncake import (
    BatchError,
    InvalidArgumentError,
    LocalCluster,
    ObjectExistsError,
    ObjectNotFoundError,
    ReplicaError,
    ReplicateConfig,
    RpcError,
    Store,
    StoreClosedError,
    TaskError,
    UnavailableError,
    connect,
)
from aiomooncake.sessions import GetSession, PutSession
from aiomooncake.tasks import TaskProgress
from tests.conftest import MB, Closing, OpenStore
from tests.contract import segment_scenes
from tests.contract.engines import target_of


@pytest.fixture(scope="module")
def lenders_cluster(closing: Closing) -> Iterator[LocalCluster]:
    """A master of this module's own: its stores lend memory, and take values along."""
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master
        closing.wait()


@pytest.fixture(scope="module", params=["memory", "real"])
def store(request: pytest.FixtureRequest, closing: Closing) -> Iterator[Store]:
    """A store that the tests share: 64 MB."""
    target = "memory://lenders"
    if request.param == "real":
        target = request.getfixturevalue("lenders_cluster").address

    async def opened() -> Store:
        return await connect(target, rank=3, global_segment_size=64 * MB, local_buffer_size=MB)

    store = asyncio.run(opened())
    yield store
    closing.add(store._client)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def lender(store: Store, open_store: OpenStore) -> Store:
    """A second store of the same cluster, which lends nothing by itself."""
    return await open_store(target_of(store), global_segment_size=0, local_buffer_size=MB)


async def owners(store: Store, key: str) -> int:
    return len(await store.replicas(key))


# --- segments ---------------------------------------------------------------------------------


async def test_a_segment_takes_values_and_is_taken_back(
    store: Store, lender: Store, key: str
) -> None:
    async with lender.mount_segment("1MiB") as segment:
        assert segment.nbytes == 16 * MB
        assert segment.name == lender.hostname
        assert len(segment.ids) == 1
        assert segment.path is None
        assert repr(segment) == f"<Segment {16 * MB} bytes>"
        await store.put(key, b"value", config=ReplicateConfig(preferred_segment=segment.name))
        assert await lender.get(key) == b"value"
        await segment.aclose()  # the end of the block does not mind
    assert repr(segment).endswith("closed>")
    await gone(store, key)


async def gone(store: Store, key: str) -> None:
    with anyio.fail_after(10):
        while await store.exists(key):  # noqa: ASYNC110 - the master tells nobody
            await asyncio.sleep(0.05)


async def test_a_segment_of_a_file(store: Store, lender: Store, key: str, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(2 * mmap.PAGESIZE + MB))
    segment = await lender.mount_segment(path=path, offset=mmap.PAGESIZE)
    assert segment.nbytes == MB + mmap.PAGESIZE
    assert segment.path == str(path)
    await store.put(key, b"needle", config=ReplicateConfig(preferred_segment=segment.name))
    assert await store.get(key) == b"needle"
    await segment.aclose(grace_period=1.5)
    await gone(store, key)


async def test_segments_that_can_not_be(lender: Store, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(MB))
    for sizes, complaint in (
        ({}, "a size, or path="),
        ({"nbytes": 0}, "at least one byte"),
        ({"nbytes": 1 << 60}, "less than 2\\*\\*47"),
        ({"nbytes": MB, "offset": mmap.PAGESIZE}, "fresh memory has none"),
        ({"path": path, "offset": 100}, "multiple of the page size"),
        ({"nbytes": "much"}, "mount_segment: nbytes='much' is not usable"),
        ({"path": path, "offset": -1}, "mount_segment: offset=-1 is not usable"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            lender.mount_segment(**sizes)
    for where, nbytes, offset in (
        (tmp_path / "nothing", None, 0),
        (tmp_path, None, 0),
        (path, 2 * MB, 0),
        (path, None, MB),
        (path, MB, mmap.PAGESIZE),
    ):
        with pytest.raises(InvalidArgumentError, match="mount_segment can't"):
            await lender.mount_segment(nbytes, path=where, offset=offset)
    async with lender.mount_segment(path=path) as segment:
        for grace_period in (0, 0.5, -1, 1e10, float("inf"), float("nan"), None, "1"):
            with pytest.raises(InvalidArgumentError, match="1 to 1000000000 seconds"):
                await segment.aclose(grace_period=grace_period)  # type: ignore[arg-type]
    for wrong in ({"path": os.fsencode(path)}, {"path": f"{path}\udcff"}, {"location": 5}):
        with pytest.raises(InvalidArgumentError, match=f"mount_segment: {next(iter(wrong))}="):
            lender.mount_segment(MB, **wrong)


async def test_a_closed_store_takes_its_segments_along(
    store: Store, open_store: OpenStore, key: str
) -> None:
    lender = await open_store(target_of(store), global_segment_size=0, local_buffer_size=MB)
    segment = await lender.mount_segment(MB)
    await store.put(key, b"value", config=ReplicateConfig(preferred_segment=segment.name))
    await lender.aclose()
    assert not await store.exists(key)
    assert repr(segment).endswith("closed>")
    await segment.aclose()
    with pytest.raises(StoreClosedError):
        await lender.mount_segment(MB)


# --- tasks ------------------------------------------------------------------------------------


async def test_a_copy_and_a_move(store: Store, open_store: OpenStore, key: str) -> None:
    peer = await open_store(target_of(store), global_segment_size=16 * MB, local_buffer_size=MB)
    await store.put(key, b"value", config=ReplicateConfig(preferred_segment=store.hostname))
    heard: list[TaskProgress] = []
    await store.copy(key, [peer.hostname], on_progress=heard.append)
    assert await owners(store, key) == 2
    assert heard[0].status == "pending"
    assert heard[-1].status == "success"
    assert heard[-1].message
    assert {(each.verb, each.key) for each in heard} == {("copy", key)}
    assert heard[-1].seconds > 0
    await store.copy(key, peer.hostname)  # it is there
    other = f"{key} other"
    await store.put(other, b"value", config=ReplicateConfig(preferred_segment=store.hostname))
    (before,) = await store.replicas(other)
    await peer.move(other, store.hostname, peer.hostname)
    (after,) = await store.replicas(other)
    assert after != before
    assert await store.get(other) == b"value"


async def test_tasks_that_can_not_be(store: Store, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a target"):
        await store.copy(key, [])
    with pytest.raises(InvalidArgumentError, match="empty target"):
        await store.copy(key, [""])
    with pytest.raises(InvalidArgumentError, match="empty key"):
        await store.move("", "a", "b")
    with pytest.raises(ObjectNotFoundError):
        await store.move(key, "a", "b")
    await store.put(key, b"value")
    with pytest.raises(InvalidArgumentError, match="copy it to 'nowhere', 'nor here'") as copied:
        await store.copy(key, ["nowhere", "nor here"])
    with pytest.raises(InvalidArgumentError, match="from 'nowhere' to 'nor here'") as moved:
        await store.move(key, "nowhere", "nor here")
    assert "not be the target" in str(moved.value)
    for refused in (copied, moved):
        assert refused.value.code == -600
        assert "local_buffer_size" not in str(refused.value)  # no cure of these


async def test_copies_to_a_segment_that_is_taken_back(
    store: Store, lender: Store, key: str
) -> None:
    await store.put(key, b"value")
    async with lender.mount_segment(MB):
        pass
    for refused in (
        store.copy(key, [store.hostname, lender.hostname]),
        store.move(key, store.hostname, lender.hostname),
    ):
        with pytest.raises(UnavailableError, match="being taken back") as failed:
            await refused
        assert failed.value.code == -1010
        assert lender.hostname in str(failed.value)


@pytest.mark.timeout(90)
async def test_a_task_that_fails_says_why(store: Store, open_store: OpenStore, key: str) -> None:
    peer = await open_store(target_of(store), global_segment_size=16 * MB, local_buffer_size=MB)
    async with store.allocate(20 * MB) as buffer:
        await store.put_from(key, buffer, config=ReplicateConfig(preferred_segment=store.hostname))
    before = store.stats().errors.get("NO_AVAILABLE_HANDLE", 0)
    with pytest.raises(TaskError, match="NO_AVAILABLE_HANDLE") as failed:
        await store.copy(key, peer.hostname)
    assert store.stats().errors["NO_AVAILABLE_HANDLE"] == before + 1
    assert failed.value.code == -200
    assert failed.value.key == key
    assert failed.value.retryable
    await store.remove(key, force=True)


async def test_a_cancelled_copy_goes_on(
    store: Store, open_store: OpenStore, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await open_store(target_of(store), global_segment_size=16 * MB, local_buffer_size=MB)
    await store.put(key, b"value", config=ReplicateConfig(preferred_segment=store.hostname))
    begun = asyncio.Event()

    def hear(_: TaskProgress) -> None:
        begun.set()

    copying = asyncio.ensure_future(store.copy(key, peer.hostname, on_progress=hear))
    await begun.wait()
    copying.cancel()
    with caplog.at_level(logging.WARNING, "aiomooncake"), pytest.raises(asyncio.CancelledError):
        await copying
    assert f"a copy to '{peer.hostname}' was cancelled, and goes on" in caplog.text
    assert key not in caplog.text
    with anyio.fail_after(10):
        while await owners(store, key) < 2:  # noqa: ASYNC110 - nobody is told any more
            await asyncio.sleep(0.05)


# --- sessions ---------------------------------------------------------------------------------


async def test_a_put_session_stores_ranges(store: Store, key: str) -> None:
    other = f"{key} other"
    async with store.allocate(MB) as buffer:
        assert buffer.view is not None
        buffer.view[:10] = b"0123456789"
        async with store.put_session({key: 10, other: "4"}) as session:
            assert isinstance(session, PutSession)
            assert session.sizes == {key: 10, other: 4}
            await asyncio.gather(
                session.write(key, 5, buffer[5:10]),
                session.write(key, 0, buffer[0:5]),
                session.write(other, 0, buffer[2:6]),
            )
            assert not await store.exists(key)
            await store.put(key, b"late")  # as beside any unfinished write: the first one counts
        assert repr(session) == "<PutSession of 2 keys closed>"
        with pytest.raises(InvalidArgumentError, match="open session"):
            await session.write(key, 0, buffer[0:5])
    assert await store.get_many([key, other]) == [b"0123456789", b"2345"]


async def test_a_large_value_goes_in_pieces(store: Store, key: str) -> None:
    size = 20 * MB + 1
    async with store.allocate(size) as buffer:
        assert buffer.view is not None
        buffer.view[:] = os.urandom(MB) * 20 + b"!"
        async with store.put_session({key: size}) as session:
            await session.write(key, 0, buffer)
        async with store.allocate(size) as back, store.get_session([key]) as reading:
            assert await reading.read_into(key, 0, back) == size
            assert back.view == buffer.view
    await store.remove(key, force=True)


async def test_a_put_session_that_fails_stores_nothing(store: Store, key: str) -> None:
    entered = asyncio.Event()

    async def write(ranges: list[tuple[int, int]], end: Callable[[], Awaitable[object]]) -> None:
        async with store.put_session({key: 10}) as session:
            for start, stop in ranges:
                await session.write(key, start, buffer[start:stop])
            entered.set()
            await end()

    async def fail() -> None:
        raise ZeroDivisionError

    async with store.allocate(MB) as buffer:
        with pytest.raises(ZeroDivisionError):
            await write([(0, 10)], fail)
        assert not await store.exists(key)
        with pytest.raises(InvalidArgumentError, match="not written as a whole: nothing"):
            await write([(0, 4), (5, 10)], entered.wait)
        assert not await store.exists(key)
        entered.clear()
        hanging = asyncio.ensure_future(write([(0, 10)], asyncio.Event().wait))
        await entered.wait()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
    await store.put(key, b"free again")
    assert await store.get(key) == b"free again"


async def test_put_sessions_that_can_not_be(store: Store, key: str) -> None:
    other = f"{key} other"
    await store.put(key, b"taken")
    for sizes, complaint in (
        ({}, "needs a key"),
        ([key], "a mapping"),
        ({key: 0}, "empty value"),
        ({key: -1}, "put_session: the size of '.*'=-1 is not usable"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            store.put_session(sizes)  # type: ignore[arg-type]
    with pytest.raises(ObjectExistsError):
        async with store.put_session({key: 10}):
            pytest.fail("it began")
    with pytest.raises(BatchError) as failed:
        async with store.put_session({key: 10, other: 10}):
            pytest.fail("it began")
    assert list(failed.value.errors) == [key]
    with pytest.raises(InvalidArgumentError, match="as a whole, nor was 1 of the others: nothing"):
        async with store.put_session({f"{key} a": 1, f"{key} b": 1}):
            pass
    with pytest.raises(InvalidArgumentError, match="as a whole, nor were 2 of the others"):
        async with store.put_session({f"{key} a": 1, f"{key} b": 1, f"{key} c": 1}):
            pass
    async with store.allocate(MB) as buffer, store.put_session({other: 10}) as session:
        with pytest.raises(InvalidArgumentError, match="entered once"):
            # What was written belongs to the first value: the second would be anybody's bytes.
            await session.__aenter__()
        with pytest.raises(ObjectExistsError, match="writing the key already"):
            async with store.put_session({other: 10}):
                pytest.fail("it began")
        for offset, memory in ((8, buffer[0:5]), (-1, buffer[0:1]), (10, buffer[0:1])):
            with pytest.raises(InvalidArgumentError, match="the value has 10 bytes"):
                await session.write(other, offset, memory)
        with pytest.raises(InvalidArgumentError, match="not one of the session's"):
            await session.write(key, 0, buffer[0:1])
        with pytest.raises(InvalidArgumentError, match="registered memory"):
            await session.write(other, 0, b"v")  # type: ignore[arg-type]
        await session.write(other, 0, buffer[0:10])
    assert await store.size(other) == 10


async def test_a_get_session_reads_ranges(store: Store, key: str) -> None:
    missing = f"{key} missing"
    await store.put(key, b"0123456789")
    async with store.allocate(MB) as buffer:
        assert buffer.view is not None
        async with store.get_session([key, missing, key]) as session:
            assert isinstance(session, GetSession)
            assert session.sizes == {key: 10}
            assert await session.read_into(key, 4, buffer[0:3]) == 3
            assert await session.read_into(key, 8, buffer[3:100]) == 2
            assert bytes(buffer.view[:5]) == b"45689"
            assert await session.read_into(missing, 0, buffer) is None
            await store.get(key)  # another read of the key does not end it
            assert await session.read_into(key, 0, buffer) == 10
            for offset in (10, -1):
                with pytest.raises(InvalidArgumentError, match="the value has 10 bytes"):
                    await session.read_into(key, offset, buffer)
            with pytest.raises(InvalidArgumentError, match="not one of the session's"):
                await session.read_into("other", 0, buffer)
        with pytest.raises(InvalidArgumentError, match="open session"):
            await session.read_into(key, 0, buffer)
    with pytest.raises(InvalidArgumentError, match="needs a key"):
        store.get_session([])


async def test_a_get_session_outlives_another_one_of_the_key(store: Store, key: str) -> None:
    """The engine has one session per client and key; whoever ends it, ends it for all."""
    await store.put(key, b"0123456789")
    async with store.allocate(MB) as buffer, store.get_session([key]) as session:
        async with store.get_session([key]) as other:
            assert await other.read_into(key, 0, buffer) == 10
        assert await session.read_into(key, 0, buffer) == 10


@pytest.mark.parametrize("how", ["remove", "upsert"])
async def test_a_get_session_notices_another_value(store: Store, key: str, how: str) -> None:
    await store.put(key, b"0123456789")
    async with store.allocate(MB) as buffer, store.get_session([key]) as session:
        if how == "remove":
            await store.remove(key, force=True)
        else:
            await store.upsert(key, b"a longer value than before")
        with pytest.raises(ReplicaError, match="changed meanwhile"):
            await session.read_into(key, 0, buffer)


async def test_a_get_session_does_not_notice_a_value_in_the_same_place(
    store: Store, key: str
) -> None:
    """The engine writes an upsert of the same size over the old value, and tells no version.

    Should this fail one day, the sentences on it in docs/segments.md can go.
    """
    await store.put(key, b"aaaaaaaaaa")
    async with store.allocate(MB) as buffer, store.get_session([key]) as session:
        assert buffer.view is not None
        await session.read_into(key, 0, buffer[0:5])
        await store.upsert(key, b"bbbbbbbbbb")
        await session.read_into(key, 5, buffer[5:10])
        assert bytes(buffer.view[:10]) == b"aaaaabbbbb"


async def test_a_get_session_under_a_frozen_master_says_so(
    own_cluster: LocalCluster, open_store: OpenStore, key: str
) -> None:
    """The bytes come, but whether they are the key's can't be asked; it said "changed" (-300)."""
    store = await open_store(own_cluster.address, global_segment_size=16 * MB, local_buffer_size=MB)
    await store.put(key, b"0123456789")
    async with store.allocate(MB) as buffer, store.get_session([key]) as session:
        assert await session.read_into(key, 0, buffer) == 10
        await own_cluster.pause()
        try:
            with pytest.raises(RpcError) as failed:
                await session.read_into(key, 5, buffer)
        finally:
            await own_cluster.resume()
        assert failed.value.code in (-900, -901)
        assert failed.value.retryable


# --- what would end the process ---------------------------------------------------------------


def test_reads_beside_the_end_of_a_segment_do_no_harm(lenders_cluster: LocalCluster) -> None:
    """The engine unmaps a segment at once, also under reads of its own client: SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-m", segment_scenes.__name__, lenders_cluster.address],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr

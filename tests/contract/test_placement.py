"""Where values are placed, and what a store tells about it, on both engines.

The real engine runs on a master of its own, with the second segment in another process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from aiomooncake import (
    BatchError,
    InternalError,
    InvalidArgumentError,
    LocalCluster,
    MooncakeError,
    NoSpaceError,
    ObjectLeasedError,
    OffloadError,
    Replica,
    ReplicateConfig,
    RpcError,
    Store,
    connect,
)
from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.master import segments
from aiomooncake.replicas import replicas_of_keys
from aiomooncake.testing import LoopStallProbe
from tests.adversity.processes import Peer
from tests.contract.engines import Engine, Memory

KB, MB = 1 << 10, 1 << 20
HERE, THERE = 512 * MB, 32 * MB
ABSENT = "192.0.2.1:9"  # an address for documentation: no segment has it


@dataclass(frozen=True)
class Places:
    """A store, and two segments: its own, and a smaller one of a peer.

    Attributes:
        store: The store.
        here: The name of its own segment.
        there: The name of the other one.
        endpoints: Where the transports of both listen, by name.
    """

    store: Store
    here: str
    there: str
    endpoints: dict[str, str]

    async def names(self, key: str) -> list[str]:
        """Tell on which segments a value lies, in the engine's order."""
        names = {endpoint: name for name, endpoint in self.endpoints.items()}
        return [names[replica.endpoint or ""] for replica in await self.store.replicas(key)]


@pytest.fixture(scope="module", params=["memory", "real"])
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    opened = _in_memory() if request.param == "memory" else _real()
    yield next(opened)
    next(opened, None)


def _in_memory() -> Iterator[Places]:
    engine = InMemoryEngine(lease_ttl=2)

    async def both() -> tuple[Store, Store]:
        return await _open("memory://placement", engine=engine), await connect(
            "memory://placement", engine=engine, global_segment_size=THERE
        )

    store, peer = asyncio.run(both())
    endpoints = {each.hostname: each.endpoint for each in engine._segments.values()}
    yield Places(store, store.hostname, peer.hostname, endpoints)
    asyncio.run(store.aclose())
    asyncio.run(peer.aclose())


def _real() -> Iterator[Places]:
    # Without eviction: a put that finds no room makes the master let go of values.
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        with Peer(master.address, keys=0, segment=THERE) as peer:
            store = asyncio.run(_open(master.address))
            mounted = asyncio.run(segments("127.0.0.1", master.metrics_port, 5))
            endpoints = {each.name: each.endpoint for each in mounted}
            yield Places(store, store.hostname, peer.hostname, endpoints)
        asyncio.run(store.aclose())


async def _open(target: str, **options: Any) -> Store:
    # Large, because the master keeps the room of a value that an upsert of another size has
    # replaced for ten minutes (--put_start_release_timeout_sec). Only there are such values.
    return await connect(
        target, global_segment_size=HERE, local_buffer_size=16 * MB, rank=3, **options
    )


@pytest.fixture(autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "places" in request.fixturenames:
        places: Places = request.getfixturevalue("places")
        await places.store.remove_all(force=True)


@pytest.fixture
def keys() -> Callable[[int], list[str]]:
    prefix = uuid.uuid4().hex
    return lambda count: [f"{prefix}-{i}" for i in range(count)]


@pytest.fixture
def key(keys: Callable[[int], list[str]]) -> str:
    return keys(1)[0]


def content(size: int) -> bytes:
    block = bytes(range(251))
    return (block * (size // len(block) + 1))[:size]


# --- the verbs that write ---------------------------------------------------------------------

Write = Callable[[Store, str, bytes, ReplicateConfig], Awaitable[object]]


async def _put_from(store: Store, key: str, value: bytes, config: ReplicateConfig) -> None:
    async with store.allocate(len(value)) as buffer:
        assert buffer.view is not None
        buffer.view[:] = value
        await store.put_from(key, buffer, config=config)


async def _put_slices_from(store: Store, key: str, value: bytes, config: ReplicateConfig) -> None:
    async with store.allocate(len(value)) as buffer:
        assert buffer.view is not None
        buffer.view[:] = value
        await store.put_from(key, [buffer[:100], buffer[100:]], config=config)


async def _put_many_from(store: Store, key: str, value: bytes, config: ReplicateConfig) -> None:
    async with store.allocate(len(value)) as buffer:
        assert buffer.view is not None
        buffer.view[:] = value
        await store.put_many_from({key: buffer}, config=config)


WRITES: dict[str, Write] = {
    "put": lambda store, key, value, config: store.put(key, value, config=config),
    "put of memory that may change": lambda store, key, value, config: store.put(
        key, bytearray(value), config=config
    ),
    "upsert": lambda store, key, value, config: store.upsert(key, value, config=config),
    "put_parts": lambda store, key, value, config: store.put_parts(
        key, value[:100], value[100:], config=config
    ),
    "put_many": lambda store, key, value, config: store.put_many({key: value}, config=config),
    "put_from": _put_from,
    "put_from of slices": _put_slices_from,
    "put_many_from": _put_many_from,
}
# A value that travels with others, one that travels alone, and one in pieces.
SIZES = {"4 KB": 4 * KB, "2 MB": 2 * MB, "9 MB": 9 * MB}


@pytest.fixture(params=[pytest.param(write, id=name) for name, write in WRITES.items()])
def write(request: pytest.FixtureRequest) -> Write:
    written: Write = request.param
    return written


@pytest.fixture(params=[pytest.param(content(size), id=name) for name, size in SIZES.items()])
def value(request: pytest.FixtureRequest) -> bytes:
    data: bytes = request.param
    return data


async def test_a_value_lies_on_the_preferred_segment(
    places: Places, keys: Callable[[int], list[str]], write: Write, value: bytes
) -> None:
    wanted = [
        (places.there, ReplicateConfig(preferred_segments=[places.there])),
        (places.here, ReplicateConfig(preferred_segments=[ABSENT, places.here, places.there])),
        (places.there, ReplicateConfig(preferred_segment=places.there)),
        (places.here, ReplicateConfig(preferred_segment=places.here)),
    ]
    for key, (name, config) in zip(keys(4), wanted, strict=True):
        await write(places.store, key, value, config)
        assert await places.names(key) == [name]
        assert await places.store.get(key) == value


async def test_two_copies_lie_on_two_segments(
    places: Places, keys: Callable[[int], list[str]], write: Write, value: bytes
) -> None:
    order = [places.there, places.here]
    first, second = keys(2)
    await write(places.store, first, value, ReplicateConfig(2))
    assert sorted(await places.names(first)) == sorted(order)
    await write(places.store, second, value, ReplicateConfig(2, preferred_segments=order))
    assert await places.names(second) == order
    assert await places.store.get(second) == value


async def test_pins_and_types_are_taken(
    places: Places, key: str, write: Write, value: bytes
) -> None:
    config = ReplicateConfig(
        with_hard_pin=True, soft_pin_action="enable", soft_pin_ttl_ms=60_000, data_type="kvcache"
    )
    await write(places.store, key, value, config)
    assert await places.store.get(key) == value


async def test_a_key_keeps_its_routing_group(
    places: Places, keys: Callable[[int], list[str]], write: Write, value: bytes
) -> None:
    store = places.store
    grouped, free = keys(2)
    await write(store, grouped, value, _grouped("red", places.here))
    await write(store, free, value, _grouped("", places.here))
    for key, group in itertools.product((grouped, free), ("red", "blue", "")):
        fits = group == ("red" if key == grouped else "")
        if fits:
            await store.upsert(key, b"new", config=_grouped(group))
        else:
            with pytest.raises(InvalidArgumentError) as caught:
                await store.upsert(key, b"refused", config=_grouped(group))
            assert (caught.value.code, caught.value.key) == (-600, key)
            assert "the key has another routing group" in str(caught.value)
        # What names no group changes none, also when it makes the value anew.
        await store.upsert(key, b"newer")
        assert await store.get(key) == b"newer"
    await store.remove(grouped, force=True)
    await write(store, grouped, value, _grouped("blue", places.here))
    await store.upsert(grouped, b"blue", config=_grouped("blue"))


async def test_a_put_of_a_key_that_is_there_does_not_look_at_its_group(
    places: Places, key: str, write: Write
) -> None:
    await places.store.put(key, b"first", config=ReplicateConfig(group_ids=["red"]))
    if write is WRITES["upsert"]:
        return
    await write(places.store, key, content(200), ReplicateConfig(group_ids=["blue"]))
    assert await places.store.get(key) == b"first"


async def test_groups_stay_with_their_keys_when_calls_are_merged(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    store = places.store
    wanted = keys(300)
    groups = [("red", "blue", "")[i % 3] for i in range(300)]
    each = dict(zip(wanted, groups, strict=True))
    half = len(wanted) // 2
    await asyncio.gather(
        store.put_many(
            dict.fromkeys(wanted[:half], b"value"), config=ReplicateConfig(group_ids=groups[:half])
        ),
        *[store.put(key, b"value", config=_grouped(each[key])) for key in wanted[half:]],
    )
    calls = store.stats().calls
    right = [store.upsert(key, b"right", config=_grouped(group)) for key, group in each.items()]
    await asyncio.gather(*right)
    assert store.stats().calls - calls < 20, "they were not merged"
    wrong = [
        store.upsert(key, b"wrong", config=_grouped("red" if group != "red" else "blue"))
        for key, group in each.items()
    ]
    answers = await asyncio.gather(*wrong, return_exceptions=True)
    assert {type(answer) for answer in answers} == {InvalidArgumentError}
    assert await store.get_many(wanted) == [b"right"] * 300


def _grouped(group: str, segment: str = "") -> ReplicateConfig:
    return ReplicateConfig(group_ids=[group], preferred_segment=segment)


async def test_large_and_small_values_of_one_call_have_groups_of_their_own(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    store = places.store
    items = dict(
        zip(keys(4), (content(9 * MB), b"small", bytearray(content(2 * MB)), b"s"), strict=True)
    )
    groups = ["a", "b", "c", "d"]
    config = ReplicateConfig(group_ids=groups, preferred_segment=places.here)
    await store.put_many(items, config=config)
    for key, group in zip(items, groups, strict=True):
        with pytest.raises(InvalidArgumentError):
            await store.upsert(key, b"new", config=_grouped("e"))
        await store.upsert(key, b"new", config=_grouped(group))


async def test_a_lease_of_one_member_holds_its_group(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    store = places.store
    read, other, stranger = keys(3)
    config = ReplicateConfig(group_ids=["g", "g", ""])
    await store.put_many({read: b"1", other: b"2", stranger: b"3"}, config=config)
    assert await store.get(read) == b"1"
    with pytest.raises(ObjectLeasedError):
        await store.remove(other)
    assert await store.remove(stranger)


# --- what the engine does not do --------------------------------------------------------------


async def test_a_preferred_segment_that_is_not_there_is_passed_over(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    endpoint = places.endpoints[places.there]
    host = places.there.rpartition(":")[0]
    for key, name in zip(keys(3), (ABSENT, endpoint, host), strict=True):
        await places.store.put(key, b"value", config=ReplicateConfig(preferred_segments=[name]))
        assert await places.store.get(key) == b"value"


async def test_a_preferred_segment_that_is_full_is_passed_over(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    store = places.store
    first, second, third, copies = keys(4)
    config = ReplicateConfig(preferred_segments=[places.there])
    await store.put(first, bytes(20 * MB), config=config)
    await store.put(second, bytes(20 * MB), config=config)
    assert await places.names(first) == [places.there]
    assert await places.names(second) == [places.here]
    with pytest.raises(NoSpaceError):
        await store.put(third, bytes(HERE), config=config)
    # Silently fewer copies than were asked for.
    await store.put(copies, bytes(20 * MB), config=ReplicateConfig(2))
    assert await places.names(copies) == [places.here]


async def test_more_copies_than_segments_are_as_many_as_there_are(places: Places, key: str) -> None:
    await places.store.put(key, b"value", config=ReplicateConfig(5))
    assert sorted(await places.names(key)) == sorted([places.here, places.there])


async def test_a_value_lies_on_the_own_host(
    places: Places, key: str, write: Write, value: bytes
) -> None:
    """Only the engine's calls of several buffers know the option; all of this is one host."""
    config = ReplicateConfig(prefer_alloc_in_same_node=True)
    if write is WRITES["upsert"]:
        with pytest.raises(InvalidArgumentError, match="prefer_alloc_in_same_node is known to put"):
            await write(places.store, key, value, config)
        return
    await write(places.store, key, value, config)
    assert await places.store.get(key) == value
    assert len(await places.names(key)) == 1


async def test_an_upsert_of_the_same_size_leaves_the_value_where_it_is(
    places: Places, key: str
) -> None:
    store = places.store
    here = ReplicateConfig(2, preferred_segments=[places.here])
    await store.put(key, b"12345", config=ReplicateConfig(preferred_segments=[places.there]))
    await store.upsert(key, b"54321", config=here)
    assert await places.names(key) == [places.there]
    await store.upsert(key, b"another size", config=here)
    assert await places.names(key) == [places.here, places.there]


async def test_copies_that_are_not_in_memory_are_refused(
    places: Places, key: str, write: Write, value: bytes
) -> None:
    """The usual wheels are built without the other pools."""
    for config, code, kind in (
        (ReplicateConfig(nof_replica_num=1), -600, InvalidArgumentError),
        (ReplicateConfig(dfs_replica_num=1), -1601, OffloadError),
        (
            # Longer than the master's --max_kv_soft_pin_ttl, which is a day.
            ReplicateConfig(soft_pin_action="enable", soft_pin_ttl_ms=90_000_000),
            -600,
            InvalidArgumentError,
        ),
    ):
        with pytest.raises((kind, BatchError)) as caught:
            await write(places.store, key, value, config)
        assert caught.value.code == code
    assert not await places.store.exists(key)


# --- replicas ---------------------------------------------------------------------------------


async def test_replicas_tell_size_and_place(
    places: Places, keys: Callable[[int], list[str]]
) -> None:
    first, second, missing = keys(3)
    await places.store.put(first, content(1234), config=ReplicateConfig(2))
    await places.store.put(second, b"v", config=ReplicateConfig(preferred_segment=places.there))
    here, there = (
        Replica("memory", "complete", 1234, endpoint=places.endpoints[name])
        for name in (places.here, places.there)
    )
    found = await places.store.replicas(first)
    assert set(found) == {here, there}
    assert len(found) == 2
    one = (Replica("memory", "complete", 1, endpoint=places.endpoints[places.there]),)
    assert await places.store.replicas(second) == one
    assert await places.store.replicas(missing) == ()
    answers = await places.store.replicas_many([second, missing, first, second])
    assert answers == [one, (), found, one]
    assert await places.store.replicas_many([]) == []


async def test_a_value_that_is_not_finished_is_not_there_yet(places: Places, key: str) -> None:
    assert await places.store.engine.batch_put_session_start([key], [10]) == [0]
    assert await places.store.replicas(key) == ()
    assert await places.store.engine.batch_put_session_revoke([key]) == [0]


async def test_asking_for_replicas_renews_the_lease(places: Places, key: str) -> None:
    await places.store.put(key, b"value")
    await places.store.replicas(key)
    with pytest.raises(ObjectLeasedError):
        await places.store.remove(key)


async def test_replicas_of_many_keys_leave_the_loop_free(places: Places) -> None:
    store = places.store
    wanted = [f"many-{i}" for i in range(3000)]
    await store.put_many(dict.fromkeys(wanted, b"value"))
    async with LoopStallProbe() as probe:
        answers = await store.replicas_many([*wanted, "missing"])
    assert [len(answer) for answer in answers] == [1] * 3000 + [0]
    assert probe.longest < 0.5, probe.stalls()


@pytest.mark.parametrize("bad", ["", 1, None, "\ud800"])
async def test_bad_keys_are_refused(places: Places, bad: Any) -> None:
    calls = places.store.stats().calls
    with pytest.raises(InvalidArgumentError, match="replicas got"):
        await places.store.replicas(bad)
    with pytest.raises(InvalidArgumentError, match="replicas_many"):
        await places.store.replicas_many(["fine", bad])
    with pytest.raises(InvalidArgumentError, match="put it into a list"):
        await places.store.replicas_many("one key")
    assert places.store.stats().calls == calls


# --- replicas: a failure is not a miss --------------------------------------------------------


@pytest.fixture
async def staged() -> AsyncIterator[tuple[InMemoryEngine, Store]]:
    engine = InMemoryEngine(rpc_timeout=0.05)
    async with connect("memory://staged", engine=engine, rank=3) as store:
        await store.put_many({"a": b"1", "b": b"2"})
        yield engine, store


async def test_an_answer_that_failed_once_is_asked_for_again(
    staged: tuple[InMemoryEngine, Store],
) -> None:
    engine, store = staged
    fault = engine.fault("batch_get_replica_desc", code=-900, times=2)
    answers = await store.replicas_many(["a", "missing", "b"])
    assert [len(answer) for answer in answers] == [1, 0, 1]
    assert fault.hits == 2


async def test_an_answer_that_stays_away_is_an_error(
    staged: tuple[InMemoryEngine, Store],
) -> None:
    engine, store = staged
    engine.fault("batch_get_replica_desc", code=-900)
    assert await store.replicas("missing") == ()
    with pytest.raises(InternalError, match="the key is there, but not where") as caught:
        await store.replicas("a")
    assert (caught.value.key, caught.value.rank) == ("a", 3)
    with pytest.raises(BatchError, match="replicas_many failed for 2 of 3") as many:
        await store.replicas_many(["a", "missing", "b"])
    assert many.value.results[1] == ()
    answers = await store.replicas_many(["missing", "a"], return_exceptions=True)
    assert answers[0] == ()
    assert isinstance(answers[1], InternalError)


@pytest.mark.parametrize("trouble", ["down", "freeze"])
async def test_a_master_that_is_gone_is_an_error(
    staged: tuple[InMemoryEngine, Store], trouble: str
) -> None:
    engine, store = staged
    getattr(engine, trouble)()
    for key in ("a", "missing"):
        with pytest.raises(MooncakeError) as caught:
            await store.replicas(key)
        assert caught.value.code == {"down": -900, "freeze": -901}[trouble]
        assert caught.value.key == key
    engine.up()
    engine.thaw()
    assert len(await store.replicas("a")) == 1


async def test_a_real_master_that_is_gone_is_an_error(
    own_cluster: LocalCluster, open_store: Callable[..., Awaitable[Store]]
) -> None:
    store = await open_store(own_cluster.address, global_segment_size=32 * MB)
    await store.put("a", b"1")
    await own_cluster.kill()
    async with LoopStallProbe() as probe:
        with pytest.raises(RpcError):
            await store.replicas("a")
    assert probe.longest < 0.5, probe.stalls()
    await own_cluster.start()  # closing without a master takes ten seconds


# --- replicas: what a descriptor can say ------------------------------------------------------


class _Descriptor:
    """One of the engine's descriptors, of a kind that can't be staged here."""

    def __init__(self, kind: str, status: str = "COMPLETE", **place: Any) -> None:
        self.status = SimpleNamespace(name=status)
        self._kind = kind
        self._place = SimpleNamespace(**place)

    def is_memory_replica(self) -> bool:
        return self._kind == "memory"

    def is_disk_replica(self) -> bool:
        return self._kind == "disk"

    def is_local_disk_replica(self) -> bool:
        return self._kind == "local disk"

    def get_disk_descriptor(self) -> Any:
        return self._place


class _OldDescriptor(_Descriptor):
    is_local_disk_replica = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("descriptor", "replica"),
    [
        (
            _Descriptor("disk", file_path="/f/k", object_size=7),
            Replica("disk", "complete", 7, path="/f/k"),
        ),
        (_Descriptor("local disk", "PROCESSING"), Replica("local_disk", "processing")),
        (_Descriptor("NVMe over Fabrics", "FAILED"), Replica("other", "failed")),
        (_Descriptor("local disk", "A_NEW_WORD"), Replica("local_disk", "unknown")),
        (_OldDescriptor("local disk"), Replica("other", "complete")),
    ],
)
def test_every_kind_of_copy_is_told(descriptor: Any, replica: Replica) -> None:
    client: Any = SimpleNamespace(
        native_object=SimpleNamespace(batch_get_replica_desc=lambda _: {"k": [descriptor]})
    )
    assert replicas_of_keys(client, lambda _: [], ["k"]) == [(replica,)]
    with pytest.raises(AttributeError):
        replica.size = 3  # type: ignore[misc]


# --- the engines' own answers -----------------------------------------------------------------


def test_groups_of_native_calls(
    engine: Engine, native: NativeStore, keys: Callable[[int], list[str]]
) -> None:
    a, b, c, parts, ranges = keys(5)
    memory = Memory(b"abcdef")
    pointers, sizes = [memory.ptr] * 3, [3, 3, 3]
    groups = engine.config(group_ids=["red", "", "blue"])
    assert native.batch_put_from([a, b, c], pointers, sizes, groups) == [0, 0, 0]
    turned = engine.config(group_ids=["red", "blue", "red"])
    assert native.batch_upsert_from([a, b, c], pointers, sizes, turned) == [0, -600, -600]
    assert native.upsert_batch([a, b, c], [b"1", b"2", b"3"], turned) == -600
    assert native.upsert_batch([a, b, c], [b"1", b"2", b"3"], groups) == 0
    red = engine.config(group_ids=["red"])
    assert native.batch_put_from_multi_buffers([parts], [[memory.ptr]], [[3]], red) == [0]
    assert native.batch_put_session_start([ranges], [3], red) == [0]
    assert native.upsert(ranges, b"value", engine.config(group_ids=["blue"])) == -600
    assert native.batch_put_session_end([ranges]) == [0]
    for key in (parts, ranges):
        assert native.upsert(key, b"value", engine.config(group_ids=[""])) == -600
        assert native.upsert(key, b"value", red) == 0


def test_groups_must_be_as_many_as_keys(engine: Engine, native: NativeStore, key: str) -> None:
    memory = Memory(b"abc")
    for count in (0, 2):
        wrong = engine.config(group_ids=["red"] * count)
        assert native.put(key, b"value", wrong) == -600
        assert native.upsert(key, b"value", wrong) == -600
        assert native.put_batch([key], [b"value"], wrong) == -600
        assert native.batch_put_from([key], [memory.ptr], [3], wrong) == [-600]
        assert native.batch_put_from_multi_buffers([key], [[memory.ptr]], [[3]], wrong) == [-600]
        assert native.batch_put_session_start([key], [3], wrong) == [-600]
    assert native.is_exist(key) == 0


def test_options_that_the_engine_refuses(engine: Engine, native: NativeStore, key: str) -> None:
    memory = Memory(b"abc")
    for options, code in (
        ({"replica_num": 0}, -600),
        ({"nof_replica_num": 1}, -600),
        ({"dfs_replica_num": 1}, -1601),
        ({"dfs_replica_num": 2}, -600),
        ({"soft_pin_ttl_ms": 1000}, -600),
    ):
        config = engine.config(**options)
        assert native.put(key, b"value", config) == code
        assert native.upsert(key, b"value", config) == code
        assert native.put_batch([key], [b"value"], config) == code
        assert native.batch_put_from([key], [memory.ptr], [3], config) == [code]
        assert native.batch_put_from_multi_buffers([key], [[memory.ptr]], [[3]], config) == [code]
        assert native.batch_put_session_start([key], [3], config) == [code]
    assert native.is_exist(key) == 0


def test_only_the_calls_of_several_buffers_place_on_the_own_host(
    engine: Engine, native: NativeStore, keys: Callable[[int], list[str]]
) -> None:
    one, two = keys(2)
    memory = Memory(b"abc")
    config = engine.config(prefer_alloc_in_same_node=True)
    assert native.put(one, b"value", config) == -600
    assert native.put_from(one, memory.ptr, 3, config) == -600
    assert native.batch_put_from([one], [memory.ptr], [3], config) == [-600]
    assert native.upsert_from(one, memory.ptr, 3, config) == -600
    assert native.batch_put_from_multi_buffers([one], [[memory.ptr]], [[3]], config) == [0]
    assert native.batch_put_session_start([two], [3], config) == [0]
    assert native.batch_put_session_end([two]) == [0]


# --- pins -------------------------------------------------------------------------------------


async def test_pinned_values_survive_eviction(
    own_cluster: LocalCluster, open_store: Callable[..., Awaitable[Store]]
) -> None:
    """The in-memory engine evicts nothing, so this is for the real one alone."""
    store = await open_store(own_cluster.address, global_segment_size=32 * MB)
    value = content(MB)
    pins = {
        "hard": ReplicateConfig(with_hard_pin=True),
        "soft": ReplicateConfig(soft_pin_action="enable"),
    }
    for key, config in pins.items():
        await store.put(key, value, config=config)
    plain = [f"plain-{i}" for i in range(8)]
    await store.put_many(dict.fromkeys(plain, value))
    stored, deadline = 0, time.monotonic() + 40
    while stored < 100:  # three times what there is room for
        assert time.monotonic() < deadline, f"nothing is evicted: {stored} stored"
        try:
            await store.put(f"filler-{stored}", value)
            stored += 1
        except NoSpaceError:
            await asyncio.sleep(0.05)  # the master evicts in rounds of its own
    assert await store.get_many(list(pins)) == [value, value]
    assert not all(await store.exists_many(plain))

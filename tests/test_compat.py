"""The drop-in beside the wheel's own class: same calls, same results; and where it is better."""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import ctypes
import gc
import inspect
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvloop

from aiomooncake import (
    LocalCluster,
    NotSupportedError,
    ReplicateConfig,
    StoreClosedError,
    StoreConfig,
    WrongLoopError,
)
from aiomooncake._native_arguments import read_placement, read_setup
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import LoopStallProbe
from tests import compat_scenes as scenes
from tests.adversity.processes import run_scene

if TYPE_CHECKING:
    from blockbuster import BlockBuster

    from aiomooncake.compat import MooncakeDistributedStoreAsync

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the drop-in loads the engine, which has Linux wheels only"
)

MB = 1 << 20
SEGMENT, LOCAL_BUFFER = 64 * MB, 16 * MB
SOON = 3.0  # seconds; ten times what takes a fraction of one


def new_store() -> MooncakeDistributedStoreAsync:
    # Not at the top: where there is no wheel, this module is collected too.
    from aiomooncake.compat import MooncakeDistributedStoreAsync

    return MooncakeDistributedStoreAsync()


def setup_arguments(master: str, local_buffer: int = LOCAL_BUFFER) -> tuple[Any, ...]:
    return ("127.0.0.1", "P2PHANDSHAKE", SEGMENT, local_buffer, "tcp", "", master)


def native_config(**options: Any) -> Any:
    from mooncake.store import ReplicateConfig as NativeConfig

    config = NativeConfig()
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import it where no loop runs, as its users do: it loads the engine."""
    new_store()


class Side:
    """One of the classes, called in one of its two forms."""

    def __init__(self, store: Any, form: str, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.store = store
        self.name = name
        self._form = form
        self._loop = loop

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call; a TypeError is an answer too."""
        try:
            if self._form == "blocking":
                return getattr(self.store, method)(*args, **kwargs)
            call = getattr(self.store, f"async_{method}")
            return self._loop.run_until_complete(call(*args, **kwargs))
        except TypeError:
            return TypeError


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


SetUp = Callable[[Any], int]
"""Sets an object of either class up."""


@pytest.fixture(scope="module", params=["real", "dummy"])
def set_up(request: pytest.FixtureRequest) -> Iterator[SetUp]:
    """Set up a client of this process, or a "dummy" one of a client process beside it."""
    if request.param == "real":
        address = request.getfixturevalue("cluster").address
        yield lambda store: store.setup(*setup_arguments(address))
        return
    with LocalCluster() as cluster:
        client = cluster.blocking.start_client()
        yield lambda store: store.setup_dummy(SEGMENT, LOCAL_BUFFER, client.address)


@pytest.fixture(scope="module")
def ours(set_up: SetUp) -> Iterator[MooncakeDistributedStoreAsync]:
    store = new_store()
    assert set_up(store) == 0
    yield store
    assert store.close() == 0


@pytest.fixture(scope="module")
def original(set_up: SetUp, ours: MooncakeDistributedStoreAsync) -> Iterator[Any]:
    """The wheel's own object; the engine was loaded by ours, so that time-outs are the same."""
    from mooncake.async_store import MooncakeDistributedStoreAsync as Original

    store = Original()
    assert set_up(store) == 0
    yield store
    assert store.close() == 0


@pytest.fixture(params=["blocking", "awaited"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sides(
    original: Any,
    ours: MooncakeDistributedStoreAsync,
    form: str,
    loop: asyncio.AbstractEventLoop,
) -> list[Side]:
    return [Side(original, form, loop, "original"), Side(ours, form, loop, "ours")]


@pytest.fixture
def side(sides: list[Side]) -> Side:
    """Ours, in either form."""
    return sides[1]


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def store(cluster: LocalCluster) -> AsyncIterator[MooncakeDistributedStoreAsync]:
    """A store of the test's own, set up in its loop."""
    store = new_store()
    assert await store.async_setup(*setup_arguments(cluster.address)) == 0
    yield store
    assert await store.async_close() == 0


@pytest.fixture
async def in_memory(key: str) -> AsyncIterator[MooncakeDistributedStoreAsync]:
    store = new_store()
    assert await store.async_setup(*setup_arguments(f"memory://{key}")) == 0
    yield store
    await store.async_close()


@pytest.fixture
def may_block(blockbuster: BlockBuster) -> Iterator[None]:
    """Let synchronous calls block the loop, as their caller asks."""
    blockbuster.deactivate()
    yield
    blockbuster.activate()


@pytest.fixture
def no_master(unused_port: int) -> str:
    return f"127.0.0.1:{unused_port}"


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- the same results -------------------------------------------------------------------------

Do = Callable[..., Any]
"""A call of one side: the method's name and its arguments."""


def single(do: Do, k: str) -> list[Any]:
    return [
        do("put", k, b"value"),
        do("get", k),
        do("is_exist", k),
        do("get_size", k),
        do("put", k, b"other"),  # 0, and the first value stays
        do("get", k),
        do("remove", k),  # leased by the read
        do("remove", k, True),
        do("remove", k, force=True),
        do("get", k),
        do("is_exist", k),
        do("get_size", k),
    ]


def by_name(do: Do, k: str) -> list[Any]:
    return [
        do("put", key=k, value=b"value"),
        do("upsert", key=k, value=b"longer value"),
        do("remove", key=f"{k}-missing", force=False),
        do("batch_is_exist", keys=[k, f"{k}-missing"]),
        do("put_batch", keys=[f"{k}1", f"{k}2"], values=[b"1", b"2"]),
        do("upsert_batch", keys=[f"{k}1", f"{k}2"], values=[b"3", b"4"]),
        do("get_batch", [k, f"{k}1", f"{k}2"]),
        do("get", key=k),  # these have no names
        do("is_exist", key=k),
        do("get_size", key=k),
        do("get_batch", keys=[k]),
    ]


def refused_keys(do: Do, k: str) -> list[Any]:
    bad = ["", None, 3, "\ud800", [k]]
    return [
        *(do("put", key, b"value") for key in bad),
        *(do("upsert", key, b"value") for key in bad),
        *(do(verb, key) for verb in ("get", "is_exist", "get_size", "remove") for key in bad),
        *(do("put_parts", key, b"value") for key in bad),
    ]


def keys_of_any_text(do: Do, k: str) -> list[Any]:
    keys = [f"{k} ü\0\n", "x" * 2000 + k, k.encode()]
    return [
        *(do("put", key, b"value") for key in keys),
        *(do(verb, key) for verb in ("get", "is_exist", "get_size") for key in keys),
        do("get_batch", keys),
        *(do("remove", key, True) for key in keys),
    ]


def refused_values(do: Do, k: str) -> list[Any]:
    bad = [b"", bytearray(), "text", None, 3, [b"value"]]
    return [
        *(do(verb, k, value) for verb in ("put", "upsert") for value in bad),
        *(do(verb, [k], [value]) for verb in ("put_batch", "upsert_batch") for value in bad),
        do("put", k),
        do("put", k, b"value", b"too many", None),
        do("put", k, b"value", None),
        do("put", k, b"value", 3),
        do("put", k, b"value", config=None),
        do("is_exist", k),
    ]


def values_of_all_kinds(do: Do, k: str) -> list[Any]:
    values = [
        bytearray(b"value"),
        memoryview(b"value"),
        np.arange(100, dtype=np.uint8),
        np.frombuffer(b"value" * 50000, dtype=np.int8),
        (ctypes.c_ubyte * 3)(1, 2, 3),
    ]
    codes = [do("put", f"{k}{i}", value) for i, value in enumerate(values)]
    keys = [f"{k}{i}" for i in range(len(values))]
    return [codes, [do("get", key) for key in keys], do("get_batch", keys)]


def many(do: Do, k: str) -> list[Any]:
    a, b, c = (f"{k}{i}" for i in range(3))
    return [
        do("put_batch", [a, b], [b"1", b"2"]),
        do("get_batch", [a, c, b]),
        do("get_batch", (a, b)),
        do("batch_is_exist", [a, c, b, ""]),
        do("put_batch", [b, c], [b"3", b"4"]),  # b keeps its value
        do("upsert_batch", [a, b], [b"5", b"6"]),
        do("get_batch", [a, b, c]),
        do("batch_remove", [a, a, f"{k}-missing"], True),
        do("batch_remove", [b], False),  # leased
        do("put_batch", [f"{k}d", f"{k}d"], [b"1", b"2"]),
        do("get", f"{k}d"),
    ]


def refused_batches(do: Do, k: str) -> list[Any]:
    return [
        do("get_batch", []),
        do("get_batch", [k, ""]),
        do("get_batch", k),
        do("get_batch", {k: 1}),
        do("get_batch", iter([k])),
        do("get_batch", [k, None]),
        do("put_batch", [], []),
        do("put_batch", [k], [b"1", b"2"]),
        do("put_batch", [k, f"{k}2"], [b"1", b""]),
        do("put_batch", [f"{k}3", ""], [b"1", b"2"]),
        do("put_batch", [k, f"{k}4"], [b"1", "text"]),
        do("put_batch", (f"{k}5", f"{k}6"), (b"1", b"2")),
        do("batch_is_exist", [k, f"{k}2", f"{k}3", f"{k}4", f"{k}5", f"{k}6"]),
        do("batch_is_exist", []),
        do("batch_remove", []),
        do("batch_get_buffer", [k]),
        do("batch_get_into", [], [], []),
        do("batch_get_into", [k, k], [1], [1]),
        do("batch_put_from", [], [], []),
    ]


def parts(do: Do, k: str) -> list[Any]:
    return [
        do("put_parts", k, b"ab", bytearray(b"cd"), memoryview(b"ef")),
        do("get", k),
        do("put_parts", f"{k}1", b"", b"x"),
        do("get", f"{k}1"),
        do("upsert_parts", f"{k}1", b"y", b"z"),
        do("get", f"{k}1"),
        do("put_parts", f"{k}2"),
        do("put_parts", f"{k}2", b"", b""),
        do("put_parts", ""),
        do("put_parts", key=f"{k}2"),
        do("is_exist", f"{k}2"),
        do("put_parts", f"{k}3", b"x", config=native_config()),
        do("put_parts", f"{k}4", b"x", config=None),
    ]


def memory(do: Do, k: str) -> list[Any]:
    block = ctypes.create_string_buffer(b"0123456789", 64)
    at = ctypes.addressof(block)
    found = [
        do("register_buffer", at, 64),
        do("register_buffer", at, 64),
        do("put_from", k, at, 4),
        do("batch_put_from", [f"{k}1", f"{k}2"], [at, at + 2], [2, 3]),
        do("upsert_from", f"{k}2", at, 5),
        do("get_into", k, at + 16, 16),
        do("get_into", k, at + 16, 2),
        do("get_into", f"{k}-missing", at + 16, 2),
        do("batch_get_into", [f"{k}1", f"{k}-missing"], [at + 32, at + 40], [8, 8]),
        do("batch_get_into", keys=[f"{k}2"], buffer_ptrs=[at + 48], sizes=[8]),
        do("batch_put_from_multi_buffers", [f"{k}3"], [[at, at + 4]], [[2, 2]]),
        do("batch_get_into_multi_buffers", [f"{k}3"], [[at + 56, at + 60]], [[2, 2]]),
        do("unregister_buffer", at),
        do("get", f"{k}3"),
    ]
    return [*found, block.raw]


def handles(do: Do, k: str) -> list[Any]:
    do("put_batch", [k, f"{k}1"], [b"value", b"other"])
    single = do("get_buffer", k)
    several = do("batch_get_buffer", [k, f"{k}1"])
    found = [bytes(single), single.size(), [bytes(handle) for handle in several]]
    return [found, do("get_buffer", f"{k}-missing")]


def placement(do: Do, k: str) -> list[Any]:
    from mooncake.store import ObjectDataType, SoftPinAction

    here = do("get_hostname")
    options: list[dict[str, Any]] = [
        {},
        {"preferred_segment": here},
        {"preferred_segments": [here], "replica_num": 1},
        {"with_hard_pin": True, "data_type": ObjectDataType.KVCACHE},
        {"soft_pin_action": SoftPinAction.ENABLE, "soft_pin_ttl_ms": 1000},
        {"group_ids": ["group"]},
        # Refused by the engine.
        {"replica_num": 0},
        {"group_ids": ["one", "too many"]},
        {"soft_pin_ttl_ms": 1000},
        {"preferred_segment": here, "preferred_segments": [here]},
    ]
    codes = [
        (
            do("put", f"{k}{i}", b"value", native_config(**each)),
            do("upsert", f"{k}{i}", b"value", config=native_config(**each)),
            do("put_batch", [f"{k}{i}b"], [b"value"], native_config(**each)),
        )
        for i, each in enumerate(options)
    ]
    grouped = native_config(group_ids=["a", "b"])
    return [codes, do("put_batch", [f"{k}x", f"{k}y"], [b"1", b"2"], grouped)]


def state(do: Do, k: str) -> list[Any]:
    host = do("get_hostname").partition(":")[0]
    found = [host, do("get_offload_rpc_read_count")]
    if host:  # a dummy client can't describe copies, and its original answers as for a miss
        found += [do("get_replica_desc", k), do("batch_get_replica_desc", [k])]
    return [*found, do("remove_by_regex", "("), do("remove_by_regex", f"^{k}$")]


STORIES = [
    single,
    by_name,
    refused_keys,
    keys_of_any_text,
    refused_values,
    values_of_all_kinds,
    many,
    refused_batches,
    parts,
    memory,
    handles,
    placement,
    state,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_both_classes_answer_the_same(
    sides: list[Side], story: Callable[[Do, str], list[Any]], key: str
) -> None:
    theirs, ours = (story(side, f"{key}-{side.name}") for side in sides)
    assert ours == theirs


def test_a_preferred_segment_is_where_the_value_goes(sides: list[Side], key: str) -> None:
    """Into the other client's memory, so that it is no accident."""
    theirs, side = sides
    if not theirs("get_hostname"):  # a dummy client has no segment
        return
    there = theirs("get_hostname")
    for verb in ("put", "upsert"):
        config = native_config(preferred_segment=there)
        assert side(verb, f"{key}{verb}", b"value", config) == 0
    endpoints = {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for verb in ("put", "upsert")
        for replica in side("get_replica_desc", f"{key}{verb}")
    }
    assert theirs("put", key, b"value", native_config(preferred_segment=there)) == 0
    (expected,) = theirs("get_replica_desc", key)
    there_too = expected.get_memory_descriptor().buffer_descriptor.transport_endpoint
    assert endpoints == {there_too}


async def test_health_is_told_in_the_binding_s_numbers(
    in_memory: MooncakeDistributedStoreAsync, key: str
) -> None:
    """Without the real engine: its health is that of its last ping, which a busy machine delays."""
    engine = InMemoryEngine.named(key)
    answers = [in_memory.health_check()]
    engine.down()
    answers += [in_memory.health_check(), await in_memory.async_health_check()]
    engine.up()
    answers += [await in_memory.async_health_check()]
    in_memory._open("")._client.gate.taint("a test said so")  # so it is to be set up again
    answers += [in_memory.health_check()]
    assert answers == [0, 2, 2, 0, 1]


def test_what_a_dummy_client_can_not_do_is_said(side: Side, key: str) -> None:
    assert side("put", key, b"value") == 0
    if side("get_hostname"):
        assert len(side("get_replica_desc", key)) == 1
        return
    with pytest.raises(NotSupportedError, match="dummy client can't do get_replica_desc"):
        side("get_replica_desc", key)


def test_all_placement_options_can_be_said_in_ours() -> None:
    """Otherwise such calls would go the engine's own way, and not be merged."""
    from mooncake.store import ObjectDataType, SoftPinAction
    from mooncake.store import ReplicateConfig as NativeConfig

    options: dict[str, Any] = {
        "replica_num": 2,
        "nof_replica_num": 1,
        "dfs_replica_num": 1,
        "preferred_segments": ["a", "b"],
        "preferred_nof_segments": ["c"],
        "soft_pin_action": SoftPinAction.ENABLE,
        "soft_pin_ttl_ms": 7,
        "with_hard_pin": True,
        "data_type": ObjectDataType.OPTIMIZER_STATE,
        "group_ids": ["d"],
    }
    others: dict[str, Any] = {"preferred_segment": "a", "prefer_alloc_in_same_node": True}
    names = {name for name in dir(NativeConfig) if not name.startswith("_")}
    assert names == options.keys() | others.keys()
    assert read_placement(native_config(**options), NativeConfig) == ReplicateConfig(
        2,
        nof_replica_num=1,
        dfs_replica_num=1,
        preferred_segments=["a", "b"],
        preferred_nof_segments=["c"],
        soft_pin_action="enable",
        soft_pin_ttl_ms=7,
        with_hard_pin=True,
        data_type="optimizer_state",
        group_ids=["d"],
    )
    assert read_placement(native_config(**others), NativeConfig) == ReplicateConfig(**others)


def test_every_method_is_there_in_both_forms() -> None:
    from mooncake.store import MooncakeDistributedStore

    store = new_store()
    for name in dir(MooncakeDistributedStore):
        if not name.startswith("_"):
            assert callable(getattr(store, name))
            assert inspect.iscoroutinefunction(getattr(store, f"async_{name}"))
            assert {name, f"async_{name}"} <= set(dir(store))
            assert getattr(type(store), f"async_{name}").__doc__


@pytest.mark.parametrize("name", ["missing", "async_missing", "async_setup_timeouts"])
def test_unknown_names_are_attribute_errors(name: str) -> None:
    store = new_store()
    with pytest.raises(AttributeError, match=name):
        getattr(store, name)
    assert name not in dir(store)


# --- where the engine is wrong ----------------------------------------------------------------


def test_a_value_larger_than_the_local_buffer_is_no_miss(side: Side, key: str) -> None:
    value = os.urandom(LOCAL_BUFFER + 5)
    assert side("put", key, value) == 0
    assert side("get", key) == value
    assert side("get_batch", [key, f"{key}-missing"]) == [value, b""]
    assert side("remove", key, True) == 0


def test_a_key_given_twice_is_answered_twice(side: Side, key: str) -> None:
    a, b = f"{key}a", f"{key}b"
    assert side("put_batch", [a, b], [b"1", b"22"]) == 0
    assert side("get_batch", [a, a, b, a]) == [b"1", b"1", b"22", b"1"]
    assert [bytes(one) for one in side("batch_get_buffer", [a, b, a])] == [b"1", b"22", b"1"]


def test_of_a_key_given_twice_both_places_are_filled(side: Side, key: str) -> None:
    a, b = f"{key}a", f"{key}b"
    assert side("put_batch", [a, b], [b"1", b"22"]) == 0
    own = ctypes.create_string_buffer(36)
    # A dummy client reads into the memory that it shares with the client process only.
    at = ctypes.addressof(own) if side("get_hostname") else side("alloc_from_mem_pool", 36)
    assert side("register_buffer", at, 36) == 0
    ctypes.memset(at, 0, 36)
    keys, places = [a, b, a, f"{key}c", a], [at, at + 4, at + 8, at + 12, at + 16]
    assert side("batch_get_into", keys, places, [4] * 5) == [1, 2, 1, -704, 1]
    found = [ctypes.string_at(place, 4).rstrip(b"\0") for place in places]
    assert found == [b"1", b"22", b"1", b"", b"1"]
    found = side(
        "batch_get_into_multi_buffers",
        keys=[b, b],
        all_buffer_ptrs=[[at + 20, at + 24], [at + 28, at + 32]],
        all_sizes=[[1, 1], [1, 1]],
    )
    assert found == [2, 2]
    assert ctypes.string_at(at + 20, 16)[::4] == b"2222"
    assert side("unregister_buffer", at) == 0


STRIDED = memoryview(b"abcdef")[::2]
LARGE_STRIDED = np.arange(300_000, dtype=np.uint16)[::3]
PICTURE = np.arange(12, dtype=np.float64).reshape(3, 4)
RECORDS = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])
LAID_OUT = [
    (STRIDED, b"ace"),
    (array.array("i", [1, 2, 3]), array.array("i", [1, 2, 3]).tobytes()),
    (PICTURE, PICTURE.tobytes()),
    (PICTURE.T, PICTURE.T.tobytes()),
    (RECORDS, RECORDS.tobytes()),
    (np.float64(2.5), np.float64(2.5).tobytes()),
    (LARGE_STRIDED, LARGE_STRIDED.tobytes()),
]


@pytest.mark.parametrize("place", range(len(LAID_OUT)))
def test_memory_is_stored_as_the_bytes_that_it_holds(side: Side, key: str, place: int) -> None:
    value, expected = LAID_OUT[place]
    calls = {
        "put": (f"{key}1", value),
        "upsert": (f"{key}2", value),
        "put_parts": (f"{key}3", value),
        "upsert_parts": (f"{key}4", value),
        "put_batch": ([f"{key}5"], [value]),
        "upsert_batch": ([f"{key}6"], [value]),
    }
    for verb, arguments in calls.items():
        assert side(verb, *arguments) == 0
    by_name = {"keys": [f"{key}7"], "values": [value]}
    assert side("put_batch", **by_name) == 0
    # Options that ours can't say go the engine's own way.
    assert side("put", f"{key}8", value, native_config(group_ids=[""])) == 0
    assert side("get_batch", [f"{key}{i}" for i in range(1, 9)]) == [expected] * 8


@pytest.mark.parametrize("verb", ["put", "upsert", "put_parts", "upsert_parts", "put_batch"])
def test_memory_of_python_objects_is_refused(side: Side, key: str, verb: str) -> None:
    objects = np.array([object()])
    arguments = ([key], [objects]) if verb == "put_batch" else (key, objects)
    assert side(verb, *arguments) is TypeError
    assert side("is_exist", key) == 0


@pytest.mark.parametrize("verb", ["put_parts", "upsert_parts"])
@pytest.mark.parametrize("part", ["text", None, 3, [b"part"]])
def test_a_part_that_is_no_memory_does_not_crash(
    side: Side, key: str, verb: str, part: object
) -> None:
    assert side(verb, key, b"part", part) is TypeError
    assert side("is_exist", key) == 0


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["blocking", "awaited"])
async def test_failures_are_codes_and_empty_values(
    in_memory: MooncakeDistributedStoreAsync, key: str, form: str, may_block: None
) -> None:
    engine = InMemoryEngine.named(key)
    assert await in_memory.async_put("key", b"value") == 0
    for method in (
        *("get_into", "batch_get_into", "put_from", "batch_put_from", "upsert_from"),
        *("is_exist", "batch_is_exist", "get_size", "remove", "batch_remove", "get_batch"),
    ):
        engine.fault(method, code=-900)

    async def ask(name: str, *args: Any) -> Any:
        if form == "blocking":
            return getattr(in_memory, name)(*args)
        return await getattr(in_memory, f"async_{name}")(*args)

    assert await ask("get", "key") == b""
    assert await ask("get_batch", ["key", "other"]) == [b"", b""]
    assert await ask("put", "new", b"value") == -900
    assert await ask("upsert", "new", b"value") == -900
    assert await ask("is_exist", "key") == -900
    assert await ask("get_size", "key") == -900
    assert await ask("remove", "key", True) == -900


async def test_a_value_that_is_being_written_has_its_own_code(
    store: MooncakeDistributedStoreAsync, key: str
) -> None:
    assert await store.async_batch_put_session_start([key], [4]) == [0]
    assert await store.async_get_size(key) == -703
    assert store._open("").engine is not None
    assert await store.async_get(key) == b""
    assert await store.async_is_exist(key) == 0
    assert await store.async_batch_put_session_revoke([key]) == [0]


async def test_what_no_code_stands_for_raises(
    in_memory: MooncakeDistributedStoreAsync,
) -> None:
    assert await in_memory.async_put("key", b"value") == 0
    seen: list[type[BaseException]] = []

    def elsewhere() -> None:
        for call in (in_memory.async_get, in_memory.async_get_size, in_memory.async_get_buffer):
            try:
                asyncio.run(call("key"))
            except WrongLoopError as exc:
                seen.append(type(exc))

    await asyncio.to_thread(elsewhere)
    assert seen == [WrongLoopError] * 3


# --- life -------------------------------------------------------------------------------------


@pytest.mark.parametrize("life", ["new", "closed", "failed"])
async def test_calls_of_a_store_that_is_not_open(life: str, key: str, may_block: None) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = new_store()
    if life == "closed":
        assert await store.async_setup(*setup_arguments(f"memory://{key}")) == 0
        assert await store.async_close() == 0
    if life == "failed":
        assert await store.async_setup({"local_hostname": "", "metadata_server": ""}) == -600
    plain = {"setup", "setup_dummy", "close", "health_check"}
    several = {"put": 2, "upsert": 2, "put_batch": 2, "get_hostname": 0}
    for name in dir(MooncakeDistributedStore):
        if name.startswith("_") or name in plain:
            continue
        arguments = ("key",) * several.get(name, 1)
        with pytest.raises(StoreClosedError, match=f"^{name} refused"):
            getattr(store, name)(*arguments)
        with pytest.raises(StoreClosedError, match=f"^{name} refused"):
            await getattr(store, f"async_{name}")(*arguments)
    assert (store.health_check(), await store.async_health_check()) == (1, 1)
    assert (store.close(), await store.async_close()) == (0, 0)


async def test_the_dictionary_form(cluster: LocalCluster, caplog: Any) -> None:
    store = new_store()
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "16MB",
        "local_buffer_size": 1 * MB,
        "rdma_devices": "",
        "master_server_addr": cluster.address,
        "enable_client_http_server": False,
        "tenant_id": "default",
        "ipc_socket_path": "",
        "colour": "blue",
    }
    assert await store.async_setup(config) == 0
    assert "ignores colour" in caplog.text
    found = store._open("").config
    assert found is not None
    assert (found.global_segment_size, found.local_buffer_size) == (16 * MB, 1 * MB)
    assert await store.async_close() == 0
    assert await store.async_setup(config=config) == 0
    assert await store.async_close() == 0


def test_all_arguments_of_a_set_up_arrive() -> None:
    shared = object()
    by_name: dict[str, Any] = {
        "protocol": "rdma",
        "rdma_devices": "mlx5_0",
        "master_server_addr": "10.0.0.1:50051",
        "enable_ssd_offload": True,
        "ssd_offload_path": "/somewhere",
        "tenant_id": "tenant",
        "enable_client_http_server": True,
        "client_http_port": 9301,
    }
    place: dict[str, Any] = {
        "local_hostname": "10.0.0.2:17000",
        "metadata_server": "http://10.0.0.3/metadata",
    }
    make, engine = read_setup(*place.values(), 1 * MB, 2 * MB, **by_name, engine=shared)
    assert engine is shared
    config = make()
    expected = StoreConfig(
        "10.0.0.1:50051",
        local_hostname="10.0.0.2:17000",
        metadata_server="http://10.0.0.3/metadata",
        global_segment_size=1 * MB,
        local_buffer_size=2 * MB,
        protocol="rdma",
        device_name="mlx5_0",
        enable_ssd_offload=True,
        ssd_offload_path="/somewhere",
        tenant_id="tenant",
        enable_client_http_server=True,
        client_http_port=9301,
    )
    assert config == expected
    make, engine = read_setup(
        {**place, **by_name, "global_segment_size": 1 * MB, "local_buffer_size": 2 * MB}
    )
    assert (make(), engine) == (expected, None)
    make, _ = read_setup(place)
    sizes: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": 16 * MB}
    assert make() == StoreConfig("127.0.0.1:50051", **place, **sizes)


@pytest.mark.parametrize("form", ["blocking", "awaited"])
def test_set_up_again_after_close(
    cluster: LocalCluster, key: str, form: str, loop: asyncio.AbstractEventLoop
) -> None:
    side = Side(new_store(), form, loop, "ours")
    for _ in range(2):
        assert side("setup", *setup_arguments(cluster.address)) == 0
        assert side("put", key, b"value") == 0
        assert side("get", key) == b"value"
        assert side("remove", key, True) == 0
        assert (side("close"), side("close"), side("health_check")) == (0, 0, 1)


async def test_a_second_set_up_replaces_the_first(
    store: MooncakeDistributedStoreAsync, cluster: LocalCluster, key: str
) -> None:
    first = store._open("")
    assert await store.async_setup(*setup_arguments(cluster.address)) == 0
    assert first.closed
    assert first.stats().in_flight == 0
    assert await store.async_put(key, b"value") == 0
    assert await store.async_get(key) == b"value"


def test_a_store_opened_without_a_loop_serves_one_loop_after_the_other(
    cluster: LocalCluster, key: str
) -> None:
    policy_loop = asyncio.new_event_loop()
    asyncio.set_event_loop(policy_loop)
    store = new_store()
    assert store.setup(*setup_arguments(cluster.address)) == 0
    assert asyncio.get_event_loop() is policy_loop  # as it was
    assert policy_loop.run_until_complete(store.async_put(key, b"value")) == 0
    policy_loop.close()
    asyncio.set_event_loop(None)
    assert asyncio.run(store.async_get(key)) == b"value"
    assert store.get(key) == b"value"
    assert store.close() == 0


async def test_blocking_calls_on_the_loops_own_thread(
    cluster: LocalCluster, key: str, may_block: None, caplog: Any
) -> None:
    store = new_store()
    assert store.setup(*setup_arguments(cluster.address)) == 0
    waiting = [asyncio.ensure_future(store.async_put(f"{key}{i}", b"value")) for i in range(50)]
    await asyncio.sleep(0)  # some of them are on their way
    for _ in range(2):
        assert store.put(key, b"value") == 0
        assert store.get(key) == b"value"
        assert store.is_exist(key) == 1
        assert store.get_hostname() == await store.async_get_hostname()
    assert await asyncio.gather(*waiting) == [0] * 50
    assert store.close() == 0
    told = [record.getMessage() for record in caplog.records]
    for name in ("setup", "put", "get", "is_exist", "close"):
        text = f"{name}() blocks the event loop that runs in this thread; use await async_{name}()"
        assert told.count(text) == 1


async def test_close_under_calls_that_wait(
    in_memory: MooncakeDistributedStoreAsync, may_block: None
) -> None:
    """Those that have left are answered, the others are refused, and nobody waits for ever."""
    calls = [asyncio.ensure_future(in_memory.async_put(f"{i}", b"value")) for i in range(600)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert in_memory.close() == 0
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert {type(answer) for answer in answers} <= {int, StoreClosedError}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:1"), -600, "local_hostname"),
        (("127.0.0.1", "", 0, 0, "tcp", "", "127.0.0.1:1"), -600, "metadata_server"),
        (("127.0.0.1", "P2PHANDSHAKE", 0, 0, "rmda", "", "127.0.0.1:1"), -600, "'rdma'"),
        (("127.0.0.1", "P2PHANDSHAKE", -1, 0, "tcp", "", "127.0.0.1:1"), -600, "segment"),
        (("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1"), -600, "port"),
        (({"local_hostname": "127.0.0.1"},), -600, "metadata_server"),
        (({"metadata_server": "P2PHANDSHAKE"},), -600, "local_hostname"),
        (
            ({"local_hostname": "a", "metadata_server": "b", "ipc_socket_path": "@x"},),
            -1012,
            "mooncake_client",
        ),
    ],
)
async def test_set_ups_that_are_refused(
    arguments: tuple[Any, ...], code: int, text: str, caplog: Any
) -> None:
    store = new_store()
    assert await store.async_setup(*arguments) == code
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert text in record.getMessage()
    assert f"answers {code} " in record.getMessage()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (("127.0.0.1",), {}), ((), {"config": 3}), (({}, 1), {}), ((), {"colour": "blue"})],
)
async def test_set_ups_that_fit_neither_form(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError):
        await new_store().async_setup(*args, **kwargs)


async def test_what_the_engine_refuses_keeps_its_code(
    in_memory: MooncakeDistributedStoreAsync, key: str, caplog: Any
) -> None:
    fault = InMemoryEngine.named(key).fault("setup", code=-101)
    store = new_store()
    assert await store.async_setup(*setup_arguments(f"memory://{key}")) == -101
    assert "SEGMENT_NOT_FOUND" in caplog.text
    fault.remove()


@pytest.mark.parametrize("form", ["blocking", "awaited"])
async def test_no_master(no_master: str, form: str, caplog: Any, may_block: None) -> None:
    store = new_store()
    store.setup_timeout = 0.3
    began = time.monotonic()
    async with LoopStallProbe() as probe:
        if form == "blocking":
            code = await asyncio.to_thread(store.setup, *setup_arguments(no_master))
        else:
            code = await store.async_setup(*setup_arguments(no_master))
    assert code == -1
    assert 0.2 < time.monotonic() - began < SOON
    assert probe.longest < 0.3
    assert "Connection refused. Is " in caplog.text
    assert store.health_check() == 1


async def test_close_during_set_up(own_cluster: LocalCluster, caplog: Any) -> None:
    store = new_store()
    await own_cluster.pause()
    task = asyncio.ensure_future(store.async_setup(*setup_arguments(own_cluster.address)))
    await asyncio.sleep(0)  # it has begun
    assert await store.async_close() == 0
    await own_cluster.resume()
    assert await task == -1
    assert "meanwhile" in caplog.text
    with pytest.raises(StoreClosedError):
        await store.async_get("key")


async def test_a_cancelled_set_up(no_master: str) -> None:
    store = new_store()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(store.async_setup(*setup_arguments(no_master)), 0.05)
    assert store.health_check() == 1


async def test_an_unclosed_store_warns_and_closes(key: str) -> None:
    store = new_store()
    assert await store.async_setup(*setup_arguments(f"memory://{key}")) == 0
    client = store._open("")._client
    text = r"unclosed MooncakeDistributedStoreAsync 127.*await async_close"
    with pytest.warns(ResourceWarning, match=text):
        del store
    await asyncio.wrap_future(client.begin_close())


async def test_closed_stores_leave_nothing_behind(key: str, recwarn: Any) -> None:
    store = new_store()
    for _ in range(3):
        assert await store.async_setup(*setup_arguments(f"memory://{key}")) == 0
        assert await store.async_close() == 0
    del store
    gc.collect()
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


async def test_repr_shows_state_and_no_values(in_memory: MooncakeDistributedStoreAsync) -> None:
    assert repr(new_store()) == "<MooncakeDistributedStoreAsync not set up>"
    assert repr(in_memory).startswith("<MooncakeDistributedStoreAsync 127.0.0.1:")


async def test_our_own_placement_options_are_taken_too(
    in_memory: MooncakeDistributedStoreAsync,
) -> None:
    config = ReplicateConfig(group_ids=["group"])
    assert await in_memory.async_put("key", b"value", config) == 0
    assert await in_memory.async_get("key") == b"value"


# --- what its users get -----------------------------------------------------------------------


async def test_calls_that_wait_travel_together(
    store: MooncakeDistributedStoreAsync, key: str
) -> None:
    keys = [f"{key}{i}" for i in range(512)]
    before = store._open("").stats().calls

    async def story(key: str) -> list[Any]:
        return [
            await store.async_put(key, key.encode()),
            await store.async_get(key),
            await store.async_is_exist(key),
            await store.async_get_size(key),
            await store.async_upsert(key, b"other"),
            await store.async_remove(key, True),
        ]

    answers = await asyncio.gather(*map(story, keys))
    assert answers == [[0, key.encode(), 1, len(key), 0, 0] for key in keys]
    assert store._open("").stats().calls - before < 6 * 512 / 10


def test_calls_from_other_threads_and_on_uvloop_travel_together_too(
    cluster: LocalCluster, key: str
) -> None:
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def await_there(call: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, loop)

    store = new_store()
    assert await_there(store.async_setup(*setup_arguments(cluster.address))).result(10) == 0
    keys = [f"{key}{i}" for i in range(256)]
    before = store._open("").stats().calls
    puts = [await_there(store.async_put(key, key.encode())) for key in keys]
    assert [put.result(10) for put in puts] == [0] * 256
    gets = [await_there(store.async_get(key)) for key in keys]
    assert [get.result(10) for get in gets] == [key.encode() for key in keys]
    assert store._open("").stats().calls - before < 2 * 256 / 3
    assert store.get(keys[0]) == keys[0].encode()
    assert store.close() == 0
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_a_frozen_master_is_an_answer_in_time(own_cluster: LocalCluster, key: str) -> None:
    store = new_store()
    assert await store.async_setup(*setup_arguments(own_cluster.address)) == 0
    assert await store.async_put(key, b"value") == 0
    await own_cluster.pause()
    began = time.monotonic()
    async with LoopStallProbe() as probe:
        answers = await asyncio.gather(
            store.async_get(key),
            store.async_get_batch([key, "other"]),
            store.async_put("new", b"value"),
            store.async_is_exist(key),
            store.async_remove(key),
            store.async_batch_is_exist([key]),
        )
    assert time.monotonic() - began < 30  # one time-out of 2.5 s after the other, at most two
    assert probe.longest < 0.5
    await own_cluster.resume()
    assert [*answers] == [b"", [b"", b""], -901, -901, -901, [-901]]
    assert await store.async_get(key) == b"value"
    assert await store.async_close() == 0


async def test_set_up_and_close_leave_the_loop_free(cluster: LocalCluster) -> None:
    store = new_store()
    async with LoopStallProbe() as probe:
        assert await store.async_setup(*setup_arguments(cluster.address)) == 0
        assert await store.async_close() == 0
    assert probe.longest < 0.5  # close alone takes the binding a second or two, with the GIL


async def test_threads_call_while_the_loop_does(
    store: MooncakeDistributedStoreAsync, key: str
) -> None:
    def work(thread: int) -> list[Any]:
        return [
            (store.put(f"{key}{thread}-{i}", b"%d" % i), store.get(f"{key}{thread}-{i}"))
            for i in range(20)
        ]

    answers = await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(4)))
    assert answers == [[(0, b"%d" % i) for i in range(20)]] * 4


# --- processes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scene",
    [
        scenes.leave_open,
        scenes.leave_calls_in_flight,
        scenes.load_the_engine_first,
        scenes.fork,
        scenes.close_under_calls,
    ],
    ids=lambda scene: scene.__name__,
)
def test_processes_end_normally(own_cluster: LocalCluster, scene: Callable[[str], None]) -> None:
    ended = run_scene(scene, own_cluster.address).check(within=20)
    assert "Traceback" not in ended.err, ended.err

"""What the verbs of a store promise, checked on the in-memory engine and on the real one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from aiomooncake import (
    BatchError,
    InvalidArgumentError,
    LocalCluster,
    MooncakeError,
    NoSpaceError,
    ObjectLeasedError,
    ReplicateConfig,
    RpcError,
    Store,
)
from aiomooncake.engine.binding import find_methods
from tests.contract.engines import IN_OUR_MEMORY, Memory, target_of

KB, MB = 1 << 10, 1 << 20
TOO_LARGE = 256 * MB  # for any segment of the shared store


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that repeat at a prime distance, so that a piece in the wrong place is noticed."""
    block = bytes((i * 7 + i // 251 + seed) % 256 for i in range(min(size, 65_521)))
    return (block * (size // len(block) + 1))[:size]


@pytest.fixture(autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Leave the next test all of the segment: a master that is short of room lets values go."""
    store = request.getfixturevalue("store") if "store" in request.fixturenames else None
    yield
    if store is not None:
        await store.remove_all(force=True)


@pytest.fixture
def keys() -> Callable[[int], list[str]]:
    """Make so many fresh keys."""
    prefix = f"{time.monotonic_ns():x}-"
    return lambda count: [f"{prefix}{i}" for i in range(count)]


# --- one value --------------------------------------------------------------------------------

SIZES = [1, 4 * KB, 64 * KB + 1, 256 * KB, 256 * KB + 1, 8 * MB, 8 * MB + 1, 20 * MB + 3]


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_of_any_size_comes_back(store: Store, key: str, size: int) -> None:
    """Also one larger than the local buffer, which the engine's own get calls a miss."""
    value = content(size)
    await store.put(key, value)
    assert await store.get(key) == value
    assert await store.size(key) == size
    assert await store.exists(key)
    assert await store.remove(key, force=True)


async def test_a_missing_key_is_none_and_false(store: Store, missing: str) -> None:
    assert await store.get(missing) is None
    assert await store.size(missing) is None
    assert await store.exists(missing) is False
    assert await store.remove(missing) is False
    assert await store.remove(missing, force=True) is False


async def test_the_first_value_stays(store: Store, key: str) -> None:
    for value in (b"one", b"three", content(9 * MB)):
        await store.put(key, value)
        await store.put_many({key: value})
    assert await store.get(key) == b"one"


@pytest.mark.parametrize("sizes", [(3, 3), (3, 300 * KB), (300 * KB, 3), (3, 9 * MB), (9 * MB, 2)])
async def test_upsert_replaces(store: Store, key: str, sizes: tuple[int, int]) -> None:
    for seed, size in enumerate(sizes):
        value = content(size, seed)
        await store.upsert(key, value)
        assert await store.get(key) == value
        assert await store.size(key) == size
    await store.remove(key, force=True)


async def test_a_large_value_may_be_put_by_many_at_once(store: Store, key: str) -> None:
    values = [content(9 * MB, seed) for seed in range(3)]
    await asyncio.gather(*[store.put(key, value) for value in values])
    assert await store.get(key) in values
    await store.remove(key, force=True)


async def test_a_large_value_may_be_read_by_many_at_once(store: Store, key: str) -> None:
    """The sessions that large values are read by are one per key and client."""
    value = content(17 * MB)
    await store.put(key, value)
    assert await asyncio.gather(*[store.get(key) for _ in range(4)]) == [value] * 4
    await store.remove(key, force=True)


async def test_what_is_stored_is_what_was_given_at_the_call(store: Store, key: str) -> None:
    value = bytearray(b"before")
    putting = asyncio.ensure_future(store.put(key, value))
    await asyncio.sleep(0)  # the call has begun
    value[:] = b"after!"
    await putting
    assert await store.get(key) == b"before"


# --- buffers ----------------------------------------------------------------------------------


def mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    return memory


def numbers(count: int) -> Any:
    return np.arange(count, dtype=np.int32)


def frozen(values: Any) -> Any:
    values.flags.writeable = False
    return values


BUFFERS: dict[str, Callable[[int], Any]] = {
    "bytes": content,
    "bytearray": lambda n: bytearray(content(n)),
    "memoryview": lambda n: memoryview(content(n)),
    "slice of a memoryview": lambda n: memoryview(content(n + 9))[7:-2],
    "strided memoryview": lambda n: memoryview(content(2 * n))[::2],
    "backwards": lambda n: memoryview(content(n))[::-1],
    "read-only view": lambda n: memoryview(bytearray(content(n))).toreadonly(),
    "mmap": lambda n: mapped(content(n)),
    "array": lambda n: array("i", range(n // 4)),
    "ctypes": lambda n: (ctypes.c_int * (n // 4))(*range(n // 4)),
    "numpy": lambda n: numbers(n // 4),
    "numpy 2-D": lambda n: numbers(n // 4).reshape(4, -1),
    "Fortran order": lambda n: np.asfortranarray(numbers(n // 4).reshape(4, -1)),
    "columns": lambda n: numbers(n // 2).reshape(4, -1)[:, ::2],
    "read-only numpy": lambda n: frozen(numbers(n // 4)),
    "zero-dimensional": lambda n: np.array(b"x" * n),
    "record": lambda n: np.zeros(n // 16, "i8,f8"),
    "bool": lambda n: numbers(n) % 3 == 0,
}


def as_bytes(value: Any) -> bytes:
    return memoryview(value).tobytes()


@pytest.mark.parametrize("size", [1 * KB, 300 * KB], ids=["small", "large"])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
async def test_any_buffer_is_stored_as_contiguous_bytes(
    store: Store, key: str, other: str, make: Callable[[int], Any], size: int
) -> None:
    value = make(size)
    await store.put(key, value)
    assert await store.get(key) == as_bytes(value)
    await store.put_many({other: value})
    assert await store.get(other) == as_bytes(value)


async def test_a_scalar_is_stored(store: Store, key: str) -> None:
    await store.put(key, np.float64(2.5))
    assert await store.get(key) == np.float64(2.5).tobytes()


async def test_large_strided_memory_is_gathered(store: Store, key: str) -> None:
    value: Any = np.arange(6_000_000, dtype=np.int32).reshape(2, 3000, 1000)[:, :, 1::2]
    await store.put(key, value)
    assert await store.get(key) == value.tobytes()
    await store.upsert(key, value[:, ::-1])
    assert await store.get(key) == value[:, ::-1].tobytes()
    await store.remove(key, force=True)


async def test_the_same_large_memory_may_be_put_under_many_keys_at_once(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    """The engine refuses to register memory that overlaps what is registered already."""
    whole = memoryview(content(10 * MB))
    values = {
        key: whole[start:end]
        for key, (start, end) in zip(
            keys(5),
            [(0, 10 * MB), (0, 10 * MB), (1 * MB, 10 * MB), (0, 9 * MB), (700, 9 * MB)],
            strict=True,
        )
    }
    for _ in range(5):
        await asyncio.gather(*[store.put(key, value) for key, value in values.items()])
        assert await store.get_many(values) == [bytes(value) for value in values.values()]
        await store.remove_many(values, force=True)
    await store.put_many(values)
    assert await store.get_many(values) == [bytes(value) for value in values.values()]
    await store.remove_many(values, force=True)


@IN_OUR_MEMORY
async def test_large_memory_may_be_registered_by_the_caller(store: Store, key: str) -> None:
    value: Any = np.frombuffer(content(9 * MB), np.uint8)
    address = value.ctypes.data + 4096
    assert await store.engine.register_buffer(address, 1 * MB) == 0
    try:
        await store.put(key, value)
        assert await store.get(key) == value.tobytes()
    finally:
        assert await store.engine.unregister_buffer(address) == 0
    await store.remove(key, force=True)


@pytest.mark.parametrize("size", [10, 300 * KB, 9 * MB])
async def test_memory_is_let_go_when_the_put_is_over(store: Store, key: str, size: int) -> None:
    value, memory = bytearray(content(size)), mapped(content(size))
    await store.put(key, value)
    await store.upsert(key, memory)
    value.clear()  # a BufferError if anybody held on to it
    memory.close()
    await store.remove(key, force=True)


async def test_memory_is_let_go_when_the_put_has_failed(store: Store, key: str) -> None:
    """A cycle of the error and its traceback once held it."""
    memory = mmap.mmap(-1, TOO_LARGE)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(NoSpaceError):  # pytest.raises would keep the error
            await store.put(key, memory)
        memory.close()
    finally:
        gc.enable()


# --- refusals ---------------------------------------------------------------------------------

BAD_VALUES = {
    "empty bytes": b"",
    "empty array": np.empty((0, 3)),
    "None": None,
    "text": "secret",
    "list": [1, 2],
    "dates": np.array(["2020-01-01"], "datetime64[s]"),
    "objects": np.array([1, None], object),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
async def test_a_bad_value_is_refused_before_the_engine_sees_it(
    store: Store, key: str, other: str, value: Any
) -> None:
    calls = store.stats().calls
    for attempt in (store.put(key, value), store.upsert(key, value)):
        with pytest.raises(InvalidArgumentError) as caught:
            await attempt
        assert caught.value.key == key
        assert caught.value.rank == 3
        assert key in str(caught.value)
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidArgumentError):
        await store.put_many({other: b"good", key: value})
    assert store.stats().calls == calls
    assert not await store.exists(other)


BAD_KEYS = {"empty": "", "None": None, "bytes": b"key", "int": 3, "lone surrogate": "a\ud800b"}


@pytest.mark.parametrize("bad", BAD_KEYS.values(), ids=BAD_KEYS)
async def test_a_bad_key_is_refused_before_the_engine_sees_it(
    store: Store, key: str, bad: Any
) -> None:
    calls = store.stats().calls
    attempts = [
        store.get(bad),
        store.exists(bad),
        store.size(bad),
        store.put(bad, b"v"),
        store.upsert(bad, b"v"),
        store.remove(bad),
        store.get_many([key, bad]),
        store.exists_many([key, bad]),
        store.remove_many([key, bad]),
        store.put_many({key: b"v", bad: b"v"}),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidArgumentError, match="key") as caught:
            await attempt
        str(caught.value).encode()  # it can be printed
    assert store.stats().calls == calls


async def test_one_text_is_not_many_keys(store: Store, key: str) -> None:
    for keys in (key, key.encode()):
        for many in (store.get_many, store.exists_many, store.remove_many):
            with pytest.raises(InvalidArgumentError, match="list"):
                await many(keys)  # type: ignore[arg-type]


KEYS = {
    "umlaut": "ü",
    "Chinese": "键值",
    "emoji": "\U0001f600",
    "combining": "u\u0308",
    "right to left": "\u202eabc",
    "NUL": "a\0b",
    "only NUL": "\0",
    "newline": "a\nb",
    "space": " ",
    "slash": "/a//b/../c",
    "format": "%s{}\\",
    "long": "x" * 5000,
}


@pytest.mark.parametrize("odd", KEYS.values(), ids=KEYS)
async def test_any_text_is_a_key(store: Store, odd: str) -> None:
    await store.put(odd, b"value")
    await store.put_many({odd + "2": b"another"})
    assert await store.get(odd) == b"value"
    assert await store.get_many([odd + "2", odd]) == [b"another", b"value"]
    assert await store.exists_many([odd, odd[:-1] or "?", odd + "3"]) == [True, False, False]
    assert await store.remove(odd, force=True)
    assert await store.remove_many([odd + "2", odd], force=True) == [True, False]


# --- many values ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 64, 65, 300])
async def test_many_values_come_back_in_order(
    store: Store, keys: Callable[[int], list[str]], count: int
) -> None:
    wanted = keys(count)
    values = {key: content(100 + i, i) for i, key in enumerate(wanted)}
    assert await store.put_many(values) == dict.fromkeys(wanted)
    assert await store.get_many(wanted) == list(values.values())
    assert await store.get_many(reversed(wanted)) == list(reversed(values.values()))
    assert await store.exists_many(wanted) == [True] * count
    assert await store.remove_many(wanted, force=True) == [True] * count
    assert await store.remove_many(wanted, force=True) == [False] * count
    assert await store.get_many(wanted) == [None] * count


async def test_large_values_misses_and_small_ones_mix(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    wanted = keys(150)
    sizes = {3: 1 * MB, 64: 16 * KB, 65: 16 * KB + 1, 70: 17 * MB, 140: 300 * KB, 149: 8 * MB + 1}
    values = {
        key: content(sizes.get(i, 50), i) for i, key in enumerate(wanted) if i % 7 or i in sizes
    }
    await store.put_many(values)
    assert await store.get_many(wanted) == [values.get(key) for key in wanted]
    assert await store.exists_many(wanted) == [key in values for key in wanted]
    assert await store.remove_many(wanted, force=True) == [key in values for key in wanted]


async def test_a_key_given_twice_is_answered_twice(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    """The engine itself answers wrong data for it."""
    first, second, gone = keys(3)
    await store.put_many({first: b"1", second: b"two"})
    wanted = [first, second, gone, first, gone, first]
    assert await store.get_many(wanted) == [b"1", b"two", None, b"1", None, b"1"]
    assert await store.exists_many(wanted) == [True, True, False, True, False, True]
    removed = await store.remove_many(wanted, force=True)
    assert removed == [True, True, False, True, False, True]


async def test_nothing_asked_nothing_called(store: Store) -> None:
    calls = store.stats().calls
    assert await store.get_many([]) == []
    assert await store.exists_many(iter(())) == []
    assert await store.remove_many(()) == []
    assert await store.put_many({}) == {}
    assert store.stats().calls == calls


async def test_put_many_stores_the_others_and_names_the_keys_that_failed(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    wanted = keys(100)
    values: dict[str, Any] = {key: content(50, i) for i, key in enumerate(wanted)}
    huge = mmap.mmap(-1, TOO_LARGE)
    bad = {wanted[7], wanted[80]}
    values.update(dict.fromkeys(bad, huge))
    with pytest.raises(BatchError, match="2 of 100 keys") as caught:
        await store.put_many(values)
    results = caught.value.results
    assert list(results) == wanted
    assert {key for key, result in results.items() if result is not None} == bad
    for key in bad:
        error = results[key]
        assert isinstance(error, NoSpaceError)
        assert (error.key, error.code, error.rank) == (key, -200, 3)
    found = await store.get_many(wanted)
    assert [value is None for value in found] == [key in bad for key in wanted]
    await store.remove_many(wanted, force=True)


async def test_put_many_hands_the_errors_out_when_asked(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    good, bad = keys(2)
    results = await store.put_many(
        {good: b"v", bad: mmap.mmap(-1, TOO_LARGE)}, return_exceptions=True
    )
    assert results[good] is None
    assert isinstance(results[bad], NoSpaceError)


# --- removing ---------------------------------------------------------------------------------


async def test_a_lease_protects_from_removal_but_not_from_force(store: Store, key: str) -> None:
    await store.put(key, b"v")
    await store.get(key)
    with pytest.raises(ObjectLeasedError, match="force=True") as caught:
        await store.remove(key)
    assert (caught.value.key, caught.value.code) == (key, -706)
    assert await store.remove(key, force=True) is True
    assert await store.get(key) is None


async def test_what_nobody_has_read_is_removed(store: Store, key: str) -> None:
    await store.put(key, b"v")
    assert await store.remove(key) is True
    assert await store.remove(key) is False


async def test_remove_many_names_the_leased_ones(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    free, leased, gone = wanted = keys(3)
    await store.put_many({free: b"v", leased: b"v"})
    await store.get(leased)
    with pytest.raises(BatchError) as caught:
        await store.remove_many(wanted)
    results = caught.value.results
    assert results[0] is True
    assert isinstance(results[1], ObjectLeasedError)
    assert results[1].key == leased
    assert results[2] is False
    again = await store.remove_many([leased, gone], return_exceptions=True)
    assert isinstance(again[0], ObjectLeasedError)
    assert await store.remove_many([leased, gone], force=True) == [True, False]


async def test_a_pattern_removes_what_it_is_found_in(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    wanted = keys(12)
    prefix = wanted[0][:-1]
    await store.put_many(dict.fromkeys(wanted, b"v"))
    await store.get(wanted[11])
    assert await store.remove_by_regex(f"^{prefix}1.$") == 1  # 10; 11 is leased
    assert await store.remove_by_regex(f"^{prefix}1.$", force=True) == 1
    assert await store.remove_by_regex(f"^{prefix}[0-4]$") == 5
    assert await store.remove_by_regex(f"^{prefix}[0-4]$") == 0
    assert await store.remove_by_regex(prefix[2:], force=True) == 5


@pytest.mark.parametrize("pattern", ["([", "", None, b"a", "a\ud800"])
async def test_a_bad_pattern_is_refused(store: Store, pattern: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="remove_by_regex") as refused:
        await store.remove_by_regex(pattern)
    assert "local_buffer_size" not in str(refused.value)
    assert pattern != "([" or "pattern '([': it must be" in str(refused.value)


async def test_remove_all_tells_how_many_went(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    await store.remove_all(force=True)
    wanted = keys(5)
    await store.put_many(dict.fromkeys(wanted, b"v"))
    await store.get(wanted[0])
    assert await store.remove_all() == 4
    assert await store.remove_all(force=True) == 1
    assert await store.remove_all(force=True) == 0


# --- options ----------------------------------------------------------------------------------


async def test_placement_options_are_taken(store: Store, keys: Callable[[int], list[str]]) -> None:
    first, second, third = wanted = keys(3)
    config = ReplicateConfig(preferred_segments=[store.hostname], data_type="kvcache")
    await store.put(first, b"1", config=config)
    await store.upsert(second, content(9 * MB), config=config)
    await store.put_many({third: b"3"}, config=config)
    assert await store.size(first) == 1
    assert await store.size(second) == 9 * MB
    assert await store.size(third) == 1
    await store.remove_many(wanted, force=True)


async def test_pieces_of_large_values_keep_to_the_options(store: Store, key: str) -> None:
    await store.put(key, content(9 * MB), config=ReplicateConfig(with_hard_pin=True))
    assert await store.get(key) == content(9 * MB)
    await store.remove(key, force=True)


# --- raw --------------------------------------------------------------------------------------


@IN_OUR_MEMORY
async def test_the_engine_is_there_with_its_own_codes(store: Store, key: str, other: str) -> None:
    engine = store.engine
    assert await engine.put(key, b"one") == 0
    assert await engine.put(key, b"") == -600
    assert await engine.get(key) == b"one"
    assert await engine.get(other) == b""
    assert await engine.is_exist(other) == 0
    assert await engine.get_size(other) == -704
    assert await engine.remove(key) == -706
    assert await engine.remove(key, force=True) == 0
    memory = Memory(b"onetwo")
    pointers, sizes = [memory.ptr, memory.ptr + 3], [3, 3]
    assert await engine.batch_put_from([key, other], pointers, sizes) == [0, 0]
    assert await engine.get_batch([other, key]) == [b"two", b"one"]
    assert await engine.batch_get_into([key, other], pointers[::-1], sizes) == [3, 3]
    assert memory[0:6] == b"twoone"
    with pytest.raises(TypeError):
        await engine.put(1, 2, 3, 4)  # type: ignore[call-arg, arg-type]


async def test_every_public_method_of_the_binding_is_there(store: Store) -> None:
    methods = find_methods(type(store._client.native_object))
    assert {"put", "get_batch", "batch_put_from"} <= methods
    for mirror in (store.engine, store.blocking):
        assert set(dir(mirror)) == methods
        for name in methods:
            assert callable(getattr(mirror, name))
        with pytest.raises(AttributeError, match="no method 'fetch'"):
            mirror.fetch  # type: ignore[union-attr]  # noqa: B018


async def test_threads_use_the_engine_without_a_loop(store: Store, key: str) -> None:
    def work() -> bytes:
        assert store.blocking.put(key, b"v") == 0
        return store.blocking.get(key)

    assert await asyncio.to_thread(work) == b"v"


@pytest.mark.parametrize("name", ["setup", "setup_dummy", "close", "init_all"])
async def test_nobody_ends_the_engine_by_hand(store: Store, key: str, name: str) -> None:
    if name not in dir(store.engine):
        pytest.skip("this engine has no such method")
    with pytest.raises(InvalidArgumentError, match="not to be called by hand"):
        await getattr(store.engine, name)()
    with pytest.raises(InvalidArgumentError, match="not to be called by hand"):
        await asyncio.to_thread(getattr(store.blocking, name))
    await store.put(key, b"still open")


# --- what it shows ----------------------------------------------------------------------------


@IN_OUR_MEMORY
async def test_stats_count_bytes_calls_and_errors(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    small, large, gone = keys(3)
    before = store.stats()
    await store.put(small, b"abc")
    await store.put_many({large: content(9 * MB)})
    await store.get(small)
    await store.get_many([small, large, gone])
    with pytest.raises(ObjectLeasedError):
        await store.remove(small)
    after = store.stats()
    # Five verbs; a large value that is read among others is fetched by a call of its own.
    assert after.calls == before.calls + 6
    assert after.bytes_written == before.bytes_written + 3 + 9 * MB
    assert after.bytes_read == before.bytes_read + 3 + 3 + 9 * MB
    leased = "OBJECT_HAS_LEASE"
    assert after.errors[leased] == before.errors.get(leased, 0) + 1
    assert (after.in_flight, after.abandoned, after.tainted) == (0, 0, False)
    assert 0 < after.longest_loop_stall < 10
    await store.remove_many([small, large], force=True)


async def test_a_store_that_works_is_healthy(store: Store) -> None:
    health = store.health()
    assert health.ok
    assert health.state == "ready"
    assert not store.closed
    assert await asyncio.to_thread(store.health) == health


async def test_nothing_shows_a_value(store: Store, key: str) -> None:
    await store.put(key, b"secret-value")
    await store.get(key)
    for thing in (store, store.engine, store.blocking, store.stats(), store.health(), store.config):
        assert "secret" not in repr(thing)
    assert repr(store) == f"<Store TP3 {store.hostname} open>"


# --- failures ---------------------------------------------------------------------------------


async def test_a_failure_is_never_a_miss(
    own_cluster: LocalCluster, open_store: Any, eventually: Any
) -> None:
    """The engine itself answers ``b""`` for both."""
    store = await open_store(own_cluster.address, rank=5, global_segment_size=16 * MB, threads=16)
    await store.put("small", b"v")
    await store.put("large", content(300 * KB))
    await own_cluster.kill()
    began = time.monotonic()
    verbs = {
        "get": store.get("small"),
        "get large": store.get("large"),
        "exists": store.exists("small"),
        "size": store.size("small"),
        "remove": store.remove("small"),
        "put": store.put("other", b"v"),
        "put large": store.put("other2", content(9 * MB)),
        "upsert": store.upsert("small", b"w"),
        "regex": store.remove_by_regex("small"),
        "all": store.remove_all(),
    }
    many = {
        "get_many": store.get_many(["small", "large", "gone"], return_exceptions=True),
        "exists_many": store.exists_many(["small", "gone"], return_exceptions=True),
        "remove_many": store.remove_many(["small", "gone"], return_exceptions=True),
        "put_many": store.put_many({"a": b"1", "b": b"2"}, return_exceptions=True),
    }
    answers = dict(
        zip(
            [*verbs, *many],
            await asyncio.gather(*verbs.values(), *many.values(), return_exceptions=True),
            strict=True,
        )
    )
    seconds = time.monotonic() - began
    for verb in many:
        answer: Any = answers.pop(verb)
        assert not isinstance(answer, BaseException), (verb, answer)
        for each in answer.values() if isinstance(answer, dict) else answer:
            assert isinstance(each, RpcError), (verb, answer)
    for verb, answer in answers.items():
        assert isinstance(answer, RpcError), (verb, answer)
        assert isinstance(answer, ConnectionError)
        assert answer.code == -900
        assert answer.rank == 5
    assert seconds < 20
    await eventually(lambda: store.health().state == "master-unreachable")


async def test_a_store_without_a_local_buffer_does_all_the_same(
    request: pytest.FixtureRequest, store: Store, open_store: Any, keys: Any
) -> None:
    target = target_of(store)
    bare = await open_store(target, global_segment_size=0, local_buffer_size=0)
    small, large, over, many = wanted = keys(4)
    await bare.put(small, b"v")
    await bare.upsert(small, b"w")
    await bare.put(large, content(1 * MB))
    await bare.put(over, content(8 * MB + 1))
    await bare.put_many({many: memoryview(b"abcdef")[::2]})
    expected = [b"w", content(1 * MB), content(8 * MB + 1), b"ace"]
    assert [await bare.get(key) for key in wanted] == expected
    assert await bare.get_many(wanted) == expected
    assert await store.get_many(wanted) == expected  # from the other client too
    assert isinstance(await bare.warmup(), object)
    await bare.remove_many(wanted, force=True)


def test_errors_are_of_one_family() -> None:
    assert issubclass(BatchError, MooncakeError)

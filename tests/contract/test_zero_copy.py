"""Memory that stays where it is: registered memory and views, on either engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import mmap
import pickle
import threading
import weakref
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from aiomooncake import (
    BatchError,
    BufferTooSmallError,
    InvalidArgumentError,
    ObjectLeasedError,
    Store,
    StoreClosedError,
)
from aiomooncake.buffers import Buffer, Slice
from tests.adversity.processes import run_scene
from tests.contract.engines import IN_OUR_MEMORY, target_of
from tests.contract.zero_copy_scenes import buffers_are_left_behind, views_outlive_the_store

KB, MB = 1 << 10, 1 << 20


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that repeat at a prime distance, so that a piece in the wrong place is noticed."""
    block = bytes((i * 7 + i // 251 + seed) % 256 for i in range(min(size, 65_521)))
    return (block * (size // len(block) + 1))[:size]


def filled(buffer: Buffer, value: bytes) -> None:
    view_of(buffer)[: len(value)] = value


def view_of(part: Buffer | Slice) -> memoryview:
    assert part.view is not None
    return part.view


def bytes_of(part: Buffer | Slice) -> bytes:
    return view_of(part).tobytes()


@pytest.fixture
def keys(key: str) -> Callable[[int], list[str]]:
    """Make so many fresh keys."""
    return lambda count: [f"{key}-{i}" for i in range(count)]


@pytest.fixture(autouse=True)
async def tidy(store: Store, key: str) -> AsyncIterator[None]:
    """Leave the shared store as it was: its memory, its registrations, its room for views."""
    kept = len(store._client._kept)
    yield
    await store.remove_by_regex(f"^{key}", force=True)
    gc.collect()
    assert len(store._client._kept) == kept
    assert store.stats().in_flight == 0


@pytest.fixture
async def buffer(store: Store) -> AsyncIterator[Buffer]:
    """One megabyte of registered memory."""
    async with store.allocate("1MiB") as buffer:
        yield buffer


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Let go of nothing that is part of a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# --- there and back ---------------------------------------------------------------------------

SIZES = [1, 4 * KB, 64 * KB + 1, 1 * MB, 1 * MB + 1, 8 * MB, 8 * MB + 1, 20 * MB + 3]


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_of_any_size_goes_and_comes_back(store: Store, key: str, size: int) -> None:
    value = content(size)
    async with store.allocate(size) as source, store.allocate(size + 100) as target:
        filled(source, value)
        filled(target, b"." * (size + 100))
        await store.put_from(key, source)
        assert await store.get(key) == value
        assert await store.get_into(key, target[7 : size + 7]) == size
        assert bytes_of(target) == b"." * 7 + value + b"." * 93
        filled(target, b"." * (size + 100))
        assert await store.get_into(key, target[50:]) == size  # more memory than value
        assert bytes_of(target) == b"." * 50 + value + b"." * 50


@pytest.mark.parametrize("size", [10, 300 * KB, 9 * MB])
async def test_what_one_path_stores_the_other_reads(
    store: Store, keys: Callable[[int], list[str]], size: int
) -> None:
    put, parts = keys(2)
    value = content(size)
    await store.put(put, value)
    await store.put_parts(parts, value[:3], memoryview(value)[3:7], bytearray(value[7:]))
    async with store.allocate(size) as buffer:
        for key in (put, parts):
            filled(buffer, bytes(size))
            assert await store.get_into(key, buffer) == size
            assert bytes_of(buffer) == value
            async with store.view(key) as view:
                assert seen(view) == value


async def test_the_first_value_stays(store: Store, key: str, buffer: Buffer) -> None:
    filled(buffer, content(1 * MB))
    for part in (buffer[:3], buffer[3:9], buffer, [buffer[:5], buffer[7:8]]):
        await store.put_from(key, part)
        await store.put_many_from({key: part})
    assert await store.get(key) == content(3)


async def test_put_from_reads_the_memory_as_it_is_at_the_call(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    one, two = keys(2)
    filled(buffer, b"one")
    await store.put_from(one, buffer[:3])
    filled(buffer, b"two")
    await store.put_from(two, buffer[:3])
    assert await store.get_many([one, two]) == [b"one", b"two"]


@pytest.mark.parametrize("total", [12, 2 * MB + 1, 20 * MB])
async def test_a_list_of_slices_is_one_value(store: Store, key: str, total: int) -> None:
    value = content(total)
    cuts = [0, 1, total // 3, total // 2, total]
    async with store.allocate(total) as source, store.allocate(total) as target:
        filled(source, value)
        pieces = [source[start:end] for start, end in itertools.pairwise(cuts)]
        await store.put_from(key, pieces[::-1])
        expected = b"".join(bytes_of(piece) for piece in pieces[::-1])
        assert await store.get(key) == expected
        into = [target[start:end] for start, end in itertools.pairwise(cuts)][::-1]
        assert await store.get_into(key, into) == total
        assert b"".join(map(bytes_of, into)) == expected


async def test_a_list_of_slices_may_be_larger_than_the_value(
    store: Store, key: str, buffer: Buffer
) -> None:
    await store.put(key, b"abcdefgh")
    filled(buffer, b"." * 20)
    assert await store.get_into(key, [buffer[0:3], buffer[4:10], buffer[11:20]]) == 8
    assert bytes_of(buffer[:20]) == b"abc.defgh" + b"." * 11
    assert await store.get_into(key, [buffer[10:18], buffer[18:20]]) == 8  # the second is not used
    assert bytes_of(buffer[:20]) == b"abc.defgh.abcdefgh.."
    assert await store.get_into(key, [buffer[:20]]) == 8
    assert bytes_of(buffer[:8]) == b"abcdefgh"


async def test_many_at_once(store: Store, keys: Callable[[int], list[str]], buffer: Buffer) -> None:
    filled(buffer, content(1 * MB))
    wanted = keys(300)
    size = 3 * KB
    items = {key: buffer[i * size : (i + 1) * size] for i, key in enumerate(wanted)}
    await asyncio.gather(*[store.put_from(key, part) for key, part in items.items()])
    async with store.allocate("1MiB") as target:
        into = {key: target[i * size : (i + 1) * size] for i, key in enumerate(wanted)}
        read = await asyncio.gather(*[store.get_into(key, part) for key, part in into.items()])
        assert read == [size] * 300
        assert bytes_of(target[: 300 * size]) == content(300 * size)


async def test_one_value_into_many_places_at_once(store: Store, key: str, buffer: Buffer) -> None:
    """The engine writes only one buffer of a key given twice, although both answer its size."""
    await store.put(key, b"value")
    filled(buffer, bytes(1 * MB))
    places = [buffer[i * 5 : i * 5 + 5] for i in range(50)]
    assert await asyncio.gather(*[store.get_into(key, place) for place in places]) == [5] * 50
    assert bytes_of(buffer[:250]) == b"value" * 50


async def test_a_miss_is_none_and_touches_nothing(
    store: Store, missing: str, buffer: Buffer
) -> None:
    filled(buffer, b"untouched")
    async with store.allocate("9MiB") as large:
        for memory in (buffer[:9], [buffer[:4], buffer[4:9]], large):
            assert await store.get_into(missing, memory) is None
        assert await store.get_into(missing, buffer[:9], offset=3) is None
    assert await store.get_many_into({missing: buffer[:9]}) == [None]
    assert bytes_of(buffer[:9]) == b"untouched"


# --- many -------------------------------------------------------------------------------------


async def test_put_many_from_and_get_many_into(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    filled(buffer, content(1 * MB))
    a, b, c, gone = keys(4)
    async with store.allocate("9MiB") as large:
        filled(large, content(9 * MB, 5))
        stored = await store.put_many_from(
            {a: buffer[:5], b: [buffer[5:7], buffer[9:10]], c: large}
        )
        assert stored == {a: None, b: None, c: None}
        assert await store.get_many([a, b, c]) == [
            content(5),
            content(7)[5:] + content(10)[9:],
            content(9 * MB, 5),
        ]
        filled(large, bytes(9 * MB))
        items: Any = {gone: buffer[0:1], c: large, b: [buffer[1:2], buffer[3:5]], a: buffer[10:90]}
        assert await store.get_many_into(items) == [None, 9 * MB, 3, 5]
        assert bytes_of(large) == content(9 * MB, 5)
        assert bytes_of(buffer[10:15]) == content(5)


async def test_get_many_into_reads_the_others_and_names_the_keys_that_failed(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    small, large, gone = keys(3)
    await store.put_many({small: b"v", large: b"larger"})
    items = {gone: buffer[:1], large: buffer[1:3], small: buffer[3:4]}
    with pytest.raises(BatchError, match=r"\[TP3\] get_many_into failed for 1 of 3") as caught:
        await store.get_many_into(items)
    missed, failed, read = caught.value.results
    assert (missed, read) == (None, 1)
    assert isinstance(failed, BufferTooSmallError)
    assert failed.key == large
    again = await store.get_many_into(items, return_exceptions=True)
    assert [again[0], again[2]] == [None, 1]
    assert isinstance(again[1], BufferTooSmallError)


async def test_put_many_from_stores_the_others_and_names_the_keys_that_failed(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    small, huge = keys(2)
    # Memory that nobody touches costs nothing, and is more than any segment has.
    async with store.allocate("1gb") as impossible:
        items: Any = {small: buffer[:1], huge: impossible}
        with pytest.raises(BatchError, match="put_many_from failed for 1 of 2") as caught:
            await store.put_many_from(items)
        assert caught.value.results[small] is None
        assert caught.value.results[huge].key == huge
        stored = await store.put_many_from(items, return_exceptions=True)
        assert list(stored) == [small, huge]
        assert stored[small] is None
        assert stored[huge] is not None
    assert await store.exists_many([small, huge]) == [True, False]


async def test_pieces_of_memory_need_not_be_as_large_as_their_values(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    """The engine refuses such memory, without a hint whether it was too large, and only that."""
    small, exact, large, one, gone = keys(5)
    value = content(1000)
    await store.put_many(dict.fromkeys((small, exact, large, one), value))
    filled(buffer, b"." * 10_000)
    items: Any = {
        small: [buffer[0:500], buffer[500:900]],
        exact: [buffer[1000:1001], buffer[1001:2000]],
        large: [buffer[2000:2300], buffer[3000:3900], buffer[4000:4100]],
        gone: [buffer[5000:5001], buffer[5002:5003]],
        one: buffer[6000:7100],
    }
    answers = await store.get_many_into(items, return_exceptions=True)
    assert answers[1:] == [1000, 1000, None, 1000]
    assert isinstance(answers[0], BufferTooSmallError)
    assert "1000 bytes, the memory 900" in str(answers[0])
    expected = bytearray(b"." * 10_000)
    expected[1000:2000] = expected[6000:7000] = value
    expected[2000:2300], expected[3000:3700] = value[:300], value[300:]
    assert bytes_of(buffer[:10_000]) == expected


@pytest.mark.parametrize("pieces", [2, 64])
async def test_many_values_in_many_pieces(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer, pieces: int
) -> None:
    filled(buffer, content(1 * MB))
    wanted = keys(40)
    size = 12 * KB // pieces
    async with store.allocate("1MiB") as target:
        for from_memory, move in ((buffer, store.put_many_from), (target, store.get_many_into)):
            await move(
                {
                    key: [
                        # Not one behind the other: the pieces of all keys are interleaved.
                        from_memory[(j * 40 + i) * size : (j * 40 + i + 1) * size]
                        for j in range(pieces)
                    ]
                    for i, key in enumerate(wanted)
                }
            )
        moved = 40 * pieces * size
        assert bytes_of(target[:moved]) == bytes_of(buffer[:moved])


async def test_errors_that_are_kept_hold_no_memory(
    store: Store, key: str, eventually: Any, no_collections: None
) -> None:
    """Their tracebacks once held the frames of the job, and those its memory and its answers."""
    await store.put(key, content(100))
    buffer = await store.allocate(1000)
    gone = weakref.ref(buffer)
    items = {key: buffer[:99], f"{key}-missing": buffer[100:]}
    answers = await store.get_many_into(items, return_exceptions=True)
    await buffer.aclose()
    del items, buffer
    assert isinstance(answers[0], BufferTooSmallError)
    await eventually(lambda: gone() is None)


async def test_bad_memory_among_many_is_refused_before_anything_is_moved(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    a, b, c = keys(3)
    calls = store.stats().calls
    bad: Any
    verbs: list[Any] = [store.put_many_from, store.get_many_into]
    for bad in (b"bytes", buffer[3:3], [buffer[:1], b"bytes"], []):
        for verb in verbs:
            with pytest.raises(InvalidArgumentError):
                await verb({a: buffer[:1], b: bad, c: buffer[1:2]})
            with pytest.raises(InvalidArgumentError):
                await verb({a: buffer[:1], "": buffer[2:3]})
    assert store.stats().calls == calls
    assert await store.exists_many([a, b, c]) == [False] * 3
    assert await store.put_many_from({}) == {}
    assert await store.get_many_into({}) == []


# --- wrapping ---------------------------------------------------------------------------------


async def test_numpy_wraps_allocated_memory_without_a_copy(store: Store, key: str) -> None:
    async with store.allocate(4096) as buffer:
        whole: Any = np.frombuffer(view_of(buffer), np.int32)
        part: Any = np.frombuffer(view_of(buffer[400:800]), np.int32)
        assert whole.ctypes.data == buffer.address
        assert buffer.address % mmap.PAGESIZE == 0
        assert part.ctypes.data == buffer.address + 400 == buffer[400:800].address
        whole[:] = np.arange(1024)
        await store.put_from(key, buffer[400:800])
        assert await store.get(key) == np.arange(100, 200, dtype=np.int32).tobytes()
        part[:] = 0
        assert await store.get_into(key, buffer[:400]) == 400
        assert (whole[:200] == [*range(100, 200), *[0] * 100]).all()


async def test_wrapped_memory_outlives_its_registration(store: Store) -> None:
    buffer = await store.allocate(1 * MB)
    array_: Any = np.frombuffer(view_of(buffer), np.uint8)
    await buffer.aclose()
    del buffer
    array_[:] = 7
    assert array_.sum() == 7 * MB


@IN_OUR_MEMORY
async def test_memory_of_a_closed_buffer_is_the_callers_again(store: Store) -> None:
    memory = bytearray(b"abc")
    buffer = await store.register(memory)
    assert buffer.view is not None
    with pytest.raises(BufferError):
        memory.extend(b"d")
    await buffer.aclose()
    memory.extend(b"d")
    with pytest.raises(ValueError, match="released"):
        bytes(buffer.view)


@IN_OUR_MEMORY
async def test_a_released_view_leaves_the_memory_in_place(store: Store, key: str) -> None:
    """Releasing the buffer's own view once unmapped memory that the engine knew."""
    async with store.allocate(1 * MB) as buffer:
        filled(buffer, content(1 * MB))
        assert buffer.view is not None
        buffer.view.release()
        gc.collect()
        await store.put_from(key, buffer)
        await store.put_from(f"{key}2", [buffer[3:], buffer[:3]])
    assert await store.get(key) == content(1 * MB)
    grown = bytearray(b"abc")
    async with store.register(grown) as buffer:
        assert buffer.view is not None
        buffer.view.release()
        with pytest.raises(BufferError):
            grown.extend(bytes(1 * MB))
    grown.extend(b"d")


OBJECTS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(content(1000)),
    "mmap": lambda: mapped(content(1000)),
    "array": lambda: array("i", range(250)),
    "numpy": lambda: np.arange(250, dtype=np.int32),
    "numpy 2-D": lambda: np.arange(250, dtype=np.float32).reshape(10, 25),
    "part of numpy": lambda: np.arange(100, dtype=np.int64).reshape(10, 10)[3:6],
    "complex": lambda: np.arange(100, dtype=np.complex64).view("u1"),
    "memoryview": lambda: memoryview(bytearray(content(2000)))[500:1500],
}


def mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    return memory


@IN_OUR_MEMORY
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
async def test_memory_of_the_callers_own_is_registered_where_it_is(
    store: Store, key: str, make: Callable[[], Any]
) -> None:
    thing = make()
    before = memoryview(thing).tobytes()
    async with store.register(thing) as buffer:
        assert (len(buffer), buffer.nbytes, buffer.readonly) == (len(before), len(before), False)
        await store.put_from(key, buffer)
        assert await store.get(key) == before
        filled(buffer, bytes(len(before)))
        assert memoryview(thing).tobytes() == bytes(len(before))
        assert await store.get_into(key, buffer) == len(before)
    assert memoryview(thing).tobytes() == before


@IN_OUR_MEMORY
async def test_memory_is_registered_by_its_address(store: Store, key: str) -> None:
    tensor: Any = np.frombuffer(bytearray(content(5000)), np.uint8)
    async with store.register(address=tensor.ctypes.data, nbytes=5000, owner=tensor) as buffer:
        assert buffer.view is None
        assert buffer[3:5].view is None
        assert (buffer.address, len(buffer)) == (tensor.ctypes.data, 5000)
        await store.put_from(key, buffer[10:20])
        assert await store.get_into(key, buffer[4000:]) == 10
    assert tensor[4000:4010].tobytes() == content(20)[10:]
    with pytest.raises(TypeError, match="no Python buffer"):
        buffer.__buffer__(0)
    with pytest.raises(TypeError, match="no Python buffer"):
        buffer[1:2].__buffer__(0)


@IN_OUR_MEMORY
async def test_memory_by_its_address_can_be_kept_alive_by_its_owner(store: Store) -> None:
    gone = threading.Event()

    class Tensor:
        def __init__(self) -> None:
            self.memory = mmap.mmap(-1, 4096)

        def __del__(self) -> None:
            gone.set()

    tensor = Tensor()
    address = np.frombuffer(tensor.memory, np.uint8).ctypes.data
    buffer = await store.register(address=address, nbytes=4096, owner=tensor)
    del tensor
    gc.collect()
    assert not gone.is_set()
    await buffer.aclose()
    del buffer
    gc.collect()
    assert gone.is_set()


@IN_OUR_MEMORY
async def test_registered_memory_can_not_be_resized(store: Store) -> None:
    grown = bytearray(100)
    async with store.register(grown):
        with pytest.raises(BufferError):
            grown.append(1)
    await asyncio.sleep(0)


# --- slices -----------------------------------------------------------------------------------


async def test_slices_of_slices_name_the_same_bytes(store: Store, buffer: Buffer) -> None:
    filled(buffer, content(1 * MB))
    plain = content(1 * MB)
    for first in (slice(100, 900), slice(-50, None), slice(None), slice(5, 10**9)):
        for second in (slice(3, 20), slice(-7, -2), slice(None, 4), slice(30, 10)):
            part = buffer[first][second]
            assert bytes_of(part) == plain[first][second]
            assert len(part) == part.nbytes == len(plain[first][second])
    assert repr(buffer[1:3]) == f"<Slice [1:3] of <Buffer {1 * MB} bytes>>"


async def test_only_whole_stretches_are_cut(buffer: Buffer) -> None:
    for step in (2, -1):
        with pytest.raises(InvalidArgumentError, match="no steps"):
            buffer[::step]
    for index in (3, "a", None):
        with pytest.raises(TypeError, match="by slices"):
            buffer[index]  # type: ignore[index]
    with pytest.raises(TypeError):
        buffer["a":"b"]


async def test_empty_memory_is_refused(store: Store, key: str, buffer: Buffer) -> None:
    for empty in (buffer[3:3], buffer[9:2], buffer[-1:-4], [buffer[:1], buffer[2:2]], []):
        with pytest.raises(InvalidArgumentError, match=r"empty slice|no memory"):
            await store.put_from(key, empty)
        with pytest.raises(InvalidArgumentError, match=r"empty slice|no memory"):
            await store.get_into(key, empty)
    assert not await store.exists(key)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [b"bytes", bytearray(5), None, 7, memoryview(b"x"), "text"])
async def test_memory_that_is_not_registered_is_refused(
    store: Store, key: str, buffer: Buffer, foreign: Any
) -> None:
    calls = store.stats().calls
    for memory in (foreign, [buffer[:1], foreign]):
        with pytest.raises(InvalidArgumentError, match="needs registered memory"):
            await store.put_from(key, memory)
        with pytest.raises(InvalidArgumentError, match="needs registered memory"):
            await store.get_into(key, memory)
    assert store.stats().calls == calls


@IN_OUR_MEMORY
async def test_read_only_memory_is_stored_but_never_written(store: Store, key: str) -> None:
    value = content(300 * KB)
    async with store.register(value) as buffer:
        assert buffer.readonly
        await store.put_from(key, buffer)
        for memory in (buffer, buffer[:5], [buffer[:3], buffer[3:5]]):
            with pytest.raises(InvalidArgumentError, match="read-only"):
                await store.get_into(key, memory)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            await store.get_into(key, buffer[:5], offset=1)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            await store.get_many_into({key: buffer})
    assert await store.get(key) == value == content(300 * KB)


async def test_a_closed_buffer_is_refused(store: Store, key: str) -> None:
    buffer = await store.allocate(100)
    part = buffer[:5]
    await buffer.aclose()
    await buffer.aclose()
    assert repr(buffer) == "<Buffer 100 bytes closed>"
    for memory in (buffer, part, [part]):
        with pytest.raises(InvalidArgumentError, match="closed"):
            await store.put_from(key, memory)
        with pytest.raises(InvalidArgumentError, match="closed"):
            await store.get_into(key, memory)


async def test_memory_of_another_store_is_refused(
    store: Store, open_store: Any, key: str, buffer: Buffer
) -> None:
    another = await open_store("memory://another", rank=9)
    with pytest.raises(InvalidArgumentError, match=r"\[TP9\].*registered with <Store TP3"):
        await another.put_from(key, buffer)
    with pytest.raises(InvalidArgumentError, match="register it with this store"):
        await another.get_into(key, [buffer[:1]])


BAD_MEMORY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "text": {"memory": "secret"},
    "number": {"memory": 5},
    "empty": {"memory": bytearray()},
    "strided": {"memory": np.zeros((4, 4))[:, ::2]},
    "Fortran order": {"memory": np.zeros((4, 4), order="F")},
    "both": {"memory": bytearray(5), "address": 4096, "nbytes": 5},
    "size alone": {"nbytes": 5},
    "address alone": {"address": 4096},
    "no bytes": {"address": 4096, "nbytes": 0},
    "negative": {"address": 4096, "nbytes": -5},
    "null": {"address": 0, "nbytes": 5},
    "address as text": {"address": "4096", "nbytes": 5},
}


@pytest.mark.parametrize("arguments", BAD_MEMORY.values(), ids=BAD_MEMORY)
async def test_what_can_not_be_registered_is_refused(
    store: Store, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[TP3\] register") as caught:
        await store.register(**arguments)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", [0, "0", -1, "many", 1.5, None])
async def test_a_size_that_makes_no_sense_is_refused(store: Store, size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nbytes|at least one"):
        await store.allocate(size)


@IN_OUR_MEMORY
async def test_memory_that_is_registered_already_is_refused(store: Store) -> None:
    memory = memoryview(bytearray(100 * KB))
    async with store.register(memory):
        for overlapping in (memory, memory[:50], memory[5000:]):
            with pytest.raises(InvalidArgumentError, match="overlaps what is registered"):
                await store.register(overlapping)
    async with store.register(memory[:5000]):
        pass


async def test_the_error_tells_both_sizes(store: Store, key: str, buffer: Buffer) -> None:
    await store.put(key, content(500))
    filled(buffer, b"." * 1000)
    for memory in (buffer[:499], [buffer[:100], buffer[200:300]]):
        with pytest.raises(BufferTooSmallError, match=r"500 bytes.*the memory (499|200)") as caught:
            await store.get_into(key, memory)
        assert caught.value.key == key
        assert caught.value.rank == 3
        assert isinstance(caught.value, BufferError)
    assert bytes_of(buffer[:1000]) == b"." * 1000
    large = f"{key}-large"
    await store.put(large, content(9 * MB))
    with pytest.raises(BufferTooSmallError, match=f"{9 * MB} bytes.*the memory {1 * MB}"):
        await store.get_into(large, buffer)
    async with store.allocate(8 * MB + 5) as more:
        with pytest.raises(BufferTooSmallError, match=f"{9 * MB} bytes.*the memory {8 * MB + 5}"):
            await store.get_into(large, more)


async def test_bad_keys_are_refused_and_leave_the_memory(store: Store, buffer: Buffer) -> None:
    released: list[int] = []
    for bad in ("", b"bytes", None, "\ud800"):
        with pytest.raises(InvalidArgumentError):
            await store.put_from(bad, buffer, on_release=lambda: released.append(1))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            await store.get_into(bad, buffer, on_release=lambda: released.append(1))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            store.view(bad)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert len(released) == 8
    assert buffer._users == 0


# --- ranges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 300 * KB, 20 * MB])
async def test_a_range_of_a_value_is_read(store: Store, key: str, size: int) -> None:
    value = content(size)
    await store.put(key, value)
    async with store.allocate(size) as buffer:
        for offset, room in [(0, 10), (1, 1), (500, 100), (size - 3, 3), (0, size), (7, size - 7)]:
            filled(buffer, bytes(size))
            assert await store.get_into(key, buffer[:room], offset=offset) == room
            assert bytes_of(buffer[:room]) == value[offset : offset + room]
            assert not any(bytes_of(buffer[room : room + 50]))


async def test_a_range_ends_with_the_value(store: Store, key: str, buffer: Buffer) -> None:
    await store.put(key, b"0123456789")
    filled(buffer, b"." * 20)
    assert await store.get_into(key, buffer[:20], offset=7) == 3
    assert bytes_of(buffer[:20]) == b"789" + b"." * 17
    for beyond in (10, 11, 1 << 40):
        with pytest.raises(InvalidArgumentError, match=f"from byte {beyond} on.*10 bytes"):
            await store.get_into(key, buffer[:5], offset=beyond)
    for bad in (-1, 1.5, "3"):
        with pytest.raises(InvalidArgumentError, match="offset of 0 or more"):
            await store.get_into(key, buffer[:5], offset=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="one slice"):
        await store.get_into(key, [buffer[:5], buffer[5:9]], offset=1)
    assert buffer._users == 0


# --- progress ---------------------------------------------------------------------------------


@IN_OUR_MEMORY
async def test_large_moves_go_in_pieces_and_tell_of_it(store: Store, key: str) -> None:
    loop_thread = threading.get_ident()
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        assert threading.get_ident() == loop_thread
        told.append((done, total))

    size = 20 * MB
    expected = [(8 * MB, size), (16 * MB, size), (size, size)]
    async with store.allocate(size) as source, store.allocate(21 * MB) as target:
        filled(source, content(size))
        await store.put_from(key, source, on_progress=tell)
        assert told == expected
        told.clear()
        await store.get_into(key, target, on_progress=tell)
        assert told == expected
        assert bytes_of(target[:size]) == content(size)
        told.clear()
        await store.get_into(key, target[:17_000_000], offset=5, on_progress=tell)
        assert told == [(done, 17_000_000) for done in (8 * MB, 16 * MB, 17_000_000)]
        assert bytes_of(target[:17_000_000]) == content(size)[5:17_000_005]


async def test_the_end_of_a_large_move_is_told_also_when_it_goes_whole(
    store: Store, key: str
) -> None:
    """As it does where the engine has no sessions: a dummy client's, or an older wheel's."""
    told: list[tuple[int, int]] = []
    size = 9 * MB
    async with store.allocate(size) as buffer:
        filled(buffer, content(size))
        for move in (store.put_from, store.get_into):
            await move(key, buffer, on_progress=lambda *news: told.append(news))
            assert told.count((size, size)) == 1
            assert told.pop() == (size, size)
            told.clear()
        small = buffer[: 64 * KB]
        await store.put_from(f"{key}small", small, on_progress=lambda *news: told.append(news))
        assert told == []


async def test_moves_of_many_keys_tell_after_each(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    told: list[tuple[int, int]] = []
    items = {key: buffer[i * 10 : i * 10 + 10] for i, key in enumerate(keys(5))}
    await store.put_many_from(items, on_progress=lambda *news: told.append(news))
    assert told == [(done, 50) for done in (10, 20, 30, 40, 50)]
    told.clear()
    await store.get_many_into(items, on_progress=lambda *news: told.append(news))
    assert told[-1] == (50, 50)


# --- the end of a buffer ----------------------------------------------------------------------


async def test_a_buffer_that_is_dropped_does_no_harm(store: Store, key: str) -> None:
    """It stays registered, and mapped, until the store is closed."""
    buffer = await store.allocate(64 * KB)
    address = buffer.address
    filled(buffer, content(64 * KB))
    del buffer
    gc.collect()
    assert await store.engine.put_from(key, address, 64 * KB) == 0
    assert await store.get(key) == content(64 * KB)
    store._client._kept.pop(next(k for k, v in store._client._kept.items() if is_at(v, address)))
    assert await store.engine.unregister_buffer(address) == 0


def is_at(kept: object, address: int) -> bool:
    return isinstance(kept, Buffer) and kept.address == address


@IN_OUR_MEMORY
async def test_a_cancelled_scope_unregisters_its_buffers(store: Store) -> None:
    """With anyio every await of a scope is cancelled, also that of the end of the block."""
    memory = bytearray(64 * KB)
    with anyio.CancelScope() as scope:
        async with store.register(memory):
            scope.cancel()
            await asyncio.sleep(0)
    async with store.register(memory):
        pass


@IN_OUR_MEMORY
async def test_a_cancelled_registration_leaves_nothing_registered(store: Store) -> None:
    """The memory was let go of, while the engine still knew it."""
    memory = bytearray(64 * KB)
    for turns in range(6):
        task = asyncio.ensure_future(store.register(memory))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(turns / 10_000, scope.cancel)
            buffer = await store.register(memory)
            await buffer.aclose()
        async with store.register(memory):
            pass


@IN_OUR_MEMORY
async def test_a_store_may_be_closed_with_its_buffers_open(
    store: Store, open_store: Any, key: str
) -> None:
    target = target_of(store)
    mine = await open_store(target, global_segment_size=0, local_buffer_size=0)
    buffer, other = await mine.allocate(1 * MB), await mine.register(bytearray(100))
    await mine.put_from(key, buffer)
    await mine.aclose()
    filled(buffer, content(1 * MB))
    assert bytes_of(buffer[:5]) == content(5)
    with pytest.raises(StoreClosedError):
        await mine.put_from(key, buffer)
    with pytest.raises(StoreClosedError):
        await mine.get_into(key, other[:5])
    with pytest.raises(StoreClosedError):
        await mine.allocate(5)
    with pytest.raises(StoreClosedError):
        async with mine.view(key):
            pass
    await buffer.aclose()
    await other.aclose()
    assert buffer._users == 0


# --- views ------------------------------------------------------------------------------------


def seen(view: memoryview | None) -> bytes:
    assert view is not None
    return bytes(view)


def room(store: Store) -> int:
    """Bytes of the local buffer that views may still take."""
    return store._views.room


def all_room(store: Store) -> int:
    """Half of the local buffer; none of it in a dummy client, whose views are copies."""
    return 0 if store._transfers.shared is not None else 8 * MB


@pytest.fixture(autouse=True)
async def nothing_is_left(store: Store) -> AsyncIterator[None]:
    """Leave the next test all of the segment: a master that is short of room lets values go."""
    yield
    await store.remove_all(force=True)


@pytest.fixture(autouse=True)
def no_room_lost(store: Store) -> Iterator[None]:
    gc.collect()
    before = room(store)
    yield
    gc.collect()
    assert room(store) == before == all_room(store)


@pytest.mark.parametrize("size", [1, 300 * KB, 8 * MB, 9 * MB, 17 * MB])
async def test_a_value_of_any_size_is_seen(store: Store, key: str, size: int) -> None:
    """Also one that is larger than the local buffer."""
    await store.put(key, content(size))
    async with store.view(key) as view:
        assert view is not None
        assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, size, True)
        assert seen(view) == content(size)
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
    with pytest.raises(ValueError, match="released"):
        view[0]


async def test_a_missing_value_is_none(store: Store, key: str, missing: str) -> None:
    async with store.view(missing) as view:
        assert view is None
    await store.put(key, b"value")
    async with store.view_many([missing, key, missing]) as views:
        assert [view and bytes(view) for view in views] == [None, b"value", None]
    async with store.view_many([]) as views:
        assert views == []


async def test_many_values_are_seen_in_order(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    wanted = keys(300)
    await store.put_many({key: content(100, i) for i, key in enumerate(wanted)})
    asked = [*wanted, *wanted[5:7], wanted[0]]
    async with store.view_many(asked) as views:
        assert [view and bytes(view) for view in views] == [
            content(100, i) for i in (*range(300), 5, 6, 0)
        ]
    for view in views:
        assert view is not None
        with pytest.raises(ValueError, match="released"):
            bytes(view)


@IN_OUR_MEMORY
async def test_views_are_without_a_copy_where_there_is_room(store: Store, key: str) -> None:
    await store.put(key, content(1 * MB))
    async with store.view(key) as one, store.view(key) as two:
        assert room(store) == 6 * MB
        assert seen(one) == seen(two)


@IN_OUR_MEMORY
async def test_the_room_is_given_back(store: Store, key: str) -> None:
    """A thousand views of 1 MB each through 8 MB of room."""
    await store.put(key, content(1 * MB))
    for i in range(1000):
        async with store.view(key) as view:
            assert view is not None
            assert room(store) == 7 * MB
            assert view[i] == content(i + 1)[i]


async def test_an_exception_in_the_block_ends_the_view(store: Store, key: str) -> None:
    await store.put(key, b"value")
    with pytest.raises(KeyError):
        async with store.view(key) as view:
            raise KeyError
    assert view is not None
    with pytest.raises(ValueError, match="released"):
        bytes(view)


async def test_what_was_derived_from_a_view_stays_readable(store: Store, key: str) -> None:
    value = content(1 * MB)
    await store.put(key, value)
    async with store.view(key) as view:
        assert view is not None
        part = view[100:200]
        whole: Any = np.frombuffer(view, np.uint8)
        also: Any = np.asarray(view)
        held = pickle.PickleBuffer(view)  # holds an export of it: it can't be released
    del view
    for seed in range(40):  # would overwrite it if it was free
        await store.upsert(f"{key}-other", content(300 * KB, seed))
        async with store.view(f"{key}-other"):
            pass
    assert part == value[100:200]
    assert whole.tobytes() == also.tobytes() == value
    assert not whole.flags.writeable
    held.release()


async def test_an_export_that_is_held_does_not_keep_the_others(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    """``memoryview.release`` raises while somebody holds an export of the view."""
    wanted = keys(3)
    await store.put_many(dict.fromkeys(wanted, b"value"))
    async with store.view_many(wanted) as views:
        held = pickle.PickleBuffer(views[0])  # type: ignore[arg-type]
    for view in views[1:]:
        with pytest.raises(ValueError, match="released"):
            bytes(view)  # type: ignore[arg-type]
    assert bytes(held.raw()) == b"value"
    held.release()


@IN_OUR_MEMORY
async def test_a_view_may_be_awaited_and_lives_as_long_as_it_is_held(
    store: Store, key: str, eventually: Any
) -> None:
    await store.put(key, content(1 * MB))
    for _ in range(20):
        view = await store.view(key)
        assert seen(view) == content(1 * MB)
        assert room(store) >= 6 * MB
        views = await store.view_many([key])
        assert views[0] == view
        del view, views
    await eventually(lambda: room(store) == all_room(store))


async def test_views_that_hold_all_the_room_hold_nobody_up(
    store: Store, keys: Callable[[int], list[str]]
) -> None:
    """The engine itself answers misses and -600 when handles hold its local buffer."""
    wanted = keys(20)
    for i, key in enumerate(wanted):
        await store.put(key, content(1 * MB, i))
    async with store.view_many(wanted) as views:
        assert room(store) == 0
        assert await store.get_many(wanted) == views
        more = f"{wanted[0]}-more"
        await asyncio.gather(
            store.put(more, content(9 * MB)),
            store.upsert(wanted[0], content(5)),
            *map(store.get, wanted),
        )
        async with store.view(more) as view:
            assert seen(view) == content(9 * MB)
        assert await store.get(wanted[0]) == content(5)
        assert all(seen(view) == content(1 * MB, i) for i, view in enumerate(views))


async def test_handles_that_others_hold_make_no_false_miss(store: Store, key: str) -> None:
    await store.put(key, content(5 * MB))
    held = [await store.engine.get_buffer(key) for _ in range(3)]
    assert await store.engine.get_buffer(key) is None  # full
    async with store.view(key) as view:
        assert seen(view) == content(5 * MB)
    assert await store.get(key) == content(5 * MB)
    del held


async def test_a_view_sees_one_value_while_others_replace_it(store: Store, key: str) -> None:
    await store.put(key, content(100))
    async with store.view(key) as before:
        await store.upsert(key, content(300 * KB, 1))
        async with store.view(key) as after:
            assert (seen(before), seen(after)) == (content(100), content(300 * KB, 1))


async def test_a_view_leases_its_value(store: Store, key: str) -> None:
    await store.put(key, b"value")
    async with store.view(key):
        pass
    with pytest.raises(ObjectLeasedError):
        await store.remove(key)


async def test_many_tasks_see_the_same_value(store: Store, key: str) -> None:
    await store.put(key, b"value")

    async def look() -> None:
        async with store.view(key) as view:
            assert seen(view) == b"value"
            await asyncio.sleep(0)
            assert seen(view) == b"value"

    await asyncio.gather(*[look() for _ in range(100)])


async def test_cancelled_views_give_their_room_back(
    store: Store, key: str, eventually: Any, no_collections: None
) -> None:
    """A view that came when nobody waited for it any more kept its room for good.

    Or until somebody collected garbage: an opening kept the error that was thrown into it.
    """
    await store.put(key, content(1 * MB))

    async def look() -> None:
        async with store.view(key) as view:
            assert seen(view) == content(1 * MB)
            await asyncio.sleep(0.001)

    for turns in range(60):
        tasks = [asyncio.ensure_future(look()) for _ in range(3)]
        many = asyncio.ensure_future(store.view_many([key, f"{key}-missing"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in (*tasks[1:], many):
            task.cancel()
        await asyncio.wait([*tasks, many])
        await tasks[0]
        del tasks, task, many
    await eventually(lambda: room(store) == all_room(store))


async def test_without_a_local_buffer_views_are_copies(
    store: Store, open_store: Any, key: str
) -> None:
    target = target_of(store)
    bare = await open_store(target, global_segment_size=0, local_buffer_size=0)
    for size in (1, 300 * KB, 9 * MB):
        await store.upsert(key, content(size))
        async with bare.view(key) as view:
            assert seen(view) == content(size)
    async with bare.view_many([key, f"{key}-missing"]) as views:
        assert seen(views[0]) == content(9 * MB)
        assert views[1] is None


@pytest.mark.parametrize("scene", [views_outlive_the_store, buffers_are_left_behind])
def test_no_end_takes_the_process_down(store: Store, scene: Callable[[str], None]) -> None:
    address = target_of(store)
    ended = run_scene(scene, address).check(within=20)
    assert ended.out == "fine\n"


# --- put_parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [10, 300 * KB, 9 * MB])
async def test_parts_make_one_value(store: Store, key: str, large: int) -> None:
    numbers_ = np.arange(large // 4 * 4, dtype=np.uint32).reshape(4, -1)
    parts: list[Any] = [
        b"head",
        b"",
        bytearray(),
        memoryview(b""),
        np.empty((0, 3)),
        numbers_[:, ::2],
        memoryview(content(large))[1:],
        array("d", [2.5]),
    ]
    expected = b"".join(memoryview(part).tobytes() for part in parts)
    await store.put_parts(key, *parts)
    assert await store.get(key) == expected
    await store.put_parts(key, b"another")
    assert await store.get(key) == expected


async def test_parts_without_a_byte_are_refused(store: Store, key: str) -> None:
    for parts in ([], [b""], [b"", memoryview(b"")]):
        with pytest.raises(InvalidArgumentError, match="empty value"):
            await store.put_parts(key, *parts)
    for bad in ("text", None, 5):
        with pytest.raises(InvalidArgumentError, match="put_parts"):
            await store.put_parts(key, b"x", bad)


async def test_memory_of_python_objects_is_not_registered(store: Store) -> None:
    """Reading a value into it overwrote their addresses: a segmentation fault."""
    with pytest.raises(InvalidArgumentError, match="Python objects"):
        await store.register(np.array([None] * 4, dtype=object))


async def test_addresses_beyond_all_memory_are_refused(store: Store) -> None:
    with pytest.raises(InvalidArgumentError, match="end below"):
        await store.register(address=1 << 70, nbytes=3)


async def test_many_moves_need_a_mapping_and_let_go_all_the_same(
    store: Store, key: str, buffer: Buffer
) -> None:
    let_go: list[int] = []
    pairs: Any = [(key, buffer[:1])]
    for verb in (store.put_many_from, store.get_many_into):
        with pytest.raises(InvalidArgumentError, match="needs a mapping"):
            await verb(pairs, on_release=lambda: let_go.append(1))
    assert len(let_go) == 2


async def test_a_mapping_may_change_while_it_is_stored(
    store: Store, keys: Callable[[int], list[str]], buffer: Buffer
) -> None:
    one, other = keys(2)
    items: dict[str, Any] = {one: buffer[:1]}
    storing = asyncio.ensure_future(store.put_many_from(items))
    await asyncio.sleep(0)
    items[other] = buffer[:1]
    assert await storing == {one: None}

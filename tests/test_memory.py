"""How values are laid out as bytes, and the scratch memory that calls borrow."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import threading
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiomooncake._buffers import _MADV_POPULATE_WRITE, address_of, new_bytes, parts_of
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.errors import InvalidArgumentError
from aiomooncake.memory import (
    SCRATCH_SIZE,
    Block,
    Registrations,
    ScratchPool,
    gather,
    layout,
    map_memory,
)

KB = 1 << 10
SMALL = 64 * KB  # up to here mutable memory is copied on the spot


def lay(value: Any) -> Block | memoryview:
    return layout(value, verb="put", key="k", rank=3)


def content(block: Block | memoryview) -> bytes:
    if isinstance(block, memoryview):
        block = gather(block)
    return ctypes.string_at(block.address, block.nbytes)


# --- what is copied ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1])
def test_bytes_are_used_where_they_are(size: int) -> None:
    value = b"x" * size
    block = lay(value)
    assert isinstance(block, Block)
    assert block.address == address_of(memoryview(value))
    assert not block.mutable


def test_small_mutable_memory_is_copied_so_that_what_was_given_is_stored() -> None:
    value = bytearray(b"a" * SMALL)
    block = lay(value)
    value[:] = b"b" * SMALL
    value.clear()  # nobody holds on to it
    assert isinstance(block, Block)
    assert not block.mutable
    assert content(block) == b"a" * SMALL


def test_large_mutable_memory_is_used_where_it_is_and_kept_in_place() -> None:
    value = bytearray(SMALL + 1)
    block = lay(value)
    assert isinstance(block, Block)
    assert block.mutable
    assert block.address == address_of(memoryview(value))
    with pytest.raises(BufferError):
        value.clear()
    del block
    value.clear()


def test_a_view_of_bytes_is_as_good_as_bytes() -> None:
    block = lay(memoryview(b"x" * 2 * SMALL)[SMALL - 1 :])
    assert isinstance(block, Block)
    assert not block.mutable


def test_a_read_only_view_of_mutable_memory_is_mutable() -> None:
    block = lay(memoryview(bytearray(2 * SMALL)).toreadonly())
    assert isinstance(block, Block)
    assert block.mutable


def test_small_strided_memory_is_laid_out_on_the_spot_and_large_one_later() -> None:
    small, large = lay(memoryview(bytes(2 * SMALL))[::2]), lay(memoryview(bytes(3 * SMALL))[::2])
    assert isinstance(small, Block)
    assert isinstance(large, memoryview)


# --- strides ----------------------------------------------------------------------------------

NUMBERS = np.arange(720_720, dtype=np.int32)
STRIDED = {
    "every other": NUMBERS[::2],
    "backwards": NUMBERS[::-1],
    "transposed": NUMBERS.reshape(720, 1001).T,
    "Fortran order": np.asfortranarray(NUMBERS.reshape(2, 360, 1001)),
    "keys and values": NUMBERS.reshape(2, 360, 1001)[:, ::3],
    "one row": NUMBERS[None, ::2],
    "middle": NUMBERS.reshape(12, 60, 1001)[1:-1, 2:-2, 3:-3],
    "axes swapped": NUMBERS.reshape(9, 10, 8, 1001).transpose(2, 0, 3, 1),
    "backwards in two dimensions": NUMBERS.reshape(720, 1001)[::-2, ::-3],
    "the same all over": np.broadcast_to(np.arange(7.0), (30_000, 7)),
    "large items": np.zeros(5, "S70000")[::2],
    "fields of a record": np.zeros(50_000, "i2,f8")["f1"],
}


@pytest.mark.parametrize("values", STRIDED.values(), ids=STRIDED)
def test_strided_memory_is_gathered_in_c_order(values: np.ndarray[Any, Any]) -> None:
    view = lay(values)
    assert isinstance(view, memoryview)
    assert content(view) == values.tobytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), items=st.integers(1, 40))
def test_any_strided_memory_is_copied_in_parts(data: st.DataObject, items: int) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="shape")
    values: Any = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    steps = st.sampled_from([1, 2, 3, -1, -2])
    values = values[tuple(slice(None, None, data.draw(steps)) for _ in shape)]
    values = values.transpose(data.draw(st.permutations(range(len(shape))), label="axes"))
    parts = list(parts_of(memoryview(values), items))
    assert b"".join(parts) == values.tobytes()
    assert max(map(len, parts)) <= items * values.itemsize


def test_gathering_leaves_the_gil_to_others() -> None:
    """A first dimension of length 1 once meant one copy of everything, 187 ms with the GIL."""
    view = lay(np.zeros((4096, 4096), np.uint8).T[None])
    assert isinstance(view, memoryview)
    longest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0005)
            last, before = time.perf_counter(), last
            longest = max(longest, last - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    gather(view)
    done.set()
    watcher.join()
    assert longest < 0.08


# --- what is refused --------------------------------------------------------------------------

NO_BUFFERS = {
    "None": None,
    "text": "secret",
    "int": 3,
    "list": [1, 2],
    "object": object(),
    "dates": np.array(["2020-01-01"], "datetime64[s]"),
    "texts": ["secret"],
}


@pytest.mark.parametrize("value", NO_BUFFERS.values(), ids=NO_BUFFERS)
def test_what_is_no_buffer_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="put of 'k' needs bytes") as caught:
        lay(value)
    assert caught.value.key == "k"
    assert caught.value.rank == 3
    assert "secret" not in str(caught.value)


def test_a_released_view_is_refused() -> None:
    view = memoryview(b"x")
    view.release()
    with pytest.raises(InvalidArgumentError, match="released"):
        lay(view)


EMPTY = {
    "bytes": b"",
    "bytearray": bytearray(),
    "array": array("i"),
    "no rows": np.empty((0, 3)),
    "no columns": np.empty((3, 0)),
    "empty slice": memoryview(b"abc")[1:1:2],
}


@pytest.mark.parametrize("value", EMPTY.values(), ids=EMPTY)
def test_empty_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="empty value"):
        lay(value)


OBJECTS = {
    "array": np.array([1, None], object),
    "field": np.zeros(2, [("Offset", "i4"), ("what", object)]),
    "ctypes": (ctypes.py_object * 2)(),
}


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
def test_arrays_of_objects_are_refused(value: Any) -> None:
    """Their memory holds addresses, which were stored as if they were values."""
    with pytest.raises(InvalidArgumentError, match="Python objects"):
        lay(value)


def test_a_field_may_be_called_o() -> None:
    values = np.arange(3, dtype=np.int32).view([("O", "i4")])
    assert content(lay(values)) == np.arange(3, dtype=np.int32).tobytes()


# --- memory by address ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [5, 256 * KB - 1, 256 * KB, 1024 * KB + 304, 5 << 20])
def test_fresh_bytes_are_filled_at_their_address(nbytes: int) -> None:
    value, address = new_bytes(nbytes)
    content = (b"fresh" * nbytes)[:nbytes]
    ctypes.memmove(address, content, nbytes)
    assert value == content


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such advice")
def test_fresh_bytes_are_there_before_the_engine_touches_them() -> None:
    """Page by page they made up half of the time in which 1 MB was read."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        page.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        return  # older than Linux 5.14
    values = [new_bytes(1024 * KB) for _ in range(32)]  # more than the heap has to spare
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _, address in values:
        ctypes.memset(address, 1, 1024 * KB)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 32 * (1024 * KB // mmap.PAGESIZE) // 10


def test_addresses_are_right_for_any_contiguous_memory() -> None:
    memory = mmap.mmap(-1, 4096)
    numbers: Any = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert address_of(memoryview(numbers)) == numbers.ctypes.data
    assert address_of(memoryview(memory)[7:]) == address_of(memoryview(memory)) + 7


# --- scratch ----------------------------------------------------------------------------------


@pytest.fixture
def native() -> InMemoryStore:
    native = InMemoryStore(InMemoryEngine())
    assert native.setup("h", "P2PHANDSHAKE", 0, 0, "tcp", "", "m") == 0
    return native


def test_scratch_is_registered_once_and_used_again(native: InMemoryStore) -> None:
    pool = ScratchPool(map_memory)
    first, second = pool.borrow(native), pool.borrow(native)
    assert native.register_buffer(first.address, SCRATCH_SIZE) == -600
    assert first.address != second.address
    pool.give_back(first)
    assert pool.borrow(native) is first


def test_scratch_is_written_and_read_in_place(native: InMemoryStore) -> None:
    scratch = ScratchPool(map_memory).borrow(native)
    block = lay(b"hello")
    assert isinstance(block, Block)
    assert scratch.write(10, block) == scratch.address + 10
    assert scratch.read(10, 5) == b"hello"
    assert ctypes.string_at(scratch.address + 10, 5) == b"hello"


# --- memory of values, registered while it is moved -------------------------------------------


def test_jobs_that_move_the_same_memory_share_its_registration(native: InMemoryStore) -> None:
    value = bytes(4096)
    memory = address_of(memoryview(value))
    registrations = Registrations()
    assert registrations.enter(native, memory, 4096) == 0
    assert registrations.enter(native, memory, 4096) == 0
    assert registrations.enter(native, memory + 100, 200) == 0
    registrations.leave(native, memory)
    registrations.leave(native, memory)
    assert native.register_buffer(memory, 4096) == -600  # still registered
    registrations.leave(native, memory + 100)
    assert native.register_buffer(memory, 4096) == 0


def test_memory_that_overlaps_otherwise_is_waited_for(native: InMemoryStore) -> None:
    value = bytes(4096)
    memory = address_of(memoryview(value))
    registrations = Registrations()
    assert registrations.enter(native, memory, 2048) == 0
    codes: list[int] = []
    other = threading.Thread(
        target=lambda: codes.append(registrations.enter(native, memory + 1000, 2048))
    )
    other.start()
    other.join(0.05)
    assert other.is_alive()
    registrations.leave(native, memory)
    other.join()
    assert codes == [0]
    registrations.leave(native, memory + 1000)
    assert native.unregister_buffer(memory + 1000) == -600  # it was unregistered


def test_memory_that_the_caller_has_registered_is_told_apart(native: InMemoryStore) -> None:
    value = bytes(4096)
    memory = address_of(memoryview(value))
    registrations = Registrations()
    assert native.register_buffer(memory + 10, 10) == 0
    assert registrations.enter(native, memory, 4096) == -600
    assert native.unregister_buffer(memory + 10) == 0
    assert registrations.enter(native, memory, 4096) == 0
    registrations.leave(native, memory)

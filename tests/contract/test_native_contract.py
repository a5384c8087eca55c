"""What the native binding answers, checked on the in-memory engine and on the real one.

Whatever is asserted here was seen on the real engine; the in-memory one has to agree, because all
unit tests of the upper floors believe it.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import subprocess
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from aiomooncake.engine.binding import (
    NativeStore,
    _parameters,
    find_address_methods,
    find_methods,
    load_binding,
)
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from tests.contract import unset_calls
from tests.contract.engines import LEASE, MB, Engine, Memory

# --- one value --------------------------------------------------------------------------------


def test_a_value_comes_back(native: NativeStore, key: str) -> None:
    assert native.put(key, b"one") == 0
    assert native.get(key) == b"one"
    assert native.is_exist(key) == 1
    assert native.get_size(key) == 3


def test_a_miss_is_empty_bytes_or_a_code(native: NativeStore, missing: str) -> None:
    assert native.get(missing) == b""
    assert native.get("") == b""
    assert native.get_buffer(missing) is None
    assert native.is_exist(missing) == 0
    assert native.get_size(missing) == -704
    assert native.remove(missing) == -704
    assert native.remove(missing, True) == -704


def test_empty_values_and_empty_keys_are_refused(native: NativeStore, key: str) -> None:
    assert native.put(key, b"") == -600
    assert native.put("", b"value") == -600
    assert native.upsert(key, b"") == -600
    assert native.upsert("", b"value") == -600
    assert native.put_parts("", b"value") == -600
    assert native.is_exist(key) == 0


def test_no_bytes_at_all_count_as_success_and_store_nothing(native: NativeStore, key: str) -> None:
    memory = Memory(b"abc")
    assert native.put_parts(key) == 0
    assert native.put_parts(key, b"", b"") == 0
    assert native.upsert_parts(key, b"") == 0
    assert native.put_from(key, memory.ptr, 0) == 0
    assert native.upsert_from(key, memory.ptr, 0) == 0
    assert native.is_exist(key) == 0


def test_the_first_value_stays(native: NativeStore, key: str) -> None:
    memory = Memory(b"four")
    assert native.put(key, b"one") == 0
    assert native.put(key, b"two") == 0
    assert native.put_parts(key, b"th", b"ree") == 0
    assert native.put_from(key, memory.ptr, 4) == 0
    assert native.put_batch([key], [b"five"]) == 0
    assert native.batch_put_from([key], [memory.ptr], [4]) == [0]
    assert native.get(key) == b"one"


def test_upsert_replaces_also_under_a_lease(native: NativeStore, key: str) -> None:
    assert native.upsert(key, b"one") == 0
    assert native.get(key) == b"one"
    assert native.upsert(key, b"two") == 0
    assert native.get(key) == b"two"
    assert native.upsert_parts(key, b"lon", b"ger") == 0
    assert native.get(key) == b"longer"


def test_an_upsert_that_finds_no_room_loses_the_old_value(native: NativeStore, key: str) -> None:
    memory = Memory(b"", 80 * MB)
    assert native.put(key, b"precious") == 0
    assert native.upsert_from(key, memory.ptr, 80 * MB) == -200
    assert native.get(key) == b""
    assert native.get_size(key) == -704


def test_parts_are_joined(native: NativeStore, key: str) -> None:
    assert native.put_parts(key, b"ab", b"", bytearray(b"cd")) == 0
    assert native.get(key) == b"abcd"


def test_strides_are_ignored(native: NativeStore, key: str, other: str) -> None:
    assert native.put(key, memoryview(b"abcdef")[::2]) == 0
    assert native.get(key) == b"abc"
    assert native.put_parts(other, memoryview(b"abcdef")[::2]) == 0
    assert native.get(other) == b"abc"


def test_array_items_are_counted_not_bytes(native: NativeStore, key: str, other: str) -> None:
    assert native.put(key, array("i", [1, 2, 3])) == 0
    assert native.get(key) == array("i", [1, 2, 3]).tobytes()[:3]
    table = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert native.upsert_batch([other], [table]) == 0
    assert native.get(other) == table.tobytes()[:6]


def test_memory_order_is_kept(native: NativeStore, key: str) -> None:
    assert native.put(key, np.arange(6, dtype=np.int8).reshape(2, 3).T) == 0
    assert native.get(key) == bytes(range(6))


def test_parts_of_wider_items_are_refused(native: NativeStore, key: str) -> None:
    with pytest.raises(RuntimeError, match="1-D bytes-like"):
        native.put_parts(key, array("i", [1]))
    with pytest.raises(RuntimeError, match="1-D bytes-like"):
        native.upsert_parts(key, memoryview(b"abcd").cast("B", (2, 2)))


@pytest.mark.parametrize("value", ["text", None, 7])
def test_other_values_are_a_type_error(native: NativeStore, key: str, value: object) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.put(key, value)


def test_no_config_is_not_a_config(native: NativeStore, key: str) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.put(key, b"v", None)


def test_keys_may_be_any_text(native: NativeStore, key: str) -> None:
    names = [f"{key}-ключ", f"{key}\0nul", f"{key}\n"]
    assert native.put_batch(names, [b"1", b"2", b"3"]) == 0
    assert native.get_batch(names) == [b"1", b"2", b"3"]


def test_keys_are_a_list_not_a_text(native: NativeStore) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.get_batch("ab")


# --- leases and removal -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "many"),
    [
        ("get", False),
        ("get_batch", True),
        ("get_buffer", False),
        ("batch_get_buffer", True),
        ("is_exist", False),
        ("batch_is_exist", True),
        ("get_size", False),
        ("get_replica_desc", False),
        ("batch_get_replica_desc", True),
        ("batch_get_session_start", True),
    ],
)
def test_reading_and_looking_protect_a_key(
    native: NativeStore, key: str, reader: str, many: bool
) -> None:
    native.put(key, b"value")
    getattr(native, reader)([key] if many else key)
    assert native.remove(key) == -706
    assert native.batch_remove([key]) == [-706]
    assert native.remove(key, True) == 0


def test_writing_does_not_protect_a_key(native: NativeStore, key: str) -> None:
    native.put(key, b"value")
    native.put(key, b"other")
    native.upsert(key, b"third")
    assert native.remove(key) == 0


def test_a_lease_ends(native: NativeStore, key: str) -> None:
    native.put(key, b"value")
    native.batch_get_session_start([key])
    memory = Memory(b"", 8)
    assert native.remove(key) == -706
    time.sleep(LEASE + 0.2)  # the lease has no event
    read = native.batch_get_into_multi_buffer_ranges([key], [[memory.ptr]], [[5]], [[0]])
    assert read == [-707]
    assert native.remove(key) == 0


def test_batch_remove_answers_per_key(native: NativeStore, key: str, other: str) -> None:
    native.put_batch([key, other], [b"1", b"2"])
    native.is_exist(key)
    assert native.batch_remove([key, other, other, ""]) == [-706, 0, -704, -704]
    assert native.batch_remove([key], True) == [0]
    assert native.batch_remove([]) == []


def test_removal_by_pattern_counts_and_searches(native: NativeStore, key: str) -> None:
    names = [f"a-{key}-1", f"b-{key}-2", f"c-{key}-3"]
    native.put_batch(names, [b"1", b"2", b"3"])
    native.is_exist(names[2])
    assert native.remove_by_regex(rf"{key}-\d") == 2
    assert native.remove_by_regex(f"^c-{key}", True) == 1
    assert native.remove_by_regex(f"^c-{key}", True) == 0


@pytest.mark.parametrize("pattern", ["([", "(?<=a)b", "(?P<name>a)", "(?i)a"])
def test_a_pattern_that_is_no_ecmascript_is_refused(native: NativeStore, pattern: str) -> None:
    assert native.remove_by_regex(pattern) == -600


def test_posix_classes_work_in_patterns(native: NativeStore, key: str) -> None:
    native.put(f"{key}Zz", b"1")
    assert native.remove_by_regex(f"^{key}[[:alpha:]]+$") == 1


def test_remove_all_spares_what_is_leased(native: NativeStore, key: str, other: str) -> None:
    native.remove_all(True)
    native.put_batch([key, other], [b"1", b"2"])
    native.is_exist(key)
    assert native.remove_all() == 1
    assert native.batch_is_exist([key, other]) == [1, 0]
    assert native.remove_all(True) == 1
    assert native.remove_all(True) == 0


# --- the local buffer -------------------------------------------------------------------------


def test_a_value_larger_than_the_local_buffer_is_a_false_miss(
    native: NativeStore, key: str, other: str
) -> None:
    size = 17 * MB
    memory = Memory(b"begin", size)
    assert native.put(other, memory[:]) == -600
    assert native.put_from(key, memory.ptr, size) == 0
    assert native.get(key) == b""
    assert native.get_buffer(key) is None
    assert native.get_size(key) == size
    target = Memory(b"", size)
    assert native.get_into(key, target.ptr, size) == size
    assert target[:5] == b"begin"
    native.remove(key, True)


def test_a_batch_larger_than_the_local_buffer_is_cut_short(native: NativeStore, key: str) -> None:
    names = [f"{key}-{number}" for number in range(20)]
    megabyte = bytes(MB)
    assert native.put_batch(names, [megabyte] * 20) == -600
    assert native.batch_is_exist(names) == [0] * 20
    for name in names:
        assert native.put(name, megabyte) == 0
    assert [len(value) for value in native.get_batch(names)] == [MB] * 16 + [0] * 4
    handles = native.batch_get_buffer(names)
    assert [handle is None for handle in handles] == [False] * 16 + [True] * 4
    del handles
    native.remove_by_regex(key, True)


def test_held_handles_take_the_room_of_everything(
    native: NativeStore, key: str, other: str, missing: str
) -> None:
    native.put(other, b"small")
    native.put_batch([key], [bytes(16 * MB)])
    handle = native.get_buffer(key)
    assert handle is not None
    assert native.put(missing, b"v") == -600
    assert native.upsert(missing, b"v") == -600
    assert native.put_parts(missing, b"v") == -600
    assert native.put_batch([missing], [b"v"]) == -600
    assert native.get(other) == b""
    assert native.get_buffer(other) is None
    assert native.batch_get_buffer([other]) == [None]
    del handle
    assert native.get(other) == b"small"
    native.remove(key, True)


def test_a_client_without_local_buffer_goes_by_address_only(
    native: NativeStore, bare: NativeStore, key: str, other: str
) -> None:
    native.put(key, b"abc")
    assert bare.get(key) == b""
    assert bare.get_batch([key]) == [b""]
    assert bare.batch_get_buffer([key]) == [None]
    assert bare.put(other, b"v") == -600
    assert bare.upsert_batch([other], [b"v"]) == -600
    memory = Memory(b"", 8)
    assert bare.get_into(key, memory.ptr, 8) == 3
    assert memory[:3] == b"abc"
    assert bare.put_from(other, memory.ptr, 3) == 0
    assert native.get(other) == b"abc"


def test_a_handle_has_an_address_and_a_size(native: NativeStore, key: str) -> None:
    native.put(key, b"content")
    handle = native.get_buffer(key)
    assert handle is not None
    assert handle.size() == len(handle) == 7
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"content"
    native.upsert(key, b"CONTENT")
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"content"


def test_a_handle_is_a_buffer(engine: Engine, native: NativeStore, key: str) -> None:
    if engine.name == "memory" and sys.version_info < (3, 12):
        pytest.skip("classes written in Python can export buffers from Python 3.12 on")
    native.put(key, b"content")
    view = memoryview(native.get_buffer(key))  # type: ignore[arg-type]
    assert bytes(view) == b"content"
    assert not view.readonly


# --- many values ------------------------------------------------------------------------------


def test_a_batch_answers_in_order(native: NativeStore, key: str, other: str, missing: str) -> None:
    assert native.put_batch([key, other], [b"1", b"22"]) == 0
    assert native.get_batch([other, missing, key, ""]) == [b"22", b"", b"1", b""]
    assert native.batch_is_exist([other, missing, key, "", key]) == [1, 0, 1, 0, 1]
    handles = native.batch_get_buffer([missing, other])
    assert handles[0] is None
    assert handles[1] is not None
    assert handles[1].size() == 2


def test_empty_batches(native: NativeStore) -> None:
    assert native.get_batch([]) == [b""]
    assert native.batch_get_buffer([]) == []
    assert native.batch_is_exist([]) == []
    assert native.put_batch([], []) == 0
    assert native.upsert_batch([], []) == 0
    assert native.batch_put_from([], [], []) == []
    assert native.batch_get_into([], [], []) == []
    assert native.batch_get_replica_desc([]) == {}


def test_a_key_given_twice_is_right_only_at_its_last_place(
    native: NativeStore, key: str, other: str
) -> None:
    """The engine fills one local buffer per key; the others keep what lay there before."""
    native.put_batch([key, other], [bytes(range(1, 200)), b"other"])
    found = native.get_batch([key, other, key])
    assert found[1:] == [b"other", bytes(range(1, 200))]
    assert len(found[0]) == 199


def test_put_batch_keeps_the_first_of_two_values(native: NativeStore, key: str, other: str) -> None:
    assert native.put_batch([key, key], [b"x", b"yy"]) == 0
    assert native.get(key) == b"x"
    assert native.upsert_batch([other, other], [b"x", b"yy"]) == 0
    assert native.get(other) == b"x"


def test_an_empty_value_spoils_its_whole_batch(native: NativeStore, key: str, other: str) -> None:
    assert native.put_batch([key, other], [b"x", b""]) == -600
    assert native.upsert_batch([key, other], [b"x", b""]) == -600
    assert native.batch_is_exist([key, other]) == [0, 0]


def test_an_empty_key_spoils_only_the_code_of_its_batch(native: NativeStore, key: str) -> None:
    assert native.put_batch([key, ""], [b"x", b"y"]) == -600
    assert native.get(key) == b"x"


def test_lists_of_different_lengths_are_refused(native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"abc")
    assert native.put_batch([key], []) == -600
    assert native.upsert_batch([key], []) == -600
    assert native.batch_put_from([key, other], [memory.ptr], [3]) == [-600, -600]
    assert native.batch_upsert_from([key, other], [memory.ptr], [3]) == [-600, -600]
    assert native.batch_get_into([key, other], [memory.ptr], [3]) == [-600, -600]
    two = [[memory.ptr, memory.ptr]]
    assert native.batch_put_from_multi_buffers([key], two, [[3]]) == [-600]
    assert native.batch_put_from_multi_buffers([key], [], []) == [-600]
    assert native.batch_get_into_multi_buffers([key, other], [[1]], [[1]]) == [-600, -600]
    assert native.batch_put_session_start([key], []) == [-600]


# --- caller memory ----------------------------------------------------------------------------


def test_batch_put_from_answers_per_key(native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"0123456789")
    codes = native.batch_put_from([key, "", other], [memory.ptr] * 3, [3, 4, 0])
    assert codes == [0, -600, -600]
    assert native.get(key) == b"012"
    assert native.is_exist(other) == 0
    codes = native.batch_upsert_from([key, "", other], [memory.ptr] * 3, [4, 4, 0])
    assert codes == [0, -600, -600]
    assert native.get(key) == b"0123"


def test_values_by_address_keep_the_last_of_two(native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"0123456789")
    ptrs = [memory.ptr, memory.ptr + 3]
    assert native.batch_put_from([key, key], ptrs, [3, 3]) == [0, 0]
    assert native.get(key) == b"345"
    assert native.batch_upsert_from([other, other], ptrs, [3, 3]) == [0, 0]
    assert native.get(other) == b"345"


def test_pieces_by_address_are_joined(native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"0123456789")
    at = memory.ptr
    pieces = [[at, at, at + 5], [at]]
    codes = native.batch_put_from_multi_buffers([key, other], pieces, [[2, 0, 3], [4]])
    assert codes == [0, 0]
    assert native.get_batch([key, other]) == [b"01567", b"0123"]


def test_pieces_by_address_keep_the_first_of_two(native: NativeStore, key: str) -> None:
    memory = Memory(b"0123456789")
    at = memory.ptr
    pieces = [[at], [at + 5]]
    assert native.batch_put_from_multi_buffers([key, key], pieces, [[2], [2]]) == [0, 0]
    assert native.get(key) == b"01"


def test_no_pieces_are_refused(native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"0")
    codes = native.batch_put_from_multi_buffers([key, other], [[], [memory.ptr]], [[], [0]])
    assert codes == [-600, -600]


def test_get_into_tells_what_is_wrong(native: NativeStore, key: str, missing: str) -> None:
    native.put(key, b"0123456789")
    memory = Memory(b"." * 32)
    assert native.get_into(key, memory.ptr, 9) == -600
    assert native.get_into(key, memory.ptr, 0) == -600
    assert native.get_into(missing, memory.ptr, 32) == -704
    assert memory[:] == b"." * 32
    assert native.get_into(key, memory.ptr, 32) == 10
    assert memory[:12] == b"0123456789.."


def test_batch_get_into_answers_per_key(
    native: NativeStore, key: str, other: str, missing: str
) -> None:
    native.put_batch([key, other], [b"0123456789", b"abc"])
    memory = Memory(b"." * 64)
    ptrs = [memory.ptr, memory.ptr + 16, memory.ptr + 32, memory.ptr + 48]
    read = native.batch_get_into([key, other, missing, key], ptrs, [5, 16, 16, 16])
    assert read == [-600, 3, -704, 10]
    assert memory[:16] == b"." * 16
    assert memory[16:20] == b"abc."
    assert memory[48:60] == b"0123456789.."


def test_of_a_key_read_twice_only_the_last_memory_is_written(native: NativeStore, key: str) -> None:
    native.put(key, b"abc")
    memory = Memory(b"." * 8)
    assert native.batch_get_into([key, key], [memory.ptr, memory.ptr + 4], [4, 4]) == [3, 3]
    assert memory[:] == b"....abc."
    memory = Memory(b"." * 8)
    ptrs, sizes = [[memory.ptr], [memory.ptr + 4]], [[3], [3]]
    assert native.batch_get_into_multi_buffers([key, key], ptrs, sizes) == [3, 3]
    assert memory[:] == b"....abc."


def test_a_piece_read_has_to_fit_exactly(native: NativeStore, key: str, other: str) -> None:
    native.put_batch([key, other], [b"0123456789", b"abc"])
    memory = Memory(b"." * 32)
    at = memory.ptr
    ptrs = [[at, at + 8], [at + 24]]
    read = native.batch_get_into_multi_buffers([key, other], ptrs, [[4, 6], [3]])
    assert read == [10, 3]
    assert memory[:] == b"0123....456789..........abc....."
    assert native.batch_get_into_multi_buffers([key, other], ptrs, [[4, 7], [3]]) == [-800, 3]
    assert native.batch_get_into_multi_buffers([key, other], ptrs, [[4, 5], [3]]) == [-600, 3]
    assert native.batch_get_into_multi_buffers([key], [[]], [[]]) == [-600]


def test_memory_is_registered_once(native: NativeStore) -> None:
    memory = Memory(b"", 4096)
    assert native.register_buffer(memory.ptr, 4096) == 0
    assert native.register_buffer(memory.ptr, 4096) == -600
    assert native.register_buffer(memory.ptr + 100, 100) == -600
    assert native.unregister_buffer(memory.ptr + 100) == -600
    assert native.unregister_buffer(memory.ptr) == 0
    assert native.unregister_buffer(memory.ptr) == -600
    assert native.register_buffer(memory.ptr, 0) == -600
    assert native.register_buffer(0, 4096) == -600


def test_ranges_need_registered_memory(
    native: NativeStore, key: str, other: str, missing: str
) -> None:
    native.put_batch([key, other], [b"0123456789", b"abc"])
    memory = Memory(b"." * 64)
    at = memory.ptr
    assert native.get_into_ranges([at], [[key]], [[[0]]], [[[0]]], [[[3]]]) == [[[-600]]]
    native.register_buffer(at, 64)
    ranges = ([[[0, 20], [40]]], [[[0, 5], [0]]], [[[3, 2], [3]]])
    assert native.get_into_ranges([at], [[key, other]], *ranges) == [[[3, 2], [3]]]
    assert memory[:22] + memory[40:44] == b"012.................56abc."
    assert native.get_into_ranges([at + 60], [[key]], [[[0]]], [[[0]]], [[[5]]]) == [[[-600]]]
    beyond = native.get_into_ranges([at], [[key]], [[[0, 0]]], [[[8, 0]]], [[[5, 1]]])
    assert beyond == [[[-600, 1]]]
    absent = native.get_into_ranges([at], [[missing]], [[[0, 1]]], [[[0, 1]]], [[[3, 1]]])
    assert absent == [[[-704, -704]]]
    assert native.get_into_ranges([at], [[key]], [[[0]]], [[[0]]], [[[0]]]) == [[[0]]]
    native.unregister_buffer(at)


def test_ranges_of_different_lengths_are_refused(native: NativeStore, key: str) -> None:
    native.put(key, b"0123456789")
    memory = Memory(b"", 64)
    at = memory.ptr
    native.register_buffer(at, 64)
    keys, one = [[key, key]], [[[0]]]
    assert native.get_into_ranges([at], [], [], [], []) == [[[-600]]]
    assert native.get_into_ranges([at], keys, one, one, [[[3]]]) == [[[-600], [-600]]]
    two = [[[0], [0]]]
    assert native.get_into_ranges([at], keys, two, two, [[[3], [1, 2]]]) == [[[3], [-600]]]
    assert native.get_into_ranges([], [], [], [], []) == []
    native.unregister_buffer(at)


# --- sessions ---------------------------------------------------------------------------------


def test_a_put_session_reserves_writes_and_ends(
    native: NativeStore, key: str, other: str, missing: str
) -> None:
    native.put(other, b"taken")
    memory = Memory(b"ABCDEFGHIJ")
    at = memory.ptr
    started = native.batch_put_session_start([key, other, "", missing], [10, 5, 5, 0])
    assert started == [0, -705, -600, -600]
    assert native.batch_put_session_start([key], [10]) == [-600]
    write = native.batch_put_from_multi_buffer_ranges
    assert write([key], [[at + 5, at]], [[5, 5]], [[5, 0]]) == [10]
    assert write([key], [[at]], [[5]], [[8]]) == [-600]
    assert write([missing], [[at]], [[5]], [[0]]) == [-600]
    assert native.batch_put_session_end([key, missing]) == [0, -600]
    assert native.get(key) == b"ABCDEFGHIJ"
    assert native.batch_put_session_end([key]) == [-600]


def test_a_reserved_key_is_neither_there_nor_free(
    native: NativeStore, bare: NativeStore, key: str
) -> None:
    memory = Memory(b"", 16)
    assert native.batch_put_session_start([key], [10]) == [0]
    assert native.is_exist(key) == 0
    assert native.batch_is_exist([key]) == [0]
    assert native.get(key) == b""
    assert native.get_size(key) == -703
    assert native.get_into(key, memory.ptr, 16) == -703
    assert native.batch_get_into([key], [memory.ptr], [16]) == [-703]
    assert native.batch_get_session_start([key]) == [-703]
    assert native.batch_get_replica_desc([key]) == {}
    assert native.put(key, b"lost") == 0
    assert native.remove(key, True) == -703
    assert native.remove_by_regex(key, True) == 0
    assert bare.batch_put_session_start([key], [10]) == [-705]
    assert bare.batch_put_session_end([key]) == [-600]
    assert native.batch_put_session_revoke([key]) == [0]
    assert native.batch_put_session_revoke([key]) == [-600]
    assert native.put(key, b"kept") == 0
    assert native.get(key) == b"kept"


def test_a_session_that_wrote_a_part_may_end(native: NativeStore, key: str) -> None:
    memory = Memory(b"ABCDE")
    native.batch_put_session_start([key], [10])
    native.batch_put_from_multi_buffer_ranges([key], [[memory.ptr]], [[5]], [[0]])
    assert native.batch_put_session_end([key]) == [0]
    assert native.get_size(key) == 10
    assert native.get(key)[:5] == b"ABCDE"


def test_a_key_reserved_twice_in_one_call(native: NativeStore, key: str) -> None:
    assert native.batch_put_session_start([key, key], [10, 10]) == [0, -705]
    assert native.batch_put_session_revoke([key]) == [0]


def test_an_upsert_takes_a_reserved_key(native: NativeStore, bare: NativeStore, key: str) -> None:
    assert bare.batch_put_session_start([key], [10]) == [0]
    assert native.upsert(key, b"mine") == 0
    assert bare.batch_put_session_end([key]) == [-601]
    assert native.get(key) == b"mine"


def test_a_get_session_reads_ranges(
    native: NativeStore, key: str, other: str, missing: str
) -> None:
    native.put_batch([key, other], [b"0123456789", b"abc"])
    memory = Memory(b"." * 32)
    at = memory.ptr
    assert native.batch_get_session_start([key, other, missing, ""]) == [0, 0, -704, -704]
    read = native.batch_get_into_multi_buffer_ranges
    assert read([key, other], [[at, at + 8], [at + 16]], [[4, 2], [3]], [[0, 8], [0]]) == [6, 3]
    assert memory[:20] == b"0123....89......abc."
    assert read([missing, key], [[at], [at]], [[4], [4]], [[0], [0]]) == [-600, 4]
    assert read([key], [[at]], [[4]], [[8]]) == [-600]
    assert read([key], [[at]], [[4]], [[]]) == [-600]
    assert read([key, other], [[at]], [[4]], [[0]]) == [-600, -600]
    assert read([key], [[]], [[]], [[]]) == [0]
    assert read([key, key], [[at], [at + 8]], [[2], [2]], [[0], [4]]) == [2, 2]
    assert memory[:2] + memory[8:10] == b"0145"
    assert native.batch_get_session_end([key, other]) == 0
    assert native.batch_get_session_end([missing]) == 0
    assert read([key], [[at]], [[4]], [[0]]) == [-600]


def test_a_get_session_survives_removal(native: NativeStore, key: str) -> None:
    native.put(key, b"0123456789")
    memory = Memory(b"", 10)
    native.batch_get_session_start([key])
    assert native.remove(key, True) == 0
    read = native.batch_get_into_multi_buffer_ranges([key], [[memory.ptr]], [[10]], [[0]])
    assert read == [10]
    native.batch_get_session_end([key])


def test_empty_sessions(native: NativeStore) -> None:
    assert native.batch_put_session_start([], []) == []
    assert native.batch_put_session_end([]) == []
    assert native.batch_put_session_revoke([]) == []
    assert native.batch_get_session_start([]) == []
    assert native.batch_get_session_end([]) == 0
    assert native.batch_get_into_multi_buffer_ranges([], [], [], []) == []


# --- space and placement ----------------------------------------------------------------------


def test_no_room_anywhere(native: NativeStore, key: str) -> None:
    memory = Memory(b"", 80 * MB)
    at, size = memory.ptr, 80 * MB
    assert native.put_from(key, at, size) == -200
    assert native.upsert_from(key, at, size) == -200
    assert native.batch_put_from([key], [at], [size]) == [-200]
    assert native.batch_upsert_from([key], [at], [size]) == [-200]
    assert native.batch_put_from_multi_buffers([key], [[at]], [[size]]) == [-200]
    assert native.batch_put_session_start([key], [size]) == [-200]
    assert native.is_exist(key) == 0


def test_descriptors_carry_size_and_owner(native: NativeStore, key: str, missing: str) -> None:
    native.put(key, b"abc")
    found = native.batch_get_replica_desc([key, missing, key, ""])
    assert list(found) == [key]
    (copy,) = found[key]
    assert copy.status.name == "COMPLETE"
    assert copy.is_memory_replica()
    assert not copy.is_disk_replica()
    assert not copy.is_local_disk_replica()
    where = copy.get_memory_descriptor().buffer_descriptor
    assert where.size == 3
    assert isinstance(where.buffer_address, int)
    assert where.transport_endpoint.startswith("127.0.0.1:")
    assert where.transport_endpoint != native.get_hostname()
    with pytest.raises(RuntimeError, match="Expected DiskDescriptor"):
        copy.get_disk_descriptor()
    assert len(native.get_replica_desc(key)) == 1
    assert list(native.get_replica_desc(missing)) == []


def test_fewer_segments_than_copies_are_accepted(
    engine: Engine, native: NativeStore, key: str
) -> None:
    assert native.put(key, b"v", engine.config(replica_num=2)) == 0
    assert len(native.get_replica_desc(key)) == 1


def test_a_segment_mounted_later(
    engine: Engine, native: NativeStore, bare: NativeStore, key: str, other: str
) -> None:
    mounted = bare.allocate_and_mount_segment(1000)
    assert mounted["ret"] == 0
    assert mounted["allocated_size"] == 16 * MB
    assert native.put(key, b"v", engine.config(replica_num=2)) == 0
    owners = {
        copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for copy in native.get_replica_desc(key)
    }
    assert len(owners) == 2
    there = engine.config(preferred_segment=bare.get_hostname())
    assert native.put(other, b"gone", there) == 0
    assert bare.unmount_and_free_segment(mounted["segment_ids"]) == 0
    assert native.get(key) == b"v"
    assert native.is_exist(other) == 0
    assert native.get_size(other) == -704
    assert bare.unmount_and_free_segment(mounted["segment_ids"]) == -1
    assert bare.unmount_and_free_segment([]) == 0
    nothing = {"ret": -1, "segment_ids": [], "allocated_size": 0}
    assert bare.allocate_and_mount_segment(0) == nothing


def test_a_segment_on_a_file(bare: NativeStore, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("segment") / "memory"
    assert bare.mount_segment(str(path), 16 * MB) == {"ret": -1, "segment_ids": []}
    with path.open("wb") as file:
        file.truncate(16 * MB)
    mounted = bare.mount_segment(str(path), 16 * MB)
    assert mounted["ret"] == 0
    assert bare.unmount_segment(mounted["segment_ids"]) == 0
    assert bare.unmount_segment(["junk"]) == -1


def test_refused_options(engine: Engine, native: NativeStore, key: str, other: str) -> None:
    memory = Memory(b"abc")
    none = engine.config(replica_num=0)
    assert native.put(key, b"v", none) == -600
    assert native.put_batch([key], [b"v"], none) == -600
    assert native.batch_put_from([key], [memory.ptr], [3], none) == [-600]
    assert native.batch_put_from_multi_buffers([key], [[memory.ptr]], [[3]], none) == [-600]
    near = engine.config(prefer_alloc_in_same_node=True)
    assert native.put(key, b"v", near) == -600
    assert native.upsert(key, b"v", near) == -600
    assert native.put_parts(key, b"v", config=near) == -600
    assert native.put_from(key, memory.ptr, 3, near) == -600
    assert native.batch_upsert_from([key], [memory.ptr], [3], near) == [-600]
    assert native.batch_put_from_multi_buffers([key], [[memory.ptr]], [[3]], near) == [0]
    assert native.batch_put_session_start([other], [3], near) == [0]
    assert native.batch_put_session_revoke([other]) == [0]


def test_groups_have_one_entry_per_key(
    engine: Engine, native: NativeStore, key: str, other: str
) -> None:
    memory = Memory(b"abc")
    one, two = engine.config(group_ids=["g"]), engine.config(group_ids=["g", "h"])
    assert native.put(key, b"v", two) == -600
    assert native.put_batch([key, other], [b"1", b"2"], one) == -600
    assert native.batch_put_from([key, other], [memory.ptr] * 2, [3, 3], one) == [-600, -600]
    assert native.put_batch([key, other], [b"1", b"2"], two) == 0


# --- life -------------------------------------------------------------------------------------


def test_health_and_name_of_an_open_store(native: NativeStore) -> None:
    assert native.health_check() == 0
    assert native.get_hostname().startswith("127.0.0.1:")


@pytest.mark.parametrize("life", ["new", "failed"])
def test_calls_on_a_store_that_is_not_set_up(engine: Engine, life: str) -> None:
    """Most crash the process, some answer a code; the in-memory engine raises for a crash."""
    expected = unset_calls.answers(InMemoryStore(InMemoryEngine()), life)
    assert "CRASH" in expected.values()
    if engine.name == "real":
        done = subprocess.run(
            [sys.executable, "-m", unset_calls.__name__, life],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
        assert json.loads(done.stdout) == json.loads(json.dumps(expected))


def test_setup_refuses_an_empty_hostname(engine: Engine) -> None:
    store = engine.new()
    assert store.health_check() == 1
    assert store.setup("", "P2PHANDSHAKE", 0, 0, "tcp", "", engine.address) == -600
    assert store.health_check() == 1
    assert store.put("key", b"value") == -600
    assert store.close() == 0


# --- shape ------------------------------------------------------------------------------------


def _protocol() -> list[str]:
    return sorted(name for name in vars(NativeStore) if not name.startswith("_"))


def test_every_method_has_the_arguments_of_the_protocol(native: NativeStore) -> None:
    for name in _protocol():
        wanted = list(inspect.signature(getattr(NativeStore, name)).parameters)[1:]
        found = list(dict.fromkeys(_parameters(name, getattr(type(native), name))))
        found = [parameter for parameter in found if parameter not in ("self", "config")]
        if found != ["arg0"]:  # positional only
            assert found == [parameter for parameter in wanted if parameter != "config"], name


def test_both_engines_have_the_same_methods() -> None:
    assert find_methods(InMemoryStore) == load_binding().methods


def test_the_methods_that_name_caller_memory(native: NativeStore) -> None:
    wanted = {
        name
        for name in _protocol()
        if any(
            p.endswith(("_ptr", "_ptrs"))
            for p in inspect.signature(getattr(NativeStore, name)).parameters
        )
    }
    assert find_address_methods(type(native)) & set(_protocol()) == wanted
    assert {"register_buffer", "unregister_buffer", "get_into", "batch_put_from"} <= wanted
    assert set(_protocol()) <= find_methods(type(native))

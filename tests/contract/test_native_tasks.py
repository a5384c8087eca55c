"""Tasks, copies and the odd methods of the native binding, on both engines.

As in ``test_native_contract``: what is asserted was seen on the real engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.protocol import NativeTask, TaskId
from tests.contract.engines import LEASE, MB, Engine, Memory


@pytest.fixture(scope="module")
def peer(engine: Engine, native: NativeStore) -> Iterator[NativeStore]:
    """A second client with a segment, of 16 MB."""
    store = engine.open(16 * MB, MB)
    yield store
    store.close()


def here(engine: Engine, store: NativeStore) -> Any:
    return engine.config(preferred_segment=store.get_hostname())


def owners(store: NativeStore, key: str) -> list[str]:
    return [
        copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for copy in store.get_replica_desc(key)
    ]


def ended(store: NativeStore, task: TaskId) -> tuple[NativeTask, list[str]]:
    """Wait for the end of a task, and list what was heard of it."""
    heard: list[str] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen, code = store.query_task(task)
        assert code == 0
        assert seen is not None
        if seen.status.name not in heard:
            heard.append(seen.status.name)
        if seen.status.name in {"SUCCESS", "FAILED"}:
            return seen, heard
        time.sleep(0.01)  # the engine tells nobody
    raise AssertionError(heard)


def test_a_copy_task(engine: Engine, native: NativeStore, peer: NativeStore, key: str) -> None:
    native.put(key, b"value", here(engine, native))
    task, code = native.create_copy_task(key, [peer.get_hostname()])
    assert code == 0
    assert all(isinstance(part, int) for part in task)
    seen, heard = ended(native, task)
    assert heard[0] == "PENDING"
    assert seen.status.name == "SUCCESS"
    assert seen.message == "Task completed successfully"
    assert seen.type.name == "REPLICA_COPY"
    assert tuple(seen.id) == task
    assert len(seen.assigned_client) == 2
    assert 0 < seen.created_at_ms_epoch <= seen.last_updated_at_ms_epoch
    assert len(owners(native, key)) == 2
    assert peer.get(key) == b"value"
    again, code = native.create_copy_task(key, [peer.get_hostname(), native.get_hostname()])
    assert code == 0
    assert ended(native, again)[0].status.name == "SUCCESS"
    assert len(owners(native, key)) == 2


def test_a_move_task(engine: Engine, native: NativeStore, peer: NativeStore, key: str) -> None:
    native.put(key, b"value", here(engine, native))
    (before,) = owners(native, key)
    task, code = native.create_move_task(key, native.get_hostname(), peer.get_hostname())
    assert code == 0
    seen, _ = ended(peer, task)
    assert seen.status.name == "SUCCESS"
    assert seen.type.name == "REPLICA_MOVE"
    (after,) = owners(native, key)
    assert after != before
    assert native.get(key) == b"value"


def test_tasks_that_are_refused(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str, missing: str
) -> None:
    native.put(key, b"value", here(engine, native))
    source, target = native.get_hostname(), peer.get_hostname()
    none = (0, 0)
    assert native.create_copy_task(missing, [target]) == (none, -704)
    assert native.create_copy_task("", [target]) == (none, -704)
    assert native.create_copy_task(key, []) == (none, -600)
    assert native.create_copy_task(key, [target, "nowhere"]) == (none, -600)
    assert native.create_move_task(missing, source, target) == (none, -704)
    assert native.create_move_task(key, source, "nowhere") == (none, -600)
    assert native.create_move_task(key, target, source) == (none, -600)
    assert native.create_move_task(key, source, source) == (none, -600)
    assert native.query_task((1, 2)) == (None, -1400)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.query_task("junk")  # type: ignore[arg-type]


def test_tasks_of_segments_that_are_taken_back(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str, other: str
) -> None:
    """Targets are looked at one after the other, and before the source."""
    lender = engine.open(0, MB)
    mounted = lender.allocate_and_mount_segment(16 * MB)["segment_ids"]
    native.put(key, b"value", here(engine, native))
    native.put(other, b"value", here(engine, lender))
    source, target, sound = (each.get_hostname() for each in (native, lender, peer))
    assert lender.unmount_and_free_segment(mounted, 60) == 0
    none, copy, move = (0, 0), native.create_copy_task, native.create_move_task
    assert copy(key, [target]) == copy(key, [sound, target]) == (none, -1010)
    assert copy(other, [target]) == copy(key, [target, "nowhere"]) == (none, -1010)
    assert copy(key, ["nowhere", target]) == (none, -600)
    assert copy(f"{key} missing", [target]) == (none, -704)
    assert move(key, source, target) == move(key, "nowhere", target) == (none, -1010)
    assert move(other, target, target) == (none, -600)
    task, code = move(other, target, sound)
    assert code == 0
    assert ended(native, task)[0].status.name == "SUCCESS"
    lender.allocate_and_mount_segment(16 * MB)
    task, code = copy(key, [target])
    assert code == 0
    assert ended(native, task)[0].status.name == "SUCCESS"
    lender.close()


def test_tasks_find_the_last_segment_of_a_name(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str, other: str
) -> None:
    """And none when that was taken back, whatever else has the name."""
    lender = engine.open(16 * MB, MB)
    source, target = native.get_hostname(), lender.get_hostname()
    native.put(key, b"value", here(engine, native))
    native.put(other, b"value", here(engine, lender))
    lost = lender.allocate_and_mount_segment(16 * MB)["segment_ids"]
    assert lender.unmount_and_free_segment(lost) == 0
    none, copy, move = (0, 0), native.create_copy_task, native.create_move_task
    assert copy(key, [target]) == move(key, source, target) == (none, -600)
    assert copy(other, [source]) == move(other, target, source) == (none, -1)
    assert move(key, target, peer.get_hostname()) == (none, -600)
    assert native.get(other) == b"value"
    kept = lender.allocate_and_mount_segment(16 * MB)["segment_ids"]
    lender.allocate_and_mount_segment(16 * MB)
    assert lender.unmount_and_free_segment(kept) == 0
    task, code = move(other, target, source)
    assert code == 0
    assert ended(native, task)[0].status.name == "SUCCESS"
    lender.close()


def test_a_copy_that_finds_no_room(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str
) -> None:
    memory = Memory(b"", 20 * MB)
    assert native.put_from(key, memory.ptr, 20 * MB, here(engine, native)) == 0
    task, code = native.create_copy_task(key, [peer.get_hostname()])
    assert code == 0
    seen, _ = ended(native, task)
    assert seen.status.name == "FAILED"
    assert seen.message == "NO_AVAILABLE_HANDLE (max retries reached: 10)"
    native.remove(key, True)


def test_copies_are_cleared_when_no_lease_protects_them(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str, other: str
) -> None:
    for name in (key, other):
        native.put(name, b"value", here(engine, native))
    assert native.batch_replica_clear([key], "nowhere") == []
    assert native.batch_replica_clear([key], peer.get_hostname()) == []
    assert peer.batch_replica_clear([key]) == []  # it is another client's
    native.is_exist(other)
    assert native.batch_replica_clear([key, other, f"{key} missing", "", key]) == [key]
    assert native.batch_is_exist([key, other]) == [0, 1]
    time.sleep(LEASE + 0.2)  # the lease has no event
    assert native.batch_replica_clear([other], native.get_hostname()) == [other]
    assert native.is_exist(other) == 0
    assert native.batch_replica_clear([]) == []
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.batch_replica_clear("ab")


def test_a_copy_on_one_segment_is_cleared(
    engine: Engine, native: NativeStore, peer: NativeStore, key: str
) -> None:
    native.put(key, b"value", engine.config(replica_num=2))
    assert native.batch_replica_clear([key], peer.get_hostname()) == [key]
    assert len(owners(native, key)) == 1
    assert native.get(key) == b"value"


def test_metadata_comes_first(engine: Engine, native: NativeStore, key: str, other: str) -> None:
    """Its codes come without their sign, unlike all others."""
    data, head = Memory(b"0123456789"), Memory(b"HEAD")
    put = native.put_from_with_metadata
    assert put(key, data.ptr, head.ptr, 10, 4) == 0
    assert put(key, data.ptr, head.ptr, 5, 4) == 0
    assert native.get(key) == b"HEAD0123456789"
    assert put(other, data.ptr, head.ptr, 0, 4) == 0
    assert native.is_exist(other) == 0
    assert put("", data.ptr, head.ptr, 10, 4) == 600
    assert put(other, data.ptr, head.ptr, 10, 4, engine.config(replica_num=0)) == 600
    assert put(other, data.ptr, head.ptr, 10, 4, engine.config(group_ids=["a", "b"])) == 600
    near = engine.config(prefer_alloc_in_same_node=True)
    assert put(other, data.ptr, head.ptr, 10, 4, near) == -1
    assert put(other, data.ptr, head.ptr, 10, 0) == 0
    assert native.get(other) == b"0123456789"


def test_what_only_others_have(native: NativeStore) -> None:
    assert native.alloc_from_mem_pool(100) == 0
    assert native.get_offload_rpc_read_count() == 0
    assert native.unmount_local_disk_segment() == 0
    assert native.unmount_local_disk_segment(1) == 0


def test_a_graceful_unmount(
    engine: Engine, native: NativeStore, bare: NativeStore, key: str, tmp_path: Path
) -> None:
    """Nothing new is placed there, and what is there can be read until the period ends."""
    path, other = tmp_path / "segment", f"{key} other"
    path.write_bytes(bytes(16 * MB))
    mounted = bare.mount_segment(str(path), 16 * MB)
    there = here(engine, bare)
    assert native.put(key, b"value", there) == 0
    (owner,) = owners(native, key)
    began = time.monotonic()
    assert bare.unmount_segment(mounted["segment_ids"], 1) == 0
    assert time.monotonic() - began < 0.8
    assert bare.unmount_segment(mounted["segment_ids"], 1) == -600
    assert native.put(other, b"value", there) == 0
    assert owners(native, other) != [owner]
    assert native.get(key) == b"value"
    deadline = time.monotonic() + 10
    while native.is_exist(key):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # the master tells nobody
    assert time.monotonic() - began > 0.9
    assert native.get(other) == b"value"

"""The methods of both mirrors as a user's type checker sees them; nothing of it runs."""

# ruff: noqa: PLR0915 - a line per method

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from typing_extensions import assert_type

from aiomooncake import ReplicateConfig, Store
from aiomooncake.engine.protocol import (
    Allocated,
    Mounted,
    NativeBufferHandle,
    NativeReplica,
    NativeTask,
)

keys, at, sizes = ["a"], [1], [1]
many = [[1]]
config = ReplicateConfig(replica_num=2)
tensors: list[Any] = []


async def awaitable(store: Store) -> None:
    engine = store.engine
    assert_type(await engine.alloc_from_mem_pool(4096), int)
    assert_type(await engine.allocate_and_mount_segment(1, protocol="tcp", location=""), Allocated)
    assert_type(await engine.batch_get_buffer(keys), Sequence[NativeBufferHandle | None])
    assert_type(await engine.batch_get_into(keys, at, sizes), list[int])
    assert_type(
        await engine.batch_get_into_multi_buffer_ranges(keys, many, many, all_src_offsets=many),
        list[int],
    )
    assert_type(
        await engine.batch_get_into_multi_buffers(keys, many, many, prefer_alloc_in_same_node=True),
        list[int],
    )
    assert_type(await engine.batch_get_replica_desc(keys), Mapping[str, Sequence[NativeReplica]])
    assert_type(await engine.batch_get_session_end(keys), int)
    assert_type(await engine.batch_get_session_start(keys), list[int])
    assert_type(await engine.batch_get_tensor(keys), list[Any | None])
    assert_type(await engine.batch_get_tensor_into(keys, at, sizes), list[Any | None])
    assert_type(await engine.batch_get_tensor_into_cuda(keys, tensors), list[int])
    assert_type(
        await engine.batch_get_tensor_with_parallelism(keys, targets=None), list[Any | None]
    )
    assert_type(
        await engine.batch_get_tensor_with_parallelism_into(keys, at, sizes, targets=None),
        list[Any | None],
    )
    assert_type(await engine.batch_get_tensor_with_tp(keys, tp_rank=0, tp_size=1), list[Any | None])
    assert_type(
        await engine.batch_get_tensor_with_tp_into(keys, at, sizes, tp_rank=0, tp_size=1),
        list[Any | None],
    )
    assert_type(await engine.batch_is_exist(keys), list[int])
    assert_type(await engine.batch_pub_tensor(keys, tensors, config), list[int])
    assert_type(
        await engine.batch_pub_tensor_with_tp(
            keys, tensors, config, tp_rank=0, tp_size=1, split_dim=0
        ),
        list[int],
    )
    assert_type(await engine.batch_put_from(keys, at, sizes, config), list[int])
    assert_type(
        await engine.batch_put_from_multi_buffer_ranges(keys, many, many, all_dst_offsets=many),
        list[int],
    )
    assert_type(await engine.batch_put_from_multi_buffers(keys, many, many, config), list[int])
    assert_type(await engine.batch_put_session_end(keys), list[int])
    assert_type(await engine.batch_put_session_revoke(keys), list[int])
    assert_type(await engine.batch_put_session_start(keys, sizes, config), list[int])
    assert_type(await engine.batch_put_tensor(keys, tensors), list[int])
    assert_type(await engine.batch_put_tensor_from(keys, at, sizes), list[int])
    assert_type(
        await engine.batch_put_tensor_with_parallelism(keys, tensors, config=config), list[int]
    )
    assert_type(
        await engine.batch_put_tensor_with_parallelism_from(keys, at, sizes, config=config),
        list[int],
    )
    assert_type(await engine.batch_put_tensor_with_tp(keys, tensors, tp_rank=0), list[int])
    assert_type(await engine.batch_put_tensor_with_tp_from(keys, at, sizes, tp_rank=0), list[int])
    assert_type(await engine.batch_remove(keys, force=True), list[int])
    assert_type(await engine.batch_replica_clear(keys, segment_name=""), list[str])
    assert_type(await engine.batch_upsert_from(keys, at, sizes, config), list[int])
    assert_type(await engine.batch_upsert_pub_tensor(keys, tensors, config), list[int])
    assert_type(await engine.batch_upsert_tensor(keys, tensors), list[int])
    assert_type(await engine.batch_upsert_tensor_from(keys, at, sizes), list[int])
    assert_type(
        await engine.batch_upsert_tensor_with_parallelism(keys, tensors, config=config), list[int]
    )
    assert_type(
        await engine.batch_upsert_tensor_with_parallelism_from(keys, at, sizes, config=config),
        list[int],
    )
    assert_type(await engine.create_copy_task("k", targets=keys), tuple[tuple[int, int], int])
    assert_type(
        await engine.create_move_task("k", source="a", target="b"), tuple[tuple[int, int], int]
    )
    assert_type(await engine.get("k"), bytes)
    assert_type(await engine.get_batch(keys), list[bytes])
    assert_type(await engine.get_buffer("k"), NativeBufferHandle | None)
    assert_type(await engine.get_hostname(), str)
    assert_type(await engine.get_into("k", 1, size=1), int)
    assert_type(
        await engine.get_into_ranges(at, [keys], [many], [many], [many]), list[list[list[int]]]
    )
    assert_type(await engine.get_offload_rpc_read_count(), int)
    assert_type(await engine.get_replica_desc("k"), Sequence[NativeReplica])
    assert_type(await engine.get_size("k"), int)
    assert_type(await engine.get_tensor("k"), Any | None)
    assert_type(await engine.get_tensor_into("k", 1, 1), Any | None)
    assert_type(await engine.get_tensor_into_cuda("k", tensors[0]), int)
    assert_type(await engine.get_tensor_with_parallelism("k", target=None), Any | None)
    assert_type(await engine.get_tensor_with_parallelism_into("k", 1, 1, target=None), Any | None)
    assert_type(await engine.get_tensor_with_tp("k", tp_rank=0, tp_size=1, split_dim=0), Any | None)
    assert_type(await engine.get_tensor_with_tp_into("k", 1, 1, tp_rank=0, split_dim=0), Any | None)
    assert_type(await engine.health_check(), int)
    assert_type(await engine.is_exist("k"), int)
    assert_type(await engine.load_tensor_from_safetensor("k", "file"), Any | None)
    assert_type(await engine.load_tensor_from_safetensor(file_name="file"), Any | None)
    assert_type(
        await engine.mount_segment("path", 1, offset=0, protocol="tcp", location=""), Mounted
    )
    assert_type(await engine.pub_tensor("k", tensors[0], config), int)
    assert_type(await engine.pub_tensor_with_tp("k", tensors[0], config, tp_rank=0), int)
    assert_type(await engine.put("k", b"v", config), int)
    assert_type(await engine.put_batch(keys, [b"v"], config), int)
    assert_type(await engine.put_from("k", 1, 1, config), int)
    assert_type(
        await engine.put_from_with_metadata("k", 1, 1, size=1, metadata_size=1, config=config), int
    )
    assert_type(await engine.put_parts("k", b"v", bytearray(b"w"), config=config), int)
    assert_type(await engine.put_tensor("k", tensors[0]), int)
    assert_type(await engine.put_tensor_from("k", 1, 1), int)
    assert_type(await engine.put_tensor_with_parallelism("k", tensors[0], config=config), int)
    assert_type(await engine.put_tensor_with_parallelism_from("k", 1, 1, config=config), int)
    assert_type(await engine.put_tensor_with_tp("k", tensors[0], tp_rank=0), int)
    assert_type(await engine.put_tensor_with_tp_from("k", 1, 1, tp_rank=0), int)
    assert_type(await engine.query_task((1, 2)), tuple[NativeTask | None, int])
    assert_type(await engine.register_buffer(1, 1), int)
    assert_type(await engine.remove("k", force=True), int)
    assert_type(await engine.remove_all(force=True), int)
    assert_type(await engine.remove_by_regex("k", force=True), int)
    assert_type(await engine.save_tensor_to_safetensor("k", "file"), int)
    assert_type(await engine.unmount_and_free_segment(["id"], grace_period_seconds=1), int)
    assert_type(await engine.unmount_local_disk_segment(grace_period_seconds=1), int)
    assert_type(await engine.unmount_segment(["id"], grace_period_seconds=1), int)
    assert_type(await engine.unregister_buffer(1), int)
    assert_type(await engine.upsert("k", b"v", config), int)
    assert_type(await engine.upsert_batch(keys, [b"v"], config), int)
    assert_type(await engine.upsert_from("k", 1, 1, config), int)
    assert_type(await engine.upsert_parts("k", b"v", config=config), int)
    assert_type(await engine.upsert_pub_tensor("k", tensors[0], config), int)
    assert_type(await engine.upsert_tensor("k", tensors[0]), int)
    assert_type(await engine.upsert_tensor_from("k", 1, 1), int)
    assert_type(await engine.upsert_tensor_with_parallelism("k", tensors[0], config=config), int)
    assert_type(await engine.upsert_tensor_with_parallelism_from("k", 1, 1, config=config), int)
    allocated = await engine.allocate_and_mount_segment(1)
    assert_type(allocated["ret"], int)
    assert_type(allocated["segment_ids"], list[str])
    assert_type(allocated["allocated_size"], int)
    await engine.fetch("k")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    await engine.get(key="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await engine.put(1, b"v")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def blocking(store: Store) -> None:
    blocking = store.blocking
    assert_type(blocking.alloc_from_mem_pool(4096), int)
    assert_type(blocking.allocate_and_mount_segment(1, protocol="tcp", location=""), Allocated)
    assert_type(blocking.batch_get_buffer(keys), Sequence[NativeBufferHandle | None])
    assert_type(blocking.batch_get_into(keys, at, sizes), list[int])
    assert_type(
        blocking.batch_get_into_multi_buffer_ranges(keys, many, many, all_src_offsets=many),
        list[int],
    )
    assert_type(
        blocking.batch_get_into_multi_buffers(keys, many, many, prefer_alloc_in_same_node=True),
        list[int],
    )
    assert_type(blocking.batch_get_replica_desc(keys), Mapping[str, Sequence[NativeReplica]])
    assert_type(blocking.batch_get_session_end(keys), int)
    assert_type(blocking.batch_get_session_start(keys), list[int])
    assert_type(blocking.batch_get_tensor(keys), list[Any | None])
    assert_type(blocking.batch_get_tensor_into(keys, at, sizes), list[Any | None])
    assert_type(blocking.batch_get_tensor_into_cuda(keys, tensors), list[int])
    assert_type(blocking.batch_get_tensor_with_parallelism(keys, targets=None), list[Any | None])
    assert_type(
        blocking.batch_get_tensor_with_parallelism_into(keys, at, sizes, targets=None),
        list[Any | None],
    )
    assert_type(blocking.batch_get_tensor_with_tp(keys, tp_rank=0, tp_size=1), list[Any | None])
    assert_type(
        blocking.batch_get_tensor_with_tp_into(keys, at, sizes, tp_rank=0, tp_size=1),
        list[Any | None],
    )
    assert_type(blocking.batch_is_exist(keys), list[int])
    assert_type(blocking.batch_pub_tensor(keys, tensors, config), list[int])
    assert_type(
        blocking.batch_pub_tensor_with_tp(keys, tensors, config, tp_rank=0, tp_size=1, split_dim=0),
        list[int],
    )
    assert_type(blocking.batch_put_from(keys, at, sizes, config), list[int])
    assert_type(
        blocking.batch_put_from_multi_buffer_ranges(keys, many, many, all_dst_offsets=many),
        list[int],
    )
    assert_type(blocking.batch_put_from_multi_buffers(keys, many, many, config), list[int])
    assert_type(blocking.batch_put_session_end(keys), list[int])
    assert_type(blocking.batch_put_session_revoke(keys), list[int])
    assert_type(blocking.batch_put_session_start(keys, sizes, config), list[int])
    assert_type(blocking.batch_put_tensor(keys, tensors), list[int])
    assert_type(blocking.batch_put_tensor_from(keys, at, sizes), list[int])
    assert_type(blocking.batch_put_tensor_with_parallelism(keys, tensors, config=config), list[int])
    assert_type(
        blocking.batch_put_tensor_with_parallelism_from(keys, at, sizes, config=config), list[int]
    )
    assert_type(blocking.batch_put_tensor_with_tp(keys, tensors, tp_rank=0), list[int])
    assert_type(blocking.batch_put_tensor_with_tp_from(keys, at, sizes, tp_rank=0), list[int])
    assert_type(blocking.batch_remove(keys, force=True), list[int])
    assert_type(blocking.batch_replica_clear(keys, segment_name=""), list[str])
    assert_type(blocking.batch_upsert_from(keys, at, sizes, config), list[int])
    assert_type(blocking.batch_upsert_pub_tensor(keys, tensors, config), list[int])
    assert_type(blocking.batch_upsert_tensor(keys, tensors), list[int])
    assert_type(blocking.batch_upsert_tensor_from(keys, at, sizes), list[int])
    assert_type(
        blocking.batch_upsert_tensor_with_parallelism(keys, tensors, config=config), list[int]
    )
    assert_type(
        blocking.batch_upsert_tensor_with_parallelism_from(keys, at, sizes, config=config),
        list[int],
    )
    assert_type(blocking.create_copy_task("k", targets=keys), tuple[tuple[int, int], int])
    assert_type(blocking.create_move_task("k", source="a", target="b"), tuple[tuple[int, int], int])
    assert_type(blocking.get("k"), bytes)
    assert_type(blocking.get_batch(keys), list[bytes])
    assert_type(blocking.get_buffer("k"), NativeBufferHandle | None)
    assert_type(blocking.get_hostname(), str)
    assert_type(blocking.get_into("k", 1, size=1), int)
    assert_type(blocking.get_into_ranges(at, [keys], [many], [many], [many]), list[list[list[int]]])
    assert_type(blocking.get_offload_rpc_read_count(), int)
    assert_type(blocking.get_replica_desc("k"), Sequence[NativeReplica])
    assert_type(blocking.get_size("k"), int)
    assert_type(blocking.get_tensor("k"), Any | None)
    assert_type(blocking.get_tensor_into("k", 1, 1), Any | None)
    assert_type(blocking.get_tensor_into_cuda("k", tensors[0]), int)
    assert_type(blocking.get_tensor_with_parallelism("k", target=None), Any | None)
    assert_type(blocking.get_tensor_with_parallelism_into("k", 1, 1, target=None), Any | None)
    assert_type(blocking.get_tensor_with_tp("k", tp_rank=0, tp_size=1, split_dim=0), Any | None)
    assert_type(blocking.get_tensor_with_tp_into("k", 1, 1, tp_rank=0, split_dim=0), Any | None)
    assert_type(blocking.health_check(), int)
    assert_type(blocking.is_exist("k"), int)
    assert_type(blocking.load_tensor_from_safetensor("k", "file"), Any | None)
    assert_type(blocking.load_tensor_from_safetensor(file_name="file"), Any | None)
    assert_type(blocking.mount_segment("path", 1, offset=0, protocol="tcp", location=""), Mounted)
    assert_type(blocking.pub_tensor("k", tensors[0], config), int)
    assert_type(blocking.pub_tensor_with_tp("k", tensors[0], config, tp_rank=0), int)
    assert_type(blocking.put("k", b"v", config), int)
    assert_type(blocking.put_batch(keys, [b"v"], config), int)
    assert_type(blocking.put_from("k", 1, 1, config), int)
    assert_type(
        blocking.put_from_with_metadata("k", 1, 1, size=1, metadata_size=1, config=config), int
    )
    assert_type(blocking.put_parts("k", b"v", bytearray(b"w"), config=config), int)
    assert_type(blocking.put_tensor("k", tensors[0]), int)
    assert_type(blocking.put_tensor_from("k", 1, 1), int)
    assert_type(blocking.put_tensor_with_parallelism("k", tensors[0], config=config), int)
    assert_type(blocking.put_tensor_with_parallelism_from("k", 1, 1, config=config), int)
    assert_type(blocking.put_tensor_with_tp("k", tensors[0], tp_rank=0), int)
    assert_type(blocking.put_tensor_with_tp_from("k", 1, 1, tp_rank=0), int)
    assert_type(blocking.query_task((1, 2)), tuple[NativeTask | None, int])
    assert_type(blocking.register_buffer(1, 1), int)
    assert_type(blocking.remove("k", force=True), int)
    assert_type(blocking.remove_all(force=True), int)
    assert_type(blocking.remove_by_regex("k", force=True), int)
    assert_type(blocking.save_tensor_to_safetensor("k", "file"), int)
    assert_type(blocking.unmount_and_free_segment(["id"], grace_period_seconds=1), int)
    assert_type(blocking.unmount_local_disk_segment(grace_period_seconds=1), int)
    assert_type(blocking.unmount_segment(["id"], grace_period_seconds=1), int)
    assert_type(blocking.unregister_buffer(1), int)
    assert_type(blocking.upsert("k", b"v", config), int)
    assert_type(blocking.upsert_batch(keys, [b"v"], config), int)
    assert_type(blocking.upsert_from("k", 1, 1, config), int)
    assert_type(blocking.upsert_parts("k", b"v", config=config), int)
    assert_type(blocking.upsert_pub_tensor("k", tensors[0], config), int)
    assert_type(blocking.upsert_tensor("k", tensors[0]), int)
    assert_type(blocking.upsert_tensor_from("k", 1, 1), int)
    assert_type(blocking.upsert_tensor_with_parallelism("k", tensors[0], config=config), int)
    assert_type(blocking.upsert_tensor_with_parallelism_from("k", 1, 1, config=config), int)
    allocated = blocking.allocate_and_mount_segment(1)
    assert_type(allocated["ret"], int)
    assert_type(allocated["segment_ids"], list[str])
    assert_type(allocated["allocated_size"], int)
    blocking.fetch("k")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    blocking.get(key="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    blocking.put(1, b"v")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def engine_refuses_close(store: Store) -> NoReturn:
    await store.engine.close()


async def engine_refuses_init_all(store: Store) -> NoReturn:
    await store.engine.init_all("tcp", "", 1)


async def engine_refuses_setup(store: Store) -> NoReturn:
    await store.engine.setup("host", "P2PHANDSHAKE", 1, 1, "tcp", "", "master:1", tenant_id="t")


async def engine_refuses_setup_dummy(store: Store) -> NoReturn:
    await store.engine.setup_dummy(1, 1, server_address="host:1")


def blocking_refuses_close(store: Store) -> NoReturn:
    store.blocking.close()


def blocking_refuses_init_all(store: Store) -> NoReturn:
    store.blocking.init_all("tcp", "", 1)


def blocking_refuses_setup(store: Store) -> NoReturn:
    store.blocking.setup("host", "P2PHANDSHAKE", 1, 1, "tcp", "", "master:1", tenant_id="t")


def blocking_refuses_setup_dummy(store: Store) -> NoReturn:
    store.blocking.setup_dummy(1, 1, server_address="host:1")

"""Every method of the binding, typed, as the two mirrors have them.

Written by ``scripts/engine_stub.py`` from the engine's wheel 0.3.13.post1; don't edit it.
Nothing here runs: it tells type checkers, editors and ``help()`` what the mirrors answer.
"""

# ruff: noqa: E501 - summaries that are the binding's own
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias, overload

from aiomooncake.config import ReplicateConfig
from aiomooncake.engine.protocol import (
    Allocated,
    Mounted,
    NativeBufferHandle,
    NativeReplica,
    NativeTask,
    TaskId,
)

__all__ = ["AwaitableMethods", "BlockingMethods"]

Config: TypeAlias = ReplicateConfig | Any
"""Placement options: ours, or the binding's own, which has no types."""

Tensor: TypeAlias = Any
"""A ``torch.Tensor``: torch is not needed to use the others."""

Value: TypeAlias = Any
"""Anything with the buffer protocol. The binding counts items, not bytes."""

_DEFAULT: Final = ReplicateConfig()


class AwaitableMethods:
    """The binding's methods as coroutines, for ``store.engine``."""

    async def alloc_from_mem_pool(self, size: int, /) -> int:
        """Take memory from a dummy client's pool.

        Returns:
            An address; 0 when there is no room, and always for a client that is no dummy.
        """

    async def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> Allocated:
        """Lend fresh memory to the cluster, its size rounded up to 16 MB.

        Returns:
            The code as `ret`, with `segment_ids` and `allocated_size`.
        """

    async def batch_get_buffer(self, keys: Sequence[str], /) -> Sequence[NativeBufferHandle | None]:
        """Read many values into the client's local buffer.

        Returns:
            A handle per key; None for a miss, for any failure, and when the local buffer is full.
        """

    async def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Get object data directly into pre-allocated buffers for multiple keys.

        Returns:
            Bytes read or a negative code, per key.
        """

    async def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of values between the start and the end of a get session.

        Returns:
            Bytes read or a negative code, per key; -707 after the lease.
        """

    async def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Get object data directly into multiple pre-allocated buffers for multiple keys.

        Returns:
            Bytes read or a negative code, per key.
        """

    async def batch_get_replica_desc(
        self, keys: Sequence[str]
    ) -> Mapping[str, Sequence[NativeReplica]]:
        """Tell where the copies of many values lie.

        Returns:
            Descriptors by key; keys that are missing or failed are absent.
        """

    async def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """End a get session and drop cached replica metadata.

        Returns:
            0, also for keys that have no session.
        """

    async def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Start a get session: query replicas once and cache them.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors from the store.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """Get tensors directly into pre-allocated buffers for multiple keys.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: list[Tensor]
    ) -> list[int]:
        """Get tensor payloads into pre-allocated CUDA tensors.

        Returns:
            Bytes read or a negative code, per key.
        """

    async def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Any = None
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors from the store using ReadTarget requests.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Any = None,
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors into pre-allocated buffers using ReadTarget requests.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensor shards from the store for a given Tensor Parallel rank.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensor shards from the store directly into pre-allocated buffers for a given Tensor Parallel rank.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    async def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Tell for many keys whether they can be read; renews their leases.

        Returns:
            1, 0 or a negative code, per key.
        """

    async def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: list[Tensor], config: Config = _DEFAULT
    ) -> list[int]:
        """Publish a batch of PyTorch tensors into the store with configurable replication settings.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: list[Tensor],
        config: Config = _DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Publish a batch of PyTorch tensors into the store with configurable replication settings, splitting each into shards for tensor parallelism.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Put object data directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of values between the start and the end of a put session.

        Returns:
            Bytes written or a negative code, per key.
        """

    async def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Put object data directly from multiple pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Complete a put session and make objects readable.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Revoke an incomplete put session.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: Config = _DEFAULT
    ) -> list[int]:
        """Start a put session: reserve objects without transfer.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor(self, keys: Sequence[str], tensors_list: list[Tensor]) -> list[int]:
        """Put a batch of PyTorch tensors into the store.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Put tensors directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: list[Tensor],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Put a batch of PyTorch tensors into the store using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Put a batch of tensors directly from pre-allocated buffers using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: list[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Put a batch of PyTorch tensors into the store, splitting each into shards for tensor parallelism.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Put a batch of full tensors directly from pre-allocated buffers for Tensor Parallelism.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove many keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove copies on one segment, or all; of keys of this client that no lease protects.

        Returns:
            The keys that were cleared; the others are left out, whatever the reason.
        """

    async def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Upsert object data directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: list[Tensor], config: Config = _DEFAULT
    ) -> list[int]:
        """Store or replace many PyTorch tensors, with options.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_upsert_tensor(
        self, keys: Sequence[str], tensors_list: list[Tensor]
    ) -> list[int]:
        """Upsert a batch of PyTorch tensors into the store (insert or update).

        Returns:
            0 or a negative code, per key.
        """

    async def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Upsert tensors directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: list[Tensor],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Upsert a batch of PyTorch tensors into the store using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    async def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Upsert a batch of tensors directly from pre-allocated buffers using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    async def close(self) -> NoReturn:
        """Refuse: `await store.aclose()` closes the store."""

    async def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Have a value copied to segments, in the background.

        Returns:
            The task, for `query_task`, and 0; or (0, 0) and a negative code.
        """

    async def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Have a copy moved from one segment to another, in the background.

        Returns:
            The task, for `query_task`, and 0; or (0, 0) and a negative code.
        """

    async def get(self, key: str, /) -> bytes:
        """Read a value.

        Returns:
            The value; b"" for a miss and for any failure.
        """

    async def get_batch(self, keys: Sequence[str], /) -> list[bytes]:
        """Read many values; of a key given twice only the last answer is right.

        Returns:
            A value per key; b"" for a miss, for any failure, and when the local buffer is full.
        """

    async def get_buffer(self, key: str, /) -> NativeBufferHandle | None:
        """Read a value into the client's local buffer.

        Returns:
            A handle; None for a miss, for any failure, and when the local buffer is full.
        """

    async def get_hostname(self) -> str:
        """Tell the client's own address.

        Returns:
            `host:port`, its segment's name.
        """

    async def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Get object data directly into a pre-allocated buffer.

        Returns:
            Bytes read, or a negative code.
        """

    async def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Get multiple byte ranges from multiple objects into multiple pre-allocated buffers.

        Returns:
            Bytes read or a negative code, per range.
        """

    async def get_offload_rpc_read_count(self) -> int:
        """Count the reads of values that were offloaded to disks of other clients.

        Returns:
            How many there were; 0 for a dummy client.
        """

    async def get_replica_desc(self, key: str) -> Sequence[NativeReplica]:
        """Tell where the copies of a value lie; renews the lease.

        Returns:
            Descriptors; empty for a miss and for any failure.
        """

    async def get_size(self, key: str, /) -> int:
        """Tell the size of a value; renews the lease.

        Returns:
            Bytes, or a negative code: -704 for a miss.
        """

    async def get_tensor(self, key: str) -> Tensor | None:
        """Get a PyTorch tensor from the store.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Get tensor directly into a pre-allocated buffer.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Get tensor payload into a CUDA tensor.

        Returns:
            Bytes read, or a negative code.
        """

    async def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Tensor | None:
        """Get a PyTorch tensor from the store using a ReadTarget request.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Any = None
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store directly into a pre-allocated buffer using a ReadTarget request.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store, optionally sliced for Tensor Parallelism.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store directly into a pre-allocated buffer, optionally sliced for Tensor Parallelism.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def health_check(self) -> int:
        """Tell whether the client can serve, from memory.

        Returns:
            0: yes, 1: it is not set up, 2: its master does not answer.
        """

    async def init_all(
        self, protocol: str, device_name: str, mount_segment_size: int, /
    ) -> NoReturn:
        """Refuse: `connect()` sets the store up."""

    async def is_exist(self, key: str, /) -> int:
        """Tell whether a value can be read; renews the lease.

        Returns:
            1, 0 or a negative code.
        """

    @overload
    async def load_tensor_from_safetensor(
        self, key: str | None, file_name: str
    ) -> Tensor | None: ...
    @overload
    async def load_tensor_from_safetensor(self, *, file_name: str) -> Tensor | None: ...
    async def load_tensor_from_safetensor(
        self, key: str | None = None, file_name: str = ""
    ) -> Tensor | None:
        """Load a tensor from a safetensors file and store it back in Mooncake.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    async def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> Mounted:
        """Lend a file's memory to the cluster.

        Returns:
            The code as `ret`, with `segment_ids`.
        """

    async def pub_tensor(self, key: str, tensor: Tensor, config: Config = _DEFAULT) -> int:
        """Publish a PyTorch tensor with configurable replication settings.

        Returns:
            0, or a negative code.
        """

    async def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: Config = _DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Publish a PyTorch tensor into the store with configurable replication settings, split into shards for tensor parallelism.

        Returns:
            0, or a negative code.
        """

    async def put(self, key: str, value: Value, config: Config = _DEFAULT) -> int:
        """Store a value, unless the key is taken.

        Returns:
            0, also when the key is taken and the old value stays; or a negative code.
        """

    async def put_batch(
        self, keys: Sequence[str], values: Sequence[Value], config: Config = _DEFAULT
    ) -> int:
        """Store many values, each unless its key is taken.

        Returns:
            0, or the first error: others may be stored.
        """

    async def put_from(
        self, key: str, buffer_ptr: int, size: int, config: Config = _DEFAULT
    ) -> int:
        """Put object data directly from a pre-allocated buffer.

        Returns:
            0, also when the key is taken, or a negative code.
        """

    async def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Config = _DEFAULT,
    ) -> int:
        """Store two pieces of memory as one value, the metadata first.

        Returns:
            0, also when the size is 0 and nothing is stored; -1, or a code without its sign (600).
        """

    async def put_parts(self, key: str, *args: Value, config: Config = _DEFAULT) -> int:
        """Store several buffers as one value, unless the key is taken.

        Returns:
            0, also when the key is taken or all are empty; or a negative code.
        """

    async def put_tensor(self, key: str, tensor: Tensor) -> int:
        """Put a PyTorch tensor into the store.

        Returns:
            0, or a negative code.
        """

    async def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Put a tensor directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    async def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Put a PyTorch tensor into the store using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    async def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Put a tensor directly from a pre-allocated buffer using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    async def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Put a PyTorch tensor into the store, split into shards for tensor parallelism.

        Returns:
            0, or a negative code.
        """

    async def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Put a full tensor directly from a pre-allocated buffer for Tensor Parallelism.

        Returns:
            0, or a negative code.
        """

    async def query_task(self, task_id: TaskId) -> tuple[NativeTask | None, int]:
        """Tell how far a copy or a move is.

        Returns:
            The task and 0; or None and a negative code.
        """

    async def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory known to the transport.

        Returns:
            0, or a negative code.
        """

    async def remove(self, key: str, force: bool = False) -> int:
        """Remove a key; `force` also one that a lease protects.

        Returns:
            0, or a negative code.
        """

    async def remove_all(self, force: bool = False) -> int:
        """Remove every key.

        Returns:
            How many went, or a negative code.
        """

    async def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove every key that a pattern matches.

        Returns:
            How many went, or a negative code.
        """

    async def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Export a tensor stored under the given key into a safetensors file.

        Returns:
            0, or a negative code.
        """

    async def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> NoReturn:
        """Refuse: `connect()` sets the store up."""

    async def setup_dummy(
        self, mem_pool_size: int, local_buffer_size: int, server_address: str
    ) -> NoReturn:
        """Refuse: `connect(client_server_address=...)` does it."""

    async def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take back and free what `allocate_and_mount_segment` lent.

        Returns:
            0; -1 when one of them is not known, -600 when it was taken back before.
        """

    async def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Take the client's disk tier out of the cluster; waits for the grace period.

        Returns:
            0, also when there is none; or a negative code.
        """

    async def unmount_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take back what `mount_segment` lent.

        Returns:
            0; -1 when one of them is not known, -600 when it was taken back before.
        """

    async def unregister_buffer(self, buffer_ptr: int) -> int:
        """Make the transport forget memory.

        Returns:
            0, or a negative code.
        """

    async def upsert(self, key: str, value: Value, config: Config = _DEFAULT) -> int:
        """Store a value, in place of the one that is there.

        Returns:
            0, or a negative code.
        """

    async def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Value], config: Config = _DEFAULT
    ) -> int:
        """Store many values, in place of those that are there.

        Returns:
            0, or the first error: others may be stored.
        """

    async def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: Config = _DEFAULT
    ) -> int:
        """Upsert object data directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    async def upsert_parts(self, key: str, *args: Value, config: Config = _DEFAULT) -> int:
        """Store several buffers as one value, in place of the one there.

        Returns:
            0, or a negative code.
        """

    async def upsert_pub_tensor(self, key: str, tensor: Tensor, config: Config = _DEFAULT) -> int:
        """Upsert a PyTorch tensor with configurable replication settings.

        Returns:
            0, or a negative code.
        """

    async def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        """Upsert a PyTorch tensor into the store (insert or update).

        Returns:
            0, or a negative code.
        """

    async def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Upsert a tensor directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    async def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Upsert a PyTorch tensor into the store using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    async def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Upsert a tensor directly from a pre-allocated buffer using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """


class BlockingMethods:
    """The binding's methods as they are, for ``store.blocking``."""

    def alloc_from_mem_pool(self, size: int, /) -> int:
        """Take memory from a dummy client's pool.

        Returns:
            An address; 0 when there is no room, and always for a client that is no dummy.
        """

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> Allocated:
        """Lend fresh memory to the cluster, its size rounded up to 16 MB.

        Returns:
            The code as `ret`, with `segment_ids` and `allocated_size`.
        """

    def batch_get_buffer(self, keys: Sequence[str], /) -> Sequence[NativeBufferHandle | None]:
        """Read many values into the client's local buffer.

        Returns:
            A handle per key; None for a miss, for any failure, and when the local buffer is full.
        """

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Get object data directly into pre-allocated buffers for multiple keys.

        Returns:
            Bytes read or a negative code, per key.
        """

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of values between the start and the end of a get session.

        Returns:
            Bytes read or a negative code, per key; -707 after the lease.
        """

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Get object data directly into multiple pre-allocated buffers for multiple keys.

        Returns:
            Bytes read or a negative code, per key.
        """

    def batch_get_replica_desc(self, keys: Sequence[str]) -> Mapping[str, Sequence[NativeReplica]]:
        """Tell where the copies of many values lie.

        Returns:
            Descriptors by key; keys that are missing or failed are absent.
        """

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """End a get session and drop cached replica metadata.

        Returns:
            0, also for keys that have no session.
        """

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Start a get session: query replicas once and cache them.

        Returns:
            0 or a negative code, per key.
        """

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors from the store.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """Get tensors directly into pre-allocated buffers for multiple keys.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: list[Tensor]
    ) -> list[int]:
        """Get tensor payloads into pre-allocated CUDA tensors.

        Returns:
            Bytes read or a negative code, per key.
        """

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Any = None
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors from the store using ReadTarget requests.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Any = None,
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensors into pre-allocated buffers using ReadTarget requests.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensor shards from the store for a given Tensor Parallel rank.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """Get a batch of PyTorch tensor shards from the store directly into pre-allocated buffers for a given Tensor Parallel rank.

        Returns:
            A tensor per key; None for a miss and for any failure.
        """

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Tell for many keys whether they can be read; renews their leases.

        Returns:
            1, 0 or a negative code, per key.
        """

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: list[Tensor], config: Config = _DEFAULT
    ) -> list[int]:
        """Publish a batch of PyTorch tensors into the store with configurable replication settings.

        Returns:
            0 or a negative code, per key.
        """

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: list[Tensor],
        config: Config = _DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Publish a batch of PyTorch tensors into the store with configurable replication settings, splitting each into shards for tensor parallelism.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Put object data directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of values between the start and the end of a put session.

        Returns:
            Bytes written or a negative code, per key.
        """

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Put object data directly from multiple pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Complete a put session and make objects readable.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Revoke an incomplete put session.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: Config = _DEFAULT
    ) -> list[int]:
        """Start a put session: reserve objects without transfer.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: list[Tensor]) -> list[int]:
        """Put a batch of PyTorch tensors into the store.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Put tensors directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: list[Tensor],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Put a batch of PyTorch tensors into the store using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Put a batch of tensors directly from pre-allocated buffers using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: list[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Put a batch of PyTorch tensors into the store, splitting each into shards for tensor parallelism.

        Returns:
            0 or a negative code, per key.
        """

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Put a batch of full tensors directly from pre-allocated buffers for Tensor Parallelism.

        Returns:
            0 or a negative code, per key.
        """

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove many keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove copies on one segment, or all; of keys of this client that no lease protects.

        Returns:
            The keys that were cleared; the others are left out, whatever the reason.
        """

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Config = _DEFAULT,
    ) -> list[int]:
        """Upsert object data directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: list[Tensor], config: Config = _DEFAULT
    ) -> list[int]:
        """Store or replace many PyTorch tensors, with options.

        Returns:
            0 or a negative code, per key.
        """

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: list[Tensor]) -> list[int]:
        """Upsert a batch of PyTorch tensors into the store (insert or update).

        Returns:
            0 or a negative code, per key.
        """

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Upsert tensors directly from pre-allocated buffers for multiple keys.

        Returns:
            0 or a negative code, per key.
        """

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: list[Tensor],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Upsert a batch of PyTorch tensors into the store using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = _DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Upsert a batch of tensors directly from pre-allocated buffers using TensorParallelism requests or writer_partition requests.

        Returns:
            0 or a negative code, per key.
        """

    def close(self) -> NoReturn:
        """Refuse: `await store.aclose()` closes the store."""

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Have a value copied to segments, in the background.

        Returns:
            The task, for `query_task`, and 0; or (0, 0) and a negative code.
        """

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Have a copy moved from one segment to another, in the background.

        Returns:
            The task, for `query_task`, and 0; or (0, 0) and a negative code.
        """

    def get(self, key: str, /) -> bytes:
        """Read a value.

        Returns:
            The value; b"" for a miss and for any failure.
        """

    def get_batch(self, keys: Sequence[str], /) -> list[bytes]:
        """Read many values; of a key given twice only the last answer is right.

        Returns:
            A value per key; b"" for a miss, for any failure, and when the local buffer is full.
        """

    def get_buffer(self, key: str, /) -> NativeBufferHandle | None:
        """Read a value into the client's local buffer.

        Returns:
            A handle; None for a miss, for any failure, and when the local buffer is full.
        """

    def get_hostname(self) -> str:
        """Tell the client's own address.

        Returns:
            `host:port`, its segment's name.
        """

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Get object data directly into a pre-allocated buffer.

        Returns:
            Bytes read, or a negative code.
        """

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Get multiple byte ranges from multiple objects into multiple pre-allocated buffers.

        Returns:
            Bytes read or a negative code, per range.
        """

    def get_offload_rpc_read_count(self) -> int:
        """Count the reads of values that were offloaded to disks of other clients.

        Returns:
            How many there were; 0 for a dummy client.
        """

    def get_replica_desc(self, key: str) -> Sequence[NativeReplica]:
        """Tell where the copies of a value lie; renews the lease.

        Returns:
            Descriptors; empty for a miss and for any failure.
        """

    def get_size(self, key: str, /) -> int:
        """Tell the size of a value; renews the lease.

        Returns:
            Bytes, or a negative code: -704 for a miss.
        """

    def get_tensor(self, key: str) -> Tensor | None:
        """Get a PyTorch tensor from the store.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Get tensor directly into a pre-allocated buffer.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Get tensor payload into a CUDA tensor.

        Returns:
            Bytes read, or a negative code.
        """

    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Tensor | None:
        """Get a PyTorch tensor from the store using a ReadTarget request.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Any = None
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store directly into a pre-allocated buffer using a ReadTarget request.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store, optionally sliced for Tensor Parallelism.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Tensor | None:
        """Get a PyTorch tensor from the store directly into a pre-allocated buffer, optionally sliced for Tensor Parallelism.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def health_check(self) -> int:
        """Tell whether the client can serve, from memory.

        Returns:
            0: yes, 1: it is not set up, 2: its master does not answer.
        """

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int, /) -> NoReturn:
        """Refuse: `connect()` sets the store up."""

    def is_exist(self, key: str, /) -> int:
        """Tell whether a value can be read; renews the lease.

        Returns:
            1, 0 or a negative code.
        """

    @overload
    def load_tensor_from_safetensor(self, key: str | None, file_name: str) -> Tensor | None: ...
    @overload
    def load_tensor_from_safetensor(self, *, file_name: str) -> Tensor | None: ...
    def load_tensor_from_safetensor(
        self, key: str | None = None, file_name: str = ""
    ) -> Tensor | None:
        """Load a tensor from a safetensors file and store it back in Mooncake.

        Returns:
            The tensor; None for a miss and for any failure.
        """

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> Mounted:
        """Lend a file's memory to the cluster.

        Returns:
            The code as `ret`, with `segment_ids`.
        """

    def pub_tensor(self, key: str, tensor: Tensor, config: Config = _DEFAULT) -> int:
        """Publish a PyTorch tensor with configurable replication settings.

        Returns:
            0, or a negative code.
        """

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: Config = _DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Publish a PyTorch tensor into the store with configurable replication settings, split into shards for tensor parallelism.

        Returns:
            0, or a negative code.
        """

    def put(self, key: str, value: Value, config: Config = _DEFAULT) -> int:
        """Store a value, unless the key is taken.

        Returns:
            0, also when the key is taken and the old value stays; or a negative code.
        """

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Value], config: Config = _DEFAULT
    ) -> int:
        """Store many values, each unless its key is taken.

        Returns:
            0, or the first error: others may be stored.
        """

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Config = _DEFAULT) -> int:
        """Put object data directly from a pre-allocated buffer.

        Returns:
            0, also when the key is taken, or a negative code.
        """

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Config = _DEFAULT,
    ) -> int:
        """Store two pieces of memory as one value, the metadata first.

        Returns:
            0, also when the size is 0 and nothing is stored; -1, or a code without its sign (600).
        """

    def put_parts(self, key: str, *args: Value, config: Config = _DEFAULT) -> int:
        """Store several buffers as one value, unless the key is taken.

        Returns:
            0, also when the key is taken or all are empty; or a negative code.
        """

    def put_tensor(self, key: str, tensor: Tensor) -> int:
        """Put a PyTorch tensor into the store.

        Returns:
            0, or a negative code.
        """

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Put a tensor directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Put a PyTorch tensor into the store using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Put a tensor directly from a pre-allocated buffer using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Put a PyTorch tensor into the store, split into shards for tensor parallelism.

        Returns:
            0, or a negative code.
        """

    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Put a full tensor directly from a pre-allocated buffer for Tensor Parallelism.

        Returns:
            0, or a negative code.
        """

    def query_task(self, task_id: TaskId) -> tuple[NativeTask | None, int]:
        """Tell how far a copy or a move is.

        Returns:
            The task and 0; or None and a negative code.
        """

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory known to the transport.

        Returns:
            0, or a negative code.
        """

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a key; `force` also one that a lease protects.

        Returns:
            0, or a negative code.
        """

    def remove_all(self, force: bool = False) -> int:
        """Remove every key.

        Returns:
            How many went, or a negative code.
        """

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove every key that a pattern matches.

        Returns:
            How many went, or a negative code.
        """

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Export a tensor stored under the given key into a safetensors file.

        Returns:
            0, or a negative code.
        """

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> NoReturn:
        """Refuse: `connect()` sets the store up."""

    def setup_dummy(
        self, mem_pool_size: int, local_buffer_size: int, server_address: str
    ) -> NoReturn:
        """Refuse: `connect(client_server_address=...)` does it."""

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take back and free what `allocate_and_mount_segment` lent.

        Returns:
            0; -1 when one of them is not known, -600 when it was taken back before.
        """

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Take the client's disk tier out of the cluster; waits for the grace period.

        Returns:
            0, also when there is none; or a negative code.
        """

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take back what `mount_segment` lent.

        Returns:
            0; -1 when one of them is not known, -600 when it was taken back before.
        """

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Make the transport forget memory.

        Returns:
            0, or a negative code.
        """

    def upsert(self, key: str, value: Value, config: Config = _DEFAULT) -> int:
        """Store a value, in place of the one that is there.

        Returns:
            0, or a negative code.
        """

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Value], config: Config = _DEFAULT
    ) -> int:
        """Store many values, in place of those that are there.

        Returns:
            0, or the first error: others may be stored.
        """

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Config = _DEFAULT) -> int:
        """Upsert object data directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    def upsert_parts(self, key: str, *args: Value, config: Config = _DEFAULT) -> int:
        """Store several buffers as one value, in place of the one there.

        Returns:
            0, or a negative code.
        """

    def upsert_pub_tensor(self, key: str, tensor: Tensor, config: Config = _DEFAULT) -> int:
        """Upsert a PyTorch tensor with configurable replication settings.

        Returns:
            0, or a negative code.
        """

    def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        """Upsert a PyTorch tensor into the store (insert or update).

        Returns:
            0, or a negative code.
        """

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Upsert a tensor directly from a pre-allocated buffer.

        Returns:
            0, or a negative code.
        """

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Upsert a PyTorch tensor into the store using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Config = _DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Upsert a tensor directly from a pre-allocated buffer using a TensorParallelism request or a writer_partition request.

        Returns:
            0, or a negative code.
        """

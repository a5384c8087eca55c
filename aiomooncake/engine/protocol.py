"""What the library uses of the engine's binding, as types.

The names and arguments are the binding's own (``mooncake.store.MooncakeDistributedStore``, whose
docstrings carry them; the contract tests compare both). Codes are 0 or a negative number from
upstream's ``types.h``; lists of codes are aligned with the keys unless a line says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

__all__ = [
    "Allocated",
    "Mounted",
    "NativeBufferHandle",
    "NativeReplica",
    "NativeStore",
    "NativeTask",
    "TaskId",
]

Keys = Sequence[str]
TaskId = tuple[int, int]
"""How a task of the master is named."""


class Mounted(TypedDict):
    """What comes of lending a file's memory: a code, and the segments' identifiers."""

    ret: int
    segment_ids: list[str]


class Allocated(Mounted):
    """What comes of lending fresh memory: its size in bytes, too."""

    allocated_size: int


@runtime_checkable
class NativeBufferHandle(Protocol):
    """A value in the client's local buffer; its room is free again when the handle is dropped."""

    def ptr(self) -> int:
        """Address of the first byte."""

    def size(self) -> int:
        """Size in bytes."""

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class NativeReplica(Protocol):
    """Where one copy of a value lies. A copy in memory has no disk descriptor, and so on."""

    @property
    def status(self) -> Any:
        """State of the copy, an enum."""

    def is_memory_replica(self) -> bool:
        """Whether it is in memory."""

    def is_disk_replica(self) -> bool:
        """Whether it is on a shared disk."""

    def is_local_disk_replica(self) -> bool:
        """Whether it is on the disk of one client."""

    def get_memory_descriptor(self) -> Any:
        """Its size and owner, as ``buffer_descriptor``."""

    def get_disk_descriptor(self) -> Any:
        """Its ``file_path`` and ``object_size``."""


class NativeTask(Protocol):
    """How far a task of the master is."""

    @property
    def id(self) -> TaskId:
        """The task."""

    @property
    def type(self) -> Any:
        """``REPLICA_COPY`` or ``REPLICA_MOVE``, an enum."""

    @property
    def status(self) -> Any:
        """``PENDING``, ``PROCESSING``, ``SUCCESS`` or ``FAILED``, an enum."""

    @property
    def message(self) -> str:
        """How it ended: words, or the name of a code."""

    @property
    def assigned_client(self) -> TaskId:
        """The client that does it, which holds a copy."""

    @property
    def created_at_ms_epoch(self) -> int:
        """When it was made."""

    @property
    def last_updated_at_ms_epoch(self) -> int:
        """When it was heard of last."""


class NativeStore(Protocol):
    """One native client. Almost every method crashes before ``setup`` and after ``close``."""

    # ------------------------------------------------------------------ life

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: Any = ...,
        enable_ssd_offload: bool = ...,
        ssd_offload_path: str = ...,
        tenant_id: str = ...,
        enable_client_http_server: bool = ...,
        client_http_port: int = ...,
    ) -> int:
        """Connect. Wheels before 0.3.12.post1 lack some of the later arguments."""

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect through a stand-alone client process on the same machine."""

    def close(self) -> int:
        """Tear down; 0 also when there is nothing to tear down."""

    def health_check(self) -> int:
        """0: fine, 1: not set up or closed, 2: master unreachable. A cached flag, no RPC."""

    def get_hostname(self) -> str:
        """``host:port`` of this client. Not the endpoint that replica descriptors show."""

    # ------------------------------------------------------------------ one value

    def put(self, key: str, value: Any, config: Any = ...) -> int:
        """Store a value; 0 also when the key is taken, and then the old value stays."""

    def put_parts(self, key: str, *args: Any, config: Any = ...) -> int:
        """Store several byte buffers as one value; 0 and nothing stored when all are empty."""

    def upsert(self, key: str, value: Any, config: Any = ...) -> int:
        """Store or replace a value."""

    def upsert_parts(self, key: str, *args: Any, config: Any = ...) -> int:
        """Store or replace a value made of several byte buffers."""

    def get(self, key: str, /) -> bytes:
        """Read a value; ``b""`` for a miss and for any failure."""

    def get_buffer(self, key: str, /) -> NativeBufferHandle | None:
        """Read a value into the local buffer; None for a miss and for any failure."""

    def is_exist(self, key: str, /) -> int:
        """1, 0 or a negative code."""

    def get_size(self, key: str, /) -> int:
        """Size in bytes or a negative code."""

    def remove(self, key: str, force: bool = ...) -> int:
        """Remove a key; -706 while a lease protects it, unless forced."""

    # ------------------------------------------------------------------ many values

    def put_batch(self, keys: Keys, values: Sequence[Any], config: Any = ...) -> int:
        """Store many values; one code, the first error."""

    def upsert_batch(self, keys: Keys, values: Sequence[Any], config: Any = ...) -> int:
        """Store or replace many values; one code, the first error."""

    def get_batch(self, keys: Keys, /) -> list[bytes]:
        """Read many values; a list of length 1 when not set up and when there are no keys."""

    def batch_get_buffer(self, keys: Keys, /) -> Sequence[NativeBufferHandle | None]:
        """Read many values into the local buffer."""

    def batch_is_exist(self, keys: Keys) -> list[int]:
        """1, 0 or a negative code per key."""

    def batch_remove(self, keys: Keys, force: bool = ...) -> list[int]:
        """A code per key."""

    def remove_by_regex(self, regex_pattern: str, force: bool = ...) -> int:
        """How many keys went, or a negative code."""

    def remove_all(self, force: bool = ...) -> int:
        """How many keys went, or a negative code."""

    # ------------------------------------------------------------------ caller memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory known to the transport; -600 when it is already known."""

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Forget memory that was registered at this address."""

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = ...) -> int:
        """Store memory as a value; 0 and nothing stored when the size is 0."""

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any = ...) -> int:
        """Store memory as a value, or replace the value."""

    def batch_put_from(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Any = ...
    ) -> list[int]:
        """A code per key."""

    def batch_upsert_from(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Any = ...
    ) -> list[int]:
        """A code per key."""

    def batch_put_from_multi_buffers(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = ...,
    ) -> list[int]:
        """Store values made of several pieces of memory; a code per key."""

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read a value into memory; its size or a negative code."""

    def batch_get_into(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """A size or a negative code per key; of a key given twice only one buffer is written."""

    def batch_get_into_multi_buffers(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = ...,
    ) -> list[int]:
        """Read values into several pieces each; the pieces must make up the size exactly."""

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Read ranges of many values into registered buffers; bytes or a code per range."""

    # ------------------------------------------------------------------ sessions

    def batch_put_session_start(
        self, keys: Keys, sizes: Sequence[int], config: Any = ...
    ) -> list[int]:
        """Reserve room for values that are written in ranges; a code per key."""

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of reserved values; bytes or a negative code per key."""

    def batch_put_session_end(self, keys: Keys) -> list[int]:
        """Make reserved values readable, also those not fully written."""

    def batch_put_session_revoke(self, keys: Keys) -> list[int]:
        """Give up reserved values."""

    def batch_get_session_start(self, keys: Keys) -> list[int]:
        """Look values up for reading in ranges; a code per key."""

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of looked-up values; bytes or a code per key, -707 after the lease."""

    def batch_get_session_end(self, keys: Keys) -> int:
        """Forget looked-up values; one code."""

    # ------------------------------------------------------------------ placement

    def get_replica_desc(self, key: str) -> Sequence[NativeReplica]:
        """Descriptors of a value's copies; empty for a miss and for any failure."""

    def batch_get_replica_desc(self, keys: Keys) -> Mapping[str, Sequence[NativeReplica]]:
        """Descriptors by key; missing keys are absent."""

    def mount_segment(
        self, path: str, size: int, offset: int = ..., protocol: str = ..., location: str = ...
    ) -> Mounted:
        """Offer a file's memory to the cluster."""

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = ...) -> int:
        """Take back what ``mount_segment`` offered."""

    def allocate_and_mount_segment(
        self, size: int, protocol: str = ..., location: str = ...
    ) -> Allocated:
        """Offer fresh memory to the cluster; the size is rounded up to 16 MB."""

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = ...
    ) -> int:
        """Take back what ``allocate_and_mount_segment`` offered."""

    def batch_replica_clear(self, keys: Keys, segment_name: str = ...) -> list[str]:
        """Remove copies of keys that no lease protects; the keys that were cleared."""

    # ------------------------------------------------------------------ tasks

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Have a value copied to other segments; the task and a code."""

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Have a copy moved to another segment; the task and a code."""

    def query_task(self, task_id: TaskId) -> tuple[NativeTask | None, int]:
        """How far a task is, and a code."""

    # ------------------------------------------------------------------ the rest

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Any = ...,
    ) -> int:
        """Store two pieces of memory as one value; codes come without their sign, or as -1."""

    def alloc_from_mem_pool(self, size: int, /) -> int:
        """Address of memory of a dummy client's pool; 0 for other clients."""

    def get_offload_rpc_read_count(self) -> int:
        """How often values were read from other clients' disks."""

    def unmount_local_disk_segment(self, grace_period_seconds: int = ...) -> int:
        """Take the client's disk tier out of the cluster; 0 also when there is none."""

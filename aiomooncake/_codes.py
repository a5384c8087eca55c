"""The engine's codes as a table: name, class, whether trying again can help, and what to do next.

Source: ``enum class ErrorCode`` in upstream's ``mooncake-store/include/types.h``. Classes are named
by text, because :mod:`aiomooncake.errors` stands on this module and not the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CODES", "RPC_CODES", "CodeInfo", "code_name"]

RPC_CODES: Final = (-900, -901)
"""A request did not get through, or was not answered in time."""


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """What an engine code means to a caller.

    Attributes:
        code: the integer.
        name: upstream's name of it.
        error: the name of the class in :mod:`aiomooncake.errors` that is raised for it.
        retryable: whether the same call may succeed later although nobody changes anything.
        advice: one sentence: what it means and what to do next.
    """

    code: int
    name: str
    error: str
    retryable: bool
    advice: str


_row = CodeInfo
_AGAIN = True
_STAYS = False

# A table reads best as a table.
# fmt: off
_TABLE: Final = (
    _row(0, "OK", "InternalError", _STAYS,
         "The engine reports success, so nothing is to be mended; this text should not be seen."),
    _row(-1, "INTERNAL_ERROR", "InternalError", _STAYS,
         "The engine failed inside itself: its own log (MC_LOG_LEVEL=INFO, set before the start) "
         "says where."),
    _row(-10, "BUFFER_OVERFLOW", "BufferTooSmallError", _STAYS,
         "The buffer is too small for the value: ask for its size first, or raise "
         "local_buffer_size."),
    _row(-100, "SHARD_INDEX_OUT_OF_RANGE", "InternalError", _STAYS,
         "The master miscounted its shards: report it upstream with the master's log."),
    _row(-101, "SEGMENT_NOT_FOUND", "SegmentError", _AGAIN,
         "The segment is not mounted (any more): wait for its owner to come back, or name a "
         "mounted one."),
    _row(-102, "SEGMENT_ALREADY_EXISTS", "SegmentError", _STAYS,
         "This segment is mounted already: unmount it first, or give the client another "
         "local_hostname."),
    _row(-103, "CLIENT_NOT_FOUND", "UnavailableError", _AGAIN,
         "The master does not know this client (it restarted, or the client was silent for "
         "longer than client_ttl): try again in a second."),
    _row(-200, "NO_AVAILABLE_HANDLE", "NoSpaceError", _AGAIN,
         "No segment has room, or none is mounted yet: wait for a client with "
         "global_segment_size > 0 to join, or add memory or remove keys."),
    _row(-300, "INVALID_VERSION", "ReplicaError", _STAYS,
         "The object changed meanwhile: read its present state and start the operation over."),
    _row(-400, "INVALID_KEY", "InvalidArgumentError", _STAYS,
         "The engine does not take this key: use another one."),
    _row(-500, "WRITE_FAIL", "TransferError", _AGAIN,
         "Writing the value failed: try again."),
    _row(-600, "INVALID_PARAMS", "InvalidArgumentError", _STAYS,
         "The engine refused the arguments (an empty key or value, unregistered memory, or no "
         "room in the local buffer): check them, or raise local_buffer_size."),
    _row(-601, "ILLEGAL_CLIENT", "ReplicaError", _STAYS,
         "Another client began this write, so only that one may finish it: write under another "
         "key, or wait for it to end."),
    _row(-700, "INVALID_WRITE", "ReplicaError", _STAYS,
         "The object is not in a state that can be written: remove it, or write under another "
         "key."),
    _row(-701, "INVALID_READ", "ReplicaError", _STAYS,
         "The object is not in a state that can be read: store it again."),
    _row(-702, "INVALID_REPLICA", "ReplicaError", _STAYS,
         "No complete replica of the object is left: store it again."),
    _row(-703, "REPLICA_IS_NOT_READY", "ObjectNotReadyError", _AGAIN,
         "The value is still being written: try again in a moment."),
    _row(-704, "OBJECT_NOT_FOUND", "ObjectNotFoundError", _STAYS,
         "There is no such key (it was never stored, or was evicted or removed): store it first."),
    _row(-705, "OBJECT_ALREADY_EXISTS", "ObjectExistsError", _STAYS,
         "The key is taken and keeps its first value: use upsert to replace it."),
    _row(-706, "OBJECT_HAS_LEASE", "ObjectLeasedError", _AGAIN,
         "The key was read lately: wait for its lease to end, or remove it with force=True."),
    _row(-707, "LEASE_EXPIRED", "LeaseExpiredError", _AGAIN,
         "The read took longer than the key was protected for: read it again, fewer keys at a "
         "time."),
    _row(-708, "OBJECT_HAS_REPLICATION_TASK", "ReplicaError", _AGAIN,
         "The object is being copied or moved: try again when that has ended."),
    _row(-709, "OBJECT_NO_REPLICATION_TASK", "ReplicaError", _STAYS,
         "The object is not being copied or moved: there is nothing to finish or to revoke."),
    _row(-710, "REPLICA_NOT_FOUND", "ReplicaError", _STAYS,
         "The object has no replica there: ask which segments hold it."),
    _row(-711, "REPLICA_ALREADY_EXISTS", "ReplicaError", _STAYS,
         "The object has a replica there already: choose another segment."),
    _row(-712, "REPLICA_IS_GONE", "ReplicaError", _STAYS,
         "The replica was lost on the way (its segment left): read another one, or store it "
         "again."),
    _row(-713, "REPLICA_NOT_IN_LOCAL_MEMORY", "ReplicaError", _STAYS,
         "This host does not hold the replica in memory: read it over the network."),
    _row(-714, "OBJECT_REPLICA_BUSY", "ReplicaError", _AGAIN,
         "Somebody is reading the object: try again in a moment."),
    _row(-800, "TRANSFER_FAIL", "TransferError", _AGAIN,
         "A peer did not take or give the bytes (it may have died or be frozen): try again; its "
         "segment is dropped after the master's client_ttl."),
    _row(-801, "CHECKSUM_MISMATCH", "ChecksumError", _STAYS,
         "The bytes that arrived are not those that were stored: remove the key and store it "
         "again."),
    _row(-900, "RPC_FAIL", "RpcError", _AGAIN,
         "The master can't be reached: check that it runs at this address and is of the client's "
         "version, then try again."),
    _row(-901, "RPC_TIMEOUT", "RpcTimeoutError", _AGAIN,
         "The master did not answer in time: check its load and health, or raise rpc_timeout."),
    _row(-1000, "ETCD_OPERATION_ERROR", "MetadataError", _AGAIN,
         "etcd failed: check that it is healthy and reachable."),
    _row(-1001, "ETCD_KEY_NOT_EXIST", "MetadataError", _STAYS,
         "etcd lacks the key: check the cluster id and that a master has registered."),
    _row(-1002, "ETCD_TRANSACTION_FAIL", "MetadataError", _AGAIN,
         "An etcd transaction lost against another one: try again."),
    _row(-1003, "ETCD_CTX_CANCELLED", "MetadataError", _AGAIN,
         "The wait for etcd was cancelled (often a change of leader): try again."),
    _row(-1004, "OPLOG_ENTRY_NOT_FOUND", "MetadataError", _STAYS,
         "The operation log lacks the entry: look at the masters' logs."),
    _row(-1005, "K8S_LEASE_OPERATION_ERROR", "MetadataError", _AGAIN,
         "The Kubernetes lease could not be read or written: check the API server and the rights "
         "of the service account."),
    _row(-1006, "K8S_LEASE_NOT_FOUND", "MetadataError", _STAYS,
         "There is no such Kubernetes lease: check its name and namespace, and that a master "
         "runs."),
    _row(-1007, "INCOMPLETE_OPLOG_CATCH_UP", "MetadataError", _AGAIN,
         "The standby master has not caught up with the operation log: wait, and look at its "
         "log."),
    _row(-1010, "UNAVAILABLE_IN_CURRENT_STATUS", "UnavailableError", _AGAIN,
         "The master can't serve this now (starting, or not the leader): try again in a moment."),
    _row(-1011, "UNAVAILABLE_IN_CURRENT_MODE", "UnavailableError", _STAYS,
         "This engine was built, or this master started, without what the call needs: change the "
         "wheel or the master's options."),
    _row(-1012, "NOT_SUPPORTED", "NotSupportedError", _STAYS,
         "The engine does not offer this in its present mode: use another call."),
    _row(-1100, "FILE_NOT_FOUND", "OffloadError", _STAYS,
         "The offloaded file is gone: store the key again."),
    _row(-1101, "FILE_OPEN_FAIL", "OffloadError", _STAYS,
         "The offload file can't be opened: check ssd_offload_path, its rights and the disk."),
    _row(-1102, "FILE_READ_FAIL", "OffloadError", _STAYS,
         "The offload file can't be read: check the disk, and store the key again."),
    _row(-1103, "FILE_WRITE_FAIL", "OffloadError", _STAYS,
         "The offload file can't be written: check rights and free space under ssd_offload_path."),
    _row(-1104, "FILE_INVALID_BUFFER", "OffloadError", _STAYS,
         "The file layer got a bad buffer: report it upstream with the engine's log."),
    _row(-1105, "FILE_LOCK_FAIL", "OffloadError", _AGAIN,
         "The offload file is locked by somebody else: try again, and give each process its own "
         "ssd_offload_path."),
    _row(-1106, "FILE_INVALID_HANDLE", "OffloadError", _STAYS,
         "The file layer lost its handle: open the store anew."),
    _row(-1200, "BUCKET_NOT_FOUND", "OffloadError", _STAYS,
         "The offload bucket is gone: store the key again."),
    _row(-1201, "BUCKET_ALREADY_EXISTS", "OffloadError", _STAYS,
         "The offload bucket is there already: give each process its own ssd_offload_path."),
    _row(-1202, "KEYS_EXCEED_BUCKET_LIMIT", "OffloadError", _STAYS,
         "Too many keys for one bucket: raise MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT, or offload "
         "fewer at a time."),
    _row(-1203, "KEYS_ULTRA_LIMIT", "OffloadError", _STAYS,
         "The offload layer is at its limit of keys: raise MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT, or "
         "remove keys."),
    _row(-1300, "UNABLE_OFFLOAD", "OffloadError", _STAYS,
         "Offloading is not switched on: set enable_ssd_offload here and offloading at the "
         "master."),
    _row(-1301, "UNABLE_OFFLOADING", "OffloadError", _AGAIN,
         "The client does not take part in offloading at the moment: try again later."),
    _row(-1500, "SERIALIZE_UNSUPPORTED", "SerializationError", _STAYS,
         "This kind of segment can't be serialised: leave it out of snapshots."),
    _row(-1501, "SERIALIZE_FAIL", "SerializationError", _STAYS,
         "Serialising failed: look at the master's log."),
    _row(-1502, "DESERIALIZE_FAIL", "SerializationError", _STAYS,
         "What was read can't be understood: client, master or snapshot are of different "
         "versions."),
    _row(-1503, "PERSISTENT_FAIL", "OffloadError", _STAYS,
         "Persisting failed: check the snapshot or log storage of the master."),
    _row(-1400, "TASK_NOT_FOUND", "TaskError", _STAYS,
         "The master does not know this task (any more): start it again."),
    _row(-1401, "TASK_PENDING_LIMIT_EXCEEDED", "TaskError", _AGAIN,
         "Too many tasks are waiting at the master: try again when some have ended."),
    _row(-1402, "JOB_NOT_FOUND", "TaskError", _STAYS,
         "The master does not know this job (any more): start it again."),
    _row(-1600, "DFS_NETWORK_TIMEOUT", "OffloadError", _AGAIN,
         "The distributed file system did not answer in time: try again, and check its network."),
    _row(-1601, "DFS_SERVICE_UNAVAILABLE", "OffloadError", _AGAIN,
         "The distributed file system is not available: check that it is mounted and switched "
         "on."),
    _row(-1602, "DFS_QUOTA_EXCEEDED", "OffloadError", _STAYS,
         "The distributed file system's quota is used up: raise it, or remove keys."),
    _row(-1603, "DFS_PERMISSION_DENIED", "OffloadError", _STAYS,
         "The distributed file system refused access: mend the rights of MOONCAKE_DFS_ROOT_DIR."),
    _row(-1604, "DFS_STALE_HANDLE", "OffloadError", _AGAIN,
         "A file handle of the distributed file system expired: try again."),
    _row(-1605, "DFS_PARTIAL_WRITE", "OffloadError", _AGAIN,
         "Only part of the value reached the distributed file system: store it again."),
    _row(-1700, "TENANT_QUOTA_EXCEEDED", "TenantError", _AGAIN,
         "The tenant's memory quota is used up: remove keys, wait for eviction, or raise the "
         "quota."),
    _row(-1701, "TENANT_NOT_REGISTERED", "TenantError", _STAYS,
         "The tenant has no quota policy: register it at the master, or use another tenant_id."),
    _row(-1702, "TENANT_NOT_EMPTY", "TenantError", _STAYS,
         "The tenant still owns objects or quota: remove its keys first."),
)
# fmt: on

CODES: Final[Mapping[int, CodeInfo]] = MappingProxyType({info.code: info for info in _TABLE})
"""Every code of the engine and what it means."""


def code_name(code: int) -> str:
    """Return upstream's name of an engine code, ``"UNKNOWN_CODE"`` for one it does not have."""
    info = CODES.get(code)
    return "UNKNOWN_CODE" if info is None else info.name

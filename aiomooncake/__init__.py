"""An asyncio client for Mooncake Store that never blocks the loop.

``connect`` opens a store, ``connect_ranks`` one per rank, ``adopt`` takes one that somebody else
has set up. See the README for a first program.
"""

from __future__ import annotations

from aiomooncake._version import __version__
from aiomooncake.cluster import LocalCluster
from aiomooncake.config import ReplicateConfig, StoreConfig
from aiomooncake.connect import adopt, connect
from aiomooncake.errors import (
    BatchError,
    BufferTooSmallError,
    ChecksumError,
    ClusterError,
    ConfigError,
    EngineNotInstalledError,
    ForkedProcessError,
    InternalError,
    InvalidArgumentError,
    LeaseExpiredError,
    MetadataError,
    MooncakeError,
    NoSpaceError,
    NotSupportedError,
    ObjectExistsError,
    ObjectLeasedError,
    ObjectNotFoundError,
    ObjectNotReadyError,
    OffloadError,
    OperationTimeoutError,
    ReplicaError,
    RpcError,
    RpcTimeoutError,
    SegmentError,
    SerializationError,
    SetupError,
    SetupTimeoutError,
    StoreClosedError,
    TaintedStoreError,
    TaskError,
    TenantError,
    TooManyAbandonedError,
    TransferError,
    UnavailableError,
    WarmupError,
    WrongLoopError,
)
from aiomooncake.observe import Health, StoreStats
from aiomooncake.ranks import RankGroup, connect_ranks
from aiomooncake.replicas import Replica
from aiomooncake.store import Store
from aiomooncake.warmup import (
    Diagnosis,
    DiagnosisKind,
    WarmupAttempt,
    WarmupPolicy,
    WarmupProgress,
    WarmupReport,
)

__all__ = [
    "BatchError",
    "BufferTooSmallError",
    "ChecksumError",
    "ClusterError",
    "ConfigError",
    "Diagnosis",
    "DiagnosisKind",
    "EngineNotInstalledError",
    "ForkedProcessError",
    "Health",
    "InternalError",
    "InvalidArgumentError",
    "LeaseExpiredError",
    "LocalCluster",
    "MetadataError",
    "MooncakeError",
    "NoSpaceError",
    "NotSupportedError",
    "ObjectExistsError",
    "ObjectLeasedError",
    "ObjectNotFoundError",
    "ObjectNotReadyError",
    "OffloadError",
    "OperationTimeoutError",
    "RankGroup",
    "Replica",
    "ReplicaError",
    "ReplicateConfig",
    "RpcError",
    "RpcTimeoutError",
    "SegmentError",
    "SerializationError",
    "SetupError",
    "SetupTimeoutError",
    "Store",
    "StoreClosedError",
    "StoreConfig",
    "StoreStats",
    "TaintedStoreError",
    "TaskError",
    "TenantError",
    "TooManyAbandonedError",
    "TransferError",
    "UnavailableError",
    "WarmupAttempt",
    "WarmupError",
    "WarmupPolicy",
    "WarmupProgress",
    "WarmupReport",
    "WrongLoopError",
    "__version__",
    "adopt",
    "connect",
    "connect_ranks",
]

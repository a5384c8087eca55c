"""What SGLang's hierarchical cache hands to a storage backend and takes from it.

The names and fields are those of its ``hicache_storage.py``, so that a backend written against
these works there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "STORAGE_BATCH_SIZE",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageMetrics",
]

STORAGE_BATCH_SIZE = 128
"""Pages of one call."""


@dataclass
class HiCacheStorageConfig:
    """Where a scheduler process stands among the others, and what its operator wants.

    Attributes:
        tp_rank: Its tensor-parallel rank, of ``tp_size``.
        pp_rank: Its pipeline stage, of ``pp_size``.
        dp_rank: Its replica, of ``dp_size``.
        is_mla_model: A page is one object that all tensor-parallel ranks share (MLA); else each
            rank has keys and values of its own heads (MHA).
        enable_storage_metrics: Whether :meth:`get_stats` has something to tell.
        model_name: Part of every key.
        tp_lcm_size: A common multiple of the tensor-parallel sizes that share pages.
        should_split_heads: Cut a page by heads, so that they can.
        extra_config: The operator's own JSON.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = None
    dp_rank: int = 0
    dp_size: int = 1
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: Mapping[str, Any] | None = None


@dataclass
class HiCacheStorageExtraInfo:
    """What comes with a call; Mooncake needs none of it."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(str, Enum):
    """The pools of host memory beside the one for keys and values."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    """Which pages of a prefix a pool must have: all, or the last ones only."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    """Pages of one pool: their keys, and where they lie in host memory."""

    name: PoolName
    host_indices: Any = None
    keys: Sequence[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    """How much of a prefix is there.

    Attributes:
        kv_hit_pages: Pages of the longest prefix that all pools can serve.
        extra_pool_hit_pages: The same by pool, each for itself.
        restorable_prefix_pages: All prefixes that can be served, not only the longest: ranks differ
            in what they have, and the caller takes what all of them can.
    """

    kv_hit_pages: int
    extra_pool_hit_pages: dict[PoolName, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    """Moves since the last look: pages of each, and GB per second."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)

"""From pages to objects and back: SGLang's methods of a storage backend, for any client.

A page becomes one object or several: keys and values of each rank (MHA), of each part of its heads,
or one object that all ranks share (MLA). Their names are SGLang's own, so that both find each
other's pages.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.sglang_hicache.interface import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
)

__all__ = ["STORED", "THERE", "Objects", "PageStorage"]

log = logging.getLogger(__name__)

STORED = 0
"""The code of an object that was written."""

THERE = 1
"""The code of an object that was there and is left as it is; what failed is below zero."""

_GB = 1 << 30


@dataclass(slots=True)
class Objects:
    """What is moved by one call.

    Attributes:
        keys: Names of the objects.
        places: Where each one lies in host memory: its address, or those of its pieces.
        sizes: How many bytes, likewise.
        per_page: Objects of a page.
        groups: The group of each object, if they have any.
    """

    keys: list[str]
    places: list[Any]
    sizes: list[Any]
    per_page: int = 1
    groups: list[str] | None = None

    @property
    def in_pieces(self) -> bool:
        """Whether each object lies in several pieces."""
        return bool(self.places) and isinstance(self.places[0], list)

    def as_pieces(self) -> Objects:
        """Return the same with one piece for each object."""
        places, sizes = [[place] for place in self.places], [[size] for size in self.sizes]
        return Objects(self.keys, places, sizes, self.per_page, self.groups)

    def some(self, which: Sequence[int]) -> Objects:
        """Return some of them."""
        if len(which) == len(self.keys):
            return self
        return Objects(
            [self.keys[i] for i in which],
            [self.places[i] for i in which],
            [self.sizes[i] for i in which],
            groups=None if self.groups is None else [self.groups[i] for i in which],
        )


class PageStorage(ABC):
    """A storage backend of the hierarchical cache; how bytes move is left to who derives from it.

    The scheduler's thread makes it, registers pools, clears and closes it. Daemon threads, which
    nobody starts again, ask for hits, read and write pages, all at the same time: what fails there
    is an answer (False, or fewer pages), not an exception. Arguments that can't be right raise
    ``ValueError``.
    """

    def __init__(self, storage_config: HiCacheStorageConfig | None) -> None:
        config = self.storage_config = storage_config or HiCacheStorageConfig()
        extra = config.extra_config or {}
        self.mem_pool_host: Any = None
        self.registered_pools: dict[PoolName, Any] = {}
        self.enable_storage_metrics = config.enable_storage_metrics
        self._grouped = bool(extra.get("enable_group_semantics"))
        self._metrics = StorageMetrics()
        self._metrics_lock = threading.Lock()

        parts = [] if extra.get("extra_backend_tag") is None else [str(extra["extra_backend_tag"])]
        if config.model_name:
            parts.append(config.model_name.replace("/", "-"))
        self._prefix = f"{'_'.join(parts)}_" if parts else ""

        stage = f"_{config.pp_rank}" if config.pp_size > 1 else ""
        self._shared = stage or "_"
        self._split = 1
        if config.should_split_heads and not config.is_mla_model:
            self._split = (config.tp_lcm_size or config.tp_size) // config.tp_size
        first = config.tp_rank * self._split
        self._ranks = [f"_{first + i}{stage}" for i in range(self._split)]
        self._suffixes = [f"{self._shared}_k"]
        if not config.is_mla_model:
            self._suffixes = [f"{rank}_{half}" for rank in self._ranks for half in "kv"]

    # ------------------------------------------------------------------ what a client does

    @abstractmethod
    def _register(self, memory: Any) -> None:
        """Tell the engine of an array or tensor that pages are moved from and to."""

    @abstractmethod
    def _exist(self, keys: list[str]) -> Sequence[int]:
        """Ask for objects: 1, 0, or a code below zero for each."""

    @abstractmethod
    def _write(self, objects: Objects) -> Sequence[int]:
        """Store those that are not there: STORED, THERE, or a code below zero for each."""

    @abstractmethod
    def _read(self, objects: Objects) -> Sequence[int]:
        """Read objects into host memory: bytes, or a code below zero for each."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything, of all models and ranks."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the engine."""

    # ------------------------------------------------------------------ pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of keys and values; its memory must stay where it is until the close."""
        self.mem_pool_host = mem_pool_host
        if not self._is_logical:
            self._register_pool(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Take a pool beside it."""
        if host_pool_name == PoolName.KV:
            return
        self.registered_pools[host_pool_name] = host_pool
        self._register_pool(host_pool)

    def _register_pool(self, pool: Any) -> None:
        buffers = getattr(pool, "get_hybrid_pool_buffer", lambda: [pool.kv_buffer])
        for buffer in buffers():
            if buffer is not None and len(buffer):  # a model may have no states of some kind
                self._register(buffer)

    @property
    def _is_logical(self) -> bool:
        """Whether the first pool only counts pages, and their bytes are in the others."""
        if self.mem_pool_host is None:
            raise ValueError("there is no pool yet: register_mem_pool_host first")
        return getattr(self.mem_pool_host, "kv_buffer", None) is None

    # ------------------------------------------------------------------ pages

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Tell how many pages are there, from the first one on."""
        return _leading(self._pages_there(keys, self._suffixes))

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages that are not there yet: whether each page is there now."""
        if self._is_logical or not keys:
            return [True] * len(keys)
        return self._set(self._kv_objects(keys, host_indices))

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into host memory: whether each page is there now."""
        if self._is_logical or not keys:
            return [True] * len(keys)
        return self._get(self._kv_objects(keys, host_indices))

    # ------------------------------------------------------------------ pages of several pools

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Tell which prefixes of the pages can be served by all pools."""
        pages = len(keys) if self._is_logical else self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            suffixes = self._suffixes_of(transfer.name)
            there = self._pages_there(keys, suffixes)[:pages]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                served = list(range(1, _leading(there) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                served = [
                    end for end in range(1, pages + 1) if all(there[max(0, end - window) : end])
                ]
            if served:
                hits[transfer.name] = served[-1]
            restorable = [end for end in restorable if end in served]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Store pages of several pools at once: for each pool, whether each page is there now."""
        parts = [self._pool_objects(one) for one in transfers]
        codes = iter(self._write(_joined(parts)) if parts else ())
        return {
            one.name: _by_page([next(codes) >= 0 for _ in part.keys], part.per_page)
            for one, part in zip(transfers, parts, strict=True)
        }

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Read pages of several pools: for each pool, whether each page is there now."""
        return {one.name: self._get(self._pool_objects(one)) for one in transfers}

    # ------------------------------------------------------------------ objects by their own names

    def exists(self, key: str) -> bool:
        """Tell whether an object is there."""
        return self._exist([key])[0] == 1

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: int | None = None,
        target_sizes: int | None = None,
    ) -> bool:
        """Store an object from an address, unless it is there."""
        return self.batch_set([key], None, [target_location], [target_sizes])

    def get(
        self, key: str, target_location: int | None = None, target_sizes: int | None = None
    ) -> bool:
        """Read an object to an address."""
        return self._read(_located([key], [target_location], [target_sizes]))[0] >= 0

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Sequence[int | None] | None = None,
        target_sizes: Sequence[int | None] | None = None,
    ) -> bool:
        """Store objects from addresses, unless they are there: whether all of them are now."""
        codes = self._write(_located(keys, target_locations, target_sizes)) if keys else ()
        return bool(codes) and min(codes) >= 0

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[int | None] | None = None,
        target_sizes: Sequence[int | None] | None = None,
    ) -> int:
        """Read objects to addresses: how many pages came, from the first one on."""
        if not keys:
            return 0
        codes = self._read(_located(keys, target_locations, target_sizes))
        return _leading([code >= 0 for code in codes]) // (
            1 if self.storage_config.is_mla_model else 2
        )

    # ------------------------------------------------------------------ what it did

    def get_stats(self) -> StorageMetrics:
        """Take what was moved since the last call."""
        with self._metrics_lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    # ------------------------------------------------------------------ how

    def _set(self, objects: Objects) -> list[bool]:
        began = time.perf_counter()
        codes = self._write(objects)
        if self.enable_storage_metrics:
            new = [i for i, code in enumerate(codes) if code == STORED]
            self._note(objects.some(new), objects.per_page, time.perf_counter() - began, "backup")
        return _by_page([code >= 0 for code in codes], objects.per_page)

    def _get(self, objects: Objects) -> list[bool]:
        began = time.perf_counter()
        codes = self._read(objects)
        if self.enable_storage_metrics:
            got = [i for i, code in enumerate(codes) if code > 0]
            self._note(objects.some(got), objects.per_page, time.perf_counter() - began, "prefetch")
        return _by_page([code > 0 for code in codes], objects.per_page)

    def _note(self, moved: Objects, per_page: int, seconds: float, what: str) -> None:
        if not moved.keys:
            return
        nbytes = sum(sum(size) if isinstance(size, list) else size for size in moved.sizes)
        with self._metrics_lock:
            getattr(self._metrics, f"{what}_pgs").append(len(moved.keys) // per_page)
            getattr(self._metrics, f"{what}_bandwidth").append(nbytes / _GB / seconds)

    def _pages_there(self, keys: Sequence[str], suffixes: Sequence[str]) -> list[bool]:
        if not keys:
            return []
        codes = self._exist(self._names(keys, suffixes))
        return _by_page([code == 1 for code in codes], len(suffixes))

    def _names(self, keys: Sequence[str], suffixes: Sequence[str]) -> list[str]:
        prefix = self._prefix
        return [f"{prefix}{key}{suffix}" for key in keys for suffix in suffixes]

    def _kv_objects(self, keys: Sequence[str], host_indices: Any) -> Objects:
        pool = self.mem_pool_host
        _check_pages(keys, host_indices, pool)
        if self._split > 1:
            places, sizes = pool.get_split_heads_page_buffer_meta(host_indices, self._split)
        else:
            places, sizes = pool.get_page_buffer_meta(host_indices)
        if not self.storage_config.is_mla_model and len(places) != len(keys) * len(self._suffixes):
            raise ValueError(
                f"{len(places)} pieces of memory for {len(keys)} pages: keys and values in pieces "
                "by layer are no objects; use the layout page_first, page_first_direct or page_head"
            )
        return self._objects(keys, self._suffixes, places, sizes)

    def _pool_objects(self, transfer: PoolTransfer) -> Objects:
        pool, keys = self._pool(transfer.name), transfer.keys or ()
        _check_pages(keys, transfer.host_indices, pool)
        places, sizes = pool.get_page_buffer_meta(transfer.host_indices)
        return self._objects(keys, self._suffixes_of(transfer.name), places, sizes)

    def _objects(
        self,
        keys: Sequence[str],
        suffixes: Sequence[str],
        places: list[int],
        sizes: list[int],
    ) -> Objects:
        names = self._names(keys, suffixes)
        if len(places) != len(names):
            pieces, rest = divmod(len(places), len(names))
            if rest or len(sizes) != len(places):
                raise ValueError(f"{len(places)} pieces of memory can't make {len(names)} objects")
            cuts = range(0, len(places), pieces)
            return Objects(
                names,
                [places[i : i + pieces] for i in cuts],
                [sizes[i : i + pieces] for i in cuts],
                len(suffixes),
                self._groups(keys, len(suffixes)),
            )
        return Objects(names, places, sizes, len(suffixes), self._groups(keys, len(suffixes)))

    def _groups(self, keys: Sequence[str], per_page: int) -> list[str] | None:
        """Keep the objects of a page together."""
        if not self._grouped:
            return None
        return [
            group for key in keys for group in (f"sglang-hicache:{self._prefix}{key}",) * per_page
        ]

    def _pool(self, name: PoolName) -> Any:
        pool = self.registered_pools.get(name)
        if pool is None:
            raise ValueError(f"the pool {name} is not registered: register_mem_host_pool_v2 first")
        return pool

    def _suffixes_of(self, name: PoolName) -> list[str]:
        """Name the objects of a page in a pool, in the order of the places that it gives."""
        pool, rank = self._pool(name), self._ranks[0]
        if name == PoolName.MAMBA:
            convs = [f"{rank}_conv_{i}" for i in range(len(pool.conv_buffer))]
            has_states = getattr(pool, "temporal_state_elem_size", 1) > 0
            return [f"{rank}_temporal", *convs] if has_states else convs
        shared_halves = name == PoolName.SWA and self.storage_config.is_mla_model
        if (
            name in (PoolName.DRAFT, PoolName.SWA)
            and hasattr(pool, "v_buffer")
            and not shared_halves
        ):
            return [f"{rank}_{name}_{half}" for half in "kv"]
        return [f"{self._shared}_{name}_k" if name == PoolName.DRAFT else f"{self._shared}_{name}"]


def _joined(parts: Sequence[Objects]) -> Objects:
    """Make one of several; if any of them is in pieces, all are."""
    if any(part.in_pieces for part in parts):
        parts = [part if part.in_pieces else part.as_pieces() for part in parts]
    return Objects(
        [key for part in parts for key in part.keys],
        [place for part in parts for place in part.places],
        [size for part in parts for size in part.sizes],
        groups=None
        if parts[0].groups is None
        else [group for part in parts for group in part.groups or ()],
    )


def _check_pages(keys: Sequence[str], host_indices: Any, pool: Any) -> None:
    tokens = len(keys) * pool.page_size
    if len(host_indices) != tokens:
        raise ValueError(
            f"{len(keys)} pages of {pool.page_size} tokens are {tokens}, not {len(host_indices)}"
        )


def _located(
    keys: Sequence[str],
    locations: Sequence[int | None] | None,
    sizes: Sequence[int | None] | None,
) -> Objects:
    if locations is None or sizes is None or None in locations or None in sizes:
        raise ValueError("give target_location(s) and target_sizes: values are moved by address")
    if not len(keys) == len(locations) == len(sizes):
        raise ValueError(f"{len(keys)} keys, {len(locations)} locations, {len(sizes)} sizes")
    return Objects(list(keys), list(locations), list(sizes))


def _by_page(good: Sequence[bool], per_page: int) -> list[bool]:
    if per_page == 1:
        return list(good)
    return [all(good[i : i + per_page]) for i in range(0, len(good), per_page)]


def _leading(good: Sequence[bool]) -> int:
    """Count the good ones before the first that is not."""
    for count, one in enumerate(good):
        if not one:
            return count
    return len(good)

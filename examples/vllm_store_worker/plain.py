"""The same worker over the blocking binding, as vLLM has it today: the reference.

It is as vLLM does it, but for three things: its threads end when it is closed (there they wait for
ever), a request that has nothing to load is told as loaded (there it is never heard of again), and
keys and addresses are made by the same code as ours, which is quicker.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from aiomooncake import StoreConfig
from examples.vllm_store_worker.blocks import Array, Keys, Places, Stats, hit_tokens
from examples.vllm_store_worker.interface import (
    MooncakeStoreConnectorMetadata,
    ReqMeta,
    WorkerOptions,
)
from examples.vllm_store_worker.ledger import SaveLedger, Saving

__all__ = ["PlainStoreWorker"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_AVAILABLE_HANDLE = -200


class PlainStoreWorker:
    """A worker over ``mooncake.store``; see :class:`MooncakeStoreWorker` for what it does.

    Raises:
        RuntimeError: The store can't be set up.
    """

    def __init__(self, options: WorkerOptions, config: StoreConfig | None = None) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        if config is None:
            config = StoreConfig.from_env(dialect="vllm")
        self.options = options
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            config.local_hostname or _own_address(config.master_server_address),
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code != 0:
            raise RuntimeError(f"setup answered {code}")
        self._placement = ReplicateConfig()
        segment = options.preferred_segment or os.environ.get("MOONCAKE_PREFERRED_SEGMENT")
        if segment:
            self._placement.preferred_segment = segment
        self._keys = Keys(options)
        self._stats = Stats()
        self._ledger = SaveLedger()
        self._saves: queue.Queue[tuple[Saving, ReqMeta] | None] = queue.Queue()
        self._loads: queue.Queue[ReqMeta | None] = queue.Queue()
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Array]) -> None:
        """Register the layers of the cache, and start the threads."""
        self._places = Places(kv_caches, self.options.num_blocks)
        for region in self._places.regions:
            code = self.store.register_buffer(region.address, region.nbytes)
            if code != 0:
                log.error("register_buffer answered %d", code)
        for _ in range(self.options.load_recv_threads):
            self._start(self._loads, self._load)
        if self.options.saves:
            self._start(self._saves, self._save)

    def register_cross_layers_kv_caches(self, kv_cache: Array) -> None:
        """Register a cache in which a block has all its layers in one piece."""
        self.register_kv_caches({"__cross_layer__": kv_cache})

    def start_load_kv(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Do nothing."""

    def wait_for_save(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Do nothing."""

    def get_finished(
        self, finished_req_ids: AbstractSet[str], meta: MooncakeStoreConnectorMetadata
    ) -> tuple[set[str], set[str]]:
        """Begin what a step wants, and tell what has ended since the last one."""
        for request in meta.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self._loads.put(request)
        saved: set[str] = set()
        if self.options.saves:
            for request in meta.requests:
                if request.can_save:
                    self._saves.put((self._ledger.begin(request.req_id), request))
            saved = self._ledger.take_finished(finished_req_ids, meta.preempted_req_ids)
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return saved, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks could not be loaded since the last time."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> dict[str, list[dict[str, int | float | str]]] | None:
        """Return what was done since the last time."""
        return self._stats.take() or None

    def lookup(self, num_tokens: int, block_hashes: Sequence[bytes]) -> int:
        """Tell how many tokens of a request need not be computed."""
        size = self.options.block_size
        keys = self._keys.of_all_ranks(block_hashes[: num_tokens // size])
        if not keys:
            return 0
        try:
            codes = self._noted("lookup_exists", self.store.batch_is_exist, keys)
        except Exception:
            log.exception("a look-up failed")
            return 0
        return hit_tokens(self._keys.leading(codes), size, num_tokens)

    def reset(self) -> bool:
        """Remove everything from the store, when the saves that are queued have ended."""
        self._saves.join()
        self.store.remove_all(True)  # noqa: FBT003  # the binding's own argument: force
        return True

    def close(self) -> None:
        """Close the store; the whole process stands still meanwhile."""
        for _ in range(self.options.load_recv_threads):
            self._loads.put(None)
        self._saves.put(None)
        self.store.close()

    # ------------------------------------------------------------------ threads

    def _start(self, requests: queue.Queue[T | None], handle: Callable[[T], None]) -> None:
        def work() -> None:
            while (request := requests.get()) is not None:
                try:
                    handle(request)
                except Exception:
                    log.exception("a request failed")
                requests.task_done()

        threading.Thread(target=work, daemon=True).start()

    def _noted(
        self,
        operation: str,
        method: Callable[..., list[int]],
        keys: list[str],
        *args: Any,
        nbytes: int = 0,
    ) -> list[int]:
        began = time.perf_counter()
        failed: int | None = None
        try:
            codes = method(keys, *args)
            failed = sum(code < 0 for code in codes)
            return codes
        finally:
            seconds = time.perf_counter() - began
            self._stats.record(operation, seconds, len(keys), nbytes, failed)

    def _load(self, request: ReqMeta) -> None:
        blocks = self._keys.to_load(request)
        ids = [block.block_id for block in blocks]
        try:
            if blocks:
                codes = self._noted(
                    "load_get",
                    self.store.batch_get_into_multi_buffers,
                    [block.key for block in blocks],
                    self._places.of(ids),
                    [self._places.sizes] * len(ids),
                    nbytes=self._places.nbytes * len(ids),
                )
                failed = {number for number, code in zip(ids, codes, strict=True) if code < 0}
                if failed:
                    log.warning("%d of %d keys could not be loaded", len(failed), len(ids))
                    with self._lock:
                        self._failed_blocks |= failed
        except Exception:
            log.exception("a load failed")
            with self._lock:
                self._failed_blocks.update(ids)
        with self._lock:
            self._loaded.add(request.req_id)

    def _save(self, job: tuple[Saving, ReqMeta]) -> None:
        saving, request = job
        try:
            if not saving.gone and not self._ledger.must_wait(saving):
                self._save_blocks(saving, request)
        finally:
            self._ledger.end(saving)

    def _save_blocks(self, saving: Saving, request: ReqMeta) -> None:
        blocks = self._keys.to_save(request, saving.saved_tokens)
        if blocks:
            keys = [block.key for block in blocks]
            there = self._noted("save_exists", self.store.batch_is_exist, keys)
            blocks = [block for block, code in zip(blocks, there, strict=True) if code != 1]
        if not blocks:
            saving.saved_tokens = request.token_len_chunk
            return
        codes = self._noted(
            "save_put",
            self.store.batch_put_from_multi_buffers,
            [block.key for block in blocks],
            self._places.of([block.block_id for block in blocks]),
            [self._places.sizes] * len(blocks),
            self._placement,
            nbytes=self._places.nbytes * len(blocks),
        )
        if min(codes) >= 0:
            saving.saved_tokens = request.token_len_chunk
            if self._ledger.note_room():
                log.info("the store has room again")
            return
        log.warning("a save of %d keys failed: %s", len(codes), {c for c in codes if c < 0})
        if _NO_AVAILABLE_HANDLE in codes and self._ledger.note_full(saving):
            log.warning("no room for request %s, it is not saved further", saving.req_id)

    def __repr__(self) -> str:
        return f"<PlainStoreWorker on {self.store!r}>"


def _own_address(master: str) -> str:
    """Find the address of this host on the way to the master."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])

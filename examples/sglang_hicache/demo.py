"""Two ranks share a cache: what one server wrote, another one finds after a restart.

Run it in the checkout: ``python -m examples.sglang_hicache.demo``. It starts a private master, and
the memory of the ranks is mounted only when each has failed to warm up once, as it happens when a
serving engine starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from aiomooncake import LocalCluster, connect
from examples.sglang_hicache.backend import MooncakeStore
from examples.sglang_hicache.controller import Controller
from examples.sglang_hicache.interface import HiCacheStorageConfig
from examples.sglang_hicache.pool import MHAHostPool

__all__ = ["main"]

log = logging.getLogger("demo")

_RANKS = 2
_PAGES = 96


class FirstTries(logging.Handler):
    """Tells when every rank has failed once, so that the memory comes late on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.all_failed = threading.Event()
        self._left = _RANKS

    def emit(self, record: logging.LogRecord) -> None:
        """Count the ranks' first tries."""
        if "failed (attempt 1)" in record.getMessage():
            self._left -= 1
            if not self._left:
                self.all_failed.set()


def main() -> None:
    """Write the pages of a prompt, start anew, and read them."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tries = FirstTries()
    logging.getLogger("aiomooncake").addHandler(tries)
    with LocalCluster() as cluster:
        lending = (cluster.address, tries.all_failed)
        threading.Thread(target=_lend_memory_late, args=lending, daemon=True).start()
        for life in ("first", "second"):
            log.info("--- the %s life of the server", life)
            with ThreadPoolExecutor(_RANKS) as ranks:
                list(ranks.map(lambda rank: _serve(cluster.address, rank), range(_RANKS)))


def _serve(address: str, rank: int) -> None:
    """Do what a scheduler process does with a prompt: look for its pages, else make them."""
    extra = {
        "master_server_address": address,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": 0,
        "enable_group_semantics": True,
    }
    backend = MooncakeStore(
        HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=_RANKS,
            model_name="demo",
            enable_storage_metrics=True,
            extra_config=extra,
        )
    )
    pool = MHAHostPool(_PAGES)
    backend.register_mem_pool_host(pool)
    pages, indices = _hashes(_PAGES), pool.indices(range(_PAGES))
    computed = np.arange(pool.kv_buffer.size, dtype=np.uint16).reshape(pool.kv_buffer.shape) + rank
    with Controller(backend) as controller:
        found = controller.prefetch(pages, indices).result()
        if found == _PAGES:
            right = np.array_equal(pool.kv_buffer.view(np.uint16), computed)
            log.info("[TP%d] read %d pages, all of them right: %s", rank, found, right)
        else:
            pool.kv_buffer.view(np.uint16)[:] = computed
            written = controller.write_storage(pages, indices).result()
            log.info("[TP%d] found %d pages, wrote %d", rank, found, written)
    stats = backend.get_stats()
    speeds = stats.prefetch_bandwidth + stats.backup_bandwidth
    log.info("[TP%d] %s GB/s", rank, ", ".join(f"{speed:.2f}" for speed in speeds))
    backend.close()


def _hashes(count: int) -> list[str]:
    """Name the pages of a prompt, each by all that comes before it."""
    names, last = [], b""
    for number in range(count):
        last = hashlib.sha256(last + number.to_bytes(4, "little")).digest()
        names.append(last.hex())
    return names


def _lend_memory_late(address: str, late: threading.Event) -> None:
    async def lend() -> None:
        async with connect(address, local_hostname="127.0.0.1", global_segment_size=0) as store:
            await store.engine.allocate_and_mount_segment(256 << 20)
            await asyncio.Event().wait()

    late.wait()
    asyncio.run(lend())


if __name__ == "__main__":
    began = time.monotonic()
    main()
    log.info("done after %.1f s", time.monotonic() - began)

"""The threads of SGLang's cache controller that call a storage backend, and nothing else of it.

One asks how much of a prefix is there, one reads those pages, one writes pages; the scheduler's
thread hands them operations and looks for what became of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from examples.sglang_hicache.interface import STORAGE_BATCH_SIZE, HiCacheStorageExtraInfo
from examples.sglang_hicache.pages import PageStorage

__all__ = ["Controller"]

log = logging.getLogger(__name__)

_JOIN = 10.0  # seconds

Queue = SimpleQueue["Operation | None"]


class Operation:
    """Pages that are read or written: their hashes, where they go, and how many are done."""

    def __init__(self, hashes: Sequence[str], indices: Any) -> None:
        self.hashes = list(hashes)
        self.indices = indices
        self.done: Future[int] = Future()


class Controller:
    """Moves pages between host memory and a backend, in threads of its own; use it with ``with``.

    Args:
        backend: The backend; the pool of keys and values is registered with it.
    """

    def __init__(self, backend: PageStorage) -> None:
        self._backend = backend
        self._page_size = backend.mem_pool_host.page_size
        self._prefetches: Queue = SimpleQueue()
        self._reads: Queue = SimpleQueue()
        self._backups: Queue = SimpleQueue()
        self._threads = [
            self._start("prefetch", self._prefetches, self._query),
            self._start("prefetch-io", self._reads, self._read),
            self._start("backup", self._backups, self._write),
        ]

    def prefetch(self, hashes: Sequence[str], indices: Any) -> Future[int]:
        """Read the pages of a prefix that are there: how many came, from the first one on."""
        return self._hand(self._prefetches, hashes, indices)

    def write_storage(self, hashes: Sequence[str], indices: Any) -> Future[int]:
        """Write pages: how many are there now, from the first batch on."""
        return self._hand(self._backups, hashes, indices)

    def close(self) -> None:
        """End the threads when they have done what they were told to.

        Raises:
            RuntimeError: A thread is stuck.
        """
        for queue in (self._prefetches, self._reads, self._backups):
            queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise RuntimeError(f"these threads did not end within {_JOIN:g} s: {stuck}")

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, name: str, queue: Queue, work: Callable[[Operation], None]
    ) -> threading.Thread:
        def run() -> None:
            while (operation := queue.get()) is not None:
                try:
                    work(operation)
                except BaseException as exc:
                    # SGLang's thread ends so, and nobody starts it again.
                    operation.done.set_exception(exc)
                    raise

        thread = threading.Thread(target=run, name=f"hicache-{name}", daemon=True)
        thread.start()
        return thread

    def _hand(self, queue: Queue, hashes: Sequence[str], indices: Any) -> Future[int]:
        operation = Operation(hashes, indices)
        queue.put(operation)
        return operation.done

    def _query(self, operation: Operation) -> None:
        hits = 0
        for start in range(0, len(operation.hashes), STORAGE_BATCH_SIZE):
            batch = operation.hashes[start : start + STORAGE_BATCH_SIZE]
            found = self._backend.batch_exists(batch, HiCacheStorageExtraInfo())
            hits += found
            if found < len(batch):
                break
        operation.hashes = operation.hashes[:hits]
        if hits:
            self._reads.put(operation)
        else:
            operation.done.set_result(0)

    def _read(self, operation: Operation) -> None:
        operation.done.set_result(self._move(operation, self._backend.batch_get_v1, whole=False))

    def _write(self, operation: Operation) -> None:
        operation.done.set_result(self._move(operation, self._backend.batch_set_v1, whole=True))

    def _move(self, operation: Operation, move: Callable[..., list[bool]], *, whole: bool) -> int:
        """Move batch after batch, up to the first page (or the first whole batch) that fails."""
        done = 0
        for start in range(0, len(operation.hashes), STORAGE_BATCH_SIZE):
            batch = operation.hashes[start : start + STORAGE_BATCH_SIZE]
            end = start + len(batch)
            indices = operation.indices[start * self._page_size : end * self._page_size]
            moved = move(batch, indices, HiCacheStorageExtraInfo())
            good = moved.index(False) if False in moved else len(moved)
            if whole and good < len(batch):
                log.warning("%d pages were not written", len(batch))
                break
            done += good
            if good < len(batch):
                break
        return done

"""The calls of the engine that a worker makes, each on the thread that wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from aiomooncake import ReplicateConfig, Store
from examples.vllm_store_worker.blocks import Block, Places, Stats

__all__ = ["Calls"]

# What one call moves, so that it is short, and so is the wait for it.
_PIECES = 1024
_BYTES = 16 << 20


class Calls:
    """Makes calls of the engine with its codes, one per key, and notes what came of them.

    Args:
        store: The store; every call goes through its gate, and none runs on an event loop.
        segment: Where saved blocks go if there is room (``host:port``); empty = anywhere.
        stats: Where the calls are noted.

    Attributes:
        at_once: Blocks of a call that moves some.
    """

    def __init__(self, store: Store, segment: str, stats: Stats) -> None:
        blocking = store.blocking
        self._is_exist = blocking.batch_is_exist
        self._put_from = blocking.batch_put_from_multi_buffers
        self._get_into = blocking.batch_get_into_multi_buffers
        self._remove = blocking.batch_remove
        self._options = (ReplicateConfig(preferred_segment=segment),) if segment else ()
        self._stats = stats
        self._places: Places | None = None
        self.at_once = 1

    def lay_out(self, places: Places) -> None:
        """Learn where blocks lie."""
        self._places = places
        self.at_once = max(1, min(_PIECES // len(places.sizes), _BYTES // places.nbytes))

    def exist(self, operation: str, keys: list[str]) -> list[int]:
        """Ask which keys are there: 1 or 0, or what went wrong."""
        return self._noted(operation, self._is_exist, keys)

    def read(self, blocks: Sequence[Block]) -> list[int]:
        """Read blocks into the cache: their bytes, or what went wrong."""
        return self._move("load_get", self._get_into, blocks)

    def write(self, blocks: Sequence[Block]) -> list[int]:
        """Store blocks of the cache: 0, or what went wrong."""
        return self._move("save_put", self._put_from, blocks, *self._options)

    def remove(self, keys: list[str]) -> None:
        """Remove keys, whoever is reading them."""
        self._remove(keys, True)  # noqa: FBT003  # the binding's own argument: force

    def _move(
        self,
        operation: str,
        method: Callable[..., list[int]],
        blocks: Sequence[Block],
        *options: object,
    ) -> list[int]:
        places = self._places
        if places is None:
            raise RuntimeError("register_kv_caches must come before anything is moved")
        return self._noted(
            operation,
            method,
            [block.key for block in blocks],
            places.of([block.block_id for block in blocks]),
            [places.sizes] * len(blocks),
            *options,
            nbytes=places.nbytes * len(blocks),
        )

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
            if len(codes) != len(keys):
                raise RuntimeError(f"the engine answered {len(codes)} codes for {len(keys)} keys")
            failed = sum(code < 0 for code in codes) if min(codes) < 0 else 0
            return codes
        finally:
            seconds = time.perf_counter() - began
            self._stats.record(operation, seconds, len(keys), nbytes, failed)

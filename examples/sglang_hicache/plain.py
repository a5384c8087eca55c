"""The same backend over the blocking binding, as SGLang has it today: the reference.

Set-up, warm-up, calls and their order are SGLang's; only its assertions raise a ``RuntimeError``.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from examples.sglang_hicache.backend import store_config
from examples.sglang_hicache.interface import HiCacheStorageConfig
from examples.sglang_hicache.pages import THERE, Objects, PageStorage

__all__ = ["PlainMooncakeStore"]

log = logging.getLogger(__name__)

_TRIES = 10
_PAUSE = 1.0  # seconds


class PlainMooncakeStore(PageStorage):
    """A storage backend over ``mooncake.store``.

    Args:
        storage_config: Where this rank stands, and the operator's settings.
        mem_pool: Not looked at.

    Raises:
        RuntimeError: The store can't be set up, or does not store.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig | None = None,
        mem_pool: Any = None,
    ) -> None:
        super().__init__(storage_config)
        self.store = self._set_up()
        self._warm_up()

    def _set_up(self) -> Any:
        from mooncake.store import MooncakeDistributedStore

        config = store_config(self.storage_config)
        store = MooncakeDistributedStore()
        code = store.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code:
            raise RuntimeError(f"the set-up of the store answered {code}")
        return store

    def _warm_up(self) -> None:
        key, value = f"warmup{uuid.uuid4().hex}", bytes(4096)
        rank = self.storage_config.tp_rank
        for number in range(1, _TRIES + 1):
            code = self.store.put(key, value)
            if code == 0:
                break
            log.warning("[TP%d] warm-up put answered %d (try %d)", rank, code, number)
            time.sleep(_PAUSE)
        else:
            raise RuntimeError(f"[TP{rank}] the warm-up failed {_TRIES} times")
        if self.store.is_exist(key) != 1 or self.store.get(key) != value:
            raise RuntimeError(f"[TP{rank}] the warm-up's value does not come back")

    def _register(self, memory: Any) -> None:
        code = self.store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise RuntimeError(f"registering memory answered {code}")

    def _exist(self, keys: list[str]) -> Sequence[int]:
        codes: Sequence[int] = self.store.batch_is_exist(keys)
        return codes

    def _write(self, objects: Objects) -> Sequence[int]:
        codes = [THERE if code == 1 else -1 for code in self._exist(objects.keys)]
        new = [i for i, code in enumerate(codes) if code != THERE]
        if new:
            for i, code in zip(new, self._put(objects.some(new)), strict=True):
                codes[i] = code
        return codes

    def _put(self, objects: Objects) -> Sequence[int]:
        from mooncake.store import ReplicateConfig

        what: tuple[Any, ...] = (objects.keys, objects.places, objects.sizes)
        if objects.groups is not None:
            config = ReplicateConfig()
            config.group_ids = objects.groups
            what = (*what, config)
        put = self.store.batch_put_from
        if objects.in_pieces:
            put = self.store.batch_put_from_multi_buffers
        codes: Sequence[int] = put(*what)
        return codes

    def _read(self, objects: Objects) -> Sequence[int]:
        get = self.store.batch_get_into
        if objects.in_pieces:
            get = self.store.batch_get_into_multi_buffers
        codes: Sequence[int] = get(objects.keys, objects.places, objects.sizes)
        return codes

    def clear(self) -> None:
        """Remove everything from the cluster, but what was read a moment ago."""
        self.store.remove_all()

    def close(self) -> None:
        """Do nothing: the store is closed when it is freed."""

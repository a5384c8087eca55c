"""The same connector over the blocking binding, as LMCache has it today: the reference.

It is as LMCache does it, but for three things: a key that is given twice is stored and read once
(the engine stores and answers wrong data otherwise), ``get`` reads one chunk (there it raises), and
``exists`` compares the code (there a failure, which is not 0, counts as yes).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from examples.lmcache_connector.connector import store_config
from examples.lmcache_connector.interface import (
    HEADER_BYTES,
    CacheEngineKey,
    ChunkLayout,
    EngineConfig,
    RemoteConnector,
    RemoteMetadata,
    drop,
)
from examples.lmcache_connector.memory import BytesObj, MemoryObj, Pool

__all__ = ["PlainConnector"]

log = logging.getLogger(__name__)


class PlainConnector(RemoteConnector):
    """A connector over ``mooncake.store``: calls that move bytes go through a thread each.

    Args:
        config: LMCache's configuration.
        layout: The shape of a full chunk.
        loop: The loop that runs the ``async`` methods.
        pool: Where the chunks are.

    Raises:
        RuntimeError: The store can't be set up.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        super().__init__(config, layout, pool)
        del loop  # unlike ours it needs none
        settings = store_config(config)
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.global_segment_size,
            settings.local_buffer_size,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
        )
        if code != 0:
            raise RuntimeError(f"setup answered {code}")
        self._placement = ReplicateConfig()
        self._placement.replica_num = 1
        if config.setting("prefer_local_alloc", default=False):
            self._placement.preferred_segment = self.store.get_hostname()
        self._address = int(pool.memory.ctypes.data)
        self.store.register_buffer(self._address, pool.memory.nbytes)

    async def exists(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there; the loop stands still meanwhile."""
        return self.exists_sync(key)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there, on this thread."""
        return bool(self.store.is_exist(key.to_string()) == 1)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False
    ) -> int:
        """Ask for one after the other; the loop stands still meanwhile."""
        del lookup_id, pin
        count = 0
        for key in keys:
            if not self.exists_sync(key):
                break
            count += 1
        return count

    # ------------------------------------------------------------------ store

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj | BytesObj) -> None:
        """Store a chunk. After a timeout the thread goes on, with memory that may be freed."""
        name = key.to_string()
        if self.save_chunk_meta:
            header = RemoteMetadata.of(memory_obj).serialize()
            call = partial(self.store.put_parts, name, header, memory_obj.byte_array)
        else:
            address, size = _tensor(memory_obj)
            call = partial(self.store.put_from, name, address, size, self._placement)
        await self._in_time(call)

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj | BytesObj]
    ) -> None:
        """Store many chunks: by one call, or with headers one after the other."""
        if self.save_chunk_meta:
            for key, obj in zip(keys, memory_objs, strict=True):
                await self.put(key, obj)
            return
        places: dict[str, tuple[int, int]] = {}
        for key, obj in zip(keys, memory_objs, strict=True):
            places.setdefault(key.to_string(), _tensor(obj))
        await self._in_time(
            partial(
                self.store.batch_put_from,
                list(places),
                [address for address, _ in places.values()],
                [size for _, size in places.values()],
                self._placement,
            )
        )

    async def _in_time(self, call: Callable[[], object]) -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(call), self.put_timeout)
        except asyncio.TimeoutError:
            log.warning("a put took longer than %g s", self.put_timeout)

    # ------------------------------------------------------------------ read

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Read a chunk."""
        (obj,) = await self.batched_get([key])
        return obj

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read many chunks by one call."""
        names = list(dict.fromkeys(key.to_string() for key in keys))
        read = self._read_with_headers if self.save_chunk_meta else self._read_into
        found = dict(zip(names, await read(names), strict=True))
        given: set[str] = set()
        objs: list[MemoryObj | None] = []
        for key in keys:
            name = key.to_string()
            obj = found[name]
            if obj is not None and name in given:
                obj.ref_count_up()
            given.add(name)
            objs.append(obj)
        return objs

    async def _read_into(self, names: list[str]) -> list[MemoryObj | None]:
        """Read straight into objects. Cancelled, it leaks them."""
        objs = [self.allocate() for _ in names]
        room = {name: obj for name, obj in zip(names, objs, strict=True) if obj is not None}
        try:
            codes = await asyncio.to_thread(
                self.store.batch_get_into,
                list(room),
                [obj.data_ptr for obj in room.values()],
                [obj.nbytes for obj in room.values()],
            )
        except Exception:
            log.exception("batch_get_into failed")
            drop(objs)
            return [None] * len(names)
        found: dict[str, MemoryObj] = {}
        for (name, obj), code in zip(room.items(), codes, strict=True):
            try:
                if code <= 0:
                    raise ValueError(f"code {code}")
                obj.reshape(self.layout.partial(code), obj.dtype, obj.fmt)
                found[name] = obj
            except ValueError as exc:
                log.warning("%s could not be read: %s", name, exc)
                obj.ref_count_down()
        return [found.get(name) for name in names]

    async def _read_with_headers(self, names: list[str]) -> list[MemoryObj | None]:
        """Read into the engine's buffer, and copy from there on the loop."""
        try:
            handles = await asyncio.to_thread(self.store.batch_get_buffer, names)
        except Exception:
            log.exception("batch_get_buffer failed")
            return [None] * len(names)
        return [self._copy(name, handle) for name, handle in zip(names, handles, strict=True)]

    def _copy(self, name: str, handle: Any) -> MemoryObj | None:
        if handle is None:
            log.warning("%s could not be read", name)
            return None
        obj = self.allocate()
        if obj is None:
            return None
        value = memoryview(handle)
        try:
            header = RemoteMetadata.deserialize(value[:HEADER_BYTES])
            header.describe(obj, len(value))
        except ValueError as exc:
            log.warning("%s could not be read: %s", name, exc)
            obj.ref_count_down()
            return None
        obj.raw[:] = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        return obj

    async def close(self) -> None:
        """Close the store; the whole process stands still meanwhile."""
        self.store.unregister_buffer(self._address)
        self.store.close()

    def __repr__(self) -> str:
        return f"<PlainConnector on {self.store!r}>"


def _tensor(obj: MemoryObj | BytesObj) -> tuple[int, int]:
    if isinstance(obj, BytesObj):
        raise TypeError("without save_chunk_meta only full tensors of the pool can be stored")
    return obj.data_ptr, obj.nbytes

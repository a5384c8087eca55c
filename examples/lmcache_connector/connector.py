"""LMCache's remote connector for Mooncake, on aiomooncake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio

from aiomooncake import MooncakeError, ReplicateConfig, StoreConfig, connect
from aiomooncake.buffers import Buffer, Slice
from aiomooncake.errors import error_from_code
from examples.lmcache_connector.interface import (
    HEADER_BYTES,
    CacheEngineKey,
    ChunkLayout,
    EngineConfig,
    RemoteConnector,
    RemoteMetadata,
    prefix,
)
from examples.lmcache_connector.memory import BytesObj, MemoryObj, Pool

__all__ = ["MooncakeConnector", "store_config"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0
"""Seconds; the master may start later than its clients."""

CLOSE_TIMEOUT = 10.0
"""Seconds; beside calls that are stuck longer the store closes in the background."""


class MooncakeConnector(RemoteConnector):
    """A connector whose calls travel together, without a copy and without stopping the loop.

    Made on any thread but the loop's own. Every call of the engine on an object's memory holds a
    reference to it, which goes back when the engine has let go of the memory: a caller that is
    cancelled, or that waits no longer, frees nothing that the engine still reads or writes.

    Args:
        config: LMCache's configuration.
        layout: The shape of a full chunk.
        loop: The loop that runs the ``async`` methods, in a thread of its own.
        pool: Where the chunks are; it is registered as a whole.

    Raises:
        MooncakeError: The store can't be opened.
        RuntimeError: This is the loop's own thread, which would wait for itself.
    """

    _memory: Buffer

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
    ) -> None:
        super().__init__(config, layout, pool)
        if _runs_here(loop):
            raise RuntimeError("make the connector on another thread: here it waits for itself")
        opening = asyncio.run_coroutine_threadsafe(self._open(store_config(config)), loop)
        try:
            opening.result()
        finally:
            opening.cancel()  # if this thread was interrupted

    async def _open(self, config: StoreConfig) -> None:
        self.store = await connect(config, timeout=CONNECT_TIMEOUT)
        try:
            self._memory = await self.store.register(self.pool.memory)
        except BaseException:
            await self.store.aclose(CLOSE_TIMEOUT)
            raise
        self._is_exist = self.store.blocking.is_exist
        self._placement: ReplicateConfig | None = None
        if self.config.setting("prefer_local_alloc", default=False):
            self._placement = ReplicateConfig(preferred_segments=(self.store.hostname,))

    # ------------------------------------------------------------------ is it there?

    async def exists(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there; a failure is an error, neither yes nor no."""
        return await self.store.exists(key.to_string())

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there, on this thread, whatever the loop is doing."""
        name = key.to_string()
        return _is_there(name, self._is_exist(name))

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False
    ) -> int:
        """Tell how many chunks are there from the first one on, in one call of the engine."""
        del lookup_id, pin
        return prefix(await self.store.exists_many(key.to_string() for key in keys))

    def support_batched_contains(self) -> bool:
        """Tell that :meth:`batched_contains` works."""
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Do the same on this thread, whatever the loop is doing."""
        names = [key.to_string() for key in keys]
        codes = self.store.blocking.batch_is_exist(names)
        return prefix(map(_is_there, names, codes))

    # ------------------------------------------------------------------ store

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj | BytesObj) -> None:
        """Store a chunk; calls that wait together travel together."""
        name = key.to_string()
        if isinstance(memory_obj, BytesObj):
            storing = self._put_bytes(name, memory_obj)
        else:
            storing = self._put(name, memory_obj)
        await self._in_time(storing, name)

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj | BytesObj]
    ) -> None:
        """Store many chunks, each as :meth:`put` does.

        Raises:
            BatchError: Some could not be stored; it names them.
        """
        objs: dict[str, MemoryObj | BytesObj] = {}
        for key, obj in zip(keys, memory_objs, strict=True):
            objs.setdefault(key.to_string(), obj)  # the engine too keeps the first one
        await self._in_time(self._put_all(objs), f"{len(objs)} chunks")

    async def _put(self, name: str, obj: MemoryObj) -> None:
        part = self._part(obj)
        await self.store.put_from(name, part, config=self._placement, on_release=self._lend([obj]))

    async def _put_bytes(self, name: str, obj: BytesObj) -> None:
        if not self.save_chunk_meta:
            raise TypeError("without save_chunk_meta only full tensors of the pool can be stored")
        header = RemoteMetadata.of(obj).serialize()
        await self.store.put_parts(name, header, obj.byte_array, config=self._placement)

    async def _put_all(self, objs: dict[str, MemoryObj | BytesObj]) -> None:
        tensors = {name: obj for name, obj in objs.items() if isinstance(obj, MemoryObj)}
        parts = {name: self._part(obj) for name, obj in tensors.items()}
        await self.store.put_many_from(
            parts, config=self._placement, on_release=self._lend(list(tensors.values()))
        )
        packed = {name: obj for name, obj in objs.items() if isinstance(obj, BytesObj)}
        if packed:
            await asyncio.gather(*(self._put_bytes(name, obj) for name, obj in packed.items()))

    async def _in_time(self, storing: Coroutine[Any, Any, None], what: str) -> None:
        with anyio.move_on_after(self.put_timeout) as scope:
            await storing
        if scope.cancelled_caught:
            log.warning(
                "storing %s takes longer than %g s: nobody waits for it any more, and who needs "
                "it may have to compute it again",
                what,
                self.put_timeout,
            )

    # ------------------------------------------------------------------ read

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Read a chunk; calls that wait together travel together.

        Raises:
            MooncakeError: It could not be read.
            ValueError: The value is no chunk.
        """
        name = key.to_string()
        obj = self.allocate()
        if obj is None:
            log.warning("no room in the pool to read %s", name)
            return None
        try:
            part = self._part(obj)
            nbytes = await self.store.get_into(name, part, on_release=self._lend([obj]))
            if nbytes is not None:
                self._describe(obj, nbytes)
                return obj
        except BaseException:
            obj.ref_count_down()
            raise
        obj.ref_count_down()
        return None

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read many chunks, as one; an object that is asked for twice comes twice.

        What could not be read is logged, and answered as if it were not there: LMCache's
        interface has no other answer for one key of many.
        """
        names = [key.to_string() for key in keys]
        found = await self._get_all(dict.fromkeys(names))
        given: set[str] = set()
        for name in names:
            obj = found.get(name)
            if obj is not None and name in given:
                obj.ref_count_up()
            given.add(name)
        return [found.get(name) for name in names]

    async def _get_all(self, names: Collection[str]) -> dict[str, MemoryObj]:
        layout = self.layout
        objs = self.pool.batched_allocate(layout.shape, layout.dtype, layout.fmt, len(names))
        if len(objs) < len(names):
            log.warning("the pool has room for %d of %d chunks", len(objs), len(names))
        room = dict(zip(names, objs, strict=False))
        try:
            answers = await self.store.get_many_into(
                {name: self._part(obj) for name, obj in room.items()},
                return_exceptions=True,
                on_release=self._lend(objs),
            )
        except BaseException:
            self.pool.ref_count_down(objs)
            raise
        found: dict[str, MemoryObj] = {}
        for (name, obj), answer in zip(room.items(), answers, strict=True):
            try:
                if isinstance(answer, MooncakeError):
                    raise answer
                if answer is not None:
                    self._describe(obj, answer)
                    found[name] = obj
                    continue
            except (MooncakeError, ValueError) as exc:
                log.warning("%s could not be read: %s", name, exc)
            obj.ref_count_down()
        return found

    # ------------------------------------------------------------------ memory

    def _part(self, obj: MemoryObj) -> Slice:
        """Name an object's memory to the store, with its header in front where there is one."""
        start = obj.start
        if self.save_chunk_meta:
            start -= HEADER_BYTES
            obj.headroom(HEADER_BYTES)[:] = RemoteMetadata.of(obj).serialize()
        return self._memory[start : obj.start + obj.nbytes]

    def _describe(self, obj: MemoryObj, nbytes: int) -> None:
        """Give an object that was read its shape.

        Raises:
            ValueError: The value is no chunk.
        """
        if self.save_chunk_meta:
            RemoteMetadata.deserialize(obj.headroom(HEADER_BYTES)).describe(obj, nbytes)
        elif nbytes != obj.nbytes:
            obj.reshape(self.layout.partial(nbytes), obj.dtype, obj.fmt)

    def _lend(self, objs: Sequence[MemoryObj]) -> Callable[[], None]:
        """Take a reference to each object for the engine; what gives them back, on release."""
        self.pool.ref_count_up(objs)
        return partial(self.pool.ref_count_down, objs)

    async def close(self) -> None:
        """Close the store; the pool stays where it is until the engine has let go of it."""
        await self.store.aclose(CLOSE_TIMEOUT)

    def __repr__(self) -> str:
        return f"<MooncakeConnector on {self.store!r}>"


def store_config(config: EngineConfig) -> StoreConfig:
    """Read the store's settings from LMCache's configuration, with LMCache's defaults.

    Raises:
        ConfigError: Something is missing or wrong; keys of other plug-ins are let be.
    """
    given = {"remote_url": config.remote_url, "extra_config": config.extra_config}
    return StoreConfig.from_mapping(given, dialect="lmcache")


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _is_there(name: str, code: int) -> bool:
    if code < 0:
        raise error_from_code(code, "exists", key=name)
    return code == 1

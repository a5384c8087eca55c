"""The threads that drive a connector: LMCache's remote backend, and the thread of its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from examples.lmcache_connector.interface import (
    CacheEngineKey,
    ChunkLayout,
    EngineConfig,
    RemoteConnector,
    drop,
)
from examples.lmcache_connector.memory import BytesObj, MemoryObj, Pool

__all__ = ["ConnectorFactory", "LoopThread", "RemoteBackend"]

log = logging.getLogger(__name__)

ConnectorFactory = Callable[
    [EngineConfig, ChunkLayout, asyncio.AbstractEventLoop, Pool], RemoteConnector
]

_Found = list[MemoryObj | None]


class LoopThread:
    """An event loop in a thread of its own, as LMCache's storage manager has one.

    Args:
        new_loop: Makes the loop: asyncio's or uvloop's.
    """

    def __init__(
        self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name="lmcache-loop")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def close(self) -> None:
        """Stop the loop when what it does at the moment is done."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def __repr__(self) -> str:
        return f"<LoopThread {self.loop!r}>"


class RemoteBackend:
    """What the threads of an engine call; those that move chunks wait for the loop.

    Args:
        config: LMCache's configuration.
        layout: The shape of a full chunk.
        loop: The loop, which runs in another thread.
        pool: Where the chunks are.
        connector: The connector's class.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        connector: ConnectorFactory,
    ) -> None:
        self.config = config
        self.loop = loop
        self.put_failures = 0
        self.get_failures = 0
        self._lock = threading.Lock()
        self._put_tasks: set[CacheEngineKey] = set()
        self.connection = connector(config, layout, loop, pool)

    # ------------------------------------------------------------------ is it there?

    def contains(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there; False too when nobody knows."""
        try:
            if self.config.extra_config.get("use_exists_sync", False):
                return self.connection.exists_sync(key)
            asked = asyncio.run_coroutine_threadsafe(self.connection.exists(key), self.loop)
            return asked.result(self.config.blocking_timeout_secs)
        except Exception as exc:  # noqa: BLE001  # the engine computes what it does not get
            log.warning("it is not known whether %s is there: %s", key, _text(exc))
            return False

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Tell how many chunks are there, from the first one on without a gap."""
        if not self.connection.support_batched_contains():
            count = 0
            while count < len(keys) and self.contains(keys[count]):
                count += 1
            return count
        try:
            return self.connection.batched_contains(keys)
        except Exception as exc:  # noqa: BLE001  # as above
            log.warning("it is not known how many chunks are there: %s", _text(exc))
            return 0

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey]) -> int:
        """Do the same on the loop."""
        try:
            return await asyncio.wait_for(
                self.connection.batched_async_contains(lookup_id, keys),
                self.config.blocking_timeout_secs,
            )
        except Exception as exc:  # noqa: BLE001  # as above
            log.warning("it is not known how many chunks are there: %s", _text(exc))
            return 0

    # ------------------------------------------------------------------ store

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is being stored."""
        with self._lock:
            return key in self._put_tasks

    def submit_put_task(
        self, key: CacheEngineKey, memory_obj: MemoryObj | BytesObj
    ) -> Future[None]:
        """Begin to store a chunk, unless that has begun already."""
        with self._lock:
            if key in self._put_tasks:
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            self._put_tasks.add(key)
        return self._submit(self.connection.put(key, memory_obj), [key], [memory_obj])

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj | BytesObj]
    ) -> Future[None]:
        """Begin to store many chunks."""
        return self._submit(self.connection.batched_put(keys, memory_objs), keys, memory_objs)

    def _submit(
        self,
        storing: Coroutine[Any, Any, None],
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj | BytesObj],
    ) -> Future[None]:
        for obj in objs:
            obj.ref_count_up()
        future = asyncio.run_coroutine_threadsafe(storing, self.loop)
        future.add_done_callback(partial(self._stored, tuple(keys), tuple(objs)))
        return future

    def _stored(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj | BytesObj],
        future: Future[None],
    ) -> None:
        with self._lock:
            self._put_tasks.difference_update(keys)
        for obj in objs:
            obj.ref_count_down()
        if not future.cancelled() and future.exception() is not None:
            self.put_failures += 1
            log.warning("%d chunks could not be stored: %s", len(keys), future.exception())

    # ------------------------------------------------------------------ read

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Wait for a chunk; None when it is not there, or does not come in time."""

        async def get() -> _Found:
            return [await self.connection.get(key)]

        return self._wait(get(), 1)[0]

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Wait for many chunks; likewise."""
        return self._wait(self.connection.batched_get(keys), len(keys))

    def _wait(self, reading: Coroutine[Any, Any, _Found], count: int) -> _Found:
        """Wait for objects; those that come when nobody waits any more are given back."""
        answer: Future[_Found] = Future()

        async def deliver() -> None:
            try:
                found = await reading
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except BaseException as exc:  # noqa: BLE001  # the thread that waits gets it
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(exc)
                return
            if answer.set_running_or_notify_cancel():
                answer.set_result(found)
            else:
                drop(found)

        task = asyncio.run_coroutine_threadsafe(deliver(), self.loop)
        try:
            try:
                return answer.result(self.config.blocking_timeout_secs)
            except concurrent.futures.TimeoutError:
                if answer.cancel():
                    task.cancel()
                    raise
                return answer.result()  # it came at the last moment, or failed by itself
        except Exception as exc:  # noqa: BLE001  # the engine computes what it does not get
            self.get_failures += 1
            log.warning("%d chunks could not be read: %s", count, _text(exc))
            return [None] * count

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[CacheEngineKey]
    ) -> list[MemoryObj]:
        """Read many chunks on the loop; those from the first one on without a gap."""
        try:
            return await asyncio.wait_for(
                self.connection.batched_get_non_blocking(lookup_id, keys),
                self.config.blocking_timeout_secs,
            )
        except Exception as exc:  # noqa: BLE001  # as above
            log.warning("%d chunks could not be read: %s", len(keys), _text(exc))
            return []

    def close(self) -> None:
        """Close the connector; wait for that."""
        asyncio.run_coroutine_threadsafe(self.connection.close(), self.loop).result()

    def __repr__(self) -> str:
        return f"<RemoteBackend {self.connection!r}>"


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__

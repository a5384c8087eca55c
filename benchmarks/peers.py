"""The ways to use Mooncake from asyncio that are compared, one small adapter each."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import anyio
import anyio.to_thread

__all__ = ["OURS", "PEERS", "WRAPPER", "Operation", "Peer", "native_store"]

_HOST = "127.0.0.1"
_THREADS = 8

Operation = Callable[[Any], Awaitable[None]]
"""One call with one item: a key, a ``(key, value)``, or a list of these. It checks the answer."""


class Peer(ABC):
    """A client of one master; opened once, driven by verb.

    Every adapter checks its answers (a value that is not empty, a code that is 0): a peer that
    fails fast must not look fast.
    """

    name: ClassVar[str]
    in_words: ClassVar[str]

    @abstractmethod
    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Connect to a master; sizes in bytes."""

    @abstractmethod
    async def close(self) -> None:
        """Close the client."""

    @abstractmethod
    async def remove(self, prefix: str) -> None:
        """Remove all keys that begin so."""

    @abstractmethod
    def operation(self, verb: str) -> Operation:
        """Return the call for ``get``, ``put``, ``exists``, ``get_many`` or ``put_many``."""

    async def drive(self, verb: str, items: Iterable[Any], tasks: int) -> list[float]:
        """Do a verb for each item, in ``tasks`` tasks side by side; return the latencies."""
        operation = self.operation(verb)
        todo = iter(items)
        latencies: list[float] = []

        async def task() -> None:
            for item in todo:
                began = time.perf_counter()
                await operation(item)
                latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(task() for _ in range(tasks)))
        return latencies


class Aiomooncake(Peer):
    """aiomooncake itself."""

    name = "aiomooncake"
    in_words = "this library"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Connect to a master."""
        import aiomooncake

        self.store = await aiomooncake.connect(
            address,
            local_hostname=_HOST,
            global_segment_size=segment,
            local_buffer_size=local_buffer,
        )

    async def close(self) -> None:
        """Close the store."""
        await self.store.aclose()

    async def remove(self, prefix: str) -> None:
        """Remove all keys that begin so."""
        await self.store.remove_by_regex(f"^{prefix}", force=True)

    def operation(self, verb: str) -> Operation:
        """Return the call for a verb."""
        operation: Operation = getattr(self, f"_{verb}")
        return operation

    async def _get(self, key: str) -> None:
        _good(await self.store.get(key))

    async def _put(self, item: tuple[str, bytes]) -> None:
        await self.store.put(*item)

    async def _exists(self, key: str) -> None:
        _good(await self.store.exists(key))

    async def _get_many(self, keys: list[str]) -> None:
        _good(all(await self.store.get_many(keys)))

    async def _put_many(self, items: list[tuple[str, bytes]]) -> None:
        await self.store.put_many(dict(items))


class _Request(NamedTuple):
    """How a verb is said to the binding."""

    method: str
    arguments: Callable[[Any], tuple[Any, ...]]
    good: Callable[[Any], object]


_REQUESTS = {
    "get": _Request("get", lambda key: (key,), lambda value: value),
    "put": _Request("put", lambda item: item, lambda code: code == 0),
    "exists": _Request("is_exist", lambda key: (key,), lambda code: code == 1),
    "get_many": _Request("get_batch", lambda keys: (keys,), all),
    "put_many": _Request(
        "put_batch",
        lambda items: ([key for key, _ in items], [value for _, value in items]),
        lambda code: code == 0,
    ),
}


class BindingPeer(Peer):
    """A way to call the binding of the wheel without stopping the loop."""

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set the binding up; this stops the loop, and is not measured here."""
        self.native = self._new_store()
        setup(self.native, address, segment, local_buffer)

    async def close(self) -> None:
        """Close the binding."""
        await asyncio.to_thread(self.native.close)

    async def remove(self, prefix: str) -> None:
        """Remove all keys that begin so."""
        _good(await asyncio.to_thread(self.native.remove_by_regex, f"^{prefix}", force=True) >= 0)

    def operation(self, verb: str) -> Operation:
        """Return the call for a verb."""
        method, arguments, good = _REQUESTS[verb]
        call = self.call

        async def operation(item: Any) -> None:
            _good(good(await call(method, *arguments(item))))

        return operation

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the binding and await its answer."""

    def _new_store(self) -> Any:
        return native_store()


class Wrapper(BindingPeer):
    """The wheel's own asynchronous face."""

    name = "async_store"
    in_words = "the wheel's own mooncake.async_store"

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call ``async_<method>``."""
        return await getattr(self.native, f"async_{method}")(*arguments)

    def _new_store(self) -> Any:
        from mooncake.async_store import MooncakeDistributedStoreAsync

        return MooncakeDistributedStoreAsync()


class ToThread(BindingPeer):
    """``asyncio.to_thread`` for each call."""

    name = "asyncio.to_thread"
    in_words = "asyncio.to_thread over the binding"

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it in a thread of the loop's default executor."""
        return await asyncio.to_thread(getattr(self.native, method), *arguments)


class AnyioToThread(BindingPeer):
    """``anyio.to_thread`` for each call."""

    name = "anyio.to_thread"
    in_words = f"anyio.to_thread over the binding, limiter of {_THREADS}"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set the binding up."""
        await super().open(address, segment=segment, local_buffer=local_buffer)
        self._limiter = anyio.CapacityLimiter(_THREADS)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it in one of anyio's threads."""
        return await anyio.to_thread.run_sync(
            getattr(self.native, method), *arguments, limiter=self._limiter
        )


class Executor(BindingPeer):
    """``run_in_executor`` for each call."""

    name = "run_in_executor"
    in_words = f"loop.run_in_executor over the binding, {_THREADS} threads"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set the binding up."""
        await super().open(address, segment=segment, local_buffer=local_buffer)
        self._executor = ThreadPoolExecutor(_THREADS)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it in a thread of a pool of its own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, getattr(self.native, method), *arguments)


class BlockingLoop(BindingPeer):
    """The binding called again and again by one thread: no hop per call, no concurrency."""

    name = "blocking loop"
    in_words = "the blocking binding in a loop, in one thread"

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it; only :meth:`drive` keeps that off the event loop."""
        return getattr(self.native, method)(*arguments)

    async def drive(self, verb: str, items: Iterable[Any], tasks: int) -> list[float]:
        """Do a verb for each item in one thread, whatever the number of tasks."""
        del tasks
        return await asyncio.to_thread(self._drive, verb, items)

    def _drive(self, verb: str, items: Iterable[Any]) -> list[float]:
        method, arguments, good = _REQUESTS[verb]
        call = getattr(self.native, method)
        latencies: list[float] = []
        for item in items:
            began = time.perf_counter()
            _good(good(call(*arguments(item))))
            latencies.append(time.perf_counter() - began)
        return latencies


OURS = Aiomooncake.name
WRAPPER = Wrapper.name
PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (Aiomooncake, Wrapper, ToThread, AnyioToThread, Executor, BlockingLoop)
}


def native_store() -> Any:
    """Make an object of the binding; not set up."""
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore()


def setup(native: Any, address: str, segment: int, local_buffer: int) -> None:
    """Set an object of the binding up: blocks, and holds the GIL."""
    code = native.setup(_HOST, "P2PHANDSHAKE", segment, local_buffer, "tcp", "", address)
    if code != 0:
        raise RuntimeError(f"setup of the binding answered {code}")


def _good(answer: object) -> None:
    if not answer:
        raise RuntimeError(f"a call failed: it answered {answer!r}")

"""The ways to use Mooncake from asyncio that are compared, one small adapter each."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, NamedTuple

import anyio
import anyio.to_thread

__all__ = ["OURS", "PEERS", "WRAPPER", "Peer", "Request", "native_store"]

_HOST = "127.0.0.1"
_THREADS = 8


class Request(NamedTuple):
    """One call, ready to be made: nothing but the call itself is timed.

    Every answer is checked (a value that is not empty, a code that is 0): a peer that fails fast
    must not look fast.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    good: Callable[[Any], object]


class Peer(ABC):
    """A client of one master; opened once, driven by verb.

    A verb is ``get``, ``put``, ``exists``, ``get_many``, ``put_many`` or ``mixed``; its items are
    keys, ``(key, value)`` pairs, or lists of these. ``mixed`` has pairs, which are stored, among
    keys, which are read.
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
    def request(self, verb: str, item: Any) -> Request:
        """Make the call of a verb with one item."""

    def requests(self, verb: str, items: Iterable[Any]) -> list[Request]:
        """Make the calls of a verb with all items."""
        if verb == "mixed":
            return [self.request("get" if isinstance(i, str) else "put", i) for i in items]
        return [self.request(verb, item) for item in items]

    async def drive(self, requests: Iterable[Request], tasks: int) -> Driven:
        """Make all calls, in ``tasks`` tasks side by side."""
        todo = iter(requests)
        latencies: list[float] = []
        clock = time.perf_counter

        async def task() -> None:
            for call, arguments, good in todo:
                began = clock()
                answer = await call(*arguments)
                latencies.append(clock() - began)
                if not good(answer):
                    raise _bad(answer)

        began = clock()
        await asyncio.gather(*(task() for _ in range(tasks)))
        return Driven(clock() - began, latencies)


class Driven(NamedTuple):
    """How long all calls took together, and how long each of them, in seconds."""

    seconds: float
    latencies: list[float]


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

    def request(self, verb: str, item: Any) -> Request:
        """Make the call of a verb; what fails raises by itself."""
        store = self.store
        if verb == "get":
            return Request(store.get, (item,), _itself)
        if verb == "put":
            return Request(store.put, item, _always)
        if verb == "exists":
            return Request(store.exists, (item,), _itself)
        if verb == "get_many":
            return Request(store.get_many, (item,), all)
        return Request(store.put_many, (dict(item),), _always)


def _itself(answer: Any) -> Any:
    return answer


def _always(_: object) -> bool:
    return True


def _is_0(code: object) -> bool:
    return code == 0


def _is_1(code: object) -> bool:
    return code == 1


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
        gone = await asyncio.to_thread(self.native.remove_by_regex, f"^{prefix}", force=True)
        if gone < 0:
            raise _bad(gone)

    def request(self, verb: str, item: Any) -> Request:
        """Make the call of a verb."""
        if verb == "get":
            return Request(self.way("get"), (item,), _itself)
        if verb == "put":
            return Request(self.way("put"), item, _is_0)
        if verb == "exists":
            return Request(self.way("is_exist"), (item,), _is_1)
        if verb == "get_many":
            return Request(self.way("get_batch"), (item,), all)
        keys, values = [key for key, _ in item], [value for _, value in item]
        return Request(self.way("put_batch"), (keys, values), _is_0)

    @abstractmethod
    def way(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Return how a method of the binding is called: what it gives is awaited."""

    def _new_store(self) -> Any:
        return native_store()


class Wrapper(BindingPeer):
    """The wheel's own asynchronous face."""

    name = "async_store"
    in_words = "the wheel's own mooncake.async_store"

    def way(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Return ``async_<method>``."""
        way: Callable[..., Awaitable[Any]] = getattr(self.native, f"async_{method}")
        return way

    def _new_store(self) -> Any:
        from mooncake.async_store import MooncakeDistributedStoreAsync

        return MooncakeDistributedStoreAsync()


class ToThread(BindingPeer):
    """``asyncio.to_thread`` for each call."""

    name = "asyncio.to_thread"
    in_words = "asyncio.to_thread over the binding"

    def way(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Call it in a thread of the loop's default executor."""
        return partial(asyncio.to_thread, getattr(self.native, method))


class AnyioToThread(BindingPeer):
    """``anyio.to_thread`` for each call."""

    name = "anyio.to_thread"
    in_words = f"anyio.to_thread over the binding, limiter of {_THREADS}"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set the binding up."""
        await super().open(address, segment=segment, local_buffer=local_buffer)
        self._limiter = anyio.CapacityLimiter(_THREADS)

    def way(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Call it in one of anyio's threads."""
        run: Callable[..., Awaitable[Any]] = anyio.to_thread.run_sync
        return partial(run, getattr(self.native, method), limiter=self._limiter)


class Executor(BindingPeer):
    """``run_in_executor`` for each call."""

    name = "run_in_executor"
    in_words = f"loop.run_in_executor over the binding, {_THREADS} threads"

    async def open(self, address: str, *, segment: int, local_buffer: int) -> None:
        """Set the binding up."""
        await super().open(address, segment=segment, local_buffer=local_buffer)
        self._executor = ThreadPoolExecutor(_THREADS)

    def way(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Call it in a thread of a pool of its own."""
        loop = asyncio.get_running_loop()
        return partial(loop.run_in_executor, self._executor, getattr(self.native, method))


class Threads(BindingPeer):
    """The binding called by as many threads as others have tasks: no loop, no hop."""

    name = "threads"
    in_words = "threads over the blocking binding, one for each task, without a loop"

    def way(self, method: str) -> Callable[..., Any]:
        """Return the method; only :meth:`drive` keeps it off the event loop."""
        way: Callable[..., Any] = getattr(self.native, method)
        return way

    async def drive(self, requests: Iterable[Request], tasks: int) -> Driven:
        """Make all calls, in ``tasks`` threads side by side."""
        return await asyncio.to_thread(self._drive, iter(requests), tasks)

    def _drive(self, todo: Iterator[Request], count: int) -> Driven:
        latencies: list[float] = []
        errors: list[BaseException] = []
        begin = threading.Barrier(count + 1)
        clock = time.perf_counter

        def work() -> None:
            begin.wait()
            try:
                # Taking the next one from a list's iterator is atomic in CPython.
                for call, arguments, good in todo:
                    began = clock()
                    answer = call(*arguments)
                    latencies.append(clock() - began)
                    if not good(answer):
                        raise _bad(answer)
            except BaseException as exc:  # noqa: BLE001  # raised by the thread that waits
                errors.append(exc)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        begin.wait()
        began = clock()
        for thread in threads:
            thread.join()
        seconds = clock() - began
        if errors:
            raise errors[0]
        return Driven(seconds, latencies)


class BlockingLoop(Threads):
    """The binding called again and again by one thread: no hop per call, no concurrency."""

    name = "blocking loop"
    in_words = "the blocking binding in a loop, in one thread"

    async def drive(self, requests: Iterable[Request], tasks: int) -> Driven:
        """Make all calls in one thread, whatever the number of tasks."""
        del tasks
        return await super().drive(requests, 1)


class BlockingBatches(BlockingLoop):
    """The binding's batch calls in one thread: what merging could reach if it cost nothing."""

    name = "blocking batches"
    in_words = "get_batch, put_batch and batch_is_exist of 256 keys in a loop, in one thread"

    _keys = 256

    def requests(self, verb: str, items: Iterable[Any]) -> list[Request]:
        """Make calls of many items each."""
        listed = list(items)
        batches = [listed[i : i + self._keys] for i in range(0, len(listed), self._keys)]
        if verb == "exists":
            return [Request(self.way("batch_is_exist"), (batch,), all) for batch in batches]
        return [self.request(f"{verb}_many", batch) for batch in batches]


OURS = Aiomooncake.name
WRAPPER = Wrapper.name
PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Aiomooncake,
        Wrapper,
        ToThread,
        AnyioToThread,
        Executor,
        Threads,
        BlockingLoop,
        BlockingBatches,
    )
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


def _bad(answer: object) -> RuntimeError:
    return RuntimeError(f"a call failed: it answered {answer!r:.100}")

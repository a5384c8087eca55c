"""The store: one verb, one short method."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from aiomooncake._tasks import together
from aiomooncake.engine.client import EngineClient, close_dropped
from aiomooncake.engine.gate import State
from aiomooncake.engine.mirror import BlockingMirror, EngineMirror
from aiomooncake.errors import (
    BatchError,
    InvalidArgumentError,
    MooncakeError,
    error_from_code,
    rank_label,
)
from aiomooncake.memory import Block, layout
from aiomooncake.observe import Health, StoreStats
from aiomooncake.transfers import CHUNK, PIECE, Transfers
from aiomooncake.warmup import WarmupPolicy, WarmupProgress, WarmupReport, warm_up

if TYPE_CHECKING:
    from types import TracebackType

    from aiomooncake.config import ReplicateConfig, StoreConfig
    from aiomooncake.warmup import Pace

T = TypeVar("T")

__all__ = ["Store"]

_CLOSE_TIMEOUT = 10.0
_NOT_READY = -703
_NOT_FOUND = -704


@dataclass(slots=True)
class _Warming:
    """The warm-up under way, and how many await it."""

    task: asyncio.Task[WarmupReport]
    waiters: int = 0


class Store:
    """An open Mooncake store: every verb awaitable, checked, and safe to cancel.

    Made by :func:`aiomooncake.connect` or :func:`aiomooncake.adopt`. It belongs to the event loop
    of its first await, until that loop is closed; ``store.blocking`` serves threads without one.

    Attributes:
        rank: Rank this store was opened for, as given.
        config: What it is connected to; None for an adopted store.
        hostname: The engine's own address (``host:port``), by which peers reach it.
        engine: The binding's methods, awaitable, with raw arguments and results.
        blocking: The same for threads without a loop.
    """

    def __init__(
        self,
        client: EngineClient,
        transfers: Transfers,
        *,
        config: StoreConfig | None,
        hostname: str,
        methods: frozenset[str],
        address_methods: frozenset[str],
    ) -> None:
        self.rank = client.rank
        self.config = config
        self.hostname = hostname
        self.engine = EngineMirror(client, methods, address_methods)
        self.blocking = BlockingMirror(client, methods, address_methods)
        self._client = client
        self._transfers = transfers
        self._warming: _Warming | None = None
        self._warmup_attempts = 0
        weakref.finalize(self, close_dropped, client, repr(self)).atexit = False

    # ------------------------------------------------------------------ single keys

    async def get(self, key: str) -> bytes | None:
        """Read a value.

        Returns:
            The value; None when the key is not there, which the engine has confirmed.

        Raises:
            MooncakeError: The read failed; a failure is never reported as a miss.
        """
        self._check_key(key, "get")
        return await self._run_small("get", self._transfers.get, key, reads=True)

    async def exists(self, key: str) -> bool:
        """Tell whether a value can be read. Renews the key's lease, as any read does."""
        self._check_key(key, "exists")
        return await self._run_small("exists", self._exists, key)

    async def size(self, key: str) -> int | None:
        """Tell the size of a value in bytes; None when the key is not there. Renews the lease."""
        self._check_key(key, "size")
        return await self._run_small("size", self._size, key)

    async def put(self, key: str, value: Any, *, config: ReplicateConfig | None = None) -> None:
        """Store a value, unless the key is there already: the engine keeps the first value.

        Args:
            key: The key; not empty.
            value: Anything with the buffer protocol: ``bytes``, ``bytearray``, ``memoryview``,
                ``array``, NumPy arrays, ``mmap``. Strided memory is laid out as contiguous bytes
                in C order.
            config: Placement options.

        Raises:
            InvalidArgumentError: An empty key or value, or no buffer.
            NoSpaceError: No segment is mounted, or all of them are full.
            MooncakeError: Any other failure.
        """
        await self._write("put", key, value, config)

    async def upsert(self, key: str, value: Any, *, config: ReplicateConfig | None = None) -> None:
        """Store a value, in place of the one that is there; otherwise as :meth:`put`.

        The engine does not make it atomic for others: until it returns, reads of the key may
        answer None or a mix of both values, and when a value of another size finds no room, the
        old one is gone all the same.
        """
        await self._write("upsert", key, value, config)

    async def remove(self, key: str, *, force: bool = False) -> bool:
        """Remove a key.

        Args:
            key: The key.
            force: Remove it also while a lease of a recent read holds it.

        Returns:
            True if it was there.

        Raises:
            ObjectLeasedError: Somebody read it a moment ago, and ``force`` is not set.
        """
        self._check_key(key, "remove")
        return await self._run_small("remove", partial(self._remove, key, force=force))

    # ------------------------------------------------------------------ many keys

    @overload
    async def get_many(
        self, keys: Iterable[str], *, return_exceptions: Literal[False] = ...
    ) -> list[bytes | None]: ...
    @overload
    async def get_many(
        self, keys: Iterable[str], *, return_exceptions: bool
    ) -> list[bytes | MooncakeError | None]: ...
    async def get_many(self, keys: Iterable[str], *, return_exceptions: bool = False) -> list[Any]:
        """Read many values: a list aligned with the keys, None where a key is not there.

        Args:
            keys: Keys; one given twice is read once and answered twice.
            return_exceptions: Put the error of a key in its place instead of raising.

        Raises:
            BatchError: Some keys failed; ``.results`` has a value, None or an error for each.
        """
        return await self._many(
            "get_many",
            keys,
            self._transfers.get_chunk,
            return_exceptions=return_exceptions,
            reads=True,
        )

    @overload
    async def exists_many(
        self, keys: Iterable[str], *, return_exceptions: Literal[False] = ...
    ) -> list[bool]: ...
    @overload
    async def exists_many(
        self, keys: Iterable[str], *, return_exceptions: bool
    ) -> list[bool | MooncakeError]: ...
    async def exists_many(
        self, keys: Iterable[str], *, return_exceptions: bool = False
    ) -> list[Any]:
        """Tell for many keys whether they can be read: a list aligned with the keys.

        Raises:
            BatchError: Some keys failed; ``.results`` has a bool or an error for each.
        """
        return await self._many(
            "exists_many", keys, self._exists_chunk, return_exceptions=return_exceptions
        )

    @overload
    async def remove_many(
        self, keys: Iterable[str], *, force: bool = ..., return_exceptions: Literal[False] = ...
    ) -> list[bool]: ...
    @overload
    async def remove_many(
        self, keys: Iterable[str], *, force: bool = ..., return_exceptions: bool
    ) -> list[bool | MooncakeError]: ...
    async def remove_many(
        self, keys: Iterable[str], *, force: bool = False, return_exceptions: bool = False
    ) -> list[Any]:
        """Remove many keys: True or False for each, aligned with the keys.

        Raises:
            BatchError: Some keys failed (leased, say); the others are gone. ``.results`` has a
                bool or an error for each.
        """

        def remove_chunk(chunk: Sequence[str]) -> list[bool | MooncakeError]:
            return self._remove_chunk(chunk, force=force)

        return await self._many(
            "remove_many", keys, remove_chunk, return_exceptions=return_exceptions
        )

    async def put_many(
        self,
        items: Mapping[str, Any],
        *,
        config: ReplicateConfig | None = None,
        return_exceptions: bool = False,
    ) -> dict[str, MooncakeError | None]:
        """Store many values; each as :meth:`put` does.

        Returns:
            One entry per key: None, or with ``return_exceptions`` the error of that key.

        Raises:
            InvalidArgumentError: A key or value is bad; then nothing was stored.
            BatchError: Some keys failed, the others are stored; ``.results`` has one entry per
                key.
        """
        prepared: list[tuple[str, Block | memoryview]] = []
        for key, value in items.items():
            self._check_key(key, "put_many")
            prepared.append((key, layout(value, verb="put_many", key=key, rank=self.rank)))
        chunks = [prepared[i : i + CHUNK] for i in range(0, len(prepared), CHUNK)]

        def put_chunk(chunk: list[tuple[str, Block | memoryview]]) -> list[MooncakeError | None]:
            return self._transfers.put_chunk(chunk, config)

        answers = await self._side_by_side(
            "put_many", chunks, put_chunk, drain=any(_caller_may_write(b) for _, b in prepared)
        )
        results = dict(zip(items, answers, strict=True))
        self._settle(
            "put_many", results, list(results.values()), return_exceptions=return_exceptions
        )
        return results

    async def remove_by_regex(self, pattern: str, *, force: bool = False) -> int:
        """Remove every key that a regular expression matches anywhere; how many went.

        Args:
            pattern: A C++ ``std::regex`` (ECMAScript) pattern, searched in the key.
            force: Remove also what a lease of a recent read holds.
        """
        self._check_text(pattern, "remove_by_regex", "pattern")
        return await self._run_control(
            "remove_by_regex", self._count, "remove_by_regex", pattern, force
        )

    async def remove_all(self, *, force: bool = False) -> int:
        """Remove every key; how many went. Leased ones stay unless ``force`` is set."""
        return await self._run_control("remove_all", self._count, "remove_all", force)

    # ------------------------------------------------------------------ warm-up, state, end

    async def warmup(
        self,
        policy: WarmupPolicy | None = None,
        *,
        on_attempt: Callable[[WarmupProgress], object] | None = None,
        _pace: Pace | None = None,
    ) -> WarmupReport:
        """Wait until this store really stores: ``put``, ``exists`` and ``get`` of a fresh key.

        May be repeated; a call made while another one is under way joins it (and its policy).

        Args:
            policy: Tries, delays and time-outs; the default is :class:`WarmupPolicy`.
            on_attempt: Called on the loop after every attempt.

        Raises:
            WarmupError: All tries failed, or a fault that no retry cures; it carries the attempts
                and a diagnosis.
        """
        warming = self._warming
        loop = asyncio.get_running_loop()
        if warming is None or warming.task.done() or warming.task.get_loop() is not loop:

            def count(details: WarmupProgress) -> None:
                self._warmup_attempts += 1
                if on_attempt is not None:
                    on_attempt(details)

            task = asyncio.ensure_future(
                warm_up(self, policy or WarmupPolicy(), on_attempt=count, pace=_pace)
            )
            warming = self._warming = _Warming(task)
        warming.waiters += 1
        try:
            return await asyncio.shield(warming.task)
        finally:
            warming.waiters -= 1
            if not warming.waiters and not warming.task.done():
                # Cancelled, and nobody else waits for it.
                warming.task.cancel()
                self._warming = None

    def health(self) -> Health:
        """Tell whether the store can serve, without asking the master; safe from any thread."""
        gate = self._client.gate
        if gate.state is State.OPEN:
            if gate.tainted is not None:
                return Health("tainted", f"{gate.tainted}; reads are refused, connect again")
            try:
                code = self._client.ask("health", self._health_check)
            except MooncakeError:
                pass  # closed meanwhile
            else:
                if code == 0:
                    return Health("ready", "the engine's last ping of the master was answered")
                return Health("master-unreachable", "the engine's pings of the master fail")
        if gate.state is State.FORKED:
            return Health("forked", "the store was opened in the parent process")
        if gate.state is State.CLOSED:
            return Health("closed", "the store was closed")
        return Health("closing", "the store is closing")

    def stats(self) -> StoreStats:
        """Take a snapshot of what the store has done; safe from any thread."""
        client, counters = self._client, self._client.counters
        return StoreStats(
            calls=counters.calls,
            in_flight=client.gate.in_flight,
            abandoned=client.gate.abandoned,
            tainted=client.gate.tainted is not None,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            errors=dict(counters.codes),
            warmup_attempts=self._warmup_attempts,
            longest_loop_stall=client.longest_lag,
        )

    @property
    def closed(self) -> bool:
        """Whether the store takes no more calls (it may still be closing)."""
        return self._client.gate.state is not State.OPEN

    async def aclose(self, timeout: float | None = _CLOSE_TIMEOUT) -> None:
        """Close the store; idempotent.

        Refuses new calls, drops queued ones, waits for those in flight, then tears the engine
        down (1-2 s on a healthy master; the loop is free meanwhile).

        Args:
            timeout: Seconds to wait, None for as long as it takes. After that a warning names the
                stuck calls, and closing goes on in the background: the engine is never torn down
                under a call. Cancelled, it goes on in the background too.
        """
        await self._client.close(timeout)

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        label = rank_label(self.rank)
        state = self._client.gate.state.value
        return f"<Store {label + ' ' if label else ''}{self.hostname} {state}>"

    # ------------------------------------------------------------------ jobs (worker threads)

    def _exists(self, key: str) -> bool:
        code = self._client.native_object.is_exist(key)
        if code < 0:
            raise error_from_code(code, "exists", key=key, rank=self.rank)
        return code == 1

    def _size(self, key: str) -> int | None:
        code = self._client.native_object.get_size(key)
        if code in (_NOT_FOUND, _NOT_READY):  # as get and exists see it
            return None
        if code < 0:
            raise error_from_code(code, "size", key=key, rank=self.rank)
        return code

    def _remove(self, key: str, *, force: bool) -> bool:
        return self._removed(key, self._client.native_object.remove(key, force))

    def _removed(self, key: str, code: int) -> bool:
        if code == _NOT_FOUND:
            return False
        if code < 0:
            raise error_from_code(code, "remove", key=key, rank=self.rank)
        return True

    def _exists_chunk(self, keys: Sequence[str]) -> list[bool | MooncakeError]:
        codes = self._client.native_object.batch_is_exist(list(keys))
        self._transfers.check_length(codes, keys, "batch_is_exist")
        return [
            error_from_code(code, "exists", key=key, rank=self.rank) if code < 0 else code == 1
            for key, code in zip(keys, codes, strict=True)
        ]

    def _remove_chunk(self, keys: Sequence[str], *, force: bool) -> list[bool | MooncakeError]:
        results: list[bool | MooncakeError] = []
        codes = self._client.native_object.batch_remove(list(keys), force)
        self._transfers.check_length(codes, keys, "batch_remove")
        for key, code in zip(keys, codes, strict=True):
            try:
                results.append(self._removed(key, code))
            except MooncakeError as exc:
                results.append(exc)
        return results

    def _count(self, method: str, *args: Any) -> int:
        code: int = getattr(self._client.native_object, method)(*args)
        if code < 0:
            raise error_from_code(code, method, rank=self.rank)
        return code

    def _health_check(self) -> int:
        return self._client.native_object.health_check()

    # ------------------------------------------------------------------ ways to the threads

    async def _run_small(
        self, name: str, fn: Callable[..., T], *args: Any, reads: bool = False
    ) -> T:
        return await self._client.run(self._client.small, name, fn, *args, reads=reads)

    async def _run_control(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        return await self._client.run(self._client.control, name, fn, *args)

    async def _write(self, verb: str, key: str, value: Any, config: ReplicateConfig | None) -> None:
        self._check_key(key, verb)
        block = layout(value, verb=verb, key=key, rank=self.rank)
        client = self._client
        large = block.nbytes > PIECE

        def write() -> None:
            self._transfers.put(key, block, config, replace=verb == "upsert")

        await client.run(
            client.bulk if large else client.small,
            verb,
            write,
            drain=_caller_may_write(block),
        )

    async def _many(
        self,
        verb: str,
        keys: Iterable[str],
        chunk_job: Callable[[Sequence[str]], list[Any]],
        *,
        return_exceptions: bool,
        reads: bool = False,
    ) -> list[Any]:
        if isinstance(keys, (str, bytes)):
            raise InvalidArgumentError(
                f"{verb} needs an iterable of keys, not one {type(keys).__name__}; "
                "put it into a list",
                rank=self.rank,
            )
        wanted = list(keys)
        for key in wanted:
            self._check_key(key, verb)
        # A key given twice in one engine call answers wrong data.
        unique = list(dict.fromkeys(wanted))
        chunks = [unique[i : i + CHUNK] for i in range(0, len(unique), CHUNK)]
        answers = await self._side_by_side(verb, chunks, chunk_job, reads=reads)
        by_key = dict(zip(unique, answers, strict=True))
        results = [by_key[key] for key in wanted]
        self._settle(verb, results, results, return_exceptions=return_exceptions)
        return results

    async def _side_by_side(
        self,
        verb: str,
        chunks: Sequence[Any],
        chunk_job: Callable[[Any], list[T]],
        *,
        reads: bool = False,
        drain: bool = False,
    ) -> list[T]:
        """Run one job per chunk and put the answers together, in order."""
        client = self._client
        if len(chunks) == 1:
            return await client.run(
                client.small, verb, chunk_job, chunks[0], reads=reads, drain=drain
            )
        answers = await together(
            client.run(client.small, verb, chunk_job, chunk, reads=reads, drain=drain)
            for chunk in chunks
        )
        return [answer for chunk in answers for answer in chunk]

    def _settle(
        self, verb: str, results: Any, answers: Sequence[Any], *, return_exceptions: bool
    ) -> None:
        failed = [answer for answer in answers if isinstance(answer, MooncakeError)]
        for error in failed:
            if error.code is not None:
                self._client.counters.count_code(error.code_name)
        if failed and not return_exceptions:
            raise BatchError(
                f"{verb} failed for {len(failed)} of {len(answers)} keys",
                results=results,
                rank=self.rank,
            )

    def _check_key(self, key: object, verb: str) -> None:
        self._check_text(key, verb, "key")

    def _check_text(self, text: object, verb: str, what: str) -> None:
        if not isinstance(text, str) or not text:
            got = f"an empty {what}" if text == "" else f"a {what} of type {type(text).__name__}"
            raise InvalidArgumentError(
                f"{verb} got {got}; {what}s are non-empty strings", rank=self.rank
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise InvalidArgumentError(
                    f"{verb} got a {what} that is no valid Unicode ({exc.reason} at {exc.start}); "
                    f"the engine takes {what}s as UTF-8",
                    rank=self.rank,
                ) from None


def _caller_may_write(block: Block | memoryview) -> bool:
    """Whether the engine would read memory that its owner may change meanwhile."""
    return block.mutable if isinstance(block, Block) else not block.readonly

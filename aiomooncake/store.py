"""The store: one verb, one short method."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, overload

from aiomooncake._tasks import caught, together
from aiomooncake._values import nearest
from aiomooncake.avoiding import suspect_owners
from aiomooncake.batching import ASKED_KEYS, WIDTH, Batching, Waiting
from aiomooncake.config import ReplicateConfig
from aiomooncake.engine.client import EngineClient, close_dropped
from aiomooncake.engine.gate import State
from aiomooncake.engine.methods import AwaitableMethods
from aiomooncake.engine.mirror import BlockingMirror, EngineMirror
from aiomooncake.errors import (
    BatchError,
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    RpcError,
    StoreClosedError,
    WarmupError,
    error_from_code,
    rank_label,
    shorten_key,
)
from aiomooncake.memory import Block, layout, view_of
from aiomooncake.observe import Health, HealthState, StoreStats
from aiomooncake.observe.roll import ROLL
from aiomooncake.raw_moves import RawMoves
from aiomooncake.replicas import Replica, replicas_of_keys
from aiomooncake.segments import SegmentVerbs
from aiomooncake.sessions import SessionVerbs
from aiomooncake.tasks import TaskVerbs
from aiomooncake.tensors import TensorVerbs
from aiomooncake.transfers import LARGE, MANY_KEYS, MERGED_VALUE, Transfers
from aiomooncake.views import Views
from aiomooncake.warmup import WarmupPolicy, WarmupProgress, WarmupReport, warm_up

if TYPE_CHECKING:
    from types import TracebackType

    from aiomooncake.config import StoreConfig
    from aiomooncake.warmup import Pace

T = TypeVar("T")

__all__ = ["Store"]

_INVALID = -600
_CLOSE_TIMEOUT = 10.0
_ENDED: Final[dict[State, tuple[HealthState, str]]] = {
    State.FORKED: ("forked", "the store was opened in the parent process"),
    State.CLOSED: ("closed", "the store was closed"),
}
# What one turn of the loop lays out of many values: about 2 ms.
_SLICE_KEYS = 1000
_SLICE_BYTES = 8 << 20


@dataclass(slots=True)
class _Warming:
    """The warm-up under way, and how many await it."""

    task: asyncio.Task[WarmupReport]
    waiters: int = 0


class _Trials:
    """What a warm-up sees of a store: calls that are made also while the master is away."""

    def __init__(self, store: Store) -> None:
        self.rank = store.rank
        self.hostname = store.hostname
        self.config = store.config
        self.engine = EngineMirror(*store._mirrored, trial=True)  # noqa: SLF001  # it is ours
        self.allocate = store.allocate
        self._client = store._client  # noqa: SLF001  # it is ours

    def discard(self, key: str) -> None:
        """Take a key away on a thread; nobody waits for it, or hears how it ends."""
        client = self._client

        def remove(keys: Sequence[str]) -> list[int]:
            return [client.native_object.remove(key, True) for key in keys]

        with contextlib.suppress(MooncakeError, RuntimeError):  # it is closing, or out of threads
            client.start(client.small, "remove", remove, [key]).tidies = True


class Store(TensorVerbs, SessionVerbs, SegmentVerbs, TaskVerbs):
    """An open Mooncake store: every verb awaitable, checked, and safe to cancel.

    Made by :func:`aiomooncake.connect` or :func:`aiomooncake.adopt`. It belongs to the event loop
    of its first await, until that loop is closed; ``store.blocking`` serves threads without one.

    Attributes:
        rank: Rank this store was opened for, as given.
        config: What it is connected to; None for an adopted store.
        engine: The binding's methods, awaitable, with raw arguments and results.
        blocking: The same for threads without a loop.
    """

    def __init__(
        self,
        client: EngineClient,
        transfers: Transfers,
        *,
        config: StoreConfig | None,
        methods: frozenset[str],
        address_methods: frozenset[str],
        on_health: Callable[[Health], object] | None = None,
    ) -> None:
        self.rank = client.rank
        self.config = config
        move_of = RawMoves(client).of
        self._mirrored = client, methods, address_methods, transfers.convert, move_of
        self.engine = EngineMirror(*self._mirrored)
        self.blocking = BlockingMirror(*self._mirrored)
        self._client = client
        self._transfers = transfers
        # Letting go of a handle of a dummy client is a request to the other process, under the GIL:
        # its views are memory of their own.
        room = config.local_buffer_size if config is not None and transfers.shared is None else 0
        self._views = Views(client, transfers, room)
        self._batching: Batching | None = None
        self._warming: _Warming | None = None
        if on_health is not None:
            client.on_change = partial(_tell_health, weakref.ref(self), on_health)
        weakref.finalize(self, close_dropped, client, repr(self)).atexit = False
        ROLL.enlist(self)

    if not TYPE_CHECKING:  # to which no name but the class's own is right

        def __getattr__(self, name: str) -> Any:
            """Say where a name is that the store does not have; `hasattr` goes on saying no."""
            if hasattr(Store, name):
                return object.__getattribute__(self, name)  # a property's own AttributeError
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text += _where(name)
            raise AttributeError(text, name=name)

    # ------------------------------------------------------------------ single keys

    async def get(self, key: str) -> bytes | None:
        """Read a value.

        Returns:
            The value; None when the key is not there, which the engine has confirmed.

        Raises:
            MooncakeError: The read failed; a failure is never reported as a miss.
        """
        self._check_key(key, "get")
        value: bytes | None = await self._merging().gets.ask(Waiting(key))
        return value

    async def exists(self, key: str) -> bool:
        """Tell whether a value can be read. Renews the key's lease, as any read does."""
        self._check_key(key, "exists")
        there: bool = await self._merging().exists.ask(Waiting(key))
        return there

    async def size(self, key: str) -> int | None:
        """Tell the size of a value in bytes; None when the key is not there. Renews the lease."""
        self._check_key(key, "size")
        size: int | None = await self._merging().sizes.ask(Waiting(key))
        return size

    async def replicas(self, key: str) -> tuple[Replica, ...]:
        """Tell where the copies of a value lie; empty when the key is not there.

        Renews the key's lease, as any read does. To ask for several keys, :meth:`replicas_many`
        does it in one call of the engine.

        Raises:
            MooncakeError: The question failed; a failure is never reported as a miss.
        """
        self._check_key(key, "replicas")
        answer: tuple[Replica, ...] | MooncakeError = (await self._ask_replicas([key]))[0]
        if isinstance(answer, MooncakeError):
            raise answer
        return answer

    async def put(self, key: str, value: Any, *, config: ReplicateConfig | None = None) -> None:
        """Store a value, unless the key is there already: the engine keeps the first value.

        Writes of one key through one store go one after the other. Beside an unfinished write of
        the key by *another* client the engine reports success too, before that write has ended or
        failed: let one client write a key, or ask :meth:`exists` where that matters.

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
            force: Remove it also while a lease of a recent read holds it. A reader that is under
                way may then get a miss, or, in the engine itself, bytes of another value that is
                given the memory; reads of this library in pieces notice that.

        Returns:
            True if it was there.

        Raises:
            ObjectLeasedError: Somebody read it a moment ago, and ``force`` is not set.
        """
        self._check_key(key, "remove")
        removed: bool = await self._merging().removes(force=force).ask(Waiting(key))
        return removed

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
        wanted = self._check_keys(keys, "get_many")
        return await self._many(
            "get_many", wanted, self._get_all, return_exceptions=return_exceptions
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
        wanted = self._check_keys(keys, "exists_many")
        ask = partial(self._ask_chunks, "exists_many", self._transfers.exists_keys, ASKED_KEYS)
        return await self._many("exists_many", wanted, ask, return_exceptions=return_exceptions)

    @overload
    async def replicas_many(
        self, keys: Iterable[str], *, return_exceptions: Literal[False] = ...
    ) -> list[tuple[Replica, ...]]: ...
    @overload
    async def replicas_many(
        self, keys: Iterable[str], *, return_exceptions: bool
    ) -> list[tuple[Replica, ...] | MooncakeError]: ...
    async def replicas_many(
        self, keys: Iterable[str], *, return_exceptions: bool = False
    ) -> list[Any]:
        """Tell for many keys where their copies lie: a list aligned with the keys.

        Raises:
            BatchError: Some keys failed; ``.results`` has a tuple or an error for each.
        """
        wanted = self._check_keys(keys, "replicas_many")
        return await self._many(
            "replicas_many", wanted, self._ask_replicas, return_exceptions=return_exceptions
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
        wanted = self._check_keys(keys, "remove_many")
        job = partial(self._transfers.remove_keys, force=force)
        remove = partial(self._ask_chunks, "remove_many", job, ASKED_KEYS)
        return await self._many("remove_many", wanted, remove, return_exceptions=return_exceptions)

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
        if not isinstance(items, Mapping):
            raise InvalidArgumentError(
                f"put_many needs a mapping from key to value, not {type(items).__name__}",
                rank=self.rank,
            )
        # A copy: the caller may change the mapping while it is stored.
        pairs = list(items.items())
        groups = self._groups_of(config, len(pairs), "put_many")
        slices: list[int] = []
        nbytes = _SLICE_BYTES
        for place, (key, value) in enumerate(pairs):
            self._check_key(key, "put_many")
            nbytes += view_of(value, verb="put_many", key=key, rank=self.rank).nbytes
            if nbytes >= _SLICE_BYTES or place - slices[-1] >= _SLICE_KEYS:
                slices.append(place)
                nbytes = 0
            if not place % _SLICE_KEYS:
                await asyncio.sleep(0)  # many of them take their time
        results: dict[str, MooncakeError | None] = {}
        # Slice by slice, because laying them out takes time too, and memory.
        for start, end in pairwise([*slices, len(pairs)]):
            results |= await self._put_slice(pairs[start:end], groups[start:end], config)
        answers = list(results.values())
        self._settle("put_many", results, answers, return_exceptions=return_exceptions)
        return results

    async def _put_slice(
        self,
        pairs: Sequence[tuple[str, Any]],
        groups: Sequence[str | None],
        config: ReplicateConfig | None,
    ) -> dict[str, MooncakeError | None]:
        lane = self._merging().writes("put", config)
        small: list[Waiting] = []
        alone: dict[str, Coroutine[Any, Any, Any]] = {}
        for (key, value), group in zip(pairs, groups, strict=True):
            block = layout(value, verb="put_many", key=key, rank=self.rank)
            if isinstance(block, memoryview) or _travels_alone(block):
                one = replace(config, group_ids=[group]) if config and group is not None else config
                alone[key] = caught(self._write_alone, "put", key, block, one)
            else:
                small.append(Waiting(key, block, group))
        merged, *others = await together([lane.ask_all(small), *alone.values()])
        answers = dict(zip((item.key for item in small), merged, strict=True))
        answers |= dict(zip(alone, others, strict=True))
        return {key: answers[key] for key, _ in pairs}

    async def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> None:
        """Store several pieces of memory as one value, in order; otherwise as :meth:`put`.

        Args:
            key: The key.
            *parts: Anything that :meth:`put` takes; empty ones are left out.
            config: Placement options.
        """
        self._check_key(key, "put_parts")
        blocks = [
            layout(part, verb="put_parts", key=key, rank=self.rank)
            for part in parts
            if not _is_empty(part)
        ]
        whole = [block for block in blocks if isinstance(block, Block)]
        if len(whole) == len(blocks) and sum(block.nbytes for block in whole) <= MERGED_VALUE:
            # Joining is quicker than what it would save.
            joined = b"".join(cast("bytes", block.keep) for block in whole)
            await self._write("put", key, joined, config)
            return
        self._groups_of(config, 1, "put_parts")
        write = partial(self._transfers.put_parts, key, blocks, config)
        client = self._client
        mutable = any(_caller_may_write(block) for block in blocks)
        await self._merging().write_alone(client.bulk, "put_parts", key, write, drain=mutable)

    async def remove_by_regex(self, pattern: str, *, force: bool = False) -> int:
        """Remove every key that a regular expression matches anywhere; how many went.

        The master matches by C++ ``std::regex``, whose stack is small: with keys of 30 KB and more
        in the store, a pattern such as ``x.*y`` has crashed it.

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
        Cancelled, it has its key removed in the background.

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
            policy = WarmupPolicy() if policy is None else policy
            task = asyncio.ensure_future(self._warm_up(policy, on_attempt=on_attempt, pace=_pace))
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

    async def _warm_up(
        self,
        policy: WarmupPolicy,
        *,
        on_attempt: Callable[[WarmupProgress], object] | None,
        pace: Pace | None,
    ) -> WarmupReport:
        """Warm up, and count what comes of it."""
        counters = self._client.counters

        def count(details: WarmupProgress) -> None:
            attempt = details.attempt
            counters.count_attempt(None if attempt.ok else attempt.name)
            if on_attempt is not None:
                on_attempt(details)

        outcome, seconds = "error", None
        counters.warmup_began()
        try:
            report = await warm_up(_Trials(self), policy, on_attempt=count, pace=pace)
            outcome, seconds = "ready", report.seconds
        except WarmupError as exc:
            outcome = "unknown" if exc.diagnosis is None else str(exc.diagnosis.kind)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            counters.warmup_ended(outcome, seconds)
        return report

    def health(self) -> Health:
        """Tell whether the store can serve, without asking the master; safe from any thread."""
        state, detail = self._state()
        return Health(state, detail, self._client.since)

    def _state(self) -> tuple[HealthState, str]:
        client = self._client
        gate, watch = client.gate, client.watch
        if gate.state is State.OPEN:
            if gate.tainted is not None:
                return "tainted", f"{gate.tainted}; reads are refused, connect again"
            unreachable: HealthState = (
                "client-unreachable" if client.dummy else "master-unreachable"
            )
            if watch is not None and watch.presence == "away":
                return unreachable, f"{watch.who} does not answer"
            if watch is not None and watch.presence == "mounting":
                return "re-mounting", f"{watch.who} is back, and no segment is mounted yet"
            try:
                code = client.ask("health", self._health_check)
            except MooncakeError:
                pass  # closed meanwhile
            else:
                if client.owner_has_closed(code):
                    return "closed", "the engine's owner has closed it"
                if code != 0 and not (watch is not None and watch.just_seen):
                    # The engine has noticed before any call did.
                    client.suspect_master()
                    return unreachable, "the engine's pings fail"
                if client.peers is not None and client.peers.stuck:
                    peers = ", ".join(client.peers.stuck)
                    return "degraded", f"peers do not answer and are avoided: {peers}"
                return "ready", "the engine's last ping was answered"
        if gate.state is State.REOPENING:
            return "reopening", f"{gate.tainted}, so the store is opened anew"
        return _ENDED.get(gate.state, ("closing", "the store is closing"))

    def stats(self) -> StoreStats:
        """Take a snapshot of what the store has done; safe from any thread."""
        client, counters = self._client, self._client.counters
        return StoreStats(
            by_verb=counters.by_verb(),
            in_flight=client.gate.in_flight,
            abandoned=client.gate.abandoned,
            given_up=counters.given_up,
            refused=counters.refused,
            tainted=client.gate.tainted is not None,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            errors=counters.errors(),
            views_copied=counters.views_copied,
            hedges=counters.hedges,
            hedged_keys=counters.hedged_keys,
            peers_avoided=0 if client.peers is None else len(client.peers.stuck),
            reopenings=counters.reopenings,
            warmup=counters.warmup(),
            loop_lag=counters.lag.seen(),
            longest_loop_stall=counters.longest_lag,
            health=self.health(),
        )

    @property
    def hostname(self) -> str:
        """The engine's own address (``host:port``), by which peers reach it.

        It is the name of the store's segment too. A store that was opened anew has another one.
        """
        return self._client.hostname

    @property
    def closed(self) -> bool:
        """Whether the store takes no more calls (it may still be closing)."""
        return self._client.gate.state not in (State.OPEN, State.REOPENING)

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
        if self.closed:
            raise StoreClosedError(
                "the store is closed and can't be entered; open a new one with connect()",
                rank=self.rank,
            )
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

    def _count(self, method: str, *args: Any) -> int:
        code: int = getattr(self._client.native_object, method)(*args)
        if code < 0:
            advice = ""
            if code == _INVALID and method == "remove_by_regex":
                advice = (
                    f"The master does not take the pattern {shorten_key(args[0])}: it must be an "
                    "ECMAScript regular expression (no (?i), (?<=, (?P<)."
                )
            error = error_from_code(code, method, rank=self.rank, advice=advice)
            self._client.note_error(error)
            raise error
        return code

    def _health_check(self) -> int:
        return self._client.native_object.health_check()

    # ------------------------------------------------------------------ ways to the threads

    def _merging(self) -> Batching:
        """Find the lanes of waiting calls on the running loop."""
        batching = self._batching
        if batching is None or batching.loop is not asyncio.get_running_loop():
            self._client.use_loop("the call")
            merge = self.config is None or self.config.merge
            batching = self._batching = Batching(
                self._client, self._transfers, self._views, merge=merge
            )
        return batching

    async def _run_control(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        return await self._client.run(self._client.control, name, fn, *args)

    async def _write(self, verb: str, key: str, value: Any, config: ReplicateConfig | None) -> None:
        self._check_key(key, verb)
        block = layout(value, verb=verb, key=key, rank=self.rank)
        group = None if config is None else self._groups_of(config, 1, verb)[0]
        if isinstance(block, memoryview) or _travels_alone(block):
            await self._write_alone(verb, key, block, config)
        else:
            await self._merging().writes(verb, config).ask(Waiting(key, block, group))

    async def _write_alone(
        self, verb: str, key: str, block: Block | memoryview, config: ReplicateConfig | None
    ) -> None:
        """Store a value that is large, or that is still its owner's to change."""
        client = self._client
        write = partial(self._transfers.put, key, block, config, replace=verb == "upsert")
        lane = client.bulk if block.nbytes > MERGED_VALUE else client.small
        drain = _caller_may_write(block)
        await self._merging().write_alone(lane, verb, key, write, drain=drain)

    def _groups_of(
        self, config: ReplicateConfig | None, keys: int, verb: str
    ) -> Sequence[str | None]:
        """One routing group per key, or None for each."""
        if config is None:
            return [None] * keys
        if not isinstance(config, ReplicateConfig):
            raise InvalidArgumentError(
                f"{verb} takes config=aiomooncake.ReplicateConfig(...), not "
                f"{type(config).__module__}.{type(config).__name__}",
                rank=self.rank,
            )
        if not config.group_ids:
            return [None] * keys
        if len(config.group_ids) != keys:
            raise InvalidArgumentError(
                f"{verb} got {len(config.group_ids)} group_ids for {keys} keys; give one for each, "
                '"" for none',
                rank=self.rank,
            )
        return config.group_ids

    async def _many(
        self,
        verb: str,
        wanted: list[str],
        ask: Callable[[list[str]], Awaitable[list[Any]]],
        *,
        return_exceptions: bool,
    ) -> list[Any]:
        """Ask for distinct keys, and line the answers up with the keys as they were given."""
        # A key given twice is asked for once: within one engine call it answers wrong data.
        unique = list(dict.fromkeys(wanted))
        results = await ask(unique)
        if len(unique) < len(wanted):
            by_key = dict(zip(unique, results, strict=True))
            results = [by_key[key] for key in wanted]
        self._settle(verb, results, results, return_exceptions=return_exceptions)
        return results

    async def _get_all(self, keys: list[str]) -> list[Any]:
        answers = await self._ask_chunks(
            "get_many", self._transfers.get_keys, MANY_KEYS, keys, reads=True
        )
        large = [i for i, answer in enumerate(answers) if answer is LARGE]
        if large:
            client = self._client
            values = await together(
                caught(
                    client.run,
                    client.bulk,
                    "get",
                    self._transfers.get_large,
                    keys[i],
                    reads=True,
                    knock=partial(suspect_owners, client, [keys[i]]),
                )
                for i in large
            )
            for i, value in zip(large, values, strict=True):
                answers[i] = value
        return answers

    async def _ask_replicas(self, keys: list[str]) -> list[Any]:
        if self._client.dummy:
            raise NotSupportedError(
                "a dummy client can't tell where copies lie: connect to the master instead, "
                "without client_server_address",
                rank=self.rank,
            )
        job = partial(replicas_of_keys, self._client, self._transfers.exists_keys)
        return await self._ask_chunks("replicas", job, MANY_KEYS, keys)

    async def _ask_chunks(
        self,
        verb: str,
        job: Callable[[Sequence[str]], list[Any]],
        at_once: int,
        keys: list[str],
        *,
        reads: bool = False,
    ) -> list[Any]:
        """Ask chunk by chunk, two of them side by side; distinct keys, answers in order."""
        client = self._client

        async def ask(some: list[str]) -> list[Any]:
            try:
                return await client.run(client.small, verb, job, some, reads=reads, keys=len(some))
            except RpcError as exc:  # an outage is told key by key, as it is while it begins
                return [exc.with_traceback(None)] * len(some)

        if len(keys) <= at_once:
            return await ask(keys) if keys else []
        chunks = [keys[i : i + at_once] for i in range(0, len(keys), at_once)]
        answers: list[list[Any]] = [[]] * len(chunks)

        async def ask_every(first: int) -> None:
            for i in range(first, len(chunks), WIDTH):
                answers[i] = await ask(chunks[i])

        await together(ask_every(first) for first in range(WIDTH))
        return [answer for chunk in answers for answer in chunk]

    def _settle(
        self, verb: str, results: Any, answers: Sequence[Any], *, return_exceptions: bool
    ) -> None:
        failed = [answer for answer in answers if isinstance(answer, MooncakeError)]
        if failed and not return_exceptions:
            raise BatchError(
                f"{verb} failed for {len(failed)} of {len(answers)} keys",
                results=results,
                rank=self.rank,
            )

    def _check_keys(self, keys: Iterable[str], verb: str) -> list[str]:
        if isinstance(keys, (str, bytes)):
            raise InvalidArgumentError(
                f"{verb} needs an iterable of keys, not one {type(keys).__name__}; "
                "put it into a list",
                rank=self.rank,
            )
        try:
            wanted = list(keys)
        except TypeError as exc:
            raise InvalidArgumentError(
                f"{verb} needs an iterable of keys: {exc}", rank=self.rank
            ) from None
        for key in wanted:
            self._check_key(key, verb)
        return wanted

    def _check_key(self, key: object, verb: str) -> None:
        if type(key) is str and key and key.isascii():
            return  # most keys, and quicker than all the checks
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


def _where(name: str) -> str:
    if hasattr(AwaitableMethods, name):
        return (
            f": {name} is a method of the binding, await store.engine.{name}(…); for the verb that "
            "does it see docs/from-the-binding.md"
        )
    meant = nearest(name, [each for each in dir(Store) if not each.startswith("_")])
    return f": did you mean {meant!r}?" if meant is not None else ""


def _tell_health(store_ref: weakref.ref[Store], on_health: Callable[[Health], object]) -> None:
    store = store_ref()
    if store is None:
        return
    health = store.health()

    def tell() -> None:
        try:
            on_health(health)
        except Exception:
            store._client.log.exception("an on_health callback failed")  # noqa: SLF001  # it is ours

    store._client.call_on_loop(tell)  # noqa: SLF001  # it is ours


def _travels_alone(block: Block) -> bool:
    return block.mutable or block.nbytes > MERGED_VALUE


def _is_empty(part: Any) -> bool:
    try:
        return not memoryview(part).nbytes
    except (TypeError, ValueError, BufferError):
        return False  # no buffer at all, which is told where it is laid out


def _caller_may_write(block: Block | memoryview) -> bool:
    """Whether the engine would read memory that its owner may change meanwhile."""
    return block.mutable if isinstance(block, Block) else not block.readonly

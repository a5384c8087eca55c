"""Registered memory in the hands of one call, until the engine has let go of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Any, cast

import anyio

from aiomooncake.buffers import Buffer, Owner, Place, Slice
from aiomooncake.engine.client import EngineClient
from aiomooncake.errors import InvalidArgumentError
from aiomooncake.observe.logs import StoreLog

__all__ = ["Use"]

_nbytes, _buffer = attrgetter("nbytes"), attrgetter("buffer")


class Use:
    """The memory of one call; ``async with`` around all that the call does.

    It is held by the call itself, and once more by each job that the memory is given to
    (:meth:`hold`); when the last of them has ended the memory is the caller's again. A call that
    fails or is cancelled waits for that before it raises, unless there is an ``on_release``. After
    a transfer that came near the engine's own limit the memory is given back when the native object
    is torn down: until then it may be written into.

    Args:
        store: The store that is called.
        client: Its client.
        verb: Its verb, for messages.
        writes: Whether the engine writes into the memory.
        on_release: Called on the loop, once, when the memory is the caller's again; also when it
            was refused, so that a count of references that the caller keeps comes out right. Not
            when a task is cancelled before its first step: a coroutine that never began runs
            nothing.
    """

    def __init__(
        self,
        store: Owner,
        client: EngineClient,
        verb: str,
        *,
        writes: bool,
        on_release: Callable[[], object] | None,
    ) -> None:
        self._store = store
        self._client = client
        self._refused = client.gate.tainted is not None  # the engine will not hear of the memory
        self._verb = verb
        self._writes = writes
        self._on_release = on_release
        self._buffers: set[Buffer] = set()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._holders = 1
        self._over: asyncio.Future[None] = self._loop.create_future()

    @property
    def drains(self) -> bool:
        """Whether the call is waited for when it is cancelled."""
        return self._on_release is None

    def take(self, place: Place | Sequence[Place]) -> Slice | list[Slice]:
        """Check memory and take it; a slice, or several.

        Raises:
            InvalidArgumentError: Not registered memory of this store, empty, closed, or read-only
                where the engine would write.
        """
        pieces: Sequence[Any] = place if isinstance(place, (list, tuple)) else [place]
        if not pieces:
            raise InvalidArgumentError(
                f"{self._verb} got no memory; give slices", rank=self._store.rank
            )
        parts = [self._slice(piece) for piece in pieces]
        self._take_slices(parts)
        return parts if len(parts) > 1 else parts[0]

    def take_all(self, places: Sequence[Place | Sequence[Place]]) -> Sequence[Slice | list[Slice]]:
        """Check and take the memory of many keys, as :meth:`take` does for each.

        Many calls name hundreds of slices, so the usual ones are looked at all at once.
        """
        kinds = set(map(type, places))
        if kinds == {Slice}:
            self._take_slices(places)  # type: ignore[arg-type]
            return places  # type: ignore[return-value]
        if kinds == {list} and all(places):
            parts: list[Any] = list(chain.from_iterable(places))  # type: ignore[arg-type]
            if set(map(type, parts)) == {Slice}:
                self._take_slices(parts)
                lists = cast("Sequence[list[Slice]]", places)
                return [list(some) if len(some) > 1 else some[0] for some in lists]
        return [self.take(place) for place in places]

    def _take_slices(self, parts: Sequence[Slice]) -> None:
        if not all(map(_nbytes, parts)):
            raise InvalidArgumentError(f"{self._verb} got an empty slice", rank=self._store.rank)
        for buffer in set(map(_buffer, parts)) - self._buffers:
            if self._writes and buffer.readonly:
                raise InvalidArgumentError(
                    f"{self._verb} would write into read-only memory", rank=self._store.rank
                )
            buffer.check(self._store, self._verb)
            buffer.take()
            self._buffers.add(buffer)

    def _slice(self, piece: object) -> Slice:
        part = piece[:] if isinstance(piece, Buffer) else piece
        if not isinstance(part, Slice):
            raise InvalidArgumentError(
                f"{self._verb} needs registered memory (await store.register(...) or "
                f"store.allocate(...)), not {type(part).__name__}",
                rank=self._store.rank,
            )
        return part

    def hold(self) -> None:
        """Note that a job is given the memory; it ends its use."""
        with self._lock:
            self._holders += 1

    def end(self) -> None:
        """Note that a job has let go of the memory, or was never made; from any thread."""
        if self._ended():
            self._let_go()

    def _let_go(self) -> None:
        late = self._client.late_writes
        if late is None or self._refused:
            self._give_back()
        else:
            late.add_done_callback(lambda _: self._give_back())

    def _give_back(self) -> None:
        idle = [buffer.give_back() for buffer in self._buffers]
        try:
            self._loop.call_soon_threadsafe(self._tell, idle)
        except RuntimeError:  # the loop is closed, but the memory's owner must hear of it
            self._release()
            _tell_owners(idle)

    async def __aenter__(self) -> Use:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        wait = exc is not None
        if self._ended():
            if self._client.late_writes is None or self._refused:
                self._tell([buffer.give_back() for buffer in self._buffers])
                return
            self._let_go()
            wait = True
        if wait and self.drains:
            cancelled = await self._drained()
            if cancelled is not None and exc is None:
                raise cancelled

    def _ended(self) -> bool:
        """Take one holder away; whether it was the last."""
        with self._lock:
            self._holders -= 1
            return not self._holders

    def _tell(self, owners: Sequence[Callable[[], None] | None]) -> None:
        if not self._over.done():
            self._over.set_result(None)
        self._release()
        _tell_owners(owners)

    @property
    def log(self) -> StoreLog:
        """The logger, for what concerns the store."""
        return StoreLog(self._store.rank, self._store.hostname)

    def _release(self) -> None:
        if self._on_release is not None:
            try:
                self._on_release()
            except Exception:
                self.log.exception("an on_release callback failed")

    async def _drained(self) -> asyncio.CancelledError | None:
        """Wait until the engine has let go, however often this task is cancelled."""
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._over.done():
                try:
                    await asyncio.shield(self._over)
                except asyncio.CancelledError as exc:
                    cancelled = exc
        return cancelled

    def __repr__(self) -> str:
        return f"<Use of {len(self._buffers)} buffers by {self._verb}>"


def _tell_owners(owners: Sequence[Callable[[], None] | None]) -> None:
    """Let those go on who wait for the end of a buffer; after ``on_release`` was called."""
    for tell in owners:
        if tell is not None:
            tell()

"""The verbs that move values without a copy: views and registered memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from aiomooncake._buffers import address_of
from aiomooncake._values import size_argument
from aiomooncake.avoiding import suspect_owners
from aiomooncake.batching import Waiting
from aiomooncake.buffers import (
    Buffer,
    Place,
    Slice,
    memory_of,
)
from aiomooncake.config import split_address
from aiomooncake.engine.blocks import free_unused
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    NoSpaceError,
    StoreClosedError,
    TaintedStoreError,
    error_from_code,
)
from aiomooncake.load import Load
from aiomooncake.many import ManyMoves
from aiomooncake.master import probe_alive
from aiomooncake.memory import map_memory, register_memory
from aiomooncake.moves import Progress
from aiomooncake.opening import Opening
from aiomooncake.transfers import Transfers
from aiomooncake.use import Use

if TYPE_CHECKING:
    from aiomooncake.batching import Batching
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.views import Sight

__all__ = ["ZeroCopyVerbs"]

log = logging.getLogger("aiomooncake")

# Seconds in which a stand-alone client shows that it runs.
_PARTNER_TIMEOUT = 2.0
_nbytes = attrgetter("nbytes")

_AWAY = 2  # of health_check()
# Keys whose memory is checked in one turn of the loop: about 2 ms.
_CHECKED = 1000


class ZeroCopyVerbs:
    """What a store does with memory that stays where it is. Part of :class:`Store`."""

    rank: int | str | None
    _client: EngineClient
    _transfers: Transfers

    # What the store itself does for these verbs.
    if TYPE_CHECKING:

        @property
        def hostname(self) -> str: ...  # noqa: D102  # the store's, too
        def _merging(self) -> Batching: ...
        def _check_key(self, key: object, verb: str) -> None: ...
        def _check_keys(self, keys: Iterable[str], verb: str) -> list[str]: ...
        def _groups_of(
            self, config: ReplicateConfig | None, keys: int, verb: str
        ) -> Sequence[str | None]: ...
        def _settle(
            self, verb: str, results: Any, answers: Sequence[Any], *, return_exceptions: bool
        ) -> None: ...

    # ------------------------------------------------------------------ memory without copies

    def view(self, key: str) -> Opening[memoryview | None]:
        """Look at a value where the engine put it; enter it with ``async with``.

        It gives a read-only ``memoryview``, or None for a miss. The view ends with the block:
        using it afterwards raises ``ValueError``. A view that was derived from it (a slice, a
        NumPy array) stays readable for as long as it lives, and holds the memory.
        """
        self._check_key(key, "view")
        seen: list[Sight] = []

        async def look() -> memoryview | None:
            seen.extend(sight for sight in await self._look([key]) if sight is not None)
            return seen[0].view if seen else None

        return Opening("a view", look(), partial(_end_views, seen))

    def view_many(self, keys: Iterable[str]) -> Opening[list[memoryview | None]]:
        """Look at many values: a list aligned with the keys; otherwise as :meth:`view`.

        Raises:
            BatchError: Some keys failed.
        """
        wanted = self._check_keys(keys, "view_many")
        seen: list[Sight] = []

        async def look() -> list[memoryview | None]:
            unique = list(dict.fromkeys(wanted))
            sights = dict(zip(unique, await self._look(unique), strict=True))
            seen.extend(sight for sight in sights.values() if sight is not None)
            views = {key: sight.view if sight else None for key, sight in sights.items()}
            return [views[key] for key in wanted]

        return Opening("a view", look(), partial(_end_views, seen))

    def allocate(self, nbytes: int | str) -> Opening[Buffer]:
        """Make registered memory that the store owns: page-aligned; await it or enter it.

        A dummy client's is shared with the stand-alone client process.

        Args:
            nbytes: Size in bytes, or text such as ``"64MiB"``.

        Raises:
            InvalidArgumentError: That is no size.
            NoSpaceError: This machine has not so much memory.
        """
        size = size_argument(nbytes, "allocate", "nbytes", self.rank)
        if not size:
            raise InvalidArgumentError("allocate needs at least one byte", rank=self.rank)
        shared = self._transfers.shared
        make = map_memory if shared is None else shared.allocate

        async def allocated() -> Buffer:
            await self._partner_answers("allocate")
            # Shared memory is mapped with all its pages, which takes its time.
            try:
                view = await self._client.run(self._client.control, "allocate", make, size)
            except MooncakeError:
                raise
            except (OSError, MemoryError, OverflowError) as exc:
                raise NoSpaceError(
                    f"this machine has no {size} bytes of memory to allocate ({exc}); take less",
                    rank=self.rank,
                ) from exc
            return await self._registered(address_of(view), size, view, view)

        return Opening("registered memory", allocated(), Buffer.aclose)

    def register(
        self,
        memory: object | None = None,
        *,
        address: int | None = None,
        nbytes: int | None = None,
        owner: object = None,
    ) -> Opening[Buffer]:
        """Register the caller's own memory; await it or enter it.

        Args:
            memory: Anything contiguous with the buffer protocol, or …
            address: … an address, of a torch tensor say, which is believed: where no memory is, the
                first call that uses it ends the process,
            nbytes: with a size in bytes,
            owner: and what must live as long as the memory is registered.

        Raises:
            InvalidArgumentError: Neither, or not contiguous.
            BufferTooSmallError, MooncakeError: The engine refuses the memory.
        """
        start, size, view = memory_of(memory, address, nbytes, self.rank)
        return Opening(
            "registered memory",
            self._registered(start, size, view, owner if memory is None else memory),
            Buffer.aclose,
        )

    async def put_from(
        self,
        key: str,
        memory: Place | Sequence[Place],
        *,
        config: ReplicateConfig | None = None,
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Store a value straight from registered memory; otherwise as :meth:`put`.

        Args:
            key: The key.
            memory: A buffer, a slice, or a list of slices that make up one value.
            config: Placement options.
            on_release: Called on the loop, once, when the engine no longer reads the memory.
                With it a cancelled call raises at once; without it, it waits for the engine first.
                A task that is cancelled before its first step runs nothing of this, so nothing is
                called then: count references in the task that awaits it, not where it is made.
            on_progress: Called on the loop with bytes done and bytes in all, for large values.
        """
        async with Use(self, self._client, "put_from", writes=False, on_release=on_release) as use:
            self._check_key(key, "put_from")
            load = _load([key], [use.take(memory)], self._groups_of(config, 1, "put_from"))
            tell = self._progress(on_progress)
            (error,) = await self._puts(use, config, tell=tell).run(load)
        if error is not None:
            raise error

    async def get_into(
        self,
        key: str,
        memory: Place | Sequence[Place],
        *,
        offset: int | None = None,
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> int | None:
        """Read a value straight into registered memory.

        Args:
            key: The key.
            memory: A buffer, a slice, or a list of slices that are filled one after the other.
            offset: Read the value from this byte on, as much as the memory holds (one slice). A
                value that is upserted meanwhile may be read as a mix of both.
            on_release: As for :meth:`put_from`.
            on_progress: As for :meth:`put_from`.

        Returns:
            How many bytes were read; None when the key is not there.

        Raises:
            BufferTooSmallError: The value is larger than the memory.
        """
        async with Use(self, self._client, "get_into", writes=True, on_release=on_release) as use:
            self._check_key(key, "get_into")
            load = _load([key], [use.take(memory)])
            if offset is not None and (not _is_offset(offset) or isinstance(load.memory[0], list)):
                raise InvalidArgumentError(
                    "get_into takes an offset of 0 or more, and one slice with it", rank=self.rank
                )
            tell = self._progress(on_progress)
            if offset is not None:
                return await self._get_alone(use, tell, load, offset)
            read: int | MooncakeError | None
            (read,) = await self._gets(use, tell=tell).run(load)
        if isinstance(read, MooncakeError):
            raise read
        return read

    async def put_many_from(
        self,
        items: Mapping[str, Place | Sequence[Place]],
        *,
        config: ReplicateConfig | None = None,
        return_exceptions: bool = False,
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> dict[str, MooncakeError | None]:
        """Store many values straight from registered memory, as :meth:`put_from` does each.

        Args:
            items: For each key a buffer, a slice, or a list of slices that make up one value.
            config: Placement options.
            return_exceptions: As for :meth:`put_many`.
            on_release: Called once, when the engine has let go of all the memory.
            on_progress: Called with the bytes of memory that are done, and of all, after each key.

        Raises:
            BatchError: Some keys failed, the others are stored.
        """
        async with Use(
            self, self._client, "put_many_from", writes=False, on_release=on_release
        ) as use:
            load = await self._take_all(items, use, "put_many_from", config)
            answers: list[Any] = await self._puts(use, config, on_progress).run(load)
        results = dict(zip(load.keys, answers, strict=True))
        self._settle("put_many_from", results, answers, return_exceptions=return_exceptions)
        return results

    async def get_many_into(
        self,
        items: Mapping[str, Place | Sequence[Place]],
        *,
        return_exceptions: bool = False,
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> list[Any]:
        """Read many values straight into registered memory, as :meth:`get_into` does each.

        They come when the last of them is there. A peer that does not answer costs seconds then,
        after which its keys fail, and all others are right: memory that the engine may still write
        into can't be read into a second time, so there is no way around that peer meanwhile.

        Args:
            items: For each key a buffer, a slice, or a list of slices.
            return_exceptions: Put the error of a key in its place instead of raising.
            on_release: As for :meth:`put_many_from`.
            on_progress: As for :meth:`put_many_from`.

        Returns:
            A list aligned with the keys: bytes read, or None where a key is not there.

        Raises:
            BatchError: Some keys failed; ``.results`` has an int, None or an error for each.
        """
        async with Use(
            self, self._client, "get_many_into", writes=True, on_release=on_release
        ) as use:
            load = await self._take_all(items, use, "get_many_into")
            answers = await self._gets(use, on_progress).run(load)
        self._settle("get_many_into", answers, answers, return_exceptions=return_exceptions)
        return answers

    # ------------------------------------------------------------------ how

    async def _take_all(
        self,
        items: Mapping[str, Place | Sequence[Place]],
        use: Use,
        verb: str,
        config: ReplicateConfig | None = None,
    ) -> Load:
        """Check all keys and all memory, and take it, before anything is moved."""
        if not isinstance(items, Mapping):
            raise InvalidArgumentError(
                f"{verb} needs a mapping from key to memory, not {type(items).__name__}",
                rank=self.rank,
            )
        keys, places = list(items), list(items.values())  # the caller may change it meanwhile
        memory: list[Slice | list[Slice]] = []
        for start in range(0, len(keys), _CHECKED):
            if start:
                await asyncio.sleep(0)  # many of them take their time
            some = keys[start : start + _CHECKED]
            if not _are_plain(some):
                for key in some:
                    self._check_key(key, verb)
            memory += use.take_all(places[start : start + _CHECKED])
        return _load(keys, memory, self._groups_of(config, len(keys), verb))

    def _puts(
        self,
        use: Use,
        config: ReplicateConfig | None,
        on_progress: Progress | None = None,
        tell: Progress | None = None,
    ) -> ManyMoves:
        lane = partial(self._merging().puts_from, config)
        return ManyMoves(use, lane, partial(self._put_alone, use, config, tell), on_progress)

    def _gets(
        self, use: Use, on_progress: Progress | None = None, tell: Progress | None = None
    ) -> ManyMoves:
        lane = self._merging().gets_into
        return ManyMoves(use, lane, partial(self._get_alone, use, tell), on_progress)

    async def _put_alone(
        self, use: Use, config: ReplicateConfig | None, tell: Progress | None, load: Load
    ) -> None:
        """Store a value that is too large to travel with others."""
        (key,), (memory,) = load.keys, load.memory
        if config is not None and load.groups is not None:
            config = replace(config, group_ids=[load.groups[0] or ""])
        if isinstance(memory, list):
            job = partial(self._transfers.put_parts, key, memory, config)
        else:
            put = self._transfers.put
            job = partial(put, key, memory, config, replace=False, tell=tell)
        await self._merging().write_alone(
            self._client.bulk, "put_from", key, job, drain=use.drains, use=use
        )

    async def _get_alone(
        self, use: Use, tell: Progress | None, load: Load, offset: int | None = None
    ) -> int | None:
        """Read a value that is too large to travel with others, or a part of a value."""
        (key,), (memory,) = load.keys, load.memory
        job: Callable[[], int | None]
        if offset is not None:
            job = partial(self._transfers.get_range, key, memory, offset, tell)
        elif isinstance(memory, list):
            job = partial(self._transfers.get_into_parts, key, memory)
        else:
            job = partial(self._transfers.get_into, key, memory, tell)
        use.hold()
        return await self._client.run(
            self._client.bulk,
            "get_into",
            job,
            reads=True,
            drain=use.drains,
            over=use.end,
            knock=partial(suspect_owners, self._client, [key]),
        )

    async def _look(self, keys: Sequence[str]) -> list[Sight | None]:
        """Bring values into view, all of them or none."""
        lane = self._merging().views
        sights: list[Any] = await lane.ask_all([Waiting(key) for key in keys])
        failed = [sight for sight in sights if isinstance(sight, MooncakeError)]
        if failed:
            await _end_views([s for s in sights if s and s not in failed], None)
            if len(keys) == 1:
                raise failed[0]
            self._settle("view_many", sights, sights, return_exceptions=False)
        return sights

    async def _registered(
        self, address: int, nbytes: int, view: memoryview | None, owner: object
    ) -> Buffer:
        await self._partner_answers("register")
        client = self._client
        buffer = Buffer(
            self,
            address=address,
            nbytes=nbytes,
            view=view,
            owner=owner,
            unregister=self._unregister,
        )
        # The engine may touch it until it is unregistered, also if the buffer is dropped.
        client.keep_until_gone(buffer)
        try:
            await client.run(client.control, "register", self._register, buffer, drain=True)
        except BaseException:
            if buffer.registered:  # cancelled too late
                await buffer.aclose()
            else:
                client.keep_no_longer(buffer, never_known=True)
            raise
        return buffer

    def _register(self, buffer: Buffer) -> None:
        native, shared = self._client.native_object, self._transfers.shared
        register = register_memory if shared is None else shared.share
        code = register(native, buffer.address, buffer.nbytes)
        if code < 0:
            error = error_from_code(
                code,
                f"registering {buffer.nbytes} bytes of memory",
                rank=self.rank,
                hint="Memory that overlaps what is registered already is refused.",
            )
            self._client.note_error(error)
            raise error
        buffer.registered = True

    async def _partner_answers(self, verb: str) -> None:
        """Ask a dummy client's stand-alone client whether it runs.

        The engine waits without end for one that is frozen to share memory.
        """
        shared = self._transfers.shared
        if shared is None:
            return
        if self._client.ask(verb, self._partner_is_away):
            raise shared.unreachable(verb)
        host, port = split_address(shared.address, field="client_server_address")
        try:
            await probe_alive(host, port, _PARTNER_TIMEOUT)
        except OSError as exc:
            raise shared.unreachable(verb) from exc

    def _partner_is_away(self) -> bool:
        return self._client.native_object.health_check() == _AWAY

    async def _unregister(self, buffer: Buffer) -> None:
        client, shared = self._client, self._transfers.shared

        def unregister() -> None:
            if buffer.registered:
                way = None if shared is None else shared.unshare
                buffer.forget(client.native_object, way)
                client.keep_no_longer(buffer)

        await buffer.shut()
        # A store that is closed, or closing, lets go of all its memory itself.
        try:
            await client.run(
                client.control, "unregister", unregister, bounded=True, giving_back=True
            )
        except StoreClosedError:
            pass
        except TaintedStoreError:
            # Until the object is gone that knows the memory, it may write into it.
            client.keep_until_gone(buffer.held)
            buffer.registered = False
        buffer.let_go()
        if shared is not None:
            await anyio.to_thread.run_sync(free_unused)

    def _progress(self, tell: Progress | None) -> Progress | None:
        """Let a worker thread tell of its progress on the loop."""
        if tell is None:
            return None
        loop = asyncio.get_running_loop()

        def from_thread(done: int, total: int) -> None:
            # The loop may be closed under the move.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, done, total)

        return from_thread


def _load(
    keys: Sequence[str],
    memory: Sequence[Slice | list[Slice]],
    groups: Sequence[str | None] | None = None,
) -> Load:
    sizes = [
        sum(map(_nbytes, place)) if isinstance(place, list) else place.nbytes for place in memory
    ]
    if not groups or groups[0] is None:
        groups = None
    return Load(keys, memory, sizes, groups)


def _are_plain(keys: Sequence[Any]) -> bool:
    """Tell whether all keys are text that needs no closer look; quicker than one by one."""
    return set(map(type, keys)) == {str} and all(keys) and "".join(keys).isascii()


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and value >= 0


async def _end_views(seen: Sequence[Sight], _: object) -> None:
    for sight in seen:
        sight.release()

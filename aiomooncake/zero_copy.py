"""The verbs that move values without a copy: views and registered memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiomooncake._buffers import address_of
from aiomooncake._tasks import caught, together
from aiomooncake.batching import Waiting
from aiomooncake.buffers import (
    Buffer,
    Place,
    allocate_memory,
    memory_of,
    parts_of,
    released,
    use_of,
)
from aiomooncake.config import parse_size
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    StoreClosedError,
    error_from_code,
)
from aiomooncake.moves import Progress
from aiomooncake.opening import Opening
from aiomooncake.transfers import MERGED_VALUE, Transfers

if TYPE_CHECKING:
    from aiomooncake.batching import Batching
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.views import Sight

__all__ = ["ZeroCopyVerbs"]

log = logging.getLogger("aiomooncake")

# Moves that begin in one turn of the loop; each is a task until it is merged.
_AT_ONCE = 512


class ZeroCopyVerbs:
    """What a store does with memory that stays where it is. Part of :class:`Store`."""

    rank: int | str | None
    _client: EngineClient
    _transfers: Transfers

    # What the store itself does for these verbs.
    if TYPE_CHECKING:

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

        Args:
            nbytes: Size in bytes, or text such as ``"64MiB"``.
        """
        size = parse_size(nbytes, field="nbytes")
        if not size:
            raise InvalidArgumentError("allocate needs at least one byte", rank=self.rank)
        view = allocate_memory(size)
        return self._opening(address_of(view), size, view, view)

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
            address: … an address, of a torch tensor say,
            nbytes: with a size in bytes,
            owner: and what must live as long as the memory is registered.

        Raises:
            InvalidArgumentError: Neither, or not contiguous.
            BufferTooSmallError, MooncakeError: The engine refuses the memory.
        """
        start, size, view = memory_of(memory, address, nbytes, self.rank)
        return self._opening(start, size, view, owner if memory is None else memory)

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
            on_progress: Called on the loop with bytes done and bytes in all, for large values.
        """
        use = use_of(memory, self, "put_from", writes=False, on_release=on_release)
        try:
            self._check_key(key, "put_from")
            (group,) = self._groups_of(config, 1, "put_from")
            merging = self._merging()
        except BaseException:
            use.end()
            raise
        drain = on_release is None
        if len(use.blocks) > 1:
            job = partial(self._transfers.put_parts, key, use.blocks, config)
        elif use.nbytes > MERGED_VALUE:
            tell = self._progress(on_progress)
            block = use.blocks[0]
            job = partial(self._transfers.put, key, block, config, replace=False, tell=tell)
        else:
            item = Waiting(key, use.blocks[0], group, use)
            await merging.writes("put", config).ask(item, drain=drain)
            return
        lane = self._client.bulk
        await merging.write_alone(lane, "put_from", key, job, drain=drain, use=use)

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
        use = use_of(memory, self, "get_into", writes=True, on_release=on_release)
        try:
            self._check_key(key, "get_into")
            if offset is not None and (not _is_offset(offset) or len(use.blocks) > 1):
                raise InvalidArgumentError(
                    "get_into takes an offset of 0 or more, and one slice with it", rank=self.rank
                )
            merging = self._merging()
        except BaseException:
            use.end()
            raise
        drain = on_release is None
        transfers, block = self._transfers, use.blocks[0]
        if offset is not None:
            job = partial(transfers.get_range, key, block, offset, self._progress(on_progress))
        elif len(use.blocks) > 1:
            job = partial(transfers.get_into_parts, key, use.blocks)
        elif use.nbytes > MERGED_VALUE:
            job = partial(transfers.get_into, key, block, self._progress(on_progress))
        else:
            read: int | None = await merging.into.ask(Waiting(key, block, None, use), drain=drain)
            return read
        client = self._client
        return await client.run(client.bulk, "get_into", job, reads=True, drain=drain, over=use.end)

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
        plan = _Plan(items, on_release, on_progress)

        async def one(key: str, memory: Place | Sequence[Place], group: str | None) -> None:
            mine = replace(config, group_ids=[group]) if config and group is not None else config
            await self.put_from(key, memory, config=mine, on_release=plan.take())
            plan.done(memory)

        answers: list[MooncakeError | None] = []
        with plan:
            pairs = plan.pairs("put_many_from", self.rank)
            groups = self._groups_of(config, len(pairs), "put_many_from")
            self._check_items(dict(pairs), "put_many_from", writes=False)
            for start in range(0, len(pairs), _AT_ONCE):
                answers += await together(
                    caught(one, key, memory, group)
                    for (key, memory), group in zip(
                        pairs[start : start + _AT_ONCE],
                        groups[start : start + _AT_ONCE],
                        strict=True,
                    )
                )
        results = dict(zip((key for key, _ in pairs), answers, strict=True))
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
        plan = _Plan(items, on_release, on_progress)

        async def one(key: str, memory: Place | Sequence[Place]) -> int | None:
            read = await self.get_into(key, memory, on_release=plan.take())
            plan.done(memory)
            return read

        answers: list[Any] = []
        with plan:
            pairs = plan.pairs("get_many_into", self.rank)
            self._check_items(dict(pairs), "get_many_into", writes=True)
            for start in range(0, len(pairs), _AT_ONCE):
                some = pairs[start : start + _AT_ONCE]
                answers += await together(caught(one, *item) for item in some)
        self._settle("get_many_into", answers, answers, return_exceptions=return_exceptions)
        return answers

    # ------------------------------------------------------------------ how

    def _check_items(
        self, items: Mapping[str, Place | Sequence[Place]], verb: str, *, writes: bool
    ) -> None:
        """Refuse bad keys and bad memory before anything is moved."""
        for key, memory in items.items():
            self._check_key(key, verb)
            parts_of(memory, self, verb, writes=writes)

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

    def _opening(
        self, address: int, nbytes: int, view: memoryview | None, owner: object
    ) -> Opening[Buffer]:
        async def register() -> Buffer:
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
                    client.keep_no_longer(buffer)
                raise
            return buffer

        return Opening("registered memory", register(), Buffer.aclose)

    def _register(self, buffer: Buffer) -> None:
        code = self._client.native_object.register_buffer(buffer.address, buffer.nbytes)
        if code < 0:
            raise error_from_code(
                code,
                f"registering {buffer.nbytes} bytes of memory",
                rank=self.rank,
                hint="Memory that overlaps what is registered already is refused.",
            )
        buffer.registered = True

    async def _unregister(self, buffer: Buffer) -> None:
        client = self._client

        def unregister() -> None:
            if buffer.registered:
                client.native_object.unregister_buffer(buffer.address)
                buffer.registered = False
                client.keep_no_longer(buffer)

        await buffer.shut()
        # A store that is closed, or closing, lets go of all its memory itself.
        with contextlib.suppress(StoreClosedError):
            await client.run(client.control, "unregister", unregister, bounded=True)
        buffer.let_go()

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


class _Plan:
    """Many moves as one: their memory is let go of together, and their progress is added up."""

    def __init__(
        self,
        items: Mapping[str, Place | Sequence[Place]],
        on_release: Callable[[], object] | None,
        on_progress: Progress | None,
    ) -> None:
        self._items = items
        self._on_release = on_release
        self._on_progress = on_progress
        self._all = 0
        self._done = 0
        # The plan itself is one of those that hold the memory, as long as moves may begin.
        self._holders = 1
        self._lock = threading.Lock()

    def pairs(self, verb: str, rank: int | str | None) -> list[tuple[str, Place | Sequence[Place]]]:
        """Take the items over: the caller may change the mapping while they are moved.

        Raises:
            InvalidArgumentError: It is no mapping.
        """
        if not isinstance(self._items, Mapping):
            raise InvalidArgumentError(
                f"{verb} needs a mapping from key to memory, not {type(self._items).__name__}",
                rank=rank,
            )
        pairs = list(self._items.items())
        self._all = sum(_nbytes(memory) for _, memory in pairs)
        return pairs

    def take(self) -> Callable[[], object] | None:
        """Note that a move begins; what it calls at its end."""
        if self._on_release is None:
            return None
        with self._lock:
            self._holders += 1
        return self._release

    def done(self, memory: Place | Sequence[Place]) -> None:
        """Note that a move went well."""
        self._done += _nbytes(memory)
        if self._on_progress is not None:
            try:
                self._on_progress(self._done, self._all)
            except Exception:
                log.exception("an on_progress callback failed")

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            released(self._on_release)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._release()


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _nbytes(memory: object) -> int:
    if isinstance(memory, (list, tuple)):
        return sum(_nbytes(piece) for piece in memory)
    return int(getattr(memory, "nbytes", 0))


async def _end_views(seen: Sequence[Sight], _: object) -> None:
    for sight in seen:
        sight.release()

"""Values that are written or read range by range, from and into registered memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final

from aiomooncake._values import size_argument
from aiomooncake.avoiding import TRANSFER_FAIL, suspect_owners, suspect_peers, unreachable
from aiomooncake.buffers import Owner, Place, Slice
from aiomooncake.engine.since import no_method
from aiomooncake.errors import (
    BatchError,
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    ObjectExistsError,
    error_from_code,
    shorten_key,
)
from aiomooncake.moves import MISSES, PIECE, begin_puts, go_on, meaning
from aiomooncake.use import Use

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.protocol import NativeStore
    from aiomooncake.transfers import Transfers

__all__ = ["GetSession", "PutSession", "SessionVerbs"]

_INVALID: Final = -600
_NOT_FOUND: Final = -704
_CHANGED: Final = -300
_LEASE_EXPIRED: Final = -707
# A lease ends, or another read of the key ends the engine's session, of which a client has one.
_RESTARTS: Final = 3
# The master was away for the first, and is back.
_LOOKS: Final = 2
Copies = frozenset[tuple[str, int, int]]
"""Where copies of a value lie: end point, address and size of each."""


class _Session:
    """What both kinds have: a store, keys with their sizes, and moves in pieces."""

    _verb = ""
    _method = ""

    def __init__(self, store: Owner, client: EngineClient) -> None:
        self._store = store
        self._client = client
        self._sizes: dict[str, int] = {}
        self._open = False

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each value of the session."""
        return self._sizes

    def __repr__(self) -> str:
        state = "" if self._open else " closed"
        return f"<{type(self).__name__} of {len(self._sizes)} keys{state}>"

    def _take(self, use: Use, verb: str, key: str, keys: Container[str], memory: Place) -> Slice:
        """Check what a move is given, and take the memory."""
        wrong = ""
        if not self._open:
            wrong = f"{verb} needs an open session: use it inside its 'async with' block"
        elif key not in keys:
            wrong = f"{verb} got the key {shorten_key(key)}, which is not one of the session's"
        if wrong:
            raise InvalidArgumentError(wrong, key=key, rank=self._store.rank)
        block = use.take(memory)
        if not isinstance(block, Slice):
            raise InvalidArgumentError(f"{verb} takes one slice", rank=self._store.rank)
        return block

    def _bounded(self, verb: str, key: str, offset: int, size: int, wanted: int | None) -> None:
        """Refuse a range that does not lie in the value."""
        if type(offset) is int and 0 <= offset < size and offset + (wanted or 1) <= size:
            return
        what = f"from byte {offset!r} on" if wanted is None else f"{wanted} bytes at {offset!r}"
        raise InvalidArgumentError(
            f"{verb} of {shorten_key(key)}, {what}: the value has {size} bytes",
            key=key,
            rank=self._store.rank,
        )

    def _error(self, code: int, verb: str, key: str, hint: str = "") -> MooncakeError:
        error = error_from_code(code, verb, key=key, rank=self._store.rank, hint=hint)
        self._client.note_error(error)
        if code == TRANSFER_FAIL:
            suspect_peers(self._client, self._verb, key)
        return error

    def _raise(self, verb: str, errors: Mapping[str, MooncakeError | None]) -> None:
        """Raise the only error there is, or all of them."""
        failed = [error for error in errors.values() if error is not None]
        if failed and len(errors) == 1:
            raise failed[0]
        if failed:
            raise BatchError(
                f"{verb} failed for {len(failed)} of {len(errors)} keys",
                results=errors,
                rank=self._store.rank,
            )

    def _native(self) -> NativeStore:
        client = self._client
        if client.dummy:
            raise NotSupportedError(
                "a dummy client has no sessions: connect to the master instead, without "
                "client_server_address",
                rank=self._store.rank,
            )
        native = client.native_object
        if not hasattr(native, self._method):
            raise no_method(self._method, rank=self._store.rank)
        return native


class PutSession(_Session):
    """Values that are written range by range; made by :meth:`Store.put_session`.

    They can be read when the ``async with`` block has ended well; otherwise none of them is stored.
    """

    _verb = "put_session"
    _method = "batch_put_session_start"

    def __init__(
        self,
        store: Owner,
        client: EngineClient,
        transfers: Transfers,
        sizes: Mapping[str, int],
        config: ReplicateConfig | None,
    ) -> None:
        super().__init__(store, client)
        self._sizes = dict(sizes)
        self._transfers = transfers
        self._config = config
        self._written: dict[str, list[tuple[int, int]]] = {key: [] for key in sizes}
        self._turns = ExitStack()
        self._used = False

    async def write(self, key: str, offset: int, memory: Place) -> None:
        """Write a range of a value.

        Several may be under way at once. Cancelled, it waits until the engine has let go of the
        memory.

        Args:
            key: One of the session's.
            offset: Where the range begins in the value.
            memory: Registered memory of this store: a buffer or a slice.
        """
        client = self._client
        async with Use(self._store, client, "write", writes=False, on_release=None) as use:
            block = self._take(use, "write", key, self._sizes, memory)
            self._bounded("write", key, offset, self._sizes[key], block.nbytes)
            use.hold()
            await client.run(
                client.bulk, "write", self._write, key, offset, block, drain=True, over=use.end
            )
        self._written[key].append((offset, offset + block.nbytes))

    async def __aenter__(self) -> PutSession:
        client = self._client
        if self._used:  # what was written the first time is in another value
            raise InvalidArgumentError(
                "a put_session is entered once; make another one", rank=self._store.rank
            )
        self._used = True
        try:
            await client.run(client.control, "put_session", self._start, drain=True)
        except BaseException:
            if self._open:  # cancelled too late
                await self._revoke()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None:
            await self._revoke()
            return
        short = [key for key in self._sizes if not self._is_whole(key)]
        if short:
            await self._revoke()
            more = len(short) - 1
            others = f", nor {'were' if more > 1 else 'was'} {more} of the others" if more else ""
            raise InvalidArgumentError(
                f"{shorten_key(short[0])} was not written as a whole{others}: nothing of the "
                "session is stored",
                key=short[0],
                rank=self._store.rank,
            )
        client = self._client
        try:
            await client.run(client.control, "put_session", self._end, drain=True)
        except BaseException:
            await self._revoke()
            raise

    def _is_whole(self, key: str) -> bool:
        end = 0
        for start, stop in sorted(self._written[key]):
            if start > end:
                return False
            end = max(end, stop)
        return end == self._sizes[key]

    async def _revoke(self) -> None:
        client = self._client
        if not self._open:
            return
        try:
            await client.run(client.control, "put_session", self._give_up, drain=True, bounded=True)
        except MooncakeError as exc:
            # The master gives the room back by itself after a while.
            client.log.warning("%r could not be revoked: %s", self, exc)
        finally:
            self._close()

    def _close(self) -> None:
        self._open = False
        self._turns.close()

    # ------------------------------------------------------------------ on worker threads

    def _start(self) -> None:
        native = self._native()
        errors: dict[str, MooncakeError | None] = dict.fromkeys(self._sizes)
        with ExitStack() as turns:
            for key in self._sizes:
                # A large put goes by a session too, and takes one that is there for a lost one.
                if not turns.enter_context(self._transfers._put_turn(key)):  # noqa: SLF001  # it is ours
                    errors[key] = self._taken(key)
            free = [key for key, error in errors.items() if error is None]
            codes = self._start_keys(native, free) if free else []
            for key, code in zip(free, codes, strict=True):
                if code != 0:
                    errors[key] = self._error(code, "put_session", key)
            begun = [key for key in free if errors[key] is None]
            if len(begun) < len(errors) and begun:
                native.batch_put_session_revoke(begun)
            self._raise("put_session", errors)
            self._turns = turns.pop_all()
        self._open = True

    def _start_keys(self, native: NativeStore, keys: list[str]) -> list[int]:
        options = self._transfers._options(self._config)  # noqa: SLF001  # it is ours
        return begin_puts(native, keys, [self._sizes[key] for key in keys], options)

    def _taken(self, key: str) -> MooncakeError:
        return ObjectExistsError(
            f"put_session of {shorten_key(key)} refused: this store is writing the key already; "
            "wait for that to end",
            key=key,
            rank=self._store.rank,
        )

    def _write(self, key: str, offset: int, block: Slice) -> None:
        native = self._native()
        for done in range(0, block.nbytes, PIECE):
            go_on("write", key, self._store.rank)
            piece = min(PIECE, block.nbytes - done)
            code = self._client.move(
                native.batch_put_from_multi_buffer_ranges,
                [key],
                [[block.address + done]],
                [[piece]],
                [[offset + done]],
            )[0]
            if code != piece:
                raise self._error(meaning(code) if code < 0 else _INVALID, "write", key)
        self._client.counters.count_written(block.nbytes)

    def _end(self) -> None:
        native = self._native()
        codes = native.batch_put_session_end(list(self._sizes))
        gone = "The segment it was being stored in went meanwhile (-704)."
        errors = {
            key: None
            if code == 0
            else self._error(TRANSFER_FAIL, "put_session", key, gone)
            if code == _NOT_FOUND
            else self._error(code, "put_session", key)
            for key, code in zip(self._sizes, codes, strict=True)
        }
        failed = [key for key, error in errors.items() if error is not None]
        if failed:
            native.batch_put_session_revoke(failed)
        self._close()
        self._raise("the end of put_session", errors)

    def _give_up(self) -> None:
        self._native().batch_put_session_revoke(list(self._sizes))


class GetSession(_Session):
    """Values that are read range by range; made by :meth:`Store.get_session`.

    ``sizes`` has those keys that are there. It goes on when a lease ends, and notices when a value
    was removed, moved, or replaced by one of another size meanwhile. It can't notice one of the
    same size in the same place, which is where an upsert puts it: two ranges may then be of two
    values. Where readers and writers overlap, write each version under a key of its own.
    """

    _verb = "get_session"
    _method = "batch_get_session_start"

    def __init__(self, store: Owner, client: EngineClient, keys: Sequence[str]) -> None:
        super().__init__(store, client)
        self._keys = keys
        self._copies: dict[str, Copies] = {}

    async def read_into(self, key: str, offset: int, memory: Place) -> int | None:
        """Read a range of a value into registered memory.

        Several may be under way at once. Cancelled, it waits until the engine has let go of the
        memory.

        Args:
            key: One of the session's.
            offset: Where the range begins in the value.
            memory: Registered memory of this store: a buffer or a slice.

        Returns:
            How many bytes were read: what the memory holds, or what is left of the value; None
            when the key was not there.

        Raises:
            ReplicaError: The value was removed, moved, or replaced by one of another size since
                the session began. One of the same size in the same place is read without an error.
            RpcError: The master could not be asked whether the value is still there.
        """
        client = self._client
        async with Use(self._store, client, "read_into", writes=True, on_release=None) as use:
            block = self._take(use, "read_into", key, self._keys, memory)
            size = self._sizes.get(key)
            if size is None:
                return None
            self._bounded("read_into", key, offset, size, None)
            use.hold()
            return await client.run(
                client.bulk,
                "read_into",
                self._read,
                key,
                offset,
                block,
                reads=True,
                drain=True,
                over=use.end,
                knock=partial(suspect_owners, client, [key]),
            )

    async def __aenter__(self) -> GetSession:
        client = self._client
        try:
            await client.run(client.control, "get_session", self._start, reads=True, drain=True)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        client, self._open = self._client, False
        if not self._sizes:
            return
        try:
            await client.run(client.control, "get_session", self._forget, drain=True, bounded=True)
        except MooncakeError as exc:
            # What the engine keeps of it is forgotten at the next session, or with the store.
            client.log.debug("%r could not be ended: %s", self, exc)

    # ------------------------------------------------------------------ on worker threads

    def _start(self) -> None:
        native, keys = self._native(), list(self._keys)
        # In this order: a value that is replaced in between is noticed at the first read, if it has
        # another place or size. The engine tells no version of a value.
        self._copies = _copies(native, keys)
        codes = native.batch_get_session_start(keys)
        errors: dict[str, MooncakeError | None] = {}
        for key, code in zip(keys, codes, strict=True):
            size = native.get_size(key) if code == 0 and key not in self._copies else code
            if code == 0 and key in self._copies:
                size = next(iter(self._copies[key]))[2]
            errors[key] = None
            if size > 0:
                self._sizes[key] = size
            elif size not in MISSES:
                errors[key] = self._error(size or _INVALID, "get_session", key)
        self._raise("get_session", errors)
        self._open = True

    def _read(self, key: str, offset: int, block: Slice) -> int:
        native = self._native()
        wanted = min(block.nbytes, self._sizes[key] - offset)
        done = restarts = 0
        while done < wanted:
            go_on("read_into", key, self._store.rank)
            refused = unreachable(self._client, [key], "read_into").get(key)
            if refused is not None:
                raise refused
            piece = min(PIECE, wanted - done)
            code = self._client.move(
                native.batch_get_into_multi_buffer_ranges,
                [key],
                [[block.address + done]],
                [[piece]],
                [[offset + done]],
            )[0]
            if code == piece:
                done, restarts = done + piece, 0
                continue
            if code not in (_INVALID, _LEASE_EXPIRED) or restarts == _RESTARTS:
                raise self._error(meaning(code) if code < 0 else _INVALID, "read_into", key)
            restarts += 1
            code = native.batch_get_session_start([key])[0]
            if code != 0:
                raise self._error(_CHANGED if code in MISSES else code, "read_into", key)
        self._check_copies(native, key)
        self._client.counters.count_read(wanted)
        return wanted

    def _check_copies(self, native: NativeStore, key: str) -> None:
        """Refuse what was read of a value that does not lie where it lay.

        A place that is gone may have been given to another key, whose bytes these are.
        """
        before, now = self._copies.get(key), None
        if before is None:
            return
        for _ in range(_LOOKS):
            now = _copies(native, [key]).get(key)
            if now is not None:
                break
            # The engine tells of no copies also when it could not ask the master.
            size = native.get_size(key)
            if size < 0:
                raise self._error(_CHANGED if size in MISSES else size, "read_into", key)
        if now is None or not before <= now:
            raise self._error(_CHANGED, "read_into", key)

    def _forget(self) -> None:
        self._native().batch_get_session_end(list(self._sizes))


class SessionVerbs:
    """What a store does range by range. Part of :class:`Store`."""

    rank: int | str | None
    _client: EngineClient
    _transfers: Transfers

    if TYPE_CHECKING:

        @property
        def hostname(self) -> str: ...  # noqa: D102  # the store's, too
        def _check_key(self, key: object, verb: str) -> None: ...
        def _check_keys(self, keys: Iterable[str], verb: str) -> list[str]: ...
        def _groups_of(
            self, config: ReplicateConfig | None, keys: int, verb: str
        ) -> Sequence[str | None]: ...

    def put_session(
        self, sizes: Mapping[str, int | str], *, config: ReplicateConfig | None = None
    ) -> PutSession:
        """Write values range by range; enter it with ``async with``.

        Room is reserved at the beginning. All of the values can be read once the block has ended;
        when it fails, is cancelled, or leaves a value incomplete, none of them is stored.

        Args:
            sizes: The size of each value, in bytes or as text such as ``"64MiB"``.
            config: Placement options.

        Raises:
            InvalidArgumentError: A size that can't be; or, at the end of the block, a value that
                was not written as a whole.
            ObjectExistsError: The only key is taken, or being written.
            BatchError: Several keys were asked for, and some are refused; none is reserved.
            NotSupportedError: A dummy client has no sessions.
        """
        if not isinstance(sizes, Mapping):
            raise InvalidArgumentError(
                f"put_session needs a mapping from key to size, not {type(sizes).__name__}",
                rank=self.rank,
            )
        if not sizes:
            raise InvalidArgumentError("put_session needs a key", rank=self.rank)
        checked: dict[str, int] = {}
        for key, size in sizes.items():
            self._check_key(key, "put_session")
            what = f"the size of {shorten_key(key)}"
            checked[key] = size_argument(size, "put_session", what, self.rank)
            if not checked[key]:
                raise InvalidArgumentError(
                    f"put_session of {shorten_key(key)}: an empty value can't be stored",
                    key=key,
                    rank=self.rank,
                )
        self._groups_of(config, len(checked), "put_session")
        return PutSession(self, self._client, self._transfers, checked, config)

    def get_session(self, keys: Iterable[str]) -> GetSession:
        """Read values range by range; enter it with ``async with``.

        Keys that are not there are left out of ``session.sizes``, and read as None.

        Args:
            keys: Keys.

        Raises:
            BatchError: Several keys were asked for, and some could not be.
            NotSupportedError: A dummy client has no sessions.
        """
        wanted = list(dict.fromkeys(self._check_keys(keys, "get_session")))
        if not wanted:
            raise InvalidArgumentError("get_session needs a key", rank=self.rank)
        return GetSession(self, self._client, wanted)


def _copies(native: NativeStore, keys: list[str]) -> dict[str, Copies]:
    """Tell where the copies of values in memory lie."""
    found: dict[str, Copies] = {}
    for key, replicas in native.batch_get_replica_desc(keys).items():
        places = [
            replica.get_memory_descriptor().buffer_descriptor
            for replica in replicas
            if replica.is_memory_replica()
        ]
        if places:
            found[key] = Copies((p.transport_endpoint, p.buffer_address, p.size) for p in places)
    return found

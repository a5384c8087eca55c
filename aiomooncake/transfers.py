"""How values get into the engine and out of it: blocking jobs for worker threads.

Values do not use the engine's local buffer at all: reads go by ``get_into`` into registered
scratch memory or straight into a fresh ``bytes`` object, writes by ``put_from``. These calls
answer honestly (a size, or a code that tells a miss from a failure), work for values of any
size, also with ``local_buffer_size=0``, and never hold the GIL for long.

Values above :data:`PIECE` travel in pieces of that size, by the engine's get and put sessions
where the wheel has them, so that each native call is short and far from the engine's own limit
of 60 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from aiomooncake._buffers import new_bytes
from aiomooncake.config import ReplicateConfig
from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.workers import stopping
from aiomooncake.errors import (
    InternalError,
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    OperationTimeoutError,
    error_from_code,
)
from aiomooncake.memory import (
    SCRATCH_SIZE,
    Block,
    Registrations,
    Scratch,
    ScratchPool,
    gather,
)

T = TypeVar("T")

__all__ = ["CHUNK", "PIECE", "Transfers"]

PIECE = 8 << 20
"""Bytes of one piece of a large value (engine facts: pieces of 8 MB cost nothing)."""

CHUNK = 64
"""Keys of one batch call.

The second bound, beside the transport's queue, on how long a batch on a frozen peer takes; wheels
that don't know the queue's variable have only this one.
"""

# First guess of a single read; what is larger costs a second question.
_FIRST_READ = 256 * 1024
_SLOT = SCRATCH_SIZE // CHUNK
# A session or a lease may end between two pieces, and starts again; without progress it may do
# so this often.
_RESTARTS = 3

_INVALID = -600
_NOT_READY = -703
_NOT_FOUND = -704
_EXISTS = -705
_LEASE_EXPIRED = -707
# An object whose put is not finished can't be read: to a reader it is not there yet.
_MISSES = (_NOT_FOUND, _NOT_READY)


class Transfers:
    """Moves the values of one store. Every method blocks and belongs on a worker thread.

    Args:
        client: The native client.
        rank: Rank, for error messages.
        registered_only: The transport moves only registered memory (everything but TCP).
        convert: Makes the binding's placement options of ours.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        rank: int | str | None,
        registered_only: bool,
        convert: Callable[[ReplicateConfig], object],
    ) -> None:
        self._client = client
        self._rank = rank
        self._registered_only = registered_only
        self._convert = convert
        self._pool = ScratchPool()
        # The engine may write into scratch memory until it is torn down.
        client.keep_until_gone(self._pool)
        self._registrations = Registrations()
        self._putting: set[str] = set()
        self._putting_lock = threading.Lock()

    # ------------------------------------------------------------------ reads

    def get(self, key: str) -> bytes | None:
        """Read one value; None for a proved miss."""
        native = self._client.native_object
        with self._scratch() as scratch:
            code = self._leased(native, key, scratch.address, _FIRST_READ)
            if code > 0:
                self._client.counters.count_read(code)
                return scratch.read(0, code)
        if code in _MISSES:
            return None
        if code == _INVALID:  # larger than the guess
            return self._get_large(key)
        raise self._error(code, "get", key)

    def get_chunk(self, keys: Sequence[str]) -> list[bytes | MooncakeError | None]:
        """Read up to :data:`CHUNK` distinct keys; a value, a miss or an error for each."""
        native = self._client.native_object
        found: list[bytes | MooncakeError | None] = []
        large: list[int] = []
        with self._scratch() as scratch:
            slots = [scratch.address + _SLOT * i for i in range(len(keys))]
            codes = self._client.move(native.batch_get_into, list(keys), slots, [_SLOT] * len(keys))
            self.check_length(codes, keys, "batch_get_into")
            for i, (key, code) in enumerate(zip(keys, codes, strict=True)):
                if code > 0:
                    self._client.counters.count_read(code)
                    found.append(scratch.read(_SLOT * i, code))
                elif code in _MISSES:
                    found.append(None)
                else:
                    if code in (_INVALID, _LEASE_EXPIRED):
                        large.append(i)
                    found.append(self._error(code, "get", key))
        for i in large:
            found[i] = self._caught(self.get, keys[i])
        return found

    def _get_large(self, key: str) -> bytes | None:
        native = self._client.native_object
        for _ in range(_RESTARTS):
            size = native.get_size(key)
            if size in _MISSES:
                return None
            if size < 0:
                raise self._error(size, "get", key)
            value, address = new_bytes(size)
            code = self._read_into(key, address, size, value)
            if code == size:
                self._client.counters.count_read(size)
                return value
            if code in _MISSES:
                return None
            if code < 0 and code != _INVALID:
                raise self._error(code, "get", key)
            # Replaced by a value of another size meanwhile: ask again.
        raise InternalError(
            f"get of {key!r} failed: the value changed its size {_RESTARTS} times while it was "
            "read; write it less often, or under a new key each time",
            key=key,
            rank=self._rank,
        )

    def _read_into(self, key: str, address: int, size: int, keep: object) -> int:
        native = self._client.native_object
        pieces = size > PIECE and hasattr(native, "batch_get_session_start")
        with self._registered(address, size, keep, needed=pieces) as known:
            if not (pieces and known):
                return self._leased(native, key, address, size)
            try:
                return self._read_pieces(key, address, size)
            finally:
                native.batch_get_session_end([key])

    def _read_pieces(self, key: str, address: int, size: int) -> int:
        native = self._client.native_object
        done, restarts, code = 0, 0, _LEASE_EXPIRED
        while done < size:
            if code in (_INVALID, _LEASE_EXPIRED):
                # No session yet, or its lease ran out, or another read of the key ended it.
                restarts += 1
                if restarts > _RESTARTS:
                    return code
                code = native.batch_get_session_start([key])[0]
                if code < 0:
                    return code
            self._go_on("get", key)
            piece = min(PIECE, size - done)
            code = self._client.move(
                native.batch_get_into_multi_buffer_ranges,
                [key],
                [[address + done]],
                [[piece]],
                [[done]],
            )[0]
            if code == piece:
                done += piece
                restarts = 0
            elif code >= 0 or code not in (_INVALID, _LEASE_EXPIRED):
                return code
        return done

    # ------------------------------------------------------------------ writes

    def put(
        self,
        key: str,
        block: Block | memoryview,
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> None:
        """Store one value; with ``replace`` it takes the place of the one that is there."""
        if isinstance(block, memoryview):
            block = gather(block)
        code = self._put(key, block, config, replace=replace)
        if code < 0 and code != _EXISTS:
            raise self._error(code, "upsert" if replace else "put", key)
        self._client.counters.count_written(block.nbytes)

    def put_chunk(
        self, items: Sequence[tuple[str, Block | memoryview]], config: ReplicateConfig | None
    ) -> list[MooncakeError | None]:
        """Store up to :data:`CHUNK` distinct keys; None or an error for each."""
        native = self._client.native_object
        results: list[MooncakeError | None] = [None] * len(items)
        alone: list[int] = []
        together: list[tuple[int, Block]] = []
        limit = _SLOT if self._registered_only else PIECE
        for i, (_, block) in enumerate(items):
            if isinstance(block, memoryview) or block.nbytes > limit:
                alone.append(i)
            else:
                together.append((i, block))
        if together:
            keys = [items[i][0] for i, _ in together]
            sizes = [block.nbytes for _, block in together]
            with self._staged([block for _, block in together]) as addresses:
                codes = self._client.move(
                    native.batch_put_from, keys, addresses, sizes, *self._options(config)
                )
            self.check_length(codes, keys, "batch_put_from")
            for (i, block), key, code in zip(together, keys, codes, strict=True):
                if code < 0 and code != _EXISTS:
                    results[i] = self._error(code, "put", key)
                else:
                    self._client.counters.count_written(block.nbytes)
        for i in alone:
            key, block_or_view = items[i]
            failed = self._caught(
                lambda k, b: self.put(k, b, config, replace=False), key, block_or_view
            )
            results[i] = failed
        return results

    def _put(self, key: str, block: Block, config: ReplicateConfig | None, *, replace: bool) -> int:
        native = self._client.native_object
        options = self._options(config)
        if replace and not hasattr(native, "upsert_from"):
            raise NotSupportedError(
                "this engine wheel has no upsert; remove the key and put it again, or install a "
                "newer wheel",
                key=key,
                rank=self._rank,
            )
        pieces = block.nbytes > PIECE and not replace and hasattr(native, "batch_put_session_start")
        if self._registered_only and block.nbytes <= SCRATCH_SIZE:
            with self._scratch() as scratch:
                address = scratch.write(0, block)
                move = native.upsert_from if replace else native.put_from
                return self._client.move(move, key, address, block.nbytes, *options)
        with self._registered(block.address, block.nbytes, block, needed=pieces) as known:
            if pieces and known:
                with self._put_turn(key) as mine:
                    if mine:
                        return self._write_pieces(key, block, options)
            move = native.upsert_from if replace else native.put_from
            return self._client.move(move, key, block.address, block.nbytes, *options)

    def _write_pieces(self, key: str, block: Block, options: tuple[object, ...]) -> int:
        native = self._client.native_object
        code = native.batch_put_session_start([key], [block.nbytes], *options)[0]
        if code == _INVALID:
            # A session of ours whose end was never confirmed (the master was away).
            native.batch_put_session_revoke([key])
            code = native.batch_put_session_start([key], [block.nbytes], *options)[0]
        if code < 0:
            return code
        code = _INVALID
        try:
            for done in range(0, block.nbytes, PIECE):
                self._go_on("put", key)
                piece = min(PIECE, block.nbytes - done)
                code = self._client.move(
                    native.batch_put_from_multi_buffer_ranges,
                    [key],
                    [[block.address + done]],
                    [[piece]],
                    [[done]],
                )[0]
                if code < 0:
                    return code
            code = native.batch_put_session_end([key])[0]
            return code
        finally:
            # Also when the job was told to stop between two pieces.
            if code != 0:
                native.batch_put_session_revoke([key])

    # ------------------------------------------------------------------ small helpers

    def _options(self, config: ReplicateConfig | None) -> tuple[object, ...]:
        if config is None:
            return ()
        if not isinstance(config, ReplicateConfig):
            raise InvalidArgumentError(
                f"config= takes a ReplicateConfig, not {type(config).__name__}", rank=self._rank
            )
        return (self._convert(config),)

    def _error(self, code: int, verb: str, key: str) -> MooncakeError:
        return error_from_code(code, verb, key=key, rank=self._rank)

    def _leased(self, native: NativeStore, key: str, address: int, room: int) -> int:
        """``get_into``, once more when the lease ran out before the bytes were there."""
        code = self._client.move(native.get_into, key, address, room)
        if code == _LEASE_EXPIRED:
            code = self._client.move(native.get_into, key, address, room)
        return code

    def _caught(self, fn: Callable[..., T], *args: Any) -> T | MooncakeError:
        try:
            return fn(*args)
        except MooncakeError as exc:
            return exc

    def _go_on(self, verb: str, key: str) -> None:
        if stopping():
            raise OperationTimeoutError(
                f"{verb} of {key!r} was cancelled between two pieces", key=key, rank=self._rank
            )

    def check_length(self, codes: Sequence[int], keys: Sequence[str], method: str) -> None:
        """Refuse an answer of the engine that is not one code per key."""
        if len(codes) != len(keys):
            raise InternalError(
                f"{method} answered {len(codes)} codes for {len(keys)} keys; the engine refused "
                "the call as a whole",
                rank=self._rank,
            )

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        scratch = self._pool.borrow(self._client.native_object)
        try:
            yield scratch
        finally:
            if self._client.gate.tainted is None:
                self._pool.give_back(scratch)
            else:  # the engine may still write into it
                self._client.keep_until_gone(scratch)

    @contextmanager
    def _staged(self, blocks: Sequence[Block]) -> Iterator[list[int]]:
        """Addresses the transport can read: the blocks' own, or copies in registered memory."""
        if not self._registered_only:
            yield [block.address for block in blocks]
            return
        with self._scratch() as scratch:
            yield [scratch.write(_SLOT * i, block) for i, block in enumerate(blocks)]

    @contextmanager
    def _registered(
        self, address: int, nbytes: int, keep: object, *, needed: bool
    ) -> Iterator[bool]:
        """Register memory around a move that needs it; False when it is the caller's to do.

        The engine refuses memory of which the caller has registered a part.
        """
        native = self._client.native_object
        code = _INVALID
        if needed or self._registered_only:
            code = self._registrations.enter(native, address, nbytes)
            if code < 0 and code != _INVALID:
                raise error_from_code(
                    code, f"registering {nbytes} bytes of memory", rank=self._rank
                )
        try:
            yield code == 0
        finally:
            if self._client.gate.tainted is not None:
                self._client.keep_until_gone(keep)
            elif code == 0:
                self._registrations.leave(native, address)

    @contextmanager
    def _put_turn(self, key: str) -> Iterator[bool]:
        """One put session per key; False while another put of the key has it."""
        with self._putting_lock:
            mine = key not in self._putting
            if mine:
                self._putting.add(key)
        try:
            yield mine
        finally:
            if mine:
                with self._putting_lock:
                    self._putting.discard(key)

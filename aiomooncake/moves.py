"""How one value gets into the engine and out of it: blocking jobs for worker threads.

Values do not use the engine's local buffer at all: reads go by ``get_into`` into registered
scratch memory or straight into a fresh ``bytes`` object, writes by ``put_from``. These calls
answer honestly (a size, or a code that tells a miss from a failure), work for values of any
size, also with ``local_buffer_size=0``, and never hold the GIL for long.

Values above :data:`PIECE` travel in pieces of that size, by the engine's get and put sessions
where the wheel has them, so that each native call is short and far from the engine's own limit
of 60 s.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from aiomooncake._buffers import address_of, new_bytes
from aiomooncake._codes import RPC_CODES
from aiomooncake._replicate import refusal_hint
from aiomooncake.avoiding import TRANSFER_FAIL, kept_off, suspect_peers
from aiomooncake.config import ReplicateConfig
from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.blocks import free_unused
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.shared import MemoryLostError, ScratchLostError, SharedMemory
from aiomooncake.engine.workers import stopping
from aiomooncake.errors import (
    BufferTooSmallError,
    InternalError,
    InvalidArgumentError,
    MooncakeError,
    OperationTimeoutError,
    RpcError,
    RpcTimeoutError,
    error_from_code,
    shorten_key,
)
from aiomooncake.memory import (
    SCRATCH_SIZE,
    Block,
    Registrations,
    Scratch,
    ScratchPool,
    gather,
    map_memory,
    register_memory,
)
from aiomooncake.replicas import first_copies

T = TypeVar("T")

Progress = Callable[[int, int], object]
"""Told of bytes done and bytes in all, on the thread of the job."""

__all__ = ["FIRST_READ", "MISSES", "PIECE", "Moves", "Progress", "begin_puts", "go_on", "meaning"]

PIECE = 8 << 20
"""Bytes of one piece of a large value (engine facts: pieces of 8 MB cost nothing)."""

FIRST_READ = 256 * 1024
"""Bytes of the first guess of a single read; what is larger costs a second question."""

# A session or a lease may end between two pieces, and starts again; without progress it may do
# so this often.
_RESTARTS = 3

_INVALID = -600
_NOT_READY = -703
_NOT_FOUND = -704
_EXISTS = -705
_LEASE_EXPIRED = -707
# An object whose put is not finished can't be read: to a reader it is not there yet.
MISSES = (_NOT_FOUND, _NOT_READY)


class Moves:
    """Moves the values of one store. Every method blocks and belongs on a worker thread.

    Args:
        client: The native client.
        rank: Rank, for error messages.
        registered_only: The transport moves only registered memory (everything but TCP).
        shared: Where memory comes from that a dummy client can name; it has no sessions.
        convert: Makes the binding's placement options of ours.
        master: Address of the master, for error messages.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        rank: int | str | None,
        registered_only: bool,
        shared: SharedMemory | None = None,
        convert: Callable[[ReplicateConfig], object],
        master: str = "",
    ) -> None:
        self._client = client
        self._master = master
        self._rank = rank
        self._registered_only = registered_only
        self.convert = convert
        self.shared = shared
        register = register_memory if shared is None else shared.share
        self._pool = ScratchPool(map_memory if shared is None else shared.allocate, register)
        # The engine may write into scratch memory until it is torn down.
        client.keep_until_gone(self._pool)
        self._registrations = Registrations(register)
        client.keep_until_gone(self._registrations)
        self._putting: set[str] = set()
        self._putting_lock = threading.Lock()

    # ------------------------------------------------------------------ reads

    def get(self, key: str) -> bytes | None:
        """Read one value; None for a proved miss."""
        fits, value = self._get_guessed(key)
        return value if fits else self.get_large(key)

    def _get_guessed(self, key: str) -> tuple[bool, bytes | None]:
        """Read one value if it is no larger than the guess; (False, None) when it is."""
        native = self._client.native_object
        with self._scratch() as scratch:
            code = self._leased(native, key, scratch.address, FIRST_READ)
            if code > 0:
                self._client.counters.count_read(code)
                return True, scratch.read(0, code)
        if code in MISSES:
            return True, None
        if code == _INVALID:
            return False, None
        raise self._error(code, "get", key)

    def get_large(self, key: str, size: int = 0) -> bytes | None:
        """Read one value of any size, straight into the object that is handed out.

        Args:
            key: Its key.
            size: How large it was a moment ago; 0 = not known.
        """
        native = self._client.native_object
        for _ in range(_RESTARTS):
            size = size or native.get_size(key)
            if size in MISSES:
                return None
            if size < 0:
                raise self._error(size, "get", key)
            value, address = new_bytes(size)
            code = self._read_into(key, address, size, value)
            if code == size:
                self._client.counters.count_read(size)
                return value
            if code in MISSES:
                return None
            if code < 0 and code != _INVALID:
                raise self._error(code, "get", key)
            size = 0  # replaced by a value of another size meanwhile: ask again
        raise self._restless("get", key)

    def get_into(self, key: str, block: Block, tell: Progress | None = None) -> int | None:
        """Read one value into the caller's registered memory; its size, or None for a miss."""
        native = self._client.native_object
        size = block.nbytes
        # The pieces of a large value must add up to the value, not to the room.
        known = size <= PIECE
        for _ in range(_RESTARTS):
            if not known:
                size = native.get_size(key)
                if size in MISSES:
                    return None
                if size < 0:
                    raise self._error(size, "get_into", key)
                if size > block.nbytes:
                    raise self._too_small(key, size, block.nbytes)
            code = self._read_into(key, block.address, size, block, known=True, tell=tell)
            if code > 0:
                self._client.counters.count_read(code)
                _tell_end(tell, code)
                return code
            if code in MISSES:
                return None
            if code != _INVALID:
                raise self._error(code, "get_into", key)
            known = False  # too large, or replaced by a value of another size meanwhile
        raise self._restless("get_into", key)

    def get_range(
        self, key: str, block: Block, offset: int, tell: Progress | None = None
    ) -> int | None:
        """Read some bytes of a value into registered memory, in pieces."""
        native = self._client.native_object
        code = _INVALID
        for _ in range(_RESTARTS):
            size = native.get_size(key)
            if size in MISSES:
                return None
            if size < 0:
                raise self._error(size, "get_into", key)
            wanted = min(block.nbytes, size - offset)
            if wanted <= 0:
                raise InvalidArgumentError(
                    f"get_into of {key!r} from byte {offset} on: the value has {size} bytes",
                    key=key,
                    rank=self._rank,
                )
            code = self._read_range(key, block.address, offset, wanted, tell)
            if code == wanted:
                self._client.counters.count_read(code)
                return code
            if code in MISSES:
                return None
            if code not in (_INVALID, _LEASE_EXPIRED):
                raise self._error(code, "get_into", key)
            # Replaced by a shorter value meanwhile, or not read in time.
        raise self._error(meaning(code), "get_into", key)

    def _read_range(
        self, key: str, address: int, offset: int, nbytes: int, tell: Progress | None
    ) -> int:
        native = self._client.native_object
        for done in range(0, nbytes, PIECE):
            self._go_on("get_into", key)
            piece = min(PIECE, nbytes - done)
            code: int = self._client.move(
                native.get_into_ranges,
                [address],
                [[key]],
                [[[done]]],
                [[[offset + done]]],
                [[[piece]]],
            )[0][0][0]
            if code != piece:
                return _INVALID if code >= 0 else code
            if tell is not None and nbytes > PIECE:
                tell(done + piece, nbytes)
        return nbytes

    def _restless(self, verb: str, key: str) -> MooncakeError:
        return InternalError(
            f"{verb} of {key!r} failed: the value changed its size {_RESTARTS} times while it was "
            "read; write it less often, or under a new key each time",
            key=key,
            rank=self._rank,
        )

    def _too_small(self, key: str, size: int, room: int) -> MooncakeError:
        return BufferTooSmallError(
            f"get_into of {key!r}: the value has {size} bytes, the memory {room}; give more, or "
            "offset= for a part of the value",
            code=_INVALID,
            key=key,
            rank=self._rank,
        )

    def _read_into(
        self,
        key: str,
        address: int,
        size: int,
        keep: object,
        *,
        known: bool = False,
        tell: Progress | None = None,
    ) -> int:
        """Read a value of ``size`` bytes; ``known`` memory is registered already."""
        native = self._client.native_object
        if self.shared is not None and not known:
            with self._shared_memory(self.shared, size) as shared:
                code = self._leased(native, key, shared, size)
                if code > 0:
                    ctypes.memmove(address, shared, code)
                return code
        pieces = size > PIECE and self._has_sessions(native)
        with self._registered(address, size, keep, needed=pieces, known=known) as ready:
            if not (pieces and ready):
                return self._leased(native, key, address, size)
            place = self._places(native, key)
            try:
                code = self._read_pieces(key, address, size, tell)
            finally:
                native.batch_get_session_end([key])
            if code <= 0:
                return code
            now = self._places(native, key)
            # No place is found of what is not in memory, and none when the master was not reached.
            there = size if now else native.get_size(key)
            if there < 0:
                return there
            # Removed by force, or replaced by a value that lies elsewhere, while it was read: the
            # memory may have been given to another key, whose bytes these are.
            return code if now == place else _INVALID

    def _has_sessions(self, native: NativeStore) -> bool:
        return self.shared is None and hasattr(native, "batch_put_session_start")

    def _places(self, native: NativeStore, key: str) -> list[tuple[str, int, int]]:
        """Tell where the copies of a value lie: end point, address and size of each."""
        found = []
        for replica in native.batch_get_replica_desc([key]).get(key, ()):
            if replica.is_memory_replica():
                place = replica.get_memory_descriptor().buffer_descriptor
                found.append((place.transport_endpoint, place.buffer_address, place.size))
        return found

    def _read_pieces(self, key: str, address: int, size: int, tell: Progress | None) -> int:
        native = self._client.native_object
        done, restarts, code = 0, 0, _LEASE_EXPIRED
        while done < size:
            if code in (_INVALID, _LEASE_EXPIRED):
                # No session yet, or its lease ran out, or another read of the key ended it.
                restarts += 1
                if restarts > _RESTARTS:
                    return meaning(code)
                code = native.batch_get_session_start([key])[0]
                if code < 0:
                    return code
                if native.get_size(key) != size:
                    # Replaced since the size was asked for. Pieces of a larger value would fit.
                    return _INVALID
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
                if tell is not None and done < size:
                    tell(done, size)
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
        tell: Progress | None = None,
    ) -> None:
        """Store one value; with ``replace`` it takes the place of the one that is there."""
        if isinstance(block, memoryview):
            block = gather(block)
        code = self._put(key, block, config, replace=replace, tell=tell)
        if code < 0 and code != _EXISTS:
            raise self._error(code, "upsert" if replace else "put", key, config)
        self._client.counters.count_written(block.nbytes)
        _tell_end(tell, block.nbytes)

    def _put(
        self,
        key: str,
        block: Block,
        config: ReplicateConfig | None,
        *,
        replace: bool,
        tell: Progress | None,
    ) -> int:
        native = self._client.native_object
        options = self._options(config)
        move: Callable[..., int] = native.upsert_from if replace else native.put_from
        if config is not None and config.prefer_alloc_in_same_node and not replace:
            move = self._put_on_own_host
        pieces = block.nbytes > PIECE and not replace and self._has_sessions(native)
        if self._registered_only and not block.registered and block.nbytes <= SCRATCH_SIZE:
            with self._scratch() as scratch:
                address = scratch.write(0, block)
                return self._client.move(move, key, address, block.nbytes, *options)
        if self.shared is not None and not block.registered:
            with self._shared_memory(self.shared, block.nbytes) as shared:
                ctypes.memmove(shared, block.address, block.nbytes)
                return self._client.move(move, key, shared, block.nbytes, *options)
        with self._registered(
            block.address, block.nbytes, block, needed=pieces, known=block.registered
        ) as ready:
            if pieces and ready:
                with self._put_turn(key) as mine:
                    if mine:
                        return self._write_pieces(key, [block], options, tell)
            return self._client.move(move, key, block.address, block.nbytes, *options)

    def _put_on_own_host(self, key: str, address: int, nbytes: int, *options: object) -> int:
        """``put_from``, by the only call that knows ``prefer_alloc_in_same_node``."""
        native = self._client.native_object
        return native.batch_put_from_multi_buffers([key], [[address]], [[nbytes]], *options)[0]

    @contextmanager
    def _shared_memory(self, shared: SharedMemory, nbytes: int) -> Iterator[int]:
        """Share memory for one large value; its address."""
        memory = shared.allocate(nbytes)
        address = address_of(memory)
        try:
            with self._registered(address, nbytes, memory, needed=True):
                yield address
        except MemoryLostError:
            raise ScratchLostError from None
        finally:
            del memory
            free_unused()

    def _write_pieces(
        self,
        key: str,
        blocks: Sequence[Block],
        options: tuple[object, ...],
        tell: Progress | None,
    ) -> int:
        """Store registered memory by a session; ``blocks`` make up one value, in order."""
        native = self._client.native_object
        nbytes = sum(block.nbytes for block in blocks)
        code = begin_puts(native, [key], [nbytes], options)[0]
        if code < 0:
            return code
        code = _INVALID
        try:
            for addresses, sizes, offsets in _pieces(blocks):
                self._go_on("put", key)
                code = self._client.move(
                    native.batch_put_from_multi_buffer_ranges,
                    [key],
                    [addresses],
                    [sizes],
                    [offsets],
                )[0]
                if code < 0:
                    code = meaning(code)
                    return code
                done = offsets[-1] + sizes[-1]
                if tell is not None and done < nbytes:
                    tell(done, nbytes)
            code = native.batch_put_session_end([key])[0]
            return code
        finally:
            # Also when the job was told to stop between two pieces.
            if code != 0:
                native.batch_put_session_revoke([key])

    # ------------------------------------------------------------------ small helpers

    def _options(self, config: ReplicateConfig | None) -> tuple[object, ...]:
        if config is not None and not isinstance(config, ReplicateConfig):
            raise InvalidArgumentError(
                f"config= takes a ReplicateConfig, not {type(config).__name__}", rank=self._rank
            )
        config = kept_off(config, self._client.peers)
        return () if config is None else (self.convert(config),)

    def _error(
        self, code: int, verb: str, key: str, config: ReplicateConfig | None = None
    ) -> MooncakeError:
        error: MooncakeError | None = None
        if self.shared is not None:
            error = self.shared.error(code, verb, key)
        if error is None:
            hint = f"The master is {self._master}." if code in RPC_CODES and self._master else ""
            if code == _INVALID:
                hint = refusal_hint(config, verb)
            elif code == _NOT_FOUND and verb in ("put", "upsert"):
                # Nobody asked for it: its room went while the bytes were under way.
                hint = f"The segment it was being stored in went meanwhile ({code})."
                code = TRANSFER_FAIL
            error = error_from_code(code, verb, key=key, rank=self._rank, hint=hint)
        self._client.note_error(error)
        if code == TRANSFER_FAIL:
            suspect_peers(self._client, verb, key)
        return error

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
            # Among the answers a traceback is a cycle: its frames hold the answers.
            return exc.with_traceback(None)

    def one_by_one(self, verb: str, ask: Callable[[str], T], keys: Iterable[str]) -> list[Any]:
        """Ask key by key: an answer or an error for each.

        A master that has not answered for one of them is not asked for the others, each of which
        would cost its time-out.
        """
        answers: list[Any] = []
        lost: RpcError | None = None
        for key in keys:
            if lost is not None:
                answers.append(self._error(lost.code or RPC_CODES[0], verb, key))
                continue
            answer = self._caught(ask, key)
            if isinstance(answer, RpcTimeoutError) or (
                isinstance(answer, RpcError) and self._client.master_away
            ):
                lost = answer
            answers.append(answer)
        return answers

    def _go_on(self, verb: str, key: str) -> None:
        go_on(verb, key, self._rank)

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Tell the sizes of values in memory. A key that is missing here may be anything."""
        found = first_copies(self._client.native_object, keys)
        return {key: copy.size for key, copy in found.items()}

    def check_length(self, codes: Sequence[Any], keys: Sequence[object], method: str) -> None:
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
        lost = False
        try:
            yield scratch
        except MemoryLostError:
            lost = True
            self._pool.drop()  # what is free was lost with it
            raise ScratchLostError from None
        finally:
            if self._client.gate.tainted is not None:  # the engine may still write into it
                self._client.keep_until_gone(scratch)
            elif not lost:
                self._pool.give_back(scratch)

    @contextmanager
    def _registered(
        self, address: int, nbytes: int, keep: object, *, needed: bool, known: bool = False
    ) -> Iterator[bool]:
        """Register memory around a move that needs it, unless it is known already.

        False when it could not be: the engine refuses memory of which the caller has registered
        a part.
        """
        native = self._client.native_object
        code = _INVALID
        if not known and (needed or self._registered_only):
            code = self._registrations.enter(native, address, nbytes)
            if code < 0 and code != _INVALID:
                what = f"registering {nbytes} bytes of memory"
                error = error_from_code(code, what, rank=self._rank)
                self._client.note_error(error)
                raise error
        try:
            yield known or code == 0
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


def _pieces(blocks: Sequence[Block]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Cut memory into native calls: addresses, sizes, and places in the value."""
    addresses: list[int] = []
    sizes: list[int] = []
    offsets: list[int] = []
    end, room = 0, PIECE
    for block in blocks:
        done = 0
        while done < block.nbytes:
            size = min(room, block.nbytes - done)
            addresses.append(block.address + done)
            sizes.append(size)
            offsets.append(end)
            done, end, room = done + size, end + size, room - size
            if not room:
                yield addresses, sizes, offsets
                addresses, sizes, offsets, room = [], [], [], PIECE
    if sizes:
        yield addresses, sizes, offsets


def go_on(verb: str, key: str, rank: int | str | None) -> None:
    """Go on with the next piece of a value, unless the call was told to stop.

    Raises:
        OperationTimeoutError: It was.
    """
    if stopping():
        raise OperationTimeoutError(
            f"{verb} of {shorten_key(key)} was cancelled between two pieces", key=key, rank=rank
        )


def meaning(code: int) -> int:
    """Tell what the failure of a range means whose session had begun well.

    -600 says that something is wrong with the arguments. These were right when it began: it is
    what comes of a peer that does not say its first word.
    """
    return TRANSFER_FAIL if code == _INVALID else code


def _tell_end(tell: Progress | None, nbytes: int) -> None:
    """Tell that all of a large value was moved, in pieces or as a whole."""
    if tell is not None and nbytes > PIECE:
        tell(nbytes, nbytes)


def begin_puts(
    native: NativeStore, keys: list[str], sizes: Sequence[int], options: tuple[object, ...]
) -> list[int]:
    """Begin put sessions; a code per key."""
    codes = native.batch_put_session_start(keys, sizes, *options)
    lost = [place for place, code in enumerate(codes) if code == _INVALID]
    if lost and len(codes) == len(keys):
        # Sessions of ours whose end was never confirmed (the master was away).
        again = [keys[place] for place in lost]
        native.batch_put_session_revoke(again)
        anew = native.batch_put_session_start(again, [sizes[place] for place in lost], *options)
        for place, code in zip(lost, anew, strict=True):
            codes[place] = code
    return codes

"""Memory that a dummy client shares with its stand-alone client process.

A dummy client moves no bytes itself: it names places in shared memory, and the other process reads
and writes them there. Only memory of the engine's own allocator is shared so, and only whole
blocks of it.

What the other process maps is not always what this one believes:

* A process that was restarted within a second, and one that has not heard of us for ten, maps
  nothing of ours any more, and no ping tells: moves answer -600. So that answer is looked into
  (:meth:`SharedMemory.check`).
* A process that was away when a block was given back may map it later: each dummy client shares
  everything anew then, also what belongs to others. It would take the next memory at that address
  for the old block, and read and write that one. So a block is freed only when nobody maps it.

The engine keeps one list of all shared memory of this process, and a dummy client whose
stand-alone client is away walks through it, without a lock. To take a block off the list meanwhile
is a segmentation fault, and so is to make the list grow. So it is made large before there is any
dummy client, and what is to be freed waits while one may be walking.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiomooncake.errors import (
    InvalidArgumentError,
    NotSupportedError,
    RpcError,
    RpcTimeoutError,
    code_name,
)

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding
    from aiomooncake.engine.protocol import NativeStore

T = TypeVar("T")

__all__ = ["MemoryLostError", "ScratchLostError", "SharedMemory", "mended"]

_UNREACHABLE: Final = 2  # of health_check(): set before that walk, and cleared after it
_FAILED: Final = -1
_INVALID: Final = -600
_RPC_FAILED: Final = -900
_RPC_TIMEOUT: Final = -901
_RPC_CODES: Final = (_RPC_FAILED, _RPC_TIMEOUT)
# Blocks that the engine's list has room for; each is a file descriptor too, of 1024 by default.
_ROOM: Final = 256
_SPARE: Final = 64  # of these, for what others put on the list
# Seconds in which a dummy client ends, unless its stand-alone client is frozen.
_ENDING: Final = 2.5
_REMOVE: Final = 9  # Linux's MADV_REMOVE
# How often scratch memory is lost under one job, since every restart of the other process does it.
_LOSSES: Final = 4
# Nobody stores it. To read it into memory answers -600 only where that is not shared.
_NOBODYS_KEY: Final = f"aiomooncake_nobodys_key_{uuid.uuid4().hex}"

_libc = ctypes.CDLL(None)


class MemoryLostError(RpcError):
    """The stand-alone client does not share some memory of ours any more."""

    _retryable = False


class ScratchLostError(Exception):
    """Scratch memory was lost under a job, which can be done again with other."""


class SharedMemory:
    """The engine's allocator of shared memory (``MooncakeHostMemAllocator``), for one store.

    Attributes:
        address: The stand-alone client.
        by_value: Whether the engine shares memory of its own, by which it moves values itself.

    Args:
        binding: The loaded binding.
        config: What is connected to.
        rank: Rank of the store, for messages.

    Raises:
        NotSupportedError: This wheel has none.
    """

    def __init__(self, binding: Binding, config: StoreConfig, rank: int | str | None) -> None:
        allocator_class = getattr(binding.module, "MooncakeHostMemAllocator", None)
        if allocator_class is None:
            raise NotSupportedError(
                f"engine {binding.version or '(unknown version)'} has no "
                "MooncakeHostMemAllocator, without which a dummy client can't move values: "
                "install a newer wheel",
                rank=rank,
            )
        self._allocator = allocator_class()
        self.address = config.client_server_address or ""
        self.by_value = config.mem_pool_size > 0
        self._rank = rank
        self._blocks: dict[int, int] = {}  # what we made: from address to size
        self._foreign: dict[int, int] = {}  # what others made and we share
        with _lock:
            if not _clients:
                _make_room(self._allocator)

    def attach(self, native: NativeStore) -> None:
        """Note a dummy client of this process that was set up."""
        _clients.add(native)

    @contextmanager
    def detached(self, native: NativeStore) -> Iterator[None]:
        """Give back what others made, and forget the dummy client, which is torn down inside."""
        for address in list(self._foreign):
            # The engine would never share it again otherwise.
            if self.unshare(native, address) in _RPC_CODES:
                break
        began = time.monotonic()
        with _lock:
            _clients.discard(native)
            if native.health_check() == _UNREACHABLE:
                began = 0.0
            _ending.append(began)
        try:
            yield
        finally:
            with _lock:
                _ending.remove(began)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> memoryview:
        """Map shared memory, with all its pages; it is freed when nothing refers to it any more.

        Blocking, without the GIL: about 1 s for a GB.

        Raises:
            MemoryError: The system has not so much.
            RpcError: So many blocks can't be shared while a stand-alone client does not answer.
        """
        global _blocks  # noqa: PLW0603
        self.free_unused()
        with _lock:
            if _blocks >= _ROOM - _SPARE and _walking():
                raise self.unreachable(f"allocating {nbytes} bytes of memory")
            _blocks += 1
        try:
            address = self._allocator.alloc(nbytes)
        except RuntimeError as exc:
            with _lock:
                _blocks -= 1
            raise MemoryError(f"can't share {nbytes} bytes of memory: {exc}") from None
        self._blocks[address] = nbytes
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        freed = weakref.finalize(memory, _waiting.append, (self._allocator, self._blocks, address))
        freed.atexit = False
        return memoryview(memory).cast("B")

    def free_unused(self) -> None:
        """Free what nothing refers to any more, if that is possible now. Blocking."""
        # One thread at a time, since it may wait for a stand-alone client that is frozen.
        if _waiting and _freeing.acquire(blocking=False):
            try:
                _free_waiting()
            finally:
                _freeing.release()

    # ------------------------------------------------------------------ sharing it

    def share(self, native: NativeStore, address: int, nbytes: int) -> int:
        """Let the stand-alone client map a block of memory; 0, as the binding's call answers.

        Raises:
            RpcError: It does not answer.
            InvalidArgumentError: It maps the block already.
            NotSupportedError: This memory can't be shared.
        """
        what = f"registering {nbytes} bytes of memory"
        if address in self._foreign:
            raise InvalidArgumentError(
                f"{what} failed: they are registered with this store already", rank=self._rank
            )
        if self._maps(native, address, what) and not _taken_off(native, address, nbytes):
            raise NotSupportedError(
                f"{what} failed: the stand-alone client {self.address} takes them for other "
                "memory, which was freed while it was registered: make new memory",
                rank=self._rank,
            )
        code = native.register_buffer(address, nbytes)
        ours = address in self._blocks
        # Memory that another store has registered answers 0, and is not shared.
        if code == 0 and (ours or self._maps(native, address, what)):
            if not ours:
                self._foreign[address] = nbytes
            return 0
        if code and (ours or _look(native, address) in _RPC_CODES):
            raise self.unreachable(what)
        raise NotSupportedError(
            f"{what} failed: a dummy client takes only memory that it can share with the "
            "stand-alone client, a whole block at a time, and one that no other store of this "
            "process has registered: use await store.allocate(...), or a block of its own of "
            "mooncake.store.MooncakeHostMemAllocator",
            code=code or None,
            rank=self._rank,
        )

    def unshare(self, native: NativeStore, address: int) -> int:
        """Let the stand-alone client map a block no longer; the engine's code."""
        self._foreign.pop(address, None)
        return native.unregister_buffer(address)

    def _maps(self, native: NativeStore, address: int, what: str) -> bool:
        code = _look(native, address)
        if code in _RPC_CODES:
            raise self.unreachable(what, code)
        return code != _INVALID

    # ------------------------------------------------------------------ what went wrong

    def check(self, native: NativeStore, args: Sequence[Any], answer: Any) -> None:
        """Look whether a move failed because its memory is not shared any more.

        Args:
            native: The client.
            args: The arguments of the native call.
            answer: What it answered: a code, or codes in lists.

        Raises:
            MemoryLostError: Some of the memory is not.
            RpcError: The stand-alone client does not tell.
        """
        if isinstance(answer, int):
            if answer != _INVALID:
                return
        elif not answer or (isinstance(answer[0], int) and _INVALID not in answer):
            return
        starts = {self._start_of(address): None for address in _refused(args, answer)}
        for start in starts:
            if not self._maps(native, start, "the call"):
                raise MemoryLostError(
                    f"the stand-alone client {self.address} does not share this memory any more: "
                    "it was restarted, or has not heard of this process for 10 s. Allocate (or "
                    "make) the memory anew, or connect again",
                    code=_INVALID,
                    rank=self._rank,
                )

    def _start_of(self, address: int) -> int:
        """Find the block that an address is in, so that many of them need one question."""
        for blocks in (self._blocks, self._foreign):
            for start, nbytes in list(blocks.items()):
                if start <= address < start + nbytes:
                    return start
        return address

    def error(self, code: int, action: str, key: str) -> RpcError | None:
        """Make the error of a code that is about the stand-alone client."""
        if code == _FAILED and action == "exists":
            code = _RPC_FAILED  # the engine's batch call answers -1 for it
        if code in _RPC_CODES:
            return self.unreachable(f"{action} of {key!r}", code, key)
        return None

    def unreachable(self, what: str, code: int = _RPC_FAILED, key: str | None = None) -> RpcError:
        """Make the error of a stand-alone client that does not answer."""
        kind = RpcTimeoutError if code == _RPC_TIMEOUT else RpcError
        return kind(
            f"{what} failed: {code} {code_name(code)}. The stand-alone client {self.address} "
            "(client_server_address) does not answer, or its master does not: check that both "
            "run, then try again.",
            code=code,
            key=key,
            rank=self._rank,
        )

    def __repr__(self) -> str:
        return f"<SharedMemory {len(self._blocks)} blocks with {self.address}>"


def mended(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Do a job again when scratch memory is lost under it; what it stored already stays stored."""
    for _ in range(_LOSSES):
        try:
            return fn(*args, **kwargs)
        except ScratchLostError:
            continue
    raise RpcError(
        "the stand-alone client was restarted again and again under the call: let it run, then "
        "try again",
        code=_RPC_FAILED,
    )


def _refused(args: Sequence[Any], answer: Any) -> Iterator[int]:
    """List the addresses that answers of -600 are about."""
    memory = args[1]
    if args[0] and isinstance(args[0][0], int):  # get_into_ranges begins with the memory
        memory = args[0]
    if isinstance(answer, int):
        yield memory
        return
    for place, code in zip(memory, answer, strict=True):
        if _is_refused(code):
            yield from (place,) if isinstance(place, int) else place


def _is_refused(code: Any) -> bool:
    return code == _INVALID if isinstance(code, int) else any(map(_is_refused, code))


# --- what a stand-alone client maps -----------------------------------------------------------


def _look(native: NativeStore, address: int) -> int:
    """Ask for an address: -600 if it is not mapped (50 us), -900 if nobody answers."""
    return native.get_into(_NOBODYS_KEY, address, 1)


def _taken_off(native: NativeStore, address: int, nbytes: int) -> bool:
    """Take away what is mapped at the address of a block of ours; whether that could be done."""
    # Only what is registered can be taken away.
    native.register_buffer(address, nbytes)
    native.unregister_buffer(address)
    return _look(native, address) == _INVALID


# --- the engine's list, which is the process's -------------------------------------------------

_lock = threading.Lock()
_freeing = threading.Lock()
_clients: weakref.WeakSet[NativeStore] = weakref.WeakSet()
_ending: list[float] = []  # since when dummy clients are being torn down; 0.0: it may be walking
_has_room = False
_blocks = 0
# Filled by finalizers, which may run anywhere, also while a lock is held.
_waiting: list[tuple[Any, dict[int, int], int]] = []


def _make_room(allocator: Any) -> None:
    global _has_room  # noqa: PLW0603  # the engine's list is the process's too
    if not _has_room:
        _has_room = True
        for address in [allocator.alloc(1) for _ in range(_ROOM)]:
            allocator.free(address)


def _walking() -> bool:
    """Tell whether a dummy client may be walking through the list."""
    now = time.monotonic()
    return any(now - began > _ENDING for began in _ending) or any(
        native.health_check() == _UNREACHABLE for native in _clients
    )


def _free_waiting() -> None:
    global _blocks  # noqa: PLW0603
    with _lock:
        clients = list(_clients)
        if _walking():
            return  # who does not answer would be asked in vain
    for entry in [_waiting.pop() for _ in range(len(_waiting))]:
        allocator, blocks, address = entry
        nbytes = blocks[address]
        if not all(
            _look(native, address) == _INVALID or _taken_off(native, address, nbytes)
            for native in clients
        ):
            _waiting.append(entry)
            continue
        # Beforehand, so that the block leaves the list quickly.
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _REMOVE)
        with _lock:
            if _walking():
                _waiting.append(entry)
                continue
            del blocks[address]
            allocator.free(address)
            _blocks -= 1


def _after_fork_in_child() -> None:
    # No lock can be trusted, the allocator's own neither, and the memory is the parent's.
    global _lock, _freeing  # noqa: PLW0603  # once per process
    _lock = threading.Lock()
    _freeing = threading.Lock()
    _waiting.clear()
    _clients.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

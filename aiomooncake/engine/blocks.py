"""Blocks of shared memory: the engine's one list of them, and what other processes map of it.

The engine keeps one list of all shared memory of this process. A dummy client whose stand-alone
client is away walks through it, without a lock, again and again, and shares everything anew when
the other process is back, also what belongs to other dummy clients. Hence:

* To take a block off the list meanwhile is a segmentation fault, and so is to make the list grow.
  So it is made large before there is any dummy client, and what is to be freed waits while one may
  be walking.
* A process may map a block that was given back while it was away. It would take the next memory
  at that address for the old block, and read and write that one. So a block is freed only when
  nobody maps it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.engine.knock import answers

if TYPE_CHECKING:
    from aiomooncake.engine.protocol import NativeStore

__all__ = [
    "NOT_MAPPED",
    "attach",
    "detached",
    "free_unused",
    "look",
    "make_block",
    "make_room",
    "take_off",
]

NOT_MAPPED: Final = -600
"""What :func:`look` answers of memory that the stand-alone client does not map."""

_UNREACHABLE: Final = 2  # of health_check(): set before that walk, and cleared after it
# Blocks that the list has room for; each is a file descriptor too, of 1024 by default.
_ROOM: Final = 256
_SPARE: Final = 64  # of these, for what others put on the list
# Seconds in which a dummy client ends, unless its stand-alone client is frozen.
_ENDING: Final = 2.5
_REMOVE: Final = 9  # Linux's MADV_REMOVE
_NOBODYS_KEY: Final = f"aiomooncake_nobodys_key_{uuid.uuid4().hex}"

_libc = ctypes.CDLL(None)

_lock = threading.Lock()
_freeing = threading.Lock()
_clients: weakref.WeakKeyDictionary[NativeStore, tuple[str, int]] = weakref.WeakKeyDictionary()
_ending: list[float] = []  # since when dummy clients are being torn down; 0.0: it may be walking
_room = 0
_made = 0
# Filled by finalizers, which may run anywhere, also while a lock is held.
_waiting: list[tuple[Any, dict[int, int], int]] = []


# --- what a stand-alone client maps -----------------------------------------------------------


def look(native: NativeStore, address: int) -> int:
    """Ask whether a stand-alone client maps an address: 50 us if not, else 150 us.

    Returns:
        :data:`NOT_MAPPED`, -900 or -901 if there was no answer, any other code if it does.
    """
    # Looked up before the key is, which nobody stores.
    return native.get_into(_NOBODYS_KEY, address, 1)


def take_off(native: NativeStore, address: int, nbytes: int) -> None:
    """Take away what a stand-alone client maps at the address of a block that is on the list."""
    native.register_buffer(address, nbytes)  # only what is registered can be taken away
    native.unregister_buffer(address)


def _is_off(native: NativeStore, address: int, nbytes: int) -> bool:
    """See to it that a stand-alone client maps a block no longer; False if it does not answer."""
    if look(native, address) == NOT_MAPPED:
        return True
    take_off(native, address, nbytes)
    return look(native, address) == NOT_MAPPED


# --- who walks --------------------------------------------------------------------------------


def attach(native: NativeStore, server: tuple[str, int]) -> None:
    """Note a dummy client of this process that was set up, and its stand-alone client."""
    with _lock:
        _clients[native] = server


@contextmanager
def detached(native: NativeStore) -> Iterator[None]:
    """Forget a dummy client, which is torn down inside."""
    began = time.monotonic()
    with _lock:
        _clients.pop(native, None)
        if native.health_check() == _UNREACHABLE:
            began = 0.0
        _ending.append(began)
    try:
        yield
    finally:
        with _lock:
            _ending.remove(began)


def _walking() -> bool:
    """Tell whether a dummy client may be walking through the list."""
    now = time.monotonic()
    return any(now - began > _ENDING for began in _ending) or any(
        native.health_check() == _UNREACHABLE for native in _clients
    )


# --- the list ---------------------------------------------------------------------------------


def make_room(allocator: Any) -> None:
    """Let the list grow, once, before there is a dummy client. Blocking, about 5 ms."""
    global _room  # noqa: PLW0603  # the engine's list is the process's too
    with _lock:
        if _room or _clients or "MC_STORE_USE_HUGEPAGE" in os.environ:  # there are few of these
            return
        made: list[int] = []
        with suppress(RuntimeError):  # as far as file descriptors go
            while len(made) < _ROOM:
                made.append(allocator.alloc(1))
        for address in made:
            allocator.free(address)
        _room = len(made)


def make_block(allocator: Any, nbytes: int, blocks: dict[int, int]) -> memoryview | None:
    """Map shared memory, with all its pages; it is freed when nothing refers to it any more.

    Args:
        allocator: The engine's.
        nbytes: Its size.
        blocks: Where it is noted, from address to size, until it is freed.

    Returns:
        The memory; None when there are so many blocks that it must wait for the end of a walk.

    Raises:
        MemoryError: The system has not so much.
    """
    global _made  # noqa: PLW0603
    free_unused()
    with _lock:
        if _made >= _room - _SPARE and _walking():
            return None
        _made += 1
    try:
        address = allocator.alloc(nbytes)
    except RuntimeError as exc:
        with _lock:
            _made -= 1
        raise MemoryError(f"can't share {nbytes} bytes of memory: {exc}") from None
    blocks[address] = nbytes
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _waiting.append, (allocator, blocks, address)).atexit = False
    return memoryview(memory).cast("B")


def free_unused() -> None:
    """Free blocks that nothing refers to any more, as far as that is possible now. Blocking."""
    if _waiting:
        with _freeing:
            _free_waiting()


def _free_waiting() -> None:
    global _made  # noqa: PLW0603
    with _lock:
        clients = dict(_clients)
        if _walking():
            return
    # One that is frozen would be asked for 30 s.
    if not all(answers(server) for server in set(clients.values())):
        return
    for entry in [_waiting.pop() for _ in range(len(_waiting))]:
        allocator, blocks, address = entry
        nbytes = blocks[address]
        if not all(_is_off(native, address, nbytes) for native in clients):
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
            _made -= 1


def _after_fork_in_child() -> None:
    # No lock can be trusted, the allocator's own neither, and the memory is the parent's.
    global _lock, _freeing  # noqa: PLW0603  # once per process
    _lock = threading.Lock()
    _freeing = threading.Lock()
    _waiting.clear()
    _clients.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

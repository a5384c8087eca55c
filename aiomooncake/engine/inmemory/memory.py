"""Memory as the in-memory engine sees it: addresses, Python buffers, and the local buffer."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from threading import Lock
from typing import Any, Final

from aiomooncake._buffers import address_of

__all__ = ["LocalBuffer", "MemoryHandle", "read_buffer", "read_memory", "write_memory"]

_WOULD_CRASH: Final = (
    "this would crash the process: parts must be buffers, and the engine looks not"
)


def read_memory(ptr: int, size: int) -> bytes:
    """Copy bytes from an address."""
    return ctypes.string_at(ptr, size)


def write_memory(ptr: int, data: bytes) -> None:
    """Copy bytes to an address."""
    ctypes.memmove(ptr, data, len(data))


def read_buffer(value: Any, *, part: bool = False) -> bytes:
    """Read a Python buffer the way the binding does, mistakes included.

    It takes as many *bytes* as the buffer has *items*, in a row from the first item on: strides
    are ignored, and wider items are cut short.

    Args:
        value: Anything with the buffer protocol.
        part: Whether it is one of the pieces of ``put_parts``.

    Raises:
        TypeError: It is no buffer.
        RuntimeError: As a part it is not made of single bytes, or would crash the process.
    """
    if type(value) is bytes:
        return value
    try:
        view = memoryview(value)
    except TypeError:
        if part:
            raise RuntimeError(_WOULD_CRASH) from None
        raise TypeError("incompatible function arguments: a Buffer is wanted") from None
    if part and (view.ndim != 1 or view.itemsize != 1):
        raise RuntimeError("parts must be 1-D bytes-like")
    items = view.nbytes // view.itemsize
    return ctypes.string_at(address_of(view), items) if items else b""


class LocalBuffer:
    """The room that plain reads and writes of one client go through."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._lock = Lock()
        # Handles give back from the garbage collector, which may run inside `take`: a deque takes
        # that without a lock.
        self._returned: deque[int] = deque()

    def take(self, size: int) -> bool:
        """Take room; False when there is not enough, and for nothing at all."""
        with self._lock:
            while self._returned:
                self._free += self._returned.popleft()
            if not 0 < size <= self._free:
                return False
            self._free -= size
            return True

    def give(self, size: int) -> None:
        """Give room back."""
        self._returned.append(size)

    def fits(self, *sizes: int) -> bool:
        """Whether a call that needs these rooms at once would get them."""
        taken = []
        for size in sizes:
            if not self.take(size):
                break
            taken.append(size)
        for size in taken:
            self.give(size)
        return len(taken) == len(sizes)


class MemoryHandle:
    """A value in the local buffer, as ``get_buffer`` hands it out.

    Like the engine's own it holds its room, and stays readable after the store was closed. The
    buffer protocol is there from Python 3.12 on; ``ptr()`` and ``size()`` always.
    """

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, data: bytes, local: LocalBuffer) -> None:
        self._memory = (ctypes.c_byte * len(data)).from_buffer_copy(data)
        weakref.finalize(self, local.give, len(data)).atexit = False

    def ptr(self) -> int:
        """Address of the first byte."""
        return ctypes.addressof(self._memory)

    def size(self) -> int:
        """Size in bytes."""
        return len(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(self._memory).cast("B").cast("b")

    def __repr__(self) -> str:
        return f"<MemoryHandle of {len(self._memory)} bytes>"

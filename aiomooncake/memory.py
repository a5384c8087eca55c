"""Memory that calls name: what a caller gave, laid out as bytes, and scratch of our own."""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from typing import TYPE_CHECKING, Any

from aiomooncake._buffers import address_of, address_of_bytes, parts_of
from aiomooncake.errors import InvalidArgumentError

if TYPE_CHECKING:
    from aiomooncake.engine.binding import NativeStore

__all__ = [
    "SCRATCH_SIZE",
    "Block",
    "Registrations",
    "Scratch",
    "ScratchPool",
    "gather",
    "holds_objects",
    "layout",
    "view_of",
]

SCRATCH_SIZE = 4 << 20
"""Bytes of one scratch block; pages that no value has touched cost no memory."""

_FIELD_NAME = re.compile(r":[^:]*:")  # in the format of a structured array

# Up to here a copy is quicker than whatever it would save.
_SNAPSHOT = 64 * 1024
# Laying out strided memory holds the GIL, about 5 ns per item: a part takes well under 1 ms.
_GATHER_ITEMS = 1 << 16
_GATHER_STEP = 1 << 20


class Block:
    """Contiguous bytes at an address, and what keeps them there.

    Made for every value that is stored, so it is a plain class.

    Attributes:
        address: Address of the first byte.
        nbytes: How many bytes.
        keep: The object that keeps the memory alive and in place.
        mutable: Whether its owner may change it while the engine reads it.
        registered: Whether the engine knows the memory already.
    """

    __slots__ = ("address", "keep", "mutable", "nbytes", "registered")

    def __init__(
        self, address: int, nbytes: int, keep: object, *, mutable: bool, registered: bool = False
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.keep = keep
        self.mutable = mutable
        self.registered = registered

    def __repr__(self) -> str:
        return f"<Block {self.nbytes} bytes{' mutable' if self.mutable else ''}>"


def holds_objects(view: memoryview) -> bool:
    """Tell whether memory holds addresses of Python objects, which must not be moved."""
    return "O" in view.format and "O" in _FIELD_NAME.sub("", view.format)


def view_of(value: Any, *, verb: str, key: str, rank: int | str | None) -> memoryview:
    """Look at a value as memory.

    Raises:
        InvalidArgumentError: No buffer, an empty one, or one of Python objects.
    """
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as exc:
        raise InvalidArgumentError(
            f"{verb} of {key!r} needs bytes or an object with the buffer protocol, not "
            f"{type(value).__name__} ({exc}); for a torch tensor pass tensor.numpy(), for text "
            "text.encode()",
            key=key,
            rank=rank,
        ) from None
    if not view.nbytes:
        raise InvalidArgumentError(
            f"{verb} of {key!r} got an empty value, which the engine can't store; "
            "store a marker byte instead, or remove the key",
            key=key,
            rank=rank,
        )
    if holds_objects(view):
        raise InvalidArgumentError(
            f"{verb} of {key!r} got an array of Python objects, whose memory holds addresses in "
            "this process, not values; convert it to a numeric type, or pickle it",
            key=key,
            rank=rank,
        )
    return view


def layout(value: Any, *, verb: str, key: str, rank: int | str | None) -> Block | memoryview:
    """Lay a value out as contiguous bytes.

    The binding itself ignores strides and counts items for bytes, so that
    ``memoryview(b"abcdef")[::2]`` stores ``b"abc"``.

    Small mutable memory is copied, so that what is stored is what was given. Large strided
    memory comes back as the view it is: gathering it belongs on a worker thread
    (:func:`gather`).

    Raises:
        InvalidArgumentError: No buffer, or an empty one, which the engine can't store.
    """
    if type(value) is bytes and value:
        return _block_of(value)
    view = view_of(value, verb=verb, key=key, rank=rank)
    if not view.c_contiguous:
        return view if view.nbytes > _SNAPSHOT else _block_of(view.tobytes())
    if view.nbytes <= _SNAPSHOT:
        return _block_of(view.tobytes())
    return Block(address_of(view), view.nbytes, view, mutable=type(view.obj) is not bytes)


def _block_of(value: bytes) -> Block:
    return Block(address_of_bytes(value), len(value), value, mutable=False)


def gather(view: memoryview) -> Block:
    """Copy strided memory into contiguous memory, a part at a time (for worker threads).

    Each part holds the GIL only shortly, and ``memmove`` lets it go between two of them. The
    memory is an anonymous map, because a large ``bytearray`` is zeroed under the GIL.
    """
    whole = memoryview(mmap.mmap(-1, view.nbytes))
    address = address_of(whole)
    items = max(1, min(_GATHER_ITEMS, _GATHER_STEP // view.itemsize))
    done = 0
    for part in parts_of(view, items):
        ctypes.memmove(address + done, part, len(part))
        done += len(part)
    return Block(address, whole.nbytes, whole, mutable=False)


class Scratch:
    """One block of registered memory that jobs borrow."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SCRATCH_SIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out."""
        return self._memory[offset : offset + nbytes]

    def write(self, offset: int, block: Block) -> int:
        """Copy a block in; the address it has there."""
        ctypes.memmove(self.address + offset, block.address, block.nbytes)
        return self.address + offset

    def __repr__(self) -> str:
        return f"<Scratch {SCRATCH_SIZE} bytes>"


class ScratchPool:
    """Scratch blocks of one native client, as many as calls were ever running at once.

    A block goes back to the pool when the engine's call has returned, also that of a call that
    nobody waits for any more.
    """

    def __init__(self) -> None:
        self._free: list[Scratch] = []
        self._lock = threading.Lock()

    def borrow(self, native: NativeStore) -> Scratch:
        """Take a block, or make and register one."""
        with self._lock:
            if self._free:
                return self._free.pop()
        scratch = Scratch()
        native.register_buffer(scratch.address, SCRATCH_SIZE)
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """Return a block that the engine no longer uses."""
        with self._lock:
            self._free.append(scratch)

    def __repr__(self) -> str:
        return f"<ScratchPool free={len(self._free)}>"


class _Region:
    __slots__ = ("end", "start", "users")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.users = 0  # 0: it is being registered or unregistered


class Registrations:
    """Memory of values that is registered while calls move it.

    The engine refuses memory that overlaps what it knows already, so jobs that move the same
    memory (one buffer under two keys) share a registration, and jobs whose memory overlaps
    otherwise wait for each other.
    """

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._changed = threading.Condition()

    def enter(self, native: NativeStore, start: int, nbytes: int) -> int:
        """Register memory, or join those who have; the engine's code. 0 must be left again."""
        end = start + nbytes
        with self._changed:
            while True:
                near = [each for each in self._regions if each.start < end and start < each.end]
                if not near:
                    break
                if near[0].users and near[0].start <= start and end <= near[0].end:
                    near[0].users += 1
                    return 0
                self._changed.wait()
            region = _Region(start, end)
            self._regions.append(region)
        code = -1
        try:
            code = native.register_buffer(start, nbytes)
        finally:
            with self._changed:
                if code < 0:
                    self._regions.remove(region)
                else:
                    region.users = 1
                self._changed.notify_all()
        return code

    def leave(self, native: NativeStore, start: int) -> None:
        """Unregister memory when nobody uses it any more."""
        with self._changed:
            region = next(each for each in self._regions if each.start <= start < each.end)
            region.users -= 1
            if region.users:
                return
        native.unregister_buffer(region.start)
        with self._changed:
            self._regions.remove(region)
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Registrations {len(self._regions)} regions>"

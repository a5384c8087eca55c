"""Memory that calls name: what a caller gave, laid out as bytes, and scratch of our own."""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiomooncake._buffers import address_of, address_of_bytes, parts_of
from aiomooncake.errors import InvalidArgumentError, error_from_code

if TYPE_CHECKING:
    from aiomooncake.engine.binding import NativeStore

__all__ = [
    "SCRATCH_SIZE",
    "Block",
    "Register",
    "Registrations",
    "Scratch",
    "ScratchPool",
    "gather",
    "holds_objects",
    "join",
    "layout",
    "map_memory",
    "register_memory",
    "view_of",
]

Register = Callable[["NativeStore", int, int], int]
"""Registers memory, by address and size, with a native client; the engine's code."""

SCRATCH_SIZE = 4 << 20
"""Bytes of one scratch block; pages that no value has touched cost no memory."""

_INVALID = -600  # also: this address is known already

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
            f"{type(value).__name__} ({exc}); for a torch tensor there is "
            "put_tensor, for text pass text.encode()",
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
    whole = map_memory(view.nbytes)
    address = address_of(whole)
    items = max(1, min(_GATHER_ITEMS, _GATHER_STEP // view.itemsize))
    done = 0
    for part in parts_of(view, items):
        ctypes.memmove(address + done, part, len(part))
        done += len(part)
    return Block(address, whole.nbytes, whole, mutable=False)


def join(blocks: Sequence[Block]) -> Block:
    """Copy several pieces of memory into one (for worker threads)."""
    whole = map_memory(sum(block.nbytes for block in blocks))
    address = address_of(whole)
    done = 0
    for block in blocks:
        ctypes.memmove(address + done, block.address, block.nbytes)
        done += block.nbytes
    return Block(address, whole.nbytes, whole, mutable=False)


def map_memory(nbytes: int) -> memoryview:
    """Map anonymous memory: page-aligned, and not zeroed under the GIL."""
    return memoryview(mmap.mmap(-1, nbytes))


def register_memory(native: NativeStore, address: int, nbytes: int) -> int:
    """Register memory with a native client that takes any; the engine's code."""
    return native.register_buffer(address, nbytes)


class Scratch:
    """One block of registered memory that jobs borrow."""

    __slots__ = ("_memory", "address")

    def __init__(self, memory: memoryview) -> None:
        # A slice of a map is a bytes object already: one copy, and quicker than by a view.
        self._memory = memory.obj if isinstance(memory.obj, mmap.mmap) else memory
        self.address = address_of(memory)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out."""
        return bytes(self._memory[offset : offset + nbytes])

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

    Args:
        make: Makes the memory of a block, which must live as long as what it returns.
        register: Lets a native client know it: the engine's code.
    """

    def __init__(
        self, make: Callable[[int], memoryview], register: Register = register_memory
    ) -> None:
        self._make = make
        self._register = register
        self._free: list[Scratch] = []
        self._lock = threading.Lock()

    def borrow(self, native: NativeStore) -> Scratch:
        """Take a block, or make and register one.

        Raises:
            MooncakeError: The engine does not take it (a stand-alone client that is gone).
        """
        with self._lock:
            if self._free:
                return self._free.pop()
        scratch = Scratch(self._make(SCRATCH_SIZE))
        code = self._register(native, scratch.address, SCRATCH_SIZE)
        if code < 0 and code != _INVALID:
            raise error_from_code(code, f"registering {SCRATCH_SIZE} bytes of memory")
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """Return a block that the engine no longer uses."""
        with self._lock:
            self._free.append(scratch)

    def drop(self) -> None:
        """Let go of what is free."""
        with self._lock:
            self._free.clear()

    def renew(self, native: NativeStore) -> bool:  # noqa: ARG002  # blocks are made when needed
        """Forget the blocks that an object knew that is gone."""
        with self._lock:
            self._free.clear()
        return True

    def forget(self, native: NativeStore) -> None:
        """Unregister what is free, from a client that lives on."""
        with self._lock:
            free, self._free = self._free, []
        for scratch in free:
            native.unregister_buffer(scratch.address)

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

    Args:
        register: Lets a native client know memory: the engine's code.
    """

    def __init__(self, register: Register = register_memory) -> None:
        self._register = register
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
            code = self._register(native, start, nbytes)
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

    def renew(self, native: NativeStore) -> bool:  # noqa: ARG002  # moves register when they begin
        """Forget the regions that an object knew that is gone."""
        with self._changed:
            self._regions.clear()
            self._changed.notify_all()
        return True

    def __repr__(self) -> str:
        return f"<Registrations {len(self._regions)} regions>"

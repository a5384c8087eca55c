"""The memory that chunks live in: one pool, cut into objects that are counted by reference.

It plays the part of LMCache's pinned CPU allocator, with NumPy in the place of torch.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HEADROOM", "BytesObj", "MemoryFormat", "MemoryObj", "Pool"]

ALIGN = 512
"""Bytes that an allocation is rounded up to, as in LMCache's allocator."""

HEADROOM = 64
"""Bytes kept free in front of each object, for a header that travels with it.

So a chunk and its header are one piece of memory: they are stored and read without a copy.
"""


class MemoryFormat(Enum):
    """What the dimensions of a chunk mean; the numbers are LMCache's."""

    UNDEFINED = 0
    KV_2LTD = 1  # keys and values, layers, tokens, hidden
    KV_T2D = 2
    KV_2TD = 3
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA_FMT = 6  # one, layers, tokens, head


class Pool:
    """One block of memory, to be registered as a whole, and the objects in it; thread-safe.

    Args:
        nbytes: Its size in bytes.

    Attributes:
        memory: The whole block.
        live: How many objects are not freed.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.live = 0
        self.lock = threading.Lock()
        self._free = [(0, nbytes)]  # start and size, ordered, no two of them adjacent

    def allocate(
        self, shape: Sequence[int], dtype: npt.DTypeLike, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """Make an object with one reference, which is the caller's; None when there is no room."""
        made = self.batched_allocate(shape, dtype, fmt, 1)
        return made[0] if made else None

    def batched_allocate(
        self, shape: Sequence[int], dtype: npt.DTypeLike, fmt: MemoryFormat, count: int
    ) -> list[MemoryObj]:
        """Make so many objects, or as many as there is room for."""
        shape, dtype = tuple(shape), np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-(HEADROOM + nbytes) // ALIGN) * ALIGN
        made: list[MemoryObj] = []
        place = 0
        with self.lock:
            while len(made) < count and place < len(self._free):
                start, room = self._free.pop(place)
                fit = min(room // size, count - len(made))
                made.extend(
                    MemoryObj(self, at, size, nbytes, (shape, dtype, fmt))
                    for at in range(start, start + fit * size, size)
                )
                if room > fit * size:
                    self._free.insert(place, (start + fit * size, room - fit * size))
                    place += 1
            self.live += len(made)
        return made

    def ref_count_up(self, objs: Sequence[MemoryObj]) -> None:
        """Take one more reference to each object.

        Raises:
            ValueError: One is freed, and its memory may be another one's.
        """
        with self.lock:
            for obj in objs:
                obj.check()
            for obj in objs:
                obj.references += 1

    def ref_count_down(self, objs: Sequence[MemoryObj]) -> None:
        """Give one reference to each object back; the last one frees its memory.

        Raises:
            ValueError: There was none left: somebody gave his back twice.
        """
        with self.lock:
            for obj in objs:
                obj.check()
                obj.references -= 1
                if not obj.references:
                    self.live -= 1
                    self._take_back(obj.start - HEADROOM, obj.size)

    def _take_back(self, start: int, size: int) -> None:
        place = bisect.bisect(self._free, (start, size))
        if place < len(self._free) and self._free[place][0] == start + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start:
            place -= 1
            start, before = self._free.pop(place)
            size += before
        self._free.insert(place, (start, size))

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        with self.lock:
            return max((size for _, size in self._free), default=0)

    def __repr__(self) -> str:
        return f"<Pool {len(self.memory)} bytes, {self.live} objects>"


class MemoryObj:
    """A chunk in a pool; it lives as long as somebody has a reference.

    Attributes:
        shape: Shape of the tensor.
        dtype: Type of its items.
        fmt: What its dimensions mean.
        start: Where the tensor begins in the pool.
        nbytes: Bytes of the tensor.
        size: Bytes of the allocation.
        references: How many references there are.
    """

    __slots__ = ("_pool", "dtype", "fmt", "nbytes", "references", "shape", "size", "start")

    def __init__(
        self,
        pool: Pool,
        start: int,
        size: int,
        nbytes: int,
        tensor: tuple[tuple[int, ...], np.dtype[Any], MemoryFormat],
    ) -> None:
        self._pool = pool
        self.start = start + HEADROOM
        self.size = size
        self.nbytes = nbytes
        self.shape, self.dtype, self.fmt = tensor
        self.references = 1

    def ref_count_up(self) -> None:
        """Take one more reference; see :meth:`Pool.ref_count_up`."""
        self._pool.ref_count_up((self,))

    def ref_count_down(self) -> None:
        """Give one reference back; see :meth:`Pool.ref_count_down`."""
        self._pool.ref_count_down((self,))

    def get_ref_count(self) -> int:
        """Tell how many references there are."""
        return self.references

    def reshape(self, shape: Sequence[int], dtype: np.dtype[Any], fmt: MemoryFormat) -> None:
        """Say anew what the memory holds.

        Raises:
            ValueError: It is not that large.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 < nbytes <= self.size - HEADROOM:
            raise ValueError(f"{tuple(shape)} of {dtype} does not fit into {self!r}")
        self.shape, self.dtype, self.fmt, self.nbytes = tuple(shape), dtype, fmt, nbytes

    def get_size(self) -> int:
        """Tell the bytes of the tensor."""
        return self.nbytes

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor."""
        self.check()
        return self._pool.memory[self.start : self.start + self.nbytes]

    @property
    def tensor(self) -> npt.NDArray[Any]:
        """The tensor."""
        return self.raw.view(self.dtype).reshape(self.shape)

    @property
    def byte_array(self) -> memoryview:
        """The bytes of the tensor, as LMCache's connectors take them."""
        return self.raw.data

    @property
    def data_ptr(self) -> int:
        """Address of the tensor."""
        return int(self.raw.ctypes.data)

    def headroom(self, nbytes: int) -> memoryview:
        """Return the last bytes in front of the tensor."""
        self.check()
        return self._pool.memory[self.start - nbytes : self.start].data

    def check(self) -> None:
        """Refuse an object that is freed.

        Raises:
            ValueError: It is.
        """
        if not self.references:
            raise ValueError(f"{self!r} is freed: its memory may be another one's")

    def __repr__(self) -> str:
        return f"<MemoryObj {self.size} bytes, {self.references} references>"


class BytesObj:
    """A chunk that a serializer has made: bytes of its own, outside the pool."""

    __slots__ = ("byte_array", "shape")

    dtype = None
    fmt = MemoryFormat.BINARY_BUFFER

    def __init__(self, value: bytes) -> None:
        self.byte_array = value
        self.shape = (len(value), 0, 0, 0)

    def ref_count_up(self) -> None:
        """Do nothing: Python counts its references."""

    def ref_count_down(self) -> None:
        """Do nothing: Python counts its references."""

    def get_size(self) -> int:
        """Tell its bytes."""
        return len(self.byte_array)

    def __repr__(self) -> str:
        return f"<BytesObj {len(self.byte_array)} bytes>"

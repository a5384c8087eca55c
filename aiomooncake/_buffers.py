"""Addresses of memory that Python objects expose, and ``bytes`` that native code fills."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Iterator

__all__ = ["address_of", "address_of_bytes", "new_bytes", "parts_of"]


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (Include/pybuffer.h; unchanged from 3.10 to 3.13)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# By item, not by attribute: an attribute of ctypes.pythonapi is shared with everybody in the
# process who declares other argument types for it.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None
_new_bytes = ctypes.pythonapi["PyBytes_FromStringAndSize"]
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object

_view_of = ctypes.pythonapi["PyMemoryView_FromBuffer"]
_view_of.argtypes = [ctypes.POINTER(_PyBuffer)]
_view_of.restype = ctypes.py_object

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_madvise = getattr(_libc, "madvise", None)
_mincore = getattr(_libc, "mincore", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
# linux/mman.h; the mmap module has the first only where it was built with it, the other never.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE = 4 << 20
_POPULATED = 256 << 10

_FULL_RO = 0x011C


def address_of(view: memoryview) -> int:
    """Return the address of a view's first item; good while the view is held."""
    raw = _PyBuffer()
    _get_buffer(view, ctypes.byref(raw), _FULL_RO)
    try:
        return int(raw.buf or 0)
    finally:
        _release_buffer(ctypes.byref(raw))


def address_of_bytes(value: bytes) -> int:
    """Return the address of the first byte of a ``bytes`` object; good while it lives."""
    return id(value) + _BYTES_HEADER


def new_bytes(nbytes: int) -> tuple[bytes, int]:
    """Make an uninitialised ``bytes`` object to be filled once, and its address.

    Filled before anybody else sees it, as CPython's own readers do. It saves the copy out of the
    engine, which holds the GIL (132 ms for 128 MB).
    """
    value: bytes = _new_bytes(None, nbytes)
    address = address_of_bytes(value)
    if nbytes >= _POPULATED and _madvise is not None:
        # It is advice: what comes back does not matter.
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes >= _HUGE:
            # The first touch of 64 MB costs 29 ms in small pages and 6 ms in large ones.
            _madvise(start, end - start, _MADV_HUGEPAGE)
        elif not _is_there(end - mmap.PAGESIZE):
            # New pages of 1 MB cost 1.1 ms one by one, 0.7 ms together; and the engine, which
            # would touch them one by one, spins on another core meanwhile.
            _madvise(start, end - start, _MADV_POPULATE_WRITE)
    return value, address


def _is_there(page: int) -> bool:
    """Tell whether a page is in memory already; where that can't be told, it is taken to be."""
    found = ctypes.create_string_buffer(1)
    return _mincore is None or _mincore(page, 1, found) != 0 or found.raw != b"\0"


# CPython keeps the bytes of a bytes object inside it, after its head and before a closing zero
# (Include/cpython/bytesobject.h). Faster than asking through the buffer protocol, which is asked
# once to be sure.
_BYTES_HEADER = bytes.__basicsize__ - 1
if address_of(memoryview(_sample := b"sample")) != address_of_bytes(_sample):  # pragma: no cover
    raise ImportError(
        "this Python lays bytes objects out in another way; use CPython 3.10 or newer"
    )


def parts_of(view: memoryview, items: int) -> Iterator[bytes]:
    """Copy a strided view out in C order, at most ``items`` items at a time.

    Slices of the view itself would not do: a memoryview is sliced along its first dimension
    only, which has length 2 in a KV cache of keys and values.
    """
    if view.suboffsets:  # not one piece of memory; nobody but old imaging libraries has these
        yield view.tobytes()
        return
    shape, strides = view.shape or (1,), view.strides or (0,)
    split = len(shape) - 1
    while split and math.prod(shape[split:]) <= items:
        split -= 1
    step = max(1, items // math.prod(shape[split + 1 :]))
    raw = _PyBuffer()
    _get_buffer(view, ctypes.byref(raw), _FULL_RO)
    try:
        for outer in itertools.product(*map(range, shape[:split])):
            row = raw.buf + sum(map(int.__mul__, outer, strides))
            for start in range(0, shape[split], step):
                inner = (min(step, shape[split] - start), *shape[split + 1 :])
                yield _copy(raw, row + start * strides[split], inner, strides[split:])
    finally:
        _release_buffer(ctypes.byref(raw))


def _copy(raw: _PyBuffer, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    sizes = ctypes.c_ssize_t * len(shape)
    c_shape, c_strides = sizes(*shape), sizes(*strides)
    part = _PyBuffer(
        buf=address,
        len=math.prod(shape) * raw.itemsize,
        itemsize=raw.itemsize,
        readonly=1,
        ndim=len(shape),
        format=raw.format,
        shape=ctypes.addressof(c_shape),
        strides=ctypes.addressof(c_strides),
    )
    view: memoryview = _view_of(ctypes.byref(part))
    return view.tobytes()

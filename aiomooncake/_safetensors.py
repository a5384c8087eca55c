"""Files of safetensors: eight bytes, a JSON header, and the elements of all tensors.

The format is small and its elements are those of values, so neither the ``safetensors`` package nor
torch is needed. Blocking: for worker threads.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiomooncake._tensor_format import DTYPES, Header, has_room
from aiomooncake.errors import SerializationError

__all__ = ["Entry", "read_elements", "read_entries", "write_file"]

_LENGTH: Final = struct.Struct("<Q")
_LONGEST_HEADER: Final = 100_000_000  # as the package has it
_ALIGNED: Final = 8
_BY_NAME: Final = {dtype.safetensors: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, what it is, and where its elements begin."""

    name: str
    header: Header
    start: int


def write_file(path: Path, tensors: Mapping[str, tuple[Header, memoryview]]) -> None:
    """Write a file: all of it, or nothing of it.

    Raises:
        OSError: It can't be written.
    """
    table: dict[str, Any] = {}
    end = 0
    for name, (header, elements) in tensors.items():
        start, end = end, end + elements.nbytes
        table[name] = {
            "dtype": header.dtype.safetensors,
            "shape": list(header.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(table, separators=(",", ":")).encode()
    head = head.ljust(-(-len(head) // _ALIGNED) * _ALIGNED)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    try:
        try:
            with unfinished.open("wb") as file:
                file.write(_LENGTH.pack(len(head)) + head)
                for _, elements in tensors.values():
                    file.write(elements)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:  # it names the file that was not asked for, or none
        raise OSError(exc.errno, exc.strerror, str(path)) from None


def read_entries(path: Path) -> list[Entry]:
    """Tell what is in a file, in the order of the elements.

    Raises:
        SerializationError: It is no such file, or has a type that values can't have.
        OSError: It can't be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
        if length > min(_LONGEST_HEADER, size - _LENGTH.size):
            raise SerializationError(f"{path} is no file of safetensors: its header does not fit")
        text = file.read(length)
    try:
        table = json.loads(text)
        entries = list(_entries(table, _LENGTH.size + length))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
        raise SerializationError(f"{path} is no file of safetensors: {exc}") from None
    if any(entry.start + entry.header.nbytes > size for entry in entries):
        raise SerializationError(f"{path} is cut short: {size} bytes are not all of it")
    return sorted(entries, key=lambda entry: entry.start)


def _entries(table: Mapping[str, Any], base: int) -> Iterator[Entry]:
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        dtype = _BY_NAME.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"{name!r} is of {entry['dtype']}, and Mooncake knows {', '.join(_BY_NAME)}"
            )
        shape = tuple(map(int, entry["shape"]))
        header = Header(dtype, shape, shape)
        start, end = entry["data_offsets"]
        if not has_room(shape) or type(start) is not int:
            raise ValueError(f"{name!r} has a shape or a place that can't be")
        if min((start, *shape)) < 0 or end - start != header.nbytes:
            raise ValueError(f"{name!r} has a shape of {header.nbytes} bytes, and {end - start}")
        yield Entry(name, header, base + start)


def read_elements(path: Path, entries: list[Entry]) -> list[bytes]:
    """Read the elements of some tensors."""
    with path.open("rb", buffering=0) as file:
        found = []
        for entry in entries:
            file.seek(entry.start)
            found.append(_read(file, entry.header.nbytes, path))
        return found


def _read(file: Any, nbytes: int, path: Path) -> bytes:
    parts = []
    while nbytes:  # one call of the system reads 2 GB at most
        part = file.read(nbytes)
        if not part:
            raise SerializationError(f"{path} was cut short while it was read")
        parts.append(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)

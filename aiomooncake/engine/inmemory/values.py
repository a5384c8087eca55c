"""The calls that carry values as Python buffers, through the local buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_key, as_keys, read_config
from aiomooncake.engine.inmemory.calls import Client, code, code_per_key, native
from aiomooncake.engine.inmemory.memory import MemoryHandle, read_buffer
from aiomooncake.engine.inmemory.objects import INVALID_PARAMS, OK, StoredObject

__all__ = ["ValueCalls"]

Keys = Sequence[str]


def _no_bytes(_answer: int, _key: str) -> bytes:
    return b""


def _no_bytes_list(_answer: int, keys: Keys) -> list[bytes]:
    return [b""] * len(keys)


def _one_no_bytes(_answer: int, _keys: Keys) -> list[bytes]:
    return [b""]


def _none(_answer: int, _key: str) -> None:
    return None


def _none_list(_answer: int, keys: Keys) -> list[None]:
    return [None] * len(keys)


class ValueCalls(Client):
    """Put, get, look up and remove."""

    # ------------------------------------------------------------------ one value

    @native(code)
    def put(self, key: str, value: Any, config: Any = DEFAULTS) -> int:
        """Store a value; 0 also when the key is taken."""
        return self._write(as_key(key), read_buffer(value), config, self._engine.put)

    @native(code, unset=code)
    def upsert(self, key: str, value: Any, config: Any = DEFAULTS) -> int:
        """Store or replace a value."""
        return self._write(as_key(key), read_buffer(value), config, self._engine.upsert)

    @native(code)
    def put_parts(self, key: str, *args: Any, config: Any = DEFAULTS) -> int:
        """Store buffers as one value; nothing and 0 when they are empty."""
        data = b"".join([read_buffer(part, part=True) for part in args])
        return self._write(as_key(key), data, config, self._engine.put) if data else OK

    @native(code, unset=code)
    def upsert_parts(self, key: str, *args: Any, config: Any = DEFAULTS) -> int:
        """Store or replace a value made of buffers."""
        data = b"".join([read_buffer(part, part=True) for part in args])
        return self._write(as_key(key), data, config, self._engine.upsert) if data else OK

    def _write(self, key: str, data: bytes, config: Any, write: Any) -> int:
        placement = read_config(config, 1, same_node=False)
        if isinstance(placement, int):
            return placement
        if not self._local.fits(len(data)):
            return INVALID_PARAMS
        return int(write(self, key, data, placement))

    @native(_no_bytes, unset=_no_bytes)
    def get(self, key: str, /) -> bytes:
        """Read a value; ``b""`` for a miss, and when the local buffer has no room."""
        stored = self._engine.query(as_key(key))
        if isinstance(stored, int) or not self._local.fits(stored.size):
            return b""
        return bytes(stored.data)

    @native(_none)
    def get_buffer(self, key: str, /) -> MemoryHandle | None:
        """Read a value into the local buffer, which it occupies until it is dropped."""
        stored = self._engine.query(as_key(key))
        if isinstance(stored, int) or not self._local.take(stored.size):
            return None
        return MemoryHandle(bytes(stored.data), self._local)

    @native(code)
    def is_exist(self, key: str, /) -> int:
        """1 or 0; renews the lease."""
        return int(not isinstance(self._engine.query(as_key(key)), int))

    @native(code)
    def get_size(self, key: str, /) -> int:
        """Size, -704 or -703; renews the lease."""
        stored = self._engine.query(as_key(key))
        return stored if isinstance(stored, int) else stored.size

    @native(code)
    def remove(self, key: str, force: bool = False) -> int:
        """Remove a key; -706 while it is leased, unless forced."""
        return self._engine.remove(as_key(key), force=force)

    # ------------------------------------------------------------------ many values

    @native(code)
    def put_batch(self, keys: Keys, values: Sequence[Any], config: Any = DEFAULTS) -> int:
        """Store many values; of a key given twice the first one."""
        return self._write_batch(as_keys(keys), values, config, self._engine.put)

    @native(code, unset=code)
    def upsert_batch(self, keys: Keys, values: Sequence[Any], config: Any = DEFAULTS) -> int:
        """Store or replace many values; of a key given twice the first one."""
        return self._write_batch(as_keys(keys), values, config, self._engine.upsert)

    def _write_batch(self, keys: list[str], values: Sequence[Any], config: Any, write: Any) -> int:
        data = [read_buffer(value) for value in values]
        placement = read_config(config, len(keys), same_node=False)
        if isinstance(placement, int):
            return placement
        if len(keys) != len(data) or not self._local.fits(*map(len, data)):
            return INVALID_PARAMS
        first: dict[str, int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)
        codes = [
            int(write(self, key, data[place], placement.of(place))) for key, place in first.items()
        ]
        return next((wrong for wrong in codes if wrong), OK)

    @native(_no_bytes_list, unset=_one_no_bytes)
    def get_batch(self, keys: Keys, /) -> list[bytes]:
        """Read many values; a key given twice is right only at its last place."""
        found = self._read_batch(as_keys(keys))
        for data in found:
            self._local.give(len(data or b""))
        return [data or b"" for data in found] or [b""]

    @native(_none_list, fragile=True)
    def batch_get_buffer(self, keys: Keys, /) -> list[MemoryHandle | None]:
        """Read many values into the local buffer, with the same mistake."""
        return [
            None if data is None else MemoryHandle(data, self._local)
            for data in self._read_batch(as_keys(keys))
        ]

    def _read_batch(self, keys: list[str]) -> list[bytes | None]:
        """Read what finds room in the local buffer; the caller gives the room back."""
        found: list[bytes | None] = [None] * len(keys)
        last: dict[str, tuple[int, StoredObject]] = {}
        for place, key in enumerate(keys):
            stored = self._engine.query(key)
            if isinstance(stored, int) or not self._local.take(stored.size):
                continue
            # The engine fills one buffer per key; the others keep what lay there before.
            found[place] = bytes(stored.size)
            last[key] = (place, stored)
        for place, stored in last.values():
            found[place] = bytes(stored.data)
        return found

    @native(code_per_key)
    def batch_is_exist(self, keys: Keys) -> list[int]:
        """1 or 0 per key; renews the leases."""
        return [int(not isinstance(self._engine.query(key), int)) for key in as_keys(keys)]

    @native(code_per_key)
    def batch_remove(self, keys: Keys, force: bool = False) -> list[int]:
        """Return a code per key."""
        return [self._engine.remove(key, force=force) for key in as_keys(keys)]

    @native(code)
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys went, or -600 for a bad pattern."""
        return self._engine.remove_matching(regex_pattern, force=force)

    @native(code)
    def remove_all(self, force: bool = False) -> int:
        """How many keys went."""
        return self._engine.remove_matching(None, force=force)

"""The calls that move values in ranges, between the start and the end of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_keys, read_config
from aiomooncake.engine.inmemory.calls import (
    Client,
    code,
    code_per_key,
    empty_list,
    internal,
    native,
)
from aiomooncake.engine.inmemory.memory import read_memory, write_memory
from aiomooncake.engine.inmemory.objects import (
    INVALID_PARAMS,
    LEASE_EXPIRED,
    OK,
    InMemoryEngine,
    StoredObject,
)

__all__ = ["SessionCalls"]

Keys = Sequence[str]


class SessionCalls(Client):
    """Put sessions and get sessions of one client."""

    def __init__(self, engine: InMemoryEngine, rpc_timeout: float) -> None:
        super().__init__(engine, rpc_timeout)
        self._gets: dict[str, tuple[StoredObject, float]] = {}
        self._puts: dict[str, StoredObject] = {}

    @native(code_per_key, unset=empty_list)
    def batch_put_session_start(
        self, keys: Keys, sizes: Sequence[int], config: Any = DEFAULTS
    ) -> list[int]:
        """Reserve values; -600 for one that this client has reserved, -705 for any other."""
        names = as_keys(keys)
        placement = read_config(config, len(names), same_node=True)
        if isinstance(placement, int):
            return [placement] * len(names)
        if len(names) != len(sizes):
            return [INVALID_PARAMS] * len(names)
        open_before = set(self._puts)
        codes = []
        for place, (key, size) in enumerate(zip(names, sizes, strict=True)):
            if key in open_before:
                codes.append(INVALID_PARAMS)
                continue
            stored = self._engine.reserve(self, key, size, placement.of(place))
            codes.append(stored if isinstance(stored, int) else OK)
            if not isinstance(stored, int):
                self._puts[key] = stored
        return codes

    @native(code_per_key, unset=empty_list, asks_master=False)
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of reserved values; bytes or -600 per key."""
        names = as_keys(keys)
        if not len(names) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID_PARAMS] * len(names)
        answers = []
        for key, *pieces in zip(names, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True):
            stored = self._puts.get(key)
            if stored is None or not _fits(stored, *pieces):
                answers.append(INVALID_PARAMS)
                continue
            for ptr, size, offset in zip(*pieces, strict=True):
                if isinstance(stored.data, bytearray):
                    stored.data[offset : offset + size] = read_memory(ptr, size)
            answers.append(sum(pieces[1]))
        return answers

    @native(code_per_key, unset=empty_list)
    def batch_put_session_end(self, keys: Keys) -> list[int]:
        """Make reserved values readable, also those not fully written."""
        return self._end_puts(keys, self._engine.complete)

    @native(code_per_key, unset=empty_list)
    def batch_put_session_revoke(self, keys: Keys) -> list[int]:
        """Give up reserved values."""
        return self._end_puts(keys, self._engine.revoke)

    def _end_puts(self, keys: Keys, end: Any) -> list[int]:
        reserved = [self._puts.pop(key, None) for key in as_keys(keys)]
        return [INVALID_PARAMS if stored is None else int(end(stored)) for stored in reserved]

    @native(code_per_key, unset=empty_list)
    def batch_get_session_start(self, keys: Keys) -> list[int]:
        """Look values up for reading in ranges; a code per key."""
        codes = []
        for key in as_keys(keys):
            stored = self._engine.query(key)
            if not isinstance(stored, int):
                self._gets[key] = (stored, stored.lease_until)
            codes.append(stored if isinstance(stored, int) else OK)
        return codes

    @native(code_per_key, unset=empty_list, asks_master=False)
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of looked-up values; bytes per key, -600, or -707 after the lease."""
        names = as_keys(keys)
        if not len(names) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return [INVALID_PARAMS] * len(names)
        answers = []
        for key, *pieces in zip(names, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True):
            stored, until = self._gets.get(key, (None, 0.0))
            if stored is None or not _fits(stored, *pieces):
                answers.append(INVALID_PARAMS)
            elif self._engine.clock() >= until:
                answers.append(LEASE_EXPIRED)
            else:
                for ptr, size, offset in zip(*pieces, strict=True):
                    write_memory(ptr, bytes(stored.data[offset : offset + size]))
                answers.append(sum(pieces[1]))
        return answers

    @native(code, unset=internal, asks_master=False)
    def batch_get_session_end(self, keys: Keys) -> int:
        """Forget looked-up values; 0 also for unknown ones."""
        for key in as_keys(keys):
            self._gets.pop(key, None)
        return OK


def _fits(
    stored: StoredObject, ptrs: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> bool:
    """Whether the ranges are complete and lie inside the value."""
    return len(ptrs) == len(sizes) == len(offsets) and all(
        offset + size <= stored.size for size, offset in zip(sizes, offsets, strict=True)
    )

"""The calls that name memory of the caller by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_key, as_keys, read_config
from aiomooncake.engine.inmemory.calls import (
    Client,
    code,
    code_per_key,
    code_per_range,
    empty_list,
    native,
)
from aiomooncake.engine.inmemory.memory import read_memory, write_memory
from aiomooncake.engine.inmemory.objects import (
    INTERNAL,
    INVALID_PARAMS,
    OK,
    TRANSFER_FAIL,
    InMemoryEngine,
    StoredObject,
)

__all__ = ["ZeroCopyCalls"]

Keys = Sequence[str]


def _unsigned(answer: int, *_args: Any, **_kwargs: Any) -> int:
    return -answer


class ZeroCopyCalls(Client):
    """Whole values and ranges between segments and the caller's memory."""

    def __init__(self, engine: InMemoryEngine, rpc_timeout: float) -> None:
        super().__init__(engine, rpc_timeout)
        self._registered: dict[int, int] = {}

    # ------------------------------------------------------------------ caller memory

    @native(code, asks_master=False)
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Remember memory; -600 when part of it is known already."""
        if (
            not buffer_ptr
            or size <= 0
            or any(
                start < buffer_ptr + size and buffer_ptr < start + length
                for start, length in list(self._registered.items())
            )
        ):
            return INVALID_PARAMS
        self._registered[buffer_ptr] = size
        return OK

    @native(code, asks_master=False)
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Forget memory; -600 when it is not known."""
        return INVALID_PARAMS if self._registered.pop(buffer_ptr, None) is None else OK

    @native(code, unset=code)
    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = DEFAULTS) -> int:
        """Store memory as a value; nothing and 0 when the size is 0."""
        return self._write_from(key, buffer_ptr, size, config, self._engine.put)

    @native(code, unset=code)
    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any = DEFAULTS) -> int:
        """Store memory as a value, or replace the value."""
        return self._write_from(key, buffer_ptr, size, config, self._engine.upsert)

    def _write_from(self, key: str, ptr: int, size: int, config: Any, write: Any) -> int:
        placement = read_config(config, 1, same_node=False)
        if isinstance(placement, int) or not size:
            return placement if isinstance(placement, int) else OK
        return int(write(self, as_key(key), read_memory(ptr, size), placement))

    @native(_unsigned, unset=code)
    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Any = DEFAULTS,
    ) -> int:
        """Store two pieces as one value, metadata first; codes without their sign, or -1."""
        if getattr(config, "prefer_alloc_in_same_node", False):
            return INTERNAL
        placement = read_config(config, 1, same_node=True)
        if isinstance(placement, int) or not size:
            return -placement if isinstance(placement, int) else OK
        data = read_memory(metadata_buffer_ptr, metadata_size) + read_memory(buffer_ptr, size)
        return -self._engine.put(self, as_key(key), data, placement)

    @native(code_per_key, fragile=True)
    def batch_put_from(
        self,
        keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Any = DEFAULTS,
    ) -> list[int]:
        """Return a code per key; of a key given twice the last value is stored."""
        return self._write_batch_from(as_keys(keys), buffer_ptrs, sizes, config, self._engine.put)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_from(
        self,
        keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Any = DEFAULTS,
    ) -> list[int]:
        """Return a code per key; of a key given twice the last value is stored."""
        return self._write_batch_from(
            as_keys(keys), buffer_ptrs, sizes, config, self._engine.upsert
        )

    def _write_batch_from(
        self,
        keys: list[str],
        ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Any,
        write: Any,
    ) -> list[int]:
        placement = read_config(config, len(keys), same_node=False)
        if isinstance(placement, int):
            return [placement] * len(keys)
        if not len(keys) == len(ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        codes: dict[str, int] = {}
        for key, place in {key: place for place, key in enumerate(keys)}.items():
            codes[key] = INVALID_PARAMS
            if sizes[place] > 0:
                data = read_memory(ptrs[place], sizes[place])
                codes[key] = write(self, key, data, placement.of(place))
        return [codes[key] for key in keys]

    @native(code_per_key, unset=empty_list)
    def batch_put_from_multi_buffers(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = DEFAULTS,
    ) -> list[int]:
        """Return a code per key; of a key given twice the first value is stored."""
        names = as_keys(keys)
        placement = read_config(config, len(names), same_node=True)
        if isinstance(placement, int):
            return [placement] * len(names)
        if not len(names) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(names)
        codes = []
        pieces = zip(names, all_buffer_ptrs, all_sizes, strict=True)
        for place, (key, ptrs, sizes) in enumerate(pieces):
            if len(ptrs) != len(sizes) or not any(sizes):
                codes.append(INVALID_PARAMS)
                continue
            data = b"".join([read_memory(*piece) for piece in zip(ptrs, sizes, strict=True)])
            codes.append(self._engine.put(self, key, data, placement.of(place)))
        return codes

    @native(code)
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read a value into memory; its size, -704, or -600 when it is larger."""
        stored = self._engine.query(as_key(key))
        if isinstance(stored, int):
            return stored
        if size < stored.size:
            return INVALID_PARAMS
        write_memory(buffer_ptr, bytes(stored.data))
        return stored.size

    @native(code_per_key, fragile=True)
    def batch_get_into(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return a size or a code per key; of a key given twice only the last buffer is written."""
        return self._read_into(
            as_keys(keys),
            [[ptr] for ptr in buffer_ptrs],
            [[size] for size in sizes],
            too_large=None,
        )

    @native(code_per_key, fragile=True)
    def batch_get_into_multi_buffers(
        self,
        keys: Keys,
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Return a size or a code per key; -800 when the pieces are larger than the value."""
        return self._read_into(as_keys(keys), all_buffer_ptrs, all_sizes, too_large=TRANSFER_FAIL)

    def _read_into(
        self,
        keys: list[str],
        all_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        *,
        too_large: int | None,
    ) -> list[int]:
        if not len(keys) == len(all_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        answers: list[int] = []
        last: dict[str, tuple[int, StoredObject]] = {}
        for place, key in enumerate(keys):
            stored, room = self._engine.query(key), sum(all_sizes[place])
            if isinstance(stored, int):
                answers.append(stored)
            elif room < stored.size:
                answers.append(INVALID_PARAMS)
            elif room > stored.size and too_large is not None:
                answers.append(too_large)
            else:
                answers.append(stored.size)
                last[key] = (place, stored)
        for place, stored in last.values():
            done = 0
            for ptr, size in zip(all_ptrs[place], all_sizes[place], strict=True):
                write_memory(ptr, bytes(stored.data[done : done + size]))
                done += size
        return answers

    @native(code_per_range, fragile=True)
    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Bytes or a code per range; -600 for memory that is not registered."""
        count = len(buffer_ptrs)
        if not (
            count == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes)
        ):
            return [[[INVALID_PARAMS]] for _ in buffer_ptrs]
        nested = zip(
            buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
        )
        return [self._read_ranges(*each) for each in nested]

    def _read_ranges(
        self,
        ptr: int,
        keys: Sequence[str],
        all_dst: Sequence[Sequence[int]],
        all_src: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        if not len(keys) == len(all_dst) == len(all_src) == len(all_sizes):
            return [[INVALID_PARAMS] for _ in keys]
        room = self._registered_from(ptr)
        answers = []
        for key, dsts, srcs, sizes in zip(keys, all_dst, all_src, all_sizes, strict=True):
            if not len(dsts) == len(srcs) == len(sizes):
                answers.append([INVALID_PARAMS])
                continue
            stored = self._engine.query(as_key(key)) if room else INVALID_PARAMS
            if isinstance(stored, int):
                answers.append([stored] * len(sizes))
                continue
            ranges = zip(dsts, srcs, sizes, strict=True)
            answers.append([_read_range(stored, ptr, room, *each) for each in ranges])
        return answers

    def _registered_from(self, ptr: int) -> int:
        """How many registered bytes there are from an address on."""
        for start, length in list(self._registered.items()):
            if start <= ptr < start + length:
                return start + length - ptr
        return 0


def _read_range(stored: StoredObject, ptr: int, room: int, dst: int, src: int, size: int) -> int:
    if dst + size > room or src + size > stored.size:
        return INVALID_PARAMS
    write_memory(ptr + dst, bytes(stored.data[src : src + size]))
    return size

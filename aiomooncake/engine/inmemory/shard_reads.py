"""The calls that read tensors split along several axes of parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aiomooncake._tensor_format import Axis, Dtype, Header, Manifest, manifest_key, ordered
from aiomooncake._tensor_memory import Source, decode, memory_at, split, torch_of
from aiomooncake.engine.inmemory.arguments import as_key, as_keys
from aiomooncake.engine.inmemory.calls import native
from aiomooncake.engine.inmemory.memory import write_memory
from aiomooncake.engine.inmemory.shards import (
    WRITERS_MANIFEST,
    Request,
    has,
    name_of,
    read_axes,
    writer_key,
)
from aiomooncake.engine.inmemory.tensors import (
    TensorCalls,
    as_source,
    decoded,
    none,
    none_per_key,
    packed,
)
from aiomooncake.errors import MooncakeError

__all__ = ["ShardReads"]

Keys = Sequence[str]

_MODES: Final = ("AS_STORED", "SHARD", "FULL")


@dataclass(frozen=True, slots=True)
class _Whole:
    """Shards that were put together.

    The binding does not look at their types: it takes all of them for one, and reads so many bytes
    of each. Of another type they are nonsense then, and of a narrower one too few.

    Attributes:
        elements: The tensor.
        there: For each element, whether it lies within its shard.
    """

    elements: Source
    there: Source

    @classmethod
    def of(
        cls, headers: list[Header], values: list[bytes], dtype: Dtype, dim: int
    ) -> _Whole | None:
        """Join the elements of values, taken for one type, along a dimension."""
        torch = torch_of()
        elements, there = [], []
        for header, value in zip(headers, values, strict=True):
            taken = replace(header, dtype=dtype)
            count = (len(value) - header.offset) // dtype.itemsize
            memory = bytearray(value[: taken.end].ljust(taken.end, b"\0"))
            elements.append(decode(taken, memory, "torch", key=""))
            there.append(torch.arange(math.prod(header.shape)).reshape(header.shape) < count)
        whole, mask = (as_source(torch.cat(each, dim)) for each in (elements, there))
        return None if whole is None or mask is None else cls(whole, mask)

    def value(self) -> bytes | None:
        """Make the value of the whole; None if the binding can't read it."""
        return self._value(self.elements.header(), self.elements, self.there)

    def part(self, axis: Axis, axes: tuple[Axis, ...]) -> bytes | None:
        """Make the value of a rank's part."""
        part, there = (
            split(each, axis.size, axis.split_dim or 0)[axis.rank][2]
            for each in (self.elements, self.there)
        )
        header = Header(part.dtype, part.shape, self.elements.shape, axes)
        return self._value(header, part, there)

    def _value(self, header: Header, elements: Source, there: Source) -> bytes | None:
        return packed(header, elements) if all(there.to_bytes()) else None


class ShardReads(TensorCalls):
    """Shards as they were stored, and tensors that are put together of them."""

    _registered: dict[int, int]  # of the calls that name memory

    @native(none, unset=none)
    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Any:
        """Read a shard, or put shards together; None for a miss and for any failure."""
        value = self._find(as_key(key), target, loosely=True)
        return None if value is None else decoded(bytearray(value), len(value))

    @native(none_per_key, unset=none_per_key)
    def batch_get_tensor_with_parallelism(self, keys: Keys, targets: Any = None) -> list[Any]:
        """Read many."""
        names = as_keys(keys)
        if targets is None:
            return self._read_tensors(names)
        if not isinstance(targets, list) or len(targets) != len(names):
            return [None] * len(names)
        found = [self._find(*each, loosely=True) for each in zip(names, targets, strict=True)]
        return [None if data is None else decoded(bytearray(data), len(data)) for data in found]

    @native(none, unset=none)
    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Any = None
    ) -> Any:
        """Read into registered memory, which the tensor then is."""
        return self._find_into(as_key(key), buffer_ptr, size, target)

    @native(none_per_key, unset=none_per_key)
    def batch_get_tensor_with_parallelism_into(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int], targets: Any = None
    ) -> list[Any]:
        """Read many into registered memory."""
        names = as_keys(keys)
        given = [None] * len(names) if targets is None else targets
        lists = (names, buffer_ptrs, sizes, given)
        if not isinstance(given, list) or len(set(map(len, lists))) > 1:
            return [None] * len(names)
        return [self._find_into(*each) for each in zip(*lists, strict=True)]

    def _find_into(self, key: str, ptr: int, size: int, target: Any) -> Any:
        known = any(
            start <= ptr and ptr + size <= start + length
            for start, length in list(self._registered.items())
        )
        value = self._find(key, target) if known else None
        if value is None or len(value) > size:
            return None
        write_memory(ptr, value)
        return decoded(memory_at(ptr, len(value), None), len(value))

    def _find(self, key: str, target: Any, *, loosely: bool = False) -> bytes | None:
        """Find the value that a ``ReadTarget`` means, or make it.

        Args:
            key: The key.
            target: The target, or what looks like one.
            loosely: Of a rank's shard that is not as asked for, take what has its name.
        """
        if target is None:
            return self._buffered(key)
        if not has(target, "mode", "parallelism") or target.mode.upper() not in _MODES:
            return None
        mode = target.mode.upper()
        if target.parallelism is None:
            if mode == "SHARD":
                return None
            whole = self._of_writers(key) if mode == "FULL" else None
            return self._buffered(key) if whole is None else whole.value()
        axes = read_axes(target.parallelism)
        if axes is None or mode == "AS_STORED":
            return None
        value = self._shard(key, axes) if mode == "SHARD" else None
        if value is None:
            whole, axis = self._whole(key, axes), Request(axes).tp_axis
            if mode == "FULL" and whole is not None:
                value = whole.value()
            elif axis is not None and whole is not None:
                value = whole.part(axis, axes)
            only = loosely and mode == "SHARD" and len(axes) == 1
            if value is None and axis is not None and only:
                value = self._buffered(name_of(key, axes) if axis.size > 1 else key)
        return value

    def _buffered(self, key: str) -> bytes | None:
        """Read a value through the local buffer."""
        stored = self._engine.query(key)
        if isinstance(stored, int) or not self._local.fits(stored.size):
            return None
        return bytes(stored.data)

    def _shard(self, key: str, axes: tuple[Axis, ...]) -> bytes | None:
        """Read a shard, or a writer's part, that is what was asked for."""
        names = [name_of(key, axes)]
        if len(axes) == 1 and axes[0].kind == "tp":
            names.append(writer_key(key, axes[0]))
        for value in map(self._buffered, names):
            header = _header_of(value)
            if header is not None and ordered(header.axes) == ordered(axes):
                return value
        return None

    def _whole(self, key: str, axes: tuple[Axis, ...]) -> _Whole | None:
        """Put all shards together along the axis of the ranks."""
        axis = Request(axes).tp_axis
        if axis is None:
            return None
        size = axis.size
        said = Manifest.parse(self._buffered(manifest_key(key)) or b"")
        if said is not None and said.axis.split_dim != axis.split_dim:
            said = None
        if said is not None:
            size = said.axis.size
        elif len(axes) == 1:  # as put_tensor_with_tp has left them
            first = _header_of(self._buffered(f"{key}_tp_0" if size > 1 else key))
            if first is None or first.tp_axis is None:
                return None
            size = first.tp_axis.size
        wanted = (
            tuple(replace(each, rank=rank, size=size) if each is axis else each for each in axes)
            for rank in range(size)
        )
        whole = self._joined(((name_of(key, each), each) for each in wanted), said)
        equal = whole is not None and whole.elements.shape[axis.split_dim or 0] % axis.size == 0
        return whole if equal else None

    def _of_writers(self, key: str) -> _Whole | None:
        """Put the parts of all writers together."""
        said = Manifest.parse(self._buffered(key + WRITERS_MANIFEST) or b"")
        if said is None:
            return None
        parts = (replace(said.axis, rank=rank) for rank in range(said.axis.size))
        return self._joined(((writer_key(key, part), (part,)) for part in parts), said)

    def _joined(
        self, shards: Iterable[tuple[str, tuple[Axis, ...]]], said: Manifest | None
    ) -> _Whole | None:
        """Join shards, which must be there, be what they are named, and fit together.

        How many there are is what a stored value says, which may lie: so one after the other.
        """
        headers, values = [], []
        for name, axes in shards:
            stored = self._engine.query(name)
            value = None if isinstance(stored, int) else bytes(stored.data)
            header = _header_of(value)
            if value is None or header is None or ordered(header.axes) != ordered(axes):
                return None
            headers.append(header)
            values.append(value)
        first = headers[0]
        if first.tp_axis is None or len({(each.shape, each.whole) for each in headers}) > 1:
            return None
        dtype = first.dtype if said is None else said.dtype
        if said is not None and (said.whole, dtype.itemsize) != (first.whole, first.dtype.itemsize):
            return None
        try:
            return _Whole.of(headers, values, dtype, first.tp_axis.split_dim or 0)
        except MooncakeError:  # this torch does not have the type
            return None


def _header_of(value: bytes | bytearray | None) -> Header | None:
    try:
        return None if value is None else Header.parse(value, "")
    except MooncakeError:
        return None

"""What LMCache brings: keys, the layout of chunks, their header, and the connector's interface."""

from __future__ import annotations

import abc
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from examples.lmcache_connector.memory import BytesObj, MemoryFormat, MemoryObj, Pool

__all__ = [
    "HEADER_BYTES",
    "CacheEngineKey",
    "ChunkLayout",
    "EngineConfig",
    "RemoteConnector",
    "RemoteMetadata",
    "drop",
    "prefix",
]

# LMCache's numbers of the types; NumPy has no bfloat16, so its bits stand for it.
_DTYPES: Final = {2: "f2", 3: "u2", 4: "f4", 5: "f8", 6: "u1"}
_NUMBERS: Final = {np.dtype(name): number for number, name in _DTYPES.items()}
_HEADER: Final = struct.Struct("7i")

HEADER_BYTES: Final = _HEADER.size
"""Bytes of the header in front of a chunk: length, format, type, and four dimensions."""


@dataclass(frozen=True, slots=True)
class CacheEngineKey:
    """The name of a chunk.

    Attributes:
        model_name: The model.
        world_size: Its tensor-parallel ranks.
        worker_id: The rank.
        chunk_hash: Hash of all tokens up to the chunk's end.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int

    def to_string(self) -> str:
        """Return the key under which the chunk is stored."""
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:x}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What of LMCache's configuration concerns a remote backend.

    Attributes:
        remote_url: ``"mooncakestore://host:port"``, with ``?device=`` for RDMA.
        extra_config: The store's settings, beside those of other plug-ins.
        blocking_timeout_secs: How long a thread waits for what it asked of the loop.
    """

    remote_url: str
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    blocking_timeout_secs: float = 10.0

    def setting(self, name: str, default: Any) -> Any:
        """Look up a setting of the Mooncake connector, with its prefix or without."""
        return self.extra_config.get(f"mooncake_{name}", self.extra_config.get(name, default))


@dataclass(frozen=True)
class ChunkLayout:
    """The shape of a full chunk.

    Attributes:
        kv_shape: Layers, keys and values (2, or 1 for MLA), tokens, heads, size of a head.
        dtype: Type of the items.
    """

    kv_shape: tuple[int, int, int, int, int]
    dtype: np.dtype[Any]

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the tensor in memory."""
        layers, kinds, tokens, heads, head = self.kv_shape
        return kinds, layers, tokens, heads * head

    @cached_property
    def fmt(self) -> MemoryFormat:
        """What its dimensions mean."""
        return MemoryFormat.KV_MLA_FMT if self.kv_shape[1] == 1 else MemoryFormat.KV_2LTD

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a full chunk."""
        return math.prod(self.kv_shape) * self.dtype.itemsize

    def partial(self, nbytes: int) -> tuple[int, int, int, int]:
        """Tell the shape of a chunk of so many bytes: the last one of a prompt has fewer tokens.

        Raises:
            ValueError: No number of tokens has this size.
        """
        kinds, layers, tokens, hidden = self.shape
        count, rest = divmod(nbytes, self.nbytes // tokens)
        if rest or not 0 < count <= tokens:
            raise ValueError(f"{nbytes} bytes are no chunk of 1 to {tokens} tokens")
        return kinds, layers, count, hidden


@dataclass(frozen=True, slots=True)
class RemoteMetadata:
    """The header of a chunk, as LMCache writes it.

    Attributes:
        length: Bytes of the chunk.
        shape: Its dimensions; four.
        dtype: Type of its items; None for bytes.
        fmt: What its dimensions mean.
    """

    length: int
    shape: Sequence[int]
    dtype: np.dtype[Any] | None
    fmt: MemoryFormat

    @classmethod
    def of(cls, obj: MemoryObj | BytesObj) -> RemoteMetadata:
        """Describe an object."""
        return cls(obj.get_size(), obj.shape, obj.dtype, obj.fmt)

    def serialize(self) -> bytes:
        """Return the header's bytes.

        Raises:
            TypeError: The header knows no such type.
        """
        number = 0 if self.dtype is None else _NUMBERS.get(self.dtype)
        if number is None:
            raise TypeError(f"a chunk of {self.dtype} has no header; use one of {list(_NUMBERS)}")
        return _HEADER.pack(self.length, self.fmt.value, number, *self.shape)

    @classmethod
    def deserialize(cls, header: bytes | memoryview) -> RemoteMetadata:
        """Read a header.

        Raises:
            ValueError: It is none.
        """
        if len(header) != HEADER_BYTES:
            raise ValueError(f"{len(header)} bytes are no header: the value is not a chunk")
        length, fmt, number, *shape = _HEADER.unpack(header)
        if number not in (0, *_DTYPES):
            raise ValueError(f"a header names type {number}: the value is not a chunk")
        dtype = np.dtype(_DTYPES[number]) if number else None
        return cls(length, shape, dtype, MemoryFormat(fmt))

    def describe(self, obj: MemoryObj, nbytes: int) -> None:
        """Give an object the shape that the header tells, if it fits the value's bytes.

        Raises:
            ValueError: It does not.
        """
        dtype, shape = self.dtype or np.dtype("u1"), self.shape
        if self.dtype is None:
            shape = shape[:1]
        if HEADER_BYTES + self.length != nbytes or math.prod(shape) * dtype.itemsize != self.length:
            raise ValueError(f"{nbytes} bytes don't fit the header {self}")
        obj.reshape(shape, dtype, self.fmt)


class RemoteConnector(abc.ABC):
    """The methods by which LMCache's remote backend uses a store.

    The ``async`` ones run on the backend's loop, the others on any thread. Objects that are
    stored stay their owner's, who keeps a reference until the call is over. Objects that were
    read come with a reference, which is the caller's.

    Args:
        config: LMCache's configuration.
        layout: The shape of a full chunk.
        pool: Where the chunks are.
    """

    def __init__(self, config: EngineConfig, layout: ChunkLayout, pool: Pool) -> None:
        self.config = config
        self.layout = layout
        self.pool = pool
        self.save_chunk_meta = bool(config.extra_config.get("save_chunk_meta", True))
        self.put_timeout = float(config.setting("transfer_timeout", 1))

    def allocate(self) -> MemoryObj | None:
        """Make room for a full chunk."""
        return self.pool.allocate(self.layout.shape, self.layout.dtype, self.layout.fmt)

    @abc.abstractmethod
    async def exists(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there."""

    @abc.abstractmethod
    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Tell whether a chunk is there, from a thread without a loop."""

    @abc.abstractmethod
    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Read a chunk; None when it is not there."""

    @abc.abstractmethod
    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj | BytesObj) -> None:
        """Store a chunk, unless it is there already."""

    @abc.abstractmethod
    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read many chunks; None for those that are not there, or could not be read."""

    @abc.abstractmethod
    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj | BytesObj]
    ) -> None:
        """Store many chunks."""

    @abc.abstractmethod
    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False
    ) -> int:
        """Tell how many chunks are there, from the first one on without a gap."""

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[CacheEngineKey]
    ) -> list[MemoryObj]:
        """Read many chunks; those from the first one on without a gap."""
        del lookup_id
        found = await self.batched_get(keys)
        count = prefix(found)
        drop(found[count:])
        return [obj for obj in found[:count] if obj is not None]

    # LMCache asks before it calls; what is not supported is called key by key.

    def support_batched_get(self) -> bool:
        """Tell whether :meth:`batched_get` works."""
        return True

    def support_batched_put(self) -> bool:
        """Tell whether :meth:`batched_put` works."""
        return True

    def support_batched_async_contains(self) -> bool:
        """Tell whether :meth:`batched_async_contains` works."""
        return True

    def support_batched_get_non_blocking(self) -> bool:
        """Tell whether :meth:`batched_get_non_blocking` works."""
        return True

    def support_batched_contains(self) -> bool:
        """Tell whether :meth:`batched_contains` works."""
        return False

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Do as :meth:`batched_async_contains`, from a thread without a loop."""
        raise NotImplementedError

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the store."""


def prefix(found: Iterable[object]) -> int:
    """Count what is there, up to the first gap."""
    count = 0
    for one in found:
        if not one:
            break
        count += 1
    return count


def drop(objs: Iterable[MemoryObj | None]) -> None:
    """Give back one reference to each object."""
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()

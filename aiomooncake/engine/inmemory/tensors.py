"""The calls that carry tensors: torch's, as the binding takes and gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiomooncake._tensor_format import Header
from aiomooncake._tensor_memory import Source, decode, memory_at, source_of, split, torch_of
from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_key, as_keys, read_config
from aiomooncake.engine.inmemory.calls import code, code_per_key, native
from aiomooncake.engine.inmemory.memory import read_memory, write_memory
from aiomooncake.engine.inmemory.objects import INVALID_PARAMS, NO_AVAILABLE_HANDLE, OK
from aiomooncake.engine.inmemory.values import ValueCalls
from aiomooncake.errors import MooncakeError

__all__ = [
    "TensorCalls",
    "as_source",
    "decoded",
    "is_tensor",
    "none",
    "none_per_key",
    "packed",
    "tensor_at",
]

Keys = Sequence[str]
Tensors = Sequence[Any]
Make = Callable[[Source], list[tuple[str, bytes]] | None]
"""Makes the values of a tensor: what is behind its key in their names, and their bytes."""


def none(_answer: int, *_args: Any, **_kwargs: Any) -> None:
    """Fail with None."""
    return


def none_per_key(_answer: int, keys: Keys, *_args: Any, **_kwargs: Any) -> list[None]:
    """Fail with None for every key."""
    return [None] * len(keys)


def as_source(tensor: Any) -> Source | None:
    """Look at a tensor; None for what the binding refuses, which goes by the name of the class."""
    if "Tensor" not in type(tensor).__name__:
        return None
    torch_of()
    try:
        return source_of(tensor, verb="", key="", rank=None)
    except MooncakeError:
        return None


def packed(header: Header, source: Source) -> bytes:
    """Make the value of a tensor."""
    return header.pack() + source.to_bytes()


def _whole(source: Source) -> list[tuple[str, bytes]]:
    return [("", packed(source.header(), source))]


def _for_ranks(size: int, dim: int) -> Make:
    """Split for so many ranks; for one of them, or none, it stays whole."""
    if size <= 1:
        return _whole

    def make(source: Source) -> list[tuple[str, bytes]] | None:
        if dim < 0:
            return None
        try:
            parts = split(source, size, dim)
        except ValueError:
            return None
        return [(f"_tp_{axis.rank}", packed(header, part)) for axis, header, part in parts]

    return make


def _shard(key: str, rank: int, size: int) -> str:
    return f"{as_key(key)}_tp_{rank}" if size > 1 else as_key(key)


def decoded(data: Any, nbytes: int) -> Any:
    """Make a tensor of a value, or None. One without dimensions gets one of length 1."""
    tensor = _decoded(data, nbytes)
    return tensor if tensor is None or tensor.shape else tensor.reshape(1)


def _decoded(data: Any, nbytes: int) -> Any:
    try:
        return decode(Header.parse(data, "", nbytes=nbytes), data, "torch", key="")
    except MooncakeError:
        return None


def tensor_at(ptr: int, size: int) -> Any:
    """Find the tensor that lies in memory with its header, or None; also one of no dimensions."""
    return _decoded(memory_at(ptr, size, None), size) if ptr and size else None


def is_tensor(ptr: int, size: int) -> bool:
    """Tell whether memory holds a tensor with its header, and nothing more."""
    return bool(ptr) and decoded(memory_at(ptr, size, None) if size else b"", size) is not None


class TensorCalls(ValueCalls):
    """Values that are tensors, whole or split for ranks."""

    _mounted: dict[str, set[str]]  # of the store

    # ------------------------------------------------------------------ storing

    @native(code, unset=code)
    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor; 0 also when the key is taken."""
        return self._write_tensor(key, tensor, DEFAULTS, self._engine.put, _whole)

    @native(code, unset=code)
    def pub_tensor(self, key: str, tensor: Any, config: Any = DEFAULTS) -> int:
        """Store a tensor with options."""
        return self._write_tensor(key, tensor, config, self._engine.put, _whole)

    @native(code, unset=code)
    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Store or replace a tensor."""
        return self._write_tensor(key, tensor, DEFAULTS, self._engine.upsert, _whole)

    @native(code, unset=code)
    def upsert_pub_tensor(self, key: str, tensor: Any, config: Any = DEFAULTS) -> int:
        """Store or replace a tensor with options."""
        return self._write_tensor(key, tensor, config, self._engine.upsert, _whole)

    @native(code, unset=code)
    def put_tensor_with_tp(
        self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Store the shards of all ranks, whatever the rank."""
        make = _for_ranks(tp_size, split_dim)
        return self._write_tensor(key, tensor, DEFAULTS, self._engine.put, make)

    @native(code, unset=code)
    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: Any = DEFAULTS,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Store the shards of all ranks with options."""
        make = _for_ranks(tp_size, split_dim)
        return self._write_tensor(key, tensor, config, self._engine.put, make)

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor(self, keys: Keys, tensors_list: Tensors) -> list[int]:
        """Return a code per key."""
        return self._write_tensors(keys, tensors_list, DEFAULTS, self._engine.put, _whole)

    @native(code_per_key, unset=code_per_key)
    def batch_pub_tensor(
        self, keys: Keys, tensors_list: Tensors, config: Any = DEFAULTS
    ) -> list[int]:
        """Return a code per key."""
        return self._write_tensors(keys, tensors_list, config, self._engine.put, _whole)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_tensor(self, keys: Keys, tensors_list: Tensors) -> list[int]:
        """Return a code per key."""
        return self._write_tensors(keys, tensors_list, DEFAULTS, self._engine.upsert, _whole)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_pub_tensor(
        self, keys: Keys, tensors_list: Tensors, config: Any = DEFAULTS
    ) -> list[int]:
        """Return a code per key."""
        return self._write_tensors(keys, tensors_list, config, self._engine.upsert, _whole)

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor_with_tp(
        self,
        base_keys: Keys,
        tensors_list: Tensors,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Return a code per key, of its first shard that failed."""
        make = _for_ranks(tp_size, split_dim)
        return self._write_tensors(base_keys, tensors_list, DEFAULTS, self._engine.put, make)

    @native(code_per_key, unset=code_per_key)
    def batch_pub_tensor_with_tp(
        self,
        base_keys: Keys,
        tensors_list: Tensors,
        config: Any = DEFAULTS,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Return a code per key, of its first shard that failed."""
        make = _for_ranks(tp_size, split_dim)
        return self._write_tensors(base_keys, tensors_list, config, self._engine.put, make)

    def _write_tensor(self, key: str, tensor: Any, config: Any, write: Any, make: Make) -> int:
        return self._write_tensors([as_key(key)], [tensor], config, write, make)[0]

    def _write_tensors(
        self, keys: Keys, tensors: Tensors, config: Any, write: Any, make: Make
    ) -> list[int]:
        names = as_keys(keys)
        if not isinstance(tensors, list):
            raise TypeError("incompatible function arguments: tensors are a list")
        placement = read_config(config, len(names), same_node=True)
        if isinstance(placement, int) or len(names) != len(tensors):
            return [INVALID_PARAMS if not isinstance(placement, int) else placement] * len(names)
        codes = []
        taken = 0
        lends = any(self._mounted.values())
        for place, (key, tensor) in enumerate(zip(names, tensors, strict=True)):
            source = as_source(tensor)
            values = None if source is None else make(source)
            if values is None:
                codes.append(INVALID_PARAMS)
                continue
            some = []
            for end, data in values:
                # What leaves for another client's memory is put together in the local buffer, and
                # all of a batch at once; the own memory is preferred.
                if not lends and not self._local.take(len(data)):
                    some.append(NO_AVAILABLE_HANDLE)
                    continue
                taken += 0 if lends else len(data)
                some.append(write(self, key + end, data, placement.of(place)))
            codes.append(next((wrong for wrong in some if wrong), OK))
        self._local.give(taken)
        return codes

    # ------------------------------------------------------------------ reading

    @native(none, unset=none)
    def get_tensor(self, key: str) -> Any:
        """Read a tensor; None for a miss, for any failure, and for what is no tensor."""
        return self._read_tensors([as_key(key)])[0]

    @native(none, unset=none)
    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """Read the shard of a rank, whatever the size and the dimension."""
        return self._read_tensors([_shard(key, tp_rank, tp_size)])[0]

    @native(none_per_key, unset=none_per_key)
    def batch_get_tensor(self, keys: Keys) -> list[Any]:
        """Read many tensors."""
        return self._read_tensors(as_keys(keys))

    @native(none_per_key, unset=none_per_key)
    def batch_get_tensor_with_tp(
        self, base_keys: Keys, tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """Read the shards of a rank."""
        return self._read_tensors([_shard(key, tp_rank, tp_size) for key in as_keys(base_keys)])

    def _read_tensors(self, keys: list[str]) -> list[Any]:
        found = self._read_batch(keys)
        for data in found:
            self._local.give(len(data or b""))
        return [None if data is None else decoded(bytearray(data), len(data)) for data in found]

    # ------------------------------------------------------------------ caller memory

    @native(none, unset=none)
    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Read a tensor into memory, which it then is."""
        return self._read_tensor_into(as_key(key), buffer_ptr, size) if buffer_ptr else None

    @native(none, unset=none)
    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Any:
        """Read the shard of a rank into memory."""
        name = _shard(key, tp_rank, tp_size)
        return self._read_tensor_into(name, buffer_ptr, size) if buffer_ptr else None

    @native(none_per_key, unset=code_per_key)
    def batch_get_tensor_into(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Read many tensors into memory; -600 for each when an argument is bad."""
        return self._read_tensors_into(as_keys(keys), buffer_ptrs, sizes)

    @native(none_per_key, unset=none_per_key)
    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """Read the shards of a rank into memory."""
        names = [_shard(key, tp_rank, tp_size) for key in as_keys(base_keys)]
        return self._read_tensors_into(names, buffer_ptrs, sizes)

    def _read_tensors_into(
        self, keys: list[str], ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        if not len(keys) == len(ptrs) == len(sizes) or not all(ptrs):
            return [INVALID_PARAMS] * len(keys)
        places = zip(keys, ptrs, sizes, strict=True)
        return [self._read_tensor_into(*place) for place in places]

    def _read_tensor_into(self, key: str, ptr: int, size: int) -> Any:
        stored = self._engine.query(key)
        if isinstance(stored, int) or size < stored.size:
            return None
        write_memory(ptr, bytes(stored.data))
        return decoded(memory_at(ptr, stored.size, None), stored.size)

    @native(code, unset=code)
    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Refuse: there is no such device here."""
        return INVALID_PARAMS

    @native(code_per_key, unset=code_per_key)
    def batch_get_tensor_into_cuda(self, keys: Keys, tensors_list: Tensors) -> list[int]:
        """Refuse: there is no such device here."""
        return [INVALID_PARAMS] * len(keys)

    @native(code, unset=code)
    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store a tensor that lies in memory with its header."""
        return self._write_tensors_from([as_key(key)], [buffer_ptr], [size], self._engine.put)[0]

    @native(code, unset=code)
    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store or replace a tensor that lies in memory with its header."""
        return self._write_tensors_from([as_key(key)], [buffer_ptr], [size], self._engine.upsert)[0]

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor_from(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return a code per key: -600 for all when one is bad."""
        return self._write_tensors_from(as_keys(keys), buffer_ptrs, sizes, self._engine.put)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_tensor_from(
        self, keys: Keys, buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return a code per key: -600 for all when one is bad."""
        return self._write_tensors_from(as_keys(keys), buffer_ptrs, sizes, self._engine.upsert)

    def _write_tensors_from(
        self, keys: list[str], ptrs: Sequence[int], sizes: Sequence[int], write: Any
    ) -> list[int]:
        if not len(keys) == len(ptrs) == len(sizes) or not all(map(is_tensor, ptrs, sizes)):
            return [INVALID_PARAMS] * len(keys)
        placement = read_config(DEFAULTS, len(keys), same_node=False)
        return [
            write(self, key, read_memory(ptr, size), placement)
            for key, ptr, size in zip(keys, ptrs, sizes, strict=True)
        ]

    @native(code, unset=code)
    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Store the shards of a tensor that lies in memory with its header."""
        return self._write_ranks_from(as_key(key), buffer_ptr, size, _for_ranks(tp_size, split_dim))

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Return a code per key."""
        keys = as_keys(base_keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        make = _for_ranks(tp_size, split_dim)
        places = zip(keys, buffer_ptrs, sizes, strict=True)
        return [self._write_ranks_from(*place, make) for place in places]

    def _write_ranks_from(self, key: str, ptr: int, size: int, make: Make) -> int:
        tensor = tensor_at(ptr, size)
        if tensor is None:
            return INVALID_PARAMS
        return self._write_tensor(key, tensor, DEFAULTS, self._engine.put, make)

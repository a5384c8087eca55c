"""The calls that store tensors split along several axes of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_key, as_keys, read_config
from aiomooncake.engine.inmemory.calls import code, code_per_key, native
from aiomooncake.engine.inmemory.objects import INVALID_PARAMS, NO_AVAILABLE_HANDLE, OK, Placement
from aiomooncake.engine.inmemory.shard_reads import ShardReads
from aiomooncake.engine.inmemory.shards import Request, Values, read_request
from aiomooncake.engine.inmemory.tensors import as_source, is_tensor, tensor_at

__all__ = ["ShardCalls"]

Keys = Sequence[str]
Tensors = Sequence[Any]
_Job = Callable[[str, "Request | None", "Placement | int"], int]
"""Stores what a request makes of one tensor."""


class ShardCalls(ShardReads):
    """Tensors as shards of several axes, and as parts of several writers."""

    @native(code, unset=code)
    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: Any = DEFAULTS,
        writer_partition: Any = None,
    ) -> int:
        """Store a tensor, a shard or a writer's part."""
        job = self._shard_of(tensor, self._engine.put)
        return job(as_key(key), read_request(parallelism, writer_partition), _placed(config))

    @native(code, unset=code)
    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: Any = DEFAULTS,
        writer_partition: Any = None,
    ) -> int:
        """Store or replace a tensor, a shard or a writer's part."""
        job = self._shard_of(tensor, self._engine.upsert)
        return job(as_key(key), read_request(parallelism, writer_partition), _placed(config))

    @native(code, unset=code)
    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Any = DEFAULTS,
        writer_partition: Any = None,
    ) -> int:
        """Store a tensor that lies in memory: whole, the shards of all ranks, or a part."""
        job = self._shards_from(buffer_ptr, size, self._engine.put)
        return job(as_key(key), read_request(parallelism, writer_partition), _placed(config))

    @native(code, unset=code)
    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: Any = DEFAULTS,
        writer_partition: Any = None,
    ) -> int:
        """Store or replace a tensor that lies in memory."""
        job = self._shards_from(buffer_ptr, size, self._engine.upsert)
        return job(as_key(key), read_request(parallelism, writer_partition), _placed(config))

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor_with_parallelism(
        self,
        keys: Keys,
        tensors_list: Tensors,
        parallelisms: Any = None,
        config: Any = DEFAULTS,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Return a code per key."""
        jobs = [self._shard_of(tensor, self._engine.put) for tensor in _listed(tensors_list)]
        return _each(as_keys(keys), jobs, parallelisms, writer_partitions, config)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Keys,
        tensors_list: Tensors,
        parallelisms: Any = None,
        config: Any = DEFAULTS,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Return a code per key."""
        jobs = [self._shard_of(tensor, self._engine.upsert) for tensor in _listed(tensors_list)]
        return _each(as_keys(keys), jobs, parallelisms, writer_partitions, config)

    @native(code_per_key, unset=code_per_key)
    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Any = DEFAULTS,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Return a code per key; of whole tensors -600 for all when one is bad."""
        jobs = self._jobs_from(buffer_ptrs, sizes, parallelisms, writer_partitions, replace=False)
        return _each(as_keys(keys), jobs, parallelisms, writer_partitions, config)

    @native(code_per_key, unset=code_per_key)
    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Keys,
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Any = DEFAULTS,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Return a code per key; of whole tensors -600 for all when one is bad."""
        jobs = self._jobs_from(buffer_ptrs, sizes, parallelisms, writer_partitions, replace=True)
        return _each(as_keys(keys), jobs, parallelisms, writer_partitions, config)

    def _shard_of(self, tensor: Any, write: Any) -> _Job:
        """Prepare to store what a request makes of a tensor."""

        def job(key: str, request: Request | None, placement: Placement | int) -> int:
            source = None if request is None else as_source(tensor)
            values = None if request is None or source is None else request.values(key, source)
            return self._write_values(values, placement, write)

        return job

    def _shards_from(self, ptr: int, size: int, write: Any) -> _Job:
        """Prepare to store what a request makes of a tensor in memory."""

        def job(key: str, request: Request | None, placement: Placement | int) -> int:
            tensor = tensor_at(ptr, size)
            source = None if tensor is None or request is None else as_source(tensor)
            if source is None or request is None:
                return INVALID_PARAMS
            return self._write_values(request.values_of_memory(key, source), placement, write)

        return job

    def _jobs_from(
        self,
        ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any,
        writers: Any,
        *,
        replace: bool,
    ) -> list[_Job]:
        """Prepare a batch; none of it where all tensors are whole and one is bad."""
        whole = parallelisms is None and writers is None
        if len(ptrs) != len(sizes) or (whole and not all(map(is_tensor, ptrs, sizes))):
            return []
        write = self._engine.upsert if replace else self._engine.put
        return [self._shards_from(*place, write) for place in zip(ptrs, sizes, strict=True)]

    def _write_values(self, values: Values | None, placement: Placement | int, write: Any) -> int:
        """Store one after the other, until one fails."""
        if isinstance(placement, int):
            return placement
        if values is None:
            return INVALID_PARAMS
        lends = any(self._mounted.values())
        for key, data in values:
            if not lends and not self._local.fits(len(data)):
                return NO_AVAILABLE_HANDLE
            answer = int(write(self, key, data, placement))
            if answer != OK:
                return answer
        return OK


def _placed(config: Any) -> Placement | int:
    return read_config(config, 1, same_node=True)


def _listed(tensors: Any) -> list[Any]:
    if not isinstance(tensors, list):
        raise TypeError("incompatible function arguments: tensors are a list")
    return tensors


def _each(
    keys: list[str], jobs: list[_Job], parallelisms: Any, writers: Any, config: Any
) -> list[int]:
    """Do the jobs of a batch, each with the request for its key."""
    placement = read_config(config, len(keys), same_node=True)
    nothing = [None] * len(keys)
    requests = [nothing if given is None else given for given in (parallelisms, writers)]
    if (
        isinstance(placement, int)
        or len(jobs) != len(keys)
        or (parallelisms is not None and writers is not None)
        or not all(isinstance(given, list) and len(given) == len(keys) for given in requests)
    ):
        return [INVALID_PARAMS] * len(keys)
    return [
        job(key, read_request(*each), placement.of(place))
        for place, (key, job, *each) in enumerate(zip(keys, jobs, *requests, strict=True))
    ]

"""How the verbs are called that the versions' table has beyond those of the adversity matrix.

Tensors are NumPy arrays here: PyTorch has no wheel for every Python.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aiomooncake import ReplicateConfig, Store, connect
from aiomooncake._safetensors import read_elements, read_entries, write_file
from aiomooncake._tensor_memory import Source, shard_header, source_of, split
from aiomooncake.tensors import HEADER_SIZE, Axis, tensor_in
from tests.adversity.matrix_calls import CALLS, SIZE, Call, Subject, value_of

__all__ = ["ALL_CALLS", "Neighbour"]

_MB: Final = 1 << 20
_AXIS: Final = Axis("tp", 1, 2, split_dim=0)
_SHAPE: Final = (2, (SIZE - HEADER_SIZE) // 8)


@dataclass(frozen=True)
class Neighbour(Subject):
    """A subject with others beside it.

    Attributes:
        target: What connects another store to the same cluster.
    """

    target: str = ""


# --- what is stored ---------------------------------------------------------------------------


def _array(key: str) -> npt.NDArray[Any]:
    """Make the tensor of a key; no other key has it."""
    flat = np.frombuffer(value_of(key, SIZE), np.float32, _SHAPE[0] * _SHAPE[1])
    return flat.reshape(_SHAPE)


def _source(key: str) -> Source:
    return source_of(_array(key), verb="", key=key, rank=None)


def _value(key: str, of: str = "") -> bytes:
    source = _source(of or key)
    return source.header().pack() + source.to_bytes()


def _one(at: Subject) -> Mapping[str, bytes]:
    return {at.key: _value(at.key)}


def _pair(at: Subject) -> Mapping[str, bytes]:
    return {key: _value(key) for key in at.keys}


def _shards(at: Subject) -> Mapping[str, bytes]:
    parts = split(_source(at.key), 2, 0)
    return {
        f"{at.key}_tp_{axis.rank}": header.pack() + part.to_bytes() for axis, header, part in parts
    }


def _shard(at: Subject) -> Mapping[str, bytes]:
    source = _source(at.key)
    return {f"{at.key}_tp_1": shard_header(source, (_AXIS,)).pack() + source.to_bytes()}


def _bytes_of(found: Any) -> bytes | None:
    return None if found is None else bytes(found.tobytes())


# --- tensors ----------------------------------------------------------------------------------


async def _get(at: Subject) -> bytes | None:
    return _bytes_of(await at.store.get_tensor(at.key, like="numpy"))


async def _get_of_ranks(at: Subject) -> list[bytes | None]:
    one = await at.store.get_tensor(at.key, tp_rank=1, tp_size=2, like="numpy")
    whole = await at.store.get_tensor(at.key, tp_size=2, like="numpy")
    return [_bytes_of(one), _bytes_of(whole)]


async def _get_many(at: Subject) -> list[bytes | None]:
    return list(map(_bytes_of, await at.store.get_tensors(at.keys, like="numpy")))


async def _get_shard(at: Subject) -> bytes | None:
    return _bytes_of(await at.store.get_tensor_shard(at.key, [_AXIS], like="numpy"))


async def _get_into(at: Subject) -> bytes | None:
    return _bytes_of(await at.store.get_tensor_into(at.key, at.place(0), like="numpy"))


async def _get_many_into(at: Subject) -> list[bytes | None]:
    places = {key: at.place(i) for i, key in enumerate(at.keys)}
    return list(map(_bytes_of, await at.store.get_tensors_into(places, like="numpy")))


async def _put_from(at: Subject) -> None:
    tensor_in(at.place(0), _SHAPE, "float32")[:] = _array(at.key)
    await at.store.put_tensor_from(at.key, at.place(0))


async def _put_many_from(at: Subject) -> object:
    for i, key in enumerate(at.keys):
        tensor_in(at.place(i), _SHAPE, "float32")[:] = _array(key)
    return await at.store.put_tensors_from({key: at.place(i) for i, key in enumerate(at.keys)})


async def _save(at: Subject) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tensors")
        await at.store.save_tensors(path, at.keys)
        entries = read_entries(path)
        elements = read_elements(path, entries)
        return {entry.name: bytes(part) for entry, part in zip(entries, elements, strict=True)}


async def _load(at: Subject) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tensors")
        sources = {key: _source(key) for key in at.keys}
        write_file(
            path, {k: (each.header(), memoryview(each.to_bytes())) for k, each in sources.items()}
        )
        return await at.store.load_tensors(path)


# --- segments and tasks -----------------------------------------------------------------------


async def _mount(at: Subject) -> bool:
    async with at.store.mount_segment(16 * _MB) as segment:
        return bool(segment.ids) and segment.nbytes == 16 * _MB


async def _mount_file(at: Subject) -> bool:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.name, 16 * _MB)
        async with at.store.mount_segment(path=file.name) as segment:
            return bool(segment.ids) and segment.nbytes == 16 * _MB


@asynccontextmanager
async def _two_beside(at: Subject) -> AsyncIterator[tuple[Store, Store]]:
    assert isinstance(at, Neighbour)
    sizes: dict[str, Any] = {"global_segment_size": 16 * _MB, "local_buffer_size": _MB}
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(connect(at.target, **sizes)) for _ in range(2)]
        await at.store.put(
            at.key, at.value, config=ReplicateConfig(preferred_segments=[one.hostname])
        )
        yield one, two


async def _copy(at: Subject) -> tuple[int, bytes | None]:
    async with _two_beside(at) as (one, two):
        await at.store.copy(at.key, two.hostname)
        return len(await one.replicas(at.key)), await at.store.get(at.key)


async def _move(at: Subject) -> tuple[int, bytes | None]:
    async with _two_beside(at) as (one, two):
        await at.store.move(at.key, one.hostname, two.hostname)
        return len(await one.replicas(at.key)), await at.store.get(at.key)


# --- the table --------------------------------------------------------------------------------


def _nothing(_: Subject) -> None:
    return None


def _nothing_each(at: Subject) -> dict[str, None]:
    return dict.fromkeys(at.keys)


def _elements(at: Subject) -> bytes:
    return _array(at.key).tobytes()


def _elements_each(at: Subject) -> list[bytes]:
    return [_array(key).tobytes() for key in at.keys]


def _yes(_: Subject) -> bool:
    return True


_MORE: Final[Mapping[str, Call]] = {
    "put_tensor": Call(
        lambda at: at.store.put_tensor(at.key, _array(at.key)), _nothing, writes=_one
    ),
    "put_tensor (for ranks)": Call(
        lambda at: at.store.put_tensor(at.key, _array(at.key), tp_size=2), _nothing, writes=_shards
    ),
    "put_tensors": Call(
        lambda at: at.store.put_tensors({key: _array(key) for key in at.keys}),
        _nothing_each,
        writes=_pair,
    ),
    "put_tensor_shard": Call(
        lambda at: at.store.put_tensor_shard(at.key, _array(at.key), [_AXIS]),
        _nothing,
        writes=_shard,
    ),
    "upsert_tensor": Call(
        lambda at: at.store.upsert_tensor(at.key, _array("new " + at.key)),
        _nothing,
        stored=_one,
        writes=lambda at: {at.key: _value(at.key, "new " + at.key)},
    ),
    "get_tensor": Call(_get, _elements, stored=_one),
    "get_tensor (for ranks)": Call(
        _get_of_ranks,
        lambda at: [_array(at.key)[1:].tobytes(), _array(at.key).tobytes()],
        stored=_shards,
    ),
    "get_tensors": Call(_get_many, _elements_each, stored=_pair),
    "get_tensor_shard": Call(_get_shard, _elements, stored=_shard),
    "put_tensor_from": Call(_put_from, _nothing, writes=_one),
    "put_tensors_from": Call(_put_many_from, _nothing_each, writes=_pair),
    "get_tensor_into": Call(_get_into, _elements, stored=_one),
    "get_tensors_into": Call(_get_many_into, _elements_each, stored=_pair),
    "save_tensors": Call(
        _save, lambda at: {key: _array(key).tobytes() for key in at.keys}, stored=_pair
    ),
    "load_tensors": Call(_load, lambda at: at.keys, writes=_pair),
    "mount_segment": Call(_mount, _yes),
    "mount_segment (a file)": Call(_mount_file, _yes),
    "copy": Call(_copy, lambda at: (2, at.value)),
    "move": Call(_move, lambda at: (1, at.value)),
}

ALL_CALLS: Final[Mapping[str, Call]] = {**CALLS, **_MORE}
"""The adversity matrix's, and these."""

"""Upstream's "Unified Parallel Tensor IO API": shards with the axes along which they were cut.

As in ``test_upstream_values.py``. Ours are ``put_tensor_shard`` and ``get_tensor_shard``.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

from aiomooncake import InvalidArgumentError, Store
from aiomooncake.tensors import HEADER_SIZE, Axis
from tests.examples.upstream.conftest import Registered

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch

TABLE = torch.arange(64.0).reshape(8, 8)
LEFT, RIGHT = TABLE[:, :4].contiguous(), TABLE[:, 4:].contiguous()
SERIALIZED = HEADER_SIZE + TABLE.nbytes
NAMES = ["tensor1", "tensor2"]


def same(found: Any, expected: Any) -> bool:
    return found is not None and found.dtype == expected.dtype and bool(found.equal(expected))


class Unified:
    """Upstream's classes, filled as its examples fill them."""

    def __init__(self, mooncake: Any) -> None:
        self._mooncake = mooncake

    def axes(self, *axes: Axis) -> Any:
        """Make a ``TensorParallelism`` of our axes, which have the same fields."""
        parallelism = self._mooncake.TensorParallelism()
        parallelism.axes = [self._axis(axis) for axis in axes]
        return parallelism

    def _axis(self, axis: Axis) -> Any:
        made = self._mooncake.ParallelAxis()
        for name in ("kind", "rank", "size", "split_dim", "expert_id", "stage_id"):
            setattr(made, name, getattr(axis, name))
        return made

    def target(self, mode: str, *axes: Axis) -> Any:
        made = self._mooncake.ReadTarget()
        made.mode = mode
        made.parallelism = self.axes(*axes) if axes else None
        return made


@pytest.fixture
def unified(mooncake: Any) -> Unified:
    return Unified(mooncake)


def tp(rank: int, dim: int = 1) -> Axis:
    return Axis("tp", rank, 2, split_dim=dim)


def test_axes_and_targets(mooncake: Any, unified: Unified) -> None:
    """Unified Parallel Tensor IO API, ParallelAxis, TensorParallelism and ReadTarget."""
    assert mooncake.ReadTarget().mode == "as_stored"
    assert mooncake.ReadTarget().parallelism is None
    axis = mooncake.ParallelAxis()
    assert (axis.kind, axis.rank, axis.size) == ("", 0, 1)
    assert axis.split_dim is axis.expert_id is axis.stage_id is None
    both = unified.axes(Axis("dp", 0, 2), tp(1))
    assert [axis.kind for axis in both.axes] == ["dp", "tp"]
    assert both.axes[1].split_dim == 1
    with pytest.raises(InvalidArgumentError, match="split_dim"):
        Axis("tp", 0, 8)


async def test_shards_of_one_axis(store: Store, unified: Unified) -> None:
    """Unified API, ``put_tensor_with_parallelism()`` and ``get_…()``: shards of a tensor.

    Upstream says that a target needs its axes for ``"shard"`` only. For ``"full"`` of stored
    shards the answer without axes is None, and with the axes of any shard it is the whole.
    ``"as_stored"`` and no target find no such key either.
    """
    engine = store.engine
    for rank, shard in enumerate((LEFT, RIGHT)):
        axes = unified.axes(tp(rank))
        assert await engine.put_tensor_with_parallelism("weights", shard, axes) == 0
        assert same(
            await engine.get_tensor_with_parallelism("weights", unified.target("shard", tp(rank))),
            shard,
        )
    read = engine.get_tensor_with_parallelism
    assert same(await read("weights", unified.target("full", tp(0))), TABLE)
    for target in (None, *map(unified.target, ("full", "shard", "as_stored"))):
        assert await read("weights", target) is None

    for rank, shard in enumerate((LEFT, RIGHT)):
        await store.put_tensor_shard("ours", shard, [tp(rank)])
        assert same(await store.get_tensor_shard("weights", [tp(rank)]), shard)
    assert same(await read("ours", unified.target("full", tp(1))), TABLE)


async def test_a_whole_tensor(store: Store, unified: Unified) -> None:
    """Unified API: ``parallelism=None`` is ``put_tensor``, and no target or "full" reads it."""
    engine = store.engine
    assert await engine.put_tensor_with_parallelism("full", TABLE) == 0
    for target in (None, unified.target("as_stored"), unified.target("full")):
        assert same(await engine.get_tensor_with_parallelism("full", target), TABLE)
    assert await engine.get_tensor_with_parallelism("full", unified.target("shard", tp(1))) is None
    assert same(await store.get_tensor("full"), TABLE)


@pytest.mark.parametrize(
    "other",
    [Axis("dp", 0, 2), Axis("pp", 1, 2, stage_id=1), Axis("ep", 1, 2, expert_id=3)],
    ids=lambda axis: axis.kind,
)
async def test_layouts_of_several_axes(store: Store, unified: Unified, other: Axis) -> None:
    """Unified API: with another axis the binding takes the whole, and stores the rank's shard.

    With ``"tp"`` alone it believes that it is given the shard. Ours is always given the shard.
    """
    engine, axes = store.engine, (other, tp(1))
    assert await engine.put_tensor_with_parallelism("key", TABLE, unified.axes(*axes)) == 0
    found = await engine.get_tensor_with_parallelism("key", unified.target("shard", *axes))
    assert same(found, RIGHT)
    assert await engine.put_tensor_with_parallelism("alone", TABLE, unified.axes(tp(1))) == 0
    found = await engine.get_tensor_with_parallelism("alone", unified.target("shard", tp(1)))
    assert same(found, TABLE)
    assert await engine.put_tensor_with_parallelism("copy", TABLE, unified.axes(other)) == 0
    found = await engine.get_tensor_with_parallelism("copy", unified.target("shard", other))
    assert same(found, TABLE)

    await store.put_tensor_shard("ours", RIGHT, axes)
    assert same(await store.get_tensor_shard("ours", axes), RIGHT)
    assert same(await store.get_tensor_shard("key", axes), RIGHT)


async def test_writer_partitions(store: Store, unified: Unified) -> None:
    """Unified API, ``writer_partition``: the binding splits the whole and stores one shard.

    Upstream describes it as ``(rank, size, split_dim)``; a tuple is refused. It is any object with
    attributes of these names, for which the wheel has no class.
    """
    engine, parts = store.engine, [SimpleNamespace(rank=r, size=2, split_dim=1) for r in (0, 1)]
    put = engine.put_tensor_with_parallelism
    assert await put("key", TABLE, writer_partition=(0, 2, 1)) == -600
    assert await put("key", TABLE, unified.axes(tp(0)), writer_partition=parts[0]) == -600
    for part in parts:
        assert await put("key", TABLE, writer_partition=part) == 0
        batch = await engine.batch_put_tensor_with_parallelism(
            NAMES, [TABLE, TABLE + 1], writer_partitions=[part, part]
        )
        assert batch == [0, 0]
    targets = [unified.target("full"), unified.target("shard", tp(1))]
    found = await engine.batch_get_tensor_with_parallelism(["key", "tensor1"], targets)
    assert all(map(same, found, [TABLE, RIGHT]))

    await store.put_tensor("ours", TABLE, tp_size=2, split_dim=1)  # all shards in one call
    assert same(await store.get_tensor("ours", tp_rank=1, tp_size=2), RIGHT)


async def test_batches_of_the_unified_api(store: Store, unified: Unified) -> None:
    """Unified API, ``batch_put_…()``, ``batch_get_…()``, ``upsert_…()``, ``batch_upsert_…()``.

    Upstream's argument ``tensors`` is ``tensors_list`` in the wheel.
    """
    engine, axes = store.engine, unified.axes(tp(1))
    put = await engine.batch_put_tensor_with_parallelism(NAMES, tensors_list=[RIGHT, RIGHT + 1],
        parallelisms=[axes, axes])  # fmt: skip
    assert put == [0, 0]
    targets = [unified.target("shard", tp(1))] * 3
    *found, nothing = await engine.batch_get_tensor_with_parallelism([*NAMES, "no"], targets)
    assert all(map(same, found, [RIGHT, RIGHT + 1]))
    assert nothing is None
    assert await engine.upsert_tensor_with_parallelism("tensor1", RIGHT + 2, axes) == 0
    again = await engine.batch_upsert_tensor_with_parallelism(["tensor2"], [RIGHT + 2], [axes])
    assert again == [0]
    for name in NAMES:
        assert same(await store.get_tensor_shard(name, [tp(1)]), RIGHT + 2)


async def test_the_unified_api_in_registered_memory(
    store: Store, unified: Unified, registered: Registered
) -> None:
    """Unified API, ``get_tensor_with_parallelism_into()`` and the ``_from`` variants.

    Not in upstream's text: ``put_…_from`` takes the whole tensor also where ``"tp"`` is the only
    axis, and stores the rank's shard, although without ``_from`` it takes the shard.
    """
    engine, memory = store.engine, await registered(8192)
    at, full = memory.ctypes.data, (await registered(4096)).ctypes.data
    await store.put_tensor("whole", TABLE)
    assert same(await engine.get_tensor_with_parallelism_into("whole", full, 4096), TABLE)
    axes, target = unified.axes(tp(1)), unified.target("shard", tp(1))
    assert await engine.put_tensor_with_parallelism_from("tensor1", full, SERIALIZED, axes) == 0
    batch = ([full], [SERIALIZED], [axes])
    assert await engine.batch_put_tensor_with_parallelism_from(["tensor2"], *batch) == [0]
    one = await engine.get_tensor_with_parallelism_into("tensor1", at, 4096, target)
    assert same(one, RIGHT)
    one, nothing = await engine.batch_get_tensor_with_parallelism_into(
        ["tensor2", "nothing"], [at, at + 4096], [4096, 4096], [target, target]
    )
    assert same(one, RIGHT)
    assert nothing is None
    upsert = engine.upsert_tensor_with_parallelism_from
    assert await upsert("tensor1", full, SERIALIZED, axes) == 0
    assert await engine.batch_upsert_tensor_with_parallelism_from(["tensor2"], *batch) == [0]
    for name in NAMES:
        assert same(await store.get_tensor_shard(name, [tp(1)]), RIGHT)


# --- dummy clients ------------------------------------------------------------------------------


async def test_tensors_of_dummy_clients(store: Store, dummy: Store, unified: Unified) -> None:
    """Class MooncakeDistributedStore, ``setup_dummy()``: tensors.

    Upstream refers dummy clients to the ``_into`` forms for tensors that are put together from
    shards. These answer None too, for the whole and for a shard; our verb puts them together.
    """
    engine = dummy.engine
    assert await engine.put_tensor("key", TABLE) == 0
    assert same(await engine.get_tensor("key"), TABLE)
    at = await engine.alloc_from_mem_pool(8192)
    assert await engine.register_buffer(at, 8192) == 0
    assert same(await engine.get_tensor_into("key", at, 4096), TABLE)
    assert await engine.put_tensor_from("from", at, SERIALIZED) == 0
    assert await engine.upsert_tensor("key", TABLE + 1) == 0
    assert await engine.pub_tensor("pub", TABLE) == 0
    assert await engine.put_tensor_with_tp("split", TABLE, tp_size=2) == 0
    assert same(await engine.get_tensor_with_tp("split", 1, 2), TABLE[4:])

    for rank, shard in enumerate((LEFT, RIGHT)):
        axes, mine = unified.axes(tp(rank)), unified.target("shard", tp(rank))
        assert await engine.put_tensor_with_parallelism("shards", shard, axes) == 0
        assert same(await engine.get_tensor_with_parallelism("shards", mine), shard)
        assert await engine.get_tensor_with_parallelism_into("shards", at, 4096, mine) is None
    full = unified.target("full", tp(0))
    assert await engine.get_tensor_with_parallelism("shards", full) is None
    assert await engine.get_tensor_with_parallelism_into("shards", at, 4096, full) is None
    assert same(await store.engine.get_tensor_with_parallelism("shards", full), TABLE)
    assert await engine.unregister_buffer(at) == 0

    assert same(await dummy.get_tensor("shards", tp_size=2), TABLE)

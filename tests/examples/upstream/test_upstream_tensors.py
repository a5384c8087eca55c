"""Upstream's examples for tensors: whole, split for ranks, and in registered memory.

As in ``test_upstream_values.py``. Both sides write one format: what one stores the other reads.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from aiomooncake import InvalidArgumentError, ReplicateConfig, Store
from aiomooncake.tensors import HEADER_SIZE
from tests.examples.upstream.conftest import Config, Registered

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch

TABLE = torch.arange(64.0).reshape(8, 8)
LEFT, RIGHT = TABLE[:, :4].contiguous(), TABLE[:, 4:].contiguous()
TOP, BOTTOM = TABLE[:4], TABLE[4:]
SERIALIZED = HEADER_SIZE + TABLE.nbytes
NAMES = ["tensor1", "tensor2"]


def same(found: Any, expected: Any) -> bool:
    return found is not None and found.dtype == expected.dtype and bool(found.equal(expected))


# --- whole tensors ------------------------------------------------------------------------------


async def test_put_and_get_tensor(store: Store) -> None:
    """PyTorch Tensor Operations, ``put_tensor()`` and ``get_tensor()``."""
    tensor = torch.randn(100, 100)
    assert await store.engine.put_tensor("my_tensor", tensor) == 0
    assert same(await store.engine.get_tensor("my_tensor"), tensor)
    assert await store.engine.get_tensor("nothing") is None

    await store.put_tensor("ours", tensor)
    assert same(await store.get_tensor("ours"), tensor)
    assert same(await store.engine.get_tensor("ours"), tensor)
    assert same(await store.get_tensor("my_tensor"), tensor)
    assert await store.get_tensor("nothing") is None


async def test_batch_get_tensor(store: Store) -> None:
    """PyTorch Tensor Operations, ``batch_put_tensor()`` and ``batch_get_tensor()``."""
    tensors = [torch.randn(100, 100), torch.randn(50, 50)]
    assert await store.engine.batch_put_tensor(NAMES, tensors) == [0, 0]
    *found, nothing = await store.engine.batch_get_tensor([*NAMES, "nonexistent"])
    assert all(map(same, found, tensors))
    assert nothing is None

    await store.put_tensors({"a": tensors[0], "b": tensors[1]})
    *found, nothing = await store.get_tensors(["a", "b", "nonexistent"])
    assert all(map(same, found, tensors))
    assert nothing is None


async def test_pub_tensor(store: Store, peer: Store, native: Config, mooncake: Any) -> None:
    """Class MooncakeDistributedStore, ``pub_tensor()`` and ``batch_pub_tensor()``.

    Upstream asks for three copies; on two segments they are two. Here the binding takes
    ``prefer_alloc_in_same_node``, which a ``put`` of bytes is refused for.
    """
    pinned = native(replica_num=3, soft_pin_action=mooncake.SoftPinAction.ENABLE)
    assert await store.engine.pub_tensor("my_tensor", TABLE, pinned) == 0
    assert len(await store.engine.get_replica_desc("my_tensor")) == 2
    assert await store.engine.batch_pub_tensor(NAMES, [TABLE, TABLE], pinned) == [0, 0]
    same_node = native(prefer_alloc_in_same_node=True)
    assert await store.engine.pub_tensor("near", TABLE, same_node) == 0

    ours = ReplicateConfig(3, soft_pin_action="enable")
    await store.put_tensor("ours", TABLE, config=ours)
    await store.put_tensors({"a": TABLE, "b": TABLE}, config=ours)
    assert {len(copies) for copies in await store.replicas_many(["ours", "a", "b"])} == {2}
    await store.put_tensor(
        "our near", TABLE, config=ReplicateConfig(prefer_alloc_in_same_node=True)
    )
    assert same(await store.get_tensor("our near"), TABLE)


async def test_upsert_tensor(store: Store, native: Config, mooncake: Any) -> None:
    """PyTorch Tensor Operations, ``upsert_tensor()``, ``upsert_pub_tensor()`` and their batches."""
    engine, config = store.engine, native(
        replica_num=2, soft_pin_action=mooncake.SoftPinAction.ENABLE
    )  # fmt: skip
    assert await engine.put_tensor("tensor1", TABLE) == 0
    assert await engine.upsert_tensor("tensor1", TABLE + 1) == 0
    assert same(await engine.get_tensor("tensor1"), TABLE + 1)
    assert await engine.batch_upsert_tensor(NAMES, [TABLE + 2, TABLE]) == [0, 0]
    assert same(await engine.get_tensor("tensor1"), TABLE + 2)
    assert await engine.upsert_pub_tensor("tensor1", TABLE + 3, config) == 0
    assert await engine.batch_upsert_pub_tensor(["tensor2"], [TABLE + 3], config) == [0]
    assert all(map(same, await engine.batch_get_tensor(NAMES), [TABLE + 3] * 2))

    await store.upsert_tensor("tensor1", TABLE + 4, config=ReplicateConfig(2))
    assert same(await store.get_tensor("tensor1"), TABLE + 4)


# --- tensor parallelism ---------------------------------------------------------------------------


async def test_put_tensor_with_tp(store: Store) -> None:
    """PyTorch Tensor Operations, ``put_tensor_with_tp()`` and ``get_tensor_with_tp()``.

    Whatever the rank, the shards of all are stored, as upstream says. A reader that believes in
    another ``tp_size`` is given the shard of that name without a word; ours raises.
    """
    engine = store.engine
    assert await engine.put_tensor_with_tp("key", TABLE, tp_rank=1, tp_size=2, split_dim=1) == 0
    assert await engine.batch_is_exist(["key_tp_0", "key_tp_1", "key"]) == [1, 1, 0]
    for rank, shard in enumerate((LEFT, RIGHT)):
        assert same(await engine.get_tensor_with_tp("key", rank, 2, 1), shard)
    assert same(await engine.get_tensor_with_tp("key", 1, 4, 1), RIGHT)
    assert await engine.get_tensor_with_tp("nothing", 1, 2, 1) is None

    await store.put_tensor("ours", TABLE, tp_size=2, split_dim=1)
    assert same(await store.get_tensor("ours", tp_rank=1, tp_size=2), RIGHT)
    assert same(await store.get_tensor("key", tp_size=2), TABLE)  # all shards, put together
    with pytest.raises(InvalidArgumentError):
        await store.get_tensor("ours", tp_rank=1, tp_size=4)
    assert await store.get_tensor("nothing", tp_rank=1, tp_size=2) is None


async def test_batches_with_tp(store: Store, native: Config) -> None:
    """PyTorch Tensor Operations, ``pub_tensor_with_tp()``, ``batch_…_tensor_with_tp()``."""
    engine, tensors = store.engine, [TABLE, TABLE + 1]
    assert await engine.batch_put_tensor_with_tp(NAMES, tensors, tp_size=2) == [0, 0]
    *found, nothing = await engine.batch_get_tensor_with_tp([*NAMES, "nothing"], 1, 2)
    assert all(map(same, found, [BOTTOM, BOTTOM + 1]))
    assert nothing is None
    assert await engine.pub_tensor_with_tp("pub", TABLE, native(), tp_size=2) == 0
    assert await engine.batch_pub_tensor_with_tp(["a", "b"], tensors, native(), 0, 2, 0) == [0, 0]
    assert same(await engine.get_tensor_with_tp("pub", 0, 2), TOP)
    assert same(await engine.get_tensor_with_tp("b", 0, 2), TOP + 1)

    items = {"our 1": TABLE, "our 2": TABLE + 1}
    await store.put_tensors(items, tp_size=2, config=ReplicateConfig())
    found = await store.get_tensors(["our 1", "our 2", "nothing"], tp_rank=1, tp_size=2)
    assert all(map(same, found[:2], [BOTTOM, BOTTOM + 1]))
    assert found[2] is None


# --- registered memory --------------------------------------------------------------------------


async def test_get_tensor_into(store: Store, registered: Registered) -> None:
    """PyTorch Tensor Operations (Zero Copy), ``get_tensor_into()`` and its batch.

    Upstream heads the second one ``batch_get_tensor()``, and names its keys ``base_keys``; the
    method is ``batch_get_tensor_into(keys, …)``.
    """
    memory = await registered(8192)
    at = memory.ctypes.data
    await store.put_tensor("key", TABLE)
    found = await store.engine.get_tensor_into("key", at, 4096)
    assert found is not None
    assert same(found, TABLE)
    assert found.data_ptr() == at + HEADER_SIZE
    assert await store.engine.get_tensor_into("key", at, SERIALIZED - 1) is None
    one, nothing = await store.engine.batch_get_tensor_into(
        keys=["key", "nothing"], buffer_ptrs=[at, at + 4096], sizes=[4096, 4096]
    )
    assert same(one, TABLE)
    assert nothing is None

    async with store.allocate(8192) as buffer:
        assert same(await store.get_tensor_into("key", buffer), TABLE)
        one, nothing = await store.get_tensors_into({"key": buffer[:4096], "no": buffer[4096:]})
        assert same(one, TABLE)
        assert nothing is None
        del one


async def test_get_tensor_with_tp_into(store: Store, registered: Registered) -> None:
    """PyTorch Tensor Operations (Zero Copy), ``get_tensor_with_tp_into()`` and its batch.

    Our verb reads a shard by the name that upstream gives it.
    """
    memory = await registered(8192)
    at = memory.ctypes.data
    await store.put_tensors({"tensor1": TABLE, "tensor2": TABLE + 1}, tp_size=2)
    found = await store.engine.get_tensor_with_tp_into("tensor1", at, 4096, 1, 2, 0)
    assert same(found, BOTTOM)
    *both, nothing = await store.engine.batch_get_tensor_with_tp_into(
        [*NAMES, "nothing"], [at, at + 2048, at + 4096], [2048] * 3, 1, 2
    )
    assert all(map(same, both, [BOTTOM, BOTTOM + 1]))
    assert nothing is None

    async with store.allocate(4096) as buffer:
        assert same(await store.get_tensor_into("tensor1_tp_1", buffer), BOTTOM)


async def test_put_tensor_from(store: Store, registered: Registered) -> None:
    """PyTorch Tensor Operations (Zero Copy), ``put_tensor_from()``, its batch and the upserts.

    The size is that of the tensor, not of the memory: else the code is -600. Ours finds it itself.
    """
    memory, engine = await registered(4096), store.engine
    at = memory.ctypes.data
    await store.put_tensor("key", TABLE)
    assert same(await engine.get_tensor_into("key", at, 4096), TABLE)
    assert await engine.put_tensor_from("tensor1", at, SERIALIZED) == 0
    assert await engine.put_tensor_from("more", at, 4096) == -600
    assert await engine.batch_put_tensor_from(["tensor2"], [at], [SERIALIZED]) == [0]
    assert await engine.upsert_tensor_from("key", at, SERIALIZED) == 0
    assert await engine.batch_upsert_tensor_from(["key"], [at], [SERIALIZED]) == [0]
    assert all(map(same, await engine.batch_get_tensor([*NAMES, "key"]), [TABLE] * 3))

    async with store.allocate(4096) as buffer:
        await store.get_tensor_into("key", buffer)
        await store.put_tensor_from("ours", buffer)
        await store.put_tensors_from({"our 2": buffer})
    assert all(map(same, await store.get_tensors(["ours", "our 2"]), [TABLE] * 2))


async def test_put_tensor_with_tp_from(store: Store, registered: Registered) -> None:
    """PyTorch Tensor Operations (Zero Copy), ``put_tensor_with_tp_from()`` and its batch.

    No verb of ours splits what lies in registered memory; ``put_tensor`` splits the tensor there.
    """
    memory, engine = await registered(4096), store.engine
    at = memory.ctypes.data
    await store.put_tensor("key", TABLE)
    there = await engine.get_tensor_into("key", at, 4096)
    assert await engine.put_tensor_with_tp_from("tensor1", at, SERIALIZED, tp_size=2) == 0
    batch = await engine.batch_put_tensor_with_tp_from(["tensor2"], [at], [SERIALIZED], 0, 2, 0)
    assert batch == [0]
    for name in NAMES:
        assert same(await engine.get_tensor_with_tp(name, 1, 2), BOTTOM)
    assert await engine.put_tensor_with_tp_from("whole", at, SERIALIZED) == 0
    assert same(await engine.get_tensor("whole"), TABLE)

    await store.put_tensor("ours", there, tp_size=2)
    assert same(await store.get_tensor("ours", tp_rank=1, tp_size=2), BOTTOM)

"""Upstream's examples for ``ReplicateConfig``, and for where copies have gone.

As in ``test_upstream_values.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from aiomooncake import ConfigError, InvalidArgumentError, MooncakeError, ReplicateConfig, Store
from tests.examples.upstream.conftest import Config


def test_replicate_config(native: Config, mooncake: Any) -> None:
    """ReplicateConfig Configuration, "Class Definition": the defaults of both are the same."""
    theirs, ours = native(), ReplicateConfig()
    names = """replica_num nof_replica_num dfs_replica_num soft_pin_ttl_ms with_hard_pin
        preferred_segment prefer_alloc_in_same_node group_ids"""
    for name in names.split():
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.soft_pin_action.name.lower() == ours.soft_pin_action == "preserve"
    assert theirs.data_type.name.lower() == ours.data_type


async def test_replica_num(store: Store, peer: Store, native: Config) -> None:
    """ReplicateConfig, ``replica_num``: three copies on two segments are two, and no error."""
    assert await store.engine.put("three", b"value", native(replica_num=3)) == 0
    assert len(await store.engine.get_replica_desc("three")) == 2

    await store.put("our three", b"value", config=ReplicateConfig(replica_num=3))
    assert len(await store.replicas("our three")) == 2


async def test_copies_on_other_media(store: Store, native: Config) -> None:
    """ReplicateConfig, ``nof_replica_num`` and ``dfs_replica_num``: refused without such a pool."""
    for theirs, ours, code in (
        (native(nof_replica_num=1), ReplicateConfig(nof_replica_num=1), -600),
        (native(dfs_replica_num=1), ReplicateConfig(dfs_replica_num=1), -1601),
    ):
        assert await store.engine.put("key", b"value", theirs) == code
        with pytest.raises(MooncakeError) as refused:
            await store.put("key", b"value", config=ours)
        assert refused.value.code == code
    assert await store.engine.put("key", b"", native(replica_num=0, dfs_replica_num=1)) == -600
    with pytest.raises(ConfigError, match="replica_num=1"):
        ReplicateConfig(0, dfs_replica_num=1)


async def test_soft_pin_action(store: Store, native: Config, mooncake: Any) -> None:
    """ReplicateConfig, ``soft_pin_action``: a lifetime goes with ENABLE, up to the master's most.

    That a pin delays eviction is tested in ``tests/contract/test_placement.py``.
    """
    enable = mooncake.SoftPinAction.ENABLE
    pinned = native(soft_pin_action=enable, soft_pin_ttl_ms=60_000)
    assert await store.engine.put("pinned", b"value", pinned) == 0
    for options in (
        {"soft_pin_ttl_ms": 60_000},
        {"soft_pin_action": enable, "soft_pin_ttl_ms": 1 << 40},
    ):
        assert await store.engine.put("refused", b"value", native(**options)) == -600
    ordinary = native(soft_pin_action=enable, soft_pin_ttl_ms=0)
    assert await store.engine.put("ordinary", b"value", ordinary) == 0

    ours = ReplicateConfig(soft_pin_action="enable", soft_pin_ttl_ms=60_000)
    await store.put("ours", b"value", config=ours)
    with pytest.raises(ConfigError, match="soft_pin_action"):
        ReplicateConfig(soft_pin_ttl_ms=60_000)
    with pytest.raises(InvalidArgumentError, match="max_kv_soft_pin_ttl"):
        await store.put("refused", b"value", config=ours.replace(soft_pin_ttl_ms=1 << 40))


async def test_with_hard_pin(store: Store, native: Config) -> None:
    """ReplicateConfig, ``with_hard_pin``: not evicted, but it can be removed, as any other."""
    assert await store.engine.put("pinned", b"value", native(with_hard_pin=True)) == 0
    assert await store.engine.remove("pinned") == 0

    await store.put("ours", b"value", config=ReplicateConfig(with_hard_pin=True))
    assert await store.remove("ours")


async def test_preferred_segment(store: Store, peer: Store, native: Config) -> None:
    """ReplicateConfig, ``preferred_segment``: its owner's name; an absent one is passed over."""
    for name, owner in (("here", store), ("there", peer)):
        there = native(preferred_segment=await owner.engine.get_hostname())
        assert await store.engine.put(name, b"value", there) == 0
        await store.put(
            f"our {name}", b"value", config=ReplicateConfig(preferred_segment=owner.hostname)
        )
    found = await store.replicas_many(["here", "there", "our here", "our there"])
    here, there_, our_here, our_there = (copies[0].endpoint for copies in found)
    assert here == our_here != there_ == our_there
    absent = native(preferred_segment="localhost:12345")
    assert await store.engine.put("nowhere", b"value", absent) == 0


async def test_prefer_alloc_in_same_node(store: Store, native: Config) -> None:
    """ReplicateConfig, ``prefer_alloc_in_same_node``.

    Upstream names writes of several buffers and of tensors as those that profit. In the wheel the
    others are refused with -600 (tensors are in ``test_upstream_tensors.py``); our verbs take the
    way that works.
    """
    same = native(prefer_alloc_in_same_node=True)
    assert await store.engine.put("key", b"value", same) == -600
    assert await store.engine.put_batch(["key"], [b"value"], same) == -600
    assert await store.engine.put_parts("key", b"value", config=same) == -600
    assert not await store.exists("key")

    await store.put("key", b"value", config=ReplicateConfig(prefer_alloc_in_same_node=True))
    assert len(await store.replicas("key")) == 1
    with pytest.raises(ConfigError, match="replica_num=1"):
        ReplicateConfig(2, prefer_alloc_in_same_node=True)


async def test_group_ids(store: Store, native: Config) -> None:
    """ReplicateConfig, ``group_ids``: one for each key, or -600."""
    items = {"key-a": b"value-a", "key-b": b"value-b", "key-c": b"value-c"}
    keys, values = [*items], [*items.values()]
    groups = ["session-a", "", "session-b"]
    assert await store.engine.put_batch(keys, values, native(group_ids=groups)) == 0
    assert await store.engine.get_batch(keys) == values
    one = native(group_ids=["session-a"])
    assert await store.engine.put("key-d", b"value-d", one) == 0
    assert await store.engine.put_batch(["key-e", "key-f"], values[:2], one) == -600

    await store.remove_all(force=True)
    await store.put_many(items, config=ReplicateConfig(group_ids=groups))
    await store.put("key-d", b"value-d", config=ReplicateConfig(group_ids=["session-a"]))
    assert await store.get_many([*keys, "key-d"]) == [*values, b"value-d"]
    with pytest.raises(InvalidArgumentError, match="group_ids"):
        await store.put_many(
            {"key-e": b"e", "key-f": b"f"}, config=ReplicateConfig(group_ids=["a"])
        )


async def test_replica_descriptors(store: Store) -> None:
    """Class MooncakeDistributedStore, ``get_replica_desc()`` and ``batch_get_replica_desc()``.

    Keys that are not there are missing in the answer; upstream does not say so.
    """
    await store.put_many({"key1": b"value", "mooncake_key": b"value"})
    (one,) = await store.engine.get_replica_desc("mooncake_key")
    assert one.status.name == "COMPLETE"
    assert one.is_memory_replica()
    assert not one.is_disk_replica()
    place = one.get_memory_descriptor().buffer_descriptor
    assert place.size == 5
    many = await store.engine.batch_get_replica_desc(["key1", "key2"])
    assert {key: len(copies) for key, copies in many.items()} == {"key1": 1}
    assert await store.engine.get_replica_desc("key2") == []

    (ours,) = await store.replicas("mooncake_key")
    assert (ours.kind, ours.status, ours.size) == ("memory", "complete", 5)
    assert ours.endpoint == place.transport_endpoint
    found, nothing = await store.replicas_many(["key1", "key2"])
    assert (len(found), nothing) == (1, ())

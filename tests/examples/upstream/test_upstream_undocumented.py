"""What the wheel has and upstream's page has not, by the examples in upstream's own tests of it.

As in ``test_upstream_values.py``; the docstring names upstream's file.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import ReplicateConfig, Store
from tests.examples.upstream.conftest import Registered

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch


def same(found: Any, expected: Any) -> bool:
    return found is not None and found.dtype == expected.dtype and bool(found.equal(expected))


async def test_batch_replica_clear(store: Store) -> None:
    """Upstream's ``test_batch_replica_clear.py``: copies go of keys that no lease protects.

    That file takes it that a put alone gives a lease. It does not: a read does. Where all copies
    are to go, our verb is ``remove_many``.
    """
    clear = store.engine.batch_replica_clear
    here = ReplicateConfig(preferred_segment=store.hostname)
    items = {"put": b"1", "read": b"2", "there": b"3", "elsewhere": b"4"}
    await store.put_many(items, config=here)
    await store.get("read")
    assert await clear([]) == []
    assert await clear(["put", "read", "nothing"]) == ["put"]
    assert await clear(["there"], await store.engine.get_hostname()) == ["there"]
    assert await clear(["elsewhere"], "127.0.0.1:1") == []
    assert await store.exists_many(items) == [
        False, True, False, True,
    ]  # fmt: skip

    await store.put("ours", b"5")
    assert await store.remove_many(["ours", "nothing"]) == [True, False]


async def test_safetensors(store: Store, tmp_path: Path) -> None:
    """Upstream's ``test_safetensor_functions.py``: a tensor to a file and back, by another key."""
    table, file = torch.arange(6.0).reshape(2, 3), str(tmp_path / "x.safetensors")
    engine = store.engine
    assert await engine.put_tensor("key", table) == 0
    assert await engine.save_tensor_to_safetensor("key", file) == 0
    assert await engine.save_tensor_to_safetensor("nothing", file) == -1100
    assert same(await engine.load_tensor_from_safetensor("other", file), table)
    assert same(await engine.get_tensor("other"), table)
    assert await engine.load_tensor_from_safetensor("none", f"{file}.nope") is None

    await store.save_tensors(file, ["key", "other"])  # one file of both
    assert sorted(await store.load_tensors(file, prefix="ours/")) == ["ours/key", "ours/other"]
    assert same(await store.get_tensor("ours/key"), table)


@pytest.mark.parametrize("shape", [(0,), (0, 4096), (2, 0, 3), (1, 0)], ids=str)
async def test_tensors_without_elements(
    store: Store, registered: Registered, shape: tuple[int, ...]
) -> None:
    """Upstream's ``test_put_get_tensor.py``: they have a shape and a type all the same."""
    empty, memory = torch.empty(shape, dtype=torch.bfloat16), await registered(4096)
    engine, at = store.engine, memory.ctypes.data
    assert await engine.put_tensor("key", empty) == 0
    assert same(await engine.get_tensor("key"), empty)
    assert same(await engine.get_tensor_into("key", at, 4096), empty)
    assert await engine.put_tensor_from("from", at, await engine.get_size("key")) == 0
    assert same(await engine.get_tensor("from"), empty)

    await store.put_tensor("ours", empty)
    assert same(await store.get_tensor("ours"), empty)


async def test_clients_that_share_keys(store: Store, peer: Store) -> None:
    """Upstream's ``test_multi_dummy_clients.py``: what one client stores the other reads."""
    assert await store.engine.put("key1", b"Hello, World!") == 0
    assert await peer.engine.is_exist("key1") == 1
    assert await peer.engine.get_size("key1") == 13
    assert await peer.engine.get("key1") == b"Hello, World!"
    assert await peer.engine.put("key1", b"Hello, World!") == 0

    await peer.put("ours", b"Hello, World!")
    assert await store.get("ours") == b"Hello, World!"


async def test_what_a_client_tells_of_itself(store: Store) -> None:
    """``health_check()`` and ``get_offload_rpc_read_count()``; there is no disk tier."""
    assert await store.engine.health_check() == 0
    assert await store.engine.get_offload_rpc_read_count() == 0
    assert await store.engine.unmount_local_disk_segment() == 0

    assert store.health().state == "ready"

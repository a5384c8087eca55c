"""What the binding's own tensor methods answer, on the in-memory engine and on the real one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from tests.contract import unset_tensor_calls
from tests.contract.engines import Engine, Memory

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch

HEADER = 304
TABLE = torch.arange(6.0).reshape(2, 3)
VALUE = HEADER + 24


@pytest.fixture
def tensors(native: NativeStore) -> Any:
    """The client, with methods that :class:`NativeStore` does not declare."""
    return native


def same(one: Any, other: Any) -> bool:
    return one is not None and one.dtype == other.dtype and bool(one.equal(other))


# --- one tensor -------------------------------------------------------------------------------


def test_a_tensor_comes_back(tensors: Any, key: str, other: str) -> None:
    assert tensors.put_tensor(key, TABLE) == 0
    assert tensors.get_size(key) == VALUE
    assert same(tensors.get_tensor(key), TABLE)
    assert tensors.put_tensor(other, TABLE.t()) == 0
    assert same(tensors.get_tensor(other), TABLE.t())


def test_a_miss_and_what_is_no_tensor_are_none(tensors: Any, key: str, missing: str) -> None:
    assert tensors.put(key, b"x" * 400) == 0
    for name in (key, missing, ""):
        assert tensors.get_tensor(name) is None
        assert tensors.get_tensor_with_tp(name) is None
    assert tensors.batch_get_tensor([key, missing]) == [None, None]
    assert tensors.batch_get_tensor([]) == []


def test_a_tensor_of_no_dimensions_gets_one(tensors: Any, key: str, other: str) -> None:
    assert tensors.put_tensor(key, torch.tensor(3.5)) == 0
    assert same(tensors.get_tensor(key), torch.tensor([3.5]))
    assert tensors.put_tensor(other, torch.empty(0, 3)) == 0
    assert tensors.get_size(other) == HEADER
    assert tensors.get_tensor(other).shape == (0, 3)


BAD = {
    "nothing": None,
    "bytes": b"x",
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "complex": torch.ones(2, dtype=torch.complex64),
    "meta": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "nine dimensions": torch.ones((1,) * 9),
}


@pytest.mark.parametrize("what", BAD)
def test_other_things_are_invalid(tensors: Any, key: str, other: str, what: str) -> None:
    assert tensors.put_tensor(key, BAD[what]) == -600
    assert tensors.upsert_tensor(key, BAD[what]) == -600
    assert tensors.batch_put_tensor([other, key], [TABLE, BAD[what]]) == [0, -600]
    assert tensors.is_exist(key) == 0
    assert same(tensors.get_tensor(other), TABLE)


def test_the_first_tensor_stays_and_an_upsert_replaces_it(tensors: Any, key: str) -> None:
    assert tensors.put_tensor(key, TABLE) == 0
    assert tensors.put_tensor(key, TABLE + 1) == 0
    assert same(tensors.get_tensor(key), TABLE)
    for tensor in (TABLE + 2, torch.ones(7)):
        assert tensors.upsert_tensor(key, tensor) == 0
        assert same(tensors.get_tensor(key), tensor)
    assert tensors.put_tensor("", TABLE) == -600


def test_what_leaves_the_client_goes_through_its_local_buffer(
    tensors: Any, bare: Any, key: str
) -> None:
    """Without room there a read is a false miss, and a put fails as if the cluster were full."""
    large = torch.zeros(20 << 20, dtype=torch.int8)
    assert tensors.put_tensor(key, large) == 0
    assert tensors.get_tensor(key) is None
    assert tensors.get_size(key) == HEADER + large.nbytes
    assert tensors.remove(key, True) == 0
    assert tensors.put_tensor(key, TABLE) == 0
    assert bare.get_tensor(key) is None
    assert bare.put_tensor(f"{key}1", TABLE) == -200
    assert bare.batch_upsert_tensor([f"{key}1"], [TABLE]) == [-200]


def test_options_are_checked(engine: Engine, tensors: Any, key: str) -> None:
    none, group = engine.config(replica_num=0), engine.config(group_ids=["g"])
    assert tensors.pub_tensor(key, TABLE, none) == -600
    assert tensors.pub_tensor(key, TABLE, group) == 0
    assert tensors.upsert_pub_tensor(f"{key}2", TABLE, engine.config()) == 0
    keys, both = [f"{key}3", f"{key}4"], [TABLE, TABLE]
    assert tensors.batch_pub_tensor(keys, both, none) == [-600, -600]
    assert tensors.batch_pub_tensor(keys, both, group) == [-600, -600]
    assert tensors.batch_upsert_pub_tensor(keys, both, none) == [-600, -600]
    assert tensors.batch_pub_tensor_with_tp(keys, both, none, 0, 2, 0) == [-600, -600]
    assert tensors.pub_tensor_with_tp(key, TABLE, none, 0, 2, 0) == -600
    assert tensors.batch_is_exist(keys) == [0, 0]
    assert tensors.batch_upsert_pub_tensor(keys, both, engine.config()) == [0, 0]
    assert tensors.batch_pub_tensor(keys, both, engine.config()) == [0, 0]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        tensors.pub_tensor(key, TABLE, None)


# --- many tensors -----------------------------------------------------------------------------


def test_a_batch_has_a_code_per_key(tensors: Any, key: str, missing: str) -> None:
    keys = [f"{key}1", f"{key}2"]
    for put in (tensors.batch_put_tensor, tensors.batch_upsert_tensor):
        assert put(keys, [TABLE, TABLE + 1]) == [0, 0]
        assert put(keys, [TABLE]) == [-600, -600]
        assert put([], []) == put([], [TABLE]) == []
        with pytest.raises(TypeError, match="incompatible function arguments"):
            put(keys, (TABLE, TABLE))
    one, nothing, two = tensors.batch_get_tensor([keys[0], missing, keys[1]])
    assert nothing is None
    assert same(one, TABLE)
    assert same(two, TABLE + 1)


def test_of_a_key_given_twice_the_first_is_put_and_the_last_upserted(
    tensors: Any, key: str
) -> None:
    both = [TABLE, TABLE + 1]
    assert tensors.batch_put_tensor([key, key], both) == [0, 0]
    assert same(tensors.get_tensor(key), TABLE)
    assert tensors.batch_upsert_tensor([key, key], both) == [0, 0]
    assert same(tensors.get_tensor(key), TABLE + 1)


# --- ranks ------------------------------------------------------------------------------------


def test_shards_of_all_ranks_are_put_whatever_the_rank(tensors: Any, key: str) -> None:
    assert tensors.put_tensor_with_tp(key, TABLE, 7, 3, 1) == 0
    assert tensors.is_exist(key) == 0
    for rank in range(3):
        shard = TABLE[:, rank : rank + 1]
        assert same(tensors.get_tensor(f"{key}_tp_{rank}"), shard)
        assert same(tensors.get_tensor_with_tp(key, rank, 99, 0), shard)
    assert tensors.get_tensor_with_tp(key, 3, 3, 1) is None
    assert tensors.get_tensor_with_tp(key, -1, 3, 1) is None
    assert tensors.put_tensor_with_tp(f"{key}1", TABLE, 0, 1, 0) == 0
    assert same(tensors.get_tensor_with_tp(f"{key}1", 5, 1, 0), TABLE)


def test_only_equal_shards_are_put(tensors: Any, key: str) -> None:
    for size, dim in ((2, 1), (2, 2), (2, -1)):
        assert tensors.put_tensor_with_tp(key, TABLE, 0, size, dim) == -600
    for value in (torch.tensor(1.0), None, b"x"):
        assert tensors.put_tensor_with_tp(key, value, 0, 2, 0) == -600
        assert tensors.batch_put_tensor_with_tp([key], [value], 0, 2, 0) == [-600]
    assert tensors.is_exist(f"{key}_tp_0") == 0


def test_batches_of_shards_have_a_code_per_key(tensors: Any, key: str, missing: str) -> None:
    keys = [f"{key}1", f"{key}2"]
    put = tensors.batch_put_tensor_with_tp
    assert put(keys, [TABLE, torch.ones(3)], 0, 2, 0) == [0, -600]
    assert put(keys, [TABLE], 0, 2, 0) == [-600, -600]
    assert put([], [], 0, 2, 0) == []
    one, two, nothing = tensors.batch_get_tensor_with_tp([*keys, missing], 1, 2)
    assert same(one, TABLE[1:])
    assert two is nothing is None
    assert put([f"{key}3"], [TABLE]) == [0]
    assert same(tensors.batch_get_tensor_with_tp([f"{key}3"])[0], TABLE)


# --- memory of the caller ---------------------------------------------------------------------


def test_a_tensor_is_read_into_memory_and_is_that_memory(
    tensors: Any, key: str, missing: str
) -> None:
    memory = Memory(b"", 4096)
    assert tensors.put_tensor(key, TABLE) == 0
    assert tensors.put(f"{key}bytes", b"x" * 400) == 0
    found = tensors.get_tensor_into(key, memory.ptr, 4096)
    assert same(found, TABLE)
    assert found.data_ptr() == memory.ptr + HEADER
    into = tensors.get_tensor_into
    assert into(key, memory.ptr, VALUE - 1) is None
    assert into(key, memory.ptr, 0) is None
    assert into(key, 0, 4096) is None
    assert into(missing, memory.ptr, 4096) is None
    assert into(f"{key}bytes", memory.ptr, 4096) is None
    many = tensors.batch_get_tensor_into
    one, nothing = many([key, missing], [memory.ptr, memory.ptr + 2048], [2048, 2048])
    assert same(one, TABLE)
    assert nothing is None
    assert many([key], [memory.ptr], [10]) == [None]
    assert many([key], [], []) == many([key], [0], [4096]) == [-600]
    assert many([], [], []) == []
    with_tp = tensors.batch_get_tensor_with_tp_into
    assert same(with_tp([key], [memory.ptr], [4096])[0], TABLE)
    assert with_tp([key], [], [], 1, 2) == [-600]
    assert tensors.put_tensor_with_tp(key, TABLE, 0, 2, 0) == 0
    assert same(with_tp([key], [memory.ptr], [4096], 1, 2)[0], TABLE[1:])
    assert same(tensors.get_tensor_with_tp_into(key, memory.ptr, 4096, 1, 2), TABLE[1:])


def test_a_tensor_is_stored_from_memory_with_its_header(tensors: Any, key: str) -> None:
    assert tensors.put_tensor(key, TABLE) == 0
    memory = Memory(tensors.get(key), 4096)
    for store in (tensors.put_tensor_from, tensors.upsert_tensor_from):
        assert store(f"{key}1", memory.ptr, VALUE) == 0
        for ptr, size in ((memory.ptr, VALUE + 1), (memory.ptr, 100), (0, VALUE)):
            assert store(f"{key}2", ptr, size) == -600
    keys = [f"{key}3", f"{key}4"]
    for many in (tensors.batch_put_tensor_from, tensors.batch_upsert_tensor_from):
        assert many(keys, [memory.ptr] * 2, [VALUE, VALUE + 1]) == [-600, -600]
        assert many(keys, [memory.ptr], [VALUE]) == [-600, -600]
        assert many(keys, [memory.ptr, 0], [VALUE, VALUE]) == [-600, -600]
        assert many([], [], []) == []
    assert tensors.batch_is_exist(keys) == [0, 0]
    assert tensors.batch_put_tensor_from(keys, [memory.ptr] * 2, [VALUE] * 2) == [0, 0]
    assert tensors.batch_upsert_tensor_from(keys, [memory.ptr] * 2, [VALUE] * 2) == [0, 0]
    assert same(tensors.get_tensor(keys[1]), TABLE)


def test_shards_are_stored_from_memory(tensors: Any, key: str) -> None:
    assert tensors.put_tensor(key, TABLE) == 0
    memory = Memory(tensors.get(key), 4096)
    put = tensors.put_tensor_with_tp_from
    assert put(key, memory.ptr, VALUE, 0, 3, 1) == 0
    assert same(tensors.get_tensor(f"{key}_tp_2"), TABLE[:, 2:])
    for size, ranks in ((VALUE, 2), (9, 3), (VALUE + 1, 3)):
        assert put(f"{key}bad", memory.ptr, size, 0, ranks, 1) == -600
    assert put(f"{key}1", memory.ptr, VALUE) == 0
    assert same(tensors.get_tensor(f"{key}1"), TABLE)
    many, keys = tensors.batch_put_tensor_with_tp_from, [f"{key}2", f"{key}3"]
    assert many(keys, [memory.ptr, 0], [VALUE] * 2, 0, 3, 1) == [0, -600]
    assert many(keys, [memory.ptr] * 2, [VALUE, VALUE + 1], 0, 3, 1) == [0, -600]
    assert many(keys, [memory.ptr] * 2, [VALUE], 0, 3, 1) == [-600, -600]


def test_there_is_no_device_to_read_into(tensors: Any, key: str) -> None:
    assert tensors.put_tensor(key, TABLE) == 0
    assert tensors.get_tensor_into_cuda(key, torch.empty(2, 3)) == -600
    assert tensors.batch_get_tensor_into_cuda([key], [torch.empty(2, 3)]) == [-600]
    assert tensors.batch_get_tensor_into_cuda([key], []) == [-600]


# --- files ------------------------------------------------------------------------------------


def test_files_of_safetensors(tensors: Any, key: str, missing: str, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    save, load = tensors.save_tensor_to_safetensor, tensors.load_tensor_from_safetensor
    assert tensors.put_tensor(key, TABLE) == 0
    assert save(key, path) == 0
    assert save(missing, path) == -1100
    assert save(key, str(tmp_path / "none" / "file")) == -600
    assert same(load(f"{key}1", path), TABLE)
    assert same(tensors.get_tensor(f"{key}1"), TABLE)
    assert same(load(key=None, file_name=path), TABLE)
    assert same(tensors.get_tensor(path), TABLE)
    assert load(f"{key}2", str(tmp_path / "none")) is None


# --- before and after -------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_without_a_set_up_all_methods_answer(engine: Engine) -> None:
    """None of them crashes, unlike most others."""
    if engine.name == "memory":
        found = unset_tensor_calls.answers(InMemoryStore(InMemoryEngine()))
    else:
        done = subprocess.run(
            [sys.executable, "-m", "tests.contract.unset_tensor_calls"],
            cwd=Path(__file__).parent.parent.parent,
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)
    for name, answer in found.items():
        reads = name.startswith(("get", "batch_get", "load")) and not name.endswith("_cuda")
        want: Any = None if reads and name != "batch_get_tensor_into" else -600
        assert answer == ([want, want] if name.startswith("batch_") else want), name


def test_the_in_memory_engine_has_the_methods_of_the_wheel() -> None:
    import mooncake.store

    real = {name for name in dir(mooncake.store.MooncakeDistributedStore) if "tensor" in name}
    ours = {name for name in dir(InMemoryStore) if "tensor" in name and not name.startswith("_")}
    assert ours == real
    for name in ours:
        line = (getattr(mooncake.store.MooncakeDistributedStore, name).__doc__ or "").split("\n")[0]
        given = list(inspect.signature(getattr(InMemoryStore, name)).parameters)[1:]
        theirs = [part.split(":")[0].strip() for part in line.split("(", 1)[1].split(", ")[1:]]
        assert given == theirs, name

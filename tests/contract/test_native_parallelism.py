"""What the binding's own calls for tensors of several axes answer, on both engines."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

from aiomooncake._tensor_format import _AXIS, _HEADER
from aiomooncake.engine.binding import NativeStore
from tests.contract.engines import MB, Engine, Memory

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch

HEADER = 304
WHOLE = torch.arange(24.0).reshape(4, 6)
MANIFEST = "__parallelism_manifest"
WRITERS = "__writer_manifest"


@pytest.fixture
def tensors(native: NativeStore) -> Any:
    """The client, with methods that :class:`NativeStore` does not declare."""
    return native


@pytest.fixture
def memory(tensors: Any) -> Any:
    """Registered memory, which these calls read into."""
    memory = Memory(b"", 8192)
    assert tensors.register_buffer(memory.ptr, 8192) == 0
    yield memory
    assert tensors.unregister_buffer(memory.ptr) == 0


def axis(kind: str, rank: int, size: int, **more: int) -> SimpleNamespace:
    given: dict[str, int | None] = {"split_dim": None, "expert_id": None, "stage_id": None, **more}
    return SimpleNamespace(kind=kind, rank=rank, size=size, **given)


def axes(*given: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(axes=list(given))


def tp(rank: int, size: int, dim: int = 1) -> SimpleNamespace:
    return axis("tp", rank, size, split_dim=dim)


def shard(*given: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(mode="shard", parallelism=axes(*given))


def full(*given: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(mode="full", parallelism=axes(*given) if given else None)


def writer(rank: int, size: int, dim: int = 1) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size, split_dim=dim)


def same(one: Any, other: Any) -> bool:
    return one is not None and one.dtype == other.dtype and bool(one.equal(other))


def stored_as(tensors: Any, key: str, *ends: str) -> None:
    """Assert that these values are there, and no others of the key."""
    assert [end for end in ends if not tensors.is_exist(key + end)] == []
    assert tensors.remove_by_regex(f"^{key}", True) == len(ends)


# --- storing ----------------------------------------------------------------------------------

DP, EP, PP = axis("dp", 0, 2), axis("ep", 1, 2, expert_id=5), axis("pp", 0, 2, stage_id=7)
SHARDS = {
    "_tp_1": (axes(tp(1, 2)), True),
    "__dp_0of2": (axes(DP), False),
    "__ep_1of2_eid5": (axes(EP), False),
    "__dp_0of2__tp_1of2_sd1": (axes(tp(1, 2), DP), True),
    "__dp_0of2__tp_1of2_sd1__ep_1of2_eid5__pp_0of2_sid7": (axes(PP, EP, tp(1, 2), DP), True),
    "__ep_1of2_eid5__pp_0of2_sid7": (axes(PP, EP), False),
}


@pytest.mark.parametrize("way", ["put", "upsert"])
@pytest.mark.parametrize("end", SHARDS)
def test_a_shard_is_named_by_its_axes(tensors: Any, key: str, end: str, way: str) -> None:
    """Where there are others beside the ranks', the whole is given, and the shard is taken."""
    given, split = SHARDS[end]
    put = getattr(tensors, f"{way}_tensor_with_parallelism")
    assert put(key, WHOLE, given) == 0
    alone = len(given.axes) == 1
    expected = WHOLE[:, 3:] if split and not alone else WHOLE
    assert same(tensors.get_tensor(key + end), expected)
    read = tensors.get_tensor_with_parallelism
    assert same(read(key, SimpleNamespace(mode="SHARD", parallelism=given)), expected)
    stored_as(tensors, key, end, *([MANIFEST] if split else []))


def test_without_a_request_a_tensor_is_whole(tensors: Any, key: str) -> None:
    assert tensors.put_tensor_with_parallelism(key, WHOLE) == 0
    assert tensors.put_tensor_with_parallelism(key, WHOLE + 1) == 0
    read = tensors.get_tensor_with_parallelism
    assert same(read(key), WHOLE)
    assert tensors.upsert_tensor_with_parallelism(key, WHOLE + 1) == 0
    for target in (None, SimpleNamespace(mode="as_stored", parallelism=None), full()):
        assert same(read(key, target), WHOLE + 1)
    stored_as(tensors, key, "")


def test_writers_parts_are_cut_from_the_whole(tensors: Any, key: str) -> None:
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    assert put(key, WHOLE, writer_partition=writer(0, 2)) == 0
    assert read(key, full()) is None
    assert put(key, WHOLE, writer_partition=writer(1, 2)) == 0
    assert same(read(key, full()), WHOLE)
    assert same(read(key, shard(tp(1, 2))), WHOLE[:, 3:])
    assert same(tensors.get_tensor(f"{key}__writer_0of2_sd1"), WHOLE[:, :3])
    replaced = tensors.upsert_tensor_with_parallelism
    assert replaced(key, WHOLE + 1, writer_partition=writer(1, 2)) == 0
    assert same(read(key, shard(tp(1, 2))), WHOLE[:, 3:] + 1)
    stored_as(tensors, key, "__writer_0of2_sd1", "__writer_1of2_sd1", WRITERS)


BAD: dict[str, dict[str, Any]] = {
    "no axes": {"parallelism": axes()},
    "not axes": {"parallelism": SimpleNamespace()},
    "an axis twice": {"parallelism": axes(DP, DP)},
    "another kind": {"parallelism": axes(axis("xp", 0, 2))},
    "no such rank": {"parallelism": axes(axis("dp", 2, 2))},
    "no dimension": {"parallelism": axes(axis("tp", 0, 2))},
    "a dimension too many": {"parallelism": axes(axis("dp", 0, 2, split_dim=1))},
    "no expert": {"parallelism": axes(axis("ep", 0, 2))},
    "no stage": {"parallelism": axes(axis("pp", 0, 2))},
    "no such dimension": {"parallelism": axes(tp(0, 2, 2))},
    "unequal shards": {"parallelism": axes(tp(0, 5), DP)},
    "both": {"parallelism": axes(DP), "writer_partition": writer(0, 2)},
    "no writer": {"writer_partition": SimpleNamespace()},
    "no such writer": {"writer_partition": writer(2, 2)},
    "unequal parts": {"writer_partition": writer(0, 5)},
    "a writer's dimension": {"writer_partition": writer(0, 2, 2)},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_requests_are_invalid(tensors: Any, key: str, what: str) -> None:
    request = BAD[what]
    source = Memory(b"")
    assert tensors.put_tensor(f"{key}whole", WHOLE) == 0
    source = Memory(tensors.get(f"{key}whole"))
    size = HEADER + WHOLE.nbytes
    many = {f"{name}s": [given] for name, given in request.items()}
    for way in ("put", "upsert"):
        call = getattr(tensors, f"{way}_tensor_with_parallelism")
        assert call(key, WHOLE, **request) == -600
        call = getattr(tensors, f"{way}_tensor_with_parallelism_from")
        assert call(key, source.ptr, size, **request) == -600
        call = getattr(tensors, f"batch_{way}_tensor_with_parallelism")
        assert call([key], [WHOLE], **many) == [-600]
        call = getattr(tensors, f"batch_{way}_tensor_with_parallelism_from")
        assert call([key], [source.ptr], [size], **many) == [-600]
    stored_as(tensors, key, "whole")


@pytest.mark.parametrize(
    "what", [torch.ones(2, 2, dtype=torch.complex64), torch.ones((2,) * 9), torch.tensor(1.0)]
)
def test_what_has_no_shards_is_invalid(tensors: Any, key: str, what: Any) -> None:
    put = tensors.put_tensor_with_parallelism
    assert put(key, what, axes(tp(0, 2))) == -600
    assert put(key, what, axes(tp(0, 2), DP)) == -600
    assert put(key, what, writer_partition=writer(0, 2)) == -600
    assert tensors.is_exist(f"{key}_tp_0") == 0


def test_options_are_checked(engine: Engine, tensors: Any, key: str) -> None:
    none, group = engine.config(replica_num=0), engine.config(group_ids=["g"])
    put, many = tensors.put_tensor_with_parallelism, tensors.batch_put_tensor_with_parallelism
    for request in (None, axes(tp(0, 2)), axes(DP)):
        assert put(key, WHOLE, request, none) == -600
        assert put(key, WHOLE, request, group) == 0
    both, given = [WHOLE, WHOLE], [axes(DP), axes(tp(0, 2))]
    keys = [f"{key}1", f"{key}2"]
    assert many(keys, both, given, none) == many(keys, both, given, group) == [-600, -600]
    assert many(keys, both, None, none) == many(keys, both, None, group) == [-600, -600]
    assert many(keys, both, given, engine.config(group_ids=["g", "h"])) == [0, 0]


def test_batches_have_a_code_per_key(tensors: Any, key: str) -> None:
    keys, both = [f"{key}1", f"{key}2"], [WHOLE, WHOLE + 1]
    for way in ("put", "upsert"):
        put = getattr(tensors, f"batch_{way}_tensor_with_parallelism")
        assert put(keys, both) == [0, 0]
        assert put(keys, both, [axes(tp(0, 2)), axes(axis("dp", 3, 2))]) == [0, -600]
        assert put(keys, both, writer_partitions=[writer(0, 2), None]) == [0, 0]
        assert put(keys, both, [axes(DP), None]) == [0, 0]
        assert put(keys, both, [axes(DP)]) == put(keys, [WHOLE], [axes(DP)] * 2) == [-600, -600]
        assert put(keys, both, (axes(DP), axes(DP))) == [-600, -600]
        assert put(keys, both, [axes(DP)] * 2, writer_partitions=[None] * 2) == [-600, -600]
        assert put([], []) == put([], [], []) == []
        assert put([], [WHOLE]) == []
        with pytest.raises(TypeError, match="incompatible function arguments"):
            put(keys, (WHOLE, WHOLE))


# --- memory of the caller ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["put", "upsert"])
def test_shards_are_stored_from_memory(tensors: Any, key: str, way: str) -> None:
    """Of the ranks' axis those of all ranks, and no manifest."""
    assert tensors.put_tensor(f"{key}source", WHOLE) == 0
    memory, size = Memory(tensors.get(f"{key}source")), HEADER + WHOLE.nbytes
    put = getattr(tensors, f"{way}_tensor_with_parallelism_from")
    assert put(key, memory.ptr, size) == 0
    assert put(key, memory.ptr, size, axes(tp(1, 2))) == 0
    assert put(key, memory.ptr, size, axes(DP, tp(1, 3))) == 0
    assert put(key, memory.ptr, size, axes(EP)) == 0
    assert put(key, memory.ptr, size, writer_partition=writer(1, 2)) == 0
    for bad in ((memory.ptr, size + 1), (memory.ptr, 100), (0, size)):
        for request in ({}, {"parallelism": axes(EP)}, {"writer_partition": writer(0, 2)}):
            assert put(f"{key}bad", *bad, **request) == -600
    assert same(tensors.get_tensor(f"{key}_tp_0"), WHOLE[:, :3])
    assert same(tensors.get_tensor(f"{key}__dp_0of2__tp_2of3_sd1"), WHOLE[:, 4:])
    read = tensors.get_tensor_with_parallelism
    assert same(read(key, full(tp(0, 2))), WHOLE)
    assert same(read(key, full(tp(0, 3), DP)), WHOLE)
    assert same(read(key, shard(EP)), WHOLE)
    ends = "", "source", "_tp_0", "_tp_1", "__ep_1of2_eid5", "__writer_1of2_sd1", WRITERS
    stored_as(tensors, key, *ends, *(f"__dp_0of2__tp_{rank}of3_sd1" for rank in range(3)))


def test_a_tensor_of_no_dimensions_stays_one_in_memory(tensors: Any, key: str) -> None:
    """It has none that could be split, not even for a single rank."""
    point = torch.tensor(1.0)
    assert tensors.put_tensor(f"{key}source", point) == 0
    value = tensors.get(f"{key}source")
    memory, size = Memory(value), len(value)
    put = tensors.put_tensor_with_parallelism_from
    assert put(key, memory.ptr, size) == 0
    assert tensors.put_tensor_with_tp_from(f"{key}tp", memory.ptr, size, 0, 1, 0) == 0
    assert tensors.get(key) == tensors.get(f"{key}tp") == value
    for request in (axes(tp(0, 1, 0)), axes(DP, tp(0, 1, 0))):
        assert put(f"{key}bad", memory.ptr, size, request) == -600
    assert put(f"{key}bad", memory.ptr, size, writer_partition=writer(0, 1, 0)) == -600
    assert put(key, memory.ptr, size, axes(DP)) == 0
    stored_as(tensors, key, "", "source", "tp", "__dp_0of2")


def test_batches_from_memory(tensors: Any, key: str) -> None:
    assert tensors.put_tensor(key, WHOLE) == 0
    memory, size = Memory(tensors.get(key)), HEADER + WHOLE.nbytes
    keys, ptrs, sizes = [f"{key}1", f"{key}2"], [memory.ptr] * 2, [size] * 2
    for way in ("put", "upsert"):
        put = getattr(tensors, f"batch_{way}_tensor_with_parallelism_from")
        assert put(keys, ptrs, [size, size + 1]) == put(keys, ptrs[:1], sizes[:1]) == [-600, -600]
        assert put(keys, ptrs, [size, 100], [axes(DP)] * 2) == [0, -600]
        assert put(keys, ptrs, sizes) == put(keys, ptrs, sizes, [axes(EP), None]) == [0, 0]
        assert put(keys, ptrs, sizes, writer_partitions=[writer(0, 2), None]) == [0, 0]
        assert put([], [], []) == []
    assert same(tensors.get_tensor(f"{key}1__writer_0of2_sd1"), WHOLE[:, :3])


def test_tensors_are_read_into_registered_memory(tensors: Any, key: str, memory: Memory) -> None:
    for rank in range(2):
        part = WHOLE[:, 3 * rank : 3 * rank + 3]
        assert tensors.put_tensor_with_parallelism(key, part, axes(tp(rank, 2))) == 0
    assert tensors.put_tensor(key, WHOLE) == 0
    into, size = tensors.get_tensor_with_parallelism_into, HEADER + WHOLE.nbytes
    for target, expected in (
        (None, WHOLE),
        (full(), WHOLE),
        (full(tp(0, 2)), WHOLE),
        (shard(tp(1, 2)), WHOLE[:, 3:]),
        (shard(tp(1, 3)), WHOLE[:, 2:4]),
    ):
        found = into(key, memory.ptr + 16, 4096, target)
        assert same(found, expected)
        assert found.data_ptr() == memory.ptr + 16 + HEADER
        exactly = HEADER + expected.nbytes
        assert same(into(key, memory.ptr, exactly, target), expected)
        assert into(key, memory.ptr, exactly - 1, target) is None
        assert into(key, memory.ptr, 8193, target) is None
    other = Memory(b"", 4096)
    assert into(key, other.ptr, 4096) is None
    assert into(key, 0, 4096) is None
    many = tensors.batch_get_tensor_with_parallelism_into
    ptrs, sizes = [memory.ptr, memory.ptr + 4096], [4096, 4096]
    one, two = many([key, key], ptrs, sizes, [shard(tp(0, 2)), full(tp(0, 2))])
    assert same(one, WHOLE[:, :3])
    assert same(two, WHOLE)
    one, two = many([key, f"{key}missing"], ptrs, sizes)
    assert same(one, WHOLE)
    assert two is None
    assert many([key, key], ptrs, sizes[:1]) == many([key, key], ptrs, sizes, [None]) == [None] * 2
    assert many([], [], []) == []
    assert size < 4096


# --- reading ----------------------------------------------------------------------------------


def test_shards_are_put_together_and_split_anew(tensors: Any, key: str) -> None:
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    assert put(key, WHOLE[:, :3], axes(tp(0, 2))) == 0
    assert read(key, full(tp(0, 2))) is None
    assert put(key, WHOLE[:, 3:], axes(tp(1, 2))) == 0
    for size in (1, 2, 3, 6):
        for rank in range(size):
            width = 6 // size
            part = WHOLE[:, rank * width : (rank + 1) * width]
            assert same(read(key, shard(tp(rank, size))), part)
            assert same(read(key, full(tp(rank, size))), WHOLE)
    assert read(key, full(tp(0, 4))) is None
    assert read(key, full(tp(0, 2, 0))) is None
    assert read(key, full(DP)) is None
    assert read(key, full(DP, tp(0, 2))) is None
    assert read(key, shard(DP)) is None


def test_shards_of_several_axes_are_put_together(tensors: Any, key: str) -> None:
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    for rank in range(2):
        assert put(key, WHOLE, axes(DP, tp(rank, 2))) == 0
    assert same(read(key, full(DP, tp(0, 2))), WHOLE)
    assert same(read(key, full(tp(1, 2), DP)), WHOLE)
    assert same(read(key, shard(DP, tp(2, 3))), WHOLE[:, 4:])
    assert read(key, full(axis("dp", 1, 2), tp(0, 2))) is None


def test_shards_that_put_tensor_with_tp_stored(tensors: Any, key: str) -> None:
    assert tensors.put_tensor_with_tp(key, WHOLE, 0, 2, 1) == 0
    read = tensors.get_tensor_with_parallelism
    assert same(read(key, shard(tp(1, 2))), WHOLE[:, 3:])
    assert same(read(key, full(tp(0, 2))), WHOLE)
    assert same(read(key, shard(tp(1, 3))), WHOLE[:, 2:4])
    assert read(key, full(tp(0, 2, 0))) is None


def test_what_has_the_name_of_a_rank_is_read_for_its_shard(
    tensors: Any, key: str, memory: Memory
) -> None:
    """Whatever it is; not into memory, and not beside other axes."""
    assert tensors.put_tensor(key, WHOLE) == 0
    assert tensors.put_tensor(f"{key}_tp_1", WHOLE + 1) == 0
    read, into = tensors.get_tensor_with_parallelism, tensors.get_tensor_with_parallelism_into
    assert same(read(key, shard(tp(0, 1))), WHOLE)
    assert same(read(key, shard(tp(1, 2))), WHOLE + 1)
    (found,) = tensors.batch_get_tensor_with_parallelism([key], [shard(tp(1, 2))])
    assert same(found, WHOLE + 1)
    for target in (shard(tp(0, 1)), shard(tp(1, 2))):
        assert into(key, memory.ptr, 4096, target) is None
    assert read(key, full(tp(0, 1))) is None
    assert read(key, shard(DP, tp(1, 2))) is None


def test_shards_that_do_not_fit_together_are_not_joined(tensors: Any, key: str) -> None:
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    assert put(key, WHOLE[:, :3], axes(tp(0, 2))) == 0
    assert put(key, WHOLE[:2, :3], axes(tp(1, 2))) == 0
    assert read(key, full(tp(0, 2))) is None
    assert same(read(key, shard(tp(1, 2))), WHOLE[:2, :3])
    assert put(f"{key}x", WHOLE[:, :3], axes(tp(0, 2))) == 0
    assert put(f"{key}x", WHOLE[:, :2], axes(tp(1, 2))) == 0
    assert read(f"{key}x", full(tp(0, 2))) is None


def bits(tensor: Any, dtype: Any) -> Any:
    """Take the bits of a tensor for another type."""
    return tensor.contiguous().view(dtype)


def test_shards_of_several_types_are_taken_for_one(tensors: Any, key: str, memory: Memory) -> None:
    """What is read of a wider or as wide a type is nonsense, and of a narrower one not enough."""
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    into = tensors.get_tensor_with_parallelism_into
    first, second = WHOLE[:2], WHOLE[2:]
    for dtype in (torch.int32, torch.float64, torch.float16):
        name = f"{key}{dtype}"
        assert put(name, first, axes(tp(0, 2, 0))) == 0
        assert put(name, second.to(dtype), axes(tp(1, 2, 0))) == 0
        assert same(read(name, shard(tp(1, 2, 0))), second.to(dtype))
        assert same(read(name, shard(tp(0, 4, 0))), WHOLE[:1])
        whole = read(name, full(tp(0, 2, 0)))
        if dtype == torch.float16:
            assert whole is None
            assert into(name, memory.ptr, 4096, full(tp(0, 2, 0))) is None
            half = bits(second.to(dtype), torch.float32).reshape(1, 6)
            assert same(read(name, shard(tp(2, 4, 0))), half)
            assert into(name, memory.ptr, 4096, shard(tp(3, 4, 0))) is None
            continue
        taken = bits(second.to(dtype), torch.float32).flatten()[:12].reshape(2, 6)
        expected = bits(torch.cat([first, taken]), torch.int32)
        assert whole.dtype == torch.float32
        assert same(bits(whole, torch.int32), expected)
        found = into(name, memory.ptr, 4096, full(tp(0, 2, 0)))
        assert same(bits(found, torch.int32), expected)
        assert same(bits(read(name, shard(tp(3, 4, 0))), torch.int32), expected[3:])


def test_parts_of_writers_of_several_types_are_taken_for_one(tensors: Any, key: str) -> None:
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    assert put(key, WHOLE, writer_partition=writer(0, 2, 0)) == 0
    assert put(key, WHOLE.int(), writer_partition=writer(1, 2, 0)) == 0
    whole = bits(read(key, full()), torch.int32)
    assert same(whole, torch.cat([bits(WHOLE[:2], torch.int32), WHOLE[2:].int()]))


def test_a_manifest_of_before_stays_and_counts(tensors: Any, key: str) -> None:
    """A put leaves it as it is: shards that are stored anew are taken for what it tells."""
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    for tensor, expected in (
        (WHOLE, WHOLE),
        (WHOLE.int(), bits(WHOLE.int(), torch.float32)),
        (WHOLE.double(), None),
        (WHOLE.repeat(1, 2), None),
    ):
        for rank, part in enumerate(tensor.chunk(2, 1)):
            assert put(key, part.contiguous(), axes(tp(rank, 2))) == 0
        for target in (full(tp(0, 2)), shard(tp(0, 1))):
            found = read(key, target)
            assert found is expected or same(found, expected)
        for rank in range(2):
            assert tensors.remove(f"{key}_tp_{rank}", True) == 0


def test_a_dimension_below_zero_is_one_that_no_tensor_has(
    tensors: Any, key: str, memory: Memory
) -> None:
    """What has the name of the rank is read for it, as for a dimension beyond them all."""
    assert tensors.put_tensor(key, WHOLE) == 0
    put, read = tensors.put_tensor_with_parallelism, tensors.get_tensor_with_parallelism
    for rank in range(2):
        assert put(key, WHOLE[:, 3 * rank : 3 * rank + 3], axes(tp(rank, 2))) == 0
    for dim in (-1, -3, 2, 100):
        assert put(f"{key}bad", WHOLE, axes(tp(0, 1, dim))) == -600
        assert put(f"{key}bad", WHOLE, writer_partition=writer(0, 1, dim)) == -600
        assert same(read(key, shard(tp(0, 1, dim))), WHOLE)
        assert same(read(key, shard(tp(1, 3, dim))), WHOLE[:, 3:])
        assert read(key, shard(tp(2, 3, dim))) is None
        assert read(key, full(tp(0, 2, dim))) is None
        assert read(key, shard(DP, tp(0, 1, dim))) is None
        into = tensors.get_tensor_with_parallelism_into
        assert into(key, memory.ptr, 4096, shard(tp(0, 2, dim))) is None
    assert tensors.is_exist(f"{key}bad") == 0


def test_a_header_that_splits_a_dimension_too_many_is_no_tensors(
    tensors: Any, key: str, memory: Memory
) -> None:
    assert tensors.put_tensor_with_tp(f"{key}s", WHOLE, 0, 2, 1) == 0
    for rank in range(2):
        value = bytearray(tensors.get(f"{key}s_tp_{rank}"))
        _AXIS.pack_into(value, _HEADER.size, 1, 0, rank, 2, 5, 0, 3)
        assert tensors.put(f"{key}_tp_{rank}", bytes(value)) == 0
    read, into = tensors.get_tensor_with_parallelism, tensors.get_tensor_with_parallelism_into
    assert tensors.get_tensor(f"{key}_tp_0") is None
    assert tensors.get_tensor_with_tp(key, 0, 2, 5) is None
    for dim in (0, 1, 5):
        for target in (shard(tp(0, 2, dim)), shard(tp(0, 1, dim)), full(tp(0, 2, dim))):
            assert read(key, target) is None
            assert into(key, memory.ptr, 4096, target) is None


def test_targets_that_make_no_sense_find_nothing(tensors: Any, key: str, missing: str) -> None:
    assert tensors.put_tensor(key, WHOLE) == 0
    assert tensors.put_tensor_with_parallelism(key, WHOLE, axes(DP)) == 0
    read, many = tensors.get_tensor_with_parallelism, tensors.batch_get_tensor_with_parallelism
    for target in (
        SimpleNamespace(mode="half", parallelism=None),
        SimpleNamespace(mode="shard", parallelism=None),
        SimpleNamespace(mode="as_stored", parallelism=axes(DP)),
        SimpleNamespace(mode="shard"),
        shard(),
        shard(axis("dp", 2, 2)),
        shard(axis("dp", 1, 2)),
        full(tp(0, 2)),
    ):
        assert read(key, target) is None
    assert read(missing) is None
    assert read(missing, shard(tp(0, 2))) is None
    one, two, three = many([key, missing, key], [None, None, shard(DP)])
    assert same(one, WHOLE)
    assert two is None
    assert same(three, WHOLE)
    assert many([key, missing])[1] is None
    assert many([key, key], [None]) == many([key, key], (None, None)) == [None, None]
    assert many([]) == many([], []) == []


def test_what_leaves_the_client_goes_through_its_local_buffer(
    tensors: Any, bare: Any, key: str
) -> None:
    part = WHOLE[:, :3]
    assert bare.put_tensor_with_parallelism(key, part, axes(tp(0, 2))) == -200
    assert bare.put_tensor_with_parallelism(key, WHOLE, writer_partition=writer(0, 2)) == -200
    assert tensors.put_tensor_with_parallelism(key, WHOLE, axes(DP)) == 0
    assert bare.get_tensor_with_parallelism(key, shard(DP)) is None
    large = torch.zeros(20 * MB, dtype=torch.int8)
    assert tensors.put_tensor_with_parallelism(key, large, axes(EP)) == 0
    assert tensors.get_tensor_with_parallelism(key, shard(EP)) is None

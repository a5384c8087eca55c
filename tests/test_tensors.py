"""Tensors: what is stored comes back as it was, also through the binding's own methods."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import json
import os
import struct
import subprocess
import sys
import textwrap
import uuid
import warnings
import weakref
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiomooncake import (
    BatchError,
    BufferTooSmallError,
    InvalidArgumentError,
    ObjectNotFoundError,
    ReplicateConfig,
    SerializationError,
    Store,
    connect,
)
from aiomooncake._tensor_format import DTYPES, Header
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.tensors import HEADER_SIZE, Axis, tensor_in
from tests.cancelling import HOWS, How, cancelled_everywhere, counting, eventually, quiet
from tests.conftest import Hold
from tests.contract.engines import IN_OUR_MEMORY

if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
    pytest.skip(
        "PyTorch is not installed: pip install 'aiomooncake[test-torch]'", allow_module_level=True
    )
import torch

MB = 1 << 20
ON_REAL = pytest.mark.parametrize("store", ["real"], indirect=True)
# By which a tensor of its own pieces travels.
ALONE = ("batch_put_from_multi_buffers", "batch_put_from_multi_buffer_ranges")
IN_MEMORY = pytest.mark.parametrize("store", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    store = request.getfixturevalue("store") if "store" in request.fixturenames else None
    yield
    if store is not None:
        gc.collect()
        # A read that was cancelled goes on in the engine.
        await eventually(lambda: not store.stats().in_flight, store.stats)
        await store.remove_all(force=True)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def missing() -> str:
    return uuid.uuid4().hex


def bits(tensor: Any) -> Any:
    """Look at the bytes of a tensor, so that NaNs are compared too."""
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and bool(bits(one).equal(bits(other)))
    )


def noise(dtype: Any, *shape: int) -> Any:
    """Make a tensor of any bytes (of which a bool has only two)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8)
    return raw.view(dtype)


async def read(store: Store, key: str, **options: Any) -> Any:
    """Read a tensor that is there."""
    found = await store.get_tensor(key, **options)
    assert found is not None
    return found


ALL = {dtype.name: getattr(torch, dtype.name) for dtype in DTYPES}


class Named(torch.Tensor):  # type: ignore[misc]  # torch is not looked at
    """A class of one's own."""


class Wrapper(torch.Tensor):  # type: ignore[misc]  # torch is not looked at
    """A tensor with another one inside and no memory of its own, as libraries of quantisation have.

    What is computed of it is a plain tensor.
    """

    inner: Any

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*unwrapped, **(kwargs or {}))


class Rewrapped(Wrapper):
    """A wrapper of which everything that is computed is a wrapper too."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(super().__torch_dispatch__(func, types, args, kwargs))


SHAPES: dict[str, Callable[[], Any]] = {
    "a scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "empty in the middle": lambda: torch.empty(2, 0, 4, dtype=torch.int8),
    "eight dimensions": lambda: torch.arange(6).reshape(1, 2, 1, 3, 1, 1, 1, 1),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "transposed, large": lambda: torch.arange(1 << 18).reshape(512, 512).t(),
    "every other one": lambda: torch.arange(10)[::2],
    "expanded": lambda: torch.arange(3.0).expand(100_000, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part of a larger one": lambda: torch.arange(100)[10:20],
    "marked as negative": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
    "requires gradients": lambda: torch.ones(3, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "of a class of one's own": lambda: torch.ones(3).as_subclass(Named),
    "of a megabyte": lambda: torch.arange(MB // 4, dtype=torch.int32),
    "with a header just above what is merged": lambda: torch.ones(MB - HEADER_SIZE + 1).bool(),
    "large": lambda: torch.arange(5 * MB, dtype=torch.int32),
}


# --- one tensor -------------------------------------------------------------------------------


async def test_every_type_comes_back_bit_by_bit(store: Store, key: str) -> None:
    tensors = {f"{key}{name}": noise(dtype, 3, 5) for name, dtype in ALL.items()}
    await store.put_tensors(tensors)
    for name, tensor in tensors.items():
        assert same(await store.get_tensor(name), tensor), name


async def test_the_binding_reads_what_we_write_and_we_what_it_writes(
    store: Store, key: str
) -> None:
    """Its reader makes one dimension of none; ours does not."""
    made = {f"{key}{name}": make().detach() for name, make in SHAPES.items() if name != "large"}
    made |= {f"{key}{name}": noise(dtype, 2, 7) for name, dtype in ALL.items()}
    for name, tensor in made.items():
        if tensor.is_neg():
            continue  # the binding stores other numbers
        await store.put_tensor(name, tensor)
        theirs = await store.engine.get_tensor(name)
        assert theirs is not None, name
        assert same(theirs.reshape(tensor.shape), tensor), name
        plain = tensor.as_subclass(torch.Tensor).clone()
        assert await store.engine.put_tensor(f"{name}'", plain) == 0
        assert same(await store.get_tensor(f"{name}'"), plain), name
        assert await store.get(name) == await store.get(f"{name}'"), name


@IN_MEMORY
async def test_a_wrapper_that_becomes_a_plain_tensor_is_stored(store: Store, key: str) -> None:
    await asyncio.to_thread(Wrapper(torch.ones(1)).detach)  # torch imports what it needs for them
    for inner in (torch.arange(4.0), torch.arange(float(MB)), torch.rand(300, 300).t()):
        await store.upsert_tensor(key, Wrapper(inner))
        assert same(await store.get_tensor(key), inner)


@pytest.mark.parametrize("what", SHAPES)
async def test_any_layout_comes_back(store: Store, key: str, what: str) -> None:
    tensor = SHAPES[what]()
    before = tensor.detach().clone()
    await store.put_tensor(key, tensor)
    found = await read(store, key)
    assert type(found) is torch.Tensor
    assert found.is_contiguous()
    assert not found.requires_grad
    assert same(found, before)
    assert same(tensor.detach(), before)


async def test_a_missing_tensor_is_none(store: Store, missing: str) -> None:
    assert await store.get_tensor(missing) is None
    assert await store.get_tensor(missing, tp_rank=1, tp_size=2) is None
    assert await store.get_tensor(missing, tp_size=2) is None
    assert await store.get_tensors([missing, missing]) == [None, None]


async def test_the_first_tensor_stays_and_an_upsert_replaces_it(store: Store, key: str) -> None:
    for tensor in (torch.ones(3), torch.zeros(2 * MB), torch.ones(600, 600).t()):
        await store.put_tensor(key, tensor)
        assert same(await store.get_tensor(key), torch.ones(3))
    for tensor in (torch.zeros(2), torch.zeros(2 * MB), torch.rand(600, 600).t(), torch.ones(1)):
        await store.upsert_tensor(key, tensor)
        assert same(await store.get_tensor(key), tensor)
    await store.upsert_tensor(f"{key}tp", torch.ones(4), tp_size=2)
    await store.upsert_tensor(f"{key}tp", torch.zeros(4), tp_size=2)
    assert same(await store.get_tensor(f"{key}tp", tp_size=2), torch.zeros(4))


@pytest.mark.parametrize("count", [10, 3 * MB])
async def test_a_tensor_is_nobody_elses(store: Store, key: str, count: int) -> None:
    """Reads of one key share an answer, which a tensor could be written through."""
    await store.put_tensor(key, torch.zeros(count, dtype=torch.uint8))
    before = await store.get(key)
    *tensors, value = await asyncio.gather(*(read(store, key) for _ in range(3)), store.get(key))
    tensors += await store.get_tensors([key, key])
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    assert [int(tensor[-1]) for tensor in tensors] == [1, 2, 3, 4, 5]
    assert value == before == await store.get(key)


async def test_a_small_tensor_is_stored_as_it_was_given_at_the_call(store: Store, key: str) -> None:
    tensor = torch.ones(8)
    putting = asyncio.ensure_future(store.put_tensor(key, tensor))
    await asyncio.sleep(0)  # the call has begun
    tensor.zero_()
    await putting
    assert same(await store.get_tensor(key), torch.ones(8))


def nested(layout: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def fake(count: int) -> Any:
    """Make a tensor that says it is on the CPU, and has no elements anywhere."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(count)


def freed(count: int, nbytes: int) -> Any:
    """Make a tensor whose storage was made smaller, as FSDP does with parameters."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), "has no complex64"),
    "float8_e8m0fnu": (lambda: torch.ones(2).to(torch.float8_e8m0fnu), "has no float8_e8m0fnu"),
    "meta": (lambda: torch.ones(2, device="meta"), r"is on meta.*tensor\.cpu\(\)"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"sparse_coo; pass tensor\.to_dense\(\)"),
    "nested": (lambda: nested(torch.strided), r"is nested; pass its parts \(tensor\.unbind"),
    "jagged": (lambda: nested(torch.jagged), r"is nested; pass its parts \(tensor\.unbind"),
    "fake": (lambda: fake(10), "storage is on meta, not in memory of the CPU; pass a tensor"),
    "fake and large": (lambda: fake(MB), "storage is on meta, not in memory of the CPU"),
    "fake and empty": (lambda: fake(0), "storage is on meta, not in memory of the CPU"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "no memory of its own"),
    "a wrapper": (lambda: Rewrapped(torch.ones(3)), "no memory of its own"),
    "freed": (lambda: freed(3, 0), "no memory of its own for all its elements"),
    "freed in part": (lambda: freed(3, 8), "no memory of its own for all its elements"),
    "efficient zeros": (lambda: torch._efficientzerotensor(3), "no memory of its own"),
    "not initialised": (torch.nn.parameter.UninitializedParameter, "uninitialized parameter"),
    "nine dimensions": (lambda: torch.ones((1,) * 9), "has 9 dimensions"),
    "text": (lambda: "text", "can't store a value of type str"),
    "a list": (lambda: [1.0], "can't store a value of type list"),
    "an array of text": (lambda: np.array(["a"]), "the format of its buffer"),
    "an array of objects": (lambda: np.array([None]), "the format of its buffer is 'O'"),
    "foreign byte order": (
        lambda: np.ones(2, dtype=">f4"),
        r"'>f'.*byte order; pass array\.astype\(array\.dtype\.newbyteorder\(\"=\"\)\)",
    ),
    "complex array": (
        lambda: np.ones(2, dtype=complex),
        "the format of its buffer is 'Zd', and Mooncake has float32",
    ),
    "dates": (lambda: np.zeros(2, dtype="M8[s]"), "ndarray of datetime64"),
}


@IN_MEMORY
@pytest.mark.parametrize("what", BAD)
async def test_what_has_no_place_in_a_value_is_refused(store: Store, key: str, what: str) -> None:
    make, why = BAD[what]
    bad = await asyncio.to_thread(make)  # torch imports what it needs for some
    with pytest.raises(InvalidArgumentError, match=f"(?s)put_tensor of '{key}'.*{why}"):
        await store.put_tensor(key, bad)
    with pytest.raises(InvalidArgumentError, match=why):
        await store.put_tensors({f"{key}good": torch.ones(1), key: bad})
    with pytest.raises(InvalidArgumentError, match=why):
        await store.put_tensor_shard(key, bad, [Axis("dp", 0, 1)])
    with pytest.raises(InvalidArgumentError, match=why):
        await store.upsert_tensor(key, bad, tp_size=1)
    assert await store.exists_many([key, f"{key}good"]) == [False, False]


TRANSFORMS = {
    "vmap": torch.vmap,
    "grad": torch.func.grad,
    "functionalize": torch.func.functionalize,
}


@IN_MEMORY
@pytest.mark.parametrize("name", TRANSFORMS)
async def test_what_a_transform_of_functions_works_on_is_refused(
    store: Store, key: str, name: str
) -> None:
    """Such tensors stand for others: for all rows of one, for what a gradient is taken of."""
    given = torch.ones(3, 2) if name == "vmap" else torch.ones(3)
    await asyncio.to_thread(TRANSFORMS[name](torch.sum), given)  # torch imports what it needs

    def put(tensor: Any) -> Any:
        with pytest.raises(InvalidArgumentError, match="it has no memory of its own"):
            store.put_tensor(key, tensor).send(None)
        return tensor.sum()

    TRANSFORMS[name](put)(given)
    assert not await store.exists(key)


@IN_MEMORY
async def test_where_tensors_have_no_elements_none_is_stored_or_read(
    store: Store, key: str
) -> None:
    """Torch's own AssertionError came out, which told of another mistake."""
    from torch._subclasses import FakeTensorMode

    real = torch.ones(3)
    await store.put_tensor(key, real)
    why = "FakeTensorMode is active, in which tensors have no elements; call it outside of that"
    with FakeTensorMode():
        for put in (
            store.put_tensor(f"{key}2", real),
            store.upsert_tensor(f"{key}2", torch.nn.Parameter(real)),
            store.put_tensors({f"{key}2": real}),
            store.put_tensor_shard(f"{key}2", real, [Axis("dp", 0, 1)]),
        ):
            with pytest.raises(InvalidArgumentError, match=f"'{key}2' can't store .*: .*{why}"):
                put.send(None)
    mode, told = FakeTensorMode(allow_non_fake_inputs=True), r"is on meta.*, outside of FakeTensorM"
    with mode, pytest.raises(InvalidArgumentError, match=told):
        await store.put_tensor(f"{key}2", real)
    assert not await store.exists(f"{key}2")
    with FakeTensorMode(), pytest.raises(InvalidArgumentError, match=f"'{key}' can't be.*{why}"):
        await store.get_tensor(key)
    assert same(await store.get_tensor(key), real)


@pytest.mark.parametrize("count", [100, MB // 4, MB], ids=["small", "of 1 MB", "of 4 MB"])
async def test_each_of_those_who_read_a_tensor_at_once_gets_his_own(
    store: Store, key: str, count: int
) -> None:
    """They share the value that was read, and whoever asked alone has it without a copy."""
    tensor = torch.arange(count, dtype=torch.int32)
    await store.put_tensor(key, tensor)
    for _ in range(3):  # the way of a read follows what was read lately
        found = [await store.get_tensor(key), await store.get_tensor(key)]
        found += await asyncio.gather(*(store.get_tensor(key) for _ in range(3)))
        for place, one in enumerate(found):
            assert one is not None
            assert torch.equal(one[1:], tensor[1:])
            one.fill_(-place)
        assert [int(one[0]) for one in found if one is not None] == [0, -1, -2, -3, -4]


async def test_a_copy_whose_reader_is_cancelled_keeps_its_memory(
    store: Store, key: str, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread wrote into memory that was free."""
    targets: list[weakref.ref[bytearray]] = []
    kept: list[bool] = []

    class Target(bytearray):
        """Memory of which one can tell whether it is still there, other than of ``bytes``."""

    def new_target(nbytes: int) -> tuple[bytearray, int]:
        target = Target(nbytes)
        targets.append(weakref.ref(target))
        return target, 0

    def slow_copy(_to: int, _value: bytes, _nbytes: int) -> None:
        hold.wait()
        kept.append(targets[-1]() is not None)

    await store.put_tensor(key, torch.zeros(MB))
    with monkeypatch.context() as patch:
        patch.setattr("aiomooncake._tensor_reads.new_bytes", new_target)
        patch.setattr("aiomooncake._tensor_reads.ctypes", SimpleNamespace(memmove=slow_copy))
        reading = asyncio.ensure_future(store.get_tensors([key, key]))
        await hold()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        gc.collect()
        hold.set()
        await eventually(lambda: kept, lambda: "it was copied")
    assert kept == [True]


# --- many tensors -----------------------------------------------------------------------------


async def test_many_tensors_come_back_in_order(store: Store, key: str) -> None:
    tensors = {f"{key}{i}": torch.full((i % 7, 3), float(i)) for i in range(600)}
    tensors[f"{key}large"] = torch.ones(MB)
    tensors[f"{key}strided"] = torch.rand(600, 600).t()
    assert await store.put_tensors(tensors) == dict.fromkeys(tensors)
    names = [*tensors, f"{key}0", "nothing here"]
    found = await store.get_tensors(names)
    assert found[-1] is None
    assert all(same(one, tensors[name]) for name, one in zip(names, found[:-1], strict=False))
    assert await store.put_tensors({}) == {}
    assert await store.get_tensors([]) == []


async def test_what_is_no_tensor_fails_alone(store: Store, key: str) -> None:
    await store.put_tensor(key, torch.ones(2))
    await store.put(f"{key}bytes", b"x" * 400)
    with pytest.raises(BatchError, match="1 of 2 keys") as caught:
        await store.get_tensors([key, f"{key}bytes"])
    good, bad = caught.value.results
    assert same(good, torch.ones(2))
    assert isinstance(bad, SerializationError)
    (bad,) = await store.get_tensors([f"{key}bytes"], return_exceptions=True)
    assert isinstance(bad, SerializationError)
    assert bad.key == f"{key}bytes"


@IN_MEMORY
async def test_a_put_that_fails_is_told_key_by_key(store: Store, key: str) -> None:
    engine = InMemoryEngine.named("shared")
    items = {key: torch.ones(2), f"{key}large": torch.ones(MB)}
    faults = [engine.fault(name, code=-200) for name in ALONE]
    try:
        with pytest.raises(BatchError) as caught:
            await store.put_tensors(items)
    finally:
        for fault in faults:
            fault.remove()
    assert [name for name, error in caught.value.results.items() if error] == [f"{key}large"]
    assert same(await store.get_tensor(key), torch.ones(2))


async def test_options_and_groups_go_along(store: Store, key: str) -> None:
    config = ReplicateConfig(replica_num=1, group_ids=["a", "b"])
    await store.put_tensors({key: torch.ones(2), f"{key}2": torch.ones(MB)}, config=config)
    await store.put_tensor(f"{key}3", torch.ones(2), tp_size=2, config=ReplicateConfig())
    with pytest.raises(InvalidArgumentError, match="2 group_ids for 1 keys"):
        await store.put_tensors({key: torch.ones(2)}, config=config)
    with pytest.raises(InvalidArgumentError, match="ReplicateConfig"):
        await store.put_tensor(key, torch.ones(2), config={"replica_num": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="mapping"):
        await store.put_tensors([torch.ones(2)])  # type: ignore[arg-type]


# --- arrays -----------------------------------------------------------------------------------

ARRAYS: dict[str, Callable[[], Any]] = {
    "strided": lambda: np.arange(12).reshape(3, 4).T,
    "strided, large": lambda: np.arange(1 << 18).reshape(512, 512).T,
    "a scalar": lambda: np.array(2.5),
    "empty": lambda: np.empty((0, 3), dtype=np.int16),
    "read-only": lambda: np.frombuffer(b"abcd", dtype=np.uint8),
    "large": lambda: np.arange(2 * MB),
    "native byte order": lambda: np.arange(3, dtype="=i4"),
}


@pytest.mark.parametrize("what", ARRAYS)
async def test_arrays_need_no_torch(store: Store, key: str, what: str) -> None:
    value = ARRAYS[what]()
    await store.put_tensor(key, value)
    found = await store.get_tensor(key, like="numpy")
    assert type(found) is np.ndarray
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.tobytes() == value.tobytes()
    assert found.flags.writeable
    tensor = await read(store, key)
    assert tensor.numpy().tobytes() == value.tobytes()


async def test_arrays_have_all_types_but_three(store: Store, key: str) -> None:
    for dtype in DTYPES:
        await store.put_tensor(f"{key}{dtype.name}", noise(ALL[dtype.name], 4))
        if dtype.in_numpy:
            found = await store.get_tensor(f"{key}{dtype.name}", like="numpy")
            assert found is not None
            assert found.dtype.name == dtype.name
            await store.upsert_tensor(f"{key}{dtype.name}", found[::2])
        else:
            with pytest.raises(
                SerializationError, match=f"is of {dtype.name}, which NumPy has not"
            ):
                await store.get_tensor(f"{key}{dtype.name}", like="numpy")
    assert sum(not dtype.in_numpy for dtype in DTYPES) == 3


async def test_any_buffer_is_an_array(store: Store, key: str) -> None:
    await store.put_tensors({f"{key}a": array("l", [1, 2]), f"{key}b": b"xy"})
    names = [f"{key}a", f"{key}b"]
    a, b = [await read(store, name, like="numpy") for name in names]
    assert all(
        np.array_equal(one, other)
        for one, other in zip(await store.get_tensors(names, like="numpy"), (a, b), strict=True)
        if one is not None
    )
    assert (a.tolist(), a.dtype.name) == ([1, 2], "int64")
    assert (b.tolist(), b.dtype.name) == ([120, 121], "uint8")
    with pytest.raises(InvalidArgumentError, match='"torch" or "numpy"'):
        await store.get_tensor(key, like="jax")  # type: ignore[call-overload]


# --- tensor parallelism -----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
async def test_shards_are_those_of_the_binding(store: Store, key: str, dim: int) -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    shards = whole.chunk(2, dim)
    await store.put_tensor(key, whole, tp_size=2, split_dim=dim)
    assert await store.exists_many([key, f"{key}_tp_0", f"{key}_tp_1"]) == [False, True, True]
    theirs = f"{key}theirs"
    assert await store.engine.put_tensor_with_tp(theirs, whole, 0, 2, dim % 2) == 0
    for rank, shard in enumerate(shards):
        assert same(await store.engine.get_tensor_with_tp(key, rank, 2, dim % 2), shard)
        for name in (key, theirs):
            assert same(await store.get_tensor(name, tp_rank=rank, tp_size=2), shard)
        assert await store.get(f"{key}_tp_{rank}") == await store.get(f"{theirs}_tp_{rank}")
    for name in (key, theirs):
        assert same(await store.get_tensor(name, tp_size=2), whole)
    assert same(await store.get_tensor(f"{key}_tp_1"), shards[1])


async def test_many_tensors_are_split_and_joined(store: Store, key: str) -> None:
    tensors: dict[str, Any] = {f"{key}{name}": noise(dtype, 4, 2) for name, dtype in ALL.items()}
    tensors[f"{key}large"] = torch.arange(2 * MB).reshape(2, -1)
    await store.put_tensors(tensors, tp_size=2, split_dim=1)
    for name, tensor in tensors.items():
        assert same(await store.get_tensor(name, tp_size=2), tensor), name
    names = [*tensors, "nothing here", f"{key}int8"]
    wholes = await store.get_tensors(names, tp_size=2)
    ones = await store.get_tensors(names, tp_size=2, tp_rank=1)
    for name, whole, one in zip(names, wholes, ones, strict=True):
        if name in tensors:
            assert same(whole, tensors[name])
            assert same(one, tensors[name].chunk(2, 1)[1])
        else:
            assert whole is one is None
    arrays = np.arange(12.0).reshape(3, 4)
    await store.put_tensor(f"{key}array", arrays, tp_size=4, split_dim=1)
    found = await read(store, f"{key}array", tp_size=4, like="numpy")
    assert np.array_equal(found, arrays)


async def test_shards_of_another_kind_are_refused(store: Store, key: str) -> None:
    await store.put_tensor(key, torch.ones(6), tp_size=2)
    with pytest.raises(
        InvalidArgumentError, match=r"get_tensor of .* rank 1 of 2, not .* rank 1 of 3"
    ):
        await store.get_tensor(key, tp_rank=1, tp_size=3)
    (error,) = await store.get_tensors([key], tp_rank=1, tp_size=3, return_exceptions=True)
    assert str(error).startswith(f"get_tensors of '{key}_tp_1': it is the shard")
    with pytest.raises(InvalidArgumentError, match="of 2, not"):
        await store.get_tensor(key, tp_size=3)
    await store.remove(f"{key}_tp_1", force=True)
    with pytest.raises(ObjectNotFoundError, match=f"1 of 2 shards are not there, '{key}_tp_1'"):
        await store.get_tensor(key, tp_size=2)
    other = torch.ones(8).chunk(2)[1]
    await store.put_tensor_shard(key, other, [Axis("tp", 1, 2, split_dim=0)])
    with pytest.raises(SerializationError, match="not of one tensor"):
        await store.get_tensor(key, tp_size=2)
    await store.put_tensor(f"{key}whole_tp_0", torch.ones(2))
    with pytest.raises(InvalidArgumentError, match="it is a whole tensor, not"):
        await store.get_tensor(f"{key}whole", tp_rank=0, tp_size=2)


@IN_MEMORY
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tp_size": 4}, "dimension 0 of 6 elements can't be split into 4"),
        ({"tp_size": 2, "split_dim": 2}, "2 dimensions, and split_dim=2 is none"),
        ({"tp_size": 2, "split_dim": -3}, "split_dim=-3 is none"),
        ({"tp_size": 0}, "tp_size=0 is not usable"),
        ({"tp_size": "2"}, "tp_size='2' is not usable"),
        ({"split_dim": 1}, "split_dim=1 needs tp_size="),
        ({"split_dim": -1}, "split_dim=-1 needs tp_size="),
    ],
)
async def test_what_can_not_be_split_so_is_refused(
    store: Store, key: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        await store.put_tensor(key, torch.ones(6, 4), **options)
    with pytest.raises(InvalidArgumentError):
        await store.put_tensor(key, torch.tensor(1.0), tp_size=2)
    with pytest.raises(InvalidArgumentError, match=why):
        await store.put_tensors({key: torch.ones(6, 4)}, **options)


@IN_MEMORY
async def test_one_rank_has_all_of_it(store: Store, key: str) -> None:
    """So that a program of any number of ranks can be run with one."""
    whole = torch.ones(6, 4)
    await store.put_tensor(key, whole, tp_size=1, split_dim=1)
    assert same(await store.get_tensor(key, tp_rank=0, tp_size=1), whole)
    assert same(await store.get_tensor(key), whole)


@IN_MEMORY
async def test_ranks_are_checked(store: Store, key: str) -> None:
    for rank in (0, 1):
        with pytest.raises(InvalidArgumentError, match=f"tp_rank={rank} needs tp_size="):
            await store.get_tensor(key, tp_rank=rank)
        with pytest.raises(InvalidArgumentError, match=f"tp_rank={rank} needs tp_size="):
            await store.get_tensors([key], tp_rank=rank)
    for rank, size in ((2, 2), (-1, 2), (1, 1), (True, 2), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="is not usable"):
            await store.get_tensor(key, tp_rank=rank, tp_size=size)


# --- shards by axes ---------------------------------------------------------------------------

PLACES: dict[str, list[Axis]] = {
    "_tp_1": [Axis("tp", 1, 2, split_dim=1)],
    "__dp_0of2": [Axis("dp", 0, 2)],
    "__dp_0of2__tp_1of2_sd1": [Axis("tp", 1, 2, split_dim=1), Axis("dp", 0, 2)],
    "__tp_1of2_sd1__pp_0of2_sid7": [Axis("tp", 1, 2, split_dim=1), Axis("pp", 0, 2, stage_id=7)],
    "__dp_1of2__ep_0of2_eid5": [Axis("ep", 0, 2, expert_id=5), Axis("dp", 1, 2)],
}


@pytest.mark.parametrize("end", PLACES)
async def test_a_shard_is_found_by_its_axes(store: Store, key: str, end: str) -> None:
    shard = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    await store.put_tensor_shard(key, shard, PLACES[end])
    assert await store.exists(key + end)
    assert same(await store.get_tensor_shard(key, PLACES[end]), shard)
    assert same(await store.get_tensor_shard(key, PLACES[end][::-1]), shard)
    split = any(axis.kind == "tp" for axis in PLACES[end])
    assert await store.exists(f"{key}__parallelism_manifest") == split


async def test_a_shard_that_was_split_in_another_way_is_refused(store: Store, key: str) -> None:
    """Its key says no more than the rank."""
    shard = torch.ones(2, 3)
    await store.put_tensor_shard(key, shard, [Axis("tp", 1, 2, split_dim=1)])
    await store.put_tensor(f"{key}split", torch.ones(2, 6), tp_size=2, split_dim=1)
    for name in (key, f"{key}split"):
        assert same(await store.get_tensor_shard(name, [Axis("tp", 1, 2, split_dim=1)]), shard)
        for axis, other in (
            (Axis("tp", 1, 2, split_dim=0), "rank 1 of 2 by dimension 0"),
            (Axis("tp", 1, 4, split_dim=1), "rank 1 of 4 by dimension 1"),
        ):
            with pytest.raises(
                InvalidArgumentError,
                match=f"get_tensor_shard of '{name}_tp_1': .* 1 of 2 by dimension 1, not .*{other}",
            ):
                await store.get_tensor_shard(name, [axis])


def native_axes(axes: list[Axis]) -> Any:
    import mooncake.store as native

    parallelism = native.TensorParallelism()
    found = []
    for axis in axes:
        one = native.ParallelAxis()
        for name, value in dataclasses.asdict(axis).items():
            setattr(one, name, value)
        found.append(one)
    parallelism.axes = found
    return parallelism


def target(mode: str, axes: list[Axis]) -> Any:
    import mooncake.store as native

    found = native.ReadTarget()
    found.mode = mode
    found.parallelism = native_axes(axes)
    return found


@ON_REAL
@pytest.mark.parametrize("end", PLACES)
async def test_the_bindings_shards_are_ours(store: Store, key: str, end: str) -> None:
    """It takes the whole where there are more axes than that of the ranks, and splits it."""
    axes, whole = PLACES[end], torch.arange(12, dtype=torch.int16).reshape(2, 6)
    split = any(axis.kind == "tp" for axis in axes)
    shard = whole[:, 3:] if split else whole
    given = shard if len(axes) == 1 else whole
    put, get = store.engine.put_tensor_with_parallelism, store.engine.get_tensor_with_parallelism
    assert await put(key, given, native_axes(axes)) == 0
    assert same(await store.get_tensor_shard(key, axes), shard)
    await store.put_tensor_shard(f"{key}ours", shard, axes)
    assert same(await get(f"{key}ours", target("shard", axes)), shard)
    assert len(await store.get(f"{key}ours{end}") or b"") == len(await store.get(key + end) or b"")
    if len(axes) == 1:
        assert await store.get(f"{key}ours{end}") == await store.get(key + end)
    if split:
        theirs = await store.get(f"{key}__parallelism_manifest")
        assert await store.get(f"{key}ours__parallelism_manifest") == theirs


@ON_REAL
async def test_the_binding_puts_our_shards_together_and_splits_them_anew(
    store: Store, key: str
) -> None:
    whole = torch.arange(24).reshape(4, 6)
    for rank, shard in enumerate(whole.chunk(2, 1)):
        await store.put_tensor_shard(key, shard, [Axis("tp", rank, 2, split_dim=1)])
    get = store.engine.get_tensor_with_parallelism
    assert same(await get(key, target("full", [Axis("tp", 0, 2, split_dim=1)])), whole)
    for rank, shard in enumerate(whole.chunk(3, 1)):
        assert same(await get(key, target("shard", [Axis("tp", rank, 3, split_dim=1)])), shard)
    assert same(await store.get_tensor(key, tp_size=2), whole)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("xp", 0, 2), "of kind 'tp', 'dp'"),
        (("dp", 2, 2), "ranks 0 to 1"),
        (("dp", -1, 2), "integers from 0"),
        (("tp", 0, 0), "the size of an axis is at least 1"),
        (("tp", 0, 2), "'tp' needs split_dim="),
        (("dp", 0, 2, 1), "'dp' takes no split_dim="),
        (("ep", 0, 2), "'ep' needs expert_id="),
        (("pp", 0, 2), "'pp' needs stage_id="),
    ],
)
def test_axes_are_checked(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        Axis(*arguments)


@IN_MEMORY
async def test_shards_are_checked(store: Store, key: str) -> None:
    axis = Axis("tp", 0, 2, split_dim=1)
    for axes, why in (
        ([], "needs axes"),
        ([axis, axis], "one axis of each kind"),
        (["tp"], r"a list of aiomooncake\.tensors\.Axis, not \['tp'\]"),
        (axis, r"a list of aiomooncake\.tensors\.Axis, not Axis\("),
        (None, "a list of"),
        (iter([axis]), "a list of"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            await store.put_tensor_shard(key, torch.ones(2, 2), axes)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=why):
            await store.get_tensor_shard(key, axes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="has 1 dimensions"):
        await store.put_tensor_shard(key, torch.ones(2), [axis])


# --- memory of the caller ---------------------------------------------------------------------


@IN_OUR_MEMORY
async def test_tensors_lie_in_registered_memory(store: Store, key: str) -> None:
    async with store.allocate("1MiB") as buffer:
        tensor = tensor_in(buffer, (3, 4), torch.float16)
        assert tensor.data_ptr() == buffer.address + HEADER_SIZE
        tensor.copy_(torch.arange(12).reshape(3, 4))
        await store.put_tensor_from(key, buffer)
        assert same(await store.get_tensor(key), tensor)
        found: Any = await store.get_tensor_into(key, buffer[65536:])
        assert found.data_ptr() == buffer.address + 65536 + HEADER_SIZE
        assert same(found, tensor)
        found.zero_()
        await store.put_tensors_from({f"{key}2": buffer[65536:], f"{key}3": buffer})
        places = {f"{key}2": buffer[:4096], "nothing here": buffer[4096:8192]}
        zeros, nothing = await store.get_tensors_into(places)
        assert same(zeros, torch.zeros(3, 4, dtype=torch.float16))
        assert nothing is None
        array = tensor_in(buffer[8192:], [2], "int32")
        assert array.dtype == np.int32
        array[:] = 7
        await store.put_tensor_from(f"{key}4", buffer[8192:])
        assert (await store.get_tensor(f"{key}4", like="numpy")).tolist() == [7, 7]  # type: ignore[union-attr]
        into = await store.get_tensor_into(f"{key}4", buffer[8192:], like="numpy")
        assert into is not None
        assert into.tolist() == [7, 7]
        del tensor, found, zeros, array, into


@IN_OUR_MEMORY
async def test_memory_by_its_address_is_kept_by_the_tensor(store: Store, key: str) -> None:
    memory = torch.zeros(1000, dtype=torch.int64)
    await store.put_tensor(key, torch.arange(5))
    async with store.register(
        address=memory.data_ptr(), nbytes=memory.nbytes, owner=memory
    ) as buffer:
        found = await store.get_tensor_into(key, buffer[:4000])
        assert same(found, torch.arange(5))
        put = tensor_in(buffer[4000:], [3], torch.bool)
        put.fill_(value=True)
        await store.put_tensor_from(f"{key}2", buffer[4000:])
        assert same(await store.get_tensor(f"{key}2"), put)
        del memory
    gc.collect()
    assert same(found, torch.arange(5))


@IN_OUR_MEMORY
async def test_memory_that_was_given_back_is_not_touched(store: Store, key: str) -> None:
    """By its address it may be somebody else's by now, or nobody's: that was a SIGSEGV."""
    own = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    for given in ({"address": address, "nbytes": len(own)}, {"memory": own}):
        buffer = await store.register(**given)
        await buffer.aclose()
        with pytest.raises(InvalidArgumentError, match="closed"):
            await store.put_tensor_from(key, buffer)
        with pytest.raises(InvalidArgumentError, match="closed"):
            tensor_in(buffer, (4,), "float32")
    async with store.register(bytes(4096)) as buffer:
        with pytest.raises(InvalidArgumentError, match="read-only"):
            tensor_in(buffer, (4,), "float32")
    async with store.register(own) as buffer:
        with pytest.raises(InvalidArgumentError, match="8 dimensions at most"):
            tensor_in(buffer, (0, *[1] * 8), "float32")


async def test_memory_is_checked(store: Store, key: str) -> None:
    await store.put_tensor(key, torch.ones(100))
    await store.put(f"{key}bytes", b"x" * 400)
    async with store.allocate("64KiB") as buffer:
        with pytest.raises(InvalidArgumentError, match="does not hold a tensor"):
            await store.put_tensor_from(key, buffer)
        with pytest.raises(InvalidArgumentError, match="registered memory"):
            await store.put_tensor_from(key, b"memory")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="get_tensor_into needs registered memory"):
            await store.get_tensor_into(key, torch.ones(200))
        with pytest.raises(InvalidArgumentError, match="get_tensors_into needs registered memory"):
            await store.get_tensors_into({key: [buffer]})  # type: ignore[dict-item]
        with pytest.raises(
            BufferTooSmallError,
            match=rf"get_tensor_into of '{key}': .* the 400 bytes of the memory; .*size\(key\)",
        ) as caught:
            await store.get_tensor_into(key, buffer[:400])
        assert caught.value.key == key
        (error,) = await store.get_tensors_into({key: buffer[:400]}, return_exceptions=True)
        assert f"get_tensors_into of '{key}': " in str(error)
        assert isinstance(error, BufferTooSmallError)
        room = await store.size(key)
        assert room == HEADER_SIZE + 400
        assert await store.get_tensor_into(key, buffer[:room]) is not None
        with pytest.raises(SerializationError, match="is no tensor"):
            await store.get_tensor_into(f"{key}bytes", buffer)
        with pytest.raises(InvalidArgumentError, match="multiple of 4"):
            await store.get_tensor_into(key, buffer[1:])
        with pytest.raises(BatchError):
            await store.get_tensors_into({key: buffer[:4096], f"{key}bytes": buffer[4096:]})
        with pytest.raises(BufferTooSmallError, match="needs 65840 with its header"):
            tensor_in(buffer, [65536], torch.int8)
        before = bytes(buffer.view or b"")
        for shape, dtype, why in (
            ([-1], torch.int8, "shape=-1 is not usable"),
            (
                [1],
                torch.complex64,
                "dtype=torch.complex64 is not usable: Mooncake has no complex64",
            ),
            ([1], "what", "dtype='what' is not usable"),
            ([1], object(), "is not usable"),
            ([1], "bfloat16", "NumPy has no bfloat16; pass torch.bfloat16"),
            ([1], "complex64", "Mooncake has no complex64"),
        ):
            with pytest.raises(InvalidArgumentError, match=why):
                tensor_in(buffer, shape, dtype)
        assert bytes(buffer.view or b"") == before


@IN_OUR_MEMORY
async def test_memory_that_is_refused_is_the_callers_again(store: Store, key: str) -> None:
    """So that a count of references comes out right."""
    released: list[int] = []

    def release() -> None:
        released.append(1)
        if len(released) > 1:
            raise RuntimeError("this is logged")

    async with store.allocate("64KiB") as buffer:
        place: Any = b"memory"
        calls = [
            store.put_tensor_from(key, buffer, on_release=release),
            store.put_tensors_from({key: place}, on_release=release),
            store.put_tensors_from([place], on_release=release),  # type: ignore[arg-type]
            store.get_tensors_into([place], on_release=release),  # type: ignore[arg-type]
            store.get_tensor_into(key, buffer, like="jax", on_release=release),  # type: ignore[call-overload]
        ]
        for done, call in enumerate(calls, start=1):
            with pytest.raises(InvalidArgumentError):
                await call
            assert len(released) == done
        await store.put_tensor(key, torch.ones(2))
        released.clear()
        assert await store.get_tensor_into(key, buffer, on_release=release) is not None
        assert len(released) == 1


# --- files ------------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_files_are_those_of_safetensors(store: Store, key: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {f"{key}{name}": noise(dtype, 3, 2) for name, dtype in ALL.items()}
    tensors |= {f"{key}scalar": torch.tensor(2.0), f"{key}large": torch.arange(3 * MB)}
    await store.put_tensors(tensors)
    await store.save_tensors(tmp_path / "ours", list(tensors))
    theirs = load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    assert all(same(theirs[name], tensor) for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    keys = await store.load_tensors(tmp_path / "theirs", prefix="copy/")
    assert sorted(keys) == sorted(f"copy/{name}" for name in tensors)
    for name, tensor in tensors.items():
        assert same(await store.get_tensor(f"copy/{name}"), tensor)
        assert await store.get(f"copy/{name}") == await store.get(name)
    assert names_in(tmp_path) == ["ours", "theirs"]


async def test_a_file_is_written_whole_or_not_at_all(
    store: Store, key: str, tmp_path: Path
) -> None:
    await store.put_tensor(key, torch.ones(2))
    await store.put(f"{key}bytes", b"x" * 400)
    with pytest.raises(ObjectNotFoundError, match="nothing was written"):
        await store.save_tensors(tmp_path / "file", [key, "nothing here"])
    with pytest.raises(SerializationError):
        await store.save_tensors(tmp_path / "file", [key, f"{key}bytes"])
    for path, why in (
        (tmp_path / "no folder" / "file", FileNotFoundError),
        (tmp_path / "plain" / "file", NotADirectoryError),
        (tmp_path / "folder", IsADirectoryError),
    ):
        (tmp_path / "plain").touch()
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(why) as caught:
            await store.save_tensors(path, [key])
        assert caught.value.filename == str(path)
        assert str(caught.value).endswith(f": {str(path)!r}")
    assert names_in(tmp_path) == ["folder", "plain"]
    assert not names_in(tmp_path / "folder")


@IN_MEMORY
async def test_tensors_of_the_callers_are_not_taken_for_keys(
    store: Store, key: str, tmp_path: Path
) -> None:
    await store.put_tensor(key, torch.ones(2))
    with pytest.raises(InvalidArgumentError, match=r"takes keys, .* not a dict: .*put_tensors"):
        await store.save_tensors(tmp_path / "file", {key: torch.zeros(2)})
    assert not names_in(tmp_path)


def table(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@IN_MEMORY
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "header does not fit"),
        (b"\xff" * 8, "header does not fit"),
        (struct.pack("<Q", 3) + b"[1]", "is no file of safetensors"),
        (struct.pack("<Q", 3) + b"{]}", "is no file of safetensors"),
        (table(a=F32), "cut short"),
        (table(a=F32 | {"dtype": "C64"}) + b"1234", "is of C64"),
        (table(a=F32 | {"shape": [2]}) + b"1234", "has a shape of 8 bytes"),
        (table(a=F32 | {"shape": [-1]}) + b"1234", "has a shape"),
        (table(a=F32 | {"data_offsets": [-4, 0]}) + b"1234", "has a shape"),
        (table(a={"dtype": "F32"}) + b"1234", "is no file of safetensors"),
        (table(a=F32 | {"shape": [1] * 9}) + b"1234", "a shape or a place that can't be"),
        (table(a=F32 | {"data_offsets": [0.0, 4.0]}) + b"1234", "a shape or a place"),
        (table(a=F32 | {"shape": [0, 1 << 70], "data_offsets": [0, 0]}), "a shape or a place"),
        (table(a=F32 | {"shape": [float("inf")]}) + b"1234", "is no file of safetensors"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "is no file of safetensors"),
    ],
)
async def test_bad_files_are_refused(
    store: Store, tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SerializationError, match=why):
        await store.load_tensors(path)
    with pytest.raises(FileNotFoundError):
        await store.load_tensors(tmp_path / "none")


@IN_MEMORY
async def test_a_file_may_be_written_twice_side_by_side(
    store: Store, key: str, tmp_path: Path
) -> None:
    """Both used the same file until it was whole, and one took it away from the other."""
    path = tmp_path / "file"
    await store.put_tensor(key, torch.ones(1 << 20))
    for _ in range(5):
        await asyncio.gather(*(store.save_tensors(path, [key]) for _ in range(3)))
    assert names_in(tmp_path) == ["file"]


# --- headers ----------------------------------------------------------------------------------


def test_headers_are_the_bindings_own() -> None:
    import mooncake.store as native

    for name, make in SHAPES.items():
        tensor = make().detach().as_subclass(torch.Tensor)
        theirs = native._serialize_tensor(tensor)[0]
        dtype = next(one for one in DTYPES if ALL[one.name] == tensor.dtype)
        header = Header(dtype, tuple(tensor.shape), tuple(tensor.shape))
        assert header.pack() == theirs, name
        assert Header.parse(theirs, "", nbytes=len(theirs) + tensor.nbytes) == header
    assert native._tensor_metadata_size() == HEADER_SIZE


GOOD = Header(DTYPES[0], (2, 3), (2, 6), (Axis("tp", 0, 2, split_dim=1),)).pack() + bytes(24)


@pytest.mark.parametrize("at", range(0, HEADER_SIZE, 2))
def test_a_header_that_is_broken_anywhere_is_no_crash(at: int) -> None:
    """What is not looked at may be anything; the rest is refused or makes a tensor of its size."""
    assert Header.parse(GOOD, "k").nbytes == 24
    for byte in (0, 1, 2, 0x7F, 0x80, 0xFF):
        broken = bytearray(GOOD)
        broken[at] = byte
        with contextlib.suppress(SerializationError):
            assert Header.parse(broken, "k").end == len(GOOD)


def test_a_header_that_splits_a_dimension_too_many_is_no_tensors() -> None:
    """As for the binding; an IndexError came out where the shards were to be put together."""
    broken = bytearray(GOOD)
    broken[GOOD.index(b"\1\0\0\0\0\0\0\0\0\0\0\0\2\0\0\0\1\0\0\0") + 16] = 2
    with pytest.raises(SerializationError, match="splits dimension 2 of 2"):
        Header.parse(broken, "k")


@IN_MEMORY
async def test_values_that_lie_are_told(store: Store, key: str) -> None:
    """Shapes without elements, and of more elements than there are numbers for."""
    shape = (0, 1 << 62, 1 << 62)
    await store.put(key, Header(DTYPES[0], shape, shape).pack())
    for like in ("torch", "numpy"):
        with pytest.raises(SerializationError, match="can't be made"):
            await store.get_tensor(key, like=like)
    assert await store.engine.get_tensor(key) is None
    for rank, columns in enumerate((3, 4)):
        axis = Axis("tp", rank, 2, split_dim=0)
        header = Header(DTYPES[0], (2, columns), (4, columns), (axis,))
        await store.put(f"{key}_tp_{rank}", header.pack() + bytes(header.nbytes))
    with pytest.raises(SerializationError):
        await store.get_tensor(key, tp_size=2)


@IN_MEMORY
async def test_a_tensor_is_split_for_no_more_ranks_than_there_may_be(
    store: Store, key: str
) -> None:
    """Each is a key, and a million of them held up the loop for 9 s."""
    with pytest.raises(InvalidArgumentError, match="4096 ranks at most"):
        await store.get_tensor(key, tp_size=10**12)
    with pytest.raises(InvalidArgumentError, match="4096 ranks at most"):
        await store.put_tensor(key, np.zeros((0, 4)), tp_size=10**12)


@pytest.mark.parametrize("length", [0, 1, 303, 304, 327, 329])
def test_a_value_of_another_length_is_no_tensor(length: int) -> None:
    with pytest.raises(SerializationError, match=r"'k' is no tensor.*get\(\)"):
        Header.parse((GOOD + b"more")[:length], "k")


# --- cancelling -------------------------------------------------------------------------------

LARGE = torch.arange(9 * MB // 8 + 2)  # in two pieces
Call = Callable[[Store, str], Coroutine[Any, Any, Any]]
CALLS: dict[str, Call] = {
    "put": lambda store, key: store.put_tensor(key, torch.ones(4)),
    "put large": lambda store, key: store.put_tensor(key, LARGE),
    "upsert large": lambda store, key: store.upsert_tensor(key, LARGE),
    "put many": lambda store, key: store.put_tensors({key: LARGE, key + "2": LARGE[:4]}, tp_size=2),
    "put shard": lambda store, key: store.put_tensor_shard(key, LARGE, [Axis("dp", 0, 1)]),
    "get": lambda store, _: store.get_tensor("there"),
    "get large": lambda store, _: store.get_tensor("large"),
    "get many": lambda store, _: store.get_tensors(["there", "large", "large"]),
    "get shards": lambda store, _: store.get_tensor("split", tp_size=2),
}


@pytest.mark.parametrize("how", HOWS)
async def test_calls_may_be_cancelled_wherever_they_wait(store: Store, how: How) -> None:
    """What is stored afterwards is whole or absent, and the next call is answered right."""
    await store.put_tensors({"there": torch.ones(4), "large": LARGE})
    await store.put_tensor("split", LARGE, tp_size=2)
    with counting():
        for name, work in CALLS.items():
            tries = 0

            def call(work: Call = work, name: str = name) -> Coroutine[Any, Any, Any]:
                nonlocal tries
                tries += 1
                return work(store, f"{name}{tries}".replace(" ", ""))

            async for _ in cancelled_everywhere(call, how):
                await quiet(store)
                assert store._tensor_gets is None or store._tensor_gets[1].idle, name
                await store.remove_by_regex("^(put|upsert)", force=True)
            assert same(await store.get_tensor("large"), LARGE)


@IN_MEMORY
async def test_a_large_put_is_waited_for_since_it_reads_the_callers_memory(
    store: Store, key: str, hold: Hold
) -> None:
    engine = InMemoryEngine.named("shared")
    faults = [engine.fault(name, hold=hold) for name in ALONE]
    try:
        putting = asyncio.ensure_future(store.put_tensor(key, LARGE))
        await hold()
        putting.cancel()
        done, _ = await asyncio.wait({putting}, timeout=0.05)
        assert not done
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
    finally:
        for fault in faults:
            fault.remove()


# --- without torch ----------------------------------------------------------------------------


def run_program(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_arrays_are_stored_and_read_where_there_is_no_torch() -> None:
    out = run_program("""
        import asyncio, sys
        sys.modules["torch"] = None    # as if it were not installed
        import numpy, aiomooncake

        async def main():
            async with aiomooncake.connect("memory://none") as store:
                await store.put_tensor("a", numpy.arange(4), tp_size=2)
                print((await store.get_tensor("a", tp_size=2, like="numpy")).tolist())
                try:
                    await store.get_tensor("a", tp_size=2)
                except ImportError as exc:
                    print(exc)

        asyncio.run(main())
    """)
    assert out.startswith("[0, 1, 2, 3]\n")
    assert "pip install 'aiomooncake[torch]', or ask for like=\"numpy\"" in out


def test_buffers_are_stored_where_there_is_no_numpy() -> None:
    out = run_program("""
        import asyncio, sys
        sys.modules["numpy"] = None    # as if it were not installed
        import array, aiomooncake
        from aiomooncake.tensors import tensor_in

        async def main():
            async with aiomooncake.connect("memory://nonumpy") as store:
                numbers = array.array("d", [1.0, 2.0])
                await store.put_tensor("a", numbers)
                print(len(await store.get("a")))
                try:
                    await store.put_tensor("b", numbers, tp_size=2)
                except ImportError as exc:
                    print(exc)
                try:
                    await store.get_tensor("a", like="numpy")
                except ImportError as exc:
                    print(exc)
                async with store.allocate(4096) as memory:
                    try:
                        tensor_in(memory, [2], "f4")
                    except ImportError as exc:
                        print(exc)

        asyncio.run(main())
    """)
    assert out.startswith("320\n")
    assert out.count("need NumPy, which can't be imported here") == 3
    assert out.count("pip install numpy") == 3


def test_torch_and_numpy_are_imported_when_they_are_used() -> None:
    out = run_program("""
        import asyncio, sys
        import aiomooncake, aiomooncake.tensors

        async def main():
            async with aiomooncake.connect("memory://lazy") as store:
                await store.put_tensor("a", memoryview(b"abcd").cast("H"))
                print("torch" in sys.modules, "numpy" in sys.modules)
                ticks = 0
                async def tick():
                    nonlocal ticks
                    while True:
                        await asyncio.sleep(0.001)
                        ticks += 1
                task = asyncio.ensure_future(tick())
                tensor = await store.get_tensor("a")
                print(tensor.tolist() == [0x6261, 0x6463], ticks > 5)
                task.cancel()

        asyncio.run(main())
    """)
    assert out.split() == ["False", "False", "True", "True"]


async def test_a_new_loop_has_its_own_lane(key: str) -> None:
    store = await connect("memory://tensorloops", merge=False)
    await store.put_tensor(key, torch.ones(2))
    found = await asyncio.gather(*(store.get_tensor(key) for _ in range(3)))
    assert all(same(one, torch.ones(2)) for one in found)
    await store.aclose()

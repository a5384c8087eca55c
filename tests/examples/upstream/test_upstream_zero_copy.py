"""Upstream's examples for memory of the caller: registered, read and written without a copy.

As in ``test_upstream_values.py``. Upstream's addresses come from ``array.ctypes.data``; our verbs
take buffers and slices of them, which are checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiomooncake import (
    BufferTooSmallError,
    ReplicateConfig,
    Store,
)
from aiomooncake.testing import LoopStallProbe
from tests.conftest import MB
from tests.examples.upstream.conftest import Config, Registered, counting

# --- registered memory --------------------------------------------------------------------------


async def test_buffer_registration(store: Store) -> None:
    """Memory Registration, ``register_buffer()`` and ``unregister_buffer()``."""
    buffer = np.zeros(100 * MB, dtype=np.uint8)
    address = buffer.ctypes.data
    assert await store.engine.register_buffer(address, buffer.nbytes) == 0
    assert await store.engine.register_buffer(address, buffer.nbytes) == -600
    assert await store.engine.unregister_buffer(address) == 0
    assert await store.engine.unregister_buffer(address) == -600

    async with store.register(buffer) as ours:
        assert (ours.address, ours.nbytes) == (address, buffer.nbytes)


async def test_complete_zero_copy_workflow(store: Store) -> None:
    """Zero-Copy Operations, "Complete Zero-Copy Workflow"; ``put_from()`` and ``get_into()``.

    Upstream says that memory which was not registered is undefined behaviour. On TCP it is read
    and written all the same.
    """
    original = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    received = np.empty_like(original)
    engine, nbytes = store.engine, original.nbytes
    assert await engine.put_from("not registered", original.ctypes.data, nbytes) == 0
    for array in (original, received):
        assert await engine.register_buffer(array.ctypes.data, nbytes) == 0
    assert await engine.put_from("large_tensor", original.ctypes.data, nbytes) == 0
    assert await engine.get_into("large_tensor", received.ctypes.data, nbytes) == nbytes
    assert np.array_equal(original, received)
    for array in (original, received):
        assert await engine.unregister_buffer(array.ctypes.data) == 0

    received[:] = 0
    async with store.register(original) as source, store.register(received) as destination:
        await store.put_from("ours", source)
        assert await store.get_into("ours", destination) == nbytes
    assert np.array_equal(original, received)


async def test_get_into(store: Store, registered: Registered) -> None:
    """Zero-Copy Operations, ``get_into()``: a code for a miss and for memory that is too small."""
    array = await registered(1024)
    await store.put("key", counting(512))
    assert await store.engine.get_into("key", array.ctypes.data, 1024) == 512
    assert await store.engine.get_into("key", array.ctypes.data, 511) == -600
    assert await store.engine.get_into("nothing", array.ctypes.data, 1024) == -704

    async with store.allocate(1024) as buffer:
        assert await store.get_into("key", buffer) == 512
        with pytest.raises(BufferTooSmallError):
            await store.get_into("key", buffer[:511])
        assert await store.get_into("nothing", buffer) is None


# --- writing ----------------------------------------------------------------------------------


async def test_put_from_with_metadata(store: Store, registered: Registered) -> None:
    """Class MooncakeDistributedStore, ``put_from_with_metadata()``.

    What upstream leaves out: the metadata comes first in the value, and codes have no sign.
    """
    data, metadata = await registered(4000), await registered(8)
    data[:], metadata[:] = 7, 9
    at = (data.ctypes.data, metadata.ctypes.data)
    put = store.engine.put_from_with_metadata
    assert await put("data_with_metadata", *at, data.nbytes, metadata.nbytes) == 0
    assert await store.get("data_with_metadata") == bytes(metadata) + bytes(data)
    assert await put("", *at, data.nbytes, metadata.nbytes) == 600

    async with store.allocate(4008) as buffer:
        await store.put_from("ours", [buffer[4000:], buffer[:4000]])
    assert await store.size("ours") == 4008


async def test_upsert_from(store: Store, registered: Registered) -> None:
    """Class MooncakeDistributedStore, ``upsert_from()`` and ``batch_upsert_from()``.

    No verb of ours replaces a value from registered memory: ``upsert`` takes a copy of small ones.
    """
    array = await registered(256)
    array[:] = np.arange(256)
    at = array.ctypes.data
    await store.put("key1", b"old")
    assert await store.engine.upsert_from("key1", at, 10) == 0
    assert await store.engine.batch_upsert_from(["key1", "key2"], [at, at + 5], [5, 6]) == [0, 0]
    assert await store.get_many(["key1", "key2"]) == [bytes(range(5)), bytes(range(5, 11))]

    await store.upsert("key1", array[:7])
    assert await store.get("key1") == bytes(range(7))


async def test_batch_put_from_and_get_into(store: Store, registered: Registered) -> None:
    """Batch Zero-Copy Operations, ``batch_put_from()`` and ``batch_get_into()``."""
    keys = ["tensor1", "tensor2", "tensor3"]
    source, received = await registered(3 * MB), await registered(4 * MB)
    source[:] = np.repeat(np.arange(3), MB)
    put_at = [source.ctypes.data + i * MB for i in range(3)]
    get_at = [received.ctypes.data + i * MB for i in range(4)]
    assert await store.engine.batch_put_from(keys, put_at, [MB] * 3) == [0, 0, 0]
    read = await store.engine.batch_get_into([*keys, "nothing"], get_at, [MB] * 4)
    assert read == [MB, MB, MB, -704]
    assert np.array_equal(received[: 3 * MB], source)

    async with store.allocate(4 * MB) as buffer:
        parts = [buffer[i * MB : (i + 1) * MB] for i in range(4)]
        await store.put_many_from(dict(zip(("a", "b", "c"), parts, strict=False)))
        places = dict(zip((*keys, "nothing"), parts, strict=True))
        assert await store.get_many_into(places) == [MB, MB, MB, None]
        assert np.array_equal(np.frombuffer(buffer.view or b"", np.uint8)[: 3 * MB], source)


async def test_multi_buffers(store: Store, registered: Registered, native: Config) -> None:
    """``batch_get_into_multi_buffers()``, "multiple buffers example": 10 blocks of 61 layers.

    With 4 KB for each layer, not 128. The pieces must be as large as the value exactly.
    """
    blocks, layers, size = 10, 61, 4096
    nbytes = blocks * layers * size
    source, received = await registered(nbytes), await registered(nbytes)
    source[:] = np.arange(source.size) % 251
    keys = [f"kv_0_{block}" for block in range(blocks)]

    def addresses(array: Any) -> list[list[int]]:
        pieces = range(array.ctypes.data, array.ctypes.data + array.nbytes, size)
        return [[*pieces[block * layers : (block + 1) * layers]] for block in range(blocks)]

    sizes = [[size] * layers] * blocks
    same = native(prefer_alloc_in_same_node=True)
    engine = store.engine
    puts = await engine.batch_put_from_multi_buffers(keys, addresses(source), sizes, same)
    assert puts == [0] * blocks
    gets = await engine.batch_get_into_multi_buffers(keys, addresses(received), sizes, True)
    assert gets == [layers * size] * blocks
    assert np.array_equal(source, received)
    one = addresses(received)[0]
    for wrong, code in ((one[:-1], -600), ([*one, one[0]], -800)):
        answer = await engine.batch_get_into_multi_buffers(keys[:1], [wrong], [[size] * len(wrong)])
        assert answer == [code]

    async with store.allocate(source.size) as ours:
        memory = np.frombuffer(ours.view or b"", np.uint8)
        memory[:] = source
        pieces = [ours[at : at + size] for at in range(0, source.size, size)]
        items = {f"our {i}": pieces[i * layers : (i + 1) * layers] for i in range(blocks)}
        await store.put_many_from(items, config=ReplicateConfig(prefer_alloc_in_same_node=True))
        memory[:] = 0
        assert await store.get_many_into(items) == [layers * size] * blocks
        assert np.array_equal(memory, source)
        del memory


# --- views ------------------------------------------------------------------------------------


async def test_get_buffer(store: Store) -> None:
    """get_buffer Buffer Protocol, and ``get_buffer()``; our view ends with its block.

    NumPy sees the elements as int8, not as bytes.
    """
    value = counting(4096)
    await store.put("large_object", value)
    handle = await store.engine.get_buffer("large_object")
    assert handle is not None
    array = np.array(handle, copy=False)
    assert array.dtype == np.int8
    assert array.ctypes.data == handle.ptr()
    assert array.tobytes() == value
    assert handle.size() == len(handle) == 4096
    assert await store.engine.get_buffer("nothing") is None
    del handle, array

    async with store.view("large_object") as view:
        assert view is not None
        assert np.frombuffer(view, np.uint8).tobytes() == value
    async with store.view("nothing") as view:
        assert view is None


async def test_batch_get_buffer(store: Store) -> None:
    """Class MooncakeDistributedStore, ``batch_get_buffer()``."""
    await store.put_many({"key1": b"1", "key2": b"22"})
    handles = await store.engine.batch_get_buffer(["key1", "key2", "key3"])
    assert [handle and handle.size() for handle in handles] == [1, 2, None]
    del handles

    async with store.view_many(["key1", "key2", "key3"]) as views:
        assert [view and bytes(view) for view in views] == [b"1", b"22", None]


# --- memory of the machine ------------------------------------------------------------------------


async def test_alloc_from_mem_pool(store: Store) -> None:
    """Class MooncakeDistributedStore, ``alloc_from_mem_pool()``: for dummy clients only.

    For others the answer is 0, always. A dummy client's is in ``test_upstream_set_up.py``.
    """
    assert await store.engine.alloc_from_mem_pool(1024) == 0

    async with store.allocate(1024) as buffer:
        assert buffer.address


async def test_host_memory_allocator(store: Store, mooncake: Any) -> None:
    """MooncakeHostMemAllocator Class: memory with an address; our verb for it is ``allocate``."""
    allocator = mooncake.MooncakeHostMemAllocator()
    address = allocator.alloc(MB)
    assert address
    assert await store.engine.put_from("key", address, 1024) == 0
    assert allocator.free(address) == 0

    async with store.allocate(MB) as buffer:
        await store.put_from("ours", buffer[:1024])
    assert await store.size("ours") == await store.size("key") == 1024


async def test_performance_tips(store: Store) -> None:
    """Performance Tips 1 to 3, which are true of the verbs too, and the loop does not stop."""
    async with store.allocate(64 * MB) as buffer, LoopStallProbe() as probe:
        await store.put_many_from({f"{i}": buffer[i * 4096 : (i + 1) * 4096] for i in range(256)})
        await store.put_from("large", buffer)
        assert await store.get_into("large", buffer) == 64 * MB
    assert probe.longest < 1

"""Upstream's examples for parts of values: ranges in one call, and sessions.

As in ``test_upstream_values.py``.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiomooncake import InvalidArgumentError, ObjectExistsError, Store
from tests.examples.upstream.conftest import Config, Registered, counting


async def test_ranges_of_one_key(store: Store, registered: Registered) -> None:
    """``get_into_ranges()``, "partial reads": one slice, and several packed behind each other."""
    value = counting(16384)
    await store.put("my_key", value)
    array = await registered(64)
    address = array.ctypes.data
    one = await store.engine.get_into_ranges([address], [["my_key"]], [[[0]]], [[[100]]], [[[50]]])
    assert one == [[[50]]]
    assert bytes(array[:50]) == value[100:150]
    packed = await store.engine.get_into_ranges(
        [address], [["my_key"]], [[[0, 16, 40]]], [[[128, 4096, 8193]]], [[[8, 12, 4]]]
    )
    assert packed == [[[8, 12, 4]]]
    assert bytes(array[16:28]) == value[4096:4108]
    assert bytes(array[40:44]) == value[8193:8197]

    async with store.allocate(64) as buffer:
        assert await store.get_into("my_key", buffer[:50], offset=100) == 50
        places = {128: buffer[0:8], 4096: buffer[16:28], 8193: buffer[40:44]}
        reads = (store.get_into("my_key", part, offset=at) for at, part in places.items())
        assert await asyncio.gather(*reads) == [8, 12, 4]
        assert bytes(buffer[40:44].view or b"") == value[8193:8197]


async def test_ranges_of_two_keys_in_two_buffers(store: Store, registered: Registered) -> None:
    """``get_into_ranges()``, "Usage example"; ours is a session, which looks keys up once."""
    first, second = counting(256), counting(256)[::-1]
    await store.put_many({"key1": first, "key2": second})
    arrays = [await registered(32), await registered(32)]
    results = await store.engine.get_into_ranges(
        [array.ctypes.data for array in arrays],
        [["key1", "key2"], ["key2", "key1"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert results == [[[4, 3], [5]], [[6], [4]]]
    expected = bytearray(32), bytearray(32)
    expected[0][0:4], expected[0][20:23], expected[0][8:13] = first[1:5], first[30:33], second[2:7]
    expected[1][4:10], expected[1][16:20] = second[0:6], first[10:14]
    assert [bytes(array) for array in arrays] == [bytes(each) for each in expected]

    async with store.allocate(64) as ours, store.get_session(["key1", "key2"]) as session:
        parts = [
            ("key1", 1, ours[0:4]), ("key1", 30, ours[20:23]), ("key2", 2, ours[8:13]),
            ("key2", 0, ours[36:42]), ("key1", 10, ours[48:52]),
        ]  # fmt: skip
        reads = (session.read_into(key, at, part) for key, at, part in parts)
        assert await asyncio.gather(*reads) == [4, 3, 5, 6, 4]
        assert ours.view is not None
        assert bytes(ours.view[8:13]) == second[2:7]
        assert bytes(ours.view[48:52]) == first[10:14]


async def test_ranges_that_can_not_be_read(store: Store, registered: Registered) -> None:
    """``get_into_ranges()``, "Shape rules" and "Common pitfalls": codes, for each fragment.

    Unlike ``get_into``, it takes registered memory only, on TCP too.
    """
    value = counting(256)
    await store.put_many({"key1": value, "key2": value})
    array = await registered(32)
    at, ranges = array.ctypes.data, store.engine.get_into_ranges
    own = np.zeros(32, dtype=np.uint8)
    missing = await ranges([at], [["key1", "nothing"]], [[[0], [8]]], [[[1], [2]]], [[[4], [5]]])
    assert missing == [[[4], [-704]]]
    for dst, src in ((30, 0), (0, 250)):  # beyond the memory, beyond the value
        beyond = await ranges([at], [["key1"]], [[[0, dst]]], [[[0, src]]], [[[4, 10]]])
        assert beyond == [[[4, -600]]]
    flat = await ranges([at], [["key1", "key2"]], [[[0, 1], [8]]], [[[0], [0]]], [[[4], [4]]])
    assert flat == [[[-600, -600], [4]]]
    short = await ranges([at, at], [["key1"]], [[[0]]], [[[0]]], [[[4]]])
    assert short == [[[-600]], [[-600]]]
    foreign = await ranges([own.ctypes.data], [["key1"]], [[[0]]], [[[0]]], [[[4]]])
    assert foreign == [[[-600]]]

    async with store.allocate(32) as buffer:
        assert await store.get_into("nothing", buffer[:4], offset=1) is None
        assert await store.get_into("key1", buffer[:10], offset=250) == 6
        assert len(buffer[30:40]) == 2  # a slice ends with its memory


async def test_sessions(store: Store, registered: Registered) -> None:
    """Session-based ranged multi-buffer transfer, "Session ranged put/get example"."""
    page, layers, keys = 1024, 4, ["block0", "block1"]
    source, received = await registered(page * layers), await registered(page * layers)
    source[:] = np.repeat(np.arange(layers), page)
    engine, sizes = store.engine, [[page]] * 2
    assert await engine.batch_put_session_start(keys, [page * layers] * 2) == [0, 0]
    for at in range(0, page * layers, page):
        address = [[source.ctypes.data + at]] * 2
        wrote = await engine.batch_put_from_multi_buffer_ranges(keys, address, sizes, [[at]] * 2)
        assert wrote == [page, page]
    assert await engine.batch_is_exist(keys) == [0, 0]
    assert await engine.batch_put_session_end(keys) == [0, 0]

    assert await engine.batch_get_session_start([*keys, "nothing"]) == [0, 0, -704]
    for at in range(0, page * layers, page):
        address = [[received.ctypes.data + at]] * 2
        read = await engine.batch_get_into_multi_buffer_ranges(keys, address, sizes, [[at]] * 2)
        assert read == [page, page]
    assert await engine.batch_get_session_end(keys) == 0
    assert np.array_equal(source, received)

    async with store.allocate(page * layers) as ours:
        memory = np.frombuffer(ours.view or b"", np.uint8)
        memory[:] = source
        pages = {at: ours[at : at + page] for at in range(0, page * layers, page)}
        async with store.put_session({"our 0": page * layers, "our 1": page * layers}) as put:
            for at, part in pages.items():
                await asyncio.gather(put.write("our 0", at, part), put.write("our 1", at, part))
        memory[:] = 0
        async with store.get_session(["our 0", "our 1"]) as get:
            for at, part in pages.items():
                assert await get.read_into("our 1", at, part) == page
        assert np.array_equal(memory, source)
        del memory


async def test_sessions_that_are_refused(
    store: Store, registered: Registered, native: Config
) -> None:
    """Session-based transfer: ``batch_put_session_revoke()``, and what start refuses.

    Of a key that has a session upstream says that it is skipped; its status is -600.
    """
    array, engine = await registered(64), store.engine
    assert await engine.batch_put_session_start(["block"], [64]) == [0]
    assert await engine.batch_put_session_start(["block", "other"], [64, 64]) == [-600, 0]
    assert await engine.batch_put_session_revoke(["block", "other"]) == [0, 0]
    assert await engine.batch_put_session_end(["block"]) == [-600]
    assert await engine.batch_is_exist(["block", "other"]) == [0, 0]
    groups = native(group_ids=["one"])
    assert await engine.batch_put_session_start(["a", "b"], [64, 64], groups) == [-600, -600]
    copies = native(replica_num=2, nof_replica_num=1)
    assert await engine.batch_put_session_start(["a"], [64], copies) == [-600]
    await store.put("taken", b"value")
    assert await engine.batch_put_session_start(["taken"], [64]) == [-705]
    nowhere = await engine.batch_get_into_multi_buffer_ranges(
        ["taken"], [[array.ctypes.data]], [[5]], [[0]]
    )
    assert nowhere == [-600]

    async with store.allocate(64) as buffer:
        with pytest.raises(ObjectExistsError):
            async with store.put_session({"taken": 64}):
                pass
        with pytest.raises(InvalidArgumentError, match="ours"):  # and what is written is revoked
            async with store.put_session({"ours": 64}) as session:
                await session.write("ours", 0, buffer[:32])
    assert not await store.exists("ours")

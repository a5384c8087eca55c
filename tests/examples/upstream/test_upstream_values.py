"""Upstream's examples for values: store, replace, read, look up and remove.

Each test does an example of "Mooncake Store Python API" twice: as upstream has it, through
``store.engine`` and its codes, and by the verb of this library. The docstring names the section.
"""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from aiomooncake import (
    BatchError,
    InvalidArgumentError,
    LocalCluster,
    ObjectLeasedError,
    ReplicateConfig,
    RpcError,
    Store,
)
from tests.conftest import MB, OpenStore
from tests.examples.upstream.conftest import Config

KEYS = ["key1", "key2", "key3"]
VALUES = [b"value1", b"value2", b"value3"]


# --- basic usage ------------------------------------------------------------------------------


async def test_simple_get_and_put(store: Store) -> None:
    """Basic API Usage, "Simple Get/Put Operations"."""
    weights = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    settings = b'{"model": "llama-7b", "temperature": 0.7}'

    assert await store.engine.put("config", settings) == 0
    assert await store.engine.put("weights", weights.tobytes()) == 0
    assert await store.engine.put("cache", b"some serialized cache data") == 0
    assert json.loads(await store.engine.get("config"))["model"] == "llama-7b"
    found = np.frombuffer(await store.engine.get("weights"), dtype=np.float32)
    assert np.array_equal(found.reshape(1000, 1000), weights)
    assert await store.engine.is_exist("cache") == 1

    await store.put("our config", settings)
    await store.put("our weights", weights)  # any buffer will do
    read = await store.get("our weights")
    assert read is not None
    assert np.array_equal(np.frombuffer(read, np.float32).reshape(1000, 1000), weights)
    assert await store.exists("our config") is True


async def test_basic_operations_by_blocking_calls(store: Store) -> None:
    """Non-Zero-Copy API, "Basic Operations": the same lines, in a thread and without an await."""
    data = b"Hello, World!" * 1000
    blocking = store.blocking

    def example() -> None:
        assert blocking.put("message", data) == 0
        assert blocking.get("message") == data
        assert blocking.put_batch(KEYS, VALUES) == 0
        assert blocking.get_batch(KEYS) == VALUES

    await asyncio.to_thread(example)

    await store.put("our message", data)
    assert await store.get("our message") == data
    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    assert await store.get_many(KEYS) == VALUES


async def test_put(store: Store, native: Config) -> None:
    """Class MooncakeDistributedStore, ``put()``.

    Upstream writes ``config: ReplicateConfig = None``; the wheel refuses None, the argument can
    only be left out. So it is for every method with a config.
    """
    important = b"Critical information"
    assert await store.engine.put("my_key", b"Hello, World!") == 0
    assert await store.engine.put("important_data", important, native(replica_num=2)) == 0
    with pytest.raises(TypeError, match="incompatible function arguments"):
        await store.engine.put("none", b"value", None)

    await store.put("ours", b"Hello, World!", config=None)
    await store.put("our important data", important, config=ReplicateConfig(replica_num=2))
    assert await store.get_many(["ours", "our important data"]) == [b"Hello, World!", important]


async def test_get(store: Store) -> None:
    """Class MooncakeDistributedStore, ``get()``: no bytes for a miss; ours is None."""
    await store.engine.put("my_key", b"Hello, World!")
    assert await store.engine.get("my_key") == b"Hello, World!"
    assert await store.engine.get("nothing") == b""

    assert await store.get("my_key") == b"Hello, World!"
    assert await store.get("nothing") is None


async def test_put_batch(store: Store) -> None:
    """Class MooncakeDistributedStore, ``put_batch()``: one code for all; ours is one per key.

    Upstream's code tells no key, and none of the three is stored when one is bad.
    """
    assert await store.engine.put_batch(KEYS, VALUES) == 0
    assert await store.engine.put_batch(["key4", "key5"], [b"", b"value5"]) == -600
    assert await store.engine.batch_is_exist(["key4", "key5"]) == [0, 0]

    assert await store.put_many({"key6": b"6", "key7": b"7"}) == {"key6": None, "key7": None}
    with pytest.raises(InvalidArgumentError, match="key4"):
        await store.put_many({"key4": b"", "key5": b"value5"})


async def test_get_batch(store: Store) -> None:
    """Class MooncakeDistributedStore, ``get_batch()``.

    Of a key given twice only the last answer is sure to be right, which upstream does not say.
    """
    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    assert await store.engine.get_batch([*KEYS, "nothing"]) == [*VALUES, b""]
    assert (await store.engine.get_batch(["key2", "key1", "key1"]))[2] == b"value1"

    assert await store.get_many([*KEYS, "nothing"]) == [*VALUES, None]
    assert await store.get_many(["key1", "key1", "key2"]) == [b"value1", b"value1", b"value2"]


# --- replacing, and several pieces --------------------------------------------------------------


async def test_upsert(store: Store, native: Config) -> None:
    """Class MooncakeDistributedStore, ``upsert()``: the last value stays, a ``put`` the first."""
    both = native(replica_num=2)
    assert await store.engine.upsert("weights", b"old-bytes", both) == 0
    assert await store.engine.upsert("weights", b"new-bytes", both) == 0
    assert await store.engine.put("weights", b"and others") == 0
    assert await store.engine.get("weights") == b"new-bytes"

    await store.upsert("weights", b"ours", config=ReplicateConfig(replica_num=2))
    assert await store.get("weights") == b"ours"


async def test_upsert_parts(store: Store) -> None:
    """Class MooncakeDistributedStore, ``upsert_parts()``; by our verb the parts are joined."""
    parts = (b"Hello, ", b"World!")
    assert await store.engine.upsert_parts("greeting", *parts) == 0
    assert await store.engine.get("greeting") == b"Hello, World!"

    await store.upsert("greeting", b"".join((*parts, b" Again")))
    assert await store.get("greeting") == b"Hello, World! Again"


async def test_upsert_batch(store: Store) -> None:
    """Class MooncakeDistributedStore, ``upsert_batch()``; ours are calls that travel together."""
    await store.put("key1", b"old")
    assert await store.engine.upsert_batch(KEYS, VALUES) == 0
    assert await store.engine.get_batch(KEYS) == VALUES

    await asyncio.gather(*(store.upsert(key, b"new") for key in KEYS))
    assert await store.get_many(KEYS) == [b"new"] * 3


async def test_put_parts(store: Store) -> None:
    """Class MooncakeDistributedStore, ``put_parts()``."""
    parts = (b"Hello, ", b"World!", b" From Mooncake")
    assert await store.engine.put_parts("greeting", *parts) == 0
    assert await store.engine.get("greeting") == b"Hello, World! From Mooncake"

    await store.put_parts("our greeting", *parts)
    assert await store.get("our greeting") == b"Hello, World! From Mooncake"


# --- removing ---------------------------------------------------------------------------------


async def test_remove(store: Store) -> None:
    """Class MooncakeDistributedStore, ``remove()``.

    Upstream's signature leaves out ``force``, and its text that a key that was read lately stays.
    """
    await store.put("my_key", b"value")
    assert await store.engine.remove("my_key") == 0
    assert await store.engine.remove("my_key") == -704
    await store.put("read", b"value")
    await store.engine.get("read")
    assert await store.engine.remove("read") == -706
    assert await store.engine.remove("read", force=True) == 0

    await store.put("my_key", b"value")
    assert await store.remove("my_key") is True
    assert await store.remove("my_key") is False
    await store.put("read", b"value")
    await store.get("read")
    with pytest.raises(ObjectLeasedError):
        await store.remove("read")
    assert await store.remove("read", force=True)


async def test_remove_by_regex(store: Store) -> None:
    """Class MooncakeDistributedStore, ``remove_by_regex()``.

    Upstream calls the argument ``regex``; its name is ``regex_pattern``, and there is ``force``.
    """
    sessions = {f"user_session_{number}": b"value" for number in range(3)}
    await store.put_many({**sessions, "no_user_session_": b"value"})
    pattern = "^user_session_.*"
    assert await store.engine.remove_by_regex(regex_pattern=pattern) == 3
    assert await store.engine.remove_by_regex(pattern) == 0
    assert await store.engine.remove_by_regex("([") == -600

    await store.put_many(sessions)
    assert await store.remove_by_regex(pattern) == 3
    with pytest.raises(InvalidArgumentError):
        await store.remove_by_regex("([")
    assert await store.exists("no_user_session_")


async def test_remove_all(store: Store) -> None:
    """Class MooncakeDistributedStore, ``remove_all()``, which has ``force`` too."""
    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    await store.get("key1")
    assert await store.engine.remove_all() == 2
    assert await store.engine.remove_all(force=True) == 1

    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    assert await store.remove_all() == 3


async def test_batch_remove(store: Store) -> None:
    """Class MooncakeDistributedStore, ``batch_remove()``; ours tells True, False, or an error."""
    keys = [*KEYS, "key4", "key5"]
    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    await store.get("key1")
    assert await store.engine.batch_remove(keys) == [-706, 0, 0, -704, -704]
    assert await store.engine.batch_remove(keys, force=True) == [0, -704, -704, -704, -704]

    await store.put_many(dict(zip(KEYS, VALUES, strict=True)))
    await store.get("key1")
    with pytest.raises(BatchError) as failed:
        await store.remove_many(keys)
    assert [*failed.value.errors] == [0]
    assert failed.value.results[1:] == [True, True, False, False]
    assert await store.remove_many(keys, force=True) == [True, False, False, False, False]


# --- looking up -------------------------------------------------------------------------------


async def test_is_exist(store: Store) -> None:
    """Class MooncakeDistributedStore, ``is_exist()``; how it fails is in the last test here."""
    await store.put("my_key", b"value")
    assert await store.engine.is_exist("my_key") == 1
    assert await store.engine.is_exist("nothing") == 0

    assert await store.exists("my_key") is True
    assert await store.exists("nothing") is False


async def test_batch_is_exist(store: Store) -> None:
    """Class MooncakeDistributedStore, ``batch_is_exist()``."""
    await store.put_many({"key1": b"1", "key3": b"3"})
    assert await store.engine.batch_is_exist(KEYS) == [1, 0, 1]
    assert await store.exists_many(KEYS) == [True, False, True]


async def test_get_size(store: Store) -> None:
    """Class MooncakeDistributedStore, ``get_size()``."""
    await store.put("my_key", bytes(1234))
    assert await store.engine.get_size("my_key") == 1234
    assert await store.engine.get_size("nothing") == -704

    assert await store.size("my_key") == 1234
    assert await store.size("nothing") is None


async def test_get_hostname(store: Store) -> None:
    """Class MooncakeDistributedStore, ``get_hostname()``; Quick Start has the range of ports."""
    host, port = (await store.engine.get_hostname()).rsplit(":", 1)
    assert 12300 <= int(port) <= 14300
    assert store.hostname == f"{host}:{port}"


async def test_error_handling(store: Store) -> None:
    """Error Handling: codes, and empty answers for a failure as for a miss.

    A value larger than the local buffer is there, and reads as if it were not; ours are read.
    """
    large = np.ones(40 << 20, dtype=np.uint8)
    await store.put("large", large)
    assert await store.engine.get_size("large") == large.nbytes
    for missing in ("large", "nothing"):
        assert await store.engine.get(missing) == b""
        assert await store.engine.get_batch([missing]) == [b""]
        assert await store.engine.get_buffer(missing) is None
    assert await store.engine.put("", b"value") == -600

    read = await store.get("large")
    assert read is not None
    assert np.array_equal(np.frombuffer(read, dtype=np.uint8), large)
    with pytest.raises(InvalidArgumentError):
        await store.put("", b"value")


async def test_failures_without_a_master(own_cluster: LocalCluster, open_store: OpenStore) -> None:
    """Class MooncakeDistributedStore, ``is_exist()``, ``batch_is_exist()`` and ``remove_all()``.

    Upstream says that they answer -1 on an error. They answer the error's own code.
    """
    options = {"global_segment_size": 0, "local_buffer_size": MB, "fail_fast": False}
    store = await open_store(own_cluster.address, **options)
    await asyncio.to_thread(own_cluster.blocking.kill)
    *answers, error = await asyncio.gather(
        store.engine.is_exist("key"),
        store.engine.batch_is_exist(["key", "key2"]),
        store.engine.remove_all(),
        store.engine.get("key"),
        store.exists("key"),
        return_exceptions=True,
    )
    assert answers == [-900, [-900, -900], -900, b""]
    assert isinstance(error, RpcError)
    assert error.code == -900

"""What upstream's examples run on: a cluster of two clients, with keys that no other test sees."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiomooncake import LocalCluster, Store, connect
from tests.conftest import MB, Closing, OpenStore, _need_engine

Config = Callable[..., Any]
Registered = Callable[[int], Awaitable[Any]]


def counting(nbytes: int) -> bytes:
    """Make bytes of which each position has its own."""
    return bytes(range(256)) * (nbytes // 256)


@pytest.fixture(scope="session")
def upstream_cluster(closing: Closing) -> Iterator[LocalCluster]:
    """A master of these examples alone: their keys have upstream's names, ``"key1"`` and so on."""
    _need_engine()
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master
        closing.wait()


def _lending(cluster: LocalCluster, closing: Closing, nbytes: int) -> Iterator[Store]:
    async def opened() -> Store:
        return await connect(cluster.address, global_segment_size=nbytes, local_buffer_size=32 * MB)

    store = asyncio.run(opened())
    yield store
    assert store.stats().in_flight == 0
    closing.add(store._client)


@pytest.fixture(scope="session")
def store(upstream_cluster: LocalCluster, closing: Closing) -> Iterator[Store]:
    """The store that upstream's page calls so."""
    yield from _lending(upstream_cluster, closing, 192 * MB)


@pytest.fixture(scope="session")
def peer(upstream_cluster: LocalCluster, closing: Closing) -> Iterator[Store]:
    """A second client, for the examples with several segments."""
    yield from _lending(upstream_cluster, closing, 64 * MB)


@pytest.fixture(autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Remove each example's keys, which the next one may use again."""
    store = request.getfixturevalue("store") if "store" in request.fixturenames else None
    yield
    if store is not None:
        await store.remove_all(force=True)


@pytest.fixture
def mooncake(store: Store) -> Any:
    """The binding's module, imported when the library has set what it reads as it loads."""
    return importlib.import_module("mooncake.store")


@pytest.fixture
def native(mooncake: Any) -> Config:
    """Make the binding's own ``ReplicateConfig``, with some fields set as upstream sets them."""

    def make(**fields: Any) -> Any:
        config = mooncake.ReplicateConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    return make


@pytest.fixture
async def registered(store: Store) -> AsyncIterator[Callable[[int], Any]]:
    """Make NumPy arrays of bytes that are registered with the store until the test ends."""
    arrays: list[Any] = []

    async def make(nbytes: int) -> Any:
        array = np.zeros(nbytes, dtype=np.uint8)
        assert await store.engine.register_buffer(array.ctypes.data, nbytes) == 0
        arrays.append(array)
        return array

    yield make
    for array in arrays:
        assert await store.engine.unregister_buffer(array.ctypes.data) == 0


@pytest.fixture
async def dummy(upstream_cluster: LocalCluster, store: Store, open_store: OpenStore) -> Store:
    """A dummy client, as upstream's ``setup_dummy(mem_pool_size, local_buffer_size, address)``."""
    blocking = upstream_cluster.blocking
    client = await asyncio.to_thread(blocking.start_client, global_segment_size=0)
    return await open_store(client_server_address=client.address, mem_pool_size=16 * MB)

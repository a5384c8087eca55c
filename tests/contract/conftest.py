"""Both engines behind one set of fixtures: the in-memory one, the real one on its own master."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from aiomooncake.cluster import LocalCluster
from aiomooncake.engine.binding import NativeStore, load_binding
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.errors import EngineNotInstalledError
from tests.contract.engines import LEASE, MB, Engine


@pytest.fixture(scope="session", params=["memory", "real"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "memory":
        cluster = InMemoryEngine("contract", lease_ttl=LEASE)
        yield Engine("memory", lambda: InMemoryStore(cluster), "")
        return
    try:
        binding = load_binding()
    except EngineNotInstalledError as exc:
        if os.environ.get("CI"):
            pytest.fail(f"the contract must be checked on the real engine in CI: {exc}")
        pytest.skip(f"the contract is checked on the in-memory engine only: {exc}")
    # Without eviction: after a put that found no room the master lets the next value go.
    with LocalCluster(lease_ttl=LEASE, extra_args=["--eviction_ratio=0"]) as master:
        yield Engine("real", binding.store_class, master.address)


@pytest.fixture(scope="session")
def native(engine: Engine) -> Iterator[NativeStore]:
    """The client that holds all memory: 64 MB for the cluster, 16 MB local buffer."""
    store = engine.open(64 * MB, 16 * MB)
    yield store
    store.close()


@pytest.fixture(scope="session")
def bare(engine: Engine, native: NativeStore) -> Iterator[NativeStore]:
    """A second client, with neither a segment nor a local buffer."""
    store = engine.open(0, 0)
    yield store
    store.close()


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def other() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def missing() -> str:
    return uuid.uuid4().hex

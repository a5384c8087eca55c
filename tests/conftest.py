"""What all tests share: a real master, stores that are closed behind a test, and guards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib.util
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from aiomooncake import LocalCluster, Store, connect
from aiomooncake.engine.client import EngineClient

MB = 1 << 20
OpenStore = Callable[..., Awaitable[Store]]


# --- guards -----------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Fail a test whose event loop waits in our code: for a file, a socket, a lock or a sleep."""
    with blockbuster_ctx("aiomooncake") as guard:
        yield guard


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> Iterator[None]:
    """Leave what is there for good out of the garbage collections that follow each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class _LoopErrors(logging.Handler):
    """Collects what event loops (uvloop's too) report when nobody handles an exception."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


@pytest.fixture(autouse=True)
def loop_errors(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Fail a test that leaves an exception to an event loop; who expects it clears the list."""
    handler = _LoopErrors()
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield handler.seen
        function = getattr(request.node, "function", None)
        if inspect.iscoroutinefunction(function):
            gc.collect()  # a task that failed unseen says so only when it is freed
    finally:
        logger.removeHandler(handler)
    if handler.seen:
        pytest.fail("unhandled in an event loop:\n" + "\n".join(handler.seen), pytrace=False)


# --- the real engine --------------------------------------------------------------------------


def _need_engine() -> None:
    """Skip only where there is no engine to be had; elsewhere a missing one fails the test."""
    if importlib.util.find_spec("mooncake") is None:
        what = "the real engine is not installed: pip install 'aiomooncake[cpu]'"
        if sys.platform == "linux" or os.environ.get("CI"):
            pytest.fail(what)
        pytest.skip(what)


@pytest.fixture(scope="session")
def cluster(closing: Closing) -> Iterator[LocalCluster]:
    """A master that all tests share: they must not stop it, nor count on being alone on it.

    It evicts nothing on its own. Otherwise one put that finds no room makes it evict a value as
    soon as there is one without a lease, which is the next one that any test stores.
    """
    _need_engine()
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master
        closing.wait()


@pytest.fixture(scope="session")
def values_cluster(closing: Closing) -> Iterator[LocalCluster]:
    """A master as :func:`cluster`, on which no other store lends memory.

    A store that closes takes its values along, and until it is gone the master may place some on
    it: a test that opens another store here lends nothing.
    """
    _need_engine()
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master
        closing.wait()


@pytest.fixture(scope="session")
def dummies_cluster(closing: Closing) -> Iterator[LocalCluster]:
    """A master as :func:`values_cluster`, for the stand-alone client."""
    _need_engine()
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master
        closing.wait()


@pytest.fixture
def own_cluster() -> Iterator[LocalCluster]:
    """A master of the test's own, to be frozen and killed."""
    _need_engine()
    master = LocalCluster()
    master.blocking.start()
    yield master
    master.blocking.kill()  # a gentle stop takes a second
    master.blocking.stop()


# --- stores -----------------------------------------------------------------------------------


class Closing:
    """Closes stores behind the tests, side by side: each takes the real engine 1-2 s."""

    def __init__(self) -> None:
        self._futures: list[concurrent.futures.Future[None]] = []

    def add(self, client: EngineClient) -> None:
        self._futures.append(client.begin_close())

    def wait(self) -> None:
        done, late = concurrent.futures.wait(self._futures, timeout=30)
        assert not late, f"{len(late)} stores did not close"
        for future in done:
            future.result()
        self._futures.clear()


@pytest.fixture(scope="session")
def closing() -> Iterator[Closing]:
    """Close stores in the background; at the end nothing of them may be left, no thread either."""
    stores = Closing()
    yield stores
    stores.wait()
    deadline = time.monotonic() + 10
    while (left := store_threads()) and time.monotonic() < deadline:
        left[0].join(0.1)
    assert not left


def store_threads() -> list[threading.Thread]:
    """List the threads that stores have started; the one that starts masters stays for good."""
    names = ("aiomooncake-spawner",)
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("aiomooncake-") and thread.name not in names
    ]


@pytest.fixture
def open_store(closing: Closing) -> Iterator[OpenStore]:
    """Connect as :func:`connect` does; the store is closed behind the test."""
    opened: list[Store] = []

    async def open_one(target: Any = None, **options: Any) -> Store:
        store = await connect(target, **options)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        closing.add(store._client)


@pytest.fixture(scope="session", params=["memory", "real", "dummy"])
def store(request: pytest.FixtureRequest, closing: Closing) -> Iterator[Store]:
    """A store that tests of the verbs share: 192 MB, a local buffer of 16 MB.

    On the in-memory engine, on the real one, and as a dummy client of a process of its own.

    It was opened in a loop that is closed, and each test uses it from a loop of its own.
    """
    options: dict[str, Any] = {"global_segment_size": 192 * MB}
    target: str | None = None
    if request.param == "memory":
        target = "memory://shared"
    elif request.param == "real":
        target = request.getfixturevalue("values_cluster").address
    else:
        cluster: LocalCluster = request.getfixturevalue("dummies_cluster")
        client = cluster.blocking.start_client(global_segment_size=192 * MB)
        options = {"client_server_address": client.address, "mem_pool_size": 16 * MB}

    async def opened() -> Store:
        return await connect(target, rank=3, local_buffer_size=16 * MB, **options)

    store = asyncio.run(opened())
    yield store
    assert store.stats().in_flight == 0
    closing.add(store._client)


# --- hangs ------------------------------------------------------------------------------------


class Hold(threading.Event):
    """Where calls of the in-memory engine hang, and how a test knows that they do."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._arrived.release()
        return super().wait(timeout)

    def __call__(self, calls: int = 1) -> Awaitable[None]:
        """Await that so many more calls hang here."""

        def arrive() -> None:
            for _ in range(calls):
                assert self._arrived.acquire(timeout=10), "the engine was not called"

        return asyncio.to_thread(arrive)


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Hang calls, with ``engine.fault(method, hold=hold)``, until ``hold.set()``."""
    event = Hold()
    yield event
    event.set()


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Await what another thread does soon and nobody tells."""

    async def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 10 s"
            await asyncio.sleep(0.001)

    return wait

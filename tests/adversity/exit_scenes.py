"""Scenes of :mod:`test_exit` and :mod:`test_fork`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import aiomooncake
from aiomooncake import ForkedProcessError, LocalCluster, Store
from tests.adversity.processes import Peer

MB = 1 << 20
KEPT: list[object] = []
"""What lives until the interpreter's end, unlike a local variable of a scene."""


async def open_store(address: str, **options: Any) -> Store:
    sizes = {"global_segment_size": 32 * MB, "local_buffer_size": 16 * MB}
    return await aiomooncake.connect(address, **{**sizes, **options})


def opened(address: str, **options: Any) -> Store:
    """Open a store in a loop that is closed, and keep it."""
    store = asyncio.run(open_store(address, **options))
    KEPT.append(store)
    return store


def start_cluster() -> LocalCluster:
    """Start a master that is not killed by the interpreter's exit, but by the process's end."""
    cluster = LocalCluster(client_ttl=60)
    cluster.blocking.start()
    KEPT.append(cluster)
    master = cluster.blocking._process
    assert master is not None
    master._finalizer.atexit = False
    return cluster


class Thaw:
    """Lets a process go on while the interpreter finalises, when ``atexit`` is long over."""

    def __init__(self, pid: int) -> None:
        # Modules are empty by then.
        self._pid, self._signal = pid, signal.SIGCONT
        self._kill, self._sleep, self._write = os.kill, time.sleep, os.write
        sys.thaw = self  # type: ignore[attr-defined]  # freed after all modules

    def __del__(self) -> None:
        self._kill(self._pid, self._signal)
        self._sleep(1.0)  # without the GIL: threads that come back get at it
        self._write(1, b"thawed")


def start_daemons(count: int, work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


async def abandon(count: int, start: Callable[[], Any]) -> None:
    """Start calls that hang, and go away from them."""
    tasks = [asyncio.ensure_future(start()) for _ in range(count)]
    done, _ = await asyncio.wait(tasks, timeout=0.3)
    assert not done, done
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# --- exit -------------------------------------------------------------------------------------


def leave_idle_store(address: str, code: str) -> None:
    store = opened(address)
    asyncio.run(store.put("idle" + store.hostname, b"v"))
    print("to be flushed", end="")
    sys.exit(int(code))


def leave_by_exception(address: str) -> None:
    opened(address)
    raise LookupError("uncaught")


def leave_calls_in_flight(address: str) -> None:
    """Leave a loop with 100 calls under way, and threads that go on calling."""
    store = opened(address, max_abandoned=1000)
    key = "busy" + store.hostname
    began = threading.Semaphore(0)

    async def main() -> None:
        await store.put(key, b"v" * 4096)
        KEPT.extend(asyncio.ensure_future(store.get(key)) for _ in range(100))
        await asyncio.sleep(0)

    def work() -> None:
        with contextlib.suppress(aiomooncake.StoreClosedError):
            while True:
                store.blocking.get_size(key)
                began.release()

    asyncio.run(main())
    start_daemons(4, work)
    for _ in range(40):
        began.acquire()


def leave_dropped_store(address: str) -> None:
    """The store is dropped at the end of the scene, so its close is under way at exit."""
    store = asyncio.run(open_store(address))
    print(store.hostname)


def leave_close_under_way(address: str) -> None:
    store = opened(address)

    async def main() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(store.aclose(), 0.01)

    asyncio.run(main())
    assert store._client.gate.state.value == "closing"


def leave_close_on_frozen_master() -> None:
    cluster = start_cluster()
    store = opened(cluster.address, rpc_timeout=8)
    cluster.blocking.pause()

    async def main() -> None:
        await store.aclose(timeout=0.2)

    asyncio.run(main())


def leave_set_up_stuck() -> None:
    cluster = start_cluster()
    cluster.blocking.pause()
    try:
        opened(cluster.address, timeout=0.5, rpc_timeout=20)
    except aiomooncake.SetupTimeoutError:
        return
    raise AssertionError("a frozen master was connected to")


def leave_frozen_master(calls: str) -> None:
    """With calls stuck on it longer than exit is willing to wait.

    The master is killed by the interpreter's exit, so that they come back after that.
    """
    cluster = LocalCluster()
    cluster.blocking.start()
    KEPT.append(cluster)
    store = opened(cluster.address, rpc_timeout=20, max_abandoned=100)
    cluster.blocking.pause()
    if int(calls):
        asyncio.run(abandon(int(calls), lambda: store.exists("k")))


def leave_stuck_on_frozen_peer(calls: str, thaw: str) -> None:
    """With calls stuck longer than exit waits; thawed, they come back while it finalises.

    Coming back there aborted the process: ``terminate called without an active exception``.
    """
    cluster = start_cluster()
    peer = Peer(cluster.address, keys=int(calls))
    KEPT.append(peer)
    store = opened(cluster.address, transfer_timeout=20, max_abandoned=100, threads=int(calls) + 1)
    asyncio.run(store.get("peer0"))
    peer.freeze()
    keys = iter(range(int(calls)))
    asyncio.run(abandon(int(calls), lambda: store.get(f"peer{next(keys)}")))
    if thaw == "thaw":
        Thaw(peer.pid)


def leave_blocking_calls_stuck(calls: str) -> None:
    """Threads of a framework, stuck in ``store.blocking``, come back while it finalises."""
    cluster = start_cluster()
    store = opened(cluster.address, rpc_timeout=20)
    cluster.blocking.pause()
    start_daemons(int(calls), lambda: store.blocking.is_exist("k"))
    while store.stats().in_flight < int(calls):
        time.sleep(0.001)
    assert cluster.pid is not None
    Thaw(cluster.pid)


def leave_with_other_user(address: str, ours: str) -> None:
    """Somebody else in the process uses the engine, and did so before us."""
    import mooncake.store

    theirs = mooncake.store.MooncakeDistributedStore()
    KEPT.append(theirs)
    assert theirs.setup("127.0.0.1", "P2PHANDSHAKE", 32 * MB, 16 * MB, "tcp", "", address) == 0
    key = "theirs" + theirs.get_hostname()
    assert theirs.put(key, b"v") == 0
    store = opened(address)
    assert theirs.get(key) == b"v"
    assert asyncio.run(store.get(key)) == b"v"
    if ours == "close":
        asyncio.run(store.aclose())
    assert theirs.get(key) == b"v"
    assert theirs.put(key + "2", b"v") == 0
    assert theirs.get(key + "2") == b"v"


def leave_adopted(address: str) -> None:
    import mooncake.store

    native = mooncake.store.MooncakeDistributedStore()
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 32 * MB, 16 * MB, "tcp", "", address) == 0
    store = aiomooncake.adopt(native)
    KEPT.append(store)
    asyncio.run(store.warmup())
    # The engine's exit handler is armed here, for its owner, and would crash in a child.
    assert wait_for_child(lambda: None) == 0


# --- fork -------------------------------------------------------------------------------------


def wait_for_child(act: Callable[[], object]) -> int:
    """Fork; the child acts and leaves as an interpreter does. Its status, for the parent."""
    pid = os.fork()
    if pid == 0:
        act()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    return status


def refused(call: Callable[[], object]) -> None:
    began = time.monotonic()
    try:
        call()
    except ForkedProcessError:
        assert time.monotonic() - began < 1, "it was not refused at once"
    else:
        raise AssertionError("a forked child was let in")


def fork_idle(address: str) -> None:
    store = opened(address)
    asyncio.run(store.put("fork" + store.hostname, b"v"))

    async def ask() -> None:
        await store.engine.is_exist("k")

    def use() -> None:
        refused(lambda: asyncio.run(store.get("k")))
        refused(lambda: asyncio.run(store.put("k", b"v")))
        refused(lambda: asyncio.run(store.warmup()))
        refused(lambda: asyncio.run(ask()))
        refused(lambda: store.blocking.is_exist("k"))
        refused(lambda: opened(address))
        assert store.health().state == "forked"
        assert store.closed
        assert store.stats().in_flight == 0
        asyncio.run(store.aclose())

    def drop() -> None:
        nonlocal store
        KEPT.clear()
        del store
        gc.collect()

    assert wait_for_child(lambda: None) == 0
    assert wait_for_child(use) == 0
    assert wait_for_child(drop) == 0
    assert asyncio.run(store.get("fork" + store.hostname)) == b"v"
    asyncio.run(store.aclose())
    # The engine hangs in a child also when the parent has closed its store.
    assert wait_for_child(lambda: refused(lambda: opened(address))) == 0


def fork_under_calls(address: str) -> None:
    """Fork while threads are inside the engine and hold our locks."""
    store = opened(address)
    key = "fork" + store.hostname
    over = threading.Event()
    asyncio.run(store.put(key, b"v" * 4096))

    def work() -> None:
        while not over.is_set():
            store.blocking.get_size(key)

    async def read() -> None:
        while not over.is_set():
            await asyncio.gather(*(store.get(key) for _ in range(20)))

    def look() -> None:
        refused(lambda: store.blocking.is_exist("k"))
        assert store.stats().in_flight == 0
        asyncio.run(store.aclose())

    threads = [*start_daemons(4, work), *start_daemons(1, lambda: asyncio.run(read()))]
    for _ in range(20):
        assert wait_for_child(look) == 0
    over.set()
    for thread in threads:
        thread.join()


def fork_in_a_loop(address: str) -> None:
    """The child leaves as multiprocessing's do: its loop shares file descriptors with ours."""
    store = opened(address)
    key = "loop" + store.hostname

    async def main() -> None:
        await store.put(key, b"v" * 4096)
        for _ in range(20):
            calls = [asyncio.ensure_future(store.get(key)) for _ in range(50)]
            await asyncio.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                refused(lambda: store.blocking.is_exist("k"))
                assert store.stats().in_flight == 0
                os._exit(0)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0, status
            assert await asyncio.gather(*calls) == [b"v" * 4096] * 50
        await store.aclose()

    asyncio.run(main())


def fork_while_closing(address: str) -> None:
    store = opened(address)

    async def main() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(store.aclose(), 0.01)

    asyncio.run(main())
    assert wait_for_child(lambda: None) == 0
    assert wait_for_child(lambda: asyncio.run(store.aclose())) == 0
    asyncio.run(store.aclose())


def fork_after_import(address: str) -> None:
    """A parent that only imported may fork: the child opens a store and leaves it unclosed."""
    key = f"child{os.getpid()}"

    def connect_in_child() -> None:
        store = opened(address)
        asyncio.run(store.put(key, b"v"))
        assert asyncio.run(store.get(key)) == b"v"

    assert wait_for_child(connect_in_child) == 0
    store = opened(address)  # and the parent can open its own afterwards
    asyncio.run(store.exists(key))


def use_in_worker(address: str) -> bytes | None:
    async def main() -> bytes | None:
        async with await open_store(address) as store:
            await store.put("worker" + store.hostname, b"v")
            return await store.get("worker" + store.hostname)

    return asyncio.run(main())


def refuse_in_worker(address: str) -> str:
    try:
        opened(address)
    except ForkedProcessError:
        return "refused"
    return "let in"


def multiprocess(address: str) -> None:
    opened(address)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(use_in_worker, [address]) == b"v"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(refuse_in_worker, [address]) == "refused"


def leave_by_second_interrupt(master: str) -> None:
    """With calls in flight, and a second Ctrl-C while the exit waits for them.

    It left the exit's hook before the process was made safe: ``terminate called recursively``.
    """
    cluster = start_cluster()
    store = opened(cluster.address, rpc_timeout=20)
    cluster.blocking.pause()
    start_daemons(4, lambda: store.blocking.is_exist("k"))
    while store.stats().in_flight < 4:
        time.sleep(0.001)
    assert cluster.pid is not None
    if master == "thaw":
        Thaw(cluster.pid)

    def interrupt() -> None:
        while store.health().state != "closing":
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()

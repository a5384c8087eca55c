"""Scenes of :mod:`test_workers`: worker processes of several kinds, and what a fork inherits."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from aiomooncake import Store, connect
from tests.adversity.exit_scenes import opened, refuse_in_worker, refused, use_in_worker
from tests.adversity.shutdown_scenes import free_port

Connection = Any


def start_methods(address: str) -> None:
    """Use stores in workers of every kind, before the parent has opened one."""
    for method in ("forkserver", "spawn", "fork"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            assert list(executor.map(use_in_worker, [address] * 2)) == [b"v"] * 2, method


def start_methods_of_an_open_parent(address: str) -> None:
    """Use stores in workers, beside the open one of the parent."""
    store = opened(address)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as executor:
        assert executor.submit(use_in_worker, address).result() == b"v"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
        assert executor.submit(refuse_in_worker, address).result() == "refused"
    asyncio.run(store.put("after" + store.hostname, b"v"))
    asyncio.run(store.aclose())
    # The engine hangs in a child also when the parent has closed its store.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(refuse_in_worker, [address]) == "refused"


def _leave(how: str, connection: Connection, address: str) -> None:
    """Leave a worker with an open store, as workers do."""
    store = opened(address)
    connection.send(store.hostname)
    if how == "killed":
        connection.recv()
    elif how == "error":
        raise SystemExit(3)


def ends_of_workers(address: str) -> None:
    """End workers that hold an open store: they return, fail, or are told to end."""
    for method in ("fork", "spawn"):
        context: Any = multiprocessing.get_context(method)
        for how, code in (("returns", 0), ("error", 3), ("killed", -15)):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_leave, args=(how, theirs, address))
            worker.start()
            assert ours.recv()
            if how == "killed":
                worker.terminate()
            worker.join(10)
            assert worker.exitcode == code, (method, how, worker.exitcode)


def daemons_of_a_parent_that_opens_later(address: str) -> None:
    """Fork first, open afterwards: a pre-fork server whose master process uses a store too."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        for _ in range(2):
            theirs.recv()
            theirs.send(use_in_worker(address))

    worker = context.Process(target=work, daemon=True)
    worker.start()
    ours.send("before")
    assert ours.recv() == b"v"
    store = opened(address)
    ours.send("after")
    assert ours.recv() == b"v"
    asyncio.run(store.exists("k"))
    worker.join(10)
    assert worker.exitcode == 0


def fork_of_a_fork(address: str) -> None:
    """A grandchild is refused as the child is."""
    opened(address)

    def forked(act: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            act()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    def open_one() -> None:
        refused(lambda: opened(address))

    forked(lambda: forked(open_one))


def fork_of_a_store_in_memory(_address: str) -> None:
    """Its threads do not exist in the child, where a call once waited for them for ever."""

    async def used() -> Store:
        store = await connect("memory://fork")
        await store.put("k", b"v")
        return store

    store = asyncio.run(used())
    pid = os.fork()
    if pid == 0:
        refused(lambda: asyncio.run(store.get("k")))
        assert asyncio.run(used()).health().ok  # this engine opens anew in a child
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    asyncio.run(store.aclose())


# --- gunicorn -----------------------------------------------------------------------------------


def serve_by_gunicorn(address: str, app: str, worker_class: str, answer: str) -> None:
    """Serve with two workers that are forked after the application was loaded."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers=2", "--timeout=20"]
    command += [f"--bind=127.0.0.1:{port}", f"--worker-class={worker_class}"]
    command += ["--log-level=warning", f"tests.adversity.gunicorn_apps:{app}"]
    with tempfile.TemporaryDirectory() as home:  # newer ones leave a socket there
        environ = {**os.environ, "MOONCAKE_MASTER": address, "HOME": home}
        with subprocess.Popen(command, env=environ, cwd=home) as server:
            try:
                workers: set[str] = set()
                deadline = time.monotonic() + 20
                while len(workers) < 2:
                    assert time.monotonic() < deadline, f"only {workers} answered"
                    pid, got = ask(port).split(" ", 1)
                    workers.add(pid)
                    for line in got.splitlines():
                        assert answer in line, got
            finally:
                server.terminate()
                print("ended with", server.wait(15), flush=True)


def ask(port: int) -> str:
    deadline = time.monotonic() + 15
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
                body: bytes = response.read()
                return body.decode()
        except urllib.error.URLError:  # it does not listen yet
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.02)

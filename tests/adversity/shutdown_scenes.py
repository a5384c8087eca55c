"""Scenes of :mod:`test_shutdown`: programs that are told to end while calls are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio

import aiomooncake
from aiomooncake import MooncakeError, Store
from aiomooncake.opening import Opening

KEY = "key"
REQUESTS = 20
RPC_TIMEOUT = 1.0  # seconds that a call on a frozen master takes
MB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What happens to a program: as text, since scenes get their arguments so.

    Attributes:
        address: The master's.
        pid: The master's.
        master: What becomes of it: ``healthy``, ``frozen`` or ``dead``.
        signal: The name of what the program gets.
        times: How often it gets that; an impatient user sends it again.
    """

    address: str
    pid: int
    master: str
    signal: str
    times: int = 1

    @classmethod
    def read(cls, text: str) -> Plan:
        address, pid, master, name, times = text.split()
        return cls(address, int(pid), master, name, int(times))

    def __str__(self) -> str:
        return f"{self.address} {self.pid} {self.master} {self.signal} {self.times}"


class Director(threading.Thread):
    """Brings calls into flight, breaks the master, and tells this process to end.

    Args:
        plan: What is to happen.
        store: The store that the calls are made with.
        port: Where requests are sent to; 0 for a program that makes its calls itself.
    """

    def __init__(self, plan: Plan, store: Store, port: int = 0) -> None:
        super().__init__(daemon=True)
        self._plan = plan
        self._store = store
        self._port = port

    def run(self) -> None:
        try:
            self._direct()
        except BaseException:  # noqa: BLE001  # nobody else would end this program
            traceback.print_exc()
            os._exit(70)

    def _direct(self) -> None:
        self._request()
        self._wait_for_calls()
        if self._plan.master != "healthy":
            frozen = self._plan.master == "frozen"
            os.kill(self._plan.pid, signal.SIGSTOP if frozen else signal.SIGKILL)
        self._request()
        self._wait_for_calls()
        for _ in range(self._plan.times):
            os.kill(os.getpid(), signal.Signals[self._plan.signal])
            time.sleep(0.3)

    def _wait_for_calls(self) -> None:
        # On a busy machine the outage may be known by now, and calls end before they begin.
        while not self._store.stats().in_flight and self._store.health().state == "ready":
            time.sleep(0.0005)

    def _request(self) -> None:
        for _ in range(REQUESTS if self._port else 0):
            connection = self._connect()
            connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            connection.detach()  # nobody reads the answer, nor hangs up

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + 10
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the server did not listen"
                time.sleep(0.005)


def connected(plan: Plan) -> Opening[Store]:
    sizes: dict[str, Any] = {"global_segment_size": 64 * MB, "local_buffer_size": 16 * MB}
    return aiomooncake.connect(plan.address, rpc_timeout=RPC_TIMEOUT, **sizes)


async def busy(store: Store) -> None:
    """Make calls of several kinds, one after the other, for as long as it is not cancelled."""
    value = bytearray(12 * MB)
    while True:
        with contextlib.suppress(MooncakeError):
            await store.get(KEY)
            await store.put("large", value)  # which a cancellation waits for
            await store.remove("large", force=True)
        await asyncio.sleep(0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# --- programs -----------------------------------------------------------------------------------


def run_asyncio(text: str) -> None:
    run_program(text, asyncio.run)


def run_uvloop(text: str) -> None:
    import uvloop

    run_program(text, uvloop.run)


def run_program(text: str, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Cancel the main task on SIGTERM, as asyncio does by itself on SIGINT."""
    plan = Plan.read(text)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            async with connected(plan) as store, anyio.create_task_group() as group:
                for _ in range(REQUESTS):
                    group.start_soon(busy, store)
                Director(plan, store).start()
        finally:
            print("closed", flush=True)

    with contextlib.suppress(asyncio.CancelledError):
        run(main())


def serve_aiohttp(text: str) -> None:
    from aiohttp import web

    plan, port = Plan.read(text), free_port()
    key = web.AppKey("store", Store)

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with connected(plan) as store:
            app[key] = store
            Director(plan, store, port).start()
            yield
        print("closed", flush=True)

    async def answer(request: web.Request) -> web.Response:
        await busy(request.app[key])
        return web.Response()

    app = web.Application()
    app.cleanup_ctx.append(opened)
    app.router.add_get("/", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, shutdown_timeout=1)


def serve_uvicorn(text: str) -> None:
    import uvicorn

    plan, port = Plan.read(text), free_port()
    stores: list[Store] = []

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] != "lifespan":
            await busy(stores[0])
            return
        await receive()
        async with connected(plan) as store:
            stores.append(store)
            Director(plan, store, port).start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        print("closed", flush=True)
        await send({"type": "lifespan.shutdown.complete"})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)

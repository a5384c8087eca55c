"""Applications that gunicorn serves in :mod:`test_workers`: opened after the fork, or before it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from aiohttp import web

import aiomooncake
from aiomooncake import ForkedProcessError, Store

SIZES: dict[str, Any] = {"global_segment_size": "32mb", "local_buffer_size": "16mb"}
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


async def connected() -> Store:
    """Connect to the master that the environment names."""
    return await aiomooncake.connect(**SIZES)


def answering(answer: Callable[[], str]) -> WsgiApp:
    def app(_: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = f"{os.getpid()} {answer()}".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    return app


def opened_in_the_worker() -> WsgiApp:
    """Open a store with the first request; what a server with threads does."""
    opened: list[Store] = []

    def answer() -> str:
        if not opened:
            opened.append(asyncio.run(connected()))
        store = opened[0]
        key = f"gunicorn{os.getpid()}"
        assert store.blocking.put(key, b"value") == 0
        return str(store.blocking.get_size(key))

    return answering(answer)


def opened_before_the_fork() -> WsgiApp:
    """Open a store while gunicorn loads the application, with ``preload_app``."""
    store = asyncio.run(connected())

    def refusal(call: Callable[[], object]) -> str:
        try:
            call()
        except ForkedProcessError as exc:
            return str(exc)
        return "let in"

    def answer() -> str:
        return "\n".join(
            (
                refusal(lambda: asyncio.run(store.get("k"))),
                refusal(lambda: store.blocking.get_size("k")),
                refusal(lambda: asyncio.run(connected())),
            )
        )

    return answering(answer)


def opened_by_aiohttp() -> web.Application:
    """Open a store when the worker's loop runs, and close it when it ends."""
    key = web.AppKey("store", Store)

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with aiomooncake.connect(**SIZES) as store:
            app[key] = store
            yield
        print("closed", flush=True)

    async def answer(request: web.Request) -> web.Response:
        store = request.app[key]
        await store.put(f"gunicorn{os.getpid()}", b"value")
        value = await store.get(f"gunicorn{os.getpid()}")
        return web.Response(text=f"{os.getpid()} {len(value or b'')}")

    app = web.Application()
    app.cleanup_ctx.append(opened)
    app.router.add_get("/", answer)
    return app

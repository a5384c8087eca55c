"""The gateway as a program that tells how it is: ``python -m tests.gateway.served OPTIONS``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from aiohttp import web

from aiomooncake.aiohttp import STORE
from aiomooncake.gateway import make_app
from aiomooncake.testing import LoopStallProbe


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)


class Told:
    """Answers ``/told``: what there is in this process, and what was seen since the last time."""

    def __init__(self, app: web.Application) -> None:
        self._service = app[STORE]
        self._probe = LoopStallProbe()
        self._resident = 0

    async def run(self, _app: web.Application) -> Any:
        await self._probe.__aenter__()
        yield
        await self._probe.__aexit__(None, None, None)

    async def tell(self, _request: web.Request) -> web.Response:
        gc.collect()
        stats = self._service.store.stats()
        await self._probe.__aexit__(None, None, None)
        told = {
            "stall": self._probe.longest,
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "descriptors": _descriptors(),
            "resident": _status("VmRSS"),
            "peak": _status("VmHWM"),
            "in_flight": stats.in_flight,
            "abandoned": stats.abandoned,
        }
        _reset_peak()
        self._probe = LoopStallProbe()
        await self._probe.__aenter__()
        return web.json_response(told)


async def main() -> None:
    app = make_app(**json.loads(sys.argv[1]))
    told = Told(app)
    app.cleanup_ctx.append(told.run)
    app.router.add_get("/told", told.tell)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    await done.wait()
    await runner.cleanup()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
    os._exit(0)

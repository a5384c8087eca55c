"""The wheel's own REST server, kept to loopback: ``python -m tests.gateway.peer PORT``."""

from __future__ import annotations

import sys
from typing import Any

from aiohttp import web
from mooncake import mooncake_store_service


class LoopbackSite(web.TCPSite):
    __slots__ = ()

    def __init__(self, runner: Any, host: str | None = None, port: int | None = None) -> None:
        super().__init__(runner, "127.0.0.1", port)


if __name__ == "__main__":
    web.TCPSite = LoopbackSite  # type: ignore[assignment, misc]
    sys.argv[1:] = ["--port", sys.argv[1], "--max-wait-time", "20"]
    mooncake_store_service.sync_main()

"""What the tests of the gateway start, and how they ask it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

__all__ = ["MB", "READY_WITHIN", "Client", "Program", "Reply", "environment"]

ROOT = Path(__file__).parents[2]
MB = 1 << 20
READY_WITHIN = 30.0


def environment(**more: str) -> dict[str, str]:
    """What a gateway is started with: nothing that would lead it elsewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "AIOMOONCAKE_"))}
    return kept | {"MC_LOG_LEVEL": "ERROR"} | more


class Program:
    """A server that was started, and ends with the test that started it."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = ""

    def read_url(self) -> str:
        """Wait until it says where it listens."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://" in line:
                self.url = line.split()[-1]
                return self.url
        raise AssertionError(f"it ended with {self.process.wait()}")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def seen(self) -> tuple[int, str, bytes]:
        """All that a client of the API looks at."""
        return self.status, self.headers.get("Content-Type"), self.body


class Client:
    """Requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send a request as it stands; a body that is no bytes goes as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        data = None if raw is None else io.BytesIO(raw)  # aiohttp warns of large bytes
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=data, headers=headers) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def put(self, key: str, value: str) -> Reply:
        return await self.ask("PUT", "/api/put", {"key": key, "value": value})

    async def get(self, key: str) -> Reply:
        return await self.ask("GET", f"/api/get/{key}")

    async def told(self) -> dict[str, Any]:
        told: dict[str, Any] = (await self.ask("GET", "/told")).json
        return told

    async def told_when(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask how it is until that is so."""
        reply = await self.until_reply("/told", lambda reply: good(reply.json))
        told: dict[str, Any] = reply.json
        return told

    async def until(self, path: str, status: int, within: float = READY_WITHIN) -> Reply:
        """Ask again and again until this status comes."""
        return await self.until_reply(path, lambda reply: reply.status == status, within)

    async def until_reply(
        self, path: str, good: Callable[[Reply], bool], within: float = READY_WITHIN
    ) -> Reply:
        """Ask again and again until such a reply comes."""
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                reply = await self.ask("GET", path)
                if good(reply):
                    return reply
                assert time.monotonic() < deadline, reply
            assert time.monotonic() < deadline, f"{self.url}{path} does not answer"
            await asyncio.sleep(0.02)

"""What the tests of the services share: connections that a client of aiohttp does not show."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from tests.gateway.clients import Client, Program

__all__ = ["Reading", "refuses"]


class Reading:
    """A GET that has arrived at a service, and is not answered yet."""

    def __init__(self, answer: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answer = answer
        self._writer = writer

    @classmethod
    async def begin(cls, client: Client, path: str) -> Reading:
        """Send it, and wait until a request on a connection that was opened later is answered."""
        reading = await cls._send(client, path)
        assert (await (await cls._send(client, "/healthz")).end())[0] == 200
        return reading

    @classmethod
    async def _send(cls, client: Client, path: str) -> Reading:
        url = urlsplit(client.url)
        answer, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return cls(answer, writer)

    @property
    def answered(self) -> bool:
        """Tell whether its connection was ended."""
        return self._answer.at_eof()

    async def end(self) -> tuple[int, bytes]:
        """Wait for the status and the body."""
        head, _, body = (await self._answer.read()).partition(b"\r\n\r\n")
        self._writer.close()
        return int(head.split()[1]), body


async def refuses(program: Program) -> None:
    """Wait until a service takes no new connection."""
    url = urlsplit(program.url)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(url.hostname, url.port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.02)
    raise AssertionError("it still takes connections")

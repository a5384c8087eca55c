"""What the tests of warm-up, diagnosis and master share.

A scripted store, a master's HTTP answers, and a port that accepts and says nothing (as a frozen
process does).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiomooncake.config import StoreConfig
from aiomooncake.errors import MooncakeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

HANG = object()
"""A scripted answer that never comes."""


class FakeEngine:
    """The mirror of an engine that keeps values in a dict and answers by a script where it has one.

    Args:
        script: Answers by method, each used once; an exception is raised, ``HANG`` hangs, and
            ``NORMAL`` or the end of the list is the normal answer.
    """

    NORMAL = object()

    def __init__(self, **script: Iterable[Any]) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.keys: list[str] = []
        self.script = {method: iter(answers) for method, answers in script.items()}
        self.hanging = asyncio.Event()
        self.released = asyncio.Event()

    async def put(self, key: str, value: bytes) -> Any:
        self.keys.append(key)
        return await self._answer("put", lambda: self._store(key, value))

    async def is_exist(self, key: str) -> Any:
        return await self._answer("is_exist", lambda: int(key in self.values))

    async def get(self, key: str) -> Any:
        return await self._answer("get", lambda: self.values.get(key, b""))

    async def remove(self, key: str, force: bool = False) -> Any:
        assert force
        return await self._answer("remove", lambda: 0 if self.values.pop(key, None) else -704)

    async def register_buffer(self, address: int, size: int) -> Any:
        return await self._answer("register_buffer", lambda: 0)

    async def unregister_buffer(self, address: int) -> Any:
        return await self._answer("unregister_buffer", lambda: 0)

    async def put_from(self, key: str, address: int, size: int) -> Any:
        self.keys.append(key)
        return await self._drained(
            "put_from", lambda: self._store(key, ctypes.string_at(address, size))
        )

    async def get_into(self, key: str, address: int, size: int) -> Any:
        def read() -> int:
            value = self.values.get(key, b"")
            ctypes.memmove(address, value, len(value))
            return len(value) or -704

        return await self._drained("get_into", read)

    def _store(self, key: str, value: bytes) -> int:
        self.values[key] = value
        return 0

    async def _answer(self, method: str, normal: Callable[[], Any]) -> Any:
        self.calls.append(method)
        await asyncio.sleep(0)
        answer = next(self.script.get(method, iter(())), self.NORMAL)
        if answer is HANG:
            self.hanging.set()
            await self.released.wait()
            return -800
        if isinstance(answer, Exception):
            raise answer
        return normal() if answer is self.NORMAL else answer

    async def _drained(self, method: str, normal: Callable[[], Any]) -> Any:
        """Do as the mirror does with calls that name memory: a cancellation waits for their end."""
        call = asyncio.ensure_future(self._answer(method, normal))
        cancelled = False
        while not call.done():
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return call.result()


class FakeTarget:
    """A store with a fake engine."""

    def __init__(
        self,
        engine: Any = None,
        *,
        rank: int | str | None = 3,
        config: StoreConfig | None = None,
        **overrides: Any,
    ) -> None:
        self.engine = FakeEngine() if engine is None else engine
        self.rank = rank
        self.discarded: list[str] = []
        self.hostname = "10.0.0.9:12345"
        self.config: StoreConfig | None = config or StoreConfig(
            "memory://tests", **{"local_buffer_size": 1 << 20, **overrides}
        )

    def discard(self, key: str) -> None:
        self.discarded.append(key)

    @contextlib.asynccontextmanager
    async def allocate(self, nbytes: int) -> AsyncIterator[Any]:
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = await self.engine.register_buffer(address, nbytes)
        if code != 0:
            raise MooncakeError("registering memory failed", code=code)
        try:
            yield SimpleNamespace(address=address, view=memoryview(memory))
        finally:
            await self.engine.unregister_buffer(address)


def free_port() -> int:
    """Return a port of loopback on which nobody listens."""
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Listen without ever accepting: the kernel takes connections, as for a frozen process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@contextlib.asynccontextmanager
async def closing_port() -> AsyncIterator[int]:
    """Accept and hang up at once, as a proxy does with nothing behind it."""

    def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


class HttpMaster:
    """A server on loopback that gives canned answers: a master's HTTP port, or any living port.

    Args:
        answers: By path: an object to send as JSON, a status and a body, or raw bytes.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers
        self.port = 0

    async def __aenter__(self) -> HttpMaster:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer(head.split()[1].decode()))
            await writer.drain()
        writer.close()

    def _answer(self, path: str) -> bytes:
        answer = self._answers.get(path, (404, b"404 Not Found"))
        if isinstance(answer, bytes):
            return answer
        status, body = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode())
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)

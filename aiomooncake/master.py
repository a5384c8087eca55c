"""Ask the master from asyncio, without the engine: is it there, does it serve, what is mounted.

Everything here goes over anyio's TCP streams, so a master that is down, frozen or unheard of costs
its time limit and nothing else: no thread waits and the loop goes on.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import string
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from anyio.abc import SocketStream

__all__ = [
    "Segment",
    "failure_reason",
    "http_get",
    "master_health",
    "probe_alive",
    "probe_tcp",
    "segments",
]

_T = TypeVar("_T")

_MAX_PORT: Final = 65535

_PROXY_TIME: Final = 0.05

MAX_ANSWER: Final = 16 * 1024 * 1024
"""Bytes of one HTTP answer that are read at most; a segment takes about 430 of them."""

MAX_HEALTH: Final = 64 * 1024
"""The same for ``/health``, which has about 200 of them."""

# The loop waits while an answer is taken apart; these keep it to some ms. A proxy's chunks are of
# 4 KB and more.
_MAX_HEAD: Final = 64 * 1024
_MAX_CHUNKS: Final = 4 * 1024
_MAX_CHUNK_LINE: Final = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory that some client has mounted, as the master lists it.

    Attributes:
        name: The segment's name: the client's ``local_hostname`` with its port.
        endpoint: Where that client's transfer engine listens (``te_endpoint``), ``host:port``.
        capacity: Bytes that the master hands out from it.
        used: Bytes of these that are taken.
        status: The master's word for its state; only ``OK`` takes new objects.
        protocol: The transport, such as ``tcp`` or ``rdma``.
    """

    name: str
    endpoint: str
    capacity: int
    used: int
    status: str
    protocol: str

    @property
    def free(self) -> int:
        """Bytes left in it."""
        return max(0, self.capacity - self.used)


async def probe_tcp(host: str, port: int, timeout: float) -> None:
    """Connect to ``host:port`` and hang up.

    Args:
        host: A name or an address.
        port: The TCP port.
        timeout: Seconds for the name look-up and the connection together.

    Raises:
        OSError: The name is unknown or nothing accepts there.
        TimeoutError: There was no answer in time.
    """
    await _with_stream(host, port, timeout, _hang_up)


async def probe_alive(
    host: str, port: int, timeout: float, *, proxy_time: float = _PROXY_TIME
) -> None:
    """Connect, wait a moment, say that nothing will follow, and wait for the other side to hang up.

    The kernel accepts connections for a process that is frozen, so ``probe_tcp`` can't tell. A
    server that runs reads the end of the stream and closes: both of the master's ports and the
    transfer engine's listener do within 3 ms, and none of them does after a SIGSTOP (measured with
    0.3.13.post1). A proxy with nothing behind it accepts as well, but hangs up by itself.

    Args:
        host: A name or an address.
        port: The TCP port.
        timeout: Seconds for everything.
        proxy_time: Seconds within which a proxy hangs up that finds nobody behind it.

    Raises:
        OSError: The name is unknown, nothing accepts there, or who does hangs up at once.
        TimeoutError: Nobody accepted in time, or the one who did said nothing.
    """
    await _with_stream(host, port, timeout, partial(_wait_for_end, proxy_time=proxy_time))


async def http_get(
    host: str, port: int, path: str, timeout: float, *, most: int = MAX_ANSWER
) -> tuple[int, bytes]:
    """Fetch one path over HTTP and return the status and the body.

    Args:
        host: A name or an address, IPv6 without brackets.
        port: The TCP port.
        path: Path and query, starting with a slash; what is no printable ASCII is quoted.
        timeout: Seconds for everything.
        most: Bytes that the answer may have with its head.

    Raises:
        OSError: It can't be reached, the answer is longer than ``most``, is in more than 4096
            chunks, or isn't HTTP.
        TimeoutError: There was no full answer in time.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    quoted = quote(path, safe=string.punctuation)
    request = (
        f"GET {quoted} HTTP/1.1\r\nHost: {where}\r\nAccept: */*\r\n"
        "User-Agent: aiomooncake\r\nConnection: close\r\n\r\n"
    )

    async def ask(stream: SocketStream) -> bytes:
        await stream.send(request.encode("ascii"))
        return await _read_to_end(stream, most)

    answer = await _with_stream(host, port, timeout, ask)
    try:
        return _status_and_body(answer)
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(
            f"{where} did not answer GET {path} in HTTP ({type(error).__name__})"
        ) from error


async def master_health(host: str, metrics_port: int, timeout: float) -> Mapping[str, Any] | None:
    """Return the master's own word on its health, or None when none could be had.

    The key that counts is ``service_ready``; a standby answers too, and with False.

    Args:
        host: The master's host.
        metrics_port: Its ``--metrics_port``.
        timeout: Seconds.
    """
    try:
        status, body = await http_get(host, metrics_port, "/health", timeout, most=MAX_HEALTH)
        answer = json.loads(body) if status == http.client.OK else None
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


async def segments(host: str, metrics_port: int, timeout: float) -> tuple[Segment, ...]:
    """List the segments that are mounted on the master, from its ``/get_segments_detail``.

    Args:
        host: The master's host.
        metrics_port: Its ``--metrics_port``.
        timeout: Seconds.

    Raises:
        OSError: It can't be reached or its answer has another form (a master that does not serve
            yet, or one too old for this question).
        TimeoutError: There was no full answer in time.
    """
    path = "/get_segments_detail"
    status, body = await http_get(host, metrics_port, path, timeout)
    if status != http.client.OK:
        raise ConnectionError(f"the master answered GET {path} with HTTP status {status}")
    try:
        return tuple(_segment(item) for item in json.loads(body)["segments"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConnectionError(f"the master's answer to GET {path} has an unknown form") from error


def failure_reason(error: BaseException) -> str:
    """Say in a few words why a connection failed.

    anyio reports "All connection attempts failed" and keeps the true reason in the cause, one or a
    group of them.
    """
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    cause = error.__cause__
    causes = [one for one in getattr(cause, "exceptions", (cause,)) if isinstance(one, OSError)]
    if causes:
        return "; ".join(dict.fromkeys(failure_reason(one) for one in causes))
    if isinstance(error, OSError) and error.errno is not None:
        # asyncio's own text repeats the address ("Connect call failed ('127.0.0.1', 1)") and leaves
        # the reason out; look-up errors have negative numbers, unknown to strerror.
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return str(error) or type(error).__name__


class _Answer:
    """Bytes that were received already, as the socket that ``http.client`` wants to read from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


async def _with_stream(
    host: str, port: int, timeout: float, use: Callable[[SocketStream], Awaitable[_T]]
) -> _T:
    """Connect, run ``use`` on the stream and close it, all within ``timeout`` seconds."""
    if not 0 < port <= _MAX_PORT:
        raise OSError(f"{port} is no TCP port")
    try:
        with anyio.fail_after(timeout):
            async with await anyio.connect_tcp(host, port) as stream:
                return await use(stream)
    except (anyio.BrokenResourceError, anyio.EndOfStream) as error:
        raise ConnectionResetError(f"{host}:{port} hung up") from error
    except UnicodeError as error:
        # What the look-up makes of names that can't exist, such as one of 70 letters without a dot.
        raise OSError(f"{host} is no host name ({error})") from error


async def _hang_up(_stream: SocketStream) -> None:
    """Do nothing with the connection."""


async def _wait_for_end(stream: SocketStream, *, proxy_time: float) -> None:
    """Half-close the connection and read until the other side closes its half."""
    with anyio.move_on_after(proxy_time):
        try:
            await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise ConnectionResetError("it accepts connections and hangs up at once") from error
    try:
        await stream.send_eof()
        while True:
            await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
        # A reset is an answer too: whoever sent it runs. A kernel sends none for a frozen process.
        return


async def _read_to_end(stream: SocketStream, most: int) -> bytes:
    """Read all that comes, and refuse to read more than ``most`` bytes."""
    data = bytearray()
    while True:
        try:
            data += await stream.receive()
        except anyio.EndOfStream:
            return bytes(data)
        if len(data) > most:
            raise ConnectionError(f"the answer is longer than {most} bytes")


def _status_and_body(answer: bytes) -> tuple[int, bytes]:
    """Take a whole answer apart.

    ``http.client`` reads the head only: it takes 3 s for 16 MB of chunks of one byte.
    """
    head, end_of_head, _ = answer[:_MAX_HEAD].partition(b"\r\n\r\n")
    head += end_of_head
    response = http.client.HTTPResponse(_Answer(head))  # type: ignore[arg-type]  # duck-typed socket
    response.begin()
    if not end_of_head:
        raise http.client.IncompleteRead(head)
    start = len(head)
    if response.chunked:
        return response.status, _joined(answer, start)
    if response.length is None:
        return response.status, answer[start:]
    end = start + response.length
    if end > len(answer):
        raise http.client.IncompleteRead(answer[start:], end - len(answer))
    return response.status, answer[start:end]


def _joined(answer: bytes, at: int) -> bytes:
    """Put the chunks together that follow in an answer; what comes after the last is left out."""
    data = memoryview(answer)
    chunks: list[memoryview] = []
    for _ in range(_MAX_CHUNKS + 1):
        line_end = answer.find(b"\r\n", at, at + _MAX_CHUNK_LINE)
        size = int(answer[at : max(at, line_end)].partition(b";")[0], 16)
        if size == 0:
            return b"".join(chunks)
        start = line_end + 2
        at = start + size + 2
        if size < 0 or at > len(answer):
            raise http.client.IncompleteRead(b"")
        chunks.append(data[start : at - 2])
    raise ConnectionError(f"the answer is in more than {_MAX_CHUNKS} chunks")


def _segment(item: Mapping[str, Any]) -> Segment:
    """Read one entry of ``/get_segments_detail``."""
    return Segment(
        name=str(item["segment_name"]),
        endpoint=str(item["te_endpoint"]),
        capacity=int(item.get("allocator_capacity_bytes", item["size_bytes"])),
        used=int(item.get("allocator_used_bytes", 0)),
        status=str(item.get("status", "OK")),
        protocol=str(item.get("protocol", "")),
    )

"""Requests to a real master: recorded from a real client, and played back by the thousand.

A request of the engine is a header of 20 bytes (the length of the body in bytes 12–16) and a body
that holds keys and ids as plain bytes, so that a recorded one can be sent again with another key. A
client that only plays back costs a few microseconds per request: it saturates a master that
shares two cores with it, which the engine's own client can't.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

__all__ = ["Recorder", "cpu_seconds", "play", "variants", "whole"]

_HEADER: Final = 20
_BODY_LENGTH: Final = slice(12, 16)
_ANSWER: Final = 1 << 16
_PATIENCE: Final = 10.0  # seconds without any answer


class Recorder:
    """A relay on loopback in front of a master that keeps the requests of its clients."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._master = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._requests: list[bytes] = []
        self._lock = threading.Lock()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def taken(self) -> list[bytes]:
        """Return what was sent since the last time."""
        with self._lock:
            requests, self._requests = self._requests, []
        return requests

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                master = socket.create_connection(self._master)
            except OSError:
                return
            self._open += client, master
            for source, target, keep in ((client, master, self._keep), (master, client, None)):
                threading.Thread(target=_pump, args=(source, target, keep), daemon=True).start()

    def _keep(self, request: bytes) -> None:
        with self._lock:
            self._requests.append(request)


def play(
    address: str, requests: Iterator[bytes], connections: int, seconds: float
) -> tuple[int, float]:
    """Send requests as fast as they are answered, one at a time on each connection.

    Returns:
        How many were answered, and in how many seconds.
    """
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        lines = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(connections)
        ]
        for line in lines:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(line, selectors.EVENT_READ, line)
        answered = 0
        began = time.perf_counter()
        waiting = sum(_send(line, requests) for line in lines)
        while waiting:
            ready = selector.select(_PATIENCE)
            if not ready:
                raise TimeoutError(f"the master at {address} left {waiting} requests unanswered")
            over = time.perf_counter() - began > seconds
            for key, _ in ready:
                line = key.data
                if not line.recv(_ANSWER):
                    raise ConnectionError(f"the master at {address} hung up on a request")
                answered += 1
                waiting -= 1
                if not over:
                    waiting += _send(line, requests)
        return answered, time.perf_counter() - began


def variants(request: bytes, old: bytes, new: Callable[[int], bytes]) -> Iterator[bytes]:
    """Return a request again and again, each time with other bytes in one place."""
    parts = request.split(old)
    if len(parts) == 1:
        raise ValueError("the recorded request does not hold the bytes that are to be replaced")
    return (new(number).join(parts) for number in itertools.count())


def whole(requests: Sequence[bytes], holding: bytes = b"") -> list[bytes]:
    """Return the requests that came in one piece and hold certain bytes."""
    return [
        one
        for one in requests
        if len(one) >= _HEADER
        and struct.unpack("<I", one[_BODY_LENGTH])[0] == len(one) - _HEADER
        and holding in one
    ]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def _send(line: socket.socket, requests: Iterator[bytes]) -> int:
    request = next(requests, None)
    if request is None:
        return 0
    line.sendall(request)
    return 1


def _pump(
    source: socket.socket, target: socket.socket, keep: Callable[[bytes], None] | None
) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_ANSWER):
            if keep is not None:
                keep(piece)
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)

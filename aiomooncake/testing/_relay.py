"""The inside of the fault proxy: connections, and what is done to their bytes. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from aiomooncake._tasks import together

__all__ = ["Conditions", "Corruption", "Flow", "Relay", "Way"]

_CHUNK: Final = 1 << 16  # bytes of one read
_HELD: Final = 4 << 20  # bytes that one direction of a connection may hold back
_PACE: Final = 0.02  # seconds of a throttled line that go in one piece
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 s


class Flow(Enum):
    """Whether bytes get through at all."""

    OPEN = "open"
    FROZEN = "frozen"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Corruption:
    """Which bytes get a flipped bit, counted from 0 from when it was set or a connection began.

    Attributes:
        seed: Of the random numbers; the same bytes are hit whatever pieces they arrive in.
        rate: Share of the bytes.
        at: Number of the only byte; then the rate is of no account.
    """

    seed: int
    rate: float = 0.0
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is done to the bytes of one direction."""

    flow: Flow = Flow.OPEN
    delay: float = 0.0
    jitter: float = 0.0
    bytes_per_second: float = math.inf
    corruption: Corruption | None = None


class Way:
    """One direction of all connections: its conditions, and how many bytes met them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.conditions = Conditions()
        self.delivered = 0
        self.swallowed = 0
        self.corrupted = 0


class _Flips:
    """Flips bits of one direction of one connection, as a `Corruption` says."""

    def __init__(self, spec: Corruption, name: str) -> None:
        self.spec = spec
        self._numbers = random.Random(f"{spec.seed} {name}")
        self._passed = 0
        self._next = spec.at if spec.at is not None else self._gap()

    def _gap(self) -> int:
        """Draw how many bytes stay whole before the next one that does not."""
        if self.spec.rate >= 1:
            return 0
        return int(math.log(1.0 - self._numbers.random()) / math.log1p(-self.spec.rate))

    def flip(self, data: bytes) -> tuple[bytes, int]:
        """Return the bytes as they arrive, and how many of them are wrong."""
        end = self._passed + len(data)
        hurt = bytearray(data)
        count = 0
        while self._next < end:
            hurt[self._next - self._passed] ^= 1 << self._numbers.randrange(8)
            count += 1
            self._next = (
                self._next + 1 + self._gap() if self.spec.at is None else 1 << 63  # no other one
            )
        self._passed = end
        return bytes(hurt), count


@dataclass(slots=True)
class _Parcel:
    """What one read gave; no bytes are the end of the stream."""

    data: bytes
    arrived: float
    luck: float  # 0 to 1: its share of the jitter
    reset: bool = False


class _Pipe:
    """One direction of one connection."""

    def __init__(self, way: Way, source: socket.socket, sink: socket.socket, number: int) -> None:
        self.lost = False
        self._way = way
        self._source = source
        self._sink = sink
        self._name = f"{way.name} {number}"
        self._loop = asyncio.get_running_loop()
        self._numbers = random.Random(self._name)
        self._parcels: deque[_Parcel] = deque()
        self._held = 0
        self._free_at = 0.0  # when a throttled line may take the next piece
        self._flips: _Flips | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def stir(self) -> None:
        """Wake whoever waits: the conditions, or what is held back, have changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def read(self) -> None:
        """Take bytes from the source to its end."""
        ended = False
        while not ended:
            while self._held >= _HELD:
                await self._change()
            reset = False
            try:
                data = await self._loop.sock_recv(self._source, _CHUNK)
            except OSError:
                data, reset = b"", True
            self._parcels.append(_Parcel(data, self._loop.time(), self._numbers.random(), reset))
            self._held += len(data)
            self.stir()
            ended = not data

    async def deliver(self) -> None:
        """Give the sink what has come, under the conditions of the moment, to the end.

        Raises:
            OSError: The source was reset, or the sink takes nothing any more.
        """
        while True:
            while not self._parcels:
                await self._change()
            parcel = self._parcels[0]
            wait = self._wait(parcel)
            if wait > 0:
                await self._change(wait)
            elif self._way.conditions.flow is Flow.DROPPED:
                self.lost = True
                self._way.swallowed += len(parcel.data)
                self._pop()
                if not parcel.data:  # nobody hears of the end
                    await self._forever()
            elif parcel.reset:
                raise ConnectionResetError
            elif not parcel.data:
                self._sink.shutdown(socket.SHUT_WR)
                return
            else:
                await self._send(parcel)

    def _wait(self, parcel: _Parcel) -> float:
        """Return the seconds for which a parcel is held back, as things stand."""
        conditions = self._way.conditions
        if conditions.flow is Flow.DROPPED:
            return 0.0
        if conditions.flow is Flow.FROZEN:
            return math.inf
        due = parcel.arrived + conditions.delay + parcel.luck * conditions.jitter
        if conditions.bytes_per_second < math.inf:
            due = max(due, self._free_at)
        return due - self._loop.time()

    async def _send(self, parcel: _Parcel) -> None:
        conditions = self._way.conditions
        piece = parcel.data
        if conditions.bytes_per_second < math.inf:
            piece = piece[: max(1, int(conditions.bytes_per_second * _PACE))]
            began = max(self._free_at, self._loop.time())
            self._free_at = began + len(piece) / conditions.bytes_per_second
        parcel.data = parcel.data[len(piece) :]
        self._held -= len(piece)
        if not parcel.data:
            self._pop()
        sent = len(piece)
        await self._loop.sock_sendall(self._sink, self._corrupted(piece, conditions.corruption))
        self._way.delivered += sent

    def _pop(self) -> None:
        self._held -= len(self._parcels.popleft().data)
        self.stir()

    def _corrupted(self, piece: bytes, spec: Corruption | None) -> bytes:
        if spec is None:
            self._flips = None
            return piece
        if self._flips is None or self._flips.spec is not spec:
            self._flips = _Flips(spec, self._name)
        piece, count = self._flips.flip(piece)
        self._way.corrupted += count
        return piece

    async def _change(self, seconds: float = math.inf) -> None:
        """Wait until somebody stirs, ``seconds`` at the longest."""
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=None if seconds == math.inf else seconds)
        finally:
            self._waiters.discard(waiter)

    async def _forever(self) -> None:
        await self._loop.create_future()


class _Connection:
    """A client's connection and the one to the server behind it."""

    def __init__(self, number: int, client: socket.socket, family: int) -> None:
        self.task: asyncio.Task[None]
        self.reset = True  # unless it ends as connections should
        self._number = number
        self._client = client
        self._server = socket.socket(family, socket.SOCK_STREAM)
        self._pipes: tuple[_Pipe, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether bytes were swallowed, so that the streams have a gap."""
        return any(pipe.lost for pipe in self._pipes)

    def stir(self) -> None:
        """Look at the conditions again."""
        for pipe in self._pipes:
            pipe.stir()

    async def run(self, address: Any, to_server: Way, to_client: Way) -> None:
        """Relay until both directions have ended, or one of them breaks."""
        client, server = self._client, self._server
        for end in (client, server):
            end.settimeout(0)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # one side is gone: the other one gets a reset
            await asyncio.get_running_loop().sock_connect(server, address)
            up = _Pipe(to_server, client, server, self._number)
            down = _Pipe(to_client, server, client, self._number)
            self._pipes = (up, down)
            await together([up.read(), up.deliver(), down.read(), down.deliver()])
            self.reset = False

    def close(self) -> None:
        """Let both sides know; when the task is over, also one that never began."""
        for end in (self._client, self._server):
            if self.reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            end.close()


class Relay:
    """All connections of a proxy. To be used in one event loop.

    Args:
        family: Address family of the server.
        address: The server.
    """

    def __init__(self, family: int, address: Any) -> None:
        self.to_server = Way("to server")
        self.to_client = Way("to client")
        self.accepted = 0
        self._family = family
        self._address = address
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._listener is not None

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def refuse(self) -> None:
        """Accept no more connections, so that the kernel refuses them."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def stir(self) -> None:
        """Let the connections look at the conditions again."""
        for connection in self._connections:
            connection.stir()

    async def cut(self, *, reset: bool, lost_only: bool = False) -> None:
        """End the connections that there are, or only those that have lost bytes."""
        ended = [each for each in self._connections if each.lost or not lost_only]
        for connection in ended:
            connection.task.cancel()
            connection.reset = reset
        if ended:
            await asyncio.wait([connection.task for connection in ended])

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # nobody there any more; or out of descriptors, then they are asked again
            return
        self.accepted += 1
        connection = _Connection(self.accepted, client, self._family)
        self._connections.add(connection)
        connection.task = asyncio.ensure_future(
            connection.run(self._address, self.to_server, self.to_client)
        )
        connection.task.add_done_callback(lambda _: self._ended(connection))

    def _ended(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        connection.close()

"""A TCP proxy that makes trouble when a test says so."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import anyio

from aiomooncake._programs import HOST, choose_ports
from aiomooncake._server import in_worker
from aiomooncake._values import split_address
from aiomooncake.errors import ClusterError, ForkedProcessError, InvalidArgumentError
from aiomooncake.testing._relay import Conditions, Corruption, Flow, Relay, Way

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # for type checkers only, which bring it along

__all__ = ["FaultProxy", "ProxyStats", "Towards"]

Towards = Literal["server", "client", "both"]
"""In which direction a fault acts."""

_PORT_TRIES: Final = 3  # each loses the port race only to a rare neighbour


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """What has passed a proxy since it was started.

    Attributes:
        connections: Connections that it has accepted.
        open: Those of them that are open now.
        to_server: Bytes given to the server.
        to_client: Bytes given to clients.
        swallowed: Bytes that `FaultProxy.drop` has swallowed.
        corrupted: Bytes given to either side with a flipped bit.
    """

    connections: int
    open: int
    to_server: int
    to_client: int
    swallowed: int
    corrupted: int


class FaultProxy:
    """A TCP proxy on loopback, between clients and a server, that makes trouble when told to.

    ```python
    with FaultProxy(cluster.address) as proxy:
        store = await connect(proxy.address)
        proxy.freeze()
        ...
        proxy.heal()
    ```

    It runs in a thread of its own, so that it works while the test's event loop stands still or is
    closed, and in tests without one. Its verbs are plain calls from any thread, inside a loop too:
    each returns when it has taken effect, after about 0.2 ms. Faults are added to each other until
    `heal`: a slow line may be throttled and then freeze.

    Only what holds the GIL stops it as well: the engine's own ``setup()``, say, which `connect`
    avoids. Each direction of each connection holds back up to 4 MB; then the sender has to wait.
    In a forked child the object is inert.

    Args:
        target: ``"host:port"`` of the server. It need not be there yet: a connection that it
            refuses is accepted and then reset.

    Raises:
        ConfigError: ``target`` is no such address.
        InvalidArgumentError: A value that cannot be meant.
    """

    def __init__(self, target: str) -> None:
        self._target = split_address(target, field="target")
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._relay: Relay | None = None

    def __repr__(self) -> str:
        host, port = self._target
        way = f"{HOST}:{self._port} to {host}:{port}" if self._port else f"to {host}:{port}"
        return f"<FaultProxy {way} {'running' if self.running else 'not running'}>"

    @property
    def address(self) -> str:
        """``host:port`` for clients; it stays the same over all faults and restarts."""
        if not self._port:
            raise ClusterError(
                "the proxy has no address yet: enter it with 'with' or 'async with', or call "
                "proxy.start()"
            )
        return f"{HOST}:{self._port}"

    @property
    def running(self) -> bool:
        """Whether it was started and not closed."""
        return self._thread is not None

    def stats(self) -> ProxyStats:
        """Count connections and bytes since the last start; readable after `close` too."""
        relay = self._relay
        if relay is None:
            return ProxyStats(0, 0, 0, 0, 0, 0)
        ways = (relay.to_server, relay.to_client)
        return ProxyStats(
            connections=relay.accepted,
            open=relay.open,
            to_server=relay.to_server.delivered,
            to_client=relay.to_client.delivered,
            swallowed=sum(way.swallowed for way in ways),
            corrupted=sum(way.corrupted for way in ways),
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Listen and relay; nothing happens when it runs already.

        Raises:
            ClusterError: No port could be had, or the server's name can't be resolved.
        """
        self._refuse_in_child()
        with self._lock:
            if self._thread is not None:
                return
            relay = Relay(*self._resolve())
            listener = self._listener()
            begun = threading.Lock()
            begun.acquire()
            thread = threading.Thread(
                target=self._run,
                args=(relay, listener, begun),
                name="aiomooncake-fault-proxy",
                daemon=True,
            )
            try:
                thread.start()
            except BaseException:
                listener.close()
                raise
            with begun:  # it listens
                self._thread, self._relay = thread, relay

    def close(self) -> None:
        """Hang up on everybody and end the thread; nothing happens when it does not run."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            thread, loop = self._thread, self._loop
            if thread is None or loop is None:
                return
            self._thread = self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await in_worker(lambda _: self.start())
        except BaseException:
            await self.__aexit__(None, None, None)  # cancelled, it may have been started
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await in_worker(lambda _: self.close())

    # ------------------------------------------------------------------ faults

    def delay(self, seconds: float, *, jitter: float = 0.0, towards: Towards = "both") -> None:
        """Let bytes take longer, as a long line does: their order and the bandwidth stay.

        Args:
            seconds: How much longer, in each direction.
            jitter: Up to so many seconds more, drawn anew for what arrives together.
            towards: The direction.
        """
        _check("seconds", seconds, zero=True)
        _check("jitter", jitter, zero=True)
        self._set(towards, delay=seconds, jitter=jitter)

    def throttle(self, bytes_per_second: float, *, towards: Towards = "both") -> None:
        """Let no more than so many bytes per second through, for each connection."""
        _check("bytes_per_second", bytes_per_second)
        self._set(towards, bytes_per_second=bytes_per_second)

    def corrupt(
        self,
        *,
        at: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        towards: Towards = "both",
    ) -> None:
        """Flip one bit of the bytes named by ``at`` or ``rate``; give one of the two.

        The same seed flips the same bits of the same streams, whatever pieces they arrive in.

        Args:
            at: The only byte, by its number from 0, of each connection and direction; connections
                that are open already count from now on.
            rate: The share of the bytes, above 0 and up to 1.
            seed: Of the random numbers.
            towards: The direction.
        """
        if (at is None) == (rate is None):
            raise InvalidArgumentError(
                "corrupt needs either at= (the number of a byte) or rate= (a share of the bytes)"
            )
        if at is not None and at < 0:
            raise InvalidArgumentError(f"at counts bytes from 0, got {at!r}")
        if rate is not None and not 0 < rate <= 1:
            raise InvalidArgumentError(f"rate is a share of the bytes, 0 < rate <= 1, got {rate!r}")
        self._set(towards, corruption=Corruption(seed, rate or 0.0, at))

    def freeze(self, *, towards: Towards = "both") -> None:
        """Hold everything back, as a frozen process does: connections open, nothing moves.

        New connections are accepted and hang. `heal` lets go on what was held back.
        """
        self._set(towards, flow=Flow.FROZEN)

    def drop(self, *, towards: Towards = "both") -> None:
        """Swallow all bytes, and the news that a side has hung up: a half-open connection.

        What is lost stays lost, so `heal` resets the connections that it happened to.
        """
        self._set(towards, flow=Flow.DROPPED)

    def cut(self) -> None:
        """Reset the connections that there are (RST); new ones are as welcome as before.

        `freeze` after it makes the new ones hang.
        """
        self._do(lambda relay: relay.cut(reset=True))

    def hang_up(self) -> None:
        """Close the connections that there are, as a server that ends does (FIN)."""
        self._do(lambda relay: relay.cut(reset=False))

    def refuse(self) -> None:
        """Reset the connections that there are, and refuse new ones, until `heal`."""

        async def refuse(relay: Relay) -> None:
            relay.refuse()
            await relay.cut(reset=True)

        self._do(refuse)

    def heal(self) -> None:
        """Take all faults back.

        Raises:
            ClusterError: After `refuse`: somebody else has taken the port meanwhile.
        """

        async def heal(relay: Relay) -> None:
            for way in (relay.to_server, relay.to_client):
                way.conditions = Conditions()
            await relay.cut(reset=True, lost_only=True)
            relay.stir()
            if not relay.listening:
                relay.listen(self._listener())

        self._do(heal)

    # ------------------------------------------------------------------ inside

    def _set(self, towards: Towards, **changes: Any) -> None:
        """Change the conditions of one direction or both."""
        if towards not in get_args(Towards):
            raise InvalidArgumentError(
                f'towards must be "server", "client" or "both", got {towards!r}'
            )

        async def change(relay: Relay) -> None:
            ways: list[Way] = []
            if towards != "client":
                ways.append(relay.to_server)
            if towards != "server":
                ways.append(relay.to_client)
            for way in ways:
                way.conditions = replace(way.conditions, **changes)
            relay.stir()

        self._do(change)

    def _do(self, work: Callable[[Relay], Coroutine[Any, Any, None]]) -> None:
        """Do it in the proxy's thread, and wait for its end."""
        self._refuse_in_child()
        with self._lock:
            if self._loop is None or self._relay is None:
                raise ClusterError(
                    "the proxy does not run: enter it with 'with' or 'async with', or call "
                    "proxy.start() first"
                )
            done = threading.Lock()
            done.acquire()
            future = asyncio.run_coroutine_threadsafe(work(self._relay), self._loop)
            future.add_done_callback(lambda _: done.release())
            with done:
                future.result()

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._owner:
            raise ForkedProcessError(
                f"this FaultProxy belongs to process {self._owner}, and its thread does not exist "
                f"in the forked child {os.getpid()}: make a new one here"
            )

    def _resolve(self) -> tuple[int, Any]:
        host, port = self._target
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as exc:
            raise ClusterError(f"the proxy can't resolve its target {host!r}: {exc}") from None
        return family, address

    def _listener(self) -> socket.socket:
        """Listen; on a fresh port the first time."""
        for tries_left in reversed(range(1 if self._port else _PORT_TRIES)):
            port = self._port or choose_ports(1)[0]
            try:
                listener = socket.create_server((HOST, port))
            except OSError as exc:
                if not tries_left:
                    raise ClusterError(f"the proxy can't listen on {HOST}:{port}: {exc}") from None
                continue
            listener.settimeout(0)
            self._port = port
            return listener
        raise AssertionError

    def _run(self, relay: Relay, listener: socket.socket, begun: threading.Lock) -> None:
        """Serve, in the thread, until the loop is stopped."""
        # Whatever policy the tests have set: neither uvloop nor virtual time is meant here.
        loop = self._loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(_listen(relay, listener))
            begun.release()
            loop.run_forever()
            loop.run_until_complete(_end(relay))
        finally:
            loop.close()


async def _listen(relay: Relay, listener: socket.socket) -> None:
    relay.listen(listener)


async def _end(relay: Relay) -> None:
    relay.refuse()
    await relay.cut(reset=False)


def _check(name: str, value: float, *, zero: bool = False) -> None:
    if not (0 <= value < math.inf) or (value == 0 and not zero):
        least = "from 0 on" if zero else "above 0"
        raise InvalidArgumentError(f"{name} must be a number {least}, got {value!r}")

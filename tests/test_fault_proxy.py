"""The fault proxy, before a plain echo server and between the real engine and its master."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiomooncake import (
    ClusterError,
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    MooncakeError,
    RpcError,
    RpcTimeoutError,
    SetupTimeoutError,
    Store,
    connect,
)
from aiomooncake.testing import FaultProxy, LoopStallProbe
from tests.conftest import Closing, OpenStore
from tests.warmup_fakes import free_port

SOON = 5.0  # seconds for what takes milliseconds, on a busy machine


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: connections are meant to break here."""


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """Send back what comes, until the client ends."""
    with _Server(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: str) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as running:
        yield running


@pytest.fixture
def dial(proxy: FaultProxy) -> Iterator[Callable[[], socket.socket]]:
    """Connect to the proxy, as a blocking client does."""
    opened: list[socket.socket] = []

    def one() -> socket.socket:
        host, port = proxy.address.split(":")
        opened.append(socket.create_connection((host, int(port)), timeout=SOON))
        return opened[-1]

    yield one
    for client in opened:
        client.close()


def ask(client: socket.socket, question: bytes = b"hello") -> bytes:
    client.sendall(question)
    return receive(client, len(question))


def receive(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := client.recv(count - len(data))):
        data += piece
    return data


def nothing_comes(client: socket.socket, seconds: float = 0.1) -> bool:
    client.settimeout(seconds)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(SOON)
    return False


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


Dial = Callable[[], socket.socket]


# --- without faults ---------------------------------------------------------------------------


def test_bytes_go_both_ways_and_are_counted(proxy: FaultProxy, dial: Dial) -> None:
    first, second = dial(), dial()
    assert ask(first) == b"hello"
    large = os.urandom(3 << 20)
    sender = threading.Thread(target=second.sendall, args=(large,))
    sender.start()
    assert receive(second, len(large)) == large
    sender.join()
    stats = proxy.stats()
    assert (stats.connections, stats.open) == (2, 2)
    assert stats.to_server == stats.to_client == 5 + len(large)
    assert stats.swallowed == stats.corrupted == 0


def test_the_end_of_a_stream_arrives(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == b"last words"
    assert client.recv(1) == b""
    await_that(lambda: proxy.stats().open == 0)


def test_a_dead_server_resets_connections() -> None:
    with FaultProxy(f"127.0.0.1:{free_port()}") as proxy:
        host, port = proxy.address.split(":")
        with (
            pytest.raises(ConnectionResetError),  # perhaps before the client knows it is connected
            socket.create_connection((host, int(port)), timeout=SOON) as client,
        ):
            client.recv(1)


# --- slow lines -------------------------------------------------------------------------------


def test_a_delay_is_added_once_to_all_that_comes_together(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.delay(0.2)
    began = time.monotonic()
    for number in range(20):
        client.sendall(bytes([number]))
        time.sleep(0.002)
    assert receive(client, 20) == bytes(range(20))
    assert 0.4 <= time.monotonic() - began < 2.0  # not 20 times as long
    proxy.heal()
    began = time.monotonic()
    assert ask(client) == b"hello"
    assert time.monotonic() - began < 0.2


def test_a_delay_has_a_direction(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.delay(0.2, towards="client")
    began = time.monotonic()
    assert ask(client) == b"hello"
    assert time.monotonic() - began >= 0.2
    assert proxy.stats().to_server == 5


def test_jitter_comes_on_top(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.delay(0.05, jitter=0.05, towards="server")
    took = []
    for _ in range(10):
        began = time.monotonic()
        assert ask(client) == b"hello"
        took.append(time.monotonic() - began)
    assert min(took) >= 0.05
    assert max(took) - min(took) > 0.005


def test_healing_lets_what_is_late_through_at_once(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.delay(60)
    client.sendall(b"late")
    assert nothing_comes(client)
    proxy.heal()
    assert receive(client, 4) == b"late"


def test_a_throttled_line(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.throttle(100_000, towards="client")
    began = time.monotonic()
    assert ask(client, bytes(50_000)) == bytes(50_000)
    took = time.monotonic() - began
    assert 0.45 <= took < SOON
    assert proxy.stats().to_server == 50_000


# --- wrong bytes ------------------------------------------------------------------------------


def test_one_byte_arrives_wrong(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    ask(client, b"before")
    proxy.corrupt(at=2, towards="server")
    answer = ask(client, b"abcdef")
    assert answer[:2] + answer[3:] == b"abdef"
    assert (answer[2] ^ ord("c")).bit_count() == 1
    assert ask(client, b"after") == b"after"
    assert proxy.stats().corrupted == 1
    assert ask(dial(), b"abcdef") != b"abcdef"  # each connection counts for itself


def test_a_share_of_the_bytes_arrives_wrong_and_the_same_for_a_seed(echo: str) -> None:
    def run(seed: int, piece: int) -> bytes:
        with FaultProxy(echo) as proxy:
            proxy.corrupt(rate=0.02, seed=seed, towards="client")
            host, port = proxy.address.split(":")
            with socket.create_connection((host, int(port)), timeout=SOON) as client:
                answer = b"".join(ask(client, bytes(piece)) for _ in range(10_000 // piece))
            assert proxy.stats().corrupted == len(answer) - answer.count(0)
            return answer

    first = run(1, 10_000)
    assert 100 < len(first) - first.count(0) < 400
    assert run(1, 100) == first
    assert run(2, 10_000) != first


# --- outages ----------------------------------------------------------------------------------


def test_a_frozen_line_loses_nothing(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    ask(client)
    proxy.freeze()
    client.sendall(b"one")
    newcomer = dial()
    newcomer.sendall(b"two")
    assert nothing_comes(client)
    assert nothing_comes(newcomer)
    proxy.heal()
    assert receive(client, 3) == b"one"
    assert receive(newcomer, 3) == b"two"


def test_a_frozen_direction(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.freeze(towards="client")
    client.sendall(b"one")
    assert nothing_comes(client)
    await_that(lambda: proxy.stats().to_server == 3)
    proxy.heal()
    assert receive(client, 3) == b"one"


def test_a_frozen_line_holds_its_sender_back(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.freeze()
    client.settimeout(0.5)
    with pytest.raises(TimeoutError):
        client.sendall(bytes(64 << 20))


def test_a_half_open_connection(proxy: FaultProxy, dial: Dial) -> None:
    client, other = dial(), dial()
    ask(client)
    ask(other)
    proxy.drop()
    client.sendall(b"lost")
    await_that(lambda: proxy.stats().swallowed == 4)
    client.shutdown(socket.SHUT_WR)
    assert nothing_comes(client)
    assert proxy.stats().open == 2
    proxy.heal()
    with pytest.raises(ConnectionResetError):  # the other side has forgotten it
        client.recv(1)
    assert ask(other) == b"hello"  # nothing of it was lost


def test_a_cut(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    ask(client)
    proxy.cut()
    assert proxy.stats().open == 0
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert ask(dial()) == b"hello"


def test_a_cut_and_then_silence(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.cut()
    proxy.freeze()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    newcomer = dial()
    newcomer.sendall(b"hello")
    assert nothing_comes(newcomer)


def test_a_hang_up(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    ask(client)
    proxy.hang_up()
    assert client.recv(1) == b""
    assert ask(dial()) == b"hello"


def test_refusal_and_the_same_port_again(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    ask(client)
    address = proxy.address
    for _ in range(3):
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            dial()
        proxy.heal()
        assert proxy.address == address
        assert ask(dial()) == b"hello"
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_port_that_was_lost_is_told(proxy: FaultProxy, dial: Dial) -> None:
    proxy.refuse()
    host, port = proxy.address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(ClusterError, match="can't listen"),
    ):
        proxy.heal()
    proxy.heal()
    assert ask(dial()) == b"hello"


# --- its own life -----------------------------------------------------------------------------


async def test_it_works_while_the_loop_stands_still(proxy: FaultProxy, dial: Dial) -> None:
    client = dial()
    proxy.delay(0.05)
    assert ask(client) == b"hello"
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


async def test_faults_hardly_stop_the_loop(proxy: FaultProxy) -> None:
    async with LoopStallProbe() as probe:
        for _ in range(50):
            proxy.delay(1)
            proxy.freeze()
            proxy.refuse()
            proxy.heal()
            await asyncio.sleep(0)
    assert probe.longest < 0.5


async def test_async_with(echo: str) -> None:
    async with FaultProxy(echo) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        proxy.hang_up()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert not proxy.running


async def test_a_cancelled_test_closes_it(echo: str) -> None:
    proxy = FaultProxy(echo)
    entered = asyncio.Event()

    async def run() -> None:
        async with proxy:
            entered.set()
            await anyio.sleep_forever()

    task = asyncio.ensure_future(run())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not proxy.running


async def test_cancelled_while_it_starts_it_is_closed(echo: str) -> None:
    for turns in range(30):
        proxy = FaultProxy(echo)
        entering = asyncio.ensure_future(proxy.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        entering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await entering).__aexit__(None, None, None)
        assert not proxy.running


def test_it_leaves_nothing_behind(echo: str) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    threads, before = threading.active_count(), descriptors()
    for _ in range(20):
        with FaultProxy(echo) as proxy:
            host, port = proxy.address.split(":")
            with socket.create_connection((host, int(port)), timeout=SOON) as client:
                ask(client)
                proxy.freeze()
                client.sendall(b"never delivered")
    assert not any("fault-proxy" in thread.name for thread in threading.enumerate())
    await_that(lambda: threading.active_count() <= threads)
    await_that(lambda: descriptors() <= before)


def test_it_can_be_started_again_at_its_address(echo: str) -> None:
    proxy = FaultProxy(echo)
    proxy.close()  # nothing to close
    with proxy:
        address = proxy.address
        proxy.start()  # runs already
        proxy.freeze()
    assert proxy.stats().connections == 0
    with proxy:
        assert proxy.address == address
        with socket.create_connection(tuple(address.split(":")), timeout=SOON) as client:  # type: ignore[arg-type]
            assert ask(client) == b"hello"  # the faults have gone


def test_faults_from_many_threads(proxy: FaultProxy, dial: Dial) -> None:
    def storm() -> None:
        for _ in range(20):
            proxy.freeze()
            proxy.refuse()
            proxy.heal()

    threads = [threading.Thread(target=storm) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ask(dial()) == b"hello"


def test_repr(echo: str) -> None:
    proxy = FaultProxy(echo)
    assert repr(proxy) == f"<FaultProxy to {echo} not running>"
    with proxy:
        assert repr(proxy) == f"<FaultProxy {proxy.address} to {echo} running>"


def test_in_a_forked_child_it_is_inert(echo: str) -> None:
    code = f"""
        import os, warnings
        warnings.simplefilter("ignore")  # of forking beside threads
        from aiomooncake import ForkedProcessError
        from aiomooncake.testing import FaultProxy
        with FaultProxy({echo!r}) as proxy:
            child = os.fork()
            if not child:
                try:
                    proxy.freeze()
                except ForkedProcessError:
                    proxy.close()
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            proxy.freeze()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["", "127.0.0.1", "127.0.0.1:none", "memory://x"])
def test_a_bad_target(target: str) -> None:
    with pytest.raises(ConfigError, match="target"):
        FaultProxy(target)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ClusterError, match="resolve"):
        FaultProxy("no.such.host.invalid:1").start()


def test_a_proxy_that_does_not_run(echo: str) -> None:
    proxy = FaultProxy(echo)
    with pytest.raises(ClusterError, match="no address yet"):
        _ = proxy.address
    for verb in (proxy.freeze, proxy.cut, proxy.heal):
        with pytest.raises(ClusterError, match="does not run"):
            verb()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda proxy: proxy.delay(-1), "seconds"),
        (lambda proxy: proxy.delay(float("inf")), "seconds"),
        (lambda proxy: proxy.delay(1, jitter=float("nan")), "jitter"),
        (lambda proxy: proxy.delay(1, towards="up"), "towards"),
        (lambda proxy: proxy.throttle(0), "bytes_per_second"),
        (lambda proxy: proxy.corrupt(), "either at= .* or rate="),
        (lambda proxy: proxy.corrupt(at=1, rate=0.5), "either at= .* or rate="),
        (lambda proxy: proxy.corrupt(at=-1), "at counts"),
        (lambda proxy: proxy.corrupt(rate=2), "rate is"),
        (lambda proxy: proxy.freeze(towards="nobody"), "towards"),
    ],
)
def test_bad_arguments(proxy: FaultProxy, fault: Callable[[FaultProxy], None], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        fault(proxy)


# --- the real engine --------------------------------------------------------------------------

RPC_TIMEOUT = 0.5
UNREACHED = 4.3  # seconds of the engine's own tries to connect


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    """A master with memory of its own, so that stores may come and go."""
    with LocalCluster(client_ttl=30) as cluster:
        cluster.blocking.start_client(global_segment_size="64MiB")
        yield cluster


@pytest.fixture(scope="module")
def lines(master: LocalCluster, closing: Closing) -> Iterator[contextlib.ExitStack]:
    """Lines to the master that work until the stores on them are closed."""
    with contextlib.ExitStack() as stack:
        yield stack
        closing.wait()


@pytest.fixture
def line(master: LocalCluster, lines: contextlib.ExitStack) -> Iterator[FaultProxy]:
    proxy = lines.enter_context(FaultProxy(master.address))
    yield proxy
    proxy.heal()


@pytest.fixture
async def store(line: FaultProxy, closing: Closing) -> Any:
    opened = await connect(line.address, timeout=20, global_segment_size=0, rpc_timeout=RPC_TIMEOUT)
    await opened.upsert("there", b"value")
    yield opened
    closing.add(opened._client)


async def outcome(store: Store) -> tuple[Any, float]:
    """Read once: what came of it, and how long it took."""
    began = time.monotonic()
    try:
        answer: Any = await store.get("there")
    except MooncakeError as error:
        answer = type(error)
    return answer, time.monotonic() - began


@pytest.mark.parametrize(
    ("fault", "answer", "least"),
    [
        pytest.param(lambda line: line.delay(0.1), b"value", 0.2, id="slow"),
        pytest.param(lambda line: line.throttle(2000), b"value", 0.01, id="throttled"),
        pytest.param(lambda line: line.delay(1), RpcTimeoutError, RPC_TIMEOUT, id="too slow"),
        pytest.param(lambda line: line.freeze(), RpcTimeoutError, RPC_TIMEOUT, id="frozen"),
        pytest.param(lambda line: line.drop(), RpcTimeoutError, RPC_TIMEOUT, id="lost"),
        pytest.param(
            lambda line: line.drop(towards="client"), RpcTimeoutError, RPC_TIMEOUT, id="unanswered"
        ),
        pytest.param(lambda line: line.corrupt(at=0), RpcError, 0.0, id="corrupt"),
    ],
)
async def test_the_engine_behind_a_bad_line(
    line: FaultProxy,
    store: Store,
    fault: Callable[[FaultProxy], None],
    answer: Any,
    least: float,
) -> None:
    fault(line)
    async with LoopStallProbe() as probe:
        came, seconds = await outcome(store)
    assert came == answer
    assert least <= seconds < SOON
    assert probe.longest < 0.5
    line.heal()
    await recovered(store)


@pytest.mark.parametrize("verb", ["cut", "hang_up"])
async def test_the_engine_connects_again_after_a_cut(
    line: FaultProxy, store: Store, verb: str
) -> None:
    """Without `heal`: the line itself is well again."""
    before = line.stats().connections
    getattr(line, verb)()
    came, seconds = await outcome(store)
    assert came in {RpcError, b"value"}
    assert seconds < SOON
    await recovered(store)
    assert line.stats().connections > before


async def test_the_engine_before_a_closed_port(line: FaultProxy, store: Store) -> None:
    line.refuse()
    await outcome(store)  # of the connections that were reset
    came, seconds = await outcome(store)
    assert came is RpcError
    assert seconds < UNREACHED + SOON  # or at once, if the store has noticed the outage
    line.heal()
    await recovered(store)


async def recovered(store: Store) -> None:
    """Wait until reads come right; the value lies on another client, so it is still there."""
    deadline = time.monotonic() + 20
    while True:
        came, _ = await outcome(store)
        if came == b"value":
            return
        assert time.monotonic() < deadline, f"still {came}"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("verb", ["freeze", "drop", "refuse"])
async def test_connecting_through_a_dead_line(
    line: FaultProxy, open_store: OpenStore, verb: str
) -> None:
    getattr(line, verb)()
    began = time.monotonic()
    async with LoopStallProbe() as probe:
        with pytest.raises(SetupTimeoutError):
            await connect(line.address, timeout=1, global_segment_size=0)
    assert 1 <= time.monotonic() - began < 1 + SOON
    assert probe.longest < 0.5
    line.heal()
    await open_store(line.address, timeout=20, global_segment_size=0)


async def test_connecting_waits_for_a_line_that_heals(
    line: FaultProxy, open_store: OpenStore
) -> None:
    line.refuse()
    opening = asyncio.ensure_future(open_store(line.address, timeout=20, global_segment_size=0))
    await asyncio.sleep(0.3)
    assert not opening.done()
    line.heal()
    store = await opening
    await store.upsert("after", b"v")

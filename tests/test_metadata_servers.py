"""HTTP metadata servers: the wheel's own two, and what goes wrong with them.

With such a server the engine publishes under ``local_hostname`` where its transfers listen, and
looks peers up by that name. The wheel has one in Python, and one within its master.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from aiomooncake import (
    LocalCluster,
    NotSupportedError,
    ReplicateConfig,
    SetupError,
    SetupTimeoutError,
    Store,
    StoreConfig,
    TransferError,
    connect,
    connect_ranks,
)
from aiomooncake._coordinators import Found, ask_metadata_server
from aiomooncake.cli import cluster_checks
from aiomooncake.cli.doctor import Case
from aiomooncake.config import parse_target
from aiomooncake.master import http_get, probe_tcp
from aiomooncake.testing import LoopStallProbe
from tests.warmup_fakes import HttpMaster, free_port

VALUE = os.urandom(100_000)
STALL = 1.0  # seconds, ten times what was measured; a frozen server would hold the GIL for 6 s
SMALL: dict[str, Any] = {"global_segment_size": "16mb", "local_buffer_size": "16mb"}

OpenStore = Callable[..., Awaitable[Store]]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]


class MetadataServer:
    """The wheel's metadata server in Python, in a process of its own, on the same port for good."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/metadata"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it without entries, and wait until it listens; it tells nobody that it does."""
        command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1"]
        self._process = subprocess.Popen(  # noqa: ASYNC220  # it takes a few ms
            [*command, "--port", str(self.port)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                await probe_tcp("127.0.0.1", self.port, 1.0)
                return
            assert self._process.poll() is None, "the metadata server ended"
            assert time.monotonic() < deadline, "the metadata server does not listen"
            await asyncio.sleep(0.02)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def entry(url: str, kind: str, store: Store) -> tuple[int, bytes]:
    """Ask for what a server has of a store; ``rpc_meta`` is its address, ``ram`` its memory."""
    port = int(url.split(":")[2].partition("/")[0])
    key = quote(f"mooncake/{kind}/{store.hostname}", safe="")
    return await http_get("127.0.0.1", port, f"/metadata?key={key}", 5.0)


def keep(url: str, key: str, body: bytes) -> None:
    """Give a server an entry."""
    request = Request(f"{url}?key={quote(key, safe='')}", body, method="PUT")
    with urlopen(request, timeout=10):
        pass


async def entries(url: str, *stores: Store) -> list[int]:
    """Ask for both entries of each store; return the HTTP statuses."""
    return [(await entry(url, kind, each))[0] for each in stores for kind in ("rpc_meta", "ram")]


def on(store: Store) -> ReplicateConfig:
    """Place a value on a store's own segment."""
    return ReplicateConfig(preferred_segments=[store.hostname])


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish a loopback address; the engine's own choice is the first one that is none."""
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    """A master of this module's own: its segments can't be reached without the metadata server."""
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
async def server() -> AsyncIterator[MetadataServer]:
    """A metadata server that may be frozen and killed."""
    running = MetadataServer()
    try:
        await running.start()
        yield running
    finally:
        running.kill()


# --- as it should be --------------------------------------------------------------------------


async def test_stores_find_each_other(master: LocalCluster, server: MetadataServer) -> None:
    async with LoopStallProbe() as probe:
        options = {"metadata_server": server.url, "timeout": 20, **SMALL}
        a, b = await asyncio.gather(
            connect(master.address, rank="a", **options),
            connect(master.address, rank="b", **options),
        )
        assert await entries(server.url, a, b) == [200, 200, 200, 200]
        _, address = await entry(server.url, "rpc_meta", a)
        assert json.loads(address)["ip_or_host_name"] == "127.0.0.1"
        await asyncio.gather(a.put("ab", VALUE, config=on(b)), b.put("ba", VALUE, config=on(a)))
        assert [await each.get(key) for each in (a, b) for key in ("ab", "ba")] == [VALUE] * 4
        (copy,) = await a.replicas("ab") or ()
        assert copy.endpoint == b.hostname  # the name under which it is looked up, no address
        async with a.view("ab") as mine, b.view("ba") as others:
            assert mine is not None
            assert others is not None
            assert bytes(mine) == bytes(others) == VALUE
        assert {len((await each.warmup()).attempts) for each in (a, b)} == {1}
        await asyncio.gather(a.aclose(), b.aclose())
        assert await entries(server.url, a, b) == [404, 404, 404, 404]
    assert probe.longest < STALL, probe.stalls()


async def test_ranks_by_the_metadata_server_within_the_master() -> None:
    port = free_port()
    flags = [
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={port}",
    ]
    url = f"http://127.0.0.1:{port}/metadata"
    async with LocalCluster(extra_args=flags) as cluster, LoopStallProbe() as probe:
        async with connect_ranks(
            cluster.address, 3, metadata_server=url, timeout=20, **SMALL
        ) as group:
            stores = list(group)
            assert await entries(url, *stores) == [200] * 6
            reports = await group.warmup()
            assert [len(reports[rank].attempts) for rank in range(3)] == [1, 1, 1]
            for rank, store in enumerate(stores):
                await store.put(f"of{rank}", VALUE, config=on(stores[rank - 1]))
            assert [await stores[rank - 2].get(f"of{rank}") for rank in range(3)] == [VALUE] * 3
        assert await entries(url, *stores) == [404] * 6
    assert probe.longest < STALL, probe.stalls()


# --- at connect -------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(status: int, body: bytes, *, silent_to: str = "") -> Iterator[str]:
    """An HTTP server that gives every request the same answer, and one user agent none."""
    over = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            if self.headers["User-Agent"] == silent_to:
                over.wait()
                return
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = _answer  # noqa: N815  # the names that the module looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/metadata"
        finally:
            over.set()
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_that_takes_no_entry_is_told_within_seconds(
    master: LocalCluster, status: int
) -> None:
    async with LoopStallProbe() as probe:
        with answering(status, b"no") as url:
            began = time.monotonic()
            found = rf"^metadata_server='{url}': .* a look-up at /metadata by HTTP {status}, not as"
            with pytest.raises(SetupError, match=found) as refused:
                await connect(master.address, metadata_server=url, timeout=20, **SMALL)
            assert not isinstance(refused.value, SetupTimeoutError)
            assert refused.value.code == -1
            assert time.monotonic() - began < 10  # four tries, 0.2 s each
    assert probe.longest < STALL, probe.stalls()


async def test_a_server_that_is_not_there_is_named_in_the_end(master: LocalCluster) -> None:
    port = free_port()
    url = f"http://user:sekret@127.0.0.1:{port}/metadata"
    waiting = f"waiting for the metadata server 127.0.0.1:{port}: Connection refused"
    with pytest.raises(SetupTimeoutError, match=waiting) as late:
        await connect(master.address, metadata_server=url, timeout=0.3, **SMALL)
    assert "sekret" not in str(late.value)


async def test_a_server_that_says_nothing_is_told_with_the_refusal(
    master: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left open what of all that a set-up needs is wrong."""
    monkeypatch.setattr(importlib.import_module("aiomooncake._opener"), "_PROBE_TIMEOUT", 0.2)
    async with LoopStallProbe() as probe:
        with answering(500, b"no", silent_to="aiomooncake") as url:
            found = rf"^metadata_server='{url}': .* does not answer in time: it is frozen, or"
            with pytest.raises(SetupError, match=found) as refused:
                await connect(master.address, metadata_server=url, timeout=30, **SMALL)
            assert refused.value.code == -1
    assert probe.longest < STALL, probe.stalls()


async def test_a_slow_server_is_not_taken_for_a_slow_master(master: LocalCluster) -> None:
    """It left hardly any time to ask the master, and that was said to be waited for."""
    with answering(500, b"no", silent_to="aiomooncake") as url:
        found = r"gave up after 2 s while setting up the engine .* of the metadata server, .* does"
        with pytest.raises(SetupTimeoutError, match=found):
            await connect(master.address, metadata_server=url, timeout=2, **SMALL)


async def test_a_server_that_ends_meanwhile_is_told_with_the_refusal(master: LocalCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://user:sekret@127.0.0.1:{listener.getsockname()[1]}/metadata"
        connecting = asyncio.ensure_future(
            connect(master.address, metadata_server=url, timeout=30, **SMALL)
        )
        connection, _ = await asyncio.to_thread(listener.accept)
        connection.close()
    found = r"^metadata_server='http://[*]{3}@.*': 127.0.0.1:\d+ does not answer: Connection ref"
    with pytest.raises(SetupError, match=found) as refused:
        await connecting
    assert refused.value.code == -1
    assert "sekret" not in str(refused.value)


async def test_a_server_that_is_well_is_not_blamed(
    master: LocalCluster, server: MetadataServer
) -> None:
    options = {"metadata_server": server.url, "timeout": 20, **SMALL}
    with pytest.raises(SetupError, match=r"^the engine refuses.*:\d+ answers look-ups"):
        await connect(master.address, protocol="carrier_pigeon", **options)


async def test_a_server_that_starts_later_is_waited_for(
    master: LocalCluster,
    server: MetadataServer,
    open_store: OpenStore,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.kill()
    options = {"metadata_server": server.url, "timeout": 30, **SMALL}
    connecting = asyncio.ensure_future(open_store(master.address, **options))
    await eventually(lambda: "waiting for the metadata server" in caplog.text)
    await server.start()
    store = await connecting
    await store.put("key", VALUE, config=on(store))
    assert await store.get("key") == VALUE
    await store.aclose()


async def test_a_server_that_answers_nonsense_serves_the_store_itself_only(
    master: LocalCluster, open_store: OpenStore
) -> None:
    """The engine believes every 200; what it gets back is read when a peer is looked for."""
    with answering(200, b"{nonsense") as url:
        options = {"metadata_server": url, "timeout": 20, **SMALL}
        a = await open_store(master.address, **options)
        b = await open_store(master.address, **options)
        await a.put("own", VALUE, config=on(a))
        assert await a.get("own") == VALUE
        with pytest.raises(TransferError):
            await a.put("other", VALUE, config=on(b))
        with pytest.raises(TransferError):
            await b.get("own")
        await asyncio.gather(a.aclose(), b.aclose())


async def test_a_frozen_server_is_bounded_by_the_timeout(
    master: LocalCluster, server: MetadataServer, eventually: Eventually
) -> None:
    server.freeze()
    async with LoopStallProbe() as probe:
        began = time.monotonic()
        with pytest.raises(SetupTimeoutError, match="Does the metadata server run") as late:
            await connect(
                master.address, rank="frozen", metadata_server=server.url, timeout=1, **SMALL
            )
        assert time.monotonic() - began < 3
    assert server.url in str(late.value)
    assert probe.longest < STALL, probe.stalls()
    server.thaw()

    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if "-frozen" in each.name]

    await eventually(lambda: not threads())


async def test_a_name_that_is_taken_is_refused(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """The second one takes the entry of the first along, on which nobody finds it any more."""
    name = f"127.0.0.1:{free_port()}"
    options = {"metadata_server": server.url, "local_hostname": name, "timeout": 20, **SMALL}
    first = await open_store(master.address, **options)
    found = rf"^metadata_server='{server.url}': .* has a client of the name '{name}'"
    with pytest.raises(SetupError, match=found) as refused:
        await connect(master.address, **options)
    assert refused.value.code == -600
    assert await entries(server.url, first) == [404, 200]
    await first.put("own", VALUE, config=on(first))
    assert await first.get("own") == VALUE


async def test_a_name_that_a_killed_client_had_is_refused_once(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """The refusal takes its entry away."""
    name = f"127.0.0.1:{free_port()}"
    options = {"metadata_server": server.url, "local_hostname": name, "timeout": 20, **SMALL}
    first = await open_store(master.address, **options)
    left = {kind: (await entry(server.url, kind, first))[1] for kind in ("rpc_meta", "ram")}
    await first.aclose()
    for kind, body in left.items():
        await asyncio.to_thread(keep, server.url, f"mooncake/{kind}/{name}", body)
    with pytest.raises(SetupError, match="if it was killed, the name is free now"):
        await connect(master.address, **options)
    second = await open_store(master.address, **options)
    other = await open_store(master.address, **{**options, "local_hostname": "127.0.0.1"})
    await other.put("there", VALUE, config=on(second))
    assert await other.get("there") == VALUE


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1", "k8s://default/mooncake"])
async def test_masters_that_this_wheel_can_not_look_for(address: str) -> None:
    """It was built without: its log has *Invalid HA backend entry*, and set-up answers -1."""
    began = time.monotonic()
    with pytest.raises(SetupError) as refused:
        await connect(address, local_hostname="127.0.0.1", timeout=20, **SMALL)
    assert refused.value.code == -1
    assert address in str(refused.value)
    assert time.monotonic() - began < 10


async def test_a_kind_of_metadata_server_that_this_wheel_lacks(master: LocalCluster) -> None:
    """The engine would end the process."""
    with pytest.raises(NotSupportedError, match="built without redis://"):
        await connect(master.address, metadata_server="redis://127.0.0.1:1", **SMALL)


# --- afterwards -------------------------------------------------------------------------------


async def test_a_server_that_dies(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """Peers that have met go on; the others can't find each other, and say so."""
    options = {"metadata_server": server.url, "timeout": 20, **SMALL}
    async with LoopStallProbe() as probe:
        a = await open_store(master.address, **options)
        b = await open_store(master.address, **options)
        stranger = await open_store(master.address, **{**options, "global_segment_size": 0})
        await a.put("known", VALUE, config=on(b))
        assert await a.get("known") == VALUE
        server.kill()

        assert await a.get("known") == VALUE
        await a.upsert("known", VALUE[::-1], config=on(b))
        assert await a.get("known") == VALUE[::-1]
        with pytest.raises(TransferError):  # not a miss
            await stranger.get("known")
        assert await stranger.exists("known")
        assert await stranger.get("missing") is None
        with pytest.raises(TransferError):
            await b.put("new", VALUE, config=on(a))
        assert all(each.health().ok for each in (a, b, stranger))

        # A server that comes back has forgotten everybody, and nobody tells it again.
        await server.start()
        assert await entries(server.url, a, b) == [404] * 4
        late = await open_store(master.address, **options)
        with pytest.raises(TransferError):
            await late.get("known")
        await a.put("late", VALUE, config=on(late))
        assert await a.get("late") == VALUE
        server.kill()

        began = time.monotonic()
        await asyncio.gather(*(each.aclose() for each in (a, b, stranger, late)))
        assert time.monotonic() - began < 8
    assert probe.longest < STALL, probe.stalls()


async def test_a_server_that_freezes(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """Only who has not met a peer yet waits, and it can be cancelled."""
    options = {"metadata_server": server.url, "timeout": 20, **SMALL}
    async with LoopStallProbe() as probe:
        a = await open_store(master.address, **options)
        b = await open_store(master.address, **options)
        await a.put("known", VALUE, config=on(b))
        assert await a.get("known") == VALUE
        stranger = await open_store(master.address, **{**options, "global_segment_size": 0})
        server.freeze()
        assert await asyncio.wait_for(a.get("known"), 2) == VALUE
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stranger.get("known"), 0.3)
        server.thaw()
        assert await asyncio.wait_for(stranger.get("known"), 10) == VALUE
    assert probe.longest < STALL, probe.stalls()


async def test_a_peer_is_not_avoided_for_its_name(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """A transfer that failed once made the store knock at names, and refuse to read from them."""
    options = {"timeout": 20, "master_metrics_port": master.metrics_port, **SMALL}
    a = await open_store(master.address, metadata_server=server.url, **options)
    b = await open_store(master.address, metadata_server=server.url, **options)
    without = await open_store(master.address, **options)
    await b.put("kept", VALUE, config=on(b))
    with pytest.raises(TransferError):  # after which all peers were suspect
        await a.put("elsewhere", VALUE, config=on(without))
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        assert await a.get("kept") == VALUE
    assert a.health().state == "ready"


async def test_without_the_server_beside_those_that_have_it(
    master: LocalCluster, server: MetadataServer, open_store: OpenStore
) -> None:
    """One cluster, one metadata server: otherwise only a store's own memory is in reach."""
    with_it = await open_store(master.address, metadata_server=server.url, timeout=20, **SMALL)
    without = await open_store(master.address, timeout=20, **SMALL)
    began = time.monotonic()
    for mine, others in ((with_it, without), (without, with_it)):
        key = f"of {mine.hostname}"
        await mine.put(key, VALUE, config=on(mine))
        assert await mine.get(key) == VALUE
        with pytest.raises(TransferError, match="put of 'elsewhere' failed: -800"):
            await mine.put("elsewhere", VALUE, config=on(others))
        with pytest.raises(TransferError, match=f"get of '{key}' failed: -800"):
            await others.get(key)
        assert await others.exists(key)
    assert time.monotonic() - began < 5


# --- the doctor -------------------------------------------------------------------------------


def case_of(**settings: Any) -> Case:
    target = parse_target(StoreConfig("127.0.0.1:1", **settings))
    case = Case("127.0.0.1:1", lambda: target, 5.0)
    case.target, case.config = target, target.config
    return case


async def test_the_doctor_asks_metadata_servers(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_checks, "_TIME", 0.5)

    async def ask(url: str) -> tuple[list[str], str]:
        findings = await cluster_checks.check_coordinators(case_of(metadata_server=url))
        return [each.state for each in findings], " ".join(each.text for each in findings)

    assert await ask("P2PHANDSHAKE") == ([], "")
    states, text = await ask(server.url)
    assert (states, "answers look-ups" in text) == (["ok"], True), text
    states, text = await ask(f"{server.url}s")
    assert (states, "HTTP 404" in text) == (["warn"], True), text
    place = f"127.0.0.1:{server.port}"
    dead = f"127.0.0.1:{free_port()}"
    states, text = await ask(f"etcd://{dead};http://{place}")
    assert states == ["fail", "ok"], text
    server.freeze()
    states, text = await ask(server.url)
    assert (states, "it is frozen" in text) == (["fail"], True), text


async def test_look_ups_take_any_path_and_answers_of_some_size() -> None:
    """A letter beyond ASCII in the path made the server a dead one, "127.0.0.1 is no host name"."""
    answers = {
        "/m%C3%A9tadata?key=aiomooncake-doctor": (404, b"metadata not found"),
        "/large?key=aiomooncake-doctor": (200, b"metadata" + bytes(1 << 20)),
    }
    async with HttpMaster(answers) as server:
        place = f"127.0.0.1:{server.port}"
        found = await ask_metadata_server(f"http://{place}/métadata", 5.0)
        assert found == Found("well", f"{place} answers look-ups")
        found = await ask_metadata_server(f"http://{place}/large", 5.0)
        assert found is not None
        assert "longer than 1048576 bytes" in found.text


async def test_the_doctor_does_not_knock_at_names() -> None:
    """The master lists a client of a metadata server by its name, where nobody listens."""
    case = case_of(metadata_server="http://127.0.0.1:1/metadata")
    case.mounted = ()
    (finding,) = await cluster_checks.check_peers(case)
    assert finding.state == "skip"
    assert "metadata server" in finding.text

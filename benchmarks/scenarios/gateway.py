"""The REST gateway beside the wheel's own REST server and a handler that stores nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from aiomooncake import LocalCluster
from aiomooncake.aiohttp import STORE
from aiomooncake.gateway import make_app
from benchmarks.bench import Bench, Group, Scenario, Value
from benchmarks.measure import Measurement, Meter, Round
from benchmarks.process import Job, Worker

__all__ = ["GROUPS"]

SERVED = Scenario(
    "gateway",
    "Get one value and put new ones, of 4 KB and of 1 MB, over HTTP by 1, 64 and 256 connections "
    "of wrk, in the server's own memory.",
)
FROZEN = Scenario(
    "gateway-frozen",
    "Ask a server that has four gets under way whether it lives (/healthz), after its master was "
    "frozen: the longest of 20 answers.",
)

OURS = "aiomooncake serve"
WHEEL = "mc_store_rest_server"
BARE = "bare aiohttp"

_HOST = "127.0.0.1"
_SCRIPT = Path(__file__).with_name("gateway.lua")
_SEGMENT = 1 << 30
_LOCAL_BUFFER = 64 << 20
_SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20}
_CONNECTIONS = (1, 64, 256)
_ASKED = 20
_GETS = 4
_CAP, _SMOKE_CAP = 5.0, 1.0  # seconds for one answer
_READ, _WRITTEN = "get-", "put-"


class Server(Job):
    """Serves over HTTP and is asked by wrk, from outside, while its loop is measured."""

    _app: web.Application
    _native: Any = None
    _port: int

    async def open(self, peer: str, address: str) -> int:
        """Start a server; return its port."""
        if peer == WHEEL:
            self._app = await self._make_wheels(address)
        else:
            self._app = _make_ours(address) if peer == OURS else _make_bare()
        runner = web.AppRunner(self._app, access_log=None, handler_cancellation=peer == OURS)
        await runner.setup()
        await web.TCPSite(runner, _HOST, 0, backlog=1024).start()
        self._port = runner.addresses[0][1]
        while peer == OURS and self._app[STORE].state != "ready":  # noqa: ASYNC110  # not for long
            await asyncio.sleep(0.01)
        return self._port

    async def _make_wheels(self, address: str) -> web.Application:
        """Make the wheel's, with the line that it logs for each request."""
        from mooncake.mooncake_store_service import MooncakeStoreService, _timed_handler

        os.environ |= {
            "MOONCAKE_MASTER": address,
            "MOONCAKE_LOCAL_HOSTNAME": _HOST,
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(_SEGMENT),
            "MOONCAKE_LOCAL_BUFFER_SIZE": str(_LOCAL_BUFFER),
        }
        service = MooncakeStoreService()
        if not await service.start_store_service():
            raise RuntimeError("the wheel's server did not start")
        self._native = service.store
        # Not by its start_http_service, which listens on all addresses of the host.
        app = web.Application(client_max_size=100 << 20)
        app.add_routes(
            [
                web.put("/api/put", _timed_handler("PUT", service.handle_put)),
                web.get("/api/get/{key}", _timed_handler("GET", service.handle_get)),
            ]
        )
        return app

    async def put(self, key: str, size: int) -> None:
        """Store a value that will be read."""
        async with ClientSession() as session:
            body = {"key": key, "value": "v" * size}
            async with session.put(f"http://{_HOST}:{self._port}/api/put", json=body) as reply:
                reply.raise_for_status()

    async def drive(self, verb: str, key: str, size: int, connections: int, by: str) -> Round:
        """Serve what wrk, or in its place a few requests by hand, ask for."""
        ask = _run_wrk if by == "wrk" else _ask_by_hand
        async with Meter() as meter:
            told = await ask(self._port, verb, key, size, connections)
        if told["bad"] or not told["requests"]:
            raise RuntimeError(f"requests failed: {told}")
        figures = {name: told[name] for name in ("p50", "p90", "p99")}
        return meter.round(told["requests"], figures=figures, seconds=told["seconds"])

    async def clear(self) -> None:
        """Remove what was put."""
        if self._native is None:
            await self._app[STORE].store.remove_by_regex(f"^{_WRITTEN}", force=True)
        else:
            self._native.remove_by_regex(f"^{_WRITTEN}", force=True)

    async def serve(self) -> None:
        """Serve whoever asks, to the end of this process."""
        await asyncio.Event().wait()


def _make_ours(address: str) -> web.Application:
    return make_app(
        address,
        local_hostname=_HOST,
        global_segment_size=_SEGMENT,
        local_buffer_size=_LOCAL_BUFFER,
    )


def _make_bare() -> web.Application:
    """Make one that stores nothing: the most that aiohttp could do."""
    values = {f"{_READ}{size}": b"v" * size for size in _SIZES.values()}

    async def get(request: web.Request) -> web.Response:
        value = values[request.match_info["key"]]
        return web.Response(body=value, content_type="application/octet-stream")

    app = web.Application()
    app.add_routes([web.get("/api/get/{key}", get)])
    return app


async def _run_wrk(port: int, verb: str, key: str, size: int, connections: int) -> dict[str, Any]:
    seconds = 4 if size > _SIZES["4 KB"] else 2
    process = await asyncio.create_subprocess_exec(
        "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "9s", "-s", str(_SCRIPT),
        f"http://{_HOST}:{port}/", "--", verb, key, str(size),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    told: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return told


async def _ask_by_hand(
    port: int, verb: str, key: str, size: int, connections: int
) -> dict[str, Any]:
    """Make one request per connection, where only a smoke run is wanted."""
    url = f"http://{_HOST}:{port}/api"

    async def ask(session: ClientSession, number: int) -> int:
        if verb == "get":
            asked = session.get(f"{url}/get/{key}")
        else:
            asked = session.put(f"{url}/put", json={"key": f"{key}{number}", "value": "v" * size})
        async with asked as reply:
            await reply.read()
            return int(not reply.ok)

    began = time.perf_counter()
    async with ClientSession() as session:
        bad = await asyncio.gather(*(ask(session, number) for number in range(connections)))
    seconds = time.perf_counter() - began
    latencies = dict.fromkeys(("p50", "p90", "p99"), seconds)
    return {"requests": connections, "seconds": seconds, "bad": sum(bad), **latencies}


@dataclass(frozen=True, slots=True)
class _Running:
    """A server and its master."""

    cluster: LocalCluster
    worker: Worker
    port: int


@contextlib.contextmanager
def _servers(loop: str, peers: Sequence[str]) -> Iterator[dict[str, _Running]]:
    """Run servers, with a master for each; the wheel's on the loop that it uses."""
    with contextlib.ExitStack() as stack:
        running = {}
        for peer in peers:
            cluster = stack.enter_context(LocalCluster())
            worker = stack.enter_context(Worker(Server, loop="asyncio" if peer == WHEEL else loop))
            port = worker.call("open", peer=peer, address=cluster.address)
            running[peer] = _Running(cluster, worker, port)
        yield running


@dataclass(frozen=True, slots=True)
class _Case:
    verb: str
    size: str
    connections: int

    @property
    def peers(self) -> tuple[str, ...]:
        return (OURS, WHEEL, BARE) if self.verb == "get" else (OURS, WHEEL)


def _served(bench: Bench, _wanted: frozenset[str]) -> None:
    if shutil.which("wrk") is None and not bench.smoke:
        raise RuntimeError("this scenario needs wrk: apt-get install wrk")
    sizes = list(_SIZES)[: bench.pick(2, 1)]
    connections = (8,) if bench.smoke else _CONNECTIONS
    loop = bench.loops[-1]  # as the command chooses
    with _servers(loop, (OURS, WHEEL, BARE)) as running:
        for peer in (OURS, WHEEL):
            for nbytes in _SIZES.values():
                running[peer].worker.call("put", key=f"{_READ}{nbytes}", size=nbytes)
        for verb in ("get", "put"):
            for size in sizes:
                for count in connections:
                    _measure(bench, running, _Case(verb, size, count), loop)


def _measure(bench: Bench, running: dict[str, _Running], case: _Case, loop: str) -> None:
    size = _SIZES[case.size]
    kept: dict[str, list[Any]] = {peer: [] for peer in case.peers}
    for number in range(bench.slow_rounds):
        for peer in case.peers:  # they take turns
            worker = running[peer].worker
            key = f"{_READ}{size}" if case.verb == "get" else f"{_WRITTEN}{number}-"
            kept[peer].append(
                worker.call(
                    "drive",
                    verb=case.verb,
                    key=key,
                    size=size,
                    connections=case.connections,
                    by="hand" if bench.smoke else "wrk",
                )
            )
            if case.verb == "put":
                worker.call("clear")
    measured = {
        peer: bench.measured(
            SERVED.name,
            peer,
            rounds,
            loop="asyncio" if peer == WHEEL else loop,
            verb=case.verb,
            size=case.size,
            connections=case.connections,
        )
        for peer, rounds in kept.items()
    }
    _rows(bench, case, measured)


def _rows(bench: Bench, case: _Case, measured: dict[str, Measurement]) -> None:
    ways = "1 connection" if case.connections == 1 else f"{case.connections} connections"
    what = f"{case.verb} of {case.size}, {ways}"
    ours, wheel = measured[OURS], measured[WHEEL]
    aimed = case == _Case("get", "4 KB", 256)
    bench.compare(
        SERVED.name, what, "1/s", ours.rate, wheel.rate, against=WHEEL,
        target="≥ 6×" if aimed else "never slower", at_least_times=6.0 if aimed else 1.0,
    )  # fmt: skip
    for figure, words in (("p99", "p99"), ("longest_stall", "loop still for")):
        bench.compare(
            SERVED.name, f"{what}, {words}", "s", ours.median(figure), wheel.median(figure),
            against=WHEEL,
        )  # fmt: skip
    if BARE in measured:
        bench.compare(
            SERVED.name, what, "1/s", ours.rate, measured[BARE].rate, against=BARE,
            target="≥ 0.5×" if aimed else "", at_least_times=0.5 if aimed else None,
        )  # fmt: skip


def _frozen(bench: Bench, _wanted: frozenset[str]) -> None:
    size, cap = _SIZES["4 KB"], _SMOKE_CAP if bench.smoke else _CAP
    longest: dict[str, float] = {}
    with _servers(bench.loops[-1], (OURS, WHEEL)) as running:
        for peer, server in running.items():
            server.worker.call("put", key=f"{_READ}{size}", size=size)
            server.worker.send("serve")
            server.cluster.blocking.pause()
            answers = _ask_frozen(server.port, f"/api/get/{_READ}{size}", cap)
            longest[peer] = max(answers)
            round_ = {"seconds": sum(answers), "operations": len(answers)}
            bench.measured(FROZEN.name, peer, [round_ | {"figures": {"longest": longest[peer]}}])
            server.worker.close(kill=True)
            server.cluster.blocking.kill()
    theirs = longest[WHEEL]
    bench.compare(
        FROZEN.name, "it lives, answered after", "s", longest[OURS],
        Value(theirs, at_least=theirs >= cap), against=WHEEL,
        target="≤ 50 ms", at_most=0.05,
    )  # fmt: skip


def _ask_frozen(port: int, path: str, cap: float) -> list[float]:
    """Begin to get a value, some times, and ask whether the server lives; seconds of answers."""

    def get() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            _ask(port, path, cap)

    answers: list[float] = []
    with ThreadPoolExecutor(_GETS) as pool:
        for _ in range(_GETS):
            pool.submit(get)
        time.sleep(0.1)  # they are under way
        while len(answers) < _ASKED:
            began = time.monotonic()
            try:
                _ask(port, "/healthz", cap)
            except TimeoutError:
                return [*answers, cap]
            answers.append(time.monotonic() - began)
            time.sleep(0.02)
    return answers


def _ask(port: int, path: str, timeout: float) -> int:
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


GROUPS = (Group((SERVED,), _served), Group((FROZEN,), _frozen))

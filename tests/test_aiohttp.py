"""A store inside an aiohttp application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import aiomooncake.aiohttp
from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    SetupError,
    UnavailableError,
    WarmupError,
    WarmupPolicy,
)
from aiomooncake.aiohttp import STORE, NotReadyError, StoreService, setup
from aiomooncake.engine.inmemory import InMemoryEngine
from tests.conftest import Hold
from tests.warmup_fakes import free_port

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
OTHER: web.AppKey[StoreService] = web.AppKey("other", StoreService)


async def get(request: web.Request) -> web.Response:
    value = await request.app[STORE].store.get("k")
    return web.Response(body=value or b"missing")


def make(*arguments: Any, **options: Any) -> web.Application:
    app = web.Application()
    assert setup(app, *arguments, **options) is STORE
    app.router.add_get("/get", get)
    return app


def client_of(app: web.Application) -> TestClient[web.Request, web.Application]:
    return TestClient(TestServer(app))


async def test_a_handler_uses_the_store(eventually: Eventually) -> None:
    app = make("memory://app-handler", rank=3)
    async with client_of(app) as client:
        await eventually(lambda: app[STORE].state == "ready")
        store = app[STORE].store
        assert store.rank == 3
        await store.put("k", b"value")
        assert await (await client.get("/get")).read() == b"value"
        reply = await client.get("/readyz")
        assert reply.status == 200
        told = await reply.json()
        assert (told["ready"], told["state"], told["error"]) == (True, "ready", None)
        assert told["connect_attempts"] == 1
        (rank,) = told["ranks"]
        assert (rank["rank"], rank["attempts"], rank["diagnosis"]) == ("TP3", 1, None)
        assert rank["store"]["state"] == "ready"
    assert store.closed
    assert app[STORE].state == "closed"


async def test_before_it_is_ready(hold: Hold, eventually: Eventually) -> None:
    engine = InMemoryEngine()
    fault = engine.fault("put", hold=hold)
    app = make("127.0.0.1:1", engine=engine)
    async with client_of(app) as client:
        await hold()
        assert app[STORE].state == "warming-up"
        with pytest.raises(NotReadyError, match="warming-up") as caught:
            _ = app[STORE].store
        assert isinstance(caught.value, UnavailableError)
        assert caught.value.retryable
        assert app[STORE].connected.config is not None
        reply = await client.get("/get")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert (await reply.json())["code_name"] == "NOT_READY"
        assert (await client.get("/healthz")).status == 200
        reply = await client.get("/readyz")
        assert reply.status == 503
        assert (await reply.json())["state"] == "warming-up"
        fault.remove()
        hold.set()
        await eventually(lambda: app[STORE].state == "ready")
        assert (await client.get("/get")).status == 200


async def test_diagnoses_are_told(eventually: Eventually) -> None:
    engine = InMemoryEngine()
    policy = WarmupPolicy(timeout=None, max_attempts=2, initial_delay=0.01)
    app = make("memory://app-empty", engine=engine, warmup=policy, global_segment_size=0)
    async with client_of(app) as client:
        await eventually(lambda: app[STORE].document()["ranks"][0]["diagnosis"])
        told = await (await client.get("/readyz")).json()
        assert told["state"] == "warming-up"
        (rank,) = told["ranks"]
        assert rank["last_attempt"] == {
            "step": "put",
            "code": -200,
            "code_name": "NO_AVAILABLE_HANDLE",
        }
        assert rank["diagnosis"]["kind"] == "no-segment"
        assert rank["diagnosis"]["cure"]
        assert "Warmup" in told["error"]
        async with aiomooncake.connect("memory://app-empty", engine=engine):  # lends memory
            await eventually(lambda: app[STORE].state == "ready")  # it was tried on
        told = await (await client.get("/readyz")).json()
        assert told["ranks"][0]["diagnosis"] is None
        assert told["error"] is None


async def test_ranks(eventually: Eventually) -> None:
    app = make("memory://app-ranks", ranks=["tp0", "tp1"])
    async with client_of(app) as client:
        await eventually(lambda: app[STORE].state == "ready")
        group = app[STORE].group
        assert group.ranks == ("tp0", "tp1")
        assert app[STORE].store is group["tp0"]
        told = await (await client.get("/readyz")).json()
        assert [(rank["rank"], rank["attempts"]) for rank in told["ranks"]] == [
            ("tp0", 1),
            ("tp1", 1),
        ]
    assert all(store.closed for store in group)


async def test_one_rank_that_is_not_ready(eventually: Eventually) -> None:
    engine = InMemoryEngine()
    engine.fault("put", code=-200, hostname="10.0.0.1")
    policy = WarmupPolicy(timeout=None, max_attempts=1)
    app = make(
        "127.0.0.1:1",
        ranks=2,
        engine=engine,
        warmup=policy,
        per_rank=lambda rank: {"local_hostname": f"10.0.0.{rank}"},
    )
    async with client_of(app):
        await eventually(lambda: app[STORE].error is not None)
        with pytest.raises(NotReadyError):
            _ = app[STORE].group
        first, second = app[STORE].document()["ranks"]
        assert first["diagnosis"] is None
        assert first["last_attempt"]["step"] == "done"
        assert second["diagnosis"] is not None


async def test_without_ranks_there_is_no_group(eventually: Eventually) -> None:
    app = make("memory://app-group", warmup=False)
    async with client_of(app):
        await eventually(lambda: app[STORE].state == "ready")
        with pytest.raises(InvalidArgumentError, match="ranks="):
            _ = app[STORE].group


async def test_two_stores_in_one_application(eventually: Eventually) -> None:
    app = web.Application()
    setup(app, "memory://app-one")
    setup(app, "memory://app-two", key=OTHER, health_path=None, ready_path="/other")
    async with client_of(app) as client:
        await eventually(lambda: app[STORE].state == app[OTHER].state == "ready")
        await app[STORE].store.put("k", b"one")
        assert await app[OTHER].store.get("k") is None
        assert (await client.get("/other")).status == 200


async def test_it_is_given_up_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    app = make(f"127.0.0.1:{free_port()}", timeout=0.2)
    async with client_of(app) as client:
        error = await asyncio.wait_for(app[STORE].given_up(), 10)
        assert isinstance(error, SetupError)
        told = await (await client.get("/readyz")).json()
        assert (told["state"], told["ready"]) == ("failed", False)
        assert str(error) == told["error"]
        assert "after 0.2 s" in str(error)
    (record,) = (each for each in caplog.records if "given up" in each.getMessage())
    assert record.exc_info is None  # it was foreseen


async def test_a_warm_up_is_given_up_after_the_timeout() -> None:
    engine = InMemoryEngine()
    engine.fault("put", code=-200)
    app = make("127.0.0.1:1", engine=engine, timeout=0.2)
    async with client_of(app):
        error = await asyncio.wait_for(app[STORE].given_up(), 10)
        assert isinstance(error, WarmupError)
        assert app[STORE].state == "failed"


async def test_what_no_waiting_mends_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def per_rank(rank: int | str) -> dict[str, Any]:
        raise LookupError(f"no device for {rank}")

    app = make("memory://app-wrong", ranks=2, per_rank=per_rank)
    async with client_of(app):
        error = await asyncio.wait_for(app[STORE].given_up(), 10)
        assert "no device for 0" in str(error)
    (record,) = (each for each in caplog.records if "given up" in each.getMessage())
    assert record.exc_info is not None


async def test_metrics_tell_of_the_stores(eventually: Eventually) -> None:
    # In a thread, for it imports, which reads files.
    app = await asyncio.to_thread(
        make, "memory://app-metrics", rank="scraped", metrics_path="/metrics"
    )
    async with client_of(app) as client:
        await eventually(lambda: app[STORE].state == "ready")
        reply = await client.get("/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        assert 'aiomooncake_warm{rank="scraped"} 1.0' in await reply.text()


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("10.0.0.1", {}),
        ("memory://x", {"no_such_option": 1}),
        ("local://", {"global_segment_size": "much"}),
    ],
)
def test_mistakes_are_told_at_once(target: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        setup(web.Application(), target, **options)


async def test_an_application_that_ends_while_it_connects() -> None:
    app = make(f"127.0.0.1:{free_port()}")
    async with client_of(app) as client:
        assert (await client.get("/readyz")).status == 503
    assert app[STORE].state == "closed"
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_the_real_engine_with_a_late_master(
    own_cluster: LocalCluster, eventually: Eventually
) -> None:
    await own_cluster.kill()
    app = make(own_cluster.address, global_segment_size="16mb")
    async with client_of(app) as client:
        assert (await client.get("/readyz")).status == 503
        await own_cluster.start()
        await eventually(lambda: app[STORE].state == "ready")
        await app[STORE].store.put("k", b"value")
        assert await (await client.get("/get")).read() == b"value"
        await own_cluster.kill()
        assert (await asyncio.wait_for(client.get("/get"), 20)).status == 500  # the handler's own
        await eventually(lambda: app[STORE].state == "unavailable")
        assert (await client.get("/readyz")).status == 503

"""What goes wrong: each fault has its status, and a JSON explanation."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestServer

from aiomooncake import LocalCluster
from aiomooncake.gateway import make_app
from tests.gateway.clients import MB, Client, Program, Reply

if TYPE_CHECKING:
    import aiohttp

Both = tuple[Client, Client]
StartGateway = Callable[..., Program]

PROMPT = 0.5  # seconds, with ten times the room that a free loop needs


def check(reply: Reply, status: int, code_name: str) -> Any:
    """Find a failure with its explanation."""
    assert reply.status == status, reply
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    told = reply.json
    assert told["error"]
    assert told["code_name"] == code_name
    assert (reply.headers.get("Retry-After") is not None) == (status == 503)
    return told


# --- requests that are wrong by themselves ------------------------------------------------------


async def test_body_above_the_limit(both: Both) -> None:
    gateway = both[0]
    body = json.dumps({"key": "large", "value": "x" * (4 * MB)}).encode()

    async def unannounced() -> AsyncIterator[bytes]:
        for start in range(0, len(body), MB):
            yield body[start : start + MB]

    check(await gateway.ask("PUT", "/api/put", body), 413, "BODY_TOO_LARGE")
    packed = gzip.compress(body)
    reply = await gateway.ask("PUT", "/api/put", packed, **{"Content-Encoding": "gzip"})
    check(reply, 413, "BODY_TOO_LARGE")
    async with gateway.session.put(f"{gateway.url}/api/put", data=unannounced()) as answer:
        assert answer.status == 413
    check(await gateway.ask("POST", "/api/mount", body), 413, "BODY_TOO_LARGE")
    assert (await gateway.ask("GET", "/api/exist/large")).json == {"exists": False}


async def test_bodies_that_are_packed_or_of_unknown_length(both: Both) -> None:
    gateway = both[0]
    body = json.dumps({"key": "packed", "value": "x" * MB}).encode()
    reply = await gateway.ask(
        "PUT", "/api/put", gzip.compress(body), **{"Content-Encoding": "gzip"}
    )
    assert reply.status == 200
    assert (await gateway.get("packed")).body == b"x" * MB

    async def unannounced() -> AsyncIterator[bytes]:
        yield body.replace(b"packed", b"parted")[: MB // 2]
        yield body[MB // 2 :]

    async with gateway.session.put(f"{gateway.url}/api/put", data=unannounced()) as answer:
        assert answer.status == 200
    assert (await gateway.get("parted")).body == b"x" * MB


@pytest.mark.parametrize("more", [b"", b'"filler": "' + b"x" * MB + b'", '], ids=["small", "large"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'"text"',
        b"[1]",
        b'{%s"key": "k", "value": 1}',
        b'{%s"key": "k", "value": false}',
        b'{%s"key": "k", "value": ["v"]}',
        b'{%s"key": "k", "value": "\\ud800"}',
        b'{%s"key": "k", "value": "\xff"}',
        b'{%s"key": "k", "value": "\\x"}',
        b'{%s"key": "k", "value": "a\nb"}',
        b'{%s"key": "k", "value": "v"',
        b'{%s"key": "k", "value": "v"} {}',
        b'{%s"key": "k", "value" "v"}',
        b'{%s"key": 1, "value": "v"}',
        b'{%s"key": "\\ud800", "value": "v"}',
    ],
)
async def test_put_of_what_is_no_text(both: Both, body: bytes, more: bytes) -> None:
    body = body.replace(b"%s", more)
    reply = await both[0].ask("PUT", "/api/put", body)
    assert reply.status == 400
    assert reply.json["code_name"] in ("BAD_REQUEST", "INVALID_ARGUMENT")


async def test_empty_key_and_value(both: Both) -> None:
    gateway = both[0]
    check(await gateway.put("k", ""), 400, "INVALID_ARGUMENT")
    for method, path in [("GET", "get"), ("GET", "exist"), ("DELETE", "remove")]:
        check(await gateway.ask(method, f"/api/{path}/"), 400, "INVALID_ARGUMENT")


async def test_remove_of_a_missing_and_of_a_leased_key(both: Both) -> None:
    gateway = both[0]
    check(await gateway.ask("DELETE", "/api/remove/no-such"), 404, "OBJECT_NOT_FOUND")
    await gateway.put("leased", "value")
    await gateway.get("leased")
    told = check(await gateway.ask("DELETE", "/api/remove/leased"), 409, "OBJECT_HAS_LEASE")
    assert (told["code"], told["key"], told["retryable"]) == (-706, "leased", True)


async def test_mounts_that_fail(both: Both) -> None:
    gateway = both[0]
    body = {"name": "aiomooncake-no-such", "size": 16 * MB}
    reply = await gateway.ask("POST", "/api/mount_shm", body)
    assert reply.status >= 400
    assert reply.json["code"] < 0
    reply = await gateway.ask("POST", "/api/unmount_shm", {"segment_ids": ["1-2"]})
    told = check(reply, 500, "UNMOUNT_FAILED")
    assert told["failed_segment_ids"] == ["1-2"]


# --- who may ask ---------------------------------------------------------------------------------


async def test_a_token_is_asked_for(session: aiohttp.ClientSession) -> None:
    async with TestServer(make_app("memory://gateway-token", token="s3cret")) as server:
        gateway = Client(session, str(server.make_url("")).rstrip("/"))
        for wrong in (None, "Bearer wrong", "s3cret", "Bearer s3cr\u00e9t"):
            headers = {} if wrong is None else {"Authorization": wrong}
            for method, path in (("GET", "get/k"), ("PUT", "put"), ("POST", "mount")):
                reply = await gateway.ask(method, f"/api/{path}", **headers)
                check(reply, 401, "UNAUTHORIZED")
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert (await gateway.ask("GET", "/healthz")).status == 200
        await gateway.until("/readyz", 200)
        reply = await gateway.ask("GET", "/api/get/k", Authorization="Bearer s3cret")
        check(reply, 404, "OBJECT_NOT_FOUND")


async def test_remove_all_is_off_unless_told(session: aiohttp.ClientSession) -> None:
    async with TestServer(make_app("memory://gateway-all")) as server:
        gateway = Client(session, str(server.make_url("")).rstrip("/"))
        check(await gateway.ask("DELETE", "/api/remove_all"), 403, "REMOVE_ALL_DISABLED")


# --- the cluster ---------------------------------------------------------------------------------


async def test_full_store(
    start_gateway: StartGateway, session: aiohttp.ClientSession, own_cluster: LocalCluster
) -> None:
    program = start_gateway(own_cluster.address, global_segment_size="16mb")
    gateway = Client(session, program.url)
    await gateway.until("/readyz", 200)
    told = check(await gateway.put("k", "x" * (24 * MB)), 507, "NO_AVAILABLE_HANDLE")
    assert (told["code"], told["key"], told["retryable"]) == (-200, "k", True)
    assert (await gateway.put("k", "small")).status == 200


async def test_master_frozen_killed_and_restarted(
    start_gateway: StartGateway, session: aiohttp.ClientSession, own_cluster: LocalCluster
) -> None:
    program = start_gateway(own_cluster.address, global_segment_size="16mb")
    gateway = Client(session, program.url)
    await gateway.until("/readyz", 200)
    await gateway.put("k", "value")
    for stop, back in (
        (own_cluster.pause, own_cluster.resume),
        (own_cluster.kill, own_cluster.start),
    ):
        await gateway.told()
        await stop()
        calls = [
            asyncio.ensure_future(call)
            for call in (
                gateway.get("k"),
                gateway.get("other"),
                gateway.put("new", "value"),
                gateway.ask("GET", "/api/exist/k"),
                gateway.ask("DELETE", "/api/remove/k"),
            )
        ]
        while not all(call.done() for call in calls):
            began = time.monotonic()
            assert (await gateway.ask("GET", "/healthz")).status == 200
            assert time.monotonic() - began < PROMPT
            await asyncio.sleep(0.02)
        for call in calls:
            reply = call.result()
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "1"
            assert reply.json["code"] in (-900, -901)
        reply = await gateway.until_reply(
            "/readyz", lambda it: "does not answer" in it.json["ranks"][0]["store"]["detail"]
        )
        assert (reply.status, reply.json["state"]) == (503, "unavailable")
        assert reply.json["ranks"][0]["store"]["state"] == "master-unreachable"
        began = time.monotonic()
        assert (await gateway.get("k")).status == 503  # it is known now, and told at once
        assert time.monotonic() - began < PROMPT
        await back()
        await gateway.until("/readyz", 200)
        assert (await gateway.put("again", "value")).status == 200
        assert (await gateway.told())["stall"] < PROMPT
    assert (await gateway.get("k")).status == 404  # a new master knows nothing


async def test_before_the_master_is_there(
    start_gateway: StartGateway, session: aiohttp.ClientSession, own_cluster: LocalCluster
) -> None:
    await own_cluster.kill()
    program = start_gateway(own_cluster.address, global_segment_size=0)
    gateway = Client(session, program.url)
    assert (await gateway.ask("GET", "/healthz")).json == {"status": "ok"}
    reply = await gateway.ask("GET", "/readyz")
    assert (reply.status, reply.json["state"]) == (503, "connecting")
    for method, path, body in (
        ("GET", "/api/get/k", None),
        ("GET", "/api/exist/k", None),
        ("PUT", "/api/put", {"key": "k", "value": "v"}),
        ("DELETE", "/api/remove/k", None),
        ("POST", "/api/mount", {"size": MB}),
    ):
        check(await gateway.ask(method, path, body), 503, "NOT_READY")
    await own_cluster.start()
    # Nothing is mounted yet, so it can't warm up, and is told what is missing …
    reply = await gateway.until_reply(
        "/readyz", lambda reply: reply.json["ranks"][0]["attempts"] > 1
    )
    assert (reply.status, reply.json["state"]) == (503, "warming-up")
    assert reply.json["ranks"][0]["last_attempt"] == {
        "step": "put",
        "code": -200,
        "code_name": "NO_AVAILABLE_HANDLE",
    }
    check(await gateway.get("k"), 503, "NOT_READY")
    # … and takes it.
    assert (await gateway.ask("POST", "/api/mount", {"size": 16 * MB})).status == 200
    assert (await gateway.until("/readyz", 200)).json["ready"] is True
    assert (await gateway.put("k", "value")).status == 200

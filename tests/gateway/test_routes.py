"""Our gateway beside the wheel's REST server: the same requests, the same replies."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import pytest

from tests.gateway.clients import MB, Client, Reply

Both = tuple[Client, Client]


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4().hex}"


@pytest.fixture
def shm_name() -> Iterator[str]:
    """A shared-memory object of 16 MB, as the documentation's examples mount it."""
    memory = shared_memory.SharedMemory(create=True, size=16 * MB)
    yield memory.name
    memory.close()
    memory.unlink()


async def ask_both(both: Both, method: str, path: str, body: Any = None) -> Reply:
    """Ask both and find the same reply; ours."""
    ours = await both[0].ask(method, path, body)
    theirs = await both[1].ask(method, path, body)
    assert ours.seen == theirs.seen
    return ours


async def both_refuse(both: Both, method: str, path: str, body: Any = None) -> Reply:
    """Ask both and find the same status and text; ours may tell more."""
    ours = await both[0].ask(method, path, body)
    theirs = await both[1].ask(method, path, body)
    assert (ours.status, ours.headers["Content-Type"]) == (
        theirs.status,
        theirs.headers["Content-Type"],
    )
    assert ours.json["error"] == theirs.json["error"]
    assert {"code", "code_name"} <= ours.json.keys()
    return ours


@pytest.mark.parametrize("value", ["v", "häl\U0001f600lo", 'a"\\\n\x00/', "x" * 4096])
async def test_a_value_stored_by_either_is_read_by_both(both: Both, key: str, value: str) -> None:
    assert (await ask_both(both, "PUT", "/api/put", {"key": key, "value": value})).json == {
        "status": "success"
    }
    reply = await ask_both(both, "GET", f"/api/get/{key}")
    assert reply.body == value.encode()
    assert reply.headers["Content-Type"] == "application/octet-stream"
    assert (await ask_both(both, "GET", f"/api/exist/{key}")).json == {"exists": True}


async def test_a_second_put_keeps_the_first_value(both: Both, key: str) -> None:
    for value in ("first", "second"):
        await ask_both(both, "PUT", "/api/put", {"key": key, "value": value})
    assert (await ask_both(both, "GET", f"/api/get/{key}")).body == b"first"


async def test_misses(both: Both, key: str) -> None:
    reply = await both_refuse(both, "GET", f"/api/get/{key}")
    assert reply.status == 404
    assert (reply.json["code"], reply.json["code_name"]) == (-704, "OBJECT_NOT_FOUND")
    assert (await ask_both(both, "GET", f"/api/exist/{key}")).json == {"exists": False}


@pytest.mark.parametrize("verb", ["get", "exist"])
async def test_head(both: Both, key: str, verb: str) -> None:
    await both[0].put(key, "value")
    ours = await ask_both(both, "HEAD", f"/api/{verb}/{key}")
    assert ours.status == 200
    theirs = await both[1].ask("HEAD", f"/api/{verb}/{key}")
    assert ours.headers["Content-Length"] == theirs.headers["Content-Length"]
    assert (await ask_both(both, "HEAD", "/api/get/nothing")).status == 404


@pytest.mark.parametrize(
    "body",
    [{}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}, {"key": "k", "value": None}],
)
async def test_put_without_key_or_value(both: Both, body: Any) -> None:
    assert (await both_refuse(both, "PUT", "/api/put", body)).status == 400


async def test_members_that_nobody_knows_are_left_alone(both: Both, key: str) -> None:
    body = {"key": key, "ttl": [1, {"a": "}"}], "value": "v"}
    assert (await ask_both(both, "PUT", "/api/put", body)).status == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("a%20b", "a b"),
        ("a+b", "a+b"),
        ("a%2Fb", "a/b"),
        ("a%252Fb", "a%2Fb"),
        ("100%25", "100%"),
        ("h%C3%A4", "hä"),
        ("a%3Fb%23c", "a?b#c"),
        ("a%0Ab", "a\nb"),
        ("a?b=c", "a"),
        ("a:b@c;d=e", "a:b@c;d=e"),
        ("%FF", "%FF"),
    ],
)
async def test_odd_characters_of_keys(both: Both, key: str, path: str, meant: str) -> None:
    await ask_both(both, "PUT", "/api/put", {"key": key + meant, "value": "v"})
    assert (await ask_both(both, "GET", f"/api/get/{key}{path}")).status == 200
    assert (await ask_both(both, "GET", f"/api/exist/{key}{path}")).json == {"exists": True}


@pytest.mark.parametrize("odd", ["a/b", "a//b/", "a{b}", "../a"])
async def test_keys_that_the_peer_can_store_and_not_name(both: Both, key: str, odd: str) -> None:
    await ask_both(both, "PUT", "/api/put", {"key": f"{key}/{odd}", "value": "v"})
    assert (await both[0].get(f"{key}/{odd}")).body == b"v"
    assert (await both[1].get(f"{key}/{odd}")).status == 404


async def test_methods_and_paths_that_are_not_there(both: Both) -> None:
    for method, path in [("POST", "/api/put"), ("PUT", "/api/get/k"), ("GET", "/nothing")]:
        await ask_both(both, method, path, {})


async def test_remove(both: Both, key: str) -> None:
    for client in both:
        await client.put(key, "value")
        reply = await client.ask("DELETE", f"/api/remove/{key}")
        assert reply.seen == (200, "application/json; charset=utf-8", b'{"status": "success"}')
        assert (await client.ask("GET", f"/api/exist/{key}")).json == {"exists": False}


async def test_remove_all(both: Both, key: str) -> None:
    for client in both:
        await client.put(key, "value")
        reply = await client.ask("DELETE", "/api/remove_all")
        assert (reply.status, reply.headers["Content-Type"]) == (
            200,
            "application/json; charset=utf-8",
        )
        assert re.fullmatch(r'{"status": "success removed [1-9]\d* keys"}', reply.body.decode())
        assert (await client.get(key)).status == 404


async def test_mount_and_unmount(both: Both) -> None:
    for client in both:
        body = {"size": 16777216, "protocol": "tcp", "location": ""}
        reply = await client.ask("POST", "/api/mount", body)
        assert reply.status == 200
        assert reply.json.keys() == {"status", "segment_ids", "allocated_size"}
        assert reply.json["allocated_size"] == 16777216
        body = {"segment_ids": reply.json["segment_ids"], "grace_period_seconds": 0}
        reply = await client.ask("POST", "/api/unmount", body)
        assert reply.seen == (200, "application/json; charset=utf-8", b'{"status": "success"}')


async def test_mount_and_unmount_of_shared_memory(both: Both, shm_name: str) -> None:
    for client in both:
        body = {"name": shm_name, "size": 16777216, "offset": 0, "protocol": "tcp", "location": ""}
        reply = await client.ask("POST", "/api/mount_shm", body)
        assert reply.status == 200
        assert reply.json.keys() == {"status", "segment_ids"}
        (segment,) = reply.json["segment_ids"]
        reply = await client.ask("POST", "/api/unmount_shm", {"segment_ids": segment})
        assert reply.seen == (200, "application/json; charset=utf-8", b'{"status": "success"}')


async def test_reconfigure(both: Both, shm_name: str) -> None:
    decode = {"mode": "Decode", "path": f"/dev/shm/{shm_name}", "size": 16 * MB}
    for client in both:
        first = await client.ask("POST", "/api/reconfigure", decode)
        assert first.json.keys() == {"status", "mode", "segment_ids"}
        assert first.json["mode"] == "decode"
        second = await client.ask("POST", "/api/reconfigure", decode)
        assert len(second.json["segment_ids"]) == 1
        assert second.json["segment_ids"] != first.json["segment_ids"]
    for body in ({"mode": "prefill"}, {"mode": "prefill"}):
        reply = await ask_both(both, "POST", "/api/reconfigure", body)
        assert reply.json == {"status": "success", "mode": "prefill"}


async def test_a_switch_that_fails_keeps_what_was_mounted(both: Both, shm_name: str) -> None:
    decode = {"mode": "decode", "path": f"/dev/shm/{shm_name}", "size": 16 * MB}
    for client in both:
        await client.ask("POST", "/api/reconfigure", decode)
        reply = await client.ask("POST", "/api/reconfigure", decode | {"path": "/dev/shm/no-such"})
        assert reply.status >= 400
        assert reply.json["mode"] == "decode"
        await client.ask("POST", "/api/reconfigure", {"mode": "prefill"})


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("mount", {}),
        ("mount", {"size": 0}),
        ("mount", {"size": True}),
        ("mount", {"size": "16"}),
        ("unmount", {}),
        ("unmount", {"segment_ids": []}),
        ("mount_shm", {"size": 1024}),
        ("mount_shm", {"name": "/a/b", "size": 1024}),
        ("mount_shm", {"name": "..", "size": 1024}),
        ("mount_shm", {"name": "name"}),
        ("unmount_shm", {}),
        ("reconfigure", {}),
        ("reconfigure", {"mode": "other"}),
        ("reconfigure", {"mode": "decode", "path": "/dev/shm/x"}),
        ("unmount_local_disk", {"grace_period_seconds": -1}),
        ("unmount_local_disk", {"grace_period_seconds": 3601}),
        ("unmount_local_disk", {"grace_period_seconds": "1"}),
    ],
)
async def test_wrong_fields(both: Both, route: str, body: Any) -> None:
    assert (await both_refuse(both, "POST", f"/api/{route}", body)).status == 400


async def test_unmount_local_disk_without_one(both: Both) -> None:
    body = {"grace_period_seconds": 0}
    assert (await ask_both(both, "POST", "/api/unmount_local_disk", body)).status == 200

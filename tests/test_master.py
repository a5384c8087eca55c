from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake.cluster import LocalCluster
from aiomooncake.master import (
    Segment,
    failure_reason,
    http_get,
    master_health,
    probe_alive,
    probe_tcp,
    segments,
)
from tests.warmup_fakes import HttpMaster, closing_port, free_port, silent_port

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

DETAIL = {
    "total_segments": 1,
    "segments": [
        {
            "segment_name": "127.0.0.1:14258",
            "segment_id": "2180761860903895541-15661330215689998769",
            "client_id": "7586268330948871449-6847392299780434576",
            "base_address": "0x7fc5e7000000",
            "size_bytes": 67108864,
            "size_human": "0.0625 GiB",
            "te_endpoint": "127.0.0.1:16134",
            "protocol": "tcp",
            "status": "OK",
            "allocator_used_bytes": 55574528,
            "allocator_capacity_bytes": 67108864,
            "allocator_usage_percent": 8.28125e1,
        }
    ],
}
"""An answer of the real master (0.3.13.post1)."""


@pytest.fixture
def frozen() -> Iterator[int]:
    with silent_port() as port:
        yield port


# -- probes -------------------------------------------------------------------------------------


async def test_a_probe_of_a_closed_port_names_the_reason() -> None:
    with pytest.raises(OSError, match="failed") as caught:
        await probe_tcp(LOOPBACK, free_port(), 1.0)
    assert failure_reason(caught.value) == "Connection refused"


async def test_a_frozen_process_accepts_but_is_not_alive(frozen: int) -> None:
    await probe_tcp(LOOPBACK, frozen, 1.0)
    with pytest.raises(TimeoutError) as caught:
        await probe_alive(LOOPBACK, frozen, 0.1)
    assert failure_reason(caught.value) == "no answer in time"


async def test_a_server_that_hangs_up_is_alive() -> None:
    async with HttpMaster({}) as server:
        await probe_alive(LOOPBACK, server.port, 1.0)


async def test_a_proxy_with_nothing_behind_it_is_not_alive() -> None:
    async with closing_port() as port:
        await probe_tcp(LOOPBACK, port, 1.0)
        with pytest.raises(ConnectionResetError, match="hangs up at once") as caught:
            await probe_alive(LOOPBACK, port, 1.0)
    assert "hangs up at once" in failure_reason(caught.value)


@pytest.mark.parametrize(
    ("host", "port"), [("x" * 70 + ".example", 80), (LOOPBACK, 0), (LOOPBACK, 65536)]
)
async def test_addresses_that_cannot_exist_are_os_errors(host: str, port: int) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        await probe_tcp(host, port, 1.0)
    assert failure_reason(caught.value)


# -- questions over HTTP ------------------------------------------------------------------------


async def test_get_returns_status_and_body() -> None:
    async with HttpMaster({"/a": (200, b"text")}) as server:
        assert await http_get(LOOPBACK, server.port, "/a", 1.0) == (200, b"text")
        assert (await http_get(LOOPBACK, server.port, "/b", 1.0))[0] == 404


async def test_chunked_answers_are_put_together() -> None:
    raw = CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with HttpMaster({"/": raw}) as server:
        assert await http_get(LOOPBACK, server.port, "/", 1.0) == (200, b"abcde")
    large = 1000 * (b"1000;a=b\r\n" + bytes(4096) + b"\r\n") + b"000\r\nTrailer: x\r\n\r\n"
    async with HttpMaster({"/": CHUNKED + large}) as server:
        assert await http_get(LOOPBACK, server.port, "/", 10.0) == (200, bytes(4096_000))


async def test_an_answer_in_crumbs_is_refused() -> None:
    """The loop stood still for 3 s while 2.6 million chunks of one byte were put together."""
    async with HttpMaster({"/": CHUNKED + 20_000 * b"1\r\nx\r\n" + b"0\r\n\r\n"}) as server:
        with pytest.raises(ConnectionError, match="in more than 4096 chunks"):
            await http_get(LOOPBACK, server.port, "/", 10.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut",
        CHUNKED + b"5\r\ncut",
        CHUNKED + b"3\r\ncut\r\n",
        CHUNKED + b"-3\r\ncut\r\n0\r\n\r\n",
        CHUNKED + 1000 * b"0" + b"\r\n\r\n",
        20_000 * b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + 70_000 * b"a" + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + 90 * (b"A: " + 60_000 * b"a" + b"\r\n") + b"\r\n",
    ],
    ids=lambda raw: f"{raw[:24]!r}-{len(raw)}",
)
async def test_an_answer_that_is_no_whole_http_is_a_connection_error(raw: bytes) -> None:
    async with HttpMaster({"/": raw}) as server:
        with pytest.raises(ConnectionError, match="did not answer GET / in HTTP"):
            await http_get(LOOPBACK, server.port, "/", 1.0)


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    async with HttpMaster({"/": (200, bytes(5000))}) as server:
        with pytest.raises(ConnectionError, match="longer than 1000 bytes"):
            await http_get(LOOPBACK, server.port, "/", 1.0, most=1000)


async def test_paths_are_quoted_once() -> None:
    """One with a letter beyond ASCII was an error about the host, which was right."""
    async with HttpMaster({"/m%C3%A9ta%20x?a=%2F": (200, b"text")}) as server:
        assert await http_get(LOOPBACK, server.port, "/méta%20x?a=%2F", 1.0) == (200, b"text")


async def test_a_silent_server_costs_its_time_limit_and_no_more(frozen: int) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        await http_get(LOOPBACK, frozen, "/health", 0.1)
    assert loop.time() - began < 0.5


async def test_health_is_the_masters_own_word_or_none(frozen: int) -> None:
    standby = {"status": "ok", "role": "standby", "service_ready": False}
    async with HttpMaster({"/health": standby}) as server:
        assert await master_health(LOOPBACK, server.port, 1.0) == standby
    async with HttpMaster({"/health": (200, b"not json")}) as server:
        assert await master_health(LOOPBACK, server.port, 1.0) is None
    async with HttpMaster({"/health": {**standby, "more": "x" * 65536}}) as server:
        assert await master_health(LOOPBACK, server.port, 10.0) is None
    assert await master_health(LOOPBACK, free_port(), 1.0) is None
    assert await master_health(LOOPBACK, frozen, 0.1) is None


async def test_segments_are_listed_with_their_engines_and_room() -> None:
    async with HttpMaster({"/get_segments_detail": DETAIL}) as server:
        (one,) = await segments(LOOPBACK, server.port, 1.0)
    assert one == Segment(
        "127.0.0.1:14258", "127.0.0.1:16134", 67108864, 55574528, status="OK", protocol="tcp"
    )
    assert one.free == 67108864 - 55574528


@pytest.mark.parametrize(
    "answer", [(503, b"standby"), (200, b"[1"), {"segments": [{}]}, {"segments": 3}, {}]
)
async def test_an_unknown_answer_about_segments_is_an_error(answer: Any) -> None:
    async with HttpMaster({"/get_segments_detail": answer}) as server:
        with pytest.raises(ConnectionError, match="get_segments_detail"):
            await segments(LOOPBACK, server.port, 1.0)


# -- the real master ----------------------------------------------------------------------------


async def test_the_real_master_answers_until_it_is_frozen() -> None:
    async with LocalCluster() as cluster:
        host, _, port = cluster.address.rpartition(":")
        metrics = cluster.metrics_port
        await probe_alive(host, int(port), 1.0)
        health = await master_health(host, metrics, 1.0)
        assert health is not None
        assert health["service_ready"] is True
        assert await segments(host, metrics, 1.0) == ()
        with pytest.raises(ConnectionError, match="in HTTP"):
            await http_get(host, int(port), "/health", 1.0)

        await cluster.pause()
        await probe_tcp(host, int(port), 1.0)
        with pytest.raises(TimeoutError):
            await probe_alive(host, int(port), 0.3)
        assert await master_health(host, metrics, 0.3) is None

        await cluster.resume()
        await probe_alive(host, int(port), 2.0)

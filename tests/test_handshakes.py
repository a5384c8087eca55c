"""Connections to peers that do not answer are shut down, and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from aiomooncake.engine.handshakes import break_off


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as server:
        yield server


def place(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ended(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_a_wait_for_a_silent_peer_ends(listener: socket.socket) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(listener.getsockname()[:2]) as waiting,
        socket.create_connection(other.getsockname()) as healthy,
    ):
        assert break_off([place(listener)]) == 1
        assert ended(waiting)
        assert not ended(healthy)
        assert break_off([place(listener)]) == 0


def test_a_knock_goes_on(listener: socket.socket) -> None:
    """It has said that nothing will follow: its own time limit ends it."""
    with socket.create_connection(listener.getsockname()[:2]) as knock:
        knock.shutdown(socket.SHUT_WR)
        assert break_off([place(listener)]) == 0
        assert not ended(knock)


@pytest.mark.parametrize("peer", ["", "nowhere", "127.0.0.1:", "127.0.0.1:port", "[::1:7"])
def test_what_is_no_end_point_is_passed_over(peer: str) -> None:
    assert break_off([peer]) == 0

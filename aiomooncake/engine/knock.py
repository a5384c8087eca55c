"""Knock at a server of the engine, on a thread that may block."""

from __future__ import annotations

import socket
from typing import Final

__all__ = ["answers"]

_TIMEOUT: Final = 1.0


def answers(server: tuple[str, int]) -> bool | None:
    """Tell whether a process reads what it is sent; False if it is frozen, None if it is gone.

    The kernel accepts connections for a frozen process too; see
    :func:`aiomooncake.master.probe_alive`, which does the same for a loop.
    """
    try:
        with socket.create_connection(server, timeout=_TIMEOUT) as probe:
            probe.shutdown(socket.SHUT_WR)
            return not probe.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return None

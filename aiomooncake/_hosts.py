"""What a set-up has to know of this host: its address towards the master, its devices."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final, cast

import anyio

from aiomooncake.errors import ConfigError, rank_label
from aiomooncake.master import failure_reason
from aiomooncake.observe.logs import StoreLog

__all__ = ["check_hostname", "check_rdma", "route_address"]

_RDMA_DEVICES: Final = Path("/sys/class/infiniband")


async def route_address(host: str, port: int) -> str:
    """Find the address of this host on the way to the master; peers can reach it.

    Raises:
        OSError: The name is unknown, or there is no way.
    """
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, _, _, _, address = found[0]
    # Connecting a datagram socket sends nothing; it only picks the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)  # noqa: FBT003  # its only argument
        probe.connect(address)
        return cast("str", probe.getsockname()[0])


async def check_hostname(hostname: str, rank: int | str | None) -> None:
    """Warn of an address by which peers would reach somebody else, or nobody.

    Only warn: in a container the address of the machine around it may be right.
    """
    if hostname.startswith("["):
        host = hostname[1:].partition("]")[0]
    else:
        host = hostname if hostname.count(":") > 1 else hostname.partition(":")[0]
    try:
        found = await anyio.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        family, _, _, _, address = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError as exc:
        StoreLog(rank, "").warning(
            "%slocal_hostname=%r is not an address of this host (%s): peers that are given it "
            "can't reach the memory here, and their calls fail with TRANSFER_FAIL",
            f"[{rank_label(rank)}] " if rank is not None else "",
            hostname,
            failure_reason(exc),
        )


def check_rdma(rank: int | str | None) -> None:
    """Refuse a transport that the engine would quietly replace by another one.

    Raises:
        ConfigError: This host has no RDMA device.
    """
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        raise ConfigError(
            "protocol='rdma', but this host has no RDMA device (/sys/class/infiniband is empty), "
            "and the engine would quietly use TCP: load the driver, or say protocol='tcp'",
            rank=rank,
        )

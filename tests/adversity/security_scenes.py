"""Scenes of :mod:`test_security_engine`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import pytest

import aiomooncake
from aiomooncake import LocalCluster, MooncakeError, NotSupportedError, ReplicateConfig, SetupError
from aiomooncake.testing import FaultProxy
from tests.adversity.processes import Peer

LOOPBACK = ("0100007F", "00000000000000000000000001000000")
KEYS = 12


def as_by_default() -> None:
    """Let the engine log what it does unless it is told otherwise: only what is fatal.

    With ``MC_LOG_LEVEL=ERROR`` it writes keys, and addresses with their passwords.
    """
    os.environ.pop("MC_LOG_LEVEL", None)


def listening(pid: int | str) -> dict[int, str]:
    """List where a process listens: its TCP ports, with the address as the kernel writes it."""
    owned = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            owned.add(str(entry.readlink()))
    found = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in owned:
                host, _, port = columns[1].partition(":")
                found[int(port, 16)] = host
    return found


def everywhere(pid: int | str) -> set[int]:
    return {port for port, host in listening(pid).items() if host not in LOOPBACK}


def who_listens() -> None:
    """Ours listen on loopback only; the engine's transfers do on all interfaces, as documented."""

    async def main() -> None:
        async with LocalCluster() as cluster:
            client = await cluster.start_client(global_segment_size="16mb")
            assert cluster.pid is not None
            assert client.pid is not None
            with FaultProxy(cluster.address) as proxy:
                assert not everywhere("self")
                assert int(proxy.address.partition(":")[2]) in listening("self")
                # Two ports of the engine itself, for which it has no setting: for the hand-shake
                # (IPv4) and for the bytes of values (both families).
                async with aiomooncake.connect(cluster.address, global_segment_size="16mb"):
                    engine = everywhere("self")
                    assert len(engine) == 2, listening("self")
                    assert set(listening("self")) - engine == {int(proxy.address.partition(":")[2])}
            assert not everywhere(cluster.pid)
            assert set(listening(cluster.pid)) == {
                int(cluster.address.partition(":")[2]),
                cluster.metrics_port,
            }
            assert len(everywhere(client.pid)) == 2
            assert int(client.address.partition(":")[2]) not in everywhere(client.pid)

    asyncio.run(main())


def hedging_tells_no_keys() -> None:
    """Reads beside a frozen peer: its address is told, and neither keys nor values."""
    as_by_default()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aiomooncake")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)

    async def main() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, keys=1) as peer:
                async with aiomooncake.connect(
                    cluster.address,
                    global_segment_size="64mb",
                    transfer_timeout=1,
                    master_metrics_port=cluster.metrics_port,
                ) as store:
                    here = ReplicateConfig(preferred_segments=[store.hostname])
                    there = ReplicateConfig(preferred_segments=[peer.hostname])
                    keys = [f"sekret{i}" for i in range(KEYS)]
                    for i, key in enumerate(keys):
                        await store.put(key, b"sekret" * 99, config=here if i else there)
                    peer.freeze()
                    answers = await asyncio.gather(*map(store.get, keys), return_exceptions=True)
                    assert isinstance(answers[0], MooncakeError)
                    assert answers[1:] == [b"sekret" * 99] * (KEYS - 1)
                    await asyncio.gather(*map(store.get, keys), return_exceptions=True)
                    assert "sekret" not in repr(store.health())

    asyncio.run(main())
    assert any("does not answer" in line for line in lines), lines
    assert not [line for line in lines if "sekret" in line]


def kinds_of_metadata_servers() -> None:
    """One that the wheel was built without is refused; the engine would end the process."""
    as_by_default()

    async def main() -> None:
        async with LocalCluster() as cluster:
            for url in ("redis://user:sekret@127.0.0.1:1", "http://user:sekret@127.0.0.1:1/x"):
                with pytest.raises((NotSupportedError, SetupError)) as refused:
                    await aiomooncake.connect(cluster.address, metadata_server=url, timeout=2)
                assert "sekret" not in f"{refused.value} {refused.value!r}"

    asyncio.run(main())

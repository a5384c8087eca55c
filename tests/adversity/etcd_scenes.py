"""Scenes of :mod:`tests.test_etcd`: a close takes 30 s there, which a process need not wait for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from typing import Any

import pytest

from aiomooncake import MooncakeError, SetupError, connect
from aiomooncake._programs import find_program
from aiomooncake.master import master_health
from aiomooncake.testing import LoopStallProbe
from tests.warmup_fakes import free_port

VALUE = os.urandom(100_000)
STALL = 1.0
SMALL: dict[str, Any] = {"global_segment_size": "16mb", "local_buffer_size": "16mb"}


class Masters:
    """Masters of which etcd makes one the leader."""

    def __init__(self, etcd: str) -> None:
        self._etcd = etcd
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        metrics = free_port()
        self._running[metrics] = subprocess.Popen(
            [
                str(find_program("mooncake_master", None)),
                "--enable_ha=true",
                "--ha_backend_type=etcd",
                f"--ha_backend_connstring={self._etcd}",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={free_port()}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                "--client_ttl=3",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def leader(self) -> int:
        """Wait for a leader that serves; return its metrics port."""
        deadline = time.monotonic() + 30
        while True:
            for port in self._running:
                health = await master_health("127.0.0.1", port, 1.0)
                if health is not None and health.get("service_ready"):
                    return port
            assert time.monotonic() < deadline, "no master became the leader"
            await asyncio.sleep(0.05)

    def kill(self, port: int) -> None:
        process = self._running.pop(port)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for port in tuple(self._running):
            self.kill(port)


async def no_master_yet(etcd: str) -> None:
    with pytest.raises(SetupError, match="etcd://"):
        await connect(f"etcd://{etcd}", local_hostname="127.0.0.1", timeout=15, **SMALL)


def follow_the_leader(etcd: str) -> None:
    """A store finds the leader, and the one that takes over; keys of the first are gone."""

    async def main() -> None:
        await no_master_yet(etcd)
        masters = Masters(etcd)
        try:
            masters.start()
            await masters.leader()
            masters.start()
            async with LoopStallProbe() as probe:
                await takes_over(masters, f"etcd://{etcd}")
            assert probe.longest < STALL, probe.stalls()
        finally:
            masters.kill_all()

    asyncio.run(main())
    # Closing takes the engine up to 30 s, which is the wait of its watch over the leader.
    os._exit(0)


async def takes_over(masters: Masters, address: str) -> None:
    options = {"local_hostname": "127.0.0.1", "timeout": 20, **SMALL}
    store = await connect(address, **options)
    other = await connect(address, **options)  # in one process: by the same text
    await store.put("k", VALUE)
    assert await other.get("k") == VALUE
    masters.kill(await masters.leader())
    with pytest.raises(MooncakeError):
        await store.get("k")  # not a miss
    began = time.monotonic()
    while True:
        try:
            await store.put("k2", VALUE)
            break
        except MooncakeError:
            assert time.monotonic() - began < 30, "nobody took over"
            await asyncio.sleep(0.2)
    assert await other.get("k2") == VALUE
    assert await store.get("k") is None  # without --enable_oplog the new one begins empty
    assert store.health().ok

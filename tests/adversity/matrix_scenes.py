"""The staging of the faults of :mod:`tests.adversity.matrix`: each scene has an interpreter.

The time-outs are short: one second for transfers, and half a second for requests where the master
or the line to it is what fails.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from aiomooncake import LocalCluster, NoSpaceError, ReplicateConfig, Store
from aiomooncake.testing import FaultProxy
from tests.adversity.exit_scenes import open_store
from tests.adversity.matrix_calls import value_of
from tests.adversity.matrix_stage import Stage, until
from tests.adversity.processes import Peer

MB: Final = 1 << 20
OPTIONS: Final[dict[str, Any]] = {
    "global_segment_size": 128 * MB,
    "rpc_timeout": 5,  # transfers that are stuck spin, and a healthy master may take its time
    "transfer_timeout": 1,
    "timeout": 20,
}
SHORT: Final[dict[str, Any]] = {"rpc_timeout": 0.5, "rpc_connect_timeout": 0.5}


@asynccontextmanager
async def staged(address: str, **options: Any) -> AsyncIterator[Stage]:
    """Open the store of a stage, and close it when the faults are over."""

    async def opened(**more: Any) -> Store:
        return await open_store(address, **{**OPTIONS, **options, **more})

    stage = Stage(await opened(), lambda: opened(global_segment_size=0))
    yield stage
    await stage.finish()


# --- the master -------------------------------------------------------------------------------


def frozen_master() -> None:
    """A master that stands still, before and after it was noticed."""

    async def scene() -> None:
        async with LocalCluster() as cluster, staged(cluster.address, **SHORT) as stage:
            await stage.prepare("frozen", "away")
            await cluster.pause()
            await stage.run("frozen", side_by_side=True)
            await stage.remove_all("frozen")
            await stage.run("away")
            await stage.remove_all("away")
            await cluster.resume()
            await stage.recover("frozen", "away")

    asyncio.run(scene())


def killed_master() -> None:
    """A master that dies, and another one at the same address."""

    async def scene() -> None:
        async with LocalCluster() as cluster, staged(cluster.address, **SHORT) as stage:
            await stage.prepare("killed", "away", "restarted", "settled")
            await cluster.kill()
            await stage.run("killed", side_by_side=True)
            await stage.remove_all("killed")
            await stage.run("away")
            await stage.remove_all("away")
            await cluster.start()
            await stage.run("restarted", side_by_side=True)
            await stage.remove_all("restarted")
            await stage.recover("killed", "away", "restarted")
            await stage.run("settled")
            await stage.remove_all("settled")
            await stage.recover("settled")

    asyncio.run(scene())


# --- the line to it ---------------------------------------------------------------------------


def bad_lines() -> None:
    """A proxy between the store and the master, which others reach directly."""

    async def scene() -> None:
        async with (
            LocalCluster() as cluster,
            await open_store(cluster.address, global_segment_size=256 * MB),
        ):
            for fault in (slow, cut, corrupt):
                with FaultProxy(cluster.address) as line:
                    async with staged(line.address, global_segment_size=0, **SHORT) as stage:
                        await fault(stage, line)

    async def slow(stage: Stage, line: FaultProxy) -> None:
        await stage.prepare("slow")
        line.delay(0.05)
        await stage.run("slow", side_by_side=True)
        await stage.remove_all("slow")
        line.heal()
        await stage.recover("slow")

    async def cut(stage: Stage, line: FaultProxy) -> None:
        """In the midst of requests, and before them."""
        await stage.prepare("cut")
        line.delay(0.01)

        async def again_and_again() -> None:
            for _ in range(10):
                line.cut()
                await asyncio.sleep(0.015)

        cutting = asyncio.ensure_future(again_and_again())
        await stage.run("cut", side_by_side=True)
        await cutting
        line.cut()
        await stage.remove_all("cut")
        line.heal()
        await stage.recover("cut")

    async def corrupt(stage: Stage, line: FaultProxy) -> None:
        """The first byte of a request, on each connection: no server takes that for one."""
        await stage.prepare("corrupt")
        line.corrupt(at=0, towards="server")
        await stage.run("corrupt", side_by_side=True)
        await stage.remove_all("corrupt")
        line.heal()
        await stage.recover("corrupt")

    asyncio.run(scene())


# --- who holds the value ----------------------------------------------------------------------


def frozen_owner() -> None:
    """The peer that holds the values stands still, before and after it was noticed."""

    async def scene() -> None:
        async with LocalCluster(client_ttl=60) as cluster:
            with Peer(cluster.address, segment=256 * MB) as peer:
                onto_it = ReplicateConfig(preferred_segments=(peer.hostname,))
                port = cluster.metrics_port
                async with staged(cluster.address, master_metrics_port=port) as stage:
                    await stage.prepare("owner-frozen", "owner-avoided", config=onto_it)
                    peer.freeze()
                    await stage.run("owner-frozen", config=onto_it, side_by_side=True)
                    await stage.run("owner-avoided")
                    await stage.remove_all("owner-frozen")
                    await stage.store.put("one more", b"value")
                    await stage.remove_all("owner-avoided")
                    peer.thaw()
                    await stage.recover("owner-frozen", "owner-avoided")

    asyncio.run(scene())


def killed_owner() -> None:
    """The peer that holds the values dies, and its segment expires."""

    async def scene() -> None:
        async with LocalCluster(client_ttl=15, lease_ttl=60) as cluster:
            with Peer(cluster.address, segment=256 * MB) as peer:
                onto_it = ReplicateConfig(preferred_segments=(peer.hostname,))
                port = cluster.metrics_port
                async with staged(cluster.address, master_metrics_port=port) as stage:
                    await stage.prepare("owner-killed", "owner-expired", config=onto_it)
                    await stage.lease("owner-expired")  # so that they are not removed, but expire
                    peer.kill()
                    await stage.run("owner-killed", config=onto_it, side_by_side=True)
                    await stage.remove_all("owner-killed")
                    await stage.recover("owner-killed")
                    await stage.run("owner-expired")
                    await stage.remove_all("owner-expired")
                    await stage.recover("owner-expired")

    asyncio.run(scene())


# --- room -------------------------------------------------------------------------------------


def held_buffer_and_leases() -> None:
    """A local buffer that is held to the last byte, and keys that somebody reads."""

    async def scene() -> None:
        async with (
            LocalCluster(lease_ttl=30) as cluster,
            staged(cluster.address, local_buffer_size=8 * MB) as stage,
        ):
            await stage.prepare("buffer")
            store = stage.store
            for number in range(8):
                await store.put(f"held{number}", bytes(MB - 4096))
            held = [await store.engine.get_buffer(f"held{number}") for number in range(8)]
            assert all(held)
            assert await store.engine.get("held0") == b"", "there is room left"
            await stage.run("buffer")
            await stage.remove_all("buffer")
            held.clear()
            await stage.recover("buffer")
            await stage.prepare("leased")
            await stage.lease("leased")
            await stage.run("leased")
            await stage.remove_all("leased")
            await stage.recover("leased")

    asyncio.run(scene())


def full_segment() -> None:
    """Values that can't be evicted, to the last byte."""

    async def scene() -> None:
        pinned = ReplicateConfig(with_hard_pin=True)
        async with LocalCluster() as cluster, staged(cluster.address) as stage:
            await stage.prepare("full", config=pinned)
            for nbytes in (MB, MB >> 4, 4096, 64):
                with suppress(NoSpaceError):
                    for number in range(1000):
                        key = f"fill/{nbytes}/{number}"
                        await stage.store.put(key, value_of(key, nbytes), config=pinned)
            await stage.run("full")
            await stage.remove_all("full")
            await stage.recover("full")

    asyncio.run(scene())


def evicting_segment() -> None:
    """Somebody stores more and more, and the oldest values give way."""

    async def scene() -> None:
        async with LocalCluster(lease_ttl=0.1) as cluster, staged(cluster.address) as stage:
            await stage.prepare("evicting")
            store = stage.store

            async def store_more() -> None:
                number = 0
                while True:
                    number += 1
                    with suppress(NoSpaceError):
                        await store.put(f"more{number}", bytes(MB))
                    await asyncio.sleep(0.002)

            storing = asyncio.ensure_future(store_more())
            await until(lambda: store.stats().bytes_written > 3 * OPTIONS["global_segment_size"])
            await stage.run("evicting")
            await stage.remove_all("evicting")
            storing.cancel()
            with suppress(asyncio.CancelledError):
                await storing
            await stage.recover("evicting")

    asyncio.run(scene())


# --- the client itself ------------------------------------------------------------------------


def frozen_client() -> None:
    """The process of the store stands still for longer than the master waits for it."""

    async def scene() -> None:
        async with LocalCluster(client_ttl=1) as cluster:
            with Peer(cluster.address, segment=256 * MB) as peer:
                async with staged(cluster.address) as stage:
                    mine = ReplicateConfig(preferred_segments=(stage.store.hostname,))
                    onto_peer = ReplicateConfig(preferred_segments=(peer.hostname,))
                    await stage.prepare("thawed", config=mine)
                    await stage.prepare("thawed-peer", config=onto_peer)
                    await freeze_this_process(4)
                    await stage.run("thawed", config=mine)
                    await stage.run("thawed-peer", config=onto_peer)
                    await stage.remove_all("thawed")
                    await stage.store.put("one more", b"value")
                    await stage.remove_all("thawed-peer")
                    await stage.recover("thawed", "thawed-peer")

    asyncio.run(scene())


async def freeze_this_process(seconds: int) -> None:
    """Stand still, and go on when the time is over."""
    code = (
        "import os, signal, sys, time; parent = os.getppid(); os.kill(parent, signal.SIGSTOP); "
        "time.sleep(float(sys.argv[1])); os.kill(parent, signal.SIGCONT)"
    )
    sleep = [sys.executable, "-c", code, str(seconds)]
    await asyncio.to_thread(subprocess.run, sleep, check=True, timeout=30)

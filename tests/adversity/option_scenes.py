"""Scenes of :mod:`tests.test_options`: each runs in an interpreter of its own.

Where an option is wrong the engine may end the process, and what it reads from the environment it
reads once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import mooncake.engine
import pytest

import aiomooncake
from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    NoSpaceError,
    NotSupportedError,
    ReplicateConfig,
    SetupError,
    SetupTimeoutError,
    Store,
)
from aiomooncake.testing import LoopStallProbe

KB, MB = 1 << 10, 1 << 20
SIZES: dict[str, Any] = {"global_segment_size": 32 * MB, "local_buffer_size": 4 * MB}


async def connect(address: str, **options: Any) -> Store:
    return await aiomooncake.connect(address, **{"timeout": 20, **SIZES, **options})


async def refused(kind: type[Exception], address: str, **options: Any) -> str:
    """Expect that a connect is refused at once; the error's text."""
    began = time.monotonic()
    try:
        store = await connect(address, **options)
    except kind as exc:
        assert time.monotonic() - began < 10
        return str(exc)
    raise AssertionError(f"{store} was opened with {options}")


def offload_to_disk(folder: str) -> None:
    """Values reach the directory, are read from there, and leaving does not stop the loop."""

    async def main() -> None:
        value = os.urandom(MB)
        async with LocalCluster(lease_ttl=0.1, extra_args=["--enable_offload=true"]) as master:
            store = await connect(master.address, enable_ssd_offload=True, ssd_offload_path=folder)
            keys = [f"key-{i}" for i in range(10)]
            await store.put_many(dict.fromkeys(keys, value))
            deadline = time.monotonic() + 20
            while not all("local_disk" in kinds for kinds in await kinds_of(store, keys)):
                assert time.monotonic() < deadline, "nothing was offloaded"
                await asyncio.sleep(0.05)
            assert bytes_in(folder) >= 10 * MB
            # Three times what the memory holds: the master lets go of copies there.
            stored, deadline = 0, time.monotonic() + 40
            while stored < 100:
                assert time.monotonic() < deadline, f"nothing was evicted: {stored} stored"
                try:
                    await store.put(f"filler-{stored}", value)
                    stored += 1
                except NoSpaceError:
                    await asyncio.sleep(0.05)  # the master evicts in rounds of its own
            on_disk = [
                key
                for key, kinds in zip(keys, await kinds_of(store, keys), strict=True)
                if kinds == {"local_disk"}
            ]
            assert on_disk, "all values are still in memory"
            assert await store.get(on_disk[0]) == value
            assert await store.get_many(keys) == [value] * 10
            assert await store.size(on_disk[0]) == MB
            async with LoopStallProbe() as probe:
                await store.aclose(timeout=30)
                del store
                gc.collect()
            # The storage's thread, which sleeps for 3 s at a time, is joined.
            assert probe.longest < 1, probe.stalls()

    asyncio.run(main())


def bytes_in(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


async def kinds_of(store: Store, keys: list[str]) -> list[set[str]]:
    return [{each.kind for each in found} for found in await store.replicas_many(keys)]


def offload_without_a_place(folder: str) -> None:
    """The engine's C++ code throws for each of these, and nobody could catch it."""
    file, link = Path(folder, "file"), Path(folder, "link")
    file.touch()
    link.symlink_to(folder)

    async def main() -> None:
        async with LocalCluster(extra_args=["--enable_offload=true"]) as master:
            bad = (f"{folder}/missing", file, link, "relative", f"{folder}/../{file.parent.name}")
            for path in (*map(str, bad), ""):
                text = await refused(
                    ConfigError, master.address, enable_ssd_offload=True, ssd_offload_path=path
                )
                assert "ssd_offload_path" in text, text
            for name, value in (
                ("MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT", "0"),
                ("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "0"),
                ("MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.95"),
            ):
                os.environ[name] = value
                text = await refused(
                    ConfigError, master.address, enable_ssd_offload=True, ssd_offload_path=folder
                )
                assert name in text, text
                del os.environ[name]
        async with LocalCluster() as master:
            text = await refused(
                SetupError, master.address, enable_ssd_offload=True, ssd_offload_path=folder
            )
            assert "--enable_offload=true" in text, text
            async with await connect(master.address) as store:
                # The segment of the client that was refused may be listed for a moment.
                here = ReplicateConfig(preferred_segments=[store.hostname])
                await store.put("key", b"value", config=here)

    asyncio.run(main())


def share_an_engine() -> None:
    """Two stores on one transfer engine; it belongs to its owner, and outlives both."""

    async def main() -> None:
        shared = mooncake.engine.TransferEngine()
        assert shared.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        endpoint = f"127.0.0.1:{shared.get_rpc_port()}"
        async with LocalCluster() as master:
            await (await connect(master.address)).aclose()  # what only the first one costs
            async with LoopStallProbe() as probe:
                one = await connect(master.address, transfer_engine=shared)
            assert probe.longest < 0.5, probe.stalls()
            two = await connect(master.address, transfer_engine=shared)
            assert one.hostname != two.hostname
            for holder, reader in ((one, two), (two, one)):
                for size in (4 * KB, 9 * MB):
                    key, value = f"{holder.hostname}-{size}", os.urandom(size)
                    there = ReplicateConfig(preferred_segments=[holder.hostname])
                    await reader.put(key, value, config=there)
                    assert await reader.get(key) == await holder.get(key) == value
                    assert [each.endpoint for each in await one.replicas(key)] == [endpoint]
            async with LoopStallProbe() as probe:
                await one.aclose()
            assert probe.longest < 0.5, probe.stalls()
            key = f"{two.hostname}-{9 * MB}"
            assert len(await two.get(key) or b"") == 9 * MB
            await two.aclose()
            assert shared.get_rpc_port() == int(endpoint.rpartition(":")[2])
            async with await connect(master.address, transfer_engine=shared) as three:
                await three.put("again", b"value")
                assert await three.get("again") == b"value"
            await master.pause()
            async with LoopStallProbe() as probe:
                await refused(SetupTimeoutError, master.address, transfer_engine=shared, timeout=1)
            assert probe.longest < 0.5, probe.stalls()
            await master.resume()
            text = await refused(InvalidArgumentError, master.address, transfer_engine="engine")
            assert "takes a mooncake.engine.TransferEngine, not str" in text, text
            fresh = mooncake.engine.TransferEngine()
            text = await refused(InvalidArgumentError, master.address, transfer_engine=fresh)
            assert "was not initialised" in text, text

    asyncio.run(main())


def ask_for_too_much_memory() -> None:
    """The engine throws ``std::bad_alloc`` for a local buffer that it can't get."""

    async def main() -> None:
        async with LocalCluster() as master:
            resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
            text = await refused(ConfigError, master.address, local_buffer_size="100gb")
            assert "local_buffer_size asks for 107374182400 bytes" in text, text
            os.environ["MC_STORE_USE_HUGEPAGE"] = "1"
            text = await refused(ConfigError, master.address, local_buffer_size="60gb")
            assert "huge pages" in text, text
            del os.environ["MC_STORE_USE_HUGEPAGE"]
            async with await connect(master.address) as store:
                await store.put("key", b"value")

    asyncio.run(main())


def ask_an_old_wheel(version: str) -> None:
    """What the wheel does not know is refused before it is set up; what it knows is not."""
    assert "site-packages" not in str(mooncake.engine.__file__), sys.path

    async def main() -> None:
        async with LocalCluster() as master:  # the old one's too
            for options in (
                {"tenant_id": "red"},
                {"enable_client_http_server": True},
                {"tenant_id": "red", "direct": False},
            ):
                text = await refused(NotSupportedError, master.address, **options)
                assert f"is not known to engine {version}" in text, text
                assert "install 0.3.12.post1 or newer" in text, text
            text = await refused(
                ConfigError, master.address, enable_ssd_offload=True, ssd_offload_path="/missing"
            )
            assert "/missing" in text, text
            async with await connect(master.address) as store:
                pinned = ReplicateConfig(soft_pin_action="enable", with_hard_pin=True)
                await store.put("key", b"value", config=pinned)
                (replica,) = await store.replicas("key")
                assert (replica.kind, replica.status, replica.size) == ("memory", "complete", 5)
                assert await store.replicas("missing") == ()
                with pytest.raises(NotSupportedError, match="group_ids is not known to engine"):
                    await store.put("other", b"value", config=ReplicateConfig(group_ids=["red"]))

    asyncio.run(main())

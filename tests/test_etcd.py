"""etcd, a real one: as metadata server, and as coordinator of masters that take over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiomooncake import LocalCluster, ReplicateConfig, connect_ranks
from aiomooncake.master import probe_tcp
from aiomooncake.testing import LoopStallProbe
from tests.adversity.etcd_scenes import SMALL, STALL, VALUE, follow_the_leader
from tests.adversity.processes import run_scene
from tests.warmup_fakes import free_port

_FETCHED = Path(__file__).parent.parent / ".etcd"
"""Where scripts/test puts it."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """An etcd on loopback, without anything in it: its ``host:port``."""
    program = shutil.which("etcd") or shutil.which("etcd", path=_FETCHED)
    if program is None:
        what = "these tests need etcd: run scripts/test, or put it on the PATH"
        if os.environ.get("CI"):
            pytest.fail(what)
        pytest.skip(what)
    port = free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program,
            f"--data-dir={folder}/data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                asyncio.run(_listens(port))
                yield f"127.0.0.1:{port}"
            finally:
                process.kill()


async def _listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError):
            await probe_tcp("127.0.0.1", port, 1.0)
            return
        assert time.monotonic() < deadline, "etcd does not listen"
        await asyncio.sleep(0.02)


async def test_stores_find_each_other(etcd: str) -> None:
    dead = f"127.0.0.1:{free_port()}"
    options = {"metadata_server": f"etcd://{etcd};{dead}", "timeout": 30, **SMALL}
    async with LocalCluster() as cluster, LoopStallProbe() as probe:
        group = await connect_ranks(cluster.address, 2, **options)
        there = ReplicateConfig(preferred_segments=[group[1].hostname])
        await group[0].put("ab", VALUE, config=there)
        assert await group[0].get("ab") == VALUE
        await group.warmup()
        await group.aclose()
    assert probe.longest < STALL, probe.stalls()


@pytest.mark.timeout(90)
def test_a_store_follows_the_leader(etcd: str) -> None:
    run_scene(follow_the_leader, etcd, timeout=80).check(within=70)

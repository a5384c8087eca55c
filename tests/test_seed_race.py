"""The race this library was made for: the first put comes before the first segment.

SGLang's Mooncake backend put one probe value at start-up and asserted that it was stored. On some
tensor-parallel ranks the engine was not ready yet, the assert failed, and the scheduler was gone.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiomooncake
from aiomooncake import LocalCluster, WarmupPolicy
from tests.adversity import seed_scenes as scenes
from tests.adversity.processes import run_scene
from tests.adversity.seed_scenes import NOT_READY, SEGMENT


def test_the_original_probe_dies_of_it(own_cluster: LocalCluster) -> None:
    ended = run_scene(scenes.original, own_cluster.address).check(within=10, code=1)
    assert "AssertionError: the engine was not ready" in ended.err


def test_an_adopted_store_is_warmed_up_by_one_line(own_cluster: LocalCluster) -> None:
    ended = run_scene(scenes.ours, own_cluster.address).check(within=15)
    assert "[TP3] Warmup put failed (attempt 1), ret=-200 NO_AVAILABLE_HANDLE" in ended.err


@pytest.mark.parametrize("policy", [None, WarmupPolicy.sglang()])
async def test_a_warm_up_waits_for_the_first_segment(
    own_cluster: LocalCluster, caplog: pytest.LogCaptureFixture, policy: WarmupPolicy | None
) -> None:
    caplog.set_level(logging.WARNING, "aiomooncake")
    async with aiomooncake.connect(
        own_cluster.address, rank=3, global_segment_size=0, local_buffer_size=16 << 20
    ) as store:
        with pytest.raises(aiomooncake.NoSpaceError):
            await store.put("too early", b"v")
        mounted = asyncio.Event()

        async def mount() -> None:
            await mounted.wait()
            assert await store.engine.allocate_and_mount_segment(SEGMENT)

        mounting = asyncio.ensure_future(mount())
        report = await store.warmup(policy, on_attempt=lambda _: mounted.set())
        await mounting
        assert report.attempts[0].code == NOT_READY
        assert report.attempts[-1].ok
        await store.put("in time", b"v")
    first = caplog.messages[0]
    assert first.startswith("[TP3] Warmup put failed (attempt 1), ret=-200 NO_AVAILABLE_HANDLE")

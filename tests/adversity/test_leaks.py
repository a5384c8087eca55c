"""Stores that are opened and closed again leave nothing behind."""

from __future__ import annotations

from aiomooncake import LocalCluster
from tests.adversity import call_scenes as scenes
from tests.adversity.processes import run_scene


def test_twenty_stores_leave_threads_descriptors_and_memory_as_they_were(
    own_cluster: LocalCluster,
) -> None:
    run_scene(scenes.open_and_close, own_cluster.address, 5, 4).check(within=30)

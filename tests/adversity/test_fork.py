"""Forked children of a process with stores: refused at once, and they end normally."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiomooncake import LocalCluster
from tests.adversity import exit_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.fork_idle,
        scenes.fork_under_calls,
        scenes.fork_in_a_loop,
        scenes.fork_while_closing,
        scenes.fork_after_import,
        scenes.multiprocess,
    ],
)
def test_children_end_normally(own_cluster: LocalCluster, scene: Callable[[str], None]) -> None:
    run_scene(scene, own_cluster.address).check(within=20)

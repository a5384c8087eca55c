"""No sequence of calls crashes the process or hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiomooncake import LocalCluster
from tests.adversity import call_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.before_and_after,
        scenes.closed_by_its_owner,
        scenes.close_under_calls,
        scenes.cancelled_connects,
        scenes.cancelled_close,
        scenes.dropped,
        scenes.other_loops,
    ],
)
def test_ends_normally(own_cluster: LocalCluster, scene: Callable[[str], None]) -> None:
    ended = run_scene(scene, own_cluster.address).check(within=25)
    assert "Traceback" not in ended.err, ended.err

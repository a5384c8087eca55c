"""Peers and masters that stand still (SIGSTOP): calls fail in time, and nothing is written late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adversity import frozen_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.read_and_write,
        scenes.read_many,
        scenes.write_nothing_late,
        scenes.close_under_a_stuck_call,
        scenes.close_on_a_frozen_master,
    ],
)
@pytest.mark.timeout(90)  # a batch of 100 keys takes 25 s
def test_ends_in_time(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=80).check(within=60)

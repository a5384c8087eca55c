"""A peer that stands still (SIGSTOP) beside healthy ones: it costs only the keys that it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adversity import hedging_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene", [scenes.own_keys, scenes.keys_of_a_healthy_peer, scenes.again_and_again]
)
@pytest.mark.timeout(60)
def test_healthy_keys_do_not_wait_for_a_frozen_peer(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=50).check(within=40)

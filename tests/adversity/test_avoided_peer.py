"""A peer that does not answer is avoided until it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adversity import peer_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.a_frozen_peer_is_avoided,
        scenes.a_peer_that_was_frozen_all_along,
        scenes.a_dead_peer_is_forgotten,
        scenes.raw_reads_avoid_a_frozen_peer,
        scenes.raw_calls_on_a_peer_that_was_frozen_all_along,
    ],
)
@pytest.mark.timeout(90)
def test_it_ends_well(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=80).check(within=60)

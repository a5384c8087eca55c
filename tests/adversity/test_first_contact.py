"""A peer that froze or died before the first transfer to it: large values fail in time, truly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adversity import first_contact_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.frozen_read,
        scenes.frozen_read_without_metrics,
        scenes.frozen_tensor_without_metrics,
        scenes.two_frozen_peers,
        scenes.frozen_write,
        scenes.killed,
    ],
)
@pytest.mark.timeout(90)
def test_ends_in_time(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=80).check(within=60)

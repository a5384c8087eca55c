"""What the real engine shows and where it listens, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adversity import security_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [scenes.who_listens, scenes.hedging_tells_no_keys, scenes.kinds_of_metadata_servers],
)
def test_is_kept(scene: Callable[[], None]) -> None:
    ended = run_scene(scene).check(within=25)
    assert "Traceback" not in ended.err, ended.err
    assert "sekret" not in ended.out + ended.err

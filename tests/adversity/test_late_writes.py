"""Nothing that the transport writes late, after a call has ended, is seen by anybody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adversity import late_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.timeout(150)  # each takes 70 s, since the engine's limit is 60 s and can't be set
def test_no_late_write_is_seen() -> None:
    """Under the engine's own time-outs, where the binding alone lets memory be overwritten."""
    staged: tuple[tuple[Callable[[], None], dict[str, str]], ...] = (
        (scenes.bare, scenes.ENGINE_DEFAULTS),
        (scenes.forced, scenes.ENGINE_DEFAULTS),
        (scenes.bounded, {}),
    )
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(run_scene, scene, timeout=120, **environ) for scene, environ in staged]
    for scene in ended:
        scene.result().check(within=110)

"""Worker processes: those that open a store after the fork, and those that inherit an open one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiomooncake import LocalCluster
from tests.adversity import worker_scenes as scenes
from tests.adversity.processes import run_scene


@pytest.mark.parametrize(
    "scene",
    [
        scenes.start_methods,
        scenes.start_methods_of_an_open_parent,
        scenes.ends_of_workers,
        scenes.daemons_of_a_parent_that_opens_later,
        scenes.fork_of_a_fork,
        scenes.fork_of_a_store_in_memory,
    ],
)
def test_workers_of_multiprocessing(
    own_cluster: LocalCluster, scene: Callable[[str], None]
) -> None:
    run_scene(scene, own_cluster.address).check(within=35)


@pytest.mark.parametrize(
    ("app", "worker_class", "answer"),
    [
        ("opened_in_the_worker()", "sync", "5"),
        ("opened_by_aiohttp()", "aiohttp.GunicornWebWorker", "5"),
        ("opened_before_the_fork()", "sync", "refused: "),
    ],
)
def test_workers_of_gunicorn_that_preloads(
    own_cluster: LocalCluster, app: str, worker_class: str, answer: str
) -> None:
    """A store that was opened before the fork is refused at once, with a text that tells why."""
    ended = run_scene(scenes.serve_by_gunicorn, own_cluster.address, app, worker_class, answer)
    ended.check(within=35)
    *closed, code = ended.out.splitlines()
    assert code == "ended with 0"
    assert closed == (["closed"] * 2 if "aiohttp" in app else [])
    for slip in ("Traceback", "Fatal", "terminate", "destroyed", "never"):
        assert slip not in ended.err, ended.err

"""Dummy clients whose stand-alone client dies, freezes or comes back, and ends beside one."""

from __future__ import annotations

import sys

import pytest

from tests.adversity import dummy_scenes as scenes
from tests.adversity.processes import run_scene
from tests.adversity.test_exit import GRACE, SLACK

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the wheel's servers exist for Linux only"
)

# Two clients and a master are started by each scene.
START = 4.0


@pytest.mark.timeout(120)
def test_a_process_that_is_frozen_for_long() -> None:
    run_scene(scenes.frozen_for_long, timeout=100).check(within=90)


def test_a_process_that_takes_us_for_dead() -> None:
    run_scene(scenes.stood_still).check(within=40)


@pytest.mark.parametrize("pool", [0, 4 << 20])
def test_nothing_crashes_and_no_value_is_wrong(pool: int) -> None:
    run_scene(scenes.storm, 9, pool, timeout=100).check(within=90)


@pytest.mark.parametrize("code", [0, 7])
def test_an_idle_store_costs_no_time_at_exit(code: int) -> None:
    ended = run_scene(scenes.leave_idle, code).check(within=SLACK + START, code=code)
    assert ended.out == "to be flushed"


def test_exit_beside_a_process_that_is_gone() -> None:
    run_scene(scenes.leave_gone).check(within=SLACK + START)


@pytest.mark.parametrize(("calls", "thaw"), [(0, ""), (4, ""), (4, "thaw")])
def test_exit_beside_a_frozen_process(calls: int, thaw: str) -> None:
    ended = run_scene(scenes.leave_frozen, calls, thaw).check(within=GRACE + SLACK + START)
    assert ("exists" in ended.err) == bool(calls)
    assert ended.out == ("thawed" if thaw else "")


def test_exit_beside_blocking_calls_that_come_back() -> None:
    ended = run_scene(scenes.leave_blocking_calls_stuck, 4).check(within=GRACE + SLACK + START)
    assert ended.out == "thawed"


@pytest.mark.parametrize("pool", [0, 4 << 20])
def test_exit_under_a_close(pool: int) -> None:
    ended = run_scene(scenes.leave_closing, pool).check(within=GRACE + SLACK + START)
    assert "tear-down" in ended.err


def test_exit_while_the_engine_shares_its_memory_anew() -> None:
    run_scene(scenes.leave_while_walking).check(within=SLACK + START)


def test_a_forked_child() -> None:
    run_scene(scenes.fork_idle).check(within=SLACK + START)

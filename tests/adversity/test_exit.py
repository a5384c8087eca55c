"""Interpreters that end beside open stores: in time, with their own exit code, without a signal."""

from __future__ import annotations

import pytest

from aiomooncake import LocalCluster
from tests.adversity import exit_scenes as scenes
from tests.adversity.processes import run_scene

# A call that is stuck longer than that is left behind.
GRACE = 3.0
# Start of an interpreter, set-up, and a busy machine.
SLACK = 8.0


@pytest.mark.parametrize("code", [0, 7])
def test_an_idle_store_costs_no_time_and_keeps_the_exit_code(
    own_cluster: LocalCluster, code: int
) -> None:
    ended = run_scene(scenes.leave_idle_store, own_cluster.address, code)
    ended.check(within=SLACK, code=code)
    assert ended.out == "to be flushed"


def test_an_uncaught_exception_is_shown(own_cluster: LocalCluster) -> None:
    ended = run_scene(scenes.leave_by_exception, own_cluster.address).check(within=SLACK, code=1)
    assert "LookupError: uncaught" in ended.err


def test_healthy_calls_in_flight(own_cluster: LocalCluster) -> None:
    run_scene(scenes.leave_calls_in_flight, own_cluster.address).check(within=SLACK)


def test_a_dropped_store_is_waited_for(own_cluster: LocalCluster) -> None:
    run_scene(scenes.leave_dropped_store, own_cluster.address).check(within=GRACE + SLACK)


def test_a_close_under_way_is_waited_for(own_cluster: LocalCluster) -> None:
    run_scene(scenes.leave_close_under_way, own_cluster.address).check(within=GRACE + SLACK)


def test_a_close_on_a_frozen_master_is_left_behind() -> None:
    ended = run_scene(scenes.leave_close_on_frozen_master).check(within=GRACE + SLACK)
    assert "tear-down" in ended.err


def test_a_set_up_that_is_stuck_is_left_behind() -> None:
    ended = run_scene(scenes.leave_set_up_stuck).check(within=GRACE + SLACK)
    assert "stuck in the engine: setup (" in ended.err


@pytest.mark.parametrize("calls", [0, 4])
def test_a_frozen_master(calls: int) -> None:
    ended = run_scene(scenes.leave_frozen_master, calls).check(within=GRACE + SLACK)
    assert ("exists" in ended.err) == bool(calls)


@pytest.mark.parametrize("thaw", ["", "thaw"])
def test_calls_stuck_on_a_frozen_peer(thaw: str) -> None:
    ended = run_scene(scenes.leave_stuck_on_frozen_peer, 8, thaw).check(within=GRACE + SLACK)
    assert "stuck in the engine: get (" in ended.err
    assert ended.out == ("thawed" if thaw else "")


def test_blocking_calls_that_come_back_while_the_interpreter_finalises() -> None:
    ended = run_scene(scenes.leave_blocking_calls_stuck, 4).check(within=GRACE + SLACK)
    assert ended.out == "thawed"


@pytest.mark.parametrize("ours", ["close", "leave"])
def test_another_user_of_the_engine_keeps_its_store(own_cluster: LocalCluster, ours: str) -> None:
    run_scene(scenes.leave_with_other_user, own_cluster.address, ours).check(within=GRACE + SLACK)


def test_an_adopted_store(own_cluster: LocalCluster) -> None:
    run_scene(scenes.leave_adopted, own_cluster.address).check(within=GRACE + SLACK)


@pytest.mark.parametrize("master", ["frozen", "thaw"])
def test_a_second_interrupt_while_the_exit_waits(master: str) -> None:
    ended = run_scene(scenes.leave_by_second_interrupt, master).check(within=GRACE + SLACK)
    assert "KeyboardInterrupt" in ended.err

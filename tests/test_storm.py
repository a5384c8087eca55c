"""The simulation of many ranks at one master: what it claims, and that its books are right."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from aiomooncake.testing import run_in_virtual_time
from benchmarks.storm.__main__ import main
from benchmarks.storm.calibration import Calibration, calibrate
from benchmarks.storm.master import WINDOW, Master
from benchmarks.storm.simulation import (
    FIXED,
    OURS,
    POLICIES,
    SCENES,
    Contender,
    Outcome,
    Scene,
    simulate,
)

RANKS = 64
SEEDS = 5

scenes = pytest.mark.parametrize("scene", SCENES, ids=[scene.name for scene in SCENES])


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration.load()


def scene(name: str) -> Scene:
    return next(one for one in SCENES if one.name == name)


def contender(name: str) -> Contender:
    return next(one for one in POLICIES if one.name == name)


def mean(outcomes: list[Outcome], figure: str) -> float:
    return statistics.fmean(getattr(one, figure) for one in outcomes)


def both(name: str, calibration: Calibration) -> tuple[list[Outcome], list[Outcome]]:
    """Run a scene with ours and with the fixed second, in the same worlds."""
    ours, fixed = (
        [
            simulate(scene(name), contender(policy), RANKS, calibration, seed=seed)
            for seed in range(SEEDS)
        ]
        for policy in (OURS, FIXED)
    )
    return ours, fixed


@scenes
def test_every_rank_gets_ready_and_the_books_balance(
    scene: Scene, calibration: Calibration
) -> None:
    for one in POLICIES:
        outcome = simulate(scene, one, RANKS, calibration)
        assert outcome.failed == 0
        assert outcome.came == outcome.answered + outcome.timed_out + outcome.dropped
        assert outcome.came == outcome.requests + outcome.idle_requests == sum(outcome.windows)
        assert outcome.tries >= RANKS
        assert all(wait >= 0 for wait in outcome.waits)
        assert outcome.peak >= outcome.retry_peak > 0


@scenes
def test_a_seed_gives_the_same_run_again(scene: Scene, calibration: Calibration) -> None:
    ours = contender(OURS)
    first, again = (simulate(scene, ours, RANKS, calibration, seed=7) for _ in range(2))
    assert first == again
    other = simulate(scene, ours, RANKS, calibration, seed=8)
    assert other.waits != first.waits


def test_of_what_all_wait_for_ours_learns_sooner_at_a_lower_peak(calibration: Calibration) -> None:
    ours, fixed = both("memory", calibration)
    assert mean(ours, "wait_mean") * 3 < mean(fixed, "wait_mean")
    assert mean(ours, "all_ready") < mean(fixed, "all_ready")
    assert mean(ours, "peak") < mean(fixed, "peak")
    assert mean(ours, "requests") < 1.05 * mean(fixed, "requests")


def test_after_a_restart_ours_comes_back_spread_out(calibration: Calibration) -> None:
    ours, fixed = both("restart", calibration)
    assert mean(ours, "peak") * 2 < mean(fixed, "peak")
    assert mean(ours, "wait_mean") < mean(fixed, "wait_mean")


def test_engines_that_are_late_by_themselves_are_found_as_soon_as_by_a_fixed_second(
    calibration: Calibration,
) -> None:
    ours, fixed = both("engines", calibration)
    assert mean(ours, "wait_mean") < 1.2 * mean(fixed, "wait_mean")
    assert mean(ours, "retry_peak") < mean(fixed, "retry_peak")


def test_the_master_works_off_what_nobody_waits_for_any_longer(calibration: Calibration) -> None:
    async def overload() -> Master:
        master = Master(calibration, workers=1, rpc_timeout=0.001)
        asked = [asyncio.ensure_future(master.request("exists")) for _ in range(1000)]
        answers = await asyncio.gather(*asked)
        assert asyncio.get_running_loop().time() == pytest.approx(0.001)
        assert sum(answers) == master.answered
        return master

    master = run_in_virtual_time(overload())
    each = calibration.service["exists"]
    assert master.answered == int(0.001 / each)
    assert master.answered + master.timed_out == 1000
    assert master.busy == pytest.approx(1000 * each)
    assert master.longest_wait == pytest.approx(1000 * each)


def test_more_workers_answer_more_at_once_and_mounts_only_one(calibration: Calibration) -> None:
    async def took(kind: str, workers: int) -> float:
        master = Master(calibration, workers, rpc_timeout=10)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(master.request(kind) for _ in range(100)))
        return asyncio.get_running_loop().time() - began

    async def all_of_them() -> tuple[float, ...]:
        return await took("get", 1), await took("get", 4), await took("mount", 4)

    one, four, mounts = run_in_virtual_time(all_of_them())
    assert one == pytest.approx(100 * calibration.service["get"])
    assert four == pytest.approx(25 * calibration.service["get"])
    assert mounts == pytest.approx(100 * calibration.service["mount"])


def test_a_request_whose_caller_is_cancelled_is_counted(calibration: Calibration) -> None:
    async def cancelled() -> Master:
        master = Master(calibration, workers=1, rpc_timeout=1)
        task = asyncio.ensure_future(master.request("exists", client=0.5))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})
        return master

    master = run_in_virtual_time(cancelled())
    assert (master.answered, master.timed_out, master.dropped) == (0, 0, 1)


def test_connecting_fails_only_after_all_tries(calibration: Calibration) -> None:
    async def connect(back_at: float) -> tuple[bool, float]:
        began = asyncio.get_running_loop().time()
        master = Master(calibration, workers=1, rpc_timeout=1, back_at=began + back_at)
        return await master.reached(), asyncio.get_running_loop().time() - began

    async def both() -> list[tuple[bool, float]]:
        return [await connect(2.5 * calibration.connect_try), await connect(60.0)]

    back, dead = run_in_virtual_time(both())
    assert back[0]
    assert back[1] == pytest.approx(3 * calibration.connect_try)
    assert not dead[0]
    assert dead[1] == pytest.approx(calibration.connect_tries * calibration.connect_try)


def test_an_overloaded_master_loses_requests_and_all_get_ready_all_the_same(
    calibration: Calibration,
) -> None:
    """A time-out below the queue's length makes ranks try again what the master still does."""
    outcome = simulate(
        scene("memory"), contender(OURS), 512, calibration, workers=1, rpc_timeout=0.003
    )
    assert outcome.timed_out > 0
    assert outcome.failed == 0
    assert outcome.came == outcome.answered + outcome.timed_out + outcome.dropped


def test_command_line_writes_table_json_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plots, out = tmp_path / "plots", tmp_path / "out.json"
    arguments = ["--ranks", "16", "--seeds", "1", "--json", str(out), "--plots", str(plots)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    result: dict[str, Any] = json.loads(out.read_text())
    for name in ("engines, 16", "memory, 16", "restart, 16", "rolling, 16"):
        assert name in shown
    for one in POLICIES:
        assert one.name in shown
    assert len(result["averages"]) == len(result["runs"]) == len(SCENES) * len(POLICIES)
    assert sorted(file.name for file in plots.iterdir()) == [
        "storm-load.svg",
        "storm-ranks.svg",
        "storm-waits.svg",
    ]
    assert sum(result["runs"][0]["windows"]) == result["runs"][0]["came"]
    assert WINDOW == 0.1


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="the engine has Linux wheels only")
def test_calibration_measures_a_real_master(calibration: Calibration, tmp_path: Path) -> None:
    """Costs are of the kept ones' order: a busy machine makes them several times dearer."""
    pytest.importorskip("mooncake.store")
    measured = calibrate(rounds=1, burst=0.05, mounts=32)
    assert measured.service.keys() == calibration.service.keys()
    for kind, cost in measured.service.items():
        assert cost > calibration.service[kind] / 10, kind
        assert cost < calibration.service[kind] * 30, kind
    assert measured.late_share > 0.5
    assert 0.5 < measured.connect_try < 3
    assert measured.client.keys() == calibration.client.keys()
    best = measured.best_with(calibration)
    best.save(tmp_path / "best.json")
    assert Calibration.load(tmp_path / "best.json") == best
    assert all(best.service[kind] <= calibration.service[kind] for kind in best.service)

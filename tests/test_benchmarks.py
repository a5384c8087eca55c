"""The benchmarks run: a smoke of all of them, without judging a figure."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.bench import Bench, Value
from benchmarks.measure import Measurement, Meter, Round, percentile
from benchmarks.peers import BindingPeer, BlockingBatches, BlockingLoop, Threads, ToThread
from benchmarks.process import OverCapError, Worker, WorkerError
from benchmarks.report import print_failures
from benchmarks.scenarios import GROUPS
from tests.benchmark_jobs import Echo

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="the engine has Linux wheels only")


# A third at a time: a test that takes two minutes is ended, whatever it is allowed.
PARTS = 3


@linux
@pytest.mark.timeout(110)
@pytest.mark.parametrize("part", range(PARTS))
def test_smoke_measures_every_scenario(tmp_path: Path, part: int) -> None:
    pytest.importorskip("mooncake.store")
    out = tmp_path / "result.json"
    groups = GROUPS[part::PARTS]
    names = {scenario.name for group in groups for scenario in group.scenarios}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", "--json", str(out), "--only", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=105,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert result["failures"] == {}
    assert set(result["scenarios"]) == names
    assert {one["scenario"] for one in result["measurements"]} == names
    assert {row["scenario"] for row in result["table"]} == names
    for name in names:
        assert name in run.stdout
    for one in result["measurements"]:
        assert one["cap"] is not None or one["medians"]["operations_per_second"] > 0


class Native:
    """Stands for the binding; notes who calls what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def get(self, key: str) -> bytes:
        self.calls.append(("get", key))
        self.threads.add(threading.get_ident())
        return b"" if key == "missing" else b"value"

    def put(self, key: str, value: bytes) -> int:
        self.calls.append(("put", key))
        return 0

    def get_batch(self, keys: list[str]) -> list[bytes]:
        self.calls.append(("get_batch", len(keys)))
        return [b"value"] * len(keys)


@pytest.mark.parametrize("kind", [ToThread, Threads, BlockingLoop])
async def test_peer_makes_every_call_once_and_times_it(kind: Callable[[], BindingPeer]) -> None:
    peer = kind()
    peer.native = Native()
    items = ["a", "b", ("c", b"new"), "d"]
    driven = await peer.drive(peer.requests("mixed", items), 3)
    assert sorted(peer.native.calls) == [("get", "a"), ("get", "b"), ("get", "d"), ("put", "c")]
    assert len(driven.latencies) == 4
    assert driven.seconds > 0


@pytest.mark.parametrize("kind", [ToThread, Threads, BlockingLoop])
async def test_peer_that_answers_wrong_is_an_error(kind: Callable[[], BindingPeer]) -> None:
    peer = kind()
    peer.native = Native()
    with pytest.raises(RuntimeError, match="a call failed"):
        await peer.drive(peer.requests("get", ["a", "missing"]), 2)


async def test_threads_work_beside_the_loop() -> None:
    peer = BlockingLoop()
    peer.native = Native()
    await peer.drive(peer.requests("get", ["a", "b"]), 8)
    assert len(peer.native.threads) == 1
    assert threading.get_ident() not in peer.native.threads


async def test_blocking_batches_cut_single_keys_into_batches() -> None:
    peer = BlockingBatches()
    peer.native = Native()
    await peer.drive(peer.requests("get", [str(i) for i in range(300)]), 1)
    assert peer.native.calls == [("get_batch", 256), ("get_batch", 44)]


def test_plots_show_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from benchmarks.plots import draw

    bench = Bench(smoke=True, rounds=1)
    for peer in ("aiomooncake", "async_store"):
        for tasks in (1, 8):
            bench.measured(
                "get", peer, [{"seconds": 0.5, "operations": tasks}],
                place="own memory", loop="asyncio", tasks=tasks, batch=1,
            )  # fmt: skip
    files = draw(bench.to_json(), tmp_path / "plots")
    assert [file.name for file in files] == ["tasks-own-memory.svg", "get.svg"]
    assert all(file.read_text().startswith("<?xml") for file in files)


def test_failures_of_one_cause_are_told_once() -> None:
    out = io.StringIO()
    print_failures({"get": "no luck", "put": "no luck"}, Console(file=out, width=80))
    assert out.getvalue().count("no luck") == 1
    assert "get, put could not be measured" in out.getvalue()


def test_every_scenario_is_defined_in_the_readme() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for group in GROUPS:
        for scenario in group.scenarios:
            assert f"`{scenario.name}`" in text


def test_only_takes_known_names() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "no-such"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 2
    assert "connect-closed" in run.stderr


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "times"), [("1/s", 12.0, 4.0, 3.0), ("s", 4.0, 12.0, 3.0)]
)
def test_ratio_says_how_many_times_better(
    unit: str, ours: float, theirs: float, times: float
) -> None:
    bench = Bench(smoke=True, rounds=1)
    bench.compare("x", "y", unit, ours, theirs, at_least_times=3.5)
    (row,) = bench.rows
    assert row.ratio == Value(times)
    assert row.met is False


def test_ratio_to_work_that_did_not_end_is_a_bound() -> None:
    bench = Bench(smoke=True, rounds=1)
    bench.compare("x", "y", "s", 2.0, Value(10.0, at_least=True), at_most=3.0)
    (row,) = bench.rows
    assert row.ratio == Value(5.0, at_least=True)
    assert row.met is True


def test_measurement_gives_medians_of_its_rounds() -> None:
    rounds = [Round(seconds, operations=10, figures={"x": seconds}) for seconds in (1.0, 2.0, 5.0)]
    measurement = Measurement("s", "p", {}, rounds)
    assert measurement.median("seconds") == measurement.median("x") == 2.0
    assert measurement.largest("seconds") == 5.0
    assert measurement.rate == 5.0


def test_percentile_of_few_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([float(i) for i in range(100)], 0.9) == 90.0


@linux
async def test_meter_sees_memory_and_stalls() -> None:
    async with Meter() as meter:
        block = bytearray(32 << 20)
        await asyncio.sleep(0.01)
    measured = meter.round(2, [0.1, 0.2])
    # The kernel adds resident pages up in lots of 64 for each thread, and is behind by some lots.
    assert len(block) - (1 << 20) <= measured.extra_rss < 2 * len(block)
    assert measured.peak_rss > measured.extra_rss
    assert measured.seconds >= 0.01
    assert (measured.p50, measured.p99) == (0.2, 0.2)


@linux
def test_worker_answers_and_tells_errors() -> None:
    with Worker(Echo) as worker:
        assert worker.call("echo", text="häh") == "häh"
        with pytest.raises(WorkerError, match="no luck today"):
            worker.call("fail")
        assert worker.call("echo", text="still there") == "still there"


@linux
def test_worker_that_dies_is_an_error() -> None:
    with Worker(Echo) as worker, pytest.raises(WorkerError, match="code 3"):
        worker.call("leave")


@linux
def test_frozen_worker_is_let_go() -> None:
    with Worker(Echo) as worker:
        worker.call("echo", text="awake")
        worker.freeze()
        worker.send("echo", text="asleep")
        with pytest.raises(OverCapError):
            worker.receive(within=0.2)


@linux
def test_worker_is_killed_at_its_cap() -> None:
    with Worker(Echo) as worker, pytest.raises(OverCapError) as caught:
        worker.call("hang", within=2.0)
    assert caught.value.still is not None

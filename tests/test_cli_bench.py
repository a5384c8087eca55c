"""The benchmark of a user's own cluster: it measures, stays in its bounds, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import aiomooncake
from aiomooncake import LocalCluster, ObjectNotFoundError
from aiomooncake.cli.bench import Bench
from aiomooncake.cli.commands import cli
from aiomooncake.cli.terminal import Screen
from aiomooncake.master import http_get
from tests.adversity.processes import Peer
from tests.test_cli import ANSI, LIMIT, command, environment, needs_master, run, terminal

MB = 1 << 20
SEGMENT = 64 * MB
SHORT = ("--seconds", "0.6", "--size", "4KiB", "--size", "256KiB", "--tasks", "1", "--tasks", "8")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A master with one client that lends memory."""
    master = LocalCluster(client_ttl=600, extra_args=["--eviction_ratio=0"])
    master.blocking.start()
    with Peer(master.address, keys=0, segment=SEGMENT):
        yield master
    master.blocking.kill()
    master.blocking.stop()


def keys_of(master: LocalCluster) -> bytes:
    _, body = asyncio.run(http_get("127.0.0.1", master.metrics_port, "/get_all_keys", 2.0))
    return body


def bench(master: LocalCluster, *args: str) -> subprocess.CompletedProcess[str]:
    port = "--metrics-port", str(master.metrics_port)
    return run("bench", master.address, *port, *args)


@needs_master
def test_what_it_measured(cluster: LocalCluster) -> None:
    began = time.monotonic()
    done = bench(cluster, *SHORT, "--json")
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert time.monotonic() - began < 20
    document = json.loads(done.stdout)
    assert document["error"] is None
    assert document["global_segment_size"] == 0
    assert [(row["size"], row["tasks"], row["verb"]) for row in document["rows"]] == [
        (size, tasks, verb)
        for size in (4096, 256 << 10)
        for tasks in (1, 8)
        for verb in ("put", "get", "exists")
    ]
    for row in document["rows"]:
        assert row["operations"] >= 1
        assert 0 < row["p50"] <= row["p99"] < 5
        assert row["per_second"] == pytest.approx(row["operations"] / row["seconds"], rel=1e-3)
        if row["verb"] == "exists":
            assert row["bytes_per_second"] is None
        else:
            assert row["bytes_per_second"] == pytest.approx(
                row["per_second"] * row["size"], rel=0.01
            )
    assert set(document["places"]) == {"memory on this host"}  # the peer's
    assert 0 <= document["longest_stall"] < 2
    assert keys_of(cluster) == b""


@needs_master
def test_what_people_see(cluster: LocalCluster) -> None:
    done = bench(cluster, *SHORT)
    assert done.returncode == 0, done
    assert re.search(
        r"^ +4 KiB +8 tasks  get +[\d,]+/s +[\d,]+ MiB/s  p50 ", done.stdout, re.MULTILINE
    )
    for fact in (
        "calls    by the verbs",
        "values   lay in: memory on this host 100%",
        "lent     nothing",
        "loop     never still for longer than",
    ):
        assert fact in done.stdout
    port = "--metrics-port", str(cluster.metrics_port)
    with terminal("bench", cluster.address, *port, *SHORT) as shown:
        assert shown.wait() == 0, shown.text
    text = ANSI.sub("", shown.text)
    assert re.search(r"━+", text)  # the progress bar, while it runs
    final = text[text.rindex("Tasks") :]
    assert (
        len(re.findall(r"^ +(?:4|256) KiB +[18] +(?:put|get|exists) ", final, re.MULTILINE)) == 12
    )
    assert "━" not in final
    assert keys_of(cluster) == b""


@needs_master
def test_ctrl_c_leaves_no_keys(cluster: LocalCluster) -> None:
    with subprocess.Popen(
        command("bench", cluster.address, "--seconds", "600", "--size", "64KiB", "--tasks", "32"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + LIMIT
        while b"aiomooncake-bench-" not in keys_of(cluster):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert error == "terminated, everything is closed\n"
    assert keys_of(cluster) == b""


@needs_master
def test_own_memory_is_told_from_that_of_others(cluster: LocalCluster) -> None:
    done = bench(
        cluster,
        "--seconds",
        "0.3",
        "--size",
        "4KiB",
        "--tasks",
        "4",
        "--json",
        "--segment-size",
        "64MiB",
    )
    assert done.returncode == 0, done
    document = json.loads(done.stdout)
    assert document["global_segment_size"] == 64 * MB
    assert "this process's own memory" in document["places"]


@needs_master
def test_it_stores_no_more_than_fits(cluster: LocalCluster) -> None:
    """Beyond that the master would evict what others have stored."""
    done = bench(cluster, "--seconds", "0.3", "--size", "16MiB", "--tasks", "1", "--tasks", "4")
    assert done.returncode == 0, done
    assert "left out 4 × 16 MiB: more than may be stored" in done.stdout
    done = bench(cluster, "--size", "80MiB", "--tasks", "1")
    assert done.returncode == 13, done
    assert "of the mounted memory" in done.stderr
    assert keys_of(cluster) == b""


@needs_master
def test_no_segment_anywhere(own_cluster: LocalCluster) -> None:
    done = bench(own_cluster, "--timeout", "2")
    assert done.returncode == 12, done
    assert "Diagnosis: no-segment" in done.stderr
    assert done.stdout.startswith("benchmark of ")


async def test_a_value_that_goes_away_is_no_good_figure(
    eventually: Callable[[Callable[[], object]], Awaitable[None]],
) -> None:
    screen = Screen(quiet=True, live=False)
    async with aiomooncake.connect("memory://bench-evicting") as store:
        run_of = Bench([1024], [1], 0.3, 1 * MB, screen)

        async def evict() -> None:
            await eventually(lambda: bool(run_of.rows))
            await store.remove_all(force=True)

        evicting = asyncio.ensure_future(evict())
        with pytest.raises(ObjectNotFoundError, match="went away while it was measured"):
            await run_of.run(store)
        await evicting


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "'TARGET': 'nowhere' is not usable"),
        (["h:1", "--size", "0"], "--size"),
        (["h:1", "--size", "big"], "--size"),
        (["h:1", "--max-data", "much"], "--max-data"),
        (["h:1", "--tasks", "0"], "--tasks"),
        (["h:1", "--seconds", "0"], "--seconds"),
    ],
)
def test_wrong_usage_names_the_option(args: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["bench", *args])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_the_engine_in_memory_needs_no_wheel() -> None:
    done = run(
        "bench", "memory://x", "--seconds", "0.3", "--size", "1KiB", "--tasks", "2", "--json"
    )
    assert done.returncode == 0, done
    document: dict[str, Any] = json.loads(done.stdout)
    assert len(document["rows"]) == 3
    assert set(document["places"]) == {"this process's own memory"}

"""The doctor, called to set-ups that are broken for real, and what it says of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import aiomooncake
from aiomooncake import LocalCluster, ReplicateConfig, StoreConfig
from aiomooncake.cli import cluster_checks, host_checks
from aiomooncake.cli.commands import cli
from aiomooncake.cli.doctor import Case, Check, Doctor, Finding, fail, ok
from aiomooncake.cli.exits import EXITS, exit_code_of
from aiomooncake.cli.greeting import Greeting, greet, local_version
from aiomooncake.cli.terminal import Screen
from aiomooncake.config import parse_target
from aiomooncake.master import http_get
from aiomooncake.testing import FaultProxy
from tests.adversity.doctor_scenes import (
    crashing_engine,
    http_server,
    other_distribution,
    patched_engine,
)
from tests.adversity.other_wheel import old_master
from tests.adversity.processes import Peer
from tests.test_cli import command, environment, needs_master, terminal
from tests.warmup_fakes import free_port

MB = 1 << 20
LIMIT = 50.0  # seconds for one run; the longest takes about 15
NON_CUDA = "mooncake-transfer-engine-non-cuda"

pytestmark = needs_master


@dataclass(frozen=True)
class Report:
    """What ``doctor --json`` says."""

    code: int
    document: dict[str, Any]
    seconds: float

    def states(self) -> dict[str, list[str]]:
        return {
            check["name"]: [finding["state"] for finding in check["findings"]]
            for check in self.document["checks"]
        }

    def findings(self, name: str) -> list[dict[str, Any]]:
        (check,) = (check for check in self.document["checks"] if check["name"] == name)
        found: list[dict[str, Any]] = check["findings"]
        return found

    def failed(self, name: str, kind: str) -> str:
        """Return the text of the first failure, which must be this one."""
        bad = [
            (check["name"], finding)
            for check in self.document["checks"]
            for finding in check["findings"]
            if finding["state"] == "fail"
        ]
        assert bad, self.document
        place, finding = bad[0]
        assert (place, finding["kind"]) == (name, kind), bad
        assert finding["cure"]
        assert self.document["exit_code"] == self.code
        assert self.document["healthy"] is False
        return f"{finding['text']} Cure: {finding['cure']}"

    def warned(self, name: str) -> str:
        """Return what is warned of, and what to do."""
        return "; ".join(
            f"{finding['text']} Cure: {finding['cure']}"
            for finding in self.findings(name)
            if finding["state"] == "warn"
        )


def examine(*args: str, **env: str) -> Report:
    began = time.monotonic()
    done = subprocess.run(
        command("doctor", "--json", *args),
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT,
    )
    assert done.stderr == ""
    return Report(done.returncode, json.loads(done.stdout), time.monotonic() - began)


# --- staging: what takes time is done side by side ---------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What a scene may use.

    Attributes:
        master: A master with one peer, whose client lends memory; nobody stops either.
        folder: An empty one.
    """

    master: LocalCluster
    folder: Path

    @property
    def port(self) -> tuple[str, str]:
        """The options that name the master's HTTP port."""
        return metrics_of(self.master)


Scene = Callable[[Stage], Any]
SCENES: dict[str, Scene] = {}
AT_ONCE = 4


def scene(function: Scene) -> Scene:
    """Have a scene played for the test ``test_<its name>``, which is given what it returns."""
    SCENES[f"test_{function.__name__}"] = function
    return function


def metrics_of(cluster: LocalCluster) -> tuple[str, str]:
    return "--metrics-port", str(cluster.metrics_port)


@contextlib.contextmanager
def cluster_of_its_own(**options: Any) -> Iterator[LocalCluster]:
    """Run a master that keeps the segments of clients that stand still."""
    cluster = LocalCluster(client_ttl=600, **options)
    cluster.blocking.start()
    try:
        yield cluster
    finally:
        cluster.blocking.kill()  # a gentle stop takes a second
        cluster.blocking.stop()


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    with cluster_of_its_own() as cluster, Peer(cluster.address, keys=0):
        yield cluster


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, master: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Start what this run asks for, side by side; under pytest-xdist each when it is its turn."""

    def play(name: str) -> Any:
        return SCENES[name](Stage(master, folders[name]))

    names = [
        item.originalname for item in request.session.items if isinstance(item, pytest.Function)
    ]
    names = [name for name in names if name in SCENES]
    folders = {name: tmp_path_factory.mktemp("stage") for name in names}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started: dict[str, Future[Any]] = {}
        if not hasattr(request.config, "workerinput"):
            started = {name: pool.submit(play, name) for name in names}
        yield lambda name: started[name].result() if name in started else play(name)
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def report(request: pytest.FixtureRequest, played: Callable[[str], Any]) -> Any:
    """What the scene of this test has returned."""
    return played(request.function.__name__)


# --- health ---------------------------------------------------------------------------------------


@scene
def a_healthy_cluster(stage: Stage) -> tuple[Report, bytes]:
    with cluster_of_its_own() as cluster, Peer(cluster.address, keys=0):
        found = examine(cluster.address, *metrics_of(cluster))
        _, keys = asyncio.run(http_get("127.0.0.1", cluster.metrics_port, "/get_all_keys", 2.0))
        return found, keys


def test_a_healthy_cluster(played: Callable[[str], Any]) -> None:
    report, keys = played("test_a_healthy_cluster")
    assert report.code == 0, report.document
    assert keys == b""  # the trial leaves nothing behind
    assert report.document["healthy"] is True
    assert {name: states for name, states in report.states().items() if states} == {
        name: ["ok"]
        for name in (
            "settings", "engine", "gil", "address", "memory", "master", "health", "versions",
            "segments", "peers", "trial",
        )
    }  # fmt: skip
    (engine,) = report.findings("engine")
    (versions,) = report.findings("versions")
    assert versions["facts"]["master"] == versions["facts"]["client"] == engine["facts"]["version"]
    (trial,) = report.findings("trial")
    assert 0 < trial["facts"]["seconds"] < 5
    assert 0 < trial["facts"]["connected"] < 10


@scene
def for_people_it_is_a_line_per_check(stage: Stage) -> str:
    with terminal("doctor", stage.master.address, *stage.port) as shown:
        assert shown.wait() == 0, shown.text
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.text)


def test_for_people_it_is_a_line_per_check(report: str) -> None:
    for name in ("settings", "engine", "master", "segments", "trial"):
        assert re.search(rf"^  ok    {name}\s", report, re.MULTILINE), report
    assert report.rstrip().endswith("healthy")


@scene
def without_the_metrics_port_it_says_what_is_lost(stage: Stage) -> Report:
    return examine(stage.master.address)


def test_without_the_metrics_port_it_says_what_is_lost(report: Report) -> None:
    assert report.code == 0, report.document
    assert "--metrics-port" in report.warned("health")
    assert report.states()["segments"] == report.states()["peers"] == ["skip"]
    assert report.states()["trial"] == ["ok"]


@scene
def the_engine_in_memory(stage: Stage) -> Report:
    return examine("memory://x")


def test_the_engine_in_memory(report: Report) -> None:
    assert report.code == 0, report.document
    assert report.states() == {"settings": ["ok"], "trial": ["ok"]}


# --- settings -------------------------------------------------------------------------------------


@scene
def nothing_names_a_master(stage: Stage) -> Report:
    return examine()


def test_nothing_names_a_master(report: Report) -> None:
    assert report.code == 2
    assert "MOONCAKE_MASTER" in report.failed("settings", "settings")
    # The engine can be looked at all the same.
    assert report.states()["engine"] == ["ok"]
    assert report.states()["trial"] == ["skip"]


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        ([], {"MOONCAKE_CONFIG_PATH": "/absent.json"}, "No such file"),
        ([], {"MOONCAKE_CONFIG_PATH": "/"}, "Is a directory"),
        (["h:1"], {"MOONCAKE_PROTOCL": "tcp"}, "did you mean MOONCAKE_PROTOCOL?"),
        (["nowhere"], {}, "'TARGET': 'nowhere' is not usable: the port is missing"),
        (["h:1", "--metrics-port", "0"], {}, "'--metrics-port': master_metrics_port='0'"),
        (["h:1", "--set", "protcol=tcp"], {}, "did you mean 'protocol'?"),
    ],
)
async def test_settings_that_can_not_be_read(
    args: list[str], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    case = await asyncio.to_thread(read_case, args)
    (finding,) = await host_checks.check_settings(case)
    assert (finding.state, finding.exit_code) == ("fail", 2)
    assert said in finding.text


def read_case(args: list[str]) -> Case:
    """Let the command make its case, and look at that instead of running it."""
    made: list[Case] = []

    def examination(case: Case, *_: object) -> Doctor:
        made.append(case)
        return doctor_of()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("aiomooncake.cli.commands.Doctor", examination)
        CliRunner().invoke(cli, ["doctor", "--json", *args])
    return made[0]


@scene
def no_local_buffer_is_a_warning(stage: Stage) -> Report:
    args = stage.master.address, *stage.port, "--set", "local_buffer_size=0"
    return examine(*args, MC_TCP_STATUS_TIMEOUT_SEC="90")


def test_no_local_buffer_is_a_warning(report: Report) -> None:
    assert report.code == 0, report.document
    assert "-600" in report.warned("settings")
    assert "MC_TCP_STATUS_TIMEOUT_SEC=90" in report.warned("settings")
    assert report.states()["trial"] == ["ok"]


# --- the wheel ------------------------------------------------------------------------------------


@scene
def a_system_library_is_missing(stage: Stage) -> Report:
    path = patched_engine(stage.folder, b"libibverbs.so.1", b"libibverbs.so.9")
    return examine("local://", PYTHONPATH=path)


def test_a_system_library_is_missing(report: Report) -> None:
    assert report.code == 3
    text = report.failed("engine", "engine")
    assert "libibverbs.so.9" in text
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in text
    assert report.states()["trial"] == ["skip"]


@scene
def the_cuda_wheel_without_a_driver(stage: Stage) -> Report:
    path = patched_engine(stage.folder, b"libnuma.so.1", b"libcuda.so.1")
    return examine("local://", PYTHONPATH=path)


def test_the_cuda_wheel_without_a_driver(report: Report) -> None:
    assert report.code == 3
    text = report.failed("engine", "engine")
    assert "libcuda.so.1" in text
    assert "NVIDIA driver" in text
    assert "aiomooncake[cpu]" in text


@scene
def two_wheels_on_top_of_each_other(stage: Stage) -> Report:
    path = other_distribution(stage.folder, "mooncake-transfer-engine", "0.3.13")
    return examine("local://", PYTHONPATH=path)


def test_two_wheels_on_top_of_each_other(report: Report) -> None:
    assert report.code == 3
    text = report.failed("engine", "engine")
    assert "mooncake-transfer-engine 0.3.13 and " in text
    assert f"pip uninstall -y mooncake-transfer-engine {NON_CUDA}" in text


@scene
def a_wheel_that_is_too_old(stage: Stage) -> Report:
    return examine("local://", PYTHONPATH=other_distribution(stage.folder, NON_CUDA, "0.3.9"))


def test_a_wheel_that_is_too_old(report: Report) -> None:
    assert report.code == 3
    text = report.failed("engine", "engine")
    assert "engine 0.3.9 is too old for aiomooncake" in text
    assert "install 0.3.10.post2 or newer" in text
    assert report.states()["trial"] == ["skip"]


@scene
def a_wheel_with_wrong_dummies(stage: Stage) -> Report:
    path = other_distribution(stage.folder, NON_CUDA, "0.3.12.post1")
    return examine("127.0.0.1:1", "--set", "client_server_address=127.0.0.1:1", PYTHONPATH=path)


def test_a_wheel_with_wrong_dummies(report: Report) -> None:
    assert "0.3.12.post1 is too old for dummy clients" in report.failed("engine", "engine")


@scene
def an_engine_that_crashes(stage: Stage) -> Report:
    return examine("local://", PYTHONPATH=crashing_engine(stage.folder))


def test_an_engine_that_crashes(report: Report) -> None:
    assert report.code == 3
    assert "signal 6" in report.failed("engine", "engine")


@scene
def a_wheel_whose_set_up_holds_the_gil(stage: Stage) -> Report:
    path = patched_engine(stage.folder, b"_get_pyclient_capsule", b"_got_pyclient_capsule")
    return examine("local://", PYTHONPATH=path)


def test_a_wheel_whose_set_up_holds_the_gil(report: Report) -> None:
    assert report.code == 0, report.document
    assert "no _get_pyclient_capsule" in report.warned("gil")
    assert report.states() == {
        "settings": ["ok"], "engine": ["ok"], "gil": ["warn"], "trial": ["ok"],
    }  # fmt: skip


# --- this host ------------------------------------------------------------------------------------


@scene
def rdma_without_a_device(stage: Stage) -> Report:
    return examine(stage.master.address, *stage.port, "--set", "protocol=rdma")


def test_rdma_without_a_device(report: Report) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this host has RDMA devices")
    assert report.code == 21
    assert "no RDMA device" in report.failed("devices", "host-unfit")
    assert report.states()["trial"] == ["skip"]


@scene
def more_memory_than_there_is(stage: Stage) -> Report:
    return examine(f"127.0.0.1:{free_port()}", "--set", "global_segment_size=500TiB")


def test_more_memory_than_there_is(report: Report) -> None:
    assert report.code == 21
    assert "a store takes 500 TiB" in report.failed("memory", "host-unfit")


ELSEWHERE = "192.0.2.1:50051"  # nobody's; only a way to it is looked for


@pytest.mark.parametrize(
    ("hostname", "state", "said"),
    [
        ("localhost", "fail", "peers on other hosts that are given it reach themselves"),
        ("127.0.1.1:12345", "fail", "127.0.1.1"),
        ("[::1]:80", "fail", "loopback"),
        ("192.0.2.7", "warn", "no address of this host"),
        ("a" * 70, "fail", "does not resolve"),
    ],
)
async def test_a_hostname_that_peers_can_not_use(hostname: str, state: str, said: str) -> None:
    (finding,) = await host_checks.check_address(case_of(ELSEWHERE, local_hostname=hostname))
    assert finding.state == state, finding
    assert said in finding.text
    if state == "fail":
        assert finding.exit_code == 21


async def test_a_hostname_that_is_right() -> None:
    (finding,) = await host_checks.check_address(case_of("127.0.0.1:1", local_hostname="localhost"))
    assert finding.state == "ok", finding
    (finding,) = await host_checks.check_address(case_of("127.0.0.1:1"))
    assert "peers are given 127.0.0.1" in finding.text
    (finding,) = await host_checks.check_address(case_of("etcd://127.0.0.1:2379"))
    assert (finding.state, finding.kind) == ("fail", "settings")


async def test_a_port_that_is_taken() -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with listener:
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        case = case_of("127.0.0.1:1", local_hostname=address)
        (finding,) = await host_checks.check_address(case)
    assert finding.state == "fail"
    assert "is taken by another process" in finding.text


def case_of(address: str, **settings: Any) -> Case:
    target = parse_target(StoreConfig(address, **settings))
    case = Case(address, lambda: target, 5.0)
    case.target, case.config = target, target.config
    return case


# --- the master -----------------------------------------------------------------------------------


@scene
def no_master(stage: Stage) -> Report:
    return examine(f"127.0.0.1:{free_port()}")


def test_no_master(report: Report) -> None:
    assert report.code == 10
    assert "Connection refused" in report.failed("master", "master-unreachable")
    assert report.states()["trial"] == ["skip"]
    assert report.seconds < 15


async def test_a_name_that_is_none() -> None:
    (finding,) = await cluster_checks.check_master(case_of(f"{'a' * 70}:50051"))
    assert (finding.kind, finding.exit_code) == ("master-unreachable", 10)
    assert "does not resolve here" in finding.text


@scene
def a_frozen_master(stage: Stage) -> Report:
    with cluster_of_its_own() as cluster:
        cluster.blocking.pause()
        return examine(cluster.address)


def test_a_frozen_master(report: Report) -> None:
    assert report.code == 11
    assert "frozen" in report.failed("master", "master-silent")
    assert report.seconds < 20


@scene
def an_http_server_at_its_place(stage: Stage) -> Report:
    with http_server() as address:
        return examine(address)


def test_an_http_server_at_its_place(report: Report) -> None:
    assert report.code == 20
    text = report.failed("master", "not-a-master")
    assert "HTTP server" in text
    assert "404" in text
    assert "--rpc_port" in text


@scene
def the_metrics_port_in_place_of_the_rpc_port(stage: Stage) -> Report:
    return examine(f"127.0.0.1:{stage.master.metrics_port}")


def test_the_metrics_port_in_place_of_the_rpc_port(report: Report) -> None:
    assert report.code == 20
    assert "the HTTP port of a master" in report.failed("master", "not-a-master")


async def test_the_rpc_port_in_place_of_the_metrics_port(master: LocalCluster) -> None:
    port = int(master.address.rpartition(":")[2])
    case = case_of(master.address, master_metrics_port=port)
    case.metrics = "127.0.0.1", port
    (finding,) = await cluster_checks.check_health(case)
    assert finding.state == "warn"
    assert "no /health" in finding.text
    assert case.metrics is None


@scene
def a_proxy_with_nobody_behind(stage: Stage) -> Report:
    with FaultProxy(f"127.0.0.1:{free_port()}") as proxy:
        return examine(proxy.address)


def test_a_proxy_with_nobody_behind(report: Report) -> None:
    assert report.code == 10
    assert "hangs up at once" in report.failed("master", "master-unreachable")


async def test_a_proxy_that_takes_its_time_to_hang_up() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        (finding,) = await cluster_checks.check_master(case_of(f"{host}:{port}"))
    assert finding.kind == "master-unreachable"
    assert "hangs up at once" in finding.text


@scene
def a_master_of_another_version(stage: Stage) -> Report:
    with cluster_of_its_own(binary=old_master()) as cluster, Peer(cluster.address, keys=0):
        return examine(cluster.address, *metrics_of(cluster))


@pytest.mark.timeout(300)
def test_a_master_of_another_version(report: Report) -> None:
    """``exists`` answers and every ``put`` is -900, without a line in any log."""
    assert report.code == 14, report.document
    report.failed("trial", "version-mismatch")
    assert "the master 0.3.12.post1" in report.warned("versions")


# --- others ---------------------------------------------------------------------------------------


@scene
def a_dead_metadata_server(stage: Stage) -> Report:
    url = f"http://127.0.0.1:{free_port()}/metadata"
    return examine(stage.master.address, *stage.port, "--set", f"metadata_server={url}")


def test_a_dead_metadata_server(report: Report) -> None:
    assert report.code == 4
    text = report.failed("metadata", "setup")
    assert "metadata_server" in text
    assert "P2PHANDSHAKE" in text


@scene
def no_stand_alone_client(stage: Stage) -> Report:
    place = f"127.0.0.1:{free_port()}"
    return examine(stage.master.address, *stage.port, MOONCAKE_CLIENT=place)


def test_no_stand_alone_client(report: Report) -> None:
    assert report.code == 19
    report.failed("client", "client-unreachable")


@scene
def a_stand_alone_client(stage: Stage) -> tuple[Report, Greeting]:
    with cluster_of_its_own() as cluster:
        client = cluster.blocking.start_client(global_segment_size=16 * MB)
        host, _, port = client.address.rpartition(":")
        greeting = asyncio.run(greet(host, int(port), 2.0))
        return examine(
            cluster.address, *metrics_of(cluster), MOONCAKE_CLIENT=client.address
        ), greeting


def test_a_stand_alone_client(report: tuple[Report, Greeting]) -> None:
    examined, greeting = report
    assert examined.code == 0, examined.document
    assert examined.states()["client"] == examined.states()["trial"] == ["ok"]
    assert greeting.kind == "engine"  # at a master's place it would be warned of


@scene
def no_segment(stage: Stage) -> tuple[Report, Report]:
    with cluster_of_its_own() as cluster:
        return (
            examine(cluster.address, *metrics_of(cluster)),
            examine(cluster.address, "--timeout", "2"),
        )


def test_no_segment(report: tuple[Report, Report]) -> None:
    asked, tried = report
    assert asked.code == tried.code == 12
    text = asked.failed("segments", "no-segment")
    assert "one of these settings would bring 512 MiB" in text
    tried.failed("trial", "no-segment")  # found although the HTTP port is not known


@scene
def segments_full_of_pinned_values(stage: Stage) -> Report:
    async def fill_and_examine(cluster: LocalCluster) -> Report:
        pinned = ReplicateConfig(with_hard_pin=True)
        async with aiomooncake.connect(cluster.address, global_segment_size=16 * MB) as store:
            values = {f"pinned{number}": b"v" * MB for number in range(20)}
            await store.put_many(values, config=pinned, return_exceptions=True)
            args = cluster.address, *metrics_of(cluster), "--timeout", "2"
            return await asyncio.to_thread(examine, *args)

    with cluster_of_its_own() as cluster:
        return asyncio.run(fill_and_examine(cluster))


def test_segments_full_of_pinned_values(report: Report) -> None:
    assert report.code == 13, report.document
    report.failed("trial", "out-of-space")
    assert "16 MiB of 16 MiB in use: full" in report.warned("segments")


@scene
def a_peer_that_stands_still_and_one_that_is_dead(stage: Stage) -> tuple[Report, str, str]:
    with (
        cluster_of_its_own() as cluster,
        Peer(cluster.address) as dead,
        Peer(cluster.address) as frozen,
    ):
        dead.kill()
        frozen.freeze()
        report = examine(cluster.address, *metrics_of(cluster), "--timeout", "3")
        return report, dead.hostname, frozen.hostname


def test_a_peer_that_stands_still_and_one_that_is_dead(report: tuple[Report, str, str]) -> None:
    examined, dead, frozen = report
    assert examined.code == 15
    text = examined.failed("peers", "peer-unreachable")
    assert "2 of 2 peers can't be reached" in text
    assert f"(segment {dead}): dead (Connection refused)" in text
    assert f"(segment {frozen}): frozen" in text
    assert examined.seconds < 40


async def test_clients_that_call_themselves_localhost(master: LocalCluster) -> None:
    """Their master is reached by another address than a loopback one, so others are elsewhere."""
    case = case_of(master.address, master_metrics_port=master.metrics_port)
    case.metrics = ("127.0.0.1", master.metrics_port)
    (finding,) = await cluster_checks.check_segments(case)
    assert finding.state == "ok", finding
    assert case.mounted
    case.metrics = ("192.0.2.1", master.metrics_port)
    (finding,) = await cluster_checks._traps(case, list(case.mounted))
    assert finding.state == "warn"
    assert "loopback address (127.0.0.1:" in finding.text


@scene
def ctrl_c_ends_it(stage: Stage) -> tuple[int, str]:
    with terminal("doctor", "memory://x", "--timeout", "600") as shown:
        shown.read_until("settings")
        shown.type(b"\x03")
        return shown.wait(), shown.text


def test_ctrl_c_ends_it(report: tuple[int, str]) -> None:
    code, text = report
    assert code == 130, text
    assert "Traceback" not in text


# --- the machinery --------------------------------------------------------------------------------


def doctor_of(*checks: Check) -> Doctor:
    target = parse_target("127.0.0.1:1")
    case = Case(None, lambda: target, 1.0)
    return Doctor(case, checks, Screen(quiet=True))


def test_checks_are_independent_and_bounded() -> None:
    async def hangs(_case: Case) -> list[Finding]:
        await asyncio.Event().wait()
        return []

    async def breaks(_case: Case) -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    async def works(_case: Case) -> list[Finding]:
        return [ok("fine")]

    async def fails(_case: Case) -> list[Finding]:
        return [fail("no-segment", "none", "mount some")]

    doctor = doctor_of(
        Check("a", hangs, seconds=0.05),
        Check("b", breaks),
        Check("c", works),
        Check("d", fails),
        Check("e", works, ("d",)),
        Check("f", works, ("e",)),
        Check("g", works, ("c", "nobody")),
    )
    with doctor.screen:
        asyncio.run(doctor.run())
        doctor.sum_up()
    document = doctor.document("x", exit_code=doctor.exit_code)
    found = {check["name"]: check["findings"][0] for check in document["checks"]}
    assert {name: finding["state"] for name, finding in found.items()} == {
        "a": "fail", "b": "fail", "c": "ok", "d": "fail", "e": "skip", "f": "skip", "g": "ok",
    }  # fmt: skip
    assert "no end after 0.05 s" in found["a"]["text"]
    assert "ZeroDivisionError: by nothing" in found["b"]["text"]
    assert "d failed" in found["e"]["text"]
    assert document["exit_code"] == exit_code_of("unknown") == 18


def test_every_kind_has_an_exit_code() -> None:
    codes = {each.code for each in EXITS}
    source = "".join(
        Path(module.__file__).read_text()
        for module in (host_checks, cluster_checks)
        if module.__file__
    )
    kinds = set(re.findall(r'fail\(\s*"([a-z-]+)"', source))
    assert kinds >= {"settings", "engine", "setup", "host-unfit", "not-a-master"}
    for kind in kinds:
        assert fail(kind, "x", "y").exit_code in codes


def test_a_version_is_not_invented() -> None:
    assert local_version(free_port()) is None

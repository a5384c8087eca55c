"""The stand-alone clients of a `LocalCluster`: the wheel's own ``mooncake_client``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiomooncake import _programs, _server
from aiomooncake._child import ChildProcess
from aiomooncake.cluster import LocalCluster, StandaloneClient
from aiomooncake.errors import (
    ClusterError,
    ConfigError,
    EngineNotInstalledError,
    ForkedProcessError,
    InvalidArgumentError,
)
from aiomooncake.master import segments
from aiomooncake.testing import LoopStallProbe
from tests.adversity.processes import run_scene
from tests.programs import ends, listening, make_script, python_programs
from tests.standalone_scenes import comes_back, meets_another, puts_and_gets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    WithProgram = Callable[[str], LocalCluster]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the wheel's servers exist for Linux only"
)

MB = 1 << 20
SEGMENT = 64 * MB


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs write their log, whatever a test before has set for this process."""
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")


@pytest.fixture
def client(own_cluster: LocalCluster) -> StandaloneClient:
    return own_cluster.blocking.start_client(global_segment_size=SEGMENT)


@pytest.fixture
def with_program(tmp_path: Path) -> Iterator[WithProgram]:
    """Start a cluster whose master is real and whose clients are a shell script."""
    clusters: list[LocalCluster] = []

    def start(body: str) -> LocalCluster:
        master = _programs.find_program("mooncake_master")
        make_script(tmp_path / "mooncake_client", body)
        binary = make_script(tmp_path / "mooncake_master", f'exec {master} "$@"')
        clusters.append(LocalCluster(binary=binary))
        clusters[-1].blocking.start()
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.blocking.kill()
        cluster.blocking.stop()


@pytest.fixture
def run_python() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    with python_programs() as start:
        yield start


def port_of(client: StandaloneClient) -> int:
    host, _, port = client.address.rpartition(":")
    assert host == "127.0.0.1"
    return int(port)


def pid_of(client: StandaloneClient) -> int:
    assert client.pid is not None
    return client.pid


def words(client: StandaloneClient, name: str) -> set[str]:
    return set(Path(f"/proc/{client.pid}/{name}").read_text().split("\0"))


# --- it serves --------------------------------------------------------------------------------


async def test_is_there_with_its_segment_when_start_client_returns(
    own_cluster: LocalCluster,
) -> None:
    async with LoopStallProbe() as probe:
        client = await own_cluster.start_client(global_segment_size=SEGMENT)
        mounted = await segments("127.0.0.1", own_cluster.metrics_port, 5)
    assert [(one.capacity, one.status) for one in mounted] == [(SEGMENT, "OK")]
    assert client.running
    assert str(client.pid) in repr(client)
    assert client.address in repr(client)
    assert "real client service" in client.output()
    assert probe.longest < 0.2


def test_serves_dummy_clients_of_other_processes(own_cluster: LocalCluster) -> None:
    """Two clients of one cluster: what comes in through one is read through the other."""
    one, other = (own_cluster.blocking.start_client() for _ in range(2))
    assert one.address != other.address
    run_scene(puts_and_gets, one.address).check(within=30)
    run_scene(meets_another, other.address).check(within=30)


def test_a_new_dummy_client_is_served_after_a_crash() -> None:
    run_scene(comes_back).check(within=30)


def test_its_service_listens_on_loopback_only(client: StandaloneClient) -> None:
    assert listening(port_of(client)) == {"0100007F"}


def test_flags_reach_it(own_cluster: LocalCluster) -> None:
    client = own_cluster.blocking.start_client(
        global_segment_size=0, local_buffer_size="16MiB", extra_args=["--threads=3"]
    )
    assert words(client, "cmdline") >= {
        f"--master_server_address={own_cluster.address}",
        "--global_segment_size=0",
        f"--local_buffer_size={16 * MB}",
        "--threads=3",
    }


def test_its_transfers_are_bounded_as_ours_are(
    own_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that the user has set wins, and none of ours stays behind in this process."""
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_RPC_TIMEOUT_MS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "7")
    client = own_cluster.blocking.start_client(global_segment_size=SEGMENT)
    assert words(client, "environ") >= {
        "MC_TCP_STATUS_TIMEOUT_SEC=2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC=7",
        "MC_RPC_TIMEOUT_MS=2500",
    }
    assert "MC_TCP_STATUS_TIMEOUT_SEC" not in os.environ


# --- its life ---------------------------------------------------------------------------------


async def test_comes_back_on_the_same_port(client: StandaloneClient) -> None:
    address, pid = client.address, client.pid
    with socket.create_connection(("127.0.0.1", port_of(client))):
        await client.kill()
        assert not client.running
        assert "real client service" in client.output()
        await client.start()
    assert client.address == address
    assert client.pid != pid
    await client.stop()
    assert client.pid is None
    assert client.output() == ""
    await client.start()
    assert client.address == address
    assert listening(port_of(client))


async def test_is_paused_and_resumed(client: StandaloneClient) -> None:
    await client.pause()
    status = Path(f"/proc/{client.pid}/status")
    assert "State:\tT (stopped)" in await asyncio.to_thread(status.read_text)
    assert client.running
    await client.resume()
    assert "State:\tT" not in await asyncio.to_thread(status.read_text)


async def test_verbs_of_an_ended_client_say_that_it_does_not_run(client: StandaloneClient) -> None:
    await client.stop()
    await client.stop()
    await client.kill()
    with pytest.raises(ClusterError, match=r"stand-alone client does not run.*client\.start\(\)"):
        await client.pause()
    with pytest.raises(ClusterError, match="can't be resumed"):
        await client.resume()


async def test_ends_with_its_cluster(own_cluster: LocalCluster) -> None:
    clients = [await own_cluster.start_client(global_segment_size=SEGMENT) for _ in range(4)]
    pids = [pid_of(client) for client in clients]
    running, paused, killed, stopped = clients
    await paused.pause()
    await killed.kill()
    await stopped.stop()
    assert own_cluster.running
    await own_cluster.stop()
    assert not any(client.running for client in clients)
    assert all(ends(pid, 0) for pid in pids)
    assert running.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)  # reaped: no zombie is left
    await own_cluster.start()
    await running.start()  # a cluster that is started anew can have its old clients back
    assert running.running


def test_is_ended_before_its_master(
    own_cluster: LocalCluster, client: StandaloneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would try to reach the master, and its end would take time."""
    gone: list[str] = []
    dispose = ChildProcess.dispose

    def note_and_dispose(process: ChildProcess) -> None:
        gone.append(process.name)
        dispose(process)

    monkeypatch.setattr(ChildProcess, "dispose", note_and_dispose)
    own_cluster.blocking.stop()
    assert gone == ["mooncake_client", "mooncake_master"]


# --- it dies with its parent, and only with it ------------------------------------------------


def test_a_killed_parent_takes_it_along(
    run_python: Callable[[str], subprocess.Popen[str]],
) -> None:
    parent = run_python(
        """
        from aiomooncake.cluster import LocalCluster
        cluster = LocalCluster()
        cluster.blocking.start()
        print(cluster.blocking.start_client(global_segment_size="64MiB").pid, flush=True)
        input()
        """
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not ends(pid, 0)
    parent.kill()
    assert ends(pid, 10)


def test_a_forked_child_leaves_it_alone(
    run_python: Callable[[str], subprocess.Popen[str]],
) -> None:
    parent = run_python(
        """
        import os, sys
        from aiomooncake.cluster import LocalCluster
        from aiomooncake.errors import ForkedProcessError
        cluster = LocalCluster()
        cluster.blocking.start()
        client = cluster.blocking.start_client(global_segment_size="64MiB")
        child = os.fork()
        if child == 0:
            assert client.running
            for verb in ("start", "pause", "resume", "kill", "start_client"):
                try:
                    getattr(cluster.blocking if verb == "start_client" else client.blocking, verb)()
                except ForkedProcessError:
                    continue
                os._exit(1)
            client.blocking.stop()
            cluster.blocking.stop()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(status, client.running, flush=True)
        cluster.blocking.stop()
        """
    )
    output, _ = parent.communicate(timeout=30)
    assert output == "0 True\n"
    assert parent.returncode == 0


def test_a_client_of_another_process_is_refused(
    client: StandaloneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client.blocking, "_owner", os.getpid() + 1)
        with pytest.raises(ForkedProcessError, match="StandaloneClient belongs to process"):
            client.blocking.kill()


def test_is_killed_with_a_warning_when_its_cluster_is_dropped() -> None:
    clusters = [LocalCluster()]
    clusters[0].blocking.start()
    # Nobody keeps the client but its cluster: that is enough.
    pid = pid_of(clusters[0].blocking.start_client(global_segment_size=SEGMENT))
    gc.collect()
    assert not ends(pid, 0)
    with pytest.warns(ResourceWarning) as warned:
        clusters.clear()
    assert {str(one.message).partition(" ")[0] for one in warned} == {
        "mooncake_client",
        "mooncake_master",
    }
    assert ends(pid, 0)


# --- starts that fail -------------------------------------------------------------------------


def test_a_cluster_that_does_not_run_has_no_clients(own_cluster: LocalCluster) -> None:
    own_cluster.blocking.kill()
    with pytest.raises(ClusterError, match=r"master does not run.*joined.*cluster\.start\(\)"):
        own_cluster.blocking.start_client()
    with pytest.raises(ClusterError, match="does not run"):
        LocalCluster().blocking.start_client()


async def test_a_client_that_ends_shows_code_and_output(with_program: WithProgram) -> None:
    cluster = await asyncio.to_thread(with_program, "echo no such luck >&2; exit 3")
    with pytest.raises(
        ClusterError, match=r"(?s)mooncake_client ended with exit code 3\..*no such luck"
    ):
        await cluster.start_client()
    assert not cluster.blocking._clients


def test_a_missing_system_library_is_an_engine_error(with_program: WithProgram) -> None:
    cluster = with_program("echo 'error while loading shared libraries: libx' >&2; exit 127")
    with pytest.raises(EngineNotInstalledError, match="libx"):
        cluster.blocking.start_client()


def test_a_wheel_without_the_program_is_told(
    own_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EngineNotInstalledError, match="needs the mooncake_client program"):
        own_cluster.blocking.start_client()


async def test_a_cancelled_start_leaves_nothing(with_program: WithProgram, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cluster = await asyncio.to_thread(with_program, f"echo $$ > {pipe}; exec sleep 60")
    task = asyncio.create_task(cluster.start_client())
    pid = int(await asyncio.to_thread(pipe.read_text))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends(pid, 0)
    assert not cluster.blocking._clients


async def test_a_frozen_master_is_not_waited_for_long(own_cluster: LocalCluster) -> None:
    """The engine tries 20 times, for 30 s each; ours is one request of 2.5 s."""
    await own_cluster.pause()
    with pytest.raises(ClusterError, match="mooncake_client ended with signal SIGABRT"):
        await own_cluster.start_client()
    assert own_cluster.running


@pytest.mark.parametrize("lost", ["port", "socket"])
def test_a_lost_race_is_run_again(
    own_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Another program takes the port, or the shared-memory socket named after it, meanwhile."""
    choose = _programs.choose_ports
    rivals: list[tuple[int, socket.socket]] = []

    def choose_and_lose(count: int) -> tuple[int, ...]:
        ports = choose(count)
        if not rivals:
            rival = socket.socket(socket.AF_INET if lost == "port" else socket.AF_UNIX)
            if lost == "port":
                rival.bind(("127.0.0.1", ports[0]))
                rival.listen()
            else:
                rival.bind(f"\0@mooncake_client_{ports[0]}.sock")
            rivals.append((ports[0], rival))
        return ports

    monkeypatch.setattr(_server, "choose_ports", choose_and_lose)
    client = own_cluster.blocking.start_client(global_segment_size=SEGMENT)
    with contextlib.closing(rivals[0][1]):
        assert port_of(client) != rivals[0][0]
    assert client.running


def test_a_socket_that_was_taken_between_two_lives_is_named(client: StandaloneClient) -> None:
    client.blocking.kill()
    name = f"@mooncake_client_{port_of(client)}.sock"
    with socket.socket(socket.AF_UNIX) as rival:
        rival.bind(f"\0{name}")
        with pytest.raises(ClusterError, match=f"abstract socket {name} is in use"):
            client.blocking.start()
    client.blocking.start()


def test_one_client_does_not_wait_for_another(with_program: WithProgram, tmp_path: Path) -> None:
    """The cluster can be used, and given up, while a client of it is being started."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cluster = with_program(f"echo $$ > {pipe}; exec sleep 60")
    hurry = threading.Event()
    failed: list[ClusterError] = []

    def start() -> None:
        try:
            cluster.blocking.start_client(hurry=hurry)
        except ClusterError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    pid = int(pipe.read_text())
    cluster.blocking.pause()
    cluster.blocking.resume()
    hurry.set()
    thread.join(10)
    assert "cancelled" in str(failed[0])
    assert ends(pid, 0)


async def test_senseless_arguments_are_refused(own_cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="global_segment_size='much'"):
        await own_cluster.start_client(global_segment_size="much")
    with pytest.raises(ConfigError, match="local_buffer_size"):
        await own_cluster.start_client(local_buffer_size=-1)
    with pytest.raises(InvalidArgumentError, match="must be a sequence of flags"):
        await own_cluster.start_client(extra_args="--threads=3")

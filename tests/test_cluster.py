from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aiomooncake import _child, _programs, _server
from aiomooncake.cluster import LocalCluster
from aiomooncake.errors import (
    ClusterError,
    EngineNotInstalledError,
    ForkedProcessError,
    InvalidArgumentError,
)
from aiomooncake.testing import LoopStallProbe
from tests.programs import ends, listening, make_script, python_programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Stubborn = Callable[[], Awaitable[tuple[LocalCluster, int, Path]]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the private master exists for Linux only"
)


@pytest.fixture
def master() -> Iterator[LocalCluster]:
    """A cluster that was not started yet; a missing engine fails the test, it never skips it."""
    made = LocalCluster()
    yield made
    made.blocking.kill()  # a gentle stop takes a second
    made.blocking.stop()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Make a shell script that stands in for the master."""
    return lambda body: make_script(tmp_path / "mooncake_master", body)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A place in the file system where a script can say something and a test waits for it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def never_ready(program: Callable[[str], Path], pipe: Path) -> tuple[LocalCluster, Path]:
    """A cluster whose master tells its pid through the pipe and never serves."""
    return LocalCluster(binary=program(f"echo $$ > {pipe}; exec sleep 60")), pipe


@pytest.fixture
def stubborn(
    program: Callable[[str], Path], pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> Stubborn:
    """Start a master that says `no` through the pipe when it gets a SIGTERM, and goes on."""
    monkeypatch.setattr(_server, "await_ready", lambda *_: None)
    binary = program(
        f"trap 'echo no > {pipe}' TERM; echo up > {pipe}; while :; do sleep 0.05; done"
    )

    async def start() -> tuple[LocalCluster, int, Path]:
        master = LocalCluster(binary=binary)
        await master.start()
        assert await asyncio.to_thread(pipe.read_text) == "up\n"
        assert master.pid is not None
        return master, master.pid, pipe

    return start


@pytest.fixture
def run_python() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    with python_programs() as start:
        yield start


def health(port: int, timeout: float = 5.0) -> object:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())["service_ready"]


# --- the life of a master -------------------------------------------------------------------


def test_enters_without_a_loop_and_leaves_nothing(master: LocalCluster) -> None:
    with master as entered:
        assert entered is master
        assert health(master.metrics_port) is True
        assert master.metrics_url == f"http://127.0.0.1:{master.metrics_port}"
        assert master.address.startswith("127.0.0.1:")
        pid = master.pid
        assert pid is not None
        assert str(pid) in repr(master)
        assert "Master" in master.output()
    assert not master.running
    assert master.pid is None
    assert master.output() == ""
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # reaped: no zombie is left


async def test_enters_with_a_loop_that_goes_on(master: LocalCluster) -> None:
    async with LoopStallProbe() as probe, master:
        assert await asyncio.to_thread(health, master.metrics_port) is True
    assert not master.running
    assert probe.longest < 0.2


def test_listens_on_loopback_only(master: LocalCluster) -> None:
    master.blocking.start()
    for port in master.blocking.ports:
        assert listening(port) == {"0100007F"}


def test_flags_reach_the_master() -> None:
    master = LocalCluster(lease_ttl=0.5, client_ttl=7, extra_args=["--eviction_ratio=0.25"])
    master.blocking.start()
    words = Path(f"/proc/{master.pid}/cmdline").read_text().split("\0")
    master.blocking.kill()
    assert {"--default_kv_lease_ttl=500", "--client_ttl=7", "--eviction_ratio=0.25"} <= set(words)


async def test_comes_back_on_the_same_ports_after_a_kill(master: LocalCluster) -> None:
    await master.start()
    address, port, pid = master.address, master.metrics_port, master.pid
    # Connections that the dead master leaves behind must not keep its successor off the ports.
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
        await master.kill()
        assert not master.running
        assert "Master" in master.output()  # what a crashed one said can still be read
        await master.start()
    assert await asyncio.to_thread(health, port) is True
    assert (master.address, master.metrics_port) == (address, port)
    assert master.pid != pid


async def test_comes_back_on_the_same_ports_after_a_stop(master: LocalCluster) -> None:
    await master.start()
    address = master.address
    await master.stop()
    await master.start()
    assert master.address == address
    assert health(master.metrics_port) is True


async def test_a_paused_master_is_silent_until_it_is_resumed(master: LocalCluster) -> None:
    await master.start()
    await master.pause()
    status = await asyncio.to_thread(Path(f"/proc/{master.pid}/status").read_text)
    assert "State:\tT (stopped)" in status
    await master.pause()
    assert master.running
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(health, master.metrics_port, timeout=0.2)
    await master.resume()
    assert await asyncio.to_thread(health, master.metrics_port) is True


async def test_a_paused_master_can_be_stopped_and_killed(
    master: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    for end in (master.stop, master.kill):
        await master.start()
        pid = master.pid
        assert pid is not None
        await master.pause()
        await end()
        assert not master.running
        assert ends(pid, 0)
    assert "SIGTERM" not in caplog.text  # the stop was a gentle one


async def test_every_verb_can_be_repeated(master: LocalCluster) -> None:
    await master.stop()
    await master.kill()
    await master.start()
    pid = master.pid
    await master.start()
    assert master.pid == pid
    await master.resume()
    await master.kill()
    await master.kill()
    await master.stop()
    await master.stop()


async def test_verbs_of_a_running_master_say_that_it_does_not_run(master: LocalCluster) -> None:
    for verb in (master.pause, master.resume):
        with pytest.raises(ClusterError, match=r"does not run.*start"):
            await verb()
    with pytest.raises(ClusterError, match=r"cluster\.start"):
        _ = master.address
    assert repr(master) == "<LocalCluster not started>"


def test_started_in_one_loop_and_stopped_in_another(master: LocalCluster) -> None:
    asyncio.run(master.start())
    assert health(master.metrics_port) is True
    asyncio.run(master.stop())
    assert not master.running


def test_two_clusters_live_side_by_side() -> None:
    with LocalCluster() as one, LocalCluster() as other:
        assert one.address != other.address
        assert health(one.metrics_port) is health(other.metrics_port) is True


# --- it dies with its parent, and only with it -----------------------------------------------


def test_a_killed_parent_takes_the_master_along(
    run_python: Callable[[str], subprocess.Popen[str]],
) -> None:
    parent = run_python(
        """
        from aiomooncake.cluster import LocalCluster
        master = LocalCluster()
        master.blocking.start()
        print(master.pid, flush=True)
        input()
        """
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not ends(pid, 0)
    parent.kill()
    assert ends(pid, 10)


def test_a_parent_that_leaves_without_stop_takes_the_master_along(
    run_python: Callable[[str], subprocess.Popen[str]],
) -> None:
    parent = run_python(
        """
        import warnings
        from aiomooncake.cluster import LocalCluster
        warnings.simplefilter("default")
        master = LocalCluster()
        master.blocking.start()
        print(master.pid, flush=True)
        """
    )
    output, _ = parent.communicate(timeout=30)
    pid, _, rest = output.partition("\n")
    assert parent.returncode == 0
    assert "ResourceWarning: mooncake_master" in rest
    assert ends(int(pid), 0)


def test_the_end_of_the_starting_thread_leaves_it_alive(master: LocalCluster) -> None:
    """PR_SET_PDEATHSIG fires when the thread ends that started the child, not its process."""
    thread = threading.Thread(target=master.blocking.start)
    thread.start()
    thread.join()
    assert master.pid is not None
    assert not ends(master.pid, 0.3)
    assert health(master.metrics_port) is True


def test_a_forked_child_leaves_the_master_alone(
    run_python: Callable[[str], subprocess.Popen[str]],
) -> None:
    parent = run_python(
        """
        import gc, os, sys
        from aiomooncake.cluster import LocalCluster
        from aiomooncake.errors import ForkedProcessError
        master = LocalCluster()
        master.blocking.start()
        child = os.fork()
        if child == 0:
            assert master.running
            for verb in ("start", "pause", "resume", "kill"):
                try:
                    getattr(master.blocking, verb)()
                except ForkedProcessError:
                    continue
                os._exit(1)
            master.blocking.stop()
            with LocalCluster() as own:      # the child has no threads of its parent
                assert own.running and own.address != master.address
            # As if another thread of the parent was just asking after the master: then Popen does
            # not notice here that it is nobody's child of ours.
            master.blocking._process._process._waitpid_lock.acquire()
            del master
            gc.collect()
            sys.exit(0)                      # the normal way out, with every exit handler
        _, status = os.waitpid(child, 0)
        print(status, master.running, flush=True)
        master.blocking.stop()
        """
    )
    output, _ = parent.communicate(timeout=30)
    assert output == "0 True\n"
    assert parent.returncode == 0


def test_a_cluster_of_another_process_is_refused(
    master: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master.blocking, "_owner", os.getpid() + 1)
    with pytest.raises(ForkedProcessError, match="can't be started in its forked child"):
        master.blocking.start()


def test_a_dropped_cluster_is_killed_with_a_warning() -> None:
    owners = [LocalCluster()]
    owners[0].blocking.start()
    pid = owners[0].pid
    assert pid is not None
    with pytest.warns(ResourceWarning, match=rf"mooncake_master \(pid {pid}\) still ran"):
        owners.clear()
    assert ends(pid, 0)


def test_ctrl_c_is_not_for_the_master(master: LocalCluster) -> None:
    """A terminal sends SIGINT to the whole process group."""
    master.blocking.start()
    assert master.pid is not None
    assert os.getpgid(master.pid) != os.getpgid(0)


# --- starts that fail ------------------------------------------------------------------------


def test_a_master_that_ends_shows_code_and_output(program: Callable[[str], Path]) -> None:
    broken = LocalCluster(binary=program("echo something is wrong >&2; exit 3"))
    with pytest.raises(ClusterError, match=r"(?s)exit code 3\..*something is wrong"):
        broken.blocking.start()
    assert not broken.running
    assert broken.pid is None


def test_a_master_that_crashes_names_the_signal(program: Callable[[str], Path]) -> None:
    broken = LocalCluster(binary=program("kill -SEGV $$"))
    with pytest.raises(ClusterError, match=r"(?s)signal SIGSEGV.*\(nothing\)"):
        broken.blocking.start()


def test_only_the_end_of_long_output_is_shown(program: Callable[[str], Path]) -> None:
    broken = LocalCluster(binary=program('for i in $(seq 100); do echo "line $i."; done; exit 1'))
    with pytest.raises(ClusterError) as caught:
        broken.blocking.start()
    assert "line 100." in str(caught.value)
    assert "line 81." in str(caught.value)
    assert "line 80." not in str(caught.value)


def test_an_unknown_flag_is_told_in_the_masters_words() -> None:
    broken = LocalCluster(extra_args=["--no_such_flag=1"])
    with pytest.raises(ClusterError, match="unknown command line flag 'no_such_flag'"):
        broken.blocking.start()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    broken = LocalCluster(binary=tmp_path / "nothing")
    with pytest.raises(ClusterError, match=r"cannot execute .*/nothing: No such file"):
        broken.blocking.start()


def test_a_master_that_never_serves_is_given_up(program: Callable[[str], Path]) -> None:
    broken = LocalCluster(binary=program("echo starting; exec sleep 60"), start_timeout=0.2)
    with pytest.raises(ClusterError, match=r"(?s)not ready within 0\.2 s.*refused.*starting"):
        broken.blocking.start()
    assert broken.pid is None


def test_a_missing_system_library_is_an_engine_error(program: Callable[[str], Path]) -> None:
    loader = "error while loading shared libraries: libibverbs.so.1: cannot open"
    broken = LocalCluster(binary=program(f"echo '{loader}' >&2; exit 127"))
    with pytest.raises(EngineNotInstalledError, match=r"libibverbs\.so\.1.*apt-get install"):
        broken.blocking.start()


@pytest.mark.parametrize(
    ("wheel", "advice"),
    [
        ({"mooncake-transfer-engine-non-cuda": "0.3.12.post1"}, "nvidia-cuda-runtime-cu12"),
        ({"mooncake-transfer-engine": "0.3.13.post1"}, "it belongs to the CUDA runtime"),
    ],
)
def test_a_missing_cuda_runtime_is_told_as_connect_does(
    program: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    wheel: dict[str, str],
    advice: str,
) -> None:
    """Wheels without CUDA were built against it by mistake: the system has no package for that."""
    monkeypatch.setattr(_programs, "installed_distributions", lambda: wheel)
    loader = (
        "mooncake_master: error while loading shared libraries: libcudart.so.12: cannot open "
        "shared object file: No such file or directory"
    )
    broken = LocalCluster(binary=program(f"echo '{loader}' >&2; exit 127"))
    with pytest.raises(
        EngineNotInstalledError, match=r"exit code 127: .*libcudart\.so\.12"
    ) as told:
        broken.blocking.start()
    assert advice in str(told.value)
    assert "apt-get" not in str(told.value)


async def test_a_stubborn_master_is_killed(
    stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_child, "_STOP_GRACE", 0.1)
    master, pid, _ = await stubborn()
    with caplog.at_level(logging.WARNING, logger="aiomooncake"):
        await master.stop()
    assert "did not end within 0.1 s" in caplog.text
    assert ends(pid, 0)


# --- ports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "seen"), [(0, True), (1, True), (1, False)])
def test_a_lost_port_race_is_run_again(
    master: LocalCluster, monkeypatch: pytest.MonkeyPatch, lost: int, seen: bool
) -> None:
    """Another program takes a port between its choice and the start of the master.

    It may have let it go before anybody looks who it was; of its HTTP port the master says so.
    """
    if not seen:
        monkeypatch.setattr(_server, "taken", lambda _: [])
    choose = _programs.choose_ports
    rivals: list[socket.socket] = []

    def choose_and_lose(count: int) -> tuple[int, ...]:
        ports = choose(count)
        if not rivals:
            rivals.append(socket.create_server(("127.0.0.1", ports[lost])))
        return ports

    monkeypatch.setattr(_server, "choose_ports", choose_and_lose)
    master.blocking.start()
    assert health(master.metrics_port) is True
    with contextlib.closing(rivals[0]):
        assert rivals[0].getsockname()[1] not in master.blocking.ports


def test_another_master_is_not_taken_for_ours(
    master: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its /health answers on the lost port, and is ready, before ours has noticed the loss."""
    choose = _programs.choose_ports
    with LocalCluster() as rival:
        offers = [rival.blocking.ports, choose(2)]
        monkeypatch.setattr(_server, "choose_ports", lambda _: offers.pop(0))
        master.blocking.start()
        assert master.address != rival.address
        assert not offers


def test_a_port_that_was_taken_between_two_lives_is_named(master: LocalCluster) -> None:
    master.blocking.start()
    master.blocking.kill()
    port = int(master.address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ClusterError, match=f"Port {port} of 127.0.0.1 is in use"),
    ):
        master.blocking.start()
    master.blocking.start()


def test_ports_lie_below_those_the_kernel_gives_to_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low > 21000:  # else there is no room below
        assert max(_programs.choose_ports(100)) < low


# --- cancellation ----------------------------------------------------------------------------


async def test_a_cancelled_start_leaves_nothing(never_ready: tuple[LocalCluster, Path]) -> None:
    """Also when the cancellation is repeated while the first one is cleaned up after."""
    master, pipe = never_ready
    task = asyncio.create_task(master.start())
    pid = int(await asyncio.to_thread(pipe.read_text))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends(pid, 0)
    assert not master.running
    assert master.pid is None


async def test_a_start_that_is_cancelled_when_it_has_just_ended_leaves_nothing(
    master: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is given the process, so nobody would end it."""
    task: asyncio.Task[object] | None = None
    loop = asyncio.get_running_loop()
    await_ready = _programs.await_ready

    def cancel_then(*args: Any) -> None:
        await_ready(*args)
        assert task is not None
        loop.call_soon_threadsafe(task.cancel)  # which the task hears before the thread's end

    monkeypatch.setattr(_server, "await_ready", cancel_then)
    task = asyncio.create_task(master.start())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not master.running
    monkeypatch.undo()
    async with master:
        task = asyncio.create_task(master.start_client(global_segment_size=0))
        monkeypatch.setattr(_server, "await_ready", cancel_then)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [client for client in master.blocking._clients if client.running]


async def test_a_start_in_a_cancelled_scope_leaves_nothing(
    never_ready: tuple[LocalCluster, Path],
) -> None:
    master, pipe = never_ready
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(master.start)
            pid = int(await asyncio.to_thread(pipe.read_text))
            scope.cancel()
    assert scope.cancelled_caught
    assert ends(pid, 0)
    assert master.pid is None


async def test_a_start_cancelled_at_once_starts_nothing(master: LocalCluster) -> None:
    task = asyncio.create_task(master.start())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not master.running


async def test_a_cancelled_scope_still_stops_the_master(master: LocalCluster) -> None:
    with anyio.CancelScope() as scope:
        async with master:
            pid = master.pid
            scope.cancel()
            await anyio.sleep(10)
    assert pid is not None
    assert ends(pid, 0)
    assert not master.running


async def test_a_cancelled_stop_kills(stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_child, "_STOP_GRACE", 60.0)
    master, pid, pipe = await stubborn()
    task = asyncio.create_task(master.stop())
    assert await asyncio.to_thread(pipe.read_text) == "no\n"  # SIGTERM came and was ignored
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends(pid, 0)


# --- the program and the arguments -------------------------------------------------------------


def test_finds_the_wheels_own_program_without_importing_it() -> None:
    code = (
        "import sys; from aiomooncake._programs import find_program; "
        "print(find_program('mooncake_master')); "
        "assert not [m for m in sys.modules if m.startswith('mooncake')]"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = Path(run.stdout.strip())
    assert found.parent.name == "mooncake"
    assert found.read_bytes()[:4] == b"\x7fELF"


def test_a_missing_wheel_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EngineNotInstalledError, match=r"none is installed.*aiomooncake\[cpu\]"):
        _programs.find_program("mooncake_master")
    (tmp_path / "mooncake").mkdir()
    with pytest.raises(EngineNotInstalledError, match="has none"):
        _programs.find_program("mooncake_master")
    program = tmp_path / "mooncake" / "mooncake_master"
    program.touch(0o600)
    with pytest.raises(ClusterError, match=f"chmod \\+x {program}"):
        _programs.find_program("mooncake_master")
    program.chmod(0o700)
    assert _programs.find_program("mooncake_master") == program


def test_another_system_is_sent_to_the_engine_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EngineNotInstalledError, match=r"Linux only.*darwin.*memory://"):
        _programs.find_program("mooncake_master")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LocalCluster(lease_ttl=0), "lease_ttl must be .* above 0, got 0"),
        (lambda: LocalCluster(client_ttl=2.5), "client_ttl must be a whole number .* got 2.5"),
        (lambda: LocalCluster(client_ttl=0), "client_ttl must be a whole number"),
        (lambda: LocalCluster(start_timeout=float("nan")), "start_timeout must be"),
        (lambda: LocalCluster(extra_args="--v=1"), "must be a sequence of flags"),
    ],
)
def test_senseless_arguments_are_refused(make: Callable[[], LocalCluster], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        make()


@pytest.mark.parametrize(
    ("status", "body", "ready"),
    [
        (200, b'{"service_ready":true}', True),
        (200, b"OK", True),  # masters before 0.3.10.post2
        (200, b'{"service_ready":false}', False),
        (200, b"[]", False),
        (200, b"no json", False),
        (503, b'{"service_ready":true}', False),
    ],
)
def test_reads_every_form_of_health(status: int, body: bytes, ready: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.0 %d X\r\n\r\n%s" % (status, body))

        thread = threading.Thread(target=answer)
        thread.start()
        obstacle = _programs.health(server.getsockname()[1])
        thread.join()
    assert (not obstacle) is ready

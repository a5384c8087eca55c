"""The command line, run as a user runs it: as a process, with and without a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from aiomooncake._verdict import Diagnosis, DiagnosisKind
from aiomooncake.cli.commands import cli
from aiomooncake.cli.exits import EXITS, exit_code
from aiomooncake.cli.terminal import Screen, log_to
from aiomooncake.cluster import LocalCluster
from aiomooncake.errors import (
    ClusterError,
    EngineNotInstalledError,
    InternalError,
    SetupTimeoutError,
    WarmupError,
)
from tests.warmup_fakes import free_port

needs_master = pytest.mark.skipif(
    sys.platform != "linux", reason="the engine and its master exist for Linux only"
)

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOISE = ("InitGoogleLogging", ".cpp:", "Warmup put failed")
LIMIT = 30.0  # seconds for one run; the longest takes about 4

# Ctrl-C reaches only those whose controlling terminal it is typed on.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    """The environment without what would change how the command line looks or what it reads."""
    foreign = ("MOONCAKE_", "MC_", "TTY_", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"TERM": "xterm-256color"} | more


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiomooncake", *args]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT,
    )


class Terminal:
    """A command on a pseudo terminal of its own, and everything it has written."""

    def __init__(self, *args: str) -> None:
        self.text = ""
        self._descriptor, other = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *command(*args)],
            env=environment(COLUMNS="90"),
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)

    def read_until(self, wanted: str | None) -> None:
        """Read until some text has come, or with None to the end."""
        deadline = time.monotonic() + LIMIT
        while wanted is None or wanted not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} has not come: {self.text}"
            if not select.select([self._descriptor], [], [], left)[0]:
                continue
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # the other end is closed
                data = b""
            if not data:
                assert wanted is None, f"ended without {wanted!r}: {self.text}"
                return
            self.text += data.decode()

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def wait(self) -> int:
        """Read to the end; the exit code."""
        self.read_until(None)
        return self._process.wait(LIMIT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._descriptor)


@contextlib.contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(*args)) as opened:
        yield opened


def assert_master_stopped(output: str) -> None:
    found = re.search(r"a private one on 127\.0\.0\.1:(\d+)", output)
    assert found is not None, output
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(found[1])), timeout=5)


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


# --- demo -------------------------------------------------------------------------------------


@needs_master
def test_the_demo_shows_the_race_and_leaves_nothing() -> None:
    done = run("demo", "--mount-after", "0.5")
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert not [line for line in done.stdout.splitlines() if any(bad in line for bad in NOISE)]
    assert "\x1b" not in done.stdout
    for rank in range(8):
        # Each rank meets the race, and each is ready only after the mount.
        assert f"TP{rank}  try 1: put -200 NO_AVAILABLE_HANDLE, again in" in done.stdout
        assert re.search(rf"TP{rank}  try \d: put, exists, get, ready in", done.stdout)
    before, _, after = done.stdout.partition("every rank mounts")
    assert "ready in" not in before
    for fact in (
        r"warm-up  \d+ tries, \d+ answered put -200",
        r"ready    every rank, \d+ to \d+ ms after the mount",
        r"values   64 MiB put at \d+ MiB/s, got by neighbours at \d+ MiB/s",
        r"closed   ranks and master in \d\.\d s",
        r"loop     never still for longer than \d+ ms",
    ):
        assert re.search(fact, after), done.stdout
    assert_master_stopped(done.stdout)


@needs_master
def test_the_demo_draws_a_table_on_a_terminal() -> None:
    with terminal("demo", "--mount-after", "0.5") as shown:
        assert shown.wait() == 0, shown.text
    assert shown.text.rindex("\x1b[?25h") > shown.text.rindex("\x1b[?25l")  # the cursor is back
    text = ANSI.sub("", shown.text)
    assert not [bad for bad in NOISE if bad in text]
    assert "no memory is mounted, so every put fails" in text
    final = text[text.rindex("Rank") :]
    for rank in range(8):
        assert re.search(rf"TP{rank} +\d +put, exists, get +ready in", final), final
    assert "closed   ranks and master" in final
    assert_master_stopped(text)


@needs_master
def test_ctrl_c_leaves_cleanly_with_the_master_stopped() -> None:
    with terminal("demo", "--mount-after", "600") as shown:
        shown.read_until("again in")
        shown.type(b"\x03")
        assert shown.wait() == 130, shown.text
    assert "interrupted, everything is closed" in shown.text
    assert "Traceback" not in shown.text
    assert shown.text.rindex("\x1b[?25h") > shown.text.rindex("\x1b[?25l")
    assert_master_stopped(ANSI.sub("", shown.text))


def test_a_terminate_signal_leaves_cleanly() -> None:
    with subprocess.Popen(
        command("demo", "--memory", "--mount-after", "600"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "again in" in line:
                break
        process.terminate()
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert error == "terminated, everything is closed\n"


def test_the_demo_runs_in_memory() -> None:
    env = {"NO_COLOR": "1", "PYTHONWARNINGS": "always::ResourceWarning"}
    done = run("demo", "--memory", "--mount-after", "0.2", "--ranks", "3", **env)
    assert done.returncode == 0, done
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "engine   in memory" in done.stdout
    assert re.search(r"warm-up  \d+ tries, \d+ answered put -200", done.stdout)
    assert "values   24 MiB put" in done.stdout


def test_log_lines_stay_whole_above_the_table() -> None:
    with terminal("demo", "--memory", "--mount-after", "0.3", "--ranks", "3", "-v") as shown:
        assert shown.wait() == 0, shown.text
    lines = ANSI.sub("", shown.text).replace("\r", "\n").splitlines()
    for rank in range(3):
        log = f"WARNING [TP{rank}] Warmup put failed (attempt 1), ret=-200 NO_AVAILABLE_HANDLE, "
        assert [
            line for line in lines if re.fullmatch(rf"\S+ {re.escape(log)}retrying in .*", line)
        ]


def test_a_reader_that_goes_away_does_not_break_the_demo() -> None:
    with subprocess.Popen(
        command("demo", "--memory", "--mount-after", "0.3"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(LIMIT) == 0


@needs_master
def test_a_missing_engine_is_told_with_the_way_out() -> None:
    code = "import sys; sys.modules['mooncake'] = None; from aiomooncake.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"],
        env=environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 3, done
    assert "pip install" in done.stderr
    assert "demo --memory" in done.stderr


def test_missing_extras_are_named() -> None:
    code = "import sys; sys.modules['rich'] = None; from aiomooncake.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 1
    assert done.stderr == "The command line needs rich: pip install 'aiomooncake[cli]'\n"


# --- warmup -----------------------------------------------------------------------------------


@needs_master
def test_warmup_prints_one_json_document(master: LocalCluster) -> None:
    done = run(
        "warmup", "--master", master.address, "--ranks", "2", "--segment-size", "32mb", "--json"
    )
    assert done.returncode == 0, done
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["ready"] is True
    assert document["error"] is None
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    for rank in document["ranks"]:
        assert rank["ready"] is True
        assert rank["diagnosis"] is None
        assert rank["seconds"] > 0
        (attempt,) = rank["attempts"]
        assert set(attempt) == {"number", "step", "code", "name", "seconds", "delay"}
        assert (attempt["step"], attempt["code"], attempt["name"]) == ("done", 0, "OK")


@needs_master
def test_warmup_exits_by_its_diagnosis(master: LocalCluster) -> None:
    bounds = ("--max-attempts", "2", "--segment-size", "0", "--ranks", "2")
    port = ("--metrics-port", str(master.metrics_port))
    done = run("warmup", "--master", master.address, *port, *bounds)
    assert done.returncode == 12, done
    assert done.stderr == ""
    assert "failed   no-segment, every rank" in done.stdout
    assert "cure     " in done.stdout
    done = run("warmup", *port, *bounds, "--json", MOONCAKE_MASTER=master.address)
    assert done.returncode == 12, done
    document = json.loads(done.stdout)
    assert document["exit_code"] == 12
    assert document["ready"] is False
    assert document["error"]["type"] == "WarmupError"
    for rank in document["ranks"]:
        assert [attempt["code"] for attempt in rank["attempts"]] == [-200, -200]
        assert rank["attempts"][0]["delay"] > 0
        assert rank["diagnosis"]["kind"] == "no-segment"


@needs_master
def test_warmup_against_a_closed_port_says_so_in_time() -> None:
    began = time.monotonic()
    done = run("warmup", "--master", f"127.0.0.1:{free_port()}", "--timeout", "0.5", "--json")
    assert time.monotonic() - began < 5
    assert done.returncode == 4, done
    assert "waiting for the master 127.0.0.1:" in done.stderr
    assert "\nerror: [TP0] connect to 127.0.0.1:" in done.stderr
    document = json.loads(done.stdout)
    assert document["error"]["type"] == "SetupTimeoutError"
    assert document["ranks"] == [
        {"rank": 0, "ready": False, "seconds": 0.0, "attempts": [], "diagnosis": None}
    ]


@needs_master
def test_the_engines_log_is_shown_where_it_is_asked_for(master: LocalCluster) -> None:
    done = run("warmup", "--master", master.address, "--engine-log", "--json")
    assert done.returncode == 0, done
    assert ".cpp:" in done.stderr
    assert json.loads(done.stdout)["ready"] is True


def test_warmup_takes_any_url() -> None:
    done = run("warmup", "--master", "memory://x", "--ranks", "2")
    assert done.returncode == 0, done
    assert "TP1  try 1: put, exists, get, ready in" in done.stdout
    assert "2 ranks ready in" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["warmup"], "The environment names no master: set MOONCAKE_MASTER"),
        (["warmup", "--master", "nowhere"], "the port is missing"),
        (["warmup", "--master", "h:1", "--set", "protcol=tcp"], "did you mean 'protocol'?"),
        (["warmup", "--master", "h:1", "--set", "protocol"], "give KEY=VALUE"),
        (["warmup", "--master", "h:1", "--segment-size", "4 parsecs"], "global_segment_size"),
        (["warmup", "--master", "h:1", "--metrics-port", "70000"], "master_metrics_port"),
        (["warmup", "--master", "h:1", "--timeout", "nan"], "timeout"),
        (["warmup", "--master", "h:1", "--timeout", "0"], "--timeout"),
        (["demo", "--ranks", "0"], "--ranks"),
        (["demo", "--mount-after", "-1"], "--mount-after"),
        (["dmeo"], "No such command"),
    ],
)
def test_wrong_usage_is_told(args: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


# --- exit codes -------------------------------------------------------------------------------


def test_every_exit_code_is_told_in_the_help() -> None:
    codes = [each.code for each in EXITS]
    assert len(set(codes)) == len(codes)
    assert {each.cause for each in EXITS} >= set(DiagnosisKind)
    for args in (["-h"], ["demo", "-h"], ["warmup", "-h"]):
        done = CliRunner().invoke(cli, args)
        assert done.exit_code == 0
        for each in EXITS:
            assert re.search(
                rf"^ +{each.code}  .*{re.escape(each.meaning)}$", done.output, re.MULTILINE
            )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineNotInstalledError("x"), 3),
        (SetupTimeoutError("x"), 4),
        (ClusterError("x"), 5),
        (InternalError("x"), 1),
        (WarmupError("x"), 18),
        (WarmupError("x", diagnosis=Diagnosis(DiagnosisKind.MASTER_SILENT, "", "", "")), 11),
        (WarmupError("x", diagnosis=Diagnosis(DiagnosisKind.TENANT_REFUSED, "", "", "")), 17),
    ],
)
def test_errors_have_their_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


# --- the screen -------------------------------------------------------------------------------


class _StoppedTerminal:
    """A stream on which every write waits, as on a terminal after Ctrl-S."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.resumed = threading.Event()
        self.text = ""

    def write(self, text: str) -> int:
        assert self.resumed.wait(LIMIT)
        self.text += text
        return len(text)

    def flush(self) -> None:
        assert self.resumed.wait(LIMIT)

    def isatty(self) -> bool:
        return False


def test_a_stopped_terminal_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = _StoppedTerminal()
    monkeypatch.setattr(sys, "stdout", stream)

    async def print_much() -> None:
        for number in range(100):
            screen.line(f"line {number}")
            await asyncio.sleep(0)

    with Screen() as screen:
        asyncio.run(print_much())
        assert stream.text == ""
        stream.resumed.set()
    assert stream.text.splitlines() == [f"line {number}" for number in range(100)]


def test_only_what_the_table_does_not_show_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("aiomooncake")
    for verbose in (False, True):
        with Screen() as screen, log_to(screen, verbose=verbose), warnings.catch_warnings():
            warnings.simplefilter("always")
            logger.warning("an attempt", extra={"mooncake_attempt": 1})
            logger.info("a detail")
            logger.warning("trouble")
            warnings.warn("a warning", stacklevel=1)
        told = capsys.readouterr().err
        assert "trouble" in told
        assert "a warning" in told
        assert ("an attempt" in told) is verbose
        assert ("a detail" in told) is verbose

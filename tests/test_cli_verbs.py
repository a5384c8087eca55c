"""``put``, ``get``, ``exists`` and ``rm``, run as a user runs them: with pipes and terminals."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

import aiomooncake
from aiomooncake import LocalCluster
from aiomooncake.cli.commands import cli
from aiomooncake.cli.verbs import _is_text
from tests.adversity.processes import Peer
from tests.test_cli import LIMIT, command, environment, needs_master, terminal
from tests.test_docs import script
from tests.warmup_fakes import free_port

MB = 1 << 20
BINARY = b"\0\xff\n\r\n\x1b[31m\xc3\x28"

pytestmark = needs_master

Done = subprocess.CompletedProcess[bytes]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A master with one client that lends memory."""
    master = LocalCluster(lease_ttl=60, client_ttl=600, extra_args=["--eviction_ratio=0"])
    master.blocking.start()
    with Peer(master.address, keys=0, segment=128 * MB):
        asyncio.run(fill(master))
        yield master
    master.blocking.kill()
    master.blocking.stop()


async def fill(master: LocalCluster) -> None:
    """Store what tests only read."""
    async with aiomooncake.connect(master.address, global_segment_size=0) as store:
        await store.put("stream", bytes(8 * MB))
        await store.put("noise", BINARY)
        await store.put("text", "Grüße\n".encode())


class Shell:
    """Commands against one master."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __call__(self, *args: str, value: bytes = b"") -> Done:
        return subprocess.run(
            command(*args),
            env=environment(MOONCAKE_MASTER=self.address),
            input=value,
            capture_output=True,
            check=False,
            timeout=LIMIT,
        )


@pytest.fixture
def shell(cluster: LocalCluster) -> Shell:
    return Shell(cluster.address)


def check(done: Done, code: int, error: str = "") -> Done:
    assert done.returncode == code, done
    assert error in done.stderr.decode(), done
    if code == 0:
        assert done.stderr == b""
    return done


def together(shell: Shell, *commands: tuple[str, ...], value: bytes = b"") -> list[Done]:
    """Run commands side by side: most of the second or two of each is the engine's close."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda args: shell(*args, value=value), commands))


def test_bytes_come_back_as_they_went(shell: Shell, tmp_path: Path) -> None:
    check(shell("put", "binary", value=BINARY), 0)
    got, refused, listed = together(
        shell, ("get", "binary"), ("put", "binary"), ("exists", "binary", "none"), value=b"other"
    )
    assert check(got, 0).stdout == BINARY
    check(refused, 6, "is there already, and keeps its value")
    assert check(listed, 1).stdout == b"binary: 12 bytes\nnone: missing\n"
    file, output = tmp_path / "value", tmp_path / "output"
    file.write_bytes(b"replaced")
    check(shell("put", "binary", str(file), "--replace"), 0)
    assert check(shell("get", "binary", "-o", str(output)), 0).stdout == b""
    assert output.read_bytes() == b"replaced"
    check(shell("rm", "binary"), 6, "or remove it with --force")
    check(shell("rm", "--force", "binary"), 0)
    check(shell("get", "binary", "-o", str(output)), 1, "'binary' is not there")
    assert output.read_bytes() == b"replaced"  # a miss touches no file


def test_a_value_larger_than_the_local_buffer_through_pipes(shell: Shell) -> None:
    value = os.urandom(70 * MB)
    check(shell("put", "large", value=value), 0)
    assert check(shell("get", "large"), 0).stdout == value
    check(shell("rm", "--force", "large", "none"), 1, "'none' is not there")


def test_a_reader_that_has_read_enough(shell: Shell) -> None:
    with subprocess.Popen(
        command("get", "stream"),
        env=environment(MOONCAKE_MASTER=shell.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(LIMIT) == 6


def test_a_terminal_is_not_given_binary_data(shell: Shell) -> None:
    with terminal("get", "noise", "--master", shell.address) as shown:
        assert shown.wait() == 6, shown.text
    assert "is binary, and stdout is a terminal" in " ".join(shown.text.split())
    with terminal("get", "text", "--master", shell.address) as shown:
        assert shown.wait() == 0, shown.text
    assert shown.text.strip() == "Grüße"


@pytest.mark.parametrize(
    ("value", "is_text"),
    [
        (b"words\tand\r\nlines", True),
        (BINARY, False),
        (("ü" * 600).encode(), True),  # a character is cut where the look ends
        (b"x" * 1023 + b"\xc3\xbc", True),
        (b"\x1b[31m", False),
    ],
)
def test_what_is_text(value: bytes, is_text: bool) -> None:
    assert _is_text(value) is is_text


def test_nothing_is_lent() -> None:
    """So a value is in the memory of a client that stays, or it is refused."""
    empty = LocalCluster()
    empty.blocking.start()
    try:
        alone = Shell(empty.address)
        port = str(empty.metrics_port)
        told, guessed = together(
            alone, ("put", "k", "--metrics-port", port), ("put", "k"), value=b"v"
        )
        check(told, 12, "cause: no segment is mounted anywhere")
        assert b"cure:  start a client with a global_segment_size above 0" in told.stderr
        check(guessed, 12, "--metrics-port this command would tell which")
    finally:
        empty.blocking.kill()
        empty.blocking.stop()


def test_a_value_for_which_there_is_no_room(cluster: LocalCluster, shell: Shell) -> None:
    port = str(cluster.metrics_port)
    done = shell("put", "huge", "--metrics-port", port, value=bytes(200 * MB))
    check(done, 13, "cause: no mounted segment has room")


def test_a_call_that_hangs_ends_in_time() -> None:
    """The only peer stands still; its master goes on listing it."""
    master = LocalCluster(client_ttl=600)
    master.blocking.start()
    try:
        with Peer(master.address) as peer:
            peer.freeze()
            done = Shell(master.address)("put", "k", "--timeout", "2", value=b"v")
            check(done, 15, "put has not ended after 2 s; allow more time with --timeout")
    finally:
        master.blocking.kill()
        master.blocking.stop()


def test_no_master_is_told_by_the_names_of_options() -> None:
    done = Shell(f"127.0.0.1:{free_port()}")("get", "k", "--timeout", "0.5")
    check(done, 4, "or allow more time with --timeout")
    assert b"timeout=" not in done.stderr


def test_interrupted() -> None:
    with terminal("get", "k", "--master", f"127.0.0.1:{free_port()}", "--timeout", "600") as shown:
        shown.read_until("waiting for the master")
        shown.type(b"\x03")
        assert shown.wait() == 130, shown.text
    assert "interrupted, everything is closed" in shown.text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["get"], "Missing argument 'KEY'"),
        (["get", "k"], "The environment names no master"),
        (["get", "k", "--master", "nowhere"], "'--master': 'nowhere' is not usable: the port is"),
        (["get", "k", "--master", "htp://x:1"], "Invalid value for '--master': 'htp://x:1'"),
        (["get", "k", "--master", "mooncake://h:1?protcol=x"], "did you mean 'protocol'?"),
        (
            ["get", "k", "--master", "h:1", "--metrics-port", "x"],
            "Invalid value for '--metrics-port'",
        ),
        (
            ["get", "k", "--master", "h:1", "--set", "protocol"],
            "'--set': 'protocol': give KEY=VALUE",
        ),
        (["put", "k", "--master", "h:1"], "the value is empty"),
        (["put", "k", "x", "--master", "h:1"], "'x': No such file"),
        (["rm", "--master", "h:1"], "Missing argument 'KEY...'"),
        (["warmup", "--master", "nowhere"], "'--master': 'nowhere' is not usable"),
        (["serve", "--master", "nowhere"], "'--master': 'nowhere' is not usable"),
        (
            ["warmup", "--master", "h:1", "--segment-size", "x"],
            "Invalid value for '--segment-size'",
        ),
    ],
)
def test_wrong_usage_names_the_option(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2, done.output
    assert said in re.sub(r"\s+", " ", done.output)


def test_a_master_in_the_environment_does_not_stand_beside_the_option(
    cluster: LocalCluster,
) -> None:
    env = environment(MOONCAKE_MASTER_SERVER_ADDRESS="127.0.0.1:1", MOONCAKE_PROTOCOL="tcp")
    done = subprocess.run(
        command("get", "none", "--master", cluster.address),
        env=env,
        capture_output=True,
        check=False,
        timeout=LIMIT,
    )
    check(done, 1, "'none' is not there")


# --- the page for all commands --------------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_current() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    page: str = script("cli_page").page(text)
    assert page == text, "run scripts/cli_page.py"


def test_every_command_is_on_the_page_with_its_options_and_examples() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name, known in cli.commands.items():
        assert f"<!-- table: {name} -->" in text
        assert f"aiomooncake {name}" in text
        assert known.help
        first = known.help.partition("\n")[0]
        assert first.endswith("."), first


def test_examples_of_the_help_are_right() -> None:
    for name, known in cli.commands.items():
        shown = re.findall(r"aiomooncake (\w+)([^|\n]*)", known.epilog or "")
        for verb, rest in shown:
            assert verb == name
            words = shlex.split(rest.partition("&&")[0])
            known.make_context(name, words, resilient_parsing=True).close()


def test_exit_codes_are_in_the_help_of_new_commands() -> None:
    for name in ("doctor", "bench", "put", "get", "exists", "rm"):
        done = CliRunner().invoke(cli, [name, "-h"])
        assert done.exit_code == 0
        assert "Examples:\n" in done.output
        assert re.search(
            r"^ +12  no-segment: no memory is mounted anywhere$", done.output, re.MULTILINE
        )

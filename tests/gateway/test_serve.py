"""``aiomooncake serve`` as operators run it: configuration, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from aiomooncake import ConfigError, LocalCluster
from aiomooncake.cli.commands import cli
from aiomooncake.cli.serve import TOKEN_VARIABLE, read_token, target_of
from tests.gateway.clients import MB, Client, Program
from tests.programs import listening
from tests.warmup_fakes import free_port

if TYPE_CHECKING:
    import aiohttp

SERVE = ("-m", "aiomooncake", "serve", "--port", "0")
StartProgram = Callable[..., Program]


async def ended(program: Program, within: float = 20) -> int:
    return await asyncio.to_thread(program.process.wait, within)


async def test_sigterm_lets_requests_end(
    start_program: StartProgram, session: aiohttp.ClientSession
) -> None:
    program = start_program(*SERVE, "--master", "local://?global_segment_size=64mb")
    gateway = Client(session, program.read_url())
    place = urlsplit(program.url)
    assert listening(int(place.port or 0)) == {"0100007F"}  # on loopback only
    await gateway.until("/readyz", 200)
    body = json.dumps({"key": "k", "value": "x" * MB}).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"PUT /api/put HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body[: MB // 2])
    await writer.drain()
    await gateway.until("/healthz", 200)  # it has come to the request by now
    program.terminate()
    while listening(int(place.port or 0)):  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(0.01)
    writer.write(body[MB // 2 :])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert b'{"status": "success"}' in await reader.read()
    writer.close()
    await writer.wait_closed()
    assert await ended(program) == 0


async def test_sigterm_while_it_connects(start_program: StartProgram) -> None:
    program = start_program(*SERVE, "--master", f"127.0.0.1:{free_port()}")
    program.read_url()
    began = time.monotonic()
    program.terminate()
    assert await ended(program) == 0
    assert time.monotonic() - began < 5


async def test_max_wait_time(start_program: StartProgram) -> None:
    master = f"127.0.0.1:{free_port()}"
    program = start_program(*SERVE, "--master", master, "--max-wait-time", "0.5")
    program.read_url()
    assert await ended(program) == 4  # as for a connect that failed


async def test_no_memory_within_max_wait_time(
    start_program: StartProgram, own_cluster: LocalCluster
) -> None:
    options = ("--master", own_cluster.address, "-Dglobal_segment_size=0", "--max-wait-time", "1")
    program = start_program(*SERVE, *options)
    program.read_url()
    assert await ended(program) == 12  # as for a warm-up with nothing mounted


async def test_a_config_file_of_the_wheel(
    start_program: StartProgram,
    session: aiohttp.ClientSession,
    own_cluster: LocalCluster,
    tmp_path: Path,
) -> None:
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "64mb",
        "local_buffer_size": 16 * MB,
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": "127.0.0.1:1",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    program = start_program(
        *SERVE,
        f"--config={path}",
        f"-Dmaster_server_address={own_cluster.address}",
        f"--token-file={token}",
    )
    gateway = Client(session, program.read_url())
    await gateway.until("/readyz", 200)
    assert (await gateway.get("k")).status == 401
    reply = await gateway.ask("GET", "/api/get/k", Authorization="Bearer s3cret")
    assert reply.status == 404


def test_what_is_connected_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CONFIG_PATH", "MOONCAKE_GLOBAL_SEGMENT_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError):
        target_of(None, None, ())
    target, overrides = target_of("10.0.0.1:50051", None, ("rpc_timeout=1", "protocol=rdma"))
    assert not isinstance(target, str)
    assert target.master_server_address == "10.0.0.1:50051"
    assert (target.global_segment_size, target.local_buffer_size) == (3355443200, 1 << 30)
    assert overrides == {"rpc_timeout": 1.0, "protocol": "rdma"}
    target, _ = target_of(None, None, ("master_server_address=10.0.0.2:50051",))
    assert not isinstance(target, str)
    assert target.master_server_address == "10.0.0.2:50051"
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.3:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1gb")
    target, _ = target_of(None, None, ())
    assert not isinstance(target, str)
    assert (target.master_server_address, target.global_segment_size) == ("10.0.0.3:50051", 1 << 30)
    assert target_of("memory://x", None, ())[0] == "memory://x"
    for wrong in ("no-value", "no_such_field=1"):
        with pytest.raises(ConfigError):
            target_of(None, None, (wrong,))


def test_where_the_token_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    assert read_token(None) == "from-env"
    path = tmp_path / "token"
    path.write_text("  from-file\n")
    assert read_token(str(path)) == "from-file"
    for wrong in ("", " \n", "two words", "h\u00e4"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="token"):
            read_token(str(path))
    with pytest.raises(ConfigError, match="can't be read"):
        read_token(str(tmp_path / "none"))
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    with pytest.raises(ConfigError):  # meant to be guarded, and would not be
        read_token(None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--master", "10.0.0.1"],
        ["--master", "memory://x", "--max-body", "large"],
        ["--master", "memory://x", "-D", "protocol"],
        ["--master", "memory://x", "--token-file", "/no/such/file"],
        ["--config", "/no/such/file"],
        ["--port", "70000"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli, ["serve", *arguments]).exit_code == 2


async def test_a_port_that_is_taken(start_program: StartProgram) -> None:
    first = start_program(*SERVE, "--master", "memory://x")
    port = str(urlsplit(first.read_url()).port)
    second = start_program("-m", "aiomooncake", "serve", "--port", port, "--master", "memory://x")
    assert await ended(second) == 1

"""Ask a port what it is, and a master on this host for its version; without the engine."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import anyio

from aiomooncake.master import http_get

__all__ = ["Greeting", "greet", "local_version"]

_MAGIC: Final = 0x15
_QUESTION: Final = bytes([_MAGIC, *bytes(7), 0x56, 0xBB, 0x81, 0x7B, *bytes(8)])
"""The engine's first request to a master, ``ServiceReady``, as it goes over the wire.

The function's number is a hash of its name. The answer ends with the version of the protocol, as a
length and its text; wheels from 0.3.11.post1 to 0.3.13.post1 all say 2.0.0, so it does not tell
the wheel's.
"""

_HEADER: Final = 16  # bytes before an answer; its length is in bytes 8 to 11
_VERSION: Final = re.compile(rb"[\x01-\x20](\d+\.\d+[\w.]*)$")
_PROGRAM: Final = re.compile(r"version (\S+)")
_LISTENS: Final = "0A"


@dataclass(frozen=True, slots=True)
class Greeting:
    """What answers at an address.

    Attributes:
        kind: A master; another server of the engine's; a master's HTTP port; another HTTP server;
            something else.
        detail: What it said.
    """

    kind: Literal["master", "engine", "metrics", "http", "other"]
    detail: str


async def greet(host: str, port: int, timeout: float) -> Greeting:
    """Ask what accepts connections at an address what it is."""
    answer = b""
    with contextlib.suppress(OSError, anyio.BrokenResourceError, TimeoutError):
        with anyio.move_on_after(timeout):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(_QUESTION)
                with contextlib.suppress(anyio.EndOfStream):
                    while not _is_whole(answer):
                        answer += await stream.receive(4096)
    if answer[:1] == bytes([_MAGIC]):
        version = _VERSION.search(answer[_HEADER:])
        if version is not None:
            return Greeting("master", version[1].decode())
        words = re.findall(rb"[ -~]{6,}", answer[_HEADER:])
        return Greeting("engine", words[-1].decode() if words else "it does not know the question")
    return await _greet_by_http(host, port, timeout, answer)


def _is_whole(answer: bytes) -> bool:
    """Whether an answer of the engine's protocol has all its bytes, or it is something else."""
    if not answer or answer[0] != _MAGIC:
        return bool(answer)
    length = int.from_bytes(answer[8:12], "little")
    return len(answer) >= _HEADER + length


async def _greet_by_http(host: str, port: int, timeout: float, before: bytes) -> Greeting:
    try:
        status, body = await http_get(host, port, "/health", timeout)
    except OSError:
        said = f"it said {before[:40]!r}" if before else "it says nothing that is known"
        return Greeting("other", said)
    if b"service_ready" in body:
        return Greeting("metrics", "")
    return Greeting("http", f"GET /health answers {status} {http.client.responses.get(status, '')}")


def local_version(port: int) -> str | None:
    """Find the version of the master that listens on a port of this host, by its program.

    Returns:
        Such as ``0.3.13.post1``; None when it runs in another container, belongs to somebody else,
        or does not say.
    """
    inodes = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            program = process.joinpath("exe").readlink()
            if not program.name.startswith("mooncake_master"):
                continue
            # It will be run: not as root what somebody else has started.
            if process.stat().st_uid == os.geteuid() and _holds(process, inodes):
                return _version_of(program, process)
    return None


def _listeners(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = row.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield inode


def _holds(process: Path, inodes: set[str]) -> bool:
    for entry in process.joinpath("fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()) in inodes:
                return True
    return False


def _version_of(program: Path, process: Path) -> str | None:
    # Some wheels' programs find their libraries only through this.
    environ = dict(
        entry.split("=", 1)
        for entry in process.joinpath("environ").read_text(errors="replace").split("\0")
        if entry.startswith("LD_LIBRARY_PATH=")
    )
    try:
        done = subprocess.run(
            [str(program), "--version"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=2,
        )
    except subprocess.SubprocessError:
        return None
    found = _PROGRAM.search(done.stdout)
    return found[1] if found is not None else None

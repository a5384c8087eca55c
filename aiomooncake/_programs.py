"""The programs of an engine wheel: where they are, which ports they get, when they are ready.

Blocking code under `_server`. Nothing here imports the engine.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aiomooncake._child import ticks
from aiomooncake.engine.binding import installed_distributions
from aiomooncake.engine.missing import explain_import_error
from aiomooncake.errors import ClusterError, EngineNotInstalledError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from aiomooncake._child import ChildProcess

__all__ = ["HOST", "await_ready", "choose_ports", "find_program", "health", "name_taken", "taken"]

HOST = "127.0.0.1"
_FIRST_PORT = 20000  # above the ranges in which the engine's clients look for ports (12300-17000)
_HEALTH_TIMEOUT = 0.5  # seconds for one answer of /health
_TAIL_LINES, _TAIL_WIDTH = 20, 300  # what an error shows of the output; metrics lines are 2 KB long


def find_program(name: str, binary: str | os.PathLike[str] | None = None) -> Path:
    """Find a program of the installed engine wheel, without importing the engine.

    Args:
        name: ``mooncake_master`` or ``mooncake_client``.
        binary: The path of a program that is wanted instead.

    Returns:
        ``binary``, or the program inside the ``mooncake`` package (the script of the same name
        next to the interpreter only starts that one). Absolute.

    Raises:
        EngineNotInstalledError: On another system than Linux, or when no wheel brings it.
        ClusterError: The program is there but not executable.
    """
    if sys.platform != "linux":
        raise EngineNotInstalledError(
            f"LocalCluster runs {name}, which exists for Linux only (this is "
            f'{sys.platform}): use the in-memory engine, connect("memory://name")'
        )
    if binary is not None:
        return Path(binary).absolute()
    try:
        spec = importlib.util.find_spec("mooncake")
    except ValueError:  # a hand-made module without a spec stands in sys.modules
        spec = None
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    for folder in folders:
        program = Path(folder, name).absolute()
        if not program.is_file():
            continue
        if not os.access(program, os.X_OK):
            raise ClusterError(f"{program} is not executable: run chmod +x {program}")
        return program
    raise EngineNotInstalledError(
        f"LocalCluster needs the {name} program of an engine wheel, and "
        + (f"the package in {', '.join(folders)} has none" if folders else "none is installed")
        + ": pip install 'aiomooncake[cpu]'"
    )


def await_ready(
    process: ChildProcess,
    obstacle: Callable[[], str],
    conflicts: Callable[[], Sequence[str]],
    timeout: float,
    hurry: threading.Event | None,
) -> None:
    """Wait until ``process`` serves.

    Args:
        process: A program that was just started.
        obstacle: Says what stands against its readiness; empty when nothing does.
        conflicts: Names the addresses it was given that others hold, should it end.
        timeout: Seconds.
        hurry: Ends the wait when it is set.

    Raises:
        ClusterError: It ended, was not ready within ``timeout`` seconds, or ``hurry`` was set.
        EngineNotInstalledError: It ended because a system library is missing.
    """
    state = "not asked"
    for _ in ticks(timeout, hurry):
        if not process.running:
            raise _failure(process, f"ended with {process.exit_text}", conflicts())
        state = obstacle()
        if not state:
            return
    if hurry is not None and hurry.is_set():
        raise ClusterError(f"the start of {process.name} was cancelled")
    raise _failure(process, f"was not ready within {timeout:g} s ({state})", ())


def _failure(
    process: ChildProcess, what: str, conflicts: Sequence[str]
) -> ClusterError | EngineNotInstalledError:
    """Make the error for a program that ended or was not ready, with its last output."""
    output = process.text()
    lines = [line[:_TAIL_WIDTH] for line in output.splitlines()[-_TAIL_LINES:]]
    if "error while loading shared libraries" in output:
        if "cannot open shared object file" in output:
            wheels = installed_distributions()
            why = explain_import_error(ImportError(output), wheels, sys.platform)
            return EngineNotInstalledError(f"{process.name} {what}: {why}")
        return EngineNotInstalledError(
            f"{process.name} {what}, because a system library is missing: {lines[-1]}. On Debian "
            "and Ubuntu: apt-get install libibverbs1 libnuma1 libcurl4"
        )
    message = f"{process.name} {what}."
    for address in conflicts:
        message += f" {address} is in use by another process."
    shown = "\n  ".join(lines) if lines else "(nothing)"
    return ClusterError(f"{message} Its last output:\n  {shown}")


def health(port: int) -> str:
    """Ask a master's ``/health`` for what stands against its readiness; empty when nothing does."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_HEALTH_TIMEOUT)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    if response.status != http.client.OK:
        return f"HTTP {response.status}"
    if body == b"OK":  # masters before 0.3.10.post2
        return ""
    try:
        ready = json.loads(body)["service_ready"] is True
    except (ValueError, KeyError, TypeError):
        return "an answer without service_ready"
    return "" if ready else "service_ready is false"


def choose_ports(count: int) -> tuple[int, ...]:
    """Return free loopback ports below the range from which the kernel serves connections.

    A port of that range can be lost between two lives of a server, even to a client of it: one
    that tries to reach its dead server over and over is some day given that very port.
    """
    try:
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = 32768
    if below < _FIRST_PORT + 1000:  # tuned for many connections: no room below the range
        below = 65536
    numbers = random.SystemRandom()  # the common generator may be seeded alike in test workers
    for _ in range(100):
        ports = tuple(numbers.sample(range(_FIRST_PORT, below), count))
        if not taken(ports):
            return ports
    raise ClusterError(
        f"found no {count} free port(s) on {HOST} from {_FIRST_PORT} to {below - 1} in 100 tries: "
        "end programs that hold ports"
    )


def taken(ports: Sequence[int]) -> list[int]:
    """Return those of ``ports`` that can't be bound on loopback now."""
    busy = []
    for port in ports:
        with socket.socket() as probe:
            # As the servers do: connections that linger in TIME_WAIT don't hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                busy.append(port)
    return busy


def name_taken(name: str) -> bool:
    """Tell whether an abstract socket (Linux: a name that is in no file system) is in use."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(f"\0{name}")
        except OSError:
            return True
    return False

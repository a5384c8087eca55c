"""Programs that tests of the wheel's servers start beside themselves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["ends", "listening", "make_script", "python_programs"]

_PYTHON = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c"]


@contextlib.contextmanager
def python_programs() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start programs of their own; what they say is read from their stdout."""
    programs: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        programs.append(
            subprocess.Popen(
                [*_PYTHON, textwrap.dedent(code)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return programs[-1]

    try:
        yield start
    finally:
        for program in programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    program.pid, signal.SIGKILL
                )  # a failed test leaves nothing, forked or not
            program.communicate()


def make_script(path: Path, body: str) -> Path:
    """Write a shell script that stands in for a server."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def ends(pid: int, timeout: float) -> bool:
    """Wait up to `timeout` seconds for the end of a process that may be anybody's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


def listening(port: int) -> set[str]:
    """List the IPv4 addresses, as the kernel writes them, on which somebody listens on ``port``."""
    rows = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {
        row.split()[1].partition(":")[0]
        for row in rows
        if row.split()[3] == "0A" and int(row.split()[1].partition(":")[2], 16) == port
    }

"""The suite of a user, run as a user runs it, under each way to write asynchronous tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "examples" / "test_suite"
RUN_TIMEOUT = 55


@pytest.mark.parametrize(
    ("folder", "passed"),
    [("asyncio_strict", 5), ("asyncio_auto", 8), ("anyio_plugin", 5), ("unittest_cases", 5)],
)
def test_it_passes(folder: str, passed: int) -> None:
    assert outcomes(SUITE / folder) == {"passed": passed}


def test_it_passes_in_parallel() -> None:
    assert outcomes(SUITE / "asyncio_strict", "-n", "2") == {"passed": 5}


def test_every_folder_is_run() -> None:
    folders = {path.parent.name for path in SUITE.glob("*/pytest.ini")}
    assert folders == {"asyncio_strict", "asyncio_auto", "anyio_plugin", "unittest_cases"}


def outcomes(folder: Path, *args: str) -> dict[str, int]:
    """Run pytest in a folder; how many tests passed, failed and so on."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "pytest_aiomooncake")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *args],
        cwd=folder,
        env={**os.environ, "MC_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    summary = done.stdout.strip().splitlines()[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", summary)}
    assert counts, done.stdout + done.stderr
    if set(counts) != {"passed"}:
        print(done.stdout + done.stderr)
    return counts

"""The page on testing shows only what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiomooncake.testing

PAGE = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
RUN_TIMEOUT = 55


def suites() -> list[dict[str, str]]:
    """Put blocks that name their file together with the tests that follow them."""
    found: list[dict[str, str]] = []
    named: dict[str, str] = {}
    for block in BLOCKS:
        name = FILE_NAME.match(block)
        if name is None:
            found.append({**named, "test_page.py": block})
            named = {}
        else:
            named[name[1]] = block
    assert not named
    return found


@pytest.mark.parametrize("files", suites(), ids=range(len(suites())))
def test_block_runs(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "pytest_aiomooncake"],
        cwd=tmp_path,
        env={**os.environ, "MC_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_tests_in_each_block() -> None:
    assert len(suites()) >= 8
    for files in suites():
        assert "def test_" in files["test_page.py"]


def test_every_tool_is_on_the_page() -> None:
    for name in aiomooncake.testing.__all__:
        if name not in {"Fault", "InMemoryEngine", "ProxyStats", "Stall"}:  # what the others give
            assert f"`{name}" in PAGE or name in "".join(BLOCKS), name

"""The README shows only what runs."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiomooncake

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 3


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "greeting" in program:
        assert done.stdout.splitlines() == ["ready, tries: 1", "b'hello'", "None"]


def test_scripts_that_it_names_are_there() -> None:
    for script in re.findall(r"^\./(\S+)", README, re.MULTILINE):
        path = ROOT / script
        assert path.is_file()
        assert path.stat().st_mode & 0o111, f"{script} is not executable"


def test_error_classes_that_it_names_exist() -> None:
    for name in set(re.findall(r"`(\w+Error)`", README)):
        assert hasattr(aiomooncake, name) or hasattr(builtins, name), name

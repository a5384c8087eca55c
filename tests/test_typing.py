"""What a user's type checker says: no complaint, and every mistake found."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from aiomooncake import Store
from aiomooncake.engine.binding import load_binding

SOURCES: Final = Path(__file__).parent / "typing"
# Comments that silence an error are errors where there is none: so every mistake is found.
PYRIGHT: Final = {
    "typeCheckingMode": "strict",
    "enableTypeIgnoreComments": False,
    "reportUnnecessaryTypeIgnoreComment": "error",
}


# Torch, which is not needed for any of it, would take most of a minute.
MYPY: Final = """
[mypy]
strict = True
[mypy-torch.*]
follow_imports = skip
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A user's folder, away from the checkout and its settings."""
    for path in SOURCES.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    (tmp_path / "mypy.ini").write_text(MYPY)
    return tmp_path


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.timeout(180)
def test_types_are_right_from_the_outside(program: Path, checker: str) -> None:
    options = {"mypy": ["."], "pyright": ["--pythonpath", sys.executable]}
    done = subprocess.run(
        [sys.executable, "-m", checker, *options[checker]],
        cwd=program,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def asked(name: str, of: str) -> set[str]:
    """Find the attributes of a variable that a program names."""
    tree = ast.parse((SOURCES / f"{name}.py").read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == of
    }


@pytest.mark.parametrize("mirror", ["engine", "blocking"])
def test_every_method_of_the_binding_is_asked_for(mirror: str) -> None:
    assert asked("mirrors", mirror) == load_binding().methods | {"fetch"}


def test_every_verb_is_asked_for() -> None:
    verbs = {name for name in dir(Store) if not name.startswith("_") and "tensor" not in name}
    assert verbs <= asked("verbs", "store")

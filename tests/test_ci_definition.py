"""CI, pre-commit and CONTRIBUTING.md name only what is there, and agree with each other."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from benchmarks.scenarios import GROUPS

ROOT: Final = Path(__file__).parent.parent
WORKFLOW: Final = ROOT / ".github" / "workflows" / "ci.yml"
CI: Final[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
HOOKS: Final[list[dict[str, Any]]] = [
    hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
]
PYPROJECT: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
GUIDE: Final = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def steps() -> Iterator[dict[str, Any]]:
    for job in CI["jobs"].values():
        yield from job["steps"]


def commands_of_the_guide() -> list[str]:
    """List what the guide tells to run: code in the first column of a table, or the last."""
    return [
        code
        for code in re.findall(r"`([^`\n]+)`", GUIDE)
        if code.startswith(("./", ".venv/", "AIOMOONCAKE_PYTHON="))
    ]


COMMANDS: Final = {
    *(line for step in steps() for line in step.get("run", "").splitlines()),
    *(hook["entry"] for hook in HOOKS if hook["language"] == "system"),
    *commands_of_the_guide(),
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_there(command: str) -> None:
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program, *arguments = words
    if program in {"bash", ".venv/bin/python"}:
        if arguments[0] == "-m":
            check_module(arguments[1], arguments[2:])
            return
        assert (ROOT / arguments[0]).is_file()
    elif program.startswith(".venv/bin/"):
        check_distribution(Path(program).name)
    else:
        assert os.access(ROOT / program, os.X_OK), program
    check_paths(arguments)
    if "--only" in arguments and program == "./scripts/release_check":
        check_extras(arguments[arguments.index("--only") + 1 :])


def check_module(name: str, arguments: list[str]) -> None:
    assert importlib.util.find_spec(name) is not None, name
    check_paths(arguments)
    if name == "benchmarks" and "--only" in arguments:
        known = {scenario.name for group in GROUPS for scenario in group.scenarios}
        for scenario in arguments[arguments.index("--only") + 1 :]:
            assert scenario.startswith("-") or scenario in known, scenario


def check_distribution(program: str) -> None:
    """A program of .venv comes from the extra that ./scripts/test installs."""
    extra = re.search(r"^test = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert extra is not None
    assert f'"{program}>=' in extra[1], f"{program} is not in the extra test"


def check_paths(arguments: list[str]) -> None:
    for argument in arguments:
        if argument.startswith(("tests/", "scripts/", "docs/")):
            assert (ROOT / argument).exists(), argument


def check_extras(names: list[str]) -> None:
    for name in names:
        if name.startswith("-"):
            return
        assert name == "base" or re.search(rf"^{name} = \[", PYPROJECT, re.MULTILINE), name


# --- the forge ----------------------------------------------------------------------------------


def test_the_workflow_is_one() -> None:
    """By the schema that the forge's makers publish; it is part of the checker."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.github-workflows", str(WORKFLOW)),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_python_of_the_metadata_is_tested() -> None:
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers
    assert f'requires-python = ">={classifiers[0]}"' in PYPROJECT


def test_it_does_all_that_the_project_does() -> None:
    done = "\n".join(step.get("run", "") for step in steps())
    for what in (
        "./scripts/release_check --keep dist", "./scripts/release_check --only base --tests",
        "bash .ci/run", "mkdocs build --strict", "tests/test_benchmarks.py",
    ):  # fmt: skip
        assert what in done
    assert "./scripts/test" in (ROOT / ".ci" / "run").read_text()


def test_it_may_only_read_and_every_job_ends() -> None:
    assert CI["permissions"] == {"contents": "read"}
    for name, job in CI["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        assert "permissions" not in job, name
    for step in steps():
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


# --- pre-commit ---------------------------------------------------------------------------------


def test_pre_commit_has_no_versions_of_its_own() -> None:
    """Linters are those of .venv, in the versions of pyproject.toml; the rest has one version."""
    pinned = set()
    for hook in HOOKS:
        if hook["language"] == "system":
            assert hook["entry"].startswith(".venv/bin/"), hook["id"]
            assert "additional_dependencies" not in hook
        else:
            pinned.update(hook["additional_dependencies"])
    assert len(pinned) == 1, pinned
    assert {"ruff", "ruff-format", "mypy"} <= {hook["id"] for hook in HOOKS}
    assert re.search(r'"ruff>=(\d+\.\d+),<\d', PYPROJECT)


def test_pre_commit_checks_what_the_tests_check() -> None:
    """./scripts/test is ruff, its formatter, mypy and pytest."""
    steps = re.findall(r"^ *step (ruff check|ruff format|mypy)", script("test"), re.MULTILINE)
    entries = " ".join(hook["entry"] for hook in HOOKS)
    assert len(steps) == 3
    assert all(step in entries for step in steps)


def script(name: str) -> str:
    return (ROOT / "scripts" / name).read_text(encoding="utf-8")


# --- the guide ----------------------------------------------------------------------------------


def test_the_maps_are_current() -> None:
    """Run .venv/bin/python scripts/module_map.py after a module or a script came or went."""
    module_map = runpy.run_path(str(ROOT / "scripts" / "module_map.py"))
    assert module_map["page"](GUIDE) == GUIDE


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target

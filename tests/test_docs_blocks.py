"""The pages of the documentation show only what runs.

Each page's programs, fragments and suites of tests are jobs of their own, and several of them run
side by side: they wait for masters and closes most of the time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import yaml

import aiomooncake.testing
from aiomooncake.cli.commands import cli
from tests.doc_blocks import DOCS, ROOT, Block, pages

PAGES: Final = pages()
AT_ONCE: Final = 4
RUN_TIMEOUT: Final = 120


@dataclass(frozen=True)
class Job:
    """Something to run: what it is called, its files, and its command.

    Attributes:
        name: For reports.
        files: Texts by name, in the folder where it runs; None = it runs in the checkout.
        arguments: Those of Python.
    """

    name: str
    files: tuple[tuple[str, str], ...] | None
    arguments: tuple[str, ...]

    def run(self) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.files or ():
                (Path(folder) / name).write_text(text)
            return subprocess.run(
                [sys.executable, *self.arguments],
                cwd=ROOT if self.files is None else folder,
                env={**os.environ, "MC_LOG_LEVEL": "FATAL", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT,
                check=False,
            )


def jobs() -> Iterator[Job]:
    """Find what there is to run."""
    ini = (
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
    )
    quiet = ("-m", "pytest", "-q", "-p", "pytest_aiomooncake", "-p", "no:cacheprovider")
    for name, page in PAGES.items():
        if page.fragments:
            yield Job(name, None, ("-W", "error", "-m", "tests.doc_blocks", name))
        for block in page.programs:
            yield Job(block.place, (), ("-W", "error", "-c", block.text))
        for number, files in enumerate(page.suites):
            yield Job(f"{name}-{number}", (*files.items(), ("pytest.ini", ini)), quiet)


JOBS: Final = {job.name: job for job in jobs()}
CONSOLE: Final = {
    block.place: block for page in PAGES.values() for block in page.others
    if block.language == "console"
}  # fmt: skip

Outcome = Future[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """Start what this run asks for, side by side; under pytest-xdist each when it is its turn."""
    started: dict[str, Outcome] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        if not hasattr(request.config, "workerinput"):
            for item in request.session.items:
                name = getattr(item, "callspec", None) and item.callspec.params.get("job")  # type: ignore[attr-defined]
                if name and item.path == Path(__file__):
                    started[name] = pool.submit(JOBS[name].run)
        yield started
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", JOBS)
def test_blocks_run(job: str, outcomes: dict[str, Outcome]) -> None:
    done = outcomes[job].result() if job in outcomes else JOBS[job].run()
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_blocks_of_every_kind() -> None:
    assert sum(len(page.fragments) for page in PAGES.values()) >= 25
    assert sum(len(page.programs) for page in PAGES.values()) >= 10
    assert len(PAGES["testing"].suites) >= 8
    assert len(CONSOLE) >= 8


def test_data_can_be_read() -> None:
    for block in itertools.chain.from_iterable(page.others for page in PAGES.values()):
        assert block.language in {"console", "text", "json", "yaml", "promql", "toml"}, block.place
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", CONSOLE)
def test_commands_are_right(place: str) -> None:
    for line in commands(CONSOLE[place]):
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        program, *arguments = words
        if program == "aiomooncake":
            name, *options = arguments
            cli.commands[name].make_context(name, options).close()
        elif program.startswith("./"):
            assert os.access(ROOT / program, os.X_OK), line
        elif program == "pip":
            check_extras(arguments)
        elif program == "python":
            check_module(arguments)
        else:
            assert program in {
                "apt-get", "cd", "curl", "docker", "kill", "kubectl", "mooncake_client",
                "mooncake_master", "pytest",
            }, line  # fmt: skip


def commands(block: Block) -> Iterator[str]:
    """Give the commands of a block, without what they answer where they are marked by ``$``."""
    lines = block.text.replace("\\\n", " ").splitlines()
    marked = any(line.startswith("$ ") for line in lines)
    for line in lines:
        if marked and not line.startswith("$ "):
            continue
        for part in re.split(r"\s(?:&&|\|)\s", line.removeprefix("$ ")):
            if part.strip() and not part.startswith("#"):
                yield part.partition("  #")[0].removesuffix(" &")


def check_extras(arguments: list[str]) -> None:
    """Look for the extras that an installation names."""
    text = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"aiomooncake\[([\w,-]+)\]", " ".join(arguments)):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra


def check_module(arguments: list[str]) -> None:
    """Look for the module or the script that Python is told to run."""
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file(), arguments
        return
    path = ROOT.joinpath(*arguments[1].split("."))
    known = {"mkdocs", "pytest", "unittest"}
    assert path.is_dir() or path.with_suffix(".py").is_file() or arguments[1] in known, arguments


# --- single pages -------------------------------------------------------------------------------


def test_every_tool_of_tests_is_on_its_page() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    for name in aiomooncake.testing.__all__:
        if name not in {"Fault", "InMemoryEngine", "ProxyStats", "Stall"}:  # what the others give
            assert re.search(rf"\b{name}\b", page), name

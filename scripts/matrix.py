"""Run the contract tests on several Pythons and engines: ``./scripts/test-matrix``.

Each pair has an environment of its own under ``.matrix`` (240 MB, a minute to make; the wheels are
35-45 MB, and pip keeps them), and each engine its own master. What came of it is written to
docs/versions.json, from which scripts/versions_table.py makes the tables of docs/versions.md.
``--quick`` runs what is most likely to break, and writes nothing: CI's part.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RECORDS: Final = ROOT / "docs" / "versions.json"
CACHE: Final = ROOT / ".matrix"

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")
ENGINES: Final = ("0.3.10.post2", "0.3.11.post1", "0.3.12.post1", "0.3.13.post1")
NEWEST: Final = ENGINES[-1]
# A CUDA build by mistake, which needs this library to load.
CUDART: Final = "nvidia-cuda-runtime-cu12"
MISPACKAGED: Final = frozenset({"0.3.12.post1"})

# What the tests need, without the tools and the documentation.
TOOLS: Final = (
    "pytest>=9",
    "pytest-asyncio>=1.4",
    "pytest-timeout>=2.3",
    "blockbuster>=1.5.23",
    "numpy>=1.26",
)
WHOLE: Final = (
    "tests/contract",
    "tests/test_connect.py",
    "tests/test_warmup.py",
    "tests/test_ranks.py",
    "tests/test_cluster.py",
    "tests/test_store_threads.py",
)
QUICK: Final = (
    "tests/contract/test_verbs.py",
    "tests/contract/test_zero_copy.py",
    "tests/test_warmup.py",
)
SMOKE: Final = QUICK[:1]
LIMIT: Final = 1200.0  # seconds for the tests of one pair
_COUNT: Final = re.compile(r"(\d+) (passed|xfailed|skipped|failed|errors?)")


class MatrixError(Exception):
    """What is wrong, with the end of what was printed."""


@dataclass(frozen=True)
class Pair:
    """A Python and an engine.

    Attributes:
        python: The interpreter.
        series: Its version, such as ``3.12``.
        engine: The wheel's version.
    """

    python: Path
    series: str
    engine: str

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return CACHE / f"{self.series}-{self.engine}"

    @property
    def program(self) -> str:
        """The interpreter of its environment."""
        return str(self.folder / "bin" / "python")

    def __str__(self) -> str:
        return f"CPython {self.series}, engine {self.engine}"


def pythons() -> dict[str, Path]:
    """Find the interpreters of this machine: on PATH, and pyenv's; version to program."""
    found: dict[str, Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for series in PYTHONS:
        candidates = [
            shutil.which(f"python{series}"),
            *sorted(pyenv.glob(f"{series}.*/bin/python")),
        ]
        for candidate in candidates:
            # A shim of pyenv's is there also for versions that are not chosen, and fails.
            if candidate is not None and _series(candidate) == series:
                found[series] = Path(candidate)
                break
    return found


def _series(program: str | Path) -> str:
    code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def prepare(pair: Pair) -> None:
    """Make the pair's environment, unless it is there."""
    ready = pair.folder / "ready"
    wanted = "\n".join(_requirements(pair))
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n", encoding="utf-8")
    shutil.rmtree(pair.folder, ignore_errors=True)
    _run([str(pair.python), "-m", "venv", str(pair.folder)])
    pip = [pair.program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--editable", f"{ROOT}[cli]", *_requirements(pair)])
    ready.write_text(wanted, encoding="utf-8")


def _requirements(pair: Pair) -> tuple[str, ...]:
    more = (CUDART,) if pair.engine in MISPACKAGED else ()
    return (f"mooncake-transfer-engine-non-cuda=={pair.engine}", *TOOLS, *more)


def environ(pair: Pair) -> dict[str, str]:
    """Make the environment variables that the pair's programs run with."""
    wanted = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "MOONCAKE_"))}
    if pair.engine in MISPACKAGED:
        packages = pair.folder / "lib" / f"python{pair.series}" / "site-packages"
        wanted["LD_LIBRARY_PATH"] = str(packages / "nvidia" / "cuda_runtime" / "lib")
    return wanted


def tested(pair: Pair, tests: tuple[str, ...]) -> dict[str, int]:
    """Run tests; how many passed, and so on."""
    command = [pair.program, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
    out = _run([*command, "-p", "tests.older_engines", *tests], pair)
    summary = out.rstrip().rpartition("\n")[2]
    return {word: int(number) for number, word in _COUNT.findall(summary)}


def probed(pair: Pair) -> dict[str, Any]:
    """Try every verb in each mode."""
    found: dict[str, Any] = json.loads(_run([pair.program, "scripts/versions_probe.py"], pair))
    return found


def _run(command: list[str], pair: Pair | None = None) -> str:
    env = environ(pair) if pair is not None else None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MatrixError(f"{' '.join(command)}: still running after {LIMIT:g} s") from error
    if done.returncode != 0:
        output = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}".strip()
        raise MatrixError(f"{' '.join(command)}: ended with {done.returncode}\n{output}")
    return done.stdout


def record(pair: Pair, counts: dict[str, int] | None, found: dict[str, Any]) -> None:
    """Write down what came of a pair; without counts, those that are there stay."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    records["memory"] = found.pop("memory")
    found["methods"] = " ".join(found["methods"])
    found.pop("version")
    engines = records.setdefault("engines", {})
    engines[pair.engine] = found
    runs = records.setdefault("runs", {})
    runs.setdefault(pair.engine, {})
    if counts is not None:
        runs[pair.engine][pair.series] = counts
    for part in (engines, runs):
        ordered = {name: part[name] for name in ENGINES if name in part}
        part.clear()
        part.update(ordered)
    runs[pair.engine] = dict(sorted(runs[pair.engine].items()))
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def quick(found: dict[str, Path]) -> Iterator[tuple[Pair, tuple[str, ...]]]:
    """Choose CI's part: the oldest engine here, and the newest on the Python farthest from this."""
    here = ".".join(map(str, sys.version_info[:2]))
    if here in found:
        yield Pair(found[here], here, ENGINES[0]), QUICK
    others = [series for series in found if series != here]
    if others:
        farthest = max(others, key=lambda s: abs(PYTHONS.index(s) - PYTHONS.index(here)))
        yield Pair(found[farthest], farthest, NEWEST), SMOKE


def main(arguments: list[str] | None = None) -> int:
    """Run the pairs that are asked for; 0 if all of them are well."""
    parser = argparse.ArgumentParser(description="Run the tests on several Pythons and engines.")
    parser.add_argument("--quick", action="store_true", help="CI's part, in a few minutes")
    parser.add_argument("--verbs", action="store_true", help="try the verbs again, no tests")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, help="these only")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, help="these only")
    options = parser.parse_args(arguments)
    found = pythons()
    missing = [series for series in options.python or () if series not in found]
    if missing:
        parser.error(f"this machine has no Python {', '.join(missing)}")
    if options.quick:
        chosen = list(quick(found))
    else:
        chosen = [
            (Pair(found[series], series, engine), WHOLE)
            for engine in options.engine or ENGINES
            for series in options.python or found
        ]
    failed = 0
    for pair, tests in chosen:
        began = time.monotonic()
        try:
            prepare(pair)
            counts = None if options.verbs else tested(pair, tests)
            answers = probed(pair)
        except MatrixError as error:
            failed += 1
            print(f"FAILED  {pair}\n{error}", flush=True)  # noqa: T201 - what it is for
            continue
        if not options.quick:
            record(pair, counts, answers)
        told = ", ".join(f"{number} {word}" for word, number in (counts or {}).items())
        told = told or "the verbs were tried"
        print(f"ok      {pair}: {told} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
    if not options.quick and RECORDS.exists():
        subprocess.run([sys.executable, "scripts/versions_table.py"], cwd=ROOT, check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

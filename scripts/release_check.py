"""Check what would be released: ``./scripts/release_check``, from a checkout.

Builds the sdist, and the wheel from it; looks into both; installs the wheel into a fresh
environment for each extra, and the sdist once; and tries each of them there. With ``--tests`` it
also runs the test suite of the sdist against the installed wheel, which takes as long as the suite
does; what follows is for pytest: ``--tests -n 2 tests/contract``.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.release_smokes import AIOHTTP, BASE, CPU, OTEL, PROMETHEUS, SDIST, UVLOOP  # noqa: E402

PACKAGE: Final = "aiomooncake"
PLUGIN: Final = "pytest_aiomooncake.py"

_CACHES: Final = re.compile(r"(^|/)(\.git|\.venv|\.\w+_cache|\.hypothesis|__pycache__|dist|site)/")

# Engines for accelerators: hundreds of megabytes each that can't be imported without the device. It
# is only asked whether the package index has one for this Python.
ENGINES: Final = ("cuda", "cuda13", "efa", "efa-cpu", "efa-cuda13", "musa", "npu", "rocm")


class CheckError(Exception):
    """What is wrong with what would be released."""


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, print a line for each; 0 if all of them are well."""
    parser = argparse.ArgumentParser(description="Check what would be released.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these extras only; also: base")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the sdist and the wheel there")
    parser.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="run the test suite of the sdist against the wheel; what follows is for pytest",
    )
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="aiomooncake-release-") as folder:
        release = Release.build(Path(folder))
        if options.keep is not None:
            shutil.copytree(release.wheel.parent, options.keep, dirs_exist_ok=True)
        for name, check in release.checks(options.only, options.tests):
            began = time.monotonic()
            try:
                check()
            except CheckError as error:
                failed += 1
                print(f"FAILED  {name}\n{error}", flush=True)  # noqa: T201 - what it is for
            else:
                seconds = time.monotonic() - began
                print(f"ok      {name} ({seconds:.0f} s)", flush=True)  # noqa: T201
    print(f"{failed} failed" if failed else "all is well")  # noqa: T201
    return 1 if failed else 0


@dataclass(frozen=True)
class Release:
    """What would be released, and how it is tried.

    Attributes:
        folder: Where environments are made.
        sdist: The source distribution.
        wheel: The wheel, which was built from it.
        tree: The unpacked sdist **without the package**. In its place are links to the package that
            is installed in the environment at work, so that tests find what they read, and can
            import nothing else.
    """

    folder: Path
    sdist: Path
    wheel: Path
    tree: Path

    @classmethod
    def build(cls, folder: Path, root: Path = ROOT) -> Release:
        """Build both in `folder` with the environment's own hatchling, as its metadata says.

        Raises:
            CheckError: It can't be built.
        """
        dist = folder / "dist"
        hatchling: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-d", dist]
        run([*hatchling, "-t", "sdist"], cwd=root)
        (sdist,) = dist.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder)
        tree = folder / sdist.name.removesuffix(".tar.gz")
        run([*hatchling, "-t", "wheel"], cwd=tree)
        (wheel,) = dist.glob("*.whl")
        shutil.rmtree(tree / PACKAGE)
        (tree / PLUGIN).unlink()
        return cls(folder, sdist, wheel, tree)

    def checks(
        self, only: Sequence[str] | None = None, tests: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Give the names of the checks and what does them; of extras only some, if so asked."""
        if only is None:
            yield "contents of the wheel", self.check_wheel
            yield "contents of the sdist", self.check_sdist
            yield "metadata", self.check_metadata
            yield "names of the engines", self.check_engines
            yield "installation from the sdist", self.check_sdist_installs
        extras: dict[str, Callable[[], None]] = {
            "base": self.check_base,
            "cpu": lambda: self._try("cpu", CPU),
            "cli": self.check_cli,
            "aiohttp": lambda: self._try("aiohttp", AIOHTTP),
            "prometheus": lambda: self._try("prometheus", PROMETHEUS),
            "otel": lambda: self._try("otel", OTEL),
            "uvloop": lambda: self._try("uvloop", UVLOOP),
            "bench": self.check_bench,
            "docs": self.check_docs,
            "test": lambda: self.check_tests(["tests/test_config.py", "tests/test_readme.py"]),
        }
        for extra, check in extras.items():
            if extra in (only or extras):
                yield f"extra {extra}" if extra != "base" else "no extra", check
        if tests is not None:
            yield "test suite against the wheel", lambda: self.check_tests(tests)

    # --- what is inside -------------------------------------------------------------------------

    def check_wheel(self) -> None:
        """Look for all modules, the type marker, the plugin and the licence; and nothing else."""
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
        info = f"{PACKAGE}-{version()}.dist-info/"
        want = {path for path in project_files() if path.split("/")[0] in {PACKAGE, PLUGIN}}
        want |= {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
        want.add(f"{info}licenses/LICENSE")
        compare("the wheel", names, want)
        if f"{PACKAGE}/py.typed" not in names:
            raise CheckError("the wheel has no py.typed")
        if not self.wheel.name.endswith("-py3-none-any.whl"):
            raise CheckError(f"the wheel is not for every platform: {self.wheel.name}")

    def check_sdist(self) -> None:
        """Look for every file of the project: tests read documents, scripts and examples."""
        with tarfile.open(self.sdist) as archive:
            names = [PurePosixPath(member.name) for member in archive if member.isfile()]
        inside = {"/".join(name.parts[1:]) for name in names}
        compare("the sdist", inside, {*project_files(), "PKG-INFO"})

    def check_metadata(self) -> None:
        """Let twine judge what an index would show, and compare the version with the package's."""
        with zipfile.ZipFile(self.wheel) as archive:
            text = archive.read(f"{PACKAGE}-{version()}.dist-info/METADATA").decode()
        if email.message_from_string(text)["Version"] != version():
            raise CheckError("the wheel's version is not that of aiomooncake/_version.py")
        python = environment(self.folder / "env-twine", "twine>=6.1")
        run([python, "-m", "twine", "check", "--strict", self.sdist, self.wheel])

    def check_engines(self) -> None:
        """Ask the package index whether it has the engines that extras name."""
        with zipfile.ZipFile(self.wheel) as archive:
            text = archive.read(f"{PACKAGE}-{version()}.dist-info/METADATA").decode()
        for extra in ENGINES:
            name = re.search(rf"Requires-Dist: ([\w-]+).*extra == '{extra}'", text)
            if name is None:
                raise CheckError(f"there is no extra {extra}")
            run([sys.executable, "-m", "pip", "index", "versions", name[1]])

    # --- what it does where it is installed -----------------------------------------------------

    def check_base(self) -> None:
        """Use it with nothing but anyio; what needs more must say what."""
        self._try("", BASE)
        done = self._command("", "--help")
        if done.returncode != 1 or "aiomooncake[cli]" not in done.stderr:
            raise CheckError(f"aiomooncake --help does not ask for the extra cli:\n{told(done)}")

    def check_cli(self) -> None:
        """Run the commands; `serve` must say that it needs another extra."""
        done = self._command("cli", "--help")
        if done.returncode != 0 or "warmup" not in done.stdout:
            raise CheckError(f"aiomooncake --help does not help:\n{told(done)}")
        done = self._command("cli", "warmup", "--master", "memory://cli")
        if done.returncode != 0:
            raise CheckError(f"aiomooncake warmup fails:\n{told(done)}")
        done = self._command("cli", "serve", "--port", "0")
        if done.returncode == 0 or "aiomooncake[aiohttp]" not in done.stderr:
            raise CheckError(f"serve does not ask for the extra aiohttp:\n{told(done)}")

    def check_bench(self) -> None:
        """Measure something by the benchmarks of the sdist, with the extras that they name."""
        python = self.environment("cpu,cli,uvloop,bench")
        result = self.folder / "result.json"
        smoke: list[str | Path] = [
            "-m",
            "benchmarks",
            "--smoke",
            "--only",
            "exists",
            "--json",
            result,
        ]
        tree = self._link(python)
        run([python, *smoke], cwd=tree)
        run([python, "-m", "benchmarks.plots", result, self.folder / "plots"], cwd=tree)

    def check_docs(self) -> None:
        """Build the site of the sdist; its reference comes from the installed package."""
        python = self.environment("docs")
        site = str(self.folder / "site")
        tree = self._link(python)
        run([python, "-m", "mkdocs", "build", "--strict", "--site-dir", site], cwd=tree)

    def check_tests(self, arguments: Sequence[str]) -> None:
        """Run tests of the sdist; those that build the package need a checkout."""
        python = self.environment("cpu,cli,test")
        pytest: list[str | Path] = [python, "-m", "pytest", "--ignore=tests/test_release.py"]
        run([*pytest, *arguments], cwd=self._link(python), timeout=7200, show=True)

    def check_sdist_installs(self) -> None:
        """Let pip build it, in an environment of its own with what [build-system] names."""
        python = environment(self.folder / "env-sdist", str(self.sdist))
        try_program(python, SDIST, self.folder)

    def environment(self, extras: str) -> Path:
        """Return the Python of an environment with the wheel and these extras."""
        wheel = f"{self.wheel}[{extras}]" if extras else str(self.wheel)
        return environment(self.folder / f"env-{extras or 'base'}", wheel)

    def _link(self, python: Path) -> Path:
        """Put what is installed there in the place of the package; return the tree."""
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        installed = Path(run([python, "-c", where]).stdout.strip())
        for name in (PACKAGE, PLUGIN):
            (self.tree / name).unlink(missing_ok=True)
            (self.tree / name).symlink_to(installed / name)
        return self.tree

    def _try(self, extras: str, program: str) -> None:
        try_program(self.environment(extras), program, self.folder)

    def _command(self, extras: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = self.environment(extras).parent / PACKAGE
        return run([program, *arguments], cwd=self.folder, check=False)


def version() -> str:
    """Return the version, from the one place where it is written."""
    text = (ROOT / PACKAGE / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise CheckError("aiomooncake/_version.py names no version")
    return found[1]


def project_files() -> set[str]:
    """List the files of the project: those that git knows, without git all but caches."""
    if (ROOT / ".git").exists():
        paths = run(["git", "ls-files"], cwd=ROOT).stdout.splitlines()
        paths += run(
            ["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT
        ).stdout.splitlines()
    else:
        paths = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
    return {path for path in paths if (ROOT / path).is_file() and not _CACHES.search(path)}


def compare(what: str, has: set[str], wants: set[str]) -> None:
    """Raise if something is missing or too much.

    Raises:
        CheckError: With the names.
    """
    faults = [f"{what} lacks {name}" for name in sorted(wants - has)]
    faults += [f"{what} should not have {name}" for name in sorted(has - wants)]
    if faults:
        raise CheckError("\n".join(faults))


def environment(folder: Path, requirement: str) -> Path:
    """Make an environment with a requirement, unless there is one; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
        run([*pip, "install", "--quiet", requirement], timeout=900)
        run([*pip, "check"])
    return python


def try_program(python: Path, program: str, folder: Path) -> None:
    """Run a program where no checkout can be imported, and every warning is an error.

    Raises:
        CheckError: It failed, or imported the package from elsewhere than the environment.
    """
    where = f"import sys, {PACKAGE}\nassert {PACKAGE}.__file__.startswith(sys.prefix)\n"
    run([python, "-I", "-W", "error", "-c", where + program], cwd=folder)


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    timeout: float = 300,
    check: bool = True,
    show: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command without what this shell or its environment would make it import.

    Raises:
        CheckError: It failed, and `check` is set.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckError(f"{' '.join(words)[:200]}: {error}") from error
    if check and done.returncode != 0:
        raise CheckError(f"{' '.join(words)[:200]} exits with {done.returncode}:\n{told(done)}")
    return done


def told(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command has said, the end of it."""
    return f"{done.stdout or ''}{done.stderr or ''}".strip()[-4000:]


if __name__ == "__main__":
    sys.exit(main())

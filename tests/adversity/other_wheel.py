"""Parts of other versions than the installed engine, from their wheels on the package index."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["old_engine", "old_master"]

_ENGINE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = "mooncake_transfer_engine_non_cuda.libs/"
# 0.3.12.post1 is a CUDA build by mistake: its programs don't start without this library.
_CUDART = "nvidia-cuda-runtime-cu12"
_FOLDERS = Path(sys.prefix, "engine-wheels")


def old_master() -> Path:
    """Fetch the master of 0.3.12.post1 (45 MB, once per environment); the program to run."""
    folder = _FOLDERS / "0.3.12.post1"
    program = folder / "master"
    with _alone(folder):
        if not program.exists():
            _fetch(folder, f"{_ENGINE}==0.3.12.post1", "mooncake/mooncake_master", _LIBRARIES)
            _fetch(folder, _CUDART, "nvidia/cuda_runtime/lib/libcudart.so")
            (folder / "mooncake" / "mooncake_master").chmod(0o700)
            script = folder / "master.part"
            script.write_text(
                f"#!/bin/sh\nLD_LIBRARY_PATH='{folder}/nvidia/cuda_runtime/lib' "
                f"exec '{folder}/mooncake/mooncake_master' \"$@\"\n"
            )
            script.chmod(0o700)
            script.rename(program)
    return program


def old_engine(version: str) -> Path:
    """Fetch an older version, master and all (37 MB, once per environment); a ``PYTHONPATH``."""
    folder = _FOLDERS / version
    whole = folder / "whole"
    with _alone(folder):
        if not whole.exists():
            _fetch(folder, f"{_ENGINE}=={version}", "mooncake")
            (folder / "mooncake" / "mooncake_master").chmod(0o700)
            whole.touch()
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run side by side
        yield


def _fetch(folder: Path, requirement: str, *prefixes: str) -> None:
    """Download a wheel and unpack what begins with one of these."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        pytest.fail(
            f"the engine of another version can't be fetched ({requirement}): this test needs the "
            f"package index. pip said: {done.stderr.strip()[-1000:]}",
            pytrace=False,
        )
    name = requirement.partition("==")[0].replace("-", "_")
    wheel = next(folder.glob(f"{name}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefixes):
                archive.extract(member, folder)
    wheel.unlink()

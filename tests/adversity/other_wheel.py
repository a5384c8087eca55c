"""The master of another version than the installed engine, from its wheel on the package index."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

__all__ = ["old_master"]

_ENGINE = "mooncake-transfer-engine-non-cuda==0.3.12.post1"
# That wheel is a CUDA build by mistake: its programs don't start without this library.
_CUDART = "nvidia-cuda-runtime-cu12"
_FOLDER = Path(sys.prefix, "engine-wheels", "0.3.12.post1")


def old_master() -> Path:
    """Fetch the master of 0.3.12.post1 (45 MB, once per environment); the program to run."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    program = _FOLDER / "master"
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run side by side
        if not program.exists():
            _fetch(_ENGINE, "mooncake/mooncake_master", "mooncake_transfer_engine_non_cuda.libs/")
            _fetch(_CUDART, "nvidia/cuda_runtime/lib/libcudart.so")
            (_FOLDER / "mooncake" / "mooncake_master").chmod(0o700)
            script = _FOLDER / "master.part"
            script.write_text(
                f"#!/bin/sh\nLD_LIBRARY_PATH='{_FOLDER}/nvidia/cuda_runtime/lib' "
                f"exec '{_FOLDER}/mooncake/mooncake_master' \"$@\"\n"
            )
            script.chmod(0o700)
            script.rename(program)
    return program


def _fetch(requirement: str, *prefixes: str) -> None:
    """Download a wheel and unpack what begins with one of these."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(_FOLDER), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        pytest.fail(
            f"the engine of another version can't be fetched ({requirement}): this test needs the "
            f"package index. pip said: {done.stderr.strip()[-1000:]}",
            pytrace=False,
        )
    name = requirement.partition("==")[0].replace("-", "_")
    wheel = next(_FOLDER.glob(f"{name}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefixes):
                archive.extract(member, _FOLDER)
    wheel.unlink()

"""Why the engine can't be imported, in words, and the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["NON_CUDA", "explain_import_error"]

NON_CUDA: Final = "mooncake-transfer-engine-non-cuda"

_CPU: Final = 'pip install "aiomooncake[cpu]"'
_MEMORY: Final = 'the in-memory engine runs everywhere: aiomooncake.connect("memory://name")'

# Non-CUDA wheels that were built against CUDA by mistake (measured on each of them).
_MISPACKAGED: Final = frozenset({"0.3.12", "0.3.12.post1", "0.3.13"})

# What the engine links against on every machine, by Debian's package names.
_SYSTEM: Final = ("libibverbs.so", "libnuma.so", "libcurl.so")
_APT: Final = "apt-get install libibverbs1 libnuma1 libcurl4"

# Libraries that only one kind of accelerator brings, and what brings them.
_ACCELERATORS: Final = {
    "libcuda.so": "the NVIDIA driver",
    "libcudart.so": "the CUDA runtime",
    "libamdhip64.so": "AMD ROCm",
    "libhsa-runtime64.so": "AMD ROCm",
    "libascendcl.so": "the Ascend toolkit",
    "libmusa.so": "the MUSA driver",
    "libmusart.so": "the MUSA runtime",
    "libefa.so": "the AWS EFA libraries",
    "libfabric.so": "the AWS EFA libraries",
}

_LIBRARY: Final = re.compile(r"(?P<name>\S+?\.so[\w.]*): cannot open shared object file")
_TOO_OLD: Final = re.compile(r"version `(?P<what>(?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)' not found")


def explain_import_error(
    exc: BaseException, distributions: Mapping[str, str], platform: str
) -> str:
    """Say what is missing and which command mends it.

    Args:
        exc: What ``import mooncake.store`` raised.
        distributions: The engine wheels that are installed, name to version.
        platform: ``sys.platform``.

    Returns:
        One or two sentences for a human.
    """
    if platform != "linux":
        return f"the Mooncake engine exists for Linux only, and this is {platform}; {_MEMORY}"
    wheel = _describe(distributions)
    library = _LIBRARY.search(str(exc))
    if library is not None:
        return _explain_library(library["name"], wheel, distributions)
    too_old = _TOO_OLD.search(str(exc))
    if too_old is not None:
        return (
            f"the Mooncake engine ({wheel}) was built for a newer system: {too_old['what']} is "
            f"missing here. Use a newer distribution or an older wheel; {_MEMORY}"
        )
    if isinstance(exc, ModuleNotFoundError) and exc.name is not None:
        return _explain_module(exc.name, wheel, distributions)
    return (
        f"the Mooncake engine ({wheel}) fails to import: {type(exc).__name__}: {exc}. "
        f"{_reinstall(distributions)}"
    )


def _describe(distributions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in distributions.items()) or (
        "no wheel of it is known to pip"
    )


def _reinstall(distributions: Mapping[str, str]) -> str:
    if not distributions:
        return f"Install an engine: {_CPU}"
    names = " ".join(distributions)
    name = next(iter(distributions)) if len(distributions) == 1 else "<the one you want>"
    return f"Install it afresh: pip uninstall -y {names} && pip install {name}"


def _explain_module(name: str, wheel: str, distributions: Mapping[str, str]) -> str:
    if name == "mooncake":
        if not distributions:
            return f"no Mooncake engine is installed. Install one: {_CPU}"
        return (
            f"{wheel} is installed, but its package `mooncake` is gone (another wheel of the "
            f"engine was probably uninstalled after it). {_reinstall(distributions)}"
        )
    if name.startswith("mooncake"):
        return (
            f"a package `mooncake` is installed, but it has no module `{name}`, so it is not the "
            f"Mooncake engine or only part of it ({wheel}). Look for a file or folder named "
            f"mooncake that hides it, or remove it (pip uninstall mooncake). "
            f"{_reinstall(distributions)}"
        )
    return f"the Mooncake engine ({wheel}) needs the Python module `{name}`: install it with pip"


def _explain_library(library: str, wheel: str, distributions: Mapping[str, str]) -> str:
    missing = f"the Mooncake engine ({wheel}) needs {library}, which this machine does not have"
    if library.startswith(_SYSTEM):
        return f"{missing}. On Debian and Ubuntu: {_APT}"
    if library.startswith("libcudart.so.12") and distributions.get(NON_CUDA) in _MISPACKAGED:
        return (
            f"{missing}: this release was packaged for CUDA by mistake. Upgrade it: "
            f'pip install "{NON_CUDA}>=0.3.13.post1"; or keep it: '
            f"pip install nvidia-cuda-runtime-cu12, and put that package's lib folder "
            f"(site-packages/nvidia/cuda_runtime/lib) into LD_LIBRARY_PATH"
        )
    for prefix, owner in _ACCELERATORS.items():
        if library.startswith(prefix):
            others = " ".join(name for name in distributions if name != NON_CUDA)
            remove = f"pip uninstall -y {others} && " if others else ""
            return (
                f"{missing}: it belongs to {owner}. Without it, use the wheel that needs none; "
                f"the other one must go first, as both install the same package: {remove}{_CPU}"
            )
    return f"{missing}. Install the system package that carries it"

"""The engine's wheel for aarch64 has what this library looks for in it; no test runs there.

The wheel of the installed version is fetched once per environment (42 MB), its symbols are read.
What to look for is not listed here: the engine of this machine is asked, and what the library asks
it for is noted.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from aiomooncake.engine import binding, entry_points, options, process
from aiomooncake.engine.binding import load_binding
from aiomooncake.engine.missing import NON_CUDA

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="it is compared with the wheel for Linux on x86-64",
    ),
    pytest.mark.timeout(300),  # for the first time on a slow network
]
ENGINE: Final = Path(binding.__file__).parent
# Data, which `ctypes` looks up without asking the library object.
TABLES: Final = {"_ZTVN8mooncake10RealClientE", "_ZTVN8mooncake11DummyClientE"}
LOG_LEVEL: Final = "_ZN3fLI17FLAGS_minloglevelE"  # it is glog's, which the wheel brings


class NotingLibrary(ctypes.CDLL):
    """A shared object that notes which of its functions were asked for and found."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.found: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)
        self.found.add(name)
        return function


class Exports:
    """The dynamic symbols that a shared object defines.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.machine: str = elf["e_machine"]
            symbols, dynamic = map(elf.get_section_by_name, (".dynsym", ".dynamic"))
            assert isinstance(symbols, SymbolTableSection)
            assert isinstance(dynamic, DynamicSection)
            self.names = {
                each.name for each in symbols.iter_symbols() if each["st_shndx"] != "SHN_UNDEF"
            }
            self.needs = {
                tag.needed  # type: ignore[attr-defined]  # set by name
                for tag in dynamic.iter_tags("DT_NEEDED")
            }


@pytest.fixture(scope="module")
def arm() -> Path:
    """Fetch the wheel for aarch64 and keep what is looked into; where it lies."""
    version = importlib.metadata.version(NON_CUDA)
    folder = Path(sys.prefix, "engine-wheels", f"{version}-aarch64")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run side by side
        if not (folder / "whole").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder), f"{NON_CUDA}=={version}"]
            for tag in ("manylinux2014", "manylinux_2_28", "manylinux_2_35", "manylinux_2_39"):
                command += ["--platform", f"{tag}_aarch64"]
            subprocess.run(command, timeout=240, check=True)
            (wheel,) = folder.glob("*_aarch64.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if re.fullmatch(r"mooncake/\w+\.so|\w+\.libs/libglog.*", name):
                        archive.extract(name, folder)
            wheel.unlink()
            (folder / "whole").touch()
    return folder


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Have the library find all it can in the engine of this machine; the names that it uses."""
    loaded = load_binding()
    library = NotingLibrary(str(loaded.shared_object))
    monkeypatch.setattr(entry_points, "_library", lambda _: library)
    for kind in (entry_points.RealEntry, entry_points.DummyEntry):
        assert isinstance(kind.find(loaded), kind)
    tracker = re.findall(r"lib\.(_ZN8mooncake15ResourceTracker\w+)", source(process))
    assert len(tracker) == 2
    plugins = {options._METADATA.format(name) for name in options._PLUGINS.values()}
    here = Exports(loaded.shared_object).names
    return library.found | TABLES | set(tracker) | (plugins & here)


def source(module: Any) -> str:
    return Path(module.__file__).read_text(encoding="utf-8")


def test_no_name_is_forgotten() -> None:
    """Whoever looks for one more name in the engine adds it above, if it is not noted."""
    modules = {
        path.name for path in ENGINE.glob("*.py") if "_Z" in path.read_text(encoding="utf-8")
    }
    assert modules == {"binding.py", "entry_points.py", "options.py", "process.py"}


def test_it_exports_what_is_looked_for(arm: Path, looked_for: set[str]) -> None:
    module = load_binding().shared_object
    here, there = Exports(module), Exports(arm / "mooncake" / module.name)
    assert (here.machine, there.machine) == ("EM_X86_64", "EM_AARCH64")
    assert looked_for <= here.names  # so that the reader of symbols is known to be right
    assert looked_for <= there.names, sorted(looked_for - there.names)
    assert len([name for name in looked_for if "10RealClient" in name]) == 4, looked_for


def test_the_binding_has_the_same_methods(arm: Path) -> None:
    """Names of methods lie in the module as text; the capsule's name too."""
    loaded = load_binding()
    text = (arm / "mooncake" / loaded.shared_object.name).read_bytes()
    words = {*loaded.methods, "_get_pyclient_capsule", entry_points._CAPSULE.decode()}
    missing = [word for word in sorted(words) if word.encode() + b"\0" not in text]
    assert not missing


def test_it_needs_the_same_system_libraries(arm: Path) -> None:
    """What README, error texts and scripts tell to install is right there too."""
    module = load_binding().shared_object
    here, there = Exports(module), Exports(arm / "mooncake" / module.name)
    system = re.compile(r"lib(ibverbs|numa|curl)\.")
    assert sum(map(bool, map(system.match, here.needs))) == 3
    for name in filter(system.match, here.needs):
        assert name in there.needs


def test_its_log_is_silenced_in_the_same_way(arm: Path) -> None:
    assert f'"{LOG_LEVEL}"' in source(binding)
    for wheel in (load_binding().shared_object.parents[1], arm):
        (glog,) = wheel.glob("mooncake_*.libs/libglog*")
        assert LOG_LEVEL in Exports(glog).names

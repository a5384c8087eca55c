from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiomooncake.config import ReplicateConfig
from aiomooncake.engine import binding as binding_module
from aiomooncake.engine.binding import (
    Binding,
    find_address_methods,
    find_methods,
    load_binding,
    native_replicate_config,
)
from aiomooncake.engine.missing import NON_CUDA, explain_import_error
from aiomooncake.errors import EngineNotInstalledError, InvalidArgumentError, NotSupportedError

CUDA = "mooncake-transfer-engine"


def _no_library(name: str) -> ImportError:
    return ImportError(f"{name}: cannot open shared object file: No such file or directory")


def _no_module(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


# --- what is missing, in words ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("exc", "wheels", "words"),
    [
        pytest.param(
            _no_module("mooncake"),
            {},
            ["no Mooncake engine is installed", 'pip install "aiomooncake[cpu]"'],
            id="nothing",
        ),
        pytest.param(
            _no_module("mooncake"),
            {NON_CUDA: "0.3.13.post1"},
            ["is gone", f"pip uninstall -y {NON_CUDA} && pip install {NON_CUDA}"],
            id="package-gone",
        ),
        pytest.param(
            _no_module("mooncake.store"),
            {},
            ["no module `mooncake.store`", "hides it", 'pip install "aiomooncake[cpu]"'],
            id="other-package",
        ),
        pytest.param(
            _no_module("numpy"),
            {NON_CUDA: "0.3.13.post1"},
            ["needs the Python module `numpy`"],
            id="python-module",
        ),
        pytest.param(
            _no_library("libibverbs.so.1"),
            {NON_CUDA: "0.3.13.post1"},
            ["libibverbs.so.1", "apt-get install libibverbs1 libnuma1 libcurl4", "0.3.13.post1"],
            id="libibverbs",
        ),
        pytest.param(
            _no_library("libnuma.so.1"),
            {CUDA: "0.3.13.post1"},
            ["libnuma.so.1", "apt-get install libibverbs1 libnuma1 libcurl4"],
            id="libnuma",
        ),
        pytest.param(
            _no_library("libcurl.so.4"),
            {NON_CUDA: "0.3.13.post1"},
            ["libcurl.so.4", "apt-get install libibverbs1 libnuma1 libcurl4"],
            id="libcurl",
        ),
        pytest.param(
            _no_library("libcuda.so.1"),
            {CUDA: "0.3.13.post1"},
            [
                "the NVIDIA driver",
                f'pip uninstall -y {CUDA} && pip install "aiomooncake[cpu]"',
            ],
            id="libcuda",
        ),
        pytest.param(
            _no_library("libcudart.so.12"),
            {NON_CUDA: "0.3.13"},
            [
                "by mistake",
                f'pip install "{NON_CUDA}>=0.3.13.post1"',
                "nvidia-cuda-runtime-cu12",
                "LD_LIBRARY_PATH",
            ],
            id="mis-packaged",
        ),
        pytest.param(
            _no_library("libcudart.so.12"),
            {CUDA: "0.3.13"},
            ["the CUDA runtime", f"pip uninstall -y {CUDA}"],
            id="libcudart",
        ),
        pytest.param(
            _no_library("libascendcl.so"),
            {"mooncake-transfer-engine-npu": "0.3.13.post1"},
            ["the Ascend toolkit", "pip uninstall -y mooncake-transfer-engine-npu"],
            id="other-accelerator",
        ),
        pytest.param(
            _no_library("libsomething.so.3"),
            {NON_CUDA: "0.3.13.post1"},
            ["libsomething.so.3", "Install the system package that carries it"],
            id="unknown-library",
        ),
        pytest.param(
            ImportError("/lib/libc.so.6: version `GLIBC_2.99' not found (required by store.so)"),
            {NON_CUDA: "0.3.13.post1"},
            ["GLIBC_2.99", "newer system", "memory://"],
            id="old-system",
        ),
        pytest.param(
            ImportError("store.so: undefined symbol: _ZN8mooncake5thing"),
            {NON_CUDA: "0.3.13.post1", CUDA: "0.3.12"},
            ["undefined symbol", "0.3.12", f"pip uninstall -y {NON_CUDA} {CUDA}"],
            id="two-wheels-mixed",
        ),
    ],
)
def test_the_text_names_what_is_missing_and_the_cure(
    exc: ImportError, wheels: dict[str, str], words: list[str]
) -> None:
    text = explain_import_error(exc, wheels, "linux")
    for word in words:
        assert word in text


@pytest.mark.parametrize("version", ["0.3.12", "0.3.12.post1", "0.3.13"])
def test_the_mispackaged_wheels_are_known(version: str) -> None:
    text = explain_import_error(_no_library("libcudart.so.12"), {NON_CUDA: version}, "linux")
    assert "by mistake" in text


def test_another_system_is_sent_to_the_in_memory_engine() -> None:
    text = explain_import_error(_no_module("mooncake"), {}, "darwin")
    assert "Linux only" in text
    assert "darwin" in text
    assert 'connect("memory://name")' in text


# --- a staged package, in a process of its own ------------------------------------------------

_LOAD = """
import sys, warnings
from aiomooncake.engine.binding import load_binding
from aiomooncake.errors import EngineNotInstalledError
try:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        binding = load_binding()
        assert load_binding() is binding
    print("loaded", binding.shared_object, binding.version, *sorted(binding.distributions))
    print(*sorted(binding.methods), "|", *sorted(binding.address_methods))
    for one in caught:
        print("warned", one.message)
except EngineNotInstalledError as exc:
    print("missing", type(exc.__cause__).__name__, exc)
"""


def _load_in_process(staged: Path) -> str:
    """Load a binding with the staged folder in front of whatever is installed."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD],
        env={"PYTHONPATH": f"{staged}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return done.stdout


def _stage(folder: Path, **files: str) -> Path:
    package = folder / "mooncake"
    package.mkdir()
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    return package


_FAKE = """
class ReplicateConfig:
    pass

class MooncakeDistributedStore:
    def put(self): "put(self: mooncake.store.X, key: str, value: Buffer) -> int"
    def get_into(self): "get_into(self: mooncake.store.X, key: str, buffer_ptr: int) -> int"
"""


def _wheel(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no engine elsewhere")
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file')",
            "apt-get install libibverbs1 libnuma1 libcurl4",
        ),
        (
            "raise ImportError('libcuda.so.1: cannot open shared object file: No such file')",
            "the NVIDIA driver",
        ),
        ("", "fails to import: AttributeError"),
    ],
)
def test_an_engine_that_fails_to_import(tmp_path: Path, failure: str, words: str) -> None:
    _stage(tmp_path, store=failure)
    printed = _load_in_process(tmp_path)
    assert printed.startswith("missing ")
    assert words in printed


@pytest.mark.skipif(sys.platform != "linux", reason="there is no engine elsewhere")
def test_a_package_without_a_store(tmp_path: Path) -> None:
    _stage(tmp_path)
    printed = _load_in_process(tmp_path)
    assert printed.startswith("missing ModuleNotFoundError")
    assert "no module `mooncake.store`" in printed


def test_two_wheels_on_top_of_each_other_are_warned_about_once(tmp_path: Path) -> None:
    package = _stage(tmp_path, store=_FAKE)
    _wheel(tmp_path, "mooncake-transfer-engine", "0.3.13.post1")
    _wheel(tmp_path, "mooncake-transfer-engine-rocm", "0.3.13.post1")
    printed = _load_in_process(tmp_path)
    assert f"loaded {package / 'store.py'}" in printed
    assert printed.count("warned") == 1
    assert "installed on top of each other" in printed
    assert "pip uninstall -y mooncake-transfer-engine" in printed
    assert "get_into put | get_into" in printed


def test_the_shared_object_is_where_the_class_comes_from(tmp_path: Path) -> None:
    """From 0.3.14 on `mooncake.store` is a package and the class lives in `mooncake._store`."""
    package = _stage(tmp_path, _store=_FAKE)
    (package / "store").mkdir()
    (package / "store" / "__init__.py").write_text("from mooncake._store import *\n")
    assert f"loaded {package / '_store.py'}" in _load_in_process(tmp_path)


# --- loading in this process ------------------------------------------------------------------


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mooncake.store")
    module.__file__ = "/somewhere/store.so"
    exec(_FAKE, module.__dict__)
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(binding_module, "installed_distributions", lambda: {NON_CUDA: "0.3.13"})
    return module


@pytest.fixture(autouse=True)
def _load_afresh() -> Any:
    binding_module._load.cache_clear()
    yield
    binding_module._load.cache_clear()


def test_it_is_loaded_once_by_all_threads(fake_engine: ModuleType) -> None:
    found: list[Binding] = []
    threads = [threading.Thread(target=lambda: found.append(load_binding())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(binding) for binding in found}) == 1
    assert found[0].version == "0.3.13"
    assert found[0].distributions == (NON_CUDA,)
    assert found[0].shared_object == Path("/somewhere/store.so")


@pytest.mark.parametrize("wish", [None, "INFO"])
def test_the_users_log_level_stands_and_ours_does_not_stay(
    fake_engine: ModuleType, monkeypatch: pytest.MonkeyPatch, wish: str | None
) -> None:
    """A child process once took ours for its user's wish, and was loud."""
    monkeypatch.setenv("MC_LOG_LEVEL", wish or "")
    if wish is None:
        monkeypatch.delenv("MC_LOG_LEVEL")
    load_binding()
    assert os.environ.get("MC_LOG_LEVEL") == wish


def test_a_failed_load_is_tried_again(
    fake_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_engine.ReplicateConfig
    monkeypatch.delattr(fake_engine, "ReplicateConfig")
    with pytest.raises(EngineNotInstalledError, match="fails to import"):
        load_binding()
    monkeypatch.setattr(fake_engine, "ReplicateConfig", config, raising=False)
    assert load_binding().replicate_config_class is config


# --- methods and their arguments --------------------------------------------------------------


def _method(docstring: str) -> Callable[[], None]:
    def method() -> None: ...

    method.__doc__ = docstring
    return method


def test_caller_memory_is_found_in_pybind_signatures() -> None:
    store = type(
        "Store",
        (),
        {
            "_hidden": _method("_hidden(self: m.S, buffer_ptr: int) -> int"),
            "put": _method("put(self: m.S, key: str, config: m.C = <m.C object at 0x7f>) -> int"),
            "put_from": _method("put_from(self: m.S, key: str, buffer_ptr: int) -> int"),
            "batch": _method("batch(self: m.S, keys: list[str], all_buffer_ptrs: list) -> int"),
            "setup": _method(
                "setup(*args, **kwargs)\nOverloaded function.\n\n"
                "1. setup(self: m.S, host: str) -> int\n\n"
                "2. setup(self: m.S, metadata_buffer_ptr: int) -> int\n"
            ),
            "get_tensor_into_cuda": _method("get_tensor_into_cuda(self: m.S, tensor: object)"),
            "get": _method("get(self: m.S, arg0: str) -> bytes\n\nNot about (buffer_ptr: int).\n"),
        },
    )
    assert find_methods(store) == {
        "put",
        "put_from",
        "batch",
        "setup",
        "get_tensor_into_cuda",
        "get",
    }
    assert find_address_methods(store) == {
        "put_from",
        "batch",
        "setup",
        "get_tensor_into_cuda",
    }


# --- placement options ------------------------------------------------------------------------


class _DataType:
    UNKNOWN: _DataType
    KVCACHE: _DataType


_DataType.UNKNOWN = _DataType()
_DataType.KVCACHE = _DataType()


class _NativeConfig:
    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.with_hard_pin = False
        self.data_type = _DataType.UNKNOWN
        self.group_ids: list[str] | None = None


def _binding(config_class: type[Any], version: str | None = "0.3.9") -> Binding:
    return Binding(
        module=ModuleType("mooncake.store"),
        store_class=object,
        replicate_config_class=config_class,
        shared_object=Path("/nowhere"),
        version=version,
        distributions=(NON_CUDA,),
        methods=frozenset(),
        address_methods=frozenset(),
    )


def test_options_become_the_engines_own() -> None:
    given = ReplicateConfig(
        2,
        preferred_segments=["a:1", "b:2"],
        with_hard_pin=True,
        data_type="kvcache",
        group_ids=["g"],
    )
    native = native_replicate_config(_binding(_NativeConfig), given)
    assert native.replica_num == 2
    assert native.preferred_segments == ["a:1", "b:2"]
    assert native.with_hard_pin is True
    assert native.data_type is _DataType.KVCACHE
    assert native.group_ids == ["g"]
    assert native.preferred_segment == ""


def test_an_option_that_the_wheel_lacks_is_refused_only_when_used() -> None:
    binding = _binding(_NativeConfig)
    assert native_replicate_config(binding, ReplicateConfig()).replica_num == 1
    with pytest.raises(NotSupportedError, match=r"dfs_replica_num is not known to engine 0\.3\.9"):
        native_replicate_config(binding, ReplicateConfig(1, dfs_replica_num=1))
    with pytest.raises(NotSupportedError, match=r"data_type='weight' is not known to engine"):
        native_replicate_config(binding, ReplicateConfig(data_type="weight"))
    with pytest.raises(NotSupportedError, match="not known to the installed engine"):
        native_replicate_config(
            _binding(_NativeConfig, None), ReplicateConfig(1, dfs_replica_num=1)
        )


def test_a_value_that_the_engine_refuses() -> None:
    class Picky(_NativeConfig):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "replica_num" and value != 1:
                raise TypeError("incompatible function arguments")
            super().__setattr__(name, value)

    with pytest.raises(InvalidArgumentError, match="replica_num=3 is refused by engine"):
        native_replicate_config(_binding(Picky), ReplicateConfig(3))


def test_every_option_is_known_to_the_installed_engine() -> None:
    pytest.importorskip("mooncake")
    binding = load_binding()
    given = ReplicateConfig(
        1,
        nof_replica_num=1,
        dfs_replica_num=1,
        preferred_segments=["a:1"],
        preferred_nof_segments=["b:1"],
        soft_pin_action="enable",
        soft_pin_ttl_ms=1000,
        with_hard_pin=True,
        data_type="optimizer_state",
        group_ids=["g"],
    )
    native = native_replicate_config(binding, given)
    assert native.data_type.name == "OPTIMIZER_STATE"
    assert native.soft_pin_action.name == "ENABLE"
    names = {field.name for field in dataclasses.fields(given)}
    assert names == {name for name in dir(native) if not name.startswith("_")}
    assert native.group_ids == ["g"]

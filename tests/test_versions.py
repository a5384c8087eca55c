"""Which Pythons and engine wheels are supported, and what the others are told."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from aiomooncake import NotSupportedError, ReplicateConfig, StoreConfig
from aiomooncake.engine import lifecycle, options
from aiomooncake.engine.binding import (
    installed_distributions,
    load_binding,
    native_replicate_config,
)
from aiomooncake.engine.options import check_installed, check_version, check_wheel
from aiomooncake.engine.since import METHODS_SINCE, OLDEST, no_method
from tests import versions_scenes as scenes
from tests.adversity.doctor_scenes import other_distribution
from tests.adversity.processes import run_scene
from tests.versions_calls import ALL_CALLS

ROOT = Path(__file__).parents[1]
RECORDS: Any = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))
ENGINES: Any = RECORDS["engines"]
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="there is no engine elsewhere")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- the page ---------------------------------------------------------------------------------


def test_the_tables_are_current() -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert script("versions_table").page(text) == text, "run scripts/versions_table.py"


def test_the_records_are_of_the_engines_that_the_matrix_runs() -> None:
    matrix = script("matrix")
    assert tuple(ENGINES) == tuple(RECORDS["runs"]) == matrix.ENGINES
    assert matrix.ENGINES[0] == OLDEST
    for found in [RECORDS["memory"], *(found["real"] for found in ENGINES.values())]:
        assert set(found) == set(ALL_CALLS), "other verbs than those: scripts/test-matrix --verbs"


def test_nothing_that_was_recorded_is_wrong() -> None:
    assert set(RECORDS["memory"].values()) == {"yes"}
    for version, found in ENGINES.items():
        assert set(found["real"].values()) <= {"yes", "NotSupportedError"}
        if isinstance(found["dummy"], str):
            assert f"NotSupportedError: engine {version} is too old for dummy" in found["dummy"]
        else:
            assert set(found["dummy"].values()) == {"yes", "NotSupportedError"}
    assert set(ENGINES[script("matrix").NEWEST]["real"].values()) == {"yes"}
    for runs in RECORDS["runs"].values():
        for counts in runs.values():
            assert counts["passed"] > 100
            assert not {"failed", "error", "errors"} & set(counts)


@ON_LINUX
@pytest.mark.timeout(120)
def test_what_is_said_of_the_installed_engine_is_true() -> None:
    """The probe again, in a process of its own, against what is recorded of this version."""
    done = subprocess.run(
        [sys.executable, "scripts/versions_probe.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.pop("memory") == RECORDS["memory"]
    recorded = dict(ENGINES[found.pop("version")])
    recorded["methods"] = recorded["methods"].split()
    assert found == recorded


# --- what came with which wheel ---------------------------------------------------------------


def test_the_methods_are_said_to_have_come_when_they_did() -> None:
    """A version between two that are recorded is the first; the later of them has the method."""
    oldest = set(ENGINES[OLDEST]["methods"].split())
    every = {name for found in ENGINES.values() for name in found["methods"].split()}
    assert set(METHODS_SINCE) == every - oldest
    for version, found in ENGINES.items():
        has = set(found["methods"].split())
        came = {name for name, since in METHODS_SINCE.items() if Version(since) <= Version(version)}
        assert came == has - oldest, version


def test_a_missing_method_is_named_with_its_wheel() -> None:
    error = no_method("batch_put_session_start", rank=3)
    assert "has no batch_put_session_start: install 0.3.13 or newer" in str(error)
    assert isinstance(error, AttributeError), "what hasattr() asks for"
    shown = "".join(traceback.format_exception_only(error))
    assert shown.startswith("aiomooncake.errors.NotSupportedError: [TP3] "), "what can be caught"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.rank) == (NotSupportedError, str(error), 3)
    assert str(no_method("never_seen")).endswith("has no never_seen: install a newer wheel")


@ON_LINUX
async def test_a_missing_method_is_told_on_a_loop() -> None:
    """On CPython 3.12 blockbuster found the loop reading what is installed."""
    await asyncio.to_thread(load_binding)
    assert str(no_method("batch_put_session_start")).startswith("engine ")


def test_a_missing_option_is_named_with_its_wheel() -> None:
    class Native:
        replica_num = 1

    binding: Any = SimpleNamespace(replicate_config_class=Native, version="0.3.11.post1")
    with pytest.raises(NotSupportedError, match=r"group_ids .* install 0\.3\.12\.post1 or newer"):
        native_replicate_config(binding, ReplicateConfig(group_ids=["a"]))


@ON_LINUX
@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("engine {0} has no put_session: install {1} or newer", True),
        ("ReplicateConfig.x is not known to engine {0}: install {1} or newer, or leave", True),
        ("engine {0} has no teleport: install a newer wheel", False),  # of nobody
        ("engine {0} has no put: install 0.3.10 or newer", False),  # this one has it
        ("engine {0} has no teleport: install 0.4 or newer", False),  # there is none
        ("engine 0.3.9 has no put_session: install {1} or newer", False),  # another engine
    ],
)
def test_which_refusals_the_matrix_takes_for_an_older_engines(
    monkeypatch: pytest.MonkeyPatch, text: str, taken: bool
) -> None:
    from tests import older_engines

    monkeypatch.setattr(older_engines, "VERSION", OLDEST)
    needs = older_engines.needs_a_newer_engine
    text = text.format(OLDEST, older_engines.NEWEST)
    assert needs(NotSupportedError(text)) == taken
    assert not needs(AttributeError(text))
    assert not needs(None)


@ON_LINUX
def test_the_tests_that_older_engines_fail_are_there() -> None:
    """A name that means nothing would excuse nothing, or in time another test."""
    from tests import older_engines

    assert script("matrix").NEWEST == older_engines.NEWEST
    named = [(each.since, each.tests) for each in older_engines.DIFFERENCES]
    named += [(since, names) for since, names, _ in older_engines.LEFT_OUT]
    for since, names in named:
        assert older_engines.older(OLDEST, since)
        assert not older_engines.older(older_engines.NEWEST, since)
        for name in names:
            file, _, test = name.partition("[")[0].partition("::")
            if not file:
                assert name == "[dummy"
                continue
            (path,) = (ROOT / "tests").rglob(file)
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), name


# --- too old, too new, and laid out otherwise -------------------------------------------------


@ON_LINUX
def test_the_installed_wheel_is_taken() -> None:
    check_wheel(load_binding(), dummy=False)
    check_wheel(load_binding(), dummy=True)


def old(parameters: str) -> type[object]:
    """Make a store class whose set-up takes these."""
    setup = type("Method", (), {"__doc__": f"setup(self: Old, {parameters})"})
    return type("Old", (), {"setup": setup})


@ON_LINUX
@pytest.mark.parametrize("wish", [None, "1"])
def test_the_oldest_wheel_copies_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch, wish: str | None
) -> None:
    """0.3.10.post2 crashed on the first value in another process of the same host."""
    monkeypatch.setenv("MC_STORE_MEMCPY", wish or "")
    if wish is None:
        monkeypatch.delenv("MC_STORE_MEMCPY")
    monkeypatch.setattr(lifecycle, "_warned", set())
    methods = load_binding().methods
    binding: Any = SimpleNamespace(store_class=old(""), methods=methods, version=OLDEST)
    config = StoreConfig("127.0.0.1:1", direct=False)
    lifecycle.RealLifecycle(binding, config, "127.0.0.1", None)
    assert os.environ["MC_STORE_MEMCPY"] == (wish or "0")


@ON_LINUX
@pytest.mark.parametrize(("knows", "warnings"), [("protocol: str", 1), ("tenant_id: str", 0)])
def test_wheels_whose_values_may_be_read_too_early_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, knows: str, warnings: int
) -> None:
    """Up to 0.3.11.post1 a put into another process returned before all bytes were there."""
    monkeypatch.setattr(lifecycle, "_warned", set())
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    methods = load_binding().methods
    binding: Any = SimpleNamespace(store_class=old(knows), methods=methods, version="0.3.11.post1")
    for _ in range(2):
        config = StoreConfig("127.0.0.1:1", direct=False)
        lifecycle.RealLifecycle(binding, config, "127.0.0.1", None)
    assert caplog.text.count("Mooncake 0.3.11.post1 says that a value is stored") == warnings


@pytest.mark.parametrize(
    ("version", "dummy", "refused"),
    [
        ("0.3.9", False, "engine 0.3.9 is too old for aiomooncake: install 0.3.10.post2 or newer"),
        ("0.3.10", False, "too old for aiomooncake"),
        ("0.3.10.post1", True, "too old for aiomooncake"),
        ("0.3.10.post2", False, ""),
        ("0.3.10.post10", False, ""),
        ("0.3.11", False, ""),
        ("0.4.0", True, ""),
        ("1.0.0", True, ""),
        ("0.3.12.post1", True, "engine 0.3.12.post1 is too old for dummy clients"),
        ("0.3.13", True, ""),
        (None, True, ""),  # none, or several
        ("0.3.9+ours", True, ""),  # it may have what is needed
        ("0.3.13rc1", True, ""),
    ],
)
def test_which_versions_are_refused(version: str | None, dummy: bool, refused: str) -> None:
    if not refused:
        check_version(version, dummy=dummy)
        return
    with pytest.raises(NotSupportedError) as told:
        check_version(version, dummy=dummy)
    assert str(told.value).startswith(refused) or refused in str(told.value)


def test_a_refused_version_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody upgrades in a notebook that has been told so."""
    found = ["0.3.13.post1", "0.3.9"]
    monkeypatch.setattr(options, "installed_version", found.pop)
    monkeypatch.setattr(options, "_taken", set())
    with pytest.raises(NotSupportedError):
        check_installed(dummy=False)
    assert not options.was_taken(dummy=False)
    check_installed(dummy=False)
    check_installed(dummy=False)
    assert not found
    assert options.was_taken(dummy=False)
    assert not options.was_taken(dummy=True)


@ON_LINUX
@pytest.mark.parametrize(("version", "refused"), [("0.3.9", 3), ("0.3.12.post1", 1)])
def test_a_wheel_that_is_too_old_is_told_before_the_wait(
    tmp_path: Path, version: str, refused: int
) -> None:
    """Without a master; it was told when there was one, or after 120 s."""
    name = next(iter(installed_distributions()))
    path = other_distribution(tmp_path, name, version)
    scene = run_scene(scenes.wheels_refused_before_the_wait, version, str(refused), PYTHONPATH=path)
    scene.check(within=30)


@ON_LINUX
def test_old_wheels_are_refused() -> None:
    run_scene(scenes.old_wheels_are_refused).check(within=30)


@ON_LINUX
def test_too_new_a_wheel_is_set_up_the_slow_way_and_says_so_once() -> None:
    run_scene(scenes.too_new_a_wheel).check(within=30)


@ON_LINUX
def test_the_layout_of_0_3_14(tmp_path: Path) -> None:
    """``mooncake.store`` is a package there, over the native module ``mooncake._store``.

    No wheel of it can be imported without a GPU: the installed one is laid out like it. A native
    module answers to one name only, so the loader is given the old one for the new file.
    """
    installed = load_binding().shared_object
    package = tmp_path / "mooncake"
    (package / "store").mkdir(parents=True)
    for file in installed.parent.iterdir():
        if file != installed and file.name not in ("store", "__pycache__"):
            (package / file.name).symlink_to(file)
    for libraries in installed.parent.parent.glob("mooncake*.libs"):
        (tmp_path / libraries.name).symlink_to(libraries)
    native = package / "_store.so"
    native.symlink_to(installed)
    (package / "store" / "__init__.py").write_text(_PACKAGE)
    path = f"{tmp_path}:{ROOT}"
    run_scene(scenes.a_package_as_in_0_3_14, native, PYTHONPATH=path).check(within=30)


_PACKAGE = """
import importlib.machinery, importlib.util, pathlib, sys
package = sys.modules["mooncake.store"]
path = str(pathlib.Path(__file__).parent.parent / "_store.so")
loader = importlib.machinery.ExtensionFileLoader("mooncake.store", path)
spec = importlib.util.spec_from_file_location("mooncake.store", path, loader=loader)
native = importlib.util.module_from_spec(spec)
loader.exec_module(native)
sys.modules.update({"mooncake.store": package, "mooncake._store": native})
native.MooncakeDistributedStore.__module__ = "mooncake._store"
for name in dir(native):
    if not name.startswith("__"):
        globals()[name] = getattr(native, name)
"""

"""The list of the binding's methods is whole, and what the mirrors say of themselves is in it."""

from __future__ import annotations

import copy
import inspect
import json
import pydoc
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from aiomooncake import Store, adopt, connect
from aiomooncake.engine.binding import find_methods, load_binding
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.engine.methods import AwaitableMethods, BlockingMethods

SCRIPTS: Final = Path(__file__).parent.parent / "scripts"
SCRIPT: Final = runpy.run_path(str(SCRIPTS / "engine_stub.py"))
GIL: Final = runpy.run_path(str(SCRIPTS / "gil_table.py"))


def test_the_list_is_current() -> None:
    text = SCRIPT["MODULE"].read_text(encoding="utf-8")
    assert SCRIPT["fresh"]() == text, "run scripts/engine_stub.py"


def test_it_has_every_method_of_the_binding() -> None:
    binding = load_binding()
    for listed in (AwaitableMethods, BlockingMethods):
        assert find_methods(listed) == binding.methods
    assert all(map(inspect.iscoroutinefunction, vars_of(AwaitableMethods)))
    assert not any(map(inspect.iscoroutinefunction, vars_of(BlockingMethods)))


def vars_of(listed: type[Any]) -> list[Any]:
    return [getattr(listed, name) for name in find_methods(listed)]


def test_both_mirrors_take_the_same() -> None:
    for name in load_binding().methods:
        ways = [getattr(listed, name) for listed in (AwaitableMethods, BlockingMethods)]
        awaitable, blocking = map(inspect.signature, ways)
        assert awaitable == blocking
        assert ways[0].__doc__ == ways[1].__doc__
        assert ways[0].__doc__


def test_a_method_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the binding has no .*\bput, .* any more"):
        SCRIPT["methods_of"](type("Older", (), {"get": print}))


def test_a_method_that_is_new_is_an_error() -> None:
    real = load_binding().store_class
    with pytest.raises(ValueError, match="teleport is new"):
        SCRIPT["methods_of"](type("Newer", (real,), {"teleport": print}))


@pytest.mark.parametrize(
    ("doc", "complaint"),
    [
        ("get(*args, **kwargs)", "no signature"),
        ("get(self: Store, arg0: str, ...) -> bytes", "can't be read: '...'"),
    ],
)
def test_a_signature_that_can_not_be_read_is_an_error(doc: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SCRIPT["method_of"]("get", doc)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get", "key: str, /"),
        ("put_parts", "key: str, *args: Value, config: Config = _DEFAULT"),
        (
            "mount_segment",
            'path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""',
        ),
        ("batch_get_into", "keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]"),
        ("query_task", "task_id: TaskId"),
        ("remove", "key: str, force: bool = False"),
    ],
)
def test_arguments_and_defaults_are_those_of_the_binding(name: str, arguments: str) -> None:
    """Compared with what was read by hand, for the shapes that there are."""
    method = SCRIPT["method_of"](name, getattr(load_binding().store_class, name).__doc__)
    assert ", ".join(method.parameters()) == arguments


async def test_the_mirrors_tell_of_themselves() -> None:
    async with connect("memory://methods") as store:
        for mirror, listed in ((store.engine, AwaitableMethods), (store.blocking, BlockingMethods)):
            call = mirror.put
            assert call.__name__ == "put"
            assert call.__doc__ == listed.put.__doc__
            assert [*inspect.signature(call).parameters] == ["key", "value", "config"]
        assert inspect.iscoroutinefunction(store.engine.put)
        assert not inspect.iscoroutinefunction(store.blocking.put)


async def test_a_method_of_a_wheel_that_is_newer_than_the_list() -> None:
    class Newer(InMemoryStore):
        def teleport(self, key: str) -> str:
            return key

    async with adopt(joined(Newer)) as store:
        assert await getattr(store.engine, "teleport")("k") == "k"  # noqa: B009 - not listed
        assert "teleport" in dir(store.blocking)


def joined(kind: type[InMemoryStore]) -> InMemoryStore:
    native = kind(InMemoryEngine())
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", "master") == 0
    return native


# --- who holds the GIL --------------------------------------------------------------------------


def test_the_table_of_methods_is_current() -> None:
    text = GIL["PAGE"].read_text(encoding="utf-8")
    assert GIL["page"](text) == text, "run scripts/gil_table.py"


@pytest.mark.timeout(120)
def test_those_that_hold_the_gil_are_known_by_name() -> None:
    """Measured on the real engine; with torch, of the methods for tensors too."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "gil_table.py"), "measure"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert set(json.loads(done.stdout)) == set(GIL["HOLD"]) - GIL["_SKIPPED"]


# --- names that are somewhere else ------------------------------------------------------------


async def test_names_that_are_somewhere_else_are_told() -> None:
    async with connect("memory://names") as store:
        engine, blocking = store.engine, store.blocking
        places: list[tuple[object, str, str]] = [
            (store, "put_batch", "is a method of the binding, await store.engine.put_batch(…)"),
            (store, "batch_is_exist", "await store.engine.batch_is_exist(…)"),
            (store, "put_mny", "did you mean 'put_many'?"),
            (store, "qqqzzz", "'Store' object has no attribute 'qqqzzz'"),
            (store, "_putt", "'Store' object has no attribute '_putt'"),
            (engine, "put_many", "is a verb of the store, await store.put_many(…)"),
            (engine, "view", "is a verb of the store, store.view(…)"),
            (blocking, "get_many", "is a verb of the store, await store.get_many(…)"),
            (blocking, "batch_is_exists", "did you mean 'batch_is_exist'?"),
            (engine, "qqqzzz", "dir() of this object lists those it has"),
        ]
        for place, name, said in places:
            assert not hasattr(place, name)
            with pytest.raises(AttributeError) as told:
                getattr(place, name)
            assert said in str(told.value)
            assert told.value.name == name


async def test_only_what_can_be_called_stands_in_for_a_method() -> None:
    """Anything could be set, under any name, and was there."""
    async with connect("memory://names") as store:
        for mirror in (store.engine, store.blocking):
            told = r"^put is a method of the engine, .*: put\(…\); only a callable .*, not int$"
            with pytest.raises(AttributeError, match=told):
                mirror.put = 3  # type: ignore[assignment, method-assign]
            assert mirror.put.__name__ == "put"
            with pytest.raises(AttributeError, match=r"no method 'putt': did you mean 'put'\?"):
                mirror.putt = print  # type: ignore[union-attr]
            assert not hasattr(mirror, "putt")
            with mock.patch.object(mirror, "put") as put:
                assert mirror.put is put
            assert mirror.put.__name__ == "put"
            assert f"help(store.{'blocking' if mirror is store.blocking else 'engine'}.put)" in (
                pydoc.render_doc(mirror)
            )


async def test_an_attribute_error_of_a_property_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def hostname(self: Store) -> str:
        raise AttributeError("its own")

    async with connect("memory://names") as store:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "hostname", property(hostname))
            with pytest.raises(AttributeError, match=r"^its own$"):
                _ = store.hostname


async def test_a_store_is_copied_as_before() -> None:
    async with connect("memory://names") as store:
        assert copy.copy(store).engine is store.engine
    empty = Store.__new__(Store)  # as pickle makes one
    assert not hasattr(empty, "__setstate__")
    assert not hasattr(empty, "rank")

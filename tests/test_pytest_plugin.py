"""The pytest plugin, in runs of their own: under each way to write asynchronous tests."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import (
    BatchError,
    InvalidArgumentError,
    NoSpaceError,
    RpcError,
    RpcTimeoutError,
    connect,
)
from aiomooncake.testing import FakeMooncake, InMemoryEngine

pytest_plugins = ["pytester"]

PLUGIN = "pytest_aiomooncake"
RUN_TIMEOUT = 50.0  # seconds; each run starts a cluster and takes 4-6

# What is left at the end of a run is written down, and an engine's own output kept away.
CONFTEST = """
import os, pathlib, sys, threading
os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
AT_LOAD = sorted(name for name in sys.modules if name.partition(".")[0] in ("aiomooncake", "mooncake"))

def pytest_unconfigure():
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiomooncake-")]
    pathlib.Path(__file__).with_name("left.txt").write_text(" ".join(left))
"""  # noqa: E501

ASYNC_TESTS = """
    import aiomooncake
    import pytest

    {mark}
    async def test_put_and_get(mooncake_connect):
        store = await mooncake_connect(rank=3)
        assert isinstance(store, aiomooncake.Store)
        await store.put("key", b"value")
        assert await store.get("key") == b"value"

    {mark}
    async def test_that_it_is_clean(mooncake_connect):
        async with mooncake_connect() as store, mooncake_connect(rank=1) as other:
            assert await store.get("key") is None
            await store.put("key", b"other value")
            assert await other.get("key") == b"other value"

    {mark}
    async def test_the_cluster(mooncake_cluster, mooncake_connect):
        store = await mooncake_connect(mooncake_cluster.address, global_segment_size="16MiB")
        assert await store.get("key") is None
        await store.warmup()

    {mark}
    async def test_fake(fake_mooncake):
        store = await fake_mooncake.connect()
        await store.put("key", b"value")
        async with aiomooncake.connect(fake_mooncake.address) as other:
            assert await other.get("key") == b"value"
        fake_mooncake.fault("reads", code=-900)
        with pytest.raises(aiomooncake.RpcError):
            await store.get("key")

    def test_synchronous(mooncake_cluster, fake_mooncake):
        assert mooncake_cluster.running
        assert fake_mooncake.address.startswith("memory://")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Make an empty suite, in which warnings are errors."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini(
        """
        [pytest]
        filterwarnings = error
        asyncio_default_fixture_loop_scope = function
        faulthandler_timeout = 40
        """
    )
    return pytester


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    options = ("-p", PLUGIN, "-p", "no:cacheprovider")
    return suite.runpytest_subprocess(*options, *args, timeout=RUN_TIMEOUT)


def left_threads(suite: pytest.Pytester) -> list[str]:
    threads = (suite.path / "left.txt").read_text().split()
    return [name for name in threads if name != "aiomooncake-spawner"]


# --- ways to write asynchronous tests ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_pytest_asyncio(suite: pytest.Pytester, mode: str) -> None:
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    suite.makepyfile(ASYNC_TESTS.format(mark=mark))
    run(suite, f"--asyncio-mode={mode}").assert_outcomes(passed=5)
    assert left_threads(suite) == []


def test_anyio(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        ASYNC_TESTS.format(mark="@pytest.mark.anyio")
        + """
    @pytest.fixture
    def anyio_backend():
        return "asyncio"
    """
    )
    run(suite).assert_outcomes(passed=5)
    assert left_threads(suite) == []


def test_virtual_time_for_a_whole_test(suite: pytest.Pytester) -> None:
    """With anyio's plugin, by a loop factory; the documentation's tests do it with the other."""
    suite.makepyfile(
        """
        import anyio
        import pytest
        from aiomooncake.testing import VirtualTimeLoop

        @pytest.fixture
        def anyio_backend():
            return ("asyncio", {"loop_factory": VirtualTimeLoop})

        @pytest.mark.anyio
        async def test_an_hour(fake_mooncake):
            async with fake_mooncake.connect() as store:
                await store.warmup()
                assert anyio.current_time() == 0
                await anyio.sleep(3600)
                assert anyio.current_time() >= 3600
        """
    )
    run(suite).assert_outcomes(passed=1)


def test_unittest(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import unittest
        import pytest

        class TestCache(unittest.IsolatedAsyncioTestCase):
            @pytest.fixture(autouse=True)
            def mooncake(self, mooncake_connect, fake_mooncake):
                self.connect = mooncake_connect
                self.fake = fake_mooncake

            async def asyncSetUp(self):
                self.store = await self.connect()

            async def test_put(self):
                await self.store.put("key", b"value")
                self.assertEqual(await self.store.get("key"), b"value")

            async def test_that_it_is_clean(self):
                self.assertIsNone(await self.store.get("key"))

            async def test_fake(self):
                async with self.fake.connect() as store:
                    self.assertFalse(await store.exists("key"))
        """
    )
    run(suite).assert_outcomes(passed=3)
    assert left_threads(suite) == []


def test_a_mixin_for_unittest(suite: pytest.Pytester) -> None:
    """As it may be shared by many test cases, by ``usefixtures``."""
    suite.makeconftest(
        CONFTEST
        + """
import pytest

@pytest.fixture
def cache(request, fake_mooncake):
    request.instance.fake = fake_mooncake
"""
    )
    suite.makepyfile(
        """
        import unittest
        import pytest

        @pytest.mark.usefixtures("cache")
        class MooncakeCase(unittest.IsolatedAsyncioTestCase):
            pass

        class TestCache(MooncakeCase):
            async def test_fake(self):
                async with self.fake.connect() as store:
                    await store.put("key", b"value")
        """
    )
    run(suite).assert_outcomes(passed=1)


def test_xdist_gives_each_worker_a_master(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pathlib
        import pytest

        @pytest.mark.parametrize("number", range(6))
        async def test_put(mooncake_connect, mooncake_cluster, worker_id, number):
            store = await mooncake_connect()
            assert await store.get("key") is None
            await store.put("key", worker_id.encode())
            assert await store.get("key") == worker_id.encode()
            pathlib.Path(__file__).with_name(worker_id).write_text(mooncake_cluster.address)
        """
    )
    run(suite, "--asyncio-mode=auto", "-n", "2").assert_outcomes(passed=6)
    addresses = [(suite.path / f"gw{worker}").read_text() for worker in range(2)]
    assert addresses[0] != addresses[1]


# --- what happens to stores -------------------------------------------------------------------


def test_stores_of_failed_tests_are_closed(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import asyncio
        import threading

        async def test_fails(mooncake_connect):
            store = await mooncake_connect()
            await store.put("key", b"value")
            assert False, "as it should"

        async def test_fails_with_a_call_under_way(fake_mooncake):
            store = await fake_mooncake.connect()
            await store.put("key", b"value")
            fake_mooncake.fault("reads", hold=threading.Event())
            await asyncio.wait_for(store.get("key"), 0.05)

        async def test_the_next_one(mooncake_connect):
            store = await mooncake_connect()
            assert await store.get("key") is None
        """
    )
    run(suite, "--asyncio-mode=auto").assert_outcomes(failed=2, passed=1)
    assert left_threads(suite) == []


def test_closing_stores_take_no_values_with_them(suite: pytest.Pytester) -> None:
    """Nor do tests wait for closes: each takes 1-2 s, and the master still places values there."""
    suite.makepyfile(
        """
        import asyncio
        import time
        import pytest

        async def test_lends_memory(mooncake_connect):
            store = await mooncake_connect(global_segment_size="64MiB")
            await store.put("key", b"value")

        async def test_keeps_its_values(mooncake_connect):
            store = await mooncake_connect()
            values = {f"key {i}": bytes(100) for i in range(100)}
            await store.put_many(values)
            await asyncio.sleep(2.5)
            assert await store.get_many(values) == list(values.values())

        BEGAN = []

        @pytest.mark.parametrize("number", range(10))
        async def test_waits_for_nobody(mooncake_connect, number):
            BEGAN.append(time.monotonic())
            store = await mooncake_connect()
            await store.put("key", b"value")

        def test_took_less_time_than_the_closes():
            assert time.monotonic() - BEGAN[0] < 8.0
        """
    )
    run(suite, "--asyncio-mode=auto").assert_outcomes(passed=13)
    assert left_threads(suite) == []


def test_a_cluster_of_the_users_own(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import aiomooncake
        import pytest

        @pytest.fixture(scope="session")
        def mooncake_cluster():
            with aiomooncake.LocalCluster(lease_ttl=0.1, client_ttl=5) as cluster:
                yield cluster

        async def test_put(mooncake_connect, mooncake_cluster):
            store = await mooncake_connect()
            assert store.config.master_server_address == mooncake_cluster.address
            await store.put("key", b"value")
            assert await store.get("key") == b"value"
        """
    )
    run(suite, "--asyncio-mode=auto").assert_outcomes(passed=1)
    assert left_threads(suite) == []


def test_the_cluster_has_memory_whoever_comes_first(suite: pytest.Pytester) -> None:
    """It came with the first ``mooncake_connect``, so it depended on the order of the tests."""
    suite.makepyfile(
        """
        import aiomooncake

        async def test_a_program_that_lends_nothing(mooncake_cluster):
            target = mooncake_cluster.address
            async with aiomooncake.connect(target, global_segment_size=0, timeout=20) as store:
                await store.put("key", b"value")

        async def test_that_it_has_it_once(mooncake_cluster, mooncake_connect):
            from aiomooncake.testing.fixtures import _segments

            await mooncake_connect()
            assert len(_segments(mooncake_cluster)) == 1
        """
    )
    run(suite, "--asyncio-mode=auto").assert_outcomes(passed=2)


def test_a_cluster_of_the_users_own_keeps_the_memory_that_it_was_given(
    suite: pytest.Pytester,
) -> None:
    suite.makepyfile(
        """
        import aiomooncake
        import pytest

        @pytest.fixture(scope="session")
        def mooncake_cluster():
            with aiomooncake.LocalCluster() as cluster:
                cluster.blocking.start_client(global_segment_size="64mb")
                yield cluster

        async def test_put(mooncake_connect, mooncake_cluster):
            from aiomooncake.testing.fixtures import _segments

            store = await mooncake_connect()
            await store.put("key", b"value")
            assert len(_segments(mooncake_cluster)) == 1
        """
    )
    run(suite, "--asyncio-mode=auto").assert_outcomes(passed=1)


def test_a_shared_master_that_a_test_has_killed_is_told(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        async def test_kills(mooncake_connect, mooncake_cluster):
            await mooncake_connect()
            await mooncake_cluster.kill()

        async def test_suffers(mooncake_connect):
            await mooncake_connect()
        """
    )
    result = run(suite, "--asyncio-mode=auto")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*a test that stops, kills or freezes a master needs*"])


# --- without an engine ------------------------------------------------------------------------

NEEDS_ENGINE = """
    def test_cluster(mooncake_cluster):
        pass

    async def test_connect(mooncake_connect):
        pass

    async def test_fake(fake_mooncake):
        async with fake_mooncake.connect() as store:
            await store.put("key", b"value")
"""


def test_a_missing_engine_fails_the_tests_that_need_it(suite: pytest.Pytester) -> None:
    suite.mkpydir("mooncake")  # a package without servers hides the installed one
    suite.makepyfile(NEEDS_ENGINE)
    result = run(suite, "--asyncio-mode=auto")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["LocalCluster needs the mooncake_master program*pip install*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_where_there_is_no_engine_they_are_skipped(suite: pytest.Pytester) -> None:
    suite.makeconftest(
        CONFTEST
        + """
import pytest

@pytest.fixture(scope="session", autouse=True)
def elsewhere():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        yield
"""
    )
    suite.makepyfile(NEEDS_ENGINE)
    result = run(suite, "--asyncio-mode=auto", "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*exists for Linux only*"])


# --- the engine in memory ---------------------------------------------------------------------


async def test_families_of_faults() -> None:
    with FakeMooncake() as fake:
        store = await fake.connect()
        await store.put("there", b"value")
        verbs: dict[str, list[Callable[[], Awaitable[Any]]]] = {
            "writes": [lambda: store.put("k", b"v"), lambda: store.put_many({"k": b"v"})],
            "reads": [lambda: store.get("there"), lambda: store.get_many(["there", "k"])],
            "lookups": [lambda: store.exists("there"), lambda: store.size("there")],
            "removes": [
                lambda: store.remove("k", force=True),
                lambda: store.remove_many(["k"], force=True),
            ],
        }
        for family in verbs:
            fault = fake.fault(family, code=-900)
            for other, calls in verbs.items():
                for call in calls:
                    if other == family:
                        with pytest.raises((RpcError, BatchError), match="-900"):
                            await call()
                    else:
                        await call()
            fault.remove()
        assert await store.get("there") == b"value"


def test_a_fault_of_a_name_that_nothing_has_is_refused() -> None:
    """It was taken, and never struck."""
    with FakeMooncake() as fake:
        for name, meant in (("write", "'writes'"), ("exists", "'is_exist'"), ("typo", None)):
            told = rf"^fault\('{name}'\): .* a family: writes, reads, lookups, removes"
            with pytest.raises(InvalidArgumentError, match=told) as refused:
                fake.fault(name, code=-200)
            assert (f"did you mean {meant}?" in str(refused.value)) == (meant is not None)
        assert fake.calm
    with pytest.raises(InvalidArgumentError, match=r"dir\(store.engine\) lists$"):
        InMemoryEngine().fault("writes", code=-200)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("hold", asyncio.Event(), r"hold must be a threading\.Event, because .* on threads"),
        ("hold", 1, r"hold must be a threading\.Event"),
        *(("code", value, "an integer below 0") for value in (0, 200, -200.0, "-200", True)),
        *(
            ("delay", value, "a number of seconds from 0 on")
            for value in (-0.1, float("nan"), float("inf"), "1", None, True)
        ),
        *(("times", value, "a number of calls from 1 on") for value in (0, -1, 1.0, "1", True)),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused(name: str, value: object, told: str) -> None:
    """Calls would fail inside the engine, or not at all."""
    what: dict[str, Any] = {name: value}
    with FakeMooncake() as fake:
        for method in ("writes", "put"):
            with pytest.raises(InvalidArgumentError, match=told) as refused:
                fake.fault(method, **what)
            assert str(refused.value).endswith(f"got {value!r}")
        assert fake.calm
    engine = InMemoryEngine()
    with pytest.raises(InvalidArgumentError, match=told):
        engine.fault("put", **what)
    assert engine.calm


async def test_a_frozen_engine_is_given_up_after_the_rpc_timeout_of_the_store() -> None:
    with FakeMooncake() as fake:
        hasty, patient = await fake.connect(rpc_timeout=0.05), await fake.connect(rpc_timeout=60)
        fake.freeze()
        waiting = asyncio.ensure_future(patient.put("k", b"v"))
        began = time.monotonic()
        with pytest.raises(RpcTimeoutError):
            await asyncio.wait_for(hasty.put("other", b"v"), 10)
        assert time.monotonic() - began >= 0.05
        assert not waiting.done()
        fake.thaw()
        await waiting
        assert await hasty.get("k") == b"v"


async def test_a_time_out_of_the_engine_counts_for_all_stores() -> None:
    with FakeMooncake(rpc_timeout=0.05) as fake:
        store = await fake.connect(rpc_timeout=60)
        fake.freeze()
        with pytest.raises(RpcTimeoutError):
            await asyncio.wait_for(store.put("k", b"v"), 10)


async def test_faults_that_are_counted_and_those_of_one_method() -> None:
    with FakeMooncake() as fake:
        store = await fake.connect(local_hostname="10.0.0.7")
        fake.fault("writes", code=-200, times=2, hostname="10.0.0.7")
        elsewhere = fake.fault("writes", code=-200, hostname="10.0.0.8")
        for _ in range(2):
            with pytest.raises(NoSpaceError):
                await store.put("k", b"v")
        await store.put("k", b"v")
        fake.fault("is_exist", code=-900)
        assert await store.engine.is_exist("k") == -900
        assert await store.engine.batch_is_exist(["k"]) == [1]
        assert elsewhere.hits == 0


async def test_what_hangs_is_let_go_and_the_name_forgotten() -> None:
    with FakeMooncake(lease_ttl=0.1) as fake:
        store = await fake.connect()
        fake.fault("writes", hold=threading.Event())
        fake.fault("is_exist", hold=threading.Event())
        calls = [asyncio.ensure_future(store.put("k", b"v")), store.engine.is_exist("k")]
        done = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.05)
        fake.freeze()
        address = fake.address
    await done
    async with connect(address) as store:
        assert not await store.exists("k")
    InMemoryEngine.reset(fake.name)


# --- loading ----------------------------------------------------------------------------------


def test_nothing_but_pytest_is_imported_at_load() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        f"import {PLUGIN}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == [PLUGIN]


def test_coverage_sees_the_whole_package(suite: pytest.Pytester) -> None:
    """No module of it is imported before the conftest, where coverage has begun long ago."""
    suite.makepyfile(
        """
        from conftest import AT_LOAD

        def test_load():
            assert AT_LOAD == []
        """
    )
    run(suite).assert_outcomes(passed=1)


def test_pytest_finds_it_by_itself(suite: pytest.Pytester) -> None:
    """By its entry point, once the package was installed with it."""
    points = importlib.metadata.entry_points(group="pytest11", name=PLUGIN)
    assert [point.value for point in points] == [PLUGIN]
    suite.makepyfile("def test_fake(fake_mooncake): pass")
    suite.runpytest_subprocess(timeout=RUN_TIMEOUT).assert_outcomes(passed=1)
    run(suite).assert_outcomes(passed=1)  # not registered twice


def test_fixtures_are_described(suite: pytest.Pytester) -> None:
    result = run(suite, "--fixtures")
    text = re.sub(r"\s+", " ", result.stdout.str())
    for name, what in [
        ("mooncake_cluster [session scope]", "Run a private Mooncake"),
        ("mooncake_connect", "Open stores on the cluster"),
        ("fake_mooncake", "Make an in-memory engine"),
    ]:
        assert re.search(f"{re.escape(name)} -- \\S+ {re.escape(what)}", text), name


def test_it_lies_beside_the_package() -> None:
    """In it, its import would be the import of the package."""
    spec = importlib.util.find_spec(PLUGIN)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).name == f"{PLUGIN}.py"

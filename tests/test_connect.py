"""From a target to an open store, and what is left when that does not work."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import importlib
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    NotSupportedError,
    SetupError,
    SetupTimeoutError,
    Store,
    StoreClosedError,
    StoreConfig,
    WarmupError,
    WarmupPolicy,
    adopt,
    connect,
)
from aiomooncake.engine.binding import load_binding
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.testing import LoopStallProbe

if TYPE_CHECKING:
    from tests.conftest import Hold, OpenStore

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

MB = 1 << 20
SMALL: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": 4 * MB}

# The package's name for it is the function.
opener_module: Any = importlib.import_module("aiomooncake._opener")
hosts_module: Any = importlib.import_module("aiomooncake._hosts")


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("connect")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def threads_of(rank: str) -> list[str]:
    """Name the threads of a store whose rank is a text."""
    return [t.name for t in threading.enumerate() if t.name.startswith(f"aiomooncake-{rank}-")]


def run_script(script: str, *arguments: str) -> Any:
    """Run a script in a Python of its own; what it prints last, as JSON."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


# --- how it may be used -----------------------------------------------------------------------


async def test_it_is_awaited(engine: InMemoryEngine) -> None:
    store = await connect("memory://x", engine=engine)
    await store.put("k", b"v")
    await store.aclose()
    assert store.closed


async def test_it_is_entered(engine: InMemoryEngine) -> None:
    async with connect("memory://x", engine=engine) as store:
        await store.put("k", b"v")
    assert store.closed


async def test_it_is_a_coroutine_for_everybody_who_wants_one(engine: InMemoryEngine) -> None:
    opening = connect("memory://x", engine=engine)
    assert isinstance(opening, collections.abc.Coroutine)
    assert "Opening" in repr(opening)
    stores = [
        await asyncio.create_task(opening),
        *await asyncio.gather(connect("memory://x", engine=engine)),
        await asyncio.wait_for(connect("memory://x", engine=engine), 5),
    ]
    loop = asyncio.get_running_loop()

    def from_a_thread() -> Store:
        return asyncio.run_coroutine_threadsafe(
            connect("memory://x", engine=engine),
            loop,
        ).result(5)

    stores.append(await asyncio.to_thread(from_a_thread))
    await stores[0].put("k", b"v")
    assert [await store.get("k") for store in stores] == [b"v"] * 4
    await asyncio.gather(*[store.aclose() for store in stores])


def test_one_that_is_never_awaited_warns(engine: InMemoryEngine) -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        connect("memory://x", engine=engine)


def test_one_may_be_dropped_on_purpose(engine: InMemoryEngine) -> None:
    opening = connect("memory://x", engine=engine)
    opening.close()
    del opening
    gc.collect()


async def test_it_is_awaited_once(engine: InMemoryEngine) -> None:
    opening = connect("memory://x", engine=engine)
    async with opening:
        pass
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await opening


async def test_what_goes_wrong_in_the_block_comes_out(engine: InMemoryEngine) -> None:
    with pytest.raises(KeyError):
        async with connect("memory://x", engine=engine) as store:
            raise KeyError
    assert store.closed
    assert "0 segments" in repr(engine)


# --- what it is told --------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["memory://x", "127.0.0.1:1", "mooncake://127.0.0.1:1", "local"])
async def test_a_wrong_option_is_told_at_once_with_the_nearest_name(target: str) -> None:
    target = "local://" if target == "local" else target
    with pytest.raises(ConfigError, match=r"'globel_segment_size'.*'global_segment_size'"):
        await connect(target, globel_segment_size="1gb")
    with pytest.raises(ConfigError, match="local_buffer_size"):
        await connect(target, local_buffer_size="much")


async def test_a_config_is_a_target_and_options_go_on_top(engine: InMemoryEngine) -> None:
    config = StoreConfig("127.0.0.1:1", global_segment_size="8mb")
    async with connect(config, engine=engine, rank="a/b", local_buffer_size=0) as store:
        assert store.config == config.replace(local_buffer_size=0)
        assert store.rank == "a/b"
        assert repr(store).startswith("<Store a/b ")


@pytest.mark.parametrize(
    "target", ["localhost", "http:/x", "memory://", "mooncake://", "moncake://h:1"]
)
async def test_a_bad_target_is_told(target: str) -> None:
    with pytest.raises(ConfigError):
        await connect(target)


async def test_the_environment_is_the_default_target(
    engine: InMemoryEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "mooncake.json"
    settings.write_text('{"master_server_address": "10.9.8.7:50051", "protocol": "tcp"}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(settings))
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "8mb")
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    async with connect(engine=engine) as store:
        assert store.config is not None
        assert store.config.master_server_address == "10.9.8.7:50051"
        assert store.config.global_segment_size == 8 * MB


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), None, "1"])
async def test_a_timeout_must_be_a_positive_number(timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        await connect("memory://x", timeout=timeout)


async def test_a_coordinated_master_needs_a_hostname() -> None:
    with pytest.raises(ConfigError, match="local_hostname"):
        await connect("etcd://10.0.0.1:2379")


# --- a master that is not there ---------------------------------------------------------------


def test_a_closed_port_ends_in_time_and_the_engine_is_not_even_imported(closed_port: int) -> None:
    told = run_script(
        """
        import asyncio, json, sys, time
        import aiomooncake
        from aiomooncake.testing import LoopStallProbe

        async def main():
            async with LoopStallProbe() as probe:
                began = time.monotonic()
                try:
                    await aiomooncake.connect(sys.argv[1], rank=3, timeout=1)
                except aiomooncake.SetupTimeoutError as error:
                    told = str(error)
                seconds = time.monotonic() - began
            imported = [name for name in sys.modules if name.split(".")[0] == "mooncake"]
            print(json.dumps([told, seconds, probe.longest, imported]))

        asyncio.run(main())
        """,
        f"127.0.0.1:{closed_port}",
    )
    message, seconds, stall, imported = told
    assert message.startswith(f"[TP3] connect to 127.0.0.1:{closed_port} gave up after 1 s")
    assert "refused" in message
    assert 0.9 < seconds < 1.2
    assert stall < 0.2  # ten times the target
    assert imported == []


async def test_the_engines_version_is_looked_at_once(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connect took a thread for it, and waited where a program had none to spare."""

    async def try_to_connect() -> None:
        with pytest.raises(SetupTimeoutError, match="Connection refused"):
            await connect(f"127.0.0.1:{closed_port}", timeout=1)

    await try_to_connect()
    monkeypatch.delattr(opener_module, "check_installed")
    await try_to_connect()


async def test_a_name_that_does_not_resolve_ends_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(SetupTimeoutError, match=r"no-such-host\.invalid:50051"):
        await connect("no-such-host.invalid:50051", timeout=0.3)
    assert time.monotonic() - began < 0.8


@pytest.mark.parametrize("asks_health", [False, True])
async def test_a_frozen_master_ends_in_time_and_what_was_begun_is_torn_down(
    own_cluster: LocalCluster, eventually: Eventually, open_store: OpenStore, asks_health: bool
) -> None:
    await own_cluster.pause()
    options = dict(SMALL)
    if asks_health:
        options["master_metrics_port"] = own_cluster.metrics_port
    async with LoopStallProbe() as probe:
        began = time.monotonic()
        with pytest.raises(SetupTimeoutError) as caught:
            await connect(own_cluster.address, rank="ice", timeout=2, **options)
        assert time.monotonic() - began < 2.3
    assert probe.longest < 1.0  # ten times the target
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.rank == "ice"
    await own_cluster.resume()
    await eventually(lambda: not threads_of("ice"))
    store = await open_store(own_cluster.address, **options)
    await store.put("k", b"v")


async def test_a_master_that_starts_later_is_waited_for(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    await own_cluster.kill()
    began = time.monotonic()
    connecting = asyncio.ensure_future(open_store(own_cluster.address, timeout=30, **SMALL))
    await asyncio.sleep(0.5)
    assert not connecting.done()
    await own_cluster.start()
    up = time.monotonic()
    store = await connecting
    assert time.monotonic() - up < 2.5  # probes are up to 1 s apart
    assert time.monotonic() - began > 0.5
    await store.put("k", b"v")
    assert await store.get("k") == b"v"


async def test_a_set_up_that_timed_out_does_not_hold_up_others(
    own_cluster: LocalCluster, cluster: LocalCluster, open_store: OpenStore, eventually: Eventually
) -> None:
    await own_cluster.pause()
    frozen = asyncio.ensure_future(connect(own_cluster.address, rank="ice", timeout=0.7, **SMALL))
    await eventually(lambda: threads_of("ice"))
    began = time.monotonic()
    store = await open_store(cluster.address, **SMALL)  # set-ups pass one at a time
    assert time.monotonic() - began < 2
    assert store.health().ok
    with pytest.raises(SetupTimeoutError):
        await frozen
    await own_cluster.resume()
    await eventually(lambda: not threads_of("ice"))


async def test_a_cancelled_connect_leaves_nothing(
    own_cluster: LocalCluster, eventually: Eventually
) -> None:
    await own_cluster.pause()
    connecting = asyncio.ensure_future(connect(own_cluster.address, rank="gone", **SMALL))
    await eventually(lambda: threads_of("gone"))  # the set-up has begun
    began = time.monotonic()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert time.monotonic() - began < 1
    await own_cluster.resume()
    await eventually(lambda: not threads_of("gone"))


async def test_a_connect_cancelled_while_it_waits_for_a_master_leaves_nothing(
    closed_port: int,
) -> None:
    with anyio.move_on_after(0.1) as scope:
        await connect(f"127.0.0.1:{closed_port}", rank="gone")
    assert scope.cancelled_caught
    assert not threads_of("gone")


async def test_a_cancelled_set_up_is_torn_down_when_it_returns(
    engine: InMemoryEngine, hold: Hold, eventually: Eventually
) -> None:
    engine.fault("setup", hold=hold)
    closing = engine.fault("close")
    connecting = asyncio.ensure_future(connect("memory://x", engine=engine, rank="gone"))
    await hold()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert closing.hits == 0  # not under the set-up
    hold.set()
    await eventually(lambda: closing.hits == 1)
    await eventually(lambda: not threads_of("gone"))
    assert "0 segments" in repr(engine)


# --- set-ups that the engine refuses ----------------------------------------------------------


async def test_a_mistake_is_told_within_seconds(
    cluster: LocalCluster, eventually: Eventually
) -> None:
    began = time.monotonic()
    with pytest.raises(SetupError, match="protocol='carrier_pigeon'") as caught:
        await connect(cluster.address, rank="bad", protocol="carrier_pigeon", **SMALL)
    assert not isinstance(caught.value, SetupTimeoutError)
    assert caught.value.code is not None
    assert time.monotonic() - began < 15
    await eventually(lambda: not threads_of("bad"))


async def test_a_set_up_that_fails_at_first_is_tried_again(
    cluster: LocalCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers -1 for a master that went away between our probe and its own try."""
    set_up, codes = opener_module.RealLifecycle.setup, [-1, -900]

    def fail_twice(self: Any, *args: Any) -> int:
        return codes.pop() if codes else set_up(self, *args)

    monkeypatch.setattr(opener_module.RealLifecycle, "setup", fail_twice)
    store = await open_store(cluster.address, **SMALL)
    assert store.health().ok
    assert not codes


@pytest.mark.parametrize(
    ("metadata_server", "told"), [("127.0.0.1:1", True), ("etcd://127.0.0.1:1", False)]
)
async def test_a_bare_metadata_server_is_an_etcd(
    engine: InMemoryEngine, metadata_server: str, told: bool
) -> None:
    engine.fault("setup", code=-1)
    with pytest.raises(SetupError) as refused:
        await connect("memory://x", engine=engine, metadata_server=metadata_server)
    assert ("A bare host:port is an etcd" in str(refused.value)) == told


async def test_a_bare_metadata_server_that_does_not_answer(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine answers after 10 s, in which it writes etcd's log to stderr."""
    monkeypatch.setattr(opener_module.RealLifecycle, "setup", lambda *_: -1)
    bare: dict[str, Any] = {"metadata_server": "127.0.0.1:1", "timeout": 0.2}
    with pytest.raises(SetupTimeoutError, match="an HTTP server is http://host:8080/metadata"):
        await connect(cluster.address, **bare, **SMALL)


async def test_what_the_metadata_server_says_is_told_when_the_time_is_up(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener_module.RealLifecycle, "setup", lambda *_: -1)
    monkeypatch.setattr(opener_module, "_FAILED_SET_UPS", 1000)
    dead: dict[str, Any] = {"metadata_server": "etcd://127.0.0.1:1;127.0.0.1:2", "timeout": 2}
    refused = "127.0.0.1:1 does not answer: Connection refused; 127.0.0.1:2 does not"
    with pytest.raises(SetupTimeoutError, match=f"answered -1 INTERNAL_ERROR; .*{refused}"):
        await connect(cluster.address, **dead, **SMALL)


async def test_the_metadata_server_is_asked_within_the_time_of_the_connect(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    async def ask(_address: str, timeout: float, **_: str) -> None:
        left.append(timeout)

    monkeypatch.setattr(opener_module.RealLifecycle, "setup", lambda *_: -1)
    monkeypatch.setattr(opener_module, "ask_metadata_server", ask)
    monkeypatch.setattr(opener_module, "_PROBE_TIMEOUT", 15.0)
    options: dict[str, Any] = {"metadata_server": "etcd://127.0.0.1:1", **SMALL}
    for timeout in (60.0, 10.0):
        with pytest.raises(SetupError, match=r"Does metadata_server='etcd://127.0.0.1:1' run"):
            await connect(cluster.address, timeout=timeout, **options)
    assert left[:4] == [15.0] * 4
    assert len(left) == 8
    assert max(left[4:]) < 10.0


async def test_a_segment_that_is_too_small_comes_first(cluster: LocalCluster) -> None:
    small = {**SMALL, "global_segment_size": 1 * MB}
    with pytest.raises(SetupError, match=r"^global_segment_size=1048576 bytes is below 16 MiB"):
        await connect(cluster.address, **small)


async def test_a_segment_of_a_right_size_is_not_blamed(engine: InMemoryEngine) -> None:
    engine.fault("setup", code=-600)
    with pytest.raises(SetupError, match=r"^the engine refuses the set-up"):
        await connect("memory://x", engine=engine, **SMALL)


async def test_a_refused_set_up_in_memory_is_told(engine: InMemoryEngine) -> None:
    """It was once taken for an open store."""
    engine.fault("setup", code=-600)
    with pytest.raises(SetupError, match="-600 INVALID_PARAMS"):
        await connect("memory://x", engine=engine)


# --- warm-up on the way -----------------------------------------------------------------------


async def test_it_warms_up_when_asked(cluster: LocalCluster, open_store: OpenStore) -> None:
    store = await open_store(cluster.address, rank=2, warmup=True, **SMALL)
    assert store.stats().warmup_attempts >= 1
    other = await open_store(cluster.address, warmup=WarmupPolicy(value_size=100), **SMALL)
    assert other.stats().warmup_attempts >= 1


async def test_a_warm_up_that_fails_ends_with_the_connect_and_says_why(
    engine: InMemoryEngine, eventually: Eventually
) -> None:
    engine.fault("put", code=-200)
    began = time.monotonic()
    with pytest.raises(WarmupError, match=r"\[TP4\].*NO_AVAILABLE_HANDLE") as caught:
        await connect("memory://x", engine=engine, rank=4, warmup=True, timeout=0.6)
    assert time.monotonic() - began < 1.5
    assert caught.value.attempts
    assert caught.value.diagnosis is not None
    await eventually(lambda: "0 segments" in repr(engine))  # closed behind us


async def test_a_warm_up_that_hangs_ends_with_the_connect(
    engine: InMemoryEngine, hold: Hold, eventually: Eventually
) -> None:
    engine.fault("put", hold=hold)
    began = time.monotonic()
    with pytest.raises((WarmupError, SetupTimeoutError)):
        await connect("memory://x", engine=engine, warmup=True, timeout=0.5)
    assert time.monotonic() - began < 2
    hold.set()
    await eventually(lambda: "0 segments" in repr(engine))


# --- private masters --------------------------------------------------------------------------


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """The private masters that connect has made."""
    made: list[LocalCluster] = []

    def make(**options: Any) -> LocalCluster:
        made.append(LocalCluster(**options))
        return made[-1]

    monkeypatch.setattr(opener_module, "LocalCluster", make)
    return made


async def test_a_private_master_lives_as_long_as_its_store(
    cluster: LocalCluster, masters: list[LocalCluster]
) -> None:
    async with connect("local://", global_segment_size="16mb") as store:
        (master,) = masters
        assert master.running
        assert store.config is not None
        assert store.config.master_server_address == master.address
        assert store.config.master_metrics_port == master.metrics_port
        await store.put("k", b"v")
        assert await store.get("k") == b"v"
    assert not master.running


async def test_a_private_master_ends_with_a_connect_that_fails(
    cluster: LocalCluster, masters: list[LocalCluster], eventually: Eventually
) -> None:
    with pytest.raises(ConfigError):
        await connect("local://", local_buffer_size="much")
    assert masters == []  # not even started
    began = time.monotonic()
    with pytest.raises(SetupError):
        await connect("local://", protocol="carrier_pigeon")
    assert time.monotonic() - began < 8
    await eventually(lambda: not masters[0].running)


async def test_a_private_master_survives_a_set_up_that_fails_at_first(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tearing the failed client down once stopped the master under the next try."""
    set_up, codes = opener_module.RealLifecycle.setup, [-1]

    def fail_once(self: Any, *args: Any) -> int:
        return codes.pop() if codes else set_up(self, *args)

    monkeypatch.setattr(opener_module.RealLifecycle, "setup", fail_once)
    async with connect("local://", timeout=5, **SMALL) as store:
        await store.put("k", b"v")
    assert not codes


async def test_a_private_master_ends_with_a_connect_that_is_cancelled(
    cluster: LocalCluster,
    masters: list[LocalCluster],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up = opener_module.RealLifecycle.setup

    def hang(self: Any, *args: Any) -> Any:
        hold.wait()
        return set_up(self, *args)

    monkeypatch.setattr(opener_module.RealLifecycle, "setup", hang)
    connecting = asyncio.ensure_future(connect("local://"))
    await hold()
    assert masters[0].running
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert not masters[0].running


# --- a healthy one ----------------------------------------------------------------------------


async def test_connect_and_close_leave_the_loop_free(cluster: LocalCluster) -> None:
    async with LoopStallProbe() as probe, connect(cluster.address, rank=0, **SMALL) as store:
        assert store.hostname.startswith("127.0.0.1:")
        assert await asyncio.to_thread(store.blocking.get_hostname) == store.hostname
    assert probe.longest < 1.0
    assert store.health().state == "closed"
    with pytest.raises(StoreClosedError, match=r"\[TP0\] get refused.*closed"):
        await store.get("k")


# --- engines of others ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["memory", "real"])
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A native store that a framework has set up."""
    address = ""
    if request.param == "real":
        address = request.getfixturevalue("cluster").address
        native = load_binding().store_class()
    else:
        native = InMemoryStore(InMemoryEngine("adopted"))
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MB, 4 * MB, "tcp", "", address) == 0
    yield native
    assert native.close() == 0


def test_a_blocking_warm_up_is_replaced_by_one_line(native: Any) -> None:
    report = asyncio.run(adopt(native, rank=1).warmup())
    assert report.rank == 1
    assert report.tries == 1


async def test_an_adopted_store_works_and_leaves_the_engine_alone(native: Any) -> None:
    async with adopt(native, rank=1) as store:
        assert repr(store) == f"<Store TP1 {native.get_hostname()} open>"
        await store.put("adopted", b"v")
        assert await store.get("adopted") == b"v"
        assert await store.engine.get("adopted") == b"v"
        assert store.health().ok
    assert store.closed
    with pytest.raises(StoreClosedError):
        await store.get("adopted")
    assert native.get("adopted") == b"v"
    again = await adopt(native)
    assert await again.get("adopted") == b"v"
    assert await again.remove("adopted", force=True)
    await again.aclose()
    await again.aclose()
    assert native.is_exist("adopted") == 0


async def test_an_adopted_store_is_a_coroutine_too(native: Any) -> None:
    store = await asyncio.create_task(adopt(native))
    assert isinstance(store, Store)
    assert isinstance(store, collections.abc.Coroutine)
    assert await asyncio.wait_for(store, 1) is store
    await store.aclose()


async def test_an_adopted_store_moves_large_values(native: Any) -> None:
    async with adopt(native) as store:
        await store.put("large", bytes(9 * MB))
        assert await store.get("large") == bytes(9 * MB)
        await store.remove("large", force=True)


@pytest.mark.parametrize("kind", ["memory", "real"])
def test_a_store_that_is_not_set_up_is_not_adopted(
    request: pytest.FixtureRequest, kind: str
) -> None:
    native: Any = InMemoryStore(InMemoryEngine())
    if kind == "real":
        request.getfixturevalue("cluster")
        native = load_binding().store_class()
    with pytest.raises(InvalidArgumentError, match="set up"):
        adopt(native, rank=1)


def test_a_store_of_a_wheel_that_is_too_old_is_not_adopted() -> None:
    """0.3.9 lacks these methods; it can't even be asked whether it is set up."""

    class Older(InMemoryStore):
        health_check = batch_remove = upsert_from = batch_upsert_from = None  # type: ignore[assignment]

    with pytest.raises(NotSupportedError, match="is too old, it has no batch_remove, ") as caught:
        adopt(Older(InMemoryEngine()), rank=1)
    assert caught.value.rank == 1
    assert "upsert_from: install 0.3.10.post2 or newer" in str(caught.value)


@pytest.mark.parametrize("thing", [object(), None, "10.0.0.1:50051", InMemoryStore])
def test_what_is_no_store_is_not_adopted(thing: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="MooncakeDistributedStore"):
        adopt(thing)


# --- without the direct way -------------------------------------------------------------------

OTHER_WAYS = {
    "turned off": ("", {"direct": False}),
    "nothing is exported": (
        "lifecycle.RealEntry.find = classmethod(lambda cls, binding: 'nothing is exported')",
        {},
    ),
    "not a RealClient": ("lifecycle.RealEntry.address = lambda self, native: None", {}),
}


async def test_the_slow_ways_work_and_warn_once(cluster: LocalCluster) -> None:
    scripts = [
        f"""
        import asyncio, json, logging, sys
        import aiomooncake
        from aiomooncake.engine import lifecycle

        {patch}
        warned = []
        handler = logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logging.getLogger("aiomooncake").addHandler(handler)

        async def main():
            found = []
            for rank in range(2):
                async with aiomooncake.connect(
                    sys.argv[1], global_segment_size="16mb", local_buffer_size="4mb", **{options}
                ) as store:
                    key = "slow way " + sys.argv[2]
                    await store.put(key, b"way")
                    found.append((await store.get(key)).decode())
                    await store.remove(key, force=True)
            print(json.dumps([warned, found]))

        asyncio.run(main())
        """
        for patch, options in OTHER_WAYS.values()
    ]
    answers = await asyncio.gather(
        *[
            asyncio.to_thread(run_script, script, cluster.address, why)
            for script, why in zip(scripts, OTHER_WAYS, strict=True)
        ]
    )
    for why, (warned, found) in zip(OTHER_WAYS, answers, strict=True):
        assert found == ["way", "way"]
        (warning,) = warned
        assert "hold the GIL" in warning
        assert why in warning


def test_a_transfer_engine_may_be_shared(cluster: LocalCluster) -> None:
    found = run_script(
        """
        import asyncio, json, sys
        import aiomooncake
        from mooncake.engine import TransferEngine

        async def main():
            engine = TransferEngine()
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            async with aiomooncake.connect(
                sys.argv[1], global_segment_size="16mb", transfer_engine=engine
            ) as store:
                await store.put("shared", b"engine")
                print(json.dumps((await store.get("shared")).decode()))
                await store.remove("shared", force=True)

        asyncio.run(main())
        """,
        cluster.address,
    )
    assert found == "engine"


# --- what connect says while it waits, and of what the engine would not say --------------------


async def test_waiting_for_a_master_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """It was silent for as long as it waited, 120 s by default."""
    with pytest.raises(SetupTimeoutError):
        await connect("127.0.0.1:1", rank=3, timeout=0.3)
    (line,) = [one.getMessage() for one in caplog.records if "waiting" in one.getMessage()]
    assert line.startswith("[TP3] waiting for the master 127.0.0.1:1: Connection refused (0 s of")


async def test_a_hostname_of_somebody_else_is_warned_of(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Warm-up passed by luck, and half of the puts failed afterwards."""
    store = await connect(cluster.address, local_hostname="203.0.113.7", global_segment_size=0)
    await store.aclose()
    assert "local_hostname='203.0.113.7' is not an address of this host" in caplog.text


async def test_rdma_without_a_device_is_refused(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine opens over TCP instead, and says so only in its own log."""
    monkeypatch.setattr(hosts_module, "_RDMA_DEVICES", Path("/nonexistent"))
    with pytest.raises(ConfigError, match="no RDMA device"):
        await connect(cluster.address, protocol="rdma", timeout=10)


async def test_a_closed_store_can_not_be_entered() -> None:
    store = await connect("memory://entered")
    await store.aclose()
    with pytest.raises(StoreClosedError, match="can't be entered"):
        async with store:
            pass


async def test_a_store_that_was_not_awaited_says_so() -> None:
    opening = connect("memory://forgotten")
    with pytest.raises(AttributeError, match=r"not open yet.*await it"):
        opening.put  # noqa: B018
    opening.close()

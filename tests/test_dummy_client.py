"""Dummy clients: stores whose engine is a stand-alone client process beside this one.

What every store does is tested in this mode too, see the fixture ``store``. Here is what is its
own: how one is opened, the memory that it shares, and what happens when the other process dies,
comes back, or stands still. What might take this process down is in ``adversity/test_dummy.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import (
    BatchError,
    ConfigError,
    DiagnosisKind,
    InvalidArgumentError,
    LocalCluster,
    NotSupportedError,
    RpcError,
    RpcTimeoutError,
    SetupError,
    SetupTimeoutError,
    Store,
    StoreConfig,
    WarmupError,
    WarmupPolicy,
    connect,
    connect_ranks,
)
from aiomooncake.cluster import StandaloneClient
from aiomooncake.engine import lifecycle
from aiomooncake.engine.binding import load_binding
from aiomooncake.engine.shared import MemoryLostError
from aiomooncake.testing import LoopStallProbe
from tests.adversity.dummy_scenes import connect_to_nobody
from tests.adversity.processes import run_scene
from tests.conftest import MB, store_threads

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the wheel's servers exist for Linux only"
)

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
OpenStore = Callable[..., Awaitable[Store]]

KB = 1 << 10
# What is measured is in the benchmarks; a loop that stands still because of us does so longer.
STILL = 1.0


@dataclass(frozen=True)
class Site:
    """A master, a process that holds all values, and one that dummy clients work through."""

    cluster: LocalCluster
    client: StandaloneClient

    def connect(self, **options: Any) -> Any:
        """Connect as :func:`connect` does."""
        return connect(client_server_address=self.client.address, timeout=20, **options)


def _site() -> Iterator[Site]:
    # No value is lost with the client process, and none is placed on one that died.
    with LocalCluster() as cluster:
        cluster.blocking.start_client(global_segment_size=256 * MB)
        yield Site(cluster, cluster.blocking.start_client(global_segment_size=0))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Processes that nobody disturbs."""
    yield from _site()


@pytest.fixture
def own_site() -> Iterator[Site]:
    """Processes that may be frozen and killed."""
    yield from _site()


def helpers() -> list[str]:
    """List the children of this process that help to make a dummy client."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it ends meanwhile
            pids = (task / "children").read_text().split()
            found.extend(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    return [line for line in found if "listener.accept" in line]


def states(stores: Iterable[Store]) -> set[str]:
    return {store.health().state for store in stores}


# --- opening ----------------------------------------------------------------------------------


def test_nobody_at_the_address_is_told_in_time_and_without_the_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = run_scene(connect_to_nobody, f"127.0.0.1:{port}", 1.0).check(within=20)
    assert "Connection refused" in ended.out


async def test_a_frozen_process_is_told_in_time(own_site: Site) -> None:
    await asyncio.to_thread(load_binding)  # its import stops the loop once, here or elsewhere
    await own_site.client.pause()
    began = time.monotonic()
    async with LoopStallProbe() as probe:
        with pytest.raises(SetupTimeoutError, match=r"stand-alone client.*no answer in time"):
            await connect(client_server_address=own_site.client.address, timeout=1.5)
    assert time.monotonic() - began < 4
    assert probe.longest < STILL


async def test_a_process_that_freezes_after_the_knock_does_not_stop_the_loop(
    own_site: Site, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """The binding's own set-up would wait for it under the GIL, for 30 s."""
    await asyncio.to_thread(load_binding)

    async def freeze(*_: object) -> None:
        await own_site.client.pause()

    opener = importlib.import_module("aiomooncake._opener")
    monkeypatch.setattr(opener, "probe_alive", freeze)
    async with LoopStallProbe() as probe:
        with pytest.raises(SetupTimeoutError, match="setting up a dummy client"):
            await connect(client_server_address=own_site.client.address, rank="late", timeout=1.5)
    assert probe.longest < STILL
    await own_site.client.resume()
    await eventually(lambda: not [each for each in store_threads() if "late" in each.name])


async def test_the_masters_port_is_told_from_the_clients(site: Site) -> None:
    with pytest.raises(SetupError, match=r"--port of a mooncake_client \(not a master"):
        await connect(client_server_address=site.cluster.address, timeout=20)


async def test_the_environment_names_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CLIENT", site.client.address)
    async with connect(timeout=20) as store:
        assert store.hostname == site.client.address
        await store.put("named by the environment", b"v")


async def test_a_url_names_it(site: Site) -> None:
    target = f"mooncake://?client_server_address={site.client.address}"
    async with connect(target, timeout=20, rank=3) as store:
        assert store.config is not None
        assert store.config.client_server_address == site.client.address
        assert await store.exists("nothing") is False
        assert site.client.address in repr(store)


async def test_a_config_with_a_master_names_it_too(site: Site) -> None:
    """Frameworks give both; the master is the other process's business."""
    config = StoreConfig(site.cluster.address, client_server_address=site.client.address)
    async with connect(config, timeout=20) as store:
        await store.put("beside a master", b"v")
        assert store.health().state == "ready"


async def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="transfer_engine= is for a client of this"):
        await connect(client_server_address="127.0.0.1:1", transfer_engine=object())
    with pytest.raises(ConfigError, match=r"local:// starts a master.*give one of them"):
        await connect("local://", client_server_address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="client_server_address"):
        await connect(client_server_address="127.0.0.1")


async def test_a_process_that_starts_later_is_waited_for(own_site: Site) -> None:
    await own_site.client.kill()
    opening = asyncio.create_task(_opened(own_site))
    await asyncio.sleep(0.2)
    assert not opening.done()
    await own_site.client.start()
    async with await opening as store:
        await store.put("late", b"v")


async def _opened(site: Site) -> Store:
    return await connect(client_server_address=site.client.address, timeout=20)


async def test_a_cancelled_connect_leaves_nothing(site: Site, eventually: Eventually) -> None:
    before = set(store_threads())
    ends = 0
    for delay in (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        opening = asyncio.create_task(_opened(site))
        await asyncio.sleep(delay)
        opening.cancel()
        try:
            store = await opening
        except asyncio.CancelledError:
            ends += 1
        else:
            await store.aclose()
    assert ends
    await eventually(lambda: not set(store_threads()) - before)
    assert not helpers()


async def test_ranks_open_side_by_side(site: Site) -> None:
    async with connect_ranks(
        None, 4, client_server_address=site.client.address, timeout=20
    ) as group:
        await group.warmup()
        await asyncio.gather(*(store.put(f"rank {store.rank}", b"v") for store in group))
        assert await group[0].get_many([f"rank {rank}" for rank in range(4)]) == [b"v"] * 4


# --- without the exported functions -----------------------------------------------------------


async def test_the_bindings_own_way_works_and_is_warned_about_once(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_warned", set())
    for _ in range(2):
        async with site.connect(direct=False) as store, store.allocate(KB) as memory:
            await store.put_from("by the binding", memory)
            assert await store.get("by the binding") is not None
    assert caplog.text.count("hold the GIL") == 1
    assert "direct=False" in caplog.text


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
async def test_without_an_interpreter_to_start_the_binding_does_it(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        store = await site.connect()
    async with store:
        await store.put("without a helper", b"v")
    assert "to make a dummy client" in caplog.text


# --- the loop ---------------------------------------------------------------------------------


async def test_the_loop_goes_on_while_stores_open_and_close(site: Site) -> None:
    async with LoopStallProbe() as probe:
        for _ in range(3):
            store = await site.connect()
            await store.aclose()
    assert probe.longest < STILL


async def test_the_loop_goes_on_beside_much_memory(site: Site) -> None:
    value = bytes(range(256)) * (256 * KB)
    async with site.connect() as store, LoopStallProbe() as probe:
        async with store.allocate("256MiB"):
            pass
        await store.put("much", value)
        assert await store.get("much") == value
    assert probe.longest < STILL


# --- memory -----------------------------------------------------------------------------------


def shared_bytes() -> int:
    """Count what this process maps of the engine's shared memory."""
    spans = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "mooncake_shm" in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@contextlib.contextmanager
def made_by_the_allocator(nbytes: int) -> Iterator[int]:
    """Make shared memory as serving frameworks do for their host pools; its address."""
    allocator = load_binding().module.MooncakeHostMemAllocator()
    address = allocator.alloc(nbytes)
    yield address
    allocator.free(address)


async def test_allocated_memory_is_shared_and_moves_without_a_copy(site: Site) -> None:
    async with site.connect() as store, store.allocate(3 * MB) as memory:
        assert memory.view is not None
        memory.view[:] = bytes(range(256)) * (3 * 4 * KB)
        await store.put_from("whole", memory)
        await store.put_from("parts", [memory[1:4], memory[0:1]])
        await store.put_many_from({"one": memory[2:3], "two": memory[3:5]})
        memory.view[: 2 * MB] = bytes(2 * MB)
        assert await store.get_into("parts", memory[10:100]) == 4
        assert bytes(memory.view[10:14]) == b"\x01\x02\x03\x00"
        assert await store.get_into("parts", [memory[20:22], memory[30:32]]) == 4
        assert await store.get_into("whole", memory[0:4], offset=255) == 4
        assert bytes(memory.view[:4]) == b"\xff\x00\x01\x02"
        assert await store.get_many_into({"two": memory[0:2], "none": memory[2:4]}) == [2, None]
        assert bytes(memory.view[:2]) == b"\x03\x04"
        async with store.view("whole") as view:
            assert view is not None
            assert bytes(view[:3]) == b"\x00\x01\x02"


async def test_memory_is_given_back(site: Site, eventually: Eventually) -> None:
    """That of a buffer, of a large value, and of the store itself."""
    before = await asyncio.to_thread(shared_bytes)
    async with site.connect() as store:
        async with store.allocate(32 * MB):
            assert await asyncio.to_thread(shared_bytes) == before + 32 * MB
        assert await asyncio.to_thread(shared_bytes) == before
        await store.put("large", bytes(16 * MB))
        assert await store.get("large") == bytes(16 * MB)
        await store.put("small", b"v")
        kept = await asyncio.to_thread(shared_bytes) - before
        assert 0 < kept <= 16 * MB  # scratch memory
    assert await asyncio.to_thread(shared_bytes) == before


async def test_memory_that_others_hold_outlives_its_buffer(site: Site) -> None:
    async with site.connect() as store:
        memory = await store.allocate(KB)
        assert memory.view is not None
        mine = memoryview(memory.view)
        mine[:4] = b"mine"
        await memory.aclose()
    assert bytes(mine[:4]) == b"mine"


@pytest.mark.parametrize("memory", [bytearray(KB), bytes(KB)])
async def test_memory_of_this_process_alone_is_refused(site: Site, memory: Any) -> None:
    async with site.connect() as store:
        with pytest.raises(NotSupportedError, match=r"dummy client.*store\.allocate\(\.\.\.\)"):
            await store.register(memory)


async def test_memory_of_the_engines_allocator_is_registered_by_its_address(site: Site) -> None:
    async with site.connect() as store:
        with made_by_the_allocator(MB) as address:
            with pytest.raises(NotSupportedError, match="a whole block at a time"):
                await store.register(address=address, nbytes=KB)
            async with store.register(address=address, nbytes=MB) as memory:
                with pytest.raises(InvalidArgumentError, match="with this store already"):
                    await store.register(address=address, nbytes=MB)
                await store.put("from a pool", b"v" * KB)
                assert await store.get_into("from a pool", memory[KB : 2 * KB]) == KB
                await store.put_from("into a pool", memory[KB : KB + 10])
            assert await store.get("into a pool") == b"v" * 10


async def test_a_pool_is_registered_by_one_store_after_the_other(site: Site) -> None:
    """The engine notes once per process that memory is registered, not with whom."""
    with made_by_the_allocator(MB) as address:
        async with site.connect() as store:
            await store.register(address=address, nbytes=MB)
            async with site.connect() as other:
                with pytest.raises(NotSupportedError, match="no other store of this process"):
                    await other.register(address=address, nbytes=MB)
        async with site.connect() as store, store.register(address=address, nbytes=MB) as memory:
            await store.put_from("a pool's second life", memory[0:4])


async def test_what_a_dummy_client_can_not_do_is_said(site: Site) -> None:
    async with site.connect() as store:
        for call in (
            store.replicas("key"),
            store.engine.batch_get_replica_desc(["key"]),
            store.engine.batch_put_session_start(["key"], [4]),
            store.engine.allocate_and_mount_segment(16 * MB),
        ):
            with pytest.raises(NotSupportedError, match="connect to the master instead"):
                await call
        for by_value in (
            store.engine.put("key", b"v"),
            store.engine.get("key"),
            store.engine.get_buffer("key"),
            store.engine.put_tensor("key", None),
        ):
            with pytest.raises(NotSupportedError, match=r"mem_pool_size= .*store's own verbs"):
                await by_value
        assert await store.engine.is_exist("key") == 0


async def test_memory_of_the_engines_own_serves_its_calls_by_value(site: Site) -> None:
    async with site.connect(mem_pool_size="4MiB") as store:
        assert await store.engine.put("by value", b"v") == 0
        assert await store.engine.get("by value") == b"v"


# --- the other process dies -------------------------------------------------------------------


async def test_every_call_says_that_the_process_is_gone(
    own_site: Site, eventually: Eventually
) -> None:
    gone = re.compile(rf"stand-alone client.* {own_site.client.address} .*answer")
    async with own_site.connect() as store, store.allocate(KB) as memory:
        await store.put("key", b"v")
        await own_site.client.kill()
        await eventually(lambda: store.health().state == "client-unreachable")
        began = time.monotonic()
        for call in (
            store.get("key"),
            store.put("other", b"v"),
            store.upsert("key", b"v"),
            store.put("large", bytes(9 * MB)),
            store.exists("key"),
            store.size("key"),
            store.remove("key"),
            store.put_parts("other", b"v", b"w"),
            store.put_from("other", memory),
            store.get_into("key", memory),
            store.get_into("key", [memory[:4], memory[4:8]]),
            store.get_into("key", memory[:4], offset=0),
            store.view("key"),
            store.allocate(KB),
        ):
            with pytest.raises(RpcError, match=gone) as caught:
                await call
            assert caught.value.code == -900
        for many in (
            store.get_many(["key", "other"]),
            store.exists_many(["key", "other"]),
            store.put_many({"key": b"v", "other": b"v"}),
            store.put_many_from({"key": memory[:4], "other": memory[4:8]}),
        ):
            with pytest.raises((BatchError, RpcError)) as failed:
                await many
            errors = failed.value.errors.values() if isinstance(failed.value, BatchError) else ()
            assert all(gone.search(str(error)) for error in errors or (failed.value,))
        assert time.monotonic() - began < 5
        with pytest.raises(RpcError):
            await store.remove_all()
        with pytest.raises(WarmupError) as not_warm:
            await store.warmup(WarmupPolicy(timeout=0.5))
        assert not_warm.value.diagnosis is not None
        assert not_warm.value.diagnosis.kind is DiagnosisKind.CLIENT_UNREACHABLE


async def test_it_comes_back_and_everything_works_again(
    own_site: Site, eventually: Eventually
) -> None:
    """The engine shares the memory anew, when it has noticed."""
    async with own_site.connect() as store, store.allocate(KB) as memory:
        await store.put("before", b"v")
        await own_site.client.kill()
        await eventually(lambda: store.health().state == "client-unreachable")
        await own_site.client.start()
        await eventually(lambda: store.health().state == "ready")
        assert await store.get("before") == b"v"
        await store.put("after", b"w")
        assert await store.get_into("after", memory) == 1
        await store.put_from("from the buffer", memory[0:1])
        assert await store.get("from the buffer") == b"w"
        async with store.allocate(KB) as more:
            assert await store.get_into("after", more) == 1
        await store.warmup(WarmupPolicy(timeout=5))


async def test_ranks_of_one_process_all_come_back(own_site: Site, eventually: Eventually) -> None:
    """Each of them shares the memory of all; a local buffer would be the first one's only."""
    async with connect_ranks(
        None, 4, client_server_address=own_site.client.address, timeout=20
    ) as group:
        await asyncio.gather(*(store.put(f"before {store.rank}", b"v") for store in group))
        await own_site.client.kill()
        await eventually(lambda: states(group) == {"client-unreachable"})
        await own_site.client.start()
        await eventually(lambda: states(group) == {"ready"})
        await asyncio.gather(*(store.put(f"after {store.rank}", b"v") for store in group))
        assert await group[3].get("before 0") == await group[0].get("after 3") == b"v"


@pytest.mark.parametrize(("stores", "nbytes"), [(1, 3 * MB), (2, MB)])
async def test_memory_at_an_old_address_is_not_taken_for_the_old(
    own_site: Site, eventually: Eventually, stores: int, nbytes: int
) -> None:
    """The new process was told of the old block, which was given back while nobody was there.

    It went on to read and write that one: ``put_from`` stored what was in it, and ``get_into``
    changed nothing in the memory that it was given.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(own_site.connect()) for _ in range(stores)]
        first, last = opened[0], opened[-1]
        old = [await first.allocate(MB) for _ in range(6)]  # side by side, as a rule
        addresses = [memory.address for memory in old]
        await first.put_from("old", old[0])
        await own_site.client.kill()
        await eventually(lambda: first.health().state == "client-unreachable")
        for memory in old:
            await memory.aclose()
        await own_site.client.start()
        await eventually(lambda: states(opened) == {"ready"})
        for _ in range(100):  # the kernel may have other holes to fill first
            new = await last.allocate(nbytes)
            if any(new.address <= address < new.address + nbytes for address in addresses):
                break
        else:
            pytest.fail("the old addresses did not come again")
        assert new.view is not None
        for start in range(0, nbytes, MB):
            key, part = f"new {start}", new.view[start : start + MB]
            part[:] = b"n" * MB
            await last.put_from(key, new[start : start + MB])
            part[:] = b"-" * MB
            assert await last.get_into(key, new[start : start + MB]) == MB
            assert part == b"n" * MB


# --- it is restarted before anybody notices ---------------------------------------------------


async def restarted_unnoticed(site: Site, store: Store) -> None:
    """Restart the process, and ask until it answers, so that no ping finds it gone."""
    await site.client.kill()
    await site.client.start()
    while True:
        with contextlib.suppress(RpcError):
            await store.exists("nothing")
            return
        await asyncio.sleep(0.001)


async def test_a_restart_that_nobody_noticed(own_site: Site, eventually: Eventually) -> None:
    """Scratch memory is replaced; memory of callers that is lost is told, and hurts no other."""
    losses = 0
    async with own_site.connect() as store:
        for turn in range(12):
            buffers = [await store.allocate(KB) for _ in range(2)]
            await store.put(f"before {turn}", b"v" * 100)
            await restarted_unnoticed(own_site, store)
            await eventually(lambda: store.health().state == "ready")
            assert await store.get(f"before {turn}") == b"v" * 100
            await store.put_many({f"small {turn}": b"w", f"another {turn}": bytes(300 * KB)})
            await store.upsert(f"small {turn}", b"x")
            await store.put(f"large {turn}", bytes(9 * MB))
            assert await store.get_many([f"small {turn}", "none"]) == [b"x", None]
            assert await store.size(f"large {turn}") == 9 * MB
            await store.remove(f"large {turn}", force=True)
            new = await store.allocate(KB)
            told = await asyncio.gather(
                *(
                    store.put_from(f"{turn} from {i}", each[:4])
                    for i, each in enumerate([*buffers, new])
                ),
                return_exceptions=True,
            )
            assert told[2] is None
            assert await store.exists(f"{turn} from 2")
            if told[0] is None:  # it was noticed this time
                continue
            losses += 1
            await check_losses(store, turn, buffers[0], new)
            assert all(isinstance(each, MemoryLostError) for each in told[:2])
            for each in (*buffers, new):
                await each.aclose()
            if losses == 2:
                break
    assert losses == 2


async def check_losses(store: Store, turn: int, lost: Any, good: Any) -> None:
    """Check that each way into lost memory tells so, and none answers a miss."""
    key = f"before {turn}"
    anew = "does not share this memory any more: it was restarted.*Allocate"
    for call in (
        store.put_from(f"lost {turn}", lost[:4]),
        store.put_from(f"lost {turn}", [lost[:4], good[:4]]),
        store.get_into(key, lost),
        store.get_into(key, lost[:4]),  # also where it would be too small
        store.get_into(key, [good[:50], lost[:50]]),
        store.get_into(key, lost[:10], offset=90),
    ):
        with pytest.raises(RpcError, match=anew) as caught:
            await call
        assert caught.value.code == -600
        assert not caught.value.retryable
    assert not await store.exists(f"lost {turn}")
    answers = await store.get_many_into({key: lost, f"small {turn}": good}, return_exceptions=True)
    assert [type(answer) for answer in answers] == [MemoryLostError, int]
    results = await store.put_many_from(
        {f"lost {turn}": lost[:4], f"good {turn}": good[:4]}, return_exceptions=True
    )
    assert isinstance(results[f"lost {turn}"], MemoryLostError)
    assert await store.exists_many([f"lost {turn}", f"good {turn}"]) == [False, True]


async def test_scratch_memory_that_is_lost_under_calls_is_replaced(site: Site) -> None:
    async with site.connect() as store:
        for turn in range(3):
            await asyncio.gather(*(store.put(f"{turn} {i}", b"v" * 1000) for i in range(40)))
            native, shared = store._client.native_object, store._transfers.shared
            assert shared is not None
            for address in list(shared._blocks):
                native.unregister_buffer(address)
            written = (store.put(f"more {turn} {i}", b"w") for i in range(40))
            read = (store.get(f"{turn} {i}") for i in range(40))
            answers = await asyncio.gather(*written, *read)
            assert answers == [None] * 40 + [b"v" * 1000] * 40


# --- it stands still --------------------------------------------------------------------------


async def test_calls_on_a_frozen_process_can_be_timed_and_go_on_later(
    own_site: Site, eventually: Eventually
) -> None:
    async with own_site.connect() as store, store.allocate(KB) as memory:
        await store.put("key", b"v")
        async with LoopStallProbe() as probe:
            await own_site.client.pause()
            began = time.monotonic()
            reading = asyncio.create_task(store.get_into("key", memory))
            timed = await asyncio.gather(
                *(
                    asyncio.wait_for(call, 0.5)
                    for call in (
                        store.get("key"),
                        store.put("late", b"w"),
                        store.put("large", bytes(9 * MB)),
                        store.exists("key"),
                        store.size("key"),
                        store.get_many(["key", "none"]),
                        store.warmup(),
                        store.allocate(KB),
                        store.view("key"),
                    )
                ),
                return_exceptions=True,
            )
            assert [type(answer) for answer in timed] == [asyncio.TimeoutError] * 9
            assert time.monotonic() - began < 3
            with pytest.raises(RpcError, match=r"allocate .*-900|allocate refused"):
                await store.allocate(KB)
            assert not reading.done()
            await own_site.client.resume()
            assert await reading == 1
            await eventually(lambda: not store.stats().in_flight)
            await eventually(lambda: store.health().state == "ready")
        assert probe.longest < STILL
        assert await store.get_many(["key", "none"]) == [b"v", None]
        await store.put("more", b"w")
        async with store.allocate(KB) as another:
            assert await store.get_into("more", another) == 1


@pytest.mark.parametrize("pool", [0, 4 * MB])
async def test_a_close_beside_a_frozen_process_ends_when_it_goes_on(
    own_site: Site, eventually: Eventually, pool: int
) -> None:
    store = await own_site.connect(mem_pool_size=pool)
    await store.put("key", b"v")
    async with LoopStallProbe() as probe:
        await own_site.client.pause()
        began = time.monotonic()
        await store.aclose(timeout=0.5)
        assert time.monotonic() - began < 3
        assert store.health().state == "closing"
        await own_site.client.resume()
        await eventually(lambda: store.health().state == "closed")
    assert probe.longest < STILL


@pytest.mark.parametrize("pool", [0, 4 * MB])
async def test_a_close_ends_when_the_process_is_gone(own_site: Site, pool: int) -> None:
    store = await own_site.connect(mem_pool_size=pool)
    await store.put("key", b"v")
    await own_site.client.kill()
    await store.aclose(timeout=20)
    assert store.health().state == "closed"


# --- its master stands still ------------------------------------------------------------------


async def test_a_frozen_master_is_told_in_time(own_site: Site, eventually: Eventually) -> None:
    """The other process waits for it as long as a client of ours does, one call at a time."""
    async with own_site.connect() as store:
        await store.put("key", b"v")
        async with LoopStallProbe() as probe:
            await own_site.cluster.pause()
            began = time.monotonic()
            calls = store.get("key"), store.exists("key")
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, RpcTimeoutError), error
                assert "or its master does not" in str(error)
            assert 2 < time.monotonic() - began < 15
            await own_site.cluster.resume()
        assert probe.longest < STILL
        await eventually(lambda: store.health().state == "ready")
        assert await store.get("key") == b"v"


async def test_a_busy_process_is_not_taken_for_a_frozen_one(own_site: Site) -> None:
    """It serves one request at a time, and that one waits for the master."""
    config = StoreConfig(own_site.cluster.address, client_server_address=own_site.client.address)
    async with connect(config, timeout=20) as store:
        await own_site.cluster.pause()
        with pytest.raises(WarmupError) as caught:
            await store.warmup(WarmupPolicy(timeout=1))
        await own_site.cluster.resume()
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.kind is DiagnosisKind.MASTER_SILENT

"""LMCache's connector on aiomooncake, beside the same over the blocking binding."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvloop

from aiomooncake import ConfigError, LocalCluster, MooncakeError
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import LoopStallProbe
from examples.lmcache_connector import connector as ours
from examples.lmcache_connector.connector import MooncakeConnector, store_config
from examples.lmcache_connector.interface import (
    CacheEngineKey,
    ChunkLayout,
    EngineConfig,
    RemoteMetadata,
)
from examples.lmcache_connector.memory import BytesObj, MemoryFormat, MemoryObj, Pool
from examples.lmcache_connector.plain import PlainConnector
from examples.lmcache_connector.remote_backend import LoopThread, RemoteBackend
from tests.adversity.processes import run_scene
from tests.examples import lmcache_scenes as scenes

if TYPE_CHECKING:
    from tests.conftest import Hold

MB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "examples" / "lmcache_connector" / "README.md"
LAYOUT = ChunkLayout((2, 2, 16, 2, 32), np.dtype("f2"))
SOON = 5.0  # seconds; callers wait half a second at most
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
CONNECTORS = {"ours": MooncakeConnector, "plain": PlainConnector}


class Node:
    """An engine's side of it: a loop in a thread, a pool, and the backend."""

    def __init__(
        self,
        address: str,
        connector: Any = MooncakeConnector,
        loop: str = "asyncio",
        *,
        pool: int = 4 * MB,
        timeout: float = 10.0,
        **extra: Any,
    ) -> None:
        settings = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 32 * MB,
            "local_buffer_size": 16 * MB,
            "transfer_timeout": 10,
            **extra,
        }
        url = f"mooncakestore://{address}/"
        if address.startswith("memory:"):
            url = "plugin://mooncakestore"
            settings["master_server_address"] = address
        self.thread = LoopThread(LOOPS[loop])
        self.pool = Pool(pool)
        config = EngineConfig(url, settings, blocking_timeout_secs=timeout)
        try:
            self.backend = RemoteBackend(config, LAYOUT, self.thread.loop, self.pool, connector)
        except BaseException:
            self.thread.close()
            raise
        self.connection = self.backend.connection

    @property
    def store_itself(self) -> Any:
        return self.connection.store  # type: ignore[attr-defined]

    def close(self) -> None:
        self.backend.close()
        self.thread.close()

    def on_loop(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.thread.loop).result(30)

    def chunk(self, seed: int, tokens: int = 16) -> MemoryObj:
        """Make an object that holds what the seed says."""
        kinds, layers, _, hidden = LAYOUT.shape
        obj = self.pool.allocate((kinds, layers, tokens, hidden), LAYOUT.dtype, LAYOUT.fmt)
        assert obj is not None
        obj.tensor[:] = values(seed, obj.shape)
        return obj

    def store(self, key: CacheEngineKey, seed: int, tokens: int = 16) -> None:
        """Store a chunk, and keep nothing of it."""
        obj = self.chunk(seed, tokens)
        self.backend.submit_put_task(key, obj).result(10)
        obj.ref_count_down()

    def empty(self, *, but: int = 0) -> None:
        """Wait until all references are back, ``but`` some; the loop gives them."""
        deadline = time.monotonic() + 10
        while self.pool.live > but:
            assert time.monotonic() < deadline, self.pool
            time.sleep(0.001)
        assert self.pool.live == but
        assert but or self.pool.largest == len(self.pool.memory)


@contextlib.contextmanager
def stuck(node: Node) -> Iterator[None]:
    """Keep the loop from doing anything meanwhile."""
    reached, over = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        assert over.wait(10), "it was waited for"

    node.thread.loop.call_soon_threadsafe(block)
    assert reached.wait(10)
    try:
        yield
    finally:
        over.set()


def values(seed: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(seed).random(shape, np.float32).astype(LAYOUT.dtype)


def is_chunk(obj: MemoryObj | None, seed: int, tokens: int = 16) -> bool:
    """Check an object, and give its reference back."""
    kinds, layers, _, hidden = LAYOUT.shape
    shape = (kinds, layers, tokens, hidden)
    assert obj is not None
    assert (obj.shape, obj.dtype, obj.fmt) == (shape, LAYOUT.dtype, LAYOUT.fmt)
    same = np.array_equal(obj.tensor, values(seed, shape))
    obj.ref_count_down()
    return same


Keys = Callable[[int], list[CacheEngineKey]]


@pytest.fixture
def keys() -> Keys:
    """Make keys that no other test has."""
    first = uuid.uuid4().int >> 64

    def make(count: int) -> list[CacheEngineKey]:
        return [CacheEngineKey("model", 1, 0, first + i) for i in range(count)]

    return make


# --- both alike -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    """A master, in a process in which the engine was loaded by us: its time-outs are short."""
    with LocalCluster() as master:
        first = Node(master.address)
        first.close()
        yield master


@pytest.fixture(scope="module", params=["header", "bare"])
def header(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "header")


@pytest.fixture(scope="module", params=["ours-asyncio", "ours-uvloop", "plain-asyncio"])
def shared(request: pytest.FixtureRequest, master: LocalCluster, header: bool) -> Iterator[Node]:
    name, _, loop = request.param.partition("-")
    node = Node(master.address, CONNECTORS[name], loop, save_chunk_meta=header)
    yield node
    node.close()


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """A node whose references are all back after the test."""
    yield shared
    shared.empty()


def test_a_chunk_comes_back(node: Node, keys: Keys) -> None:
    (key,) = keys(1)
    assert node.backend.get_blocking(key) is None
    obj = node.chunk(1)
    node.backend.submit_put_task(key, obj).result(10)
    assert is_chunk(obj, 1)
    assert is_chunk(node.backend.get_blocking(key), 1)


def test_many_chunks_come_back_beside_missing_ones(node: Node, keys: Keys) -> None:
    wanted = keys(12)
    stored = [key for i, key in enumerate(wanted) if i % 3]
    objs = [node.chunk(i) for i in range(12) if i % 3]
    node.backend.batched_submit_put_task(stored, objs).result(10)
    for obj in objs:
        obj.ref_count_down()
    found = node.backend.batched_get_blocking(wanted)
    assert [obj is not None for obj in found] == [bool(i % 3) for i in range(12)]
    assert all(is_chunk(obj, i) for i, obj in enumerate(found) if i % 3)


def test_the_last_chunk_of_a_prompt_is_shorter(node: Node, keys: Keys) -> None:
    (full, last) = keys(2)
    node.store(full, 1)
    node.store(last, 2, tokens=5)
    first, second = node.backend.batched_get_blocking([full, last])
    assert is_chunk(first, 1)
    assert is_chunk(second, 2, tokens=5)
    assert is_chunk(node.backend.get_blocking(last), 2, tokens=5)


def test_a_key_that_is_asked_for_twice_is_answered_twice(node: Node, keys: Keys) -> None:
    a, b, nowhere = keys(3)
    node.store(a, 1)
    node.store(b, 2)
    found = node.backend.batched_get_blocking([a, b, a, nowhere, b, a, nowhere])
    seeds = [1, 2, 1, None, 2, 1, None]
    assert [obj is None for obj in found] == [seed is None for seed in seeds]
    assert all(is_chunk(obj, seed) for obj, seed in zip(found, seeds, strict=True) if seed)


def test_the_first_value_of_a_key_stays(node: Node, keys: Keys) -> None:
    a, b = keys(2)
    node.store(a, 1)
    node.store(a, 2)
    assert is_chunk(node.backend.get_blocking(a), 1)
    objs = [node.chunk(seed) for seed in (3, 4, 5)]
    node.backend.batched_submit_put_task([b, b, a], objs).result(10)
    for obj in objs:
        obj.ref_count_down()
    assert is_chunk(node.backend.get_blocking(b), 3)
    assert is_chunk(node.backend.get_blocking(a), 1)


def test_nothing_is_nothing(node: Node) -> None:
    node.backend.batched_submit_put_task([], []).result(10)
    assert node.backend.batched_get_blocking([]) == []
    assert node.backend.batched_contains([]) == 0


def test_threads_and_tasks_ask_what_is_there(node: Node, keys: Keys) -> None:
    wanted = keys(6)
    for i in (0, 1, 2, 4):
        node.store(wanted[i], i)
    there = [i in {0, 1, 2, 4} for i in range(6)]
    assert [node.backend.contains(key) for key in wanted] == there
    assert [node.connection.exists_sync(key) for key in wanted] == there
    assert [node.on_loop(node.connection.exists(key)) for key in wanted] == there
    for count in (6, 3, 2, 0):
        first = wanted[:count]
        assert node.backend.batched_contains(first) == min(count, 3)
        assert node.on_loop(node.backend.batched_async_contains("lookup", first)) == min(count, 3)
    assert node.backend.batched_contains(wanted[3:]) == 0


def test_a_prefetch_keeps_what_has_no_gap_before_it(node: Node, keys: Keys) -> None:
    wanted = keys(5)
    for i in (0, 1, 3, 4):
        node.store(wanted[i], i)
    found = node.on_loop(node.backend.batched_get_non_blocking("lookup", wanted))
    assert len(found) == 2
    assert node.pool.live == 2
    assert all(is_chunk(obj, i) for i, obj in enumerate(found))


def test_threads_without_a_loop_ask_side_by_side(node: Node, keys: Keys) -> None:
    wanted = keys(8)
    for i in range(0, 8, 2):
        node.store(wanted[i], i)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(node.connection.exists_sync, wanted * 20))
    assert answers == [i % 2 == 0 for i in range(8)] * 20


def test_many_threads_store_and_read_side_by_side(node: Node, keys: Keys) -> None:
    threads, rounds = 16, 8
    mine = keys(threads * rounds)

    def work(number: int) -> bool:
        good = True
        for turn in range(rounds):
            seed = number * rounds + turn
            key = mine[seed]
            good = good and not node.backend.contains(key)
            node.store(key, seed)
            good = good and node.backend.contains(key)
            other = (seed * 7) % len(mine)  # of somebody who may not be there yet
            found = node.backend.batched_get_blocking([key, mine[other]])
            good = good and is_chunk(found[0], seed)
            if found[1] is not None:
                good = good and is_chunk(found[1], other)
        return good

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [True] * threads
    assert node.backend.get_failures == node.backend.put_failures == 0


def test_a_put_of_a_key_that_is_under_way_begins_no_other(node: Node, keys: Keys) -> None:
    (key,) = keys(1)
    obj = node.chunk(1)
    futures = [node.backend.submit_put_task(key, obj) for _ in range(50)]
    for future in futures:
        future.result(10)
    assert not node.backend.exists_in_put_tasks(key)
    obj.ref_count_down()
    assert is_chunk(node.backend.get_blocking(key), 1)


def test_what_a_serializer_made_comes_back(node: Node, keys: Keys, header: bool) -> None:
    a, b = keys(2)
    storing = [
        node.backend.submit_put_task(a, BytesObj(b"packed")),
        node.backend.batched_submit_put_task([b], [BytesObj(b"in a batch")]),
    ]
    if not header:
        assert all(isinstance(future.exception(10), TypeError) for future in storing)
        return
    for future, key, value in zip(storing, (a, b), (b"packed", b"in a batch"), strict=True):
        future.result(10)
        obj = node.backend.get_blocking(key)
        assert obj is not None
        assert bytes(obj.byte_array) == value
        assert obj.fmt is MemoryFormat.BINARY_BUFFER
        obj.ref_count_down()


def test_a_value_that_is_no_chunk_is_not_handed_out(
    node: Node, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    short, large, good = wanted = keys(3)
    store: Any = node.store_itself
    put = getattr(store, "blocking", store).put
    assert put(short.to_string(), b"no chunk") == 0
    assert put(large.to_string(), bytes(3 * LAYOUT.nbytes)) == 0
    node.store(good, 1)
    found = node.backend.batched_get_blocking(wanted)
    assert found[:2] == [None, None]
    assert is_chunk(found[2], 1)
    assert node.backend.get_blocking(short) is None
    assert node.backend.get_blocking(large) is None
    assert caplog.text.count("could not be read") >= 4


def test_a_full_pool_reads_what_it_has_room_for(node: Node, keys: Keys) -> None:
    wanted = keys(4)
    for i, key in enumerate(wanted):
        node.store(key, i)
    others = []
    while (obj := node.connection.allocate()) is not None:
        others.append(obj)
    assert node.backend.batched_get_blocking(wanted) == [None] * 4
    assert node.backend.get_blocking(wanted[0]) is None
    others.pop().ref_count_down()
    found = node.backend.batched_get_blocking(wanted)
    assert is_chunk(found[0], 0)
    assert found[1:] == [None] * 3
    for obj in others:
        obj.ref_count_down()


def test_both_understand_each_other(master: LocalCluster, header: bool, keys: Keys) -> None:
    wanted = keys(4)
    nodes = [Node(master.address, one, save_chunk_meta=header) for one in CONNECTORS.values()]
    try:
        for i, key in enumerate(wanted):
            nodes[i % 2].store(key, i, tokens=16 - i)
        for node in nodes:
            found = node.backend.batched_get_blocking(wanted)
            assert all(is_chunk(obj, i, tokens=16 - i) for i, obj in enumerate(found))
            node.empty()
    finally:
        for node in nodes:
            node.close()


# --- the memory -------------------------------------------------------------------------------


def test_memory_is_cut_and_put_together_again() -> None:
    pool = Pool(1 * MB)
    rng = np.random.default_rng(0)
    objs: list[MemoryObj] = []
    for turn in range(2000):
        if objs and (turn % 3 == 0 or pool.largest < 64 * 1024):
            objs.pop(rng.integers(len(objs))).ref_count_down()
        else:
            shape = (int(rng.integers(1, 20_000)),)
            obj = pool.allocate(shape, "u1", MemoryFormat.BINARY)
            assert obj is not None
            obj.tensor[:] = len(objs) % 251
            objs.append(obj)
    spans = sorted((obj.start, obj.start + obj.nbytes) for obj in objs)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for obj in objs:
        obj.ref_count_down()
    assert pool.live == 0
    assert pool.largest == 1 * MB


def test_a_freed_object_is_of_no_use() -> None:
    obj = Pool(MB).allocate((4,), "f4", MemoryFormat.UNDEFINED)
    assert obj is not None
    obj.ref_count_up()
    obj.ref_count_down()
    assert obj.get_ref_count() == 1
    with pytest.raises(ValueError, match="does not fit"):
        obj.reshape((1000,), obj.dtype, obj.fmt)
    obj.ref_count_down()
    for use in (obj.ref_count_up, obj.ref_count_down, lambda: obj.tensor):
        with pytest.raises(ValueError, match="freed"):
            use()


@pytest.mark.parametrize("dtype", ["f2", "u2", "f4", "f8", "u1"])
def test_a_header_tells_what_follows(dtype: str) -> None:
    obj = Pool(MB).allocate((2, 3, 4, 5), dtype, MemoryFormat.KV_2LTD)
    assert obj is not None
    header = RemoteMetadata.of(obj).serialize()
    assert len(header) == 28
    read = RemoteMetadata.deserialize(header)
    assert (tuple(read.shape), read.dtype, read.fmt) == (obj.shape, obj.dtype, obj.fmt)
    with pytest.raises(ValueError, match="don't fit"):
        read.describe(obj, read.length)  # without its own 28 bytes


# --- ours only: the real engine ----------------------------------------------------------------


def test_settings_come_from_lmcaches_configuration() -> None:
    extra = {
        "local_hostname": "10.0.0.7",
        "metadata_server": "P2PHANDSHAKE",
        "mooncake_protocol": "tcp",
        "save_chunk_meta": False,
        "use_exists_sync": True,
        "lookup_backoff_time": 0.01,
        "mooncake_prefer_local_alloc": True,
        "transfer_timeout": 3,
    }
    config = store_config(EngineConfig("mooncakestore://10.0.0.1:50051/?device=mlx5_0", extra))
    assert config.master_server_address == "10.0.0.1:50051"
    assert config.local_hostname == "10.0.0.7"
    assert config.global_segment_size == 3355443200
    assert config.local_buffer_size == 1 << 30
    assert config.device_name == "mlx5_0"
    del extra["local_hostname"]
    with pytest.raises(ConfigError, match="local_hostname is missing"):
        store_config(EngineConfig("mooncakestore://10.0.0.1:50051", extra))


def test_a_chunk_that_has_no_header_is_refused(held: Node, keys: Keys, header: bool) -> None:
    (key,) = keys(1)
    obj = held.pool.allocate(LAYOUT.shape, "i2", LAYOUT.fmt)
    assert obj is not None
    storing = [
        held.backend.submit_put_task(key, obj),
        held.backend.batched_submit_put_task([key], [obj]),
    ]
    for future in storing:
        assert (future.exception(10) is None) is not header
    obj.ref_count_down()
    held.empty()


def test_chunks_stay_on_their_own_host(master: LocalCluster, header: bool, keys: Keys) -> None:
    nodes = [
        Node(master.address, mooncake_prefer_local_alloc=True, save_chunk_meta=header)
        for _ in range(3)
    ]
    try:
        wanted = keys(30)
        for i, key in enumerate(wanted):
            nodes[i % 3].store(key, i)
        stores = [node.store_itself for node in nodes]
        names = [key.to_string() for key in wanted]
        found = stores[0].blocking.batch_get_replica_desc(names)
        owners = [
            found[name][0].get_memory_descriptor().buffer_descriptor.transport_endpoint
            for name in names
        ]
        assert owners == owners[:3] * 10
        assert len(set(owners)) == 3
    finally:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Node.close, nodes))


def test_a_thread_gets_an_answer_while_the_loop_is_stuck(master: LocalCluster, keys: Keys) -> None:
    wanted = keys(2)
    node = Node(master.address, use_exists_sync=True)
    try:
        node.store(wanted[0], 1)
        with stuck(node):
            assert [node.backend.contains(key) for key in wanted] == [True, False]
            assert node.backend.batched_contains(wanted) == 1
    finally:
        node.close()
    assert not node.backend.contains(wanted[0])  # nobody knows any more


def test_a_connector_is_not_made_on_its_own_loop(held: Node) -> None:
    async def make() -> None:
        loop = asyncio.get_running_loop()
        MooncakeConnector(held.backend.config, LAYOUT, loop, held.pool)

    with pytest.raises(RuntimeError, match="on another thread"):
        held.on_loop(make())


def test_a_pool_that_the_engine_refuses_is_told(engine: InMemoryEngine) -> None:
    engine.fault("register_buffer", code=-600)
    with pytest.raises(MooncakeError, match="-600"):
        Node("memory://lmcache")


def test_a_master_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "CONNECT_TIMEOUT", 0.5)
    with pytest.raises(ConnectionError, match="gave up"):
        Node("127.0.0.1:1")


def test_the_readme_shows_what_runs() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 2, 256, 256) 1.0\n"


@pytest.mark.parametrize(
    "scene",
    [
        scenes.master_freezes_under_work,
        scenes.peer_freezes_under_work,
        scenes.healthy_chunks_beside_a_frozen_peer,
        scenes.close_beside_a_frozen_peer,
    ],
)
@pytest.mark.timeout(90)
def test_ends_in_time(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=80).check(within=60)


# --- ours only: calls that are held in the engine ----------------------------------------------


@pytest.fixture
def engine() -> Iterator[InMemoryEngine]:
    yield InMemoryEngine.named("lmcache")
    InMemoryEngine.reset("lmcache")


@pytest.fixture
def held(
    engine: InMemoryEngine, header: bool, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> Iterator[Node]:
    """A node whose callers wait half a second; a call may be held in the engine."""
    monkeypatch.setattr(ours, "CLOSE_TIMEOUT", 0.5)
    node = Node(
        "memory://lmcache", pool=2 * MB, timeout=0.5, transfer_timeout=0.5, save_chunk_meta=header
    )
    yield node
    hold.set()
    node.close()


def scribble(node: Node, *, but: int) -> None:
    """Take all memory that is free, and write into it; ``but`` objects are somebody's."""
    assert node.pool.live == but
    mine = []
    while (obj := node.connection.allocate()) is not None:
        obj.raw[:] = 0xEE
        mine.append(obj)
    assert mine
    for obj in mine:
        obj.ref_count_down()


async def test_memory_of_a_read_stays_taken_when_nobody_waits(
    engine: InMemoryEngine, held: Node, hold: Hold, keys: Keys
) -> None:
    wanted = keys(3)
    for i, key in enumerate(wanted):
        held.store(key, i)
    held.empty()
    for method in ("get_into", "batch_get_into"):
        engine.fault(method, hold=hold)
    one = asyncio.ensure_future(asyncio.to_thread(held.backend.get_blocking, wanted[0]))
    await hold()
    many = asyncio.ensure_future(asyncio.to_thread(held.backend.batched_get_blocking, wanted[1:]))
    await hold()
    began = time.monotonic()
    assert await one is None
    assert await many == [None, None]
    assert time.monotonic() - began < SOON
    assert held.backend.get_failures == 2
    scribble(held, but=3)  # the engine writes into none of it
    others = [held.chunk(10 + i) for i in range(20)]
    hold.set()
    await asyncio.to_thread(held.empty, but=len(others))
    assert all(is_chunk(obj, 10 + i) for i, obj in enumerate(others))
    held.empty()


@pytest.mark.parametrize("how", ["times out", "is cancelled"])
async def test_memory_of_a_put_stays_taken_when_nobody_waits(
    engine: InMemoryEngine, held: Node, hold: Hold, keys: Keys, how: str
) -> None:
    wanted = keys(4)
    for method in ("put_from", "batch_put_from"):
        engine.fault(method, hold=hold)
    objs = [held.chunk(i) for i in range(4)]
    futures: list[Future[None]] = [held.backend.submit_put_task(wanted[0], objs[0])]
    await hold()
    futures.append(held.backend.batched_submit_put_task(wanted[1:], objs[1:]))
    await hold()
    for obj in objs:
        obj.ref_count_down()  # as the engine does, which has handed them over
    if how == "is cancelled":
        assert all(future.cancel() for future in futures)
    else:
        for future in futures:
            await asyncio.wrap_future(future)
    await asyncio.to_thread(waits_for_nobody, held)
    scribble(held, but=4)
    hold.set()
    await asyncio.to_thread(held.empty)
    found = await asyncio.to_thread(held.backend.batched_get_blocking, wanted)
    assert all(is_chunk(obj, i) for i, obj in enumerate(found))


def waits_for_nobody(node: Node) -> None:
    """Wait until the loop has ended what was cancelled."""

    async def tasks() -> int:
        return len(asyncio.all_tasks()) - 1

    deadline = time.monotonic() + 10
    while node.on_loop(tasks()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_caller_that_gives_up_leaks_nothing(held: Node, keys: Keys) -> None:
    """Wherever that meets the call: before it begins, in a batch, or as it ends."""
    wanted = keys(60)
    for i, key in enumerate(wanted[:20]):
        held.store(key, i)
    obj = held.chunk(0)
    config = held.backend.config
    for turn in range(40):
        pause = turn * 0.00005
        storing = [
            held.backend.submit_put_task(wanted[20 + turn], obj),
            held.backend.batched_submit_put_task(wanted[20:], [obj] * 40),
        ]
        held.backend.config = replace(config, blocking_timeout_secs=pause)
        for found in (
            held.backend.batched_get_blocking(wanted[:20]),
            [held.backend.get_blocking(wanted[turn % 20])],
        ):
            for one in found:
                if one is not None:
                    one.ref_count_down()
        for future in storing:
            future.cancel()
        waits_for_nobody(held)
    obj.ref_count_down()
    held.empty()


def test_an_answer_that_comes_too_late_is_given_back(held: Node, keys: Keys) -> None:
    """The thread gives up in the very moment in which the loop has read the chunk."""
    (key,) = keys(1)
    held.store(key, 1)
    read = held.connection.get

    async def slow(key: CacheEngineKey) -> MemoryObj | None:
        obj = await read(key)
        time.sleep(0.8)  # noqa: ASYNC251  # the loop stands still while the thread gives up
        return obj

    held.connection.get = slow  # type: ignore[method-assign]
    assert held.backend.get_blocking(key) is None
    held.empty()


def test_what_waits_together_travels_together(held: Node, keys: Keys) -> None:
    """Sixty-four callers of each verb need a few calls of the engine, not sixty-four."""
    wanted = keys(64)
    objs = [held.chunk(i) for i in range(64)]

    def at_once(call: Callable[[int], Any]) -> list[Any]:
        before = held.store_itself.stats().calls
        with stuck(held):
            futures = [
                asyncio.run_coroutine_threadsafe(call(i), held.thread.loop) for i in range(64)
            ]
        answers = [future.result(10) for future in futures]
        assert held.store_itself.stats().calls - before <= 4
        return answers

    at_once(lambda i: held.connection.put(wanted[i], objs[i]))
    assert all(at_once(lambda i: held.connection.exists(wanted[i])))
    found = at_once(lambda i: held.connection.get(wanted[i]))
    assert all(is_chunk(obj, i) for i, obj in enumerate(found))
    for obj in objs:
        obj.ref_count_down()
    held.empty()


def test_a_failure_is_no_miss(engine: InMemoryEngine, held: Node, keys: Keys) -> None:
    a, b = wanted = keys(2)
    held.store(a, 1)
    held.store(b, 2)
    faults = [engine.fault(method, code=-800) for method in ("get_into", "batch_get_into")]
    with pytest.raises(MooncakeError, match="-800"):
        held.on_loop(held.connection.get(a))
    for one in faults:
        one.remove()
    faults = [engine.fault(method, code=-900) for method in ("is_exist", "batch_is_exist")]
    for ask in (
        lambda: held.on_loop(held.connection.exists(a)),
        lambda: held.connection.exists_sync(a),
        lambda: held.on_loop(held.connection.batched_async_contains("lookup", wanted)),
        lambda: held.connection.batched_contains(wanted),
    ):
        with pytest.raises(MooncakeError, match="-900"):
            ask()
    assert not held.backend.contains(a)
    assert held.backend.batched_contains(wanted) == 0
    for one in faults:
        one.remove()
    assert held.backend.batched_contains(wanted) == 2
    for method in ("put_from", "batch_put_from"):
        engine.fault(method, code=-200)
    obj = held.chunk(3)
    (new,) = keys(3)[2:]
    with pytest.raises(MooncakeError, match="-200"):
        held.backend.submit_put_task(new, obj).result(10)
    with pytest.raises(MooncakeError, match="put_many_from failed for 1"):
        held.backend.batched_submit_put_task([new], [obj]).result(10)
    assert held.backend.put_failures == 2
    obj.ref_count_down()
    held.empty()


async def test_close_is_bounded_beside_calls_that_are_held(
    engine: InMemoryEngine, held: Node, hold: Hold, keys: Keys
) -> None:
    (key,) = keys(1)
    for method in ("put_from", "batch_put_from"):
        engine.fault(method, hold=hold)
    obj = held.chunk(1)
    storing = held.backend.submit_put_task(key, obj)
    await hold()
    obj.ref_count_down()
    began = time.monotonic()
    await asyncio.to_thread(held.backend.close)
    assert time.monotonic() - began < SOON
    assert held.backend.get_blocking(key) is None
    assert not held.backend.contains(key)
    await asyncio.wrap_future(storing)  # it gave up in time
    assert held.pool.live == 1
    hold.set()
    await asyncio.to_thread(held.empty)


async def test_the_loop_is_free_while_chunks_move(master: LocalCluster, keys: Keys) -> None:
    node = Node(master.address, pool=32 * MB, save_chunk_meta=True)
    probe = LoopStallProbe()
    try:
        node.on_loop(probe.__aenter__())
        wanted = keys(64)

        def work(number: int) -> bool:
            node.store(wanted[number], number)
            return is_chunk(node.backend.get_blocking(wanted[number]), number)

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(64)))
        node.on_loop(probe.__aexit__(None, None, None))
        assert probe.longest < 0.5, probe
    finally:
        await asyncio.to_thread(node.close)

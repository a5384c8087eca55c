"""SGLang's storage backend on aiomooncake, beside the same over the blocking binding."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from aiomooncake import (
    ConfigError,
    LocalCluster,
    NotSupportedError,
    Store,
    StoreConfig,
    WarmupError,
    WrongLoopError,
)
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import LoopStallProbe
from examples.sglang_hicache import turns
from examples.sglang_hicache.backend import MooncakeStore, store_config
from examples.sglang_hicache.controller import Controller
from examples.sglang_hicache.interface import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from examples.sglang_hicache.pages import PageStorage
from examples.sglang_hicache.plain import PlainMooncakeStore
from examples.sglang_hicache.pool import HostPool, MHAHostPool, MLAHostPool, StatePool
from examples.sglang_hicache.turns import Turns
from tests.adversity.processes import run_scene
from tests.conftest import OpenStore
from tests.examples import sglang_scenes as scenes

MB = 1 << 20
PAGES = 300
LEASED = -706
NO_STALL = 0.5  # seconds of a loop beside them, on a busy machine

Make = Callable[..., PageStorage]
Keys = Callable[[int], list[str]]


def settings(address: str, segment: int | str = 64 * MB, **extra: Any) -> dict[str, Any]:
    return {
        "master_server_address": address,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": segment,
        **extra,
    }


def fill(pool: HostPool, seed: int = 1) -> None:
    memory = pool.kv_buffer.reshape(-1).view("u1")
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)


def alike(one: Any, other: Any) -> bool:
    """Compare bytes: among random ones there are NaNs, which are not equal to themselves."""
    alike: bool = one.tobytes() == other.tobytes()
    return alike


def same(pool: Any, pages: Iterable[int], others: Iterable[int]) -> list[bool]:
    pairs = zip(pages, others, strict=True)
    return [alike(pool.page(one), pool.page(other)) for one, other in pairs]


@pytest.fixture
def keys() -> Keys:
    """Make hashes of pages that no other test has."""
    prefix = uuid.uuid4().hex
    return lambda count: [f"{prefix}{i:04x}" for i in range(count)]


# --- both alike -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    """A master of this module, that evicts nothing on its own."""
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        yield master


class Shared:
    """One store of each kind, which all tests share: closing the plain one takes 1-2 s."""

    def __init__(self, address: str) -> None:
        config = HiCacheStorageConfig(extra_config=settings(address, 192 * MB))
        self.ours = MooncakeStore(config)
        self.plain = PlainMooncakeStore(config)

    def close(self) -> None:
        self.ours.close()
        self.plain.store.close()


@pytest.fixture(scope="module")
def shared(master: LocalCluster) -> Iterator[Shared]:
    shared = Shared(master.address)
    yield shared
    shared.close()


@pytest.fixture
def make_ours(shared: Shared, master: LocalCluster) -> Iterator[Make]:
    """Make backends of ours: ``make(pool, extra={...}, tp_rank=1, …)``."""
    made: list[MooncakeStore] = []

    class Ours(MooncakeStore):
        async def _open(self, config: StoreConfig) -> Store:
            return shared.ours.store

    def make(pool: Any = None, extra: Any = None, **place: Any) -> PageStorage:
        config = settings(master.address, **(extra or {}))
        backend = Ours(HiCacheStorageConfig(extra_config=config, **place))
        made.append(backend)
        if pool is not None:
            backend.register_mem_pool_host(pool)
        return backend

    yield make

    async def release() -> None:
        for backend in made:
            for buffer in backend._buffers:
                await buffer.aclose()

    asyncio.run(release())


@pytest.fixture
def make_plain(shared: Shared, master: LocalCluster) -> Iterator[Make]:
    """Make plain backends, likewise."""
    registered: list[Any] = []

    class Plain(PlainMooncakeStore):
        def _set_up(self) -> Any:
            return shared.plain.store

        def _register(self, memory: Any) -> None:
            super()._register(memory)
            registered.append(memory)

    def make(pool: Any = None, extra: Any = None, **place: Any) -> PageStorage:
        config = settings(master.address, **(extra or {}))
        backend = Plain(HiCacheStorageConfig(extra_config=config, **place))
        if pool is not None:
            backend.register_mem_pool_host(pool)
        return backend

    yield make
    for memory in registered:
        assert shared.plain.store.unregister_buffer(memory.ctypes.data) == 0


@pytest.fixture(params=["ours", "plain"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.getfixturevalue(f"make_{request.param}")
    return made


def raw(backend: Any) -> Any:
    """The binding's methods: of the plain one, or through ours."""
    return getattr(backend.store, "blocking", backend.store)


POOLS: dict[str, Callable[[], Any]] = {
    "MHA": lambda: MHAHostPool(PAGES, 16),
    "MHA by heads": lambda: MHAHostPool(PAGES, 16, heads=4),
    "MLA": lambda: MLAHostPool(PAGES, 16),
    "MLA layer by layer": lambda: MLAHostPool(PAGES, 16, layers=3, layout="layer_first"),
}
PLACES: dict[str, dict[str, Any]] = {
    "MHA": {"tp_rank": 1, "tp_size": 2},
    "MHA by heads": {"tp_rank": 1, "tp_size": 2, "tp_lcm_size": 4, "should_split_heads": True},
    "MLA": {"tp_size": 2, "is_mla_model": True},
    "MLA layer by layer": {"is_mla_model": True, "pp_size": 2, "pp_rank": 1},
}
PER_PAGE = {"MHA": 2, "MHA by heads": 4, "MLA": 1, "MLA layer by layer": 1}


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("grouped", [False, True])
def test_pages_go_through_the_worker_threads(
    make: Make, keys: Keys, kind: str, grouped: bool
) -> None:
    pool = POOLS[kind]()
    backend = make(pool, {"enable_group_semantics": grouped}, **PLACES[kind])
    fill(pool)
    hashes = keys(140)  # more than a batch
    with Controller(backend) as controller:
        stored = controller.write_storage(hashes, pool.indices(range(140)))
        assert stored.result(10) == 140
        into = range(150, 150 + 141)
        untouched = pool.page(into[140]).tobytes()
        read = controller.prefetch([*hashes, "nowhere"], pool.indices(into))
        assert read.result(10) == 140
        assert controller.prefetch(["nowhere", *hashes], pool.indices(into)).result(10) == 0
    assert all(same(pool, range(140), into[:140]))
    assert pool.page(into[140]).tobytes() == untouched


@pytest.mark.parametrize("kind", POOLS)
def test_one_kind_reads_what_the_other_has_written(
    make_ours: Make, make_plain: Make, keys: Keys, kind: str
) -> None:
    extra = {"extra_backend_tag": "tag"}
    place = {**PLACES[kind], "model_name": "org/model"}
    pools, hashes = [POOLS[kind](), POOLS[kind]()], keys(8)
    ours, plain = make_ours(pools[0], extra, **place), make_plain(pools[1], extra, **place)
    for writer, reader, pool, other, mine in (
        (ours, plain, *pools, hashes[:4]),
        (plain, ours, *pools[::-1], hashes[4:]),
    ):
        fill(pool)
        assert writer.batch_set_v1(mine, pool.indices(range(4))) == [True] * 4
        assert reader.batch_exists(mine) == 4
        assert reader.batch_get_v1(mine, other.indices(range(4))) == [True] * 4
        assert all(alike(pool.page(i), other.page(i)) for i in range(4))


def test_names_are_those_of_sglang(make: Make, keys: Keys) -> None:
    (page,) = keys(1)
    pool = MHAHostPool(1)
    backend = make(
        pool,
        {"extra_backend_tag": "tag"},
        model_name="org/model",
        tp_rank=1,
        tp_size=2,
        pp_rank=2,
        pp_size=3,
    )
    assert backend.batch_set_v1([page], pool.indices([0])) == [True]
    assert backend.exists(f"tag_org-model_{page}_1_2_k")
    assert backend.exists(f"tag_org-model_{page}_1_2_v")
    shared_pool = MLAHostPool(1)
    backend = make(shared_pool, tp_rank=1, tp_size=2, is_mla_model=True)
    assert backend.batch_set_v1([page], shared_pool.indices([0])) == [True]
    assert backend.exists(f"{page}__k")


def test_ranks_and_models_have_their_own_pages(make: Make, keys: Keys) -> None:
    hashes, pool = keys(3), MHAHostPool(3)
    make(pool, tp_rank=0, tp_size=2).batch_set_v1(hashes, pool.indices(range(3)))
    assert make(tp_rank=0, tp_size=2).batch_exists(hashes) == 3
    assert make(tp_rank=1, tp_size=2).batch_exists(hashes) == 0
    assert make(tp_rank=0, tp_size=2, pp_size=2).batch_exists(hashes) == 0
    assert make(tp_rank=0, tp_size=2, model_name="other").batch_exists(hashes) == 0
    assert make({}, tp_rank=0, tp_size=2, is_mla_model=True).batch_exists(hashes) == 0


def test_parts_of_heads_serve_other_numbers_of_ranks(make: Make, keys: Keys) -> None:
    """What one rank of two wrote in two parts is read by ranks 2 and 3 of four."""
    (page,) = keys(1)
    whole, half = MHAHostPool(1, heads=4), MHAHostPool(2, heads=2)
    fill(whole)
    split = {"tp_lcm_size": 4, "should_split_heads": True}
    writer = make(whole, tp_rank=1, tp_size=2, **split)
    assert writer.batch_set_v1([page], whole.indices([0])) == [True]
    for rank in (2, 3):
        reader = make(tp_rank=rank, tp_size=4)
        reader.mem_pool_host = half
        assert reader.batch_get_v1([page], half.indices([rank - 2])) == [True]
    together = np.concatenate([half.page(0), half.page(1)], axis=1)
    assert alike(together, whole.page(0))


def test_answers_are_given_page_by_page(make: Make, keys: Keys) -> None:
    hashes, pool = keys(10), MHAHostPool(20)
    backend = make(pool)
    fill(pool)
    there = [0, 1, 2, 5, 9]
    some = [hashes[i] for i in there]
    assert backend.batch_set_v1(some, pool.indices(there)) == [True] * 5
    assert backend.batch_exists(hashes) == 3
    assert backend.batch_exists(hashes[5:]) == 1
    assert backend.batch_exists(hashes[3:]) == 0
    assert backend.batch_exists([]) == 0
    got = backend.batch_get_v1(hashes, pool.indices(range(10, 20)))
    assert got == [i in there for i in range(10)]
    for i in there:
        assert alike(pool.page(i), pool.page(10 + i))


def test_half_a_page_is_no_page(make: Make, keys: Keys) -> None:
    hashes, pool = keys(2), MHAHostPool(2)
    backend = make(pool)
    places, sizes = pool.get_page_buffer_meta(pool.indices(range(2)))
    assert backend.set(f"{hashes[0]}_0_k", None, places[0], sizes[0])
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_get_v1(hashes, pool.indices(range(2))) == [False, False]
    assert backend.batch_set_v1(hashes, pool.indices(range(2))) == [True, True]
    assert backend.batch_exists(hashes) == 2


def test_pages_that_are_there_are_left_as_they_are(make: Make, keys: Keys) -> None:
    hashes, pool = keys(6), MHAHostPool(12)
    backend = make(pool)
    fill(pool, 1)
    assert backend.batch_set_v1(hashes[::2], pool.indices(range(3))) == [True] * 3
    assert backend.batch_set_v1(hashes, pool.indices(range(3, 9))) == [True] * 6
    assert backend.batch_get_v1(hashes[::2], pool.indices(range(9, 12))) == [True] * 3
    assert all(same(pool, range(3), range(9, 12)))


def test_a_key_given_twice_is_answered_twice(make: Make, keys: Keys) -> None:
    """What the engine makes of it is another matter: see below for ours."""
    (first, second), pool = keys(2), MHAHostPool(6)
    backend = make(pool)
    assert backend.batch_set_v1([first, second, first], pool.indices(range(3))) == [True] * 3
    assert backend.batch_get_v1([first, second], pool.indices(range(4, 6))) == [True] * 2
    assert backend.batch_get_v1([first, first], pool.indices(range(4, 6))) == [True] * 2


@pytest.mark.parametrize(("grouped", "code"), [(False, 0), (True, LEASED)])
def test_members_of_a_group_live_together(make: Make, keys: Keys, grouped: bool, code: int) -> None:
    """The master renews the lease of a whole page when a part of it is read."""
    (page,), pool = keys(1), MHAHostPool(2)
    backend = make(pool, {"enable_group_semantics": grouped})
    assert backend.batch_set_v1([page], pool.indices([0])) == [True]
    places, sizes = pool.get_page_buffer_meta(pool.indices([1]))
    assert backend.get(f"{page}_0_k", places[0], sizes[0])
    assert raw(backend).remove(f"{page}_0_v") == code


def test_objects_are_moved_by_address(make: Make, keys: Keys) -> None:
    one, two, three = keys(3)
    pool = MHAHostPool(4)
    backend = make(pool)
    fill(pool)
    places, sizes = pool.get_page_buffer_meta(pool.indices(range(4)))
    assert not backend.exists(one)
    assert not backend.get(one, places[2], sizes[2])
    assert backend.set(one, None, places[0], sizes[0])
    assert backend.set(one, None, places[1], sizes[1])  # there already
    assert backend.exists(one)
    assert backend.batch_set([two, one], None, places[1:3], sizes[1:3])
    assert not backend.batch_set([])
    assert backend.batch_get([one, two, three], places[4:7], sizes[4:7]) == 1  # K and V
    assert backend.batch_get([three, one], places[6:8], sizes[6:8]) == 0
    assert backend.batch_get([]) == 0
    assert backend.get(two, places[6], sizes[6])
    assert alike(pool.k_buffer[2], pool.k_buffer[0])
    assert alike(pool.v_buffer[2], pool.v_buffer[0])


@pytest.mark.parametrize("kind", [MooncakeStore, PlainMooncakeStore])
def test_what_does_not_fit_is_told_page_by_page(kind: Any, keys: Keys) -> None:
    # Otherwise a page that finds no room makes it evict others.
    keep = ["--eviction_ratio=0", "--eviction_high_watermark_ratio=1"]
    with LocalCluster(extra_args=keep) as master:
        backend = kind(HiCacheStorageConfig(extra_config=settings(master.address, 16 * MB)))
        pool = MHAHostPool(24, heads=8, layers=8, head_dim=128)  # 48 MB
        backend.register_mem_pool_host(pool)
        fill(pool)
        hashes, every = keys(24), range(24)
        stored = backend.batch_set_v1(hashes, pool.indices(every))
        assert set(stored) == {True, False}
        # What the engine says of the others must be true as well.
        assert [backend.batch_exists([page]) == 1 for page in hashes] == stored
        kept = pool.kv_buffer.copy()
        pool.kv_buffer[:] = 0
        assert backend.batch_get_v1(hashes, pool.indices(every)) == stored
        for number, good in enumerate(stored):
            assert not good or alike(pool.page(number), kept[:, number])
        backend.close()
        if kind is PlainMooncakeStore:
            backend.store.close()


def test_many_threads_at_once(make: Make, keys: Keys) -> None:
    """More writers, readers and askers than SGLang has."""
    pool = MHAHostPool(256, 16)
    backend = make(pool)
    fill(pool)
    old, new = keys(128)[:64], keys(128)[64:]
    assert all(backend.batch_set_v1(old, pool.indices(range(64))))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        part = range(8 * number, 8 * number + 8)
        mine, hidden = new[part.start : part.stop], range(192 + part.start, 192 + part.stop)
        try:
            for _ in range(5):
                assert backend.batch_exists(old) == 64
                indices = pool.indices(range(64 + part.start, 64 + part.stop))
                assert backend.batch_set_v1(mine, indices) == [True] * 8
                assert backend.batch_exists(mine) == 8
                wanted = old[part.start : part.stop]
                assert backend.batch_get_v1(wanted, pool.indices(hidden)) == [True] * 8
                assert all(same(pool, part, hidden))
        except BaseException as exc:  # noqa: BLE001  # the test fails of it
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors


def test_stats_tell_what_was_moved(make: Make, keys: Keys) -> None:
    hashes, pool = keys(5), MHAHostPool(10)
    backend = make(pool, enable_storage_metrics=True)
    backend.batch_set_v1(hashes[:3], pool.indices(range(3)))
    backend.batch_set_v1(hashes, pool.indices(range(5)))
    backend.batch_set_v1(hashes, pool.indices(range(5)))  # nothing new
    backend.batch_get_v1([*hashes[:2], "nowhere"], pool.indices(range(5, 8)))
    stats = backend.get_stats()
    assert stats.backup_pgs == [3, 2]
    assert stats.prefetch_pgs == [2]
    assert len(stats.backup_bandwidth) == 2
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []


def test_pools_beside_the_first_one(make: Make, keys: Keys) -> None:
    hashes = keys(6)
    kv, states, index = MHAHostPool(12), StatePool(12), MLAHostPool(12, 64, dim=8)
    backend = make(kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)  # known already
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    backend.register_mem_host_pool_v2(index, PoolName.INDEXER)
    rng = np.random.default_rng(1)
    for part in (*states.get_hybrid_pool_buffer(), index.kv_buffer):
        part[:] = rng.random(part.shape)
    backend.batch_set_v1(hashes, kv.indices(range(6)))
    last = PoolTransfer(PoolName.MAMBA, [1, 3], [hashes[1], hashes[3]])
    every = PoolTransfer(PoolName.INDEXER, index.indices(range(5)), hashes[:5])
    stored = backend.batch_set_v2([last, every])
    assert stored == {PoolName.MAMBA: [True] * 2, PoolName.INDEXER: [True] * 5}

    ask = [
        PoolTransfer(PoolName.INDEXER, keys=hashes),
        PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    found = backend.batch_exists_v2([*hashes, "nowhere"], ask)
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [2, 4]
    assert found.extra_pool_hit_pages == {
        PoolName.KV: 6,
        PoolName.INDEXER: 5,
        PoolName.MAMBA: 4,
    }
    ask[1].keys = ["", ""]  # two states in a row, which are not there
    assert backend.batch_exists_v2(hashes, ask).kv_hit_pages == 0
    assert backend.batch_exists_v2(["nowhere"], ask).restorable_prefix_pages == []

    got = backend.batch_get_v2(
        [
            PoolTransfer(PoolName.MAMBA, [7, 8], hashes[1:3]),
            PoolTransfer(PoolName.INDEXER, index.indices([8]), hashes[4:5]),
        ]
    )
    assert got == {PoolName.MAMBA: [True, False], PoolName.INDEXER: [True]}
    for part in states.get_hybrid_pool_buffer():
        assert alike(part[7], part[1])
    assert alike(index.page(8), index.page(4))
    assert backend.batch_set_v2([]) == {}


def test_draft_and_window_pools(make: Make, keys: Keys) -> None:
    hashes = keys(2)
    kv, draft, window = (
        MLAHostPool(4),
        MHAHostPool(4),
        MLAHostPool(4, layers=3, layout="layer_first"),
    )
    backend = make(kv, is_mla_model=True, enable_storage_metrics=True)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    fill(draft)
    fill(window)
    # Pieces of one pool and whole objects of another travel in one call.
    stored = backend.batch_set_v2(
        [
            PoolTransfer(PoolName.DRAFT, draft.indices(range(2)), hashes),
            PoolTransfer(PoolName.SWA, window.indices(range(2)), hashes),
        ]
    )
    assert stored == {PoolName.DRAFT: [True] * 2, PoolName.SWA: [True] * 2}
    assert backend.exists(f"{hashes[0]}_0_draft_k")
    assert backend.exists(f"{hashes[0]}_0_draft_v")
    assert backend.exists(f"{hashes[0]}__swa")
    for name, pool in ((PoolName.DRAFT, draft), (PoolName.SWA, window)):
        got = backend.batch_get_v2([PoolTransfer(name, pool.indices(range(2, 4)), hashes)])
        assert got == {name: [True] * 2}
        assert all(same(pool, range(2), range(2, 4)))


def test_a_pool_that_only_counts(make: Make, keys: Keys) -> None:
    """The pages of some models are in the other pools; the first one only has their numbers."""
    hashes, index = keys(2), MLAHostPool(2)
    backend = make()
    with pytest.raises(ValueError, match="register_mem_pool_host"):
        backend.batch_set_v1(hashes, [])
    backend.register_mem_pool_host(SimpleNamespace(kv_buffer=None, page_size=64))
    assert backend.batch_set_v1(hashes, []) == [True, True]
    assert backend.batch_get_v1(hashes, []) == [True, True]
    backend.register_mem_host_pool_v2(index, PoolName.INDEXER)
    transfer = PoolTransfer(PoolName.INDEXER, index.indices([0]), hashes[:1])
    backend.batch_set_v2([transfer])
    assert backend.batch_exists_v2(hashes, [transfer]).kv_hit_pages == 1


def test_wrong_arguments_are_refused(make: Make, keys: Keys) -> None:
    hashes, pool = keys(2), MHAHostPool(2)
    backend = make(pool)
    indices = pool.indices(range(2))
    for refused in (
        lambda: backend.batch_set_v1(hashes, indices[1:]),
        lambda: backend.batch_get_v1(hashes[:1], indices),
        lambda: backend.batch_get_v2([PoolTransfer(PoolName.INDEXER, indices, hashes)]),
        lambda: backend.set(hashes[0]),
        lambda: backend.get(hashes[0], 1),
        lambda: backend.batch_set(hashes, None, [1, None], [1, 1]),
        lambda: backend.batch_get(hashes, [1, 1], [1]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            refused()
    by_layer = MLAHostPool(2, layers=3, layout="layer_first")
    backend.mem_pool_host = by_layer
    with pytest.raises(ValueError, match="page_head"):
        backend.batch_set_v1(hashes, by_layer.indices(range(2)))


def test_clear_removes_what_nobody_reads(make: Make, keys: Keys) -> None:
    hashes, pool = keys(2), MHAHostPool(2)
    backend = make(pool)
    backend.batch_set_v1(hashes, pool.indices(range(2)))
    backend.clear()
    assert backend.batch_exists(hashes) == 0


# --- ours only: the start and the end ---------------------------------------------------------


class Lines(logging.Handler):
    """Collects log lines, and lets a test wait for some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    loggers = [logging.getLogger(name) for name in ("aiomooncake", "examples.sglang_hicache")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    """Threads that stand for the scheduler processes."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


async def test_the_seeds_race_is_survived_by_all_ranks(
    own_cluster: LocalCluster,
    open_store: OpenStore,
    lines: Lines,
    ranks: ThreadPoolExecutor,
    eventually: Any,
) -> None:
    """The engine is set up on every rank before it can store anything; it killed schedulers."""
    loop = asyncio.get_running_loop()
    tp_size = 4

    def start(rank: int) -> MooncakeStore:
        extra = settings(own_cluster.address, segment=0)
        return MooncakeStore(HiCacheStorageConfig(rank, tp_size, extra_config=extra))

    mounting = await open_store(own_cluster.address, global_segment_size=0)
    async with LoopStallProbe() as probe:
        starting = [loop.run_in_executor(ranks, start, rank) for rank in range(tp_size)]
        failed = "Warmup put failed (attempt 1), ret=-200 NO_AVAILABLE_HANDLE"
        await eventually(lambda: lines.count(failed) == tp_size)
        assert not any(one.done() for one in starting)
        assert await mounting.engine.allocate_and_mount_segment(64 * MB)
        backends = await asyncio.gather(*starting)
        pool = MHAHostPool(2)
        for backend in backends:
            await asyncio.to_thread(backend.register_mem_pool_host, pool)
            set_pages = backend.batch_set_v1
            stored = await asyncio.to_thread(set_pages, ["a", "b"], pool.indices(range(2)))
            assert stored == [True, True]
        await asyncio.gather(*(asyncio.to_thread(backend.close) for backend in backends))
    assert probe.longest < NO_STALL, probe
    for rank in range(tp_size):
        assert any(line.startswith(f"[TP{rank}] {failed}") for line in lines.lines)
        assert any(
            line.startswith(f"[TP{rank}] the Mooncake backend is ready") for line in lines.lines
        )
    assert all(line.startswith("[TP") for line in lines.lines)


@pytest.fixture
def memory() -> tuple[InMemoryEngine, str]:
    """An engine in memory, and its address."""
    name = uuid.uuid4().hex
    return InMemoryEngine.named(name), f"memory://{name}"


def test_a_fault_that_no_waiting_cures_is_told_at_once(
    memory: tuple[InMemoryEngine, str], lines: Lines
) -> None:
    engine, address = memory
    engine.fault("put", code=-1700)  # the tenant's quota
    began = time.monotonic()
    with pytest.raises(WarmupError) as failed:
        MooncakeStore(HiCacheStorageConfig(2, 4, extra_config=settings(address)))
    assert time.monotonic() - began < 5
    assert isinstance(failed.value, RuntimeError)
    assert failed.value.rank == 2
    assert failed.value.diagnosis.permanent
    assert lines.count("[TP2] the Mooncake backend does not start")


def test_no_device_is_told_at_once(own_cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="RDMA"):
        MooncakeStore(
            HiCacheStorageConfig(
                extra_config=settings(own_cluster.address, protocol="rdma"),
            )
        )


def test_the_segment_is_divided_among_the_ranks() -> None:
    extra = settings("10.0.0.1:50051", "4gb", enable_group_semantics=True, prefetch_threshold=1)
    config = store_config(HiCacheStorageConfig(1, 4, 1, 2, extra_config=extra))
    assert config.global_segment_size == 512 * MB
    assert config.local_buffer_size == 16 * MB
    assert config.master_server_address == "10.0.0.1:50051"


def test_devices_are_chosen_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings("10.0.0.1:50051").items():
        if name in ("protocol", "global_segment_size"):
            monkeypatch.setenv(f"MOONCAKE_{name.upper()}", str(value))
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_DEVICE", '{"0": "mlx5_0", "1": "mlx5_1"}')
    config = store_config(HiCacheStorageConfig(1, 2, 0, 2, extra_config={"some": "thing"}))
    assert config.device_name == "mlx5_1"
    assert config.master_server_address == "10.0.0.1:50051"


async def test_it_starts_and_ends_on_a_thread_that_runs_a_loop(
    memory: tuple[InMemoryEngine, str],
) -> None:
    _, address = memory
    backend = MooncakeStore(HiCacheStorageConfig(extra_config=settings(address)))
    pool = MHAHostPool(2)
    backend.register_mem_pool_host(pool)
    # A caller's mistake is not taken for a failure of the store: this would stop the loop.
    with pytest.raises(WrongLoopError):
        backend.batch_exists(["a"])
    indices = pool.indices(range(2))
    assert await asyncio.to_thread(backend.batch_set_v1, ["a", "b"], indices) == [True] * 2
    assert await anyio.to_thread.run_sync(backend.batch_exists, ["a", "b"]) == 2
    backend.close()


def test_the_loop_of_the_callers_thread_stays_its_own(memory: tuple[InMemoryEngine, str]) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        backend = MooncakeStore(HiCacheStorageConfig(extra_config=settings(memory[1])))
        backend.close()
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Rank:
    """A backend on the in-memory engine, with pages to move."""

    def __init__(self, address: str) -> None:
        extra = settings(address, enable_group_semantics=True)
        self.backend = MooncakeStore(HiCacheStorageConfig(3, 4, extra_config=extra))
        self.pool = MHAHostPool(16, 16)
        self.backend.register_mem_pool_host(self.pool)
        fill(self.pool)
        self.pages = [f"p{i}" for i in range(8)]

    def set(self) -> list[bool]:
        return self.backend.batch_set_v1(self.pages, self.pool.indices(range(8)))

    def get(self) -> list[bool]:
        return self.backend.batch_get_v1(self.pages, self.pool.indices(range(8, 16)))


@pytest.fixture
def rank(memory: tuple[InMemoryEngine, str]) -> Iterator[Rank]:
    rank = Rank(memory[1])
    yield rank
    rank.backend.close()


def test_failures_are_answers(rank: Rank, memory: tuple[InMemoryEngine, str], lines: Lines) -> None:
    """An exception would end a thread that nobody starts again."""
    engine, backend = memory[0], rank.backend
    asked = engine.fault("batch_is_exist", code=-900)
    writes = engine.fault("batch_put_from", code=-800)
    assert backend.batch_exists(rank.pages) == 0
    assert not backend.exists("p0")
    assert rank.set() == [False] * 8
    assert not writes.hits, "a master that does not answer was asked twice"
    asked.remove()
    assert rank.set() == [False] * 8
    assert lines.count("[TP3] 16 of 16 objects could not be stored: -800 TRANSFER_FAIL") == 1
    writes.remove()
    assert rank.set() == [True] * 8
    reads = engine.fault("batch_get_into", code=-800)
    assert rank.get() == [False] * 8
    assert backend.batch_get(["p0"], [rank.pool.kv_buffer.ctypes.data], [1]) == 0
    reads.remove()
    assert rank.get() == [True] * 8
    engine.fault("remove_all", code=-900, times=1)
    backend.clear()
    assert lines.count("[TP3] nothing was removed: -900 RPC_FAIL") == 1
    assert backend.batch_exists(rank.pages) == 8


def test_a_closed_store_answers(rank: Rank, lines: Lines) -> None:
    rank.set()
    rank.backend.close()
    rank.backend.close()
    assert rank.get() == [False] * 8
    assert rank.set() == [False] * 8
    assert rank.backend.batch_exists(rank.pages) == 0
    rank.backend.clear()
    assert lines.count("the store is closed") == 4
    assert all(line.startswith("[TP3] ") for line in lines.lines)


def test_what_was_not_read_in_time_is_read_again(
    rank: Rank, memory: tuple[InMemoryEngine, str]
) -> None:
    rank.set()
    late = memory[0].fault("batch_get_into", code=-707, times=1)
    assert rank.get() == [True] * 8
    assert late.hits == 1
    assert all(same(rank.pool, range(8), range(8, 16)))
    memory[0].fault("batch_get_into", code=-707, times=2)
    assert rank.get() == [False] * 8


def test_a_page_given_twice(make_ours: Make, keys: Keys) -> None:
    """The engine stores the last one, and fills one place only, though it answers for both."""
    (one, two), pool = keys(2), MHAHostPool(8)
    backend = make_ours(pool)
    fill(pool)
    assert backend.batch_set_v1([one, two, one], pool.indices(range(3))) == [True] * 3
    pages = [one, two, one, one]
    assert backend.batch_get_v1(pages, pool.indices(range(4, 8))) == [True] * 4
    assert all(same(pool, range(4, 8), [0, 1, 0, 0]))


def test_a_wheel_without_groups_stores_all_the_same(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    blocking = rank.backend.store.blocking
    put = blocking.batch_put_from

    def old(*args: Any) -> Any:
        if len(args) > 3:
            raise NotSupportedError("ReplicateConfig.group_ids is not known to this wheel")
        return put(*args)

    monkeypatch.setattr(blocking, "batch_put_from", old)
    assert rank.set() == [True] * 8
    assert lines.count("[TP3] pages are stored without groups") == 1


def test_an_answer_that_is_not_one_code_per_key(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.set()
    monkeypatch.setattr(rank.backend.store.blocking, "batch_get_into", lambda *_: [-600])
    assert rank.get() == [False] * 8
    monkeypatch.setattr(rank.backend.store.blocking, "batch_get_into", lambda *_: [])
    assert rank.get() == [False] * 8


def test_tensors_are_registered_by_their_address(rank: Rank) -> None:
    array = np.zeros(4096, np.uint8)

    class Tensor:
        def data_ptr(self) -> int:
            return array.ctypes.data

        def numel(self) -> int:
            return 1024

        def element_size(self) -> int:
            return 4

        def __len__(self) -> int:
            return 1024

    kept = Tensor()
    pool: Any = SimpleNamespace(get_hybrid_pool_buffer=lambda: [kept, np.zeros(0), None])
    rank.backend.register_mem_host_pool_v2(pool, PoolName.INDEXER)
    buffer = rank.backend._buffers[-1]
    assert (buffer.address, buffer.nbytes) == (array.ctypes.data, 4096)


# --- turns ------------------------------------------------------------------------------------


def test_turns_come_in_order_and_are_few() -> None:
    few = Turns(2)
    inside, most, order = [0], [0], []
    gates = [threading.Event() for _ in range(6)]
    lock = threading.Lock()

    def work(number: int) -> None:
        with few:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                order.append(number)
            gates[number].wait(10)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda n=number: len(order) + len(few._queue) == n + 1)  # type: ignore[misc]
    assert order == [0, 1]
    for number, gate in enumerate(gates):
        gate.set()
        until(lambda n=number: len(order) == min(6, n + 3))  # type: ignore[misc]
    for thread in threads:
        thread.join(10)
    assert order == list(range(6))
    assert most[0] == 2
    assert few._free == 2


def test_nobody_waits_long_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have it may be stuck on a frozen peer."""
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    few = Turns(1)
    stuck, passed = threading.Event(), []

    def hold() -> None:
        with few:
            stuck.wait(10)

    def go() -> None:
        with few:
            passed.append(1)

    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: few._free == 0)
    others = [threading.Thread(target=go) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(10)
    assert len(passed) == 3
    stuck.set()
    holder.join(10)
    assert few._free == 1


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- peers and masters that stand still -------------------------------------------------------


@pytest.mark.parametrize(
    "scene",
    [
        scenes.frozen_master,
        scenes.frozen_peer,
        scenes.write_nothing_late,
        scenes.close_beside_a_stuck_move,
        scenes.leave_without_close,
    ],
)
@pytest.mark.timeout(90)
def test_every_caller_gets_an_outcome_in_time(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=80, MC_TCP_STATUS_TIMEOUT_SEC="1").check(within=60)


def test_the_demo_runs() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.sglang_hicache.demo"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Warmup put failed (attempt 1), ret=-200") == 2
    assert ended.stderr.count("all of them right: True") == 2

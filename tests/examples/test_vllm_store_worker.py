"""vLLM's store worker on aiomooncake, beside the same over the blocking binding."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    StoreConfig,
    WrongLoopError,
)
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.master import segments
from examples.vllm_store_worker import inbox
from examples.vllm_store_worker.blocks import Array, Keys, Places, hit_tokens, told
from examples.vllm_store_worker.inbox import Inbox
from examples.vllm_store_worker.interface import (
    LoadSpec,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
    WorkerOptions,
)
from examples.vllm_store_worker.plain import PlainStoreWorker
from examples.vllm_store_worker.worker import MooncakeStoreWorker
from tests.adversity.processes import run_scene
from tests.examples import vllm_scenes as scenes

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 64
TOKENS = 16  # of a block
SOON = 10.0  # seconds
KINDS = {"ours": MooncakeStoreWorker, "plain": PlainStoreWorker}
Config = Callable[..., StoreConfig]


class Rank:
    """A worker with a cache of four layers, whose pieces have different sizes."""

    def __init__(
        self, kind: Any, config: StoreConfig, blocks: int = BLOCKS, **options: Any
    ) -> None:
        self.layers: dict[str, Array] = {
            "attention": np.zeros((2, blocks, TOKENS, 8), np.float16),
            "wide attention": np.zeros((2, blocks, TOKENS, 96), np.float16),
            "mla": np.zeros((blocks, TOKENS, 6), np.uint8),
            "state": np.zeros((3, blocks, 40), np.uint8),
        }
        self.worker = kind(WorkerOptions("org/model", blocks, TOKENS, **options), config)
        self.worker.register_kv_caches(self.layers)

    @property
    def native(self) -> Any:
        """The binding, by whatever way."""
        return getattr(self.worker.store, "blocking", self.worker.store)

    def pieces(self, block: int) -> list[Array]:
        """List the pieces of a block, in the order in which they are stored."""
        found = []
        for layer in self.layers.values():
            found += [layer[block]] if len(layer) == BLOCKS else list(layer[:, block])
        return found

    def fill(self, blocks: list[int], seed: int) -> None:
        """Write into blocks what the seed says; another content into each."""
        random = np.random.default_rng([seed, self.worker.options.tp_rank])
        for block in blocks:
            for piece in self.pieces(block):
                piece[...] = random.integers(0, 200, piece.shape)

    def content(self, block: int) -> bytes:
        return b"".join(piece.tobytes() for piece in self.pieces(block))

    def step(
        self,
        *requests: ReqMeta,
        finished: set[str] | None = None,
        preempted: set[str] | None = None,
    ) -> tuple[set[str], set[str]]:
        meta = MooncakeStoreConnectorMetadata(list(requests), preempted or set())
        answer: tuple[set[str], set[str]] = self.worker.get_finished(finished or set(), meta)
        return answer

    def save(self, *requests: ReqMeta) -> None:
        """Save, and wait until the blocks could be freed."""
        left = {request.req_id for request in requests}
        saved, _ = self.step(*requests, finished=left)
        deadline = time.monotonic() + SOON
        while left := left - saved:
            assert time.monotonic() < deadline, f"{left} were not saved"
            time.sleep(0.001)
            saved, _ = self.step()

    def load(self, *requests: ReqMeta) -> set[int]:
        """Load, and wait for the end; which blocks failed."""
        left = {request.req_id for request in requests}
        _, loaded = self.step(*requests)
        deadline = time.monotonic() + SOON
        while left := left - loaded:
            assert time.monotonic() < deadline, f"{left} were not loaded"
            time.sleep(0.001)
            _, loaded = self.step()
        failed: set[int] = self.worker.get_block_ids_with_load_errors()
        return failed

    def key(self, block_hash: bytes) -> str:
        keys: Keys = self.worker._keys
        return keys.to_load(to_load("any", [0], [block_hash]))[0].key

    def calls(self, operation: str) -> list[int]:
        """Tell how many keys each call was about since the last time."""
        stats = self.worker.get_kv_connector_stats() or {}
        return [record["num_keys"] for record in stats.get(operation, [])]


def to_save(req_id: str, blocks: list[int], hashes: list[bytes], tokens: int = 0) -> ReqMeta:
    return ReqMeta(req_id, tokens or len(hashes) * TOKENS, blocks, hashes, can_save=True)


def to_load(
    req_id: str, blocks: list[int], hashes: list[bytes], *, cached: int = 0, pool: int | None = None
) -> ReqMeta:
    total = len(hashes) if pool is None else pool
    spec = LoadSpec(cached * TOKENS, total * TOKENS, can_load=True)
    return ReqMeta(req_id, 0, blocks, hashes, load_spec=spec)


Hashes = Callable[[int], list[bytes]]


@pytest.fixture
def hashes() -> Hashes:
    """Make hashes that no other test has."""

    def make(count: int) -> list[bytes]:
        return [uuid.uuid4().bytes for _ in range(count)]

    return make


@pytest.fixture
def req_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Write a file as operators have it, and read it."""

    def make(master: str, segment: str = "64MB") -> StoreConfig:
        path = tmp_path_factory.mktemp("vllm") / "mooncake_config.json"
        path.write_text(json.dumps(settings(master, segment)))
        return StoreConfig.from_file(path, dialect="vllm")

    return make


def settings(master: str, segment: str = "64MB") -> dict[str, object]:
    return {
        "mode": "embedded" if segment != "0" else "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": segment,
        "local_buffer_size": "16MB",
        "protocol": "tcp",
        "device_name": "",
        "enable_offload": False,
    }


@pytest.fixture(scope="module")
def master() -> Iterator[LocalCluster]:
    """A master that evicts nothing, and on which only the workers of this module live."""
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def ranks(kind: Any, master: LocalCluster, config: Config) -> Iterator[list[Rank]]:
    """Two tensor-parallel ranks in one process, each with heads of its own."""
    both = [
        Rank(kind, config(master.address), tp_rank=rank, tp_size=2, load_recv_threads=4)
        for rank in range(2)
    ]
    yield both
    close(both)


@pytest.fixture
def rank(ranks: list[Rank]) -> Rank:
    for one in ranks:
        one.step()
        one.worker.get_block_ids_with_load_errors()
        one.worker.get_kv_connector_stats()
    return ranks[0]


def close(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda one: one.worker.close(), ranks))


# --- saved and loaded -------------------------------------------------------------------------


def test_what_is_saved_is_loaded_again(
    ranks: list[Rank], rank: Rank, hashes: Hashes, req_id: str
) -> None:
    names = hashes(6)
    for one in ranks:
        one.fill(list(range(6)), seed=1)
        one.save(to_save(req_id, list(range(6)), names))
    assert rank.worker.lookup(6 * TOKENS + 1, names) == 6 * TOKENS
    wanted = [[one.content(block) for block in range(6)] for one in ranks]
    assert wanted[0] != wanted[1]
    for one, content in zip(ranks, wanted, strict=True):
        others = [20, 3, 41, 9, 12, 7]
        one.fill(others, seed=2)
        assert one.load(to_load(req_id, others, names)) == set()
        assert [one.content(block) for block in others] == content


def test_a_value_is_the_pieces_one_after_the_other(rank: Rank, hashes: Hashes, req_id: str) -> None:
    names = hashes(1)
    rank.fill([5], seed=3)
    rank.save(to_save(req_id, [5], names))
    assert bytes(rank.native.get(rank.key(names[0]))) == rank.content(5)


def test_look_up_counts_leading_blocks_of_all_ranks(
    ranks: list[Rank], rank: Rank, hashes: Hashes, req_id: str
) -> None:
    names = hashes(6)
    assert rank.worker.lookup(6 * TOKENS, names) == 0
    ranks[0].save(to_save(req_id, list(range(5)), names[:5]))
    assert rank.worker.lookup(6 * TOKENS, names) == 0, "the other rank has nothing"
    ranks[1].save(to_save(req_id, list(range(3)), names[:3]))
    assert [one.worker.lookup(6 * TOKENS, names) for one in ranks] == [3 * TOKENS] * 2
    ranks[1].save(to_save(req_id + "later", list(range(5)), [*names[:2], names[5], *names[3:5]]))
    assert rank.worker.lookup(6 * TOKENS, names) == 5 * TOKENS
    assert rank.worker.lookup(4 * TOKENS, names) == 3 * TOKENS, "the last token is computed"
    assert rank.worker.lookup(4 * TOKENS + 1, names) == 4 * TOKENS
    assert rank.worker.lookup(TOKENS - 1, names) == 0
    assert rank.worker.lookup(6 * TOKENS, []) == 0


def test_only_what_the_engine_lacks_is_loaded(rank: Rank, hashes: Hashes, req_id: str) -> None:
    names = hashes(6)
    rank.fill(list(range(6)), seed=4)
    rank.save(to_save(req_id, list(range(6)), names))
    before = [rank.content(block) for block in range(6)]
    there = [rank.content(block) for block in range(10, 16)]
    assert rank.load(to_load(req_id, list(range(10, 16)), names, cached=2, pool=5)) == set()
    assert [rank.content(block) for block in range(10, 16)] == [*there[:2], *before[2:5], there[5]]
    assert rank.load(to_load(req_id, [1, 2], names[:2], cached=2)) == set(), "nothing to load"


def test_blocks_that_are_not_there_are_told(rank: Rank, hashes: Hashes, req_id: str) -> None:
    names = hashes(6)
    rank.fill([0, 1, 2, 3], seed=5)
    rank.save(to_save(req_id, [0, 1, 2, 3], names[:4]))
    assert rank.load(to_load(req_id, [30, 31, 32, 33, 34, 35], names)) == {34, 35}
    assert [rank.content(30 + i) for i in range(4)] == [rank.content(i) for i in range(4)]
    assert rank.load(to_load(req_id, [30, 31], hashes(2))) == {30, 31}
    assert rank.worker.get_block_ids_with_load_errors() == set(), "told once"


def test_a_save_goes_on_where_the_last_one_ended(rank: Rank, hashes: Hashes, req_id: str) -> None:
    names = hashes(6)
    blocks = list(range(6))
    for tokens in (2 * TOKENS, 2 * TOKENS + 5, 5 * TOKENS, 6 * TOKENS):
        rank.step(to_save(req_id, blocks, names, tokens))
    rank.save(to_save(req_id, blocks, names))
    stats = rank.worker.get_kv_connector_stats()
    put = [record["num_keys"] for record in stats["save_put"]]
    assert sum(put) == 6, f"each block once: {put}"
    asked = [record["num_keys"] for record in stats["save_exists"]]
    assert sum(asked) == 6
    assert all(record["status"] == "ok" for record in stats["save_put"])
    assert sum(record["num_bytes"] for record in stats["save_put"]) == 6 * len(rank.content(0))
    # Another request with the same beginning.
    rank.save(to_save(req_id + "again", blocks, names))
    assert rank.calls("save_put") == []


def test_many_requests_at_once(ranks: list[Rank], hashes: Hashes, req_id: str) -> None:
    """Eight requests, which share their first two blocks, on two ranks side by side."""
    first, blocks = hashes(2), 6
    names = [[*first, *hashes(blocks - 2)] for _ in range(8)]

    def work(one: Rank) -> None:
        saves = []
        for number, hashed in enumerate(names):
            mine = list(range(number * blocks, (number + 1) * blocks))
            one.fill(mine[:2], seed=100)
            one.fill(mine[2:], seed=number)
            saves.append(to_save(f"{req_id}{number}", mine, hashed))
        one.save(*saves)
        content = [one.content(block) for block in range(8 * blocks)]
        one.fill(list(range(8 * blocks)), seed=1000)
        loads = [to_load(save.req_id, save.block_ids, save.block_hashes) for save in saves]
        assert one.load(*loads) == set()
        assert [one.content(block) for block in range(8 * blocks)] == content

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, ranks))
    with ThreadPoolExecutor(8) as pool:
        hits = pool.map(lambda hashed: ranks[0].worker.lookup(blocks * TOKENS + 1, hashed), names)
        assert list(hits) == [blocks * TOKENS] * 8


def test_ranks_with_the_same_heads_share_the_work(
    kind: Any, master: LocalCluster, config: Config, hashes: Hashes, req_id: str
) -> None:
    names, blocks = hashes(5), list(range(5))
    both = [
        Rank(kind, config(master.address), tp_rank=rank, tp_size=2, num_kv_heads=1)
        for rank in range(2)
    ]
    try:
        for one in both:
            for number, block in enumerate(blocks):
                one.pieces(block)[0][...] = number  # the same bytes on both
            one.step(to_save(req_id, blocks, names, 2 * TOKENS))
            one.save(to_save(req_id, blocks, names))
        assert [sum(one.calls("save_put")) for one in both] == [3, 2]
        assert both[1].key(names[0]) == both[0].key(names[0])
        others = list(range(20, 25))
        for one in both:
            assert one.worker.lookup(5 * TOKENS + 1, names) == 5 * TOKENS
            assert one.load(to_load(req_id, others, names)) == set()
            assert [one.content(i) for i in others] == [one.content(i) for i in blocks]
    finally:
        close(both)


def test_blocks_go_to_the_preferred_segment(
    *,
    ranks: list[Rank],
    kind: Any,
    master: LocalCluster,
    config: Config,
    hashes: Hashes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = master.metrics_url.removeprefix("http://").split(":")
    mounted = asyncio.run(segments(place[0], int(place[1]), 5.0))
    names, blocks = hashes(8), list(range(8))
    for number, one in enumerate(ranks):
        segment = one.native.get_hostname()
        option: dict[str, Any] = {"preferred_segment": segment}
        if number:
            monkeypatch.setenv("MOONCAKE_PREFERRED_SEGMENT", segment)
            option = {}
        requester = Rank(kind, config(master.address, "0"), cache_prefix=f"to-{number}", **option)
        try:
            requester.save(to_save("r", blocks, names))
            keys = [requester.key(name) for name in names]
            found = requester.native.batch_get_replica_desc(keys)
        finally:
            close([requester])
        copies = [found[key][0].get_memory_descriptor().buffer_descriptor for key in keys]
        (endpoint,) = {copy.transport_endpoint for copy in copies}
        assert [one.name for one in mounted if one.endpoint == endpoint] == [segment]


def test_a_consumer_saves_nothing(
    *,
    kind: Any,
    ranks: list[Rank],
    master: LocalCluster,
    config: Config,
    hashes: Hashes,
    req_id: str,
) -> None:
    names = hashes(2)
    consumer = Rank(kind, config(master.address, "0"), tp_size=2, kv_role="kv_consumer")
    try:
        assert consumer.step(to_save(req_id, [0, 1], names), finished={req_id}) == (set(), set())
        ranks[0].fill([0, 1], seed=8)
        ranks[0].save(to_save(req_id, [0, 1], names))
        assert consumer.load(to_load(req_id, [4, 5], names)) == set()
        assert consumer.content(5) == ranks[0].content(1)
    finally:
        close([consumer])


def test_what_is_preempted_is_not_waited_for(rank: Rank, hashes: Hashes, req_id: str) -> None:
    names = hashes(2)
    rank.step(to_save(req_id, [0, 1], names))
    assert rank.step(preempted={req_id}, finished={req_id})[0] == set()
    rank.save(to_save(req_id + "other", [0, 1], hashes(2)))
    # It comes back with other blocks.
    rank.fill([8, 9], seed=6)
    fresh = hashes(2)
    rank.save(to_save(req_id, [8, 9], fresh))
    assert rank.load(to_load(req_id, [18, 19], fresh)) == set()
    assert rank.content(19) == rank.content(9)


def test_full_store_holds_saves_back_until_there_is_room(
    kind: Any, config: Config, hashes: Hashes, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as cluster:
        worker = kind(WorkerOptions("m", 48), config(cluster.address, "16MB"))
        rank = Rank.__new__(Rank)
        rank.worker = worker
        worker.register_kv_caches({"large": np.zeros((2, 48, 128 << 10), np.uint8)})
        try:
            fill_up(rank, hashes, caplog)
        finally:
            worker.close()


def fill_up(rank: Rank, hashes: Hashes, caplog: pytest.LogCaptureFixture) -> None:
    blocks = list(range(8))

    def save(req_id: str, names: list[bytes]) -> int:
        """Save, and tell how many blocks the engine was asked for."""
        rank.step(to_save(req_id, blocks, names))
        rank.save(to_save("nothing", blocks, names, tokens=1))  # its turn comes afterwards
        stats = rank.worker.get_kv_connector_stats() or {}
        assert bool(stats.get("save_put")) <= bool(stats.get("save_exists"))
        return sum(record["num_keys"] for record in stats.get("save_exists", []))

    def is_saved(names: list[bytes]) -> bool:
        return bool(rank.worker.lookup(8 * TOKENS + 1, names) == 8 * TOKENS)

    for number in range(100):
        names, full = hashes(8), f"r{number}"
        assert save(full, names) == 8
        if not is_saved(names):
            break
    else:
        pytest.fail("it never was full")
    assert "room" in caplog.text
    assert save(full, names) == 0, "it is not asked again"
    others = hashes(8)
    assert save("another", others) == 8, "another request tries"
    assert not is_saved(others)
    assert save("another", others) == 0
    assert rank.worker.reset()
    assert save(full, names) == 0, "nothing has told that there is room"
    small = hashes(8)
    assert save("a third", small) == 8
    assert is_saved(small)
    assert save(full, names) == 8
    assert is_saved(names)
    assert save("another", others) == 8
    assert is_saved(others)


def test_reset_waits_for_saves_and_removes_everything(
    kind: Any, config: Config, hashes: Hashes
) -> None:
    with LocalCluster() as cluster:
        rank = Rank(kind, config(cluster.address))
        try:
            names = hashes(40)
            rank.step(*(to_save(f"r{i}", [i], [names[i]]) for i in range(40)))
            assert rank.worker.reset()
            assert rank.native.batch_is_exist([rank.key(name) for name in names]) == [0] * 40
        finally:
            close([rank])


def test_configuration_comes_from_the_file_that_the_environment_names(
    kind: Any,
    master: LocalCluster,
    tmp_path: Path,
    hashes: Hashes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings(master.address)))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    worker = kind(WorkerOptions("m", 4))
    try:
        cache = np.arange(4 * 300, dtype=np.uint16).reshape(4, 300)
        worker.register_cross_layers_kv_caches(cache)
        rank = Rank.__new__(Rank)
        rank.worker = worker
        names = hashes(2)
        rank.save(to_save("r", [0, 1], names))
        assert rank.load(to_load("r", [2, 3], names)) == set()
        assert np.array_equal(cache[2:], cache[:2])
    finally:
        worker.close()


# --- ours: what the original gets wrong -------------------------------------------------------


@pytest.fixture
def lone() -> Iterator[Rank]:
    """A worker of ours on the in-memory engine."""
    one = Rank(MooncakeStoreWorker, StoreConfig(f"memory://{uuid.uuid4().hex}"))
    yield one
    one.worker.close()


@pytest.fixture
def engine(lone: Rank) -> InMemoryEngine:
    return InMemoryEngine.named(lone.worker.store.config.master_server_address[len("memory://") :])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_bad_request_hurts_nobody_else(lone: Rank, hashes: Hashes) -> None:
    names = hashes(4)
    lone.fill([0, 1, 2, 3], seed=1)
    lone.save(to_save("good", [0, 1, 2, 3], names), to_save("too few", [4, 5], hashes(3)))
    failed = lone.load(
        to_load("good", [10, 11, 12, 13], names),
        to_load("too few", [20], names),
        to_load("no such block", [21, BLOCKS], names[:2]),
        to_load("good too", [14, 15, 16, 17], names),
    )
    assert failed == {20, 21, BLOCKS}
    assert lone.content(13) == lone.content(17) == lone.content(3)


def test_saves_are_taken_back_when_their_blocks_were_taken_away(
    lone: Rank, engine: InMemoryEngine, hashes: Hashes, gate: threading.Event
) -> None:
    """What the engine read may have been another request's, and would be served for ever."""
    names, others = hashes(2), hashes(2)
    lone.save(to_save("before", [2], names[:1]))
    put = engine.fault("batch_put_from_multi_buffers", hold=gate, times=1)
    lone.step(to_save("preempted", [0, 1], [names[0], others[0]]))
    until(lambda: put.hits)
    lone.step(preempted={"preempted"})
    lone.step(to_save("preempted", [0, 1], [names[0], others[1]]))
    gate.set()
    lone.save(to_save("after", [3], names[1:]))
    there = lone.native.batch_is_exist([lone.key(name) for name in [*names, *others]])
    assert there == [1, 1, 0, 1], "what was there before stays"


def test_a_failure_is_told_with_its_name(
    lone: Rank, engine: InMemoryEngine, hashes: Hashes, caplog: pytest.LogCaptureFixture
) -> None:
    names = hashes(3)
    lone.save(to_save("r", [0, 1, 2], names))
    engine.fault("batch_get_into_multi_buffers", code=-800, times=1)
    assert lone.load(to_load("r", [3, 4, 5], names)) == {3, 4, 5}
    assert "[TP0] request r: 3 of 3 blocks could not be loaded: 3 × -800 TRANSFER_FAIL" in (
        caplog.text
    )
    engine.fault("batch_is_exist", code=-901, times=2)
    assert lone.worker.lookup(3 * TOKENS, names) == 0
    assert "look-up of 2 keys failed: 2 × -901 RPC_TIMEOUT" in caplog.text or (
        "look-up of 3 keys failed: 3 × -901" in caplog.text
    )
    lone.save(to_save("s", [0], hashes(1)))
    assert "request s: 1 of 1 blocks could not be saved: 1 × -901" in caplog.text


def test_a_read_whose_lease_ran_out_is_made_again(
    lone: Rank, engine: InMemoryEngine, hashes: Hashes
) -> None:
    names = hashes(2)
    lone.fill([0, 1], seed=1)
    lone.save(to_save("r", [0, 1], names))
    read = lone.worker._calls._get_into
    codes = [[-707, -800]]

    def late(keys: list[str], *args: Any) -> list[int]:
        answer: list[int] = read(keys, *args)
        return codes.pop() if codes else answer

    lone.worker._calls._get_into = late
    (first, second) = (
        block.block_id for block in lone.worker._keys.to_load(to_load("r", [8, 9], names))
    )
    assert lone.load(to_load("r", [8, 9], names)) == {second}
    assert lone.content(first) == lone.content(0)


def test_closing_answers_everybody(
    lone: Rank, engine: InMemoryEngine, hashes: Hashes, gate: threading.Event
) -> None:
    names = hashes(4)
    lone.save(to_save("r", [0, 1, 2, 3], names))
    get = engine.fault("batch_get_into_multi_buffers", hold=gate, times=1)
    put = engine.fault("batch_put_from_multi_buffers", hold=gate, times=1)
    lone.step(to_load("stuck", [8], names[:1]), to_save("stuck too", [9], hashes(1)))
    until(lambda: get.hits and put.hits)
    lone.step(to_load("queued", [10, 11], names[:2]), to_save("queued too", [12], hashes(1)))
    began = time.monotonic()
    lone.worker.close(timeout=0.3)
    assert time.monotonic() - began < SOON
    everybody = {"stuck too", "queued too"}
    saved, loaded = lone.step(to_load("late", [13], names[:1]), finished=everybody)
    assert loaded == {"queued", "late"}
    assert saved == {"queued too"}
    assert lone.worker.get_block_ids_with_load_errors() == {10, 11, 13}
    assert lone.worker.lookup(4 * TOKENS, names) == 0
    assert not lone.worker.reset(timeout=0.1)
    gate.set()
    until(lambda: "stuck too" in lone.step()[0])


def test_a_thread_that_runs_a_loop_is_refused(lone: Rank, hashes: Hashes) -> None:
    async def main() -> None:
        with pytest.raises(WrongLoopError):
            lone.worker.lookup(100, hashes(2))
        with pytest.raises(WrongLoopError):
            lone.worker.close()
        with pytest.raises(WrongLoopError):
            MooncakeStoreWorker(WorkerOptions("m", 1), StoreConfig("memory://loop"))

    asyncio.run(main())
    assert lone.worker.lookup(100, hashes(2)) == 0


def test_requests_before_the_cache_are_refused() -> None:
    worker = MooncakeStoreWorker(WorkerOptions("m", 4), StoreConfig("memory://early"))
    try:
        with pytest.raises(RuntimeError, match="register_kv_caches"):
            worker.get_finished(set(), MooncakeStoreConnectorMetadata([to_save("r", [0], [b"h"])]))
        with pytest.raises(InvalidArgumentError, match="shape"):
            worker.register_kv_caches({"odd": np.zeros((3, 5, 7))})
        worker.register_kv_caches({"a": np.zeros((4, 8))})
        with pytest.raises(RuntimeError, match="once"):
            worker.register_kv_caches({"b": np.zeros((4, 8))})
    finally:
        worker.close()
        worker.close()


# --- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"num_blocks": 0},
        {"tp_rank": 2, "tp_size": 2},
        {"kv_role": "both"},
        {"preferred_segment": " "},
        {"load_recv_threads": 0},
    ],
)
def test_options_that_can_not_be_meant(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WorkerOptions(**{"model": "m", "num_blocks": 4, **bad})


def test_keys_are_those_of_vllm() -> None:
    keys = Keys(
        WorkerOptions("org/model/", 4, tp_rank=3, tp_size=4, num_kv_heads=2, cache_prefix="p")
    )
    (block,) = keys.to_save(to_save("r", [3, 2], [b"\x01", b"\xab"]), 0)
    assert block.key == "p@model@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0@ab"
    assert block.block_id == 2
    assert keys.of_all_ranks([b"\xab"]) == [
        f"p@model@tp_rank:{shard}@pcp0@dcp0@pp_rank:0@group:0@ab" for shard in (0, 1)
    ]
    assert keys.leading([1, 1, 1, 0, 1, 1]) == 1
    assert keys.leading([1, 1, 1, 1]) == 2
    assert hit_tokens(2, TOKENS, 2 * TOKENS) == TOKENS


def test_layers_that_share_memory_are_there_once() -> None:
    one, two = np.zeros((2, 8, 10), np.uint8), np.zeros((8, 3), np.uint8)
    places = Places({"a": one, "b": two, "c": one}, 8)
    assert places.sizes == [10, 10, 3]
    assert [region.nbytes for region in places.regions] == [160, 24]
    first, second = one.ctypes.data, two.ctypes.data
    assert places.of([0, 7]) == [
        [first, first + 80, second],
        [first + 70, first + 150, second + 21],
    ]


def test_codes_are_told_by_name() -> None:
    assert (
        told([0, -704, -200, -704, 1]) == "1 × -200 NO_AVAILABLE_HANDLE, 2 × -704 OBJECT_NOT_FOUND"
    )


def test_inbox_hands_out_what_waits_to_one_thread() -> None:
    box: Inbox[int] = Inbox()
    box.put([1])
    first = box.take()
    box.put([2, 3])
    box.put([4])
    assert first == [1]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(box.take)
        assert not second.done()
        box.done(first)
        assert second.result(SOON) == [2, 3, 4]
    assert not box.join(0)
    box.done([2, 3, 4])
    assert box.join(0)
    box.put([5])
    assert box.close() == [5]
    assert box.take() == []
    assert not box.put([6])
    assert box.join(0)


def test_inbox_lets_another_thread_in_beside_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "PATIENCE", 0.05)
    box: Inbox[int] = Inbox()
    box.put([1])
    stuck = box.take()
    box.put([2])
    assert box.take() == [2], "after a while"
    box.keep_apart(60)
    box.done([2])
    box.put([3, 4])
    assert box.take() == [3]
    box.done([3])
    box.done(stuck)
    assert box.take() == [4]


# --- ours: peers and masters that stand still ---------------------------------------------------


@pytest.mark.parametrize("scene", [scenes.frozen_peer, scenes.frozen_master, scenes.peer_that_dies])
@pytest.mark.timeout(120)
def test_every_request_ends_and_the_loop_stays_free(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=110).check(within=100)


def test_the_program_in_its_readme_runs() -> None:
    readme = (ROOT / "examples" / "vllm_store_worker" / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "32 set()\n"), done.stderr

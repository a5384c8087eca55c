"""What a process exports to Prometheus: of stores, of connects without one, and of the past."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from aiomooncake import (
    LocalCluster,
    MooncakeError,
    Store,
    StoreClosedError,
    WarmupError,
    WarmupPolicy,
    adopt,
    connect,
    connect_ranks,
)
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.errors import CODES
from aiomooncake.observe.roll import ROLL
from aiomooncake.prometheus import METRICS, StoreCollector
from tests.conftest import Hold, OpenStore

MB = 1 << 20
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

VERBS = {
    "get", "exists", "size", "replicas", "put", "upsert", "remove", "get_many", "exists_many",
    "replicas_many", "remove_many", "put_parts", "put_from", "get_into", "get_view",
    "remove_by_regex", "remove_all", "owners", "allocate", "register", "unregister", "setup",
    "tear-down",
}  # fmt: skip
METHODS = {name for name in dir(InMemoryStore) if not name.startswith("_")}


@pytest.fixture(autouse=True)
def own_roll() -> Iterator[None]:
    """Let each test see its own stores only."""
    ROLL.forget()
    yield
    ROLL.forget()


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(StoreCollector())
    return registry


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("scraped")


class Scrape:
    """One scrape, through the text that Prometheus reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.text = generate_latest(registry).decode()
        self.samples: Samples = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                place = sample.name, frozenset(sample.labels.items())
                assert place not in self.samples, f"{place} is there twice"
                self.samples[place] = sample.value

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((f"aiomooncake_{name}", frozenset(labels.items())))

    def of(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        name = f"aiomooncake_{name}"
        return {labels: value for (one, labels), value in self.samples.items() if one == name}

    def values(self, label: str) -> set[str]:
        return {value for _, labels in self.samples for one, value in labels if one == label}


# --- what is exported -------------------------------------------------------------------------


async def test_one_line_shows_every_store(
    registry: CollectorRegistry, engine: InMemoryEngine
) -> None:
    async with connect_ranks("memory://scraped", 2, engine=engine, warmup=True) as group:
        await asyncio.gather(*(group[0].put(f"key{i}", b"value") for i in range(20)))
        scrape = Scrape(registry)
        for rank in ("0", "1"):
            assert scrape("warm", rank=rank) == 1
            assert scrape("stores", rank=rank, state="ready") == 1
            assert scrape("connects_total", rank=rank, outcome="opened") == 1
            assert scrape("warmups_total", rank=rank, outcome="ready") == 1
            ready = scrape("ready_after_seconds", rank=rank)
            warming = scrape("warmup_duration_seconds", rank=rank)
            assert warming is not None
            assert ready is not None
            assert 0 < warming < ready < 10
        assert scrape("written_bytes_total", rank="0") == 100
        assert scrape("batch_keys_sum", rank="0", verb="put") == 20
        stats = group[0].stats()
        jobs = stats.by_verb["put"].seconds
        assert scrape("call_duration_seconds_count", rank="0", verb="put") == jobs.count
        assert scrape("call_duration_seconds_sum", rank="0", verb="put") == jobs.total
        assert scrape("call_duration_seconds_bucket", rank="0", verb="put", le="+Inf") == jobs.count
        assert (
            scrape(
                "store_info",
                rank="1",
                host=group[1].hostname,
                master="memory://scraped",
                protocol="tcp",
            )
            == 1
        )
        (build,) = scrape.of("build_info")
        assert {name for name, _ in build} == {"version", "engine", "engine_version", "python"}


async def test_a_scrape_counts_nothing_and_can_be_made_on_a_loop(
    registry: CollectorRegistry, engine: InMemoryEngine, open_store: OpenStore
) -> None:
    store = await open_store("memory://scraped", engine=engine)
    before = store.stats()
    first = Scrape(registry).samples
    second = Scrape(registry).samples
    assert first == second
    assert store.stats() == before


async def test_adopted_stores_and_stores_without_a_rank(
    registry: CollectorRegistry, engine: InMemoryEngine, open_store: OpenStore
) -> None:
    store = await open_store("memory://scraped", engine=engine)
    async with adopt(store._client.native_object) as adopted:
        await adopted.put("key", b"value")
        scrape = Scrape(registry)
        assert scrape("stores", rank="", state="ready") == 2
        assert scrape("written_bytes_total", rank="") == 5
        assert scrape("warm", rank="") is None  # nobody asked for that
        hosts = {dict(labels)["master"] for labels in scrape.of("store_info")}
        assert hosts == {"", "memory://scraped"}


def test_names_follow_the_conventions() -> None:
    base_units = ("_seconds", "_bytes", "_keys", "_timestamp_seconds")
    for spec in METRICS:
        assert re.fullmatch(r"aiomooncake_[a-z_]+", spec.name)
        assert "total" not in spec.name
        assert "rank" in spec.labels or spec.name == "aiomooncake_build"
        assert spec.help.endswith(".")
        if spec.kind == "histogram":
            assert spec.name.endswith(base_units)
    assert len({spec.name for spec in METRICS}) == len(METRICS)


def test_what_is_described_is_what_comes(registry: CollectorRegistry) -> None:
    collector = StoreCollector()
    described = [family.name for family in collector.describe()]
    assert described == [family.name for family in collector.collect()]
    assert described == [spec.name for spec in METRICS]


# --- labels are bounded -----------------------------------------------------------------------


async def use(store: Store) -> None:
    """Call all verbs, with some failures."""
    await asyncio.gather(*(store.put(f"k{i}", b"v") for i in range(5)), store.upsert("u", b"v"))
    await asyncio.gather(store.get("k1"), store.exists("k1"), store.size("k1"))
    await store.put_many({"a": b"1", "large": b"x" * (3 * MB)})
    await store.put_parts("parts", b"x" * MB, b"y" * MB)
    await store.get_many(["a", "large", "none"])
    await store.exists_many(["a"])
    await store.replicas("a")
    await store.replicas_many(["a", "u"])
    async with store.view("a"), store.view_many(["a", "u"]), store.allocate("1MiB") as memory:
        await store.put_from("m", memory[0:10])
        await store.get_into("m", memory[0:10])
        await store.put_many_from({"n": memory[0:10], "o": memory[10:20]})
        await store.get_many_into({"n": memory[0:10]})
        await store.put_from("p", [memory[0:10], memory[20:30]])
    with pytest.raises(MooncakeError):
        await store.remove("a")
    await store.remove_many(["none"])
    await store.remove_by_regex("^none$")
    await store.engine.batch_is_exist(["a", "b"])
    await asyncio.to_thread(store.blocking.is_exist, "a")
    await store.warmup()
    await store.remove_all(force=True)


async def test_labels_are_of_closed_sets(
    registry: CollectorRegistry, engine: InMemoryEngine
) -> None:
    async with connect("memory://scraped", engine=engine, rank=1) as store:
        await use(store)
        scrape = Scrape(registry)
    with pytest.raises(StoreClosedError):
        await store.get("key")
    closed = Scrape(registry)
    assert scrape.values("verb") <= VERBS | METHODS
    assert {"get", "put_from", "get_many", "batch_is_exist"} <= scrape.values("verb")
    assert scrape.values("code") == {"OBJECT_HAS_LEASE"}
    assert closed.values("code") == {"OBJECT_HAS_LEASE", "STORE_CLOSED"}
    assert {info.name for info in CODES.values()} >= scrape.values("code")
    assert scrape.values("rank") == {"1"}
    assert "large" not in scrape.text


# --- stores come and go -----------------------------------------------------------------------


async def test_counters_never_go_backwards(
    registry: CollectorRegistry, engine: InMemoryEngine
) -> None:
    """A store closes, another one of the same rank is opened: its state goes, its counts stay."""
    last: Samples = {}
    for life in range(1, 4):
        async with connect("memory://scraped", engine=engine, rank=7, warmup=True) as store:
            await asyncio.gather(*(store.put(f"{life}-{i}", b"value") for i in range(5)))
            open_now = Scrape(registry)
            assert open_now("stores", rank="7", state="ready") == 1
        closed = Scrape(registry)
        assert not closed.of("stores")
        assert closed("warm", rank="7") is None
        assert closed("calls_in_flight", rank="7") is None
        for scrape in (open_now, closed):
            for place, value in scrape.samples.items():
                if place[0].endswith(("_total", "_count", "_sum", "_bucket")):
                    assert value >= last.get(place, 0), place
            last |= scrape.samples
        assert closed("written_bytes_total", rank="7") == life * 25
        assert closed("connects_total", rank="7", outcome="opened") == life
        assert closed("warmups_total", rank="7", outcome="ready") == life


async def test_counters_grow_while_stores_come_and_go(
    registry: CollectorRegistry, engine: InMemoryEngine
) -> None:
    stop = threading.Event()
    seen: list[float] = []

    def scrape() -> None:
        while not stop.is_set():
            seen.append(Scrape(registry)("written_bytes_total", rank="9") or 0)

    scraping = asyncio.create_task(asyncio.to_thread(scrape))
    for life in range(8):
        async with connect("memory://scraped", engine=engine, rank=9) as store:
            await asyncio.gather(*(store.put(f"{life}-{i}", b"v") for i in range(20)))
        del store
    stop.set()
    await scraping
    assert seen == sorted(seen)
    assert Scrape(registry)("written_bytes_total", rank="9") == 160


async def test_two_stores_of_one_rank_are_one(
    registry: CollectorRegistry, engine: InMemoryEngine, open_store: OpenStore
) -> None:
    stores = [await open_store("memory://scraped", engine=engine, rank=2) for _ in range(2)]
    await stores[0].put("a", b"12345")
    await stores[1].put("b", b"123")
    await stores[1].warmup()
    scrape = Scrape(registry)
    assert scrape("stores", rank="2", state="ready") == 2
    assert scrape("written_bytes_total", rank="2") == 8
    assert len(scrape.of("store_info")) == 2


# --- stores that never got ready --------------------------------------------------------------


async def test_a_connect_that_waits_has_metrics(registry: CollectorRegistry) -> None:
    connecting = asyncio.ensure_future(connect("127.0.0.1:1", rank=4, timeout=0.4))
    await asyncio.sleep(0)
    while not ROLL.ranks()["4"].attempts:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.001)
    scrape = Scrape(registry)
    assert scrape("connects_waiting", rank="4") == 1
    assert 0 < (scrape("connect_waiting_seconds", rank="4") or 0) < 10
    assert (scrape("connect_attempts_total", rank="4") or 0) >= 1
    assert scrape("warm", rank="4") == 0
    assert not scrape.of("stores")
    with pytest.raises(MooncakeError):
        await connecting
    after = Scrape(registry)
    assert after("connects_waiting", rank="4") == 0
    assert after("connects_total", rank="4", outcome="master-unreachable") == 1
    assert after("warm", rank="4") == 0
    waited = scrape("connect_attempts_total", rank="4") or 0
    assert (after("connect_attempts_total", rank="4") or 0) >= waited


async def test_a_warm_up_that_never_ends_well_has_metrics(
    registry: CollectorRegistry, engine: InMemoryEngine, hold: Hold
) -> None:
    engine.fault("put", code=-200, times=2)
    engine.fault("put", hold=hold)
    policy = WarmupPolicy(initial_delay=0.01, max_delay=0.01)
    connecting = asyncio.ensure_future(
        connect("memory://scraped", engine=engine, rank=6, warmup=policy)
    )
    await hold()
    scrape = Scrape(registry)
    assert scrape("warm", rank="6") == 0
    assert scrape("warmups_running", rank="6") == 1
    assert scrape("warmup_attempts_total", rank="6") == 2
    failed = scrape("warmup_failed_attempts_total", rank="6", code="NO_AVAILABLE_HANDLE")
    assert failed == 2
    assert scrape("ready_after_seconds", rank="6") is None
    hold.set()
    store = await connecting
    assert Scrape(registry)("warm", rank="6") == 1
    await store.aclose()


async def test_a_warm_up_that_gave_up_is_counted_by_its_diagnosis(
    registry: CollectorRegistry, engine: InMemoryEngine
) -> None:
    engine.fault("put", code=-800)
    policy = WarmupPolicy(max_attempts=3, initial_delay=0.01, max_delay=0.01)
    with pytest.raises(WarmupError) as failed:
        await connect("memory://scraped", engine=engine, rank=8, warmup=policy)
    assert failed.value.diagnosis is not None
    kind = str(failed.value.diagnosis.kind)
    scrape = Scrape(registry)
    assert scrape("warmups_total", rank="8", outcome=kind) == 1
    assert scrape("connects_total", rank="8", outcome=kind) == 1
    assert scrape("warmup_attempts_total", rank="8") == 3
    assert scrape("warm", rank="8") == 0


# --- the real engine --------------------------------------------------------------------------


async def test_a_real_store_is_scraped_over_http(
    registry: CollectorRegistry, cluster: LocalCluster, open_store: OpenStore
) -> None:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        store: Any = await open_store(
            cluster.address, rank=3, global_segment_size=16 * MB, warmup=True
        )
        await asyncio.gather(*(store.put(f"scraped-{i}", b"value") for i in range(10)))
        url = f"http://127.0.0.1:{server.server_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(read)
        assert 'aiomooncake_warm{rank="3"} 1.0' in text
        assert 'aiomooncake_batch_keys_sum{rank="3",verb="put"} 10.0' in text
        assert 'aiomooncake_stores{rank="3",state="ready"} 1.0' in text
        assert f'master="{cluster.address}"' in text
        await store.remove_by_regex("^scraped-", force=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_odd_rank_does_not_break_the_scrape() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from aiomooncake import connect
    from aiomooncake.prometheus import StoreCollector

    async def scraped() -> bytes:
        registry = CollectorRegistry()
        registry.register(StoreCollector())
        async with connect("memory://odd-rank", rank="gpu\udce4"):
            return await asyncio.to_thread(generate_latest, registry)

    assert b'rank="gpu\\\\udce4"' in asyncio.run(scraped())

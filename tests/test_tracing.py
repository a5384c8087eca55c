"""Spans of verbs and batches: whose children they are, what they link, what they say and don't."""

from __future__ import annotations

import asyncio
import gc
import inspect
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from aiomooncake import (
    LocalCluster,
    MooncakeError,
    ObjectNotFoundError,
    ReplicateConfig,
    Store,
    StoreClosedError,
    WrongLoopError,
    adopt,
    connect,
    connect_ranks,
)
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.hedging import GetLane
from aiomooncake.tracing import _OPENINGS, _VERBS, instrument
from tests.conftest import Hold, OpenStore

MB = 1 << 20
SECRET = "a-secret-key"


class Traced:
    """A store that is traced, and the spans that it made."""

    def __init__(self, store: Store, *, sampled: bool = True) -> None:
        self.store = store
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider() if sampled else TracerProvider(sampler=ALWAYS_OFF)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("a test")
        instrument(store, tracer_provider=self.provider)

    def spans(self, name: str | None = None, kind: SpanKind | None = None) -> list[ReadableSpan]:
        return [
            span
            for span in self.exporter.get_finished_spans()
            if name in (None, span.name) and kind in (None, span.kind)
        ]

    def one(self, name: str, kind: SpanKind | None = None) -> ReadableSpan:
        (span,) = self.spans(name, kind)
        return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def links(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def number(span: ReadableSpan) -> int:
    context = span.context
    assert context is not None
    return int(context.span_id)


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("traced")


@pytest.fixture
async def store(engine: InMemoryEngine, open_store: OpenStore) -> Store:
    return await open_store("memory://traced", engine=engine, rank=3)


@pytest.fixture
def traced(store: Store) -> Traced:
    return Traced(store)


# --- verbs ------------------------------------------------------------------------------------


async def test_a_verb_is_a_child_of_the_callers_span(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("request") as request:
        await traced.store.put("key", b"value")
    verb = traced.one("put", SpanKind.CLIENT)
    assert parent(verb) == request.get_span_context().span_id
    assert attributes(verb) == {
        "db.system.name": "mooncake",
        "db.operation.name": "put",
        "aiomooncake.rank": "3",
    }
    assert verb.status.status_code is StatusCode.UNSET
    scope = verb.instrumentation_scope
    assert scope is not None
    assert scope.name == "aiomooncake"


async def test_every_public_verb_is_a_span(traced: Traced) -> None:
    store = traced.store
    await store.put_many({"a": b"1", "b": b"2"})
    await store.put("a", b"another")
    await store.upsert("a", b"3")
    await store.get_many(["a", "b"])
    await store.exists_many(["a", "b", "c"])
    await store.replicas_many(["a"])
    await store.remove_many(["c"])
    await store.put_parts("p", b"1", b"2")
    async with store.view("a") as view, store.view_many(["a", "b"]), store.allocate(4096) as memory:
        assert view is not None
        assert bytes(view) == b"3"
        await store.put_many_from({"m": memory[0:8]})
        await store.get_many_into({"m": memory[0:8]})
        await store.put_from("n", memory[0:8])
        await store.get_into("n", memory[0:8])
    async with store.register(bytearray(4096)):
        pass
    for ask in (store.exists, store.size, store.get, store.replicas, store.remove):
        await ask("none")
    async with store.mount_segment(4096):
        await store.copy("a", store.hostname)
    with pytest.raises(ObjectNotFoundError):
        await store.move("none", "here", "there")
    await store.put_tensors({"t": np.zeros(4), "u": np.ones(4)})
    assert await store.get_tensor("u", like="numpy") is not None
    await store.remove_by_regex("none")
    await store.warmup()
    await store.remove_all(force=True)
    public = {
        name
        for name in dir(Store)
        if not name.startswith("_")
        and callable(getattr(Store, name))
        # A session's calls are jobs of its caller's span, as long as its block.
        and name not in {"health", "stats", "aclose", "put_session", "get_session"}
    }
    assert public == {*_VERBS, *_OPENINGS}
    seen = {span.name for span in traced.spans(kind=SpanKind.CLIENT)}
    assert seen >= {name for name in public if "tensor" not in name}
    assert {"put_tensors", "get_tensor"} < seen <= public
    sizes = {
        span.name: attributes(span).get("db.operation.batch.size")
        for span in traced.spans(kind=SpanKind.CLIENT)
    }
    assert sizes["put_many"] == sizes["put_tensors"] == sizes["get_many"] == sizes["view_many"] == 2
    assert sizes["exists_many"] == 3
    assert sizes["put_many_from"] is None  # one is no batch
    assert sizes["get"] is None


async def test_signatures_and_types_stay_what_they_are(traced: Traced, store: Store) -> None:
    assert isinstance(store, Store)
    assert type(store).__name__ == "Store"
    assert inspect.signature(store.get) == inspect.signature(Store.get.__get__(store))
    assert inspect.iscoroutinefunction(store.put)
    assert repr(store).startswith("<Store TP3 ")


async def test_errors_are_named_without_their_text(traced: Traced) -> None:
    store = traced.store
    await store.put(SECRET, b"value")
    await store.get(SECRET)
    with pytest.raises(MooncakeError, match=SECRET):
        await store.remove(SECRET)
    verb = traced.one("remove", SpanKind.CLIENT)
    assert attributes(verb)["error.type"] == "OBJECT_HAS_LEASE"
    assert attributes(verb)["db.response.status_code"] == "-706"
    assert verb.status.status_code is StatusCode.ERROR
    assert SECRET not in "".join(span.to_json() for span in traced.spans())
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await store.exists("key")
    verb = traced.one("exists", SpanKind.CLIENT)
    assert attributes(verb)["error.type"] == "StoreClosedError"
    batch = traced.one("exists", SpanKind.INTERNAL)
    assert batch.status.status_code is StatusCode.ERROR


async def test_a_wrong_argument_of_a_view_is_told_before_there_is_a_span(traced: Traced) -> None:
    with pytest.raises(MooncakeError):
        traced.store.view("")
    assert not traced.spans()


async def test_cancelled_verbs(traced: Traced, engine: InMemoryEngine, hold: Hold) -> None:
    engine.fault("is_exist", hold=hold)
    task = asyncio.create_task(traced.store.exists("key"))
    await hold()
    task.cancel()
    await asyncio.wait([task])
    verb = traced.one("exists", SpanKind.CLIENT)
    assert attributes(verb)["error.type"] == "CancelledError"
    assert verb.status.status_code is StatusCode.UNSET
    assert not traced.spans(kind=SpanKind.INTERNAL)  # the batch is under way
    hold.set()
    while not traced.spans(kind=SpanKind.INTERNAL):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.001)


# --- batches ----------------------------------------------------------------------------------


async def test_a_batch_is_linked_with_the_verbs_whose_keys_it_carries(traced: Traced) -> None:
    await asyncio.gather(*(traced.store.put(f"key{i}", b"value") for i in range(3)))
    verbs = traced.spans("put", SpanKind.CLIENT)
    batch = traced.one("BATCH put", SpanKind.INTERNAL)
    assert links(batch) == {number(verb) for verb in verbs}
    assert parent(batch) == number(verbs[0])
    assert all(links(verb) == {number(batch)} for verb in verbs)
    assert attributes(batch)["db.operation.batch.size"] == 3
    assert attributes(batch)["db.operation.name"] == "BATCH put"


async def test_reads_that_share_an_answer_share_the_batch(traced: Traced) -> None:
    await traced.store.put("key", b"value")
    await asyncio.gather(*(traced.store.get("key") for _ in range(4)))
    batch = traced.one("get", SpanKind.INTERNAL)
    assert links(batch) == {number(verb) for verb in traced.spans("get", SpanKind.CLIENT)}
    assert "db.operation.batch.size" not in attributes(batch)


async def test_a_verb_of_many_keys_is_linked_once(traced: Traced) -> None:
    await traced.store.put_many({"a": b"1", "b": b"2"})
    batch = traced.one("BATCH put", SpanKind.INTERNAL)
    assert len(batch.links) == 1
    assert links(batch) == {number(traced.one("put_many", SpanKind.CLIENT))}
    assert attributes(batch)["db.operation.batch.size"] == 2


async def test_verbs_of_different_traces_are_linked(traced: Traced) -> None:
    async def request(key: str) -> None:
        with traced.tracer.start_as_current_span(key):
            await traced.store.put(key, b"value")

    await asyncio.gather(request("a"), request("b"))
    batch = traced.one("BATCH put", SpanKind.INTERNAL)
    assert len({link.context.trace_id for link in batch.links}) == 2


async def test_large_values_and_raw_calls_are_jobs_of_their_own(traced: Traced) -> None:
    store = traced.store
    await store.put("large", b"x" * (3 * MB))
    job = traced.one("put", SpanKind.INTERNAL)
    assert parent(job) == number(traced.one("put", SpanKind.CLIENT))
    await store.get("large")
    verb = traced.one("get", SpanKind.CLIENT)
    assert {parent(span) for span in traced.spans("get", SpanKind.INTERNAL)} == {number(verb)}
    await store.engine.is_exist("large")
    assert parent(traced.one("is_exist")) is None


async def test_a_batch_that_fails_as_a_whole_says_so(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a test says so")

    monkeypatch.setattr(traced.store._client.native_object, "is_exist", fail)
    with pytest.raises(RuntimeError):
        await traced.store.exists("key")
    for kind in (SpanKind.CLIENT, SpanKind.INTERNAL):
        span = traced.one("exists", kind)
        assert attributes(span)["error.type"] == "RuntimeError"
        assert span.status.description == "RuntimeError"


async def test_reads_made_a_second_time_belong_to_no_verb(
    engine: InMemoryEngine, open_store: OpenStore, hold: Hold
) -> None:
    stores = [await open_store("memory://traced", engine=engine, rank=i) for i in range(2)]
    for i, peer in enumerate(stores):
        await peer.put(f"{i}", b"value", config=_on(peer))
    traced = Traced(stores[0])
    engine.fault("batch_get_into", hold=hold, times=1)
    await asyncio.gather(*(stores[0].get(f"{i}") for i in range(2)))
    assert parent(traced.one("owners")) is None
    assert {parent(span) for span in traced.spans("get", SpanKind.INTERNAL)} == {None}
    hold.set()


# --- on and off -------------------------------------------------------------------------------


async def test_what_is_not_sampled_has_no_batches(
    engine: InMemoryEngine, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store("memory://traced", engine=engine)
    traced = Traced(store, sampled=False)
    asked: list[object] = []
    monkeypatch.setattr(store._tracing, "batch", asked.append)  # type: ignore[attr-defined]
    await asyncio.gather(*(store.put(f"key{i}", b"value") for i in range(3)))
    assert not asked
    assert not traced.spans()


async def test_a_store_that_is_not_instrumented_is_what_it_was(
    engine: InMemoryEngine, store: Store, open_store: OpenStore
) -> None:
    other = await open_store("memory://traced", engine=engine)
    traced = Traced(store)
    await asyncio.gather(store.put("a", b"1"), other.put("b", b"2"))
    assert type(other) is Store
    assert type(other._client) is EngineClient
    assert type(other._merging().gets) is GetLane
    assert len(traced.spans("put", SpanKind.CLIENT)) == 1


async def test_instrumenting_twice_and_in_mid_use(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    engine.fault("put_from", hold=hold, times=1)
    early = asyncio.create_task(store.put("key", b"early"))
    await hold()
    traced = Traced(store)
    instrument(store)
    late = asyncio.create_task(store.put("key", b"late"))
    await asyncio.sleep(0)
    hold.set()
    await asyncio.gather(early, late)
    assert await store.get("key") == b"early"  # turns were kept
    assert len(traced.spans("put", SpanKind.CLIENT)) == 1
    assert len(traced.spans("put", SpanKind.INTERNAL)) == 1


async def test_groups_and_adopted_stores(engine: InMemoryEngine, store: Store) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    adopting = adopt(store._client.native_object, rank="mine")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        connect_ranks("memory://traced", 2, engine=engine) as group,
        adopting as adopted,
    ):
        instrument(group, tracer_provider=provider)
        instrument(adopted, tracer_provider=provider)
        for one in (*group, adopted):
            await one.exists("key")
        assert await adopting is adopted
    ranks = [
        attributes(span)["aiomooncake.rank"]
        for span in exporter.get_finished_spans()
        if span.kind is SpanKind.CLIENT
    ]
    assert ranks == ["0", "1", "mine"]


async def test_a_traced_store_that_is_dropped_warns_at_once(engine: InMemoryEngine) -> None:
    """Nothing of the tracing holds the store."""
    store = await connect("memory://traced", engine=engine)
    Traced(store)
    await store.put("key", b"value")
    gc.collect()
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="unclosed"):
            del store
    finally:
        gc.enable()


async def test_a_traced_store_moves_to_another_loop(traced: Traced) -> None:
    await traced.store.put("key", b"value")

    def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            asyncio.run(traced.store.get("key"))

    await asyncio.to_thread(elsewhere)
    assert attributes(traced.one("get"))["error.type"] == "WrongLoopError"


async def test_the_real_engine_has_an_address(
    values_cluster: LocalCluster, open_store: OpenStore, key: str
) -> None:
    traced = Traced(await open_store(values_cluster.address, global_segment_size=0))
    store = traced.store
    assert await store.get(key) is None
    verb = traced.one(f"get {values_cluster.address}", SpanKind.CLIENT)
    host, _, port = values_cluster.address.partition(":")
    assert attributes(verb)["server.address"] == host
    assert attributes(verb)["server.port"] == int(port)


@pytest.fixture
def key() -> str:
    return "traced-key"


def _on(store: Store) -> Any:
    return ReplicateConfig(preferred_segments=[store.hostname])

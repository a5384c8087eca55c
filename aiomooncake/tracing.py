"""Spans of a store's verbs and batches, for OpenTelemetry (extra ``otel``).

    from aiomooncake.tracing import instrument

    instrument(store)    # or a group of ranks

From then on each verb is a span, a child of the caller's; and so is each batch in which keys of
several verbs travel, a child of the first of them and linked with all of them, both ways. Names and
attributes are those of OpenTelemetry's conventions for databases. Keys and values are never among
them, nor in what is told of an error. A store that is not instrumented pays nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiomooncake._extras import missing_extra
from aiomooncake._version import __version__
from aiomooncake.batching import Batching
from aiomooncake.config import split_address
from aiomooncake.engine.client import EngineClient
from aiomooncake.errors import ConfigError, MooncakeError
from aiomooncake.lanes import Batch, Lane, Waiting
from aiomooncake.opening import Opening
from aiomooncake.ranks import RankGroup
from aiomooncake.store import Store

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
except ModuleNotFoundError as exc:
    raise missing_extra(exc, __name__, "otel") from exc

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from aiomooncake.engine.workers import Lane as Threads

__all__ = ["instrument"]

T = TypeVar("T")

_VERBS: Final = (
    "get", "exists", "size", "replicas", "put", "upsert", "remove", "get_many", "exists_many",
    "replicas_many", "remove_many", "put_many", "put_parts", "put_from", "get_into",
    "put_many_from", "get_many_into", "remove_by_regex", "remove_all", "warmup", "copy", "move",
    "put_tensor", "upsert_tensor", "put_tensors", "put_tensor_shard", "get_tensor", "get_tensors",
    "get_tensor_shard", "put_tensor_from", "put_tensors_from", "get_tensor_into",
    "get_tensors_into", "save_tensors", "load_tensors",
)  # fmt: skip
_OPENINGS: Final = ("view", "view_many", "allocate", "register", "mount_segment")
_MANY: Final = (
    "_many", "_many_from", "_many_into", "put_tensors", "get_tensors", "_tensors_from",
    "_tensors_into",
)  # fmt: skip
"""How verbs end whose first argument has many keys."""


def instrument(store: Store | RankGroup, *, tracer_provider: TracerProvider | None = None) -> None:
    """Trace a store, or the stores of a group; doing it twice changes nothing.

    What goes through ``store.engine`` is traced as a job; ``store.blocking`` is not.

    Args:
        store: The store or the group.
        tracer_provider: Where spans go; OpenTelemetry's global one unless given.
    """
    provider = tracer_provider or trace.get_tracer_provider()
    tracer = provider.get_tracer("aiomooncake", __version__)
    for one in store if isinstance(store, RankGroup) else (store,):
        if isinstance(one._client, _TracedClient):  # noqa: SLF001  # it is ours
            continue
        tracing = _Tracing(tracer, one)
        client = one._client  # noqa: SLF001  # it is ours
        _turn(client, _TracedClient, tracing)
        client.on_lane = tracing.trace_lane
        batching = one._batching  # noqa: SLF001  # it is ours
        if batching is not None:
            for lane in _lanes_of(batching):
                tracing.trace_lane(lane)
        kind: Any = type(one)
        _turn(one, _traced_store(kind), tracing)


class _Tracing:
    """How spans of one store are made."""

    def __init__(self, tracer: Tracer, store: Store) -> None:
        self.tracer = tracer
        self._target = ""
        self._common: dict[str, AttributeValue] = {"db.system.name": "mooncake"}
        if store.rank is not None:
            self._common["aiomooncake.rank"] = str(store.rank)
        config = store.config
        if config is not None:
            address = config.client_server_address or config.master_server_address
            try:
                host, port = split_address(address, field="master_server_address")
            except ConfigError:
                return  # etcd:// and the like, and the in-memory engine
            self._common |= {"server.address": host, "server.port": port}
            self._target = f" {address}"

    def attributes(self, operation: str, keys: int) -> dict[str, AttributeValue]:
        attributes = self._common | {"db.operation.name": operation}
        if keys > 1:  # the conventions call less than two no batch
            attributes["db.operation.batch.size"] = keys
        return attributes

    @contextmanager
    def span(self, operation: str, kind: SpanKind, keys: int = 0) -> Iterator[Span]:
        """Make a span the current one for as long as something is done."""
        with self.tracer.start_as_current_span(
            operation + self._target,
            kind=kind,
            attributes=self.attributes(operation, keys),
            record_exception=False,  # its text names keys
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as exc:
                tell_error(span, exc)
                raise

    def batch(self, operation: str, keys: int, spans: Sequence[Span]) -> Span:
        """Begin the span of a batch, linked with those of the verbs whose keys it carries."""
        span = self.tracer.start_span(
            operation + self._target,
            context=trace.set_span_in_context(spans[0], otel_context.Context()),
            kind=SpanKind.INTERNAL,
            attributes=self.attributes(operation, keys),
            links=[Link(each.get_span_context()) for each in spans],
        )
        for each in spans:
            each.add_link(span.get_span_context())
        return span

    def trace_lane(self, lane: Lane) -> None:
        """Trace the batches of a lane."""
        kind: Any = type(lane)
        _turn(lane, _traced_lane(kind), self)
        lane.__dict__["_spans"] = {}


def tell_error(span: Span, error: BaseException) -> None:
    """Name an error, without its text: that has keys in it."""
    name = type(error).__name__
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        span.set_attribute("error.type", name)  # whoever cancels does not call it an error
        return
    if isinstance(error, MooncakeError) and error.code is not None:
        span.set_attribute("db.response.status_code", str(error.code))
        name = error.code_name
    span.set_attribute("error.type", name)
    span.set_status(Status(StatusCode.ERROR, name))


class _Traced:
    """What has turned into the traced kind of itself."""

    _tracing: _Tracing


class _TracedClient(_Traced, EngineClient):
    async def run(
        self, lane: Threads, name: str, fn: Callable[..., T], *args: Any, **options: Any
    ) -> T:
        # What is asked a second time belongs to no single verb: its batch has the links.
        token = otel_context.attach(otel_context.Context()) if lane is self.hedge else None
        try:
            with self._tracing.span(name, SpanKind.INTERNAL, options.get("keys", 0)):
                return await super().run(lane, name, fn, *args, **options)
        finally:
            if token is not None:
                otel_context.detach(token)


class _TracedLane(_Traced, Lane):
    _spans: dict[Batch, Span]

    def _join(self, item: Waiting) -> Waiting:
        joined = super()._join(item)
        span = trace.get_current_span()
        if span.is_recording():
            try:
                spans = joined.spans
            except AttributeError:
                spans = joined.spans = {}
            spans[span] = None
        return joined

    def _send(self, items: list[Waiting]) -> None:
        spans = list(dict.fromkeys(each for item in items for each in getattr(item, "spans", ())))
        super()._send(items)
        batch = items[0].batch
        if not spans or batch is None:
            return
        keys = self._count(items)
        name = f"BATCH {self.name}" if keys > 1 else self.name
        span = self._tracing.batch(name, keys, spans)
        if batch in self._batches:
            self._spans[batch] = span
        else:  # it was refused, and who waits is told why
            span.set_attribute("error.type", "refused")
            span.set_status(Status(StatusCode.ERROR, "refused"))
            span.end()

    def _answer(self, item: Waiting, answer: Any) -> None:
        # A large value is fetched by a task of its own, which is part of the verb.
        span = next(iter(getattr(item, "spans", ())), None)
        if span is None:
            super()._answer(item, answer)
            return
        token = otel_context.attach(trace.set_span_in_context(span, otel_context.Context()))
        try:
            super()._answer(item, answer)
        finally:
            otel_context.detach(token)

    def _close(self, batch: Batch) -> None:
        span = self._spans.pop(batch, None)
        if span is not None:
            if batch.call is not None and batch.call.error is not None:
                tell_error(span, batch.call.error)
            span.end()
        super()._close(batch)


def _turn(thing: Any, kind: type[Any], tracing: _Tracing) -> None:
    """Make a thing one of a subclass; that costs those nothing that are not traced."""
    if not isinstance(thing, _Traced):
        thing._tracing = tracing  # noqa: SLF001  # it is ours
        thing.__class__ = kind


@functools.cache
def _traced_lane(kind: Any) -> type[Lane]:
    return type(f"Traced{kind.__name__}", (_TracedLane, kind), {})


@functools.cache
def _traced_store(kind: Any) -> type[Store]:
    """Make the class of a store whose verbs are spans; types and signatures stay what they are."""
    verbs: dict[str, Any] = {name: _traced_verb(name, getattr(kind, name)) for name in _VERBS}
    verbs |= {name: _traced_opening(name, getattr(kind, name)) for name in _OPENINGS}
    return type(kind.__name__, (_Traced, kind), verbs | {"__module__": kind.__module__})


def _traced_verb(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    async def traced(self: Any, *args: Any, **options: Any) -> Any:
        with self._tracing.span(name, SpanKind.CLIENT, _keys_of(name, args)):
            return await verb(self, *args, **options)

    return traced


def _traced_opening(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def traced(self: Any, *args: Any, **options: Any) -> Any:
        opening = verb(self, *args, **options)
        tracing = self._tracing

        async def opened() -> Any:
            with tracing.span(name, SpanKind.CLIENT, _keys_of(name, args)):
                return await opening

        return Opening(opening._what, opened(), opening._close)  # noqa: SLF001  # it is ours

    return traced


def _keys_of(verb: str, args: Sequence[Any]) -> int:
    """Count the keys of a call, where that is possible without using them up."""
    if args and verb.endswith(_MANY):
        return len(args[0]) if isinstance(args[0], Sized) else 0
    return 1


def _lanes_of(batching: Batching) -> list[Lane]:
    lanes = [lane for lane in vars(batching).values() if isinstance(lane, Lane)]
    return [*lanes, *batching._writes.values()]  # noqa: SLF001  # it is ours

"""Metrics of every store of this process, for Prometheus (extra ``prometheus``).

    from prometheus_client import REGISTRY
    from aiomooncake.prometheus import StoreCollector

    REGISTRY.register(StoreCollector())

From then on each scrape reads what the stores have counted anyway: those of ``connect``,
``connect_ranks`` and ``adopt``, and connects that have not come to a store yet. Nothing is added to
a call. When a store closes, what tells its state disappears, and its counters stay in the sums of
its rank, so that they never go backwards. A forked child begins at zero.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from aiomooncake._extras import missing_extra
from aiomooncake._values import mask_secrets
from aiomooncake._version import __version__
from aiomooncake.engine.binding import installed_distributions
from aiomooncake.observe.roll import ROLL, RankSeen

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as exc:
    raise missing_extra(exc, __name__, "prometheus") from exc

if TYPE_CHECKING:
    from aiomooncake.observe.counters import Tally
    from aiomooncake.store import Store

__all__ = ["METRICS", "MetricSpec", "StoreCollector"]

_FAMILIES: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family.

    Attributes:
        name: Its name; that of a counter without the ``_total`` of its samples.
        kind: What it is to Prometheus.
        help: What it tells.
        labels: Its labels. ``verb`` is a verb of the store or a method of the engine, ``code`` a
            name of the engine's table of codes, ``state`` one of ``HealthState``, ``outcome`` one
            of a closed set, and ``rank`` what the program has given.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ("rank",)

    @property
    def exported(self) -> str:
        """The name by which queries know it."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return f"{self.name}{suffix}"

    def family(self) -> Any:
        """Make an empty family."""
        labels = {} if self.kind == "info" else {"labels": self.labels}
        return _FAMILIES[self.kind](self.name, self.help, **labels)


METRICS: Final = (
    # ---------------------------------------------------------------- calls
    MetricSpec(
        "aiomooncake_call_duration_seconds", "histogram",
        "Time of a job on its thread, in the engine for the most part; a batch is one job.",
        ("rank", "verb"),
    ),
    MetricSpec(
        "aiomooncake_batch_keys", "histogram",
        "Keys that travelled together in one batch.",
        ("rank", "verb"),
    ),
    MetricSpec("aiomooncake_calls_in_flight", "gauge",
               "Jobs queued or running, abandoned ones included."),
    MetricSpec("aiomooncake_calls_abandoned", "gauge",
               "Jobs still running that nobody waits for any more."),
    MetricSpec("aiomooncake_abandoned_calls", "counter",
               "Jobs that were cancelled or timed out while they ran."),
    MetricSpec("aiomooncake_refused_calls", "counter",
               "Calls that were not let in: the master is away, the store is closed, too many "
               "calls are stuck."),
    MetricSpec("aiomooncake_errors", "counter",
               "Failed jobs and keys, and refused calls, by code.", ("rank", "code")),
    MetricSpec("aiomooncake_read_bytes", "counter", "Bytes of values that reads brought in."),
    MetricSpec("aiomooncake_written_bytes", "counter", "Bytes of values that writes stored."),
    MetricSpec("aiomooncake_views_copied", "counter",
               "Views that were read into memory of their own: the local buffer had no room."),
    MetricSpec("aiomooncake_hedged_reads", "counter",
               "Reads made a second time, since the first one took unusually long."),
    MetricSpec("aiomooncake_hedged_keys", "counter",
               "Keys that such a second read was the first to answer."),
    # ---------------------------------------------------------------- state
    MetricSpec("aiomooncake_stores", "gauge",
               "Stores that are not closed, by the state of their health.", ("rank", "state")),
    MetricSpec("aiomooncake_state_since_timestamp_seconds", "gauge",
               "When the state of a store began, of several stores the earliest.",
               ("rank", "state")),
    MetricSpec("aiomooncake_peers_avoided", "gauge", "Peers that do not answer now."),
    MetricSpec("aiomooncake_reopenings", "counter",
               "Stores opened anew, since their memory could not be trusted any more."),
    MetricSpec("aiomooncake_loop_lag_seconds", "histogram",
               "Time from the end of a job until the event loop took its answer up."),
    MetricSpec("aiomooncake_longest_loop_lag_seconds", "gauge",
               "The longest of these times in the life of an open store."),
    # ---------------------------------------------------------------- start-up
    MetricSpec("aiomooncake_connects", "counter",
               "Connects that ended: opened, cancelled, or why they failed.", ("rank", "outcome")),
    MetricSpec("aiomooncake_connect_attempts", "counter",
               "Times a connect has knocked at the other side, or tried a set-up that failed."),
    MetricSpec("aiomooncake_connects_waiting", "gauge", "Connects under way."),
    MetricSpec("aiomooncake_connect_waiting_seconds", "gauge",
               "How long the oldest connect under way has lasted; 0 when there is none."),
    MetricSpec("aiomooncake_warm", "gauge",
               "1 when the last warm-up of the rank went well; 0 while it connects or warms up, "
               "and after a failure; absent when nobody asked for a warm-up."),
    MetricSpec("aiomooncake_warmups_running", "gauge", "Warm-ups under way."),
    MetricSpec("aiomooncake_warmups", "counter",
               "Warm-ups that ended: ready, cancelled, error, or the kind of diagnosis.",
               ("rank", "outcome")),
    MetricSpec("aiomooncake_warmup_attempts", "counter", "Attempts of warm-ups."),
    MetricSpec("aiomooncake_warmup_failed_attempts", "counter",
               "Attempts of warm-ups that failed, by what they answered.", ("rank", "code")),
    MetricSpec("aiomooncake_warmup_duration_seconds", "gauge",
               "How long the last warm-up that went well took."),
    MetricSpec("aiomooncake_ready_after_seconds", "gauge",
               "How long after its connect began the store was warmed up for the first time."),
    # ---------------------------------------------------------------- what runs
    MetricSpec("aiomooncake_store", "info", "An open store: where it is, and its master.",
               ("rank", "host", "master", "protocol")),
    MetricSpec("aiomooncake_build", "info", "Versions of the library, the engine and Python.",
               ("version", "engine", "engine_version", "python")),
)  # fmt: skip
"""All metric families, in the order in which they are exported."""

# Read once, with the module: it looks into files, which a scrape on an event loop must not.


# Read once, with the module: it looks into files, which a scrape on an event loop must not.
_ENGINES: Final = installed_distributions()
_BUILD: Final = {
    "version": __version__,
    "engine": ",".join(_ENGINES),
    "engine_version": ",".join(_ENGINES.values()),
    "python": platform.python_version(),
}


class StoreCollector(Collector):
    """Tells a Prometheus registry of every store of this process.

    It keeps nothing: several of them, in several registries, tell the same. It asks nobody and is
    safe from any thread. A rank costs a scrape about 1.5 ms, a third of it to be read and the rest
    to be written as text: with many ranks, scrape in a thread.
    """

    def describe(self) -> Iterable[Metric]:
        """Name the metrics, so that registering looks at no store."""
        return [spec.family() for spec in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Read all stores, now."""
        families = {spec.name: spec.family() for spec in METRICS}
        for rank, seen in sorted(ROLL.ranks().items()):
            _Writer(families, rank).write(seen)
        families["aiomooncake_build"].add_metric((), _BUILD)
        yield from families.values()


class _Writer:
    """Writes down what is known of one rank."""

    def __init__(self, families: Mapping[str, Any], rank: str) -> None:
        self._families = families
        self._rank = rank

    def write(self, seen: RankSeen) -> None:
        self._write_calls(seen)
        self._write_start_up(seen)
        if seen.stores:
            self._write_state(seen.stores)

    def _write_calls(self, seen: RankSeen) -> None:
        totals = seen.totals
        for verb, counted in sorted(totals.verbs.items()):
            self._spread("call_duration_seconds", counted.seconds, verb)
            if any(counted.keys.counts):
                self._spread("batch_keys", counted.keys, verb)
        self._each("errors", totals.codes)
        self._add("abandoned_calls", totals.given_up)
        self._add("refused_calls", totals.refused)
        self._add("read_bytes", totals.bytes_read)
        self._add("written_bytes", totals.bytes_written)
        self._add("views_copied", totals.views_copied)
        self._add("hedged_reads", totals.hedges)
        self._add("hedged_keys", totals.hedged_keys)
        self._add("reopenings", totals.reopenings)
        self._spread("loop_lag_seconds", totals.lag)

    def _write_start_up(self, seen: RankSeen) -> None:
        totals = seen.totals
        self._each("connects", seen.outcomes)
        self._add("connect_attempts", seen.attempts)
        self._add("connects_waiting", len(seen.waiting))
        self._add("connect_waiting_seconds", max(seen.waiting, default=0.0))
        self._each("warmups", totals.warmup_outcomes)
        self._add("warmup_attempts", totals.warmup_attempts)
        self._each("warmup_failed_attempts", totals.warmup_failures)
        warm = seen.warm
        if warm is not None:
            self._add("warm", int(warm))

    def _write_state(self, stores: list[Store]) -> None:
        states: dict[str, int] = {}
        since: dict[str, float] = {}
        now = time.time()
        stats = [store.stats() for store in stores]
        for one in stats:
            state = one.health.state
            states[state] = states.get(state, 0) + 1
            since[state] = min(since.get(state, now), one.health.since)
        self._each("stores", states)
        self._each("state_since_timestamp_seconds", since)
        self._add("calls_in_flight", sum(one.in_flight for one in stats))
        self._add("calls_abandoned", sum(one.abandoned for one in stats))
        self._add("peers_avoided", sum(one.peers_avoided for one in stats))
        self._add("longest_loop_lag_seconds", max(one.longest_loop_stall for one in stats))
        self._add("warmups_running", sum(one.warmup.running for one in stats))
        for name, times in (
            ("warmup_duration_seconds", [one.warmup.seconds for one in stats]),
            ("ready_after_seconds", [one.warmup.since_connect for one in stats]),
        ):
            known = [seconds for seconds in times if seconds is not None]
            if known:
                self._add(name, max(known))
        infos = {
            (
                store.hostname,
                mask_secrets(config.master_server_address) if (config := store.config) else "",
                config.protocol if config else "",
            )
            for store in stores
        }
        for host, master, protocol in sorted(infos):
            value = {"rank": self._rank, "host": host, "master": master, "protocol": protocol}
            self._families["aiomooncake_store"].add_metric((), value)

    def _add(self, name: str, value: float) -> None:
        self._families[f"aiomooncake_{name}"].add_metric((self._rank,), value)

    def _each(self, name: str, values: Mapping[str, float]) -> None:
        for label, value in sorted(values.items()):
            self._families[f"aiomooncake_{name}"].add_metric((self._rank, label), value)

    def _spread(self, name: str, tally: Tally, *labels: str) -> None:
        below, buckets = 0, []
        for bound, count in zip((*map(str, tally.bounds), "+Inf"), tally.counts, strict=True):
            below += count
            buckets.append((bound, below))
        self._families[f"aiomooncake_{name}"].add_metric(
            (self._rank, *labels), buckets, tally.total
        )

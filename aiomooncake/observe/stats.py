"""Frozen snapshots of a store: what it has done, and whether it can serve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Distribution",
    "Health",
    "HealthState",
    "StoreStats",
    "VerbStats",
    "WarmupStats",
]

HealthState = Literal[
    "ready",
    "degraded",
    "master-unreachable",
    "client-unreachable",
    "re-mounting",
    "tainted",
    "reopening",
    "closing",
    "closed",
    "forked",
]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell where.

    Attributes:
        bounds: Upper bounds, each inclusive, from low to high.
        counts: Values up to each bound and above the one before, and one more for those above all.
        total: The sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of the values; 0.0 when there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the bound that at least this share of the values does not exceed.

        ``inf`` when it lies above all bounds, 0.0 when there are no values.
        """
        wanted, below = share * self.count, 0
        if not self.count:
            return 0.0
        for bound, count in zip(self.bounds, self.counts):  # noqa: B905  # one count more
            below += count
            if below >= wanted:
                return bound
        return math.inf


@dataclass(frozen=True, slots=True)
class VerbStats:
    """What was counted of the jobs of one verb, or of one method of ``store.engine``.

    Attributes:
        seconds: How long the jobs took on their threads, in the engine for the most part.
        keys: How many keys travelled in each batch; empty for jobs that are none.
    """

    seconds: Distribution
    keys: Distribution

    @property
    def calls(self) -> int:
        """Jobs that ended."""
        return self.seconds.count


@dataclass(frozen=True, slots=True)
class WarmupStats:
    """What is known of a store's warm-ups.

    Attributes:
        attempts: Attempts of all warm-ups so far.
        failures: Attempts that failed, by the name of what they answered.
        outcomes: Warm-ups that ended: ``"ready"``, the kind of diagnosis of one that gave up
            (``"no-segment"``, say), ``"cancelled"``, or ``"error"``.
        running: Whether one is under way.
        warm: Whether the last one went well; None when there was none.
        seconds: How long the last one that went well took.
        since_connect: How long after the store's connect began it was ready for the first time.
    """

    attempts: int
    failures: Mapping[str, int]
    outcomes: Mapping[str, int]
    running: bool
    warm: bool | None
    seconds: float | None
    since_connect: float | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store has done so far, and how it is now.

    Jobs are counted, and batches, not keys: a verb is one job or a few, and many verbs that wait
    together are one.

    Attributes:
        by_verb: Jobs that went through the gate and ended, by verb or engine method.
        in_flight: Jobs queued or running now, abandoned ones included.
        abandoned: Jobs still running that nobody waits for any more.
        given_up: Jobs that were ever abandoned.
        refused: Calls that were not let in: the master is away, the store is closed or belongs
            to another loop, too many calls are stuck. A batch is one.
        tainted: A transfer came near the engine's own limit of 60 s; reads are refused.
        bytes_read: Bytes of values that reads brought in.
        bytes_written: Bytes of values that writes stored.
        errors: Failed jobs and keys by the name of the engine's code; what was ``refused`` too,
            where there is no code as ``STORE_CLOSED``, ``FORKED``, ``TAINTED``,
            ``TOO_MANY_ABANDONED`` or ``WRONG_LOOP``. Not what a verb refuses of its arguments.
        views_copied: Values asked for by ``view`` that were read into memory of their own, since
            the local buffer had no room.
        hedges: Reads that were made a second time, since the first one took unusually long.
        hedged_keys: Keys that such a read was the first to answer.
        peers_avoided: Peers that do not answer now.
        reopenings: How often the store was opened anew.
        warmup: What is known of its warm-ups.
        loop_lag: Seconds from the end of a job on its thread until the loop took the answer up:
            how long the loop was busy or still while calls ran.
        longest_loop_stall: The longest of these times.
        health: Whether it can serve.
    """

    by_verb: Mapping[str, VerbStats]
    in_flight: int
    abandoned: int
    given_up: int
    refused: int
    tainted: bool
    bytes_read: int
    bytes_written: int
    errors: Mapping[str, int]
    views_copied: int
    hedges: int
    hedged_keys: int
    peers_avoided: int
    reopenings: int
    warmup: WarmupStats
    loop_lag: Distribution
    longest_loop_stall: float
    health: Health

    @property
    def calls(self) -> int:
        """Jobs that went through the gate and ended."""
        return sum(verb.calls for verb in self.by_verb.values())

    @property
    def warmup_attempts(self) -> int:
        """Warm-up attempts so far."""
        return self.warmup.attempts


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store can serve, as far as it knows without asking anybody.

    Attributes:
        state: ``"ready"``; ``"degraded"`` (peers do not answer: gets of values whose first copy
            they hold fail at once, and values are stored elsewhere); ``"master-unreachable"``, or
            for a dummy client ``"client-unreachable"`` (calls fail at once until it is back);
            ``"re-mounting"`` (it is back, and no segment is mounted yet); ``"reopening"`` (a
            transfer ran so long that its memory can't be trusted, and the store is opened anew);
            ``"tainted"`` (the same of a store that can't be: reads are refused); ``"closing"``;
            ``"closed"``; or ``"forked"`` (this is a forked child of the process that opened the
            store).
        detail: One sentence for people.
        since: When that began, as ``time.time()``.
    """

    state: HealthState
    detail: str
    since: float

    @property
    def ok(self) -> bool:
        """Whether calls have a chance."""
        return self.state in ("ready", "degraded")

"""Counting from many threads at once: per job and batch, never per key."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Final

from aiomooncake.errors import MooncakeError
from aiomooncake.observe.stats import Distribution, VerbStats, WarmupStats

__all__ = ["KEYS", "LAG", "LATENCY", "Counters", "Tally"]

LATENCY: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Seconds of a job. From a single get on loopback to the engine's own time-outs."""

KEYS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1000.0)
"""Keys of a batch; the last two are what a batch carries at most."""

LAG: Final = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Seconds until the loop takes an answer up."""

_WITHOUT_CODE: Final = {
    "StoreClosedError": "STORE_CLOSED",
    "ForkedProcessError": "FORKED",
    "TaintedStoreError": "TAINTED",
    "TooManyAbandonedError": "TOO_MANY_ABANDONED",
    "WrongLoopError": "WRONG_LOOP",
}
"""Names for refusals that have no code of the engine, written like its own."""


class Tally:
    """A histogram that is filled: how many values fell below each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def note(self, value: float) -> None:
        """Count one value; whoever has several threads holds a lock."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Tally) -> None:
        """Count what another one has counted, with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts)]  # noqa: B905  # of one length
        self.total += other.total

    def seen(self) -> Distribution:
        """Take a frozen copy."""
        return Distribution(self.bounds, tuple(self.counts), self.total)


class Verb:
    """What was counted of the jobs of one name."""

    __slots__ = ("keys", "seconds")

    def __init__(self) -> None:
        self.seconds = Tally(LATENCY)
        self.keys = Tally(KEYS)

    def add(self, other: Verb) -> None:
        """Count what another one has counted."""
        self.seconds.add(other.seconds)
        self.keys.add(other.keys)


@dataclass(slots=True)
class _Warming:
    """The last warm-up: whether it runs, and what came of it."""

    running: int = 0
    warm: bool | None = None
    seconds: float | None = None
    since_connect: float | None = None


class Counters:
    """What one store has done so far; read as a whole by :meth:`Store.stats`.

    Attributes:
        began: When its connect began, as ``time.monotonic()``.
        lag: How late the loop took answers up. Counted by the loop's thread alone.
        longest_lag: The longest of these times.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.began = time.monotonic()
        self.verbs: dict[str, Verb] = {}
        self.codes: Counter[str] = Counter()
        self.lag = Tally(LAG)
        self.longest_lag = 0.0
        self.bytes_read = 0
        self.bytes_written = 0
        self.refused = 0
        self.given_up = 0
        self.views_copied = 0
        self.hedges = 0
        self.hedged_keys = 0
        self.reopenings = 0
        self.warmup_attempts = 0
        self.warmup_failures: Counter[str] = Counter()
        self.warmup_outcomes: Counter[str] = Counter()
        self.warming = _Warming()

    # ------------------------------------------------------------------ jobs

    def count_job(self, name: str, seconds: float, keys: int) -> None:
        """Count a job that ended, and the keys that travelled in it (0: it is no batch)."""
        # bisect and not Tally.note: it is the hot path, and calls cost.
        place = bisect_left(LATENCY, seconds)
        with self._lock:
            verb = self.verbs.get(name)
            if verb is None:
                verb = self.verbs[name] = Verb()
            tally = verb.seconds
            tally.counts[place] += 1
            tally.total += seconds
            if keys:
                verb.keys.note(keys)

    def count_lag(self, seconds: float) -> None:
        """Count how late the loop took an answer up; on the loop's thread."""
        tally = self.lag
        tally.counts[bisect_left(LAG, seconds)] += 1
        tally.total += seconds
        self.longest_lag = max(self.longest_lag, seconds)

    def count_code(self, name: str) -> None:
        """Count a failed job or key by the name of the engine's code."""
        with self._lock:
            self.codes[name] += 1

    def count_refused(self, error: MooncakeError) -> None:
        """Count a call that was not let in, by its code or by what stands for one."""
        name = error.code_name or _WITHOUT_CODE.get(type(error).__name__, "REFUSED")
        with self._lock:
            self.refused += 1
            self.codes[name] += 1

    def count_given_up(self) -> None:
        """Count a call that runs on although nobody waits for it."""
        with self._lock:
            self.given_up += 1

    # ------------------------------------------------------------------ what moved

    def count_read(self, nbytes: int) -> None:
        """Count bytes of values that a read brought in."""
        with self._lock:
            self.bytes_read += nbytes

    def count_written(self, nbytes: int) -> None:
        """Count bytes of values that a write stored."""
        with self._lock:
            self.bytes_written += nbytes

    def count_copied(self, views: int) -> None:
        """Count views for which the local buffer had no room."""
        with self._lock:
            self.views_copied += views

    def count_hedge(self, keys: int | None = None) -> None:
        """Count a read that was made a second time, or the keys that it was first to answer."""
        with self._lock:
            if keys is None:
                self.hedges += 1
            else:
                self.hedged_keys += keys

    def count_reopening(self) -> None:
        """Count that the store was opened anew."""
        with self._lock:
            self.reopenings += 1

    # ------------------------------------------------------------------ warm-up

    def warmup_began(self) -> None:
        """Note that a warm-up runs."""
        with self._lock:
            self.warming.running += 1
            if self.warming.warm is None:
                self.warming.warm = False

    def count_attempt(self, failure: str | None) -> None:
        """Count an attempt; ``failure`` is the name of what it answered, None when it went well."""
        with self._lock:
            self.warmup_attempts += 1
            if failure is not None:
                self.warmup_failures[failure] += 1

    def warmup_ended(self, outcome: str, seconds: float | None = None) -> None:
        """Note the end of a warm-up; one that went well tells its seconds."""
        now = time.monotonic()
        with self._lock:
            warming = self.warming
            warming.running -= 1
            self.warmup_outcomes[outcome] += 1
            if seconds is not None:
                warming.warm, warming.seconds = True, seconds
                if warming.since_connect is None:
                    warming.since_connect = now - self.began
            elif outcome != "cancelled":
                warming.warm = False

    # ------------------------------------------------------------------ reading

    def by_verb(self) -> dict[str, VerbStats]:
        """Take a frozen copy of what was counted of jobs."""
        with self._lock:
            return {
                name: VerbStats(verb.seconds.seen(), verb.keys.seen())
                for name, verb in self.verbs.items()
            }

    def errors(self) -> dict[str, int]:
        """Take a copy of the failures by name."""
        with self._lock:
            return dict(self.codes)

    def warmup(self) -> WarmupStats:
        """Take a frozen copy of what is known of warm-ups."""
        with self._lock:
            warming = self.warming
            return WarmupStats(
                attempts=self.warmup_attempts,
                failures=dict(self.warmup_failures),
                outcomes=dict(self.warmup_outcomes),
                running=warming.running > 0,
                warm=warming.warm,
                seconds=warming.seconds,
                since_connect=warming.since_connect,
            )

    def add(self, other: Counters) -> None:
        """Count what another store has counted; only its totals, and nothing of now."""
        with other._lock:
            for name, verb in other.verbs.items():
                self.verbs.setdefault(name, Verb()).add(verb)
            self.codes.update(other.codes)
            self.lag.add(other.lag)
            self.bytes_read += other.bytes_read
            self.bytes_written += other.bytes_written
            self.refused += other.refused
            self.given_up += other.given_up
            self.views_copied += other.views_copied
            self.hedges += other.hedges
            self.hedged_keys += other.hedged_keys
            self.reopenings += other.reopenings
            self.warmup_attempts += other.warmup_attempts
            self.warmup_failures.update(other.warmup_failures)
            self.warmup_outcomes.update(other.warmup_outcomes)

"""One run of the benchmarks: its settings, and what it has found out so far."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiomooncake import LocalCluster
from benchmarks.measure import Measurement, Round
from benchmarks.owner import Owner
from benchmarks.process import OverCapError, Worker

__all__ = ["Bench", "Group", "Row", "Scenario", "Value", "took"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured, in one sentence."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Group:
    """Scenarios that are measured by one function, since they share processes.

    Attributes:
        scenarios: What it can measure; most groups have one.
        run: Measures those of them whose names it is given; called in a thread of its own.
    """

    scenarios: Sequence[Scenario]
    run: Callable[[Bench, frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class Value:
    """A figure for the table.

    Attributes:
        number: In seconds, bytes or 1/second.
        at_least: It was more than this: the work was ended by force.
    """

    number: float
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        scenario: Name of the scenario.
        what: What was compared.
        unit: ``"s"``, ``"bytes"``, ``"1/s"`` or what is counted.
        target: The design's, in words; empty when it sets none.
        ours: Our figure.
        alternative: The figure of the best known alternative, measured in the same run.
        against: Who that is.
        ratio: How many times better ours is; None without an alternative.
        met: Whether the target is met; None when there is none, or nothing to compare with.
    """

    scenario: str
    what: str
    unit: str
    target: str
    ours: Value
    alternative: Value | None
    against: str
    ratio: Value | None
    met: bool | None


@dataclass(slots=True)
class Bench:
    """Settings and results of one run.

    Attributes:
        smoke: Only show that everything runs: one round of little work.
        rounds: Rounds of each measurement.
        measurements: What was measured so far.
        rows: What was compared so far.
        failures: Scenarios that could not be measured, and why.
    """

    smoke: bool
    rounds: int
    measurements: list[Measurement] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def loops(self) -> tuple[str, ...]:
        """Names of the event loops that are there."""
        return ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)

    def pick(self, full: int, smoke: int) -> int:
        """Return the one or the other, as the run wants."""
        return smoke if self.smoke else full

    @property
    def slow_rounds(self) -> int:
        """How many rounds to do of what takes many seconds."""
        return min(self.rounds, 3)

    @contextlib.contextmanager
    def cluster_with_owner(self, segment: int) -> Iterator[tuple[LocalCluster, Worker]]:
        """Run a private master and a process that owns the values."""
        with LocalCluster() as cluster, Worker(Owner) as owner:
            owner.call("open", address=cluster.address, segment=segment)
            yield cluster, owner

    def measured(
        self,
        scenario: str,
        peer: str,
        rounds: Sequence[Mapping[str, Any]],
        **case: str | int,
    ) -> Measurement:
        """Keep the rounds of one peer, as they came from its worker."""
        measurement = Measurement(scenario, peer, case, [Round(**one) for one in rounds])
        self.measurements.append(measurement)
        return measurement

    def over_cap(
        self, scenario: str, peer: str, cap: float, exc: OverCapError, **case: str | int
    ) -> Measurement:
        """Keep that a peer did not end within ``cap`` seconds."""
        measurement = Measurement(scenario, peer, case, [], cap, exc.still)
        self.measurements.append(measurement)
        return measurement

    def compare(
        self,
        scenario: str,
        what: str,
        unit: str,
        ours: float,
        alternative: float | Value | None = None,
        *,
        against: str = "",
        target: str = "",
        at_most: float | None = None,
        at_least_times: float | None = None,
    ) -> None:
        """Add a line to the table.

        Args:
            scenario: Name of the scenario.
            what: What is compared.
            unit: Its unit; more is better of ``"1/s"`` and ``"keys"``, less of the others.
            ours: Our figure.
            alternative: That of the alternative, if it was measured.
            against: Who that is.
            target: The design's target in words.
            at_most: The target, where it bounds our figure.
            at_least_times: The target, where it bounds the ratio.
        """
        if isinstance(alternative, float | int):
            alternative = Value(alternative)
        ratio: Value | None = None
        if alternative is not None:
            more = unit in ("1/s", "keys")
            pair = (ours, alternative.number) if more else (alternative.number, ours)
            ratio = Value(pair[0] / pair[1] if pair[1] else math.inf, alternative.at_least)
        met: bool | None = None
        if at_most is not None:
            met = ours <= at_most
        if at_least_times is not None and ratio is not None:
            met = met is not False and ratio.number >= at_least_times
        self.rows.append(
            Row(scenario, what, unit, target, Value(ours), alternative, against, ratio, met)
        )

    def to_json(self) -> dict[str, Any]:
        """Return all results."""
        return {
            "measurements": [one.to_json() for one in self.measurements],
            "table": [asdict(row) for row in self.rows],
            "failures": self.failures,
        }


def took(measurement: Measurement, name: str = "seconds") -> Value:
    """Return a median, or the cap of a measurement that was ended by force."""
    if measurement.rounds:
        return Value(measurement.median(name))
    if name == "longest_stall":
        return Value(measurement.still or 0.0, at_least=True)
    return Value(measurement.cap or 0.0, at_least=True)

"""What is measured around a piece of work, and what becomes of several rounds of it."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aiomooncake.testing import LoopStallProbe

__all__ = ["Measurement", "Meter", "Round", "percentile", "resident"]

# proc(5): writing 5 resets the peak of the resident set, so that each round has its own.
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one peer.

    Attributes:
        seconds: How long the whole round took.
        operations: Operations in it (keys, where several travel in one call).
        cpu_seconds: CPU time of the measuring process, all its threads.
        peak_rss: Largest resident set during the round, in bytes.
        extra_rss: How much of it came on top of what was resident before the round.
        longest_stall: Longest time that the loop stood still, in seconds.
        p50: Median latency of a call in seconds; None where single calls are not timed.
        p90: Its 90th percentile.
        p99: Its 99th percentile.
        figures: What else the scenario tells.
    """

    seconds: float
    operations: int = 1
    cpu_seconds: float = 0.0
    peak_rss: int = 0
    extra_rss: int = 0
    longest_stall: float = 0.0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All rounds of one peer in one case of a scenario.

    Attributes:
        scenario: Name of the scenario.
        peer: Who did the work.
        case: What distinguishes it from the scenario's other measurements, tasks say.
        rounds: The rounds; empty when the work did not end within the cap.
        cap: Seconds after which the work was ended by force; None when it ended by itself.
        still: Seconds that the loop had stood still when it was ended so.
    """

    scenario: str
    peer: str
    case: Mapping[str, str | int]
    rounds: Sequence[Round]
    cap: float | None = None
    still: float | None = None

    @property
    def rate(self) -> float:
        """Operations per second, median of the rounds."""
        return statistics.median(one.operations / one.seconds for one in self.rounds)

    def median(self, name: str) -> float:
        """Return the median of an attribute of the rounds, or of one of their figures."""
        return statistics.median(_value(one, name) for one in self.rounds)

    def largest(self, name: str) -> float:
        """Return the largest value instead of the median."""
        return max(_value(one, name) for one in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """Return the medians, and the rounds that they come from."""
        medians: dict[str, float] = {}
        if self.rounds:
            names = ["seconds", "peak_rss", "extra_rss", "longest_stall", *self.rounds[0].figures]
            medians = {name: self.median(name) for name in names}
            medians["operations_per_second"] = self.rate
            medians["cpu_seconds_per_operation"] = statistics.median(
                one.cpu_seconds / one.operations for one in self.rounds
            )
            if self.rounds[0].p50 is not None:
                medians |= {name: self.median(name) for name in ("p50", "p90", "p99")}
        return asdict(self) | {"medians": medians}


class Meter:
    """Measure the work done inside ``async with``: time, CPU, memory and stalls of the loop."""

    def __init__(self) -> None:
        self._probe = LoopStallProbe()
        self._seconds = self._cpu = 0.0
        self._resident = self._peak = 0

    async def __aenter__(self) -> Meter:
        gc.collect()
        self._resident = _start_peak()
        await self._probe.__aenter__()
        self._cpu = time.process_time()
        self._seconds = time.perf_counter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._seconds = time.perf_counter() - self._seconds
        self._cpu = time.process_time() - self._cpu
        await self._probe.__aexit__(exc_type, exc, tb)
        self._peak = _status_bytes("VmHWM")

    def round(
        self,
        operations: int = 1,
        latencies: Sequence[float] = (),
        figures: Mapping[str, float] | None = None,
        *,
        seconds: float | None = None,
    ) -> Round:
        """Return what was measured.

        Args:
            operations: Operations that were done.
            latencies: Seconds of each call, if they were timed.
            figures: What else to keep.
            seconds: How long it took, where that was timed more closely.
        """
        ordered = sorted(latencies)
        return Round(
            seconds=self._seconds if seconds is None else seconds,
            operations=operations,
            cpu_seconds=self._cpu,
            peak_rss=self._peak,
            extra_rss=max(0, self._peak - self._resident),
            longest_stall=self._probe.longest,
            p50=percentile(ordered, 0.5),
            p90=percentile(ordered, 0.9),
            p99=percentile(ordered, 0.99),
            figures=figures or {},
        )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the ordered values lie; None without values."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def resident() -> int:
    """Return the resident set of this process in bytes."""
    return _status_bytes("VmRSS")


def _start_peak() -> int:
    """Let the peak of the resident set begin anew; return the resident set."""
    with contextlib.suppress(OSError):  # then the peak is that of the whole process so far
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    return resident()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}: the benchmarks run on Linux only")


def _value(one: Round, name: str) -> float:
    value = one.figures[name] if name in one.figures else getattr(one, name)
    return float(value)

"""Frozen snapshots of a store: what it has done, and whether it can serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Health", "HealthState", "StoreStats"]

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
class StoreStats:
    """What a store has done so far.

    Attributes:
        calls: Jobs that went through the gate and ended (a verb is one job or a few).
        in_flight: Jobs queued or running now, abandoned ones included.
        abandoned: Jobs still running that nobody waits for any more.
        tainted: A transfer came near the engine's own limit of 60 s; reads are refused.
        bytes_read: Bytes of values that reads brought in.
        bytes_written: Bytes of values that writes stored.
        errors: Failed jobs and keys by the name of the engine's code.
        warmup_attempts: Warm-up attempts so far.
        longest_loop_stall: Longest time, in seconds, from the end of a call on its thread until
            the loop took the answer up: how long the loop was busy or still while calls ran.
    """

    calls: int
    in_flight: int
    abandoned: int
    tainted: bool
    bytes_read: int
    bytes_written: int
    errors: Mapping[str, int]
    warmup_attempts: int
    longest_loop_stall: float


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

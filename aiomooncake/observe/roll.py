"""Who is there: every store of this process, those that are still being opened, and the past.

A store has its own counters, and a closed store is gone; but what a process exports must neither
miss a connect that never came to a store, nor count backwards when a store is closed. So there is
one roll per process, by rank. It holds stores weakly, and costs nothing between two looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiomooncake.engine.gate import State
from aiomooncake.errors import (
    ConfigError,
    EngineNotInstalledError,
    ForkedProcessError,
    InvalidArgumentError,
    SetupError,
    SetupTimeoutError,
    WarmupError,
)
from aiomooncake.observe.counters import Counters

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.store import Store

__all__ = ["ROLL", "Connecting", "RankSeen", "Roll"]

_GONE: Final = (State.CLOSED, State.FORKED)


@dataclass(slots=True, eq=False)
class Connecting:
    """One connect while it runs.

    Attributes:
        label: The rank, as text.
        began: When it began, as ``time.monotonic()``.
        doing: What is being waited for.
        attempts: How often the other side was knocked at, or a set-up was tried.
    """

    label: str
    began: float = field(default_factory=time.monotonic)
    doing: str = ""
    attempts: int = 0


@dataclass(slots=True)
class _Enlisted:
    label: str
    store: weakref.ref[Store]
    client: weakref.ref[EngineClient]
    counters: Counters


@dataclass(slots=True)
class _Past:
    """What is over of one rank."""

    counters: Counters = field(default_factory=Counters)
    outcomes: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    failed: bool = False  # the last connect did


@dataclass(slots=True)
class RankSeen:
    """What this process knows of one rank.

    Attributes:
        totals: What all stores of the rank have done, closed ones too.
        outcomes: Connects that ended, by what came of them.
        attempts: Knocks and set-ups of all connects, those under way too.
        waiting: Seconds that each connect under way has lasted.
        failed: Whether the last connect that ended failed.
        stores: Stores that are not closed.
    """

    totals: Counters
    outcomes: Counter[str]
    attempts: int
    waiting: list[float] = field(default_factory=list)
    failed: bool = False
    stores: list[Store] = field(default_factory=list)

    @property
    def warm(self) -> bool | None:
        """Whether the rank is warmed up; None when nobody has asked it to be."""
        told = [store._client.counters.warmup().warm for store in self.stores]  # noqa: SLF001  # it is ours
        known = [warm for warm in told if warm is not None]
        if known:
            return all(known)
        if self.stores:
            return None
        return False if self.waiting or self.failed else None


class Roll:
    """The stores and connects of one process; safe from any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; also in a forked child, where the lock can't be trusted."""
        self._lock = threading.Lock()
        self._enlisted: list[_Enlisted] = []
        self._connecting: set[Connecting] = set()
        self._past: dict[str, _Past] = {}

    @contextlib.contextmanager
    def connecting(self, rank: int | str | None) -> Iterator[Connecting]:
        """Keep a connect on the roll while it runs, and note what comes of it."""
        one = Connecting(_label(rank))
        with self._lock:
            self._connecting.add(one)
        outcome = "opened"
        try:
            yield one
        except BaseException as exc:
            outcome = _outcome(exc, one.doing)
            raise
        finally:
            with self._lock:
                if one in self._connecting:  # not in a forked child
                    self._connecting.discard(one)
                    past = self._past_of(one.label)
                    past.attempts += one.attempts
                    past.outcomes[outcome] += 1
                    past.failed = outcome not in ("opened", "cancelled")

    def enlist(self, store: Store) -> None:
        """Put a store on the roll; it leaves when nobody has it any more."""
        client = store._client  # noqa: SLF001  # it is ours
        one = _Enlisted(
            _label(store.rank), weakref.ref(store), weakref.ref(client), client.counters
        )
        with self._lock:
            self._sweep()
            self._enlisted.append(one)

    def ranks(self) -> dict[str, RankSeen]:
        """Look at all ranks that this process has ever connected or adopted."""
        now = time.monotonic()
        with self._lock:
            self._sweep()
            seen: dict[str, RankSeen] = {}
            for label, past in self._past.items():
                seen[label] = RankSeen(Counters(), past.outcomes.copy(), past.attempts)
                seen[label].failed = past.failed
                seen[label].totals.add(past.counters)
            enlisted, connecting = list(self._enlisted), list(self._connecting)
        for under_way in connecting:
            one = seen.setdefault(under_way.label, RankSeen(Counters(), Counter(), 0))
            one.attempts += under_way.attempts
            one.waiting.append(now - under_way.began)
        for each in enlisted:
            one = seen.setdefault(each.label, RankSeen(Counters(), Counter(), 0))
            one.totals.add(each.counters)
            store = each.store()
            if store is not None and store._client.gate.state not in _GONE:  # noqa: SLF001  # it is ours
                one.stores.append(store)
        return seen

    def _sweep(self) -> None:
        """Keep what stores have done that are gone."""
        there = []
        for one in self._enlisted:
            if one.client() is None:
                self._past_of(one.label).counters.add(one.counters)
            else:
                there.append(one)
        self._enlisted = there

    def _past_of(self, label: str) -> _Past:
        return self._past.setdefault(label, _Past())

    def __repr__(self) -> str:
        return f"<Roll of {len(self._enlisted)} stores>"


ROLL: Final = Roll()
"""The one of this process. The state is the process's own, as that of a metrics endpoint is."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ROLL.forget)


def _label(rank: int | str | None) -> str:
    # A scrape is UTF-8: one lone surrogate (of an odd environment, say) would break all of it.
    return "" if rank is None else str(rank).encode("utf-8", "backslashreplace").decode()


def _outcome(error: BaseException, doing: str) -> str:
    """Name what came of a connect that failed; a closed set of names."""
    if isinstance(error, WarmupError):
        return "unknown" if error.diagnosis is None else str(error.diagnosis.kind)
    if isinstance(error, SetupTimeoutError):
        if doing.startswith("waiting for the master"):
            return "master-unreachable"
        return "client-unreachable" if doing.startswith("waiting for") else "timeout"
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "cancelled"
    for kind, name in (
        (SetupError, "refused"),
        (EngineNotInstalledError, "engine-missing"),
        ((ConfigError, InvalidArgumentError), "invalid"),
        (ForkedProcessError, "forked"),
    ):
        if isinstance(error, kind):
            return name
    return "error"

"""A short benchmark of the user's own cluster: bounded in time and data, and cleaned up after."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aiomooncake._tasks import together
from aiomooncake._verdict import count_text, size_text
from aiomooncake.cli.host_checks import is_own_address
from aiomooncake.config import split_address
from aiomooncake.errors import ChecksumError, NoSpaceError, ObjectNotFoundError
from aiomooncake.master import segments
from aiomooncake.testing import LoopStallProbe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from aiomooncake.cli.terminal import Screen
    from aiomooncake.master import Segment
    from aiomooncake.store import Store

__all__ = ["Bench", "Row"]

_VERBS: Final = ("put", "get", "exists")
_MOST_VALUES: Final = 4096
_ASKED: Final = 256  # values of which it is asked where they lie
_STAMP: Final = 16  # bytes at the head of each value that no other value has

_DRAIN_LOOKS: Final = 500
_DRAIN_PAUSE: Final = 0.01
"""How often, and after how many seconds each, it is looked for calls that Ctrl-C left behind."""

_ROOM: Final = 0.8
"""Share of the mounted memory up to which a benchmark fills it; the master evicts from 0.95 on."""

_QUESTION_TIMEOUT: Final = 1.0

_ALL: Final = "*"
"""Every end point is one's own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One verb of one case.

    Attributes:
        verb: ``put``, ``get`` or ``exists``.
        size: Bytes of each value.
        tasks: Tasks that called it side by side, each one call at a time.
        operations: Calls that were made.
        seconds: How long that took.
        p50: Median of the time of a call, in seconds.
        p99: Its 99th percentile.
    """

    verb: str
    size: int
    tasks: int
    operations: int
    seconds: float
    p50: float
    p99: float

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.operations / self.seconds

    @property
    def cells(self) -> tuple[str, ...]:
        """Write the row as people read it."""
        moved = "" if self.verb == "exists" else f"{self.rate * self.size / (1 << 20):,.0f}"
        times = (f"{seconds * 1000:.2f}" for seconds in (self.p50, self.p99))
        return (
            size_text(self.size),
            str(self.tasks),
            self.verb,
            f"{self.rate:,.0f}",
            moved,
            *times,
        )

    def document(self) -> dict[str, Any]:
        """Return the row for ``--json``."""
        moved = None if self.verb == "exists" else round(self.rate * self.size)
        return asdict(self) | {"per_second": round(self.rate, 3), "bytes_per_second": moved}


@dataclass(slots=True)
class Bench:
    """One run.

    Attributes:
        sizes: Bytes of the values.
        tasks: How many tasks call side by side.
        seconds: How long all of it takes, roughly; connecting and cleaning up come on top.
        max_data: Bytes that are stored at a time.
        screen: Where to show it.
        rows: What was measured so far.
        places: Where values lay, and how many of those that were asked for.
        stall: Longest time that the event loop stood still while it measured, in seconds.
        left_out: Cases that would have stored more than ``max_data``.
    """

    sizes: Sequence[int]
    tasks: Sequence[int]
    seconds: float
    max_data: int
    screen: Screen
    rows: list[Row] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    stall: float = 0.0
    left_out: list[tuple[int, int]] = field(default_factory=list)
    _progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self._progress = Progress(
            TextColumn(" {task.description}"), BarColumn(), TimeRemainingColumn()
        )

    async def run(self, store: Store) -> None:
        """Measure all cases on an open store.

        Raises:
            MooncakeError: A call failed, or the cluster has no room.
        """
        own, max_data = await self._look_around(store)
        cases: list[tuple[int, int]] = []
        for size, tasks in itertools.product(self.sizes, self.tasks):
            fits = tasks * size <= max_data
            (cases if fits else self.left_out).append((size, tasks))
        if not cases:
            raise NoSpaceError(
                f"nothing to measure: not even {size_text(min(self.sizes) * min(self.tasks))} fit "
                f"into {size_text(max_data)} (--max-data, and {_ROOM:.0%} of the mounted memory: "
                "beyond that the values of others would be evicted)"
            )
        each = self.seconds / len(cases) / len(_VERBS)
        bar = self._progress.add_task("", total=len(cases) * len(_VERBS))
        async with LoopStallProbe() as probe:
            with self.screen.table(self._render):
                for size, tasks in cases:
                    case = _Case(store, size, tasks, each, max_data)
                    await asyncio.to_thread(case.prepare)
                    probe.reset()  # neither this nor cleaning up is what is measured
                    try:
                        for verb in _VERBS:
                            what = f"{verb} of {size_text(size)}, {count_text(tasks, 'task')}"
                            self._progress.update(bar, description=what)
                            self._add(await case.measure(verb))
                            self._progress.advance(bar)
                            if verb == "put":
                                self.places += await case.places(own)
                            self.stall = max(self.stall, probe.longest)
                    finally:
                        await case.clean_up()
                self._progress.update(bar, visible=False)

    async def _look_around(self, store: Store) -> tuple[str | None, int]:
        """Find the end point of the store's own memory, and how much may be stored."""
        mounted = await _segments(store)
        if mounted is None:
            in_memory = store.config is not None and store.config.master_server_address.startswith(
                "memory://"
            )
            return _ALL if in_memory else None, self.max_data
        own = next((each.endpoint for each in mounted if each.name == store.hostname), None)
        usable = [each for each in mounted if each.status == "OK"]
        room = _ROOM * sum(each.capacity for each in usable) - sum(each.used for each in usable)
        return own, max(0, min(self.max_data, int(room)))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if not self.screen.live:
            size, tasks, verb, rate, moved, p50, p99 = row.cells
            moved = f"{moved:>7} MiB/s" if moved else " " * 13
            self.screen.line(
                f"  {size:>8} {tasks:>5} tasks  {verb:<6} {rate:>9}/s {moved}  "
                f"p50 {p50:>8} ms  p99 {p99:>8} ms"
            )

    def _render(self) -> RenderableType:
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for name in ("Size", "Tasks"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("Verb", style="bold", no_wrap=True)
        for name in ("calls/s", "MiB/s", "p50 ms", "p99 ms"):
            table.add_column(name, justify="right", no_wrap=True, min_width=8)
        rows = list(self.rows)  # the loop adds some meanwhile
        for row in rows:
            table.add_row(*row.cells, end_section=row.verb == _VERBS[-1])
        return Padding(Group(table, self._progress), (1, 0, 0, 1))

    def sum_up(self, lent: int) -> None:
        """Say what the figures are of."""
        fact = self.screen.fact
        asked = sum(self.places.values())
        shares = ", ".join(
            f"{place} {number / asked:.0%}" for place, number in self.places.most_common()
        )
        self.screen.line()
        fact("calls", "by the verbs of one store: what waits together travels together")
        fact("values", f"lay in: {shares or 'not asked'}; all of them are removed again")
        fact("lent", f"{size_text(lent)} of this process's own memory" if lent else "nothing")
        fact("loop", f"never still for longer than {self.stall * 1000:.0f} ms")
        if self.left_out:
            shown = ", ".join(f"{tasks} × {size_text(size)}" for size, tasks in self.left_out)
            fact("left out", f"{shown}: more than may be stored at a time (--max-data)")

    def document(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {
            "rows": [row.document() for row in self.rows],
            "places": dict(self.places),
            "longest_stall": round(self.stall, 6),
            "left_out": [{"size": size, "tasks": tasks} for size, tasks in self.left_out],
        }


class _Case:
    """Values of one size, and tasks that store and read them."""

    def __init__(self, store: Store, size: int, tasks: int, seconds: float, max_data: int) -> None:
        self._store = store
        self._size = size
        self._tasks = tasks
        self._seconds = seconds
        count = min(max(tasks, _MOST_VALUES), max_data // size)
        prefix = f"aiomooncake-bench-{uuid.uuid4().hex}-"
        noise = os.urandom(min(size, 1 << 20))
        self._noise = (noise * -(-size // len(noise)))[:size]
        self._keys = [f"{prefix}{number}" for number in range(count)]
        self._values: dict[str, bytes] = {}
        self._stored: list[str] = []

    def prepare(self) -> None:
        """Make all values, before the clock runs."""
        for key in self._keys:
            self._values[key] = (key[-_STAMP:].encode() + self._noise)[: self._size]

    async def measure(self, verb: str) -> Row:
        """Call one verb for the time that it has."""
        rounds = self._puts if verb == "put" else self._reads
        times: list[float] = []
        seconds = await rounds(verb, times)
        times.sort()
        return Row(
            verb,
            self._size,
            self._tasks,
            len(times),
            seconds,
            times[len(times) // 2],
            times[min(len(times) - 1, len(times) * 99 // 100)],
        )

    async def _puts(self, _verb: str, times: list[float]) -> float:
        """Store all values, remove them, and so on; removing is not timed."""
        total = 0.0
        while total < self._seconds:
            if self._stored:
                await self._store.remove_many(self._keys, force=True)
                self._stored = []
            total += await self._side_by_side(
                self._put, iter(self._values.items()), self._seconds - total, times
            )
        return total

    async def _put(self, item: tuple[str, bytes]) -> None:
        await self._store.put(*item)
        self._stored.append(item[0])

    async def _reads(self, verb: str, times: list[float]) -> float:
        call = self._get if verb == "get" else self._exists
        return await self._side_by_side(call, itertools.cycle(self._stored), self._seconds, times)

    async def _get(self, key: str) -> None:
        value = await self._store.get(key)
        if value is None:
            raise _gone(key)
        if len(value) != self._size or value[:_STAMP] != self._values[key][:_STAMP]:
            raise ChecksumError(
                f"get of {key!r} brought another value; please report this", key=key
            )

    async def _exists(self, key: str) -> None:
        if not await self._store.exists(key):
            raise _gone(key)

    async def _side_by_side(
        self,
        call: Callable[[Any], Awaitable[None]],
        items: Iterator[Any],
        seconds: float,
        times: list[float],
    ) -> float:
        """Let the tasks call, each one after the other, until the time or the items are used up."""
        clock = time.perf_counter
        began = clock()
        until = began + seconds

        async def work() -> None:
            for item in items:
                before = clock()
                await call(item)
                after = clock()
                times.append(after - before)
                if after >= until:
                    return

        await together(work() for _ in range(self._tasks))
        return clock() - began

    async def places(self, own: str | None) -> Counter[str]:
        """Ask where some of the values lie."""
        found: Counter[str] = Counter()
        for replicas in await self._store.replicas_many(self._stored[:_ASKED]):
            for replica in replicas[:1]:
                found[_place(replica.kind, replica.endpoint, own)] += 1
        return found

    async def clean_up(self) -> None:
        """Remove all values, also those that cancelled puts are still storing."""
        for _ in range(_DRAIN_LOOKS):
            if not self._store.stats().in_flight:
                break
            await asyncio.sleep(_DRAIN_PAUSE)
        await self._store.remove_many(self._keys, force=True, return_exceptions=True)


def _gone(key: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(
        f"{key!r} went away while it was measured: the memory is so full that the master evicts, "
        "or the client that held it has left",
        key=key,
    )


def _place(kind: str, endpoint: str | None, own: str | None) -> str:
    if endpoint is None:
        return kind
    if own in (endpoint, _ALL):
        return "this process's own memory"
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        here = is_own_address(host)
    except OSError:
        here = False
    return "memory on this host" if here else "memory of other hosts"


async def _segments(store: Store) -> Sequence[Segment] | None:
    """List what is mounted, where the master's HTTP port is known."""
    config = store.config
    if config is None or config.master_metrics_port is None:
        return None
    if "://" in config.master_server_address or not config.master_server_address:
        return None
    host, _ = split_address(config.master_server_address, field="master_server_address")
    try:
        return await segments(host, config.master_metrics_port, _QUESTION_TIMEOUT)
    except OSError:
        return None

"""What is known about each rank of a warm-up, as a table, as lines and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aiomooncake.cli.options import in_options
from aiomooncake.errors import MooncakeError, WarmupError, rank_label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from aiomooncake.cli.terminal import Screen
    from aiomooncake.ranks import RankGroup
    from aiomooncake.warmup import Diagnosis, WarmupAttempt, WarmupPolicy, WarmupProgress

__all__ = ["Board", "Row"]

Rank = int | str

_ANSWER = len("put -200 NO_AVAILABLE_HANDLE")  # the usual one; keeps the table from jumping


@dataclass(slots=True)
class Row:
    """One rank.

    Attributes:
        rank: The rank.
        attempts: Its attempts so far.
        seen: When the last of them ended.
        ready: Whether that was the successful one.
        diagnosis: Why the warm-up gave up; None as long as it has not.
    """

    rank: Rank
    attempts: Sequence[WarmupAttempt] = ()
    seen: float = 0.0
    ready: bool = False
    diagnosis: Diagnosis | None = None

    @property
    def label(self) -> str:
        """The rank as people write it."""
        return rank_label(self.rank)


@dataclass(slots=True)
class Board:
    """The ranks of a warm-up; the event loop writes it, a screen's thread reads it.

    Attributes:
        rows: The ranks, in order.
        since: When the warm-up began.
        ready_since: From when on "ready" is counted; None for the beginning.
        status: Writes the line below the table.
    """

    rows: list[Row]
    since: float = field(default_factory=time.monotonic)
    ready_since: float | None = None
    status: Callable[[], str] = str

    @classmethod
    def of(cls, ranks: Iterable[Rank]) -> Board:
        """Make a board for ranks that have not tried yet."""
        return cls([Row(rank) for rank in ranks])

    @property
    def ready(self) -> bool:
        """Whether every rank is ready."""
        return all(row.ready for row in self.rows)

    async def watch(self, group: RankGroup, policy: WarmupPolicy, screen: Screen) -> None:
        """Warm a group up and show how it goes.

        Raises:
            WarmupError: At least one rank failed; the board knows which ones, and why.
        """
        rows: dict[Rank | None, Row] = {row.rank: row for row in self.rows}

        def on_attempt(progress: WarmupProgress) -> None:
            row = rows[progress.rank]
            self._record(row, progress.attempt)
            if not screen.live:
                screen.line(self._line(row))

        self.since = time.monotonic()
        with screen.table(self.render):
            try:
                reports = await group.warmup(policy, on_attempt=on_attempt)
            except WarmupError as error:
                self._settle(error.results or {})
                raise
            self._settle(reports)

    def _record(self, row: Row, attempt: WarmupAttempt) -> None:
        row.attempts = (*row.attempts, attempt)
        row.seen = time.monotonic()
        row.ready = attempt.ok

    def _settle(self, results: Mapping[Rank, Any]) -> None:
        """Take over how it ended; only now the real delays between the attempts are known."""
        for row in self.rows:
            result = results[row.rank]
            row.attempts = result.attempts
            if isinstance(result, WarmupError):
                row.diagnosis = result.diagnosis

    # ------------------------------------------------------------------ for people

    def render(self) -> RenderableType:
        """Draw the table."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, caption_justify="left")
        table.add_column("Rank", style="bold", no_wrap=True)
        table.add_column("Tries", justify="right", no_wrap=True)
        table.add_column("Last answer")
        table.add_column("State", no_wrap=True)
        for row in self.rows:
            style, state = self._state(row)
            answer = _answer(row.attempts[-1]) if row.attempts else ""
            table.add_row(
                row.label, str(len(row.attempts)), answer.ljust(_ANSWER), Text(state, style)
            )
        status = self.status()
        if status:
            table.caption = Text(f" {status}", "dim")
        return Padding(table, (1, 0, 0, 1))

    def _state(self, row: Row) -> tuple[str, str]:
        if row.ready:
            return "green", self._ready_text(row)
        if row.diagnosis is not None:
            return "red", f"failed: {row.diagnosis.kind}"
        if row.attempts:
            wait = row.seen + row.attempts[-1].delay - time.monotonic()
            if wait > 0:
                return "yellow", f"again in {wait:.1f} s"
        return "cyan", "trying"

    def _line(self, row: Row) -> str:
        attempt = row.attempts[-1]
        if attempt.ok:
            then = self._ready_text(row)
        elif attempt.delay:
            then = f"again in {attempt.delay:.1f} s"
        else:
            then = "giving up"
        when = row.seen - self.since
        return f"{when:7.2f} s  {row.label}  try {attempt.number}: {_answer(attempt)}, {then}"

    def ready_after(self, row: Row) -> float:
        """Return the seconds that a rank took to be ready."""
        return row.seen - (self.since if self.ready_since is None else self.ready_since)

    def _ready_text(self, row: Row) -> str:
        seconds = self.ready_after(row)
        return f"ready in {seconds * 1000:.0f} ms" if seconds < 1 else f"ready in {seconds:.2f} s"

    def refusals(self) -> Counter[str]:
        """Count the failed attempts by what they answered."""
        return Counter(
            _answer(attempt) for row in self.rows for attempt in row.attempts if not attempt.ok
        )

    def explain(self, screen: Screen) -> None:
        """Write each diagnosis once, with the ranks that have it, and what to do."""
        causes: dict[tuple[str, str], tuple[Diagnosis, list[str]]] = {}
        for row in self.rows:
            found = row.diagnosis
            if found is not None:
                same = causes.setdefault((found.kind, found.explanation), (found, []))
                same[1].append(row.label)
        for found, labels in causes.values():
            which = "every rank" if len(labels) == len(self.rows) else ", ".join(labels)
            screen.line()
            screen.fact("failed", f"{found.kind}, {which}", "bold red")
            screen.fact("what", in_options(found.explanation))
            if found.evidence:
                screen.fact("seen", in_options(found.evidence))
            screen.fact("cure", in_options(found.cure))

    # ------------------------------------------------------------------ for programs

    def document(
        self, master: str, error: BaseException | None, *, exit_code: int
    ) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "master": master,
            "ready": error is None and self.ready,
            "exit_code": exit_code,
            "error": None if error is None else _error_document(error),
            "ranks": [
                {
                    "rank": row.rank,
                    "ready": row.ready,
                    "seconds": round(max(0.0, row.seen - self.since), 6),
                    "attempts": [_attempt_document(attempt) for attempt in row.attempts],
                    "diagnosis": row.diagnosis and asdict(row.diagnosis),
                }
                for row in self.rows
            ],
        }


def _attempt_document(attempt: WarmupAttempt) -> dict[str, Any]:
    times = {"seconds": round(attempt.seconds, 6), "delay": round(attempt.delay, 6)}
    return asdict(attempt) | times


def _error_document(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, MooncakeError) else None
    return {"type": type(error).__name__, "code": code, "message": str(error)}


def _answer(attempt: WarmupAttempt) -> str:
    """Write an attempt as people read it: ``put -200 NO_AVAILABLE_HANDLE``."""
    if attempt.ok:
        return "put, exists, get"
    code = "" if attempt.code is None else f"{attempt.code} "
    return f"{attempt.step} {code}{attempt.name}"

"""The doctor: checks in their order, each by itself and in its time, and what they found."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio

from aiomooncake._verdict import DiagnosisKind, count_text
from aiomooncake.cli.exits import exit_code_of

if TYPE_CHECKING:
    from aiomooncake.cli.terminal import Screen
    from aiomooncake.config import StoreConfig, Target
    from aiomooncake.master import Segment

__all__ = ["Case", "Check", "Doctor", "Finding", "fail", "ok", "skip", "warn"]

State = Literal["ok", "warn", "fail", "skip"]

_EXITS: Final[Mapping[str, int]] = {"settings": 2, "engine": 3, "setup": 4, "local-master": 5}
"""What is told by exit codes that error classes have already."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        state: How it is.
        text: What was seen, with addresses and sizes.
        cure: What to do about it.
        kind: The fault as one word; empty unless it is one.
        facts: The same for programs.
    """

    state: State
    text: str
    cure: str = ""
    kind: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit code that it leads to."""
        if self.state != "fail":
            return 0
        return _EXITS.get(self.kind) or exit_code_of(self.kind)


def ok(text: str, **facts: Any) -> Finding:
    """Say that something is as it should be."""
    return Finding("ok", text, facts=facts)


def warn(text: str, cure: str, **facts: Any) -> Finding:
    """Say that something works, but not as it should, or may fail another time."""
    return Finding("warn", text, cure, facts=facts)


def fail(kind: str | DiagnosisKind, text: str, cure: str, **facts: Any) -> Finding:
    """Say that something is broken."""
    return Finding("fail", text, cure, str(kind), facts)


def skip(reason: str) -> Finding:
    """Say that something was not looked at."""
    return Finding("skip", reason)


@dataclass(slots=True)
class Case:
    """What is examined, and what earlier checks know of it.

    Attributes:
        named: The target that was given; None for the environment.
        read: Reads it.
        timeout: Seconds for the probe.
        engine_log: Whether the engine may write to stderr.
        target: What it was read into.
        config: The settings of a running master; None for others, and until they are read.
        engine: What the child process that imported the engine has told.
        metrics: Host and port of the master's HTTP server.
        mounted: The segments that it lists.
    """

    named: str | None
    read: Callable[[], Target]
    timeout: float
    engine_log: bool = False
    target: Target | None = None
    config: StoreConfig | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, int] | None = None
    mounted: Sequence[Segment] | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One question.

    Attributes:
        name: What it is about.
        look: Asks it.
        needs: Checks that must not have failed for it to make sense.
        kinds: The targets that it makes sense for.
        seconds: How long it may take.
    """

    name: str
    look: Callable[[Case], Awaitable[list[Finding]]]
    needs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("master",)
    seconds: float = 5.0


@dataclass(slots=True)
class Doctor:
    """One examination.

    Attributes:
        case: What is examined.
        checks: What is looked at, in this order.
        screen: Where to say so.
    """

    case: Case
    checks: Sequence[Check]
    screen: Screen
    _found: dict[str, tuple[list[Finding], float]] = field(default_factory=dict)
    _left_out: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Make all checks."""
        for check in self.checks:
            began = time.monotonic()
            target = self.case.target
            if target is not None and target.kind not in check.kinds:
                continue
            obstacle = self._obstacle(check)
            if obstacle:
                self._left_out.add(check.name)
            findings = [skip(obstacle)] if obstacle else await self._look(check)
            self._found[check.name] = findings, time.monotonic() - began
            if not obstacle:
                self._tell(check.name, findings)
        if self._left_out:
            names = [check.name for check in self.checks if check.name in self._left_out]
            self.screen.finding("skip", "", f"{', '.join(names)}: what they need failed")

    def _tell(self, name: str, findings: list[Finding]) -> None:
        for finding in findings:
            self.screen.finding(finding.state, name, finding.text)
            if finding.cure:
                self.screen.finding("", "", f"cure: {finding.cure}")

    def _obstacle(self, check: Check) -> str:
        """Say why a check would tell nothing."""
        for need in check.needs:
            if need in self._left_out:
                return f"not looked at, as {need} was not"
            findings, _ = self._found.get(need, ([], 0.0))
            if any(finding.state == "fail" for finding in findings):
                return f"not looked at, as {need} failed"
        return ""

    async def _look(self, check: Check) -> list[Finding]:
        findings: list[Finding] = []
        with anyio.move_on_after(check.seconds) as scope:
            try:
                findings = await check.look(self.case)
            except Exception as error:  # noqa: BLE001  # the checks that follow tell more
                text = f"the check itself failed: {type(error).__name__}: {error}"
                return [fail(DiagnosisKind.UNKNOWN, text, "please report this as a bug")]
        if scope.cancelled_caught:
            text = f"no end after {check.seconds:g} s"
            return [fail(DiagnosisKind.UNKNOWN, text, "look at what it asks; try again")]
        return findings

    @property
    def exit_code(self) -> int:
        """The exit code: that of the first thing that is broken."""
        codes = (finding.exit_code for findings, _ in self._found.values() for finding in findings)
        return next(filter(None, codes), 0)

    def sum_up(self) -> None:
        """Write the last line."""
        states = [finding.state for findings, _ in self._found.values() for finding in findings]
        failed, warned = states.count("fail"), states.count("warn")
        warnings = f", {count_text(warned, 'warning')}" if warned else ""
        self.screen.line()
        if failed:
            self.screen.line(f"{count_text(failed, 'failure')}{warnings}", "bold red")
        else:
            self.screen.line(f"healthy{warnings}", "bold green")

    def document(self, place: str, *, exit_code: int) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "target": place,
            "healthy": exit_code == 0,
            "exit_code": exit_code,
            "checks": [
                {
                    "name": name,
                    "seconds": round(seconds, 6),
                    "findings": [
                        {
                            "state": finding.state,
                            "kind": finding.kind or None,
                            "text": finding.text,
                            "cure": finding.cure or None,
                            "facts": dict(finding.facts),
                        }
                        for finding in findings
                    ],
                }
                for name, (findings, seconds) in self._found.items()
            ],
        }

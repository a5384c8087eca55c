"""The ``python -m benchmarks.soak [--seconds S] [--seed N] [--tasks N] [--json F]``."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.report import environment
from benchmarks.soak.run import MB, Soak, soak

_SHORTEST: Final = 10.0
_WRONG_SHOWN: Final = 10
_VERDICTS: Final = {True: "[green]ok[/green]", False: "[red]missed[/red]"}

# What may come on top between the end of the warm-up and the end. A leak grows with the time; what
# is kept for the next call does not: up to 13 threads of the store's lanes, and connections to the
# master, 3 to 17 of them, each of three descriptors here because both ends of the line are here.
_MEMORY_ROOM: Final = 64 * MB
_THREADS_ROOM: Final = 10
_DESCRIPTORS_ROOM: Final = 45

_LONGEST_CALL: Final = 45.0
_LONGEST_STALL: Final = 1.0
"""Stuck transfers spin on as many cores as there are, and this process may not be the only one."""


@dataclass(frozen=True, slots=True)
class Line:
    """A figure and its bound."""

    what: str
    figure: str
    bound: str
    met: bool


def main(arguments: list[str] | None = None) -> int:
    """Run a soak and print its figures; 0 if every bound is met."""
    options = _parse(arguments)
    console = Console(stderr=options.json == "-")
    seed: int = options.seed
    console.print(f"seed {seed}: --seed {seed} brings the same faults in the same order")
    result = asyncio.run(soak(options.seconds, seed, options.tasks))
    lines = judge(result)
    _print(result, lines, console)
    if options.json is not None:
        text = json.dumps({"environment": environment(), **result.to_json()}, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    return 0 if all(line.met for line in lines) else 1


def judge(result: Soak) -> list[Line]:
    """Compare the figures with their bounds."""
    seconds, verb = result.longest_call
    before, after = result.before, result.after
    more = after.resident - before.resident
    return [
        Line("values that were read", f"{result.values}", "> 0", result.values > 0),
        Line("wrong values and errors of no kind", f"{len(result.wrong)}", "0", not result.wrong),
        Line("values lost without a fault", f"{result.lost}", "0", not result.lost),
        Line("calls left after the traffic", f"{result.stuck}", "0", not result.stuck),
        Line("near the engine's 60 s", "yes" if result.tainted else "no", "no", not result.tainted),
        _at_most(f"longest call ({verb})", seconds, _LONGEST_CALL, "s"),
        _at_most("longest stall of the loop", result.longest_stall, _LONGEST_STALL, "s"),
        _at_most(f"memory over {before.resident / MB:.0f} MB", more / MB, _MEMORY_ROOM / MB, "MB"),
        _at_most(
            f"threads over {before.threads}", after.threads - before.threads, _THREADS_ROOM, ""
        ),
        _at_most(
            f"descriptors over {before.descriptors}",
            after.descriptors - before.descriptors,
            _DESCRIPTORS_ROOM,
            "",
        ),
    ]


def _at_most(what: str, figure: float, bound: float, unit: str) -> Line:
    return Line(
        what, f"{figure:.3g} {unit}".strip(), f"≤ {bound:g} {unit}".strip(), met=figure <= bound
    )


def _print(result: Soak, lines: list[Line], console: Console) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for line in lines:
        table.add_row(line.what, line.figure, line.bound, _VERDICTS[line.met])
    console.print(table)
    calls = sum(result.calls.values())
    console.print(
        f"{calls} calls in {result.seconds:.0f} s, {result.cancelled} of them cancelled",
        highlight=False,
    )
    for title, counts in (
        ("calls", result.calls),
        ("faults", result.faults),
        ("errors", result.errors),
    ):
        console.print(f"{title}: {_counts(counts)}", highlight=False, markup=False, soft_wrap=True)
    for wrong in result.wrong[:_WRONG_SHOWN]:
        console.print(wrong, style="red", highlight=False, markup=False, soft_wrap=True)


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description="Call all verbs by many tasks while master, peers and lines break.",
    )
    parser.add_argument("--seconds", type=_seconds, default=600.0, help="of traffic (default 600)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the chances"
    )
    parser.add_argument("--tasks", type=int, default=64, help="that call (default 64)")
    parser.add_argument("--json", metavar="FILE", help='where to write all figures; "-" = stdout')
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= _SHORTEST:
        raise argparse.ArgumentTypeError(f"{text} is too short: give {_SHORTEST:g} or more")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``python -m benchmarks [--smoke] [--only NAME …] [--json F] [--plots D]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench import Bench, Group
from benchmarks.options import check_plots, count
from benchmarks.report import environment, print_failures, print_table
from benchmarks.scenarios import GROUPS

_FORMAT = 1
_ROUNDS = 5
_WIDTH = 130  # columns, where the output is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Run scenarios, print the table, write the JSON; 0 if all of them could be measured.

    Whether targets are met does not change the exit code: that is for people to judge, who know
    the machine.
    """
    sentences = {one.name: one.sentence for group in GROUPS for one in group.scenarios}
    options = _parse(arguments, list(sentences))
    wanted = {name: sentences[name] for name in sentences if name in (options.only or sentences)}
    bench = Bench(smoke=options.smoke, rounds=options.rounds or (1 if options.smoke else _ROUNDS))
    surroundings = environment()
    began = time.monotonic()
    _run(bench, frozenset(wanted))
    order = list(wanted)
    bench.rows.sort(key=lambda row: order.index(row.scenario))
    # JSON on the standard output stands there alone.
    console = _console(stderr=options.json == "-")
    print_table(bench.rows, console)
    print_failures(bench.failures, console)
    result = {
        "format": _FORMAT,
        "smoke": bench.smoke,
        "rounds": bench.rounds,
        "seconds": time.monotonic() - began,
        "environment": surroundings,
        "scenarios": wanted,
        **bench.to_json(),
    }
    if options.json is not None:
        _write(result, options.json)
    if options.plots is not None:
        from benchmarks.plots import draw

        draw(result, options.plots)
    return 1 if bench.failures else 0


def _run(bench: Bench, wanted: frozenset[str]) -> None:
    """Measure group after group; in a smoke run, which measures nothing of worth, side by side."""
    notes = _console(stderr=True)

    def run(group: Group) -> None:
        names = [one.name for one in group.scenarios if one.name in wanted]
        if not names:
            return
        began = time.monotonic()
        try:
            group.run(bench, frozenset(names))
        except Exception:  # noqa: BLE001  # the others are still worth measuring
            bench.failures |= dict.fromkeys(names, traceback.format_exc())
        seconds = time.monotonic() - began
        notes.print(f"[dim]{', '.join(names)}: {seconds:.0f} s[/dim]", highlight=False)

    with ThreadPoolExecutor(len(GROUPS) if bench.smoke else 1) as pool:
        list(pool.map(run, GROUPS))


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDTH)


def _parse(arguments: list[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure aiomooncake beside the other ways to use Mooncake from asyncio.",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="only show that everything runs, in seconds"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=count, help=f"of each measurement (default {_ROUNDS})")
    parser.add_argument("--json", metavar="FILE", help='where to write all figures; "-" = stdout')
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="where to draw SVG plots (needs matplotlib)"
    )
    options = parser.parse_args(arguments)
    check_plots(parser, options)
    return options


def _write(result: dict[str, Any], place: str) -> None:
    text = json.dumps(result, indent=1) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        Path(place).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

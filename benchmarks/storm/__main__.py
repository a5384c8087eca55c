"""The command line: ``python -m benchmarks.storm [--ranks 512 4096] [--plots D]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks.options import check_plots, count
from benchmarks.storm.calibration import DEFAULT, Calibration, calibrate
from benchmarks.storm.report import averages, print_table
from benchmarks.storm.simulation import CHOICE, POLICIES, SCENES, Outcome, simulate

_RANKS = (64, 512, 4096)
_SEEDS = 5
_WIDTH = 130  # columns, where the output is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Calibrate, or simulate: print the table, write the JSON, draw the plots."""
    options = _parse(arguments)
    if options.calibrate:
        measured = calibrate()
        if options.calibration.exists() and options.best:
            measured = measured.best_with(Calibration.load(options.calibration))
        measured.save(options.calibration)
        print(options.calibration.read_text(encoding="utf-8"), end="")
        return 0
    calibration = Calibration.load(options.calibration)
    console = _console(stderr=options.json == "-")
    outcomes: list[Outcome] = []
    for ranks in options.ranks:
        began = time.monotonic()
        outcomes += [
            simulate(
                scene, contender, ranks, calibration,
                seed=seed, workers=options.workers, rpc_timeout=options.rpc_timeout,
            )
            for scene in SCENES
            for contender in (CHOICE if options.choice else POLICIES)
            for seed in range(options.seeds)
        ]  # fmt: skip
        took = time.monotonic() - began
        _console(stderr=True).print(f"[dim]{ranks} ranks: {took:.0f} s[/dim]", highlight=False)
    print_table(averages(outcomes), console)
    result = {
        "workers": options.workers,
        "rpc_timeout": options.rpc_timeout,
        "scenes": {scene.name: scene.sentence for scene in SCENES},
        "averages": averages(outcomes),
        "runs": [outcome.to_json() for outcome in outcomes],
    }
    if options.json is not None:
        text = json.dumps(result, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if options.plots is not None:
        from benchmarks.storm.plots import draw

        draw(outcomes, options.plots)
    return 0


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDTH)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storm",
        description="Let thousands of ranks warm up against a model of one master.",
    )
    parser.add_argument(
        "--ranks", nargs="+", type=count, default=_RANKS, metavar="N", help="how many"
    )
    parser.add_argument("--seeds", type=count, default=_SEEDS, help="runs that are averaged")
    parser.add_argument(
        "--choice", action="store_true", help="compare variants of the default policy instead"
    )
    parser.add_argument(
        "--workers", type=count, default=2, help="cores of the master (default: %(default)s)"
    )
    parser.add_argument(
        "--rpc-timeout", type=float, default=2.5, help="seconds (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help='where to write all figures; "-" = stdout')
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="where to draw SVG plots (needs matplotlib)"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="measure a real master instead, in half a minute"
    )
    parser.add_argument(
        "--best", action="store_true", help="keep the less disturbed of new and old figures"
    )
    parser.add_argument(
        "--calibration", type=Path, default=DEFAULT, metavar="FILE", help="its figures"
    )
    options = parser.parse_args(arguments)
    if options.plots is not None and options.choice:
        parser.error("--plots draws the comparison of policies; leave --choice out")
    check_plots(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())

"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import importlib.util

__all__ = ["check_plots", "count"]


def count(text: str) -> int:
    """Read a count: 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no count; give 1 or more")
    return number


def check_plots(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse ``--plots`` where nothing can draw."""
    if options.plots is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install 'aiomooncake[bench]'")

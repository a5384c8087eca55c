"""What a run leaves behind: a table for people, and what the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

import aiomooncake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from benchmarks.bench import Row, Value

__all__ = ["environment", "print_failures", "print_table"]

_VERDICTS = {True: "[green]ok[/green]", False: "[red]missed[/red]", None: ""}


def environment() -> dict[str, Any]:
    """Describe what the figures were measured on and with."""
    return {
        "aiomooncake": aiomooncake.__version__,
        "engine": _engine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "uvloop": _version("uvloop"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print a line per comparison, under the name of its scenario."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("target", overflow="fold")
    for heading in ("aiomooncake", "alternative", "better"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("which is", overflow="fold", style="dim")
    table.add_column("", no_wrap=True, min_width=6)
    scenario = ""
    for row in rows:
        if row.scenario != scenario:
            scenario = row.scenario
            table.add_row(f"[bold]{scenario}[/bold]")
        table.add_row(
            f"  {row.what}",
            row.target,
            _shown(row.ours, row.unit),
            _shown(row.alternative, row.unit),
            _shown(row.ratio, "times"),
            row.against,
            _VERDICTS[row.met],
        )
    console.print(table)


def print_failures(failures: dict[str, str], console: Console) -> None:
    """Print what could not be measured, and why."""
    for reason in dict.fromkeys(failures.values()):
        names = ", ".join(name for name, why in failures.items() if why == reason)
        console.print(f"[red]{names} could not be measured:[/red]")
        console.print(reason, markup=False, highlight=False)


def _shown(value: Value | None, unit: str) -> str:
    if value is None:
        return "–"
    text = _number(value.number, unit)
    return f"> {text}" if value.at_least else text


def _number(number: float, unit: str) -> str:
    if math.isinf(number):
        return "∞"
    if unit == "s":
        if number < 1e-3:
            return f"{number * 1e6:.1f} µs"
        return f"{number:.2f} s" if number >= 1 else f"{number * 1000:.1f} ms"
    if unit == "bytes":
        return f"{number / 1e6:.2f} MB" if number < 1e7 else f"{number / 1e6:.0f} MB"
    if unit == "1/s":
        return f"{number / 1000:.1f} k/s"
    if unit == "times":
        return f"{number:.2f}×" if number < 10 else f"{number:.0f}×"
    return f"{number:.1f} {unit}"


def _engine() -> str | None:
    """Return name and version of the wheel that brings the ``mooncake`` package."""
    wheels = importlib.metadata.packages_distributions().get("mooncake", [])
    return ", ".join(f"{wheel} {_version(wheel)}" for wheel in sorted(set(wheels))) or None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

"""The table of a simulation: a line per policy, averaged over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from benchmarks.storm.simulation import Outcome

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["averages", "print_table"]

_AVERAGED: Final = (
    "all_ready",
    "wait_mean",
    "wait_median",
    "wait_p99",
    "wait_max",
    "fairness",
    "failed",
    "peak",
    "retry_peak",
    "requests",
    "tries",
    "idle_requests",
    "timed_out",
    "longest_wait",
    "busy",
)


def averages(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the means over the seeds, in the order in which the cases came."""
    cases: dict[tuple[int, str, str], list[Outcome]] = {}
    for one in outcomes:
        cases.setdefault((one.ranks, one.scene, one.policy), []).append(one)
    return [
        {"ranks": ranks, "scene": scene, "policy": policy, "seeds": len(runs)}
        | {name: statistics.fmean(getattr(run, name) for run in runs) for name in _AVERAGED}
        for (ranks, scene, policy), runs in cases.items()
    ]


def print_table(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the lines under their scene and number of ranks."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in (
        "all ready\ns", "wait: mean\ns", "median\ns", "p99\ns", "fair-\nness", "gave\nup",
        "peak\n1/s", "of retries\n1/s", "requests\n", "timed\nout", "slowest\nms", "busy\n%",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    case: tuple[str, int] | None = None
    for row in rows:
        if (row["scene"], row["ranks"]) != case:
            case = row["scene"], row["ranks"]
            table.add_row(f"[bold]{row['scene']}, {row['ranks']}[/bold]")
        table.add_row(
            f"  {row['policy']}",
            *(f"{row[name]:.2f}" for name in ("all_ready", "wait_mean", "wait_median", "wait_p99")),
            f"{row['fairness']:.2f}",
            f"{row['failed']:.0f}",
            *(f"{row[name]:.0f}" for name in ("peak", "retry_peak", "requests", "timed_out")),
            f"{row['longest_wait'] * 1000:.0f}",
            f"{row['busy']:.1%}".removesuffix("%"),
        )
    console.print(table)

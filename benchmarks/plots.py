"""Draw the figures of a run: ``python -m benchmarks.plots RESULT.json DIRECTORY``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.peers import (
    OURS,
    WRAPPER,
    AnyioToThread,
    BlockingBatches,
    BlockingLoop,
    Executor,
    Threads,
    ToThread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SETTINGS", "draw"]

_STYLES: Mapping[str, tuple[str, str]] = {
    OURS: ("#d1495b", "o"),
    WRAPPER: ("#30638e", "s"),
    ToThread.name: ("#5b9bd5", "^"),
    AnyioToThread.name: ("#8fb8de", "v"),
    Executor.name: ("#66a182", "D"),
    Threads.name: ("#b08968", "P"),
    BlockingLoop.name: ("#6c757d", "x"),
    BlockingBatches.name: ("#212529", "*"),
    "binding in threads": ("#30638e", "s"),
}
SETTINGS = {
    "svg.hashsalt": "aiomooncake",  # the same figures make the same file
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Found = Sequence[Mapping[str, Any]]
Reading = Callable[[Mapping[str, Any]], float]


def draw(result: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw what a run has measured; scenarios that it left out are left out.

    Args:
        result: The run's JSON.
        directory: Where the SVG files go; made if it is not there.

    Returns:
        The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    measured: Found = [one for one in result["measurements"] if one["medians"]]
    files = []
    with mpl.rc_context(SETTINGS):
        for name, figure in _figures(measured):
            path = directory / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            files.append(path)
    return files


def _figures(measured: Found) -> Iterable[tuple[str, Figure]]:
    for place, name in (
        ("own memory", "tasks-own-memory"),
        ("other process", "tasks-other-process"),
    ):
        mine = [one for one in measured if one["case"].get("place") == place]
        if _some(mine, "get"):
            yield name, _tasks(mine, ("get", "put", "exists", "mixed"), place)
            if place == "own memory":
                yield "get", _tasks(mine, ("get",), place)
    if _some(measured, "get-many"):
        yield "keys-per-call", _keys_per_call(measured)
    if _some(measured, "sizes"):
        yield "sizes", _sizes(measured)
    if _some(measured, "ranks"):
        yield "ranks", _ranks(measured)
    if _some(measured, "profile"):
        yield "profile", _profile(measured)


def _tasks(measured: Found, scenarios: Sequence[str], place: str) -> Figure:
    figure, axes = _panels(scenarios, width=6.2 if len(scenarios) == 1 else 4.6)
    for panel, scenario in zip(axes, scenarios, strict=True):
        mine = _some(measured, scenario)
        for peer in _peers(mine):
            for loop in ("asyncio", "uvloop"):
                if loop == "uvloop" and peer not in (OURS, WRAPPER):
                    continue
                label = f"{peer}, uvloop" if loop == "uvloop" else peer
                _line(
                    panel, [one for one in mine if one["case"]["loop"] == loop], peer, "tasks",
                    _rate, label=label, dashed=loop == "uvloop",
                )  # fmt: skip
        _scales(panel, "tasks", "operations per second", [1, 8, 64, 512])
        panel.set_title(f"{scenario}, 4 KB, {place}")
    _legend(figure, axes)
    return figure


def _keys_per_call(measured: Found) -> Figure:
    panels = [
        (scenario, place)
        for scenario in ("get-many", "put-many")
        for place in ("own memory", "other process")
    ]
    figure, axes = _panels(panels)
    for panel, (scenario, place) in zip(axes, panels, strict=True):
        mine = [
            one
            for one in _some(measured, scenario)
            if one["case"]["place"] == place and one["case"]["loop"] == "asyncio"
        ]
        for peer in _peers(mine):
            _line(panel, mine, peer, "batch", _microseconds)
        _scales(panel, "keys in a call", "µs per key", [4, 16, 64, 256, 1000])
        panel.set_title(f"{scenario}, 4 KB, {place}")
    _legend(figure, axes)
    return figure


def _sizes(measured: Found) -> Figure:
    panels = [(verb, tasks) for verb in ("get", "put") for tasks in (1, 64)]
    figure, axes = _panels(panels)
    for panel, (verb, tasks) in zip(axes, panels, strict=True):
        mine = [
            one
            for one in _some(measured, "sizes")
            if one["case"]["verb"] == verb and one["case"]["tasks"] == tasks
        ]
        for peer in _peers(mine):
            _line(panel, mine, peer, "bytes", _megabytes)
        sizes = sorted({one["case"]["bytes"] for one in mine})[::2]
        _scales(panel, "value size", "MB per second", sizes)
        panel.set_xticklabels([_size(size) for size in sizes])
        panel.set_title(f"{verb}, {tasks} task{'s' * (tasks > 1)}, other process")
    _legend(figure, axes)
    return figure


def _ranks(measured: Found) -> Figure:
    figure, axes = _panels(["seconds", "still"])
    mine = _some(measured, "ranks")
    counts = sorted({one["case"]["ranks"] for one in mine})
    for panel, (name, title, label) in zip(
        axes,
        (
            ("seconds", "connect, warm up and close", "seconds"),
            ("longest_stall", "loop still for", "milliseconds"),
        ),
        strict=True,
    ):
        times = 1000 if label == "milliseconds" else 1
        for peer in _peers(mine):

            def reading(one: Mapping[str, Any], name: str = name, times: int = times) -> float:
                return float(one["medians"][name]) * times

            _line(panel, mine, peer, "ranks", reading)
        _scales(panel, "ranks in one loop", label, counts)
        panel.set_title(title)
    _legend(figure, axes)
    return figure


def _profile(measured: Found) -> Figure:
    mine = [one for one in _some(measured, "profile") if one["case"]["loop"] == "asyncio"]
    of = {one["peer"]: one["medians"] for one in mine}
    bars: list[tuple[str, list[tuple[str, float]]]] = [
        (
            "merged get: CPU",
            [
                ("loop thread", of[OURS]["loop"]),
                ("worker threads, Python", of[OURS]["worker"]),
                ("engine", of[OURS]["engine_cpu"]),
            ],
        ),
        ("merged get: clock", [("clock", of[OURS]["wall"])]),
        ("bare futures: clock", [("clock", of["bare futures"]["wall"])]),
        ("get_batch of 256: clock", [("clock", of[BlockingBatches.name]["wall"])]),
    ]
    colours = {
        "loop thread": "#d1495b",
        "worker threads, Python": "#e9a6af",
        "engine": "#30638e",
        "clock": "#6c757d",
    }
    figure = Figure(figsize=(7.5, 2.9), layout="constrained")
    panel = figure.subplots()
    for place, (_, parts) in enumerate(bars):
        left = 0.0
        for part, seconds in parts:
            panel.barh(place, seconds * 1e6, left=left, color=colours[part], label=part)
            left += seconds * 1e6
        panel.text(left, place, f" {left:.1f}", va="center")
    panel.set_yticks(range(len(bars)), [name for name, _ in bars])
    panel.invert_yaxis()
    panel.set_xlabel("µs per key: 512 tasks, 4 KB, own memory, asyncio")
    unique = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4)
    return figure


def _panels(names: Sequence[object], width: float = 4.6) -> tuple[Figure, list[Axes]]:
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    size = (width * columns, 3.1 * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _line(
    panel: Axes,
    measured: Found,
    peer: str,
    along: str,
    reading: Reading,
    *,
    label: str = "",
    dashed: bool = False,
) -> None:
    points = sorted((one["case"][along], reading(one)) for one in measured if one["peer"] == peer)
    if not points:
        return
    colour, marker = _STYLES[peer]
    panel.plot(
        *zip(*points, strict=True), color=colour, marker=marker, markersize=5,
        linestyle="--" if dashed else "-", linewidth=2.2 if peer == OURS else 1.2,
        label=label or peer, zorder=3 if peer == OURS else 2,
    )  # fmt: skip


def _scales(panel: Axes, across: str, up: str, ticks: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(_plain))
    panel.minorticks_off()
    panel.set_xlabel(across)
    panel.set_ylabel(up)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    lines: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3 if len(axes) == 1 else 4
    )


def _some(measured: Found, scenario: str) -> Found:
    return [one for one in measured if one["scenario"] == scenario]


def _peers(measured: Found) -> list[str]:
    there = {one["peer"] for one in measured}
    return [peer for peer in _STYLES if peer in there]


def _rate(one: Mapping[str, Any]) -> float:
    return float(one["medians"]["operations_per_second"])


def _microseconds(one: Mapping[str, Any]) -> float:
    return 1e6 / _rate(one)


def _megabytes(one: Mapping[str, Any]) -> float:
    return _rate(one) * float(one["case"]["bytes"]) / 1e6


def _plain(number: float, _: int) -> str:
    return f"{number / 1000:g} k" if number >= 1000 else f"{number:g}"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


if __name__ == "__main__":
    for file in draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])):
        print(file)

"""Draw what a simulation came to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.plots import SETTINGS
from benchmarks.storm.master import WINDOW
from benchmarks.storm.simulation import FIXED, OURS, SCENES, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_STYLES = {
    OURS: ("#d1495b", "o"),
    FIXED: ("#30638e", "s"),
    "exponential": ("#66a182", "D"),
    "full jitter": ("#b08968", "P"),
}


def draw(outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Draw load over time and waits at the largest number of ranks, and figures by ranks.

    Args:
        outcomes: Of all scenes, policies, numbers of ranks and seeds.
        directory: Where the SVG files go; made if it is not there.

    Returns:
        The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    most = max(one.ranks for one in outcomes)
    largest = [one for one in outcomes if one.ranks == most]
    files = []
    with mpl.rc_context(SETTINGS):
        for name, figure in (
            ("storm-load", _panels(largest, _load)),
            ("storm-waits", _panels(largest, _waits)),
            ("storm-ranks", _by_ranks(outcomes)),
        ):
            path = directory / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            files.append(path)
    return files


def _panels(outcomes: Sequence[Outcome], one: Callable[[Axes, Sequence[Outcome]], None]) -> Figure:
    scenes = [scene.name for scene in SCENES if _of(outcomes, scene=scene.name)]
    rows = math.ceil(len(scenes) / 2)
    figure = Figure(figsize=(9.2, 3.1 * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for panel, scene in zip(axes, scenes, strict=False):
        mine = _of(outcomes, scene=scene)
        one(panel, mine)
        panel.set_title(f"{scene}, {mine[0].ranks} ranks")
    _legend(figure, axes)
    return figure


def _load(panel: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw the requests per second over time, of the first seed: an average would blur peaks."""
    for policy, (colour, _) in _STYLES.items():
        for run in _of(outcomes, policy=policy, seed=min(one.seed for one in outcomes)):
            rates = [count / WINDOW for count in run.windows]
            panel.step(
                [WINDOW * (place + 1) for place in range(len(rates))], rates, color=colour,
                linewidth=1.6 if policy == OURS else 1.0, label=policy,
                zorder=3 if policy == OURS else 2,
            )  # fmt: skip
    panel.set_yscale("symlog", linthresh=1000)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(_plain))
    panel.set_xlim(0, max(one.all_ready for one in _of(outcomes, policy=OURS)) + 1.5)
    panel.set_xlabel("seconds")
    panel.set_ylabel("requests per second")


def _waits(panel: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw which share of the ranks had waited for at most so long, over all seeds."""
    for policy, (colour, _) in _STYLES.items():
        waits = sorted(wait for run in _of(outcomes, policy=policy) for wait in run.waits)
        if not waits:
            continue
        step = max(1, len(waits) // 500)
        points = [*waits[::step], waits[-1]]
        shares = [place / len(waits) for place in range(0, len(waits), step)] + [1.0]
        panel.plot(
            points, shares, color=colour, label=policy,
            linewidth=2.2 if policy == OURS else 1.2, zorder=3 if policy == OURS else 2,
        )  # fmt: skip
    panel.set_xlim(0, 3)
    panel.set_xlabel("seconds from when a rank could be ready until it was")
    panel.set_ylabel("share of the ranks")


def _by_ranks(outcomes: Sequence[Outcome]) -> Figure:
    scenes = [scene.name for scene in SCENES if _of(outcomes, scene=scene.name)]
    counts = sorted({run.ranks for run in outcomes})
    figure = Figure(figsize=(3.1 * len(scenes), 6.2), layout="constrained")
    axes = figure.subplots(2, len(scenes), squeeze=False)
    rows: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("peak, requests per second", lambda run: run.peak),
        ("mean wait, seconds", lambda run: run.wait_mean),
    )
    for row, (label, reading) in zip(axes, rows, strict=True):
        for panel, scene in zip(row, scenes, strict=True):
            for policy, (colour, marker) in _STYLES.items():
                mine = _of(outcomes, scene=scene, policy=policy)
                means = [
                    statistics.fmean(reading(run) for run in mine if run.ranks == count)
                    for count in counts
                ]
                panel.plot(
                    counts, means, color=colour, marker=marker, markersize=5, label=policy,
                    linewidth=2.2 if policy == OURS else 1.2, zorder=3 if policy == OURS else 2,
                )  # fmt: skip
            panel.set_xscale("log", base=2)
            panel.set_xticks(counts, [str(count) for count in counts])
            if label.startswith("peak"):
                panel.set_yscale("log")
                panel.yaxis.set_major_formatter(FuncFormatter(_plain))
            else:
                panel.set_ylim(bottom=0)
            panel.minorticks_off()
            panel.set_title(scene)
            panel.set_xlabel("ranks")
        row[0].set_ylabel(label)
    _legend(figure, axes.flat)
    return figure


def _of(
    outcomes: Iterable[Outcome],
    *,
    scene: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
) -> list[Outcome]:
    return [
        one
        for one in outcomes
        if scene in (None, one.scene) and policy in (None, one.policy) and seed in (None, one.seed)
    ]


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    handles, labels = next(iter(axes)).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _plain(number: float, _: int) -> str:
    return f"{number / 1000:g} k" if number >= 1000 else f"{number:g}"

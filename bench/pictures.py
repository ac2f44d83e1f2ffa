"""Pictures of the report for results of other commands than experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import drawing, grid, turns
from .contests import OURS
from .drawing import BLUE, ORANGE
from .experiment import Results


def engine(lines: Sequence[Results]) -> Figure:
    """How long the peers take, in multiples of our time."""
    rows = sum(1 + len(line["median_seconds"]) for line in lines)
    figure, [[axes]] = drawing.panels(1, 1, 9.5, 0.8 + 0.23 * rows)
    ticks: dict[float, str] = {}
    y = 0.0
    for line in lines:
        y = _contest(axes, y, line, ticks)
    styles: dict[str, dict[str, Any]] = {
        "peer, median and quartiles": {"marker": "o", "color": BLUE, "ls": ""},
        "ours": {"color": ORANGE, "lw": 1},
        "asked for": {"marker": "|", "color": "grey", "ms": 11, "mew": 1.6, "ls": ""},
        "the floor": {"color": "black", "ls": ":"},
    }
    for label, style in styles.items():
        axes.plot([], [], label=label, **style)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=9)
    axes.set(xscale="log", ylim=(y - 0.7, -0.8), xlabel="time over ours")
    axes.set_yticks(list(ticks), list(ticks.values()), size=8.5)
    drawing.numbers(axes.xaxis, "{:,.10g}×")
    drawing.rows_of_bars(axes)
    return figure


def _contest(axes: Axes, y: float, line: Results, ticks: dict[float, str]) -> float:
    """Draw a contest from a height on, and name its rows; the height of the next one."""
    medians, ours = line["median_seconds"], line["median_seconds"][OURS]
    axes.text(0.01, y, line["work"], transform=axes.get_yaxis_transform(), va="center", size=8.5)
    # The title has a row of its own, and below the group is a little room.
    top, bottom = y + 0.6, y + len(medians) - 0.4
    axes.vlines(1, top, bottom, color=ORANGE, lw=1.2)
    axes.vlines(line["floor"]["seconds"] / ours, top, bottom, color="black", ls=":", lw=1.2)
    for peer, ratio in line["ratios"].items():
        if peer not in medians:
            continue
        y += 1
        ticks[y] = peer
        samples = turns.counting(line["samples_seconds"][peer], line["rounds_that_count"])
        drawing.bar(axes, y, samples, ours, medians[peer] / ours)
        if ratio["required"] is not None:
            axes.plot(ratio["required"], y, "|", color="grey", ms=11, mew=1.6)
    return y + 1.4


def schedules(chains: dict[str, Results]) -> Figure:
    """For every chain the time of ``auto`` over that of the best and of the linear schedule."""
    figure, [panels] = drawing.panels(1, 2, 9.5, 1.1 + 0.225 * len(chains), sharey=True)
    for axes, which in zip(panels, ("best", "linear"), strict=True):
        for limit, dashes in ((1, "-"), (1.05, "--"), (1.1, "--")):
            axes.axvline(limit, color="grey", ls=dashes, lw=1, zorder=0)
        lowest = 1.0
        for y, result in enumerate(chains.values()):
            ratios = grid.ratios(result["samples_seconds"])
            lowest = min(lowest, ratios[f"auto/{which}"])
            unit = result["median_seconds"][ratios[which]]
            drawing.bar(axes, y, result["samples_seconds"]["auto"], unit, ratios[f"auto/{which}"])
        # Where products pay, the linear schedule may take many times as long.
        if lowest < 0.5:
            axes.set_xscale("log")
        axes.set(
            ylim=(len(chains) - 0.4, -0.6), xlabel=f"time of auto / time of the {which} schedule"
        )
        drawing.numbers(axes.xaxis, "{:.3g}")
        drawing.rows_of_bars(axes)
    panels[0].set_yticks(range(len(chains)), list(chains), size=8.5)
    return figure

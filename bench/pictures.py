"""Pictures of the report for results that are not an experiment's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from . import grid
from .contests import OURS
from .experiment import Results

__all__ = ["engine", "schedules"]

# Of the palette by Okabe and Ito.
_BLUE, _ORANGE = "#0072b2", "#d55e00"


def engine(lines: Sequence[Results]) -> Figure:
    """How long the peers take, in multiples of our time."""
    rows = sum(1 + len(line["median_seconds"]) for line in lines)
    figure = Figure(figsize=(9.5, 0.8 + 0.23 * rows), layout="constrained")
    axes = figure.subplots()
    ticks: dict[float, str] = {}
    y = 0.0
    for line in lines:
        medians, counted = line["median_seconds"], line["rounds_that_count"]
        ours = medians[OURS]
        axes.text(
            0.01, y, line["work"], transform=axes.get_yaxis_transform(), va="center", size=8.5
        )
        # The title has a row of its own, and below the group is a little room.
        top, bottom = y + 0.6, y + len(medians) - 0.4
        axes.vlines(1, top, bottom, color=_ORANGE, lw=1.2)
        axes.vlines(line["floor"]["seconds"] / ours, top, bottom, color="black", ls=":", lw=1.2)
        for peer, ratio in line["ratios"].items():
            if peer not in medians:
                continue
            y += 1
            ticks[y] = peer
            samples = [*chain(*compress(line["samples_seconds"][peer], counted))]
            axes.hlines(y, *_quartiles(samples, ours), color=_BLUE, lw=5, alpha=0.3)
            axes.plot(medians[peer] / ours, y, "o", color=_BLUE, ms=4.5)
            if ratio["required"] is not None:
                axes.plot(ratio["required"], y, "|", color="grey", ms=11, mew=1.6)
        y += 1.4
    for label, style in (
        ("peer, median and quartiles", {"marker": "o", "color": _BLUE, "ls": ""}),
        ("ours", {"color": _ORANGE, "lw": 1}),
        ("asked for", {"marker": "|", "color": "grey", "ms": 11, "mew": 1.6, "ls": ""}),
        ("the floor", {"color": "black", "ls": ":"}),
    ):
        axes.plot([], [], label=label, **style)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=9)
    axes.set(xscale="log", ylim=(y - 0.7, -0.8), xlabel="time over ours")
    axes.set_yticks(list(ticks), list(ticks.values()), size=8.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}×"))
    _plain(axes)
    return figure


def schedules(chains: dict[str, Results]) -> Figure:
    """For every chain the time of ``auto`` over that of the best and of the linear schedule."""
    figure = Figure(figsize=(9.5, 1.1 + 0.225 * len(chains)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, which in zip(panels, ("best", "linear"), strict=True):
        for limit, dashes in ((1, "-"), (1.05, "--"), (1.1, "--")):
            axes.axvline(limit, color="grey", ls=dashes, lw=1, zorder=0)
        ratios = []
        for y, result in enumerate(chains.values()):
            found = grid.ratios(result["samples_seconds"])
            ratios.append(found[f"auto/{which}"])
            other = result["median_seconds"][found[which]]
            quartiles = _quartiles(result["samples_seconds"]["auto"], other)
            axes.hlines(y, *quartiles, color=_BLUE, lw=5, alpha=0.3, zorder=1)
            axes.plot(ratios[-1], y, "o", color=_BLUE, ms=4.5)
        # Where products pay, the linear schedule may take many times as long.
        if min(ratios) < 0.5:
            axes.set_xscale("log")
        axes.set(
            ylim=(len(chains) - 0.4, -0.6), xlabel=f"time of auto / time of the {which} schedule"
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        _plain(axes)
    panels[0].set_yticks(range(len(chains)), list(chains), size=8.5)
    return figure


def _quartiles(samples: list[float], unit: float) -> tuple[float, float]:
    low, high = np.quantile(samples, (0.25, 0.75)) / unit
    return float(low), float(high)


def _plain(axes: Axes) -> None:
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)

"""``python -m bench.plots FILE.json …``: the sweeps over T and B, as in Figure 8 of the paper."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import drawing
from .contests import OURS
from .drawing import Spread
from .gpu_races import CUDNN, CUDNN_GRAPH, RECORD, VALUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES: dict[str, dict[str, Any]] = {
    CUDNN: {"color": "tab:blue", "marker": "s"},
    CUDNN_GRAPH: {"color": "tab:cyan", "marker": "s"},
    OURS: {"color": "tab:orange", "marker": "o"},
    VALUES: {"color": "tab:red", "marker": "o"},
}

_AXES = {
    "T": ("T steps, B=16", "sequence length T"),
    "B": ("B samples, T=1,000", "batch size B"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.plots", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    for file in parser.parse_args(arguments).files:
        draw(json.loads(file.read_text())["races"], file.with_suffix(".png"))
    return 0


def sweep(races: list[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    """Return the races against PyTorch along T (B=16) or B (T=1,000), to the first state."""
    other, fixed = ("B", 16) if axis == "T" else ("T", 1000)
    along = [
        race
        for race in races
        if race["name"].startswith("rnn T=") and race["about"][other] == fixed
    ]
    return sorted(along, key=lambda race: race["about"][axis])


def draw(races: list[dict[str, Any]], path: Path) -> None:
    """Write :func:`figure` to a file."""
    figure(races).savefig(path, dpi=120)


def figure(races: list[dict[str, Any]]) -> Figure:
    """Draw times above, speedups over PyTorch below; over T on the left, over B on the right.

    A sweep of which one size was run is left out.
    """
    sweeps = [axis for axis in "TB" if len(sweep(races, axis)) > 1] or ["T"]
    width, record = 11 if len(sweeps) > 1 else 7, f"the paper's best, {RECORD}×"
    drawn, axes = drawing.panels(2, len(sweeps), width, 7.5, sharex="col", sharey="row")
    for axis, (times, ratios) in zip(sweeps, axes.T, strict=True):
        along = {race["about"][axis]: race for race in sweep(races, axis)}
        floors = {size: race["floors"]["the work"]["seconds"] for size, race in along.items()}
        theirs = _quartiles(along, CUDNN)
        for name, style in _STYLES.items():
            drawing.plot_with_spread(times, _quartiles(along, name, 1e-3), label=name, **style)
            if name in (OURS, VALUES):
                ours = _quartiles(along, name)
                faster = {size: drawing.ratio(theirs[size], ours[size]) for size in theirs}
                drawing.plot_with_spread(ratios, faster, label=name, **style)
        dotted = {"color": "black", "ls": ":"}
        times.plot(
            list(floors), [1e3 * floor for floor in floors.values()], label="the floor", **dotted
        )
        at_floor = [theirs[size][1] / floors[size] for size in theirs]
        ratios.plot(list(theirs), at_floor, label="the floor", **dotted)
        ratios.axhline(RECORD, color="grey", ls="--", label=record)
        for panel in (times, ratios):
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3)
            drawing.plain(panel)
        ratios.set_xticks(list(along), [f"{size:,}" for size in along], rotation=30)
        ratios.minorticks_off()
        title, label = _AXES[axis]
        times.set(title=title)
        ratios.set(xlabel=label)
        if axis == "B":
            ratios.invert_xaxis()  # as in the paper, where a sample's share of the GPU grows
    axes[0, 0].set(ylabel="backward pass [ms], launches included")
    axes[1, 0].set(ylabel=f"time of {CUDNN} over ours")
    for panel in axes[:, 0]:
        drawing.numbers(panel.yaxis, "{:,g}")
    drawing.legend(drawn, axes.flat, len(sweeps) + 1, order=("the floor", record))
    drawn.suptitle("Backward pass of a tanh RNN, H=20, float32 (Figure 8 of the paper)")
    return drawn


def _quartiles(along: dict[int, dict[str, Any]], name: str, unit: float = 1) -> dict[int, Spread]:
    """Return the quartiles of the calls, by sizes, where there were any."""
    calls = {size: race["samples_seconds"]["call, warm"] for size, race in along.items()}
    return {
        size: drawing.quartiles([*chain(*turns[name])], unit)
        for size, turns in calls.items()
        if name in turns
    }


if __name__ == "__main__":
    sys.exit(main())

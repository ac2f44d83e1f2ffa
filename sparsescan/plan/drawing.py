"""Pictures of plans; matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..kernels.cpu.tables import Op
from ..symbolic.pattern import PatternProducts, TooLargeError
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .scan_plan import ScanPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7, 5.5  # of a panel, in inches
_CHARACTER = 0.085  # of a level's name, in inches
# Multiply-adds, and bytes of index arrays, that products for a picture alone may take.
_MOST_WORK, _MOST_BYTES = 1e8, 1 << 28
# Colours that everybody can tell apart (Okabe and Ito, 2008).
_KINDS: dict[str, dict[str, Any]] = {
    "matrix-vector": {"color": "#d55e00", "marker": "o"},
    "matrix-matrix": {"color": "#0072b2", "marker": "s"},
}


@dataclass(frozen=True)
class _Points:
    """Every operation of a program, in the order in which they run.

    Attributes
    ----------
    step : ndarray of int64
        When it runs if there are as many workers as runs, counted from 1.
    place : ndarray of float64
        Where it stands among those of its step, from -0.5 to 0.5.
    flop : ndarray of int64
        Twice its multiply-adds.
    vector : ndarray of bool
        Whether it is a matrix-vector product.
    critical : ndarray of bool
        Whether it is on the critical path: in the run of its level that has the most FLOP.
    phases : list of (name, depth)
        The levels; those whose names differ in a number only are one.
    """

    step: NDArray[np.int64]
    place: NDArray[np.float64]
    flop: NDArray[np.int64]
    vector: NDArray[np.bool_]
    critical: NDArray[np.bool_]
    phases: list[tuple[str, int]]


def plot_plan(plan: ScanPlan, path: str | os.PathLike[str]) -> None:
    """Draw the FLOP of every operation of a plan, step by step, beside those of another scan.

    Parameters
    ----------
    plan : ScanPlan
        For at least two Jacobians.
    path : str or path-like
        The PNG file to write, under exactly this name; one that exists is replaced.

    Raises
    ------
    ImportError
        If matplotlib is missing: ``pip install 'sparsescan[plot]'``.
    InputError
        If the plan has no operations.
    OSError
        If the file cannot be written.

    Notes
    -----
    Figure 10 of BPPSA (MLSys 2020), for any chain; FLOP are twice the multiply-adds of one sample.
    Beside the plan stands the linear scan; beside a linear scan stands the Blelloch scan, or, where
    its products are too large to be worked out for a picture, one that multiplies neighbours once;
    solves are not multiplied. Operations that run at once stand at the same step. The critical path
    is what takes longest if there are as many workers as runs: of each level, the run with the most
    FLOP.

    Examples
    --------
    >>> import os, sparsescan, tempfile
    >>> from sparsescan.plan.drawing import plot_plan
    >>> plan = sparsescan.plan([sparsescan.Pattern.dense((4, 4))] * 12, schedule="blelloch")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_plan(plan, os.path.join(folder, "plan.png"))
    """
    check_packages("a picture", "plot", {"matplotlib": "matplotlib"})
    from matplotlib.figure import Figure

    program = plan._latest.program
    if program is None or not program.levels:
        raise InputError(
            f"plan is for a chain of length {plan.n}, whose exclusive scan multiplies nothing; "
            "expected at least 2 Jacobians"
        )
    programs = [program, *_beside(plan, program)]
    figure = Figure(figsize=(_WIDTH * len(programs), _HEIGHT), layout="constrained")
    panels = figure.subplots(1, len(programs), sharey=True, squeeze=False)[0]
    every = [_points(program) for program in programs]
    entries: dict[str, Any] = {}
    for axes, program, points in zip(panels, programs, every, strict=True):
        _draw(axes, points)
        axes.set_title(f"{program.schedule}\n{_totals(points)}", fontsize="medium")
        for line in axes.get_lines():
            entries.setdefault(str(line.get_label()), line)
    _scale(panels[0], np.concatenate([points.flop for points in every]))
    panels[0].set_ylabel("FLOP of an operation, one sample")
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    legend = figure.legend(list(entries.values()), list(entries), **place)
    for line in legend.get_lines():
        line.set_markersize(6)
    figure.savefig(path, format="png", dpi=150)


def check_packages(purpose: str, extra: str, packages: dict[str, str]) -> None:
    """Raise unless all modules, given with the names of their packages, can be imported."""
    missing = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ImportError(
            f"{purpose} needs {', '.join(missing)}; install with: pip install 'sparsescan[{extra}]'"
        )


def _beside(plan: ScanPlan, program: Program) -> list[Program]:
    """Return what a plan is compared with; nothing where there is no other schedule."""
    linear = Schedule.linear(plan.n)
    if plan.schedule != linear:
        return [Program(plan.patterns, linear)]
    if program.solved or plan.n == 2:
        return []
    for schedule in (Schedule.blelloch(plan.n), Schedule.truncated(plan.n, 1)):
        with suppress(TooLargeError):
            products = PatternProducts(_MOST_WORK, _MOST_BYTES)
            return [Program(plan.patterns, schedule, products=products)]
    return []


def _points(program: Program) -> _Points:
    count = len(program.work) - 1  # without the one that only an inclusive scan has
    step, place = np.empty(count, np.int64), np.empty(count)
    critical = np.zeros(count, bool)
    done = 0
    for _, runs in program.levels:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        lengths = runs[:, 1] - runs[:, 0]
        run = np.repeat(np.arange(len(runs)), lengths)
        step[first:last] = done + 1 + np.arange(first, last) - runs[run, 0]
        place[first:last] = (run + 0.5) / len(runs) - 0.5
        longest = np.add.reduceat(program.work[first:last], runs[:, 0] - first).argmax()
        critical[slice(*runs[longest])] = True
        done += int(lengths.max())
    flop, vector = 2 * program.work[:count], program.ops[:count, Op.VECTOR] == 1
    return _Points(step, place, flop, vector, critical, _phases(program.schedule))


def _phases(schedule: Schedule) -> list[tuple[str, int]]:
    """Return names and depths of levels; ``up-sweep 0`` to ``up-sweep 5`` are ``up-sweep 0-5``."""
    phases = []
    for _, group in itertools.groupby(
        schedule.levels, lambda level: re.sub(r" \d+$", "", level.name)
    ):
        levels = list(group)
        name = levels[0].name
        if len(levels) > 1:
            name += f"–{levels[-1].name.rpartition(' ')[2]}"
        phases.append((name, sum(level.depth for level in levels)))
    return phases


def _totals(points: _Points) -> str:
    steps = int(points.step.max())
    work, critical = points.flop.sum(), points.flop[points.critical].sum()
    return (
        f"{steps:,} step{'s' * (steps > 1)}, {_count(work)} FLOP, "
        f"{_count(critical)} of them on the critical path"
    )


def _count(number: float) -> str:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{number:.3g}"))


def _draw(axes: Axes, points: _Points) -> None:
    """Draw all but the vertical scale of a panel."""
    from matplotlib.ticker import MaxNLocator

    x = points.step + 0.7 * points.place
    size = float(np.clip(9 - 2 * np.log10(len(x)), 2, 7))
    # Many markers in a row would show nothing but their edges.
    edge = 0.5 if points.critical.sum() < 200 else 0
    for name, style in _KINDS.items():
        kind = points.vector == (name == "matrix-vector")
        other, critical = kind & ~points.critical, kind & points.critical
        hollow = style | {"ls": "", "ms": size, "mfc": "white", "mew": 0.8, "zorder": 2}
        filled = style | {"ls": "", "ms": size + 1, "mec": "black", "mew": edge, "zorder": 4}
        if other.any():
            axes.plot(x[other], points.flop[other], label=name, **hollow)
        if critical.any():
            axes.plot(x[critical], points.flop[critical], label=f"{name}, critical", **filled)
    path = points.critical
    axes.plot(x[path], points.flop[path], "k-", lw=0.8, zorder=3, label="critical path")
    steps = int(points.step.max())
    margin = max(0.5, steps / 100)
    axes.set(xlabel="step, if workers are unlimited", xlim=(1 - margin, steps + margin))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _name(axes, points.phases)


def _name(axes: Axes, phases: list[tuple[str, int]]) -> None:
    """Shade every other phase, and write the names above as far as there is room."""
    ends = np.cumsum([0] + [depth for _, depth in phases])
    for start, stop in zip(ends[1:-1:2], ends[2::2], strict=True):
        axes.axvspan(start + 0.5, stop + 0.5, color="0.95", lw=0, zorder=0)
    width = 0.85 * _WIDTH
    half = _CHARACTER / 2 * np.array([len(name) for name, _ in phases])
    inches = np.clip(width * (ends[:-1] + ends[1:]) / (2 * ends[-1]), half, width - half)
    kept: list[int] = []
    # The longest phases come first.
    for k in sorted(range(len(phases)), key=lambda k: -phases[k][1]):
        if all(abs(inches[k] - inches[other]) > half[k] + half[other] for other in kept):
            kept.append(k)
    top = axes.secondary_xaxis("top")
    places = 0.5 + inches[kept] / width * ends[-1]
    top.set_xticks(places, [phases[k][0] for k in kept], fontsize="small")
    top.tick_params(length=0)
    top.spines["top"].set_visible(False)


def _scale(axes: Axes, flop: NDArray[np.int64]) -> None:
    """Set a logarithmic vertical axis, with a zero if there is one to show."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    positive = flop[flop > 0] if flop.any() else np.array([2])
    low = 10 ** np.floor(np.log10(positive.min() / 1.2))
    high = 10 ** np.ceil(np.log10(positive.max() * 1.2))
    if flop.all():
        axes.set(yscale="log", ylim=(low, high))
    else:
        axes.set_yscale("symlog", linthresh=low, linscale=0.5)
        axes.set_ylim(-0.2 * low, high)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_minor_formatter(NullFormatter())

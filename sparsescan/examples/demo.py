"""What ``sparsescan demo`` runs: three computations, each beside the loop that one writes for it.

A minimal gated unit, which PyTorch lacks, and a GRU learn on photographs
(:mod:`sparsescan.examples.photo`) beside PyTorch if it is installed, else beside a loop in NumPy.
The gradients of a chain of sparse Jacobians (:mod:`sparsescan.examples.heat`) are computed beside
SciPy's loop, and so are those of a chain that is too short to gain.
"""

from __future__ import annotations

import importlib.util
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsescan
from sparsescan import InputError

from . import heat, photo

RATE = 1e-2  # falls linearly to 0; much more drives equal runs apart by rounding
# Training ends once it has taken so long, but for a few steps; the slower way does fewer.
SECONDS, FEWEST = 2.0, 5
CALLS = 10  # until all that calls take is compiled
STEPS, CELLS, SHORT, TURNS = 1000, 100, 10, 25
CELLS_OF_PYTORCH = {"MGU": "PyTorch's loop", "GRU": "torch.nn.GRU"}


@dataclass
class Way:
    """A way to compute, with its times in seconds, and the losses of those that train."""

    name: str
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Contest:
    """Two ways that took turns.

    Attributes
    ----------
    title, name, timed : str
        The heading of its panel, what ran, and what of it was timed.
    ours, theirs : Way
        sparsescan, and what it is compared with.
    difference : float
        How far both results are apart at most, relative to them.
    """

    title: str
    name: str
    timed: str
    ours: Way
    theirs: Way
    difference: float

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Medians of both, while they took turns."""
        both = list(zip(self.ours.times, self.theirs.times, strict=False))
        ours, theirs = np.median(both, axis=0) * 1e3
        return float(ours), float(theirs)

    @property
    def ratio(self) -> float:
        """How many times as long as sparsescan the other way takes."""
        ours, theirs = self.milliseconds
        return theirs / ours


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes
    ----------
    cells : list of Contest
        Training of an MGU and of a GRU.
    chain, short : Contest
        Gradients of a long chain by a plan, and of a short one without.
    seconds : float
        Duration of the run, compilation included.
    """

    cells: list[Contest]
    chain: Contest
    short: Contest
    seconds: float

    @property
    def contests(self) -> list[Contest]:
        """All of them."""
        return [*self.cells, self.chain, self.short]

    def __str__(self) -> str:
        rows = [["milliseconds", "sparsescan", "beside", "", "ratio"]]
        for contest in self.contests:
            ours, theirs = contest.milliseconds
            times = f"{ours:.2f}", contest.theirs.name, f"{theirs:.2f}"
            what = f"{contest.name}, {contest.timed}"
            rows.append([what, *times, f"{_ratio(contest)}×"])
        return "\n".join(
            f"{what:<32}{ours:>10}   {name:<14}{theirs:>9}{ratio:>9}"
            for what, ours, name, theirs, ratio in rows
        )


def run(
    *,
    hidden: int = 20,
    batches: int = 200,
    batch: int = 16,
    output: str | os.PathLike[str] = "demo.png",
    seed: int = 0,
) -> Figures:
    """Run all contests, print their figures, and draw them.

    Parameters
    ----------
    hidden : int, default 20
        Units of the MGU and the GRU.
    batches : int, default 200
        Training steps of each way, or as many as it does in two seconds.
    batch : int, default 16
        Rows of a batch.
    output : str or path-like, default "demo.png"
        The PNG file to write.
    seed : int, default 0
        The seed of parameters, batches and the chain.

    Returns
    -------
    Figures
        The printed figures.

    Raises
    ------
    ImportError
        If matplotlib, scikit-learn or tqdm is missing: ``pip install 'sparsescan[demo]'``.
    InputError
        If a batch has more rows than there are.
    OSError
        If `output` cannot be written.
    """
    start = time.perf_counter()
    train, test = photo.load_rows(seed)
    count = train.inputs.shape[1]
    if batch > count:
        raise InputError(f"batch is {batch}; expected at most {count}, all rows")
    order = list(_batches(count, batch, batches, seed))
    cells, test_losses = [], []
    for cell in ("MGU", "GRU"):
        params = photo.initial_params(cell, hidden, seed)
        trained = photo.BySparsescan(cell, params)
        cells.append(_train(cell, trained, params, train, order))
        test_losses.append(trained.step(test, 0.0))
    rod = heat.make_rod(STEPS, CELLS, seed)
    chain, short = _long_chain(rod), _short_chain(heat.make_rod(SHORT, CELLS, seed))
    figures = Figures(cells, chain, short, time.perf_counter() - start)
    draw(figures, output)
    print(_report(figures, test_losses, count, hidden, batch, output))
    return figures


def _batches(count: int, batch: int, batches: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Return the rows of each batch; each pass over all leaves out the few that fill none."""
    rng = np.random.default_rng([seed, 2])
    per_pass = count // batch
    for done in range(batches):
        if done % per_pass == 0:
            order = rng.permutation(count)
        yield order[done % per_pass * batch :][:batch]


# -- Contests --------------------------------------------------------------------------------------


def _train(
    cell: str,
    trained: photo.BySparsescan,
    params: photo.Params,
    train: photo.Rows,
    order: list[NDArray[np.int64]],
) -> Contest:
    """Train sparsescan's network and its peer, in turns while the time of each lasts."""
    from tqdm import tqdm

    ours, theirs = Way("sparsescan"), Way("NumPy's loop")
    peer: photo.Way
    if importlib.util.find_spec("torch") is None:
        peer = photo.LOOPS[cell](params)
    else:
        theirs.name, peer = CELLS_OF_PYTORCH[cell], photo.ByPyTorch(cell, params)
    with tqdm(total=len(order), unit="batch", desc=f"{cell}, compiling", ncols=80) as bar:
        for network in (trained, peer):
            for _ in range(CALLS):
                network.step(train.take(order[0]), 0.0)
        bar.set_description(f"{cell}, training")
        for done, rows in enumerate(order):
            taken = train.take(rows)
            for way, network in (ours, trained), (theirs, peer):
                if done >= FEWEST and sum(way.times) > SECONDS:
                    continue
                start = time.perf_counter()
                way.losses.append(network.step(taken, RATE * (1 - done / len(order))))
                way.times.append(time.perf_counter() - start)
            bar.update()
    losses = np.array(list(zip(ours.losses, theirs.losses, strict=False)))
    difference = float((np.ptp(losses, 1) / losses.min(1)).max())
    title = "A cell that PyTorch lacks" if cell == "MGU" else "A GRU"
    return Contest(title, cell, "a training step", ours, theirs, difference)


def _long_chain(rod: heat.Rod) -> Contest:
    plan = sparsescan.plan(rod.transposed, reverse=True)
    return _in_turns(
        "A chain of sparse Jacobians",
        f"{STEPS:,} sparse steps",
        lambda: plan.exclusive_scan(None, rod.transposed, local_grads=rod.terms),
        rod,
    )


def _short_chain(rod: heat.Rod) -> Contest:
    matrices = rod.matrices
    return _in_turns(
        "A chain too short to gain",
        f"{SHORT} sparse steps",
        lambda: sparsescan.exclusive_scan(None, matrices, local_grads=rod.terms, reverse=True),
        rod,
    )


def _in_turns(title: str, name: str, call: Callable[[], Any], rod: heat.Rod) -> Contest:
    """Compute gradients by both in turns, after a call that compiles."""
    matrices = rod.matrices
    calls = call, lambda: heat.scipy_loop(matrices, rod.terms)
    ways = Way("sparsescan"), Way("SciPy's loop")
    grads, expected = (np.asarray(call()) for call in calls)
    for _ in range(TURNS):
        for way, call in zip(ways, calls, strict=True):
            start = time.perf_counter()
            call()
            way.times.append(time.perf_counter() - start)
    difference = float(np.abs(grads - expected).max() / np.abs(expected).max())
    return Contest(title, name, "gradients", *ways, difference)


# -- What is shown ---------------------------------------------------------------------------------


def draw(figures: Figures, output: str | os.PathLike[str]) -> None:
    """Draw losses over the time of training, and the times of both chains, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    *panels, last = figure.subplots(1, 3)
    for axes, contest in zip(panels, figures.cells, strict=True):
        _draw_losses(axes, contest)
    _draw_chains(last, figures)
    for axes, contest in zip((*panels, last), figures.contests, strict=False):
        axes.set_title(f"{contest.title}:\n{_in_words(contest)}", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, format="png", dpi=130)


_COLOURS = "tab:orange", "tab:blue"


def _draw_losses(axes: Any, contest: Contest) -> None:
    for way, colour in zip((contest.ours, contest.theirs), _COLOURS, strict=True):
        seconds, width = np.cumsum(way.times), min(10, len(way.losses))
        smooth = np.convolve(way.losses, np.ones(width) / width, "valid")
        count = f"{len(way.losses)} steps, {seconds[-1]:.2g} s"
        axes.plot(seconds[width - 1 :], smooth, color=colour, lw=2, label=f"{way.name}: {count}")
        axes.plot(seconds[-1], smooth[-1], "o", color=colour, ms=6)
    axes.axhline(1, color="0.6", lw=1, ls="--")
    right, (bottom, top) = axes.get_xlim()[1], axes.get_ylim()
    axes.text(right, 1.01, "repeating the last pixel", ha="right", va="bottom", color="0.4")
    limits = {"xlim": (0, right), "ylim": (bottom, top + 0.35 * (top - bottom))}
    axes.set(xlabel=f"seconds of training, {contest.name}", ylabel="loss", **limits)
    axes.legend(frameon=False, loc="upper right")


def _draw_chains(axes: Any, figures: Figures) -> None:
    labels = []
    for row, contest in enumerate((figures.chain, figures.short)):
        for k, (milliseconds, colour) in enumerate(
            zip(contest.milliseconds, _COLOURS, strict=True)
        ):
            place = 3 * row + k
            axes.barh(place, milliseconds, color=colour)
            axes.text(milliseconds, place, f" {milliseconds:.2g} ms", va="center")
            labels.append((place, (contest.ours, contest.theirs)[k].name))
        axes.text(0, 3 * row - 0.6, f"gradients of {contest.name}", va="bottom", color="0.4")
    places, names = zip(*labels, strict=True)
    axes.set_yticks(places, names)
    longest = max(figures.chain.milliseconds)
    axes.set(xlabel="milliseconds", ylim=(4.6, -1.1), xlim=(0, 1.25 * longest))


def _ratio(contest: Contest) -> str:
    return f"{contest.ratio:.0f}" if contest.ratio >= 20 else f"{contest.ratio:.2g}"


def _in_words(contest: Contest) -> str:
    return f"{_ratio(contest)} times as fast as {contest.theirs.name}"


def _report(
    figures: Figures,
    test_losses: list[float],
    count: int,
    hidden: int,
    batch: int,
    output: str | os.PathLike[str],
) -> str:
    """Return the figures with what they are of, and three lines to end with."""
    kept = " and ".join(f"{loss:.2f}" for loss in test_losses)
    apart = max(contest.difference for contest in figures.contests)
    won = [contest for contest in figures.contests if contest.ratio > 1.05]
    lost = [contest for contest in figures.contests if contest not in won]
    paragraph = f"""\
An MGU and a GRU of {hidden} units read photographs row by row, 639 steps a row, and predict the
next pixel: batches of {batch} of {count} rows, float32. Sparse steps are those of heat along a rod
of {CELLS} cells, float64."""
    ending = f"""\
Both ways have the same losses and gradients but for rounding: at most {apart:.0e} apart. For
{photo.TEST_ROWS} rows that were kept back losses are {kept}, where repeating the last pixel has
about 1. {figures.seconds:.0f} s in all, compilation included."""
    return "\n\n".join(
        [
            textwrap.fill(paragraph, 80),
            str(figures),
            textwrap.fill(ending, 80),
            f"Picture: {os.fspath(output)}",
            f"How many times as fast: {_listed(won) or 'none'}.\n"
            f"Gains nothing: {_listed(lost) or 'none here'}; more in docs/for-me.md.\n"
            "Next page: docs/start.md, with programs for your arrays, cells and models.",
        ]
    )


def _listed(contests: list[Contest]) -> str:
    return "; ".join(f"{contest.name} {_ratio(contest)}" for contest in contests)

"""Times on special inputs beside those on random ones of the same shapes.

Kernels do the same work whatever the numbers are, unless they end where nothing is left. A step
that takes much longer on some numbers has found a slow way: of the processor, of a library, or of
ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

from sparsescan.torch.calibrate import keep_memory

from . import machine
from .cliff_steps import AGAIN, QUICK_STEPS, RANDOM, SPECIAL, STEPS, Passes, Step, inputs
from .experiment import Experiment, Options, Piece, Results, Table, cpu_only
from .turns import quiet

__all__ = ["EXPERIMENT", "LIMIT", "Cell", "cells", "measure", "summary"]

# Ratios above which there is a cliff, and above which an input is timed in as many turns again.
LIMIT, _DOUBTFUL = 1.5, 1.3
_ROUNDS, _QUICK_ROUNDS = 7, 1
# Seconds of the calls of a turn, and how many there are.
_TURN, _QUICK_TURN = 0.008, 0.001
_FEWEST, _MOST = 3, 20

# Seconds of each turn, by input and pass; None in rounds in which an input had none.
Seconds = dict[str, dict[str, list[float | None]]]


class Cell(NamedTuple):
    """A ratio of the table, and what it is one of."""

    step: str
    given: str
    ratio: float
    random: float  # seconds, the medians of turns
    special: float


# -- Measuring -------------------------------------------------------------------------------------


def measure(step: Step, *, quick: bool) -> Results:
    """Time all passes of a step on all inputs, which take turns.

    Returns
    -------
    dict
        ``seconds`` of a call, by input and pass, the median of each turn; None for a round in which
        only inputs took turns that were doubtful by then. ``cores_others_used`` in each round.
    """
    keep_memory()
    passes = {name: step.passes(numbers) for name, numbers in inputs(step).items()}
    rounds, turn = (_QUICK_ROUNDS, _QUICK_TURN) if quick else (_ROUNDS, _TURN)
    taken: Seconds = {name: {call: [] for call in each.calls} for name, each in passes.items()}
    others: list[float] = []
    for each in passes.values():
        _turn(each, 0)  # memory is taken, and kernels are compiled
    _take_turns(passes, taken, others, rounds, turn)
    counted = _counted(others)
    doubtful = {name for name in taken if max(_ratios(taken, name, counted).values()) > _DOUBTFUL}
    if doubtful:
        again = {name: each for name, each in passes.items() if name in doubtful | {RANDOM}}
        _take_turns(again, taken, others, rounds, turn)
    return {"seconds": taken, "cores_others_used": others}


def _take_turns(
    passes: dict[str, Passes], taken: Seconds, others: list[float], rounds: int, turn: float
) -> None:
    """Add rounds, up to twice as many if other programs use the cores."""
    before = len(others)
    while len(others) < before + 2 * rounds and sum(quiet(others[before:])) < rounds:
        start, others_start = time.perf_counter(), machine.others()
        for name, own in taken.items():
            medians = _turn(passes[name], turn) if name in passes else {}
            for call, samples in own.items():
                samples.append(medians.get(call))
        others.append((machine.others() - others_start) / (time.perf_counter() - start))


def _turn(passes: Passes, length: float) -> dict[str, float]:
    """Return the median seconds of each pass in calls for about as long, after one not timed."""
    passes.ready()
    for call in passes.calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in passes.calls}
    stop = time.perf_counter() + length
    for k in range(_MOST):
        for name, call in passes.calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
        if k + 1 >= _FEWEST and time.perf_counter() > stop:
            break
    return {name: round(median(each), 9) for name, each in samples.items()}


def _counted(others: list[float]) -> list[bool]:
    """Return which rounds count: those in which others used no cores, as far as there are any."""
    calm = quiet(others)
    return calm if any(calm) else [True] * len(calm)


def _counting(turns: list[float | None], counted: list[bool]) -> list[float | None]:
    """Return the turns of rounds that count; all of them for an input that has no other ones."""
    kept = [seconds if counts else None for seconds, counts in zip(turns, counted, strict=True)]
    return kept if any(kept) else turns


def _ratios(taken: Seconds, name: str, counted: list[bool]) -> dict[str, float]:
    """Return the ratio of each pass: the median over rounds, in which random numbers had a turn."""
    return {
        call: median(
            special / random
            for special, random in zip(_counting(turns, counted), taken[RANDOM][call], strict=True)
            if special is not None and random is not None
        )
        for call, turns in taken[name].items()
    }


# -- The experiment -------------------------------------------------------------------------------


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("cliffs", options)
    for name, step in (QUICK_STEPS if options.quick else STEPS).items():
        yield Piece(name, partial(measure, step, quick=options.quick))


def _about(options: Options) -> Results:
    return {
        "ratio": "time over that on random numbers of the same shapes: the median over rounds, in "
        "which all inputs take turns; rounds in which others used the cores do not count",
        "forward and backward": "the two passes of a training step, or affine_scan and "
        "affine_scan_vjp",
        RANDOM: "normal, in float32 unless a step says otherwise; a loss at every step",
        AGAIN: "the same numbers once more: how far ratios of equal work are apart",
        "decay to subnormal": "an impulse, forward in the initial state and backward in the last "
        "gradient, that decays from a thousandth of what is normal to nothing; nothing else enters",
        "subnormal": "inputs and gradients of 1e-40, in float64 1e-310; no biases",
        "weights far apart": "each times a power of ten from -12 to 12",
        "units far apart": "Jacobians of the same steps where each unit is multiplied by such a "
        "power: all gradients are finite",
        "overflow": "weights as large as numbers get: products are infinite, and sums NaN",
        "ReLUs off": "biases that make all states 0",
        "zeros": "inputs, states, gradients and biases; weights are random",
        "zero weights": "and biases; all else is random",
        "ones": "all numbers, weights and biases too",
    }


def cells(results: Results) -> Iterator[Cell]:
    """Yield all ratios, in the order of the table."""
    for name, piece in results["pieces"].items():
        taken: Seconds = piece["seconds"]
        counted = _counted(piece["cores_others_used"])
        for call, random in taken[RANDOM].items():
            for given in taken:
                if given != RANDOM:
                    ratio = _ratios(taken, given, counted)[call]
                    turns = random, taken[given][call]
                    times = [_median(_counting(each, counted)) for each in turns]
                    yield Cell(f"{name}: {call}", given, ratio, *times)


def _median(turns: list[float | None]) -> float:
    return median(seconds for seconds in turns if seconds is not None)


def _grid(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table."""
    rows: dict[str, dict[str, str]] = {}
    for cell in cells(results):
        row = rows.setdefault(cell.step, {"random, ms": f"{1e3 * cell.random:.3g}"})
        row[cell.given] = f"{cell.ratio:.2f}"
    there = {head for row in rows.values() for head in row}
    heads = [head for head in ("random, ms", AGAIN, *SPECIAL) if head in there]
    return heads, [[name, *(row.get(head, "") for head in heads)] for name, row in rows.items()]


def _above(results: Results) -> list[Cell]:
    """Return the cliffs, the highest first."""
    return sorted((cell for cell in cells(results) if cell.ratio > LIMIT), key=lambda c: -c.ratio)


def _tables(results: Results) -> list[Table]:
    heads, rows = _grid(results)
    grid = [[*name.split(": "), *row] for name, *row in rows]
    times = ["ratio", "random, ms", "special, ms"]
    above = [
        [cell.step, cell.given, f"{cell.ratio:.2f}"]
        + [f"{1e3 * seconds:.3g}" for seconds in (cell.random, cell.special)]
        for cell in _above(results)
    ]
    return [
        Table(["step", "pass", *heads], grid, heads),
        Table([f"above {LIMIT}", "on", *times], above, times),
    ]


def summary(results: Results) -> str:
    """Return the table as text, and the list of what is above the limit."""
    heads, rows = _grid(results)
    first = max(len(row[0]) for row in rows)
    lines = [f"{'':{first}}" + "".join(f"{chr(97 + k):>7}" for k in range(len(heads)))]
    lines += [f"{name:{first}}" + "".join(f"{one:>7}" for one in row) for name, *row in rows]
    lines += ["", *(f"{chr(97 + k)}: {head}" for k, head in enumerate(heads))]
    above = _above(results)
    lines += ["", f"Above {LIMIT}:" if above else f"None is above {LIMIT}."]
    lines += [f"{each.ratio:7.2f}  {each.step}, {each.given}" for each in above]
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="cliffs",
    title="Special numbers",
    pieces=_pieces,
    about=_about,
    drawings=lambda results: [],
    rows=lambda results: [],
    tables=_tables,
    summary=summary,
)

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

from .cliff_steps import AGAIN, QUICK_STEPS, RANDOM, SPECIAL, STEPS, Passes, Step, inputs
from .experiment import Experiment, Piece, Results, Table
from .timing import counting, take_rounds, that_count

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


def measure(step: Step, quick: bool) -> Results:
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
    for each in passes.values():
        _turn(each, 0)  # memory is taken, and kernels are compiled
    used = _take_turns(passes, taken, rounds, turn)
    counted = that_count(used)
    doubtful = {name for name in taken if max(_ratios(taken, name, counted).values()) > _DOUBTFUL}
    if doubtful:
        again = {name: each for name, each in passes.items() if name in doubtful | {RANDOM}}
        used += _take_turns(again, taken, rounds, turn)
    return {"seconds": taken, "cores_others_used": used}


def _take_turns(passes: dict[str, Passes], taken: Seconds, rounds: int, turn: float) -> list[float]:
    """Add rounds, up to twice as many if other programs use the cores."""

    def take(_: list[float]) -> None:
        for name, own in taken.items():
            medians = _turn(passes[name], turn) if name in passes else {}
            for call, samples in own.items():
                samples.append(medians.get(call))

    return take_rounds(take, rounds, 2)


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


def _of_those_that_count(turns: list[float | None], counted: list[bool]) -> list[float | None]:
    """Return the turns of rounds that count; all of them for an input that has no other ones."""
    kept = [seconds if counts else None for seconds, counts in zip(turns, counted, strict=True)]
    return kept if any(kept) else turns


def _ratios(taken: Seconds, name: str, counted: list[bool]) -> dict[str, float]:
    """Return the ratio of each pass: the median over rounds, in which random numbers had a turn."""
    return {
        call: median(
            special / random
            for special, random in zip(
                _of_those_that_count(turns, counted), taken[RANDOM][call], strict=True
            )
            if special is not None and random is not None
        )
        for call, turns in taken[name].items()
    }


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, step in (QUICK_STEPS if quick else STEPS).items():
        yield Piece(name, partial(measure, step, quick))


def _about(quick: bool) -> Results:
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
        counted = that_count(piece["cores_others_used"])
        for call, random in taken[RANDOM].items():
            for given in taken:
                if given != RANDOM:
                    ratio = _ratios(taken, given, counted)[call]
                    turns = random, taken[given][call]
                    times = [median(counting(each, counted)) for each in turns]
                    yield Cell(f"{name}: {call}", given, ratio, *times)


def _tables(results: Results) -> list[Table]:
    """Return the table of all ratios, and that of the cliffs, the highest first."""
    every = list(cells(results))
    rows: dict[str, dict[str, str]] = {}
    for cell in every:
        row = rows.setdefault(cell.step, {"random, ms": f"{1e3 * cell.random:.3g}"})
        row[cell.given] = f"{cell.ratio:.2f}"
    there = {head for row in rows.values() for head in row}
    heads = [head for head in ("random, ms", AGAIN, *SPECIAL) if head in there]
    grid = [[*name.split(": "), *(row.get(h, "") for h in heads)] for name, row in rows.items()]
    above = [
        [cell.step, cell.given, f"{cell.ratio:.2f}"]
        + [f"{1e3 * seconds:.3g}" for seconds in (cell.random, cell.special)]
        for cell in sorted(every, key=lambda cell: -cell.ratio)
        if cell.ratio > LIMIT
    ]
    times = ["ratio", "random, ms", "special, ms"]
    return [
        Table(["step", "pass", *heads], grid, heads),
        Table([f"above {LIMIT}", "on", *times], above, times),
    ]


EXPERIMENT = Experiment("cliffs", "Special numbers", _pieces, _about, tables=_tables)

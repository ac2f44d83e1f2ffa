"""Cells of the catalogue beside the same ones elsewhere, and what a new cell costs.

A step is the forward pass, and the gradients in input, first state and parameters from those in all
outputs; there is no optimiser. The peers are torchrecurrent, snnTorch and xlstm in PyTorch, the
same equations in a jitted ``lax.scan``, and our own kernels of RNN, GRU and LSTM as they were
before cells were defined once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsescan.recurrent import catalogue
from sparsescan.torch.calibrate import keep_memory

from . import cell_contenders, machine, peers, recurrent, step
from .cell_contenders import ONE_CORE, Case, Given, Step, on_one_core
from .cell_history import BEFORE, measure_history
from .cell_starts import EMPTY, KEPT, LIBRARY, measure_lines, measure_start
from .drawing import BLUE, GREEN, ORANGE, SKY
from .experiment import Drawing, Experiment, Options, Piece, Results, Row, Table, as_text, cpu_only
from .page import significant
from .recurrent import call_for
from .timing import PAUSE, Call, rounded, seconds

__all__ = ["EXPERIMENT", "FORWARD", "TASKS", "Task", "measure", "summary"]

Array = NDArray[Any]

OURS, JAX = step.OURS, step.JAX
TORCHRECURRENT, SNNTORCH, XLSTM = "torchrecurrent", "snnTorch", "xlstm"
# Our forward pass alone, which shows where the time of a step is.
FORWARD = "sparsescan, forward"
_SPIKING = ("Alpha", "Leaky", "Synaptic")
_ALONE = ("minGRU", "minLSTM", "sLSTM")  # that torchrecurrent does not have
_MAKERS: dict[str, Callable[[Given], dict[str, Step]]] = {
    JAX: cell_contenders.jax,
    TORCHRECURRENT: cell_contenders.torchrecurrent,
    SNNTORCH: cell_contenders.snntorch,
    XLSTM: cell_contenders.xlstm,
}
_ROUNDS, _QUICK_ROUNDS, _TURN, _QUICK_TURN = 5, 2, 0.06, 0.01
_MOST_TRIALS = 20  # calls that tell which variant is fastest
# Rounds of peers that take about a second, and calls that are so long that none goes before them.
_FEW_ROUNDS, _LONG = 3, 0.1
# Outputs that are compared, and whose gradients are: some cells amplify rounding step by step.
_COMPARED = 32
# How far they may be apart, relative to their norms; and of neurons, of which one may spike later.
_BOUND, _SPIKING_BOUND = float(np.sqrt(np.finfo(np.float32).eps)), 0.05
_QUICK = ("MGU", "Leaky", "sLSTM")
_STARTED, _QUICK_STARTED = ("MGU", "PeepholeLSTM", "LEM", "NAS"), ("MGU",)
_START, _HISTORY, _LINES = "first step of ", "kernels before: ", "lines of code"
# What is asked: seconds of a first step by what is compiled, and the median of lines.
_WANTED_SECONDS = {EMPTY: 4.0, LIBRARY: 4.0, KEPT: 0.4}
_WANTED_LINES = 12
_HISTORY_WANTED = 0.95


class Task(NamedTuple):
    """A cell beside one peer, and how many times as long as ours the peer is meant to take."""

    case: Case
    peer: str
    wanted: float

    @property
    def key(self) -> str:
        return f"{self.case.name}, {self.peer}"


class Claim(NamedTuple):
    """What is asked of all ratios of some pieces, and of their median."""

    name: str
    peer: str
    has: tuple[str, ...]  # one of which is in the keys of the pieces
    each: float
    median: float | None = None


CLAIMS = (
    Claim("every cell of it", TORCHRECURRENT, ("",), 100),
    Claim("Leaky", SNNTORCH, ("Leaky",), 200),
    Claim("Synaptic, Alpha", SNNTORCH, ("Synaptic", "Alpha"), 200),
    Claim("every cell, H=20", JAX, ("H=20",), 3, 5),
    Claim("every cell, H=64", JAX, ("H=64",), 1.5, 2.5),
    Claim("sLSTM", XLSTM, ("",), 20),
    Claim("RNN, GRU, LSTM", BEFORE, ("",), _HISTORY_WANTED, 1),
)


def _tasks() -> Iterator[Task]:
    for kind in catalogue.__all__:
        if kind in _SPIKING:
            yield Task(Case(kind), SNNTORCH, 200)
        elif kind not in _ALONE:
            yield Task(Case(kind).as_in_torchrecurrent(), TORCHRECURRENT, 100)
        if kind == "sLSTM":
            yield Task(Case(kind), XLSTM, 20)
    for hidden, wanted in ((20, 3), (64, 1.5)):
        yield from (Task(Case(kind, hidden), JAX, wanted) for kind in catalogue.__all__)


TASKS = tuple(_tasks())


# -- Measuring -------------------------------------------------------------------------------------


def measure(task: Task, *, quick: bool) -> Results:
    """Return the times of a training step of our cell and of a peer, who take turns.

    Returns
    -------
    dict
        For both, and for our forward pass, ``samples`` in seconds, and the ``variants`` that were
        fastest; ``missing`` peers, the ratio that is ``wanted``, ``cores_others_used`` in each
        round, and ``differences`` of the outputs and of each gradient, by the 2-norm, relative to
        the peer's.
    """
    keep_memory()
    given = task.case.given()
    variants: dict[str, str] = {}
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    makers = {OURS: cell_contenders.ours, task.peer: _MAKERS[task.peer]}
    for name, make in makers.items():
        try:
            variants[name], steps[name] = _fastest(make(given))
        except peers.MissingPeerError as error:
            missing[name] = str(error)
    compared = {}
    if task.peer in steps:
        compared = _differences(given, steps[OURS], steps[task.peer])
    calls: dict[str, Call] = {FORWARD: cell_contenders.forward(given, variants[OURS]), **steps}
    samples, others = _take_turns(calls, variants, task.peer != JAX, quick)
    return {
        "samples": samples,
        "variants": variants,
        "missing": missing,
        "wanted": {task.peer: task.wanted},
        "differences": compared,
        "cores_others_used": others,
    }


def _fastest(steps: Mapping[str, Step]) -> tuple[str, Step]:
    """Return the variant with the shortest call, and its name."""
    if len(steps) == 1:
        return next(iter(steps.items()))
    taken = {}
    for name, each in steps.items():
        with on_one_core(name.endswith(ONE_CORE)):
            once = min(seconds(each, 1))
            taken[name] = min(seconds(each, max(3, min(_MOST_TRIALS, round(_TURN / once)))))
    name = min(taken, key=lambda name: taken[name])
    return name, steps[name]


def _differences(given: Given, ours: Step, theirs: Step) -> dict[str, float]:
    """How far outputs and gradients are apart; AssertionError if rounding does not explain it."""
    grad = given.grad.copy()
    grad[_COMPARED:] = 0
    result, expected = ours(grad), theirs(grad)
    units, states = given.cell.hidden_size, result["state"]
    result |= {
        f"state {k}": states[:, k * units : (k + 1) * units]
        for k in range(states.shape[1] // units)
    }
    bound = _SPIKING_BOUND if given.kind in _SPIKING else _BOUND
    missing = given.cell.params.keys() - expected.keys()
    assert not missing, f"there are no gradients in {missing}"
    found = {}
    for name, right in expected.items():
        right, own = (np.asarray(each, np.float64) for each in (right, result[name]))
        if name == "output":
            right, own = right[:_COMPARED], own[:_COMPARED]
        own = own.reshape(right.shape)
        size = max(float(np.linalg.norm(right)), step.SMALLEST)
        found[name] = float(np.linalg.norm(own - right)) / size
        if not found[name] < bound:
            raise AssertionError(f"{name}: the relative difference is {found[name]:.1e}")
    return found


def _take_turns(
    calls: Mapping[str, Call], variants: Mapping[str, str], is_torch: bool, quick: bool
) -> tuple[dict[str, list[float]], list[float]]:
    """Return seconds of all calls, and how many cores others used in each round."""
    rounds, turn = (_QUICK_ROUNDS, _QUICK_TURN) if quick else (_ROUNDS, _TURN)
    rounds = min(rounds, _FEW_ROUNDS) if is_torch else rounds
    samples: dict[str, list[float]] = {name: [] for name in calls}
    others = []
    for _ in range(rounds):
        # PyTorch's threads, which came last, look out for work before they sleep.
        time.sleep(PAUSE if is_torch else 0)
        start, others_start = time.perf_counter(), machine.others()
        for name, call in calls.items():
            with on_one_core(variants.get(name, "").endswith(ONE_CORE)):
                if not samples[name] or samples[name][-1] < _LONG:
                    call_for(call, turn / 2, None)
                samples[name] += rounded(call_for(call, turn, None))
        others.append((machine.others() - others_start) / (time.perf_counter() - start))
    return samples, others


# -- The experiment -------------------------------------------------------------------------------


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("cells", options)
    quick = options.quick
    yield Piece(_LINES, measure_lines)
    for case in step.CASES:
        if case.name in step.QUICK or not quick:
            run = partial(measure_history, case, _HISTORY_WANTED, quick=quick)
            yield Piece(_HISTORY + case.name, run)
    for task in TASKS:
        if task.case.kind in _QUICK or not quick:
            yield Piece(task.key, partial(measure, task, quick=quick))
    for kind in _QUICK_STARTED if quick else _STARTED:
        yield Piece(_START + kind, partial(measure_start, kind, 1 if quick else 3))


def _about(options: Options) -> Results:
    return {
        "a step": "forward pass, and gradients of input, first state and parameters from those of "
        "all outputs; float32, no optimiser",
        "threads": "ours and PyTorch: 2 or 1, whichever were faster",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        TORCHRECURRENT: "0.2.5: its layer of that name with our parameters, eager",
        SNNTORCH: "a loop over steps that calls the neuron; its parameters learn",
        XLSTM: "sLSTM of one head with its backend vanilla, behind torch.nn.Linear",
        JAX: "jitted vjp of lax.scan, made from the step of the cell: what does not wait for the "
        "state is computed before the scan, gates of one vector are one matrix product; the "
        "faster of two forms, the fastest unroll of 1, 2, 4, 8 and 16 as long as longer ones are "
        "not slower by a quarter, on two cores or one",
        BEFORE: "the package before cells were defined once, in a process of its own, in turns",
        "first step": "of a new class of cells, T=1,000, in a new process, without imports",
    }


class _Line(NamedTuple):
    """A measured ratio and what is asked."""

    key: str
    peer: str
    ours: float
    forward: float | None
    theirs: float
    ratio: float
    wanted: float
    variants: str


def _lines(results: Results) -> Iterator[_Line]:
    """Yield all ratios there are."""
    for key, piece in step.races(results).items():
        ((peer, wanted),) = piece["wanted"].items()
        if peer not in piece["samples"]:
            continue
        medians = {name: median(taken) for name, taken in piece["samples"].items()}
        yield _Line(
            key,
            peer,
            medians[OURS],
            medians.get(FORWARD),
            medians[peer],
            medians[peer] / medians[OURS],
            wanted,
            "; ".join(piece["variants"].get(name, "") for name in (OURS, peer)),
        )


def _ratios(results: Results) -> Table:
    numbers = ["ours, ms", "forward, ms", "theirs, ms", "ratio", "asked"]
    rows = [
        [
            line.key,
            line.peer,
            line.variants,
            significant(1e3 * line.ours),
            "" if line.forward is None else significant(1e3 * line.forward),
            significant(1e3 * line.theirs),
            f"{line.ratio:.2f}",
            f"{line.wanted:g}",
            "" if line.ratio >= line.wanted else "missed",
        ]
        for line in _lines(results)
    ]
    return Table(["step", "peer", "variants", *numbers, ""], rows, numbers)


def _asked(results: Results) -> Table:
    """Return the table of what is asked, and whether it is so."""
    rows = []
    lines = list(_lines(results))
    for claim in CLAIMS:
        ratios = {
            line.key: line.ratio
            for line in lines
            if line.peer == claim.peer and any(has in line.key for has in claim.has)
        }
        if not ratios:
            continue
        least = min(ratios, key=lambda key: ratios[key])
        below = sum(ratio < claim.each for ratio in ratios.values())
        middle = median(ratios.values())
        rows.append(
            [
                f"{claim.name}, {claim.peer}",
                f"{claim.each:g}× each",
                f"{ratios[least]:.2f}× ({least.split(',')[0]})",
                f"{below} of {len(ratios)} missed" if below else "met",
            ]
        )
        if claim.median is not None:
            is_met = middle >= claim.median
            rows.append(
                ["", f"median {claim.median:g}×", f"{middle:.2f}×", "met" if is_met else "missed"]
            )
    for key, piece in results["pieces"].items():
        for what, taken in piece.get("seconds", {}).items():
            limit, shown = _WANTED_SECONDS.get(what), median(taken)
            asked = "" if limit is None else f"≤ {limit:g} s"
            met = "" if limit is None else "met" if shown <= limit else "missed"
            rows.append([f"{key}, {what}", asked, f"{shown:.2f} s", met])
        if "lines" in piece:
            middle, most = median(piece["lines"].values()), max(piece["lines"].values())
            met = "met" if middle <= _WANTED_LINES else "missed"
            shown = f"{middle:g}, at most {most}"
            rows.append([f"{_LINES} of a cell", f"median ≤ {_WANTED_LINES}", shown, met])
    return Table(["work", "asked", "measured", ""], rows, ["measured"])


def _tables(results: Results) -> list[Table]:
    return [table for table in (_asked(results), _ratios(results)) if table.rows]


def _rows(results: Results) -> list[Row]:
    return [
        row
        for key, piece in step.races(results).items()
        for peer in piece["wanted"]
        if (row := recurrent.row(f"Cell: {key}", piece, peer, OURS))
    ]


def _drawings(results: Results) -> list[Drawing]:
    drawings = []
    for peer, color in (
        *((TORCHRECURRENT, BLUE), (SNNTORCH, SKY), (JAX, GREEN)),
        *((XLSTM, BLUE), (BEFORE, ORANGE)),
    ):
        own = {key: each for key, each in step.races(results).items() if peer in each["samples"]}
        drawings += step.draw_races(f"Cells beside {peer}", own, {peer: color})
    return drawings


def summary(results: Results) -> str:
    """Return the tables as text."""
    return as_text(_tables(results))


EXPERIMENT = Experiment(
    name="cells",
    title="Cells of the catalogue",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
    tables=_tables,
    summary=summary,
)

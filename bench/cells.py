"""Cells of the catalogue beside the same ones elsewhere, and what a new cell costs.

A step is the forward pass, and the gradients in input, first state and parameters from those in all
outputs; there is no optimiser. The peers are torchrecurrent, snnTorch and xlstm in PyTorch, and the
same equations in a jitted ``lax.scan``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from statistics import median
from typing import NamedTuple

from sparsescan.recurrent import catalogue
from sparsescan.torch.calibrate import keep_memory

from . import cell_contenders, children, peers, races
from .cell_contenders import ONE_CORE, Case, Given, Step, on_one_core
from .experiment import Drawing, Experiment, Piece, Results, Table
from .page import significant
from .races import JAX, OURS
from .timing import PAUSE, Call, call_for, rounded, seconds, take_rounds

TORCHRECURRENT, SNNTORCH, XLSTM, LOOP = "torchrecurrent", "snnTorch", "xlstm", "PyTorch loop"
# Our cell without masks, and how much of the time with them it is to take.
UNMASKED, _WANTED_UNMASKED = "without masks", 1 / 1.15
# Our forward pass alone, which shows where the time of a step is.
FORWARD = "sparsescan, forward"
_SPIKING = ("Alpha", "Leaky", "Synaptic")
# Cells that torchrecurrent does not have.
_ALONE = "minGRU", "minLSTM", "sLSTM", "BlockDiagonalLSTM", "MogrifierLSTM", "ProjectedLSTM"
_MAKERS: dict[str, Callable[[Given], dict[str, Step]]] = {
    JAX: cell_contenders.jax,
    TORCHRECURRENT: cell_contenders.torchrecurrent,
    SNNTORCH: cell_contenders.snntorch,
    XLSTM: cell_contenders.xlstm,
    LOOP: cell_contenders.layer_norm_loop,
    UNMASKED: cell_contenders.unmasked,
}
# Cells that are normalised over units: how much longer loops of PyTorch and JAX are to take.
_NORMALISED = "LayerNormLSTM", "LayerNormGRU"
_NORMALISED_SIZES = ((20, 30, 4), (64, 12, 3), (128, 3, 1.5))
# The sLSTM of forecasters of time series (TiRex).
_HEADS = Case("sLSTM", 256, steps=256, options={"heads": 4})
_ROUNDS, _QUICK_ROUNDS, _TURN, _QUICK_TURN = 5, 2, 0.06, 0.01
_MOST_TRIALS = 20  # calls that tell which variant is fastest
# Rounds of peers that take about a second, and calls that are so long that none goes before them.
_FEW_ROUNDS, _LONG = 3, 0.1
# Outputs that are compared, and whose gradients are: some cells amplify rounding step by step.
_COMPARED = 32
# How far neurons may be apart, of which one may spike later.
_SPIKING_BOUND = 0.05
_QUICK = ("MGU", "Leaky", "sLSTM")
_STARTED, _QUICK_STARTED = ("MGU", "PeepholeLSTM", "LEM", "NAS"), ("MGU",)
# What is compiled when a process begins.
EMPTY, LIBRARY, KEPT = "nothing is compiled", "other cells are compiled", "compiled before"
IMPORT = "import"

_TIMED = """
import time
begin = time.perf_counter()
import numpy as np
from sparsescan.recurrent import catalogue
imported = time.perf_counter()
for kind in {kinds}:
    class Mine(getattr(catalogue, kind)):
        pass
    Mine.__name__ = Mine.__qualname__ = {name!r} + kind
    x = np.ones((1000, 16, {inputs}), np.float32)
    start = time.perf_counter()
    step = Mine({inputs}, 20, rng=0).training_step()
    output, _ = step.forward(x)
    step.backward(output)
    print(imported - begin, time.perf_counter() - start)
"""
# Cells that are compiled beforehand, with products of the state and with none, in several stages.
_OTHERS = "CFN", "MUT1", "TRNN", "SCRN"
# Seconds of a first step that are asked for, by what is compiled: of a few cells, and of all.
_WANTED_SECONDS = {EMPTY: 4.0, LIBRARY: 4.0, KEPT: 0.4}
_WANTED_OF_ALL = {LIBRARY: 8.0, KEPT: 0.2}


class Task(NamedTuple):
    """A cell beside one peer, and how many times as long as ours the peer is meant to take."""

    case: Case
    peer: str
    wanted: float

    @property
    def key(self) -> str:
        return f"{self.case.name}, {self.peer}"


def _tasks() -> Iterator[Task]:
    for kind in catalogue.__all__:
        if kind in _SPIKING:
            yield Task(Case(kind), SNNTORCH, 200)
        elif kind not in (*_ALONE, *_NORMALISED, *cell_contenders.UNMASKED):
            yield Task(Case(kind).as_in_torchrecurrent(), TORCHRECURRENT, 100)
        if kind == "sLSTM":
            yield Task(Case(kind), XLSTM, 20)
            yield from (Task(_HEADS, peer, 3) for peer in (XLSTM, JAX))
    for hidden, wanted in ((20, 3), (64, 1.5)):
        own = {*_NORMALISED, *cell_contenders.UNMASKED}
        kinds = [kind for kind in catalogue.__all__ if kind not in own]
        yield from (Task(Case(kind, hidden), JAX, wanted) for kind in kinds)
    for kind in cell_contenders.UNMASKED:
        for hidden in (20, 64, 128):
            yield Task(Case(kind, hidden).without_zeros(), UNMASKED, _WANTED_UNMASKED)
    for kind in _NORMALISED:
        for hidden, loop, scan in _NORMALISED_SIZES:
            yield from (Task(Case(kind, hidden), LOOP, loop), Task(Case(kind, hidden), JAX, scan))


TASKS = tuple(_tasks())


# -- Measuring -------------------------------------------------------------------------------------


def measure(task: Task, quick: bool) -> Results:
    """Return the times of a training step of our cell and of a peer, who take turns.

    Returns
    -------
    dict
        For both, and for our forward pass, ``samples`` in seconds, and the ``variants`` that were
        fastest; ``missing`` peers, the ratio that is ``wanted``, ``cores_others_used`` in each
        round, and ``differences`` of the outputs and of each gradient, relative to the peer's.
    """
    keep_memory()
    given = task.case.given()
    makers = {OURS: cell_contenders.ours, task.peer: _MAKERS[task.peer]}
    makers_here = {name: partial(make, given) for name, make in makers.items()}
    steps, chosen = peers.fastest_of_each(makers_here, _fastest)
    variants, compared = chosen["variants"], {}
    if task.peer in steps:
        compared = differences(given, steps[OURS], steps[task.peer])
    calls: dict[str, Call] = {FORWARD: cell_contenders.forward(given, variants[OURS]), **steps}
    samples, used = _take_turns(calls, variants, task.peer != JAX, quick)
    about = {"wanted": {task.peer: task.wanted}, "differences": compared}
    return {"samples": samples, **chosen, **about, "cores_others_used": used}


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


def differences(given: Given, ours: Step, theirs: Step) -> dict[str, float]:
    """How far outputs and gradients are apart; AssertionError if rounding does not explain it."""
    grad = given.grad.copy()
    grad[_COMPARED:] = 0
    result, expected = ours(grad), theirs(grad)
    units, states = given.cell.hidden_size, result["state"]
    count = states.shape[1] // units
    result |= {f"state {k}": states[:, k * units : (k + 1) * units] for k in range(count)}
    for both in (result, expected):
        both["output"] = both["output"][:_COMPARED]
    lacking = given.cell.params.keys() - expected.keys()
    assert not lacking, f"there are no gradients in {lacking}"
    return races.apart(result, expected, _SPIKING_BOUND if given.kind in _SPIKING else races.BOUND)


def _take_turns(
    calls: Mapping[str, Call], variants: Mapping[str, str], is_torch: bool, quick: bool
) -> tuple[dict[str, list[float]], list[float]]:
    """Return seconds of all calls, and how many cores others used in each round."""
    rounds, turn = (_QUICK_ROUNDS, _QUICK_TURN) if quick else (_ROUNDS, _TURN)
    rounds = min(rounds, _FEW_ROUNDS) if is_torch else rounds
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def take(_: list[float]) -> None:
        # PyTorch's threads, which came last, look out for work before they sleep.
        time.sleep(PAUSE if is_torch and not quick else 0)
        for name, call in calls.items():
            with on_one_core(variants.get(name, "").endswith(ONE_CORE)):
                if not samples[name] or samples[name][-1] < _LONG:
                    call_for(call, turn / 2)
                samples[name] += rounded(call_for(call, turn))

    return samples, take_rounds(take, rounds)


# -- First steps ----------------------------------------------------------------------------------


def measure_start(kind: str, rounds: int, *, has_empty: bool = True) -> Results:
    """Return ``seconds`` of first steps of a cell, by what is compiled, and those of imports.

    The cell is a new class with the step of one of the catalogue. Where nothing is compiled, not
    even what all cells share, a step takes about a minute, and is timed once, unless not at all.
    """
    inputs = Case(kind).given().cell.input_size
    seconds: dict[str, list[float]] = {EMPTY: [], LIBRARY: [], KEPT: [], IMPORT: []}
    if has_empty:
        with tempfile.TemporaryDirectory() as folder:
            seconds[EMPTY].append(_start((kind,), folder, inputs=inputs)[1])
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(_library(), folder, dirs_exist_ok=True)
            for state in (LIBRARY, KEPT):
                imported, taken = _start((kind,), folder, inputs=inputs)
                seconds[state].append(taken)
                seconds[IMPORT].append(imported)
    wanted = _WANTED_SECONDS if has_empty else _WANTED_OF_ALL
    return {"seconds": {what: taken for what, taken in seconds.items() if taken}, "asked": wanted}


@cache
def _library() -> str:
    """Return a folder with the compiled code of other cells."""
    folder = tempfile.mkdtemp()
    _start(_OTHERS, folder, "Other")
    return folder


def _start(
    kinds: tuple[str, ...], folder: str, name: str = "New", inputs: int = 12
) -> tuple[float, float]:
    """Return seconds of the import and of the last of some first steps, in a new process."""
    code = _TIMED.format(kinds=kinds, name=name, inputs=inputs)
    said = children.run([sys.executable, "-c", code], {"NUMBA_CACHE_DIR": folder})
    imported, taken = map(float, said.splitlines()[-1].split())
    return imported, taken


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for task in TASKS:
        if task.case.kind in _QUICK or not quick:
            yield Piece(task.key, partial(measure, task, quick))
    for kind in _QUICK_STARTED if quick else _STARTED:
        yield Piece(f"first step of {kind}", partial(measure_start, kind, 1 if quick else 3))
    for kind in () if quick else catalogue.__all__:
        if kind not in _STARTED:
            one = partial(measure_start, kind, 1, has_empty=False)
            yield Piece(f"first step of {kind}", one)


def _about(quick: bool) -> Results:
    return {
        "a step": "forward pass, and gradients of input, first state and parameters from those of "
        "all outputs; float32, no optimiser",
        "threads": "ours and PyTorch: 2 or 1, whichever were faster",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        TORCHRECURRENT: "0.2.5: its layer of that name with our parameters, eager",
        SNNTORCH: "a loop over steps that calls the neuron; its parameters learn",
        XLSTM: "sLSTM with its backend vanilla, behind torch.nn.Linear",
        LOOP: "a loop over steps in PyTorch, eager, with torch.nn.functional.layer_norm; what does "
        "not wait for the state is computed before it",
        UNMASKED: "the same cell without masks, ours; masks are drawn by NumPy's generator, and "
        "with probability 0, so that both compute the same",
        JAX: "jitted vjp of lax.scan, made from the step of the cell: what does not wait for the "
        "state is computed before the scan, gates of one vector are one matrix product; the "
        "faster of two forms, the fastest unroll of 1, 2, 4, 8 and 16 as long as longer ones are "
        "not slower by a quarter, on two cores or one",
        "first step": "of a new class of cells, T=1,000, in a new process, without imports",
    }


def _tables(results: Results) -> list[Table]:
    """Return the table of all ratios, and that of first steps, beside what is asked."""
    shown = []
    for key, piece in races.races(results).items():
        ((peer, wanted),) = piece["wanted"].items()
        if peer in piece["samples"]:
            medians = {name: median(taken) for name, taken in piece["samples"].items()}
            ratio = medians[peer] / medians[OURS]
            variants = "; ".join(piece["variants"].get(name, "") for name in (OURS, peer))
            times = (medians.get(name) for name in (OURS, FORWARD, peer))
            ms = [significant(1e3 * taken) if taken else "" for taken in times]
            missed = "missed" * (ratio < wanted)
            shown.append([peer, key, variants, *ms, f"{ratio:.2f}", f"{wanted:.3g}", missed])
    starts = [
        [key, what, f"{limit:g}" if limit else "", f"{median(taken):.2f}"]
        for key, piece in results["pieces"].items()
        for what, taken in piece.get("seconds", {}).items()
        for limit in (piece.get("asked", _WANTED_SECONDS).get(what),)
    ]
    numbers = ["ours, ms", "forward, ms", "theirs, ms", "ratio", "asked"]
    every = Table(["peer", "step", "variants", *numbers, ""], shown, numbers)
    heads = ["first step", "before it", "asked, s", "taken, s"]
    return [every, Table(heads, starts, heads[2:])]


def _drawings(results: Results) -> list[Drawing]:
    drawings = []
    for peer in _MAKERS:
        own = {key: p for key, p in races.races(results).items() if peer in p["samples"]}
        drawings += races.draw(f"Cells beside {peer}", own, hidden=(FORWARD,))
    return drawings


_ROWS = partial(races.rows, "Cell", hidden=(FORWARD,))
EXPERIMENT = Experiment(
    "cells", "Cells of the catalogue", _pieces, _about, _drawings, _ROWS, _tables
)

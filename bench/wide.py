"""Wide cells beside the floor: what their weights and multiply-adds take at least.

A step reads all weights, in training once more, transposed; a multiply-add for each weight and
sample, in training three. The floor of a step is the longer of both, by the rates at which two
threads read so many bytes again and again, and multiply and add in registers. Activations, inputs
and the layout of the weights count for nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

import sparsescan.torch
from sparsescan.torch._prepared import only

from .experiment import Experiment, Options, Piece, Results, Table, as_text, cpu_only
from .machine import bandwidth, flop_rate
from .map_races import GATES, INFERENCE, INPUTS, TRAINING, on_threads
from .page import significant
from .timing import THREADS, Call, seconds

__all__ = ["EXPERIMENT", "Case", "floor", "measure"]

_STEPS, _ROUNDS, _CALLS = 64, 5, 5


class Case(NamedTuple):
    """A network of one layer, and its input."""

    kind: str
    mode: str
    hidden: int
    batch: int
    steps: int = _STEPS

    @property
    def key(self) -> str:
        """What the piece is called."""
        return f"{self.kind}, {self.mode}, H={self.hidden}, B={self.batch}"


def floor(case: Case) -> dict[str, float]:
    """Return what the floor is made of: weights, FLOP, both rates, and seconds."""
    weights = GATES[case.kind] * case.hidden * (case.hidden + INPUTS)
    passes, products = (2, 3) if case.mode == TRAINING else (1, 1)
    moved, flop = 4 * weights, 2 * weights * case.batch
    read, rate = bandwidth(moved), flop_rate(np.dtype(np.float32))
    step = max(passes * moved / read, products * flop / rate)
    return {
        "bytes": moved,
        "bytes per second": read,
        "flop": flop,
        "flop per second": rate,
        "seconds": case.steps * step,
    }


def measure(case: Case, quick: bool) -> Results:
    """Time calls of our kernels through the module, and the floor."""
    torch.manual_seed(0)
    module = getattr(sparsescan.torch, case.kind)(INPUTS, case.hidden)
    training = case.mode == TRAINING
    x = torch.randn(case.steps, case.batch, INPUTS, requires_grad=training)
    above = torch.randn(case.steps, case.batch, case.hidden)

    def infer() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x)[0].backward(above)

    call: Call = train if training else infer
    with on_threads(THREADS), only("sparsescan"):
        samples = [seconds(call, 1 if quick else _CALLS) for _ in range(1 if quick else _ROUNDS)]
    return {"floor": floor(case), "samples_seconds": samples}


def _cases(quick: bool) -> Iterator[Case]:
    for kind in ("LSTM",) if quick else ("LSTM", "GRU"):
        for mode in (INFERENCE, TRAINING):
            for hidden in (128,) if quick else (128, 256, 512):
                for batch in (1,) if quick else (1, 16, 64):
                    yield Case(kind, mode, hidden, batch)


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("wide", options)
    for case in _cases(options.quick):
        yield Piece(case.key, partial(measure, case, options.quick))


def _tables(results: Results) -> list[Table]:
    rows = []
    for key, piece in results["pieces"].items():
        ours = median(each for turn in piece["samples_seconds"] for each in turn)
        least = piece["floor"]["seconds"]
        figures = (1e3 * least, 1e3 * ours, ours / least)
        rows.append([key, *(significant(each) for each in figures)])
    heads = ["64 steps, two threads", "floor, ms", "ours, ms", "ours / floor"]
    return [Table(heads, rows, heads[1:])]


def _about(options: Options) -> Results:
    return {"inputs": INPUTS, "steps": _STEPS, "dtype": "float32", "threads": THREADS}


EXPERIMENT = Experiment(
    name="wide",
    title="Wide cells beside the floor",
    pieces=_pieces,
    about=_about,
    drawings=lambda results: [],
    rows=lambda results: [],
    tables=_tables,
    summary=lambda results: as_text(_tables(results)),
)

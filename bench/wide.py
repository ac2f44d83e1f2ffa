"""Wide cells beside the floor: what their weights and multiply-adds take at least.

A step reads all weights, in training once more, transposed; a multiply-add for each weight and
sample, in training three. The floor of a step is the longer of both, by the rates at which two
threads read so many bytes again and again, and multiply and add in registers. Activations, inputs
and the layout of the weights count for nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch

import sparsescan.torch
from sparsescan.torch.calls.prepared import only

from .experiment import Experiment, Piece, Results, Table
from .machine import bandwidth, flop_rate
from .map_races import GATES, INFERENCE, INPUTS, TRAINING, called, on_threads
from .page import significant
from .timing import THREADS, seconds

_STEPS, _ROUNDS, _CALLS = 64, 5, 5


def floor(kind: str, mode: str, hidden: int, batch: int) -> dict[str, float]:
    """Return what the floor is made of: weights, FLOP, both rates, and seconds."""
    weights = GATES[kind] * hidden * (hidden + INPUTS)
    passes, products = (2, 3) if mode == TRAINING else (1, 1)
    moved, flop = 4 * weights, 2 * weights * batch
    read, rate = bandwidth(moved), flop_rate(np.dtype(np.float32))
    step = max(passes * moved / read, products * flop / rate)
    return {
        "bytes": moved,
        "bytes per second": read,
        "flop": flop,
        "flop per second": rate,
        "seconds": _STEPS * step,
    }


def measure(kind: str, mode: str, hidden: int, batch: int, quick: bool) -> Results:
    """Time calls of our kernels through the module, and the floor."""
    torch.manual_seed(0)
    module = getattr(sparsescan.torch, kind)(INPUTS, hidden)
    x = torch.randn(_STEPS, batch, INPUTS, requires_grad=mode == TRAINING)
    leaves = [x, *module.parameters()]
    above = torch.randn(_STEPS, batch, hidden)
    clear, run = called(mode, lambda x: module(x)[0], [x], leaves, above)
    rounds, calls = (1, 1) if quick else (_ROUNDS, _CALLS)
    with on_threads(THREADS), only("sparsescan"):
        samples = [seconds(lambda: (clear(), run()), calls) for _ in range(rounds)]
    return {"floor": floor(kind, mode, hidden, batch), "samples_seconds": samples}


def _pieces(quick: bool) -> Iterable[Piece]:
    kinds, sizes = (("LSTM",), (128,)) if quick else (("LSTM", "GRU"), (128, 256, 512))
    modes, batches = (INFERENCE, TRAINING), (1,) if quick else (1, 16, 64)
    for kind, mode, hidden, batch in product(kinds, modes, sizes, batches):
        key = f"{kind}, {mode}, H={hidden}, B={batch}"
        yield Piece(key, partial(measure, kind, mode, hidden, batch, quick))


def _tables(results: Results) -> list[Table]:
    rows = []
    for key, piece in results["pieces"].items():
        ours = median(each for turn in piece["samples_seconds"] for each in turn)
        least = piece["floor"]["seconds"]
        rows.append([key, *map(significant, (1e3 * least, 1e3 * ours, ours / least))])
    heads = ["64 steps, two threads", "floor, ms", "ours, ms", "ours / floor"]
    return [Table(heads, rows, heads[1:])]


def _about(quick: bool) -> Results:
    return {"inputs": INPUTS, "steps": _STEPS, "dtype": "float32", "threads": THREADS}


EXPERIMENT = Experiment("wide", "Wide cells beside the floor", _pieces, _about, tables=_tables)

"""Section 4.2 of the paper: a GRU on coefficients of sound, for the sizes S, M and L.

The backward pass and the training step (Figure 9, Table 6), beside PyTorch's autograd. Coefficients
are made up, each with zero mean and unit variance, as the paper's are: times do not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from . import races, recurrent
from .experiment import Drawing, Experiment, Piece, Results, Row
from .recurrent import AUTOGRAD, GIVEN, HIDDEN, OURS, STEP, STEP_OURS, Model

# Frames of a clip of 3 s, and coefficients of both channels.
SETS = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
BATCHES = (16, 32, 64)
_CLASSES, _RATE = 11, 3e-4

# Seconds of an epoch on a V100, Table 6: forward pass, baseline, forward pass with making the
# Jacobians, BPPSA.
_PAPER = {
    "S B=16": (1.66, 3.71, 2.1, 2.94),
    "S B=32": (0.91, 1.9, 1.09, 1.48),
    "S B=64": (0.52, 1.0, 0.62, 0.82),
    "M B=16": (3.21, 6.19, 3.52, 4.2),
    "M B=32": (1.73, 3.3, 1.83, 2.22),
    "M B=64": (0.86, 1.82, 1.18, 1.2),
    "L B=16": (5.78, 11.43, 6.06, 6.91),
    "L B=32": (3.04, 6.09, 3.23, 3.57),
    "L B=64": (1.64, 3.19, 2.13, 2.33),
}
# The text's, of an RTX 2070 or 2080 Ti: without making the Jacobians, and of a whole iteration.
_BEST_BACKWARD, _BEST_OVERALL = 13.4, 2.36


def clips(name: str, batch: int) -> tuple[Tensor, Tensor]:
    """Return coefficients, frames first, and instruments."""
    torch.manual_seed(0)
    frames, coefficients = SETS[name]
    return torch.randn(frames, batch, coefficients), torch.randint(_CLASSES, (batch,))


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, batch in product(SETS, BATCHES[:1] if quick else BATCHES):
        model = Model("GRU", SETS[name][1], _CLASSES, _RATE)
        run = partial(recurrent.measure, model, *clips(name, batch), quick)
        yield Piece(f"{name} B={batch}", run)


def _about(quick: bool) -> Results:
    return recurrent.about("GRU") | {
        "frames × coefficients": {name: "{} × {}".format(*size) for name, size in SETS.items()},
        "optimiser": f"Adam, learning rate {_RATE:g}",
    }


def _rows(results: Results) -> list[Row]:
    pieces, rows = races.races(results), []
    for key, piece in pieces.items():
        where = f"GRU, {HIDDEN} units, float32, set {key[0]}, T={piece['steps']:,}"
        where += f", B={piece['batch']}"
        rows += races.row(f"Backward pass of a {where}", piece, AUTOGRAD, OURS)
        rows += races.row(f"Training step of a {where}", piece, STEP, STEP_OURS)
    sets = {f"set {key}": piece for key, piece in pieces.items()}
    backward, step = "Backward pass of the GRU, Jacobians given", "Training step of the GRU"
    rows += recurrent.at_best(sets, backward, AUTOGRAD, GIVEN, _BEST_BACKWARD)
    return rows + recurrent.at_best(sets, step, STEP, STEP_OURS, _BEST_OVERALL)


def _drawings(results: Results) -> list[Drawing]:
    def backward(key: str) -> float:
        forward, baseline, with_making, ours = _PAPER[key]
        return (baseline - forward) / (ours - with_making)

    def step(key: str) -> float:
        return _PAPER[key][1] / _PAPER[key][3]

    said = "Here that is the paper's, on a V100 (Table 6, Figure 9)."
    what = "Backward pass, Jacobians given"
    return [
        *recurrent.draw(results, what, AUTOGRAD, GIVEN, backward, said),
        *recurrent.draw(results, "Training step", STEP, STEP_OURS, step, said),
    ]


EXPERIMENT = Experiment(
    "gru", "GRU: instruments by their sound, end to end", _pieces, _about, _drawings, _rows
)

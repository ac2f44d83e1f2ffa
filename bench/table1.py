"""Table 1 of the paper: making the Jacobians of VGG-11's first layers on 32×32 images.

The peer is PyTorch's autograd, one column at a time. Its columns are kept without their zeros, as
the Jacobian is wanted in CSR; dense, it would take 17 GB. A call makes :data:`COLUMNS` columns of
one sample, and its time is multiplied. The floor is measured as one more contender, which writes
the array of values once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan.jacobians import Conv2d, MaxPool2d, ReLU
from sparsescan.jacobians.shared.operator import Operator

from . import contests, races
from .contests import OURS, Contest, Work
from .experiment import Drawing, Experiment, Piece, Results, Row
from .peers import torch_columns
from .timing import Call

COLUMNS = 64
WRITING = "writing the values once"
AUTOGRAD = "PyTorch autograd by column, as CSR"

# The published speedups over AUTOGRAD.
PAPER = {"conv": 8.3e3, "relu": 1.2e6, "maxpool": 1.5e5}
_SIDE = 32


def _operator(name: str, reduced: bool) -> Operator:
    side, channels = (8, 4) if reduced else (_SIDE, 64)
    if name == "conv":
        return Conv2d(3, channels, 3, padding=1, input_shape=(3, side, side), rng=0)
    if name == "relu":
        return ReLU(input_shape=(channels, side, side))
    return MaxPool2d(2, 2, input_shape=(channels, side, side))


def _contest(name: str, work: str, batch: int = 1) -> Contest:
    def make(reduced: bool) -> Work:
        op = _operator(name, reduced)
        shape = (batch, *op.input_shape) if batch > 1 else op.input_shape
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        sample = x[0] if batch > 1 else x
        values = np.empty((batch, op.nnz) if batch > 1 else op.nnz, np.float32)
        columns = np.linspace(0, op.shape[1] - 1, COLUMNS).astype(np.int64)

        def ours() -> dict[str, Call]:
            return {"values into out=": lambda: op.values(x, out=values)}

        def writing() -> dict[str, Call]:
            scratch = np.empty_like(values)
            return {"ndarray.fill": lambda: scratch.fill(1.0)}

        def answer(contender: str, result: Any) -> NDArray[Any]:
            if contender == OURS:
                return op.jacobian(sample)[:, columns].toarray().T
            return sp.csr_array(result, shape=(COLUMNS, op.shape[0])).toarray()

        return Work(
            contenders={
                OURS: ours,
                AUTOGRAD: lambda: torch_columns(_module(name, op), sample, columns),
                WRITING: writing,
            },
            bytes=values.nbytes,
            flops=0,
            answer=answer,
            repeats={AUTOGRAD: batch * op.shape[1] / COLUMNS},
            unchecked=(WRITING,),
        )

    # Twice the floor at most.
    required = {AUTOGRAD: PAPER[name], WRITING: 0.5}
    return Contest(f"table1-{name}-B={batch}", f"{work}, batch {batch}", make, required)


def _module(name: str, op: Operator) -> Any:
    """Make the layer in PyTorch, with the parameters of the operator."""
    import torch

    if name == "relu":
        return torch.nn.ReLU()
    if name == "maxpool":
        return torch.nn.MaxPool2d(2, 2)
    weight, bias = (torch.from_numpy(param) for param in op.params.values())
    return lambda x: torch.nn.functional.conv2d(x, weight, bias, padding=1)


CONV = "values of the Jacobian of Conv2d(3, 64, 3, padding=1), 3×32×32, float32"
RELU = "values of the Jacobian of ReLU, 64×32×32, float32"
MAXPOOL = "values of the Jacobian of MaxPool2d(2, 2), 64×32×32, float32"
CONTESTS = (
    _contest("conv", CONV),
    _contest("relu", RELU),
    _contest("relu", RELU, 16),
    _contest("maxpool", MAXPOOL),
    _contest("maxpool", MAXPOOL, 16),
)


# -- The experiment -------------------------------------------------------------------------------

_ROUNDS, _QUICK_ROUNDS = 15, 3


def _pieces(quick: bool) -> Iterable[Piece]:
    for contest in CONTESTS:
        yield Piece(contest.name, partial(_measure, contest, quick))


def _measure(contest: Contest, quick: bool) -> Results:
    line = contests.measure(
        contest,
        _QUICK_ROUNDS if quick else _ROUNDS,
        reduced=False,
        **({"patience": 1} if quick else {}),
    )
    return line | {"operator": contest.name.split("-")[1]}


def _about(quick: bool) -> Results:
    return {
        "columns that a call of PyTorch makes": COLUMNS,
        "rounds": _QUICK_ROUNDS if quick else _ROUNDS,
        "dtype": "float32",
        "the paper's CPU": "Ryzen Threadripper 1950X",
    }


def _drawings(results: Results) -> list[Drawing]:
    """How long autograd and the floor take, in multiples of our time."""
    pieces = {
        f"{piece['operator']}, batch {piece['name'].rpartition('=')[2]}": races.of_line(
            piece, {AUTOGRAD: PAPER[piece["operator"]]}
        )
        for piece in results["pieces"].values()
    }
    more = (
        "Values of the Jacobians of VGG-11's first layers on 32×32 images, made from the pattern "
        "that is known, against PyTorch's autograd (the paper's Table 1, whose speedups the ticks "
        "are), and against writing the values once. Autograd's times are those of a part of the "
        "columns, multiplied."
    )
    return races.draw("Making Jacobians", pieces, more)


def _rows(results: Results) -> list[Row]:
    rows = []
    for piece in results["pieces"].values():
        race = races.of_line(piece, {})
        rows += races.row(piece["work"], race, AUTOGRAD, OURS, PAPER[piece["operator"]])
        rows += races.row(piece["work"], race, WRITING)
    return rows


EXPERIMENT = Experiment("table1", "Table 1: making Jacobians", _pieces, _about, _drawings, _rows)

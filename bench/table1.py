"""Table 1 of the paper: making the Jacobians of VGG-11's first layers on 32×32 images.

The peer is PyTorch's autograd, one column at a time. Its columns are kept without their zeros, as
the Jacobian is wanted in CSR; dense, it would take 17 GB. Two more contenders keep nothing, one of
which takes all columns at once. A call makes :data:`COLUMNS` columns of one sample, and its time is
multiplied. The floor is measured as one more contender, which writes the array of values once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan.jacobians import Conv2d, MaxPool2d, Operator, ReLU

from . import turns
from .contests import OURS, Contest, Work
from .drawing import BLUE, GREEN, ORANGE, SKY, legend, panels, rows_of_bars
from .experiment import Drawing, Experiment, Options, Piece, Results, Row, cpu_only
from .peers import torch_columns
from .timing import Call

COLUMNS = 64
WRITING = "writing the values once"
AUTOGRAD = "PyTorch autograd by column, as CSR"
FORGOTTEN = "the same, columns not kept"
BATCHED = "PyTorch vmap, not kept"

# The published speedups over AUTOGRAD, and sparsities.
PAPER = {"conv": 8.3e3, "relu": 1.2e6, "maxpool": 1.5e5}
SPARSITY = {"conv": 0.99157, "relu": 0.99998, "maxpool": 0.99994}
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
            if contender == AUTOGRAD:
                return sp.csr_array(result, shape=(COLUMNS, op.shape[0])).toarray()
            return np.stack([np.asarray(column).reshape(-1) for column in result])

        def torch(way: str) -> Callable[[], dict[str, Call]]:
            return lambda: torch_columns(_module(name, op), sample, columns, way)

        repeats = batch * op.shape[1] / COLUMNS
        return Work(
            contenders={
                OURS: ours,
                AUTOGRAD: torch("csr"),
                FORGOTTEN: torch("column"),
                BATCHED: torch("vmap"),
                WRITING: writing,
            },
            bytes=values.nbytes,
            flops=0,
            answer=answer,
            repeats=dict.fromkeys((AUTOGRAD, FORGOTTEN, BATCHED), repeats),
            unchecked=(WRITING,),
        )

    # Twice the floor at most.
    required = {AUTOGRAD: PAPER[name], FORGOTTEN: None, BATCHED: None, WRITING: 0.5}
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
_STYLES: dict[str, dict[str, Any]] = {
    AUTOGRAD: {"color": BLUE, "marker": "o"},
    FORGOTTEN: {"color": SKY, "marker": "s"},
    BATCHED: {"color": GREEN, "marker": "D"},
}
_LINES: dict[str, dict[str, Any]] = {
    "ours": {"color": ORANGE, "lw": 1.5},
    "published": {"color": "grey", "ls": "--"},
    f"the floor: {WRITING}": {"color": "black", "ls": ":"},
}


def _pieces(options: Options) -> list[Piece]:
    cpu_only("table1", options, ", as in the paper")
    return [Piece(contest.name, partial(_piece, contest, options.quick)) for contest in CONTESTS]


def _piece(contest: Contest, quick: bool) -> Results:
    rounds = {"rounds": _QUICK_ROUNDS, "patience": 1} if quick else {"rounds": _ROUNDS}
    line = turns.measure(contest, reduced=False, **rounds)
    name = contest.name.split("-")[1]
    op = _operator(name, False)
    ratios = line["ratios"].items()
    return line | {
        "operator": name,
        "sparsity": 1 - op.nnz / (op.shape[0] * op.shape[1]),
        "missing": {peer: ratio["skipped"] for peer, ratio in ratios if ratio["skipped"]},
    }


def _about(options: Options) -> dict[str, Any]:
    return {
        "columns that a call of PyTorch makes": COLUMNS,
        "rounds": _QUICK_ROUNDS if options.quick else _ROUNDS,
        "dtype": "float32",
        "the paper's CPU": "Ryzen Threadripper 1950X",
    }


def _drawings(results: Results) -> list[Drawing]:
    """How long autograd and the floor take, in multiples of our time."""
    pieces = list(results["pieces"].values())
    if not pieces:
        return []
    figure, [[axes]] = panels(1, 1, 9, 0.9 + 0.75 * len(pieces))
    for y, piece in enumerate(pieces):
        _ratios(axes, y, piece)
    for peer, style in _STYLES.items():
        axes.plot([], [], ls="", ms=6, label=peer, **style)
    for label, style in _LINES.items():
        axes.plot([], [], label=label, **style)
    axes.set_yticks(range(len(pieces)), [_label(piece) for piece in pieces])
    axes.set(xscale="log", ylim=(len(pieces) - 0.4, -0.6), xlabel="time over ours")
    _multiples(axes)
    rows_of_bars(axes)
    legend(figure, [axes], 3, loc="outside upper center")
    return [Drawing("Making Jacobians", _caption(pieces), figure)]


def _ratios(axes: Any, y: int, piece: Results) -> None:
    """Draw a row of the picture."""
    medians, counts = piece["median_seconds"], piece["rounds_that_count"]
    counts = counts if any(counts) else [True] * len(counts)
    for k, (peer, style) in enumerate(_STYLES.items()):
        if peer not in medians:
            continue
        at = y + 0.24 * (k - 1)
        samples = turns.counting(piece["samples_seconds"][peer], counts)
        ratios = np.array(samples) / medians[OURS]
        axes.plot(ratios, np.full(len(ratios), at), "|", color=style["color"], alpha=0.15)
        axes.plot(medians[peer] / medians[OURS], at, ls="", ms=6, **style)
    places = 1.0, PAPER[piece["operator"]], medians[WRITING] / medians[OURS]
    for x, style in zip(places, _LINES.values(), strict=True):
        axes.vlines(x, y - 0.42, y + 0.42, **style | {"lw": 1.5})


def _multiples(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter("×", sep=""))


def _caption(pieces: list[Results]) -> str:
    caption = (
        "Values of the Jacobians of VGG-11's first layers on 32×32 images, made from the pattern "
        "that is known, against PyTorch's autograd (the paper's Table 1). The grey dashed lines "
        "are the published speedups over autograd by column, the dotted ones what it takes to "
        "write the values once. Autograd's times are those of a part of the columns, multiplied. "
        "Ticks are single samples. Sparsity: "
    )
    caption += ", ".join(
        f"{name} {piece['sparsity']:.5f} (published: {SPARSITY[name]})"
        for name, piece in {piece["operator"]: piece for piece in pieces}.items()
    )
    return f"{caption}."


def _label(piece: Results) -> str:
    return f"{piece['operator']}, batch {piece['name'].rpartition('=')[2]}"


def _rows(results: Results) -> list[Row]:
    rows = []
    for piece in results["pieces"].values():
        medians = piece["median_seconds"]
        for peer, paper in ((AUTOGRAD, PAPER[piece["operator"]]), (WRITING, None)):
            if peer in medians:
                rows.append(Row(piece["work"], peer, medians[peer], medians[OURS], paper))
    return rows


EXPERIMENT = Experiment(
    name="table1",
    title="Table 1: making Jacobians",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
)

"""Table 1 of the paper: making the Jacobians of VGG-11's first layers on 32×32 images.

The peer is PyTorch's autograd, one column at a time. Its columns are kept without their zeros, as
the Jacobian is wanted in CSR, and dense would take 17 GB; two more contenders keep nothing, and
take many columns at once. A call makes :data:`COLUMNS` columns of one sample, and its time is
multiplied. The floor is measured as one more contender: the time it takes to write the array of
values once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan.jacobians import Conv2d, MaxPool2d, Operator, ReLU

from .contests import OURS, Contest, Work
from .peers import Call, torch_columns

COLUMNS = 64
WRITING = "writing the values once"
AUTOGRAD = "PyTorch autograd by column, as CSR"
FORGOTTEN = "the same, columns not kept"
BATCHED = "PyTorch vmap, not kept"

# The published speedups, and twice the floor.
_PAPER = {"conv": 8.3e3, "relu": 1.2e6, "maxpool": 1.5e5}
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
            dtype=values.dtype,
            answer=answer,
            repeats=dict.fromkeys((AUTOGRAD, FORGOTTEN, BATCHED), repeats),
            unchecked=(WRITING,),
        )

    required = {AUTOGRAD: _PAPER[name], FORGOTTEN: None, BATCHED: None, WRITING: 0.5}
    return Contest(f"table1-{name}-B={batch}", f"{work}, batch {batch}", make, required)


def _module(name: str, op: Operator) -> Any:
    """The same layer in PyTorch, with the same parameters."""
    import torch

    if name == "relu":
        return torch.nn.ReLU()
    if name == "maxpool":
        return torch.nn.MaxPool2d(2, 2)
    weight, bias = (torch.from_numpy(param) for param in op.params.values())
    return lambda x: torch.nn.functional.conv2d(x, weight, bias, padding=1)


CONTESTS = (
    _contest("conv", "values of the Jacobian of Conv2d(3, 64, 3, padding=1), 3×32×32, float32"),
    _contest("relu", "values of the Jacobian of ReLU, 64×32×32, float32"),
    _contest("relu", "values of the Jacobian of ReLU, 64×32×32, float32", 16),
    _contest("maxpool", "values of the Jacobian of MaxPool2d(2, 2), 64×32×32, float32"),
    _contest("maxpool", "values of the Jacobian of MaxPool2d(2, 2), 64×32×32, float32", 16),
)

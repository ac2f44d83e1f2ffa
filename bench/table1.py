"""Table 1 of the paper: making the Jacobians of VGG-11's first layers on 32×32 images.

The peer is PyTorch's autograd, one column at a time; a call makes :data:`COLUMNS` of them, and its
time is multiplied. The floor of each line is measured as one more contender: the time it takes to
write the array of values once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsescan.jacobians import Conv2d, MaxPool2d, Operator, ReLU

from .contests import OURS, Contest, Work
from .peers import Call, torch_columns

COLUMNS = 64
WRITING = "writing the values once"
AUTOGRAD = "PyTorch autograd, column by column"
BATCHED = "PyTorch vmap, all columns at once"

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


def _contest(name: str, work: str) -> Contest:
    def make(reduced: bool) -> Work:
        op = _operator(name, reduced)
        x = np.random.default_rng(0).standard_normal(op.input_shape).astype(np.float32)
        values = np.empty(op.nnz, np.float32)
        columns = np.linspace(0, op.shape[1] - 1, COLUMNS).astype(np.int64)

        def ours() -> dict[str, Call]:
            return {"values into out=": lambda: op.values(x, out=values)}

        def writing() -> dict[str, Call]:
            scratch = np.empty_like(values)
            return {"ndarray.fill": lambda: scratch.fill(1.0)}

        def answer(contender: str, result: Any) -> NDArray[Any]:
            if contender == OURS:
                return op.jacobian(x)[:, columns].toarray().T
            return np.asarray(result).reshape(COLUMNS, -1)

        def torch(batched: bool) -> Callable[[], dict[str, Call]]:
            return lambda: torch_columns(_module(name, op), x, columns, batched=batched)

        repeats = op.shape[1] / COLUMNS
        return Work(
            contenders={
                OURS: ours,
                AUTOGRAD: torch(batched=False),
                BATCHED: torch(batched=True),
                WRITING: writing,
            },
            bytes=values.nbytes,
            flops=0,
            dtype=values.dtype,
            answer=answer,
            repeats={AUTOGRAD: repeats, BATCHED: repeats},
            unchecked=(WRITING,),
        )

    required = {AUTOGRAD: _PAPER[name], BATCHED: None, WRITING: 0.5}
    return Contest(f"table1-{name}", work, make, required)


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
    _contest("maxpool", "values of the Jacobian of MaxPool2d(2, 2), 64×32×32, float32"),
)

"""States with fewer numbers than units, padded with zeros for cells with full states.

PyTorch's LSTMs with projections use this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...recurrent.catalogue import ProjectedLSTM
from ...recurrent.definition import Input, declared
from ...recurrent.short import filled
from .shapes import kind_of, names_of, register


@functools.cache
def mode_of(size: int, has_bias: bool) -> str:
    """Return the operators' name for cells with a number of projections."""
    return register(ProjectedLSTM, {"proj_size": size}, has_bias)


def projected(run: Callable[..., tuple[Tensor, Tensor]], module: Any) -> Callable[..., Any]:
    """Adapt a function of the kernels' states and parameters to those of a module."""
    sizes, units, mode = module._sizes, module.hidden_size, module._mode_of_cells()
    columns = [sizes[0]] * (1 + module.bidirectional)
    names = names_of(mode, module.num_layers, bool(module.bias), bool(module.bidirectional))
    inputs = {
        name for name, each in declared(kind_of(mode).cell).items() if isinstance(each, Input)
    }
    wide = [
        name.rpartition("_l")[0] in inputs and not name.removesuffix("_reverse").endswith("_l0")
        for name in names
    ]
    count = len(names) // (module.num_layers * len(columns))

    def call(
        x: Tensor, state: Tensor | None, lengths: Any, weights: list[Tensor], resets: Any
    ) -> tuple[Tensor, Tensor]:
        if state is not None:
            state = filled(torch, state, sizes, units)
        if module.proj_size:  # PyTorch's last matrix is our third
            rows = [weights[k : k + count] for k in range(0, len(weights), count)]
            weights = [each for row in rows for each in (*row[:2], row[-1], *row[2:-1])]
        weights = [
            filled(torch, each, columns, units) if is_wide else each
            for each, is_wide in zip(weights, wide, strict=True)
        ]
        return run(x, state, lengths, weights, resets)

    return call

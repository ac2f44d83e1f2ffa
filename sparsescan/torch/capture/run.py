"""Loops of PyTorch whose carries of floats a cell computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...capture.equations import Equation
from ...capture.run import Runner
from ...recurrent.arguments import Options
from ..binder import FUNCTIONS
from ..calls.derivatives import run_differentiable
from ..calls.direct import is_direct
from ..calls.recurrent_op import run
from ..calls.shapes import Shape, register


class TorchRunner(Runner):
    """Runs a loop of PyTorch."""

    xp = FUNCTIONS

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype.name)
        return dtype

    def is_mapped(self, equation: Equation) -> bool:
        """Return whether an equation gives the same for all steps at once."""
        return True

    def array(self, given: Any) -> Any:
        """Return an array of the dtype of states."""
        return torch.as_tensor(given, dtype=self._torch_dtype)

    def as_array(self, given: Any) -> Any:
        """Return an array of its own dtype."""
        return torch.as_tensor(given)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Return zeros."""
        return torch.zeros(shape, dtype=self._torch_dtype)

    def loop(self, step: Any, begin: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the last states and stacked outputs of ``state, outputs = step(state, row)``."""
        state, outputs = begin, []
        for k in range(self.length):
            state, out = step(state, [row[k] for row in rows])
            outputs.append(out)
        return state, [torch.stack(column) for column in zip(*outputs, strict=True)]

    def over(self, function: Any, rows: list[Any]) -> list[Any]:
        """Return the results of a function of rows, for all of them."""
        return mapped(function, rows)

    def cell(self, options: Options, params: list[Any], x: Any, state: Any) -> tuple[Any, Any]:
        """Return the outputs and last states of the cell."""
        one = self.own.one
        mode = register(type(one), one.options, False)
        about = mode, one.hidden_size, 1, False, False
        tensors: list[Tensor] = [x, state, *params]
        if is_direct(*tensors):
            keeps = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
            output, last, _ = run(x, state, None, params, [], *about, options.encode(), keeps)
            return output, last
        shape = Shape.of(x, (*about, options.encode()))
        return run_differentiable(shape, x, state, params, None, None)


def mapped(function: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a function of rows, for all of them."""
    try:
        return list(torch.func.vmap(lambda *row: tuple(function(*row)))(*rows))
    except RuntimeError:  # vmap has no rule for an operator, such as an LSTM cell
        each = [function(*row) for row in zip(*rows, strict=True)]
        return [torch.stack(column) for column in zip(*each, strict=True)]

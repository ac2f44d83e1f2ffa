"""The derivative of each cell's step in a direction, beside autograd's, on arrays of NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from some_cells import CELLS, Driven

from sparsescan.recurrent import Cell, catalogue
from sparsescan.recurrent.definition import width_of
from sparsescan.recurrent.step import OneCell
from sparsescan.recurrent.tangent import TangentLayer, tangent_of
from sparsescan.torch.binder import FUNCTIONS
from sparsescan.torch.calls.plain import run_plain

EVERY = {name: getattr(catalogue, name) for name in catalogue.__all__} | CELLS
EVERY["Driven"] = Driven


def derivative_cell(cell: Cell, slopes: dict[str, np.ndarray]) -> Any:
    """Return the cell for the derivative of another one in a direction."""
    about = tangent_of(type(cell), cell.options, cell.bias)
    made = about.cell(2 * cell.input_size, cell.hidden_size, dtype=np.float64)
    none = [torch.zeros(1, 1, 1, dtype=torch.float64)] * 2  # in place of inputs and states
    numbers = [*map(torch.from_numpy, cell.params.values()), *none]
    along = [*(torch.from_numpy(slopes[name]) for name in cell.params), *none]
    layer = TangentLayer(about, cell.hidden_size, 1, False)
    *params, _, _ = layer.joined(FUNCTIONS, numbers, along)
    for name, each in zip(made.shapes, params, strict=True):
        setattr(made, name, each.numpy())
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_step(name: str, bias: bool) -> None:
    rng = np.random.default_rng()
    cell = EVERY[name](3, 3, bias, dtype=np.float64, rng=rng)
    params = {
        key: np.asarray(rng.standard_normal(each.shape) / 2) for key, each in cell.params.items()
    }
    for key, each in params.items():
        setattr(cell, key, each)
    slopes = {key: np.asarray(rng.standard_normal(each.shape)) for key, each in params.items()}
    (x, x_slope), (state, state_slope) = (
        rng.standard_normal((2, 4, size)) for size in (width_of(OneCell(cell)), cell.state_size)
    )

    def step(params: Any, x: Any, state: Any) -> Any:
        about = cell.program, [params], 1, x[None], state[None], None
        return run_plain(type(cell), *about)[1][0]

    given, along = (
        torch.utils._pytree.tree_map(torch.from_numpy, each)
        for each in ((params, x, state), (slopes, x_slope, state_slope))
    )
    with warnings.catch_warnings():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        value, slope = torch.func.jvp(step, given, along)
    found = derivative_cell(cell, slopes).forward(
        np.concatenate([x[:, :3], x_slope[:, :3], x[:, 3:], x_slope[:, 3:]], -1),
        np.concatenate([state_slope, state], -1),
    )
    expected = np.concatenate([slope.numpy(), value.numpy()], -1)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)

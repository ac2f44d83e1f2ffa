"""Jacobians and gradients of cells on a CUDA device, beside the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from autodiff import close
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from on_device import cupy_or_stand_in
from random_cells import RandomCell, random_cells
from sampling import examples

STEPS, BATCH = 3, 2


@settings(max_examples=examples(60))
@given(random_cells(has_maxima=False), st.integers(0, 2**32 - 1))
def test_random_cells_compute_there_what_they_compute_here(drawn: RandomCell, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = drawn.make(np.random.default_rng(seed)), drawn.make(np.random.default_rng(seed))
    x = rng.standard_normal((STEPS, BATCH, here.input_size))
    state = rng.uniform(-1, 1, (STEPS, BATCH, here.state_size))
    grad = rng.standard_normal(state.shape)
    expected = everything(here, x, state, grad)
    assume(all((np.abs(each) < 1e6).all() for each in expected))
    with pytest.MonkeyPatch.context() as patch:
        cupy = cupy_or_stand_in(patch)
        for name, each in here.params.items():
            setattr(there, name, cupy.asarray(each))
        given = [cupy.asarray(each) for each in (x, state, grad)]
        found = [cupy.asnumpy(each) for each in everything(there, *given)]
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e6)


def everything(cell: Any, x: Any, state: Any, grad: Any) -> list[Any]:
    """Return all that a cell computes of some steps."""
    steps = cell.linearize(x, state)
    params = steps.param_grads(grad)
    return [
        *(cell.forward(x, state), steps.values(), steps.input_grads(grad)),
        *(steps.implicit().values[k] for k in range(len(cell.implicit_pattern.factors))),
        *(params[name] for name in cell.params),
    ]

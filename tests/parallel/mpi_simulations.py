"""Simulations of a batch, of which each rank runs some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from sparsescan.simulate import TimeSteps

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, slow=(3,))


def test_a_batch_over_ranks_has_the_gradients_of_one() -> None:
    rng = np.random.default_rng(0)
    weights, u0 = rng.standard_normal((4, 4)), rng.standard_normal((7, 4))
    above = rng.standard_normal(u0.shape)

    def rate(u: Any, t: Any, p: Any) -> Any:
        return p * np.sin(u @ weights) - u

    sim = TimeSteps(rate, np.ones((4, 4)), "sdirk2")
    whole = sim.forward(u0, 0.8, steps=5, dt=0.1)
    expected = whole.backward(grad_last=above)
    own = slice(WORLD.rank, None, WORLD.size)
    run = sim.forward(u0[own], 0.8, steps=5, dt=0.1)
    grads = run.backward(grad_last=above[own])
    np.testing.assert_allclose(run.last, whole.last[own], rtol=1e-7)
    np.testing.assert_allclose(grads.u0, expected.u0[own], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(WORLD.allreduce(grads.params), expected.params, rtol=1e-6)

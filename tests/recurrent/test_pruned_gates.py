"""Networks of which some gates are pruned more than others, beside autograd of their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from network_oracle import autograd_of
from some_cells import MGU, SCRN, PeepholeLSTM, Tied

from sparsescan.recurrent import Recurrent

CELLS = (MGU, SCRN, PeepholeLSTM, Tied)


def check(cell: Any, units: int, batch: int, density: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = {}
    for name, param in Recurrent(cell, 2, units).params.items():
        if param.ndim == 2:
            gates = len(param) // units
            kept = rng.random((gates, units, param.shape[1])) < rng.choice(density, (gates, 1, 1))
            masks[name] = kept.reshape(param.shape)
    net = Recurrent(cell, 2, units, masks=masks, dtype=np.float64, rng=rng)
    for name, kept in masks.items():
        setattr(net, name, np.where(kept, getattr(net, name), 0))
    x, state = rng.standard_normal((4, batch, 2)), rng.standard_normal((1, batch, net.state_size))
    step = net.training_step()
    output, last = step.forward(x, state)
    above, carry = rng.standard_normal(output.shape), rng.standard_normal(last.shape)
    grads = step.backward(above, carry)
    actual = {"output": output, "last": last, "input": grads.input, "state": grads.state}
    expected = autograd_of(net, x, state, None, above, carry)
    for name, each in {**actual, **grads.params}.items():
        wanted = np.where(masks.get(name, True), expected[name], 0)
        scale = 1 + np.abs(wanted).max()
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-12 * scale, err_msg=name)


@given(
    st.sampled_from(CELLS),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4, 5, 9, 20]),
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.8, 1.0]), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_any_densities(cell: Any, units: int, batch: int, density: list[float], seed: int) -> None:
    check(cell, units, batch, density, seed)

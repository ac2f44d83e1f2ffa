"""Parts of a chain over many machines that lie on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import chain_on, cupy_or_stand_in
from oracles import chains, sequential
from sampling import examples

from sparsescan.chains.chain import Chain
from sparsescan.chains.grads import LocalGrads
from sparsescan.parallel.maps import ScanTerms
from sparsescan.parallel.part import FORMS, DeviceReduction, Part
from sparsescan.plan.costs.cpu import CpuModel, load_cpu
from sparsescan.symbolic.pattern import rows_of


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@settings(max_examples=examples(60))
@given(st.data())
def test_the_product_of_a_part(cupy: Any, data: Any) -> None:
    """Applied to a gradient it gives what a sweep gives, local gradients included."""
    case = data.draw(chains(max_n=6, max_size=7, min_size=1))
    n = len(case.jacobians)
    if n == 0:
        return
    form = data.draw(st.sampled_from(FORMS))
    _, jacobians, local = chain_on(cupy, case)
    chain = Chain(n)
    patterns = chain.read(jacobians)
    sizes = [patterns[0].shape[1], *(pattern.shape[0] for pattern in patterns)]
    grad = case.grad
    batch = grad.shape[0] if grad.ndim == 2 else None
    batched = any(stride != 0 for stride in chain.leaves[:, 1].tolist())
    local = None if local is None else local[:n]
    given = LocalGrads(local, n, sizes, grad.shape[:-1])
    terms = ScanTerms(case.dtype, batch, batched, given.given)
    if terms.samples == 0:
        return
    model = CpuModel(load_cpu(), terms.dtype, terms.samples, data.draw(st.integers(1, 3)))
    part = Part(patterns, model, None, None)
    part.cost(True, None)
    program = part._programs[form]
    reduction = DeviceReduction(program)
    for _ in range(3):  # plainly, then by a graph
        reduced = reduction.run(chain, given, terms)
        assert reduced is not None
        values, exponents, added = reduced
        pattern = program.patterns[-1]
        gradients = np.empty((terms.samples, sizes[-1]))
        for b in range(terms.samples):
            matrix = np.zeros(pattern.shape, np.float64)
            places = rows_of(pattern), pattern.indices
            matrix[places] = values[b % len(values)]
            matrix *= np.exp2(exponents[b % len(exponents), :-1].astype(np.float64))
            y = (grad if batch is None else grad[b]).astype(np.float64)
            gradients[b] = matrix @ y + (added[b] if terms.local else 0)
        entering = None if case.local_grads is None else [*case.local_grads[:n], None]
        expected = sequential(grad, case.jacobians, entering, inclusive=True, dtype=case.dtype)
        error = np.abs(gradients.reshape(expected.exact[-1].shape) - expected.exact[-1])
        assert (error <= expected.bounds[-1]).all()

"""The adjoint of heat conduction along a rod: a chain of sparse Jacobians.

The conductivity ``κ_t`` between neighbouring cells changes at each of ``T`` steps in time,

    u_{t,i} = u_{t-1,i} + κ_{t,i} (u_{t-1,i+1} - u_{t-1,i}) - κ_{t,i-1} (u_{t-1,i} - u_{t-1,i-1}),

and a loss has a term for the temperatures of each step, as that of a fit to measurements has. Its
gradient in ``u_t`` is ``m_t + A_{t+1}ᵀ ∇u_{t+1}``: ``m_t`` is the gradient of the term of step
``t``, and the matrix ``A_t`` of a step is tridiagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan import CSRChain


class Rod(NamedTuple):
    """The transposed matrices of all steps, and the gradients of the terms, ``(T, cells)``."""

    transposed: CSRChain
    terms: NDArray[np.float64]

    @property
    def matrices(self) -> list[sp.csr_array]:
        """The transposed matrices as SciPy has them, one for each step."""
        chain = self.transposed
        return [
            sp.csr_array((values, chain.indices, chain.indptr), shape=chain.shape)
            for values in chain.data
        ]


def make_rod(steps: int, cells: int, seed: int) -> Rod:
    """Return a rod of random conductivities, and random terms."""
    rng = np.random.default_rng(seed)
    conductivity = rng.uniform(0.1, 0.4, (steps, cells - 1))
    data = np.empty((steps, 3 * cells - 2))
    data[:, 0::3] = 1.0
    data[:, 0:-1:3] -= conductivity  # from a cell to the next,
    data[:, 3::3] -= conductivity  # and from that one back
    data[:, 1::3] = data[:, 2::3] = conductivity
    pattern = sp.diags_array(
        [np.ones(cells - 1), np.ones(cells), np.ones(cells - 1)], offsets=[-1, 0, 1]
    ).tocsr()
    chain = CSRChain(data, pattern.indices, pattern.indptr, pattern.shape)
    return Rod(chain, rng.standard_normal((steps, cells)))


def scipy_loop(matrices: Sequence[sp.csr_array], terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the gradients in the states of all steps, as one writes them with SciPy."""
    grads = np.empty_like(terms)
    grads[-1] = terms[-1]
    for t in range(len(terms) - 1)[::-1]:
        grads[t] = matrices[t + 1] @ grads[t + 1] + terms[t]
    return grads

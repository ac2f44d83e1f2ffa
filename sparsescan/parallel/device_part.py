"""The product of a part on a CUDA device, whose Jacobians are there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import load_cupy
from ..chain import Chain, LocalGrads
from ..device import DeviceWorkspace
from ..program import Parts
from .maps import Terms
from .part import Reduction

__all__ = ["DeviceReduction"]


class _Around:
    """The chain of a reduction: the identity, a part's Jacobians, and one that nothing reads."""

    stack = None

    def __init__(self, ones: Any, chain: Chain, n: int) -> None:
        self.n = n
        self.leaves = np.zeros((n, 2), np.int64)
        self.leaves[0, 0] = ones.data.ptr
        self.leaves[1:-1] = chain.leaves
        if chain.stack is not None:
            # Which says what the addresses are.
            base, step, _ = chain.stack
            self.leaves[1:-1, 0] = base + step * np.arange(chain.n)
        self._chain, self._ones = chain, ones

    def array(self, k: int) -> Any:
        """Values of the `k`-th Jacobian."""
        return self._ones if k == 0 else self._chain.array(k - 1)


class _Later:
    """Local gradients of a part, one place later."""

    stack = None

    def __init__(self, local: LocalGrads) -> None:
        self._local = local

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        addresses[:] = 0
        self._local.fill(addresses[1:])


class DeviceReduction(Reduction):
    """The same for Jacobians on a device."""

    def _make(self, batched: NDArray[np.bool_], terms: Terms) -> DeviceWorkspace:
        self._ones = load_cupy().ones(self._program.patterns[0].nnz, terms.dtype)
        return DeviceWorkspace(
            self._program,
            terms.dtype,
            terms.samples,
            batched,
            False,
            "list" if terms.local else None,
        )

    def run(self, chain: Chain, local: LocalGrads, terms: Terms) -> Parts | None:
        """The product, in host memory; None if a value is not finite."""
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        workspace = self.prepare(chain, terms)
        around: Any = _Around(self._ones, chain, self._program.n)
        later: Any = _Later(local)
        # It makes no gradients.
        workspace.run(around, later, self._ones, inclusive=False)
        made: Parts | None = workspace.product(self._program.products - 1)
        return made

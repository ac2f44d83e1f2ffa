"""The product of a part on a CUDA device, whose Jacobians are there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import load_cupy
from ..chain import Chain, LocalGrads
from ..device import DeviceWorkspace
from ..program import Parts, Program
from .maps import Terms

__all__ = ["DeviceReduction"]


class _Around:
    """The chain of a reduction: the identity, a part's Jacobians, and one that nothing reads."""

    stack = None

    def __init__(self, ones: Any, chain: Chain, n: int) -> None:
        self.n = n
        self.leaves = np.zeros((n, 2), np.int64)
        self.leaves[0, 0] = ones.data.ptr
        if chain.stack is None:
            self.leaves[1:-1] = chain.leaves
        else:
            base, step, sample = chain.stack
            self.leaves[1:-1, 0] = base + step * np.arange(chain.n)
            self.leaves[1:-1, 1] = sample
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


class DeviceReduction:
    """As :class:`sparsescan.parallel.part.Reduction`, for Jacobians on a device.

    Parameters
    ----------
    program : Program
        Of :meth:`Part.reduction`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ones: Any = None
        self._key: Any = None
        self._workspace: DeviceWorkspace | None = None

    def prepare(self, chain: Chain, terms: Terms) -> DeviceWorkspace:
        """A workspace for such Jacobians."""
        batched = np.zeros(self._program.n, bool)
        batched[1:-1] = chain.leaves[:, 1] != 0
        key = terms, chain.device, batched.tobytes()
        if self._workspace is None or self._key != key:
            cupy = load_cupy()
            self._ones = cupy.ones(self._program.patterns[0].nnz, terms.dtype)
            self._workspace = None
            self._workspace = DeviceWorkspace(
                self._program,
                terms.dtype,
                terms.samples,
                batched,
                False,
                "list" if terms.local else None,
            )
            self._key = key
        return self._workspace

    def run(self, chain: Chain, local: LocalGrads, terms: Terms) -> Parts | None:
        """The product, in host memory; None if a value is not finite."""
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        workspace = self.prepare(chain, terms)
        around: Any = _Around(self._ones, chain, self._program.n)
        later: Any = _Later(local)
        # It makes no gradients.
        workspace.run(around, later, self._ones, inclusive=False)
        return workspace.product(self._program.products - 1)

"""Reductions: the product of a rank's part of the chain, with what its local gradients add up to.

The program of a reduction, see :class:`~.part.Part`, has one Jacobian more at both ends: first the
identity, to which the first local gradient belongs, and last one that nothing reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import load_cupy
from ..chains.chain import Chain, LocalGrads
from ..execution.threads import thread_count
from ..execution.workspace import Parts
from ..symbolic.program import Program
from .maps import Terms

__all__ = ["DeviceReduction", "Reduction"]


class Reduction:
    """Makes the product of a part on the CPU.

    Parameters
    ----------
    program : Program
        As :mod:`this module <sparsescan.parallel.reduction>` describes it.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the product.
    """

    def __init__(self, program: Program) -> None:
        self._program, self.pattern = program, program.patterns[-1]
        self._leaves = np.zeros((program.n, 2), np.int64)
        self._ones: Any = None
        self._key: Any = None
        self._workspace: Any = None

    def prepare(self, chain: Chain, terms: Terms) -> Any:
        """Return a workspace for such Jacobians, which is kept."""
        batched = np.zeros(self._program.n, bool)
        batched[1:-1] = chain.leaves[:, 1] != 0
        key = terms, chain.device, batched.tobytes()
        if self._workspace is None or self._key != key:
            self._workspace = None
            self._workspace = self._make(batched, terms)
            self._key = key
        return self._workspace

    def run(self, chain: Chain, local: LocalGrads, terms: Terms) -> Parts | None:
        """Return the product in host memory; None if the linear scan has to decide."""
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        return self._run(self.prepare(chain, terms), chain, local)

    def _make(self, batched: NDArray[np.bool_], terms: Terms) -> Any:
        self._ones = np.ones(self._program.patterns[0].nnz, terms.dtype)
        return terms.workspace(self._program, self._leaves, batched, thread_count())

    def _run(self, workspace: Any, chain: Chain, local: LocalGrads) -> Parts | None:
        self._leaves[0] = self._ones.ctypes.data, 0
        self._leaves[1:-1] = chain.leaves
        workspace.local_grads[:] = 0
        # The local gradients of Jacobian `k` of a program are at `k + 1`.
        local.fill(workspace.local_grads[1:])
        # The program writes no gradient, so that any memory will do.
        if not workspace.run(np.empty(1, self._ones.dtype), False):
            return None
        product: Parts = workspace.product(self._program.products - 1)
        return product


class DeviceReduction(Reduction):
    """Makes the product of a part whose Jacobians are on a CUDA device."""

    def _make(self, batched: NDArray[np.bool_], terms: Terms) -> Any:
        from ..execution.device import DeviceWorkspace

        self._ones = load_cupy().ones(self._program.patterns[0].nnz, terms.dtype)
        local = "list" if terms.local else None
        return DeviceWorkspace(self._program, terms.dtype, terms.samples, batched, False, local)

    def _run(self, workspace: Any, chain: Chain, local: LocalGrads) -> Parts | None:
        # The program writes no gradient, so that the ones stay as they are.
        padded = _PaddedChain(self._ones, chain)
        workspace.run(padded, _ShiftedGrads(local), self._ones, inclusive=False)
        product: Parts | None = workspace.product(self._program.products - 1)
        return product


class _PaddedChain:
    """The values of a reduction's program; a :class:`~sparsescan.execution.device.StepValues`."""

    stack = None

    def __init__(self, ones: Any, chain: Chain) -> None:
        self.n = chain.n + 2
        self.leaves = np.zeros((self.n, 2), np.int64)
        self.leaves[0, 0] = ones.data.ptr
        self.leaves[1:-1] = chain.leaves
        if chain.stack is not None:
            # The addresses of a chain in one array are not in its table.
            base, step, _ = chain.stack
            self.leaves[1:-1, 0] = base + step * np.arange(chain.n)
        self._chain, self._ones = chain, ones

    def array(self, k: int) -> Any:
        """Return the values of the `k`-th Jacobian."""
        return self._ones if k == 0 else self._chain.array(k - 1)


class _ShiftedGrads:
    """Local gradients, one place later; a :class:`~sparsescan.execution.device.AddedGrads`."""

    stack = None

    def __init__(self, local: LocalGrads) -> None:
        self._local = local

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        addresses[:] = 0
        self._local.fill(addresses[1:])

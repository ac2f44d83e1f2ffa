"""Factors of sparse matrices of one pattern: by bands, dense, or by SuperLU."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.sparse.linalg import splu

from ..symbolic.factorisation import Factorisation, factorisation_of
from ..symbolic.pattern import Pattern, rows_of

Vector: TypeAlias = NDArray[np.float64]
# ``solve(x, transposed)`` returns ``A⁻¹ x`` or ``A⁻ᵀ x``, for one or more columns.
Solve: TypeAlias = Callable[[Vector, bool], Vector]

# The diagonal entry is the pivot unless another entry of its column is this many times larger. That
# keeps the order for which factors are sparse; later solves are refined.
_THRESHOLD = 0.1
# With fewer numbers, columns are solved one by one: for two columns OpenBLAS wakes its threads,
# which takes milliseconds if cores are busy.
_FEW = 40_000
# If unknowns have very different scales, matrices have such entries as well as 1. Pivots are chosen
# by size, so small numbers of a solution get large errors. One refinement corrects them (Skeel,
# "Iterative refinement implies numerical stability for Gaussian elimination", 1980).
WIDE = 2.0**20


class Filled:
    """Make sparse matrices with the pattern of one matrix, and other values.

    SciPy checks the indices of each new matrix, which takes longer than a small product. Here it
    checks them once.
    """

    def __init__(self, matrix: sp.csr_array | sp.csc_array) -> None:
        self._matrix = matrix

    @classmethod
    def transposes(cls, pattern: Pattern) -> Filled:
        """Return a maker of transposed matrices; it takes values in the order of the pattern."""
        values = np.zeros(pattern.nnz)
        return cls(sp.csc_array((values, pattern.indices, pattern.indptr), pattern.shape[::-1]))

    def __call__(self, values: Vector) -> Any:
        """Return the matrix with these values."""
        matrix = copy(self._matrix)
        matrix.data = values
        return matrix


class Matrices:
    """The square matrices of one pattern: their transposes, and their factors.

    If at least half of the rows have only a diagonal entry, such as the gates of a neuron, these
    rows are solved by division. The other rows, a smaller matrix, are factorised.

    Parameters
    ----------
    pattern : Pattern
        The pattern.

    Attributes
    ----------
    cost : float
        How many solves take as long as one factorisation.
    adjoint : Filled
        The transpose of a matrix of some values.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.adjoint = Filled.transposes(pattern)
        self._rows = rows = rows_of(pattern)
        n = pattern.shape[0]
        is_alone = np.diff(pattern.indptr) == 1
        is_alone[rows[rows != pattern.indices]] = False
        self._is_split = n <= 2 * is_alone.sum() < 2 * n
        if not self._is_split:
            self._core = _Core(pattern)
            self.cost = self._core.cost
            return
        # Rows that are alone, the others, and which values are in which block.
        self._alone, self._others = np.flatnonzero(is_alone), np.flatnonzero(~is_alone)
        by_alone = is_alone[pattern.indices]
        self._own = np.flatnonzero(is_alone[rows])
        self._within = np.flatnonzero(~is_alone[rows] & ~by_alone)
        self._beside = np.flatnonzero(~is_alone[rows] & by_alone)
        number = np.where(is_alone, np.cumsum(is_alone), np.cumsum(~is_alone)) - 1

        def block(entries: NDArray[np.int64], columns: int) -> sp.csr_array:
            places = number[rows[entries]], number[pattern.indices[entries]]
            return sp.csr_array((np.ones(len(entries)), places), shape=(len(self._others), columns))

        self._core = _Core(Pattern(block(self._within, len(self._others))))
        beside = block(self._beside, len(self._alone))
        self._coupling, self._back = Filled(beside), Filled(beside.T)
        self.cost = self._core.cost

    def row_sizes(self, values: Vector, x: Vector) -> Vector:
        """Return a bound for the product of each row with a vector of some sizes."""
        terms = np.abs(values) * x[self.pattern.indices]
        return np.asarray(np.bincount(self._rows, terms, self.pattern.shape[0]))

    @property
    def nbytes(self) -> int:
        """The approximate bytes of a matrix's factors and of two copies of the matrix."""
        return self._core.nbytes + 32 * self.pattern.nnz

    def factorise(self, values: Vector) -> Solve | None:
        """Return a solver for the matrix with these values; None if it is singular."""
        largest = np.abs(values).max(initial=0.0)
        if not largest < np.inf:
            return None
        solve = self._factorise(values)
        if solve is None or largest <= WIDE:
            return solve
        adjoint = self.adjoint(values)

        def refined(x: Vector, transposed: bool) -> Vector:
            found = solve(x, transposed)
            return found + solve(x - adjoint @ found, True) if transposed else found

        return refined

    def _factorise(self, values: Vector) -> Solve | None:
        if not self._is_split:
            return self._core.factorise(values)
        alone, others, own = self._alone, self._others, values[self._own]
        core = self._core.factorise(values[self._within])
        if core is None or not own.all():
            return None
        beside = values[self._beside]
        coupling, back = self._coupling(beside), self._back(beside)

        def solve(x: Vector, transposed: bool) -> Vector:
            found = np.empty_like(x)
            first, rest = x[alone], x[others]
            if transposed:
                found[others] = rest = core(rest, True)
                found[alone] = ((first - back @ rest).T / own).T
            else:
                found[alone] = first = (first.T / own).T
                found[others] = core(rest - coupling @ first, False)
            return found

        return solve


class _Core:
    """The factors of the square matrices of one pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._form: Factorisation = factorisation_of(pattern)
        indptr, indices = pattern.indptr, pattern.indices
        transposed = sp.csr_array((np.ones(pattern.nnz), indices, indptr), pattern.shape).T.tocsr()
        self._symmetric = np.array_equal(transposed.indptr, indptr) and np.array_equal(
            transposed.indices, indices
        )
        # SuperLU factorises in blocks; it does not solve in blocks.
        self.cost = max(1.0, 0.4 * self._form.multiply_adds / max(self._form.entries, 1))

    @property
    def nbytes(self) -> int:
        return self._form.nbytes(8)

    def factorise(self, values: Vector) -> Solve | None:
        form, n = self._form, self._form.size
        if form.method == "sparse":
            return self._by_superlu(values)
        entries = np.zeros(form.entries)
        entries[form.places] = values
        if form.method == "tridiagonal":
            below, on, above = entries[: n - 1], entries[n : 2 * n], entries[2 * n : 3 * n - 1]
            *factors, info = lapack.dgttrf(below, on, above)

            def solve(x: Vector, transposed: bool) -> Vector:
                found: Vector = lapack.dgttrs(*factors, x, trans="T" if transposed else "N")[0]
                return found

        elif form.method == "banded":
            band = entries.reshape(n, -1).T
            *factors, info = lapack.dgbtrf(band, form.lower, form.upper)

            def solve(x: Vector, transposed: bool) -> Vector:
                lu, pivots = factors
                trans = int(transposed)
                found: Vector = lapack.dgbtrs(lu, form.lower, form.upper, x, pivots, trans=trans)[0]
                return found

        else:
            *factors, info = lapack.dgetrf(entries.reshape(n, n).T)

            def solve(x: Vector, transposed: bool) -> Vector:
                if x.ndim > 1 and x.size < _FEW:
                    return np.stack([solve(column, transposed) for column in x.T], 1)
                found: Vector = lapack.dgetrs(*factors, x, trans=int(transposed))[0]
                return found

        return solve if info == 0 else None

    def _by_superlu(self, values: Vector) -> Solve | None:
        # The CSR arrays of a matrix are the CSC arrays of its transpose.
        shape = self.pattern.shape
        columns = sp.csc_array(
            (values, self.pattern.indices.astype(np.int32), self.pattern.indptr.astype(np.int32)),
            shape,
        )
        options: dict[str, Any] = {"permc_spec": "COLAMD"}
        if self._symmetric:
            options = {
                "permc_spec": "MMD_AT_PLUS_A",
                "diag_pivot_thresh": _THRESHOLD,
                "options": {"SymmetricMode": True},
            }
        try:
            factors = splu(columns, **options)
        except RuntimeError:
            return None

        def solve(x: Vector, transposed: bool) -> Vector:
            found: Vector = factors.solve(x, "N" if transposed else "T")
            return found

        return solve

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
from ..symbolic.pattern import Pattern

Vector: TypeAlias = NDArray[np.float64]
# ``solve(x, transposed)`` returns ``A⁻¹ x`` or ``A⁻ᵀ x``, for one column or several.
Solve: TypeAlias = Callable[[Vector, bool], Vector]

# A diagonal entry is the pivot unless another one of its column is so many times larger: the order
# that keeps sparse factors sparse is then kept, and the solves that follow are refined.
_THRESHOLD = 0.1


class Adjoint:
    """The transposed matrices of one pattern.

    SciPy checks indices in each matrix that it makes, which takes longer than a small product. Here
    it has checked them once.
    """

    def __init__(self, pattern: Pattern) -> None:
        values = np.zeros(pattern.nnz)
        self._matrix = sp.csc_array((values, pattern.indices, pattern.indptr), pattern.shape[::-1])

    def __call__(self, values: Vector) -> sp.csc_array:
        """Return the transpose of the matrix with these values."""
        matrix = copy(self._matrix)
        matrix.data = values
        return matrix


class Matrices:
    """The square matrices of one pattern: their transposes, and their factors.

    Parameters
    ----------
    pattern : Pattern
        The pattern.

    Attributes
    ----------
    cost : float
        How many solves take as long as the factors of a matrix.
    adjoint : Adjoint
        The transpose of a matrix of some values.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.adjoint = Adjoint(pattern)
        self._form: Factorisation = factorisation_of(pattern)
        indptr, indices = pattern.indptr, pattern.indices
        transposed = sp.csr_array((np.ones(pattern.nnz), indices, indptr), pattern.shape).T.tocsr()
        self._symmetric = np.array_equal(transposed.indptr, indptr) and np.array_equal(
            transposed.indices, indices
        )
        # SuperLU's multiply-adds are in blocks, and those of a solve are not.
        self.cost = max(1.0, 0.4 * self._form.multiply_adds / max(self._form.entries, 1))

    @property
    def nbytes(self) -> int:
        """Bytes that the factors of a matrix take, about, and the matrix twice."""
        return self._form.nbytes(8) + 32 * self.pattern.nnz

    def factorise(self, values: Vector) -> Solve | None:
        """Return what solves with a matrix of these values; None if it is singular."""
        if not np.isfinite(values).all():
            return None
        form, n = self._form, self._form.size
        if form.method == "sparse":
            return self._by_superlu(values)
        if form.method == "tridiagonal":
            entries = np.zeros(form.entries)
            entries[form.places] = values
            below, on, above = entries[: n - 1], entries[n : 2 * n], entries[2 * n : 3 * n - 1]
            *factors, info = lapack.dgttrf(below, on, above)

            def solve(x: Vector, transposed: bool) -> Vector:
                found: Vector = lapack.dgttrs(*factors, x, trans="T" if transposed else "N")[0]
                return found

        elif form.method == "banded":
            entries = np.zeros(form.entries)
            entries[form.places] = values
            band = entries.reshape(n, -1).T
            *factors, info = lapack.dgbtrf(band, form.lower, form.upper)

            def solve(x: Vector, transposed: bool) -> Vector:
                lu, pivots = factors
                trans = int(transposed)
                found: Vector = lapack.dgbtrs(lu, form.lower, form.upper, x, pivots, trans=trans)[0]
                return found

        else:
            entries = np.zeros(n * n)
            entries[form.places] = values
            *factors, info = lapack.dgetrf(entries.reshape(n, n).T)

            def solve(x: Vector, transposed: bool) -> Vector:
                found: Vector = lapack.dgetrs(*factors, x, trans=int(transposed))[0]
                return found

        return solve if info == 0 else None

    def _by_superlu(self, values: Vector) -> Solve | None:
        # A matrix in rows is its transpose in columns.
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

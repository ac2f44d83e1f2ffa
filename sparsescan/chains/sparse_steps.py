"""Sparse matrices of SciPy as the steps of a recurrence: one pattern, and values of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..checks import check_has_shape
from ..errors import InputTypeError, short
from ..symbolic.pattern import Pattern, places_in, union
from .reading import split

Array = NDArray[Any]


class SparseSteps(NamedTuple):
    """Sparse matrices on the union of their patterns.

    Attributes
    ----------
    pattern : Pattern
        The union.
    values : ndarray, shape (T, nnz) or (nnz,)
        Their values on the union, zeros included; without the first axis if one matrix was given.
    own : tuple of (Pattern, ndarray)
        The pattern of each, and where its entries are among those of the union.
    """

    pattern: Pattern
    values: Array
    own: tuple[tuple[Pattern, Array], ...]

    @classmethod
    def read(cls, matrices: Any) -> SparseSteps:
        """Return the caller's matrices, checked."""
        is_one = sp.issparse(matrices)
        given = [matrices] if is_one else list(matrices)
        read: list[tuple[Pattern, Array]] = []
        for k, matrix in enumerate(given):
            name = "matrices" if is_one else f"matrices[{k}]"
            if not sp.issparse(matrix):
                raise InputTypeError(f"{name} is {short(matrix)}; expected CSR, as other steps are")
            pattern, values = split(name, matrix, None, is_complex=True)
            size = read[0][0].shape[0] if read else pattern.shape[0]
            check_has_shape(name, pattern, (size, size))
            read.append((pattern, values))
        whole = union(pattern for pattern, _ in read)
        places = {pattern: places_in(whole, pattern) for pattern in {each for each, _ in read}}
        dtype = np.result_type(*(values.dtype for _, values in read))
        rows = np.zeros((len(read), whole.nnz), dtype)
        for row, (pattern, values) in zip(rows, read, strict=True):
            row[places[pattern]] = values
        own = tuple((pattern, places[pattern]) for pattern, _ in read)
        return cls(whole, rows[0] if is_one else rows, own)

    def like(self, values: Array) -> Any:
        """Return values on the union in the form in which the caller gave the matrices."""
        matrices = [
            sp.csr_array((row[places], pattern.indices, pattern.indptr), pattern.shape)
            for row, (pattern, places) in zip(values, self.own, strict=True)
        ]
        return matrices if self.values.ndim == 2 else matrices[0]


def is_sparse_steps(matrices: Any) -> bool:
    """Return whether matrices are sparse, or a list in which any is."""
    if isinstance(matrices, (list, tuple)):
        return any(map(sp.issparse, matrices))
    return bool(sp.issparse(matrices))

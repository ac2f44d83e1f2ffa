"""Implicit steps of layers whose elements are coupled by a few sums over groups of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import Mirrored, namespace, output
from ...symbolic.implicit import ImplicitPattern
from ...symbolic.pattern import Pattern, block_diagonal, index_dtype, trusted

Array = Any


class Coupled:
    """Two factors of a matrix that is diagonal but for products of columns and rows.

    With groups ``g`` of the elements and a few terms ``t`` for each,

        J[i, j] = a_i δ_ij + Σ_t c_ti r_tj,  for i and j in one group.

    The first factor holds ``a`` and the rows ``r``, the second ones and the columns ``c``: what is
    stored grows with the elements, not with the size of a group times as much.

    Parameters
    ----------
    group_of : ndarray of int, shape (n,)
        The group of each element of a block.
    terms : int
        Terms of each group.
    blocks : int
        Blocks of so many elements.
    """

    def __init__(self, group_of: NDArray[Any], terms: int, blocks: int) -> None:
        n, self._terms, self._blocks = len(group_of), terms, blocks
        self._order = Mirrored(np.argsort(group_of, kind="stable"))
        sizes = np.bincount(group_of)
        first = _pattern(
            np.concatenate([np.ones(n, np.int64), np.tile(sizes, terms)]),
            np.concatenate([np.arange(n), np.tile(self._order.on(np), terms)]),
            n,
        )
        sums = n + len(sizes) * np.arange(terms) + group_of[:, None]
        columns = np.concatenate([np.arange(n)[:, None], sums], axis=1)
        second = _pattern(np.full(n, 1 + terms), columns.reshape(-1), first.shape[0])
        self.nnz = blocks * (first.nnz + second.nnz)
        self.pattern = ImplicitPattern([block_diagonal(each, blocks) for each in (first, second)])

    def values(
        self, lead: tuple[int, ...], a: Array, r: Array, c: Array, dtype: np.dtype[Any]
    ) -> list[Array]:
        """Return the values of both factors.

        Parameters
        ----------
        lead : tuple of int
            ``()`` or ``(batch,)``.
        a : ndarray, shape (m, n)
            The diagonal of all blocks of all samples.
        r, c : sequence of ndarray, shape (m, n)
            The rows and the columns of each term, or numbers.
        dtype : dtype
            That of the values.
        """
        xp, terms = namespace(a), self._terms
        m, n = a.shape
        factors = [
            output(xp, None, (*lead, factor.nnz), dtype, what="the factors of a layer")
            for factor in self.pattern.factors
        ]
        first, second = factors[0].reshape(m, 1 + terms, n), factors[1].reshape(m, n, 1 + terms)
        order = self._order.on(xp)
        first[:, 0], second[..., 0] = a, 1
        for k in range(terms):
            first[:, 1 + k] = r[k][:, order]
            second[..., 1 + k] = c[k]
        return factors


def grouped(group_of: NDArray[Any]) -> Pattern:
    """Return a pattern in whose rows are all elements of a group; groups have equal sizes."""
    n, groups = len(group_of), int(group_of.max()) + 1
    size = n // groups
    members = np.argsort(group_of, kind="stable").astype(index_dtype((n, n), n * size))
    columns = members.reshape(groups, size)[group_of]
    return trusted(size * np.arange(n + 1), columns.reshape(-1), (n, n))


def _pattern(counts: NDArray[Any], columns: NDArray[Any], cols: int) -> Pattern:
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return trusted(indptr, columns, (len(counts), cols))

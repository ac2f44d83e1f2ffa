"""Layers whose elements are coupled by a few sums over groups of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.arrays import Mirrored, namespace, output
from ...locks import cached_property
from ...symbolic.implicit import ImplicitPattern
from ...symbolic.pattern import Pattern, block_diagonal, index_dtype, trusted
from .operator import Operator

Array = Any


class Coupled(Operator):
    """A layer whose Jacobian is a diagonal plus products of columns and rows.

    With groups of the elements and a few terms ``t`` for each,

        J[i, j] = a_i δ_ij + Σ_t c_ti r_tj,  for i and j in one group.

    As an implicit step it has two factors: the first holds ``a`` and the rows ``r``, the second
    holds ones and the columns ``c``. Memory grows with the number of elements, and not also with
    the size of a group.
    """

    # The elements of a block are ``(outer, groups, inner)``: which group each is in is the second
    # index. Whether the result of all of them is constant.
    _grouping: tuple[int, int, int]
    _is_constant = False
    _terms: int

    @abstractmethod
    def _factors(self, xp: Any, x: Array, y: Array) -> tuple[Array, Sequence[tuple[Any, Array]]]:
        """Return ``a`` and each ``(c, r)``, ``(m, *core)``, for input and maybe output.

        Behind the first term, a column may be a number, and a row one for each group.
        """

    def _set_diagonal(self, values: Array, places: Array, a: Array) -> None:
        """Write the diagonal of the Jacobian, where so far only the products are."""
        values[:, places] += a

    @property
    def _count(self) -> int:
        """How many elements a group has."""
        outer, _, inner = self._grouping
        return outer * inner

    def _core_nnz(self) -> int:
        return 0 if self._is_constant else self._grouping[1] * self._count**2

    def _core_pattern(self) -> Pattern:
        (outer, groups, inner), size = self._grouping, math.prod(self._grouping)
        if self._is_constant:
            return trusted(np.zeros(size + 1), np.empty(0), (size, size))
        if groups in (1, size):
            return Pattern.dense((size, size)) if groups == 1 else Pattern.diagonal(size)
        columns = np.arange(size, dtype=index_dtype((size, size), self._core_nnz()))
        columns = self._by_groups(columns[None])[:, None, :, None]
        columns = np.broadcast_to(columns, (1, outer, groups, inner, self._count)).reshape(-1)
        return trusted(self._count * np.arange(size + 1), columns, (size, size))

    def _by_groups(self, array: Array) -> Array:
        """Return numbers of elements as ``(m, groups, count)``, and those of groups with 1."""
        outer, groups, inner = self._grouping
        if array.size == len(array) * groups:
            return array.reshape(len(array), groups, 1)
        array = array.reshape(len(array), outer, groups, inner).swapaxes(1, 2)
        return array.reshape(len(array), groups, self._count)

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        a, ((column, row), *others) = self._factors(xp, x, y)
        outer, groups, inner = self._grouping
        blocks = out.reshape(len(out), outer, groups, inner, self._count)
        column = column.reshape(blocks.shape[:-1])[..., None]
        xp.multiply(column, self._by_groups(row)[:, None, :, None], out=blocks)
        for column, row in others:
            xp.add(blocks, column * self._by_groups(row)[:, None, :, None], out=blocks)
        self._set_diagonal(out, self._diagonal_places.on(xp), a.reshape(len(out), -1))

    @cached_property
    def _diagonal_places(self) -> Mirrored:
        """Where the diagonal is among the entries of a block."""
        outer, groups, inner = self._grouping
        within = np.arange(self._count).reshape(outer, 1, inner)
        rows = np.arange(outer * groups * inner).reshape(outer, groups, inner)
        return Mirrored((rows * self._count + within).reshape(-1))

    def _implicit_pattern(self) -> ImplicitPattern | None:
        if self._is_constant or self._count <= 2 * (1 + self._terms):
            return None
        n, (outer, groups, inner), terms = math.prod(self._grouping), self._grouping, self._terms
        own, members = np.arange(n), self._by_groups(np.arange(n)[None]).reshape(-1)
        ends = n + self._count * np.arange(1, groups * terms + 1)
        first = trusted(
            np.concatenate([np.arange(n + 1), ends]),
            np.concatenate([own, np.tile(members, terms)]),
            (n + groups * terms, n),
        )
        group = np.tile(np.repeat(np.arange(groups), inner), outer)
        sums = n + groups * np.arange(terms) + group[:, None]
        columns = np.concatenate([own[:, None], sums], axis=1).reshape(-1)
        second = trusted((1 + terms) * np.arange(n + 1), columns, (n, n + groups * terms))
        return ImplicitPattern([block_diagonal(each, self._blocks) for each in (first, second)])

    def _implicit_values(self, x: Array, y: Array) -> list[Array]:
        params, lead = self.params.values(), x.shape[: x.ndim - len(self.input_shape)]
        xp, dtype = namespace(x, *params), np.result_type(x.dtype, *(p.dtype for p in params))
        y = None if y is None else y.reshape(-1, *self._core_out)
        x = x.reshape(-1, *self._core)
        a, terms = self._factors(xp, x, y)
        factors: Any = self.implicit_pattern
        values = [
            output(xp, None, (*lead, factor.nnz), dtype, what="the factors of a layer")
            for factor in factors.factors
        ]
        m, n = len(x), math.prod(self._grouping)
        first, second = (
            values[0].reshape(m, 1 + len(terms), n),
            values[1].reshape(m, n, 1 + len(terms)),
        )
        first[:, 0], second[..., 0] = a.reshape(m, n), 1
        rows = first.reshape(*first.shape[:2], self._grouping[1], self._count)
        for k, (column, row) in enumerate(terms, start=1):
            rows[:, k] = self._by_groups(row)
            second[..., k] = column.reshape(m, n) if hasattr(column, "reshape") else column
        return values

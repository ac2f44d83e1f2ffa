"""Implicit steps that a caller passes: one step, or all steps of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.arrays import check_array, read_array
from ..arrays.frozen import Frozen
from ..errors import InputError, InputTypeError, short
from ..symbolic.implicit import ImplicitPattern
from ..symbolic.indexed import IndexedPattern
from ..symbolic.pattern import Pattern
from .containers import PeriodicChain, SharedPattern, entries_of
from .weights import spread


class Factor(SharedPattern):
    """Values of one factor of a step, shared by all samples or one set per sample."""

    _forms: ClassVar = {1: "(nnz,)", 2: "(batch, nnz)"}


class FactorWeights:
    """Weights of one factor of a step, which all samples share, and the index that reads them.

    Parameters
    ----------
    data : ndarray, shape (size,)
        The weights.
    index : IndexedPattern
        Where each of them is.
    """

    def __init__(self, data: Any, index: IndexedPattern) -> None:
        self.data, self.index = data, index
        self.read()

    @property
    def pattern(self) -> Pattern:
        """Return the pattern of the factor."""
        return self.index.pattern

    def read(self) -> Any:
        """Return the weights for a scan, as an array whose shape the caller cannot change."""
        weights = read_array("values", self.data)
        if weights.shape != (self.index.size,):
            raise InputError(
                f"values has weights of shape {weights.shape}; expected ({self.index.size},) for "
                f"{self.index}"
            )
        return weights


class ImplicitStep(Frozen):
    """A transposed Jacobian ``J = F_k ⋯ F_2 F_1`` that a scan applies factor by factor.

    A scan writes the values of the product only where it multiplies matrices, in scratch memory.

    Parameters
    ----------
    values : sequence of array_like of float32 or float64
        The values of each factor: ``(nnz,)`` if all samples share them, else ``(batch, nnz)``. For
        a factor with an index, its weights, ``(size,)``.
    pattern : ImplicitPattern
        The patterns of the factors.

    Attributes
    ----------
    pattern : ImplicitPattern
        The patterns of the factors.
    values : list of ndarray
        The arrays that were passed.
    shape : tuple of int
        ``(rows, cols)`` of the Jacobian.
    batch : int or None
        Number of samples, or None if no values have a batch axis.

    Raises
    ------
    InputError
        If sizes do not agree, or a factor that samples share has a batch axis.
    InputTypeError
        If a type or a dtype is not supported.

    See Also
    --------
    ImplicitChain : All steps of a chain in a few arrays.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> from sparsescan import ImplicitPattern, ImplicitStep, Pattern
    >>> pattern = ImplicitPattern([Pattern.diagonal(2), Pattern.dense((2, 2))], shared=[1])
    >>> step = ImplicitStep([[0.5, 1.0], [0.0, 1.0, 1.0, 0.0]], pattern)
    >>> sparsescan.inclusive_scan([1.0, 2.0], [step, np.eye(2)])
    [array([1., 2.]), array([2. , 0.5]), array([2. , 0.5])]
    """

    pattern: ImplicitPattern
    shape: tuple[int, int]
    batch: int | None

    def __init__(self, values: Sequence[ArrayLike], pattern: ImplicitPattern) -> None:
        _check_pattern(pattern)
        arrays = list(islice(entries_of("values", values), len(pattern.factors) + 1))
        if len(arrays) != len(pattern.factors):
            raise InputError(
                f"values has {len(values)} arrays; expected {len(pattern.factors)}, one for each "
                "factor"
            )
        batch: int | None = None
        self._factors: list[Factor | FactorWeights] = []
        for j, (given, factor) in enumerate(zip(arrays, pattern.factors, strict=True)):
            array = check_array(f"values[{j}]", given)
            index = pattern.indexed[j]
            if index is not None:
                self._factors.append(_weights(j, array, index))
                continue
            if array.ndim not in (1, 2) or array.shape[-1] != factor.nnz:
                raise InputError(
                    f"values[{j}] has shape {array.shape}; expected (nnz,) or (batch, nnz) with "
                    f"nnz = {factor.nnz}"
                )
            if array.ndim == 2:
                _check_shared(j, array.shape, pattern)
                if batch not in (None, len(array)):
                    raise InputError(
                        f"values[{j}] has shape {array.shape}; expected a batch of {batch}, as an "
                        "earlier factor has"
                    )
                batch = len(array)
            self._factors.append(Factor.from_pattern(array, factor))
        self._set(pattern=pattern, shape=pattern.shape, batch=batch)

    @property
    def values(self) -> list[Any]:
        """Return the arrays that were passed, one for each factor."""
        return [factor.data for factor in self._factors]

    @property
    def factors(self) -> list[Factor | FactorWeights]:
        """Return the factors, in the order in which they are applied."""
        return list(self._factors)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"ImplicitStep({self.pattern}{batch})"


class ImplicitChain(Frozen):
    """A chain whose steps are all implicit, with the same patterns: an array for each factor.

    Parameters
    ----------
    values : sequence of array_like of float32 or float64
        For each factor its values, from the LAST step to the first (in the order of time for scans
        with ``reverse=True``): ``(n, nnz)``, ``(n, batch, nnz)``, or ``(nnz,)`` if all steps and
        samples share them. For a factor with an index, its weights, ``(size,)``. At least one must
        have an axis of steps.
    pattern : ImplicitPattern
        The patterns of the factors of a step. The Jacobian must be square, so that the steps chain.

    Attributes
    ----------
    pattern : ImplicitPattern
        The patterns of a step.
    values : list of ndarray
        The arrays that were passed.
    shape : tuple of int
        ``(rows, cols)`` of a Jacobian.
    batch : int or None
        Number of samples, or None if no values have a batch axis.

    Raises
    ------
    InputError
        If sizes do not agree, the steps do not chain, or a factor that samples share has a batch
        axis.
    InputTypeError
        If a type or a dtype is not supported.

    Notes
    -----
    A scan returns one array of the gradients of all steps, as for a :class:`CSRChain`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> from sparsescan import ImplicitChain, ImplicitPattern, Pattern
    >>> pattern = ImplicitPattern([Pattern.diagonal(2), Pattern.dense((2, 2))], shared=[1])
    >>> slopes, weight = np.full((100, 2), 0.5), [0.0, 1.0, 1.0, 0.0]
    >>> chain = ImplicitChain([slopes, weight], pattern)
    >>> chain
    ImplicitChain((2, 2), n=100, float64)
    >>> sparsescan.exclusive_scan([1.0, 2.0], chain)[1]
    array([1. , 0.5])
    """

    pattern: ImplicitPattern
    shape: tuple[int, int]
    batch: int | None

    def __init__(self, values: Sequence[ArrayLike], pattern: ImplicitPattern) -> None:
        _check_pattern(pattern)
        if pattern.shape[0] != pattern.shape[1]:
            raise InputError(
                f"pattern is of Jacobians of shape {pattern.shape}; expected square ones, so that "
                "the steps chain"
            )
        self._weights: dict[int, FactorWeights] = {}  # of the factors that have an index
        listed: Any = values
        if any(pattern.indexed):
            listed = list(islice(entries_of("values", values), len(pattern.factors) + 1))
            for j, (given, index) in enumerate(zip(listed, pattern.indexed, strict=False)):
                if index is not None:
                    array = check_array(f"values[{j}]", given)
                    self._weights[j] = _weights(j, array, index)
                    listed[j] = spread(index, array)
        self._periodic = PeriodicChain(listed, pattern.factors)
        for j, array in enumerate(self._periodic.values):
            if array.ndim == 3:
                _check_shared(j, array.shape, pattern)
        self._set(pattern=pattern, shape=pattern.shape, batch=self._periodic.batch)

    @property
    def values(self) -> list[Any]:
        """Return the arrays that were passed, one for each factor."""
        values = self._periodic.values
        for j, weights in self._weights.items():
            values[j] = weights.data
        return values

    def factors(self, reverse: bool = False) -> PeriodicChain:
        """Return the chain of all factors, from the last step to the first."""
        if not (reverse or self._weights):
            return self._periodic
        values = self._periodic.read()
        for j, weights in self._weights.items():
            # The caller may have changed them since.
            values[j] = spread(weights.index, weights.read())
        if reverse:
            values = [array if array.ndim == 1 else array[::-1] for array in values]
        return PeriodicChain(values, self.pattern.factors)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that all values promote to."""
        return self._periodic.dtype

    def __len__(self) -> int:
        return self._periodic.steps

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"ImplicitChain({self.shape}, n={len(self)}{batch}, {self.dtype})"


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, ImplicitPattern):
        raise InputTypeError(f"pattern is {short(pattern)}; expected an ImplicitPattern")


def _check_shared(j: int, shape: tuple[int, ...], pattern: ImplicitPattern) -> None:
    if pattern.shared[j]:
        raise InputError(
            f"values[{j}] has shape {shape}; expected no batch axis, since the pattern says that "
            "samples share this factor"
        )


def _weights(j: int, array: Any, index: IndexedPattern) -> FactorWeights:
    if array.shape != (index.size,):
        raise InputError(
            f"values[{j}] has shape {array.shape}; expected ({index.size},), the weights of {index}"
        )
    return FactorWeights(array, index)

"""Numeric factorisations of sparse matrices, by SuperLU: steps that solve with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..errors import SingularMatrixError
from ..symbolic.factorisation import Factorisation
from .threads import share

Array: TypeAlias = NDArray[Any]
# A function that returns ``A⁻¹ x`` for the rows `x` of an array, as a column for each.
Solver: TypeAlias = Callable[[Array], Array]

# About the nanoseconds of a factorisation that are worth another thread.
_LONG = 500_000
# Matrices whose factors are kept beside those that threads factorise at once.
_KEPT = 4


class Given(NamedTuple):
    """What a run reads for the steps that it solves with.

    Attributes
    ----------
    values : callable
        Returns the values of the `k`-th Jacobian, ``(nnz,)`` or ``(batch, nnz)``.
    local : callable
        Returns what is added to the `k`-th gradient, or None.
    name : callable
        Returns the name of the `k`-th Jacobian in errors.
    """

    values: Callable[[int], Array]
    local: Callable[[int], Array | None]
    name: Callable[[int], str]


def solves_bytes(matrices: Iterable[Factorisation], itemsize: int, batch: int, threads: int) -> int:
    """Return a bound on the bytes of SuperLU's factors, as if all matrices differed."""
    matrices = [form for form in matrices if not form.is_compiled]
    each = [
        form.nbytes(itemsize) + (itemsize * form.places.size) * 3 + itemsize * form.size
        for form in matrices
    ]
    # Solving takes a few copies of the gradients.
    vectors = max((4 * batch * itemsize * form.size for form in matrices), default=0)
    tables = sum({id(form): form.table_bytes for form in matrices}.values())
    return batch * sum(sorted(each)[-_capacity(threads) :]) + vectors + tables


def _capacity(threads: int) -> int:
    """Return how many matrices keep factors at the same time."""
    return threads + _KEPT


def is_long(form: Factorisation) -> bool:
    """Return whether a factorisation is worth its own thread, and releases the GIL."""
    return not form.is_compiled and form.multiply_adds + 400 * form.size > _LONG


class _Factors:
    """The factors of one matrix, or one per sample, and the values that were factorised."""

    def __init__(self, form: Factorisation, values: Array, some: bytes) -> None:
        self.form, self.values, self._some = form, values, some
        # One, or one for each sample; None for a singular matrix. Empty once they are dropped.
        self.solvers: list[Solver | None] = [None] * (1 if values.ndim == 1 else len(values))

    def make(self, sample: int) -> None:
        """Factorise the matrix of a sample."""
        values = self.values if self.values.ndim == 1 else self.values[sample]
        self.solvers[sample] = factorise(self.form, values)

    def are_of(self, form: Factorisation, values: Array, some: bytes) -> bool:
        """Return whether these are the factors of matrices with exactly these values."""
        mine = self.values
        if form is not self.form or some != self._some or values.shape != mine.shape:
            return False
        bits = f"i{mine.itemsize}"
        return np.array_equal(mine.view(bits), values.view(bits))


class Solves:
    """The steps of a program that SuperLU solves with, and factors that are kept from run to run.

    Memory that the caller may change is read only once: the values of a matrix are copied. The copy
    is compared with factorised matrices, and factorised if it is new.

    Parameters
    ----------
    forms : dict of int to Factorisation
        The Jacobians to solve with, by their numbers, in the order of the scan.
    leaves : ndarray of int64, shape (n, 2)
        The table of addresses that a :class:`~sparsescan.chains.chain.Chain` fills before each run.
    batch, threads : int
        Number of samples, and of threads that may take part.
    """

    def __init__(
        self, forms: dict[int, Factorisation], leaves: NDArray[np.int64], batch: int, threads: int
    ) -> None:
        self._forms = {k: form for k, form in forms.items() if not form.is_compiled}
        self._leaves, self._batch, self._threads = leaves, batch, threads
        self._nodes = list(self._forms)
        self._position = {k: i for i, k in enumerate(self._nodes)}
        # The least recently used first.
        self._kept: list[_Factors] = []
        self._keys: dict[int, tuple[int, ...]] = {}
        self._by_key: dict[tuple[int, ...], _Factors] = {}

    def begin(self, inclusive: bool, n: int) -> None:
        """Start a run. Within it, equal addresses mean equal matrices."""
        self._by_key = {}
        leaves = self._leaves[self._nodes].tolist()
        self._keys = {
            k: (id(self._forms[k]), *leaf)
            for k, leaf in zip(self._nodes, leaves, strict=True)
            if inclusive or k < n - 1
        }

    def solve(self, k: int, x: Array, y: Array, given: Given) -> None:
        """Set ``y = A_k⁻¹ x + l`` for all samples, the rows."""
        factors = self._by_key.get(self._keys[k])
        if factors is None or not factors.solvers:
            self._factorise(self._upcoming(k), given)
            factors = self._by_key[self._keys[k]]
        if factors is not self._kept[-1]:
            self._kept.remove(factors)
            self._kept.append(factors)
        for sample, solver in enumerate(factors.solvers):
            if solver is None:
                raise singular(given.name(k), sample if len(factors.solvers) > 1 else None)
            if len(factors.solvers) == 1:
                y.T[...] = solver(x)
            else:
                y[sample] = solver(x[sample : sample + 1])[:, 0]
        if (local := given.local(k + 1)) is not None:
            y += local.reshape(y.shape)

    def _upcoming(self, k: int) -> list[int]:
        """Return the Jacobian, and later ones with other matrices, for threads to factorise."""
        if not is_long(self._forms[k]):
            return [k]
        new: dict[tuple[int, ...], int] = {}
        for node in self._nodes[self._position[k] :]:
            key = self._keys.get(node)
            if key is None or len(new) == self._threads:
                break
            if not is_long(self._forms[node]):
                continue
            known = self._by_key.get(key)
            if known is None or not known.solvers:
                new.setdefault(key, node)
        return list(new.values())

    def _factorise(self, nodes: Sequence[int], given: Given) -> None:
        """Factorise these Jacobians, unless factors of their values exist."""
        new: list[tuple[_Factors, int]] = []
        while len(self._kept) > _capacity(self._threads) - len(nodes):
            # Addresses of this run may still lead there.
            self._kept.pop(0).solvers = []
        for k in nodes:
            values = given.values(k)
            # Samples that have one matrix, by an axis without strides, share its factors.
            shared = values.ndim == 2 and (len(values) == 1 or values.strides[0] == 0)
            values = np.array(values[0] if shared else values, order="C")
            form = self._forms[k]
            some = values.reshape(-1)[:: values.size // 4 or 1].tobytes()
            equal = (each for each in self._kept if each.are_of(form, values, some))
            factors = next(equal, None)
            if factors is None:
                factors = _Factors(form, values, some)
                new += [(factors, sample) for sample in range(len(factors.solvers))]
            else:
                self._kept.remove(factors)
            self._kept.append(factors)
            self._by_key[self._keys[k]] = factors
        try:
            if len(new) > 1 and is_long(new[0][0].form):
                share(lambda i: new[i][0].make(new[i][1]), len(new))
            else:
                for factors, sample in new:
                    factors.make(sample)
        except BaseException:
            # Factors that were not made must not look like those of a singular matrix.
            self._kept, self._by_key = [], {}
            raise


def singular(name: str, sample: int | None) -> SingularMatrixError:
    """Return the error for a matrix that is singular, of one sample or of all."""
    which = "" if sample is None else f" in sample {sample}"
    return SingularMatrixError(
        f"{name} is singular{which}: its factorisation has a pivot of zero; "
        "expected a regular matrix to solve with"
    )


def factorise(form: Factorisation, values: Array) -> Solver | None:
    """Return a solver for the matrix with these values; None if it is singular.

    Parameters
    ----------
    form : Factorisation
        What follows from its pattern.
    values : ndarray, shape (nnz,)
        Its values.
    """
    if not np.isfinite(values).all():
        return lambda x: np.full(x.shape[::-1], np.nan, x.dtype)
    # Few programs solve.
    from scipy.sparse.linalg import splu

    # The CSR arrays are the CSC arrays of the transpose; SuperLU solves with its transpose.
    shape = form.size, form.size
    matrix = sp.csc_array((values[form.places], form.indices, form.indptr), shape=shape)
    try:
        factors = splu(matrix, permc_spec="NATURAL")
    except RuntimeError:
        return None
    return lambda x: factors.solve(x.take(form.order, axis=1).T, "T")

"""Patterns: CSR structures without values, and the symbolic phase, which multiplies them."""

from __future__ import annotations

import hashlib
import math
import operator
import os
import threading
import weakref
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from .errors import DeviceError, InputError, InputTypeError

__all__ = [
    "Pattern",
    "Products",
    "TooLargeError",
    "block_diagonal",
    "multiply_adds",
    "of_mask",
    "product",
    "product_nnz",
    "rows_of",
    "trusted",
]

Kind = Literal["diagonal", "dense", "general"]

# Largest value that a 32-bit index may take; tests lower it to walk the 64-bit paths.
INT32_MAX = int(np.iinfo(np.int32).max)
_INT64_MAX = int(np.iinfo(np.int64).max)

# Rows of a product that are looked at to estimate its entries.
_SAMPLE = 64
# Multiply-adds of a product above which its pattern is estimated before it is worked out.
_EXACT = 10_000_000

# What can be wrong with index arrays.
_START, _FALL, _END, _RANGE = 1, 2, 3, 4

_interned: weakref.WeakValueDictionary[Any, Pattern] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _renew_lock() -> None:
    """A thread of the parent that held the lock does not exist in a forked child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Pattern:
    """Where a matrix may have nonzeros: a canonical CSR structure without values.

    Equal patterns are one object, so ``is`` compares them. The arrays are read-only copies, sorted
    and free of duplicates.

    Parameters
    ----------
    indptr : array_like of int, shape (rows + 1,)
        Row ``i`` has its columns at ``indices[indptr[i]:indptr[i + 1]]``.
    indices : array_like of int, shape (nnz,)
        Column indices, increasing within each row.
    shape : tuple of int
        ``(rows, cols)``.

    Attributes
    ----------
    shape : tuple of int
        ``(rows, cols)``.
    nnz : int
        Stored entries, explicit zeros included.
    kind : {"diagonal", "dense", "general"}
        What the kernels make of it. Diagonal: square, entry ``(i, i)`` in every row and no other.
        Dense: every entry. A 1×1 pattern with its one entry is diagonal.

    Raises
    ------
    InputError
        If the arrays are no CSR structure, or a row is unsorted or has a column twice.
    InputTypeError
        If an array is not of integers.

    Examples
    --------
    >>> from sparsescan import Pattern
    >>> Pattern([0, 1, 3], [0, 0, 1], (2, 2))
    Pattern((2, 2), nnz=3, general)
    >>> Pattern([0, 1, 2], [0, 1], (2, 2)) is Pattern.diagonal(2)
    True
    """

    __slots__ = ("__weakref__", "_indices", "_indptr", "key", "kind", "nnz", "shape")

    shape: tuple[int, int]
    nnz: int
    kind: Kind
    key: tuple[Any, ...]  # equal for equal patterns, and holds none
    _indptr: NDArray[np.integer[Any]] | None
    _indices: NDArray[np.integer[Any]] | None

    def __new__(
        cls, indptr: ArrayLike, indices: ArrayLike, shape: tuple[int, int], *, name: str = "pattern"
    ) -> Pattern:
        """The pattern with these arrays; `name` is what an error calls them."""
        shape = check_shape(name, shape)
        indptr, indices = check_index_arrays(name, indptr, indices, shape)
        row = unsorted_row(indptr, indices)
        if row >= 0:
            raise InputError(
                f"{name} has unsorted or duplicate columns in row {row}; expected increasing ones"
            )
        return _intern(indptr, indices, shape)

    @classmethod
    def diagonal(cls, size: int) -> Pattern:
        """The pattern of a diagonal ``(size, size)`` matrix."""
        size = check_shape("size", (size, size))[0]
        return _intern_kind("diagonal", (size, size), size)

    @classmethod
    def dense(cls, shape: tuple[int, int]) -> Pattern:
        """The pattern with every entry of `shape`."""
        shape = check_shape("shape", shape)
        if shape in ((0, 0), (1, 1)):
            return cls.diagonal(shape[0])
        return _intern_kind("dense", shape, shape[0] * shape[1])

    @property
    def indptr(self) -> NDArray[np.integer[Any]]:
        """Row pointers, shape ``(rows + 1,)``; int32, or int64 when nnz or a size demands it."""
        return self._arrays()[0]

    @property
    def indices(self) -> NDArray[np.integer[Any]]:
        """Column indices, shape ``(nnz,)``, of the same dtype as ``indptr``."""
        return self._arrays()[1]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The dtype of the index arrays."""
        return index_dtype(self.shape, self.nnz)

    def _arrays(self) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        if self._indptr is None or self._indices is None:
            rows, cols = self.shape
            dtype = self.index_dtype
            columns = np.arange(cols if rows else 0, dtype=dtype)
            diagonal = self.kind == "diagonal"
            row_length = dtype.type(1 if diagonal else cols)
            self._indptr = _frozen(np.arange(rows + 1, dtype=dtype) * row_length)
            self._indices = _frozen(columns if diagonal else np.tile(columns, rows))
        return self._indptr, self._indices

    def __repr__(self) -> str:
        return f"Pattern({self.shape}, nnz={self.nnz}, {self.kind})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.kind == "general":
            return Pattern, (self.indptr, self.indices, self.shape)
        argument = self.shape[0] if self.kind == "diagonal" else self.shape
        return getattr(Pattern, self.kind), (argument,)


def product(a: Pattern, b: Pattern) -> Pattern:
    """The pattern of ``A @ B``: every entry that some ``A[i, k]·B[k, j]`` meets.

    Parameters
    ----------
    a, b : Pattern
        Shapes ``(m, k)`` and ``(k, n)``.

    Returns
    -------
    Pattern
        Shape ``(m, n)``, sorted, without duplicates.

    Raises
    ------
    InputError
        If the shapes do not chain.

    Examples
    --------
    >>> from sparsescan.pattern import Pattern, product
    >>> product(Pattern.diagonal(3), Pattern.dense((3, 2)))
    Pattern((3, 2), nnz=6, dense)
    """
    if a.shape[1] != b.shape[0]:
        raise InputError(f"the patterns have shapes {a.shape} and {b.shape}; the inner must agree")
    shape = (a.shape[0], b.shape[1])
    if a.kind == "diagonal":
        return b
    if b.kind == "diagonal":
        return a
    if "dense" in (a.kind, b.kind):
        return _outer(*_met(a, b))
    indptr = _product_indptr(a.indptr, a.indices, b.indptr, b.indices, shape[1])
    nnz = int(indptr[-1])
    if nnz == shape[0] * shape[1]:
        return Pattern.dense(shape)
    dtype = index_dtype(shape, nnz)
    indices = np.empty(nnz, dtype)
    _product_indices(a.indptr, a.indices, b.indptr, b.indices, shape[1], indptr, indices)
    return trusted(indptr, indices, shape)


def _met(a: Pattern, b: Pattern) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows and columns of ``A @ B`` with entries, wherever they cross, if `A` or `B` is dense."""
    rows, cols = np.zeros(a.shape[0], bool), np.zeros(b.shape[1], bool)
    if a.shape[1] > 0:
        rows[:] = True if a.kind == "dense" else np.diff(a.indptr) > 0
        cols[slice(None) if b.kind == "dense" else b.indices] = True
    return rows, cols


def _outer(rows: NDArray[np.bool_], cols: NDArray[np.bool_]) -> Pattern:
    """The pattern with an entry in these rows and columns, wherever they cross."""
    shape = len(rows), len(cols)
    if rows.all() and cols.all():
        return Pattern.dense(shape)
    columns = np.flatnonzero(cols)
    indptr = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(rows * len(columns), out=indptr[1:])
    dtype = index_dtype(shape, int(indptr[-1]))
    return trusted(indptr, np.tile(columns.astype(dtype), np.count_nonzero(rows)), shape)


def multiply_adds(a: Pattern, b: Pattern) -> int:
    """How many ``A[i, k]·B[k, j]`` the product ``A @ B`` sums; a FLOP count is twice that."""
    if a.kind == "diagonal":
        return b.nnz
    if b.kind == "diagonal":
        return a.nnz
    if b.kind == "dense":
        return a.nnz * b.shape[1]
    if a.kind == "dense":
        return a.shape[0] * b.nnz
    return int(_multiply_adds(a.indices, b.indptr))


def product_nnz(a: Pattern, b: Pattern) -> int:
    """About how many entries the pattern of ``A @ B`` has, from at most :data:`_SAMPLE` rows of it.

    The rows are drawn at random, but the same ones each time; where there are no more than those
    the number is exact. None of it takes memory that grows with the product.
    """
    if "diagonal" in (a.kind, b.kind):
        return product(a, b).nnz
    if "dense" in (a.kind, b.kind):
        met_rows, met_cols = _met(a, b)
        return int(met_rows.sum()) * int(met_cols.sum())
    if a.shape[0] == 0:
        return 0
    count = min(a.shape[0], _SAMPLE)
    rows = np.random.default_rng(0).choice(a.shape[0], count, replace=False, shuffle=False)
    found = _rows_nnz(a.indptr, a.indices, b.indptr, b.indices, b.shape[1], rows)
    return round(int(found) * a.shape[0] / count)


def _nnz(a: Pattern, b: Pattern) -> int:
    """Entries of the pattern of ``A @ B`` of sparse ones, counted one by one."""
    every = np.arange(a.shape[0])
    return int(_rows_nnz(a.indptr, a.indices, b.indptr, b.indices, b.shape[1], every))


class Products:
    """Products of patterns, each worked out once.

    The pattern of a product that takes more than :data:`_EXACT` multiply-adds and seems to be more
    than half full is taken to be full: stored densely it needs less than with its indices.

    Parameters
    ----------
    work : float, optional
        Multiply-adds of sparse products together, beyond which they are given up.
    nbytes : float, optional
        Bytes that the index arrays of all together may take; and that an index for each entry of
        one may take, beyond which it is given up. It has taken no memory then.
    """

    def __init__(self, work: float = math.inf, nbytes: float = math.inf) -> None:
        self._known: dict[tuple[Pattern, Pattern], Pattern] = {}
        self._work = work
        self._nbytes = self._largest = nbytes

    def __call__(self, a: Pattern, b: Pattern) -> Pattern:
        """The pattern of ``A @ B``; or :class:`TooLargeError`."""
        found = self._known.get((a, b))
        if found is None:
            found = self._known[a, b] = self._product(a, b)
        return found

    def _product(self, a: Pattern, b: Pattern) -> Pattern:
        if "diagonal" in (a.kind, b.kind):
            return product(a, b)
        shape, sparse = (a.shape[0], b.shape[1]), "dense" not in (a.kind, b.kind)
        work = multiply_adds(a, b) if sparse else 0
        if work > self._work:
            raise TooLargeError
        entries = product_nnz(a, b) if work > _EXACT or self._largest < math.inf else 0
        if entries > self._largest / 4 and 4 * (_nnz(a, b) if sparse else entries) > self._largest:
            raise TooLargeError
        if work > _EXACT and 2 * entries > shape[0] * shape[1]:
            return Pattern.dense(shape)
        found = product(a, b)
        taken = found.index_dtype.itemsize * (found.nnz + shape[0] + 1)
        taken *= found.kind == "general"
        if taken > self._nbytes:
            raise TooLargeError
        self._work -= work
        self._nbytes -= taken
        return found


class TooLargeError(Exception):
    """A product that :class:`Products` gave up."""


def block_diagonal(block: Pattern, count: int) -> Pattern:
    """The pattern of `count` copies of a matrix along a diagonal."""
    if count == 1:
        return block
    shape = block.shape[0] * count, block.shape[1] * count
    if block.kind == "diagonal":
        return Pattern.diagonal(shape[0])
    nnz = block.nnz * count
    dtype = index_dtype(shape, nnz)
    step = np.arange(count, dtype=dtype)[:, None]
    indptr = np.zeros(shape[0] + 1, dtype)
    np.add(block.indptr[1:], step * dtype.type(block.nnz), out=indptr[1:].reshape(count, -1))
    indices = block.indices + step * dtype.type(block.shape[1])
    return trusted(indptr, indices.reshape(-1), shape)


def trusted(indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int]) -> Pattern:
    """The pattern of arrays that were just made, are canonical, and are nobody else's."""
    dtype = index_dtype(shape, len(indices))
    indptr, indices = (array.astype(dtype, copy=False) for array in (indptr, indices))
    return _intern(indptr, indices, shape, copy=False)


def of_mask(mask: NDArray[np.bool_]) -> Pattern:
    """The pattern with an entry wherever a matrix is True."""
    indptr = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(np.count_nonzero(mask, axis=1), out=indptr[1:])
    return trusted(indptr, np.nonzero(mask)[1], (mask.shape[0], mask.shape[1]))


def rows_of(pattern: Pattern) -> NDArray[np.int64]:
    """The row of every entry, whose column is in ``pattern.indices``."""
    rows = np.arange(pattern.shape[0], dtype=np.int64)
    return np.repeat(rows, np.diff(pattern.indptr))


def index_dtype(shape: tuple[int, int], nnz: int) -> np.dtype[Any]:
    """int32 while it holds every index, row pointer and size; int64 otherwise."""
    return np.dtype(np.int32 if max(*shape, nnz) <= INT32_MAX else np.int64)


def check_shape(name: str, shape: Any) -> tuple[int, int]:
    """`shape` as two Python integers, or an error that names it."""
    try:
        rows, cols = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise InputTypeError(f"{name} has shape {shape!r}; expected (rows, cols)") from None
    if rows < 0 or cols < 0:
        raise InputError(f"{name} has shape {(rows, cols)}; expected sizes of at least 0")
    if rows > _INT64_MAX or cols > _INT64_MAX:
        raise InputError(f"{name} has shape {(rows, cols)}; expected sizes of at most {_INT64_MAX}")
    return rows, cols


def check_host(name: str, value: Any) -> None:
    """Refuse what lives on a CUDA device."""
    if hasattr(value, "__cuda_array_interface__") or type(value).__module__.startswith("cupyx."):
        raise DeviceError(
            f"{name} is a {type(value).__module__}.{type(value).__name__} on a CUDA device; "
            "expected an array in host memory (cupy.asnumpy, .get())"
        )


def check_index_arrays(
    name: str, indptr: ArrayLike, indices: ArrayLike, shape: tuple[int, int]
) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
    """Contiguous, native index arrays of one dtype that are safe to follow; or an error.

    Rows may still be unsorted: see :func:`unsorted_row`. The result is a copy where the input was
    not already of the right form.
    """
    checked: list[NDArray[Any]] = []
    for label, given in (("indptr", indptr), ("indices", indices)):
        check_host(f"{name} {label}", given)
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise InputTypeError(f"{name} has no array as {label}: {error}") from None
        array = check_index_form(name, label, array)
        if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
            raise InputError(f"{name} has {label} beyond the range of int64")
        checked.append(array)
    indptr, indices = checked
    check_row_pointers(name, indptr, shape)
    cols = shape[1]
    # Checked in the dtype that was passed: a cast to int32 first could wrap a bad index into range.
    wide = np.int32 if indptr.dtype == indices.dtype == np.dtype(np.int32) else np.int64
    indptr = np.ascontiguousarray(indptr, dtype=wide)
    indices = np.ascontiguousarray(indices, dtype=wide)
    fault, at = _find_fault(indptr, indices, cols)
    if fault:
        raise InputError(f"{name} has an {_describe_fault(fault, at, indptr, indices, cols)}")
    dtype = index_dtype(shape, len(indices))
    return indptr.astype(dtype, copy=False), indices.astype(dtype, copy=False)


def check_index_form(name: str, label: str, array: Any) -> Any:
    """An array of NumPy or CuPy that has one dimension and holds integers; or an error."""
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InputTypeError(f"{name} has {label} of dtype {array.dtype}; expected integers")
    if array.ndim != 1:
        raise InputError(f"{name} has {label} of shape {array.shape}; expected one dimension")
    return array


def check_row_pointers(name: str, indptr: Any, shape: tuple[int, int]) -> None:
    """Raise unless there are as many row pointers as this shape needs."""
    rows = shape[0]
    if len(indptr) != rows + 1:
        raise InputError(
            f"{name} has an indptr of {len(indptr)} entries; expected {rows + 1} for {rows} rows"
        )


def _describe_fault(
    fault: int, at: int, indptr: NDArray[Any], indices: NDArray[Any], cols: int
) -> str:
    """What :func:`_find_fault` found, in words."""
    if fault == _START:
        return f"indptr that starts at {indptr[0]}; expected 0"
    if fault == _FALL:
        return f"indptr that falls after row {at}; expected one that never does"
    if fault == _END:
        return f"indptr that ends at {indptr[-1]}; expected {len(indices)}, as indices has"
    row = int(np.searchsorted(indptr, at, side="right")) - 1
    return f"index {indices[at]} in row {row}; expected columns 0 to {cols - 1}"


def unsorted_row(indptr: NDArray[Any], indices: NDArray[Any]) -> int:
    """The first row whose columns do not increase strictly, or -1."""
    return int(_unsorted_row(indptr, indices))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _intern(
    indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int], *, copy: bool = True
) -> Pattern:
    """The one pattern with these canonical arrays, which are copied if they are new."""
    rows, cols = shape
    nnz = len(indices)
    if rows == cols == nnz and _is_diagonal(indptr, indices):
        return Pattern.diagonal(rows)
    if nnz == rows * cols:
        return Pattern.dense(shape)
    digest = hashlib.blake2b(indptr.data, digest_size=16)
    digest.update(indices.data)
    key = (shape, nnz, digest.digest())
    with _lock:
        found = _interned.get(key)
        if found is None:
            found = _new("general", shape, nnz, key)
            # A copy, because what the caller holds may change under us.
            found._indptr = _frozen(indptr.copy() if copy else indptr)
            found._indices = _frozen(indices.copy() if copy else indices)
            _interned[key] = found
        return found


def _intern_kind(kind: Kind, shape: tuple[int, int], nnz: int) -> Pattern:
    key = (kind, shape)
    with _lock:
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = _new(kind, shape, nnz, key)
        return found


def _new(kind: Kind, shape: tuple[int, int], nnz: int, key: tuple[Any, ...]) -> Pattern:
    pattern = object.__new__(Pattern)
    pattern.kind, pattern.shape, pattern.nnz = kind, shape, nnz
    pattern.key = key
    # Those of diagonal and dense patterns are made when somebody asks.
    pattern._indptr = pattern._indices = None
    return pattern


@njit(nogil=True, cache=True)
def _find_fault(indptr, indices, cols):  # type: ignore[no-untyped-def]
    """What makes the arrays unsafe to follow, and where; 0 if nothing does."""
    if indptr[0] != 0:
        return _START, 0
    for row in range(len(indptr) - 1):
        if indptr[row + 1] < indptr[row]:
            return _FALL, row
    if indptr[-1] != len(indices):
        return _END, 0
    for p in range(len(indices)):
        if indices[p] < 0 or indices[p] >= cols:
            return _RANGE, p
    return 0, 0


@njit(nogil=True, cache=True)
def _unsorted_row(indptr, indices):  # type: ignore[no-untyped-def]
    for row in range(len(indptr) - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            if indices[p] <= indices[p - 1]:
                return row
    return -1


@njit(nogil=True, cache=True)
def _is_diagonal(indptr, indices):  # type: ignore[no-untyped-def]
    for row in range(len(indices)):
        if indptr[row] != row or indices[row] != row:
            return False
    return True


@njit(nogil=True, cache=True)
def _product_indptr(a_indptr, a_indices, b_indptr, b_indices, cols):  # type: ignore[no-untyped-def]
    rows = len(a_indptr) - 1
    indptr = np.zeros(rows + 1, np.int64)
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        count = np.int64(0)
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
        indptr[i + 1] = indptr[i] + count
    return indptr


@njit(nogil=True, cache=True)
def _multiply_adds(a_indices, b_indptr):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    for k in a_indices:
        count += b_indptr[k + 1] - b_indptr[k]
    return count


@njit(nogil=True, cache=True)
def _rows_nnz(a_indptr, a_indices, b_indptr, b_indices, cols, rows):  # type: ignore[no-untyped-def]
    """Entries of these rows of a product."""
    seen = np.full(cols, -1, np.int64)
    count = np.int64(0)
    for i in rows:
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
    return count


@njit(nogil=True, cache=True)
def _product_indices(a_indptr, a_indices, b_indptr, b_indices, cols, indptr, indices):  # type: ignore[no-untyped-def]
    """Columns of every row, sorted; `indptr` says how many there are."""
    rows = len(a_indptr) - 1
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        start, stop = indptr[i], indptr[i + 1]
        first, last, out = np.int64(cols), np.int64(-1), start
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = np.int64(b_indices[q])
                if seen[j] != i:
                    seen[j] = i
                    indices[out] = j
                    out += 1
                    first = min(first, j)
                    last = max(last, j)
        # A row that fills a good part of its span is read off the marks; a thin one is sorted.
        if (last - first) < 16 * (stop - start):
            out = start
            for column in range(first, last + 1):
                if seen[column] == i:
                    indices[out] = column
                    out += 1
        else:
            indices[start:stop].sort()

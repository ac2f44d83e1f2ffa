"""Patterns: CSR structures without values, and the symbolic phase, which multiplies them."""

from __future__ import annotations

import hashlib
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, host_array, is_on_device
from ..arrays.frozen import Frozen
from ..errors import Allocating, DeviceError, InputError, InputTypeError, short
from ..kernels import symbolic as kernels
from ..locks import new_lock

Kind = Literal["diagonal", "dense", "general"]

# Largest value that a 32-bit index may take; tests lower it to test the 64-bit paths.
INT32_MAX = int(np.iinfo(np.int32).max)
_INT64_MAX = int(np.iinfo(np.int64).max)

# Rows of a product that are sampled to estimate its entries.
_SAMPLE = 64
# With more multiply-adds, the pattern of a product is estimated before it is computed.
_EXACT = 10_000_000

_interned: weakref.WeakValueDictionary[Any, Pattern] = weakref.WeakValueDictionary()
_lock = new_lock()


class Pattern(Frozen):
    """Where a matrix may have nonzeros: a canonical CSR structure without values.

    Equal patterns are one object, so ``is`` compares them. The arrays are read-only copies, sorted
    and free of duplicates.

    Parameters
    ----------
    indptr : array_like of int, shape (rows + 1,)
        Row ``i`` has its columns at ``indices[indptr[i]:indptr[i + 1]]``. Or a SciPy CSR matrix, in
        place of all three arguments.
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
        How kernels treat it. Diagonal: square, with entry ``(i, i)`` in every row and no other
        entry. Dense: every entry. A 1×1 pattern with one entry is diagonal.

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
    >>> import scipy.sparse as sp
    >>> Pattern(sp.csr_array([[1.0, 0.0], [2.0, 3.0]]))
    Pattern((2, 2), nnz=3, general)
    """

    __slots__ = ("__weakref__", "_indices", "_indptr", "key", "kind", "nnz", "shape")

    shape: tuple[int, int]
    nnz: int
    kind: Kind
    key: tuple[Any, ...]  # equal for equal patterns, and holds none
    _indptr: NDArray[np.integer[Any]] | None
    _indices: NDArray[np.integer[Any]] | None

    def __new__(
        cls,
        indptr: Any,
        indices: ArrayLike | None = None,
        shape: tuple[int, int] | None = None,
        *,
        name: str = "pattern",
    ) -> Pattern:
        """Return the pattern with these arrays; `name` is their name in errors."""
        if indices is None or shape is None:
            if indices is not None or shape is not None or getattr(indptr, "format", "") != "csr":
                raise InputTypeError(
                    f"{name} is made of {short(indptr)} alone; expected a CSR matrix, or indptr, "
                    "indices and shape"
                )
            indptr, indices, shape = indptr.indptr, indptr.indices, indptr.shape
        shape = check_shape(name, shape)
        indptr, indices = check_index_arrays(name, indptr, indices, shape)
        row = unsorted_row(indptr, indices)
        if row >= 0:
            raise InputError(
                f"{name} has unsorted or duplicate columns in row {row}; expected increasing ones"
            )
        return trusted(indptr, indices, shape)

    @classmethod
    def diagonal(cls, size: int) -> Pattern:
        """Return the pattern of a diagonal ``(size, size)`` matrix."""
        size = check_shape("size", (size, size))[0]
        return _intern_kind("diagonal", (size, size), size)

    @classmethod
    def dense(cls, shape: tuple[int, int]) -> Pattern:
        """Return the pattern with every entry of `shape`."""
        shape = check_shape("shape", shape)
        nnz = shape[0] * shape[1]
        if nnz > _INT64_MAX:
            raise InputError(f"shape is {shape}; expected at most {_INT64_MAX} entries")
        if shape in ((0, 0), (1, 1)):
            return cls.diagonal(shape[0])
        return _intern_kind("dense", shape, nnz)

    @property
    def indptr(self) -> NDArray[np.integer[Any]]:
        """Row pointers, shape ``(rows + 1,)``; int32, or int64 when nnz or a size demands it."""
        if self._indptr is None:
            assert self.kind != "general", "its entries were only counted"
            (rows, cols), dtype = self.shape, self.index_dtype
            what = f"the index arrays of {self}"
            check_memory(what, 2 * rows * dtype.itemsize)
            with Allocating(what):
                length = dtype.type(1 if self.kind == "diagonal" else cols)
                self._indptr = _frozen(np.arange(rows + 1, dtype=dtype) * length)
        return self._indptr

    @property
    def indices(self) -> NDArray[np.integer[Any]]:
        """Column indices, shape ``(nnz,)``, of the same dtype as ``indptr``."""
        return self.index_arrays()[1]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The dtype of the index arrays."""
        return index_dtype(self.shape, self.nnz)

    def index_arrays(self) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """Return `indptr` and `indices`."""
        indptr = self.indptr
        if self._indices is None:
            (rows, cols), dtype = self.shape, self.index_dtype
            what = f"the index arrays of {self}"
            check_memory(what, dtype.itemsize * (cols + self.nnz if rows else 0))
            with Allocating(what):
                columns = np.arange(cols if rows else 0, dtype=dtype)
                repeats = 1 if self.kind == "diagonal" else rows
                self._indices = _frozen(np.tile(columns, repeats))
        return indptr, self._indices

    def __repr__(self) -> str:
        return f"Pattern({self.shape}, nnz={self.nnz}, {self.kind})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.kind == "general":
            return Pattern, (self.indptr, self.indices, self.shape)
        argument = self.shape[0] if self.kind == "diagonal" else self.shape
        return getattr(Pattern, self.kind), (argument,)


def product(a: Pattern, b: Pattern) -> Pattern:
    """Return the pattern of ``A @ B``: every entry to which some ``A[i, k]·B[k, j]`` adds.

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
    >>> from sparsescan.symbolic.pattern import Pattern, product
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
    indptr = kernels.product_indptr(a.indptr, a.indices, b.indptr, b.indices, shape[1])
    nnz = int(indptr[-1])
    if nnz == shape[0] * shape[1]:
        return Pattern.dense(shape)
    dtype = index_dtype(shape, nnz)
    indices = np.empty(nnz, dtype)
    kernels.product_indices(a.indptr, a.indices, b.indptr, b.indices, shape[1], indptr, indices)
    return trusted(indptr, indices, shape)


def _met(a: Pattern, b: Pattern) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the rows and columns whose crossings are the entries of ``A @ B``, if one is dense."""
    rows, cols = np.zeros(a.shape[0], bool), np.zeros(b.shape[1], bool)
    if a.shape[1] > 0:
        rows[:] = True if a.kind == "dense" else np.diff(a.indptr) > 0
        cols[slice(None) if b.kind == "dense" else b.indices] = True
    return rows, cols


def _outer(rows: NDArray[np.bool_], cols: NDArray[np.bool_]) -> Pattern:
    """Return the pattern with an entry wherever these rows and columns cross."""
    shape = len(rows), len(cols)
    if rows.all() and cols.all():
        return Pattern.dense(shape)
    columns = np.flatnonzero(cols)
    indptr = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(rows * len(columns), out=indptr[1:])
    dtype = index_dtype(shape, int(indptr[-1]))
    return trusted(indptr, np.tile(columns.astype(dtype), np.count_nonzero(rows)), shape)


def multiply_adds(a: Pattern, b: Pattern) -> int:
    """Count the terms ``A[i, k]·B[k, j]`` that the product ``A @ B`` sums: half of its FLOPs."""
    if a.kind == "diagonal":
        return b.nnz
    if b.kind == "diagonal":
        return a.nnz
    if b.kind == "dense":
        return a.nnz * b.shape[1]
    if a.kind == "dense":
        return a.shape[0] * b.nnz
    return int(kernels.count_terms(a.indices, b.indptr))


def product_nnz(a: Pattern, b: Pattern) -> int:
    """Estimate how many entries the pattern of ``A @ B`` has, from at most :data:`_SAMPLE` rows.

    The rows are random, but the same each time. If there are no more rows than the sample, the
    number is exact. The memory does not grow with the product.
    """
    if "diagonal" in (a.kind, b.kind):
        return product(a, b).nnz
    if "dense" in (a.kind, b.kind):
        met_rows, met_cols = _met(a, b)
        return int(met_rows.sum()) * int(met_cols.sum())
    count = min(a.shape[0], _SAMPLE)
    rows = np.random.default_rng(0).choice(a.shape[0], count, replace=False, shuffle=False)
    entries = kernels.count_entries(a.indptr, a.indices, b.indptr, b.indices, b.shape[1], rows)
    return round(int(entries) * a.shape[0] / count)


def _nnz(a: Pattern, b: Pattern) -> int:
    """Count the entries of the pattern of ``A @ B`` of sparse ones, one by one."""
    every = np.arange(a.shape[0])
    return int(kernels.count_entries(a.indptr, a.indices, b.indptr, b.indices, b.shape[1], every))


class PatternProducts:
    """Products of patterns, each worked out once.

    If a product takes more than :data:`_EXACT` multiply-adds and is estimated to be more than half
    full, its pattern counts as full: dense storage then takes less memory than indices.

    Parameters
    ----------
    work : float, optional
        The most multiply-adds of all sparse products together.
    nbytes : float, optional
        The most bytes of all index arrays together, and of the index of one product. A product
        beyond it is given up before it takes memory.
    """

    def __init__(self, work: float = math.inf, nbytes: float = math.inf) -> None:
        self._known: dict[tuple[Pattern, Pattern], Pattern] = {}
        self._work = work
        self._nbytes = self._largest = nbytes

    def __call__(self, a: Pattern, b: Pattern) -> Pattern:
        """Return the pattern of ``A @ B``, or raise :class:`TooLargeError`.

        It raises :class:`MemoryLimitError` if the machine has no room for the pattern.
        """
        pattern = self._known.get((a, b))
        if pattern is None:
            pattern = self._known[a, b] = self._product(a, b)
        return pattern

    def _product(self, a: Pattern, b: Pattern) -> Pattern:
        if "diagonal" in (a.kind, b.kind):
            return product(a, b)
        shape, sparse = (a.shape[0], b.shape[1]), "dense" not in (a.kind, b.kind)
        work = multiply_adds(a, b) if sparse else 0
        if work > self._work:
            raise TooLargeError
        full = shape[0] * shape[1]
        large = work > _EXACT or (not sparse and full > _EXACT)
        entries = product_nnz(a, b) if large or self._largest < math.inf else 0
        if entries > self._largest / 4 and 4 * (_nnz(a, b) if sparse else entries) > self._largest:
            raise TooLargeError
        if work > _EXACT and 2 * entries > full:
            return Pattern.dense(shape)
        if large and entries < full:
            check_memory(f"the pattern of the product of {a} and {b}", 4 * entries)
        pattern = product(a, b)
        taken = pattern.index_dtype.itemsize * (pattern.nnz + shape[0] + 1)
        taken *= pattern.kind == "general"
        if taken > self._nbytes:
            raise TooLargeError
        self._work -= work
        self._nbytes -= taken
        return pattern


class TooLargeError(Exception):
    """A product that :class:`PatternProducts` gave up."""


def block_diagonal(block: Pattern, count: int) -> Pattern:
    """Return the pattern of `count` copies of a matrix along a diagonal."""
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
    """Return the pattern of new, canonical arrays that nobody else holds."""
    dtype = index_dtype(shape, len(indices))
    indptr, indices = (array.astype(dtype, copy=False) for array in (indptr, indices))
    return _intern(indptr, indices, shape)


def counted(shape: tuple[int, int], nnz: int) -> Pattern:
    """Return a pattern with a number of entries but no places, only for counting."""
    return _new("general", shape, nnz, ("counted", shape, nnz))


def of_mask(mask: NDArray[np.bool_]) -> Pattern:
    """Return the pattern with an entry wherever a matrix is True."""
    (rows, cols), counts = mask.shape, np.count_nonzero(mask, axis=1)
    numbers = np.arange(cols, dtype=index_dtype((rows, cols), int(counts.sum())))
    columns = np.broadcast_to(numbers, mask.shape)[mask]
    return trusted(np.append(0, np.cumsum(counts)), columns, (rows, cols))


def of_keys(keys: NDArray[np.int64], shape: tuple[int, int]) -> Pattern:
    """Return the pattern of entries ``row * columns + column``, which increase."""
    rows, columns = np.divmod(keys, max(shape[1], 1))
    return trusted(indptr_of(rows, shape[0]), columns, shape)


def keys_of(pattern: Pattern) -> NDArray[np.int64]:
    """Return ``row * columns + column`` of every entry."""
    keys: NDArray[np.int64] = rows_of(pattern) * pattern.shape[1] + pattern.indices
    return keys


def places_in(whole: Pattern, part: Pattern) -> NDArray[np.int64]:
    """Return the places of a pattern's entries among those of a larger pattern."""
    return np.searchsorted(keys_of(whole), keys_of(part))


def union(patterns: Iterable[Pattern]) -> Pattern:
    """Return the pattern of all entries of patterns of one shape."""
    first, *others = dict.fromkeys(patterns)
    if not others:
        return first
    return of_keys(np.unique(np.concatenate([*map(keys_of, (first, *others))])), first.shape)


def rows_of(pattern: Pattern) -> NDArray[np.int64]:
    """Return the row of every entry, whose column is in ``pattern.indices``."""
    rows = np.arange(pattern.shape[0], dtype=np.int64)
    return np.repeat(rows, np.diff(pattern.indptr))


def indptr_of(rows: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the starts of the entries of `count` rows, and the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])


def index_dtype(shape: tuple[int, int], nnz: int) -> np.dtype[Any]:
    """Return int32 while it holds every index, row pointer and size; int64 otherwise."""
    return np.dtype(np.int32 if max(*shape, nnz) <= INT32_MAX else np.int64)


def check_shape(name: str, shape: Any) -> tuple[int, int]:
    """Return `shape` as two Python integers, or raise an error that names it."""
    try:
        check_ordered(shape)
        rows, cols = (operator.index(size) for size in shape)
    except Exception:  # of what are no two integers
        raise InputTypeError(f"{name} has shape {short(shape)}; expected (rows, cols)") from None
    if rows < 0 or cols < 0:
        raise InputError(f"{name} has shape {short((rows, cols))}; expected sizes of at least 0")
    if max(rows, cols) > _INT64_MAX:
        raise InputError(
            f"{name} has shape {short((rows, cols))}; expected sizes of at most {_INT64_MAX}"
        )
    return rows, cols


def check_ordered(sizes: Any) -> None:
    """Raise a TypeError for a set, a dict or bytes, which hold integers but are no sizes."""
    if not isinstance(sizes, (Sequence, np.ndarray)) or isinstance(sizes, (bytes, bytearray)):
        raise TypeError


def check_host(name: str, value: Any) -> None:
    """Raise for an array on a CUDA device."""
    if is_on_device(value) or type(value).__module__.startswith("cupyx."):
        raise DeviceError(
            f"{name} is a {type(value).__module__}.{type(value).__name__} on a CUDA device; "
            "expected an array in host memory (cupy.asnumpy, .get())"
        )


def check_index_arrays(
    name: str, indptr: ArrayLike, indices: ArrayLike, shape: tuple[int, int]
) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
    """Return contiguous, native copies of index arrays that are safe to follow; or raise an error.

    Rows may still be unsorted: see :func:`unsorted_row`. The copies are made before the checks: the
    caller's arrays may change at any time, and kernels follow the copies without checks.
    """
    checked: list[NDArray[Any]] = []
    for label, given in (("indptr", indptr), ("indices", indices)):
        check_host(f"{name} {label}", given)
        array = check_index_form(name, label, host_array(f"{name} {label}", given))
        if label == "indptr":
            check_row_pointers(name, array, shape)
        with Allocating(f"a copy of {name} {label}"):
            # The copy keeps its dtype: a cast to int32 could wrap a bad index into range.
            array = np.array(array, order="C")
        if array.dtype.kind == "u" and array.size and array.max() > _INT64_MAX:
            raise InputError(f"{name} has {label} beyond the range of int64")
        checked.append(array)
    indptr, indices = checked
    cols = shape[1]
    wide = np.int32 if indptr.dtype == indices.dtype == np.dtype(np.int32) else np.int64
    indptr, indices = (array.astype(wide, copy=False) for array in (indptr, indices))
    fault, at = kernels.find_fault(indptr, indices, cols)
    if fault:
        raise InputError(f"{name} has an {_describe_fault(fault, at, indptr, indices, cols)}")
    dtype = index_dtype(shape, len(indices))
    return indptr.astype(dtype, copy=False), indices.astype(dtype, copy=False)


def check_index_form(name: str, label: str, array: Any) -> Any:
    """Return an array of NumPy or CuPy that has one dimension and holds integers; or raise."""
    if array.size == 0 and array.dtype == np.float64:
        # An empty list becomes float64.
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
    """Return a fault of :func:`~sparsescan.kernels.symbolic.find_fault` in words."""
    if fault == kernels.START:
        return f"indptr that starts at {indptr[0]}; expected 0"
    if fault == kernels.FALL:
        return f"indptr that falls after row {at}; expected one that never does"
    if fault == kernels.END:
        return f"indptr that ends at {indptr[-1]}; expected {len(indices)}, as indices has"
    row = int(np.searchsorted(indptr, at, side="right")) - 1
    return f"index {indices[at]} in row {row}; expected columns 0 to {cols - 1}"


def unsorted_row(indptr: NDArray[Any], indices: NDArray[Any]) -> int:
    """Return the first row whose columns do not increase strictly, or -1."""
    return int(kernels.unsorted_row(indptr, indices))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _intern(indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int]) -> Pattern:
    """Return the unique pattern with these canonical arrays, which nobody else holds."""
    rows, cols = shape
    nnz = len(indices)
    if rows == cols == nnz and kernels.is_diagonal(indptr, indices):
        return Pattern.diagonal(rows)
    if nnz == rows * cols:
        return Pattern.dense(shape)
    digest = hashlib.blake2b(indptr.data, digest_size=16)
    digest.update(indices.data)
    key = (shape, nnz, digest.digest())
    with _lock:
        pattern = _interned.get(key)
        if pattern is None:
            pattern = _new("general", shape, nnz, key)
            pattern._indptr, pattern._indices = _frozen(indptr), _frozen(indices)
            _interned[key] = pattern
        return pattern


def _intern_kind(kind: Kind, shape: tuple[int, int], nnz: int) -> Pattern:
    key = (kind, shape)
    with _lock:
        pattern = _interned.get(key)
        if pattern is None:
            pattern = _interned[key] = _new(kind, shape, nnz, key)
        return pattern


def _new(kind: Kind, shape: tuple[int, int], nnz: int, key: tuple[Any, ...]) -> Pattern:
    pattern = object.__new__(Pattern)
    pattern._set(kind=kind, shape=shape, nnz=nnz, key=key)
    # The arrays of diagonal and dense patterns are made on demand.
    pattern._indptr = pattern._indices = None
    return pattern

"""Sparse matrices that share one pattern: over a batch, or over the steps of a chain."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .errors import InputError, InputTypeError
from .pattern import Pattern, check_host, check_index_arrays, check_shape, unsorted_row

__all__ = ["BatchedCSR", "CSRChain", "canonical", "check_dtype", "check_float"]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class _SharedPattern:
    """Values whose last axis follows one pattern."""

    _forms: ClassVar[dict[int, str]]  # the shapes that the values may have, by number of axes

    def __init__(
        self, data: ArrayLike, indices: ArrayLike, indptr: ArrayLike, shape: tuple[int, int]
    ) -> None:
        name = type(self).__name__
        shape = check_shape(name, shape)
        indptr, indices = check_index_arrays(name, indptr, indices, shape)
        array = self._check_data(data, len(indices))
        if unsorted_row(indptr, indices) >= 0:
            array, indices, indptr = canonical(array, indices, indptr, shape)
        self._pattern = Pattern(indptr, indices, shape, name=name)
        self._data = array
        self._check()

    @classmethod
    def from_pattern(cls, data: ArrayLike, pattern: Pattern) -> Any:
        """The same from values in the order of a :class:`Pattern`, which needs no more checks.

        Parameters
        ----------
        data : array_like
            The values; the last axis has length ``pattern.nnz``.
        pattern : Pattern
            The pattern.
        """
        made = object.__new__(cls)
        made._data = cls._check_data(data, pattern.nnz)
        made._pattern = pattern
        made._check()
        return made

    @classmethod
    def _check_data(cls, data: ArrayLike, nnz: int) -> NDArray[np.floating[Any]]:
        array = check_float(f"{cls.__name__} data", data)
        if array.ndim not in cls._forms or array.shape[-1] != nnz:
            expected = " or ".join(cls._forms.values())
            raise InputError(
                f"{cls.__name__} has data of shape {array.shape}; expected {expected} with "
                f"nnz = {nnz}"
            )
        return array

    def _check(self) -> None:
        """Raise what only one of the classes refuses."""

    @property
    def data(self) -> NDArray[np.floating[Any]]:
        """The values, in the order of the pattern: the array that was passed, if canonical."""
        return self._data

    @property
    def pattern(self) -> Pattern:
        """The pattern that all matrices share."""
        return self._pattern

    @property
    def indices(self) -> NDArray[np.integer[Any]]:
        """Column indices of the pattern, shape ``(nnz,)``."""
        return self._pattern.indices

    @property
    def indptr(self) -> NDArray[np.integer[Any]]:
        """Row pointers of the pattern, shape ``(rows + 1,)``."""
        return self._pattern.indptr

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``(rows, cols)`` of one matrix."""
        return self._pattern.shape

    @property
    def nnz(self) -> int:
        """Stored entries of one matrix."""
        return self._pattern.nnz

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self._data.dtype


class BatchedCSR(_SharedPattern):
    """One CSR pattern with values for each sample of a batch.

    Parameters
    ----------
    data : array_like of float32 or float64, shape (batch, nnz)
        Values of every sample.
    indices : array_like of int, shape (nnz,)
        Column indices.
    indptr : array_like of int, shape (rows + 1,)
        Row pointers.
    shape : tuple of int
        ``(rows, cols)`` of one matrix.

    Raises
    ------
    InputError
        If the arrays are no CSR structure or their sizes do not agree.
    InputTypeError
        If a dtype is not supported.

    Notes
    -----
    Rows with unsorted or duplicate columns are made canonical (sorted, duplicates summed) on a
    copy. The index arrays are copied; canonical values are not.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> relu = sparsescan.BatchedCSR(np.ones((16, 3)), [0, 1, 2], [0, 1, 2, 3], (3, 3))
    >>> relu
    BatchedCSR((3, 3), batch=16, nnz=3, float64)
    """

    _forms: ClassVar = {2: "(batch, nnz)"}

    @property
    def batch(self) -> int:
        """Number of samples."""
        return len(self._data)

    def __getitem__(self, sample: int) -> sp.csr_array:
        """One sample as a SciPy array that shares the values."""
        return sp.csr_array((self._data[sample], self.indices, self.indptr), shape=self.shape)

    def __repr__(self) -> str:
        return f"BatchedCSR({self.shape}, batch={self.batch}, nnz={self.nnz}, {self.dtype})"


class CSRChain(_SharedPattern):
    """A chain whose steps all have one CSR pattern: values for each step, and maybe each sample.

    Parameters
    ----------
    data : array_like of float32 or float64, shape (n, nnz) or (n, batch, nnz)
        Values of every step, from the LAST layer to the first. A reversed view such as ``J[::-1]``
        of time-ordered values is used as it is, without a copy.
    indices : array_like of int, shape (nnz,)
        Column indices.
    indptr : array_like of int, shape (rows + 1,)
        Row pointers.
    shape : tuple of int
        ``(rows, cols)`` of one Jacobian; more than one step needs ``rows == cols``.

    Raises
    ------
    InputError
        If the arrays are no CSR structure, their sizes do not agree, or the steps do not chain.
    InputTypeError
        If a dtype is not supported.

    Notes
    -----
    Rows with unsorted or duplicate columns are made canonical (sorted, duplicates summed) on a
    copy. The index arrays are copied; canonical values are not.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> chain = sparsescan.CSRChain(np.ones((100, 4)), [0, 0, 1, 1], [0, 1, 3, 4], (3, 3))
    >>> chain
    CSRChain((3, 3), n=100, nnz=4, float64)
    >>> sparsescan.exclusive_scan(np.ones(3), chain).shape
    (100, 3)
    """

    _forms: ClassVar = {2: "(n, nnz)", 3: "(n, batch, nnz)"}

    def _check(self) -> None:
        if len(self) > 1 and self.shape[0] != self.shape[1]:
            raise InputError(
                f"CSRChain has {len(self)} steps of shape {self.shape}; expected a square shape, "
                "so that they chain"
            )

    @property
    def batch(self) -> int | None:
        """Number of samples, or None if the values have no batch axis."""
        return self._data.shape[1] if self._data.ndim == 3 else None

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"CSRChain({self.shape}, n={len(self)}{batch}, nnz={self.nnz}, {self.dtype})"


def check_float(name: str, array: ArrayLike) -> NDArray[np.floating[Any]]:
    """`array` as a NumPy array of float32 or float64 in native byte order, or an error."""
    if type(array) is np.ndarray and array.dtype in _FLOATS and array.dtype.isnative:
        return array
    check_host(name, array)
    try:
        array = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"{name} is not an array: {error}") from None
    if array.dtype.newbyteorder("=") not in _FLOATS:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected float32 or float64")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """`dtype` if it is float32 or float64, or an error that names it."""
    try:
        chosen = np.dtype(dtype)
    except TypeError:
        raise InputTypeError(f"dtype is {dtype!r}; expected float32 or float64") from None
    if chosen not in (np.float32, np.float64):
        raise InputTypeError(f"dtype is {chosen}; expected float32 or float64")
    return chosen


def canonical(
    data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], shape: tuple[int, int]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Sorted columns without duplicates; the values of duplicates are summed."""
    row_of = np.repeat(np.arange(shape[0]), np.diff(indptr))
    order = np.lexsort((indices, row_of))
    rows, cols = row_of[order], indices[order]
    new = np.ones(len(order), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
    data = np.add.reduceat(data[..., order], np.flatnonzero(new), axis=-1)
    counts = np.bincount(rows[new], minlength=shape[0])
    return data, cols[new], np.concatenate([[0], np.cumsum(counts)])

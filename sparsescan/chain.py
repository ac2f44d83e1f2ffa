"""Chain: what the caller passed, checked once and split into patterns and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit
from numpy.typing import NDArray

from .containers import BatchedCSR, CSRChain, canonical, check_float
from .errors import InputError, InputTypeError, PatternMismatchError
from .kernels._memory import address_of
from .pattern import Pattern, check_host, check_index_arrays, check_shape, unsorted_row

__all__ = [
    "Chain",
    "LocalGrads",
    "check_chain",
    "length",
    "pattern_of",
    "read_grad",
]

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_CSR_TYPES = (sp.csr_array, sp.csr_matrix)
_ORDER = "order them from the last layer to the first, each transposed"


class Chain:
    """The Jacobians of a scan: a pattern for each, and where its values are.

    A chain can be read into again, so that running a plan allocates nothing that grows with it.

    Parameters
    ----------
    n : int
        Number of Jacobians.

    Attributes
    ----------
    leaves : ndarray of int64, shape (n, 2)
        Address of the values of every Jacobian, and the bytes from one sample to the next (0 if the
        samples share them). Valid until :meth:`release`.
    batch : int or None
        Number of samples, if any Jacobian has a batch axis.
    dtype : dtype
        What the Jacobians promote to; float32 for an empty chain.
    values : list of ndarray
        Values of every Jacobian in the order of its pattern, ``(nnz,)`` or ``(batch, nnz)``; None
        for those that came as one array.
    stacked : bool
        Whether they came as one array.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.leaves = np.zeros((n, 2), np.int64)
        self.batch: int | None = None
        self.dtype = _FLOAT32
        self.stacked = False
        self._steps = np.arange(n)
        # What the addresses point into: an array for each Jacobian, or one for all.
        self.values: list[Any] = [None] * n
        self._stack: NDArray[Any] | None = None
        self._mixed = False
        # Patterns that have been found to be one.
        self._uniform: Sequence[Pattern] | None = None

    def read(self, jacobians: Any, patterns: Sequence[Pattern] | None = None) -> Sequence[Pattern]:
        """Take Jacobians, and return their patterns.

        With `patterns` given they must have these, and may be bare values in that order.

        Raises
        ------
        InputError
            If a Jacobian is malformed, or they do not chain, or batch sizes differ.
        InputTypeError
            If a type, a sparse format or a dtype is not supported.
        PatternMismatchError
            If a Jacobian has another pattern than `patterns` says.
        """
        if length(jacobians) != self.n:
            raise InputError(
                f"jacobians has {length(jacobians)} steps; expected {self.n}, as the plan was made "
                "for"
            )
        self.batch = None
        self.stacked = isinstance(jacobians, (CSRChain, np.ndarray))
        read = self._read_stack if self.stacked else self._read_sequence
        found = read(jacobians, patterns)
        return check_chain(found) if patterns is None else patterns

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make every value of `dtype`: a copy of those that are not."""
        if self.dtype == dtype and not self._mixed:
            return
        if self._stack is not None:
            self._take_stack(self._stack.astype(dtype))
            return
        for k, array in enumerate(self.values):
            if array is not None and array.dtype != dtype:
                self._take(k, array.astype(dtype))

    def release(self) -> None:
        """Forget the caller's arrays."""
        if self._stack is not None:
            self._stack = None
            return
        for k in range(self.n):
            self.values[k] = None

    def _read_stack(self, jacobians: Any, patterns: Sequence[Pattern] | None) -> Sequence[Pattern]:
        name = "jacobians"
        if patterns is not None and patterns is not self._uniform:
            if any(pattern is not patterns[0] for pattern in patterns):
                raise InputError(
                    f"{name} is one array, but the plan has several patterns; pass a list"
                )
            self._uniform = patterns
        if patterns is not None and not patterns:
            self.dtype, self._mixed = _FLOAT32, False
            return patterns
        expected = patterns[0] if patterns is not None else None
        if isinstance(jacobians, CSRChain):
            pattern, values = jacobians.pattern, jacobians.data
            if expected is not None and pattern is not expected:
                raise _mismatch("jacobians[0]", expected, str(pattern))
        else:
            pattern, values = _split_dense(name, jacobians, 1, expected)
        self.dtype, self._mixed = values.dtype, False
        if values.ndim == 3:
            self.batch = values.shape[1]
        self._take_stack(values)
        return patterns if patterns is not None else [pattern] * self.n

    def _take_stack(self, values: NDArray[Any]) -> None:
        values = _walkable(values)
        self._stack = values
        np.multiply(self._steps, values.strides[0], out=self.leaves[:, 0])
        self.leaves[:, 0] += values.ctypes.data
        self.leaves[:, 1] = values.strides[1] if values.ndim == 3 else 0

    def _read_sequence(
        self, jacobians: Any, patterns: Sequence[Pattern] | None
    ) -> Sequence[Pattern]:
        found: list[Pattern] = []
        # Steps often repeat a pattern without sharing its arrays: compare with one that passed the
        # checks, by size, before checking anew.
        known: dict[Any, Pattern] = {}
        dtypes = set()
        reference: Pattern | None = None
        k = -1
        # Never past the end of the table, whatever the sequence says of its length.
        for k, jacobian in zip(range(self.n), jacobians, strict=False):
            if type(jacobian) in _CSR_TYPES:
                data, shape = jacobian.data, jacobian.shape
                wanted = reference
                if not type(data) is type(jacobian.indices) is type(jacobian.indptr) is np.ndarray:
                    wanted = None
                elif patterns is not None:
                    wanted = patterns[k]
                elif wanted is None or shape != wanted.shape or data.size != wanted.nnz:
                    wanted = known.get((shape, data.size))
                if wanted is not None and shape == wanted.shape:
                    if wanted is not reference:
                        reference, columns, pointers = wanted, wanted.indices, wanted.indptr
                    indices, indptr, dtype = jacobian.indices, jacobian.indptr, data.dtype
                    # A dtype that is the same but not this object takes the long way.
                    if (
                        (dtype is _FLOAT64 or dtype is _FLOAT32)
                        and (indices.dtype is _INT32 or indices.dtype is _INT64)
                        and indices.dtype is indptr.dtype
                        and data.ndim == indices.ndim == indptr.ndim == 1
                        and _note_if_equal(data, indices, indptr, columns, pointers, self.leaves, k)
                    ):
                        self.values[k] = data
                        dtypes.add(dtype)
                        if patterns is None:
                            found.append(wanted)
                        continue
            expected = None if patterns is None else patterns[k]
            pattern, values = _split(f"jacobians[{k}]", jacobian, expected)
            if patterns is None:
                known[pattern.shape, pattern.nnz] = pattern
                found.append(pattern)
            dtypes.add(values.dtype)
            self._take(k, values)
            if values.ndim == 2:
                if self.batch not in (None, values.shape[0]):
                    raise InputError(
                        f"jacobians[{k}] has a batch of {values.shape[0]}, an earlier one of "
                        f"{self.batch}; expected one batch size"
                    )
                self.batch = values.shape[0]
        if k + 1 != self.n:
            raise InputError(f"jacobians gave {k + 1} steps; expected {self.n}, its length")
        self._mixed = len(dtypes) > 1
        self.dtype = np.result_type(*dtypes) if dtypes else _FLOAT32
        return found if patterns is None else patterns

    def _take(self, k: int, values: NDArray[Any]) -> None:
        values = _walkable(values)
        self.values[k] = values
        self.leaves[k, 0] = address_of(values)
        self.leaves[k, 1] = values.strides[0] if values.ndim == 2 else 0


def length(jacobians: Any) -> int:
    """Number of Jacobians, or an error if `jacobians` is no sequence of them."""
    if isinstance(jacobians, np.ndarray):
        if jacobians.ndim < 2:
            raise InputError(
                f"jacobians has shape {jacobians.shape}; expected (n, rows, cols) or "
                "(n, batch, rows, cols)"
            )
    elif not isinstance(jacobians, CSRChain):
        check_host("jacobians", jacobians)
        if sp.issparse(jacobians) or isinstance(jacobians, (BatchedCSR, str, bytes)):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence of Jacobians"
            )
        if not isinstance(jacobians, Sequence):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence such as a list, "
                "a CSRChain, or a NumPy array (n, rows, cols) or (n, batch, rows, cols)"
            )
    return len(jacobians)


def pattern_of(k: int, jacobian: Any) -> Pattern:
    """The pattern of the `k`-th Jacobian, which may be a bare :class:`Pattern`."""
    if isinstance(jacobian, Pattern):
        return jacobian
    return _split(f"jacobians[{k}]", jacobian, None)[0]


def check_chain(patterns: Sequence[Pattern]) -> Sequence[Pattern]:
    """`patterns`, or an error if their shapes do not chain."""
    previous = None
    for k, pattern in enumerate(patterns):
        if previous is not None and pattern.shape[1] != previous.shape[0]:
            raise InputError(
                f"jacobians[{k}] has shape {pattern.shape}, but jacobians[{k - 1}] has "
                f"{previous.shape[0]} rows; expected (·, {previous.shape[0]}): {_ORDER}"
            )
        previous = pattern
    return patterns


def read_grad(grad: Any, size: int | None, batch: int | None) -> NDArray[np.floating[Any]]:
    """The gradient at the end of the chain, shape ``(size,)`` or ``(batch, size)``."""
    array = check_float("grad", grad)
    wanted = "d_n" if size is None else str(size)
    if batch is not None:
        if array.ndim != 2 or array.shape != (batch, array.shape[1] if size is None else size):
            raise InputError(
                f"grad has shape {array.shape}; expected ({batch}, {wanted}): the Jacobians have a "
                f"batch of {batch} and {wanted} columns"
            )
    elif array.ndim not in (1, 2) or size not in (None, array.shape[-1]):
        raise InputError(f"grad has shape {array.shape}; expected ({wanted},) or (batch, {wanted})")
    return array


class LocalGrads:
    """Gradients that are added to those a scan returns, checked.

    Parameters
    ----------
    local_grads : None or sequence or ndarray
        None, or for each returned gradient None or an array of its shape.
    count : int
        Number of returned gradients.
    sizes : sequence of int
        Length of each, and maybe of more.
    batch_shape : tuple of int
        ``()`` or ``(batch,)``.
    """

    def __init__(
        self, local_grads: Any, count: int, sizes: Sequence[int], batch_shape: tuple[int, ...]
    ) -> None:
        self.values: list[NDArray[Any] | None] = []
        if local_grads is not None:
            self.values = _check_local_grads(local_grads, count, sizes, batch_shape)
        self.dtypes = {array.dtype for array in self.values if array is not None}
        self.given = bool(self.dtypes)

    def add_first(self, grad: NDArray[Any], out: NDArray[Any]) -> None:
        """Write the first gradient, with what is added to it, to `out`."""
        out[...] = grad
        if self.given and self.values[0] is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                out += self.values[0]

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make all of `dtype` and contiguous."""
        self.values = [
            None if array is None else np.ascontiguousarray(array, dtype) for array in self.values
        ]

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        if self.given:
            addresses[:] = 0
            for k, array in enumerate(self.values):
                if array is not None:
                    addresses[k] = array.ctypes.data


def _check_local_grads(
    local_grads: Any, count: int, sizes: Sequence[int], batch_shape: tuple[int, ...]
) -> list[NDArray[Any] | None]:
    check_host("local_grads", local_grads)
    if (
        not isinstance(local_grads, (Sequence, np.ndarray))
        or isinstance(local_grads, (str, bytes))
        or getattr(local_grads, "shape", None) == ()
    ):
        raise InputTypeError(
            f"local_grads is a {type(local_grads).__name__}; expected a sequence of arrays or None"
        )
    if len(local_grads) != count:
        raise InputError(
            f"local_grads has {len(local_grads)} entries; expected {count}, one for each returned "
            "gradient"
        )
    arrays: list[NDArray[Any] | None] = []
    for k, local in enumerate(local_grads):
        if local is not None:
            local = check_float(f"local_grads[{k}]", local)
            if local.shape != (*batch_shape, sizes[k]):
                raise InputError(
                    f"local_grads[{k}] has shape {local.shape}; expected "
                    f"{(*batch_shape, sizes[k])}, the shape of the gradient it is added to"
                )
        arrays.append(local)
    return arrays


def _split(
    name: str, jacobian: Any, expected: Pattern | None
) -> tuple[Pattern, NDArray[np.floating[Any]]]:
    """Pattern and values, shape ``(nnz,)`` or ``(batch, nnz)``, of one Jacobian."""
    if type(jacobian) is np.ndarray:
        return _split_dense(name, jacobian, 0, expected)
    if isinstance(jacobian, _CSR_TYPES):
        pattern, values = _split_csr(name, jacobian)
    elif isinstance(jacobian, BatchedCSR):
        pattern, values = jacobian.pattern, jacobian.data
    elif isinstance(jacobian, Pattern):
        raise InputTypeError(f"{name} is a Pattern, which has no values; expected a Jacobian")
    elif sp.issparse(jacobian):
        raise InputTypeError(
            f"{name} is a {type(jacobian).__name__}; expected CSR: convert it with .tocsr()"
        )
    elif isinstance(jacobian, CSRChain):
        raise InputTypeError(f"{name} is a CSRChain; expected one Jacobian")
    else:
        return _split_dense(name, jacobian, 0, expected)
    if expected is not None and pattern is not expected:
        raise _mismatch(name, expected, str(pattern))
    return pattern, values


def _split_dense(
    name: str, jacobian: Any, steps: int, expected: Pattern | None
) -> tuple[Pattern, NDArray[np.floating[Any]]]:
    """The same for a dense array, or for values of an expected pattern.

    `steps` is 1 if the array has a leading axis for the steps of a chain, else 0.
    """
    array = check_float(name, jacobian)
    shape = array.shape
    leading = "(n, " if steps else "("
    if expected is not None:
        is_full = expected.nnz == expected.shape[0] * expected.shape[1]
        if is_full and array.ndim in (steps + 2, steps + 3) and shape[-2:] == expected.shape:
            return expected, array.reshape(*shape[:-2], expected.nnz)
        if array.ndim in (steps + 1, steps + 2) and shape[-1] == expected.nnz:
            return expected, array
        raise _mismatch(
            name,
            expected,
            f"an array of shape {shape}; values have shape {leading}nnz) or {leading}batch, nnz)",
        )
    if array.ndim not in (steps + 2, steps + 3):
        raise InputError(
            f"{name} has shape {shape}; expected {leading}rows, cols) or {leading}batch, rows, "
            "cols)"
        )
    pattern = Pattern.dense(shape[-2:])
    return pattern, array.reshape(*shape[:-2], pattern.nnz)


def _split_csr(name: str, jacobian: Any) -> tuple[Pattern, NDArray[np.floating[Any]]]:
    shape = check_shape(name, jacobian.shape)
    indptr, indices = check_index_arrays(name, jacobian.indptr, jacobian.indices, shape)
    values = check_float(name, jacobian.data)
    if values.shape != indices.shape:
        raise InputError(
            f"{name} has data of shape {values.shape}; expected {indices.shape}, as its indices"
        )
    if unsorted_row(indptr, indices) >= 0:
        values, indices, indptr = canonical(values, indices, indptr, shape)
    return Pattern(indptr, indices, shape, name=name), values


def _mismatch(name: str, expected: Pattern, found: str) -> PatternMismatchError:
    return PatternMismatchError(f"{name} is {found}; expected {expected}, as the plan was made for")


def _walkable(values: NDArray[Any]) -> NDArray[Any]:
    """`values` such that the kernels can walk the last axis; a copy where they could not."""
    if values.flags.c_contiguous and values.flags.aligned:
        return values
    last_is_dense = values.shape[-1] <= 1 or values.strides[-1] == values.itemsize
    if last_is_dense and values.flags.aligned:
        return values
    return np.ascontiguousarray(values)


@njit(nogil=True, cache=True)
def _note_if_equal(data, indices, indptr, columns, pointers, leaves, k):  # type: ignore[no-untyped-def]
    """Note the address of values that the kernels can walk, if they have this pattern."""
    nnz = len(columns)
    address = data.ctypes.data
    if len(indptr) != len(pointers) or len(indices) != nnz or len(data) != nnz:
        return False
    if (nnz > 1 and data.strides[0] != data.itemsize) or address % data.itemsize:
        return False
    # No early exit: equal is the rule, and the plain loop runs in vectors.
    differ = False
    for i in range(np.uint64(len(indptr))):
        differ |= indptr[i] != pointers[i]
    for p in range(np.uint64(nnz)):
        differ |= indices[p] != columns[p]
    if not differ:
        leaves[k, 0] = address
        leaves[k, 1] = 0
    return not differ

"""Chain: what the caller passed, checked once and split into patterns and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit
from numpy.typing import NDArray

from . import _arrays
from ._arrays import (
    beside,
    check_array,
    check_one_place,
    contiguous,
    device_of,
    is_cupy,
    is_on_device,
    on_device,
)
from .containers import BatchedCSR, CSRChain, PeriodicChain, layout_of
from .errors import InputError, InputTypeError, PatternMismatchError
from .kernels._memory import address_of
from .pattern import Pattern, check_shape

__all__ = [
    "Chain",
    "LocalGrads",
    "check_chain",
    "check_places",
    "is_stack",
    "length",
    "pattern_of",
    "read_grad",
]

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_CSR_TYPES = (sp.csr_array, sp.csr_matrix)
_CHAINS = (CSRChain, PeriodicChain)
_ORDER = "order them from the last layer to the first, each transposed"


class Chain:
    """The Jacobians of a scan: a pattern for each, and where its values are.

    A chain can be read into again, so that running a plan allocates nothing that grows with it. All
    values lie in host memory, or on one CUDA device.

    Parameters
    ----------
    n : int
        Number of Jacobians.

    Attributes
    ----------
    leaves : ndarray of int64, shape (n, 2)
        Address of the values of every Jacobian, and the bytes from one sample to the next (0 if the
        samples share them). Valid until :meth:`release`. The addresses of a chain that came as one
        array on a device are not filled in.
    stack : tuple of int, or None
        Address of the values of the first Jacobian, bytes to the next one and to the next sample,
        if they came as one array. Valid as long.
    device : int or None
        The CUDA device that has the values; None for host memory.
    batch : int or None
        Number of samples, if any Jacobian has a batch axis.
    dtype : dtype
        What the Jacobians promote to; float32 for an empty chain.
    values : list of ndarray
        Values of every Jacobian in the order of its pattern, ``(nnz,)`` or ``(batch, nnz)``; None
        for those that came in stacks.
    period : int
        In how many arrays they came, that take turns: 1 for one array of all; 0 for a sequence.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.leaves = np.zeros((n, 2), np.int64)
        self.batch: int | None = None
        self.dtype = _FLOAT32
        self.device: int | None = None
        self.period = 0
        self.stack: tuple[int, int, int] | None = None
        self._steps = np.arange(n)
        # What the addresses point into: an array for each Jacobian, or a few that take turns.
        self.values: list[Any] = [None] * n
        self._stacks: list[Any] = []
        self._mixed = False
        # Patterns that have been found to be these in turn.
        self._taken: Sequence[Pattern] | None = None
        self._turns: list[Pattern] = []

    def read(self, jacobians: Any, patterns: Sequence[Pattern] | None = None) -> Sequence[Pattern]:
        """Take Jacobians, and return their patterns.

        With `patterns` given they must have these, and may be bare values in that order.

        Index arrays of CuPy's matrices are checked on their device, which is waited for; but not a
        second time, as long as they live, so that writing new values into a matrix, or making one
        from the same index arrays, costs nothing.

        Raises
        ------
        DeviceError
            If not all values are in host memory or on one device.
        InputError
            If a Jacobian is malformed, or they do not chain, or batch sizes differ.
        InputTypeError
            If a type, a sparse format or a dtype is not supported.
        PatternMismatchError
            If a Jacobian has another pattern than `patterns` says.
        """
        self.period = 0
        if is_stack(jacobians):
            self.period = len(jacobians.patterns) if isinstance(jacobians, PeriodicChain) else 1
        if is_on_device(jacobians):
            jacobians = on_device(jacobians, "jacobians")
        if length(jacobians) != self.n:
            raise InputError(
                f"jacobians has {length(jacobians)} steps; expected {self.n}, as the plan was made "
                "for"
            )
        self.batch = self.device = self.stack = None
        self._stacks = []
        if isinstance(jacobians, PeriodicChain):
            found = self._read_periodic(jacobians, patterns)
        elif self.period:
            found = self._read_stack(jacobians, patterns)
        else:
            found = self._read_sequence(jacobians, patterns)
        return check_chain(found) if patterns is None else patterns

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make every value of `dtype`: a copy of those that are not."""
        if self.dtype == dtype and not self._mixed:
            return
        if self._stacks:
            self._take_stacks([contiguous(stack, dtype) for stack in self._stacks])
            return
        for k, array in enumerate(self.values):
            if array is not None and array.dtype != dtype:
                self._take(k, contiguous(array, dtype))

    def upload(self) -> None:
        """Copy the values from host memory to the current device: one transfer."""
        if self._stacks:
            stacks = [_arrays.upload(stack) for stack in self._stacks]
            self.device = device_of(stacks[0])
            self._take_stacks(stacks)
            return
        values = _arrays.upload_all(self.values, self.dtype)
        for k, array in enumerate(values):
            self.device = device_of(array)
            self._take(k, array)

    def array(self, k: int) -> Any:
        """The values of the `k`-th Jacobian, ``(nnz,)`` or ``(batch, nnz)``."""
        if not self._stacks:
            return self.values[k]
        step, turn = divmod(k, self.period)
        stack = self._stacks[turn]
        return stack if stack.ndim == 1 else stack[step]

    def release(self) -> None:
        """Forget the caller's arrays."""
        if self._stacks:
            self._stacks = []
            return
        for k in range(self.n):
            self.values[k] = None

    def _read_stack(self, jacobians: Any, patterns: Sequence[Pattern] | None) -> Sequence[Pattern]:
        name = "jacobians"
        if patterns and self._turn_of(patterns, [patterns[0]]) is not None:
            raise InputError(f"{name} is one array, but the plan has several patterns; pass a list")
        if patterns is not None and not patterns:
            self.dtype, self._mixed = _FLOAT32, False
            values = jacobians.data if isinstance(jacobians, CSRChain) else jacobians
            self.device = device_of(values)
            return patterns
        expected = patterns[0] if patterns is not None else None
        if isinstance(jacobians, CSRChain):
            pattern, values = jacobians.pattern, jacobians.data
            if expected is not None and pattern is not expected:
                raise _mismatch("jacobians[0]", expected, str(pattern))
        else:
            pattern, values = _split_dense(name, jacobians, 1, expected)
        self.dtype, self._mixed = values.dtype, False
        self.device = device_of(values)
        if values.ndim == 3:
            self.batch = values.shape[1]
        self._take_stacks([values])
        return patterns if patterns is not None else [pattern] * self.n

    def _read_periodic(
        self, jacobians: PeriodicChain, patterns: Sequence[Pattern] | None
    ) -> Sequence[Pattern]:
        turns = jacobians.patterns
        if patterns is not None:
            k = self._turn_of(patterns, turns)
            if k is not None:
                raise _mismatch(f"jacobians[{k}]", patterns[k], str(turns[k % len(turns)]))
        self.batch, self.dtype = jacobians.batch, jacobians.dtype
        self._mixed = any(array.dtype != self.dtype for array in jacobians.values)
        self.device = device_of(jacobians.values[0])
        for j, array in enumerate(jacobians.values):
            check_one_place(f"values[{j}]", device_of(array), "values[0]", self.device)
        self._take_stacks(jacobians.values)
        return patterns if patterns is not None else turns * jacobians.steps

    def _turn_of(self, patterns: Sequence[Pattern], turns: list[Pattern]) -> int | None:
        """The first of the patterns that is another one than its turn says; None if there is none.

        What has been found to be right is not looked at again.
        """
        if patterns is not self._taken or turns != self._turns:
            for k, pattern in enumerate(patterns):
                if pattern is not turns[k % len(turns)]:
                    return k
            self._taken, self._turns = patterns, turns
        return None

    def _take_stacks(self, stacks: Sequence[Any]) -> None:
        self._stacks = [_walkable(stack) for stack in stacks]
        period = len(self._stacks)
        for turn, stack in enumerate(self._stacks):
            # CuPy has no address for an array without elements, but to kernels 0 says that it is
            # none.
            address = _arrays.address_of(stack) or stack.itemsize
            step = stack.strides[0] if stack.ndim > 1 else 0
            sample = stack.strides[1] if stack.ndim == 3 else 0
            addresses, samples = self.leaves[turn::period].T
            samples[:] = sample
            if period == 1:
                self.stack = address, step, sample
            if self.device is None or period > 1:
                np.multiply(self._steps[: len(addresses)], step, out=addresses)
                addresses += address

    def _read_sequence(
        self, jacobians: Any, patterns: Sequence[Pattern] | None
    ) -> Sequence[Pattern]:
        found: list[Pattern] = []
        # Steps often repeat a pattern without sharing its arrays: compare with one that passed the
        # checks, by size, before checking anew.
        known: dict[Any, Pattern] = {}
        dtypes = set()
        reference: Pattern | None = None
        # The types that may go the short way, which is for host memory.
        short: tuple[type, ...] = _CSR_TYPES
        k = -1
        # Never past the end of the table, whatever the sequence says of its length.
        for k, jacobian in zip(range(self.n), jacobians, strict=False):
            if type(jacobian) in short:
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
            device = None if type(values) is np.ndarray else device_of(values)
            if k == 0 and device is not None:
                self.device, short = device, ()
            elif device != self.device:
                check_one_place(f"jacobians[{k}]", device, "jacobians[0]", self.device)
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

    def _take(self, k: int, values: Any) -> None:
        values = _walkable(values)
        self.values[k] = values
        self.leaves[k, 0] = address_of(values) if self.device is None else values.data.ptr
        self.leaves[k, 1] = values.strides[0] if values.ndim == 2 else 0


def is_stack(jacobians: Any) -> bool:
    """Whether a chain comes as one array, a CSRChain or a PeriodicChain."""
    return isinstance(jacobians, (*_CHAINS, np.ndarray)) or is_on_device(jacobians)


def length(jacobians: Any) -> int:
    """Number of Jacobians, or an error if `jacobians` is no sequence of them."""
    if is_stack(jacobians) and not isinstance(jacobians, _CHAINS):
        if is_on_device(jacobians):
            jacobians = on_device(jacobians, "jacobians")
        if jacobians.ndim < 2:
            raise InputError(
                f"jacobians has shape {jacobians.shape}; expected (n, rows, cols) or "
                "(n, batch, rows, cols)"
            )
    elif not isinstance(jacobians, _CHAINS):
        if _is_sparse(jacobians) or isinstance(jacobians, (BatchedCSR, str, bytes)):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence of Jacobians"
            )
        if not isinstance(jacobians, Sequence):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence such as a list, "
                "a CSRChain, a PeriodicChain, or an array (n, rows, cols) or (n, batch, rows, cols)"
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


def read_grad(grad: Any, size: int | None, batch: int | None) -> Any:
    """The gradient at the end of the chain, shape ``(size,)`` or ``(batch, size)``."""
    array = check_array("grad", grad)
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


def check_places(grad: Any, chain: Chain, local: LocalGrads) -> int | None:
    """The device that all input of a scan lies on, None for host memory; or an error."""
    device = device_of(grad)
    if chain.n:
        check_one_place("grad", device, "jacobians", chain.device)
    if local.given:
        check_one_place("local_grads", local.device, "grad", device)
    return device


class LocalGrads:
    """Gradients that are added to those a scan returns, checked.

    Parameters
    ----------
    local_grads : None or sequence or array
        None, or for each returned gradient None or an array of its shape.
    count : int
        Number of returned gradients.
    sizes : sequence of int
        Length of each, and maybe of more.
    batch_shape : tuple of int
        ``()`` or ``(batch,)``.
    period : int
        If more than 1, `local_grads` has one array or None for each of so many, that take turns.

    Attributes
    ----------
    given : bool
        Whether there is anything to add.
    dtypes : set of dtype
        What the arrays are of.
    device : int or None
        The CUDA device that has them; None for host memory.
    """

    def __init__(
        self,
        local_grads: Any,
        count: int,
        sizes: Sequence[int],
        batch_shape: tuple[int, ...],
        period: int = 0,
    ) -> None:
        # What was passed: arrays that take turns, or one for each gradient; some may be None.
        self._stacks: list[Any] = []
        self._list: list[Any] = []
        self.device: int | None = None
        if is_on_device(local_grads):
            local_grads = on_device(local_grads, "local_grads")
        if local_grads is not None:
            sizes = sizes[:count]
            if period > 1:
                self._read_periodic(local_grads, sizes, batch_shape, period)
                local_grads = None
        if local_grads is not None:
            _check_count(local_grads, count)
            is_array = isinstance(local_grads, np.ndarray) or is_cupy(local_grads)
            if count and is_array and local_grads.dtype in (_FLOAT32, _FLOAT64):
                self._read_stack(local_grads, sizes, batch_shape)
            else:
                self._read_list(local_grads, sizes, batch_shape)
        given = self._stacks or self._list
        self.dtypes = {array.dtype for array in given if array is not None}
        self.given = bool(self.dtypes)

    def _read_periodic(
        self, stacks: Any, sizes: Sequence[int], batch_shape: tuple[int, ...], period: int
    ) -> None:
        _check_count(stacks, period, "pattern")
        given = []
        for turn, stack in enumerate(stacks):
            if stack is not None:
                name = f"local_grads[{turn}]"
                stack = check_array(name, stack)
                own = sizes[turn::period]
                if stack.shape != (len(own), *batch_shape, *own[:1]):
                    raise InputError(
                        f"{name} has shape {stack.shape}; expected "
                        f"{(len(own), *batch_shape, *own[:1])}, the shape of the gradients it is "
                        "added to"
                    )
                given.append((name, device_of(stack)))
                check_one_place(name, given[-1][1], *given[0])
                self.device = given[0][1]
            self._stacks.append(stack)

    def _read_stack(self, stack: Any, sizes: Sequence[int], batch_shape: tuple[int, ...]) -> None:
        stack = check_array("local_grads", stack)
        self._stacks, self.device = [stack], device_of(stack)
        shape = stack.shape[1:]
        if shape != (*batch_shape, sizes[0]) or len(set(sizes)) > 1:
            for k, size in enumerate(sizes):
                if shape != (*batch_shape, size):
                    raise _wrong_shape(k, shape, (*batch_shape, size))

    def _read_list(self, arrays: Any, sizes: Sequence[int], batch_shape: tuple[int, ...]) -> None:
        first = -1
        for k, (array, size) in enumerate(zip(arrays, sizes, strict=False)):
            if array is not None:
                name = f"local_grads[{k}]"
                array = check_array(name, array)
                if array.shape != (*batch_shape, size):
                    raise _wrong_shape(k, array.shape, (*batch_shape, size))
                device = None if type(array) is np.ndarray else device_of(array)
                if first < 0:
                    first, self.device = k, device
                elif device != self.device:
                    check_one_place(name, device, f"local_grads[{first}]", self.device)
            self._list.append(array)

    @property
    def stack(self) -> tuple[int, int] | None:
        """Address of the first, and bytes to the next, if they came as one array; else None.

        Only for contiguous gradients, as :meth:`convert` makes them.
        """
        if len(self._stacks) != 1:
            return None
        return _arrays.address_of(self._stacks[0]), self._stacks[0].strides[0]

    def add_first(self, grad: Any, out: Any) -> None:
        """Write the first gradient, with what is added to it, to `out`."""
        out[...] = grad
        if self.given:
            (first, *_) = self._stacks or self._list
            if first is not None:
                first = first[0] if self._stacks else first
                with np.errstate(over="ignore", invalid="ignore"):
                    out += first

    def convert(self, dtype: np.dtype[Any]) -> None:
        """Make all of `dtype`, and each contiguous."""
        for turn, stack in enumerate(self._stacks):
            if stack is not None and (stack.dtype != dtype or not stack[:1].flags.c_contiguous):
                self._stacks[turn] = contiguous(stack, dtype)
        make = np.ascontiguousarray if self.device is None else contiguous
        self._list = [None if array is None else make(array, dtype) for array in self._list]

    def upload(self) -> None:
        """Copy what is in host memory to the current device: one transfer."""
        if not self.given:
            return
        self._stacks = [None if each is None else _arrays.upload(each) for each in self._stacks]
        if self._list:
            self._list = _arrays.upload_all(self._list, np.result_type(*self.dtypes))
        given = self._stacks or self._list
        self.device = next(device_of(array) for array in given if array is not None)

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each array, or 0."""
        if not self.given:
            return
        addresses[:] = 0
        for turn, stack in enumerate(self._stacks):
            if stack is not None:
                address, step = _arrays.address_of(stack), stack.strides[0]
                own = addresses[turn :: len(self._stacks)][: len(stack)]
                own[:] = address + step * np.arange(len(stack))
        for k, array in enumerate(self._list):
            if array is not None:
                addresses[k] = _arrays.address_of(array)


def _check_count(local_grads: Any, count: int, of: str = "returned gradient") -> None:
    if (
        not (isinstance(local_grads, (Sequence, np.ndarray)) or is_on_device(local_grads))
        or isinstance(local_grads, (str, bytes))
        or getattr(local_grads, "shape", None) == ()
    ):
        raise InputTypeError(
            f"local_grads is a {type(local_grads).__name__}; expected a sequence of arrays or None"
        )
    if len(local_grads) != count:
        raise InputError(
            f"local_grads has {len(local_grads)} entries; expected {count}, one for each {of}"
        )


def _wrong_shape(k: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> InputError:
    return InputError(
        f"local_grads[{k}] has shape {shape}; expected {expected}, the shape of the gradient it is "
        "added to"
    )


def _is_sparse(matrix: Any) -> bool:
    """Whether a matrix is one of SciPy's or CuPy's sparse formats."""
    return sp.issparse(matrix) or type(matrix).__module__.startswith("cupyx.scipy.sparse")


def _split(name: str, jacobian: Any, expected: Pattern | None) -> tuple[Pattern, Any]:
    """Pattern and values, shape ``(nnz,)`` or ``(batch, nnz)``, of one Jacobian."""
    if type(jacobian) is np.ndarray:
        return _split_dense(name, jacobian, 0, expected)
    if isinstance(jacobian, BatchedCSR):
        pattern, values = jacobian.pattern, jacobian.data
    elif _is_sparse(jacobian) and jacobian.format == "csr":
        pattern, values = _split_csr(name, jacobian)
    elif isinstance(jacobian, Pattern):
        raise InputTypeError(f"{name} is a Pattern, which has no values; expected a Jacobian")
    elif _is_sparse(jacobian):
        raise InputTypeError(
            f"{name} is a {type(jacobian).__name__}; expected CSR: convert it with .tocsr()"
        )
    elif isinstance(jacobian, _CHAINS):
        raise InputTypeError(f"{name} is a {type(jacobian).__name__}; expected one Jacobian")
    else:
        return _split_dense(name, jacobian, 0, expected)
    if expected is not None and pattern is not expected:
        raise _mismatch(name, expected, str(pattern))
    return pattern, values


def _split_dense(
    name: str, jacobian: Any, steps: int, expected: Pattern | None
) -> tuple[Pattern, Any]:
    """The same for a dense array, or for values of an expected pattern.

    `steps` is 1 if the array has a leading axis for the steps of a chain, else 0.
    """
    array = check_array(name, jacobian)
    shape = array.shape
    leading = "(n, " if steps else "("
    if expected is not None:
        is_full = expected.nnz == expected.shape[0] * expected.shape[1]
        if is_full and array.ndim in (steps + 2, steps + 3) and shape[-2:] == expected.shape:
            return expected, _flat(array, expected.nnz)
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
    return pattern, _flat(array, pattern.nnz)


def _flat(array: Any, nnz: int) -> Any:
    """The same with one axis for rows and columns; a view wherever one can be."""
    shape = (*array.shape[:-2], nnz)
    if type(array) is np.ndarray:
        return array.reshape(shape)
    with beside(array):
        return array.reshape(shape)


def _split_csr(name: str, jacobian: Any) -> tuple[Pattern, Any]:
    shape = check_shape(name, jacobian.shape)
    layout = layout_of(name, jacobian.indptr, jacobian.indices, shape)
    values = check_array(name, jacobian.data)
    if values.shape != (layout.size,):
        raise InputError(
            f"{name} has data of shape {values.shape}; expected {(layout.size,)}, as its indices"
        )
    return layout.pattern, layout.values(values)


def _mismatch(name: str, expected: Pattern, found: str) -> PatternMismatchError:
    return PatternMismatchError(f"{name} is {found}; expected {expected}, as the plan was made for")


def _walkable(values: Any) -> Any:
    """`values` such that the kernels can walk the last axis; a copy where they could not."""
    flags = values.flags
    # What lies on a device was found to be aligned.
    if type(values) is not np.ndarray or flags.aligned:
        if flags.c_contiguous:
            return values
        if values.shape[-1] <= 1 or values.strides[-1] == values.itemsize:
            return values
    return contiguous(values, values.dtype)


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

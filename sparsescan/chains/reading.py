"""Read a caller's Jacobians: how many there are, and the pattern and values of each."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp

from ..arrays import arrays as _arrays
from ..arrays.arrays import is_on_device, on_device, read_array
from ..errors import InputError, InputTypeError, PatternMismatchError, short
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.pattern import Pattern, check_shape
from .containers import BatchedCSR, CSRChain, PeriodicChain, canonical_order
from .implicit import Factor, FactorWeights, ImplicitChain, ImplicitStep

AnyStep = TypeVar("AnyStep", bound=Step)

# Types that hold the values of one step, with its pattern.
ONE_STEP = (BatchedCSR, Factor)
_CHAINS = (CSRChain, PeriodicChain, ImplicitChain)
_ORDER = "order them from the last layer to the first, each transposed"
_ORDER_OF_TIME = "order them from the first layer to the last (reverse=True), each transposed"
# Shapes cannot tell a list in the other order from a list that is not transposed.
_TURNED = "all fit if each is transposed, or with reverse=True if they are in the order of time"
_TURNED_IN_TIME = (
    "all fit if each is transposed, or without reverse=True if they begin with the last layer"
)


# -- Sequences -------------------------------------------------------------------------------------


def is_stack(jacobians: Any) -> bool:
    """Return whether a chain comes as one array, a CSRChain or a PeriodicChain."""
    return isinstance(jacobians, (*_CHAINS, np.ndarray)) or is_on_device(jacobians)


def length(jacobians: Any) -> int:
    """Return the number of Jacobians, or raise if `jacobians` is no sequence of them."""
    if isinstance(jacobians, (list, tuple, *_CHAINS)):
        return length_of("jacobians", jacobians)
    if isinstance(jacobians, np.ndarray) or is_on_device(jacobians):
        if type(jacobians) is not np.ndarray and is_on_device(jacobians):
            jacobians = on_device(jacobians, "jacobians")
        if jacobians.ndim == 1 and jacobians.dtype == object:
            raise InputTypeError(
                "jacobians is an array of objects; expected a list of them: list(jacobians)"
            )
        if jacobians.ndim < 2:
            raise InputError(
                f"jacobians has shape {jacobians.shape}; expected (n, rows, cols) or "
                "(n, batch, rows, cols)"
            )
    else:
        _arrays.check_no_mask("jacobians", jacobians)
        if _is_sparse(jacobians) or isinstance(jacobians, (BatchedCSR, str, bytes)):
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence of Jacobians, "
                "such as a list of one"
            )
        if not isinstance(jacobians, Sequence):
            of_torch = type(jacobians).__module__.partition(".")[0] == "torch"
            hint = ": .detach().numpy() makes one, without a copy" if of_torch else ""
            raise InputTypeError(
                f"jacobians is a {type(jacobians).__name__}; expected a sequence such as a list, "
                "a CSRChain, an ImplicitChain, or an array (n, rows, cols) or (n, batch, rows, "
                f"cols){hint}"
            )
    return length_of("jacobians", jacobians)


def length_of(name: str, sequence: Any) -> int:
    """Return the length that a sequence claims, or raise an error that names it."""
    try:
        return len(sequence)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} has no length: {error}") from None


def steps_of(jacobians: Any) -> Any:
    """Return a sequence of Jacobians as a new list, and a chain in one object as it is.

    A caller's own sequence may misstate its length, or give other steps when read again.
    """
    n = length(jacobians)
    if is_stack(jacobians):
        if isinstance(jacobians, np.ndarray):
            # Refused before tables for so many steps are made.
            _arrays.check_array("jacobians", jacobians[:1])
        return jacobians
    return items_of("jacobians", jacobians, n, "steps")


def items_of(name: str, sequence: Any, count: int, what: str) -> list[Any]:
    """Return the items of an argument; raise unless they are as many as its length says."""
    try:
        items = list(itertools.islice(sequence, min(count, sys.maxsize - 1) + 1))
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} cannot be read: {error}") from None
    if len(items) != count:
        gave = len(items) if len(items) < count else f"more than {count}"
        raise InputError(f"{name} gave {gave} {what}; expected {count}, its length")
    return items


def name_of(k: int, n: int, reverse: bool) -> str:
    """Return the name in errors of the `k`-th of `n` Jacobians, in the caller's order."""
    return f"jacobians[{n - 1 - k if reverse else k}]"


def _right_order(shapes: list[tuple[int, int]], reverse: bool) -> str:
    """Return advice for Jacobians whose shapes do not chain, last layer first."""
    if all(shape[0] == before[1] for before, shape in itertools.pairwise(shapes)):
        return _TURNED_IN_TIME if reverse else _TURNED
    return _ORDER_OF_TIME if reverse else _ORDER


def check_chain(
    patterns: Sequence[AnyStep], reverse: bool = False, name: Callable[[int], str] | None = None
) -> Sequence[AnyStep]:
    """Return `patterns`, or raise an error if their shapes do not chain.

    `reverse` says that the caller passed them in the other order; `name` gives names for errors.
    """
    previous = None
    for k, pattern in enumerate(patterns):
        if previous is not None and pattern.shape[1] != previous.shape[0]:
            called = name or partial(name_of, n=len(patterns), reverse=reverse)
            order = _right_order([pattern.shape for pattern in patterns], reverse)
            raise InputError(
                f"{called(k)} has shape {pattern.shape}, but {called(k - 1)} has "
                f"{previous.shape[0]} rows; expected (·, {previous.shape[0]}): {order}"
            )
        previous = pattern
    return patterns


# -- One Jacobian ----------------------------------------------------------------------------------


def _is_sparse(matrix: Any) -> bool:
    """Return whether a matrix is one of SciPy's or CuPy's sparse formats."""
    return sp.issparse(matrix) or str(type(matrix).__module__).startswith("cupyx.scipy.sparse")


def split(
    name: str, jacobian: Any, expected: Pattern | None, *, is_complex: bool = False
) -> tuple[Pattern, Any]:
    """Return pattern and values, shape ``(nnz,)`` or ``(batch, nnz)``, of one Jacobian.

    With `is_complex` a CSR matrix may be of complex numbers.
    """
    if type(jacobian) is np.ndarray:
        return split_dense(name, jacobian, 0, expected)
    if isinstance(jacobian, (*ONE_STEP, FactorWeights)):
        pattern, values = jacobian.pattern, jacobian.read()
    elif _is_sparse(jacobian) and jacobian.format == "csr":
        pattern, values = _split_csr(name, jacobian, is_complex)
    elif isinstance(jacobian, Pattern):
        raise InputTypeError(f"{name} is a Pattern, which has no values; expected a Jacobian")
    elif _is_sparse(jacobian):
        raise InputTypeError(
            f"{name} is a {type(jacobian).__name__}; expected CSR: convert it with .tocsr()"
        )
    elif isinstance(jacobian, (ImplicitStep, ImplicitPattern)):
        kind = type(jacobian).__name__
        article = "an" if kind.startswith("I") else "a"
        raise InputTypeError(f"{name} is {article} {kind}; expected an explicit Jacobian here")
    elif isinstance(jacobian, _CHAINS):
        raise InputTypeError(f"{name} is a {type(jacobian).__name__}; expected one Jacobian")
    elif isinstance(jacobian, Number):
        raise InputTypeError(f"{name} is the number {short(jacobian)}; expected a matrix")
    else:
        return split_dense(name, jacobian, 0, expected)
    if expected is not None and pattern is not expected:
        raise mismatch(name, expected, str(pattern))
    return pattern, values


def split_dense(
    name: str, jacobian: Any, steps: int, expected: Pattern | None
) -> tuple[Pattern, Any]:
    """Return pattern and values of a dense array, or of values of an expected pattern.

    `steps` is 1 if the array has a leading axis for the steps of a chain, else 0.
    """
    array = read_array(name, jacobian)
    shape = array.shape
    leading = "(n, " if steps else "("
    if expected is not None:
        is_full = expected.nnz == expected.shape[0] * expected.shape[1]
        if is_full and array.ndim in (steps + 2, steps + 3) and shape[-2:] == expected.shape:
            return expected, _flat(name, array, expected.nnz)
        if array.ndim in (steps + 1, steps + 2) and shape[-1] == expected.nnz:
            return expected, array
        raise mismatch(
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
    return pattern, _flat(name, array, pattern.nnz)


def _flat(name: str, array: Any, nnz: int) -> Any:
    """Return values with one axis for rows and columns, as a view where possible."""
    shape = (*array.shape[:-2], nnz)
    if type(array) is not np.ndarray:
        if array.flags.c_contiguous:
            return array.reshape(shape)
        # It may be a copy.
        with _arrays.beside(array):
            return array.reshape(shape)
    (rows, cols), (row, entry) = array.shape[-2:], array.strides[-2:]
    if row != entry * cols and rows > 1 and cols > 1:
        array = copied(name, array, array.dtype)
    return array.reshape(shape)


def _split_csr(name: str, jacobian: Any, is_complex: bool) -> tuple[Pattern, Any]:
    shape = check_shape(name, jacobian.shape)
    order = canonical_order(name, jacobian.indptr, jacobian.indices, shape)
    values = read_array(name, jacobian.data, is_complex=is_complex)
    if values.shape != (order.size,):
        raise InputError(
            f"{name} has data of shape {values.shape}; expected {(order.size,)}, as its indices"
        )
    return order.pattern, order.values(values)


def mismatch(name: str, expected: Pattern, what: str) -> PatternMismatchError:
    """Return the error for a Jacobian of another pattern than a plan was made for."""
    hint = ": keep explicit zeros, or make another plan" if what.startswith("Pattern") else ""
    return PatternMismatchError(
        f"{name} is {what}; expected {expected}, as the plan was made for{hint}"
    )


def copied(name: str, values: Any, dtype: np.dtype[Any]) -> Any:
    """Return a contiguous copy if memory suffices: a broadcast view may show more than exists."""
    if type(values) is np.ndarray:
        _arrays.check_memory(f"a contiguous copy of {name}", values.size * dtype.itemsize)
    return _arrays.contiguous(values, dtype)

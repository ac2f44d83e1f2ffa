"""Arrays of symbols, on which a function of the user is read with NumPy's own functions.

An array of symbols holds the places of its elements on a tape. So NumPy's own indexing, views,
reshaping and writes in place act on these places, with NumPy's rules of shared memory. Values are
computed at the same time. Where a function branches on a value, the tape records a guard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from .tape import LOGICAL, Ids, RefusedError, Table, Tape, is_known, real_part, where

# Functions of NumPy that only move elements.
_MOVES = {
    getattr(np, name)
    for name in (
        *("roll", "concatenate", "stack", "hstack", "vstack", "column_stack", "dstack", "flip"),
        *("fliplr", "flipud", "reshape", "transpose", "ravel", "tile", "repeat", "squeeze"),
        *("expand_dims", "broadcast_to", "moveaxis", "swapaxes", "atleast_1d", "atleast_2d"),
        *("append", "delete", "insert", "take", "diagonal", "rot90", "split", "array_split"),
        *("hsplit", "vsplit", "copy", "broadcast_arrays"),
    )
}
_JOINS = {np.concatenate, np.stack, np.hstack, np.vstack, np.column_stack, np.dstack}
_METHODS = {
    *("sum", "mean", "prod", "max", "min", "cumsum", "clip", "diagonal", "repeat", "take"),
    *("swapaxes", "std", "var", "dot", "argmax", "argmin", "argsort", "any", "all", "nonzero"),
}
_BITWISE = {
    np.bitwise_and: np.logical_and,
    np.bitwise_or: np.logical_or,
    np.bitwise_xor: np.logical_xor,
    np.invert: np.logical_not,
}


class Symbols(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of elements of a tape.

    Parameters
    ----------
    tape : Tape
        The tape.
    ids : ndarray of int
        The elements.
    is_logical : bool
        Whether they are true or false.
    """

    __array_priority__ = 1e6

    def __init__(self, tape: Tape, ids: Ids, is_logical: bool = False) -> None:
        self.tape, self.ids, self.is_logical = tape, np.asarray(ids, np.int64), is_logical

    # -- What arrays tell of themselves ------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return np.dtype(bool if self.is_logical else float)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.ids.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.ids.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.ids.size

    @property
    def values(self) -> Any:
        """The values of the elements during this reading."""
        return self.tape.values(self.ids).astype(self.dtype)

    @property
    def is_constant(self) -> bool:
        """Whether elements depend on no argument."""
        return self.tape.is_constant(self.ids)

    @property
    def T(self) -> Symbols:  # noqa: N802
        """The transpose."""
        return self._like(self.ids.T)

    @property
    def flat(self) -> Symbols:
        """All elements."""
        return self._like(self.ids.reshape(-1))

    @property
    def real(self) -> Symbols:
        """The real parts."""
        real: Symbols = apply(self.tape, real_part, self)
        return real

    def _like(self, ids: Any) -> Symbols:
        return Symbols(self.tape, ids, self.is_logical)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self._like(self.ids[k]) for k in range(len(self.ids)))

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            function = getattr(np, name)
            return lambda *args, **options: function(self, *args, **options)
        raise AttributeError(name)

    # -- Elements ----------------------------------------------------------------------------------

    def known(self) -> Any:
        """Return the values; a guard limits the reading to these values from now on."""
        self.tape.guard(self.ids)
        return self.values

    def _index(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(map(self._index, key))
        if isinstance(key, Symbols):
            return key.known() if key.is_logical else key.astype(int)
        return key

    def __getitem__(self, key: Any) -> Symbols:
        return self._like(self.ids[self._index(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.ids[self._index(key)] = elements(self.tape, value)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("the truth value of an array with more than one element")
        is_true = self if self.is_logical else self != 0
        return bool(is_true.known().reshape(-1)[0] if isinstance(is_true, Symbols) else is_true)

    def __int__(self) -> int:
        return int(self.astype(int).reshape(-1)[0])

    __index__ = __int__

    def __float__(self) -> float:
        if self.is_constant and self.size == 1:
            return float(self.values.reshape(-1)[0])
        raise RefusedError("float(), or an entry of a plain array, of a number that is read")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self.is_constant:
            return np.array(self.values, dtype)
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None or "sparse" not in Path(caller.f_code.co_filename).parts:
            raise RefusedError("a plain array of numbers that are read; write A @ u for A.dot(u)")
        box = np.empty((), object)  # so that a sparse matrix leaves the product to this class
        box[()] = self
        return box

    def astype(self, dtype: Any, **_: Any) -> Any:
        """Return a copy; a conversion to integers makes the values known."""
        kind = np.dtype(dtype).kind
        if kind == "f":
            return Symbols(self.tape, self.ids.copy())
        if kind == "b":
            return self != 0
        if kind not in "iu":
            raise RefusedError(f"a conversion to {np.dtype(dtype)}")
        whole: Any = np.trunc(self)
        return whole.known().astype(dtype)

    def reshape(self, *shape: Any, order: Any = "C") -> Symbols:
        """Return a view of another shape, or a copy."""
        return self._like(self.ids.reshape(*shape, order=order))

    def ravel(self, order: Any = "C") -> Symbols:
        """Return all elements, as a view where possible."""
        return self._like(self.ids.ravel(order))

    def flatten(self, order: Any = "C") -> Symbols:
        """Return a copy of all elements."""
        return self._like(self.ids.flatten(order))

    def copy(self, order: Any = "C") -> Symbols:
        """Return a copy."""
        return self._like(self.ids.copy(order))

    def transpose(self, *axes: Any) -> Symbols:
        """Return a view with other axes."""
        return self._like(self.ids.transpose(*axes))

    def squeeze(self, *axes: Any) -> Symbols:
        """Return a view without axes of one element."""
        return self._like(self.ids.squeeze(*axes))

    def item(self, *place: Any) -> Symbols:
        """Return an element."""
        return self._like(np.asarray(self.ids.item(*place)))

    def fill(self, value: Any) -> None:
        """Write a number everywhere."""
        self.ids[...] = elements(self.tape, value)

    def tolist(self) -> list[Any]:
        """Return a list of elements."""
        return list(self)

    # -- NumPy -------------------------------------------------------------------------------------

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        if any(sp.issparse(each) for each in given):
            return NotImplemented
        out = options.pop("out", None)
        mask = options.pop("where", True)
        if method == "__call__":
            if not is_float(options.pop("dtype", None)) or options:
                raise RefusedError(f"np.{function.__name__} with {', '.join(options) or 'dtype'}")
            is_product = function is np.matmul
            found = product(self.tape, *given) if is_product else apply(self.tape, function, *given)
            if mask is not True:
                if out is None:
                    raise RefusedError(f"np.{function.__name__} with where and without out")
                found = select(self.tape, mask, found, out[0])
        elif method == "reduce" and mask is True:
            found = _reduced(self.tape, function, *given, **options)
        elif method == "accumulate" and function is np.add and mask is True:
            found = _cumulated(self.tape, *given, **options)
        elif method == "outer" and mask is True:
            a, b = (elements(self.tape, each) for each in given)
            first = Symbols(self.tape, a.reshape(*a.shape, *(1,) * b.ndim))
            found = apply(self.tape, function, first, Symbols(self.tape, b))
        elif method == "at" and function in (np.add, np.subtract):
            return self._add_at(function, *given)
        else:
            raise RefusedError(f"np.{function.__name__}.{method}")
        if out is None:
            return found
        (target,) = out
        if not isinstance(target, Symbols):
            raise RefusedError("out=, which is a plain array")
        target.ids[...] = elements(self.tape, found)
        return target

    def _add_at(self, function: Any, to: Any, key: Any, value: Any) -> None:
        if not isinstance(to, Symbols):
            raise RefusedError(f"np.{function.__name__}.at of a plain array")
        places = np.arange(to.size).reshape(to.shape)[to._index(key)]
        given = Symbols(self.tape, np.broadcast_to(elements(self.tape, value), places.shape))
        entries = np.ones(places.size), (places.reshape(-1), np.arange(places.size))
        more = linear(self.tape, sp.csr_array(entries, (to.size, places.size)), given, to.shape)
        to.ids[...] = elements(self.tape, function(self._like(to.ids.copy()), more))

    def __array_function__(self, function: Any, _: Any, given: Any, options: Any) -> Any:
        if function in _FUNCTIONS:
            return _FUNCTIONS[function](self.tape, *given, **options)
        if function in _MOVES:
            return self._moved(function, *given, **options)
        known, named = _all_plain(given), _all_plain(list(options.values()))
        if has_symbols([known, named]):
            raise RefusedError(f"np.{function.__name__}")
        return function(*known, **dict(zip(options, named, strict=True)))

    def _moved(self, function: Any, first: Any, *given: Any, **options: Any) -> Any:
        """Apply a function that only moves elements."""
        is_logical = isinstance(first, Symbols) and first.is_logical
        if function in _JOINS or function is np.broadcast_arrays:
            moved: Any = [elements(self.tape, each) for each in first]
        else:
            moved = elements(self.tape, first)
        if function in (np.append, np.insert):
            given = (*given[:-1], elements(self.tape, given[-1]))
        found = function(moved, *given, **options)
        if isinstance(found, list | tuple):
            return [Symbols(self.tape, ids, is_logical) for ids in found]
        return Symbols(self.tape, found, is_logical)

    def __matmul__(self, other: Any) -> Any:
        if not sp.issparse(other):
            return product(self.tape, self, other)
        found = product(self.tape, other.T, self if self.ndim == 1 else self.T)
        return found if self.ndim == 1 else found.T

    def __rmatmul__(self, other: Any) -> Any:
        return product(self.tape, other, self)

    def __rmul__(self, other: Any) -> Any:
        if sp.issparse(other):  # as a matrix of SciPy multiplies
            return product(self.tape, other, self)
        return np.multiply(other, self)


def has_symbols(given: Any) -> bool:
    """Return whether an object is symbols or contains symbols."""
    if isinstance(given, list | tuple):
        return any(map(has_symbols, given))
    return isinstance(given, Symbols)


def is_float(dtype: Any) -> bool:
    """Return whether a dtype is that of symbols, or none is given."""
    return dtype is None or np.dtype(dtype) == np.float64


def elements(tape: Tape, given: Any) -> Ids:
    """Return the elements of symbols, of numbers, or of lists of both."""
    if isinstance(given, Symbols):
        if given.tape is not tape:
            raise RefusedError("symbols of another reading")
        return given.ids
    if isinstance(given, list | tuple) and has_symbols(given):
        return np.stack(np.broadcast_arrays(*(elements(tape, each) for each in given)))
    array = np.asarray(given)
    if array.dtype.kind != "O":
        return tape.constant(array)
    flat = [elements(tape, each) for each in array.reshape(-1)]
    if any(ids.ndim for ids in flat):
        raise RefusedError("an array of objects")
    return np.array(flat, np.int64).reshape(array.shape)


def symbols(tape: Tape, given: Any) -> Symbols:
    """Return symbols unchanged, and anything else as symbols."""
    return given if isinstance(given, Symbols) else Symbols(tape, elements(tape, given))


def apply(tape: Tape, function: Any, *given: Any) -> Any:
    """Return an elementwise function."""
    function = _BITWISE.get(function, function)
    if not is_known(function):
        raise RefusedError(f"np.{function.__name__}")
    is_logical = function in LOGICAL
    logical = sum(map(_is_logical, given))
    if function in _BITWISE.values() and logical < len(given):
        raise RefusedError(f"np.{function.__name__} of numbers")
    if function in (np.add, np.subtract, np.negative) and logical == len(given):
        raise RefusedError(f"np.{function.__name__} of what is true or false")
    ids = np.broadcast_arrays(*(elements(tape, each) for each in given))
    with np.errstate(all="ignore"):
        values = function(*map(tape.values, ids))
    if all(map(tape.is_constant, ids)):
        return Symbols(tape, tape.constant(values), is_logical)
    return Symbols(tape, tape.add(function, tuple(ids), values), is_logical)


def _is_logical(given: Any) -> bool:
    return given.is_logical if isinstance(given, Symbols) else np.asarray(given).dtype == bool


def linear(tape: Tape, matrix: Any, given: Any, shape: tuple[int, ...]) -> Symbols:
    """Return the product with a constant sparse matrix, in a shape."""
    ids, matrix = elements(tape, given).reshape(-1), sp.csr_array(matrix, dtype=np.float64)
    with np.errstate(all="ignore"):
        values = (matrix @ tape.values(ids)).reshape(shape)
    if tape.is_constant(ids):
        return Symbols(tape, tape.constant(values))
    return Symbols(tape, tape.add(matrix, (ids,), values))


def _plain(given: Any) -> Any:
    """Return the values of constant symbols, and anything else unchanged."""
    return given.values if isinstance(given, Symbols) and given.is_constant else given


def _all_plain(given: Any) -> Any:
    """Return arguments in which constant symbols are replaced by numbers."""
    if isinstance(given, list | tuple):
        return [_all_plain(each) for each in given]
    return _plain(given)


def product(tape: Tape, a: Any, b: Any) -> Any:
    """Return ``a @ b``, of vectors and matrices."""
    a, b = _plain(a), _plain(b)
    if not has_symbols([a, b]):
        return Symbols(tape, tape.constant(a @ b))
    if sp.issparse(a) or (not isinstance(a, Symbols) and np.ndim(a) == 2):
        matrix = sp.csr_array(a)
        given = symbols(tape, b)
        if given.ndim not in (1, 2) or given.shape[0] != matrix.shape[1]:
            raise RefusedError(f"a product of shapes {matrix.shape} and {given.shape}")
        if given.ndim == 2:
            matrix = sp.kron(matrix, sp.eye_array(given.shape[1]), format="csr")
        return linear(tape, matrix, given, (np.shape(a)[0], *given.shape[1:]))
    if not isinstance(b, Symbols) and np.ndim(b) == 2 and np.ndim(a) == 1:
        return product(tape, np.asarray(b).T, a)
    left, right = symbols(tape, a), symbols(tape, b)
    if not (1 <= left.ndim <= 2 and 1 <= right.ndim <= 2):
        raise RefusedError(f"a product of shapes {left.shape} and {right.shape}")
    if right.ndim == 2:
        left = left[..., None]
    terms = left * (right if right.ndim == 2 or left.ndim == 1 else right[None, :])
    return _reduced(tape, np.add, terms, axis=-2 if right.ndim == 2 else -1)


def select(tape: Tape, condition: Any, *values: Any) -> Any:
    """Return ``np.where``."""
    if not values:
        return np.nonzero(symbols(tape, condition).known())
    condition = symbols(tape, condition)
    condition = condition if condition.is_logical else condition != 0
    found = apply(tape, where, condition, *values)
    found.is_logical = all(map(_is_logical, values))
    return found


def _reduced(
    tape: Tape,
    function: Any,
    given: Any,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    **options: Any,
) -> Any:
    """Return a reduction over axes: a sum is a linear map, others are trees of pairs."""
    if out is not None or not is_float(dtype) or _given(options):
        raise RefusedError(f"np.{function.__name__}.reduce with such arguments")
    x = symbols(tape, given)
    axes = range(x.ndim) if axis is None else [k % max(x.ndim, 1) for k in np.atleast_1d(axis)]
    left = [k for k in range(x.ndim) if k not in axes]
    shape = tuple(x.shape[k] for k in left)
    ids = x.ids.transpose(*left, *axes).reshape(int(np.prod(shape)), -1)
    rows, columns = ids.shape
    if function is np.add:
        entries = np.ones(ids.size), np.arange(ids.size), columns * np.arange(rows + 1)
        found = linear(tape, sp.csr_array(entries, (rows, ids.size)), Symbols(tape, ids), shape)
    else:
        found = Symbols(tape, ids.copy(), x.is_logical)
        if not columns:
            raise RefusedError(f"np.{function.__name__}.reduce of nothing")
        while found.shape[1] > 1:
            half = found.shape[1] // 2
            pairs = apply(tape, function, found[:, :half], found[:, half : 2 * half])
            rest = found.ids[:, 2 * half :]
            found = Symbols(tape, np.concatenate([pairs.ids, rest], 1), pairs.is_logical)
        found = found.reshape(shape)
    if keepdims:
        found = found.reshape([1 if k in axes else size for k, size in enumerate(x.shape)])
    return found


def _given(options: dict[str, Any]) -> bool:
    """Return whether options differ from NumPy's defaults."""
    return any(value is not None for value in options.values())


def _by_axis(tape: Tape, given: Any, axis: int, matrix: Callable[[int], Any]) -> Symbols:
    """Return a linear map along an axis; `matrix` returns its matrix for a length."""
    ids = np.moveaxis(elements(tape, given), axis, -1)
    one = sp.csr_array(matrix(ids.shape[-1]))
    shape = *ids.shape[:-1], one.shape[0]
    lines = int(np.prod(ids.shape[:-1]))
    whole = one if lines == 1 else sp.kron(sp.eye_array(lines), one, format="csr")
    found = linear(tape, whole, Symbols(tape, ids), shape)
    return Symbols(tape, np.moveaxis(found.ids, -1, axis))


def _cumulated(tape: Tape, a: Any, axis: Any = 0, dtype: Any = None, out: Any = None) -> Symbols:
    if not is_float(dtype) or out is not None:
        raise RefusedError("np.cumsum with such arguments")
    if axis is None:
        a, axis = symbols(tape, a).reshape(-1), 0
    return _by_axis(tape, a, axis, lambda n: np.tril(np.ones((n, n))))


# -- Functions -------------------------------------------------------------------------------------


def _reduction(function: Any) -> Callable[..., Any]:
    def reduced(tape: Tape, a: Any, axis: Any = None, *rest: Any, **options: Any) -> Any:
        if rest:
            raise RefusedError(f"np.{function.__name__}.reduce with such arguments")
        return _reduced(tape, function, a, axis, **options)

    return reduced


def _mean(tape: Tape, a: Any, axis: Any = None, **options: Any) -> Any:
    whole = _reduced(tape, np.add, a, axis, **options)
    return whole * (whole.size / max(symbols(tape, a).size, 1))


def _variance(tape: Tape, a: Any, axis: Any = None, *, ddof: float = 0, **options: Any) -> Any:
    x = symbols(tape, a)
    centred = x - _mean(tape, x, axis, keepdims=True)
    whole = _reduced(tape, np.add, centred * centred, axis, **options)
    return whole / (x.size / max(whole.size, 1) - ddof)


def _norm(
    tape: Tape, x: Any, *given: Any, axis: Any = None, keepdims: bool = False, **options: Any
) -> Any:
    if given or options:
        raise RefusedError("np.linalg.norm with ord")
    return np.sqrt(_reduced(tape, np.add, x * x, axis, keepdims=keepdims))


def _diff(tape: Tape, a: Any, n: int = 1, axis: int = -1, **options: Any) -> Any:
    if _given(options):
        raise RefusedError("np.diff with such arguments")
    found = symbols(tape, a)
    for _ in range(n):
        ids = np.moveaxis(found.ids, axis, -1)
        one = Symbols(tape, ids[..., 1:]) - Symbols(tape, ids[..., :-1])
        found = Symbols(tape, np.moveaxis(one.ids, -1, axis))
    return found


def _gradient(tape: Tape, f: Any, *steps: Any, axis: Any = None, edge_order: Any = 1) -> Any:
    if has_symbols(steps) or len(steps) > 1:
        raise RefusedError("np.gradient with such steps")
    axes = range(np.ndim(f)) if axis is None else np.atleast_1d(axis)
    found = []
    for each in axes:

        def matrix(n: int) -> Any:
            return np.gradient(np.eye(n), *steps, axis=0, edge_order=edge_order)

        found.append(_by_axis(tape, f, int(each), matrix))
    return found[0] if len(found) == 1 else found


def _convolve(tape: Tape, a: Any, v: Any, mode: Any = "full") -> Any:
    if isinstance(a, Symbols) and isinstance(v, Symbols):
        raise RefusedError("np.convolve of two arrays that are read")
    x, by = (a, v) if isinstance(a, Symbols) else (v, a)
    return _by_axis(
        tape, x, 0, lambda n: np.stack([np.convolve(e, by, mode) for e in np.eye(n)], 1)
    )


def _pad(tape: Tape, array: Any, pad_width: Any, mode: Any = "constant", **options: Any) -> Any:
    if mode not in ("constant", "edge", "wrap", "reflect", "symmetric"):
        raise RefusedError(f"np.pad with mode={mode!r}")
    if mode == "constant":
        options = {"constant_values": int(elements(tape, options.pop("constant_values", 0.0)))}
    return Symbols(tape, np.pad(elements(tape, array), pad_width, mode=mode, **options))


def _interp(tape: Tape, x: Any, xp: Any, fp: Any, *rest: Any, **options: Any) -> Any:
    xp, fp = (_plain(each) for each in (xp, fp))
    if has_symbols([xp, fp]) or rest or _given(options):
        raise RefusedError("np.interp of a table that is read, or with other arguments")
    table = Table(tuple(map(float, xp)), tuple(map(float, fp)))
    if any(np.diff(table.points) <= 0):
        raise RefusedError("np.interp of points that do not increase")
    return apply(tape, table, x)


def _select(tape: Tape, conditions: Any, values: Any, default: Any = 0) -> Any:
    found = default
    for condition, value in reversed(list(zip(conditions, values, strict=True))):
        found = select(tape, condition, value, found)
    return found


def _clip(
    tape: Tape, a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **more: Any
) -> Any:
    low, high = more.pop("min", a_min), more.pop("max", a_max)
    if out is not None or more:
        raise RefusedError("np.clip with such arguments")
    found = a if low is None else np.maximum(a, low)
    return found if high is None else np.minimum(found, high)


def _sort(tape: Tape, a: Any, axis: int = -1, **options: Any) -> Any:
    if np.ndim(a) != 1 or _given(options):
        raise RefusedError("np.sort with such arguments")
    return a[_argsort(tape, a)]


def _argsort(tape: Tape, a: Any, axis: int = -1, **options: Any) -> Any:
    if np.ndim(a) != 1 or _given(options):
        raise RefusedError("np.argsort with such arguments")
    order = np.argsort(a.values, kind="stable")
    found = a[order]
    (found[:-1] <= found[1:]).known()
    return order


def _argument(function: Any, is_best: Any) -> Callable[..., Any]:
    def argument(tape: Tape, a: Any, axis: Any = None, **options: Any) -> Any:
        if axis not in (None, 0) or _given(options) or (axis == 0 and np.ndim(a) != 1):
            raise RefusedError(f"np.{function.__name__} with such arguments")
        flat = symbols(tape, a).reshape(-1)
        best = function(flat.values)
        is_best(flat[best], flat).known()
        return best

    return argument


def _like(value: float | None) -> Callable[..., Any]:
    def like(tape: Tape, a: Any, *given: Any, **options: Any) -> Any:
        shape, dtype = options.pop("shape", None), options.pop("dtype", None)
        filled = given[0] if value is None else value
        if _given(options) or not is_float(dtype) or len(given) > (value is None):
            raise RefusedError("an array like another one with such arguments")
        shape = np.shape(a) if shape is None else shape
        return Symbols(tape, np.full(shape, elements(tape, filled)), False)

    return like


def _polynomial(tape: Tape, coefficients: Any, x: Any) -> Any:
    found: Any = 0 * x
    for each in coefficients:
        found = found * x + each
    return found


def _inner(tape: Tape, a: Any, b: Any) -> Any:
    if np.ndim(a) != 1 or np.ndim(b) != 1:
        raise RefusedError("an inner product of more than vectors")
    return product(tape, a, b)


def _einsum(tape: Tape, subscripts: Any, *given: Any, **options: Any) -> Any:
    """Return sums of products; all products are made at once, so arrays must be small."""
    if not isinstance(subscripts, str) or "." in subscripts or _given(options):
        raise RefusedError("np.einsum with such arguments")
    left, _, out = subscripts.replace(" ", "").partition("->")
    if "->" not in subscripts:
        out = "".join(sorted(each for each in set(left) - {","} if left.count(each) == 1))
    letters = list(dict.fromkeys(out + left.replace(",", "")))
    found: Any = 1.0
    for names, array in zip(left.split(","), given, strict=True):
        own = list(dict.fromkeys(names))
        ids = elements(tape, array)
        ids = np.einsum(ids, [letters.index(each) for each in names], [*map(letters.index, own)])
        order = [each for each in letters if each in own]
        ids = ids.transpose([own.index(each) for each in order])
        shape = [ids.shape[order.index(each)] if each in own else 1 for each in letters]
        found = found * Symbols(tape, ids.reshape(shape))
    summed = tuple(range(len(out), len(letters)))
    return _reduced(tape, np.add, found, summed) if summed else found


def _solve(tape: Tape, a: Any, b: Any) -> Any:
    """Return the solution of a small system, by Gaussian elimination with fixed pivots."""
    a, right = _plain(a), symbols(tape, b)
    if right.ndim not in (1, 2) or np.ndim(a) != 2:
        raise RefusedError("np.linalg.solve of many systems")
    if not isinstance(a, Symbols):
        return product(tape, np.linalg.inv(a), right)
    n, columns = len(a), right.reshape(len(a), -1)
    rows = [Symbols(tape, np.concatenate([a.ids[k], columns.ids[k]])) for k in range(n)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(float(rows[i].values[k])))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = rows[k] / rows[k][k]
        for i in range(n):
            if i != k:
                rows[i] = rows[i] - rows[i][k] * rows[k]
    return Symbols(tape, np.stack([row.ids[n:] for row in rows])).reshape(right.shape)


def _rounded(tape: Tape, a: Any, decimals: int = 0, **options: Any) -> Any:
    if decimals or _given(options):
        raise RefusedError("np.round to decimals")
    return np.rint(a)


def _of_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for complex numbers that conjugates its arguments."""

    def noted(tape: Tape, *given: Any, **options: Any) -> Any:
        return apply(tape, real_part, function(tape, *given, **options))

    return noted


def _trapezoid(tape: Tape, y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    if np.ndim(y) != 1:
        raise RefusedError("np.trapezoid of more than one axis")
    widths = dx if x is None else np.diff(x)
    return np.sum((y[1:] + y[:-1]) * widths / 2)


def _bincount(tape: Tape, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    count = max(minlength, int(np.max(x)) + 1)
    entries = np.ones(len(x)), (np.asarray(x), np.arange(len(x)))
    return linear(tape, sp.csr_array(entries, (count, len(x))), weights, (count,))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: select,
    np.select: _select,
    np.sum: _reduction(np.add),
    np.prod: _reduction(np.multiply),
    np.max: _reduction(np.maximum),
    np.min: _reduction(np.minimum),
    np.any: _reduction(np.logical_or),
    np.all: _reduction(np.logical_and),
    np.mean: _mean,
    np.var: _of_conjugates(_variance),
    np.std: lambda tape, a, axis=None, **options: np.sqrt(_variance(tape, a, axis, **options)),
    np.linalg.norm: _norm,
    np.diff: _diff,
    np.gradient: _gradient,
    np.convolve: _convolve,
    np.pad: _pad,
    np.interp: _interp,
    np.clip: _clip,
    np.cumsum: lambda tape, a, axis=None, **options: _cumulated(tape, a, axis, **options),
    np.dot: product,
    np.inner: _inner,
    np.vdot: _of_conjugates(_inner),
    np.outer: lambda tape, a, b: symbols(tape, a).reshape(-1, 1) * symbols(tape, b).reshape(1, -1),
    np.sort: _sort,
    np.argsort: _argsort,
    np.argmax: _argument(np.argmax, np.greater_equal),
    np.argmin: _argument(np.argmin, np.less_equal),
    np.nonzero: select,
    np.zeros_like: _like(0.0),
    np.ones_like: _like(1.0),
    np.empty_like: _like(np.nan),
    np.full_like: _like(None),
    np.polyval: _polynomial,
    np.einsum: _einsum,
    np.linalg.solve: _solve,
    np.linalg.inv: lambda tape, a: _solve(tape, a, np.eye(len(a))),
    np.round: _rounded,
    np.nan_to_num: lambda tape, x: select(tape, np.isnan(x), 0.0, x),
    np.isclose: lambda tape, a, b, rtol=1e-5, atol=1e-8: abs(a - b) <= atol + rtol * abs(b),
    np.sinc: lambda tape, x: select(tape, x == 0, 1.0, np.sin(np.pi * x) / (np.pi * x)),
    np.bincount: _bincount,
    np.real: lambda tape, a: a.real,
    np.shape: lambda tape, a: a.shape,
    np.ndim: lambda tape, a: a.ndim,
    np.size: lambda tape, a, axis=None: a.size if axis is None else a.shape[axis],
    getattr(np, "trapezoid", getattr(np, "trapz", None)): _trapezoid,
}

"""A stand-in for CuPy on machines without a GPU: NumPy arrays that refuse what CuPy refuses.

:func:`install` puts it in the place of `cupy` and `cupyx`. It has only functions and arguments that
CuPy 13 to 15 have (CuPy's reference and source), and is stricter than CuPy in a few ways, so that
what runs here runs there:

- No function of NumPy takes an array. CuPy lets ``np.add(x, x)`` through if all are its own.
- NumPy arrays are no indices. CuPy copies them to the device, every time, as it does short lists.
- An index out of bounds is an error. CuPy wraps it around.
- An assignment to one place twice is an error. In CuPy the value is then undefined.
- What waits for the device, as ``bool(x)``, ``float(x)`` and ``int(x)``, is an error.
- There is no boolean index, which waits for the device as well.

Where CuPy computes in another way than NumPy, and it matters, so does this: see :class:`_Add` and
:func:`_expit`.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.special

__all__ = ["cupy", "install"]


class Flags:
    """CuPy has no ``writeable`` and no ``aligned``."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous = flags.c_contiguous
        self.f_contiguous = flags.f_contiguous
        self.owndata = flags.owndata


class ndarray:  # noqa: N801
    """An array "on the device": a NumPy array that only this module gets at."""

    # As if NumPy had never heard of it: its ufuncs refuse, and its operators leave it to ours.
    __array_ufunc__ = None

    def __init__(self, array: np.ndarray) -> None:
        assert type(array) is np.ndarray
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_function__(self, *args: Any) -> Any:
        return NotImplemented

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__ | {"version": 3}

    def get(self) -> np.ndarray:
        """A copy in host memory."""
        return self._array.copy()

    # -- Attributes -----------------------------------------------------------------------------

    dtype = property(lambda self: self._array.dtype)
    itemsize = property(lambda self: self._array.itemsize)
    nbytes = property(lambda self: self._array.nbytes)
    ndim = property(lambda self: self._array.ndim)
    shape = property(lambda self: self._array.shape)
    size = property(lambda self: self._array.size)
    strides = property(lambda self: self._array.strides)
    flags = property(lambda self: Flags(self._array.flags))
    T = property(lambda self: ndarray(self._array.T))

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"fake_cupy.{self._array!r}"

    def __bool__(self) -> bool:
        raise TypeError("the truth of an array waits for the device")

    # -- Methods --------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._array.reshape(*shape))

    def transpose(self, *axes: Any) -> ndarray:
        return ndarray(self._array.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return ndarray(self._array.swapaxes(axis1, axis2))

    def ravel(self) -> ndarray:
        return ndarray(self._array.ravel())

    def squeeze(self, axis: Any = None) -> ndarray:
        return ndarray(self._array.squeeze(axis))

    def astype(self, dtype: Any, *, copy: bool = True) -> ndarray:
        with np.errstate(all="ignore"):
            found = self._array.astype(dtype, copy=copy)
        return self if found is self._array else ndarray(found)

    def copy(self) -> ndarray:
        return ndarray(self._array.copy())

    def fill(self, value: Any) -> None:
        with np.errstate(all="ignore"):
            self._array.fill(_input(value))

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
        return cupy.take(self, indices, axis, out)

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> ndarray:  # noqa: A002
        return cupy.clip(self, min, max, out)

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return cupy.sum(self, axis, dtype, out, keepdims)

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return cupy.mean(self, axis, dtype, out, keepdims)

    def var(
        self,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        ddof: int = 0,
        keepdims: bool = False,
    ) -> ndarray:
        return cupy.var(self, axis, dtype, out, ddof, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return cupy.max(self, axis, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return cupy.min(self, axis, out, keepdims)

    def argmax(self, axis: Any = None) -> ndarray:
        return cupy.argmax(self, axis)

    def any(self, axis: Any = None) -> ndarray:
        return cupy.any(self, axis)

    def all(self, axis: Any = None) -> ndarray:
        return cupy.all(self, axis)

    # -- Indices --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> ndarray:
        return _wrap(self._array[_key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _key(key)
        if any(isinstance(part, np.ndarray) for part in key):
            places = np.arange(self.size).reshape(self.shape)[key]
            if len(np.unique(places)) < places.size:
                raise IndexError("a place is assigned to more than once: its value is undefined")
        with np.errstate(all="ignore"):
            self._array[key] = _input(value)


def _binary(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(self, other)


def _reflected(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(other, self)


def _in_place(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(self, other, out=self)


for _operator, _name in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}.items():
    setattr(ndarray, f"__{_operator}__", _binary(_name))
    setattr(ndarray, f"__r{_operator}__", _reflected(_name))
    setattr(ndarray, f"__i{_operator}__", _in_place(_name))
for _operator, _name in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
    "matmul": "matmul",
}.items():
    setattr(ndarray, f"__{_operator}__", _binary(_name))
for _operator, _name in {"neg": "negative", "invert": "invert", "abs": "absolute"}.items():
    setattr(ndarray, f"__{_operator}__", lambda self, _name=_name: getattr(cupy, _name)(self))
ndarray.__rmatmul__ = _reflected("matmul")
ndarray.__hash__ = None
ndarray.__module__ = "cupy"


def _input(value: Any) -> Any:
    """What NumPy computes with, for one of our arrays or a scalar; anything else is refused."""
    if isinstance(value, ndarray):
        return value._array
    if isinstance(value, bool | int | float | np.generic):
        return value
    # In these words ufuncs of CuPy refuse NumPy arrays and lists.
    raise TypeError(f"Unsupported type {type(value)}")


def _output(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, ndarray):
        raise TypeError("Output arguments type must be cupy.ndarray")
    return value._array


def _plain(value: Any) -> Any:
    """The same, without arrays: a shape, an axis, a dtype, a mode."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_plain(entry) for entry in value)
    if isinstance(value, np.ndarray | ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def _wrap(value: Any) -> Any:
    """One of our arrays; scalars, too, which reductions of CuPy return as arrays."""
    return ndarray(np.asarray(value))


def _key(key: Any) -> tuple[Any, ...]:
    """An index for NumPy."""
    parts = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, ndarray):
            if part.dtype.kind not in "iu":
                raise IndexError(f"an index has dtype {part.dtype}; here it must be of integers")
            parts.append(part._array)
        elif isinstance(part, list):
            parts.append(np.array([operator.index(entry) for entry in part], np.intp))
        elif isinstance(part, np.ndarray | tuple | bool | np.bool_):
            raise TypeError(f"Unsupported type {type(part)} of an index")
        else:
            parts.append(operator.index(part))
    return tuple(parts)


class _Ufunc:
    """An elementwise function; like those of CuPy, without ``where``."""

    def __init__(self, function: Callable[..., Any], nin: int) -> None:
        self._function = function
        self.nin = nin

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None) -> ndarray:
        if len(args) == self.nin + 1 and out is None:
            *args, out = args
        if len(args) != self.nin:
            raise TypeError(f"{len(args)} arguments; expected {self.nin}")
        kwargs = {} if dtype is None else {"dtype": dtype}
        # A device gives no warnings.
        with np.errstate(all="ignore"):
            found = self._function(*map(_input, args), out=_output(out), **kwargs)
        return _wrap(found) if out is None else out


class _Add(_Ufunc):
    def at(self, a: ndarray, indices: Any, b: Any) -> None:
        """Sums at places that may repeat; in what order is undefined."""
        with np.errstate(all="ignore"):
            np.add.at(_array("a", a), _key(indices), _input(b))

    def reduceat(self, array: ndarray, indices: ndarray, axis: int = 0) -> ndarray:
        """Sums of parts, by differences of ``cumsum``: they cancel, and a NaN or ∞ spreads."""
        axis %= array.ndim
        terms, starts = np.moveaxis(_input(array), axis, -1), _input(indices)
        with np.errstate(all="ignore"):
            upto = np.zeros((*terms.shape[:-1], terms.shape[-1] + 1), terms.dtype)
            np.cumsum(terms, axis=-1, out=upto[..., 1:])
            stops = np.append(starts[1:], terms.shape[-1])
            found = upto[..., stops] - upto[..., starts]
        found = np.where(starts >= stops, terms[..., starts], found)
        return _wrap(np.moveaxis(found, -1, axis))


def _expit(x: Any, out: Any = None) -> Any:
    """As CuPy computes it."""
    return np.divide(1, 1 + np.exp(-x), out=out)


def _function(function: Callable[..., Any], signature: str) -> Callable[..., ndarray]:
    """A function with CuPy's parameters; ``*`` marks arrays or scalars, ``**`` lists of arrays."""
    names = signature.replace("*", "").split()
    stars = [name.count("*") for name in signature.split()]

    def call(*args: Any, **kwargs: Any) -> ndarray:
        if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
            raise TypeError(f"CuPy's {function.__name__} takes only {signature}")
        given = dict(zip(names, args, strict=False)) | kwargs
        out = given.get("out")
        for name, star in zip(names, stars, strict=True):
            value = given.get(name)
            if value is None:
                continue
            if name == "out":
                given[name] = _output(value)
            elif star == 2:
                given[name] = [_array(name, entry) for entry in value]
            elif star == 1:
                first = name == names[0]
                given[name] = _array(name, value) if first else _input(value)
            else:
                given[name] = _plain(value)
        # By position, as the names of parameters differ between the libraries.
        positional = []
        for name in names:
            if name not in given:
                break
            positional.append(given.pop(name))
        with np.errstate(all="ignore"):
            found = function(*positional, **given)
        return _wrap(found) if out is None else out

    return call


def _array(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, ndarray):
        raise TypeError(f"{name} is a {type(value)}; expected a cupy.ndarray")
    return value._array


def _asarray(a: Any, dtype: Any = None) -> ndarray:
    """The one way from the host to the device: a copy."""
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    return ndarray(np.array(a, dtype))


def _copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    mask = True if where is None else _array("where", where)
    with np.errstate(all="ignore"):
        np.copyto(_array("dst", dst), _input(src), casting, mask)


def _as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """A view; an error if it leaves the array, read-only if two of its elements share a place."""
    whole = _array("x", x)
    view = np.lib.stride_tricks.as_strided(whole, shape, strides)
    if view.size:
        (first, last), (begin, end) = map(np.lib.array_utils.byte_bounds, (view, whole))
        assert begin <= first <= last <= end, "the view leaves its array"
    places = np.zeros((), np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        places = places[..., None] + np.arange(size) * stride
    if len(np.unique(places)) < view.size:
        view.flags.writeable = False
    return ndarray(view)


def _sliding_window_view(x: ndarray, window_shape: Any, axis: Any = None) -> ndarray:
    return ndarray(
        np.lib.stride_tricks.sliding_window_view(_array("x", x), _plain(window_shape), axis)
    )


_UFUNCS = {
    1: (
        "absolute ceil exp expm1 floor invert isfinite isinf isnan log log1p logical_not negative "
        "reciprocal sign sqrt square tanh"
    ),
    2: (
        "bitwise_and bitwise_or bitwise_xor copysign divide equal floor_divide fmax fmin greater "
        "greater_equal less less_equal logaddexp logical_and logical_or logical_xor maximum "
        "minimum multiply not_equal power remainder subtract true_divide"
    ),
}
_FUNCTIONS = {
    "all": "a* axis out* keepdims",
    "any": "a* axis out* keepdims",
    "argmax": "a* axis",
    "argmin": "a* axis",
    "ascontiguousarray": "a* dtype",
    "broadcast_to": "array* shape",
    "clip": "a* a_min* a_max* out*",
    "concatenate": "tup** axis out*",
    "cumsum": "a* axis dtype out*",
    "diagonal": "a* offset axis1 axis2",
    "empty_like": "prototype* dtype",
    "expand_dims": "a* axis",
    "flip": "a* axis",
    "full_like": "a* fill_value* dtype",
    "matmul": "x1* x2* out*",
    "max": "a* axis out* keepdims",
    "mean": "a* axis dtype out* keepdims",
    "min": "a* axis out* keepdims",
    "moveaxis": "a* source destination",
    "ones_like": "a* dtype",
    "outer": "a* b* out*",
    "prod": "a* axis dtype out* keepdims",
    "ravel": "a*",
    "repeat": "a* repeats axis",
    "reshape": "a* newshape",
    "squeeze": "a* axis",
    "stack": "tup** axis out*",
    "sum": "a* axis dtype out* keepdims",
    "swapaxes": "a* axis1 axis2",
    # CuPy's has no `mode`.
    "take": "a* indices* axis out*",
    "take_along_axis": "a* indices* axis",
    "tensordot": "a* b* axes",
    "tile": "a* reps",
    "transpose": "a* axes",
    "var": "a* axis dtype out* ddof keepdims",
    "where": "condition* x* y*",
    "zeros_like": "a* dtype",
}
_CREATION = {
    "arange": "start stop step dtype",
    "empty": "shape dtype",
    "eye": "N M k dtype",
    "full": "shape fill_value dtype",
    "ones": "shape dtype",
    "zeros": "shape dtype",
}
_SAME = "bool_ float32 float64 inf int32 int64 intp nan newaxis pi result_type"


def _einsum(subscripts: str, *operands: ndarray) -> ndarray:
    """CuPy's has no ``out``."""
    return _wrap(np.einsum(subscripts, *(_array("an operand", operand) for operand in operands)))


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


_tricks = _module(
    "cupy.lib.stride_tricks", as_strided=_as_strided, sliding_window_view=_sliding_window_view
)
_lib = _module("cupy.lib", stride_tricks=_tricks)
cupy: Any = _module(
    "cupy",
    ndarray=ndarray,
    lib=_lib,
    add=_Add(np.add, 2),
    asarray=_asarray,
    array=_asarray,
    asnumpy=ndarray.get,
    copyto=_copyto,
    einsum=_einsum,
    **{
        name: _Ufunc(getattr(np, name), n) for n, names in _UFUNCS.items() for name in names.split()
    },
    **{name: _function(getattr(np, name), signature) for name, signature in _FUNCTIONS.items()},
    **{name: _function(getattr(np, name), signature) for name, signature in _CREATION.items()},
    **{name: getattr(np, name) for name in _SAME.split()},
)
_special = _module(
    "cupyx.scipy.special",
    expit=_Ufunc(_expit, 1),
    **{name: _Ufunc(getattr(scipy.special, name), 1) for name in ("erf", "erfc", "ndtr")},
)
_scipy = _module("cupyx.scipy", special=_special)
_cupyx = _module("cupyx", scipy=_scipy)


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ``import cupy`` find the stand-in until the test ends, and return it."""
    for module in (cupy, _lib, _tricks, _cupyx, _scipy, _special):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cupy

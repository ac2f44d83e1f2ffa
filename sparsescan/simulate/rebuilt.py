"""Copy the user's functions with replacements for NumPy and math, to read them on symbols.

The user's function and its module stay unchanged: the copy has its own globals.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import math
import sysconfig
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy import special

from .symbols import Symbols, elements, has_symbols, is_float, symbols
from .tape import RefusedError, Tape

# Functions of :mod:`math` that have another name in NumPy.
_MATHS = {"fabs": "absolute", "pow": "power", "atan": "arctan", "asin": "arcsin", "acos": "arccos"}
_MATHS |= {"atan2": "arctan2", "asinh": "arcsinh"}


class _Module:
    """A module in which some functions are replaced."""

    def __init__(self, module: types.ModuleType, others: dict[str, Any]) -> None:
        self.__dict__.update(others)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Rows:
    """``np.r_`` and ``np.c_`` for arrays of symbols."""

    def __init__(self, tape: Tape, plain: Any, join: Callable[..., Any]) -> None:
        self._tape, self._plain, self._join = tape, plain, join

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if not has_symbols(parts):
            return self._plain[key]
        whole = [self._plain[each] if isinstance(each, slice) else each for each in parts]
        return self._join([np.atleast_1d(symbols(self._tape, each)) for each in whole])


class Rebuilt:
    """The replacements that functions see while a tape reads them.

    Parameters
    ----------
    tape : Tape
        The tape.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        numpy, maths = self._numpy(), self._math()
        self._others: dict[int, Any] = {
            id(np): _Module(np, numpy),
            id(math): _Module(math, maths),
            id(float): _Number,
        }
        for module, others in ((np, numpy), (math, maths)):
            self._others |= {id(getattr(module, name)): other for name, other in others.items()}
        self._known: dict[int, tuple[Any, Any]] = {}
        self._kept: list[Any] = []

    def _numpy(self) -> dict[str, Any]:
        tape = self._tape
        others: dict[str, Any] = {
            name: self._filled(getattr(np, name), value)
            for name, value in {"zeros": 0.0, "ones": 1.0, "empty": np.nan, "full": None}.items()
        }
        for name in ("array", "asarray", "asanyarray", "ascontiguousarray"):
            others[name] = self._array(getattr(np, name), name == "array")
        for name in ("concatenate", "stack", "hstack", "vstack", "column_stack", "dstack"):
            others[name] = self._joined(getattr(np, name))
        others["r_"] = _Rows(tape, np.r_, np.concatenate)
        others["c_"] = _Rows(tape, np.c_, np.column_stack)
        others["float64"] = _Number
        others["vectorize"] = self._each
        others["fromiter"] = lambda given, *rest: others["array"](list(given), *rest)
        return others

    def _math(self) -> dict[str, Any]:
        others = {}
        for name in (*_MATHS, "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin"):
            others[name] = _either(getattr(math, name), getattr(np, _MATHS.get(name, name)))
        for name in ("cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "hypot", "copysign"):
            others[name] = _either(getattr(math, name), getattr(np, name))
        for name in ("erf", "erfc"):
            others[name] = _either(getattr(math, name), getattr(special, name))
        return others

    def _filled(self, plain: Any, value: float | None) -> Callable[..., Any]:
        """Return a function that makes arrays into which symbols may be written later."""

        def filled(shape: Any, *given: Any, **options: Any) -> Any:
            fill = (
                options.get("fill_value", given[0] if given else None) if value is None else value
            )
            own = options.pop(
                "dtype", given[value is None] if len(given) > (value is None) else None
            )
            is_whole = own is None and value is None and not isinstance(fill, float | Symbols)
            if is_whole or np.dtype(own or float).kind != "f":
                return plain(shape, *given, **options | ({} if own is None else {"dtype": own}))
            return Symbols(self._tape, np.full(shape, elements(self._tape, fill)))

        return filled

    def _array(self, plain: Any, copies: bool) -> Callable[..., Any]:
        def array(given: Any, *rest: Any, **options: Any) -> Any:
            if not has_symbols(given):
                return plain(given, *rest, **options)
            dtype = options.pop("dtype", rest[0] if rest else None)
            if len(rest) > 1 or not is_float(dtype) or any(options.values()):
                raise RefusedError(f"np.{plain.__name__} with such arguments")
            ids = elements(self._tape, given)
            is_logical = isinstance(given, Symbols) and given.is_logical
            return Symbols(self._tape, ids.copy() if copies else ids, is_logical)

        return array

    def _each(self, function: Any, *given: Any, **options: Any) -> Callable[..., Any]:
        """Return a function of arrays that calls another function with each element."""
        plain = np.vectorize(function, *given, **options)

        def each(*arrays: Any) -> Any:
            if not has_symbols(arrays):
                return plain(*arrays)
            own = np.broadcast_arrays(*(elements(self._tape, array) for array in arrays))
            rows = zip(*(ids.reshape(-1) for ids in own), strict=True)
            found = [function(*(Symbols(self._tape, x) for x in row)) for row in rows]
            return Symbols(self._tape, elements(self._tape, found).reshape(own[0].shape))

        return each

    def _joined(self, plain: Any) -> Callable[..., Any]:
        """Return a function of lists that may contain symbols."""

        def joined(arrays: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(arrays, list | tuple) and has_symbols(arrays):
                arrays = [symbols(self._tape, each) for each in arrays]
            return plain(arrays, *rest, **options)

        return joined

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a copy of a function that works on symbols."""
        if isinstance(function, types.MethodType):
            return types.MethodType(self.function(function.__func__), function.__self__)
        if isinstance(function, functools.partial):
            return functools.partial(
                self.function(function.func), *function.args, **function.keywords
            )
        function = self._plain(function)
        if not isinstance(function, types.FunctionType):
            call = vars(type(function)).get("__call__")
            is_own = isinstance(call, types.FunctionType)
            return types.MethodType(self.function(call), function) if is_own else function
        if id(function) not in self._known:
            self._copy(function)
        found: Callable[..., Any] = self._known[id(function)][1]
        return found

    def _copy(self, function: types.FunctionType) -> None:
        names, given = _names(function.__code__), function.__globals__
        kept = *names, "__name__", "__builtins__"
        own = {"float": float, **{name: given[name] for name in kept if name in given}}
        cells = [types.CellType() for _ in function.__closure__ or ()]
        found = types.FunctionType(
            function.__code__, own, function.__name__, function.__defaults__, tuple(cells)
        )
        found.__kwdefaults__ = function.__kwdefaults__
        self._known[id(function)] = function, found  # first: the others may call it
        for name in names & own.keys():
            own[name] = self._other(own[name])
        for cell, other in zip(cells, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # one that is empty
                cell.cell_contents = self._other(other.cell_contents)

    def _plain(self, function: Any) -> Any:
        """Return the function that Numba compiles, with Numba's powers of complex numbers."""
        found = getattr(function, "py_func", None)
        if isinstance(found, types.FunctionType):
            self._tape.is_compiled = True
            return found
        return function

    def _other(self, value: Any) -> Any:
        """Return the replacement of an object that a function names."""
        other = self._others.get(id(value))
        if other is not None:
            return other
        if type(value) is np.ndarray and value.dtype == np.float64:
            # So that the tape records products with it, and writes to it.
            self._others[id(value)] = array = Symbols(self._tape, self._tape.constant(value))
            self._kept.append(value)
            return array
        value = self._plain(value)
        is_own = isinstance(value, types.FunctionType) and not _is_library(value)
        return self.function(value) if is_own else value


def state_of(function: Any) -> bytes | None:
    """Return a digest of everything a function may read besides its arguments; None if unknown."""
    digest = hashlib.blake2b()
    try:
        _add_state(digest.update, function, set())
    except (_UnknownError, RecursionError, ValueError):  # of an empty cell
        return None
    return digest.digest()


class _UnknownError(Exception):
    """A function may read an object whose state is unknown."""


def _add_state(update: Callable[[bytes], None], value: Any, seen: set[int]) -> None:
    """Add to the digest everything that an object depends on."""
    value = getattr(value, "py_func", value)
    update(type(value).__name__.encode())
    inner: Any = ()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif sp.issparse(value):
        inner = value.shape, *vars(sp.csr_array(value)).values()
    elif isinstance(value, _PLAIN) or value is None:
        update(repr(value).encode())
    elif isinstance(value, tuple | list):
        inner = len(value), *value
    elif isinstance(value, dict):
        inner = *value.keys(), *value.values()
    elif isinstance(value, types.MethodType):
        inner = value.__func__, value.__self__
    elif isinstance(value, functools.partial):
        inner = value.func, value.args, value.keywords
    elif isinstance(value, types.FunctionType) and not _is_library(value):
        names = sorted(_names(value.__code__) & value.__globals__.keys())
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        update(marshal.dumps(value.__code__))
        inner = value.__defaults__, value.__kwdefaults__, *map(value.__globals__.get, names), *cells
    elif isinstance(value, np.ufunc | types.ModuleType):
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _KNOWN:
            raise _UnknownError
        update(value.__name__.encode())
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        if str(value.__module__).partition(".")[0] not in _KNOWN:
            raise _UnknownError
        update(f"{value.__module__}.{value.__qualname__}".encode())
    elif isinstance(getattr(value, "__dict__", None), dict) and not hasattr(value, "__slots__"):
        inner = *vars(type(value)).values(), vars(value)
    elif not isinstance(value, _DESCRIPTORS):
        raise _UnknownError
    if inner and id(value) not in seen:
        seen.add(id(value))
        for each in inner:
            _add_state(update, each, seen)


_PLAIN = bool, int, float, complex, str, bytes, np.number, np.bool_
# Modules whose functions are not copied.
_KNOWN = {"builtins", "numpy", "math", "scipy"}
_STANDARD = sysconfig.get_path("stdlib")
_DESCRIPTORS = types.GetSetDescriptorType | types.MemberDescriptorType


def _either(plain: Any, of_symbols: Any) -> Callable[..., Any]:
    return lambda *given: of_symbols(*given) if has_symbols(given) else plain(*given)


class _Checks(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, float | Symbols)


class _Number(metaclass=_Checks):
    """``float``, which leaves symbols unchanged."""

    dtype = np.dtype(float)

    def __new__(cls, given: Any = 0.0) -> Any:
        return given if isinstance(given, Symbols) else float(given)


def _names(code: types.CodeType) -> set[str]:
    """Return all names that code and its inner functions may look up."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_library(function: types.FunctionType) -> bool:
    path = function.__code__.co_filename
    return "site-packages" in path or path.startswith((_STANDARD, "<__array"))

"""Elementwise functions of one number, as device functions; NaN passes as in PyTorch."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ...arrays.cuda import SIMULATED, cuda

_LIBRARY: Any = np if SIMULATED else math


@cache
def elementwise(dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return device functions of numbers of a dtype by their names, and its 0 and 1."""
    real, zero, one = dtype.type, dtype.type(0), dtype.type(1)
    library_exp, library_tanh, library_log = _LIBRARY.exp, _LIBRARY.tanh, _LIBRARY.log
    library_expm1, library_log1p = _LIBRARY.expm1, _LIBRARY.log1p
    library_sqrt, library_sin, library_cos = _LIBRARY.sqrt, _LIBRARY.sin, _LIBRARY.cos

    @cuda.jit(device=True)
    def sigmoid(a):
        return one / (one + real(library_exp(-a)))

    @cuda.jit(device=True)
    def tanh(a):
        return real(library_tanh(a))

    @cuda.jit(device=True)
    def exp(a):
        return real(library_exp(a))

    @cuda.jit(device=True)
    def expm1(a):
        return real(library_expm1(a))

    @cuda.jit(device=True)
    def log(a):
        return real(library_log(a))

    @cuda.jit(device=True)
    def log1p(a):
        return real(library_log1p(a))

    @cuda.jit(device=True)
    def sqrt(a):
        return real(library_sqrt(a))

    @cuda.jit(device=True)
    def sin(a):
        return real(library_sin(a))

    @cuda.jit(device=True)
    def cos(a):
        return real(library_cos(a))

    @cuda.jit(device=True)
    def absolute(a):
        return real(abs(a))

    @cuda.jit(device=True)
    def relu(a):
        return zero if a <= zero else a

    @cuda.jit(device=True)
    def softplus(a):
        return (zero if a <= zero else a) + real(library_log1p(real(library_exp(-abs(a)))))

    @cuda.jit(device=True)
    def minimum(a, b):
        return a if a <= b or a != a else b

    @cuda.jit(device=True)
    def maximum(a, b):
        return a if a >= b or a != a else b

    @cuda.jit(device=True)
    def less(a, b):
        return one if a < b else zero

    @cuda.jit(device=True)
    def less_equal(a, b):
        return one if a <= b else zero

    @cuda.jit(device=True)
    def where(condition, a, b):
        return a if condition != zero else b

    functions = (
        *(sigmoid, tanh, exp, expm1, log, log1p, sqrt, sin, cos, absolute, relu, softplus),
        *(minimum, maximum, less, less_equal, where),
    )
    named = {each.py_func.__name__ if not SIMULATED else each.__name__: each for each in functions}
    return named | {"real": real, "zero": zero, "one": one, "inf": math.inf, "nan": math.nan}

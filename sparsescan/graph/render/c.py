"""Expressions of one unit in C99, and the functions that they call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from ..operations import Node
from .base import Renderer

# Words of C.
_KEYWORDS = (
    *("alignas", "alignof", "asm", "auto", "bool", "break", "case", "char", "const", "constexpr"),
    *("continue", "default", "do", "double", "else", "enum", "extern", "false", "float", "for"),
    *("goto", "if", "inline", "int", "long", "nullptr", "register", "restrict", "return", "short"),
    *("signed", "sizeof", "static", "static_assert", "struct", "switch", "thread_local", "true"),
    *("typedef", "typeof", "typeof_unqual", "union", "unsigned", "void", "volatile", "while"),
)


def literal(value: float, dtype: np.dtype[np.floating]) -> str:
    """Return a number of a dtype in C, with as many digits as tell it from all others."""
    if not math.isfinite(value):
        text = "(real)NAN" if math.isnan(value) else "(real)INFINITY"
    else:
        text = str(dtype.type(abs(value))) + "f" * (dtype == np.float32)
    return f"(-{text})" if math.copysign(1, value) < 0 else text


class CRenderer(Renderer):
    """Write expressions on single numbers, of the type ``real``."""

    target = "c"
    assignment = "const real {} = {};"
    words: ClassVar[tuple[str, ...]] = (*_KEYWORDS, "k", "s", "state", "x", "y", r"t\d+")

    def __init__(self, names: Mapping[Node, str], dtype: np.dtype[np.floating]) -> None:
        # Those in capitals may be macros.
        known = re.compile(r"[a-z]\w*", re.ASCII).fullmatch
        super().__init__({vector: name for vector, name in names.items() if known(name)})
        self._dtype = dtype

    def number(self, value: float) -> str:
        """Return the text of a number."""
        return literal(value, self._dtype)


# What the functions of expressions are, in order of dependence; of those by series the second.
# These choose by integers: compilers turn choices of numbers into branches, which stay scalar.
_FUNCTIONS: dict[str, str | tuple[str, str]] = {
    "number_of": (
        "",
        """/* The number that has these bits. */
static inline real number_of(BITS bits)
{
    union { BITS bits; real value; } both;
    both.bits = bits;
    return both.value;
}""",
    ),
    "bits_of": (
        "",
        """static inline BITS bits_of(real value)
{
    union { BITS bits; real value; } both;
    both.value = value;
    return both.bits;
}""",
    ),
    "bounded": (
        "",
        """/* a, at most BOUND from 0, beyond which exponentials are 0 or infinite. */
static inline real bounded(real a)
{
    const BITS bits = bits_of(REAL(fabs)(a)), most = bits_of(BOUND);
    return REAL(copysign)(number_of(bits < most ? bits : most), a);
}""",
    ),
    "unless_nan": (
        "",
        """/* b, or NaN if a is. */
static inline real unless_nan(real b, real a)
{
    const BITS is_nan = bits_of(REAL(fabs)(a)) > bits_of((real)INFINITY);
    return number_of(bits_of(b) | -is_nan);
}""",
    ),
    "power_of_two": (
        "",
        """static inline real power_of_two(int n)
{
    return number_of((BITS)(n + BIAS) << DIGITS);
}""",
    ),
    "rounded": (
        "",
        """/* The integer next to a / log(2). */
static inline int rounded(real a)
{
    return (int)(a * INVERSE_LOG2 + REAL(copysign)(HALF, a));
}""",
    ),
    "series": (
        "",
        """/* exp(a - n log(2)) - 1, by the terms of its series. */
static inline real series(real a, int n)
{
    const real b = (a - (real)n * LOG2_HIGH) - (real)n * LOG2_LOW;
    return SERIES;
}""",
    ),
    "real_exp": (
        "REAL(exp)(a)",
        """static inline real real_exp(real a)
{
    const real b = bounded(a);
    const int n = rounded(b), half = n / 2;
    return unless_nan((1 + series(b, n)) * power_of_two(n - half) * power_of_two(half), a);
}""",
    ),
    "real_expm1": (
        "REAL(expm1)(a)",
        """static inline real real_expm1(real a)
{
    const real b = bounded(a);
    const int n = rounded(b), half = n / 2;
    const real scale = power_of_two(n - half);
    const real c = series(b, n) * scale + (scale - power_of_two(-half));
    return unless_nan(c * power_of_two(half), a);
}""",
    ),
    "real_tanh": (
        "REAL(tanh)(a)",
        """static inline real real_tanh(real a)
{
    const real b = real_expm1(-2 * REAL(fabs)(a));
    return REAL(copysign)(b / (2 + b), a);
}""",
    ),
    "real_sigmoid": "1 / (1 + real_exp(-a))",
    "real_softplus": "(a > 0 ? a : 0) + REAL(log1p)(real_exp(-REAL(fabs)(a)))",
    "real_log": "REAL(log)(a)",
    "real_log1p": "REAL(log1p)(a)",
    "real_sqrt": "REAL(sqrt)(a)",
    "real_sin": "REAL(sin)(a)",
    "real_cos": "REAL(cos)(a)",
    "real_arctan2": "REAL(atan2)(a, b)",
    "real_absolute": "REAL(fabs)(a)",
    "real_relu": "a <= 0 ? 0 : a",
    "real_minimum": "a < b || a != a ? a : b",
    "real_maximum": "a > b || a != a ? a : b",
}


def functions_for(text: str, dtype: np.dtype[np.floating], by_series: bool) -> list[str]:
    """Return definitions of all functions that a text calls, each behind those that it calls.

    Parameters
    ----------
    text : str
        The text.
    dtype : numpy.dtype
        What ``real`` is.
    by_series : bool
        Whether exponentials are polynomials, which compilers compute in vectors.
    """
    found: list[str] = []
    for name, given in reversed(_FUNCTIONS.items()):
        short, long = (given, "") if isinstance(given, str) else given
        if re.search(rf"\b{name}\(", "\n".join([text, *found])):
            parameters = "real a, real b" if re.search(r"\bb\b", short) else "real a"
            body = f"static inline real {name}({parameters})\n{{\n    return {short};\n}}"
            found.append(long if long and by_series else body)
    constants = _constants(dtype) if any("BITS" in each for each in found) else []
    return [*constants, *reversed(found)]


def _constants(dtype: np.dtype[np.floating]) -> Iterable[str]:
    """Return what polynomials of a dtype have of numbers."""
    about = np.finfo(dtype)
    # The products of the first part and of exponents are exact.
    high = math.ldexp(math.floor(math.ldexp(math.log(2), 12)), -12)
    low = {"float32": math.log(2) - high, "float64": _LOG2_DOUBLE - high + _LOG2_MORE}
    terms = 7 if dtype == np.float32 else 13
    series = literal(1 / math.factorial(terms), dtype)
    for n in reversed(range(1, terms)):
        series = f"({literal(1 / math.factorial(n), dtype)} + b * {series})"
    numbers = {
        "HALF": 0.5,
        "BOUND": math.ceil((about.nmant + about.maxexp) * math.log(2)),
        "INVERSE_LOG2": 1 / math.log(2),
        "LOG2_HIGH": high,
        "LOG2_LOW": low[dtype.name],
    }
    texts = {name: literal(value, dtype) for name, value in numbers.items()}
    texts |= {"BITS": f"int{about.bits}_t", "BIAS": str(about.maxexp - 1)}
    texts |= {"DIGITS": str(about.nmant), "SERIES": f"b * {series}"}
    return ["#include <stdint.h>", *(f"#define {name} {each}" for name, each in texts.items())]


_LOG2_DOUBLE = math.log(2)
# What is left of the logarithm of 2 behind a double.
_LOG2_MORE = 2.3190468138462996e-17

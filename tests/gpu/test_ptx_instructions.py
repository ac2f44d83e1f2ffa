"""Instructions of PTX, one form after the other, against Python's integers and NumPy's floats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

from ptx import FaultError, Program, PtxError  # noqa: E402

_FLOATS = {"f32": np.float32, "f64": np.float64}
_PREFIX = {"pred": "%p", "16": "%rs", "32": "%r", "64": "%rd", "f32": "%f", "f64": "%fd"}
_REGISTERS = """
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .f32 %f<9>;
    .reg .b64 %rd<19>;
    .reg .f64 %fd<9>;
"""


def register(kind: str, k: int) -> str:
    return _PREFIX[kind if kind in _PREFIX else kind[1:]] + str(k)


def bits_of(value: Any, kind: str) -> int:
    """Return what is stored of a value, as a number of 64 bits."""
    if kind in _FLOATS:
        number = _FLOATS[kind](value)
        return int(number.view(f"u{number.itemsize}"))
    return int(value) & ((1 << (1 if kind == "pred" else int(kind[1:]))) - 1)


def fetch(kind: str, k: int) -> list[str]:
    """Lines that load parameter `k`, of 64 bits, into a register of this kind."""
    lines = [f"ld.param.u64 %rd18, [a_{k}];"]
    name = register(kind, k)
    if kind == "pred":
        return [*lines, f"setp.ne.s64 {name}, %rd18, 0;"]
    if kind == "f64":
        return [*lines, f"mov.b64 {name}, %rd18;"]
    if kind[1:] == "64":
        return [*lines, f"mov.u64 {name}, %rd18;"]
    if kind == "f32":
        return [*lines, "cvt.u32.u64 %r8, %rd18;", f"mov.b32 {name}, %r8;"]
    return [*lines, f"cvt.u{kind[1:]}.u64 {name}, %rd18;"]


def keep(kind: str) -> list[str]:
    """Lines that store register 7 of this kind as 64 bits."""
    name = register(kind, 7)
    if kind == "pred":
        return [f"selp.u64 %rd17, 1, 0, {name};", "st.global.u64 [%rd16], %rd17;"]
    if kind[1:] == "16":
        return [f"cvt.u64.u16 %rd17, {name};", "st.global.u64 [%rd16], %rd17;"]
    return [f"st.global.{kind if kind in _FLOATS else 'b' + kind[1:]} [%rd16], {name};"]


class Operation:
    """An instruction, whose operands are of some kinds; compiled once."""

    def __init__(self, text: str, kinds: str, result: str) -> None:
        self.kinds, self.result = kinds.split(), result
        count = len(self.kinds)
        parameters = ", ".join(f".param .u64 a_{k}" for k in range(count + 1))
        operands = {f"a{k}": register(kind, k) for k, kind in enumerate(self.kinds)}
        lines = [line for k, kind in enumerate(self.kinds) for line in fetch(kind, k)]
        lines += [f"ld.param.u64 %rd16, [a_{count}];"]
        lines += [text.format(out=register(result, 7), **operands) + ";", *keep(result), "ret;"]
        header = ".visible .entry k(\n" + parameters.replace(", ", ",\n") + "\n)\n{" + _REGISTERS
        self._program = Program(header + "\n".join(lines) + "\n}\n", "k")

    def __call__(self, *values: Any) -> int:
        out = np.zeros(1, np.uint64)
        given = [bits_of(value, kind) for value, kind in zip(values, self.kinds, strict=True)]
        signed = [value - (value >> 63 << 64) for value in given]
        place = out.ctypes.data
        self._program.launch(1, 1, (*signed, place), [(place, 8)])
        return int(out[0])


def integers(kind: str) -> st.SearchStrategy[int]:
    bits = int(kind[1:])
    least, most = (
        (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    )
    edges = [x for x in (least, least + 1, -1, 0, 1, 2, most - 1, most) if least <= x <= most]
    return st.one_of(st.sampled_from(edges), st.integers(least, most))


def floats(kind: str) -> st.SearchStrategy[float]:
    return st.floats(width=int(kind[1:]), allow_subnormal=True)


def of_kind(kind: str) -> st.SearchStrategy[Any]:
    if kind == "pred":
        return st.booleans()
    return floats(kind) if kind in _FLOATS else integers(kind)


def check(operation: Operation, oracle: Callable[..., Any], *values: Any) -> None:
    """NaNs are alike."""
    got = operation(*values)
    with np.errstate(all="ignore"):
        expected = oracle(*values)
    if operation.result in _FLOATS:
        kind = _FLOATS[operation.result]
        result = np.array([got], np.uint64).astype(f"u{kind().itemsize}").view(kind)[0]
        assert (np.isnan(result) and np.isnan(expected)) or (
            result == expected and np.signbit(result) == np.signbit(expected)
        )
    else:
        assert got == bits_of(expected, operation.result)


def divided(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shift_left(a: int, by: int, bits: int) -> int:
    return a << by if by < bits else 0


def fused(kind: str) -> Callable[..., Any]:
    """One rounding of the exact sum; that of infinite and zero ones is the plain one's."""
    real = _FLOATS[kind]

    def value(a: float, b: float, c: float) -> Any:
        plain = real(a) * real(b) + real(c)
        if not np.all(np.isfinite([a, b, c])):
            return plain
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            return plain
        return rounded(exact, real)

    return value


def rounded(exact: Fraction, kind: Any) -> Any:
    """Return the nearest float, of two the even one."""
    info = np.finfo(kind)
    size, sign = abs(exact), -1 if exact < 0 else 1
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    last = max(exponent, int(info.minexp)) - info.nmant
    with np.errstate(over="ignore"):
        return kind(sign * np.ldexp(np.float64(round(size / Fraction(2) ** last)), last))


FORMS: list[tuple[str, str, str, Callable[..., Any]]] = []
for _bits in (16, 32, 64):
    _s, _u, _b = f"s{_bits}", f"u{_bits}", f"b{_bits}"
    for _name, _oracle in (
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
    ):
        FORMS.append((f"{_name}.{_s} {{out}}, {{a0}}, {{a1}}", f"{_s} {_s}", _s, _oracle))
    for _k in (_s, _u):
        _two = "{out}, {a0}, {a1}"
        FORMS += [
            (f"mul.hi.{_k} {_two}", f"{_k} {_k}", _k, lambda a, b, n=_bits: a * b >> n),
            (f"min.{_k} {_two}", f"{_k} {_k}", _k, min),
            (f"max.{_k} {_two}", f"{_k} {_k}", _k, max),
            (
                f"mad.lo.{_k} {{out}}, {{a0}}, {{a1}}, {{a2}}",
                f"{_k} {_k} {_k}",
                _k,
                lambda a, b, c: a * b + c,
            ),
            (f"shr.{_k} {_two}", f"{_k} u32", _k, lambda a, by: a >> by),
            *[
                (f"setp.{_c}.{_k} {_two}", f"{_k} {_k}", "pred", _f)
                for _c, _f in (
                    ("lt", lambda a, b: a < b),
                    ("le", lambda a, b: a <= b),
                    ("gt", lambda a, b: a > b),
                    ("ge", lambda a, b: a >= b),
                    ("eq", lambda a, b: a == b),
                    ("ne", lambda a, b: a != b),
                )
            ],
        ]
        if _bits < 64:
            _w = f"{_k[0]}{2 * _bits}"
            FORMS.append((f"mul.wide.{_k} {_two}", f"{_k} {_k}", _w, lambda a, b: a * b))
        for _to in ("s16", "u16", "s32", "u32", "s64", "u64"):
            FORMS.append((f"cvt.{_to}.{_k} {{out}}, {{a0}}", _k, _to, lambda a: a))
        for _to in _FLOATS:
            FORMS.append(
                (
                    f"cvt.rn.{_to}.{_k} {{out}}, {{a0}}",
                    _k,
                    _to,
                    lambda a, kind=_to: rounded(Fraction(a), _FLOATS[kind]) if a else 0.0,
                )
            )
            for _mode, _f in (
                ("rni", np.rint),
                ("rzi", np.trunc),
                ("rmi", np.floor),
                ("rpi", np.ceil),
            ):
                _low = -(1 << _bits - 1) if _k[0] == "s" else 0
                _high = (1 << _bits) - 1 + _low

                def _whole(a: float, f: Any = _f, low: int = _low, high: int = _high) -> int:
                    if np.isnan(a):
                        return 0
                    if np.isinf(a):
                        return high if a > 0 else low
                    return min(max(int(f(np.float64(a))), low), high)

                FORMS.append((f"cvt.{_mode}.{_k}.{_to} {{out}}, {{a0}}", _to, _k, _whole))
    FORMS += [
        (
            f"shl.{_b} {{out}}, {{a0}}, {{a1}}",
            f"{_b} u32",
            _b,
            lambda a, by, n=_bits: shift_left(a, by, n),
        ),
        (f"and.{_b} {{out}}, {{a0}}, {{a1}}", f"{_b} {_b}", _b, lambda a, b: a & b),
        (f"or.{_b} {{out}}, {{a0}}, {{a1}}", f"{_b} {_b}", _b, lambda a, b: a | b),
        (f"xor.{_b} {{out}}, {{a0}}, {{a1}}", f"{_b} {_b}", _b, lambda a, b: a ^ b),
        (f"not.{_b} {{out}}, {{a0}}", _b, _b, lambda a: ~a),
        (f"neg.{_s} {{out}}, {{a0}}", _s, _s, lambda a: -a),
        (f"abs.{_s} {{out}}, {{a0}}", _s, _s, abs),
        (
            f"selp.{_b} {{out}}, {{a0}}, {{a1}}, {{a2}}",
            f"{_b} {_b} pred",
            _b,
            lambda a, b, p: a if p else b,
        ),
        (f"setp.eq.{_b} {{out}}, {{a0}}, {{a1}}", f"{_b} {_b}", "pred", lambda a, b: a == b),
    ]
for _bits in (32, 64):
    FORMS += [
        (f"popc.b{_bits} {{out}}, {{a0}}", f"b{_bits}", "u32", lambda a: bin(a).count("1")),
        (
            f"bfi.b{_bits} {{out}}, {{a0}}, {{a1}}, 6, 20",
            f"b{_bits} b{_bits}",
            f"b{_bits}",
            lambda a, b: (b & ~(((1 << 20) - 1) << 6)) | (a & ((1 << 20) - 1)) << 6,
        ),
        (f"bfe.u{_bits} {{out}}, {{a0}}, 3, 9", f"u{_bits}", f"u{_bits}", lambda a: a >> 3 & 511),
    ]
FORMS += [
    (
        "dp2a.lo.u32.u32 {out}, {a0}, {a1}, {a2}",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c,
    ),
    ("not.pred {out}, {a0}", "pred", "pred", lambda p: not p),
    ("mov.pred {out}, -1", "", "pred", lambda: True),
    *[
        (f"{_name}.pred {{out}}, {{a0}}, {{a1}}", "pred pred", "pred", _f)
        for _name, _f in (
            ("and", lambda p, q: p and q),
            ("or", lambda p, q: p or q),
            ("xor", lambda p, q: p != q),
        )
    ],
    ("mov.b64 {out}, {{{a0}, {a1}}}", "b32 b32", "b64", lambda a, b: a | b << 32),
    ("mov.b32 {out}, {{{a0}, {a1}}}", "b16 b16", "b32", lambda a, b: a | b << 16),
    ("mov.b64 {{%r1, {out}}}, {a0}", "b64", "b32", lambda a: a >> 32),
    ("mov.b32 {out}, {a0}", "f32", "b32", lambda a: bits_of(a, "f32")),
    ("mov.b64 {out}, {a0}", "f64", "b64", lambda a: bits_of(a, "f64")),
    ("cvt.f64.f32 {out}, {a0}", "f32", "f64", np.float64),
    ("cvt.rn.f32.f64 {out}, {a0}", "f64", "f32", np.float32),
]


def _as(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*(_FLOATS[kind](value) for value in values))


def _larger(a: Any, b: Any) -> Any:
    return (
        b
        if np.isnan(a)
        else a
        if np.isnan(b)
        else max((a, b), key=lambda x: (x, 1 - np.signbit(x)))
    )


def _smaller(a: Any, b: Any) -> Any:
    return -_larger(-a, -b)


for _k in _FLOATS:
    _two = "{out}, {a0}, {a1}"
    FORMS += [
        *[
            (f"{_name}.{_k} {_two}", f"{_k} {_k}", _k, _as(_k, _f))
            for _name, _f in (
                ("add", np.add),
                ("sub", np.subtract),
                ("mul", np.multiply),
                ("mul.rn", np.multiply),
                ("div.rn", np.divide),
                ("max", _larger),
                ("min", _smaller),
            )
        ],
        *[
            (f"{_name}.{_k} {{out}}, {{a0}}", _k, _k, _as(_k, _f))
            for _name, _f in (
                ("abs", np.abs),
                ("neg", np.negative),
                ("sqrt.rn", np.sqrt),
                ("mov", lambda a: a),
                (f"cvt.rni.{_k}", np.rint),
                (f"cvt.rzi.{_k}", np.trunc),
                (f"cvt.rmi.{_k}", np.floor),
                (f"cvt.rpi.{_k}", np.ceil),
            )
        ],
        (f"fma.rn.{_k} {{out}}, {{a0}}, {{a1}}, {{a2}}", f"{_k} {_k} {_k}", _k, fused(_k)),
        (
            f"selp.{_k} {{out}}, {{a0}}, {{a1}}, {{a2}}",
            f"{_k} {_k} pred",
            _k,
            lambda a, b, p: a if p else b,
        ),
        *[
            (f"setp.{_c}.{_k} {_two}", f"{_k} {_k}", "pred", _f)
            for _c, _f in (
                ("lt", lambda a, b: a < b),
                ("le", lambda a, b: a <= b),
                ("gt", lambda a, b: a > b),
                ("ge", lambda a, b: a >= b),
                ("eq", lambda a, b: a == b),
                ("ne", lambda a, b: a < b or a > b),
                ("ltu", lambda a, b: not a >= b),
                ("leu", lambda a, b: not a > b),
                ("gtu", lambda a, b: not a <= b),
                ("geu", lambda a, b: not a < b),
                ("equ", lambda a, b: not (a < b or a > b)),
                ("neu", lambda a, b: a != b),
                ("num", lambda a, b: a == a and b == b),
                ("nan", lambda a, b: a != a or b != b),
            )
        ],
    ]


def _flushed(value: Any) -> Any:
    """0 of its sign in place of a subnormal number."""
    small = abs(value) < np.finfo(np.float32).tiny
    return np.copysign(np.float32(0), value) if small else np.float32(value)


def _saturated(a: Any) -> Any:
    return np.float32(0) if np.isnan(a) else np.clip(a, np.float32(0), np.float32(1)) + 0


FORMS += [
    ("rcp.approx.ftz.f32 {out}, {a0}", "f32", "f32", lambda a: _flushed(1 / np.float32(a))),
    ("cvt.sat.f32.f32 {out}, {a0}", "f32", "f32", _as("f32", _saturated)),
    *[(f"rcp.rn.{_k} {{out}}, {{a0}}", _k, _k, _as(_k, np.reciprocal)) for _k in _FLOATS],
    *[
        (
            f"copysign.{_k} {{out}}, {{a0}}, {{a1}}",
            f"{_k} {_k}",
            _k,
            _as(_k, lambda sign, size: np.copysign(size, sign)),
        )
        for _k in _FLOATS
    ],
]


# By default one in so many, and in the rest one in four.
SAMPLE = 16


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form,
            id=form[0].split()[0],
            marks=[pytest.mark.release if k % 4 else pytest.mark.slow] * bool(k % SAMPLE),
        )
        for k, form in enumerate(FORMS)
    ],
)
def test_an_instruction(form: tuple[str, str, str, Callable[..., Any]]) -> None:
    text, kinds, result, oracle = form
    operation = Operation(text, kinds, result)

    @given(st.tuples(*map(of_kind, kinds.split())))
    def every(values: tuple[Any, ...]) -> None:
        check(operation, oracle, *values)

    every()


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["s", "u"])
@pytest.mark.parametrize("name", ["div", "rem"])
def test_divisions(name: str, sign: str, bits: int) -> None:
    """Zero, and the quotient that there is no number for, stop the launch."""
    kind = f"{sign}{bits}"
    operation = Operation(f"{name}.{kind} {{out}}, {{a0}}, {{a1}}", f"{kind} {kind}", kind)

    @given(integers(kind), integers(kind))
    def every(a: int, b: int) -> None:
        if b == 0 or (b == -1 and a == -(1 << bits - 1)):
            with pytest.raises(FaultError, match="division"):
                operation(a, b)
            return
        quotient = divided(a, b)
        check(operation, lambda a, b: quotient if name == "div" else a - quotient * b, a, b)

    every()


@pytest.mark.parametrize(
    "text",
    ["sin.approx.f32 {out}, {a0}", "add.rz.f64 {out}, {a0}, {a0}", "ld.const.f32 {out}, [%rd1]"],
)
def test_what_has_no_model_is_refused(text: str) -> None:
    with pytest.raises(PtxError, match=r"line \d+: no model of"):
        Operation(text, "f32", "f32")

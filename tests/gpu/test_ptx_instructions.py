"""Instructions of PTX, one form after the other, against Python's integers and NumPy's floats."""

from __future__ import annotations

import functools
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


def _rounded_down(a: float, b: float, c: float) -> Any:
    """Return the float below the exact ``a·b + c``, or that itself."""
    near = fused("f32")(a, b, c)
    if not np.all(np.isfinite([a, b, c, near])):
        return near
    above = Fraction(float(near)) > Fraction(a) * Fraction(b) + Fraction(c)
    return np.nextafter(near, np.float32(-np.inf)) if above else near


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


@given(st.floats(0, 1, width=32), st.floats(2.0**20, 2.0**24, width=32))
def test_sums_that_are_rounded_down(a: float, c: float) -> None:
    text = "fma.rm.f32 {out}, {a0}, {a1}, {a2}"
    check(_operation(text, "f32 f32 f32", "f32"), _rounded_down, a, 252.0, c)


@given(*[st.floats(-(2.0**24), 2.0**24, width=32)] * 2)
def test_sums_that_are_rounded_towards_zero(a: float, b: float) -> None:
    def oracle(a: float, b: float) -> Any:
        return _rounded_down(a, 1.0, b) if a + b >= 0 else -_rounded_down(-a, 1.0, -b)

    check(_operation("add.rz.f32 {out}, {a0}, {a1}", "f32 f32", "f32"), oracle, a, b)


@given(integers("u32"), integers("u32"), integers("u32"))
def test_a_carry_is_added_to_the_next_product(a: int, b: int, c: int) -> None:
    text = "mad.lo.cc.u32 %r5, {a0}, {a1}, {a2};\nmadc.hi.u32 {out}, {a0}, {a1}, 0"
    operation = _operation(text, "u32 u32 u32", "u32")
    check(operation, lambda a, b, c: (a * b + c) >> 32, a, b, c)


@given(st.floats(-200, 200, width=32))
def test_powers_of_two_are_within_an_ulp(a: float) -> None:
    bits = _operation("ex2.approx.ftz.f32 {out}, {a0}", "f32", "f32")(a)
    with np.errstate(over="ignore"):
        exact = _flushed(np.float32(np.exp2(np.float64(a))))
    ulp = np.spacing(np.abs(exact)) if np.isfinite(exact) else 0
    value = np.array(bits, np.uint32).view(np.float32)
    assert value == exact or abs(value - exact) <= ulp


_operation = functools.cache(Operation)


# By default one in so many.
SAMPLE = 16


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=form[0].split()[0], marks=[pytest.mark.slow] * bool(k % SAMPLE))
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


ATOMICS = {
    "add": lambda old, x: old + x,
    "max": max,
    "min": min,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["s32", "s64"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_operations(name: str, kind: str, space: str) -> None:
    """All threads of two blocks make one; the old value is that of some order of them."""
    letter = {"add": "u", "max": "s", "min": "s"}.get(name, "b")
    width, wide = kind[1:], kind == "s64"
    r = "%rd" if wide else "%r"
    text = f"""
.shared .align 8 .b8 cell[8];
.visible .entry k(
.param .u64 a_0,
.param .u64 a_1,
.param .u64 a_2
)
{{{_REGISTERS}
    ld.param.u64 %rd1, [a_0];
    ld.param.u64 %rd2, [a_1];
    ld.param.u64 %rd3, [a_2];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mul.wide.s32 %rd4, %r4, {int(width) // 8};
    add.s64 %rd5, %rd2, %rd4;
    ld.global.b{width} {r}6, [%rd5];
"""
    if space == "global":
        text += f"    atom.global.{name}.{letter}{width} {r}7, [%rd1], {r}6;\n"
    else:
        text += f"""
    mov.u64 %rd8, cell;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $SKIP;
    ld.global.b{width} {r}5, [%rd1];
    st.shared.b{width} [%rd8], {r}5;
$SKIP:
    bar.sync 0;
    atom.shared.{name}.{letter}{width} {r}7, [%rd8], {r}6;
    bar.sync 0;
    @%p1 bra $DONE;
    ld.shared.b{width} {r}5, [%rd8];
    mul.wide.s32 %rd4, %r3, {int(width) // 8};
    add.s64 %rd9, %rd3, %rd4;
    st.global.b{width} [%rd9], {r}5;
$DONE:
"""
    program = Program(text + "    ret;\n}\n", "k")
    dtype = np.dtype(f"i{int(width) // 8}")
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, (2, 40), dtype)
    cell, results = rng.integers(-9, 9, 1).astype(dtype), np.zeros(2, dtype)
    start = int(cell[0])
    arrays = cell, values, results
    places = [array.ctypes.data for array in arrays]
    program.launch(2, 40, places, [(array.ctypes.data, array.nbytes) for array in arrays])
    outcomes = [cell[0]] if space == "global" else results.tolist()
    terms = [values.ravel()] if space == "global" else list(values)
    for one, some in zip(outcomes, terms, strict=True):
        if name == "exch":
            assert one in some
            continue
        total = start
        for value in some.tolist():
            total = ATOMICS[name](total, value)
        assert bits_of(int(one), kind) == bits_of(total, kind)


def test_compare_and_swap() -> None:
    text = "atom.global.cas.b32 {out}, [{a2}], {a0}, {a1}"
    cell = np.array([7], np.int32)
    operation = Operation(text, "b32 b32 u64", "b32")
    place = cell.ctypes.data
    launch = operation._program.launch

    def with_cell(blocks: int, threads: int, arguments: Any, memory: Any) -> None:
        launch(blocks, threads, arguments, [*memory, (place, 4)])

    operation._program.launch = with_cell  # type: ignore[method-assign]
    assert operation(8, 9, place) == 7
    assert cell[0] == 7
    assert operation(7, 9, place) == 7
    assert cell[0] == 9


def test_lanes_exchange_values() -> None:
    """Each with that whose number differs in a bit, in whole warps only."""
    body = """
    mov.u32 %r1, %tid.x;
    mul.lo.u32 %r2, %r1, 7;
    shfl.sync.bfly.b32 %r3|%p1, %r2, 4, 31, -1;
    ld.param.u64 %rd1, [a_0];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r3;
    ret;
}
"""
    program = Program(".visible .entry k(\n.param .u64 a_0\n)\n{" + _REGISTERS + body, "k")
    out = np.zeros(64, np.uint32)
    program.launch(1, 64, (out.ctypes.data,), [(out.ctypes.data, out.nbytes)])
    np.testing.assert_array_equal(out, 7 * (np.arange(64) ^ 4))
    with pytest.raises(FaultError):
        program.launch(1, 36, (out.ctypes.data,), [(out.ctypes.data, out.nbytes)])


@pytest.mark.parametrize(
    "text",
    ["sin.approx.f32 {out}, {a0}", "add.rz.f64 {out}, {a0}, {a0}", "ld.const.f32 {out}, [%rd1]"],
)
def test_what_has_no_model_is_refused(text: str) -> None:
    with pytest.raises(PtxError, match=r"line \d+: no model of"):
        Operation(text, "f32", "f32")


def test_an_address_may_have_had_its_sign_flipped_and_flipped_back() -> None:
    body = """
    ld.param.u64 %rd1, [a_0];
    add.s64 %rd2, %rd1, {there};
    add.s64 %rd3, %rd2, {back};
    st.global.u64 [%rd3], 7;
    ret;
}}
"""
    out = np.zeros(1, np.uint64)
    memory = (out.ctypes.data,), [(out.ctypes.data, out.nbytes)]
    head = ".visible .entry k(\n.param .u64 a_0\n)\n{" + _REGISTERS
    Program(head + body.format(there=-(1 << 63), back=-(1 << 63)), "k").launch(1, 1, *memory)
    assert out[0] == 7
    most = (1 << 63) - 1
    with pytest.raises(FaultError, match="an address from arithmetic that overflowed"):
        Program(head + body.format(there=most, back=-most), "k").launch(1, 1, *memory)

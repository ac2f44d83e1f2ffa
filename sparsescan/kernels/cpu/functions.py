"""Functions of vectors of numbers, each an intrinsic whose code is a formula."""

from __future__ import annotations

import inspect
import math

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from .vector import Lanes, align_of, call_llvm


class _Term:
    """A vector in a formula: operations on it are written as code.

    Floats become vectors of them, and comparisons give masks, in which no NaN compares.
    """

    def __init__(self, builder, value):
        self.builder, self.value = builder, value
        self.kind = value.type
        self.is_float = not isinstance(self.kind.element, ir.IntType)

    @property
    def bits(self):
        """Return how many bits a number has."""
        return 8 * align_of(self.kind) if self.is_float else self.kind.element.width

    @property
    def mantissa(self):
        """Return how many of these bits are the mantissa."""
        return self.by_size(23, 52)

    @property
    def bias(self):
        """Return the bias of stored exponents."""
        return (1 << (self.bits - self.mantissa - 2)) - 1

    def bits_of(self, value):
        """Return the bits of a number, as an integer."""
        floats, integers = self.by_size((np.float32, np.int32), (np.float64, np.int64))
        return int(floats(value).view(integers))

    def by_size(self, single, double):
        """Return the first argument for float32, the second for float64."""
        return single if self.bits == 32 else double

    def made(self, value):
        """Return a new value of this value's kind."""
        return _Term(self.builder, value)

    def constant(self, value):
        """Return a vector of one number."""
        return ir.Constant(self.kind, [value] * self.kind.count)

    def number(self, value):
        """Return a vector of one number, of the type of this one."""
        return self.made(self.constant(value))

    def called(self, name, *others):
        """Call a function of LLVM."""
        args = [self.value, *map(self._value, others)]
        return self.made(call_llvm(self.builder, name, self.kind, args))

    def as_integers(self):
        """Return the bits of each number."""
        kind = ir.VectorType(ir.IntType(self.bits), self.kind.count)
        return self.made(self.builder.bitcast(self.value, kind))

    def as_floats(self):
        """Return the numbers of these bits."""
        element = ir.FloatType() if self.bits == 32 else ir.DoubleType()
        kind = ir.VectorType(element, self.kind.count)
        return self.made(self.builder.bitcast(self.value, kind))

    def _value(self, other):
        return other.value if isinstance(other, _Term) else self.constant(other)

    def _arithmetic(self, name, a, b):
        if self.is_float:
            return self.made(getattr(self.builder, f"f{name}")(a, b, flags=("contract",)))
        return self.made(getattr(self.builder, name)(a, b))

    def __add__(self, other):
        return self._arithmetic("add", self.value, self._value(other))

    __radd__ = __add__

    def __sub__(self, other):
        return self._arithmetic("sub", self.value, self._value(other))

    def __rsub__(self, other):
        return self._arithmetic("sub", self._value(other), self.value)

    def __mul__(self, other):
        return self._arithmetic("mul", self.value, self._value(other))

    def __truediv__(self, other):
        return self._arithmetic("div", self.value, self._value(other))

    def __rtruediv__(self, other):
        return self._arithmetic("div", self._value(other), self.value)

    def __abs__(self):
        return self.called("fabs")

    def __and__(self, other):
        return self.made(self.builder.and_(self.value, self._value(other)))

    def __xor__(self, other):
        return self.made(self.builder.xor(self.value, self._value(other)))

    def __lshift__(self, other):
        return self.made(self.builder.shl(self.value, self._value(other)))

    def __rshift__(self, other):
        return self.made(self.builder.lshr(self.value, self._value(other)))

    def _compared(self, comparison, other):
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return self.made(compare(comparison, self.value, self._value(other)))

    def equals(self, other):
        """Return where the numbers are equal."""
        return self._compared("==", other)

    def __lt__(self, other):
        return self._compared("<", other)

    def __le__(self, other):
        return self._compared("<=", other)

    def __gt__(self, other):
        return self._compared(">", other)

    def __ge__(self, other):
        return self._compared(">=", other)

    def chosen(self, a, b):
        """Return `a` where this mask is set, else `b`; at least one is a vector."""
        like = a if isinstance(a, _Term) else b
        return self.made(self.builder.select(self.value, like._value(a), like._value(b)))


def _fma(a, b, c):
    return a.called("fma", b, c)


def _polynomial(x, *coefficients):
    """Return ``coefficients[0] + coefficients[1]·x + …``."""
    *others, sum_ = coefficients
    sum_ = x.number(sum_)
    for each in reversed(others):
        sum_ = _fma(sum_, x, each)
    return sum_


def _of_vectors(formula):
    """Return an intrinsic of vectors of one type, whose code is written by a formula of terms.

    A module contains this code once; the optimiser inlines it into its callers.
    """
    signature = inspect.signature(formula)

    def write(context, builder, signature, args):
        kind = args[0].type
        name = f"sparsescan.{formula.__name__}.{kind}"
        function = builder.module.globals.get(name)
        if function is None:
            shape = ir.FunctionType(kind, [kind] * len(args))
            function = ir.Function(builder.module, shape, name)
            function.linkage = "internal"
            function.attributes.add("alwaysinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            inner.ret(formula(*(_Term(inner, arg) for arg in function.args)).value)
        return builder.call(function, args)

    def typed(typingctx, x, *others):
        if isinstance(x, Lanes) and all(other == x for other in others):
            return x(x, *others), write
        return None

    typed.__name__, typed.__doc__ = formula.__name__, formula.__doc__
    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typed.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    return intrinsic(typed)


@_of_vectors
def keep_positive(x, y):
    """Return `y` where `x` is positive or NaN, else 0."""
    return (x <= 0.0).chosen(0.0, y)


@_of_vectors
def absolute(x):
    """Return ``|x|``."""
    return abs(x)


@_of_vectors
def sqrt(x):
    """Return the square root, rounded once, and NaN of negative numbers."""
    return x.called("sqrt")


@_of_vectors
def plus(a, b):
    """Return the sum of two rounded numbers: no product is fused with it."""
    return a.made(a.builder.fadd(a.value, b.value))


@_of_vectors
def minus(a, b):
    """Return the difference of two rounded numbers: no product is fused with it."""
    return a.made(a.builder.fsub(a.value, b.value))


@_of_vectors
def minimum(a, b):
    """Return the lesser of two numbers, and NaN if one of them is NaN."""
    return a.equals(a).chosen((a < b).chosen(a, b), a)


@_of_vectors
def maximum(a, b):
    """Return the greater of two numbers, and NaN if one of them is NaN."""
    return a.equals(a).chosen((a > b).chosen(a, b), a)


@_of_vectors
def less(a, b):
    """Return 1 where ``a < b``, else 0."""
    return (a < b).chosen(a.number(1.0), 0.0)


@_of_vectors
def less_equal(a, b):
    """Return 1 where ``a ≤ b``, else 0."""
    return (a <= b).chosen(a.number(1.0), 0.0)


@_of_vectors
def equal(a, b):
    """Return 1 where ``a = b``, else 0."""
    return a.equals(b).chosen(a.number(1.0), 0.0)


@_of_vectors
def where(c, a, b):
    """Return `a` where `c` is not 0, NaN included, else `b`."""
    return c.equals(0.0).chosen(b, a)


# Exponentials: x = k·ln 2 + r with |r| ≤ ln 2 / 2, and expm1(r) by its Taylor series, whose next
# term is below a quarter of an ulp. The two parts of ln 2 are such that the product of k and the
# first is exact.
_LN_2 = (
    (0.693145751953125, 1.42860682030941723212e-6),
    (6.93147180369123816490e-01, 1.90821492927058770002e-10),
)


def _rounding(x):
    """Return ``1.5·2ᵐ``: a number is rounded by adding this, to an integer in the last bits."""
    return 1.5 * 2.0**x.mantissa


def _expm1(x):
    """Return ``k`` and ``p``: ``exp(x) = 2ᵏ·(1 + p)``; `k` are the last bits of integers."""
    rounded = _fma(x, 1 / math.log(2), _rounding(x))
    k = rounded - _rounding(x)
    high, low = x.by_size(*_LN_2)
    r = _fma(k, -low, _fma(k, -high, x))
    series = _polynomial(r, *(1 / math.factorial(n) for n in range(2, x.by_size(8, 14))))
    return rounded.as_integers(), _fma(series, r * r, r)


def _power_of_two(k):
    """Return ``2ᵏ``; any bits give some number, so NaN does no harm."""
    return ((k + k.bias) << k.mantissa).as_floats()


def _exp_of_less(x):
    """Return ``exp(x)`` for numbers that do not overflow; the result for others is arbitrary."""
    k, p = _expm1(x)
    e = ((1.0 + p).as_integers() + (k << k.mantissa)).as_floats()
    return (x < x.by_size(-87.33654, -708.3964185322641)).chosen(0.0, e)


@_of_vectors
def exp(x):
    """Return ``exp(x)`` within 1.1 ulps, and 0 where that is below all normal numbers."""
    # The greatest numbers with a finite result. NaN stays.
    is_less = x <= x.by_size(88.72283, 709.782712893384)
    return is_less.chosen(_exp_of_less(x), x + math.inf)


@_of_vectors
def tanh(x):
    """Return ``tanh(x)``, with the sign of `x`: ``e / (e + 2)`` with ``e = expm1(2|x|)``."""
    a = abs(x)
    # NaN stays.
    a = (a > 20.0).chosen(20.0, a)
    k, p = _expm1(a + a)
    power = _power_of_two(k)
    e = _fma(power, p, power - 1.0)
    return (e / (e + 2.0)).called("copysign", x)


@_of_vectors
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``, and 0 where that is below all normal numbers."""
    # Beyond this it is 0 or 1 up to rounding, or below all normal numbers.
    most = x.by_size(87.33, 708.39)
    # NaN stays.
    a = (x > most).chosen(most, x)
    k, p = _expm1(0.0 - (a < -most).chosen(-most, a))
    power = _power_of_two(k)
    return (a < -most).chosen(0.0, 1.0 / (1.0 + _fma(power, p, power)))


@_of_vectors
def expm1(x):
    """Return ``exp(x) - 1`` within two ulps."""
    # Below these the result is -1. NaN stays.
    least = x.by_size(-30.0, -60.0)
    a = (x < least).chosen(x.number(least), x)
    k, p = _expm1(a)
    power = _power_of_two(k)
    # Beyond 40 it is exp(x).
    is_less = x <= x.by_size(88.72283, 709.782712893384)
    large = is_less.chosen(_exp_of_less(x), x + math.inf)
    return (x <= 40.0).chosen(_fma(power, p, power - 1.0), large).called("copysign", x)


# Logarithms: x = 2ᵏ·(1 + f) with √½ ≤ 1 + f < √2. log(1 + f) is 2·artanh(s) with s = f / (2 + f).
# The first term of that is 2s = f - f²/2 + s·f²/2; the one left out is below a quarter of an ulp.


def _split(x):
    """Return ``k``, with a bias, and ``f``: ``x = 2ᵏ·(1 + f)``, of positive normal numbers."""
    half = x.bits_of(math.sqrt(0.5))
    moved = x.as_integers() + (x.bits_of(1.0) - half)
    f = ((moved & ((1 << x.mantissa) - 1)) + half).as_floats() - 1.0
    return moved >> x.mantissa, f


def _log_of_parts(k, f, rest=None):
    """Return ``log(2ᵏ·(1 + f + rest))``, where `rest` is less than a rounding of `f`."""
    shift = _rounding(f)
    k = (k + f.bits_of(shift)).as_floats() - (shift + k.bias)
    high, low = f.by_size(*_LN_2)
    s = f / (f + 2.0)
    z = s * s
    series = _polynomial(z, *(2 / (2 * n + 3) for n in range(f.by_size(4, 9)))) * z
    half = f * 0.5 * f
    small = s * (half + series) if rest is None else _fma(s, half + series, rest)
    return _fma(k, high, f - (half - _fma(k, low, small)))


def _log1p_of_normal(x):
    """Return ``log(1 + x)`` for finite ``x > -1`` where ``1 + x`` is a normal number."""
    u = x + 1.0
    # x + 1 is the sum of u and its error.
    b = u - 1.0
    error = (x - b) + (1.0 - (u - b))
    k, f = _split(u)
    # 2¹⁻ᵏ may be 0 if the error does not matter.
    error = error * (((2 * k.bias + 1 - k) << k.mantissa).as_floats() * 0.5)
    sum_ = f + error
    return _log_of_parts(k, sum_, error - (sum_ - f))


@_of_vectors
def log(x):
    """Return ``log(x)`` within 1.1 ulps; numbers below all normal ones count as 0."""
    # NaN stays.
    y = (x < math.inf).chosen(_log_of_parts(*_split(x)), x)
    tiny = (x < 0.0).chosen(x.number(math.nan), -math.inf)
    return (x < x.by_size(2.0**-126, 2.0**-1022)).chosen(tiny, y)


@_of_vectors
def log1p(x):
    """Return ``log(1 + x)`` within 1.1 ulps, with the sign of `x`."""
    # NaN stays.
    y = (x < math.inf).chosen(_log1p_of_normal(x), x)
    least = (x < -1.0).chosen(x.number(math.nan), -math.inf)
    return (x <= -1.0).chosen(least, y).called("copysign", x)


@_of_vectors
def softplus(x):
    """Return ``log(1 + exp(x))`` within two ulps, and 0 where that is below all normal numbers."""
    # NaN stays.
    return (x < 0.0).chosen(0.0, x) + _log1p_of_normal(_exp_of_less(0.0 - abs(x)))


# Sine and cosine: x = n·π/2 + r with |r| ≤ π/4, and both of r by their Taylor series, whose next
# terms are below a quarter of an ulp. π/2 is the sum of three numbers; that n times the first is
# subtracted from x is exact.
_HALF_PI = (
    (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
)
# Up to these numbers, n has few enough bits for that.
_FAR = (2.0**15, 2.0**25)


def _sine(x, quarters):
    """Return the sine of `x`, which is not negative, plus quarters of a circle, if `x` is small."""
    rounded = _fma(x, 2 / math.pi, _rounding(x))
    n = rounded - _rounding(x)
    r = x
    for part in x.by_size(*_HALF_PI):
        r = _fma(n, -part, r)
    z = r * r
    signed = [(-1) ** (n // 2) / math.factorial(n) for n in range(x.by_size(11, 18))]
    sine = _fma(r * z, _polynomial(z, *signed[3::2]), r)
    cosine = _polynomial(z, *signed[::2])
    n = rounded.as_integers() + quarters
    value = (n & 1).equals(0).chosen(sine, cosine)
    return _flipped(value, (n & 2) << (x.bits - 2))


def _flipped(x, sign):
    """Return a vector with signs changed where the first bits of `sign` are set."""
    return (x.as_integers() ^ sign).as_floats()


def _replaced(x, far, value, name):
    """Return `value`; where a mask is set, which is rare, return a scalar function of x."""
    builder, count = x.builder, x.kind.count
    bits = builder.bitcast(far.value, ir.IntType(count))
    before = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", bits, bits.type(0)), likely=False):
        call = builder.call(_scalars(builder.module, name, x.kind), [x.value])
        replaced = far.chosen(x.made(call), value).value
        there = builder.block
    result = builder.phi(x.kind)
    result.add_incoming(value.value, before)
    result.add_incoming(replaced, there)
    return x.made(result)


def _scalars(module, name, kind):
    """Return a function that calls the mathematical library for each lane."""
    own = f"sparsescan.scalars.{name}.{kind}"
    if own not in module.globals:
        function = ir.Function(module, ir.FunctionType(kind, [kind]), own)
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        builder.ret(call_llvm(builder, name, kind, function.args))
    return module.globals[own]


@_of_vectors
def sin(x):
    """Return ``sin(x)`` within two ulps.

    Beyond 2¹⁵ in float32, and 2²⁵ in float64, it is that of the mathematical library: slow.
    """
    sign = x.as_integers() & -(1 << (x.bits - 1))
    a = abs(x)
    value = _flipped(_sine(a, 0), sign)
    return _replaced(x, a > x.by_size(*_FAR), value, "sin")


@_of_vectors
def cos(x):
    """Return ``cos(x)`` within two ulps.

    Beyond 2¹⁵ in float32, and 2²⁵ in float64, it is that of the mathematical library: slow.
    """
    a = abs(x)
    return _replaced(x, a > x.by_size(*_FAR), _sine(a, 1), "cos")

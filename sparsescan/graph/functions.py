"""Functions on symbolic vectors, for functions that are traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import InputError, short
from .operations import Node, apply, as_node, number, reduce_units

__all__ = [
    "absolute",
    "arctan2",
    "cos",
    "elu",
    "exp",
    "expm1",
    "hardsigmoid",
    "hardtanh",
    "identity",
    "layer_norm",
    "leaky_relu",
    "log",
    "logsumexp",
    "maximum",
    "minimum",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "softsign",
    "sqrt",
    "stop_gradient",
    "surrogate",
    "tanh",
    "where",
]


def tanh(a: Any) -> Node:
    """Return ``tanh(a)``."""
    return apply("tanh", a)


def sigmoid(a: Any) -> Node:
    """Return ``1 / (1 + exp(-a))``."""
    return apply("sigmoid", a)


def relu(a: Any) -> Node:
    """Return ``max(a, 0)``, whose derivative at 0 is 0."""
    return apply("relu", a)


def exp(a: Any) -> Node:
    """Return ``exp(a)``."""
    return apply("exp", a)


def expm1(a: Any) -> Node:
    """Return ``exp(a) - 1``."""
    return apply("expm1", a)


def log(a: Any) -> Node:
    """Return the natural logarithm of ``a``."""
    return apply("log", a)


def sqrt(a: Any) -> Node:
    """Return the square root of ``a``."""
    return apply("sqrt", a)


def sin(a: Any) -> Node:
    """Return ``sin(a)``."""
    return apply("sin", a)


def cos(a: Any) -> Node:
    """Return ``cos(a)``."""
    return apply("cos", a)


def arctan2(a: Any, b: Any) -> Node:
    """Return the angle of the point ``(b, a)``, from -π to π, whose derivative at 0 is 0."""
    return apply("arctan2", a, b)


def absolute(a: Any) -> Node:
    """Return ``|a|``, whose derivative at 0 is 0."""
    return apply("absolute", a)


def minimum(a: Any, b: Any) -> Node:
    """Return the smaller of two numbers; where they are equal, each has half of the gradient."""
    return apply("minimum", a, b)


def maximum(a: Any, b: Any) -> Node:
    """Return the larger of two numbers; where they are equal, each has half of the gradient."""
    return apply("maximum", a, b)


def where(condition: Any, a: Any, b: Any) -> Node:
    """Return ``a`` where the condition is not 0, and ``b`` where it is."""
    return apply("where", condition, a, b)


def softplus(a: Any) -> Node:
    """Return ``log(1 + exp(a))``."""
    return apply("softplus", a)


def identity(a: Any) -> Node:
    """Return ``a``."""
    return as_node(a)


def silu(a: Any) -> Node:
    """Return ``a·sigmoid(a)``."""
    return apply("multiply", a, sigmoid(a))


def softsign(a: Any) -> Node:
    """Return ``a / (1 + |a|)``."""
    return apply("divide", a, 1 + absolute(a))


def leaky_relu(a: Any, slope: float = 0.01) -> Node:
    """Return ``a`` where it is positive, and ``slope·a`` elsewhere."""
    return where(as_node(a) <= 0, slope * a, a)


# Interpolation at Chebyshev points: erf(a) / a in 2a² - 1 for |a| ≤ 1, and beyond that (a +
# 1/2)·exp(a²)·erfc(a) in 1 - 8 / (a + 3).
_NEAR = (
    *(0.9654687386698674, -0.1405360890227174, 0.019852496688977195, -0.002285485561133443),
    *(
        0.000217517156095344,
        -1.7537169518297e-05,
        1.223382541556e-06,
        -7.5115451166e-08,
    ),
    *(4.116165382e-09, -2.03907805e-10, 8.838307e-12, -7.9225e-14),
    *(1.28909e-13, -9.131e-14),
)
_FAR = (
    *(0.6088755075318772, -0.053005647787808606, 0.00401830320914567, 0.009717548970670424),
    *(-0.008601920258806638, 0.004417301254256998, -0.001521109291246879, 0.00030112859822135),
    *(7.30683443937e-06, -2.4365434798552e-05, 4.974967692774e-06, 1.179118782666e-06),
    *(-6.54031911227e-07, -3.3917398441e-08, 7.2208170486e-08, -1.48136383e-09),
    *(
        -8.075327351e-09,
        3.64247485e-10,
        8.5704465e-10,
        -2.778694e-11,
    ),
    -6.0345374e-11,
)


def _erf_and_rest(a: Any) -> tuple[Node, Node, Node]:
    """Return whether ``|a| <= 1``, erf there, and ``erfc(|a|)`` elsewhere."""
    large = abs(as_node(a))
    near, far = number(0), number(0)
    place, other = 2 * a * a - 1, 1 - 8 / (large + 3)
    for coefficient in reversed(_NEAR):
        near = near * place + coefficient
    for coefficient in reversed(_FAR):
        far = far * other + coefficient
    return large <= 1, a * near, exp(-(large * large)) * far / (large + 0.5)


def erf(a: Any) -> Node:
    """Return the error function ``2/√π·∫exp(-t²)dt``, from 0 to ``a``."""
    is_near, near, rest = _erf_and_rest(a)
    value = where(is_near, near, where(as_node(a) < 0, rest - 1, 1 - rest))
    return apply("surrogate", value, a, 2 / math.sqrt(math.pi) * exp(-(as_node(a) * a)))


def erfc(a: Any) -> Node:
    """Return ``1 - erf(a)``, also where that is small."""
    is_near, near, rest = _erf_and_rest(a)
    value = where(is_near, 1 - near, where(as_node(a) < 0, 2 - rest, rest))
    return apply("surrogate", value, a, -2 / math.sqrt(math.pi) * exp(-(as_node(a) * a)))


def elu(a: Any, alpha: float = 1.0) -> Node:
    """Return ``a`` where it is positive, and ``alpha·(exp(a) - 1)`` elsewhere."""
    is_low = as_node(a) <= 0
    return where(is_low, alpha * expm1(where(is_low, a, 0)), a)


def hardtanh(a: Any, low: float = -1.0, high: float = 1.0) -> Node:
    """Return ``a`` between two bounds, at which its derivative is 0."""
    return where(as_node(a) <= low, low, where(as_node(high) <= a, high, a))


def hardsigmoid(a: Any) -> Node:
    """Return ``a/6 + 1/2`` between 0 and 1."""
    return where(as_node(a) <= -3, 0, where(as_node(a) >= 3, 1, a / 6 + 0.5))


def softmax(a: Any, heads: int = 1) -> Node:
    """Return ``exp(a) / sum(exp(a))``, over all units or over the units of each head."""
    powers = exp(as_node(a) - _largest(a, heads))
    return powers / powers.sum(heads=heads)


def logsumexp(a: Any, heads: int = 1) -> Node:
    """Return ``log(sum(exp(a)))``, over all units or over the units of each head."""
    largest = _largest(a, heads)
    return largest + log(exp(as_node(a) - largest).sum(heads=heads))


def layer_norm(
    a: Any, weight: Any = 1, bias: Any = 0, *, heads: int = 1, eps: float = 1e-5
) -> Node:
    """Return ``(a - mean(a)) / sqrt(var(a) + eps)·weight + bias`` (Ba et al., 2016).

    The variance is ``mean((a - mean(a))²)``, over all units or over the units of each head. With
    several heads the function is PyTorch's ``group_norm``.
    """
    centred = as_node(a) - as_node(a).mean(heads=heads)
    scale = weight / sqrt((centred * centred).mean(heads=heads) + eps)
    return as_node(centred * scale + bias)


def rms_norm(a: Any, weight: Any = 1, *, heads: int = 1, eps: float = 1e-5) -> Node:
    """Return ``a / sqrt(mean(a²) + eps)·weight`` (Zhang and Sennrich, 2019).

    The mean is over all units or over the units of each head.
    """
    return as_node(as_node(a) * weight / sqrt((as_node(a) * a).mean(heads=heads) + eps))


def _largest(a: Any, heads: int) -> Node:
    """Return the largest number of each head, through which no gradient passes."""
    return stop_gradient(reduce_units("maximum", a, heads))


def stop_gradient(a: Any) -> Node:
    """Return ``a``, through which no gradient passes."""
    return apply("stop_gradient", a)


class Surrogate(NamedTuple):
    """A function of one vector, with another function that is used as its derivative."""

    forward: Callable[[Any], Any]
    derivative: Callable[[Any], Any]

    def __call__(self, a: Any) -> Node:
        """Return the function of a vector."""
        return apply("surrogate", self.forward(a), a, self.derivative(a))


def surrogate(forward: Callable[[Any], Any], derivative: Callable[[Any], Any]) -> Surrogate:
    """Return a function with a derivative of your choice, such as a spike's surrogate gradient.

    Parameters
    ----------
    forward : callable
        ``forward(a)`` is its value.
    derivative : callable
        ``derivative(a)`` is used as its derivative (Neftci et al., 2019).

    Returns
    -------
    callable
        A function of one vector. It may be an attribute of a class: ``self.spike(a)``.

    Examples
    --------
    >>> from sparsescan.recurrent import surrogate
    >>> spike = surrogate(lambda a: a > 0, lambda a: 1 / (1 + a * a))
    """
    for name, function in (("forward", forward), ("derivative", derivative)):
        if not callable(function):
            raise InputError(f"{name} is {short(function)}; expected a function of one vector")
    return Surrogate(forward, derivative)

"""Functions of symbols of vectors, which a traced function calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import InputError, short
from .operations import Node, apply, as_node

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
    "leaky_relu",
    "log",
    "maximum",
    "minimum",
    "relu",
    "sigmoid",
    "silu",
    "sin",
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


def stop_gradient(a: Any) -> Node:
    """Return ``a``, through which no gradient passes."""
    return apply("stop_gradient", a)


class Surrogate(NamedTuple):
    """A function of one vector, and another one that counts as its derivative."""

    forward: Callable[[Any], Any]
    derivative: Callable[[Any], Any]

    def __call__(self, a: Any) -> Node:
        """Return the function of a vector."""
        return apply("surrogate", self.forward(a), a, self.derivative(a))


def surrogate(forward: Callable[[Any], Any], derivative: Callable[[Any], Any]) -> Surrogate:
    """Return a function whose derivative is another one's, such as that of a spike.

    Parameters
    ----------
    forward : callable
        ``forward(a)`` is its value.
    derivative : callable
        ``derivative(a)`` counts as its derivative (Neftci et al., 2019).

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

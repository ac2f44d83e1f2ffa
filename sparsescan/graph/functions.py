"""Functions of symbols of vectors, which a traced function calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import InputError, short
from .operations import Node, apply, as_node, reduce_units

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
    """Return ``exp(a) / sum(exp(a))``, over all units or those of each head."""
    powers = exp(as_node(a) - _largest(a, heads))
    return powers / powers.sum(heads=heads)


def logsumexp(a: Any, heads: int = 1) -> Node:
    """Return ``log(sum(exp(a)))``, over all units or those of each head."""
    largest = _largest(a, heads)
    return largest + log(exp(as_node(a) - largest).sum(heads=heads))


def layer_norm(
    a: Any, weight: Any = 1, bias: Any = 0, *, heads: int = 1, eps: float = 1e-5
) -> Node:
    """Return ``(a - mean(a)) / sqrt(var(a) + eps)·weight + bias`` (Ba et al., 2016).

    The variance is ``mean((a - mean(a))²)``, over all units or those of each head. With several
    heads it is PyTorch's ``group_norm``.
    """
    centred = as_node(a) - as_node(a).mean(heads=heads)
    scale = weight / sqrt((centred * centred).mean(heads=heads) + eps)
    return as_node(centred * scale + bias)


def rms_norm(a: Any, weight: Any = 1, *, heads: int = 1, eps: float = 1e-5) -> Node:
    """Return ``a / sqrt(mean(a²) + eps)·weight`` (Zhang and Sennrich, 2019).

    The mean is over all units, or over those of each head.
    """
    return as_node(as_node(a) * weight / sqrt((as_node(a) * a).mean(heads=heads) + eps))


def _largest(a: Any, heads: int) -> Node:
    """Return the largest number of each head, through which no gradient passes."""
    return stop_gradient(reduce_units("maximum", a, heads))


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

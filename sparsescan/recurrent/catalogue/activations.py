"""The activation functions of cells of the catalogue."""

from __future__ import annotations

from ..definition import Choice

_NAMES = (
    *("tanh", "relu", "sigmoid", "hardsigmoid", "softplus"),
    *("elu", "leaky_relu", "silu", "identity"),
)


def activation(default: str) -> Choice:
    """Return a Choice among elementwise functions; `default` is the default."""
    return Choice(default, *(name for name in _NAMES if name != default))

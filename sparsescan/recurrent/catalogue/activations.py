"""Functions that a cell of the catalogue may be made with."""

from __future__ import annotations

from ..definition import Choice

_NAMES = (
    *("tanh", "relu", "sigmoid", "hardsigmoid", "softplus"),
    *("elu", "leaky_relu", "silu", "identity"),
)


def activation(default: str) -> Choice:
    """Return a choice among elementwise functions, of which `default` is taken unless said."""
    return Choice(default, *(name for name in _NAMES if name != default))

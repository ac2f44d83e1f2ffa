"""Methods of time stepping: Runge–Kutta tableaus and BDF2."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import InputError, short
from .factors import Vector


class Tableau(NamedTuple):
    """A Runge–Kutta method whose last stage is the next state.

    A stage is ``M (U_i - u) = Δ Σ_j a_ij f(U_j, t + c_i Δ)``, ``j ≤ i``.

    Attributes
    ----------
    a : ndarray, shape (stages, stages)
        Lower triangular.
    order : int
        Errors over a fixed time shrink as ``Δ^order``.
    estimates : tuple of tuple of float
        Rows of weights for the rates at the beginning of a step and in its stages. Each row
        estimates the error, as the difference to a method of lower order; the largest estimate
        counts. If it is empty, half the change of the rate over a step is the estimate.
    """

    a: Vector
    order: int
    estimates: tuple[tuple[float, ...], ...] = ()

    @property
    def c(self) -> Vector:
        """The times of stages as shares of a step; sums of the rows of `a`."""
        return np.asarray(self.a.sum(1))

    @property
    def is_implicit(self) -> bool:
        """Whether a stage needs a solve."""
        return bool(np.diag(self.a).any())

    @property
    def inner(self) -> list[int]:
        """The stages strictly within the step: not the last, nor a first one that is the state."""
        stages = range(len(self.a) - 1)
        return [i for i in stages if self.a[i].any()]


def _tableau(order: int, *rows: list[float]) -> Tableau:
    a = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        a[i, : len(row)] = row
    return Tableau(a, order)


def _sdirk3() -> Tableau:
    """Return Alexander's method of order three, L-stable: his theorem 5."""
    # The root of x³ - 3x² + 3x/2 - 1/6 between 1/6 and 1/2.
    roots = np.roots([1.0, -3.0, 1.5, -1 / 6])
    x = float(next(root.real for root in roots if 1 / 6 < root.real < 1 / 2))
    b1, b2 = -(6 * x * x - 16 * x + 1) / 4, (6 * x * x - 20 * x + 5) / 4
    # Both estimates compare with methods of order two that give the last stage no weight; only the
    # first gives the beginning a weight. So a jump of the rate anywhere in the step moves an
    # estimate by at least its error, and other terms cannot cancel both estimates.
    middle = 2 * x / (1 - x)
    estimates = (-x, middle, -middle, x), (0.0, x, -2 * x, x)
    return _tableau(3, [x], [(1 - x) / 2, x], [b1, b2, x])._replace(estimates=estimates)


_X = 1 - np.sqrt(0.5)
# In explicit methods the weights form the last stage.
TABLEAUS = {
    "backward_euler": _tableau(1, [1.0]),
    "crank_nicolson": _tableau(2, [], [0.5, 0.5]),
    "sdirk2": _tableau(2, [_X], [1 - _X, _X]),
    "sdirk3": _sdirk3(),
    "euler": _tableau(1, [], [1.0]),
    "heun": _tableau(2, [], [1.0], [0.5, 0.5]),
    "rk4": _tableau(4, [], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}
METHODS = (*TABLEAUS, "bdf2")


def check_method(method: object) -> str:
    """Return the name of a method; raise if there is none."""
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(f"method is {short(method)}; expected one of {', '.join(METHODS)}")
    return method


class Differentiation(NamedTuple):
    """Coefficients of BDF2: ``M (a u_{t+1} + b u_t + c u_{t-1}) = Δ f(u_{t+1})``.

    `slopes` are their derivatives in the ratio of a step's length to the previous length.
    """

    values: tuple[float, float, float]
    slopes: tuple[float, float, float]

    @classmethod
    def of(cls, ratio: float | None) -> Differentiation:
        """Return the coefficients for a ratio; None means the first step, of backward Euler."""
        if ratio is None:
            return cls((1.0, -1.0, 0.0), (0.0, 0.0, 0.0))
        w = ratio
        values = (1 + 2 * w) / (1 + w), -(1 + w), w * w / (1 + w)
        slopes = 1 / (1 + w) ** 2, -1.0, (w * w + 2 * w) / (1 + w) ** 2
        return cls(values, slopes)

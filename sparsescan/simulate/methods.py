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


def _paired(order: int, weights: list[float], *rows: list[float]) -> Tableau:
    """Return a method whose error is its difference to one with other weights for its stages."""
    found = _tableau(order, *rows)
    return found._replace(estimates=((0.0, *(found.a[-1] - weights)),))


def _kencarp4() -> Tableau:
    """Return the implicit part of ARK4(3)6L[2]SA of Kennedy and Carpenter (2003)."""
    x = 1 / 4
    return _paired(
        4,
        [
            *(4586570599 / 29645900160, 0.0, 178811875 / 945068544, 814220225 / 1159782912),
            *(-3700637 / 11593932, 61727 / 225920),
        ],
        [],
        [x, x],
        [8611 / 62500, -1743 / 31250, x],
        [5012029 / 34652500, -654441 / 2922500, 174375 / 388108, x],
        [
            *(15267082809 / 155376265600, -71443401 / 120774400),
            *(730878875 / 902184768, 2285395 / 8070912, x),
        ],
        [82889 / 524892, 0.0, 15625 / 83664, 69875 / 102672, -2260 / 8211, x],
    )


def _kencarp5() -> Tableau:
    """Return the implicit part of ARK5(4)8L[2]SA of Kennedy and Carpenter (2003)."""
    x = 41 / 200
    return _paired(
        5,
        [
            *(-975461918565 / 9796059967033, 0.0, 0.0, 78070527104295 / 32432590147079),
            *(-548382580838 / 3424219808633, -33438840321285 / 15594753105479),
            *(3629800801594 / 4656183773603, 4035322873751 / 18575991585200),
        ],
        [],
        [x, x],
        [41 / 400, -567603406766 / 11931857230679, x],
        [683785636431 / 9252920307686, 0.0, -110385047103 / 1367015193373, x],
        [
            *(3016520224154 / 10081342136671, 0.0, 30586259806659 / 12414158314087),
            *(-22760509404356 / 11113319521817, x),
        ],
        [
            *(218866479029 / 1489978393911, 0.0, 638256894668 / 5436446318841),
            *(-1179710474555 / 5321154724896, -60928119172 / 8023461067671, x),
        ],
        [
            *(1020004230633 / 5715676835656, 0.0, 25762820946817 / 25263940353407),
            *(-2161375909145 / 9755907335909, -211217309593 / 5846859502534),
            *(-4269925059573 / 7827059040719, x),
        ],
        [
            *(-872700587467 / 9133579230613, 0.0, 0.0, 22348218063261 / 9555858737531),
            *(-1143369518992 / 8141816002931, -39379526789629 / 19018526304540),
            *(32727382324388 / 42900044865799, x),
        ],
    )


def _tsit5() -> Tableau:
    """Return the explicit method of order five of Tsitouras (2011)."""
    last = [
        *(0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742),
        *(-3.290069515436081, 2.324710524099774),
    ]
    weights = [
        *(0.09468075576583945, 0.009183565540343254, 0.4877705284247616, 1.234297566930479),
        *(-2.7077123499835256, 1.866628418170587, 1 / 66),
    ]
    return _paired(
        5,
        weights,
        [],
        [0.161],
        [-0.008480655492356989, 0.335480655492357],
        [2.8971530571054935, -6.359448489975075, 4.3622954328695815],
        [
            *(5.325864828439257, -11.748883564062828, 7.4955393428898365),
            -0.09249506636175525,
        ],
        [
            *(5.86145544294642, -12.92096931784711, 8.159367898576159),
            *(-0.071584973281401, -0.028269050394068383),
        ],
        last,
    )


_X = 1 - np.sqrt(0.5)
# In explicit methods the weights form the last stage.
TABLEAUS = {
    "backward_euler": _tableau(1, [1.0]),
    "crank_nicolson": _tableau(2, [], [0.5, 0.5]),
    "sdirk2": _tableau(2, [_X], [1 - _X, _X]),
    "sdirk3": _sdirk3(),
    "euler": _tableau(1, [], [1.0]),
    "heun": _tableau(2, [], [1.0], [0.5, 0.5]),
    "kencarp4": _kencarp4(),
    "kencarp5": _kencarp5(),
    "tsit5": _tsit5(),
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

"""Activations: elementwise functions, whose Jacobians are diagonal, and Softmax."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np

from ..arrays.arrays import special
from ..checks import check_choice, check_number
from ..errors import InputError, short
from ..symbolic.pattern import Pattern
from .kernels import values as kernels
from .shared.checks import check_dim
from .shared.coupled import Coupled
from .shared.operator import Operator

Array = Any


class Elementwise(Operator):
    """``y_i = f(x_i)``, so ``(∂y/∂x)ᵀ = diag(f'(x))``."""

    _nanoseconds = 2.0

    def __init__(self, *, input_shape: Any) -> None:
        self._set_shapes(input_shape, None)
        self._set_output(self._core)

    def _core_nnz(self) -> int:
        return math.prod(self._core)

    def _core_pattern(self) -> Pattern:
        return Pattern.diagonal(self._core_nnz())

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        y = None if y is None else y.reshape(out.shape)
        self._slope(xp, x.reshape(out.shape), y, out)

    @abstractmethod
    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        """Write ``f'(x)``; `y` is ``f(x)``, or None if it is not known."""


class ReLU(Elementwise):
    """Rectified linear unit, ``f(x) = max(x, 0)``: ``f'(x) = 1`` for ``x > 0``, otherwise 0.

    Parameters
    ----------
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If the shape is wrong.

    Notes
    -----
    As :class:`torch.nn.ReLU`: the slope is 0 at 0 and 1 at NaN. The Jacobian is that of BPPSA
    (MLSys 2020), Appendix D.2, Algorithms 5 to 7.

    Examples
    --------
    >>> from sparsescan.jacobians import ReLU
    >>> ReLU(input_shape=(3,)).values([-1.0, 0.0, 2.0])
    array([0., 0., 1.])
    """

    _nanoseconds = 0.1
    _is_compiled = True

    def _forward(self, xp: Any, x: Array) -> Array:
        return xp.maximum(x, 0)

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        if xp is np:
            # NumPy writes the comparison as bool first, which takes twice as long.
            kernels.relu(x.reshape(-1), out.reshape(-1))
        else:
            super()._fill(xp, x, y, out)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        xp.logical_not(x <= 0, out=out)


class LeakyReLU(Elementwise):
    """``f(x) = max(x, 0) + a·min(x, 0)``: ``f'(x) = 1`` for ``x > 0``, otherwise ``a``.

    Parameters
    ----------
    negative_slope : float, default 0.01
        The slope ``a``.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.LeakyReLU`: the slope is ``a`` at 0 and at NaN.

    Examples
    --------
    >>> from sparsescan.jacobians import LeakyReLU
    >>> LeakyReLU(0.25, input_shape=(3,)).values([-1.0, 0.0, 2.0])
    array([0.25, 0.25, 1.  ])
    """

    _nanoseconds = 0.1

    def __init__(self, negative_slope: float = 0.01, *, input_shape: Any) -> None:
        super().__init__(input_shape=input_shape)
        self.negative_slope = check_number("negative_slope", negative_slope)

    def _forward(self, xp: Any, x: Array) -> Array:
        return xp.where(x > 0, x, x * self.negative_slope)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        out.fill(self.negative_slope)
        xp.copyto(out, 1, where=x > 0)


class ELU(Elementwise):
    """Exponential linear unit: ``f'(x) = 1`` for ``x > 0``, otherwise ``α eˣ``.

    ``f(x) = x`` for ``x > 0``, otherwise ``α (eˣ - 1)``.

    Parameters
    ----------
    alpha : float, default 1.0
        The factor ``α``.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.ELU`: the slope is ``α`` at 0.

    Examples
    --------
    >>> from sparsescan.jacobians import ELU
    >>> ELU(2.0, input_shape=(3,)).values([-1.0, 0.0, 2.0]).round(3)
    array([0.736, 2.   , 1.   ])
    """

    def __init__(self, alpha: float = 1.0, *, input_shape: Any) -> None:
        super().__init__(input_shape=input_shape)
        self.alpha = check_number("alpha", alpha)

    def _forward(self, xp: Any, x: Array) -> Array:
        return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)) * self.alpha)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        # Not y + α, which cancels where y is almost -α.
        xp.minimum(x, 0, out=out)
        xp.exp(out, out=out)
        xp.multiply(out, self.alpha, out=out)
        xp.copyto(out, 1, where=x > 0)


class Tanh(Elementwise):
    """Hyperbolic tangent: ``f'(x) = 1 - tanh²(x)``.

    Parameters
    ----------
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If the shape is wrong.

    Notes
    -----
    As :class:`torch.nn.Tanh`. The Jacobian is diagonal, as in BPPSA (MLSys 2020), Appendix D.2.

    Examples
    --------
    >>> from sparsescan.jacobians import Tanh
    >>> Tanh(input_shape=(3,)).values([0.0, 0.5, -40.0]).round(3)
    array([1.   , 0.786, 0.   ])
    """

    def _forward(self, xp: Any, x: Array) -> Array:
        return xp.tanh(x)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        y = xp.tanh(x) if y is None else y
        xp.multiply(y, y, out=out)
        xp.subtract(1, out, out=out)


class Sigmoid(Elementwise):
    """Logistic function, ``f(x) = 1/(1 + e⁻ˣ)``: ``f'(x) = f(x) (1 - f(x))``.

    Parameters
    ----------
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If the shape is wrong.

    Notes
    -----
    As :class:`torch.nn.Sigmoid`.

    Examples
    --------
    >>> from sparsescan.jacobians import Sigmoid
    >>> Sigmoid(input_shape=(3,)).values([0.0, 2.0, -1000.0]).round(3)
    array([0.25 , 0.105, 0.   ])
    """

    def _forward(self, xp: Any, x: Array) -> Array:
        return special(xp).expit(x)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        y = special(xp).expit(x) if y is None else y
        xp.subtract(1, y, out=out)
        xp.multiply(out, y, out=out)


class SiLU(Elementwise):
    """Sigmoid linear unit, ``f(x) = x σ(x)``: ``f'(x) = σ(x) (1 + x σ(-x))``.

    Here ``σ`` is the logistic function, as in :class:`Sigmoid`.

    Parameters
    ----------
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If the shape is wrong.

    Notes
    -----
    As :class:`torch.nn.SiLU`, except at ``±∞``: PyTorch's slope is NaN there, ours is the limit, 1
    or 0.

    Examples
    --------
    >>> from sparsescan.jacobians import SiLU
    >>> SiLU(input_shape=(3,)).values([0.0, 2.0, -1000.0]).round(3)
    array([ 0.5  ,  1.091, -0.   ])
    """

    def _forward(self, xp: Any, x: Array) -> Array:
        return x * special(xp).expit(x)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        expit = special(xp).expit
        # Beyond the clip σ(x) or σ(-x) is 0, and so is its product with any finite x.
        clipped = xp.clip(x, -1000, 1000)
        expit(-clipped, out=out)
        xp.multiply(out, clipped, out=out)
        xp.add(out, 1, out=out)
        xp.multiply(out, expit(clipped, out=clipped), out=out)


class GELU(Elementwise):
    """Gaussian error linear unit, ``f(x) = x Φ(x)``: ``f'(x) = Φ(x) + x φ(x)``.

    ``Φ`` and ``φ`` are the distribution function and the density of the normal distribution. With
    ``approximate="tanh"``, ``Φ(x)`` is replaced by ``σ(2u)``, where ``σ`` is the logistic function
    and ``u = √(2/π) (x + 0.044715 x³)``; then ``f'(x) = σ(2u) + 2x u' σ(2u) σ(-2u)``.

    Parameters
    ----------
    approximate : {"none", "tanh"}
        Whether to use the approximation.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.GELU`, except at ``±∞`` and, with the approximation, where ``x³`` overflows:
    PyTorch's slope is NaN there, ours is the limit, 1 or 0.

    Examples
    --------
    >>> from sparsescan.jacobians import GELU
    >>> GELU(input_shape=(3,)).values([0.0, 2.0, -40.0]).round(3)
    array([0.5  , 1.085, 0.   ])
    """

    def __init__(self, approximate: str = "none", *, input_shape: Any) -> None:
        super().__init__(input_shape=input_shape)
        self.approximate = check_choice("approximate", approximate, "none", "tanh")

    def _forward(self, xp: Any, x: Array) -> Array:
        if self.approximate == "none":
            return x * special(xp).ndtr(x)
        clipped = xp.clip(x, -50, 50)
        return x * special(xp).expit(_CUBIC * clipped * (clipped * clipped * _CUBE + 1))

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        # Beyond the clip Φ(x) is 0 or 1, and φ(x) is 0 and so is its product with any power of x.
        clipped = xp.clip(x, -50, 50)
        xp.multiply(clipped, clipped, out=out)
        if self.approximate == "none":
            xp.multiply(out, -0.5, out=out)
            xp.exp(out, out=out)
            xp.multiply(out, clipped, out=out)
            xp.multiply(out, 1 / math.sqrt(2 * math.pi), out=out)
            xp.add(out, special(xp).ndtr(clipped, out=clipped), out=out)
        else:
            expit = special(xp).expit
            twice_u = _CUBIC * clipped * (out * _CUBE + 1)
            xp.multiply(out, 3 * _CUBE, out=out)
            xp.add(out, 1, out=out)
            xp.multiply(out, clipped, out=out)
            xp.multiply(out, _CUBIC, out=out)
            xp.multiply(out, expit(-twice_u, out=clipped), out=out)
            xp.add(out, 1, out=out)
            xp.multiply(out, expit(twice_u, out=clipped), out=out)


# 2u = _CUBIC (x + _CUBE x³) in the approximation of GELU.
_CUBIC = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715


class Softplus(Elementwise):
    """``f(x) = log(1 + exp(βx))/β``: ``f'(x) = σ(βx)``; linear where ``βx`` exceeds a threshold.

    ``σ`` is the logistic function. Where ``βx > threshold``, ``f(x) = x`` and ``f'(x) = 1``.

    Parameters
    ----------
    beta : float, default 1.0
        The factor ``β``, not 0.
    threshold : float, default 20.0
        Where the function becomes linear.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Softplus`.

    Examples
    --------
    >>> from sparsescan.jacobians import Softplus
    >>> Softplus(input_shape=(3,)).values([0.0, 2.0, 40.0]).round(3)
    array([0.5  , 0.881, 1.   ])
    """

    def __init__(self, beta: float = 1.0, threshold: float = 20.0, *, input_shape: Any) -> None:
        super().__init__(input_shape=input_shape)
        self.beta = check_number("beta", beta)
        if self.beta == 0:
            raise InputError("beta is 0; expected another number")
        self.threshold = check_number("threshold", threshold)

    def _forward(self, xp: Any, x: Array) -> Array:
        scaled = x * self.beta
        return xp.where(scaled > self.threshold, x, xp.logaddexp(0, scaled) / self.beta)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        xp.multiply(x, self.beta, out=out)
        linear = out > self.threshold
        special(xp).expit(out, out=out)
        xp.copyto(out, 1, where=linear)


class Hardtanh(Elementwise):
    """``f(x) = min(max(x, a), b)``: ``f'(x) = 1`` for ``a < x < b``, otherwise 0.

    Parameters
    ----------
    min_val, max_val : float, default -1.0 and 1.0
        The bounds ``a < b``, which may be infinite.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Hardtanh`: the slope is 0 at both bounds.

    Examples
    --------
    >>> from sparsescan.jacobians import Hardtanh
    >>> Hardtanh(0.0, 6.0, input_shape=(4,)).values([-1.0, 0.0, 2.0, 6.0])
    array([0., 0., 1., 0.])
    """

    _nanoseconds = 0.1

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, *, input_shape: Any) -> None:
        super().__init__(input_shape=input_shape)
        self.min_val = check_number("min_val", min_val, finite=False)
        self.max_val = check_number("max_val", max_val, finite=False)
        if not self.min_val < self.max_val:
            raise InputError(
                f"max_val is {short(max_val)}; expected more than {short(min_val)}, min_val"
            )

    def _forward(self, xp: Any, x: Array) -> Array:
        return xp.clip(x, self.min_val, self.max_val)

    def _slope(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        xp.logical_and(x > self.min_val, x < self.max_val, out=out)


class Softmax(Coupled):
    """``y_j = exp(x_j) / Σ_k exp(x_k)`` along an axis: ``∂y_j/∂x_i = y_i (δ_ij - y_j)``.

    Entries of the Jacobian couple elements that differ only along that axis.

    Parameters
    ----------
    dim : int
        The axis, counted with the batch axis, which is 0 and not allowed.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Softmax`. Over an axis of length 1 the output is constant, so the pattern is
    empty.

    Examples
    --------
    >>> from sparsescan.jacobians import Softmax
    >>> Softmax(1, input_shape=(2,)).jacobian([0.0, 0.0]).toarray()
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """

    def __init__(self, dim: int, *, input_shape: Any) -> None:
        # The axes before this one give blocks; a block has the axis and the axes after it.
        self._set_shapes(input_shape, None)
        self.dim = dim
        axis = check_dim("dim", dim, self.input_shape)
        self._set_shapes(self.input_shape, len(self.input_shape) - axis)
        self._set_output(self._core)
        self._grouping = self._core[0], math.prod(self._core[1:]), 1
        self._is_constant = self._core[0] == 1

    _terms = 1

    def _forward(self, xp: Any, x: Array) -> Array:
        # As in PyTorch, a row with ∞, or of only -∞, becomes NaN.
        y = xp.exp(x - x.max(axis=1, keepdims=True))
        y /= y.sum(axis=1, keepdims=True)
        return y

    def _factors(self, xp: Any, x: Array, y: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        y = self._forward(xp, x) if y is None else y.astype(x.dtype, copy=False)
        return y, [(y, -y)]

    def _set_diagonal(self, values: Array, places: Array, a: Array) -> None:
        # Not a - a², which cancels where `a` is almost 1.
        values[:, places] = a * (1 - a)

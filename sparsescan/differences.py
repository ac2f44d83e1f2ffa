"""Compare the gradient of a chain with finite differences of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from .api import inclusive_scan
from .arrays.arrays import host_array, is_on_device
from .chains.containers import BatchedCSR, CSRChain, PeriodicChain
from .chains.implicit import ImplicitChain, ImplicitStep
from .chains.reading import is_stack, steps_of
from .chains.steps import patterns_in
from .checks import check_count, check_flag
from .errors import GradientError, InputError, InputTypeError, short

Vector = NDArray[np.float64]

# Steps are these powers of the function's rounding, relative to the length of `x`.
_POWERS = (1 / 6, 1 / 4.5, 1 / 3.5, 1 / 3, 1 / 2.5)
# A gradient is wrong if its error is this many times the distance between the differences.
_CERTAIN = 50.0
# Differences with a larger relative error than this decide nothing.
_VAGUE = 0.1
# In chains up to this length each Jacobian is transposed alone, to find the wrong one.
_ONE_BY_ONE = 64


def check_grad(
    fun: Callable[[Vector], Any],
    x: ArrayLike,
    grad: ArrayLike | None,
    jacobians: Any,
    *,
    local_grads: Any = None,
    reverse: bool = False,
    directions: int = 3,
    step: float | None = None,
    rng: Any = None,
) -> float:
    """Check the gradient of a chain against finite differences of its loss, and explain a fault.

    Along random directions ``v`` it compares the chain's slope, ``v·∇x_0``, with the central
    difference of the loss,

        (L(x_0 + h v) - L(x_0 - h v)) / 2h.

    Parameters
    ----------
    fun : callable
        ``fun(x_0)`` runs forward from the input of the first layer, and returns the loss, a number.
        It should compute in float64. It is called a few dozen times, with new arrays.
    x : array_like, shape (d_0,) or (batch, d_0)
        The input ``x_0`` at which the Jacobians are taken. With a batch, the loss is the sum over
        all samples.
    grad : array_like of float32 or float64, or None
        Gradient ``∇x_n`` of the loss at the end of the chain, as for :func:`exclusive_scan`.
    jacobians : sequence, CSRChain, ImplicitChain, PeriodicChain or ndarray
        The transposed Jacobians ``[J_n, …, J_1]``, as for :func:`exclusive_scan`.
    local_grads : sequence or ndarray, optional
        As for :func:`exclusive_scan` or, with one more entry for ``∇x_0``, :func:`inclusive_scan`.
    reverse : bool, default False
        Whether `jacobians` and `local_grads` are in the order of time.
    directions : int, default 3
        How many directions.
    step : float, optional
        The longest step ``h |v|``. The default follows from the length of `x` and the rounding of
        `fun`. Pass a shorter step if `fun` is not smooth near `x`.
    rng : int or numpy.random.Generator, optional
        The source of the directions; 0 by default, so that every call gives the same result.

    Returns
    -------
    float
        The largest difference between two slopes, relative to the largest slope.

    Raises
    ------
    GradientError
        If slopes differ by more than rounding and the length of steps explain. The message says
        which change would make them agree, if one of these does: transpose all Jacobians or one of
        them, reverse the order, leave out a gradient that counts twice, or multiply the gradient by
        a factor. It is a :class:`ValueError`.
    InputError
        If an argument is wrong, or differences decide nothing: `fun` draws random numbers, has a
        kink at `x`, or does not return one finite number.
    InputTypeError, DeviceError, MemoryLimitError
        As :func:`exclusive_scan`.

    See Also
    --------
    scipy.optimize.check_grad : A check of one function that returns the whole gradient.

    Notes
    -----
    Differences are taken with five step lengths, from ``eps^(1/6)`` down to ``eps^(2/5)`` times the
    length of `x`. ``eps`` is that of float32 if all losses are float32 numbers. The check uses the
    two neighbouring steps whose differences are closest. Their distance, plus the rounding of the
    loss divided by the step, estimates the error of the difference. A slope may be off by fifty
    times that. An error in one entry of ``∇x_0`` shows in any direction that is not orthogonal to
    it.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> weight = np.array([[0.5, 2.0], [-1.0, 0.3]])
    >>> def loss(x):
    ...     for _ in range(3):
    ...         x = np.tanh(weight @ x)
    ...     return x.sum()
    >>> def jacobians(x, transposed=True):
    ...     for _ in range(3):
    ...         x = np.tanh(weight @ x)
    ...         jacobian = (1 - x**2)[:, None] * weight
    ...         yield jacobian.T if transposed else jacobian
    >>> x = np.array([0.1, -0.2])
    >>> sparsescan.check_grad(loss, x, np.ones(2), list(jacobians(x)), reverse=True) < 1e-6
    True
    >>> try:
    ...     sparsescan.check_grad(loss, x, np.ones(2), list(jacobians(x, False)), reverse=True)
    ... except sparsescan.GradientError as error:
    ...     print(str(error).partition(". ")[2])
    All fits once the Jacobians are transposed: pass J.T, or J.T.tocsr()
    """
    if not callable(fun):
        raise InputTypeError(f"fun is {short(fun)}; expected a function of x")
    where = host_array("x", x)
    if where.dtype.kind not in "fiu" or where.ndim not in (1, 2) or where.size == 0:
        raise InputError(
            f"x has shape {where.shape} and dtype {where.dtype}; expected numbers, (d_0,) or "
            "(batch, d_0)"
        )
    where = where.astype(np.float64)
    if step is not None and not 0 < step < np.inf:
        raise InputError(f"step is {short(step)}; expected a positive number")
    count = check_count("directions", directions, 1)
    chain = _Chain.of(grad, jacobians, local_grads, check_flag("reverse", reverse))
    gradient = chain.gradient()
    if gradient.shape != where.shape:
        raise InputError(
            f"x has shape {where.shape}, but the gradient of the first layer's input "
            f"{gradient.shape}; expected one shape"
        )
    measured = _Slopes.of(fun, where, count, step, rng if rng is not None else 0)
    slopes = measured.slopes(gradient)
    rounding = chain.rounding(where, gradient, measured.directions)
    if measured.fits(slopes, rounding):
        return measured.distance(slopes)
    reason = next(
        (
            reason
            for reason, other in chain.others()
            if measured.fits(measured.slopes(other.gradient()), rounding)
        ),
        _factor(slopes, measured, rounding),
    )
    raise GradientError(
        f"the gradient is wrong: along random directions its slopes are {_shown(slopes)}, and "
        f"those of fun, by differences, {_shown(measured.values)}. {reason}"
    )


class _Chain(NamedTuple):
    """Arguments of a scan."""

    grad: Any
    jacobians: Any
    local: list[Any] | None
    reverse: bool
    n: int
    eps: float

    @classmethod
    def of(cls, grad: Any, jacobians: Any, local_grads: Any, reverse: bool) -> _Chain:
        """Read the caller's arguments; iterators become lists, since scans read them repeatedly."""
        steps = steps_of(jacobians)
        n = len(patterns_in(steps, reverse)[0])
        local = None
        if local_grads is not None:
            local = list(local_grads)
            if len(local) == n:
                local = [None, *local] if reverse else [*local, None]
        given = [each for each in (grad, *(local or ())) if each is not None]
        eps = max(map(_eps, [*given, *_arrays_of(steps)]), default=np.finfo(np.float64).eps)
        return cls(grad, steps, local, reverse, n, float(eps))

    def gradient(self) -> Vector:
        """Return the gradient of the first layer's input, in float64."""
        grad = self.grad
        local = self.local
        if grad is not None and not is_on_device(grad):
            grad = host_array("grad", grad)
            grad = grad.astype(np.float64) if grad.dtype == np.float32 else grad
        elif local is not None and grad is None:
            local = [_widened(each) for each in local]
        scanned = inclusive_scan(
            grad, self.jacobians, local_grads=local, reverse=self.reverse, schedule="linear"
        )
        first: Any = scanned[0] if self.reverse else scanned[-1]
        return np.asarray(first.get() if is_on_device(first) else first, np.float64)

    def rounding(self, x: Vector, gradient: Vector, directions: list[Vector]) -> Vector:
        """Return how far rounding of the chain may move each slope."""
        terms = np.array([float(np.abs(each * gradient).sum()) for each in directions])
        return 10 * (self.n + 1) * self.eps * terms

    def others(self) -> Iterator[tuple[str, _Chain]]:
        """Yield chains that may have been meant, with the mistake of each, likely ones first."""
        last = -1 if self.reverse else 0
        if self.local is not None and self.grad is not None and self.local[last] is not None:
            k = len(self.local) - 1 if self.reverse else 0
            yield (
                f"grad and local_grads[{k}] are added up, so that the gradient in the last output "
                "counts twice: all fits with grad=None",
                self._replace(grad=None),
            )
        turned = _transposed(self.jacobians)
        if turned is not None:
            yield (
                "All fits once the Jacobians are transposed: pass J.T, or J.T.tocsr()",
                self._replace(jacobians=turned),
            )
        back = _backward(self.jacobians)
        if back is not None:
            order = "reverse=False" if self.reverse else "reverse=True"
            yield (
                f"All fits in the other order: pass {order}",
                self._replace(jacobians=back),
            )
            turned = _transposed(back)
            if turned is not None:
                yield (
                    f"All fits transposed and in the other order: pass J.T, and {order}",
                    self._replace(jacobians=turned),
                )
        if isinstance(self.jacobians, list) and 1 < self.n <= _ONE_BY_ONE:
            for k in range(self.n):
                one = _turned(self.jacobians[k])
                if one is not None and one.shape == self.jacobians[k].shape:
                    chain = [*self.jacobians[:k], one, *self.jacobians[k + 1 :]]
                    yield (
                        f"All fits once jacobians[{k}] is transposed",
                        self._replace(jacobians=chain),
                    )


def _eps(array: Any) -> float:
    """Return the rounding of an array's numbers."""
    dtype = getattr(array, "dtype", None)
    return float(np.finfo(np.float32 if dtype == np.float32 else np.float64).eps)


def _widened(array: Any) -> Any:
    if array is None or is_on_device(array) or getattr(array, "dtype", None) != np.float32:
        return array
    return np.asarray(array, np.float64)


def _arrays_of(steps: Any) -> list[Any]:
    """Return the values of a chain, or what holds them, each with its dtype."""
    if not isinstance(steps, list):
        return list(steps.values) if isinstance(steps, (ImplicitChain, PeriodicChain)) else [steps]
    return [part for step in steps for part in (_values(step) or [step])]


def _values(step: Any) -> list[Any]:
    """Return the arrays of an implicit step; [] for an explicit one."""
    return list(step.values) if isinstance(step, ImplicitStep) else []


# -- Other chains ----------------------------------------------------------------------------------


def _transposed(jacobians: Any) -> Any:
    """Return a chain of the transposes; None if these do not chain, or there are none."""
    if isinstance(jacobians, np.ndarray):
        square = jacobians.shape[-1] == jacobians.shape[-2]
        return np.swapaxes(jacobians, -1, -2) if square else None
    if isinstance(jacobians, CSRChain):
        order, indices, indptr, shape = _transposed_pattern(jacobians)
        return CSRChain(jacobians.data[..., order], indices, indptr, shape)
    if is_stack(jacobians):
        return None
    turned = [_turned(each) for each in jacobians]
    if any(each is None or each.shape[-1] != each.shape[-2] for each in turned):
        return None
    return turned


def _turned(jacobian: Any) -> Any:
    """Return the transpose of one Jacobian; None if it has no values of its own."""
    if isinstance(jacobian, BatchedCSR):
        order, indices, indptr, shape = _transposed_pattern(jacobian)
        return BatchedCSR(jacobian.data[:, order], indices, indptr, shape)
    if sp.issparse(jacobian):
        return jacobian.T.tocsr()
    if is_on_device(jacobian) or isinstance(jacobian, ImplicitStep):
        return None
    array = np.asarray(jacobian)
    return np.swapaxes(array, -1, -2) if array.ndim in (2, 3) else None


def _transposed_pattern(chain: Any) -> tuple[Any, Any, Any, tuple[int, int]]:
    """Return where the values of transposes are, their indices and shape."""
    places = np.arange(1, chain.nnz + 1)
    turned = sp.csr_array((places, chain.indices, chain.indptr), shape=chain.shape).T.tocsr()
    return turned.data - 1, turned.indices, turned.indptr, turned.shape


def _backward(jacobians: Any) -> Any:
    """Return a chain in the other order; None if that does not chain."""
    if isinstance(jacobians, np.ndarray):
        return jacobians[::-1]
    if isinstance(jacobians, CSRChain):
        return CSRChain.from_pattern(jacobians.data[::-1], jacobians.pattern)
    if is_stack(jacobians):
        return None
    shapes = {tuple(each.shape[-2:]) for each in jacobians if hasattr(each, "shape")}
    is_square = len(shapes) == 1 and len(set(*shapes)) == 1
    return jacobians[::-1] if is_square else None


# -- Differences -----------------------------------------------------------------------------------


class _Slopes(NamedTuple):
    """Slopes of a function along some directions, and how far they may be off."""

    directions: list[Vector]
    values: Vector
    errors: Vector

    @classmethod
    def of(
        cls, fun: Callable[[Vector], Any], x: Vector, count: int, step: float | None, rng: Any
    ) -> _Slopes:
        """Measure them by central differences."""
        draw = np.random.default_rng(rng)
        directions = []
        for _ in range(count):
            direction = draw.standard_normal(x.shape)
            directions.append(direction / np.linalg.norm(direction))
        middle = _value(fun, x)
        if _value(fun, x) != middle:
            raise InputError(
                "fun gives two losses for the same x; expected one: without dropout, and with the "
                "same random numbers in every call"
            )
        length = float(np.linalg.norm(x)) or 1.0
        tried = [_value(fun, x + 1e-3 * length * each) for each in directions]
        single = all(float(np.float32(each)) == each for each in (middle, *tried))
        eps = float(np.finfo(np.float32 if single else np.float64).eps)
        steps = length * np.array([eps**power for power in _POWERS])
        if step is not None:
            steps *= step / steps[0]
        pairs = [_slope(fun, x, each, steps, eps) for each in directions]
        values, errors = np.array(pairs).T
        # At a minimum the slope is nothing but rounding.
        slope = max(float(np.abs(values).max()), 100 * eps ** (2 / 3) * abs(middle) / length)
        if errors.max() > _VAGUE * slope:
            k = int(errors.argmax())
            raise InputError(
                f"fun has no clear slope at x: by differences {values[k]:.3g} ± {errors[k]:.1g}; "
                "expected a smooth function that computes in float64, or a shorter step"
            )
        return cls(directions, values, errors)

    def slopes(self, gradient: Vector) -> Vector:
        """Return the slopes of a gradient along these directions."""
        return np.array([float((each * gradient).sum()) for each in self.directions])

    def fits(self, slopes: Vector, rounding: Vector) -> bool:
        """Return whether slopes agree with these within the error bound."""
        return bool((np.abs(slopes - self.values) <= _CERTAIN * self.errors + rounding).all())

    def distance(self, slopes: Vector) -> float:
        """Return how far slopes are apart, as a share of their length."""
        length = float(np.abs(self.values).max())
        return float(np.abs(slopes - self.values).max()) / (length or 1.0)


def _slope(
    fun: Callable[[Vector], Any], x: Vector, direction: Vector, steps: Vector, eps: float
) -> tuple[float, float]:
    """Return the slope of a function along a direction, and how far it may be off."""
    slopes, errors = [], []
    for step in steps.tolist():
        above, below = _value(fun, x + step * direction), _value(fun, x - step * direction)
        slopes.append((above - below) / (2 * step))
        errors.append(eps * max(abs(above), abs(below)) / step)
    apart = np.abs(np.diff(slopes)) + errors[1:]
    best = int(np.argmin(apart))
    return slopes[best + 1], float(apart[best])


def _value(fun: Callable[[Vector], Any], x: Vector) -> float:
    loss = fun(x.copy())
    try:
        value = float(loss)
    except Exception as error:  # not a number
        raise InputError(f"fun returned {short(loss)}; expected the loss, one number") from error
    if not np.isfinite(value):
        raise InputError(f"fun returned {value} near x; expected a finite number")
    return value


def _factor(slopes: Vector, measured: _Slopes, rounding: Vector) -> str:
    """Return the factor by which all slopes are wrong, if there is one factor for all."""
    factor = float(slopes @ measured.values) / (float(measured.values @ measured.values) or 1.0)
    if factor == 0 or not measured.fits(slopes / factor, rounding / abs(factor)):
        return (
            "Usual causes are Jacobians at other states than those of fun, a gradient of another "
            "loss, a layer that is left out, and a kink of fun at x"
        )
    near = float(f"{factor:.4g}")
    if near == 2:
        return (
            "It is twice what it should be: a gradient counts twice, in grad and in local_grads, "
            "or the loss is half a square"
        )
    if near == 0.5:
        return "It is half of what it should be: a square has a gradient of twice its root"
    if near == -1:
        return "It has the other sign"
    return (
        f"It is {near:.4g} times what it should be: a loss may be a mean, and its gradient that of "
        "a sum, or the other way round"
    )


def _shown(slopes: Vector) -> str:
    return ", ".join(f"{slope:.6g}" for slope in slopes[:3].tolist())

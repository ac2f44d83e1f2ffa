"""Linear Gaussian state spaces for JAX: log-likelihoods, states, and linear systems."""

from __future__ import annotations

from typing import Any

from ..ops import kalman as ops
from ..ops import tridiagonal
from ..ops.kalman import Filtered, Smoothed
from .binder import FUNCTIONS
from .ffi.calls import FLOATS, as_arrays, check_platform

__all__ = [
    "kalman_filter",
    "kalman_smoother",
    "log_likelihood",
    "slogdet_block_tridiagonal",
    "solve_banded",
    "solve_block_tridiagonal",
]


def log_likelihood(
    observations: Any,
    *,
    transition: Any,
    observation: Any,
    transition_covariance: Any,
    observation_covariance: Any,
    initial_covariance: Any,
    initial_mean: Any = None,
    transition_offset: Any = None,
    observation_offset: Any = None,
) -> Any:
    """Return the log-likelihood of series of a linear Gaussian state space.

    As :func:`sparsescan.statespace.log_likelihood`, for arrays of JAX, under ``jax.jit``,
    ``jax.vmap``, by which series become more series, and all derivatives, of any order. First
    gradients are an adjoint of the filter's recursion in closed form; gradients of gradients and
    forward mode are a ``jax.lax.scan``.

    Parameters
    ----------
    observations : array_like, shape (steps, observed) or (steps, series, observed)
        The series. NaN is missing, entry by entry.
    transition, transition_covariance : array_like, shape (..., states, states)
        The matrices that lead from a state to the next, and the covariance of what is added.
    observation : array_like, shape (..., observed, states)
        The matrices that lead from a state to what is observed.
    observation_covariance : array_like, shape (..., observed, observed)
        The covariance of what is added to that.
    initial_covariance : array_like, shape (states, states) or (series, states, states)
        The covariance of the first states, before the first observation.
    initial_mean : array_like, shape (states,) or (series, states), optional
        Their mean; zeros by default.
    transition_offset, observation_offset : array_like, optional
        What is added to states and to observations, of shape (..., states) and (..., observed).

    Returns
    -------
    jax.Array, shape () or (series,)
        The log-likelihood of all that is there, of each series.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax.statespace import log_likelihood
    >>> one = jnp.ones((1, 1))
    >>> model = dict(
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ... )
    >>> loss = lambda p: log_likelihood(jnp.array([[2.0]]), initial_covariance=p, **model)
    >>> jax.grad(loss)(one).tolist()
    [[0.25]]
    """
    model = {
        "transition": transition,
        "observation": observation,
        "transition_covariance": transition_covariance,
        "observation_covariance": observation_covariance,
        "initial_covariance": initial_covariance,
        "initial_mean": initial_mean,
        "transition_offset": transition_offset,
        "observation_offset": observation_offset,
    }
    return ops.likelihood(FUNCTIONS, _given("log_likelihood", observations, model))


def _given(function: str, observations: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names, as arrays of one dtype."""
    check_platform()
    named = ops.named_model(function, observations, model)
    given = as_arrays(FLOATS, ops.OPTIONAL, **named)
    return dict(zip(named, given, strict=True))


def kalman_filter(observations: Any, **model: Any) -> Filtered:
    """Return the means and covariances of states, given the observations so far.

    As :func:`sparsescan.statespace.kalman_filter`, under ``jax.jit`` and ``jax.vmap``.
    All derivatives are those of a ``jax.lax.scan``.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Filtered
        Log-likelihoods, and moments of states, as arrays of JAX.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sparsescan.jax.statespace import kalman_filter
    >>> one = jnp.ones((1, 1))
    >>> model = dict(transition=one, observation=one, transition_covariance=one)
    >>> model |= dict(observation_covariance=one, initial_covariance=one)
    >>> kalman_filter(jnp.array([[2.0], [jnp.nan]]), **model).means.tolist()
    [[1.0], [1.0]]
    """
    return ops.kalman_filter(FUNCTIONS, _given("kalman_filter", observations, model))


def kalman_smoother(observations: Any, **model: Any) -> Smoothed:
    """Return the means and covariances of states, given all observations.

    As :func:`sparsescan.statespace.kalman_smoother`, under ``jax.jit`` and ``jax.vmap``.
    All derivatives are those of a ``jax.lax.scan``.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Smoothed
        Log-likelihoods, and moments of states, as arrays of JAX.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sparsescan.jax.statespace import kalman_smoother
    >>> one = jnp.ones((1, 1))
    >>> model = dict(transition=one, observation=one, transition_covariance=one)
    >>> model |= dict(observation_covariance=one, initial_covariance=one)
    >>> kalman_smoother(jnp.array([[2.0], [jnp.nan]]), **model).means.tolist()
    [[1.0], [1.0]]
    """
    return ops.kalman_smoother(FUNCTIONS, _given("kalman_smoother", observations, model))


def solve_block_tridiagonal(lower: Any, diagonal: Any, upper: Any, b: Any) -> Any:
    """Return the solution of a linear system whose matrix is block-tridiagonal.

    As :func:`sparsescan.statespace.solve_block_tridiagonal`, for arrays of JAX, under its
    transforms. All derivatives, of any order and in both modes, are solutions of such systems.

    Parameters
    ----------
    lower : array_like or None, shape (steps, n, n) or (steps, series, n, n)
        Blocks below the diagonal; the first is not read. None if the matrix is symmetric.
    diagonal, upper : array_like, of the same shape
        Blocks on the diagonal, and above it; the last of `upper` is not read.
    b : array_like, shape (steps, [series,] n) or (steps, [series,] n, k)
        Right sides.

    Returns
    -------
    jax.Array
        The solutions, of the shape of `b`; NaN where a matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax.statespace import solve_block_tridiagonal
    >>> two, one = jnp.full((3, 1, 1), 2.0), jnp.full((3, 1, 1), -1.0)
    >>> loss = lambda d: solve_block_tridiagonal(None, d, one, jnp.ones((3, 1))).sum()
    >>> jax.grad(loss)(two)[:, 0, 0].tolist()
    [-2.25, -4.0, -2.25]
    """
    check_platform()
    named = {"lower": lower, "diagonal": diagonal, "upper": upper, "b": b}
    given = as_arrays(FLOATS, tridiagonal.NAMES[:1], **named)
    return tridiagonal.solve(FUNCTIONS, dict(zip(named, given, strict=True)))


def slogdet_block_tridiagonal(lower: Any, diagonal: Any, upper: Any) -> tuple[Any, Any]:
    """Return sign and logarithm of the determinant of block-tridiagonal matrices.

    As :func:`sparsescan.statespace.slogdet_block_tridiagonal`. The first gradient is a selected
    inverse; derivatives of it, and forward mode, come from dense matrices: right, but slow.

    Parameters
    ----------
    lower, diagonal, upper
        As :func:`solve_block_tridiagonal` takes them.

    Returns
    -------
    sign, logabsdet : jax.Array, shape () or (series,)
        Sign and logarithm; 0 and -inf if a matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sparsescan.jax.statespace import slogdet_block_tridiagonal
    >>> two = jnp.full((3, 1, 1), 2.0)
    >>> [round(float(each), 4) for each in slogdet_block_tridiagonal(None, two, 0 * two)]
    [1.0, 2.0794]
    """
    check_platform()
    named = {"lower": lower, "diagonal": diagonal, "upper": upper}
    given = as_arrays(FLOATS, ("lower",), **named)
    return tridiagonal.slogdet(FUNCTIONS, dict(zip(named, given, strict=True)))


def solve_banded(l_and_u: tuple[int, int], ab: Any, b: Any) -> Any:
    """Return the solution of a linear system with a band matrix.

    As :func:`sparsescan.statespace.solve_banded`, for arrays of JAX, under its transforms, with all
    derivatives.

    Parameters
    ----------
    l_and_u : tuple of int
        How many diagonals there are below and above the main one.
    ab : array_like, shape (l + u + 1, n)
        The diagonals, the highest first: ``ab[u + i - j, j] = a[i, j]``.
    b : array_like, shape (n,) or (n, k)
        Right sides.

    Returns
    -------
    jax.Array
        The solutions, of the shape of `b`; NaN if the matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sparsescan.jax.statespace import solve_banded
    >>> solve_banded((1, 0), jnp.array([[2.0, 2.0], [-1.0, 0.0]]), jnp.ones(2)).tolist()
    [0.5, 0.75]
    """
    check_platform()
    ab, b = as_arrays(FLOATS, (), ab=ab, b=b)
    return tridiagonal.solve_banded(FUNCTIONS, l_and_u, ab, b)

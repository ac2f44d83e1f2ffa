"""Linear Gaussian state spaces for PyTorch: log-likelihoods, states, and linear systems."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import kalman as ops
from ..ops import tridiagonal
from ..ops.kalman import Filtered, Smoothed
from .binder import FUNCTIONS, bind
from .calls.arrays import check_tensors

__all__ = [
    "kalman_filter",
    "kalman_smoother",
    "log_likelihood",
    "slogdet_block_tridiagonal",
    "solve_banded",
    "solve_block_tridiagonal",
]

for _operation in (
    *(ops.LOG_LIKELIHOOD, ops.FILTER, ops.SMOOTHER),
    *(tridiagonal.SOLVE, tridiagonal.LOG_DETERMINANT),
):
    bind(_operation)


def log_likelihood(
    observations: Tensor,
    *,
    transition: Tensor,
    observation: Tensor,
    transition_covariance: Tensor,
    observation_covariance: Tensor,
    initial_covariance: Tensor,
    initial_mean: Tensor | None = None,
    transition_offset: Tensor | None = None,
    observation_offset: Tensor | None = None,
) -> Tensor:
    """Return the log-likelihood of series of a linear Gaussian state space.

    As :func:`sparsescan.statespace.log_likelihood`, for tensors in host memory, of one dtype. It is
    one operator, registered with ``torch.library``, whose first gradients are an adjoint of the
    filter's recursion in closed form. Gradients of gradients, forward mode and the transforms of
    ``torch.func`` are computed by PyTorch's own operations, step by step: right, but slow.

    Parameters
    ----------
    observations : Tensor, shape (steps, observed) or (steps, series, observed)
        The series. NaN is missing, entry by entry.
    transition, transition_covariance : Tensor, shape (..., states, states)
        The matrices that lead from a state to the next, and the covariance of what is added.
    observation : Tensor, shape (..., observed, states)
        The matrices that lead from a state to what is observed.
    observation_covariance : Tensor, shape (..., observed, observed)
        The covariance of what is added to that.
    initial_covariance : Tensor, shape (states, states) or (series, states, states)
        The covariance of the first states, before the first observation.
    initial_mean : Tensor, shape (states,) or (series, states), optional
        Their mean; zeros by default.
    transition_offset, observation_offset : Tensor, optional
        What is added to states and to observations, of shape (..., states) and (..., observed).

    Returns
    -------
    Tensor, shape () or (series,)
        The log-likelihood of all that is there, of each series.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type is not supported, or dtypes differ.
    DeviceError
        If a tensor is not in host memory.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import log_likelihood
    >>> one, p = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
    >>> log_likelihood(
    ...     torch.tensor([[2.0]]),
    ...     transition=one,
    ...     observation=one,
    ...     transition_covariance=one,
    ...     observation_covariance=one,
    ...     initial_covariance=p,
    ... ).backward()
    >>> p.grad
    tensor([[0.2500]])
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
    found: Tensor = ops.likelihood(FUNCTIONS, _given("log_likelihood", observations, model))
    return found


def _given(function: str, observations: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names, checked."""
    given = ops.named_model(function, observations, model)
    check_tensors(given, ops.OPTIONAL)
    return given


def kalman_filter(observations: Tensor, **model: Tensor | None) -> Filtered:
    """Return the means and covariances of states, given the observations so far.

    As :func:`sparsescan.statespace.kalman_filter`, for tensors in host memory, of one dtype.
    All derivatives are those of PyTorch's own operations, step by step: right, but slow.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Filtered
        Log-likelihoods, and moments of states, as tensors.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import kalman_filter
    >>> one = torch.ones(1, 1)
    >>> model = dict(transition=one, observation=one, transition_covariance=one)
    >>> model |= dict(observation_covariance=one, initial_covariance=one)
    >>> kalman_filter(torch.tensor([[2.0], [torch.nan]]), **model).means
    tensor([[1.],
            [1.]])
    """
    return ops.kalman_filter(FUNCTIONS, _given("kalman_filter", observations, model))


def kalman_smoother(observations: Tensor, **model: Tensor | None) -> Smoothed:
    """Return the means and covariances of states, given all observations.

    As :func:`sparsescan.statespace.kalman_smoother`, for tensors in host memory, of one dtype.
    All derivatives are those of PyTorch's own operations, step by step: right, but slow.

    Parameters
    ----------
    observations, **model
        As :func:`log_likelihood` takes them.

    Returns
    -------
    Smoothed
        Log-likelihoods, and moments of states, as tensors.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import kalman_smoother
    >>> one = torch.ones(1, 1)
    >>> model = dict(transition=one, observation=one, transition_covariance=one)
    >>> model |= dict(observation_covariance=one, initial_covariance=one)
    >>> kalman_smoother(torch.tensor([[2.0], [torch.nan]]), **model).means
    tensor([[1.],
            [1.]])
    """
    return ops.kalman_smoother(FUNCTIONS, _given("kalman_smoother", observations, model))


def solve_block_tridiagonal(
    lower: Tensor | None, diagonal: Tensor, upper: Tensor, b: Tensor
) -> Tensor:
    """Return the solution of a linear system whose matrix is block-tridiagonal.

    As :func:`sparsescan.statespace.solve_block_tridiagonal`, for tensors in host memory, of one
    dtype. All derivatives, of any order and in both modes, are solutions of such systems.

    Parameters
    ----------
    lower : Tensor or None, shape (steps, n, n) or (steps, series, n, n)
        Blocks below the diagonal; the first is not read. None if the matrix is symmetric.
    diagonal, upper : Tensor, of the same shape
        Blocks on the diagonal, and above it; the last of `upper` is not read.
    b : Tensor, shape (steps, [series,] n) or (steps, [series,] n, k)
        Right sides.

    Returns
    -------
    Tensor
        The solutions, of the shape of `b`; NaN where a matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import solve_block_tridiagonal
    >>> two, one = torch.full((3, 1, 1), 2.0, requires_grad=True), torch.full((3, 1, 1), -1.0)
    >>> solve_block_tridiagonal(None, two, one, torch.ones(3, 1)).sum().backward()
    >>> two.grad[:, 0, 0]
    tensor([-2.2500, -4.0000, -2.2500])
    """
    given = {"lower": lower, "diagonal": diagonal, "upper": upper, "b": b}
    check_tensors(given, ("lower",))
    found: Tensor = tridiagonal.solve(FUNCTIONS, given)
    return found


def slogdet_block_tridiagonal(
    lower: Tensor | None, diagonal: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sign and logarithm of the determinant of block-tridiagonal matrices.

    As :func:`sparsescan.statespace.slogdet_block_tridiagonal`. The first gradient is a selected
    inverse; derivatives of it, and forward mode, come from dense matrices: right, but slow.

    Parameters
    ----------
    lower, diagonal, upper
        As :func:`solve_block_tridiagonal` takes them.

    Returns
    -------
    sign, logabsdet : Tensor, shape () or (series,)
        Sign and logarithm; 0 and -inf if a matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import slogdet_block_tridiagonal
    >>> two = torch.full((3, 1, 1), 2.0)
    >>> slogdet_block_tridiagonal(None, two, 0 * two)
    (tensor(1.), tensor(2.0794))
    """
    given = {"lower": lower, "diagonal": diagonal, "upper": upper}
    check_tensors(given, ("lower",))
    found: tuple[Tensor, Tensor] = tridiagonal.slogdet(FUNCTIONS, given)
    return found


def solve_banded(l_and_u: tuple[int, int], ab: Tensor, b: Tensor) -> Tensor:
    """Return the solution of a linear system with a band matrix.

    As :func:`sparsescan.statespace.solve_banded`, for tensors in host memory, of one dtype, with
    all derivatives.

    Parameters
    ----------
    l_and_u : tuple of int
        How many diagonals there are below and above the main one.
    ab : Tensor, shape (l + u + 1, n)
        The diagonals, the highest first: ``ab[u + i - j, j] = a[i, j]``.
    b : Tensor, shape (n,) or (n, k)
        Right sides.

    Returns
    -------
    Tensor
        The solutions, of the shape of `b`; NaN if the matrix is singular.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`log_likelihood`.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.statespace import solve_banded
    >>> ab = torch.tensor([[0.0, -1.0, -1.0], [2.0, 2.0, 2.0], [-1.0, -1.0, 0.0]])
    >>> solve_banded((1, 1), ab, torch.ones(3))
    tensor([1.5000, 2.0000, 1.5000])
    """
    check_tensors({"ab": ab, "b": b}, ())
    found: Tensor = tridiagonal.solve_banded(FUNCTIONS, l_and_u, ab, b)
    return found

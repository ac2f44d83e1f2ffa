"""Linear Gaussian state spaces for PyTorch: the log-likelihood of series."""

from __future__ import annotations

from torch import Tensor

from ..ops import kalman as ops
from .binder import FUNCTIONS, bind
from .calls.arrays import check_tensors

__all__ = ["log_likelihood"]

bind(ops.LOG_LIKELIHOOD)


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
    given = {
        "observations": observations,
        "transition": transition,
        "observation": observation,
        "transition_covariance": transition_covariance,
        "observation_covariance": observation_covariance,
        "initial_covariance": initial_covariance,
        "initial_mean": initial_mean,
        "transition_offset": transition_offset,
        "observation_offset": observation_offset,
    }
    check_tensors(given, ops.OPTIONAL)
    found: Tensor = ops.likelihood(FUNCTIONS, given)
    return found

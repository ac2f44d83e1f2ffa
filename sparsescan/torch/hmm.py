"""Hidden Markov models for PyTorch: the log-likelihood of series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputTypeError, short
from ..ops import hmm as ops
from ..symbolic.pattern import Pattern
from .binder import FUNCTIONS, bind
from .calls.arrays import check_tensors

__all__ = ["log_likelihood"]

bind(ops.LOG_LIKELIHOOD)


def log_likelihood(
    log_emissions: Tensor,
    *,
    initial: Tensor,
    transition: Tensor,
    pattern: Pattern | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the log-likelihood of series of a hidden Markov model.

    As :func:`sparsescan.statespace.hmm.log_likelihood`, for tensors in host memory, of one dtype.
    It is one operator, registered with ``torch.library``. Its gradient in `log_emissions` is the
    posterior of each state at each step. First gradients come from the backward recursion.
    Gradients of gradients, forward mode and the transforms of ``torch.func`` are computed by
    PyTorch's own operations, step by step: right, but slow.

    Parameters
    ----------
    log_emissions : Tensor, shape (steps, states) or (steps, series, states)
        The logarithms of densities or probabilities of observations; -inf is impossible.
    initial : Tensor, shape (states,) or (series, states)
        The probabilities of first states.
    transition : Tensor, shape (..., states, states)
        The probabilities of transitions, from a row to a column; with a leading axis of steps, or
        two, of steps and series. Of a `pattern` its values, of shape (..., nnz).
    pattern : Pattern, optional
        Where `transition` has its values; all others are 0.
    lengths : Tensor of whole numbers, shape (series,), optional
        How many steps each series has; all by default.

    Returns
    -------
    Tensor, shape () or (series,)
        The log-likelihoods: -inf if no path is possible, with gradients of 0.

    Raises
    ------
    InputError
        If a shape is wrong, a probability is negative, or a length is more than there is.
    InputTypeError
        If a type is not supported, or dtypes differ.
    DeviceError
        If a tensor is not in host memory.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch.hmm import log_likelihood
    >>> emissions = torch.tensor([[0.5, 0.1], [0.4, 0.3]]).log().requires_grad_()
    >>> stay = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> log_likelihood(emissions, initial=torch.ones(2) / 2, transition=stay).backward()
    >>> emissions.grad  # the posteriors
    tensor([[0.8590, 0.1410],
            [0.8282, 0.1718]])
    """
    given: dict[str, Any] = {
        "log_emissions": log_emissions,
        "initial": initial,
        "transition": transition,
    }
    check_tensors(given, ())
    if lengths is not None and getattr(lengths, "dtype", None) not in (torch.int32, torch.int64):
        raise InputTypeError(f"lengths is {short(lengths)}; expected a tensor of int32 or int64")
    given["lengths"] = lengths
    found: Tensor = ops.likelihood(FUNCTIONS, given, pattern, _like)
    return found


def _like(lengths: Tensor, like: Tensor) -> Tensor:
    return lengths.to(like.dtype)

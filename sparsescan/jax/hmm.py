"""Hidden Markov models for JAX: the log-likelihood of series."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..errors import InputTypeError
from ..ops import hmm as ops
from ..symbolic.pattern import Pattern
from .binder import FUNCTIONS
from .ffi.calls import FLOATS, as_arrays, check_platform

__all__ = ["log_likelihood"]


def log_likelihood(
    log_emissions: Any,
    *,
    initial: Any,
    transition: Any,
    pattern: Pattern | None = None,
    lengths: Any = None,
) -> Any:
    """Return the log-likelihood of series of a hidden Markov model.

    As :func:`sparsescan.statespace.hmm.log_likelihood`, for arrays of JAX, under ``jax.jit``,
    ``jax.vmap``, by which series become more series, and all derivatives, of any order. The
    gradient in `log_emissions` is the posterior of each state at each step. First gradients come
    from the backward recursion; gradients of gradients and forward mode are a ``jax.lax.scan``.
    Under a trace values are not checked: lengths are clipped to what there is.

    Parameters
    ----------
    log_emissions : array_like, shape (steps, states) or (steps, series, states)
        The logarithms of densities or probabilities of observations; -inf is impossible.
    initial : array_like, shape (states,) or (series, states)
        The probabilities of first states.
    transition : array_like, shape (..., states, states)
        The probabilities of transitions, from a row to a column; with a leading axis of steps, or
        two, of steps and series. Of a `pattern` its values, of shape (..., nnz).
    pattern : Pattern, optional
        Where `transition` has its values; all others are 0.
    lengths : array_like of whole numbers, shape (series,), optional
        How many steps each series has; all by default.

    Returns
    -------
    jax.Array, shape () or (series,)
        The log-likelihoods: -inf if no path is possible, with gradients of 0.

    Raises
    ------
    InputError
        If a shape is wrong; without a trace, if a probability is negative, or a length is more than
        there is.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from sparsescan.jax.hmm import log_likelihood
    >>> model = dict(initial=jnp.ones(2) / 2, transition=jnp.array([[0.9, 0.1], [0.2, 0.8]]))
    >>> emissions = jnp.log(jnp.array([[0.5, 0.1], [0.4, 0.3]]))
    >>> grads = jax.grad(lambda e: log_likelihood(e, **model))(emissions)  # the posteriors
    >>> np.asarray(grads).round(3)
    array([[0.859, 0.141],
           [0.828, 0.172]], dtype=float32)
    """
    check_platform()
    named = {"log_emissions": log_emissions, "initial": initial, "transition": transition}
    given: dict[str, Any] = dict(zip(named, as_arrays(FLOATS, **named), strict=True))
    given["lengths"] = None if lengths is None else jnp.asarray(lengths)
    if lengths is not None and not jnp.issubdtype(given["lengths"].dtype, jnp.integer):
        raise InputTypeError(f"lengths has dtype {given['lengths'].dtype}; expected whole numbers")
    return ops.likelihood(FUNCTIONS, given, pattern, lambda own, like: own.astype(like.dtype))

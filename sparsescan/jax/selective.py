"""Selective scans for JAX."""

from __future__ import annotations

from typing import Any

from ..ops import selective as ops
from .binder import FUNCTIONS
from .ffi.calls import FLOATS, as_arrays, check_platform


def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Any = None,
) -> Any:
    """Return the outputs of a selective state space model, such as Mamba.

    With ``δ = softplus(delta + delta_bias)`` or ``delta + delta_bias`` it computes, for each
    channel,

    ``h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t``, ``y_t = C_t·h_t + D u_t``, ``out_t = y_t silu(z_t)``

    from ``h_0`` on, zeros by default (Gu and Dao, 2023, arXiv 2312.00752, Algorithm 2, with
    ``exp(δ A)`` of equation 4 for states and ``δ B`` for inputs, as in the paper's code).

    This is :func:`sparsescan.torch.selective_scan` for JAX arrays. It replaces a ``jax.lax.scan``
    over the steps. It works under ``jax.jit``, under ``jax.vmap`` (a mapped axis, of parameters
    too, becomes channels), and with all derivatives of any order. States are computed where they
    are needed, so the call takes the memory of a few arrays of the size of `u`. Results have the
    same bits for any number of threads. A ``jax.lax.scan`` computes gradients of gradients and
    forward mode.

    Parameters
    ----------
    u, delta : array_like, shape (batch, channels, length)
        The inputs, and the step sizes.
    A : array_like, shape (channels, states)
        The rates, real.
    B, C : array_like
        The vectors that write inputs into states, and that read states. Shape (batch, states,
        length): shared by all channels. Shape (batch, groups, states, length): shared by the
        channels of a group; the number of groups divides that of channels. Shape (channels,
        states): constant in time.
    D : array_like, shape (channels,), optional
        The factor by which inputs are added to the outputs.
    z : array_like, shape (batch, channels, length), optional
        The gate.
    delta_bias : array_like, shape (channels,), optional
        The bias that is added to `delta`.
    delta_softplus : bool, default False
        Whether to apply softplus to that sum.
    return_last_state : bool, default False
        Whether to return the last states too. They are differentiable.
    initial_state : array_like, shape (batch, channels, states), optional
        The states ``h_0``, such as the last states of another call; zeros by default.

    Returns
    -------
    out : jax.Array, shape (batch, channels, length)
        The outputs, in the widest dtype of all arguments, float32 or float64.
    last_state : jax.Array, shape (batch, channels, states)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong.
    InputTypeError
        If a type is not supported, such as a complex `A`.
    DeviceError
        If JAX does not compute on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import selective_scan
    >>> u, B = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4))
    >>> delta = jnp.array([[[1.0, 1.0, 0.0, 1.0]]])
    >>> A = jnp.array([[-0.6931472]])  # a step of size 1 halves states
    >>> selective_scan(u, delta, A, B, C=B).ravel().tolist()
    [1.0, 1.5, 1.5, 1.75]
    >>> grad = jax.grad(lambda delta: selective_scan(u, delta, A, B, C=B)[0, 0, -1])(delta)
    >>> [round(each, 3) for each in grad.ravel().tolist()]
    [0.25, 0.327, -0.02, 0.48]
    """
    check_platform()
    values = u, delta, A, B, C, D, z, delta_bias, initial_state
    given = as_arrays(FLOATS, **dict(zip(ops.NAMES, values, strict=True)))
    return ops.selective_scan(FUNCTIONS, given, delta_softplus, return_last_state)

"""Linear attention for JAX."""

from __future__ import annotations

from typing import Any

from ..ops import attention as ops
from .binder import FUNCTIONS
from .ffi.calls import FLOATS, as_arrays, check_platform


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    decay: Any = None,
    a: Any = None,
    b: Any = None,
    bonus: Any = None,
    initial_state: Any = None,
    return_last_state: bool = False,
) -> Any:
    """Return the outputs of linear attention, whose states are matrices, with decay and delta rule.

    For each sample and head it computes

    ``S_t = diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ``, ``o_t = S_tᵀ q_t``

    from ``S_0`` on, where ``w`` is `decay`. With a `bonus` ``u``, outputs read the old states,
    ``o_t = S_{t-1}ᵀ q_t + ((q_t ∘ u)·k_t) v_t``, as in RWKV-6. RetNet, gated linear attention,
    DeltaNet, gated DeltaNet, RWKV-6 and RWKV-7, Mamba-2 and the mLSTM are special cases:
    :doc:`each in a few lines </how/attention>`.

    This is :func:`sparsescan.torch.linear_attention` for JAX arrays. It replaces a ``jax.lax.scan``
    over the steps, and takes the memory of a few inputs. It works under ``jax.jit``, under
    ``jax.vmap`` (a mapped axis becomes heads), and with all derivatives of any order. Results have
    the same bits for any number of threads. A ``jax.lax.scan`` computes gradients of gradients and
    forward mode.

    Parameters
    ----------
    q, k : array_like, shape (batch, length, heads, keys)
        The queries that read the states, and the keys under which values are written.
    v : array_like, shape (batch, length, heads, values)
        The values.
    decay : array_like, shape (batch, length, heads) or (batch, length, heads, keys), optional
        The factor of a state, or of each of its rows; a row belongs to a key. An axis of length 1
        means that all samples, steps or heads share the factor. By default nothing decays.
    a, b : array_like, shape (batch, length, heads, keys), optional
        The vectors of the delta rule: it reads ``a_tᵀ S_{t-1}`` from the old state, and adds the
        result under the key ``b_t``.
    bonus : array_like, shape (heads, keys), optional
        The weight of a step's own value in its output, for each key.
    initial_state : array_like, shape (batch, heads, keys, values), optional
        The states ``S_0``, such as the last states of another call; zeros by default.
    return_last_state : bool, default False
        Whether to return the last states too. They are differentiable.

    Returns
    -------
    out : jax.Array, shape (batch, length, heads, values)
        The outputs, in the widest dtype of all arguments, float32 or float64.
    last_state : jax.Array, shape (batch, heads, keys, values)
        The states after the last step, if asked for.

    Raises
    ------
    InputError
        If a shape is wrong, or if only one of `a` and `b` is given.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX does not compute on the CPU.

    Examples
    --------
    A value is written under each of two keys, then one is replaced; the last query reads both.

    >>> import jax.numpy as jnp
    >>> from sparsescan.jax import linear_attention
    >>> k = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    >>> q, v = jnp.ones((1, 3, 1, 2)), jnp.array([1.0, 2.0, 5.0])[None, :, None, None]
    >>> linear_attention(q, k, v, a=k, b=-k).ravel().tolist()
    [1.0, 3.0, 7.0]
    """
    check_platform()
    values = q, k, v, decay, a, b, bonus, initial_state
    given = as_arrays(FLOATS, ops.NAMES[3:], **dict(zip(ops.NAMES, values, strict=True)))
    return ops.attend(FUNCTIONS, given, return_last_state)

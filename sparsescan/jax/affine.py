"""Linear recurrences for JAX, and their gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..checks import check_flag
from ..ops.readings import read_shapes
from ..ops.recurrence import RECURRENCE, form_of, whole_shapes
from ..symbolic.pattern import Pattern
from .binder import bind
from .ffi.calls import NUMBERS, as_arrays, check_platform


def affine_scan(
    matrices: Any,
    offsets: Any = None,
    initial: Any = None,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
) -> Any:
    """Return the states of a linear recurrence in the order of time, ``y_t = A_t y_{t-1} + b_t``.

    This is :func:`sparsescan.affine_scan` for JAX arrays. It replaces a ``jax.lax.scan`` over
    matrix-vector products. It works under ``jax.jit``, under ``jax.vmap`` (a mapped axis becomes
    samples), and with all derivatives of any order: ``jax.grad``, ``jvp``, ``jacfwd``, ``jacrev``,
    ``hessian``.

    Parameters
    ----------
    matrices : array_like
        The matrices ``A_1, …, A_T``: dense, ``(T, size, size)`` or ``(T, batch, size, size)``;
        diagonals, ``(T, size)`` or ``(T, batch, size)``; a number for each step, ``(T,)``; values
        in the order of `pattern`, ``(T, nnz)`` or ``(T, batch, nnz)``. One matrix for all steps has
        no first axis, or one of length one. Samples share matrices without a batch axis.
    offsets : array_like, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : array_like, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if `matrices` are values. If shapes are ambiguous, pass
        ``Pattern.diagonal(size)`` for diagonals or ``Pattern.dense((size, size))`` for dense
        matrices.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``.

    Returns
    -------
    jax.Array, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``.

    Raises
    ------
    InputError
        If a shape or a size is wrong, or if shapes are ambiguous; it is raised during tracing.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX does not compute on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import affine_scan
    >>> def last(a):
    ...     return affine_scan(a, jnp.ones((4, 1)))[-1, 0]
    >>> value, grad = jax.jit(jax.value_and_grad(last))(jnp.full((4, 1), 0.5))
    >>> float(value), grad.ravel().tolist()
    (1.875, [0.0, 0.25, 0.75, 1.75])
    """
    check_platform()
    transposed = check_flag("transposed", transposed)
    a, b, y0 = as_arrays(NUMBERS, matrices=matrices, offsets=offsets, initial=initial)
    added, begin = (None if each is None else each.shape for each in (b, y0))
    reading = read_shapes(a.shape, added, begin, pattern)
    a = jnp.broadcast_to(a.reshape(reading.axes), reading.shape)
    form = form_of(reading, pattern, transposed)
    whole = [
        None if each is None or shape is None else each.reshape(shape)
        for each, shape in zip((a, b, y0), whole_shapes(reading, form, added, begin), strict=True)
    ]
    states = bind(RECURRENCE)(form, *whole)[0]
    return states.reshape(reading.steps, *reading.batch, reading.size)

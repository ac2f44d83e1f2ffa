"""Linear recurrences for JAX, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .. import affine
from ..symbolic.pattern import Pattern, rows_of
from ._calls import as_float, check_platform

__all__ = ["affine_scan"]


def affine_scan(
    matrices: Any,
    offsets: Any = None,
    initial: Any = None,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
) -> Any:
    """Return the states of a linear recurrence in the order of time, ``y_t = A_t y_{t-1} + b_t``.

    As :func:`sparsescan.affine_scan`, for arrays of JAX, under ``jax.jit``, ``jax.grad`` (of any
    order, in reverse mode) and ``jax.vmap``, by which samples become a batch. It takes the place of
    a ``jax.lax.scan`` over matrix-vector products.

    Parameters
    ----------
    matrices : array_like
        The matrices ``A_1, …, A_T``: dense, ``(T, size, size)`` or ``(T, batch, size, size)``, or
        their values in the order of `pattern`, ``(T, nnz)`` or ``(T, batch, nnz)``. Samples share
        matrices without a batch axis.
    offsets : array_like, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : array_like, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if their values are given: ``Pattern.diagonal(size)`` for
        diagonals.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``.

    Returns
    -------
    jax.Array, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``.

    Raises
    ------
    InputError
        If a shape or a size is wrong, when it is traced.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, sparsescan
    >>> from sparsescan.jax import affine_scan
    >>> decay = sparsescan.Pattern.diagonal(1)
    >>> def last(a):
    ...     return affine_scan(a, jnp.ones((4, 1)), pattern=decay)[-1, 0]
    >>> value, grad = jax.jit(jax.value_and_grad(last))(jnp.full((4, 1), 0.5))
    >>> float(value), grad.ravel().tolist()
    (1.875, [0.0, 0.25, 0.75, 1.75])
    """
    check_platform()
    a = as_float("matrices", matrices)
    b = None if offsets is None else as_float("offsets", offsets)
    y0 = None if initial is None else as_float("initial", initial)
    batch, size = affine.check_shapes(
        a.shape, None if b is None else b.shape, None if y0 is None else y0.shape, pattern
    )
    # There is one form of the call: what is not given is zeros.
    b = jnp.zeros((len(a), size), a.dtype) if b is None else b
    y0 = jnp.zeros(size, a.dtype) if y0 is None else y0
    dtype = jnp.result_type(a, b, y0)
    how = pattern, bool(transposed), batch
    return _affine_scan(how, a.astype(dtype), b.astype(dtype), y0.astype(dtype))


Array = NDArray[Any]
# How a call is made: the pattern, whether matrices are transposed, the batch axis of the states.
_How = tuple[Pattern | None, bool, tuple[int, ...]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _affine_scan(how: _How, a: Any, b: Any, y0: Any) -> Any:
    _, _, batch = how
    states = jax.ShapeDtypeStruct((len(a), *batch, y0.shape[-1]), a.dtype)
    return jax.pure_callback(
        partial(_states, how, (a.ndim, b.ndim, y0.ndim)),
        *(states, a, b, y0),
        vmap_method="expand_dims",
    )


def _forward(how: _How, a: Any, b: Any, y0: Any) -> tuple[Any, Any]:
    y = _affine_scan(how, a, b, y0)
    return y, (a, y0, y, b.ndim)


def _backward(how: _How, kept: Any, loss: Any) -> tuple[Any, Any, Any]:
    a, y0, y, b_ndim = kept
    in_a, in_b, in_y0 = _gradients(how, a, y0, y, loss)
    # An argument that samples share has the sum of their gradients.
    in_b = in_b.sum(1) if b_ndim < in_b.ndim else in_b
    return in_a, in_b, in_y0.sum(0) if y0.ndim < in_y0.ndim else in_y0


_affine_scan.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(how: _How, a: Any, y0: Any, y: Any, loss: Any) -> Any:
    """Return the gradients in matrices, and in offsets and initial state of every sample."""
    shapes = [jax.ShapeDtypeStruct(shape, a.dtype) for shape in (a.shape, y.shape, y.shape[1:])]
    return jax.pure_callback(
        partial(_all_gradients, how, (a.ndim, y0.ndim, y.ndim, loss.ndim)),
        *(tuple(shapes), a, y0, y, loss),
        vmap_method="expand_dims",
    )


def _forward_of_gradients(how: _How, *given: Any) -> tuple[Any, Any]:
    return _gradients(how, *given), given


def _backward_of_gradients(how: _How, given: Any, loss: Any) -> Any:
    return jax.vjp(partial(_differentiable_gradients, how), *given)[1](loss)


_gradients.defvjp(_forward_of_gradients, _backward_of_gradients)


def _differentiable_gradients(how: _How, a: Any, y0: Any, y: Any, loss: Any) -> Any:
    """Return the gradients by functions that have derivatives."""
    pattern, transposed, batch = how
    if not len(a):
        return a, loss, jnp.zeros(y.shape[1:], a.dtype)
    later = jnp.concatenate([loss[:-1][::-1], jnp.zeros_like(loss[:1])])
    back = _affine_scan((pattern, not transposed, batch), a[::-1], later, loss[-1])
    in_b = jnp.concatenate([back[:-1][::-1], loss[-1:]])
    before = jnp.concatenate([jnp.broadcast_to(y0, y.shape[1:])[None], y[:-1]])
    left, right = (before, in_b) if transposed else (in_b, before)
    if pattern is None:
        in_a = left[..., :, None] * right[..., None, :]
    else:
        in_a = left[..., rows_of(pattern)] * right[..., pattern.indices]
    return in_a.sum(1) if in_a.ndim > a.ndim else in_a, in_b, back[-1]


# -- On the host -----------------------------------------------------------------------------------


def _states(how: _How, dims: tuple[int, ...], *given: Any) -> Any:
    pattern, transposed, batch = how
    a, b, y0 = (np.asarray(each) for each in given)
    fold = _Fold(batch, (a, b, y0), dims)
    tail = 2 if pattern is None else 1
    a, b, y0 = fold.folded(a, 1, tail), fold.folded(b, 1, 1), fold.folded(y0, 0, 1)
    y = affine.affine_scan(a, b, y0, pattern=pattern, transposed=transposed)
    return fold.unfolded(y, 1, 1)


def _all_gradients(how: _How, dims: tuple[int, ...], *given: Any) -> Any:
    pattern, transposed, batch = how
    a, y0, y, loss = (np.asarray(each) for each in given)
    fold = _Fold(batch, (a, y0, y, loss), dims)
    tail = 2 if pattern is None else 1
    has_batch = dims[0] == 2 + tail
    a = fold.folded(a, 1, tail, whole=True)
    y0 = fold.folded(y0, 0, 1)
    y, loss = (fold.folded(each, 1, 1, whole=True) for each in (y, loss))
    grads = affine.affine_scan_vjp(a, y0, y, loss, pattern=pattern, transposed=transposed)
    assert grads.matrices is not None
    in_a = fold.unfolded(grads.matrices, 1, tail)
    if fold.is_mapped and batch and not has_batch:
        in_a = in_a.sum(-1 - tail)
    return in_a, fold.unfolded(grads.offsets, 1, 1), fold.unfolded(grads.initial, 0, 1)


class _Fold:
    """How arrays to which ``vmap`` has given leading axes become some whose samples are a batch.

    Parameters
    ----------
    batch : tuple of int
        The batch axis that a call has of its own, if any.
    arrays : sequence of ndarray
        Arrays with leading axes, of the lengths of the maps or of length 1.
    dims : sequence of int
        How many axes each has of its own.

    Attributes
    ----------
    is_mapped : bool
        Whether there is any leading axis.
    """

    def __init__(
        self, batch: tuple[int, ...], arrays: Sequence[Array], dims: Sequence[int]
    ) -> None:
        leads = [array.shape[: array.ndim - dim] for array, dim in zip(arrays, dims, strict=True)]
        self._lead = np.broadcast_shapes(*leads)
        self._batch = batch
        self.is_mapped = bool(self._lead)

    def folded(self, array: Array, steps: int, tail: int, *, whole: bool = False) -> Array:
        """Return one for the kernels: `steps` axes, maybe the samples, and the last `tail` axes.

        An array that all samples share stays as it is, unless it is asked for `whole`.
        """
        lead = len(self._lead)
        has_batch = array.ndim == lead + steps + 1 + tail
        if not lead or (not has_batch and not whole and set(array.shape[:lead]) <= {1}):
            return array.reshape(array.shape[lead:])
        if not has_batch:
            array = np.expand_dims(array, lead + steps)
        own, last = array.shape[lead : lead + steps], array.shape[-tail:]
        batch = self._batch or (1,)
        array = np.broadcast_to(array, (*self._lead, *own, *batch, *last))
        array = np.moveaxis(array, range(lead), range(steps, steps + lead))
        return array.reshape(*own, math.prod(self._lead) * batch[0], *last)

    def unfolded(self, array: Array, steps: int, tail: int) -> Array:
        """Return a result of the kernels with the leading axes."""
        if not self._lead:
            return array
        own, last = array.shape[:steps], array.shape[-tail:]
        array = array.reshape(*own, *self._lead, *self._batch, *last)
        lead = len(self._lead)
        return np.moveaxis(array, range(steps, steps + lead), range(lead))

"""Linear recurrences for JAX, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..checks import check_flag
from ..execution.recurrence import Recorded, record_gradients, record_states
from ..ops.readings import read_shapes
from ..symbolic.pattern import Pattern, rows_of
from .ffi.calls import NUMBERS, as_arrays, check_platform, together, vary, varying
from .ffi.programs import replay


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
    order, in reverse mode) and ``jax.vmap``, whose mapped axis becomes samples of a batch. It takes
    the place of a ``jax.lax.scan`` over matrix-vector products.

    Parameters
    ----------
    matrices : array_like
        The matrices ``A_1, …, A_T``: dense, ``(T, size, size)`` or ``(T, batch, size, size)``;
        diagonals, ``(T, size)`` or ``(T, batch, size)``; a number for each step, ``(T,)``; values
        in the order of `pattern`, ``(T, nnz)`` or ``(T, batch, nnz)``; or one of these for all
        steps, without the first axis or with one of length one. Samples share matrices without a
        batch axis.
    offsets : array_like, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : array_like, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if their values are given; or, where shapes leave two readings,
        ``Pattern.diagonal(size)`` for diagonals and ``Pattern.dense((size, size))`` for dense ones.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``.

    Returns
    -------
    jax.Array, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``.

    Raises
    ------
    InputError
        If a shape or a size is wrong, or if shapes leave two readings, when it is traced.
    InputTypeError
        If a type is not supported.
    DeviceError
        If JAX computes elsewhere than on the CPU.

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
    size, pattern = reading.size, reading.pattern(pattern)
    a = jnp.broadcast_to(a.reshape(reading.axes), reading.shape)
    # There is one form of the call: what is not given is zeros, and values have a pattern.
    b = jnp.zeros((reading.steps, size), a.dtype) if b is None else b
    y0 = jnp.zeros(size, a.dtype) if y0 is None else y0
    if reading.kind == "dense":
        a = a.reshape(*a.shape[:-2], pattern.nnz)
    return _functions(pattern, transposed).states(*together((a, b, y0)))


class _Functions(NamedTuple):
    """Functions of JAX for matrices of a pattern; all have derivatives, and map samples as batches.

    Attributes
    ----------
    states : callable
        Returns the states, for values, offsets and an initial state.
    gradients : callable
        Returns the gradients in values, and in offsets and initial state of every sample, for
        values, initial state, states and gradients in these.
    """

    states: Any
    gradients: Any


@functools.lru_cache(maxsize=256)
def _functions(pattern: Pattern, transposed: bool) -> _Functions:
    """Return the functions for a pattern."""
    how = pattern, transposed

    @custom_vmap
    def run(a: Any, b: Any, y0: Any) -> Any:
        return _run_states(how, a, b, y0)

    @run.def_vmap
    def _(count: int, mapped: Any, a: Any, b: Any, y0: Any) -> Any:
        fold = _Fold(count, (a, b, y0), mapped, (2, 2, 1))
        given = fold.folded(0), fold.folded(1), fold.folded(2)
        return fold.unfolded(run(*given), 1), True

    @custom_vmap
    def run_back(a: Any, y0: Any, y: Any, loss: Any) -> Any:
        return _run_gradients(how, a, y0, y, loss)

    @run_back.def_vmap
    def _(count: int, mapped: Any, a: Any, y0: Any, y: Any, loss: Any) -> Any:
        if a.ndim == 2 and not mapped[0]:
            # Samples of all maps share the matrices, but each map has its own sum over samples.
            vectors = jax.vmap(run_vectors, (None, _axis(mapped[3])), axis_size=count)
            in_b, in_y0 = vectors(a, loss)
            axes = 0, _axis(mapped[1]), _axis(mapped[2])
            in_matrices = functools.partial(_in_matrices, how, a)
            in_a = jax.vmap(in_matrices, axes)(in_b, y0, y)
            return (in_a, in_b, in_y0), (True, True, True)
        fold = _Fold(count, (a, y0, y, loss), mapped, (2, 1, 2, 2))
        whole = [fold.folded(k, whole=True) for k in range(4)]
        in_a, in_b, in_y0 = run_back(*whole)
        in_a = fold.unfolded(in_a, 1)
        has_batch = a.ndim - mapped[0] == 3
        in_a = in_a if has_batch or fold.batch is None else in_a.sum(2)
        return (in_a, fold.unfolded(in_b, 1), fold.unfolded(in_y0, 0)), (True, True, True)

    @custom_vmap
    def run_vectors(a: Any, loss: Any) -> Any:
        """Return the gradients in offsets and initial state alone."""
        return _run_gradients(how, a, None, None, loss)

    @run_vectors.def_vmap
    def _(count: int, mapped: Any, a: Any, loss: Any) -> Any:
        fold = _Fold(count, (a, loss), mapped, (2, 2))
        in_b, in_y0 = run_vectors(fold.folded(0), fold.folded(1, whole=True))
        return (fold.unfolded(in_b, 1), fold.unfolded(in_y0, 0)), (True, True)

    @jax.custom_vjp
    def states(a: Any, b: Any, y0: Any) -> Any:
        return run(a, b, y0)

    def states_forward(a: Any, b: Any, y0: Any) -> Any:
        y = states(a, b, y0)
        return y, (a, y0, y, b)

    def states_backward(kept: Any, loss: Any) -> Any:
        a, y0, y, b = kept
        in_a, in_b, in_y0 = gradients(a, y0, y, loss)
        # An argument that samples share has the sum of their gradients.
        in_b = in_b.sum(1) if b.ndim < in_b.ndim else in_b
        return in_a, in_b, in_y0.sum(0) if y0.ndim < in_y0.ndim else in_y0

    states.defvjp(states_forward, states_backward)

    @jax.custom_vjp
    def gradients(a: Any, y0: Any, y: Any, loss: Any) -> Any:
        return run_back(a, y0, y, loss)

    def gradients_forward(*given: Any) -> Any:
        return gradients(*given), given

    def gradients_backward(given: Any, above: Any) -> Any:
        return jax.vjp(functools.partial(_differentiable_gradients, how), *given)[1](above)

    gradients.defvjp(gradients_forward, gradients_backward)
    return _Functions(states, gradients)


# The pattern, and whether a step applies transposed matrices.
_How = tuple[Pattern, bool]


def _differentiable_gradients(how: _How, a: Any, y0: Any, y: Any, loss: Any) -> Any:
    """Return the gradients by functions that have derivatives."""
    pattern, transposed = how
    if not len(loss):
        return jnp.zeros_like(a), loss, jnp.zeros_like(y, shape=y.shape[1:])
    later = jnp.concatenate([loss[:-1][::-1], jnp.zeros_like(loss[:1])])
    back = _functions(pattern, not transposed).states(a[::-1], later, loss[-1])
    in_b = jnp.concatenate([back[:-1][::-1], loss[-1:]])
    return _in_matrices(how, a, in_b, y0, y), in_b, back[-1]


def _in_matrices(how: _How, a: Any, in_b: Any, y0: Any, y: Any) -> Any:
    """Return the gradients in values, summed over samples, and steps, that share them."""
    products = _products(how, a.ndim == 2, in_b, y0, y)
    return products.sum(0, keepdims=True) if len(a) == 1 else products


def _products(how: _How, is_shared: bool, in_b: Any, y0: Any, y: Any) -> Any:
    """Return the gradients in values of every step."""
    pattern, transposed = how
    before = jnp.concatenate([jnp.broadcast_to(y0, y.shape[1:])[None], y[:-1]])
    left, right = (before, in_b) if transposed else (in_b, before)
    adds = is_shared and y.ndim == 3
    if pattern.kind == "dense":
        products = jnp.einsum(
            "tbi,tbj->tij" if adds else "...i,...j->...ij", left, right, precision="highest"
        )
        return products.reshape(*products.shape[:-2], pattern.nnz)
    if pattern.kind == "general":
        left, right = left[..., rows_of(pattern)], right[..., pattern.indices]
    return (left * right).sum(1) if adds else left * right


class _Fold:
    """How arrays to which ``vmap`` has given a leading axis become some whose samples are a batch.

    Parameters
    ----------
    count : int
        How many maps there are.
    arrays, mapped : sequence
        The arrays, and which of them have the leading axis.
    dims : sequence of int
        How many axes each has without that one and samples.

    Attributes
    ----------
    batch : int or None
        How many samples there are without maps, if any array has an axis of them.
    """

    def __init__(
        self, count: int, arrays: Sequence[Any], mapped: Sequence[bool], dims: Sequence[int]
    ) -> None:
        self._count, self._arrays, self._mapped = count, arrays, mapped
        self._axes = [dim - 1 for dim in dims]  # before which axis of its own samples are
        each = zip(arrays, mapped, dims, strict=True)
        self._has_batch = [array.ndim - flag > dim for array, flag, dim in each]
        batches = zip(arrays, self._has_batch, strict=True)
        self.batch = next((array.shape[-2] for array, flag in batches if flag), None)

    def folded(self, k: int, *, whole: bool = False) -> Any:
        """Return an array with one axis of samples; `whole` even if all of them share it."""
        array, axis = self._arrays[k], self._axes[k]
        if not self._mapped[k]:
            if not whole and not self._has_batch[k]:
                return array
            array = jnp.broadcast_to(array, (self._count, *array.shape))
        array = jnp.moveaxis(array, 0, axis)
        if self.batch is None:
            return array
        if not self._has_batch[k]:
            array = jnp.repeat(array[..., None, :], self.batch, axis=-2)
        return array.reshape(*array.shape[:axis], self._count * self.batch, array.shape[-1])

    def unfolded(self, array: Any, axis: int) -> Any:
        """Return a result with the leading axis, whose samples are at an axis."""
        own = (self._count,) if self.batch is None else (self._count, self.batch)
        return jnp.moveaxis(array.reshape(*array.shape[:axis], *own, array.shape[-1]), axis, 0)


def _axis(is_mapped: bool) -> int | None:
    return 0 if is_mapped else None


# -- Programs --------------------------------------------------------------------------------------


def _run_states(how: _How, a: Any, b: Any, y0: Any) -> Any:
    """Return the states of all steps and samples."""
    shapes = a.shape, b.shape, y0.shape
    batch = max((a.shape[1:-1], b.shape[1:-1], y0.shape[:-1]), key=len)
    states = len(b), *batch, y0.shape[-1]
    return _results(record_states, how, shapes, [a, b, y0], [states])[0]


def _run_gradients(how: _How, a: Any, y0: Any, y: Any, loss: Any) -> Any:
    """Return the gradients in values, unless states are None, in offsets and initial state."""
    shapes = a.shape, loss.shape, None if y0 is None else y0.shape
    given = [a, loss] if y0 is None else [a, loss, y0, y]
    results = [] if y0 is None else [a.shape]
    return _results(_record_gradients, how, shapes, given, [*results, loss.shape, loss.shape[1:]])


def _record_gradients(*about: Any) -> Recorded:
    # JAX's gradients in complex numbers are no conjugates.
    return record_gradients(*about, conjugated=False)


def _results(
    record: Any, how: _How, shapes: Any, given: list[Any], results: list[tuple[int, ...]]
) -> tuple[Any, ...]:
    """Return the results of a recording."""
    dtype = given[0].dtype
    if 0 in results[-1] or 0 in given[1].shape:  # no kernel runs
        return tuple(vary([jnp.zeros(shape, dtype) for shape in results], varying(given)))
    return tuple(replay(record, (*how, *shapes, dtype.name), given))

"""Linear recurrences in the order of time, and what the gradients in them take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .api import inclusive_scan
from .arrays.arrays import contiguous, namespace, output, read_array
from .arrays.streams import place
from .chains.containers import CSRChain
from .errors import Allocating, InputError, InputTypeError, short
from .execution.calls import Calls
from .execution.recurrence import Matrices, write_outer_products, write_states
from .execution.threads import thread_count
from .symbolic.pattern import Pattern, indptr_of, rows_of, trusted
from .symbolic.schedule import Schedule, check_flag, read_schedule

__all__ = ["AffineGrads", "affine_scan", "affine_scan_vjp", "check_shapes"]

Array = NDArray[Any]
Shape = tuple[int, ...]

# Entries of the matrices of a step from which the rows of one sample are worth sharing out.
_LARGE = 1 << 17


class AffineGrads(NamedTuple):
    """Gradients in what :func:`affine_scan` has been given.

    Attributes
    ----------
    matrices : ndarray or None
        In the form of `matrices`: ``(T, …)``, with a batch axis if those have one, else summed over
        the samples. None if they were not asked for.
    offsets : ndarray, shape (T, size) or (T, batch, size)
        In ``b_1, …, b_T``; of the shape of the states.
    initial : ndarray, shape (size,) or (batch, size)
        In ``y_0``; of the shape of a state.
    """

    matrices: Array | None
    offsets: Array
    initial: Array


def affine_scan(
    matrices: Any,
    offsets: ArrayLike | None = None,
    initial: ArrayLike | None = None,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
    schedule: Schedule | str = "auto",
) -> Array:
    """Return the states of a linear recurrence in the order of time.

        y_t = A_t y_{t-1} + b_t,        t = 1, …, T

    Parameters
    ----------
    matrices : array_like or CSRChain
        The matrices ``A_1, …, A_T``, all square and of one pattern: dense, ``(T, size, size)`` or
        ``(T, batch, size, size)``; or their values in the order of `pattern`, ``(T, nnz)`` or
        ``(T, batch, nnz)``; or both in a :class:`CSRChain`, which here is in the order of time.
        Samples share matrices without a batch axis. Any strides will do: steps that share a matrix
        come as ``np.broadcast_to(A, (T, size, size))``. All arrays may be CuPy's, as the result
        then is.
    offsets : array_like, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : array_like, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if their values are given: ``Pattern.diagonal(size)`` for
        diagonals.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``, which takes no copy in host memory.
    schedule : Schedule or str, default "auto"
        As for :func:`exclusive_scan`. ``"auto"`` goes from step to step, and shares out samples, or
        elements of diagonals, and rows of one large state; that is the least work. Any other but
        ``"linear"`` multiplies matrices, to do steps at once: for more cores than there are
        samples, if products stay sparse.

    Returns
    -------
    ndarray, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``, in the dtype that all input promotes to.

    Raises
    ------
    InputError
        If a shape, a size or an option is wrong.
    InputTypeError
        If a type or a dtype is not supported.
    DeviceError
        If arrays are not in one place.

    See Also
    --------
    affine_scan_vjp : The gradients in all that enters.
    inclusive_scan : The same for steps of different patterns or sizes.

    Notes
    -----
    This is the inclusive scan of ``[y_0, A_1, …, A_T]``, with the offsets as local gradients. By a
    schedule that is named the bits do not depend on the number of threads; nor do those of
    ``"auto"``, but for rows of a large state that are shared out. On a CUDA device it is
    :func:`inclusive_scan` that runs, by any schedule, on the current stream.

    Examples
    --------
    A leaky sum, and two coupled ones:

    >>> import numpy as np, sparsescan
    >>> decay = sparsescan.Pattern.diagonal(1)
    >>> sparsescan.affine_scan(np.full((4, 1), 0.5), np.ones((4, 1)), pattern=decay)
    array([[1.   ],
           [1.5  ],
           [1.75 ],
           [1.875]])
    >>> turn = np.broadcast_to([[0.0, -1.0], [1.0, 0.0]], (3, 2, 2))
    >>> sparsescan.affine_scan(turn, initial=[1.0, 0.0])
    array([[ 0.,  1.],
           [-1.,  0.],
           [ 0., -1.]])
    """
    given = _Given.read(matrices, pattern, transposed).matrices
    steps, size = given.steps, given.size
    b = None if offsets is None else _read_vectors("offsets", offsets, steps, size)
    y0 = None if initial is None else _read_vectors("initial", initial, None, size)
    xp = namespace(given.values, b, y0)
    batch = _batch_of(
        matrices=given.batch,
        offsets=() if b is None else b.shape[1:-1],
        initial=() if y0 is None else y0.shape[:-1],
    )
    chosen = read_schedule(schedule, steps)
    dtype = np.result_type(*(each.dtype for each in (given.values, b, y0) if each is not None))
    with place("matrices", given.values, None, None), Allocating("the scan"):
        states: Array = output(xp, None, (steps, *batch, size), dtype, what="the states")
        begin = xp.zeros(size, dtype) if y0 is None else _converted(y0, dtype)
        added = None if b is None else _converted(b, dtype)
        _recur(_in_dtype(given, dtype), added, begin, states, chosen)
    return states


def affine_scan_vjp(
    matrices: Any,
    initial: ArrayLike | None,
    states: ArrayLike,
    grads: ArrayLike,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
    schedule: Schedule | str = "auto",
    needs_matrices_grad: bool = True,
) -> AffineGrads:
    """Return the gradients in matrices, offsets and initial state of :func:`affine_scan`.

    With the gradients ``l_t`` of a loss in the states ``y_t``, where the loss reads them, those in
    the offsets are the same scan in the other direction, and those in the matrices outer products:

        g_t = l_t + A_{t+1}ᵀ g_{t+1},    ∂A_t = g_t y_{t-1}ᵀ,    ∂b_t = g_t,    ∂y_0 = A_1ᵀ g_1

    of which only the entries in the pattern are computed. A step that applies ``A_tᵀ`` has ``A_t``
    in place of ``A_tᵀ``, and ``∂A_t = y_{t-1} g_tᵀ``.

    Parameters
    ----------
    matrices, initial, pattern, transposed, schedule
        As :func:`affine_scan` was given.
    states : array_like, shape (T, size) or (T, batch, size)
        The states that it has returned.
    grads : array_like, shape (T, size) or (T, batch, size)
        The gradients ``l_1, …, l_T`` of the loss in the states.
    needs_matrices_grad : bool, default True
        Whether to return the gradients in the matrices, too.

    Returns
    -------
    AffineGrads
        The gradients in `matrices`, `offsets` and `initial`.

    Raises
    ------
    InputError, InputTypeError, DeviceError
        As :func:`affine_scan`.

    Examples
    --------
    >>> import numpy as np, sparsescan
    >>> a, b = np.full((3, 1, 1), 0.5), np.ones((3, 1))
    >>> y = sparsescan.affine_scan(a, b)
    >>> loss_grads = np.array([[0.0], [0.0], [1.0]])  # of a loss that is the last state
    >>> grads = sparsescan.affine_scan_vjp(a, None, y, loss_grads)
    >>> grads.matrices.ravel(), grads.offsets.ravel(), grads.initial
    (array([0. , 0.5, 1.5]), array([0.25, 0.5 , 1.  ]), array([0.125]))
    """
    form = _Given.read(matrices, pattern, transposed)
    given = form.matrices
    steps, size = given.steps, given.size
    y = _read_vectors("states", states, steps, size)
    loss = _read_vectors("grads", grads, steps, size)
    y0 = None if initial is None else _read_vectors("initial", initial, None, size)
    xp = namespace(given.values, y, loss, y0)
    batch = _batch_of(
        matrices=given.batch,
        initial=() if y0 is None else y0.shape[:-1],
        states=y.shape[1:-1],
        grads=loss.shape[1:-1],
    )
    for name, array in (("states", y), ("grads", loss)):
        if array.shape != (steps, *batch, size):
            raise InputError(
                f"{name} has shape {array.shape}; expected {(steps, *batch, size)}, a state for "
                "each step and sample"
            )
    chosen = read_schedule(schedule, steps)
    read = (given.values, y, loss, y0)
    dtype = np.result_type(*(each.dtype for each in read if each is not None))
    with place("matrices", given.values, None, None), Allocating("the gradients"):
        given, y, loss = _in_dtype(given, dtype), _converted(y, dtype), _converted(loss, dtype)
        begin = xp.zeros(size, dtype) if y0 is None else _converted(y0, dtype)
        in_offsets = output(xp, None, loss.shape, dtype, what="the gradients")
        in_initial = xp.zeros((1, *batch, size), dtype)
        if steps:
            in_offsets[-1] = loss[-1]
            back = given.adjoint()
            if chosen is None and xp is np:
                _recur(back.part(0, -1), loss[-2::-1], loss[-1], in_offsets[-2::-1], None)
                _recur(back.part(-1, None), None, in_offsets[0], in_initial, None)
            else:
                # A schedule is for all steps, of which the last one adds nothing.
                later = xp.concatenate([loss[-2::-1], xp.zeros_like(loss[:1])])
                carried = xp.empty_like(loss)
                _recur(back, later, loss[-1], carried, chosen)
                in_offsets[:-1], in_initial[0] = carried[-2::-1], carried[-1]
        in_matrices = _outer(form, given, in_offsets, y, begin) if needs_matrices_grad else None
        return AffineGrads(in_matrices, in_offsets, in_initial[0])


def check_shapes(
    matrices: Shape, offsets: Shape | None, initial: Shape | None, pattern: Pattern | None
) -> tuple[Shape, int]:
    """Return the batch axis, if there is one, and the size of the states; raise for wrong shapes.

    Parameters
    ----------
    matrices, offsets, initial : tuple of int
        The shapes of what :func:`affine_scan` takes; None for what is not given.
    pattern : Pattern or None
        As there.
    """
    size = _check_matrices(matrices, pattern)
    if offsets is not None:
        _check_vectors("offsets", offsets, matrices[0], size)
    if initial is not None:
        _check_vectors("initial", initial, None, size)
    batch = _batch_of(
        matrices=matrices[1 : -2 if pattern is None else -1],
        offsets=(offsets or ())[1:-1],
        initial=(initial or ())[:-1],
    )
    return batch, size


def _check_matrices(shape: Shape, pattern: Any) -> int:
    """Return the size of the states; raise for a wrong shape."""
    if pattern is None:
        if len(shape) not in (3, 4) or shape[-1] != shape[-2]:
            raise InputError(
                f"matrices has shape {shape}; expected (T, size, size) or (T, batch, size, size), "
                "or values and their pattern"
            )
        return shape[-1]
    if not isinstance(pattern, Pattern):
        raise InputTypeError(f"pattern is {short(pattern)}; expected a Pattern")
    if pattern.shape[0] != pattern.shape[1]:
        raise InputError(f"pattern has shape {pattern.shape}; expected a square one")
    if len(shape) not in (2, 3) or shape[-1] != pattern.nnz:
        raise InputError(
            f"matrices has shape {shape}; expected (T, nnz) or (T, batch, nnz) with nnz = "
            f"{pattern.nnz}, as pattern says"
        )
    return pattern.shape[0]


def _check_vectors(name: str, shape: Shape, steps: int | None, size: int) -> None:
    """Raise unless vectors have this size, and there are so many, maybe for each sample."""
    lead = () if steps is None else (steps,)
    depth = len(lead)
    fits = len(shape) in (depth + 1, depth + 2)
    if not fits or (*shape[:depth], shape[-1]) != (*lead, size):
        plain = ", ".join(map(str, (*lead, size))) + ("" if lead else ",")
        with_batch = ", ".join(map(str, (*lead, "batch", size)))
        raise InputError(f"{name} has shape {shape}; expected ({plain}) or ({with_batch})")


def _batch_of(**batches: Shape) -> Shape:
    """Return the one batch axis that some arguments have, or none."""
    known = {name: batch for name, batch in batches.items() if batch}
    for name, (batch,) in known.items():
        first, (expected,) = next(iter(known.items()))
        if batch != expected:
            raise InputError(f"{name} has {batch} samples; expected {expected}, as {first} has")
    return next(iter(known.values()), ())


class _Given(NamedTuple):
    """Matrices in the form of the array that the caller has passed.

    Attributes
    ----------
    matrices : Matrices
        What they are.
    shape : tuple of int
        The shape of the array.
    turned : bool
        Whether these matrices are its transposed ones.
    """

    matrices: Matrices
    shape: tuple[int, ...]
    turned: bool

    @classmethod
    def read(cls, matrices: Any, pattern: Pattern | None, transposed: bool) -> _Given:
        """Return what the caller has given, checked; a view wherever one can be."""
        transposed = check_flag("transposed", transposed)
        if isinstance(matrices, CSRChain):
            if pattern is not None:
                raise InputError("pattern is given for a CSRChain, which has one; expected None")
            pattern, matrices = matrices.pattern, matrices.read()
        array = read_array("matrices", matrices)
        size = _check_matrices(array.shape, pattern)
        if pattern is not None:
            return cls(Matrices(pattern, _walkable(array), transposed), array.shape, False)
        # Matrices stored column by column are transposed ones, stored row by row.
        turned = array.strides[-2] < array.strides[-1]
        rows = array.swapaxes(-1, -2) if turned else array
        values = _walkable(rows.reshape(*array.shape[:-2], size * size))
        pattern = Pattern.dense((size, size))
        return cls(Matrices(pattern, values, transposed != turned), array.shape, turned)

    def as_given(self, values: Array) -> Array:
        """Return values of this pattern in the form that the caller has given."""
        if self.turned:
            return values.reshape(self.shape).swapaxes(-1, -2)
        return values.reshape(self.shape)


def _read_vectors(name: str, given: ArrayLike, steps: int | None, size: int) -> Array:
    """Return vectors, of every step or of none."""
    array = read_array(name, given)
    _check_vectors(name, array.shape, steps, size)
    return _walkable(array)


def _walkable(array: Array) -> Array:
    """Return an array whose last axis is contiguous and aligned: a copy if it has to be."""
    is_on_host = namespace(array) is np
    aligned = not is_on_host or array.flags.aligned  # on a device all are
    if aligned and (array.shape[-1] <= 1 or array.strides[-1] == array.itemsize):
        return array
    copy: Array = np.array(array, order="C") if is_on_host else contiguous(array, array.dtype)
    return copy


def _in_dtype(matrices: Matrices, dtype: np.dtype[Any]) -> Matrices:
    return matrices._replace(values=_converted(matrices.values, dtype))


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    return array if array.dtype == dtype else array.astype(dtype)


def _recur(
    given: Matrices,
    offsets: Array | None,
    start: Array,
    out: Array,
    schedule: Schedule | None,
) -> None:
    """Write all states, from step to step unless a schedule says otherwise."""
    if out.size == 0:
        return
    if namespace(out) is not np:
        _recur_by_plan(given, offsets, start, out, schedule)
        return
    samples = out.shape[1] if out.ndim == 3 else 1
    is_large = given.pattern.kind != "diagonal" and given.pattern.nnz >= _LARGE
    few = samples < thread_count() and is_large
    if few if schedule is None else schedule != Schedule.linear(given.steps):
        _recur_by_plan(given, offsets, start, out, schedule)
        return
    write_states(Calls(), given, offsets, start, out)


def _recur_by_plan(
    given: Matrices, offsets: Array | None, start: Array, out: Array, schedule: Schedule | None
) -> None:
    """Write all states by the scan of a plan, which takes matrices that are not transposed."""
    pattern, values, xp = given.pattern, given.values, namespace(out)
    if given.transposed and pattern.kind != "diagonal":
        pattern, order = _transposed(pattern)
        values = values.take(xp.asarray(order), axis=-1)
    added = None
    if offsets is not None:
        added = xp.zeros((given.steps + 1, *out.shape[1:]), out.dtype)
        added[1:] = offsets if offsets.ndim == out.ndim else offsets[:, None]
    begin = xp.broadcast_to(start, out.shape[1:])
    chain = CSRChain.from_pattern(values, pattern)
    states = inclusive_scan(
        begin, chain, local_grads=added, schedule="auto" if schedule is None else schedule
    )
    out[...] = states[1:]


def _transposed(pattern: Pattern) -> tuple[Pattern, Array]:
    """Return the pattern of the transpose, and where its values are among those of the matrix."""
    order = np.lexsort((rows_of(pattern), pattern.indices))
    indptr = indptr_of(pattern.indices, pattern.shape[1])
    return trusted(indptr, rows_of(pattern)[order], pattern.shape[::-1]), order


def _outer(form: _Given, matrices: Matrices, grads: Array, states: Array, start: Array) -> Array:
    """Return the gradients in the matrices, in the form of the caller's."""
    if namespace(grads) is not np:
        return form.as_given(_outer_on_device(matrices, grads, states, start))
    shape = matrices.values.shape
    out = output(np, None, shape, grads.dtype, what="the gradients in the matrices")
    if not grads.size:
        out[...] = 0
    write_outer_products(Calls(), matrices, grads, states, start, out)
    return form.as_given(out)


def _outer_on_device(given: Matrices, grads: Array, states: Array, start: Array) -> Array:
    """Return the gradients in the matrices, in the order of their pattern."""
    xp, pattern = namespace(grads), given.pattern
    before = xp.concatenate([xp.broadcast_to(start, states.shape[1:])[None], states[:-1]])
    before = before[: given.steps]  # none if there are no steps
    left, right = (before, grads) if given.transposed else (grads, before)
    is_shared = grads.ndim == 3 > given.values.ndim
    in_matrices: Array
    if pattern.kind == "dense" and is_shared:
        in_matrices = xp.matmul(left.swapaxes(1, 2), right)
    elif pattern.kind == "dense":
        in_matrices = left[..., :, None] * right[..., None, :]
    else:
        if pattern.kind == "general":
            left = left.take(xp.asarray(rows_of(pattern)), axis=-1)
            right = right.take(xp.asarray(pattern.indices), axis=-1)
        products = left * right
        in_matrices = products.sum(axis=1) if is_shared else products
    return in_matrices

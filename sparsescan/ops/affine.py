"""Linear recurrences in the order of time, and their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..api import inclusive_scan
from ..arrays.arrays import beside, contiguous, namespace, output, read_array
from ..arrays.streams import place
from ..chains.containers import CSRChain
from ..chains.sparse_steps import SparseSteps, is_sparse_steps
from ..checks import check_flag
from ..errors import Allocating, InputError, InputTypeError
from ..execution.calls import Calls
from ..execution.recurrence import Matrices, write_outer_products, write_states
from ..execution.threads import thread_count
from ..symbolic.pattern import Pattern, indptr_of, rows_of, trusted
from ..symbolic.schedule import Schedule, read_schedule
from .readings import Reading, check_vectors, one_batch, read_shapes

Array = NDArray[Any]

# From this many matrix entries on, threads share the rows of one sample.
_LARGE = 1 << 17


class AffineGrads(NamedTuple):
    """Gradients in the arguments of :func:`sparsescan.affine_scan`.

    Attributes
    ----------
    matrices : ndarray, CSR matrix, list of CSR matrices, or None
        The gradients in `matrices`, in their form, summed over the steps and samples that share
        them. None if they were not asked for.
    offsets : ndarray, shape (T, size) or (T, batch, size)
        The gradients in ``b_1, …, b_T``, in the shape of the states.
    initial : ndarray, shape (size,) or (batch, size)
        The gradient in ``y_0``, in the shape of a state.
    """

    matrices: Any
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
    matrices : array_like, CSRChain, CSR matrix or list of CSR matrices
        The matrices ``A_1, …, A_T``, all square and of one size, in one of these forms:

        - dense, ``(T, size, size)`` or ``(T, batch, size, size)``;
        - diagonals, ``(T, size)`` or ``(T, batch, size)``;
        - a number for each step, ``(T,)``, ``(T, 1)`` or ``(T, batch, 1)``;
        - one for all steps, whose number is that of the offsets: a matrix ``(size, size)``, a
          diagonal ``(size,)``, a number, or any other form with a first axis of length one;
        - sparse: a list of SciPy CSR matrices, or one matrix for all steps; values in the order of
          `pattern`, ``(T, nnz)``, ``(T, batch, nnz)`` or ``(nnz,)``; or a :class:`CSRChain`, here
          in the order of time.

        Samples share matrices without a batch axis. Arrays may have any strides. If all arrays are
        CuPy's, so is the result.
    offsets : array_like, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : array_like, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if `matrices` are values. If shapes are ambiguous, pass
        ``Pattern.diagonal(size)`` for diagonals or ``Pattern.dense((size, size))`` for dense
        matrices.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``. It needs no copy in host memory.
    schedule : Schedule or str, default "auto"
        As for :func:`exclusive_scan`. ``"auto"`` runs step by step, which is the least work, and
        divides samples, elements of diagonals, or rows of one large state among threads. All other
        schedules except ``"linear"`` multiply matrices to run several steps at once. They help if
        there are more cores than samples and products stay sparse.

    Returns
    -------
    ndarray, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``, in the dtype that all input promotes to: float32, float64, or in
        host memory complex64 or complex128.

    Raises
    ------
    InputError
        If a shape, a size or an option is wrong, or if shapes are ambiguous: ``(n, n, n)`` with
        samples, ``(n, n)`` and ``(n,)`` for `n` steps.
    InputTypeError
        If a type or a dtype is not supported. Complex numbers support only the schedules ``"auto"``
        and ``"linear"``.
    DeviceError
        If arrays are not all on one device.

    See Also
    --------
    affine_scan_vjp : The gradients in all arguments.
    inclusive_scan : The scan for steps of different patterns or sizes.

    Notes
    -----
    This is the inclusive scan of ``[y_0, A_1, …, A_T]``, with the offsets as local gradients. With
    a named schedule the bits do not depend on the number of threads. With ``"auto"`` they depend on
    it only if threads divide the rows of a large state. On a CUDA device :func:`inclusive_scan`
    runs, with any schedule, on the current stream.

    Examples
    --------
    A leaky sum, and a rotation of two coupled numbers:

    >>> import numpy as np, sparsescan
    >>> sparsescan.affine_scan(0.5, np.ones((4, 1)))
    array([[1.   ],
           [1.5  ],
           [1.75 ],
           [1.875]])
    >>> turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    >>> sparsescan.affine_scan(turn, np.zeros((3, 2)), [1.0, 0.0])
    array([[ 0.,  1.],
           [-1.,  0.],
           [ 0., -1.]])
    """
    b = None if offsets is None else _read_vectors("offsets", offsets)
    y0 = None if initial is None else _read_vectors("initial", initial)
    form = _Given.read(matrices, pattern, transposed, b, y0)
    # Checked first: a broadcast view may be too large to copy.
    b, y0 = _walkable(b), _walkable(y0)
    given, steps = form.matrices, form.matrices.steps
    xp = namespace(given.values, b, y0)
    chosen = read_schedule(schedule, steps)
    dtype = np.result_type(*(each.dtype for each in (given.values, b, y0) if each is not None))
    _check_schedule(chosen, dtype, steps)
    with place("matrices", given.values, None, None), Allocating("the scan"):
        shape = (steps, *form.reading.batch, given.size)
        states: Array = output(xp, None, shape, dtype, what="the states")
        begin = xp.zeros(given.size, dtype) if y0 is None else _converted(y0, dtype)
        added = None if b is None else _converted(b, dtype)
        _recur(_in_dtype(given, dtype), added, begin, states, chosen)
    return states


def affine_scan_vjp(
    matrices: Any,
    *,
    initial: ArrayLike | None = None,
    states: ArrayLike,
    grads: ArrayLike,
    pattern: Pattern | None = None,
    transposed: bool = False,
    schedule: Schedule | str = "auto",
    needs_matrices_grad: bool = True,
) -> AffineGrads:
    """Return the gradients in matrices, offsets and initial state of :func:`affine_scan`.

    Let ``l_t`` be the gradients of a loss in the states ``y_t`` that the loss reads. The gradients
    in the offsets are a scan backward in time, and those in the matrices are outer products:

        g_t = l_t + A_{t+1}ᵀ g_{t+1},    ∂A_t = g_t y_{t-1}ᵀ,    ∂b_t = g_t,    ∂y_0 = A_1ᵀ g_1

    Only entries in the pattern are computed. With `transposed`, ``A_t`` replaces ``A_tᵀ``, and
    ``∂A_t = y_{t-1} g_tᵀ``. The gradient of a matrix that several steps or samples share is a sum.
    Gradients in complex numbers are PyTorch's, ``∂L/∂Re + i ∂L/∂Im``, with conjugates of
    ``A_{t+1}`` and ``y_{t-1}``.

    Parameters
    ----------
    matrices, initial, pattern, transposed, schedule
        As :func:`affine_scan` was given.
    states : array_like, shape (T, size) or (T, batch, size)
        The states that :func:`affine_scan` returned.
    grads : array_like, shape (T, size) or (T, batch, size)
        The gradients ``l_1, …, l_T`` of the loss in the states.
    needs_matrices_grad : bool, default True
        Whether to return the gradients in the matrices too.

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
    >>> grads = sparsescan.affine_scan_vjp(a, states=y, grads=loss_grads)
    >>> grads.matrices.ravel(), grads.offsets.ravel(), grads.initial
    (array([0. , 0.5, 1.5]), array([0.25, 0.5 , 1.  ]), array([0.125]))
    """
    needs_matrices_grad = check_flag("needs_matrices_grad", needs_matrices_grad)
    y, loss = _read_vectors("states", states), _read_vectors("grads", grads)
    y0 = None if initial is None else _read_vectors("initial", initial)
    form = _Given.read(matrices, pattern, transposed, y, y0, "states")
    given, steps, size = form.matrices, form.matrices.steps, form.matrices.size
    check_vectors("grads", loss.shape, (steps,), size)
    y, loss, y0 = _walkable(y), _walkable(loss), _walkable(y0)
    xp = namespace(given.values, y, loss, y0)
    batch = one_batch(matrices=form.reading.batch, grads=loss.shape[1:-1])
    for name, array in (("states", y), ("grads", loss)):
        if array.shape != (steps, *batch, size):
            raise InputError(
                f"{name} has shape {array.shape}; expected {(steps, *batch, size)}, a state for "
                "each step and sample"
            )
    chosen = read_schedule(schedule, steps)
    read = (given.values, y, loss, y0)
    dtype = np.result_type(*(each.dtype for each in read if each is not None))
    _check_schedule(chosen, dtype, steps)
    with place("matrices", given.values, None, None), Allocating("the gradients"):
        given, y, loss = _in_dtype(given, dtype), _converted(y, dtype), _converted(loss, dtype)
        begin = xp.zeros(size, dtype) if y0 is None else _converted(y0, dtype)
        in_offsets = output(xp, None, loss.shape, dtype, what="the gradients")
        in_initial = xp.zeros((1, *batch, size), dtype)
        if steps:
            in_offsets[-1] = loss[-1]
            back = given.adjoint(conjugated=True)
            if chosen is None and xp is np:
                _recur(back.part(0, -1), loss[-2::-1], loss[-1], in_offsets[-2::-1], None)
                _recur(back.part(-1, None), None, in_offsets[0], in_initial, None)
            else:
                # A schedule counts all steps, though the last one adds nothing.
                later = xp.concatenate([loss[-2::-1], xp.zeros_like(loss[:1])])
                carried = xp.empty_like(loss)
                _recur(back, later, loss[-1], carried, chosen)
                in_offsets[:-1], in_initial[0] = carried[-2::-1], carried[-1]
        in_matrices = _outer(form, given, in_offsets, y, begin) if needs_matrices_grad else None
        return AffineGrads(in_matrices, in_offsets, in_initial[0])


def _check_schedule(chosen: Schedule | None, dtype: np.dtype[Any], steps: int) -> None:
    if dtype.kind == "c" and chosen not in (None, Schedule.linear(steps)):
        raise InputTypeError(
            f"schedule is {chosen!r}, for {dtype}; expected 'auto' or 'linear', which complex "
            "numbers have"
        )


class _Given(NamedTuple):
    """Matrices in the form in which the caller passed them.

    Attributes
    ----------
    matrices : Matrices
        What they are.
    reading : Reading
        How their shape was read.
    shape : tuple of int
        The shape of the array, if they are one array.
    turned : bool
        Whether these are the transposes of the caller's matrices.
    sparse : SparseSteps or None
        The caller's sparse matrices, if they are SciPy's.
    """

    matrices: Matrices
    reading: Reading
    shape: tuple[int, ...]
    turned: bool
    sparse: SparseSteps | None

    @classmethod
    def read(
        cls,
        matrices: Any,
        pattern: Pattern | None,
        transposed: bool,
        offsets: Array | None,
        initial: Array | None,
        name: str = "offsets",
    ) -> _Given:
        """Return the caller's matrices, checked, as a view where possible.

        `name` is the name of the offsets in errors.
        """
        transposed, sparse = check_flag("transposed", transposed), None
        if isinstance(matrices, CSRChain) or is_sparse_steps(matrices):
            if pattern is not None:
                kind = "a CSRChain" if isinstance(matrices, CSRChain) else "sparse matrices"
                which = "has" if isinstance(matrices, CSRChain) else "have"
                raise InputError(f"pattern is given for {kind}, which {which} one; expected None")
            if isinstance(matrices, CSRChain):
                pattern, matrices = matrices.pattern, matrices.read()
            else:
                sparse = SparseSteps.read(matrices)
                pattern, matrices = sparse.pattern, sparse.values
        array = read_array("matrices", matrices, is_complex=True)
        added, begin = (None if each is None else each.shape for each in (offsets, initial))
        reading = read_shapes(array.shape, added, begin, pattern, name)
        with beside(array):
            whole = array.reshape(reading.axes)
            if reading.is_number:
                whole = namespace(array).broadcast_to(whole, reading.shape)
        own, steps = reading.pattern(pattern), reading.steps
        if reading.kind != "dense":
            given = Matrices(own, _walkable(whole), transposed, steps)
            return cls(given, reading, array.shape, False, sparse)
        # Column-major matrices are the transposes of row-major ones.
        turned = whole.strides[-2] < whole.strides[-1]
        rows = whole.swapaxes(-1, -2) if turned else whole
        values = _walkable(rows.reshape(*whole.shape[:-2], own.nnz))
        given = Matrices(own, values, transposed != turned, steps)
        return cls(given, reading, array.shape, turned, sparse)

    def as_given(self, values: Array) -> Any:
        """Return values on this pattern in the caller's form."""
        if self.sparse is not None:
            return self.sparse.like(values)
        if self.turned:
            axes = self.reading.axes
            return values.reshape(axes).swapaxes(-1, -2).reshape(self.shape)
        if self.reading.is_number:
            values = values.sum(-1)
        return values.reshape(self.shape)


def _read_vectors(name: str, given: ArrayLike) -> Array:
    """Return vectors, with or without an axis of steps."""
    array: Array = read_array(name, given, is_complex=True)
    return array


@overload
def _walkable(array: Array) -> Array: ...


@overload
def _walkable(array: Array | None) -> Array | None: ...


def _walkable(array: Array | None) -> Array | None:
    """Return an array whose last axis is contiguous and aligned; a copy if necessary."""
    if array is None:
        return None
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
    """Write all states, step by step unless a schedule says otherwise."""
    if out.size == 0:
        return
    if namespace(out) is not np:
        _recur_by_plan(given, offsets, start, out, schedule)
        return
    samples = out.shape[1] if out.ndim == 3 else 1
    is_large = given.pattern.kind != "diagonal" and given.pattern.nnz >= _LARGE
    few = out.dtype.kind != "c" and samples < thread_count() and is_large
    if few if schedule is None else schedule != Schedule.linear(given.steps):
        _recur_by_plan(given, offsets, start, out, schedule)
        return
    write_states(Calls(), given, offsets, start, out)


def _recur_by_plan(
    given: Matrices, offsets: Array | None, start: Array, out: Array, schedule: Schedule | None
) -> None:
    """Write all states by the scan of a plan, which takes matrices that are not transposed."""
    pattern, values, xp = given.pattern, given.values, namespace(out)
    values = xp.broadcast_to(values, (given.steps, *values.shape[1:]))
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
    """Return the pattern of the transpose, and the places of its values in the matrix."""
    order = np.lexsort((rows_of(pattern), pattern.indices))
    indptr = indptr_of(pattern.indices, pattern.shape[1])
    return trusted(indptr, rows_of(pattern)[order], pattern.shape[::-1]), order


def _outer(form: _Given, matrices: Matrices, grads: Array, states: Array, start: Array) -> Any:
    """Return the gradients in the matrices, in the caller's form."""
    if namespace(grads) is not np:
        return form.as_given(_outer_on_device(matrices, grads, states, start))
    shape = matrices.values.shape
    out = output(np, None, shape, grads.dtype, what="the gradients in the matrices")
    if not grads.size:
        out[...] = 0
    write_outer_products(Calls(), matrices, grads, states, start, out, conjugated=True)
    return form.as_given(out)


def _outer_on_device(given: Matrices, grads: Array, states: Array, start: Array) -> Array:
    """Return the gradients in the matrices, in the order of their pattern."""
    xp, pattern = namespace(grads), given.pattern
    before = xp.concatenate([xp.broadcast_to(start, states.shape[1:])[None], states[:-1]])
    before = before[: given.steps]  # none if there are no steps
    left, right = (before, grads) if given.transposed else (grads, before)
    is_shared = grads.ndim == 3 > given.values.ndim
    if given.is_one:
        # Steps become more samples.
        if is_shared or grads.ndim == 2:
            left, right = (each.reshape(1, -1, given.size) for each in (left, right))
        else:
            left, right = (each.swapaxes(0, 1) for each in (left, right))
        is_shared = True
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
    return in_matrices.reshape(*given.values.shape[:-1], pattern.nnz)

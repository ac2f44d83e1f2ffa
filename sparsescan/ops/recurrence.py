"""Linear recurrences ``y_t = A_t y_{t-1} + b_t``: the operation, for values on one pattern.

It takes values of matrices of shape (T or 1, batch or 1, nnz), optional offsets (T, batch or 1,
size) and an optional initial state (batch or 1, size), and returns the states (T, batch, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..execution.calls import Calls
from ..execution.recurrence import Matrices, write_outer_products, write_states
from ..kernels.cpu.copies import add_up_parts, add_up_rows, copy_into
from ..symbolic.pattern import Pattern, rows_of
from .affine import affine_scan, affine_scan_vjp
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, memory
from .readings import Reading

Array = NDArray[Any]
_KINDS = "dense", "diagonal", "sparse"


class Form(NamedTuple):
    """The pattern of the matrices, and whether steps apply transposed ones.

    Attributes
    ----------
    kind : {"dense", "diagonal", "sparse"}
        What the matrices are.
    size : int
        The length of a state.
    transposed : bool
        Whether a step applies the transposed matrix.
    sparse : Pattern or None
        The pattern of sparse matrices.
    """

    kind: str
    size: int
    transposed: bool
    sparse: Pattern | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key for the form, the same in every process."""
        return *self[:3], None if self.sparse is None else self.sparse.key

    @property
    def pattern(self) -> Pattern:
        """Return the pattern of the matrices."""
        if self.sparse is not None:
            return self.sparse
        if self.kind == "diagonal":
            return Pattern.diagonal(self.size)
        return Pattern.dense((self.size, self.size))

    @property
    def nnz(self) -> int:
        """Return how many values a matrix has."""
        if self.sparse is not None:
            return self.sparse.nnz
        return self.size if self.kind == "diagonal" else self.size**2

    @property
    def adjoint(self) -> Form:
        """Return the form of the recurrence of gradients."""
        return self._replace(transposed=not self.transposed)


def form_of(reading: Reading, pattern: Pattern | None, transposed: bool) -> Form:
    """Return the form of a recurrence from its reading and the caller's pattern."""
    return Form(
        reading.kind, reading.size, transposed, pattern if reading.kind == "sparse" else None
    )


def whole_shapes(
    reading: Reading, form: Form, offsets: Shape | None, initial: Shape | None
) -> tuple[Shape | None, ...]:
    """Return the full shapes of all inputs, with an axis of steps and an axis of samples.

    Matrices have the shape that the reading gives them.
    """
    count, size = len(reading.axes) - (1 if reading.kind != "dense" else 2), form.size
    lead = reading.axes[:count] if count == 2 else (reading.axes[0], 1)
    return (
        (*lead, form.nnz),
        None if offsets is None else (offsets[0], offsets[1] if len(offsets) == 3 else 1, size),
        None if initial is None else (initial[0] if len(initial) == 2 else 1, size),
    )


# -- Kernel calls ----------------------------------------------------------------------------------


def _without_shared_axes(given: Sequence[Any]) -> list[Any]:
    """Return inputs without the axis of samples where all samples share an input."""
    a, b, y0 = given
    return [
        a[:, 0] if a.shape[1] == 1 else a,
        b[:, 0] if b is not None and b.shape[1] == 1 else b,
        y0[0] if y0 is not None and len(y0) == 1 else y0,
    ]


def _read(form: Form, given: Sequence[Any]) -> tuple[Matrices, Any, Any]:
    """Return what kernels read."""
    values, b, y0 = _without_shared_axes(given)
    return Matrices(form.pattern, values, form.transposed, len(values if b is None else b)), b, y0


def _forward(calls: Calls, form: Form, given: Sequence[Any], keeps: bool) -> list[Array]:
    (shape,) = _shapes(form, [None if each is None else each.shape for each in given])
    dtype, batch = given[0].dtype, shape[1]
    states = calls.result("states", shape, dtype)
    matrices, b, y0 = _read(form, given)
    y0 = calls.zeros(form.size, dtype) if y0 is None else y0
    write_states(calls, matrices, b, y0, states[:, 0] if batch == 1 else states)
    return [states]


def _backward(
    calls: Calls,
    form: Form,
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    (loss,), dtype, shape = above, kept.dtype, kept.shape
    batch = shape[1]
    names = "matrices", "offsets", "initial"
    results = {
        name: calls.result(name, array.shape, dtype)
        for name, array, need in zip(names, given, needs, strict=True)
        if need
    }

    def whole(name: str, shape: Shape) -> Array:
        """Return memory for the gradients of all samples."""
        if name in results and results[name].shape == shape:
            return results[name]
        return memory(calls, shape, dtype)

    in_offsets, in_initial = whole("offsets", shape), whole("initial", shape[1:])
    vectors = [in_offsets, loss, kept]
    if batch == 1:
        vectors = [each[:, 0] for each in vectors]
    matrices, _, y0 = _read(form, given)
    y0 = calls.zeros(form.size, dtype) if y0 is None and needs[0] else y0
    into, losses, states = vectors
    calls.launch(copy_into, into[-1].reshape(-1), losses[-1].reshape(-1))
    back = matrices._replace(steps=len(kept)).adjoint(conjugated=conjugated)
    write_states(calls, back.part(0, -1), losses[-2::-1], losses[-1], into[-2::-1])
    if needs[2]:
        first = in_initial if batch == 1 else in_initial[None]
        write_states(calls, back.part(-1, None), None, into[0], first)
    if needs[0]:
        values = results["matrices"]
        values = values[:, 0] if values.shape[1] == 1 else values
        write_outer_products(calls, matrices, into, states, y0, values, conjugated=conjugated)
    if needs[1] and results["offsets"] is not in_offsets:
        sums = results["offsets"].reshape(-1), in_offsets.reshape(-1)
        calls.launch(add_up_parts, *sums, batch, 1, form.size, form.size)
    if needs[2] and results["initial"] is not in_initial:
        calls.launch(add_up_rows, results["initial"].reshape(-1), in_initial.reshape(-1))
    return list(results.values())


# -- By functions that have derivatives ------------------------------------------------------------


def _applied(xp: Functions, form: Form, values: Any, vectors: Any) -> Any:
    """Return products of matrices and vectors, both with axes of steps and samples."""
    if form.kind == "diagonal":
        return values * vectors
    if form.kind == "dense":
        matrices = values.reshape(*values.shape[:-1], form.size, form.size)
        matrices = xp.moveaxis(matrices, -1, -2) if form.transposed else matrices
        return xp.matmul(matrices, vectors[..., None])[..., 0]
    pattern = form.pattern
    rows, columns = (np.asarray(each, np.int64) for each in (rows_of(pattern), pattern.indices))
    to, read = (columns, rows) if form.transposed else (rows, columns)
    products = values * xp.take(vectors, read, -1)
    return xp.add_at(xp.filled(products, (*products.shape[:-1], form.size), 0), to, products)


def _plain(xp: Functions, form: Form, matrices: Any, offsets: Any, initial: Any) -> list[Any]:
    """Return the states step by step."""
    given = matrices, offsets, initial
    (shape,) = _shapes(form, [None if each is None else tuple(each.shape) for each in given])
    state = xp.filled(matrices, shape[1:], 0)
    state = state if initial is None else state + initial
    states = []
    for t in range(shape[0]):
        values = matrices if len(matrices) == 1 else matrices[t : t + 1]
        state = _applied(xp, form, values, state[None])[0]
        state = state if offsets is None else state + offsets[t]
        states.append(state)
    return [xp.stack(states, 0) if states else xp.filled(matrices, shape, 0)]


def _before(xp: Functions, initial: Any, states: Any) -> Any:
    """Return the state before each step."""
    shape = tuple(states.shape[1:])
    begin = xp.filled(states, shape, 0) if initial is None else initial
    return xp.concat([xp.broadcast_to(begin, shape)[None], states[:-1]], 0)


def _slope(xp: Functions, form: Form, states: Any, given: Any, slopes: Any) -> Any:
    """Return ``ẏ_t = A_t ẏ_{t-1} + (Ȧ_t y_{t-1} + ḃ_t)``, which is a recurrence, too."""
    matrices, _, initial = given
    in_matrices, in_offsets, in_initial = slopes
    added = xp.filled(states, tuple(states.shape), 0)
    if in_offsets is not None:
        added = added + in_offsets
    if in_matrices is not None:
        added = added + _applied(xp, form, in_matrices, _before(xp, initial, states))
    return xp.run(RECURRENCE, form, matrices, added, in_initial)


def _again(xp: Functions, form: Form, states: Any, above: Any, given: Any) -> list[Any]:
    """Return the gradients: those in states go through the transposed matrices."""
    (loss,), (matrices, _, initial) = above, given
    if not len(states):
        begin = xp.filled(states, tuple(states.shape[1:]), 0)
        return [xp.filled(matrices, tuple(matrices.shape), 0), loss, begin]
    later = xp.concat([xp.flip(loss[:-1], (0,)), xp.filled(loss, tuple(loss[:1].shape), 0)], 0)
    back_values = xp.adjoint(xp.flip(matrices, (0,)))
    (back,) = xp.run(RECURRENCE, form.adjoint, back_values, later, loss[-1])
    in_offsets = xp.concat([xp.flip(back[:-1], (0,)), loss[-1:]], 0)
    before = xp.adjoint(_before(xp, initial, states))
    left, right = (before, in_offsets) if form.transposed else (in_offsets, before)
    if form.kind == "dense":
        in_matrices = left[..., :, None] * right[..., None, :]
        in_matrices = in_matrices.reshape(*states.shape[:-1], form.nnz)
    elif form.kind == "diagonal":
        in_matrices = left * right
    else:
        pattern = form.pattern
        rows, columns = (np.asarray(each, np.int64) for each in (rows_of(pattern), pattern.indices))
        in_matrices = xp.take(left, rows, -1) * xp.take(right, columns, -1)
    return [in_matrices, in_offsets, back[-1]]


# -- On a CUDA device ------------------------------------------------------------------------------


def _on_device(form: Form, given: Sequence[Any]) -> list[Any]:
    a, b, y0 = _without_shared_axes(given)
    states = affine_scan(a, b, y0, pattern=form.pattern, transposed=form.transposed)
    return [states if states.ndim == 3 else states[:, None]]


def _gradients_on_device(
    form: Form, states: Any, above: Sequence[Any], given: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    a, _, y0 = _without_shared_axes(given)
    is_one = states.shape[1] == 1
    found = affine_scan_vjp(
        a,
        initial=y0,
        states=states[:, 0] if is_one else states,
        grads=above[0][:, 0] if is_one else above[0],
        pattern=form.pattern,
        transposed=form.transposed,
        needs_matrices_grad=needs[0],
    )
    grads = []
    for grad, like, need, axis in zip(found, given, needs, (1, 1, 0), strict=True):
        if need:
            is_shared = like.shape[axis] == 1 and grad.ndim == len(like.shape)
            grads.append(grad.sum(axis) if is_shared else grad)
    return [
        grad.reshape(like.shape) for grad, like in zip(grads, compress(given, needs), strict=True)
    ]


# -- The operation ---------------------------------------------------------------------------------


def _batch(shapes: Shapes) -> int:
    """Return how many samples there are; inputs of one sample may be shared."""
    axes = zip(shapes, (1, 1, 0), strict=True)
    counts = [shape[axis] for shape, axis in axes if shape is not None]
    return next((count for count in counts if count != 1), 1)


def _shapes(form: Form, shapes: Shapes) -> list[Shape]:
    matrices, offsets, _ = shapes
    assert matrices is not None
    steps = matrices[0] if offsets is None else offsets[0]
    return [(steps, _batch(shapes), form.size)]


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of samples."""
    batch = _batch(shapes)
    return [
        MappedAxis(axis, batch, is_shared=shape is not None and shape[axis] == 1)
        for shape, axis in zip(shapes, (1, 1, 0), strict=True)
    ]


def _check(form: Form, shapes: Shapes) -> None:
    ((steps, batch, size),) = _shapes(form, shapes)
    wanted = (steps, batch, form.nnz), (steps, batch, size), (batch, size)
    names = "matrices", "offsets", "initial"
    for name, shape, whole in zip(names, shapes, wanted, strict=True):
        if shape is None:
            continue
        shared = zip(shape[:-1], whole[:-1], strict=False)
        if (
            len(shape) != len(whole)
            or shape[-1] != whole[-1]
            or any(own not in (1, all_of_them) for own, all_of_them in shared)
        ):
            raise InputError(f"{name} has shape {shape}; expected {whole}, or axes of length 1")


def _encode(form: Form) -> tuple[list[int], list[Array]]:
    numbers = [_KINDS.index(form.kind), form.size, int(form.transposed)]
    if form.sparse is None:
        return numbers, []
    return numbers, [each.astype("int64") for each in (form.sparse.indptr, form.sparse.indices)]


def _decode(numbers: Sequence[int], tables: Sequence[Array]) -> Form:
    kind, size, transposed = numbers
    sparse = Pattern(tables[0], tables[1], (size, size)) if tables else None
    return Form(_KINDS[kind], size, bool(transposed), sparse)


RECURRENCE = Operation(
    name="affine_scan",
    inputs=("matrices", "offsets?", "initial?"),
    encode=_encode,
    decode=_decode,
    shapes=_shapes,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    slope=_slope,
    again=_again,
    axes=_axes,
    out_axes=(1,),
    reads=(0, 2),
    has_complex=True,
    check=_check,
    on_device=(_on_device, _gradients_on_device),
)

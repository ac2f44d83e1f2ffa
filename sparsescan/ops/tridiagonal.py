"""Block-tridiagonal systems as an operation, and band matrices as such systems.

The operation takes blocks `lower`, `diagonal` and `upper` (steps, series, size, size), of which the
axis of series may be 1, and right sides `b` (steps, series, size, columns). It returns the
solutions ``x`` of ``A x = b``. With ``Aᵀ z = ∂L/∂x``, the gradient in `b` is `z`, and that in ``A``
is ``-z xᵀ`` at the places of its blocks. So each derivative is a solution, too. A second operation
returns logarithms and signs of determinants; its gradient is the transposed inverse there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from ..execution.calls import Calls
from ..kernels.cpu import tridiagonal as kernels
from ..kernels.cpu.copies import fill_with
from ..kernels.cpu.lanes import lanes
from ..kernels.cpu.tridiagonal import BlockSystem
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, ranges_of, share_out

Array = NDArray[Any]

NAMES = "lower", "diagonal", "upper", "b"


class Form(NamedTuple):
    """Whether the matrix is the transpose of what its blocks say."""

    is_turned: bool = False


def whole(given: Mapping[str, Any]) -> list[Any]:
    """Return blocks and, if there are some, right sides as operations take them.

    `lower` may be None.

    Raises
    ------
    InputError
        If the shapes do not fit each other.
    """
    lower, diagonal, upper = (given[name] for name in NAMES[:3])
    shape = tuple(diagonal.shape)
    if len(shape) not in (3, 4) or shape[-1] != shape[-2]:
        raise InputError(
            f"diagonal has shape {shape}; expected (steps, n, n) or (steps, series, n, n)"
        )
    for name, own in (("lower", lower), ("upper", upper)):
        if own is not None and tuple(own.shape) != shape:
            raise InputError(f"{name} has shape {tuple(own.shape)}; expected {shape}, as diagonal")
    steps, size = shape[0], shape[-1]
    series = shape[1] if len(shape) == 4 else 1
    square = steps, series, size, size
    arrays = [None if each is None else each.reshape(square) for each in (lower, diagonal, upper)]
    for side in given.keys() - {*NAMES[:3]}:
        b = given[side]
        if tuple(b.shape[: len(shape) - 1]) != shape[:-1] or len(b.shape) > len(shape):
            raise InputError(
                f"{side} has shape {tuple(b.shape)}; expected {shape[:-1]} or that and one axis "
                f"more, as diagonal has shape {shape}"
            )
        columns = b.shape[-1] if len(b.shape) == len(shape) else 1
        arrays.append(b.reshape(steps, series, size, columns))
    return arrays


def below(lower: Any, upper: Any, concatenate: Any) -> Any:
    """Return blocks below the diagonal: if there are none, those of a symmetric matrix."""
    if lower is not None:
        return lower
    turned = upper.swapaxes(-1, -2)
    return concatenate([turned[:1], turned[:-1]], 0)


# -- Band matrices ---------------------------------------------------------------------------------


class Bands(NamedTuple):
    """Where a band matrix has the entries of its blocks.

    Attributes
    ----------
    size, steps : int
        Rows of a block, and how many blocks there are.
    places : ndarray of int, shape (3, steps, size, size)
        Places in the flat array of bands, behind which are a 0 and a 1.
    """

    size: int
    steps: int
    places: Array


def bands(l_and_u: Any, shape: Shape, b: Shape, side: str = "b") -> Bands:
    """Return where the entries of blocks are among bands in the form of ``scipy.linalg``.

    Raises
    ------
    InputError, InputTypeError
        If the bands do not fit each other or the right sides.
    """
    if not (
        isinstance(l_and_u, (tuple, list))
        and len(l_and_u) == 2
        and all(isinstance(each, (int, np.integer)) for each in l_and_u)
    ):
        raise InputTypeError(f"l_and_u is {short(l_and_u)}; expected two integers")
    below, above = map(int, l_and_u)
    if below < 0 or above < 0:
        raise InputError(f"l_and_u is {(below, above)}; expected numbers that are not negative")
    if len(shape) != 2 or shape[0] != below + above + 1:
        raise InputError(
            f"ab has shape {shape}; expected ({below + above + 1}, n), as l_and_u is "
            f"{(below, above)}"
        )
    count = shape[1]
    if len(b) not in (1, 2) or b[0] != count:
        raise InputError(f"{side} has shape {b}; expected ({count},) or ({count}, k)")
    # Beyond the size of the matrix bands have no entries.
    size = max(1, min(max(below, above), count))
    steps = -(-count // size)
    t, j = np.arange(steps)[:, None, None], np.arange(size)
    rows, found = t * size + j[:, None], []
    for offset in (-1, 0, 1):
        columns = (t + offset) * size + j
        band = above + rows - columns
        is_there = (band >= 0) & (band < shape[0]) & (columns >= 0)
        is_there &= (columns < count) & (rows < count)
        is_one = (rows >= count) & (rows == columns)
        end = shape[0] * count
        found.append(np.where(is_there, band * count + columns, end + is_one))
    return Bands(size, steps, np.stack(found))


# -- Kernel calls ----------------------------------------------------------------------------------


def _read(form: Form, given: Sequence[Any]) -> BlockSystem:
    steps, series, size, columns = given[3].shape
    square = size * size
    strides: Any = tuple(0 if each.shape[1] == 1 and series > 1 else square for each in given[:3])
    width = _padded(3 * size + columns)
    arrays = [each.reshape(-1) for each in given]
    return BlockSystem(steps, series, size, columns, width, strides, form.is_turned, *arrays)


def _padded(count: int) -> int:
    lane_count = lanes(np.dtype(np.float64))
    return -(-count // lane_count) * lane_count


def _solve(calls: Calls, system: BlockSystem, out: Array) -> None:
    """Write solutions, each range of series by a task."""
    count = kernels.scratch_size(system)

    def call(ends: tuple[int, int]) -> None:
        room = calls.borrow(count, np.float64)
        calls.launch(kernels.solve, system, *ends, out.reshape(-1), room)
        calls.give_back(room)

    share_out(calls, _work(system), [partial(call, ends) for ends in ranges_of(system.series)])


def _work(system: BlockSystem) -> int:
    return system.steps * system.series * system.size**2 * (system.size + system.columns)


def forward(calls: Calls, form: Form, given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write the solutions."""
    out = calls.result("solutions", given[3].shape, given[3].dtype)
    _solve(calls, _read(form, given), out)
    return [out]


def backward(
    calls: Calls,
    form: Form,
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    """Write the gradients that are needed, from the solutions."""
    dtype = kept.dtype
    results = [
        calls.result(name, array.shape, dtype) if need else None
        for name, array, need in zip(NAMES, given, needs, strict=True)
    ]
    z = results[3]
    if z is None:
        z = calls.room(kept.size, dtype)[: kept.size].reshape(kept.shape)
    turned = Form(not form.is_turned)
    _solve(calls, _read(turned, [*given[:3], above[0]]), z)
    # Of the transpose, rows are columns.
    pair = [each.reshape(-1) for each in ((z, kept) if form.is_turned else (kept, z))]
    system = _read(form, [*given[:3], above[0]])
    none = np.empty(0, dtype)
    into = [none if each is None else each.reshape(-1) for each in results[:3]]

    def call(ends: tuple[int, int]) -> None:
        calls.launch(kernels.outer_products, system, *ends, *pair, *into)

    share_out(calls, _work(system), [partial(call, ends) for ends in ranges_of(system.steps)])
    return [each for each in results if each is not None]


def _factor(calls: Calls, given: Sequence[Any], more: int, kernel: Any, *arrays: Array) -> None:
    """Call a kernel that takes no right sides, whose rows have `more` numbers of their own."""
    steps, series, size, _ = given[1].shape
    system = _read(Form(), [*given, np.empty((steps, series, size, 0), given[1].dtype)])
    system = system._replace(width=_padded(3 * size + more))
    count = kernels.inverse_scratch_size(system)

    def call(ends: tuple[int, int]) -> None:
        room = calls.borrow(count, np.float64)
        calls.launch(kernel, system, *ends, *arrays, room)
        calls.give_back(room)

    share_out(calls, _work(system), [partial(call, ends) for ends in ranges_of(series)])


def determinants(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write the logarithms and signs of determinants."""
    shape, dtype = given[1].shape[1:2], given[1].dtype
    logs, signs = (calls.result(name, shape, dtype) for name in ("logs", "signs"))
    _factor(calls, given, 0, kernels.determinants, logs, signs)
    return [logs, signs]


def inverses(
    calls: Calls,
    form: tuple[()],
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    """Write the gradients of logarithms of determinants: the transposed inverse, on the pattern."""
    results = [
        calls.result(name, array.shape, kept.dtype) if need else None
        for name, array, need in zip(NAMES, given, needs, strict=False)
    ]
    none = np.empty(0, kept.dtype)
    into = [none if each is None else each.reshape(-1) for each in results]
    for each in into:
        calls.launch(fill_with, each, 0)
    _factor(calls, given, 2 * given[1].shape[2], kernels.inverses, above[0], *into)
    return [each for each in results if each is not None]


# -- By functions that have derivatives ------------------------------------------------------------


def _products(xp: Functions, form: Form, blocks: Sequence[Any], x: Any) -> Any:
    """Return products of a matrix and vectors; blocks of None are zeros."""
    lower, diagonal, upper = blocks
    total = xp.filled(x, tuple(x.shape), 0)
    none = total[:1]

    def turned(block: Any) -> Any:
        return xp.moveaxis(block, -1, -2) if form.is_turned else block

    if diagonal is not None:
        total = total + xp.matmul(turned(diagonal), x)
    for own, is_below in ((lower, True), (upper, False)):
        if own is None:
            continue
        part = own[1:] if is_below else own[:-1]
        if is_below != form.is_turned:
            total = total + xp.concat([none, xp.matmul(turned(part), x[:-1])], 0)
        else:
            total = total + xp.concat([xp.matmul(turned(part), x[1:]), none], 0)
    return total


def _slope(xp: Functions, form: Form, x: Any, given: Any, slopes: Any) -> Any:
    """Return ``ẋ``, where ``A ẋ = ḃ - Ȧ x``."""
    b = -_products(xp, form, slopes[:3], x)
    b = b if slopes[3] is None else slopes[3] + b
    return xp.run(SOLVE, form, *given[:3], b)


def _again(xp: Functions, form: Form, x: Any, above: Any, given: Any) -> Any:
    """Return all gradients, of solutions of the transposed system."""
    (z,) = xp.run(SOLVE, Form(not form.is_turned), *given[:3], above[0])
    left, right = (x, z) if form.is_turned else (z, x)

    def outer(rows: Any, columns: Any) -> Any:
        return -xp.matmul(rows, xp.moveaxis(columns, -1, -2))

    none = xp.filled(x, (1, *x.shape[1:3], x.shape[2]), 0)
    lower = xp.concat([none, outer(left[1:], right[:-1])], 0)
    upper = xp.concat([outer(left[:-1], right[1:]), none], 0)
    return [lower, outer(left, right), upper, z]


def _dense(xp: Functions, blocks: Sequence[Any], series: int) -> Any:
    """Return the matrices of some blocks."""
    lower, diagonal, upper = blocks
    steps, _, size, _ = diagonal.shape
    none = xp.filled(diagonal, (series, size, size), 0)
    rows = []
    for t in range(steps):
        row = [none] * steps
        row[t] = none + diagonal[t]
        if t > 0:
            row[t - 1] = none + lower[t]
        if t + 1 < steps:
            row[t + 1] = none + upper[t]
        rows.append(xp.concat(row, 2))
    return xp.concat(rows, 1)


def _plain(xp: Functions, form: Form, *given: Any) -> list[Any]:
    """Return the solutions by one dense matrix."""
    b = given[3]
    steps, series, size, columns = b.shape
    if math.prod(b.shape) == 0:
        return [b * 1]
    matrix = _dense(xp, given[:3], series)
    matrix = xp.moveaxis(matrix, -1, -2) if form.is_turned else matrix
    flat = xp.moveaxis(b, 0, 1).reshape(series, steps * size, columns)
    found = xp.linalg.solve(matrix, flat).reshape(series, steps, size, columns)
    return [xp.moveaxis(found, 0, 1)]


def _plain_determinants(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return logarithms and signs of the determinants of dense matrices."""
    diagonal = given[1]
    series = diagonal.shape[1]
    if math.prod(diagonal.shape) == 0:
        return [xp.filled(diagonal, (series,), 0), xp.filled(diagonal, (series,), 1)]
    sign, log_det = xp.linalg.slogdet(_dense(xp, given, series))
    return [log_det, sign]


# -- The operation ---------------------------------------------------------------------------------


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of series."""
    b: Any = shapes[3]
    return [MappedAxis(1, b[1], shape is not None and shape[1] == 1) for shape in shapes[:3]] + [
        MappedAxis(1, b[1])
    ]


def _check(form: Form, shapes: Shapes) -> None:
    b = shapes[3]
    if b is None or len(b) != 4:
        raise InputError(f"b has shape {b}; expected (steps, series, n, k)")
    for name, shape in zip(NAMES[:3], shapes[:3], strict=True):
        expected = [(b[0], series, b[2], b[2]) for series in (1, b[1])]
        if shape not in expected:
            raise InputError(f"{name} has shape {shape}; expected {expected[1]}")


def _shapes(form: Form, shapes: Shapes) -> list[Shape]:
    assert shapes[3] is not None
    return [shapes[3]]


SOLVE = Operation(
    name="solve_block_tridiagonal",
    inputs=NAMES,
    encode=lambda form: ([int(form.is_turned)], []),
    decode=lambda numbers, tables: Form(bool(numbers[0])),
    shapes=_shapes,
    forward=forward,
    backward=backward,
    plain=_plain,
    slope=_slope,
    again=_again,
    axes=_axes,
    out_axes=(1,),
    reads=(0, 1, 2),
    check=_check,
)


LOG_DETERMINANT = Operation(
    name="block_tridiagonal_log_determinant",
    inputs=NAMES[:3],
    encode=lambda form: ([], []),
    decode=lambda numbers, tables: (),
    shapes=lambda form, shapes: [(shapes[1][1],)] * 2,  # type: ignore[index]
    forward=determinants,
    backward=inverses,
    plain=_plain_determinants,
    axes=lambda shapes: [MappedAxis(1, shapes[1][1])] * 3,  # type: ignore[index]
    out_axes=(0, 0),
    reads=(0, 1, 2),
    results=2,
)


def solve(xp: Functions, given: Mapping[str, Any]) -> Any:
    """Return the solutions of arguments by their names, by the functions of a library."""
    lower, diagonal, upper, b = whole(given)
    lower = below(lower, upper, xp.concat)
    (found,) = xp.run(SOLVE, Form(), lower, diagonal, upper, b)
    return found.reshape(tuple(given["b"].shape))


def solve_banded(xp: Functions, l_and_u: Any, ab: Any, b: Any) -> Any:
    """Return the solutions of a system with a band matrix, by the functions of a library."""
    shape = tuple(b.shape)
    size, steps, places = bands(l_and_u, tuple(ab.shape), shape)
    flat = xp.concat([ab.reshape(-1), xp.filled(ab, (1,), 0), xp.filled(ab, (1,), 1)], 0)
    lower, diagonal, upper = (
        xp.take(flat, each.reshape(-1), 0).reshape(steps, 1, size, size) for each in places
    )
    sides = b.reshape(shape[0], math.prod(shape[1:]))
    more = xp.filled(b, (steps * size - shape[0], sides.shape[1]), 0)
    sides = xp.concat([sides, more], 0).reshape(steps, 1, size, sides.shape[1])
    (found,) = xp.run(SOLVE, Form(), lower, diagonal, upper, sides)
    return found.reshape(steps * size, sides.shape[3])[: shape[0]].reshape(shape)


def slogdet(xp: Functions, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return signs and logarithms of determinants of arguments by their names."""
    lower, diagonal, upper = whole(given)
    lower = below(lower, upper, xp.concat)
    log_det, sign = xp.run(LOG_DETERMINANT, (), lower, diagonal, upper)
    has_series = len(given["diagonal"].shape) == 4
    return (sign, log_det) if has_series else (sign[0], log_det[0])

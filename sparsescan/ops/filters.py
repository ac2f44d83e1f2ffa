"""Recursive filters: the operation, filters along an axis, and checks of shapes.

    a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k] + s[t]

The operation takes coefficients ``b`` and ``a`` of shape (1 or N, 1 or T, taps), and samples ``x``
of shape (N, T), with zeros before the first step. Optional terms ``s`` (N, M) are added to the
first M steps; terms beyond step T are ignored. The bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from ..execution.calls import Calls
from ..execution.threads import thread_count
from ..kernels.cpu.copies import add_up_rows, fill_with
from ..kernels.cpu.filters import (
    FilterNeeds,
    FilterSizes,
    differentiate,
    filter_blocks,
    filter_complex,
    normalise_into,
)
from ..kernels.cpu.sixteen import WIDTH
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, memory

Array = NDArray[Any]

# Coefficients of a second-order section: three of its numerator, three of its denominator.
_SECTION = 6
# Multiply-adds that are worth another thread, and parts per thread, so that no thread waits long.
_GRAIN, _PARTS = 1 << 19, 4
# A backward pass of all gradients has this many times the multiply-adds of a forward pass.
_PASSES = 2
# Steps of a tile, whose results stay in the nearest caches; fewer if coefficients change.
_TILE, _TILE_OF_CHANGES = 128, 48


# -- Along an axis ---------------------------------------------------------------------------------


def filter_along(xp: Functions, b: Any, a: Any, x: Any, axis: Any, zi: Any) -> Any:
    """Return samples filtered along an axis, and the final delays if there are initial ones.

    As :func:`sparsescan.torch.lfilter`, by the functions of a library.
    """
    axis, batch = read_lfilter(b.shape, a.shape, x.shape, axis, None if zi is None else zi.shape)
    b, a = (_shared(xp, each if each.ndim > 1 else each[None], 2, batch) for each in (b, a))
    samples = _folded(xp, x, axis, batch)
    if zi is None:
        return _unfolded(xp, _filter(xp, b, a, samples), axis, batch)
    y, final = _with_delays(xp, b, a, samples, _folded(xp, zi, axis, batch))
    return _unfolded(xp, y, axis, batch), _unfolded(xp, final, axis, batch)


def filter_sections(xp: Functions, sos: Any, x: Any, axis: Any, zi: Any) -> Any:
    """Return samples that a cascade of sections has filtered, and the final delays.

    As :func:`sparsescan.torch.sosfilt`, by the functions of a library.
    """
    axis, batch = read_sosfilt(sos.shape, x.shape, axis, None if zi is None else zi.shape)
    sections = _shared(xp, sos if sos.ndim > 2 else sos[None], 3, batch)
    samples, finals = _folded(xp, x, axis, batch), []
    for k in range(sections.shape[2]):
        b, a = sections[:, :, k, :3], sections[:, :, k, 3:]
        if zi is None:
            samples = _filter(xp, b, a, samples)
        else:
            samples, final = _with_delays(xp, b, a, samples, _folded(xp, zi[k], axis, batch))
            finals.append(_unfolded(xp, final, axis, batch))
    y = _unfolded(xp, samples, axis, batch)
    return y if zi is None else (y, xp.stack(finals, 0))


def _folded(xp: Functions, x: Any, axis: int, batch: Shape) -> Any:
    """Return samples end to end, ``(N, T)``."""
    moved = xp.moveaxis(x, axis, -1)
    steps = moved.shape[-1]
    return xp.broadcast_to(moved, (*batch, steps)).reshape(math.prod(batch), steps)


def _shared(xp: Functions, each: Any, own: int, batch: Shape) -> Any:
    """Return coefficients for every sample, or one set for all; `own` axes are not samples."""
    lead, rest = each.shape[:-own], each.shape[-own:]
    if all(n == 1 for n in lead):
        return each.reshape(1, *rest)
    return xp.broadcast_to(each, (*batch, *rest)).reshape(math.prod(batch), *rest)


def _unfolded(xp: Functions, samples: Any, axis: int, batch: Shape) -> Any:
    return xp.contiguous(xp.moveaxis(samples.reshape(*batch, samples.shape[-1]), -1, axis))


def _with_delays(xp: Functions, b: Any, a: Any, x: Any, zi: Any) -> tuple[Any, Any]:
    """Return filtered samples, and the delays after the last step.

    The delays of the transposed direct form II are what past steps will add to later results.
    """
    size, steps = zi.shape[1], x.shape[1]
    if not steps:
        return x, zi
    y = _filter(xp, b, a, x, a[:, :size, 0] * zi[:, :steps])
    final = _earlier(xp, zi, steps)
    # Later steps use the coefficients of the last step.
    b, a = b[:, -1], a[:, -1]
    ahead = np.arange(size)
    # Row j is for step ``steps - size + j``, column i for the result at step ``steps + i``.
    k = size + ahead - ahead[:, None]
    places = np.minimum(k, size).ravel()
    for factors, samples, sign in ((b, x, 1), (a, y, -1)):
        taps = _fitted(xp, factors / a[:, :1], size + 1)
        table = xp.take(taps, places, 1).reshape(len(taps), size, size) * xp.constant(
            sign * (k <= size)
        )
        last = _later(xp, _fitted(xp, samples, steps + size), size)[:, steps:]
        final = final + (last[:, :, None] * table).sum(1)
    return y, final


def _filter(xp: Functions, b: Any, a: Any, x: Any, start: Any = None) -> Any:
    """Return filtered samples; complex ones may have real coefficients."""
    if xp.is_complex(x) and not xp.is_complex(a):
        # Real and imaginary parts become more samples.
        b, a = (each if len(each) == 1 else xp.concat([each, each], 0) for each in (b, a))
        parts = (
            None if each is None else xp.concat([each.real, each.imag], 0) for each in (x, start)
        )
        y = _filter(xp, b, a, *parts)
        return xp.complex(y[: len(y) // 2], y[len(y) // 2 :])
    return xp.run(FILTER, (), b, a, x, start)[0]


# -- By functions that have derivatives ------------------------------------------------------------


def _later(xp: Functions, x: Any, k: int) -> Any:
    """Return samples `k` steps later, with zeros before them."""
    count, steps = x.shape
    k = min(k, steps)
    return xp.concat([xp.filled(x, (count, k), 0), x[:, : steps - k]], 1) if k else x


def _earlier(xp: Functions, x: Any, k: int) -> Any:
    """Return samples `k` steps earlier, with zeros behind them."""
    return _fitted(xp, x[:, k:], x.shape[1]) if k else x


def _fitted(xp: Functions, x: Any, steps: int) -> Any:
    """Cut or zero-pad to so many steps."""
    count, own = x.shape
    if own >= steps:
        return x[:, :steps]
    return xp.concat([x, xp.filled(x, (count, steps - own), 0)], 1)


def _sums(xp: Functions, factors: Any, x: Any) -> Any:
    """Return ``Σ_k c_k[t] x[t-k]``."""
    return sum(factors[..., k] * _later(xp, x, k) for k in range(factors.shape[-1]))


def _plain(xp: Functions, form: Any, b: Any, a: Any, x: Any, start: Any) -> list[Any]:
    """Return filtered samples step by step."""
    steps, taps = x.shape[1], a.shape[-1]
    sums = _sums(xp, b, x)
    if start is not None:
        sums = sums + _fitted(xp, start, steps)
    a = xp.broadcast_to(a, (len(a), steps, taps))
    results: list[Any] = []
    for t in range(steps):
        total = sums[:, t]
        for k in range(1, min(taps, t + 1)):
            total = total - a[:, t, k] * results[t - k]
        results.append(total / a[:, t, 0])
    return [xp.stack(results, 1) if results else xp.filled(x, x.shape, 0)]


def _slope(xp: Functions, form: Any, y: Any, given: Any, slopes: Any) -> Any:
    """Return the derivative: the recursive part by `a` of the derivative of its input."""
    (b, a, x, _), (in_b, in_a, in_x, in_start) = given, slopes
    added = xp.filled(y, y.shape, 0)
    for factors, samples, sign in ((in_b, x, 1), (b, in_x, 1), (in_a, y, -1)):
        if factors is not None and samples is not None:
            added = added + sign * _sums(xp, factors, samples)
    if in_start is not None:
        added = added + _fitted(xp, in_start, y.shape[1])
    return xp.run(FILTER, form, xp.filled(a, (1, 1, 1), 1), a, added, None)


def _again(xp: Functions, form: Any, y: Any, above: Any, given: Any) -> list[Any]:
    """Return the gradients; those in results pass the recursive part by `a` backward in time."""
    *others, start = given
    b, a, x, y = map(xp.adjoint, (*others, y))
    columns = [a[..., k] for k in range(a.shape[-1])]
    if a.shape[1] > 1:
        columns = [_earlier(xp, each, k) for k, each in enumerate(columns)]
    back = xp.flip(xp.stack(columns, -1), (1,))
    one = xp.filled(a, (1, 1, 1), 1)
    g = xp.flip(xp.run(FILTER, form, one, back, xp.flip(above[0], (1,)), None)[0], (1,))
    in_b = xp.stack([g * _later(xp, x, k) for k in range(b.shape[-1])], -1)
    in_a = xp.stack([-g * _later(xp, y, k) for k in range(a.shape[-1])], -1)
    in_x = sum(_earlier(xp, b[..., k] * g, k) for k in range(b.shape[-1]))
    return [in_b, in_a, in_x, None if start is None else _fitted(xp, g, start.shape[1])]


# -- Kernel calls ----------------------------------------------------------------------------------


def _forward(calls: Calls, form: Any, given: Sequence[Any], keeps: bool) -> list[Array]:
    b, a, x, start = given
    sizes = _sizes(b.shape, a.shape, x.shape, 0 if start is None else start.shape[1])
    factors, y = _factors(calls, b, a, sizes.before), calls.result("y", x.shape, x.dtype)
    start = np.empty(0, x.dtype) if start is None else start.reshape(-1)
    _write(calls, sizes, [*factors, x.reshape(-1), start], y.reshape(-1))
    return [y]


def _backward(
    calls: Calls,
    form: Any,
    y: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    """Write the gradients, for real numbers."""
    b, a, x, start = given
    starts, names = 0 if start is None else start.shape[1], ("b", "a", "x", "start")
    shapes = _gradient_shapes(b.shape, a.shape, x.shape, starts, needs)
    results: list[Array] = []
    into: list[Array] = []
    parts = []
    for name, shape, array, need in zip(names, shapes, given, needs, strict=True):
        own = np.empty(0, x.dtype)
        if need:
            result = calls.result(name, array.shape, x.dtype)
            own = result.reshape(-1)
            if shape != array.shape:
                own = memory(calls, (math.prod(shape),), x.dtype)
                parts.append((result.reshape(-1), own))
            results.append(result)
        into.append(own)
    if needs[3]:
        calls.launch(fill_with, into[3], 0)
    sizes = _sizes(b.shape, a.shape, x.shape, starts)
    read = [above[0], *_factors(calls, b, a, sizes.before), x, y]
    _write_gradients(calls, sizes, needs, [each.reshape(-1) for each in read], into)
    for result, own in parts:
        calls.launch(add_up_rows, result, own)
    return results


def _factors(calls: Calls, b: Array, a: Array, before: int) -> list[Array]:
    """Return coefficients as kernels read them, each contiguous.

    `a` is normalised if samples share it or it is complex. Coefficients that samples share, and
    that change with the steps, get zeros after the last step.
    """
    factors = []
    for each, divides in ((b, False), (a, len(a) == 1 or a.dtype.kind == "c")):
        own, ends = each.reshape(-1), before if len(each) == 1 < each.shape[1] else 0
        if divides or ends:
            taps = each.shape[2]
            room = memory(calls, (own.size + ends * taps,), each.dtype)
            calls.launch(normalise_into, room, own, taps, int(divides))
            own = room
        factors.append(own)
    return factors


def _write(calls: Calls, sizes: FilterSizes, given: Sequence[Array], y: Array) -> None:
    """Write filtered samples, given factors, samples and terms of leading steps; all are flat."""
    rows = 2 * (sizes.tile + sizes.before) + _rows_of_coefficients(sizes)

    def run(first: int, last: int) -> None:
        if y.dtype.kind == "c":
            calls.launch(filter_complex, sizes, *given, y, first, last)
            return
        room = calls.borrow(rows * WIDTH, y.dtype)
        own = room[: rows * WIDTH].reshape(rows, WIDTH)
        calls.launch(filter_blocks, sizes, *given, y, own, first, last)
        calls.give_back(room)

    _share(calls, run, sizes, 1)


def _write_gradients(
    calls: Calls,
    sizes: FilterSizes,
    needs: Sequence[bool],
    given: Sequence[Array],
    into: Sequence[Array],
) -> None:
    """Write gradients, given those in results, factors, samples and results; all are flat."""
    flags = FilterNeeds(*map(int, needs))
    taps = sizes.b_taps + sizes.a_taps
    rows = 5 * (sizes.tile + sizes.before) + taps * (1 + sizes.tile)
    rows += _rows_of_coefficients(sizes)

    def run(first: int, last: int) -> None:
        room = calls.borrow(rows * WIDTH, given[0].dtype)
        own = room[: rows * WIDTH].reshape(rows, WIDTH)
        calls.launch(differentiate, sizes, flags, *given, *into, own, first, last)
        calls.give_back(room)

    _share(calls, run, sizes, _PASSES)


def _gradient_shapes(
    b: Shape, a: Shape, x: Shape, starts: int, needs: Sequence[bool]
) -> list[Shape]:
    """Return the shapes of what is written.

    Gradients in coefficients are per sample and tap, or per block of samples, step and tap. The
    caller sums them where samples share coefficients.
    """
    shapes = []
    for (count, changes, taps), need in zip((b, a), needs, strict=False):
        lead = x[0] if count > 1 or changes == 1 else -(-x[0] // WIDTH)
        shapes.append((lead if need else 0, changes, taps))
    return [*shapes, x if needs[2] else (0,), (x[0], starts) if needs[3] else (0,)]


def _sizes(b: Shape, a: Shape, x: Shape, starts: int) -> FilterSizes:
    """Return the sizes of a filter, for coefficients and samples of these shapes."""
    before = max(b[2], a[2]) - 1
    tile = max(_TILE_OF_CHANGES if max(b[1], a[1]) > 1 else _TILE, -(-before // 8) * 8)
    return FilterSizes(
        samples=x[0],
        steps=x[1],
        tile=tile,
        before=before,
        b_taps=b[2],
        a_taps=a[2],
        b_sample=b[1] * b[2] if b[0] > 1 else 0,
        b_step=b[2] if b[1] > 1 else 0,
        a_sample=a[1] * a[2] if a[0] > 1 else 0,
        a_step=a[2] if a[1] > 1 else 0,
        starts=starts,
    )


def _rows_of_coefficients(sizes: FilterSizes) -> int:
    """Return how many rows the coefficients of a tile take."""
    if not sizes.b_sample and not sizes.a_sample:
        return 0
    return (sizes.tile + sizes.before) * (sizes.b_taps + sizes.a_taps)


def _share(calls: Calls, run: Any, sizes: FilterSizes, passes: int) -> None:
    """Divide blocks of samples among threads, for so many passes over them."""
    blocks = -(-sizes.samples // WIDTH)
    work = passes * sizes.samples * sizes.steps * (sizes.b_taps + sizes.a_taps)
    threads = max(1, min(thread_count(), work // _GRAIN))
    parts = min(blocks, threads * _PARTS) if threads > 1 else 1
    ends = [blocks * k // parts for k in range(parts + 1)]
    calls.together([partial(run, *ends[k : k + 2]) for k in range(parts)])


# -- Shapes ----------------------------------------------------------------------------------------


def read_lfilter(b: Shape, a: Shape, x: Shape, axis: Any, zi: Shape | None) -> tuple[int, Shape]:
    """Return the axis of time as a negative number, and the broadcast shape of all other axes.

    Parameters
    ----------
    b, a, x : tuple of int
        The shapes of coefficients and samples, as :func:`sparsescan.torch.lfilter` takes them.
    axis : int
        The axis of time.
    zi : tuple of int or None
        The shape of initial conditions, if there are any.

    Raises
    ------
    InputError, InputTypeError
        If a shape or the axis is wrong.
    """
    axis = _read_axis(axis, len(x))
    for name, each in (("b", b), ("a", a)):
        if not each or not each[-1]:
            raise InputError(
                f"{name} has shape {tuple(each)}; expected (taps,), (T, taps) or "
                "(..., T, taps), with at least one tap"
            )
    batch = _read_batch(x, axis, b=b, a=a)
    if zi is not None:
        wanted = list(x)
        wanted[axis] = max(b[-1], a[-1]) - 1
        if len(x) != len(zi) or zi[axis] != wanted[axis]:
            raise InputError(f"zi has shape {tuple(zi)}; expected {tuple(wanted)}")
        _check_delays(zi, axis, batch)
    return axis, batch


def read_sosfilt(sos: Shape, x: Shape, axis: Any, zi: Shape | None) -> tuple[int, Shape]:
    """Do :func:`read_lfilter` for a cascade of sections."""
    axis = _read_axis(axis, len(x))
    if len(sos) < 2 or sos[-1] != _SECTION or not sos[-2]:
        raise InputError(
            f"sos has shape {tuple(sos)}; expected (sections, 6), (T, sections, 6) or "
            "(..., T, sections, 6), with at least one section"
        )
    own = *sos[:-2], sos[-2] * _SECTION
    batch = _read_batch(x, axis, sos=own)
    if zi is not None:
        wanted = [sos[-2], *x]
        wanted[axis] = 2
        if len(zi) != len(wanted) or (zi[0], zi[axis]) != (wanted[0], 2):
            raise InputError(f"zi has shape {tuple(zi)}; expected {tuple(wanted)}")
        _check_delays(zi[1:], axis, batch)
    return axis, batch


def _read_axis(axis: Any, count: int) -> int:
    """Return an axis as a negative number."""
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise InputTypeError(f"axis is {short(axis)}; expected an int")
    if not -count <= axis < count:
        raise InputError(f"axis is {axis}; expected an axis of x, which has {count}")
    return int(axis) if axis < 0 else int(axis) - count


def _read_batch(x: Shape, axis: int, **coefficients: Shape) -> Shape:
    """Return the broadcast shape of all axes except time."""
    batch, steps = (*x[: len(x) + axis], *x[len(x) + axis + 1 :]), x[axis]
    for name, each in coefficients.items():
        changes = each[-2] if len(each) > 1 else 1
        if changes not in (1, steps):
            raise InputError(
                f"{name} has coefficients of {changes} steps; expected {steps}, as x has "
                f"along axis {axis}, or 1"
            )
        both = _broadcast(batch, each[:-2])
        if both is None:
            raise InputError(
                f"{name} has leading axes {tuple(each[:-2])}; expected some that "
                f"broadcast against {batch}, those of x without axis {axis} and of other "
                "coefficients"
            )
        batch = both
    return batch


def _broadcast(one: Shape, other: Shape) -> Shape | None:
    """Return the shape that two shapes broadcast to; raise if they do not."""
    count = max(len(one), len(other))
    pairs = zip((1,) * (count - len(one)) + one, (1,) * (count - len(other)) + other, strict=True)
    whole = []
    for n, m in pairs:
        if n != m and n != 1 and m != 1:
            return None
        whole.append(m if n == 1 else n)
    return tuple(whole)


def _check_delays(zi: Shape, axis: int, batch: Shape) -> None:
    own = *zi[: len(zi) + axis], *zi[len(zi) + axis + 1 :]
    if _broadcast(own, batch) != batch:
        raise InputError(
            f"zi has axes {tuple(own)} beside that of time; expected some that broadcast "
            f"to {batch}, as x has"
        )


# -- The operation ---------------------------------------------------------------------------------


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of samples."""
    assert shapes[2] is not None
    samples = shapes[2][0]
    return [
        MappedAxis(0, samples, is_shared=k < 2 and each is not None and each[0] == 1)
        for k, each in enumerate(shapes)
    ]


def _shapes(form: Any, shapes: Shapes) -> list[Shape]:
    assert shapes[2] is not None
    return [shapes[2]]


def _check(form: Any, shapes: Shapes) -> None:
    for name, each in zip("ba", shapes, strict=False):
        if each is None or len(each) != 3 or not each[-1]:
            raise InputError(f"{name} has shape {each}; expected at least one coefficient")


def _check_values(form: Any, given: Sequence[Any]) -> None:
    a = given[1]
    if a.shape[1] == 1 and not a[..., 0].all():
        raise InputError(
            "a[0] is 0; expected another number, since all coefficients are divided by it"
        )


FILTER = Operation(
    name="filter",
    inputs=("b", "a", "x", "start?"),
    encode=lambda form: ([], []),
    decode=lambda numbers, tables: (),
    shapes=_shapes,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    slope=_slope,
    again=_again,
    axes=_axes,
    out_axes=(0,),
    reads=(0, 1, 2),
    check=_check,
    check_values=_check_values,
)

"""Recursive filters of many samples on the host, what shapes they take, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays.arrays import flat
from ..errors import Allocating, InputError, InputTypeError, short
from ..execution.calls import Calls
from ..execution.recording import Recorder, Space
from ..execution.recurrence import Recorded
from ..execution.threads import thread_count
from ..kernels.cpu.copies import fill_with
from ..kernels.cpu.filters import (
    FilterNeeds,
    FilterSizes,
    differentiate,
    filter_blocks,
    filter_complex,
)
from ..kernels.cpu.sixteen import WIDTH

Array = NDArray[Any]
Shape = tuple[int, ...]

# Coefficients of a second-order section: three of its numerator, three of its denominator.
_SECTION = 6
# Multiply-adds that are worth another thread, and parts for each, so that late ones delay nobody.
_GRAIN, _PARTS = 1 << 19, 4
# As many multiply-adds as a forward pass has are those in a backward pass, of all gradients.
_PASSES = 2
# Steps of a tile: what is computed of them stays in the nearest caches, less of it if coefficients
# change.
_TILE, _TILE_OF_CHANGES = 128, 48


class FilterGrads(NamedTuple):
    """Gradients in what :func:`filter_samples` has been given; None for those not asked for.

    Attributes
    ----------
    b, a, x, start : ndarray or None
        Of the shapes of the arguments.
    """

    b: Array | None
    a: Array | None
    x: Array | None
    start: Array | None


def filter_samples(b: Array, a: Array, x: Array, start: Array | None = None) -> Array:
    """Return samples that a recursive filter has gone through, each by itself.

        a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k] + s[t]

    Parameters
    ----------
    b, a : ndarray, shape (1 or N, 1 or T, taps)
        The coefficients, of each sample and step, or shared; those of `a` begin with ``a_0``.
    x : ndarray, shape (N, T)
        The samples. There is nothing before their first step.
    start : ndarray, shape (N, M), optional
        The terms ``s`` of the leading steps; later ones are 0, and those behind the last step are
        left out.

    Returns
    -------
    ndarray, shape (N, T)
        The filtered samples. The bits do not depend on the number of threads.

    Raises
    ------
    InputError
        If the constant ``a_0`` of a filter is 0.
    """
    for name, array in (("b", b), ("a", a)):
        if array.shape[-1] == 0:
            raise InputError(f"{name} has no coefficients; expected at least one")
    if a.shape[1] == 1 and not a[..., 0].all():
        raise InputError(
            "a[0] is 0; expected another number, since all coefficients are divided by it"
        )
    with Allocating("the filter"):
        y = np.empty(x.shape, x.dtype)
        if y.size == 0:
            return y
        starts = 0 if start is None else start.shape[1]
        sizes = _sizes(b.shape, a.shape, x.shape, starts)
        with np.errstate(all="ignore"):
            own = factors_of(b, a, sizes.before)
        given = *own, x, np.empty(0, x.dtype) if start is None else start
        _write(Calls(), sizes, [flat(each) for each in given], flat(y))
        return y


def filter_samples_vjp(
    grads: Array,
    b: Array,
    a: Array,
    x: Array,
    y: Array,
    starts: int = 0,
    needs: Sequence[bool] = (True, True, True, True),
) -> FilterGrads:
    """Return the gradients in all that enters :func:`filter_samples`, for real numbers.

    Parameters
    ----------
    grads, y : ndarray, shape (N, T)
        The gradients of a loss in the filtered samples, and these.
    b, a, x
        As there.
    starts : int, default 0
        The length of `start`; 0 if there is none.
    needs : sequence of bool
        Which gradients to return: those in `b`, `a`, `x` and `start`.

    Returns
    -------
    FilterGrads
        The gradients. The bits do not depend on the number of threads.
    """
    with Allocating("the gradients"):
        shapes = _gradient_shapes(b.shape, a.shape, x.shape, starts, needs)
        if x.size == 0:
            return _found(needs, *(np.zeros(n, x.dtype) for n in (b.shape, a.shape, *shapes[2:])))
        into = [np.empty(n, x.dtype) for n in shapes]
        into[3][:] = 0
        sizes = _sizes(b.shape, a.shape, x.shape, starts)
        with np.errstate(all="ignore"):
            own = factors_of(b, a, sizes.before)
        given = [flat(each) for each in (grads, *own, x, y)]
        _write_gradients(Calls(), sizes, needs, given, [flat(each) for each in into])
        for k, to in enumerate((b, a)):
            # Of each sample and tap, or of each block, step and tap, if it is not of all three.
            if needs[k] and len(into[k]) > len(to):
                into[k] = into[k].sum(0, keepdims=True)
        return _found(needs, *into)


def _found(needs: Sequence[bool], *gradients: Array) -> FilterGrads:
    return FilterGrads(
        *(each if need else None for each, need in zip(gradients, needs, strict=True))
    )


def factors_of(b: Any, a: Any, before: int, library: Any = np) -> tuple[Any, Any]:
    """Return coefficients as kernels read them, once each is one piece of memory.

    Those that samples share, and complex ones, are normalised in `a`. Those that samples share have
    zeros behind the last of many steps.

    Parameters
    ----------
    b, a : array, shape (1 or N, 1 or T, taps)
        The coefficients.
    before : int
        Steps that they reach back.
    library : module, default numpy
        NumPy, or a library with its functions.
    """
    divided = a
    if len(a) == 1 or a.dtype.kind == "c":
        first = a[..., :1]
        divided = library.concatenate([1 / first, a[..., 1:] / -first], -1)
    factors = []
    for each in (b, divided):
        own = each
        if len(each) == 1 < each.shape[1]:
            zeros = library.zeros((1, before, each.shape[2]), each.dtype)
            own = library.concatenate([each, zeros], 1)
        factors.append(own)
    return factors[0], factors[1]


# -- Kernel calls ----------------------------------------------------------------------------------


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
    """Return the shapes of what is written: of gradients in coefficients, some are added up."""
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
    """Return how many rows coefficients of a tile take."""
    if not sizes.b_sample and not sizes.a_sample:
        return 0
    return (sizes.tile + sizes.before) * (sizes.b_taps + sizes.a_taps)


def _share(calls: Calls, run: Any, sizes: FilterSizes, passes: int) -> None:
    """Share out blocks of samples, through which so many passes are made."""
    blocks = -(-sizes.samples // WIDTH)
    work = passes * sizes.samples * sizes.steps * (sizes.b_taps + sizes.a_taps)
    threads = max(1, min(thread_count(), work // _GRAIN))
    parts = min(blocks, threads * _PARTS) if threads > 1 else 1
    ends = [blocks * k // parts for k in range(parts + 1)]
    calls.together([partial(run, *ends[k : k + 2]) for k in range(parts)])


# -- Recordings ------------------------------------------------------------------------------------


def record_filter(b: Shape, a: Shape, x: Shape, starts: int, dtype: DTypeLike) -> Recorded:
    """Record what :func:`filter_samples` does, for arrays of some shapes with samples and steps.

    Arrays of a replay are the memory, the coefficients as :func:`factors_of` makes them, the
    samples, the terms of leading steps, and the result ``y``.
    """
    space = Space(0)
    sizes = _sizes(b, a, x, starts)
    shapes = [*_factor_shapes(b, a, sizes.before), x, (x[0], starts)]
    recorder = Recorder(space, 1 + len(shapes))
    given = [recorder.array(1 + k, each, dtype).reshape(-1) for k, each in enumerate(shapes)]
    _write(recorder, sizes, given, recorder.result("y", x, dtype).reshape(-1))
    return Recorded(recorder.recording(), space.nbytes)


def record_filter_vjp(
    b: Shape, a: Shape, x: Shape, starts: int, needs: tuple[bool, ...], dtype: DTypeLike
) -> Recorded:
    """Record what :func:`filter_samples_vjp` does, for arrays of some shapes.

    Arrays of a replay are the memory, the gradients in results, the coefficients as
    :func:`factors_of` makes them, the samples, the results, and all gradients that are needed, of
    which those in coefficients are still to be added up over their first axis: it has samples, or
    blocks of these, if coefficients change that samples share.
    """
    space = Space(0)
    sizes = _sizes(b, a, x, starts)
    shapes = [x, *_factor_shapes(b, a, sizes.before), x, x]
    recorder = Recorder(space, 1 + len(shapes))
    given = [recorder.array(1 + k, each, dtype).reshape(-1) for k, each in enumerate(shapes)]
    into = []
    for name, shape, need in zip(
        FilterGrads._fields, _gradient_shapes(b, a, x, starts, needs), needs, strict=True
    ):
        each = recorder.result(name, shape, dtype) if need else np.empty(shape, dtype)
        into.append(each.reshape(-1))
    if needs[3]:
        recorder.launch(fill_with, into[3], 0)
    _write_gradients(recorder, sizes, needs, given, into)
    return Recorded(recorder.recording(), space.nbytes)


def _factor_shapes(b: Shape, a: Shape, before: int) -> list[Shape]:
    return [(n, t + before if n == 1 < t else t, taps) for n, t, taps in (b, a)]


# -- Shapes ----------------------------------------------------------------------------------------


def read_lfilter(b: Shape, a: Shape, x: Shape, axis: Any, zi: Shape | None) -> tuple[int, Shape]:
    """Return the axis of time, counted from the last one, and the axes that all have but that.

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
    """Return what :func:`read_lfilter` does, for a cascade of sections."""
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


def is_per_sample(lead: Shape) -> bool:
    """Return whether coefficients with these leading axes differ from sample to sample."""
    return any(n != 1 for n in lead)


def _read_axis(axis: Any, count: int) -> int:
    """Return an axis as it is counted from the last one."""
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise InputTypeError(f"axis is {short(axis)}; expected an int")
    if not -count <= axis < count:
        raise InputError(f"axis is {axis}; expected an axis of x, which has {count}")
    return int(axis) if axis < 0 else int(axis) - count


def _read_batch(x: Shape, axis: int, **coefficients: Shape) -> Shape:
    """Return the axes that all have but that of time."""
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
    """Return the shape that two shapes broadcast to, if they do."""
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

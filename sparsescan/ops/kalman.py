"""Linear Gaussian state spaces: log-likelihoods, filters and smoothers, and what shapes they take.

    y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    v_t ~ N(0, R_t), w_t ~ N(0, Q_t)

An operation takes observations (steps, series, observed), `transition`, `observation`, both
covariances and offsets with two axes in front, of steps and of series, either of which may be 1,
and mean and covariance of the first states with one, of series. The first result is the
log-likelihood of each series, which keeps means and covariances before segments of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InputError
from ..execution.calls import Calls
from ..kernels.cpu import kalman as kernels
from ..kernels.cpu.copies import add_up_rows, copy_into, fill_with
from ..kernels.cpu.kalman import Model, ModelGradients, Moments, layout
from ..kernels.cpu.lanes import lanes
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, memory, ranges_of, share_out

Array = NDArray[Any]

NAMES = (
    *("observations", "transition", "observation"),
    *("transition_covariance", "observation_covariance", "initial_covariance"),
    *("initial_mean", "transition_offset", "observation_offset"),
)
# Those that may be missing, and those of the first states, which have no axis of steps.
OPTIONAL = NAMES[6:]
_INITIAL = "initial_covariance", "initial_mean"
# Kernels have other places: f, h, q, r, c, d, m, p.
_ORDER = (1, 2, 3, 4, 7, 8, 6, 5)

# Numbers that may be kept before steps, so that few are computed again; the least and the most
# steps of a segment, and numbers of all covariances in it, which the second cache holds.
_KEPT, _LEAST, _MOST, _CACHED = 1 << 20, 8, 64, 1 << 15


class Filtered(NamedTuple):
    """What :func:`sparsescan.statespace.kalman_filter` returns, with an axis of series if given.

    Attributes
    ----------
    log_likelihood : array, shape (series,)
        The log-likelihood of each series.
    means : array, shape (steps, series, states)
        The mean of each state, given the observations up to that step.
    covariances : array, shape (steps, series, states, states)
        Its covariance.
    predicted_means, predicted_covariances : array
        Those given the observations before that step.
    """

    log_likelihood: Any
    means: Any
    covariances: Any
    predicted_means: Any
    predicted_covariances: Any


class Smoothed(NamedTuple):
    """What :func:`sparsescan.statespace.kalman_smoother` returns, with an axis of series if given.

    Attributes
    ----------
    log_likelihood : array, shape (series,)
        The log-likelihood of each series.
    means : array, shape (steps, series, states)
        The mean of each state, given all observations.
    covariances : array, shape (steps, series, states, states)
        Its covariance.
    cross_covariances : array, shape (steps - 1, series, states, states)
        The covariance of each state but the first with the one before: the rows are those of the
        later one.
    """

    log_likelihood: Any
    means: Any
    covariances: Any
    cross_covariances: Any


def named_model(function: str, observations: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names; None for those that are not given."""
    for name in model:
        if name not in NAMES[1:]:
            raise TypeError(f"{function} has no argument {name!r}")
    for name in NAMES[1:]:
        if name not in model and name not in OPTIONAL:
            raise TypeError(f"{function} needs an argument {name!r}")
    return {"observations": observations, **{name: model.get(name) for name in NAMES[1:]}}


def axes_of(name: str, states: Any, observed: Any) -> tuple[Any, ...]:
    """Return the last axes of an argument."""
    return {
        "observations": (observed,),
        "transition": (states, states),
        "observation": (observed, states),
        "transition_covariance": (states, states),
        "observation_covariance": (observed, observed),
        "initial_covariance": (states, states),
        "initial_mean": (states,),
        "transition_offset": (states,),
        "observation_offset": (observed,),
    }[name]


def whole(given: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Return arguments as the operation takes them, and whether there is an axis of series.

    Raises
    ------
    InputError
        If the shapes do not fit each other.
    """
    shapes = {name: tuple(each.shape) for name, each in given.items() if each is not None}
    y, h = shapes["observations"], shapes["observation"]
    if len(y) not in (2, 3):
        raise InputError(
            f"observations has shape {y}; expected (steps, observed) or (steps, series, observed)"
        )
    if len(h) < 2 or 0 in h[-2:]:
        raise InputError(f"observation has shape {h}; expected (observed, states), none of them 0")
    (observed, states), steps = h[-2:], y[0]
    series = y[1] if len(y) == 3 else 1
    if y[-1] != observed:
        raise InputError(
            f"observations has shape {y}; expected {observed} as its last axis, as observation has "
            f"shape {h}"
        )
    arrays: list[Any] = []
    for name in NAMES:
        if name not in shapes:
            arrays.append(None)
            continue
        shape, each = shapes[name], given[name]
        last = axes_of(name, states, observed)
        lead = shape[: len(shape) - len(last)]
        if name == "observations":
            arrays.append(each.reshape(steps, series, observed))
            continue
        is_first = name in _INITIAL
        known = ((), (1,), (series,)) if is_first else ((), (1,), (steps,))
        if shape[len(lead) :] != last or not (
            lead in known
            or (
                not is_first and len(lead) == 2 and lead[0] in (1, steps) and lead[1] in (1, series)
            )
        ):
            more = "(series, …)" if is_first else "(steps, …) or (steps, series, …)"
            raise InputError(
                f"{name} has shape {shape}; expected {last}, or {more} with {steps} steps and "
                f"{series} series, or 1 in place of either"
            )
        lead = (lead or (1,)) if is_first else (*(lead or (1,)), 1)[:2]
        arrays.append(each.reshape(*lead, *last))
    return arrays, len(y) == 3


# -- Kernel calls ----------------------------------------------------------------------------------


def _segment(steps: int, series: int, states: int) -> int:
    """Return how many steps a segment has."""
    size = states * (states + 1)
    least = _LEAST
    while least < _MOST and steps * series * size > _KEPT * least:
        least *= 2
    return max(1, min(least, _CACHED // size))


def _read(given: Sequence[Any]) -> Model:
    """Return what kernels are told."""
    (steps, series, observed), states = given[0].shape, given[1].shape[-1]
    none = np.empty(0, given[0].dtype)
    own = [given[k] for k in _ORDER]
    sizes = [math.prod(axes_of(NAMES[k], states, observed)) for k in _ORDER]
    in_series, in_time = [], []
    for place, (each, size) in enumerate(zip(own, sizes, strict=True)):
        shape = (1, 1) if each is None else each.shape[: 1 if place >= 6 else 2]
        count = shape[-1]
        in_series.append(size if count > 1 or series == 1 else 0)
        in_time.append(size * count if place < 6 and shape[0] > 1 else 0)
    arrays = [none if each is None else each.reshape(-1) for each in own]
    return Model(
        steps,
        series,
        states,
        observed,
        _segment(steps, series, states),
        int(not any(in_time[:4])),
        tuple(in_time),
        tuple(in_series),
        given[0].reshape(-1),
        *arrays,
    )


def _run(
    calls: Calls,
    kernel: Callable[..., None],
    model: Model,
    kept: int,
    ends: tuple[int, int],
    *arrays: Any,
) -> None:
    room: Any = layout(model.states, model.observed, kept, lanes(np.dtype(np.float64)))
    scratch = calls.borrow(room.size, np.float64)
    calls.launch(kernel, model, room, *ends, *arrays, scratch)
    calls.give_back(scratch)


def _work(model: Model) -> int:
    return model.steps * model.series * model.states**2


def forward(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write the log-likelihoods, and what is kept, if it `keeps`."""
    shapes, dtype = _shapes(form, [None if x is None else x.shape for x in given]), given[0].dtype
    names = ("out", "kept")[: 1 + keeps]
    results = [calls.result(*about, dtype) for about in zip(names, shapes, strict=False)]
    model = _read(given)
    kept = results[1].reshape(-1) if keeps else np.empty(0, dtype)
    _walk(calls, model, results[0].reshape(-1), kept, _moments(dtype))
    return results


def _moments(dtype: DTypeLike, *arrays: Array) -> Moments:
    """Return arrays, the first ones of moments, as kernels take them."""
    rest = [np.empty(0, dtype)] * (5 - len(arrays))
    return Moments(*[each.reshape(-1) for each in (*arrays, *rest)])


def _walk(calls: Calls, model: Model, out: Array, kept: Array, filtered: Moments) -> None:
    """Call the kernel of the forward pass."""
    run = partial(_run, calls, kernels.forward, model, 1)
    share_out(
        calls,
        _work(model),
        [partial(run, ends, out, kept, filtered) for ends in ranges_of(model.series)],
    )


def _filter(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write log-likelihoods, and moments of filtered and predicted states."""
    shapes, dtype = (
        _filter_shapes(form, [None if x is None else x.shape for x in given]),
        given[0].dtype,
    )
    results = [calls.result(*about, dtype) for about in zip(Filtered._fields, shapes, strict=True)]
    out, *moments = results
    _walk(calls, _read(given), out.reshape(-1), np.empty(0, dtype), _moments(dtype, *moments))
    return results


def _smooth(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write log-likelihoods, and moments of smoothed states."""
    own, dtype = [None if x is None else x.shape for x in given], given[0].dtype
    shapes, nothing, none = _smoother_shapes(form, own), _moments(dtype), np.empty(0, dtype)
    results = [calls.result(*about, dtype) for about in zip(Smoothed._fields, shapes, strict=True)]
    model, (out, means, covariances, cross) = _read(given), results
    kept = memory(calls, _shapes(form, own)[1], np.float64).reshape(-1)
    _walk(calls, model, out.reshape(-1), kept, nothing)
    smoothed = _moments(dtype, means, covariances, none, none, cross)
    run = partial(_run, calls, kernels.backward, model, model.segment)
    # Gradients that nobody needs, from those in what no kernel reads.
    rest = out.reshape(-1), kept, ModelGradients(*[none] * 9), (0,) * 8, nothing, smoothed
    share_out(calls, _work(model), [partial(run, ends, *rest) for ends in ranges_of(model.series)])
    return results


def backward(
    calls: Calls,
    form: tuple[()],
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    """Write the gradients that are needed."""
    model, dtype, none = _read(given), kept.dtype, np.empty(0, kept.dtype)
    ranges, into, bases = ranges_of(model.series), [], []
    results = [
        calls.result(name, array.shape, dtype) if need else None
        for name, array, need in zip(NAMES, given, needs, strict=True)
    ]
    shared = []
    for place, k in enumerate((0, *_ORDER)):
        own = results[k]
        is_shared = k > 0 and model.in_series[place - 1] == 0
        if own is not None and is_shared:
            parts = calls.zeros(len(ranges) * own.size, np.float64)
            shared.append((own, parts))
            into.append(parts)
        else:
            into.append(none if own is None else own.reshape(-1))
            if own is not None:
                calls.launch(fill_with, into[-1], 0)
        bases.append(own.size if own is not None and is_shared else 0)
    # Arrays of one type each, whatever is needed.
    arrays, nothing = ModelGradients(*into), _moments(dtype)
    run = partial(_run, calls, kernels.backward, model, model.segment)
    tasks: list[Callable[[], None]] = []
    for k, ends in enumerate(ranges):
        begin = tuple(k * size for size in bases[1:])
        read = above[0].reshape(-1), kept.reshape(-1)
        tasks.append(partial(run, ends, *read, arrays, begin, nothing, nothing))
    share_out(calls, _work(model), tasks)
    for own, parts in shared:
        total = calls.room(own.size, np.float64)
        calls.launch(add_up_rows, total, parts)
        calls.launch(copy_into, own.reshape(-1), total)
    return [each for each in results if each is not None]


# -- The operation ---------------------------------------------------------------------------------


def _plain(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return the log-likelihoods step by step."""
    return [_steps(xp, given, _rows(xp, given), False)[0]]


def _rows(xp: Functions, given: Sequence[Any]) -> list[Any]:
    """Return what belongs to steps: observations, where these are missing, matrices and offsets."""
    y, *matrices, _, _, c, d = given
    is_missing = xp.isnan(y)
    y = xp.where(is_missing, xp.filled(y, (1, 1, 1), 0), y)
    rest = [
        None if each is None else xp.broadcast_to(each, (len(y), *each.shape[1:]))
        for each in (*matrices, c, d)
    ]
    return [y, is_missing, *rest]


def _turned(xp: Functions, x: Any) -> Any:
    return xp.moveaxis(x, -2, -1)


def _times(xp: Functions, matrix: Any, x: Any) -> Any:
    return xp.matmul(matrix, x[..., None])[..., 0]


def _observe(xp: Functions, mean: Any, p: Any, *row: Any) -> tuple[Any, ...]:
    """Return what an update computes, by letters of kernels, and mean and covariance after it."""
    y, missing, _, h, _, r, _, d = row
    none = xp.filled(y, (1, 1, 1), 0)
    eye = xp.eye(y, y.shape[-1])
    h = xp.where(missing[..., None], none, h)
    both = missing[..., None] | missing[..., None, :]
    r = xp.where(both, eye * xp.where(both, none + 1, none), (r + _turned(xp, r)) / 2)
    seen = _times(xp, h, mean)
    if d is not None:
        seen = seen + xp.where(missing, none[0], d)
    hp = xp.matmul(h, p)
    s = xp.matmul(hp, _turned(xp, h)) + r
    low = xp.linalg.inv(xp.linalg.cholesky((s + _turned(xp, s)) / 2))
    gain = _turned(xp, xp.matmul(_turned(xp, low), xp.matmul(low, hp)))
    left = xp.eye(y, p.shape[-1]) - xp.matmul(gain, h)
    after = mean + _times(xp, gain, y - seen)
    p = xp.matmul(xp.matmul(left, p), _turned(xp, left))
    p = p + xp.matmul(xp.matmul(gain, r), _turned(xp, gain))
    return h, low, _times(xp, low, y - seen), gain, left, after, p


def _steps(
    xp: Functions, given: Sequence[Any], rows: Sequence[Any], keeps: bool
) -> tuple[Any, list[Any]]:
    """Return log-likelihoods, and if it `keeps` them moments of states after and before updates."""
    y, p, m = given[0], given[5], given[6]
    series, states = y.shape[1], p.shape[-1]

    def step(before: Any, *row: Any) -> Any:
        (mean, p, found), (f, q, c) = before, row[2::2]
        _, low, z, _, _, after, p_after = _observe(xp, mean, p, *row)
        none = xp.filled(z, (1, 1), 0)
        there = xp.where(row[1], none, none + 1).sum(-1)
        found = found - (z * z).sum(-1) / 2 - there * (0.5 * math.log(2 * math.pi))
        found = found + xp.log((low * xp.eye(z, z.shape[-1])).sum(-1)).sum(-1)
        kept = _joined(xp, after, p_after, mean, p) if keeps else found
        mean = _times(xp, f, after)
        mean = mean if c is None else mean + c
        p = xp.matmul(xp.matmul(f, p_after), _turned(xp, f)) + (q + _turned(xp, q)) / 2
        return (mean, p, found), kept

    begin = xp.filled(y, (series, states), 0)
    p = xp.broadcast_to((p + _turned(xp, p)) / 2, (series, states, states))
    start = begin if m is None else begin + m, p, xp.filled(y, (series,), 0)
    (_, _, found), kept = xp.loop(step, start, rows)
    return found, _parted(xp, y, kept, (1, 2, 1, 2), states) if keeps else []


def _joined(xp: Functions, *arrays: Any) -> Any:
    """Return vectors and matrices of states of series, side by side."""
    return xp.concat([each.reshape(len(each), math.prod(each.shape[1:])) for each in arrays], -1)


def _parted(xp: Functions, y: Any, kept: Any, kinds: Sequence[int], states: int) -> list[Any]:
    """Return vectors and matrices, as `kinds` say, of steps that are side by side."""
    steps, series = y.shape[:2]
    ends = [0, *accumulate(states**kind for kind in kinds)]
    if steps == 0:
        kept = xp.filled(y, (0, series, ends[-1]), 0)
    return [
        kept[..., begin:end].reshape(steps, series, *[states] * kind)
        for (begin, end), kind in zip(pairwise(ends), kinds, strict=True)
    ]


def _plain_filter(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return log-likelihoods, and moments of filtered and predicted states, step by step."""
    found, moments = _steps(xp, given, _rows(xp, given), True)
    return [found, *moments]


def _plain_smoother(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return log-likelihoods, and moments of smoothed states, step by step."""
    y, states, rows = given[0], given[5].shape[-1], _rows(xp, given)
    found, (_, _, means, covariances) = _steps(xp, given, rows, True)

    def step(before: Any, *row: Any) -> Any:
        (above, n), own = before, row[:-2]
        f, q = own[2], (own[4] + _turned(xp, own[4])) / 2
        h, low, z, gain, left, after, p = _observe(xp, *row[-2:], *own)
        pulled, nf = _times(xp, _turned(xp, f), above), xp.matmul(n, f)
        a, fp = xp.matmul(_turned(xp, f), nf), xp.matmul(f, p)
        ahead = xp.matmul(fp, _turned(xp, f)) + q
        out = _joined(
            xp,
            after + _times(xp, p, pulled),
            p - xp.matmul(xp.matmul(p, a), p),
            fp - xp.matmul(ahead, xp.matmul(nf, p)),
        )
        u = _times(xp, _turned(xp, low), z) - _times(xp, _turned(xp, gain), pulled)
        lh = xp.matmul(low, h)
        n = xp.matmul(xp.matmul(_turned(xp, left), a), left) + xp.matmul(_turned(xp, lh), lh)
        return (pulled + _times(xp, _turned(xp, h), u), n), out

    begin = xp.filled(y, (y.shape[1], states), 0), xp.filled(y, (y.shape[1], states, states), 0)
    back = [None if each is None else xp.flip(each, (0,)) for each in (*rows, means, covariances)]
    kept = xp.loop(step, begin, back)[1]
    *moments, cross = [xp.flip(each, (0,)) for each in _parted(xp, y, kept, (1, 2, 2), states)]
    return [found, *moments, cross[: max(len(y) - 1, 0)]]


def _read_shapes(shapes: Shapes) -> tuple[Shape, int]:
    """Return the shape of observations, and the number of states."""
    y, f = shapes[0], shapes[1]
    assert y is not None
    assert f is not None
    return y, f[-1]


def _shapes(form: tuple[()], shapes: Shapes) -> list[Shape]:
    (steps, series, _), states = _read_shapes(shapes)
    segments = -(-steps // _segment(steps, series, states))
    return [(series,), (segments, series, states * (states + 1) + 1)]


def _filter_shapes(form: tuple[()], shapes: Shapes) -> list[Shape]:
    (steps, series, _), states = _read_shapes(shapes)
    moments = (steps, series, states), (steps, series, states, states)
    return [(series,), *moments, *moments]


def _smoother_shapes(form: tuple[()], shapes: Shapes) -> list[Shape]:
    (steps, series, _), states = _read_shapes(shapes)
    square = series, states, states
    return [(series,), (steps, series, states), (steps, *square), (max(steps - 1, 0), *square)]


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of series."""
    y: Any = shapes[0]
    places = [int(name not in _INITIAL) for name in NAMES]
    return [
        MappedAxis(k, y[1], n > 0 and shape is not None and shape[k] == 1)
        for n, (k, shape) in enumerate(zip(places, shapes, strict=True))
    ]


def _check(form: tuple[()], shapes: Shapes) -> None:
    y, h = shapes[0], shapes[2]
    if y is None or h is None or len(y) != 3 or len(h) != 4:
        raise InputError(f"observations has shape {y}; expected (steps, series, observed)")
    for name, shape in zip(NAMES[1:], shapes[1:], strict=True):
        last = axes_of(name, h[-1], y[2])
        lead = ((1, y[1]),) if name in _INITIAL else ((1, y[0]), (1, y[1]))
        if shape is not None and (
            shape[len(lead) :] != last
            or any(own not in known for own, known in zip(shape, lead, strict=False))
        ):
            raise InputError(
                f"{name} has shape {shape}; expected {(*y[:2], *last)[-len(lead) - len(last) :]}"
            )


LOG_LIKELIHOOD = Operation(
    name="kalman_log_likelihood",
    inputs=tuple(f"{name}?" if name in OPTIONAL else name for name in NAMES),
    encode=lambda form: ([], []),
    decode=lambda numbers, tables: (),
    shapes=_shapes,
    forward=forward,
    backward=backward,
    plain=_plain,
    axes=_axes,
    out_axes=(0, 1),
    reads=tuple(range(9)),
    results=1,
    kept=1,
    check=_check,
)
FILTER = replace(
    LOG_LIKELIHOOD,
    name="kalman_filter",
    shapes=_filter_shapes,
    forward=_filter,
    backward=None,
    plain=_plain_filter,
    out_axes=(0, 1, 1, 1, 1),
    results=5,
    kept=0,
)
SMOOTHER = replace(
    FILTER,
    name="kalman_smoother",
    shapes=_smoother_shapes,
    forward=_smooth,
    plain=_plain_smoother,
    out_axes=(0, 1, 1, 1),
    results=4,
)


def likelihood(xp: Functions, given: Mapping[str, Any]) -> Any:
    """Return the log-likelihoods of arguments by their names, by the functions of a library."""
    return _run_all(xp, LOG_LIKELIHOOD, given)[0]


def kalman_filter(xp: Functions, given: Mapping[str, Any]) -> Filtered:
    """Return moments of filtered states of arguments by their names."""
    return Filtered(*_run_all(xp, FILTER, given))


def kalman_smoother(xp: Functions, given: Mapping[str, Any]) -> Smoothed:
    """Return moments of smoothed states of arguments by their names."""
    return Smoothed(*_run_all(xp, SMOOTHER, given))


def _run_all(xp: Functions, operation: Operation, given: Mapping[str, Any]) -> Sequence[Any]:
    arrays, has_series = whole(given)
    return with_axis(xp.run(operation, (), *arrays), has_series)


def with_axis(found: Sequence[Any], has_series: bool) -> Sequence[Any]:
    """Return results, with their axis of series if arguments had one."""
    first, *rest = found
    return found if has_series else [first[0], *[each[:, 0] for each in rest]]

"""The log-likelihood of a linear Gaussian state space: the operation, and what shapes it takes.

    y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    v_t ~ N(0, R_t), w_t ~ N(0, Q_t)

The operation takes observations (steps, series, observed), `transition`, `observation`, both
covariances and offsets with two axes in front, of steps and of series, either of which may be 1,
and mean and covariance of the first states with one, of series. It returns the log-likelihood of
each series, and keeps means and covariances before segments of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..execution.calls import Calls
from ..execution.threads import thread_count
from ..kernels.cpu import kalman as kernels
from ..kernels.cpu.copies import add_up_rows, copy_into, fill_with
from ..kernels.cpu.kalman import Model, ModelGradients, layout
from ..kernels.cpu.lanes import lanes
from .operation import Functions, MappedAxis, Operation, Shape, Shapes

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
# Ranges of series, whose gradients in what they share are added up: as many for any threads.
_RANGES = 8
_GRAIN = 1 << 14


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


def _ranges(model: Model) -> list[tuple[int, int]]:
    """Return ranges of series, which threads share: the same for any number of these."""
    count = min(model.series, _RANGES)
    ends = [model.series * k // count for k in range(count + 1)]
    return list(pairwise(ends))


def _share(calls: Calls, model: Model, tasks: list[Callable[[], None]]) -> None:
    work = model.steps * model.series * model.states**2
    if len(tasks) > 1 and thread_count() > 1 and work >= _GRAIN:
        calls.together(tasks)
        return
    for task in tasks:
        task()


def forward(calls: Calls, form: tuple[()], given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write the log-likelihoods, and what is kept, if it `keeps`."""
    shapes, dtype = _shapes(form, [None if x is None else x.shape for x in given]), given[0].dtype
    names = ("out", "kept")[: 1 + keeps]
    results = [calls.result(*about, dtype) for about in zip(names, shapes, strict=False)]
    model = _read(given)
    arrays = [*[each.reshape(-1) for each in results], np.empty(0, dtype)][:2]
    run = partial(_run, calls, kernels.forward, model, 1)
    _share(calls, model, [partial(run, ends, *arrays) for ends in _ranges(model)])
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
    ranges, into, bases = _ranges(model), [], []
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
    arrays = ModelGradients(*into)
    run = partial(_run, calls, kernels.backward, model, model.segment)
    tasks: list[Callable[[], None]] = []
    for k, ends in enumerate(ranges):
        begin = tuple(k * size for size in bases[1:])
        tasks.append(partial(run, ends, above[0].reshape(-1), kept.reshape(-1), arrays, begin))
    _share(calls, model, tasks)
    for own, parts in shared:
        total = calls.room(own.size, np.float64)
        calls.launch(add_up_rows, total, parts)
        calls.launch(copy_into, own.reshape(-1), total)
    return [each for each in results if each is not None]


# -- The operation ---------------------------------------------------------------------------------


def _plain(xp: Functions, form: tuple[()], *given: Any) -> list[Any]:
    """Return the log-likelihoods step by step."""
    y, *matrices, p, m, c, d = given
    (steps, series, observed), states = y.shape, p.shape[-1]
    is_missing = xp.isnan(y)
    y = xp.where(is_missing, xp.filled(y, (1, 1, 1), 0), y)
    eye = xp.eye(y, observed)
    rows = [
        None if each is None else xp.broadcast_to(each, (steps, *each.shape[1:]))
        for each in (*matrices, c, d)
    ]

    def step(
        before: Any, y: Any, missing: Any, f: Any, h: Any, q: Any, r: Any, c: Any, d: Any
    ) -> Any:
        mean, p, found = before
        none = xp.filled(y, (1, 1, 1), 0)
        h = xp.where(missing[..., None], none, h)
        both = missing[..., None] | missing[..., None, :]
        r = xp.where(both, eye * xp.where(both, none + 1, none), (r + xp.moveaxis(r, 1, 2)) / 2)
        seen = xp.matmul(h, mean[..., None])[..., 0]
        if d is not None:
            seen = seen + xp.where(missing, none[0], d)
        hp = xp.matmul(h, p)
        s = xp.matmul(hp, xp.moveaxis(h, 1, 2)) + r
        factor = xp.linalg.cholesky((s + xp.moveaxis(s, 1, 2)) / 2)
        inverse = xp.linalg.inv(factor)
        z = xp.matmul(inverse, (y - seen)[..., None])[..., 0]
        diagonal = (factor * eye).sum(-1)
        there = xp.where(missing, none[0], none[0] + 1).sum(-1)
        found = found - (z * z).sum(-1) / 2 - xp.log(diagonal).sum(-1)
        found = found - there * (0.5 * math.log(2 * math.pi))
        w = xp.matmul(inverse, hp)
        gain = xp.moveaxis(xp.matmul(xp.moveaxis(inverse, 1, 2), w), 1, 2)
        mean = mean + xp.matmul(gain, (y - seen)[..., None])[..., 0]
        left = xp.eye(y, states) - xp.matmul(gain, h)
        p = xp.matmul(xp.matmul(left, p), xp.moveaxis(left, 1, 2))
        p = p + xp.matmul(xp.matmul(gain, r), xp.moveaxis(gain, 1, 2))
        mean = xp.matmul(f, mean[..., None])[..., 0]
        mean = mean if c is None else mean + c
        p = xp.matmul(xp.matmul(f, p), xp.moveaxis(f, 1, 2)) + (q + xp.moveaxis(q, 1, 2)) / 2
        return (mean, p, found), found

    begin = xp.filled(y, (series, states), 0)
    p = xp.broadcast_to((p + xp.moveaxis(p, 1, 2)) / 2, (series, states, states))
    start = begin if m is None else begin + m, p, xp.filled(y, (series,), 0)
    (_, _, found), _ = xp.loop(step, start, [y, is_missing, *rows])
    return [found]


def _shapes(form: tuple[()], shapes: Shapes) -> list[Shape]:
    y, f = shapes[0], shapes[1]
    assert y is not None
    assert f is not None
    (steps, series, _), states = y, f[-1]
    segments = -(-steps // _segment(steps, series, states))
    return [(series,), (segments, series, states * (states + 1) + 1)]


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


def likelihood(xp: Functions, given: Mapping[str, Any]) -> Any:
    """Return the log-likelihoods of arguments by their names, by the functions of a library."""
    arrays, has_series = whole(given)
    (found,) = xp.run(LOG_LIKELIHOOD, (), *arrays)
    return found if has_series else found[0]

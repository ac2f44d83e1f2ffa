"""Hidden Markov models: the log-likelihood of series as an operation, and what shapes it takes.

The operation takes logarithms of emissions (steps, series, states), `initial` (series, states) and
`transition` (steps, series, states, states), or in place of the last two axes the values of a
pattern, which is its form; and lengths of series, as numbers of the same dtype. Each axis of steps
or series but those of emissions and lengths may be 1. It returns the log-likelihood of each series,
and keeps what is known of states at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from ..execution.calls import Calls
from ..kernels.cpu import hmm as kernels
from ..kernels.cpu.copies import add_up_rows, copy_into, fill_with
from ..kernels.cpu.hmm import HiddenChain, HiddenGradients, layout
from ..kernels.cpu.lanes import lanes
from ..symbolic.pattern import Pattern, keys_of, trusted
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, ranges_of, share_out

Array = NDArray[Any]

NAMES = "log_emissions", "initial", "transition", "lengths"
OPTIONAL = NAMES[3:]
# Whole numbers up to this one are exact in float32.
_EXACT = 1 << 24


class Form(NamedTuple):
    """The pattern of transitions, or None if matrices are dense."""

    pattern: Pattern | None


def whole(
    given: Mapping[str, Any], pattern: Pattern | None, cast: Callable[[Any, Any], Any]
) -> tuple[list[Any], bool]:
    """Return arguments as the operation takes them, and whether there is an axis of series.

    ``cast(lengths, emissions)`` returns lengths in the dtype of emissions.

    Raises
    ------
    InputError, InputTypeError
        If the shapes do not fit each other.
    """
    if pattern is not None and not isinstance(pattern, Pattern):
        raise InputTypeError(f"pattern is {short(pattern)}; expected a sparsescan.Pattern")
    e, initial, a, lengths = (given[name] for name in NAMES)
    shape = tuple(e.shape)
    if len(shape) not in (2, 3) or shape[-1] == 0:
        raise InputError(
            f"log_emissions has shape {shape}; expected (steps, states) or (steps, series, states)"
        )
    steps, states, has_series = shape[0], shape[-1], len(shape) == 3
    series = shape[1] if has_series else 1
    if tuple(initial.shape) not in ((states,), (1, states), (series, states)):
        raise InputError(
            f"initial has shape {tuple(initial.shape)}; expected ({states},) or ({series}, "
            f"{states}), as log_emissions has shape {shape}"
        )
    square = states, states
    if pattern is not None and pattern.shape != square:
        raise InputError(f"pattern has shape {pattern.shape}; expected {square}")
    last = square if pattern is None else (pattern.nnz,)
    own = tuple(a.shape)
    lead = own[: len(own) - len(last)]
    if own[len(lead) :] != last or not (
        lead in ((), (1,), (steps,))
        or (len(lead) == 2 and lead[0] in (1, steps) and lead[1] in (1, series))
    ):
        raise InputError(
            f"transition has shape {own}; expected {last}, or (steps, …) or (steps, series, …) "
            f"with {steps} steps and {series} series, or 1 in place of either"
        )
    if lengths is not None and tuple(lengths.shape) != ((series,) if has_series else ()):
        raise InputError(
            f"lengths has shape {tuple(lengths.shape)}; expected {(series,) if has_series else ()}"
        )
    if lengths is not None and steps > _EXACT and "32" in str(e.dtype):
        raise InputError(
            f"log_emissions has {steps:,} steps; with lengths float32 counts {_EXACT:,}"
        )
    lead = (*(lead or (1,)), 1)[:2]
    arrays = [
        e.reshape(steps, series, states),
        initial.reshape(math.prod(initial.shape) // states, states),
        a.reshape(*lead, *last),
        None if lengths is None else cast(lengths, e).reshape(series),
    ]
    return arrays, has_series


def check_values(form: Form, given: Sequence[Array | None]) -> None:
    """Raise if a probability is negative, or a length is none of a series."""
    for name, array in zip(NAMES[1:3], given[1:3], strict=True):
        if array is not None and (array < 0).any():
            raise InputError(f"{name} has {array[array < 0][0]}; expected numbers that are not < 0")
    e, lengths = given[0], given[3]
    if lengths is not None and e is not None:
        wrong = lengths[~((lengths >= 0) & (lengths <= len(e)))]
        if wrong.size:
            raise InputError(f"lengths has {wrong[0]:g}; expected numbers from 0 to {len(e)}")


# -- Kernel calls ----------------------------------------------------------------------------------


def read(form: Form, given: Sequence[Any]) -> HiddenChain:
    """Return what kernels are told."""
    e, initial, a, lengths = given
    steps, series, states = e.shape
    size = math.prod(a.shape[2:])
    none = np.empty(0, np.int32)
    return HiddenChain(
        steps=steps,
        series=series,
        states=states,
        in_time=size * a.shape[1] if a.shape[0] > 1 else 0,
        in_series=size if a.shape[1] > 1 or series == 1 else 0,
        in_first=states if len(initial) > 1 or series == 1 else 0,
        e=e.reshape(-1),
        first=initial.reshape(-1),
        a=a.reshape(-1),
        lengths=np.empty(0, e.dtype) if lengths is None else lengths,
        indptr=none if form.pattern is None else form.pattern.indptr,
        indices=none if form.pattern is None else form.pattern.indices,
    )


def _tasks(
    calls: Calls, form: Form, chain: HiddenChain, kernel: Any, *arrays: Any
) -> list[Callable[..., None]]:
    """Return functions that call a kernel for a range of series each, with more arguments."""
    width = lanes(np.dtype(np.float64))
    room: Any = layout(chain.states, 0 if form.pattern is None else form.pattern.nnz, width)

    def call(ends: tuple[int, int], *more: Any) -> None:
        scratch = calls.borrow(room.size, np.float64)
        calls.launch(kernel, chain, room, *ends, *arrays, *more, scratch)
        calls.give_back(scratch)

    return [partial(call, ends) for ends in ranges_of(chain.series)]


def work_of(chain: HiddenChain) -> int:
    """Return how much there is to do."""
    return chain.steps * chain.series * chain.states**2


def forward(calls: Calls, form: Form, given: Sequence[Any], keeps: bool) -> list[Array]:
    """Write the log-likelihoods, and what is kept, if it `keeps`."""
    e = given[0]
    results = [calls.result("out", (e.shape[1],), e.dtype)]
    kept = np.empty(0, e.dtype)
    if keeps:
        kept = calls.result("kept", e.shape, e.dtype)
        results.append(kept)
    chain = read(form, given)
    arrays = results[0], kept.reshape(-1)
    share_out(calls, work_of(chain), _tasks(calls, form, chain, kernels.forward, *arrays))
    return results


def backward(
    calls: Calls,
    form: Form,
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    """Write the gradients that are needed."""
    chain, dtype = read(form, given), kept.dtype
    results = [
        calls.result(name, array.shape, dtype) if need else None
        for name, array, need in zip(NAMES, given, needs, strict=True)
    ]
    ranges, into, sizes, shared = ranges_of(chain.series), [], [], []
    for own, is_shared in zip(
        results[:3], (False, chain.in_first == 0, chain.in_series == 0), strict=True
    ):
        is_shared &= own is not None
        if own is not None and is_shared:
            into.append(calls.zeros(len(ranges) * own.size, np.float64))
            shared.append((own, into[-1]))
        else:
            into.append(np.empty(0, dtype) if own is None else own.reshape(-1))
            calls.launch(fill_with, into[-1], 0)
        sizes.append(own.size if own is not None and is_shared else 0)
    if results[3] is not None:
        calls.launch(fill_with, results[3], 0)
    arrays = above[0].reshape(-1), kept.reshape(-1), HiddenGradients(*into)
    tasks = _tasks(calls, form, chain, kernels.backward, *arrays)
    pairs = [partial(task, k * sizes[1], k * sizes[2]) for k, task in enumerate(tasks)]
    share_out(calls, work_of(chain), pairs)
    for own, parts in shared:
        total = calls.room(own.size, np.float64)
        calls.launch(add_up_rows, total, parts)
        calls.launch(copy_into, own.reshape(-1), total)
    return [each for each in results if each is not None]


# -- The operation ---------------------------------------------------------------------------------


def _plain(xp: Functions, form: Form, *given: Any) -> list[Any]:
    """Return the log-likelihoods step by step.

    The probability of a state is ``x exp(u) + z exp(v)``. Derivatives are those of `x`, which is 1
    or 0 in value, and of `z`, which is always 0 and is what paths with a zero add; scales `u` and
    `v` are constants, so nothing underflows, and zeros have derivatives, too.
    """
    e, initial, a, lengths = given
    steps, series, states = e.shape
    if steps == 0:
        return [e.sum((0, 2))]
    if form.pattern is not None:
        dense = xp.filled(a, (*a.shape[:2], states**2), 0)
        a = xp.add_at(dense, keys_of(form.pattern), a).reshape(*a.shape[:2], states, states)

    def largest(scales: Any, axis: int) -> Any:
        top = xp.amax(scales, axis)
        return xp.where(top > -math.inf, top, 0.0)

    def passed(old: Sequence[Any], a: Any) -> list[Any]:
        """Return `x`, `u`, `z` and `v` behind a transition."""
        x, u, z, v = old
        size = xp.detach(x)[..., None] * xp.detach(a)
        u, v = (xp.broadcast_to(each[..., None], size.shape) for each in (u, v))
        # Where there is a path, and where only a zero is in the way.
        lit = xp.where(size > 0, u, -math.inf)
        dark = xp.where((size > 0) | (xp.detach(x)[..., None] == 0), -math.inf, u)
        top = largest(lit, 1)
        total = (size * xp.exp(lit - top[:, None])).sum(1)
        top = top + xp.log(xp.where(total > 0, total, 1.0))
        other = xp.amax(xp.where(dark > v, dark, v), 1)
        shift = xp.where(other > -math.inf, other, 0.0)[:, None]
        flow = x[..., None] * a
        zeros = flow * xp.exp(dark - shift) + z[..., None] * a * xp.exp(v - shift)
        return [(flow * xp.exp(lit - top[:, None])).sum(1), top, zeros.sum(1), other]

    def emitted(old: Sequence[Any], e: Any) -> tuple[list[Any], Any]:
        """Return `x`, `u`, `z` and `v` after emissions, and what is taken from scales."""
        x, u, z, v = old
        known = xp.detach(e)
        floor = xp.where(known > -math.inf, known, 0.0)
        x, z = x * xp.exp(e - floor), z * xp.exp(e - floor)
        top = largest(xp.where(xp.detach(x) > 0, u + floor, -math.inf), -1)
        return [x, u + floor - top[:, None], z, v + floor - top[:, None]], top

    def step(before: Any, e: Any, a: Any) -> Any:
        old, total, count = before
        new, more = emitted(passed(old, xp.broadcast_to(a, (series, states, states))), e)
        if lengths is not None:
            is_there = count < lengths
            pairs = zip(new, old, strict=True)
            new = [xp.where(is_there[:, None], own, last) for own, last in pairs]
            more = xp.where(is_there, more, 0.0)
        return (new, total + more, count + 1), total

    one, count = xp.filled(e, (series, 1), 1), xp.filled(e, (series,), 1)
    first = xp.broadcast_to(initial, (series, states))[:, None]
    state, total = emitted(passed([one, one - 1, one - 1, one - math.inf], first), e[0])
    rows = [e[1:], xp.broadcast_to(a, (steps, *a.shape[1:]))[:-1]]
    (x, u, z, v), total, _ = xp.loop(step, (state, total, count), rows)[0]
    # What a zero is in the way of may be so much more probable that its derivative is infinite.
    most = 300.0 if "64" in str(e.dtype) else 40.0
    u, v = xp.where(xp.detach(x) > 0, u, -math.inf), xp.where(v > most, most, v)
    found = (x * xp.exp(u) + z * xp.exp(v)).sum(-1)
    is_none = xp.detach(found) == 0
    found = xp.where(is_none, -math.inf, total + xp.log(xp.where(is_none, 1.0, found)))
    return [found if lengths is None else xp.where(lengths > 0, found, 0.0)]


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of series."""
    e: Any = shapes[0]
    pairs = zip((1, 0, 1, 0), shapes, strict=True)
    return [
        MappedAxis(k, e[1], n in (1, 2) and shape is not None and shape[k] == 1)
        for n, (k, shape) in enumerate(pairs)
    ]


def _check(form: Form, shapes: Shapes) -> None:
    e, initial, a, lengths = shapes
    pattern = form.pattern
    last = () if e is None else e[2:] * 2 if pattern is None else (pattern.nnz,)
    if (
        e is None
        or len(e) != 3
        or initial not in ((1, e[2]), e[1:])
        or a is None
        or a[2:] != last
        or a[0] not in (1, e[0])
        or a[1] not in (1, e[1])
        or lengths not in (None, e[1:2])
    ):
        raise InputError(f"arguments have shapes {tuple(shapes)}; expected those of a model")


def _shapes(form: Form, shapes: Shapes) -> list[Shape]:
    e = shapes[0]
    assert e is not None
    return [(e[1],), e]


def _encode(form: Form) -> tuple[list[int], list[Array]]:
    if form.pattern is None:
        return [0], []
    return [form.pattern.shape[0]], [np.array(each) for each in form.pattern.index_arrays()]


def _decode(numbers: Sequence[int], tables: Sequence[Array]) -> Form:
    # The pattern of a fake tensor is not there, and no shape depends on it.
    square = numbers[0], numbers[0]
    return Form(trusted(tables[0], tables[1], square) if tables else None)


LOG_LIKELIHOOD = Operation(
    name="hmm_log_likelihood",
    inputs=(*NAMES[:3], "lengths?"),
    encode=_encode,
    decode=_decode,
    shapes=_shapes,
    forward=forward,
    backward=backward,
    plain=_plain,
    axes=_axes,
    out_axes=(0, 1),
    reads=tuple(range(4)),
    results=1,
    kept=1,
    check=_check,
    check_values=check_values,
)


def likelihood(
    xp: Functions,
    given: Mapping[str, Any],
    pattern: Pattern | None,
    cast: Callable[[Any, Any], Any],
) -> Any:
    """Return the log-likelihoods of arguments by their names, by the functions of a library."""
    arrays, has_series = whole(given, pattern, cast)
    (found,) = xp.run(LOG_LIKELIHOOD, Form(pattern), *arrays)
    return found if has_series else found[0]

"""Selective scans: the operation, and checks of shapes.

    h_t = exp(δ_t A) h_{t-1} + δ_t u_t B_t,    out_t = C_t h_t + D u_t,    δ = delta + delta_bias

The operation takes ``u``, ``delta`` and ``z`` of shape (batch, channels, length), ``A`` (channels,
states), ``B`` and ``C`` (batch, groups, states, length) or (channels, states), ``D`` and
``delta_bias`` (channels,) and initial states (batch, channels, states). It returns the outputs and
the last states. It keeps states before segments: (batch, segments, states, channels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_flag
from ..errors import InputError
from ..execution.calls import Calls
from ..execution.threads import thread_count
from ..kernels.cpu import selective as kernels
from ..kernels.cpu.copies import add_up_parts, transpose_into
from ..kernels.cpu.lanes import lanes
from ..kernels.cpu.selective import (
    BACKWARD_TILES,
    FORWARD_TILES,
    STATE_ROWS,
    SelectiveGradients,
    SelectiveScan,
)
from .operation import Functions, MappedAxis, Operation, Shape, Shapes, memory

Array = NDArray[Any]

# States of steps that are worth another thread, and tasks per thread, so that none waits long.
_GRAIN, _TURNS = 1 << 15, 4
# The least steps of a segment. With more states a segment has as many steps as states, so that the
# kept states are fewer than the numbers of `u`.
_SEGMENT, _MULTIPLE = 32, 16
# The most parts for threads, where sums of a part take more memory than an input.
_TASKS, _LEAST = 64, 4


NAMES = "u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"


class Form(NamedTuple):
    """Whether softplus is applied to the step sizes."""

    softplus: bool


def selective_scan(xp: Functions, given: Sequence[Any], softplus: Any, returns_last: Any) -> Any:
    """Return the outputs, and the last states if asked for; inputs are in the order of `NAMES`.

    It is :func:`sparsescan.torch.selective_scan`, in the functions of any library.
    """
    form = Form(check_flag("delta_softplus", softplus))
    returns_last = check_flag("return_last_state", returns_last)
    shapes: Any = [None if each is None else tuple(each.shape) for each in given]
    check_shapes(*shapes)
    # Inputs that all channels share form one group.
    whole = [
        each[:, None] if k in (3, 4) and each.ndim == 3 else each for k, each in enumerate(given)
    ]
    out, last = xp.run(SELECTIVE_SCAN, form, *whole)
    return (out, last) if returns_last else out


def _segments_of(length: int, states: int) -> int:
    """Return how many segments begin with a kept state: all but the first."""
    return max(length - 1, 0) // _segment(states)


def _segment(states: int) -> int:
    return max(_SEGMENT, -(-states // _MULTIPLE) * _MULTIPLE)


# -- Kernel calls ----------------------------------------------------------------------------------


def _forward(calls: Calls, form: Form, given: Sequence[Any], keeps: bool) -> list[Array]:
    u, scan = given[0], _scan(calls, form, given)
    batch, dtype, states, channels = len(u), u.dtype, scan.states, scan.channels
    results = [
        calls.result("out", u.shape, dtype),
        calls.result("last", (batch, channels, states), dtype),
    ]
    kept = np.empty(0, dtype)
    if keeps:
        segments = _segments_of(scan.length, states)
        results.append(calls.result("kept", (batch, segments, states, channels), dtype))
        kept = results[-1].reshape(-1)
    final = memory(calls, (batch * states * channels,), dtype)
    arrays = results[0].reshape(-1), final, kept

    def call(first: int, last: int) -> None:
        room = _room(calls, scan, FORWARD_TILES)
        calls.launch(kernels.forward, scan, first, last, *arrays, room)
        calls.give_back(room)

    _share(calls, call, batch * scan.cells * scan.blocks, u.size * states)
    calls.launch(transpose_into, results[1].reshape(-1), final, states, channels)
    return results


def _backward(
    calls: Calls,
    form: Form,
    kept: Array,
    above: Sequence[Array],
    given: Sequence[Any],
    needs: Sequence[bool],
    conjugated: bool,
) -> list[Array]:
    scan, u, dtype = _scan(calls, form, given), given[0], given[0].dtype
    read = above[0].reshape(-1), _turned(calls, above[1]), kept.reshape(-1)
    batch, width, rows = len(u), lanes(dtype), scan.states
    blocks = (batch, scan.cells, scan.blocks)
    wide = -(-scan.length // width) * width
    sums = (batch, scan.cells, scan.parts, rows, wide)
    channels = (scan.channels,)
    shapes = {
        "u": u.shape,
        "delta": u.shape,
        "a": (*channels, rows),
        "b": sums if scan.b_cells else (*channels, rows),
        "c": sums if scan.c_cells else (*channels, rows),
        "skip": channels,
        "z": u.shape,
        "bias": channels,
        "start": (batch, rows, *channels),
    }
    needed = dict(zip(shapes, needs, strict=True))
    results = {
        name: calls.result(name, array.shape, dtype)
        for name, array in zip(shapes, given, strict=True)
        if needed[name]
    }
    # Results that kernels write in another order, or in parts, are rearranged at the end.
    into = {
        name: each
        if each.shape == shapes[name] and name != "start"
        else memory(calls, shapes[name], dtype)
        for name, each in results.items()
    }
    none = np.empty(0, dtype)
    flat = {name: into[name].reshape(-1) if name in into else none for name in shapes}
    # Gradients in parameters of channels are summed in float64.
    of_channels = {"a": rows, "skip": 1, "bias": 1}
    if not scan.b_cells:
        of_channels["b"] = rows
    if not scan.c_cells:
        of_channels["c"] = rows
    own = {
        name: calls.zeros(math.prod(blocks) * count * width if name in into else 0, np.float64)
        for name, count in of_channels.items()
    }
    nothing = np.empty(0)
    gradients = SelectiveGradients(
        u=flat["u"],
        delta=flat["delta"],
        z=flat["z"],
        b=flat["b"] if scan.b_cells else none,
        c=flat["c"] if scan.c_cells else none,
        b_constant=own.get("b", nothing),
        c_constant=own.get("c", nothing),
        rates=own["a"],
        skip=own["skip"],
        bias=own["bias"],
        start=flat["start"],
        width=wide,
    )

    def call(first: int, last: int) -> None:
        room = _room(calls, scan, BACKWARD_TILES)
        calls.launch(kernels.backward, scan, first, last, *read, gradients, room)
        calls.give_back(room)

    _share(calls, call, batch * scan.cells * scan.parts, 3 * u.size * rows)
    for name, count in of_channels.items():
        if name in into:
            calls.launch(kernels.add_up, scan, own[name], count, flat[name])
    for name in results:
        if name == "start":
            calls.launch(transpose_into, results[name].reshape(-1), flat[name], rows, scan.channels)
        elif into[name] is not results[name]:
            groups, length = results[name].shape[1], scan.length
            whole = results[name].reshape(-1)
            parts = scan.cells // groups * scan.parts
            calls.launch(add_up_parts, whole, flat[name], parts, rows, length, wide)
    return list(results.values())


def _turned(calls: Calls, array: Array) -> Array:
    """Return a contiguous array with the last two axes exchanged."""
    whole = memory(calls, (array.size,), array.dtype)
    calls.launch(transpose_into, whole, array.reshape(-1), *array.shape[-2:])
    return whole


def _scan(calls: Calls, form: Form, given: Sequence[Any]) -> SelectiveScan:
    """Return the arguments of the kernels."""
    u, delta, a, b, c, skip, z, bias, start = given
    none = np.empty(0, u.dtype)
    batch, channels, length = u.shape
    states, width = a.shape[1], lanes(u.dtype)
    b_groups, c_groups = (each.shape[1] if each.ndim == 4 else 0 for each in (b, c))
    cells = math.lcm(b_groups or 1, c_groups or 1)
    blocks = -(-(channels // cells) // width)
    # Sums of a part have as many numbers as `u`, or few.
    most = max(channels // (cells * max(states, 1)), _LEAST)
    parts = max(1, min(blocks, most, -(-_TASKS // max(batch * cells, 1))))
    zeros = np.zeros(channels, u.dtype)
    return SelectiveScan(
        channels=channels,
        states=states,
        length=length,
        segment=_segment(states),
        cells=cells,
        blocks=blocks,
        parts=parts,
        b_cells=cells // b_groups if b_groups else 0,
        c_cells=cells // c_groups if c_groups else 0,
        softplus=int(form.softplus),
        u=u.reshape(-1),
        delta=delta.reshape(-1),
        z=none if z is None else z.reshape(-1),
        rates=_turned(calls, a),
        b=b.reshape(-1) if b_groups else _turned(calls, b),
        c=c.reshape(-1) if c_groups else _turned(calls, c),
        skip=zeros if skip is None else skip.reshape(-1),
        bias=zeros if bias is None else bias.reshape(-1),
        start=none if start is None else _turned(calls, start),
    )


def _room(calls: Calls, scan: SelectiveScan, tiles: int) -> Array:
    rows = tiles * scan.segment + STATE_ROWS * scan.states
    return calls.borrow(rows * lanes(scan.u.dtype), scan.u.dtype)


def _share(calls: Calls, call: Any, tasks: int, work: int) -> None:
    """Divide tasks into enough ranges that threads end together."""
    if tasks == 0:
        return
    ranges = max(1, min(tasks, _TURNS * thread_count(), work // _GRAIN))
    ends = [tasks * k // ranges for k in range(ranges + 1)]
    calls.together([partial(call, *ends[k : k + 2]) for k in range(ranges)])


# -- Shapes ----------------------------------------------------------------------------------------


def check_shapes(
    u: Shape,
    delta: Shape,
    A: Shape,
    B: Shape,
    C: Shape,
    D: Shape | None,
    z: Shape | None,
    delta_bias: Shape | None,
    initial_state: Shape | None,
) -> None:
    """Raise an InputError unless the shapes of inputs agree."""
    if len(u) != 3:
        raise InputError(f"u has shape {tuple(u)}; expected (batch, channels, length)")
    batch, channels, length = u
    if len(A) != 2 or A[0] != channels:
        raise InputError(
            f"A has shape {tuple(A)}; expected (channels, states) with {channels} channels, as u "
            "has"
        )
    states = A[1]
    for name, like in (("delta", delta), ("z", z)):
        if like is not None and like != u:
            raise InputError(f"{name} has shape {tuple(like)}; expected {tuple(u)}")
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None and vector != (channels,):
            raise InputError(f"{name} has shape {tuple(vector)}; expected ({channels},)")
    if initial_state is not None and initial_state != (batch, channels, states):
        raise InputError(
            f"initial_state has shape {tuple(initial_state)}; expected "
            f"{(batch, channels, states)}, as last_state has"
        )
    for name, shape in (("B", tuple(B)), ("C", tuple(C))):
        constant, shared = (channels, states), (batch, states, length)
        groups = shape[1] if len(shape) == 4 else 1
        expected: Shape = constant if len(shape) == 2 else shared
        if len(shape) == 4:
            expected = (batch, groups, states, length)
        if shape != expected or groups < 1:
            raise InputError(
                f"{name} has shape {shape}; expected {shared}, ({batch}, groups, {states}, "
                f"{length}), or {constant} if it is constant in time"
            )
        if channels % groups:
            raise InputError(
                f"{name} has {groups} groups; expected a number that divides the {channels} "
                "channels"
            )


# -- The operation ---------------------------------------------------------------------------------


def _plain(xp: Functions, form: Form, *given: Any) -> list[Any]:
    """Return the outputs and the last states step by step."""
    u, delta, a, b, c, skip, z, bias, start = given
    channels = u.shape[1]
    delta = delta if bias is None else delta + bias[:, None]
    delta = xp.softplus(delta) if form.softplus else delta

    def at_step(factor: Any, row: Any) -> Any:
        """Return `B` or `C` at a step, of the shape of states."""
        return factor if row is None else xp.repeat(row, channels // row.shape[1], 1)

    def step(state: Any, size: Any, pushed: Any, b_now: Any, c_now: Any) -> Any:
        state = xp.exp(size[..., None] * a) * state + pushed[..., None] * at_step(b, b_now)
        return state, (state * at_step(c, c_now)).sum(-1)

    rows = [delta, delta * u, *(each if each.ndim == 4 else None for each in (b, c))]
    rows = [None if each is None else xp.moveaxis(each, -1, 0) for each in rows]
    begin = xp.filled(u, (*u.shape[:2], a.shape[1]), 0)
    last, out = xp.loop(step, begin if start is None else begin + start, rows)
    out = xp.filled(u, u.shape, 0) if out is None else xp.moveaxis(out, 0, -1)
    out = out if skip is None else out + skip[:, None] * u
    return [out if z is None else out * (z * xp.sigmoid(z)), last]


def _shapes(form: Form, shapes: Shapes) -> list[Shape]:
    u, a = shapes[0], shapes[2]
    assert u is not None
    assert a is not None
    (batch, channels, length), states = u, a[1]
    kept = batch, _segments_of(length, states), states, channels
    return [u, (batch, channels, states), kept]


def _axes(shapes: Shapes) -> list[MappedAxis]:
    """Return the axes of channels, or of their groups."""
    places = [int(each is not None and len(each) > 2) for each in shapes]
    return [
        MappedAxis(k, 1 if each is None else each[k])
        for k, each in zip(places, shapes, strict=True)
    ]


def _check(form: Form, shapes: Shapes) -> None:
    whole: Any = shapes
    check_shapes(*whole)
    for name, shape in zip(NAMES[3:5], whole[3:5], strict=True):
        if len(shape) == 3:
            raise InputError(f"{name} has shape {shape}; expected an axis of groups, too")


SELECTIVE_SCAN = Operation(
    name="selective_scan",
    inputs=(*NAMES[:5], *(f"{name}?" for name in NAMES[5:])),
    encode=lambda form: ([int(form.softplus)], []),
    decode=lambda numbers, tables: Form(bool(numbers[0])),
    shapes=_shapes,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    axes=_axes,
    out_axes=(1, 1, 3),
    reads=tuple(range(9)),
    results=2,
    kept=2,
    check=_check,
)

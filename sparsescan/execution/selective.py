"""Selective scans on the host, what shapes they take, their gradients, and recordings of both."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays.arrays import flat
from ..errors import InputError
from ..kernels.cpu import selective as kernels
from ..kernels.cpu.lanes import lanes
from ..kernels.cpu.selective import (
    BACKWARD_TILES,
    FORWARD_TILES,
    STATE_ROWS,
    SelectiveGradients,
    SelectiveScan,
)
from .calls import Calls
from .recording import Recorder, Space
from .recurrence import Recorded
from .threads import thread_count

Array = NDArray[Any]
Shape = tuple[int, ...]

# States of steps that are worth another thread, and tasks for each thread, since some come late.
_GRAIN, _TURNS = 1 << 15, 4
# Steps of a segment, unless there are more states: then as many, so that less is kept than `u` has.
_SEGMENT, _MULTIPLE = 32, 16
# How many parts there may be for threads, where their sums take more memory than an input.
_TASKS, _LEAST = 64, 4


class Inputs(NamedTuple):
    """The inputs of a selective scan, as :func:`sparsescan.torch.selective_scan` takes them.

    Attributes
    ----------
    u, delta : ndarray, shape (batch, channels, length)
        The inputs, and the sizes of steps.
    a : ndarray, shape (channels, states)
        `A`.
    b, c : ndarray
        `B` and `C`, of two, three or four axes.
    skip, z, bias, start : ndarray or None
        `D`, `z`, `delta_bias` and `initial_state`.
    softplus : bool
        Whether softplus is applied to `delta`.
    """

    u: Array
    delta: Array
    a: Array
    b: Array
    c: Array
    skip: Array | None
    z: Array | None
    bias: Array | None
    start: Array | None
    softplus: bool


def segments_of(length: int, states: int) -> int:
    """Return before how many segments of steps states are kept."""
    return max(length - 1, 0) // _segment(states)


def _segment(states: int) -> int:
    return max(_SEGMENT, -(-states // _MULTIPLE) * _MULTIPLE)


def selective_scan(inputs: Inputs, *, keeps: bool) -> tuple[Array, Array, Array]:
    """Return the outputs, the last states, and what :func:`selective_scan_vjp` is told of others.

    Parameters
    ----------
    inputs : Inputs
        The inputs, whose shapes fit.
    keeps : bool
        Whether states are kept for gradients.

    Returns
    -------
    out : ndarray, shape (batch, channels, length)
        The outputs.
    last_state : ndarray, shape (batch, channels, states)
        The states after the last step.
    kept : ndarray, shape (batch, segments, states, channels)
        States before segments of steps; none of them unless they are kept.
    """
    out, final, kept = _write(Calls(), inputs, keeps)
    return out, np.ascontiguousarray(final.swapaxes(1, 2)), kept


def selective_scan_vjp(
    inputs: Inputs,
    kept: Array,
    grads: Array | None,
    grads_final: Array | None,
    needs: tuple[bool, ...],
) -> list[Array | None]:
    """Return the gradients in all inputs, in their order, that are needed.

    Parameters
    ----------
    inputs : Inputs
        The inputs.
    kept : ndarray
        What :func:`selective_scan` has kept.
    grads : ndarray, shape (batch, channels, length), or None
        The gradients in the outputs; None for zeros.
    grads_final : ndarray, shape (batch, channels, states), or None
        Those in the last states.
    needs : tuple of bool
        Which are needed.
    """
    u, dtype = inputs.u, inputs.u.dtype
    above = np.zeros(u.size, dtype) if grads is None else flat(grads)
    final = np.empty(0, dtype) if grads_final is None else flat(grads_final.swapaxes(1, 2))
    found: list[Any] = _write_gradients(Calls(), inputs, kept.reshape(-1), above, final, needs)
    for k, like in enumerate((inputs.b, inputs.c), start=3):
        if needs[k] and like.ndim > 2:
            # Sums may be too large for float32, or not numbers, as those of PyTorch.
            with np.errstate(over="ignore", invalid="ignore"):
                found[k] = np.ascontiguousarray(factor_grad(found[k], like.shape))
    if needs[-1]:
        found[-1] = np.ascontiguousarray(found[-1].swapaxes(1, 2))
    return found


def factor_grad(sums: Any, shape: Shape) -> Any:
    """Return the gradient in a factor `B` or `C` that varies in time, from the sums of parts.

    Parameters
    ----------
    sums : array, shape (batch, cells, parts, states, width)
        The sums, in the order of channels.
    shape : tuple of int
        That of the factor: (batch, states, length) or (batch, groups, states, length).
    """
    groups = shape[1] if len(shape) == 4 else 1
    batch, cells, parts = sums.shape[:3]
    own = sums.reshape(batch, groups, cells // groups * parts, *sums.shape[3:])
    return own.sum(2)[..., : shape[-1]].reshape(shape)


# -- Kernel calls ----------------------------------------------------------------------------------


def _write(calls: Calls, inputs: Inputs, keeps: bool) -> tuple[Array, Array, Array]:
    """Write the outputs, the last states ``(batch, states, channels)``, and states for gradients.

    They are the results ``out``, ``last`` and, if `keeps`, ``kept``.
    """
    scan = _scan(inputs)
    batch, dtype = len(inputs.u), inputs.u.dtype
    rows = scan.states, scan.channels
    out = calls.result("out", inputs.u.shape, dtype)
    final = calls.result("last", (batch, *rows), dtype)
    kept = np.empty((batch, 0, *rows), dtype)
    if keeps:
        kept = calls.result("kept", (batch, segments_of(scan.length, scan.states), *rows), dtype)
    arrays = out.reshape(-1), final.reshape(-1), kept.reshape(-1)

    def call(first: int, last: int) -> None:
        room = _room(calls, scan, FORWARD_TILES)
        calls.launch(kernels.forward, scan, first, last, *arrays, room)
        calls.give_back(room)

    _share(calls, call, batch * scan.cells * scan.blocks, inputs.u.size * scan.states)
    return out, final, kept


def _write_gradients(
    calls: Calls, inputs: Inputs, kept: Array, above: Array, final: Array, needs: tuple[bool, ...]
) -> list[Array | None]:
    """Write the gradients in all inputs that are needed, which are results by the inputs' names.

    Those in `B` and `C` that vary in time are still to be summed, by :func:`factor_grad`. That in
    initial states is ``(batch, states, channels)``. States, and gradients in outputs and in last
    states, ``(batch, states, channels)``, are flat.
    """
    scan, u, dtype = _scan(inputs), inputs.u, inputs.u.dtype
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
    into = {name: calls.result(name, shapes[name], dtype) for name in shapes if needed[name]}
    if not scan.channels:  # nobody writes sums over them
        for each in into.values():
            each[:] = 0
    none = np.empty(0, dtype)
    flat = {name: into[name].reshape(-1) if name in into else none for name in shapes}
    # Gradients in what belongs to channels are summed in float64.
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
        calls.launch(kernels.backward, scan, first, last, above, final, kept, gradients, room)
        calls.give_back(room)

    _share(calls, call, batch * scan.cells * scan.parts, 3 * u.size * rows)
    for name, count in of_channels.items():
        if name in into and scan.channels:
            calls.launch(kernels.add_up, scan, own[name], count, flat[name])
    return [into.get(name) for name in shapes]


def _scan(inputs: Inputs) -> SelectiveScan:
    """Return what the kernels are told."""
    u, none = inputs.u, np.empty(0, inputs.u.dtype)
    batch, channels, length = u.shape
    states, width = inputs.a.shape[1], lanes(u.dtype)
    b_groups, c_groups = map(_groups, (inputs.b, inputs.c))
    cells = math.lcm(b_groups or 1, c_groups or 1)
    blocks = -(-(channels // cells) // width)
    # Their sums are as many numbers as `u` has, or few.
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
        softplus=int(inputs.softplus),
        u=flat(u),
        delta=flat(inputs.delta),
        z=none if inputs.z is None else flat(inputs.z),
        rates=flat(inputs.a.T),
        b=flat(inputs.b if b_groups else inputs.b.T),
        c=flat(inputs.c if c_groups else inputs.c.T),
        skip=zeros if inputs.skip is None else flat(inputs.skip),
        bias=zeros if inputs.bias is None else flat(inputs.bias),
        start=none if inputs.start is None else flat(inputs.start.swapaxes(1, 2)),
    )


def _groups(factor: Array) -> int:
    """Return how many groups of channels `B` or `C` has; 0 if it is constant in time."""
    if factor.ndim == 4:
        return int(factor.shape[1])
    return factor.ndim - 2


def _room(calls: Calls, scan: SelectiveScan, tiles: int) -> Array:
    rows = tiles * scan.segment + STATE_ROWS * scan.states
    return calls.borrow(rows * lanes(scan.u.dtype), scan.u.dtype)


def _share(calls: Calls, call: Any, tasks: int, work: int) -> None:
    """Share out tasks, in as many ranges as threads need to end together."""
    if tasks == 0:
        return
    ranges = max(1, min(tasks, _TURNS * thread_count(), work // _GRAIN))
    ends = [tasks * k // ranges for k in range(ranges + 1)]
    calls.together([partial(call, *ends[k : k + 2]) for k in range(ranges)])


# -- Recordings ------------------------------------------------------------------------------------


def record_scan(shapes: Inputs, keeps: bool, dtype: DTypeLike) -> Recorded:
    """Record what :func:`selective_scan` does, for inputs of some shapes, none of which has a 0.

    Arrays of a replay are the memory; the inputs that are there, of which those of two axes, with
    channels in front, are transposed, and initial states ``(batch, states, channels)``; and the
    results ``out``, ``last``, of shape (batch, states,
    channels), and, if `keeps`, ``kept``.

    Parameters
    ----------
    shapes : Inputs
        The shapes in place of arrays.
    keeps : bool
        Whether states are kept for gradients.
    dtype : dtype
        Of all arrays.
    """
    space, count = Space(0), sum(isinstance(each, tuple) for each in shapes)
    recorder = Recorder(space, 1 + count)
    _write(recorder, _stand_ins(recorder, 1, shapes, dtype), keeps)
    return Recorded(recorder.recording(), space.nbytes)


def record_scan_vjp(shapes: Inputs, needs: tuple[bool, ...], dtype: DTypeLike) -> Recorded:
    """Record what :func:`selective_scan_vjp` does, for inputs of some shapes.

    Arrays of a replay are the memory, what is kept, the gradients in outputs and in last states,
    (batch, states, channels), the inputs as those of :func:`record_scan`, and the gradients that
    are needed, of which those in `B` and `C` that vary in time are for :func:`factor_grad`.
    """
    space, count = Space(0), sum(isinstance(each, tuple) for each in shapes)
    recorder = Recorder(space, 4 + count)
    inputs = _stand_ins(recorder, 4, shapes, dtype)
    (batch, channels, length), states = inputs.u.shape, inputs.a.shape[1]
    rows = states, channels
    above = ((batch, segments_of(length, states), *rows), (batch, channels, length), (batch, *rows))
    flat = [recorder.array(k, each, dtype).reshape(-1) for k, each in enumerate(above, start=1)]
    kept, grads, final = flat
    _write_gradients(recorder, inputs, kept, grads, final, needs)
    return Recorded(recorder.recording(), space.nbytes)


def _stand_ins(recorder: Recorder, first: int, shapes: Inputs, dtype: DTypeLike) -> Inputs:
    """Return what stands for inputs, the arrays of a replay from the first of these on."""
    arrays: Any = []
    number = first
    for name, shape in zip(Inputs._fields[:-1], shapes, strict=False):
        if shape is None:
            arrays.append(None)
            continue
        whole: Any = shape
        is_turned = len(whole) == 2 or name == "start"
        if is_turned:
            whole = (*whole[:-2], whole[-1], whole[-2])
        each = recorder.array(number, whole, dtype)
        arrays.append(each.swapaxes(-1, -2) if is_turned else each)
        number += 1
    arrays.append(shapes.softplus)
    return Inputs(*arrays)


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
    """Raise an InputError unless the shapes of inputs fit each other."""
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

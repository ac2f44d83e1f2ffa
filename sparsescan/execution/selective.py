"""Selective scans on the host, and their gradients, in arrays of NumPy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu import selective as kernels
from ..kernels.cpu.lanes import lanes
from ..kernels.cpu.selective import (
    BACKWARD_TILES,
    FORWARD_TILES,
    STATE_ROWS,
    Gradients,
    Scan,
)
from .calls import aligned_empty
from .threads import share, thread_count

__all__ = ["Inputs", "segments_of", "selective_scan", "selective_scan_vjp"]

Array = NDArray[Any]

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
    skip, z, bias : ndarray or None
        `D`, `z` and `delta_bias`.
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
    scan = _scan(inputs)
    batch, states = len(inputs.u), scan.states
    segments = segments_of(scan.length, states) if keeps else 0
    dtype = inputs.u.dtype
    out = np.empty(inputs.u.shape, dtype)
    final = np.empty((batch, states, scan.channels), dtype)
    kept = np.empty((batch, segments, states, scan.channels), dtype)
    arrays = out.reshape(-1), final.reshape(-1), kept.reshape(-1)

    def call(first: int, last: int) -> None:
        room = _room(scan, FORWARD_TILES)
        kernels.forward(scan, first, last, *arrays, room)

    _share(call, batch * scan.cells * scan.blocks, inputs.u.size * states)
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
    scan = _scan(inputs)
    u, dtype = inputs.u, inputs.u.dtype
    batch, width = len(u), lanes(dtype)
    blocks = (batch, scan.cells, scan.blocks)
    wide = -(-scan.length // width) * width
    sums = (batch, scan.cells, scan.parts, scan.states, wide)
    in_u, in_delta, in_a, in_b, in_c, in_skip, in_z, in_bias = needs

    def empty(shape: tuple[int, ...], needed: bool) -> Array:
        # Without channels nobody writes sums over them.
        create = np.empty if scan.channels else np.zeros
        return create(shape if needed else 0, dtype)

    def zeros(shape: tuple[int, ...], needed: bool) -> Array:
        return np.zeros(shape if needed else 0)

    of_states = (*blocks, scan.states, width)
    own = Gradients(
        u=empty(u.shape, in_u),
        delta=empty(u.shape, in_delta),
        z=empty(u.shape, in_z),
        b=empty(sums, in_b and scan.b_cells > 0),
        c=empty(sums, in_c and scan.c_cells > 0),
        b_constant=zeros(of_states, in_b and scan.b_cells == 0),
        c_constant=zeros(of_states, in_c and scan.c_cells == 0),
        rates=zeros(of_states, in_a),
        skip=zeros((*blocks, width), in_skip),
        bias=zeros((*blocks, width), in_bias),
        width=wide,
    )
    flat = own._replace(
        u=own.u.reshape(-1),
        delta=own.delta.reshape(-1),
        z=own.z.reshape(-1),
        b=own.b.reshape(-1),
        c=own.c.reshape(-1),
        b_constant=own.b_constant.reshape(-1),
        c_constant=own.c_constant.reshape(-1),
        rates=own.rates.reshape(-1),
        skip=own.skip.reshape(-1),
        bias=own.bias.reshape(-1),
    )
    above = np.zeros(u.size, dtype) if grads is None else _flat(grads)
    final = np.empty(0, dtype) if grads_final is None else _flat(grads_final.swapaxes(1, 2))
    states = kept.reshape(-1)

    def call(first: int, last: int) -> None:
        room = _room(scan, BACKWARD_TILES)
        kernels.backward(scan, first, last, above, final, states, flat, room)

    _share(call, batch * scan.cells * scan.parts, 3 * u.size * scan.states)
    of_channels = partial(_of_channels, scan, dtype=dtype)

    def in_factor(needed: bool, cells: int, like: Array, each: Array, constant: Array) -> Any:
        if not needed:
            return None
        if cells == 0:
            return of_channels(constant)
        each = each.reshape(batch, scan.cells // cells, cells * scan.parts, scan.states, wide)
        return np.ascontiguousarray(each.sum(2)[..., : scan.length]).reshape(like.shape)

    # Sums may be too large for float32, or not numbers, as those of PyTorch.
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            own.u if in_u else None,
            own.delta if in_delta else None,
            of_channels(own.rates) if in_a else None,
            in_factor(in_b, scan.b_cells, inputs.b, own.b, own.b_constant),
            in_factor(in_c, scan.c_cells, inputs.c, own.c, own.c_constant),
            of_channels(own.skip) if in_skip else None,
            own.z if in_z else None,
            of_channels(own.bias) if in_bias else None,
        ]


def _of_channels(scan: Scan, sums: Array, dtype: Any) -> Array:
    """Return the sum over samples of sums of all blocks, with channels first."""
    of_blocks = np.moveaxis(sums.sum(0), -1, 2)
    size = scan.channels // scan.cells
    of_cells = of_blocks.reshape(scan.cells, scan.blocks * of_blocks.shape[2], *of_blocks.shape[3:])
    own: Array = of_cells[:, :size].reshape(scan.channels, *of_blocks.shape[3:]).astype(dtype)
    return own


def _scan(inputs: Inputs) -> Scan:
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
    return Scan(
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
        u=_flat(u),
        delta=_flat(inputs.delta),
        z=none if inputs.z is None else _flat(inputs.z),
        rates=_flat(inputs.a.T),
        b=_flat(inputs.b if b_groups else inputs.b.T),
        c=_flat(inputs.c if c_groups else inputs.c.T),
        skip=zeros if inputs.skip is None else _flat(inputs.skip),
        bias=zeros if inputs.bias is None else _flat(inputs.bias),
    )


def _groups(factor: Array) -> int:
    """Return how many groups of channels `B` or `C` has; 0 if it is constant in time."""
    if factor.ndim == 4:
        return int(factor.shape[1])
    return factor.ndim - 2


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def _room(scan: Scan, tiles: int) -> Array:
    rows = tiles * scan.segment + STATE_ROWS * scan.states
    return aligned_empty((rows * lanes(scan.u.dtype),), scan.u.dtype)


def _share(call: Any, tasks: int, work: int) -> None:
    """Share out tasks, in as many ranges as threads need to end together."""
    if tasks == 0:
        return
    ranges = max(1, min(tasks, _TURNS * thread_count(), work // _GRAIN))
    ends = [tasks * k // ranges for k in range(ranges + 1)]
    share(lambda k: call(ends[k], ends[k + 1]), ranges)

"""Stages by which the threads of a chain bring its steps to shared memory, one after the other.

A step is on its way in registers while the one before is multiplied; that of an implicit step has
no values, but slopes, from which threads make values beside the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype

from ...arrays.cuda import cuda
from .device import load
from .small_steps import jacobian_after, smaller, weighted_terms, weights_placer
from .tables import Run
from .tiles import Tiles, weights_pitch_of
from .vectors import barrier, get, load_vector, put, read_vector, write_vector

_WORD, _INT = np.int64(0), np.int32(0)


class Copies(NamedTuple):
    """Device functions by which the `stride` threads of a chain copy a step to shared memory.

    A thread keeps `slots` numbers of places in an int32 array, and `values` values in registers.
    """

    slots: int
    values: int
    find: Any
    fetch: Any
    deliver: Any


def copies_of(size: int, nnz: int, dtype: np.dtype[Any], stride: int, pitch: int) -> Copies:
    """Return how `stride` threads copy a step with `nnz` values to rows of so much `pitch`."""
    dense, vector, zero = nnz == size * size, 16 // dtype.itemsize, dtype.type(0)
    # Dense rows that are whole vectors are copied as such.
    unit = vector if dense and size % vector == 0 else 1
    units = nnz // unit
    slots = max(1, -(-units // stride))

    @cuda.jit(device=True)
    def find(places, lane, offsets):
        """Return where in shared memory a thread puts its values."""
        for slot in range(slots):
            m = lane + slot * stride
            if m < units:
                place = m * unit if dense else np.int64(load(places, m, _INT))
                offsets[slot] = place // size * pitch + place % size

    @cuda.jit(device=True)
    def fetch(address, lane, staged, at):
        """Load the values of a thread to places `at` and after in registers."""
        if unit > 1 and address & 15 == 0:
            for slot in range(slots):
                m = lane + slot * stride
                if (slot + 1) * stride <= units or m < units:
                    load_vector(staged, at + slot * unit, address, m * unit)
        else:
            for slot in range(slots):
                m = lane + slot * stride
                if (slot + 1) * stride <= units or m < units:
                    for v in range(unit):
                        staged[at + slot * unit + v] = load(address, m * unit + v, zero)

    @cuda.jit(device=True)
    def deliver(pool, base, lane, offsets, staged, at):
        """Store them to the step that begins at `base`."""
        for slot in range(slots):
            m = lane + slot * stride
            if m < units:
                if unit > 1:
                    write_vector(pool, base + offsets[slot], staged, at + slot * unit)
                else:
                    put(pool, base + offsets[slot], staged[at + slot])

    return Copies(slots, slots * unit, find, fetch, deliver)


class Stages(NamedTuple):
    """Device functions that bring all steps of a chunk, in turn, to where they are multiplied.

    A thread keeps what they need in local arrays `held`: ``offsets, sources, light_sources,
    numbers`` of int32, of which the first two have `slots` numbers, then `lights`, then `slopes`;
    and ``light_weights, slopes, staged`` of values, as many as lights, slopes and `values`. They
    take where to, ``pool, base, slopes_at, thread, lane, present``, and ``run, stacks, sample,
    steps``, of which steps; and the address of a step ahead, upon which they return that of a
    later one.
    """

    slots: int
    lights: int
    slopes: int
    values: int
    find: Any
    begin: Any
    prepare: Any
    deliver: Any


def copying(size: int, nnz: int, dtype: np.dtype[Any], tiles: Tiles) -> Stages:
    """Return the stages of steps that have values."""
    copies = copies_of(size, nnz, dtype, tiles.stride, tiles.pitch)
    find_places, fetch, store_values = copies.find, copies.fetch, copies.deliver
    one, warp = dtype.type(1), tiles.threads == 32

    @cuda.jit(device=True)
    def find(run, places, where, held, ahead):
        """Load the first step; return the least weight, which is none."""
        _, _, _, _, lane, present = where
        offsets, _, _, _, _, _, staged = held
        if present:
            find_places(places, lane, offsets)
            fetch(ahead, lane, staged, 0)
        return one

    @cuda.jit(device=True)
    def begin(steps_of, where, leasts, held, ahead, first, last, least_weight):
        """Deliver the first step."""
        run, stacks, sample, steps = steps_of
        pool, base, _, _, lane, present = where
        offsets, _, _, _, _, _, staged = held
        barrier(warp)
        if present:
            store_values(pool, base, lane, offsets, staged, 0)
        return jacobian_after(run, stacks, ahead, first + 1, steps, sample), False, least_weight

    @cuda.jit(device=True)
    def prepare(steps_of, where, held, ahead, step):
        """Load the step behind this one."""
        run, stacks, sample, steps = steps_of
        _, _, _, _, lane, _ = where
        _, _, _, _, _, _, staged = held
        fetch(ahead, lane, staged, 0)
        return jacobian_after(run, stacks, ahead, step + 2, steps, sample)

    @cuda.jit(device=True)
    def deliver(steps_of, where, held, ahead, step, last, least_weight, lost):
        """Store what is prepared."""
        pool, base, _, _, lane, _ = where
        offsets, _, _, _, _, _, staged = held
        store_values(pool, base, lane, offsets, staged, 0)
        return ahead, lost

    return Stages(copies.slots, 1, 1, copies.values, find, begin, prepare, deliver)


def making(
    size: int, terms: int, states: int, dtype: np.dtype[Any], tiles: Tiles, weights_at: int
) -> Stages:
    """Return the stages of implicit steps, whose weights begin at `weights_at`.

    The slopes of a step are stored while the one before is multiplied, and those of the next are
    on their way.
    """
    slopes = _slopes_of(size, terms, dtype, tiles)
    values = _values_of(size, terms, states, dtype, tiles, weights_at)
    find_values, make, store_values = values.find, values.make, values.deliver
    find_slopes, fetch, store_slopes = slopes.find, slopes.fetch, slopes.deliver
    threads, warp = tiles.threads, tiles.threads == 32
    weights_pitch = weights_pitch_of(tiles.pitch, size // states, states, 16 // dtype.itemsize)
    place_weights = weights_placer(size, terms, states, dtype, threads, weights_pitch)

    @cuda.jit(device=True)
    def find(run, places, where, held, ahead):
        """Load the weights, and the slopes of the first step; return the least weight."""
        offsets, sources, light_sources, numbers, light_weights, slopes, _ = held
        pool, _, _, thread, lane, present = where
        least = place_weights(run, places, pool, weights_at, thread)
        if present:
            own = find_values(run, places, lane, offsets, sources, light_sources, light_weights)
            least = smaller(least, own)
            find_slopes(places, lane, numbers)
            fetch(ahead, numbers, slopes)
        return least

    @cuda.jit(device=True)
    def begin(steps_of, where, leasts, held, ahead, first, last, least_weight):
        """Make the first step; return whether a slope is lost, and the least weight of all."""
        run, stacks, sample, steps = steps_of
        pool, base, slopes_at, thread, lane, present = where
        offsets, _, _, numbers, _, slopes, staged = held
        lost = False
        put(leasts, thread, least_weight)
        barrier(warp)
        for m in range(threads):
            least_weight = smaller(least_weight, get(leasts, m))
        if present:
            lost = store_slopes(pool, slopes_at, lane, slopes, least_weight)
        barrier(warp)
        if present:
            make(pool, slopes_at, lane, held)
            ahead = jacobian_after(run, stacks, ahead, first + 1, steps, sample)
            if first + 1 < last:
                fetch(ahead, numbers, slopes)
        barrier(warp)
        if present:
            if first + 1 < last:
                lost = lost | store_slopes(pool, slopes_at, lane, slopes, least_weight)
                ahead = jacobian_after(run, stacks, ahead, first + 2, steps, sample)
                if first + 2 < last:
                    fetch(ahead, numbers, slopes)
            store_values(pool, base, lane, offsets, staged)
        return ahead, lost, least_weight

    @cuda.jit(device=True)
    def prepare(steps_of, where, held, ahead, step):
        """Make the step behind this one."""
        pool, _, slopes_at, _, lane, _ = where
        make(pool, slopes_at, lane, held)
        return ahead

    @cuda.jit(device=True)
    def deliver(steps_of, where, held, ahead, step, last, least_weight, lost):
        """Store what is prepared, and the slopes behind; return whether a slope is lost."""
        run, stacks, sample, steps = steps_of
        pool, base, slopes_at, _, lane, _ = where
        offsets, _, _, numbers, _, slopes, staged = held
        store_values(pool, base, lane, offsets, staged)
        if step + 2 < last:
            lost = lost | store_slopes(pool, slopes_at, lane, slopes, least_weight)
            ahead = jacobian_after(run, stacks, ahead, step + 3, steps, sample)
            if step + 3 < last:
                fetch(ahead, numbers, slopes)
        return ahead, lost

    return Stages(
        values.slots, values.lights, slopes.count, values.values, find, begin, prepare, deliver
    )


class _Slopes(NamedTuple):
    """Device functions by which threads load the slopes of a step, `count` each."""

    count: int
    find: Any
    fetch: Any
    deliver: Any


def _slopes_of(size: int, terms: int, dtype: np.dtype[Any], tiles: Tiles) -> _Slopes:
    zero, least_normal = dtype.type(0), dtype.type(np.finfo(dtype).tiny)
    stride, pitch, every = tiles.stride, tiles.pitch, terms * size
    count = max(1, -(-every // stride))

    @cuda.jit(device=True)
    def find(places, lane, numbers):
        """Note which slopes a thread loads; -1 where there is none."""
        for slot in range(count):
            m = lane + slot * stride
            numbers[slot] = load(places, m, _INT) if m < every else np.int32(-1)

    @cuda.jit(device=True)
    def fetch(address, numbers, slopes):
        """Load the slopes of a thread."""
        for slot in range(count):
            slopes[slot] = zero
            if numbers[slot] >= 0:
                slopes[slot] = load(address, np.int64(numbers[slot]), zero)

    @cuda.jit(device=True)
    def deliver(pool, base, lane, slopes, least_weight):
        """Store them to shared memory; return whether a weight may make one no normal number."""
        lost = False
        for slot in range(count):
            m = lane + slot * stride
            if m < every:
                put(pool, base + m // size * pitch + m % size, slopes[slot])
                size_of = abs(slopes[slot])
                lost = lost | ((size_of > zero) & (size_of * least_weight < least_normal))
        return lost

    return _Slopes(count, find, fetch, deliver)


class _Values(NamedTuple):
    """Device functions by which threads make the values of a step from its slopes.

    A thread makes `slots` groups of values, and `lights` values of light rows.
    """

    slots: int
    lights: int
    values: int
    find: Any
    make: Any
    deliver: Any


def _values_of(
    size: int, terms: int, states: int, dtype: np.dtype[Any], tiles: Tiles, weights_at: int
) -> _Values:
    kind, vector, zero = from_dtype(dtype), 16 // dtype.itemsize, dtype.type(0)
    stride, pitch, units = tiles.stride, tiles.pitch, size // states
    every, weighted = terms * size, weighted_terms(terms, states)
    weights_pitch = weights_pitch_of(pitch, units, states, vector)
    # As `copies_of` has it for dense steps.
    unit = vector if units % vector == 0 else 1
    groups = units * size // unit
    slots, lights = max(1, -(-groups // stride)), max(1, -(-2 * tiles.light // stride))
    light_count, first_light = 2 * tiles.light, slots * unit
    lights_at = (tiles.dense * tiles.groups + tiles.cols * tiles.column_groups) * pitch

    @cuda.jit(device=True)
    def find(run, places, lane, offsets, sources, light_sources, light_weights):
        """Note where the values of a thread go, and come from; return the least light weight."""
        for slot in range(slots):
            m = (lane + slot * stride) * unit
            row, column = m // size, m % size
            offsets[slot] = row * pitch + column
            if states > 1:
                sources[slot] = row * weights_pitch + column % units
        least = dtype.type(1)
        address = load(run, Run.WEIGHTS, _WORD)
        for slot in range(lights):
            light_sources[slot], light_weights[slot] = _INT, zero
            m = lane + slot * stride
            if m < light_count:
                # Two values for each unit: by its own two slopes.
                own, state = m // 2, m % 2
                light_sources[slot] = (terms - 1) * pitch + state * units + own
                at = every + ((terms - 1) * size + units + own) * units + own
                number = load(places, at, _INT)
                if number >= 0:
                    light_weights[slot] = load(address, np.int64(number), zero)
                least = smaller(least, light_weights[slot])
        return least

    @cuda.jit(device=True)
    def make(pool, base, lane, held):
        """Make the values of a thread of a step whose slopes begin at `base`."""
        offsets, sources, light_sources, _, light_weights, _, staged = held
        some_weights = cuda.local.array(vector, kind)
        some_slopes = cuda.local.array(vector, kind)
        for slot in range(slots):
            m = lane + slot * stride
            if (slot + 1) * stride <= groups or m < groups:
                place = np.int64(offsets[slot])
                source = place if states == 1 else np.int64(sources[slot])
                for v in range(unit):
                    staged[slot * unit + v] = zero
                for k in range(weighted):
                    weight_at = weights_at + k * units * weights_pitch + source
                    slope_at = base + k * pitch + place % pitch
                    if unit > 1:
                        read_vector(some_weights, 0, pool, weight_at)
                        read_vector(some_slopes, 0, pool, slope_at)
                    else:
                        some_weights[0] = get(pool, weight_at)
                        some_slopes[0] = get(pool, slope_at)
                    for v in range(unit):
                        staged[slot * unit + v] += some_weights[v] * some_slopes[v]
        if light_count > 0:
            for slot in range(lights):
                slope = get(pool, base + np.int64(light_sources[slot]))
                staged[first_light + slot] = light_weights[slot] * slope

    @cuda.jit(device=True)
    def deliver(pool, base, lane, offsets, staged):
        """Store them to the step that begins at `base`."""
        for slot in range(slots):
            if lane + slot * stride < groups:
                if unit > 1:
                    write_vector(pool, base + offsets[slot], staged, slot * unit)
                else:
                    put(pool, base + offsets[slot], staged[slot])
        if light_count > 0:
            for slot in range(lights):
                m = lane + slot * stride
                if m < light_count:
                    put(pool, base + lights_at + m, staged[first_light + slot])

    values = slots * unit + (lights if light_count else 0)
    return _Values(slots, lights, values, find, make, deliver)

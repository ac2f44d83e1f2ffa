"""Steps of a backward pass that have no gradient, and are left out.

With a loss at the last step, the gradient in the states of earlier ones decays until it is below
the smallest number there is. From then on every product is 0, unless a factor of one is infinite or
NaN: 0·NaN is NaN. A step is left out if all gradients that enter it are 0, and all factors are
finite.

Few of them are looked at. A state that is NaN makes all later ones NaN, and states but the first
are between -1 and 1, so where the state behind a step is finite, all before it are. That does not
hold for ReLU, whose states may be infinite, and 0 afterwards, nor where weights that are 0 are not
stored. Gates are finite if the states before and behind a step are, and sums of products with
weights if the states are by so much smaller than the largest number. An infinite input may leave
states finite.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload
from numba.np import numpy_support

from ...kernels.compile import njit
from ...kernels.cpu.lanes import (
    fma,
    is_zero,
    lane_count,
    less_or,
    load,
    load_some,
    number,
    store_some,
    total,
)

# Without counts of references: threads that share arrays would wait for each other at every call.
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)
# Which steps are left out: none; those whose numbers have all been looked at; and those of cells
# whose states tell of the steps before.
NEVER, STRICT, BOUNDED = range(3)
# Below which all numbers of a step are, where they are looked at: no product of a few overflows.
_MOST = 1 << 16
# In the place of a bound that was not asked for.
UNKNOWN = -1.0


@_inline
def all_zero(x, at, count):
    """Return whether so many numbers are all 0."""
    i, lanes = 0, lane_count(x)
    while i + lanes <= count:
        if not is_zero(load(x, at + i)):
            return False
        i += lanes
    return i >= count or is_zero(load_some(x, at + i, count - i))


@_inline
def clear(x, at, count):
    """Write so many zeros."""
    zero = number(x, 0.0)
    for i in range(0, count, lane_count(x)):
        store_some(x, at + i, zero, count - i)


@_inline
def no_grads_above(s, first, above, t):
    """Return whether a step's outputs have no gradients, all of which are 0 if there are none."""
    if len(above) == 0:
        return True
    at, samples = (t * s.given + first) * s.width, min(s.samples, s.given - first)
    if s.width == s.units:
        return all_zero(above, at, samples * s.units)
    for b in range(samples):
        for k in range(1 + s.others if s.next_output > 0 else 1):
            if not all_zero(above, at + b * s.width + k * s.next_output, s.units):
                return False
    return True


@_helper
def _total_size(x, count):
    """Return the sum of the absolute values of so many numbers."""
    zero = number(x, 0.0)
    sums = zero
    for i in range(0, count, lane_count(x)):
        v = load_some(x, i, count - i)
        sums = sums + less_or(v, zero, zero - v, v)
    return total(sums)


@_helper
def bound_of(weights, bias, rows, row_count):
    """Return what times a finite state is finite only if all its products with weights are.

    With the weights' absolute values `S` that is ``4·S``: a product is at most ``S·max(|h|, 1)``.
    It is infinite or NaN if a weight is. Behind so many numbers of the rows are any.
    """
    own = _total_size(weights, len(weights)) + _total_size(bias, len(bias))
    return 4 * (own + _total_size(rows, row_count))


def limit_of(x):
    """Return what times a number is infinite if it is not far from overflowing."""
    return float(np.finfo(x.dtype).max) / _MOST


@overload(limit_of)
def _limit_of(x):
    value = limit_of(np.empty(0, numpy_support.as_dtype(x.dtype)))
    return lambda x: value


@_inline
def zero_times(x, at, count, factor):
    """Return whether ``0·factor·x`` is 0 for so many numbers: not if any is infinite or NaN."""
    lanes, zero, by = lane_count(x), number(x, 0.0), number(x, factor)
    sums, i = zero, 0
    while i + lanes <= count:
        sums = fma(load(x, at + i) * by, zero, sums)
        i += lanes
    if i < count:
        sums = fma(load_some(x, at + i, count - i) * by, zero, sums)
    return is_zero(sums)


@_inline
def has_step(gates, first, step):
    """Return whether a group has gradients of a step, of which the first is 0, in their place."""
    return gates.has_grads[first * gates.steps + gates.step + step] != 0

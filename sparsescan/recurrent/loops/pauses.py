"""Skip the steps of a backward pass that have no gradient.

With a loss at the last step, the gradient in earlier states may decay until it underflows to 0.
From then on every product is 0, unless one of its factors is infinite or NaN: 0·NaN is NaN. A step
is skipped if all gradients that enter it are 0, and all factors are finite.

Few factors are checked. A NaN state makes all later ones NaN, and all states except the first are
between -1 and 1, so if the state after a step is finite, all earlier ones are. That does not hold
for ReLU, whose states may be infinite and then 0, nor if zero weights are not stored. Gates are
finite if the states before and after a step are, and sums of products with weights if the states
are small enough. An infinite input may leave states finite.
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
# Which steps are skipped: none; those whose numbers have all been checked; and those of cells whose
# states reveal a NaN of earlier steps.
NEVER, STRICT, BOUNDED = range(3)
# Bound for all numbers of a checked step: no product of a few of them overflows.
_MOST = 1 << 16
# Stands for a bound that was not computed.
UNKNOWN = -1.0


@_inline
def all_zero(x, at, count):
    """Return whether a range of numbers is all 0."""
    i, lanes = 0, lane_count(x)
    while i + lanes <= count:
        if not is_zero(load(x, at + i)):
            return False
        i += lanes
    return i >= count or is_zero(load_some(x, at + i, count - i))


@_inline
def clear(x, at, count):
    """Write zeros to a range."""
    zero = number(x, 0.0)
    for i in range(0, count, lane_count(x)):
        store_some(x, at + i, zero, count - i)


@_inline
def no_grads_above(s, first, above, t):
    """Return whether all gradients in a step's outputs are 0, or there are none."""
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
    """Return the sum of the absolute values of a range of numbers."""
    zero = number(x, 0.0)
    sums = zero
    for i in range(0, count, lane_count(x)):
        v = load_some(x, i, count - i)
        sums = sums + less_or(v, zero, zero - v, v)
    return total(sums)


@_helper
def bound_of(weights, bias, rows, row_count):
    """Return a factor: if a finite state times it is finite, so are its products with weights.

    It is ``4·S``, for the sum `S` of absolute weights: a product is at most ``S·max(|h|, 1)``. It
    is infinite or NaN if a weight is. Only the first `row_count` numbers of `rows` count.
    """
    own = _total_size(weights, len(weights)) + _total_size(bias, len(bias))
    return 4 * (own + _total_size(rows, row_count))


def limit_of(x):
    """Return a factor whose product with a number overflows if the number is too large."""
    return float(np.finfo(x.dtype).max) / _MOST


@overload(limit_of)
def _limit_of(x):
    value = limit_of(np.empty(0, numpy_support.as_dtype(x.dtype)))
    return lambda x: value


@_inline
def zero_times(x, at, count, factor):
    """Return whether ``0·factor·x`` is 0 for a range of numbers: none is infinite or NaN."""
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
    """Return whether a group has gradients of a step; the first step here is number 0."""
    return gates.has_grads[first * gates.steps + gates.step + step] != 0

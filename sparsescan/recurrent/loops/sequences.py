"""Whole sequences of recurrent cells: all states, and the gradients of all of them.

Arrays are flat. Each step has a slot of states; one more slot at either end holds the initial
states of the two directions. Samples are independent, so threads share them, and each thread runs
through all steps without waiting for another.

Lanes of vectors are samples or units. If samples are lanes, states are ``[group][step][unit]`` of
vectors of a group's samples: every weight is multiplied by a vector, and only the last group can
have empty lanes. With AVX-512 such a vector has two adjacent units or rows,
``[group][step][pair][sample][2]``: twice the samples would leave half of the threads without work.
Steps are copied from and to the caller's arrays, and summed, `STEPS` at a time, while they are in
the cache.

If a step has many products, or samples would leave groups half empty, units are lanes, and states
are ``[step][sample][unit]``, as in the caller's arrays. A product takes 16 units of float32 at
once, so a step has padded rows of all its products. Elementwise code reads them gate by gate
instead, as ``[gate][sample][unit]``, so that no lane is empty if `units` is not a multiple of 16.

Each pass has a function with the cell's elementwise operations. These loops call it for every stage
of a step: see :mod:`..render.cpu`.

After the end of a shorter sequence, a sample's state stays as it is.

With resets, a step does not always read the state that the previous step has written. It reads a
copy, in which samples that are reset have other states. Those other states are in the slot of the
copy that no step reads, at the end of the direction. Without resets there is no copy.

A backward pass leaves out steps that have no gradient, as :mod:`.pauses` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import njit
from ...kernels.cpu.lanes import lane_count, less_or, load, number, prefetch, store_some
from .callers import (
    copy_some,
    further_in,
    row_of,
    rows_out,
    turn_row_in,
    turn_row_out,
    turn_slots_out,
    turn_steps_in,
)
from .pauses import (
    NEVER,
    STRICT,
    UNKNOWN,
    all_zero,
    bound_of,
    clear,
    limit_of,
    no_grads_above,
    zero_times,
)
from .products import (
    back_products,
    forward_products,
    has_product,
    matrix_of,
    multiply_samples,
    part_of,
    slot_of,
)
from .sharing import multiply
from .stages import call_stage, pointer
from .sums import STEPS, add_steps

Array = Any
# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)


class Sequence(NamedTuple):
    """Some samples of one direction of one layer, in groups that are computed one after another.

    Attributes
    ----------
    steps : int
        Number of steps.
    back : int
        1 if the last step comes first, else 0.
    units : int
        Length of a state ``h``.
    batch, given : int
        The number of samples, padded to whole groups, and the number that the caller has.
    first, count, samples : int
        The first of these samples, their number, and how many are computed at once.
    sample_lanes, pairs : bool
        Whether lanes are samples (else units), and whether vectors of samples hold two rows.
    lengths : ndarray
        How many steps a sample has, as a number of its dtype: as ``[sample][unit]``, or in the
        order of states with samples as lanes.
    states : ndarray
        ``[steps + 2][batch][units]``, or one such array per group.
    width, next_output : int
        Length of a row of the outputs of all directions, and the distance in columns from the first
        state to the next; 0 if only the first states are outputs.
    inputs, cols, block : int
        Length of an input, its padded length here, and how much of it is the state of one direction
        of the layer below.
    jump : int
        Distance in the input between the states of the two directions of the layer below.
    below_width : int
        Length of a row of the gradients in the inputs.
    further, further_rows : ndarray, ndarray of int64
        The further inputs, laid out like states, `cell_plane` numbers apart; and for each the row
        of the parts with its gradient, negative if that gradient is 0.
    further_width, further_column : int
        Length of a row of the gradients in all inputs of the network, and the column of the first
        of these.
    cells, cell_plane : ndarray, int
        The states after the first, laid out like it, and their distance; empty if there are none.
    others : int
        How many of these there are.
    befores, before_cells : ndarray
        The states that the next step reads, laid out alike; without resets the same arrays.
    resets : ndarray of uint8
        ``[step][sample]``, and one more row: 1 if the sample is reset between this step and the one
        before it in time; empty without resets.
    gates : ndarray
        What the backward pass needs from each step, as ``[step][gate]`` of each group's samples.
        All of a step is contiguous, since memory is slow.
    segment, begin, kept : int
        The number of steps with gates, the first of them, and the number of vectors per step.
    gate_step : int
        Distance between the gates of two steps; 0 if gates are not kept, so that each step
        overwrites those of the last.
    grads : ndarray
        The gradients in the slots of the last `STEPS` steps, followed by what their products
        multiply; or those of all steps, which then overwrite the gates.
    grad_step, grads_first : int
        Distance between the gradients of two steps; 0 if they overwrite the gates, where the first
        gradient is the vector `grads_first` of a step.
    has_grads : ndarray of uint8
        ``[sample][step]``, for the first sample of each group and the steps with gates: 0 if the
        backward pass has skipped the step. The gradients in products of a skipped step are 0; they
        are written only if they are summed with those of others.
    products : ndarray
        ``[sample][products]``: the products of one step if units are lanes, else the gradients in
        the states and inputs of one step.
    stride : int
        Distance between the products of two samples.
    spare : int
        The place in a sample's products for one that is added later.
    parts : ndarray
        The products slot by slot, as elementwise code reads them, and everything else that a step
        computes.
    zeros : ndarray
        Zeros, as initial sums of products.
    bias : ndarray
        The initial value of each slot.
    rows, row_step : ndarray, int
        The vectors of parameters, for all samples of a group, and their distance.
    row_grads, row_sums, row_count : ndarray, ndarray of float64, int
        The gradients in these rows over some steps, those of each sample over all steps, and the
        number of rows.
    carry, carry_step : ndarray, int
        The gradients in the states of all samples, and the distance from one state's to the next's.
        With resets, the gradients in the states that resets set follow.
    forward, backward : int
        The addresses of the functions of the cell.
    stages, slots, begun : int
        The number of stages of a step, of slots, and of the slots that begin with `bias`.
    multiplied, state_row : ndarray of int64, int
        The states that products multiply, and the row of the parts for the gradient through the
        first of these products; those of the others follow.
    kept_count, kept_whole, record : int
        The vectors of a step that the backward pass needs, how many of them differ between units,
        and how many vectors it writes per step.
    input_row : int
        The row of the parts with the gradient in the input of each unit; negative without one.
    has_derived : bool
        Whether some rows of parameters are computed from others.
    pauses : int
        Which steps without gradients are skipped: see :mod:`.pauses`.
    helpers, help : int, ndarray of int64
        The number of other threads that share the products of a step, and their shared words: see
        :mod:`.sharing`.
    """

    steps: int
    back: int
    units: int
    batch: int
    given: int
    first: int
    count: int
    samples: int
    sample_lanes: bool
    pairs: bool
    lengths: Array
    states: Array
    width: int
    next_output: int
    inputs: int
    cols: int
    block: int
    jump: int
    below_width: int
    further: Array
    further_rows: Array
    further_width: int
    further_column: int
    cells: Array
    cell_plane: int
    others: int
    befores: Array
    before_cells: Array
    resets: Array
    gates: Array
    segment: int
    begin: int
    kept: int
    gate_step: int
    grads: Array
    grad_step: int
    grads_first: int
    has_grads: Array
    products: Array
    stride: int
    spare: int
    parts: Array
    zeros: Array
    bias: Array
    rows: Array
    row_step: int
    row_grads: Array
    row_sums: Array
    row_count: int
    carry: Array
    carry_step: int
    forward: int
    backward: int
    stages: int
    slots: int
    begun: int
    multiplied: Array
    state_row: int
    kept_count: int
    kept_whole: int
    record: int
    input_row: int
    has_derived: bool
    pauses: int
    helpers: int
    help: Array


class Caller(NamedTuple):
    """The caller's arrays if lanes are samples: one row for each step and sample.

    Attributes
    ----------
    x : ndarray
        The inputs; empty if another pass has copied them.
    cols : int
        Length of a row of them.
    further : ndarray
        All inputs; a pass copies the further ones. Empty if another pass has copied them.
    is_shorter : bool
        Whether some samples have fewer steps.
    output : ndarray
        The array for the outputs of one direction; empty if there are two.
    ends : ndarray of int64
        For the first sample of each group, the step before which a backward pass stops needing
        gates; empty if all steps are run.
    """

    x: Array
    cols: int
    further: Array
    is_shorter: bool
    output: Array
    ends: Array


# -- States ----------------------------------------------------------------------------------------


@_inline
def _begin_block(s, caller, first, cols, x, k, begin, end):
    """Copy the inputs of a block of steps if the `k`-th in the direction begins it."""
    if len(caller.x) + len(caller.further) > 0 and (k == begin or k % STEPS == 0):
        stop = min((k // STEPS + 1) * STEPS, end)
        t = s.steps - stop if s.back else k
        if len(caller.x) > 0:
            turn_steps_in(caller, s, first, cols, x, t, t + stop - k)
        if len(caller.further) > 0:
            further_in(caller, s, first, t, t + stop - k)


@_inline
def _end_block(s, caller, first, k, begin, end):
    """Write the outputs of a block of steps if the `k`-th in the direction ends it."""
    if len(caller.output) > 0 and (k + 1 == end or (k + 1) % STEPS == 0):
        start = max(k // STEPS * STEPS, begin)
        slot = s.steps - k if s.back else start + 1
        stop = slot + k + 1 - start
        turn_slots_out(s.states, s, first, slot, stop, caller.output, 1, s.units, 0)


@_inline
def _places(s, first, k):
    """Return the `k`-th step in the direction, and where these begin.

    Its state, the state before, and its gates.
    """
    t = s.steps - 1 - k if s.back else k
    before = t + 2 if s.back else t
    here = row_of(s, first, t + 1) * s.units
    gates = first * s.segment * s.kept * s.units + (t - s.begin) * s.gate_step
    return t, here, row_of(s, first, before) * s.units, gates


@_inline
def _fetch(s, states, cells, place, gates):
    """Bring the states of a step, and what is kept of it, to the second cache."""
    row, lanes = s.samples * s.units, lane_count(s.gates)
    for i in range(0, row, lanes):
        prefetch(states, place + i)
    for n in range(s.others):
        for i in range(0, row, lanes):
            prefetch(cells, n * s.cell_plane + place + i)
    if s.gate_step > 0:
        for i in range(0, s.kept_whole * row, lanes):
            prefetch(s.gates, gates + i)
        for i in range(s.kept_whole * row, s.kept_count * row, row):
            prefetch(s.gates, gates + i)


@_inline
def _reset_row(s, first, t):
    """Return the place of the resets of a group before a step."""
    return (t + s.back) * s.batch + first


@_inline
def _place_of(s, b, unit):
    """Return the place of the `b`-th sample's number of a unit in a vector of a group."""
    if s.pairs:
        return (unit // 2 * s.samples + b) * 2 + unit % 2
    return unit * s.samples + b if s.sample_lanes else b * s.units + unit


@_inline
def _begin_step(s, first, t, before):
    """Copy the state before a step, with another state for samples that are reset."""
    if len(s.resets) > 0:
        given = row_of(s, first, 0 if s.back else s.steps + 1) * s.units
        _copy_before(s, _reset_row(s, first, t), before, given)


@_helper
def _copy_before(s, row, before, given):
    count, lanes = s.samples * s.units, lane_count(s.states)
    for i in range(0, count, lanes):
        store_some(s.befores, before + i, load(s.states, before + i), count - i)
    for n in range(s.others):
        at = n * s.cell_plane + before
        for i in range(0, count, lanes):
            store_some(s.before_cells, at + i, load(s.cells, at + i), count - i)
    for b in range(s.samples):
        for unit in range(s.units if s.resets[row + b] != 0 else 0):
            place = _place_of(s, b, unit)
            s.befores[before + place] = s.befores[given + place]
            for n in range(s.others):
                at = n * s.cell_plane + place
                s.before_cells[at + before] = s.before_cells[at + given]


@_helper
def _end_carried(s, first, t):
    """Move the gradients in the state before a step for samples that are reset there."""
    row, own = _reset_row(s, first, t), first * s.units
    of_resets = (1 + s.others) * s.carry_step
    for b in range(s.samples):
        for unit in range(s.units if s.resets[row + b] != 0 else 0):
            place = _place_of(s, b, unit)
            for n in range(len(s.multiplied)):
                at, k = (s.state_row + n) * part_of(s) + place, s.multiplied[n]
                s.carry[of_resets + k * s.carry_step + own + place] += s.parts[at]
                s.parts[at] = 0
            for k in range(1 + s.others):
                at = k * s.carry_step + own + place
                s.carry[of_resets + at] += s.carry[at]
                s.carry[at] = 0


@_inline
def _take_above(s, first, above, t):
    """Copy the gradients in the states of a step that do not come from later steps.

    Those in the first state are put where products are.
    """
    if len(above) == 0:
        clear(s.products, 0, s.samples * s.units)
        return
    if s.next_output > 0:
        for k in range(1, 1 + s.others):
            _take_rows(s, first, above, t, k)
            _add_taken(s, first, t, k)
    _take_rows(s, first, above, t, 0)


@_helper
def _take_rows(s, first, above, t, k):
    """Put the gradients in the `k`-th outputs of a step where products are."""
    at = (t * s.given + first) * s.width + k * s.next_output
    if s.sample_lanes:
        left = s.given - first
        turn_row_in(above, at, s.width, left, s.units, s.products, 0, s.pairs)
        return
    for b in range(s.samples):
        room = (s.samples - 1 - b) * s.width + s.units
        copy_some(above, at + b * s.width, s.products, b * s.units, s.units, room)


@_helper
def _add_taken(s, first, t, k):
    """Add the copied gradients to those in the `k`-th states, for samples that have the step."""
    own, count, at = first * s.units, s.samples * s.units, number(s.carry, t)
    for i in range(0, count, lane_count(s.carry)):
        to = k * s.carry_step + own + i
        before = load(s.carry, to)
        more = before + load(s.products, i)
        store_some(s.carry, to, less_or(at, load(s.lengths, own + i), more, before), count - i)


@_inline
def _grads_at(s, k, gates):
    """Return the place of the gradients in the slots of the `k`-th step."""
    if s.grad_step > 0:
        return k % STEPS * s.grad_step
    return gates + s.grads_first * s.samples * s.units


@_inline
def _call(s, code, stage, x, h, c, new_h, new_c, kept, grads, t, first):
    """Call the function of a pass for a stage of a step."""
    own = first * s.units
    further = pointer(s.further, row_of(s, first, t + 1) * s.units)
    pointers = (
        *(pointer(s.parts, 0), pointer(s.products, 0), x, further, h, c, new_h, new_c, kept),
        *(pointer(s.rows, 0), pointer(s.lengths, own), grads, pointer(s.row_grads, 0)),
        pointer(s.carry, own),
    )
    counts = t, s.samples * s.units, part_of(s), s.row_step, s.cell_plane, s.carry_step
    call_stage(code, stage, pointers, counts)


# -- Forward ---------------------------------------------------------------------------------------


@_inline
def _stop_of(caller, first, end):
    """Return the end of a group's steps."""
    return min(end, caller.ends[first]) if len(caller.ends) > 0 else end


@_kernel
def prepare(s):
    """Compute the rows of parameters that follow from others."""
    none = pointer(s.zeros, 0)
    _call(s, s.forward, -1, none, none, none, none, none, none, none, 0, 0)


@_kernel
def run(s, products, x, caller, begin, end):
    """Write the states of some steps, and what the backward pass needs from them."""
    for first in range(s.first, s.first + s.count, s.samples):
        stop = _stop_of(caller, first, end)
        for k in range(begin, stop):
            _begin_block(s, caller, first, s.cols, x, k, begin, end)
            t, here, before, kept = _places(s, first, k)
            _begin_step(s, first, t, before)
            given = pointer(x, row_of(s, first, t + 1) * s.block)
            h, c = pointer(s.befores, before), pointer(s.before_cells, before)
            if k + 1 < stop:
                _, ahead, _, gates = _places(s, first, k + 1)
                _fetch(s, s.states, s.cells, ahead, gates)
            p = 0
            for stage in range(s.stages):
                p = forward_products(s, products, p, stage, given, h, c)
                _call(
                    *(s, s.forward, stage, given, h, c),
                    *(pointer(s.states, here), pointer(s.cells, here), pointer(s.gates, kept)),
                    *(pointer(s.zeros, 0), t, first),
                )
            _end_block(s, caller, first, k, begin, end)


@_kernel
def advance(s, products, x, caller, steps):
    """Write the states of the first steps, then copy the last ones to the start of a run."""
    run(s, products, x, caller, 0, steps)
    for first in range(s.first, s.first + s.count, s.samples):
        here, begin = row_of(s, first, steps) * s.units, row_of(s, first, 0) * s.units
        count = min(s.samples, s.batch - first) * s.units
        copy_some(s.states, here, s.states, begin, count, count)
        for n in range(s.others):
            at = n * s.cell_plane
            copy_some(s.cells, at + here, s.cells, at + begin, count, count)


# -- Steps that are left out -----------------------------------------------------------------------


@_inline
def _rests(s, first):
    """Return whether the gradient in a state from later steps is 0."""
    own, count = first * s.units, s.samples * s.units
    # What is mostly not 0 comes first.
    for row in range(len(s.multiplied)):
        if not all_zero(s.parts, (s.state_row + row) * part_of(s), count):
            return False
    for k in range(1 + s.others):
        if not all_zero(s.carry, k * s.carry_step + own, count):
            return False
    return True


@_helper
def _pauses(s, first, products, x, above, k, bound, has_kept):
    """Return whether a step is skipped, since no gradient reaches it, and a bound on states.

    The call for the previous step takes that bound; it is infinite if no step may be skipped.
    """
    t, here, before, kept = _places(s, first, k)
    count = s.samples * s.units
    if s.pauses == NEVER or not no_grads_above(s, first, above, t):
        return False, bound
    if bound == UNKNOWN:
        bound = bound_of(products.values, s.bias, s.rows, s.row_count * s.row_step)
        begin = row_of(s, first, s.steps + 1 if s.back else 0) * s.units
        finite = zero_times(s.states, here, count, bound)
        finite = finite and zero_times(s.befores, begin, count, bound)
        for n in range(s.others):
            at = n * s.cell_plane
            finite = finite and zero_times(s.cells, at + here, count, 1.0)
            finite = finite and zero_times(s.before_cells, at + begin, count, 1.0)
        if s.pauses == STRICT:
            finite = finite and zero_times(s.rows, 0, s.row_count * s.row_step, limit_of(x))
        if not finite:
            bound = np.inf
    pauses = bound < np.inf
    if pauses and s.pauses == STRICT:
        bound = max(bound, limit_of(x))
        pauses = zero_times(s.states, here, count, bound)
        pauses = pauses and zero_times(s.befores, before, count, bound)
        for n in range(s.others):
            at = n * s.cell_plane
            pauses = pauses and zero_times(s.cells, at + here, count, bound)
            pauses = pauses and zero_times(s.before_cells, at + before, count, bound)
        if s.kept_count > 0:
            pauses = pauses and has_kept
            pauses = pauses and zero_times(s.gates, kept, s.kept_whole * count, bound)
            own = min(count, lane_count(s.gates)) if s.sample_lanes else count
            for row in range(s.kept_whole, s.kept_count):
                pauses = pauses and zero_times(s.gates, kept + row * count, own, bound)
    at, size = row_of(s, first, t + 1) * s.block, s.samples * s.block
    for b in range(s.cols // s.block):
        pauses = pauses and zero_times(x, at + b * s.jump, size, 1.0)
    for n in range(len(s.further_rows)):
        at = n * s.cell_plane + row_of(s, first, t + 1) * s.units
        pauses = pauses and zero_times(s.further, at, count, bound)
    return pauses, bound


@_helper
def _leave_out(s, first, products, sums, x, above, below, in_further, k, begin, bound, last):
    """Skip steps from the `k`-th on; return the first that is not skipped, and its bound.

    `last` is the last step of a block that was not skipped. Zeros are written where later code
    reads them.
    """
    while k >= begin:
        pauses, bound = _pauses(s, first, products, x, above, k, bound, True)
        if not pauses:
            break
        t, _, _, gates = _places(s, first, k)
        s.has_grads[first * s.segment + t - s.begin] = False
        if len(below) > 0:
            _clear_columns(s, first, t, below, s.below_width, 0, s.inputs)
        if len(in_further) > 0:
            count = len(s.further_rows) * s.units
            _clear_columns(s, first, t, in_further, s.further_width, s.further_column, count)
        if s.sample_lanes and last // STEPS == k // STEPS:
            clear(s.grads, _grads_at(s, k, gates), s.record * s.samples * s.units)
            _add_block(s, sums, x, first, k, begin, last)
        k -= 1
    return k, bound


@_inline
def _clear_columns(s, first, t, out, width, column, count):
    """Write zeros to columns of the rows of a group in a step."""
    for b in range(min(s.samples, s.given - first)):
        clear(out, (t * s.given + first + b) * width + column, count)


@_inline
def _next_step(s, first, products, sums, x, above, below, in_further, k, begin, bound, last):
    """Return the first step from the `k`-th on that is not skipped, and the next one's bound."""
    if s.pauses != NEVER and _rests(s, first):
        about = s, first, products, sums, x, above, below, in_further
        k, bound = _leave_out(*about, k, begin, bound, last)
    if k >= begin:
        t, _, _, _ = _places(s, first, k)
        s.has_grads[first * s.segment + t - s.begin] = True
    return k, bound, last if last // STEPS == k // STEPS else k


@_kernel
def find_ends(s, products, x, above, ends, begin, end):
    """Write, for each group, the end of the steps whose gates a backward pass needs."""
    for first in range(s.first, s.first + s.count, s.samples):
        _clear_returned(s)
        pauses, bound, stop = _rests(s, first), UNKNOWN, end
        while pauses and stop > begin:
            pauses, bound = _pauses(s, first, products, x, above, stop - 1, bound, False)
            stop -= pauses
        ends[first] = stop


# -- Backward --------------------------------------------------------------------------------------


@_inline
def _clear_returned(s):
    """Clear the gradients that products have returned for states."""
    for row in range(len(s.multiplied)):
        clear(s.parts, (s.state_row + row) * part_of(s), s.samples * s.units)


@_kernel
def back(s, products, x, sums, above, below, in_further, begin, end):
    """Write the gradients in the slots and inputs of some steps, the last step first.

    `above` holds the gradients in the outputs, from the direction's first on, `below` gets those in
    the inputs and `in_further` those in further inputs, unless these are empty, and ``s.carry``
    holds those in the states before, on entry and on return.
    """
    for first in range(s.first, s.first + s.count, s.samples):
        _clear_returned(s)
        clear(s.row_grads, 0, s.row_count * s.row_step)
        k, bound, last = end - 1, UNKNOWN, end + STEPS
        while True:
            k, bound, last = _next_step(
                s, first, products, sums, x, above, below, in_further, k, begin, bound, last
            )
            if k < begin:
                break
            t, here, before, kept = _places(s, first, k)
            grads = _grads_at(s, k, kept)
            given = pointer(x, row_of(s, first, t + 1) * s.block)
            h, c = pointer(s.befores, before), pointer(s.before_cells, before)
            _take_above(s, first, above, t)
            if k > begin:
                _, _, ahead, gates = _places(s, first, k - 1)
                _fetch(s, s.befores, s.before_cells, ahead, gates)
            p = 0
            for stage in range(s.stages - 1, -1, -1):
                # What its arguments get back from the stages behind it.
                p = back_products(s, products, p, stage, grads)
                _call(
                    *(s, s.backward, stage, given, h, c),
                    *(pointer(s.states, here), pointer(s.cells, here), pointer(s.gates, kept)),
                    *(pointer(s.grads, grads), t, first),
                )
            p = back_products(s, products, p, -1, grads)
            if len(s.resets) > 0:
                _end_carried(s, first, t)
            if len(below) > 0:
                _back_input(s, first, products, p, t, grads, below)
            if len(in_further) > 0:
                _back_further(s, first, t, in_further)
            _add_block(s, sums, x, first, k, begin, last)
            if s.row_count > 0 and k % STEPS == 0:
                _add_rows(s, first)
            k -= 1
        if s.row_count > 0:
            _add_rows(s, first)
        _add_returned(s, first)


@_inline
def _back_input(s, first, products, p, t, grads, below):
    """Write the gradients in the inputs of a step, from the `p`-th product on."""
    size, at = s.samples * s.units, (t * s.given + first) * s.below_width
    begins = True
    while has_product(products, p):
        m = matrix_of(products, p)
        given = pointer(s.grads, grads + slot_of(products, p) * size)
        if s.sample_lanes:
            start = pointer(s.zeros, 0) if begins else pointer(s.products, 0)
            multiply_samples(m, given, 0, start, pointer(s.products, 0), s.pairs)
        else:
            about = pointer(s.zeros, 0), begins, pointer(s.products, 0), s.stride, s.samples
            multiply(s, m, given, s.units, size, *about)
        begins = False
        p += 1
    if s.input_row >= 0:
        _add_own_input(s, begins)
    if s.sample_lanes:
        left = s.given - first
        turn_row_out(s.products, 0, s.inputs, below, at, s.below_width, left, s.pairs)
        return
    for b in range(s.samples):
        # Padding of a row overwrites the start of the next row, which is written later.
        room = (s.samples - b) * s.inputs if s.inputs == s.below_width else s.inputs
        copy_some(s.products, b * s.stride, below, at + b * s.below_width, s.inputs, room)


@_helper
def _back_further(s, first, t, out):
    """Write the gradients in the further inputs of a step."""
    for n in range(len(s.further_rows)):
        row, column = s.further_rows[n], s.further_column + n * s.units
        if row < 0:
            _clear_columns(s, first, t, out, s.further_width, column, s.units)
        else:
            at = (t * s.given + first) * s.further_width + column
            rows_out(s, s.parts, row * part_of(s), s.units, out, at, s.further_width, first)


@_helper
def _add_own_input(s, begins):
    """Add the gradients in the input of each unit to those by products, if there are any."""
    lanes, row = lane_count(s.parts), s.input_row * part_of(s)
    zero = number(s.parts, 0.0)
    count = s.samples * s.units if s.sample_lanes else s.units
    step, stride = (0, 0) if s.sample_lanes else (s.units, s.stride)
    for b in range(1 if s.sample_lanes else s.samples):
        for i in range(0, count, lanes):
            to = b * stride + i
            before = zero if begins else load(s.products, to)
            store_some(s.products, to, before + load(s.parts, row + b * step + i), count - i)


@_inline
def _add_block(s, sums, x, first, k, begin, last):
    """Add the sums over a block of steps if the `k`-th in the direction begins it.

    `last` is the last of them that has gradients.
    """
    if s.sample_lanes and (k == begin or k % STEPS == 0):
        t, _, before, gates = _places(s, first, k)
        ahead, place, step = 1 - 2 * s.back, _grads_at(s, k, gates), s.grad_step
        if step == 0:
            step = ahead * s.samples * s.kept * s.units
        x_at = row_of(s, first, t + 1) * s.block
        add_steps(s, sums, x, first, place, step, x_at, before, ahead, last + 1 - k)


@_helper
def _add_rows(s, first):
    """Add the gradients in rows of parameters to those of each sample, and begin again."""
    size, none = s.samples * s.units, pointer(s.zeros, 0)
    if s.has_derived:
        _call(s, s.backward, -1, none, none, none, none, none, none, none, 0, first)
    # Adjacent units.
    per, own = s.units if not s.sample_lanes else 2 if s.pairs else 1, s.row_count * s.units
    for row in range(s.row_count):
        at = row * s.row_step
        for unit in range(0, s.units, per):
            for b in range(s.samples):
                to = (first + b) * own + row * s.units + unit
                for n in range(per):
                    s.row_sums[to + n] += s.row_grads[at + n]
                at += per
        clear(s.row_grads, row * s.row_step, size)


@_helper
def _add_returned(s, first):
    """Add the latest results to the gradients in the states; no 0 is negative."""
    lanes, zero, own = lane_count(s.carry), number(s.carry, 0.0), first * s.units
    count = s.samples * s.units
    for k in range(1 + s.others):
        row = -1
        for n in range(len(s.multiplied)):
            if s.multiplied[n] == k:
                row = s.state_row + n
        for i in range(0, count, lanes):
            at = k * s.carry_step + own + i
            more = load(s.parts, row * part_of(s) + i) if row >= 0 else zero
            store_some(s.carry, at, load(s.carry, at) + more, count - i)

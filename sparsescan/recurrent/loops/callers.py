"""Between the arrays of a caller and those of whole sequences: states, inputs, parameters.

See :mod:`.sequences` for the places of samples, steps and units.
"""

from __future__ import annotations

from ...kernels.compile import njit
from ...kernels.cpu.lanes import (
    add_squares,
    item,
    lane_count,
    less_or,
    load,
    load_pair_square,
    load_samples,
    load_some,
    load_square,
    number,
    sample_count,
    store,
    store_some,
    store_square,
    transpose,
)

# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)


@_inline
def copy_some(x, at, out, to, count, room):
    """Copy some numbers, in whole vectors if `out` has room for the excess."""
    lanes = lane_count(x)
    whole = -(-count // lanes) * lanes
    if whole > room:
        whole = count // lanes * lanes
    for i in range(0, whole, lanes):
        store(out, to + i, load(x, at + i))
    for i in range(whole, count):
        out[to + i] = x[at + i]


@_inline
def row_of(s, first, slot):
    """Return the number of samples whose states precede those of a group in a slot."""
    return first * (s.steps + 2) + slot * s.samples if s.sample_lanes else slot * s.batch + first


# -- Inputs and outputs ----------------------------------------------------------------------------


@_inline
def turn_row_in(x, at, row, samples, cols, out, to, pairs):
    """Write a step of a group, whose samples are `row` apart, with samples as lanes."""
    lanes = sample_count(x)
    if pairs:
        for j in range(0, cols, 2 * lanes):
            square = transpose(load_pair_square(x, at + j, row, samples, cols - j))
            vectors = (cols - j + 1) // 2
            store_square(out, to + j * lanes, 2 * lanes, square, vectors, 2 * lanes)
    else:
        for j in range(0, cols, lanes):
            square = transpose(load_square(x, at + j, row, samples, cols - j))
            store_square(out, to + j * lanes, lanes, square, cols - j, lanes)


@_inline
def turn_row_out(x, at, cols, out, to, row, samples, pairs):
    """Write a step of a group, which has samples as lanes, in rows of the samples."""
    lanes = sample_count(x)
    if pairs:
        for j in range(0, cols, 2 * lanes):
            vectors = (cols - j + 1) // 2
            square = load_pair_square(x, at + j * lanes, 2 * lanes, vectors, 2 * lanes)
            store_square(out, to + j, row, transpose(square), samples, cols - j)
    else:
        for j in range(0, cols, lanes):
            square = transpose(load_square(x, at + j * lanes, lanes, cols - j, lanes))
            store_square(out, to + j, row, square, samples, cols - j)


@_inline
def _rows_in(s, x, at, row, first, cols, out, to):
    """Copy the caller's rows for the samples of a group to a slot."""
    if s.sample_lanes:
        turn_row_in(x, at, row, s.given - first, cols, out, to, s.pairs)
        return
    for b in range(min(s.samples, s.given - first)):
        copy_some(x, at + b * row, out, to + b * cols, cols, cols)


@_inline
def rows_out(s, x, at, cols, out, to, row, first):
    """Copy a slot of the samples of a group to the caller's rows."""
    if s.sample_lanes:
        turn_row_out(x, at, cols, out, to, row, s.given - first, s.pairs)
        return
    for b in range(min(s.samples, s.given - first)):
        for i in range(cols):
            out[to + b * row + i] = x[at + b * cols + i]


@_kernel
def turn_in(caller, s, cols, out, begin, end):
    """Write the inputs of some steps of the samples of a sequence, padded with zeros."""
    for first in range(s.first, s.first + s.count, s.samples):
        turn_steps_in(caller, s, first, cols, out, begin, end)


@_helper
def turn_steps_in(caller, s, first, cols, out, begin, end):
    """Write the inputs of some steps of a group, which have `cols` columns here."""
    x, row = caller.x, caller.cols
    for t in range(begin, end):
        to = row_of(s, first, t + 1) * cols
        _rows_in(s, x, (t * s.given + first) * row, row, first, s.inputs, out, to)
        if caller.is_shorter:
            _clear_shorter(s, first, t, out, to, cols)


@_helper
def further_in(caller, s, first, begin, end):
    """Write the further inputs of some steps of a group."""
    x, width = caller.further, s.further_width
    for n in range(len(s.further_rows)):
        for t in range(begin, end):
            to = n * s.cell_plane + row_of(s, first, t + 1) * s.units
            at = (t * s.given + first) * width + s.further_column + n * s.units
            _rows_in(s, x, at, width, first, s.units, s.further, to)
            if caller.is_shorter:
                _clear_shorter(s, first, t, s.further, to, s.units)


@_inline
def _clear_shorter(s, first, t, out, to, cols):
    """Clear the inputs of a step for samples that have ended.

    Shorter sequences are often padded with NaN, and 0·NaN is not 0.
    """
    own, count = first * s.units, cols * s.samples
    if not s.sample_lanes:
        for b in range(min(s.samples, s.given - first)):
            if t >= s.lengths[own + b * s.units]:
                for i in range(to + b * cols, to + (b + 1) * cols):
                    out[i] = 0
    elif s.pairs:
        lengths = load(s.lengths, own)
        at, zero = number(lengths, t), number(lengths, 0.0)
        for i in range(to, to + count, lane_count(out)):
            store(out, i, less_or(at, lengths, load(out, i), zero))
    else:
        length = load_samples(s.lengths, own)
        when, none = number(length, t), number(length, 0.0)
        for i in range(to, to + count, s.samples):
            store(out, i, less_or(when, length, load_samples(out, i), none))


@_kernel
def turn_out(states, s, begin, end, out, width, column):
    """Write the states in some slots, of the samples of a sequence, to columns of an array."""
    for first in range(s.first, s.first + s.count, s.samples):
        turn_slots_out(states, s, first, begin, end, out, begin, width, column)


@_helper
def turn_slots_out(states, s, first, begin, end, out, origin, width, column):
    """Write the states of a group in some slots to rows of an array, which begins with `origin`."""
    for slot in range(begin, end):
        at = row_of(s, first, slot) * s.units
        to = ((slot - origin) * s.given + first) * width + column
        rows_out(s, states, at, s.units, out, to, width, first)


@_kernel
def gates_out(s, gates, width, out, begin, end):
    """Write vectors of the gates of some steps, from the first one here on.

    Those are ``[step][sample][vector]``, in rows of `width` numbers; zeros without gradients.
    """
    size, units = gates.kept * gates.units, gates.units
    for first in range(0, s.given, gates.samples):
        left = min(gates.samples, s.given - first)
        # If samples are lanes, a group is padded.
        samples = gates.samples if s.sample_lanes else left
        for t in range(begin, end):
            at = (first * gates.steps + t * samples) * size + gates.gate * samples * units
            to = (t * s.given + first) * width
            if gates.has_grads[first * gates.steps + t] == 0:
                for i in range(left * width):
                    out[to + i] = 0
                continue
            if s.sample_lanes:
                turn_row_out(gates.values, at, width, out, to, width, left, s.pairs)
                continue
            for b in range(left):
                for i in range(width):
                    place = at + (i // units * samples + b) * units + i % units
                    out[to + b * width + i] = gates.values[place]


# -- States and gradients of the caller ------------------------------------------------------------


@_inline
def _count(s, first):
    """Return how many samples a group has, including padding."""
    return min(s.samples, s.batch - first)


@_inline
def _state_at(s, first, slot):
    """Return the place of a group's states, in a slot, or in an array without slots."""
    return (first if slot < 0 else row_of(s, first, slot)) * s.units


@_kernel
def state_in(s, out, slot, states, at, row):
    """Write states of the caller, whose samples are `row` apart, to a slot; zeros without any.

    A negative slot stands for an array that has none, such as of gradients in states.
    """
    for first in range(s.first, s.first + s.count, s.samples):
        to, count = _state_at(s, first, slot), _count(s, first) * s.units
        if len(states) == 0:
            for i in range(to, to + count):
                out[i] = 0
        else:
            _rows_in(s, states, at + first * row, row, first, s.units, out, to)


@_kernel
def state_out(s, states, slot, out, at, row):
    """Write the states in a slot to rows of the caller, which are `row` apart."""
    for first in range(s.first, s.first + s.count, s.samples):
        rows_out(s, states, _state_at(s, first, slot), s.units, out, at + first * row, row, first)


@_kernel
def lengths_in(s, out, lengths):
    """Write how many steps each sample has, `s.steps` without `lengths`, for each of its units."""
    samples, per = s.samples, 2 if s.pairs else 1
    for first in range(s.first, s.first + s.count, samples):
        at, count = first * s.units, _count(s, first)
        for k in range(count):
            length = 0
            if first + k < s.given:
                length = lengths[first + k] if len(lengths) > 0 else s.steps
            if not s.sample_lanes:
                for i in range(at + k * s.units, at + (k + 1) * s.units):
                    out[i] = length
            else:
                for i in range(at + k * per, at + samples * s.units, per * samples):
                    out[i] = length
                    out[i + per - 1] = length


@_kernel
def resets_in(s, out, resets, lengths, begin, end):
    """Write which samples are reset before some steps, among those that have not ended.

    Without `lengths` no sample ends early.
    """
    for t in range(begin, end):
        for b in range(s.batch):
            is_reset = b < s.given and resets[t * s.given + b] != 0
            if is_reset and len(lengths) > 0:
                is_reset = t < lengths[b]
            out[t * s.batch + b] = is_reset


@_kernel
def clear_outputs(output, lengths, width, begin, end):
    """Clear the outputs of some steps for samples that have ended."""
    batch = len(lengths)
    for t in range(begin, end):
        for b in range(batch):
            if t >= lengths[b]:
                for i in range((t * batch + b) * width, (t * batch + b + 1) * width):
                    output[i] = 0


@_kernel
def add_columns(x, batch, row, at, count, out, width, column, begin, end):
    """Add some columns of an array to columns of another array, for some steps."""
    lanes = lane_count(x)
    for b in range(begin * batch, end * batch):
        place, to = b * row + at, b * width + column
        for i in range(0, count, lanes):
            more = load_some(out, to + i, count - i) + load_some(x, place + i, count - i)
            store_some(out, to + i, more, count - i)


# -- Parameters of the caller ----------------------------------------------------------------------


@_kernel
def take_over(param, out, at):
    """Write the numbers of a parameter from a place on."""
    for p in range(len(param)):
        out[at + p] = param[p]


# A row of a table of blocks describes a matrix that is stored in tiles: the first row and column of
# the block, their numbers, whether rows of the matrix are rows of the parameter, the block's place
# in the parameter, and the distance between the parameter's rows; then the matrix's place, its
# number of columns, and the rows of a tile.
BLOCK = ("row", "col", "rows", "cols", "turns", "at", "step", "to", "width", "tile")


@_inline
def _four(table, p):
    """Return four columns of a table."""
    return item(table, p), item(table, p + 1), item(table, p + 2), item(table, p + 3)


@_kernel
def pack(param, table, out):
    """Write blocks of a parameter to the tiles of matrices, column by column."""
    lanes = sample_count(out)
    for p in range(0, len(table), len(BLOCK)):
        first, col, rows, cols = _four(table, p)
        turns, at, step, to = _four(table, p + 4)
        width, tile = item(table, p + 8), item(table, p + 9)
        row = first
        while row < first + rows:
            stop = min(first + rows, (row // tile + 1) * tile)
            begin = to + row // tile * tile * (width - 1)
            for c in range(0, cols, lanes):
                for r in range(row, stop, lanes):
                    count, place = stop - r, begin + (col + c) * tile + r
                    if turns:
                        own = at + (r - first) * step + c
                        square = transpose(load_square(param, own, step, count, cols - c))
                    else:
                        own = at + c * step + r - first
                        square = load_square(param, own, step, cols - c, count)
                    store_square(out, place, tile, square, cols - c, count)
            row = stop


@_kernel
def clear_places(table, out):
    """Write zeros: from a place on so many times so many of them, so far apart."""
    zero, width = number(out, 0.0), lane_count(out)
    for p in range(0, len(table), 4):
        at, times, step, count = _four(table, p)
        for k in range(times):
            # Runs are short: calling the system's function takes longer.
            for i in range(0, count, width):
                store_some(out, at + k * step + i, zero, count - i)


@_kernel
def place(params, order, out):
    """Write the numbers of parameters in some order; a place after the last stands for 0."""
    for p in range(len(order)):
        out[p] = params[order[p]] if order[p] < len(params) else 0


@_kernel
def add_placed(params, order, out):
    """Add what :func:`place` writes."""
    for p in range(len(order)):
        if order[p] < len(params):
            out[p] += params[order[p]]


@_kernel
def total_grads(sums, lots, count, order, begins, out):
    """Write the sums of `lots` parts of `count` numbers, in some order; a negative place is 0.

    The sums are added unless this `begins` a gradient.
    """
    for p in range(len(order)):
        sum_of_lots = 0.0 if begins else float(out[p])
        if order[p] >= 0:
            for i in range(order[p], lots * count, count):
                sum_of_lots += sums[i]
        out[p] = sum_of_lots


# A row of a table of blocks of gradients: the place of a block of a parameter, the distances of its
# rows and of its columns (one of which is 1), their numbers, the place of its sums (rows are
# adjacent), and the distance between the sums of two columns.
GRAD_BLOCK = ("at", "row_step", "col_step", "rows", "cols", "sums_at", "sums_col")


@_kernel
def total_blocks(sums, lots, count, table, begins, out):
    """Write the sums of `lots` parts of `count` numbers to blocks of a gradient, or add them."""
    for p in range(0, len(table), len(GRAD_BLOCK)):
        at, row_step, col_step, rows = _four(table, p)
        cols, sums_at, sums_col = item(table, p + 4), item(table, p + 5), item(table, p + 6)
        if begins and lots > 0:
            _write_block(
                sums, lots, count, sums_at, sums_col, out, at, row_step, col_step, rows, cols
            )
            continue
        for row in range(rows):
            for col in range(cols):
                place = at + row * row_step + col * col_step
                sum_of_lots = 0.0 if begins else float(out[place])
                for lot in range(lots):
                    sum_of_lots += sums[lot * count + sums_at + row + col * sums_col]
                out[place] = sum_of_lots


@_helper
def _write_block(sums, lots, count, sums_at, sums_col, out, at, row_step, col_step, rows, cols):
    """Write the sums of lots to a block whose rows or columns are contiguous."""
    lanes = sample_count(sums)
    for row in range(0, rows, lanes):
        for col in range(0, cols, lanes):
            own, height, width = sums_at + row + col * sums_col, rows - row, cols - col
            square = load_square(sums, own, sums_col, width, height)
            for lot in range(1, lots):
                other = load_square(sums, own + lot * count, sums_col, width, height)
                square = add_squares(square, other)
            place = at + row * row_step + col * col_step
            if col_step == 1:
                store_square(out, place, row_step, transpose(square), height, width)
            else:
                store_square(out, place, col_step, square, width, height)


@_kernel
def total_row(sums, lots, count, first, units, begins, out):
    """Write, or add, the sum of `lots` parts of `units` numbers: one parameter for all units."""
    whole = 0.0 if begins else float(out[0])
    for lot in range(lots):
        for i in range(lot * count + first, lot * count + first + units):
            whole += sums[i]
    out[0] = whole


@_kernel
def put_grads(sums, order, begins, out):
    """Write some sums to their places, unless these are negative, and 0 elsewhere; or add them."""
    if begins:
        for p in range(len(out)):
            out[p] = 0
    for p in range(len(order)):
        if order[p] >= 0:
            out[order[p]] += sums[p]

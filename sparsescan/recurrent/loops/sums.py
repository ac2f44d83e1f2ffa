"""Sums of gradients of matrices and biases over steps and samples."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...kernels.compile import njit
from ...kernels.cpu.lanes import (
    add_to,
    fma,
    lane_count,
    load,
    load_samples,
    number,
    put_in,
    sample_count,
    store,
    total,
)
from ...kernels.cpu.tiles import (
    SUM_COLUMNS,
    SUM_ROWS,
    TILE_ROWS,
    TILE_VECTORS,
    add_pair_products,
    add_sample_products,
    add_tile,
)
from .callers import copy_some
from .pauses import clear, has_step

Array = Any
# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)
# Terms that are summed before they are added to the others.
_STEPS_PART = 32


class Gates(NamedTuple):
    """The gates of some steps, ``[step][gate]`` for each group of samples, as in a sequence.

    Attributes
    ----------
    values : ndarray
        The gates.
    steps, kept, units, samples : int
        The numbers of steps, of gates of a step, of units, and of samples of a group; the last
        group may have fewer.
    step, gate : int
        The first step and the first gate here.
    has_grads : ndarray of uint8
        Whether gradients have overwritten the gates, as in a sequence.
    """

    values: Array
    steps: int
    kept: int
    units: int
    samples: int
    step: int
    gate: int
    has_grads: Array


# Columns of the table of sums over steps and samples: the first and last-plus-one row of a step's
# slots; their factor (0 the input, 1 + k the state k, -1 - r the argument r) and its columns; the
# place of the sums; and the first of the columns.
FIRST, END, SOURCE, COLS, OUT, COLUMN = range(6)


class Sums(NamedTuple):
    """Sums of gradients of matrices and biases over steps and samples.

    Attributes
    ----------
    rows, stride : int
        The number of rows of a step's slots, 0 if nothing is summed, and their distance in numbers.
    biased : int
        The number of leading rows that are also summed on their own.
    table : ndarray of int64
        The factors of each sum, a row per sum.
    lot : int
        Samples that are summed in this order; each lot has its own sums.
    out, size : ndarray of float64, int
        The sums, ``[lot][size]``, each ``[column][row]``.
    row_sums : ndarray of float64
        The sums of rows on their own, ``[lot][row]``.
    ones : ndarray
        A one for each sample of a group.
    begins : bool
        Whether `out` is not initialised yet, if units are lanes.
    """

    rows: int
    stride: int
    biased: int
    table: Array
    lot: int
    out: Array
    size: int
    row_sums: Array
    ones: Array
    begins: bool


# Samples of steps that are summed at once, in the cache, and steps of a group whose lanes are
# samples. These sums are then added in double precision.
BLOCK, STEPS = 256, 32


@_kernel
def sum_products(
    gates,
    sums,
    x,
    x_at,
    x_block,
    jump,
    states,
    cells,
    cell_plane,
    at,
    batch,
    steps,
    room,
    begin,
    end,
):
    """Add sums of products, over some steps and all samples, of rows `begin` to `end` of the slots.

    That is ``Σ a[t, n, i]·b[t, n, j]`` for each row of ``sums.table``, and ``Σ a[t, n, i]``. A
    vector begins at `begin`. Rows without sums that share a vector with others get sums too; these
    are meaningless. Columns of `x` are in blocks of `x_block`, which begin `jump` apart; `x_at` and
    `at` are the places of the first step in `x` and in states. `room` begins with a tile of zeros.
    """
    lanes, stride, units = lane_count(x), sums.stride, gates.units
    block = max(1, BLOCK // batch)
    most = TILE_VECTORS * lanes
    together = (1 + TILE_ROWS) * most
    beside = together + max(batch, BLOCK) * most
    for start in range(0, steps, block):
        count = min(steps - start, block)
        begins = sums.begins and start == 0
        if not begins and not _has_grads(gates, batch, start, count):
            continue
        terms, first = count * batch, start * batch
        i = begin
        while i < end:
            size = _tile_width(-(-(end - i) // lanes)) * lanes
            some = min(size, end - i)
            _take_together(gates, batch, start, count, i, some, room, together, most)
            if i < sums.biased:
                _add_rows(room, together, terms, size, sums.row_sums, i)
            for p in range(len(sums.table)):
                t = sums.table
                # Whole vectors of rows without sums with a factor are skipped.
                skip = max(0, t[p, FIRST] - i) // lanes * lanes
                stop = min(size, -(-(t[p, END] - i) // lanes) * lanes)
                if skip >= stop:
                    continue
                source, cols, out = t[p, SOURCE], t[p, COLS], t[p, OUT] + i
                b, b_at, b_step, width, apart = states, at + first * units, units, cols, 0
                if source == 0:
                    b, b_at, b_step, width = x, x_at + first * x_block, x_block, x_block
                    apart = jump
                elif source > 1:
                    b, b_at = cells, (source - 2) * cell_plane + at + first * units
                elif source < 0:
                    argument = sums.rows + (-1 - source) * units
                    _take_together(gates, batch, start, count, argument, units, room, beside, units)
                    b, b_at = room, beside
                b_at += t[p, COLUMN]
                for j in range(0, cols, width):
                    to = out + j * stride
                    about = b, b_at, b_step, width, sums.out, to, stride, begins
                    _add_columns(room, terms, skip, stop, *about)
                    b_at += apart
            i += size


@_inline
def _has_grads(gates, batch, start, count):
    """Return whether any of some steps has gradients."""
    for first in range(0, batch, gates.samples):
        for t in range(start, start + count):
            if has_step(gates, first, t):
                return True
    return False


@_helper
def add_steps(s, sums, x, first, place, step, x_at, before, ahead, count):
    """Add the sums over some steps of a group whose lanes are samples.

    Gradients of the first step begin at `place`, and those of the others are `step` apart; its
    inputs begin at `x_at`, and the states before it at `before`. The next step in memory is `ahead`
    of it or behind.
    """
    samples, stride, lot = s.samples, sums.stride, first // sums.lot
    a, pairs, t = s.grads, s.pairs, sums.table
    columns = 2 * SUM_COLUMNS if pairs else SUM_COLUMNS
    whole = lot * sums.size
    for i in range(0, sums.biased, SUM_ROWS):
        at, out = place + i * samples, lot * stride + i
        _add_products(pairs, sums.row_sums, out, 0, a, at, step, sums.ones, 0, 0, count, 1)
    for p in range(len(t)):
        source, cols = t[p, SOURCE], t[p, COLS]
        b, b_at, b_step = s.befores, before, ahead * samples * s.units
        width, apart = cols, 0
        if source == 0:
            b, b_at, b_step = x, x_at, ahead * samples * s.block
            width, apart = s.block, s.jump
        elif source > 1:
            b, b_at = s.before_cells, before + (source - 2) * s.cell_plane
        elif source < 0:
            b, b_at, b_step = a, place + (sums.rows + (-1 - source) * s.units) * samples, step
        b_at += t[p, COLUMN] * samples
        for block in range(0, cols, width):
            for i in range(t[p, FIRST] // SUM_ROWS * SUM_ROWS, t[p, END], SUM_ROWS):
                at = place + i * samples
                for j in range(0, width, columns):
                    out, left = whole + t[p, OUT] + (block + j) * stride + i, width - j
                    own = b_at + j * samples
                    _add_products(
                        *(pairs, sums.out, out, stride, a, at, step, b, own, b_step, count, left)
                    )
            b_at += apart


@_inline
def _add_products(pairs, out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width):
    """Add products with samples as lanes to some sums."""
    if pairs:
        add_pair_products(out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width)
    else:
        add_sample_products(out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width)


@_inline
def _tile_width(vectors):
    """Return how many of the remaining vectors a tile takes: a tile of one would be slow."""
    return 2 if vectors == 4 else min(TILE_VECTORS, vectors)


@_helper
def _add_rows(room, at, terms, size, out, to):
    """Add the sums of some vectors of the gates, whose rows are in `room` from `at` on."""
    lanes = lane_count(room)
    step = TILE_VECTORS * lanes
    part = _STEPS_PART * step
    for i in range(0, size, lanes):
        begin, end = at + i, at + i + terms * step
        total_sum = number(room, 0.0)
        while begin < end:
            # Two independent sums.
            k, stop = begin, min(begin + part, end)
            s0, s1 = number(room, 0.0), number(room, 0.0)
            while k + step < stop:
                s0, s1 = s0 + load(room, k), s1 + load(room, k + step)
                k += 2 * step
            if k < stop:
                s0 = s0 + load(room, k)
            total_sum = total_sum + (s0 + s1)
            begin += part
        add_to(out, to + i, total_sum)


@_helper
def _add_columns(room, terms, begin, end, b, at, step, cols, out, to, stride, begins):
    """Add products of columns of `b` and some vectors of the gates, whose rows are in `room`.

    The rows of `b` are `step` apart.
    If this `begins` the sums, they are written.
    """
    lanes = lane_count(b)
    most = TILE_VECTORS * lanes
    zeros, tile, together = 0, most, (1 + TILE_ROWS) * most
    for j in range(0, cols if begin < end else 0, TILE_ROWS):
        height = min(TILE_ROWS, cols - j)
        add_tile(
            *(room, tile, most, room, zeros, 0, room, together + begin),
            *(b, at + j, 1, step, 0, 1, terms, _STEPS_PART, (end - begin) // lanes, height),
        )
        for n in range(height):
            for k in range(0, end - begin, lanes):
                v, place = load(room, tile + n * most + k), to + begin + (j + n) * stride + k
                if begins:
                    put_in(out, place, v)
                else:
                    add_to(out, place, v)


@_helper
def _take_together(gates, batch, start, steps, row, count, out, to, stride):
    """Write `count` rows of gates from `row` on, sample by sample, in rows of `stride`."""
    a, units, done = gates.values, gates.units, 0
    gate, unit = gates.gate + row // units, row % units
    while done < count:
        some = min(units - unit, count - done)
        place = to + done
        for t in range(start, start + steps):
            for first in range(0, batch, gates.samples):
                samples = min(gates.samples, batch - first)
                at = (first * gates.steps + (gates.step + t) * samples) * gates.kept * units
                at += gate * samples * units + unit
                has_grads = has_step(gates, first, t)
                for _ in range(samples):
                    if has_grads:
                        copy_some(a, at, out, place, some, stride - done)
                    else:
                        clear(out, place, some)
                    at += units
                    place += stride
        gate, unit, done = gate + 1, 0, done + some


@_kernel
def sum_sparse_products(
    gates,
    b,
    b_at,
    group,
    step,
    cols,
    block,
    jump,
    batch,
    steps,
    unit,
    indptr,
    indices,
    room,
    out,
    begin,
    end,
):
    """Add the sums of a sparse matrix's entries, with samples as lanes.

    Its columns, and those of `b`, are in blocks; in `b`, blocks are `jump` apart, samples `group`,
    and steps of a group `step`. Its rows begin with a unit.
    """
    lanes, samples, zero = lane_count(b), gates.samples, number(b, 0.0)
    together = max(1, BLOCK // batch)
    gate_step = gates.kept * gates.units * samples
    # The terms of a sum are adjacent. Caches are slow if rows are a power of two apart, so they are
    # not.
    stride = -(-together * batch // lanes) * lanes + lanes
    turned = (end - begin) * stride
    for start in range(0, steps, together):
        count = min(steps - start, together)
        if not _has_grads(gates, batch, start, count):
            continue
        terms = count * batch
        for first in range(0, batch, samples):
            at = first * gates.steps * gates.kept * gates.units + (gates.step + start) * gate_step
            at += (gates.gate * gates.units + unit + begin) * samples
            to = first * count
            _put_in_rows(gates.values, at, gate_step, count, end - begin, room, to, stride)
            for t in range(count):
                if not has_step(gates, first, start + t):
                    _clear_columns(room, to + t * samples, samples, end - begin, stride)
            at = b_at + first * group + start * step
            for j in range(0, cols, block):
                rows = turned + j * stride + to
                _put_in_rows(b, at, step, count, block, room, rows, stride)
                at += jump
        for row in range(end - begin + cols):
            for k in range(terms, -(-terms // lanes) * lanes):
                room[row * stride + k] = 0
        for i in range(begin, end):
            row = (i - begin) * stride
            p, last = indptr[i], indptr[i + 1]
            while p < last:
                # Past the end of the row, the last entry is summed again, and not used.
                q, r, u = min(p + 1, last - 1), min(p + 2, last - 1), min(p + 3, last - 1)
                s0, s1, s2, s3 = zero, zero, zero, zero
                at0, at1 = turned + indices[p] * stride, turned + indices[q] * stride
                at2, at3 = turned + indices[r] * stride, turned + indices[u] * stride
                for k in range(0, terms, lanes):
                    v = load(room, row + k)
                    s0 = fma(v, load(room, at0 + k), s0)
                    s1 = fma(v, load(room, at1 + k), s1)
                    s2 = fma(v, load(room, at2 + k), s2)
                    s3 = fma(v, load(room, at3 + k), s3)
                out[p] += total(s0)
                if p + 1 < last:
                    out[p + 1] += total(s1)
                if p + 2 < last:
                    out[p + 2] += total(s2)
                if p + 3 < last:
                    out[p + 3] += total(s3)
                p += 4


@_helper
def _put_in_rows(x, at, step, steps, cols, out, to, stride):
    """Write the vectors of samples of some steps one after the other, in a row for each column."""
    samples = sample_count(x)
    for t in range(steps):
        for j in range(cols):
            v = load_samples(x, at + t * step + j * samples)
            store(out, to + j * stride + t * samples, v)


@_helper
def _clear_columns(out, at, samples, rows, stride):
    """Clear the vectors of samples of a step in all rows."""
    for j in range(rows):
        for k in range(samples):
            out[at + j * stride + k] = 0

"""Products of matrices and vectors, of the samples of a group: for slots, and back from them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...kernels.compile import njit
from ...kernels.cpu.functions import maximum
from ...kernels.cpu.lanes import (
    fma,
    item,
    keep_some,
    lane_count,
    load,
    load_samples,
    load_some,
    neighbours,
    number,
    sample_count,
    splat_samples,
    store,
    store_some,
    total,
)
from ...kernels.cpu.tiles import add_pair_tile, add_sample_tile
from .pauses import clear
from .sharing import multiply
from .stages import pointer

Array = Any
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)
# Terms that are summed before they are added to the others.
_PART = 64


class Matrix(NamedTuple):
    """A matrix that multiplies the vectors of all samples.

    Attributes
    ----------
    is_sparse : bool
        Whether only entries are stored; then samples are lanes.
    rows, cols, vectors : int
        Its shape, and the number of vectors that the rows fill if units are lanes.
    blocks, block : int
        The number of blocks of columns, and the columns of a block.
    tile : int
        Adjacent rows in a column.
    values, value_at : ndarray, int
        A dense matrix is stored in tiles of `tile` rows, each column by column; the last tile is
        padded with zeros. A sparse matrix stores only its entries.
    places, index_at, indptr_at : ndarray of int64, int, int
        Where the indices and the row pointers of a sparse matrix begin, as in CSR.
    """

    is_sparse: bool
    rows: int
    cols: int
    vectors: int
    blocks: int
    block: int
    tile: int
    values: Array
    value_at: int
    places: Array
    index_at: int
    indptr_at: int


# Columns of the table of products: the stage that reads the slots; what is multiplied (0 the input,
# 1 + k the state k, -1 - r the row r of the parts); the first slot; the row of the parts for the
# gradient; whether this product is the first one there; whether padding of a tile would overwrite
# needed numbers; the kind of reduction, over heads of `block` units; the first unit of the matrix's
# head, and whether it is the last head; and whether all units get the same number (if samples are
# lanes, only the first units need it). Then the fields of `Matrix` except arrays.
COLUMNS = ("stage", "source", "slot", "to", "begins", "spills", "reduces", "unit", "ends")
COLUMNS += ("uniform",)
COLUMNS += ("is_sparse", "rows", "cols", "vectors", "blocks", "block", "tile", "value_at")
COLUMNS += ("index_at", "indptr_at")
_STAGE, _SOURCE, _SLOT, _TO, _BEGINS, _SPILLS, _REDUCES, _UNIT, _ENDS, _UNIFORM, _MATRIX = range(11)
_COUNT = len(COLUMNS)
REDUCTIONS = ("", "sum", "mean", "maximum")
SUM, MEAN, MAXIMUM = range(1, 4)


class Products(NamedTuple):
    """All products of a step in one pass, in the order in which they are computed.

    Attributes
    ----------
    table : ndarray of int64
        What each product multiplies, and how it is stored: ``len(COLUMNS)`` numbers per product.
    values : ndarray
        All matrices.
    places : ndarray of int64
        Indices and row pointers of sparse ones.
    """

    table: Array
    values: Array
    places: Array


@_inline
def matrix_of(products, p):
    """Return the matrix of a product."""
    t, at = products.table, p * _COUNT + _MATRIX
    return Matrix(
        item(t, at) != 0,
        *(item(t, at + 1), item(t, at + 2), item(t, at + 3), item(t, at + 4)),
        *(item(t, at + 5), item(t, at + 6)),
        *(products.values, item(t, at + 7), products.places, item(t, at + 8), item(t, at + 9)),
    )


@_inline
def slot_of(products, p):
    """Return the first slot of a product."""
    return item(products.table, p * _COUNT + _SLOT)


@_inline
def has_product(products, p):
    """Return whether there is a `p`-th product."""
    return p * _COUNT < len(products.table)


@_inline
def _about(products, p, column):
    """Return a product's entry in a column of the table."""
    return item(products.table, p * _COUNT + column)


# -- Both directions -------------------------------------------------------------------------------


@_inline
def forward_products(s, products, p, stage, x, states, cells):
    """Add the products of a stage to the slots, from the `p`-th on; return the first one left.

    `x`, `states` and `cells` are pointers to those of the step.
    """
    bias, lanes = s.bias, lane_count(s.bias)
    if stage == 0:
        rows = s.begun * s.units
        done = 0
        # Products with the input come first, and may begin the sums.
        if has_product(products, p) and _about(products, p, _SOURCE) == 0:
            m = matrix_of(products, p)
            if s.sample_lanes:
                multiply_samples(m, x, s.jump, pointer(bias, 0), pointer(s.parts, 0), s.pairs)
            else:
                about = s.block, s.jump, pointer(bias, 0), True, pointer(s.products, 0)
                multiply(s, m, x, *about, s.stride, s.samples)
            done = m.rows
            p += 1
        # After the rows of the matrix, 0·x was written, which may be NaN.
        if s.sample_lanes:
            for i in range(done * s.samples, rows * s.samples, lanes):
                store(s.parts, i, load(bias, i))
        else:
            for b in range(s.samples):
                for i in range(done, rows, lanes):
                    store(s.products, b * s.stride + i, load(bias, i))
    first, end = s.slots, 0
    while has_product(products, p) and _about(products, p, _STAGE) == stage:
        m, source, slot = (
            matrix_of(products, p),
            _about(products, p, _SOURCE),
            _about(products, p, _SLOT),
        )
        read, step, jump = states, s.units, 0
        if source == 0:
            read, step, jump = x, s.block, s.jump
        elif source > 1:
            read = pointer(cells, (source - 2) * s.cell_plane)
        elif source < 0:
            read = pointer(s.parts, (-1 - source) * part_of(s))
        kind, spills = _about(products, p, _REDUCES), _about(products, p, _SPILLS) != 0
        unit = _about(products, p, _UNIT)
        if kind > 0:
            begins, uniform = _about(products, p, _BEGINS) != 0, _about(products, p, _UNIFORM) != 0
            _reduce(s, kind, m.block, read, step, slot, begins, uniform)
        else:
            read = pointer(read, unit * (s.samples if s.sample_lanes else 1))
            _add_product(s, m, read, step, jump, slot * s.units + unit, False, spills)
        first, end = min(first, slot), max(end, slot + -(-m.rows // s.units))
        p += 1
    if not s.sample_lanes:
        if stage == 0:
            first, end = 0, max(end, s.begun)
        take_apart(s, first, end, first)
    return p


@_inline
def back_products(s, products, p, stage, grads):
    """Write the gradients in the factors of a stage's products, from the `p`-th on.

    The factors are arguments that the stage computes, or states if `stage` is -1. Return the first
    product of another stage.
    """
    jump = s.samples * s.units
    while has_product(products, p) and _about(products, p, _STAGE) == stage:
        m, to = matrix_of(products, p), _about(products, p, _TO)
        read = pointer(s.grads, grads + _about(products, p, _SLOT) * jump)
        begins, spills = _about(products, p, _BEGINS) != 0, _about(products, p, _SPILLS) != 0
        kind, unit = _about(products, p, _REDUCES), _about(products, p, _UNIT)
        if kind > 0:
            uniform = _about(products, p, _UNIFORM) != 0
            _reduce(s, kind, m.block, read, s.units, to if s.sample_lanes else 0, begins, uniform)
        elif s.sample_lanes:
            read = pointer(read, unit * s.samples)
            _add_product(s, m, read, s.units, 0, to * s.units + unit, begins, spills)
        else:
            _add_product(s, m, pointer(read, unit), s.units, jump, unit, begins, spills)
        ends = _about(products, p, _ENDS) != 0
        if ends and begins and unit + m.rows < s.units:
            _clear_units(s, to, unit + m.rows)
        if ends and not s.sample_lanes:
            take_apart(s, 0, 1, to)
        p += 1
    return p


@_inline
def _add_product(s, m, x, step, jump, row, begins, spills):
    """Write a product to rows of the parts or of a sample's products, or add it.

    If its last tile `spills` into the next rows, it is written elsewhere first.
    """
    lanes = lane_count(s.parts)
    if s.sample_lanes:
        at, count = row * s.samples, m.rows * s.samples
        out = pointer(s.products, 0) if spills else pointer(s.parts, at)
        start = pointer(s.zeros, 0) if spills or begins else out
        multiply_samples(m, x, jump, start, out, s.pairs)
        for i in range(0, count if spills else 0, lanes):
            v = load(s.products, i)
            v = v if begins else v + load(s.parts, at + i)
            store_some(s.parts, at + i, v, count - i)
        return
    out = pointer(s.products, s.spare if spills else row)
    about = step, jump, pointer(s.zeros, 0), spills or begins, out
    multiply(s, m, x, *about, s.stride, s.samples)
    for b in range(s.samples if spills else 0):
        for i in range(0, m.rows, lanes):
            place = b * s.stride + i
            v = load(s.products, place + s.spare)
            v = v if begins else v + load(s.products, place + row)
            store_some(s.products, place + row, v, m.rows - i)


@_helper
def _clear_units(s, row, unit):
    """Clear the units from one on in a row of the parts, or first in the products of a sample."""
    if s.sample_lanes:
        place = (row * s.units + unit) * s.samples
        clear(s.parts, place, (s.units - unit) * s.samples)
        return
    for b in range(s.samples):
        clear(s.products, b * s.stride + unit, s.units - unit)


@_helper
def _reduce(s, kind, size, x, step, row, begins, uniform):
    """Write a reduction over each head of `size` units to a vector, as a product, or add it.

    `x` is a pointer to the units of the first sample; if units are lanes, those of the next are
    `step` apart. If samples are lanes and it is `uniform`, only the first units get it.
    """
    samples = s.samples
    if not s.sample_lanes:
        for b in range(samples):
            for g in range(0, s.units, size):
                place = b * s.stride + row * s.units + g
                _reduce_units(s, kind, size, x, b * step + g, place, begins)
        return
    share = number(load_samples(s.zeros, 0), 1.0 / size if kind == MEAN else 1.0)
    for g in range(0, s.units, size):
        if not s.pairs:
            v = load_samples(x, g * samples)
            for u in range(g + 1, g + size):
                v = _with(kind, v, load_samples(x, u * samples))
            v = v * share
            # Whole vectors of the functions of a cell, which may have several units.
            some = min(size, lane_count(s.parts) // samples) if uniform else size
            for u in range(g, g + some):
                place = (row * s.units + u) * samples
                store(s.parts, place, v if begins else v + load_samples(s.parts, place))
        else:
            _reduce_pairs(s, kind, size, x, g, row, begins, uniform)


@_inline
def _with(kind, v, other):
    """Return the sum of two vectors, or their maximum: NaN if one is NaN."""
    return maximum(v, other) if kind == MAXIMUM else v + other


@_inline
def _larger(a, b):
    """Return the larger of two numbers, and NaN if one of them is NaN."""
    return b if b > a or b != b else a


@_inline
def _reduce_units(s, kind, size, x, first, place, begins):
    """Reduce adjacent numbers to one, and write it in place of each."""
    lanes = lane_count(s.parts)
    if kind == MAXIMUM:
        value = item(x, first)
        for i in range(first + 1, first + size):
            value = _larger(value, item(x, i))
    else:
        v, i = number(s.parts, 0.0), 0
        while i + lanes <= size:
            v = v + load(x, first + i)
            i += lanes
        if i < size:
            v = v + keep_some(load_some(x, first + i, size - i), size - i)
        value = total(v)
        if kind == MEAN:
            value = value / size
    for i in range(0, size, lanes):
        v = number(s.parts, value)
        if not begins:
            v = v + load(s.products, place + i)
        store_some(s.products, place + i, v, size - i)


@_inline
def _reduce_pairs(s, kind, size, x, g, row, begins, uniform):
    """Reduce a head if lanes are the samples of two units."""
    samples = s.samples
    share = 1.0 / size if kind == MEAN else 1.0
    if size % 2 == 0:
        v, end, u = load(x, g * samples), g + size, g + 2
        if size >= 8:
            # Four independent results.
            a, b, c = load(x, u * samples), load(x, (g + 4) * samples), load(x, (g + 6) * samples)
            u = g + 8
            while u + 8 <= end:
                v = _with(kind, v, load(x, u * samples))
                a = _with(kind, a, load(x, (u + 2) * samples))
                b = _with(kind, b, load(x, (u + 4) * samples))
                c = _with(kind, c, load(x, (u + 6) * samples))
                u += 8
            v = _with(kind, _with(kind, v, a), _with(kind, b, c))
        while u < end:
            v = _with(kind, v, load(x, u * samples))
            u += 2
        v = _with(kind, v, neighbours(v)) * number(v, share)
        for u in range(g, g + 2 if uniform else end, 2):
            place = (row * s.units + u) * samples
            store(s.parts, place, v if begins else v + load(s.parts, place))
        return
    # A head begins or ends within a pair.
    for b in range(samples):
        value = item(x, _place_of(g, b, samples))
        for u in range(g + 1, g + size):
            other = item(x, _place_of(u, b, samples))
            value = _larger(value, other) if kind == MAXIMUM else value + other
        for u in range(g, g + size):
            place = row * s.units * samples + _place_of(u, b, samples)
            before = number(s.parts, 0.0) if begins else load_some(s.parts, place, 1)
            store_some(s.parts, place, before + number(s.parts, value * share), 1)


@_inline
def _place_of(unit, sample, samples):
    """Return the place of a unit of a sample if lanes are the samples of two units."""
    return (unit - unit % 2) * samples + 2 * sample + unit % 2


@_inline
def part_of(s):
    """Return the distance between vectors in the parts.

    If units are lanes, it is whole vectors, and one more.
    """
    if s.sample_lanes:
        return s.samples * s.units
    lanes = lane_count(s.parts)
    return -(-s.samples * s.units // lanes) * lanes + lanes


@_inline
def take_apart(s, first, end, to):
    """Copy some vectors of a step's products to the parts, from row `to` on."""
    lanes, part = lane_count(s.parts), part_of(s)
    for g in range(first, end):
        for b in range(s.samples):
            for i in range(0, s.units, lanes):
                # The next sample overwrites the lanes beyond the units.
                v = load(s.products, b * s.stride + g * s.units + i)
                store(s.parts, (to + g - first) * part + b * s.units + i, v)


# -- One product -----------------------------------------------------------------------------------


@_inline
def multiply_samples(m, x, jump, start, out, pairs):
    """Write ``start + m x`` with samples as lanes; `start` may be `out`.

    All arguments except `m` are pointers. A sample's numbers are in blocks, like the columns of
    `m`; blocks begin `jump` apart, and are adjacent if `jump` is 0. Indices of a sparse `m` are
    places in `x`.
    """
    samples, part = sample_count(x), min(_PART, m.block)
    if m.is_sparse:
        _multiply_sparse(m, x, start, out)
        return
    cols, at, first = m.block if jump > 0 else m.cols, 0, 0
    # A range with such a step would divide, in every step of a sequence.
    while first < m.cols:
        row = 0
        while row < m.rows:
            place, values = row * samples, m.value_at + row * m.cols + first * m.tile
            if pairs:
                add_pair_tile(
                    *(out, place, start, place, x, at, m.values, values),
                    *(cols >> 1, part >> 1, m.tile >> 1),
                )
            else:
                add_sample_tile(
                    *(out, place, start, place, x, at, m.values, values), *(cols, part, m.tile)
                )
            row += m.tile
        at += jump
        first += cols
        start = out


@_helper
def _multiply_sparse(m, x, start, out):
    samples = sample_count(x)
    for row in range(m.rows):
        # Four independent sums.
        zero = number(load_samples(start, 0), 0.0)
        s0, s1, s2, s3 = zero, zero, zero, zero
        p, end = m.places[m.indptr_at + row], m.places[m.indptr_at + row + 1]
        v, i = m.value_at, m.index_at
        while p + 4 <= end:
            x0 = load_samples(x, m.places[i + p] * samples)
            x1 = load_samples(x, m.places[i + p + 1] * samples)
            x2 = load_samples(x, m.places[i + p + 2] * samples)
            x3 = load_samples(x, m.places[i + p + 3] * samples)
            s0 = fma(splat_samples(m.values, v + p), x0, s0)
            s1 = fma(splat_samples(m.values, v + p + 1), x1, s1)
            s2 = fma(splat_samples(m.values, v + p + 2), x2, s2)
            s3 = fma(splat_samples(m.values, v + p + 3), x3, s3)
            p += 4
        while p < end:
            x0 = load_samples(x, m.places[i + p] * samples)
            s0 = fma(splat_samples(m.values, v + p), x0, s0)
            p += 1
        before = load_samples(start, row * samples)
        store(out, row * samples, before + ((s0 + s1) + (s2 + s3)))

"""Products of matrices and vectors, in tiles that stay in registers."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import BYTES, PAIR_BYTES, SAMPLE_BYTES, vector_of
from .vector import (
    add_in_place,
    align_of,
    broadcast,
    call_llvm,
    lane_sums,
    load_at,
    pointer,
    shuffle,
)

# The most rows of a tile, and the most vectors per row, in registers.
TILE_VECTORS = 3
TILE_ROWS = 8 if BYTES == 64 else 4


@intrinsic
def add_tile(
    typingctx,
    out,
    out_at,
    out_step,
    start,
    start_at,
    start_step,
    vectors,
    vectors_at,
    numbers,
    numbers_at,
    numbers_step,
    number_step,
    block_step,
    blocks,
    count,
    part,
    width,
    height,
):
    """Write ``start[n] + Σ numbers[n, k]·vectors[k]`` to the rows ``out[n]`` of a tile.

    Parameters
    ----------
    out, out_at, out_step : array, int, int
        Where the first row begins, and the distance between rows.
    start, start_at, start_step : array, int, int
        Where the rows of `start` begin, which may be `out`.
    vectors, vectors_at : array, int
        Where ``vectors[0]`` begins, which is as wide as the tile; each has room for `TILE_VECTORS`.
    numbers, numbers_at, numbers_step, number_step, block_step : array, int, int, int, int
        The place of ``numbers[0, 0]``, and the distances to the next `n`, to the next `k`, and to
        the next block.
    blocks, count, part : int
        The `k` form `blocks` blocks of `count`. `part` terms of a block are summed before they are
        added to the others, since short sums round less.
    width, height : int
        Vectors and rows of the tile; any excess over the size of a tile is ignored.
    """

    def codegen(context, builder, signature, args):
        arrays = {0: args[1], 3: args[4], 6: args[7], 8: args[9]}
        places = [
            pointer(context, builder, signature.args[k], args[k], at) for k, at in arrays.items()
        ]
        steps = [args[k] for k in (2, 5, 10, 11, 12, 13, 14, 15, 16, 17)]
        vector = context.get_value_type(vector_of(vectors.dtype))
        builder.call(_tiles(builder.module, vector, steps[0].type), [*places, *steps])
        return context.get_dummy_value()

    places = [types.intp] * 2
    kinds = [out, *places, start, *places, vectors, types.intp, numbers, *[types.intp] * 9]
    return types.void(*kinds), codegen


def _tiles(module, vector, size):
    """Return the function that writes a tile."""

    def write(builder, args, columns, rows):
        steps = _Steps(size(TILE_VECTORS * vector.count), *args[4:])
        _tile(builder, vector, columns, rows, args[:4], steps)

    kinds = [*[vector.element.as_pointer()] * 4, *[size] * 8]
    widths, heights = range(TILE_VECTORS, 0, -1), range(TILE_ROWS, 0, -1)
    return _by_shape(module, f"sparsescan.tile.{vector}", kinds, size, widths, heights, write)


def _by_shape(module, name, kinds, size, widths, heights, write):
    """Return a function with code for each width and height.

    ``write(builder, args, width, height)`` writes the code; the height may exceed what is needed.
    It is not inlined, since it would take its callers' registers.
    """
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(ir.VoidType(), [*kinds, size, size])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    *args, width, height = function.args
    for columns in widths:
        with builder.if_then(builder.icmp_signed(">=", width, size(columns))):
            for rows, fewer in zip(heights, (*heights[1:], 0), strict=True):
                with builder.if_then(builder.icmp_signed(">", height, size(fewer))):
                    write(builder, args, columns, rows)
                    builder.ret_void()
            builder.ret_void()
    builder.ret_void()
    return function


class _Steps(NamedTuple):
    """Distances between a tile's vectors, rows and numbers, and the count of numbers."""

    vector: ir.Value
    out: ir.Value
    start: ir.Value
    numbers: ir.Value
    number: ir.Value
    block: ir.Value
    blocks: ir.Value
    count: ir.Value
    part: ir.Value


def _tile(builder, vector, columns, rows, places, steps, grain=1):
    """Write a tile with a number of vectors and rows.

    With a `grain` of 2 a vector of `vectors` has lanes of two `k` in turn, and one of `out` those
    of two rows.
    """
    out, start, vectors, numbers = places
    count, part = steps.count, steps.part
    size = count.type
    zero = ir.Constant(vector, [0.0] * vector.count)
    sums = [cgutils.alloca_once(builder, vector) for _ in range(rows * columns)]

    firsts = [builder.gep(numbers, [builder.mul(steps.numbers, size(n))]) for n in range(rows)]
    every_block = cgutils.for_range(builder, steps.blocks)
    every_part = cgutils.for_range_slice(builder, size(0), count, part, intp=size, inc=True)
    with every_block as block, every_part as (done, _):
        left = builder.sub(count, done)
        some = builder.select(builder.icmp_signed("<", left, part), left, part)
        before = builder.add(builder.mul(block.index, count), done)
        offset = builder.mul(block.index, steps.block)
        numbers_done = builder.mul(done, size(grain))
        offset = builder.add(offset, builder.mul(numbers_done, steps.number))
        for each in sums:
            builder.store(zero, each)
        with cgutils.for_range(builder, some) as loop:
            k = builder.mul(builder.add(before, loop.index), steps.vector)
            loaded = [
                load_at(builder, vectors, builder.add(k, size(c * vector.count)), vector)
                for c in range(columns)
            ]
            for part_of in range(grain):
                number = builder.add(builder.mul(loop.index, size(grain)), size(part_of))
                index = builder.add(offset, builder.mul(number, steps.number))
                spread = [_spread(builder, each, part_of, grain) for each in loaded]
                for n, first in enumerate(firsts):
                    factor = _repeat(builder, builder.gep(first, [index]), vector, grain)
                    for c, each in enumerate(spread):
                        to = sums[n * columns + c]
                        added = call_llvm(builder, "fma", vector, [factor, each, builder.load(to)])
                        builder.store(added, to)
        begins = builder.icmp_signed("==", before, size(0))
        begin = builder.select(begins, start, out)
        begin_step = builder.select(begins, steps.start, steps.out)
        for n in range(rows):
            for c in range(columns):
                added = builder.load(sums[n * columns + c])
                index = builder.add(builder.mul(begin_step, size(n)), size(c * vector.count))
                added = builder.fadd(load_at(builder, begin, index, vector), added)
                index = builder.add(builder.mul(steps.out, size(n)), size(c * vector.count))
                place = builder.bitcast(builder.gep(out, [index]), vector.as_pointer())
                builder.store(added, place).align = align_of(vector)


def _spread(builder, value, which, grain):
    """Return a vector in which one row's lanes replace those of all rows."""
    if grain == 1:
        return value
    lanes = [n // grain * grain + which for n in range(value.type.count)]
    return shuffle(builder, value, value, lanes)


def _repeat(builder, place, vector, grain):
    """Return a vector that repeats some numbers from a pointer on."""
    if grain == 1:
        return broadcast(builder, builder.load(place), vector)
    some = ir.VectorType(vector.element, grain)
    loaded = builder.load(builder.bitcast(place, some.as_pointer()))
    loaded.align = align_of(some)
    return shuffle(builder, loaded, loaded, [n % grain for n in range(vector.count)])


# If samples are lanes, the most vectors of a tile; it has a multiple of four.
SAMPLE_VECTORS = 12


def _adding_sample_tile(size, grain):
    """Return an intrinsic of tiles whose vectors have so many bytes, and so many rows."""

    @intrinsic
    def add_sample_tile(
        typingctx, out, out_at, start, start_at, x, x_at, numbers, numbers_at, count, part, height
    ):
        """Write ``start[n] + Σ numbers[n, k]·x[k]`` to the rows of samples ``out[n]`` of a tile.

        Parameters
        ----------
        out, out_at, start, start_at, x, x_at : array, int, array, int, array, int
            Where vectors begin, each of which follows the one before; `start` may be `out`.
        numbers, numbers_at : array, int
            Where ``numbers[0, 0]`` is; ``numbers[:, k]`` are neighbours, one tile at a time.
        count, part : int
            Of so many vectors of `x` so many are summed up before they are added to the others.
        height : int
            Vectors of the tile, a multiple of 4.
        """

        def codegen(context, builder, signature, args):
            places = [
                pointer(context, builder, signature.args[k], *args[k : k + 2])
                for k in range(0, 8, 2)
            ]
            vector = context.get_value_type(vector_of(x.dtype, size))
            index = args[-1].type
            step, one = index(vector.count), index(1)

            def write(builder, args, columns, vectors):
                numbers = index(grain), index(grain * vectors)
                steps = _Steps(step, step, step, *numbers, index(0), one, *args[4:])
                _tile(builder, vector, columns, vectors, args[:4], steps, grain)

            kinds = [*[vector.element.as_pointer()] * 4, index, index]
            name, heights = f"sparsescan.samples.{vector}", range(SAMPLE_VECTORS, 0, -4)
            function = _by_shape(builder.module, name, kinds, index, (1,), heights, write)
            builder.call(function, [*places, *args[8:10], one, args[10]])
            return context.get_dummy_value()

        arrays = out, start, x, numbers
        kinds = [kind for array in arrays for kind in (array, types.intp)]
        return types.void(*kinds, *[types.intp] * 3), codegen

    return add_sample_tile


add_sample_tile = _adding_sample_tile(SAMPLE_BYTES, 1)
add_pair_tile = _adding_sample_tile(PAIR_BYTES, 2)
# Rows, and the most columns, of sums over samples in registers.
SUM_ROWS, SUM_COLUMNS = (8, 3) if BYTES == 64 else (4, 3)


def _adding_sample_products(size, grain):
    """Return an intrinsic of such sums, of vectors that have so many bytes, and so many rows."""

    @intrinsic
    def add_sample_products(
        typingctx, out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width
    ):
        """Add ``Σ a[t, i]·b[t, j]``, over steps `t` and the samples, to ``out[j, i]``.

        Parameters
        ----------
        out, out_at, out_step : array, int, int
            Where ``out[0, 0]`` is, and how far it is from there to the next `j`; `i` are
            neighbours.
        a, a_at, a_step, b, b_at, b_step : array, int, int, array, int, int
            Where vectors of samples of the first step begin, and how far it is to the next step.
        count, width : int
            How many steps `t` and columns `j` there are, of which as many are taken as vectors of
            `SUM_COLUMNS` have. The rows `i` are `SUM_ROWS`.
        """

        def codegen(context, builder, signature, args):
            places, steps = [], []
            for k in (0, 3, 6):
                places.append(pointer(context, builder, signature.args[k], *args[k : k + 2]))
                steps.append(args[k + 2])
            vector = context.get_value_type(vector_of(a.dtype, size))
            index = args[-1].type

            def write(builder, args, columns, rows):
                _sum_products(builder, vector, columns, rows // grain, grain, *args)

            kinds = [*(place.type for place in places), *[index] * 5]
            widths = range(SUM_COLUMNS, 0, -1)
            name = f"sparsescan.sums.{vector}"
            function = _by_shape(builder.module, name, kinds, index, widths, (SUM_ROWS,), write)
            *_, count, width = args
            vectors = builder.sdiv(builder.add(width, index(grain - 1)), index(grain))
            builder.call(function, [*places, *steps, count, width, vectors, index(SUM_ROWS)])
            return context.get_dummy_value()

        kinds = [kind for array in (out, a, b) for kind in (array, types.intp, types.intp)]
        return types.void(*kinds, types.intp, types.intp), codegen

    return add_sample_products


add_sample_products = _adding_sample_products(SAMPLE_BYTES, 1)
add_pair_products = _adding_sample_products(PAIR_BYTES, 2)


def _sum_products(
    builder, vector, columns, rows, grain, out, a, b, out_step, a_step, b_step, count, width
):
    """Add the sums for some vectors of columns and of rows."""
    size = count.type
    zero = ir.Constant(vector, [0.0] * vector.count)
    # For each vector of rows and columns, one with those of the rows in turn.
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * columns * grain)]

    def vectors_at(pointer, step, index, number):
        at = builder.gep(pointer, [builder.mul(step, index)])
        return (load_at(builder, at, size(k * vector.count), vector) for k in range(number))

    with cgutils.for_range(builder, count) as loop:
        # Rotated columns would need too many registers.
        loaded = list(vectors_at(b, b_step, loop.index, columns))
        for n, factor in enumerate(vectors_at(a, a_step, loop.index, rows)):
            for turn in range(grain):
                turned = _turned(builder, factor, turn, grain)
                for c, each in enumerate(loaded):
                    to = sums[(n * columns + c) * grain + turn]
                    added = call_llvm(builder, "fma", vector, [turned, each, builder.load(to)])
                    builder.store(added, to)
    together = vector.count // grain
    for c in range(columns * grain):
        turn, group = c % grain, c // grain * grain
        first = builder.gep(out, [builder.mul(out_step, size(c))])
        with builder.if_then(builder.icmp_signed(">", width, size(c))):
            for n in range(0, rows, together):
                parts = []
                for m in range(n, min(n + together, rows)):
                    own = [
                        builder.load(sums[m * columns * grain + group + k]) for k in range(grain)
                    ]
                    # For each row `r`, those of its lanes that were multiplied by this column.
                    parts.append(own[0] if grain == 1 else _turn_about(builder, own, turn))
                totals = lane_sums(builder, parts, grain)
                add_in_place(builder, builder.gep(first, [size(n * grain)]), totals)


def _turned(builder, value, turn, grain):
    """Return a vector with the rows' lanes rotated by some rows."""
    if turn == 0:
        return value
    lanes = [n // grain * grain + (n + turn) % grain for n in range(value.type.count)]
    return shuffle(builder, value, value, lanes)


def _turn_about(builder, pair, turn):
    """Return the products of one of two columns with two rows in turn.

    A row's are in the first vector if it is the column's own, else in the second, whose rows were
    turned.
    """
    count = pair[0].type.count
    lanes = [n // 2 * 2 + turn + (0 if n % 2 == turn else count) for n in range(count)]
    return shuffle(builder, *pair, lanes)

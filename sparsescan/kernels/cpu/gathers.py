"""Sums of products with numbers at places from a table: convolutions, and their gradients."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import vector_of
from .vector import broadcast, call_llvm, first_lanes, load_at, pointer


def _gathering(places, terms):
    """Return an intrinsic of sums at several places, with several independent partial sums.

    ``gather(start, x, read_at, weight, offset, a, b)`` is, for each place `p`, ``start + Σ_k
    weight[k]·x[read_at[p] + offset[k]]`` over ``a ≤ k < b``; `read_at` is a tuple. With few places,
    a single sum would wait after each term.
    """

    @intrinsic
    def gather(typingctx, start, x, read_at, weight, offset, a, b):
        def codegen(context, builder, signature, args):
            start, x, read_at, weight, offset, a, b = args
            vector = start.type
            firsts = [
                pointer(context, builder, signature.args[1], x, builder.extract_value(read_at, p))
                for p in range(places)
            ]
            sums = _sums([start] * places, terms, builder)

            def add(k, to):
                at = builder.load(pointer(context, builder, signature.args[4], offset, k))
                number = builder.load(pointer(context, builder, signature.args[3], weight, k))
                factor = broadcast(builder, number, vector)
                for first, each in zip(firsts, to, strict=True):
                    args = factor, load_at(builder, first, at, vector), builder.load(each)
                    builder.store(call_llvm(builder, "fma", vector, args), each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        kinds = start, x, read_at, weight, offset, types.intp, types.intp
        return types.UniTuple(start, places)(*kinds), codegen

    return gather


gather_8, gather_4, gather_1 = _gathering(8, 1), _gathering(4, 2), _gathering(1, 8)
# Rows that are summed together if they read the same places.
ROWS = 4


def _gathering_rows(places):
    """Return an intrinsic of the sums of several rows at several places.

    ``gather(starts, x, read_at, weight, shifts, order, offset, a, b)`` is, for each row `r` and
    each place `p`, ``starts[r] + Σ_k weight[order[k] + shifts[r]]·x[read_at[p] + offset[k]]`` over
    ``a ≤ k < b``; `starts`, `shifts` and `read_at` are tuples. Results of one row are neighbours.
    Each number that is loaded is used for all rows, and for all places.
    """

    @intrinsic
    def gather(typingctx, starts, x, read_at, weight, shifts, order, offset, a, b):
        rows, vector = len(starts), starts.dtype

        def codegen(context, builder, signature, args):
            starts, x, read_at, weight, shifts, order, offset, a, b = args
            kind = context.get_value_type(vector)
            firsts = [
                pointer(context, builder, signature.args[1], x, builder.extract_value(read_at, p))
                for p in range(places)
            ]
            bases = [
                pointer(
                    context, builder, signature.args[3], weight, builder.extract_value(shifts, r)
                )
                for r in range(rows)
            ]
            begins = [builder.extract_value(starts, r) for r in range(rows) for _ in range(places)]
            sums = _sums(begins, 1, builder)

            def add(k, to):
                at = builder.load(pointer(context, builder, signature.args[6], offset, k))
                which = builder.load(pointer(context, builder, signature.args[5], order, k))
                loaded = [load_at(builder, first, at, kind) for first in firsts]
                for r, base in enumerate(bases):
                    number = builder.load(builder.gep(base, [which]))
                    factor = broadcast(builder, number, kind)
                    for p, value in enumerate(loaded):
                        each = to[r * places + p]
                        added = call_llvm(builder, "fma", kind, [factor, value, builder.load(each)])
                        builder.store(added, each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        kinds = starts, x, read_at, weight, shifts, order, offset, types.intp, types.intp
        return types.UniTuple(vector, rows * places)(*kinds), codegen

    return gather


gather_rows_4, gather_rows_1 = _gathering_rows(4), _gathering_rows(1)


def _correlating(entries, terms, whole):
    """Return an intrinsic of correlations with several entries, in several partial sums.

    ``correlate(x, grad, offset, read_at, begins, write_at, count, a, b)`` is, for each row `r` and
    each entry `k`, ``Σ_p grad[begins[r] + write_at[p]]·x[read_at[p] + offset[k]]`` over ``a ≤ p <
    b``; `offset` and `begins` are tuples. Results of one row are neighbours. Unless vectors are
    `whole`, only ``count[p]`` lanes are read.
    """

    @intrinsic
    def correlate(typingctx, x, grad, offset, read_at, begins, write_at, count, a, b):
        rows, vector = len(begins), vector_of(x.dtype)

        def codegen(context, builder, signature, args):
            x, grad, offset, read_at, begins, write_at, count, a, b = args
            kind = context.get_value_type(vector)

            def places(which, array, indices, number):
                return [
                    pointer(
                        *(context, builder, signature.args[which], array),
                        builder.extract_value(indices, k),
                    )
                    for k in range(number)
                ]

            firsts, above = places(0, x, offset, entries), places(1, grad, begins, rows)
            zero = ir.Constant(kind, [0.0] * kind.count)
            sums = _sums([zero] * (rows * entries), terms, builder)

            def number(place, array, p):
                return builder.load(pointer(context, builder, signature.args[place], array, p))

            def add(p, to):
                at, there = number(3, read_at, p), number(5, write_at, p)
                mask = None if whole else first_lanes(builder, number(6, count, p), kind)
                loaded = [load_at(builder, first, at, kind, mask) for first in firsts]
                for r, base in enumerate(above):
                    factor = load_at(builder, base, there, kind, mask)
                    for k, value in enumerate(loaded):
                        each = to[r * entries + k]
                        added = call_llvm(builder, "fma", kind, [factor, value, builder.load(each)])
                        builder.store(added, each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        index = types.intp
        kinds = x, grad, offset, read_at, begins, write_at, count, index, index
        return types.UniTuple(vector, rows * entries)(*kinds), codegen

    return correlate


def _sums(starts, terms, builder):
    """Return variables for the partial sums of each number; the first starts with the number."""
    zero = ir.Constant(starts[0].type, [0.0] * starts[0].type.count)
    return [
        [cgutils.alloca_once_value(builder, zero if term else start) for start in starts]
        for term in range(terms)
    ]


def _add_all(builder, sums, a, b, add):
    """Call ``add(k, to)`` for ``a ≤ k < b``, with partial sums in turn; return the totals."""
    size, terms = a.type, len(sums)
    whole = builder.sub(b, builder.srem(builder.sub(b, a), size(terms)))
    with cgutils.for_range_slice(builder, a, whole, size(terms), size, inc=True) as (k, _):
        for term, to in enumerate(sums):
            add(builder.add(k, size(term)), to)
    if terms > 1:
        with cgutils.for_range_slice(builder, whole, b, size(1), size, inc=True) as (k, _):
            add(k, sums[0])
    totals = []
    for each in zip(*sums, strict=True):
        parts = [builder.load(part) for part in each]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(*pair) for pair in zip(parts[:half], parts[half:], strict=True)]
        totals += parts
    return totals


correlate_8, correlate_some = _correlating(8, 1, True), _correlating(8, 1, False)
correlate_1 = _correlating(1, 4, False)
# These take several rows at once.
correlate_rows_4, correlate_rows_1 = _correlating(4, 1, True), _correlating(1, 1, True)
correlate_some_rows_4, correlate_some_rows_1 = (
    _correlating(entries, 1, False) for entries in (4, 1)
)

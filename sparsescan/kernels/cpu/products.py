"""One product of two nodes: plain if it is in range, with exponents if not."""

from __future__ import annotations

import math

import numpy as np

from ..compile import njit
from .matvec import add_rows, apply_product, matvec
from .nodes import (
    balanced_row,
    bits_of,
    column_of,
    exponents_of,
    indices_of,
    indptr_of,
    is_stopped,
    local_of,
    node_at,
    own_exponents_of,
    row_bounds,
    values_of,
)
from .scaling import (
    all_finite,
    exponent_of,
    extremes,
    ldexp,
    loses_bits,
    mark_empty_columns,
    normalise,
    prescale,
    range_of,
)
from .spgemm import multiply
from .tables import FINISHED, IN_BAND, ONE, OUT_OF_BAND, UNDECIDED, ZERO, Node, Op, Run, Store


@njit
def _multiply_scaled(t, left, right, out, b, thread):
    """Make a product of any range, not normalised; return the state of its range."""
    y = values_of(t, right, b, thread).copy()
    y_e = own_exponents_of(t, right, b, thread).copy()
    y_least, _ = normalise(t, right, y, y_e)
    mark_empty_columns(t, right, y, y_e)
    x, x_e = values_of(t, left, b, thread), own_exponents_of(t, left, b, thread)
    x, x_e, x_least = prescale(t, left, x, x_e, y_e)
    e = exponents_of(t, out, b, thread)
    for j in range(len(e)):
        e[j] = x_e[j]
    if min(x_least, y_least, x_least + y_least) <= t.run[Run.NORMAL]:
        # An entry, or a product of two, might be subnormal or overflow.
        return _multiply_apart(t, left, right, out, b, thread)
    c, bits = values_of(t, out, b, thread), bits_of(t, out, b, thread)
    return multiply(t, right, y, left, x, out, c, bits, ZERO, out[Node.ROWS], thread)


@njit
def _multiply_apart(t, left, right, out, b, thread):
    """Make a product whose entries may differ by any factor, each relative to its largest term.

    The exponents of the product are those that `prescale` found.
    """
    indptr, indices = indptr_of(t, left), indices_of(t, left)
    a_indptr, a_indices = indptr_of(t, right), indices_of(t, right)
    c_indptr, c_indices = indptr_of(t, out), indices_of(t, out)
    x, x_e = values_of(t, left, b, thread), own_exponents_of(t, left, b, thread)
    y, y_e = values_of(t, right, b, thread), own_exponents_of(t, right, b, thread)
    c, e = values_of(t, out, b, thread), exponents_of(t, out, b, thread)
    cols, none = out[Node.COLS], -(1 << 60)
    totals, tops = np.zeros(cols, np.float64), np.full(cols, none, np.int64)
    for i in range(out[Node.ROWS]):
        start, stop = row_bounds(right, a_indptr, i)
        for summing in (False, True):
            for p in range(start, stop):
                if y[p] == 0:
                    continue
                k = column_of(right, a_indices, p)
                y_mantissa, y_exponent = math.frexp(y[p])
                first, last = row_bounds(left, indptr, k)
                for q in range(first, last):
                    if x[q] == 0:
                        continue
                    j = column_of(left, indices, q)
                    x_mantissa, x_exponent = math.frexp(x[q])
                    power = y_exponent + y_e[k] + x_exponent + x_e[j]
                    if summing:
                        mantissa = np.float64(y_mantissa) * x_mantissa
                        totals[j] += ldexp(mantissa, power - tops[j])
                    else:
                        tops[j] = max(tops[j], power)
        start, stop = row_bounds(out, c_indptr, i)
        for q in range(start, stop):
            j = column_of(out, c_indices, q)
            c[q] = 0
            if totals[j] != 0:
                c[q] = ldexp(totals[j], tops[j] - e[j])
                if loses_bits(t, exponent_of(totals[j]) + tops[j], np.int64(e[j])):
                    return UNDECIDED
            totals[j], tops[j] = 0, none
        if is_stopped(t):
            break
    return OUT_OF_BAND


@njit
def check_operands(t, left, right, b, thread, block, blocks):
    """Return the state of the range of both operands, in one block of their entries."""
    worst = IN_BAND
    for node in (left, right):
        if node[Node.STORE] == Store.CALLER:
            nnz = node[Node.NNZ]
            highest, lowest = extremes(
                bits_of(t, node, b, thread),
                nnz * block // blocks,
                nnz * (block + 1) // blocks,
                ZERO,
                t.run[Run.INFINITY],
            )
            range_ = range_of(t, highest, lowest)
            if range_ == UNDECIDED:
                return UNDECIDED
            worst = max(worst, range_)
        elif exponents_of(t, node, b, thread)[node[Node.COLS]]:
            worst = OUT_OF_BAND
    return worst


@njit
def multiply_rows(t, left, right, out, b, thread, block, blocks):
    """Make a block of rows of a product of operands in the band; return the state of its range."""
    x, y = values_of(t, left, b, thread), values_of(t, right, b, thread)
    c, bits = values_of(t, out, b, thread), bits_of(t, out, b, thread)
    first = balanced_row(t, right, block, blocks)
    last = balanced_row(t, right, block + 1, blocks)
    return multiply(t, right, y, left, x, out, c, bits, first, last, thread)


@njit
def settle(t, left, right, out, b, thread, operands, result):
    """Finish a product after its rows: exponents and local gradients; return the status."""
    if operands == OUT_OF_BAND:
        result = _multiply_scaled(t, left, right, out, b, thread)
        in_band = False
    else:
        e = exponents_of(t, out, b, thread)
        for j in range(len(e)):
            e[j] = 0
        in_band = result == IN_BAND
    if operands == UNDECIDED or result == UNDECIDED:
        return UNDECIDED
    if not in_band:
        e = exponents_of(t, out, b, thread)
        _, lost = normalise(t, out, values_of(t, out, b, thread), e)
        if lost:
            return UNDECIDED
    if t.run[Run.LOCAL]:
        return _product_local(t, left, right, out, b, thread)
    return FINISHED


@njit
def _product_local(t, left, right, out, sample, thread):
    """Make the local gradients of a product: ``B·local(A) + local(B)``, with `A` the earlier node.

    They are made for one sample, or for all if samples share the product.
    """
    shared = out[Node.BATCHED] == 0
    first = ZERO if shared else sample
    last = t.run[Run.BATCH] if shared else sample + 1
    rows = out[Node.ROWS]
    for b in range(first, last):
        x, y = local_of(t, left, b, thread), local_of(t, out, b, thread)
        if len(x) and right[Node.STORE] != Store.CALLER:
            if apply_product(t, right, b, thread, ZERO, rows, x, y) != FINISHED:
                return UNDECIDED
            continue
        if len(x):
            matvec(t, right, ZERO, rows, values_of(t, right, b, thread), x, y)
        else:
            for i in range(rows):
                y[i] = 0
        local = local_of(t, right, b, thread)
        if len(local):
            add_rows(ZERO, rows, y, local)
        if not all_finite(y, ZERO, rows):
            return UNDECIDED
    return FINISHED


@njit
def make_product(t, op, b, thread):
    """Make one product for sample `b`; return the status."""
    left, right, out = node_at(t, op[Op.LEFT]), node_at(t, op[Op.RIGHT]), node_at(t, op[Op.OUT])
    operands = check_operands(t, left, right, b, thread, ZERO, ONE)
    result = IN_BAND
    if operands == IN_BAND:
        result = multiply_rows(t, left, right, out, b, thread, ZERO, ONE)
    return settle(t, left, right, out, b, thread, operands, result)

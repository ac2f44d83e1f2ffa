"""Sweeps: gradients from step to step, through matrices to solve with and Jacobians between them.

One compiled call runs many steps. A matrix is copied before it is factorised, so memory that
another thread may write to is read only once. A few matrices keep their factors, which equal
matrices reuse.

The factors of tridiagonal matrices are computed here, as LAPACK's ``gttrf`` does with rows
exchanged for the larger pivot; those of banded and dense ones by ``gbtrf`` and ``getrf``, at
addresses that the tables have, so that no compiled code depends on where they were loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..addresses import data_address
from ..compile import njit
from ..numbered import numbered
from .matvec import add_rows, apply_jacobian
from .memory import array_at, fetch_add
from .nodes import gradient_of, is_stopped, local_of, node_at, op_at
from .scaling import all_finite
from .tables import WORD, ZERO, Node, Op, Run

# How a matrix is factorised.
Method = numbered("Method", "TRIDIAGONAL BANDED DENSE")

# Columns of the table of forms: what all matrices of a pattern share.
Form = numbered(
    "Form",
    "METHOD SIZE LOWER UPPER",
    # Numbers per column of the factors, and in all.
    "HEIGHT ENTRIES NNZ",
    # Address of where each value goes, and those of LAPACK's routines.
    "PLACES FACTORISE SOLVE WIDTH",
)

# Columns of the table of matrices that have factors.
Slot = numbered(
    "Slot",
    # One more than the number of the form; 0 if there is none.
    "FORM",
    # Where the values lay last: address, bytes from sample to sample, and the run.
    "ADDRESS STEP RUN",
    # When it was used last.
    "USED WIDTH",
)

# Slots of the descriptor of a sweep.
About = numbered(
    "About",
    # A counter that threads share, on a cache line of its own: the next block of the samples.
    "NEXT BLOCKS=16",
    # First and last-plus-one operation, and the number of the run.
    "FIRST LAST RUN WIDTH",
)

# The integers that a block of samples passes to LAPACK's routines: how many vectors, and that the
# matrix is not transposed; and the status that comes back. All have 64 bits, and serve as 32, too.
_COUNT, _PLAIN, _INFO, ARGUMENTS = 0, 1, 2, 3
# The states of the factors of a matrix.
_REGULAR, _SINGULAR, _NOT_FINITE = 0, 1, 2
# Values that are compared before the loop checks for a difference.
_COMPARED = 32


class Sweep(NamedTuple):
    """Everything that sweeps read and write in addition to the tables of a run."""

    about: NDArray[np.int64]  # (About.WIDTH,)
    forms: NDArray[np.int64]  # (forms, Form.WIDTH)
    form_of: NDArray[np.int64]  # (operations,): the form of the matrix to solve with, or -1
    slots: NDArray[np.int64]  # (blocks, slots, Slot.WIDTH)
    arguments: NDArray[np.int64]  # (blocks, ARGUMENTS)
    failed: NDArray[np.int64]  # (blocks, 2): the operation that stopped it, or -1, and the sample
    # (slots, samples, …); matrices that samples share have the first sample of a block.
    states: NDArray[np.int64]
    pivots: NDArray[np.int64]
    copies: NDArray[np.floating[Any]]
    factors: NDArray[np.floating[Any]]


@intrinsic
def _call(typingctx, address, arguments):
    """Call the C or Fortran function at an address with pointers; it returns nothing."""

    def codegen(context, builder, signature, args):
        count = len(signature.args[1])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, args[1], count))
        return context.get_dummy_value()

    return types.void(address, arguments), codegen


@njit(inline="always")
def _row(array, k, size):
    """Return the `k`-th row of a contiguous array."""
    return array_at(data_address(array) + k * size * array.itemsize, size, array)


@njit(error_model="numpy")
def _factorise_tridiagonal(f, pivots, n):
    """Make the factors of a matrix from its diagonals; return whether it is regular.

    `f` has four rows of `n` numbers: below, on and above the diagonal, and a further diagonal that
    row exchanges fill. `pivots` is 1 for each row that is exchanged with the next.
    """
    below, middle, above, second = _row(f, 0, n), _row(f, 1, n), _row(f, 2, n), _row(f, 3, n)
    zero = f.dtype.type(0)
    last, regular = np.uint64(n - 1), True
    pivot, right = middle[0], above[0]
    for i in range(last):
        after = i + np.uint64(1)
        under, next_, far = below[i], middle[after], zero
        if after < last:
            far = above[after]
        if abs(pivot) >= abs(under):
            factor = zero if pivot == zero else under / pivot
            middle[i], above[i], second[i], pivots[i] = pivot, right, zero, 0
            regular &= pivot != zero
            pivot, right = next_ - factor * right, far
        else:
            factor = pivot / under
            middle[i], above[i], second[i], pivots[i] = under, next_, far, 1
            pivot, right = right - factor * next_, -factor * far
        below[i] = factor
    middle[last] = pivot
    return regular and pivot != zero


@njit(error_model="numpy")
def _solve_tridiagonal(f, pivots, n, x, y):
    """Set ``y = A⁻¹ x`` by the factors of `A`."""
    below, middle, above, second = _row(f, 0, n), _row(f, 1, n), _row(f, 2, n), _row(f, 3, n)
    one, last, now = np.uint64(1), np.uint64(n - 1), x[0]
    for i in range(last):
        under = x[i + one]
        if pivots[i]:
            now, under = under, now
        y[i] = now
        now = under - below[i] * now
    y1 = now / middle[last]
    y[last] = y1
    y2, i = f.dtype.type(0), last
    while i >= one:
        i -= one
        value = (y[i] - above[i] * y1 - second[i] * y2) / middle[i]
        y[i], y1, y2 = value, value, y1


@njit(error_model="numpy")
def _solve_tridiagonal_for_all(f, pivots, n, x, y, count):
    """Do :func:`_solve_tridiagonal` for `count` contiguous vectors.

    It takes eight at a time, since each number of a vector waits for the previous one.
    """
    below, middle, above, second = _row(f, 0, n), _row(f, 1, n), _row(f, 2, n), _row(f, 3, n)
    one, two, size = np.uint64(1), np.uint64(2), np.uint64(n)
    last = size - one
    for start in range(0, count, 8):
        first, stop = np.uint64(start) * size, np.uint64(min(start + 8, count)) * size
        for b in range(first, stop, size):
            y[b] = x[b]
        for i in range(last):
            exchanged, factor = pivots[i] != 0, below[i]
            for b in range(first + i, stop, size):
                now, under = y[b], x[b + one]
                if exchanged:
                    now, under = under, now
                y[b] = now
                y[b + one] = under - factor * now
        i = size
        while i >= one:
            i -= one
            pivot, right, far = middle[i], above[i], second[i]
            for b in range(first + i, stop, size):
                value = y[b]
                if i < last:
                    value -= right * y[b + one]
                    if i + one < last:
                        value -= far * y[b + two]
                y[b] = value / pivot


@njit
def _factorise(form, values, f, pivots, arguments):
    """Make the factors of a matrix; return its state."""
    nnz = form[Form.NNZ]
    if not all_finite(values, ZERO, nnz):
        return _NOT_FINITE
    places = array_at(form[Form.PLACES], nnz, form)
    for p in range(np.uint64(form[Form.ENTRIES])):
        f[p] = 0
    for p in range(np.uint64(nnz)):
        f[np.uint64(places[p])] = values[p]
    if form[Form.METHOD] == Method.TRIDIAGONAL:
        regular = _factorise_tridiagonal(f, pivots, form[Form.SIZE])
        return _REGULAR if regular else _SINGULAR
    arguments[_INFO] = 0
    about, matrix, rows = data_address(form), data_address(f), data_address(pivots)
    size, height = about + Form.SIZE * WORD, about + Form.HEIGHT * WORD
    info = data_address(arguments) + _INFO * WORD
    if form[Form.METHOD] == Method.BANDED:
        lower, upper = about + Form.LOWER * WORD, about + Form.UPPER * WORD
        given = size, size, lower, upper, matrix, height, rows, info
        _call(form[Form.FACTORISE], given)
    else:
        _call(form[Form.FACTORISE], (size, size, matrix, height, rows, info))
    return _REGULAR if arguments[_INFO] == 0 else _SINGULAR


@njit
def _solve(form, f, pivots, x, y, count, arguments):
    """Set ``y = A⁻¹ x`` for `count` vectors that lie end to end."""
    n = form[Form.SIZE]
    if form[Form.METHOD] == Method.TRIDIAGONAL:
        if count == 1:
            _solve_tridiagonal(f, pivots, n, x, y)
        else:
            _solve_tridiagonal_for_all(f, pivots, n, x, y, count)
        return
    for i in range(np.uint64(count * n)):
        y[i] = x[i]
    arguments[_COUNT], arguments[_PLAIN] = count, ord("N")
    about, matrix, rows = data_address(form), data_address(f), data_address(pivots)
    size, height = about + Form.SIZE * WORD, about + Form.HEIGHT * WORD
    vectors, more = data_address(y), data_address(arguments)
    number, plain, info = more + _COUNT * WORD, more + _PLAIN * WORD, more + _INFO * WORD
    if form[Form.METHOD] == Method.BANDED:
        lower, upper = about + Form.LOWER * WORD, about + Form.UPPER * WORD
        given = plain, size, lower, upper, number, matrix, height, rows, vectors, size, info
        _call(form[Form.SOLVE], given)
    else:
        given_dense = plain, size, number, matrix, height, rows, vectors, size, info
        _call(form[Form.SOLVE], given_dense)


@njit
def _equal(a, b):
    """Return whether two integer arrays are equal; different ones mostly differ early."""
    for start in range(0, len(a), _COMPARED):
        stop, differ = min(start + _COMPARED, len(a)), False
        for i in range(np.uint64(start), np.uint64(stop)):
            differ |= a[i] != b[i]
        if differ:
            return False
    return True


@njit
def _place_of(t, k):
    """Return where the values of the `k`-th matrix lie, and the bytes from sample to sample."""
    leaf = array_at(t.run[Run.LEAVES] + k * 2 * WORD, 2, t.run)
    return leaf[0], ZERO if t.run[Run.BATCH] == 1 else leaf[1]


@njit
def _of_sample(array, slot, b):
    """Return a slot's array for sample `b`."""
    return _row(array, slot * array.shape[1] + b, array.shape[2])


@njit
def _is_slot_of(t, s, i, k, block, first, stop):
    """Return whether a slot has the factors of the `k`-th matrix for samples `first` to `stop`."""
    slot, form = s.slots[block, i], s.forms[s.form_of[k]]
    address, step = _place_of(t, k)
    if slot[Slot.FORM] != s.form_of[k] + 1 or (slot[Slot.STEP] != 0) != (step != 0):
        return False
    # Within a run, one address means one matrix.
    run = s.about[About.RUN]
    if slot[Slot.RUN] == run and slot[Slot.ADDRESS] == address and slot[Slot.STEP] == step:
        return True
    nnz = form[Form.NNZ]
    for b in range(first, stop):
        copy = array_at(data_address(_of_sample(s.copies, i, b)), nnz, t.bits)
        if not _equal(array_at(address + b * step, nnz, t.bits), copy):
            return False
    slot[Slot.ADDRESS], slot[Slot.STEP], slot[Slot.RUN] = address, step, run
    return True


@njit
def _slot_of(t, s, k, block, first, stop):
    """Return the slot with the factors of the `k`-th matrix; factorise it if necessary."""
    slots, oldest, now = s.slots[block], ZERO, ZERO
    for i in range(len(slots)):
        now = max(now, slots[i, Slot.USED] + 1)
        if slots[i, Slot.USED] < slots[oldest, Slot.USED]:
            oldest = i
    for i in range(len(slots)):
        if _is_slot_of(t, s, i, k, block, first, stop):
            slots[i, Slot.USED] = now
            return i
    slot, form = slots[oldest], s.forms[s.form_of[k]]
    address, step = _place_of(t, k)
    # If this is interrupted, the slot is empty.
    slot[Slot.FORM] = 0
    for b in range(first, stop):
        values = array_at(address + b * step, form[Form.NNZ], t.values)
        copy, factors = _of_sample(s.copies, oldest, b), _of_sample(s.factors, oldest, b)
        for p in range(np.uint64(form[Form.NNZ])):
            copy[p] = values[p]
        pivots = _of_sample(s.pivots, oldest, b)
        s.states[oldest, b] = _factorise(form, copy, factors, pivots, s.arguments[block])
    slot[Slot.ADDRESS], slot[Slot.STEP], slot[Slot.RUN] = address, step, s.about[About.RUN]
    slot[Slot.FORM], slot[Slot.USED] = s.form_of[k] + 1, now
    return oldest


@njit
def _solve_step(t, s, k, block, first, last, thread):
    """Make the gradient after the `k`-th matrix for some samples; False if it is singular."""
    form, node = s.forms[s.form_of[k]], node_at(t, k)
    n = form[Form.SIZE]
    if n == 0:
        return True
    shared = _place_of(t, k)[1] == 0
    i = _slot_of(t, s, k, block, first, first + 1 if shared else last)
    b = first
    while b < last:
        count = last - b if shared else 1
        x = array_at(data_address(gradient_of(t, k, b)), count * n, t.values)
        y = array_at(data_address(gradient_of(t, k + 1, b)), count * n, t.values)
        if s.states[i, b] == _SINGULAR:
            s.failed[block, 0], s.failed[block, 1] = k, b
            return False
        if s.states[i, b] == _NOT_FINITE:
            for p in range(np.uint64(count * n)):
                y[p] = np.nan
        else:
            factors, pivots = _of_sample(s.factors, i, b), _of_sample(s.pivots, i, b)
            _solve(form, factors, pivots, x, y, count, s.arguments[block])
        b += count
    if t.run[Run.LOCAL]:
        for b in range(first, last):
            local = local_of(t, node, b, thread)
            if len(local):
                add_rows(ZERO, n, gradient_of(t, k + 1, b), local)
    return True


@njit(nogil=True, cache=True)
def sweep(t, s, thread):
    """Make gradients, operation by operation, for blocks of samples until none is left.

    A singular matrix ends its block, and is named in the block's row of ``s.failed``.
    """
    batch, blocks = t.run[Run.BATCH], s.about[About.BLOCKS]
    while True:
        block = fetch_add(s.about, About.NEXT, 1)
        if block >= blocks:
            return
        first, last = batch * block // blocks, batch * (block + 1) // blocks
        for k in range(s.about[About.FIRST], s.about[About.LAST]):
            if is_stopped(t):
                return
            if s.form_of[k] < 0:
                op = op_at(t, k)
                node = node_at(t, op[Op.RIGHT])
                left, out = op[Op.LEFT], op[Op.OUT]
                apply_jacobian(t, node, ZERO, node[Node.ROWS], first, last, left, out, thread)
            elif not _solve_step(t, s, k, block, first, last, thread):
                break

"""The CPU engine: one compiled call runs a whole plan.

A plan is a sequence of *stages*. A stage has independent units, and starts when all earlier units
are done. Threads claim units from a counter, so a thread that comes late, or never, delays nobody.
The arithmetic of a unit does not depend on the thread, so results have the same bits for any number
of threads.

Range. Products of many Jacobians can overflow or underflow even if no gradient does. So a matrix
node is ``M·diag(2^e)``: mantissas `M`, and one exponent per column, since columns are independent.
Scaling by a power of two is exact. Nodes with all entries within a *band* have no exponents, and
use the plain kernels. Columns that leave the band are rare; one thread scales them back. Two cases
stop a run, and the caller falls back to the linear scan: a value that is not finite, and a column
whose entries differ so much that one exponent cannot hold them all at full precision.

Indices are unsigned in the inner loops: Numba would test a signed one for wrapping around.
"""

from __future__ import annotations

from ..compile import njit
from .matvec import apply_jacobian, apply_product
from .memory import PATIENCE, array_at, clock, fetch_add, load, relax
from .nodes import balanced_row, gradient_of, is_stopped, node_at, op_at
from .products import check_operands, make_product, multiply_rows, settle
from .scaling import all_finite
from .tables import (
    ABORTED,
    FINISHED,
    IN_BAND,
    ONE,
    OUT_OF_BAND,
    UNDECIDED,
    WORD,
    ZERO,
    Node,
    Op,
    Run,
    Stage,
    Store,
    Tables,
    Work,
)

# Nanoseconds that threads wait for each other in a run before helpers may leave.
_WAITED = 500_000


@njit
def _vector_operation(t, op, block, blocks, first_sample, last_sample, thread):
    """Make a block of the rows of one gradient, for a range of samples; return the status."""
    node = node_at(t, op[Op.RIGHT])
    first = balanced_row(t, node, block, blocks)
    last = balanced_row(t, node, block + 1, blocks)
    left, out = op[Op.LEFT], op[Op.OUT]
    if node[Node.STORE] == Store.CALLER:
        apply_jacobian(t, node, first, last, first_sample, last_sample, left, out, thread)
        if t.run[Run.CHECKED]:
            for b in range(first_sample, last_sample):
                if not all_finite(gradient_of(t, out, b), first, last):
                    return UNDECIDED
        return FINISHED
    for b in range(first_sample, last_sample):
        x, y = gradient_of(t, left, b), gradient_of(t, out, b)
        if apply_product(t, node, b, thread, first, last, x, y) != FINISHED:
            return UNDECIDED
    return FINISHED


@njit
def _run_range(t, run, block, blocks):
    """Return the operations of a run, and the samples of a block of it."""
    bounds = array_at(t.run[Run.RUNS] + run * 2 * WORD, 2, t.run)
    last_op = op_at(t, bounds[1] - 1)
    width = t.run[Run.BATCH]
    if not last_op[Op.VECTOR] and not node_at(t, last_op[Op.OUT])[Node.BATCHED]:
        width = ONE
    return bounds[0], bounds[1], width * block // blocks, width * (block + 1) // blocks


@njit
def _vector_run(t, run, block, blocks, thread):
    """Make one run of vector operations, for one block of the samples; return the status."""
    first_op, last_op, first, last = _run_range(t, run, block, blocks)
    for i in range(first_op, last_op):
        status = _vector_operation(t, op_at(t, i), ZERO, ONE, first, last, thread)
        if status != FINISHED:
            return status
        if is_stopped(t):
            break
    return FINISHED


@njit
def _product_run(t, run, block, blocks, thread):
    """Make one run of products, for one block of the samples; return the status."""
    first_op, last_op, first, last = _run_range(t, run, block, blocks)
    # Sample by sample, since this thread's scratch holds one sample.
    for b in range(first, last):
        for i in range(first_op, last_op):
            status = make_product(t, op_at(t, i), b, thread)
            if status != FINISHED:
                return status
            if is_stopped(t):
                return FINISHED
    return FINISHED


@njit
def _vector_unit(t, stage, unit, thread):
    """Make one unit of a stage of vector operations; return the status."""
    blocks = stage[Stage.BLOCKS]
    run, block = unit // blocks, unit % blocks
    if stage[Stage.KIND] == Work.RUNS:
        return _vector_run(t, stage[Stage.FIRST] + run, block, blocks, thread)
    op = op_at(t, stage[Stage.FIRST])
    return _vector_operation(t, op, block, blocks, ZERO, t.run[Run.BATCH], thread)


@njit
def _product_unit(t, stage, unit, thread):
    """Make one unit of a stage of products; return the status."""
    blocks = stage[Stage.BLOCKS]
    run, block = unit // blocks, unit % blocks
    if stage[Stage.KIND] == Work.RUNS:
        return _product_run(t, stage[Stage.FIRST] + run, block, blocks, thread)
    op = op_at(t, stage[Stage.FIRST])
    left, right, out = node_at(t, op[Op.LEFT]), node_at(t, op[Op.RIGHT]), node_at(t, op[Op.OUT])
    b = stage[Stage.SAMPLE]
    if stage[Stage.KIND] == Work.CHECK:
        _report(t, Run.OPERANDS, check_operands(t, left, right, b, thread, block, blocks))
        return FINISHED
    operands = _reported(t, Run.OPERANDS)
    if stage[Stage.KIND] == Work.MULTIPLY:
        if operands == IN_BAND:
            range_ = multiply_rows(t, left, right, out, b, thread, block, blocks)
            _report(t, Run.RESULT, range_)
        return FINISHED
    result = _reported(t, Run.RESULT)
    t.run[Run.OPERANDS] = 0
    t.run[Run.RESULT] = 0
    return settle(t, left, right, out, b, thread, operands, result)


@njit
def _report(t, slot, range_):
    """Report this thread's status to the threads of later stages."""
    if range_ != IN_BAND:
        fetch_add(t.run, slot, 1 if range_ == UNDECIDED else 1 << 32)


@njit
def _reported(t, slot):
    """Return the worst reported status."""
    reports = load(t.run, slot)
    if reports & 0xFFFFFFFF:
        return UNDECIDED
    return OUT_OF_BAND if reports else IN_BAND


@njit
def _makes_vectors(t, stage, unit):
    if stage[Stage.KIND] == Work.RUNS:
        run = stage[Stage.FIRST] + unit // stage[Stage.BLOCKS]
        return op_at(t, array_at(t.run[Run.RUNS] + run * 2 * WORD, 2, t.run)[0])[Op.VECTOR] != 0
    return stage[Stage.KIND] == Work.VECTOR


@njit
def _note_wait(t, at, waited):
    """Record how many nanoseconds a thread has waited before stage `at`.

    Threads that share rows meet after each operation. If the system suspends one of them, the
    others wait. If waiting takes a quarter of the time, helpers leave.
    """
    stage = array_at(t.run[Run.STAGES] + (at - 1) * Stage.WIDTH * WORD, Stage.WIDTH, t.run)
    if stage[Stage.KIND] == Work.RUNS or stage[Stage.KIND] == Work.SETTLE:
        return
    fetch_add(t.run, Run.WAITED, waited)
    total = load(t.run, Run.WAITED)
    if total > _WAITED and 4 * total > clock() - t.run[Run.STARTED]:
        t.run[Run.ALONE] = 1


@njit
def _claim(t, at, thread):
    """Return the next unit and its stage, ready to start; -1 if none is left for this thread.

    `at` is a stage at or before it.
    """
    first_unit = array_at(t.run[Run.FIRST_UNIT], t.run[Run.STAGE_COUNT] + 1, t.run)
    while True:
        if thread > 0 and load(t.run, Run.ALONE):
            return ZERO - 1, at
        unit = fetch_add(t.run, Run.NEXT, 1)
        if unit >= t.run[Run.UNITS]:
            return ZERO - 1, at
        while unit >= first_unit[at + 1]:
            at += 1
        spins, since = 0, ZERO
        while load(t.run, Run.DONE) < first_unit[at]:
            relax(spins)
            spins += 1
            if spins == PATIENCE:
                since = clock()
        if spins > PATIENCE:
            _note_wait(t, at, clock() - since)
        if load(t.run, Run.STATUS) == FINISHED:
            return unit - first_unit[at], at
        fetch_add(t.run, Run.DONE, 1)


@njit
def _complete(t, status):
    if status != FINISHED:
        fetch_add(t.run, Run.STATUS, status)
    fetch_add(t.run, Run.DONE, 1)


def abort(t: Tables) -> None:
    """Stop all units and all waiting: a thread has failed and will not do its own units."""
    t.run[Run.STATUS] = ABORTED
    t.run[Run.NEXT] = t.run[Run.DONE] = 1 << 62


@njit(nogil=True, cache=True)
def run_vectors(t, thread):
    """Work on a plan without products as thread number `thread` until no unit is left.

    It is :func:`run` for such plans, and compiles faster.
    """
    at = ZERO
    while True:
        unit, at = _claim(t, at, thread)
        if unit < 0:
            return
        stage = array_at(t.run[Run.STAGES] + at * Stage.WIDTH * WORD, Stage.WIDTH, t.run)
        _complete(t, _vector_unit(t, stage, unit, thread))


@njit(nogil=True, cache=True)
def run(t, thread):
    """Work on a plan as thread number `thread` until no unit is left."""
    at = ZERO
    while True:
        unit, at = _claim(t, at, thread)
        if unit < 0:
            return
        stage = array_at(t.run[Run.STAGES] + at * Stage.WIDTH * WORD, Stage.WIDTH, t.run)
        if _makes_vectors(t, stage, unit):
            _complete(t, _vector_unit(t, stage, unit, thread))
        else:
            _complete(t, _product_unit(t, stage, unit, thread))

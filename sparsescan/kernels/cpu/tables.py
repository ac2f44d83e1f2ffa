"""Tables of a run on the CPU: what their columns and slots are, and what the kernels return."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..numbered import numbered

# Statuses of a run; what it leaves undecided the linear scan has to say.
FINISHED, UNDECIDED, ABORTED = 0, 1, 1 << 32

# Results of a check of the range, beside UNDECIDED.
IN_BAND, OUT_OF_BAND = 0, 2

# It stands in place of the exponent of a column that is zero.
EMPTY = -(1 << 30)

# A plain literal would compile each kernel that takes it a second time, for that literal.
ZERO, ONE = np.int64(0), np.int64(1)
WORD = 8

# Which kernels a matrix gets.
Kind = numbered("Kind", "DENSE CSR DIAGONAL")


# Products of a run that a thread keeps for the run itself: what it has multiplied up so far, a step
# whose factors it multiplies, and the product of the two.
SLOTS = 3
# Samples that one pass over a shared matrix serves.
LANES = 8

# Where the values of a node are: with the caller, in the pool, or in a thread's slots.
Store = numbered("Store", "CALLER POOL SCRATCH")

# Columns of the node table: one row for each Jacobian, then one for each product.
Node = numbered(
    "Node",
    "KIND ROWS COLS NNZ",
    # addresses; not followed for dense and diagonal nodes
    "INDPTR INDICES",
    # whether it is CSR with exactly one entry in every row
    "SINGLE STORE BATCHED",
    # the Jacobian, the place in the pool, or the slot
    "VALUES",
    # places in those arrays
    "EXPONENTS LOCAL",
    # address, where rows with equal values have them in one place: of where the values of each row
    # start; else 0
    "STARTS WIDTH",
)

# Columns of the operation table: ``out = left ◇ right``.
# `LEFT` and `OUT` of a vector operation number gradients; all else numbers nodes.
Op = numbered("Op", "VECTOR LEFT RIGHT OUT WIDTH")

# Columns of the stage table. A stage has `BLOCKS` units, for each of its runs.
Stage = numbered("Stage", "KIND FIRST BLOCKS SAMPLE WIDTH")

# Kinds of a stage: whole runs, or one operation with its rows shared out.
Work = numbered(
    "Work",
    # Runs from FIRST on, their samples in blocks.
    "RUNS",
    # The operation FIRST makes a gradient, for all samples.
    "VECTOR",
    # The operation FIRST makes a product for one SAMPLE, in three stages.
    "CHECK MULTIPLY SETTLE",
)

# Slots of the run descriptor: counters, sizes, limits, and the addresses of all tables.
# One array of integers, because every array that a kernel is passed costs it seven arguments.
Run = numbered(
    "Run",
    # Counters that threads share, each on a cache line of its own.
    "NEXT DONE=16 STATUS=32",
    # Whether helpers leave the rest to thread 0; nanoseconds that threads have waited for others
    # with which they share rows, and when the run started.
    "ALONE WAITED STARTED OPERANDS=48 RESULT=64 BATCH=80 LOCAL",
    # Whether a gradient that is not finite stops the run.
    "CHECKED UNITS STAGE_COUNT",
    # Columns of a thread's accumulator, and those of which it can interleave eight samples.
    "ACCUMULATOR LANES",
    # Sizes of a scratch slot, and where thread 0 has its own in the pool, exponents, local pool.
    "SCRATCH_NNZ SCRATCH_COLS SCRATCH_ROWS SCRATCH_VALUES SCRATCH_EXPONENTS SCRATCH_LOCAL",
    # Bit patterns of infinity and of the ends of the band, the exponents of those, and the exponent
    # to which a column is brought that has left the band. Then the exponents of the smallest normal
    # number, and of an entry so small that no gradient in range can show it.
    "INFINITY HIGH LOW HIGH_EXPONENT LOW_EXPONENT TARGET NORMAL NEGLIGIBLE",
    # Addresses of tables of int64: (stages + 1,), (stages, Stage.WIDTH), (runs, 2): first and
    # last-plus-one operation, (operations, Op.WIDTH), (nodes, Node.WIDTH), (n, 2): of each Jacobian
    # the address and the bytes between samples, (n + 1,): address of each local gradient or 0,
    # (n + 2,): where each gradient starts in `out`, for one sample.
    "FIRST_UNIT STAGES RUNS OPS NODES LEAVES LOCAL_GRADS OFFSETS",
    # Addresses of values: gradients, products, what local gradients inside a product add up to, a
    # row for each thread that is zero between uses, and one for interleaved samples.
    "OUT POOL LOCAL_POOL ACCUMULATORS INTERLEAVED WIDTH",
)


class Tables(NamedTuple):
    """All that a run reads and writes; :class:`~.execution.workspace.Workspace` fills it."""

    run: NDArray[np.int64]
    exponents: NDArray[np.int32]  # of each node and sample: one for each column, then their flag
    values: NDArray[np.floating[Any]]  # empty, of the dtype of the values
    bits: NDArray[np.integer[Any]]  # empty, of the integer dtype as wide as a value
    indices: NDArray[np.integer[Any]]  # empty, of the dtype of the index arrays


def _band(dtype: type, high: int, low: int, target: int) -> NDArray[np.int64]:
    bits = np.int32 if dtype is np.float32 else np.int64
    limits = np.array([np.inf, 2.0**high, 2.0**low], dtype).view(bits)
    info = np.finfo(dtype)
    # Exponents count as in `frexp`. A negligible entry times the largest gradient underflows.
    normal, negligible = info.minexp + 1, info.minexp - info.nmant - info.maxexp
    return np.array([*limits, high, low, target, normal, negligible], np.int64)


# From Run.INFINITY on. Entries in the band multiply without overflow and without underflow. The
# target is high, so that a column keeps what is far below its largest entry: at full precision what
# is at least 2^-170 of it in float32, and 2^-1490 in float64.
BAND = {
    np.dtype(np.float32): _band(np.float32, 50, -60, 46),
    np.dtype(np.float64): _band(np.float64, 480, -500, 470),
}

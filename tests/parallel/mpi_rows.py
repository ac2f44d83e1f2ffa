"""Scans of steps whose rows ranks share agree with the sequential ones; and fail together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from mpi4py import MPI
from oracles import (
    Chain,
    Gradients,
    assert_within,
    patterns_of,
    same_bits,
    sequential,
    steps_of,
    values_only,
)
from ranks import RANK, SIZE, WORLD, Broken, expected_of, fails, part_of, random_chain

import sparsescan
from sparsescan import BatchedCSR, CSRChain, InputError, InputTypeError, Pattern, parallel
from sparsescan.errors import RankError
from sparsescan.execution.threads import usable_cores
from sparsescan.parallel import Grid
from sparsescan.parallel.communicator import Communicator
from sparsescan.parallel.rows import RowSweep

pytestmark = pytest.mark.ranks(4, slow=(6,))

# Communicators of all ranks, of two thirds and one, of both halves.
COMMS = {
    f"{first} and {SIZE - first}": WORLD.Split(int(first <= RANK), RANK)
    for first in (SIZE, 2 * SIZE // 3, SIZE // 2)
}


def grids(size: int) -> list[Grid]:
    """All of so many ranks that share rows."""
    whole = range(1, size + 1)
    return [
        Grid(chain, batch, rows)
        for chain in whole
        for batch in whole
        for rows in whole[1:]
        if chain * batch * rows == size
    ]


def rows_of(step: Any, rows: slice) -> Any:
    """Return some rows of a Jacobian in any form."""
    if isinstance(step, BatchedCSR):
        indptr = step.indptr[rows.start : rows.stop + 1]
        entries = slice(indptr[0], indptr[-1])
        shape = rows.stop - rows.start, step.shape[1]
        return BatchedCSR(step.data[:, entries], step.indices[entries], indptr - indptr[0], shape)
    return step[rows] if step.ndim == 2 else step[:, rows]


def cut_rows(mine: Chain, own: list[slice], got: slice) -> None:
    """Leave a rank its entries `own` of each gradient of the whole chain, and rows of its steps."""
    mine.grad = mine.grad[..., own[0]]
    if isinstance(mine.jacobians, np.ndarray):
        mine.jacobians = mine.jacobians[..., own[-1], :]
    else:
        steps = zip(steps_of(mine.jacobians), own[got.start + 1 :], strict=False)
        mine.jacobians = [rows_of(step, rows) for step, rows in steps]
    if mine.local_grads is not None:
        given = zip(mine.local_grads, own[got], strict=True)
        mine.local_grads = [None if a is None else a[..., entries] for a, entries in given]


@pytest.mark.parametrize("comm", COMMS.values(), ids=COMMS)
def test_random_chains(seeds: Callable[..., range], comm: MPI.Intracomm) -> None:
    for seed in seeds(2, 12, 100):
        check(seed, comm)


def check(seed: int, comm: MPI.Intracomm) -> None:
    """One random chain, its rows and steps shared out at random; some ranks may have none."""
    rng = np.random.default_rng(seed)
    choices = grids(comm.size)
    grid = choices[seed % len(choices)]
    shared = grid.batch == 1 and rng.random() < 0.5
    chain = random_chain(rng, None if shared else int(rng.integers(grid.batch, grid.batch + 4)))
    n = len(chain.jacobians)
    cuts = [0, *np.sort(rng.integers(0, n + 1, grid.chain - 1)).tolist(), n]
    sizes = [chain.grad.shape[-1], *(step.shape[-2] for step in steps_of(chain.jacobians))]
    shares = [
        np.array([0, *np.sort(rng.integers(0, size + 1, grid.rows - 1)), size]) for size in sizes
    ]
    shares[0] = sizes[0] * np.arange(grid.rows + 1) // grid.rows
    if isinstance(chain.jacobians, np.ndarray):
        # One array has as many rows of every step.
        shares[1:] = shares[-1:] * n
    row = grid.row(comm.rank)
    own = [slice(int(share[row]), int(share[row + 1])) for share in shares]
    mine, got = part_of(chain, grid, cuts, comm.rank)
    cut_rows(mine, own, got)
    whole = expected_of(chain, grid, got, comm)
    expected = Gradients(
        *(
            [array[..., entries] for array, entries in zip(arrays, own[got], strict=True)]
            for arrays in (whole.exact, whole.bounds)
        )
    )
    if grid.position(comm.rank):
        mine.grad = None
    about = f"seed {seed}, {grid}, cuts {cuts}, shares {shares}"
    result = mine.call(parallel)(
        comm, mine.grad, mine.jacobians, local_grads=mine.local_grads, grid=grid
    )
    try:
        assert_within(result, expected, chain.dtype)
    except AssertionError as error:
        raise AssertionError(about) from error
    if isinstance(mine.jacobians, np.ndarray) and len({a.shape for a in expected.exact}) == 1:
        assert isinstance(result, np.ndarray), about
    if seed % 3:
        return
    patterns = (
        [Pattern.dense(mine.jacobians.shape[-2:])] * len(mine.jacobians)
        if isinstance(mine.jacobians, np.ndarray)
        else patterns_of(mine.jacobians)
    )
    plan = parallel.plan(comm, patterns, grid=grid)
    for _ in range(2):
        assert same_bits(mine.scan(plan, values_only(mine.jacobians)), result), about


# ---------------------------------------------------------------------------------------------
# Stencils
# ---------------------------------------------------------------------------------------------


def stencil(width: int, rng: np.random.Generator) -> sp.csr_array:
    """Return a step on a square of unknowns: each reads those above, below, left and right."""
    line = sp.diags_array([np.ones(width - 1)] * 2, offsets=[-1, 1])
    eye = sp.eye_array(width)
    matrix = sp.csr_array(sp.kron(eye, line) + sp.kron(line, eye) + sp.kron(eye, eye))
    matrix.sort_indices()
    matrix.data = rng.uniform(-0.4, 0.4, matrix.nnz)
    return matrix


def test_stencils() -> None:
    """Steps on a square: ranks that hold lines of it exchange the lines at their borders only."""
    width, n, batch = 12, 7, 3
    size = width * width
    rng = np.random.default_rng(5)
    pattern = patterns_of([stencil(width, rng)])[0]
    # Values of all samples and steps; shared ones in between, and slopes of an activation.
    chain = CSRChain.from_pattern(rng.uniform(-0.4, 0.4, (n, batch, pattern.nnz)), pattern)
    grad = rng.standard_normal((batch, size))
    whole = sparsescan.inclusive_scan(grad, chain, schedule="linear")
    for grid in grids(SIZE):
        own, steps = grid.entries(RANK, size), grid.steps(RANK, n)
        some = grid.samples(RANK, batch)
        entries = slice(*pattern.indptr[[own.start, own.stop]])
        mine = sp.csr_array((np.ones(pattern.nnz), pattern.indices, pattern.indptr))[own]
        # The rows of a CSR chain are a range of its values, of which nothing is copied.
        values = chain.data[steps, some, entries]
        patterns = patterns_of([mine]) * len(values)
        plan = parallel.plan(WORLD, patterns, grid=grid)
        first = grad[some, own] if plan.position == 0 else None
        traffic = Communicator.of(WORLD).traffic
        before = vars(traffic["exchange"]).copy() if "exchange" in traffic else None
        result = plan.inclusive_scan(first, values)
        expected = whole[steps.start : steps.start + len(result), some, own]
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
        if width % grid.rows == 0 and before is not None:
            now = traffic["exchange"]
            messages, sent = now.messages - before["messages"], now.bytes - before["bytes"]
            borders = (plan.row > 0) + (plan.row < grid.rows - 1)
            assert messages == borders * len(values)
            assert sent == messages * 8 * (1 + (some.stop - some.start) * width)


def test_layers() -> None:
    """A stencil, an activation, a pooling, a dense layer: of all kernels, in float32."""
    rng = np.random.default_rng(6)
    width = 8
    size = width * width
    pool = sp.csr_array(sp.kron(sp.eye_array(size // 4), np.ones((4, 1))))
    pool.data = rng.uniform(0.5, 1, pool.nnz)
    steps: list[Any] = [
        rng.standard_normal((size // 4, 10)),
        pool,
        sp.diags_array(rng.uniform(0, 1, size)).tocsr(),
        stencil(width, rng),
        sp.diags_array(rng.uniform(0, 1, size)).tocsr(),
        stencil(width, rng),
    ]
    steps = [step.astype(np.float32) for step in steps]
    for batch in (None, 4, 9):
        leading = () if batch is None else (batch,)
        grad = rng.standard_normal((*leading, 10)).astype(np.float32)
        expected = sequential(grad, steps, inclusive=True, dtype=np.float32)
        for grid in (Grid(1, 1, SIZE), Grid(SIZE // 2, 1, 2)):
            held = grid.steps(RANK, len(steps))
            mine = [step[grid.entries(RANK, step.shape[0])] for step in steps[held]]
            first = grad[..., grid.entries(RANK, 10)] if grid.position(RANK) == 0 else None
            result = parallel.inclusive_scan(WORLD, first, mine, grid=grid)
            own = [
                [array[..., grid.entries(RANK, array.shape[-1])] for array in arrays[held.start :]]
                for arrays in (expected.exact, expected.bounds)
            ]
            assert_within(result, Gradients(*(arrays[: len(result)] for arrays in own)), np.float32)


def test_memory() -> None:
    """A plan over ranks says what is predicted without; and it falls as ranks are added."""
    width, n = 30, 8
    size = width * width
    pattern = patterns_of([stencil(width, np.random.default_rng(0))])[0]
    whole = sp.csr_array((np.ones(pattern.nnz), pattern.indices, pattern.indptr))
    memory = [max(parallel.predict([pattern] * n, (1, 1, rows)).memory) for rows in (1, 2, 3, 6)]
    assert all(after < 0.75 * before for before, after in pairwise(memory)), memory
    for grid in grids(SIZE):
        mine = patterns_of([whole[grid.entries(RANK, size)]])
        steps = grid.steps(RANK, n)
        plan = parallel.plan(WORLD, mine * (steps.stop - steps.start), grid=grid, batch=2)
        told = parallel.predict([pattern] * n, grid, batch=2 * grid.batch)
        for name in ("messages", "bytes", "memory"):
            assert getattr(plan.forecast, name) == getattr(told, name), (grid, name)
        assert abs(told.waiting / plan.forecast.waiting - 1) < 0.01
        # A plan knows that ranks share cores; those of one part work at once.
        slower = max(1.0, SIZE / (len(usable_cores()) * grid.chain))
        assert abs(slower * told.working / plan.forecast.working - 1) < 0.01
        assert f"{grid.rows} shares of the rows" in str(plan)


# ---------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------

# Six ranks hold four unknowns, two on each of two ranks, and three parts of the chain.
GRID = Grid(3, 1, 2)
D = 4
STEPS = np.random.default_rng(1).standard_normal((5, 2, D))


def on(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if rank == RANK else right


def test_no_steps() -> None:
    """Gradients pass through; the shares of some ranks change in length, and others do not."""
    grid = Grid(1, 1, SIZE)
    plan = parallel.plan(WORLD, [], grid=grid)
    for size in (2 * SIZE, 2 * SIZE + 1, 2 * SIZE, SIZE):
        whole = np.arange(float(size))
        (result,) = plan.inclusive_scan(whole[grid.entries(RANK, size)], [])
        assert np.array_equal(result, whole[grid.entries(RANK, size)])


@pytest.mark.ranks(slow=(6,))
def test_faults() -> None:
    last = SIZE - 1
    grad = np.ones(2) if GRID.position(RANK) == 0 else None

    def scan(steps: Any = STEPS, first: Any = grad, **options: Any) -> Any:
        return parallel.exclusive_scan(WORLD, first, steps, **{"grid": GRID, **options})

    fails(lambda: scan(grid=(2, 1, 4)), InputError, "grid is 2 × 1 × 4; expected 6 ranks in all")
    fails(lambda: scan(schedule="products"), InputError, "schedule is 'products', but grid is 3 ×")
    fails(
        lambda: scan(on(last, STEPS[1:], STEPS)),
        InputError, "jacobians has 4 steps on rank 5, but 5 on rank 4",
    )  # fmt: skip
    wide = [*STEPS[:3], np.ones((2, D + 1)), STEPS[4]]
    fails(
        lambda: scan(on(last, wide, STEPS)),
        InputError, "rank 5: jacobians[3] has 5 columns, but 4 on rank 4",
    )  # fmt: skip
    high = [*STEPS[:2], np.ones((3, D)), *STEPS[3:]]
    fails(
        lambda: scan(on(3, high, STEPS)),
        InputError,
        "rank 2: jacobians[3] has 4 columns, but jacobians[2] has 5 rows on ranks 2 to 3 together",
    )  # fmt: skip
    high = [*STEPS[:4], np.ones((3, D))]
    fails(
        lambda: scan(on(1, high, STEPS)),
        InputError, "jacobians[0] of rank 2 has 4 columns, but the last of ranks 0 to 1 together",
    )  # fmt: skip
    fails(
        lambda: scan(first=on(1, np.ones(3), grad)),
        InputError, "rank 1: grad has shape (3,); expected (2,)",
    )  # fmt: skip
    fails(
        lambda: scan(local_grads=on(3, [np.ones(D)] * 5, None)),
        InputError, "rank 3: local_grads[0] has shape (4,); expected (2,)",
    )  # fmt: skip
    fails(
        lambda: scan(on(last, np.ones((5, 3, 2, D)), STEPS)), InputError, "different batches",
    )  # fmt: skip
    fails(
        lambda: scan(on(last, [sp.csc_array(STEPS[0])] * 5, STEPS)),
        InputTypeError, "rank 5: jacobians[0] is a csc_array",
    )  # fmt: skip
    plan = parallel.plan(WORLD, STEPS, grid=GRID)
    for rank in range(SIZE):
        for name in ("_apply", "_begin"):
            for error, kind in ((ZeroDivisionError("oh"), RankError), (MemoryError("oh"),) * 2):
                kind = kind if isinstance(kind, type) else MemoryError

                def broken(name: str = name, error: BaseException = error, r: int = rank) -> None:
                    with Broken(RowSweep, name, r, error):
                        plan.exclusive_scan(grad, STEPS)

                fails(broken, kind, f"rank {rank}: ", "oh")
    # A value that is not finite reaches what it reaches in the linear scan.
    for bad in (np.nan, np.inf):
        steps = np.tile(np.diag([0.5, 1, 2, 3.0]), (15, 1, 1))
        steps[:, 0, 1] = 0.25
        steps[4, 1, 1] = bad
        expected = sparsescan.exclusive_scan(np.ones(D), steps, schedule="linear")
        own = GRID.entries(RANK, D)
        held = GRID.steps(RANK, 15)
        result = plan.exclusive_scan(grad, steps[held, own])
        np.testing.assert_allclose(result, expected[held, own])

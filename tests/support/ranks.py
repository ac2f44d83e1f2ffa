"""Helpers of tests on several ranks: random chains in parts, and errors that all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from oracles import Chain, Gradients, chain_of

import sparsescan
from sparsescan import BatchedCSR, CSRChain, parallel
from sparsescan.parallel import Grid

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
D = 4
STEPS = np.random.default_rng(0).standard_normal((5, D, D))
GRAD = np.ones(D) if RANK == 0 else None


def grids() -> list[Grid]:
    return [Grid(WORLD.size // k, k) for k in range(1, WORLD.size + 1) if WORLD.size % k == 0]


def random_chain(rng: np.random.Generator, batch: int | None) -> Chain:
    """Return a chain of any form; with a batch, some Jacobians may be shared."""

    def pick(options: Sequence[Any], label: str = "") -> Any:
        return options[rng.integers(len(options))]

    return chain_of(pick, rng, range(15), range(1, 8), [batch], in_parts=True)


def samples_of(array: Any, some: slice, batch: int | None) -> Any:
    """Return the part for some samples."""
    if isinstance(array, BatchedCSR):
        return BatchedCSR.from_pattern(array.data[some], array.pattern)
    has_axis = batch is not None and isinstance(array, np.ndarray) and array.ndim == 3
    return array[some] if has_axis else array


def part_of(chain: Chain, grid: Grid, cuts: list[int], rank: int = RANK) -> tuple[Chain, slice]:
    """Return the steps of a rank, and which gradients of its samples it gets."""
    position = grid.position(rank)
    steps = slice(cuts[position], cuts[position + 1])
    last = position == grid.chain - 1
    got = slice(steps.start, steps.stop + (chain.inclusive and last))
    some = slice(None) if chain.batch is None else grid.samples(rank, chain.batch)
    grad = chain.grad if chain.batch is None else chain.grad[some]
    jacobians = chain.jacobians
    if isinstance(jacobians, CSRChain):
        data = jacobians.data[steps] if jacobians.batch is None else jacobians.data[steps, some]
        jacobians = CSRChain.from_pattern(data, jacobians.pattern)
    elif isinstance(jacobians, np.ndarray):
        jacobians = jacobians[steps, some] if jacobians.ndim == 4 else jacobians[steps]
    else:
        jacobians = [samples_of(step, some, chain.batch) for step in jacobians[steps]]
    local = chain.local_grads
    if local is not None:
        local = [a if a is None or chain.batch is None else a[some] for a in local[got]]
    batch = None if chain.batch is None else len(grad)
    return Chain(grad, jacobians, local, chain.dtype, chain.inclusive, batch), got


def random_part(
    rng: np.random.Generator, grid: Grid, batch: int | None
) -> tuple[Chain, Gradients, list[int]]:
    """Return what this rank has of a random chain, cut at random, and the gradients it should get.

    And all cuts. Ranks that do not begin the chain have no gradient.
    """
    chain = random_chain(rng, batch)
    n = len(chain.jacobians)
    cuts = [0, *np.sort(rng.integers(0, n + 1, grid.chain - 1)).tolist(), n]
    mine, got = part_of(chain, grid, cuts)
    expected = expected_of(chain, grid, got)
    if grid.position(WORLD.rank):
        mine.grad = None
    return mine, expected, cuts


def expected_of(chain: Chain, grid: Grid, got: slice, comm: MPI.Intracomm = WORLD) -> Gradients:
    """Return the gradients that this rank should get."""
    some = slice(None) if chain.batch is None else grid.samples(comm.rank, chain.batch)
    whole = comm.bcast(chain.oracle() if comm.rank == 0 else None)
    pick = [
        [array[some] if chain.batch is not None else array for array in arrays[got]]
        for arrays in (whole.exact, whole.bounds)
    ]
    return Gradients(*pick)


def scan(schedule: str = "auto", grad: Any = GRAD, steps: Any = STEPS, **options: Any) -> Any:
    return parallel.exclusive_scan(WORLD, grad, steps, schedule=schedule, **options)


def on(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if rank == RANK else right


def fails(call: Callable[[], Any], kind: type[BaseException], *texts: str) -> None:
    """Every rank raises this, with the same text, which holds those; and the next scan works."""
    start = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except BaseException as raised:
        error = raised
    seconds = time.monotonic() - start
    everywhere = WORLD.allgather((type(error).__name__, str(error)))
    assert type(error) is kind, (texts, everywhere)
    # An interrupt is raised again where it was met.
    told = {told for told in everywhere if told[0] != "KeyboardInterrupt"}
    assert len(told) == 1, everywhere
    for text in texts:
        assert text in str(error), (text, str(error))
    assert seconds < 10, f"{texts}: {seconds:.1f} s"
    healthy()


def healthy() -> None:
    chain = np.concatenate([STEPS] * SIZE)
    expected = sparsescan.exclusive_scan(np.ones(D), chain)[5 * RANK : 5 * RANK + 5]
    np.testing.assert_allclose(scan("vectors"), expected)


class Broken:
    """Replaces a method by one that raises, on one rank."""

    def __init__(self, owner: Any, name: str, rank: int, error: BaseException) -> None:
        self._owner, self._name, self._rank, self._error = owner, name, rank, error

    def __enter__(self) -> None:
        self._kept = getattr(self._owner, self._name)
        if self._rank == RANK:

            def broken(*args: Any, **options: Any) -> Any:
                raise self._error

            setattr(self._owner, self._name, broken)

    def __exit__(self, *args: object) -> None:
        setattr(self._owner, self._name, self._kept)

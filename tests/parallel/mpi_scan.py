"""Scans of random chains in random parts agree with the sequential ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from extremes import extreme_chain, looped, needs_longer, oracle
from mpi4py import MPI
from oracles import (
    Gradients,
    assert_within,
    indices_of,
    patterns_of,
    same_bits,
    sequential,
    values_only,
)
from ranges import finite_count, linear_length, positive_steps, two_blocks, waves
from ranks import grids, random_part

import sparsescan
from sparsescan import (
    CSRChain,
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    InputError,
    Pattern,
    SolveStep,
    parallel,
)
from sparsescan.errors import RankError
from sparsescan.parallel import Grid
from sparsescan.parallel.communicator import Communicator
from sparsescan.symbolic.indexed import IndexedPattern

pytestmark = [
    pytest.mark.ranks(3, slow=(1, 5), doubling=True),
    pytest.mark.ranks(slow=(4,)),
]

WORLD = MPI.COMM_WORLD
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.mark.ranks(3, slow=(1, 5), doubling=True)
@pytest.mark.ranks(slow=(4,))
def test_random_chains(seeds: Callable[..., range]) -> None:
    for seed in seeds(4, 9, 200):
        check(seed)


def check(seed: int) -> None:
    """Scan one random chain in random parts, by both schedules; grids take turns."""
    rng = np.random.default_rng(seed)
    grid = grids()[seed % len(grids())]
    shared = grid.batch == 1 and rng.random() < 0.5
    batch = None if shared else int(rng.integers(grid.batch, grid.batch + 4))
    mine, expected, cuts = random_part(rng, grid, batch)
    for schedule in ("vectors", "products"):
        options = {"grid": grid, "schedule": schedule}
        result = mine.call(parallel)(
            WORLD, mine.grad, mine.jacobians, local_grads=mine.local_grads, **options
        )
        try:
            assert_within(result, expected, mine.dtype)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {options}, cuts {cuts}") from error
        if seed % 3 == 0:
            plan = parallel.plan(WORLD, patterns_of(mine.jacobians), **options)
            for _ in range(2):
                again = mine.scan(plan, values_only(mine.jacobians))
                assert same_bits(again, result), (seed, options)


def test_implicit_steps(seeds: Callable[..., range]) -> None:
    """Parts in a list, beside explicit steps, or in a few arrays: as the explicit chain."""
    for seed in seeds(4, 8, 100):
        rng = np.random.default_rng(seed)
        n, batch, size = int(rng.integers(1, 20)), [None, 3][rng.integers(2)], 4
        lead = () if batch is None else (batch,)
        second: Any = Pattern.dense((size, 6))
        before, after = rng.random((n, *lead, 24)), rng.random(24) / 8
        weights = after
        if seed % 4 > 1:
            # Five weights, some of them at many places.
            second, weights = IndexedPattern(second, index := rng.integers(0, 5, 24), 5), after[:5]
            after = weights[index]
        pattern = ImplicitPattern([Pattern.dense((6, size)), second], shared=[1])
        jacobians = after.reshape(size, 6) @ before.reshape(n, *lead, 6, size)
        grad, local = rng.random((*lead, size)), rng.random((n + 1, *lead, size))
        mine = equal_parts(n)
        last = WORLD.rank == WORLD.size - 1
        part: Any = []
        if seed % 2:
            part = [
                jacobians[k] if k % 3 == 0 else ImplicitStep([before[k], weights], pattern)
                for k in range(n)[mine]
            ]
        elif mine.stop > mine.start:
            part = ImplicitChain([before[mine], weights], pattern)
        own = slice(mine.start, mine.stop + last)
        expected = sequential(grad, jacobians, local, inclusive=True)
        for schedule in ("vectors", "products"):
            result = parallel.inclusive_scan(
                WORLD,
                grad if WORLD.rank == 0 else None,
                part,
                local_grads=local[own],
                schedule=schedule,
            )
            np.testing.assert_allclose(
                np.array(result).reshape(-1, *grad.shape),
                np.array(expected.exact[own]).reshape(-1, *grad.shape),
                rtol=1e-12,
            )
            plan = parallel.plan(WORLD, part, schedule=schedule)
            again = plan.inclusive_scan(
                grad if WORLD.rank == 0 else None, part, local_grads=local[own]
            )
            assert same_bits(list(again), list(result))
    if WORLD.size > 1:
        with pytest.raises((InputError, RankError), match="implicit step, but grid is"):
            parallel.plan(WORLD, [pattern] * 3, grid=(1, 1, WORLD.size))
    solve = ImplicitPattern([Pattern.dense((2, 2))], solved=[0])
    for call in (
        lambda: parallel.plan(WORLD, [solve] * 3),
        lambda: parallel.exclusive_scan(WORLD, np.ones(2), [SolveStep(np.eye(2))] * 3),
    ):
        with pytest.raises(
            (InputError, RankError), match=r"jacobians\[0\] is a step to solve with"
        ):
            call()


def equal_parts(n: int) -> slice:
    return Grid(WORLD.size).steps(WORLD.rank, n)


def by_products(grad: np.ndarray, chain: CSRChain, **options: Any) -> Any:
    """Return this rank's gradients, without any fallback: no gradient is handed on."""
    traffic = Communicator.of(WORLD).traffic
    before = traffic["send"].calls if "send" in traffic else 0
    mine = equal_parts(len(chain))
    part = CSRChain.from_pattern(chain.data[mine], chain.pattern)
    first = grad if WORLD.rank == 0 else None
    result = parallel.exclusive_scan(WORLD, first, part, schedule="products", **options)
    assert ("send" not in traffic) or traffic["send"].calls == before, "fell back to vectors"
    return result


def test_range() -> None:
    """Products far out of range: finite wherever the linear scan is, and as accurate."""
    chains: list[tuple[np.ndarray, CSRChain]] = []
    for kind in ("dense", "csr", "diagonal"):
        for dtype, decades in ((F4, 60), (F8, 500)):
            chain = positive_steps(kind, waves(200, 61, decades), 5, dtype)
            chains.append((np.full(5, 10.0 ** (-decades / 2), dtype), chain))
        for radius in (0.5, 10.0):
            chain = positive_steps(kind, np.full(200, radius), 6)
            grad = np.full(6, 1e-30 if radius > 1 else 1e30, F4)
            n = linear_length(grad, chain)
            chains.append((grad, CSRChain.from_pattern(chain.data[:n], chain.pattern)))
    blocks = two_blocks(60, 10, 0.1)
    chains.append((np.repeat([1e-30, 1e30], 3).astype(F4), blocks))
    for grad, chain in chains:
        # Once, since it takes long.
        expected = sequential(grad, chain, dtype=chain.dtype) if WORLD.rank == 0 else None
        expected = WORLD.bcast(expected)
        mine = equal_parts(len(chain))
        result = by_products(grad, chain)
        assert np.isfinite(result).all()
        own = Gradients(expected.exact[mine], expected.bounds[mine])
        assert_within(result, own, chain.dtype)
        # With local gradients, and for samples that are 1e8 apart.
        scale = np.array([1, 1e-8], chain.dtype)[:, None]
        result = by_products(grad * scale, chain, local_grads=[None] * len(own.exact))
        assert_within(result[:, 0], own, chain.dtype)


def test_huge_and_tiny_steps() -> None:
    """Steps of 1e±30 by turns, with local gradients around 1."""
    rng = np.random.default_rng(4)
    n, size = 40, 4
    factors = np.where(np.arange(n) % 2 == 0, 1e30, 1e-30)
    mine = equal_parts(n)
    for sign in (1, -1):
        chain = positive_steps("csr", factors[::sign], size)
        grad = rng.uniform(0.5, 1, size).astype(F4)
        local = list(rng.uniform(0, 1, (n, size)).astype(F4))
        expected = sequential(grad, chain, local, dtype=F4)
        part = CSRChain.from_pattern(chain.data[mine], chain.pattern)
        first = grad if WORLD.rank == 0 else None
        result = parallel.exclusive_scan(
            WORLD, first, part, local_grads=local[mine], schedule="products"
        )
        assert_within(result, Gradients(expected.exact[mine], expected.bounds[mine]), F4)


@needs_longer
def test_steps_of_every_size(seeds: Callable[..., range]) -> None:
    for seed in seeds(30, 90, 4000):
        check_steps_of_every_size(seed)


def check_steps_of_every_size(seed: int) -> None:
    """Exponents that cancel, and entries that no exponent holds together, in some rank's part."""
    grad, steps, local = extreme_chain(np.random.default_rng(seed))
    expected = oracle(grad, steps, local)
    # Both the true gradients and those of the loop, which may be 0 where others are too small.
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.array(expected.exact).astype(grad.dtype)
        n = min(finite_count(exact), finite_count(looped(grad, steps, local)))
    data = steps if isinstance(steps, np.ndarray) else steps.data
    mine = equal_parts(n)
    part = data[mine] if data is steps else CSRChain.from_pattern(data[mine], steps.pattern)
    result = parallel.exclusive_scan(
        WORLD,
        grad if WORLD.rank == 0 else None,
        part,
        local_grads=None if local is None else local[mine],
        schedule="products",
    )
    assert_within(result, Gradients(expected.exact[mine], expected.bounds[mine]), grad.dtype)


def test_what_is_not_finite(seeds: Callable[..., range]) -> None:
    """It reaches what it reaches in the linear scan, whoever has it."""
    rng = np.random.default_rng(seeds(1, 1, 1)[0])
    n, size = 12, 4
    for bad in (np.nan, np.inf):
        for at in (0, *rng.integers(1, n, 4)):
            where = rng.random((size, size)) < 0.5
            indices, indptr = indices_of(where)
            chain = CSRChain(
                rng.standard_normal((n, len(indices))), indices, indptr, (size, size)
            )  # fmt: skip
            grad = rng.standard_normal(size)
            if at == 0:
                grad[rng.integers(size)] = bad
            elif len(indices):
                chain.data[at, rng.integers(len(indices))] = bad
            mine = equal_parts(n)
            expected = sparsescan.inclusive_scan(grad, chain, schedule="linear")
            part = CSRChain.from_pattern(chain.data[mine], chain.pattern)
            result = parallel.inclusive_scan(
                WORLD, grad if WORLD.rank == 0 else None, part, schedule="products"
            )
            own = expected[mine.start : mine.start + len(result)]
            np.testing.assert_allclose(result, own, rtol=1e-9, atol=1e-9)


def test_shapes() -> None:
    """Results for a rank with one rectangular step, or none."""
    d, last = 3, WORLD.size - 1
    sizes = [d + rank for rank in range(WORLD.size + 1)]
    rank = WORLD.rank
    step = np.ones((1, sizes[rank + 1], sizes[rank]))
    grad = np.ones(d) if rank == 0 else None
    result = parallel.exclusive_scan(WORLD, grad, step)
    assert isinstance(result, np.ndarray)
    assert result.shape == (1, sizes[rank])
    for held in {0, last, WORLD.size // 2}:
        steps = [np.eye(d)] * 4 if rank == held else []
        result = parallel.inclusive_scan(WORLD, grad, steps)
        assert len(result) == len(steps) + (rank == last)
    empty = np.ones((0, 5, d, d))
    first = np.ones((5, d)) if rank == 0 else None
    result = parallel.exclusive_scan(WORLD, first, empty)
    assert result.shape == (0, 5, d)
    nobody = np.ones((0, d)) if rank == 0 else None
    assert parallel.exclusive_scan(WORLD, nobody, np.ones((2, 0, d, d))).shape == (2, 0, d)


def test_constants() -> None:
    """Measured on all ranks together, so the same on all."""
    network = parallel.Network.measure(WORLD)
    assert set(WORLD.allgather(network)) == {network}
    assert network.latency > 0
    assert network.inverse_bandwidth > 0
    assert min(network.exchange, network.call) >= 0


@pytest.mark.parametrize("schedule", ["vectors", "products"])
def test_without_a_gradient_local_gradients_are_all(schedule: str) -> None:
    """None on the first rank, too, whose own local gradients say how many samples there are."""
    rng = np.random.default_rng(1)
    n = 4 * WORLD.size
    jacobians, local = rng.standard_normal((n, 3, 3)) / 3, rng.standard_normal((n, 2, 3))
    mine = equal_parts(n)
    expected = sequential(np.zeros((2, 3)), jacobians, list(local))
    own = Gradients(expected.exact[mine], expected.bounds[mine])
    options = {"local_grads": local[mine]}
    result = parallel.exclusive_scan(WORLD, None, jacobians[mine], schedule=schedule, **options)
    assert_within(result, own, F8)
    plan = parallel.plan(WORLD, jacobians[mine], schedule=schedule)
    assert same_bits(plan.exclusive_scan(None, jacobians[mine], **options), result)
    with pytest.raises(sparsescan.InputError, match="rank 0: grad is None, and local_grads has no"):
        plan.exclusive_scan(None, jacobians[mine])


@pytest.mark.parametrize("schedule", ["vectors", "products"])
@pytest.mark.parametrize("inclusive", [False, True])
def test_parts_in_the_order_of_time(schedule: str, inclusive: bool) -> None:
    """Each rank's arrays are turned, and the ranks stand as they do."""
    rng = np.random.default_rng(3)
    n, is_last = 4 * WORLD.size, WORLD.rank == WORLD.size - 1
    jacobians = rng.standard_normal((n, 2, 3, 3)) / 3
    local = rng.standard_normal((n + inclusive, 2, 3))
    mine = equal_parts(n)
    own = local[mine.start : mine.stop + (inclusive and is_last)]
    grad = rng.standard_normal((2, 3)) if WORLD.rank == 0 else None
    name = "inclusive_scan" if inclusive else "exclusive_scan"
    scan = getattr(parallel, name)
    steps = jacobians[mine]
    forward = scan(WORLD, grad, steps, local_grads=own, schedule=schedule)
    turned = np.flip(own, 0)
    for given in (np.flip(steps, 0), [*reversed(steps)]):
        options = {"local_grads": turned, "reverse": True}
        result = scan(WORLD, grad, given, schedule=schedule, **options)
        assert same_bits([*result], [*reversed(forward)])
        plan = parallel.plan(WORLD, given, schedule=schedule, reverse=True)
        again = getattr(plan, name)(grad, given, local_grads=turned)
        assert same_bits([*again], [*result])
        bad: list[Any] = [None] * len(own)
        if WORLD.rank == 0:
            bad[-1] = np.ones((2, 4))
        at = 3 + (inclusive and WORLD.size == 1)
        with pytest.raises(sparsescan.InputError, match=rf"rank 0: local_grads\[{at}\] has shape"):
            getattr(plan, name)(grad, given, local_grads=bad)


def test_ranks_choose_together_for_what_runs() -> None:
    """A plan that nobody told batch and dtype runs as one that was told, by what takes less."""
    rng = np.random.default_rng(4)
    jacobians = rng.standard_normal((40 * WORLD.size, 6, 6)) / 3
    part = jacobians[equal_parts(len(jacobians))]
    plan = parallel.plan(WORLD, part)
    before: dict[Any, Any] = {}
    for batch, dtype in 2 * [(16, F4), (1, F8), (64, F8), (16, F8), (64, F4)]:
        steps = part.astype(dtype)
        grad = np.ones((batch, 6), dtype) if WORLD.rank == 0 else None
        result = plan.exclusive_scan(grad, steps)
        told = parallel.plan(WORLD, part, batch=batch, dtype=dtype)
        assert (plan.schedule, plan.reason) == (told.schedule, told.reason)
        assert plan.forecast.nanoseconds == told.forecast.nanoseconds
        assert f"for {batch} sample{'s' * (batch > 1)} of {dtype} on each rank:" in str(plan)
        assert len(set(WORLD.allgather(str(plan.forecast)))) == 1
        by_vectors = parallel.plan(WORLD, part, batch=batch, dtype=dtype, schedule="vectors")
        assert plan.forecast.nanoseconds <= by_vectors.forecast.nanoseconds
        assert same_bits(result, told.exclusive_scan(grad, steps))
        assert same_bits(result, before.setdefault((batch, dtype), result))


def test_groups_with_batches_of_their_own() -> None:
    """Each group of samples chooses for its own batch, without waiting for the others."""
    grid = grids()[-1]
    n = 6 * grid.chain
    jacobians = np.full((n, 3, 3), 0.3)
    position, group = grid.position(WORLD.rank), grid.group(WORLD.rank)
    part = jacobians[grid.steps(WORLD.rank, n)]
    plan = parallel.plan(WORLD, part, grid=grid)
    for batch in (1, 5, 2):
        own = batch + group
        grad = np.ones((own, 3)) if position == 0 else None
        result = plan.exclusive_scan(grad, part)
        expected = sequential(np.ones((own, 3)), jacobians)
        mine = grid.steps(WORLD.rank, n)
        assert_within(result, Gradients(expected.exact[mine], expected.bounds[mine]), F8)


@pytest.mark.ranks(slow=(4, 6))
@pytest.mark.parametrize("schedule", ["auto", "products"])
def test_a_plan_for_all_after_groups_chose_alone(schedule: str) -> None:
    """A message's size may then be known to the ranks of one group, and not to others."""
    grid, size = Grid(2, WORLD.size // 2), 5
    part = np.full((8, size, size), 0.1)
    position, group = grid.position(WORLD.rank), grid.group(WORLD.rank)
    plan = parallel.plan(WORLD, part, grid=grid, schedule=schedule)
    own = 3 + group
    plan.exclusive_scan(np.ones((own, size)) if position == 0 else None, part)
    for batch in (own, 3, 4):
        again = parallel.plan(WORLD, part, grid=grid, schedule=schedule, batch=batch)
        result = again.exclusive_scan(np.ones((batch, size)) if position == 0 else None, part)
        expected = sequential(np.ones((batch, size)), np.full((16, size, size), 0.1))
        mine = grid.steps(WORLD.rank, 16)
        assert_within(result, Gradients(expected.exact[mine], expected.bounds[mine]), F8)

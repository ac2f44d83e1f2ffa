"""How ranks that scan together end, and the parts of such scans, without MPI; see mpi_*.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import mpi_launch
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    FORMS,
    STRUCTURES,
    Gradients,
    jacobian,
    mask,
    random_patterns,
    same_bits,
    sequential,
    values,
)
from ranges import as_dense, positive_steps, two_blocks
from sampling import slow

import sparsescan
from sparsescan import InputError, InputTypeError, Pattern, parallel
from sparsescan.chains.chain import Chain
from sparsescan.chains.grads import LocalGrads
from sparsescan.parallel import Grid, Network, predict
from sparsescan.parallel.communicator import Fault
from sparsescan.parallel.exchange import (
    ALGORITHMS,
    allreduce_messages,
    allreduce_rounds,
    exscan_messages,
    rounds,
)
from sparsescan.parallel.forecast import forecasts, setting_of_equal_parts
from sparsescan.parallel.halo import Halo, reach_of, take_rows
from sparsescan.parallel.maps import Capacity, Merger, Message, Ranges, ScanTerms, State
from sparsescan.parallel.part import FORMS as MAP_FORMS
from sparsescan.parallel.part import Part
from sparsescan.parallel.rows import Messages, RowSweep, SweepRequest
from sparsescan.plan.choice import InputKind
from sparsescan.plan.costs.cpu import CpuModel, load_cpu
from sparsescan.symbolic.pattern import of_mask

SUPPORT = Path(mpi_launch.__file__).parent
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


# ---------------------------------------------------------------------------------------------
# Under mpiexec
# ---------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["killed", *slow("short", "raises", "long")])
def test_all_ranks_end(how: str) -> None:
    """A rank is killed, or leaves with an exception, or sends what has another size."""
    ended = mpi_launch.run(3, "-m", "mpi4py", SUPPORT / "end_one_rank.py", how)
    assert ended.code != 0, ended.output
    assert "went on" not in ended.output
    assert "not done after" not in ended.output


@pytest.mark.slow
@pytest.mark.mpi
def test_the_example(tmp_path: Path) -> None:
    """The one of the package's docstring runs as it stands there."""
    text = parallel.__doc__ or ""
    lines = text.split("::\n", 1)[1].split("``mpiexec")[0].splitlines()
    script = tmp_path / "many.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in lines))
    ended = mpi_launch.run(4, "-m", "mpi4py", script)
    assert ended.code == 0, ended.output
    assert "ParallelPlan(250 of 1000 Jacobians, 4 × 1 ranks" in ended.output


# ---------------------------------------------------------------------------------------------
# Who combines what
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_merges_make_every_prefix(algorithm: str) -> None:
    for size in range(1, 70):
        products = [{(rank, rank + 1)} for rank in range(size)]
        for ranks in rounds(algorithm, size):
            everywhere = set().union(*products)
            for rank, merges in enumerate(ranks):
                for merge in merges:
                    operands = {(merge.start, merge.mid), (merge.mid, merge.stop)}
                    assert operands <= everywhere
                    products[rank].add((merge.start, merge.stop))
        everywhere = set().union(*products)
        assert {(0, rank) for rank in range(1, size)} <= everywhere
        sent = sum(exscan_messages(algorithm, size, rank) for rank in range(size))
        assert sent == (size - 1 if algorithm == "linear" else sent)
        if algorithm == "doubling" and size & (size - 1) == 0:
            assert sent == size * (size.bit_length() - 1)


def test_messages_of_an_allreduce() -> None:
    """Every rank hears of every other: at least as many messages as that takes."""
    for size in range(1, 70):
        sent = [allreduce_messages(size, rank) for rank in range(size)]
        assert sum(sent) >= 2 * (size - 1) or size & (size - 1) == 0
        assert max(sent) <= allreduce_rounds(size)
        power = 1 << (size.bit_length() - 1)
        assert sum(sent) == power * (power.bit_length() - 1) + 2 * (size - power)


# ---------------------------------------------------------------------------------------------
# Maps
# ---------------------------------------------------------------------------------------------


class Elements:
    """Parts of a chain as the messages of an exclusive scan, and the operator."""

    def __init__(self, chains, local, batch, dtype, form) -> None:
        model = InputKind(batch or 1, dtype).model()
        parts, self.chains = [], []
        for jacobians in chains:
            chain = Chain(len(jacobians))
            part = Part(chain.read(jacobians), model, None, None)
            assert form in part.cost(True, None).maps
            parts.append(part)
            self.chains.append(chain)
        batched = any(chain.batch is not None for chain in self.chains)
        self.terms = ScanTerms(dtype, batch, batched, local is not None)
        reductions = [part.reduction(form) for part in parts]
        patterns = [part.cost(True, None).maps[form].pattern for part in parts]
        self.ranges = Ranges(patterns)
        count = len(parts)
        every = [self.ranges(a, b) for a in range(count) for b in range(a + 1, count + 1)]
        capacity = Capacity(
            max(max(p.shape) for p in every), max(p.shape[1] for p in every),
            max(p.nnz for p in every),
        )  # fmt: skip
        self.merger = Merger(self.ranges, capacity, self.terms, 1)
        self.messages = []
        for k, (chain, reduction) in enumerate(zip(self.chains, reductions, strict=True)):
            own = None if local is None else local[k]
            steps = list(chains[k])
            sizes = [steps[0].shape[-1], *(step.shape[-2] for step in steps[:-1])]
            added = LocalGrads(own, len(steps), sizes, self.terms.shape)
            message = self.message(k, k + 1)
            product = reduction.run(chain, added, self.terms)
            if product is not None:
                self.merger.write(message, product, patterns[k])
                message.describe(k, k + 1, State.MAP)
            self.messages.append(message)

    def message(self, start: int, stop: int) -> Message:
        capacity = self.merger._capacity
        words = np.full(capacity.words(self.terms), -1)  # poisoned
        message = Message(words, capacity, self.terms)
        message.describe(start, stop, State.BAD)
        return message

    def merge(self, left: Message, right: Message) -> Message:
        merged = self.message(*right.range)
        merged.words[:] = right.words
        self.merger(left.words, merged.words)
        assert self.merger.error is None
        assert merged.range == (left.range[0], right.range[1])
        return merged

    def leaves(self, rng: np.random.Generator, grad: np.ndarray) -> np.ndarray | None:
        """Return the result for a gradient, combined in any order; None if somebody gave up."""
        vector = self.message(0, 0)
        vector.vector(grad.shape[-1])[:] = grad
        vector.describe(0, 0, State.VECTOR)
        result = [vector, *self.messages]
        while len(result) > 1:
            k = int(rng.integers(len(result) - 1))
            result[k : k + 2] = [self.merge(result[k], result[k + 1])]
        if result[0].state == State.BAD:
            return None
        assert result[0].state == State.VECTOR
        size = self.ranges(len(self.messages) - 1, len(self.messages)).shape[0]
        return result[0].vector(size).reshape(*self.terms.shape, size)

    def check(self, rng: np.random.Generator, grad: np.ndarray, expected: Gradients) -> None:
        result = self.leaves(rng, grad)
        assert result is not None
        assert (np.abs(result - expected.exact[-1]) <= expected.bounds[-1]).all()


@given(st.data())
def test_maps_combine_in_any_order(data: st.DataObject) -> None:
    """The gradient that leaves a chain, however its parts' maps are put together."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch = data.draw(st.sampled_from([None, 1, 3]))
    dtype = data.draw(st.sampled_from([F4, F8]))
    form = data.draw(st.sampled_from(MAP_FORMS))
    n, count = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    cuts = np.unique(np.concatenate([[0, n], rng.integers(0, n + 1, count)])).tolist()
    sizes = rng.integers(1, 7, n + 1)
    if rng.random() < 0.5:
        sizes[:] = sizes[0]
    steps = [
        jacobian(
            rng, str(rng.choice(FORMS)), str(rng.choice(STRUCTURES)), (sizes[k + 1], sizes[k]),
            batch, dtype, np.int32,
        )
        for k in range(n)
    ]  # fmt: skip
    leading = () if batch is None else (batch,)
    grad, local = values(rng, (*leading, sizes[0]), dtype), None
    if rng.random() < 0.6:
        local = [
            values(rng, (*leading, size), dtype) if rng.random() < 0.7 else None
            for size in sizes[:-1]
        ]
    pairs = list(pairwise(cuts))
    own = None if local is None else [local[a:b] for a, b in pairs]
    elements = Elements([steps[a:b] for a, b in pairs], own, batch, dtype, form)
    last = None if local is None else [*local, None]
    expected = sequential(grad, steps, last, inclusive=True, dtype=dtype)
    elements.check(rng, grad, expected)


@pytest.mark.parametrize("kind", ["dense", "csr", "diagonal"])
@pytest.mark.parametrize("form", MAP_FORMS)
def test_maps_far_out_of_range(kind: str, form: str) -> None:
    """With 60 steps: 1e±300 in float32, in columns that grow apart, while gradients stay inside."""
    rng = np.random.default_rng(0)
    down, up = (positive_steps(kind, np.full(60, 10.0**s), 5, seed=2) for s in (-5, 5))
    if kind == "diagonal":
        down.data[:], up.data[:] = 1e-5, 1e5
    for first, second in ((down, up), (up, down)):
        # Each part alone leaves the range; by turns, so that the gradient does not.
        mixed = [
            step for pair in zip(as_dense(first), as_dense(second), strict=True) for step in pair
        ]
        chain = [mixed[:1], mixed[1:-1], mixed[-1:]]
        grad = np.full(5, 1e-3, F4)
        elements = Elements(chain, None, None, F4, form)
        expected = sequential(grad, mixed, inclusive=True, dtype=F4)
        elements.check(rng, grad, expected)
    # Three parts, each with products of 1e±60 a block.
    blocks = list(as_dense(two_blocks(60, 10, 0.1)))
    elements = Elements([blocks[:20], blocks[20:40], blocks[40:]], None, None, F4, form)
    grad = np.repeat([1e-30, 1e30], 3).astype(F4)
    expected = sequential(grad, blocks, inclusive=True, dtype=F4)
    for _ in range(4):
        elements.check(rng, grad, expected)
    whole = elements.merge(
        elements.merge(elements.messages[0], elements.messages[1]), elements.messages[2]
    )
    assert abs(whole.exponents(6)[0, :-1]).max() > 100


def test_what_no_operator_can_combine_is_bad() -> None:
    ones = [np.ones((2, 2))]
    elements = Elements([ones, ones, ones], None, None, F8, "exact")
    first, second, third = elements.messages
    assert elements.merge(first, second).state == State.MAP
    second.values(4)[0, 1] = np.nan
    assert elements.merge(first, second).state == State.BAD
    second.values(4)[0, 1] = 1
    assert elements.merge(elements.merge(first, second), third).state == State.MAP
    for state, against in ((State.BAD, State.BAD), (State.UNUSED, State.UNUSED)):
        second.describe(1, 2, state)
        assert elements.merge(first, second).state == against
        assert elements.merge(second, third).state == against
    second.describe(1, 2, State.NOTHING)
    assert elements.merge(first, second).state == State.MAP
    # Not neighbours.
    copy = elements.message(2, 3)
    copy.words[:] = third.words
    elements.merger(first.words, copy.words)
    assert copy.state == State.BAD


def test_patterns_of_ranges_do_not_depend_on_how_they_are_split() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        parts = random_patterns(rng, 9, 1, 6)
        ranges = Ranges(parts)
        for start in range(9):
            whole = np.eye(parts[start].shape[1], dtype=bool)
            for stop in range(start + 1, 10):
                one = np.zeros(parts[stop - 1].shape, bool)
                pattern = parts[stop - 1]
                one[np.repeat(np.arange(len(one)), np.diff(pattern.indptr)), pattern.indices] = True
                whole = one @ whole
                block = ranges(start, stop)
                assert block is not None
                entries = np.repeat(np.arange(block.shape[0]), np.diff(block.indptr))
                present = np.zeros(block.shape, bool)
                present[entries, block.indices] = True
                assert (present == whole).all()
    assert Ranges([None, parts[0], None])(0, 3) is parts[0]


# ---------------------------------------------------------------------------------------------
# Grids and forecasts
# ---------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_a_grid_covers_chain_batch_and_rows_once(chain: int, batch: int, rows: int, n: int) -> None:
    grid = Grid(chain, batch, rows)
    seen = np.zeros((n, n, n), int)
    for rank in range(grid.size):
        seen[grid.steps(rank, n), grid.samples(rank, n), grid.entries(rank, n)] += 1
    assert (seen == 1).all()
    where = {(grid.group(r), grid.position(r), grid.row(r)) for r in range(grid.size)}
    assert len(where) == grid.size


@pytest.mark.parametrize("grid", [(4,), (2, 2), (2, 1, 2), [1, 2, 2], Grid(1, 1, 4)])
def test_a_grid_that_fits(grid: object) -> None:
    from sparsescan.parallel.grid import check_grid

    assert check_grid(grid, 4) == Grid(*grid)
    assert check_grid(None, 4) == Grid(4, 1, 1)


@pytest.mark.parametrize("grid", [(2, 3), (0, 4), (4, 1, 2), (4, 1, 1, 1), 4, "2×2", ()])
def test_a_grid_that_does_not_fit(grid: object) -> None:
    from sparsescan.parallel.grid import check_grid

    with pytest.raises((InputError, InputTypeError), match="grid"):
        check_grid(grid, 4)
    with pytest.raises(InputTypeError, match=r"grid\.chain is 'a'"):
        check_grid(("a", 4), 4)
    with pytest.raises(InputError, match=r"grid is 2 × 1 × 3; expected 4 ranks in all"):
        check_grid((2, 1, 3), 4)


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


@given(st.data())
def test_what_rows_reach(data: st.DataObject) -> None:
    """The compact pattern is the rows without the columns that they do not read, nor own."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    height, width, count = rng.integers(0, 9, 3).tolist()
    count += 1
    where = mask(rng, str(rng.choice(STRUCTURES)), height, width)
    owned = np.array([0, *np.sort(rng.integers(0, width + 1, count - 1)), width])
    cuts = np.array([0, *np.sort(rng.integers(0, height + 1, count - 1)), height])
    for row, (first, last) in enumerate(pairwise(cuts.tolist())):
        part = take_rows(of_mask(where), first, last)
        assert part is of_mask(where[first:last])
        reach = reach_of(part, owned, row)
        read = where[first:last].any(axis=0)
        read[owned[row] : owned[row + 1]] = True
        assert reach.columns.tolist() == np.flatnonzero(read).tolist()
        assert reach.pattern is of_mask(where[first:last][:, read])
        for other in range(count):
            wanted = reach.wanted(other)
            indices = np.arange(owned[other], owned[other + 1])
            indices = indices[:0] if wanted is None else indices[wanted]
            assert indices.tolist() == reach.columns[reach.at(other)].tolist()


class Alone:
    """In place of the communicator of one rank."""

    rank = 0


@pytest.mark.parametrize("batch", [None, 1, 2, 20])
@pytest.mark.parametrize("size", [5, 3000])
def test_steps_run_one_by_one_have_the_same_bits(batch: int | None, size: int) -> None:
    """As in one run, by one thread or several: of all kernels, shared and not, with local grads."""
    rng = np.random.default_rng(size)
    leading = () if batch is None else (batch,)
    near = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 40
    patterns = [of_mask(near), Pattern.diagonal(size), Pattern.dense((size, size)), of_mask(near)]
    values = [
        rng.uniform(-0.1, 0.1, (*(leading if k == 0 else ()), pattern.nnz))
        for k, pattern in enumerate(patterns)
    ]
    y, local = rng.standard_normal((2, *leading, size))
    local_grads = [None, local, local, None, local]
    whole = np.array([0, size])
    halos = [
        Halo(reach_of(pattern, whole, 0).pattern, slice(0, size), (), ()) for pattern in patterns
    ]
    # Nothing lies between two steps; an end to that makes each a run of its own.
    rows = RowSweep(Alone(), 0, halos)
    terms = ScanTerms(F8, batch, batch is not None, True)
    expected = sparsescan.plan(patterns, schedule="linear").inclusive_scan(
        y, values, local_grads=local_grads
    )
    for runs in ([(0, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)]):
        rows._runs = runs
        chain, fault = Chain(4), Fault()
        chain.read(values, patterns)
        added = LocalGrads(local_grads, 5, [size] * 5, leading)
        request = SweepRequest(chain, added, Messages(halos, terms), terms, 5, 4, stacked=False)
        result = rows.sweep(y, request, fault)
        assert fault.error is None
        assert same_bits(result[0], expected)
        assert same_bits(result[1:], expected[-1:])


DEAR = Network("dear", latency=1e6, inverse_bandwidth=1.0, exchange=1.0, call=0.0)
FREE = Network("free", latency=1e-3, inverse_bandwidth=0.0, exchange=0.0, call=0.0)


def test_steps_beyond_the_length_of_the_chain_grow_as_its_logarithm() -> None:
    """On a network whose latency is all: rounds, which are ⌈log₂ p⌉ and those of agreements."""
    chain = [Pattern.dense((4, 4))] * 64
    for size in (16, 64, 256, 1024):
        forecast = predict(chain, (size, 1), network=DEAR)
        assert forecast.schedule == "products"
        assert round(forecast.waiting / 1e6) == 3 * (size.bit_length() - 1)


def test_memory_of_a_rank_falls_as_ranks_are_added() -> None:
    """Section 3.6: of the order of n/p Jacobians, until it is one."""
    chain = [Pattern.dense((64, 64))] * 4096
    memory = [max(predict(chain, (size, 1)).memory) for size in (1, 4, 16, 64, 256, 1024)]
    assert all(after < before for before, after in pairwise(memory))
    assert memory[2] < 1.1 * memory[0] / 16
    # Where that one is too large, so do its rows.
    large = [Pattern.dense((1024, 1024))] * 4
    memory = [max(predict(large, (4, 1, size)).memory) for size in (1, 2, 4, 8)]
    assert all(after < 0.75 * before for before, after in pairwise(memory))


def test_products_where_they_pay() -> None:
    chain = [Pattern.dense((8, 8))] * 20_000
    assert predict(chain, (2, 1), network=FREE).schedule == "vectors"
    assert predict(chain, (64, 1), network=FREE).schedule == "products"
    # Dense steps of 300 unknowns: a product takes 300 times as long as a sweep.
    assert predict([Pattern.dense((300, 300))] * 64, (16, 1), network=FREE).schedule == "vectors"
    # Diagonal ones: no longer.
    assert predict([Pattern.diagonal(300)] * 4000, (8, 1), network=FREE).schedule == "products"


def test_ranks_that_share_cores() -> None:
    """Four on a core: products keep all of them busy at once, vectors one after the other."""
    patterns = [Pattern.dense((8, 8))] * 4096
    model = CpuModel(load_cpu(), F8, 1, 1)
    setting = setting_of_equal_parts(patterns, Grid(4), model, FREE, {})
    for alone, crowded in zip(
        forecasts(setting, limited=False),
        forecasts(setting._replace(load=4.0), limited=False),
        strict=True,
    ):
        times = 1 if alone.schedule == "vectors" else 4
        assert crowded.working == pytest.approx(times * alone.working)
        assert crowded.waiting == alone.waiting


def test_the_best_grid() -> None:
    dense = Pattern.dense((20, 20))
    assert predict([dense] * 100, 8, batch=64, network=DEAR).grid == Grid(1, 8)
    assert predict([dense] * 100_000, 64, network=FREE).grid == Grid(64, 1)
    assert predict([dense] * 10, 6, batch=1).grid.batch == 1
    # A few steps that are large are shared row by row; many small ones are not.
    assert predict([Pattern.dense((4000, 4000))] * 4, 4, network=FREE).grid == Grid(1, 1, 4)
    assert predict([dense] * 10, 4, network=DEAR).grid.rows == 1
    for bad in (0, -1):
        with pytest.raises(InputError, match="ranks"):
            predict([dense], bad)
    with pytest.raises(InputError, match="patterns is empty"):
        predict([], (2, 1))


def test_a_forecast_prints_what_it_says() -> None:
    forecast = predict([Pattern.dense((8, 8))] * 1000, (16, 1), network=FREE)
    text = str(forecast)
    assert "16 parts of the chain × 1 groups" in text
    assert f"{max(forecast.messages)}" in text
    assert text.count("\n") == 3 + 1 + 8 + 1
    text = str(predict([Pattern.dense((8, 8))] * 10, (2, 1, 3), network=FREE))
    assert "2 parts of the chain × 1 groups of samples × 3 shares of the rows" in text


def test_constants_of_a_network_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    built_in = Network.load(path)
    assert DEAR.save(path) == path
    assert Network.load(path) == DEAR
    path.write_text("{}")
    assert Network.load(path) == built_in

"""Implicit steps of recurrent cells in chunks on a CUDA device: no values of steps are written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import SIMULATED, cupy_or_stand_in, run_as_compiled_if, to_host
from oracles import Gradients, assert_within, on_pattern, sequential
from sampling import examples, slow

import sparsescan
from sparsescan import (
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    MemoryLimitError,
    Pattern,
    Schedule,
)
from sparsescan.execution.cuda import chunks as chunk_forms
from sparsescan.execution.cuda.chunks import ChunkForm, chunk_form
from sparsescan.execution.cuda.workspace import DeviceWorkspace
from sparsescan.kernels.cuda.chained import layout_of
from sparsescan.kernels.cuda.tables import Run
from sparsescan.recurrent import GRUCell, LSTMCell, RNNCell
from sparsescan.symbolic.pattern import of_mask

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")
DTYPES = (np.float32, np.float64)
# The kernels of a chain in several chunks, in three launches or in one.
PHASES, ONE = ["multiply", "carry", "sweep", "repair"], ["chained", "repair"]


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@pytest.fixture(autouse=True)
def launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All launches, in the simulator, where launches can only be captured by this."""
    if not SIMULATED:
        return []
    import fake_cupy

    return fake_cupy.watch(monkeypatch)


@pytest.fixture(autouse=True)
def phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chains in three launches, whether or not one would take less."""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: False)


@pytest.fixture
def one(phases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chains in one launch that can be."""

    def fits(form: ChunkForm, dtype: Any, steps: int, batch: int, chunk: int) -> bool:
        is_small = form.terms == form.states == 1
        layout = layout_of(form.size, dtype.itemsize) if is_small else None
        return layout is not None and chunk <= layout.longest

    monkeypatch.setattr(chunk_forms, "in_one_launch", fits)


def kernels_of(launches: list[Any]) -> list[str]:
    """Return the kernels that were launched, but for graphs."""
    return [launch.kernel for launch in launches if launch.kernel != "graph"]


class Ran(NamedTuple):
    """A run on the device: whether it was repaired, and gradients that it had room for."""

    repaired: bool
    room: int


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """All runs."""
    ran: list[Ran] = []
    run = DeviceWorkspace.run

    def watched(self: DeviceWorkspace, chain: Any, local: Any, out: Any, **options: Any) -> None:
        run(self, chain, local, out, **options)
        ran.append(Ran(bool(self._run[Run.FLAG : Run.FLAG + 1].get()[0]), out.size))

    monkeypatch.setattr(DeviceWorkspace, "run", watched)
    return ran


class Case(NamedTuple):
    """Steps ``J_t = W D_t``, each row of the slopes ``D_t`` of one unit, and what a scan takes.

    Attributes
    ----------
    slopes : ndarray, shape (steps, [batch,] entries)
        Values of ``D_t``.
    weights : ndarray, shape (nnz,)
        Values of ``W``.
    """

    pattern: ImplicitPattern
    slopes: np.ndarray
    weights: np.ndarray
    grad: np.ndarray
    local: np.ndarray | None = None

    @property
    def dtype(self) -> Any:
        return self.grad.dtype

    def expected(self, inclusive: bool) -> Gradients:
        """Back-propagation through one factor after the other."""
        second = on_pattern(self.weights, self.pattern.factors[1])
        factors = [
            factor
            for row in self.slopes
            for factor in (on_pattern(row, self.pattern.factors[0]), second)
        ]
        local = None
        if self.local is not None:
            local = [None] * (len(factors) + inclusive)
            local[::2] = self.local
        whole = sequential(self.grad, factors, local, inclusive=inclusive, dtype=self.dtype)
        return Gradients(whole.exact[::2], whole.bounds[::2])

    def scan(self, inclusive: bool, schedule: Any, chain: Any = None, local: Any = None) -> Any:
        call = sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan
        chain = ImplicitChain([self.slopes, self.weights], self.pattern) if chain is None else chain
        local = self.local if local is None else local
        return call(self.grad, chain, local_grads=local, schedule=schedule, device="cuda")


def case(
    seed: Any, steps: int, batch: int | None, size: int, dtype: Any, rows: int, density: float = 1.0
) -> Case:
    """Return steps of so many slopes in any order, and weights of which so many are kept."""
    rng = np.random.default_rng(seed)
    lead = () if batch is None else (batch,)
    columns = rng.permutation(np.arange(rows) % size)
    first = Pattern(np.arange(rows + 1), columns, (rows, size))
    if rows == size and seed % 2:
        first = Pattern.diagonal(size)
    second = of_mask(rng.random((size, rows)) < density)
    weights = rng.standard_normal(second.nnz) / np.sqrt(max(density * rows, 1))
    slopes = rng.standard_normal((steps, *lead, rows))
    grad = rng.standard_normal((*lead, size)).astype(dtype)
    pattern = ImplicitPattern([first, second], shared=[1])
    return Case(pattern, slopes.astype(dtype), weights.astype(dtype), grad)


def two_state_case(
    seed: int, steps: int, batch: int | None, units: int, dtype: Any, terms: int, stored: str
) -> Case:
    """Return steps of units with two unknowns each, such as those of an LSTM.

    The second unknown of a unit has one weight: that of the last of its unit's rows of slopes, of
    which there are so many, in any order. The others have the first unknowns. Weights are `stored`
    as a dense matrix, or those alone that are not zero.
    """
    rng = np.random.default_rng(seed)
    lead, size, rows = () if batch is None else (batch,), 2 * units, terms * units
    unit = rng.permutation(np.arange(rows) % units)
    slopes_at = np.zeros((rows, size), bool)
    weights = np.zeros((size, rows))
    for row, u in enumerate(unit):
        kept = rng.choice([[True, True], [True, False], [False, True]], p=[0.6, 0.2, 0.2])
        slopes_at[row, u], slopes_at[row, units + u] = kept
        if (unit[row + 1 :] == u).any():
            weights[:units, row] = rng.standard_normal(units) / np.sqrt(terms * units)
        else:
            slopes_at[row, [u, units + u]] = True
            weights[units + u, row] = rng.uniform(0.5, 1.5)
    first = of_mask(slopes_at)
    second = Pattern.dense(weights.shape) if stored == "dense" else of_mask(weights != 0)
    values = weights.ravel() if stored == "dense" else weights[weights != 0]
    slopes = rng.standard_normal((steps, *lead, first.nnz))
    grad = rng.standard_normal((*lead, size)).astype(dtype)
    pattern = ImplicitPattern([first, second], shared=[1])
    return Case(pattern, slopes.astype(dtype), values.astype(dtype), grad)


def with_local(given: Case, count: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    return given._replace(local=rng.standard_normal((count, *given.grad.shape)).astype(given.dtype))


@settings(max_examples=examples(12))
@given(st.data())
def test_any_steps_in_any_chunks(ran: list[Ran], data: Any) -> None:
    """Slopes and weights of any number, pruned too; local gradients; one sample or several."""
    steps, batch = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([None, 1, 3, 7]))
    size, terms = data.draw(st.sampled_from([(1, 1), (3, 2), (4, 1), (5, 1), (9, 2), (20, 1)]))
    rows = max(1, size * terms - data.draw(st.integers(0, size - 1)))
    given = case(
        data.draw(st.integers(0, 2**32 - 1)),
        *(steps, batch, size, data.draw(st.sampled_from(DTYPES)), rows),
        data.draw(st.sampled_from([1.0, 0.5, 0.1, 0.0])),
    )
    gradients = check_chunks(data, given, steps, ran)
    assert gradients.flags.c_contiguous


def check_chunks(data: st.DataObject, given: Case, steps: int, ran: list[Ran]) -> Any:
    """Check a scan in some chunks, with local gradients or without; return its gradients."""
    inclusive = data.draw(st.booleans())
    if data.draw(st.booleans()):
        given = with_local(given, steps + inclusive)
    schedule = Schedule.chunked(steps, data.draw(st.integers(1, steps)))
    before = len(ran)
    gradients = given.scan(inclusive, schedule)
    assert_within(gradients, given.expected(inclusive), given.dtype)
    for run in ran[before:]:
        assert not run.repaired
        assert run.room == gradients.size  # none within steps
    return gradients


@settings(max_examples=examples(10))
@given(st.data())
def test_two_unknowns_for_each_unit(ran: list[Ran], data: Any) -> None:
    """Units of any number, whole vectors of them or not, and rows in any order."""
    steps, batch = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([None, 1, 3, 7]))
    units, terms = data.draw(st.sampled_from([(1, 2), (2, 3), (4, 2), (5, 5), (6, 4), (11, 3)]))
    given = two_state_case(
        data.draw(st.integers(0, 2**32 - 1)),
        *(steps, batch, units, data.draw(st.sampled_from(DTYPES)), terms),
        data.draw(st.sampled_from(["dense", "kept"])),
    )
    assert chunk_form([given.pattern], np.dtype(given.dtype)) == (
        *(2 * units, given.pattern.factors[0].nnz),
        *(terms, 2),
    )
    check_chunks(data, given, steps, ran)


@pytest.mark.parametrize("chunks", [1, 3])
def test_other_weights_in_a_dense_matrix_are_not_passed_over(ran: list[Ran], chunks: int) -> None:
    """A second unknown with a weight of another unit or row, or a first one with the last row."""
    given = with_local(two_state_case(3, 6, 2, 4, np.float64, 3, "dense"), 7)
    schedule, whole = Schedule.chunked(6, chunks), given.weights.reshape(8, 12)
    places = np.argwhere(whole == 0).tolist()
    assert len(places) == 96 - 4 * 8 - 4
    for row, column in places[::7]:
        weights = whole.copy()
        weights[row, column] = 0.7
        other = given._replace(weights=weights.ravel())
        assert_within(other.scan(True, schedule), other.expected(True), np.float64)
        assert ran[-1].repaired
    assert_within(given.scan(True, schedule), given.expected(True), np.float64)
    assert not ran[-1].repaired


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rows"), [(2, 8), (5, 5), (20, 80), *slow((16, 16), (33, 33), (32, 128), (64, 64))]
)
def test_sizes(size: int, rows: int, dtype: Any) -> None:
    """Several chains to a warp, or one; whole vectors or not; weights that just fit, or do not."""
    run_as_compiled_if(dtype is np.float32 and rows in (5, 64))
    given = with_local(case(1, 6, 3, size, dtype, rows), 7)
    gradients = given.scan(True, Schedule.chunked(6, 3))
    assert_within(gradients, given.expected(True), dtype)


@pytest.mark.parametrize("how", ["list", "reversed", "wide", "device"])
def test_where_slopes_are(cupy: Any, launches: list[Any], how: str) -> None:
    """In arrays of each step or of all, from the last to the first, between others, or there."""
    given = with_local(case(2, 7, 2, 4, np.float32, 8, 0.6), 8)
    arrays, schedule = [given.slopes, given.weights], Schedule.chunked(7, 3)
    expected = given.expected(True)
    if how == "list":
        chain: Any = [ImplicitStep([row, given.weights], given.pattern) for row in given.slopes]
    elif how == "reversed":
        chain = ImplicitChain([arrays[0][::-1].copy()[::-1], arrays[1]], given.pattern)
    elif how == "wide":
        wide = np.full((7, 2, 11), np.nan, np.float32)
        wide[..., 1:9] = arrays[0]
        chain = ImplicitChain([wide[..., 1:9], arrays[1]], given.pattern)
    else:
        chain = ImplicitChain(list(map(cupy.asarray, arrays)), given.pattern)
        given = given._replace(grad=cupy.asarray(given.grad))
    local = cupy.asarray(given.local) if how == "device" else given.local
    gradients = given.scan(True, schedule, chain, local)
    assert isinstance(gradients, list) == (how == "list")
    gradients = to_host(gradients) if how == "device" else gradients
    assert_within(gradients, expected, np.float32)
    assert [launch.kernel for launch in launches if launch.kernel != "graph"] in (PHASES, [])


@simulated
def test_kernels_are_chosen_by_what_steps_share(launches: list[Any]) -> None:
    """Those for chunks where all steps have one array of weights."""
    given, schedule = case(3, 9, 2, 5, np.float64, 5), Schedule.chunked(9, 3)
    given.scan(True, schedule)
    assert [launch.kernel for launch in launches] == PHASES
    launches.clear()
    weights = np.random.default_rng(0).standard_normal((9, 25)) / 2
    chain = ImplicitChain([given.slopes, weights], given.pattern)
    gradients = given.scan(True, schedule, chain)
    assert "multiply" not in {launch.kernel for launch in launches}
    expected = sparsescan.inclusive_scan(given.grad, chain, schedule="linear")
    np.testing.assert_allclose(gradients, expected, rtol=1e-12, atol=1e-12)
    # These keep products of factors, for which a plan of the other kind has no room.
    steps = [given.pattern] * 9
    plan = sparsescan.plan(steps, schedule=schedule, device="cuda", batch=2)
    limited = sparsescan.plan(
        steps, schedule=schedule, device="cuda", batch=2, memory_limit=plan.workspace_bytes
    )
    limited.inclusive_scan(given.grad, ImplicitChain([given.slopes, given.weights], given.pattern))
    with pytest.raises(MemoryLimitError):
        limited.inclusive_scan(given.grad, chain)


@pytest.mark.parametrize(
    "cell", [RNNCell(3, 9, rng=0), GRUCell(3, 6, rng=0), LSTMCell(3, 6, rng=0)], ids=repr
)
def test_cells_in_the_order_of_time(ran: list[Ran], cell: Any) -> None:
    """As the scan of explicit Jacobians on the CPU."""
    run_as_compiled_if(not isinstance(cell, RNNCell))
    assert chunk_form([cell.implicit_pattern] * 2, np.dtype(np.float32)) is not None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((11, 2, 3), np.float32)
    steps = cell.linearize(x, cell.unroll(x)[:-1])
    grad, local = rng.standard_normal((2, cell.state_size), np.float32), None
    local = rng.standard_normal((11, 2, cell.state_size)).astype(np.float32)
    plan = sparsescan.plan(
        [cell.implicit_pattern] * 11, schedule="chunked:4", reverse=True, device="cuda"
    )
    gradients = plan.exclusive_scan(grad, steps.implicit(reverse=True), local_grads=local)
    explicit = sparsescan.exclusive_scan(
        grad, steps.jacobian(), local_grads=local[::-1], schedule="linear", device="cpu"
    )
    np.testing.assert_allclose(gradients, explicit[::-1], rtol=3e-5, atol=3e-6)
    assert ran == [Ran(False, gradients.size)]


def test_steps_without_kernels_of_their_own() -> None:
    """Other slopes in a row, weights of each sample, a third factor, and sizes beyond."""
    dtype = np.dtype(np.float32)
    diagonal, dense = Pattern.diagonal(4), Pattern.dense((4, 4))
    pairs, kept = np.tile(np.eye(2, dtype=bool), (2, 2)), np.array([[1, 1, 0, 0], [1, 1, 0, 0]])
    kept = np.concatenate([kept, [[0, 0, 1, 0], [0, 0, 0, 1]]]) > 0
    two = ImplicitPattern([of_mask(pairs), of_mask(kept)], shared=[1])
    assert chunk_form([two] * 3, dtype) == (4, 8, 2, 2)
    others = []
    for place in ((2, 0), (2, 3), (3, 1), (0, 2)):
        more = kept.copy()
        more[place] = True
        others.append(ImplicitPattern([of_mask(pairs), of_mask(more)], shared=[1]))
    apart = pairs.copy()
    apart[0] = [True, True, False, False]
    none = pairs.copy()
    none[0] = False
    for slopes in (apart, none, np.ones((4, 4), bool), np.delete(pairs, 0, axis=0)):
        weights = Pattern.dense((4, len(slopes)))
        others.append(ImplicitPattern([of_mask(slopes), weights], shared=[1]))
    for step in (
        *others,
        LSTMCell(3, 33, rng=0).implicit_pattern,
        ImplicitPattern([diagonal, dense]),
        ImplicitPattern([diagonal, dense, diagonal], shared=[1]),
        ImplicitPattern([Pattern.diagonal(65), Pattern.dense((65, 65))], shared=[1]),
        GRUCell(3, 60, rng=0).implicit_pattern,
    ):
        assert chunk_form([step] * 3, dtype) is None
    form = chunk_form([ImplicitPattern([diagonal, dense], shared=[1])] * 3, dtype)
    assert form == (4, 4, 1, 1)
    assert chunk_form([GRUCell(3, 20, rng=0).implicit_pattern] * 3, dtype) == (20, 80, 4, 1)
    assert chunk_form([LSTMCell(3, 32, rng=0).implicit_pattern] * 3, dtype) == (64, 288, 5, 2)


def test_auto_takes_chunks_and_says_what_is_implicit(cupy: Any) -> None:
    pattern = RNNCell(3, 20, rng=0).implicit_pattern
    plan = sparsescan.plan([pattern] * 2000, device="cuda", batch=16, dtype=np.float32)
    assert (plan.schedule.chunks or 0) > 1
    assert "implicit: 2,000 of 2,000; values take" in str(plan)
    explicit = sparsescan.plan(
        [pattern.jacobian] * 2000, schedule=plan.schedule, device="cuda", batch=16, dtype="f4"
    )
    assert plan.workspace_bytes <= explicit.workspace_bytes + 4 * 21 * 20 + 512


# ---------------------------------------------------------------------------------------------
# Range
# ---------------------------------------------------------------------------------------------


def growing_and_decaying(given: Case, factor: float) -> Case:
    """Return steps that grow for 24 in turn, and decay as much for the next 24."""
    scale = given.dtype.type
    grows = np.arange(len(given.slopes)) // 24 % 2 == 0
    given.slopes[grows] *= scale(factor)
    given.slopes[~grows] /= scale(factor)
    return given._replace(grad=given.grad * scale(factor**-12))


def check_repaired(given: Case, schedule: Schedule, ran: list[Ran]) -> None:
    """Assert that the linear scan has decided, and that gradients are those of the CPU."""
    gradients = given.scan(True, schedule)
    assert ran[-1].repaired
    chain = ImplicitChain([given.slopes, given.weights], given.pattern)
    with np.errstate(all="ignore"):
        expected = np.asarray(sparsescan.inclusive_scan(given.grad, chain, schedule="linear"))
    np.testing.assert_allclose(gradients, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2.0**-9, 2.0**9])
def test_decay_and_growth(ran: list[Ran], dtype: Any, factor: float) -> None:
    """Products leave their band: every other chunk does the opposite of the one before."""
    given = growing_and_decaying(case(4, 96, 1, 5, dtype, 5), factor)
    assert_within(given.scan(True, Schedule.chunked(96, 4)), given.expected(True), dtype)
    assert not ran[-1].repaired


def test_entries_that_a_step_would_lose(ran: list[Ran]) -> None:
    """A product of a weight and a slope below all numbers, where gradients are large."""
    given = case(5, 6, 2, 5, np.float32, 5)
    given.slopes[:] *= np.float32(2.0**-80)
    given = given._replace(
        weights=given.weights * np.float32(2.0**-75), grad=given.grad * np.float32(2.0**120)
    )
    assert_within(given.scan(True, Schedule.chunked(6, 2)), given.expected(True), np.float32)
    assert ran[-1].repaired


@pytest.mark.parametrize("stored", ["dense", "kept"])
def test_what_is_not_finite_of_two_unknowns(ran: list[Ran], stored: str) -> None:
    given = two_state_case(6, 6, 2, 4, np.float64, 3, stored)
    given.slopes[3, 1, 2] = np.inf
    check_repaired(given, Schedule.chunked(6, 3), ran)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("step", [1, 5])
def test_what_is_not_finite_is_left_to_the_linear_scan(
    ran: list[Ran], bad: float, density: float, step: int
) -> None:
    """Also where there is no weight, which is not reached."""
    given = case(6, 6, 2, 5, np.float64, 9, density)
    given.slopes[step, 1, 0] = bad
    check_repaired(given, Schedule.chunked(6, 3), ran)


# ---------------------------------------------------------------------------------------------
# One launch
# ---------------------------------------------------------------------------------------------


@settings(max_examples=examples(10))
@given(st.data())
def test_any_steps_in_one_launch(one: None, ran: list[Ran], launches: list[Any], data: Any) -> None:
    """Chunks with fewer steps than teams, or a shorter last one; pruned; local gradients."""
    steps, batch = data.draw(st.integers(2, 30)), data.draw(st.sampled_from([None, 1, 3]))
    size = data.draw(st.sampled_from([1, 3, 4, 9]))
    rows = max(1, size - data.draw(st.integers(0, size - 1)))
    given = case(
        data.draw(st.integers(0, 2**32 - 1)),
        *(steps, batch, size, data.draw(st.sampled_from(DTYPES)), rows),
        data.draw(st.sampled_from([1.0, 0.5, 0.0])),
    )
    launches.clear()
    check_chunks(data, given, steps, ran)
    assert set(kernels_of(launches)) <= {*ONE, "sweep"}


@pytest.mark.parametrize(("size", "dtype"), [(20, np.float32), *slow((32, np.float64))])
def test_sizes_in_one_launch(one: None, launches: list[Any], size: int, dtype: Any) -> None:
    run_as_compiled_if(size == 32)
    given = with_local(case(1, 23, 2, size, dtype, size), 24)
    gradients = given.scan(True, Schedule.chunked(23, 2))
    assert_within(gradients, given.expected(True), dtype)
    assert kernels_of(launches) in (ONE, [])


@simulated
def test_one_launch_leaves_its_tickets_as_they_were(
    one: None, monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    """For the next run, which may be of the other scan, or a graph, and gives the same bits."""
    given, steps = case(3, 14, 3, 5, np.float32, 5), 14
    rooms, make = [], DeviceWorkspace.room

    def watched(self: DeviceWorkspace, what: str, *about: Any, **options: Any) -> Any:
        made = make(self, what, *about, **options)
        rooms.append((what, made))
        return made

    monkeypatch.setattr(DeviceWorkspace, "room", watched)
    plan = sparsescan.plan([given.pattern] * steps, schedule="chunked:4", device="cuda")
    chain = ImplicitChain([given.slopes, given.weights], given.pattern)
    first: dict[bool, Any] = {}
    for inclusive in (True, False, False, True, False, True):
        scan = plan.inclusive_scan if inclusive else plan.exclusive_scan
        gradients = scan(given.grad, chain)
        np.testing.assert_array_equal(gradients, first.setdefault(inclusive, gradients))
        ((_, tickets),) = [room for room in rooms if room[0] == "the exponents of the chunks"]
        assert len(tickets) == 3 * 3 + 1
        np.testing.assert_array_equal(tickets.get(), 0)
    assert_within(first[True], given.expected(True), np.float32)
    captured = [launch.kernel for launch in launches if launch.captured]
    assert captured == 2 * ONE
    assert [launch.kernel for launch in launches].count("graph") == 4


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize("step", [0, 4, 11])
def test_what_is_not_finite_in_one_launch(
    one: None, ran: list[Ran], bad: float, density: float, step: int
) -> None:
    """The linear scan decides, also of a slope without weights, and of the last step."""
    given = case(6, 12, 2, 5, np.float64, 5, density)
    given.slopes[step, 1, 0] = bad
    check_repaired(given, Schedule.chunked(12, 2), ran)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2.0**-9, 2.0**9])
def test_decay_and_growth_in_one_launch(
    one: None, ran: list[Ran], dtype: Any, factor: float
) -> None:
    """Products leave their band in each piece, gradients do not."""
    given = growing_and_decaying(case(4, 96, 1, 5, dtype, 5), factor)
    assert_within(given.scan(True, Schedule.chunked(96, 2)), given.expected(True), dtype)
    assert not ran[-1].repaired


@pytest.mark.parametrize("where", ["the first step", "a later step", "only the slopes"])
def test_entries_that_one_launch_would_lose(one: None, ran: list[Ran], where: str) -> None:
    """Terms below all numbers, where gradients are large."""
    given, two = case(5, 40, 2, 5, np.float32, 5), np.float32(2)
    if where == "only the slopes":
        # Steps are as large as others; columns times their slopes are not.
        given.slopes[:] = np.sign(given.slopes) * two**-123
        given = given._replace(weights=given.weights * two**123)
    else:
        given.slopes[:] *= two**40
        given.slopes[0 if where == "the first step" else 1] *= two**-130
        given = given._replace(weights=given.weights * two**-40, grad=given.grad * two**80)
    assert_within(given.scan(True, Schedule.chunked(40, 2)), given.expected(True), np.float32)
    assert ran[-1].repaired

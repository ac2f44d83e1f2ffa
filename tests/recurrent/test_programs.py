"""Programs of steps against autograd of their definitions: random ones, and some that are hard."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cell_oracle import Reference, Runs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from program_runs import evaluate, run_program
from random_cells import RandomCell, random_cells
from sampling import long_run

from sparsescan.graph.derivatives import coefficients
from sparsescan.graph.expressions import topological
from sparsescan.graph.functions import arctan2
from sparsescan.graph.operations import Node
from sparsescan.recurrent import Cell, Vector, catalogue
from sparsescan.recurrent.compiled import renderer_of
from sparsescan.recurrent.definition import Hidden, Input, declared, further_of
from sparsescan.recurrent.packing import Direction
from sparsescan.recurrent.program import CellProgram, Slot

STEPS, BATCH = 3, 2
# Values and gradients are compared to so many times the largest of them, or 1.
TOLERANCE = 1e-9

seeds = st.integers(0, 2**32 - 1)


def check(
    drawn: RandomCell, seed: int = 0, near: float = 1e-7, params_of: Any = None, least: float = -1
) -> None:
    """Forward and backward passes of a program are those of its definition.

    `near` is how near to points an example may be where derivatives jump; `params_of` takes a cell
    and returns parameters, by default others than it begins with; states are from `least` to 1.
    """
    rng = np.random.default_rng(seed)
    cell = drawn.make(rng)
    program = cell.program
    params = {name: rng.uniform(-1, 1, each.shape) for name, each in cell.params.items()}
    params = params_of(cell) if params_of else params
    masks = drawn.masks(rng)
    x = rng.standard_normal((STEPS, BATCH, drawn.input_size))
    states = list(rng.uniform(least, 1, (program.states, BATCH, drawn.hidden_size)))
    cotangents = list(rng.standard_normal((program.states, STEPS, BATCH, drawn.hidden_size)))
    expected = Reference(drawn.cls, drawn.options).run(params, x, states, cotangents, masks)
    assume(expected.nearest >= near)
    sizes = [np.abs(each).max() for each in arrays_of(expected).values()]
    assume(np.isfinite(sizes).all() and max(sizes) < 1e6)
    biased = {
        name: each.biased
        for name, each in declared(drawn.cls).items()
        if isinstance(each, (Input, Hidden))
    }
    pruned = {name: each * masks[name] if name in masks else each for name, each in params.items()}
    found = run_program(program, biased, pruned, x, states, cotangents)
    for name, mask in masks.items():
        found.param_grads[name][~mask] = 0
    compare(found, expected)


def arrays_of(runs: Runs) -> dict[str, Any]:
    """Return all arrays of a run by name."""
    return {
        **{f"state {k}": each for k, each in enumerate(runs.outputs)},
        "grad of x": runs.input_grad,
        **{f"grad of state {k}": each for k, each in enumerate(runs.state_grads)},
        **{f"grad of {name}": each for name, each in runs.param_grads.items()},
    }


def compare(found: Runs, expected: Runs) -> None:
    """Two runs are the same, but for rounding."""
    one, other = arrays_of(found), arrays_of(expected)
    assert one.keys() == other.keys()
    largest = max(1.0, *(np.abs(each).max() for each in other.values()))
    wrong = {
        name: (each, other[name])
        for name, each in one.items()
        if not np.abs(each - other[name]).max() <= TOLERANCE * largest
    }
    assert not wrong, wrong


@settings(max_examples=long_run(500, 60))
@given(random_cells(), seeds)
def test_random_cells_are_what_autograd_says(drawn: RandomCell, seed: int) -> None:
    check(drawn, seed)


# Those with masks are run by whole steps: see `test_catalogue.py`.
OF_INPUTS = [name for name in catalogue.__all__ if not further_of(getattr(catalogue, name))]


@pytest.mark.parametrize("name", OF_INPUTS)
@given(seed=seeds, bias=st.booleans())
def test_cells_of_the_catalogue_are_what_autograd_says(name: str, seed: int, bias: bool) -> None:
    """Their definitions are run; that these are those of the papers is said elsewhere."""
    source = f"from sparsescan.recurrent.catalogue import {name} as Drawn"
    drawn = RandomCell(source, 3, 3, bias)
    check(drawn, seed, near=0, params_of=lambda cell: cell.params, least=0.1)


# -- Steps that are hard --------------------------------------------------------------------------

DECLARED = """
    weight_ih = Input("a", "b")
    weight_hh = Hidden("a", "b")
    inner = Hidden(bias=False)
    u = Vector()
    alpha = Scalar(0.3)
"""
# What each computes, of h and c; the states that it returns stand behind the last semicolon.
HARD = {
    "a product of a product, whose gradient needs the first": """
        return tanh(self.inner(self.weight_hh.a(h))), c
    """,
    "a product of what has a gradient, and of its value": """
        r = sigmoid(c) * h
        return tanh(self.weight_hh.a(r) + self.weight_hh.b(stop_gradient(r))), c
    """,
    "a product of the value of a state": """
        return tanh(self.weight_hh.a(stop_gradient(h)) + self.weight_hh.b(c)), c
    """,
    "a product of the value of a state, and of the state": """
        return tanh(self.weight_hh.a(stop_gradient(h)) + self.weight_hh.a(h)), c
    """,
    "products of values that are the same but for their gradients": """
        a, b = tanh(stop_gradient(h)) * c, tanh(h) * stop_gradient(c)
        return tanh(self.inner(a) + self.inner(b)), self.inner(tanh(h) * c)
    """,
    "a product of a value whose derivative is another's": """
        return tanh(self.inner(spike(h)) + self.inner(1.0 * (h > 0))), c
    """,
    "a value from an early stage, with the gradient of a later one": """
        late = self.weight_hh.a(sigmoid(self.weight_hh.b(h)))
        straight = surrogate(lambda a: h, lambda a: 1 / (1 + a * a))
        return tanh(self.inner(straight(late))), c
    """,
    "a factor of a state, also as a derivative": """
        return sigmoid(3000 * c) * cos(h), sin(h)
    """,
    "a factor of a state, also as a surrogate derivative": """
        soft = surrogate(lambda a: a > 0.1, lambda a: 1 - tanh(a) ** 2)
        return sigmoid(3000 * c) * tanh(h), soft(h)
    """,
    "a factor of a state, also as a value": """
        return sigmoid(3000 * c) * tanh(h), stop_gradient(tanh(h)) * c
    """,
    "a slope that reads the input": """
        soft = surrogate(lambda a: a > 0.1, lambda a: 1 / (1 + x * x))
        return soft(h), c
    """,
    "parameters alone, as state and as what is multiplied": """
        return tanh(self.inner(sigmoid(self.u)) + self.inner.T(self.u)), sigmoid(self.alpha)
    """,
    "a vector that is bias, factor and bias again": """
        s = (self.weight_ih.a(x) + self.u) + (self.weight_hh.a(h) + self.u)
        return tanh(s + self.u * c), tanh(self.u + self.weight_hh.b(self.u * h))
    """,
    "one sum in several states": """
        s = self.weight_ih.a(x) + self.weight_hh.a(h)
        return s, s + self.weight_hh.b(c)
    """,
    "the same state twice, and none that is read": """
        s = tanh(self.weight_ih.a(x))
        return s, s
    """,
    "states that change places": """
        return c, h
    """,
    "numbers": """
        return 0.5, 1
    """,
    "a tie": """
        return maximum(h, h) + minimum(c, h * 1), c
    """,
}
for name in ("tanh", "sigmoid", "softplus", "sin", "cos", "exp", "expm1", "log", "sqrt"):
    for gate in ("sigmoid(3000 * c)", "exp(-3000 * relu(c + 0.1))"):
        HARD[f"{gate} times {name}"] = f"""
        return {gate} * {name}(1.5 + tanh(h)), c
    """


def hard_cell(body: str) -> RandomCell:
    """Return a cell with two states."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return RandomCell(
        f"class Drawn(Cell):{DECLARED}\n    _trains_all = False\n"
        f"    def step(self, x, h, c):\n{lines}\n",
        3,
        3,
        True,
    )


@pytest.mark.parametrize("body", HARD.values(), ids=HARD)
@given(seed=seeds)
def test_hard_steps(body: str, seed: int) -> None:
    check(hard_cell(body), seed, near=0)


# -- What a program says --------------------------------------------------------------------------


def program_of(body: str) -> CellProgram:
    """Return the program of a step of two states."""
    program: CellProgram = hard_cell(body).cls(3, 3).program
    return program


def subsets(of: list[Node]) -> Iterator[tuple[Node, ...]]:
    """Return all subsets, small ones first."""
    for size in range(len(of) + 1):
        yield from itertools.combinations(of, size)


def recomputed(program: CellProgram, kept: tuple[Node, ...]) -> int | None:
    """Return how many operations are done again for the backward pass, or None if some cannot."""
    free = {*program.outputs, *kept}
    forward = set(topological([*program.outputs, *program.arguments]))
    again = set[Node]()
    gradients = [*program.slot_grads, *program.state_grads, *program.row_grads, program.input_grad]
    stack = [each for each in (*gradients, *program.arguments) if each is not None]
    seen = set[Node]()
    while stack:
        each = stack.pop()
        if each in free or each in seen:
            continue
        seen.add(each)
        if each.operation == "slot":
            return None
        if each in forward and each.arguments:
            again.add(each)
        stack += each.arguments
    return len(again)


@settings(max_examples=long_run(130, 40))
@given(random_cells(size=2))
def test_what_is_kept_is_the_least_and_of_that_what_saves_most(drawn: RandomCell) -> None:
    program = drawn.make(np.random.default_rng(0)).program
    forward = topological([*program.outputs, *program.arguments])
    inner = [each for each in forward if each.operation == "slot" or each.arguments]
    assume(len(inner) <= 16)
    least, work = len(program.kept), recomputed(program, program.kept)
    assert work is not None
    for other in subsets(inner):
        if len(other) > least:
            break
        again = recomputed(program, other)
        assert again is None or (len(other), again) >= (least, work), other


def test_a_unit_that_forgets_keeps_two_vectors() -> None:
    program = program_of("""
        f = sigmoid(self.weight_ih.a(x) + self.weight_hh.a(h))
        n = tanh(self.weight_ih.b(x) + self.weight_hh.b(f * h))
        return h + f * (n - h), c
    """)
    assert [program.names[each] for each in program.kept] == ["f", "n"]


def test_nothing_is_kept_of_what_the_states_say() -> None:
    assert not program_of("return tanh(self.weight_ih.a(x) + self.weight_hh.a(h)), c * h").kept


@settings(max_examples=long_run(130, 40))
@given(random_cells())
def test_slots_and_stages(drawn: RandomCell) -> None:
    """Sums with inputs stand first, what reads the same in few runs, and stages have no gaps."""
    program = drawn.make(np.random.default_rng(0)).program
    slots = program.slots
    has_input = [any(t.argument.operation == "input" for t in slot.terms) for slot in slots]
    assert has_input == sorted(has_input, reverse=True)
    assert {slot.stage for slot in slots} | {0} == set(range(program.stages))
    for slot in slots:
        read = [
            program.stage_of(term.argument)
            for term in slot.terms
            if term.argument.operation not in ("input", "state")
        ]
        # Later, where a value from an early stage has the gradient of a later one.
        least = max([1 + stage for stage in read], default=0)
        assert slot.stage >= least
        assert slot.stage == least or "surrogate" in drawn.source
    for k, slot in enumerate(slots):
        grad = program.slot_grads[k]
        assert grad is None or program.back_stage_of(grad) >= slot.stage
    if len(slots) <= 5:
        first = has_input.count(True)
        orders = itertools.product(
            itertools.permutations(slots[:first]), itertools.permutations(slots[first:])
        )
        assert runs(slots) == min(runs((*a, *b)) for a, b in orders)


def runs(slots: tuple[Slot, ...]) -> int:
    """Return how many runs of neighbours there are that read the same."""
    reads = [{term.argument for term in slot.terms} for slot in slots]
    return sum(len(own - before) for before, own in itertools.pairwise([set[Node](), *reads]))


@settings(max_examples=long_run(130, 40))
@given(random_cells())
def test_gradients_are_linear(drawn: RandomCell) -> None:
    """The coefficients of gradients in a gradient say all of it."""
    program = drawn.make(np.random.default_rng(0)).program
    rng = np.random.default_rng(1)
    grads = (*program.slot_grads, *program.state_grads, *program.row_grads, program.input_grad)
    for each in grads:
        if each is None:
            continue
        leaves = [one for one in topological([each]) if not one.arguments]
        values = {one: rng.uniform(0.1, 1, 3) for one in leaves if one.operation != "number"}
        seeds = [one for one in leaves if one.operation in ("gradient", "back")]
        total = np.zeros(3)
        for seed, factor in coefficients(each, seeds).items():
            inner = topological([factor])
            assert not any(one in inner for one in seeds)
            total = total + values[seed] * evaluate(factor, values, {})
        np.testing.assert_allclose(total, evaluate(each, values, {}), rtol=1e-9, atol=1e-12)


def test_what_is_only_compared_has_no_gradient() -> None:
    program = program_of("""
        inner = self.weight_hh.a(sigmoid(h))
        return where(self.weight_hh.b(tanh(inner)) > 0, c, 0.5 * c), c
    """)
    assert program.slot_grads == (None, None)
    assert program.state_grads[0] is None
    grads = topological([each for each in program.state_grads if each is not None])
    assert "back" not in {each.operation for each in grads}


def test_names_are_those_of_the_definition() -> None:
    program = program_of("""
        s = self.weight_ih.a(x) + self.weight_hh.a(h)
        first = second = sigmoid(s) * h
        inner = tanh(stop_gradient(first) + c)
        scale = sigmoid(self.alpha)
        return scale * inner + tanh(self.inner(second)), s + c
    """)
    named = {name: each for each, name in program.names.items()}
    forward = topological([*program.outputs, *program.arguments])
    assert all(named[name] in forward for name in ("x", "h", "c")[1:])
    s = named["s"]
    assert s.operation == "slot"
    assert named["first"].operation == "multiply"
    assert named["first"] in program.arguments
    assert "second" not in named
    assert named["inner"].operation == "tanh"
    assert named["scale"].operation == "derived"
    assert named["inner"] in forward


def test_values_that_only_differ_in_gradients_are_computed_once() -> None:
    program = program_of("""
        r = sigmoid(self.weight_hh.a(h))
        return tanh(self.inner(r)) + r * c, stop_gradient(r) * h
    """)
    forward = topological([*program.outputs, *program.arguments])
    assert [each.operation for each in forward].count("sigmoid") == 1
    assert "stop_gradient" not in {each.operation for each in forward}


ODD_NAMES = (
    "number k0 k1 k2 g_0 later_0 t_2 less_or range store_some lane_count s0 h_2 t at parts xp"
)


def test_variables_of_a_step_may_have_any_names() -> None:
    """Texts that are written from steps have names of their own, which mean something else."""
    body = """
class Drawn(Cell):
    weight_ih, weight_hh = Input("a"), Hidden("a", "b")

    def step(self, x, h):
        {0} = self.weight_ih.a(x) + self.weight_hh.a(h)
        {1} = sigmoid({0}) * 0.37 + h * 2.25
        {2} = tanh({1}) + 1.75
        {3} = {2} * {1} + 3.25
        {4} = sigmoid({3}) * h
        {5} = {4} * {2}
        {6} = {5} + 0.125 * self.weight_hh.b({4})
        {7} = tanh({6})
        {8} = {7} * {0}
        return tanh({8} + {6} * 0.7)
"""
    names = ODD_NAMES.split()
    x = np.random.default_rng(0).standard_normal((5, 3, 2), np.float32)
    results = []
    for first in (None, 0, 8):
        own = [f"v{k}" if first is None else names[(first + k) % len(names)] for k in range(9)]
        cell = RandomCell(body.format(*own), 2, 5, True).cls(2, 5, rng=0)
        step = cell.training_step()
        output, _ = step.forward(x)
        grads = step.backward(output)
        assert grads.input is not None
        arrays = [output, grads.input, *grads.params.values()]
        arrays += [cell.forward(x, output), cell.values(x, output)]
        assert str(cell).startswith("Drawn(2, 5")
        results.append([each.tobytes() for each in arrays])
    assert all(each == results[0] for each in results)


class Normalised(Cell):
    """A state that is normalised over units, by variables with names that functions have, too."""

    weight_ih, weight_hh = Input(), Hidden()

    def step(self, x: Any, h: Any) -> Any:
        size = self.weight_ih(x) + self.weight_hh(h)
        shared = size - size.mean()
        once = (shared * shared).mean() + 1e-3
        return np.tanh(shared / np.sqrt(once))


def test_what_is_the_same_for_all_units_is_computed_once() -> None:
    cell = Normalised(3, 5, rng=0)
    program = cell.program
    loops = renderer_of(program).forward.split("for j in range(")
    assert [loop.startswith("0, once, lanes)") for loop in loops if "sqrt" in loop] == [True]
    # The state tells of what is normalised.
    assert sum(each not in program.uniform for each in program.kept) <= 1
    x = np.random.default_rng(0).standard_normal((4, 16, 3))
    found, h = cell.training_step().forward(x)[0], np.zeros((16, 5))
    for t, own in enumerate(x):
        h = cell.forward(own, h)
        np.testing.assert_allclose(found[t], h, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["LayerNormLSTM", "LayerNormGRU"])
def test_reductions_have_no_sums_of_gradients(name: str) -> None:
    """All gates of a matrix are one product, and slots behind them are left out of the sums."""
    cell = getattr(catalogue, name)(3, 5)
    one = Direction(cell, 1, 0, np.dtype(np.float32), sample_rows=0)
    gates = len(cell.params["weight_ih"]) // 5
    assert [each.slots for each in one.runs] == [gates, gates]
    assert one.summed == 2 * gates * 5 < one.products
    assert one.biased == 0


class Phase(Cell):
    """An angle of the input and the state."""

    scale = Vector(initial=1.0)

    def step(self, x: Any, h: Any) -> Any:
        return arctan2(x, h * self.scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=20)
@given(seeds, st.integers(1, 20), st.sampled_from([1e-15, 1.0, 1e15]))
def test_an_operation_by_others_is_that_of_numpy(
    dtype: Any, seed: int, batch: int, scale: float
) -> None:
    """In all quadrants, on the axes, of zeros and infinities; gradients are those of PyTorch."""
    rng = np.random.default_rng(seed)
    finite = scale * rng.standard_normal((2, 1, batch, 25)).astype(dtype)
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], finite.shape)
    given = np.where(rng.random(finite.shape) < 0.4, special, finite).astype(dtype)
    step = Phase(25, 25, dtype=dtype).training_step()
    found, _ = step.forward(*given)
    expected = np.arctan2(*given.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=8 * np.finfo(dtype).eps, atol=0)
    step.forward(*finite)
    above = rng.standard_normal(found.shape).astype(dtype)
    grads = step.backward(above)
    y, x = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in finite)
    torch.atan2(y, x).backward(torch.tensor(above, dtype=torch.float64))
    for one, other in ((grads.input, y.grad), (grads.state, x.grad)):
        assert other is not None
        bound = 20 * np.finfo(dtype).eps * np.abs(other.numpy()).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)

"""Cells of the catalogue, each beside a peer's autograd in float64."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, NamedTuple

import numpy as np
import pytest
from autodiff import close
from cell_peers import PEERS, Peer, gradients
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling import examples

from sparsescan.errors import InputError, InputTypeError
from sparsescan.recurrent import Cell, Mask, Vector, catalogue
from sparsescan.recurrent.definition import sizes_of
from sparsescan.recurrent.further import of_network
from sparsescan.recurrent.step import OneCell

torchrecurrent = pytest.importorskip("torchrecurrent")

NAMES = sorted(PEERS)


class Case(NamedTuple):
    """A cell with random parameters, a sequence, and gradients in all of its states."""

    cell: Any
    options: dict[str, Any]
    x: np.ndarray
    state: np.ndarray
    grads: np.ndarray
    masks: dict[str, np.ndarray]

    def expected(self, grads: np.ndarray) -> dict[str, np.ndarray]:
        """Return what the peer says, if that is not so large that others would not."""
        cell = self.cell
        sizes = cell.input_size, cell.hidden_size, cell.bias
        peer = PEERS[type(cell).__name__]
        x = np.concatenate([self.x, *self.masks.values()], -1)
        found = gradients(peer, self.options, sizes, cell.params, x, self.state, grads)
        found["input"] = found["input"][..., : cell.input_size]
        # Products of states that no function bounds grow as 2 to the power of 2 to that of T.
        assume(all(np.abs(each).max(initial=0) < 1e6 for each in found.values()))
        return found


def make(peer: Peer, rng: np.random.Generator, *sizes: Any, **options: Any) -> Any:
    """Return a cell with random parameters."""
    cell = peer.cell(*sizes, dtype=np.float64, **options)
    for name, array in cell.params.items():
        setattr(cell, name, np.asarray(peer.spread(name, rng.standard_normal(array.shape))))
    return cell


def case_of(
    draw: Any, name: str, most: tuple[int, int, int] = (9, 12, 19), *, few: bool = True
) -> Case:
    """Draw a cell, and a sequence, of at most so many units, steps and samples.

    Its options are one of two sets, or any.
    """
    peer = PEERS[name]
    options = (
        peer.few_options(draw(st.integers(0, 1)))
        if few
        else {key: draw(st.sampled_from(some)) for key, some in peer.options.items()}
    )
    units, steps, batch = (draw(st.integers(1, each)) for each in most)
    units = max(units * options.get("heads", 1), options.get("proj_size", 1))
    inputs = units if peer.same_sizes else draw(st.integers(1, most[0]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    cell = make(peer, rng, inputs, units, draw(st.booleans()), **options)
    x = rng.standard_normal((steps, batch, inputs))
    state = rng.standard_normal((batch, cell.state_size))
    for each in peer.positive:
        part = state[:, each * units : (each + 1) * units]
        np.abs(part, out=part)
    grads = rng.standard_normal((steps, batch, cell.state_size))
    masks = {}
    for each in of_network(OneCell(cell)):
        value, mean = each.declared.values(each.p) if isinstance(each.declared, Mask) else (1, 1)
        drawn = rng.choice([0, value, mean], (steps, batch, units))
        masks[each.name] = drawn
    return Case(cell, dict(cell.options), x, state, grads, masks)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_training_step_is_the_autograd_of_a_peer(name: str, data: Any) -> None:
    cell, _, x, state, grads, masks = case = case_of(data.draw, name)
    sizes = sizes_of(type(cell), cell.options, cell.hidden_size)
    places = [k * cell.hidden_size + np.arange(size) for k, size in enumerate(sizes)]
    kept = np.concatenate(places)
    grads[..., np.setdiff1d(np.arange(cell.state_size), kept)] = 0
    state[:, np.setdiff1d(np.arange(cell.state_size), kept)] = 0
    above, carry = grads[..., places[0]], grads[-1]
    whole = np.zeros_like(grads)
    whole[..., places[0]] += above
    whole[-1] += carry
    expected = case.expected(whole)
    step = cell.training_step()
    output, last = step.forward(x, state[None, :, kept], **masks)
    close(output, expected["states"][..., places[0]])
    close(last, expected["states"][-1:, :, kept])
    found = step.backward(above, carry[None, :, kept])
    close(found.input, expected["input"], 1e5)
    close(found.state, expected["state"][None, :, kept], 1e5)
    assert list(found.params) == list(cell.params)
    for key, grad in found.params.items():
        close(grad, expected[key], 1e5)


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_begins_at_zero_with_finite_gradients(name: str) -> None:
    peer = PEERS[name]
    rng = np.random.default_rng(3)
    cell = make(peer, rng, 6, 6)
    x = 30 * rng.standard_normal((20, 4, 6))
    step = cell.training_step()
    output, last = step.forward(x)
    grads = step.backward(np.ones_like(output), np.ones_like(last))
    for array in (output, last, grads.input, *grads.params.values()):
        assert np.isfinite(array).all()


# -- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(n[:-4] for n in torchrecurrent.__all__ if n[-4:] == "Cell"))
def test_a_state_dict_of_torchrecurrent_carries_over(name: str) -> None:
    """By names and shapes; PyTorch reads one number from the shape ``(1,)`` as one of ``()``."""
    theirs = getattr(torchrecurrent, f"{name}Cell")(6, 6).state_dict()
    ours = getattr(catalogue, name)(6, 6).params
    shapes = {key: tuple(array.shape) for key, array in theirs.items()}
    expected = {key: () if shape == (1,) else shape for key, shape in shapes.items()}
    assert {key: array.shape for key, array in ours.items()} == expected


def test_all_of_the_catalogue_has_a_peer() -> None:
    assert set(catalogue.__all__) == set(PEERS)
    assert all(issubclass(getattr(catalogue, name), Cell) for name in catalogue.__all__)


def lines_of(cell: type) -> int:
    """Return how many lines of code define a class, without docstrings and empty lines."""
    source = textwrap.dedent(inspect.getsource(cell))
    lines = {k + 1 for k, line in enumerate(source.splitlines()) if line.strip()}
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(each):
            lines -= set(range(each.body[0].lineno, each.body[0].end_lineno + 1))
    return len(lines)


def test_definitions_are_short() -> None:
    counts = [lines_of(getattr(catalogue, name)) for name in catalogue.__all__]
    assert np.median(counts) <= 12
    assert max(counts) <= 20


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_name_the_paper_and_the_equations(name: str) -> None:
    text = inspect.getdoc(getattr(catalogue, name))
    first, _, rest = text.partition("\n")
    assert any(year in first for year in map(str, range(1997, 2027)))
    assert "'" in rest
    assert " = " in rest


# -- Options --------------------------------------------------------------------------------------


def test_a_rate_of_each_neuron() -> None:
    class Each(catalogue.Leaky):
        beta = Vector(initial=0.5)

    assert Each(3, 3).beta.tolist() == [0.5, 0.5, 0.5]
    assert catalogue.Leaky(3, 3).beta.shape == ()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: catalogue.Leaky(3, 4), InputError, "expected equal ones, since the step of Leaky"),
        (lambda: catalogue.tauGRU(3, 4, delay=0), InputError, "delay is 0; expected at least 1"),
        (lambda: catalogue.tauGRU(3, 4, delay=1.5), InputTypeError, "delay is 1.5; expected"),
        (lambda: catalogue.MGU(3, 4, nonlinearity="gelu"), InputError, "nonlinearity is 'gelu'"),
        (lambda: catalogue.LEM(3, 4, memory="ne"), InputError, "memory is 'ne'; expected 'new'"),
    ],
)
def test_wrong_options_are_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()

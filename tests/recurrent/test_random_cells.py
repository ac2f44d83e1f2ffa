"""Random cells against autograd of their definitions, by what a user calls.

The programs of many more are in `test_programs.py`, where nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cell_oracle import Reference, Runs, Value, grads_of, unroll_layers
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from random_cells import RandomCell, random_cells
from sampling import long_run

from sparsescan.recurrent import Cell, Given, Input, Recurrent, catalogue
from sparsescan.recurrent import step as step_module
from sparsescan.recurrent.definition import begins_of, further_of, width_of
from sparsescan.recurrent.step import OneCell

# Arrays are compared to so many times the largest of an example, or 1.
TOLERANCE = 1e-9

seeds = st.integers(0, 2**32 - 1)


class Example:
    """A cell with parameters, a sequence, and gradients in what all states are."""

    def __init__(self, drawn: RandomCell, seed: int, steps: int, batch: int) -> None:
        self.drawn, rng = drawn, np.random.default_rng(seed)
        self.masks = drawn.masks(rng)
        # Its masks are drawn as these were.
        self.cell = drawn.make(np.random.default_rng(seed))
        for name in self.cell.parameter_names:
            setattr(self.cell, name, rng.uniform(-1, 1, getattr(self.cell, name).shape))
        self.states, self.hidden = self.cell.program.states, drawn.hidden_size
        self.x = rng.standard_normal((steps, batch, width_of(OneCell(self.cell))))
        self.first = rng.uniform(-1, 1, (batch, self.states * self.hidden))
        self.grads = rng.standard_normal((steps, batch, self.states * self.hidden))
        self.lengths: Any = None

    def by_state(self, array: Any) -> list[Any]:
        """Return an array of all states as one for each."""
        return np.split(array, self.states, axis=-1)

    @cached_property
    def expected(self) -> Runs:
        """What autograd says, of an example that is not too near a jump, nor too large."""
        runs = Reference(self.drawn.cls, self.drawn.options).run(
            self.cell.params,
            self.x,
            self.by_state(self.first),
            self.by_state(self.grads),
            self.masks,
            self.lengths,
        )
        arrays = (*runs.outputs, runs.input_grad, *runs.state_grads, *runs.param_grads.values())
        self.largest = max(1.0, *(np.abs(each).max() for each in arrays))
        if runs.nearest < 1e-7 or self.largest > 1e6:
            reject()
        return runs

    def close(self, found: Any, expected: Any, name: str) -> None:
        assert found.shape == expected.shape, name
        error = np.abs(found - expected).max(initial=0)
        assert error <= TOLERANCE * self.largest, (name, found, expected)

    def close_grads(self, first: Any, inputs: Any, params: dict[str, Any]) -> None:
        """Compare gradients in the initial states, inputs and parameters."""
        self.close(first, np.concatenate(self.expected.state_grads, -1), "states")
        self.close(inputs, self.expected.input_grad, "inputs")
        assert list(params) == list(self.expected.param_grads)
        for name, found in params.items():
            self.close(found, self.expected.param_grads[name], name)


# Smaller examples would be compiled, too.
@settings(max_examples=long_run(16, 4), phases=[Phase.generate])
@given(
    random_cells(has_further=True),
    seeds,
    st.sampled_from([1, 3, 14]),
    st.sampled_from([None, 5, 17]),
    st.booleans(),
)
def test_compiled_steps_are_back_propagation(
    drawn: RandomCell, seed: int, batch: int, units: int | None, has_lengths: bool
) -> None:
    """With samples or units as lanes, and samples of several lengths."""
    if units is not None:
        units = drawn.units(units)
    check_compiled(drawn, seed, batch, units, has_lengths)


# Definitions, and gates of weight_hh that are pruned as a whole.
HARD = {
    "nothing is read": ("return h", ""),
    "no input is read": ("return tanh(self.weight_hh.a(h))", ""),
    "an input that has no gradient": ("return h + stop_gradient(tanh(self.weight_ih(x)))", ""),
    "infinite numbers": ("return hardtanh(self.weight_hh.a(h), -1e999, 0.5)", ""),
    "a gate without weights": ("return tanh(self.weight_ih(x) + self.weight_hh.a(h))", "a"),
    "gates without weights in two stages": (
        "return tanh(self.weight_ih(x) + self.weight_hh.a(tanh(self.weight_hh.b(h))))",
        "b",
    ),
}


@pytest.mark.parametrize("batch", [1, 14])
@pytest.mark.parametrize("name", HARD)
def test_hard_compiled_steps(name: str, batch: int) -> None:
    line, pruned = HARD[name]
    source = f"""\
class Drawn(Cell):
    _trains_all = False
    weight_ih = Input()
    weight_hh = Hidden("a", "b")

    def step(self, x, h):
        {line}
"""
    units, gates = 5, ["a", "b"]
    mask = np.repeat([gate not in pruned for gate in gates], units)[:, None].repeat(units, axis=1)
    drawn = RandomCell(source, 3, units, True, masked={"weight_hh": mask} if pruned else {})
    check_compiled(drawn, 0, batch, None, False)


def check_compiled(
    drawn: RandomCell, seed: int, batch: int, units: int | None, has_lengths: bool
) -> None:
    """Compare a compiled training step with back-propagation."""
    if units is not None:
        inputs = units if drawn.input_size == drawn.hidden_size else drawn.input_size
        drawn = dataclasses.replace(drawn, input_size=inputs, hidden_size=units)
    example = Example(drawn, seed, steps=5, batch=batch)
    rng = np.random.default_rng(seed)
    is_there = np.ones(example.x.shape[:2], bool)
    if has_lengths:
        example.lengths = rng.integers(0, len(example.x) + 1, batch)
        is_there = np.arange(len(example.x))[:, None] < example.lengths
    outputs = rng.standard_normal((*is_there.shape, example.hidden))
    last = rng.standard_normal(example.first.shape)
    example.grads[:] = 0
    example.grads[..., : example.hidden] = outputs * is_there[..., None]
    example.grads[-1] += last
    begins = begins_of(drawn.cls, example.states)
    for k in range(example.states) if begins else ():
        name, block = begins.get(k, ("", 0))
        row = example.cell.params[name].reshape(-1, example.hidden)[block] if name else 0
        example.by_state(example.first)[k][:] = row
    expected = example.expected
    for k, (name, block) in begins.items():
        grad = expected.param_grads[name].reshape(-1, example.hidden)
        grad[block] += expected.state_grads[k].sum(0)
    step = example.cell.training_step()
    ends = range(drawn.input_size, example.x.shape[2], example.hidden)
    x, *further = np.split(example.x, ends, 2)
    named = dict(zip(further_of(drawn.cls), further, strict=True))
    first = None if begins else example.first[None]
    y, state = step.forward(x, first, example.lengths, **named)
    example.close(y, expected.outputs[0] * is_there[..., None], "outputs")
    example.close(state[0], np.concatenate([each[-1] for each in expected.outputs], -1), "state")
    grads = step.backward(outputs, last[None])
    assert grads.input is not None
    params = {name.removesuffix("_l0"): each for name, each in grads.params.items()}
    in_inputs = np.concatenate([grads.input, *(grads.further or {}).values()], -1)
    example.close_grads(grads.state[0], in_inputs, params)


@settings(max_examples=long_run(12, 3), phases=[Phase.generate])
@given(random_cells(size=3), seeds, st.integers(1, 2), st.booleans(), st.sampled_from([2, 18]))
def test_networks_are_back_propagation(
    drawn: RandomCell, seed: int, layers: int, is_bidirectional: bool, batch: int
) -> None:
    """Layers and directions, samples of several lengths, and again with less memory."""
    rng = np.random.default_rng(seed)
    directions, units, steps = 1 + is_bidirectional, drawn.hidden_size, 7
    if drawn.input_size == units:
        # What reads the input of each unit has as many in all layers.
        directions = 1
    masks = drawn.masks(rng)
    net = Recurrent(
        drawn.cls,
        drawn.input_size,
        units,
        layers,
        drawn.bias,
        bidirectional=directions == 2,
        dtype=np.float64,
        rng=rng,
        masks={f"{name}_l0": mask for name, mask in masks.items()},
        **drawn.options,
    )
    count = net.cells[0][0].program.states
    x = rng.standard_normal((steps, batch, drawn.input_size))
    first = rng.uniform(-1, 1, (layers * directions, batch, count * units))
    lengths = rng.integers(0, steps + 1, batch)
    outputs = rng.standard_normal((steps, batch, directions * units))
    last = rng.standard_normal(first.shape)

    leaves = {name: torch.tensor(each, requires_grad=True) for name, each in net.params.items()}
    reference = Reference(drawn.cls, drawn.options)
    cells = [
        [
            (
                reference,
                {
                    name: leaves[net.name_of(name, layer, back)]
                    * (torch.tensor(masks[name]) if name in masks and layer == back == 0 else 1)
                    for name in cell.parameter_names
                },
            )
            for back, cell in enumerate(own)
        ]
        for layer, own in enumerate(net.cells)
    ]
    given, begin = (torch.tensor(each, requires_grad=True) for each in (x, first))
    Value.nearest = math.inf
    y, states = unroll_layers(cells, given, [each.chunk(count, -1) for each in begin], lengths)
    loss = (y * torch.tensor(outputs)).sum()
    loss = loss + sum((a * torch.tensor(b)).sum() for a, b in zip(states, last, strict=True))
    sources = {"inputs": given, "states": begin, **leaves}
    expected = dict(zip(sources, grads_of(loss, [*sources.values()]), strict=True))
    expected |= {"outputs": y.detach().numpy(), "last": torch.stack(states).detach().numpy()}
    largest = max(1.0, *(np.abs(each).max(initial=0) for each in expected.values()))
    if Value.nearest < 1e-7 or largest > 1e6:
        reject()

    step = net.training_step()
    for is_small in (False, True):
        if is_small:
            # Of a few steps at a time what is kept is computed again.
            step = net.training_step(memory_limit=step.nbytes - 1)
        with patch.object(step_module, "_SEGMENT", 3):
            found = dict(zip(("outputs", "last"), step.forward(x, first, lengths), strict=True))
        assert step.keeps_gates == (not is_small)
        grads = step.backward(outputs, last)
        found |= {"inputs": grads.input, "states": grads.state, **grads.params}
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.shape == expected[name].shape, name
            error = np.abs(array - expected[name]).max(initial=0)
            assert error <= TOLERANCE * largest, (name, is_small, array, expected[name])


@settings(max_examples=long_run(60, 4), phases=[Phase.generate])
@given(
    st.sampled_from(["sum", "mean", "max", "softmax", "logsumexp", "layer_norm", "rms_norm"]),
    st.integers(1, 6),
    st.integers(1, 24),
    st.sampled_from([1, 3, 14, 32]),
    st.sampled_from([1e-3, 1.0, 1e3]),
    seeds,
)
def test_reductions_over_units(
    name: str, heads: int, size: int, batch: int, scale: float, seed: int
) -> None:
    """Of heads of any size, with samples or units as lanes, in both dtypes."""
    eps = {"layer_norm": ", eps=0.1", "rms_norm": ", eps=0.1"}.get(name, "")
    vector = f"({scale} * (self.weight_ih(x) + self.u * h))"
    a = f"{vector}.{name}(heads={heads})"
    if name not in ("sum", "mean", "max"):
        a = f"{name}({vector}, heads={heads}{eps})"
    source = f"""\
class Drawn(Cell):
    weight_ih = Input()
    weight_hh = Hidden()
    u = Vector()

    def step(self, x, h):
        return tanh(self.weight_hh(h) + 0.3 * {a})
"""
    check_compiled(RandomCell(source, 3, heads * size, True), seed, batch, None, seed % 2 == 0)


@pytest.mark.parametrize("batch", [1, 14])
def test_the_largest_units_share_a_gradient(batch: int) -> None:
    """Among many that are equal, as those that a bound holds."""
    source = """\
class Drawn(Cell):
    weight_ih = Input()
    weight_hh = Hidden()

    def step(self, x, h):
        a = hardtanh(3 * self.weight_ih(x), -0.5, 0.2) + 0 * h
        return tanh(self.weight_hh(h) + np.max(a) * h - 0.5 * (a * h).max(heads=2))
"""
    check_compiled(RandomCell(source, 3, 6, True), 0, batch, None, False)


class _Largest(Cell):
    weight_ih = Input()

    def step(self, x: Any, h: Any) -> Any:
        return 0.5 * h + self.weight_ih(x) + np.max(h)


@pytest.mark.parametrize("units", [5, 6, 20])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_largest_number_is_nan_where_one_is(units: int, batch: int) -> None:
    step = _Largest(3, units, rng=0, dtype=np.float32).training_step()
    x = np.zeros((1, batch, 3), np.float32)
    for unit in range(units):
        begin = np.random.default_rng(unit).standard_normal((1, batch, units), np.float32)
        begin[0, unit % batch, unit] = np.nan
        output, _ = step.forward(x, state=begin)
        expected = np.broadcast_to(np.isnan(begin).any(-1, keepdims=True), output.shape)
        np.testing.assert_array_equal(np.isnan(output), expected)


class _Compared(Cell):
    weight_ih = Input()
    decay, offset = Given(), Given()

    def step(self, x: Any, h: Any) -> Any:
        h = 0.9 * h + 0.2 * np.sin(0.7 * self.offset)
        h = h * self.decay + 0.05 + 0.3 * np.tanh(self.weight_ih(x))
        return h - 0.1 * np.max(h)


@pytest.mark.parametrize(("units", "batch"), [(25, 17), (8, 16), (3, 2)])
def test_the_largest_number_has_its_gradient_whatever_was_rounded(units: int, batch: int) -> None:
    """The backward pass computes again what is compared, in other functions: digit by digit."""
    step = _Compared(2, units, rng=0).training_step()
    rng = np.random.default_rng(units)
    given = {name: rng.random((12, batch, units)) for name in ("decay", "offset")}
    x, begin = rng.standard_normal((12, batch, 2)), rng.standard_normal((1, batch, units))
    above = rng.standard_normal((12, batch, units))
    step.forward(x, begin, **given)
    grad = step.backward(above).state
    for unit in range(units):  # samples have nothing to do with each other
        ends = []
        for sign in (1, -1):
            moved = begin.copy()
            moved[..., unit] += sign * 1e-7
            ends.append((step.forward(x, moved, **given)[0] * above).sum((0, 2)))
        np.testing.assert_allclose(grad[0, :, unit], (ends[0] - ends[1]) / 2e-7, atol=1e-5)


@pytest.mark.parametrize("units", [5, 6, 20])
@pytest.mark.parametrize("name", ["LayerNormLSTM", "LayerNormGRU"])
def test_normalised_samples_have_nothing_to_do_with_each_other(name: str, units: int) -> None:
    """Sixteen samples are lanes where there are registers for it, and one sample is not."""
    cell, rng = getattr(catalogue, name)(3, units, rng=0), np.random.default_rng(units)
    x, lengths = rng.standard_normal((9, 16, 3)), rng.integers(1, 10, 16)
    above = rng.standard_normal((9, 16, units))
    whole, one = cell.training_step(), cell.training_step()
    output, last = whole.forward(x, lengths=lengths)
    grads = whole.backward(above)
    sums = {key: np.zeros_like(each) for key, each in grads.params.items()}
    for b in range(16):
        own = slice(b, b + 1)
        alone, state = one.forward(x[:, own], lengths=lengths[own])
        found = one.backward(above[:, own])
        pairs = [(alone, output[:, own]), (state, last[:, own])]
        pairs += [(found.input, grads.input[:, own]), (found.state, grads.state[:, own])]
        for a, other in pairs:
            # First gradients behind a normalisation of zeros are hundreds.
            bound = 1e-13 * max(10, np.abs(other).max())
            np.testing.assert_allclose(a, other, rtol=0, atol=bound)
        for key, each in found.params.items():
            sums[key] += each
    for key, each in grads.params.items():
        bound = 1e-13 * max(100, np.abs(sums[key]).max())
        np.testing.assert_allclose(each, sums[key], rtol=0, atol=bound)


@settings(max_examples=long_run(60, 6), phases=[Phase.generate])
@given(
    st.integers(2, 5),
    st.integers(1, 36),
    st.sampled_from([1, 3, 14, 32]),
    st.sampled_from([0, 0.1, 0.6]),
    seeds,
)
def test_matrices_by_heads(heads: int, size: int, batch: int, kept: float, seed: int) -> None:
    """Of heads of any size, pruned or not, with samples or units as lanes."""
    source = f"""\
class Drawn(Cell):
    weight_hh = Hidden("a", "b", heads={heads})
    inner = Hidden(heads={heads})

    def step(self, x, h):
        a = tanh(self.weight_hh.a(h) + self.inner(x))
        return tanh(self.weight_hh.b(a * h) + self.inner.T(h) + 0.3 * a)
"""
    shape = heads * size, size
    masks = {"inner": np.random.default_rng(seed).random(shape) < kept} if kept else {}
    drawn = RandomCell(source, heads * size, heads * size, True, masked=masks)
    check_compiled(drawn, seed, batch, None, seed % 2 == 0)


@settings(max_examples=long_run(60, 6), phases=[Phase.generate])
@given(
    st.integers(1, 20),
    st.integers(0, 20),
    st.sampled_from([1, 3, 14, 32]),
    st.sampled_from([0, 0.1, 0.6]),
    seeds,
)
def test_matrices_of_fewer_rows_and_columns(
    rank: int, more: int, batch: int, kept: float, seed: int
) -> None:
    """Products of low rank, and a state that is shorter, with samples or units as lanes."""
    source = f"""\
class Drawn(Cell):
    weight_ih = Input()
    outer = Hidden("a", "b", cols={rank})
    inner = Hidden(rows={rank}, bias=False)
    wide = Hidden(rows={rank}, cols={max(1, rank // 2)}, bias=False)

    def step(self, x, h, c):
        a = tanh(self.outer.a(self.inner(c)) + self.weight_ih(x) + self.inner.T(h))
        b = sigmoid(self.outer.b(h) + self.wide.T(a) + c)
        return self.inner(b * c) + self.wide(h), a * b
"""
    shape = rank, rank + more
    masks = {"inner": np.random.default_rng(seed).random(shape) < kept} if kept else {}
    drawn = RandomCell(source, 3, rank + more, True, masked=masks)
    check_compiled(drawn, seed, batch, None, seed % 2 == 0)

"""Cells of any definition over whole sequences on a CUDA device, beside autograd and the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_recurrent import agree, check_filling, on_device
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from network_oracle import autograd_of
from on_device import IN_PYTHON, cupy_or_stand_in
from random_cells import RandomCell, random_cells
from recurrent_steps import arguments_of
from sampling import EXAMPLES, examples
from some_cells import CELLS, Normalised

from sparsescan.errors import InputError
from sparsescan.recurrent import Recurrent, catalogue
from sparsescan.recurrent import device as recurrent_device
from sparsescan.recurrent.definition import further_of
from sparsescan.recurrent.step_pool import runs_on_gpu

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
SQUARE = "Leaky", "Elementwise"
# Units with weights in registers, read in each step, and several of them for a thread.
HELD, STREAMED, ROUNDS = (2, 7, 14) if IN_PYTHON else (20, 130, 400)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


def run_in_python_or_if(chosen: bool) -> None:
    """Skip a case that is not one of a few, as each has kernels to compile; --explore has all."""
    if not (IN_PYTHON or chosen) and settings().max_examples <= EXAMPLES:
        pytest.skip("others like it are run as compiled")


def drawn(net: Any, rng: np.random.Generator, dtype: Any) -> Any:
    """Return a network with parameters that are not as small as those of many units."""
    for name, array in net.params.items():
        setattr(net, name, (0.6 * rng.standard_normal(array.shape)).astype(dtype))
    return net


def network(name: str, units: int, dtype: Any, rng: np.random.Generator, **options: Any) -> Any:
    """Return a network of one of some cells."""
    inputs = units if name in SQUARE else 3
    net = Recurrent(CELLS[name], inputs, units, dtype=dtype, rng=rng, **options)
    return drawn(net, rng, dtype)


@pytest.mark.parametrize("units", [HELD, STREAMED, ROUNDS])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_autograd(cupy: Any, name: str, units: int) -> None:
    """Of one stage and of several, with weights in registers or not, in both directions."""
    run_in_python_or_if((name, units) in (("Tied", ROUNDS), ("PeepholeLSTM", HELD)))
    rng = np.random.default_rng(units)
    net = network(name, units, F8, rng, bidirectional=units == HELD)
    arguments = arguments_of(rng, net, 4, 3, F8, shorter=True)
    expected = autograd_of(net, *arguments)
    agree(on_device(cupy, net, arguments), expected, F8)


@pytest.mark.parametrize("name", CELLS)
def test_layers_and_bits(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With several samples in a block; the same bits every time, and float32 beside float64."""
    run_in_python_or_if(name == "Tied")
    rng = np.random.default_rng(1)
    units = 5 if IN_PYTHON else 40
    net = network(name, units, F4, rng, num_layers=2)
    arguments = arguments_of(rng, net, 4, 7, F4, shorter=True)
    monkeypatch.setattr(recurrent_device, "samples_of", lambda *about: 2)
    expected = autograd_of(net, *arguments)
    actual = on_device(cupy, net, arguments)
    agree(actual, {key: each.astype(F4) for key, each in expected.items()}, F4)
    again = on_device(cupy, net, arguments)
    assert all(actual[key].tobytes() == again[key].tobytes() for key in actual)


@pytest.mark.parametrize("name", CELLS)
def test_what_is_not_kept_is_computed_again(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_in_python_or_if(name == "Elementwise")
    monkeypatch.setattr("sparsescan.recurrent.step._SEGMENT", 3)
    rng = np.random.default_rng(2)
    net = network(name, 3, F8, rng, num_layers=2)
    arguments = arguments_of(rng, net, 7, 2, F8, shorter=True)
    expected = autograd_of(net, *arguments)
    step = net.training_step()
    agree(on_device(cupy, net, arguments, step), expected, F8)
    smaller = net.training_step(memory_limit=step.nbytes - 1)
    agree(on_device(cupy, net, arguments, smaller), expected, F8)
    assert not smaller.keeps_gates


# There are no kernels yet for masks.
OF_INPUTS = [name for name in catalogue.__all__ if not further_of(getattr(catalogue, name))]


@pytest.mark.parametrize("name", OF_INPUTS)
def test_the_catalogue(cupy: Any, name: str) -> None:
    run_in_python_or_if(name == "sLSTM")
    rng = np.random.default_rng(5)
    cell, units = getattr(catalogue, name), 14 if IN_PYTHON else 33
    try:
        net = Recurrent(cell, 3, units, bidirectional=True, dtype=F8, rng=rng)
    except InputError:  # it reads the input of each unit
        net = Recurrent(cell, units, units, bidirectional=True, dtype=F8, rng=rng)
    arguments = arguments_of(rng, net, 4, 3, F8, shorter=True)
    expected = autograd_of(net, *arguments)
    agree(on_device(cupy, net, arguments), expected, F8)


def test_gradients_in_rows_over_many_steps(cupy: Any) -> None:
    """Those of more steps than a thread adds up by itself."""
    rng = np.random.default_rng(3)
    net = network("Leaky", 2, F8, rng)
    net.threshold_l0 = np.array([0.5, 0.7])
    arguments = arguments_of(rng, net, 150, 2, F8, shorter=True)
    expected = autograd_of(net, *arguments)
    agree(on_device(cupy, net, arguments), expected, F8)


@pytest.mark.parametrize("name", CELLS)
def test_what_fills_up_shorter_sequences_is_not_read(cupy: Any, name: str) -> None:
    run_in_python_or_if(name == "MGU")
    rng = np.random.default_rng(4)
    check_filling(cupy, network(name, 3, F8, rng, num_layers=2), rng)


@settings(max_examples=examples(150) if IN_PYTHON else 2)
@given(
    random_cells(has_maxima=False),
    *(st.integers(1, 15), st.integers(1, 2), st.booleans()),
    *(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1 << 30)),
)
def test_random_cells(
    cell: RandomCell, units: int, layers: int, both: bool, steps: int, batch: int, seed: int
) -> None:
    """With random stages, states, matrices and parameters, in networks of any shape."""
    rng = np.random.default_rng(seed)
    units = cell.units(max(units, 2))
    is_square = cell.input_size == cell.hidden_size
    layers = 1 if is_square and both else layers
    inputs = units if is_square else cell.input_size
    about = cell.cls, inputs, units, layers, cell.bias
    net = Recurrent(*about, bidirectional=both, rng=rng, **cell.options)
    masks = {
        name: rng.random(array.shape) < 0.6
        for name, array in net.params.items()
        if name.partition("_l")[0] in cell.masked
    }
    net = Recurrent(*about, bidirectional=both, masks=masks, rng=rng, **cell.options)
    drawn(net, rng, F8)
    # As compiled, sines in float64 call a function, which the runner of the tests does not.
    dtype = F8 if IN_PYTHON else F4
    arguments = arguments_of(rng, net, steps, batch, dtype, shorter=True)
    for name, array in net.params.items():
        setattr(net, name, array.astype(dtype))
    expected = autograd_of(net, *arguments)
    assume(all(np.isfinite(each).all() for each in expected.values()))
    assume(expected.nearest > 1e3 * np.finfo(dtype).eps)
    with pytest.MonkeyPatch.context() as patch:
        actual = on_device(cupy_or_stand_in(patch), net, arguments)
    assert actual.keys() == expected.keys()
    # Sums of what is large may be small, or nothing.
    scale = max(np.max(np.abs(each), initial=1) for each in expected.values())
    bound = 1e4 * np.finfo(dtype).eps * scale
    for key, each in expected.items():
        assert (actual[key].dtype, actual[key].shape) == (dtype, each.shape), key
        assert np.max(np.abs(actual[key] - each), initial=0) <= bound, key


def test_maxima_over_units_are_refused(cupy: Any) -> None:
    """PyTorch's modules ask first, and compute such cells step by step."""
    net = Recurrent(Normalised, 2, 3, rng=0)
    assert not runs_on_gpu(net.cells[0][0].program, 3, F4)
    with pytest.raises(InputError, match=r"Normalised has a maximum over units .*, and target is"):
        net.cells[0][0].source("cuda", "backward")
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(array))
    with pytest.raises(InputError, match=r"Normalised has a maximum over units .*, and x is on a"):
        net.training_step().forward(cupy.asarray(np.zeros((2, 1, 2), F4)))


def test_units_that_are_too_many_are_refused(cupy: Any) -> None:
    net = Recurrent(CELLS["Diagonal"], 1, 99_999, dtype=F4, rng=0)
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(np.zeros(array.shape, F4)))
    with pytest.raises(InputError, match=r"hidden_size is 99999; in float32 .* [\d.]+ KiB of"):
        net.training_step().forward(cupy.asarray(np.zeros((1, 1, 1), F4)))

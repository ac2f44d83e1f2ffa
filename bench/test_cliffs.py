"""Special inputs are what they are called, and their times can be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from . import cliffs, report
from .cliff_steps import AGAIN, QUICK_STEPS, RANDOM, SPECIAL, STEPS, Numbers, Step, inputs
from .experiment import Options, Results, run

RELU, GRU, LAYERS, AFFINE, CHAIN = QUICK_STEPS.values()
LOSSES = "loss at the last step", "loss at a step in 100", "loss of one sample"


def arrays(numbers: Numbers) -> list[NDArray[Any]]:
    given = [numbers.x, numbers.initial, numbers.grads]
    every = [*given, *numbers.weights.values(), *numbers.biases.values()]
    return [array for array in every if array is not None]


def is_subnormal(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which entries are: NumPy's comparisons see them, unlike kernels."""
    is_so: NDArray[np.bool_] = (np.abs(array) < np.finfo(array.dtype).tiny) & (array != 0)
    return is_so


def passed(step: Step, numbers: Numbers) -> list[Any]:
    """Return what all calls return."""
    passes = step.passes(numbers)
    passes.ready()
    return [call() for call in passes.calls.values()]


@pytest.fixture(scope="module")
def relu() -> dict[str, Numbers]:
    return inputs(RELU)


@pytest.mark.parametrize("step", QUICK_STEPS.values(), ids=QUICK_STEPS)
def test_inputs_have_the_shapes_of_random_ones(step: Step) -> None:
    random, *special = inputs(step).values()
    for numbers in special:
        for array, like in zip(arrays(numbers), arrays(random), strict=True):
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
    assert all(np.isfinite(array).all() and array.any() for array in arrays(random))


def test_random_numbers_are_left_alone(relu: dict[str, Numbers]) -> None:
    for array, before in zip(arrays(relu[RANDOM]), arrays(RELU.numbers()), strict=True):
        np.testing.assert_array_equal(array, before)


def test_losses_are_where_they_are_said_to_be(relu: dict[str, Numbers]) -> None:
    last, few, one = (relu[name].grads != 0 for name in LOSSES)
    assert np.flatnonzero(last.any(axis=(1, 2))).tolist() == [199]
    assert np.flatnonzero(few.any(axis=(1, 2))).tolist() == [99, 199]
    assert np.flatnonzero(one.any(axis=(0, 2))).tolist() == [0]


@pytest.mark.parametrize("step", QUICK_STEPS.values(), ids=QUICK_STEPS)
def test_subnormal_numbers_are_subnormal(step: Step) -> None:
    given = inputs(step)
    numbers, weights = given["subnormal"], given["subnormal weights"].weights
    for array in (numbers.x, numbers.initial, numbers.grads):
        assert array is None or is_subnormal(array).all()
    for array in weights.values():
        assert is_subnormal(array[array != 0]).all()


def test_an_impulse_decays_through_what_is_subnormal(relu: dict[str, Numbers]) -> None:
    """In NumPy's arithmetic, which keeps subnormal numbers, three steps in five are."""
    numbers = relu["decay to subnormal"]
    assert numbers.x is not None
    assert numbers.initial is not None
    assert not numbers.x.any()
    weight, states = numbers.weights["weight_hh_l0"], [numbers.initial]
    for _ in numbers.grads:
        states.append(np.maximum(states[-1] @ weight.T, 0))
    assert np.mean([is_subnormal(state).all() for state in states]) > 0.6
    assert states[0].min() > np.finfo(np.float32).tiny
    assert is_subnormal(states[-1]).all()


@pytest.mark.parametrize("step", list(STEPS.values())[:5], ids=list(STEPS)[:5])
def test_gates_let_states_decay_at_the_rate(step: Step) -> None:
    """From 1, where no number is subnormal, by as many powers of ten."""
    numbers = inputs(step)["decay to subnormal"]
    assert numbers.initial is not None
    ones = np.full_like(numbers.initial, 1e-3)
    (_output, state), _ = passed(step, numbers._replace(initial=ones))
    decades = -np.log10(state[..., -1].astype(float) / 1e-3)
    np.testing.assert_allclose(decades, 10 if numbers.dtype == np.float32 else 20, rtol=1e-2)


def test_all_states_of_relus_are_off(relu: dict[str, Numbers]) -> None:
    (output, _state), grads = passed(RELU, relu["ReLUs off"])
    assert not output.any()
    assert not grads.state.any()
    assert passed(RELU, relu[RANDOM])[0][0].any()


def test_products_overflow(relu: dict[str, Numbers]) -> None:
    numbers = relu["overflow"]
    assert all(np.isfinite(array).all() for array in arrays(numbers))
    assert numbers.x is not None
    with np.errstate(over="ignore", invalid="ignore"):
        products = numbers.x @ numbers.weights["weight_ih_l0"].T
    assert np.isinf(products).any()
    for step in (AFFINE, CHAIN):
        (values,) = inputs(step)["overflow"].weights.values()
        assert np.abs(values).max() > np.finfo(values.dtype).max / 2


def test_what_is_not_finite_is_where_it_is_said_to_be(relu: dict[str, Numbers]) -> None:
    random, numbers = relu[RANDOM], relu["NaN in a sample"]
    for array in (numbers.x, numbers.grads):
        assert array is not None
        assert np.isnan(array[:, 0]).all()
        assert np.isfinite(array[:, 1:]).all()
    assert np.isinf(relu["infinite gradients"].grads[-1]).all()
    assert np.isfinite(relu["infinite gradients"].grads[:-1]).all()
    infinite = relu["infinite inputs"].x
    assert infinite is not None
    assert np.isinf(infinite).all()
    for name, weight in relu["NaN in a weight"].weights.items():
        assert np.isnan(weight).sum() == 1 + np.isnan(random.weights[name]).sum()


def test_zeros_and_ones(relu: dict[str, Numbers]) -> None:
    zeros, weightless = relu["zeros"], relu["zero weights"]
    named = [zeros.x, zeros.initial, zeros.grads, *zeros.biases.values()]
    named += [*weightless.weights.values(), *weightless.biases.values()]
    assert not any(array.any() for array in named if array is not None)
    assert all((array == 1).all() for array in arrays(relu["ones"]))


def test_what_makes_no_sense_is_left_out() -> None:
    assert not {"loss of one sample", "NaN in a sample", "ReLUs off"} & inputs(GRU).keys()
    assert not {*LOSSES[:2], "decay to subnormal"} & inputs(LAYERS).keys()
    assert not {"infinite inputs", "inputs × 1,000"} & inputs(CHAIN).keys()
    assert inputs(RELU).keys() == {RANDOM, AGAIN, *SPECIAL} - {"units far apart"}


@pytest.mark.parametrize("kind", ["dense steps", "implicit steps", "stencils"])
def test_units_far_apart_have_gradients_as_far_apart(kind: str) -> None:
    step = next(step for name, step in STEPS.items() if f" {kind} " in name)
    given = inputs(step)
    random, apart = (given[name] for name in (RANDOM, "units far apart"))
    by = (apart.grads / random.grads).max(axis=(0, 1))
    assert by.max() / by.min() > 1e20
    (grads,), (rebased,) = (passed(step, numbers) for numbers in (random, apart))
    sizes = np.abs(grads).max(axis=0)
    assert (np.abs(rebased / by - grads) < 1e-3 * sizes).all()


# -- The experiment -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cliffs, "QUICK_STEPS", {step.name: step for step in (RELU, CHAIN)})
        options = Options(quick=True, device="cpu")
        return run(cliffs.EXPERIMENT, options, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def results(file: Path) -> Results:
    results: Results = json.loads(file.read_text())
    return results


def test_every_pass_is_timed_on_every_input(results: Results) -> None:
    for name, calls in ((RELU.name, ["forward", "backward"]), (CHAIN.name, ["scan"])):
        seconds = results["pieces"][name]["seconds"]
        assert seconds.keys() == inputs(QUICK_STEPS[name]).keys()
        for given in seconds.values():
            assert list(given) == calls
            assert all(taken > 0 for turns in given.values() for taken in turns if taken)


def test_the_report_has_a_section(file: Path, results: Results, tmp_path: Path) -> None:
    page = report.write(file.parent, tmp_path / "report.html").read_text()
    section = page[page.index(f">{cliffs.EXPERIMENT.title}</h2>") :]
    for text in ("random, ms", *SPECIAL, *results["pieces"]):
        assert text in section


def made_up(slow: float) -> Results:
    seconds: Results = {
        RANDOM: {"forward": [1.0, 2.0, 4.0, 1.0], "backward": [1.0, 1.0, 1.0, 1.0]},
        "ones": {"forward": [1.0, 2.0, 4.0, None], "backward": [9.0, slow, slow, slow]},
    }
    for turns in (calls for given in seconds.values() for calls in given.values()):
        turns.append(100 * turns[0] if turns[0] else None)  # while others used the cores
    return {
        "pieces": {"LSTM": {"seconds": seconds, "cores_others_used": [0.0, 0.1, -0.1, 0.0, 1.0]}}
    }


def test_ratios_are_those_of_one_round() -> None:
    forward, backward = cliffs.cells(made_up(2.0))
    assert forward[:3] == ("LSTM: forward", "ones", 1.0)
    assert backward[:3] == ("LSTM: backward", "ones", 2.0)


def test_all_rounds_count_if_none_was_calm() -> None:
    results = made_up(2.0)
    results["pieces"]["LSTM"]["cores_others_used"] = [1.0] * 5
    _, backward = cliffs.cells(results)
    assert backward.ratio == 2.0


def test_cliffs_are_listed() -> None:
    assert cliffs.summary(made_up(1.4)).endswith("None is above 1.5.")
    said = cliffs.summary(made_up(2.0)).splitlines()
    assert said[-2:] == ["Above 1.5:", "   2.00  LSTM: backward, ones"]
    grid, above = cliffs.EXPERIMENT.tables(made_up(2.0))
    assert grid.rows == [
        ["LSTM", "forward", "1.5e+03", "1.00"],
        ["LSTM", "backward", "1e+03", "2.00"],
    ]
    assert [row[:3] for row in above.rows] == [["LSTM: backward", "ones", "2.00"]]
    assert cliffs.EXPERIMENT.tables(made_up(1.0))[1].rows == []


def test_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="cliffs is of the CPU"):
        list(cliffs.EXPERIMENT.pieces(Options(True, "cuda")))

"""Whole training steps of recurrent networks, beside PyTorch's autograd."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from recurrent_steps import arguments_of, autograd, gradients_of, networks
from sampling import examples
from some_cells import Begun, Driven, Masked

from sparsescan.errors import InputError, InputTypeError
from sparsescan.graph.functions import tanh
from sparsescan.kernels.cpu.lanes import lanes, sample_lanes
from sparsescan.recurrent import GRU, LSTM, RNN, Cell, GRUCell, Mask, Recurrent, StepNumber
from sparsescan.recurrent.arguments import Options, OptionsDict
from sparsescan.recurrent.loops import callers, sequences

Array = NDArray[Any]
KINDS = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@settings(max_examples=examples(120))
@given(networks(), st.integers(1, 40), st.integers(1, 19), st.booleans(), st.integers(0, 1 << 30))
def test_gradients_are_those_of_autograd(
    dtype: Any, net: Any, steps: int, batch: int, shorter: bool, seed: int
) -> None:
    if dtype == F4:
        # A unit whose input is 0 but for rounding would be on in one of both.
        assume(getattr(net.cells[0][0], "nonlinearity", "tanh") != "relu")
        for name, array in net.params.items():
            setattr(net, name, array.astype(F4))
    arguments = arguments_of(np.random.default_rng(seed), net, steps, batch, dtype, shorter)
    before = [None if array is None else array.copy() for array in arguments]
    actual = gradients_of(net.training_step(), *arguments)
    expected = autograd(net, *arguments, "float64")
    for name, array in expected.items():
        scale = np.max(np.abs(array), initial=1e-300)
        bound = 1e4 * float(np.finfo(dtype).eps) * scale
        assert np.max(np.abs(actual[name] - array), initial=0) <= bound, name
        assert actual[name].dtype == dtype
    # The arguments were not changed.
    for array, old in zip(arguments, before, strict=True):
        assert array is None or np.array_equal(array, old)


@pytest.mark.parametrize(
    ("kind", "units", "batch", "rows"),
    [
        # Few products, and samples that nearly fill groups of eight for two threads.
        *(("RNN", 40, 16, 2), ("RNN", 127, 12, 1), ("GRU", 32, 40, 2), ("LSTM", 19, 31, 1)),
        *(("RNN", 40, 8, 0), ("RNN", 40, 11, 0), ("GRU", 32, 17, 0), ("LSTM", 19, 35, 0)),
        *(("RNN", 129, 16, 0), ("GRU", 34, 16, 0), ("LSTM", 33, 16, 0)),
    ],
)
def test_samples_are_lanes_where_they_fill_these(
    kind: str, units: int, batch: int, rows: int
) -> None:
    if sample_lanes(F4) == lanes(F4):
        pytest.skip("vectors are those of AVX2")
    rng = np.random.default_rng()
    net = KINDS[kind](3, units, 2, dtype=F4, rng=rng)
    arguments = arguments_of(rng, net, 35, batch, F4, shorter=True)
    step = net.training_step()
    actual = gradients_of(step, *arguments)
    assert step._directions[0].sample_rows == rows
    for name, array in autograd(net, *arguments, "float64").items():
        bound = 1e4 * float(np.finfo(F4).eps) * np.max(np.abs(array))
        assert np.max(np.abs(actual[name] - array)) <= bound, name


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@pytest.mark.parametrize(("kind", "units"), [("RNN", 130), ("GRU", 50), ("LSTM", 41)])
def test_no_sample_depends_on_how_many_there_are(kind: str, units: int, dtype: Any) -> None:
    rng = np.random.default_rng()
    net = KINDS[kind](3, units, dtype=dtype, bidirectional=True, rng=rng)
    x, state, _, above, carry = arguments_of(rng, net, 9, 19, dtype)
    step = net.training_step()
    for batch in (19, 13, 10, 9, 8, 7, 6, 5, 3, 2, 1):
        given = [np.ascontiguousarray(each[:, :batch]) for each in (x, state, above, carry)]
        found = gradients_of(step, *given[:2], None, *given[2:])
        if batch == 19:
            expected = found
        for name in ("output", "last", "input", "state"):
            assert np.array_equal(found[name], expected[name][:, :batch]), (name, batch)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_pruned_weights_need_no_kernels_of_their_own(kind: str) -> None:
    """No kernel was compiled for arrays with gaps: it takes a second, which a first step waits."""
    kernels = [sequences.run, sequences.back]
    rng, params = np.random.default_rng(), KINDS[kind](40, 40).params
    masks = {k: rng.random(params[k].shape) < 0.1 for k in ("weight_ih_l0", "weight_hh_l0")}
    net = KINDS[kind](40, 40, dtype=F4, masks=masks)
    gradients_of(net.training_step(), *arguments_of(rng, net, 3, 2, F4, shorter=False))
    signatures = [str(signature) for kernel in kernels for signature in kernel.signatures]
    assert signatures
    assert not any("1d, A)" in signature for signature in signatures)


def test_memory_is_what_is_said() -> None:
    net = GRU(12, 20, dtype=F4, rng=0)
    x = np.zeros((2000, 16, 12), F4)
    step = net.training_step()
    output, _ = step.forward(x[:2])
    step.backward(output)
    tracemalloc.start()
    output, _ = step.forward(x)
    grads = step.backward(output)
    assert grads.input is not None
    peak = tracemalloc.get_traced_memory()[1] - output.nbytes - grads.input.nbytes
    tracemalloc.stop()
    assert 0.9 * step.nbytes <= peak <= step.nbytes + (1 << 20)


def test_memory_is_used_again() -> None:
    net = LSTM(3, 5, rng=0)
    step = net.training_step()
    rng = np.random.default_rng(0)
    results = []
    for _ in range(2):
        for steps, batch in ((9, 14), (4, 3), (9, 14)):
            arguments = arguments_of(np.random.default_rng(steps), net, steps, batch, F4)
            results.append((steps, gradients_of(step, *arguments)))
            # Parameters are read again, and what was returned stays.
    for steps, result in results:
        same = next(other for number, other in results if number == steps)
        assert all(np.array_equal(result[name], same[name]) for name in result)
    net.weight_hh_l0 = rng.standard_normal((20, 5)).astype(F4)
    arguments = arguments_of(np.random.default_rng(9), net, 9, 14, F4)
    changed = gradients_of(step, *arguments)
    assert not np.array_equal(changed["output"], results[0][1]["output"])
    expected = autograd(net, *arguments, "float64")
    np.testing.assert_allclose(changed["output"], expected["output"], atol=1e-5)


def test_without_an_axis_of_samples() -> None:
    net = GRU(3, 4, rng=0)
    arguments = arguments_of(np.random.default_rng(0), net, 6, 1, F4)
    batched = gradients_of(net.training_step(), *arguments)
    single = [None if array is None else array[:, 0] for array in arguments]
    actual = gradients_of(net.training_step(), *single)
    for name in ("output", "last", "input", "state"):
        assert np.array_equal(actual[name], batched[name][:, 0])


@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (4, 0), (0, 0)])
def test_nothing(steps: int, batch: int) -> None:
    net = LSTM(3, 4, 2, bidirectional=True, rng=0)
    arguments = arguments_of(np.random.default_rng(0), net, steps, batch, F4)
    actual = gradients_of(net.training_step(), *arguments)
    assert actual["output"].shape == (steps, batch, 8)
    assert np.array_equal(actual["last"], arguments[1])
    assert np.array_equal(actual["state"], arguments[4])
    assert all(not actual[name].any() for name in net.params)


def test_gradients_that_are_not_given_are_zero() -> None:
    net = RNN(3, 4, rng=0)
    x, state, _, above, carry = arguments_of(np.random.default_rng(0), net, 5, 2, F4)
    step = net.training_step()
    output, _ = step.forward(x)
    assert np.array_equal(output, step.forward(x, np.zeros_like(state))[0])
    grads = step.backward(above, needs_input_grad=False)
    assert grads.input is None
    step.forward(x)
    zeros = step.backward(above, np.zeros_like(carry))
    assert all(np.array_equal(grads.params[name], zeros.params[name]) for name in net.params)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_special_input_has_the_outputs_of_pytorch(kind: str, special: float) -> None:
    rng = np.random.default_rng(3)
    for hidden in (1, 3, 20):
        net = KINDS[kind](2, hidden, dtype=F8, rng=rng)
        x, state, _, above, carry = arguments_of(rng, net, 4, 5, F8)
        x[0, 0, 0] = x[2, 3, 1] = state[0, 4, 0] = special
        expected = autograd(net, x, state, None, above, carry, "float64")
        output, last = net.training_step().forward(x, state)
        np.testing.assert_allclose(output, expected["output"], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(last, expected["last"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fills_up_shorter_sequences_is_not_read(kind: str) -> None:
    rng = np.random.default_rng()
    net = KINDS[kind](3, 4, num_layers=2, bidirectional=True, dtype=F8, rng=rng)
    x, state, _, above, carry = arguments_of(rng, net, 6, 5, F8)
    lengths = np.array([6, 0, 3, 1, 5])
    filling = np.arange(6)[:, None] >= lengths
    x[filling] = above[filling] = 0
    expected = gradients_of(net.training_step(), x, state, lengths, above, carry)
    x[filling] = above[filling] = np.nan
    actual = gradients_of(net.training_step(), x, state, lengths, above, carry)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


X = np.zeros((5, 2, 3), F4)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((X[0, 0],), InputError, r"x has shape \(3,\); expected \(T, batch, 3\) or \(T, 3\)"),
        ((X[..., :2],), InputError, r"x has shape \(5, 2, 2\); expected"),
        ((X.astype(int),), InputTypeError, "x has dtype int64; expected float32 or float64"),
        ((X, X), InputError, r"state has shape \(5, 2, 3\); expected \(1, 2, 4\), as x has"),
        ((X, None, [5]), InputError, r"lengths has shape \(1,\); expected \(2,\)"),
        ((X, None, [5, 6]), InputError, r"lengths is \[5, 6\]; expected integers from 0 to 5"),
        ((X, None, [5, -1]), InputError, "expected integers from 0 to 5"),
        ((X, None, [5.0, 1.0]), InputTypeError, "lengths has dtype float64; expected integers"),
        ((X, None, "ab"), InputTypeError, "lengths has dtype <U2; expected integers"),
    ],
)
def test_what_is_wrong_is_said(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        RNN(3, 4, rng=0).training_step().forward(*arguments)


def test_each_backward_pass_needs_a_forward_pass() -> None:
    step = RNN(3, 4, rng=0).training_step()
    with pytest.raises(InputError, match="backward was called without a forward pass before it"):
        step.backward()
    step.forward(X)
    for name, wrong in (("grad_output", X), ("grad_state", X)):
        with pytest.raises(InputError, match=rf"{name} has shape \(5, 2, 3\); expected"):
            step.backward(**{name: wrong})
    step.backward()
    with pytest.raises(InputError, match="backward was called without a forward pass before it"):
        step.backward()
    with pytest.raises(InputError):
        step.forward(X[0, 0])
    with pytest.raises(InputError, match="without a forward pass"):
        step.backward()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"num_layers": 0}, InputError, "num_layers is 0"),
        ({"masks": 3}, InputTypeError, "masks is 3; expected a dict"),
        ({"masks": {"weight_hh": 1}}, InputError, "masks has the key 'weight_hh'; expected names"),
        ({"masks": {"weight_hh_l0": [True]}}, InputError, "weight_hh_mask has shape"),
    ],
)
def test_arguments_of_networks(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        GRU(3, 4, **options)


def test_input_of_any_layout_is_read() -> None:
    net = GRU(3, 4, rng=0)
    arguments = arguments_of(np.random.default_rng(0), net, 6, 14, F4)
    expected = gradients_of(net.training_step(), *arguments)
    strided = [None if each is None else np.asfortranarray(each)[::1] for each in arguments]
    actual = gradients_of(net.training_step(), *strided)
    assert all(np.array_equal(actual[name], array) for name, array in expected.items())


def test_lengths_that_are_all_steps_change_no_bit() -> None:
    """Also in memory that has just run shorter sequences."""
    step = LSTM(3, 5, 2, rng=0, bidirectional=True).training_step()
    x = np.random.default_rng().standard_normal((7, 4, 3), np.float32)
    expected = step.forward(x)
    for lengths in ([7, 7, 7, 7], [2, 7, 0, 5], [7, 7, 7, 7], [1, 1, 7, 7], None):
        actual = step.forward(x, lengths=lengths)
        if lengths is None or min(lengths) == 7:
            np.testing.assert_array_equal(actual[0], expected[0])
            np.testing.assert_array_equal(actual[1], expected[1])


def test_copied_step_computes_the_same() -> None:
    """Copies of a step that has run see other parameters and inputs, and need a forward pass."""
    net = GRU(3, 5, 2, rng=0, bidirectional=True)
    step = net.training_step()
    rng = np.random.default_rng()
    step.forward(rng.standard_normal((7, 4, 3), np.float32))
    twin = copy.deepcopy(step)
    with pytest.raises(InputError, match="without a forward pass"):
        twin.backward()
    for own, name in ((net, "weight_hh_l0"), (twin.network, "weight_hh_l0")):
        setattr(own, name, np.linspace(-1, 1, 75, dtype=np.float32).reshape(15, 5))
    x = rng.standard_normal((7, 4, 3), np.float32)
    expected, actual = step.forward(x), twin.forward(x)
    np.testing.assert_array_equal(actual[0], expected[0])
    grads, copied = step.backward(*expected), twin.backward(*expected)
    for name, grad in grads.params.items():
        np.testing.assert_array_equal(copied.params[name], grad)


class _Other(GRUCell):
    """A cell with the parameters of a GRU's, and another step."""

    _trains_all = False

    def step(self, x: Any, h: Any) -> Any:
        return tanh(self.weight_ih.r(x) + self.weight_hh.z(h))


def test_a_class_that_defines_another_step_has_kernels_of_its_own() -> None:
    rng = np.random.default_rng(0)
    cell, x = _Other(2, 3, rng=0), rng.standard_normal((5, 4, 2)).astype(F4)
    states = cell.unroll(x)
    for t in range(5):
        a = x[t] @ cell.weight_ih[:3].T + cell.bias_ih[:3]
        a += states[t] @ cell.weight_hh[3:6].T + cell.bias_hh[3:6]
        np.testing.assert_allclose(states[t + 1], np.tanh(a), rtol=1e-5, atol=1e-6)
    output, _ = Recurrent(_Other, 2, 3, rng=0).training_step().forward(x)
    assert output.shape == (5, 4, 3)


@pytest.mark.parametrize("cell", [Cell, GRU, 3, None])
def test_a_network_is_of_a_class_of_cells(cell: Any) -> None:
    with pytest.raises(InputTypeError, match=r"cell is|a base class"):
        Recurrent(cell, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_cannot_be_written_need_no_kernels_of_their_own(kind: str) -> None:
    rng, net = np.random.default_rng(0), KINDS[kind](2, 3, bidirectional=True, rng=0)
    x = rng.standard_normal((4, 2, 2)).astype(F4)
    state = rng.standard_normal((2, 2, net.state_size)).astype(F4)
    grad = rng.standard_normal((4, 2, 6)).astype(F4)
    results, before = [], (0, 0)
    for form in (lambda a: a, fixed, lambda a: np.asfortranarray(a.astype(">f4"))):
        step = net.training_step()
        step.forward(form(x), form(state))
        compiled = len(sequences.run.signatures), len(callers.turn_out.signatures)
        results += [step.backward(form(grad), form(state), needs_input_grad=False)]
        if form is fixed:
            assert compiled == before
        before = compiled
    for one in results[1:]:
        assert np.array_equal(one.state, results[0].state)
        for name, param in one.params.items():
            assert np.array_equal(param, results[0].params[name])


def fixed(array: Array) -> Array:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


@pytest.mark.parametrize("lengths", [np.ma.array([1, 2]), [np.ma.masked, 1]])
def test_lengths_with_a_mask_are_refused(lengths: Any) -> None:
    step = RNN(2, 3).training_step()
    with pytest.raises(InputTypeError, match=r"^lengths has a mask"):
        step.forward(np.ones((3, 2, 2), np.float32), lengths=lengths)


@pytest.mark.parametrize(
    "flag", [np.array(True), np.array([True, False]), [], "False", None, 2, 0.0], ids=repr
)
def test_flags_are_true_or_false(flag: Any) -> None:
    for name in ("bias", "bidirectional"):
        with pytest.raises(InputTypeError, match=f"^{name} is .*; expected True or False"):
            RNN(2, 3, **{name: flag})
    step = RNN(2, 3).training_step()
    output, _ = step.forward(np.ones((3, 2, 2), np.float32))
    with pytest.raises(InputTypeError, match=r"^needs_input_grad is .*; expected True or False"):
        step.backward(output, needs_input_grad=flag)
    assert step.backward(output, needs_input_grad=np.bool_(False)).input is None


def test_more_layers_than_can_be_made_in_a_second_are_refused() -> None:
    with pytest.raises(InputError, match="num_layers is 1000000; expected at most 10,000"):
        RNN(2, 3, num_layers=10**6)


def test_options_are_the_same_everywhere() -> None:
    assert list(get_type_hints(OptionsDict)) == list(Options._fields)
    for options in (Options(), Options(5, 7, "layers"), Options(None, 1, True)):
        assert Options.decode(options.encode()) == options
    net = GRU(2, 3)
    assert net.training_step(memory_limit=1 << 20).options == Options(1 << 20)
    with pytest.raises(TypeError, match=r"^truncat is no option; expected one of memory_limit, "):
        net.training_step(truncat=5)  # type: ignore[call-arg]


# -- Further inputs -------------------------------------------------------------------------------


MEANS = {"once": 1.0, "keep": 0.75}


class Shown(Cell):
    """Its outputs are masks."""

    once = Mask(0.3, per="sequence")
    each = Mask(0.3)

    def step(self, x: Any, h: Any, other: Any) -> Any:
        return self.once + 0, self.each + 0


@pytest.mark.parametrize("p", [0, 1e-3, 0.25, 0.3, 0.999, 1])
def test_masks_have_their_probability(p: float) -> None:
    net = Shown(1, 8, once=p, each=p, dtype=np.float64)
    step, x = net.training_step(return_states=True), np.zeros((200, 500, 1))
    once, each = np.split(step.forward(x, rng=7)[0], 2, -1)
    assert (once == once[:1]).all()
    for mask in (once[0], each):
        kept = mask != 0
        np.testing.assert_allclose(mask[kept], 1 / max(1 - p, 1e-9))
        assert abs(kept.mean() - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / mask.size)
    if p == 0.25:  # steps, samples and units are drawn apart
        kept = each != 0
        for axis in range(3):
            a, b = (np.take(kept, range(k, kept.shape[axis] - 1 + k), axis) for k in (0, 1))
            assert abs((a & b).mean() - 0.75**2) <= 5 / np.sqrt(a.size)


def test_masks_are_drawn_by_a_generator() -> None:
    """Once a sequence or a step, the same for a seed; without one they are their expectation."""
    step = Recurrent(Masked, 2, 3, 2, rng=0).training_step()
    x = np.ones((50, 40, 2), F4)
    first, again, other, mean = (step.forward(x, rng=rng)[0] for rng in (3, 3, 4, None))
    assert (first == again).all()
    assert not (first == other).all()
    means = {f"{name}_l{k}": F4.type(each) for k in (0, 1) for name, each in MEANS.items()}
    np.testing.assert_array_equal(mean, step.forward(x, **means)[0])
    np.testing.assert_array_equal(mean[:, 0], step.forward(x[:, 0])[0])
    cell = Masked(2, 3, rng=0)
    output, _ = cell.training_step().forward(x)
    np.testing.assert_allclose(cell.unroll(x)[1:], output, 1e-5)
    with pytest.raises(InputTypeError, match="rng is 'a'; expected a Generator or a seed"):
        step.forward(x, rng="a")  # type: ignore[arg-type]


class Counted(Cell):
    """Its outputs are numbers of steps."""

    t = StepNumber()

    def step(self, x: Any, h: Any) -> Any:
        return self.t + 0


def test_steps_have_numbers() -> None:
    """In both directions; others may be given."""
    net, x = Recurrent(Counted, 1, 2, 2, bidirectional=True), np.zeros((5, 3, 1), F4)
    step, numbers = net.training_step(), np.arange(5)[:, None, None]
    output, _ = step.forward(x, lengths=[5, 3, 0])
    has = numbers < np.array([5, 3, 0])[:, None]
    np.testing.assert_array_equal(output, numbers * has * np.ones(4))
    given = {name: 7 + numbers[:, 0].astype(F4) for name in ("t_l1", "t_l1_reverse")}
    output, _ = step.forward(x[:, 0], **given)
    np.testing.assert_array_equal(output, 7 + numbers[:, 0].repeat(4, 1))
    cell = Counted(1, 2)
    np.testing.assert_array_equal(cell.unroll(x)[1:], output[:, None, :2].repeat(3, 1) - 7)
    with pytest.raises(InputError, match="t is not given"):
        cell.forward(x[0], np.zeros((3, 2), F4))


def test_initial_states_are_parameters() -> None:
    """In calls with and without states by turns, of one sample, and in single cells."""
    net, rng = Recurrent(Begun, 2, 3, 2, dtype=np.float64, rng=0), np.random.default_rng(0)
    net.begin_l0, net.begin_l1 = (rng.standard_normal(3) for _ in range(2))
    x, resets = rng.standard_normal((6, 4, 2)), rng.random((6, 4)) < 0.3
    zeros = np.zeros((2, 4, 3))
    state = np.concatenate([zeros, zeros + np.stack([net.begin_l0, net.begin_l1])[:, None]], -1)
    step = net.training_step()
    output, last = step.forward(x, state, None, resets, state)
    given = step.backward(output, last)
    assert given.reset_states is not None
    found, _ = step.forward(x, resets=resets)
    np.testing.assert_array_equal(found, output)
    grads = step.backward(output, last)
    assert grads.reset_states is None
    np.testing.assert_array_equal(grads.state, given.state)
    total = (given.state + given.reset_states).sum(1)[:, 3:]
    for name, other in given.params.items():
        is_begin = name.startswith("begin")
        own = total[int(name[-1])] if is_begin else other
        np.testing.assert_allclose(grads.params[name], own, 1e-12)
        assert not is_begin or not other.any()
    one, _ = step.forward(x[:, 0], resets=resets[:, 0])
    np.testing.assert_allclose(one, output[:, 0], 1e-12)
    cell = net.cells[0][0]
    np.testing.assert_array_equal(cell.unroll(x)[0], state[0])
    np.testing.assert_array_equal(cell.unroll(x[:, 0])[0], state[0, 0])


def test_gradients_in_further_inputs_have_their_shapes() -> None:
    step, x = Driven(2, 3, rng=0).training_step(), np.ones((5, 4, 2), F4)
    given: Any = {"drive": np.ones((4, 3), F4), "clock": np.ones((5, 1, 1), F4), "drop": F4.type(1)}
    output, _ = step.forward(x, **given)
    grads = step.backward(output)
    assert grads.input is not None
    assert grads.input.shape == x.shape
    assert {name: each.shape for name, each in (grads.further or {}).items()} == {
        name: each.shape for name, each in given.items()
    }
    step.forward(x, **given)
    assert step.backward(output, needs_input_grad=False).further is None
    with pytest.raises(InputError, match=r"clock is not given; .* broadcasts to \(5, 4, 3\)"):
        step.forward(x, drive=given["drive"])
    with pytest.raises(InputTypeError, match=r"drive_l0 is no argument of this call; .*: drive, "):
        step.forward(x, drive_l0=given["drive"])

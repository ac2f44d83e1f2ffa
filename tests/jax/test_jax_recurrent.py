"""Recurrent networks of JAX's front door, beside loops that JAX differentiates."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import slow
from some_cells import MGU, Masked, PeepholeLSTM, Tied

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.graph.functions import tanh
from sparsescan.jax import recurrent
from sparsescan.jax.ffi.programs import call
from sparsescan.recurrent import GRU, LSTM, RNN, Cell, Hidden, Input, Recurrent, sigmoid


def cell(kind: Any, a: Any, v: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """Return the next states, from the products of the input `a` and of the state `v`."""
    if kind is RNN:
        return jnp.tanh(a + v), c
    if kind is GRU:
        (r, z, n), (vr, vz, vn) = jnp.split(a, 3, -1), jnp.split(v, 3, -1)
        r, z = jax.nn.sigmoid(r + vr), jax.nn.sigmoid(z + vz)
        return (1 - z) * jnp.tanh(n + r * vn) + z * h, c
    i, f, g, o = jnp.split(a + v, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def loop(
    net: Any,
    params: Any,
    x: Any,
    state: Any,
    lengths: Any = None,
    resets: Any = None,
    reset_states: Any = None,
) -> tuple[Any, Any]:
    """Run a network step by step."""
    kind, directions = type(net), 1 + net.bidirectional
    lengths = jnp.full(x.shape[1:-1], len(x)) if lengths is None else lengths
    resets = jnp.zeros(x.shape[:-1], bool) if resets is None else resets
    reset_states = jnp.zeros_like(state) if reset_states is None else reset_states
    lasts = []
    for layer in range(net.num_layers):
        outputs = []
        for back in range(directions):
            end = f"_l{layer}" + "_reverse" * back
            w, u = params["weight_ih" + end], params["weight_hh" + end]
            p, q = params["bias_ih" + end], params["bias_hh" + end]
            (h, c), (h_anew, c_anew) = (
                jnp.split(first, 2, -1) if kind is LSTM else (first, jnp.zeros_like(first))
                for first in (each[layer * directions + back] for each in (state, reset_states))
            )
            hs: list[Any] = [None] * len(x)
            for t in range(len(x))[:: -1 if back else 1]:
                has, begun = (t < lengths)[..., None], t + back
                if begun < len(x):  # from the step before, or the one behind
                    anew = (resets[begun] & (begun < lengths))[..., None]
                    h, c = jnp.where(anew, h_anew, h), jnp.where(anew, c_anew, c)
                nh, nc = cell(kind, x[t] @ w.T + p, h @ u.T + q, h, c)
                h, c = jnp.where(has, nh, h), jnp.where(has, nc, c)
                hs[t] = jnp.where(has, h, 0)
            outputs.append(jnp.stack(hs))
            lasts.append(jnp.concatenate([h, c], -1) if kind is LSTM else h)
        x = jnp.concatenate(outputs, -1)
    return x, jnp.stack(lasts)


def close(actual: Any, expected: Any) -> None:
    trees = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for ours, theirs in zip(*trees, strict=True):
        scale = 1 + float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("kind", [PeepholeLSTM, *slow(MGU, Tied)])
def test_a_cell(kind: Any) -> None:
    """A cell is a network of one layer, whose parameters have no layer in their names."""
    one = kind(3, 4, rng=0, dtype=np.float64)
    net = Recurrent(kind, 3, 4, dtype=np.float64)
    params = {f"{name}_l0": each for name, each in one.params.items()}
    x = np.random.default_rng(15).standard_normal((6, 2, 3))

    def loss(net: Any) -> Any:
        def value(params: Any, x: Any) -> Any:
            output, last = recurrent(net, params, x)
            assert last.shape == (1, 2, one.state_size)
            return jnp.sin(output).sum() + last.sum()

        return jax.value_and_grad(value, argnums=(0, 1))

    value, (grads, in_x) = jax.jit(loss(one))(one.params, x)
    expected = loss(net)(params, x)
    close((value, ({f"{name}_l0": each for name, each in grads.items()}, in_x)), expected)
    output, last = recurrent(one, one.params, x[:, 0])
    assert output.shape == (6, 4)
    assert last.shape == (1, one.state_size)


def test_cells_that_look_alike() -> None:
    """Classes of one name and the same parameters are told apart by what they compute."""
    x = np.random.default_rng(16).standard_normal((5, 2, 3))

    def make(function: Any, is_first: bool) -> Any:
        class Alike(Cell):
            weight_ih = Input("a", "b")
            weight_hh = Hidden("a", "b")

            def step(self, x: Any, h: Any) -> Any:
                gates = self.weight_hh.a(h), self.weight_hh.b(h)
                inputs = self.weight_ih.a(x) + 0 * self.weight_ih.b(x)
                return function(inputs + gates[not is_first]) + 0 * gates[is_first]

        return Alike(3, 4, rng=0, dtype=np.float64)

    cells = [make(function, first) for function in (tanh, sigmoid) for first in (True, False)]
    for net in cells:
        step = net.training_step()
        output, _ = step.forward(x)
        grads = step.backward(np.ones_like(output))
        close(recurrent(net, net.params, x)[0], output)
        close(jax.grad(lambda p, n=net: recurrent(n, p, x)[0].sum())(net.params), grads.params)


@pytest.mark.parametrize("sizes", [(0, 2), (3, 0)])
def test_nothing_to_do(sizes: tuple[int, int]) -> None:
    """Without steps or samples, mapped or not."""
    net = GRU(2, 3, rng=0, dtype=np.float64, bidirectional=True)
    x, state = np.ones((4, *sizes, 2)), np.ones((2, sizes[1], 3))

    def gradients(params: Any, x: Any) -> Any:
        def value(params: Any, x: Any) -> Any:
            output, last = recurrent(net, params, x, state)
            return output.sum() + last.sum()

        return jax.value_and_grad(value, argnums=(0, 1))(params, x)

    value, (params, inputs) = jax.vmap(gradients, (None, 0))(net.params, x)
    assert value.tolist() == [state.sum()] * 4
    assert inputs.shape == x.shape
    for name, param in net.params.items():
        assert np.array_equal(params[name], np.zeros((4, *param.shape)))
    assert gradients(net.params, x[0])[0] == state.sum()


def test_gradients_of_some_maps() -> None:
    """Gradients that are mapped apart from the states: one, in another order, or more of them."""
    rng = np.random.default_rng(8)
    net = GRU(2, 3, rng=rng, dtype=np.float64)
    x, above = rng.standard_normal((3, 5, 2, 2)), rng.standard_normal((3, 5, 2, 3))

    def backs(function: Any) -> Any:
        def back(x: Any) -> Any:
            return jax.vjp(lambda p: function(net, p, x, jnp.zeros((1, 2, 3)))[0], net.params)[1]

        every = jax.vmap(back)(x)
        one, turned = (jax.tree.map(lambda each, k=k: each[k], every) for k in (1, slice(0, 2)))
        turned = jax.tree.map(lambda each: each[::-1], turned)
        return (
            one(above[0]),
            jax.vmap(lambda back, above: back(above))(turned, above[:2]),
            jax.vmap(back(x[0]))(above),
        )

    close(backs(recurrent), jax.jit(lambda: backs(loop))())


def test_wrong_lengths() -> None:
    """Lengths that are known are compared at once, others when they are."""
    net = GRU(2, 3, rng=0)
    x = np.ones((4, 2, 2))
    with pytest.raises(InputError, match=r"lengths is \[5, -1\]; expected integers from 0 to 4"):
        recurrent(net, net.params, x, lengths=np.array([5, -1]))
    jitted = jax.jit(lambda lengths: recurrent(net, net.params, x, lengths=lengths)[0])
    for wrong in (5, -1, 2**40, -(2**40)):
        said = r"INVALID_ARGUMENT: lengths\[1\] is (5|-1); expected an integer from 0 to 4"
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            jitted(np.array([4, wrong])).block_until_ready()
    assert jitted(np.array([4, 0])).shape == (4, 2, 3)


def test_a_program_that_is_not_there() -> None:
    """An executable of another process has only the keys of its programs."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="was compiled by another process"):
        jax.block_until_ready(call(12345, [jnp.ones(3)], [((3,), np.float64)]))


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    net = GRU(2, 3, rng=0)
    x = np.ones((4, 1, 2))
    with pytest.raises(InputTypeError, match="network is 'GRU'; expected an RNN, GRU or LSTM"):
        recurrent("GRU", net.params, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"params has \['weight'\]; expected \['bias_hh_l0'"):
        recurrent(net, {"weight": x}, x)
    wrong = {**net.params, "weight_hh_l0": np.ones((3, 3))}
    with pytest.raises(InputError, match=r"params\['weight_hh_l0'\] has shape \(3, 3\); expected"):
        recurrent(net, wrong, x)
    with pytest.raises(InputError, match=r"x has shape \(4, 1, 3\); expected \(T, batch, 2\)"):
        jax.jit(lambda each: recurrent(net, net.params, each))(np.ones((4, 1, 3)))
    with pytest.raises(InputError, match=r"state has shape \(1, 3\); expected \(1, 1, 3\)"):
        recurrent(net, net.params, x, np.ones((1, 3)))
    with pytest.raises(InputTypeError, match="lengths has dtype float64; expected integers"):
        recurrent(net, net.params, x, lengths=np.ones(1))
    with pytest.raises(InputTypeError, match="resets has dtype int64; expected bool: resets != 0"):
        recurrent(net, net.params, x, resets=np.ones((4, 1), int))
    with pytest.raises(InputError, match=r"resets has shape \(4,\); expected \(4, 1\), as x"):
        jax.jit(lambda each: recurrent(net, net.params, x, resets=each))(np.ones(4, bool))
    with pytest.raises(InputTypeError, match="resets is 'ab', no array"):
        recurrent(net, net.params, x, resets="ab")
    for flags, shape, said in (
        (None, (1, 1, 3), "reset_states is given, and resets is None; expected both"),
        (np.ones((4, 1), bool), (1, 3), r"reset_states has shape \(1, 3\); expected \(1, 1, 3\)"),
    ):
        with pytest.raises(InputError, match=said):
            recurrent(net, net.params, x, resets=flags, reset_states=np.ones(shape))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(DeviceError, match="JAX computes on 'gpu'"):
        recurrent(net, net.params, x)


def test_subnormal_numbers() -> None:
    """They count as 0 in the kernels, on every thread of XLA, and not behind them."""
    net = RNN(1, 1, rng=0, dtype=np.float64)
    net.weight_hh_l0 = np.full((1, 1), 0.5)
    x = np.zeros((1200, 40, 1))

    def first(x: Any) -> Any:
        return jax.grad(lambda x: recurrent(net, net.params, x)[0][-1].sum())(x)

    grads = np.abs(jax.jit(first)(x))
    assert grads.max() > 0
    assert not ((grads > 0) & (grads < np.finfo(float).tiny)).any()
    assert (grads[0] == 0).all()
    assert np.float64(1e-310) * np.ones(1) > 0


@pytest.mark.parametrize(("kind", "both"), [(GRU, False), *slow((LSTM, True))])
def test_losses_of_few_steps(kind: Any, both: bool) -> None:
    """Gradients die on the way, whether each sample has its own, or a map lets them be kept."""
    rng = np.random.default_rng(12)
    net = kind(3, 4, 2, rng=rng, dtype=np.float64, bidirectional=both)
    for name, param in net.params.items():
        # In float64, that of a GRU's state is halved a thousand times.
        setattr(net, name, param / 20)
    steps = 1500
    x = rng.standard_normal((3, steps, 5, 3))
    state = rng.standard_normal((net.num_layers * (1 + both), 5, net.state_size))
    weights = np.zeros((3, steps, 5, 4 * (1 + both)))
    weights[0, -1] = weights[1, 1100, 2] = weights[2, 1400:1402, 0] = 1

    def loss(params: Any, x: Any, state: Any, weights: Any) -> Any:
        return (recurrent(net, params, x, state)[0] * weights).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    expected = []
    for k in range(3):
        step = net.training_step()
        step.forward(x[k], state)
        grads = step.backward(weights[k])
        expected.append((grads.params, grads.input, grads.state))
        assert not grads.input.any((1, 2)).all()
        close(jax.jit(gradients)(net.params, x[k], state, weights[k]), expected[-1])
    stacked = jax.tree.map(lambda *each: np.stack(each), *expected)
    mapped = jax.jit(jax.vmap(gradients, (None, 0, None, 0)))
    close(mapped(net.params, x, state, weights), stacked)
    both_mapped = jax.jit(jax.vmap(gradients, (None, None, None, 0)))
    actual = both_mapped(net.params, x[0], state, weights)
    close(jax.tree.map(lambda each: each[0], actual), expected[0])


@pytest.mark.parametrize("kind", [RNN])
def test_a_loss_without_gradients(kind: Any) -> None:
    """Whoever looks at no result has gradients of zeros, and NaN in the input is seen."""
    net = kind(2, 3, rng=0, dtype=np.float64)
    x = np.ones((4, 20, 5, 2))

    def gradients(x: Any) -> Any:
        return jax.grad(lambda params: 0 * recurrent(net, params, x)[0].sum())(net.params)

    for name, grad in jax.vmap(gradients)(x).items():
        assert np.array_equal(grad, np.zeros((4, *net.params[name].shape)))
    x[1, 3, 2, 0] = np.nan
    for name, grad in jax.vmap(gradients)(x).items():
        assert np.isnan(grad[1]).any(), name
        assert not np.delete(grad, 1, axis=0).any(), name


@pytest.mark.parametrize("code", np.typecodes["AllInteger"])
@pytest.mark.parametrize("wide", [False, True])
def test_lengths_are_any_integers_and_resets_may_have_an_axis_of_one(code: str, wide: bool) -> None:
    rng = np.random.default_rng()
    with jax.enable_x64(wide):
        net, x = GRU(3, 4, rng=rng), jnp.array(rng.standard_normal((200, 9, 3)), np.float32)
        lengths, resets = rng.integers(0, 128, 9), rng.random((200, 9)) < 0.1
        expected, _ = recurrent(net, net.params, x, lengths=lengths, resets=resets)
        run = partial(recurrent, net, net.params, x)
        for function in (run, jax.jit(run)):
            found, _ = function(lengths=lengths.astype(code), resets=resets[:, :, None])
            assert np.array_equal(found, expected)
        # Flags are no lengths.
        with pytest.raises(InputTypeError, match="dtype bool; expected integers"):
            run(lengths=lengths > 3)
        with pytest.raises(InputTypeError, match="expected bool: resets != 0"):
            run(resets=resets.astype(code))
        if code not in "bB":
            with pytest.raises(InputError, match="expected integers from 0 to 200"):
                run(lengths=np.full(9, 201, code))


def test_masks_are_drawn_by_a_key() -> None:
    """Once a sequence or a step, the same for a key; without one they are their expectation."""
    net, x = Recurrent(Masked, 2, 3, 2, rng=0), np.ones((50, 40, 2), np.float32)
    run = jax.jit(lambda key: recurrent(net, net.params, x, key=key)[0])
    key = jax.random.key(3)
    first, again, other = (run(each) for each in (key, key, jax.random.key(4)))
    assert (first == again).all()
    assert not (first == other).all()
    given = {}
    for number, end in enumerate(("_l0", "_l1")):
        once, keep = jax.random.split(key, 4)[2 * number : 2 * number + 2]
        given[f"once{end}"] = jax.random.bernoulli(once, 0.4, (1, 40, 3)) / 0.4
        given[f"keep{end}"] = 1.0 * jax.random.bernoulli(keep, 0.75, (50, 40, 3))
    given = {name: each.astype(np.float32) for name, each in given.items()}
    np.testing.assert_allclose(first, recurrent(net, net.params, x, **given)[0], 1e-5, 1e-6)
    mean = {name: np.full(3, 1 if name[0] == "o" else 0.75, np.float32) for name in given}
    outputs = (recurrent(net, net.params, x, **more)[0] for more in ({}, mean))
    np.testing.assert_array_equal(*outputs)
    with pytest.raises(TypeError, match="keep is no option"):
        recurrent(net, net.params, x, keep=x)

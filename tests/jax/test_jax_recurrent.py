"""Recurrent networks of JAX's front door, beside loops that JAX differentiates."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from network_oracle import autograd_of
from sampling import slow
from some_cells import CELLS, MGU, SCRN, Elementwise, Leaky, PeepholeLSTM, Tied

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


CASES = [
    (LSTM, {"bidirectional": True}, True),
    (GRU, {}, False),
    *slow(
        (RNN, {"num_layers": 2}, True),
        (LSTM, {"num_layers": 2, "bidirectional": True}, False),
    ),
]


@pytest.mark.parametrize(("kind", "options", "batched"), CASES)
def test_results_and_gradients(kind: Any, options: dict[str, Any], batched: bool) -> None:
    rng = np.random.default_rng(3)
    net = kind(3, 4, rng=rng, dtype=np.float64, **options)
    batch = (5,) if batched else ()
    x = rng.standard_normal((4, *batch, 3))
    layers = net.num_layers * (1 + net.bidirectional)
    state = rng.standard_normal((layers, *batch, net.state_size))
    lengths = jnp.array([4, 2, 0, 3, 1]) if batched else None
    flags, anew = rng.random(x.shape[:-1]) < 0.4, rng.standard_normal(state.shape)

    def both(function: Any) -> Any:
        def loss(params: Any, x: Any, state: Any, anew: Any, resets: Any) -> Any:
            anew = None if resets is None else anew
            output, last = function(net, params, x, state, lengths, resets, anew)
            return jnp.sin(output).sum() + jnp.cos(last).sum(), (output, last)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)

    for resets in (None, flags):
        given = net.params, x, state, anew, resets
        expected = jax.jit(both(loop))(*given)
        close(both(recurrent)(*given), expected)
        close(jax.jit(both(recurrent))(*given), expected)


ANY_CELLS = [
    (MGU, {"num_layers": 2, "bidirectional": True}, 1.0),
    (PeepholeLSTM, {}, 1.0),
    (SCRN, {}, 1.0),
    *slow(*((each, {}, 0.1) for each in CELLS.values())),
    *slow((Tied, {"bidirectional": True}, 1.0), (SCRN, {"num_layers": 3}, 0.1)),
]


def random_net(
    kind: Any, options: dict[str, Any], rng: np.random.Generator, density: float = 1.0
) -> tuple[Any, Any, Any]:
    """Return a network, of pruned weights, and weights of a loss of outputs and last states."""
    inputs = 4 if kind in (Leaky, Elementwise) else 3
    net = Recurrent(kind, inputs, 4, **options)
    masks = {
        name: rng.random(each.shape) < density
        for name, each in net.params.items()
        if each.ndim == 2 and density < 1
    }
    net = Recurrent(kind, inputs, 4, **options, masks=masks, rng=rng, dtype=np.float64)
    layers = net.num_layers * (1 + net.bidirectional)
    above = rng.standard_normal((5, 6, 4 * (1 + net.bidirectional)))
    return net, above, rng.standard_normal((layers, 6, net.state_size))


@pytest.mark.parametrize(("kind", "options", "density"), ANY_CELLS)
def test_any_cell(kind: Any, options: dict[str, Any], density: float) -> None:
    """Results and gradients of cells with all kinds of parameters, of a batch and of samples."""
    rng = np.random.default_rng(14)
    net, above, carry = random_net(kind, options, rng, density)
    x, state = rng.standard_normal((5, 6, net.input_size)), rng.standard_normal(carry.shape)
    lengths, resets = np.array([5, 2, 0, 3, 1, 5]), rng.random((5, 6)) < 0.3
    anew = rng.standard_normal(carry.shape)

    def loss(params: Any, x: Any, state: Any, anew: Any, *given: Any) -> Any:
        lengths, resets, above, carry = given
        output, last = recurrent(net, params, x, state, lengths, resets, anew)
        return (output * above).sum() + (last * carry).sum(), (output, last)

    gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    expected = dict(autograd_of(net, x, state, lengths, above, carry, resets, anew))
    (_, (output, last)), (params, in_x, in_state, in_anew) = jax.jit(gradients)(
        net.params, x, state, anew, lengths, resets, above, carry
    )
    found = {"input": in_x, "state": in_state, "reset_states": in_anew}
    close({"output": output, "last": last, **found, **params}, expected)
    # Each sample by itself, of parameters that are shared, and of some that are not.
    apart = [each[:, :, None] for each in (x, state, anew, resets, above, carry)]
    given = *apart[:3], lengths[:, None], *apart[3:]
    axes = 1, 1, 1, 0, 1, 1, 1
    mapped = jax.jit(jax.vmap(gradients, (None, *axes)))
    _, (params, in_x, in_state, in_anew) = mapped(net.params, *given)
    close(jnp.moveaxis(in_x[:, :, 0], 0, 1), expected["input"])
    close(jnp.moveaxis(in_state[:, :, 0], 0, 1), expected["state"])
    close(jnp.moveaxis(in_anew[:, :, 0], 0, 1), expected["reset_states"])
    for name, grads in params.items():
        close(grads.sum(0), expected[name])
    for n in range(6):
        own = (np.take(each, n, axis) for each, axis in zip(given, axes, strict=True))
        close(jax.tree.map(lambda each, n=n: each[n], params), gradients(net.params, *own)[1][0])
    many = jax.tree.map(lambda each: np.stack([each / 2, each]), net.params)
    _, (params, *_) = jax.jit(jax.vmap(gradients, (0, *[None] * 7)))(
        many, x, state, anew, lengths, resets, above, carry
    )
    close({name: each[1] for name, each in params.items()}, {k: expected[k] for k in params})


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


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_vmap(seed: int) -> None:
    """Maps over any of the arguments, once and twice, around gradients or within them."""
    rng = np.random.default_rng(seed)
    kind, hidden, steps, batch = (RNN, GRU, LSTM)[rng.integers(3)], *rng.integers(1, 5, 3)
    options: Any = {"num_layers": rng.integers(1, 3), "bidirectional": bool(rng.random() < 0.5)}
    net = kind(2, int(hidden), rng=rng, dtype=np.float64, **options)
    layers = net.num_layers * (1 + net.bidirectional)
    counts = rng.integers(1, 4, rng.integers(1, 3)).tolist()
    # Of parameters, inputs, states, those that resets set, lengths and resets, from the outer map
    # to the inner one.
    maps = rng.random((len(counts), 6)) < [0.3, 0.8, 0.5, 0.5, 0.5, 0.5]
    maps[:, 1] |= ~maps.any(1)

    def lead(k: int) -> tuple[int, ...]:
        return tuple(count for count, mapped in zip(counts, maps[:, k], strict=True) if mapped)

    params = {
        name: rng.standard_normal((*lead(0), *param.shape)) / 2
        for name, param in net.params.items()
    }
    x = rng.standard_normal((*lead(1), steps, batch, 2))
    state = rng.standard_normal((*lead(2), layers, batch, net.state_size))
    anew = rng.standard_normal((*lead(3), layers, batch, net.state_size))
    lengths = rng.integers(0, steps + 1, (*lead(4), batch)) if rng.random() < 0.5 else None
    resets = rng.random((*lead(5), steps, batch)) < 0.4 if rng.random() < 0.7 else None
    is_inside = rng.random() < 0.5

    def mapped(function: Any) -> Any:
        def value(params: Any, x: Any, state: Any, anew: Any, lengths: Any, resets: Any) -> Any:
            anew = None if resets is None else anew
            output, last = function(net, params, x, state, lengths, resets, anew)
            return jnp.sin(output).sum() + jnp.cos(last).sum()

        gradients = partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
        result = gradients(value) if is_inside else value
        for count, flags in zip(counts[::-1], maps[::-1], strict=True):
            axes = [0 if flag else None for flag in flags]
            axes[4] = None if lengths is None else axes[4]
            axes[5] = None if resets is None else axes[5]
            result = jax.vmap(result, axes, axis_size=count)
        if is_inside:
            return jax.jit(result)
        return jax.jit(gradients(lambda *given, every=result: jnp.sin(every(*given)).sum()))

    given = params, x, state, anew, lengths, resets
    close(mapped(recurrent)(*given), mapped(loop)(*given))


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


@pytest.mark.slow
def test_vmap_over_parameters() -> None:
    rng = np.random.default_rng(5)
    net = GRU(2, 3, rng=rng, dtype=np.float64)
    x, state = rng.standard_normal((5, 4, 2)), np.zeros((1, 4, 3))
    many = jax.tree.map(lambda each: np.stack([each, -each, 0.5 * each]), net.params)

    def gradient(function: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.sin(function(net, p, x, state)[0]).sum())
        return jax.jit(jax.vmap(gradient))(many)

    close(gradient(recurrent), gradient(loop))


def derivatives(f: Any, params: Any, x: Any, along: Any) -> Any:
    """Return derivatives in both modes, first and second, alone and mapped, of a number."""
    in_x = jax.grad(f, 1)
    xs = jnp.stack([x, -x])
    return [
        jax.jvp(f, (params, x), along),
        jax.jvp(jax.grad(f, (0, 1)), (params, x), along),
        jax.grad(lambda x: (in_x(params, x) ** 2).sum())(x),
        jax.grad(lambda x: jax.jvp(f, (params, x), along)[1])(x),
        jax.jacfwd(lambda x: f(params, x))(x[:, :1]),
        jax.hessian(lambda x: f(params, x))(x[:2, :1]),
        jax.vmap(lambda x: jax.jvp(jax.grad(f), (params, x), along))(xs),
        # Penalties of the gradients of each sample.
        jax.grad(
            lambda params: sum(
                (g**2).sum() for g in jax.vmap(jax.grad(f), (None, 0))(params, xs).values()
            )
        )(params),
    ]


@pytest.mark.parametrize("seed", [1, *slow(0, 3, 5)])
def test_derivatives(seed: int) -> None:
    """Of any order and in both modes, with layers, directions, lengths and resets."""
    rng = np.random.default_rng(seed)
    kind = (LSTM, GRU, RNN)[seed % 3]
    options: Any = {"num_layers": 1 + seed // 3 % 2, "bidirectional": bool(rng.random() < 0.5)}
    net = kind(2, 3, rng=rng, dtype=np.float64, **options)
    layers = net.num_layers * (1 + net.bidirectional)
    x, resets = rng.standard_normal((4, 2, 2)), rng.random((4, 2)) < 0.3

    def value(function: Any) -> Any:
        def f(params: Any, x: Any) -> Any:
            batch = x.shape[1]
            # Inputs of the first steps and the first sample are cases, too.
            marks = jnp.array([4, 2])[:batch].clip(0, len(x)), resets[: len(x), :batch]
            state = jnp.ones((layers, batch, net.state_size)) / 2
            marks = (*marks, state * params["bias_hh_l0"].sum()) if seed % 2 else ()
            output, last = function(net, params, x, state * x.sum(), *marks)
            return jnp.sin(output).sum() + jnp.cos(last).sum()

        return f

    along = jax.tree.map(lambda each: rng.standard_normal(each.shape), (net.params, x))
    results = [
        jax.jit(partial(derivatives, value(function)))(net.params, x, along)
        for function in (recurrent, loop)
    ]
    close(*results)


@pytest.mark.parametrize(
    ("kind", "density"),
    [(Leaky, 1.0), *slow((MGU, 0.3), (SCRN, 1.0))],
)
def test_derivatives_of_any_cell(kind: Any, density: float) -> None:
    """Beside differences, also where weights are pruned."""
    rng = np.random.default_rng(2)
    net, *_ = random_net(kind, {}, rng, density)
    x = rng.standard_normal((3, 2, net.input_size))

    def f(params: Any, x: Any) -> Any:
        output, last = recurrent(net, params, x)
        return jnp.sin(output).sum() + jnp.cos(last).sum()

    check_grads(f, (net.params, x), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


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

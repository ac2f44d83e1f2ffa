"""Maps over parameters of recurrent networks, beside those over a ``jax.lax.scan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import slow

from sparsescan.execution.threads import thread_count
from sparsescan.jax import recurrent
from sparsescan.jax.ffi import primitives
from sparsescan.recurrent import GRU, LSTM

Call = Callable[..., Any]


def scan(net: Any, params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> tuple[Any, Any]:
    """Run layers of a GRU or an LSTM, forward in time, step by step."""
    lasts, kind = [], type(net)
    for layer in range(net.num_layers):
        names = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        w, u, p, q = (params[f"{name}_l{layer}"] for name in names)

        def step(s: Any, of: Any, w: Any = w, u: Any = u, p: Any = p, q: Any = q) -> Any:
            (x_now, reset), (t, s) = of, s
            s = jnp.where((reset & (t < lengths))[:, None], 0, s)
            h, c = jnp.split(s, 2, -1) if kind is LSTM else (s, s)
            a, v = x_now @ w.T + p, h @ u.T + q
            if kind is LSTM:
                i, f, g, o = jnp.split(a + v, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                new = jnp.concatenate([h, c], -1)
            else:
                (r, z, n), (vr, vz, vn) = jnp.split(a, 3, -1), jnp.split(v, 3, -1)
                r, z = jax.nn.sigmoid(r + vr), jax.nn.sigmoid(z + vz)
                new = h = (1 - z) * jnp.tanh(n + r * vn) + z * h
            has = (t < lengths)[:, None]
            return (t + 1, jnp.where(has, new, s)), jnp.where(has, h, 0)

        (_, last), x = jax.lax.scan(step, (0, state[layer]), (x, resets))
        lasts.append(last)
    return x, jnp.stack(lasts)


def close(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.shape == theirs.shape
        scale = 1 + float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * scale)


class Ensemble:
    """Members of one kind, with inputs of their own."""

    def __init__(self, kind: Any, members: int, **options: Any) -> None:
        rng = np.random.default_rng(5)
        self.net = kind(3, 4, rng=rng, dtype=np.float64, **options)
        self.params = {
            name: rng.standard_normal((members, *each.shape)) / 2
            for name, each in self.net.params.items()
        }
        self.x = rng.standard_normal((members, 6, 5, 3))
        self.state = rng.standard_normal((members, self.net.num_layers, 5, self.net.state_size))
        self.lengths = rng.integers(0, 7, (members, 5))
        self.resets = rng.random((members, 6, 5)) < 0.2

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.params, self.x, self.state, self.lengths, self.resets

    def loss_of(self, run: Call) -> Call:
        def loss(*given: Any) -> Any:
            output, last = run(self.net, *given)
            return jnp.sin(output).sum() + jnp.cos(last).sum()

        return loss


CASES = [
    (GRU, 3, {}, False),
    *slow((GRU, 1, {}, True)),
    *slow((LSTM, 3, {"num_layers": 2}, True)),
]


@pytest.mark.parametrize(("kind", "members", "options", "is_shared"), CASES)
def test_results_and_gradients(kind: Any, members: int, options: Any, is_shared: bool) -> None:
    """Of members with inputs of their own, and of members with the same."""
    about = Ensemble(kind, members, **options)
    rest = [each[0] if is_shared else each for each in about.arrays[1:]]
    given, dims = (about.params, *rest), (0, *(None if is_shared else 0 for _ in rest))

    def results(run: Call) -> Any:
        loss, every = about.loss_of(run), (0, 1, 2)

        def total(*own: Any) -> Any:
            return jax.vmap(loss, dims)(*own).sum()

        def call(*own: Any) -> Any:
            forward = jax.vmap(lambda *one: run(about.net, *one), dims)(*own)
            each = jax.vmap(jax.grad(loss, every), dims)(*own)
            return forward, each, jax.grad(total, every)(*own)

        return jax.jit(call)(*given)

    close(results(recurrent), results(scan))


@pytest.mark.parametrize("most", [1 << 24, 0])
def test_bits_of_single_calls(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all memory kept for the backward pass, and with none."""
    monkeypatch.setattr(primitives, "_MOST_KEPT", most)
    members = 4 * thread_count() + (1 if most else 2)  # more than have memory at once
    about = Ensemble(GRU, members, num_layers=2, bidirectional=True)
    params, x = about.params, about.x

    def gradient(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda own: jnp.sin(recurrent(about.net, own, x)[0]).sum())(
            params
        )

    whole = jax.jit(jax.vmap(gradient))(params, x)
    kinds = jax.make_jaxpr(jax.vmap(gradient))(params, x)
    assert ("u8[0" in str(kinds) or f"u8[{members},0]" in str(kinds)) == (most == 0)
    one = jax.jit(gradient)
    for k in range(members):
        own = one({name: each[k] for name, each in params.items()}, x[k])
        for ours, single in zip(jax.tree.leaves(whole), jax.tree.leaves(own), strict=True):
            assert np.array_equal(ours[k], single)


@pytest.mark.parametrize("is_inside", [False, *slow(True)])
def test_maps_in_maps(is_inside: bool) -> None:
    """Of samples in members, and of members in samples: forward, and gradients of each pair."""
    about = Ensemble(GRU, 3)
    params, x, state, lengths, resets = about.arrays
    samples = np.stack([x[0], x[1]])

    def results(run: Call) -> Any:
        def one(params: Any, x: Any) -> Any:
            return about.loss_of(run)(params, x, state[0], lengths[0], resets[0])

        def pairs(function: Call) -> Any:
            first, then = ((None, 0), (0, None)) if is_inside else ((0, None), (None, 0))
            return jax.vmap(jax.vmap(function, first), then)(params, samples)

        return jax.jit(lambda: (pairs(one), pairs(jax.grad(one, (0, 1)))))()

    close(results(recurrent), results(scan))


@pytest.mark.parametrize("kind", slow(LSTM))
def test_other_derivatives(kind: Any) -> None:
    """In a direction, of vectors of results, of gradients, and of gradients of each sample."""
    about = Ensemble(kind, 2)
    params, x, state, lengths, resets = about.arrays
    rest = state, lengths, resets

    def results(run: Call) -> Any:
        loss = about.loss_of(run)

        def penalty(function: Call) -> Call:
            def own(params: Any, x: Any) -> Any:
                grads = function(params, x, *rest)
                return sum(jnp.sin(each).sum() for each in jax.tree.leaves(grads))

            return own

        gradients = jax.vmap(jax.grad(loss, (0, 1)))

        def of_one(params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> Any:
            return loss(params, x[:, None], state[:, None], lengths[None], resets[:, None])

        of_samples = jax.vmap(jax.vmap(jax.grad(of_one, (0, 1)), (None, 1, 1, 0, 1)))
        along = (params, x), (params, x)

        def call() -> Any:
            forward = jax.jvp(lambda p, x: jax.vmap(loss)(p, x, *rest), *along)
            second = jax.grad(penalty(gradients), (0, 1))(params, x)
            third = jax.jvp(penalty(of_samples), *along)
            fourth = jax.grad(penalty(of_samples), (0, 1))(params, x)
            rows = jax.jacrev(lambda p: jax.vmap(loss)(p, x, *rest))(params)
            return forward, second, third, fourth, rows

        return jax.jit(call)()

    close(results(recurrent), results(scan))


def test_one_call_for_all_members() -> None:
    """No loop over members is in what JAX compiles."""
    about = Ensemble(GRU, 3)

    def call(params: Any) -> Any:
        return recurrent(about.net, params, about.x[0])[0].sum()

    text = jax.jit(jax.vmap(jax.grad(call))).lower(about.params).as_text()
    assert text.count("sparsescan") == 2
    assert "while" not in text

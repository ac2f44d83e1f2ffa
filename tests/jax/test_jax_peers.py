"""Cells of other packages, unmodified, trained through both scans: losses are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsescan.jax import explain, scan

pytestmark = pytest.mark.slow
STEPS, BATCH, INPUTS, UNITS = 12, 6, 3, 8
# Parameters, the first carry, and a function of parameters that returns the body of a loop.
Model = tuple[Any, Any, Callable[[Any], Callable[[Any, Any], Any]]]


def _linen(name: str) -> Model:
    nn = pytest.importorskip("flax.linen")
    cell = getattr(nn, name)(UNITS, param_dtype=jnp.float64)
    x = jnp.zeros((BATCH, INPUTS))
    carry = cell.initialize_carry(jax.random.key(0), x.shape)
    carry = jax.tree.map(lambda each: each.astype(x.dtype), carry)
    params = cell.init(jax.random.key(1), carry, x)
    return params, carry, lambda params: lambda carry, x: cell.apply(params, carry, x)


def _nnx(name: str) -> Model:
    nnx = pytest.importorskip("flax.nnx")
    about = {"param_dtype": jnp.float64, "dtype": jnp.float64}
    cell = getattr(nnx, name)(INPUTS, UNITS, **about, rngs=nnx.Rngs(0))
    carry = cell.initialize_carry((BATCH, INPUTS), nnx.Rngs(1))
    carry = jax.tree.map(lambda each: each.astype(jnp.float64), carry)
    graph, params, rest = nnx.split(cell, nnx.Param, ...)

    def body(params: Any) -> Callable[[Any, Any], Any]:
        return lambda carry, x: nnx.merge(graph, params, rest)(carry, x)

    return params, carry, body


def _haiku(name: str) -> Model:
    hk = pytest.importorskip("haiku")

    def step(x: Any, carry: Any) -> Any:
        return getattr(hk, name)(UNITS)(x, carry)

    first = hk.without_apply_rng(
        hk.transform(lambda: getattr(hk, name)(UNITS).initial_state(BATCH))
    )
    carry = jax.tree.map(lambda each: each.astype(jnp.float64), first.apply({}))
    model = hk.without_apply_rng(hk.transform(step))
    params = model.init(jax.random.key(0), jnp.zeros((BATCH, INPUTS)), carry)

    def body(params: Any) -> Callable[[Any, Any], Any]:
        def run(carry: Any, x: Any) -> Any:
            out, carry = model.apply(params, x, carry)
            return carry, out

        return run

    return params, carry, body


def _equinox(name: str) -> Model:
    eqx = pytest.importorskip("equinox")
    cell = getattr(eqx.nn, name)(INPUTS, UNITS, key=jax.random.key(0))
    params, rest = eqx.partition(cell, eqx.is_inexact_array)
    zeros = jnp.zeros((BATCH, UNITS))
    is_lstm = name == "LSTMCell"

    def body(params: Any) -> Callable[[Any, Any], Any]:
        own = eqx.combine(params, rest)

        def run(carry: Any, x: Any) -> Any:
            carry = jax.vmap(own)(x, carry)
            return carry, carry[0] if is_lstm else carry

        return run

    return params, (zeros, zeros) if is_lstm else zeros, body


MODELS: dict[str, tuple[Callable[[str], Model], str]] = {
    "linen, LSTM": (_linen, "OptimizedLSTMCell"),
    "linen, GRU": (_linen, "GRUCell"),
    "linen, MGU": (_linen, "MGUCell"),
    "nnx, GRU": (_nnx, "GRUCell"),
    "nnx, LSTM": (_nnx, "LSTMCell"),
    "haiku, LSTM": (_haiku, "LSTM"),
    "haiku, GRU": (_haiku, "GRU"),
    "equinox, GRU": (_equinox, "GRUCell"),
    "equinox, LSTM": (_equinox, "LSTMCell"),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_over_fifty_steps(name: str) -> None:
    optax = pytest.importorskip("optax")
    make, kind = MODELS[name]
    begin, carry, body = make(kind)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((STEPS, BATCH, INPUTS)))
    wanted = jnp.cumsum(x[..., :1], 0) / 4
    how = explain(body(begin), carry, x)
    assert how.is_captured, how.text
    adam, losses = optax.adam(1e-2), []
    for run in (scan, jax.lax.scan):

        def loss(params: Any, run: Any = run) -> Any:
            _, outputs = run(body(params), carry, x)
            return jnp.mean((outputs.mean(-1, keepdims=True) - wanted) ** 2)

        @jax.jit
        def update(params: Any, state: Any, loss: Any = loss) -> Any:
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = adam.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params, state, own = begin, adam.init(begin), []
        for _ in range(50):
            params, state, value = update(params, state)
            own.append(float(value))
        losses.append(own)
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)

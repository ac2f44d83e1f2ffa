"""Selective scans of JAX's front door, beside a ``jax.lax.scan`` that JAX differentiates."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples, slow

from sparsescan import InputError, InputTypeError
from sparsescan.jax import selective_scan

EPS = np.finfo(np.float64).eps


def loop(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any,
    bias: Any,
    start: Any,
    softplus: bool,
) -> tuple[Any, Any]:
    """Return outputs and last states by the definition."""
    batch, channels, length = u.shape

    def wide(factor: Any) -> Any:
        """Return a factor as (length, batch, channels, states)."""
        if factor.ndim == 2:
            return jnp.broadcast_to(factor, (length, batch, *factor.shape))
        factor = factor if factor.ndim == 4 else factor[:, None]
        return jnp.moveaxis(jnp.repeat(factor, channels // factor.shape[1], 1), -1, 0)

    delta = delta if bias is None else delta + bias[:, None]
    delta = jnp.log1p(jnp.exp(delta)) if softplus else delta

    def step(state: Any, of: Any) -> Any:
        size, pushed, b, c = of
        state = jnp.exp(size[..., None] * A) * state + pushed[..., None] * b
        return state, (state * c).sum(-1)

    rows = (jnp.moveaxis(each, -1, 0) for each in (delta, delta * u))
    begin = jnp.zeros((batch, channels, A.shape[1])) if start is None else start
    last, y = jax.lax.scan(step, begin, (*rows, wide(B), wide(C)))
    y = jnp.moveaxis(y, 0, -1)
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * z * jax.nn.sigmoid(z)), last


class Case:
    """Random arguments; some may be missing."""

    def __init__(self, seed: int, most: tuple[int, ...] = (3, 50, 6, 20)) -> None:
        rng = np.random.default_rng(seed)
        batch, length, states, channels = (int(rng.integers(1, n)) for n in most)
        if rng.random() < 0.1:
            length, states = length * int(rng.integers(2)), states * int(rng.integers(2))

        def made(*shape: int) -> Any:
            return rng.standard_normal(shape)

        def factor() -> Any:
            groups = int(rng.choice([n for n in range(1, channels + 1) if channels % n == 0]))
            shapes = (channels, states), (batch, states, length), (batch, groups, states, length)
            return made(*shapes[rng.integers(3)])

        whole = batch, channels, length
        self.inputs: dict[str, Any] = {
            "u": made(*whole),
            "delta": np.abs(made(*whole)) / 2,  # states that grow would round away the gradients
            "A": -rng.random((channels, states)),
            "B": factor(),
            "C": factor(),
        }
        more = {"D": made(channels), "z": made(*whole), "delta_bias": rng.random(channels)}
        more["initial_state"] = made(batch, channels, states)
        self.inputs |= {name: each for name, each in more.items() if rng.random() < 0.6}
        self.softplus = bool(rng.random() < 0.5)

    def run(self, inputs: dict[str, Any]) -> Any:
        return selective_scan(**inputs, delta_softplus=self.softplus, return_last_state=True)

    def loop(self, inputs: dict[str, Any]) -> Any:
        names = "u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"
        return loop(*map(inputs.get, names), softplus=self.softplus)


def near(ours: Any, theirs: Any, factor: float = 1e4 * EPS) -> None:
    for one, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.shape == right.shape
        scale = 1 + float(np.abs(right).max(initial=0))
        np.testing.assert_allclose(one, right, rtol=0, atol=factor * scale)


def penalty(run: Any, inputs: dict[str, Any]) -> Any:
    out, last = run(inputs)
    return jnp.sin(out).sum() + jnp.cos(last).sum()


def test_none_is_no_input() -> None:
    with pytest.raises(InputTypeError, match="B is None, no array"):
        selective_scan(
            np.ones((1, 1, 2)), np.ones((1, 1, 2)), np.ones((1, 1)), None, np.ones((1, 1))
        )


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_outputs_and_gradients(seed: int) -> None:
    case = Case(seed)
    near(case.run(case.inputs), case.loop(case.inputs))
    found = jax.jit(jax.grad(jax.checkpoint(partial(penalty, case.run))))(case.inputs)
    near(found, jax.grad(partial(penalty, case.loop))(case.inputs))


def test_float32_and_few_arguments() -> None:
    case = Case(7)
    names = "u", "delta", "A", "B", "C"
    inputs = {name: case.inputs[name].astype(np.float32) for name in names}
    out = jax.jit(selective_scan)(**inputs)
    assert out.dtype == np.float32
    near(out, loop(*(case.inputs[each] for each in names), *4 * [None], softplus=False)[0], 1e-5)


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_other_derivatives(seed: int) -> None:
    case = Case(seed, (3, 5, 4, 4))
    runs = case.run, case.loop
    near(*(jax.jvp(partial(penalty, run), *[(case.inputs,)] * 2) for run in runs))

    def twice(run: Any) -> Any:
        grads = jax.grad(partial(penalty, run))
        return jax.grad(lambda own: sum(jnp.sin(g).sum() for g in jax.tree.leaves(grads(own))))

    near(*(jax.jit(twice(run))(case.inputs) for run in runs))


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_maps(seed: int) -> None:
    """Over samples, over parameters, and over both."""
    case = Case(seed, (3, 40, 4, 12))
    of_samples = {"u", "delta", "z"} | {n for n in "BC" if case.inputs[n].ndim > 2}
    for names in (of_samples, set(case.inputs) - of_samples, set(case.inputs)):
        inputs = {
            name: np.stack([each, each / 2, each * 1.1]) if name in names else each
            for name, each in case.inputs.items()
        }
        dims = ({name: 0 if name in names else None for name in inputs},)
        grads = [
            jax.jit(jax.vmap(jax.grad(partial(penalty, run)), dims))
            for run in (case.run, case.loop)
        ]
        near(*(each(inputs) for each in grads))
        near(*(jax.vmap(run, dims)(inputs) for run in (case.run, case.loop)))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("A", np.ones(3), InputError),
        ("B", np.ones((2, 2, 9)), InputError),
        ("D", np.ones(2), InputError),
        ("A", np.ones((4, 2), complex), InputTypeError),
        ("u", "no", InputTypeError),
        ("delta_softplus", 2, InputTypeError),
    ],
)
def test_errors(name: str, value: Any, error: Any) -> None:
    whole, factor = np.ones((2, 4, 5)), np.ones((2, 2, 5))
    given: dict[str, Any] = {"u": whole, "delta": whole, "A": np.ones((4, 2))}
    given |= {"B": factor, "C": factor, name: value}
    with pytest.raises(error, match=f"{name} is|{name} has"):
        selective_scan(**given)

"""Scans of JAX's front door, beside ``jax.lax.scan``."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_bodies import BATCH, CAPTURED, INPUTS, NOT_CAPTURED, UNITS, Case, Parameters
from sampling import examples

from sparsescan.jax import explain, scan


class _Loop:
    """A body with drawn arguments, and the gradients of a loss of all results."""

    def __init__(self, case: Case, dtype: Any = np.float64, steps: int = 6, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.body, begin, shape = case
        params = Parameters(rng, dtype)

        def make(*shape: int) -> Any:
            return jnp.asarray(0.5 * rng.standard_normal(shape), dtype)

        self.init, self.xs = begin(make), make(steps, *shape)
        self.body(params, self.init, jnp.zeros(shape, dtype))
        self.names, self.params = list(params), list(params.values())

    def bound(self, params: Any) -> Any:
        """Return the body with some parameters."""
        named = dict(zip(self.names, params, strict=True))
        return lambda carry, x: self.body(named, carry, x)

    def loss(self, run: Any, **options: Any) -> Any:
        """Return a loss of parameters, first carries and inputs."""

        def loss(params: Any, init: Any, xs: Any) -> Any:
            results = jax.tree.leaves(run(self.bound(params), init, xs, **options))
            numbers = [each for each in results if jnp.issubdtype(each.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin((k + 1) * each)) for k, each in enumerate(numbers))

        return loss

    def explain(self) -> Any:
        """Return what runs."""
        return explain(self.bound(self.params), self.init, self.xs)


def _assert_same(found: Any, expected: Any, dtype: Any = np.float64, scale: float = 300) -> None:
    for a, b in zip(
        *(map(_data, jax.tree.leaves(each)) for each in (found, expected)), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype != jax.dtypes.float0:
            size = max(1.0, float(np.nanmax(np.abs(b), initial=0)))
            np.testing.assert_allclose(a, b, rtol=0, atol=scale * size * np.finfo(dtype).eps)


def _compare(
    case: Case, dtype: Any = np.float64, reference: Any = jax.lax.scan, **options: Any
) -> None:
    loop = _Loop(case, dtype)
    _assert_same(
        scan(loop.bound(loop.params), loop.init, loop.xs, **options),
        jax.lax.scan(loop.bound(loop.params), loop.init, loop.xs, **options),
        dtype,
    )
    found, expected = (
        jax.jit(jax.grad(loop.loss(run, **options), (0, 1, 2), allow_int=True))(
            loop.params, loop.init, loop.xs
        )
        for run in (scan, reference)
    )
    _assert_same(found, expected, dtype)


_QUICK = ("gru of haiku", "counted", "gates in an axis", "spiking", "masked")


@pytest.mark.parametrize("name", CAPTURED)
def test_kernels_run_a_body(name: str) -> None:
    how = _Loop(CAPTURED[name]).explain()
    assert how.is_captured, how.text


@pytest.mark.parametrize(
    "name",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURED],
)
def test_values_and_gradients_are_those_of_lax(name: str) -> None:
    # Gradients of this one by lax.scan of JAX 0.10.2 differ from those of its unrolled loop.
    reference = _unrolled if name == "gru of equinox" else jax.lax.scan
    _compare(CAPTURED[name], reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm of haiku", "mgu", "normalised gru", "many functions"])
def test_single_precision_backwards_in_time(name: str) -> None:
    _compare(CAPTURED[name], np.float32, reverse=True)


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_what_no_kernel_runs_is_explained_and_runs_as_lax(name: str) -> None:
    case, reason = NOT_CAPTURED[name]
    how = _Loop(case).explain()
    assert not how.is_captured
    assert how.text.startswith("jax.lax.scan runs the loop: ")
    assert re.search(reason, how.text), how.text
    loop = _Loop(case)
    text = [
        str(
            jax.make_jaxpr(lambda *a, run=run: run(loop.bound(loop.params), *a))(loop.init, loop.xs)
        )
        for run in (scan, jax.lax.scan)
    ]
    assert text[0] == text[1]


@pytest.mark.parametrize("name", ["masked", "many functions"])
def test_what_is_not_finite_stays_where_it_is(name: str) -> None:
    """Compare values where inputs are NaN or infinite, and gradients where samples have no step."""
    loop = _Loop(CAPTURED[name])
    xs = loop.xs.at[2, 0].set(jnp.nan).at[3:, 1, 0].set(jnp.nan)
    xs = xs if name == "masked" else xs.at[1, 2, 1].set(jnp.inf)
    for steps in (xs, loop.xs):
        _assert_same(
            *(run(loop.bound(loop.params), loop.init, steps) for run in (scan, jax.lax.scan))
        )
    if name == "masked":

        def loss(run: Any) -> Any:
            return lambda params: jnp.sum(run(loop.bound(params), loop.init, xs)[0] ** 2)

        _assert_same(*(jax.grad(loss(run))(loop.params) for run in (scan, jax.lax.scan)))


@pytest.mark.parametrize("steps", [0, 1])
def test_no_steps_and_one(steps: int) -> None:
    loop = _Loop(CAPTURED["elman"], steps=steps)
    found, expected = (
        jax.value_and_grad(loop.loss(run), (0, 1, 2))(loop.params, loop.init, loop.xs)
        for run in (scan, jax.lax.scan)
    )
    _assert_same(found, expected)


_TRANSFORMS = {
    "mapped inputs": lambda loss: jax.vmap(jax.grad(loss, 0), (None, None, 0)),
    "mapped parameters": lambda loss: jax.vmap(jax.grad(loss, (0, 2)), (0, None, None)),
    "forward mode": lambda loss: jax.jacfwd(loss, 1),
    "second derivatives": lambda loss: jax.jacrev(jax.grad(loss, (0, 1)), 1),
    "forward over reverse": lambda loss: jax.jacfwd(jax.grad(loss, (0, 2)), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elman", "mgu", "spiking, backwards", "spiking"])
@pytest.mark.parametrize("kind", _TRANSFORMS)
def test_transforms(name: str, kind: str) -> None:
    if name == "spiking, backwards" and kind.startswith("forward"):
        pytest.skip("JAX has no forward mode of custom_vjp")
    loop = _Loop(CAPTURED[name], steps=4)
    params, init, xs = loop.params, loop.init, loop.xs
    if kind == "mapped inputs":
        xs = jnp.stack([xs, 2 * xs])
    if kind == "mapped parameters":
        params = [jnp.stack([each, 2 * each]) for each in params]
    change = _TRANSFORMS[kind]
    # Where scans of JAX are differentiated twice, derivatives that a function brings are lost.
    results = [jax.jit(change(loop.loss(run)))(params, init, xs) for run in (scan, _unrolled)]
    _assert_same(*results)


def _unrolled(body: Any, carry: Any, xs: Any) -> Any:
    """Run a loop of Python."""
    ys = []
    for x in xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *ys)


def test_arguments_are_those_of_lax() -> None:
    def body(carry: Any, x: Any) -> Any:
        a, (key, step) = carry
        a = 0.5 * a + 0.1 * step
        return (a, (jax.random.split(key)[0], step + 1)), {"a": a, "none": None}

    init = 1.0, (jax.random.key(1), 0)
    for length in (5, 1):
        found, expected = (
            run(body, init, None, length, unroll=2, reverse=True) for run in (scan, jax.lax.scan)
        )
        _assert_same(found, expected)
    with pytest.raises(TypeError, match="carry"):
        scan(lambda carry, x: (carry[None], None), jnp.ones(3), None, 4)
    with pytest.raises(ValueError, match="length"):
        scan(lambda carry, x: (carry, None), jnp.ones(3))


def _data(each: Any) -> Any:
    is_key = jnp.issubdtype(each.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(each) if is_key else each


# -- Random bodies ---------------------------------------------------------------------------------


_FUNCTIONS = [
    *(jnp.tanh, jax.nn.sigmoid, jnp.sin, jax.nn.relu, jax.nn.softplus, jax.nn.silu, jnp.negative),
    *(jax.lax.stop_gradient, jax.nn.softmax, lambda a: jnp.where(a > 0.1, a, 0.5 * a)),
    *(
        lambda a: jnp.clip(a, -0.5, 0.4),
        lambda a: 1 / (1 + a * a),
        lambda a: a - a.mean(-1)[..., None],
    ),
    *(lambda a: jnp.log1p(jnp.abs(a)), lambda a: jnp.flip(a, -1), lambda a: a * (a.sum() > 0)),
]
_PAIRS = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum]


@st.composite
def _bodies(draw: Any) -> Any:
    """Draw a body, of steps that each read some of the values before them."""
    states = draw(st.integers(1, 3))
    count = draw(st.integers(1, 8))
    kinds = ["function", "pair", "product", "gates", "concatenated", "parameter", "given", "row"]
    plan = [
        (
            draw(st.sampled_from(kinds)),
            draw(st.integers(0, 40)),
            draw(st.integers(0, 40)),
            draw(st.integers(0, 40)),
        )
        for _ in range(count)
    ]
    ends = draw(st.lists(st.integers(0, 40), min_size=states, max_size=states))
    is_batched = draw(st.booleans())
    outputs = draw(st.lists(st.integers(0, 40), max_size=2))

    def body(p: Any, carry: Any, x: Any) -> Any:
        values = [*carry, jnp.tanh(x @ p["x", INPUTS, UNITS])]
        for k, (kind, a, b, which) in enumerate(plan):
            first, second = values[-1 - a % len(values)], values[-1 - b % len(values)]
            if kind == "function":
                new = _FUNCTIONS[which % len(_FUNCTIONS)](first)
            elif kind == "pair":
                new = _PAIRS[which % len(_PAIRS)](first, second)
            elif kind == "product":
                new = first @ p[f"w{k}", UNITS, UNITS]
            elif kind == "gates":
                gates = jnp.split(
                    first @ p[f"w{k}", UNITS, 3 * UNITS] + p[f"b{k}", 3 * UNITS], 3, -1
                )
                new = gates[which % 3] * jnp.cos(gates[(which + 1) % 3])
            elif kind == "concatenated":
                new = (
                    jnp.concatenate([x, first, second], -1) @ p[f"w{k}", INPUTS + 2 * UNITS, UNITS]
                )
            elif kind == "parameter":
                new = first * p[f"v{k}", UNITS] + p[f"s{k}",]
            elif kind == "given":
                new = jnp.where(x[..., :1] > 0, first, x[..., 1:2] * second)
            else:
                new = first + p[f"r{k}", 1, UNITS][0] * x[..., which % INPUTS][..., None]
            values.append(0.7 * new)
        carry = tuple(values[-1 - end % len(values)] for end in ends)
        return carry, [values[-1 - end % len(values)] for end in outputs]

    lead = (BATCH,) if is_batched else ()
    return body, lambda make: tuple(make(*lead, UNITS) for _ in range(states)), (*lead, INPUTS)


def test_types_are_as_weak_as_those_of_lax() -> None:
    def body(carry: Any, _: Any) -> Any:
        wide, number = carry
        return (jnp.tanh(wide @ weights), 0.5 * number), (number, wide)

    weights, init = jnp.eye(20), (jax.lax.full((9, 20), 1.0), 2.0)
    assert explain(body, init, None, 5).is_captured
    found, expected = (run(body, init, None, 5) for run in (scan, jax.lax.scan))
    _assert_same(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a).weak_type == jax.typeof(b).weak_type


def test_slopes_of_absolute_values_at_zero() -> None:
    def loss(run: Any, weights: Any, init: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            return jnp.abs(h @ weights), h

        return run(body, init, jnp.zeros(3))[0].sum()

    given = jnp.full((20, 20), 0.1), jnp.zeros((9, 20))
    found, expected = (
        jax.grad(lambda *each, run=run: loss(run, *each), (0, 1))(*given)
        for run in (scan, jax.lax.scan)
    )
    assert np.abs(expected[1]).max() > 1
    _assert_same(found, expected)


def test_lower_bounds_above_upper_ones() -> None:
    def body(h: Any, x: Any) -> Any:
        return jax.lax.clamp(0.5, h @ jnp.eye(20) + x, -0.5), h

    given = jnp.zeros((9, 20)), jnp.linspace(-1, 1, 4)
    _assert_same(scan(body, *given), jax.lax.scan(body, *given))


def test_sizes_may_be_symbols() -> None:
    def run(x: Any) -> Any:
        return scan(lambda h, x: (jnp.tanh(h + x @ weights), h), jnp.zeros((9, 20)), x)[0]

    weights, (steps,) = jnp.eye(20), jax.export.symbolic_shape("steps")
    made = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((steps, 9, 20), weights.dtype))
    x = jnp.ones((4, 9, 20))
    _assert_same(made.call(x), run(x))


def test_transposes() -> None:
    """Loops that are linear have transposes; others have none in JAX, either."""
    rng = np.random.default_rng(0)
    weights, x, above = (jnp.asarray(rng.standard_normal(s)) for s in ((5, 5), (6, 4, 5), (4, 5)))

    def run(scan: Any, function: Any) -> Any:
        def last(x: Any) -> Any:
            return scan(lambda h, x: (function(0.5 * h @ weights + x), None), 0 * above, x)[0]

        return jax.linear_transpose(last, x)(above)

    _assert_same(
        *(run(each, lambda a: jnp.where(weights[0] > 0, a, 0)) for each in (scan, jax.lax.scan))
    )
    for function in (jnp.tanh, lambda a: a + 1, lambda a: a * a):
        with pytest.raises(NotImplementedError):
            run(scan, function)


def test_checkpoints() -> None:
    loop = _Loop(CAPTURED["elman"])
    body = loop.bound(loop.params)
    assert explain(jax.checkpoint(body), loop.init, loop.xs).is_captured

    def loss(run: Any, inner: Any, outer: Any) -> Any:
        whole = outer(lambda xs: run(inner(body), loop.init, xs)[1])
        return jax.grad(lambda xs: jnp.sum(jnp.sin(whole(xs))))(loop.xs)

    expected = loss(jax.lax.scan, lambda f: f, lambda f: f)
    for pair in ((jax.checkpoint, lambda f: f), (lambda f: f, jax.checkpoint)):
        _assert_same(loss(scan, *pair), expected)


def test_exported_programs() -> None:
    """JAX refuses kernels in programs that outlive the process, unless it is told not to."""
    loop = _Loop(CAPTURED["elman"])
    run = jax.jit(lambda xs: scan(loop.bound(loop.params), loop.init, xs))
    with pytest.raises(ValueError, match="custom_call @sparsescan"):
        jax.export.export(run)(loop.xs)
    about = [jax.export.DisabledSafetyCheck.custom_call("sparsescan")]
    made = jax.export.export(run, disabled_checks=about)(loop.xs)
    _assert_same(made.call(loop.xs), run(loop.xs))


@pytest.mark.slow
@given(case=_bodies(), seed=st.integers(0, 1000), is_reverse=st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_random_bodies(case: Case, seed: int, is_reverse: bool) -> None:
    loop = _Loop(case, steps=3, seed=seed)
    found, expected = (
        jax.jit(jax.value_and_grad(loop.loss(run, reverse=is_reverse), (0, 1, 2)))(
            loop.params, loop.init, loop.xs
        )
        for run in (scan, jax.lax.scan)
    )
    _assert_same(found, expected, scale=1e4)

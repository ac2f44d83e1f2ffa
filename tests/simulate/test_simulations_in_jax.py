"""Simulations as functions of JAX: what conformance tests do not show."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparsescan import InputError, InputTypeError, NewtonError
from sparsescan.simulate import ImplicitSteps, TimeSteps

jax = pytest.importorskip("jax")
jnp = jax.numpy
from sparsescan.jax import simulate  # noqa: E402
from sparsescan.jax.ffi.host import _entries  # noqa: E402


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit])
def test_a_memory_limit_changes_no_gradients(mode: Any) -> None:
    """Conformance tests show that gradients are right, in all ways of calling."""
    n, limit = 8, {"memory_limit": 8_000}
    sim = TimeSteps(lambda u, t, p: -p * u * u + t, np.eye(n), "bdf2")

    def loss(u0: Any, p: Any, dt: Any, **options: Any) -> Any:
        about = {"rtol": 1e-12, "atol": 1e-13, **options}
        states = simulate(sim, u0, p, steps=200, dt=dt, last=True, **about)
        return (states * jnp.arange(n)).sum()

    with jax.enable_x64(True):
        given = jnp.linspace(0.5, 1.5, n), jnp.asarray(0.7), jnp.asarray(0.01)
        whole, some = (
            mode(jax.value_and_grad(partial(loss, **options), argnums=(0, 1, 2)))(*given)
            for options in ({}, limit)
        )
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(some), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert sim.forward(np.ones(n), 0.7, steps=200, dt=0.01, **limit).states is None


def test_what_is_not_of_jax_keeps_its_digits() -> None:
    sim = TimeSteps(lambda u, t, p: -p * u, np.eye(2))
    u0 = np.array([0.1, 0.2])
    expected = sim.forward(u0, 0.3, steps=4, dt=0.1).last
    with jax.enable_x64(True):
        assert np.array_equal(simulate(sim, u0, 0.3, steps=4, dt=0.1, last=True), expected)
    found = simulate(sim, u0, 0.3, steps=4, dt=0.1, last=True)
    assert found.dtype == jnp.float32
    assert np.array_equal(found, expected.astype(np.float32))


def test_equal_calls_are_traced_as_one_and_others_are_not() -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        return -p["a"] * u + p["b"]

    sim = TimeSteps(rate, np.eye(2), jacobian=lambda u, t, p: -p["a"] * np.ones(2))
    shift = np.array([0.5, 1.0])

    def batch(dt: float) -> Any:
        def one(a: Any) -> Any:
            return simulate(sim, np.ones(2), {"a": a, "b": shift}, steps=2, dt=dt, last=True)

        return np.asarray(jax.vmap(one)(jnp.asarray([0.5, 2.0])))

    def expected(dt: float) -> Any:
        each = ({"a": a, "b": shift} for a in (0.5, 2.0))
        return [sim.forward(np.ones(2), p, steps=2, dt=dt).last for p in each]

    first = batch(0.1)
    np.testing.assert_allclose(first, expected(0.1), rtol=1e-6)
    known = len(_entries)
    assert np.array_equal(batch(0.1), first)
    assert len(_entries) == known
    shift[:] = 3.0  # what was traced has a copy
    np.testing.assert_allclose(batch(0.1), expected(0.1), rtol=1e-6)
    np.testing.assert_allclose(batch(0.2), expected(0.2), rtol=1e-6)
    assert len(_entries) == known + 2


def test_steps_of_ones_own_and_functions_of_jax() -> None:
    def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
        return u - u_old + dt * p * u * u

    given = jnp.asarray([0.5, 1.0], jnp.float32), jnp.float32(0.8)
    grads = []
    for how in (None, "jax"):
        sim = ImplicitSteps(residual, np.eye(2), derivatives=how)

        def loss(u0: Any, p: Any, sim: Any = sim) -> Any:
            return simulate(sim, u0, p, steps=3, dt=0.1)[-1].sum()

        grads.append(jax.grad(loss, argnums=(0, 1))(*given))
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for mode, u0 in ((jax.jit(loss), given[0]), (jax.vmap(loss, (0, None)), jnp.ones((1, 2)))):
        with pytest.raises(InputTypeError, match="sim has derivatives='jax'; expected functions"):
            mode(u0, given[1])


@pytest.mark.parametrize("method", ["kencarp4", "tsit5", "bdf2"])
def test_lengths_of_steps_are_chosen(method: str) -> None:
    """The states at some times, or the last one, under jit, gradients and vmap."""
    rng = np.random.default_rng()

    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])

    sim, u0, p = TimeSteps(rate, method=method), rng.uniform(0.5, 2, 2), float(rng.uniform(0.5, 2))
    about: dict[str, Any] = {"until": 3.0, "dt": 0.01, "error": (1e-5, 1e-7)}
    times = np.sort(rng.uniform(0, 3, 3))
    weights = rng.standard_normal((3, 2))
    run = sim.forward(u0, p, t_eval=times, **about)
    assert run.states is not None
    assert run.evaluated is not None
    above = np.zeros_like(run.states)
    above[run.evaluated] = weights
    whole, end = run.backward(above), sim.forward(u0, p, **about)
    at_end = end.backward(grad_last=weights[0])

    def at_times(u0: Any, p: Any, dt: Any) -> Any:
        return (simulate(sim, u0, p, **about | {"dt": dt, "t_eval": times}) * weights).sum()

    def last(u0: Any, p: Any, dt: Any) -> Any:
        return simulate(sim, u0, p, last=True, **about | {"dt": dt}) @ weights[0]

    with jax.enable_x64():
        given = jnp.asarray(u0), jnp.asarray(p), jnp.asarray(0.01)
        for f, grads, expected in (
            (at_times, whole, (run.states[run.evaluated] * weights).sum()),
            (last, at_end, end.last @ weights[0]),
        ):
            for call in (
                jax.value_and_grad(f, (0, 1, 2)),
                jax.jit(jax.value_and_grad(f, (0, 1, 2))),
            ):
                value, (in_u0, in_p, in_dt) = call(*given)
                np.testing.assert_allclose(value, expected, rtol=1e-12)
                np.testing.assert_allclose(in_u0, grads.u0, rtol=1e-10)
                np.testing.assert_allclose(in_p, grads.params, rtol=1e-10)
                assert in_dt == 0
            many = jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([given[0]] * 2), *given[1:])
            np.testing.assert_allclose(many, [grads.u0] * 2, rtol=1e-10)


def test_a_step_without_a_solution() -> None:
    sim = TimeSteps(lambda u, t, p: u * u, np.eye(1))
    u0 = jnp.ones(1)
    with pytest.raises(NewtonError, match="step 0 has no solution") as caught:
        simulate(sim, u0, steps=2, dt=1.0)
    assert caught.value.run.steps == 0
    with pytest.raises(Exception, match="NewtonError: step 0 has no solution"):
        jax.block_until_ready(jax.jit(lambda u: simulate(sim, u, steps=2, dt=1.0))(u0))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sim": 1}, InputTypeError, "sim is 1; expected ImplicitSteps or TimeSteps"),
        ({"u0": jnp.ones(3)}, InputError, "u0 has shape .3,.*expected 2 real numbers"),
        ({"u0": jnp.ones(2, int)}, InputTypeError, "u0 has dtype int32; expected float32 or"),
        ({"params": {"a": jnp.ones(2, bool)}}, InputTypeError, "params.'a'. has dtype bool"),
        ({"dt": jnp.ones(3)}, InputError, "dt has 3 lengths; expected 2"),
        ({"memory_limit": 3000, "steps": 200}, InputError, "last is False; expected True"),
        ({"until": 1.0, "steps": None}, InputError, "until is given, .*; expected last=True, or"),
        ({"max_dt": 1.0}, InputError, "max_dt is given without until; expected both, or neither"),
        ({"events": abs}, InputTypeError, "events is no argument of simulate; expected some of st"),
        ({"check": True}, InputTypeError, "check is no argument of simulate"),
        ({"t0": np.nan}, InputError, "t0 is nan; expected a finite number"),
        ({"t0": np.ones(1)}, InputTypeError, "t0 is array.*; expected a number"),
        ({"rtol": "small"}, InputTypeError, "rtol is 'small'; expected a number"),
        ({"dt": None}, InputError, "dt is None; expected a number"),
        ({"dt": [[0.1], [0.1, 0.2]]}, InputTypeError, "dt is .*; expected numbers"),
    ],
)
def test_bad_arguments_are_named_when_traced(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    given = {"sim": sim, "u0": jnp.ones(2), "steps": 2, "dt": 0.1} | changed
    sim, u0 = given.pop("sim"), given.pop("u0")
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda u: simulate(sim, u, **given), u0)


def test_bad_arguments_are_named() -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    for u0, message in ((None, "u0 is None"), ([[1.0], [1.0, 2.0]], "u0 is .*; expected numbers")):
        with pytest.raises(InputTypeError, match=message):
            simulate(sim, u0, steps=1, dt=0.1)
    with pytest.raises(InputTypeError, match="t0 is traced; expected a number"):
        jax.jit(lambda t0: simulate(sim, jnp.ones(2), steps=1, dt=0.1, t0=t0))(1.0)
    found = jax.jit(lambda u: simulate(sim, u, steps=1, dt=0.1, t0=np.array(1.0)))(jnp.ones(2))
    np.testing.assert_allclose(found[1], 1 / 1.1, rtol=1e-6)


def test_large_buffers_on_one_core_do_not_wait_for_each_other() -> None:
    program = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, jax.numpy as jnp, scipy.sparse as sp
from sparsescan.jax import simulate
from sparsescan.simulate import TimeSteps
n = 50_000
sim = TimeSteps(lambda u, t, p: -p * u, sp.eye_array(n))

def loss(u, p):
    return (jnp.sort(simulate(sim, jnp.sin(u), p, steps=2, dt=0.1)[-1]) ** 2).sum()

grad = jax.jit(jax.grad(loss))
for _ in range(3):
    found = grad(jnp.ones(n), jnp.float32(0.5))
print(float(found[0]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    expected = 2 * np.sin(1) * np.cos(1) * 1.05**-4
    assert float(done.stdout) == pytest.approx(expected, rel=1e-5)

"""All steps at once, beside one step after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import times

from sparsescan import InputError, NewtonError
from sparsescan.simulate import ImplicitSteps, TimeSteps


class Coupled:
    """A random nonlinear system, whose function takes one state or many."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        links = sp.random_array((n, n), density=min(1.0, 3 / n), rng=rng, format="csr")
        links.data[:] = rng.standard_normal(links.nnz)
        self.weights, self.u0 = links.toarray(), rng.standard_normal(n)
        self.pattern = sp.csr_array(sp.eye_array(n) + abs(links)) != 0

    def __call__(self, u: Any, t: Any, p: Any) -> Any:
        return -p * u + 0.5 * np.sin(u) @ self.weights.T - 0.05 * u**3 + np.cos(2 * t)


@settings(max_examples=times(12), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.one_of(st.integers(1, 6), st.integers(15, 24)),
    method=st.sampled_from(["backward_euler", "crank_nicolson", "euler", "own"]),
    steps=st.integers(0, 12),
    has_mass=st.booleans(),
    has_guess=st.booleans(),
)
def test_states_and_gradients_are_those_of_single_steps(
    seed: int, size: int, method: str, steps: int, has_mass: bool, has_guess: bool
) -> None:
    rng = np.random.default_rng(seed)
    system = Coupled(rng, size)
    sim: Any
    if method == "own":

        def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
            return u - u_old - dt * (0.7 * system(u, t, p) + 0.3 * system(u_old, t - dt, p))

        sim = ImplicitSteps(residual, system.pattern)
    else:
        mass = sp.csr_array(sp.diags_array(rng.uniform(0.5, 2.0, size)))
        about = {"mass": mass} if has_mass and method != "euler" else {}
        sim = TimeSteps(system, system.pattern, method, **about)
    dt = rng.uniform(0.02, 0.1, steps)
    given: dict[str, Any] = {"dt": dt, "t0": 0.3, "rtol": 1e-11, "atol": 1e-11}
    guess = {"guess": rng.standard_normal((steps + 1, size))} if has_guess else {}
    alone = sim.forward(system.u0, 1.3, **given)
    whole = sim.forward_at_once(system.u0, 1.3, **given, **guess)
    assert whole.steps == alone.steps == steps
    assert np.array_equal(whole.last, whole.states[-1])
    np.testing.assert_allclose(whole.states, alone.states, rtol=1e-8, atol=1e-8)
    if not steps:
        return
    above = rng.standard_normal((steps + 1, size))
    one, other = (run.backward(above) for run in (whole, alone))
    np.testing.assert_allclose(one.u0, other.u0, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(one.params, other.params, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(one.dt, other.dt, rtol=1e-6, atol=1e-6)


def test_linear_steps_take_one_iteration_and_another_to_see_it() -> None:
    sim = TimeSteps(lambda u, t, p: u @ np.array([[-2.0, 1.0], [0.5, -1.0]]), np.ones((2, 2)))
    run = sim.forward_at_once([1.0, -1.0], steps=40, dt=0.1)
    assert run.newton.max() <= 2
    near = sim.forward_at_once([1.0, -1.0], steps=40, dt=0.1, guess=run.states)
    assert near.newton.max() == 1


def test_growth_without_bound_and_too_few_iterations_are_named() -> None:
    sim = TimeSteps(lambda u, t, p: p * u**2, np.eye(1))
    with pytest.raises(NewtonError, match="all steps at once have no solution that was found"):
        sim.forward_at_once([1.0], 1.0, steps=60, dt=0.1)
    with pytest.raises(NewtonError, match="after 2 iterations the correction is"):
        sim.forward_at_once([1.0], -5.0, steps=60, dt=0.1, most=2)
    for size in (2, 20):
        flat = ImplicitSteps(lambda u, u_old, t, dt, p: 0 * u, np.eye(size))
        with pytest.raises(NewtonError, match="the Jacobian of a step is singular"):
            flat.forward_at_once(np.ones(size), steps=2, dt=0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "bdf2"}, "'bdf2'. has inner stages or two old states; expected backward_eul"),
        ({"method": "sdirk2"}, "'sdirk2'. has inner stages"),
        ({"u0": np.ones((3, 2))}, r"u0 has shape \(3, 2\); expected \(2,\)"),
        ({"guess": np.ones((3, 2))}, r"guess has shape \(3, 2\) .* expected .* shape \(5, 2\)"),
        ({"most": 0}, "most is 0"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"method": "backward_euler", "u0": np.ones(2), "guess": None} | changed
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2), given.pop("method"))
    with pytest.raises(InputError, match=message):
        sim.forward_at_once(given.pop("u0"), steps=4, dt=0.1, **given)

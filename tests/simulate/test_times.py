"""Lengths of steps that are chosen, times that are met, and marches backward in time."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import times
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from sparsescan import InputError, NewtonError
from sparsescan.simulate import ImplicitSteps, TimeSteps
from sparsescan.simulate.methods import METHODS, TABLEAUS

# The others are for smooth rates.
ADAPTIVE = [name for name in METHODS if name not in ("rk4", "kencarp4", "kencarp5", "tsit5")]
IMPLICIT = [name for name in METHODS if name == "bdf2" or TABLEAUS[name].is_implicit]
SEEDS = st.integers(0, 2**32 - 1)


def simulation(method: str, rate: Any, n: int, **about: Any) -> Any:
    """Return a simulation by a method, or of backward Euler as equations of one's own."""
    if method == "own":

        def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
            return u - u_old - dt * rate(u, t, p)

        return ImplicitSteps(residual, np.ones((n, n)), **about)
    return TimeSteps(rate, np.ones((n, n)), method, **about)


@settings(max_examples=times(4), deadline=None)
@given(seed=SEEDS, method=st.sampled_from([*ADAPTIVE, "own"]))
def test_jumps_are_seen_wherever_they_are(seed: int, method: str) -> None:
    """A linear system at any scale, whose rate jumps within some step; its exact states."""
    rng = np.random.default_rng(seed)
    n, ahead = int(rng.integers(1, 5)), rng.choice([-1.0, 1.0])
    whole, scale = 10 ** rng.uniform(-15, 15, 2)
    matrix = -np.diag(rng.uniform(0, 3, n)) + 0.3 * (rng.random() < 0.5) * rng.standard_normal(n)
    matrix *= ahead * (rng.random() < 0.8) / whole
    before = rng.standard_normal(n) * scale / whole * (rng.random() < 0.5)
    jump = rng.standard_normal(n) * scale / whole * 10 ** rng.uniform(-1, 1)
    t0 = float(rng.uniform(-1, 1) * whole * (rng.random() < 0.5))
    until = t0 + ahead * whole
    switch = t0 + rng.random() * (until - t0)
    u0 = rng.standard_normal(n) * scale * (rng.random() < 0.5)

    def rate(u: Any, t: Any, p: Any) -> Any:
        return matrix @ u + before + jump * (ahead * (t - switch) > 0)

    def flow(u: Any, dt: float, force: Any) -> Any:
        both = np.block([[matrix, force[:, None] / scale], [np.zeros((1, n + 1))]])
        return (expm(dt * both) @ np.append(u, scale))[:n]

    exact = flow(flow(u0, switch - t0, before), until - switch, before + jump)
    run = simulation(method, rate, n).forward(
        u0,
        t0=t0,
        until=until,
        dt=(until - t0) * rng.choice([1.0, 0.5, 0.1]),
        error=(1e-3, 1e-3 * scale),
        atol=1e-10 * scale,
    )
    assert run.times[-1] == until
    allowed = 1e-3 * (scale + np.abs(run.states).max())
    is_first_order = method == "own" or (method != "bdf2" and TABLEAUS[method].order == 1)
    assert np.abs(run.last - exact).max() <= (20 if is_first_order else 5) * allowed


@settings(max_examples=times(2), deadline=None)
@given(seed=SEEDS, method=st.sampled_from([*ADAPTIVE, "own"]))
def test_chosen_lengths_keep_the_error_at_any_scale(seed: int, method: str) -> None:
    """A nonlinear system whose rate jumps, beside SciPy's states from jump to jump."""
    rng = np.random.default_rng(seed)
    n, ahead = int(rng.integers(1, 6)), rng.choice([-1.0, 1.0])
    whole, scale = 10 ** rng.uniform(-15, 15, 2)
    t0, error = float(rng.uniform(-1, 1) * whole), 10 ** rng.uniform(-3.3, -2)
    decay, links, x = rng.uniform(0.2, 5, n), rng.standard_normal((n, n)), rng.standard_normal(n)
    jump, switch = rng.standard_normal((2, n)) * 10 ** rng.uniform(-1, 1), rng.random(2)

    def unit(s: float, x: Any, moved: Any) -> Any:
        waves = 0.7 * links @ np.sin(x) + 0.3 * np.cos(5 * s)
        return (
            -decay * x
            + waves
            - x * x * x
            + moved[0] * jump[0]
            - moved[1] * abs(jump[1]) * np.tanh(x)
        )

    def rate(u: Any, t: Any, p: Any) -> Any:
        s = ahead * (t - t0) / whole
        return ahead * unit(s, u / scale, s > switch) * scale / whole

    sim = simulation(method, rate, n, derivatives="complex")
    run = sim.forward(
        x * scale,
        t0=t0,
        until=t0 + ahead * whole,
        dt=ahead * whole * rng.choice([1.0, 0.3, 0.01]),
        error=(error, error * scale),
        rtol=1e-9,
        atol=1e-11 * scale,
    )
    ends = np.sort([0.0, *switch, 1.0])
    for begin, end in itertools.pairwise(ends):
        moved = (begin + end) / 2 > switch
        x = solve_ivp(unit, (begin, end), x, args=(moved,), rtol=1e-10, atol=1e-12).y[:, -1]
    is_first_order = method == "own" or (method != "bdf2" and TABLEAUS[method].order == 1)
    allowed = (30 if is_first_order else 10) * error * (1 + np.abs(run.states / scale).max())
    np.testing.assert_allclose(run.last / scale, x, rtol=0, atol=allowed)


@pytest.mark.parametrize("method", [*ADAPTIVE, "own"])
def test_pulses_are_seen_by_short_steps(method: str) -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.where((t > 1.3) & (t < 1.4), 1.0, 0.0) + 0 * u

    sim = simulation(method, rate, 1)
    run = sim.forward([0.0], dt=1.0, until=3.0, max_dt=0.03)
    assert np.diff(run.times).max() <= 0.03 * (1 + 1e-12)
    assert run.last == pytest.approx(0.1, abs=5e-3)
    free = [sim.forward([0.0], dt=1.0, until=3.0, max_dt=most).steps for most in (None, np.inf)]
    assert free[0] == free[1] < 20


@pytest.mark.parametrize("method", ADAPTIVE)
def test_a_rate_that_ends_to_be_a_number_is_named(method: str) -> None:
    sim = TimeSteps(lambda u, t, p: -np.sqrt(u), np.eye(3), method)  # a tank that runs out
    with pytest.raises(NewtonError, match=r"^equation 1 .*\(t=\d") as caught:
        sim.forward([9.0, 1.0, 4.0], dt=0.1, until=5.0)
    run: Any = caught.value.run
    assert 1.9 < run.times[-1] < 2.3
    np.testing.assert_allclose(run.last[1], 0, atol=5e-3)
    both = TimeSteps(lambda u, t, p: np.where(t >= 0, np.nan, u), np.eye(3), method)
    with pytest.raises(NewtonError, match="equation 0 of sample 0 becomes nan at t=0 "):
        both.forward(np.ones((2, 3)), dt=0.1, until=5.0)


def test_steps_of_ones_own_that_have_no_value_are_named() -> None:
    sim = ImplicitSteps(lambda u, o, t, dt, p: u - o + dt * np.sqrt(1 - t + 0 * u), np.eye(2))
    with pytest.raises(NewtonError, match=r"^equation 0 becomes nan at t=1"):
        sim.forward([1.0, 2.0], dt=0.1, until=5.0)


@settings(max_examples=times(1), deadline=None)
@given(seed=SEEDS, method=st.sampled_from(IMPLICIT))
def test_equations_that_do_not_hold_at_first_are_named(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    n, scale = int(rng.integers(2, 6)), 10 ** rng.uniform(-15, 15)
    links, row = rng.uniform(0.5, 1, (n, n)), int(rng.integers(n))
    mass = np.eye(n)
    mass[row] = 0
    links[row, row] = n

    def rate(u: Any, t: Any, p: Any) -> Any:
        return -links @ u

    sim = TimeSteps(rate, np.ones((n, n)), method, mass=sp.csr_array(mass))
    u0 = rng.standard_normal(n) * scale
    about: dict[str, Any] = {"dt": 0.1, "until": 1.0, "error": (1e-3, 1e-3 * scale)}
    about["atol"] = 1e-10 * scale
    with pytest.raises(NewtonError) as caught:
        sim.forward(u0, **about)
    found = re.match(
        r"u0 does not satisfy equation (\d+), .*: its rate is (\S+) there", str(caught.value)
    )
    assert found is not None
    assert int(found[1]) == row
    assert float(found[2]) == pytest.approx(-links[row] @ u0, rel=1e-5)
    u0[row] -= links[row] @ u0 / n
    assert sim.forward(u0, **about).times[-1] == 1.0


@settings(max_examples=times(1), deadline=None)
@given(seed=SEEDS, form=st.sampled_from(["difference", "quotient", "trapezoid"]))
def test_first_steps_of_ones_own_are_as_exact_as_others(seed: int, form: str) -> None:
    rng = np.random.default_rng(seed)
    decay, scale = rng.uniform(0.5, 50), 10 ** rng.uniform(-15, 15)

    def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
        if form == "trapezoid":
            return u - u_old + dt / 2 * decay * (u + u_old)
        change = u - u_old + dt * decay * u
        return change / dt if form == "quotient" else change

    run = ImplicitSteps(residual, np.eye(1)).forward(
        [scale], dt=1.0, until=1.0, error=(1e-4, 1e-4 * scale), atol=1e-10 * scale
    )
    exact = scale * np.exp(-decay * run.times)
    assert np.abs(run.states[:2, 0] - exact[:2]).max() < 3e-4 * scale
    assert np.abs(run.states[:, 0] - exact).max() < 1e-2 * scale


@settings(max_examples=times(3), deadline=None)
@given(seed=SEEDS, method=st.sampled_from([*METHODS, "own"]))
def test_backward_in_time_is_forward_of_the_mirrored_system(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    n, steps = int(rng.integers(1, 5)), int(rng.integers(0, 6))
    weights, u0 = rng.standard_normal((n, n)), rng.standard_normal(n)

    def rate(u: Any, t: Any, p: Any) -> Any:
        return p * (np.sin(u) @ weights) + np.cos(t)

    behind = simulation(method, rate, n)
    ahead = simulation(method, lambda u, t, p: -rate(u, -t, p), n)
    dt, t0 = rng.uniform(0.05, 0.2, steps), float(rng.uniform(-1, 1))
    exactly: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
    above = rng.standard_normal((steps + 1, n))

    def compare(one: Any, other: Any, above: Any) -> None:
        np.testing.assert_allclose(one.times, -other.times, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(one.states, other.states, rtol=1e-7, atol=1e-8)
        grads, expected = one.backward(above), other.backward(above)
        np.testing.assert_allclose(grads.u0, expected.u0, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(grads.params, expected.params, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(grads.dt, -expected.dt, rtol=1e-5, atol=1e-5)

    compare(
        behind.forward(u0, 0.7, dt=-dt, t0=t0, **exactly),
        ahead.forward(u0, 0.7, dt=dt, t0=-t0, **exactly),
        above,
    )
    if method != "rk4":
        about: dict[str, Any] = {"error": (1e-3, 1e-3), **exactly}
        one = behind.forward(u0, 0.7, dt=-0.1, t0=t0, until=t0 - 0.5, **about)
        other = ahead.forward(u0, 0.7, dt=0.1, t0=-t0, until=0.5 - t0, **about)
        assert one.steps == other.steps
        compare(one, other, rng.standard_normal((one.steps + 1, n)))


@settings(max_examples=times(2), deadline=None)
@given(seed=SEEDS, method=st.sampled_from([*ADAPTIVE, "own"]), limited=st.booleans())
def test_times_are_met(seed: int, method: str, limited: bool) -> None:
    rng = np.random.default_rng(seed)
    whole, t0 = 10 ** rng.uniform(-15, 15), float(rng.uniform(-1, 1))
    t0 *= whole
    until = t0 + whole * rng.choice([-1, 1])
    t_eval = t0 + (until - t0) * np.sort(rng.random(int(rng.integers(0, 9))))
    if rng.random() < 0.5:
        t_eval = np.concatenate([[t0], t_eval, [until]])

    def rate(u: Any, t: Any, p: Any) -> Any:
        return (np.cos(3 * t / whole) - u * u) / whole * np.sign(until - t0)

    run = simulation(method, rate, 2).forward(
        [0.5, 1.0],
        t0=t0,
        until=until,
        dt=(until - t0) * 10 ** rng.uniform(-3, 0),
        t_eval=t_eval,
        memory_limit=100_000 if limited else None,
    )
    assert np.array_equal(run.times[run.evaluated], t_eval)
    assert run.times[-1] == until
    assert (np.diff(run.times) * np.sign(until - t0) > 0).all()
    if run.states is not None:
        assert run.states[run.evaluated].shape == (len(t_eval), 2)
    assert np.isfinite(run.backward(grad_last=[1.0, 2.0]).u0).all()


@pytest.mark.parametrize("method", [*ADAPTIVE, "own"])
@pytest.mark.parametrize("t_eval", [None, [], [2.0]])
def test_no_time_is_no_step(method: str, t_eval: Any) -> None:
    sim = simulation(method, lambda u, t, p: -p * u, 2)
    run = sim.forward([1.0, 2.0], 3.0, t0=2.0, until=2.0, dt=0.1, t_eval=t_eval, check=True)
    assert run.states.tolist() == [[1, 2]]
    assert run.times.tolist() == [2]
    assert (run.evaluated is None) == (t_eval is None)
    assert t_eval is None or run.evaluated.tolist() == [0] * len(t_eval)
    grads = run.backward([[1.0, 0.0]], grad_last=[1.0, 1.0])
    assert grads.u0.tolist() == [2, 1]
    assert grads.params == 0
    assert grads.dt.shape == (0,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"t0": 1e16, "until": 1e16 + 4}, r"dt is 0.1 at t=1e\+16, where numbers are 2 apart"),
        ({"t0": 1e16, "steps": 3}, r"dt is 0.1 at t=1e\+16, where numbers are 2 apart"),
        ({"until": 1.0, "t0": 1e9, "dt": -1e-9}, "dt is -1e-09 at t=1e"),
        ({"until": -1.0}, "dt is 0.1 and until, -1.0, is before t0, 0.0"),
        ({"until": 1.0, "dt": -0.1}, "dt is -0.1 and until, 1.0, is after t0, 0.0"),
        ({"until": 1.0, "dt": 0.0}, "dt is 0.0"),
        ({"until": 1.0, "max_dt": 0.0}, "max_dt is 0.0; expected a positive number"),
        ({"until": 1.0, "max_dt": -0.1}, "max_dt is -0.1; expected a positive number"),
        ({"steps": 3, "max_dt": 0.1}, "max_dt is given without until"),
        ({"steps": 3, "t_eval": [0.1]}, "t_eval is given without until"),
        ({"until": 1.0, "t_eval": [0.5, 0.4]}, "t_eval is .*; expected times one after the other"),
        ({"until": 1.0, "t_eval": [0.5, 0.5]}, "t_eval is .*; expected times one after the other"),
        ({"until": 1.0, "t_eval": [1.5]}, "t_eval is .*; expected times from t0, 0.0, to until"),
        ({"until": 1.0, "t_eval": [np.nan]}, "t_eval is .*; expected times from t0"),
        ({"until": 0.0, "t_eval": [0.0, 0.0]}, "t_eval is .*; expected times one after the other"),
        ({"until": 1.0, "t_eval": 0.5}, "t_eval is 0.5; expected a vector of times"),
    ],
)
def test_bad_times_are_named(given: dict[str, Any], message: str) -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    with pytest.raises(InputError, match=message):
        sim.forward(**({"u0": [1.0, 2.0], "dt": 0.1} | given))

"""Simulations whose steps are taken in compiled loops, beside autograd of the discrete steps."""

from __future__ import annotations

import functools
import threading
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from scipy.integrate import solve_ivp

from sparsescan import NewtonError
from sparsescan.simulate import ImplicitSteps, TimeSteps
from sparsescan.simulate.compiled import Loops
from sparsescan.simulate.methods import METHODS, TABLEAUS, Differentiation
from sparsescan.simulate.newton import Solver
from sparsescan.simulate.schemes import RungeKutta


def lorenz(u: Any, t: Any, p: Any) -> Any:
    x, y, z = u
    return np.array([p[0] * (y - x), x * (p[1] - z) - y, x * y - p[2] * z])


def robertson(u: Any, t: Any, p: Any) -> Any:
    a, b, c = u
    first, second, third = p[0] * a, p[1] * b * b, p[2] * b * c
    return np.array([third - first, first - second - third, second])


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid steps that are not taken by compiled loops."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a step was taken in Python")

    monkeypatch.setattr(Solver, "newton", refuse)
    monkeypatch.setattr(Solver, "transposed", refuse)
    monkeypatch.setattr(RungeKutta, "advance", refuse)
    monkeypatch.setattr(RungeKutta, "pull_back", refuse)


TERMS: list[Any] = [
    lambda m, u, v, t, p: p * u * v,
    lambda m, u, v, t, p: p * u / (1 + v * v),
    lambda m, u, v, t, p: m.exp(-u * u) * p - v,
    lambda m, u, v, t, p: m.sin(p * t) * v - u**3,
    lambda m, u, v, t, p: m.tanh(p * u) - m.sqrt(1 + v * v),
    lambda m, u, v, t, p: m.where(u > v, p * (v - u), (v - u) ** 2),
    lambda m, u, v, t, p: m.maximum(u, p) - m.abs(v),
    lambda m, u, v, t, p: m.log(2 + u * u) * p - m.hypot(v, 1 + u),
    lambda m, u, v, t, p: m.arctan2(u, 2 + v * v) + 0 * p,
    lambda m, u, v, t, p: (1.5 + m.cos(u)) ** p - v,
]


class System:
    """A rate of random terms, for NumPy and PyTorch: each sample alone, on a scale of its own."""

    def __init__(self, rng: np.random.Generator, n: int, scale: float) -> None:
        self.n, self.scale = n, scale
        self.chosen = [
            (int(rng.integers(len(TERMS))), row, int(rng.integers(n)), int(rng.integers(3)))
            for row in range(n)
            for _ in range(rng.integers(1, 3))
        ]

    def __call__(self, u: Any, t: Any, p: Any, m: Any = np) -> Any:
        u = u / self.scale
        rows = [-0.5 * u[..., k] for k in range(self.n)]
        for term, row, column, param in self.chosen:
            rows[row] = rows[row] + TERMS[term](m, u[..., row], u[..., column], t, p[param])
        return self.scale * m.stack(rows, -1)


def steps_of_torch(system: System, method: str, mass: Any, u0: Any, p: Any, dts: Any) -> Any:
    """Return the last state of these steps as a function of tensors, by Newton's method."""

    def rate(u: Any, t: Any) -> Any:
        return system(u, t, p, torch)

    def solved(residual: Any, guess: Any) -> Any:
        u = guess.detach()
        for _ in range(30):
            matrix = torch.autograd.functional.jacobian(residual, u).detach()
            u = u - torch.linalg.solve(matrix, residual(u).detach())
        return u - torch.linalg.solve(matrix, residual(u))  # whose derivatives are the root's

    t, states = torch.tensor(0.25, dtype=torch.float64), [u0]
    for k, dt in enumerate(dts):
        old = states[-1]
        if method == "bdf2":
            ratio = dt / dts[k - 1] if k else None
            w = ratio
            a, b, c = Differentiation.of(None).values
            if w is not None:
                a, b, c = (1 + 2 * w) / (1 + w), -(1 + w), w * w / (1 + w)
            past = b * old + c * states[-2] if k else b * old
            states.append(
                solved(
                    lambda u, a=a, past=past, t=t, dt=dt: (
                        mass @ (a * u + past) - dt * rate(u, t + dt)
                    ),
                    old,
                )
            )
        else:
            tableau, rates = TABLEAUS[method], []
            for i, row in enumerate(tableau.a):
                added = sum((float(row[j]) * rates[j] for j in range(i)), 0 * old)
                time = t + float(tableau.c[i]) * dt
                state = old + dt * added
                if row[i]:
                    about = old, added, dt, float(row[i]), time

                    def residual(u: Any, about: Any = about) -> Any:
                        old, added, dt, own, time = about
                        return mass @ (u - old) - dt * (added + own * rate(u, time))

                    state = solved(residual, old)
                rates.append(rate(state, time))
            states.append(state)
        t = t + dt
    return states[-1]


@pytest.mark.usefixtures("no_python")
@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([*METHODS, "residual"]), st.integers(1, 5))
def test_steps_and_gradients_are_those_of_autograd(seed: int, method: str, n: int) -> None:
    rng = np.random.default_rng(seed)
    system = System(rng, n, 10.0 ** rng.integers(-15, 16))
    u0, p = system.scale * rng.uniform(-1, 1, n), rng.uniform(0.3, 1.5, 3)
    dts = rng.uniform(0.01, 0.05, 6)
    mass = np.eye(n)
    if method == "residual":

        def residual(u: Any, old: Any, t: Any, dt: Any, p: Any) -> Any:
            return u - old - dt * system(u, t, p)

        sim: Any = ImplicitSteps(residual)
    else:
        if method == "bdf2" or TABLEAUS[method].is_implicit:
            mass += 0.2 * rng.uniform(-1, 1, (n, n))
        is_plain = (mass == np.eye(n)).all()
        sim = TimeSteps(system, None, method, mass=None if is_plain else sp.csr_array(mass))
    run = sim.forward(u0, p, dt=dts, t0=0.25, rtol=1e-12, atol=1e-13 * system.scale)
    weights = rng.standard_normal(n) / system.scale
    grads = run.backward(grad_last=weights)
    tensors = [torch.tensor(each, requires_grad=True) for each in (u0, p, dts)]
    own = "backward_euler" if method == "residual" else method
    last = steps_of_torch(system, own, torch.tensor(mass), *tensors)
    (last @ torch.tensor(weights)).backward()
    np.testing.assert_allclose(run.last, last.detach(), rtol=1e-9, atol=1e-10 * system.scale)
    for name, tensor, size in zip(
        ("u0", "params", "dt"), tensors, (1 / system.scale, 1, 1), strict=True
    ):
        found, expected = getattr(grads, name), tensor.grad.numpy()
        bound = 1e-8 * (size + np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=name)


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("method", ["backward_euler", "bdf2", "sdirk3", "rk4"])
def test_samples_are_as_alone_and_losses_are_apart(method: str) -> None:
    rng = np.random.default_rng()
    system, p = System(rng, 3, 1e-9), rng.uniform(0.5, 1.5, 3)
    u0, weights = 1e-9 * rng.uniform(-1, 1, (4, 3)), rng.standard_normal((2, 21, 4, 3))
    sim = TimeSteps(system, None, method)
    about: Any = {"steps": 20, "dt": 0.02, "atol": 1e-19}
    run = sim.forward(u0, p, **about)
    grads = run.backward(weights)
    of_calls = run.backward(lambda k: weights[:, k])
    np.testing.assert_array_equal(grads.params, of_calls.params)
    sums = np.zeros((2, 3))
    for k in range(4):
        alone = sim.forward(u0[k], p, **about)
        np.testing.assert_allclose(run.states[:, k], alone.states, rtol=1e-7, atol=1e-17)
        own = alone.backward(weights[:, :, k])
        np.testing.assert_allclose(grads.u0[:, k], own.u0, rtol=1e-6, atol=1e-9)
        sums += own.params
    np.testing.assert_allclose(grads.params, sums, rtol=1e-6, atol=1e-6 * np.abs(sums).max())


@pytest.mark.usefixtures("no_python")
def test_robertsons_reaction_is_solved_as_by_scipy() -> None:
    p, times = np.array([0.04, 3e7, 1e4]), np.concatenate([[0.0], np.geomspace(1e-6, 40, 4000)])
    run = TimeSteps(robertson, method="bdf2").forward([1.0, 0, 0], p, dt=np.diff(times), atol=1e-14)
    expected = solve_ivp(
        lambda t, u: robertson(u, t, p), (0, 40), [1.0, 0, 0], "Radau", rtol=1e-10, atol=1e-14
    )
    np.testing.assert_allclose(run.last, expected.y[:, -1], rtol=1e-5)
    assert run.steps == 4000
    assert run.newton.min() >= 1


def test_a_branch_ends_a_loop_and_another_begins() -> None:
    """The rate branches at times, and at states; each branch is a reading, and none is missed."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        push = p[0] if t < 0.505 else -p[1]
        return np.array([push * u[0] if u[0] < 2 else push, u[0] - u[1] ** 2])

    def smooth(u: Any, t: Any, p: Any) -> Any:
        push = np.where(t < 0.505, p[0], -p[1])
        return np.stack([np.where(u[0] < 2, push * u[0], push), u[0] - u[1] ** 2])

    found = []
    for each in (rate, smooth):
        run = TimeSteps(each, np.ones((2, 2)), "crank_nicolson").forward(
            [1.0, 0.5], [2.0, 1.5], steps=100, dt=0.01, rtol=1e-13, atol=1e-14
        )
        found.append((run.states, *run.backward(grad_last=[1.0, -1.0])))
        assert "read" in run.derivatives
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-9)


def test_errors_are_those_of_steps_in_python() -> None:
    """A step without a solution ends the run; states before it are there."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        return p * u * u

    with pytest.raises(NewtonError, match=r"step 15 has no solution .* params=1") as failure:
        TimeSteps(rate).forward([1.0], 1.0, steps=40, dt=0.05)
    assert failure.value.run.steps == 15  # type: ignore[attr-defined]

    def slow(u: Any, t: Any, p: Any) -> Any:
        return np.array([u[0], -u[0]])

    run = TimeSteps(slow).forward([1.0, 1.0], steps=3, dt=1.0 - 1e-3)
    with pytest.raises(NewtonError, match="step 0 has no solution"):
        TimeSteps(slow).forward([1.0, 1.0], steps=3, dt=1.0)
    assert np.isfinite(run.backward(grad_last=[1.0, 0.0]).u0).all()


def test_a_function_that_changes_is_noticed() -> None:
    """What is read is compared with the function behind each loop; the loop is taken again."""
    factor = np.array(1.0)

    class Rate:
        def __call__(self, u: Any, t: Any, p: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return -float(factor) * u if self.calls < 6 else -2.0 * u

    with pytest.warns(UserWarning, match="values that differ"):
        run = TimeSteps(Rate(), np.eye(1)).forward([1.0], steps=100, dt=0.1)
    np.testing.assert_allclose(run.last, 1.2**-100.0, rtol=1e-3)


def test_threads_take_steps_of_one_simulation() -> None:
    sim, found = TimeSteps(lorenz, method="bdf2"), {}

    def take(k: int) -> None:
        run = sim.forward([1.0 + k, 2.0, 3.0], [10.0, 28.0, 8 / 3], steps=500, dt=0.002)
        found[k] = run.last, run.backward(grad_last=np.ones(3)).params

    take(0)
    threads = [threading.Thread(target=take, args=(k,)) for k in range(4)]
    expected = found.pop(0)
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for own, other in zip(found[0], expected, strict=True):
        np.testing.assert_array_equal(own, other)
    assert len(found) == 4


WITH_ESTIMATES = [name for name in METHODS if name != "rk4"]


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(WITH_ESTIMATES), st.integers(1, 5), st.booleans())
def test_chosen_lengths_are_those_of_steps_in_python(
    seed: int, method: str, n: int, is_singular: bool
) -> None:
    """With kinks, samples, masses, times to meet, and backward in time."""
    rng = np.random.default_rng(seed)
    system, batch, ahead = System(rng, n, 10.0 ** rng.integers(-15, 16)), 3, rng.choice([-1, 1])
    mass = None
    if method == "bdf2" or TABLEAUS[method].is_implicit:
        mass = np.eye(n) + 0.1 * rng.uniform(-1, 1, (n, n))
        mass[-1] *= not is_singular
    sim = TimeSteps(system, None, method, mass=None if mass is None else sp.csr_array(mass))
    u0, p = system.scale * rng.uniform(-1, 1, (batch, n)), rng.uniform(0.3, 1.5, 3)
    about: dict[str, Any] = {"until": 0.5 * ahead, "dt": 0.1 * ahead, "rtol": 1e-13}
    about |= {"atol": 1e-14 * system.scale, "error": (1e-4, 1e-4 * system.scale)}
    about |= {"t_eval": np.sort(rng.uniform(0, 0.5, 2)) * ahead, "max_dt": 0.2}
    found: list[Any] = []
    for loops in (Loops.to_choose_lengths, lambda *_: None):
        with patch.object(Loops, "to_choose_lengths", loops):
            try:
                found.append(sim.forward(u0, p, **about))
            except NewtonError:  # states grow without bound before the end
                found.append(None)
    one, other = found
    assert (one is None) == (other is None)
    if one is None:
        return
    assert one.steps == other.steps
    np.testing.assert_allclose(one.times, other.times, rtol=1e-6)
    np.testing.assert_allclose(one.states, other.states, rtol=1e-6, atol=1e-7 * system.scale)
    np.testing.assert_array_equal(one.evaluated, other.evaluated)


@functools.cache
def states_and_sensitivities(p: tuple[float, ...]) -> Any:
    """Return the state of Robertson's reaction at time 1, and its derivatives in parameters."""

    def rates(t: float, both: Any) -> Any:
        """Return the rates of states, and of their derivatives: ``Ṡ = ∂f/∂u S + ∂f/∂p``."""
        (a, b, c), moves = both[:3], both[3:].reshape(3, 3)
        in_states = np.array(
            [
                [-p[0], p[2] * c, p[2] * b],
                [p[0], -2 * p[1] * b - p[2] * c, -p[2] * b],
                [0, 2 * p[1] * b, 0],
            ]
        )
        in_params = np.array([[-a, 0, b * c], [a, -b * b, -b * c], [0, b * b, 0]])
        return np.concatenate([robertson(both[:3], t, p), (in_states @ moves + in_params).ravel()])

    begin = np.concatenate([[1.0, 0.0, 0.0], np.zeros(9)])
    return solve_ivp(rates, (0, 1), begin, "Radau", rtol=1e-10, atol=1e-12).y[:, -1]


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("method", WITH_ESTIMATES)
def test_loops_choose_lengths(method: str) -> None:
    u0, p = np.array([1.0, 0.0, 0.0]), (0.04, 3e2, 1e2)
    sim = TimeSteps(robertson, method=method)
    run = sim.forward(u0, np.array(p), error=(1e-5, 1e-7), until=1.0, dt=1e-3)
    expected = states_and_sensitivities(p)
    np.testing.assert_allclose(run.last, expected[:3], rtol=5e-3, atol=1e-6)
    weights = np.array([1.0, -2.0, 3.0])
    grads = run.backward(grad_last=weights)
    right = weights @ expected[3:].reshape(3, 3)
    np.testing.assert_allclose(grads.params, right, rtol=2e-2, atol=1e-4)


def test_a_loop_leaves_no_more_than_the_last_states_where_a_limit_says_so() -> None:
    sim = TimeSteps(lorenz, method="kencarp4")
    about: Any = {"until": 2.0, "dt": 0.01, "error": (1e-6, 1e-6)}
    u0, p = np.array([1.0, 2.0, 3.0]), np.array([10.0, 28.0, 8 / 3])
    whole, limited = (sim.forward(u0, p, memory_limit=m, **about) for m in (None, 9000))
    assert limited.states is None
    assert limited.steps == whole.steps
    np.testing.assert_allclose(limited.last, whole.last, rtol=1e-6)
    one, other = (run.backward(grad_last=np.ones(3)) for run in (whole, limited))
    np.testing.assert_allclose(one.params, other.params, rtol=1e-5)


def conditions(a: Any, b: Any) -> Any:
    """Return the orders of trees, and by how far weights miss the conditions of these."""
    c = a.sum(1)
    ac, acc = a @ c, a @ (c * c)
    return [
        *[(1, b.sum() - 1), (2, b @ c - 1 / 2), (3, b @ c**2 - 1 / 3), (3, b @ ac - 1 / 6)],
        *[(4, b @ c**3 - 1 / 4), (4, b @ (c * ac) - 1 / 8), (4, b @ acc - 1 / 12)],
        *[(4, b @ a @ ac - 1 / 24), (5, b @ c**4 - 1 / 5), (5, b @ (c * c * ac) - 1 / 10)],
        *[(5, b @ ac**2 - 1 / 20), (5, b @ (c * acc) - 1 / 15), (5, b @ (c * (a @ ac)) - 1 / 30)],
        *[(5, b @ a @ c**3 - 1 / 20), (5, b @ a @ (c * ac) - 1 / 40), (5, b @ a @ acc - 1 / 60)],
        (5, b @ a @ a @ ac - 1 / 120),
    ]


@pytest.mark.parametrize("method", TABLEAUS)
def test_weights_have_the_order_of_a_method_and_estimates_one_less(method: str) -> None:
    """The conditions of Butcher, by Hairer, Nørsett and Wanner, table II.2.1."""
    tableau = TABLEAUS[method]
    missed = conditions(tableau.a, tableau.a[-1])
    assert all(abs(miss) < 1e-11 for order, miss in missed if order <= tableau.order)
    assert any(abs(miss) > 1e-5 for order, miss in missed if order == tableau.order + 1) or (
        tableau.order == 5
    )
    for first, *weights in tableau.estimates:
        if not first:
            missed = conditions(tableau.a, tableau.a[-1] - weights)
            assert all(abs(miss) < 1e-11 for order, miss in missed if order < tableau.order)
            assert any(abs(miss) > 1e-5 for order, miss in missed if order == tableau.order)


def test_systems_that_are_too_large_for_loops_take_no_memory_for_them() -> None:
    with patch("sparsescan.simulate.compiled.Trajectory", side_effect=AssertionError):
        run = TimeSteps(lambda u, t, p: -u, np.eye(40)).forward(np.ones(40), until=0.2, dt=0.1)
    assert run.times[-1] == 0.2

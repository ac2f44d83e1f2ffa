"""Simulations beside dense Newton steps of PyTorch, differentiated by autograd in float64."""

from __future__ import annotations

import os
import signal
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fuzz_simulations
import numba
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import long_times, times

from sparsescan import (
    GradientError,
    InputError,
    InputTypeError,
    MemoryLimitError,
    NewtonError,
    Pattern,
)
from sparsescan.simulate import ImplicitSteps, TimeSteps
from sparsescan.simulate.derivatives import Coloured, read_pattern
from sparsescan.simulate.factors import Matrices
from sparsescan.simulate.methods import METHODS, TABLEAUS

torch = pytest.importorskip("torch")

IMPLICIT = [name for name in METHODS if name == "bdf2" or TABLEAUS[name].is_implicit]


UNREAD = "ignore:rate cannot be read"


def unread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, and cannot be read."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        np.iscomplexobj(u)
        return function(u, t, p)

    return rate


class System:
    """A random sparse nonlinear system ``f(u, t, p)``, for NumPy and for PyTorch.

    Each unknown has a decay, and moves others by a sine, a square, or a product.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.n = n = int(rng.integers(1, 14))
        self.links = sp.random_array((n, n), density=rng.uniform(0, 0.5), rng=rng, format="csr")
        self.links.data[:] = rng.standard_normal(self.links.nnz)
        self.pattern = sp.csr_array(sp.eye_array(n) + abs(self.links)) != 0
        self.weights = self.links.toarray()
        self.params = {"decay": float(rng.uniform(0.5, 2.0)), "gain": rng.uniform(-1, 1, n)}
        self.u0 = rng.standard_normal(n)

    def __call__(self, u: Any, t: Any, p: Any) -> Any:
        xp = torch if isinstance(u, torch.Tensor) else np
        weights = torch.tensor(self.weights) if xp is torch else self.weights
        moved = weights @ xp.sin(u) * p["gain"] + 0.1 * xp.cos(3 * t) * p["gain"] ** 2
        return -p["decay"] * u + moved - 0.05 * u * u * u


def torch_root(residual: Callable[[Any], Any], guess: Any) -> Any:
    """Return a root by dense Newton steps; the last one has the derivatives of the solution."""
    u = guess.detach()
    for _ in range(30):
        with torch.no_grad():
            rest = residual(u)
        jacobian = torch.autograd.functional.jacobian(residual, u)
        moved = torch.linalg.solve(jacobian, rest)
        u = u - moved
        if moved.abs().max() < 1e-9:
            break
    return u - torch.linalg.solve(jacobian.detach(), residual(u))


def torch_steps(
    step: Callable[..., Any], states: list[Any], dt: Any, t0: float, params: Any
) -> list[Any]:
    """March by equations that are differentiated by autograd.

    `step` returns residuals of ``(u, states, t, dt, dt_before, params)``.
    """
    time = torch.tensor(t0, dtype=torch.float64)
    for k in range(len(dt)):
        before = dt[k - 1] if k else None

        def residual(u: Any, time: Any = time, k: int = k, before: Any = before) -> Any:
            return step(u, states, time, dt[k], before, params)

        states.append(torch_root(residual, states[-1]))
        time = time + dt[k]
    return states


def torch_method(f: Any, method: str, mass: Any) -> Callable[..., Any]:
    """Return the residual of the whole step of a method."""
    x = 1 - 0.5**0.5
    mass = torch.eye(f.n, dtype=torch.float64) if mass is None else torch.tensor(mass)

    def residual(u: Any, states: Any, t: Any, dt: Any, before: Any, p: Any) -> Any:
        old = states[-1]
        if method == "backward_euler" or (method == "bdf2" and before is None):
            return mass @ (u - old) - dt * f(u, t + dt, p)
        if method == "crank_nicolson":
            return mass @ (u - old) - dt / 2 * (f(old, t, p) + f(u, t + dt, p))
        assert method == "bdf2"
        w = dt / before
        past = (1 + w) * old - w**2 / (1 + w) * states[-2]
        return mass @ ((1 + 2 * w) / (1 + w) * u - past) - dt * f(u, t + dt, p)

    def stages(u: Any, states: Any, t: Any, dt: Any, before: Any, p: Any) -> Any:
        # Two stages of SDIRK2, one after the other.
        old = states[-1]

        def first(v: Any) -> Any:
            return mass @ (v - old) - dt * x * f(v, t + x * dt, p)

        v = torch_root(first, old)
        both = (1 - x) * f(v, t + x * dt, p) + x * f(u, t + dt, p)
        return mass @ (u - old) - dt * both

    return stages if method == "sdirk2" else residual


def torch_grads(
    step: Callable[..., Any], u0: Any, params: Any, dt: Any, t0: float, weights: Any
) -> tuple[Any, ...]:
    leaves = {
        name: torch.tensor(each, dtype=torch.float64, requires_grad=True)
        for name, each in params.items()
    }
    start = torch.tensor(u0, requires_grad=True)
    lengths = torch.tensor(dt, requires_grad=True)
    states = torch_steps(step, [start], list(lengths.unbind()), t0, leaves)
    (torch.stack(states) * torch.tensor(weights)).sum().backward()
    grads = {name: each.grad.numpy() for name, each in leaves.items()}
    return torch.stack(states).detach().numpy(), start.grad.numpy(), grads, lengths.grad.numpy()


def assert_close(found: Any, expected: Any, within: float = 1e-7) -> None:
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=within * scale)


@settings(max_examples=long_times(12, 32), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["backward_euler", "crank_nicolson", "sdirk2", "bdf2"]),
)
def test_gradients_are_those_of_autograd(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    f = System(rng)
    mass = None
    if rng.random() < 0.5:
        mass = np.eye(f.n) * rng.uniform(0.5, 2) + (abs(f.weights) > 0) * 0.1 / f.n
    how = rng.choice(["complex", "forward", "default"])
    steps = int(rng.integers(1, 9))
    dt, t0 = rng.uniform(0.02, 0.2, steps), float(rng.uniform(-1, 1))
    weights = rng.standard_normal((steps + 1, f.n))
    weights[rng.random(steps + 1) < 0.3] = 0
    derivatives = None if how == "default" else how
    sim = TimeSteps(
        f,
        f.pattern,
        method,
        mass=None if mass is None else sp.csr_array(mass),
        derivatives=derivatives,
    )
    run = sim.forward(f.u0, f.params, dt=dt, t0=t0, rtol=1e-11, atol=1e-13, check=True)
    states, u0, params, in_dt = torch_grads(
        torch_method(f, method, mass), f.u0, f.params, dt, t0, weights
    )
    within = 1e-6 if how == "forward" else 1e-8
    assert_close(run.states, states, 1e-9)
    grads = run.backward(weights)
    assert_close(grads.u0, u0, within)
    assert_close(grads.dt, in_dt, within)
    for name, expected in params.items():
        assert_close(grads.params[name], expected, within)


@settings(max_examples=long_times(8, 20), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_residuals_of_ones_own(seed: int) -> None:
    """Whatever the old state, the time and the length of a step do in them."""
    rng = np.random.default_rng(seed)
    f = System(rng)

    def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
        return u - u_old + 0.1 * u_old * u - dt * f(u, t, p) - 0.3 * dt * dt * f(u_old, t - dt, p)

    def step(u: Any, states: Any, t: Any, dt: Any, _: Any, p: Any) -> Any:
        return residual(u, states[-1], t + dt, dt, p)

    steps = int(rng.integers(1, 9))
    dt, t0 = rng.uniform(0.02, 0.2, steps), float(rng.uniform(-1, 1))
    weights = rng.standard_normal((steps + 1, f.n))
    run = ImplicitSteps(residual, f.pattern).forward(
        f.u0, f.params, dt=dt, t0=t0, rtol=1e-11, atol=1e-13, check=True
    )
    states, u0, params, in_dt = torch_grads(step, f.u0, f.params, dt, t0, weights)
    assert_close(run.states, states, 1e-9)
    grads = run.backward(weights)
    assert_close(grads.u0, u0, 1e-8)
    assert_close(grads.dt, in_dt, 1e-8)
    for name, expected in params.items():
        assert_close(grads.params[name], expected, 1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_taylor_remainders_shrink_with_the_square(method: str) -> None:
    f = System(np.random.default_rng(5))
    rng = np.random.default_rng()
    sim = TimeSteps(f, f.pattern, method)
    dt, weights = rng.uniform(0.02, 0.1, 7), rng.standard_normal((8, f.n))
    directions = [rng.standard_normal(size) for size in (f.n, 1, f.n, 7)]

    def run(step: float) -> Any:
        u, decay, gain, lengths = (step * each for each in directions)
        params = {"decay": f.params["decay"] + decay[0], "gain": f.params["gain"] + gain}
        return sim.forward(f.u0 + u, params, dt=dt * (1 + lengths), rtol=1e-12, atol=1e-14)

    def loss(step: float) -> float:
        return float((run(step).states * weights).sum())

    grads = run(0).backward(weights)
    in_all = [grads.u0, [grads.params["decay"]], grads.params["gain"], grads.dt * dt]
    slope = sum(np.dot(a, b) for a, b in zip(in_all, directions, strict=True))
    steps = 1e-2 * 0.5 ** np.arange(6)
    rests = [abs(loss(step) - loss(0) - step * slope) for step in steps]
    rates = np.log2(np.divide(rests[:-1], rests[1:]))
    assert rests[-1] < 1e-11 or np.all(np.abs(rates[-2:] - 2) < 0.3)


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_their_order(method: str) -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([-u[0] + u[1] ** 2, -2 * u[1] + np.cos(t)])

    def last(steps: int) -> Any:
        sim = TimeSteps(rate, np.ones((2, 2)), method)
        return sim.forward([1.0, 0.5], steps=steps, dt=1 / steps, rtol=1e-13, atol=1e-14).last

    from scipy.integrate import solve_ivp

    exact = solve_ivp(lambda t, u: rate(u, t, None), (0, 1), [1.0, 0.5], rtol=1e-13, atol=1e-13)
    order = 2 if method == "bdf2" else TABLEAUS[method].order
    counts = {4: (10, 20, 40), 5: (4, 8, 16)}.get(order, (20, 40, 80))
    errors = [np.abs(last(steps) - exact.y[:, -1]).max() for steps in counts]
    assert np.log2(errors[1] / errors[2]) == pytest.approx(order, abs=0.25)


def chain(n: int) -> tuple[Any, Any]:
    second = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    return second, lambda u, t, p: p[0] * (second @ u) + p[1] * u * (1 - u)


@pytest.mark.parametrize("method", IMPLICIT)
def test_algebraic_equations_hold(method: str) -> None:
    """A singular mass matrix: the second unknown follows from the first."""
    mass = sp.csr_array(np.diag([1.0, 0.0]))

    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([-u[1], u[1] - p * u[0] ** 2])

    sim = TimeSteps(rate, np.ones((2, 2)), method, mass=mass)

    def run(p: float) -> Any:
        return sim.forward([1.0, p], p, steps=20, dt=0.05, rtol=1e-12, atol=1e-13)

    first = run(1.5)
    assert_close(first.states[:, 1], 1.5 * first.states[:, 0] ** 2, 1e-10)
    grads = first.backward(grad_last=[1.0, 0.0])
    step = 1e-5
    slope = (run(1.5 + step).last[0] - run(1.5 - step).last[0]) / (2 * step)
    assert grads.params + grads.u0[1] == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("kind", ["tridiagonal", "banded", "dense", "sparse"])
def test_all_ways_to_solve(kind: str) -> None:
    rng = np.random.default_rng()
    n = {"tridiagonal": 60, "banded": 200, "dense": 12, "sparse": 3600}[kind]
    if kind == "tridiagonal":
        matrix, _ = chain(n)
    elif kind == "banded":
        matrix = sp.diags_array([1.0, 1, -4, 1, 1], offsets=[-5, -1, 0, 1, 5], shape=(n, n)).tocsr()
    elif kind == "dense":
        matrix = sp.csr_array(rng.standard_normal((n, n)))
    else:
        line, _ = chain(60)
        one = sp.eye_array(60)
        matrix = sp.csr_array(sp.kron(line, one) + sp.kron(one, line))
    sim = TimeSteps(lambda u, t, p: p * (matrix @ u) - u**3, matrix)
    from sparsescan.symbolic.factorisation import factorisation_of

    assert factorisation_of(sim.pattern).method == kind
    u0 = rng.uniform(0, 1, n)
    run = sim.forward(u0, 0.3, steps=6, dt=0.05, rtol=1e-11, atol=1e-13)

    def jacobian(u: Any) -> Any:
        return (sp.eye_array(n) - 0.05 * (0.3 * matrix - sp.diags_array(3 * u**2))).tocsc()

    u = u0
    for _ in range(6):
        new = u
        for _ in range(8):
            rest = new - u - 0.05 * (0.3 * (matrix @ new) - new**3)
            new = new - sp.linalg.spsolve(jacobian(new), rest)
        u = new
    assert_close(run.last, u, 1e-9)
    above, in_params = rng.standard_normal(n), 0.0
    expected = above
    for state in run.states[:0:-1]:
        expected = sp.linalg.spsolve(jacobian(state).T.tocsc(), expected)
        in_params += 0.05 * (matrix @ state) @ expected
    grads = run.backward(grad_last=above)
    assert_close(grads.u0, expected, 1e-9)
    assert_close(grads.params, in_params, 1e-9)


class Samples(System):
    """A system whose function takes all samples at once, with a parameter of each."""

    def __call__(self, u: Any, t: Any, p: Any) -> Any:
        moved = np.sin(u) @ self.weights.T * p["gain"] + 0.1 * np.cos(3 * t) * p["gain"] ** 2
        return -p["decay"][:, None] * u + moved - 0.05 * u * u * u


@settings(max_examples=long_times(5, 16), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    method=st.sampled_from(METHODS),
    how=st.sampled_from(["complex", "forward", "jax", "functions"]),
    has_mass=st.booleans(),
    many=st.booleans(),
)
def test_samples_of_a_batch_are_simulations_of_their_own(
    seed: int, method: str, how: Any, has_mass: bool, many: bool
) -> None:
    rng = np.random.default_rng(seed)
    system, one = Samples(rng), System(np.random.default_rng(seed))
    batch, n, steps = int(rng.integers(1, 5)), system.n, 4
    decay, u0 = rng.uniform(0.5, 2.0, batch), rng.standard_normal((batch, n))
    about: dict[str, Any] = {}
    if has_mass and method in IMPLICIT:
        about["mass"] = sp.csr_array(sp.eye_array(n) + 0.1 * abs(system.links))

    def jacobian(u: Any, t: Any, p: Any) -> Any:
        dense = system.weights * np.cos(u)[:, None] * p["gain"][:, None]
        dense[:, range(n), range(n)] -= p["decay"][:, None] + 0.15 * u * u
        rows = np.repeat(np.arange(n), np.diff(system.pattern.indptr))
        return dense[:, rows, system.pattern.indices]

    def vjp(above: Any, u: Any, t: Any, p: Any) -> Any:
        slope = np.sin(u) @ system.weights.T + 0.2 * np.cos(3 * t) * p["gain"]
        return {"decay": -(above * u).sum(1), "gain": (above * slope).sum(0)}

    if how == "functions":
        own: dict[str, Any] = {"jacobian": jacobian, "vjp": vjp}
    else:
        own = {"derivatives": how}
    if how in ("complex", "forward"):
        own["param_patterns"] = {"decay": sp.kron(sp.eye_array(batch), np.ones((n, 1)))}
    function: Any = system
    if how == "jax":
        jnp = pytest.importorskip("jax.numpy")

        def function(u: Any, t: Any, p: Any) -> Any:
            moved = (
                jnp.sin(u) @ system.weights.T * p["gain"] + 0.1 * jnp.cos(3 * t) * p["gain"] ** 2
            )
            return -p["decay"][:, None] * u + moved - 0.05 * u * u * u

    sim = TimeSteps(function, system.pattern, method, **own, **about)
    params = {"decay": decay, "gain": system.params["gain"]}
    run = sim.forward(u0, params, steps=steps, dt=0.1, check=True)
    lead = (2,) if many else ()
    weights = rng.standard_normal((*lead, steps + 1, batch, n))
    grads = run.backward(weights)
    assert run.last.shape == (batch, n)
    assert grads.u0.shape == (*lead, batch, n)
    alone = TimeSteps(one, system.pattern, method, **about)
    gain, dt = np.zeros((*lead, n)), np.zeros(lead)
    close = 2e-5 if how == "forward" else 1e-7
    assert run.states is not None
    for k in range(batch):
        own_params = {"decay": decay[k], "gain": params["gain"]}
        other = alone.forward(u0[k], own_params, steps=steps, dt=0.1)
        assert_close(run.states[:, k], other.states)
        expected = other.backward(weights[..., k, :])
        assert_close(grads.u0[..., k, :], expected.u0, close)
        assert_close(grads.params["decay"][..., k], expected.params["decay"], close)
        gain, dt = gain + expected.params["gain"], dt + expected.dt
    assert_close(grads.params["gain"], gain, close)
    assert_close(grads.dt, dt, close)


def test_functions_that_lose_samples_are_named() -> None:
    sim = TimeSteps(lambda u, t, p: u.sum(0), np.ones((2, 2)))
    with pytest.raises(InputError, match=r"rate returned .*expected \(3, 2\), for all samples"):
        sim.forward(np.ones((3, 2)), steps=1, dt=0.1)
    good = TimeSteps(lambda u, t, p: -u, np.eye(2)).forward(np.ones((3, 2)), steps=1, dt=0.1)
    with pytest.raises(InputError, match=r"grad_last has shape \(6,\); expected \(3, 2\) or"):
        good.backward(grad_last=np.ones(6))


def test_small_gradients_beside_large_ones_have_small_errors() -> None:
    """Pivots are chosen by size, whatever the scales of unknowns are."""
    rng, dt = np.random.default_rng(), 0.1
    for _ in range(20):
        jacobian = np.array([[-1, -1e16], [0.4, -20]]) * rng.uniform(0.5, 2, (2, 2))
        sim = TimeSteps(lambda u, t, p, jacobian=jacobian: jacobian @ u, np.ones((2, 2)))
        above = np.array([0.01, 2]) * rng.uniform(0.5, 2, 2)
        grads = sim.forward([1e8, 1e-8], steps=1, dt=dt).backward(grad_last=above)
        (a, b), (c, d) = np.eye(2) - dt * jacobian
        expected = np.array([d * above[0] - c * above[1], a * above[1] - b * above[0]])
        assert_close(grads.u0 * (a * d - b * c) / expected, np.ones(2), 1e-9)


def test_several_losses_are_one_call() -> None:
    second, rate = chain(20)
    rng = np.random.default_rng()
    run = TimeSteps(rate, second, "crank_nicolson").forward(
        rng.random(20), (0.2, 1.0), steps=9, dt=0.1
    )
    weights = rng.standard_normal((3, 10, 20))
    last = rng.standard_normal((3, 20))
    together = run.backward(weights, grad_last=last)
    by_function = run.backward(lambda k: weights[:, k], grad_last=last)
    for k in range(3):
        one = run.backward(weights[k], grad_last=last[k])
        for each in (together, by_function):
            assert_close(each.u0[k], one.u0)
            assert_close(each.dt[k], one.dt)
            assert_close([each.params[0][k], each.params[1][k]], one.params)
    only = run.backward(lambda k: last[0] if k == 9 else None)
    assert_close(only.u0, run.backward(grad_last=last[0]).u0)


@pytest.mark.parametrize("method", ["backward_euler", "sdirk3", "bdf2"])
def test_segments_hold_a_memory_limit(method: str) -> None:
    n, steps, limit = 100, 300, 100_000
    second, rate = chain(n)
    rng = np.random.default_rng()
    u0, last = rng.random(n), rng.standard_normal(n)
    sim = TimeSteps(
        rate,
        second,
        method,
        jacobian=lambda u, t, p: p[0] * second + sp.diags_array(p[1] * (1 - 2 * u)).tocsr(),
    )
    about: dict[str, Any] = {"steps": steps, "dt": 0.01, "rtol": 1e-10, "atol": 1e-12}
    whole = sim.forward(u0, (0.2, 1.0), **about)
    expected = whole.backward(grad_last=last)
    sim.forward(u0, (0.2, 1.0), steps=2, dt=0.01).backward(grad_last=last)  # imports
    tracemalloc.start()
    run = sim.forward(u0, (0.2, 1.0), memory_limit=limit, **about)
    grads = run.backward(grad_last=last)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The times, lengths and gradients of steps are inputs and outputs. What was read of the
    # function takes some dozens of vectors.
    assert peak < limit + 6 * 8 * steps + 150_000
    assert run.states is None
    assert whole.states is not None
    assert "at a time" in repr(run)
    assert_close(run.last, whole.last, 1e-9)
    assert_close(grads.u0, expected.u0)
    assert_close(grads.params, expected.params)
    assert_close(grads.dt, expected.dt)
    # Again, from the first segment, which is kept now.
    again = run.backward(grad_last=last)
    assert_close(again.u0, grads.u0)
    with pytest.raises(MemoryLimitError, match="300 steps of 100 unknowns take at least"):
        sim.forward(u0, (0.2, 1.0), memory_limit=10_000, **about)


def test_a_step_without_a_solution_keeps_those_before() -> None:
    sim = TimeSteps(lambda u, t, p: np.where(t > 0.45, np.nan, -u), np.eye(2))
    with pytest.raises(NewtonError, match=r"step 4 has no solution.*t=0\.4 with dt=0\.1") as caught:
        sim.forward([1.0, 2.0], steps=10, dt=0.1)
    run = caught.value.run
    assert run.steps == 4
    assert run.states.shape == (5, 2)
    assert_close(run.last, np.array([1.0, 2.0]) / 1.1**4)
    assert_close(run.backward(grad_last=[1.0, 0.0]).u0, [1.1**-4, 0])


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        (lambda u, t, p: u * u + 1e3, "may be too long to have a solution|iterations"),
        (lambda u, t, p: 10 * u, "singular"),
        (lambda u, t, p: np.full(2, np.inf), "not finite|Newton's direction"),
    ],
)
def test_newton_at_its_end_says_why(rate: Any, why: str) -> None:
    with pytest.raises(NewtonError, match=why):
        TimeSteps(rate, np.eye(2)).forward([1.0, 2.0], steps=3, dt=0.1)


@pytest.mark.parametrize("about", [{"steps": 2, "dt": 3.0}, {"until": 3.0, "dt": 0.5}])
def test_errors_of_newton_print_the_parameters(about: dict[str, Any]) -> None:
    sim = TimeSteps(lambda u, t, p: u * u + p["gain"] * p["field"].sum(), np.eye(1))
    params = {"field": np.array([1.0, 2.0]), "gain": 7.5}
    with pytest.raises(NewtonError, match=r"params={'field': \[1.0, 2.0\], 'gain': 7.5}"):
        sim.forward([1.0], params, **about)


def test_newton_finds_what_is_far() -> None:
    """Where full steps overshoot, they are halved."""
    sim = ImplicitSteps(lambda u, u_old, t, dt, p: np.arctan(u - p), np.eye(2))
    assert_close(sim.forward([20.0, -30.0], 1.0, steps=1, dt=1.0).last, [1.0, 1.0])


def test_rounding_of_a_large_equation_does_not_hide_a_small_one() -> None:
    """Each counts in its own scale where Newton's method asks whether a correction helps."""
    rng, tight = np.random.default_rng(), {"rtol": 1e-12, "atol": 1e-20}
    sim = ImplicitSteps(lambda u, u_old, t, dt, p: u ** [3, 2] - p, np.eye(2))
    for _ in range(20):
        p = np.array([1e-18, 10 ** rng.uniform(15, 17)])
        root = p ** [1 / 3, 1 / 2]
        u0 = root * 10 ** rng.uniform([-1, -0.3], [1, 0.3])
        assert_close(sim.forward(u0, p, steps=1, dt=1.0, **tight).last, root)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_keeps_what_is_there() -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        if t > 0.45:
            os.kill(os.getpid(), signal.SIGINT)
        return -u

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            TimeSteps(rate, np.eye(1)).forward([1.0], steps=10**6, dt=0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    run: Any = caught.value.run  # type: ignore[attr-defined]
    assert run.steps == 4
    assert_close(run.last, [1.1**-4])


def test_a_pattern_that_lacks_an_entry_is_named() -> None:
    rng = np.random.default_rng()
    n = int(rng.integers(3, 30))
    row, column = (int(each) for each in rng.choice(n, 2, replace=False))

    def rate(u: Any, t: Any, p: Any) -> Any:
        moved = -u
        moved[row] += 2 * u[column]
        return moved

    sim = TimeSteps(rate, np.eye(n))
    with pytest.raises(GradientError, match=f"equation {row} depends on unknown {column}"):
        sim.forward(rng.random(n), steps=1, dt=0.1, check=True)
    full = np.eye(n)
    full[row, column] = 1
    TimeSteps(rate, full).forward(rng.random(n), steps=1, dt=0.1, check=True)
    wrong = TimeSteps(lambda u, t, p: -u, np.eye(n), jacobian=lambda u, t, p: np.full(n, -2.0))
    with pytest.raises(GradientError, match="pattern is wrong in row 0"):
        wrong.forward(rng.random(n), steps=1, dt=0.1, check=True)


def test_a_missing_entry_beside_a_large_one_is_named() -> None:
    """It shows where its column is differentiated together with another one of another scale."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([u[2], p * (3e-3 * u[0] - u[1]) + 1e7 * u[2], -u[2]])

    sim = TimeSteps(rate, np.array([[1, 0, 1], [0, 1, 1], [0, 0, 1]]))
    with pytest.raises(GradientError, match="pattern lacks an entry: equation 1 depends on unknow"):
        sim.forward([100.0, 1.0, 1.0], 2.0, steps=3, dt=0.1)


def test_functions_that_complex_steps_mislead_are_differenced() -> None:
    """``abs`` of a complex number has no derivative in the sense that is meant."""
    sim = TimeSteps(lambda u, t, p: -p * abs(u) * u, np.eye(2))

    def run(p: float) -> Any:
        return sim.forward([1.0, -2.0], p, steps=5, dt=0.1, rtol=1e-12, atol=1e-13)

    step = 1e-5
    slope = (run(1 + step).last - run(1 - step).last).sum() / (2 * step)
    assert run(1.0).backward(grad_last=[1.0, 1.0]).params == pytest.approx(slope, rel=1e-6)


# Rates with their initial state and parameter, and whether complex steps mislead there. What an
# unknown or a parameter of another scale does, or one that is small, or a branch entered later.
GUESSED: dict[str, tuple[Any, Any, float, bool]] = {
    "saturation": (lambda u, t, p: p / (p + 1e-14) - u, [0.5], 3.3e-14, False),
    "enzyme": (lambda u, t, p: -p * u / (u + 1e-9), [3e-9], 1e-9, False),
    "large": (lambda u, t, p: 1e15 - p * u, [1e15], 1e-15, False),
    "cube at 0": (lambda u, t, p: -p * u**3, [0.0], 1.0, False),
    "fall": (lambda u, t, p: 981 - p * abs(u) * u, [0.0], 0.03, True),
    "fall, beside": (
        lambda u, t, p: np.stack([981 - p * abs(u[0]) * u[0], 0 * u[1]]),
        [0.0, 1e5],
        0.03,
        True,
    ),
    "fast row": (
        lambda u, t, p: np.stack([-1e5 * u[0] + p * abs(u[1]) * u[1], -u[1]]),
        [1.0, 1.0],
        1e-3,
        True,
    ),
    "noise": (
        lambda u, t, p: np.stack([-p * abs(u[0]) - 1e6 * np.real(u[1]), 0 * u[1]]),
        [1e15, 1e-21],
        0.5,
        True,
    ),
    "even": (lambda u, t, p: -p * u * u / (9e12**2 + u * u), [0.0], 7e12, False),
    "parameter": (lambda u, t, p: abs(p) * 1e12 - u, [0.5], 1e-12, True),
    "sign": (lambda u, t, p: -p * np.sign(u) * u**2, [0.5, -1e-9], 2.0, True),
    "real": (lambda u, t, p: -p * np.real(u) + 0 * u, [0.5, -1e-9], 2.0, True),
    "later": (lambda u, t, p: -p * abs(u) if t > 0.35 else -p * u, [0.5], 2.0, True),
    "place": (lambda u, t, p: np.where(u < 0.5, -p * np.abs(u - 2), -p * u), [0.8], 1.0, True),
}


@pytest.mark.filterwarnings(UNREAD)
@pytest.mark.parametrize("how", [None, "unread", "forward", "complex"])
@pytest.mark.parametrize("name", GUESSED)
def test_derivatives_on_all_scales_are_right_or_refused(name: str, how: Any) -> None:
    """Beside autograd through the same steps; complex steps that mislead are refused if forced."""
    rate, u0, p, misleads = GUESSED[name]
    n, steps, dt = len(u0), 12, 0.1
    function = unread(rate) if how == "unread" else rate
    how = None if how == "unread" else how
    sim = TimeSteps(function, np.ones((n, n)), derivatives=how)

    def backward() -> Any:
        run = sim.forward(u0, p, steps=steps, dt=dt, rtol=1e-12, atol=1e-300, check=how is None)
        return run.states, run.backward(grad_last=np.ones(n))

    if (misleads and how == "complex") or (name == "large" and how == "forward"):
        with pytest.raises(GradientError, match=r"of rate .*derivatives='jax'"):
            backward()
        return
    states, grads = backward()
    exact: dict[str, Any] = {
        "fall, beside": lambda u, t, p: torch.stack([981 - p * abs(u[0]) * u[0], 0 * u[1]]),
        "fast row": lambda u, t, p: torch.stack([-1e5 * u[0] + p * abs(u[1]) * u[1], -u[1]]),
        "noise": lambda u, t, p: torch.stack([-p * abs(u[0]) - 1e6 * u[1], 0 * u[1]]),
        "sign": lambda u, t, p: -p * torch.sign(u) * u**2,
        "real": lambda u, t, p: -p * u,
        "place": lambda u, t, p: torch.where(u < 0.5, -p * torch.abs(u - 2), -p * u),
    }
    in_torch = exact.get(name, rate)
    above = np.ones(n)
    in_p = 0.0
    for k in range(steps, 0, -1):
        u = torch.tensor(states[k], requires_grad=True)
        q = torch.tensor(p, dtype=torch.float64, requires_grad=True)
        at = k * dt
        in_u = torch.autograd.functional.jacobian(lambda u: in_torch(u, at, q.detach()), u)  # noqa: B023
        above = np.linalg.solve(np.eye(n) - dt * in_u.numpy().T, above)
        found = in_torch(u.detach(), at, q) @ torch.tensor(above)
        in_p += dt * float(torch.autograd.grad(found, q)[0])
    np.testing.assert_allclose(grads.u0, above, rtol=1e-6, atol=1e-11)
    np.testing.assert_allclose(grads.params, in_p, rtol=1e-6)


@settings(max_examples=times(20), deadline=None)
@given(st.floats(-15, 15), st.floats(-15, 15), st.sampled_from([None, "forward"]))
def test_numbers_that_are_0_have_a_scale_of_their_own(
    scale: float, beside: float, how: Any
) -> None:
    """Another unknown, of another scale, does not show it."""
    a = 10.0**scale
    sim = TimeSteps(
        lambda u, t, p: np.stack([-a - abs(u[0]) * u[0] / a, 0 * u[1]]),
        np.eye(2),
        "euler",
        derivatives=how,
    )
    run = sim.forward([0.0, 10.0**beside], steps=1, dt=1.0)
    np.testing.assert_allclose(run.backward(grad_last=[1.0, 1.0]).u0, [1.0, 1.0], rtol=1e-6)


@settings(max_examples=long_times(20, 40), deadline=None)
@given(st.floats(-15, 15), st.floats(-3, 3), st.sampled_from([None, "forward"]))
def test_a_curve_at_0_is_no_kink(scale: float, share: float, how: Any) -> None:
    """Long steps, up to a wall, have other slopes on both sides, which excuse no wrong one."""
    a = 10.0**scale

    def rate(u: Any, t: Any, p: Any) -> Any:
        curve = 10.0**share * a * u**2 / (a**2 + u**2)
        return curve - p * np.real(u) - np.maximum(u - 2 * a, 0)

    run = TimeSteps(rate, np.eye(1), derivatives=how).forward([0.0], 0.5, steps=4, dt=0.1)
    found = run.backward(grad_last=[1.0]).u0
    np.testing.assert_allclose(found, [1.05**-4], rtol=1e-5)


def test_small_errors_of_complex_steps_do_not_add_up() -> None:
    """Each is a small share of a row, but there are many steps."""
    p, dt, steps = 7e-5, 0.1, 12
    sim = ImplicitSteps(
        lambda u, old, t, dt, p: u - old - dt * (1 - p * abs(u) * u), np.eye(1), np.eye(1)
    )
    run = sim.forward([0.0], p, steps=steps, dt=dt, rtol=1e-12, atol=1e-15)
    exact = np.prod(1 / (1 + 2 * dt * p * run.states[1:]))
    assert run.backward(grad_last=[1.0]).u0[0] == pytest.approx(exact, rel=1e-5)


@settings(max_examples=times(20), deadline=None)
@given(st.floats(0, 9), st.floats(-1, 1), st.floats(-10, -5))
def test_newton_ends_when_all_unknowns_are_found(size: float, decay: float, near: float) -> None:
    """One that is solved for in one iteration says nothing of how fast others converge."""
    dt, rtol, steps = 0.1, 1e-12, 30
    fast, slow, start = 10.0**size, 10.0**decay, 10.0**near

    def decay_at(t: Any) -> Any:
        return slow * (1 + 0.5 * np.sin(5 * t))

    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([fast * np.cos(3 * t) + 0 * u[0], -decay_at(t) * (u[1] - 1)])

    run = TimeSteps(rate, np.eye(2)).forward(
        [fast, 1 + start], steps=steps, dt=dt, rtol=rtol, atol=1e-15
    )
    assert run.states is not None
    old, new = run.states[:-1, 1], run.states[1:, 1]
    at = dt * decay_at(dt * np.arange(1, steps + 1))
    assert (np.abs((new - old + at * (new - 1)) / (1 + at)) <= rtol).all()


@pytest.mark.filterwarnings(UNREAD)
def test_comparisons_are_few_once_a_simulation_is_known() -> None:
    """Complex steps are compared at all states of a first run, if it is short, and at few later."""
    calls = 0

    def rate(u: Any, t: Any, p: Any) -> Any:
        nonlocal calls
        calls += not any(map(np.iscomplexobj, (u, t, p)))
        return np.sin(t) - p * u**2

    sim, found = TimeSteps(rate, np.eye(2)), []
    for _ in range(4):
        run = sim.forward([0.5, 1.0], 0.3, steps=100, dt=0.01)
        calls = 0
        run.backward(grad_last=[1.0, 1.0])
        found.append(calls)
    assert found[0] >= 16
    assert min(found[1:]) <= 6


def test_a_small_parameter_that_rounding_hides_is_refused() -> None:
    """If differences ask for it; what is read has a derivative."""

    def run(how: Any) -> Any:
        sim = TimeSteps(lambda u, t, p: abs(p) - u, np.eye(1), derivatives=how)
        return sim.forward([0.5], 1e-12, steps=5, dt=0.1)

    assert run(None).backward(grad_last=[1.0]).params == pytest.approx(1 - 1.1**-5)
    by_steps = run("forward")
    with pytest.raises(GradientError, match=r"do not tell the derivative in params: .*rounding"):
        by_steps.backward(grad_last=[1.0])


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("how", [None, "forward"])
def test_an_entry_that_matters_later_is_named(how: Any, check: bool) -> None:
    """A ball falls on a stiff wall."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        return np.stack([u[1], -9.81 + np.where(u[0] < 0, -1e4 * u[0] * p, 0)])

    def run(pattern: Any, check: bool) -> Any:
        sim = TimeSteps(rate, np.array(pattern), derivatives=how)
        found = sim.forward([1.0, 0.0], 1.0, steps=100, dt=0.01, check=check)
        return found.backward(grad_last=[1.0, 0.0])

    with pytest.raises(GradientError, match="pattern lacks an entry: equation 1 depends on unkn"):
        run([[0, 1], [0, 0]], check)
    run([[0, 1], [1, 0]], check)


@pytest.mark.parametrize("scale", [1e-15, 1e-5, 1.0, 1e5, 1e15])
def test_right_jacobians_pass_and_wrong_ones_do_not_on_all_scales(scale: float) -> None:
    rng = np.random.default_rng()
    n = 9
    weights = np.eye(n) + (rng.random((n, n)) < 0.3)
    beside = 10.0 ** rng.uniform(-5, 5, n) * scale  # each unknown has a scale of its own

    def rate(u: Any, t: Any, p: Any) -> Any:
        x = u / beside
        return beside * (weights @ (x - x**3))

    def jacobian(factor: float) -> Any:
        def values(u: Any, t: Any, p: Any) -> Any:
            found = beside[:, None] * weights * ((1 - 3 * (u / beside) ** 2) / beside)
            found[2, 2] *= factor
            return sp.csr_array(np.where(weights != 0, found, 0))

        return values

    u0 = beside * rng.uniform(0.1, 0.5, n)
    for pattern, factor in ((weights, 1.0), (weights, 1.01)):
        sim = TimeSteps(rate, pattern, jacobian=jacobian(factor))
        about: dict[str, Any] = {"steps": 2, "dt": 1e-3, "atol": 1e-12 * scale, "check": True}
        if factor == 1:
            sim.forward(u0, **about)
            continue
        with pytest.raises(GradientError, match="pattern is wrong in row 2"):
            sim.forward(u0, **about)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize(("count", "named"), [(3, r"params\['k'\]\[2\]"), (300, "params")])
@pytest.mark.parametrize("samples", [None, 2])
def test_right_products_pass_and_wrong_ones_do_not(
    scale: float, count: int, named: str, samples: int | None
) -> None:
    rng = np.random.default_rng()
    n = 9
    beside = 10.0 ** rng.uniform(-5, 5, n) * scale  # each unknown has a scale of its own
    weights, k = rng.standard_normal((n, count)), 10.0 ** rng.uniform(-5, 5, count)
    k[1] = 0

    def rate(u: Any, t: Any, p: Any) -> Any:
        return beside * (weights @ (p["k"] / 10.0**5)) ** 2 - p["d"] * abs(u)

    def vjp(factor: float) -> Any:
        def product(above: Any, u: Any, t: Any, p: Any) -> Any:
            inner = above * beside * 2 * (weights @ (p["k"] / 10.0**5)) / 10.0**5
            found = (inner @ weights) if samples is None else (inner @ weights).sum(0)
            found[2] *= factor
            return {"k": found, "d": -(above * abs(u)).sum()}

        return product

    u0 = beside * rng.uniform(0.1, 0.5, n if samples is None else (samples, n))
    k[2] = 10.0**5  # so that its product matters among many
    for factor in (1.0, 2.0):
        sim = TimeSteps(rate, np.eye(n), vjp=vjp(factor))
        about: dict[str, Any] = {"steps": 2, "dt": 1e-3, "atol": 1e-12 * scale, "check": True}
        if factor == 1:
            sim.forward(u0, {"k": k, "d": 0.3}, **about)
            continue
        with pytest.raises(GradientError, match=f"vjp is wrong in {named}: differences of rate"):
            sim.forward(u0, {"k": k, "d": 0.3}, **about)


@settings(max_examples=times(5), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_simulations_on_all_scales(seed: int) -> None:
    assert fuzz_simulations.simulate(seed, 0) not in fuzz_simulations.FAULTS


@pytest.mark.slow
def test_many_random_simulations_on_all_scales() -> None:
    counts = fuzz_simulations.run(int(np.random.default_rng().integers(2**32)), range(300))
    assert not any(counts[each] for each in fuzz_simulations.FAULTS), counts
    smooth = [count for name, count in counts.items() if name.startswith("smooth")]
    assert counts["smooth: refused"] + counts["missed a solution"] <= 0.02 * sum(smooth), counts


@pytest.mark.parametrize("method", ["sdirk2", "bdf2", "rk4"])
def test_functions_of_jax_and_of_numba(method: str) -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng()
    n = 12
    second, _ = chain(n)
    matrix = second.toarray()

    def in_jax(u: Any, t: Any, p: Any) -> Any:
        assert u.dtype == np.float64
        moved = p["d"] * (jax.numpy.asarray(matrix) @ u)
        return moved - u**3 + jax.numpy.sin(3 * t) * p["f"]

    @numba.njit
    def in_numba(u: Any, t: Any, p: Any) -> Any:
        found = p[1:] * np.sin(3 * t) - u**3
        for i in range(len(u)):
            for k in range(max(i - 1, 0), min(i + 2, len(u))):
                found[i] += p[0] * (-2 if i == k else 1) * u[k]
        return found

    def plain(u: Any, t: Any, p: Any) -> Any:
        return p["d"] * (second @ u) - u**3 + np.sin(3 * t) * p["f"]

    d, f = 0.3, rng.standard_normal(n)
    u0, weights = rng.random(n), rng.standard_normal((8, n))
    found = []
    for function, how in ((plain, None), (in_jax, "jax"), (in_numba, None)):
        sim = TimeSteps(function, second, method, derivatives=how)  # type: ignore[arg-type]
        params = np.array([d, *f]) if function is in_numba else {"d": d, "f": f}
        run = sim.forward(u0, params, steps=7, dt=0.05, rtol=1e-11, atol=1e-12)
        grads = run.backward(weights)
        own = grads.params
        own = own if function is in_numba else np.array([own["d"], *own["f"]])
        found.append([*grads.u0, *own, grads.dt])
    assert_close(found[1], found[0], 1e-9)
    assert_close(found[2], found[0], 1e-7)
    # Whoever calls it has the precision of JAX that was there before.
    assert jax.numpy.ones(1).dtype == np.float32


def test_calls_for_a_jacobian_do_not_grow_with_the_grid() -> None:
    for n in np.random.default_rng().integers(4, 40, 3).tolist():
        line, one = chain(n)[0], sp.eye_array(n)
        grid = sp.csr_array(sp.kron(line, one) + sp.kron(one, line))
        counts = [Coloured(read_pattern("p", each, None)).groups for each in (line, grid)]
        assert counts[0] == 3
        assert 5 <= counts[1] <= 7


def test_fields_of_parameters_have_patterns_or_functions() -> None:
    rng = np.random.default_rng()
    n = 500
    second, _ = chain(n)
    field, u0, last = rng.uniform(0.5, 1, n), rng.random(n), rng.standard_normal(n)

    def rate(u: Any, t: Any, p: Any) -> Any:
        return p["field"] * (second @ u)

    params = {"field": field}
    run = TimeSteps(rate, second, derivatives="complex").forward(u0, params, steps=3, dt=0.1)
    with pytest.raises(InputError, match="500 numbers without a pattern"):
        run.backward(grad_last=last)
    pattern = {"field": sp.eye_array(n)}
    coloured = TimeSteps(rate, second, derivatives="complex", param_patterns=pattern)
    given = TimeSteps(rate, second, vjp=lambda above, u, t, p: {"field": above * (second @ u)})
    found = [
        sim.forward(u0, params, steps=3, dt=0.1).backward(grad_last=last).params["field"]
        for sim in (coloured, given)
    ]
    assert_close(found[0], found[1], 1e-10)
    state, expected = u0, np.zeros(n)
    matrix = np.eye(n) - 0.1 * field[:, None] * second.toarray()
    states = [state := np.linalg.solve(matrix, state) for _ in range(3)]
    above = last
    for state in reversed(states):
        above = np.linalg.solve(matrix.T, above)
        expected += 0.1 * above * (second @ state)
    assert_close(found[0], expected, 1e-7)


def test_what_is_given_stays_as_it_is() -> None:
    second, rate = chain(10)
    u0, p, dt = np.linspace(0, 1, 10), np.array([0.2, 1.0]), np.full(4, 0.1)
    kept = [each.copy() for each in (u0, p, dt, second.data)]
    run = TimeSteps(rate, second).forward(u0, p, dt=dt)
    p[:], dt[:], u0[:] = 7, 7, 7
    before = run.backward(grad_last=np.ones(10))
    second.data[:] = kept[3]
    u0[:], p[:], dt[:] = kept[:3]
    after = TimeSteps(rate, second).forward(u0, p, dt=dt).backward(grad_last=np.ones(10))
    assert np.array_equal(before.u0, after.u0)
    assert np.array_equal(before.params, after.params)
    assert isinstance(run.states, np.ndarray)
    assert not run.states.flags.writeable

    def writes(u: Any, t: Any, p: Any) -> Any:
        u *= 0
        return u

    with pytest.raises(ValueError, match="read-only"):
        TimeSteps(writes, second).forward(u0, p, dt=dt)


def test_parameters_are_read_only() -> None:
    """A function that wrote to them would change the steps to come."""

    def writes(u: Any, t: Any, p: Any) -> Any:
        p["field"] *= 2
        return -p["field"] * u

    sim = TimeSteps(writes, np.eye(2), derivatives="forward")
    with pytest.raises(ValueError, match="read-only"):
        sim.forward([1.0, 2.0], {"field": np.ones(2)}, steps=2, dt=0.1)


@pytest.mark.parametrize("until", [None, 1.0])
def test_a_bar_counts_the_steps(until: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    seen = []

    class Bar(tqdm.tqdm):  # type: ignore[misc, name-defined]
        def close(self) -> None:
            seen.append((self.n, self.total))
            super().close()

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    end = {"steps": 7} if until is None else {"until": until}
    run = sim.forward([1.0, 2.0], dt=0.1, progress=True, **end)  # type: ignore[arg-type]
    assert seen[0] == (run.steps, 7 if until is None else None)


@pytest.mark.filterwarnings(UNREAD)
def test_a_function_may_return_one_array_each_time() -> None:
    second, _ = chain(10)
    room = np.empty(10)

    def rate(u: Any, t: Any, p: Any) -> Any:
        np.subtract(p * (second @ u), u * u, out=room)
        return room

    u0 = np.linspace(0, 1, 10)
    for how in ("forward", None):
        run = TimeSteps(rate, second, derivatives=how).forward(u0, 0.2, steps=4, dt=0.1)
        plain = TimeSteps(lambda u, t, p: p * (second @ u) - u * u, second)
        expected = plain.forward(u0, 0.2, steps=4, dt=0.1)
        assert_close(run.backward(grad_last=u0).u0, expected.backward(grad_last=u0).u0)


@pytest.mark.parametrize(
    ("unknown", "instead"),
    [
        ("events", "no events are looked for; t_eval takes times"),
        ("max_step", "max_dt takes the greatest length"),
        ("tolerance", r"check, progress\b"),
    ],
)
def test_keywords_of_others_are_named(unknown: str, instead: str) -> None:
    sim = TimeSteps(good, np.eye(2))
    pattern = f"^{unknown} is no argument of forward; expected some of u0, params, .*{instead}"
    with pytest.raises(InputTypeError, match=pattern):
        sim.forward([1.0, 2.0], steps=1, dt=0.1, **{unknown: 1.0})  # type: ignore[arg-type]


def test_what_a_function_raises_is_its_own() -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        if np.any(u > 1.5):
            raise ArithmeticError("too much")
        return np.multiply(t, u)  # which the time before the state would suit, too

    with pytest.raises(ArithmeticError, match="too much"):
        TimeSteps(rate, np.eye(2), "heun").forward([1.0, 1.0], t0=1.0, steps=30, dt=0.1)


GOOD: dict[str, Any] = {"u0": [1.0, 2.0], "steps": 3, "dt": 0.1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"u0": [1.0]}, r"u0 has shape \(1,\).*expected 2 real numbers"),
        ({"u0": [1j, 1]}, "u0 has shape.*complex128"),
        ({"steps": None}, "steps is None"),
        ({"steps": -1}, "steps is -1"),
        ({"dt": [0.1, 0.1]}, "dt has 2 lengths; expected 3"),
        ({"dt": 0.0}, "dt is 0.0 in step 0; expected positive"),
        ({"dt": 0.0, "steps": 0}, "dt is 0.0 in step 0; expected positive"),
        ({"dt": [[0.1], [0.1, 0.1]]}, r"dt is \[\[0.1\], .*; expected numbers"),
        ({"dt": None}, "dt is None"),
        ({"dt": 1j}, "dt is 1j"),
        ({"u0": [[1.0, 2.0], [1.0]]}, r"u0 is \[\[1.0, 2.0\], .*; expected numbers"),
        ({"u0": None}, "u0 has shape"),
        ({"u0": "ab"}, "u0 has shape"),
        ({"t0": np.nan}, "t0 is nan; expected a finite number"),
        ({"t0": np.inf}, "t0 is inf; expected a finite number"),
        ({"t0": "now"}, "t0 is 'now'; expected a number"),
        ({"t0": None}, "t0 is None; expected a number"),
        ({"t0": [0.0]}, "t0 is .*; expected a number"),
        ({"t0": 1j}, "t0 is 1j; expected a number"),
        ({"rtol": None}, "rtol is None; expected a number"),
        ({"atol": "small"}, "atol is 'small'; expected a number"),
        ({"atol": [1e-9, 1e-9]}, "atol is .*; expected a number"),
        ({"dt": [0.1, -1.0, 0.1]}, "dt is -1.0 in step 1"),
        ({"dt": "fast"}, "dt is 'fast'"),
        ({"rtol": 0.0}, "rtol is 0.0"),
        ({"atol": np.nan}, "atol is nan"),
        ({"memory_limit": -1}, "memory_limit is -1"),
        ({"params": {"a": "x"}}, r"params\['a'\] has dtype"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    with pytest.raises((InputError, InputTypeError), match=message):
        sim.forward(**(GOOD | changed))


def good(u: Any, t: Any, p: Any) -> Any:
    return -u


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeSteps(3, np.eye(2)), "rate is 3; expected a function"),
        (lambda: TimeSteps(good, np.ones((2, 3))), r"pattern has shape \(2, 3\)"),
        (lambda: TimeSteps(good, "all"), "pattern is 'all'"),
        (lambda: TimeSteps(good, np.eye(2), "leapfrog"), "method is 'leapfrog'.*backward_euler"),
        (
            lambda: TimeSteps(good, np.eye(2), "rk4", mass=np.eye(2)),
            "mass is given for method 'rk4'",
        ),
        (lambda: TimeSteps(good, np.eye(2), mass=np.eye(3)), r"mass has shape \(3, 3\)"),
        (lambda: TimeSteps(good, np.eye(2), derivatives="exact"), "derivatives is 'exact'"),
        (lambda: TimeSteps(good, np.eye(2), vjp=1), "vjp is 1; expected a function"),
        (
            lambda: TimeSteps(abs, np.eye(2)),
            r"rate takes \(x\); expected rate\(u, t, p\), the",
        ),
        (
            lambda: TimeSteps(lambda t, u: -u, np.eye(2)),
            r"rate takes \(t, u\); expected rate",
        ),
        (lambda: TimeSteps(lambda t, u, p: -u, np.eye(2)), r"rate takes \(t, u, p\); .* SciPy's"),
        (lambda: TimeSteps(lambda time, u, p: -u, np.eye(2)), r"rate takes \(time, u, p\)"),
        (lambda: ImplicitSteps(good, np.eye(2)), r"takes \(u, t, p\); expected residual\(u, u_old"),
        (
            lambda: ImplicitSteps(lambda *_: 0, np.eye(2), np.eye(3)),
            r"pattern_old has shape \(3, 3\)",
        ),
    ],
)
def test_bad_simulations_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((InputError, InputTypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda u, t, p: u[:1], r"rate returned .* of shape \(1,\).*expected 2 real numbers"),
        (lambda u, t, p: u + 1j, "rate returned .*complex128"),
        (lambda u, t, p: None, "rate returned None"),
        (lambda x, y, p: -y, "rate takes the time before the state; expected rate.u, t, p., the"),
        (lambda x, y, p: [-y[1], y[0]], "rate takes the time before the state"),
    ],
)
def test_bad_results_are_named(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TimeSteps(function, np.eye(2)).forward([1.0, 2.0], steps=3, dt=0.1)
    bad = TimeSteps(lambda u, t, p: -u, np.eye(2), jacobian=lambda u, t, p: np.ones((2, 2)))
    with pytest.raises(InputError, match=r"jacobian returned .*expected 2 values in the order"):
        bad.forward([1.0, 2.0], steps=3, dt=0.1)
    other = TimeSteps(
        lambda u, t, p: -u, np.eye(2), jacobian=lambda *_: sp.csr_array(np.ones((2, 2)))
    )
    with pytest.raises(InputError, match=r"jacobian returned a matrix .* with 4 entries"):
        other.forward([1.0, 2.0], steps=3, dt=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "grad_states and grad_last are None"),
        ({"grad_states": np.ones((3, 2))}, r"grad_states has shape \(3, 2\); expected \(4, 2\)"),
        ({"grad_last": np.ones(3)}, r"grad_last has shape \(3,\); expected \(2,\)"),
        ({"grad_last": [1j, 0]}, "grad_last is"),
        ({"grad_states": np.ones((2, 4, 2)), "grad_last": np.ones(2)}, "one number of losses"),
        ({"grad_states": lambda k: np.ones((k, 2))}, r"grad_states\(2\) has shape \(2, 2\)"),
    ],
)
def test_bad_gradients_are_named(given: dict[str, Any], message: str) -> None:
    run = TimeSteps(lambda u, t, p: -u, np.eye(2)).forward([1.0, 2.0], steps=3, dt=0.1)
    with pytest.raises((InputError, InputTypeError), match=message):
        run.backward(**given)


@pytest.mark.parametrize("limit", [None, 30_000])
@pytest.mark.parametrize("method", ["sdirk2", "bdf2"])
def test_backward_passes_have_the_same_bits(method: str, limit: int | None) -> None:
    second, rate = chain(40)
    rng = np.random.default_rng()
    run = TimeSteps(rate, second, method).forward(
        rng.random(40), (0.2, 1.0), steps=40, dt=0.1, memory_limit=limit
    )
    weights = rng.standard_normal(40)
    first = run.backward(grad_last=weights)
    run.backward(grad_last=rng.standard_normal(40))
    again = run.backward(grad_last=weights)
    assert again.u0.tobytes() == first.u0.tobytes()
    assert np.array(again.params).tobytes() == np.array(first.params).tobytes()
    assert again.dt == first.dt


def test_threads_share_a_run() -> None:
    second, rate = chain(50)
    rng = np.random.default_rng()
    run = TimeSteps(rate, second).forward(
        rng.random(50), (0.2, 1.0), steps=30, dt=0.1, memory_limit=40_000
    )
    weights = rng.standard_normal((8, 50))
    expected = [run.backward(grad_last=each).u0 for each in weights]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: run.backward(grad_last=each).u0, weights))
    for own, other in zip(found, expected, strict=True):
        assert_close(own, other)


def test_no_steps_are_the_identity() -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    run = sim.forward([1.0, 2.0], steps=0, dt=0.1, check=True)
    assert run.states is not None
    assert run.states.tolist() == [[1, 2]]
    grads = run.backward(grad_last=[3.0, 4.0])
    assert grads.u0.tolist() == [3, 4]
    assert grads.dt == 0
    assert grads.params is None


@settings(max_examples=times(20), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_factors_of_matrices_half_of_whose_rows_are_diagonal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    dense = rng.standard_normal((n, n)) * (rng.random((n, n)) < rng.uniform(0, 1))
    alone = rng.permutation(n)[: int(rng.integers(0, n + 1))]
    dense[alone] = 0
    dense[np.arange(n), np.arange(n)] = n + rng.random(n)
    matrix = sp.csr_array(dense)
    solve = Matrices(Pattern(matrix)).factorise(matrix.data)
    assert solve is not None
    for x in (rng.standard_normal(n), rng.standard_normal((n, 3))):
        np.testing.assert_allclose(solve(x, False), np.linalg.solve(dense, x), atol=1e-12)
        np.testing.assert_allclose(solve(x, True), np.linalg.solve(dense.T, x), atol=1e-12)
    matrix.data[matrix.indptr[alone]] = 0  # of rows with one entry
    assert not len(alone) or Matrices(Pattern(sp.csr_array(dense))).factorise(matrix.data) is None


def test_compiled_powers_of_numbers_that_become_negative() -> None:
    """Complex powers go through logarithms there, which have no derivative below zero."""

    @numba.njit
    def compiled(u: Any, t: Any, p: Any) -> Any:
        return -(u**3) - p

    def plain(u: Any, t: Any, p: Any) -> Any:
        return -(u * u * u) - p

    grads = []
    for rate in (compiled, plain):
        run = TimeSteps(rate, np.eye(2)).forward([0.5, 0.7], 1.0, steps=20, dt=0.1)
        assert run.last.max() < 0
        grads.append(run.backward(grad_last=[1.0, -2.0]))
    assert_close(grads[0].u0, grads[1].u0, 1e-6)
    assert_close(grads[0].params, grads[1].params, 1e-6)


# -- Lengths that are chosen -----------------------------------------------------------------------

ADAPTIVE = [name for name in METHODS if name != "rk4"]


def oscillator(u: Any, t: Any, p: Any) -> Any:
    """Van der Pol's, which is slow for a while, and then fast."""
    return np.stack([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


@pytest.mark.parametrize("method", ADAPTIVE)
def test_chosen_lengths_keep_the_error(method: str) -> None:
    from scipy.integrate import solve_ivp

    p, until, u0 = 5.0, 8.0, [2.0, 0.0]
    exact = solve_ivp(lambda t, u: oscillator(u, t, p), (0, until), u0, rtol=1e-11, atol=1e-12)
    sim = TimeSteps(oscillator, np.ones((2, 2)), method)
    counts, errors = [], []
    is_high = method != "bdf2" and TABLEAUS[method].order > 3
    for error in (1e-4, 1e-7) if is_high else (1e-3, 1e-4):
        run = sim.forward(u0, p, dt=0.01, until=until, error=(error, error))
        assert run.times[-1] == pytest.approx(until, rel=1e-12)
        lengths = np.diff(run.times)
        assert lengths.max() > 5 * lengths.min()
        counts.append(run.steps)
        errors.append(np.abs(run.last - exact.y[:, -1]).max())
    assert counts[1] > 1.5 * counts[0]
    assert errors[1] < errors[0]
    # Gradients are those of the steps that were taken.
    assert run.states is not None
    exactly: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
    chosen = sim.forward(u0, p, dt=0.01, until=until, error=(1e-4, 1e-4), **exactly)
    fixed = sim.forward(u0, p, dt=np.diff(chosen.times), **exactly)
    weights = np.random.default_rng().standard_normal(2)
    found, expected = (each.backward(grad_last=weights) for each in (chosen, fixed))
    assert_close(found.u0, expected.u0, 1e-6)
    assert_close(found.params, expected.params, 1e-6)
    assert_close(found.dt, expected.dt, 1e-6)


@pytest.mark.parametrize("method", ["sdirk3", "bdf2", "heun"])
def test_chosen_lengths_within_a_memory_limit(method: str) -> None:
    sim = TimeSteps(oscillator, np.ones((2, 2)), method)
    about: dict[str, Any] = {"dt": 0.01, "until": 8.0, "error": (1e-5, 1e-5), "rtol": 1e-11}
    whole = sim.forward([2.0, 0.0], 5.0, **about)
    limited = sim.forward([2.0, 0.0], 5.0, memory_limit=9000, **about)
    assert limited.states is None
    assert limited.steps == whole.steps
    found, expected = (run.backward(grad_last=[1.0, 2.0]) for run in (limited, whole))
    assert_close(found.u0, expected.u0, 1e-6)
    assert_close(found.params, expected.params, 1e-6)


def test_chosen_lengths_of_residuals_of_ones_own() -> None:
    def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
        return u - u_old - dt * oscillator(u, t, p)

    sim = ImplicitSteps(residual, np.ones((2, 2)))
    runs = [
        sim.forward([2.0, 0.0], 5.0, dt=0.001, until=8.0, error=(error, error))
        for error in (1e-3, 1e-4)
    ]
    assert runs[1].steps > 2 * runs[0].steps
    exact = TimeSteps(oscillator, np.ones((2, 2)), "sdirk3").forward(
        [2.0, 0.0], 5.0, dt=0.01, until=8.0, error=(1e-7, 1e-7)
    )
    errors = [np.abs(run.last - exact.last).max() for run in runs]
    assert errors[1] < errors[0] / 2


def test_chosen_lengths_end_where_no_step_is_solved() -> None:
    sim = TimeSteps(lambda u, t, p: u * u, np.eye(1))  # it is infinite at t = 1
    with pytest.raises(NewtonError, match=r"dt=.*e-") as caught:
        sim.forward([1.0], dt=0.1, until=2.0)
    run: Any = caught.value.run
    assert 0.9 < run.times[-1] < 1.1
    assert run.states.shape == (run.steps + 1, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"until": "end"}, "until is 'end'; expected a number"),
        ({"until": np.nan}, "until is nan"),
        ({"until": np.inf}, "until is inf"),
        ({"until": 1.0, "steps": 3}, "until is given with the number"),
        ({"until": 1.0, "dt": [0.1, 0.2]}, "until is given with the number or the lengths"),
        ({"until": 1.0, "error": 1e-3}, "error is 0.001; expected two positive numbers"),
        ({"until": 1.0, "error": (1e-3,)}, "error is .*; expected two positive numbers"),
        ({"until": 1.0, "error": (1e-3, 0.0)}, r"error\[1\] is 0.0; expected a positive number"),
        ({"until": 1.0, "error": ("a", 1.0)}, r"error\[0\] is 'a'; expected a number"),
    ],
)
def test_bad_ends_are_named(changed: dict[str, Any], message: str) -> None:
    sim = TimeSteps(lambda u, t, p: -u, np.eye(2))
    with pytest.raises((InputError, InputTypeError), match=message):
        sim.forward(**({"u0": [1.0, 2.0], "dt": 0.1} | changed))
    with pytest.raises(InputError, match="rk4 has no error estimate"):
        TimeSteps(lambda u, t, p: -u, np.eye(2), "rk4").forward([1.0, 2.0], dt=0.1, until=1.0)

"""Functions of simulations that are read: exact derivatives of all that NumPy's users write."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from scipy import integrate, special

from sparsescan import GradientError, InputError, Pattern
from sparsescan.simulate import ImplicitSteps, TimeSteps, tape, traced

N = 6
_MATRIX = np.array([[1.5, -2.0, 0.0, 0.3, 0.0, 0.1]] * 3 + [[0.0, 0.2, 1.0, 0.0, -1.0, 2.0]] * 3)
_SPARSE = sp.csr_array(_MATRIX)
_TABLE = np.array([-2.0, -0.5, 0.3, 1.1, 4.0]), np.array([0.0, 1.0, -1.0, 2.0, 2.5])


def gradients(rate: Any, u0: Any, p: Any, weights: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return gradients of ``weights · f(u0, p)``, by a step of length 1, and where from."""
    sim = TimeSteps(rate, np.ones((len(u0), len(u0))), "euler", **options)
    run = sim.forward(u0, p, steps=1, dt=1.0, t0=0.25)
    grads = run.backward(grad_last=weights)
    return grads.u0 - weights, grads.params, run.derivatives


def by_differences(value: Callable[[Any], float], x: Any) -> Any:
    """Return a gradient by differences of sixth order, exact to 1e-9 of smooth functions."""
    factors = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    found, h = np.zeros(len(x)), 4e-3
    for k in range(len(x)):
        for m, factor in factors.items():
            step = m * h * np.eye(len(x))[k]
            found[k] += factor * (value(x + step) - value(x - step)) / h
    return found


def _in_place(u: Any, t: Any, p: Any) -> Any:
    du = np.zeros(N)
    du[1:-1] = u[2:] - 2 * u[1:-1] + u[:-2]
    du[0] = p[0] * u[1]
    du[-1] += p[1] * u[0] * u[-1]
    du *= 1.5
    view = du[::2]
    view -= u[:3]
    return du


def _loop(u: Any, t: Any, p: Any) -> Any:
    du = np.empty_like(u)
    for k in range(N):
        du[k] = p[0] * math.exp(-u[k]) - float(p[1]) * u[(k + 1) % N] ** 3
    return du


def _branches(u: Any, t: Any, p: Any) -> Any:
    if u[0] > 0 and t < 1:
        return [p[0] * v * abs(v) for v in u]
    return -u


def _unpacked(u: Any, t: Any, p: Any) -> Any:
    a, b, *rest = u
    gain, loss = p
    return np.array([gain * a * b, -loss * b, *(a * each for each in rest)])


def _lists(u: Any, t: Any, p: Any) -> Any:
    grid = u.reshape(2, 3)
    moved = np.roll(grid, 1, axis=1) + np.pad(grid, ((0, 0), (1, 0)))[:, :-1]
    return np.stack([moved[0] * p[0], moved.sum(0)]).ravel()


@numba.njit
def _compiled(u: Any, t: Any, p: Any) -> Any:
    out = np.empty_like(u)
    for k in range(len(u)):
        out[k] = -p[0] * u[k] ** 3 + p[1]
    return out


def _helper(u: Any) -> Any:
    out = np.ones(3)
    out[1] = u[1] * u[2]
    return out


_ROOM = np.empty(N)


def _plain_output(u: Any, t: Any, p: Any) -> Any:
    np.multiply(u, p[0], out=_ROOM)
    _ROOM[1:] -= u[:-1] ** 2
    return _ROOM


PAGE = (Path(__file__).parents[2] / "docs" / "how" / "reading.md").read_text()


def _lines(kind: str) -> list[str]:
    """Return the lines of code of a block of the page."""
    block = PAGE.partition(f":class: {kind}\n")[2].partition("```")[0]
    return [line for line in block.splitlines() if not line.startswith("#")]


def rate_of(line: str) -> Callable[..., Any]:
    """Return the rate that a line of the page is."""
    names = {"np": np, "math": math, "special": special, "integrate": integrate}
    names |= {"A": _MATRIX, "S": _SPARSE, "x": _TABLE[0], "y": _TABLE[1], "random": random.random}
    rate: Callable[..., Any] = eval(f"lambda u, t, p: {line}", names)
    return rate


WRITTEN: dict[str, Callable[..., Any]] = {
    "in place": _in_place,
    "loop": _loop,
    "branches": _branches,
    "unpacked": _unpacked,
    "grid": _lists,
    "numba": _compiled,
    "helper": lambda u, t, p: np.tile(_helper(u), 2) * p[0] + np.float64(u[0]),
    "plain output": _plain_output,
}
IDIOMS = WRITTEN | {line: rate_of(line) for line in _lines("read")}


@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_are_read_exactly(name: str) -> None:
    rng, rate = np.random.default_rng(3), IDIOMS[name]
    u0, p = rng.permutation(np.linspace(-1.37, 1.31, N)), rng.uniform(0.6, 1.4, 2)
    weights = rng.standard_normal(N)
    in_u, in_p, origin = gradients(rate, u0, p, weights)
    assert origin == "rate, which was read"

    def value(u: Any, p: Any) -> float:
        return float(weights @ np.asarray(rate(u, 0.25, p), float))

    scale = max(1.0, np.abs(in_u).max(), np.abs(in_p).max())
    expected = by_differences(lambda u: value(u, p), u0), by_differences(lambda p: value(u0, p), p)
    np.testing.assert_allclose(in_u, expected[0], rtol=0, atol=1e-7 * scale)
    np.testing.assert_allclose(in_p, expected[1], rtol=0, atol=1e-7 * scale)


# -- Random functions ------------------------------------------------------------------------------

_Step = tuple[str, int, int, float]
_KINDS = (
    *("add", "multiply", "divide", "sin", "exp", "tanh", "abs", "maximum", "where", "roll", "sum"),
    *("cumsum", "matrix", "slice", "write", "param", "power", "branch", "scalar", "time"),
)


def _run(program: list[_Step], xp: Any, scale: float, u: Any, t: Any, p: Any) -> Any:
    """Return what a random program computes of ``u / scale``, for NumPy and for PyTorch."""
    known = [u / scale]
    for kind, i, j, c in program:
        a, b = known[i % len(known)], known[j % len(known)]
        if kind == "add":
            found = a - c * b
        elif kind == "multiply":
            found = a * b
        elif kind == "divide":
            found = a / (1.5 + b * b)
        elif kind in ("sin", "exp", "tanh"):
            found = getattr(xp, kind)(c * xp.tanh(a) if kind == "exp" else c * a)
        elif kind == "abs":
            found = abs(a) * b
        elif kind == "maximum":
            found = xp.maximum(a, c * b)
        elif kind == "where":
            found = xp.where(a > c, xp.sqrt(xp.where(a > c, a - c, 1.0)), b)
        elif kind == "roll":
            found = xp.roll(a, 1 + i % 3)
        elif kind == "sum":
            found = a.sum() * b
        elif kind == "cumsum":
            found = xp.cumsum(a, 0) / len(a)
        elif kind == "matrix":
            matrix = np.cos(np.arange(len(a) ** 2).reshape(len(a), -1) * c)
            found = (torch.tensor(matrix) if xp is torch else matrix) @ a
        elif kind == "slice":
            found = xp.concatenate([a[1:], b[:1]])
        elif kind == "write":
            found = a.clone() if xp is torch else a.copy()
            found[::2] = b[::2] * c
            found[-1] += found[0]
        elif kind == "param":
            found = a * p[i % len(p)] + p[j % len(p)] ** 2
        elif kind == "power":
            found = (1 + a * a) ** c
        elif kind == "branch":
            found = a * b if a[j % len(a)] > c else a + c
        elif kind == "scalar":
            found = xp.stack([a[k] * b[-1 - k] for k in range(len(a))])
        else:
            found = a * xp.cos(c * t)
        known.append(xp.tanh(found) if kind in ("multiply", "sum", "power") else found)
    return scale * (known[-1] + 0.1 * sum(known[1:-1]) if len(known) > 2 else known[-1])


@settings(max_examples=examples(300), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    program=st.lists(
        st.tuples(
            st.sampled_from(_KINDS), st.integers(0, 30), st.integers(0, 30), st.floats(-1.5, 1.5)
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_random_functions_have_the_gradients_of_autograd(seed: int, program: list[_Step]) -> None:
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    scale = 10.0 ** rng.uniform(-15, 15)
    u0, p, weights = scale * rng.uniform(-2, 2, n), rng.uniform(-2, 2, m), rng.standard_normal(n)
    weights /= scale

    def rate(u: Any, t: Any, p: Any) -> Any:
        return _run(program, np, scale, u, t, p)

    leaves = [torch.tensor(each, requires_grad=True) for each in (u0, p)]
    at = torch.tensor(0.25, dtype=torch.float64)
    value = (_run(program, torch, scale, leaves[0], at, leaves[1]) * torch.tensor(weights)).sum()
    in_u, in_p, origin = gradients(rate, u0, p, weights)
    assert origin == "rate, which was read"
    expected = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    for found, exact, unit in zip((in_u, in_p), expected, (1 / scale, 1.0), strict=True):
        size = max(unit, float(exact.abs().max()))
        np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=1e-11 * size)


# -- What is told, and what is refused ------------------------------------------------------------


def test_branches_are_read_as_they_come() -> None:
    """A ball falls, bounces off a stiff wall, and meets the wind at a time."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        height, speed = u
        force = -p[0] - 0.1 * speed * abs(speed)
        if height < 0:
            force = force - p[1] * height
        if t > 0.7:
            force = force + p[0] / 2
        return np.array([speed, force])

    def last(p: Any) -> Any:
        return TimeSteps(rate, np.ones((2, 2))).forward(
            [1.0, 0.0], p, steps=100, dt=0.01, rtol=1e-13, atol=1e-14
        )

    p, step = np.array([9.81, 900.0]), np.array([1e-4, 1e-2])
    run = last(p)
    assert run.states[:, 0].min() < 0
    found = run.backward(grad_last=[1.0, 0.5]).params
    assert run.derivatives == "rate, which was read"
    for k, h in enumerate(step):
        moved = [last(p + sign * h * np.eye(2)[k]).last @ [1.0, 0.5] for sign in (1, -1)]
        assert found[k] == pytest.approx((moved[0] - moved[1]) / (2 * h), rel=1e-6)


def test_an_entry_that_a_pattern_lacks_is_named_however_small() -> None:
    sim = TimeSteps(lambda u, t, p: np.stack([u[0] + 1e-30 * u[1], u[1]]), np.eye(2))
    with pytest.raises(GradientError, match="pattern lacks an entry: equation 0 depends on unkn"):
        sim.forward([1.0, 1.0], steps=1, dt=0.1)
    # One that is 0 is none: this rate does not depend on the other unknown where it is positive.
    sim = TimeSteps(lambda u, t, p: np.stack([u[0] + np.minimum(u[1], 0), u[1]]), np.eye(2))
    run = sim.forward([1.0, 1.0], steps=2, dt=0.1)
    assert run.backward(grad_last=[1.0, 0.0]).u0 == pytest.approx([(1 / 0.9) ** 2, 0])
    with pytest.raises(GradientError, match="equation 0 depends on unknown 1"):
        sim.forward([1.0, -1.0], steps=2, dt=0.1)


@pytest.mark.parametrize("batch", [None, 3])
def test_patterns_are_read(batch: int | None) -> None:
    """Of each size that comes, and those of branches that came before are kept."""

    def rate(u: Any, t: Any, p: Any) -> Any:
        moved = np.roll(u, 1, -1) - u
        return np.concatenate([moved[..., :1] ** 2, p * moved[..., 1:]], -1)

    sim = TimeSteps(rate, method="crank_nicolson", mass=None)
    with pytest.raises(InputError, match="not known before forward"):
        sim.pattern  # noqa: B018
    for n in (5, 4):
        u0 = np.random.default_rng(n).random((n,) if batch is None else (batch, n))
        run = sim.forward(u0, 0.7, steps=3, dt=0.1)
        dense = sp.eye_array(n) + sp.eye_array(n, k=-1) + sp.eye_array(n, k=n - 1)
        assert sim.pattern == Pattern(sp.csr_array(dense))
        given = TimeSteps(rate, dense, "crank_nicolson").forward(u0, 0.7, steps=3, dt=0.1)
        found, expected = (each.backward(grad_last=np.ones_like(u0)) for each in (run, given))
        np.testing.assert_allclose(found.u0, expected.u0, rtol=1e-9, atol=1e-12)

    def late(u: Any, t: Any, p: Any) -> Any:
        return np.stack([u[1] if t > 5 else u[0], u[1]])

    sim = TimeSteps(late)
    with pytest.raises(GradientError, match=r"lacks an entry: equation 0 .* holds for the first"):
        sim.forward([1.0, 1.0], steps=9, dt=0.1, t0=4.5).backward(grad_last=[1.0, 1.0])
    sim.forward([1.0, 1.0], steps=2, dt=0.1, t0=6)
    sim.forward([1.0, 1.0], steps=9, dt=0.1, t0=4.5).backward(grad_last=[1.0, 1.0])
    own = ImplicitSteps(lambda u, old, t, dt, p: u - old + dt * u * old[::-1])
    own.forward([1.0, 2.0], steps=2, dt=0.1).backward(grad_last=[1.0, 1.0])
    assert (own.pattern.nnz, own.pattern_old.nnz) == (2, 4)


def test_patterns_that_cannot_be_read_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"pattern is None, and rate cannot be read: np\.roots"):
        TimeSteps(rate_of(_REFUSED[0][0])).forward([1.0, 2.0], [0.5], steps=1, dt=0.1)
    with pytest.raises(InputError, match="pattern is None; expected one for a function of JAX"):
        TimeSteps(lambda u, t, p: u, derivatives="jax")
    with pytest.raises(InputError, match="samples depend on each other"):
        TimeSteps(lambda u, t, p: u - u.mean(0)).forward(np.ones((2, 3)), steps=1, dt=0.1)
    with pytest.raises(InputError, match="u0 has shape"):
        TimeSteps(lambda u, t, p: u).forward([], steps=1, dt=0.1)


def test_many_parameters_need_no_pattern() -> None:
    rng = np.random.default_rng()
    u0, p, last = rng.random(400), rng.uniform(0.5, 1, 400), rng.standard_normal(400)
    sim = TimeSteps(lambda u, t, p: -p["rate"] * u, sp.eye_array(400))
    run = sim.forward(u0, {"rate": p}, steps=3, dt=0.1)
    expected = -0.3 * u0 * last / (1 + 0.1 * p) ** 4
    np.testing.assert_allclose(run.backward(grad_last=last).params["rate"], expected, rtol=1e-9)


class _Own:
    matrix = np.eye(N)


def _counts() -> Callable[..., Any]:
    calls = 0

    def rate(u: Any, t: Any, p: Any) -> Any:
        nonlocal calls
        calls += 1
        return -u * (1 + calls % 2)

    return rate


_REFUSED = [line.split("  # ") for line in _lines("refused")]
UNREAD: dict[str, tuple[Callable[..., Any], str]] = {
    "own": (lambda u, t, p: _Own().matrix.dot(-p[0] * u), "write A @ u .*test_reading.py, line"),
    "calls": (_counts(), "values that differ"),
    **{line: (rate_of(line), re.escape(why)) for line, why in _REFUSED},
}


@pytest.mark.parametrize("name", UNREAD)
def test_functions_that_cannot_be_read_are_told_once(name: str) -> None:
    rate, why = UNREAD[name]
    sim = TimeSteps(rate, np.ones((N, N)), "euler")

    def run() -> str:
        run = sim.forward(np.linspace(0.2, 2, N), [0.5, 1.0], steps=1, dt=0.1)
        try:
            run.backward(grad_last=np.ones(N))
        except GradientError:
            assert why == "values\\ that\\ differ\\ from\\ what\\ was\\ read" or name == "calls"
        return run.derivatives

    with pytest.warns(UserWarning, match=f"rate cannot be read: .*{why}"):
        assert run().startswith("complex steps or differences, which are compared: rate cannot")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_a_function_that_changes_during_a_pass_back_is_noticed() -> None:
    is_changed = False

    def rate(u: Any, t: Any, p: Any) -> Any:
        return -1.5 * u if is_changed else -u

    run = TimeSteps(rate, np.eye(1), "euler").forward([1.0], steps=20, dt=0.1)

    def above(k: int) -> Any:
        nonlocal is_changed
        is_changed = k <= 16
        return [1.0] if k == 20 else None

    with pytest.warns(UserWarning, match="rate cannot be read: values that differ"):
        run.backward(above)
    assert run.derivatives.endswith("values that differ from what was read")


def test_errors_of_functions_stay_as_they_are() -> None:
    def rate(u: Any, t: Any, p: Any) -> Any:
        raise ZeroDivisionError("one of mine")

    with pytest.raises(ZeroDivisionError, match="one of mine"):
        TimeSteps(rate, np.eye(1)).forward([1.0], steps=1, dt=0.1)
    with pytest.raises(InputError, match="rate returned"):
        TimeSteps(lambda u, t, p: u[:1], np.eye(2)).forward([1.0, 2.0], steps=1, dt=0.1)


class Growth:
    """A rate with attributes, one of which only matters above."""

    limit: Any = 1e3
    factor: Any = 2.0

    def __call__(self, u: Any, t: Any, p: Any) -> Any:
        return np.where(u > self.limit, -50.0 * u, self.factor * np.abs(u))


def test_a_function_is_read_again_only_if_it_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the numbers that it closes over, and attributes, do between runs."""
    readings = 0

    class Counted(tape.Tape):
        def __init__(self) -> None:
            nonlocal readings
            readings += 1
            super().__init__()

    monkeypatch.setattr(traced, "Tape", Counted)
    factor, growth = np.array([2.0]), Growth()
    closure = TimeSteps(lambda u, t, p: factor * np.abs(u), np.eye(1), "euler")
    for sim in (closure, TimeSteps(growth, np.eye(1), "euler")):
        readings = 0
        for value in (2.0, 2.0, 3.0, 3.0):
            factor[0] = growth.factor = value
            for _ in range(2):
                run = sim.forward([1.0], steps=1, dt=0.1)
                assert run.backward(grad_last=[1.0]).u0 == pytest.approx(1 + 0.1 * value)
        assert readings == 2
    growth.limit = 1.15
    run = sim.forward([1.0], steps=2, dt=0.1)
    assert run.backward(grad_last=[1.0]).u0 == pytest.approx(1.3 * -4)
    assert readings in (3, 4)


def test_residuals_of_ones_own_are_read() -> None:
    """With kinks in both states, and a gradient in the length of steps."""

    def residual(u: Any, old: Any, t: Any, dt: Any, p: Any) -> Any:
        return u - old + dt * p * np.abs(u) * u - 0.01 * np.maximum(old, 0) * dt

    def run(p: float, dt: float) -> Any:
        return ImplicitSteps(residual, np.eye(2), np.eye(2)).forward(
            [1.0, -2.0], p, steps=5, dt=dt, rtol=1e-13, atol=1e-14
        )

    own = run(0.7, 0.1)
    grads = own.backward(grad_last=[1.0, 3.0])
    assert own.derivatives == "residual, which was read"
    h, w = 1e-5, np.array([1.0, 3.0])
    in_p = (run(0.7 + h, 0.1).last - run(0.7 - h, 0.1).last) @ w / (2 * h)
    in_dt = (run(0.7, 0.1 + h).last - run(0.7, 0.1 - h).last) @ w / (2 * h)
    assert grads.params == pytest.approx(in_p, rel=1e-7)
    assert grads.dt == pytest.approx(in_dt, rel=1e-7)

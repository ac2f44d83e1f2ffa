"""Recursive filters of JAX's front door, beside SciPy's and a loop that JAX differentiates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from sampling import examples, slow

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.jax import lfilter, sosfilt

EPS = np.finfo(np.float64).eps


def by_loop(b: Any, a: Any, x: Any) -> Any:
    """Filter along the last axis, step by step."""
    steps = x.shape[-1]
    b, a = (each if each.ndim > 1 else each[None] for each in (b, a))
    rows = [
        jnp.moveaxis(jnp.broadcast_to(each, (*each.shape[:-2], steps, each.shape[-1])), -2, 0)
        for each in (b, a)
    ]

    def step(past: Any, of: Any) -> Any:
        """Carry the latest samples and results, the last one in front."""
        (xs, ys), (b_now, a_now, now) = past, of
        xs = jnp.concatenate([now[..., None], xs], -1)
        y = (b_now * xs).sum(-1) - (a_now[..., 1:] * ys).sum(-1)
        y = y / a_now[..., 0]
        return (xs[..., :-1], jnp.concatenate([y[..., None], ys], -1)[..., :-1]), y

    begin = tuple(jnp.zeros((*x.shape[:-1], each.shape[-1] - 1)) for each in (b, a))
    return jnp.moveaxis(jax.lax.scan(step, begin, (*rows, jnp.moveaxis(x, -1, 0)))[1], 0, -1)


class Case:
    """A random filter, stable on the whole, and samples for it."""

    def __init__(self, seed: int, most: int = 9) -> None:
        self.rng = np.random.default_rng(seed)
        self.axes = [int(n) for n in self.rng.integers(1, 4, self.rng.integers(0, 3))]
        self.steps = int(self.rng.integers(1, most))
        self.x = self.rng.standard_normal((*self.axes, self.steps))
        self.b, self.a = self.coefficients(), self.coefficients()
        taps = self.a.shape[-1]
        self.a /= 3 * taps
        self.a[..., 0] = np.where(self.a[..., 0] < 0, -1, 1) * (1 + np.abs(self.a[..., 0]))

    def coefficients(self) -> Any:
        taps, kind = int(self.rng.integers(1, 5)), self.rng.integers(4)
        lead = [n if self.rng.random() < 0.7 else 1 for n in self.axes]
        steps = self.steps if self.rng.random() < 0.7 else 1
        shape = ((taps,), (self.steps, taps), (1, taps), (*lead, steps, taps))[kind]
        return self.rng.standard_normal(shape)

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.b, self.a, self.x


def near(ours: Any, theirs: Any, factor: float = 1000 * EPS) -> None:
    for one, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.shape == right.shape
        scale = 1 + float(np.abs(right).max(initial=0))
        np.testing.assert_allclose(one, right, rtol=0, atol=factor * scale)


def penalty(run: Any) -> Any:
    return lambda *given: jnp.sin(run(*given)).sum()


# -- Values ----------------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_as_scipy(b_taps: int, a_taps: int, shape: list[int], has_zi: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(-len(shape), len(shape)))
    shape[axis] = int(rng.choice([0, 3, 300]))
    unit = rng.choice([1, 1j], 2)
    b, a = rng.standard_normal(b_taps) * unit[0], rng.standard_normal(a_taps) / (2 * a_taps)
    a[0] = rng.choice([1.0, -2.0, 0.5])
    x = rng.standard_normal(shape) * (1 + unit[1])
    if rng.random() < 0.3:
        a = a * np.exp(1j * np.arange(a_taps))
    if not has_zi:
        right = scipy.signal.lfilter(b, a, x, axis) if x.size else x.astype(np.result_type(b, a, x))
        found = lfilter(b, a, x, axis)
        assert found.dtype == right.dtype
        near(found, right)
        return
    shape[axis] = max(b_taps, a_taps) - 1
    zi = rng.standard_normal(shape)
    y, zf = lfilter(b, a, x, axis, zi)
    assert (y.shape, zf.shape) == (x.shape, zi.shape)
    if x.size:
        near([y, zf], scipy.signal.lfilter(b, a, x, axis, zi))
    elif not x.shape[axis]:
        near(zf, zi)
    if x.shape[axis]:  # constant coefficients, of each step
        steps = x.shape[axis]
        changing = [np.broadcast_to(each, (steps, len(each))) for each in (b, a)]
        near(lfilter(*changing, x, axis, zi), [y, zf])


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_sections_as_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sos = scipy.signal.butter(4, rng.uniform(0.1, 0.8), output="sos")
    axis = int(rng.integers(-3, 3))
    x = rng.standard_normal((2, 5, 9))
    near(sosfilt(sos, x, axis), scipy.signal.sosfilt(sos, x, axis))
    shape = [len(sos), *x.shape]
    shape[axis if axis < 0 else axis + 1] = 2
    zi = rng.standard_normal(shape)
    near(sosfilt(sos, x, axis, zi), scipy.signal.sosfilt(sos, x, axis, zi))
    changing = np.broadcast_to(sos, (x.shape[axis], *sos.shape))
    near(sosfilt(changing, x, axis), sosfilt(sos, x, axis))

    def one_by_one(sos: Any) -> Any:
        y = jnp.moveaxis(x, axis, -1)
        for each in sos:
            y = by_loop(each[:3], each[3:], y)
        return y

    whole = jax.jit(jax.grad(penalty(lambda sos: sosfilt(sos, x, axis))))
    near(whole(sos), jax.grad(penalty(one_by_one))(sos), 1e5 * EPS)


def test_float32() -> None:
    case = Case(3)
    given = [each.astype(np.float32) for each in case.inputs]
    y = jax.jit(lfilter)(*given)
    assert y.dtype == np.float32
    near(y, by_loop(*case.inputs), 1e-5)
    for numbers in ((1, 2.0), (0.5, 2)):
        y = lfilter(*numbers, given[2])
        assert y.dtype == np.float32
        near(y, given[2] * (numbers[0] / numbers[1]), 1e-6)


# -- Derivatives and transforms --------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_gradients(seed: int) -> None:
    case = Case(seed)
    args = tuple(range(3))
    near(lfilter(*case.inputs), by_loop(*case.inputs))
    found = jax.jit(jax.grad(jax.checkpoint(penalty(lfilter)), args))(*case.inputs)
    near(found, jax.grad(penalty(by_loop), args)(*case.inputs))


@pytest.mark.parametrize("seed", slow(0, 1))
def test_other_derivatives(seed: int) -> None:
    case = Case(seed, most=5)
    given, args = case.inputs, (0, 1, 2)
    near(*(jax.jacrev(each, args)(*given) for each in (lfilter, by_loop)))
    near(*(jax.jit(jax.hessian(penalty(each), args))(*given) for each in (lfilter, by_loop)))

    def twice(each: Any) -> Any:
        grads = jax.grad(penalty(each), args)
        return jax.grad(lambda *given: sum(jnp.cos(g).sum() for g in grads(*given)), args)

    near(*(jax.jit(twice(each))(*given) for each in (lfilter, by_loop)))


@pytest.mark.parametrize("kind", ["samples", "all", *slow("coefficients")])
def test_complex_derivatives(kind: str) -> None:
    """With delays, by differences; of both orders, in both modes, and of maps."""
    rng = np.random.default_rng()

    def made(what: str, *shape: int) -> Any:
        real = rng.standard_normal(shape) / 3
        return real + 1j * rng.standard_normal(shape) / 3 if kind in (what, "all") else real

    b, a = made("coefficients", 2), made("coefficients", 3)
    a[0] = 2
    given = b, a, made("samples", 2, 5), made("samples", 2, 2)
    run = jax.jit(lambda b, a, x, zi: lfilter(b, a, x, zi=zi))
    check_grads(run, given, order=2, rtol=1e-5, atol=1e-5)
    many = jax.vmap(run)(*(np.stack([each, 2 * each]) for each in given))
    near([each[1] for each in many], run(*(2 * each for each in given)))


@pytest.mark.parametrize("seed", [1, *slow(2)])
def test_maps(seed: int) -> None:
    """Over samples, over coefficients, and over both."""
    case = Case(seed)
    stacked = [np.stack([each, each / 2, each * 1.1]) for each in case.inputs]
    for flags in ((0, 0, 1), (1, 1, 0), (0, 1, 1)):
        dims = tuple(0 if flag else None for flag in flags)
        pairs = zip(stacked, case.inputs, flags, strict=True)
        given = [many if flag else one for many, one, flag in pairs]
        for run in (lambda f: f, lambda f: jax.grad(penalty(f), (0, 1, 2))):
            found = jax.jit(jax.vmap(run(lfilter), dims))(*given)
            near(found, jax.vmap(run(by_loop), dims)(*given))


# -- Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (([1.0], [0.0, 1.0], [1.0]), InputError, r"a\[0\] is 0"),
        (([], [1.0], [1.0]), InputError, "b has shape"),
        (([1.0], [1.0], [1.0], 2), InputError, "axis is 2"),
        (([1.0], [[1.0], [1.0]], [1.0]), InputError, "a has coefficients of 2 steps"),
        (([1.0], [1.0, 0.5], [1.0], -1, [0.0, 0.0]), InputError, "zi has shape"),
        (([1.0], [1.0], [1]), InputTypeError, "x has dtype int"),
        (([1.0], [1.0], None), InputTypeError, "x is None"),
        ((None, [1.0], [1.0]), InputTypeError, "b is None"),
        (("no", [1.0], [1.0]), InputTypeError, "b is 'no'"),
    ],
)
def test_errors(given: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        lfilter(*given)


def test_errors_of_sections(monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="sos has shape"):
        sosfilt(np.ones(6), np.ones(3))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(DeviceError, match="'gpu'"):
        sosfilt(np.ones((1, 6)), np.ones(3))

"""The linear recurrence of JAX's front door, beside a loop that JAX differentiates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples, slow

import sparsescan
from sparsescan import DeviceError, InputError, InputTypeError, Pattern
from sparsescan.jax import affine_scan
from sparsescan.symbolic.pattern import of_mask


class Case:
    """Random arguments, of which any may be shared by the samples or not be there."""

    def __init__(self, seed: int, most: int = 8) -> None:
        rng = np.random.default_rng(seed)
        steps, size, batch = (int(rng.integers(1, most)) for _ in range(3))
        self.is_complex = bool(rng.random() < 0.3)
        kept = rng.random((size, size)) < rng.choice([0.3, 1.0])
        form = rng.choice(["each", "each", "one", "number"])
        self.is_number = form == "number" and size > 1
        self.is_one = bool(form == "one")
        if self.is_number or rng.random() < 0.3:
            kept = np.eye(size, dtype=bool)
        self.kept, self.transposed = kept, bool(rng.random() < 0.5)
        self.is_dense = bool(kept.all() and rng.random() < 0.7)
        self.pattern = None if self.is_dense or self.is_number else of_mask(kept)
        if self.is_dense and size > 1 and (batch == size or rng.random() < 0.5):
            self.pattern = Pattern.dense((size, size))
        has_batch = rng.random() < 0.5
        lead = (1 if self.is_one else steps, *([batch] * has_batch))
        shape = (size, size) if self.is_dense else (int(kept.sum()),)
        if self.is_number:
            shape = (1,) if has_batch or steps == size else ()
        if self.is_one and not has_batch and self.pattern is not None:
            lead = ()  # without an axis of steps
        self.rng = rng
        self.inputs: dict[str, Any] = {"matrices": self.normal((*lead, *shape)) / 2}
        for name, own in (("offsets", (steps,)), ("initial", ())):
            is_needed = name == "offsets" and (self.is_one or self.is_number)
            choice = rng.integers(2 if is_needed else 3)
            if choice < 2:
                shape = (*own, batch, size) if choice else (*own, size)
                self.inputs[name] = self.normal(shape)

    def normal(self, shape: tuple[int, ...]) -> Any:
        drawn = self.rng.standard_normal(shape)
        return drawn + 1j * self.rng.standard_normal(shape) if self.is_complex else drawn

    def run(self, inputs: dict[str, Any]) -> Any:
        return affine_scan(**inputs, pattern=self.pattern, transposed=self.transposed)

    def loop(self, inputs: dict[str, Any]) -> Any:
        a, size = jnp.asarray(inputs["matrices"]), len(self.kept)
        if self.is_number:
            a = (a if a.ndim > 1 else a[:, None])[..., None] * jnp.eye(size)
        elif not self.is_dense:
            zeros = jnp.zeros((*a.shape[:-1], size, size), a.dtype)
            a = zeros.at[(..., *np.nonzero(self.kept))].set(a)
        if self.is_one:
            a = a if a.ndim > 2 else a[None]
            a = jnp.broadcast_to(a, (len(inputs["offsets"]), *a.shape[1:]))
        a = a.mT if self.transposed else a
        y, states = inputs.get("initial", jnp.zeros(size)), []
        for t in range(len(a)):
            y = (a[t] @ y[..., None])[..., 0]
            y = y + inputs["offsets"][t] if "offsets" in inputs else y
            states.append(y)
        return jnp.stack(jnp.broadcast_arrays(*states))


def close(actual: Any, expected: Any) -> None:
    trees = jax.tree.leaves(actual), jax.tree.leaves(expected)
    scale = max((float(jnp.abs(each).max()) for each in trees[1] if each.size), default=0) + 1
    for ours, theirs in zip(*trees, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e3 * 2.3e-16 * scale)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_what_numpy_has(seed: int) -> None:
    """The numbers of :func:`sparsescan.affine_scan`; gradients summed up over what is shared."""
    case = Case(seed)
    options: Any = {"pattern": case.pattern, "transposed": case.transposed}
    expected = sparsescan.affine_scan(**case.inputs, **options)
    loss = case.normal(expected.shape)
    y, back = jax.vjp(case.run, case.inputs)
    assert np.array_equal(y, expected)
    (actual,) = back(loss)
    matrices, initial = case.inputs["matrices"], case.inputs.get("initial")
    grads = sparsescan.affine_scan_vjp(
        matrices, initial=initial, states=expected, grads=loss.conj(), **options
    )
    for name, exact in zip(("matrices", "offsets", "initial"), grads, strict=True):
        if name in actual:
            axis = 1 if name == "offsets" else 0
            whole = exact if actual[name].ndim == exact.ndim else exact.sum(axis)
            whole = whole.conj()  # JAX's gradients are no conjugates
            np.testing.assert_allclose(actual[name], whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_jit_and_second_derivatives(seed: int) -> None:
    case = Case(seed, most=4)

    def penalty(function: Any, inputs: dict[str, Any]) -> Any:
        grads = jax.grad(lambda each: jnp.sin(function(each)).sum().real)(inputs)
        return sum(jnp.cos(each).sum().real for each in jax.tree.leaves(grads))

    actual, expected = (
        jax.jit(jax.value_and_grad(penalty, argnums=1), static_argnums=0)(function, case.inputs)
        for function in (case.run, case.loop)
    )
    close(actual, expected)


@settings(max_examples=examples(4), deadline=None)
@given(st.integers(0, 2**32))
def test_forward_mode(seed: int) -> None:
    """Once, twice, and of gradients."""
    case = Case(seed, most=4)
    along = {name: case.normal(each.shape) for name, each in case.inputs.items()}
    some = {name: 0 * each if k else each for k, (name, each) in enumerate(along.items())}

    def slopes(function: Any, inputs: dict[str, Any]) -> Any:
        once = lambda each: jax.jvp(function, (each,), (along,))[1]  # noqa: E731
        loss = lambda each: jnp.sin(function(each)).sum().real  # noqa: E731
        twice = jax.jvp(once, (inputs,), (some,))
        return twice, jax.jvp(jax.grad(loss), (inputs,), (along,))

    close(*(jax.jit(slopes, static_argnums=0)(f, case.inputs) for f in (case.run, case.loop)))


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_vmap(seed: int) -> None:
    """Maps over some of the arguments, once and twice, with gradients of each map."""
    case = Case(seed, most=4)
    names = list(case.inputs)
    mapped = [name for name in names if case.rng.random() < 0.6] or names[:1]
    inputs = {
        name: np.stack([each * factor for factor in (1.0, -0.5, 0.3)]) if name in mapped else each
        for name, each in case.inputs.items()
    }
    axes = ({name: 0 if name in mapped else None for name in names},)

    def both(function: Any, each: dict[str, Any]) -> Any:
        y, back = jax.vjp(function, each)
        return y, back(jnp.cos(y))

    results = [
        jax.jit(jax.vmap(lambda each, function=function: both(function, each), in_axes=axes))(
            inputs
        )
        for function in (case.run, case.loop)
    ]
    close(*results)
    twice = {
        name: np.stack([each, -each]) if name == mapped[0] else each
        for name, each in inputs.items()
    }
    outer = ({name: 0 if name == mapped[0] else None for name in names},)
    results = [
        jax.jit(
            jax.vmap(
                jax.vmap(lambda each, function=function: both(function, each), in_axes=axes),
                in_axes=outer,
            )
        )(twice)
        for function in (case.run, case.loop)
    ]
    close(*results)


def test_single_precision_is_kept() -> None:
    a = np.full((3, 2, 2), 0.5, np.float32)
    assert affine_scan(a, np.ones((3, 2), np.float32)).dtype == np.float32
    assert affine_scan(a, np.ones((3, 2), np.float64)).dtype == np.float64


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    a = jnp.ones((4, 3, 3))
    with pytest.raises(InputError, match=r"offsets has shape \(5, 3\); expected \(4, 3\)"):
        jax.jit(affine_scan)(a, jnp.ones((5, 3)))
    with pytest.raises(InputError, match="initial has 2 samples; expected 5, as offsets has"):
        affine_scan(a, jnp.ones((4, 5, 3)), jnp.ones((2, 3)))
    with pytest.raises(InputTypeError, match="matrices has dtype int64; expected float32"):
        affine_scan(jnp.ones((4, 3, 3), int))
    with pytest.raises(InputTypeError, match="pattern is 'diagonal'; expected a Pattern"):
        affine_scan(a, pattern="diagonal")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"nnz = 4, as pattern says"):
        affine_scan(a, pattern=Pattern.diagonal(4))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(DeviceError, match="JAX computes on 'gpu'; expected 'cpu'"):
        affine_scan(a)

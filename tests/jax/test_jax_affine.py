"""The linear recurrence of JAX's front door, beside NumPy's, and its arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

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

"""Arguments of the linear recurrence of JAX's front door."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsescan import DeviceError, InputError, InputTypeError, Pattern
from sparsescan.jax import affine_scan


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

"""Maps along an axis of length 0, through all functions of JAX's front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp

from sparsescan.jax import (
    affine_scan,
    lfilter,
    linear_attention,
    recurrent,
    scan,
    selective_scan,
    simulate,
    sosfilt,
)
from sparsescan.recurrent import GRU
from sparsescan.simulate import TimeSteps

_ONES = np.ones((2, 2, 7))
_NET = GRU(3, 4, rng=0, dtype=np.float64)
_SIMULATION = TimeSteps(lambda u, t, p: -u * p, sp.eye_array(5, format="csr"))


def _scanned(x: Any) -> Any:
    return scan(lambda h, x: (jnp.tanh(h @ jnp.eye(5) + x), h), jnp.zeros((4, 5)), x)[1]


_CALLS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "recurrent": (lambda x: recurrent(_NET, dict(_NET.params), x)[0], (6, 2, 3)),
    "scan": (_scanned, (7, 4, 5)),
    "affine_scan": (lambda x: affine_scan(x, x), (6, 2, 3)),
    "lfilter": (lambda x: lfilter([1.0, 0.5], [1.0, 0.2], x), (2, 9)),
    "sosfilt": (lambda x: sosfilt([[1.0, 0.5, 0.1, 1.0, 0.2, 0.1]], x), (2, 9)),
    "selective_scan": (
        lambda u: selective_scan(u, u, -jnp.ones((3, 2)), _ONES, _ONES),
        (2, 3, 7),
    ),
    "linear_attention": (lambda q: linear_attention(q, q, q)[0], (2, 3, 2, 2)),
    "simulate": (lambda u: simulate(_SIMULATION, u, 2.0, steps=4, dt=0.05), (5,)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_maps_of_nothing(name: str) -> None:
    function, shape = _CALLS[name]

    def grad(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    for call in (function, grad):
        mapped = jax.vmap(jax.vmap(call))
        one = jax.eval_shape(call, jnp.zeros(shape))
        for lead, run in (((0, 2), mapped), ((2, 0), jax.jit(mapped))):
            found = run(jnp.zeros((*lead, *shape)))
            assert (found.shape, found.dtype) == ((*lead, *one.shape), one.dtype)


def test_maps_of_no_members() -> None:
    params = {name: jnp.zeros((0, *each.shape)) for name, each in _NET.params.items()}

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(recurrent(_NET, params, x)[0] ** 2)

    x = jnp.ones((6, 2, 3))
    grads = jax.vmap(jax.grad(loss), (0, None))(params, x)
    assert all(grads[name].shape == params[name].shape for name in params)
    along = jax.vmap(lambda p: jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (p,))[1])(params)
    assert all(along[name].shape == params[name].shape for name in params)

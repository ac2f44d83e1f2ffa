"""Maps over parameters of recurrent networks: one call for all members."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsescan.execution.threads import thread_count
from sparsescan.jax import recurrent
from sparsescan.jax.ffi import primitives
from sparsescan.recurrent import GRU


class Ensemble:
    """Members of one kind, and inputs of each."""

    def __init__(self, kind: Any, members: int, **options: Any) -> None:
        rng = np.random.default_rng(5)
        self.net = kind(3, 4, rng=rng, dtype=np.float64, **options)
        self.params = {
            name: rng.standard_normal((members, *each.shape)) / 2
            for name, each in self.net.params.items()
        }
        self.x = rng.standard_normal((members, 6, 5, 3))


@pytest.mark.parametrize("most", [1 << 24, 0])
def test_bits_of_single_calls(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all memory kept for the backward pass, and with none."""
    monkeypatch.setattr(primitives, "_MOST_KEPT", most)
    members = 4 * thread_count() + (1 if most else 2)  # more than have memory at once
    about = Ensemble(GRU, members, num_layers=2, bidirectional=True)
    params, x = about.params, about.x

    def gradient(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda own: jnp.sin(recurrent(about.net, own, x)[0]).sum())(
            params
        )

    whole = jax.jit(jax.vmap(gradient))(params, x)
    kinds = jax.make_jaxpr(jax.vmap(gradient))(params, x)
    assert ("u8[0" in str(kinds) or f"u8[{members},0]" in str(kinds)) == (most == 0)
    one = jax.jit(gradient)
    for k in range(members):
        own = one({name: each[k] for name, each in params.items()}, x[k])
        for ours, single in zip(jax.tree.leaves(whole), jax.tree.leaves(own), strict=True):
            assert np.array_equal(ours[k], single)


def test_one_call_for_all_members() -> None:
    """No loop over members is in what JAX compiles."""
    about = Ensemble(GRU, 3)

    def call(params: Any) -> Any:
        return recurrent(about.net, params, about.x[0])[0].sum()

    text = jax.jit(jax.vmap(jax.grad(call))).lower(about.params).as_text()
    assert text.count("sparsescan") == 2
    assert "while" not in text

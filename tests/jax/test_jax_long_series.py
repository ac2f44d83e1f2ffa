"""Networks of JAX's front door whose gradients flow at most to the segment before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_networks import plain_run, truncated_grads
from sampling import examples

from sparsescan import InputError
from sparsescan.jax import recurrent
from sparsescan.recurrent import GRU, LSTM, RNN
from sparsescan.recurrent import truncated as windows

KINDS: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_gradients_flow_to_the_segment_before(seed: int) -> None:
    """Beside loops of PyTorch that detach states."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    steps, batch, k = int(rng.integers(1, 40)), int(rng.integers(1, 4)), int(rng.integers(1, 9))
    layers, units = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    net = KINDS[kind](2, units, layers, rng=rng)
    x = rng.standard_normal((steps, batch, 2))
    whole: Any = (False, True, "layers")[rng.integers(3)]
    is_whole, width = whole == "layers", net.state_size if whole else units
    above = rng.standard_normal((steps, batch, *[layers] * is_whole, width))
    state, carry = rng.standard_normal((2, layers, batch, net.state_size))
    lengths = rng.integers(0, steps + 1, batch) if rng.integers(2) else None
    resets = rng.random((steps, batch)) < 0.2 if rng.integers(2) else None
    has_anew, limit = resets is not None and rng.integers(2), 1 << 20 if rng.integers(2) else None
    anew = [rng.standard_normal(state.shape)] if has_anew else []

    def loss(x: Any, state: Any, *others: Any) -> Any:
        named = dict(zip(net.params, others, strict=False))
        output, last = recurrent(
            *(net, named, x, state, lengths, resets, *others[len(named) :]),
            truncate=k,
            return_states=whole,
            memory_limit=limit,
        )
        return jnp.vdot(output, above) + jnp.vdot(last, carry), (output, last)

    numbers = x, state, *(each.astype(float) for each in net.params.values()), *anew
    call = jax.value_and_grad(loss, tuple(range(len(numbers))), has_aux=True)
    (_, results), grads = jax.jit(call)(*numbers)
    exact = [torch.tensor(each, dtype=torch.float64).requires_grad_() for each in numbers]
    named = dict(zip(net.params, exact[2:], strict=False))
    own_anew = exact[-1] if anew else None
    counts = torch.tensor(np.full(batch, steps) if lengths is None else lengths)
    flags = None if resets is None else torch.tensor(resets)
    about = kind, named, *exact[:2], counts, flags
    outputs, last = plain_run(*about, own_anew, all_layers=is_whole)
    filled = np.zeros((*above.shape[:-1], net.state_size))
    filled[..., :width] = above
    cotangents = torch.tensor(filled), torch.tensor(carry)
    own = truncated_grads(*about, k, *cotangents, own_anew, all_layers=is_whole)
    for ours, theirs in zip(
        (*results, *grads), (torch.cat(outputs, -1)[..., :width], last, *own), strict=True
    ):
        expected = theirs.detach().numpy()
        bound = 1e-10 * np.max(np.abs(expected), initial=1)
        assert np.max(np.abs(ours - expected), initial=0) <= bound


def test_windows_are_computed_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = GRU(2, 3, rng=0), np.ones((50, 2, 2), np.float32)

    def loss(params: Any) -> Any:
        return (recurrent(net, params, x, truncate=4)[0] ** 2).sum()

    expected = jax.jit(jax.grad(loss))(net.params)
    monkeypatch.setattr(windows, "_SAMPLES", 10)
    actual = jax.jit(jax.grad(lambda params: loss(params)))(net.params)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))({k: np.stack([v, v]) for k, v in net.params.items()})
    for name, each in expected.items():
        np.testing.assert_allclose(actual[name], each, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(mapped[name][1], each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("which", "bidirectional"), [(True, False), ("layers", True)])
def test_derivatives_of_all_states(which: Any, bidirectional: bool) -> None:
    """Of any order, in both modes."""
    rng = np.random.default_rng(0)
    net = LSTM(2, 3, 2, bidirectional=bidirectional, rng=rng)
    x = rng.standard_normal((4, 2, 2))
    state = jnp.zeros((2 * (1 + bidirectional), 2, 6))

    def ours(x: Any, params: Any) -> Any:
        return jnp.sin(recurrent(net, params, x, state, return_states=which)[0])

    params = {name: each.astype(float) for name, each in net.params.items()}
    named = {name: torch.tensor(each) for name, each in params.items()}
    given = torch.tensor(x).requires_grad_()
    about = torch.tensor(np.array(state)), torch.tensor([4, 4])

    def plain(x: torch.Tensor) -> torch.Tensor:
        outputs, _ = plain_run("LSTM", named, x, *about, all_layers=which == "layers")
        return torch.cat(outputs, -1).sin()

    expected = plain(given)
    np.testing.assert_allclose(ours(x, params), expected.detach().numpy(), atol=1e-12)
    hessian = torch.autograd.functional.hessian(lambda x: plain(x).sum(), given)
    found = jax.jit(jax.hessian(lambda x: ours(x, params).sum()))(x)
    np.testing.assert_allclose(found, hessian.numpy(), atol=1e-10)
    mapped = jax.jit(jax.vmap(lambda scale: ours(scale * x, params)))(jnp.array([2.0, 1.0]))
    np.testing.assert_allclose(mapped[1], ours(x, params), atol=1e-12)


def test_errors() -> None:
    x = np.ones((50, 2, 2), np.float32)
    both = GRU(2, 3, bidirectional=True)
    with pytest.raises(InputError, match="truncate is 4, and the network has two directions"):
        recurrent(both, both.params, x, truncate=4)
    net = GRU(2, 3)
    with pytest.raises(InputError, match="truncate is 0; expected"):
        recurrent(net, net.params, x, truncate=0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: recurrent(net, net.params, x, truncate=4)[0], (x,), (x,))
    bad = jax.jit(lambda lengths: recurrent(net, net.params, x, lengths=lengths, truncate=4))
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(bad(np.array([3, 51])))

"""Log-likelihoods through PyTorch and JAX, beside NumPy's and the algebra of one Gaussian."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from dense_gaussian import dense_likelihood
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_doubles import double as double
from sampling import long_run
from state_spaces import drawn
from torch import Tensor

from sparsescan import InputError, InputTypeError
from sparsescan.jax.statespace import log_likelihood as by_jax
from sparsescan.statespace import log_likelihood as by_numpy
from sparsescan.torch.statespace import log_likelihood


def model(steps: int = 5, series: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """Return series with a gap, and a model whose parts have axes of steps, of series, or none."""
    torch.manual_seed(0)
    own = {
        "transition": torch.randn(1, 1, 3, 3),
        "observation": torch.randn(steps, 1, 2, 3),
        "transition_covariance": torch.eye(3)[None, None] + 0.1,
        "observation_covariance": torch.eye(2).repeat(1, series, 1, 1),
        "initial_covariance": torch.eye(3)[None],
        "initial_mean": torch.randn(series, 3),
        "transition_offset": torch.randn(steps, series, 3),
    }
    y = torch.randn(steps, series, 2).double()
    y[1, 0, 1] = y[2] = torch.nan
    return y, {name: each.double().requires_grad_() for name, each in own.items()}


def test_pytorch_has_derivatives_of_first_and_second_order() -> None:
    y, own = model()
    ours, right = log_likelihood(y, **own), dense_likelihood(y, **own)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    weights, leaves = torch.randn(2).double(), list(own.values())
    found = []
    for each in (ours, right):
        grads = torch.autograd.grad(each @ weights, leaves, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        found.append([*grads, *again])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@settings(max_examples=long_run(200, 20))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 9))
def test_pytorch_of_random_models(seed: int, steps: int) -> None:
    """Whose matrices are stored by columns, and whose series are every other number."""
    y, model = drawn(np.random.default_rng(seed), steps)
    series = torch.stack([torch.tensor(y)] * 2, -1)[..., 0].requires_grad_()
    own = {
        name: torch.tensor(each).mT.contiguous().mT.requires_grad_() for name, each in model.items()
    }
    leaves, grads = [series, *own.values()], []
    for function in (log_likelihood, dense_likelihood):
        grads.append(torch.autograd.grad(function(series, **own).sum(), leaves, allow_unused=True))
    for one, other in zip(*grads, strict=True):
        right = torch.zeros_like(one) if other is None else other.nan_to_num()
        bound = 1e-9 * (1 + right.abs().max().item())
        torch.testing.assert_close(one, right, rtol=0, atol=bound)


def test_maps_of_pytorch_are_more_series() -> None:
    y, own = model()
    two = torch.stack([own["transition"], own["transition"] / 2])
    mapped = torch.func.vmap(lambda f: log_likelihood(y, **own | {"transition": f}))(two)
    each = [log_likelihood(y, **own | {"transition": f}) for f in two]
    torch.testing.assert_close(mapped, torch.stack(each), rtol=1e-12, atol=1e-12)


def test_no_axis_of_series_and_no_steps() -> None:
    y, own = model(series=1)
    alone = {name: each[0] if name.startswith("initial") else each for name, each in own.items()}
    assert log_likelihood(y[:, 0], **alone).shape == ()
    short = {name: each[:0] if len(each) == len(y) else each for name, each in own.items()}
    found = log_likelihood(y[:0], **short)
    assert found.tolist() == [0]
    for each in torch.autograd.grad(found.sum(), list(own.values())):
        assert not each.any()
        assert not each.requires_grad


def test_compiled_graphs_are_whole() -> None:
    y, own = model()
    torch._dynamo.reset()
    compiled = torch.compile(log_likelihood, fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(f(y, **own).sum(), list(own.values()))
        for f in (log_likelihood, compiled)
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"transition": np.eye(3)}, InputTypeError, "transition is array.* expected a tensor"),
        ({"transition": torch.eye(3)}, InputTypeError, "transition has dtype torch.float32"),
        ({"initial_covariance": None}, InputTypeError, "initial_covariance is None"),
        ({"transition": torch.eye(2).double()}, InputError, r"transition has shape \(2, 2\)"),
    ],
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    y, own = model()
    with pytest.raises(kind, match=message):
        log_likelihood(y, **own | change)


def test_jax_has_gradients_maps_and_forward_mode() -> None:
    y, tensors = model()
    leaves = list(tensors.values())
    right = torch.autograd.grad(log_likelihood(y, **tensors).sum(), leaves)
    own = {name: each.detach().numpy() for name, each in tensors.items()}
    series = y.numpy()

    def loss(own: dict[str, Any]) -> Any:
        return by_jax(series, **own).sum()

    np.testing.assert_allclose(by_jax(series, **own), by_numpy(series, **own), rtol=1e-13)
    grads = jax.jit(jax.grad(loss))(own)
    for name, other in zip(tensors, right, strict=True):
        np.testing.assert_allclose(grads[name], other, rtol=1e-11, atol=1e-11)
    _, slope = jax.jvp(loss, (own,), (own,))
    along = sum((grads[name] * own[name]).sum() for name in own)
    np.testing.assert_allclose(slope, along, rtol=1e-10)
    two = np.stack([own["transition"], own["transition"] / 2])
    mapped = jax.vmap(lambda f: by_jax(series, **own | {"transition": f}))(two)
    each = [by_numpy(series, **own | {"transition": f}) for f in two]
    np.testing.assert_allclose(mapped, np.stack(each), rtol=1e-12)

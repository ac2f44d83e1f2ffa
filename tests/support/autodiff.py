"""Operators against PyTorch: forward, pattern, values and parameter gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sparsescan import BatchedCSR, Pattern
from sparsescan.jacobians import Sequential
from sparsescan.jacobians.shared.operator import Operator

# Small arrays; and its threads would wait for each other wherever something else runs.
torch.set_num_threads(1)

EPS = float(np.finfo(np.float64).eps)
# Batches of random input after which every entry of a pattern must have been nonzero.
_DRAWS = 60


def check_operator(
    op: Operator,
    module: torch.nn.Module | Callable[[torch.Tensor], torch.Tensor],
    rng: np.random.Generator,
    *,
    batch: int = 3,
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None,
    leading: int = 0,
    exact: bool = True,
    shared: bool = False,
) -> None:
    """`op` is the layer `module`, a module in float64 or a function without parameters.

    Parameters of the module are given to the operator, unless they are `shared` already. `draw`
    makes random input of a shape; `leading` axes before ``input_shape`` that `module` expects
    besides the batch are added for it. With `exact`, every entry of the pattern is nonzero for some
    input.
    """
    draw = draw or (lambda rng, shape: rng.standard_normal(shape))
    if isinstance(module, torch.nn.Module):
        module = module.double()
        randomise(module, rng)
        if not shared:
            share(op, module)
    x = draw(rng, (batch, *op.input_shape))
    x.setflags(write=False)

    def torch_forward(sample: torch.Tensor) -> torch.Tensor:
        return module(sample[(None,) * (leading + 1)]).reshape(op.output_shape)

    _check_forward(op, torch_forward, x)
    jacobians = _check_values(op, torch_forward, x)
    _check_params(op, module, torch_forward, x, rng)
    rows, cols = entries(op)
    for expected in jacobians:
        outside = expected.copy()
        outside[rows, cols] = 0
        assert not outside.any(), "the pattern misses an entry"
    if exact:
        seen = np.zeros(op.nnz, bool)
        for _ in range(_DRAWS):
            values = op.values(draw(rng, (16, *op.input_shape)))
            seen |= (np.atleast_2d(values) != 0).any(axis=0)
            if seen.all():
                break
        never = np.flatnonzero(~seen)
        assert not len(never), f"the pattern has entries that are never nonzero: {never[:10]}"


def randomise(module: torch.nn.Module, rng: np.random.Generator) -> None:
    """Random normal parameters, so that none of them is special."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape))))


def share(op: Any, module: torch.nn.Module) -> None:
    """Let the operator use the parameters of the module."""
    for name, parameter in module.named_parameters():
        setattr(op, name, parameter.detach().numpy())


def entries(op: Operator) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every entry of a pattern."""
    pattern = op.pattern
    assert pattern.nnz == op.nnz
    assert pattern.shape == op.shape
    # Operators vouch for the arrays of their patterns; here they are checked.
    assert Pattern(pattern.indptr, pattern.indices, pattern.shape) is pattern
    return np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)), pattern.indices


def close(actual: np.ndarray, expected: np.ndarray, factor: float = 1e4) -> None:
    """Equal up to rounding, at the scale of the largest entry; NaN where NaN is expected."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == np.float64
    finite = np.isfinite(expected)
    assert (np.isnan(actual) == np.isnan(expected)).all()
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    assert np.abs(actual - expected)[finite].max(initial=0) <= factor * EPS * scale


def check_network(
    net: Sequential,
    module: torch.nn.Module,
    x: np.ndarray,
    rng: np.random.Generator,
    schedule: str,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Output, and gradients in the input and all parameters, are those of autograd.

    The activations and the gradient in the output are returned; the module has its own gradients.
    """
    xs = net.activations(x)
    given = torch.tensor(x, requires_grad=True)
    y = module(given)
    close(xs[-1], y.detach().numpy())
    grad = rng.standard_normal(y.shape)
    (y * torch.tensor(grad)).sum().backward()
    grad = grad.reshape(*x.shape[: x.ndim - len(net.input_shape)], -1)
    plan = net.plan(schedule=schedule)
    assert plan.n == len(net) == len(net.patterns) == len(xs) - 1
    gradients = plan.inclusive_scan(grad, net.values(xs))
    close(gradients[-1].reshape(x.shape), given.grad.numpy(), 1e5)
    check_params(net, module, net.param_grads(xs, gradients))
    return xs, grad


def check_params(net: Sequential, module: torch.nn.Module, params: Any) -> None:
    """Gradients of a network's parameters are those that the module has."""
    ours = [grads[name] for op, grads in zip(net.layers, params, strict=True) for name in op.params]
    for actual, parameter in zip(ours, module.parameters(), strict=True):
        close(actual, parameter.grad.numpy(), 1e5)


def _check_forward(op: Operator, torch_forward: Any, x: np.ndarray) -> None:
    expected = np.stack([torch_forward(torch.tensor(sample)).detach().numpy() for sample in x])
    close(op.forward(x), expected)
    close(op.forward(x[0]), expected[0])
    with_lists = op.forward(x[0].tolist())
    close(with_lists, expected[0])


def _check_values(op: Operator, torch_forward: Any, x: np.ndarray) -> list[np.ndarray]:
    """Compare values and Jacobians, and return those of PyTorch, one for each sample."""
    rows, cols = entries(op)
    jacobians = []
    for sample in x:
        jacobian = torch.autograd.functional.jacobian(torch_forward, torch.tensor(sample))
        jacobians.append(jacobian.reshape(op.shape[1], op.shape[0]).numpy().T)
    expected = np.stack([jacobian[rows, cols] for jacobian in jacobians])
    y = op.forward(x)
    values = op.values(x)
    if values.ndim == 1:
        close(np.broadcast_to(values, expected.shape), expected)
    else:
        close(values, expected)
    close(op.values(x, y), values)
    close(op.values(x[0]), expected[0])
    out = np.full_like(values, np.nan)
    assert op.values(x, out=out) is out
    np.testing.assert_array_equal(out, values)
    jacobian = op.jacobian(x)
    dense = [
        (jacobian[b] if isinstance(jacobian, BatchedCSR) else jacobian).toarray()
        for b in range(len(x))
    ]
    close(np.stack(dense), np.stack(jacobians))
    close(op.jacobian(x[0]).toarray(), jacobians[0])
    return jacobians


def _check_params(
    op: Operator, module: Any, torch_forward: Any, x: np.ndarray, rng: np.random.Generator
) -> None:
    grad_y = rng.standard_normal((len(x), *op.output_shape))
    actual = op.param_grads(x, grad_y)
    assert actual.keys() == op.params.keys()
    if not actual:
        return
    parameters = dict(module.named_parameters())
    loss = sum(
        (torch_forward(torch.tensor(sample)) * torch.tensor(grad)).sum()
        for sample, grad in zip(x, grad_y, strict=True)
    )
    grads = torch.autograd.grad(loss, list(parameters.values()))
    for name, expected in zip(parameters, grads, strict=True):
        close(actual[name], expected.numpy(), 1e5)
        assert actual[name].shape == op.params[name].shape
    flat = op.param_grads(x, grad_y.reshape(len(x), -1))
    for name in actual:
        np.testing.assert_array_equal(flat[name], actual[name])

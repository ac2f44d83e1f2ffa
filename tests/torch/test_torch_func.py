"""Transforms of ``torch.func``, forward mode and higher derivatives of recurrent modules.

They are compared with the same transforms of a loop over steps in PyTorch's own operations.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from some_cells import MGU, PeepholeLSTM, Spiking
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import sparsescan.torch
from sparsescan.recurrent import Cell, Hidden, Input, relu
from sparsescan.recurrent.definition import shapes_of
from sparsescan.torch import module
from sparsescan.torch.calls import derivatives
from sparsescan.torch.calls.plain import run_plain
from sparsescan.torch.calls.shapes import kind_of

EPS = torch.finfo(torch.float64).eps

Params = dict[str, Tensor]
Function = Callable[[Params, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        yield


def close(actual: Any, expected: Any) -> None:
    ours, theirs = (torch.utils._pytree.tree_leaves(each) for each in (actual, expected))
    assert len(ours) == len(theirs)
    largest = max([1.0, *(float(each.abs().max()) for each in theirs if each.numel())])
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.numel() == 0 or float((one - other).abs().max()) <= 1e4 * EPS * largest


def by_steps(net: Any, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and last states of a module, by PyTorch's own operations."""
    kind, count = kind_of(net.mode), 1 + net.bidirectional
    names = list(shapes_of(kind.cell, 1, 1, net.bias))
    own = [params[name] for name in net._flat_weights_names]
    cells = [
        dict(zip(names, own[k : k + len(names)], strict=True))
        for k in range(0, len(own), len(names))
    ]
    state = x.new_zeros(len(cells), x.shape[1], net.hidden_size * net.states)
    return run_plain(kind.cell, kind.program(net.bias), cells, count, x, state, None)


def losses(net: Any) -> tuple[Function, Function]:
    """Return a loss by the module, and by steps."""

    def loss(output: Tensor, last: Tensor) -> Tensor:
        return output.sin().sum() + last.square().sum()

    def ours(params: Params, x: Tensor) -> Tensor:
        output, last = functional_call(net, params, (x,))
        return loss(output, torch.cat(last, -1) if isinstance(last, tuple) else last)

    def theirs(params: Params, x: Tensor) -> Tensor:
        return loss(*by_steps(net, params, x))

    return ours, theirs


def directions(rng: np.random.Generator, tensors: Any) -> Any:
    """Return a random direction for each tensor."""
    return torch.utils._pytree.tree_map(
        lambda each: torch.from_numpy(rng.standard_normal(tuple(each.shape))), tensors
    )


def several(rng: np.random.Generator, params: Params, count: int) -> Params:
    """Return parameters of several models."""
    return {
        name: each + 0.1 * torch.from_numpy(rng.standard_normal((count, *each.shape)))
        for name, each in params.items()
    }


def test_packed_sequences_and_resets() -> None:
    torch.manual_seed(0)
    net: Any = module(PeepholeLSTM)(3, 4, 2, bidirectional=True, dtype=torch.float64)
    params = {name: each.detach() for name, each in net.named_parameters()}
    lengths = torch.tensor([5, 2, 3])
    rows, anew = (
        pack_padded_sequence(each, lengths, enforce_sorted=False)
        for each in (torch.randn(5, 3, 3, dtype=torch.float64), torch.rand(5, 3) < 0.3)
    )

    def ours(params: Params, data: Tensor) -> Tensor:
        given = rows._replace(data=data)
        output, (h, c) = functional_call(net, params, (given,), {"resets": anew})
        return output.data.sin().sum() + h.sum() + c.square().sum()

    def theirs(params: Params, data: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derivatives, "_DTYPES", ())
            return ours(params, data)

    given = params, rows.data
    along = directions(np.random.default_rng(0), given)
    found = [[jvp(f, given, along), jvp(grad(f, (0, 1)), given, along)] for f in (ours, theirs)]
    close(*found)
    # Each model, and each sample, has resets of its own.
    flags, xs = torch.rand(4, 5, 2) < 0.3, torch.randn(4, 5, 2, 3, dtype=torch.float64)
    outputs = vmap(lambda x, flags: net(x, resets=flags)[0])(xs, flags)
    close(outputs, torch.stack([net(x, resets=one)[0] for x, one in zip(xs, flags, strict=True)]))
    many = several(np.random.default_rng(0), params, 4)
    run = lambda params, x, flags: functional_call(net, params, (x,), {"resets": flags})[0]  # noqa: E731
    each = [run({k: v[i] for k, v in many.items()}, xs[i], flags[i]) for i in range(4)]
    close(vmap(run)(many, xs, flags), torch.stack(each))


@pytest.mark.parametrize("order", [2, 3])
def test_higher_derivatives(order: int) -> None:
    """In all orders of both modes: forward within forward mode needs PyTorch's own operations."""
    net = module(MGU)(1, 2, dtype=torch.float64)
    params = {name: each.detach() for name, each in net.named_parameters()}
    x = torch.randn(3, 1, 1, dtype=torch.float64)
    for ways in itertools.product((jacfwd, jacrev), repeat=order):
        found = []
        for f in losses(net):
            derivative: Any = partial(f, params)
            for way in ways:
                derivative = way(derivative)
            found.append(derivative(x))
        close(*found)


def test_forward_mode_twice_through_a_surrogate() -> None:
    net = module(Spiking)(1, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="expected reverse mode once"):
        jacfwd(jacfwd(lambda x: net(x)[0].sum()))(torch.randn(3, 1, 1, dtype=torch.float64))


def test_a_cell_whose_input_is_multiplied_like_a_state() -> None:
    class Both(Cell):
        weight_ih = Input(bias=False)
        weight_hh = Hidden()

        def step(self, x: Any, h: Any) -> Any:
            return relu(self.weight_hh(x) + self.weight_hh(h)) + x * self.weight_ih(x)

    net = module(Both)(3, 3, dtype=torch.float64)
    params = {name: each.detach() for name, each in net.named_parameters()}
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    along = directions(np.random.default_rng(0), (params, x))
    close(*(jvp(grad(f, (0, 1)), (params, x), along) for f in losses(net)))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives, "_MOST", 3)
    net: Any = sparsescan.torch.GRU(2, 3)
    for steps in range(1, 8):
        vmap(lambda x: net(x)[0])(torch.zeros(2, steps, 1, 2))
    assert len(derivatives._passes) <= 3

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
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import slow
from some_cells import MGU, SCRN, ByHeads, Elementwise, Leaky, PeepholeLSTM, Spiking, Tied
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import sparsescan.torch
from sparsescan.recurrent import Cell, Hidden, Input, relu
from sparsescan.recurrent.definition import shapes_of
from sparsescan.torch import module
from sparsescan.torch.calls import derivatives
from sparsescan.torch.calls.plain import run_plain
from sparsescan.torch.calls.shapes import kind_of

EPS = torch.finfo(torch.float64).eps
THEIRS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
READ_UNITS = (Leaky,)
CELLS = [MGU, PeepholeLSTM, Leaky, Spiking, ByHeads]

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


def drawn(rng: np.random.Generator, most: int = 5) -> tuple[Any, Params]:
    """Return a module and its parameters."""
    which = int(rng.integers(2 * len(THEIRS)))
    inputs, units, layers = (int(n) for n in rng.integers(1, [most, most, 3]))
    options: dict[str, Any] = {
        "bias": bool(rng.integers(2)),
        "bidirectional": bool(rng.integers(2)),
    }
    if which < len(THEIRS):
        kind: Any = getattr(sparsescan.torch, list(THEIRS)[which])
        if kind is sparsescan.torch.RNN:
            options["nonlinearity"] = ("tanh", "relu")[rng.integers(2)]
    else:
        cell = CELLS[rng.integers(len(CELLS))]
        inputs, layers = (units, 1) if cell in READ_UNITS else (inputs, layers)
        units *= 1 + (cell is ByHeads)
        kind = module(cell)
    net = kind(inputs, units, layers, **options, dtype=torch.float64)
    return net, {name: each.detach() for name, each in net.named_parameters()}


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


def maps(f: Function, params: Params, many: Params, xs: Tensor, along: Any) -> Any:
    """Return results for samples, for models, and for both, and gradients of each."""
    slope = grad(f)
    return [
        vmap(f, (None, 0))(params, xs),
        vmap(f, (0, None))(many, xs[0]),
        vmap(f)(many, xs),
        vmap(slope, (None, 0))(params, xs),
        vmap(slope)(many, xs),
        vmap(vmap(slope, (None, 0)), (0, None))(many, xs),
        vmap(vmap(slope, (0, None)), (None, 0))(many, xs),
        grad(lambda params: vmap(f, (None, 0))(params, xs).sum())(params),
    ]


def modes(f: Function, params: Params, many: Params, xs: Tensor, along: Any) -> Any:
    """Return derivatives in a direction, by both modes."""
    own, x = along, xs[0]
    with forward_ad.dual_level():
        dual = f(params, forward_ad.make_dual(x, own[1]))
        tangent = forward_ad.unpack_dual(dual).tangent
    return [
        jvp(f, (params, x), own),
        jvp(lambda x: f(params, x), (x,), (own[1],)),
        jvp(grad(f), (params, x), own),
        jvp(grad(f, 1), (params, x), own),
        vmap(lambda x: jvp(grad(f), (params, x), own))(xs),
        vmap(lambda params, x: jvp(f, (params, x), own))(many, xs),
        tangent,
    ]


def jacobians(f: Function, params: Params, many: Params, xs: Tensor, along: Any) -> Any:
    """Return all derivatives of a small network in the input."""
    x = xs[0][:2, :1]
    return [
        jacrev(lambda x: grad(f, 1)(params, x))(x),
        jacfwd(lambda x: f(params, x))(x),
        hessian(lambda x: f(params, x))(x),
        torch.autograd.functional.hessian(lambda x: f(params, x), x),
        torch.autograd.functional.jacobian(
            lambda x: f(params, x) * torch.arange(3), x, vectorize=True
        ),
        grad(lambda x: (grad(f, 1)(params, x) ** 2).sum())(x),
    ]


def check(seed: int, transforms: Callable[..., Any], most: int = 5) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net, params = drawn(rng, most)
    steps, batch, count = (int(n) for n in rng.integers(1, 4, 3))
    xs = torch.from_numpy(rng.standard_normal((count, steps, batch, net.input_size)))
    many = several(rng, params, count)
    along = directions(rng, (params, xs[0]))
    ours, theirs = losses(net)
    close(transforms(ours, params, many, xs, along), transforms(theirs, params, many, xs, along))


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_maps(seed: int) -> None:
    check(seed, maps)


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_both_modes(seed: int) -> None:
    check(seed, modes)


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1))
def test_jacobians(seed: int) -> None:
    check(seed, jacobians, 3)


@pytest.mark.parametrize("kind", list(THEIRS))
def test_pytorchs_own(kind: str) -> None:
    """Derivatives of PyTorch's modules, as far as it has them, and a loop where it has none."""
    torch.manual_seed(0)
    theirs = THEIRS[kind](3, 4, 2, bidirectional=True, dtype=torch.float64)
    ours = getattr(sparsescan.torch, kind)(3, 4, 2, bidirectional=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    xs = torch.randn(3, 5, 2, 3, dtype=torch.float64)
    params = {name: each.detach() for name, each in theirs.named_parameters()}

    def loss(net: Any) -> Function:
        return lambda params, x: functional_call(net, params, (x,))[0].sin().sum()

    own, other = loss(ours), loss(theirs)
    close(jacrev(own)(params, xs[0]), jacrev(other)(params, xs[0]))
    each = [grad(other)(params, x) for x in xs]
    close(
        vmap(grad(own), (None, 0))(params, xs),
        {name: torch.stack([one[name] for one in each]) for name in params},
    )
    close(hessian(own, 1)(params, xs[0][:2]), hessian(other, 1)(params, xs[0][:2]))


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


@pytest.mark.parametrize("cell", slow(SCRN, Tied, Elementwise))
def test_other_cells(cell: Any) -> None:
    net = module(cell)(3, 3, dtype=torch.float64)
    params = {name: each.detach() for name, each in net.named_parameters()}
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    along = directions(np.random.default_rng(0), (params, x))
    close(*(jvp(grad(f, (0, 1)), (params, x), along) for f in losses(net)))


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

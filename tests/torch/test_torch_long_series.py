"""Modules whose gradients flow at most to the segment before, and that return all states."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_networks import plain_run, truncated_grads
from sampling import examples
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch_checks import check_compiled

from sparsescan import InputError, InputTypeError
from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import GRU, LSTM, RNN, convert, explain, module

KINDS: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
F8 = torch.float64
seeds = st.integers(0, 2**32 - 1)


class Case:
    """A module, and what it is called with."""

    def __init__(
        self, seed: int, kind: str, *, bidirectional: bool = False, **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(most: int) -> int:
            return int(torch.randint(1, most, (), generator=generator))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=F8)

        self.kind, self.steps, self.batch, layers, units = kind, draw(30), draw(5), draw(4), draw(5)
        self.truncate, self.count = draw(9), 2 if kind == "LSTM" else 1
        torch.manual_seed(seed)
        about = dict(dtype=F8, bidirectional=bidirectional, **options)
        self.net = KINDS[kind](2, units, layers, **about)
        rows = layers * (1 + bidirectional)
        self.x = normal(self.steps, self.batch, 2).requires_grad_()
        self.state = normal(rows, self.batch, self.count * units).requires_grad_()
        lengths = torch.randint(1, self.steps + 1, (self.batch,), generator=generator)
        self.lengths = lengths.sort(descending=True).values
        self.lengths[0] = self.steps
        self.is_packed = draw(3) == 1
        if not self.is_packed:
            self.lengths[:] = self.steps
        row: tuple[int, ...] = (self.count * units * (1 + bidirectional),)
        self.is_whole = options.get("return_states") == "layers"
        if self.is_whole:
            row = rows, self.count * units
        self.above = normal(self.steps, self.batch, *row)
        self.carry = normal(*self.state.shape)
        self.resets = self.reset_states = None
        if draw(3) == 1:
            self.resets = torch.rand(self.steps, self.batch, generator=generator) < 0.2
            self.reset_states = normal(*self.state.shape).requires_grad_()

    @property
    def leaves(self) -> list[torch.Tensor]:
        others = [] if self.reset_states is None else [self.reset_states]
        return [self.x, self.state, *self.net.parameters(), *others]

    def called(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the outputs of each state, and the last states side by side."""
        hx, anew = (
            tuple(each.chunk(2, -1)) if self.count > 1 and each is not None else each
            for each in (self.state, self.reset_states)
        )
        x, flags = (
            pack_padded_sequence(each, self.lengths)
            if self.is_packed and each is not None
            else each
            for each in (self.x, self.resets)
        )
        output, last, *rest = self.net(x, hx, resets=flags, reset_states=anew)
        states = rest[0] if rest else output
        several = states if self.net.return_states and self.count > 1 else (states,)
        if self.is_packed:
            several = tuple(pad_packed_sequence(each)[0] for each in several)
        return list(several), torch.cat(last, -1) if self.count > 1 else last


@settings(max_examples=examples(40), deadline=None)
@given(seeds, st.sampled_from(list(KINDS)), st.sampled_from([False, True, "layers"]))
def test_truncated_gradients(seed: int, kind: str, whole: Any) -> None:
    case = Case(seed, kind, return_states=whole)
    case.net.truncate = case.truncate
    params, given = dict(case.net.named_parameters()), (case.x, case.state, case.lengths)
    if not whole:
        case.above[..., case.above.shape[-1] // case.count :] = 0
    outputs, last = case.called()
    loss = (torch.cat(outputs, -1) * case.above[..., : len(outputs) * outputs[0].shape[-1]]).sum()
    loss = loss + (last * case.carry).sum()
    actual = torch.autograd.grad(loss, case.leaves)
    about = case.resets, case.truncate, case.above, case.carry, case.reset_states
    expected = truncated_grads(kind, params, *given, *about, all_layers=case.is_whole)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(seeds, st.sampled_from(list(KINDS)), st.booleans(), st.sampled_from([True, "layers"]))
def test_all_states(seed: int, kind: str, bidirectional: bool, which: Any) -> None:
    case = Case(seed, kind, bidirectional=bidirectional, return_states=which)
    found = []
    params = dict(case.net.named_parameters())
    for outputs, last in (
        case.called(),
        plain_run(
            *(kind, params, case.x, case.state, case.lengths, case.resets, case.reset_states),
            all_layers=case.is_whole,
        ),
    ):
        loss = (torch.cat(outputs, -1) * case.above).sum() + (last * case.carry).sum()
        found.append([*outputs, last, *torch.autograd.grad(loss, case.leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", [True, "layers"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_derivatives_of_all_states(which: Any) -> None:
    """By transforms, and of gradients, which are differentiated step by step."""
    net = LSTM(2, 3, 2, bidirectional=True, dtype=F8, return_states=which)
    params = dict(net.named_parameters())
    x, state = torch.randn(4, 2, 2, dtype=F8), torch.zeros(4, 2, 6, dtype=F8)
    lengths = torch.full((2,), 4)

    def loss(outputs: Any) -> Any:
        return outputs[1].tanh().sum() + outputs[0].sin().sum()

    def ours(x: torch.Tensor) -> Any:
        return loss(net(x)[2])

    def plain(x: torch.Tensor) -> Any:
        whole = which == "layers"
        return loss(plain_run("LSTM", params, x, state, lengths, all_layers=whole)[0])

    for derivative in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(derivative(ours)(x), derivative(plain)(x))
    hessians = [torch.autograd.functional.hessian(each, x) for each in (ours, plain)]
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize("batch_first", [False, True])
def test_states_of_all_layers(batch_first: bool) -> None:
    """They are in the form of the input, arrays of their own, and of what a layer has computed."""
    torch.manual_seed(0)
    options = {"bidirectional": True, "batch_first": batch_first, "dropout": 0.5}
    net = LSTM(3, 5, 2, **options, return_states="layers")
    x = torch.randn(9, 7, 3)
    found = []
    for run in (net, lambda x: net._without_kernels(x, None)):
        torch.manual_seed(1)
        output, (h_n, c_n), (h, c) = run(x)
        assert h.shape == c.shape == (9, 7, 4, 5)
        for each in (output, h, c):
            assert (each.transpose(0, 1) if batch_first else each).is_contiguous()
        assert torch.equal(output, h[:, :, 2:].flatten(-2))
        ends = (h, c) if not batch_first else (each.transpose(0, 1) for each in (h, c))
        for last, states in zip((h_n, c_n), ends, strict=True):
            assert torch.equal(last[::2], states[-1].transpose(0, 1)[::2])
            assert torch.equal(last[1::2], states[0].transpose(0, 1)[1::2])
        loss = (output * h[:, :, 2:].flatten(-2) + h[:, :, :2].flatten(-2)).sum() + c.sin().sum()
        found.append([output, h, c, *torch.autograd.grad(loss, list(net.parameters()))])
        h[:] = 0  # which others do not share
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    one = net(x[0])
    assert one[2][0].shape == (7, 4, 5)
    gru = module(MGU)(3, 4, return_states="layers")
    assert gru(x)[2].shape == (9, 7, 1, 4)


def test_options_go_with_the_module() -> None:
    net = LSTM(3, 4, truncate=5, return_states=True)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (same.truncate, same.return_states) == (5, True)
    own = module(MGU)(3, 4, truncate=5)
    assert pickle.loads(pickle.dumps(own)).truncate == 5
    assert GRU(3, 4).truncate is None
    assert explain(own, torch.zeros(4, 2, 3)).kernel == "sparsescan"
    model = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 2))
    convert(model, truncate=7)
    assert model[0].truncate == 7


def test_compiled_graphs_stay_whole() -> None:
    torch.manual_seed(0)
    net, x = LSTM(3, 4, truncate=10, return_states=True), torch.randn(50, 2, 3)
    check_compiled(lambda x: net(x)[2][1].square().sum(), [x], list(net.parameters()))
    net = LSTM(3, 4, 2, return_states="layers")
    check_compiled(lambda x: net(x)[2][1].square().sum(), [x], list(net.parameters()))


def test_nothing_changes_without_gradients_or_behind_few_steps() -> None:
    net, x = GRU(3, 4, bidirectional=True, truncate=2), torch.randn(50, 2, 3)
    with torch.no_grad():
        net(x)
    with pytest.raises(InputError, match="truncate is 2; expected None, as bidirectional is True"):
        net(x)
    free = GRU(3, 4)
    cut = copy.deepcopy(free)
    cut.truncate = 25
    grads = []
    for each in (free, cut):
        each(x)[0].sum().backward()
        grads.append(each.weight_hh_l0.grad)
    torch.testing.assert_close(*grads)


def test_errors_name_what_cannot_be_truncated() -> None:
    x = torch.randn(50, 2, 3)
    with pytest.raises(InputError, match=r"dropout is 0\.5: layers run one by one"):
        GRU(3, 4, 2, dropout=0.5, truncate=3)(x)
    with pytest.raises(InputError, match="no kernel"):
        GRU(3, 4, truncate=3).bfloat16()(x.bfloat16())
    with pytest.raises(InputError, match="no kernel"):
        torch.func.grad(lambda x: GRU(3, 4, truncate=3)(x)[0].sum())(x)
    given = x.requires_grad_()
    (grad,) = torch.autograd.grad(GRU(3, 4, truncate=3)(given)[0].sum(), given, create_graph=True)
    with pytest.raises(InputError, match="truncate is 3, and gradients are differentiated again"):
        grad.sum().backward()
    with pytest.raises(InputError, match="truncate is 0; expected"):
        GRU(3, 4, truncate=0)
    with pytest.raises(InputError, match="truncate is -1; expected"):
        convert(nn.GRU(3, 4), truncate=-1)
    with pytest.raises(InputTypeError, match="return_states is 3"):
        GRU(3, 4, return_states=3)
    with pytest.raises(InputError, match="return_states is 'all'; expected 'layers'"):
        GRU(3, 4, return_states="all")
    with pytest.raises(InputError, match="return_states is True, and proj_size is 2"):
        LSTM(3, 4, proj_size=2, return_states=True)(x)

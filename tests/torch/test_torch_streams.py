"""Streams of modules, beside PyTorch's own modules over whole sequences."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import sparsescan.torch
from sparsescan.errors import DeviceError, InputError, InputTypeError
from sparsescan.recurrent import Cell, Given, Hidden, Input
from sparsescan.recurrent.catalogue import LEM, ProjectedLSTM, VariationalGRU
from sparsescan.torch import convert, module, stream

seeds = st.integers(0, 2**32 - 1)
OURS = sparsescan.torch
MODULES: dict[str, Any] = {
    "PyTorch's LSTM": lambda: nn.LSTM(3, 9, 2),
    "PyTorch's GRU": lambda: nn.GRU(3, 9, batch_first=True, dtype=torch.float64),
    "ReLU": lambda: nn.RNN(3, 9, 2, nonlinearity="relu", bias=False),
    "projected": lambda: nn.LSTM(3, 9, 2, proj_size=4),
    "our LSTM": lambda: OURS.LSTM(3, 9, 2),
    "our projected LSTM": lambda: OURS.LSTM(3, 9, 2, proj_size=4, dtype=torch.float64),
    "any cell": lambda: module(LEM)(3, 9, 2),
    "short states": lambda: module(ProjectedLSTM)(3, 9, 2, proj_size=4),
    "masks": lambda: module(VariationalGRU)(3, 9, 2).eval(),
    "converted": lambda: converted(nn.LSTM(3, 9, 2)),
}


def converted(net: Any) -> Any:
    convert(net)
    return net


class Last(nn.Module):
    """The outputs alone."""

    def forward(self, results: Any) -> Any:
        return results[0]


def of_model(model: Any, x: Tensor) -> Tensor:
    """Return what a model's parts give, one after the other, without gradients."""
    with torch.no_grad():
        for each in model if isinstance(model, nn.Sequential) else [model]:
            if isinstance(each, nn.RNNBase) and each.batch_first:
                x = each(x.transpose(0, 1))[0].transpose(0, 1)
            else:
                found = each(x)
                x = found[0] if isinstance(found, tuple) else found
    return x


def close(a: Tensor, b: Tensor) -> None:
    eps = torch.finfo(a.dtype).eps
    torch.testing.assert_close(a, b, rtol=0, atol=2e3 * eps)


def pieces_of(x: Tensor) -> list[Tensor]:
    """Cut a sequence of 40 steps."""
    return [x[0], x[1:1], x[1:2], x[2:23], x[23], x[24:]]


def joined(outputs: list[Tensor]) -> Tensor:
    return torch.cat([each if each.dim() == 3 else each[None] for each in outputs])


def listed(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_modules_stream(name: str) -> None:
    torch.manual_seed(0)
    net = MODULES[name]()
    dtype = next(net.parameters()).dtype
    x = torch.randn(40, 2, 3, dtype=dtype)
    own = net.stream(2) if hasattr(net, "stream") else stream(net, 2)
    assert (own.batch, own.inputs, own.dtype) == (2, 3, dtype)
    whole = own(x)
    given = x.transpose(0, 1) if net.batch_first else x
    with torch.no_grad():
        output, last = net(given)
    close(whole, output.transpose(0, 1) if net.batch_first else output)
    for a, b in zip(listed(own.state), listed(last), strict=True):
        close(a, b)
    state = own.state
    own.reset()
    assert all((each == 0).all() for each in listed(own.state))
    assert torch.equal(joined([own(each) for each in pieces_of(x)]), whole)
    own.state = state
    with torch.no_grad():
        output, _ = net(given, last)
    close(own(x), output.transpose(0, 1) if net.batch_first else output)


HEADS: dict[str, Any] = {
    "Linear": lambda: [nn.LSTM(3, 9), nn.Linear(9, 1)],
    "LayerNorm": lambda: [nn.GRU(3, 9), nn.LayerNorm(9), nn.Linear(9, 4, bias=False), nn.SiLU()],
    "nested": lambda: [nn.Sequential(nn.GRU(3, 9), nn.Tanh()), nn.Dropout(0.5), nn.Softmax(-1)],
    "encoder": lambda: [nn.Linear(3, 5), nn.ELU(0.7), nn.LSTM(5, 4), nn.LogSoftmax(-1)],
    "several": lambda: [nn.LSTM(3, 9, proj_size=4), nn.Linear(4, 6), nn.RNN(6, 5), nn.Softsign()],
    "no parameters": lambda: [nn.GRU(3, 9), nn.LayerNorm(9, elementwise_affine=False)],
    "functions": lambda: [
        *(nn.GRU(3, 9), nn.Hardsigmoid(), nn.Softplus(2.0, 1.0), nn.LeakyReLU(0.3), nn.Identity()),
        *(nn.Hardtanh(-0.2, 0.4), nn.Linear(9, 9), nn.ReLU(), nn.Sigmoid()),
    ],
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", HEADS)
def test_models_stream(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*HEADS[name]()).eval()
    x = torch.randn(40, 2, 3)
    own = stream(model, 2)
    whole = own(x)
    flat = nn.Sequential(*[leaf for leaf in model.modules() if not isinstance(leaf, nn.Sequential)])
    expected = of_model(flat, x)
    close(whole, expected)
    assert own.outputs == whole.shape[-1]
    states = own.state
    assert isinstance(states, list) == (name == "several")
    own.reset()
    own.state = states
    again = own(x)
    own.state = states
    assert torch.equal(joined([own(each) for each in pieces_of(x)]), again)


@given(seeds)
@settings(max_examples=examples(20))
def test_lives(seed: int) -> None:
    """Whatever PyTorch does to parameters is seen by the next call."""
    torch.manual_seed(seed)
    net: Any = [nn.LSTM, nn.GRU, OURS.LSTM][seed % 3](3, 8, 2)
    head = nn.Linear(8, 2)
    own = stream(nn.Sequential(net, head), 2)
    state: Any = None
    for _ in range(10):
        event = int(torch.randint(9, ()))
        if event == 0:
            net(torch.randn(4, 2, 3))[0].sum().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
        elif event == 1:
            net.load_state_dict({k: 0.9 * v for k, v in net.state_dict().items()})
        elif event == 2 and "weight_hh_l0" in net._parameters:
            net.weight_hh_l0 = nn.Parameter(torch.randn(net.weight_hh_l0.shape) / 4)
        elif event == 3:
            head.weight.data.mul_(0.5)
            own.update()
        elif event == 4 and "weight_hh_l0" in net._parameters:
            prune.random_unstructured(net, "weight_hh_l0", 0.5)
        elif event == 5:
            own(torch.randn(3, 2, 3))
            own = own.clone()
            state = own.state
        elif event == 6:
            own, before = pickle.loads(pickle.dumps(own)), own
            net, head = own._arguments[0]
            before(torch.randn(3, 2, 3))
        elif event == 7:
            which = torch.tensor([True, False])
            own.reset(which)
            rows = [each.clone() for each in listed(state)] if state is not None else []
            for each in rows:
                each[:, which] = 0
            state = (tuple(rows) if len(rows) > 1 else rows[0]) if rows else None
        else:
            with torch.no_grad():
                head.bias.add_(0.1)
        x = torch.randn(int(torch.randint(1, 20, ())), 2, 3)
        with torch.no_grad():
            if "weight_hh_l0_mask" in net._buffers:
                net(x)  # the hook makes the weight
            output, state = net(x, state)
            expected = head(output)
        close(own(x), expected)
        for a, b in zip(listed(own.state), listed(state), strict=True):
            close(a, b)


def test_parameters_by_parametrisations() -> None:
    net = parametrizations.weight_norm(nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 2))[1], "weight")
    gru = nn.GRU(3, 4)
    own, x = stream(nn.Sequential(gru, net)), torch.randn(9, 1, 3)
    with torch.no_grad():
        net.parametrizations.weight.original0.mul_(3)
        expected = net(gru(x)[0])
    close(own(x), expected)


def test_what_pytorch_does_not_count_is_seen_after_update() -> None:
    net = nn.GRU(1, 4)
    own, x = stream(net), torch.randn(1, 1)
    first = own(x)
    net.bias_ih_l0.data.add_(1)
    own.reset()
    assert torch.equal(own(x), first)
    own.reset()
    own.update()
    with torch.no_grad():
        close(own(x), net(x[None])[0][0])


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        net = nn.GRU(1, 4)
        own, x = stream(net), torch.randn(1, 1)
        net.bias_ih_l0.add_(1)
        own.update()
        close(own(x), net(x[None])[0][0])


def test_results_are_the_callers() -> None:
    own, x = stream(nn.LSTM(2, 5)), torch.ones(1, 2)
    first = own(x)
    kept, twin = first.clone(), own.clone()
    out = torch.empty(1, 5)
    assert own(x, out) is out
    assert torch.equal(first, kept)
    assert torch.equal(out, twin(x))
    assert not first.requires_grad
    other = copy.copy(own)
    other(x)
    assert torch.equal(own(x), twin(x))


def test_inputs_of_any_form() -> None:
    own, x = stream(nn.GRU(2, 5), 3), torch.randn(7, 3, 2)
    expected = own(x)
    strided, negated = x.transpose(0, 1).contiguous().transpose(0, 1), torch._neg_view(-x)
    assert not strided.is_contiguous()
    assert negated.is_neg()
    for each in (strided, negated, nn.Parameter(x)):
        own.reset()
        with torch.no_grad():
            assert torch.equal(own(each), expected)
    with torch.device("meta"):
        own.reset()
        assert torch.equal(own(x), expected)


def test_threads_have_streams_of_their_own() -> None:
    net, x = nn.LSTM(4, 30), torch.randn(4, 2000, 1, 4)
    expected = [stream(net)(each) for each in x]
    found: list[Any] = [None] * 4

    def run(k: int) -> None:
        own = stream(net)
        found[k] = torch.cat([own(x[k, t : t + 1 + k]) for t in range(0, 2000, 1 + k)])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(map(torch.equal, found, expected))


def test_wide_steps_are_shared_by_threads() -> None:
    net, x = nn.LSTM(8, 1100), torch.randn(5, 1, 8)
    own = stream(net)
    whole = own(x)
    with torch.no_grad():
        torch.testing.assert_close(whole, net(x)[0], rtol=0, atol=1e-5)
    own.reset()
    assert torch.equal(joined([own(x[0]), own(x[1:])]), whole)


class Driven(Cell):
    """The input, the state and a further input."""

    weight_ih = Input()
    weight_hh = Hidden()
    drive = Given()

    def step(self, x: Any, h: Any) -> Any:
        return self.weight_ih(x) + self.weight_hh(h) * self.drive


def test_what_is_refused() -> None:
    net = nn.LSTM(2, 5)
    own, x = stream(net, 3), torch.zeros(3, 2)
    with pytest.raises(InputError, match=r"x has shape \(2, 2\); expected \(steps, 3, 2\)"):
        own(torch.zeros(2, 2))
    with pytest.raises(InputTypeError, match=r"x has dtype torch.float64; expected torch.float32"):
        own(x.double())
    with pytest.raises(InputTypeError, match=r"x is .*; expected a tensor"):
        own(x.numpy())
    with pytest.raises(DeviceError, match="x is on meta"):
        own(x.to("meta"))
    with pytest.raises(InputError, match="x requires a gradient"):
        own(x.clone().requires_grad_())
    for out in (torch.empty(3, 4), torch.empty(3, 10)[:, ::2]):
        with pytest.raises(InputError, match="out has shape"):
            own(x, out)
    room = torch.zeros(100)
    with pytest.raises(InputError, match="out shares memory"):
        own(room[:6].view(3, 2), room[5:20].view(3, 5))
    with pytest.raises(InputError, match="state has shape"):
        own.state = (torch.zeros(1, 3, 5), torch.zeros(1, 3, 4))
    with pytest.raises(InputTypeError, match="expected 2 of tensors"):
        own.state = torch.zeros(1, 3, 5)
    with pytest.raises(InputTypeError, match="state has dtype float64"):
        own.state = (torch.zeros(1, 3, 5).double(),) * 2
    before = own(x)
    net.double()
    for _ in range(2):
        with pytest.raises(InputTypeError, match="have become of float64; expected float32"):
            own(x)
    net.float()
    own.reset()
    assert torch.equal(own(x), before)
    net.bias_ih_l0 = nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match="a parameter has shape"):
        own(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["vmap", "grad", "forward mode", "trace"])
def test_transforms_are_refused(how: str) -> None:
    own, x = stream(nn.LSTM(2, 5), 3), torch.zeros(3, 2)
    calls: dict[str, Any] = {
        "vmap": lambda: torch.vmap(own)(x[None]),
        "grad": lambda: torch.func.grad(lambda given: own(given).sum())(x),
        "forward mode": lambda: torch.func.jvp(own, (x,), (x,)),
        "trace": lambda: torch.jit.trace(lambda given: own(given), x),
    }
    with pytest.raises(InputError, match="expected a call outside of it"):
        calls[how]()


def test_a_compiled_function_may_call_a_stream() -> None:
    own, x = stream(nn.LSTM(2, 5), 3), torch.randn(3, 2)
    twin = own.clone()
    compiled = torch.compile(lambda given: own(2 * given) + 1, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), twin(2 * x) + 1)


def test_models_that_are_refused() -> None:
    with pytest.raises(InputError, match="two directions"):
        stream(nn.GRU(2, 5, bidirectional=True))
    with pytest.raises(InputError, match="whose steps read drive_l0"):
        stream(module(Driven)(2, 5))
    with pytest.raises(InputError, match="expected a recurrent module in it"):
        stream(nn.Sequential(nn.Linear(3, 5), nn.Tanh()))
    with pytest.raises(InputError, match="behind 5 outputs; expected 4"):
        stream(nn.Sequential(nn.GRU(2, 5), nn.Linear(4, 2)))
    with pytest.raises(InputError, match="behind 5 outputs; expected 4"):
        stream(nn.Sequential(nn.GRU(2, 5), nn.GRU(4, 2)))
    with pytest.raises(InputError, match="behind no outputs"):
        stream(nn.Sequential(nn.Tanh(), nn.GRU(4, 2)))
    with pytest.raises(InputTypeError, match="a layer is Conv1d"):
        stream(nn.Sequential(nn.GRU(2, 5), nn.Conv1d(5, 5, 1)))
    with pytest.raises(InputTypeError, match="forward or hooks of its own"):
        stream(nn.Sequential(nn.GRU(2, 5), Last()))
    hooked = nn.GRU(2, 5)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(InputTypeError, match="hooks of its own"):
        stream(hooked)
    with pytest.raises(InputTypeError, match=r"expected a torch.nn.Module"):
        stream(3)  # type: ignore[arg-type]

"""Converted models beside plain ones: their classes, and what other packages make of them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torchrecurrent
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import prune

import sparsescan.torch
from sparsescan.torch import convert

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
]

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def pruned(layer: Any) -> Any:
    """Return a layer of whose weights few are kept."""
    with torch.no_grad():  # PyTorch copies no weight that has a graph
        return prune.l1_unstructured(layer, "weight", 0.95)


def plain_model() -> nn.ModuleDict:
    """Return a model that holds one of each kind that is replaced."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {kind.__name__: kind(3, 4, 2, bidirectional=True) for kind in RECURRENT}
        | {
            "MGU": torchrecurrent.MGU(3, 4),
            "stack": nn.Sequential(pruned(nn.Linear(9, 30)), nn.ReLU()),
            "Linear": pruned(nn.Linear(9, 30)),
            "Conv1d": pruned(nn.Conv1d(4, 4, 9)),
            "Conv2d": pruned(nn.Conv2d(4, 4, 3)),
            "ConvTranspose2d": pruned(nn.ConvTranspose2d(4, 4, 3)),
        }
    )


def converted(model: Any) -> Any:
    """Return a converted copy of a model."""
    copied = copy.deepcopy(model)
    assert convert(copied).replaced
    return copied


def test_converted_modules_are_instances_of_what_they_replace() -> None:
    model = plain_model()
    names = list(dict(model.named_modules()))
    kinds = {name: type(module) for name, module in model.named_modules()}
    done = convert(model)
    assert done.replaced == [name for name in names if "." not in name and name]
    for name, module in model.named_modules():
        kind: Any = kinds[name]
        assert isinstance(module, kind)
        assert {type(module): 1}.get(kind) == {kind: 1}.get(type(module)) == 1
        assert type(module) in [kind]
        assert (type(module) is kind) == (name not in done.replaced)
    net = model["LSTM"]
    assert repr(net) == "LSTM(3, 4, num_layers=2, bidirectional=True)"
    assert isinstance(net, nn.RNNBase)
    assert issubclass(sparsescan.torch.LSTM, nn.LSTM)

    class Own(sparsescan.torch.LSTM):
        pass

    assert Own != nn.LSTM
    assert len({Own, sparsescan.torch.LSTM, nn.LSTM, sparsescan.torch.GRU, nn.GRU}) == 3
    assert nn.LSTM != sparsescan.torch.GRU
    assert sparsescan.torch.GRU != 3


@pytest.mark.parametrize("kind", RECURRENT)
def test_attributes_are_pytorchs(kind: Any) -> None:
    """All that PyTorch's class has is there, and is PyTorch's but for the forward pass."""
    ours = getattr(sparsescan.torch, kind.__name__)
    other = [
        name
        for name in dir(kind)
        if inspect.getattr_static(ours, name) is not inspect.getattr_static(kind, name)
    ]
    names = {"__module__", "__doc__", "__dict__", "__weakref__", "__init__", "forward"}
    assert set(other) <= names | {"__annotations__", "__jit_unused_properties__"}
    assert inspect.signature(ours(2, 3).forward) == inspect.signature(kind(2, 3).forward)


@pytest.mark.parametrize("kind", RECURRENT)
def test_scripted_models_are_pytorchs(kind: Any) -> None:
    """And the model that was scripted stays converted."""
    plain = nn.Sequential(kind(3, 4, 2, bidirectional=True))
    ours = converted(plain)
    before = type(ours[0])
    scripted = torch.jit.script(ours)
    assert type(ours[0]) is before
    x, (output, _) = torch.randn(5, 2, 3), plain(torch.zeros(5, 2, 3))
    assert torch.equal(scripted(torch.zeros(5, 2, 3))[0], output)
    torch.testing.assert_close(scripted(x), ours(x))


def test_quantised_models_are_those_of_plain_ones() -> None:
    model = plain_model()
    for name in [name for name, each in model.items() if each._forward_pre_hooks]:
        prune.remove(model[name], "weight")
    ours = copy.deepcopy(model)
    for name in RECURRENT:
        convert(ours[name.__name__])
    for spec in (None, {nn.LSTM}, {nn.GRU, nn.Linear}):
        both = [quantize_dynamic(each, spec) for each in (model, ours)]
        assert repr(both[0]) == repr(both[1])
        states = [each.state_dict() for each in both]
        assert states[0].keys() == states[1].keys()
        x = torch.randn(5, 2, 3)
        for name in ("LSTM", "GRU"):
            torch.testing.assert_close(both[1][name](x), both[0][name](x))
    assert type(ours["LSTM"]) is sparsescan.torch.LSTM


class Net(nn.Module):
    """A model that uses a recurrent module between two other layers."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.before, self.rnn, self.after = nn.Linear(3, 3), rnn, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        output, _ = self.rnn(self.before(x).tanh())
        return self.after(output)


def test_compiled_models() -> None:
    """PyTorch compiles no function that uses a recurrent module, if `allow_rnn` is not set."""
    torch.manual_seed(0)
    plain = Net(nn.LSTM(3, 4))
    ours, x, made = converted(plain), torch.randn(5, 2, 3), list[list[str]]()
    for model in (plain, ours):
        torch._dynamo.reset()
        graphs: list[str] = []

        def backend(graph: Any, _: Any, graphs: list[str] = graphs) -> Any:
            graphs.append(graph.code)
            return graph.forward

        compiled = torch.compile(model, backend=backend)
        for _ in range(8):
            torch.testing.assert_close(compiled(x), plain(x))
        made.append(graphs)
    assert made[0] == made[1]


def test_copies_and_files() -> None:
    ours = converted(plain_model())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for one, two in zip(ours.modules(), other.modules(), strict=True):
            assert type(one) is type(two)
        x = torch.randn(5, 2, 3)
        torch.testing.assert_close(other["LSTM"](x), ours["LSTM"](x))

"""Converted models beside plain ones: their classes, and what other packages make of them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest
import torch
import torchrecurrent
from torch import fx, nn
from torch.ao.quantization import quantize_dynamic
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.onnx._internal.exporter import _flags

import sparsescan.torch
from sparsescan import InputTypeError
from sparsescan.recurrent.catalogue import MGU
from sparsescan.torch import convert, explain, revert
from sparsescan.torch.calls.prepared import only

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
    for module in (nn.LSTM(3, 4), net, sparsescan.torch.GRU(3, 4)):  # which are equal by class
        assert isinstance(module, sparsescan.torch.LSTM) == (module is net)
        assert issubclass(type(module), sparsescan.torch.LSTM) == (module is net)
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
    names |= {"__annotations__", "__jit_unused_properties__", "__setstate__"}
    assert set(other) <= names
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


def test_symbolic_traces_have_modules_as_leaves() -> None:
    plain = Net(nn.LSTM(3, 4))
    plain.after = pruned(plain.after)
    ours, x = converted(plain), torch.randn(5, 2, 3)
    traced = [fx.symbolic_trace(model) for model in (plain, ours)]
    assert traced[0].code == traced[1].code
    torch.testing.assert_close(traced[1](x), plain(x))


@pytest.mark.parametrize("is_first", [False, True])
def test_parametrised_modules(is_first: bool) -> None:
    """A module may be converted before its weights are parametrised, or afterwards."""
    torch.manual_seed(0)
    net, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    steps: list[Any] = [convert, lambda net: parametrizations.orthogonal(net, "weight_hh_l0")]
    for step in steps if is_first else reversed(steps):
        step(net)
    plain = nn.GRU(3, 4)
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            getattr(plain, name).copy_(getattr(net, name))
    assert explain(net) == ([""], {})
    torch.testing.assert_close(net(x), plain(x))
    loss = net(x)[0].square().sum()
    loss.backward()
    assert float(net.parametrizations.weight_hh_l0.original.grad.abs().max()) > 0
    assert revert(net) == ([""], {})
    assert parametrize.type_before_parametrizations(net) is nn.GRU
    torch.testing.assert_close(net(x), plain(x))
    convert(net)
    parametrize.remove_parametrizations(net, "weight_hh_l0")
    assert type(net) is sparsescan.torch.GRU
    torch.testing.assert_close(net(x), plain(x))


def test_copies_and_files() -> None:
    ours = converted(plain_model())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for one, two in zip(ours.modules(), other.modules(), strict=True):
            assert type(one) is type(two)
        x = torch.randn(5, 2, 3)
        torch.testing.assert_close(other["LSTM"](x), ours["LSTM"](x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RECURRENT)
def test_exports_to_onnx_are_of_pytorchs_operators(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = nn.Sequential(kind(3, 4, 2)).eval(), torch.randn(5, 2, 3)
    ours = converted(plain)

    def code_of(model: Any) -> str:
        return str(torch.export.export(model, (x,)).graph_module.code)

    assert "sparsescan" in code_of(ours)
    monkeypatch.setattr(_flags, "_is_onnx_exporting", True)
    assert code_of(ours) == code_of(plain)
    traced = [str(torch.jit.trace(model, x).inlined_graph) for model in (plain, ours)]
    assert [each.count("aten::") for each in traced] == [traced[0].count("aten::")] * 2


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_onnx_models_are_those_of_plain_ones(is_new: bool) -> None:
    onnx = pytest.importorskip("onnx")
    if is_new:
        pytest.importorskip("onnxscript")
    plain, x = nn.LSTM(3, 4, 2, bidirectional=True).eval(), torch.randn(5, 2, 3)
    made = []
    for model in (plain, converted(plain)):
        file: Any = io.BytesIO()
        if is_new:
            program: Any = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
            program.save(file)
        else:
            torch.onnx.export(model, (x,), file, dynamo=False)
        nodes = onnx.load_from_string(file.getvalue()).graph.node
        made.append([(node.op_type, *node.input, *node.output) for node in nodes])
    assert made[0] == made[1]


class Plain(nn.LSTM):
    """A class with a constructor and a method of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 4, batch_first=True)

    def reset_parameters(self) -> None:
        for each in self.parameters():
            nn.init.constant_(each, 0.1)


class Base(ABC, nn.RNNBase):
    """An abstract class, as in pytorch-forecasting."""

    @abstractmethod
    def begin(self, x: torch.Tensor) -> Any: ...

    def forward(self, x: Any, hx: Any = None, scale: float = 1.0) -> Any:
        output, last = super().forward(scale * x, hx=self.begin(x) if hx is None else hx)
        return 2 * output, last


class Scaled(Base, nn.GRU):
    def begin(self, x: torch.Tensor) -> Any:
        return torch.ones(self.num_layers, x.shape[1], self.hidden_size)


class Loop(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
        return input, hx


class Explicit(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
        return nn.GRU.forward(self, input, hx)


class Checks(nn.GRU):
    def check_input(self, input: Any, batch_sizes: Any) -> None:  # noqa: A002
        raise KeyError


class Masked(nn.GRU):
    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        return 4

    @hidden_size.setter
    def hidden_size(self, size: int) -> None: ...


class Remembers(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
        self.states = hx
        return super().forward(input, hx)


class Counts(nn.GRU):
    kinds: ClassVar[list[Any]] = []

    def __init_subclass__(cls) -> None:
        Counts.kinds.append(cls)


class OddType(type):
    """A metaclass."""


class Odd(nn.GRU, metaclass=OddType):
    pass


@pytest.mark.parametrize("make", [lambda: Plain(3), lambda: Scaled(3, 4, 2)])
def test_classes_of_users_keep_all_but_pytorchs_forward_pass(make: Any) -> None:
    torch.manual_seed(0)
    plain, x = make(), torch.randn(6, 2, 3, requires_grad=True)
    kind: Any = type(plain)
    ours = converted(plain)
    assert isinstance(ours, (kind, sparsescan.torch.LSTM, sparsescan.torch.GRU))
    assert type(ours) == kind  # noqa: E721
    assert repr(ours) == repr(plain)
    for other in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours)
        with only("sparsescan"):
            grads = [torch.autograd.grad(each(x)[0].sum(), x)[0] for each in (plain, other)]
            torch.testing.assert_close(grads[1], grads[0])
    if isinstance(plain, Scaled):
        torch.testing.assert_close(ours(x, scale=3.0), plain(x, scale=3.0))
    assert "sparsescan.recurrent" in make_fx(lambda x: ours(x)[0])(x).code
    assert type(type(ours)(3, *([4] * isinstance(plain, Scaled)))) is type(ours)
    revert(ours)
    assert type(ours) is kind
    assert b"sparsescan" not in pickle.dumps(ours)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Loop, "whose forward may differ"),
        (Explicit, "whose forward may differ"),
        (Checks, "whose check_input may differ"),
        (Masked, "whose hidden_size may differ"),
        (Remembers, "which uses the name states otherwise"),
        (Counts, "whose __init_subclass__ may differ"),
        (Odd, "whose metaclass lets no other class stand behind it"),
    ],
)
def test_classes_of_users_that_do_more_are_left(kind: Any, why: str) -> None:
    net = kind(3, 4)
    assert convert(net) == ([], {"": f"it is a {kind.__name__}, {why}"})
    assert type(net) is kind
    assert Counts.kinds == []


def test_scripted_parts_do_not_stop_a_conversion() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4)))
    model = nn.ModuleDict({"a": nn.GRU(3, 4), "b": scripted, "c": nn.LSTM(3, 4)})
    assert convert(model) == (["a", "c"], {"b": "torch.jit has compiled it"})


def test_a_conversion_is_whole_or_not_at_all() -> None:
    class Strange(nn.Linear):
        @property
        def _forward_pre_hooks(self) -> Any:  # type: ignore[override]
            raise KeyError

        @_forward_pre_hooks.setter
        def _forward_pre_hooks(self, hooks: Any) -> None: ...

    model = nn.ModuleDict({"a": nn.GRU(3, 4), "b": Strange(3, 3)})
    with pytest.raises(KeyError):
        convert(model)
    assert type(model["a"]) is nn.GRU


def test_reverted_models_are_as_before() -> None:
    model = plain_model()
    x = torch.randn(5, 2, 3)
    before = [(name, each, type(each)) for name, each in model.named_modules()]
    params = [(name, id(each)) for name, each in model.named_parameters()]
    attributes = [set(vars(each)) for each in model.modules()]
    done = convert(model, memory_limit=1 << 20, truncate=2)
    with torch.no_grad():
        for name in ("LSTM", "MGU"):
            model[name](x)
        for name in ("stack", "Linear"):
            model[name](torch.randn(2, 9))
    assert explain(model) == (done.replaced, {})
    assert revert(model) == (done.replaced, {})
    for (name, module), (*expected, kind) in zip(model.named_modules(), before, strict=True):
        assert [name, module] == expected
        assert type(module) is kind
    assert [(name, id(each)) for name, each in model.named_parameters()] == params
    assert [set(vars(each)) for each in model.modules()] == attributes
    assert b"sparsescan" not in pickle.dumps(model)
    assert revert(model) == ([], {})
    assert explain(model) == ([], dict.fromkeys(done.replaced, "convert has not seen it"))


def test_modules_that_pytorch_has_none_of_are_not_reverted() -> None:
    class Own(sparsescan.torch.GRU):
        pass

    model = nn.ModuleDict(
        {
            "cells": sparsescan.torch.module(MGU)(3, 4),
            "states": sparsescan.torch.LSTM(3, 4, return_states=True),
            "own": Own(3, 4),
            "net": sparsescan.torch.RNN(3, 4, truncate=5),
            "other": nn.Identity(),
        }
    )
    model["other"].return_states = True
    done = revert(model)
    assert done.replaced == ["net"]
    assert done.left.keys() == {"cells", "states", "own"}
    assert type(model["net"]) is nn.RNN
    with pytest.raises(InputTypeError, match="model is 3; expected"):
        revert(3)  # type: ignore[arg-type]

"""Layers of torchrecurrent that are converted, beside those that are not."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import snntorch
import torch
import torchrecurrent
from hypothesis import assume, given
from hypothesis import strategies as st
from module_copies import copies_of
from sampling import slow
from torch import nn
from torch.nn.utils import prune
from torch_checks import tensors_of

from sparsescan.torch import convert
from sparsescan.torch.conversion import torchrecurrent as conversion

EPS = torch.finfo(torch.float64).eps
NAMES = sorted(
    name
    for name in torchrecurrent.__all__
    if issubclass(getattr(torchrecurrent, name), torchrecurrent.base.RecurrentLayerBase)
)
# Not Hardsigmoid, which has the sixth in PyTorch's derivative as float32, also for float64; nor
# Softplus, which is a line from 20 on there.
ACTIVATIONS = ("tanh", "relu", "sigmoid", "elu", "leaky_relu", "silu", "identity")


def detached(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach()
    return tuple(map(detached, state))


def made(name: str, rng: np.random.Generator) -> Any:
    """Return a layer with options of any kind."""
    kind, cell = (getattr(torchrecurrent, each) for each in (name, f"{name}Cell"))
    inputs, hidden, layers = (int(n) for n in rng.integers(1, [5, 7, 4]))
    known, about = inspect.signature(cell).parameters, dict[str, Any]()
    for key in known:
        if key.endswith("bias"):
            about[key] = bool(rng.integers(2))
        elif key.endswith("nonlinearity"):
            default = "tanh" if name in ("SGU", "DSGU") else known[key].default
            about[key] = rng.choice(ACTIVATIONS) if rng.integers(2) else default
        elif key in ("dt", "epsilon", "gamma", "update_coefficient", "reset_coefficient"):
            about[key] = float(rng.choice([0.3, 0.8]))
    if name == "tauGRU":
        about["delay"] = int(rng.integers(1, 4))
    inputs = hidden if name == "IntersectionRNN" else inputs
    dropout = float(rng.choice([0.0, 0.3]))
    net = kind(inputs, hidden, layers, dropout, bool(rng.integers(2)), **about).double()
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.as_tensor(0.2 * rng.standard_normal(param.shape)))
    return net


def results_of(net: Any, x: torch.Tensor, state: Any, seed: int) -> tuple[list[Any], Any]:
    """Return results and gradients, and the last state."""
    torch.manual_seed(seed)
    given = x.clone().requires_grad_()
    output, last = net(given, state)
    flat = [output, *tensors_of(last)]
    loss = sum((each * torch.randn_like(each)).sum() for each in flat)
    leaves = [given, *net.parameters()]
    if state is not None:
        leaves += [each for each in tensors_of(state) if each.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [*flat, *grads], last


def close(actual: list[Any], expected: list[Any]) -> None:
    scale = max(1.0, *(float(each.detach().abs().max()) for each in expected))
    for k, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == other.shape
        assert float((one - other).detach().abs().max()) <= 1e4 * EPS * scale, k


@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1))
def test_any_layer(name: str, seed: int) -> None:
    """Outputs, states, gradients and what dropout draws, from no state and from another one."""
    rng = np.random.default_rng(seed)
    theirs = made(name, rng)
    ours = copy.deepcopy(theirs)
    if getattr(getattr(theirs.cells[0], "weight_hh", None), "ndim", 0) == 2 and rng.integers(2):
        amount = float(rng.choice([0.3, 0.9]))
        for net in (theirs, ours):
            torch.manual_seed(seed)
            prune.random_unstructured(net.cells[0], "weight_hh", amount)
    assert convert(ours).replaced == [""]
    lead = tuple(int(n) for n in rng.integers(1, 7, 2))
    x = torch.from_numpy(rng.standard_normal((*lead, theirs.input_size)))
    assert conversion._sequence_of(ours, x, None) is not None
    expected, last = results_of(theirs, x, None, seed)
    # Gates that are identities let states grow without a bound.
    assume(all(bool((each.abs() < 1e3).all()) for each in expected))
    close(results_of(ours, x, None, seed)[0], expected)
    state = detached(last)
    if name == "JANET":
        state = (state[0], state[1] / 2)
    for each in tensors_of(state):
        each.requires_grad_()
    assert conversion._sequence_of(ours, x, state) is not None
    expected, _ = results_of(theirs, x, state, seed)
    assume(all(bool((each.abs() < 1e3).all()) for each in expected))
    close(results_of(ours, x, state, seed)[0], expected)


@pytest.mark.parametrize("name", ["MGU", "TGRU", "SCRN", *slow(*NAMES)])
def test_each_layer_of_single_precision(name: str) -> None:
    """Options as they are, one number of float32 beside float64, and copies."""
    torch.manual_seed(0)
    net = getattr(torchrecurrent, name)(4, 4)
    x = torch.randn(6, 3, 4)
    expected, _ = net(x)
    state = net.state_dict()
    assert convert(net).replaced == [""]
    torch.testing.assert_close(net(x)[0], expected)
    assert isinstance(net, getattr(torchrecurrent, name))
    assert list(net.state_dict()) == list(state)
    for other in copies_of(net):
        assert type(other) is type(net)
        assert torch.equal(other(x)[0], net(x)[0])
    double = getattr(torchrecurrent, name)(4, 4, dtype=torch.float64)
    expected, _ = double(x.double())
    convert(double)
    assert conversion._sequence_of(double, x.double(), None) is not None
    torch.testing.assert_close(double(x.double())[0], expected)


def test_what_is_left_alone() -> None:
    class Own(torchrecurrent.MGU):
        pass

    mixed = torchrecurrent.MGU(3, 3, 2)
    mixed.cells[1].act = nn.ReLU()
    model = nn.ModuleDict(
        {
            "layer": torchrecurrent.LiGRU(3, 4),
            "cell": torchrecurrent.MGUCell(3, 4),
            "own": Own(3, 4),
            "gelu": torchrecurrent.MGU(3, 4, nonlinearity="gelu"),
            "steep": torchrecurrent.MGU(3, 4, nonlinearity=nn.ELU(2.0)),
            "mixed": mixed,
        }
    )
    done = convert(model)
    assert done.replaced == ["layer"]
    assert done.left == {
        "own": "it is a Own, whose forward may differ",
        "gelu": "a nonlinearity has no kernel",
        "steep": "a nonlinearity has no kernel",
        "mixed": "its cells have different options",
    }
    assert convert(model).replaced == []


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_version", lambda: "0.3.0")
    net = torchrecurrent.MGU(3, 4)
    assert str(convert(net)).startswith("model: left alone, torchrecurrent is 0.3.0; expected")


def test_what_happens_afterwards() -> None:
    """Hooks of cells, other functions, other cells and other classes are seen at the next call."""
    torch.manual_seed(0)
    theirs = torchrecurrent.MGU(3, 4, 2, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    convert(ours)
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def both(change: Any) -> None:
        for net in (theirs, ours):
            torch.manual_seed(1)
            change(net)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)

    handles = []
    both(lambda net: handles.append(net.cells[0].register_forward_hook(lambda _, __, y: 2 * y)))
    both(lambda net: handles.pop().remove())
    both(lambda net: setattr(net.cells[1], "act", nn.GELU()))
    both(lambda net: setattr(net.cells[1], "act", nn.ReLU()))
    both(lambda net: setattr(net.cells[0], "act", nn.ReLU()))
    both(lambda net: nn.utils.parametrizations.weight_norm(net.cells[0], "weight_hh"))
    both(lambda net: net.cells.__setitem__(0, torchrecurrent.MGUCell(3, 4).double()))
    both(lambda net: setattr(net.cells[1].act, "forward", lambda a: a))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        forward = torchrecurrent.MGUCell.forward
        patch.setattr(
            torchrecurrent.MGUCell, "forward", lambda self, *given: forward(self, *given) + 1
        )
        both(lambda net: None)


def test_errors_are_torchrecurrents() -> None:
    theirs = torchrecurrent.PeepholeLSTM(3, 4)
    ours = copy.deepcopy(theirs)
    convert(ours)
    x, h = torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    for arguments in (
        (x[0],),
        (x.double(),),
        (x[..., :2],),
        (x[:0],),
        (x, (h,)),
        (x, (h, h[:, :1, :3])),
    ):
        messages = []
        for net in (theirs, ours):
            with pytest.raises(Exception) as caught:  # noqa: PT011, whatever it raises
                net(*arguments)
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1]


def test_transforms_and_compilers() -> None:
    torch.manual_seed(0)
    theirs = torchrecurrent.MGU(3, 4)
    ours = copy.deepcopy(theirs)
    convert(ours)
    x = torch.randn(4, 2, 3)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x))
    grads = [
        torch.func.grad(lambda x, net=net: net(x)[0].square().sum())(x) for net in (ours, theirs)
    ]
    torch.testing.assert_close(*grads)


@given(st.integers(0, 2**32 - 1))
def test_the_network_in_parallel_neurons_of_snntorch_is_replaced(seed: int) -> None:

    torch.manual_seed(seed)
    old, new = (snntorch.LeakyParallel(3, 5, beta=0.9, learn_beta=True).double() for _ in range(2))
    new.load_state_dict(old.state_dict())
    assert str(convert(new)) == "rnn: replaced"
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    spikes, others = old(x), new(x)
    assert torch.equal(spikes, others)
    cotangent = torch.randn_like(spikes)
    for each in (spikes, others):
        each.backward(cotangent)
    for a, b in zip(old.parameters(), new.parameters(), strict=True):
        if a.grad is not None:
            bound = 1e4 * EPS * max(1.0, float(a.grad.abs().max()))
            assert (a.grad - b.grad).abs().max() <= bound

"""Pruned layers that a model calls itself: taken, or named with the reason why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from sparsescan.torch import convert, sequential
from sparsescan.torch.conversion import alone

EPS = torch.finfo(torch.float64).eps
is_slower = sequential._is_slower


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run however small a layer is."""
    monkeypatch.setattr(sequential, "_is_slower", lambda *_: False)


class Net(nn.Module):
    """The network of many tutorials."""

    def __init__(self, share: float = 0.95) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(4 * 36, 40)
        self.fc2 = nn.Linear(40, 3)
        for layer in (self.conv, self.fc1, self.fc2):
            prune.l1_unstructured(layer, "weight", share)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x)).flatten(1)
        return self.fc2(functional.relu(self.fc1(x)))  # type: ignore[no-any-return]


def pair(seed: int = 0) -> tuple[Net, Net, Tensor]:
    """Return a network, a converted copy of it, and an input."""
    torch.manual_seed(seed)
    with torch.no_grad():
        net = Net().double()
    ours = copy.deepcopy(net)
    convert(ours)
    return net, ours, torch.randn(5, 1, 8, 8, dtype=torch.float64)


def ran_here(layer: nn.Module) -> bool:
    """Whether the latest call was not left to PyTorch."""
    return sequential._stacks[alone._stacks[layer]].runs_here


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e4 * EPS, atol=1e4 * EPS)


def test_report_of_layers_without_masks() -> None:
    """As ``prune.remove`` leaves them, in a stack or not."""
    net = nn.ModuleDict({"net": Net(), "stack": nn.Sequential(nn.Linear(30, 40), nn.ReLU())})
    prune.l1_unstructured(net["stack"][0], "weight", 0.9)
    for layer in (net["net"].conv, net["net"].fc1, net["net"].fc2, net["stack"][0]):
        prune.remove(layer, "weight")
    nn.init.zeros_(net["net"].fc2.weight)  # so some layers begin
    done = convert(net)
    assert done.replaced == []
    assert done.left.keys() == {"net.conv", "net.fc1", "stack.0"}
    why = "of its weights are 0, but without a mask training may change them"
    assert done.left["net.fc1"].startswith(f"95% {why}")
    assert done.left["stack.0"].startswith(f"90% {why}")
    # What the report says helps.
    layer = net["stack"][0]
    prune.custom_from_mask(layer, "weight", layer.weight != 0)
    assert convert(net).replaced == ["stack"]


def test_report_of_all_other_reasons() -> None:
    class OwnLinear(nn.Linear):
        pass

    layers: dict[str, nn.Module] = {
        "dense": nn.Linear(9, 30),
        "hooked": nn.Linear(9, 30),
        "embedding": nn.Embedding(9, 30),
        "volume": nn.Conv3d(1, 2, 3),
        "cell": nn.GRUCell(3, 4),
        "narrow": nn.Linear(9, 30).half(),
        "own": OwnLinear(9, 30),
        "bias": nn.Linear(9, 30),
    }
    for name, layer in layers.items():
        weight = {"cell": "weight_hh", "bias": "bias"}.get(name, "weight")
        prune.random_unstructured(layer, weight, 0.5 if name == "dense" else 0.9)
    layers["hooked"].register_forward_hook(lambda *given: None)
    done = convert(nn.ModuleDict(layers))
    assert done.replaced == []
    assert done.left == {
        "dense": "50% of its weights are kept, where PyTorch's dense products are faster",
        "hooked": "a Linear has hooks",
        "embedding": "a Embedding has no kernel",
        "volume": "a Conv3d has no kernel",
        "cell": "a GRUCell has no kernel",
        "narrow": "its parameters are of float16, which PyTorch computes: kernels take float32 and "
        "float64",
        "own": "a OwnLinear has no kernel",
    }


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = net(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]


def test_results_and_gradients() -> None:
    for seed in range(3):
        net, ours, x = pair(seed)
        close(gradients(ours, x), gradients(net, x))
        assert all(map(ran_here, ours.children()))
        with torch.no_grad():
            close(ours(x), net(x))
        close(ours.fc1.weight, net.fc1.weight)


def test_functional_calls() -> None:
    net, ours, x = pair()
    params = {name: 2 * each.detach() for name, each in net.named_parameters()}
    close(*(torch.func.functional_call(each, params, (x,)) for each in (ours, net)))


def test_layers_that_stood_alone_join_a_stack() -> None:
    _, ours, x = pair()
    stack = nn.Sequential(ours.fc1, nn.ReLU(), ours.fc2)
    given = torch.randn(5, 4 * 36, dtype=torch.float64)
    expected = ours.fc2(functional.relu(ours.fc1(given)))
    assert convert(stack).replaced == [""]
    assert type(stack[0]) is nn.Linear
    close(stack(given), expected)
    assert sequential._stacks[stack].runs_here
    assert ours(x).shape == (5, 3)


def test_the_faster_of_both_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "_is_slower", is_slower)
    for units, batch, is_ours in ((32, 4, False), (1024, 512, True)):
        layer = nn.Linear(units, units)
        prune.random_unstructured(layer, "weight", 0.95)
        assert convert(layer).replaced == [""]
        with torch.no_grad():
            layer(torch.randn(batch, units))
        assert ran_here(layer) == is_ours


@pytest.mark.parametrize(
    ("conv", "shape", "is_ours"),
    [
        (nn.Conv2d(32, 32, 3, padding=1), (4, 32, 32, 32), True),
        (nn.Conv2d(32, 32, 3, padding=1), (1, 32, 8, 8), False),
        (nn.Conv2d(3, 16, 3), (128, 3, 32, 32), False),
        (nn.Conv1d(64, 64, 5), (16, 64, 200), True),
        (nn.Conv1d(64, 64, 5, stride=4), (1, 64, 20), False),
        (nn.ConvTranspose2d(64, 32, 4, 2), (4, 64, 16, 16), True),
        (nn.ConvTranspose2d(64, 32, 4, 2), (1, 64, 4, 4), False),
    ],
)
def test_small_convolutions_are_left_to_pytorch(
    conv: nn.Module, shape: tuple[int, ...], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequential, "_is_slower", is_slower)
    prune.random_unstructured(conv, "weight", 0.95)
    x = torch.randn(shape)
    expected = conv(x)
    assert convert(conv).replaced == [""]
    torch.testing.assert_close(conv(x), expected)
    assert ran_here(conv) == is_ours

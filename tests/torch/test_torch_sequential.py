"""Stacks of pruned layers in place of PyTorch's, beside PyTorch's own in float64."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import Tensor, nn
from torch.nn.utils import prune
from torch_checks import close

import sparsescan.torch
from sparsescan.torch import convert, sequential
from sparsescan.torch.sequential import Sequential

is_slower = sequential._is_slower


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run however small a stack is."""
    monkeypatch.setattr(sequential, "_is_slower", lambda *_: False)


def stack(seed: int) -> tuple[nn.Sequential, Tensor]:
    """Return a random stack, some of its weights pruned, and an input."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, channels, size = int(rng.integers(1, 20)), int(rng.integers(1, 5)), 8
    x = torch.randn(batch, channels, size, size, dtype=torch.float64)
    layers: list[nn.Module] = []
    for _ in range(int(rng.integers(1, 3))):
        wide = int(rng.integers(1, 7))
        inner: list[nn.Module] = [
            nn.Conv2d(channels, wide, 3, padding=1, bias=bool(rng.random() < 0.5)),
            nn.ReLU() if rng.random() < 0.5 else nn.Tanh(),
        ]
        if size > 2 and rng.random() < 0.5:
            inner.append(nn.MaxPool2d(2))
            size //= 2
        layers += [nn.Sequential(*inner), nn.Identity()] if rng.random() < 0.3 else inner
        channels = wide
    features = channels * size * size
    layers += [nn.Flatten(), nn.Linear(features, 9), nn.ReLU(), nn.Linear(9, 3)]
    net = nn.Sequential(*layers).double()
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and rng.random() < 0.8:
            prune.random_unstructured(layer, "weight", float(rng.choice([0.5, 0.9])))
    return net, x


def ours_of(net: nn.Sequential) -> Sequential:
    """Return a stack of this package that has the same layers."""
    return Sequential(*net.children())


def gradients(net: nn.Module, x: Tensor, loss: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    params = list(net.parameters())
    y = net(x)
    return [y.detach(), *torch.autograd.grad((y * loss).sum(), [x, *params])]


def ran_here(net: nn.Module) -> bool:
    """Whether the latest call was not left to PyTorch."""
    known = sequential._stacks.get(net)
    return known is not None and known.runs_here


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_results_and_gradients(seed: int) -> None:
    net, x = stack(seed)
    ours, loss = ours_of(net), torch.randn(len(x), 3, dtype=torch.float64)
    close(gradients(ours, x, loss), gradients(net, x, loss))
    assert ran_here(ours)
    with torch.no_grad():
        close([ours(x)], [net(x)])


def normalised(seed: int) -> tuple[list[nn.Module], Tensor]:
    """Layers of a stack with batch normalisations in training, some weights pruned; an input."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, channels, size = (
        int(rng.integers(2, 20)),
        int(rng.integers(1, 4)),
        int(rng.integers(2, 7)),
    )
    x = 3 * torch.randn(batch, channels, size, size, dtype=torch.float64) + 2
    layers: list[nn.Module] = []
    for _ in range(int(rng.integers(1, 3))):
        wide = int(rng.integers(1, 6))
        layers += [
            nn.Conv2d(channels, wide, 3, padding=1),
            nn.BatchNorm2d(
                wide,
                momentum=rng.choice([None, 0.0, 0.1, 1.0]),
                affine=bool(rng.random() < 0.7),
                track_running_stats=bool(rng.random() < 0.8),
            ),
        ]
        if rng.random() < 0.3:
            layers.append(layers[-1])  # a layer that is called twice
        layers.append(nn.ReLU() if rng.random() < 0.5 else nn.Tanh())
        channels = wide
    if rng.random() < 0.7:
        layers += [nn.Flatten(), nn.Linear(channels * size * size, 3)]
    for layer in layers:
        layer.double()
        if isinstance(layer, nn.BatchNorm2d) and layer.affine:
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and rng.random() < 0.8:
            prune.random_unstructured(layer, "weight", 0.8)
    return layers, x


def same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        close([buffer], [expected.pop(name)])
    assert not expected


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_batch_normalisation_in_training(seed: int) -> None:
    """Several batches, also without a graph; then in evaluation."""
    layers, x = normalised(seed)
    ours, theirs = Sequential(*layers), nn.Sequential(*normalised(seed)[0])
    for size in (len(x), max(2, len(x) // 2), len(x)):
        part = x[:size] * torch.rand(1, dtype=torch.float64)
        loss = torch.randn_like(theirs(part)[:1])
        ours(part)
        expected = gradients(theirs, part, loss)
        # Some are sums of large numbers that are 0: a bias has no effect before a normalisation.
        terms = size * max(1.0, *(float(each.abs().max()) for each in expected))
        close(gradients(ours, part, loss), expected, terms)
        assert ran_here(ours)
        same_buffers(ours, theirs)
    with torch.no_grad():
        for _ in range(2):
            close([ours(x)], [theirs(x)])
        same_buffers(ours, theirs)
        ours.eval()
        theirs.eval()
        close([ours(x)], [theirs(x)])
        same_buffers(ours, theirs)


@settings(max_examples=examples(10))
@given(st.integers(0, 2**32))
def test_batch_normalisation_of_features(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, inputs, wide = (int(size) for size in rng.integers(2, 9, 3))
    if rng.random() < 0.5:
        layers = [nn.Linear(inputs, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, 3)]
        x = torch.randn(batch, inputs, dtype=torch.float64)
    else:
        layers = [nn.Conv1d(inputs, wide, 3), nn.BatchNorm1d(wide), nn.Tanh()]
        x = torch.randn(batch, inputs, 9, dtype=torch.float64)
    # Else rounding decides what is 0 in a channel whose weights are all pruned.
    nn.init.normal_(layers[1].bias)
    theirs = nn.Sequential(*layers).double()
    prune.random_unstructured(theirs[0], "weight", 0.8)
    with torch.no_grad():
        theirs(x)
    ours = copy.deepcopy(theirs)
    assert convert(ours).replaced == [""]
    for training in (True, True, False):
        ours.train(training)
        theirs.train(training)
        loss = torch.randn_like(theirs(x))
        ours(x)
        expected = gradients(theirs, x, loss)
        terms = batch * max(1.0, *(float(each.abs().max()) for each in expected))
        close(gradients(ours, x, loss), expected, terms)
        assert ran_here(ours)
        same_buffers(ours, theirs)


def test_running_statistics_take_in_a_batch_once() -> None:
    """A second backward pass runs forward again, and is no new batch."""
    norm = nn.BatchNorm2d(3)
    ours = Sequential(nn.Conv2d(2, 3, 3), norm)
    y = ours(torch.randn(4, 2, 5, 5)).square().sum()
    assert ran_here(ours)
    mean = norm.running_mean.clone()
    params = list(ours.parameters())
    first = torch.autograd.grad(y, params, retain_graph=True)
    again = torch.autograd.grad(y, params)
    torch.testing.assert_close(again, first)
    assert int(norm.num_batches_tracked) == 1
    assert torch.equal(norm.running_mean, mean)


def test_what_batch_normalisation_cannot_be_is_pytorchs() -> None:
    one = Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        one(torch.randn(1, 2, 3, 3))
    joined = Sequential(nn.BatchNorm2d(2), nn.Flatten(0))
    assert joined(torch.randn(2, 2, 3, 3)).shape == (36,)
    assert not ran_here(joined)
    assert int(joined[0].num_batches_tracked) == 1


def test_no_second_derivative() -> None:
    net, x = stack(6)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ours_of(net)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"a stack.*differentiated once more.*torch\.nn"):
        grad.sum().backward()


def test_what_has_no_kernel_is_pytorchs() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.PReLU())
    prune.l1_unstructured(net[0], "weight", 0.9)
    x = torch.randn(3, 4)
    ours = ours_of(net)
    torch.manual_seed(0)
    expected = net(x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=0)
    assert not ran_here(ours)
    norm = Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    norm(torch.randn(2, 2, 5, 5))
    assert int(norm[1].num_batches_tracked) == 1
    image = torch.randn(2, 2, 5, 5)
    own = norm.eval()(image)
    assert ran_here(norm)
    torch.testing.assert_close(own, nn.Sequential(*norm.children())(image))
    with pytest.raises(RuntimeError):
        ours(torch.randn(3, 5))


def test_masked_weights_are_plain_tensors_for_who_looks() -> None:
    """They cost nothing before, and are as PyTorch's pruning leaves them after."""
    net = Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double()
    prune.random_unstructured(net[0], "weight", 0.5)
    x, layer = torch.randn(3, 5, dtype=torch.float64), net[0]
    net(x)
    assert ran_here(net)
    assert isinstance(layer.weight, Tensor)
    assert repr(layer) == repr(nn.Linear(5, 7))
    before = layer.weight_orig.detach().clone()
    with torch.no_grad():
        layer.weight_orig.mul_(2)  # after the call
    weight = layer.weight
    torch.testing.assert_close(weight, layer.weight_mask * before, rtol=0, atol=0)
    assert type(weight) is Tensor
    assert weight.requires_grad
    weight.square().sum().backward()
    torch.testing.assert_close(layer.weight_orig.grad, 2 * layer.weight_mask * before)
    copies = [copy.deepcopy(net), copy.deepcopy(nn.ModuleList([net]))[0]]
    for each in copies:
        assert torch.equal(each[0].weight, weight)
        assert torch.equal(each(x), net(x))
        assert ran_here(each)
    with torch.inference_mode():
        net(x)
    assert torch.equal(layer.weight + 0, layer.weight_mask * layer.weight_orig)


@pytest.mark.parametrize("has_run", [False, True])
def test_compiled_models(has_run: bool) -> None:
    net, x = stack(7)
    ours, loss = ours_of(net), torch.randn(len(x), 3, dtype=torch.float64)
    if has_run:
        ours(x)
        assert ran_here(ours)
    compiled = torch.compile(ours, backend="aot_eager")
    close(gradients(compiled, x, loss), gradients(net, x, loss))
    close(ours(x), net(x))
    assert ran_here(ours)
    close(compiled(2 * x), net(2 * x))


def test_a_stack_that_changes_at_each_call_is_pytorchs() -> None:
    net = Sequential(nn.Linear(30, 40), nn.LeakyReLU(), nn.Linear(40, 3)).double()
    prune.random_unstructured(net[0], "weight", 0.9)
    theirs, x = nn.Sequential(*net.children()), torch.randn(4, 30, dtype=torch.float64)
    ran = []
    for k in range(20):
        net[1].negative_slope = k / 20
        torch.testing.assert_close(net(x), theirs(x))
        ran.append(ran_here(net))
    assert ran[:4] == [True] * 4
    assert not any(ran[4:])
    for _ in range(2):
        torch.testing.assert_close(net(x), theirs(x))
    assert ran_here(net)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_stacks() -> None:
    net = Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(2, 3)
    torch.testing.assert_close(torch.jit.script(net)(x), net(x))


def test_threads_share_a_stack() -> None:
    net, x = stack(9)
    ours = ours_of(net)
    expected = [net((k + 1) * x) for k in range(4)]

    def is_right(k: int) -> bool:
        return all(torch.allclose(ours((k + 1) * x), expected[k]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(4)))


def test_copies_and_files() -> None:
    with torch.no_grad():  # PyTorch copies no weight that has been pruned with a graph
        net, x = stack(8)
    ours = ours_of(net)
    expected = ours(x)
    again = copy.deepcopy(ours)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (again, torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
        assert ran_here(other)
    again.load_state_dict(net.state_dict())


def test_convert() -> None:
    def pruned(*layers: nn.Module, share: float = 0.95) -> nn.Sequential:
        net = nn.Sequential(*layers)
        prune.l1_unstructured(net[0], "weight", share)
        return net

    model = nn.ModuleDict(
        {
            "body": nn.Sequential(pruned(nn.Linear(9, 30), nn.ReLU()), nn.Linear(30, 4)),
            "middle": pruned(nn.Linear(9, 30), share=0.5),
            "other": pruned(nn.Linear(9, 30), nn.PReLU()),
            "dense": nn.Sequential(nn.Linear(9, 30)),
            "hooked": pruned(nn.Linear(9, 30)),
        }
    )
    model["hooked"][0].register_forward_hook(lambda *given: None)
    params: list[Any] = list(model.parameters())
    x = torch.randn(5, 9)
    expected = model["body"](x)
    done = convert(model)
    assert done.replaced == ["body"]
    assert done.left == {
        "middle": "50% of its weights are kept, where PyTorch's dense products are faster",
        "other": "a PReLU has no kernel",
        "hooked": "a Linear has hooks",
    }
    assert type(model["body"]) is sparsescan.torch.sequential.Sequential
    assert all(one is two for one, two in zip(model.parameters(), params, strict=True))
    torch.testing.assert_close(model["body"](x), expected)
    assert ran_here(model["body"])
    assert convert(model).replaced == []


@pytest.mark.parametrize(("units", "batch", "is_ours"), [(32, 4, False), (1024, 256, True)])
def test_the_faster_of_both_computes(
    units: int, batch: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are right whoever computes, and masks are looked at again after a while."""
    monkeypatch.setattr(sequential, "_is_slower", is_slower)
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 3)).double()
    prune.random_unstructured(theirs[0], "weight", 0.9)
    ours, x = ours_of(theirs), torch.randn(batch, units, dtype=torch.float64)
    for _ in range(sequential._AGAIN + 3):
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x))
        assert ran_here(ours) == is_ours
    prune.random_unstructured(theirs[0], "weight", 0.5)
    for some in (x, x[: batch // 2]):
        expected = gradients(theirs, some, torch.ones(len(some), 3))
        for one, other in zip(
            gradients(ours, some, torch.ones(len(some), 3)), expected, strict=True
        ):
            torch.testing.assert_close(one, other)

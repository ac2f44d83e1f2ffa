"""Networks from PyTorch: the scan gives the gradients of autograd, in the module's own memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from autodiff import check_network, close
from torch import nn
from torch.nn.utils import prune

from sparsescan import InputError, InputTypeError
from sparsescan.jacobians import Sequential, from_torch


def vgg11() -> nn.Sequential:
    """VGG-11 (Simonyan and Zisserman, 2015) for 32×32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]:
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(nn.Sequential(*layers), head)


def check_gradients(
    module: nn.Module, input_shape: tuple[int, ...], x: np.ndarray, schedule: str = "linear"
) -> Sequential:
    """All gradients of a network by the scan are those of autograd, in float64."""
    module = module.double()
    net = Sequential(from_torch(module, input_shape))
    check_network(net, module, x, np.random.default_rng(1), schedule)
    ours = [array for op in net.layers for array in op.params.values()]
    for array, parameter in zip(ours, module.parameters(), strict=True):
        assert np.shares_memory(array, parameter.detach().numpy())
    return net


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.slow
def test_vgg11() -> None:
    net = check_gradients(vgg11(), (3, 32, 32), images(2, 3, 32, 32))
    assert len(net) == 23
    assert net.layers[0].pattern.nnz == 3 * 64 * 94 * 94


def test_every_layer_there_is() -> None:
    module = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(3, ceil_mode=True, count_include_pad=False),
        nn.ELU(0.5),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d((4, None)),
        nn.GELU("tanh"),
        nn.Dropout(0.5),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 3, stride=2, dilation=2),
        nn.Softplus(2.0, 10.0),
        nn.LayerNorm(14),
        nn.Hardtanh(-0.5, 2.0),
        nn.Linear(14, 3),
        nn.Softmax(1),
        nn.Flatten(),
        nn.GELU(),
        nn.Softmax(-1),
    ).eval()
    module[1].running_mean.copy_(torch.randn(4))
    module[1].running_var.copy_(torch.rand(4) + 0.5)
    check_gradients(module, (2, 5, 5), images(3, 2, 5, 5))


def test_pruned_weights_leave_the_pattern() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).double()
    for layer in (module[0], module[3]):
        prune.l1_unstructured(layer, "weight", amount=0.8)
    net = Sequential(from_torch(module, (3, 5, 5)))
    kept = int(module[0].weight_mask.sum())
    assert net.layers[0].nnz == kept * 9
    assert net.layers[3].nnz == int(module[3].weight_mask.sum())
    x = images(2, 3, 5, 5)
    xs = net.activations(x)
    close(xs[-1], module(torch.tensor(x)).detach().numpy())
    grads = net.plan().exclusive_scan(np.ones((2, 4)), net.values(xs))
    module(torch.tensor(x)).sum().backward()
    actual = net.param_grads(xs, grads)
    close(actual[0]["weight"], module[0].weight_orig.grad.numpy())
    close(actual[3]["weight"], module[3].weight_orig.grad.numpy())
    assert np.shares_memory(net.layers[0].weight, module[0].weight_orig.detach().numpy())


def test_what_an_optimiser_does_is_seen() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    (op,) = from_torch(module, (3,))
    x = np.ones(3, np.float32)
    before = op.forward(x)
    module(torch.from_numpy(x)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    np.testing.assert_allclose(op.forward(x), module(torch.from_numpy(x)).detach(), rtol=1e-6)
    assert (op.forward(x) != before).all()


def test_a_layer_pruned_twice_keeps_what_both_masks_keep() -> None:
    module = nn.Linear(4, 4).double()
    prune.custom_from_mask(module, "weight", torch.eye(4) + torch.eye(4).roll(1, 0))
    prune.custom_from_mask(module, "weight", torch.eye(4))
    (op,) = from_torch(module, (4,))
    assert op.nnz == 4
    # Once pruning is made permanent, zeros are weights as any other.
    prune.remove(module, "weight")
    (op,) = from_torch(module, (4,))
    assert op.nnz == 16
    x = np.ones(4)
    close(op.forward(x), module(torch.from_numpy(x)).detach().numpy())


@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrisations_are_refused(norm: str) -> None:
    layer = getattr(nn.utils.parametrizations, norm)(nn.Linear(2, 2))
    with pytest.raises(
        InputError,
        match=r"module\[0\] \(ParametrizedLinear\): it has parametrisations of weight",
    ):
        from_torch(nn.Sequential(layer), (2,))
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    x = np.ones(2)
    (op,) = from_torch(layer.double(), (2,))
    close(op.forward(x), layer(torch.from_numpy(x)).detach().numpy())


def double_it(module: nn.Module, args: Any, *output: Any) -> Any:
    return 2 * output[0] if output else (2 * args[0],)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("make", [nn.ReLU, nn.Identity, nn.Sequential, lambda: nn.Linear(2, 2)])
def test_hooks_are_refused_until_they_are_removed(register: str, make: Any) -> None:
    module = nn.Sequential(nn.Tanh(), make())
    handle = getattr(module[1], register)(double_it)
    kind = register.removeprefix("register_").replace("_", " ").replace("pre hook", "pre-hook")
    words = rf"module\[1\] \({type(module[1]).__name__}\): it has the {kind} double_it"
    with pytest.raises(InputError, match=words):
        from_torch(module, (2,))
    handle.remove()
    from_torch(module, (2,))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_that_is_no_parameter_is_refused(name: str) -> None:
    layer = nn.Linear(2, 2)
    tensor = getattr(layer, name).detach().clone()
    delattr(layer, name)
    setattr(layer, name, tensor)
    words = rf"module \(Linear\): its {name} is a Tensor .*; expected a torch.nn.Parameter"
    with pytest.raises(InputError, match=words):
        from_torch(layer, (2,))


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(2).eval(), nn.LayerNorm([2, 2, 2])])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_normalisation_may_not_be_pruned(layer: nn.Module, name: str) -> None:
    layer = copy.deepcopy(layer)
    prune.random_unstructured(layer, name, amount=1)
    words = (
        rf"module \({type(layer).__name__}\): its {name} is pruned; "
        "only convolutions and Linear may be pruned"
    )
    with pytest.raises(InputError, match=words):
        from_torch(layer, (2, 2, 2))


def test_a_bias_may_not_be_pruned() -> None:
    layer = nn.Linear(2, 2)
    prune.random_unstructured(layer, "bias", amount=1)
    with pytest.raises(InputError, match="its bias is pruned; expected a pruned weight at most"):
        from_torch(layer, (2,))


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.BatchNorm2d(2).eval(), nn.LayerNorm(2)])
def test_other_devices_are_named(layer: nn.Module) -> None:
    name = type(layer).__name__
    words = rf"module \({name}\): weight is on the device meta; expected float32 or float64 on"
    with pytest.raises(InputTypeError, match=words):
        from_torch(copy.deepcopy(layer).to("meta"), (2, 2, 2))


def test_pytorch_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, sparsescan, sparsescan.jacobians; "
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells(kind: Any) -> None:
    torch.manual_seed(3)
    options = {"nonlinearity": "relu"} if kind is nn.RNNCell else {}
    module = kind(3, 4, **options).double()
    prune.l1_unstructured(module, "weight_hh", 0.9)
    (cell,) = from_torch(module)
    assert cell.nnz < from_torch(kind(3, 4, **options))[0].nnz
    x = np.random.default_rng(3).standard_normal((5, 2, 3))
    with torch.no_grad():
        module.weight_ih += 0.1  # the same memory
    state = None
    for x_t, actual in zip(torch.from_numpy(x), cell.unroll(x)[1:], strict=True):
        state = module(x_t, state)
        expected = torch.cat(state, 1) if kind is nn.LSTMCell else state
        close(actual, expected.detach().numpy())


def test_cells_that_are_refused() -> None:
    module = nn.GRUCell(3, 4)
    prune.l1_unstructured(module, "bias_hh", 0.5)
    with pytest.raises(InputError, match=r"module \(GRUCell\): its bias_hh is pruned"):
        from_torch(module)
    hooked = nn.LSTMCell(3, 4)
    hooked.register_forward_hook(lambda *given: None)
    with pytest.raises(InputError, match="has the forward hook"):
        from_torch(hooked)
    with pytest.raises(InputError, match=r"GRU, which has no operator \(sparsescan.torch has it\)"):
        from_torch(nn.GRU(3, 4), (3,))

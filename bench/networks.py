"""Pruned and convolutional networks in PyTorch, and the contenders for their training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import prune

from sparsescan.jacobians import Flatten, Residual, Sequential, from_torch
from sparsescan.jacobians.shared.operator import Operator

from .peers import PYTORCH, Variants, in_threads
from .races import OURS
from .timing import Call
from .workloads import VGG11_WIDTHS

Array = NDArray[Any]

_RESNET = (16, 32, 64)  # channels of its stages, of three blocks each


@dataclass(frozen=True)
class NetworkCase:
    """A network, the samples of a step, and the ratio that is asked for.

    Attributes
    ----------
    kept : float or None
        Share of the weights of every layer but the last that is kept; None without pruning.
    pytorch : float
        How many times as long as ours PyTorch is meant to take.
    """

    kind: str
    batch: int
    kept: float | None
    pytorch: float

    @property
    def name(self) -> str:
        pruned = "dense" if self.kept is None else f"pruned by {1 - self.kept:.0%}"
        return f"{self.kind}, {pruned}, B={self.batch}"

    # A choice of a pool, or of a ReLU, that rounding turns changes some entries by percents.
    bound = 1e-2

    @property
    def wanted(self) -> dict[str, float]:
        return {PYTORCH: self.pytorch}

    def race(self) -> _Race:
        """Return the contenders."""
        return _Race(self)


NETWORKS = (
    NetworkCase("VGG-11", 16, 0.03, 4),
    NetworkCase("VGG-11", 64, 0.03, 4),
    NetworkCase("VGG-11", 1, 0.03, 1.5),
    NetworkCase("VGG-11", 16, 0.1, 1.5),
    NetworkCase("ResNet-20", 16, 0.05, 2.5),
    NetworkCase("MLP", 64, 0.02, 4),
    NetworkCase("LeNet-5", 64, None, 0.8),
)


class _Race:
    """Functions that make the variants of each contender."""

    def __init__(self, case: NetworkCase) -> None:
        self.case, rng = case, np.random.default_rng(0)
        torch.manual_seed(0)
        make, shape = _MODULES[case.kind]
        self.module = make()
        if case.kept is not None:
            prune_smallest(self.module, 1 - case.kept)
        # Normalised by the statistics of a batch, a network is one of whole batches.
        self.whole = any(isinstance(layer, nn.BatchNorm2d) for layer in self.module.modules())
        lead = (case.batch,) if self.whole else ()
        self.net = Sequential(_layers(self.module, (*lead, *shape), len(lead)))
        self.x = rng.standard_normal((case.batch, *shape), np.float32)
        outputs = self.module(torch.tensor(self.x)).shape
        self.grad = rng.standard_normal(tuple(outputs), np.float32) / case.batch
        self.masks = {
            _ours(name.removesuffix("_mask")): mask.numpy()
            for name, mask in self.module.named_buffers()
            if name.endswith("_mask")
        }

    def makers(self) -> dict[str, Variants]:
        """Return the contenders by name."""
        return {OURS: self.ours, PYTORCH: self.theirs}

    def ours(self) -> dict[str, Call]:
        """Return our training step."""
        step = self.net.training_step()
        out: dict[str, Array] | None = None

        def call() -> dict[str, Array]:
            nonlocal out
            step.forward(self.x)
            out = step.backward(self.grad, needs_input_grad=False, out=out).params
            return out

        return {"training step": call}

    def theirs(self) -> dict[str, Call]:
        """Return PyTorch's: dense with zeros for pruned weights, and with its pruning."""
        ways = {"dense": _without_masks(self.module), "its pruning": self.module}
        if self.case.kept is None:
            del ways["its pruning"]
        calls: dict[str, Call] = {}
        for way, module in ways.items():
            for form in self._forms():
                changed = form is not torch.contiguous_format
                own = copied(module).to(memory_format=form) if changed else module
                call = partial(self._torch_step, own, form)
                calls |= in_threads(call, f", {way}, {str(form)[6:]}")
        return calls

    def _forms(self) -> tuple[torch.memory_format, ...]:
        """Return the orders of axes that PyTorch is given."""
        # Images that are channels_last it normalises so that gradients are off by 1e-2.
        first = (torch.contiguous_format,)
        return (*first, torch.channels_last) if self.x.ndim == 4 and not self.whole else first

    def _torch_step(self, module: nn.Module, form: Any) -> dict[str, Array]:
        x = torch.from_numpy(self.x)
        x = x.contiguous(memory_format=form) if x.ndim == 4 else x
        grads = torch.autograd.grad(
            module(x), list(module.parameters()), torch.from_numpy(self.grad)
        )
        names = map(_ours, dict(module.named_parameters()))
        return {name: grad.numpy() for name, grad in zip(names, grads, strict=True)}


def _ours(name: str) -> str:
    """Return our name of a parameter of PyTorch."""
    return name.removesuffix("_orig").replace(".body.", ".")


# -- Networks -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, whose shortcut is a convolution where it is wider, or is given."""

    def __init__(self, narrow: int, wide: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        stride = wide // narrow
        self.body = nn.Sequential(
            *normalised(nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)),
            nn.ReLU(),
            *normalised(nn.Conv2d(wide, wide, 3, 1, 1, bias=False)),
        )
        if shortcut is None:
            conv = normalised(nn.Conv2d(narrow, wide, 1, stride, bias=False)) if stride > 1 else ()
            shortcut = nn.Sequential(*conv)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around: torch.Tensor = self.shortcut(x) + self.body(x)
        return around


def normalised(conv: nn.Conv2d) -> tuple[nn.Module, nn.Module]:
    return conv, nn.BatchNorm2d(conv.out_channels)


def vgg11() -> nn.Sequential:
    """Return VGG-11 for 32×32 images: its convolutional part, and one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG11_WIDTHS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(channels, width, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def _resnet20() -> nn.Sequential:
    layers: list[nn.Module] = [*normalised(nn.Conv2d(3, 16, 3, padding=1, bias=False)), nn.ReLU()]
    channels = 16
    for width in _RESNET:
        for _ in range(3):
            layers += [Block(channels, width), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(channels, 10))


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def lenet5(
    activation: type[nn.Module] = nn.ReLU, pool: Callable[[int], nn.Module] = nn.MaxPool2d
) -> nn.Sequential:
    """Return LeNet-5 for images of 32×32 (LeCun et al., 1998)."""
    features = nn.Conv2d(1, 6, 5), activation(), pool(2), nn.Conv2d(6, 16, 5), activation(), pool(2)
    linear = nn.Linear(400, 120), activation(), nn.Linear(120, 84), activation(), nn.Linear(84, 10)
    return nn.Sequential(*features, nn.Flatten(), *linear)


_MODULES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "VGG-11": (vgg11, (3, 32, 32)),
    "ResNet-20": (_resnet20, (3, 32, 32)),
    "MLP": (_mlp, (784,)),
    "LeNet-5": (lenet5, (1, 32, 32)),
}


def _weighted(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]


def prune_smallest(module: nn.Module, share: float) -> None:
    """Drop the weights of the smallest magnitude of every layer but the last."""
    for layer in _weighted(module)[:-1]:
        # As large as they would be without the others.
        layer.weight.data /= (1 - share) ** 0.5
        prune.l1_unstructured(layer, "weight", share)


def copied(module: nn.Module) -> nn.Module:
    # Weights of a pruned layer are no leaves, which cannot be copied, until they are made again.
    for layer in _weighted(module):
        if prune.is_pruned(layer):
            layer.weight = layer.weight.detach()
    return copy.deepcopy(module)


def _without_masks(module: nn.Module) -> nn.Module:
    """Return a copy whose pruned weights are 0 and no longer masked."""
    dense = copied(module)
    for layer in _weighted(dense):
        if prune.is_pruned(layer):
            prune.remove(layer, "weight")
    return dense


def _layers(module: nn.Module, shape: tuple[int, ...], lead: int) -> list[Operator]:
    """Return our layers with the weights of PyTorch's; `lead` axes of a shape are of the batch."""
    ops: list[Operator] = []
    for layer in module.children():
        if isinstance(layer, Block):
            body, shortcut = (_layers(each, shape, lead) for each in (layer.body, layer.shortcut))
            ops.append(Residual(*body, shortcut=shortcut))
        elif isinstance(layer, nn.Flatten):
            ops.append(Flatten(1 + lead, input_shape=shape))
        else:
            ops += from_torch(layer, shape)
        shape = ops[-1].output_shape
    return ops

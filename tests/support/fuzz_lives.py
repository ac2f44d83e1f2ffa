"""Random lives of PyTorch models, one converted and one not, which must stay equal.

A life is a model with a twin that :func:`sparsescan.torch.convert` has not seen, and a sequence of
what people do to models: steps of an optimiser, pruning, hooks, other layers, writes through
``.data`` and NumPy, copies, traces. After each event both are called: outputs, gradients, buffers
and masked weights are equal up to rounding, and one raises what the other raises.

``python tests/support/fuzz_lives.py 5000`` lives so many. Life `i` depends on the seed and `i`
alone: ``--seed 0 --only 1234`` lives that one, and says what happens in it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
import torchrecurrent
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization import quantize_dynamic
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.onnx._internal.exporter import _flags
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from torch_checks import tensors_of

import sparsescan.torch
from sparsescan.recurrent import catalogue
from sparsescan.torch import sequential
from sparsescan.torch.calls.prepared import only
from sparsescan.torch.cells import CellModule
from sparsescan.torch.conversion import alone as lone_layers

Rng = np.random.Generator
Event = Callable[["Model", Rng], Any]

EPS = torch.finfo(torch.float64).eps
SIDE = 6


class Model:
    """A model that is converted or not, and what belongs to it in its life.

    Attributes
    ----------
    net : Module
        The model.
    handles : list
        Hooks that can be removed again.
    second : Module or None
        Another model, which shares layers with it.
    kind : str
        One of `KINDS`.
    """

    def __init__(self, net: nn.Module, x: Tensor, ours: bool, kind: str) -> None:
        self.net, self.x, self.ours, self.kind = net, x, ours, kind
        self.handles: list[Any] = []
        self.second: nn.Module | None = None

    def outs(self, x: Tensor | None = None, net: nn.Module | None = None) -> list[Tensor]:
        """Return the outputs, and last states if there are any."""
        return tensors_of((net or self.net)(self.x if x is None else x))

    def out(self, x: Tensor | None = None, net: nn.Module | None = None) -> Tensor:
        """Return the outputs."""
        return self.outs(x, net)[0]

    def layers(self, *kinds: type[nn.Module]) -> list[nn.Module]:
        """Return the layers of some kinds, in order."""
        return [each for each in self.net.modules() if isinstance(each, kinds)]

    def pruned(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and the names of what is pruned."""
        return [
            (module, name.removesuffix("_mask"))
            for module in self.net.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name.endswith("_mask")
        ]

    def prunable(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and the names of weights."""
        weights = [(m, "weight") for m in self.layers(nn.Linear, nn.Conv2d)]
        recurrent = self.layers(nn.RNNBase, CellModule)
        cells = self.layers(torchrecurrent.base.RecurrentCellBase)
        weights += [
            (m, name)
            for m in cells
            for name in ("weight_ih", "weight_hh")
            if getattr(getattr(m, name, None), "ndim", 0) == 2
        ]
        return weights + [(m, name) for m in recurrent for name in ("weight_ih_l0", "weight_hh_l0")]

    @property
    def container(self) -> nn.Module:
        """The sequence whose layers are changed."""
        return self.net


def pick(rng: Rng, those: Sequence[Any]) -> Any:
    """Return one of some objects, or end the event where there are none."""
    if not those:
        raise SkippedError
    return those[int(rng.integers(len(those)))]


class SkippedError(Exception):
    """An event that this model cannot have."""


# -- Models ----------------------------------------------------------------------------------------


class Own(nn.Sequential):
    """A model that calls its layers itself."""


def alone(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a model of layers in no stack, some of their weights pruned, and an input."""
    net, x = stack(rng)
    net.__class__ = Own
    return net, x


def stack(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a stack, some of its weights pruned, and an input."""
    if rng.random() < 0.4:
        sizes = [int(rng.integers(2, 7)) for _ in range(2)]
        layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1]), activation(rng)]
        layers += [nn.Linear(sizes[1], sizes[1]), activation(rng), nn.Linear(sizes[1], 3)]
        if rng.random() < 0.3:
            layers.insert(2, nn.LayerNorm(sizes[1]))
        elif rng.random() < 0.4:
            flat = nn.BatchNorm1d(sizes[1], momentum=rng.choice([None, 0.1, 0.7]))
            # As below.
            nn.init.normal_(flat.bias)
            layers.insert(1, flat)
        # A single sample has no statistics.
        least = 1 + any(isinstance(each, nn.BatchNorm1d) for each in layers)
        x = torch.randn(int(rng.integers(least, 6)), sizes[0], dtype=torch.float64)
    else:
        channels, wide = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        layers = [nn.Conv2d(channels, wide, 3, padding=1)]
        pool: nn.Module = nn.MaxPool2d(2)
        if rng.random() < 0.6:
            norm = nn.BatchNorm2d(wide, momentum=rng.choice([None, 0.1, 0.7]))
            # Rounding decides about what is 0, and which is the largest, in a channel whose weights
            # are all pruned.
            nn.init.normal_(norm.bias)
            layers.append(norm)
            pool = nn.AvgPool2d(2)
        layers += [activation(rng), pool, nn.Dropout(0.0), nn.Flatten()]
        layers += [nn.Linear(wide * (SIDE // 2) ** 2, 4), activation(rng), nn.Linear(4, 4)]
        if rng.random() < 0.3:
            layers = [nn.Sequential(*layers[:2]), *layers[2:], nn.Identity()]
        x = torch.randn(int(rng.integers(2, 6)), channels, SIDE, SIDE, dtype=torch.float64)
    net = nn.Sequential(*layers).double()
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and rng.random() < 0.7:
            prune.random_unstructured(layer, "weight", float(rng.choice([0.5, 0.9])))
    return net, x


def activation(rng: Rng) -> nn.Module:
    """Return one of those that have settings, more often than others."""
    kinds = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.Sigmoid)
    kind = kinds[int(rng.integers(len(kinds)))]
    return kind(inplace=True) if kind is nn.ReLU and rng.random() < 0.2 else kind()


def recurrent(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a recurrent module, some of its weights pruned, and an input."""
    kind = (nn.RNN, nn.GRU, nn.LSTM)[int(rng.integers(3))]
    size, units = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    net = kind(size, units, int(rng.integers(1, 3)), bidirectional=bool(rng.random() < 0.3))
    net = net.double()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        if rng.random() < 0.8:
            prune.random_unstructured(net, name, float(rng.choice([0.3, 0.8])))
    return net, torch.randn(int(rng.integers(1, 6)), 2, size, dtype=torch.float64)


class OwnRNN(nn.RNN):
    """A class of a user, with another scale of the input."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002, PyTorch's name
        return super().forward(0.5 * input, hx)


class OwnGRU(nn.GRU):
    """A class of a user that computes as PyTorch's."""


class OwnLSTM(nn.LSTM):
    """A class of a user, with other initial states."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002, PyTorch's name
        size = self.num_layers * (1 + self.bidirectional), input.shape[1], self.hidden_size
        begin = (input.new_ones(size), input.new_zeros(size)) if hx is None else hx
        return super().forward(input, hx=begin)


def derived(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a module of a class that a user has derived from PyTorch's, and an input."""
    net, x = recurrent(rng)
    own = {nn.RNN: OwnRNN, nn.GRU: OwnGRU, nn.LSTM: OwnLSTM}[type(net)]  # type: ignore[index]
    net.__class__ = own
    return net, x


def layers(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a layer of torchrecurrent, some of its weights pruned, and an input."""
    names = ("MGU", "LiGRU", "PeepholeLSTM", "IndRNN", "JANET", "LEM", "SCRN", "TGRU", "FastRNN")
    size, units = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    kind = getattr(torchrecurrent, names[int(rng.integers(len(names)))])
    about = {"recurrent_bias": bool(rng.random() < 0.5), "batch_first": bool(rng.random() < 0.5)}
    net = kind(size, units, int(rng.integers(1, 3)), float(rng.choice([0, 0.3])), **about)
    net = net.double()
    for cell in net.cells:
        if getattr(getattr(cell, "weight_hh", None), "ndim", 0) == 2 and rng.random() < 0.5:
            prune.random_unstructured(cell, "weight_hh", float(rng.choice([0.3, 0.8])))
    return net, torch.randn(int(rng.integers(1, 6)), 2, size, dtype=torch.float64)


class _Plain:
    """A module of cells that uses no kernels."""

    def _takes(self, *given: Any) -> bool:
        return False


class PlainMGU(_Plain, sparsescan.torch.module(catalogue.MGU)):  # type: ignore[misc]
    """Minimal gated units, step by step."""


class PlainPeepholeLSTM(_Plain, sparsescan.torch.module(catalogue.PeepholeLSTM)):  # type: ignore[misc]
    """LSTMs with peepholes, step by step."""


class PlainIntersectionRNN(_Plain, sparsescan.torch.module(catalogue.IntersectionRNN)):  # type: ignore[misc]
    """Cells that read the input of each unit, step by step."""


def cells(rng: Rng) -> tuple[nn.Module, Tensor]:
    """Return a module of cells, some of its weights pruned, and an input."""
    kind = (PlainMGU, PlainPeepholeLSTM, PlainIntersectionRNN)[int(rng.integers(3))]
    size, units = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    about: dict[str, Any] = {"bidirectional": bool(rng.random() < 0.3)}
    if kind is PlainIntersectionRNN:
        size, about = units, {}
    net = kind(size, units, int(rng.integers(1, 3)), bool(rng.random() < 0.8), **about).double()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        if rng.random() < 0.6:
            prune.random_unstructured(net, name, float(rng.choice([0.3, 0.8])))
    return net, torch.randn(int(rng.integers(1, 6)), 2, size, dtype=torch.float64)


# -- Events ----------------------------------------------------------------------------------------


def loss_of(model: Model) -> Tensor:
    return model.out().square().mean()


def train(model: Model, rng: Rng) -> None:
    """Take steps of an optimiser."""
    params = [each for each in model.net.parameters() if each.requires_grad]
    if not params:
        raise SkippedError
    make: Any = pick(rng, (torch.optim.SGD, torch.optim.Adam))
    optimiser = make(params, lr=0.01)
    for _ in range(int(rng.integers(1, 4))):
        optimiser.zero_grad()
        loss_of(model).backward()
        optimiser.step()


def penalise(model: Model, rng: Rng) -> list[Tensor]:
    """Take steps with a penalty on masked weights."""
    params = [each for each in model.net.parameters() if each.requires_grad]
    if not params:
        raise SkippedError
    optimiser = torch.optim.SGD(params, lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        loss = loss_of(model)
        for module, name in model.pruned():
            loss = loss + getattr(module, name).abs().sum()
        loss.backward()
        optimiser.step()
    return [getattr(module, name) for module, name in model.pruned()]


def prune_one(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.prunable())
    prune.l1_unstructured(module, name, float(rng.choice([0.2, 0.5])))


def prune_structured(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.prunable())
    prune.ln_structured(module, name, 0.3, n=2, dim=0)


def prune_all(model: Model, rng: Rng) -> None:
    prune.global_unstructured(model.prunable(), prune.L1Unstructured, amount=0.3)


def prune_bias(model: Model, rng: Rng) -> None:
    prune.l1_unstructured(pick(rng, model.layers(nn.Linear)), "bias", 1)


def remove(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    prune.remove(module, name)


def hook(model: Model, rng: Rng) -> None:
    """Register a hook of some kind on a layer."""
    layer = pick(
        rng, [each for each in model.net.modules() if each is not model.net] or [model.net]
    )
    kind = int(rng.integers(3))
    if kind == 0:
        model.handles.append(
            layer.register_forward_hook(
                lambda _, __, y: (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y
            )
        )
    elif kind == 1:
        model.handles.append(layer.register_forward_pre_hook(lambda _, given: (2 * given[0],)))
    else:
        model.handles.append(layer.register_full_backward_hook(lambda _, __, ___: None))


def unhook(model: Model, rng: Rng) -> None:
    pick(rng, model.handles)
    model.handles.pop().remove()


def change_setting(model: Model, rng: Rng) -> None:
    """Change a number that a layer computes with."""
    names = ("negative_slope", "alpha", "beta", "min_val", "eps", "momentum", "threshold")
    layer, name = pick(
        rng,
        [(layer, name) for layer in model.net.modules() for name in names if name in vars(layer)],
    )
    setattr(layer, name, {"min_val": -0.3, "beta": 2.0, "threshold": 1.0}.get(name, 0.3))


def change_dilation(model: Model, rng: Rng) -> None:
    layer = pick(rng, model.layers(nn.Conv2d))
    step = 3 - layer.dilation[0]
    layer.dilation = layer.padding = (step, step)


def replace_layer(model: Model, rng: Rng) -> None:
    """Put another layer, with other parameters, in the place of one."""
    names = [name for name, each in model.net._modules.items() if isinstance(each, nn.Linear)]
    name = pick(rng, names)
    old: Any = model.net._modules[name]
    new = nn.Linear(old.in_features, old.out_features, bias=bool(rng.random() < 0.5)).double()
    for param in new.parameters():
        param.data.copy_(torch.from_numpy(rng.standard_normal(param.shape)))
    if rng.random() < 0.7:
        prune.l1_unstructured(new, "weight", 0.5)
    model.net._modules[name] = new


def swap(model: Model, rng: Rng) -> None:
    """Let two activations change places."""
    kinds = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.Sigmoid)
    names = [name for name, each in model.net._modules.items() if isinstance(each, kinds)]
    one, two = pick(rng, names), pick(rng, names)
    modules = model.net._modules
    modules[one], modules[two] = modules[two], modules[one]


def insert(model: Model, rng: Rng) -> None:
    if not isinstance(model.net, nn.Sequential):
        raise SkippedError
    model.net.insert(int(rng.integers(1, len(model.net) + 1)), pick(rng, (nn.Tanh(), nn.ReLU())))


def own_forward(model: Model, rng: Rng) -> None:
    layer = pick(rng, [each for each in model.net.modules() if not each._modules])
    if "forward" in vars(layer):
        del layer.forward
    elif isinstance(layer, nn.RNNBase):
        raise SkippedError
    else:
        kind = type(layer)
        layer.forward = lambda x: kind.forward(layer, x) + 1


def write_data(model: Model, rng: Rng) -> None:
    param = pick(rng, list(model.net.parameters()))
    param.data.add_(torch.from_numpy(rng.standard_normal(param.shape)).to(param.dtype), alpha=0.1)


def write_numpy(model: Model, rng: Rng) -> None:
    param = pick(rng, list(model.net.parameters()))
    param.detach().numpy().reshape(-1)[:1] += 0.5


def new_data(model: Model, rng: Rng) -> None:
    param = pick(rng, list(model.net.parameters()))
    if param.dim() == 2 and param.shape[0] == param.shape[1]:
        param.data = param.data.t()
    else:
        param.data = param.data.clone()


def flipped(mask: Tensor, rng: Rng) -> Tensor:
    """Return a mask of which some entries are others."""
    flips = torch.from_numpy(rng.random(mask.shape) < 0.3)
    return torch.where(flips, 1 - mask, mask)


def new_mask(model: Model, rng: Rng) -> None:
    """Give layers new masks, several times, at addresses that others had."""
    module, name = pick(rng, model.pruned())
    for _ in range(3):
        setattr(module, f"{name}_mask", flipped(getattr(module, f"{name}_mask"), rng))
        with torch.no_grad():
            model.out()


def mask_data(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    mask = getattr(module, f"{name}_mask")
    if rng.random() < 0.5:
        mask.data = flipped(mask, rng)
    else:
        mask.data.copy_(flipped(mask, rng))


def mask_numpy(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    mask = getattr(module, f"{name}_mask").numpy()
    place = int(rng.integers(mask.size))
    mask.reshape(-1)[place] = 1 - mask.reshape(-1)[place]


def scale_mask(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    getattr(module, f"{name}_mask").mul_(0.5 if rng.random() < 0.5 else -1)


def whole_mask(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    mask = getattr(module, f"{name}_mask")
    setattr(module, f"{name}_mask", (mask != 0).to(mask.dtype))


def bool_mask(model: Model, rng: Rng) -> None:
    module, name = pick(rng, model.pruned())
    setattr(module, f"{name}_mask", getattr(module, f"{name}_mask") != 0)


def write_masked(model: Model, rng: Rng) -> None:
    """Write to a masked weight, which the next call makes anew."""
    module, name = pick(rng, model.pruned())
    weight = getattr(module, name)
    if rng.random() < 0.5:
        weight.data.fill_(3)
    else:
        weight.detach().numpy()[...] = 5


def write_statistics(model: Model, rng: Rng) -> None:
    norm = pick(rng, model.layers(nn.BatchNorm1d, nn.BatchNorm2d))
    norm.running_mean.data.add_(0.5)
    norm.running_var.numpy()[...] *= 2


def load(model: Model, rng: Rng) -> None:
    state = copy.deepcopy(model.net.state_dict())
    for name, each in state.items():
        if each.is_floating_point() and not name.endswith("_mask"):
            each.mul_(1.1)
    model.net.load_state_dict(state)


def load_plain(model: Model, rng: Rng) -> None:
    """Load what a file has of a model that is not converted."""
    file = io.BytesIO()
    torch.save({name: 0.9 * each for name, each in model.net.state_dict().items()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    if model.kind in ("recurrent", "derived"):
        assert not any("sparsescan" in str(type(each)) for each in state.values())
    model.net.load_state_dict(state)


def instances(model: Model, rng: Rng) -> Tensor:
    """Count modules by their classes."""
    kinds = (nn.RNN, nn.GRU, nn.LSTM, nn.RNNBase, nn.Linear, nn.Conv2d, nn.Sequential)
    exact = [[type(each) for each in model.net.modules()].count(kind) for kind in kinds]
    return torch.tensor([*exact, *(len(model.layers(kind)) for kind in kinds)])


def initialise(model: Model, rng: Rng) -> None:
    """Change parameters of some kinds of layers."""

    def change(module: nn.Module) -> None:
        if isinstance(module, (nn.RNNBase, nn.Linear, nn.Conv2d)):
            for param in module.parameters(recurse=False):
                param.data.mul_(1.2)

    model.net.apply(change)


def reverted(model: Model, rng: Rng) -> Tensor:
    """Put PyTorch's modules back, compute, and convert again."""
    if not model.ours:
        return model.out()
    sparsescan.torch.revert(model.net)
    try:
        if model.kind != "cells":
            assert "sparsescan" not in str([type(each) for each in model.net.modules()])
        return model.out()
    finally:
        replace(model.kind, model.net)


def scripted(model: Model, rng: Rng) -> Tensor:
    classes = [type(each) for each in model.net.modules()]
    with torch.no_grad():
        result: Any = torch.jit.script(model.net)(2 * model.x)
    assert all(type(each) is kind for each, kind in zip(model.net.modules(), classes, strict=True))
    return result if isinstance(result, Tensor) else result[0]


def exported(model: Model, rng: Rng) -> Tensor:
    """Compute by what an exporter to ONNX sees."""
    if rng.random() < 0.7 or (model.net.training and model.layers(nn.BatchNorm1d, nn.BatchNorm2d)):
        raise SkippedError  # it takes long
    _flags._is_onnx_exporting = True
    try:
        with torch.no_grad():
            program = torch.export.export(model.net, (model.x,))
    finally:
        _flags._is_onnx_exporting = False
    assert "sparsescan" not in str(program.graph)
    with torch.no_grad():
        return model.out(net=program.module())


def quantised(model: Model, rng: Rng) -> Tensor:
    with torch.no_grad():
        model.out()
    if model.handles:
        raise SkippedError
    net = quantize_dynamic(copy.deepcopy(model.net).float())
    with torch.no_grad():
        return model.out(model.x.float(), net)


def switch(model: Model, rng: Rng) -> None:
    model.net.train(not model.net.training)


def freeze_norm(model: Model, rng: Rng) -> None:
    norm = pick(rng, model.layers(nn.BatchNorm1d, nn.BatchNorm2d))
    norm.train(not norm.training)


def copied(model: Model, rng: Rng) -> None:
    with torch.no_grad():
        model.out()  # PyTorch copies no weight that has a graph
    if model.handles:
        raise SkippedError
    model.net = copy.deepcopy(model.net)
    model.second = None


def pickled(model: Model, rng: Rng) -> None:
    with torch.no_grad():
        model.out()
    if model.handles or any("forward" in vars(each) for each in model.net.modules()):
        raise SkippedError
    if rng.random() < 0.5:
        model.net = pickle.loads(pickle.dumps(model.net))
    else:
        file = io.BytesIO()
        torch.save(model.net, file)
        file.seek(0)
        model.net = torch.load(file, weights_only=False)
    model.second = None


def require(model: Model, rng: Rng) -> None:
    param = pick(rng, list(model.net.parameters()))
    param.requires_grad_(not param.requires_grad)


def to_half_and_back(model: Model, rng: Rng) -> None:
    model.net.half() if rng.random() < 0.5 else model.net.float()
    model.net.double()


def single(model: Model, rng: Rng) -> Tensor:
    """Compute in single precision, and return."""
    model.net.float()
    y = model.out(model.x.float())
    model.net.double()
    return y.double()


def share(model: Model, rng: Rng) -> None:
    """Build another stack around the same layers."""
    if not isinstance(model.net, nn.Sequential):
        raise SkippedError
    kind = sparsescan.torch.sequential.Sequential if model.ours else nn.Sequential
    model.second = kind(*list(model.net.children()), nn.Tanh())


def interleave(model: Model, rng: Rng) -> list[Tensor]:
    """Run two stacks forward, then both backward."""
    if model.second is None:
        raise SkippedError
    first, second = model.out(), model.out(1.5 * model.x, model.second)
    loss = first.square().sum() + second.sum()
    params = [each for each in model.net.parameters() if each.requires_grad]
    if not params:
        raise SkippedError
    return [first, second, *torch.autograd.grad(loss, params, allow_unused=True)]


def masked_gradients(model: Model, rng: Rng) -> list[Tensor]:
    """Look at gradients in masked weights, in some way."""
    loss = loss_of(model)
    weights = [getattr(module, name) for module, name in model.pruned()]
    weights = [each for each in weights if each.requires_grad]
    if not weights:
        raise SkippedError
    kind, seen = int(rng.integers(4)), list[Tensor]()
    if kind == 0:
        return list(torch.autograd.grad(loss, weights))
    if kind == 1:
        for each in weights:
            each.retain_grad()
        loss.backward()
        return [each.grad for each in weights]
    if kind == 2:
        for each in weights:
            each.register_hook(seen.append)
        loss.backward()
        return sorted(seen, key=lambda each: (each.numel(), float(each.sum())))
    handles = [each.register_hook(lambda grad: 3 * grad) for each in weights]
    params = [each for each in model.net.parameters() if each.requires_grad]
    grads = torch.autograd.grad(loss, params, retain_graph=True)
    for handle in handles:
        handle.remove()
    return [*grads, *torch.autograd.grad(loss, [*params, *weights])]


def twice(model: Model, rng: Rng) -> list[Tensor]:
    """Go back twice through one graph."""
    loss = loss_of(model)
    params = [each for each in model.net.parameters() if each.requires_grad]
    if not params:
        raise SkippedError
    return [
        *torch.autograd.grad(loss, params, retain_graph=True),
        *torch.autograd.grad(2 * loss, params),
    ]


def late(model: Model, rng: Rng) -> list[Tensor]:
    """Run forward again before the first graph goes back; weights change between."""
    x = model.x.clone().requires_grad_()
    first = model.out(x).sum()
    for _, each in model.net.named_buffers():
        if each.is_floating_point() and each.dim() == 1:
            each.data.mul_(1.0)
    second = model.out(2 * x).sum()
    third = model.out(3 * x)
    return [*torch.autograd.grad(first + second, x), third]


def changed_results(model: Model, rng: Rng) -> list[Tensor] | None:
    """Change a result in place before its backward pass: as a copy of it, or an error."""
    x = model.x.clone().requires_grad_()
    place, is_whole, found = int(rng.integers(3)), rng.random() < 0.5, list[list[Tensor]]()
    for is_copy in (True, False):
        torch.manual_seed(0)
        outs = model.outs(x)
        place %= len(outs)
        if is_copy:
            outs[place] = outs[place].clone()
        try:
            if is_whole:
                outs[place].mul_(2)
            else:
                outs[place][..., :1] = 0
            found.append([*outs, *torch.autograd.grad(squares(outs), x)])
        except RuntimeError as error:
            if not tells_of_changes(error):
                raise
            return None  # of PyTorch's ReLU, for example, which saves its output
    same(found[1], found[0])
    return found[1]


def tells_of_changes(error: RuntimeError) -> bool:
    return "modified by an inplace" in str(error) or "modified inplace" in str(error)


def changed_arguments(model: Model, rng: Rng) -> None:
    """Change the input or a parameter in place before the backward pass: an error, or no matter."""
    x = model.x.clone().requires_grad_()
    params = list(model.net.parameters())
    leaves = [x, *(each for each in params if each.requires_grad)]
    place, found = int(rng.integers(1 + len(params))), []
    for factor in (1.0, 1.5):
        torch.manual_seed(0)
        inp = 2 * x
        loss = squares(model.outs(inp))
        changed = [inp, *params][place].detach()
        before = changed.clone()
        try:
            if factor != 1:
                changed.mul_(factor)
            found.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
        except RuntimeError as error:
            if not tells_of_changes(error):
                raise
            return
        finally:
            changed.copy_(before)
    same(found[1], found[0])


def second(model: Model, rng: Rng) -> list[Tensor]:
    """Compute gradients of gradients."""
    x = model.x.clone().requires_grad_()
    leaves = [x, *(each for each in model.net.parameters() if each.requires_grad)]
    grads = torch.autograd.grad(
        squares(model.outs(x)), leaves, create_graph=True, materialize_grads=True
    )
    above = torch.autograd.grad(squares(grads), leaves, allow_unused=True, materialize_grads=True)
    return [*grads, *above]


def pushed(model: Model, rng: Rng) -> list[Tensor]:
    """Push a tangent of the input forward."""
    with forward_ad.dual_level():
        tangent = torch.from_numpy(rng.standard_normal(model.x.shape))
        found = model.outs(forward_ad.make_dual(model.x, tangent))
        pairs = map(forward_ad.unpack_dual, found)
        return [each for pair in pairs for each in pair if each is not None]


def strided(model: Model, rng: Rng) -> list[Tensor]:
    """Pass an input whose axes are in another order in memory."""
    x = model.x.transpose(0, -1).clone().transpose(0, -1).requires_grad_()
    y = model.out(x)
    return [y, *torch.autograd.grad(y.sum(), x)]


def batched(model: Model, rng: Rng) -> list[Tensor]:
    """Compute several gradients at once."""
    x = model.x.clone().requires_grad_()
    y = model.out(x)
    above = torch.from_numpy(rng.standard_normal((2, *y.shape)))
    return list(torch.autograd.grad(y, x, above, is_grads_batched=True))


def checkpointed(model: Model, rng: Rng) -> list[Tensor]:
    x = model.x.clone().requires_grad_()
    y = checkpoint(model.out, x, use_reentrant=bool(rng.random() < 0.5))
    return [y, *torch.autograd.grad(y.sum(), x)]


def infer(model: Model, rng: Rng) -> Tensor:
    with torch.inference_mode():
        y = model.out().clone()
    with torch.no_grad():
        model.out()
    return y + 0.0


def renew_statistics(model: Model, rng: Rng) -> None:
    pick(rng, model.layers(nn.BatchNorm1d, nn.BatchNorm2d))
    update_bn([model.x, 2 * model.x], model.net)


def traced_fx(model: Model, rng: Rng) -> Tensor:
    with torch.no_grad():
        graph = make_fx(model.out)(model.x)
        return graph(2 * model.x)


def traced_jit(model: Model, rng: Rng) -> Tensor:
    # PyTorch traces no module with hooks, as of pruning, but a function that calls one.
    traced = model.out if model.pruned() or model.handles else model.net
    with torch.no_grad():
        result: Any = torch.jit.trace(traced, model.x, check_trace=False)(2 * model.x)  # type: ignore[no-untyped-call]
    return result if isinstance(result, Tensor) else result[0]


def functional(model: Model, rng: Rng) -> list[Tensor]:
    if model.net.training and model.layers(nn.BatchNorm1d, nn.BatchNorm2d):
        raise SkippedError
    kind = int(rng.integers(3))
    if kind == 0:
        return [torch.func.grad(lambda x: model.out(x).square().sum())(model.x)]
    if kind == 1:
        tangent = torch.from_numpy(rng.standard_normal(model.x.shape))
        return [*torch.func.jvp(model.out, (model.x,), (tangent,))]
    params = dict(model.net.named_parameters())
    twice = {name: 2 * each.detach() for name, each in params.items()}
    y = torch.func.functional_call(model.net, twice, (model.x,))
    return [y if isinstance(y, Tensor) else y[0]]


def faked(model: Model, rng: Rng) -> None:
    if model.net.training and model.layers(nn.BatchNorm1d, nn.BatchNorm2d):
        raise SkippedError
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert model.out(mode.from_tensor(model.x)).shape
    with torch.no_grad():
        model.out()


def other_size(model: Model, rng: Rng) -> Tensor:
    axis = 0 if model.layers(nn.Linear) else 1
    return model.out(torch.cat([model.x, 2 * model.x], axis))


def fork(model: Model, rng: Rng) -> Tensor:
    """Call a model in a forked child, while another thread makes calls of new shapes.

    PyTorch has one thread: its own calls hang in a child of a process with a pool of them.
    """
    with torch.no_grad():
        model.out()
    if model.handles:
        raise SkippedError
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _forked(model, rng)
    finally:
        torch.set_num_threads(threads)


def _forked(model: Model, rng: Rng) -> Tensor:
    other, end = copy.deepcopy(model.net), threading.Event()
    axis = 0 if model.layers(nn.Linear) else 1

    def call() -> None:
        count = 1
        with suppress(Exception):
            while not end.is_set():
                count = count % 5 + 1
                model.out(torch.cat([model.x] * count, axis), other)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(rng.random() * 0.02)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        torch.manual_seed(0)  # the thread has drawn numbers, too
        try:
            torch.save(model.out().detach(), found := io.BytesIO())
            os.write(writer, found.getvalue())
        finally:
            os._exit(0)
    end.set()
    thread.join()
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    result: Tensor = torch.load(io.BytesIO(text))
    return result


COMMON: tuple[Event, ...] = (
    *(train, train, penalise, prune_one, prune_structured, prune_all, remove, hook, unhook),
    *(write_data, write_numpy, new_data, new_mask, mask_data, mask_numpy, scale_mask, whole_mask),
    *(bool_mask, write_masked, load, switch, copied, pickled, require, to_half_and_back, single),
    *(masked_gradients, masked_gradients, twice, late, infer, other_size, checkpointed),
    *(traced_fx, traced_jit, functional, faked),
    *(load_plain, instances, initialise, reverted, scripted, exported, quantised),
    *(changed_results, changed_arguments, strided, batched, pushed),
)
OF_STACKS: tuple[Event, ...] = (
    *(prune_bias, change_setting, change_setting, change_dilation, replace_layer, swap, insert),
    *(own_forward, write_statistics, freeze_norm, share, interleave, renew_statistics),
)
# Gradients of stacks have no derivatives, and say so.
OF_SEQUENCES: tuple[Event, ...] = (*COMMON, second)
_NOT_OF_LAYERS = masked_gradients, scripted
KINDS: dict[str, tuple[Callable[[Rng], tuple[nn.Module, Tensor]], tuple[Event, ...]]] = {
    "stack": (stack, COMMON + OF_STACKS),
    "alone": (alone, COMMON + OF_STACKS),
    # A child of PyTorch's own layers hangs where another thread was in its pool of threads.
    "recurrent": (recurrent, (*OF_SEQUENCES, fork)),
    "derived": (derived, (*OF_SEQUENCES, fork)),
    "cells": (cells, (*OF_SEQUENCES, fork)),
    # A masked weight is what the last step has made of it, whose gradient is that of this step, and
    # PyTorch scripts no layer of torchrecurrent.
    "layers": (layers, tuple(each for each in OF_SEQUENCES if each not in _NOT_OF_LAYERS)),
}


# -- Lives -----------------------------------------------------------------------------------------


def squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers."""
    return torch.stack([each.square().sum() for each in tensors]).sum()


def results(model: Model, seed: int) -> list[Tensor]:
    """Return outputs, gradients, buffers and masked weights."""
    x = model.x.clone().requires_grad_()
    found = model.outs(x)
    rng = np.random.default_rng(seed)
    if rng.random() < 0.2:
        with torch.no_grad():
            again = model.outs(x)
        found = [one + two for one, two in zip(found, again, strict=True)]
    loss = squares(found)
    params = [x, *(each for each in model.net.parameters() if each.requires_grad)]
    found += [
        torch.zeros(()) if each is None else each
        for each in torch.autograd.grad(loss, params, allow_unused=True)
    ]
    found += [each for _, each in sorted(model.net.named_buffers())]
    return found + [getattr(module, name) for module, name in model.pruned()]


def same(ours: Any, theirs: Any) -> None:
    """Raise unless both are equal up to rounding."""
    if isinstance(theirs, Tensor):
        ours, theirs = [ours], [theirs]
    if theirs is None:
        return
    assert [each is None for each in ours] == [each is None for each in theirs]
    ours, theirs = ([each for each in some if each is not None] for some in (ours, theirs))
    pairs = [
        (one.detach().double(), two.detach().double())
        for one, two in zip(ours, theirs, strict=True)
    ]
    # Some gradients are sums of large numbers that are 0.
    scale = max([1.0, *(float(two.abs().max()) for _, two in pairs if two.numel())])
    eps = torch.finfo(torch.float32).eps if any(_is_single(two) for two in theirs) else EPS
    for k, (one, two) in enumerate(pairs):
        assert one.shape == two.shape, k
        if two.numel():
            apart = float((one - two).abs().max())
            assert apart <= 1e4 * eps * scale, f"{k}: {apart} of {scale}"


def _is_single(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and bool((tensor.detach().float().double() == tensor).all())


def attempt(call: Callable[[], Any]) -> tuple[Any, type[Exception] | None]:
    """Return what a call returns, or the class of what it raises; both draw the same numbers."""
    torch.manual_seed(0)
    try:
        return call(), None
    except Exception as error:
        return error, type(error)


def told(outcome: tuple[Any, type[Exception] | None]) -> str:
    """Return what was raised, if anything was."""
    return repr(outcome[0]) if outcome[1] else "none"


def live(kind: str, seed: int, names: Sequence[str] | None = None, *, talks: bool = False) -> int:
    """Live one life; return how many events it had, without those that could not be.

    In every other one, calls are prepared at once, not when they have come a few times. In three of
    four, kernels run small stacks, too, which PyTorch computes faster.
    """
    with ExitStack() as stack:
        if seed % 2:
            stack.enter_context(only("sparsescan"))
        if seed % 4:
            stack.enter_context(mock.patch.object(sequential, "_is_slower", return_value=False))
        return _live(kind, seed, names, talks)


def _live(kind: str, seed: int, names: Sequence[str] | None, talks: bool) -> int:
    make, events = KINDS[kind]
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net, x = make(rng)
    with torch.no_grad():
        net(x)
    twin = copy.deepcopy(net)
    replace(kind, twin)
    theirs, ours = Model(net, x, False, kind), Model(twin, x, True, kind)
    by_name = {event.__name__: event for event in events}
    if names is None:
        names = [events[int(rng.integers(len(events)))].__name__ for _ in range(8)]
    begin = [attempt(lambda: results(model, seed))[0] for model in (ours, theirs)]  # noqa: B023
    same(*begin)
    count = 0
    for k, name in enumerate(names):
        if talks:
            print(f"  {k}: {name}", flush=True)
        event = by_name[name]
        done = [
            attempt(lambda: event(model, np.random.default_rng([seed, k])))  # noqa: B023
            for model in (ours, theirs)
        ]
        assert done[0][1] == done[1][1], f"{name}: ours {told(done[0])}, theirs {told(done[1])}"
        if done[0][1] is SkippedError:
            continue
        count += 1
        if done[0][1] is None:
            same(done[0][0], done[1][0])
        after = [attempt(lambda: results(model, seed + k)) for model in (ours, theirs)]  # noqa: B023
        assert after[0][1] == after[1][1], f"{name}: ours {told(after[0])}, theirs {told(after[1])}"
        if after[0][1] is not None:
            break
        same(after[0][0], after[1][0])
        # Else rounding would grow with each event.
        for mine, other in zip(ours.net.parameters(), theirs.net.parameters(), strict=True):
            mine.data.copy_(other.data)
        for mine, other in zip(ours.net.buffers(), theirs.net.buffers(), strict=True):
            mine.data.copy_(other.data)
    return count


def replace(kind: str, net: nn.Module) -> None:
    """Convert a model, whatever is faster."""
    if kind == "stack":
        net.__class__ = sparsescan.torch.sequential.Sequential
    elif kind == "alone":
        for layer in net.modules():
            if type(layer) in (nn.Linear, nn.Conv2d):
                layer.__class__ = lone_layers.replacement_of(layer)
    elif kind == "cells":
        net.__class__ = sparsescan.torch.module(net.cell)  # type: ignore[arg-type]
    else:
        sparsescan.torch.convert(net)


def _kind_of_life(i: int) -> str:
    if i % 3:
        return "stack"
    return ("recurrent", "layers", "cells", "alone", "derived")[i // 3 % 5]


def run(seed: int, numbers: Sequence[int], *, most: int = 10) -> collections.Counter[str]:
    """Live lives, print those that go wrong, and count them and their events."""
    counts: collections.Counter[str] = collections.Counter()
    warnings.simplefilter("ignore")
    for i in numbers:
        kind = _kind_of_life(i)
        own = int(np.random.default_rng([seed, i]).integers(1 << 32))
        counts["lives"] += 1
        try:
            counts["events"] += live(kind, own)
        except Exception:
            counts["wrong"] += 1
            print(f"seed {seed}, life {i}: {kind} {own}\n{traceback.format_exc()}", flush=True)
            if counts["wrong"] == most:
                break
    return counts


def main() -> None:
    """Live as many lives as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one life")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    if arguments.only is not None:
        i = arguments.only
        own = int(np.random.default_rng([arguments.seed, i]).integers(1 << 32))
        live(_kind_of_life(i), own, talks=True)
        return
    counts = run(arguments.seed, range(arguments.count))
    seconds = time.perf_counter() - start
    print(
        f"seed {arguments.seed}: {counts['lives']} lives with {counts['events']} events in "
        f"{seconds:.0f} s, {counts['wrong']} wrong"
    )
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()

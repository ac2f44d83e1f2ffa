"""From which density on a layer is faster as a dense one, and faster in PyTorch.

A step of one layer is its forward pass, and the gradients of its input, its weights and its bias.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import prune

from sparsescan.jacobians import Sequential, from_torch
from sparsescan.jacobians.training import weighted

from . import drawing, peers, races
from .drawing import BLUE, GREEN, ORANGE, decades, legend, plain
from .experiment import Drawing, Experiment, Piece, Results
from .peers import PYTORCH
from .races import OURS
from .timing import Call

Array = NDArray[Any]

KEPT, ALL = "kept weights", "all weights"
_DENSITIES = 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0


@dataclass(frozen=True)
class LayerCase:
    """A layer and the shape of its batch."""

    name: str
    channels: tuple[int, int]
    size: int  # of the image; 0 for a linear layer
    batch: int

    def module(self) -> nn.Module:
        """Return PyTorch's."""
        if self.size:
            return nn.Conv2d(*self.channels, 3, padding=1)
        return nn.Linear(*self.channels)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return (self.channels[0], *[self.size] * 2) if self.size else self.channels[:1]


# Layers of VGG-11 for images of 32×32 pixels, and of the perceptron beside it.
LAYERS = (
    LayerCase("64 → 128 channels, 16×16, B=16", (64, 128), 16, 16),
    LayerCase("256 → 256 channels, 8×8, B=16", (256, 256), 8, 16),
    LayerCase("512 → 512 channels, 4×4, B=16", (512, 512), 4, 16),
    LayerCase("512 → 512 channels, 2×2, B=16", (512, 512), 2, 16),
    LayerCase("512 → 512 channels, 4×4, B=64", (512, 512), 4, 64),
    LayerCase("2,048 → 2,048 features, B=64", (2048, 2048), 0, 64),
)


def measure(layer: LayerCase, density: float, quick: bool) -> Results:
    """Time a step as chosen, by kept weights, by all, and by PyTorch, who take turns."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    module = layer.module()
    kept = torch.from_numpy(rng.random(tuple(module.weight.shape)) < density)
    module.weight.data *= kept
    theirs = copy.deepcopy(module)
    if density < 1:
        prune.custom_from_mask(module, "weight", kept)
    net = Sequential(from_torch(module, layer.shape))
    x = rng.standard_normal((layer.batch, *layer.shape), np.float32)
    grad = rng.standard_normal((layer.batch, *net.output_shape), np.float32)
    calls = {OURS: _ours(net, x, grad)}
    for name, bound in ((KEPT, 2), (ALL, -1)):  # layers are taken as dense from a density on
        with mock.patch.multiple(weighted, DENSITY=bound, MATRIX_DENSITY=bound):
            calls[name] = _ours(net, x, grad)
    makers = {name: lambda call=call: {"training step": call} for name, call in calls.items()}
    return races.timed({**makers, PYTORCH: lambda: _theirs(theirs, x, grad)}, {}, quick)


def _ours(net: Sequential, x: Array, grad: Array) -> Call:
    step, out = net.training_step(), None

    def call() -> None:
        nonlocal out
        step.forward(x)
        out = step.backward(grad, out=out).params

    return call


def _theirs(module: nn.Module, x: Array, grad: Array) -> dict[str, Call]:
    """Return PyTorch's step, with the orders of axes and the threads that it may be given."""
    forms = (torch.contiguous_format, torch.channels_last)[: 2 if x.ndim == 4 else 1]
    calls: dict[str, Call] = {}
    for form in forms:
        own = copy.deepcopy(module).to(memory_format=form)
        images = torch.from_numpy(x).contiguous(memory_format=form).requires_grad_()

        def call(own: Any = own, images: Any = images) -> None:
            sources = [images, *own.parameters()]
            torch.autograd.grad(own(images), sources, torch.from_numpy(grad))

        calls |= peers.in_threads(call, f", {str(form)[6:]}")
    return calls


# -- The experiment -------------------------------------------------------------------------------


def _key(layer: LayerCase, density: float) -> str:
    return f"{layer.name}, {density:g}"


def _pieces(quick: bool) -> Iterable[Piece]:
    layers, densities = (LAYERS[3:4], (0.05, 1.0)) if quick else (LAYERS, _DENSITIES)
    for layer in layers:
        for density in densities:
            yield Piece(_key(layer, density), partial(measure, layer, density, quick))


def _about(quick: bool) -> Results:
    return {
        "a step": "forward pass, and gradients of input, weight and bias; float32, no optimiser",
        "PyTorch": "zeros for pruned weights, both orders of axes, 2 threads or 1, whichever were "
        "faster",
    }


def _curves(results: Results, layer: LayerCase) -> dict[str, list[tuple[float, float]]]:
    """Density and median seconds of each contender, for what was measured of a layer."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for density in _DENSITIES:
        piece = results["pieces"].get(_key(layer, density))
        for name, samples in piece["samples"].items() if piece else ():
            curves.setdefault(name, []).append((density, float(np.median(samples))))
    return curves


def crossing(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float | None:
    """Return the density from which on theirs are faster, by logarithms; None if they never are."""
    gain = [np.log(mine / other) for (_, mine), (_, other) in zip(ours, theirs, strict=True)]
    if gain[-1] <= 0:
        return None
    last = max((k for k, each in enumerate(gain) if each <= 0), default=None)
    if last is None:
        return ours[0][0]
    share = -gain[last] / (gain[last + 1] - gain[last])
    low, high = np.log(ours[last][0]), np.log(ours[last + 1][0])
    return float(np.exp(low + share * (high - low)))


def _drawings(results: Results) -> list[Drawing]:
    every = {layer: _curves(results, layer) for layer in LAYERS}
    every = {layer: curves for layer, curves in every.items() if curves}
    if not every:
        return []
    figure, axes = drawing.panels(-(-len(every) // 3), min(3, len(every)), 11, 6.5)
    for panel, (layer, curves) in zip(axes.flat, every.items(), strict=False):
        for name, color in ((KEPT, ORANGE), (ALL, GREEN), (PYTORCH, BLUE)):
            x, y = np.transpose(curves[name])
            panel.plot(x, 1e3 * y, "o-", ms=4, lw=1.5, color=color, label=name)
        x, y = np.transpose(curves[OURS])
        panel.plot(x, 1e3 * y, "k--", lw=1, label="as chosen")
        where = crossing(curves[OURS], curves[PYTORCH])
        says = "never" if where is None else f"from a density of {where:.2g} on"
        panel.set_title(f"{layer.name}\nPyTorch is faster: {says}", fontsize=9)
        panel.set(xscale="log", yscale="log", xlabel="share of weights kept", ylabel="ms")
        decades(panel.xaxis, "{:g}")
        decades(panel.yaxis, "{:g}")
        plain(panel, "both")
    legend(figure, [axes.flat[0]], 4, loc="outside upper center")
    caption = (
        "A training step of one layer by kept weights, by all of them, and in PyTorch, over the "
        "share of weights that is kept. Dashed is what a training step chooses."
    )
    return [Drawing("From which density on a layer is dense", caption, figure)]


EXPERIMENT = Experiment(
    "density",
    "Layers, by the share of weights that is kept",
    _pieces,
    _about,
    _drawings,
    partial(races.rows, "A layer's step", hidden=(KEPT, ALL)),
)

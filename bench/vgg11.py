"""Section 4.3 and Figure 10 of the paper: the FLOP of every step of a pruned VGG-11, and its time.

A VGG-11 is trained, 97% of the weights of every convolution are pruned by magnitude, and the others
are trained on. Its convolutional part is a chain of 21 sparse Jacobians. From their patterns
alone follow the FLOP of every step of a scan. Then these steps are timed, which the paper could
not do: by patterns that are known beforehand, by libraries that find them anew, and by PyTorch's
dense backward of a layer. The images are CIFAR-10 from a local folder, or scikit-learn's
handwritten digits scaled up to 32×32.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune
from tqdm import tqdm

from sparsescan import Schedule

from . import vgg11_timing
from .contests import Work
from .experiment import Experiment, Options, Piece
from .gpu_device import device_of
from .lenet5 import Images, load_images
from .timing import THREADS
from .vgg11_drawings import drawings, rows
from .vgg11_flop import Analysis, Step, baseline, layer_names
from .workloads import VGG11_WIDTHS

PRUNED = 0.97
# Convolutions, their ReLUs, and max-pools; and the levels of the paper's up-sweep (section 5.3).
STEPS, UP_LEVELS = 21, 2

_BATCHES = (1, 16)
_ROUNDS, _QUICK_ROUNDS = 7, 2
_ON_CPU = "computes on the CPU: run it without --device"
_ON_GPU = "computes on CUDA devices: run it with --device cuda"


@dataclass(frozen=True)
class Settings:
    """How a network is made."""

    narrow: int  # how many times narrower than VGG-11
    epochs: int
    retrained: int  # epochs after pruning
    rate: float
    batch: int


_QUICK = Settings(narrow=8, epochs=6, retrained=12, rate=2e-3, batch=32)
_FULL = {
    "digits": Settings(narrow=1, epochs=6, retrained=14, rate=5e-4, batch=32),
    "cifar10": Settings(narrow=1, epochs=30, retrained=30, rate=5e-4, batch=128),
}


# -- The network ----------------------------------------------------------------------------------


def network(narrow: int, seed: int = 0) -> nn.Sequential:
    """VGG-11 for 32×32 images of ten kinds: its convolutional part, and one linear layer."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG11_WIDTHS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(channels, width // narrow, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.ReLU()]
        channels = width // narrow
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(channels, 10))


def prune_convolutions(net: nn.Sequential) -> None:
    """Drop the weights of the smallest magnitude of every convolution."""
    for layer in net[0]:
        if isinstance(layer, nn.Conv2d):
            prune.l1_unstructured(layer, "weight", PRUNED)


def rgb(images: Any) -> torch.Tensor:
    """Three channels, from -1 to 1."""
    return torch.from_numpy(np.repeat(2 * images - 1, 3 // images.shape[1], axis=1))


def fit(
    net: nn.Sequential, images: Images, epochs: int, rate: float, batch: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Train by Adam; the loss on the way, and the accuracy on test images, of every epoch."""
    x, test = (rgb(array).to(device) for array in (images.train, images.test))
    y, wanted = (
        torch.from_numpy(labels).to(device) for labels in (images.train_labels, images.test_labels)
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=rate)
    curves: dict[str, list[float]] = {"train loss": [], "test accuracy": []}
    for _ in tqdm(range(epochs), unit=" epochs", desc="training", leave=False):
        batches = torch.randperm(len(x)).split(batch)
        curves["train loss"].append(train_epoch(net, optimiser, x, y, batches))
        curves["test accuracy"].append(accuracy(net, test, wanted))
    return curves


def train_epoch(
    net: nn.Sequential,
    optimiser: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    batches: Sequence[torch.Tensor],
) -> float:
    """Learn from some batches, given by the numbers of their samples; the mean loss."""
    total = 0.0
    for chosen in batches:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
        loss.backward()
        optimiser.step()
        total += loss.item() * len(chosen)
    return total / len(x)


def accuracy(net: nn.Sequential, x: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the share of some images that a network recognises."""
    with torch.no_grad():
        kinds = torch.cat([net(part).argmax(1) for part in x.split(500)])
    return float((kinds == wanted).float().mean())


@cache
def trained(options: Options) -> tuple[nn.Sequential, dict[str, Any]]:
    """Return the pruned network, and how its training went.

    It is kept in a temporary file, so that a run that goes on where it was cut off has it at once.
    """
    settings, images = settings_of(options), images_of(options.data)
    torch.set_num_threads(THREADS)
    code = [
        inspect.getsource(step) for step in (network, prune_convolutions, rgb, fit, train_epoch)
    ]
    of = settings, PRUNED, VGG11_WIDTHS, options.device, images.name, images.train.shape
    key = repr((code, of, torch.__version__))
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    file = Path(tempfile.gettempdir()) / f"sparsescan-vgg11-{digest}.npz"
    net = network(settings.narrow).to(options.device)
    if file.exists():
        prune_convolutions(net)
        with np.load(file) as kept:
            net.load_state_dict({name: torch.from_numpy(kept[name]) for name in net.state_dict()})
            return net, json.loads(str(kept["found"]))
    how = settings.rate, settings.batch, options.device
    curves = {"trained": fit(net, images, settings.epochs, *how)}
    prune_convolutions(net)
    curves["retrained"] = fit(net, images, settings.retrained, *how)
    state = {name: tensor.cpu().numpy() for name, tensor in net.state_dict().items()}
    new = file.with_name(f"new-{file.name}")
    np.savez(new, found=json.dumps(curves), **state)
    new.replace(file)
    return net, curves


def settings_of(options: Options) -> Settings:
    return _QUICK if options.quick else _FULL[images_of(options.data).name]


@cache
def images_of(folder: Path | None) -> Images:
    return load_images(folder)


# -- Pieces ---------------------------------------------------------------------------------------


def _pieces(options: Options) -> list[Piece]:
    levels = Schedule.blelloch(STEPS).levels
    ups = [level.name for level in levels if (level.ops[:, 0] > 0).any()]
    return [
        Piece("training", partial(_training, options)),
        Piece("flop", partial(_flop, options)),
        Piece("steps: layers", partial(_steps, options, "layers")),
        *(Piece(f"steps: {up}", partial(_steps, options, up)) for up in ups),
        Piece("steps: by products", partial(_steps, options, "by products")),
        *(Piece(f"backward, B={batch}", partial(_backward, options, batch)) for batch in _BATCHES),
    ]


def _training(options: Options) -> dict[str, Any]:
    net, curves = trained(options)
    layers = [layer for layer in net[0] if isinstance(layer, nn.Conv2d)]
    return curves | {
        "kept weights": [int(layer.weight_mask.sum()) for layer in layers],
        "weights": [layer.weight.numel() for layer in layers],
    }


def _flop(options: Options) -> dict[str, Any]:
    """Count the FLOP of each step of some schedules, and of back-propagation."""
    net = _chain(options, 1).net
    auto = net.plan(batch=1, dtype=np.float32, device=device_of(options.device).device)
    analysis = Analysis(net.patterns, layer_names(net))
    schedules = {
        "the paper's": Schedule.truncated(STEPS, UP_LEVELS),
        "Blelloch": Schedule.blelloch(STEPS),
        "auto": auto.schedule,
    }
    return {
        "schedules": {name: repr(schedule) for name, schedule in schedules.items()},
        "reason": auto.reason,
        "steps": {
            name: [asdict(step) for step in analysis.steps(schedule)]
            for name, schedule in schedules.items()
        },
        "back-propagation": baseline(net),
    }


def _steps(options: Options, group: str) -> dict[str, Any]:
    """Time the steps of a group, as far as they are not too large."""
    nodes = _nodes(options)
    steps = {step.label: step for step in nodes.steps if _group(step) == group}
    reasons = {label: nodes.too_large(step) for label, step in steps.items()}
    works = {
        label: vgg11_timing.step_work(nodes, step)
        for label, step in steps.items()
        if reasons[label] is None
    }
    return _race(options, works) | {
        "not timed": {label: why for label, why in reasons.items() if why},
        "call_seconds": vgg11_timing.call_seconds(device_of(options.device)),
    }


def _group(step: Step) -> str:
    """Which steps are timed together."""
    if not step.vector:
        return step.level
    return "layers" if step.stop == step.mid + 1 else "by products"


def _backward(options: Options, batch: int) -> dict[str, Any]:
    # The products of its schedule would take ten gigabytes for 16 images.
    paper = Schedule.truncated(STEPS, UP_LEVELS) if batch == 1 else None
    return _race(options, {"backward": vgg11_timing.backward(_chain(options, batch), paper)})


def _race(options: Options, works: dict[str, Work]) -> dict[str, Any]:
    """Time some works, and name the peers that do not compute on this device."""
    device = device_of(options.device)
    times = vgg11_timing.race(works, device, _rounds(options))
    if device.on_gpu:
        elsewhere = dict.fromkeys((vgg11_timing.SCIPY, vgg11_timing.MKL), _ON_CPU)
    else:
        elsewhere = dict.fromkeys((vgg11_timing.CUSPARSE, vgg11_timing.REUSE), _ON_GPU)
    times["missing"] |= elsewhere
    return times


def _rounds(options: Options) -> int:
    return _QUICK_ROUNDS if options.quick else _ROUNDS


@cache
def _chain(options: Options, batch: int) -> vgg11_timing.Chain:
    """Return the Jacobians at the first test images."""
    net, _ = trained(options)
    images = images_of(options.data)
    labels = torch.from_numpy(images.test_labels[:batch])
    return vgg11_timing.Chain(net, rgb(images.test[:batch]), labels, device_of(options.device))


@cache
def _nodes(options: Options) -> vgg11_timing.Nodes:
    kinds = Schedule.linear(STEPS), Schedule.truncated(STEPS, UP_LEVELS), Schedule.blelloch(STEPS)
    return vgg11_timing.Nodes(_chain(options, 1), *kinds)


def _about(options: Options) -> dict[str, Any]:
    settings, images = settings_of(options), images_of(options.data)
    convs = [
        layer.out_channels for layer in network(settings.narrow)[0] if isinstance(layer, nn.Conv2d)
    ]
    return {
        "images": images.name,
        "images to train on": len(images.train),
        "images to test on": len(images.test),
        "channels of the convolutions": convs,
        "pruned": f"{PRUNED:.0%} of the weights of every convolution, by magnitude",
        "epochs": [settings.epochs, settings.retrained],
        "optimiser": f"Adam, learning rate {settings.rate}, batches of {settings.batch}",
        "rounds": _rounds(options),
        "dtype": "float32, without TF32",
    }


EXPERIMENT = Experiment(
    name="vgg11",
    title="Pruned VGG-11",
    pieces=_pieces,
    about=_about,
    drawings=drawings,
    rows=rows,
)

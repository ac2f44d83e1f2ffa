"""A pruned VGG-11 is trained on: its accuracy over the time that is waited for, beside PyTorch.

Both train on from one network (section 4.3 of the paper: 97% of the weights of every convolution
pruned by magnitude), with the same batches and Adam. They take turns, an epoch each.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from sparsescan.torch import convert

from . import drawing, vgg11
from .drawing import BLUE, ORANGE, plain
from .experiment import Drawing, Experiment, Options, Piece, Results, Row, cpu_only
from .lenet5 import Images
from .timing import THREADS

OURS, PYTORCH = "sparsescan.torch", "PyTorch"
_COLORS = {PYTORCH: BLUE, OURS: ORANGE}
_KEY = "training on"


def train_on(net: nn.Sequential, images: Images, settings: vgg11.Settings) -> dict[str, Results]:
    """Train a pruned network and its twin; seconds, losses and accuracies of every epoch."""
    test = vgg11.rgb(images.test), torch.from_numpy(images.test_labels)
    # It also leaves pruned weights without a graph, as copies need them.
    start = vgg11.accuracy(net, *test)
    nets = {PYTORCH: net, OURS: copy.deepcopy(net)}
    converted = convert(nets[OURS])
    if not converted.replaced:
        raise ValueError(f"no stack was replaced: {converted}")
    optimisers = {
        name: torch.optim.Adam(each.parameters(), lr=settings.rate) for name, each in nets.items()
    }
    x, y = vgg11.rgb(images.train), torch.from_numpy(images.train_labels)
    curves: dict[str, Results] = {
        name: {"seconds": [], "train loss": [], "test accuracy": [start]} for name in nets
    }
    for each in nets.values():
        # Compilation and memory, which the first step takes, are no part of an epoch.
        each(x[: settings.batch]).sum().backward()
        each.zero_grad()
    for epoch in tqdm(range(settings.retrained), unit=" epochs", desc="training on", leave=False):
        batches = torch.randperm(len(x)).split(settings.batch)
        for name in list(nets)[:: 1 if epoch % 2 else -1]:
            began = time.perf_counter()
            loss = vgg11.train_epoch(nets[name], optimisers[name], x, y, batches)
            curves[name]["seconds"].append(time.perf_counter() - began)
            curves[name]["train loss"].append(loss)
            curves[name]["test accuracy"].append(vgg11.accuracy(nets[name], *test))
    return curves


# -- The experiment -------------------------------------------------------------------------------


def _measure(options: Options) -> Results:
    settings, images = vgg11.settings_of(options), vgg11.images_of(options.data)
    torch.set_num_threads(THREADS)
    net = vgg11.network(settings.narrow)
    vgg11.fit(net, images, settings.epochs, settings.rate, settings.batch)
    vgg11.prune_convolutions(net)
    return {"curves": train_on(net, images, settings)}


def _pieces(options: Options) -> Iterable[Piece]:
    cpu_only("retrain", options)
    yield Piece(_KEY, partial(_measure, options))


def _about(options: Options) -> Results:
    settings, images = vgg11.settings_of(options), vgg11.images_of(options.data)
    return {
        "images": images.name,
        "images to train on": len(images.train),
        "images to test on": len(images.test),
        "pruned": f"{vgg11.PRUNED:.0%} of the weights of every convolution, by magnitude, after "
        f"{settings.epochs} epochs",
        "optimiser": f"Adam, learning rate {settings.rate}, batches of {settings.batch}",
        "threads": THREADS,
    }


def _seconds(curves: dict[str, Results], name: str) -> Any:
    return np.cumsum([0, *curves[name]["seconds"]])


def _drawings(results: Results) -> list[Drawing]:
    piece = results["pieces"].get(_KEY)
    if piece is None:
        return []
    curves = piece["curves"]
    figure, [[axes]] = drawing.panels(1, 1, 8, 3.6)
    for name, curve in curves.items():
        shown = "o-", _seconds(curves, name), curve["test accuracy"]
        axes.plot(*shown[1:], shown[0], color=_COLORS[name], ms=4, label=name)
    axes.set(xlabel="seconds of training", ylabel="share of test images right", ylim=(0, 1.02))
    plain(axes)
    axes.legend(frameon=False, loc="lower right")
    total = {name: float(_seconds(curves, name)[-1]) for name in curves}
    last = {name: curve["test accuracy"][-1] for name, curve in curves.items()}
    caption = (
        f"A VGG-11 pruned by {vgg11.PRUNED:.0%} is trained on, on {results['about']['images']}, by "
        f"the same batches: {len(curves[OURS]['seconds'])} epochs take {total[PYTORCH]:.0f} s in "
        f"PyTorch and {total[OURS]:.0f} s after convert(), and end at {last[PYTORCH]:.1%} and "
        f"{last[OURS]:.1%} of the test images."
    )
    return [Drawing("Accuracy over time, after pruning", caption, figure)]


def _rows(results: Results) -> list[Row]:
    piece = results["pieces"].get(_KEY)
    if piece is None:
        return []
    medians = {name: float(np.median(each["seconds"])) for name, each in piece["curves"].items()}
    what = f"an epoch of training a pruned VGG-11 on, {results['about']['images']}"
    return [Row(what, PYTORCH, medians[PYTORCH], medians[OURS])]


EXPERIMENT = Experiment(
    name="retrain",
    title="Training a pruned VGG-11 on",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=_rows,
)

"""The experiment on pipelines, on a few images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsescan.strategies.architectures import build
from sparsescan.strategies.pipeline.schedule import Placement

from . import lenet5, pipeline
from .experiment import Options, run
from .pipeline import CHECK, GROUPS, PLAIN, Settings, TorchStage
from .space_time import draw

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Six iterations on a few images."""
    threads = torch.get_num_threads()
    digits = lenet5.load_digits()
    few = lenet5.Images("digits", *(array[:64] for array in digits[1:]))
    monkeypatch.setattr(pipeline, "load_digits", lambda: few)
    monkeypatch.setattr(pipeline, "_QUICK", Settings(6, 2, 2))
    monkeypatch.setattr("bench.machine.pin", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_experiment(tmp_path: Path) -> None:
    results = json.loads(run(pipeline.EXPERIMENT, QUICK, tmp_path).read_text())
    pieces = results["pieces"]
    assert pieces[CHECK]["apart"] <= pieces[CHECK]["bound"] < 1e-4
    plain, ten, longer = (
        pieces[name] for name in (PLAIN, "10 stages", "10 stages, hybrid 2/3 + 2/3")
    )
    assert plain["registers"] == []
    assert ten["registers"] == list(GROUPS)
    assert [one["iterations"] for one in longer["runs"]] == [[3, 6]] * 2  # of eight
    assert [one["iterations"] for one in ten["runs"]] == [[3, 6]] * 2
    assert all(0 <= run["accuracy"][-1] <= 1 for piece in (plain, ten) for run in piece["runs"])
    # The same parameters and batches, but stale weights.
    assert plain["runs"][0]["loss"] != ten["runs"][0]["loss"]
    assert plain["runs"][0]["loss"] != plain["runs"][1]["loss"]
    drawings = pipeline.EXPERIMENT.drawings(results)
    assert len(drawings) == 3
    for k, drawing in enumerate(drawings):
        drawing.figure.savefig(tmp_path / f"{k}.png")
    assert "22 updates behind" in drawings[2].caption
    some = results | {"pieces": {name: pieces[name] for name in (CHECK, "4 stages")}}
    assert len(pipeline.EXPERIMENT.drawings(some)) == 3
    assert pipeline.EXPERIMENT.drawings(results | {"pieces": {CHECK: pieces[CHECK]}}) == []
    assert pipeline.EXPERIMENT.rows(results) == []


def test_the_network_is_the_one_that_is_built_in() -> None:
    layers = build("lenet5").layers[1:]
    assert pipeline.weights() == [layer.weights for layer in layers]
    assert len(layers) == pipeline.LAYERS
    # Registers stand before the layers that have weights.
    assert [p for p, layer in enumerate(layers) if layer.weights][1:] == [3, 7, 9, 11]
    assert layers[6].kind == "flatten"


def test_without_a_pipeline_it_is_sgd_of_pytorch() -> None:
    images, settings = pipeline.load_digits(), Settings(6, 1, 6)
    result = pipeline.train((), images, settings, 3, (3, 0))
    alone = pipeline.train(GROUPS, images, settings, 3, (0, 3))
    module = pipeline.network(3)
    optimiser = torch.optim.SGD(module.parameters(), lr=pipeline.RATE, momentum=pipeline.MOMENTUM)
    losses = []
    for x, labels in pipeline.batches(images, 6, 3):
        optimiser.zero_grad()
        y = module(torch.from_numpy(x))
        torch.nn.functional.cross_entropy(y, torch.from_numpy(labels)).backward()
        optimiser.step()
        with torch.no_grad():
            y = module(torch.from_numpy(images.test))
            labels = torch.from_numpy(images.test_labels)
            losses.append(torch.nn.functional.cross_entropy(y, labels).item())
    np.testing.assert_allclose(result["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(alone["loss"], losses, rtol=1e-5)


def test_stages_that_do_something_else_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as gradients by weights that have been stashed."""
    forward = TorchStage.forward

    def stashing(self: TorchStage, x: Any) -> Any:
        result = forward(self, x)
        self.__dict__.setdefault("stash", []).append([p.clone() for p in self.module.parameters()])
        return result

    def backward(self: TorchStage, activations: Any, grad: Any) -> Any:
        parameters, old = list(self.module.parameters()), self.__dict__["stash"].pop(0)
        now = [p.clone() for p in parameters]
        for p, before in zip(parameters, old, strict=True):
            p.data.copy_(before)
        result = real(self, activations, grad)
        for p, new in zip(parameters, now, strict=True):
            p.data.copy_(new)
        return result

    real = TorchStage.backward
    monkeypatch.setattr(TorchStage, "forward", stashing)
    monkeypatch.setattr(TorchStage, "backward", backward)
    with pytest.raises(AssertionError, match="PyTorch's stages are wrong: losses are up to"):
        pipeline.check(pipeline.load_digits(), 20)


def test_the_picture(tmp_path: Path) -> None:
    placement = Placement(4, (1, 2))
    figure = draw(placement, 7)
    figure.savefig(tmp_path / "picture.png")
    apart, together = figure.axes
    assert [label.get_text() for label in together.get_yticklabels()] == [
        *("FS1", "FS2", "FS3, BKS1", "BKS2", "BKS3")
    ]
    # Every minibatch has six passes; as many cycles have time for two and a bit of them one by one.
    assert len(together.texts) == 6 * 7
    assert [text.get_text() for text in apart.texts[:6]] == ["0", "1", "2", "0", "1", "0"]
    said = [text.get_text() for text in together.texts if text.get_position()[1] == 0]
    assert said == ["0", *(f"{m}$_{{−{min(m, 4)}}}$" for m in range(1, 7))]

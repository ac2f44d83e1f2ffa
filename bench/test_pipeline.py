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
from .pipeline import CHECK, GROUPS, HYBRID, PLAIN, Settings, TorchStage, Way
from .space_time import draw

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twelve iterations on a few images."""
    threads = torch.get_num_threads()
    digits = lenet5.load_digits()
    few = lenet5.Images("digits", *(array[:64] for array in digits[1:]))
    monkeypatch.setattr(pipeline, "load_digits", lambda: few)
    monkeypatch.setattr(pipeline, "_QUICK", Settings(12, 12, 2))
    monkeypatch.setattr("bench.machine.pin", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_experiment(tmp_path: Path) -> None:
    results = json.loads(run(pipeline.EXPERIMENT, QUICK, tmp_path).read_text())
    pieces = results["pieces"]
    assert pieces[CHECK]["apart"] <= pieces[CHECK]["bound"] < 1e-4
    plain, ten, longer = (pieces[name] for name in (PLAIN, "10 stages", HYBRID))
    assert plain["registers"] == []
    assert ten["registers"] == list(GROUPS)
    # Two folds, twice.
    assert [one["iterations"] for one in longer["runs"]] == [[*range(1, 17)]] * 4
    assert [one["iterations"] for one in ten["runs"]] == [[*range(1, 13)]] * 4
    # Hybrid training begins in a pipeline, and without one what was on its way has come to its end.
    for one, other in zip(longer["runs"], ten["runs"], strict=True):
        assert one["loss"][:7] == other["loss"][:7]
        assert one["loss"][7] != other["loss"][7]
        assert [phase["iterations"] for phase in one["phases"]] == [8, 16]
    assert all(0 <= run["accuracy"][-1] <= 1 for piece in (plain, ten) for run in piece["runs"])
    # Both begin with the same parameters and batches; only the age of the weights differs.
    assert plain["runs"][0]["loss"] != ten["runs"][0]["loss"]
    assert plain["runs"][0]["loss"] != plain["runs"][1]["loss"]
    drawings = pipeline.EXPERIMENT.drawings(results)
    assert len(drawings) == 4
    for k, drawing in enumerate(drawings):
        drawing.figure.savefig(tmp_path / f"{k}.png")
    assert "22 updates behind" in drawings[2].caption
    residual = [name for name in pieces if name.startswith("ResNet-20")]
    assert len(residual) == 5
    assert [pieces[name]["runs"][0]["phases"][0]["saturated"] for name in residual] == [None] * 5
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
    images, rate, decay = pipeline.load_digits(), pipeline.RATE, 0.01
    result, alone, warm = (
        pipeline.train(pipeline.network(3), way, images, 12, 3, rate, decay)
        for way in (
            Way(()),
            Way(GROUPS, ((12, False),)),
            Way(GROUPS, ((5, False), (7, True))),
        )
    )
    module = pipeline.network(3)
    optimiser = torch.optim.SGD(
        module.parameters(), lr=rate, momentum=pipeline.MOMENTUM, weight_decay=decay
    )
    losses = []
    for x, labels in pipeline.batches(images, 12, 3):
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
    # With the momentum of its first phase.
    np.testing.assert_allclose(warm["loss"][:5], losses[:5], rtol=1e-5)
    assert not np.allclose(warm["loss"][5:], losses[5:], rtol=1e-3)


def test_every_image_is_tested_once() -> None:
    images = lenet5.Images(
        "some", *(np.arange(8.0), np.arange(8)), *(np.arange(8.0, 11), np.arange(8, 11))
    )
    parts = pipeline.folds(images, 3)
    assert np.concatenate([part.test_labels for part in parts]).tolist() == list(range(11))
    for part in parts:
        both = np.concatenate([part.train, part.test])
        assert sorted(both) == list(range(11))
        assert (part.train == part.train_labels).all()
        assert (part.test == part.test_labels).all()


def test_the_residual_network_is_the_one_that_is_built_in() -> None:
    graph, module = build("resnet-20"), pipeline.resnet20(0)
    assert sum(p.numel() for p in module.parameters()) == graph.weights
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


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

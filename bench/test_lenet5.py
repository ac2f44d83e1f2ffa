"""The experiment of Figure 6, on a few images."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsescan import ScanPlan

from . import lenet5
from .experiment import Options, run
from .lenet5 import AUTOGRAD, REVERSED, SCAN

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two epochs of three batches."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(lenet5, "_QUICK_EPOCHS", 2)
    monkeypatch.setattr(lenet5, "_BATCH", 479)
    monkeypatch.setattr("bench.machine.pin", lambda: None)
    yield
    torch.set_num_threads(threads)


def test_both_ways_learn_the_same_and_a_run_that_is_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut_off:
        cut_off.setattr(lenet5, "_Scan", stop)
        with pytest.raises(KeyboardInterrupt):
            run(lenet5.EXPERIMENT, QUICK, tmp_path)
    (file,) = tmp_path.glob("lenet5-quick-*.json")
    assert list(json.loads(file.read_text())["pieces"]) == [AUTOGRAD]
    counts = {"train": 0, "exclusive_scan": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    for where in (lenet5, ScanPlan):
        for name in counts:
            if hasattr(where, name):
                monkeypatch.setattr(where, name, counted(name, getattr(where, name)))
    assert run(lenet5.EXPERIMENT, QUICK, tmp_path) == file
    assert counts == {"train": 2, "exclusive_scan": 6}

    results = json.loads(file.read_text())
    pieces = results["pieces"]
    for kind, per_epoch in (("train", 3), ("test", 1)):
        for contender in (SCAN, REVERSED):
            assert len(pieces[contender][kind]) == len(pieces[AUTOGRAD][kind]) == 2 * per_epoch
            np.testing.assert_allclose(pieces[contender][kind], pieces[AUTOGRAD][kind], rtol=1e-5)
            assert lenet5.differences(pieces, contender, kind).max() < 1e-5
    assert pieces[SCAN]["train"][-1] < pieces[SCAN]["train"][0]
    (drawing,) = lenet5.EXPERIMENT.drawings(results)
    drawing.figure.savefig(tmp_path / "picture.png")
    apart = lenet5.differences(pieces, SCAN, "train").max()
    assert f"{SCAN} and autograd: {apart:.1e} apart" in drawing.caption
    assert lenet5.EXPERIMENT.rows(results) == []


def test_whatever_trainings_there_are_can_be_drawn(tmp_path: Path) -> None:
    losses = {"train": [2.0, 1.0, 0.5, 0.25], "test": [1.5, 0.5]}
    about = {"images": "digits"}
    assert lenet5.EXPERIMENT.drawings({"pieces": {}, "about": about}) == []
    for names in ([SCAN], [AUTOGRAD], [AUTOGRAD, SCAN], [REVERSED, SCAN, AUTOGRAD]):
        pieces = dict.fromkeys(names, losses)
        (drawing,) = lenet5.EXPERIMENT.drawings({"pieces": pieces, "about": about})
        drawing.figure.savefig(tmp_path / "picture.png")
        assert ("0.0e+00 apart" in drawing.caption) == (len(names) > 1)


def test_cifar10_is_read_from_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    pixels = rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    for name, data in zip(names, pixels, strict=True):
        batch = {b"data": data, b"labels": list(range(4)), b"batch_label": name.encode()}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    images = lenet5.load_images(tmp_path)
    assert images.name == "cifar10"
    assert images.train.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal(images.test_labels, range(4))
    np.testing.assert_allclose(images.test.reshape(4, -1) * 255, pixels[-1], rtol=1e-6)
    about = lenet5.EXPERIMENT.about(Options(quick=False, device="cpu", data=tmp_path))
    assert about["images"] == "cifar10"
    assert about["learning rate"] == 0.001


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(pickle.UnpicklingError, match="does not belong in a CIFAR-10 file"):
        lenet5.load_cifar10(tmp_path)

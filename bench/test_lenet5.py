"""The experiment of Figure 6, on a few images."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsescan import ScanPlan

from . import lenet5
from .experiment import Options, run
from .lenet5 import AUTOGRAD, NETWORKS, REVERSED, SCAN, Settings
from .runs import cut_off, draw, go_on, interrupt

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two epochs of two batches."""
    threads = torch.get_num_threads()
    digits = lenet5.load_digits()
    few = lenet5.Images("digits", *(array[:8] for array in digits[1:]))
    monkeypatch.setattr(lenet5, "load_digits", lambda: few)
    monkeypatch.setattr(lenet5, "_QUICK", Settings(epochs=2, batch=4))
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_both_ways_learn_the_same_and_a_run_that_is_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[int] = []
    scan = ScanPlan.exclusive_scan

    def counted(*arguments: Any) -> Any:
        scans.append(1)
        return interrupt() if len(scans) == 6 else scan(*arguments)

    monkeypatch.setattr(ScanPlan, "exclusive_scan", counted)
    file = cut_off(lenet5.EXPERIMENT, QUICK, tmp_path, ScanPlan, "exclusive_scan", counted)
    assert file.name.startswith("lenet5-quick-")
    first, second = NETWORKS
    assert list(json.loads(file.read_text())["pieces"]) == [first]
    results = go_on(lenet5.EXPERIMENT, QUICK, tmp_path, file)
    assert len(scans) == 6 + 4  # the first network is not trained again
    for network, eps in zip(NETWORKS, (2**-23, 2**-52), strict=True):
        curves = results["pieces"][network]["curves"]
        assert list(curves) == [AUTOGRAD, SCAN, REVERSED]
        assert [len(curves[SCAN][kind]) for kind in ("train", "test", "accuracy")] == [4, 2, 2]
        assert lenet5.difference(curves, SCAN) < 50 * eps
        assert lenet5.difference(curves, REVERSED) < 50 * eps
        assert curves[SCAN]["test"][1] < curves[SCAN]["test"][0]
    (drawing,) = draw(lenet5.EXPERIMENT, results, tmp_path)
    assert drawing.caption.count("recognised") == 2
    only = results | {"pieces": {second: results["pieces"][second]}}
    assert len(lenet5.EXPERIMENT.drawings(only)) == 1
    assert lenet5.EXPERIMENT.drawings(results | {"pieces": {}}) == []
    assert lenet5.EXPERIMENT.rows(results) == []


def test_gradients_that_are_wrong_by_more_than_rounding_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = ScanPlan.exclusive_scan

    def wrong(*arguments: Any) -> Any:
        return [grad * np.float32(1.001) for grad in scan(*arguments)]

    monkeypatch.setattr(ScanPlan, "exclusive_scan", wrong)
    with pytest.raises(AssertionError, match="sparsescan is wrong: its losses are up to"):
        run(lenet5.EXPERIMENT, QUICK, tmp_path)


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
    assert about["batch"] == 256


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(pickle.UnpicklingError, match="does not belong in a CIFAR-10 file"):
        lenet5.load_cifar10(tmp_path)

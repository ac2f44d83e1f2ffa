"""The experiment of Figure 6, on a few images."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from . import lenet5


def test_both_ways_learn_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--epochs", "2", "--batch", "479", "--output", str(tmp_path)]
    assert lenet5.main(arguments) == 0
    assert "train loss" in capsys.readouterr().out
    (record,) = tmp_path.glob("*.json")
    results = json.loads(record.read_text())
    losses = results["losses"]
    for kind, per_epoch in (("train", 3), ("test", 1)):
        scan, autograd = losses["scan"][kind], losses["autograd"][kind]
        assert len(scan) == len(autograd) == 2 * per_epoch
        np.testing.assert_allclose(scan, autograd, rtol=1e-5)
        for difference in results["largest_difference_from_autograd"].values():
            assert difference[kind] < 1e-5
    assert losses["scan"]["train"][-1] < losses["scan"]["train"][0]
    assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_cifar10_is_read_from_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    pixels = rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    for name, data in zip(names, pixels, strict=True):
        batch = {b"data": data, b"labels": list(range(4)), b"batch_label": name.encode()}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    images = lenet5.load_cifar10(tmp_path)
    assert images.train.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal(images.test_labels, range(4))
    np.testing.assert_allclose(images.test.reshape(4, -1) * 255, pixels[-1], rtol=1e-6)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(pickle.UnpicklingError, match="does not belong in a CIFAR-10 file"):
        lenet5.load_cifar10(tmp_path)

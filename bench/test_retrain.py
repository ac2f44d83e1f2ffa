"""The race of a pruned network and its converted twin: both learn alike, and it can be shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsescan.torch import Sequential

from . import retrain, vgg11
from .experiment import Options
from .lenet5 import Images

SETTINGS = vgg11.Settings(narrow=16, epochs=1, retrained=3, rate=1e-3, batch=16)


def noise(count: int) -> Images:
    rng = np.random.default_rng()
    x, labels = rng.random((count, 3, 32, 32), np.float32), rng.integers(0, 10, count)
    return Images("noise", x, labels, x[:20], labels[:20])


def test_both_learn_alike() -> None:
    images = noise(48)
    net = vgg11.network(SETTINGS.narrow, seed=int(np.random.default_rng().integers(1 << 31)))
    vgg11.prune_convolutions(net)
    curves = retrain.train_on(net, images, SETTINGS)
    assert not isinstance(net[0], Sequential)
    for curve in curves.values():
        assert len(curve["seconds"]) == len(curve["train loss"]) == SETTINGS.retrained
        assert len(curve["test accuracy"]) == SETTINGS.retrained + 1
        assert min(curve["seconds"]) > 0
    theirs, ours = (curves[name]["train loss"] for name in (retrain.PYTORCH, retrain.OURS))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert theirs[-1] < theirs[0]


def test_what_is_measured_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vgg11, "_QUICK", SETTINGS)
    monkeypatch.setattr(vgg11, "load_images", lambda folder: noise(32))
    options, threads = Options(quick=True, device="cpu"), torch.get_num_threads()
    vgg11.images_of.cache_clear()
    try:
        (piece,) = retrain._pieces(options)
        results = {"pieces": {piece.key: piece.measure()}, "about": retrain._about(options)}
    finally:
        vgg11.images_of.cache_clear()
        torch.set_num_threads(threads)
    (drawing,) = retrain._drawings(results)
    assert "3 epochs take" in drawing.caption
    (row,) = retrain._rows(results)
    assert row.ours > 0
    assert row.theirs > 0


def test_a_network_that_is_not_replaced_is_no_race() -> None:
    with pytest.raises(ValueError, match="no stack was replaced"):
        retrain.train_on(vgg11.network(16), noise(4), SETTINGS)

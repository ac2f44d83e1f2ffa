"""A plugin of pytest: modules of PyTorch and torchrecurrent are converted as soon as they are made.

Tests of these packages then run on what a user has after ``sparsescan.torch.convert(model)``. Our
kernels run, also where PyTorch's are predicted to be faster. With ``PEERS_PLAIN`` set nothing is
converted: what fails then is not ours.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import pytest
import torch

import sparsescan.torch
from sparsescan.torch.calls import times


def pytest_configure(config: pytest.Config) -> None:
    """Convert modules that constructors return."""
    if "PEERS_PLAIN" in os.environ:
        return
    # The two modules that ask for a prediction have a name of their own for it.
    for module in _users_of(times.predict):
        module.predict = lambda *_, **__: times.CallPrediction(None, None)
    for kind in (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM, *_layers_of_torchrecurrent()):
        _convert_after_init(kind)


def _users_of(function: Any) -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("sparsescan.torch") and getattr(module, "predict", None) is function
    ]


def _layers_of_torchrecurrent() -> list[Any]:
    torchrecurrent = pytest.importorskip("torchrecurrent")
    layers = [getattr(torchrecurrent, name) for name in torchrecurrent.__all__]
    return [each for each in layers if not each.__name__.endswith("Cell")]


def _convert_after_init(kind: Any) -> None:
    plain = kind.__init__

    @functools.wraps(plain)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        if type(self) is kind:
            sparsescan.torch.convert(self)

    kind.__init__ = init


@pytest.fixture
def device() -> torch.device:
    """Return the only device here; torchrecurrent's source comes without this fixture."""
    return torch.device("cpu")

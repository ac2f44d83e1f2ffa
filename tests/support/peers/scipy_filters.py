"""SciPy's own tests of its filters, run on the filters of a front door.

A plugin of pytest; ``SPARSESCAN_DOOR`` is ``torch`` or ``jax``. Tests that use neither ``lfilter``
nor ``sosfilt`` are left out. With ``PEERS_PLAIN`` set they run on SciPy's: what fails then is not
ours.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

DOOR = os.environ.get("SPARSESCAN_DOOR", "torch")
CLASSES = ("TestLinearFilter", "TestSOSFilt")


def _door(name: str) -> Any:
    """Return a function of a front door that takes and returns arrays of NumPy."""
    if DOOR == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    function = getattr(importlib.import_module(f"sparsescan.{DOOR}"), name)

    def given(value: Any) -> Any:
        if DOOR == "torch" and not isinstance(value, int | float | complex):
            # Tensors have neither lists, nor memory that cannot be written, nor all dtypes.
            with suppress(TypeError):
                return importlib.import_module("torch").tensor(np.array(value))
        return value

    def call(arrays: Any, axis: int, zi: Any) -> Any:
        found = function(*map(given, arrays), axis, None if zi is None else given(zi))
        return np.asarray(found) if zi is None else tuple(map(np.asarray, found))

    if name == "sosfilt":
        return lambda sos, x, axis=-1, zi=None: call((sos, x), axis, zi)
    return lambda b, a, x, axis=-1, zi=None: call((b, a, x), axis, zi)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Keep the tests of filters, and give them those of the door."""
    kept = [item for item in items if item.cls and item.cls.__name__.startswith(CLASSES)]
    kept = [item for item in kept if "FiltFilt" not in item.cls.__name__]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    if "PEERS_PLAIN" in os.environ:
        return
    for module in {item.module for item in kept}:
        module.lfilter, module.sosfilt = _door("lfilter"), _door("sosfilt")

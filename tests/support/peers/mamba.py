"""A plugin of pytest: mamba-ssm's tests of its CUDA kernel run with our selective scan on a CPU.

The reference in PyTorch that they compare it with is mamba-ssm's own, from the checkout that
``PEER`` names. Nothing of mamba-ssm is compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sparsescan.torch


def pytest_configure(config: pytest.Config) -> None:
    """Import the interface of mamba-ssm without CUDA, and put our scan in it."""
    source = Path(os.environ["PEER"]) / "mamba_ssm"
    for name, folder in (("mamba_ssm", source), ("mamba_ssm.ops", source / "ops")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    norm = ModuleType("mamba_ssm.ops.triton.layer_norm")
    norm._layer_norm_fwd = None  # type: ignore[attr-defined]
    sys.modules["mamba_ssm.ops.triton"] = ModuleType("mamba_ssm.ops.triton")
    sys.modules[norm.__name__] = norm
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    from mamba_ssm.ops import selective_scan_interface

    selective_scan_interface.selective_scan_fn = sparsescan.torch.selective_scan

"""What a machine has, told without a library for GPUs, nor the package: they may be what fails."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .gpu_processes import find_sanitizer, toolkit_variables

# Of `sparsescan.kernels.cuda.machine_code`.
_KERNELS = "SPARSESCAN_KERNELS"


def environment() -> dict[str, Any]:
    """Return what a machine has."""
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    built = [*Path(os.environ.get(_KERNELS) or os.devnull).glob("*")]
    wanted = "numba", "cuda", "cupy", "nvidia", "torch", "jax", "numpy", "scipy", "pytest", "mpi"
    return {
        "ok": True,
        "summary": f"{os.cpu_count()} CPUs, Python {platform.python_version()}",
        "python": sys.version,
        "packages": {
            name: version
            for name, version in sorted(packages.items())
            if name and any(part in name.lower() for part in wanted)
        },
        "nvidia-smi": _said_by("nvidia-smi"),
        "toolkit": toolkit_variables(),
        "sanitizer": find_sanitizer(),
        "kernels built ahead": len(built),
        "disk bytes": shutil.disk_usage("/tmp").free,
    }


def _said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr

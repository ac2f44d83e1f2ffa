"""The CUDA kernels: what they compute, in a simulator, and what they compile to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

# Compiles every kernel and prints what ptxas says of it.
COMPILE = """
import subprocess, sys, types as python
import numpy as np
import numba.cuda.dispatcher
from numba import cuda, types
from sparsescan.kernels.cuda import chunk_kernels

ptxas, folder, major, minor = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
# Device functions are compiled for the current device, which there is none.
device = python.SimpleNamespace(compute_capability=(major, minor))
numba.cuda.dispatcher.get_current_device = lambda: device

for size, dtype in [(20, np.float32), (20, np.float64), (32, np.float64), (64, np.float32)]:
    kernels = chunk_kernels(size, np.dtype(dtype))
    values = getattr(types, np.dtype(dtype).name)[::1]
    words, flags = types.int64[::1], types.int32[::1]
    common = (types.int64[:, ::1], words, words, values)
    signatures = {
        "multiply": (*common, values, flags, flags),
        "carry": (*common, values, flags, flags, types.int64),
        "sweep": (*common, flags),
        "repair": (*common, flags),
    }
    for name, signature in signatures.items():
        function = getattr(kernels, name).py_func
        ptx, _ = cuda.compile(
            function, types.void(*signature), cc=(major, minor), device=False, abi="numba"
        )
        path = f"{folder}/{name}.ptx"
        open(path, "w").write(ptx)
        command = [ptxas, f"-arch=sm_{major}{minor}", "-v", path, "-o", f"{folder}/{name}.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print("KERNEL", size, np.dtype(dtype).name, name, done.stderr.replace("\\n", " "))
"""


def test_kernels_in_the_simulator() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(TESTS / "cuda_kernels.py"),
        ],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\b\d\d passed", run.stdout), run.stdout


def find_ptxas() -> str | None:
    """The assembler of the CUDA toolkit, or of its wheel."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("ptxas")
    wheels = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    return str(wheels[0]) if wheels else shutil.which("ptxas")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_kernels_compile_without_spills(capability: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not installed (the nvidia-cuda-nvcc wheel)")
    arguments: list[Any] = [ptxas, tmp_path, *capability]
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, arguments)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"^KERNEL .*$", run.stdout, flags=re.MULTILINE)
    assert len(lines) == 16
    for line in lines:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line
        (registers,) = re.findall(r"Used (\d+) registers", line)
        assert int(registers) <= 192, line

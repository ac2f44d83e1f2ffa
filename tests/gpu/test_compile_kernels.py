"""CUDA kernels compiled to real code, without a GPU; ``cuda_*.py`` runs them in the simulator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)


def find_ptxas() -> str | None:
    """The assembler of the CUDA toolkit, or of its wheel."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("ptxas")
    wheels = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    return str(wheels[0]) if wheels else shutil.which("ptxas")


# The oldest that CUDA 13 knows, and the newest that there was a device of.
CAPABILITIES = [(7, 5), (9, 0)]
KERNELS = 29


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ptxas says of all kernels."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not installed (the nvidia-cuda-nvcc wheel)")
    script, folder = str(SUPPORT / "compile_kernels.py"), str(tmp_path_factory.mktemp("ptx"))
    arguments = [sys.executable, script, ptxas, folder]
    arguments += [str(number) for capability in CAPABILITIES for number in capability]
    run = subprocess.run(arguments, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda pair: f"{pair[0]}.{pair[1]}")
def test_kernels_compile_without_spills(compiled: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    lines = re.findall(rf"^KERNEL .* for {major}\.{minor}:.*$", compiled, flags=re.MULTILINE)
    assert len(lines) == KERNELS
    for line in lines:
        assert f"for 'sm_{major}{minor}'" in line
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line
        (registers,) = re.findall(r"Used (\d+) registers", line)
        assert int(registers) <= 224, line

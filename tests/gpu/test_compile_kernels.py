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


# As Numba compiles: from 9.0 on for that very one.
CAPABILITIES = ["7.5", "8.0", "9.0a", "10.0a", "12.0a"]
KERNELS = 29


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ptxas says of all kernels."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not installed (the nvidia-cuda-nvcc wheel)")
    script, folder = str(SUPPORT / "compile_kernels.py"), str(tmp_path_factory.mktemp("ptx"))
    command = [sys.executable, script, ptxas, folder, *CAPABILITIES]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spills(compiled: str, capability: str) -> None:
    """Nor with stack frames: what a kernel has in arrays of its own is in registers."""
    lines = re.findall(rf"^KERNEL .* for {capability}:.*$", compiled, flags=re.MULTILINE)
    assert len(lines) == KERNELS
    for line in lines:
        assert f"for 'sm_{capability.replace('.', '')}'" in line
        assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line
        (registers,) = re.findall(r"Used (\d+) registers", line)
        assert int(registers) <= 224, line

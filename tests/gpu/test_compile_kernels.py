"""CUDA kernels compiled to real code, without a GPU; ``cuda_*.py`` runs them in the simulator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsescan.arrays.cuda import most_registers

SUPPORT = Path(__file__).parent.parent / "support"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)


def find_ptxas() -> str | None:
    """Return the assembler of the CUDA toolkit, or of its wheel."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("ptxas")
    wheels = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    return str(wheels[0]) if wheels else shutil.which("ptxas")


# One, the oldest and the newest; as Numba compiles, from 9.0 on for that very one.
CAPABILITIES = ["9.0a", "7.5", "12.0a"]
# Of levels and chained ones, chunks, and sequences: for the first, and for all.
KERNELS = {"9.0a": 12 + 26 + 26, "7.5": 6 + 7 + 6, "12.0a": 6 + 7 + 6}
# Blocks of kernels of levels have 256 threads: so two fit beside each other, on all but 7.5 by the
# shared memory of a multiprocessor, too, in KiB, of which each block takes one more.
REGISTERS = {"vectors": 128, "level": 128, "rescale": 128, "sweep_steps": 128}
SHARED = {"9.0a": 228, "12.0a": 100}
# The place of an entry of a dense matrix is divided by its columns, eleven times in `level` and
# nine in `rescale`, where a product is scaled or one operand is diagonal. The number of a chunk is
# divided by the batch.
# Where the compiler unrolls a loop, in checks of indices and in kernels of chunks, it divides once
# for how often that goes round.
DIVISIONS = {"level": 11, "rescale": 9, "vectors": 0, "sweep_steps": 0}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what ptxas says of all kernels."""
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
    """Nor with stack frames, as arrays of a kernel are in registers; with few long divisions."""
    lines = re.findall(rf"^KERNEL .* for {capability}:.*$", compiled, flags=re.MULTILINE)
    assert len(lines) == KERNELS[capability]
    for line in lines:
        assert f"for 'sm_{capability.replace('.', '')}'" in line
        is_full = is_full_of_registers(line)
        spilled = " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        assert spilled in line or is_full, line
        # The machine code says the same; the system has some shared memory of each block, too.
        ((registers, frame, taken),) = re.findall(
            r"loaded: (\d+) registers, (\d+) frame, (\d+) shared", line
        )
        assert re.findall(r"Used (\d+) registers", line) == [registers], line
        assert int(frame) <= 24 * is_full, line
        name = line.split()[1]
        assert int(registers) <= REGISTERS.get(name, 224), line
        if name in REGISTERS and capability in SHARED:
            (shared,) = re.findall(r"(\d+) bytes smem", line)
            assert 2 * (int(shared) + 1024) <= 1024 * SHARED[capability], line
            assert int(taken) in (int(shared), int(shared) + 1024), line
        # All threads of a block have as many as a multiprocessor has; or those of four blocks.
        threads = re.findall(r"(\d+) threads of a block", line)
        assert all(int(registers) <= most_registers(int(each)) for each in threads), line
        threads = re.findall(r"(\d+) threads of a multiprocessor", line)
        taken = -(-int(registers) // 8) * 8
        assert all(taken * int(each) <= 1 << 16 for each in threads), line
        (divisions,) = re.findall(r"(\d+) divisions of 64 bits", line)
        assert int(divisions) <= DIVISIONS.get(name, 2), line


def is_full_of_registers(line: str) -> bool:
    """Return whether the threads of a large block have all registers, and may lack a few."""
    if " threads of a block" not in line:
        return False
    ((threads, registers),) = re.findall(
        r"(\d+) threads of a block.* Used (\d+) registers", line, flags=re.DOTALL
    )
    return int(threads) > 256 and int(registers) == most_registers(int(threads))


def test_weights_stay_in_registers_up_to_so_many_units() -> None:
    """As many as the kernels say; and threads for all units."""
    pytest.importorskip("numba_cuda")
    from sparsescan.recurrent.loops.cuda.layout import layout_of

    most_units = {}
    for kind, blocks in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            held = []
            for units in range(1, 600):
                layout = layout_of(blocks, units, dtype)
                held += [units] * layout.is_held
                assert layout.rounds * (layout.threads // layout.lanes) >= units
                assert layout.vectors * layout.lanes * (16 // dtype.itemsize) >= units
            assert held == list(range(1, len(held) + 1))
            most_units[kind, dtype.name] = len(held)
    assert most_units == {
        ("RNN", "float32"): 176,
        ("GRU", "float32"): 88,
        ("LSTM", "float32"): 88,
        ("RNN", "float64"): 96,
        ("GRU", "float64"): 64,
        ("LSTM", "float64"): 48,
    }

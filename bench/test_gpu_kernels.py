"""Kernels that are made ahead for a GPU: which, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fresh_python import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

# Processes are forked, which takes an interpreter without threads.
BUILD = """
    from pathlib import Path
    import numpy as np
    from bench import gpu_kernels
    from sparsescan.arrays.cuda import cuda
    from sparsescan.kernels.cuda.checks import check_kernel

    checks = [check_kernel(np.dtype(name)) for name in ("i4", "i8")]
    wanted = [gpu_kernels.Kernel(check, 6) for check in (*checks, checks[0])]
    if WRONG:
        wanted.append(gpu_kernels.Kernel(cuda.jit(lambda address: address + "1"), 1))
    print(gpu_kernels.build(wanted, Path("kernels"), (9, 0), 2))
"""
LISTED = """
    from collections import Counter
    from bench import gpu_kernels
    kernels = [*gpu_kernels.forms(), *gpu_kernels.launched()]
    files = {gpu_kernels.file_name(*kernel, (9, 0)) for kernel in kernels}
    for name, count in sorted(Counter(file.split("-")[0] for file in files).items()):
        print(name, count)
"""


@pytest.mark.slow
def test_a_folder_gets_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for built, wrong in ((2, False), (1, False), (0, True)):
        said, code = run_python(BUILD.replace("WRONG", str(wrong)), tmp_path).splitlines()
        assert said.startswith(f"{built + wrong} kernels for 9.0 compiled in ")
        assert f", {wrong:d} failed; 2 of {2 + wrong} are in kernels, 0.0" in said
        assert code == str(int(wrong))
        files = sorted((tmp_path / "kernels").iterdir())
        assert [path.name.split("-")[0] for path in files] == ["check_indices"] * 2
        if built == 2:  # one is torn
            files[0].write_bytes(files[0].read_bytes()[:-1])


@pytest.mark.slow
def test_every_family_of_kernels_is_made_ahead(tmp_path: Path) -> None:
    listed = dict(line.split() for line in run_python(LISTED, tmp_path).splitlines())
    assert set(listed) == {
        *("multiply", "carry", "sweep", "repair", "chained"),
        *("vectors", "level", "rescale", "sweep_steps", "check_indices"),
        *("run", "back_sequence"),
    }
    # Samples and units of other networks than those of the races have kernels of their own.
    assert int(listed["run"]) == int(listed["back_sequence"]) >= 8

"""What other systems and processors have, by stand-ins: paths, caches, threads and memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_python import run_python

from sparsescan.arrays import arrays
from sparsescan.cli import main as command_line
from sparsescan.execution import threads
from sparsescan.kernels import compile as compiling
from sparsescan.plan.costs import constants
from sparsescan.strategies import machine


@pytest.mark.parametrize(
    ("system", "variables", "below"),
    [
        ("linux", {}, ".cache"),
        ("linux", {"XDG_CACHE_HOME": "{home}/mine"}, "mine"),
        ("darwin", {"XDG_CACHE_HOME": "{home}/mine"}, "Library/Caches"),
        ("win32", {}, "AppData/Local"),
        ("win32", {"LOCALAPPDATA": "{home}/local"}, "local"),
    ],
)
def test_constants_are_kept_where_a_system_keeps_caches(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    system: str,
    variables: dict[str, str],
    below: str,
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path))
    path = constants.machine_file()
    assert path == tmp_path / below / "sparsescan" / "machine.json"
    assert constants.file_to_write(path) == path
    assert path.parent.is_dir()


def test_where_cores_cannot_be_asked_for_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS and Windows have none
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert threads.usable_cores() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert threads.usable_cores() == {0}


def absent(name: str) -> int:
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("has_sysconf", [True, False], ids=["macOS", "Windows"])
def test_without_proc_there_is_memory(monkeypatch: pytest.MonkeyPatch, has_sysconf: bool) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    if has_sysconf:
        monkeypatch.setattr(os, "sysconf", absent)
    else:
        monkeypatch.delattr(os, "sysconf", raising=False)
    assert arrays.memory_left() == sys.maxsize
    assert machine._memory() == machine._MEMORY


def test_without_proc_a_processor_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(path: str, **options: Any) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(command_line, "open", no_file, raising=False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert command_line._cpu_name() == "arm64"


def test_a_cache_without_locks_keeps_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling, "fcntl", None)  # as on Windows
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def double(x: Any) -> Any:
        return 2 * x

    for _ in range(2):
        assert compiling.njit(double, cache=True)(21) == 42
    assert [path.suffix for path in tmp_path.rglob("*.nb?")].count(".nbi") == 1
    assert not list(tmp_path.rglob("*.lock"))


def test_memory_is_kept_by_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from sparsescan.torch.calibrate import keep_memory

    def refuse(name: Any) -> Any:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")  # Windows

    for library in (refuse, lambda name: object()):  # macOS
        monkeypatch.setattr(ctypes, "CDLL", library)
        keep_memory()


def test_without_maps_pytorchs_threads_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from sparsescan.torch.calls import team

    def no_file(path: Path, *args: Any, **options: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_file)
    assert team._openmp() is None


@pytest.mark.slow
def test_another_processor_and_system(tmp_path: Path) -> None:
    """A processor whose mode for subnormal numbers is not known, and a system that is not POSIX."""
    program = """
        import os, platform
        platform.machine = lambda: "riscv64"
        import numpy as np
        from sparsescan.kernels.cpu import flushing
        name, os.name = os.name, "nt"
        from sparsescan.kernels.cpu import memory
        os.name = name
        import sparsescan
        assert flushing.mode() == 0
        flushing.flush()
        jacobians = np.full((5, 3, 3), 1e-3)
        grads = sparsescan.exclusive_scan(np.ones(3), jacobians)
        print(grads.shape, grads[-1])
    """
    printed = run_python(program, tmp_path, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_NUM_THREADS="2")
    expected = np.ones(3) @ np.linalg.matrix_power(np.full((3, 3), 1e-3), 4)
    assert printed.split(") ", 1)[1].strip() == str(expected)


def test_packages_that_are_missing_are_named_with_what_to_install(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules.update(dict.fromkeys(("torch", "jax", "mpi4py", "tqdm")))
        import numpy as np, sparsescan, sparsescan.parallel, sparsescan.simulate

        def bar():
            sim = sparsescan.simulate.TimeSteps(lambda u, t, p: -u, np.eye(2))
            sim.forward(np.ones(2), steps=2, dt=0.1, progress=True)

        def ranks():
            sparsescan.parallel.exclusive_scan(None, np.ones(2), [np.eye(2)])

        def front(name):
            return lambda: __import__(f"sparsescan.{name}")

        for call in (front("torch"), front("jax"), ranks, bar):
            try:
                call()
            except ImportError as error:
                print(error)
    """
    torch, jax, mpi, tqdm = run_python(code, tmp_path).splitlines()
    assert torch.startswith("sparsescan.torch needs PyTorch")
    assert torch.endswith(": pip install torch")
    assert jax.startswith("sparsescan.jax needs JAX")
    assert jax.endswith(": pip install jax")
    assert mpi.startswith("comm needs mpi4py and an MPI library")
    assert mpi.endswith(": pip install 'sparsescan[mpi]'")
    assert tqdm.startswith("a bar needs tqdm")
    assert tqdm.endswith(": pip install 'sparsescan[demo]', or tqdm alone")


@pytest.mark.slow
def test_pytorchs_compiler_is_imported_by_who_compiles(tmp_path: Path) -> None:
    """It takes as long as all of sparsescan."""
    run_python("import sys, sparsescan.torch\nassert 'torch._dynamo' not in sys.modules", tmp_path)

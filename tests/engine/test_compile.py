"""Compiled code on disk: whatever becomes of Numba's files, results are right."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
from fresh_python import run_python

import sparsescan
from sparsescan.jacobians.kernels import values
from sparsescan.kernels import compile as compiling
from sparsescan.recurrent.loops import values as recurrent

CALLS = """
    from sparsescan.jacobians import ReLU
    from sparsescan.symbolic.pattern import Pattern, product
    lower = Pattern([0, 1, 3, 4], [0, 0, 1, 2], (3, 3))
    print(product(lower, lower).indices, ReLU(input_shape=(3,)).values([-1.0, 0.0, 2.0]))
"""


def run(folder: Path) -> tuple[str, int]:
    """Return what a fresh interpreter prints, and how many files in the folder it has written."""
    before = {path: path.stat().st_mtime_ns for path in files(folder)}
    printed = run_python(CALLS, folder, NUMBA_CACHE_DIR=str(folder))
    after = {path: path.stat().st_mtime_ns for path in files(folder)}
    return printed, sum(before.get(path) != time for path, time in after.items())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.nb?") if path.suffix in (".nbi", ".nbc"))


def flipped(content: bytes) -> bytes:
    """With one bit changed, in the middle, where there is machine code."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


def test_helpers_are_part_of_what_calls_them_and_nothing_else() -> None:
    @compiling.njit
    def quotient(a, b):
        return a // b

    @compiling.njit
    def twice(a, b):
        return 2 * quotient(a, b)

    kernel = numba.njit(lambda a, b: twice(a, b) + quotient(a, b))
    for a, b in ((7, 2), (7.5, 2), (-7, 2.0)):
        assert kernel(a, b) == 3 * (a // b)
    # An error of a helper passes through those that call it.
    with pytest.raises(ZeroDivisionError):
        kernel(7, 0)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^twice can be called by compiled functions only$"):
            twice(7, 2)


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: b"",
    lambda content: b"garbage",
    lambda content: content[: len(content) // 2],
    lambda content: content[:-1],
    lambda content: content + b"\0",
    lambda content: content[:-16],  # as Numba itself writes it
    flipped,
]


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_anew(tmp_path):
    printed, written = run(tmp_path)
    paths = files(tmp_path)
    assert written == len(paths) > 4
    assert run(tmp_path) == (printed, 0)
    for k, path in enumerate(paths):
        path.write_bytes(DAMAGES[k % len(DAMAGES)](path.read_bytes()))
    again, written = run(tmp_path)
    assert again == printed
    assert written > 4
    assert run(tmp_path) == (printed, 0)


@pytest.fixture
def cache(tmp_path):
    """Return the files of one function, with something in them."""
    files_of_one = compiling._CheckedFiles(str(tmp_path), "function", source_stamp=(1, 2))
    files_of_one.save("key", {"code": b"x" * 1000})
    return files_of_one


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damaged_file_is_read(cache, tmp_path, suffix, damage):
    (path,) = tmp_path.glob(f"*{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("key") is None
    cache.save("key", {"code": b"y"})
    assert cache.load("key") == {"code": b"y"}


def test_other_versions_of_the_source_are_not_read(cache, tmp_path):
    later = compiling._CheckedFiles(str(tmp_path), "function", source_stamp=(1, 3))
    assert later.load("key") is None


@pytest.mark.parametrize("changed", ["engine/cpu/called.py", "layers/kernel.py"])
def test_a_kernel_is_compiled_anew_when_one_that_it_may_call_has_changed(
    tmp_path, monkeypatch, changed
):
    engine, layers = tmp_path / "engine", tmp_path / "layers"
    for path in (engine / "cpu" / "called.py", layers / "kernel.py"):
        path.parent.mkdir(parents=True)
        path.write_text("before")
    monkeypatch.setattr(compiling, "_ENGINE", engine)

    def stamps():
        compiling._source_stamp.cache_clear()
        return [compiling._source_stamp(folder) for folder in (engine / "cpu", layers)]

    before = stamps()
    assert stamps() == before
    (tmp_path / changed).write_text("another length")
    # The engine's kernels call none of the layers'.
    differ = [old != new for old, new in zip(before, stamps(), strict=True)]
    assert differ == [changed.startswith("engine"), True]
    compiling._source_stamp.cache_clear()


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    function = values.relu.py_func
    relu = compiling.njit(cache=True, nogil=True)(function)
    monkeypatch.setattr(relu._cache._impl.locator, "ensure_cache_path", refuse)
    monkeypatch.setattr(relu._cache._cache_file, "_index_path", str(tmp_path / "no" / "index.nbi"))
    out = np.empty(3)
    relu(np.array([-1.0, 0.0, 2.0]), out)
    assert out.tolist() == [0, 0, 1]


def refuse() -> None:
    raise PermissionError("read-only")


TOGETHER = """
    import sys, time
    from pathlib import Path
    import numpy as np
    from sparsescan.jacobians.kernels.values import relu

    folder, number, count = Path.cwd(), int(sys.argv[1]), int(sys.argv[2])
    (folder / f"{number}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.001)
    x = np.array([-1.0, 0.0, 2.0], ["f4", "f8"][number % 2])
    relu(x, out := np.full_like(x, np.nan))
    assert out.tolist() == [0, 0, 1]
    print(sum(relu.stats.cache_misses.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(compiling.fcntl is None, reason="files cannot be locked here")
def test_processes_that_start_together_compile_a_function_once_for_each_type(tmp_path):
    """None of them finds the others' code missing, nor code for other types in its place."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TOGETHER))
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def start(number):
        command = [sys.executable, "-W", "error", script, str(number), "4"]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )

    together = [start(number) for number in range(4)]
    missed = [int(process.communicate()[0]) for process in together]
    assert sum(missed[::2]) == sum(missed[1::2]) == 1
    later = [start(number) for number in (4, 5)]
    assert [int(process.communicate()[0]) for process in later] == [0, 0]


def test_without_a_folder_kernels_are_kept_in_memory_and_one_warning_says_so(monkeypatch):
    monkeypatch.setattr(compiling._Places, "_locator_classes", [])
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/folder")
    compiling._warn_of_memory.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR, '/dev/null/folder', nor") as warned:
        kernels = [compiling.njit(lambda x, n=n: x + n, cache=True) for n in range(3)]
    assert [kernel(1) for kernel in kernels] == [1, 2, 3]
    assert len(warned) == 1
    assert kernels[0].stats.cache_path is None


def test_errors_in_the_settings_of_numba_s_cache_are_not_hidden(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "Nothing", raising=False)
    with pytest.raises(RuntimeError, match="Nothing"):
        compiling.njit(lambda x: x, cache=True)


@pytest.mark.parametrize("home", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "cache"}])
def test_without_a_home_no_folder_is_made_in_the_current_one(monkeypatch, tmp_path, home):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    found = compiling._HomeFolder.from_function(values.relu.py_func, values.__file__)
    assert found is None
    assert not list(tmp_path.iterdir())


def test_every_kernel_that_is_kept_is_checked():
    for kernel in (values.relu, recurrent.fill_blocks):
        assert isinstance(kernel._cache, compiling._Cache)
    package = Path(sparsescan.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "compiling.py":
            text = path.read_text()
            imports = [line for line in text.splitlines() if line.startswith("from numba import")]
            assert not any("njit" in line for line in imports), f"{path}: import kernels.compile"

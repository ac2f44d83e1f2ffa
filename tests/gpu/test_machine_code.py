"""Machine code of CUDA kernels: kept, built ahead, loaded, and launched by a stand-in for CuPy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import float32

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import fake_cupy  # noqa: E402
import ptx.stand_in  # noqa: E402
from cubin import resources_of  # noqa: E402
from fresh_python import run_python  # noqa: E402
from ptx import lower_kernel  # noqa: E402
from test_compile_kernels import find_ptxas  # noqa: E402

from sparsescan.arrays import cuda as door  # noqa: E402
from sparsescan.arrays.cuda import MachineCode, assemble, compile_to_ptx  # noqa: E402
from sparsescan.kernels.compile import with_checksum  # noqa: E402
from sparsescan.kernels.cuda import checks, device, machine_code  # noqa: E402
from sparsescan.kernels.cuda.chained import chained_kernel  # noqa: E402
from sparsescan.kernels.cuda.checks import check_kernel  # noqa: E402
from sparsescan.kernels.cuda.chunks import chunk_kernels  # noqa: E402
from sparsescan.kernels.cuda.levels import level_kernels  # noqa: E402

CAPABILITY = 9, 0
KERNEL, COUNT = check_kernel(np.dtype(np.int32)), 6
NUMBA = SimpleNamespace(compute_capability=CAPABILITY)
GET_DEVICE = "numba.cuda.dispatcher.get_current_device"


@pytest.fixture(scope="module")
def code() -> MachineCode:
    """Return the machine code of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GET_DEVICE, lambda: NUMBA)
        return assemble(compile_to_ptx(KERNEL, COUNT, CAPABILITY))


class Numba:
    """The compiler, which gives what it has compiled before, and counts how often it is asked."""

    def __init__(self, code: MachineCode) -> None:
        self.code, self.calls = code, 0
        self.fails = False

    def __call__(self, kernel: Any, count: int, capability: tuple[int, int]) -> str:
        assert (kernel, count, capability) == (KERNEL, COUNT, CAPABILITY)
        self.calls += 1
        if self.fails:
            raise RuntimeError("nothing to compile with")
        return "its PTX"


@pytest.fixture
def numba(code: MachineCode, monkeypatch: pytest.MonkeyPatch) -> Numba:
    compiler = Numba(code)
    monkeypatch.setattr(machine_code, "compile_to_ptx", compiler)
    monkeypatch.setattr(machine_code, "assemble", {"its PTX": code}.__getitem__)
    return compiler


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return the stand-in, on which launches run the kernel as PTX; nothing is kept at first."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(machine_code, "cache_folder", lambda function: kept)
    for module in (checks, door):
        monkeypatch.setattr(module, "current", lambda number: nullcontext())
    monkeypatch.delenv(machine_code.FOLDER, raising=False)

    def run(name: str, blocks: int, threads: int, *arguments: int) -> None:
        ptx.stand_in.launch(KERNEL, blocks, threads, *arguments)

    monkeypatch.setattr(fake_cupy.Function, "run", staticmethod(run))
    cupy = fake_cupy.install(monkeypatch)
    machine_code.forget()
    yield cupy
    machine_code.forget()


def check(cupy: Any) -> None:
    """Launch the kernel, twice."""
    indptr, indices = (cupy.asarray(np.array(a, np.int32)) for a in ([0, 1, 2], [0, 1]))
    assert checks.is_safe(indptr, indices, 2)
    assert not checks.is_safe(indptr, indices, 1)


def origins() -> dict[str, int]:
    return dict(machine_code.origins().counts)


def test_devices_get_the_ptx_that_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(text: str) -> str:
        """Return a text with names of functions and of shared arrays that are always the same."""
        names = dict.fromkeys(re.findall(r"\b_Z[\w$]+|\b_cudapy_smem_\d+", text))
        for number, name in enumerate(names):
            text = re.sub(rf"{re.escape(name)}\b", f"name {number}", text)
        return text

    monkeypatch.setattr(GET_DEVICE, lambda: NUMBA)
    kernel, count = chunk_kernels(3, 9, np.dtype(np.float32)).carry, 8
    tested = lower_kernel(kernel, count).ptx("9.0a")
    assert renamed(compile_to_ptx(kernel, count, CAPABILITY)) == renamed(tested)


def test_what_ptxas_says_is_of_what_devices_get(
    code: MachineCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GET_DEVICE, lambda: NUMBA)
    source, made = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(compile_to_ptx(KERNEL, COUNT, CAPABILITY))
    command = [find_ptxas(), "-arch=sm_90a", "-v", source, "-o", made]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (taken,) = resources_of(code.cubin).values()
    assert re.findall(r"Used (\d+) registers", said) == [str(taken.registers)]
    assert [taken] == [*resources_of(made.read_bytes()).values()]
    with pytest.raises(RuntimeError, match="ptxas ended with"):
        assemble(source.read_text().replace("ret;", "return;"))


def test_a_kernel_is_compiled_once_and_kept(cupy: Any, numba: Numba) -> None:
    check(cupy)
    check(cupy)
    assert (origins(), numba.calls) == ({"compiled": 1}, 1)
    machine_code.forget()
    check(cupy)
    assert (origins(), numba.calls) == ({"kept": 1}, 1)
    assert machine_code.origins().errors == []


def test_launches_are_on_the_stream_that_is_named(
    cupy: Any, numba: Numba, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fake_cupy, "_logs", [log])
    monkeypatch.setattr(fake_cupy.Function, "run", staticmethod(lambda *of: ran.append(of)))
    arguments = *range(COUNT - 1), np.int32(7)
    device.launch(KERNEL, 0, 32, 0, *arguments)  # no blocks, no launch
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for handle in (stream.ptr, 0, 0x2000):
            device.launch(KERNEL, np.int64(2), np.int32(32), handle, *arguments)
    assert [launch.stream for launch in log] == [stream.ptr, 0, 0x2000]
    assert ran == [(numba.code.name, 2, 32, *range(COUNT - 1), 7)] * 3


def test_kernels_that_were_built_ahead_are_loaded_whatever_made_them(
    cupy: Any, numba: Numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ahead"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(machine_code, "compilers", lambda: "others")
        machine_code.save(KERNEL, COUNT, CAPABILITY, folder, numba.code)
    monkeypatch.setenv(machine_code.FOLDER, str(folder))
    numba.fails = True
    check(cupy)
    assert (origins(), numba.calls) == ({"built ahead": 1}, 0)
    # In the cache they would be those of an earlier version of the compilers.
    assert machine_code.read(KERNEL, COUNT, CAPABILITY, folder) is None
    assert machine_code.read(KERNEL, COUNT, CAPABILITY, folder, any_compilers=True) == numba.code


@pytest.mark.parametrize(("words", "asked"), [(12_288, 0), (12_289, 49_156), (58_112, 232_448)])
def test_a_launch_asks_for_shared_memory_beyond_48_kib(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, asked: int
) -> None:
    """All that a kernel declares has to fit 48 KiB: a driver would load no other."""

    @door.cuda.jit
    def kernel(address):  # type: ignore[no-untyped-def]
        pool = door.cuda.shared.array(words, float32, alignment=16)
        thread = door.cuda.threadIdx.x
        pool[thread * 96 % words] = device.load(address, thread, np.float32(0))
        door.cuda.syncthreads()
        device.store(address, thread, pool[thread * 33 % words], np.float32(0))

    monkeypatch.setattr(GET_DEVICE, lambda: NUMBA)
    monkeypatch.setattr(fake_cupy.Function, "run", staticmethod(lambda *of: None))
    device.launch(kernel, 1, 128, 0, 7)
    assert fake_cupy.Function.asked == asked
    (file,) = (tmp_path / "kept").iterdir()
    (taken,) = resources_of(file.read_bytes()).values()
    # The system has a KiB of it.
    assert taken.shared <= (1024 if asked else 1024 + 4 * words)
    machine_code.forget()
    device.launch(kernel, 1, 128, 0, 7)
    assert (fake_cupy.Function.asked, origins()) == (asked, {"kept": 1})


def test_a_file_is_machine_code_that_tools_read(numba: Numba, tmp_path: Path) -> None:
    path = machine_code.save(KERNEL, COUNT, CAPABILITY, tmp_path, numba.code)
    ((name, taken),) = resources_of(path.read_bytes()).items()
    assert name == numba.code.name
    assert "check_indices" in name
    assert taken.frame == 0
    assert 0 < taken.registers <= 64
    assert [*tmp_path.glob("*.cubin")] == [path]


def test_kernels_that_run_as_ptx_can_be_built_for_a_device(
    cupy: Any, numba: Numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "built"
    monkeypatch.setenv(ptx.stand_in.BUILD, str(folder))
    ptx.stand_in.install(monkeypatch)
    check(cupy)
    built = machine_code.read(KERNEL, COUNT, CAPABILITY, folder)
    assert built is not None
    taken = [[*resources_of(code.cubin).values()] for code in (built, numba.code)]
    assert taken[0] == taken[1]
    assert (origins(), numba.calls) == ({}, 0)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "text": lambda content: b"a line\n" * 100,
    "cut": lambda content: content[: len(content) // 2],
    "a byte less": lambda content: content[:-1],
    "a bit": lambda content: content[:100] + bytes([content[100] ^ 16]) + content[101:],
    "nothing behind the code": lambda content: with_checksum(content[:200]),
    "no table": lambda content: with_checksum(content[:200] + b"[1, 2]\x06\0\0\0"),
    "no checksum": lambda content: content[:-16],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_compiled_anew(
    cupy: Any, numba: Numba, tmp_path: Path, damage: str
) -> None:
    check(cupy)
    (path,) = (tmp_path / "kept").iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    machine_code.forget()
    check(cupy)
    assert (origins(), numba.calls) == ({"compiled": 1}, 2)
    assert path.read_bytes() == whole


def test_other_kernels_sources_and_compilers_do_not_count(
    numba: Numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine_code.save(KERNEL, COUNT, CAPABILITY, tmp_path, numba.code)
    assert machine_code.read(KERNEL, COUNT, CAPABILITY, tmp_path) == numba.code
    other = check_kernel(np.dtype(np.int64))
    renamed = tmp_path / machine_code.file_name(other, COUNT, CAPABILITY)
    renamed.write_bytes(path.read_bytes())
    assert machine_code.read(other, COUNT, CAPABILITY, tmp_path) is None
    for name in ("compilers", "_sources"):
        with monkeypatch.context() as patch:
            patch.setattr(machine_code, name, lambda *of: "another")
            assert machine_code.read(KERNEL, COUNT, CAPABILITY, tmp_path) is None
    assert machine_code.read(KERNEL, COUNT, CAPABILITY, tmp_path) == numba.code


def test_a_source_that_changes_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the package's kernels, and of those in the folder of a kernel."""
    root, own = tmp_path / "package", tmp_path / "own"
    files = root / "kernels" / "cpu" / "tables.py", root / "kernels" / "here.py", own / "kernel.py"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1")
    monkeypatch.setattr(machine_code, "_ROOT", root)
    seen = set()
    for file in (None, *files):
        if file is not None:
            file.write_text("x = 2")
        machine_code._sources.cache_clear()
        seen.add(machine_code._sources(own))
    assert len(seen) == 4


def test_code_that_a_driver_refuses_is_compiled_there(
    cupy: Any, numba: Numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = MachineCode(b"for another driver", numba.code.name)
    machine_code.save(KERNEL, COUNT, CAPABILITY, tmp_path, refused)
    monkeypatch.setenv(machine_code.FOLDER, str(tmp_path))
    check(cupy)
    assert (origins(), numba.calls) == ({"compiled": 1}, 1)
    assert machine_code.origins().errors == ["CUDADriverError: CUDA_ERROR_INVALID_IMAGE"]


def test_code_that_fails_to_load_once_is_loaded_later(
    cupy: Any, numba: Numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it: no other compiler has a kernel for the rest of the process."""
    machine_code.save(KERNEL, COUNT, CAPABILITY, tmp_path, numba.code)
    monkeypatch.setenv(machine_code.FOLDER, str(tmp_path))
    load = fake_cupy.Module.load

    def fail(module: Any, cubin: bytes) -> None:
        raise fake_cupy.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    monkeypatch.setattr(fake_cupy.Module, "load", fail)
    assert machine_code.load(KERNEL, COUNT) is None
    assert (origins(), numba.calls) == ({"to Numba": 1}, 0)
    assert "OUT_OF_MEMORY" in machine_code.origins().errors[0]
    monkeypatch.setattr(fake_cupy.Module, "load", load)
    check(cupy)
    assert (origins(), numba.calls) == ({"to Numba": 1, "built ahead": 1}, 0)


COMPILED = """
    from types import SimpleNamespace
    from unittest import mock
    import numpy as np
    import sparsescan  # and all else that asks NumPy for it
    vars(np).pop("row_stack", None)
    from sparsescan.arrays.cuda import compile_to_ptx
    from sparsescan.kernels.cuda.checks import check_kernel
    assert not hasattr(np, "row_stack")
    device = SimpleNamespace(compute_capability=(9, 0))
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        print(".entry" in compile_to_ptx(check_kernel(np.dtype(np.int32)), 6, (9, 0)))
"""


def test_kernels_are_compiled_with_a_numpy_that_numba_cuda_does_not_know(tmp_path: Path) -> None:
    """NumPy 2.5 has no `row_stack`, for which numba-cuda asks."""
    assert run_python(COMPILED, tmp_path).strip() == "True"


def test_ptxas_is_found_where_the_finder_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before version 1.8.1 of cuda-pathfinder, which raises an error of its own."""

    def unknown(name: str) -> None:
        raise LookupError(name)

    pathfinder = ModuleType("cuda.pathfinder")
    for finder in (unknown, lambda name: None, None):
        pathfinder.find_nvidia_binary_utility = finder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder and pathfinder)
        for variable, folder in (("PATH", "."), ("CUDA_HOME", "bin"), ("CUDA_PATH", "bin")):
            place = tmp_path / variable
            (place / folder).mkdir(parents=True, exist_ok=True)
            program = place / folder / "ptxas"
            program.touch(0o755)
            with monkeypatch.context() as patch:
                for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
                    patch.setenv(name, str(place) if name == variable else "")
                door._ptxas.cache_clear()
                assert Path(door._ptxas()) == program
    door._ptxas.cache_clear()


def test_kernels_are_not_kept_where_no_ptxas_is_found(
    cupy: Any, numba: Numba, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise RuntimeError("there is no ptxas")

    check(cupy)
    monkeypatch.setattr(machine_code, "compilers", missing)
    machine_code.forget()
    check(cupy)
    assert (origins(), numba.calls) == ({"compiled": 1}, 2)


def test_a_full_disk_costs_time_only(
    cupy: Any, numba: Numba, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(machine_code, "save", full)
    check(cupy)
    assert origins() == {"compiled": 1}


def test_without_a_folder_kernels_are_compiled(
    cupy: Any, numba: Numba, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "cache_folder", lambda function: None)
    check(cupy)
    assert origins() == {"compiled": 1}


@pytest.mark.parametrize("what", ["compiler", "closure"])
def test_where_this_fails_numba_launches(
    cupy: Any, numba: Numba, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    launched: list[Any] = []
    kernel = KERNEL
    if what == "closure":
        strange = object()
        kernel = door.cuda.jit(lambda address: strange)
    else:
        numba.fails = True
    fake = SimpleNamespace(external_stream=lambda handle: handle)
    monkeypatch.setattr(device, "cuda", fake)
    monkeypatch.setattr(
        type(kernel), "__getitem__", lambda self, given: lambda *of: launched.append((given, of))
    )
    device._stream.cache_clear()
    for _ in range(2):
        device.launch(kernel, 3, 32, 0x30, *range(COUNT))
    device._stream.cache_clear()
    assert launched == [((3, 32, 0x30), (*range(COUNT),))] * 2
    assert origins() == {"to Numba": 1}
    (error,) = machine_code.origins().errors
    assert error in (
        "RuntimeError: nothing to compile with",
        "TypeError: a kernel closes over object, which has no name of its own",
    )
    assert error.startswith("RuntimeError") == numba.fails


def kernels() -> Iterator[tuple[Any, int]]:
    """Yield kernels that differ in what they are made with."""
    floats = np.dtype(np.float32), np.dtype(np.float64)
    for dtype in floats:
        for size in (20, 21):
            chunks = chunk_kernels(size, size * size, dtype)
            yield from ((kernel, 8) for kernel in (chunks.multiply, chunks.sweep, chunks.repair))
            yield chained_kernel(size, dtype), 8
        for index in (np.dtype(np.int32), np.dtype(np.int64)):
            yield from ((kernel, 5) for kernel in level_kernels(dtype, index)[:4])
    yield chunk_kernels(20, 58, floats[0]).multiply, 8
    yield chunk_kernels(20, 400, floats[0], terms=4).multiply, 8
    yield KERNEL, COUNT


def names() -> list[str]:
    return [machine_code.file_name(*each, CAPABILITY) for each in kernels()]


def test_names_tell_kernels_apart_and_are_those_of_every_process(tmp_path: Path) -> None:
    here = names()
    assert len(set(here)) == len(here)
    assert machine_code.file_name(KERNEL, COUNT, (8, 0)) not in here
    assert machine_code.file_name(KERNEL, COUNT + 1, CAPABILITY) not in here
    print_names = "import json, test_machine_code; print(json.dumps(test_machine_code.names()))"
    folder = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {folder!r}); {print_names}"
    for seed in ("1", "2"):
        assert json.loads(run_python(script, tmp_path, PYTHONHASHSEED=seed)) == here


def test_a_kernel_is_known_by_what_it_calls() -> None:
    """Also where only a function that it closes over was made with something else."""

    def made(number: Any) -> Any:
        @door.cuda.jit(device=True)
        def inner(address):  # type: ignore[no-untyped-def]
            return address + number

        @door.cuda.jit
        def outer(address):  # type: ignore[no-untyped-def]
            inner(address)

        return outer

    numbers = 1, 2, 1.0, True, np.int32(1), np.int64(1), np.float32(1), None, (1,), (1, 2), "1"
    found = [machine_code.file_name(made(number), 1, CAPABILITY) for number in numbers]
    assert len(set(found)) == len(numbers)
    assert found == [machine_code.file_name(made(number), 1, CAPABILITY) for number in numbers]

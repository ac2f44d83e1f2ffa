"""``python -m bench.gpu_kernels FOLDER``: machine code of kernels, made ahead, without a GPU.

A GPU that is lent for minutes would spend them on compiling. With ``SPARSESCAN_KERNELS=FOLDER`` it
loads kernels that were made here, on all cores: those of the races on a GPU, of the cases that
families are checked by, and of those that compute-sanitizer runs. Others are compiled there when
they are launched. Those of tests are written to a folder, too, when these run on the CPU, as
``SPARSESCAN_PTX=1 SPARSESCAN_BUILD_KERNELS=FOLDER pytest tests/gpu/cuda_*.py``.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from sparsescan.arrays.cuda import assemble, compile_to_ptx
from sparsescan.kernels.cuda.checks import check_kernel
from sparsescan.kernels.cuda.chunks import ChunkKernels, chunk_kernels, takes
from sparsescan.kernels.cuda.levels import level_kernels
from sparsescan.kernels.cuda.machine_code import file_name, read, save
from sparsescan.recurrent import GRUCell, LSTMCell, RNNCell
from sparsescan.recurrent.loops.cuda.kernels import sequence_kernels
from sparsescan.recurrent.loops.cuda.layout import layout_of, samples_of
from sparsescan.recurrent.render.cuda import cuda_program

from .gpu_chains import SIZES, family_cases, sanitizer_cases
from .gpu_races import HIDDEN, NETWORKS
from .gpu_rehearsal import stand_in

_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
_INDICES = np.dtype(np.int32), np.dtype(np.int64)
# Rows of slopes of a unit, and unknowns, by kind of cell.
_CELLS = (1, 1), (4, 1), (5, 2)
# Multiprocessors of an H100, or an H200: blocks of fewer samples fill more of them.
_MULTIPROCESSORS = 132

Capability = tuple[int, int]


class Kernel(NamedTuple):
    """A kernel, and how many int64 it takes."""

    kernel: Any
    count: int


class Built(NamedTuple):
    """What it took of one core to make machine code, or what was wrong."""

    seconds: float
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu_kernels", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--capability", default="9.0", help="of the GPU (default 9.0)")
    parser.add_argument("--jobs", type=int, help="processes, by default one for each core")
    options = parser.parse_args(arguments)
    major, minor = map(int, options.capability.split("."))
    wanted = [*forms(), *launched()]
    return build(wanted, options.folder, (major, minor), options.jobs)


def build(wanted: Sequence[Kernel], folder: Path, capability: Capability, jobs: int | None) -> int:
    """Make the machine code that a folder lacks, and say what it took; 1 if some could not be."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {file_name(*each, capability): each for each in wanted}
    missing = [each for each in named.values() if not _is_there(each, capability, folder)]
    jobs = max(min(jobs or len(os.sched_getaffinity(0)), len(missing)), 1)
    begin = time.perf_counter()
    gc.disable()  # collections would go through all of Numba's objects, again and again
    # Processes that are forked have the kernels, which cannot be sent.
    _missing[:] = missing
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        work = partial(_build_one, capability, folder)
        done = list(pool.imap_unordered(work, range(len(missing))))
    took = time.perf_counter() - begin
    begin = time.perf_counter()
    there = sum(_is_there(each, capability, folder) for each in named.values())
    read_in = time.perf_counter() - begin
    failed = [one.error for one in done if one.error]
    size = sum((folder / name).stat().st_size for name in named if (folder / name).exists())
    print(
        f"{len(missing)} kernels for {capability[0]}.{capability[1]} compiled in {took:.1f} s by "
        f"{jobs} processes ({sum(one.seconds for one in done):.1f} s of one core), {len(failed)} "
        f"failed; {there} of {len(named)} are in {folder}, {size / 1e6:.2f} MB, read and checked "
        f"in {1e3 * read_in:.0f} ms"
    )
    for error in failed:
        print(error, file=sys.stderr)
    return int(bool(failed))


_missing: list[Kernel] = []


def _build_one(capability: Capability, folder: Path, number: int) -> Built:
    kernel, count = _missing[number]
    begin = sum(os.times()[:4])  # with ptxas
    error = ""
    # Let Numba compile for a capability, as if it was that of the current device.
    device = SimpleNamespace(compute_capability=capability)
    try:
        with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
            code = assemble(compile_to_ptx(kernel, count, capability))
        save(kernel, count, capability, folder, code)
    except Exception as raised:
        error = f"{kernel.py_func.__qualname__}: {type(raised).__name__}: {raised}"
    return Built(sum(os.times()[:4]) - begin, error)


def _is_there(kernel: Kernel, capability: Capability, folder: Path) -> bool:
    return read(*kernel, capability, folder) is not None


# -- Which kernels --------------------------------------------------------------------------------


def forms() -> Iterator[Kernel]:
    """Yield the kernels of the races, and of chains of all sizes that dense stacks have."""
    for size, dtype in product(SIZES, _FLOATS):
        yield from _of_chunks(chunk_kernels(size, size * size, dtype))
    for (terms, states), dtype in product(_CELLS, _FLOATS):
        size = HIDDEN * states
        if takes(size, dtype, terms=terms, states=states):
            yield from _of_chunks(
                chunk_kernels(size, size * size, dtype, terms=terms, states=states)
            )
    for dtype, index_dtype in product(_FLOATS, _INDICES):
        levels = level_kernels(dtype, index_dtype)
        yield from map(_kernel, (levels.vectors, levels.level, levels.rescale, levels.sweep_steps))
    yield from map(_kernel, map(check_kernel, _INDICES))
    for cell, (units, _, batch) in product((RNNCell, GRUCell, LSTMCell), NETWORKS):
        code = cuda_program(cell(1, 1).program)
        layout = layout_of(len(code.blocks), units, _FLOATS[0])
        samples = samples_of(code, layout, _FLOATS[0], batch, 1, _MULTIPROCESSORS)
        sequence = sequence_kernels(code, layout, _FLOATS[0], samples)
        yield from map(_kernel, (sequence.run, sequence.back))


def _of_chunks(kernels: ChunkKernels) -> Iterator[Kernel]:
    every = kernels.multiply, kernels.carry, kernels.sweep, kernels.repair, kernels.chained
    return (_kernel(kernel) for kernel in every if kernel is not None)


def _kernel(kernel: Any) -> Kernel:
    return Kernel(kernel, len(inspect.signature(kernel.py_func).parameters))


def launched() -> list[Kernel]:
    """Return the kernels of the cases that families are checked by, and compute-sanitizer runs.

    They run on the stand-in for CuPy, where launches are noted, and nothing is computed.
    """
    found: dict[Kernel, None] = {}

    def note(kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        found[Kernel(kernel, len(arguments))] = None

    with (
        stand_in() as gpu,
        mock.patch("ptx.stand_in.launch", note),
        mock.patch("fake_cupy.MULTIPROCESSORS", _MULTIPROCESSORS),
    ):
        for case in (*family_cases(gpu).values(), *sanitizer_cases(gpu).values()):
            case()
    return list(found)


if __name__ == "__main__":
    sys.exit(main())

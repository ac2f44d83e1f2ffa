"""Compile every CUDA kernel, which takes no GPU, and print what ptxas says of it.

Printed too is how many divisions of 64 bits are in it, each of which is a hundred instructions; and
what its machine code takes.

``python compile_kernels.py PTXAS FOLDER 9.0a 7.5 …``, for some compute capabilities: all kernels
for the first, and some of them, the largest, for the others. From 9.0 on Numba compiles with the
suffix ``a``, for that very one. Reports are kept, as compiled kernels are, until the sources of a
kernel or the compilers change.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cubin import resources_of
from ptx import lower_kernel
from ptx.kept import keep
from some_cells import program_of

from sparsescan.arrays.cuda import most_registers, with_most_registers
from sparsescan.kernels.cuda.chained import chained_kernel
from sparsescan.kernels.cuda.chained import layout_of as layout_of_chunk
from sparsescan.kernels.cuda.checks import check_kernel
from sparsescan.kernels.cuda.chunks import chunk_kernels
from sparsescan.kernels.cuda.levels import level_kernels
from sparsescan.recurrent.loops.cuda.kernels import sequence_kernels
from sparsescan.recurrent.loops.cuda.layout import layout_of, samples_of
from sparsescan.recurrent.render.cuda import cuda_program

F4, F8, I4, I8 = (np.dtype(name) for name in ("f4", "f8", "i4", "i8"))

# Whose weights are in registers with one lane and several, and are not, in one round and several.
SEQUENCES = (
    ("GRU", 20, F4),
    ("LSTM", 88, F4),
    ("GRU", 400, F4),
    ("LSTM", 130, F8),
    ("relu", 500, F8),
    # Of several stages, with parameters of other kinds, and without matrices.
    ("MGU", 128, F4),
    ("Tied", 64, F4),
    ("SCRN", 400, F4),
    ("PeepholeLSTM", 48, F8),
    ("Leaky", 300, F4),
)


# Of the kernels of chunks and sequences, those that are compiled for every capability. These
# sequences have kernels without resets, too, which take fewer registers than those with them.
SIZES = {(64, 4096, F8)}
IMPLICIT = {(56, 5, 2, F8)}
NETWORKS = {("LSTM", 88, F4), ("LSTM", 130, F8), ("SCRN", 400, F4)}


def cases() -> Iterator[tuple[str, Any, int, bool]]:
    """Name, kernel and number of arguments, all of int64; and whether it is compiled for all."""
    for size, nnz, dtype in ((20, 400, F4), (20, 58, F4), (64, 4096, F8)):
        chunks, is_for_all = chunk_kernels(size, nnz, dtype), (size, nnz, dtype) in SIZES
        for name in ("multiply", "carry", "sweep", "repair"):
            if name == "carry" and nnz == 58:
                continue  # the same as for dense steps
            yield f"{name} {size} {nnz} {dtype}", getattr(chunks, name), 8, is_for_all
    # Implicit steps: those of a GRU, and the largest of an RNN and of an LSTM.
    for size, terms, states, dtype in (
        *((20, 4, 1, F4), (64, 1, 1, F4)),
        *((64, 5, 2, F4), (56, 5, 2, F8), (30, 8, 2, F4)),
    ):
        chunks = chunk_kernels(size, size * size, dtype, terms=terms, states=states)
        about = f"{size} implicit, {terms} terms of {states}, {dtype}"
        is_for_all = (size, terms, states, dtype) in IMPLICIT
        for name in ("multiply", "sweep", "repair"):
            yield f"{name} {about}", getattr(chunks, name), 8, is_for_all
    # All phases in one launch: the smallest blocks of several teams for a warp, and of one.
    for size, dtype in ((20, F4), (32, F8)):
        threads = layout_of_chunk(size, dtype.itemsize).threads
        name = f"chained {size} {dtype}, {4 * threads} threads of a multiprocessor"
        yield name, chained_kernel(size, dtype), 8, dtype == F8
    for dtype, index in ((F4, I4), (F8, I8)):
        kernels = level_kernels(dtype, index)
        for name in ("vectors", "level", "rescale", "sweep_steps"):
            yield f"{name} {dtype} {index}", getattr(kernels, name), 5, dtype == F8
        yield f"check {index}", check_kernel(index), 6, dtype == F8
    # With the most samples that a block has.
    for name, units, dtype in SEQUENCES:
        code = cuda_program(program_of(name))
        layout = layout_of(len(code.blocks), units, dtype)
        samples = samples_of(code, layout, dtype, 1 << 20, 2, 1)
        is_for_all = (name, units, dtype) in NETWORKS
        for resets in (False, True) if is_for_all else (True,):
            chosen = sequence_kernels(code, layout, dtype, samples, resets)
            about = f"{name} {units} {dtype}{', resets' * resets}, {chosen.threads} threads"
            yield f"run {about} of a block", chosen.run, 16, is_for_all and resets
            yield f"back {about} of a block", chosen.back, 19, is_for_all and resets


def main(ptxas: str, folder: Path, capabilities: list[str]) -> None:
    for name, kernel, count, is_for_all in cases():
        for capability in capabilities if is_for_all else capabilities[:1]:
            make = partial(assemble, kernel, count, capability, ptxas, folder)
            about = keep(kernel, (count, capability, ptxas, Path(ptxas).stat().st_mtime_ns), make)
            print(f"KERNEL {name} for {capability}:", about, flush=True)


def assemble(kernel: Any, count: int, capability: str, ptxas: str, folder: Path) -> str:
    """Return what ptxas says of a kernel for a capability, its divisions, and what it takes."""
    ptx = lower_kernel(kernel, count).ptx(capability)
    path, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    path.write_text(ptx)
    architecture = f"-arch=sm_{capability.replace('.', '')}"
    command = [ptxas, architecture, "-v", str(path), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    threads = getattr(kernel.py_func, "block_threads", None)
    if threads is not None and int(registers) > most_registers(threads):
        # As devices get it, too.
        path.write_text(with_most_registers(ptx, most_registers(threads)))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    divisions = len(re.findall(r"\b(?:div|rem)\.[su]64\b", ptx))
    (taken,) = resources_of(cubin.read_bytes()).values()
    loaded = f"loaded: {taken.registers} registers, {taken.frame} frame, {taken.shared} shared"
    return " ".join([f"{divisions} divisions of 64 bits", *done.stderr.split("\n"), loaded])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

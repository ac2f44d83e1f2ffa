"""Every mutation of every kernel, in scans that are small: which of them are detected.

``PYTHONPATH=tests/support python -m ptx.mutation_run`` writes :data:`TABLE`, and prints a few lines
around each mutation of which no launch showed a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
from oracles import STRUCTURES, mask

import sparsescan
from sparsescan import BatchedCSR, Schedule
from sparsescan.execution import device
from sparsescan.kernels.cuda.checks import is_safe
from sparsescan.symbolic.pattern import of_mask

from . import stand_in
from .mutants import KINDS, Mutants

__all__ = ["KERNELS", "TABLE", "run", "table_of"]

TABLE = Path(__file__).parents[2] / "gpu" / "ptx_mutants.json"

KERNELS = ("check_indices", "vectors", "level", "multiply", "carry", "sweep", "repair")
F4 = np.float32


def run(monkeypatch: pytest.MonkeyPatch) -> Mutants:
    """Return what became of all mutations of :data:`KERNELS`, for float32 and int32 indices."""
    stand_in.install(monkeypatch)
    cupy = fake_cupy.install(monkeypatch)
    mutants = Mutants(monkeypatch)
    check_index_arrays(cupy)
    for grad, jacobians, local in chunked_chains():
        schedule = Schedule.chunked(len(jacobians), 4)
        for added in (local, None):
            # Inclusive, so that nothing is left to read behind the last step.
            sparsescan.inclusive_scan(
                grad, jacobians, local_grads=added, schedule=schedule, device="cuda"
            )
    # Small products are shared by blocks, or multiplied by cuBLAS, as large ones are.
    monkeypatch.setattr(device, "GRAIN", 64)
    monkeypatch.setattr(device, "BLAS_SIZE", 12)
    for grad, jacobians, local, schedule in level_chains():
        sparsescan.inclusive_scan(
            grad, jacobians, local_grads=local, schedule=schedule, device="cuda"
        )
    return mutants


def check_index_arrays(cupy: Any) -> None:
    """Good ones, and those with one fault, by one block and by several."""
    for rows, cols, many in ((3, 4, 7), (700, 5, 900)):
        rng = np.random.default_rng(rows)
        indptr = np.sort(rng.integers(0, many + 1, rows + 1)).astype(np.int32)
        indptr[0], indptr[-1] = 0, many
        indices = rng.integers(0, cols, many).astype(np.int32)
        indices[0], indices[1] = 0, cols - 1
        for array, place, value in (
            (indices, 0, 0),  # no fault
            (indices, many - 1, cols),
            (indices, 0, cols),
            (indices, 2, -1),
            (indptr, 0, 1),
            (indptr, rows, many - 1),
            (indptr, rows, many + 1),
            (indptr, 1, many + 5),
        ):
            before, array[place] = array[place], value
            is_safe(cupy.asarray(indptr), cupy.asarray(indices), cols)
            array[place] = before


def chunked_chains() -> Iterator[tuple[Any, Any, Any]]:
    """Chains of small steps: usual ones, with columns that leave the band, and one with ∞."""
    size, batch = 5, 13
    # The last chunk ends at each place of the loop over steps that are loaded ahead.
    cases = (
        (23, 1.0),
        (22, 1e9),
        (28, 1e-9),
        (24, 1.0),
        *((steps, np.inf) for steps in range(21, 25)),
    )
    for seed, (steps, scale) in enumerate(cases):
        rng = np.random.default_rng(seed)
        jacobians = rng.standard_normal((steps, batch, size, size)) / np.sqrt(size)
        grad, jacobians = rng.standard_normal((batch, size)).astype(F4), jacobians.astype(F4)
        local = list(rng.standard_normal((steps + 1, batch, size)).astype(F4))
        if np.isfinite(scale):
            # Large and small steps in turn: columns leave the band, gradients do not.
            jacobians[::2] *= F4(scale)
            jacobians[1::2] /= F4(scale)
        else:
            jacobians[5, 0, 0, 0] = scale
        # One gradient stays zero: `carry` then looks for terms that got lost.
        jacobians[:, 1, 2] = 0
        if steps == 24 and np.isfinite(scale):
            # A product has an entry which must not meet that of a step behind its chunk.
            jacobians[5, :, 0], jacobians[6, :, 0, 0] = 2.0**-79, 2.0**-60
        yield grad, jacobians, local


def level_chains() -> Iterator[tuple[Any, Any, Any, Any]]:
    """Chains of steps of all structures, of one size or several, small and large values."""
    schedules = "blelloch", "chunked:2", "blelloch", "linear"
    # In long ones a level has products with products, and vectors, out of the band.
    long = 50, 52, 64, 68
    for seed in (*range(44), *long):
        rng = np.random.default_rng(seed)
        most = (8, 14, 40, 14, 30, 120)[seed % 6]
        n, batch = 9 if seed in long else int(rng.integers(3, 8)), int(rng.integers(1, 3))
        sizes = rng.integers(1 + most // 2, most + 1, n + 1)
        sizes = np.full(n + 1, sizes[0]) if seed % 5 < 2 else sizes
        jacobians = []
        for cols, rows in pairwise(sizes.tolist()):
            structure = "sparse" if most == 120 else str(rng.choice(STRUCTURES))
            pattern = of_mask(mask(rng, structure, rows, cols))
            values = rng.standard_normal((batch, pattern.nnz)) / np.sqrt(max(cols, 1))
            if seed % 7 == 1:
                values *= 2.0 ** rng.integers(-60, 40, pattern.nnz)
            if seed % 7 == 3:
                values *= 2.0 ** rng.choice([-70, 70])
            if seed % 7 == 5:
                # In the band of both factors, out of that of their product.
                values *= 2.0 ** (28 if seed % 2 else -35)
            if seed % 14 == 9 and pattern.nnz:
                values[0, 0] = rng.choice([np.inf, np.nan, 1e-42])
            shared = rng.random() < 0.3
            values = values[:1] if shared else values
            jacobians.append(BatchedCSR.from_pattern(values.astype(F4), pattern))
            if shared:
                jacobians[-1] = jacobians[-1][0]
        grad = rng.standard_normal((batch, sizes[0])).astype(F4)
        local: Any = [rng.standard_normal((batch, size)).astype(F4) for size in sizes]
        yield grad, jacobians, local if seed % 3 else None, schedules[seed % 4]


def table_of(mutants: Mutants) -> dict[str, dict[str, dict[str, int]]]:
    """Return how many mutations there are, by kernel and kind, and what became of them."""
    return {name: mutants.kernels[name].counts() for name in KERNELS}


def main() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutants = run(monkeypatch)
    TABLE.write_text(json.dumps(table_of(mutants), indent=1) + "\n")
    for name in KERNELS:
        for kind in KINDS:
            for lines in mutants.kernels[name].lines(kind):
                print(f"{name}: {lines}\n")


if __name__ == "__main__":
    main()

"""Every mutation of every kernel, in scans that are small: which of them are detected.

``PYTHONPATH=tests/support python -m ptx.mutation_run`` writes :data:`TABLE`, and prints a few lines
around each mutation of which no launch showed a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fake_cupy
import numpy as np
import pytest
from oracles import STRUCTURES, mask
from some_cells import CELLS

import sparsescan
from sparsescan import BatchedCSR, ImplicitChain, ImplicitPattern, Pattern, Schedule
from sparsescan.execution.cuda import chunks as chunk_forms
from sparsescan.execution.cuda import shares
from sparsescan.kernels.cuda.checks import is_safe
from sparsescan.plan.choice import PlanChoice, PlanOptions
from sparsescan.plan.scan_plan import ScanPlan
from sparsescan.recurrent import GRU, LSTM, Recurrent
from sparsescan.recurrent import device as recurrent_device
from sparsescan.symbolic.pattern import of_mask

from . import stand_in
from .mutants import KINDS, Mutants

TABLE = Path(__file__).parents[2] / "gpu" / "ptx_mutants.json"

# Kernels of whole sequences, whose weights are in registers, or read in each step; and of stages.
_HELD, _READ = " of a GRU", " of an LSTM"
_STAGES, _ROWS = " of an MGU", " of cells with rows of parameters"
_SEQUENCES = _HELD, _READ, _STAGES, _ROWS
_IMPLICIT, _TWO = " of implicit steps", " of two unknowns for each unit"
KERNELS = (
    *("check_indices", "vectors", "level", "rescale", "sweep_steps"),
    *("multiply", "carry", "sweep", "repair", "chained"),
    *(name + about for about in (_IMPLICIT, _TWO) for name in ("multiply", "sweep", "repair")),
    *(name + about for about in _SEQUENCES for name in ("run", "back_sequence")),
)
F4 = np.float32
# Seeds of chains of nine steps.
_LONG = 50, 52, 64, 68


def run(monkeypatch: pytest.MonkeyPatch) -> Mutants:
    """Return what became of all mutations of :data:`KERNELS`, of few types of values."""
    stand_in.install(monkeypatch)
    cupy = fake_cupy.install(monkeypatch)
    mutants = Mutants(monkeypatch)
    check_index_arrays(cupy)
    for case in odd_products():
        case.run()
    for grad, jacobians, local in chunked_chains():
        schedule = Schedule.chunked(len(jacobians), 4)
        for added in (local, None):
            # Inclusive, so that nothing is left to read behind the last step.
            sparsescan.inclusive_scan(
                grad, jacobians, local_grads=added, schedule=schedule, device="cuda"
            )
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: False)
    for mutants.about, chains in ((_IMPLICIT, implicit_chains()), (_TWO, two_state_chains())):
        for grad, chain, local in chains:
            schedule = Schedule.chunked(len(chain), 4)
            for added in (local, None):
                sparsescan.inclusive_scan(
                    grad, chain, local_grads=added, schedule=schedule, device="cuda"
                )
    mutants.about = ""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: True)
    for grad, chain, local in chained_chains():
        schedule = Schedule.chunked(len(chain), 2)
        for added in (local, None):
            sparsescan.inclusive_scan(
                grad, chain, local_grads=added, schedule=schedule, device="cuda"
            )
    for grad, jacobians, local in swept_chains():
        sparsescan.exclusive_scan(
            grad, jacobians, local_grads=local, schedule="linear", device="cuda"
        )
    train_networks(monkeypatch, cupy, mutants)
    # Small products are shared by blocks, or multiplied by cuBLAS, as large ones are; but first
    # those that leave the band are made by one.
    for grain, size, seeds in (
        (shares.GRAIN, shares.BLAS_SIZE, [seed for seed in range(44) if seed % 7 in (1, 3, 5)]),
        # In long ones a level has products with products, and vectors, out of the band.
        (64, 12, [*range(44), *_LONG]),
    ):
        monkeypatch.setattr(shares, "GRAIN", grain)
        monkeypatch.setattr(shares, "BLAS_SIZE", size)
        for grad, jacobians, local, schedule in map(level_chain, seeds):
            sparsescan.inclusive_scan(
                grad, jacobians, local_grads=local, schedule=schedule, device="cuda"
            )
    monkeypatch.setattr(shares, "GRAIN", 1)
    for case in odd_products():
        case.run()
    return mutants


def train_networks(monkeypatch: pytest.MonkeyPatch, cupy: Any, mutants: Mutants) -> None:
    """Run networks with blocks of several samples, which have more lanes than those, or as many."""
    monkeypatch.setattr(recurrent_device, "samples_of", lambda *about: 2)
    for mutants.about, net in (
        (_HELD, GRU(2, 40, bidirectional=True, dtype=F4, rng=0)),
        (_READ, LSTM(2, 50, dtype=np.float64, rng=0)),
        (_STAGES, Recurrent(CELLS["MGU"], 2, 40, bidirectional=True, dtype=F4, rng=0)),
        (_ROWS, Recurrent(CELLS["Tied"], 2, 50, dtype=np.float64, rng=0)),
    ):
        train(cupy, net)
    mutants.about = ""


class Case(NamedTuple):
    """Steps whose gradients are made by a schedule, with some products stored densely."""

    masks: list[Any]
    values: list[Any]  # of each step, of one sample or several
    levels: list[tuple[str, Any]]
    local: list[Any] | None = None
    dense: tuple[tuple[int, int], ...] = ()

    def run(self) -> None:
        """Scan from a gradient of ones."""
        patterns = [of_mask(np.asarray(each) > 0) for each in self.masks]
        schedule = Schedule.from_levels(len(patterns), self.levels)
        choice = PlanChoice(schedule, frozenset(self.dense))
        values = [np.asarray(each, F4) for each in self.values]
        batch = max((len(each) for each in values if each.ndim == 2), default=None)
        shape = [size for size in (batch, patterns[0].shape[1]) if size is not None]
        plan = ScanPlan(patterns, choice, PlanOptions(device="cuda"))
        plan.inclusive_scan(np.ones(shape, F4), values, local_grads=self.local)


# Gradients of four steps, and of five, by the product of the second and third, or with one more.
_PAIR = [
    ("product", [[(2, 3, 4)]]),
    ("gradients", [[(0, 1, 2)]]),
    ("the others", [[(0, 2, 3)], [(0, 2, 4)]]),
]
_TRIPLE = [
    ("pair", [[(2, 3, 4)]]),
    ("triple", [[(1, 2, 4)]]),
    ("gradients", [[(0, 1, 2), (0, 2, 3)], [(0, 1, 4)]]),
    ("the last", [[(0, 4, 5)]]),
]

# One run of vectors beside a product, which makes it a launch of any operations.
_SWEEP = [
    ("beside a product", [[(0, 1, 2), (0, 2, 3)], [(3, 4, 5)]]),
    ("the others", [[(0, 3, 4)], [(0, 3, 5)]]),
]


def odd_products() -> Iterator[Case]:
    """Products that few chains have: each lets a bound or a barrier make a difference."""
    rng = np.random.default_rng(0)
    # Rows without terms, stored densely, of which a warp makes several. It begins where a sector
    # of memory does, which is elsewhere in each.
    full = rng.random((40, 6)) < 0.7
    full[rng.permutation(40)[:20]] = False
    masks = [np.eye(1101) > 0, rng.random((6, 1101)) < 0.2, full, np.eye(40) > 0]
    yield Case(masks, [rng.standard_normal(each.sum()) for each in masks], _PAIR, dense=((2, 4),))
    # Several entries of a row of a dense product for each thread.
    for left in (np.ones((4, 12)), np.eye(4, 12), np.eye(4, 12, k=-1)):
        masks = [np.eye(64), np.ones((12, 64)), left, np.eye(4)]
        yield Case(masks, [rng.standard_normal(int(each.sum())) for each in masks], _PAIR)
    # Entries of a dense product for several turns of all threads.
    masks = [np.eye(10), np.ones((10, 10)), np.ones((240, 10)), np.eye(240)]
    yield Case(masks, [rng.standard_normal(int(each.sum())) for each in masks], _PAIR)
    # The next sample is out of the band, this one is not: few entries, and more than threads.
    for step in (np.roll(np.eye(6), 1, axis=1) > 0, rng.random((20, 20)) < 0.9):
        masks = [np.eye(len(step)) > 0, step, step, np.eye(len(step)) > 0]
        for k in (1, 2):
            values = [rng.standard_normal((2, int(each.sum()))) for each in masks]
            values[k][1, 0] = 2.0**55
            yield Case(masks, values, _PAIR)
    # Entries at the ends of the band, and the least that is a normal number, once columns are
    # brought to the target, as 2^60 is. Rows of one entry each are multiplied by `left`.
    for left, right in (
        ([30, 0], [[30, 0], [-46, 0]]),
        ([30, -56], [[30, 0], [-56, 0]]),
        ([24, -31], [[None, 24], [-31, None]]),
    ):
        entry = np.array([[x is not None for x in row] for row in right])
        powers = [2.0**x for row in right for x in row if x is not None]
        turned = np.eye(2)[::-1] > 0
        masks = [np.eye(2) > 0, entry, turned, np.eye(2) > 0]
        yield Case(masks, [np.ones(2), powers, 2.0 ** np.array(left[::-1]), np.ones(2)], _PAIR)
    # A product by one that has an exponent, with fewer or more columns than threads; and rows of
    # one entry, of which the next is so much larger that beside it nothing of this one is left.
    turned = np.roll(np.eye(6), 1, axis=1) > 0
    powers = 2.0 ** np.array([-22, 30, 0, 0, 0, 0])
    for cols in (40, 300):
        masks = [rng.random((6, cols)) < 0.5, turned, turned, np.eye(6) > 0, np.eye(6) > 0]
        values = [np.ones(int(each.sum())) for each in masks]
        values[1], values[2] = np.roll(powers, 1), powers
        local = [np.zeros(6 if k else cols, F4) for k in range(6)]
        local[1] = np.roll(2.0 ** np.array([-60, 40, 0, 0, 0, 0]), 2).astype(F4)
        yield Case(masks, values, _TRIPLE, local)
    # Full rows, each of which several lanes add up.
    masks = [rng.random((6, 40)) < 0.5, np.ones((6, 6)), np.ones((6, 6)), *masks[3:]]
    values = [np.ones(int(each.sum())) for each in masks]
    values[1], values[2] = np.tile(np.roll(powers, 1), 6), np.tile(powers, 6)
    local[0] = np.zeros(40, F4)
    yield Case(masks, values, _TRIPLE, local)
    # Few entries in each row, for which there are many lanes: of a product, in the band and out of
    # it, and of vectors.
    sizes = (5, 5, 3, 4, 4)
    masks = [np.ones((rows, cols)) for cols, rows in pairwise(sizes)]
    values = [rng.standard_normal(each.size) for each in masks]
    local = [rng.standard_normal(size).astype(F4) for size in sizes]
    yield Case(masks, values, _PAIR, local)
    yield Case(masks, [values[0], values[1] * 2.0**-70, *values[2:]], _PAIR, local)
    sizes = (9, 2, 3, 1, 4, 2)
    masks = [np.ones((rows, cols)) for cols, rows in pairwise(sizes)]
    yield Case(masks, [rng.standard_normal(each.size) for each in masks], _SWEEP)


def train(cupy: Any, net: Any) -> None:
    """Run some sequences of different lengths forward and backward."""
    rng, steps, batch = np.random.default_rng(0), 11, 3
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(array))
    step = net.training_step()
    x = rng.standard_normal((steps, batch, net.input_size)).astype(array.dtype)
    state = rng.standard_normal((1 + net.bidirectional, batch, net.state_size)).astype(x.dtype)
    output, _ = step.forward(cupy.asarray(x), cupy.asarray(state), np.array([11, 4, 9]))
    carry = rng.standard_normal(state.shape).astype(x.dtype)
    step.backward(output, cupy.asarray(carry))


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


def _drawn(
    rng: np.random.Generator, pattern: ImplicitPattern, steps: int, batch: int
) -> tuple[Any, Any, list[Any]]:
    """Return slopes, a gradient and local gradients of so many steps."""
    size = pattern.shape[1]
    slopes = rng.standard_normal((steps, batch, pattern.factors[0].nnz)).astype(F4)
    grad = rng.standard_normal((batch, size)).astype(F4)
    return slopes, grad, list(rng.standard_normal((steps + 1, batch, size)).astype(F4))


def implicit_chains() -> Iterator[tuple[Any, Any, Any]]:
    """Return chains of slopes and pruned weights, as those of :func:`chunked_chains`."""
    size, batch = 5, 13
    columns = np.array([3, 0, 1, 1, 4, 2, 0, 4])
    rows = len(columns)
    kept = np.random.default_rng(0).random((size, rows)) < 0.7
    kept[:, columns == 0] = kept[:2, 4] = True
    slopes_at = Pattern(np.arange(rows + 1), columns, (rows, size))
    pattern = ImplicitPattern([slopes_at, of_mask(kept)], [1])
    # The last turn of the loop over steps that are loaded ahead ends at each place; and what is not
    # finite comes last, so that it does not reach what has no weight.
    cases: list[tuple[int, float]] = [(steps, 1.0) for steps in range(36, 2, -3)]
    cases += [(24, 1e9), (28, 1e-9), *((4 + row, np.inf) for row in range(rows))]
    for seed, (steps, scale) in enumerate(cases):
        rng = np.random.default_rng(seed)
        weights = (rng.standard_normal(pattern.factors[1].nnz) / 2).astype(F4)
        slopes, grad, local = _drawn(rng, pattern, steps, batch)
        slopes[:, 1, 2] = 0
        if np.isfinite(scale):
            slopes[::2] *= F4(scale)
            slopes[1::2] /= F4(scale)
        else:
            slopes[-1, 0, steps - 4] = scale
        yield grad, ImplicitChain([slopes, weights], pattern), local


def chained_chains() -> Iterator[tuple[Any, Any, Any]]:
    """Return chains of one slope for each unit, as those of :func:`chunked_chains`.

    Teams have several steps of a chunk, or one, or none; the last of them fewer.
    """
    size, batch = 5, 2
    columns = np.array([3, 0, 1, 4])
    rows = len(columns)
    slopes_at = Pattern(np.arange(rows + 1), columns, (rows, size))
    kept = np.random.default_rng(0).random((size, rows)) < 0.8
    # One gradient stays zero, as there.
    kept[2] = False
    pattern = ImplicitPattern([slopes_at, of_mask(kept)], [1])
    cases = [(2 * steps, 1.0) for steps in (41, 40, 39, 38, 32, 22, 7)]
    cases += [(96, 1e9), (95, 1e-9), (80, 1e-30), *((70 + row, np.inf) for row in range(rows))]
    for seed, (steps, scale) in enumerate(cases):
        rng = np.random.default_rng(seed)
        weights = (rng.standard_normal(pattern.factors[1].nnz) / 2).astype(F4)
        slopes, grad, local = _drawn(rng, pattern, steps, batch)
        slopes[:, 1, 2] = 0
        if scale == 1e-30:
            # Terms that are no normal numbers, in the first step or in a later one.
            slopes[3, 0], slopes[20, 1] = F4(scale), F4(scale)
            weights *= F4(1e-12)
            slopes[30:] *= F4(1e12)
        elif np.isfinite(scale):
            slopes[::2] *= F4(scale)
            slopes[1::2] /= F4(scale)
        else:
            slopes[-1, 0, steps - 70] = scale
        yield grad, ImplicitChain([slopes, weights], pattern), local


def two_state_chains() -> Iterator[tuple[Any, Any, Any]]:
    """Return chains of slopes for two unknowns of each unit, and weights stored densely."""
    units, terms, batch = 5, 3, 13
    size, rows, unit = 2 * units, terms * units, np.arange(units)
    slopes_at = np.tile(np.eye(units, dtype=bool), (terms, 2))
    slopes_at[0, units], slopes_at[units + 1, 1] = False, False
    first, second = of_mask(slopes_at), Pattern.dense((size, rows))
    pattern = ImplicitPattern([first, second], [1])
    # As in `implicit_chains`; then weights that are not to be passed over, one at a time: the first
    # and the last of every part of the matrix where there should be zeros.
    cases: list[tuple[int, float, tuple[int, int] | None]]
    cases = [(steps, 1.0, None) for steps in range(36, 2, -3)]
    cases += [(24, 1e9, None), (28, 1e-9, None)]
    cases += [(4 + entry, np.inf, None) for entry in range(0, first.nnz, 3)]
    cases += [(9, 1.0, place) for place in ((0, 10), (4, 14), (5, 0), (9, 9), (5, 11), (9, 13))]
    for seed, (steps, scale, place) in enumerate(cases):
        rng = np.random.default_rng(seed)
        weights = np.zeros((size, rows))
        weights[:units, :-units] = rng.standard_normal((units, rows - units)) / 2
        weights[units + unit, rows - units + unit] = rng.uniform(0.5, 1, units)
        slopes, grad, local = _drawn(rng, pattern, steps, batch)
        if place is not None:
            weights[place] = 0.75
        elif np.isfinite(scale):
            slopes[::2] *= F4(scale)
            slopes[1::2] /= F4(scale)
        else:
            slopes[-1, 0, steps - 4] = scale
        yield grad, ImplicitChain([slopes, weights.astype(F4).ravel()], pattern), local


def swept_chains() -> Iterator[tuple[Any, Any, Any]]:
    """Chains longer than what a sweep loads ahead, of patterns that differ and of one alone."""
    rng, batch, size = np.random.default_rng(0), 2, 40
    for kinds in (STRUCTURES, ("sparse",), ("banded",), ("full",)):
        some = [of_mask(mask(rng, kind, size, size)) for kind in kinds]
        patterns = [some[k] for k in rng.integers(len(some), size=25)]
        jacobians = [
            BatchedCSR.from_pattern(
                (rng.standard_normal((batch, p.nnz)) / np.sqrt(size)).astype(F4), p
            )
            for p in patterns
        ]
        local = list(rng.standard_normal((25, batch, size)).astype(F4))
        yield rng.standard_normal((batch, size)).astype(F4), jacobians, local


def level_chain(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a chain of steps of any structure, of one size or several, small or large values."""
    schedules = "blelloch", "chunked:2", "blelloch", "linear"
    rng = np.random.default_rng(seed)
    most = (8, 14, 40, 14, 30, 120)[seed % 6]
    n, batch = 9 if seed in _LONG else int(rng.integers(3, 8)), int(rng.integers(1, 3))
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
    return grad, jacobians, local if seed % 3 else None, schedules[seed % 4]


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

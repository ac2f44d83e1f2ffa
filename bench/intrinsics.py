"""Kernels in LLVM's language beside the same arithmetic as plain Numba loops.

They run on one thread and on data that stays in a cache, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparsescan.jacobians.kernels.values import mark_in_tiles
from sparsescan.kernels.cpu.matvec import csr_matvec

from .experiment import Experiment, Piece, Results, Table
from .page import significant
from .timing import seconds, take_rounds

_CALLS, _ROUNDS = 200, 15
_SAMPLES = 8


@numba.njit
def _eight_at_once(indptr: Any, indices: Any, m: Any, x: Any, y: Any, times: int) -> None:
    rows = len(indptr) - 1
    for _ in range(times):
        csr_matvec(0, rows, indptr, indices, m, x, y, rows, _SAMPLES, None)


@numba.njit(fastmath={"contract"})
def _eight_in_a_loop(indptr: Any, indices: Any, m: Any, x: Any, y: Any, times: int) -> None:
    rows = len(indptr) - 1
    totals = np.empty(_SAMPLES, m.dtype)
    for _ in range(times):
        for i in range(rows):
            for lane in range(_SAMPLES):
                totals[lane] = 0
            for p in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
                j = np.uint64(indices[p])
                for lane in range(_SAMPLES):
                    totals[lane] += m[p] * x[j, lane]
            for lane in range(_SAMPLES):
                y[lane * rows + i] = totals[lane]


@numba.njit
def _tiles_in_vectors(images: Any, out: Any, times: int) -> None:
    for _ in range(times):
        mark_in_tiles(images, out)


@numba.njit
def _tiles_one_by_one(images: Any, out: Any, times: int) -> None:
    height, width = np.uint64(images.shape[1]), np.uint64(images.shape[2])
    flat, marks = images.reshape(-1), out.reshape(-1)
    one, two = np.uint64(1), np.uint64(2)
    for _ in range(times):
        top = np.uint64(0)
        for _ in range(np.uint64(len(images)) * (height >> one)):
            for _ in range(width >> one):
                low = top + width
                a, b, c, d = flat[top], flat[top + one], flat[low], flat[low + one]
                # The larger of each row, then of both. No branch depends on the values.
                upper = np.uint64((b > a) | (b != b))
                lower = np.uint64((d > c) | (d != d))
                best_upper = b if upper else a
                best_lower = d if lower else c
                in_lower = (best_lower > best_upper) | (best_lower != best_lower)
                marks[top] = marks[top + one] = 0
                marks[low] = marks[low + one] = 0
                marks[low + lower if in_lower else top + upper] = 1
                top += two
            top += width


def cases(
    rng: np.random.Generator,
) -> Iterator[tuple[str, NDArray[Any], dict[str, Callable[..., None]], tuple[Any, ...]]]:
    """Yield a name, the array of the result, both kernels by name, and their arguments."""
    for dtype in (np.float32, np.float64):
        for size, nnz in ((1000, 3), (1000, 20)):
            indptr = np.arange(0, size * nnz + 1, nnz, dtype=np.int32)
            columns = np.argsort(rng.random((size, size)), axis=1)[:, :nnz]
            indices = np.sort(columns, axis=1).ravel().astype(np.int32)
            m, x = rng.random(size * nnz).astype(dtype), rng.random((size, _SAMPLES)).astype(dtype)
            y = np.empty(_SAMPLES * size, dtype)
            kernels = {"intrinsic": _eight_at_once, "loops": _eight_in_a_loop}
            name = f"CSR {size}×{size}, {nnz} a row, {_SAMPLES} samples, {y.dtype}"
            yield name, y, kernels, (indptr, indices, m, x, y)
        images = rng.standard_normal((64, 32, 32)).astype(dtype)
        marks = np.empty_like(images)
        kernels = {"intrinsic": _tiles_in_vectors, "loops": _tiles_one_by_one}
        yield f"max-pooling 64×32×32, {marks.dtype}", marks, kernels, (images, marks)


# -- The experiment -------------------------------------------------------------------------------


def _measure(
    y: NDArray[Any], kernels: dict[str, Callable[..., None]], given: tuple[Any, ...], rounds: int
) -> Results:
    answers = []
    for kernel in kernels.values():
        kernel(*given, 1)
        answers.append(y.copy())
    np.testing.assert_allclose(*answers, rtol=1e3 * np.finfo(y.dtype).eps)
    taken: dict[str, list[float]] = {which: [] for which in kernels}

    def take(_: list[float]) -> None:
        for which, kernel in kernels.items():
            taken[which] += seconds(partial(kernel, *given, _CALLS), 1)

    take_rounds(take, rounds)
    medians = {which: float(np.median(times)) / _CALLS for which, times in taken.items()}
    return {"median_seconds": medians, "ratio": medians["loops"] / medians["intrinsic"]}


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, *case in list(cases(np.random.default_rng(0)))[: 1 if quick else None]:
        yield Piece(name, partial(_measure, *case, 2 if quick else _ROUNDS))


def _about(quick: bool) -> Results:
    return {"kernels": "of the engine, on one thread, beside the same arithmetic in Numba's loops"}


def _tables(results: Results) -> list[Table]:
    rows = []
    for name, case in results["pieces"].items():
        times = [significant(1e6 * case["median_seconds"][w]) for w in ("loops", "intrinsic")]
        rows.append([name, *times, f"{significant(case['ratio'])}×"])
    numbers = ["loops, µs", "LLVM's language, µs", "ratio"]
    return [Table(["kernel", *numbers], rows, numbers)]


EXPERIMENT = Experiment("intrinsics", "Code in LLVM's language", _pieces, _about, tables=_tables)

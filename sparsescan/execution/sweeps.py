"""Sweeps over steps with solves by LAPACK's methods, in compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numba.extending import get_cython_function_address
from numpy.typing import NDArray

from ..arrays.addresses import kernel_address
from ..kernels.cpu.sweep import ARGUMENTS, About, Form, Method, Slot, Sweep, sweep
from ..kernels.cpu.tables import Tables
from ..symbolic.factorisation import Factorisation
from .threads import work

# Matrices whose factors are kept.
_KEPT = 8
_METHODS = {"tridiagonal": Method.TRIDIAGONAL, "banded": Method.BANDED, "dense": Method.DENSE}
# About the nanoseconds of a row, and of a multiply-add, of a factorisation or a solve.
_ROW, _MULTIPLY_ADD = 10, 0.3


def sweep_nanoseconds(form: Factorisation, matrices: int, batch: int) -> float:
    """Return the approximate time to factorise these matrices and solve for all samples."""
    factorising = _ROW * form.size + _MULTIPLY_ADD * form.multiply_adds
    solving = _ROW * form.size + _MULTIPLY_ADD * form.solve_multiply_adds
    return matrices * factorising + batch * solving


def sweep_bytes(matrices: Iterable[Factorisation], itemsize: int, batch: int) -> int:
    """Return a bound on the bytes of the kept factors and of the tables of sweeps."""
    forms = [form for form in matrices if form.is_compiled]
    values, rows = _sizes(forms)
    kept = min(_KEPT, len(forms))
    return kept * batch * (itemsize * sum(values) + 8 * rows + 64) + 256 * len(set(forms))


def _sizes(forms: list[Factorisation]) -> tuple[tuple[int, int], int]:
    """Return the most values, and entries of factors, and the most rows."""
    values = max((form.places.size for form in forms), default=0)
    entries = max((form.entries for form in forms), default=0)
    return (values, entries), max((form.size for form in forms), default=0)


class Sweeps:
    """The steps of a program that compiled code solves with; factors are kept from run to run.

    Parameters
    ----------
    forms : dict of int to Factorisation
        The Jacobians to solve with, by their numbers.
    operations : int
        Number of operations.
    dtype : dtype
        float32 or float64.
    batch, threads : int
        Number of samples, and of threads that may take part.
    batched : ndarray of bool, shape (n,)
        Which Jacobians differ between samples.

    Attributes
    ----------
    threads : int
        Blocks of samples, one per thread. There is only one block if samples share any matrix,
        since LAPACK's routines then solve for all samples at once.
    """

    def __init__(
        self,
        forms: dict[int, Factorisation],
        operations: int,
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        threads: int,
    ) -> None:
        compiled = {k: form for k, form in forms.items() if form.is_compiled}
        known = {form: i for i, form in enumerate(dict.fromkeys(compiled.values()))}
        self._forms = list(known)  # what the tables point into
        self.threads = min(threads, batch) if compiled and batched[list(compiled)].all() else 1
        form_of = np.full(operations, -1, np.int64)
        for k, form in compiled.items():
            form_of[k] = known[form]
        (values, entries), rows = _sizes(self._forms)
        kept = min(_KEPT, len(compiled))
        width = batch if batched[list(compiled)].any() else 1
        table = [_row(form, dtype) for form in self._forms]
        about = np.zeros(About.WIDTH, np.int64)
        about[About.BLOCKS] = self.threads
        self._tables = Sweep(
            about=about,
            forms=np.array(table, np.int64).reshape(-1, Form.WIDTH),
            form_of=form_of,
            slots=np.zeros((self.threads, kept, Slot.WIDTH), np.int64),
            arguments=np.zeros((self.threads, ARGUMENTS), np.int64),
            failed=np.empty((self.threads, 2), np.int64),
            states=np.zeros((kept, width), np.int64),
            pivots=np.zeros((kept, width, rows), np.int64),
            copies=np.empty((kept, width, values), dtype),
            factors=np.empty((kept, width, entries), dtype),
        )

    def begin(self) -> None:
        """Start a run, in which equal addresses are equal matrices."""
        self._tables.about[About.RUN] += 1

    def run(
        self, tables: Tables, first: int, last: int, nanoseconds: float
    ) -> tuple[int, int] | None:
        """Make the gradients after Jacobians `first` to ``last - 1``.

        Return the first singular one, and its sample; None if none is singular.
        """
        about, failed = self._tables.about, self._tables.failed
        about[[About.NEXT, About.FIRST, About.LAST]] = 0, first, last
        failed[:] = -1
        work(self._work, tables, self.threads, nanoseconds)
        singular = failed[failed[:, 0] >= 0].tolist()
        return tuple(min(singular)) if singular else None

    def _work(self, tables: Tables, thread: int) -> None:
        sweep(tables, self._tables, thread)


def _row(form: Factorisation, dtype: np.dtype[Any]) -> list[int]:
    """Return a row of the table of forms."""
    row = [0] * Form.WIDTH
    row[Form.METHOD], row[Form.SIZE] = _METHODS[form.method], form.size
    row[Form.LOWER], row[Form.UPPER] = form.lower, form.upper
    row[Form.HEIGHT], row[Form.ENTRIES] = form.entries // max(form.size, 1), form.entries
    row[Form.NNZ], row[Form.PLACES] = form.places.size, kernel_address(form.places)
    if form.method != "tridiagonal":
        row[Form.FACTORISE], row[Form.SOLVE] = _routines(form.method, dtype.char)
    return row


@cache
def _routines(method: str, char: str) -> tuple[int, int]:
    """Return addresses of LAPACK's routines that factorise, and that solve, for a dtype."""
    name = {"f": "s", "d": "d"}[char] + {"banded": "gb", "dense": "ge"}[method]
    module = "scipy.linalg.cython_lapack"
    factorise, solve = (
        get_cython_function_address(module, f"{name}{kind}") for kind in ("trf", "trs")
    )
    return factorise, solve

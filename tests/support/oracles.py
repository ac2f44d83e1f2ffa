"""The right result of a scan, by a loop that shares no code with the package; and random chains.

The oracle is back-propagation, one matrix-vector product after the other, in float64, with SciPy
for CSR and NumPy for dense Jacobians. Beside each gradient stands how far any order of
multiplication may be from it:

    |computed - exact| ≤ eps·m·A + U,  A_k = |J_k| A_{k-1} + |l_k|,  U_k = |J_k| U_{k-1} + d·tiny.

A schedule joins the steps behind gradient ``k`` in a tree, in which every inner dimension ``d_i``
is summed over once, so ``m = Σ (d_i + 2)``; with ``eps`` twice the unit roundoff, the oracle's own
error has room too. `U` is for what falls among the subnormal numbers, which count as 0 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

import sparsescan
from sparsescan import BatchedCSR, CSRChain, Pattern, Schedule
from sparsescan.plan.costs.cpu import Cpu
from sparsescan.plan.costs.operations import FAMILIES
from sparsescan.symbolic.pattern import of_mask

# ---------------------------------------------------------------------------------------------
# The oracle
# ---------------------------------------------------------------------------------------------


def steps_of(jacobians: Any) -> list[Any]:
    """Return the steps of a chain in any form, each a CSR matrix, a BatchedCSR or a dense array."""
    if not isinstance(jacobians, CSRChain):
        return list(jacobians)
    chain = jacobians
    if chain.batch is None:
        arrays = [(data, chain.indices, chain.indptr) for data in chain.data]
        return [sp.csr_array(array, shape=chain.shape) for array in arrays]
    return [BatchedCSR(data, chain.indices, chain.indptr, chain.shape) for data in chain.data]


def on_pattern(values: np.ndarray, pattern: Pattern) -> sp.csr_array | BatchedCSR:
    """Return the matrix with these values, or one for each sample."""
    if values.ndim == 2:
        return BatchedCSR.from_pattern(values, pattern)
    return sp.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)


def apply(jacobian: Any, x: np.ndarray, magnitudes: bool = False) -> np.ndarray:
    """``J x`` for every sample, in the precision of `x`; or ``|J| x``."""
    change = np.abs if magnitudes else np.asarray
    if isinstance(jacobian, BatchedCSR):
        if x.ndim != 2 or len(x) != jacobian.batch:
            raise AssertionError("a batched Jacobian needs a batched gradient")
        rows = [apply(jacobian[b], x[b], magnitudes) for b in range(len(x))]
        return np.array(rows, x.dtype).reshape(len(x), jacobian.shape[0])
    if sp.issparse(jacobian):
        with np.errstate(all="ignore"):
            data = change(jacobian.data.astype(x.dtype))
            parts = data, jacobian.indices, jacobian.indptr
            return (sp.csr_array(parts, shape=jacobian.shape) @ x.T).T
    with np.errstate(all="ignore"):
        return (change(np.asarray(jacobian).astype(x.dtype)) * x[..., None, :]).sum(-1)


@dataclass
class Gradients:
    """Gradients and, for each, how far a scan of some dtype may be from them."""

    exact: list[np.ndarray]
    bounds: list[np.ndarray]


def sequential(
    grad: Any,
    jacobians: Any,
    local_grads: Any = None,
    *,
    inclusive: bool = False,
    dtype: Any = np.float64,
    precision: Any = np.float64,
) -> Gradients:
    """Back-propagation in `precision`, with bounds for a scan in `dtype`."""
    steps = steps_of(jacobians)
    steps = steps if inclusive else steps[:-1]
    count = len(steps) + 1 if inclusive or len(jacobians) else 0
    local = [None] * count if local_grads is None else list(local_grads)
    eps, tiny = (float(getattr(np.finfo(dtype), name)) for name in ("eps", "tiny"))
    x = np.asarray(grad).astype(precision)
    size, lost, terms = np.abs(x), np.zeros_like(x), 0
    exact, bounds = [], []
    with np.errstate(all="ignore"):
        for k in range(count):
            if k > 0:
                step = steps[k - 1]
                inner = step.shape[-1]
                x = apply(step, x)
                size = apply(step, size, magnitudes=True)
                lost = apply(step, lost, magnitudes=True) + (inner + 2) * tiny
                terms += inner + 2
            if local[k] is not None:
                x, size = x + local[k], size + np.abs(local[k])
            exact.append(x)
            bounds.append((terms + 1) * eps * size + lost)
    return Gradients(exact, bounds)


def assert_within(result: Any, expected: Gradients, dtype: Any) -> None:
    """Every gradient of a scan has the oracle's shape and is within its bound."""
    assert len(result) == len(expected.exact)
    for k, (actual, exact, bound) in enumerate(
        zip(result, expected.exact, expected.bounds, strict=True)
    ):
        assert actual.dtype == dtype
        assert actual.shape == exact.shape, f"gradient {k}"
        error = np.abs(actual.astype(exact.dtype) - exact)
        assert (error <= bound).all(), f"gradient {k}: off by {error}, allowed {bound}"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results agree to the last bit."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a, b, strict=True)
    )


# ---------------------------------------------------------------------------------------------
# Random chains
# ---------------------------------------------------------------------------------------------


STRUCTURES = ("sparse", "empty rows", "banded", "full", "diagonal", "permutation")
FORMS = ("csr_array", "csr_matrix", "batched csr", "dense", "batched dense")


def mask(rng: np.random.Generator, structure: str, rows: int, cols: int) -> np.ndarray:
    """Where a random matrix has entries; square structures become sparse if it is not square."""
    if structure == "full":
        return np.ones((rows, cols), bool)
    if structure == "banded":
        return np.abs(np.subtract.outer(np.arange(rows), np.arange(cols))) <= rng.integers(0, 3)
    if rows == cols and structure == "diagonal":
        return np.eye(rows, dtype=bool)
    if rows == cols and structure == "permutation":
        return np.eye(rows, dtype=bool)[rng.permutation(rows)]
    where = rng.random((rows, cols)) < rng.choice([0.1, 0.3, 0.7])
    if structure == "empty rows":
        where[rng.random(rows) < 0.5] = False
        where[:, rng.random(cols) < 0.5] = False
    return where


def indices_of(where: np.ndarray, dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
    """Return ``indices`` and ``indptr`` of the entries of a mask."""
    indptr = np.concatenate([[0], np.cumsum(where.sum(1))])
    return np.nonzero(where)[1].astype(dtype), indptr.astype(dtype)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return normal values, some of them zero, of a size with which no chain grows fast."""
    array = rng.standard_normal(shape) * rng.choice([0.3, 1.0, 1.5])
    array[rng.random(shape) < 0.1] = 0
    return array.astype(dtype)


def jacobian(
    rng: np.random.Generator,
    form: str,
    structure: str,
    shape: tuple[int, int],
    batch: int | None,
    dtype: Any,
    index_dtype: Any,
) -> Any:
    """One random Jacobian; without a batch, batched forms become those that are shared."""
    leading = () if batch is None or not form.startswith("batched") else (batch,)
    if form.endswith("dense"):
        return values(rng, (*leading, *shape), dtype)
    indices, indptr = indices_of(mask(rng, structure, *shape), index_dtype)
    data = values(rng, (*leading, len(indices)), dtype)
    if leading:
        return BatchedCSR(data, indices, indptr, shape)
    matrix = (sp.csr_matrix if form == "csr_matrix" else sp.csr_array)(
        (data, indices, indptr), shape
    )
    # SciPy picks its own index dtype; a caller may have set another.
    matrix.indices, matrix.indptr = indices, indptr
    return matrix


@dataclass
class Chain:
    """Arguments of a scan."""

    grad: np.ndarray
    jacobians: Any
    local_grads: Any
    dtype: np.dtype[Any]  # that of the result
    inclusive: bool
    batch: int | None

    def call(self, by: Any = sparsescan) -> Any:
        """Return the scan that it asks for, of the package or of a plan."""
        return by.inclusive_scan if self.inclusive else by.exclusive_scan

    def scan(self, by: Any = sparsescan, jacobians: Any = None, **options: Any) -> Any:
        """Scan it, or other Jacobians in its place, by the package or by a plan."""
        jacobians = self.jacobians if jacobians is None else jacobians
        return self.call(by)(self.grad, jacobians, local_grads=self.local_grads, **options)

    def oracle(self) -> Gradients:
        return sequential(
            self.grad,
            self.jacobians,
            self.local_grads,
            inclusive=self.inclusive,
            dtype=self.dtype,
        )


@st.composite
def chains(draw: Any, max_n: int = 12, max_size: int = 7, min_size: int = 0) -> Chain:
    """Chains of every form: what is drawn is the structure; the numbers come from a drawn seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    return chain_of(
        lambda options, label=None: draw(st.sampled_from(options), label=label),
        rng,
        range(max_n + 1),
        range(min_size, max_size + 1),
        [None, None, 1, 2, 3, 0],
    )


def chain_of(
    pick: Callable[..., Any],
    rng: np.random.Generator,
    lengths: Sequence[int],
    size: Sequence[int],
    batches: Sequence[int | None],
    *,
    in_parts: bool = False,
) -> Chain:
    """Return a chain of any form, made of what `pick` picks from sequences, each with a label.

    A chain that is cut `in_parts` has the axis of its batch and one length of its gradients
    wherever it comes as one array, even if it is short.
    """
    n = pick(lengths, "n")
    whole = pick(["list", "list", "CSRChain", "dense stack"], "whole")
    batch = pick(batches, "batch")
    dtypes = pick([["f4"], ["f8"], ["f4", "f8"]], "dtypes")
    inclusive = pick([False, True], "inclusive")
    if whole == "list":
        same = pick([False, True], "square")
        first = pick(size)
        sizes = [first if same else pick(size) for _ in range(n + 1)]
        jacobians: Any = [
            jacobian(
                rng,
                pick(FORMS),
                pick(STRUCTURES),
                (sizes[k + 1], sizes[k]),
                batch,
                rng.choice(dtypes),
                rng.choice([np.int32, np.int64]),
            )
            for k in range(n)
        ]
        batched = [step for step in jacobians if isinstance(step, BatchedCSR) or step.ndim == 3]
        needs_batch = bool(batched)
        results = [step.dtype for step in jacobians]
    else:
        rows = pick(size)
        cols = pick(size) if n == 1 and not in_parts else rows
        sizes = [cols] + [rows] * n
        leading = (n,) if batch is None or pick([False, True]) else (n, batch)
        dtype = rng.choice(dtypes)
        if whole == "CSRChain":
            indices, indptr = indices_of(mask(rng, pick(STRUCTURES), rows, cols))
            data = values(rng, (*leading, len(indices)), dtype)
            jacobians = CSRChain(data, indices, indptr, (rows, cols))
        else:
            jacobians = values(rng, (*leading, rows, cols), dtype)
        needs_batch = len(leading) == 2
        results = [np.dtype(dtype)] * (n > 0)
    batch = batch if needs_batch or in_parts or pick([False, True]) else None
    leading = () if batch is None else (batch,)
    grad = values(rng, (*leading, sizes[0]), rng.choice(dtypes))
    local = None
    count = n + inclusive
    if pick([False, True], "local gradients"):
        local = [
            values(rng, (*leading, sizes[k]), rng.choice(dtypes)) if rng.random() < 0.6 else None
            for k in range(count)
        ]
        results += [array.dtype for array in local if array is not None]
    return Chain(grad, jacobians, local, np.result_type(grad, *results), inclusive, batch)


@st.composite
def schedules(draw: Any, n: int) -> Schedule | str:
    """Any schedule for `n` Jacobians."""
    name = draw(st.sampled_from(["blelloch", "truncated", "chunked", "linear", "auto"]))
    if name == "truncated":
        return Schedule.truncated(n, draw(st.integers(0, n.bit_length() + 1)))
    if name == "chunked":
        return Schedule.chunked(n, draw(st.integers(1, n + 3)))
    return name


def every_schedule(n: int, chunks: Sequence[int] = (2, 5)) -> list[Schedule]:
    """One of each kind, for tests that need no more."""
    return [
        Schedule.linear(n),
        Schedule.blelloch(n),
        Schedule.truncated(n, max(1, n.bit_length() // 2)),
        *(Schedule.chunked(n, c) for c in chunks),
    ]


def values_only(jacobians: Any) -> Any:
    """Return the values of a chain in the order of its patterns, in the same layout."""
    if isinstance(jacobians, CSRChain):
        return jacobians.data
    if isinstance(jacobians, np.ndarray):
        return jacobians.reshape(*jacobians.shape[:-2], jacobians.shape[-2] * jacobians.shape[-1])
    return [
        step.data
        if isinstance(step, BatchedCSR) or sp.issparse(step)
        else step.reshape(*step.shape[:-2], step.shape[-2] * step.shape[-1])
        for step in jacobians
    ]


def patterns_of(jacobians: Any) -> list[Pattern]:
    """Return the bare patterns of a chain."""
    if isinstance(jacobians, CSRChain):
        return [jacobians.pattern] * len(jacobians)
    return [
        step.pattern
        if isinstance(step, BatchedCSR)
        else Pattern(step.indptr, step.indices, step.shape)
        if sp.issparse(step)
        else Pattern.dense(step.shape[-2:])
        for step in jacobians
    ]


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def random_patterns(
    rng: np.random.Generator,
    n: int,
    low: int,
    high: int,
    structures: Sequence[str] = STRUCTURES,
) -> list[Pattern]:
    """Patterns that chain, with sizes from `low` to `high`; maybe some are the same."""
    size = int(rng.integers(low, high + 1))
    square, again = rng.random(2) < 0.5
    known: dict[Any, Pattern] = {}
    patterns = []
    for _ in range(n):
        structure = str(rng.choice(structures))
        rows = size if square or rng.random() < 0.5 else int(rng.integers(low, high + 1))
        key = structure, rows, size
        if not (again and key in known):
            known[key] = of_mask(mask(rng, structure, rows, size))
        patterns.append(known[key])
        size = rows
    return patterns


def random_machine(rng: np.random.Generator) -> Cpu:
    """Constants of all sizes: whatever may be dear elsewhere is cheap on one of these."""

    def between(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    families = {
        name: [[between(-2, 0.5), between(-2, 0.5), between(0, 2.5)] for _ in FAMILIES]
        for name in ("float32", "float64")
    }
    return Cpu(
        name="random",
        families=families,
        run=between(0, 2.5),
        wake=between(0, 2.5),
        meet=between(0, 2.5),
        cache=between(4, 8),
        bandwidth=between(0, 2),
        memory_threads=rng.uniform(1, 4),
    )


def every_tree(n: int) -> list[Schedule]:
    """All trees whose levels join groups of neighbours, each in a run, and sweep what comes first.

    A level may also sweep some of the first elements. Groups are swept in the reverse order.
    """
    return [Schedule.from_levels(n, levels) for levels in _trees(list(range(n + 1)))]


def _trees(bounds: list[int]) -> Iterator[list[tuple[str, Any]]]:
    """Levels that make all prefixes; the first of the elements between `bounds` is one."""
    yield [("linear", [[(0, mid, stop) for mid, stop in pairwise(bounds[1:])]])]
    count = len(bounds) - 2
    for head in range(count):
        for sizes in _compositions(count - head):
            ends = np.cumsum([head + 1, *sizes]).tolist()
            groups = [bounds[a : b + 1] for a, b in pairwise(ends) if b > a + 1]
            up = [[(0, mid, stop) for mid, stop in pairwise(bounds[1 : head + 2])]]
            up += [[(group[0], mid, stop) for mid, stop in pairwise(group[1:])] for group in groups]
            down = [[(0, mid, stop) for mid, stop in pairwise(group[:-1])] for group in groups]
            if groups:
                for inner in _trees([0, *(bounds[end] for end in ends)]):
                    yield [("up", up), *inner, ("down", down)]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All tuples of positive numbers with this sum."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield first, *rest


def heterogeneous(n: int) -> list[Pattern]:
    """Dense, diagonal, banded, sparse and rectangular steps, at least 40 different ones."""
    rng = np.random.default_rng(3)
    patterns: list[Pattern] = []
    size = 64
    while len(patterns) < n:
        for structure in ("diagonal", "banded", "permutation", "sparse", "full", "rectangular"):
            rows = int(rng.integers(32, 129)) if structure == "rectangular" else size
            share = {"full": 1.0, "rectangular": 0.2, "sparse": 0.05}.get(structure, 0)
            where = rng.random((rows, size)) < share
            if structure in ("diagonal", "permutation"):
                where = np.eye(size, dtype=bool)
                where = where[rng.permutation(size)] if structure == "permutation" else where
            if structure == "banded":
                where = abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 1
            patterns.append(of_mask(where))
            size = rows
    return patterns[:n]

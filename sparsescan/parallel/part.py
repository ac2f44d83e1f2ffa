"""A rank's part of the chain: its sweep, its product, and the cost of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import plan as plan_scan
from ..arrays.addresses import kernel_address
from ..arrays.arrays import load_cupy
from ..chains.chain import Chain
from ..chains.grads import LocalGrads
from ..execution.threads import thread_count
from ..execution.workspace import Parts
from ..plan.choice import InputKind
from ..plan.costs.operations import Model, run_time
from ..plan.forms import choose_forms
from ..plan.scan_plan import ScanPlan
from ..symbolic.implicit import Step, factor_starts
from ..symbolic.pattern import Pattern, PatternProducts, TooLargeError
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule, level_of, schedule_of
from .maps import ScanTerms

# How products of parts are stored: sparsely or densely.
FORMS = ("exact", "dense")
# A part is not multiplied up if the symbolic phase alone takes more than this many multiply-adds
# for each of the linear scan of the whole chain: the numeric phase does as many each time.
_WORTH = 8
# A part with fewer multiply-adds is always multiplied.
_LITTLE = 1_000_000


@dataclass(frozen=True)
class MapCost:
    """Cost of the product of a part, and its pattern.

    Attributes
    ----------
    nanoseconds : float
        Time to make it.
    bytes : int
        Memory to make it, at most.
    pattern : Pattern
        Pattern of the entries that are stored.
    """

    nanoseconds: float
    bytes: int
    pattern: Pattern


@dataclass(frozen=True)
class PartCost:
    """Cost of a rank's part, for one group of samples.

    Attributes
    ----------
    steps : int
        Number of Jacobians.
    sizes : tuple of int, or None
        Lengths of the gradients that enter and leave it, or of the rank's shares; None if there are
        no steps.
    nnz : int
        Entries of the Jacobians.
    nanoseconds : float
        Time of a sweep; if ranks share rows, the slowest rank's time in each step.
    bytes : int
        Upper bound for Jacobians (different for each sample), gradients, and a sweep's workspace.
    maps : dict of str to MapCost
        Cost of its product in each of :data:`FORMS`; empty if no product pays.
    waiting : float
        Nanoseconds to exchange entries in a sweep, for the slowest rank in each step.
    messages, sent : int
        Messages that it sends to the ranks that share its rows, in an exclusive scan; their bytes.
    """

    steps: int
    sizes: tuple[int, int] | None
    nnz: int
    nanoseconds: float
    bytes: int
    maps: dict[str, MapCost]
    waiting: float = 0.0
    messages: int = 0
    sent: int = 0


# The cost of a part without steps.
NO_STEPS = PartCost(0, None, 0, 0.0, 0, {})


class Part:
    """A rank's part of the chain, planned on its own.

    Parameters
    ----------
    patterns : sequence of Pattern or ImplicitPattern
        Patterns of its Jacobians.
    model : Model
        Predicts what operations take.
    batch : int, optional
        The batch size to insist on.
    dtype : dtype, optional
        The dtype to insist on.
    device : {"cpu", "cuda"}
        Where it is scanned.

    Attributes
    ----------
    sweep : ScanPlan
        The scan of the part from the gradient that enters it.
    """

    def __init__(
        self,
        patterns: Sequence[Step],
        model: Model,
        batch: int | None,
        dtype: np.dtype[Any] | None,
        device: str = "cpu",
    ) -> None:
        self.n = len(patterns)
        self._device = device
        self._patterns = patterns
        self._model = model
        self._programs: dict[str, Program] = {}
        self.sweep: ScanPlan = plan_scan(patterns, batch=batch, dtype=dtype, device=device)

    def planned_for(self, model: Model) -> Part:
        """Return the part with products that are planned for another batch or dtype."""
        part = copy.copy(self)
        part._model, part._programs = model, {}
        return part

    def cost(self, wanted: bool, parts: int | None, *, last: bool = False) -> PartCost:
        """Return the cost of the part.

        Parameters
        ----------
        wanted : bool
            Whether the scan may use its product.
        parts : int or None
            Parts of the whole chain. The product must pay compared with its linear scan; None: it
            need not.
        last : bool
            Whether it is the last part; an exclusive scan does not apply its last step.
        """
        if not self.n:
            return NO_STEPS
        nnz = sum(pattern.nnz for pattern in self._patterns)
        if wanted:
            limit = math.inf if parts is None else _WORTH * parts * nnz + _LITTLE
            with suppress(TooLargeError):
                programs = _reductions(self._patterns, self._model, limit)
                self._programs = dict(zip(FORMS, programs, strict=True))
        model = self._model
        sizes = [self._patterns[0].shape[1], *(pattern.shape[0] for pattern in self._patterns)]
        kind = InputKind.of(self._patterns, model.batch, model.dtype, self._device == "cuda")
        self.sweep.settle(kind)
        swept = self.sweep.to_dict()
        _, more = step_time(model, self._patterns[-1], 1)
        return PartCost(
            steps=self.n,
            sizes=(sizes[0], sizes[-1]),
            nnz=nnz,
            nanoseconds=swept["run_nanoseconds"]
            + sum(level["nanoseconds"] for level in swept["levels"])
            + (0.0 if last else more),
            bytes=model.batch * model.dtype.itemsize * (nnz + sum(sizes))
            + self.sweep.workspace_bytes,
            maps={
                form: MapCost(
                    run_time(model, program), kind.needed_bytes(program), program.patterns[-1]
                )
                for form, program in self._programs.items()
            },
        )

    def reduction(self, form: str) -> Reduction:
        """Return the reduction that makes its product."""
        make = DeviceReduction if self._device == "cuda" else Reduction
        return make(self._programs[form])


class Reduction:
    """Make the product of a part on the CPU, and the sum from its local gradients.

    Parameters
    ----------
    program : Program
        It has an extra Jacobian at both ends: the identity first, for the first local gradient, and
        one last that nothing reads.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the product.
    """

    def __init__(self, program: Program) -> None:
        self._program, self.pattern = program, program.patterns[-1]
        self._leaves = np.zeros((program.n, 2), np.int64)
        self._ones: Any = None
        self._key: Any = None
        self._workspace: Any = None

    def prepare(self, chain: Chain, terms: ScanTerms) -> Any:
        """Return a workspace for such Jacobians, and keep it."""
        batched = np.zeros(self._program.n, bool)
        batched[1:-1] = chain.leaves[:, 1] != 0
        key = terms, chain.device, batched.tobytes()
        if self._workspace is None or self._key != key:
            self._workspace = None
            self._workspace = self._make(batched, terms)
            self._key = key
        return self._workspace

    def run(self, chain: Chain, local: LocalGrads, terms: ScanTerms) -> Parts | None:
        """Return the product in host memory; None if the caller must use the linear scan."""
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        return self._run(self.prepare(chain, terms), chain, local)

    def _make(self, batched: NDArray[np.bool_], terms: ScanTerms) -> Any:
        self._ones = np.ones(self._program.patterns[0].nnz, terms.dtype)
        return terms.workspace(self._program, self._leaves, batched, thread_count())

    def _run(self, workspace: Any, chain: Chain, local: LocalGrads) -> Parts | None:
        self._leaves[0] = kernel_address(self._ones), 0
        self._leaves[1:-1] = chain.leaves
        workspace.local_grads[:] = 0
        # The local gradients of Jacobian `k` of a program are at `k + 1`.
        local.fill(workspace.local_grads[1:])
        # The program writes no gradient, so any memory will do.
        if not workspace.run(np.empty(1, self._ones.dtype), False):
            return None
        product: Parts = workspace.product(self._program.products - 1)
        return product


class DeviceReduction(Reduction):
    """Makes the product of a part whose Jacobians are on a CUDA device."""

    def _make(self, batched: NDArray[np.bool_], terms: ScanTerms) -> Any:
        from ..execution.cuda.workspace import DeviceWorkspace

        self._ones = load_cupy().ones(self._program.patterns[0].nnz, terms.dtype)
        local = "list" if terms.local else None
        return DeviceWorkspace(self._program, terms.dtype, terms.samples, batched, False, local)

    def _run(self, workspace: Any, chain: Chain, local: LocalGrads) -> Parts | None:
        # The program writes no gradient, so the ones stay as they are.
        padded = _Padded(self._ones, chain, local)
        workspace.run(padded, padded, self._ones, inclusive=False)
        product: Parts | None = workspace.product(self._program.products - 1)
        return product


class _Padded:
    """Inputs of a reduction's program on a device: Jacobians, and local gradients, one later.

    A device workspace takes it as a chain, and as local gradients.
    """

    stack = None

    def __init__(self, ones: Any, chain: Chain, local: LocalGrads) -> None:
        self.n = chain.n + 2
        self.leaves = np.zeros((self.n, 2), np.int64)
        self.leaves[0, 0] = kernel_address(ones)
        self.leaves[1:-1] = chain.leaves
        if chain.stack is not None:
            # The addresses of a chain in one array are not in its table.
            base, step, _ = chain.stack
            self.leaves[1:-1, 0] = base + step * np.arange(chain.n)
        self._chain, self._ones, self._local = chain, ones, local

    def array(self, k: int) -> Any:
        """Return the values of the `k`-th Jacobian."""
        return self._ones if k == 0 else self._chain.array(k - 1)

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each local gradient, or 0."""
        addresses[:] = 0
        self._local.fill(addresses[1:])


def step_time(model: Model, pattern: Step, count: int) -> tuple[float, float]:
    """Return the nanoseconds of a run, and of each of its equal steps."""
    program = Program([pattern] * (count + 1), Schedule.linear(count + 1))
    run, levels = model.level_times(program)
    return run, sum(levels) / count


def _reductions(patterns: Sequence[Step], model: Model, limit: float) -> tuple[Program, Program]:
    """Return the best programs for the product in both forms; or raise :class:`TooLargeError`."""
    n, products = len(patterns), PatternProducts(work=limit)
    # The identity comes first, and takes the first local gradient; no schedule reads the last one.
    first, last = Pattern.diagonal(patterns[0].shape[1]), Pattern.diagonal(patterns[-1].shape[0])
    steps: list[Step] = [first, *patterns, last]
    # Products are numbered by the factors of implicit steps.
    whole = 1, int(factor_starts(steps)[-1])
    best: list[tuple[float, Program]] = []
    for chunks in sorted({1, min(model.workers, max(n // 2, 1))}):
        schedule = _schedule(n + 2, chunks)
        forms = choose_forms(Program(steps, schedule, products=products), model)
        programs = [
            Program(steps, schedule, dense=dense, products=products)
            for dense in (forms - {whole}, forms | {whole})
        ]
        times = [run_time(model, program) for program in programs]
        ways = list(zip(times, programs, strict=True))
        best = [min(pair, key=lambda way: way[0]) for pair in zip(best or ways, ways, strict=True)]
    return best[0][1], best[1][1]


def _schedule(n: int, chunks: int) -> Schedule:
    """Return a schedule that multiplies all elements except the gradient, in a number of chunks."""
    bounds = [1 + (n - 1) * c // chunks for c in range(chunks + 1)]

    def run(ends: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the operations of a product from the first of these bounds to the last."""
        return [(ends[0], mid, stop) for mid, stop in pairwise(ends[1:])]

    inner = [run(range(a, b + 1)) for a, b in pairwise(bounds)]
    levels = [level_of("chunks", inner), level_of("product", [run(bounds)])]
    return schedule_of(n, levels, f"product({n}, {chunks})")

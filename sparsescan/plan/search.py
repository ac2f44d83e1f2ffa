"""The planner: find the schedule, and the form of every product, of the least predicted time.

It may choose any tree between the linear and the Blelloch scan. The symbolic phase of a schedule is
given up if its products take more multiply-adds than all workers can do in the time of the linear
scan: the numeric phase makes every product at least once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import MemoryLimitError, short
from ..execution.workspace import table_bytes
from ..symbolic import pattern as patterns_of
from ..symbolic.implicit import Step, planned, solved_of
from ..symbolic.pattern import Pattern, PatternProducts, TooLargeError
from ..symbolic.program import Program
from ..symbolic.schedule import Level, Schedule, chunk_levels, level_of
from .choice import Alternative, InputKind, PlanChoice, lack_of, said_least, said_limit
from .costs.operations import FAMILIES, Model, Operands, Operations, run_time
from .forms import choose_forms

# A schedule replaces the linear one if its predicted time is below this share of the linear time.
# Predictions are not exact, and a scan must not be slower than back-propagation: a tree of a GRU
# with a predicted share of 0.86 took 1.3 to 2 times as long as the linear scan.
_MARGIN = 0.75
_NOTHING_PAYS = "auto: no product of neighbours would save more time than it takes"
_SOLVED = "auto: products of inverses are not formed"
_ASKED = "asked for"
# The most entries to count in int64, which leaves room for sums of products.
_COUNTED = 1 << 55
# The search stops after this many levels without gain.
_PATIENCE = 2


def choose_schedule(
    patterns: Sequence[Step],
    schedule: Schedule | None,
    kind: InputKind,
    memory_limit: int | None = None,
) -> PlanChoice:
    """Return the schedule for a kind of input, and why; None means ``"auto"``."""
    _check_counts(patterns, kind.batch)
    if schedule is not None and not patterns:
        return PlanChoice(schedule, reason=_ASKED, kind=kind)
    nbytes = math.inf if memory_limit is None else memory_limit

    def fits(program: Program) -> bool:
        return lack_of(program, kind, memory_limit) is None

    search = Search(patterns, kind.model(), fits, nbytes)
    if schedule is None:
        return replace(search.choose(_for_device(patterns, kind)), kind=kind)
    try:
        dense, program = search.in_best_forms(schedule)
    except OverflowError:
        raise MemoryLimitError(
            f"products of {schedule} have more multiply-adds than int64 can count; expected "
            "another schedule"
        ) from None
    except TooLargeError:
        needs = f"{schedule} needs more, and {said_least(patterns, kind)}"
        raise MemoryLimitError(f"{said_limit(memory_limit)}; {needs}") from None
    return PlanChoice(schedule, dense, _ASKED, kind=kind, program=program)


def _check_counts(patterns: Sequence[Step], batch: int) -> None:
    """Raise if a chain has more entries than int64 can count, and thus any memory can hold."""
    entries = sum(
        count * (pattern.nnz + sum(pattern.shape)) for pattern, count in Counter(patterns).items()
    )
    if entries * batch > _COUNTED:
        raise MemoryLimitError(
            f"the scan of {short(batch)} samples has {entries:,} entries of Jacobians and "
            "gradients for each; expected no more than a machine can hold"
        )


def _for_device(patterns: Sequence[Step], kind: InputKind) -> list[Schedule]:
    """Return chunks for small steps of one pattern: a device has special kernels for them."""
    if not (patterns and kind.on_device):
        return []
    from ..execution.cuda.chunks import chunks_of

    n, chunks = len(patterns), chunks_of(patterns, kind.batch, kind.dtype)
    return [] if chunks is None else [Schedule.chunked(n, count) for count in sorted({1, chunks})]


class Search:
    """A search over the promising schedules for a chain, and the forms of their products.

    Parameters
    ----------
    steps : sequence of Pattern or ImplicitPattern
        At least one, except for :meth:`choose`.
    model : Model
        The cost model.
    fits : callable
        Returns whether a program fits the memory limit and the machine's memory.
    nbytes : float, optional
        The most bytes for patterns of products, or for one product.

    Attributes
    ----------
    candidates : list of PlanChoice
        All schedules that were tried and fit, without their programs; the linear scan comes first.
    given_up : list of Alternative
        Schedules that do not fit, or are certainly slower than the linear scan.
    program : Program
        The program of the fastest one.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        model: Model,
        fits: Callable[[Program], bool],
        nbytes: float = math.inf,
    ) -> None:
        self._steps, self._model, self._fits, self._nbytes = steps, model, fits, nbytes
        self.candidates: list[PlanChoice] = []
        self.given_up: list[Alternative] = []

    def in_best_forms(
        self, schedule: Schedule, products: PatternProducts | None = None
    ) -> tuple[frozenset[tuple[int, int]], Program]:
        """Return a program with every product in its fastest form, if that fits.

        It returns first the products that are stored densely although their patterns are sparse.
        """
        products = products or PatternProducts(nbytes=self._nbytes)
        program = Program(self._steps, schedule, products=products)
        dense = choose_forms(program, self._model)
        if dense:
            formed = Program(self._steps, schedule, dense=dense, products=products)
            if self._fits(formed):
                return dense, formed
        return frozenset(), program

    def choose(self, more: Sequence[Schedule] = ()) -> PlanChoice:
        """Return the schedule and the forms of the least predicted time.

        Parameters
        ----------
        more : sequence of Schedule, optional
            Schedules to try in addition to the usual ones.

        Returns
        -------
        PlanChoice
            It depends on the arguments alone.
        """
        steps, linear = self._steps, PlanChoice(Schedule.linear(len(self._steps)))
        if any(any(solved_of(step)) for step in dict.fromkeys(steps)):
            return replace(linear, reason=_SOLVED)
        if not steps or not (more or _pays(list(map(planned, steps)), self._model)):
            return replace(linear, reason=_NOTHING_PAYS)
        self.run(more)
        linear, *_ = self.candidates
        fastest, *_ = in_order = sorted(self.candidates, key=lambda option: option.nanoseconds)
        best, share = fastest, fastest.nanoseconds / linear.nanoseconds
        reason = f"auto: predicted to take {share:.2f} of the linear scan's time"
        if fastest.nanoseconds > _MARGIN * linear.nanoseconds or fastest is linear:
            best = linear
            reason = f"auto: nothing is predicted to take less than {_MARGIN} of its time"
        looked_at = [_looked_at(option.schedule, option.nanoseconds) for option in in_order]
        return replace(
            best,
            reason=reason,
            alternatives=(*looked_at, *self.given_up),
            program=self.program if best is fastest else None,
        )

    def run(self, more: Sequence[Schedule] = ()) -> None:
        """Try the usual schedules, and these."""
        n = len(self._steps)
        linear, self.program = self._look_at(Schedule.linear(n), PatternProducts())
        self.candidates.append(linear)
        # A third for patterns, half for tables: those of the fastest so far, and of one more.
        self._products = PatternProducts(
            linear.nanoseconds / _product_rate(self._model), self._nbytes / 3
        )
        # Trees are searched as if all steps were explicit, and judged by their predicted time.
        patterns = list(map(planned, self._steps))
        self._try_while_better(Schedule.truncated(n, k) for k in range(1, n.bit_length()))
        if len(set(patterns)) > 1:
            self._try_while_better(_merged(patterns, self._model, self._products))
        # Chunks: as many as workers, or about as many as make the fewest steps.
        workers, few = self._model.workers, math.isqrt(2 * n)
        counts = {workers + 1, 2 * workers, 4 * workers, few, 2 * few}
        # The first and the last chunk need no product.
        for count in sorted((c for c in counts if 3 <= c <= n // 2), reverse=True):
            self._try(_chunked(patterns, count))
        for schedule in more:
            self._try(schedule)

    def _try_while_better(self, schedules: Iterable[Schedule]) -> None:
        """Try schedules, each deeper than the one before, while they get better."""
        best, waited = math.inf, 0
        try:
            for schedule in schedules:
                time = self._try(schedule)
                waited = 0 if time < best else waited + 1
                best = min(best, time)
                if waited == _PATIENCE or time == math.inf:
                    return
        except (TooLargeError, MemoryLimitError):
            return

    def _try(self, schedule: Schedule) -> float:
        """Return nanoseconds, infinite if the search was given up."""
        for known in self.candidates:
            if known.schedule == schedule:
                return known.nanoseconds
        counts = _count_products(schedule), self.program.products
        tables = sum(table_bytes(len(self._steps), count) for count in counts)
        try:
            if tables > self._nbytes / 2:
                raise TooLargeError
            option, program = self._look_at(schedule, self._products)
        except (TooLargeError, MemoryLimitError):
            self.given_up.append(_looked_at(schedule, None))
            return math.inf
        if not self._fits(program):
            self.given_up.append(_looked_at(schedule, option.nanoseconds))
            return math.inf
        if option.nanoseconds < min(other.nanoseconds for other in self.candidates):
            # Free the programs of other candidates: together they would take too much memory.
            self.program = program
        self.candidates.append(option)
        return option.nanoseconds

    def _look_at(self, schedule: Schedule, products: PatternProducts) -> tuple[PlanChoice, Program]:
        dense, program = self.in_best_forms(schedule, products)
        return PlanChoice(schedule, dense, nanoseconds=run_time(self._model, program)), program


def _looked_at(schedule: Schedule, nanoseconds: float | None) -> Alternative:
    """Return the entry for a schedule that was tried."""
    products = _count_products(schedule)
    return Alternative(repr(schedule), schedule.depth, products, nanoseconds)


def _count_products(schedule: Schedule) -> int:
    return sum(int(np.count_nonzero(level.ops[:, 0])) for level in schedule.levels)


def _pays(patterns: Sequence[Pattern], model: Model) -> bool:
    """Return whether multiplying any two neighbours might save more time than it takes."""
    inner = patterns[:-1]  # the last does not enter an exclusive scan
    if not model.leaves_idle(len(inner), sum(pattern.nnz for pattern in inner)):
        return False
    pairs = list(dict.fromkeys(pairwise(inner)))
    return any(merge.gain > 0 for merge in _merges(pairs, model))


def _product_rate(model: Model) -> float:
    """Return nanoseconds of a multiply-add of CSR matrices, if all workers share the work."""
    many, families = 1e9 * model.batch, ("csr·csr", "csr·csr, dense")
    family = np.array([FAMILIES.index(name) for name in families])
    counts = np.array([[many, 0.0, model.batch]] * 2)
    share = model.share(Operations(family, counts, np.zeros(2, np.int64)))
    return max(float(share.min()) / 1e9, 1e-9)


# ---------------------------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------------------------


class _Guess(NamedTuple):
    """An estimate of a product's pattern, with the attributes of a Pattern."""

    shape: tuple[int, int]
    nnz: int
    kind: patterns_of.Kind
    index_dtype: np.dtype[Any]

    @classmethod
    def of(cls, shape: tuple[int, int], nnz: int) -> _Guess:
        full = nnz >= math.prod(shape)
        return cls(shape, nnz, "dense" if full else "general", patterns_of.index_dtype(shape, nnz))


class _Merge(NamedTuple):
    """The change of a scan's time if two neighbours are multiplied first, in nanoseconds."""

    gain: float  # that it saves in all
    product: float  # that all workers take for the product
    step: float  # that the earlier neighbour took as a step


_Pairs: TypeAlias = Sequence[tuple[Pattern, Pattern]]
# Multiply-adds of a product, and what its pattern is like.
_Guessed: TypeAlias = tuple[int, _Guess | Pattern]


def _merges(pairs: _Pairs, model: Model) -> list[_Merge]:
    """Return what multiplying each pair of neighbours would save.

    A product turns two dependent steps into one. In return all workers make the product, and
    afterwards the gradient between the two steps. If even a lower bound on the product's time does
    not pay, the bound is used. Otherwise its multiply-adds are counted and its entries estimated.
    """
    merges = _in_better_form(pairs, [_at_least(*pair) for pair in pairs], model)
    hopeful = np.flatnonzero(merges[:, 0] > 0)
    some = [pairs[i] for i in hopeful.tolist()]
    merges[hopeful] = _in_better_form(some, [_estimate(*pair) for pair in some], model)
    return [_Merge(*row) for row in merges.tolist()]


def _in_better_form(
    pairs: _Pairs, products: Sequence[_Guessed], model: Model
) -> NDArray[np.float64]:
    """Return a :class:`_Merge` for each row, for products stored sparsely or densely."""
    full = [
        (work, out if isinstance(out, Pattern) else _Guess.of(out.shape, math.prod(out.shape)))
        for work, out in products
    ]
    sparsely, densely = (_merge(pairs, each, model) for each in (products, full))
    return np.where(sparsely[:, :1] >= densely[:, :1], sparsely, densely)


def _at_least(left: Pattern, right: Pattern) -> _Guessed:
    """Return lower bounds for the multiply-adds and the entries of a product."""
    if "diagonal" in (left.kind, right.kind):
        return _estimate(left, right)
    shape, nnz = (right.shape[0], left.shape[1]), max(left.nnz, right.nnz)
    return nnz, _Guess.of(shape, min(nnz, math.prod(shape)))


def _estimate(left: Pattern, right: Pattern) -> _Guessed:
    """Return the multiply-adds, and an estimate of the product's pattern."""
    work = patterns_of.multiply_adds(right, left)
    if "diagonal" in (left.kind, right.kind):
        return work, left if right.kind == "diagonal" else right
    shape = right.shape[0], left.shape[1]
    return work, _Guess.of(shape, patterns_of.product_nnz(right, left))


def _merge(pairs: _Pairs, products: Sequence[_Guessed], model: Model) -> NDArray[np.float64]:
    """Return a :class:`_Merge` for each row, for products stored in this form."""
    count = len(pairs)
    stores: list[Any] = [left for left, _ in pairs] + [right for _, right in pairs]
    stores += [out for _, out in products]
    matrices = Operands(stores, np.zeros(3 * count, bool), np.full(3 * count, model.batch > 1))
    left = np.arange(count)
    right, out = left + count, left + 2 * count
    work = np.array([macs for macs, _ in products], np.int64)

    def counted(vector: int, right: NDArray[np.int64], work: NDArray[np.int64]) -> Operations:
        ops = np.stack([np.full(count, vector), left, right, out], axis=1)
        return Operations.count(ops, work, matrices, model.dtype.itemsize, model.batch)

    def reads(matrix: NDArray[np.int64]) -> Operations:
        """Return products of vectors."""
        return counted(1, matrix, matrices.nnz[matrix])

    product, step = model.share(counted(0, right, work)), model.step(reads(left))
    gain = step + model.step(reads(right)) - model.step(reads(out))
    gain -= product + model.share(reads(left))
    return np.stack([gain, product, step], axis=1)


def _matching(gains: Sequence[float]) -> list[int]:
    """Return disjoint pairs of neighbours, each named by its first, of the largest total gain."""
    best, taken = [0.0, 0.0], [False]
    for gain in gains:
        with_pair = best[-2] + gain
        taken.append(gain > 0 and with_pair > best[-1])
        best.append(max(best[-1], with_pair) if taken[-1] else best[-1])
    pairs, at = [], len(gains)
    while at > 0:
        if taken[at]:
            pairs.append(at - 1)
            at -= 2
        else:
            at -= 1
    return pairs[::-1]


def _chunked(patterns: Sequence[Pattern], count: int) -> Schedule:
    """Return chunks with about the same number of entries each."""
    n = len(patterns)
    if len(set(patterns)) == 1:
        return Schedule.chunked(n, count)
    # Element `k` is Jacobian `k - 1`.
    entries = np.cumsum([1] + [pattern.nnz + 1 for pattern in patterns[:-1]])
    inner = np.searchsorted(entries, entries[-1] * np.arange(1, count) / count) + 1
    bounds = np.unique(np.concatenate([[0], np.minimum(inner, n), [n]]))
    return Schedule.from_levels(n, chunk_levels(bounds.tolist()))


class _Item(NamedTuple):
    """Elements ``[start, stop)`` of the chain and the pattern of their product."""

    start: int
    stop: int
    pattern: Pattern


def _merged(
    patterns: Sequence[Pattern], model: Model, products: PatternProducts
) -> Iterator[Schedule]:
    """Return trees of more and more levels; each multiplies the neighbours with the largest gains.

    While a level makes products, one worker already sweeps the first steps, which need none.
    """
    n = len(patterns)
    items = [_Item(k + 1, k + 2, pattern) for k, pattern in enumerate(patterns[:-1])]
    ups: list[Level] = []
    downs: list[Level] = []
    known: dict[tuple[Pattern, Pattern], _Merge] = {}
    while len(items) > 1:
        pairs = [(a.pattern, b.pattern) for a, b in pairwise(items)]
        new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
        known.update(zip(new, _merges(new, model), strict=True))
        merges = [known[pair] for pair in pairs]
        head = _swept_meanwhile(merges)
        firsts = _matching([0.0] * head + [merge.gain for merge in merges[head:]])
        if not firsts:
            return
        runs = [[(0, item.start, item.stop) for item in items[:head]]]
        middle: list[tuple[int, int, int]] = []
        merged, at = [], head
        for first in [*firsts, len(items)]:
            merged += items[at:first]
            if first < len(items):
                a, b = items[first : first + 2]
                runs.append([(a.start, b.start, b.stop)])
                middle.append((0, a.start, a.stop))
                merged.append(_Item(a.start, b.stop, products(b.pattern, a.pattern)))
            at = first + 2
        level = len(ups)
        ups.append(level_of(f"up-sweep {level}", runs))
        downs.insert(0, level_of(f"down-sweep {level}", [[op] for op in middle]))
        items = merged
        linear = level_of("linear", [[(0, item.start, item.stop) for item in items]])
        yield Schedule.from_levels(n, [*ups, linear, *downs])


def _swept_meanwhile(merges: Sequence[_Merge]) -> int:
    """Return how many steps one worker sweeps while all others make products."""
    time = sum(merges[first].product for first in _matching([merge.gain for merge in merges]))
    head = 0
    while head < len(merges) and (time := time - merges[head].step) >= 0:
        head += 1
    return head

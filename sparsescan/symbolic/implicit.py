"""Implicit steps: Jacobians that are applied factor by factor, and written only for products.

A schedule is made for steps. Kernels run a schedule for factors. In it, a step that is applied to
the gradient becomes one matrix-vector product per factor. The factors of a step that is multiplied
by a matrix are multiplied together just before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.frozen import Frozen
from ..errors import InputError, InputTypeError, short
from .indexed import IndexedPattern
from .pattern import Pattern, counted, multiply_adds, product, product_nnz
from .schedule import Level, Schedule, schedule_of


class ImplicitPattern(Frozen):
    """The patterns of the factors of a step, which a scan applies without multiplying them.

    A step ``J = F_k ⋯ F_2 F_1`` applies ``F_1`` to the gradient first. Factors pay if they have
    fewer entries than their product, or if all steps and samples share one, such as the weights in
    a recurrent cell's ``J_t = Wᵀ D_t``. A factor that is given by weights and an index may be the
    only factor: a convolution has few weights, at many places.

    For a solved factor, `factors` has the pattern of its inverse. For example, implicit time
    stepping ``M_t y_t = N_t y_{t-1} + b_t`` has the step ``J_t = N_tᵀ M_t⁻ᵀ``: factors ``[Mᵀ, Nᵀ]``
    with ``solved=[0]``. Products of inverses are never formed, so such steps need a linear
    schedule.

    Parameters
    ----------
    factors : sequence of Pattern
        The patterns ``F_1, …, F_k``, in the order in which they are applied: at least two, or one
        that is solved or has an index.
    shared : sequence of int, optional
        Positions of the factors whose values all samples share; the planner counts them once.
        Factors with an index are always shared.
    solved : sequence of int, optional
        Positions of the factors that are inverses of square matrices with these patterns. A scan
        solves with the matrix, on the CPU.
    indexed : dict of int to tuple, optional
        For each position of a factor that is given by its weights, ``(index, size)``: the number of
        the weight of each entry, ``(nnz,)``, and the number of weights. All samples share them.

    Attributes
    ----------
    factors : tuple of Pattern
        The patterns of the factors.
    indexed : tuple of IndexedPattern or None
        For each factor its index, if it has one.
    shared : tuple of bool
        Which factors all samples share.
    solved : tuple of bool
        Which factors are solved with.
    shape : tuple of int
        ``(rows, cols)`` of the Jacobian.
    nnz : int
        Entries of all factors together.

    Raises
    ------
    InputError
        If there are fewer than two factors and none is solved or has an index, if they do not
        chain, if a solved factor is not square, or if `shared` or `solved` has a wrong position.
    InputTypeError
        If a factor is no Pattern.

    See Also
    --------
    sparsescan.ImplicitChain, sparsescan.ImplicitStep, sparsescan.SolveStep

    Examples
    --------
    >>> from sparsescan import ImplicitPattern, Pattern
    >>> step = ImplicitPattern([Pattern.diagonal(20), Pattern.dense((20, 20))], shared=[1])
    >>> step
    ImplicitPattern((20, 20); (20, 20) diagonal, (20, 20) dense and shared)
    >>> step.jacobian
    Pattern((20, 20), nnz=400, dense)
    """

    __slots__ = (
        "__weakref__",
        "_jacobian",
        "factors",
        "indexed",
        "key",
        "nnz",
        "shape",
        "shared",
        "solved",
    )

    factors: tuple[Pattern, ...]
    indexed: tuple[IndexedPattern | None, ...]
    shared: tuple[bool, ...]
    solved: tuple[bool, ...]
    shape: tuple[int, int]
    nnz: int
    key: tuple[Any, ...]  # equal for equal patterns, and holds none
    _jacobian: Pattern | None

    def __init__(
        self,
        factors: Iterable[Pattern | IndexedPattern],
        shared: Iterable[int] = (),
        solved: Iterable[int] = (),
        indexed: Mapping[int, tuple[ArrayLike, int]] = MappingProxyType({}),
    ) -> None:
        given = _listed("factors", factors)
        flags = {
            name: _flags(name, positions, len(given))
            for name, positions in (("shared", shared), ("solved", solved))
        }
        for k, factor in enumerate(given):
            if not isinstance(factor, (Pattern, IndexedPattern)):
                raise InputTypeError(f"factors[{k}] is {short(factor)}; expected a Pattern")
        for k in map(int, np.flatnonzero(_flags("indexed", indexed, len(given)))):
            given[k] = _indexed(f"factors[{k}]", given[k], indexed[k])
        indices = tuple(each if isinstance(each, IndexedPattern) else None for each in given)
        listed = [each.pattern if isinstance(each, IndexedPattern) else each for each in given]
        flags["shared"] = tuple(
            flag or index is not None for flag, index in zip(flags["shared"], indices, strict=True)
        )
        if len(listed) < 2 and not any(flags["solved"]) and indices in ((), (None,)):
            raise InputError(
                f"factors has {len(listed)} patterns; expected at least two, since a step of one "
                "that is not solved and has no index is an explicit one"
            )
        for k, (first, second) in enumerate(pairwise(listed)):
            if second.shape[1] != first.shape[0]:
                raise InputError(
                    f"factors[{k + 1}] has shape {second.shape}; expected (·, {first.shape[0]}), "
                    "as the factor that is applied before it has so many rows"
                )
        for k, (factor, is_solved) in enumerate(zip(listed, flags["solved"], strict=True)):
            if is_solved and factor.shape[0] != factor.shape[1]:
                raise InputError(
                    f"factors[{k}] has shape {factor.shape}; expected a square one, since it is "
                    "solved"
                )
        self._set(
            **flags,
            factors=tuple(listed),
            indexed=indices,
            shape=(listed[-1].shape[0], listed[0].shape[1]),
            nnz=sum(factor.nnz for factor in listed),
        )
        self._set(key=(self.shared, self.solved, *(factor.key for factor in given)))
        self._jacobian = None

    @property
    def jacobian(self) -> Pattern:
        """The pattern of the product, which is the Jacobian: dense if a factor is an inverse."""
        if any(self.solved):
            return Pattern.dense(self.shape)
        if self._jacobian is None:
            whole, *later = self.factors
            for factor in later:
                whole = product(factor, whole)
            self._jacobian = whole
        return self._jacobian

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImplicitPattern) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        factors = (
            f"{factor.shape} {factor.kind}"
            f"{' and shared' * shared if index is None else f' of {index.size} weights'}"
            f"{' and solved' * solved}"
            for factor, shared, solved, index in zip(
                self.factors, self.shared, self.solved, self.indexed, strict=True
            )
        )
        return f"ImplicitPattern({self.shape}; {', '.join(factors)})"

    def __reduce__(self) -> tuple[Any, ...]:
        positions = (np.flatnonzero(flags).tolist() for flags in (self.shared, self.solved))
        given = [index or factor for factor, index in zip(self.factors, self.indexed, strict=True)]
        return ImplicitPattern, (given, *positions)


Step: TypeAlias = Pattern | ImplicitPattern

# With more multiply-adds of sparse factors, the pattern of their product is not computed only for
# predictions.
_EXACT = 10_000_000


# The most factors of a step, since an iterable may be endless.
_MOST = 10_000


def _listed(name: str, given: Any) -> list[Any]:
    try:
        listed = list(islice(given, _MOST + 1))
    except Exception:  # of what is no iterable, or of a caller's own
        raise InputTypeError(f"{name} is {short(given)}; expected a sequence") from None
    if len(listed) > _MOST:
        raise InputError(f"{name} has more than {_MOST:,} entries; expected a few")
    return listed


def _flags(name: str, positions: Any, count: int) -> tuple[bool, ...]:
    """Return, as a tuple of bools, which factors are at these positions."""
    chosen: set[int] = set()
    expected = f"expected positions from 0 to {count - 1}" if count else "expected none"
    for given in _listed(name, positions):
        try:
            position = operator.index(given)
        except Exception:  # of a list, an array, or a caller's own class
            raise InputTypeError(f"{name} has {short(given)}; {expected}") from None
        if not 0 <= position < count:
            raise InputError(f"{name} has {short(position)}; {expected}")
        chosen.add(position)
    return tuple(k in chosen for k in range(count))


def _indexed(name: str, pattern: Any, about: Any) -> IndexedPattern:
    """Return a factor with its index, or raise an error that names it."""
    if not isinstance(pattern, Pattern):
        raise InputTypeError(f"{name} is {short(pattern)}; expected a Pattern")
    try:
        index, size = about
    except Exception:  # of what is no pair
        raise InputTypeError(f"{name} has {short(about)}; expected (index, size)") from None
    return IndexedPattern(pattern, index, size)


def contains(steps: Iterable[Any], kind: type) -> bool:
    """Return whether any of these is of a class; among many, only types are compared."""
    return any(issubclass(each, kind) for each in set(map(type, steps)))


def factors_of(step: Step) -> tuple[Pattern, ...]:
    """Return the patterns of a step's factors, in the order in which they are applied."""
    return step.factors if isinstance(step, ImplicitPattern) else (step,)


def shared_of(step: Step) -> tuple[bool, ...]:
    """Return which factors all samples are known to share."""
    return step.shared if isinstance(step, ImplicitPattern) else (False,)


def solved_of(step: Step) -> tuple[bool, ...]:
    """Return which factors are solved with."""
    return step.solved if isinstance(step, ImplicitPattern) else (False,)


def indexed_of(step: Step) -> tuple[IndexedPattern | None, ...]:
    """Return the index of each factor, or None."""
    return step.indexed if isinstance(step, ImplicitPattern) else (None,)


def explicit(step: Step) -> Pattern:
    """Return the pattern of the Jacobian of a step."""
    return step.jacobian if isinstance(step, ImplicitPattern) else step


def planned(step: Step) -> Pattern:
    """Return the pattern of a step's Jacobian, or a full one if it would take long to compute."""
    return explicit(step) if _is_small(step) else Pattern.dense(step.shape)


def count(step: Step) -> Pattern:
    """Return a pattern with about as many entries as a step's Jacobian, only for counting."""
    if isinstance(step, Pattern) or _is_small(step):
        return explicit(step)
    whole, later = _multiplied(step)
    return counted(step.shape, product_nnz(later[0], whole))


def _is_small(step: Step) -> bool:
    """Return whether the pattern of a step's Jacobian is known, or quick to compute."""
    if isinstance(step, Pattern) or step._jacobian is not None or any(step.solved):
        return True
    whole, later = _multiplied(step)
    if later:
        return False
    step._jacobian = whole
    return True


def _multiplied(step: ImplicitPattern) -> tuple[Pattern, Sequence[Pattern]]:
    """Return the product of the first factors, as far as it is quick, and the other factors."""
    whole, *later = step.factors
    while later and (
        not whole.kind == later[0].kind == "general" or multiply_adds(later[0], whole) <= _EXACT
    ):
        whole = product(later.pop(0), whole)
    return whole, later


def factor_starts(steps: Sequence[Step | None]) -> NDArray[np.int64]:
    """Return the start of each step's factors among all factors, and the end of the last.

    None means an explicit step.
    """
    counts = [len(step.factors) if isinstance(step, ImplicitPattern) else 1 for step in steps]
    return np.cumsum([0, *counts], dtype=np.int64)


def refine(schedule: Schedule, starts: NDArray[np.int64]) -> Schedule:
    """Return the schedule for factors that is equivalent to a schedule for steps.

    Parameters
    ----------
    schedule : Schedule
        For steps.
    starts : ndarray of int64, shape (steps + 1,)
        Where the factors of each step start.

    Returns
    -------
    Schedule
        It makes the prefixes of whole steps, and the prefixes within each step that it applies. If
        a step is multiplied by a matrix, the run that reads it multiplies its factors first. The
        last step is applied up to its last factor, so that an inclusive scan has one more
        operation, as always.
    """
    factors = int(starts[-1])
    if factors == schedule.n:
        return schedule
    # Element 0 is the gradient.
    place = np.concatenate([[0], starts + 1])
    none = np.empty((0, 3), np.int64)
    levels = schedule.levels or (Level("linear", none, np.zeros(2, np.int64)),)
    refined = []
    for level in levels:
        parts = [_refined(op, place, schedule.n) for op in level.ops.tolist()]
        if schedule.n == 1:
            parts = [_sweep(1, factors)]
        ends = np.cumsum([0, *map(len, parts)])
        ops = np.array(list(chain.from_iterable(parts)), np.int64).reshape(-1, 3)
        refined.append(Level(level.name, ops, ends[level.runs] if len(level.ops) else ends))
    return schedule_of(factors, refined, f"{schedule!r}, refined".removeprefix("Schedule."))


def _refined(op: list[int], place: NDArray[np.int64], n: int) -> list[tuple[int, int, int]]:
    """Return the operations on factors that replace one operation on steps."""
    start, mid, stop = place[op].tolist()
    is_right_leaf = op[2] == op[1] + 1
    if start == 0:
        ops = _sweep(mid, stop) if is_right_leaf else [(0, mid, stop)]
        return ops + _sweep(stop, int(place[-1]) - 1) if op[2] == n else ops
    ops = _product(start, mid) if op[1] == op[0] + 1 else []
    ops += _product(mid, stop) if is_right_leaf else []
    return [*ops, (start, mid, stop)]


def _sweep(start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the operations that take a gradient through factors, one after the other."""
    return [(0, k, k + 1) for k in range(start, stop)]


def _product(start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the operations that multiply factors together."""
    return [(start, k, k + 1) for k in range(start + 1, stop)]

"""A caller's chains, which may have implicit steps, and the chains of factors that scans run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.arrays import is_on_device
from ..errors import InputError, PatternMismatchError
from ..symbolic.implicit import ImplicitPattern, Step, contains, factor_starts, factors_of
from ..symbolic.pattern import Pattern
from .chain import Chain
from .implicit import ImplicitChain, ImplicitStep
from .reading import check_chain, is_stack, length, name_of, split, steps_of


def read_chain(
    jacobians: Any, reverse: bool, *, chained: bool = True
) -> tuple[Chain, Sequence[Step]]:
    """Read Jacobians without a plan; return their chain, and the pattern of each step.

    `reverse` and `chained` are as for a :class:`Chain`. The chain has the factors of implicit
    steps.
    """
    steps, implicit = _unfold(steps_of(jacobians), reverse)
    chain = Chain(length(steps), reverse, factor_starts(implicit) if implicit else None)
    read = chain.read(steps, chained=chained)
    if not implicit:
        return chain, read
    factors = iter(read)
    patterns: list[Step] = []
    for pattern in implicit:
        taken = [next(factors) for _ in range(1 if pattern is None else len(pattern.factors))]
        patterns.append(taken[0] if pattern is None else pattern)
    return chain, patterns


def patterns_in(
    jacobians: Any, reverse: bool, *, chained: bool = True
) -> tuple[Sequence[Step], bool]:
    """Return the patterns of steps, bare ones too, and whether any is on a device.

    The patterns run from the last layer to the first; the steps do so unless `reverse`.
    """
    steps = steps_of(jacobians)
    if isinstance(steps, ImplicitChain):
        return [steps.pattern] * len(steps), any(map(is_on_device, steps.values))
    bare = Pattern, ImplicitPattern, ImplicitStep
    if is_stack(steps) or not any(isinstance(step, bare) for step in steps):
        chain = Chain(length(steps), reverse)
        return chain.read(steps, chained=chained), chain.device is not None
    patterns = [pattern_of(k, step) for k, step in enumerate(steps)][:: -1 if reverse else 1]
    there = any(is_on_device(step) for step in steps)
    return check_chain(patterns, reverse) if chained else patterns, there


def pattern_of(k: int, jacobian: Any) -> Step:
    """Return the pattern of the `k`-th step, which may be a bare pattern."""
    if isinstance(jacobian, (Pattern, ImplicitPattern)):
        return jacobian
    if isinstance(jacobian, ImplicitStep):
        return jacobian.pattern
    return split(f"jacobians[{k}]", jacobian, None)[0]


def _unfold(jacobians: Any, reverse: bool) -> tuple[Any, Sequence[ImplicitPattern | None]]:
    """Return a chain in which factors replace implicit steps.

    Parameters
    ----------
    jacobians : list, CSRChain, PeriodicChain, ImplicitChain or ndarray
        As :func:`.steps_of` returns it.
    reverse : bool
        Whether it is in the order of time.

    Returns
    -------
    jacobians : list, CSRChain, PeriodicChain or ndarray
        The chain, without implicit steps. If there were any, it is from the last to the first.
    implicit : sequence of ImplicitPattern or None
        The pattern of each step that was implicit, None for an explicit one; empty if all were.
    """
    if isinstance(jacobians, ImplicitChain):
        return jacobians.factors(reverse), [jacobians.pattern] * len(jacobians)
    if is_stack(jacobians) or not contains(jacobians, ImplicitStep):
        return jacobians, ()
    factors: list[Any] = []
    implicit: list[ImplicitPattern | None] = []
    for step in jacobians[::-1] if reverse else jacobians:
        is_implicit = isinstance(step, ImplicitStep)
        factors += step.factors if is_implicit else [step]
        implicit.append(step.pattern if is_implicit else None)
    return factors, implicit


class PlannedSteps:
    """The steps of a plan, explicit and implicit ones, and the chain of their factors.

    Parameters
    ----------
    patterns : sequence of Pattern or ImplicitPattern
        The pattern of every step.

    Attributes
    ----------
    n : int
        Number of steps.
    factors : list of Pattern
        The patterns of the chain that is scanned.
    starts : ndarray of int64 or None, shape (n + 1,)
        Where in it the factors of each step start; None if all steps are explicit.
    """

    def __init__(self, patterns: Sequence[Step]) -> None:
        self.n, self._patterns = len(patterns), patterns
        self.factors: list[Any] = list(patterns)
        self.starts = None
        if contains(patterns, ImplicitPattern):
            self.factors = [factor for step in patterns for factor in factors_of(step)]
            self.starts = factor_starts(patterns)
        # The pattern of all steps, if they have one.
        self._only = patterns[0] if len(set(patterns)) == 1 else None

    def unfold(self, jacobians: Any, reverse: bool) -> Any:
        """Return the chain of the factors, for a chain of these steps.

        Raises
        ------
        InputError
            If there are more steps, or fewer.
        PatternMismatchError
            If a step has another pattern than planned.
        """
        if self.starts is None:
            if isinstance(jacobians, ImplicitChain):
                raise PatternMismatchError(
                    f"jacobians is {jacobians}; expected explicit steps, as the plan was made for"
                )
            return jacobians
        if isinstance(jacobians, ImplicitChain) and (
            self._only == jacobians.pattern and len(jacobians) == self.n
        ):
            return jacobians.factors(reverse)
        unfolded, implicit = _unfold(steps_of(jacobians), reverse)
        n = len(implicit) or length(unfolded)
        if n != self.n:
            raise InputError(
                f"jacobians has {n} steps; expected {self.n}, as the plan was made for"
            )
        for k, step in enumerate(self._patterns):
            pattern = implicit[k] if implicit else None
            if pattern is not step and pattern != (
                step if isinstance(step, ImplicitPattern) else None
            ):
                raise PatternMismatchError(
                    f"{name_of(k, self.n, reverse)} is {pattern or 'explicit'}; expected {step}, "
                    "as the plan was made for"
                )
        return unfolded

"""Chains with implicit steps, and the chains of their factors, which are what a scan runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError, PatternMismatchError
from ..symbolic.implicit import ImplicitPattern, Step, contains, factor_starts, factors_of
from ..symbolic.pattern import Pattern
from .chain import is_stack, length, name_of, steps_of
from .implicit import ImplicitChain, ImplicitStep

__all__ = ["Steps", "fold", "unfold"]


def unfold(jacobians: Any, reverse: bool) -> tuple[Any, Sequence[ImplicitPattern | None]]:
    """Return a chain with the factors of implicit steps in their place.

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


def fold(factors: Sequence[Pattern], implicit: Sequence[ImplicitPattern | None]) -> Sequence[Step]:
    """Return the pattern of each step of a chain that :func:`unfold` has unfolded."""
    left = iter(factors)
    steps: list[Step] = []
    for pattern in implicit:
        taken = [next(left) for _ in range(1 if pattern is None else len(pattern.factors))]
        steps.append(taken[0] if pattern is None else pattern)
    return steps or factors


class Steps:
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
        self._only = patterns[0] if len(set(patterns)) == 1 else None

    def unfold(self, jacobians: Any, reverse: bool) -> Any:
        """Return the chain of the factors, of a chain of these steps.

        Raises
        ------
        InputError
            If there are more steps, or fewer.
        PatternMismatchError
            If a step is not of the pattern that it was planned for.
        """
        if self.starts is None:
            if isinstance(jacobians, ImplicitChain):
                raise PatternMismatchError(
                    f"jacobians is {jacobians}; expected explicit steps, as the plan was made for"
                )
            return jacobians
        if isinstance(jacobians, ImplicitChain) and self._is_like(jacobians):
            return jacobians.factors(reverse)
        unfolded, implicit = unfold(steps_of(jacobians), reverse)
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

    def _is_like(self, jacobians: ImplicitChain) -> bool:
        """Return whether all steps are those of the plan, which has one pattern."""
        return self._only == jacobians.pattern and len(jacobians) == self.n

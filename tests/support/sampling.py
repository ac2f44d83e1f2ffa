"""Cases and examples that are left out unless all tests are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import seed, settings

# Examples that Hypothesis makes for a test by default.
EXAMPLES = 8
# Whether all tests are asked for, with all that a long run has.
is_long = False
# Whether long runs are shorter: --rest has one in so many of the examples that --all adds.
is_rest, ONE_EXAMPLE_IN = False, 4


class Examples(int):
    """A number of examples of a test, which takes fewer in a sample."""

    in_sample: int


def examples(usual: int) -> int:
    """Return how many examples a test takes: `usual`, or as much fewer as others by default."""
    return max(1, min(usual, usual * settings().max_examples // 60))


def times(factor: int) -> int:
    """Return so many times as many examples as others take by default."""
    return factor * settings().max_examples


def long_run(count: int, in_sample: int) -> Examples:
    """Return how many examples a test takes: `count` with --all, and few in a sample."""
    if is_rest:
        count = in_sample + (count - in_sample) // ONE_EXAMPLE_IN
    result = Examples(count if is_long else in_sample)
    result.in_sample = in_sample
    return result


def long_times(factor: int, in_sample: int) -> Examples:
    """Return so many times as many examples as others take by default, and few in a sample."""
    return long_run(times(factor), in_sample)


def added_examples(function: Any) -> int:
    """Return how many more examples a test of Hypothesis takes than in a sample."""
    own = function._hypothesis_internal_use_settings.max_examples
    return int(own) - getattr(own, "in_sample", own)


@contextmanager
def other_examples(function: Any) -> Iterator[None]:
    """Let a test of Hypothesis take as many examples as :func:`added_examples` says, and others."""
    before = function._hypothesis_internal_use_settings, function._hypothesis_internal_use_seed
    count = added_examples(function)
    function._hypothesis_internal_use_settings = settings(before[0], max_examples=count)
    seed(1)(function)
    try:
        yield
    finally:
        function._hypothesis_internal_use_settings, function._hypothesis_internal_use_seed = before


def slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrised test, marked as slow; a tuple has several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

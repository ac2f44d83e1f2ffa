"""Work on parts of arrays that threads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .threads import share

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def quiet(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function overflow or divide by 0 without warnings, as in PyTorch."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


def even_slices(length: int, count: int) -> list[slice]:
    """Cut `length` elements into `count` slices of almost equal size."""
    ends = [length * k // count for k in range(count + 1)]
    return [slice(*ends[k : k + 2]) for k in range(count)]


def map_shared(call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Return the results of `call` for each of the parts, which threads share."""
    results: list[Any] = [None] * len(parts)

    # Each thread has an error state of its own.
    @quiet
    def call_for(k: int) -> None:
        results[k] = call(parts[k])

    share(call_for, len(parts))
    return results

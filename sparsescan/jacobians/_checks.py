"""Arguments of layers, read or refused."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from ..errors import InputError, InputTypeError

__all__ = ["Shape", "check_dim", "check_number", "check_sizes"]

Shape = tuple[int, ...]


def check_sizes(name: str, value: Any, count: int | None = None, least: int = 1) -> Shape:
    """`value` as a tuple of integers; one integer stands for `count` of them.

    Raises an error that names it if it is something else, has another length, or has an entry below
    `least`.
    """
    try:
        if count is not None and not hasattr(value, "__len__"):
            sizes = (operator.index(value),) * count
        else:
            sizes = tuple(operator.index(size) for size in value)
    except TypeError:
        wanted = "integers" if count is None else f"an integer or {count} integers"
        raise InputTypeError(f"{name} is {value!r}; expected {wanted}") from None
    if count is not None and len(sizes) != count:
        raise InputError(f"{name} is {value!r}; expected {count} integers")
    if any(size < least for size in sizes):
        raise InputError(f"{name} is {value!r}; expected integers of at least {least}")
    return sizes


def check_number(name: str, value: Any, *, finite: bool = True) -> float:
    """`value` as a float, or an error that names it."""
    if not isinstance(value, Real):
        raise InputTypeError(f"{name} is {value!r}; expected a number")
    if math.isnan(value) or (finite and math.isinf(value)):
        raise InputError(f"{name} is {value}; expected a{' finite' * finite} number")
    return float(value)


def check_dim(name: str, dim: Any, shape: tuple[int, ...]) -> int:
    """The axis of a sample of this shape that `dim` means, which counts the batch axis."""
    try:
        axis = operator.index(dim)
    except TypeError:
        raise InputTypeError(f"{name} is {dim!r}; expected an integer") from None
    axis += len(shape) + 1 if axis < 0 else 0
    if not 1 <= axis <= len(shape):
        axes = ", ".join(map(str, ("batch", *shape)))
        raise InputError(f"{name} is {dim}; expected an axis of ({axes}) other than the batch")
    return axis - 1

"""Checks of arguments: each returns what a call computes with, or raises an error that names it.

And of names: those that a module has given up work for a release, with a warning.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np

from .errors import InputError, InputTypeError, short

# Bits of the largest count that anybody means.
_BITS = 128


def check_count(name: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value` as an integer from `least` to `most`, or raise an error that names it."""
    try:
        count = operator.index(value)
    except Exception:  # of an array, or of a caller's own class
        raise InputTypeError(f"{name} is {short(value)}; expected an integer") from None
    if count < least:
        raise InputError(f"{name} is {short(count)}; expected at least {least}")
    if most is not None and count > most:
        raise InputError(f"{name} is {short(count)}; expected at most {most:,}")
    if count.bit_length() > _BITS:
        raise InputError(f"{name} is {short(count)}; expected at most 2**{_BITS}")
    return count


def check_count_or_none(name: str, value: int | None, least: int) -> int | None:
    """Return None, or what :func:`check_count` does."""
    return None if value is None else check_count(name, value, least)


def check_number(name: str, value: Any, *, finite: bool = True) -> float:
    """Return `value` as a float, or raise an error that names it."""
    if not isinstance(value, Real):
        raise InputTypeError(f"{name} is {short(value)}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or (finite and math.isinf(number)):
        raise InputError(f"{name} is {short(value)}; expected a{' finite' * finite} number")
    return number


def check_choice(name: str, value: Any, *choices: str) -> str:
    """Return `value` if it is one of these strings, or raise an error that names it."""
    # Arrays work out equality entry by entry, so types come first.
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(", ".join(map(repr, choices)).rsplit(", ", 1))
        raise InputError(f"{name} is {short(value)}; expected {expected}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool, or raise an error that names it; 0 and 1 count as flags."""
    # An array may have several truth values, and a string that says "False" counts as true.
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)) and value in (0, 1):
        return bool(value)
    raise InputTypeError(f"{name} is {short(value)}; expected True or False")


def check_has_shape(name: str, array: Any, shape: tuple[int, ...], why: str = "") -> None:
    """Raise unless an array of any package has a shape; `why` says where that comes from."""
    if array.shape != shape:
        raise InputError(f"{name} has shape {tuple(array.shape)}; expected {shape}{why}")


def check_packages(purpose: str, extra: str, packages: dict[str, str]) -> None:
    """Raise unless all modules, given with the names of their packages, can be imported."""
    missing = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ImportError(
            f"{purpose} needs {', '.join(missing)}; install with: pip install 'sparsescan[{extra}]'"
        )


def former_names(module: str, former: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, by which names that it has given up work for a release.

    Parameters
    ----------
    module : str
        Name of the module.
    former : mapping of str to tuple of two str
        For each name where its object is, as ``"room.module:attribute"`` in this package, and what
        the warning says to write instead; nothing, if that is to import it from there.
    """

    def find(name: str) -> Any:
        if name not in former:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, instead = former[name]
        path, _, attribute = place.partition(":")
        instead = instead or f"from {__package__}.{path} import {attribute}"
        warnings.warn(
            f"{module}.{name} is public no longer, and the next release is without it: write "
            f"{instead}",
            DeprecationWarning,
            stacklevel=2,
        )
        found = importlib.import_module(f"{__package__}.{path}")
        return reduce(getattr, attribute.split("."), found)

    return find

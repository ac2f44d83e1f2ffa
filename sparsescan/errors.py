"""The exceptions a caller can catch; each is also the built-in one that fits."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Characters of a value that an error message shows.
_SHOWN = 100

# How NumPy's errors begin where an array would not fit into any address space.
_TOO_LARGE = ("array is too big", "Maximum allowed", "maximum supported dimension")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN


class SparseScanError(Exception):
    """Base class of every exception that this package raises on purpose."""


class InputError(SparseScanError, ValueError):
    """An argument has the right type but a wrong shape, index, size or value."""


class InputTypeError(SparseScanError, TypeError):
    """An argument has a type, a sparse format or a dtype that is not supported."""


class PatternMismatchError(InputError):
    """A Jacobian given to a plan has another pattern than the plan was made for."""


class SingularMatrixError(InputError, np.linalg.LinAlgError):
    """A matrix that a scan has to solve with is singular."""


class ChainFileError(InputError):
    """A file is not a chain written by :func:`sparsescan.save_chain`."""


class PlanFileError(InputError):
    """A file is not a plan written by :meth:`sparsescan.ScanPlan.save`."""


class DeviceError(SparseScanError, RuntimeError):
    """A device was asked for, or holds the data, that cannot be used here."""


class MemoryLimitError(SparseScanError, MemoryError):
    """A call needs more memory than it was allowed, or than there is."""


class RankError(SparseScanError, RuntimeError):
    """One of the ranks of :mod:`sparsescan.parallel` met an exception that is none of these."""


def short(value: object) -> str:
    """Return how an error message shows a value: on one line, however large the value is."""
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # of the repr of a caller's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Allocating:
    """Turn a lack of memory in a block or a call into a :class:`MemoryLimitError` that names it.

    Parameters
    ----------
    what : str
        The subject of the message, such as ``"the scan"``.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function with its whole call as the block."""

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except (MemoryError, ValueError) as error:
                self.__exit__(type(error), error, None)
                raise

        return call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lacking = isinstance(error, MemoryError) and not isinstance(error, MemoryLimitError)
        if lacking or (isinstance(error, ValueError) and str(error).startswith(_TOO_LARGE)):
            raise out_of_memory(self._what, error) from None


def out_of_memory(what: str, error: BaseException | None) -> MemoryLimitError:
    """Return the error that says what a lack of memory has stopped; one that does so already."""
    if isinstance(error, MemoryLimitError):
        return error
    # NumPy says how many bytes it has asked for.
    needed = str(error) or "the system gave it none"
    return MemoryLimitError(f"{what} needs more memory than there is: {needed}")

"""Errors of functions that are traced on symbols: where they are, and what to write instead."""

from __future__ import annotations

import inspect
import linecache
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from ..errors import InputTypeError


class Front(NamedTuple):
    """What traces a function, and how errors call what it may do.

    Attributes
    ----------
    modules : tuple of str
        How the names of modules begin that a traced function calls, beside those of this room.
    names : mapping of str to str
        What to write for a function, by its name.
    subject : str
        What a traced function computes with.
    functions, elementwise, matrix, product, sums : str
        What to write: functions of symbols, elementwise operations, products with a matrix, a
        product of two, and sums over units.
    """

    modules: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})
    subject: str = "symbols are vectors of one number a unit"
    functions: str = "functions of symbols"
    elementwise: str = "elementwise operations"
    matrix: str = "a linear map"
    product: str = "a product, a * b"
    sums: str = "np.sum(a), or np.mean(a)"


_thread = threading.local()
_NOBODY = Front()


def is_tracing() -> bool:
    """Return whether this thread traces a function."""
    return getattr(_thread, "front", _NOBODY) is not _NOBODY


@contextmanager
def tracing(front: Front) -> Iterator[None]:
    """Refuse, in this thread, what a traced function may not do with vectors, and others may."""
    _thread.front = front
    try:
        yield
    finally:
        _thread.front = _NOBODY


def refuse(what: str, instead: str, name: str = "") -> NoReturn:
    """Raise an error that says where a function does what cannot be traced, and what to write.

    `instead` is a text, or the name of one in :class:`Front`. `name` may be that of a function.
    """
    front = getattr(_thread, "front", _NOBODY)
    between = __package__, "numpy.", "torch.", *front.modules
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame = frame.f_back
    assert frame is not None, "nobody has called this"
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    instead = front.names.get(name, getattr(front, instead, instead))
    raise InputTypeError(
        f"{Path(path).name}, line {line}{f': {text!r}' if text else ''} has {what}, which cannot "
        f"be traced: {front.subject}; write {instead}"
    )

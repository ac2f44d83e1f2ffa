"""Classes that users derive from PyTorch's recurrent modules, with kernels as their base."""

from __future__ import annotations

import functools
import inspect
import itertools
from abc import ABC
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from ..recurrent import GRU, LSTM, RNN
from .kinds import Kind, plain_class, reduced

KINDS: dict[type[nn.RNNBase], type[nn.RNNBase]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}
# Python modules whose classes do not change a forward pass.
_LIBRARIES = ("abc", "typing", "builtins")


@functools.cache
def behind(kind: Any) -> Any:
    """Return a class derived from a user's class, whose ``super().forward`` runs the kernels.

    In its method resolution order, our class comes between the user's classes and PyTorch's. If
    that would change more than PyTorch's forward pass, return the reason.
    """
    plain = next((each for each in kind.__mro__ if each in KINDS), None)
    if plain is None:
        return "whose forward may differ"
    order = kind.__mro__[: kind.__mro__.index(plain)]
    theirs = [each for each in order if each.__module__ not in _LIBRARIES]
    names = set[str]().union(*map(vars, theirs))
    if "forward" in names and not any({"super", "forward"} <= used for used in _used(theirs)):
        return "whose forward may differ"
    for name in sorted(names & (_reached(plain) | {"__init_subclass__"})):
        return f"whose {name} may differ"
    ours = KINDS[plain]
    for name in sorted(names.union(*_used(theirs)) & _added(ours)):
        return f"which uses the name {name} otherwise"
    about = {"_plain": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
    about["__qualname__"] = kind.__qualname__
    if "__reduce_ex__" not in names:
        about["__reduce_ex__"] = _reduced
    try:
        return Kind(kind.__name__, (kind, ours), about)
    except TypeError:
        return "whose metaclass lets no other class stand behind it"


def _used(kinds: list[type]) -> Iterator[set[str]]:
    """Yield the names, and strings that may be names, in each function of some classes."""
    for kind in kinds:
        for value in vars(kind).values():
            for each in (value, *(getattr(value, name, None) for name in ("fget", "fset"))):
                function: Any = inspect.unwrap(getattr(each, "__func__", each))
                if inspect.isfunction(function):
                    yield _names_in(function.__code__)


def _names_in(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    texts = (each for each in code.co_consts if isinstance(each, str))
    return {*code.co_names, *code.co_freevars, *texts}.union(*map(_names_in, inner))


@functools.cache
def _reached(plain: Any) -> set[str]:
    """Return the names of the attributes that PyTorch's forward pass uses, without `forward`.

    Flattening of parameters is left out: it matters only on GPUs.
    """
    known = {*dir(plain), *plain.__constants__, "_flat_weights", "_flat_weights_names", "training"}
    found, left = {"__getattr__", "__getattribute__"}, ["forward"]
    while left:
        name = left.pop()
        found.add(name)
        code = getattr(getattr(plain, name, None), "__code__", None)
        left += [] if code is None else (set(code.co_names) & known) - found
    return found - {"forward", "flatten_parameters"}


def _added(ours: type[nn.RNNBase]) -> set[str]:
    """Return the names that our class adds to PyTorch's."""
    theirs = plain_class(ours)  # compared by identity: our class equals PyTorch's
    before = itertools.takewhile(lambda each: each is not theirs, ours.__mro__)
    added = set[str]().union(*map(vars, before))
    return {name for name in added - {*dir(theirs), *dir(ABC)} if not name.startswith("__")}


def _reduced(module: Any, protocol: Any) -> Any:
    """Return the reduced form for copies and files: with the user's class."""
    return reduced(module, protocol, _without_state)


def _without_state(kind: Any) -> Any:
    """Return an empty module, for a copy or a file to fill."""
    found = behind(kind)
    made: Any = kind if isinstance(found, str) else found
    return made.__new__(made)

"""What Python holds that a forward pass may read: attributes, closures, globals and generators."""

from __future__ import annotations

import contextvars
import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...capture.equations import NotCaptured
from ..capture.trace import FOLDERS

_Cached: type[Any] = type(functools.cache(len))
_MOST = 20_000
_STANDARD = str(Path(random.__file__).parent)
_NUMPY = str(Path(np.__file__).parent)
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Whose states are compared apart from others: each call of other code may change them.
_COMMON = tuple(getattr(each, "__self__", None) for each in (random.random, np.random.rand))
# Libraries whose objects without attributes stay as they are.
_FIXED = ("builtins", "operator", "_thread", "_abc", "pybind11_builtins", "torch", "numpy")
STATE = "_loops"


class Snapshot:
    """What an object holds now.

    Attributes
    ----------
    marks : list
        What equal states have in common. Objects in it that have no value are identities.
    kept : list
        These objects, so that no others get their identities.
    """

    def __init__(self, root: Any) -> None:
        self.marks: list[Any] = []
        self.kept: list[Any] = []
        self._seen: dict[int, int] = {}
        self._undo: list[Callable[[], Any]] = []
        stack = [root]
        while stack:
            if len(self.marks) > _MOST:
                raise NotCaptured("more objects in Python than are watched")
            stack += reversed([*self._mark(stack.pop())])

    def _mark(self, each: Any) -> Iterator[Any]:
        """Note an object, and yield those in it."""
        kind = type(each)
        self.marks.append(kind)
        if kind in _PLAIN:
            self.marks.append(each)
            return
        if id(each) in self._seen:
            self.marks.append(self._seen[id(each)])
            return
        self._seen[id(each)] = len(self._seen)
        self.kept.append(each)
        if any(each is one for one in _COMMON):
            return
        if isinstance(each, (dict, list, tuple, set, frozenset, deque)):
            yield from self._container(each)
            if not _is_library(type(each)):
                yield from self._inside(each)
        elif isinstance(each, np.ndarray):
            if each.nbytes > _MOST or each.dtype.hasobject:
                raise NotCaptured("large arrays of NumPy among attributes")
            own = each.copy()
            self.marks += [id(each), each.dtype, each.shape, own.tobytes()]
            self._undo.append(partial(np.copyto, each, own))
        elif isinstance(each, (np.random.Generator, np.random.RandomState)):
            bits: Any = each.bit_generator if isinstance(each, np.random.Generator) else each
            yield from self._generator(bits.__getstate__, bits.__setstate__)
        elif isinstance(each, random.Random):
            yield from self._generator(each.getstate, each.setstate)
        elif isinstance(each, torch.Generator):
            state = each.get_state()
            self.marks.append(bytes(state.tolist()))
            self._undo.append(lambda: each.set_state(state))
        elif hasattr(kind, "__next__"):
            raise NotCaptured(f"an iterator, {kind.__qualname__}, among attributes")
        else:
            self.marks.append(id(each))
            yield from self._inside(each)

    def _container(self, each: Any) -> Iterator[Any]:
        self.marks.append(len(each))
        if isinstance(each, dict):
            own = dict(each)
            self._undo.append(partial(_fill, each, each.update, own))
            for name, value in own.items():
                if name != STATE:
                    yield name
                    yield value
            return
        values = list(each)
        if isinstance(each, (list, deque)):
            self._undo.append(partial(_fill, each, each.extend, values))
        elif isinstance(each, set):
            self._undo.append(partial(_fill, each, each.update, values))
            values.sort(key=hash)
        yield from values

    def _generator(self, get: Any, put: Any) -> Iterator[Any]:
        state = get()
        self.marks.append(repr(state))
        self._undo.append(lambda: put(state))
        yield from ()

    def _held(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> Any:
        """Return what something holds, which is put back if it changes."""
        value = get()
        self._undo.append(lambda: get() is value or put(value))
        return value

    def _inside(self, each: Any) -> Iterator[Any]:
        """Yield what an object of no known kind holds."""
        kind: Any = type(each)
        if isinstance(each, types.FunctionType):
            yield vars(each)
            yield from self._of_function(each)
        elif isinstance(each, types.MethodType):
            yield from (each.__func__, each.__self__)
        elif isinstance(each, functools.partial):
            yield from (each.func, each.args, each.keywords)
        elif isinstance(each, (staticmethod, classmethod)):
            yield each.__func__
        elif isinstance(each, property):
            yield from (each.fget, each.fset)
        elif isinstance(each, type):
            yield from self._of_class(each)
        elif isinstance(each, types.CellType):
            yield self._held(partial(_contents, each), partial(setattr, each, "cell_contents"))
        elif isinstance(each, contextvars.ContextVar):
            yield self._held(partial(each.get, None), each.set)
        elif isinstance(each, weakref.ref):
            yield each()
        elif isinstance(each, types.MappingProxyType):
            yield dict(each)
        elif not isinstance(each, types.ModuleType):
            if isinstance(each, _Cached):
                # What a trace has put into it are tensors without numbers.
                self.marks += each.cache_info()[1:]
                self._undo.append(each.cache_clear)
            if hasattr(each, "__dict__"):
                yield vars(each)
            elif not _slots(kind) and _is_opaque(kind):
                raise NotCaptured(f"an attribute of {kind.__qualname__}, whose contents are hidden")
            else:  # a method of C has what it belongs to
                yield getattr(each, "__self__", None)
            for name in _slots(kind):
                yield self._held(partial(getattr, each, name, None), partial(setattr, each, name))
            yield kind

    def _of_class(self, kind: Any) -> Iterator[Any]:
        """Yield the methods and attributes of a class."""
        if _is_library(kind):
            return
        self._undo.append(partial(_without, kind, set(vars(kind))))
        for name in [*vars(kind)]:
            if not name.startswith("__") or isinstance(vars(kind)[name], types.FunctionType):
                yield name
                yield self._held(partial(vars(kind).get, name), partial(setattr, kind, name))
        yield from kind.__mro__[1:]

    def _of_function(self, function: Any) -> Iterator[Any]:
        """Yield what a function reads: what it closes over, its defaults, and globals."""
        path, names = _names(function.__code__)
        if path.startswith((*FOLDERS, _NUMPY)):
            return
        yield from (function.__code__, function.__closure__)
        yield from (function.__defaults__, function.__kwdefaults__)
        spaces: list[tuple[str, dict[str, Any]]] = [("", function.__globals__)]
        for space, own in spaces:  # those of modules are appended
            for name in names:
                if name not in own:
                    self._undo.append(partial(own.pop, name, None))
                    continue
                value = self._held(partial(own.get, name), partial(own.__setitem__, name))
                yield f"{space}{name}"
                if not isinstance(value, types.ModuleType):
                    yield value
                elif not (getattr(value, "__file__", None) or "").startswith((*FOLDERS, _NUMPY)):
                    inner = f"{value.__name__}.", vars(value)
                    if inner[0] not in [known for known, _ in spaces]:
                        spaces.append(inner)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the objects."""
        return [each for each in self.kept if isinstance(each, Tensor)]

    def restore(self) -> None:
        """Put back what was there."""
        for each in self._undo:
            each()


def _fill(each: Any, put: Callable[[Any], None], values: Any) -> None:
    each.clear()
    put(values)


def _without(kind: type, names: set[str]) -> None:
    """Delete the attributes of a class, but for some."""
    for name in set(vars(kind)) - names:
        delattr(kind, name)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> list[str]:
    owns = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for own in owns for name in ([own] if isinstance(own, str) else own)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


@functools.lru_cache(maxsize=4096)
def _is_opaque(kind: Any) -> bool:
    """Return whether objects without attributes may change, though they stay equal."""
    is_fixed = kind.__module__.partition(".")[0] in _FIXED
    return kind.__hash__ is None or (kind.__hash__ is object.__hash__ and not is_fixed)


@functools.lru_cache(maxsize=4096)
def _is_library(kind: type) -> bool:
    """Return whether a class is one that nobody changes."""
    first = kind.__module__.partition(".")[0]
    return first in sys.stdlib_module_names or first in ("torch", "numpy", "sparsescan")


def is_standard(path: str) -> bool:
    """Return whether a file is one of Python's standard library."""
    return path.startswith((_STANDARD, "<frozen ")) and "site-packages" not in path


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, tuple[str, ...]]:
    """Return the file of a function, and all names that it may look up."""
    names = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names.update(_names(each)[1])
    path = code.co_filename
    if is_standard(path):
        names = set()
    return path, tuple(sorted(names))

"""Classes that replace PyTorch's classes, and are found wherever those are looked up."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


class Kind(ABCMeta):
    """The metaclass of classes that replace others and compare equal to them.

    A module of such a class is an instance of the replaced class. Tables that use the exact class
    as a key, such as those of PyTorch's quantisation or of validators, find it too. The metaclass
    is an `ABCMeta`, since users' classes may be abstract.
    """

    @property
    def __wrapped__(cls) -> Any:
        """The replaced class; ``torch.jit.script`` reads its source."""
        if "_plain" not in vars(cls):
            raise AttributeError
        return plain_class(cls)

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and plain_class(cls) is plain_class(other)

    def __hash__(cls) -> int:
        return type.__hash__(plain_class(cls))

    # `ABCMeta` caches answers by class, but equal classes have different answers here.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__


def plain_class(kind: type) -> type[Any]:
    """Return the class that a class replaces, or the class itself if it replaces none."""
    plain: type[Any] = vars(kind).get("_plain", kind)
    return plain


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Set the class of a module, even if its own class overrides the setting of attributes."""
    object.__setattr__(module, "__class__", kind)


def base_of(module: nn.Module) -> Any:
    """Return the class that a module had before its weights were parametrised."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def with_base(module: nn.Module, base: Any) -> Any:
    """Return the class of a module with another base.

    PyTorch makes a class for each parametrised module; its properties compute weights.
    """
    if not is_parametrized(module):
        return base
    kind, left_out = type(module), ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")
    about = {name: each for name, each in vars(kind).items() if name not in left_out}
    return type(base)(kind.__name__, (base,), about)


def reduced(module: Any, protocol: Any, make: Callable[[Any], Any]) -> Any:
    """Return the reduced form of a module for copies and files: with the user's class.

    ``make(kind)`` returns a module that a copy, or a file, is about to fill.
    """
    kind = type(module)
    found: Any = object.__reduce_ex__(module, max(int(protocol), 2))
    function, arguments, *rest = found
    if function is copyreg.__newobj__ and arguments == (kind,) and plain_class(kind) is not kind:  # type: ignore[attr-defined]
        return make, (plain_class(kind),), *rest
    return function, arguments, *rest

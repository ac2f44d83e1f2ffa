"""Classes that replace PyTorch's classes, and are found wherever those are looked up."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


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

"""Classes of modules that stand in the place of others, and are found where these are."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


class Kind(ABCMeta):
    """The type of classes that stand in the place of others, and are equal to them.

    A module of such a class is an instance of the class that it replaces, and is also found in
    tables by its exact class, such as those of PyTorch's quantisation or of validators. It is an
    `ABCMeta`, since classes of users may be abstract.
    """

    @property
    def __wrapped__(cls) -> Any:
        """The class that is replaced, whose source ``torch.jit.script`` reads."""
        if "_plain" not in vars(cls):
            raise AttributeError
        return plain_class(cls)

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and plain_class(cls) is plain_class(other)

    def __hash__(cls) -> int:
        return type.__hash__(plain_class(cls))

    # An `ABCMeta` remembers answers for classes, and those of equal classes differ here.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__


def plain_class(kind: type) -> type[Any]:
    """Return the class in whose place a class stands; that class itself if it stands in none."""
    plain: type[Any] = vars(kind).get("_plain", kind)
    return plain

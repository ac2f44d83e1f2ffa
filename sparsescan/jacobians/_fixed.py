"""Layers whose arguments stay as they were checked."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

from ..errors import InputError
from ._parameters import Parameter

__all__ = ["Fixed"]


class _Closing(ABCMeta):
    """Classes whose objects know that their construction, subclasses' included, is over."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        vars(made)["_made"] = True
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``, which :meth:`__call__` would hide from help."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class Fixed(metaclass=_Closing):
    """Public attributes that cannot be set after construction, except parameters and the like.

    Patterns are computed once and kernels check no bounds, so nothing that was checked may change.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self) and not name.startswith("_"):
            found = getattr(type(self), name, None)
            if not isinstance(found, Parameter) and getattr(found, "fset", None) is None:
                raise InputError(
                    f"{type(self).__name__}.{name} cannot be changed after the layer was made: "
                    "make a new one"
                )
        super().__setattr__(name, value)

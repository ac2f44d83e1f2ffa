"""Layers whose arguments stay as they were checked."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any, TypeVar

from ..errors import Allocating, InputError
from .parametrised import Parameter

_T = TypeVar("_T")


class _Closing(ABCMeta):
    """Metaclass that marks an object once its construction, subclasses' included, is over."""

    # With this type, checkers look up the arguments of `__init__`.
    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        with Allocating(f"a {cls.__name__}"):
            layer: _T = super().__call__(*args, **kwargs)  # type: ignore[misc]
        vars(layer)["_made"] = True
        return layer

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of ``__init__``, which :meth:`__call__` would hide from help."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class Fixed(metaclass=_Closing):
    """Objects whose public attributes, except parameters and the like, cannot be set later.

    Patterns are computed once and kernels check no bounds, so nothing that was checked may change.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self) and not name.startswith("_"):
            attribute = getattr(type(self), name, None)
            if not isinstance(attribute, Parameter) and getattr(attribute, "fset", None) is None:
                raise InputError(
                    f"{type(self).__name__}.{name} cannot be changed after the layer was made: "
                    "make a new one"
                )
        super().__setattr__(name, value)

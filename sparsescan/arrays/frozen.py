"""Objects that stay as they were checked."""

from __future__ import annotations

from typing import Any

from ..errors import InputError


class Frozen:
    """Keep public attributes as they were checked: kernels trust them, and check no bounds."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise InputError(f"{type(self).__name__}.{name} cannot be changed: make a new one")
        super().__setattr__(name, value)

    def _set(self, **values: Any) -> None:
        """Set public attributes, while the object is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

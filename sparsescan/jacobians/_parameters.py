"""Parameters of layers: arrays of fixed shape, that the caller may share, and masks over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .._arrays import Constant, check_array
from ..containers import check_dtype
from ..errors import InputError, InputTypeError
from ..pattern import check_host

__all__ = ["Parameter", "Parametrised", "check_mask", "initial", "masked"]

Array = Any
Shape = tuple[int, ...]


class Parameter:
    """An attribute that is an array of fixed shape: drawn when first read, or set by the caller.

    The owner, a :class:`Parametrised`, says what the shape is and how it is drawn. An array that is
    set is kept, not copied, so that what an optimiser does to it in place is seen.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        if self._name not in layer._shapes:
            return None
        if self._name not in layer._arrays:
            layer._arrays[self._name] = layer._draw(self._name)
        return layer._arrays[self._name]

    def __set__(self, layer: Any, value: Any) -> None:
        name = f"{type(layer).__name__}.{self._name}"
        shape = layer._shapes.get(self._name)
        if shape is None:
            raise InputError(f"{name} cannot be set: the layer was made without it")
        array = check_array(name, value)
        if array.shape != shape:
            raise InputError(f"{name} is set to an array of shape {array.shape}; expected {shape}")
        layer._arrays[self._name] = array


class Parametrised:
    """Parameters by name: their shapes, and the arrays there are."""

    def _set_parameters(
        self,
        shapes: dict[str, Shape | None],
        draw: Callable[[str, Shape], Array],
    ) -> None:
        """Declare the parameters, except those whose shape is None, and how to draw one."""
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self._arrays: dict[str, Array] = {}
        self._drawer = draw

    def _draw(self, name: str) -> Array:
        return self._drawer(name, self._shapes[name])

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied."""
        return {name: getattr(self, name) for name in self._shapes}


def initial(
    bound: float, dtype: DTypeLike, rng: np.random.Generator | int | None
) -> Callable[[str, Shape], Array]:
    """Draws from the uniform distribution on ``[-bound, bound]``, as PyTorch initialises."""
    checked = check_dtype(dtype)
    generator = np.random.default_rng(rng)
    return lambda name, shape: generator.uniform(-bound, bound, shape).astype(checked)


def check_mask(name: str, mask: ArrayLike | None, shape: Shape) -> Constant | None:
    """A mask over weights of this shape, copied, or an error that names it; None for None."""
    if mask is None:
        return None
    check_host(name, mask)
    array = np.array(mask)
    if array.dtype != np.bool_:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected bool")
    if array.shape != shape:
        raise InputError(f"{name} has shape {array.shape}; expected {shape}, the weight's")
    return Constant(array)


def masked(xp: Any, array: Array, mask: Constant | None) -> Array:
    """`array`, 0 where the mask says that a weight is pruned."""
    return array if mask is None else xp.where(mask.on(xp), array, array.dtype.type(0))

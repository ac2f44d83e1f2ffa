"""Parameters of layers: arrays of fixed shape, that the caller may share, and masks over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .._arrays import Constant, check_array
from ..containers import check_dtype
from ..errors import InputError, InputTypeError
from ..pattern import check_host

__all__ = ["Initial", "Parameter", "Parametrised", "check_mask", "initial", "masked"]

Array = Any
Shape = tuple[int, ...]
# What says, for a parameter's name and shape, how it is drawn when it is first read. The latter is
# kept in the layer, so it can be pickled.
Initial = Callable[[str, Shape], Callable[[], Array]]


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
        name, attributes = self._name, layer.__dict__
        array = attributes.get(name)
        shapes = attributes["_shapes"]
        if array is None:
            if name not in shapes:
                return None
            # Of threads that draw at once, all get the same array.
            array = attributes.setdefault(name, layer._draws[name]())
        # Whoever shares the array may have reshaped it in place, and kernels check no bounds.
        if array.shape != shapes[name]:
            raise InputError(
                f"{type(layer).__name__}.{name} has become an array of shape {array.shape}; "
                f"expected {shapes[name]}"
            )
        return array

    def __set__(self, layer: Any, value: Any) -> None:
        name = f"{type(layer).__name__}.{self._name}"
        shape = layer._shapes.get(self._name)
        if shape is None:
            raise InputError(f"{name} cannot be set: the layer was made without it")
        array = check_array(name, value)
        if array.shape != shape:
            raise InputError(f"{name} is set to an array of shape {array.shape}; expected {shape}")
        vars(layer)[self._name] = array


class Parametrised:
    """Parameters by name: their shapes, and what draws them."""

    def _set_parameters(self, shapes: dict[str, Shape | None], initial: Initial) -> None:
        """Declare the parameters, except those whose shape is None."""
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self._draws = {name: initial(name, shape) for name, shape in self._shapes.items()}

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied."""
        return {name: getattr(self, name) for name in self._shapes}


def initial(bound: float, dtype: DTypeLike, rng: np.random.Generator | int | None) -> Initial:
    """Initial parameters from the uniform distribution on ``[-bound, bound]``, as in PyTorch.

    Each has a seed of its own, so that it does not matter which of them is drawn first.
    """
    checked = check_dtype(dtype)
    expected = (
        f"rng is {rng!r}; expected a numpy.random.Generator, an integer of at least 0 or None"
    )
    try:
        generator = np.random.default_rng(rng)
    except TypeError:
        raise InputTypeError(expected) from None
    except ValueError:
        raise InputError(expected) from None
    return lambda name, shape: partial(
        _uniform, int(generator.integers(1 << 63)), bound, shape, checked
    )


def _uniform(seed: int, bound: float, shape: Shape, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(seed).uniform(-bound, bound, shape).astype(dtype)


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

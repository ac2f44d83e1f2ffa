"""Parameters of layers: arrays of fixed shape that the caller may share, and masks over them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..arrays.arrays import Mirrored, check_array, check_memory, host_array
from ..chains.containers import check_dtype
from ..checks import check_has_shape
from ..errors import Allocating, InputError, InputTypeError, short
from ..symbolic.pattern import check_host

Array = Any
Shape = tuple[int, ...]
Layer = TypeVar("Layer")
# From a parameter's name and shape to a function that draws it when it is first read. The layer
# keeps that function, so it can be pickled.
Initial = Callable[[str, Shape], Callable[[], Array]]


class Parameter:
    """An attribute that is an array of fixed shape: drawn when first read, or set by the caller.

    The owner, a :class:`Parametrised`, holds its shape and draws it. An array that is set is kept,
    not copied, so that changes which an optimiser makes in place are seen.
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
            what = f"{_title(layer, name)}, of shape {shapes[name]},"
            # It is drawn in float64.
            check_memory(what, 8 * math.prod(shapes[name]))
            # Threads that draw at once all get the same array.
            with Allocating(what):
                array = attributes.setdefault(name, layer._draws[name]())
        # Whoever shares the array may have reshaped it in place, and kernels check no bounds.
        _check_kept(layer, name, array, shapes[name])
        return array

    def __set__(self, layer: Any, value: Any) -> None:
        name, shape = _title(layer, self._name), layer._shapes.get(self._name)
        if shape is None:
            raise InputError(f"{name} cannot be set: the layer was made without it")
        array = check_array(name, value)
        if array.shape != shape:
            raise InputError(f"{name} is set to an array of shape {array.shape}; expected {shape}")
        vars(layer)[self._name] = array
        vars(layer)["_last_set"] = object()


def last_set(layer: Any) -> object:
    """Return an object that is another one once a parameter of a layer has been set."""
    return layer.__dict__.get("_last_set")


def _title(layer: Any, name: str) -> str:
    """Return what errors call a parameter: by its layer, or by the network it is part of."""
    titles: dict[str, str] = vars(layer).get("_titles", {})
    return titles.get(name, f"{type(layer).__name__}.{name}")


class Parametrised:
    """Parameters by name: their shapes, and functions that draw them."""

    def declare_parameters(
        self,
        shapes: Mapping[str, Shape | None],
        initial: Initial,
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Declare the parameters, except those whose shape is None.

        Those in `values` begin with one number.
        """
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self._draws = {name: initial(name, shape) for name, shape in self._shapes.items()}
        for name, value in (values or {}).items():
            draw = self._draws[name]
            self._draws[name] = partial(_filled, draw, value)

    def read_parameter(self, name: str) -> Array:
        """Return a parameter as an array whose shape nobody else can change, for a kernel."""
        array = getattr(self, name)
        if type(array) is np.ndarray:
            array = array.view()
            _check_kept(self, name, array, self._shapes[name])
        return array

    def share_parameters(self, part: Layer, channels: slice) -> Layer:
        """Set the parameters of `part` to views of some channels of these; return it."""
        for name in self._shapes:
            setattr(part, name, getattr(self, name)[channels])
        return part

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters by their names."""
        return dict(self._shapes)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self._shapes)

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied."""
        return {name: getattr(self, name) for name in self._shapes}


class Weighted(Parametrised):
    """A weight, which may be pruned, and a bias for each output channel."""

    weight = Parameter()
    bias = Parameter()
    _mask: Mirrored | None

    def declare_weight(
        self, shape: Shape, biases: int | None, mask: ArrayLike | None, dtype: DTypeLike, rng: Any
    ) -> None:
        """Declare a weight with a mask, and so many biases, or none; the fan-in bounds both."""
        self._mask = check_mask("weight_mask", mask, shape)
        self.declare_parameters(
            {"weight": shape, "bias": None if biases is None else (biases,)},
            initial(1 / math.sqrt(math.prod(shape[1:])), dtype, rng),
        )

    def kept_weights(self) -> Array:
        """Return which weights are not pruned: an array of bool of the weight's shape."""
        if self._mask is None:
            return np.ones(self._shapes["weight"], bool)
        kept: Array = self._mask.on(np)
        return kept

    def kept_weight(self, xp: Any) -> Array:
        """Return the weight, 0 where it is pruned."""
        return masked(xp, self.weight, self._mask)

    def weight_grads(
        self, xp: Any, weight: Array, grad_y: Array, axes: tuple[int, ...]
    ) -> dict[str, Array]:
        """Return the gradients of the parameters.

        `weight` is the gradient of the weight in any shape, as if nothing were pruned; the gradient
        of the bias is the sum of `grad_y` over some axes.
        """
        grads = {"weight": masked(xp, weight.reshape(self.weight.shape), self._mask)}
        return grads if self.bias is None else grads | {"bias": grad_y.sum(axis=axes)}


def _check_kept(layer: Any, name: str, array: Array, shape: Shape) -> None:
    """Raise unless a parameter still has the shape and a dtype that it may have."""
    if array.shape != shape:
        raise InputError(
            f"{_title(layer, name)} has become an array of shape {array.shape}; expected {shape}"
        )
    if array.dtype.kind != "f":
        raise InputError(
            f"{_title(layer, name)} has become an array of dtype {array.dtype}; expected a float"
        )


def initial(bound: float, dtype: DTypeLike, rng: np.random.Generator | int | None) -> Initial:
    """Draw parameters from the uniform distribution on ``[-bound, bound]``, as PyTorch does.

    Each has a seed of its own, so that it does not matter which of them is drawn first.
    """
    checked = check_dtype(dtype)
    expected = (
        f"rng is {short(rng)}; expected a numpy.random.Generator, an integer of at least 0 or None"
    )
    try:
        # NumPy would take nested lists, too, and crash if they are deep.
        seed = rng if rng is None or isinstance(rng, np.random.Generator) else operator.index(rng)
    except Exception:  # a caller's own class may raise any
        raise InputTypeError(expected) from None
    if isinstance(seed, int) and seed < 0:
        raise InputError(expected)
    generator = np.random.default_rng(seed)
    return lambda name, shape: partial(
        _uniform, int(generator.integers(1 << 63)), bound, shape, checked
    )


def _filled(draw: Callable[[], Array], value: float) -> Array:
    """Return an array like one that is drawn, filled with a number."""
    return np.full_like(draw(), value)


def _uniform(seed: int, bound: float, shape: Shape, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(seed).uniform(-bound, bound, shape).astype(dtype)


def check_mask(name: str, mask: ArrayLike | None, shape: Shape) -> Mirrored | None:
    """Return a copy of a mask over weights of this shape, or raise an error that names it."""
    if mask is None:
        return None
    check_host(name, mask)
    array = host_array(name, mask)
    if array.dtype != np.bool_:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected bool")
    check_has_shape(name, array, shape, ", the weight's")
    return Mirrored(np.array(array))


def masked(xp: Any, array: Array, mask: Mirrored | None) -> Array:
    """Return `array`, 0 where the mask says that a weight is pruned."""
    return array if mask is None else xp.where(mask.on(xp), array, array.dtype.type(0))

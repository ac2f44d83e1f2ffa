"""Further inputs of a step, as columns after the input: the caller's arrays and random masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, InputTypeError, short
from .definition import Given, Mask, StepNumber, further_of

Array = Any
Shape = tuple[int, ...]
# Returns an array of a shape whose numbers are 0 with a probability, and otherwise a value.
Draw = Callable[[Mask, float, Shape], Array]


class Further(NamedTuple):
    """A further input of one direction of one layer.

    Attributes
    ----------
    name : str
        Its name in calls, formed like a parameter's name.
    declared : Given
        Its declaration in the class of cells.
    p : float
        The probability of a :class:`.Mask`.
    """

    name: str
    declared: Given
    p: float


def further_inputs(
    cell: type,
    options: Mapping[str, Any],
    name_of: Callable[[str, int, int], str],
    layers: int = 1,
    directions: int = 1,
) -> list[Further]:
    """Return the further inputs of a network, in the order of their columns."""
    return [
        Further(name_of(name, layer, back), each, options.get(name, 0.0))
        for layer in range(layers)
        for back in range(directions)
        for name, each in further_of(cell).items()
    ]


def of_network(network: Any) -> list[Further]:
    """Return the further inputs of a network, or of a single cell."""
    one, shape = network.cells[0][0], (len(network.cells), len(network.cells[0]))
    return further_inputs(type(one), one.options, network.name_of, *shape)


def check_known(inputs: Sequence[Further], given: Mapping[str, Any]) -> None:
    """Raise if a call passes an array that is no further input."""
    names = [each.name for each in inputs]
    if unknown := [name for name in given if name not in names]:
        raise InputTypeError(
            f"{unknown[0]} is no argument of this call; expected further inputs of the step among: "
            f"{', '.join(names) or 'none'}"
        )


def columns_of(
    xp: Any,
    like: Array,
    inputs: Sequence[Further],
    given: Mapping[str, Array],
    shape: Shape,
    draw: Draw | None,
    time: int = 0,
) -> list[Array]:
    """Return the further inputs of a call, as columns to append to its input.

    Parameters
    ----------
    xp : Functions
        The functions of a library of arrays.
    like : array
        An array whose dtype and device the masks get.
    inputs : sequence of Further
        The further inputs.
    given : dict of str to array
        The arrays of the call.
    shape : tuple of int
        The shape of each further input: the input's, with units in the last axis.
    draw : callable or None
        Draws masks; None means their expectation.
    time : int, default 0
        The axis of steps; negative if one axis joins steps and samples.
    """
    found = []
    for name, declared, p in inputs:
        array = given.get(name)
        if array is not None:
            if not _broadcasts(tuple(array.shape), shape):
                raise InputError(
                    f"{name} has shape {tuple(array.shape)}; expected one that broadcasts to "
                    f"{tuple(shape)}"
                )
        elif isinstance(declared, StepNumber) and time >= 0:
            array = xp.filled(like, shape, 1.0).cumsum(time) - 1
        elif not isinstance(declared, Mask):
            raise InputError(
                f"{name} is not given; expected an array that broadcasts to {tuple(shape)}, since "
                "the step reads it"
            )
        elif draw is None:
            array = xp.filled(like, shape, declared.values(p)[1])
        else:
            once = declared.per == "sequence" and time >= 0
            own = (*shape[:time], 1, *shape[time + 1 :]) if once else shape
            array = draw(declared, p, own)
        found.append(xp.broadcast_to(array, shape))
    return found


def _broadcasts(given: Shape, shape: Shape) -> bool:
    pairs = zip(reversed(given), reversed(shape), strict=False)
    return len(given) <= len(shape) and all(a in (1, b) for a, b in pairs)


class _Functions:
    """Functions of NumPy."""

    broadcast_to = staticmethod(np.broadcast_to)

    @staticmethod
    def filled(like: Array, shape: Shape, value: float) -> Array:
        """Return an array of one number."""
        return np.full(shape, value, like.dtype)


def draw_with(rng: Any, like: Array) -> Draw | None:
    """Return a function that draws masks by NumPy in an array's dtype; None without a source."""
    if rng is None:
        return None
    try:
        source = np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"rng is {short(rng)}; expected a Generator or a seed") from error

    def draw(mask: Mask, p: float, shape: Shape) -> Array:
        return _kept(source, p, shape) * like.dtype.type(mask.values(p)[0])

    return draw


def _kept(source: np.random.Generator, p: float, shape: Shape) -> Array:
    """Return which numbers are kept. A random byte decides nearly all, a random number the rest."""
    whole, rest = divmod(256 * p, 1)
    drawn = source.integers(0, 256, shape, np.uint8)
    kept = np.asarray(drawn > int(whole))
    undecided = np.flatnonzero(drawn == int(whole))
    kept.reshape(-1)[undecided] = source.random(len(undecided)) >= rest
    return kept


def widened(
    inputs: Sequence[Further],
    x: Array,
    units: int,
    given: Mapping[str, Array],
    rng: Any,
    time: int = 0,
) -> Array:
    """Return a NumPy input with further inputs appended."""
    shape = *x.shape[:-1], units
    columns = columns_of(_Functions, x, inputs, given, shape, draw_with(rng, x), time)
    return np.concatenate([x, *columns], -1)


def filled_up(cell: Any, x: Array, time: int = -1) -> Array:
    """Return an input of one cell with all columns; missing masks are their expectation.

    Missing step numbers need an axis of time.
    """
    names = further_of(type(cell))
    if not names or x.ndim == 0 or x.shape[-1] != cell.input_size:
        return x
    inputs = further_inputs(type(cell), cell.options, lambda name, *_: name)
    return widened(inputs, x, cell.hidden_size, {}, None, time)


def parted(
    inputs: Sequence[Further], grad: Array, size: int, shapes: Mapping[str, Shape]
) -> tuple[Array, dict[str, Array]]:
    """Return the gradients in an input, and in the further inputs, in their shapes."""
    units = (grad.shape[-1] - size) // max(1, len(inputs))
    found = {}
    for k, each in enumerate(inputs):
        if each.name in shapes:
            own = grad[..., size + k * units : size + (k + 1) * units]
            found[each.name] = _summed(own, shapes[each.name])
    return np.ascontiguousarray(grad[..., :size]), found


def _summed(grad: Array, shape: Shape) -> Array:
    """Return the sum over the axes along which an array of a shape was broadcast."""
    whole = (1,) * (grad.ndim - len(shape)) + shape
    axes = tuple(k for k, (a, b) in enumerate(zip(whole, grad.shape, strict=True)) if a != b)
    return grad.sum(axes, keepdims=True).reshape(shape)

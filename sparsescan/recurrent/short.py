"""States of fewer numbers than units: what calls have of them, and kernels, with zeros behind."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .definition import Input, declared, sizes_of, states_of

Array = Any


def filled(xp: Any, array: Array, sizes: Sequence[int], units: int) -> Array:
    """Return parts along the last axis, of some sizes, with zeros behind each up to all units."""
    parts, begin = [], 0
    for size in sizes:
        parts.append(array[..., begin : begin + size])
        zeros = xp.zeros_like(array[..., :1])
        parts.append(xp.broadcast_to(zeros, (*array.shape[:-1], units - size)))
        begin += size
    return xp.concatenate(parts, -1)


def cut(xp: Any, array: Array, sizes: Sequence[int], units: int) -> Array:
    """Return the first numbers of each of some parts along the last axis, which have all units."""
    parts = [array[..., k * units : k * units + size] for k, size in enumerate(sizes)]
    return xp.concatenate(parts, -1)


@functools.cache
def whole_class(cell: Any) -> Any:
    """Return a class of cells as kernels know it: all its states have as many numbers as units."""
    names = [each.name for each in states_of(cell).values()]
    return type(cell.__name__, (cell,), dict.fromkeys(names)) if names else cell


class Short:
    """A network with states that are shorter, and the network that kernels run for it.

    Attributes
    ----------
    sizes : list of int
        How many numbers each state of a cell has.
    units : int
        How many kernels have.
    network
        The network of kernels, whose layers read outputs of all units.
    """

    def __init__(self, network: Any) -> None:
        one = network.cells[0][0]
        self.units, self.sizes = one.hidden_size, sizes_of(type(one), one.options, one.hidden_size)
        self._columns = [self.sizes[0]] * len(network.cells[0])
        # Matrices that read the outputs of a layer below.
        inputs = [name for name, each in declared(type(one)).items() if isinstance(each, Input)]
        self._wide = {
            network.name_of(name, layer, back)
            for layer in range(1, len(network.cells))
            for back in range(len(self._columns))
            for name in inputs
        }
        self.network = _Whole(network, self)

    def params(self, xp: Any, params: Mapping[str, Array], *, back: bool = False) -> dict[str, Any]:
        """Return the parameters of kernels; `back`, those of calls, or their gradients."""
        change = cut if back else filled
        return {
            name: change(xp, each, self._columns, self.units) if name in self._wide else each
            for name, each in params.items()
        }

    def outputs(self, states: bool | str) -> list[int]:
        """Return the sizes of the parts of outputs, which are of `return_states`."""
        if states == "layers":
            return self.sizes
        some = self.sizes if states else self.sizes[:1]
        return [size for size in some for _ in self._columns]


class _Whole:
    """The network that kernels run in the place of another one, with its names of parameters."""

    def __init__(self, network: Any, short: Short) -> None:
        self.input_size, self.name_of = network.input_size, network.name_of
        directions = len(network.cells[0])
        layers: list[Any] = []
        for layer, cells in enumerate(network.cells):
            width = directions * short.units if layer else network.input_size
            own = []
            for back, cell in enumerate(cells):
                names = {name: network.name_of(name, layer, back) for name in cell.masks}
                kept = {names[k]: mask.on(np) for k, mask in cell.masks.items() if mask is not None}
                whole = short.params(np, kept)
                masks = {f"{name}_mask": whole.get(names[name]) for name in names}
                about = width, short.units, cell.bias
                kind: Any = type(cell)
                own.append(whole_class(kind)(*about, rng=0, **cell.options, **masks))
            layers.append(tuple(own))
        self.cells = tuple(layers)
        self.state_size = self.cells[0][0].state_size

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, of the shapes that kernels read."""
        return {
            self.name_of(name, layer, back): each
            for layer, cells in enumerate(self.cells)
            for back, cell in enumerate(cells)
            for name, each in cell.params.items()
        }


def short_of(network: Any) -> Short | None:
    """Return what is shorter in a network; None if all states have as many numbers as units."""
    one = network.cells[0][0]
    if not states_of(type(one)):
        return None
    sizes = sizes_of(type(one), one.options, one.hidden_size)
    return Short(network) if min(sizes) < one.hidden_size else None

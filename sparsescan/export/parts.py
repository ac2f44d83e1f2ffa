"""The parts of a model, one after the other: recurrent networks, dense layers and functions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from ..graph.operations import Node, symbol
from ..jacobians import Sequential
from ..recurrent import Cell, Recurrent
from ..recurrent.definition import Mask, begins_of
from ..recurrent.further import of_network
from ..recurrent.heads import parts_of
from ..recurrent.initial import initial_states
from ..recurrent.jacobian import Equations
from ..recurrent.program import CellProgram, analyse
from ..recurrent.short import short_of
from ..recurrent.step import OneCell
from ..recurrent.stream_parts import FUNCTIONS, IGNORED, check_function, read_own, title_of

Array: TypeAlias = NDArray[np.float64]


class Product(NamedTuple):
    """A product of an argument with a matrix for each head, which is added to a slot.

    Attributes
    ----------
    slot : int
        The first slot; rows of several slots are one below the other.
    argument : Node
        What is multiplied.
    weights : ndarray, shape (heads, columns, rows)
        The transposed matrices.
    """

    slot: int
    argument: Node
    weights: Array


class Step(NamedTuple):
    """A step of a cell, or a function of a vector, with its numbers.

    Attributes
    ----------
    program : CellProgram
        What is computed; a function changes its only state.
    inputs, units : int
        How many numbers there are in an input, and in a state.
    products : list of Product
        What is multiplied, reductions apart.
    biases : ndarray, shape (slots, units)
        What sums begin with.
    rows : list of ndarray
        The parameters that elementwise operations read.
    further : tuple of float or int
        For each further input its number, or its place among what a call gives.
    initial : ndarray or None
        The initial states one after the other; None for zeros.
    """

    program: CellProgram
    inputs: int
    units: int
    products: list[Product]
    biases: Array
    rows: list[Array]
    further: tuple[float | int, ...] = ()
    initial: Array | None = None

    @property
    def is_given(self) -> bool:
        """Whether it reads what a call gives."""
        return any(isinstance(each, int) for each in self.further)


class Layer(NamedTuple):
    """A layer of cells.

    Attributes
    ----------
    steps : tuple of Step
        A step for each direction, the one that runs forward in time first.
    size : int
        How many numbers the outputs of a direction have, the first ones of its states.
    """

    steps: tuple[Step, ...]
    size: int

    @property
    def outputs(self) -> int:
        """How many numbers it returns."""
        return self.size * len(self.steps)


class Dense(NamedTuple):
    """A product with a matrix, and a bias."""

    weights: Array
    bias: Array

    @property
    def outputs(self) -> int:
        """How many numbers it returns."""
        return len(self.bias)


class Function(NamedTuple):
    """A function of a vector, in place."""

    step: Step

    @property
    def outputs(self) -> int:
        """How many numbers it returns."""
        return self.step.units


Part: TypeAlias = Layer | Dense | Function


class Model(NamedTuple):
    """A model as a chain of parts.

    Attributes
    ----------
    inputs : int
        How many numbers an input has.
    given : int
        How many of these, the last ones, are further inputs of steps.
    parts : list of Part
        The parts.
    dtype : numpy.dtype
        That of the parameters.
    """

    inputs: int
    given: int
    parts: list[Part]
    dtype: np.dtype[Any]


def read(model: Any) -> Model:
    """Return the parts of a model; see :func:`.export.c` for what it may be."""
    parts: list[Part] = []
    dtypes: list[Any] = []
    inputs = width = given = 0
    for each in _flat(model):
        title = title_of(each)
        if isinstance(each, Cell | Recurrent):
            own_width, given, own, params = _network_parts(each, given)
        elif title == "Linear":
            weights, bias = _array(each, "weight"), _array(each, "bias")
            own_width, params = weights.shape[1], (weights,)
            bias = np.zeros(len(weights)) if bias is None else bias
            own = [Dense(weights.astype(np.float64), bias.astype(np.float64))]
        elif title in IGNORED:
            continue
        elif title in FUNCTIONS:
            own_width, own, params = width, [_function(each, width)], ()
        else:
            raise InputTypeError(
                f"network has {short(each)}; expected a cell, a network of cells, a module of one, "
                f"Linear, {', '.join(sorted([*FUNCTIONS, *IGNORED]))}, or a sequence of these"
            )
        if width not in (0, own_width) or own_width == 0:
            raise InputError(
                f"network has {short(each)} behind {width or 'no'} outputs; expected "
                f"{own_width or 'a layer before it'}"
            )
        inputs = own_width if not parts else inputs
        parts += own
        width = parts[-1].outputs
        dtypes += [param.dtype for param in params]
    if not parts:
        raise InputError(f"network is {short(model)}; expected at least one layer")
    return Model(inputs + given, given, parts, np.result_type(*(dtypes or [np.float32])))


def _flat(model: Any) -> Iterable[Any]:
    """Yield the networks and layers of a model, those of PyTorch as ours."""
    torch = sys.modules.get("torch")
    is_sequence = isinstance(model, list | tuple)
    if torch is not None and isinstance(model, torch.nn.Module):
        from ..torch.networks import as_network

        model = as_network(model)
        is_sequence = isinstance(model, torch.nn.Sequential)
    elif isinstance(model, Sequential):
        model, is_sequence = model.ops, True
    if not is_sequence:
        yield model
        return
    for each in model:
        yield from _flat(each)


def _array(layer: Any, name: str) -> Any:
    """Return a parameter of a layer of PyTorch or ours."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(layer, torch.nn.Module):
        from ..torch.networks import array_of

        return array_of(layer, name)
    return read_own(layer, name)


def _network_parts(network: Any, given: int) -> tuple[int, int, list[Part], Iterable[Any]]:
    """Return the width, the layers and the parameters of a network or a cell.

    Returns how many numbers are given to it and those before, too.
    """
    net = OneCell(network) if isinstance(network, Cell) else network
    short, size = short_of(net), net.cells[0][0].hidden_size
    if short is not None:
        params, net, size = short.params(np, network.params), short.network, short.sizes[0]
        for layer, cells in enumerate(net.cells):
            for back, cell in enumerate(cells):
                for name in cell.params:
                    setattr(cell, name, params[net.name_of(name, layer, back)])
    fixed = iter(
        each.declared.values(each.p)[1] if isinstance(each.declared, Mask) else None
        for each in of_network(net)
    )
    layers = list[Part]()
    for cells in net.cells:
        steps = []
        for cell in cells:
            further = []
            for value in [next(fixed) for _ in cell.program.further_grads]:
                further.append(given if value is None else float(value))
                given += cell.hidden_size * (value is None)
            steps.append(_step(cell, tuple(further)))
        layers.append(Layer(tuple(steps), cell.hidden_size))
    layers[-1] = Layer(tuple(steps), size)
    return net.input_size, given, layers, network.params.values()


def _step(cell: Any, further: tuple[float | int, ...]) -> Step:
    equations, program, units = Equations(cell), cell.program, cell.hidden_size
    weights = equations.weights(np, np.dtype(np.float64), cell.params)
    products: list[Product] = []
    for k, slot in enumerate(program.slots):
        whole: dict[tuple[Node, tuple[int, int, int]], Array] = {}
        for matrix, gate, is_transposed, argument in slot.weighed:
            array = weights.matrices[matrix, gate, is_transposed]
            heads, rows, cols = program.partial.get(matrix, (1, 0, 0))
            sizes = (heads, cols, rows) if is_transposed else (heads, rows, cols)
            whole[argument, sizes] = whole.get((argument, sizes), 0.0) + array
        for (argument, (heads, rows, cols)), array in whole.items():
            array = parts_of(np, array, heads, rows or units, cols or array.shape[1] // heads)
            array = array.reshape(heads, -1, array.shape[1]).swapaxes(1, 2)
            products.append(Product(k, argument, array))
    biases = weights.packed[:, equations.one]
    begins, initial = begins_of(type(cell), program.states), None
    if begins:
        initial = initial_states(np, begins, program.states, [cell.params], (units,))[0]
    about = program, cell.input_size, units, _joined(products, units), biases, weights.rows
    return Step(*about, further, initial)


def _joined(products: Sequence[Product], units: int) -> list[Product]:
    """Return products in which those of one argument for slots that are neighbours are one."""
    order = [*dict.fromkeys(each.argument for each in products)]
    joined: list[Product] = []
    for each in sorted(products, key=lambda one: order.index(one.argument)):
        heads, cols, rows = each.weights.shape
        last = joined[-1] if joined else each
        end = last.slot * units + last.weights.shape[2]
        is_whole = (heads, rows, last.weights.shape[:2]) == (1, units, (1, cols))
        if is_whole and last.argument is each.argument and end == each.slot * units:
            whole = np.concatenate([last.weights, each.weights], axis=2)
            joined[-1] = last._replace(weights=whole)
        else:
            joined.append(each)
    return joined


# -- Functions ------------------------------------------------------------------------------------


def _function(module: Any, units: int) -> Function:
    """Return a function of PyTorch or ours, of so many numbers."""
    check_function(module, units)

    def param(name: str, default: float) -> Any:
        return default if getattr(module, name) is None else symbol("vector", name, 0)

    program = analyse([FUNCTIONS[title_of(module)](module, symbol("state", 0), param)])
    rows = [_array(module, row.details[0]).astype(np.float64) for row in program.rows]
    biases = np.zeros((len(program.slots), units))
    return Function(Step(program, 0, units, [], biases, rows))

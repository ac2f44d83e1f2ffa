"""The cell that computes the directional derivative of another cell.

A step ``s' = f(x, s; θ)`` has the derivative ``ṡ' = ∂f/∂x ẋ + ∂f/∂s ṡ + ∂f/∂θ θ̇``. That is a
step too, with states ``[ṡ, s]`` and input ``[x, ẋ]``. So forward-mode derivatives are a forward
pass of that cell. Its backward pass gives second derivatives (Pearlmutter, 1994), and the tangent
cell of that cell gives third derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..graph.derivatives import WithSlope, with_slopes
from ..graph.expressions import topological
from ..graph.operations import Node, Reduction, linear_map, number, symbol
from ..locks import new_lock
from ..ops.operation import Functions
from .arguments import Options
from .cell import Cell
from .definition import (
    Given,
    Hidden,
    Input,
    Scalar,
    Vector,
    bias_name,
    declared,
    further_of,
    shapes_of,
)
from .program import INPUT, CellProgram

_UNITS = "input_of_units"


class Tangent(NamedTuple):
    """A class of cells that computes another class's derivatives, and the source of parameters.

    Attributes
    ----------
    cell : type of Cell
        The class. Its states are the derivatives of all states, then the states themselves.
    names : tuple of str
        The parameters of the other cell, in that cell's order.
    inputs : frozenset of str
        The parameters that multiply the input; in this class ``[[W, 0], [Ẇ, W]]`` replaces each.
        All other parameters are unchanged, and followed by their derivatives.
    further : int
        The number of further inputs of the other cell. This class has them, then their derivatives.
    reads_units : bool
        Whether the class has an additional last parameter: the identity matrix, with twice as many
        rows and columns as units.
    """

    cell: type[Cell]
    names: tuple[str, ...]
    inputs: frozenset[str]
    further: int
    reads_units: bool


class TangentLayer(NamedTuple):
    """A layer that computes the derivative of another layer, in the functions of any library.

    *Numbers* are the parameters of each direction, the inputs and the initial states. All may have
    further axes in front, such as an axis of members.

    Attributes
    ----------
    tangent : Tangent
        The class of its cells.
    units, directions : int
        Units and directions of the other layer.
    returns_states : bool
        Whether outputs are all states, and not the first alone.
    """

    tangent: Tangent
    units: int
    directions: int
    returns_states: bool

    def joined(self, xp: Functions, numbers: Sequence[Any], slopes: Sequence[Any]) -> list[Any]:
        """Return the numbers of this layer, from the other layer's numbers and a direction."""
        (*params, x, state), (*turns, x_slope, state_slope) = numbers, slopes
        names, inputs, whole = self.tangent.names, self.tangent.inputs, list[Any]()
        for k in range(0, len(params), len(names)):
            own, derivatives = [], []
            for name, param, slope in zip(names, params[k:], turns[k:], strict=False):
                if name in inputs:
                    zeros = xp.filled(param, param.shape, 0)
                    rows = xp.concat([param, zeros], -1), xp.concat([slope, param], -1)
                    own.append(xp.concat(rows, -2))
                else:
                    own.append(param)
                    derivatives.append(slope)
            if self.tangent.reads_units:
                one = xp.eye(x, 2 * self.units)
                own.append(xp.broadcast_to(one, (*x.shape[:-3], *one.shape)))
            whole += own + derivatives
        both = zip(self._columns(x), self._columns(x_slope), strict=True)
        inputs = xp.concat([part for pair in both for part in pair], -1)
        return [*whole, inputs, xp.concat([state_slope, state], -1)]

    def _columns(self, x: Any, times: int = 1) -> list[Any]:
        """Split inputs into the input itself and the further inputs of each direction.

        In this layer all parts are twice as long: `times` is 2.
        """
        own = times * self.tangent.further * self.units
        if not own:  # a view of all has no rule for batches in PyTorch
            return [x]
        size = x.shape[-1] - self.directions * own
        ends = [size + k * own for k in range(self.directions + 1)]
        return [x[..., a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def parted(self, xp: Functions, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients in the other layer's numbers, from those in this layer's."""
        *params, x, state = grads
        names, found = self.tangent.names, list[Any]()
        size = len(names) + self.tangent.reads_units + len(set(names) - self.tangent.inputs)
        for k in range(0, len(params), size):
            for name, grad in zip(names, params[k:], strict=False):
                if name in self.tangent.inputs:
                    rows, columns = grad.shape[-2] // 2, grad.shape[-1] // 2
                    grad = grad[..., :rows, :columns] + grad[..., rows:, columns:]
                found.append(grad)
        in_x = xp.concat(list(map(_half, self._columns(x, 2))), -1)
        return [*found, in_x, state[..., state.shape[-1] // 2 :]]

    def results(self, output: Any, last: Any) -> tuple[Any, Any]:
        """Return the derivatives of the other layer's results, from this layer's results."""
        return _half(output) if self.returns_states else output, _half(last)

    def above(self, xp: Functions, in_output: Any, in_last: Any) -> tuple[Any, Any]:
        """Return gradients in this layer's results, from gradients in the derivatives."""
        if self.returns_states:
            in_output = xp.concat([in_output, xp.filled(in_output, in_output.shape, 0)], -1)
        return in_output, xp.concat([in_last, xp.filled(in_last, in_last.shape, 0)], -1)


def _half(array: Any) -> Any:
    return array[..., : array.shape[-1] // 2]


def run_layers(
    xp: Functions,
    run: Callable[[int, Options, list[Any]], tuple[Any, Any]],
    sizes: tuple[int, int, int, int],
    options: Options,
    numbers: Sequence[Any],
    between: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Run the layers of a network one by one; return outputs and last states.

    Parameters
    ----------
    xp : Functions
        The functions of a library of arrays.
    run : callable
        ``run(k, options, numbers)`` returns the outputs and the last states of a layer.
    sizes : tuple of int
        The numbers of layers, of directions and units of each, and of further inputs of a
        direction.
    options : Options
        The options of the network.
    numbers : sequence of array
        Its parameters, inputs and initial states, without further axes in front.
    between : callable, optional
        A function of the inputs of all layers except the first.
    """
    (*params, x, state), (layers, directions, units, further) = numbers, sizes
    count, rows = len(params) // layers, len(state) // layers
    lasts, every, own = [], [], directions * further * units
    inputs = x.shape[-1] - layers * own
    x, columns = (x[..., :inputs], x[..., inputs:]) if own else (x, x)
    for k in range(layers):
        x = between(x) if k and between is not None else x
        given = xp.concat([x, columns[..., k * own : (k + 1) * own]], -1) if own else x
        some = [*params[k * count : (k + 1) * count], given, state[k * rows : (k + 1) * rows]]
        x, last = run(k, options.of_layer(is_last=k + 1 == layers), some)
        lasts.append(last)
        if options.return_states == "layers":
            states = xp.moveaxis(x.reshape(*x.shape[:2], -1, directions, units), 2, 3)
            every.append(states.reshape(x.shape))
            x = x[..., : directions * units]
    return xp.concat(every, -1) if every else x, xp.concat(lasts, 0)


_lock = new_lock()
_tangents: dict[Any, Tangent] = {}


def tangent_of(cell: type[Cell], options: dict[str, Any], bias: bool) -> Tangent:
    """Return the class of cells for the derivatives of another class, with some options."""
    key = cell, tuple(options.items()), bias
    with _lock:
        found = _tangents.get(key)
        if found is None:
            found = _tangents[key] = _make(cell, cell.program_of(options, bias), bias)
        return found


def _make(cell: type[Cell], program: CellProgram, bias: bool) -> Tangent:
    parameters = declared(cell)
    names = tuple(shapes_of(cell, 1, 1, bias))
    owners = {bias_name(name): each for name, each in parameters.items() if each.biased}
    inputs = frozenset(name for name in names if isinstance(parameters.get(name), Input))
    prefix = "tangent_"
    while any(name.startswith(prefix) for name in names):
        prefix += "tangent_"
    own: dict[str, Any] = {}
    for name in names:
        each = parameters.get(name)
        if each is None:
            own[name] = Vector(*_gates("b", len(owners[name].biased)))
        elif isinstance(each, Input):
            count = each.blocks
            own[name] = Input(*_gates("v", count), *_gates("t", count), bias=False)
        else:
            own[name] = _alike(each, program)
    reads_units = any(
        INPUT in one.arguments and not (one.operation == "product" and one.details[0] in inputs)
        for one in topological(program.traced)
    ) or any(one is INPUT for one in program.traced)
    if reads_units:
        own[_UNITS] = Input("x", "t", bias=False)
    for name in names:
        if name not in inputs:
            each = parameters.get(name)
            own[prefix + name] = (
                Vector(*_gates("b", len(owners[name].biased)))
                if each is None
                else _alike(each, program)
            )

    def step(self: Any, x: Any, *states: Any) -> tuple[Node, ...]:
        return _Step(parameters, bias, program, prefix).derivative(states)

    further = further_of(cell)
    own |= {
        f"{name}{k}": Given()
        for name in ("further", "tangent_further")
        for k in range(len(further))
    }
    about = {"__module__": __name__, "__doc__": None, "states": 2 * program.states, "step": step}
    about["_trains_all"] = False  # a parameter may have no slope
    kind: type[Cell] = type(f"{cell.__name__}Tangent", (Cell,), {**about, **own})
    return Tangent(kind, names, inputs, len(further), reads_units)


def _gates(letter: str, count: int) -> list[str]:
    return [f"{letter}{k}" for k in range(count)]


def _alike(each: Any, program: CellProgram) -> Any:
    """Return a declaration like another parameter's, without a bias."""
    if isinstance(each, Hidden):
        heads, rows, cols = program.partial.get(each.name, (1, 0, 0))
        return Hidden(*each.gates, bias=False, heads=heads, rows=rows, cols=cols)
    if isinstance(each, Scalar):
        return Scalar(0.0)
    assert isinstance(each, Vector), each
    return Vector(*each.gates)


class _Step:
    """A step, and the derivatives of everything that it computes."""

    def __init__(
        self, parameters: dict[str, Any], bias: bool, program: CellProgram, prefix: str
    ) -> None:
        self._parameters, self._bias, self._traced = parameters, bias, program.traced
        self._further_grads = program.further_grads
        self._prefix = prefix  # of the names of derivatives of parameters
        self._biases = {
            (name, gate): (bias_name(name), k)
            for name, each in parameters.items()
            for k, gate in enumerate(each.biased)
        }

    def derivative(self, states: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the derivatives of the new states, then the new states."""
        count = len(self._traced)

        def rule(each: Node, arguments: Sequence[WithSlope]) -> WithSlope | None:
            if each.operation == "state":
                (k,) = each.details
                return states[count + k], states[k]
            if each.operation == "further":
                (k,) = each.details
                return each, symbol("further", k + len(self._further_grads))
            if each is INPUT:
                return linear_map((_UNITS, 0), INPUT), linear_map((_UNITS, 1), INPUT)
            if each.operation in ("vector", "scalar"):
                return self._parameter(each.operation, *each.details)
            if each.operation == "product" and not isinstance(each.details[0], Reduction):
                return self._product(each, *arguments)
            return None

        pairs = with_slopes(self._traced, rule)
        slopes = (number(0) if slope is None else slope for _, slope in pairs)
        return *slopes, *(value for value, _ in pairs)

    def _parameter(self, operation: str, name: str, gate: int) -> tuple[Node, Node]:
        names = name, self._prefix + name
        value, slope = (symbol(operation, each, gate) for each in names)
        return value, slope

    def _product(self, each: Node, argument: WithSlope) -> WithSlope:
        """Return a product and its derivative, ``W v̇ + Ẇ v``."""
        name, gate, is_transposed = each.details
        parameter = self._parameters[name]
        slope: Node | None
        if isinstance(parameter, Input):
            value = linear_map((name, gate), INPUT)
            slope = linear_map((name, parameter.blocks + gate), INPUT)
        else:
            v, v_slope = argument
            value = linear_map((name, gate), v, is_transposed)
            slope = linear_map((self._prefix + name, gate), v, is_transposed)
            if v_slope is not None:
                slope = linear_map((name, gate), v_slope, is_transposed) + slope
        place = self._biases.get((name, gate))
        if self._bias and place is not None and not is_transposed:
            added, added_slope = self._parameter("vector", *place)
            value, slope = value + added, slope + added_slope
        return value, slope
